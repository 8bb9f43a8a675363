"""A transaction: every verb of a store, over its records, events, cells and lanes.

Rule 1: a verb checks everything before it writes, so work that is refused has changed nothing.
Rule 2: a backend may override a verb with a faster form of it. An equivalence test compares the two.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.errors import InvalidMessage, QueueFull, StaleLease, UnreadableValue
from postroom.message import Envelope, Event, EventKind, Moment, Noted, Record, Step, org_of
from postroom.stores import alerts
from postroom.stores.base import (
    DEFAULT_LIMITS,
    FOREVER_NS,
    KEY,
    LANE_COUNTS,
    LANES,
    LIMITS,
    LIVE_EVENTS,
    OUTBOX,
    OVERDUE_A_CLAIM_MAX,
    RETRY_AFTER_S,
    ByIds,
    Cells,
    Change,
    Ending,
    Events,
    Head,
    Lanes,
    Limits,
    Outbox,
    Parts,
    Pick,
    Records,
    waiting,
    within_bytes,
)
from postroom.stores.codec import PLAIN, Codec
from postroom.stores.own_ids import OwnIds
from postroom.system.log import library_log

NO_DETAILS: Final[Mapping[str, dict[str, Any]]] = {}
NO_STARTS: Final[Mapping[str, int]] = {}
NUMBERS_AHEAD = 1 << 36  # after the newest one, which the store may give
LIMITS_KNOWN_S = 1.0  # how long a handle uses a queue's limits after another process changed them

T = TypeVar("T")

_log = library_log("postroom.store")

Decide: TypeAlias = Callable[[Record, Moment], Step | None]
"""A decision about one record; None when there is nothing to change."""


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The outcome of an insert."""

    message_id: str
    duplicate: bool


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message that a worker claimed."""

    message_id: str
    queue: str
    payload: bytes
    type: str
    parent_message_id: str
    attempt: int
    lease: int
    lease_ns: int


class Claim(msgspec.Struct, frozen=True):
    """Who asks for how many records, from which lanes."""

    queue: str
    worker_id: str
    limit: int
    lease_ns: int
    lanes: tuple[int, ...] = (2,)
    promote_after_ns: tuple[int, ...] = ()
    """How long a record waits in lane p + 1 until it is claimed as one of lane p."""


class SeenKey(msgspec.Struct, frozen=True, array_like=True):
    """The message that was accepted under an idempotency key."""

    message_id: str
    seen_us: int


class LimitsCache:
    """The limits of queues, as one handle knows them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Limits]] = {}

    def get(self, queue: str) -> Limits | None:
        """The limits of a queue; None when they are unknown or too old."""
        until, limits = self._known.get(queue, (0.0, DEFAULT_LIMITS))
        return limits if time.monotonic() < until else None

    def put(self, queue: str, limits: Limits) -> None:
        """Remember limits for a while."""
        self._known[queue] = (time.monotonic() + LIMITS_KNOWN_S, limits)

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def payload_bytes(head: Head) -> int:
    """How long the payload of a record is."""
    return len(head.payload)


class _Lazy:
    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, transaction: Any, _: type) -> Any:
        part = transaction.__dict__[self._name] = self._make(transaction.ledger)
        return part


def lazily(make: Callable[[Any], T]) -> T:
    """A part that is made of `transaction.ledger` when it is first used: most commits use one or two."""
    part: Any = _Lazy(make)
    return part  # type: ignore[no-any-return]  # by `_Lazy.__get__`


