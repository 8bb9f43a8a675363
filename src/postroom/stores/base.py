"""The seam of a store: what every backend offers, and the part that is the same for all of them.

Rule 1: a record changes only by a `Step` of `core.lifecycle`, and its events commit with it.
Rule 2: a backend writes the primitives at the end of `Transaction`, and nothing decides there.
Rule 3: work that raises has changed nothing: a verb checks everything before it writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

from postroom.core import lifecycle
from postroom.errors import InvalidMessage, QueueFull, UnknownTask
from postroom.message import Durability, Envelope, Event, Moment, Record, State, Step, Stored

T = TypeVar("T")

PRIORITIES = 4
CLAIM_MAX = 1_000
LAPSES_A_CLAIM_MAX = 100  # overdue leases and ended delays that one claim puts back; the next takes the rest
PURGE_BATCH_MAX = 500
MAX_DEPTH_DEFAULT = 1_000_000
MAX_PAYLOAD_BYTES_DEFAULT = 1024 * 1024
RETRY_AFTER_S = 1.0
BACKLOG_MAX_DEFAULT = 1_000_000
LIVE_EVENTS = 10_000  # shipped events that stay for those who follow the store itself


class ByIds(msgspec.Struct, frozen=True):
    """These messages, in this order; an unknown one is an error."""

    message_ids: tuple[str, ...]


class Overdue(msgspec.Struct, frozen=True):
    """Leases that have run out, the oldest first."""

    queue: str | None
    limit: int


class Leased(msgspec.Struct, frozen=True):
    """Every live lease of a queue, of all when None, the first to run out first."""

    queue: str | None
    limit: int


class Due(msgspec.Struct, frozen=True):
    """Delays that are over, the oldest first."""

    queue: str | None
    limit: int


class Expired(msgspec.Struct, frozen=True):
    """What waited longer than it may."""

    limit: int


class InState(msgspec.Struct, frozen=True):
    """Records of a queue, of all when None, in one state (None: any), by acceptance."""

    queue: str | None
    state: State | None
    after: int
    limit: int


Pick: TypeAlias = ByIds | Overdue | Leased | Due | Expired | InState
Counted: TypeAlias = State | Literal["LAPSES"]
"""What a queue counts: its records by state, and the leases that ran out."""
Decide: TypeAlias = Callable[[Record, Moment], Step | None]


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """What became of an insert."""

    message_id: str
    duplicate: bool


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message in a worker's hands."""

    message_id: str
    queue: str
    payload: bytes
    type: str
    parent_message_id: str
    attempt: int
    lease: int
    lease_ns: int


class Head(msgspec.Struct, frozen=True, gc=False):
    """A record that can be claimed, with what it is about."""

    record: Record
    payload: bytes
    type: str
    parent_message_id: str


class Limits(msgspec.Struct, frozen=True):
    """What one queue may hold."""

    max_depth: int = MAX_DEPTH_DEFAULT
    max_payload_bytes: int = MAX_PAYLOAD_BYTES_DEFAULT
    durability: Durability | None = None
    """The class of a message that names none; None leaves it to the caller."""


WhenBehind: TypeAlias = Literal["slow", "refuse"]


class Outbox(msgspec.Struct, frozen=True):
    """What is known of the shipper that takes the events elsewhere, and what happens when it falls behind."""

    shipped: int = 0
    """Every event up to this number is held elsewhere for good."""
    backlog_max: int = BACKLOG_MAX_DEFAULT
    """How many events may wait for it."""
    when_behind: WhenBehind = "slow"
    """What becomes of a new message when more wait: it is accepted slowly, or refused."""
    stream: str = ""
    """The one stream that they go to. A second one would find forgotten what the first has taken."""
    segment: int = 0
    """The last segment of that stream that was sealed; 0 before the first."""
    head: str = ""
    """The hash of that segment. A stream without it was cut, wiped or begun anew."""


class Claim(msgspec.Struct, frozen=True):
    """Who asks for how much, and on which terms."""

    queue: str
    worker_id: str
    limit: int
    lease_ns: int
    priorities: tuple[int, ...] = (2,)
    promote_after_ns: tuple[int, ...] = ()


