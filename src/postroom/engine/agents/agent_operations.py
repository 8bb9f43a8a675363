"""Operations on registered agents and their requests inside one transaction.

Rule 1: an operation raises before it writes, so several of them can share a commit.
Rule 2: a registration is fenced. Each call for an agent names the session of its registration, and only the
        newest session counts.
Rule 3: a request is open until its agent has the last part, or until the answer bounces.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import OPEN_REQUESTS_MAX
from postroom.core import agents
from postroom.core.agents import Health
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import is_name
from postroom.core.times import EPOCH, MICROSECOND, utc_text
from postroom.engine.agents.answer_parts import PART_CELLS_A_READ_MAX, Position, read_on
from postroom.engine.message_input import Prepared
from postroom.engine.rules.cells import (
    AGENT_COUNTS,
    AGENTS,
    COORDINATORS,
    EPOCHS,
    LETTERS,
    REQUESTS,
    SEPARATOR,
    AgentEntry,
    CoordinatorInfo,
    OpenRequest,
    Part,
)
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.errors import AgentReplaced, InvalidMessage, TooMany, UnknownTask
from postroom.message import ENGINE_PREFIX
from postroom.stores.transaction import Transaction

WAITS_SHOWN_MAX: Final = 100
AGENTS_LISTED_MAX: Final = 10_000  # of one organization
RETRY_AFTER_S: Final = 10.0


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent as operators and its organization see it."""

    org_id: str
    agent_id: str
    health: Health
    coordinator: str
    epoch: int
    """The epoch of its coordinator; 0 when there is no such coordinator any more."""
    registered_at: datetime
    silent_s: float
    """Seconds since its last sign of life."""
    waits_for: list[str]
    """The ids of its requests that are not answered, or whose answer it has not fetched."""
    waited_for_by: list[str]
    """The ids of messages in its inbox that it has not acted on."""


class Seen(msgspec.Struct, frozen=True):
    """When an agent was last heard of."""

    health: Health
    silent_s: float
    """How long it was not heard of."""


class Asked(msgspec.Struct, frozen=True):
    """A request of an agent, and how far its reader has come."""

    org_id: str
    agent_id: str
    session: int
    message_id: str
    position: Position


class NewParts(msgspec.Struct, frozen=True):
    """The new parts of the answer to one request."""

    parts: list[tuple[Position, Part]] = []
    is_complete: bool = False
    is_replaced: bool = False
    """Whether another registration of the agent is newer."""
    is_closed: bool = False
    """Whether the request was closed before: the answer was acknowledged, or has bounced."""

    @property
    def has_more(self) -> bool:
        """Whether the next read may return more parts without waiting."""
        return not self.is_complete and len(self.parts) >= PART_CELLS_A_READ_MAX


