"""Hostile clients of the task server, a real process: they are refused, and others are not affected."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.calls.fields import SMALL_BODY_BYTES_MAX
from postroom.core.formats.jsoninput import JSON_ELEMENTS_MAX
from postroom.server.http.connections import FILES_RESERVED, ConnectionLimits
from postroom.server.http.listener import (
    DISCARDED_BYTES_MAX,
    FRAMING_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
)
from postroom.server.http.task_server import POLLS_A_TOKEN_MAX, STREAMS_A_TOKEN_MAX
from tests.integration.servers import Answer, Server, serving
from tests.waiting import HANG_GUARD_S, until

PIECE = 0x10000
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("limits") / "data") as running:
        yield running


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as connection:
        yield connection


def head(method: str, path: str, token: str = "") -> bytes:
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{shown}".encode()


def everything(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(PIECE):
            received += data
    return received


def parsed(raw: bytes) -> Answer:
    """The first reply in the bytes of a server."""
    first, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = first.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    answer = Answer(int(status.split()[1]), headers, rest)
    return answer._replace(body=rest[: _length(answer)])


def received(connection: socket.socket) -> Answer:
    """The next reply on a connection that stays open."""
    raw = b""
    while b"\r\n\r\n" not in raw or len(parsed(raw).body) < _length(parsed(raw)):
        raw += connection.recv(PIECE)
    return parsed(raw)


def _length(answer: Answer) -> int:
    return int(answer.headers.get("content-length", "0"))


def answered(server: Server, *pieces: bytes) -> Answer:
    """The reply to raw bytes, after which the server has closed the connection."""
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        return parsed(everything(connection))


def sent_until_closed(connection: socket.socket, piece: bytes, bytes_max: int) -> int:
    """How many bytes the server reads before it closes the connection; at most `bytes_max`."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < bytes_max:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def health(server: Server) -> int:
    return server.get(None, "/health").status


# ---- the bytes of a request ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/queue/next", "/tasks/x/cancel"])
def test_a_trailer_is_refused_and_authenticates_nobody(server: Server, path: str) -> None:
    trailer = f"Authorization: Bearer {server.tokens['boss']}\r\n\r\n".encode()
    for token in ("", server.tokens["boss"]):
        request = head("POST", path, token) + CHUNKED + b"2\r\n{}\r\n0\r\n"
        answer = answered(server, request + trailer)
        assert (answer.status, answer.json["error"]) == (400, "BadRequest")
        assert answer.headers["connection"] == "close"


def test_a_request_with_a_trailer_changes_nothing(server: Server) -> None:
    task_id = server.enqueue("review")
    request = head("POST", f"/tasks/{task_id}/cancel", server.tokens["boss"]) + CHUNKED
    assert answered(server, request + b"0\r\nX: y\r\n\r\n").status == 400
    assert server.get("boss", f"/tasks/{task_id}").json["status"] == "pending"
    with connected(server) as connection:  # in two pieces: the request is acted on when it is complete
        connection.sendall(request)
        assert health(server) == 200
        connection.sendall(b"0\r\nX: y\r\n\r\n")
        assert parsed(everything(connection)).status == 400
    assert server.get("boss", f"/tasks/{task_id}").json["status"] == "pending"


@pytest.mark.parametrize("who", ["", "triage"])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"X-Trailer: " + b"x" * 4_000 + b"\r\n"),
        (b"0\r\nX-Trailer: ", b"x" * PIECE),
        (b"1;x=", b"x" * PIECE),
        (b"", b"1\r\n \r\n" * 10_000),
        (b"", b"10000\r\n" + b" " * PIECE + b"\r\n"),
    ],
    ids=["trailers", "one trailer", "extension", "tiny chunks", "body"],
)
def test_every_part_of_a_request_has_a_limit(server: Server, who: str, begin: bytes, piece: bytes) -> None:
    most = DISCARDED_BYTES_MAX + FRAMING_BYTES_MAX + SMALL_BODY_BYTES_MAX
    socket_buffers = 16 * 1024 * 1024
    with connected(server) as connection:
        connection.sendall(head("POST", "/queue/next", server.tokens.get(who, "")) + CHUNKED + begin)
        assert sent_until_closed(connection, piece, 2 * (most + socket_buffers)) < most + socket_buffers
    assert health(server) == 200


