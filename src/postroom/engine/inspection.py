"""The status of one message, lists of messages, and the engine with all its organizations.

Rule 1: a list reads a bounded number of records, however many are stored. One that has not reached the end
        returns a cursor.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from postroom.calls.messages import FindMessages, MessageLine, MessageList
from postroom.calls.submit import AttemptError
from postroom.core.formats.jsoninput import ReadValue, decoded_value, raw_value
from postroom.core.health.health import NO_PARTS, HealthFacts, Verdict, judge
from postroom.core.lifecycle import backpressure, breaker, lifecycle, poison
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.dlq import moment_us, original_message
from postroom.engine.messages import Message, body_of, error_history
from postroom.engine.rules import holds
from postroom.engine.rules.admission import ALL
from postroom.engine.rules.cells import CIRCUITS, PRESSURES, SEPARATOR, Pressure, WorkerInfo
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.engine.work.migrations import as_handled
from postroom.errors import InvalidMessage, clipped
from postroom.message import ENGINE_PREFIX, Event, Record, State, Stored, org_of
from postroom.stores.base import LANE_COUNTS, LANES, Counted, Listing, by_state, ready
from postroom.stores.transaction import Transaction

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

SEARCHED_BYTES_MAX: Final = 8 * 1024 * 1024  # of messages that one list reads, and one more message


class WalkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How far one list walks back. Users do not set it."""

    looked_max: int = 500  # messages that one list decodes
    numbers_a_read: int = 100_000  # that one look at the records walks back; records have every fourth
    reads_max: int = 10


WALK: Final = WalkLimits()


M = TypeVar("M")


class MessageFacts(msgspec.Struct, Generic[M], frozen=True):
    """Everything about a message, in the form `M` of the message itself."""

    message_id: str
    state: str
    priority: int
    """The lane it waits in, or waited in last."""
    accepted_priority: int
    attempt: int
    retry_count: int
    crashes: int
    """How often a process died that ran only this message."""
    errors: list[AttemptError]
    history: list[Event]
    message: M
    result: Any
    worker_id: str
    created_at: datetime
    ended_at: datetime | None

    @property
    def ended(self) -> bool:
        """Whether the message is delivered no more."""
        return self.state in lifecycle.ENDED


class MessageInfo(MessageFacts[Message | None], frozen=True):
    """Everything about a message. `message` is what its handler gets; None when its bytes are damaged."""


class StoredMessage(MessageFacts[dict[str, Any]], frozen=True):
    """Everything about a message. `message` has its fields as submitted; empty when its bytes are damaged."""


class BreakerStatus(msgspec.Struct, frozen=True):
    """The breakers of one service."""

    state: breaker.BreakerState
    """That of the breaker that stays open longest."""
    opens_again_s: float = 0.0
    """How long an open breaker stays open."""
    organizations: list[str] = []
    """The organizations whose own breaker is not closed. Empty when the breaker of all of them is open."""
    is_declared: bool = True
    """Whether a handler declares the service; else only messages name it."""

    @property
    def holds_all(self) -> bool:
        """Whether no organization can call the service."""
        return self.state != "closed" and not self.organizations


class OrganizationStatus(msgspec.Struct, frozen=True):
    """The status of one organization."""

    lanes: list[int]
    """QUEUED messages in each lane, P0 to P3."""
    depth: int
    """All QUEUED messages."""
    stage: int
    states: dict[str, int]
    paused: bool

    @property
    def delayed(self) -> int:
        """SCHEDULED and RETRYING messages: they wait for a time, or for a breaker."""
        return self.states.get("SCHEDULED", 0) + self.states.get("RETRYING", 0)