class Transaction(ABC):
    """Everything inside one commit, which is one instant: the clocks are read once, by the backend."""

    def __init__(self, store_id: str, number: int, steady_ns: int, wall_us: int) -> None:
        self.store_id = store_id
        self.changes = 0
        """Grows with everything that is written."""
        self.number = number
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        self.ready: set[str] = set()
        """Queues in which something new can be claimed."""
        self.counts: dict[tuple[str, Counted], int] = {}
        self.synced = False
        """Whether something in it asks for an fsync."""
        self.ended = False
        """Whether a record came to its end."""
        self.notable: Sequence[Event] = ()
        """What went another way than straight: see `lifecycle.is_notable`."""

    def moment(self) -> Moment:
        """Now, for one decision."""
        return Moment(self.number, self.steady_ns, self.wall_us)

    # ---- verbs ---------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        """Accept messages, all or none. One that is known already is dropped: the first stands."""
        named = False
        room: dict[str, int] = {}
        for envelope in envelopes:
            queue = envelope.queue
            limits = self.limits(queue)
            left = room[queue] = (room[queue] if queue in room else limits.max_depth - self.depth(queue)) - 1
            if left < 0:
                self._check_room(queue, envelopes, limits)
                room[queue] = len(envelopes)
            if len(envelope.payload) > limits.max_payload_bytes:
                raise _too_long(envelope, limits)
            if envelope.message_id or envelope.key:
                named = True
                self._check_name(envelope.message_id)
        if named:
            return [self._insert(envelope) for envelope in envelopes]
        return self._insert_unnamed(envelopes)

    def _check_room(self, queue: str, envelopes: Sequence[Envelope], limits: Limits) -> None:
        """What is known already will be dropped and takes no room."""
        new = sum(envelope.queue == queue and not self._is_known(envelope) for envelope in envelopes)
        if self.depth(queue) + new > limits.max_depth:
            raise QueueFull(queue, self.depth(queue), limits.max_depth, RETRY_AFTER_S)

    def _is_known(self, envelope: Envelope) -> bool:
        if envelope.key and self.known_by_key(envelope.queue, envelope.key) is not None:
            return True
        return bool(envelope.message_id) and self._is_there(envelope.message_id)

    def _is_there(self, message_id: str) -> bool:
        try:
            self.find(ByIds((message_id,)))
        except UnknownTask:
            return False
        return True

    def _insert_unnamed(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        """None of them can be known already."""
        steps = []
        for envelope in envelopes:
            number = self.number
            step = lifecycle.accept(
                envelope, Moment(number, self.steady_ns, self.wall_us), f"{self.store_id}-{number}"
            )
            self.number += len(step.events)
            steps.append(step)
        self.put_all_new(steps, envelopes)
        self._account([None] * len(steps), steps)
        return [Accepted(step.record.message_id, duplicate=False) for step in steps]

    def _insert(self, envelope: Envelope) -> Accepted:
        known = self.known_by_key(envelope.queue, envelope.key) if envelope.key else None
        if known is not None:
            return self._dropped(known, envelope)
        if self._is_ours(envelope.message_id):  # and it is there: that was checked
            return self._dropped(envelope.message_id, envelope)
        message_id = envelope.message_id or f"{self.store_id}-{self.number}"
        step = lifecycle.accept(envelope, Moment(self.number, self.steady_ns, self.wall_us), message_id)
        if not self.put_new(step, envelope):
            return self._dropped(message_id, envelope)
        self.number += len(step.events)
        self._account([None], [step])
        return Accepted(message_id, duplicate=False)

    def _dropped(self, message_id: str, envelope: Envelope) -> Accepted:
        """Answer a repeated enqueue. That acknowledges the first record, so it is synced as its class says.

        The first record may have been stored by a process that died before its fsync, or that is still in it.
        """
        self.synced = self.synced or envelope.durability != "os"
        with suppress(UnknownTask):  # perhaps only its key is remembered: then there is nothing to tell about
            [found] = self.find(ByIds((message_id,)))
            self.synced = self.synced or found.durability != "os"
            if found.queue != envelope.queue:
                raise InvalidMessage(f"the id {message_id!r} is taken by a task of another agent")
            if self.sender_of(found) != envelope.sender:
                raise InvalidMessage(f"the id {message_id!r} is taken by a task of another sender")
            self._record_event(lifecycle.duplicate(found, self.moment(), envelope.key))
        return Accepted(message_id, duplicate=True)

    def _check_name(self, message_id: str) -> None:
        """A name of ours can only be given again to what has it."""
        if self._is_ours(message_id) and not self._is_there(message_id):
            raise InvalidMessage(f"ids that begin with {self.store_id}- are given by the store")

    def _is_ours(self, message_id: str) -> bool:
        return message_id.startswith(f"{self.store_id}-")

    def apply(self, pick: Pick, decide: Decide) -> list[Step]:
        """Decide about each picked record and keep what was decided. Several ids are all or none."""
        steps: list[Step] = []
        before: list[Record] = []
        number = self.number
        for record in self.find(pick):
            step = decide(record, Moment(number, self.steady_ns, self.wall_us))
            if step is not None:
                number += len(step.events)
                steps.append(step)
                before.append(record)
            elif record.durability != "os":
                self.synced = True  # a repeated word is acknowledged as the first one is
        self._put_all(before, steps)
        return steps

    def claim(self, terms: Claim) -> list[Delivery]:
        """Lease up to `limit` records, those first that have the best priority and have waited longest.

        What has run out meanwhile is put back first, so that no sweep is needed for anything to be found.
        """
        queue = terms.queue
        if self.is_past(queue):
            self.lapse(queue, LAPSES_A_CLAIM_MAX)
            self.apply(Due(queue, LAPSES_A_CLAIM_MAX), lifecycle.wake)
        heads = self._heads(terms)
        while any(0 < head.record.expires <= self.steady_ns for head in heads):
            self._expire(heads)
            heads = self._heads(terms)
        return self._lease_all(heads, terms)

    def _expire(self, heads: list[Head]) -> None:
        for record in (head.record for head in heads):
            if 0 < record.expires <= self.steady_ns:
                self._put(record, lifecycle.expire(record, self.moment()))

    def _heads(self, terms: Claim) -> list[Head]:
        """What goes first. Each lane is in order; a lane's head may have risen above another lane."""
        lanes = [self.ready_in(terms.queue, priority, terms.limit) for priority in terms.priorities]
        if len(lanes) == 1 and not terms.promote_after_ns:
            return lanes[0]
        ranked = [(self._rank(head.record, terms), head) for lane in lanes for head in lane]
        ranked.sort(key=lambda pair: pair[0])
        return [head for _, head in ranked[: terms.limit]]

    def _rank(self, record: Record, terms: Claim) -> tuple[int, int]:
        age_ns = self.steady_ns - record.ready_at
        return lifecycle.effective_priority(record.priority, age_ns, terms.promote_after_ns), record.place

    def _risen(self, record: Record, terms: Claim) -> Record:
        """The record in the lane that it has risen to."""
        priority = self._rank(record, terms)[0]
        if priority == record.priority:
            return record
        step = lifecycle.promote(record, self.moment(), priority)
        self._put(record, step)
        return step.record

    def _lease_all(self, heads: list[Head], terms: Claim) -> list[Delivery]:
        records = [head.record for head in heads]
        if terms.promote_after_ns:
            records = [self._risen(record, terms) for record in records]
        steps = [
            lifecycle.lease(
                record, Moment(number, self.steady_ns, self.wall_us), terms.worker_id, terms.lease_ns
            )
            for number, record in enumerate(records, self.number)
        ]
        self._put_all(records, steps)
        return [
            Delivery(
                step.record.message_id,
                step.record.queue,
                head.payload,
                head.type,
                head.parent_message_id,
                step.record.attempt,
                step.record.lease,
                step.record.lease_ns,
            )
            for head, step in zip(heads, steps, strict=True)
        ]

    def complete(self, words: dict[str, tuple[int, bytes]]) -> None:
        """The last words of holders: message id to token and result. All or none."""

        def decide(record: Record, moment: Moment) -> Step | None:
            return lifecycle.complete(record, moment, *words[record.message_id])

        self.apply(ByIds(tuple(words)), decide)

    def sweep(self, limit: int) -> int:
        """Lapse, wake and expire what is overdue in any queue; how many that were."""
        lapsed = self.lapse(None, limit)
        steps = self.apply(Due(None, limit), lifecycle.wake)
        steps += self.apply(Expired(limit), lifecycle.expire)
        return lapsed + len(steps)

    def lapse(self, queue: str | None, limit: int) -> int:
        """Take back leases that have run out; how many that were."""
        steps = self.apply(Overdue(queue, limit), lifecycle.lapse)
        for step in steps:
            self._count(step.record.queue, "LAPSES", 1)
        return len(steps)

    def purge(self, after: int, keep_us: dict[State, int], limit: int) -> int:
        """Look at `limit` records behind `after`, and forget those that ended longer ago than they are kept.

        Gives the `seq` to go on behind, 0 when the end is reached: then it begins anew.
        """
        looked_at = self.find(InState(None, None, after, limit))
        gone = [
            record
            for record in looked_at
            if record.ended_us and record.ended_us < self.wall_us - keep_us[record.state]
        ]
        for record in gone:
            self._count(record.queue, record.state, -1)
        if gone:
            self.remove(gone)
            self._record_event(lifecycle.purged(self.moment(), len(gone)))
        return looked_at[-1].seq if len(looked_at) == limit else 0

    def alert(self, error_type: str, error: str) -> None:
        """Tell something that a person should look at."""
        self._record_event(lifecycle.alert(self.moment(), error_type, error))

    # ---- bookkeeping ---------------------------------------------------------------------------

    def _put(self, before: Record, step: Step) -> None:
        self._put_all([before], [step])

    def _put_all(self, before: Sequence[Record], steps: Sequence[Step]) -> None:
        if steps:
            self.put_all(before, steps)
            self.number += sum([len(step.events) for step in steps])
            self._account(before, steps)

    def _account(self, before: Sequence[Record | None], steps: Sequence[Step]) -> None:
        """Count what the steps did, and keep their events. Steps of a batch are mostly alike."""
        moves: dict[tuple[str, State | None, State, Durability], int] = {}
        events: list[Event] = []
        for record, step in zip(before, steps, strict=True):
            after = step.record
            move = (after.queue, None if record is None else record.state, after.state, after.durability)
            moves[move] = moves.get(move, 0) + 1
            events += step.events
        self.keep(events)
        self._note(events)
        for (queue, source, target, durability), n in moves.items():
            if source != target:
                if source is not None:
                    self._count(queue, source, -n)
                self._count(queue, target, n)
            if target == "QUEUED":
                self.ready.add(queue)
            elif target in lifecycle.ENDED:
                self.ended = True
            if durability != "os":
                self.synced = True

    def _record_event(self, event: Event) -> None:
        self.keep([event])
        self._note([event])
        self.number += 1

    def _note(self, events: Iterable[Event]) -> None:
        notable = [event for event in events if lifecycle.is_notable(event)]
        if notable:
            self.notable = [*self.notable, *notable]

    def _count(self, queue: str, state: Counted, change: int) -> None:
        key = (queue, state)
        self.counts[key] = self.counts.get(key, 0) + change

    # ---- what a backend writes -----------------------------------------------------------------

    @abstractmethod
    def find(self, pick: Pick) -> list[Record]:
        """The records of a pick. An unknown id raises `UnknownTask`."""

    @abstractmethod
    def is_past(self, queue: str) -> bool:
        """Whether a lease or a delay of this queue is over."""

    @abstractmethod
    def ready_in(self, queue: str, priority: int, limit: int) -> list[Head]:
        """The first QUEUED records of a lane, by place."""

    @abstractmethod
    def known_by_key(self, queue: str, key: str) -> str | None:
        """The message that came in under this idempotency key."""

    def sender_of(self, record: Record) -> str:  # noqa: ARG002 - a store of one sender needs no more
        """The agent that sent a message; empty for what operators and the library enqueue."""
        return ""

    @abstractmethod
    def depth(self, queue: str) -> int:
        """How many wait in a queue, with what this transaction changed."""

    @abstractmethod
    def limits(self, queue: str) -> Limits:
        """What a queue may hold."""

    @abstractmethod
    def keep(self, events: Iterable[Event]) -> None:
        """Gather events for the commit, in order."""

    @abstractmethod
    def put_new(self, step: Step, envelope: Envelope) -> bool:
        """Store a new record; False when its id is taken."""

    @abstractmethod
    def put_all_new(self, steps: Sequence[Step], envelopes: Sequence[Envelope]) -> None:
        """Store new records that the store named itself, and that have no key."""

    @abstractmethod
    def put_all(self, before: Sequence[Record], steps: Sequence[Step]) -> None:
        """Store changed records, and their results where a step has one."""

    @abstractmethod
    def remove(self, records: Iterable[Record]) -> None:
        """Forget records."""


class Store(Protocol):
    """A place for records. Safe to share between threads, and across fork."""

    url: str
    on_ready: Callable[[set[str]], None] | None
    """Called after each commit with the queues in which something new can be claimed."""
    on_ended: Callable[[], None] | None
    """Called after each commit in which a record came to its end."""
    on_notable: Callable[[Sequence[Event]], None] | None
    """Called after each commit with those of its events that a person may have to know."""

    @property
    def trouble(self) -> str:
        """Why nothing is written at present; empty when all is well."""

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        """Run `work` in a transaction, perhaps with others' work, and return when it is committed.

        `makes_room` marks what must also work on a full disk.
        """

    def read(self, message_id: str) -> Stored | None:
        """Everything about one message."""

    def find(self, pick: Pick) -> list[Record]:
        """Records as they are now, without a transaction."""

    def count(self) -> dict[str, dict[Counted, int]]:
        """How many records each queue has in each state, from counters."""

    def oldest_ns(self, queue: str) -> int | None:
        """For how long the head of the queue has been ready; None when nothing is."""

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        """Events with a `seq` above `after`, in order."""

    def payloads(self, after: int, up_to: int) -> dict[int, bytes]:
        """What messages said whose `created` events have these numbers, as far as they are still there."""

    def newest_event(self) -> int:
        """The number of the last event; 0 when nothing has happened yet."""

    def next_work_ns(self, queue: str) -> int | None:
        """In how many nanoseconds something can be claimed: 0 for now, None when nothing waits."""

    def limits(self, queue: str) -> Limits:
        """What a queue may hold."""

    def set_limits(self, queue: str, limits: Limits) -> None:
        """What a queue may hold from now on."""

    def purge_events(self, *, up_to: int, before_us: int, limit: int) -> None:
        """Forget some events up to a number and before a time, those that the depths do not need any more.

        Never one that an outbox still waits for.
        """

    def identity(self) -> str:
        """A name that no other store has, for as long as this one lives."""

    def sync(self) -> None:
        """Return when everything committed so far survives a power cut."""

    def outbox(self) -> Outbox | None:
        """How far the shipper has come; None when nobody ships."""

    def set_outbox(self, outbox: Outbox | None) -> None:
        """So far has the shipper come. What it has taken is forgotten, but for the last `LIVE_EVENTS`."""

    def purge_keys(self, before_us: int, limit: int) -> None:
        """Forget some idempotency keys that were seen before a time."""

    def steady_ns(self) -> int:
        """The store's own clock."""

    def wall_us(self) -> int:
        """UTC, for people."""

    def reopen(self) -> None:
        """Start afresh after an error of the disk."""

    def close(self) -> None:
        """Release files and connections; the next call opens them again."""


def _too_long(envelope: Envelope, limits: Limits) -> InvalidMessage:
    return InvalidMessage(
        f"the payload has {len(envelope.payload)} bytes, and queue {envelope.queue!r} "
        f"takes at most {limits.max_payload_bytes} (max_payload_bytes)"
    )


def unknown(message_id: str) -> UnknownTask:
    """The error of an id that is not there."""
    return UnknownTask(message_id)