def test_the_sender_of_a_refused_body_gets_the_reason(server: Server) -> None:
    body = b"Content-Length: 2000000\r\n\r\n" + b" " * 2_000_000
    for token, status in (("", 401), (server.tokens["triage"], 413)):
        answer = answered(server, head("POST", "/queue/next", token) + body)
        assert answer.status == status
        assert answer.headers["connection"] == "close"


def test_a_request_refused_before_it_has_arrived_closes_its_connection(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(head("POST", "/queue/next") + b"Content-Length: 1000000\r\n\r\n")
        assert parsed(everything(connection)).status == 401


def test_a_long_body_in_pieces_leaves_the_connection_open(server: Server) -> None:
    body = b'{"limit": 1' + b" " * 50_000 + b"}"
    begin = head("POST", "/queue/next", server.tokens["triage"])
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(begin + b"Content-Length: %d\r\n\r\n" % len(body) + body[:100])
            assert health(server) == 200
            connection.sendall(body[100:])
            answer = received(connection)
            assert answer.status == 204
            assert "connection" not in answer.headers


def test_continue_is_sent_only_when_the_body_is_accepted(server: Server) -> None:
    expecting = b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head("POST", "/queue/next", server.tokens["triage"]) + expecting)
        assert connection.recv(PIECE).startswith(b"HTTP/1.1 100")
        connection.sendall(b"{}")
        assert received(connection).status == 204
    assert answered(server, head("POST", "/queue/next") + expecting).status == 401


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(server: Server) -> None:
    request = head("GET", "/health") + b"\r\n"
    with connected(server) as connection:
        connection.sendall(request * 10 + head("GET", "/health") + b"Connection: close\r\n\r\n")
        assert everything(connection).count(b'{"status":"ok"}') == 11
    with connected(server) as connection:
        connection.sendall(request * (100 * PIPELINED_MAX))
        answers = everything(connection)
    assert answers.count(b'{"status":"ok"}') == PIPELINED_MAX + 1
    last = parsed(answers[answers.rindex(b"HTTP/1.1 ") :])
    assert (last.status, last.json["error"]) == (429, "TooMany")
    assert last.headers["connection"] == "close"
    assert health(server) == 200


def test_requests_pipelined_after_a_long_poll_wait_up_to_a_limit(server: Server) -> None:
    body = b'{"wait_s": 30}'
    poll = head("POST", "/queue/next", server.tokens["review"]) + b"Content-Length: %d\r\n\r\n" % len(body)
    while server.post("review", "/queue/next").status == 200:  # left by other tests
        pass
    with connected(server) as connection:
        connection.sendall(poll + body)
        assert health(server) == 200
        connection.sendall((head("GET", "/health") + b"\r\n") * (10 * PIPELINED_MAX))
        assert health(server) == 200
        task_id = server.enqueue("review")
        answers = everything(connection)
    assert parsed(answers).json["task_id"] == task_id
    assert answers.count(b'{"status":"ok"}') == PIPELINED_MAX
    assert parsed(answers[answers.rindex(b"HTTP/1.1 ") :]).status == 429


def test_the_headers_of_a_request_are_counted(server: Server) -> None:
    short = b"a:b\r\n" * HEADERS_MAX
    assert answered(server, head("GET", "/health") + short + b"\r\n").status == 431
    with connected(server) as connection:
        connection.sendall(head("GET", "/health") + short[:-5] + b"\r\n")
        assert received(connection).status == 200


def test_the_head_of_a_pipelined_request_is_counted(server: Server) -> None:
    long = head("GET", "/health") + b"X: %b\r\n\r\n" % (b"x" * HEAD_BYTES_MAX)
    with connected(server) as connection:
        connection.sendall(head("GET", "/health") + b"\r\n" + long)
        assert b"x" * 100 not in everything(connection)


