"""Events as a store file keeps them: what is alike is written once.

A verb that is about many messages makes events that differ in a few numbers. They are kept as one run, from
which the events follow; a quarter of a store's file would otherwise be the same words over and over.

A message that is accepted by itself needs no row of events at all at first: its record says the same. The
next commit that has other events to tell, or the one that finds `UNTOLD_MAX` of them, writes them down. So
the records behind the newest row of events are exactly those that nobody has told yet.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgspec

from postroom.core.lifecycle import NANOS_PER_S
from postroom.message import Event, State

UNTOLD_MAX = 256  # new records whose events follow from themselves alone
EVENTS_OF_ONE = 2  # `created` and `enqueued`

RecordName: TypeAlias = int | str
"""The number in a name that the store gave, or the name that a caller gave."""


class NewRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="new"):
    """Messages that were accepted together, named by the store: `created`, and `enqueued` without a delay."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    delay_ns: int
    sizes: list[int]
    """Of the payloads, in bytes."""

    def events(self, name: Callable[[RecordName], str]) -> Iterator[Event]:
        seq, delay_ns = self.seq, self.delay_ns
        state: State = "SCHEDULED" if delay_ns else "QUEUED"
        detail = {"delay_s": delay_ns / NANOS_PER_S} if delay_ns else {}
        for size in self.sizes:
            message_id = name(seq)
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
    """Messages that were accepted one after the other, each by itself and without a delay."""

    seq: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    ts_us: list[int]
    sizes: list[int]

    def events(self, name: Callable[[RecordName], str]) -> Iterator[Event]:
        for index, (ts_us, size) in enumerate(zip(self.ts_us, self.sizes, strict=True)):
            seq = self.seq + EVENTS_OF_ONE * index
            one = NewRun(seq, ts_us, self.queue, self.priority, self.type, self.parent_message_id, 0, [size])
            yield from one.events(name)


class LeasedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="leased"):
    """Messages that one worker got together: `dequeued`. A lease's token is its event's number."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    worker_id: str
    names: list[RecordName]
    attempts: list[int]
    waited_us: list[int]

    def events(self, name: Callable[[RecordName], str]) -> Iterator[Event]:
        facts = zip(self.names, self.attempts, self.waited_us, strict=True)
        for seq, (which, attempt, waited_us) in enumerate(facts, self.seq):
            yield Event(
                seq, self.ts_us, "dequeued", self.queue, name(which), "PROCESSING", attempt, self.priority,
                seq, self.worker_id, waited_us,
            )  # fmt: skip


class CompletedRun(msgspec.Struct, frozen=True, gc=False, array_like=True, tag_field="run", tag="completed"):
    """Messages that one worker finished together: `execution_completed`."""

    seq: int
    ts_us: int
    queue: str
    priority: int
    worker_id: str
    names: list[RecordName]
    attempts: list[int]
    leases: list[int]
    worked_us: list[int]

    def events(self, name: Callable[[RecordName], str]) -> Iterator[Event]:
        facts = zip(self.names, self.attempts, self.leases, self.worked_us, strict=True)
        for seq, (which, attempt, lease, worked_us) in enumerate(facts, self.seq):
            yield Event(
                seq, self.ts_us, "execution_completed", self.queue, name(which), "COMPLETED", attempt,
                self.priority, lease, self.worker_id, worked_us,
            )  # fmt: skip


Run: TypeAlias = NewRun | OnesRun | LeasedRun | CompletedRun
Told: TypeAlias = Event | Run
"""What a row of events is made of, in the order of the numbers."""

_OBJECT = ord("{")  # an event; a run is a list
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_run = msgspec.json.Decoder(Run).decode


class Untold(NamedTuple):
    """What a new record's row tells about its events, as long as no row of events does."""

    seq: int
    queue: str
    priority: int
    type: str
    parent_message_id: str
    created_us: int
    size: int


_alike = attrgetter("queue", "priority", "type", "parent_message_id")


def runs_of(untold: Iterable[Untold]) -> Iterator[OnesRun]:
    """Neighbours that are alike are one run."""
    for traits, neighbours in groupby(untold, _alike):
        ones = list(neighbours)
        yield OnesRun(ones[0].seq, *traits, [one.created_us for one in ones], [one.size for one in ones])


def packed(told: list[Told]) -> str:
    """The events of a commit, as they are kept."""
    return _encode(told).decode()


def unpacked(batch: str, store_id: str) -> Iterator[Event]:
    """The events of a commit."""
    for told in _decode(batch):
        if memoryview(told)[0] == _OBJECT:
            yield _decode_event(told)
        else:
            yield from told_by(_decode_run(told), store_id)


def told_by(run: Run, store_id: str) -> Iterator[Event]:
    """The events of a run."""

    def name(which: RecordName) -> str:
        return f"{store_id}-{which!s}" if isinstance(which, int) else which

    return run.events(name)
