"""The sandboxes of the agents of an engine: which agents need one, and who gets a warm one.

Rule 1: the tools of an agent say at its creation whether it needs sandboxes. The need is stored, so
        that every process with a worker has warm ones for the agent.
Rule 2: sandboxes are created before the handler of `agent_spawn` runs: a failed creation defers the message.
Rule 3: a forked process never uses the warm sandboxes of its parent.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from postroom.core.goals.sandbox_rules import needs_sandbox
from postroom.engine.commits import Commits
from postroom.engine.messages import Message
from postroom.engine.rules.cells import SEPARATOR, Kind
from postroom.errors import InvalidMessage, SandboxUnavailable, TooMany, Unavailable, shown
from postroom.sandbox.pool import SIZE, Creations, PoolStatus, SandboxPool, Warm
from postroom.sandbox.sandbox import Sandbox, SandboxKind
from postroom.stores.transaction import Transaction
from postroom.system.handles import reset_after_fork
from postroom.system.log import library_log

_log = library_log("postroom.sandbox")

POOLS_MAX: Final = 100
RETRY_AFTER_S: Final = 60.0
TEND_S: Final = 5.0
"""The message types that begin and end the life of an agent."""


class SandboxNeed(msgspec.Struct, frozen=True):
    """An agent whose tools run code."""

    message_id: str
    """The `agent_spawn` message that said so."""


NEEDS: Final = Kind("sandbox.need", SandboxNeed)
"""Organization, agent -> need."""


class Sandboxes:
    """`engine.sandboxes`: warm sandboxes of this process, one pool for each agent that needs it."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self.kind: SandboxKind = "auto"
        """The kind of the sandboxes: see `Sandbox.open`."""
        self.size = SIZE
        """How many warm sandboxes each spawned agent has."""
        self._creations = Creations()
        self._pools: dict[tuple[str, str], SandboxPool] = {}
        self._followed: set[tuple[str, str]] = set()
        """Agents whose pool follows from a stored need, and ends with it."""
        reset_after_fork(self)

    def after_fork(self) -> None:
        """The warm sandboxes belong to the parent."""
        self._pools, self._followed = {}, set()

    async def prepare(
        self,
        org_id: str,
        agent_id: str,
        tools: Iterable[Any],
        *,
        size: int = SIZE,
        resource_limits: Any = None,
    ) -> bool:
        """Create warm sandboxes for an agent in this process, if one of its tools runs code; whether it does.

        Raises `SandboxUnavailable` and `TooMany`. For agents that no `agent_spawn` message creates.
        """
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise InvalidMessage(f"the tools of an agent are a list, not {shown(tools)}")
        if not needs_sandbox(tools):
            return False
        key = org_id, agent_id
        if key not in self._pools:
            if len(self._pools) >= POOLS_MAX:
                raise TooMany(org_id, "pools of sandboxes", POOLS_MAX, RETRY_AFTER_S)
            self._pools[key] = SandboxPool(self.kind, size, resource_limits, creations=self._creations)
        await self._pools[key].fill()
        return True

    def sandbox(self, message: Message) -> "BorrowedSandbox":
        """A sandbox for the work of a message, in an `async with` block.

        It is a warm one for a P0 message of an agent with a pool, unless the message limits its memory; else
        a new one with the limits of the message. Raises `SandboxUnavailable`, which defers the message.
        """
        return BorrowedSandbox(self, message)

    def status(self) -> dict[str, PoolStatus]:
        """The pools by organization and agent."""
        return {f"{org_id}/{agent_id}": pool.status for (org_id, agent_id), pool in self._pools.items()}

    async def forget(self, org_id: str, agent_id: str) -> None:
        """Destroy the warm sandboxes of an agent that is gone."""
        self._followed.discard((org_id, agent_id))
        pool = self._pools.pop((org_id, agent_id), None)
        if pool is not None:
            await pool.close()

    async def close(self) -> None:
        """Destroy all warm sandboxes. The last worker of a process does this at its end."""
        for org_id, agent_id in list(self._pools):
            await self.forget(org_id, agent_id)

    # ---- for workers ---------------------------------------------------------------------------

    async def follow(self, message: Message) -> None:
        """An agent is about to be created or ended. Raises `SandboxUnavailable`."""
        payload = message.payload if isinstance(message.payload, dict) else {}
        agent_id, tools = payload.get("agent_id"), payload.get("tools")
        if not isinstance(agent_id, str) or not agent_id.isprintable():
            return  # the handler refuses the message
        is_needed = message.type == "agent_spawn" and isinstance(tools, list) and needs_sandbox(tools)
        need = SandboxNeed(message.message_id) if is_needed else None

        def note(transaction: Transaction) -> None:
            if NEEDS.get(transaction, message.org_id, agent_id) != need:
                NEEDS.put(transaction, need, message.org_id, agent_id)

        await self._commits.write_raw(note, makes_room=True)
        await self._follow(message.org_id, agent_id, is_needed=is_needed)

    async def keep_warm(self) -> None:
        """Until cancelled: follow needs that other processes stored for agents, and tend the pools."""
        while True:
            try:
                await self.tend()
            except Unavailable as error:
                _log.warning("the warm sandboxes are not tended now: %s", error)
            await asyncio.sleep(TEND_S)

    async def tend(self) -> None:
        """Follow the stored needs, and tend every pool."""
        needs = await self._commits.read(lambda operations: NEEDS.all(operations.transaction))
        needed = {(org_id, agent_id) for org_id, agent_id in (key.split(SEPARATOR) for key, _ in needs)}
        for org_id, agent_id in needed ^ self._followed:
            await self._follow(org_id, agent_id, is_needed=(org_id, agent_id) in needed)
        for pool in list(self._pools.values()):
            try:
                await pool.tend()
            except SandboxUnavailable as error:
                _log.warning("a pool of sandboxes is not full: %s", error)

    async def _follow(self, org_id: str, agent_id: str, *, is_needed: bool) -> None:
        if not is_needed:
            if (org_id, agent_id) in self._followed:
                await self.forget(org_id, agent_id)
            return
        self._followed.add((org_id, agent_id))
        if (org_id, agent_id) in self._pools or len(self._pools) < POOLS_MAX:
            await self.prepare(org_id, agent_id, [{"sandbox": True}], size=self.size)
        else:
            _log.warning("agent %s gets no warm sandboxes: this process has %d pools", agent_id, POOLS_MAX)

    async def create(self, message: Message) -> Sandbox:
        """A new sandbox with the limits of a message."""
        return await self._creations.create(self.kind, message.resource_limits)

    def pool_of(self, message: Message) -> SandboxPool | None:
        """The pool that has warm sandboxes for a message; None when it gets a new one."""
        limits = message.resource_limits
        if message.accepted_priority or (limits is not None and limits.memory is not None):
            return None
        return self._pools.get((message.org_id, message.agent_id))


class BorrowedSandbox:
    """A sandbox for the work of one message: `async with` begins and ends the loan."""

    def __init__(self, sandboxes: Sandboxes, message: Message) -> None:
        self._sandboxes = sandboxes
        self._message = message
        self._pool: SandboxPool | None = None
        self._warm: Warm | None = None
        self._new: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        self._pool = self._sandboxes.pool_of(self._message)
        if self._pool is not None:
            self._warm = await self._pool.take()
            return self._warm.sandbox
        self._new = await self._sandboxes.create(self._message)
        return self._new

    async def __aexit__(self, *error: object) -> None:
        if self._pool is not None and self._warm is not None:
            await self._pool.give_back(self._warm)
        elif self._new is not None:
            await self._new.destroy()