# ---- every answer is JSON --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /queue/next HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /queue/next HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /queue/next HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    ],
)
def test_malformed_http_is_refused_in_json(server: Server, raw: bytes) -> None:
    answer = answered(server, raw)
    assert (answer.status, answer.json["error"]) == (400, "BadRequest")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "lines",
    [
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding:",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Content-Length: 2\r\nTransfer-Encoding: gzip",
        "Content-Length: 2\r\nContent-Length: 2",
    ],
)
def test_ambiguous_body_framing_is_refused(server: Server, lines: str) -> None:
    task_id = server.enqueue("review")
    for body in (b"0\r\n\r\n", b"{}"):
        request = head("POST", f"/tasks/{task_id}/cancel", server.tokens["boss"])
        answer = answered(server, request + lines.encode() + b"\r\n\r\n" + body)
        assert (answer.status, answer.json["error"]) == (400, "BadRequest")
        assert answer.headers["connection"] == "close"
    assert server.get("boss", f"/tasks/{task_id}").json["status"] == "pending"


@pytest.mark.parametrize("value", ["chunked", "Chunked"])
def test_a_body_in_chunks_is_read(server: Server, value: str) -> None:
    request = (
        head("POST", "/queue/next", server.tokens["triage"]) + f"Transfer-Encoding: {value}\r\n".encode()
    )
    with connected(server) as connection:
        connection.sendall(request + b"\r\n2\r\n{}\r\n0\r\n\r\n")
        assert received(connection).status == 204


@pytest.mark.parametrize("path", ["/queue/status/", "/health/", "//health", "*", "/tasks/a/b/c"])
def test_an_unknown_path_is_refused_in_json(server: Server, path: str) -> None:
    answer = answered(server, head("GET", path) + b"Connection: close\r\n\r\n")
    assert (answer.status, answer.json["error"]) == (404, "NotFound")


def test_an_upgrade_request_is_ignored(server: Server) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head("GET", "/health") + upgrade)
        assert received(connection).json == {"status": "ok"}


# ---- JSON that is nested too deeply ----------------------------------------------------------------


