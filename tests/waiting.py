"""Waiting for something that has to come: a condition, never a span of time."""

import asyncio
import time
from collections.abc import Callable

HANG_GUARD_S = 300.0
"""The longest that any test waits for what has to come, also on a machine with a load of 40."""
LOOK_EVERY_S = 0.01


def until(condition: Callable[[], object]) -> None:
    """Come back as soon as the condition holds; fail when it never does."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(LOOK_EVERY_S)


async def eventually(condition: Callable[[], object]) -> None:
    """As `until`, while the event loop goes on."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(LOOK_EVERY_S)
