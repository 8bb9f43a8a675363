"""Long polls and streams of a token that is revoked: they end at once, and give back what they hold."""

import contextlib
import json
import select
import socket
from collections.abc import Iterator

import pytest

from postroom.calls.fields import WAIT_S_MAX
from postroom.server.access.tokens import TokenRegistry
from tests.integration.servers import Server, serving
from tests.integration.test_http_limits import connected, head, health, received
from tests.waiting import HANG_GUARD_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("revoked") / "data") as running:
        yield running


class Tokened:
    """A token of an agent, and how to end it."""

    def __init__(self, server: Server, agent: str) -> None:
        self._server = server
        made = TokenRegistry(server.data).create("agent", "acme", agent)
        self.token_id = made.token_id
        server.tokens[agent] = made.token

    def revoke(self) -> None:
        TokenRegistry(self._server.data).revoke(self.token_id)


def opened(
    server: Server, stack: contextlib.ExitStack, who: str, method: str, path: str, body: object = None
) -> socket.socket:
    """A call that the server has read and not answered."""
    raw = b"" if body is None else json.dumps(body).encode()
    connection = stack.enter_context(connected(server))
    length = b"Content-Length: %d\r\n\r\n" % len(raw)
    connection.sendall(head(method, path, server.tokens[who]) + length + raw)
    assert health(server) == 200
    return connection


def is_answered(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


@pytest.mark.parametrize("call", ["next", "task", "message", "request"])
def test_a_long_poll_ends_with_its_token_before_an_older_one_ends(server: Server, call: str) -> None:
    """The older poll of another token would end first, if the revoked one waited for its time."""
    gone = Tokened(server, f"gone-{call}")
    who, message = f"gone-{call}", {"type": "tool_call", "payload": {}, "delay_s": 3600}
    task_id = server.enqueue(who, delay_s=3600, task_id=f"waiting-{call}")
    message_id = server.post(who, "/engine/messages", **message).json["message_id"]
    calls: dict[str, tuple[str, str, object]] = {
        "next": ("POST", "/queue/next", {"wait_s": WAIT_S_MAX}),
        "task": ("GET", f"/tasks/{task_id}?wait_s={WAIT_S_MAX}", None),
        "message": ("GET", f"/engine/messages/{message_id}?wait_s={WAIT_S_MAX}", None),
        "request": ("POST", "/engine/request", {**message, "timeout_s": WAIT_S_MAX}),
    }
    with contextlib.ExitStack() as stack:
        older = opened(server, stack, "review", "POST", "/queue/next", {"wait_s": WAIT_S_MAX})
        poll = opened(server, stack, who, *calls[call])
        assert not is_answered(poll)
        gone.revoke()
        answer = received(poll)
        assert (answer.status, answer.json["message"]) == (401, "the token has expired or was revoked")
        assert not is_answered(older)


def test_a_revoked_token_of_an_admin_over_http_ends_its_polls(server: Server) -> None:
    gone = Tokened(server, "gone-http")
    server.tokens["admin"] = TokenRegistry(server.data).create("admin").token
    with contextlib.ExitStack() as stack:
        older = opened(server, stack, "review", "POST", "/queue/next", {"wait_s": WAIT_S_MAX})
        poll = opened(server, stack, "gone-http", "POST", "/queue/next", {"wait_s": WAIT_S_MAX})
        assert server.post("admin", f"/tokens/{gone.token_id}/revoke").status == 202
        assert received(poll).status == 401
        assert not is_answered(older)


def test_a_stream_ends_with_its_token(server: Server) -> None:
    gone = Tokened(server, "gone-stream")
    with contextlib.ExitStack() as stack:
        stream = opened(server, stack, "gone-stream", "GET", "/events")
        stream.settimeout(HANG_GUARD_S)
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        gone.revoke()
        while b"0\r\n\r\n" not in (data := stream.recv(0x10000)):
            assert data