@pytest.mark.parametrize("depth", [5_000, 1_000_000])
def test_deeply_nested_json_is_one_refused_request(server: Server, depth: int) -> None:
    task_id = server.enqueue("triage")
    task = server.claim("triage")
    nested = b"[" * (depth // 2) + b"]" * (depth // 2)
    objects = b'{"a":' * (depth // 10) + b"1" + b"}" * (depth // 10)
    word = b'{"task_id": "%b", "lease": %d, "decision": ' % (task_id.encode(), task["lease"])
    for value in (nested, b"[" * depth, objects):
        for who, path, raw in (
            ("triage", "/queue/complete", word + value + b"}"),
            ("boss", "/queue/enqueue", b'{"agent": "triage", "payload": ' + value + b"}"),
            ("boss", "/queue/enqueue", b'{"tasks": [{"agent": "triage", "payload": ' + value + b"}]}"),
        ):
            answer = server.send(who, "POST", path, raw=raw)
            assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")
            assert "nested" in answer.json["message"]
        assert server.send("triage", "POST", "/bus/deep/messages", raw=value).status == 400
    server.post("triage", "/queue/release", task_id=task_id, lease=task["lease"])


# ---- JSON of too many elements ---------------------------------------------------------------------


@pytest.mark.parametrize("one", [b"{}", b"1", b'"f":1'], ids=["objects", "numbers", "fields"])
def test_a_body_of_too_many_elements_is_refused(server: Server, one: bytes) -> None:
    many = b",".join([one] * JSON_ELEMENTS_MAX)
    value = b"{%b}" % many if b":" in one else b"[%b]" % many
    for path, raw in (
        ("/queue/enqueue", b'{"agent": "triage", "payload": %b}' % value),
        ("/queue/enqueue", b'{"tasks": %b}' % value),
        ("/engine/messages", b'{"org_id": "acme", "type": "tool_call", "payload": {"a": %b}}' % value),
        ("/engine/messages", b'{"a": %b}' % value),
        ("/engine/request", b'{"org_id": "acme", "type": "tool_call", "payload": {"a": %b}}' % value),
        ("/bus/deep/messages", b'{"type": %b}' % value),
    ):
        answer = server.send("boss", "POST", path, raw=raw)
        assert (answer.status, answer.json["error"]) == (400, "InvalidMessage"), path
        assert answer.json["message"].startswith("the body has more than 200000 JSON elements")


def test_many_unknown_fields_are_refused_by_their_number(server: Server) -> None:
    fields = {f"f{number}": 1 for number in range(JSON_ELEMENTS_MAX // 3)}
    answer = server.post("boss", "/engine/messages", org_id="acme", type="tool_call", payload={}, **fields)
    assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")
    assert answer.json["message"] == "a message has at most 64 fields that are not known"


def test_a_long_body_of_few_elements_is_stored(server: Server) -> None:
    payload = {"text": ", [{:" * JSON_ELEMENTS_MAX}
    answer = server.post("boss", "/engine/messages", org_id="acme", type="tool_call", payload=payload)
    stored = server.get("boss", f"/engine/messages/{answer.json['message_id']}").json
    assert stored["message"]["payload"] == payload


# ---- shares ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def many(server: Server, count: int, raw: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that have all sent the same bytes."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(connected(server)))
            opened[-1].sendall(raw)
        yield opened


def test_streams_of_one_agent_leave_room_for_others(server: Server) -> None:
    stream = head("GET", "/events", server.tokens["triage"]) + b"\r\n"
    with many(server, STREAMS_A_TOKEN_MAX, stream) as opened:
        for connection in opened:
            assert received(connection).status == 200
        refused = server.get("triage", "/events")
        assert (refused.status, refused.json["error"]) == (429, "TooMany")
        assert int(refused.headers["retry-after"]) >= 1
        for who in ("review", "boss"):
            with server.stream(who, "/events"):
                pass

    def opens_again() -> bool:
        with many(server, 1, stream) as [connection]:
            return received(connection).status == 200

    until(opens_again)


def test_long_polls_of_one_agent_leave_room_for_others(server: Server) -> None:
    body = b'{"wait_s": 30}'
    server.tokens["poller"] = server.agents.add("poller")
    server.enqueue("poller")
    held = server.claim("poller")
    poll = head("POST", "/queue/next", server.tokens["poller"]) + b"Content-Length: %d\r\n\r\n" % len(body)
    with many(server, POLLS_A_TOKEN_MAX, poll + body):
        refused = server.post("poller", "/queue/next", wait_s=30)
        assert (refused.status, refused.json["error"]) == (429, "TooMany")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("poller", f"/tasks/{held['task_id']}?wait_s=30").status == 429
        assert server.post("poller", "/queue/next").status == 204
        server.enqueue("triage")
        assert server.claim("triage", wait_s=30)


@pytest.fixture
def plenty_of_descriptors() -> Iterator[int]:
    """As many descriptors as the system allows this process; the soft limit is usually 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_soft_limit_of_descriptors_is_raised(tmp_path: Path, plenty_of_descriptors: int) -> None:
    soft = 600
    with serving(tmp_path / "data", descriptors=(soft, plenty_of_descriptors)) as server:
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == plenty_of_descriptors
        with many(server, soft):
            assert server.get("boss", "/queue/status").status == 200
            assert server.post("triage", "/queue/next").status == 204


def test_connections_have_shares_where_there_are_few_descriptors(tmp_path: Path) -> None:
    room = ConnectionLimits(64)
    limit = FILES_RESERVED + 64
    with serving(tmp_path / "data", descriptors=(limit, limit)) as server:
        with many(server, limit) as idle:
            refused = parsed(everything(idle[0]))
            assert (refused.status, refused.json["error"]) == (503, "Unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert server.get("boss", "/queue/status").status == 200
            asking = head("GET", "/queue/status", server.tokens["triage"]) + b"\r\n"
            with many(server, room.each_max, asking) as opened:
                assert {received(connection).status for connection in opened} == {200}
                refused = server.get("triage", "/queue/status")
                assert (refused.status, refused.json["error"]) == (429, "TooMany")
                assert refused.headers["connection"] == "close"
                assert server.get("review", "/queue/status").status == 200
                assert server.get("boss", "/queue/status").status == 200
        assert server.get("triage", "/queue/status").status == 200
