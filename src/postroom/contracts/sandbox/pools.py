"""The sandboxes of the agents of an engine: which agents need one, and who gets a warm one."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from postroom.contracts.engine.messages import Message
from postroom.contracts.sandbox.pool import SIZE, PoolStatus, SandboxPool
from postroom.contracts.sandbox.sandbox import Sandbox
from postroom.core.sandbox_rules import needs_sandbox
from postroom.errors import TooMany

POOLS_MAX: Final = 100
RETRY_AFTER_S: Final = 60.0


class Sandboxes:
    """`engine.sandboxes`: warm sandboxes of this process, one pool for each agent that needs it."""

    def __init__(self) -> None:
        self.kind = "auto"
        """The kind of the sandboxes: see `Sandbox.open`."""
        self._pools: dict[tuple[str, str], SandboxPool] = {}

    async def prepare(
        self,
        org_id: str,
        agent_id: str,
        tools: Iterable[Any],
        *,
        size: int = SIZE,
        resource_limits: Any = None,
    ) -> bool:
        """Create warm sandboxes for a new agent, if one of its tools runs code; whether it does."""
        if not needs_sandbox(tools):
            return False
        if (org_id, agent_id) not in self._pools:
            if len(self._pools) >= POOLS_MAX:
                raise TooMany(org_id, "pools of sandboxes", POOLS_MAX, RETRY_AFTER_S)
            self._pools[org_id, agent_id] = SandboxPool(self.kind, size, resource_limits)
        await self._pools[org_id, agent_id].fill()
        return True

    @asynccontextmanager
    async def sandbox(self, message: Message) -> AsyncIterator[Sandbox]:
        """A sandbox for the work of a message: a warm one for P0, else a new one with the message's limits.

        Raises `SandboxUnavailable`, which defers the message.
        """
        pool = self._pools.get((message.org_id, message.agent_id))
        if pool is not None and message.accepted_priority == 0:
            async with pool.sandbox() as warm:
                yield warm
            return
        cold = await Sandbox.open(self.kind).create(message.resource_limits)
        try:
            yield cold
        finally:
            await cold.destroy()

    def status(self) -> dict[str, PoolStatus]:
        """The pools by organization and agent."""
        return {f"{org_id}/{agent_id}": pool.status for (org_id, agent_id), pool in self._pools.items()}

    async def forget(self, org_id: str, agent_id: str) -> None:
        """Destroy the warm sandboxes of an agent that is gone."""
        pool = self._pools.pop((org_id, agent_id), None)
        if pool is not None:
            await pool.close()

    async def close(self) -> None:
        """Destroy all warm sandboxes."""
        for org_id, agent_id in list(self._pools):
            await self.forget(org_id, agent_id)
