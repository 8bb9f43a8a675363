"""Dead letters: list, show, replay, purge."""

import asyncio
import base64
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, Unpack

import msgspec

from postroom.calls.fields import LETTERS_MAX
from postroom.calls.submit import AttemptError
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.core.times import epoch_ns_of, parse_utc, utc_text
from postroom.engine.messages import checked_message_id, decode_body, error_history, fields_of, message_of
from postroom.engine.rules import bodies
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, UnknownTask, WrongState, clipped, shown
from postroom.message import Record, Stored

if TYPE_CHECKING:
    from postroom.engine.commits import Commits

Ids: TypeAlias = list[str]
Letters: TypeAlias = "list[DeadLetter]"

LETTERS_BYTES_MAX = 32 * 1024 * 1024  # of payloads in one list, and one more payload
LOOKED_A_READ = 500
MAX_RETRIES_EXCEEDED = "Max retries exceeded"


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that no worker gets again unless it is replayed."""

    message_id: str
    original_message: dict[str, Any]
    failure_reason: str
    error_history: list[AttemptError]
    can_replay: bool
    """Whether a replay can run the message; a quarantined one is replayed only by its id."""
    dlq_timestamp: str
    state: str = "DEAD_LETTER"
    original_bytes: bytes = b""
    """The stored bytes of a message that cannot be decoded."""


class Filters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters to return. None means any."""

    org_id: str | None = None
    type: str | None = None
    error_type: str | None = None
    since: Any = None
    until: Any = None
    limit: int = 100
    after: str | None = None


class LetterFilters(TypedDict, total=False):
    """As `Filters`, for the callers of `DeadLetters`."""

    org_id: str | None
    type: str | None
    error_type: str | None
    since: datetime | str | None
    until: datetime | str | None
    limit: int
    after: str | None


class DeadLetters:
    """`engine.dlq`."""

    def __init__(self, commits: "Commits") -> None:
        self._commits = commits

    async def list(self, /, **filters: Unpack[LetterFilters]) -> Letters:
        """Dead letters by acceptance: org_id, type, error_type, since, until, limit."""
        wanted = checked_filters(filters)
        return await self._commits.read(lambda operations: letters(operations, wanted))

    async def show(self, message_id: str) -> DeadLetter:
        """One dead letter. Raises `UnknownTask`, or `WrongState` when the message is none."""
        return await self._commits.read(lambda operations: letter_by_id(operations, message_id))

    async def replay(
        self,
        /,
        message_ids: Iterable[str] | None = None,
        dry_run: bool = False,
        priority: int | None = None,
        rate_per_s: float | None = None,
        **filters: Unpack[LetterFilters],
    ) -> Ids:
        """Queue dead letters again, each as a new attempt with all its retries; returns their ids.

        Without ids, the filters choose, and quarantined messages stay. `dry_run` only returns the ids.
        """
        if priority is not None and (type(priority) is not int or not 0 <= priority <= 3):  # noqa: PLR2004
            raise InvalidMessage(f"priority must be a whole number from 0 to 3, not {shown(priority)}")
        if rate_per_s is not None and (type(rate_per_s) not in (int, float) or not rate_per_s > 0):
            raise InvalidMessage(f"rate_per_s must be a positive number, not {shown(rate_per_s)}")
        chosen = await self._chosen(message_ids, filters, replayed=True)
        if dry_run:
            return chosen
        for message_id in chosen:
            await self._commits.write(partial(_replay, message_id=message_id, priority=priority))
            if rate_per_s is not None:
                await asyncio.sleep(1 / rate_per_s)
        return chosen

    async def purge(
        self,
        /,
        message_ids: Iterable[str] | None = None,
        dry_run: bool = False,
        **filters: Unpack[LetterFilters],
    ) -> Ids:
        """Forget dead letters; returns their ids."""
        chosen = await self._chosen(message_ids, filters, replayed=False)
        if not dry_run:
            for message_id in chosen:
                await self._commits.control(partial(_forget, message_id=message_id))
        return chosen

    async def _chosen(
        self, message_ids: Iterable[str] | None, filters: LetterFilters, *, replayed: bool
    ) -> Ids:
        if message_ids is not None:
            if isinstance(message_ids, str):
                message_ids = [message_ids]
            if not isinstance(message_ids, Iterable):
                raise InvalidMessage(f"message_ids must be a list of ids, not {shown(message_ids)}")
            given = dict.fromkeys(map(checked_message_id, message_ids))  # a repeated id counts once
            return [await self._commits.read(partial(_checked_id, message_id=one)) for one in given]
        wanted = checked_filters(filters)
        found = await self._commits.read(lambda operations: letters(operations, wanted, None))
        return [
            letter.message_id
            for letter in found
            if not replayed or (letter.can_replay and letter.state == "DEAD_LETTER")
        ]


def _replay(operations: Operations, message_id: str, priority: int | None) -> None:
    operations.replay(message_id, priority)


def _checked_id(operations: Operations, message_id: str) -> str:
    return letter_by_id(operations, message_id, None).message_id


def _forget(operations: Operations, message_id: str) -> None:
    letter_by_id(operations, message_id, None)
    operations.forget([operations.loaded(message_id).record])


def checked_filters(filters: Mapping[str, Any]) -> Filters:
    """Filters as the caller gave them, checked."""
    try:
        wanted = msgspec.convert(filters, Filters)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"a filter of dead letters does not fit: {clipped(error)}") from None
    if not 1 <= wanted.limit <= LETTERS_MAX:
        raise InvalidMessage(f"limit must be from 1 to {LETTERS_MAX}, not {wanted.limit}")
    return wanted


