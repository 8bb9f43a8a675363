"""What `submit` returns: a way to wait for the answer, to cancel, and to ask why nothing happens."""

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from postroom.contracts.engine.cells import PARTS, SEPARATOR, Part, joined
from postroom.contracts.engine.explanation import explain
from postroom.contracts.engine.operations import Operations
from postroom.contracts.engine.results import result_of
from postroom.core import lifecycle
from postroom.core.times import utc_text
from postroom.errors import MessageFailed
from postroom.message import Stored

if TYPE_CHECKING:
    from postroom.contracts.engine.core import EngineCore

PARTS_A_READ_MAX = 1_000
LOOK_S = 0.1  # how often a reader of parts looks for new ones


class Handle:
    """A message that was submitted."""

    def __init__(self, core: "EngineCore", message_id: str, *, duplicate: bool = False) -> None:
        self._core = core
        self.message_id = message_id
        self.duplicate = duplicate
        """Whether the message was accepted by an earlier submit with the same key."""

    def __repr__(self) -> str:
        return f"Handle({self.message_id!r})"

    async def result(self, timeout_s: float | None = None) -> Any:
        """The result of the message, when it has one.

        Raises `MessageFailed` when the message ended without a result, and `TimeoutError` after `timeout_s`.
        """
        await self._core.wait_for_end(self.message_id, timeout_s)
        return result_of(await self._core.load(self.message_id))

    async def cancel(self) -> None:
        """As `Engine.cancel`."""
        await self._core.write(lambda operations: operations.cancel(self.message_id), makes_room=True)

    async def explain(self) -> str:
        """As `Engine.explain`."""
        return await self._core.read(
            lambda operations: explain(operations, self._core.policy, self.message_id, self._core.services)
        )

    async def __aiter__(self) -> AsyncIterator[Part]:
        """The parts of the answer as they come: acknowledgment, progress and chunks, then the end."""
        async for part in follow(self._core, self.message_id):
            yield part


async def follow(core: "EngineCore", message_id: str, after: str = "") -> AsyncIterator[Part]:
    """The parts of an answer, from the beginning or behind a key of an earlier reading."""
    acknowledged = 0
    chunks = 0
    position = after or joined(message_id) + SEPARATOR
    while True:
        stored, parts = await core.read(partial(_look, message_id=message_id, after=position))
        record = stored.record
        if record.attempt > acknowledged:
            acknowledged = record.attempt
            timestamp = utc_text(record.claimed_us * 1000)
            yield Part(message_id, "acknowledgment", timestamp, attempt=record.attempt)
        for key, part in parts:
            position = key
            chunks = part.chunk_index + 1 if part.chunk_index is not None else chunks
            yield part
        if record.state in lifecycle.ENDED and len(parts) < PARTS_A_READ_MAX:
            yield _last(stored, chunks)
            return
        if not parts:
            await core.wait_for_news(message_id, LOOK_S)


def _look(operations: Operations, message_id: str, after: str) -> tuple[Stored, list[tuple[str, Part]]]:
    stored = operations.loaded(message_id)
    prefix = joined(message_id) + SEPARATOR
    found = PARTS.scan(operations.transaction, after, PARTS_A_READ_MAX)
    return stored, [(key, part) for key, part in found if key.startswith(prefix)]


def _last(stored: Stored, chunks: int) -> Part:
    record = stored.record
    timestamp, message_id = utc_text(record.ended_us * 1000), record.message_id
    try:
        result = result_of(stored)
    except MessageFailed as failed:
        last = failed.error_history[-1] if failed.error_history else {"error_type": failed.state, "error": ""}
        error = {"type": last["error_type"] or failed.state, "message": last["error"] or str(failed)}
        return Part(message_id, "error", timestamp, attempt=record.attempt, error=error)
    if chunks:
        return Part(
            message_id,
            "stream_complete",
            timestamp,
            attempt=record.attempt,
            result=result,
            total_chunks=chunks,
        )
    return Part(message_id, "result", timestamp, attempt=record.attempt, result=result)
