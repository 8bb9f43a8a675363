"""Stores the parts that a running handler sends, in order, and several in one commit.

Rule 1: the first part is stored at once. Parts that come while it is committed share the next commit.
Rule 2: every part is stored before the outcome of its attempt. The next call raises the error of a commit.
Rule 3: a handler that is faster than the store waits once `PARTS_A_COMMIT_MAX` parts are pending.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from postroom.contracts.tasks.task_input import encoded
from postroom.core.times import utc_text
from postroom.engine.rules.cells import Part
from postroom.engine.rules.operations import PARTS_MAX, STREAM_BYTES_MAX, Operations
from postroom.errors import InvalidMessage

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

PARTS_A_COMMIT_MAX: Final = 64


class PartWriter:
    """The parts of one attempt."""

    def __init__(self, core: "EngineCore", message_id: str, lease: int, attempt: int) -> None:
        self._core = core
        self._message_id = message_id
        self._lease = lease
        self.attempt = attempt
        self._pending: list[Part] = []
        self._stored = 0
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self.chunks = 0
        self.waits = False
        """Whether each call returns after the commit: in a process whose event loop ends with the call."""

    async def add(self, kind: str, **facts: Any) -> None:
        """Send a part."""
        self._raise_error()
        if self._stored + len(self._pending) >= PARTS_MAX:
            raise InvalidMessage(f"one attempt may send at most {PARTS_MAX} progress reports and chunks")
        timestamp = utc_text(self._core.store.wall_us() * 1000)
        part = Part(self._message_id, kind, timestamp, attempt=self.attempt, **facts)
        self._count_bytes(part)
        self._pending.append(part)
        self.chunks += kind == "stream_chunk"
        if self._task is None:
            self._task = asyncio.create_task(self._store_all())
            await asyncio.sleep(0)  # lets the task begin, even if the handler never awaits anything else
        if self.waits or len(self._pending) >= PARTS_A_COMMIT_MAX:
            await self.flush()

    def _count_bytes(self, part: Part) -> None:
        size = len(encoded("a chunk", part.chunk)) if part.chunk is not None else len(part.message)
        if self._bytes + size > STREAM_BYTES_MAX:
            raise InvalidMessage(f"the chunks of one attempt may have at most {STREAM_BYTES_MAX} bytes")
        self._bytes += size

    async def flush(self) -> None:
        """Wait until every part is stored."""
        if self._task is not None:
            await asyncio.wait([self._task])
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _store_all(self) -> None:
        try:
            while self._pending:
                parts, self._pending = self._pending[:PARTS_A_COMMIT_MAX], self._pending[PARTS_A_COMMIT_MAX:]
                await self._core.commits.write(
                    partial(_add, self._message_id, self._lease, parts, self._stored), makes_room=True
                )
                self._core.wakeups.wake_waiting([self._message_id])
                self._core.wakeups.wake_readers()
                self._stored += len(parts)
        except Exception as error:  # noqa: BLE001 - the handler gets it
            self._error = error
            self._pending.clear()
        finally:
            self._task = None


def _add(message_id: str, lease: int, parts: list[Part], first: int, operations: Operations) -> None:
    operations.add_parts(message_id, lease, parts, first)
