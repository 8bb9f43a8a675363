"""Checks the events of each message: which messages are open, and which guarantees were violated.

Rule 1: only violations that the events prove are reported. Whatever may have happened before the first event,
        or in a gap, is assumed to have been correct.
Rule 2: events of one source arrive in the order of their `seq`.
Rule 3: memory grows with the number of open messages; of an ended message, two numbers are kept.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import ClassVar, Final, Literal, TypeAlias

from postroom.core.formats.events import AuditEvent, Contract
from postroom.message import EventKind

Rule: TypeAlias = Literal["lost", "unknown", "overlap", "order", "terminal", "gap"]

LEASED: Final[frozenset[Contract]] = frozenset({"tasks", "engine"})
"""Contracts whose messages are in a store, which is one source. Other messages may have several sources."""
ENDLESS: Final[frozenset[Contract]] = frozenset({"bus", "queue", "mail", "audit"})
"""Contracts whose messages may stay forever or end without an event: a poll names a cursor, not messages."""
ENDED_KEPT_MAX: Final = 200_000  # ended messages that are kept whole; older ones are kept as two numbers
MICROS_PER_S: Final = 1_000_000

ENDS: Final[dict[EventKind, str]] = {
    "execution_completed": "was completed",
    "dead_letter": "became a dead letter",
    "cancelled": "was cancelled",
    "expired": "expired",
    "quarantined": "was quarantined",
    "delivered": "was delivered",
    "deleted": "was deleted",
}
MAY_FOLLOW: Final = frozenset(
    {
        ("execution_completed", "delivered"),  # its result was delivered
        ("dead_letter", "quarantined"),
        ("delivered", "expired"),  # expired messages are removed from a file, read or not
    }
)
_UNDER_LEASE: Final[frozenset[EventKind]] = frozenset(
    {"heartbeat", "execution_completed", "execution_failed", "lease_lapsed", "released"}
)
"""Kinds of events that belong to a lease: each names that lease."""
_ANY_LEASE: Final = -1
_REPORTED: Final = -1
_EARLIER: Final = -2


class FifoLane:
    """The messages of one queue, key and priority that wait for their first delivery, in order."""

    __slots__ = ("place", "waiting")

    def __init__(self, place: tuple[str, str, int | None]) -> None:
        self.place = place
        self.waiting: deque[Life] = deque()


class Life:
    """The state of one message between its acceptance and its end."""

    __slots__ = (
        "accepted", "end", "ended", "fresh", "holes", "lane", "leased", "message_id", "quiet_us", "reader",
        "seq", "source", "token", "unsure",
    )  # fmt: skip

    def __init__(self, message_id: str, accepted: int, token: int, holes: int) -> None:
        self.message_id = message_id
        self.accepted = accepted
        """The `seq` of its `created` event; 0 when that was not seen."""
        self.token = token
        """The token of the open lease; 0 for none, `_ANY_LEASE` when unknown."""
        self.leased = 0
        """The `seq` of its last delivery."""
        self.ended = 0
        self.end: EventKind | None = None
        self.lane: FifoLane | None = None
        self.fresh = False
        """Accepted without a delay, and not yet enqueued."""
        self.holes = holes
        self.unsure = False
        """Whether it may have been replayed in a gap."""
        self.reader = ""
        self.source = ""
        self.seq = 0
        self.quiet_us = 0
        """The time since which an event of it would have been possible, but none came."""

    @property
    def is_open(self) -> bool:
        return not self.ended and self.accepted != _REPORTED


class EndedIds:
    """Ended messages in sixteen bytes each: the hash of the id, and the `seq` of the end."""

    def __init__(self) -> None:
        self._runs: list[tuple[array[int], array[int]]] = []

    def put(self, lives: Collection[Life]) -> None:
        pairs = sorted((hash(life.message_id), life.ended) for life in lives)
        self._runs.append((array("q", [pair[0] for pair in pairs]), array("q", [pair[1] for pair in pairs])))

    def find(self, message_id: str) -> int:
        """The `seq` of the event that ended the message; 0 for none."""
        wanted = hash(message_id)
        for hashes, numbers in reversed(self._runs):
            at = bisect_left(hashes, wanted)
            if at < len(hashes) and hashes[at] == wanted:
                return numbers[at]
        return 0


Report: TypeAlias = Callable[[Rule, str, Life, tuple[int, ...], str, Life | None], None]
"""Rule, source, message, the `seq` of the events that prove it, the predicate, the message overtaken."""


class Lives:
    """The messages of one store, or of all sources of a contract without stores, by id."""

    def __init__(self, contract: Contract, report: Report, ended_kept_max: int = ENDED_KEPT_MAX) -> None:
        self.contract = contract
        self._ended_kept_max = ended_kept_max
        self.newest_us = 0
        self.whole = True
        """Whether its sources were read from their first event on, without a gap."""
        self.accepted = 0
        self.ended = 0
        self._report = report
        self._leased = contract in LEASED
        self._lives: dict[str, Life] = {}
        self._over: deque[Life] = deque()
        self._ended_ids = EndedIds()
        self._lanes: dict[tuple[str, str, int | None], FifoLane] = {}
        self._holes = 0

    def take(self, event: AuditEvent) -> None:
        """Check the next event of a source."""
        if event.ts_us > self.newest_us:  # noqa: PLR1730 - faster than a call, and run for every event
            self.newest_us = event.ts_us
        if event.message_id:
            check = self._checks.get(event.kind)
            if check is not None:
                check(self, event, self._lives.get(event.message_id))

    def skip(self) -> None:
        """Handle a gap: anything may have happened to the open messages in it."""
        self._holes += 1
        self.whole = False
        self._lanes = {}

    def open(self) -> Iterator[Life]:
        """Messages that were accepted and have not ended; none for contracts in `ENDLESS`."""
        if self.contract not in ENDLESS:
            yield from (life for life in self._lives.values() if life.is_open)

    def never_accepted(self) -> Iterator[Life]:
        """At the end of the stream: messages in files that were delivered but never accepted."""
        if self.whole and not self._leased:
            yield from (life for life in self._lives.values() if not life.accepted and life.leased)

    # ---- acceptance ----------------------------------------------------------------------------------

    def _life(self, event: AuditEvent, life: Life | None) -> Life:
        """The message of an event. An unknown message was accepted before the first event or in a gap."""
        if life is None:
            message_id = event.message_id
            life = self._lives[message_id] = Life(message_id, 0, 0 if self.whole else _ANY_LEASE, self._holes)
            life.ended = self._ended_ids.find(message_id)
            if life.ended:
                life.accepted, life.token = _EARLIER, 0
        elif life.holes != self._holes:
            life.holes = self._holes
            life.token, life.lane, life.unsure = _ANY_LEASE, None, True
        life.seq = event.seq
        life.source = event.source
        life.quiet_us = event.ts_us
        return life

    def _created(self, event: AuditEvent, life: Life | None) -> None:
        if life is not None and not life.ended:
            if self._leased and life.accepted > 0 and life.holes == self._holes:
                self._prove("terminal", event, life, life.accepted, "was accepted again before it ended")
            life.accepted = life.accepted or event.seq  # another source reported its delivery first
            return
        if life is not None and not life.accepted:  # the same, and the delivery was its end
            life.accepted = event.seq
            self.accepted += 1
            return
        self.accepted += 1
        if self.contract == "bus":
            return
        life = self._lives[event.message_id] = Life(event.message_id, event.seq, 0, self._holes)
        life.seq = event.seq
        life.source = event.source
        life.quiet_us = event.ts_us
        if event.state == "SCHEDULED":
            life.quiet_us += _delay_us(event)
        else:
            life.fresh = True

    def _enqueued(self, event: AuditEvent, life: Life | None) -> None:
        life = self._life(event, life)
        if life.fresh:
            life.fresh = False
            detail = event.detail
            place = (event.queue, str(detail.get("key", "")) if detail else "", event.priority)
            lane = self._lanes.get(place)
            if lane is None:
                lane = self._lanes[place] = FifoLane(place)
            life.lane = lane
            lane.waiting.append(life)

    # ---- delivery ------------------------------------------------------------------------------------

    def _moved(self, event: AuditEvent, life: Life | None) -> None:
        """The message left its lane without being delivered."""
        life = self._life(event, life)
        self._leave(life)
        if event.kind == "retry_scheduled":
            life.quiet_us += _delay_us(event)

    def _deferred(self, event: AuditEvent, life: Life | None) -> None:
        """The message left its lane or was released by the lease holder, and waits for a delay."""
        life = self._life(event, life)
        if event.lease:
            self._check_lease(event, life)
            life.token = 0
        self._leave(life)
        life.quiet_us += _delay_us(event)

    def _dequeued(self, event: AuditEvent, life: Life | None) -> None:
        life = self._life(event, life)
        self._check_accepted(event, life)
        if life.ended:
            if not life.unsure:
                self._prove("terminal", event, life, life.ended, f"was leased after {_was(life)}")
            self._revive(life)
        if life.token > 0:
            self._prove("overlap", event, life, life.leased, f"was leased while lease {life.token} was open")
        self._check_order(event, life)
        life.unsure = False
        life.token = event.lease or event.seq
        life.leased = event.seq

    def _under_lease(self, event: AuditEvent, life: Life | None) -> None:
        """An event that is only valid under the current lease."""
        life = self._life(event, life)
        self._check_lease(event, life)
        if event.kind not in ("heartbeat", "execution_started"):
            life.token = 0

    def _check_lease(self, event: AuditEvent, life: Life) -> None:
        lease = event.lease
        if not lease and self._leased and event.kind in _UNDER_LEASE:
            self._prove("overlap", event, life, life.leased or life.accepted, "was held under no lease")
        if not lease or lease == life.token:
            return
        if life.token == _ANY_LEASE:
            life.token = lease
            return
        open_one = f"while lease {life.token} was open" if life.token else "which was over"
        self._prove(
            "overlap", event, life, life.leased or life.accepted, f"was held under lease {lease}, {open_one}"
        )

    def _check_order(self, event: AuditEvent, life: Life) -> None:
        """Check on the first delivery that no message of the lane waited longer."""
        life.fresh = False
        lane = life.lane
        if lane is None:
            return
        waiting = lane.waiting
        while waiting[0].lane is not lane:
            waiting.popleft()
        head = waiting[0]
        self._leave(life)
        if head is not life and event.priority == lane.place[2]:
            head.lane = None  # an overtaken message is reported only once
            proof = (head.accepted, life.accepted, event.seq)
            said = f"was delivered before {head.message_id}"
            self._report("order", event.source, life, proof, said, head)

    def _leave(self, life: Life) -> None:
        lane = life.lane
        if lane is None:
            return
        life.lane = None
        waiting = lane.waiting
        while waiting and waiting[0].lane is not lane:
            waiting.popleft()
        if not waiting and self._lanes.get(lane.place) is lane:
            del self._lanes[lane.place]

    def _check_accepted(self, event: AuditEvent, life: Life) -> None:
        if not life.accepted and self.whole:
            life.accepted = _REPORTED
            self._prove("unknown", event, life, 0, "was delivered, and nobody had accepted it")

    # ---- ends and replays ------------------------------------------------------------------------------

    def _completed(self, event: AuditEvent, life: Life | None) -> None:
        life = self._life(event, life)
        if not life.ended:
            self._check_lease(event, life)
        self._end(event, life)

    def _finished(self, event: AuditEvent, life: Life | None) -> None:
        self._end(event, self._life(event, life))

    def _delivered(self, event: AuditEvent, life: Life | None) -> None:
        life = self._life(event, life)
        if self._leased:
            self._check_accepted(event, life)
            self._check_order(event, life)
            self._end(event, life)
            return
        life.leased = event.seq
        reader = event.recipient or event.agent_id
        if self.contract == "mail" or (life.ended and (reader != life.reader or not reader)):
            return  # a mail stays after delivery, and each reader of a queue has its own delivery
        self._end(event, life)
        life.reader = reader

    def _deleted(self, event: AuditEvent, life: Life | None) -> None:
        if life is not None and life.ended and self._leased:
            return  # retention removed its record
        self._end(event, self._life(event, life))

    def _replayed(self, event: AuditEvent, life: Life | None) -> None:
        is_known = life is not None
        life = self._life(event, life)
        self._leave(life)
        if life.ended:
            self._revive(life)
        elif self._leased and is_known and not life.unsure:
            self._prove("terminal", event, life, life.accepted or life.leased, "was replayed before it ended")

    def _revive(self, life: Life) -> None:
        self.ended -= 1
        life.ended, life.end, life.token, life.unsure = 0, None, 0, False

    def _end(self, event: AuditEvent, life: Life) -> None:
        self._leave(life)
        life.token = 0
        if not life.ended:
            self.ended += 1
            self._keep(life)
        elif not life.unsure and (life.end, event.kind) not in MAY_FOLLOW:
            self._prove("terminal", event, life, life.ended, f"{ENDS[event.kind]} after {_was(life)}")
        life.ended, life.end, life.unsure = event.seq, event.kind, False

    def _keep(self, life: Life) -> None:
        """Keep an ended message, and reduce the oldest ones to two numbers each."""
        over = self._over
        over.append(life)
        if len(over) <= self._ended_kept_max:
            return
        oldest = [over.popleft() for _ in range(self._ended_kept_max // 2)]
        gone = {
            done.message_id: done for done in oldest if done.ended and self._lives[done.message_id] is done
        }
        self._ended_ids.put(gone.values())
        for message_id in gone:
            del self._lives[message_id]

    def _prove(self, rule: Rule, event: AuditEvent, life: Life, earlier: int, said: str) -> None:
        self._report(rule, event.source, life, (earlier, event.seq), said, None)

    _checks: ClassVar[dict[EventKind, Callable[["Lives", AuditEvent, Life | None], None]]] = {
        "created": _created,
        "enqueued": _enqueued,
        "promoted": _moved,
        "retry_scheduled": _moved,
        "deferred": _deferred,
        "dequeued": _dequeued,
        "heartbeat": _under_lease,
        "execution_started": _under_lease,
        "execution_failed": _under_lease,
        "lease_lapsed": _under_lease,
        "released": _under_lease,
        "execution_completed": _completed,
        "dead_letter": _finished,
        "cancelled": _finished,
        "expired": _finished,
        "quarantined": _finished,
        "delivered": _delivered,
        "deleted": _deleted,
        "replayed": _replayed,
    }


def _was(life: Life) -> str:
    return "its end" if life.end is None else f"it {ENDS[life.end]}"


def _delay_us(event: AuditEvent) -> int:
    delay_s = event.detail.get("delay_s")
    return int(delay_s * MICROS_PER_S) if isinstance(delay_s, int | float) else 0
