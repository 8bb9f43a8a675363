"""The parts of an answer in the order of reading: acknowledgment, progress and chunks, then the last part.

Rule 1: a reader has a position. Reading on from a position gives every later part once.
Rule 2: every part has a position of its own, the last part included.
"""

import re
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from postroom.core.agents import Cursor, joined_chunks, judge, moved
from postroom.core.lifecycle import lifecycle
from postroom.core.times import utc_text
from postroom.engine.messages import result_of
from postroom.engine.rules.cells import PARTS, SEPARATOR, Part, joined
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, MessageFailed, UnknownTask
from postroom.message import Record, Stored, org_of

PART_CELLS_A_READ_MAX: Final = 50  # of up to `PARTS_A_COMMIT_MAX` parts each
END: Final = ".end"
UNDECODABLE: Final = (msgspec.DecodeError, RecursionError)
_POSITION: Final = re.compile(r"\d{1,9}(?:\.\d{1,9}){3}", re.ASCII)


class Position(msgspec.Struct, frozen=True):
    """How far a reader has come."""

    acknowledged: int = 0
    """The attempt whose acknowledgment was read last."""
    attempt: int = 0
    """The attempt of the last part, and the index of the next part."""
    index: int = 0
    chunks: int = 0
    """Chunks of that attempt so far."""
    is_end: bool = False
    """Whether the last part was read."""

    @property
    def text(self) -> str:
        """The position as one word, for `parse_position`."""
        end = END if self.is_end else ""
        return f"{self.acknowledged}.{self.attempt}.{self.index}.{self.chunks}{end}"

    @property
    def cursor(self) -> Cursor:
        """The position inside its attempt."""
        return Cursor(self.attempt, self.index, self.chunks)


def parse_position(text: str) -> Position:
    """The position that `Position.text` gave."""
    numbers = text.removesuffix(END)
    if _POSITION.fullmatch(numbers) is None:
        raise InvalidMessage(f"{text!r} is not the id of a part of an answer")
    acknowledged, attempt, index, chunks = map(int, numbers.split("."))
    return Position(acknowledged, attempt, index, chunks, text.endswith(END))


def read_on(
    operations: Operations, message_id: str, position: Position
) -> tuple[list[tuple[Position, Part]], bool]:
    """The parts after a position, each with the next position, and whether the answer is complete."""
    record = operations.transaction.records.get(message_id)
    if record is None or not org_of(record.queue):
        raise UnknownTask(message_id, f"there is no message {message_id!r}")
    if position.is_end:
        return [], True
    if record.attempt < max(position.acknowledged, position.attempt):
        position = Position()  # the position is of an earlier message with this id, or invented
    try:
        return _read_on(operations, record, position)
    except UNDECODABLE as error:
        return [(replace(position, is_end=True), damaged_answer(record, error))], True


def _read_on(
    operations: Operations, record: Record, position: Position
) -> tuple[list[tuple[Position, Part]], bool]:
    message_id = record.message_id
    parts: list[tuple[Position, Part]] = []
    if record.attempt > position.acknowledged:
        position = replace(position, acknowledged=record.attempt)
        timestamp = utc_text(record.claimed_us * 1000)
        parts.append((position, Part(message_id, "acknowledgment", timestamp, attempt=record.attempt)))
    found, rest = _stored_parts(operations, message_id, position.cursor, record.attempt)
    for index, part in found:
        after = moved(position.cursor, part.attempt, index, is_chunk=part.chunk_index is not None)
        position = Position(position.acknowledged, after.attempt, after.index, after.chunks)
        parts.append((position, part))
    is_complete = record.state in lifecycle.ENDED and rest != "more"
    if is_complete and rest == "gap":
        parts.append((replace(position, is_end=True), _missing(record, position)))
    elif is_complete:
        chunks = position.chunks if position.attempt == record.attempt else 0
        last = last_part(operations.loaded(message_id), chunks)
        parts.append((replace(position, is_end=True), last))
    return parts, is_complete


def _stored_parts(
    operations: Operations, message_id: str, cursor: Cursor, newest: int
) -> tuple[list[tuple[int, Part]], Literal["none", "more", "gap"]]:
    """The stored parts of the newest attempt after a cursor, each with its index, and what follows them.

    Parts are stored in order. A gap means that the store is damaged, so later parts are not returned.
    """
    prefix = joined(message_id) + SEPARATOR
    is_begun = cursor.attempt == newest and cursor.index
    after = joined(message_id, newest, cursor.index - 1) if is_begun else joined(message_id, newest)
    found: list[tuple[int, Part]] = []
    cells = PARTS.scan(operations.transaction, after, PART_CELLS_A_READ_MAX)
    own = [(key, parts) for key, parts in cells if key.startswith(prefix)]
    for key, parts in own:
        attempt, last = map(int, key.split(SEPARATOR)[1:])
        for index, part in enumerate(parts, last - len(parts) + 1):
            verdict = judge(cursor, attempt, index)
            if verdict == "gap":
                return found, "gap"
            if verdict != "repeated":
                cursor = moved(cursor, attempt, index, is_chunk=part.chunk_index is not None)
                found.append((index, part))
    return found, "more" if len(own) == PART_CELLS_A_READ_MAX else "none"


def _missing(record: Record, position: Position) -> Part:
    """The last part of an answer with missing chunks."""
    text = f"parts of the answer are missing from index {position.index} of attempt {record.attempt} on"
    error = {"type": "ChunksMissing", "message": text}
    timestamp = utc_text(record.ended_us * 1000)
    return Part(record.message_id, "error", timestamp, attempt=record.attempt, error=error)


def damaged_answer(record: Record, error: Exception) -> Part:
    """The last part of an answer that cannot be decoded. A damaged answer must not hold up the others."""
    text = f"the stored answer of message {record.message_id} cannot be decoded: {error}"
    timestamp = utc_text((record.ended_us or record.claimed_us) * 1000)
    said = {"type": "AnswerDamaged", "message": text}
    return Part(record.message_id, "error", timestamp, attempt=record.attempt, error=said)


def last_part(stored: Stored, chunks: int) -> Part:
    """The last part of the answer of a message that has ended."""
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


def whole_answer(operations: Operations, message_id: str) -> Any:
    """The result of a message that has ended, or the joined chunks of its last attempt.

    Raises `MessageFailed`.
    """
    stored = operations.loaded(message_id)
    result, attempt = result_of(stored), stored.record.attempt
    prefix = joined(message_id, attempt)
    first = operations.transaction.cells.page(PARTS.name, prefix, 1)
    if not any(key.startswith(prefix) for key, _ in first):
        return result  # most messages have no parts
    chunks, position, is_complete = [], Position(), False
    while not is_complete:
        found, is_complete = read_on(operations, message_id, position)
        position = found[-1][0] if found else position
        chunks += [
            part.chunk for _, part in found if part.chunk_index is not None and part.attempt == attempt
        ]
    return joined_chunks(chunks) if chunks else result
