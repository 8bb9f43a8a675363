"""The tests that every backend passes, and the helpers they are written with."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import (
    InvalidMessage,
    InvalidSetting,
    QueueFull,
    StaleLease,
    StoreMoved,
    UnknownTask,
    WrongState,
)
from postroom.message import Envelope, Event, Moment, Record, State, Step
from postroom.stores import purge as store_purge
from postroom.stores.base import (
    FOREVER_NS,
    LIVE_EVENTS,
    ByIds,
    Counted,
    Ending,
    Limits,
    Listing,
    Outbox,
    Pick,
)
from postroom.stores.store import Store
from postroom.stores.transaction import Accepted, Claim, Decide, Delivery, Transaction
from postroom.system.manual_clock import MICROS_PER_S, ManualClock
from postroom.testing.events import CHECKED_MAX, check_consistency

MINE = "mine"
OTHER = "other"
LEASE_S = 300.0
TOGETHER_S = 60.0  # two transactions wait for each other at most this long


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def fails() -> Any:
    raise KeyError("planned")


def new(payload: bytes = b"{}", **facts: Any) -> Envelope:
    return Envelope(**{"queue": MINE, "payload": payload, **facts})


def insert(store: Store, *envelopes: Envelope) -> list[Accepted]:
    return store.write(lambda transaction: transaction.insert(envelopes))


def put_in(store: Store, count: int = 1, **facts: Any) -> list[str]:
    envelopes = [new(b"%d" % number, **facts) for number in range(count)]
    return [accepted.message_id for accepted in insert(store, *envelopes)]


def claim(
    store: Store,
    limit: int = 1,
    *,
    queue: str = MINE,
    lease_s: float = LEASE_S,
    worker: str = "worker",
    lanes: tuple[int, ...] = (2,),
    promote_after_s: tuple[float, ...] = (),
) -> list[Delivery]:
    terms = Claim(
        queue,
        worker,
        limit,
        round(lease_s * NANOS_PER_S),
        lanes,
        tuple(round(seconds * NANOS_PER_S) for seconds in promote_after_s),
    )
    return store.write(lambda transaction: transaction.claim(terms))


def names_of(deliveries: list[Delivery]) -> list[str]:
    return [delivery.message_id for delivery in deliveries]


def apply(store: Store, message_id: str, decide: Decide) -> list[Step]:
    """Apply a decision to one record."""
    return store.write(lambda transaction: transaction.apply(ByIds((message_id,)), decide))


def complete(store: Store, message_id: str, token: int, result: bytes = b"1") -> None:
    store.write(lambda transaction: transaction.complete({message_id: (token, result)}))


def fail(store: Store, message_id: str, token: int, delay_s: float | None = 0) -> list[Step]:
    delay_ns = None if delay_s is None else round(delay_s * NANOS_PER_S)
    return apply(
        store, message_id, lambda record, now: lifecycle.fail(record, now, token, "broken", delay_ns=delay_ns)
    )


def release(store: Store, message_id: str, token: int) -> list[Step]:
    return apply(store, message_id, lambda record, now: lifecycle.release(record, now, token))


def renew(store: Store, message_id: str, token: int) -> list[Step]:
    return apply(store, message_id, lambda record, now: lifecycle.renew(record, now, token))


def sweep(store: Store, limit: int = 100) -> int:
    return store.write(lambda transaction: transaction.sweep(limit))


def queues_below(transaction: Transaction, prefix: str) -> list[str]:
    return transaction.lanes.queues(prefix)


def held_by(delivery: Delivery) -> tuple[str, int]:
    return delivery.message_id, delivery.lease


def purge(store: Store, *, keep_s: float, after: int = 0, limit: int = 100) -> int:
    keep_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, round(keep_s * MICROS_PER_S))
    return store.write(lambda transaction: store_purge.purge_tasks(transaction, after, keep_us, limit)[1])


def gist(event: Event) -> tuple[Any, ...]:
    """The fields of an event that a history keeps: not its duration, nor facts of the first event."""
    return (
        event.seq, event.ts_us, event.kind, event.queue, event.message_id, event.state, event.attempt,
        event.priority, event.lease, event.worker_id, event.error_type, event.error, event.detail,
    )  # fmt: skip


def record(store: Store, message_id: str) -> Record:
    return store.find(ByIds((message_id,)))[0]


def snapshot(store: Store) -> tuple[list[Record], list[Event], dict[str, dict[Counted, int]]]:
    """Everything that a refused call must not change."""
    return store.find(Listing(limit=CHECKED_MAX)), store.events(limit=CHECKED_MAX), counts(store)


def counts(store: Store) -> dict[str, dict[Counted, int]]:
    """The counters by state, without empty queues."""
    return {queue: of_queue for queue, of_queue in store.count().items() if of_queue}


def set_limits(store: Store, queue: str, limits: Limits) -> None:
    """Set the limits of a queue."""
    store.write(lambda transaction: transaction.set_limits(queue, limits))


def outbox(store: Store) -> Outbox | None:
    """The position of the shipper."""
    return store.read(lambda transaction: transaction.outbox())


def set_outbox(store: Store, outbox: Outbox | None) -> None:
    """Set the position of the shipper."""
    store.write(lambda transaction: transaction.set_outbox(outbox), makes_room=True)


def purge_events(store: Store, up_to: int, before_us: int) -> None:
    """Purge old events."""
    store.write(
        lambda transaction: store_purge.purge_events(transaction, up_to, before_us, 1_000), makes_room=True
    )


def oldest_ns(store: Store) -> int | None:
    """The age of the oldest ready record."""
    return store.read(lambda transaction: transaction.oldest_ns(MINE))


@contextmanager
def refused(store: Store, kind: type[BaseException]) -> Iterator[None]:
    before = snapshot(store)
    with raises(kind):
        yield
    assert snapshot(store) == before, "a call that was refused changed something"


class StoreContract(ABC):
    """The tests of a backend. Subclass this class under pytest and implement `open`."""

    keeps: ClassVar[bool] = True
    """Whether a store that is opened again in the same folder holds what was stored."""

    @abstractmethod
    def open(self, folder: Path, clock: ManualClock) -> Store:
        """A store in this folder. A second call returns another handle of the same store."""

    @contextmanager
    def opened(self, folder: Path, clock: ManualClock) -> Iterator[Store]:
        """A store whose events and counters are checked at the end, and which is then closed."""
        store = self.open(folder, clock)
        try:
            yield store
            check_consistency(store)
        finally:
            store.close()

    # ---- acceptance ----------------------------------------------------------------------------

    def test_an_inserted_message_can_be_loaded(self, tmp_path: Path) -> None:
        facts: dict[str, Any] = {
            "type": "t",
            "parent_message_id": "p",
            "key": "k",
            "priority": 1,
            "ttl_ns": 9,
        }
        envelope = new(b'{"a":1}', max_retries=5, **facts)
        with self.opened(tmp_path, ManualClock()) as store:
            [accepted] = insert(store, envelope)
            stored = store.load(accepted.message_id)
            assert stored is not None
            assert stored.envelope == replace(envelope, message_id=accepted.message_id)
            assert (stored.record.state, stored.record.attempt, stored.result) == ("QUEUED", 0, None)
            assert [event.kind for event in stored.history] == ["created", "enqueued"]
            assert store.load("nobody") is None
            with raises(UnknownTask):
                store.find(ByIds((accepted.message_id, "nobody")))

    def test_messages_without_an_id_get_unique_ids(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = put_in(store, 3) + put_in(store, 2)
            assert len(set(names)) == 5
            with refused(store, InvalidMessage):  # the id looks like one of the store's own
                put_in(store, message_id=names[0].rpartition("-")[0] + "-77777")
            for odd in ("-2", "-00" + names[0].rpartition("-")[2], "-9" * 30, "-" + "9" * 30, ""):
                assert store.load(names[0].rpartition("-")[0] + odd) is None

    def test_a_second_insert_of_an_id_is_a_duplicate(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            first = insert(store, new(b"1", message_id="x"))
            again = insert(store, new(b"2", message_id="x"))
            assert (first, again) == ([Accepted("x", duplicate=False)], [Accepted("x", duplicate=True)])
            assert [delivery.payload for delivery in claim(store, 10)] == [b"1"]
            assert store.events()[2].kind == "duplicate"
            [named] = put_in(store)
            assert insert(store, new(message_id=named)) == [Accepted(named, duplicate=True)]
            assert names_of(claim(store, 10)) == [named]

    def test_a_second_insert_of_a_key_is_a_duplicate_within_its_queue(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            both = insert(store, new(key="k"), new(key="k"))
            [again] = insert(store, new(key="k", message_id="x"))
            [elsewhere] = insert(store, new(key="k", queue=OTHER))
            assert [accepted.duplicate for accepted in (*both, again, elsewhere)] == [
                False,
                True,
                True,
                False,
            ]
            assert both[0].message_id == both[1].message_id == again.message_id
            [delivery] = claim(store, 10)
            complete(store, *held_by(delivery))
            [late] = insert(store, new(key="k"))  # also after the first message ended
            assert late.message_id == again.message_id
            duplicates = [event for event in store.events() if event.kind == "duplicate"]
            assert [event.detail for event in duplicates] == [{"key": "k"}] * 3

    def test_a_key_is_known_until_it_is_purged(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            insert(store, new(key="old"))
            clock.advance(10)
            insert(store, new(key="new"))
            store.write(lambda transaction: store_purge.purge_keys(transaction, "", clock.wall_us(), 10))
            assert [a.duplicate for a in insert(store, new(key="old"), new(key="new"))] == [
                False,
                True,
            ]

    def test_a_key_outlives_its_record(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [first] = insert(store, new(key="k"))
            [delivery] = claim(store)
            complete(store, *held_by(delivery))
            clock.advance(10)
            purge(store, keep_s=1)
            assert store.load(first.message_id) is None
            assert insert(store, new(key="k")) == [Accepted(first.message_id, duplicate=True)]

    def test_an_insert_stores_all_messages_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            set_limits(store, MINE, Limits(max_payload_bytes=3))
            with refused(store, InvalidMessage):
                insert(store, new(b"123"), new(b"1234"))
            insert(store, new(b"123"), new(b"1234", queue=OTHER))

    def test_a_queue_refuses_messages_beyond_its_depth(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            set_limits(store, MINE, Limits(max_depth=3))
            put_in(store, 2)
            with refused(store, QueueFull):
                put_in(store, 2)
            put_in(store, 1, delay_ns=NANOS_PER_S)  # a delayed message counts
            with refused(store, QueueFull):
                put_in(store, 1)
            put_in(store, 5, queue=OTHER)
            claim(store)  # a claimed message does not count
            put_in(store, 1)
            with refused(store, QueueFull):
                store.write(lambda transaction: [transaction.insert([new()]) for _ in range(2)])

    def test_duplicates_are_accepted_by_a_full_queue(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            set_limits(store, MINE, Limits(max_depth=2))
            insert(store, new(key="k"), new(message_id="x"))
            again = insert(store, new(key="k"), new(message_id="x"))
            assert [accepted.duplicate for accepted in again] == [True, True]
            with refused(store, QueueFull):
                insert(store, new(key="k"), new())

    def test_a_delayed_message_cannot_be_claimed_early(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [late] = put_in(store, delay_ns=10 * NANOS_PER_S)
            [later] = put_in(store, delay_ns=20 * NANOS_PER_S)
            [now] = put_in(store)
            assert record(store, late).state == "SCHEDULED"
            assert names_of(claim(store, 10)) == [now]
            assert store.next_work_ns(MINE) == 10 * NANOS_PER_S
            clock.advance(10)
            assert store.next_work_ns(MINE) == 0
            assert names_of(claim(store, 10)) == [late]
            clock.advance(10)
            assert sweep(store) == 1
            assert record(store, later).state == "QUEUED"

    # ---- delivery ------------------------------------------------------------------------------

    def test_messages_are_claimed_in_order(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = put_in(store, 12)
            put_in(store, 1, queue=OTHER)
            claimed = [claim(store, limit) for limit in (1, 5, 100)]
            assert [len(deliveries) for deliveries in claimed] == [1, 5, 6]
            assert [name for deliveries in claimed for name in names_of(deliveries)] == names
            assert [d.payload for d in claimed[2]] == [b"%d" % number for number in range(6, 12)]
            tokens = [delivery.lease for deliveries in claimed for delivery in deliveries]
            assert tokens == sorted(set(tokens))
            assert claim(store) == []
            assert claim(store, queue="unknown") == []

    def test_the_most_urgent_lane_is_claimed_first(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            by_priority = {priority: put_in(store, 2, priority=priority) for priority in (3, 1, 0, 2)}
            lanes = (0, 1, 2, 3)
            names = [name for _ in range(8) for name in names_of(claim(store, lanes=lanes))]
            assert names == [name for priority in lanes for name in by_priority[priority]]

    def test_a_record_that_waits_is_promoted_and_keeps_its_priority(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [old] = put_in(store, priority=3)
            clock.advance(30)
            [middle] = put_in(store, priority=2)
            [urgent] = put_in(store, priority=0)
            terms: Any = {"lanes": (0, 1, 2, 3), "promote_after_s": (100, 20, 25)}
            assert names_of(claim(store, 2, **terms)) == [
                urgent,
                old,
            ]  # after 25 s the record counts as one of lane 2
            assert (record(store, old).priority, record(store, old).lane) == (3, 3)
            clock.advance(20)
            assert names_of(claim(store, **terms)) == [middle]
            promoted = [event for event in store.events() if event.kind == "promoted"]
            assert [(event.message_id, event.priority, event.detail) for event in promoted] == [
                (old, 2, {"from": 3}),
                (middle, 1, {"from": 2}),
            ]
            stored = store.load(old)
            assert stored is not None
            assert [event.kind for event in stored.history] == ["created", "enqueued", "promoted", "dequeued"]

    def test_fresh_urgent_work_goes_before_promoted_work(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            backlog = put_in(store, 50, priority=3)
            clock.advance(1_000)
            urgent = put_in(store, 2, priority=0)
            terms: Any = {"lanes": (0, 1, 2, 3), "promote_after_s": (5, 15, 30)}
            assert names_of(claim(store, 5, **terms)) == [*urgent, *backlog[:3]]

    def test_a_released_head_does_not_hide_a_promoted_record(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = put_in(store, 2, priority=3)
            clock.advance(29)
            [delivery] = claim(store, lanes=(3,))
            release(store, *held_by(delivery))
            clock.advance(1)
            [later] = put_in(store, priority=2)
            terms: Any = {"lanes": (2, 3), "promote_after_s": (100, 100, 30)}
            assert names_of(claim(store, 3, **terms)) == [*names, later]

    def test_a_retry_is_demoted_from_the_accepted_priority(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = put_in(store, priority=2)
            clock.advance(1_000)
            [delivery] = claim(store, lanes=(0, 1, 2, 3), promote_after_s=(5, 15, 30))

            def demote(record: Record, moment: Moment) -> Step | None:
                return lifecycle.fail(record, moment, delivery.lease, "broken", lane=record.priority + 1)

            apply(store, name, demote)
            assert (record(store, name).priority, record(store, name).lane) == (2, 3)
            assert claim(store, lanes=(0, 1, 2)) == []
            assert names_of(claim(store, lanes=(3,))) == [name]
            apply(store, name, lifecycle.cancel)
            apply(store, name, lifecycle.replay)
            assert record(store, name).lane == 2

    def test_counters_are_kept_for_each_lane(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            for priority in (0, 3, 3):
                put_in(store, priority=priority)
            assert store.depths()[MINE] == {"P0": 1, "P3": 2}
            claim(store, lanes=(3,))
            assert store.depths()[MINE] == {"P0": 1, "P3": 1, "PROCESSING": 1}

    def test_queues_are_listed_by_the_beginning_of_their_names(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            for queue in ("@b:x", "@a:y", "@a:x", "@a-b:x", "@a", "A"):
                put_in(store, queue=queue)
            every = ["@a", "@a-b:x", "@a:x", "@a:y", "@b:x", "A"]
            for prefix, found in (("", every), ("@a:", ["@a:x", "@a:y"]), ("@a:x", ["@a:x"]), ("@c", [])):
                assert store.read(partial(queues_below, prefix=prefix)) == found

            def listed(transaction: Transaction) -> list[list[str]]:
                transaction.insert([Envelope(queue="@a:z", payload=b"1")])
                return [
                    transaction.lanes.queues("@b:"),
                    transaction.lanes.queues("@a:"),
                    transaction.lanes.queues(),
                ]

            new = sorted([*every, "@a:z"])
            assert store.write(listed) == [["@b:x"], ["@a:x", "@a:y", "@a:z"], new]

    def test_ids_of_messages_do_not_count_those_of_other_organizations(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = []
            for _ in range(10):
                names += put_in(store, queue="org:acme")
                put_in(store, 3, queue="org:other")
                clock.advance(0.001)
            shown = [int(name[-12:], 16) >> 18 & 0xFFFF for name in names]
            numbers = [record.seq & 0xFFFF for record in store.find(ByIds(tuple(names)))]
            assert len(set(zip(shown, numbers, strict=True))) == len(names)
            assert len({one ^ other for one, other in zip(shown, numbers, strict=True)}) > 1

    def test_organizations_with_ready_records_are_counted(self, tmp_path: Path) -> None:
        def active(store: Store) -> int:
            depths = store.write(lambda transaction: transaction.lanes.active_depths())
            whole = store.write(lambda transaction: transaction.lanes.depths())
            assert depths == {queue: whole[queue] for queue in depths}
            assert len(depths) == store.write(lambda transaction: transaction.lanes.count_active())
            return len(depths)

        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            assert active(store) == 0
            acme = put_in(store, 2, queue="org:acme", priority=1) + put_in(store, queue="org:acme")
            [other] = put_in(store, queue="org:other")
            put_in(store)
            put_in(store, queue="org:later", delay_ns=NANOS_PER_S)
            assert active(store) == store.read(lambda transaction: transaction.lanes.count_active()) == 2
            for left, name in ((2, acme[0]), (2, acme[1]), (1, acme[2]), (0, other)):
                apply(store, name, lifecycle.cancel)
                assert active(store) == left
            with raises(KeyError):
                store.write(lambda transaction: [transaction.insert([new(queue="org:undone")]), fails()])
            assert active(store) == 0
            apply(store, other, lifecycle.replay)
            store.write(
                lambda transaction: [transaction.insert([new(queue="org:new")]), transaction.put_back(9)]
            )
            assert active(store) == 2
            clock.advance(1)
            sweep(store)
            assert active(store) == 3

    def test_a_deferred_record_waits_without_counting_a_retry(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            first, second = put_in(store, 2)
            [delivery] = claim(store)

            def defer(token: int) -> Decide:
                return lambda record, now: lifecycle.defer(record, now, 10 * NANOS_PER_S, "breaker", token)

            with refused(store, StaleLease):
                apply(store, first, defer(delivery.lease + 1))
            apply(store, first, defer(delivery.lease))
            apply(store, second, defer(0))
            with refused(store, StaleLease):
                complete(store, *held_by(delivery))
            assert (claim(store, 2), store.next_work_ns(MINE)) == ([], 10 * NANOS_PER_S)
            clock.advance(10)
            assert names_of(claim(store, 2)) == [first, second]
            assert (record(store, first).retries, record(store, first).attempt) == (0, 2)
            deferred = [event for event in store.events() if event.kind == "deferred"]
            assert [event.prior for event in deferred] == ["PROCESSING", "QUEUED"]
            assert deferred[0].detail == {"reason": "breaker", "delay_s": 10.0}

    def test_crashes_are_counted_separately_from_retries(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = put_in(store, max_retries=5)
            fail(store, *held_by(claim(store)[0]))
            claim(store)
            clock.advance(LEASE_S)
            sweep(store)
            assert (record(store, name).retries, record(store, name).crashes) == (2, 1)
            apply(store, name, lifecycle.cancel)
            apply(store, name, lifecycle.replay)
            assert (record(store, name).retries, record(store, name).crashes) == (0, 0)

    def test_cells_are_kept_listed_and_rolled_back(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:

            def put(*cells: tuple[str, str, bytes | None]) -> None:
                store.write(lambda transaction: [transaction.cells.put(*cell) for cell in cells])

            put(
                ("a", "2", b"two"),
                ("a", "1", b"\0"),
                ("b", "1", b"other"),
                ("a", "3", b"3"),
                ("a", "3", None),
            )
            cells = store.read(lambda transaction: transaction.cells.page("a"))
            assert cells == [("1", b"\0"), ("2", b"two")]
            assert store.read(lambda transaction: transaction.cells.page("a", "1", 1)) == [("2", b"two")]
            with raises(KeyError):
                store.write(lambda transaction: [transaction.cells.put("a", "2", None), fails()])
            assert store.read(lambda transaction: transaction.cells.get("a", "2")) == b"two"
            assert store.read(lambda transaction: transaction.cells.get("a", "9")) is None

    def test_a_lease_ends_by_the_steady_clock(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = put_in(store)
            [first] = claim(store)
            for step in (3_600, -3_600, 86_400, -86_400):
                clock.step_wall(step)
                assert claim(store) == []
            clock.advance(LEASE_S - 1)
            assert (claim(store), store.next_work_ns(MINE)) == ([], NANOS_PER_S)
            clock.advance(1)
            assert store.next_work_ns(MINE) == 0
            [second] = claim(store, worker="second")
            assert (second.message_id, second.attempt, record(store, name).retries) == (name, 2, 1)
            assert second.lease > first.lease
            assert counts(store)[MINE]["LAPSES"] == 1

    def test_a_call_after_the_end_of_its_lease_is_refused(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            put_in(store)
            [delivery] = claim(store)
            clock.advance(LEASE_S)
            self._all_refused(store, delivery)
            sweep(store)
            self._all_refused(store, delivery)
            [second] = claim(store)
            self._all_refused(store, delivery)
            complete(store, *held_by(second))
            self._all_refused(store, delivery)

    def _all_refused(self, store: Store, delivery: Delivery) -> None:
        for word in (complete, fail, release, renew):
            with refused(store, StaleLease):
                word(store, *held_by(delivery))

    def test_a_heartbeat_renews_the_lease(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            put_in(store)
            [delivery] = claim(store)
            for _ in range(5):
                clock.advance(LEASE_S - 1)
                renew(store, *held_by(delivery))
                assert claim(store) == []
            complete(store, *held_by(delivery))
            completed = store.events()[-1]
            assert completed.duration_us == 5 * (LEASE_S - 1) * MICROS_PER_S

    def test_only_the_token_of_the_current_lease_is_accepted(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = put_in(store, 2)
            mine, other = claim(store, 2)
            for token in (0, -1, mine.lease + 10**6, other.lease):
                for word in (complete, fail, release, renew):
                    with refused(store, StaleLease):
                        word(store, names[0], token)
            with refused(store, UnknownTask):
                complete(store, "nobody", mine.lease)

    def test_the_call_that_ended_a_lease_may_be_repeated(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            for word in (complete, release, fail):
                put_in(store)
                [delivery] = claim(store)
                word(store, *held_by(delivery))
                before = snapshot(store)
                word(store, *held_by(delivery))
                assert snapshot(store) == before
                for left in claim(store, 100):
                    complete(store, *held_by(left))

    def test_the_first_result_is_kept(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)
            [delivery] = claim(store)
            complete(store, *held_by(delivery), b"first")
            complete(store, *held_by(delivery), b"second")
            stored = store.load(name)
            assert stored is not None
            assert (stored.result, stored.record.state) == (b"first", "COMPLETED")

    def test_results_of_many_messages_are_read_together(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            first, second = put_in(store, 2)
            insert(store, new(message_id="own"), new(message_id="waiting"))
            for result, delivery in enumerate(claim(store, 3)):
                complete(store, *held_by(delivery), b"%d" % result)
            names = [first, second, "own", "waiting", "unknown"]
            found = store.read(lambda transaction: transaction.records.results(names))
            assert found == {first: b"0", second: b"1", "own": b"2"}

    def test_a_released_record_keeps_its_position(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            first, second = put_in(store, 2)
            [delivery] = claim(store)
            release(store, *held_by(delivery))
            assert names_of(claim(store, 2)) == [first, second]
            assert (record(store, first).attempt, record(store, first).retries) == (2, 0)

    def test_a_failed_record_goes_to_the_end_or_is_delayed(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            first, second = put_in(store, 2)
            fail(store, *held_by(claim(store)[0]))
            assert names_of(claim(store, 2)) == [second, first]
            fail(store, first, record(store, first).lease, delay_s=60)
            assert (record(store, first).state, claim(store)) == ("RETRYING", [])
            clock.advance(60)
            assert names_of(claim(store)) == [first]

    def test_a_message_without_retries_left_becomes_a_dead_letter(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = put_in(store, max_retries=2)
            fail(store, *held_by(claim(store)[0]))
            claim(store)
            clock.advance(LEASE_S)  # a lapse counts as well
            fail(store, *held_by(claim(store)[0]))
            assert (record(store, name).state, claim(store)) == ("DEAD_LETTER", [])
            stored = store.load(name)
            assert stored is not None
            assert [event.error for event in stored.history if event.error] == [
                "broken",
                lifecycle.LAPSED,
                "broken",
                "broken",
            ]
            apply(store, name, lifecycle.replay)
            assert names_of(claim(store)) == [name]
            assert (record(store, name).attempt, record(store, name).retries) == (4, 0)

    def test_a_failure_without_retry_makes_a_dead_letter_at_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)
            fail(store, *held_by(claim(store)[0]), delay_s=None)
            assert record(store, name).state == "DEAD_LETTER"

    def test_a_cancelled_record_is_not_delivered(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            waiting, held = put_in(store, 2)
            [delayed] = put_in(store, delay_ns=NANOS_PER_S)
            release(store, *held_by(claim(store)[0]))
            deliveries = claim(store, 2)
            release(store, *held_by(deliveries[0]))
            for name in (waiting, held, delayed):
                apply(store, name, lifecycle.cancel)
            assert (claim(store), store.next_work_ns(MINE), oldest_ns(store)) == ([], None, None)
            self._all_refused(store, deliveries[1])
            with refused(store, WrongState):
                apply(store, held, lifecycle.cancel)
            apply(store, held, lifecycle.replay)
            assert names_of(claim(store)) == [held]

    def test_a_quarantined_record_is_kept_and_not_delivered(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)
            [delivery] = claim(store)
            apply(store, name, lambda record, now: lifecycle.quarantine(record, now, "it kills"))
            self._all_refused(store, delivery)
            assert (record(store, name).state, claim(store)) == ("QUARANTINED", [])
            assert store.events()[-1].error == "it kills"

    def test_a_record_expires_after_its_time_to_live(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            short = put_in(store, 3, ttl_ns=10 * NANOS_PER_S)
            [held] = names_of(claim(store))
            [never] = put_in(store)
            clock.advance(10)
            assert names_of(claim(store)) == [never]
            assert [record(store, name).state for name in short] == ["PROCESSING", "EXPIRED", "EXPIRED"]
            put_in(store, 2, ttl_ns=NANOS_PER_S)
            clock.advance(1)
            assert len(store.find(Ending("expiry", FOREVER_NS, 10))) == 2
            assert sweep(store) == 2
            assert held == short[0]

    def test_a_result_is_handed_over_and_settled_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)
            [delivery] = claim(store)
            complete(store, *held_by(delivery))
            apply(store, name, lambda record, now: lifecycle.hand_over(record, now, "d"))
            complete(store, *held_by(delivery))  # a repeated call moves nothing back
            assert record(store, name).state == "EXECUTING"
            apply(store, name, lifecycle.settle)
            complete(store, *held_by(delivery))
            assert record(store, name).state == "DONE"
            with refused(store, WrongState):
                apply(store, name, lifecycle.settle)

    # ---- commits -------------------------------------------------------------------------------

    def test_work_that_raises_changes_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)

            def work(transaction: Transaction) -> None:
                transaction.insert([new(key="k"), new(queue="new", message_id="x")])
                transaction.claim(Claim(MINE, "w", 10, NANOS_PER_S))
                transaction.apply(ByIds((name,)), lifecycle.cancel)
                raise KeyError(name)

            with refused(store, KeyError):
                store.write(work)
            assert not insert(store, new(key="k"))[0].duplicate
            assert not insert(store, new(queue="new", message_id="x"))[0].duplicate

    def test_write_many_gives_each_work_its_own_outcome(self, tmp_path: Path) -> None:
        def insert_one(transaction: Transaction) -> list[Accepted]:
            return transaction.insert([new()])

        def insert_and_fail(transaction: Transaction) -> None:
            insert_one(transaction)
            fails()

        with self.opened(tmp_path, ManualClock()) as store:
            for failing in (
                lambda _: fails(),
                lambda transaction: transaction.events.take_numbers(1) and fails(),
            ):
                first, error, last = store.write_many([insert_one, failing, insert_one])
                assert isinstance(error, KeyError)
                assert first[0].message_id != last[0].message_id
            first, error, last = store.write_many([insert_one, insert_and_fail, insert_one], makes_room=True)
            assert isinstance(error, KeyError)
            assert counts(store) == {MINE: {"QUEUED": 6}}
            assert names_of(claim(store, 10))[-2:] == [first[0].message_id, last[0].message_id]

    def test_complete_ends_all_records_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            put_in(store, 2, message_id="")
            put_in(store, message_id="named")
            words = {delivery.message_id: (delivery.lease, b"1") for delivery in claim(store, 3)}
            with refused(store, StaleLease):
                store.write(lambda transaction: transaction.complete({**words, "named": (1, b"1")}))
            with refused(store, UnknownTask):
                store.write(lambda transaction: transaction.complete({**words, "nobody": (1, b"1")}))
            store.write(lambda transaction: transaction.complete(words))
            assert counts(store) == {MINE: {"COMPLETED": 3}}

    def test_ids_queues_and_errors_may_hold_any_text(self, tmp_path: Path) -> None:
        odd = 'a "b"\\\n\u2028\x85{}%ü\0'
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = put_in(store, 2, queue=odd, type=odd, parent_message_id=odd, max_retries=0)
            names += put_in(store, queue=odd, key=odd, message_id=odd)
            deliveries = claim(store, 3, queue=odd, worker=odd)
            assert [(d.message_id, d.queue) for d in deliveries] == [(name, odd) for name in names]
            complete(store, *held_by(deliveries[0]))
            apply(store, names[2], lambda record, now: lifecycle.fail(record, now, deliveries[2].lease, odd))
            clock.advance(LEASE_S)
            sweep(store)
            assert counts(store)[odd] == {"COMPLETED": 1, "DEAD_LETTER": 1, "QUEUED": 1, "LAPSES": 1}
            stored = store.load(odd)
            assert stored is not None
            assert (stored.envelope.key, stored.history[-2].error, stored.history[2].worker_id) == (odd,) * 3
            assert all(event.queue == odd for event in store.events())

    def test_apply_changes_all_records_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = put_in(store, 3)
            apply(store, names[2], lifecycle.cancel)
            with refused(store, WrongState):
                store.write(lambda transaction: transaction.apply(ByIds(tuple(names)), lifecycle.cancel))
            with refused(store, UnknownTask):
                store.write(
                    lambda transaction: transaction.apply(ByIds((names[0], "nobody")), lifecycle.cancel)
                )

    def test_a_queue_made_by_rolled_back_work_is_forgotten(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:

            def work(transaction: Transaction) -> None:
                for _ in range(2):
                    transaction.claim(Claim("gone", "w", 1, NANOS_PER_S))
                    transaction.insert([new(queue="gone", message_id="x")])
                transaction.records.find(ByIds(("x",)))
                raise KeyError("gone")

            with raises(KeyError):
                store.write(work)
            [name] = put_in(store, queue="later")
            assert record(store, name).queue == "later"
            put_in(store, queue="gone")
            assert (len(claim(store, queue="gone")), len(claim(store, queue="later"))) == (1, 1)

    def test_events_commit_with_their_records(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            put_in(store, 2)
            complete(store, *held_by(claim(store)[0]))
            kinds = [event.kind for event in store.events()]
            assert kinds == ["created", "enqueued"] * 2 + ["dequeued", "execution_completed"]
            assert [event.seq for event in store.events(after=2, limit=3)] == [3, 4, 5]
            assert store.events(after=6) == []

    def test_on_commit_names_queues_with_new_work(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            notified: list[set[str]] = []
            store.on_commit = lambda transaction: (
                notified.append(transaction.ready) if transaction.ready else None
            )
            insert(store, new(), new(queue=OTHER))
            put_in(store, delay_ns=NANOS_PER_S)
            [delivery] = claim(store)
            complete(store, *held_by(delivery))
            assert notified == [{MINE, OTHER}]
            clock.advance(1)
            sweep(store)  # the delay is over
            fail(store, *held_by(claim(store)[0]))
            release(store, *held_by(claim(store)[0]))
            assert notified[1:] == [{MINE}] * 3
            with raises(KeyError):
                store.write(lambda transaction: [transaction.insert([new()]), fails()])
            assert len(notified) == 4

    def test_on_commit_reports_ended_records(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            notified: list[bool] = []
            store.on_commit = lambda transaction: notified.append(True) if transaction.ended else None
            put_in(store, 3, max_retries=0)
            first, second, third = claim(store, 3)
            release(store, *held_by(third))
            assert notified == []
            complete(store, *held_by(first))
            fail(store, *held_by(second))  # a dead letter
            store.write(lambda transaction: transaction.apply(ByIds((third.message_id,)), lifecycle.cancel))
            assert notified == [True] * 3

    def test_the_sender_is_kept_and_an_id_belongs_to_its_sender(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            sent = [new(sender="planner"), new(sender="planner", message_id="x"), new()]
            ids = [accepted.message_id for accepted in insert(store, *sent)]
            ids += [accepted.message_id for accepted in insert(store, new(sender="critic"))]
            stored = [store.load(message_id) for message_id in ids]
            senders = [each and each.envelope.sender for each in stored]
            assert senders == ["planner", "planner", "", "critic"]
            assert [accepted.duplicate for accepted in insert(store, sent[1])] == [True]
            for other in ("", "critic"):
                with raises(InvalidMessage):
                    insert(store, new(sender=other, message_id="x"))

    # ---- retention -----------------------------------------------------------------------------

    def test_ended_records_are_purged_after_their_retention(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            done, cancelled, held, waiting = put_in(store, 4)
            deliveries = claim(store, 3)
            complete(store, *held_by(deliveries[0]))
            clock.advance(10)
            apply(store, cancelled, lifecycle.cancel)
            purge(store, keep_s=5)
            assert (store.load(done), claim(store, 5, queue=OTHER)) == (None, [])
            left = store.find(Listing(limit=10))
            assert [record.message_id for record in left] == [cancelled, held, waiting]
            clock.advance(6)
            assert (
                purge(store, keep_s=5, limit=1) == left[0].seq
            )  # each batch continues after the previous one
            assert purge(store, keep_s=5, after=left[0].seq, limit=10) == 0
            assert len(store.find(Listing(limit=10))) == 2
            deleted = [event.detail for event in store.events() if event.kind == "deleted"]
            assert deleted == [{"records": 1}, {"records": 1}]

    def test_a_purge_of_events_keeps_the_newest_and_leaves_no_gap(self, tmp_path: Path) -> None:
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        for _ in range(20):
            put_in(store)
            clock.advance(1)
        before = snapshot(store)
        for up_to in (7, 25, 10**9):
            purge_events(store, up_to, clock.wall_us())
            left = store.events()
            assert left == before[1][len(before[1]) - len(left) :]
            assert {event.seq for event in before[1] if event.seq > up_to} <= {event.seq for event in left}
        [name] = put_in(store)
        assert store.events(after=40)[0].message_id == name
        assert (store.events(after=40)[0].seq, counts(store)[MINE]) == (41, {"QUEUED": 21})
        store.close()

    def test_events_that_are_not_shipped_are_never_purged(self, tmp_path: Path) -> None:
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        for _ in range(20):
            put_in(store)
            clock.advance(1)
        everything = store.events()
        assert outbox(store) is None
        set_outbox(store, Outbox(shipped=10, backlog_max=7, when_behind="refuse"))
        assert outbox(store) == Outbox(10, 7, "refuse")
        purge_events(store, 10**9, clock.wall_us())
        left = store.events()
        assert left == everything[-len(left) :]
        assert {event.seq for event in everything if event.seq > 10} <= {event.seq for event in left}
        set_outbox(store, None)
        assert outbox(store) is None
        assert store.newest_event() == everything[-1].seq
        store.close()

    def test_shipped_events_are_purged_except_the_latest(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, ManualClock())
        for _ in range(LIVE_EVENTS // 1_000 + 2):
            put_in(store, 500)  # two events each
        newest = store.newest_event()
        for _ in range(10):  # a batch at a time
            set_outbox(store, Outbox(shipped=newest))
        numbers = [event.seq for event in store.events(limit=10 * LIVE_EVENTS)]
        assert numbers[-LIVE_EVENTS:] == list(range(newest - LIVE_EVENTS + 1, newest + 1))
        assert len(numbers) < newest
        store.close()

    def test_payloads_are_found_by_id(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            insert(store, new(b"1"))
            insert(store, new(b"2", delay_ns=NANOS_PER_S))
            insert(store, new(b"3", message_id="mine"))
            claim(store)
            created = [event.message_id for event in store.events() if event.kind == "created"]
            found = store.read(lambda transaction: transaction.records.payloads([*created, "nobody"]))
            assert found == dict(zip(created, (b"1", b"2", b"3"), strict=True))

    def test_each_store_has_its_own_identity(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        with (
            self.opened(tmp_path / "a", ManualClock()) as one,
            self.opened(tmp_path / "b", ManualClock()) as two,
        ):
            assert one.identity()
            assert one.identity() != two.identity()
            one.sync()

    def test_an_alert_is_an_event_about_no_message(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            put_in(store)
            store.write(lambda transaction: transaction.alert("Trouble", "the roof leaks"))
            [*_, alert] = store.events()
            assert (alert.kind, alert.message_id) == ("alert", "")
            assert (alert.error_type, alert.error) == ("Trouble", "the roof leaks")
            assert alert.seq == store.newest_event()

    # ---- queries -------------------------------------------------------------------------------

    def test_records_are_found_by_queue_state_and_deadline(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = put_in(store, 3)
            [elsewhere] = put_in(store, queue=OTHER)
            [delayed] = put_in(store, delay_ns=NANOS_PER_S)
            [delivery] = claim(store, lease_s=5)

            def found(pick: Pick) -> list[str]:
                return [record.message_id for record in store.find(pick)]

            assert found(Listing(limit=10)) == [*names, elsewhere, delayed]
            assert found(Listing(None, "QUEUED", 0, 2)) == names[1:]
            assert found(Listing(OTHER, None, 0, 10)) == [elsewhere]
            assert found(Listing("unknown", None, 0, 10)) == []
            assert found(Listing(MINE, None, record(store, delivery.message_id).seq, 10)) == [
                *names[1:],
                delayed,
            ]
            numbers = {one.message_id: one.seq for one in store.find(Listing(limit=10))}
            newest = numbers[delayed] + 1
            assert found(Listing(limit=10, before=newest)) == [delayed, elsewhere, *reversed(names)]
            assert found(Listing(MINE, None, numbers[names[0]], 1, numbers[delayed])) == [names[2]]
            assert found(Listing(MINE, "QUEUED", 0, 10, newest)) == [names[2], names[1]]
            assert found(Listing(None, "PROCESSING", 0, 10, newest)) == [names[0]]
            assert found(Listing(None, "PROCESSING", 0, 10, numbers[names[0]])) == []
            now_ns = store.read(lambda transaction: transaction.steady_ns)
            assert found(Ending("lease", FOREVER_NS, 10)) == [names[0]]
            assert (found(Ending("lease", now_ns, 10)), found(Ending("delay", now_ns, 10))) == ([], [])
            assert found(Listing(MINE, "PROCESSING")) == [names[0]]
            assert found(Listing(OTHER, "PROCESSING")) == []
            clock.advance(5)
            later_ns = now_ns + 5 * NANOS_PER_S
            assert found(Ending("lease", later_ns, 10)) == [names[0]]
            assert found(Ending("delay", later_ns, 10)) == [delayed]

    def test_the_oldest_overdue_lease_of_all_queues_goes_first(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            put_in(store, queue=OTHER)
            [name] = put_in(store)
            claim(store, queue=OTHER, lease_s=20)
            claim(store, lease_s=10)
            clock.advance(30)
            assert [record.message_id for record in store.find(Ending("lease", FOREVER_NS, 1))] == [name]

    def test_oldest_ns_is_the_age_of_the_oldest_ready_record(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            assert (oldest_ns(store), store.next_work_ns(MINE)) == (None, None)
            put_in(store, priority=3)
            clock.advance(4)
            put_in(store, priority=0)
            assert (oldest_ns(store), store.next_work_ns(MINE)) == (4 * NANOS_PER_S, 0)

    def test_a_history_holds_every_event_of_a_record(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = put_in(store, max_retries=1)
            for word in (release, fail):
                clock.advance(1)
                word(store, *held_by(claim(store)[0]))
            claim(store)
            clock.advance(LEASE_S)
            sweep(store)
            apply(store, name, lifecycle.replay)
            renew(store, *held_by(claim(store)[0]))
            complete(store, name, record(store, name).lease)
            stored = store.load(name)
            assert stored is not None
            happened = [event for event in store.events() if event.kind != "heartbeat"]
            assert [gist(event) for event in stored.history] == [gist(event) for event in happened]

    # ---- handles -------------------------------------------------------------------------------

    def test_a_closed_store_can_be_used_again(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = put_in(store)
            store.close()
            assert record(store, name).state == "QUEUED"
            store.reopen()
            assert names_of(claim(store)) == [name]

    def test_what_a_store_cannot_do_is_refused(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            if not store.capabilities.is_encryptable:
                with raises(InvalidSetting):
                    store.convert()
            if not store.capabilities.is_movable:
                with raises(InvalidMessage):
                    store.set_moved("elsewhere")
                return
            store.set_moved("elsewhere")
            with raises(StoreMoved):
                put_in(store)
            store.set_moved("")
            put_in(store)

    def test_commits_of_two_threads_run_at_once_where_the_store_says_so(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            if not store.capabilities.is_concurrent:
                return
            put_in(store)  # opened before
            both = threading.Barrier(2, timeout=TOGETHER_S)

            def work(transaction: Transaction) -> None:
                transaction.insert([new()])
                both.wait()

            with ThreadPoolExecutor(2) as pool:
                found = [*pool.map(store.write_many, [[work], [work]])]
            assert found == [[None], [None]]
            assert len(store.find(Listing())) == 3

    def test_another_handle_sees_every_commit(self, tmp_path: Path) -> None:
        if not self.keeps:
            return
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store, self.opened(tmp_path, clock) as second:
            set_limits(store, MINE, Limits(max_depth=3))
            put_in(store, 2, key="")
            put_in(second, 1, key="k")
            assert snapshot(store) == snapshot(second)
            with refused(store, QueueFull):
                put_in(store)
            [delivery] = claim(second)
            complete(store, *held_by(delivery))
            assert insert(store, new(key="k"))[0].duplicate
            assert snapshot(store) == snapshot(second)

    def test_after_a_reboot_every_lease_runs_its_whole_length_again(self, tmp_path: Path) -> None:
        if not self.keeps:
            return
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        names = put_in(store, 2)
        claim(store, lease_s=100)
        clock.advance(90)
        claim(store, lease_s=50)
        [delayed] = put_in(store, delay_ns=500 * NANOS_PER_S)
        clock.advance(5)
        store.close()
        clock.reboot()
        with self.opened(tmp_path, clock) as again:
            assert claim(again) == []
            clock.advance(49)
            assert claim(again) == []
            clock.advance(1)
            assert names_of(claim(again, lease_s=1_000)) == [names[1]]
            clock.advance(50)
            assert names_of(claim(again, lease_s=1_000)) == [names[0]]
            clock.advance(400)
            assert names_of(claim(again)) == [delayed]
