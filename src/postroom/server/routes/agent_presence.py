"""Heartbeats of agents while a call of theirs is open.

Rule 1: a call that stays open is a sign of life, so an agent that waits for an answer never counts as dead.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from postroom.core.gate import permit
from postroom.errors import PostroomError
from postroom.server.access.registry import Identity
from postroom.server.http.task_server import TaskServer


@contextmanager
def heard(server: TaskServer, identity: Identity) -> Iterator[None]:
    """Send heartbeats for the agent of a token, if it is registered, while its call is open."""
    if not permit(identity, "agent.join"):
        yield
        return
    beating = asyncio.create_task(_beat(server, identity))
    try:
        yield
    finally:
        beating.cancel()


async def _beat(server: TaskServer, identity: Identity) -> None:
    while True:
        await asyncio.sleep(server.engine.policy.agents.heartbeat_s / 2)
        with suppress(PostroomError):
            coordinator = await server.coordinator()
            await coordinator.write(
                lambda agents: agents.hear(identity.org, identity.name, coordinator.id)  # noqa: B023
            )
