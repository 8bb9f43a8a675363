"""The parts of an answer, as a reader meets them: acknowledgment, progress and chunks, then the end.

Rule 1: a reader has a position. Reading on from a position gives every later part once, and the last part
        again when the answer is complete.
"""

import re
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.contracts.engine.cells import PARTS, SEPARATOR, Part, joined
from postroom.contracts.engine.operations import Operations
from postroom.contracts.engine.results import result_of
from postroom.core import lifecycle
from postroom.core.times import utc_text
from postroom.errors import InvalidMessage, MessageFailed
from postroom.message import Stored

PARTS_A_READ_MAX: Final = 1_000
_POSITION: Final = re.compile(r"\d{1,9}(?:\.\d{1,9}){3}", re.ASCII)


class Position(msgspec.Struct, frozen=True):
    """How far a reader has come."""

    acknowledged: int = 0
    """The attempt whose acknowledgment was read last."""
    attempt: int = 0
    """The attempt and the number of the last part."""
    index: int = 0
    chunks: int = 0
    """Chunks so far."""

    @property
    def text(self) -> str:
        """The position as one word, for `parse_position`."""
        return f"{self.acknowledged}.{self.attempt}.{self.index}.{self.chunks}"


def parse_position(text: str) -> Position:
    """The position that `Position.text` gave."""
    if _POSITION.fullmatch(text) is None:
        raise InvalidMessage(f"{text!r} is not the id of a part of an answer")
    return Position(*map(int, text.split(".")))


def read_on(
    operations: Operations, message_id: str, position: Position
) -> tuple[list[tuple[Position, Part]], bool]:
    """The parts behind a position, each with the position after it; and whether the answer is complete."""
    stored = operations.loaded(message_id)
    record = stored.record
    parts: list[tuple[Position, Part]] = []
    if record.attempt > position.acknowledged:
        position = replace(position, acknowledged=record.attempt)
        timestamp = utc_text(record.claimed_us * 1000)
        parts.append((position, Part(message_id, "acknowledgment", timestamp, attempt=record.attempt)))
    prefix = joined(message_id) + SEPARATOR
    after = joined(message_id, position.attempt, position.index)
    found = PARTS.scan(operations.transaction, after, PARTS_A_READ_MAX)
    own = [(key, part) for key, part in found if key.startswith(prefix)]
    for key, part in own:
        attempt, index = map(int, key.split(SEPARATOR)[1:])
        chunks = position.chunks if part.chunk_index is None else part.chunk_index + 1
        position = Position(position.acknowledged, attempt, index, chunks)
        parts.append((position, part))
    is_complete = record.state in lifecycle.ENDED and len(own) < PARTS_A_READ_MAX
    if is_complete:
        parts.append((position, _last(stored, position.chunks)))
    return parts, is_complete


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
