"""What the tasks of an organization take up: counted with every change, and limited."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Overloaded, Tasks
from postroom.contracts.tasks import task_storage
from postroom.contracts.tasks.task_storage import (
    COUNTED_BYTES,
    QUEUES_MAX,
    STORED,
    STORED_BYTES_MAX,
    STORED_TASKS_MAX,
    StoredTasks,
    stored_tasks,
)
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.names import scoped
from postroom.errors import InvalidMessage
from postroom.testing import ManualClock
from tests import children
from tests.children import no_child_left
from tests.postgresserver import database, postgres, store_url

__all__ = ["database", "no_child_left", "postgres"]  # fixtures

ACME, OTHER = scoped("acme", "triage"), scoped("other", "triage")
LARGE = "x" * 2 * COUNTED_BYTES
LARGE_BYTES = len(LARGE) + 2  # as JSON
AFTER_RETENTION_S = 8 * 86_400.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, tmp_path)


@pytest.fixture
def tasks(url: str, clock: ManualClock) -> Iterator[Tasks]:
    with Tasks.open(url, clock=clock) as opened:
        yield opened


def stored(tasks: Tasks, org: str = "acme") -> StoredTasks:
    return tasks.store.read(lambda transaction: stored_tasks(transaction, org))


def note(tasks: Tasks, of_acme: StoredTasks | None) -> None:
    """Set what the organization takes up, as if it had stored that much."""
    value = None if of_acme is None else msgspec.json.encode(of_acme)
    tasks.store.write(lambda transaction: transaction.cells.put(STORED, "acme", value))


def finish(tasks: Tasks, result: Any = None) -> None:
    for task in tasks.claim(agent=ACME, limit=10):
        tasks.complete(task.task_id, task.lease, result)


def test_an_organization_at_its_number_of_tasks_leaves_others_as_they_were(tasks: Tasks) -> None:
    first = tasks.enqueue(agent=ACME, payload=1, task_id="@acme:first")
    note(tasks, StoredTasks(STORED_TASKS_MAX - 1, queues=1))
    with pytest.raises(Overloaded, match="organization acme stores 4,999,999 of at most 5,000,000 tasks; "):
        tasks.enqueue_many({"agent": ACME, "payload": number} for number in range(2))
    second = tasks.enqueue(agent=ACME, payload=2)
    for agent in (ACME, scoped("acme", "another")):
        with pytest.raises(Overloaded, match="stores 5,000,000 of at most 5,000,000 tasks"):
            tasks.enqueue(agent=agent, payload=3)
    assert tasks.enqueue(agent=ACME, payload=1, task_id="@acme:first") == first
    for agent in (OTHER, "triage"):
        tasks.enqueue(agent=agent, payload=4)
    with pytest.raises(Overloaded):
        tasks.enqueue_many([{"agent": OTHER, "payload": 5}, {"agent": ACME, "payload": 5}])
    assert stored(tasks, "other") == StoredTasks(1, queues=1)
    [task, another] = tasks.claim(agent=ACME, limit=2)
    assert [task.task_id, another.task_id] == [first, second]
    tasks.fail(task.task_id, task.lease, "no", 0)
    tasks.complete(another.task_id, another.lease, LARGE)
    tasks.cancel(first)
    assert stored(tasks) == StoredTasks(STORED_TASKS_MAX, LARGE_BYTES, 1)


def test_an_organization_at_its_bytes_still_completes_tasks(tasks: Tasks) -> None:
    tasks.enqueue(agent=ACME, payload=LARGE)
    note(tasks, StoredTasks(1, STORED_BYTES_MAX))
    with pytest.raises(Overloaded, match="of at most 8,589,934,592 bytes of tasks; ended ones leave"):
        tasks.enqueue(agent=ACME, payload=LARGE)
    finish(tasks, LARGE)
    with pytest.raises(Overloaded, match="bytes of tasks"):
        tasks.enqueue(agent=ACME, payload="small")
    tasks.enqueue(agent=OTHER, payload=LARGE)
    assert stored(tasks, "other") == StoredTasks(1, LARGE_BYTES, 1)


def test_a_purge_gives_back_what_its_tasks_took_up(tasks: Tasks, clock: ManualClock) -> None:
    tasks.enqueue_many({"agent": ACME, "payload": payload} for payload in (LARGE, "small", LARGE))
    tasks.enqueue(agent=OTHER, payload=LARGE)
    tasks.enqueue(agent=ACME, payload=LARGE, idempotency_key="key")
    tasks.enqueue(agent=ACME, payload=LARGE, idempotency_key="key")
    assert stored(tasks) == StoredTasks(4, 3 * LARGE_BYTES, 1)
    finish(tasks, LARGE)
    [ended] = tasks.find(agent=ACME, limit=1)
    note(tasks, StoredTasks(STORED_TASKS_MAX - 1, 7 * LARGE_BYTES, 1))
    for _ in range(2):
        tasks.open_decision(ended.task_id)
    assert stored(tasks) == StoredTasks(STORED_TASKS_MAX, 8 * LARGE_BYTES, 2)
    with pytest.raises(Overloaded):
        tasks.enqueue(agent=ACME, payload=LARGE)
    [decision] = tasks.claim(agent=scoped("acme", DECISIONS))
    assert decision.parent == ended.task_id
    tasks.settle(decision)
    clock.advance(AFTER_RETENTION_S)
    tasks.purge()
    assert stored(tasks) == StoredTasks(STORED_TASKS_MAX - 5)
    assert stored(tasks, "other") == StoredTasks(1, LARGE_BYTES, 1)
    tasks.enqueue(agent=ACME, payload=LARGE)


def test_organization_at_its_queue_limit_still_uses_its_queues(tasks: Tasks, clock: ManualClock) -> None:
    first, second = scoped("acme", "first"), scoped("acme", "second")
    tasks.enqueue(agent=first, payload=1)
    tasks.enqueue(agent=first, payload=1, idempotency_key="key")
    note(tasks, StoredTasks(2, queues=QUEUES_MAX - 1))
    with pytest.raises(Overloaded, match="organization acme stores tasks of 4,999 of at most 5,000 agents; "):
        tasks.enqueue_many({"agent": scoped("acme", f"new{number}"), "payload": 1} for number in range(2))
    tasks.enqueue_many({"agent": agent, "payload": 1} for agent in (second, second, first))
    assert stored(tasks) == StoredTasks(5, queues=QUEUES_MAX)
    for _ in range(2):
        with pytest.raises(Overloaded, match="stores tasks of 5,000 of at most 5,000 agents"):
            tasks.enqueue(agent=scoped("acme", "third"), payload=1)
    tasks.enqueue(agent=first, payload=1, idempotency_key="key")
    tasks.enqueue_many({"agent": agent, "payload": 1} for agent in (first, second, OTHER, "third"))
    [task] = tasks.claim(agent=second, limit=1)
    tasks.complete(task.task_id, task.lease)
    tasks.open_decision(task.task_id)
    assert stored(tasks) == StoredTasks(8, queues=QUEUES_MAX + 1)
    tasks.enqueue(agent=first, payload=1)
    for task in tasks.claim(agent=first, limit=10):
        tasks.complete(task.task_id, task.lease)
    clock.advance(AFTER_RETENTION_S)
    tasks.purge()
    assert stored(tasks).queues == QUEUES_MAX
    assert tasks.store.read(lambda transaction: transaction.lanes.depth(first)) == {}


def test_a_plain_queue_of_an_organization_counts_in_its_share(tasks: Tasks, clock: ManualClock) -> None:
    def own(queue: str) -> None:
        tasks.store.write(lambda transaction: task_storage.own(transaction, queue, "acme"))

    tasks.enqueue_many({"agent": "old", "payload": payload} for payload in (LARGE, "small"))
    tasks.limit_queue("old", max_depth=100)
    tasks.enqueue(agent=ACME, payload=1)
    for queue in ("old", "old", "unused"):
        own(queue)
    assert stored(tasks) == StoredTasks(3, queues=2)
    tasks.limit_queue("old", max_depth=200)
    tasks.enqueue(agent="old", payload=LARGE)
    assert stored(tasks) == StoredTasks(4, LARGE_BYTES, 2)
    note(tasks, StoredTasks(STORED_TASKS_MAX, LARGE_BYTES, 2))
    for queue in ("old", ACME, "unused"):
        with pytest.raises(Overloaded, match="organization acme stores 5,000,000"):
            tasks.enqueue(agent=queue, payload=1)
    tasks.enqueue(agent="of-nobody", payload=1)
    [task] = tasks.claim(agent="old")
    tasks.complete(task.task_id, task.lease, "result")
    tasks.open_decision(task.task_id)
    [decision] = tasks.claim(agent=scoped("acme", DECISIONS))
    tasks.settle(decision)
    for task in tasks.claim(agent="old", limit=2):
        tasks.complete(task.task_id, task.lease, "result")
    clock.advance(AFTER_RETENTION_S)
    tasks.purge()
    assert stored(tasks) == StoredTasks(STORED_TASKS_MAX - 3, queues=1)
    assert tasks.store.read(lambda transaction: transaction.limits("old").max_depth) == 200


def test_a_repeated_complete_counts_its_result_once(tasks: Tasks) -> None:
    tasks.enqueue(agent=ACME, payload=1)
    [task] = tasks.claim(agent=ACME)
    for _ in range(2):
        tasks.complete(task.task_id, task.lease, LARGE)
    assert stored(tasks) == StoredTasks(1, LARGE_BYTES, 1)


def test_a_refused_enqueue_counts_nothing(tasks: Tasks) -> None:
    tasks.enqueue(agent=OTHER, payload=1, task_id="taken")
    with pytest.raises(InvalidMessage, match="is taken"):
        tasks.enqueue_many(
            [{"agent": ACME, "payload": 1}, {"agent": ACME, "payload": LARGE, "task_id": "taken"}]
        )
    assert stored(tasks) == StoredTasks(0)


def test_tasks_of_a_store_without_counts_are_counted_once(tasks: Tasks, clock: ManualClock) -> None:
    for name in ("triage", "another"):
        tasks.enqueue_many({"agent": scoped("acme", name), "payload": number} for number in range(3))
    tasks.enqueue(agent=scoped("acme-2", "triage"), payload=1)
    tasks.enqueue(agent="triage", payload=1)
    finish(tasks)
    note(tasks, None)
    assert stored(tasks) == StoredTasks(6, queues=2)
    clock.advance(AFTER_RETENTION_S)
    tasks.purge()
    assert stored(tasks) == StoredTasks(3, queues=1)
    tasks.enqueue(agent=ACME, payload=LARGE)
    assert stored(tasks) == StoredTasks(4, LARGE_BYTES, 2)


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_counts_are_right_after_processes_were_killed(url: str) -> None:
    def work(step: int) -> None:
        with Tasks.open(url) as tasks:
            kind, cells = tasks.store.write(lambda transaction: (type(transaction), type(transaction.cells)))
            calls = [(tasks.store, "write"), (kind, "insert"), (cells, "put")]
            children.die_at_calls(step, calls)
            for _ in range(4):
                tasks.enqueue_many({"agent": ACME, "payload": payload} for payload in (LARGE, "small"))
                finish(tasks, LARGE)

    for step in range(14):
        assert children.killed(lambda step=step: work(step))  # type: ignore[misc]
    with Tasks.open(url) as tasks:
        counted = stored(tasks)
        found = [tasks.get(line.task_id) for line in tasks.find(agent=ACME)]
        sizes = [len(msgspec.json.encode(value)) for task in found for value in (task.payload, task.result)]
        assert counted == StoredTasks(len(found), sum(size for size in sizes if size > COUNTED_BYTES), 1)
        assert counted.tasks > 0
