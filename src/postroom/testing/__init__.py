"""Tools for testing your own code, or your own store, with postroom. Public, and usable without pytest.

`ManualClock` is a clock that tests move by hand, `MemoryStore` a store that needs no file, `FaultyStore` a
store that fails as planned, and `StoreContract` the tests that every backend must pass:

    class TestMine(StoreContract):
        def open(self, folder, clock):
            return MyStore(folder / "my.db", clock=clock)

`explained` derives the state of every message from the events alone. `HandlerWorld` runs your handlers of an
engine under crashes and repeated deliveries, `World` does the same to the engine itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postroom.stores.memory import MemoryStore
from postroom.system.manual_clock import FIRST_WALL_US, ManualClock
from postroom.testing.events import DerivedState, check_consistency, explained
from postroom.testing.faults import Crashed, Fault, FaultyStore
from postroom.testing.store_contract import StoreContract

if TYPE_CHECKING:
    from postroom.testing.handler_world import HandlerReport, HandlerWorld, MessageReport
    from postroom.testing.world import Report, World

__all__ = [
    "FIRST_WALL_US",
    "Crashed",
    "DerivedState",
    "Fault",
    "FaultyStore",
    "HandlerReport",
    "HandlerWorld",
    "ManualClock",
    "MemoryStore",
    "MessageReport",
    "Report",
    "StoreContract",
    "World",
    "check_consistency",
    "explained",
]

_WORLDS = {
    "HandlerReport": "handler_world",
    "HandlerWorld": "handler_world",
    "MessageReport": "handler_world",
    "Report": "world",
    "World": "world",
}
"""Imported when they are first used: they need the engine, which tests of other contracts do not."""


def __getattr__(name: str) -> Any:
    if name not in _WORLDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WORLDS[name]}"), name)
