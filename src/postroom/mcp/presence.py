"""Keeps agents alive in the eyes of the coordinator while they think between two calls."""

import asyncio
import time
from contextlib import suppress

from postroom.calls.agents import Beat, Leave
from postroom.errors import PostroomError
from postroom.mcp.backend import Backend

BEAT_S = 5.0  # the coordinator misses a heartbeat after 10 s
PRESENT_S = 600.0  # after the last call over HTTP, where nothing shows that a program still runs


class Presence:
    """Sends the heartbeats of agents that used a tool of their team.

    An agent that was registered by a heartbeat from here leaves at the end: a program that has ended is not
    listed as dead. Its messages stay in its inbox.
    """

    def __init__(self, present_s: float = PRESENT_S) -> None:
        self._present_s = present_s
        self._agents: dict[tuple[str, str], tuple[Backend, float]] = {}
        self._registered: dict[tuple[str, str], int] = {}
        """The sessions of agents that were registered from here."""
        self._task: asyncio.Task[None] | None = None

    def note(self, backend: Backend) -> None:
        """An agent is there, and stays for `present_s`."""
        self._agents[backend.org, backend.agent] = backend, time.monotonic() + self._present_s
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            now = time.monotonic()
            for name, (backend, until) in list(self._agents.items()):
                with suppress(PostroomError):  # such as a token that was revoked
                    if until > now:
                        await self.beat(backend)
                    else:
                        del self._agents[name]
                        await self._leave(backend)
            await asyncio.sleep(BEAT_S)

    async def beat(self, backend: Backend) -> None:
        """Register the agent of a caller, or note that it is alive."""
        backend.check_token()
        answer = await backend.ask(Beat(agent_id=backend.agent), as_agent=True)
        if answer["is_new"]:
            self._registered[backend.org, backend.agent] = answer["session"]

    async def _leave(self, backend: Backend) -> None:
        session = self._registered.pop((backend.org, backend.agent), None)
        if session is not None:
            await backend.ask(Leave(agent_id=backend.agent, session=session), as_agent=True)

    async def close(self) -> None:
        """Send no more heartbeats."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def leave(self) -> None:
        """Send no more heartbeats: the program of these agents has ended."""
        await self.close()
        for backend, _ in self._agents.values():
            with suppress(PostroomError):
                await self._leave(backend)
