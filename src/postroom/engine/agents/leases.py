"""Leases: of coordinators on their agents, and of the supervisor that runs the programs of agents.

Rule 1: a lease that is not renewed ends, and another process takes over what it held.
Rule 2: at most one supervisor holds its lease, so a program runs once.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from postroom.core.agents import may_take_over
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.agents.agent_operations import (
    AGENTS_LISTED_MAX,
    RETRY_AFTER_S,
    AgentOperations,
    agent_of,
    check_names,
)
from postroom.engine.rules.cells import (
    AGENT_COUNTS,
    AGENTS,
    COORDINATORS,
    PROGRAMS,
    CoordinatorInfo,
    WantedProgram,
)
from postroom.engine.rules.policy import Policy
from postroom.errors import TooMany
from postroom.stores.transaction import Transaction

LEASE_S: Final = 3.0  # of a coordinator; another one takes over within 5 s
SUPERVISOR: Final = ".programs"
"""The lease of the supervisor that runs the programs of agents. No coordinator has such a name."""


def _held_from_now(transaction: Transaction, epoch: int, name: str) -> CoordinatorInfo:
    now_ns = transaction.steady_ns
    return CoordinatorInfo(epoch, now_ns, now_ns + round(LEASE_S * NANOS_PER_S), name)


class Leases:
    """The leases of coordinators in one transaction, and which agents move when one is over."""

    def __init__(self, agents: AgentOperations) -> None:
        self.agents = agents
        self.transaction = agents.transaction

    def start(self, coordinator: str, name: str) -> CoordinatorInfo:
        """Begin the lease of a coordinator."""
        info = _held_from_now(self.transaction, self.agents.next_number(), name)
        COORDINATORS.put(self.transaction, info, coordinator)
        return info

    def renew(self, coordinator: str, epoch: int, name: str) -> bool:
        """Renew the lease of a coordinator. Returns whether it still had its agents.

        A coordinator that was taken for dead returns with its epoch, and has to `reclaim` its agents.
        """
        known = COORDINATORS.get(self.transaction, coordinator)
        COORDINATORS.put(self.transaction, _held_from_now(self.transaction, epoch, name), coordinator)
        return known is not None

    def reclaim(self, coordinator: str, org_id: str, agent_id: str, session: int) -> None:
        """Take back an agent in the process of this coordinator, unless it was registered again."""
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        if entry is not None and entry.session == session:
            after = replace(entry, coordinator=coordinator, is_local=True)
            AGENTS.put(self.transaction, after, org_id, agent_id)

    def stop(self, coordinator: str) -> None:
        """End the lease of a coordinator. Its agents stay registered, and may register elsewhere."""
        info = COORDINATORS.get(self.transaction, coordinator)
        if info is not None:
            COORDINATORS.put(
                self.transaction, replace(info, until_ns=self.transaction.steady_ns), coordinator
            )

    def take_over(self, coordinator: str) -> list[str]:
        """Take over the agents of coordinators whose lease is over. Returns the ids of those coordinators."""
        transaction = self.transaction
        lost = {
            other: info
            for other, info in COORDINATORS.all(transaction)
            if other not in (coordinator, SUPERVISOR) and may_take_over(info.until_ns, transaction.steady_ns)
        }
        for key, entry in AGENTS.all(transaction) if lost else ():
            if entry.coordinator in lost:
                seen_ns = self.agents.seen_ns(entry, lost[entry.coordinator])
                moved = replace(entry, coordinator=coordinator, is_local=False, seen_ns=seen_ns)
                AGENTS.put(transaction, moved, key)
        for other in lost:
            COORDINATORS.put(transaction, None, other)
            transaction.alert("CoordinatorLost", f"coordinator {other} is gone: {coordinator} takes over")
        return [*lost]


class WantedPrograms:
    """The programs that a supervisor has to run for agents, in one transaction."""

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self.transaction = transaction
        self.policy = policy

    def want(
        self, org_id: str, agent_id: str, message_id: str, tools: Sequence[str] = (), prompt: str = ""
    ) -> bool:
        """Store that a supervisor has to run the program of an agent. Raises `TooMany`.

        Without a configured program the agent sleeps: it wakes when it registers, or when a supervisor has a
        program for it. Returns whether a program is configured.
        """
        check_names(org_id, agent_id)
        command = self.policy.agents.program
        # Agents that are registered and not dead count, and wanted programs that have not registered.
        known = PROGRAMS.under(self.transaction, org_id, limit=AGENTS_LISTED_MAX)
        wanted = {agent_of(key)[1] for key, _ in known}
        if agent_id not in wanted and not self._is_counted(org_id, agent_id):
            unregistered = sum(not self._is_counted(org_id, other) for other in wanted)
            most = self.policy.organization_of(org_id).max_agents
            if (AGENT_COUNTS.get(self.transaction, org_id) or 0) + unregistered >= most:
                raise TooMany(org_id, "agents", most, RETRY_AFTER_S)
        program = WantedProgram(command, message_id, tuple(tools), prompt)
        PROGRAMS.put(self.transaction, program, org_id, agent_id)
        if not command:
            AgentOperations(self.transaction, self.policy).put_to_sleep(org_id, agent_id)
        return bool(command)

    def _is_counted(self, org_id: str, agent_id: str) -> bool:
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        return entry is not None and entry.health != "dead"

    def unwant(self, org_id: str, agent_id: str) -> bool:
        """Store that a program has to end, and forget an agent that sleeps; whether one was wanted."""
        known = PROGRAMS.get(self.transaction, org_id, agent_id)
        PROGRAMS.put(self.transaction, None, org_id, agent_id)
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        if entry is not None and entry.health == "asleep":
            AgentOperations(self.transaction, self.policy).leave(org_id, agent_id, entry.session)
        return known is not None

    def wanted_by(self, supervisor: str) -> dict[tuple[str, str], WantedProgram]:
        """The wanted programs by organization and agent; none for a supervisor that does not hold the lease.

        A supervisor gets the lease when nobody else holds it, and renews it by this call.
        """
        now_ns, held = self.transaction.steady_ns, COORDINATORS.get(self.transaction, SUPERVISOR)
        if held is not None and held.name != supervisor and not may_take_over(held.until_ns, now_ns):
            return {}
        COORDINATORS.put(self.transaction, _held_from_now(self.transaction, 0, supervisor), SUPERVISOR)
        configured = self.policy.agents.program
        wanted = {agent_of(key): program for key, program in PROGRAMS.all(self.transaction)}
        return {
            agent: program if program.command else replace(program, command=configured)
            for agent, program in wanted.items()
            if program.command or configured
        }

    def release(self, supervisor: str) -> None:
        """Give up the lease of a supervisor that has ended its programs."""
        held = COORDINATORS.get(self.transaction, SUPERVISOR)
        if held is not None and held.name == supervisor:
            COORDINATORS.put(self.transaction, None, SUPERVISOR)
