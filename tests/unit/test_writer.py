import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Tasks
from postroom.contracts.tasks.task_input import checked_terms
from postroom.contracts.tasks.task_operations import NewTask, TaskOperations
from postroom.errors import HandleDead, TooMany, Unavailable, UnknownTask, WriteFailed
from postroom.server.access.registry import Identity
from postroom.server.http import writer as module
from postroom.server.http.writer import StoreWriter
from postroom.stores.sqlite.store import SqliteStore
from postroom.testing import FaultyStore, MemoryStore
from tests.faultydisk import FaultyDisk
from tests.unit.test_commits import DyingStore
from tests.waiting import HANG_GUARD_S

ONE, TWO, THREE = (Identity(name, "agent") for name in ("one", "two", "three"))
BOSS = Identity("boss", "operator")
Work = Callable[[Tasks, StoreWriter], Awaitable[Any]]


def run(work: Work, store: Any = None) -> Any:
    """Run a coroutine with a writer in an event loop."""

    async def inside() -> Any:
        writer = StoreWriter(tasks)
        try:
            return await work(tasks, writer)
        finally:
            writer.close()
            assert not writer.alive

    with Tasks(MemoryStore() if store is None else store) as tasks:
        return asyncio.run(inside())


async def together(*futures: "asyncio.Future[Any]") -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


def enqueue_1(operations: TaskOperations) -> str:
    return operations.enqueue([NewTask(agent="triage", payload=1)])[0]


def enqueue_2(operations: TaskOperations) -> str:
    return operations.enqueue([NewTask(agent="triage", payload=2)])[0]


def test_every_caller_gets_its_own_outcome() -> None:
    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        good = writer.submit(enqueue_1, ONE)
        bad = writer.submit(lambda operations: operations.cancel("nobody"), ONE)
        task_id, error = await together(good, bad)
        assert isinstance(error, UnknownTask)
        assert tasks.get(task_id).status == "pending"

    run(work)


def test_calls_of_one_round_share_a_commit() -> None:
    store = FaultyStore(MemoryStore())

    async def work(_: Tasks, writer: StoreWriter) -> None:
        await together(*(writer.submit(enqueue_1, ONE) for _ in range(50)))

    run(work, store)
    assert len(store.happened) == 1


def test_the_store_is_reopened_after_a_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk(monkeypatch)

    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        def enqueue(operations: TaskOperations) -> str:
            return operations.enqueue([NewTask(agent="triage", payload=1, durability="group")])[0]

        kept = await writer.submit(enqueue, ONE)
        disk.failing = True
        [failed] = await together(writer.submit(enqueue, ONE))
        disk.failing = False
        [dead] = await together(writer.submit(enqueue, ONE))
        assert isinstance(failed, WriteFailed)
        assert isinstance(dead, HandleDead)
        last = await writer.submit(enqueue, ONE)
        assert tasks.get(kept).status == tasks.get(last).status == "pending"

    run(work, SqliteStore(tmp_path / "queue.db"))


def test_calls_go_on_after_a_store_that_could_not_be_opened_again() -> None:
    async def work(_: Tasks, writer: StoreWriter) -> None:
        [failed] = await together(writer.submit(enqueue_1, ONE))
        assert isinstance(failed, HandleDead)
        assert await writer.submit(enqueue_2, ONE)

    run(work, DyingStore())


def test_an_exception_in_one_call_does_not_affect_the_others() -> None:
    def broken(_: TaskOperations) -> None:
        raise ZeroDivisionError

    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        futures = [writer.submit(enqueue_1, ONE) for _ in range(3)]
        failed = writer.submit(broken, ONE)
        *good, error = await together(*futures, failed)
        assert isinstance(error, ZeroDivisionError)
        assert [tasks.get(task_id).status for task_id in good] == ["pending"] * 3
        assert writer.alive

    run(work)


def test_every_caller_of_a_failed_commit_gets_its_error() -> None:
    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        enqueue = enqueue_1

        outcomes = await together(writer.submit(enqueue, ONE), writer.submit(enqueue, ONE))
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert tasks.find() == []
        assert await writer.submit(enqueue, ONE)

    run(work, FaultyStore(MemoryStore(), ["crash"]))


def test_equal_claims_are_merged_and_their_tasks_divided_in_order() -> None:
    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        expected = tasks.enqueue_many([{"agent": "triage", "payload": number} for number in range(7)])
        one, three = checked_terms("triage", 1, 300.0, None), checked_terms("triage", 3, 300.0, None)
        other = checked_terms("triage", 1, 60.0, "box-2")
        outcomes = await together(*(writer.submit(terms, ONE) for terms in (one, three, one, other, three)))
        sizes = [len(outcome) for outcome in outcomes]
        assert sizes == [1, 3, 1, 0, 2]
        got = [task.task_id for outcome in (*outcomes[:3], outcomes[4]) for task in outcome]
        assert got == expected

    run(work)


def test_merged_claims_are_split_at_the_claim_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM_MAX", 5)

    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        tasks.enqueue_many([{"agent": "triage", "payload": number} for number in range(12)])
        terms = checked_terms("triage", 2, 300.0, None)
        outcomes = await together(*(writer.submit(terms, ONE) for _ in range(6)))
        payloads = [[msgspec.json.decode(task.payload) for task in outcome] for outcome in outcomes]
        assert payloads == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    run(work)


