"""Limits of the HTTP connections: a real server in this process, with short limits.

Each refusal is an event, although no handler sees it.
"""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks
from postroom.calls.server import PostToBus
from postroom.contracts.bus import Bus
from postroom.server.access.registry import Agents, Identity
from postroom.server.app import create_app
from postroom.server.http.listener import (
    FRAMING_BYTES_MAX,
    HEADERS_MAX,
    HttpServer,
    HttpTimeouts,
    ListenerConfig,
    listener_config,
)
from postroom.server.http.task_server import TaskServer
from tests.waiting import HANG_GUARD_S, until

SHORT_S = 0.2
LONG_S = 600.0
PATIENT = HttpTimeouts(LONG_S, LONG_S, LONG_S, LONG_S)


class Place:
    """A running server, and an agent's token."""

    def __init__(self, port: int, data: Path, token: str, server: TaskServer, config: ListenerConfig) -> None:
        self.port = port
        self.data = data
        self.token = token
        self.server = server
        self.config = config

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_GUARD_S)

    def answer(self, request: bytes) -> bytes:
        """Everything that the server sends to a request until it closes the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            return everything(connection)

    def refused(self, **wanted: Any) -> list[dict[str, Any]]:
        """The details of the refusals that are events and have these facts."""
        with Tasks.open(f"sqlite:///{self.data / 'queue.db'}") as tasks:
            found = [
                {**one.detail, "error_type": one.error_type, "error": one.error}
                for one in tasks.store.events()
                if one.kind == "rejected"
            ]
        return [one for one in found if wanted.items() <= one.items()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Its timeouts are so long that they end nothing, unless the test sets them before it connects."""
    token = Agents(tmp_path).add("triage")
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        app = create_app(tmp_path, tasks)
        up = threading.Event()
        config = listener_config(app, app.note_refused)
        config.timeouts = PATIENT
        server = HttpServer(config, end_waits=app.end_waits, started=up.set)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            assert up.wait(HANG_GUARD_S)
            yield Place(port, tmp_path, token, app.running_server(), config)
            server.should_exit = True
            thread.join(HANG_GUARD_S)
    assert not thread.is_alive()


def everything(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65_536):
        received += data
    return received


def test_a_connection_without_a_request_is_closed(place: Place) -> None:
    place.config.timeouts = PATIENT._replace(first_request_s=SHORT_S)
    with place.connect() as connection:
        assert everything(connection) == b""


def test_an_idle_anonymous_connection_is_closed(place: Place) -> None:
    place.config.timeouts = PATIENT._replace(first_request_s=SHORT_S)
    with place.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert everything(connection).endswith(b'{"status":"ok"}')


HALF_A_BODY = b"POST /queue/next HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("part", [b"GET /hea", HALF_A_BODY])
def test_a_request_that_does_not_end_is_refused(place: Place, part: bytes) -> None:
    place.config.timeouts = PATIENT._replace(request_s=SHORT_S)
    answer = place.answer(part % place.token.encode() if b"%b" in part else part)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"] == "TooSlow"
    until(lambda: place.refused(status=408, call="request"))
    [event] = place.refused(status=408)
    assert event["address"].startswith("127.0.0.1:")
    assert event.get("who", "") == ("triage" if part is HALF_A_BODY else "")


CHUNKED = b"POST /queue/next HTTP/1.1\r\nAuthorization: Bearer %b\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = {
    400: b"this is not HTTP\r\n\r\n",
    413: CHUNKED + b"1;" + b"x" * (FRAMING_BYTES_MAX + 100),
    431: b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * (HEADERS_MAX + 1) + b"\r\n",
}


@pytest.mark.parametrize("status", REFUSED)
def test_a_request_that_is_refused_before_it_has_a_route_is_an_event(place: Place, status: int) -> None:
    answer = place.answer(REFUSED[status].replace(b"%b", place.token.encode()))
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    until(lambda: place.refused(status=status, call="request", via="http"))
    assert place.refused()[0]["error"] == json.loads(answer.partition(b"\r\n\r\n")[2])["message"]


def test_a_connection_above_the_limit_is_refused_with_an_event(place: Place) -> None:
    place.config.connections.anonymous_an_address_max = 1
    with place.connect() as first, place.connect():
        assert everything(first).startswith(b"HTTP/1.1 503")
    until(lambda: place.refused(status=503, call="connect"))


def test_a_flood_of_refusals_over_new_connections_is_summed(place: Place) -> None:
    place.server.refusals.window_s = 1.0
    for _ in range(20):
        assert place.answer(REFUSED[400]).startswith(b"HTTP/1.1 400")
    until(lambda: sum(one.get("refused", 1) for one in place.refused(status=400)) == 20)
    assert len(place.refused(status=400)) < 20


def test_a_waiting_call_whose_token_is_removed_is_an_event(place: Place) -> None:
    body = b'{"wait_s":1}'
    head = f"POST /queue/next HTTP/1.1\r\nAuthorization: Bearer {place.token}\r\nContent-Length: {len(body)}"
    with place.connect() as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: place.server.long_polls.count)
        Agents(place.data).remove("triage")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
    until(lambda: place.refused(status=401, who="triage", call="POST /queue/next"))


def test_a_stream_whose_token_is_removed_is_an_event(place: Place) -> None:
    head = f"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {place.token}\r\n\r\n"
    with place.connect() as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        Agents(place.data).remove("triage")
        until(lambda: place.refused(status=401, who="triage", call="GET /events"))
    [event] = place.refused(status=401)
    assert event["error"] == "the token or session of an open stream has ended"


def test_a_connection_with_an_unread_reply_is_aborted(place: Place) -> None:
    place.config.timeouts = PATIENT._replace(write_s=SHORT_S)
    note = PostToBus(bus="long", type="INFO", project_id="p")
    place.server.buses.append(note, Identity("triage", "agent"))
    bus = Bus(place.data / "buses" / "long.yaml")
    bus.append_many([{"type": "INFO", "project_id": "p", "body": "x" * 1_000_000}] * 8)
    request = f"GET /bus/long/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {place.token}\r\n\r\n"
    with place.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.sendall(request.encode())
        until(lambda: is_closed(connection))
    until(lambda: place.refused(status=408, call="reply", who="triage"))


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection: then nothing can be sent."""
    try:
        connection.sendall(b"\r\n")
    except ConnectionError:
        return True
    return False
