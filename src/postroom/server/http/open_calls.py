"""Calls that stay open: long polls and streams. They end when their token or session ends.

Rule 1: a token that is revoked, by this process or another one, gives back at once what its open calls hold.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from postroom.errors import PostroomError
from postroom.server.access.registry import Agents
from postroom.server.access.registry_file import CHECK_EVERY_S

EXPIRED_EVERY_S = 5.0  # between looks for tokens that ended by their time alone


class OpenCalls:
    """The open calls of a server, and whether each of them is still allowed."""

    def __init__(self, agents: Agents, loop: asyncio.AbstractEventLoop) -> None:
        self._agents = agents
        self._loop = loop
        self._open: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._version = agents.version
        self._checked = loop.time()

    @contextmanager
    def joined(self, is_allowed: Callable[[], bool]) -> "Iterator[asyncio.Future[None]]":
        """A future that is done when a call is no longer allowed."""
        ended = self._loop.create_future()
        self._open[ended] = is_allowed
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._look)
        try:
            yield ended
        finally:
            del self._open[ended]

    def _look(self) -> None:
        """End the calls of ended tokens, if any token was changed. Nothing is read while no call is open."""
        self._timer = self._loop.call_later(CHECK_EVERY_S, self._look) if self._open else None
        with suppress(PostroomError):  # a file that cannot be read now: every call of a client says so
            version = self._agents.version
            if version != self._version or self._loop.time() >= self._checked + EXPIRED_EVERY_S:
                self.check()
                self._version = version

    def check(self) -> None:
        """End the calls that are no longer allowed."""
        self._checked = self._loop.time()
        for ended, is_allowed in self._open.items():
            if not ended.done() and not is_allowed():
                ended.set_result(None)
