"""A transaction whose lanes are in RabbitMQ: the ledger's transaction, and what the broker delivered.

Rule 1: the ledger decides. A delivery whose record cannot be claimed is acknowledged and forgotten.
Rule 2: messages are published, and deliveries acknowledged, after the commit. The sweep publishes messages
        that a crash between the two left unpublished.
Rule 3: only the messages of organizations go through the broker. Tasks of agents use the ledger's own lanes.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import QueueFull, Unavailable
from postroom.message import Envelope, Event, Record, Stored, org_of
from postroom.stores.base import (
    FOREVER_NS,
    LANE_COUNTS,
    ByIds,
    Change,
    Counted,
    Ending,
    Head,
    Lanes,
    Limits,
    Parts,
    Pick,
    Records,
)
from postroom.stores.rabbitmq.lanes import (
    NANOS_PER_MS,
    STALE_S,
    Deliveries,
    LaneDelivery,
    Note,
    Outgoing,
    RabbitLimits,
    delay_step_ms,
    is_shard,
    shard_of,
)
from postroom.stores.store import Capabilities
from postroom.stores.transaction import NO_DETAILS, NO_STARTS, Accepted, Transaction

HOMES = "amqp-home"
"""The cells that name organizations with lanes of their own."""
HOMES_A_PAGE = 200
PARKED_NS_MIN = 3_650 * 24 * 3_600 * NANOS_PER_S  # a record with a longer delay waits for a decision
DELAYED = ("SCHEDULED", "RETRYING")
NEEDS_LEDGER = (b'"idempotency_key":', b'"ordering_key":', b'"payload_ref":', b'"context_ref":')
"""One of these is in the payload of every message with a key, an order or an external body."""


class TransactionContext(Protocol):
    """What a transaction needs of its store."""

    homes: dict[str, str]
    deliveries: Deliveries
    limits: RabbitLimits
    capabilities: Capabilities

    @property
    def is_direct(self) -> bool:
        """Whether claims go to the ledger, because the broker delivers nothing."""

    @property
    def broker_trouble(self) -> str:
        """Why the broker cannot be used; empty when it can."""


class RabbitLanes(Lanes):
    """The lanes of one transaction: what the broker delivered, and what is to be published."""

    def __init__(self, inner: Transaction, context: TransactionContext, *, is_reading: bool) -> None:
        self._inner = inner
        self._context = context
        self._deliveries = context.deliveries
        self._is_reading = is_reading
        self._direct: bool | None = True if is_reading else None
        self._is_direct_claim = False
        """Whether records were leased that the broker may still deliver."""
        self._changed: set[str] = set()
        """Messages of organizations that this transaction changed."""
        self._gone: set[str] = set()
        """Those of them that cannot be claimed."""
        self._taken: list[LaneDelivery] = []
        self._stale: set[int] = set()
        """The tags of deliveries to acknowledge whatever becomes of their records."""
        self._seen: set[str] = set()
        """The messages of those deliveries. Another delivery of such a message is a double."""
        self._held: dict[tuple[str, int], list[Head]] = {}
        """Records of the deliveries that were taken, by home and lane."""
        self.outgoing: dict[str, Outgoing] = {}
        self.new_homes: dict[str, str] = {}

    # ---- the end of the transaction --------------------------------------------------------------

    def settled(self) -> list[LaneDelivery]:
        """After the commit: the deliveries to acknowledge. The others can be claimed again."""
        done: list[LaneDelivery] = []
        left: list[LaneDelivery] = []
        for each in self._taken:
            is_done = each.tag in self._stale or each.note.message_id in self._changed
            (done if is_done else left).append(each)
        self._deliveries.put_back(left)
        self._taken = []
        if self._is_direct_claim:
            done += self._deliveries.forget(self._gone)
        return done

    def undo(self) -> None:
        """After a rollback: the deliveries can be claimed again."""
        self._deliveries.put_back(self._taken)
        self._taken = []

    # ---- counters --------------------------------------------------------------------------------

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return self._inner.lanes.depth(queue)

    def queues(self, prefix: str = "") -> list[str]:
        return self._inner.lanes.queues(prefix)

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        return self._inner.lanes.depths()

    def count_active(self) -> int:
        return self._inner.lanes.count_active()

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        return self._inner.lanes.active_depths()

    def is_quiet(self, queue: str, most: int) -> bool:
        return self._inner.lanes.is_quiet(queue, most)

    def oldest(self, lane: int) -> Record | None:
        return self._inner.lanes.oldest(lane)

    def has_overdue(self) -> bool:
        return self._inner.lanes.has_overdue()

    def total(self) -> dict[Counted, int]:
        counts = self._inner.lanes.total()
        if not self._is_reading:
            for lane, what in enumerate(LANE_COUNTS):
                if not counts.get(what):  # the deliveries of the lane are doubles, and fill its prefetch
                    old = self._deliveries.take_old(time.monotonic() - STALE_S, lane)
                    self._taken += old
                    self._stale.update(each.tag for each in old)
        return counts

    # ---- publishing ----------------------------------------------------------------------------

    def note(self, record: Record) -> None:
        """A record was saved: publish it if it can be claimed now or after a delay."""
        if not org_of(record.queue):
            return
        message_id, state = record.message_id, record.state
        self._changed.add(message_id)
        if state == "QUEUED":
            self._gone.discard(message_id)
            self.send(record.queue, message_id, record.lane)
            return
        self._gone.add(message_id)
        self.outgoing.pop(message_id, None)
        if state in DELAYED and record.due - self._inner.steady_ns < PARKED_NS_MIN:
            self.send(record.queue, message_id, record.lane, max(1, record.due - self._inner.steady_ns))

    def send(self, queue: str, message_id: str, lane: int, delay_ns: int = 0) -> None:
        """Publish a message after the commit."""
        delay_ms = delay_step_ms(-(-delay_ns // NANOS_PER_MS)) if delay_ns else 0
        note = Note(message_id, lane, is_delayed=bool(delay_ms))
        self.outgoing[message_id] = Outgoing(self.home_of(queue), note, delay_ms)

    def home_of(self, queue: str) -> str:
        """The lanes of an organization. The first organizations get their own, the others share shards."""
        home = self._context.homes.get(queue) or self.new_homes.get(queue)
        if home is None:
            cells = self._inner.cells
            is_own = cells.get(HOMES, queue) is not None or self._takes_own_lanes(queue)
            home = self.new_homes[queue] = queue if is_own else shard_of(queue)
        return home

    def _has_lanes_left(self) -> bool:
        most = self._context.limits.own_lanes_max
        return len(self._inner.cells.page(HOMES, limit=most)) < most

    def _takes_own_lanes(self, queue: str) -> bool:
        """Give an organization lanes of its own, while there are some left."""
        cells = self._inner.cells
        if not self._has_lanes_left():  # there are never more again, so that no lock is needed
            return False
        self._inner.exclusive(HOMES)  # from here on, no other process takes the last ones
        if cells.get(HOMES, queue) is not None:
            return True
        if not self._has_lanes_left():
            return False
        cells.put(HOMES, queue, b"1")
        return True

    # ---- claiming ------------------------------------------------------------------------------

    @property
    def is_direct(self) -> bool:
        """Whether this transaction claims from the ledger itself."""
        if self._direct is None:
            self._direct = self._context.is_direct or self._deliveries.take_new_home()
        return self._direct

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        if self.is_direct or not org_of(queue):
            return self._inner.pull(queue, lane, limit)
        home = self.home_of(queue)
        if is_shard(home):  # a delivery stands for any record of the shard, so that the ledger can be fair
            tokens = self._deliveries.count(home, lane)
            return self._inner.pull(queue, lane, min(limit, tokens)) if tokens else []
        held = self._left(home, lane)
        while len(held) < limit and (taken := self._deliveries.take(home, lane, limit - len(held))):
            held += self._heads_of(taken)
        return held[:limit]

    def _left(self, home: str, lane: int) -> list[Head]:
        """Records of deliveries that this transaction took and did not change."""
        held = self._held.setdefault((home, lane), [])
        held[:] = [head for head in held if head.record.message_id not in self._gone]
        return held

    def _heads_of(self, taken: Sequence[LaneDelivery]) -> list[Head]:
        """The records that deliveries name, as far as they can be claimed."""
        self._taken += taken
        for delivery in taken:
            if delivery.note.envelope is not None:
                self._accept_from_broker(delivery.note.envelope)
        inner = self._inner
        stored = inner.records.heads([each.note.message_id for each in taken])
        opened, unreadable = inner.codec.open_heads(stored)
        inner.quarantine([one for one in unreadable if one[0].state == "QUEUED"])
        loaded = {head.record.message_id: head for head in opened}
        found = {each: head for each, head in loaded.items() if each not in self._seen}
        heads: list[Head] = []
        for delivery in taken:
            head = self._claimable(found.pop(delivery.note.message_id, None), delivery.note)
            if head is not None:
                self._seen.add(head.record.message_id)
                heads.append(head)
            elif delivery.note.envelope is None or delivery.note.message_id in loaded:
                self._stale.add(delivery.tag)
        return heads

    def _claimable(self, head: Head | None, note: Note) -> Head | None:
        if head is None or head.record.lane != note.lane:
            return None  # a second delivery, or one from before a retry in another lane
        record = head.record
        if record.state == "QUEUED":
            return head
        if record.state not in DELAYED:
            return None
        left_ns = record.due - self._inner.steady_ns
        if left_ns <= 0:
            [step] = self._inner.apply(ByIds((record.message_id,)), lifecycle.wake)
            self.note(step.record)
            return replace(head, record=step.record)
        if left_ns < PARKED_NS_MIN:
            self.send(record.queue, record.message_id, record.lane, left_ns)  # the next part of its delay
        return None

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        if self.is_direct:
            return self._inner.lanes.active(lane, after, limit)
        homes = {home for (home, each), held in self._held.items() if each == lane and held}
        homes.update(self._deliveries.homes(lane))
        is_after_own = not after or not is_shard(self.home_of(after))
        found: list[str] = []
        if is_after_own:  # organizations with lanes of their own come first in the fixed order
            found = sorted(home for home in homes if not is_shard(home) and home > after)[:limit]
        shards = {home for home in homes if is_shard(home)}
        if shards and len(found) < limit:
            found += self._active_in(shards, lane, "" if is_after_own else after, limit - len(found))
        return found

    def _active_in(self, shards: set[str], lane: int, after: str, limit: int) -> list[str]:
        """Organizations with messages in shards that have deliveries."""
        found: list[str] = []
        at, page = after, max(limit, self._context.limits.own_lanes_max)
        while len(found) < limit:
            queues = self._inner.lanes.active(lane, at, page)
            found += [queue for queue in queues if self.home_of(queue) in shards]
            if len(queues) < page:
                break
            at = queues[-1]
        if not after and len(found) < limit:
            self._drop_tokens(shards - {self.home_of(queue) for queue in found}, lane)
        return found[:limit]

    def _drop_tokens(self, shards: set[str], lane: int) -> None:
        """Acknowledge deliveries of shards that have no message left in a lane."""
        for shard in shards:
            self._use_tokens(shard, lane, self._deliveries.count(shard, lane))

    def _use_tokens(self, shard: str, lane: int, count: int) -> None:
        taken = self._deliveries.take(shard, lane, count)
        self._taken += taken
        self._stale.update(each.tag for each in taken)

    def take_pending(self, limit: int) -> None:
        """Take deliveries whose delay is over, or whose messages the ledger does not have yet."""
        if not self.is_direct:
            for delivery in self._deliveries.take_pending(limit):
                self._left(delivery.home, delivery.note.lane).extend(self._heads_of([delivery]))

    def note_leased(self, heads: Sequence[tuple[Head, int]]) -> None:
        """Records were leased: do not publish them, and use up deliveries of their shards."""
        for head, _ in heads:
            record = head.record
            self._changed.add(record.message_id)
            self._gone.add(record.message_id)
            home = self.home_of(record.queue)
            self._is_direct_claim = self.is_direct
            if self.outgoing.pop(record.message_id, None) is None and is_shard(home) and not self.is_direct:
                self._use_tokens(home, record.lane, 1)

    def _accept_from_broker(self, envelope: Envelope) -> None:
        """Store a message that only the broker has. Its id makes a second delivery a duplicate."""
        with suppress(QueueFull):  # then the ledger does not have it, and a later claim tries again
            [accepted] = self._inner.insert([envelope])
            if not accepted.duplicate:
                self._changed.add(accepted.message_id)
                self.send(envelope.queue, accepted.message_id, envelope.priority)


class RabbitRecords(Records):
    """The records of the ledger. What is saved is published after the commit."""

    def __init__(self, inner: Records, lanes: RabbitLanes) -> None:
        self._inner = inner
        self._lanes = lanes

    def find(self, pick: Pick) -> list[Record]:
        return self._inner.find(pick)

    def get_many(self, message_ids: Sequence[str]) -> dict[str, Record]:
        return self._inner.get_many(message_ids)

    def load(self, message_id: str) -> Stored | None:
        return self._inner.load(message_id)

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        return self._inner.payloads(message_ids)

    def results(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        return self._inner.results(message_ids)

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        return self._inner.heads(message_ids)

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self._inner.save(changes, events)
        for change in changes:
            self._lanes.note(change.step.record)

    def forget(self, records: Sequence[Record]) -> None:
        self._inner.forget(records)


class RabbitTransaction(Transaction):
    """One transaction of the ledger."""

    lanes: RabbitLanes

    def __init__(self, inner: Transaction, context: TransactionContext, *, is_reading: bool = False) -> None:
        self._inner = inner
        self._context = context
        lanes = RabbitLanes(inner, context, is_reading=is_reading)
        parts = Parts(RabbitRecords(inner.records, lanes), inner.events, inner.cells, lanes)
        super().__init__(inner.ids, inner.limits_known, inner.steady_ns, inner.wall_us, parts)

    @property
    def changes(self) -> int:
        return self._inner.changes

    def prepare(self) -> None:
        """Before the commit: pass on what the ledger has to know."""
        inner = self._inner
        inner.synced = self.synced = inner.synced or self.synced
        inner.ended = self.ended = inner.ended or self.ended
        inner.notable = self.notable = [*inner.notable, *self.notable]
        # Deliveries wake the workers of organizations, unless the broker has trouble.
        is_woken = bool(self._context.broker_trouble)
        self.ready = {queue for queue in self.ready | inner.ready if is_woken or not org_of(queue)}

    # ---- what the ledger does itself -------------------------------------------------------------

    def exclusive(self, name: str) -> None:
        self._inner.exclusive(name)

    def look_ahead(
        self, cells: Sequence[tuple[str, int]] = (), *, lanes: bool = False, heads: bool = True
    ) -> None:
        heads = heads and lanes and self.lanes.is_direct
        self._inner.look_ahead(cells, lanes=lanes, heads=heads)

    def look_ahead_pulls(self, pulls: Sequence[tuple[str, int, int]]) -> None:
        if self.lanes.is_direct:
            self._inner.look_ahead_pulls(pulls)

    def limits(self, queue: str) -> Limits:
        return self._inner.limits(queue)

    def set_limits(self, queue: str, limits: Limits) -> None:
        self._inner.set_limits(queue, limits)

    def complete(
        self,
        results: Mapping[str, tuple[int, bytes]],
        details: Mapping[str, dict[str, Any]] = NO_DETAILS,
        started: Mapping[str, int] = NO_STARTS,
    ) -> Sequence[str]:
        return self._inner.complete(results, details, started)

    # ---- verbs with deliveries -------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        if not self._context.capabilities.keeps_all and all(
            _needs_no_ledger(envelope) for envelope in envelopes
        ):
            return [self._publish_only(envelope) for envelope in envelopes]
        accepted = self._inner.insert(envelopes)
        for envelope, one in zip(envelopes, accepted, strict=True):
            if not one.duplicate and org_of(envelope.queue):
                self.lanes.send(envelope.queue, one.message_id, envelope.priority, envelope.delay_ns)
        return accepted

    def _publish_only(self, envelope: Envelope) -> Accepted:
        """Accept a message without the ledger: only the broker stores it."""
        if self._context.broker_trouble:
            raise Unavailable(
                f"{self._context.broker_trouble}, and with p0=broker-only only the broker stores P0 messages"
            )
        message_id = str(uuid4())
        note = Note(message_id, envelope.priority, envelope=replace(envelope, message_id=message_id))
        self.lanes.outgoing[message_id] = Outgoing(self.lanes.home_of(envelope.queue), note)
        return Accepted(message_id, duplicate=False)

    def lease(self, heads: Sequence[tuple[Head, int]], worker_id: str, lease_ns: int) -> list[Record]:
        leased = self._inner.lease(heads, worker_id, lease_ns)
        self.lanes.note_leased(heads)
        return leased

    def put_back(self, limit: int) -> int:
        self.lanes.take_pending(limit)
        return super().put_back(limit)

    def delays_over(self, limit: int) -> Pick:
        records = self.records.find(Ending("delay", self.steady_ns, limit))
        over = [one.message_id for one in records if one.due + self._late_ns(one) <= self.steady_ns]
        return ByIds(tuple(over))

    def _late_ns(self, record: Record) -> int:
        """How long the ledger waits for the delivery of a record whose delay is over."""
        is_due_from_broker = org_of(record.queue) and not self._context.is_direct
        return self._context.limits.late_ns if is_due_from_broker else 0

    def next_deadline_ns(self) -> int | None:
        ends = [
            record.due + self._late_ns(record) for record in self.records.find(Ending("delay", FOREVER_NS, 1))
        ]
        ends += [record.lease_until for record in self.records.find(Ending("lease", FOREVER_NS, 1))]
        return max(0, min(ends) - self.steady_ns) if ends else None


def own_homes(transaction: Transaction) -> set[str]:
    """Every organization with lanes of its own."""
    homes: list[str] = []
    while page := transaction.cells.page(HOMES, homes[-1] if homes else "", HOMES_A_PAGE):
        homes += (queue for queue, _ in page)
    return {*homes}


def _needs_no_ledger(envelope: Envelope) -> bool:
    """Whether a message may exist in the broker alone: P0 without a key, an order or a delay."""
    return (
        envelope.priority == 0
        and bool(org_of(envelope.queue))
        and not (envelope.message_id or envelope.key or envelope.delay_ns)
        and not any(word in envelope.payload for word in NEEDS_LEDGER)
    )