class EngineStatus(msgspec.Struct, frozen=True):
    """The status of the engine."""

    organizations: dict[str, OrganizationStatus]
    depth: int
    stage: int
    """The stage of backpressure of all organizations together, or the highest of one of them."""
    workers: dict[str, WorkerInfo]
    wanted_workers: int
    breakers: dict[str, BreakerStatus]
    pauses: list[dict[str, str]]
    oldest_s: float = 0.0
    """How long the oldest QUEUED message has waited."""
    verdict: Verdict = Verdict()
    """Whether messages flow."""

    def health_facts(self) -> HealthFacts:
        """What the verdict depends on."""
        return HealthFacts(
            waiting=self.depth,
            oldest_s=self.oldest_s,
            stage=self.stage,
            workers=len(self.workers),
            is_paused={"org_id": ALL, "type": ALL} in self.pauses,
            breakers=[name for name, one in self.breakers.items() if one.holds_all],
        )

    def judged(self, parts: HealthFacts = NO_PARTS) -> "EngineStatus":
        """This status with its verdict. `parts` is what is known of the parts of a server."""
        facts = replace(self.health_facts(), broken=parts.broken, slowed=parts.slowed)
        return replace(self, verdict=judge(facts))

    def of_organization(self, org_id: str) -> "EngineStatus":
        """As an organization sees it: without the others, and without workers."""
        own = {name: each for name, each in self.organizations.items() if name == org_id}
        seen = replace(
            self,
            organizations=own,
            depth=sum(each.depth for each in own.values()),
            stage=max((each.stage for each in own.values()), default=0),
            pauses=[pause for pause in self.pauses if pause["org_id"] in (ALL, org_id)],
            oldest_s=0.0,
        )
        return replace(seen.judged(), workers={}, wanted_workers=0)


def info_of(core: "EngineCore", operations: Operations, message_id: str) -> MessageInfo:
    """Everything about a message, and the message as its handler gets it. Raises `UnknownTask`."""
    stored = operations.loaded(message_id)
    return MessageInfo(message=as_handled(core, operations, stored), **_facts(stored, decoded_value))


def stored_message(operations: Operations, message_id: str) -> StoredMessage:
    """Everything about a message. Payload and result are passed on as they are. Raises `UnknownTask`."""
    stored = operations.loaded(message_id)
    message = original_message(operations, stored, raw_value) or {}
    return StoredMessage(message=message, **_facts(stored, raw_value))


def _facts(stored: Stored, read_value: ReadValue) -> dict[str, Any]:
    """All but the message itself."""
    record = stored.record
    return {
        "message_id": record.message_id,
        "state": record.state,
        "priority": record.lane,
        "accepted_priority": record.priority,
        "attempt": record.attempt,
        "retry_count": record.retries,
        "crashes": poison.own_deaths(record),
        "errors": error_history(stored),
        "history": stored.history,
        "result": None if stored.result is None else read_value(stored.result),
        "worker_id": record.worker_id,
        "created_at": accepted_at(record),
        "ended_at": EPOCH + record.ended_us * MICROSECOND if record.ended_us else None,
    }


# ---- status ----------------------------------------------------------------------------------------


def status_of(
    operations: Operations, policy: Policy, org_id: str | None = None, *, with_idle: bool = True
) -> EngineStatus:
    """The status of the engine. With `org_id`, only this organization is looked at, and its breakers.

    Without `with_idle`, organizations of which nothing waits are left out, and cost nothing.
    """
    transaction = operations.transaction
    pauses = holds.paused(transaction)
    paused = {org_id for org_id, type_name in pauses if not type_name}
    if org_id is None:
        counted = transaction.lanes.depths() if with_idle else transaction.lanes.active_depths()
        pressures = dict(PRESSURES.all(transaction))
    else:
        queue = ENGINE_PREFIX + org_id
        own = transaction.lanes.depth(queue)
        counted = {queue: own} if own else {}
        pressures = {name: found for name in (ALL, org_id) if (found := PRESSURES.get(transaction, name))}
    organizations = {
        org_of(queue): _organization(
            counts, pressures.get(org_of(queue)), policy, is_paused=ALL in paused or org_of(queue) in paused
        )
        for queue, counts in counted.items()
        if org_of(queue)
    }
    depth = ready(transaction.lanes.total())
    stage = max([_stage(depth, pressures.get(ALL), policy), *(each.stage for each in organizations.values())])
    workers = operations.workers()
    status = EngineStatus(
        organizations=organizations,
        depth=depth,
        stage=stage,
        workers=workers,
        wanted_workers=backpressure.wanted_workers(
            len(workers), stage, promoted_share(workers, depth), 0.0, math.inf, policy.backpressure
        ),
        breakers=_breakers(transaction, org_id),
        pauses=[{"org_id": org_id, "type": type_name} for org_id, type_name in pauses],
        oldest_s=_oldest_s(transaction) if depth else 0.0,
    )
    return status.judged()


