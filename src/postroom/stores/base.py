"""The seam of a store: the methods that a backend implements.

Rule 1: a record changes only by a `Step` of `core.lifecycle.lifecycle`, and its events commit with it.
Rule 2: a backend stores and finds. Every decision is taken in `stores.transaction`, on top of these methods.
Rule 3: work that raises changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.errors import InvalidMessage, UnknownTask, UnreadableValue
from postroom.message import Durability, Envelope, Event, Record, State, Step, Stored, org_of

T = TypeVar("T")

_decode_event = msgspec.json.Decoder(Event).decode

LANES = 4
NEWEST = -1
EVERYTHING: Final = 2**63 - 1  # a limit or a position that leaves nothing out
FOREVER_NS = 2**63 - 1
CLAIM_BYTES_MAX = 32 * 1024 * 1024  # of payloads in one claim, and one more payload
OVERDUE_A_CLAIM_MAX = 100  # ended leases and delays that one claim handles; the next claim handles the rest
PURGE_BATCH_MAX = 500
MAX_DEPTH_DEFAULT = 1_000_000
MAX_PAYLOAD_BYTES_DEFAULT = 1024 * 1024
RETRY_AFTER_S = 1.0
BACKLOG_MAX_DEFAULT = 1_000_000
CHUNKS = "engine.chunk"
"""The kind of cells that hold streamed answers. A backend may keep them in a table of their own: they are
many and large."""
KEY, LIMITS, MANIFEST, OUTBOX = "key", "limits", "manifest", "outbox"  # kinds of cells of every store
UNREADABLE_PAYLOAD = b'"[cannot be decrypted]"'
"""What readers and the audit stream get instead of a payload that cannot be decrypted."""
LIVE_EVENTS = 10_000  # shipped events that stay for readers that follow the store itself

Deadline: TypeAlias = Literal["lease", "delay", "expiry"]
Counted: TypeAlias = State | Literal["P0", "P1", "P2", "P3", "LAPSES"]
"""The counters of a queue: records by state, QUEUED records by lane, and lapsed leases."""
LANE_COUNTS: tuple[Counted, ...] = ("P0", "P1", "P2", "P3")


# ---- picking records ---------------------------------------------------------------------------------


class ByIds(msgspec.Struct, frozen=True):
    """The records of these messages, in this order. An unknown id raises `UnknownTask`."""

    message_ids: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True):
    """Records with a `seq` above `after`, in that order. None for `queue` or `state` means any.

    With `before`, only records with a `seq` below it, the newest first.
    """

    queue: str | None = None
    state: State | None = None
    after: int = 0
    limit: int = 100
    before: int = 0


class Ending(msgspec.Struct, frozen=True):
    """Records of all queues whose deadline is at or before `until_ns`, the earliest first.

    `lease`: PROCESSING records by the end of their lease. `delay`: SCHEDULED and RETRYING records by the end
    of their delay. `expiry`: waiting records by the time after which they must not be delivered.
    """

    deadline: Deadline
    until_ns: int
    limit: int


Pick: TypeAlias = ByIds | Listing | Ending


# ---- values of a store ----------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True, gc=False):
    """A record before a decision, and the decision. A new record has an envelope and no `before`."""

    before: Record | None
    step: Step
    envelope: Envelope | None = None


class Head(msgspec.Struct, frozen=True, gc=False):
    """A record that can be claimed, with the parts of its message that a worker receives."""

    record: Record
    payload: bytes
    type: str
    parent_message_id: str


class Kept(msgspec.Struct, frozen=True, gc=False):
    """The parts of a message that are not in its record, for a move to another store."""

    type: str
    parent_message_id: str
    key: str
    delay_ns: int
    ttl_ns: int
    payload: bytes
    result: bytes | None
    trail: bytes
    """Events that the record does not imply, as JSON lines."""


def stored_message(record: Record, kept: Kept) -> Stored:
    """The message of a record, its result, and the history that the record and its trail imply."""
    envelope = Envelope(
        message_id=record.message_id, queue=record.queue, payload=kept.payload, type=kept.type,
        parent_message_id=kept.parent_message_id, key=kept.key, priority=record.priority,
        max_retries=record.max_retries, delay_ns=kept.delay_ns, ttl_ns=kept.ttl_ns,
        durability=record.durability, sender=record.sender,
    )  # fmt: skip
    first = lifecycle.created(envelope, record.message_id, record.seq, record.created_us)
    later = [_decode_event(line) for line in kept.trail.split(b"\n") if line]
    return Stored(record, envelope, kept.result, lifecycle.history(record, first, later))


class Limits(msgspec.Struct, frozen=True):
    """The limits of one queue."""

    max_depth: int = MAX_DEPTH_DEFAULT
    max_payload_bytes: int = MAX_PAYLOAD_BYTES_DEFAULT
    durability: Durability | None = None
    """The class of a message that names none; None leaves it to the caller."""
    org: str = ""
    """The organization in whose share the tasks count, if the name of the queue does not say it."""


DEFAULT_LIMITS = Limits()
WhenBehind: TypeAlias = Literal["slow", "refuse"]


class Outbox(msgspec.Struct, frozen=True):
    """The position of the event shipper, and what happens when the shipper falls behind."""

    shipped: int = 0
    """The audit stream holds every event up to this number."""
    backlog_max: int = BACKLOG_MAX_DEFAULT
    """How many events may wait to be shipped."""
    when_behind: WhenBehind = "slow"
    """Whether a new message is delayed or refused while more events wait."""
    stream: str = ""
    """The only stream that receives the events: a second stream would miss the events of the first."""
    segment: int = 0
    """The last sealed segment of that stream; 0 before the first."""
    head: str = ""
    """The hash of that segment. A stream without this segment was truncated, wiped or replaced."""


# ---- counting --------------------------------------------------------------------------------------


def counted_as(record: Record) -> Counted:
    """The counter that a record is counted in."""
    return LANE_COUNTS[record.lane] if record.state == "QUEUED" else record.state


def count_changes(changes: Sequence[Change], events: Sequence[Event]) -> dict[tuple[str, Counted], int]:
    """The changes of counters that a save makes, by queue and counter."""
    counts: dict[tuple[str, Counted], int] = {}
    for change in changes:
        after = change.step.record
        _add(counts, after.queue, counted_as(after), 1)
        if change.before is not None:
            _add(counts, after.queue, counted_as(change.before), -1)
    for event in events:
        if event.kind == "lease_lapsed":
            _add(counts, event.queue, "LAPSES", 1)
    return counts


def _add(counts: dict[tuple[str, Counted], int], queue: str, what: Counted, change: int) -> None:
    counts[queue, what] = counts.get((queue, what), 0) + change


def within_bytes(rows: Iterable[T], size_of: Callable[[T], int]) -> list[T]:
    """As many of the records that wait as one claim returns."""
    found: list[T] = []
    left = CLAIM_BYTES_MAX
    for row in rows:
        found.append(row)
        left -= size_of(row)
        if left <= 0:
            break
    return found


def ready(counts: Mapping[Counted, int]) -> int:
    """Records that can be claimed."""
    get = counts.get  # no loop, here and below: these functions run for each inserted message
    return get("P0", 0) + get("P1", 0) + get("P2", 0) + get("P3", 0)


def waiting(counts: Mapping[Counted, int]) -> int:
    """Records that wait, and delayed ones. Reports to people say "waiting" for `ready` only."""
    get = counts.get
    return (
        get("P0", 0) + get("P1", 0) + get("P2", 0) + get("P3", 0) + get("SCHEDULED", 0) + get("RETRYING", 0)
    )


def by_state(counts: Mapping[Counted, int]) -> dict[Counted, int]:
    """The counters with QUEUED as one number instead of one for each lane."""
    states: dict[Counted, int] = {what: n for what, n in counts.items() if n and what not in LANE_COUNTS}
    queued = ready(counts)
    return {"QUEUED": queued, **states} if queued else states


def in_order(found: Mapping[str, Record], message_ids: Iterable[str]) -> list[Record]:
    """The records of these messages. An unknown id raises `UnknownTask`."""
    try:
        return [found[message_id] for message_id in message_ids]
    except KeyError as error:
        raise UnknownTask(error.args[0]) from None


# ---- the seam --------------------------------------------------------------------------------------


class Records(ABC):
    """The records of one transaction, with their messages and histories."""

    changes = 0
    """Grows with every write. The backend increments it, as in the other parts."""

    @abstractmethod
    def find(self, pick: Pick) -> list[Record]:
        """The picked records."""

    @abstractmethod
    def load(self, message_id: str) -> Stored | None:
        """A record with its message, result and history; None when it is unknown."""

    @abstractmethod
    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        """Write changed records with results and trails (`lifecycle.trail`), and append the events."""

    @abstractmethod
    def forget(self, records: Sequence[Record]) -> None:
        """Remove records."""

    def get(self, message_id: str) -> Record | None:
        """One record; None when it is unknown."""
        return self.get_many((message_id,)).get(message_id)

    def get_many(self, message_ids: Sequence[str]) -> dict[str, Record]:
        """Records by their ids, without unknown ids."""
        found = {}
        for message_id in message_ids:
            with suppress(UnknownTask):
                [found[message_id]] = self.find(ByIds((message_id,)))
        return found

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        """The payloads of messages, without unknown ids; `UNREADABLE_PAYLOAD` for a damaged one."""
        found = {}
        for message_id in message_ids:
            try:
                if (stored := self.load(message_id)) is not None:
                    found[message_id] = stored.envelope.payload
            except UnreadableValue:  # the audit stream and lists go on without this one
                found[message_id] = UNREADABLE_PAYLOAD
        return found

    def results(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        """The results of messages, without unknown ids and results that are missing or damaged."""
        found = {}
        for message_id in message_ids:
            with suppress(UnreadableValue):
                if (stored := self.load(message_id)) is not None and stored.result is not None:
                    found[message_id] = stored.result
        return found

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        """Records with the stored parts of their messages that a worker receives, without unknown ids."""
        found = [stored for message_id in message_ids if (stored := self.load(message_id)) is not None]
        return [
            Head(one.record, one.envelope.payload, one.envelope.type, one.envelope.parent_message_id)
            for one in found
        ]

    def kept(self, record: Record) -> Kept:  # noqa: ARG002
        """The parts of a message that are not in its record.

        Only stores that can be moved implement this method and `Cells.kinds`.
        """
        raise InvalidMessage("this kind of store cannot be moved")


class Events(ABC):
    """The events of the store, and the numbers that records and events share."""

    changes = 0

    @abstractmethod
    def take_numbers(self, count: int) -> int:
        """The first of `count` consecutive numbers. Numbers are unique and grow from commit to commit."""

    @abstractmethod
    def read(self, after: int, limit: int) -> list[Event]:
        """Committed events with a `seq` above `after`; `NEWEST` gives the last one. `seq` has no gaps."""

    @abstractmethod
    def forget(self, up_to: int) -> None:
        """Remove events up to a position. The newest event stays: positions continue from it."""

    def newest(self) -> int:
        """The position of the last event; 0 before the first one."""
        return next((event.seq for event in self.read(NEWEST, 1)), 0)

    def row(self, number: int) -> bytes:
        """The bytes of a row of events."""
        raise InvalidMessage(f"this kind of store has no row {number} of events")


class Cells(ABC):
    """Small named values, such as limits, idempotency keys and the position of the shipper."""

    changes = 0

    @abstractmethod
    def get(self, kind: str, key: str) -> bytes | None:
        """One value; None when there is none."""

    @abstractmethod
    def put(self, kind: str, key: str, value: bytes | None) -> None:
        """Set a value; None removes it."""

    @abstractmethod
    def page(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        """Keys above `after` with their values, in order of the keys."""

    def kinds(self) -> list[str]:
        """Every kind of cells."""
        raise InvalidMessage("this kind of store cannot be moved")


class Lanes(ABC):
    """The order in which records can be claimed, and the counters of queues."""

    @abstractmethod
    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        """The first QUEUED records of a lane, by position, with their stored payloads.

        They stay there until they are saved as leased.
        """

    @abstractmethod
    def depth(self, queue: str) -> Mapping[Counted, int]:
        """The counters of a queue, changes of this transaction included."""

    @abstractmethod
    def queues(self, prefix: str = "") -> list[str]:
        """Every queue that has a counter and whose name begins with a prefix, sorted."""

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        """The counters of every queue."""
        return {queue: self.depth(queue) for queue in self.queues()}

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        """Queues of organizations that have QUEUED records in a lane, in a fixed order, after `after`."""
        found = [queue for queue in self.queues() if queue > after and org_of(queue)]
        return sorted(queue for queue in found if self.depth(queue).get(LANE_COUNTS[lane], 0))[:limit]

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        """The counters of the queues of organizations that have QUEUED records."""
        return {
            queue: counts for queue, counts in self.depths().items() if org_of(queue) and ready(counts) > 0
        }

    def count_active(self) -> int:
        """How many organizations have QUEUED records."""
        return len(self.active_depths())

    def total(self) -> dict[Counted, int]:
        """The counters of all organizations together."""
        counts: dict[Counted, int] = {}
        for queue in self.queues():
            if org_of(queue):
                for what, n in self.depth(queue).items():
                    counts[what] = counts.get(what, 0) + n
        return counts

    def filled(self) -> list[int]:
        """Lanes in which messages of organizations are ready."""
        counts = self.total()
        return [lane for lane in range(LANES) if counts.get(LANE_COUNTS[lane], 0)]

    def is_alone(self, queue: str, lane: int) -> bool:
        """Whether no other organization has messages in a lane in which a queue has some."""
        what = LANE_COUNTS[lane]
        return self.total().get(what) == self.depth(queue).get(what)

    def is_quiet(self, queue: str, most: int) -> bool:
        """Whether at most `most` records are ready in a queue, and in all organizations together.

        A store across a network may use counters that are a moment old, when they are far below `most`.
        """
        return ready(self.depth(queue)) <= most and ready(self.total()) <= most

    def oldest(self, lane: int) -> Record | None:
        """The record of an organization that has waited longest in a lane."""
        heads = [head for queue in self.active(lane, "", EVERYTHING) for head in self.pull(queue, lane, 1)]
        return min((head.record for head in heads), key=attrgetter("ready_at"), default=None)

    def has_overdue(self) -> bool:
        """Whether a lease or delay may be over; False saves a search for them."""
        return True


class Parts(NamedTuple):
    """What a transaction consists of."""

    records: Records
    events: Events
    cells: Cells
    lanes: Lanes
