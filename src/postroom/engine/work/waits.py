"""Waiting for an event of an asyncio loop, and setting it from another thread."""

import asyncio
from contextlib import suppress


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether an event is set within `timeout_s`.

    Not `asyncio.wait_for`: Python 3.11 loses a cancellation there that comes together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    return False


def set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(event.set)
