"""The checker of histories: reads a stretch of the audit stream, and says which promises were broken in it.

Rule 1: within a source the order is `seq`; between sources there is none.
Rule 2: the same event twice is no violation. Two events under one number are one.
Rule 3: what is missing is told once; what it may have been is taken to have been right.

`core.lives` judges what happened to the messages. `RULES` are the promises.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from postroom.core.events import AuditEvent, Contract, event_id
from postroom.core.message_checker import LEASED, MICROS_PER_S, Life, Lives, Rule

RULES: Final[dict[Rule, str]] = {
    "lost": "it was accepted, did not end, and is gone: absent from its store, or silent for too long",
    "unknown": "it was delivered, and nobody had accepted it",
    "overlap": "two leases of it were open at once, or a word counted under none or one that was over",
    "order": "it was delivered before one that had waited longer in the same queue, key and priority",
    "terminal": "a life of it began or ended twice, or went on after its end",
    "gap": "a number of a source is missing, or stands for two different events",
}

REORDER_MAX: Final = 10_000  # events of a source that are held back until a missing one comes
DIGESTS_MAX: Final = 1 << 20  # latest events of a source that a repeated one is compared with
VIOLATIONS_MAX: Final = 100_000  # that are kept; the rest is counted

_encode: Final = msgspec.json.Encoder(order="sorted").encode


class Violation(msgspec.Struct, frozen=True):
    """A broken promise, and the events that prove it."""

    rule: Rule
    message_id: str
    """Empty where no message can be named: in a hole."""
    event_ids: tuple[str, ...]
    sentence: str


class Open(msgspec.Struct, frozen=True):
    """A message that was accepted and has not ended."""

    source: str
    contract: Contract
    message_id: str


class HistoryVerdict(msgspec.Struct, frozen=True):
    """What a stretch of the stream proves."""

    violations: list[Violation]
    more: int
    """Violations that were only counted."""
    events: int
    repeats: int
    """Events that came once more, and said the same."""
    uncompared: int
    """Numbers that came once more, too late to be compared."""
    accepted: int
    ended: int
    open: int
    sources: dict[str, int]
    """The last number of each source."""


class _Source:
    """How far one source was read."""

    def __init__(self, name: str, first: int, lives: Lives) -> None:
        self.name = name
        self.lives = lives
        self.next = first
        self.compared_from = first
        self.digests: array[int] = array("q")
        self.held: dict[int, AuditEvent] = {}
        self.is_over = False


class History:
    """Feed it events with `add`, in the order a stream gives them, then ask for the `verdict`.

    With `since_us` a source begins with its first event at or after that time, and with `until_us` it ends
    before its first event after that time: a stretch has no hole, whatever the clocks did.
    """

    def __init__(self, *, since_us: int | None = None, until_us: int | None = None) -> None:
        self._since_us = since_us
        self._until_us = until_us
        self._sources: dict[str, _Source] = {}
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
            self._hold(source, event)
        else:
            self._compare(source, event)

    def _begin(self, event: AuditEvent) -> _Source:
        realm = event.source if event.contract in LEASED else f"contract {event.contract}"
        lives = self._lives.get(realm)
        if lives is None:
            lives = self._lives[realm] = Lives(event.contract, self._prove)
        if event.seq > 1:
            lives.whole = False
        source = self._sources[event.source] = _Source(event.source, event.seq, lives)
        return source

    def _take(self, source: _Source, event: AuditEvent) -> None:
        if source.is_over or (self._until_us is not None and event.ts_us > self._until_us):
            source.is_over = True
            return
        source.next += 1
        digests = source.digests
        digests.append(_digest(event))
        if len(digests) > 2 * DIGESTS_MAX:
            del digests[:DIGESTS_MAX]
            source.compared_from += DIGESTS_MAX
        self._events += 1
        source.lives.take(event)

    # ---- numbers that do not follow one another ----------------------------------------------------

    def _hold(self, source: _Source, event: AuditEvent) -> None:
        if source.is_over:
            return
        source.held[event.seq] = event
        if len(source.held) > REORDER_MAX:
            self._leap(source)

    def _catch_up(self, source: _Source) -> None:
        while (event := source.held.pop(source.next, None)) is not None:
            self._take(source, event)
        if source.is_over:
            source.held.clear()

    def _leap(self, source: _Source) -> None:
        """What is missing will not come any more: go on behind the hole."""
        first, behind = source.next, min(source.held)
        n = behind - first
        which = f"{first} is" if n == 1 else f"{first} to {behind - 1} are"
        proof = (event_id(source.name, first - 1), event_id(source.name, behind))
        self._report(Violation("gap", "", proof, f"of source {source.name}, {which} missing"))
        source.lives.skip()
        if n > DIGESTS_MAX:
            source.digests = array("q")
            source.compared_from = behind
        else:
            source.digests.extend([0] * n)
        source.next = behind
        self._catch_up(source)

    def _compare(self, source: _Source, event: AuditEvent) -> None:
        at = event.seq - source.compared_from
        known = source.digests[at] if at >= 0 else 0
        if not known:
            self._uncompared += 1
        elif known == _digest(event):
            self._repeats += 1
        else:
            source.digests[at] = 0  # told once
            name = event_id(source.name, event.seq)
            self._report(
                Violation("gap", event.message_id, (name,), f"{name} stands for two different events")
            )

    # ---- the verdict -------------------------------------------------------------------------------

    def _prove(
        self, rule: Rule, source: str, life: Life, seqs: tuple[int, ...], said: str, passed: Life | None
    ) -> None:
        sentence = f"{life.message_id} {said}"
        self._report(Violation(rule, life.message_id, _ids(source, seqs), sentence), passed)

    def _report(self, violation: Violation, passed: Life | None = None) -> None:
        if len(self._found) < VIOLATIONS_MAX:
            self._found.append((violation, passed))
        else:
            self._more += 1

    def sources(self) -> dict[str, tuple[Contract, int]]:
        """The contract of each source, and its last number so far."""
        return {source.name: (source.lives.contract, source.next - 1) for source in self._sources.values()}

    def settle(self) -> None:
        """Nothing more will come: what is still held back stands behind a hole."""
        for source in self._sources.values():
            while source.held:
                self._leap(source)

    def _open(self) -> Iterator[tuple[Lives, Life]]:
        self.settle()
        return ((lives, life) for lives in self._lives.values() for life in lives.open())

    def open(self) -> list[Open]:
        """What was accepted and has not ended, of contracts whose messages end."""
        return [Open(life.source, lives.contract, life.message_id) for lives, life in self._open()]

    def verdict(
        self, *, horizon_us: int | None = None, absent: Callable[[Open], bool] | None = None
    ) -> HistoryVerdict:
        """What was found. `absent` says whether an open message is gone from its store.

        Without it, and without a horizon, nothing is lost: the stream alone cannot tell.
        """
        still_open = list(self._open())
        lost = {}
        for lives, life in still_open:
            reason = _gone(lives, life, horizon_us, absent)
            if reason:
                lost[id(life)] = _lost(life, reason)
        # Whatever came behind a lost one has passed it: that is no second violation.
        found = [violation for violation, passed in self._found if id(passed) not in lost]
        return HistoryVerdict(
            [*found, *map(_never_accepted, self._unaccepted()), *lost.values()],
            self._more,
            self._events,
            self._repeats,
            self._uncompared,
            sum(lives.accepted for lives in self._lives.values()),
            sum(lives.ended for lives in self._lives.values()),
            len(still_open),
            {source.name: source.next - 1 for source in self._sources.values()},
        )

    def _unaccepted(self) -> Iterator[Life]:
        return (life for lives in self._lives.values() for life in lives.never_accepted())


def _digest(event: AuditEvent) -> int:
    """Equal for events that say the same; never 0."""
    fields = msgspec.structs.astuple(event)
    told = hash(fields[:-1])
    if event.detail:
        told ^= hash(_encode(event.detail))
    return told or 1


def _ids(source: str, seqs: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(event_id(source, seq) for seq in dict.fromkeys(seqs) if seq > 0)


def _never_accepted(life: Life) -> Violation:
    said = f"{life.message_id} was delivered, and nobody had accepted it"
    return Violation("unknown", life.message_id, _ids(life.source, (life.leased,)), said)


def _lost(life: Life, reason: str) -> Violation:
    said = f"{life.message_id} was accepted, did not end, and {reason}"
    return Violation("lost", life.message_id, _ids(life.source, (life.accepted, life.seq)), said)


def _gone(lives: Lives, life: Life, horizon_us: int | None, absent: Callable[[Open], bool] | None) -> str:
    if absent is not None and absent(Open(life.source, lives.contract, life.message_id)):
        return "is not in the store"
    silent_us = lives.newest_us - life.quiet_us
    if horizon_us is not None and silent_us > horizon_us:
        return f"has been silent for {silent_us // MICROS_PER_S} s"
    return ""
