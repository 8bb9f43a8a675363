"""The slots of a worker while an attempt waits for somebody outside, such as an adviser.

Rule 1: such an attempt keeps its lease and lends its slot, so other messages run meanwhile.
Rule 2: at most `LENT_MAX` slots of a worker are lent, because each of these attempts keeps a lease alive.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LENT_MAX: Final = 100


class LentSlots:
    """How many slots of one worker are lent. Belongs to the event loop of the worker."""

    def __init__(self, on_lent: Callable[[], None]) -> None:
        self.count = 0
        self.on_lent = on_lent
        self.loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """The running task is an attempt of the worker."""
        self.loop = asyncio.get_running_loop()
        _slots.set(self)


_slots: ContextVar[LentSlots | None] = ContextVar("postroom_lent_slots", default=None)


@contextmanager
def lent_slot() -> Iterator[bool]:
    """Lend the slot of the attempt that runs in this task, if one does. False: do not wait in the block.

    A call of a plain handler comes from another loop and lends nothing: its thread waits.
    """
    slots = _slots.get()
    if slots is None or slots.loop is not asyncio.get_running_loop():
        yield True
        return
    if slots.count >= LENT_MAX:
        yield False
        return
    slots.count += 1
    slots.on_lent()
    try:
        yield True
    finally:
        slots.count -= 1
