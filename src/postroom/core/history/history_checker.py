"""The history checker: reads a part of the audit stream and reports which delivery guarantees were violated.

Rule 1: events of one source are ordered by `seq`; events of different sources are not ordered.
Rule 2: a repeated event is allowed. Two different events with the same number are a violation.
Rule 3: a gap is reported once, and missing events are assumed to have been correct.

`message_checker` checks what happened to each message. `RULES` lists the guarantees.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from postroom.core.formats.events import AuditEvent, Contract, event_id
from postroom.core.history.message_checker import (
    ENDED_KEPT_MAX,
    LEASED,
    MICROS_PER_S,
    Life,
    Lives,
    Rule,
)

RULES: Final[dict[Rule, str]] = {
    "lost": "it was accepted, did not end, and is gone: absent from its store, or silent for too long",
    "unknown": "it was delivered without having been accepted",
    "overlap": "it had two leases at once, or an operation succeeded without a lease or after it ended",
    "order": "it was delivered before a message that had waited longer in the same queue, key and priority",
    "terminal": "it was accepted twice or ended twice, or something happened after its end",
    "gap": "a sequence number of a source is missing, or belongs to two different events",
}


_encode: Final = msgspec.json.Encoder(order="sorted").encode


class HistoryLimits(msgspec.Struct, frozen=True):
    """How much of a history is kept in memory."""

    reorder_max: int = 10_000
    """Events of a source that are held back until a missing one arrives."""
    digests_max: int = 1 << 20
    """Latest events of a source with which a repeated one is compared."""
    violations_max: int = 100_000
    """Violations that are kept; the rest is only counted."""
    ended_kept_max: int = ENDED_KEPT_MAX


LIMITS: Final = HistoryLimits()


class Violation(msgspec.Struct, frozen=True):
    """A violated guarantee, and the events that prove it."""

    rule: Rule
    message_id: str
    """Empty for a gap, where the message is unknown."""
    event_ids: tuple[str, ...]
    sentence: str


class Open(msgspec.Struct, frozen=True):
    """A message that was accepted and has not ended."""

    source: str
    contract: Contract
    message_id: str


class HistoryVerdict(msgspec.Struct, frozen=True):
    """The result of checking a part of the stream."""

    violations: list[Violation]
    more: int
    """Violations that were only counted."""
    events: int
    repeats: int
    """Events that were repeated with the same content."""
    uncompared: int
    """Events that were repeated too late to be compared."""
    accepted: int
    ended: int
    open: int
    sources: dict[str, int]
    """The last sequence number of each source."""


class _ReadSource:
    """The state of reading one source."""

    def __init__(self, name: str, first: int, lives: Lives) -> None:
        self.name = name
        self.lives = lives
        self.next = first
        self.compared_from = first
        self.digests: array[int] = array("q")
        self.held: dict[int, AuditEvent] = {}
        self.is_over = False


class History:
    """Checks a history: call `add` for each event in the order of the stream, then `verdict`.

    With `since_us`, a source begins with its first event at or after that time. With `until_us`, it ends
    before its first event after that time. So the checked part has no gaps, even when clocks stepped.
    Without `ordered`, the order of deliveries is not checked: on PostgreSQL, claims of workers overlap.
    """

    def __init__(
        self,
        *,
        since_us: int | None = None,
        until_us: int | None = None,
        ordered: bool = True,
        limits: HistoryLimits = LIMITS,
    ) -> None:
        self._ordered = ordered
        self._limits = limits
        self._since_us = since_us
        self._until_us = until_us
        self._sources: dict[str, _ReadSource] = {}
        self._lives: dict[str, Lives] = {}
        self._found: list[tuple[Violation, Life | None]] = []
        self._more = 0
        self._events = 0
        self._repeats = 0
        self._uncompared = 0

    def add(self, event: AuditEvent) -> None:
        """The next event of the stream."""
        source = self._sources.get(event.source)
        if source is None:
            if self._since_us is not None and event.ts_us < self._since_us:
                return
            source = self._begin(event)
        seq = event.seq
        if seq == source.next:
            self._take(source, event)
            if source.held:
                self._catch_up(source)
        elif seq > source.next:
            if not source.is_over:
                source.held[seq] = event
                if len(source.held) > self._limits.reorder_max:
                    self._skip_gap(source)
        else:
            self._compare(source, event)

    def _begin(self, event: AuditEvent) -> _ReadSource:
        realm = event.source if event.contract in LEASED else f"contract {event.contract}"
        lives = self._lives.get(realm)
        if lives is None:
            lives = self._lives[realm] = Lives(event.contract, self._prove, self._limits.ended_kept_max)
        if event.seq > 1:
            lives.whole = False
        source = self._sources[event.source] = _ReadSource(event.source, event.seq, lives)
        return source

    def _take(self, source: _ReadSource, event: AuditEvent) -> None:
        if source.is_over or (self._until_us is not None and event.ts_us > self._until_us):
            source.is_over = True
            return
        source.next += 1
        digests, kept = source.digests, self._limits.digests_max
        digests.append(_digest(event))
        if len(digests) > 2 * kept:
            del digests[:kept]
            source.compared_from += kept
        self._events += 1
        source.lives.take(event)

    # ---- gaps and repetitions ----------------------------------------------------------------------

    def _catch_up(self, source: _ReadSource) -> None:
        while (event := source.held.pop(source.next, None)) is not None:
            self._take(source, event)
        if source.is_over:
            source.held.clear()

    def _skip_gap(self, source: _ReadSource) -> None:
        """Report the missing events as a gap, and continue after it."""
        first, behind = source.next, min(source.held)
        n = behind - first
        which = f"{first} is" if n == 1 else f"{first} to {behind - 1} are"
        proof = (event_id(source.name, first - 1), event_id(source.name, behind))
        self._report(Violation("gap", "", proof, f"of source {source.name}, {which} missing"))
        source.lives.skip()
        if n > self._limits.digests_max:
            source.digests = array("q")
            source.compared_from = behind
        else:
            source.digests.extend([0] * n)
        source.next = behind
        self._catch_up(source)

    def _compare(self, source: _ReadSource, event: AuditEvent) -> None:
        at = event.seq - source.compared_from
        known = source.digests[at] if at >= 0 else 0
        if not known:
            self._uncompared += 1
        elif known == _digest(event):
            self._repeats += 1
        else:
            source.digests[at] = 0  # reported only once
            name = event_id(source.name, event.seq)
            self._report(
                Violation("gap", event.message_id, (name,), f"{name} stands for two different events")
            )

    # ---- the verdict -------------------------------------------------------------------------------

    def _prove(
        self, rule: Rule, source: str, life: Life, seqs: tuple[int, ...], said: str, passed: Life | None
    ) -> None:
        if rule == "order" and not self._ordered:
            return
        sentence = f"{life.message_id} {said}"
        self._report(Violation(rule, life.message_id, ids_of(source, seqs), sentence), passed)

    def _report(self, violation: Violation, passed: Life | None = None) -> None:
        if len(self._found) < self._limits.violations_max:
            self._found.append((violation, passed))
        else:
            self._more += 1

    def sources(self) -> dict[str, tuple[Contract, int]]:
        """The contract of each source, and its last sequence number so far."""
        return {source.name: (source.lives.contract, source.next - 1) for source in self._sources.values()}

    def settle(self) -> None:
        """Process the events that are still held back, as no more events will come."""
        for source in self._sources.values():
            while source.held:
                self._skip_gap(source)

    def _open(self) -> Iterator[tuple[Lives, Life]]:
        self.settle()
        return ((lives, life) for lives in self._lives.values() for life in lives.open())

    def open(self) -> list[Open]:
        """Messages that were accepted and have not ended, in contracts whose messages end."""
        return [Open(life.source, lives.contract, life.message_id) for lives, life in self._open()]

    def verdict(
        self, *, horizon_us: int | None = None, absent: Callable[[Open], bool] | None = None
    ) -> HistoryVerdict:
        """The result. `absent` tells whether an open message is missing from its store.

        Without `absent` and without a horizon no message is reported as lost: the stream alone cannot tell.
        """
        still_open = list(self._open())
        missing = {}
        for lives, life in still_open:
            reason = gone(lives, life, horizon_us, absent)
            if reason:
                missing[id(life)] = lost(life, reason)
        # Messages delivered before a lost one violate the order only because it is lost: not reported again.
        found = [violation for violation, passed in self._found if id(passed) not in missing]
        unknown = [
            Violation(
                "unknown",
                life.message_id,
                ids_of(life.source, (life.leased,)),
                f"{life.message_id} was delivered, and nobody had accepted it",
            )
            for lives in self._lives.values()
            for life in lives.never_accepted()
        ]
        return HistoryVerdict(
            [*found, *unknown, *missing.values()],
            self._more,
            self._events,
            self._repeats,
            self._uncompared,
            sum(lives.accepted for lives in self._lives.values()),
            sum(lives.ended for lives in self._lives.values()),
            len(still_open),
            {source.name: source.next - 1 for source in self._sources.values()},
        )


def _digest(event: AuditEvent) -> int:
    """Equal for events with equal content; never 0."""
    fields = msgspec.structs.astuple(event)
    digest = hash(fields[:-1])
    if event.detail:
        digest ^= hash(_encode(event.detail))
    return digest or 1


def ids_of(source: str, seqs: tuple[int, ...]) -> tuple[str, ...]:
    """The ids of the events that prove a violation, each once. The number 0 stands for none."""
    return tuple(event_id(source, seq) for seq in dict.fromkeys(seqs) if seq > 0)


def lost(life: Life, reason: str) -> Violation:
    """The violation of a message that is gone."""
    said = f"{life.message_id} was accepted, did not end, and {reason}"
    return Violation("lost", life.message_id, ids_of(life.source, (life.accepted, life.seq)), said)


def gone(lives: Lives, life: Life, horizon_us: int | None, absent: Callable[[Open], bool] | None) -> str:
    """Why an open message is lost; empty if it is not."""
    if absent is not None and absent(Open(life.source, lives.contract, life.message_id)):
        return "is not in the store"
    silent_us = lives.newest_us - life.quiet_us
    if horizon_us is not None and silent_us > horizon_us:
        return f"has been silent for {silent_us // MICROS_PER_S} s"
    return ""
