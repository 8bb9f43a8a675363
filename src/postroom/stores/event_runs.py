"""The stored form of events: a run instead of many similar events.

A verb that handles many messages emits events that differ in a few numbers. They are stored as one run. A
message that is inserted alone needs no row of events at first, because its record implies both events. The
next commit with other events writes the implied events too, and so does a commit that finds `IMPLIED_MAX` of
them. So the records after the last row of events are exactly those whose events are implied.

A row that cannot be read does not stop the readers: each of its events is replaced by an `alert` of the same
number, because a gap in the numbers would look like a loss. The bytes of the row stay in the store.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import UnreadableValue
from postroom.message import Event, Noted, Record, State
from postroom.stores.own_ids import OwnIds

IMPLIED_MAX = 256  # new records whose events are not written yet
EVENTS_PER_NEW = 2  # `created` and `enqueued`
UNREADABLE = "UnreadableEvents"
"""The error type of the alerts that replace events that cannot be read. `row` in their detail is the row."""

RecordName: TypeAlias = int | str
"""The number in an id that the store made for a task; any other id as it is."""


traits = attrgetter(
    "queue", "message_id", "key", "type", "parent_message_id", "priority", "max_retries", "delay_ns",
    "ttl_ns", "durability", "sender",
)  # fmt: skip
"""The fields that new messages must have in common for one statement to insert them."""
queue_and_lane = attrgetter("queue", "lane")


class NewRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="new"):
    """Messages inserted together without an id: `created`, and `enqueued` when there is no delay."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    delay_ns: int
    sizes: Sequence[int]
    """Bytes of each payload."""
    facts: Sequence[dict[str, Any]] = ()
    """`Envelope.facts` of each message; empty when no message has any."""

    def events(self, ids: OwnIds) -> Iterator[Event]:
        seq, delay_ns = self.seq, self.delay_ns
        state: State = "SCHEDULED" if delay_ns else "QUEUED"
        delay = {"delay_s": delay_ns / NANOS_PER_S} if delay_ns else {}
        for size, facts in zip(self.sizes, self.facts or repeat(delay)):  # noqa: B905 - `repeat` has no end
            message_id = ids.new(self.queue, seq, self.ts_us)
            detail = {**facts, **delay} if self.facts and delay else facts
            yield Event(
                seq, self.ts_us, "created", self.queue, message_id, state, 0, self.priority, 0, "", 0, "", "",
                self.type, self.parent_message_id, size, detail,
            )  # fmt: skip
            seq += 1
            if not delay_ns:
                yield Event(
                    seq, self.ts_us, "enqueued", self.queue, message_id, state, 0, self.priority
                )  # fmt: skip
                seq += 1


class OnesRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="ones"):
    """Messages inserted one after the other, each alone and without a delay."""

    seq: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    ts_us: Sequence[int]
    sizes: Sequence[int]

    def events(self, ids: OwnIds) -> Iterator[Event]:
        for index, (ts_us, size) in enumerate(zip(self.ts_us, self.sizes, strict=True)):
            seq = self.seq + EVENTS_PER_NEW * index
            one = NewRun(seq, ts_us, self.queue, self.priority, self.type, self.parent_message_id, 0, [size])
            yield from one.events(ids)


class LeasedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="leased"):
    """Messages that one worker claimed together: `dequeued`. Its number is the token of the lease."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    worker_id: str
    names: Sequence[RecordName]
    attempts: Sequence[int]
    waited_us: Sequence[int]

    def events(self, ids: OwnIds) -> Iterator[Event]:
        facts = zip(self.names, self.attempts, self.waited_us, strict=True)
        for seq, (which, attempt, waited_us) in enumerate(facts, self.seq):
            yield Event(
                seq, self.ts_us, "dequeued", self.queue, ids.name(which), "PROCESSING", attempt,
                self.priority,
                seq, self.worker_id, waited_us,
            )  # fmt: skip


class StartedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="started"):
    """Handlers that one worker began, each at its time: `execution_started`."""

    seq: int
    queue: str
    priority: int
    worker_id: str
    names: Sequence[RecordName]
    attempts: Sequence[int]
    leases: Sequence[int]
    ts_us: Sequence[int]

    def events(self, ids: OwnIds) -> Iterator[Event]:
        facts = zip(self.names, self.attempts, self.leases, self.ts_us, strict=True)
        for seq, (which, attempt, lease, ts_us) in enumerate(facts, self.seq):
            yield Event(
                seq, ts_us, "execution_started", self.queue, ids.name(which), "PROCESSING", attempt,
                self.priority, lease, self.worker_id,
            )  # fmt: skip


class CompletedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="completed"):
    """Messages that one worker completed together: `execution_completed`."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    worker_id: str
    names: Sequence[RecordName]
    attempts: Sequence[int]
    leases: Sequence[int]
    worked_us: Sequence[int]
    details: Sequence[dict[str, Any]] = ()
    """The detail of each event; empty when none has any."""

    def events(self, ids: OwnIds) -> Iterator[Event]:
        details: Iterable[dict[str, Any]] = self.details or repeat({}, len(self.names))
        facts = zip(self.names, self.attempts, self.leases, self.worked_us, details, strict=True)
        for seq, (which, attempt, lease, worked_us, detail) in enumerate(facts, self.seq):
            yield Event(
                seq, self.ts_us, "execution_completed", self.queue, ids.name(which), "COMPLETED",
                attempt,
                self.priority, lease, self.worker_id, worked_us, detail=detail,
            )  # fmt: skip


class NotedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="noted"):
    """Events that change no record, such as the reservations of one claim."""

    seq: int
    ts_us: int
    noted: Sequence[Noted]

    def events(self, _ids: OwnIds) -> Iterator[Event]:
        for seq, one in enumerate(self.noted, self.seq):
            yield one.event(seq, self.ts_us)


Run: TypeAlias = NewRun | OnesRun | LeasedRun | StartedRun | CompletedRun | NotedRun
Part: TypeAlias = Event | Run
"""A row of events is a list of these, in the order of their numbers."""

_OBJECT = ord("{")  # how an event begins; a run is a list
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_run = msgspec.json.Decoder(Run).decode


def leased_run(first: int, wall_us: int, leased: list[Record], now_ns: int) -> LeasedRun:
    """The events of records of one queue and lane that one worker leased."""
    one = leased[0]
    return LeasedRun(
        first, wall_us, one.queue, one.lane, one.worker_id, [each.message_id for each in leased],
        [each.attempt for each in leased], [(now_ns - each.ready_at) // 1000 for each in leased],
    )  # fmt: skip


class Implied(NamedTuple):
    """What the row of a new record says about its two events."""

    seq: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    created_us: int
    size: int


_traits = attrgetter("queue", "priority", "type", "parent_message_id")


def implied_runs(records: Iterable[Implied]) -> Iterator[OnesRun]:
    """The events of new records; similar neighbours become one run."""
    for traits, neighbours in groupby(records, _traits):
        ones = list(neighbours)
        yield OnesRun(ones[0].seq, *traits, [one.created_us for one in ones], [one.size for one in ones])


class StoredRow(NamedTuple):
    """A row of events."""

    number: int
    first: int
    """The number of its first event, as far as it is known without reading the row."""
    last: int
    ts_us: int
    batch: bytes


READ_ERRORS = (UnreadableValue, msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""What reading a damaged row raises. A missing key is another error, because the row is not damaged."""
INCOMPLETE = "events are missing in its row"


def alerts_for(row: StoredRow, reached: int, fault: str) -> Iterator[Event]:
    """An alert for each event of a row that cannot be read, after `reached`."""
    first = max(reached + 1, row.first)
    detail = {
        "row": row.number, "first": first, "last": row.last, "bytes": len(row.batch),
        "sha256": hashlib.sha256(row.batch).hexdigest(),
    }  # fmt: skip
    error = f"this event cannot be read: {fault}"
    for seq in range(first, row.last + 1):
        yield Event(
            seq, row.ts_us, "alert", "", "", "DONE", error_type=UNREADABLE, error=error, detail=detail
        )


def pack(parts: list[Part]) -> bytes:
    """A commit's events as JSON."""
    return _encode(parts)


def unpack(batch: bytes, ids: OwnIds) -> Iterator[Event]:
    """The events of a commit."""
    for part in _decode(batch):
        if memoryview(part)[0] == _OBJECT:
            yield _decode_event(part)
        else:
            yield from _decode_run(part).events(ids)
