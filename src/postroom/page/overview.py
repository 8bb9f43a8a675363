"""The overview of a server: one snapshot that every open page and `postroom top` show.

Rule 1: a snapshot is read in one transaction, from counters and cells. No records are counted.
Rule 2: a caller of one organization gets a snapshot without the others: `seen_by`.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.core.agents import Health
from postroom.core.health.health import NO_PARTS, HealthFacts, Verdict
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.inspection import BreakerStatus, EngineStatus, status_of
from postroom.engine.rules.cells import AGENTS, SEPARATOR
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.engine.token_status import TokenStatus
from postroom.engine.token_status import status_of as token_status_of
from postroom.goals import decisions
from postroom.page.activity import Activity, PriorityWait, Second, Throughput
from postroom.page.redaction import Hide

AGENTS_SHOWN_MAX: Final = 200
WORKERS_SHOWN_MAX: Final = 200
_WORST_FIRST: Final[tuple[Health, ...]] = ("dead", "suspect", "registered", "alive", "asleep")


class OrganizationRow(msgspec.Struct, frozen=True):
    """One organization."""

    org_id: str
    lanes: list[int]
    """QUEUED messages of P0 to P3."""
    depth: int
    delayed: int
    """SCHEDULED and RETRYING messages: they wait for a time, or for a breaker."""
    stage: int
    paused: bool
    states: dict[str, int]
    rates: Throughput
    decisions: int
    """Decisions that wait for a person."""


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker process."""

    worker_id: str
    slots: int
    in_flight: int
    claims: int
    """Claims in the last 30 s."""
    silent_s: float


class AgentHealth(msgspec.Struct, frozen=True):
    """An agent and its health."""

    org_id: str
    agent_id: str
    health: Health
    silent_s: float


class OverviewFacts(msgspec.Struct, frozen=True):
    """What one read of a store gives."""

    status: EngineStatus
    tokens: TokenStatus
    agents: list[AgentHealth]
    """The worst first, and at most `AGENTS_SHOWN_MAX`."""
    health: dict[str, dict[str, int]]
    """Agents by organization and health."""
    decisions: dict[str, int]
    """Decisions that wait for a person, by organization."""
    newest_event: int
    now_us: int
    now_ns: int


class Snapshot(msgspec.Struct, frozen=True):
    """The overview at one moment."""

    at: datetime
    organizations: list[OrganizationRow]
    depth: int
    delayed: int
    stage: int
    rates: Throughput
    history: list[Second]
    waits: list[PriorityWait]
    workers: list[WorkerRow]
    wanted_workers: int
    agents: list[AgentHealth]
    health: dict[str, int]
    """How many agents there are of each health."""
    breakers: dict[str, BreakerStatus]
    pauses: list[dict[str, str]]
    tokens: TokenStatus
    needs: dict[str, int]
    """What waits for a person: decisions, dead_letters and quarantined."""
    verdict: Verdict
    """Whether messages flow, and whether all parts of the server work."""
    org_id: str | None = None
    """The organization that the snapshot is about; None for all of them."""


def read_facts(operations: Operations, policy: Policy) -> OverviewFacts:
    """Read what a snapshot shows."""
    transaction = operations.transaction
    agents = AgentOperations(transaction, policy)
    found: list[AgentHealth] = []
    counts: dict[str, Counter[str]] = {}
    for key, entry in AGENTS.scan(transaction):
        org_id, _, agent_id = key.partition(SEPARATOR)
        seen = agents.seen(entry)
        found.append(AgentHealth(org_id, agent_id, seen.health, round(seen.silent_s, 1)))
        counts.setdefault(org_id, Counter())[seen.health] += 1
    found.sort(key=lambda one: (_WORST_FIRST.index(one.health), one.org_id, one.agent_id))
    waiting = Counter(one.org_id for one in decisions.waiting(transaction) if one.state == "waiting")
    return OverviewFacts(
        status=status_of(operations, policy),
        tokens=token_status_of(transaction, policy.token_rules),
        agents=found[:AGENTS_SHOWN_MAX],
        health={org_id: dict(of_org) for org_id, of_org in counts.items()},
        decisions=dict(waiting),
        newest_event=transaction.events.newest(),
        now_us=transaction.wall_us,
        now_ns=transaction.steady_ns,
    )