def _oldest_s(transaction: Transaction) -> float:
    """How long the oldest QUEUED message has waited."""
    oldest = [
        record.ready_at for lane in range(LANES) if (record := transaction.lanes.oldest(lane)) is not None
    ]
    return max(0, transaction.steady_ns - min(oldest, default=transaction.steady_ns)) / NANOS_PER_S


def _organization(
    counts: Mapping[Counted, int], pressure: Pressure | None, policy: Policy, *, is_paused: bool
) -> OrganizationStatus:
    depth = ready(counts)
    return OrganizationStatus(
        lanes=[counts.get(lane, 0) for lane in LANE_COUNTS] if depth else [0] * LANES,
        depth=depth,
        stage=_stage(depth, pressure, policy) if depth else 0,
        states={str(state): n for state, n in by_state(counts).items() if state != "LAPSES"},
        paused=is_paused,
    )


def _stage(depth: int, pressure: Pressure | None, policy: Policy) -> int:
    return backpressure.stage_of(depth, policy.backpressure, pressure.stage if pressure else 0)


def promoted_share(workers: Mapping[str, WorkerInfo], depth: int) -> float:
    """The share of promoted messages among the claims of the last 30 s; 0 when no message waits."""
    if not depth:
        return 0.0  # those were promoted before the workers came, and more workers have nothing to do
    claims = sum(info.claims for info in workers.values())
    return sum(info.promoted for info in workers.values()) / claims if claims else 0.0


def _breakers(transaction: Transaction, visible: str | None) -> dict[str, BreakerStatus]:
    """The breakers by service, of all organizations or of one."""
    of_service: dict[str, dict[str, breaker.Circuit]] = {}
    for key, circuit in CIRCUITS.all(transaction):
        org_id, _, service = key.partition(SEPARATOR)
        if visible is None or org_id in (ALL, visible):
            of_service.setdefault(service, {})[org_id] = circuit
    return {service: _breaker(circuits, transaction.steady_ns) for service, circuits in of_service.items()}


def _breaker(circuits: Mapping[str, breaker.Circuit], now_ns: int) -> BreakerStatus:
    longest = max(circuits.values(), key=lambda one: (one.state != "closed", one.open_until))
    held = {org_id for org_id, one in circuits.items() if one.state != "closed"}
    return BreakerStatus(
        _shown(longest, now_ns),
        max(0, longest.open_until - now_ns) / NANOS_PER_S,
        [] if ALL in held else sorted(held),
        is_declared=ALL in circuits,
    )


def _shown(circuit: breaker.Circuit, now_ns: int) -> breaker.BreakerState:
    """An open breaker whose cooldown is over lets a probe through."""
    return "half_open" if circuit.state == "open" and now_ns >= circuit.open_until else circuit.state


# ---- lists -----------------------------------------------------------------------------------------


def checked_query(fields: Mapping[str, Any]) -> FindMessages:
    """The keywords of `Engine.list`, checked."""
    given = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in fields.items()
        if value is not None
    }
    try:
        return msgspec.convert(given, FindMessages)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"a filter of messages does not fit: {clipped(error)}") from None


def list_messages(
    operations: Operations,
    query: FindMessages,
    org_id: str | None,
    before: int,
    message_id: str,
    limits: WalkLimits = WALK,
) -> MessageList:
    """The newest messages that fit a query, below the number `before` unless it is 0.

    `message_id` is the id in the store that the text of the query may mean.
    """
    search = _Search(operations, query, org_id)
    page = limits.looked_max if search.has_filters else query.limit
    known = None if before else search.by_id(message_id)
    if known is not None:
        return MessageList([known])
    found: list[MessageLine] = []
    last: Record | None = None
    newest = newest_first(operations.transaction, search.queue, search.state, before, page, limits)
    for looked, record in enumerate((one for one in newest if isinstance(one, int) or org_of(one.queue)), 1):
        if isinstance(record, int):  # the numbers that one call may walk are used up
            return MessageList(found, str(record), None if last is None else accepted_at(last))
        if record.created_us < search.since_us:
            break
        last = record
        line = search.line(record.message_id)
        found += [] if line is None else [line]
        if len(found) == query.limit or looked == limits.looked_max or search.size >= SEARCHED_BYTES_MAX:
            return MessageList(found, str(record.seq), accepted_at(record))
    return MessageList(found)


