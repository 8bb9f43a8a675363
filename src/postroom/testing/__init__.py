"""Tools for testing your own code, or your own store, with postroom. Public, and usable without pytest.

`ManualClock` is a clock that tests move by hand, `MemoryStore` a store that needs no file, `FaultyStore` a
store that fails as planned, and `StoreContract` the tests that every backend must pass:

    class TestMine(StoreContract):
        def open(self, folder, clock):
            return MyStore(folder / "my.db", clock=clock)

`explained` derives the state of every message from the events alone.
"""

from postroom.stores.memory import MemoryStore
from postroom.testing.clock import FIRST_WALL_US, ManualClock
from postroom.testing.events import Told, check_books, explained
from postroom.testing.faults import Crashed, Fault, FaultyStore
from postroom.testing.store_contract import StoreContract

__all__ = [
    "FIRST_WALL_US",
    "Crashed",
    "Fault",
    "FaultyStore",
    "ManualClock",
    "MemoryStore",
    "StoreContract",
    "Told",
    "check_books",
    "explained",
]
