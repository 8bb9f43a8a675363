"""Timeouts of the HTTP connections: a real server in this process, with short limits."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.contracts.bus import Bus
from postroom.runtime import listener
from postroom.runtime.agents import Agents
from postroom.runtime.http import create_app
from postroom.runtime.listener import HttpServer, listener_config
from tests.integration.servers import HANG_GUARD_S
from tests.waiting import until

SHORT_S = 0.2
LONG_S = 600.0


class Place:
    """A running server, and an agent's token."""

    def __init__(self, port: int, data: Path, token: str) -> None:
        self.port = port
        self.data = data
        self.token = token

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_GUARD_S)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Its limits are as patched when the test connects."""
    token = Agents(tmp_path).add("triage")
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        app = create_app(tmp_path, tasks)
        up = threading.Event()
        server = HttpServer(listener_config(app), end_waits=app.end_waits, started=up.set)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            assert up.wait(HANG_GUARD_S)
            yield Place(port, tmp_path, token)
            server.should_exit = True
            thread.join(HANG_GUARD_S)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other limits are so long that they end nothing."""
    for name in ("FIRST_REQUEST_S", "REQUEST_TIMEOUT_S", "WRITE_TIMEOUT_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(listener, name, LONG_S)


def everything(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65_536):
        received += data
    return received


def test_a_connection_without_a_request_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_REQUEST_S", SHORT_S)
    with place.connect() as connection:
        assert everything(connection) == b""


def test_an_idle_anonymous_connection_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_REQUEST_S", SHORT_S)
    with place.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert everything(connection).endswith(b'{"status":"ok"}')


HALF_A_BODY = b"POST /queue/next HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("part", [b"GET /hea", HALF_A_BODY])
def test_a_request_that_does_not_end_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(listener, "REQUEST_TIMEOUT_S", SHORT_S)
    with place.connect() as connection:
        connection.sendall(part % place.token.encode() if b"%b" in part else part)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"] == "TooSlow"


def test_a_connection_with_an_unread_reply_is_aborted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "WRITE_TIMEOUT_S", SHORT_S)
    bus = Bus(place.data / "buses" / "long.yaml")
    bus.append_many([{"type": "INFO", "project_id": "p", "body": "x" * 1_000_000}] * 8)
    request = f"GET /bus/long/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {place.token}\r\n\r\n"
    with place.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.sendall(request.encode())
        until(lambda: is_closed(connection))


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection: then nothing can be sent."""
    try:
        connection.sendall(b"\r\n")
    except ConnectionError:
        return True
    return False