class _Search:
    """Compares messages with a query, and counts the bytes that it reads for that."""

    def __init__(self, operations: Operations, query: FindMessages, org_id: str | None) -> None:
        self._operations = operations
        self._query = query
        self._text = query.text.strip().casefold()
        self.queue = None if org_id is None else ENGINE_PREFIX + org_id
        self.state = None if query.state is UNSET else query.state
        self.since_us = 0 if query.since is UNSET else moment_us(query.since)
        self.has_filters = bool(self._text or query.type or query.goal_id or query.agent_id)
        self.size = 0

    def by_id(self, message_id: str) -> MessageLine | None:
        """The message of an id, if it fits everything but the text."""
        is_id = message_id.isascii() and message_id.isprintable()
        record = self._operations.transaction.records.get(message_id) if is_id else None
        if (
            record is None
            or not org_of(record.queue)
            or self.queue not in (None, record.queue)
            or self.state not in (None, record.state)
            or record.created_us < self.since_us
        ):
            return None
        line = _line(self._operations.loaded(message_id))
        return line if self._has_fields(line) else None

    def line(self, message_id: str) -> MessageLine | None:
        """A message of the list, if it fits."""
        stored = self._operations.loaded(message_id)
        line = _line(stored)
        if not self._has_fields(line):
            return None
        if any(self._text in name.casefold() for name in (line.message_id, line.error_type)):
            return line  # without reading the message
        message = original_message(self._operations, stored, raw_value) or {}
        content = msgspec.json.encode(message)  # its payload is not decoded
        self.size += len(content)
        return line if self._text in content.decode().casefold() else None

    def _has_fields(self, line: MessageLine) -> bool:
        query = self._query
        return (
            query.type in ("", line.type)
            and query.goal_id in ("", line.goal_id)
            and query.agent_id in ("", line.agent_id)
        )


def newest_first(
    transaction: Transaction,
    queue: str | None,
    state: State | None,
    before: int,
    page: int,
    limits: WalkLimits = WALK,
) -> Iterator[Record | int]:
    """Records below the number `before`, the newest first. Ends with the number to go on from, if any.

    `before` 0 begins with the newest. `page` is how many records one read of the store gives.
    """
    end = transaction.events.newest() + 1
    before = min(before or end, end)
    counts = by_state(transaction.lanes.total() if queue is None else transaction.lanes.depth(queue))
    if not any(n for what, n in counts.items() if what != "LAPSES" and state in (None, what)):
        return  # by the counters: no record is looked at
    for _ in range(limits.reads_max):
        lowest = max(0, before - limits.numbers_a_read)
        while found := transaction.records.find(Listing(queue, state, lowest - 1, page, before)):
            yield from found
            before = found[-1].seq
            if len(found) < page:
                break
        if not lowest:
            return
        before = lowest
    yield before


def _line(stored: Stored) -> MessageLine:
    record, body = stored.record, body_of(stored.envelope.payload)
    errors = [event.error_type for event in stored.history if event.error_type]
    return MessageLine(
        message_id=record.message_id,
        org_id=org_of(record.queue),
        state=record.state,
        type=stored.envelope.type,
        goal_id="" if body is None else body.goal_id,
        agent_id="" if body is None else body.agent_id,
        priority=record.lane,
        attempt=record.attempt,
        created_at=accepted_at(record),
        error_type=errors[-1] if errors else "",
    )


def accepted_at(record: Record) -> datetime:
    """When a message was accepted."""
    return EPOCH + record.created_us * MICROSECOND
