"""Events stored as runs are read as the events that the lifecycle emitted."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope, Event, Moment, Noted, Record
from postroom.stores.event_runs import CompletedRun, LeasedRun, NewRun, NotedRun, Part, pack, unpack
from postroom.stores.memory import MemoryStore
from postroom.stores.own_ids import OwnIds
from postroom.stores.sqlite.store import SqliteStore
from postroom.testing import ManualClock

NUMBERS = st.integers(0, 2**62)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def made(*parts: Part) -> list[Event]:
    return list(unpack(pack(list(parts)), OwnIds("t1")))


@given(NUMBERS, NUMBERS, TEXTS, TEXTS, TEXTS, st.integers(0, 3), st.lists(st.integers(0, 99), min_size=1))
def test_runs_of_new_messages(
    seq: int, ts_us: int, queue: str, kind: str, parent: str, priority: int, sizes: list[int]
) -> None:
    for delay_ns in (0, 1_500_000_000):
        expected: list[Event] = []
        number = seq
        for size in sizes:
            envelope = Envelope(
                queue=queue, payload=bytes(size), type=kind, parent_message_id=parent, priority=priority,
                delay_ns=delay_ns,
            )  # fmt: skip
            step = lifecycle.accept(envelope, Moment(number, 0, ts_us), f"t1-{number}")
            expected += step.events
            number += len(step.events)
        assert made(NewRun(seq, ts_us, queue, priority, kind, parent, delay_ns, sizes)) == expected


def test_noted_events_are_the_same_in_every_store(tmp_path: Path) -> None:
    noted = [
        Noted("tokens_reserved", "org:a", "m", "PROCESSING", 2, 1, 7, {"tokens": 5}),
        Noted("tokens_rebalanced", detail={"moved": 3}),
    ]
    expected = [
        Event(4, 9, "tokens_reserved", "org:a", "m", "PROCESSING", 2, 1, 7, detail={"tokens": 5}),
        Event(5, 9, "tokens_rebalanced", "", "", "DONE", detail={"moved": 3}),
    ]
    assert made(NotedRun(4, 9, noted)) == expected
    stores = MemoryStore(clock=ManualClock()), SqliteStore(tmp_path / "queue.db", clock=ManualClock())
    for store in stores:
        store.write(lambda transaction: transaction.note(noted))
        store.write(lambda transaction: transaction.note([]))
    first, second = (store.events() for store in stores)
    assert first == second
    assert [event.detail for event in first] == [event.detail for event in expected]
    stores[1].close()


def record(seq: int, message_id: str, attempt: int) -> Record:
    envelope = Envelope(queue="q", payload=b"", priority=1)
    accepted = lifecycle.accept(envelope, Moment(seq, 1_000, 5), message_id).record
    for _ in range(attempt - 1):
        leased = lifecycle.lease(accepted, Moment(seq, 1_000, 5), "w", 10**9).record
        released = lifecycle.release(leased, Moment(seq, 1_000, 5), seq)
        assert released is not None
        accepted = released.record
    return accepted


def test_runs_of_leases_and_completions_with_own_and_given_ids() -> None:
    one, two = record(7, "t1-7", 1), record(9, "a name", 3)
    leases = [lifecycle.lease(one, Moment(20, 9_000, 6), "w", 10**9)]
    leases.append(lifecycle.lease(two, Moment(21, 9_000, 6), "w", 10**9))
    leased = LeasedRun(20, 6, "q", 1, "w", [7, "a name"], [one.attempt + 1, two.attempt + 1], [8, 8])
    assert made(leased) == [step.events[0] for step in leases]
    ends = [
        lifecycle.complete(step.record, Moment(number, 99_000, 7), step.record.lease, b"")
        for number, step in enumerate(leases, 30)
    ]
    attempts = [step.record.attempt for step in leases]
    finished = CompletedRun(30, 7, "q", 1, "w", [7, "a name"], attempts, [20, 21], [90, 90])
    assert made(finished) == [step.events[0] for step in ends if step is not None]


def test_events_and_runs_of_a_row_are_read_in_order() -> None:
    plain = Event(3, 5, "cancelled", "q", "x", "CANCELLED")
    parts: list[Part] = [
        NewRun(1, 5, "q", 2, "", "", 0, [0]),
        plain,
        LeasedRun(4, 5, "q", 2, "w", [1], [1], [0]),
    ]
    assert [event.seq for event in made(*parts)] == [1, 2, 3, 4]
    assert [type(part) for part in json.loads(pack(parts))] == [list, dict, list]


def test_a_row_of_the_first_version_is_read() -> None:
    events = [
        Event(1, 5, "created", "q", "t1-1", "QUEUED", body_bytes=3),
        Event(2, 5, "enqueued", "q", "t1-1", "QUEUED"),
    ]
    row = json.dumps(
        [
            {
                "seq": 1,
                "ts_us": 5,
                "kind": "created",
                "queue": "q",
                "message_id": "t1-1",
                "state": "QUEUED",
                "body_bytes": 3,
            },
            {"seq": 2, "ts_us": 5, "kind": "enqueued", "queue": "q", "message_id": "t1-1", "state": "QUEUED"},
        ]
    )
    assert list(unpack(row.encode(), OwnIds("t1"))) == events
