"""A pool of warm sandboxes, for messages that cannot wait for the creation of one.

Rule 1: a sandbox goes back into the pool only after a reset and a healthy probe. Another one is destroyed.
Rule 2: a sandbox is recycled after `uses_max` runs or `age_s_max` seconds. Idle ones are probed.
Rule 3: creations that fail open a breaker: until its cooldown is over, no creation is tried.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from postroom.core.lifecycle import breaker
from postroom.core.lifecycle.breaker import Breaker
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import InvalidSetting, SandboxUnavailable
from postroom.sandbox.sandbox import Sandbox, SandboxKind
from postroom.system.log import library_log

_log = library_log("postroom.sandbox")

SIZE: Final = 2
SIZE_MAX: Final = 64
USES_MAX: Final = 100
AGE_S_MAX: Final = 600.0
HEALTH_S: Final = 5.0
IDLE_S: Final = 60.0  # after which an idle sandbox is probed
CREATION_S: Final = 60.0  # after which a creation that gave no outcome counts as lost
BREAKER: Final = Breaker(failures=3, window_s=60.0, cooldown_s=30.0)


class PoolStatus(msgspec.Struct, frozen=True):
    """The counts and the state of a pool."""

    warm: int
    in_use: int
    created: int
    recycled: int
    breaker: breaker.BreakerState


class Creations:
    """Creates sandboxes, and tries no more for a while when several creations have failed."""

    def __init__(
        self,
        rule: Breaker = BREAKER,
        opener: Callable[[SandboxKind], Sandbox] = Sandbox.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule, self._opener, self._clock = rule, opener, clock
        self._circuit = breaker.CLOSED
        self._numbers = itertools.count()

    @property
    def state(self) -> breaker.BreakerState:
        """The state of the breaker."""
        return self._circuit.state

    async def create(self, kind: SandboxKind, resource_limits: Any = None) -> Sandbox:
        """A new sandbox. Raises `SandboxUnavailable`."""
        number, now_ns = str(next(self._numbers)), self._now_ns()
        if not breaker.admits(self._circuit, number, now_ns):
            left_s = breaker.wait_ns(self._circuit, now_ns) / NANOS_PER_S
            raise SandboxUnavailable("creations have failed lately, so none is tried now", left_s)
        self._circuit = breaker.probed(self._circuit, number, now_ns, round(CREATION_S * NANOS_PER_S))
        try:
            sandbox = await self._opener(kind).create(resource_limits)
        except SandboxUnavailable:
            self._circuit = breaker.failed(self._circuit, self._rule, number, self._now_ns())
            raise
        self._circuit = breaker.succeeded(self._circuit, number)
        return sandbox

    def _now_ns(self) -> int:
        return round(self._clock() * NANOS_PER_S)


class Warm:
    """A sandbox of a pool, with its age."""

    def __init__(self, sandbox: Sandbox, now: float) -> None:
        self.sandbox = sandbox
        self.created = self.probed = now
        self.uses = 0


class SandboxPool:
    """Warm sandboxes of one kind with the same limits."""

    def __init__(
        self,
        kind: SandboxKind = "auto",
        size: int = SIZE,
        resource_limits: Any = None,
        *,
        uses_max: int = USES_MAX,
        age_s_max: float = AGE_S_MAX,
        creations: Creations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(size) is not int or not 0 <= size <= SIZE_MAX:
            raise InvalidSetting(
                f"the size of a pool must be a whole number from 0 to {SIZE_MAX}, not {size!r}"
            )
        self.kind, self.size = kind, size
        self._limits = resource_limits
        self._uses_max, self._age_s_max = uses_max, age_s_max
        self._creations, self._clock = creations or Creations(), clock
        self._warm: deque[Warm] = deque()
        self._in_use = self._creating = self._created = self._recycled = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def fill(self) -> None:
        """Create sandboxes until the pool is full. Raises `SandboxUnavailable`."""
        while not self._is_closed and len(self._warm) + self._creating < self.size:
            one = await self._new()
            if self._is_closed:
                await one.sandbox.destroy()
            else:
                self._warm.append(one)

    async def tend(self) -> None:
        """Recycle idle sandboxes that are old or broken, and fill the pool. Raises `SandboxUnavailable`."""
        for _ in range(len(self._warm)):
            one = self._taken()
            if one is None:
                break
            if self._clock() - one.probed >= IDLE_S and not await self._is_healthy(one):
                await self._recycle(one)
            else:
                self._warm.append(one)
        await self.fill()

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox for one use: a warm one, else a new one. Raises `SandboxUnavailable`."""
        one = await self.take()
        try:
            yield one.sandbox
        finally:
            await self.give_back(one)

    async def take(self) -> Warm:
        """A sandbox until `give_back`: a warm one, else a new one. Raises `SandboxUnavailable`."""
        one = self._taken() or await self._new()
        self._in_use += 1
        self._refill()
        return one

    async def give_back(self, one: Warm) -> None:
        """Reset a sandbox for the next use, or destroy it when it is old, broken, or one too many."""
        self._in_use -= 1
        one.uses += 1
        has_room = not self._is_closed and len(self._warm) < self.size
        if has_room and one.uses < self._uses_max and not self._is_old(one) and await self._is_healthy(one):
            self._warm.append(one)
        else:
            await self._recycle(one)

    @property
    def status(self) -> PoolStatus:
        """The counts and the state of the pool."""
        return PoolStatus(len(self._warm), self._in_use, self._created, self._recycled, self._creations.state)

    async def close(self) -> None:
        """Destroy the warm sandboxes. One that is in use is destroyed when it is given back."""
        self._is_closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._warm:
            await self._warm.popleft().sandbox.destroy()

    # ---- inside --------------------------------------------------------------------------------

    def _taken(self) -> Warm | None:
        """The next warm sandbox that is not old."""
        while self._warm:
            one = self._warm.popleft()
            if not self._is_old(one):
                return one
            self._in_background(self._recycle(one))
        return None

    def _is_old(self, one: Warm) -> bool:
        return self._clock() - one.created >= self._age_s_max

    async def _is_healthy(self, one: Warm) -> bool:
        """Whether a sandbox can be reset and still runs programs."""
        try:
            await one.sandbox.reset()
            probe = await one.sandbox.run(["true"], timeout_s=HEALTH_S)
        except (SandboxUnavailable, OSError) as error:
            _log.warning("a warm sandbox is broken and is replaced: %s", error)
            return False
        one.probed = self._clock()
        return probe.exit_code == 0

    async def _new(self) -> Warm:
        self._creating += 1
        try:
            sandbox = await self._creations.create(self.kind, self._limits)
        finally:
            self._creating -= 1
        self._created += 1
        return Warm(sandbox, self._clock())

    async def _recycle(self, one: Warm) -> None:
        self._recycled += 1
        await one.sandbox.destroy()
        self._refill()

    def _refill(self) -> None:
        """Create what is missing in the background."""
        if not self._is_closed and len(self._warm) + self._in_use + self._creating < self.size:
            self._in_background(self._refilled())

    async def _refilled(self) -> None:
        try:
            await self.fill()
        except SandboxUnavailable as error:  # the next use tries again, and defers its message if it must
            _log.warning("the pool of sandboxes is not full: %s", error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
