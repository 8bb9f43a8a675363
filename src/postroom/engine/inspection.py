"""The status of one message, and of the engine with all its organizations."""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.calls.submit import AttemptError
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.core.health.health import NO_PARTS, HealthFacts, Verdict, judge
from postroom.core.lifecycle import backpressure, breaker, lifecycle, poison
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.dlq import original_message
from postroom.engine.messages import error_history
from postroom.engine.rules.admission import ALL
from postroom.engine.rules.cells import CIRCUITS, PAUSES, PRESSURES, SEPARATOR, Pressure, WorkerInfo
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.message import ENGINE_PREFIX, Event, org_of
from postroom.stores.base import LANE_COUNTS, LANES, Counted, by_state, ready
from postroom.stores.transaction import Transaction


class MessageInfo(msgspec.Struct, frozen=True):
    """Everything about a message."""

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
    message: dict[str, Any]
    """Its fields as submitted; empty when its bytes cannot be decoded."""
    result: Any
    worker_id: str
    created_at: datetime
    ended_at: datetime | None

    @property
    def ended(self) -> bool:
        """Whether the message is delivered no more."""
        return self.state in lifecycle.ENDED


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


def info_of(operations: Operations, message_id: str, read_value: ReadValue = decoded_value) -> MessageInfo:
    """Everything about a message. `read_value` reads its payload and its result. Raises `UnknownTask`."""
    stored = operations.loaded(message_id)
    record = stored.record
    return MessageInfo(
        message_id=record.message_id,
        state=record.state,
        priority=record.lane,
        accepted_priority=record.priority,
        attempt=record.attempt,
        retry_count=record.retries,
        crashes=poison.own_deaths(record),
        errors=error_history(stored),
        history=stored.history,
        message=original_message(operations, stored, read_value) or {},
        result=None if stored.result is None else read_value(stored.result),
        worker_id=record.worker_id,
        created_at=EPOCH + record.created_us * MICROSECOND,
        ended_at=EPOCH + record.ended_us * MICROSECOND if record.ended_us else None,
    )


# ---- status ----------------------------------------------------------------------------------------


def status_of(
    operations: Operations, policy: Policy, org_id: str | None = None, *, with_idle: bool = True
) -> EngineStatus:
    """The status of the engine. With `org_id`, only this organization is looked at, and its breakers.

    Without `with_idle`, organizations of which nothing waits are left out, and cost nothing.
    """
    transaction = operations.transaction
    pauses = [tuple(key.split(SEPARATOR)) for key, _ in PAUSES.all(transaction)]
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