class FoundLetters(NamedTuple):
    """Dead letters that match the filters, and where the search stopped."""

    letters: list[DeadLetter]
    last: str
    """The id of the last dead letter that was looked at; empty when it was the last one of all."""


class _Payloads:
    """Reads payloads and counts their bytes."""

    def __init__(self, read_value: ReadValue) -> None:
        self._read_value = read_value
        self.size = 0

    def __call__(self, data: bytes) -> Any:
        self.size += len(data)
        return self._read_value(data)


def letters(
    operations: Operations, wanted: Filters, read_value: ReadValue | None = decoded_value
) -> list[DeadLetter]:
    """Dead letters by acceptance."""
    return search(operations, wanted, read_value=read_value).letters


def search(
    operations: Operations,
    wanted: Filters,
    looked_max: int | None = None,
    read_value: ReadValue | None = decoded_value,
) -> FoundLetters:
    """Dead letters by acceptance. The search stops after `looked_max` of them, or with enough payload bytes.

    Without `read_value`, payloads are not read.
    """
    found: list[DeadLetter] = []
    looked, payloads = 0, None if read_value is None else _Payloads(read_value)
    since_us, until_us = _us(wanted.since), _us(wanted.until)
    after = 0 if wanted.after is None else operations.loaded(wanted.after).record.seq
    while records := operations.dead_letters(wanted.org_id, after, LOOKED_A_READ):
        for record in records:
            is_early, is_late = record.ended_us < since_us, 0 < until_us < record.ended_us
            stored = None if is_early or is_late else operations.loaded(record.message_id)
            if stored is not None and _fits(wanted, stored):
                found.append(_letter(operations, stored, payloads))
            looked += 1
            is_full = payloads is not None and payloads.size >= LETTERS_BYTES_MAX
            if len(found) == wanted.limit or looked == looked_max or is_full:
                return FoundLetters(found, record.message_id)
        after = records[-1].seq
    return FoundLetters(found, "")


def _fits(wanted: Filters, stored: Stored) -> bool:
    """Whether the type and the error type of a dead letter match the filters."""
    types = {entry["error_type"] for entry in error_history(stored)[-1:]}
    return wanted.type in (None, stored.envelope.type) and (
        wanted.error_type is None or wanted.error_type in types
    )


def _us(moment: datetime | str | None) -> int:
    if moment is None:
        return 0
    value = parse_utc(moment) if isinstance(moment, str) else moment
    if not isinstance(value, datetime):
        raise InvalidMessage(f"since and until must be times, not {shown(moment)}")
    return epoch_ns_of(value) // 1000


def letter_by_id(
    operations: Operations, message_id: str, read_value: ReadValue | None = decoded_value
) -> DeadLetter:
    """One dead letter. Raises `UnknownTask`, or `WrongState` when the message is none."""
    stored = operations.loaded(message_id)
    if stored.record.state not in ("DEAD_LETTER", "QUARANTINED"):
        state = stored.record.state
        raise WrongState(
            message_id, "replay", state, f"message {shown(message_id)} is not a dead letter: it is {state}"
        )
    return _letter(operations, stored, read_value)


def _letter(operations: Operations, stored: Stored, read_value: ReadValue | None) -> DeadLetter:
    record = stored.record
    original = original_message(operations, stored, read_value)
    return DeadLetter(
        message_id=record.message_id,
        original_message=original or {},
        failure_reason=_reason(record, stored),
        error_history=error_history(stored),
        can_replay=original is not None,
        dlq_timestamp=utc_text(record.ended_us * 1000),
        state=record.state,
        original_bytes=b"" if original is not None else stored.envelope.payload,
    )


def _reason(record: Record, stored: Stored) -> str:
    errors = [event for event in stored.history if event.error]
    last = errors[-1] if errors else None
    if record.state == "QUARANTINED":
        return f"Poison: {last.error if last else 'quarantined'}"
    if record.retries > record.max_retries > 0 or last is None:
        return MAX_RETRIES_EXCEEDED
    if record.retries > record.max_retries and not last.error_type:
        return MAX_RETRIES_EXCEEDED
    return f"{last.error_type}: {last.error}"


def original_message(
    operations: Operations, stored: Stored, read_value: ReadValue | None = decoded_value
) -> dict[str, Any] | None:
    """The fields of a message as it was submitted; None when its bytes cannot be decoded.

    Without `read_value`, the payload and a context that is stored apart are not read.
    """
    try:
        body = decode_body(stored.envelope.payload)
        payload = context = None
        if read_value is not None:
            payload = read_value(bodies.payload_of(operations.transaction, body))
            stored_context = bodies.context_of(operations.transaction, body)
            context = None if stored_context is None else read_value(stored_context)
    except (msgspec.DecodeError, UnknownTask):
        return None
    envelope = stored.envelope
    return fields_of(
        message_of(stored.record, envelope.type, envelope.parent_message_id, body, payload, context)
    )


def as_json(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter for people and for HTTP."""
    fields: dict[str, Any] = msgspec.to_builtins(letter, builtin_types=(bytes, msgspec.Raw))
    raw = fields.pop("original_bytes")
    if raw:
        fields["original_bytes"] = base64.b64encode(raw).decode()
    return fields