class Transaction:
    """The work of one commit. The clocks are read once, at its beginning, so a commit is one instant."""

    records: Records
    events: Events
    cells: Cells
    lanes: Lanes
    codec: Codec = PLAIN
    synced = False
    """Whether the commit needs an fsync."""
    ended = False
    """Whether a record ended."""
    lapsed: Sequence[int] = ()
    """The leases that `put_back` ended."""
    notable: Sequence[Event] = ()
    """Events that a person may want to know about: see `lifecycle.is_notable`."""

    def __init__(
        self, ids: OwnIds, limits: LimitsCache, steady_ns: int, wall_us: int, parts: Parts | None = None
    ) -> None:
        self.ids = ids
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        if parts is not None:  # else the class makes them `lazily`
            self.records, self.events, self.cells, self.lanes = parts
        self.ready: set[str] = set()
        """Queues in which something new can be claimed."""
        self.limits_known = limits
        self._limits: dict[str, Limits] = {}

    @property
    def changes(self) -> int:
        """Grows with every write and with every number taken."""
        return self.records.changes + self.events.changes + self.cells.changes

    # ---- inserting -----------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        """Accept messages, all or none. A message with a known id or key is dropped as a duplicate."""
        self.check_depths(envelopes)
        is_named = False
        for envelope in envelopes:
            limits, message_id = self.limits(envelope.queue), envelope.message_id
            if len(envelope.payload) > limits.max_payload_bytes:
                raise _too_long(envelope, limits)
            if message_id or envelope.key:
                is_named = True
                if self.is_reserved(message_id) and self.records.get(message_id) is None:
                    raise reserved_id(message_id)
        if is_named:
            return [self._insert_named(envelope) for envelope in envelopes]
        changes = [Change(None, self._accept(envelope), envelope) for envelope in envelopes]
        self._save(changes)
        return [Accepted(change.step.record.message_id, duplicate=False) for change in changes]

    def check_depths(self, envelopes: Sequence[Envelope]) -> None:
        """Raise `QueueFull` when a queue has no room. Duplicates are dropped, so they need none."""
        more: dict[str, int] = {}
        for envelope in envelopes:
            more[envelope.queue] = more.get(envelope.queue, 0) + 1
        for queue, count in more.items():
            depth, most = waiting(self.lanes.depth(queue)), self.limits(queue).max_depth
            if depth + count > most:
                new = sum(envelope.queue == queue and not self.is_known(envelope) for envelope in envelopes)
                if depth + new > most:
                    raise QueueFull(queue, depth, most, RETRY_AFTER_S)

    def is_known(self, envelope: Envelope) -> bool:
        """Whether an insert would drop a message as a duplicate."""
        if envelope.key and self._known_by_key(envelope) is not None:
            return True
        return bool(envelope.message_id) and self.records.get(envelope.message_id) is not None

    def _accept(self, envelope: Envelope) -> Step:
        number = self.events.take_numbers(1 if envelope.delay_ns else 2)
        message_id = envelope.message_id or self.ids.new(envelope.queue, number, self.wall_us)
        return lifecycle.accept(envelope, self._moment(number), message_id)

    def _insert_named(self, envelope: Envelope) -> Accepted:
        known = self._known_by_key(envelope) if envelope.key else None
        if known is not None:
            return self._drop(known.message_id, envelope)
        if envelope.message_id and self.records.get(envelope.message_id) is not None:
            return self._drop(envelope.message_id, envelope)
        change = Change(None, self._accept(envelope), envelope)
        message_id = change.step.record.message_id
        self._save([change])
        if envelope.key:
            seen = SeenKey(message_id, self.wall_us)
            self.cells.put(KEY, _key_of(envelope), msgspec.json.encode(seen))
        return Accepted(message_id, duplicate=False)

    def _drop(self, message_id: str, envelope: Envelope) -> Accepted:
        """Answer a repeated insert. The answer acknowledges the first record, so that record must be synced.

        The process that stored the first record may have died before its fsync, or may still be in it.
        """
        self.synced = self.synced or envelope.durability != "os"
        found = self.records.get(message_id)
        if found is not None:  # else only the key is still remembered
            self.synced = self.synced or found.durability != "os"
            if found.queue != envelope.queue:
                raise InvalidMessage(f"the id {message_id!r} is taken by a task of another agent")
            if found.sender != envelope.sender:
                raise InvalidMessage(f"the id {message_id!r} is taken by a task of another sender")
            self.note_duplicate(found, envelope.key)
        return Accepted(message_id, duplicate=True)

    def is_reserved(self, message_id: str) -> bool:
        """Whether the store has given an id, or may give it.

        One of a million UUIDs of others looks as if it held a number, which is far too large then. The limit
        is a power of two: one that follows the newest number would tell it to callers that try ids.
        """
        number_bits = self.ids.messages.number(message_id).bit_length()
        is_uuid_taken = 0 < number_bits <= (self.events.take_numbers(0) + NUMBERS_AHEAD).bit_length()
        return message_id.startswith(self.ids.prefix) or is_uuid_taken

    def _known_by_key(self, envelope: Envelope) -> SeenKey | None:
        value = self.cells.get(KEY, _key_of(envelope))
        return None if value is None else msgspec.json.decode(value, type=SeenKey)

    # ---- deciding ------------------------------------------------------------------------------

    def apply(self, pick: Pick, decide: Decide) -> list[Step]:
        """Decide about each picked record and save the decisions, all or none."""
        first = self.events.take_numbers(0)
        changes, number = self._decided(self.records.find(pick), decide, first)
        self.events.take_numbers(number - first)
        self._save(changes)
        return [change.step for change in changes]

    def _decided(self, records: Sequence[Record], decide: Decide, number: int) -> tuple[list[Change], int]:
        """The decisions about records, with event numbers from `number` on; and the next number."""
        changes: list[Change] = []
        for record in records:
            step = decide(record, self._moment(number))
            if step is not None:
                number += len(step.events)
                changes.append(Change(record, step))
            elif record.durability != "os":
                self.synced = True  # a repeated call is acknowledged like the first call
        return changes, number

    def complete(
        self,
        results: Mapping[str, tuple[int, bytes]],
        details: Mapping[str, dict[str, Any]] = NO_DETAILS,
        started: Mapping[str, int] = NO_STARTS,
    ) -> Sequence[str]:
        """Complete leased records: message id to token and result. All or none.

        `details` are those of the events, and `started` when handlers began of which no event tells yet, by
        message id. Returns the ids of the records that this call completed.
        """

        def decide(record: Record, moment: Moment) -> Step | None:
            detail = details.get(record.message_id)
            return lifecycle.complete(record, moment, *results[record.message_id], detail)

        pick = ByIds(tuple(results))
        if started:
            self._decided(self.records.find(pick), decide, 0)  # raises before anything is written
            self.tell_started({each: (results[each][0], ts_us) for each, ts_us in started.items()})
        return [step.record.message_id for step in self.apply(pick, decide)]

    def tell_started(self, started: Mapping[str, tuple[int, int]]) -> None:
        """Emit that handlers began: message id to token and time. Those whose lease is over are left out."""

        def decide(record: Record, moment: Moment) -> Step | None:
            try:
                return lifecycle.start(record, moment, *started[record.message_id])
            except StaleLease:
                return None

        self.apply(ByIds(tuple(started)), decide)

    # ---- delivering ----------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        """Lease `limit` records in `lifecycle.claim_order`. Ended leases and delays are handled first."""

        def order(head: Head) -> tuple[int, bool, int]:
            return lifecycle.claim_order(head.record, self.steady_ns, terms.promote_after_ns)

        self.put_back(OVERDUE_A_CLAIM_MAX)
        while True:
            counts = self.lanes.depth(terms.queue)
            lanes = [lane for lane in terms.lanes if counts.get(LANE_COUNTS[lane], 0)]
            # A lane is ordered by position and age, so that its first records suffice.
            heads = [head for lane in lanes for head in self.pull(terms.queue, lane, terms.limit)]
            if len(lanes) > 1:
                heads.sort(key=order)
            heads = within_bytes(heads[: terms.limit], payload_bytes)
            expired = [head.record for head in heads if 0 < head.record.expires <= self.steady_ns]
            if not expired:
                break
            self._end_all(expired, lifecycle.expire)
        promoted = [(head, order(head)[0]) for head in heads]
        leased = Transaction.lease(self, promoted, terms.worker_id, terms.lease_ns)
        return [delivery_of(head, record) for head, record in zip(heads, leased, strict=True)]

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        """As `Lanes.pull`, with payloads as they were sent. Records that cannot be read are quarantined."""
        heads, unreadable = self.codec.open_heads(self.lanes.pull(queue, lane, limit))
        if not unreadable:
            return heads
        self.quarantine(unreadable)
        return self.pull(queue, lane, limit)

    def lease(self, heads: Sequence[tuple[Head, int]], worker_id: str, lease_ns: int) -> list[Record]:
        """Lease QUEUED records, each in the lane that it was promoted to; returns them as leased."""
        changes = []
        for head, lane in heads:
            number = self.events.take_numbers(1 if lane == head.record.lane else 2)
            step = lifecycle.lease(head.record, self._moment(number), worker_id, lease_ns, lane)
            changes.append(Change(head.record, step))
        self._save(changes)
        return [change.step.record for change in changes]

    def put_back(self, limit: int) -> int:
        """Handle leases and delays that are over, in all queues; returns how many."""
        if not self.lanes.has_overdue():
            return 0
        steps = self.apply(Ending("lease", self.steady_ns, limit), lifecycle.lapse)
        self.lapsed = [*self.lapsed, *(step.events[0].lease for step in steps)]
        steps += self.apply(self.delays_over(limit), lifecycle.wake)
        return len(steps)

    def delays_over(self, limit: int) -> Pick:
        """The records to wake: those whose delay is over."""
        return Ending("delay", self.steady_ns, limit)

    def sweep(self, limit: int) -> int:
        """Lapse, wake and expire overdue records of all queues; returns how many."""
        expired = self.apply(Ending("expiry", self.steady_ns, limit), _expire_task)
        return self.put_back(limit) + len(expired)

    def quarantine(self, unreadable: Sequence[tuple[Record, UnreadableValue]]) -> None:
        """Take records whose payloads cannot be read out of their lanes, so that they do not block them."""
        for record, error in unreadable:
            _log.error("%s is quarantined: %s", record.message_id, error)
            self._end_all([record], partial(lifecycle.quarantine, error=str(error)))

    def _end_all(self, records: Sequence[Record], decide: Callable[[Record, Moment], Step]) -> None:
        take = self.events.take_numbers
        self._save([Change(record, decide(record, self._moment(take(1)))) for record in records])

    # ---- other transactions ----------------------------------------------------------------------

    def exclusive(self, name: str) -> None:
        """Let no other transaction that asks for the same name run until this one ends.

        For decisions about several cells or records together. What is read after this call is current. A
        store that runs one transaction at a time does nothing.
        """

    def look_ahead(
        self, cells: Sequence[tuple[str, int]] = (), *, lanes: bool = False, heads: bool = True
    ) -> None:
        """Announce the next reads, so that a store across a network does them in one trip.

        Cells are given by kind and limit. `lanes` announces the lanes of all organizations, `heads` that
        their first records will be pulled.
        """

    def look_ahead_pulls(self, pulls: Sequence[tuple[str, int, int]]) -> None:
        """Announce the next pulls: queue, lane and limit of each."""

    # ---- noting ----------------------------------------------------------------------------------

    def alert(self, error_type: str, error: str, queue: str = "", place: str = "") -> None:
        """Emit an event for a person to look at, and have a person told of it. `place` is a server."""
        self.emit("alert", queue, error_type=error_type, error=error)
        alerts.note(self.cells, error_type, org_of(queue), error, self.wall_us, place)

    def note_duplicate(self, record: Record, key: str) -> None:
        """Emit that a message was sent again."""
        self._emit(lifecycle.duplicate(record, self._moment(self.events.take_numbers(1)), key))

    def note_purged(self, count: int) -> None:
        """Emit that records were forgotten."""
        self._emit(lifecycle.purged(self._moment(self.events.take_numbers(1)), count))

    def emit(self, kind: EventKind, queue: str = "", **facts: Any) -> None:
        """Emit an event that is about no message."""
        moment = self._moment(self.events.take_numbers(1))
        self._emit(lifecycle.occurrence(moment, kind, queue, **facts))

    def note(self, noted: Sequence[Noted]) -> None:
        """Emit events that change no record."""
        first = self.events.take_numbers(len(noted))
        self.records.save((), [one.event(seq, self.wall_us) for seq, one in enumerate(noted, first)])

    # ---- limits and the shipper ------------------------------------------------------------------

    def limits(self, queue: str) -> Limits:
        """The limits of a queue."""
        limits = self._limits.get(queue)
        if limits is None:
            limits = self.limits_known.get(queue)
            if limits is None:
                value = self.cells.get(LIMITS, queue)
                limits = DEFAULT_LIMITS if value is None else msgspec.json.decode(value, type=Limits)
                self.limits_known.put(queue, limits)
            self._limits[queue] = limits
        return limits

    def set_limits(self, queue: str, limits: Limits) -> None:
        """Change the limits of a queue."""
        self.cells.put(LIMITS, queue, msgspec.json.encode(limits))
        self._limits[queue] = limits
        self.limits_known.clear()

    def outbox(self) -> Outbox | None:
        """The position of the shipper; None when events are not shipped."""
        value = self.cells.get(OUTBOX, "")
        return None if value is None else msgspec.json.decode(value, type=Outbox)

    def set_outbox(self, outbox: Outbox | None) -> None:
        """Set the position of the shipper. Shipped events are forgotten, except the last `LIVE_EVENTS`."""
        self.cells.put(OUTBOX, "", None if outbox is None else msgspec.json.encode(outbox))
        if outbox is not None and outbox.shipped > LIVE_EVENTS:
            self.events.forget(outbox.shipped - LIVE_EVENTS)

    # ---- times -----------------------------------------------------------------------------------

    def oldest_ns(self, queue: str) -> int | None:
        """How long the oldest ready record of a queue has been ready; None when there is none."""
        heads = [head for lane in range(LANES) for head in self.lanes.pull(queue, lane, 1)]
        return max((max(0, self.steady_ns - head.record.ready_at) for head in heads), default=None)

    def next_work_ns(self, queue: str) -> int | None:
        """The time until a claim has something to do: 0 for now, None when nothing waits or is leased.

        A claim handles the deadlines of all queues, so this may be the deadline of another queue.
        """
        if any(self.lanes.pull(queue, lane, 1) for lane in range(LANES)):
            return 0
        return self.next_deadline_ns()

    def next_deadline_ns(self) -> int | None:
        """The time until the first delay or lease of any queue ends; None when there is none."""
        find = self.records.find
        ends = [record.due for record in find(Ending("delay", FOREVER_NS, 1))]
        ends += [record.lease_until for record in find(Ending("lease", FOREVER_NS, 1))]
        return max(0, min(ends) - self.steady_ns) if ends else None

    # ---- saving --------------------------------------------------------------------------------

    def _moment(self, number: int) -> Moment:
        return Moment(number, self.steady_ns, self.wall_us)

    def _save(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        events = [event for change in changes for event in change.step.events]
        self.records.save(changes, events)
        self._note_events(events)
        for change in changes:
            after = change.step.record
            if after.durability != "os":
                self.synced = True
            if after.state == "QUEUED":
                self.ready.add(after.queue)
            elif after.state in lifecycle.ENDED:
                self.ended = True

    def _emit(self, event: Event) -> None:
        self.records.save((), [event])
        self._note_events([event])

    def _note_events(self, events: Sequence[Event]) -> None:
        notable = [event for event in events if lifecycle.is_notable(event)]
        if notable:
            self.notable = [*self.notable, *notable]


def _expire_task(record: Record, moment: Moment) -> Step | None:
    """Skips messages of organizations: the engine expires them, because that takes further steps."""
    return None if org_of(record.queue) else lifecycle.expire(record, moment)


def delivery_of(head: Head, record: Record) -> Delivery:
    """What a worker gets of a record that was leased to it."""
    return Delivery(
        record.message_id, record.queue, head.payload, head.type, head.parent_message_id,
        record.attempt, record.lease, record.lease_ns,
    )  # fmt: skip


def _key_of(envelope: Envelope) -> str:
    """The key of a cell. The length separates queue and key: "a" + "bc" is not "ab" + "c"."""
    return f"{len(envelope.queue)}:{envelope.queue}{envelope.key}"


def reserved_id(message_id: str) -> InvalidMessage:
    """The error for an id in the form of the store's own ids that the store has not given to the caller."""
    return InvalidMessage(f"the id {message_id!r} has a form that only the store itself uses for ids")


def _too_long(envelope: Envelope, limits: Limits) -> InvalidMessage:
    return InvalidMessage(
        f"the payload has {len(envelope.payload)} bytes, and queue {envelope.queue!r} "
        f"takes at most {limits.max_payload_bytes} (max_payload_bytes)"
    )
