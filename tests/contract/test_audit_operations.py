"""The table of operations and kinds is correct: each operation emits exactly the listed events."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest

from postroom import Bus, Queue, Tasks
from postroom.calls.server import PostToBus
from postroom.contracts.feeds import FileFeeds, set_outbox
from postroom.contracts.tasks.tasks import DECISIONS, Retention
from postroom.core.formats.events import OPERATIONS
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.message import EventKind
from postroom.server.access.refusal_events import RefusedCall
from postroom.server.access.registry import Identity
from postroom.server.folder.buses import Buses
from postroom.stores.base import Outbox
from postroom.testing import ManualClock

AGENT = "ada"


class OperationCases:
    """Tasks with a manual clock, and the events they emitted since the last call."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tasks = Tasks.open(
            "memory://", clock=self.clock, retention=Retention(finished_s=1), retry=RetryPolicy()
        )
        self._seen = 0

    def emitted(self) -> list[EventKind]:
        events = self.tasks.events(self._seen)
        self._seen = self.tasks.store.newest_event()
        return [event.kind for event in events]

    def enqueue(self, **more: object) -> str:
        return self.tasks.enqueue(agent=AGENT, payload=1, **more)  # type: ignore[arg-type]

    def held(self, agent: str = AGENT, **more: object) -> tuple[str, int]:
        if agent == AGENT:
            self.enqueue(**more)
        [task] = self.tasks.claim(agent=agent, lease_s=10)
        return task.task_id, task.lease


def finished(cases: OperationCases) -> str:
    name, lease = cases.held()
    cases.tasks.complete(name, lease, "done")
    return name


def decided(cases: OperationCases) -> Callable[[], object]:
    cases.tasks.open_decision(finished(cases))
    [decision] = cases.tasks.claim(agent=DECISIONS)
    return lambda: cases.tasks.settle(decision)


def lapsed(cases: OperationCases) -> Callable[[], object]:
    cases.held()
    cases.held(max_retries=0)
    cases.clock.advance(11)
    return cases.tasks.sweep


def delayed(cases: OperationCases) -> Callable[[], object]:
    cases.enqueue(delay_s=5)
    cases.clock.advance(6)
    return cases.tasks.sweep


def failing(cases: OperationCases) -> Callable[[], object]:
    tries = [(cases.held(), 5.0), (cases.held(), 0.0), (cases.held(max_retries=0), None)]

    def fail_all() -> None:
        for held, pause_s in tries:
            cases.tasks.fail(*held, "no", retry_in_s=pause_s)

    return fail_all


def dead(cases: OperationCases) -> Callable[[], object]:
    name, lease = cases.held(max_retries=0)
    cases.tasks.fail(name, lease, "no")
    return lambda: cases.tasks.retry(name)


def old(cases: OperationCases) -> Callable[[], object]:
    name = cases.enqueue()
    cases.tasks.cancel(name)
    cases.clock.advance(10)
    return cases.tasks.purge


def behind(cases: OperationCases) -> Callable[[], object]:
    cases.enqueue()
    set_outbox(cases.tasks.store, Outbox(backlog_max=1, when_behind="refuse"))
    return Tasks(cases.tasks.store).status


def refused(cases: OperationCases) -> Callable[[], object]:
    call = RefusedCall(
        Identity("", "agent"), "192.0.2.1:5", "http", "GET /tasks", 401, "Unauthorized", "no token"
    )
    store = cases.tasks.store
    return lambda: store.write(lambda transaction: transaction.emit("rejected", **call.facts()))


def without_bus(cases: OperationCases) -> Callable[[], object]:
    operator = Identity("", "operator")

    def remove() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(Buses(Path(folder), cases.tasks.store, "os")) as buses,
        ):
            buses.append(PostToBus(bus="news", type="note", project_id="p", body="one"), operator)
            buses.remove("news", operator)

    return remove


SCENES: dict[str, Callable[[OperationCases], Callable[[], object]]] = {
    "enqueue": lambda cases: cases.enqueue,
    "enqueue of a known id or key": lambda cases: (
        cases.enqueue(task_id="t"),
        lambda: cases.enqueue(task_id="t"),
    )[1],
    "claim": lambda cases: (cases.enqueue(), lambda: cases.tasks.claim(agent=AGENT))[1],
    "heartbeat": lambda cases: (held := cases.held(), lambda: cases.tasks.heartbeat(*held))[1],
    "complete": lambda cases: (held := cases.held(), lambda: cases.tasks.complete(*held))[1],
    "fail": failing,
    "release": lambda cases: (held := cases.held(), lambda: cases.tasks.release(*held))[1],
    "claim, sweep: a delay is over": delayed,
    "claim, sweep: a lease ran out": lapsed,
    "cancel": lambda cases: (name := cases.enqueue(), lambda: cases.tasks.cancel(name))[1],
    "retry": dead,
    "open_decision": lambda cases: (name := finished(cases), lambda: cases.tasks.open_decision(name))[1],
    "settle": decided,
    "purge": old,
    "enqueue while the stream is too far behind": behind,
    "a call over HTTP or MCP that is refused": refused,
    "the removal of a bus of the server": without_bus,
}


def test_every_operation_of_tasks_is_tested() -> None:
    assert SCENES.keys() == OPERATIONS["tasks"].keys()


@pytest.mark.parametrize("operation", SCENES)
def test_tasks_operations_emit_the_documented_events(operation: str) -> None:
    cases = OperationCases()
    act = SCENES[operation](cases)
    cases.emitted()
    act()
    assert set(cases.emitted()) == set(OPERATIONS["tasks"][operation])


def test_file_operations_emit_the_documented_events(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.append(type="note", project_id="p", body="one")
    bus.append_many([{"type": "note", "project_id": "p", "body": "two"}])
    clock = datetime(2026, 1, 1, tzinfo=UTC)
    queue = Queue(tmp_path / "queue", clock=lambda: clock)
    queue.send("ask", "one", sender="ada", ttl_s=1)
    queue.poll("bob")
    clock += timedelta(seconds=5)
    queue.expire()
    queue.poll("bob")
    with (queue.root / "audit.jsonl").open("a") as file:
        file.write("no line\n")
    feeds = FileFeeds([queue.root], [bus.path])
    kinds = {feed.source.partition(":")[0]: [event.kind for event in feed.read(0, 100)] for feed in feeds()}
    feeds.close()
    assert kinds["bus"] == ["created", "created"]
    table = OPERATIONS["queue"]
    assert kinds["queue"] == [kind for emitted in table.values() for kind in emitted]


@pytest.mark.statement("events-all")
def test_every_kind_is_emitted_by_some_operation() -> None:
    emitted = {kind for table in OPERATIONS.values() for kinds in table.values() for kind in kinds}
    assert emitted == set(get_args(EventKind))
