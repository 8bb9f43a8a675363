"""What you need to test your own code, or your own store, against postroom. It is public and needs no pytest.

`ManualClock` is a clock that stands until you move it, `MemoryStore` a store that needs no file,
`FaultyStore` a store that fails when you say so, and `StoreContract` the tests that every backend must pass:

    class TestMine(StoreContract):
        def open(self, folder, clock):
            return MyStore(folder / "my.db", clock=clock)

`explained` works out from the events alone where every message stands.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from postroom.core import lifecycle
from postroom.core.lifecycle import NANOS_PER_S
from postroom.errors import InvalidMessage, QueueFull, StaleLease, Unavailable, UnknownTask, WrongState
from postroom.message import Envelope, Event, EventKind, Record, State, Step, Stored
from postroom.stores.base import (
    LIVE_EVENTS,
    Accepted,
    ByIds,
    Claim,
    Counted,
    Decide,
    Delivery,
    Due,
    Expired,
    InState,
    Leased,
    Limits,
    Outbox,
    Overdue,
    Pick,
    Store,
    Transaction,
)
from postroom.stores.memory import MemoryStore

__all__ = [
    "Crashed",
    "Fault",
    "FaultyStore",
    "ManualClock",
    "MemoryStore",
    "StoreContract",
    "Told",
    "check_books",
    "explained",
]

T = TypeVar("T")

MICROS_PER_S = 1_000_000
FIRST_WALL_US = 1_770_000_000 * MICROS_PER_S  # some day in 2026
FIRST_BOOT_NS = 1_000 * NANOS_PER_S
LOOK_MAX = 100_000  # records and events that a check of the books looks at


# ---- time ------------------------------------------------------------------------------------------


class ManualClock:
    """Both clocks of a store, and they stand still until they are moved."""

    def __init__(self) -> None:
        self._boot = 1
        self._boot_ns = FIRST_BOOT_NS
        self._wall_us = FIRST_WALL_US

    def boot_id(self) -> str:
        """Which start of the machine `boot_ns` counts from."""
        return f"boot-{self._boot}"

    def boot_ns(self) -> int:
        """The clock that never steps."""
        return self._boot_ns

    def wall_us(self) -> int:
        """UTC."""
        return self._wall_us

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError("time does not run backwards: step_wall() sets the clock for people")
        self._boot_ns += round(seconds * NANOS_PER_S)
        self._wall_us += round(seconds * MICROS_PER_S)

    def step_wall(self, seconds: float) -> None:
        """Set the clock for people forwards or back, as an operator or NTP does. No time passes."""
        self._wall_us += round(seconds * MICROS_PER_S)

    def reboot(self) -> None:
        """Start the machine anew: no process and no open store survives that, so open them again."""
        self._boot += 1
        self._boot_ns = NANOS_PER_S


# ---- faults ----------------------------------------------------------------------------------------

Fault = Literal["none", "crash", "lost_answer", "duplicate", "delay", "lost_ring"]
"""What can happen to a write.