def test_waiting_calls_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 4)
    monkeypatch.setattr(module, "WAITING_A_TOKEN_MAX", 2)
    monkeypatch.setattr(module, "WAITING_RESERVE", 1)

    def find(_: TaskOperations) -> list[str]:
        return []

    async def work(_: Tasks, writer: StoreWriter) -> None:
        futures = [writer.submit(find, who) for who in (ONE, ONE, TWO)]
        with pytest.raises(TooMany, match="'one' may have at most 2 calls that wait"):
            writer.submit(find, ONE)
        with pytest.raises(Unavailable, match="at most 3 calls that wait"):
            writer.submit(find, TWO)
        futures.append(writer.submit(find, BOSS))
        with pytest.raises(Unavailable):
            writer.submit(find, BOSS)
        await together(*futures)
        assert await writer.submit(find, ONE) == []

    run(work)


def test_bytes_of_waiting_calls_have_a_limit() -> None:
    each_max = module.WAITING_BYTES_A_TOKEN_MAX

    def find(_: TaskOperations) -> list[str]:
        return []

    async def work(_: Tasks, writer: StoreWriter) -> None:
        large = writer.submit(find, ONE, each_max)
        for _attempt in range(2 * module.WAITING_A_TOKEN_MAX):  # a refused call is not counted
            with pytest.raises(TooMany, match="bytes of calls that wait"):
                writer.submit(find, ONE)
        other = writer.submit(find, TWO)
        await together(large, other)
        assert await writer.submit(find, ONE, each_max) == []

    run(work)


class Order:
    """Calls that record the commit in which they ran."""

    def __init__(self, writer: StoreWriter) -> None:
        self.writer = writer
        self.commits: list[list[str]] = [[]]
        self._begun, self._go_on = threading.Event(), threading.Event()
        self._turn = 0
        self.futures: list[asyncio.Future[Any]] = []

    async def begin(self) -> None:
        """Keep the writer busy with a call, so that others wait."""

        def wait(_: TaskOperations) -> None:
            self._begun.set()
            self._go_on.wait(HANG_GUARD_S)

        self.futures.append(self.writer.submit(wait, BOSS))
        await asyncio.to_thread(self._begun.wait, HANG_GUARD_S)

    def submit(self, name: str, identity: Identity, size: int = 1) -> None:
        def note(_: TaskOperations) -> None:
            if self.writer.turns != self._turn:
                self._turn = self.writer.turns
                self.commits.append([])
            self.commits[-1].append(name)

        self.futures.append(self.writer.submit(note, identity, size))

    async def end(self) -> list[list[str]]:
        self._go_on.set()
        await together(*self.futures)
        return self.commits[1:]


def test_tokens_take_turns_when_more_calls_wait_than_fit_into_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TURN_MAX", 3)

    async def work(_: Tasks, writer: StoreWriter) -> None:
        order = Order(writer)
        await order.begin()
        for number in range(5):
            order.submit(f"one {number}", ONE)
        order.submit("two 0", TWO)
        order.submit("three 0", THREE)
        order.submit("two 1", TWO)
        assert await order.end() == [
            ["one 0", "two 0", "three 0"],
            ["one 1", "two 1", "one 2"],
            ["one 3", "one 4"],
        ]

    run(work)


def test_many_tokens_of_an_organization_share_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_MAX", 4)

    async def work(_: Tasks, writer: StoreWriter) -> None:
        order = Order(writer)
        await order.begin()
        for name in "abcdef":
            order.submit(f"acme {name}", Identity(name, "agent", org="acme"))
        order.submit("other 0", Identity("a", "agent", org="other"))
        order.submit("other 1", Identity("a", "agent", org="other"))
        order.submit("acme a again", Identity("a", "agent", org="acme"))
        assert await order.end() == [
            ["acme a", "other 0", "acme b", "other 1"],
            ["acme c", "acme d", "acme e", "acme f"],
            ["acme a again"],
        ]

    run(work)


def test_a_call_that_does_not_fit_goes_first_into_the_next_commit() -> None:
    large = module.TURN_BYTES_MAX

    async def work(_: Tasks, writer: StoreWriter) -> None:
        order = Order(writer)
        await order.begin()
        order.submit("two 0", TWO)
        for number in range(2):
            order.submit(f"one {number}", ONE, large + 1)
        for number in range(2):
            order.submit(f"three {number}", THREE, large - 1)
        order.submit("two 1", TWO)
        assert await order.end() == [["two 0", "three 0"], ["one 0"], ["two 1", "three 1"], ["one 1"]]

    run(work)


def test_waiting_calls_are_committed_before_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_MAX", 2)

    async def work(tasks: Tasks, writer: StoreWriter) -> None:
        for _ in range(7):
            writer.submit(enqueue_1, ONE)
        writer.close()
        assert len(tasks.find()) == 7

    run(work)


def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    async def work(_: Tasks, writer: StoreWriter) -> None:
        left = writer.submit(enqueue_1, ONE)
        stays = writer.submit(enqueue_2, ONE)
        left.cancel()
        assert await stays

    run(work)
