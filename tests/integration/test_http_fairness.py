"""One token floods the task server, as a real process: the calls of others are served between its calls."""

import contextlib
import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.calls.fields import ENQUEUE_MANY_MAX
from postroom.server.http.writer import TURN_MAX
from tests.integration.servers import Server, serving
from tests.integration.test_http_limits import connected, head, health, received
from tests.waiting import HANG_GUARD_S

ROUNDS_MAX = 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as running:
        running.tokens["flood"] = running.agents.add("flood", may_send_to=["sink"])
        yield running


@contextlib.contextmanager
def held_store(server: Server) -> Iterator[None]:
    """Another process holds the lock of the store, so no write of the server completes meanwhile."""
    holds, release = threading.Event(), threading.Event()

    def hold(tasks: Tasks) -> None:
        def wait(_: object) -> None:
            holds.set()
            release.wait(HANG_GUARD_S)

        tasks.store.write(wait)

    with server.tasks() as tasks:
        thread = threading.Thread(target=hold, args=(tasks,))
        thread.start()
        holds.wait(HANG_GUARD_S)
        try:
            yield
        finally:
            release.set()
            thread.join()


def request(server: Server, who: str, path: str, body: object) -> bytes:
    raw = json.dumps(body).encode()
    return head("POST", path, server.tokens[who]) + b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)


def begun(server: Server, stack: contextlib.ExitStack, count: int, raw: bytes) -> list[socket.socket]:
    """Requests that the server has read and not answered."""
    opened = [stack.enter_context(connected(server)) for _ in range(count)]
    for connection in opened:
        connection.sendall(raw)
    assert health(server) == 200
    return opened


ONE = {"agent": "sink", "payload": 1}
MANY = {"tasks": [ONE] * ENQUEUE_MANY_MAX}


@pytest.mark.parametrize(
    ("flood", "count", "behind_min"),
    [(ONE, 3 * TURN_MAX, TURN_MAX // 2), (MANY, 30, 15 * ENQUEUE_MANY_MAX)],
    ids=["small calls", "large calls"],
)
def test_a_flood_of_calls_does_not_delay_other_tokens(
    server: Server, flood: object, count: int, behind_min: int
) -> None:
    with contextlib.ExitStack() as stack:
        with held_store(server):
            flooding = begun(server, stack, count, request(server, "flood", "/queue/enqueue", flood))
            [mine] = begun(server, stack, 1, request(server, "boss", "/queue/enqueue", {**ONE, "agent": "x"}))
        assert received(mine).status == 201
        assert {received(connection).status for connection in flooding} == {201}
    with server.tasks() as tasks:
        [stored] = tasks.find(agent="x")
        assert len(tasks.find(agent="sink", after=stored.seq, limit=100_000)) >= behind_min


def test_waiting_calls_of_one_agent_are_limited_to_its_share(server: Server) -> None:
    large = request(server, "flood", "/queue/enqueue", MANY)
    with contextlib.ExitStack() as stack:
        with held_store(server):
            flood = begun(server, stack, 80, large)
            [other] = begun(server, stack, 1, request(server, "triage", "/queue/next", {}))
            [boss] = begun(server, stack, 1, request(server, "boss", "/queue/enqueue", ONE))
        assert received(other).status == 204
        assert received(boss).status == 201
        answers = [received(connection) for connection in flood]
    counts = Counter(answer.status for answer in answers)
    assert set(counts) == {201, 429}
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.json["error"] == "TooMany"
    assert "'flood' may have at most" in refused.json["message"]
    assert int(refused.headers["retry-after"]) >= 1
    with server.tasks() as tasks:
        assert tasks.status().agents["sink"].depth == counts[201] * ENQUEUE_MANY_MAX + 1


# ---- reads -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def flood_of_reads(server: Server) -> Iterator[list[socket.socket]]:
    """Requests of one agent that each read all its tasks and find none."""
    look = head("GET", "/tasks?state=DEAD_LETTER", server.tokens["flood"]) + b"\r\n"
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connected(server)) for _ in range(100)]
        for connection in opened:
            connection.sendall(look)
        yield opened
        assert {received(connection).status for connection in opened} == {200}


def unanswered(connections: list[socket.socket]) -> int:
    return len(connections) - len(select.select(connections, [], [], 0)[0])


def goes_first(server: Server, call: Callable[[], int]) -> bool:
    """Whether a call is answered while many reads of a flood wait, in one of a few rounds.

    The whole flood may be answered while this process does not run. Behind the flood, every round fails.
    """
    with server.tasks() as tasks:
        tasks.enqueue_many([{"agent": "flood", "payload": 1}] * 20_000)
    for _ in range(ROUNDS_MAX):
        with flood_of_reads(server) as flood:
            assert call() in (200, 404)
            if unanswered(flood) > len(flood) // 4:
                return True
    return False


def test_health_does_not_wait_for_readers(server: Server) -> None:
    assert goes_first(server, lambda: health(server))


@pytest.mark.parametrize(
    ("who", "path"), [("review", "/tasks"), ("review", "/tasks/unknown"), ("boss", "/queue/status")]
)
def test_a_flood_of_reads_does_not_delay_other_tokens(server: Server, who: str, path: str) -> None:
    assert goes_first(server, lambda: server.get(who, path).status)


def test_health_does_not_wait_for_the_writer(server: Server) -> None:
    with held_store(server), contextlib.ExitStack() as stack:
        [mine] = begun(server, stack, 1, request(server, "boss", "/queue/enqueue", ONE))
        assert health(server) == 200
        assert unanswered([mine]) == 1
