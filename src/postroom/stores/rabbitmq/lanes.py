"""The lanes of a broker: their names and arguments, and the deliveries that wait in this process.

Rule 1: a home is the set of lanes of one organization, or of a shard that many organizations share.
Rule 2: a delivery names a record. Only the ledger says whether the record can be claimed.
Rule 3: a message stays in the lane of its priority. The age that promotes it is judged in the ledger.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.message import ENGINE_PREFIX, Envelope
from postroom.stores.base import LANES

SHARDS = 64
SHARD_PREFIX = "shard-"
LANE_NAMES = ("p0", "lane1", "lane2", "lane3")
"""Ends of the names of queues. Brokers may hold queues p1 to p3 with other arguments."""
NANOS_PER_MS = NANOS_PER_S // 1_000
DELAY_STEP_MS = 100  # the precision of a delay queue up to DELAY_EXACT_MS_MAX
DELAY_EXACT_MS_MAX = 10_000
DELAY_MS_MAX = 20 * 24 * 3_600_000  # of one queue; the broker's limit is 2**32 ms for twice the delay
DELAY_EXPIRY_FACTOR = 2
CLAIMED_KNOWN_MAX = 10_000  # messages claimed from the ledger whose deliveries are refused at once
STALE_S = 0.1  # a delivery of a lane that is empty in the ledger is dropped after this time
WAKE_S = 0.002  # a worker that has deliveries is woken by further ones after this time


class RabbitLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and intervals that users do not set."""

    own_lanes_max: int = 200  # organizations with lanes of their own
    delay_expiry_ms_min: int = 60_000
    silence_s: float = 1.0  # without deliveries for this time, a worker claims from the ledger itself
    late_ns: int = NANOS_PER_S  # how long the ledger waits for the delivery of a message whose delay is over
    reconcile_s: float = 30.0
    held_s: float = 30.0  # a delivery that no worker of this process claims is given back after this time
    held_look_s: float = 10.0  # between two looks for deliveries that are held too long
    heartbeat_s: int = 10  # a connection without a sign of life for about twice this time is dropped
    reconnect_s_max: float = 2.0
    refused_pause_s: float = 1.0  # before messages that the broker refused are published again
    close_timeout_s: float = 5.0


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The content of a message in a lane."""

    message_id: str
    lane: int
    """The lane of the record."""
    is_delayed: bool = False
    """Whether the message comes from a delay queue, so that its record is not QUEUED yet."""
    envelope: Envelope | None = None
    """The whole message, when the ledger does not have it (`p0=broker-only`)."""

    @property
    def is_pending(self) -> bool:
        """Whether the ledger has something to do before the record can be claimed."""
        return self.is_delayed or self.envelope is not None


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to publish."""

    home: str
    note: Note
    delay_ms: int = 0


class LaneDelivery(msgspec.Struct, frozen=True, gc=False):
    """A message that the broker delivered and that is not acknowledged yet."""

    home: str
    note: Note
    tag: int
    epoch: int
    """The connection that delivered it. The tag means nothing on another connection."""
    arrived: float


class Topology(msgspec.Struct, frozen=True):
    """The names and arguments of queues and exchanges."""

    prefix: str
    is_quorum: bool = False
    expiry_ms_min: int = RabbitLimits().delay_expiry_ms_min

    def lane(self, home: str, lane: int) -> str:
        """The name of a queue of a home."""
        name = home.removeprefix(ENGINE_PREFIX) if home.startswith(ENGINE_PREFIX) else f"~{home}"
        return f"{self.prefix}.{name}.{LANE_NAMES[lane]}"

    def lanes(self, home: str) -> list[tuple[str, dict[str, Any]]]:
        """The queues of a home with their arguments."""
        return [(self.lane(home, lane), self._arguments()) for lane in range(LANES)]

    def _arguments(self) -> dict[str, Any]:
        return {"x-queue-type": "quorum"} if self.is_quorum else {}

    def delay(self, delay_ms: int) -> tuple[str, dict[str, Any]]:
        """The queue of a delay, which is also the name of its exchange, with its arguments.

        A message keeps its routing key, the name of its lane, and returns there after the delay.
        """
        return f"{self.prefix}.delay.{delay_ms}", self._arguments() | {
            "x-message-ttl": delay_ms,
            "x-expires": max(self.expiry_ms_min, DELAY_EXPIRY_FACTOR * delay_ms),
            "x-dead-letter-exchange": "",
        }


def shard_of(queue: str) -> str:
    """The shard of an organization without lanes of its own."""
    return f"{SHARD_PREFIX}{int.from_bytes(blake2b(queue.encode(), digest_size=2).digest()) % SHARDS}"


