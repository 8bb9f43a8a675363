"""Coroutines that wait for the end of messages."""

import asyncio
from contextlib import suppress


class EndWaiters:
    """Coroutines that wait for the end of messages."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def add(self, message_id: str) -> "asyncio.Future[None]":
        """A future that is done when the message may have ended: the caller looks at the store."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(message_id, set()).add(future)
        return future

    def remove(self, message_id: str, future: "asyncio.Future[None]") -> None:
        """The caller waits no longer."""
        waiting = self._waiting.get(message_id, set())
        waiting.discard(future)
        if not waiting:
            self._waiting.pop(message_id, None)

    def wake(self, message_ids: list[str]) -> None:
        """Wake the coroutines that wait for these messages. May be called from any thread."""
        for message_id in message_ids:
            for future in list(self._waiting.get(message_id, ())):
                with suppress(RuntimeError):  # its loop is closed: nobody waits any more
                    future.get_loop().call_soon_threadsafe(_done, future)


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
