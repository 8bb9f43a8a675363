"""Keeps agents alive in the eyes of the coordinator while they think between two calls."""

import asyncio
import time
from contextlib import suppress

from postroom.calls.agents import Beat
from postroom.errors import PostroomError
from postroom.mcp.backend import Backend

BEAT_S = 5.0  # the coordinator misses a heartbeat after 10 s
PRESENT_S = 600.0  # after the last call over HTTP, where nothing shows that a program still runs


class Presence:
    """Sends the heartbeats of agents that used a tool of their team."""

    def __init__(self, present_s: float = PRESENT_S) -> None:
        self._present_s = present_s
        self._agents: dict[tuple[str, str], tuple[Backend, float]] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, backend: Backend) -> None:
        """An agent is there, and stays for `present_s`."""
        self._agents[backend.org, backend.agent] = backend, time.monotonic() + self._present_s
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            now = time.monotonic()
            self._agents = {name: one for name, one in self._agents.items() if one[1] > now}
            for backend, _ in list(self._agents.values()):
                with suppress(PostroomError):  # such as a token that was revoked
                    backend.check_token()
                    await beat(backend)
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """Send no more heartbeats."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task


async def beat(backend: Backend) -> None:
    """Register the agent of a caller, or note that it is alive."""
    await backend.ask(Beat(agent_id=backend.agent), as_agent=True)