def snapshot(facts: OverviewFacts, activity: Activity, parts: HealthFacts = NO_PARTS) -> Snapshot:
    """The overview of all organizations. `parts` is what the server knows of its parts."""
    status, now_us = facts.status, facts.now_us
    organizations = [
        OrganizationRow(
            org_id,
            found.lanes,
            found.depth,
            found.delayed,
            found.stage,
            found.paused,
            found.states,
            activity.rates(now_us, org_id),
            facts.decisions.get(org_id, 0),
        )
        for org_id, found in sorted(status.organizations.items())
    ]
    workers = [
        WorkerRow(
            name, one.slots, one.in_flight, one.claims, round((facts.now_ns - one.seen_ns) / NANOS_PER_S, 1)
        )
        for name, one in sorted(status.workers.items())
    ]
    return Snapshot(
        at=EPOCH + now_us * MICROSECOND,
        organizations=organizations,
        depth=status.depth,
        delayed=sum(one.delayed for one in organizations),
        stage=status.stage,
        rates=activity.rates(now_us),
        history=activity.history(now_us),
        waits=activity.waits(),
        workers=workers[:WORKERS_SHOWN_MAX],
        wanted_workers=status.wanted_workers,
        agents=facts.agents,
        health=dict(sum(map(Counter, facts.health.values()), Counter[str]())),
        breakers=status.breakers,
        pauses=status.pauses,
        tokens=facts.tokens,
        needs=_needs(organizations),
        verdict=status.judged(parts).verdict,
    )


def _needs(organizations: list[OrganizationRow]) -> dict[str, int]:
    return {
        "decisions": sum(one.decisions for one in organizations),
        "dead_letters": sum(one.states.get("DEAD_LETTER", 0) for one in organizations),
        "quarantined": sum(one.states.get("QUARANTINED", 0) for one in organizations),
    }


def with_names_hidden(whole: Snapshot, hide: Hide) -> Snapshot:
    """The overview without secrets in names that workers and senders choose."""
    return replace(
        whole,
        workers=[replace(one, worker_id=hide(one.worker_id)) for one in whole.workers],
        breakers={hide(service): one for service, one in whole.breakers.items()},
        pauses=[{**pause, "type": hide(pause["type"])} for pause in whole.pauses],
        verdict=replace(
            whole.verdict, reasons=[replace(one, what=hide(one.what)) for one in whole.verdict.reasons]
        ),
    )


def seen_by(whole: Snapshot, facts: OverviewFacts, activity: Activity, org_id: str) -> Snapshot:
    """The overview as callers of one organization see it: without the others, and without workers."""
    own = [one for one in whole.organizations if one.org_id == org_id]
    breakers = breakers_of(whole.breakers, org_id)
    status = replace(facts.status, breakers=breakers).of_organization(org_id)
    return replace(
        whole,
        org_id=org_id,
        organizations=own,
        depth=status.depth,
        delayed=sum(one.delayed for one in own),
        stage=status.stage,
        rates=activity.rates(facts.now_us, org_id),
        history=activity.history(facts.now_us, org_id),
        waits=activity.waits(org_id),
        workers=[],
        wanted_workers=0,
        agents=[one for one in facts.agents if one.org_id == org_id],
        health=facts.health.get(org_id, {}),
        breakers=breakers,
        pauses=[pause for pause in whole.pauses if pause["org_id"] in ("", org_id)],
        tokens=whole.tokens.of_organization(org_id),
        needs=_needs(own),
        verdict=status.verdict,
    )


def breakers_of(breakers: Mapping[str, BreakerStatus], org_id: str) -> dict[str, BreakerStatus]:
    """The breakers that hold for an organization, without the names of others."""
    found: dict[str, BreakerStatus] = {}
    for service, one in breakers.items():
        if org_id in one.organizations:
            found[service] = replace(one, organizations=[org_id])
        elif one.is_declared:
            is_held = one.state != "closed" and not one.organizations
            found[service] = one if is_held else BreakerStatus("closed")
    return found
