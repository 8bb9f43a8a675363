"""A pool of warm sandboxes, for messages that cannot wait for the creation of one.

Rule 1: a sandbox goes back into the pool only after a reset and a healthy probe. Another one is destroyed.
Rule 2: a sandbox is recycled after `uses_max` runs or `age_s_max` seconds.
Rule 3: creations that fail open a breaker: until its cooldown is over, no creation is tried.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec

from postroom.contracts.sandbox.sandbox import Sandbox
from postroom.core import breaker
from postroom.core.breaker import Breaker
from postroom.core.lifecycle import NANOS_PER_S
from postroom.errors import InvalidSetting, SandboxUnavailable

SIZE: Final = 2
SIZE_MAX: Final = 64
USES_MAX: Final = 100
AGE_S_MAX: Final = 600.0
HEALTH_S: Final = 5.0
BREAKER: Final = Breaker(failures=3, window_s=60.0, cooldown_s=30.0)


class PoolStatus(msgspec.Struct, frozen=True):
    """How a pool stands."""

    warm: int
    in_use: int
    created: int
    recycled: int
    breaker: breaker.BreakerState


class _Warm:
    """A sandbox with its age."""

    def __init__(self, sandbox: Sandbox, now: float) -> None:
        self.sandbox = sandbox
        self.created = now
        self.uses = 0


class SandboxPool:
    """Warm sandboxes of one kind with the same limits."""

    def __init__(
        self,
        kind: str = "auto",
        size: int = SIZE,
        resource_limits: Any = None,
        *,
        uses_max: int = USES_MAX,
        age_s_max: float = AGE_S_MAX,
        rule: Breaker = BREAKER,
        opener: Callable[[str], Sandbox] = Sandbox.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(size) is not int or not 0 <= size <= SIZE_MAX:
            raise InvalidSetting(f"the size of a pool is a whole number from 0 to {SIZE_MAX}, not {size!r}")
        self.kind, self.size = kind, size
        self._limits = resource_limits
        self._uses_max, self._age_s_max, self._rule = uses_max, age_s_max, rule
        self._opener, self._clock = opener, clock
        self._warm: deque[_Warm] = deque()
        self._circuit = breaker.CLOSED
        self._in_use = self._created = self._recycled = 0
        self._refills: set[asyncio.Task[None]] = set()

    async def fill(self) -> None:
        """Create sandboxes until the pool is full. Raises `SandboxUnavailable`."""
        while len(self._warm) < self.size:
            self._warm.append(await self._new())

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox for one use: a warm one, else a new one. Raises `SandboxUnavailable`."""
        one = self._take() or await self._new()
        self._in_use += 1
        self._refill()
        try:
            yield one.sandbox
        finally:
            self._in_use -= 1
            await self._give_back(one)

    @property
    def status(self) -> PoolStatus:
        """How the pool stands."""
        return PoolStatus(len(self._warm), self._in_use, self._created, self._recycled, self._circuit.state)

    async def close(self) -> None:
        """Destroy the warm sandboxes."""
        for task in list(self._refills):
            task.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        while self._warm:
            await self._warm.popleft().sandbox.destroy()

    # ---- inside --------------------------------------------------------------------------------

    def _take(self) -> _Warm | None:
        return self._warm.popleft() if self._warm else None

    async def _new(self) -> _Warm:
        now_ns = round(self._clock() * NANOS_PER_S)
        if not breaker.admits(self._circuit, "", now_ns):
            left_s = breaker.wait_ns(self._circuit, now_ns) / NANOS_PER_S
            raise SandboxUnavailable("creations have failed lately, so none is tried now", left_s)
        self._circuit = breaker.probed(self._circuit, "", now_ns, NANOS_PER_S)
        try:
            sandbox = await self._opener(self.kind).create(self._limits)
        except SandboxUnavailable:
            self._circuit = breaker.failed(self._circuit, self._rule, "", now_ns)
            raise
        self._circuit = breaker.succeeded(self._circuit, "")
        self._created += 1
        return _Warm(sandbox, self._clock())

    async def _give_back(self, one: _Warm) -> None:
        one.uses += 1
        is_old = one.uses >= self._uses_max or self._clock() - one.created >= self._age_s_max
        if not is_old and len(self._warm) < self.size and await _is_healthy(one.sandbox):
            self._warm.append(one)
            return
        self._recycled += 1
        await one.sandbox.destroy()
        self._refill()

    def _refill(self) -> None:
        """Create what is missing in the background. A failure is met by the next use."""
        if len(self._warm) + self._in_use + len(self._refills) < self.size:
            task = asyncio.create_task(self._add_one())
            self._refills.add(task)
            task.add_done_callback(self._refills.discard)

    async def _add_one(self) -> None:
        with suppress(SandboxUnavailable):
            one = await self._new()
            if len(self._warm) < self.size:
                self._warm.append(one)
            else:
                await one.sandbox.destroy()


async def _is_healthy(sandbox: Sandbox) -> bool:
    """Whether a sandbox can be reset and still runs programs."""
    try:
        await sandbox.reset()
        return (await sandbox.run(["true"], timeout_s=HEALTH_S)).exit_code == 0
    except (SandboxUnavailable, OSError):
        return False