`crash`: it ends before the commit, so nothing is kept. `lost_answer`: it is committed, and the caller never
learns. `duplicate`: it arrives twice. `delay`: it takes long. `lost_ring`: nobody who waits is woken by it.
"""


class Crashed(Unavailable):
    """Raised by a `FaultyStore` instead of an answer."""


class FaultyStore:
    """A store whose writes go wrong by plan: the first write has the first fault, and so on.

    A plan may be endless, such as a generator of random choices. After its end nothing fails; `inject` adds
    to it. `delay` is called to let time pass: hand in `lambda: clock.advance(60)`.

        store = FaultyStore(MemoryStore(), ["none", "lost_answer"])
        tasks = Tasks(store)
    """

    def __init__(
        self, store: Store, plan: Iterable[Fault] = (), *, delay: Callable[[], None] = lambda: time.sleep(0.1)
    ) -> None:
        self.store = store
        self.url = store.url
        self.happened: list[Fault] = []
        """The faults so far, one a write."""
        self._plan = iter(plan)
        self._injected: list[Fault] = []
        self._delay = delay

    @property
    def on_ready(self) -> Callable[[set[str]], None] | None:
        """Who is told after a commit."""
        return self.store.on_ready

    @on_ready.setter
    def on_ready(self, told: Callable[[set[str]], None] | None) -> None:
        self.store.on_ready = told

    @property
    def on_ended(self) -> Callable[[], None] | None:
        """As the store that it wraps has it."""
        return self.store.on_ended

    @on_ended.setter
    def on_ended(self, told: Callable[[], None] | None) -> None:
        self.store.on_ended = told

    @property
    def on_notable(self) -> Callable[[Sequence[Event]], None] | None:
        """As the store that it wraps has it."""
        return self.store.on_notable

    @on_notable.setter
    def on_notable(self, told: Callable[[Sequence[Event]], None] | None) -> None:
        self.store.on_notable = told

    @property
    def trouble(self) -> str:
        """What the store says of itself."""
        return self.store.trouble

    def inject(self, *faults: Fault) -> None:
        """What happens to the next writes, before the plan goes on."""
        self._injected += faults

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        fault: Fault = self._injected.pop(0) if self._injected else next(self._plan, "none")
        self.happened.append(fault)
        match fault:
            case "none":
                return self.store.write(work, makes_room=makes_room)
            case "crash":
                return self.store.write(_crashing(work), makes_room=makes_room)
            case "lost_answer":
                self.store.write(work, makes_room=makes_room)
                raise Crashed("the answer to a write that was committed is lost")
            case "duplicate":
                self.store.write(work, makes_room=makes_room)
                return self.store.write(work, makes_room=makes_room)
            case "delay":
                self._delay()
                return self.store.write(work, makes_room=makes_room)
            case "lost_ring":
                return self.store.write(_without_ring(work), makes_room=makes_room)

    def read(self, message_id: str) -> Stored | None:
        return self.store.read(message_id)

    def find(self, pick: Pick) -> list[Record]:
        return self.store.find(pick)

    def count(self) -> dict[str, dict[Counted, int]]:
        return self.store.count()

    def oldest_ns(self, queue: str) -> int | None:
        return self.store.oldest_ns(queue)

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        return self.store.events(after, limit)

    def payloads(self, after: int, up_to: int) -> dict[int, bytes]:
        return self.store.payloads(after, up_to)

    def newest_event(self) -> int:
        return self.store.newest_event()

    def identity(self) -> str:
        return self.store.identity()

    def sync(self) -> None:
        self.store.sync()

    def outbox(self) -> Outbox | None:
        return self.store.outbox()

    def set_outbox(self, outbox: Outbox | None) -> None:
        self.store.set_outbox(outbox)

    def next_work_ns(self, queue: str) -> int | None:
        return self.store.next_work_ns(queue)

    def limits(self, queue: str) -> Limits:
        return self.store.limits(queue)

    def set_limits(self, queue: str, limits: Limits) -> None:
        self.store.set_limits(queue, limits)

    def purge_events(self, *, up_to: int, before_us: int, limit: int) -> None:
        self.store.purge_events(up_to=up_to, before_us=before_us, limit=limit)

    def purge_keys(self, before_us: int, limit: int) -> None:
        self.store.purge_keys(before_us, limit)

    def wall_us(self) -> int:
        return self.store.wall_us()

    def steady_ns(self) -> int:
        return self.store.steady_ns()

    def reopen(self) -> None:
        self.store.reopen()

    def close(self) -> None:
        self.store.close()


def _crashing(work: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    def crash(transaction: Transaction) -> T:
        work(transaction)
        raise Crashed("the process ended before its write was committed")

    return crash


class _Nobody(set[str]):
    """Queues that nobody is told about."""

    def add(self, queue: str, /) -> None:
        """Forget it at once."""

    def update(self, *_: Iterable[str]) -> None:
        """Forget them at once."""


def _without_ring(work: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    def silently(transaction: Transaction) -> T:
        told, transaction.ready = transaction.ready, _Nobody()
        try:
            return work(transaction)
        finally:
            transaction.ready = told

    return silently


# ---- what the events say ---------------------------------------------------------------------------


class Told(NamedTuple):
    """Where a message stands, told by its events alone."""

    queue: str
    state: State
    priority: int
    attempt: int
    retries: int
    lease: int


_LEGAL = {(arrow.source, arrow.kind, arrow.target) for arrow in lifecycle.TRANSITIONS}
_SAYS_NOTHING: frozenset[EventKind] = frozenset({"duplicate", "deleted"})
_TAKES_THE_LEASE: frozenset[EventKind] = frozenset(
    {"lease_lapsed", "cancelled", "expired", "quarantined", "replayed"}
)
_COUNTS: frozenset[EventKind] = frozenset({"execution_failed", "lease_lapsed"})


def explained(events: Iterable[Event]) -> dict[str, Told]:
    """The state of every message, worked out from the events of a store since its beginning.

    Raises `ValueError` at an event that does not follow from those before it.
    """
    told: dict[str, Told] = {}
    last_kind: dict[str, EventKind] = {}
    for event in events:
        if event.kind in _SAYS_NOTHING or not event.message_id:
            continue
        told[event.message_id] = _after(event, told.get(event.message_id), last_kind.get(event.message_id))
        last_kind[event.message_id] = event.kind
    return told


def _after(event: Event, before: Told | None, last_kind: EventKind | None) -> Told:
    if event.kind == "created":  # perhaps of a name that was forgotten meanwhile
        return Told(event.queue, event.state, event.priority, 0, 0, 0)
    if before is None:
        raise ValueError(f"event {event.seq} ({event.kind}) is about a message that was never created")
    says_it_again = event.kind == "enqueued" and last_kind in ("created", "replayed")
    if not says_it_again and (before.state, event.kind, event.state) not in _LEGAL:
        raise ValueError(f"event {event.seq} ({event.kind}) leads from {before.state} to {event.state}")
    if event.kind in ("heartbeat", "execution_completed", "execution_failed", "released") and (
        event.lease != before.lease
    ):
        raise ValueError(f"event {event.seq} ({event.kind}) shows lease {event.lease}, not {before.lease}")
    lease = event.lease if event.kind == "dequeued" else before.lease
    if event.kind == "released":
        lease = -lease
    retries = 0 if event.kind == "replayed" else before.retries + (event.kind in _COUNTS)
    return Told(
        event.queue,
        event.state,
        event.priority,
        event.attempt,
        retries,
        0 if event.kind in _TAKES_THE_LEASE else lease,
    )


def check_books(store: Store) -> None:
    """The events of a store have no gap and explain its records, and its counters are what a recount gives.

    For a store none of whose events were purged.
    """
    events = store.events(limit=LOOK_MAX)
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "the events have a gap"
    records = store.find(InState(None, None, 0, LOOK_MAX))
    told = explained(events)
    for record in records:
        shown = Told(
            record.queue, record.state, record.priority, record.attempt, record.retries, record.lease
        )  # fmt: skip
        assert told[record.message_id] == shown, "the events tell another story than the record"
    recount: dict[str, dict[Counted, int]] = {}
    for record in records:
        counts = recount.setdefault(record.queue, {})
        counts[record.state] = counts.get(record.state, 0) + 1
    for event in events:
        if event.kind == "lease_lapsed":
            counts = recount.setdefault(event.queue, {})
            counts["LAPSES"] = counts.get("LAPSES", 0) + 1
    counted = {queue: counts for queue, counts in store.count().items() if counts}
    assert counted == recount, "the counters are not what a recount gives"


# ---- the contract ----------------------------------------------------------------------------------

MINE = "mine"
OTHER = "other"
LEASE_S = 300.0


@contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _fails() -> Any:
    raise KeyError("planned")


def _envelope(payload: bytes = b"{}", **facts: Any) -> Envelope:
    return Envelope(**{"queue": MINE, "payload": payload, **facts})


def _insert(store: Store, *envelopes: Envelope) -> list[Accepted]:
    return store.write(lambda transaction: transaction.insert(envelopes))


def _put_in(store: Store, count: int = 1, **facts: Any) -> list[str]:
    envelopes = [_envelope(b"%d" % number, **facts) for number in range(count)]
    return [accepted.message_id for accepted in _insert(store, *envelopes)]


def _claim(
    store: Store,
    limit: int = 1,
    *,
    queue: str = MINE,
    lease_s: float = LEASE_S,
    worker: str = "worker",
    priorities: tuple[int, ...] = (2,),
    promote_after_s: tuple[float, ...] = (),
) -> list[Delivery]:
    terms = Claim(
        queue,
        worker,
        limit,
        round(lease_s * NANOS_PER_S),
        priorities,
        tuple(round(seconds * NANOS_PER_S) for seconds in promote_after_s),
    )
    return store.write(lambda transaction: transaction.claim(terms))


def _names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.message_id for delivery in deliveries]


def _say(store: Store, message_id: str, decide: Decide) -> list[Step]:
    return store.write(lambda transaction: transaction.apply(ByIds((message_id,)), decide))


def _complete(store: Store, message_id: str, token: int, result: bytes = b"1") -> None:
    store.write(lambda transaction: transaction.complete({message_id: (token, result)}))


def _fail(store: Store, message_id: str, token: int, delay_s: float | None = 0) -> list[Step]:
    delay_ns = None if delay_s is None else round(delay_s * NANOS_PER_S)
    return _say(
        store, message_id, lambda record, now: lifecycle.fail(record, now, token, "broken", delay_ns=delay_ns)
    )


def _release(store: Store, message_id: str, token: int) -> list[Step]:
    return _say(store, message_id, lambda record, now: lifecycle.release(record, now, token))


def _renew(store: Store, message_id: str, token: int) -> list[Step]:
    return _say(store, message_id, lambda record, now: lifecycle.renew(record, now, token))


def _sweep(store: Store, limit: int = 100) -> int:
    return store.write(lambda transaction: transaction.sweep(limit))


def _ids(delivery: Delivery) -> tuple[str, int]:
    return delivery.message_id, delivery.lease


def _purge(store: Store, *, keep_s: float, after: int = 0, limit: int = 100) -> int:
    keep_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, round(keep_s * MICROS_PER_S))
    return store.write(lambda transaction: transaction.purge(after, keep_us, limit))


def _gist(event: Event) -> tuple[Any, ...]:
    """What a history keeps of an event: all but how long it took and what the first event says already."""
    return (
        event.seq, event.ts_us, event.kind, event.queue, event.message_id, event.state, event.attempt,
        event.priority, event.lease, event.worker_id, event.error_type, event.error, event.detail,
    )  # fmt: skip


def _record(store: Store, message_id: str) -> Record:
    return store.find(ByIds((message_id,)))[0]


def _everything(store: Store) -> tuple[list[Record], list[Event], dict[str, dict[Counted, int]]]:
    """What a call that is refused must leave as it is."""
    counts = {queue: counts for queue, counts in store.count().items() if counts}
    return store.find(InState(None, None, 0, LOOK_MAX)), store.events(limit=LOOK_MAX), counts


@contextmanager
def _refused(store: Store, kind: type[BaseException]) -> Iterator[None]:
    before = _everything(store)
    with _raises(kind):
        yield
    assert _everything(store) == before, "a call that was refused changed something"


class StoreContract(ABC):
    """The tests of a backend. Subclass it under pytest and write `open`."""

    keeps: ClassVar[bool] = True
    """Whether a store that is opened again in the same folder holds what was stored."""

    @abstractmethod
    def open(self, folder: Path, clock: ManualClock) -> Store:
        """A store of this folder. Called again for the same folder, it is another handle of the same one."""

    @contextmanager
    def opened(self, folder: Path, clock: ManualClock) -> Iterator[Store]:
        """A store that is closed at the end, and whose books are checked then."""
        store = self.open(folder, clock)
        try:
            yield store
            check_books(store)
        finally:
            store.close()

    # ---- coming in -----------------------------------------------------------------------------

    def test_what_is_inserted_can_be_read(self, tmp_path: Path) -> None:
        facts: dict[str, Any] = {
            "type": "t",
            "parent_message_id": "p",
            "key": "k",
            "priority": 1,
            "ttl_ns": 9,
        }
        envelope = _envelope(b'{"a":1}', max_retries=5, **facts)
        with self.opened(tmp_path, ManualClock()) as store:
            [accepted] = _insert(store, envelope)
            stored = store.read(accepted.message_id)
            assert stored is not None
            assert stored.envelope == replace(envelope, message_id=accepted.message_id)
            assert (stored.record.state, stored.record.attempt, stored.result) == ("QUEUED", 0, None)
            assert [event.kind for event in stored.history] == ["created", "enqueued"]
            assert store.read("nobody") is None
            with _raises(UnknownTask):
                store.find(ByIds((accepted.message_id, "nobody")))

    def test_a_store_names_what_has_no_name_and_every_name_is_new(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = _put_in(store, 3) + _put_in(store, 2)
            assert len(set(names)) == 5
            with _refused(store, InvalidMessage):  # it would be taken for one of its own
                _put_in(store, message_id=names[0].rpartition("-")[0] + "-77777")
            for odd in ("-2", "-00" + names[0].rpartition("-")[2], "-9" * 30, "-" + "9" * 30, ""):
                assert store.read(names[0].rpartition("-")[0] + odd) is None

    def test_the_same_name_is_one_message(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            first = _insert(store, _envelope(b"1", message_id="x"))
            again = _insert(store, _envelope(b"2", message_id="x"))
            assert (first, again) == ([Accepted("x", duplicate=False)], [Accepted("x", duplicate=True)])
            assert [delivery.payload for delivery in _claim(store, 10)] == [b"1"]
            assert store.events()[2].kind == "duplicate"
            [named] = _put_in(store)
            assert _insert(store, _envelope(message_id=named)) == [Accepted(named, duplicate=True)]
            assert _names(_claim(store, 10)) == [named]

    def test_the_same_key_is_one_message_in_its_queue(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            both = _insert(store, _envelope(key="k"), _envelope(key="k"))
            [again] = _insert(store, _envelope(key="k", message_id="x"))
            [elsewhere] = _insert(store, _envelope(key="k", queue=OTHER))
            assert [accepted.duplicate for accepted in (*both, again, elsewhere)] == [
                False,
                True,
                True,
                False,
            ]
            assert both[0].message_id == both[1].message_id == again.message_id
            [delivery] = _claim(store, 10)
            _complete(store, *_ids(delivery))
            [late] = _insert(store, _envelope(key="k"))  # also when the first one is over
            assert late.message_id == again.message_id
            duplicates = [event for event in store.events() if event.kind == "duplicate"]
            assert [event.detail for event in duplicates] == [{"key": "k"}] * 3

    def test_a_key_is_known_until_it_is_purged(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            _insert(store, _envelope(key="old"))
            clock.advance(10)
            _insert(store, _envelope(key="new"))
            store.purge_keys(clock.wall_us(), 10)
            assert [a.duplicate for a in _insert(store, _envelope(key="old"), _envelope(key="new"))] == [
                False,
                True,
            ]

    def test_a_key_outlives_its_record(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [first] = _insert(store, _envelope(key="k"))
            [delivery] = _claim(store)
            _complete(store, *_ids(delivery))
            clock.advance(10)
            _purge(store, keep_s=1)
            assert store.read(first.message_id) is None
            assert _insert(store, _envelope(key="k")) == [Accepted(first.message_id, duplicate=True)]

    def test_several_are_inserted_all_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            store.set_limits(MINE, Limits(max_payload_bytes=3))
            with _refused(store, InvalidMessage):
                _insert(store, _envelope(b"123"), _envelope(b"1234"))
            _insert(store, _envelope(b"123"), _envelope(b"1234", queue=OTHER))

    def test_a_queue_holds_what_it_may_and_not_more(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            store.set_limits(MINE, Limits(max_depth=3))
            _put_in(store, 2)
            with _refused(store, QueueFull):
                _put_in(store, 2)
            _put_in(store, 1, delay_ns=NANOS_PER_S)  # what waits for its time counts too
            with _refused(store, QueueFull):
                _put_in(store, 1)
            _put_in(store, 5, queue=OTHER)
            _claim(store)  # what somebody works on does not
            _put_in(store, 1)
            with _refused(store, QueueFull):
                store.write(lambda transaction: [transaction.insert([_envelope()]) for _ in range(2)])

    def test_what_is_known_is_no_load_for_a_full_queue(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            store.set_limits(MINE, Limits(max_depth=2))
            _insert(store, _envelope(key="k"), _envelope(message_id="x"))
            again = _insert(store, _envelope(key="k"), _envelope(message_id="x"))
            assert [accepted.duplicate for accepted in again] == [True, True]
            with _refused(store, QueueFull):
                _insert(store, _envelope(key="k"), _envelope())

    def test_a_delay_holds_a_message_back(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [late] = _put_in(store, delay_ns=10 * NANOS_PER_S)
            [later] = _put_in(store, delay_ns=20 * NANOS_PER_S)
            [now] = _put_in(store)
            assert _record(store, late).state == "SCHEDULED"
            assert _names(_claim(store, 10)) == [now]
            assert store.next_work_ns(MINE) == 10 * NANOS_PER_S
            clock.advance(10)
            assert store.next_work_ns(MINE) == 0
            assert _names(_claim(store, 10)) == [late]
            clock.advance(10)
            assert _sweep(store) == 1
            assert _record(store, later).state == "QUEUED"

    # ---- delivery ------------------------------------------------------------------------------

    def test_a_queue_is_in_order(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = _put_in(store, 12)
            _put_in(store, 1, queue=OTHER)
            claimed = [_claim(store, limit) for limit in (1, 5, 100)]
            assert [len(deliveries) for deliveries in claimed] == [1, 5, 6]
            assert [name for deliveries in claimed for name in _names(deliveries)] == names
            assert [d.payload for d in claimed[2]] == [b"%d" % number for number in range(6, 12)]
            tokens = [delivery.lease for deliveries in claimed for delivery in deliveries]
            assert tokens == sorted(set(tokens))
            assert _claim(store) == []
            assert _claim(store, queue="unknown") == []

    def test_the_best_priority_goes_first(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            by_priority = {priority: _put_in(store, 2, priority=priority) for priority in (3, 1, 0, 2)}
            lanes = (0, 1, 2, 3)
            names = [name for _ in range(8) for name in _names(_claim(store, priorities=lanes))]
            assert names == [name for priority in lanes for name in by_priority[priority]]

    def test_waiting_lifts_a_message(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [old] = _put_in(store, priority=3)
            clock.advance(30)
            [middle] = _put_in(store, priority=2)
            [urgent] = _put_in(store, priority=0)
            terms: Any = {"priorities": (0, 1, 2, 3), "promote_after_s": (100, 20, 25)}
            assert _names(_claim(store, 2, **terms)) == [urgent, old]  # 25 s lifted it beside the middle one
            assert _record(store, old).priority == 2
            clock.advance(20)
            assert _names(_claim(store, **terms)) == [middle]
            promoted = [event for event in store.events() if event.kind == "promoted"]
            assert [(event.message_id, event.detail) for event in promoted] == [
                (old, {"from": 3}),
                (middle, {"from": 2}),
            ]

    def test_a_lease_runs_out_on_the_clock_that_does_not_step(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = _put_in(store)
            [first] = _claim(store)
            for step in (3_600, -3_600, 86_400, -86_400):
                clock.step_wall(step)
                assert _claim(store) == []
            clock.advance(LEASE_S - 1)
            assert (_claim(store), store.next_work_ns(MINE)) == ([], NANOS_PER_S)
            clock.advance(1)
            assert store.next_work_ns(MINE) == 0
            [second] = _claim(store, worker="second")
            assert (second.message_id, second.attempt, _record(store, name).retries) == (name, 2, 1)
            assert second.lease > first.lease
            assert store.count()[MINE]["LAPSES"] == 1

    def test_a_late_word_is_refused_whether_or_not_anybody_took_over(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            _put_in(store)
            [delivery] = _claim(store)
            clock.advance(LEASE_S)
            self._all_refused(store, delivery)
            _sweep(store)
            self._all_refused(store, delivery)
            [second] = _claim(store)
            self._all_refused(store, delivery)
            _complete(store, *_ids(second))
            self._all_refused(store, delivery)

    def _all_refused(self, store: Store, delivery: Delivery) -> None:
        for word in (_complete, _fail, _release, _renew):
            with _refused(store, StaleLease):
                word(store, *_ids(delivery))

    def test_a_heartbeat_keeps_the_lease(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            _put_in(store)
            [delivery] = _claim(store)
            for _ in range(5):
                clock.advance(LEASE_S - 1)
                _renew(store, *_ids(delivery))
                assert _claim(store) == []
            _complete(store, *_ids(delivery))
            completed = store.events()[-1]
            assert completed.duration_us == 5 * (LEASE_S - 1) * MICROS_PER_S

    def test_only_the_lease_speaks(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = _put_in(store, 2)
            mine, other = _claim(store, 2)
            for token in (0, -1, mine.lease + 10**6, other.lease):
                for word in (_complete, _fail, _release, _renew):
                    with _refused(store, StaleLease):
                        word(store, names[0], token)
            with _refused(store, UnknownTask):
                _complete(store, "nobody", mine.lease)

    def test_the_last_word_may_be_repeated(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            for word in (_complete, _release, _fail):
                _put_in(store)
                [delivery] = _claim(store)
                word(store, *_ids(delivery))
                before = _everything(store)
                word(store, *_ids(delivery))
                assert _everything(store) == before
                self._take_all(store)

    def _take_all(self, store: Store) -> None:
        for delivery in _claim(store, 100):
            _complete(store, *_ids(delivery))

    def test_a_result_is_kept_and_the_first_one_stands(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)
            [delivery] = _claim(store)
            _complete(store, *_ids(delivery), b"first")
            _complete(store, *_ids(delivery), b"second")
            stored = store.read(name)
            assert stored is not None
            assert (stored.result, stored.record.state) == (b"first", "COMPLETED")

    def test_what_is_released_keeps_its_place(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            first, second = _put_in(store, 2)
            [delivery] = _claim(store)
            _release(store, *_ids(delivery))
            assert _names(_claim(store, 2)) == [first, second]
            assert (_record(store, first).attempt, _record(store, first).retries) == (2, 0)

    def test_what_failed_goes_to_the_end_or_waits(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            first, second = _put_in(store, 2)
            _fail(store, *_ids(_claim(store)[0]))
            assert _names(_claim(store, 2)) == [second, first]
            _fail(store, first, _record(store, first).lease, delay_s=60)
            assert (_record(store, first).state, _claim(store)) == ("RETRYING", [])
            clock.advance(60)
            assert _names(_claim(store)) == [first]

    def test_after_its_retries_a_message_is_a_dead_letter(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = _put_in(store, max_retries=2)
            _fail(store, *_ids(_claim(store)[0]))
            _claim(store)
            clock.advance(LEASE_S)  # a lapse counts as well
            _fail(store, *_ids(_claim(store)[0]))
            assert (_record(store, name).state, _claim(store)) == ("DEAD_LETTER", [])
            stored = store.read(name)
            assert stored is not None
            assert [event.error for event in stored.history if event.error] == [
                "broken",
                lifecycle.LAPSED,
                "broken",
                "broken",
            ]
            _say(store, name, lifecycle.replay)
            assert _names(_claim(store)) == [name]
            assert (_record(store, name).attempt, _record(store, name).retries) == (4, 0)

    def test_never_again_is_a_dead_letter_at_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)
            _fail(store, *_ids(_claim(store)[0]), delay_s=None)
            assert _record(store, name).state == "DEAD_LETTER"

    def test_what_is_cancelled_is_given_to_nobody(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            waiting, held = _put_in(store, 2)
            [delayed] = _put_in(store, delay_ns=NANOS_PER_S)
            _release(store, *_ids(_claim(store)[0]))
            deliveries = _claim(store, 2)
            _release(store, *_ids(deliveries[0]))
            for name in (waiting, held, delayed):
                _say(store, name, lifecycle.cancel)
            assert (_claim(store), store.next_work_ns(MINE), store.oldest_ns(MINE)) == ([], None, None)
            self._all_refused(store, deliveries[1])
            with _refused(store, WrongState):
                _say(store, held, lifecycle.cancel)
            _say(store, held, lifecycle.replay)
            assert _names(_claim(store)) == [held]

    def test_what_is_quarantined_is_kept_and_given_to_nobody(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)
            [delivery] = _claim(store)
            _say(store, name, lambda record, now: lifecycle.quarantine(record, now, "it kills"))
            self._all_refused(store, delivery)
            assert (_record(store, name).state, _claim(store)) == ("QUARANTINED", [])
            assert store.events()[-1].error == "it kills"

    def test_what_waited_too_long_expires(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            short = _put_in(store, 3, ttl_ns=10 * NANOS_PER_S)
            [held] = _names(_claim(store))
            [never] = _put_in(store)
            clock.advance(10)
            assert _names(_claim(store)) == [never]
            assert [_record(store, name).state for name in short] == ["PROCESSING", "EXPIRED", "EXPIRED"]
            _put_in(store, 2, ttl_ns=NANOS_PER_S)
            clock.advance(1)
            assert len(store.find(Expired(10))) == 2
            assert _sweep(store) == 2
            assert held == short[0]

    def test_a_result_is_handed_over_and_settled_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)
            [delivery] = _claim(store)
            _complete(store, *_ids(delivery))
            _say(store, name, lambda record, now: lifecycle.hand_over(record, now, "d"))
            _complete(store, *_ids(delivery))  # a repeated word moves nothing back
            assert _record(store, name).state == "EXECUTING"
            _say(store, name, lifecycle.settle)
            _complete(store, *_ids(delivery))
            assert _record(store, name).state == "DONE"
            with _refused(store, WrongState):
                _say(store, name, lifecycle.settle)

    # ---- commits -------------------------------------------------------------------------------

    def test_work_that_raises_leaves_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)

            def work(transaction: Transaction) -> None:
                transaction.insert([_envelope(key="k"), _envelope(queue="new", message_id="x")])
                transaction.claim(Claim(MINE, "w", 10, NANOS_PER_S))
                transaction.apply(ByIds((name,)), lifecycle.cancel)
                raise KeyError(name)

            with _refused(store, KeyError):
                store.write(work)
            assert not _insert(store, _envelope(key="k"))[0].duplicate
            assert not _insert(store, _envelope(queue="new", message_id="x"))[0].duplicate

    def test_several_are_completed_all_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            _put_in(store, 2, message_id="")
            _put_in(store, message_id="named")
            words = {delivery.message_id: (delivery.lease, b"1") for delivery in _claim(store, 3)}
            with _refused(store, StaleLease):
                store.write(lambda transaction: transaction.complete({**words, "named": (1, b"1")}))
            with _refused(store, UnknownTask):
                store.write(lambda transaction: transaction.complete({**words, "nobody": (1, b"1")}))
            store.write(lambda transaction: transaction.complete(words))
            assert store.count() == {MINE: {"COMPLETED": 3}}

    def test_names_and_words_may_hold_any_text(self, tmp_path: Path) -> None:
        odd = 'a "b"\\\n\u2028\x85{}%ü\0'
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = _put_in(store, 2, queue=odd, type=odd, parent_message_id=odd, max_retries=0)
            names += _put_in(store, queue=odd, key=odd, message_id=odd)
            deliveries = _claim(store, 3, queue=odd, worker=odd)
            assert [(d.message_id, d.queue) for d in deliveries] == [(name, odd) for name in names]
            _complete(store, *_ids(deliveries[0]))
            _say(store, names[2], lambda record, now: lifecycle.fail(record, now, deliveries[2].lease, odd))
            clock.advance(LEASE_S)
            _sweep(store)
            assert store.count()[odd] == {"COMPLETED": 1, "DEAD_LETTER": 1, "QUEUED": 1, "LAPSES": 1}
            stored = store.read(odd)
            assert stored is not None
            assert (stored.envelope.key, stored.history[-2].error, stored.history[2].worker_id) == (odd,) * 3
            assert all(event.queue == odd for event in store.events())

    def test_several_ids_are_decided_all_or_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            names = _put_in(store, 3)
            _say(store, names[2], lifecycle.cancel)
            with _refused(store, WrongState):
                store.write(lambda transaction: transaction.apply(ByIds(tuple(names)), lifecycle.cancel))
            with _refused(store, UnknownTask):
                store.write(
                    lambda transaction: transaction.apply(ByIds((names[0], "nobody")), lifecycle.cancel)
                )

    def test_a_name_of_a_queue_that_was_rolled_back_is_forgotten(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:

            def work(transaction: Transaction) -> None:
                for _ in range(2):
                    transaction.claim(Claim("gone", "w", 1, NANOS_PER_S))
                    transaction.insert([_envelope(queue="gone", message_id="x")])
                transaction.find(ByIds(("x",)))
                raise KeyError("gone")

            with _raises(KeyError):
                store.write(work)
            [name] = _put_in(store, queue="later")
            assert _record(store, name).queue == "later"
            _put_in(store, queue="gone")
            assert (len(_claim(store, queue="gone")), len(_claim(store, queue="later"))) == (1, 1)

    def test_the_events_of_a_commit_are_in_it(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            _put_in(store, 2)
            _complete(store, *_ids(_claim(store)[0]))
            kinds = [event.kind for event in store.events()]
            assert kinds == ["created", "enqueued"] * 2 + ["dequeued", "execution_completed"]
            assert [event.seq for event in store.events(after=2, limit=3)] == [3, 4, 5]
            assert store.events(after=6) == []

    def test_who_waits_is_told_after_the_commit(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            told: list[set[str]] = []
            store.on_ready = lambda queues: told.append(set(queues))
            _insert(store, _envelope(), _envelope(queue=OTHER))
            _put_in(store, delay_ns=NANOS_PER_S)
            [delivery] = _claim(store)
            _complete(store, *_ids(delivery))
            assert told == [{MINE, OTHER}]
            clock.advance(1)
            _sweep(store)  # the delay is over
            _fail(store, *_ids(_claim(store)[0]))
            _release(store, *_ids(_claim(store)[0]))
            assert told[1:] == [{MINE}] * 3
            with _raises(KeyError):
                store.write(lambda transaction: [transaction.insert([_envelope()]), _fails()])
            assert len(told) == 4

    def test_who_waits_for_a_result_is_told_after_the_commit(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            told: list[bool] = []
            store.on_ended = lambda: told.append(True)
            _put_in(store, 3, max_retries=0)
            first, second, third = _claim(store, 3)
            _release(store, *_ids(third))
            assert told == []
            _complete(store, *_ids(first))
            _fail(store, *_ids(second))  # a dead letter
            store.write(lambda transaction: transaction.apply(ByIds((third.message_id,)), lifecycle.cancel))
            assert told == [True] * 3

    def test_the_sender_is_kept_and_a_name_belongs_to_its_sender(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            sent = [_envelope(sender="planner"), _envelope(sender="planner", message_id="x"), _envelope()]
            ids = [accepted.message_id for accepted in _insert(store, *sent)]
            ids += [accepted.message_id for accepted in _insert(store, _envelope(sender="critic"))]
            stored = [store.read(message_id) for message_id in ids]
            senders = [each and each.envelope.sender for each in stored]
            assert senders == ["planner", "planner", "", "critic"]
            assert [accepted.duplicate for accepted in _insert(store, sent[1])] == [True]
            for other in ("", "critic"):
                with _raises(InvalidMessage):
                    _insert(store, _envelope(sender=other, message_id="x"))

    # ---- keeping -------------------------------------------------------------------------------

    def test_what_is_over_is_forgotten_when_its_time_has_come(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            done, cancelled, held, waiting = _put_in(store, 4)
            deliveries = _claim(store, 3)
            _complete(store, *_ids(deliveries[0]))
            clock.advance(10)
            _say(store, cancelled, lifecycle.cancel)
            _purge(store, keep_s=5)
            assert (store.read(done), _claim(store, 5, queue=OTHER)) == (None, [])
            left = store.find(InState(None, None, 0, 10))
            assert [record.message_id for record in left] == [cancelled, held, waiting]
            clock.advance(6)
            assert _purge(store, keep_s=5, limit=1) == left[0].seq  # a batch at a time, and then on behind it
            assert _purge(store, keep_s=5, after=left[0].seq, limit=10) == 0
            assert len(store.find(InState(None, None, 0, 10))) == 2
            deleted = [event.detail for event in store.events() if event.kind == "deleted"]
            assert deleted == [{"records": 1}, {"records": 1}]

    def test_a_purge_of_events_leaves_the_newest_and_no_gap(self, tmp_path: Path) -> None:
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        for _ in range(20):
            _put_in(store)
            clock.advance(1)
        before = _everything(store)
        for up_to in (7, 25, 10**9):
            store.purge_events(up_to=up_to, before_us=clock.wall_us(), limit=1_000)
            left = store.events()
            assert left == before[1][len(before[1]) - len(left) :]
            assert {event.seq for event in before[1] if event.seq > up_to} <= {event.seq for event in left}
        [name] = _put_in(store)
        assert store.events(after=40)[0].message_id == name
        assert (store.events(after=40)[0].seq, store.count()[MINE]) == (41, {"QUEUED": 21})
        store.close()

    def test_what_an_outbox_waits_for_is_never_purged(self, tmp_path: Path) -> None:
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        for _ in range(20):
            _put_in(store)
            clock.advance(1)
        everything = store.events()
        assert store.outbox() is None
        store.set_outbox(Outbox(shipped=10, backlog_max=7, when_behind="refuse"))
        assert store.outbox() == Outbox(10, 7, "refuse")
        store.purge_events(up_to=10**9, before_us=clock.wall_us(), limit=1_000)
        left = store.events()
        assert left == everything[-len(left) :]
        assert {event.seq for event in everything if event.seq > 10} <= {event.seq for event in left}
        store.set_outbox(None)
        assert store.outbox() is None
        assert store.newest_event() == everything[-1].seq
        store.close()

    def test_what_was_shipped_is_forgotten_but_for_the_latest(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, ManualClock())
        for _ in range(LIVE_EVENTS // 1_000 + 2):
            _put_in(store, 500)  # two events each
        newest = store.newest_event()
        for _ in range(10):  # a batch at a time
            store.set_outbox(Outbox(shipped=newest))
        numbers = [event.seq for event in store.events(limit=10 * LIVE_EVENTS)]
        assert numbers[-LIVE_EVENTS:] == list(range(newest - LIVE_EVENTS + 1, newest + 1))
        assert len(numbers) < newest
        store.close()

    def test_what_messages_said_is_found_by_their_first_events(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            _insert(store, _envelope(b"1"))
            _insert(store, _envelope(b"2", delay_ns=NANOS_PER_S))
            _insert(store, _envelope(b"3", message_id="mine"))
            _claim(store)
            created = {event.seq: event.message_id for event in store.events() if event.kind == "created"}
            newest = store.newest_event()
            assert store.payloads(0, newest) == dict(zip(created, (b"1", b"2", b"3"), strict=True))
            assert store.payloads(1, newest) == dict(zip([*created][1:], (b"2", b"3"), strict=True))
            assert store.payloads(0, 1) == {1: b"1"}
            assert store.payloads(newest, newest + 100) == {}

    def test_a_store_has_a_name_of_its_own(self, tmp_path: Path) -> None:
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
            _put_in(store)
            store.write(lambda transaction: transaction.alert("Trouble", "the roof leaks"))
            [*_, alert] = store.events()
            assert (alert.kind, alert.message_id) == ("alert", "")
            assert (alert.error_type, alert.error) == ("Trouble", "the roof leaks")
            assert alert.seq == store.newest_event()

    # ---- looking -------------------------------------------------------------------------------

    def test_records_are_found_by_how_they_stand(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            names = _put_in(store, 3)
            [elsewhere] = _put_in(store, queue=OTHER)
            [delayed] = _put_in(store, delay_ns=NANOS_PER_S)
            [delivery] = _claim(store, lease_s=5)

            def found(pick: Pick) -> list[str]:
                return [record.message_id for record in store.find(pick)]

            assert found(InState(None, None, 0, 10)) == [*names, elsewhere, delayed]
            assert found(InState(None, "QUEUED", 0, 2)) == names[1:]
            assert found(InState(OTHER, None, 0, 10)) == [elsewhere]
            assert found(InState("unknown", None, 0, 10)) == []
            assert found(InState(MINE, None, _record(store, delivery.message_id).seq, 10)) == [
                *names[1:],
                delayed,
            ]
            assert (found(Leased(MINE, 10)), found(Leased(OTHER, 10))) == ([names[0]], [])
            assert (found(Overdue(MINE, 10)), found(Due(MINE, 10))) == ([], [])
            clock.advance(5)
            assert (found(Overdue(MINE, 10)), found(Due(MINE, 10))) == ([names[0]], [delayed])
            assert (found(Overdue(OTHER, 10)), found(Overdue(None, 10))) == ([], [names[0]])

    def test_the_oldest_overdue_lease_of_all_queues_goes_first(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            _put_in(store, queue=OTHER)
            [name] = _put_in(store)
            _claim(store, queue=OTHER, lease_s=20)
            _claim(store, lease_s=10)
            clock.advance(30)
            assert [record.message_id for record in store.find(Overdue(None, 1))] == [name]

    def test_how_long_the_head_has_waited(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            assert (store.oldest_ns(MINE), store.next_work_ns(MINE)) == (None, None)
            _put_in(store, priority=3)
            clock.advance(4)
            _put_in(store, priority=0)
            assert (store.oldest_ns(MINE), store.next_work_ns(MINE)) == (4 * NANOS_PER_S, 0)

    def test_a_history_tells_the_whole_story(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store:
            [name] = _put_in(store, max_retries=1)
            for word in (_release, _fail):
                clock.advance(1)
                word(store, *_ids(_claim(store)[0]))
            _claim(store)
            clock.advance(LEASE_S)
            _sweep(store)
            _say(store, name, lifecycle.replay)
            _renew(store, *_ids(_claim(store)[0]))
            _complete(store, name, _record(store, name).lease)
            stored = store.read(name)
            assert stored is not None
            happened = [event for event in store.events() if event.kind != "heartbeat"]
            assert [_gist(event) for event in stored.history] == [_gist(event) for event in happened]

    # ---- life ----------------------------------------------------------------------------------

    def test_a_closed_store_can_be_used_again(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, ManualClock()) as store:
            [name] = _put_in(store)
            store.close()
            assert _record(store, name).state == "QUEUED"
            store.reopen()
            assert _names(_claim(store)) == [name]

    def test_another_handle_sees_everything(self, tmp_path: Path) -> None:
        if not self.keeps:
            return
        clock = ManualClock()
        with self.opened(tmp_path, clock) as store, self.opened(tmp_path, clock) as second:
            store.set_limits(MINE, Limits(max_depth=3))
            _put_in(store, 2, key="")
            _put_in(second, 1, key="k")
            assert _everything(store) == _everything(second)
            with _refused(store, QueueFull):
                _put_in(store)
            [delivery] = _claim(second)
            _complete(store, *_ids(delivery))
            assert _insert(store, _envelope(key="k"))[0].duplicate
            assert _everything(store) == _everything(second)

    def test_after_another_boot_every_lease_runs_once_more(self, tmp_path: Path) -> None:
        if not self.keeps:
            return
        clock = ManualClock()
        store = self.open(tmp_path, clock)
        names = _put_in(store, 2)
        _claim(store, lease_s=100)
        clock.advance(90)
        _claim(store, lease_s=50)
        [delayed] = _put_in(store, delay_ns=500 * NANOS_PER_S)
        clock.advance(5)
        store.close()
        clock.reboot()
        with self.opened(tmp_path, clock) as again:
            assert _claim(again) == []
            clock.advance(49)
            assert _claim(again) == []
            clock.advance(1)
            assert _names(_claim(again, lease_s=1_000)) == [names[1]]
            clock.advance(50)
            assert _names(_claim(again, lease_s=1_000)) == [names[0]]
            clock.advance(400)
            assert _names(_claim(again)) == [delayed]
