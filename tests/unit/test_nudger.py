import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from postroom.errors import InvalidMessage
from postroom.server.access.nudge_urls import URL_CHARS_MAX, Target, parse_url
from postroom.server.harness.nudger import (
    STATUS_LINE_BYTES_MAX,
    WAITING_MAX,
    Nudger,
    NudgeRefused,
    is_public,
)
from tests.waiting import HANG_GUARD_S

OK = b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"


class Agent(NamedTuple):
    """A listening socket, and every request that it received."""

    port: int
    requests: list[bytes]
    came: threading.Event


@contextmanager
def listening(answer: bytes | None = OK) -> Iterator[Agent]:
    """An agent that answers every request with the same bytes; with None it does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = Agent(server.getsockname()[1], [], threading.Event())
        open_ones: list[socket.socket] = []

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                open_ones.append(connection)
                agent.requests.append(connection.recv(65_536))
                agent.came.set()
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield agent
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in open_ones:
            connection.close()


def nudger(**options: float) -> Nudger:
    return Nudger(allowed_hosts=["127.0.0.1", "localhost"], **options)  # type: ignore[arg-type]


def test_a_nudge_carries_the_id_and_nothing_else() -> None:
    with listening() as agent:
        nudger().send(f"http://127.0.0.1:{agent.port}/base/", "task-1")
    head, _, body = agent.requests[0].partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"POST /base/task HTTP/1.1"
    assert f"host: 127.0.0.1:{agent.port}".encode() in head.lower()
    assert json.loads(body) == {"task_id": "task-1"}
    assert b"authorization" not in head.lower()


def test_a_nudge_is_sent_in_the_background() -> None:
    failures: list[str] = []
    with listening() as agent:
        sender = Nudger(allowed_hosts=["127.0.0.1"], report=lambda *facts: failures.append(str(facts)))
        sender.nudge("triage", f"http://127.0.0.1:{agent.port}", "task-1")
        assert agent.came.wait(HANG_GUARD_S)
        sender.close()
    assert failures == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}",
        "http://localhost:{port}",
        "http://2130706433:{port}",
        "http://0x7f.1:{port}",
        "http://[::ffff:127.0.0.1]:{port}",
        "http://0.0.0.0:{port}",
        "http://169.254.169.254",
        "http://10.1.2.3",
        "http://192.168.0.1",
        "http://172.16.0.1",
        "http://100.100.100.200",
        "http://168.63.129.16",
        "http://[::1]:{port}",
        "http://[fe80::1]",
        "http://[fd00:ec2::254]",
        "http://[64:ff9b::7f00:1]",
    ],
)
def test_a_private_address_is_refused_unless_its_host_is_listed(url: str) -> None:
    with listening() as agent:
        sender = Nudger(allowed_hosts=["agents.example"], timeout_s=1.0)
        with pytest.raises((NudgeRefused, socket.gaierror)):
            sender.send(url.format(port=agent.port), "task-1")
        assert agent.requests == []


def test_a_listed_host_may_be_private() -> None:
    with listening() as agent:
        Nudger(allowed_hosts=["LOCALHOST"]).send(f"http://localhost:{agent.port}", "task-1")
        assert len(agent.requests) == 1


def test_the_list_names_hosts_and_not_addresses() -> None:
    """A host name that resolves to a private address is not covered by an entry for that address."""
    with listening() as agent, pytest.raises(NudgeRefused):
        Nudger(allowed_hosts=["127.0.0.1"]).send(f"http://localhost:{agent.port}", "task-1")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 - nothing is bound to it
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::a00:1", False),
        ("ff02::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_a_name_with_a_public_and_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(NudgeRefused, match=r"127\.0\.0\.1"):
        Nudger().resolve(parse_url("http://agents.example"))


def test_a_host_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name that later resolves to another address does not redirect the nudge."""
    answers = iter(["127.0.0.1", "192.0.2.1"])
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolved(host: str, port: int, *rest: int, **options: int) -> object:
        if host != "agents.example":
            return real(host, port, *rest, **options)
        asked.append(host)
        return real(next(answers), port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with listening() as agent:
        Nudger(allowed_hosts=["agents.example"]).send(f"http://agents.example:{agent.port}", "task-1")
        assert len(agent.requests) == 1
    assert asked == ["agents.example"]
    assert f"Host: agents.example:{agent.port}".encode() in agent.requests[0]


def test_no_redirect_is_followed() -> None:
    with listening() as elsewhere:
        there = b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:%d/task\r\n\r\n" % elsewhere.port
        with listening(there) as agent, pytest.raises(NudgeRefused, match="307"):
            nudger().send(f"http://127.0.0.1:{agent.port}", "task-1")
        assert elsewhere.requests == []


@pytest.mark.parametrize("answer", [b"", b"hello", b"HTTP/1.1 abc\r\n", b"x" * 2 * STATUS_LINE_BYTES_MAX])
def test_a_reply_that_is_not_http_is_refused(answer: bytes) -> None:
    with listening(answer) as agent, pytest.raises(NudgeRefused, match="HTTP"):
        nudger().send(f"http://127.0.0.1:{agent.port}", "task-1")


def test_a_silent_agent_runs_into_the_timeout() -> None:
    with listening(None) as agent, pytest.raises(TimeoutError):
        nudger(timeout_s=0.2).send(f"http://127.0.0.1:{agent.port}", "task-1")


def test_a_failed_nudge_is_reported_and_harmless() -> None:
    failures: list[tuple[str, str, str]] = []
    came = threading.Event()

    def report(agent: str, task_id: str, reason: str) -> None:
        failures.append((agent, task_id, reason))
        came.set()

    sender = Nudger(report=report)
    sender.nudge("triage", "http://127.0.0.1:1", "task-1")
    assert came.wait(HANG_GUARD_S)
    sender.close()
    [(agent, task_id, reason)] = failures
    assert (agent, task_id) == ("triage", "task-1")
    assert "127.0.0.1" in reason
    assert sender.failed == 1


def test_waiting_nudges_have_a_limit() -> None:
    failures: list[str] = []
    sender = Nudger(
        allowed_hosts=["127.0.0.1"], timeout_s=0.2, report=lambda agent, *_: failures.append(agent)
    )  # fmt: skip
    with listening(None) as agent:
        for number in range(WAITING_MAX + 50):
            sender.nudge(f"agent-{number}", f"http://127.0.0.1:{agent.port}", "task-1")
        sender.close()
    assert 40 < len(failures) < WAITING_MAX


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "ftp://example.com",
        "gopher://example.com",
        "file:///etc/passwd",
        "http://",
        "http:///path",
        "http://user@example.com",
        "http://user:secret@example.com",
        "http://example.com:0",
        "http://example.com:99999",
        "http://example.com/?q=1",
        "http://example.com/#part",
        "http://example.com/\r\nX-Header: 1",
        "http://exämple.com",
        "http://[::1",
        "http://h/" + "x" * URL_CHARS_MAX,
        5,
    ],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidMessage):
        parse_url(url)


def test_the_parts_of_an_address() -> None:
    assert parse_url("https://Agents.example/base/") == Target("https", "agents.example", 443, "/base")
    assert parse_url("http://[2001:db8::1]:8080") == Target("http", "2001:db8::1", 8080, "")
    assert parse_url("http://[2001:db8::1]:8080").authority == "[2001:db8::1]:8080"
    assert parse_url("http://agents.example:80").authority == "agents.example"
