"""An engine for tests of handlers: in memory, on a clock that tests move, and without background work."""

from postroom.engine.core import EngineCore
from postroom.engine.inline import InlineCore
from postroom.engine.rules.policy import Policy
from postroom.goals.engine import Engine
from postroom.stores.memory import MemoryStore
from postroom.stores.store import Store
from postroom.system.manual_clock import ManualClock


class InlineEngine(Engine):
    """As `Engine`, with the handlers of another engine. `clock` is the clock that tests move."""

    def __init__(self, engine: Engine) -> None:
        self.clock = ManualClock()
        super().__init__(MemoryStore(clock=self.clock), engine.policy)
        self._share(engine)

    def _new_core(self, store: Store, policy: Policy) -> EngineCore:
        self._inline = InlineCore(store, policy)
        self._inline.clock = self.clock
        return self._inline

    async def drain(self) -> None:
        """Run handlers until nothing can run without moving the clock."""
        await self._inline.drain()

    async def advance(self, seconds: float) -> None:
        """Move the clock, and run what becomes due."""
        self.clock.advance(seconds)
        await self.drain()