def delay_step_ms(delay_ms: int) -> int:
    """The delay of the queue in which a message waits next.

    A short delay is rounded up. A longer one is rounded down to two digits: the rest is waited for in another
    queue. So there are few delay queues, and a message is at most `DELAY_STEP_MS` late.
    """
    if delay_ms <= DELAY_EXACT_MS_MAX:
        return -(-delay_ms // DELAY_STEP_MS) * DELAY_STEP_MS
    unit = int(10 ** (len(str(delay_ms)) - 2))
    return min(delay_ms // unit * unit, DELAY_MS_MAX)


class Deliveries:
    """The unacknowledged deliveries of this process, by home and lane of the record."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._mutex = threading.Lock()
        self._waiting: dict[tuple[str, int], deque[LaneDelivery]] = {}
        self._pending: deque[LaneDelivery] = deque()
        self._claimed: dict[str, None] = {}
        """Messages that were claimed without a delivery, which may still come."""
        self._last_arrival = time.monotonic()
        self._last_wake = 0.0
        self._has_new_home = False

    def add(self, delivery: LaneDelivery) -> bool:
        """A delivery arrived. Returns False when its message was claimed without it."""
        with self._mutex:
            if delivery.note.message_id in self._claimed:
                del self._claimed[delivery.note.message_id]
                return False
            is_first = not self._waiting and not self._pending
            self._line_of(delivery).append(delivery)
            self._last_arrival = delivery.arrived
        if is_first or delivery.arrived > self._last_wake + WAKE_S:
            self._last_wake = delivery.arrived
            self._wake()
        return True

    def forget(self, message_ids: set[str]) -> list[LaneDelivery]:
        """These messages were claimed from the ledger: take out their deliveries, and refuse later ones."""
        with self._mutex:
            self._claimed.update(dict.fromkeys(message_ids))
            found: list[LaneDelivery] = []
            for key, waiting in list(self._waiting.items()):
                mine = [each for each in waiting if each.note.message_id in message_ids]
                if mine:
                    found += mine
                    self._keep(key, [each for each in waiting if each.note.message_id not in message_ids])
            for delivery in found:
                del self._claimed[delivery.note.message_id]
            while len(self._claimed) > CLAIMED_KNOWN_MAX:
                del self._claimed[next(iter(self._claimed))]
            return found

    def expect(self, message_ids: Iterable[str]) -> None:
        """These messages are published, so that their deliveries count again."""
        if self._claimed:
            with self._mutex:
                for message_id in message_ids:
                    self._claimed.pop(message_id, None)

    def _keep(self, key: tuple[str, int], waiting: list[LaneDelivery]) -> None:
        if waiting:
            self._waiting[key] = deque(waiting)
        else:
            del self._waiting[key]

    def _line_of(self, delivery: LaneDelivery) -> deque[LaneDelivery]:
        if delivery.note.is_pending:
            return self._pending
        return self._waiting.setdefault((delivery.home, delivery.note.lane), deque())

    def take_pending(self, limit: int) -> list[LaneDelivery]:
        """Take out deliveries that need the ledger before they can be claimed."""
        with self._mutex:
            return [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]

    def take(self, home: str, lane: int, limit: int) -> list[LaneDelivery]:
        """Take out up to `limit` deliveries, the first ones first."""
        with self._mutex:
            waiting = self._waiting.get((home, lane))
            if not waiting:
                return []
            taken = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
            if not waiting:
                del self._waiting[home, lane]
            return taken

    def take_held(self, before: float) -> list[LaneDelivery]:
        """Take out every delivery that arrived before a time."""
        held = self.take_old(before)
        with self._mutex:
            held += [each for each in self._pending if each.arrived < before]
            self._pending = deque(each for each in self._pending if each.arrived >= before)
        return held

    def take_old(self, before: float, lane: int | None = None) -> list[LaneDelivery]:
        """Take out deliveries, of one lane or of all, that can be claimed and arrived before a time."""
        with self._mutex:
            old: list[LaneDelivery] = []
            for key, waiting in list(self._waiting.items()):
                if lane in (None, key[1]) and waiting[0].arrived < before:
                    old += [each for each in waiting if each.arrived < before]
                    self._keep(key, [each for each in waiting if each.arrived >= before])
            return old

    def put_back(self, taken: Sequence[LaneDelivery]) -> None:
        """Put deliveries back in front of the others."""
        with self._mutex:
            for delivery in reversed(taken):
                self._line_of(delivery).appendleft(delivery)

    def count(self, home: str, lane: int) -> int:
        """How many deliveries of a lane wait."""
        return len(self._waiting.get((home, lane), ()))

    def homes(self, lane: int) -> list[str]:
        """Homes with deliveries of a lane."""
        with self._mutex:
            return [home for home, each in self._waiting if each == lane]

    def clear(self) -> None:
        """Forget everything: the connection is gone, and the broker delivers it again."""
        with self._mutex:
            self._waiting.clear()
            self._pending.clear()

    def note_new_home(self) -> None:
        """An organization has new lanes. Its messages are delivered only once this process consumes them."""
        self._has_new_home = True
        self._wake()

    def take_new_home(self) -> bool:
        """Whether the home lane changed since the last call. If so, the next claim reads the ledger."""
        found, self._has_new_home = self._has_new_home, False
        return found

    def restart(self) -> None:
        """Expect deliveries from now on."""
        self._last_arrival = time.monotonic()

    def is_silent(self, silence_s: float) -> bool:
        """Whether nothing waits and nothing has arrived for a while."""
        return not self._waiting and not self._pending and time.monotonic() - self._last_arrival > silence_s


def is_shard(home: str) -> bool:
    """Whether organizations share a home."""
    return home.startswith(SHARD_PREFIX)