class AgentOperations:
    """Registered agents, their health and their requests in one transaction.

    `inboxes` has the messages between them, `leases` their coordinators and programs.
    """

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self.transaction = transaction
        self.policy = policy
        self.rules = policy.agents

    def next_number(self) -> int:
        """A number that is larger than every earlier one: an epoch, a session, or the key of a letter.

        It follows the clock, because a counter would show how many agents and letters others have.
        """
        number = max((EPOCHS.get(self.transaction, "") or 0) + 1, self.transaction.wall_us)
        EPOCHS.put(self.transaction, number, "")
        return number

    # ---- registration --------------------------------------------------------------------------

    def register(self, org_id: str, agent_id: str, coordinator: str, *, is_local: bool = True) -> AgentEntry:
        """Register an agent. An earlier registration of the same id is fenced from now on."""
        check_names(org_id, agent_id)
        known = AGENTS.get(self.transaction, org_id, agent_id)
        if known is None or known.health == "dead":
            self.count(org_id, 1)
        entry = AgentEntry(
            session=self.next_number(),
            coordinator=coordinator,
            registered_us=self.transaction.wall_us,
            registered_ns=self.transaction.steady_ns,
            is_local=is_local,
        )
        self.set_health(org_id, agent_id, None, entry)
        return entry

    def put_to_sleep(self, org_id: str, agent_id: str) -> None:
        """Register an agent that no program runs. Its next registration wakes it."""
        known = AGENTS.get(self.transaction, org_id, agent_id)
        if known is not None and self.health(known) != "dead":
            return
        if known is None or known.health == "dead":
            self.count(org_id, 1)
        entry = AgentEntry(
            session=self.next_number(),
            coordinator="",
            registered_us=self.transaction.wall_us,
            registered_ns=self.transaction.steady_ns,
            is_local=False,
            health="asleep",
        )
        self.set_health(org_id, agent_id, None, entry)

    def count(self, org_id: str, change: int) -> None:
        """Change the number of agents that count for the organization's limit. Raises `TooMany`."""
        most = self.policy.organization_of(org_id).max_agents
        count = AGENT_COUNTS.get(self.transaction, org_id) or 0
        if change > 0 and count >= most:
            raise TooMany(org_id, "agents", most, RETRY_AFTER_S)
        AGENT_COUNTS.put(self.transaction, max(0, count + change) or None, org_id)

    def set_health(self, org_id: str, agent_id: str, before: AgentEntry | None, after: AgentEntry) -> None:
        """Store a registration. A new health is an event."""
        AGENTS.put(self.transaction, after, org_id, agent_id)
        if before is None or before.health != after.health:
            self.emit_health(org_id, agent_id, after.health, after.coordinator)

    def emit_health(self, org_id: str, agent_id: str, health: str, coordinator: str) -> None:
        """Emit the new health of an agent."""
        detail = {"agent_id": agent_id, "health": health, "coordinator": coordinator}
        self.transaction.emit("agent_health", ENGINE_PREFIX + org_id, detail=detail)

    def leave(self, org_id: str, agent_id: str, session: int) -> None:
        """Forget an agent. Its open requests are treated like those of a dead agent."""
        entry = self.held(org_id, agent_id, session)
        if entry.health != "dead":  # a dead agent was taken from the count when it died
            self.count(org_id, -1)
        AGENTS.put(self.transaction, None, org_id, agent_id)
        self.emit_health(org_id, agent_id, "left", entry.coordinator)

    def held(self, org_id: str, agent_id: str, session: int) -> AgentEntry:
        """A registration under its newest session. Raises `AgentReplaced`."""
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        if entry is None or entry.session != session:
            raise AgentReplaced(agent_id)
        return entry

    def is_held(self, org_id: str, agent_id: str, session: int) -> bool:
        """Whether a session is the newest one of its agent."""
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        return entry is not None and entry.session == session

    def beat(self, org_id: str, agent_id: str, session: int, coordinator: str) -> AgentEntry:
        """Store a heartbeat of an agent. From now on it belongs to this coordinator."""
        entry = self.held(org_id, agent_id, session)
        if entry.health == "dead":
            self.count(org_id, 1)
        after = replace(entry, seen_ns=self.transaction.steady_ns, coordinator=coordinator, health="alive")
        self.set_health(org_id, agent_id, entry, after)
        return after

    def hear(self, org_id: str, agent_id: str, coordinator: str) -> None:
        """Count a call as a heartbeat of its agent, if that is registered and lives in another process."""
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        if entry is not None and not entry.is_local:
            self.beat(org_id, agent_id, entry.session, coordinator)

    # ---- requests ------------------------------------------------------------------------------

    def request(
        self, agent_id: str, session: int, prepared: Prepared, timeout_s: float | None = None
    ) -> tuple[str, bool]:
        """Submit a message whose answer an agent waits for; its id, and whether it was known before."""
        org_id = prepared.org_id
        self.held(org_id, agent_id, session)
        if (
            len(REQUESTS.under(self.transaction, org_id, agent_id, limit=OPEN_REQUESTS_MAX))
            >= OPEN_REQUESTS_MAX
        ):
            raise TooMany(agent_id, "open requests", OPEN_REQUESTS_MAX, RETRY_AFTER_S)
        [submitted] = Operations(self.transaction, self.policy).submit([prepared])
        open_request = OpenRequest(prepared.envelope.type, self.transaction.wall_us, timeout_s)
        REQUESTS.put(self.transaction, open_request, org_id, agent_id, submitted.message_id)
        return submitted.message_id, submitted.duplicate

    def open_requests(self, org_id: str, agent_id: str) -> list[str]:
        """The ids of the requests of an agent whose last part was not handed over."""
        found = REQUESTS.under(self.transaction, org_id, agent_id, limit=OPEN_REQUESTS_MAX)
        return [key.rpartition(SEPARATOR)[2] for key, _ in found]

    def answers(self, asked: Iterable[Asked]) -> list[NewParts]:
        """The new parts of the answer to each request."""
        operations = Operations(self.transaction, self.policy)
        held: dict[tuple[str, str], int] = {}
        found = []
        for one in asked:
            agent = one.org_id, one.agent_id
            if agent not in held:
                entry = AGENTS.get(self.transaction, *agent)
                held[agent] = 0 if entry is None else entry.session
            found.append(
                self._answer(operations, one) if held[agent] == one.session else NewParts(is_replaced=True)
            )
        return found

    def _answer(self, operations: Operations, asked: Asked) -> NewParts:
        message_id = asked.message_id
        try:
            parts, is_complete = read_on(operations, message_id, asked.position)
        except UnknownTask:
            end = replace(asked.position, is_end=True)
            parts, is_complete = [(end, _gone(message_id, self.transaction.wall_us))], True
        if is_complete and REQUESTS.get(self.transaction, asked.org_id, asked.agent_id, message_id) is None:
            return NewParts(is_closed=True)
        return NewParts(parts, is_complete)

    def acknowledge(self, org_id: str, agent_id: str, session: int, message_ids: Iterable[str]) -> list[str]:
        """Close requests whose agent has the last part. Returns the ids that were still open."""
        self.held(org_id, agent_id, session)
        closed = []
        for message_id in message_ids:
            if REQUESTS.get(self.transaction, org_id, agent_id, message_id) is None:
                continue
            REQUESTS.put(self.transaction, None, org_id, agent_id, message_id)
            detail = {"agent_id": agent_id, "message_id": message_id}
            self.transaction.emit("delivered", ENGINE_PREFIX + org_id, detail=detail)
            closed.append(message_id)
        return closed

    def emit_bounce(self, org_id: str, reason: str, **detail: str) -> None:
        """Emit that a message or an answer cannot reach its agent."""
        self.transaction.emit(
            "bounced", ENGINE_PREFIX + org_id, error_type="Bounced", error=reason, detail=detail
        )

    # ---- listing -------------------------------------------------------------------------------

    def list(self, org_id: str | None = None) -> list[AgentInfo]:
        """The registered agents of an organization, or of all."""
        coordinators = dict(COORDINATORS.all(self.transaction))
        if org_id is None:
            found = AGENTS.all(self.transaction)
        else:
            found = AGENTS.under(self.transaction, org_id, limit=AGENTS_LISTED_MAX)
        listed = []
        for key, entry in found:
            agent, coordinator = agent_of(key), coordinators.get(entry.coordinator)
            seen = self._seen(entry, coordinator)
            letters = LETTERS.under(self.transaction, *agent, limit=WAITS_SHOWN_MAX)
            info = AgentInfo(
                org_id=agent[0],
                agent_id=agent[1],
                health=seen.health,
                coordinator=entry.coordinator,
                epoch=0 if coordinator is None else coordinator.epoch,
                registered_at=EPOCH + entry.registered_us * MICROSECOND,
                silent_s=seen.silent_s,
                waits_for=self.open_requests(*agent)[:WAITS_SHOWN_MAX],
                waited_for_by=[letter.message_id for _, letter in letters],
            )
            listed.append(info)
        return listed

    def entry(self, org_id: str, agent_id: str) -> AgentEntry | None:
        """The registration of an agent; None when there is none."""
        return AGENTS.get(self.transaction, org_id, agent_id)

    def seen(self, entry: AgentEntry) -> "Seen":
        """The health of an agent, and how long it was not heard of."""
        return self._seen(entry, COORDINATORS.get(self.transaction, entry.coordinator))

    def _seen(self, entry: AgentEntry, coordinator: CoordinatorInfo | None) -> "Seen":
        seen_ns, now_ns = self.seen_ns(entry, coordinator), self.transaction.steady_ns
        silent_ns = now_ns - max(seen_ns, entry.registered_ns)
        health = entry.health
        if health != "asleep":
            health = agents.health_of(entry.registered_ns, seen_ns, now_ns, self.rules)
        return Seen(health, max(0, silent_ns) / NANOS_PER_S)

    def health(self, entry: AgentEntry) -> Health:
        return self.seen(entry).health

    def seen_ns(self, entry: AgentEntry, coordinator: CoordinatorInfo | None) -> int:
        """The time of an agent's last sign of life. A local agent lives as long as its coordinator."""
        if entry.is_local and coordinator is not None:
            return max(entry.seen_ns, coordinator.seen_ns)
        return entry.seen_ns


def check_names(org_id: object, agent_id: object) -> None:
    """Raise `InvalidMessage` unless both are names."""
    for what, name in (("org_id", org_id), ("agent_id", agent_id)):
        if not isinstance(name, str) or not is_name(name):
            raise InvalidMessage(f"{what} must be a name, not {name!r}")


def _gone(message_id: str, now_us: int) -> Part:
    """The end of an answer whose message is no longer kept."""
    error = {"type": "ResultGone", "message": f"the result of message {message_id} is no longer kept"}
    return Part(message_id, "error", utc_text(now_us * 1000), error=error)


def agent_of(key: str) -> tuple[str, str]:
    """The organization and the agent that the key of a cell begins with."""
    org_id, agent_id = key.split(SEPARATOR, 2)[:2]
    return org_id, agent_id
