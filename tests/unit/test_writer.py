import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks
from postroom.errors import HandleDead, Unavailable, UnknownTask, WriteFailed
from postroom.runtime import writer as module
from postroom.runtime.writer import Writer
from postroom.stores.sqlite import SqliteStore
from postroom.testing import FaultyStore, MemoryStore
from tests.faultydisk import FaultyDisk

Work = Callable[[Tasks, Writer], Awaitable[Any]]


def run(work: Work, store: Any = None) -> Any:
    """Do something with a writer in an event loop."""

    async def inside() -> Any:
        writer = Writer(tasks, asyncio.get_running_loop())
        try:
            return await work(tasks, writer)
        finally:
            writer.close()
            assert not writer.alive

    with Tasks(MemoryStore() if store is None else store) as tasks:
        return asyncio.run(inside())


async def together(*futures: "asyncio.Future[Any]") -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


def test_each_gets_its_own_answer() -> None:
    async def work(tasks: Tasks, writer: Writer) -> None:
        good = writer.submit(lambda tasks: tasks.enqueue(agent="triage", payload=1))
        bad = writer.submit(lambda tasks: tasks.cancel("nobody"))
        task_id, error = await together(good, bad)
        assert isinstance(error, UnknownTask)
        assert tasks.get(task_id).status == "pending"

    run(work)


def test_what_comes_together_is_one_commit() -> None:
    store = FaultyStore(MemoryStore())

    async def work(_: Tasks, writer: Writer) -> None:
        await together(
            *(writer.submit(lambda tasks: tasks.enqueue(agent="triage", payload=1)) for _ in range(50))
        )

    run(work, store)
    assert len(store.happened) == 1


def test_after_a_failed_fsync_the_next_turn_finds_the_store_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(monkeypatch)

    async def work(tasks: Tasks, writer: Writer) -> None:
        def enqueue(tasks: Tasks) -> str:
            return tasks.enqueue(agent="triage", payload=1, durability="group")

        kept = await writer.submit(enqueue)
        disk.failing = True
        [failed] = await together(writer.submit(enqueue))
        disk.failing = False
        [dead] = await together(writer.submit(enqueue))
        assert isinstance(failed, WriteFailed)
        assert isinstance(dead, HandleDead)
        last = await writer.submit(enqueue)
        assert tasks.get(kept).status == tasks.get(last).status == "pending"

    run(work, SqliteStore(tmp_path / "queue.db"))


def test_a_defect_in_one_call_hurts_no_other() -> None:
    def broken(_: Tasks) -> None:
        raise ZeroDivisionError

    async def work(tasks: Tasks, writer: Writer) -> None:
        futures = [writer.submit(lambda tasks: tasks.enqueue(agent="triage", payload=1)) for _ in range(3)]
        failed = writer.submit(broken)
        *good, error = await together(*futures, failed)
        assert isinstance(error, ZeroDivisionError)
        assert [tasks.get(task_id).status for task_id in good] == ["pending"] * 3
        assert writer.alive

    run(work)


def test_a_failed_commit_is_everybodys_answer_and_the_next_one_works() -> None:
    async def work(tasks: Tasks, writer: Writer) -> None:
        def enqueue(tasks: Tasks) -> str:
            return tasks.enqueue(agent="triage", payload=1)

        outcomes = await together(writer.submit(enqueue), writer.submit(enqueue))
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert tasks.find() == []
        assert await writer.submit(enqueue)

    run(work, FaultyStore(MemoryStore(), ["crash"]))


def test_equal_claims_are_one_and_are_shared_out_in_order() -> None:
    async def work(tasks: Tasks, writer: Writer) -> None:
        expected = tasks.enqueue_many([{"agent": "triage", "payload": number} for number in range(7)])
        one, three = tasks.terms("triage", 1, 300.0, None), tasks.terms("triage", 3, 300.0, None)
        other = tasks.terms("triage", 1, 60.0, "box-2")
        outcomes = await together(*(writer.submit(terms) for terms in (one, three, one, other, three)))
        sizes = [len(outcome) for outcome in outcomes]
        assert sizes == [1, 3, 1, 0, 2]
        got = [task.task_id for outcome in (*outcomes[:3], outcomes[4]) for task in outcome]
        assert got == expected

    run(work)


def test_more_claims_than_one_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLAIM_MAX", 5)

    async def work(tasks: Tasks, writer: Writer) -> None:
        tasks.enqueue_many([{"agent": "triage", "payload": number} for number in range(12)])
        terms = tasks.terms("triage", 2, 300.0, None)
        outcomes = await together(*(writer.submit(terms) for _ in range(6)))
        payloads = [[task.payload for task in outcome] for outcome in outcomes]
        assert payloads == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    run(work)


def test_what_waits_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)

    async def work(_: Tasks, writer: Writer) -> None:
        futures = [writer.submit(lambda tasks: tasks.find()) for _ in range(3)]
        with pytest.raises(Unavailable):
            writer.submit(lambda tasks: tasks.find())
        await together(*futures)
        assert await writer.submit(lambda tasks: tasks.find()) == []

    run(work)


def test_nobody_who_left_stops_the_others() -> None:
    async def work(_: Tasks, writer: Writer) -> None:
        left = writer.submit(lambda tasks: tasks.enqueue(agent="triage", payload=1))
        stays = writer.submit(lambda tasks: tasks.enqueue(agent="triage", payload=2))
        left.cancel()
        assert await stays

    run(work)
