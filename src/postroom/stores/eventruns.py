"""Events as a store file keeps them: what is alike is written once.

A verb that is about many messages makes events that differ in a few numbers. They are kept as one run, from
which the events follow; a quarter of a store's file would otherwise be the same words over and over.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from postroom.core.lifecycle import NANOS_PER_S
from postroom.message import Event, State

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


Run: TypeAlias = NewRun | LeasedRun | CompletedRun
Told: TypeAlias = Event | Run
"""What a row of events is made of, in the order of the numbers."""

_OBJECT = ord("{")  # an event; a run is a list
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_run = msgspec.json.Decoder(Run).decode


def packed(told: list[Told]) -> str:
    """The events of a commit, as they are kept."""
    return _encode(told).decode()


def unpacked(batch: str, store_id: str) -> Iterator[Event]:
    """The events of a commit."""

    def name(which: RecordName) -> str:
        return f"{store_id}-{which!s}" if isinstance(which, int) else which

    for told in _decode(batch):
        if memoryview(told)[0] == _OBJECT:
            yield _decode_event(told)
        else:
            yield from _decode_run(told).events(name)
