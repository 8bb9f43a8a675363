"""Dead letters: list, show, replay, purge."""

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, Unpack

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import LETTERS_MAX, NUMBER_MAX, REPLAYED_NAMED_MAX, Name
from postroom.calls.messages import Replayed
from postroom.calls.submit import AttemptError
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.core.times import epoch_ns_of, parse_utc, utc_text
from postroom.engine.messages import (
    body_of,
    checked_message_id,
    decode_body,
    error_history,
    fields_of,
    message_of,
)
from postroom.engine.rules import bodies
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, Unavailable, UnknownTask, WrongState, clipped, shown
from postroom.message import Record, Stored

if TYPE_CHECKING:
    from postroom.engine.commits import Commits

Ids: TypeAlias = list[str]
Letters: TypeAlias = "list[DeadLetter]"

LETTERS_BYTES_MAX = 32 * 1024 * 1024  # of payloads in one list, and one more payload
LOOKED_A_READ = 500
CHANGED_A_COMMIT_MAX = 100  # dead letters that one commit of a replay or a purge changes
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

    org_id: Name | None = None
    type: str | None = None
    error_type: str | None = None
    goal_id: str | None = None
    agent_id: str | None = None
    service: str | None = None
    """The service that the last attempt called, or that the message names."""
    failure: str | None = None
    """Text in the failure reason, in upper or lower case."""
    since: Any = None
    until: Any = None
    limit: int | None = 100
    after: str | None = None


class LetterFilters(TypedDict, total=False):
    """As `Filters`, for the callers of `DeadLetters`."""

    org_id: str | None
    type: str | None
    error_type: str | None
    goal_id: str | None
    agent_id: str | None
    service: str | None
    failure: str | None
    since: datetime | str | None
    until: datetime | str | None
    limit: int | None
    after: str | None


class DeadLetters:
    """`engine.dlq`."""

    def __init__(self, commits: "Commits") -> None:
        self._commits = commits

    async def list(self, /, **filters: Unpack[LetterFilters]) -> Letters:
        """Dead letters by acceptance.

        Filters: org_id, type, error_type, goal_id, agent_id, service, failure, since, until, limit, after.
        """
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
    ) -> Replayed:
        """Queue dead letters again, each as a new attempt with all its retries.

        Without ids, all that match the filters, and quarantined messages stay. Commits have bounded sizes:
        what one has queued stays queued when a later one fails. `dry_run` changes nothing.
        """
        if priority is not None and (type(priority) is not int or not 0 <= priority <= 3):  # noqa: PLR2004
            raise InvalidMessage(f"priority must be a whole number from 0 to 3, not {shown(priority)}")
        if rate_per_s is not None and (type(rate_per_s) not in (int, float) or not rate_per_s > 0):
            raise InvalidMessage(f"rate_per_s must be a positive number, not {shown(rate_per_s)}")
        wanted = _of_change(filters)
        tally = _Tally(wanted.limit, is_named=message_ids is not None)
        async for found in self._pages(message_ids, wanted, 1 if rate_per_s else CHANGED_A_COMMIT_MAX):
            chosen = tally.choose(found)
            if dry_run or not chosen:
                tally.message_ids += chosen
                continue
            try:
                gone = await self._commits.write(partial(_replay, message_ids=chosen, priority=priority))
            except Unavailable as error:
                if not tally.message_ids:
                    raise
                tally.stop(str(error), len(chosen))
                continue
            tally.refused.update(gone.values())
            tally.message_ids += [one for one in chosen if one not in gone]
            if rate_per_s is not None:
                await asyncio.sleep(1 / rate_per_s)
        return tally.outcome()

    async def purge(
        self,
        /,
        message_ids: Iterable[str] | None = None,
        dry_run: bool = False,
        **filters: Unpack[LetterFilters],
    ) -> Ids:
        """Forget dead letters, without ids all that match the filters; returns their ids."""
        purged: Ids = []
        wanted = _of_change(filters)
        async for found in self._pages(message_ids, wanted, CHANGED_A_COMMIT_MAX):
            left = None if wanted.limit is None else wanted.limit - len(purged)
            chosen = [letter.message_id for letter in found[:left]]
            if chosen and not dry_run:
                chosen = await self._commits.control(partial(_forget, message_ids=chosen))
            purged += chosen
        return purged

    async def _pages(
        self, message_ids: Iterable[str] | None, wanted: Filters, size: int
    ) -> AsyncIterator[Letters]:
        """The dead letters that were named, else all that match the filters, a few at a time."""
        if message_ids is not None:
            named = await self._named(message_ids)
            for start in range(0, len(named), size):
                yield named[start : start + size]
            return
        paged = replace(wanted, limit=size)
        place: int | None = None
        while place != 0:
            look = partial(search, wanted=paged, looked_max=LOOKED_A_READ, read_value=None, place=place)
            found = await self._commits.read(look)
            place = found.place
            yield found.letters

    async def _named(self, message_ids: Iterable[str]) -> Letters:
        """The dead letters of these ids. Nothing is changed when one of them is no dead letter."""
        if isinstance(message_ids, str):
            message_ids = [message_ids]
        if not isinstance(message_ids, Iterable):
            raise InvalidMessage(f"message_ids must be a list of ids, not {shown(message_ids)}")
        given = dict.fromkeys(map(checked_message_id, message_ids))  # a repeated id counts once
        return await self._commits.read(
            lambda operations: [letter_by_id(operations, one, None) for one in given]
        )


class _Tally:
    """What a replay has done so far."""

    def __init__(self, limit: int | None, *, is_named: bool) -> None:
        self.message_ids: Ids = []
        self.refused: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._limit = limit
        self._is_named = is_named
        self._stopped = ""

    def choose(self, found: Letters) -> Ids:
        """Those of the dead letters that are replayed; the others are counted."""
        chosen: list[str] = []
        for letter in found:
            if why := refusal_of(letter, is_named=self._is_named):
                self.refused[why] += 1
            elif self._stopped:
                self._left[self._stopped] += 1
            elif self._limit is not None and len(self.message_ids) + len(chosen) >= self._limit:
                self._left[f"beyond the limit of {self._limit}"] += 1
            else:
                chosen.append(letter.message_id)
        return chosen

    def stop(self, why: str, count: int) -> None:
        """A commit failed: its dead letters and all later ones are left."""
        self._stopped = why
        self._left[why] += count

    def outcome(self) -> Replayed:
        return Replayed(
            replayed=len(self.message_ids),
            refused=self.refused.total(),
            left=self._left.total(),
            reasons=dict(self.refused + self._left),
            message_ids=self.message_ids[:REPLAYED_NAMED_MAX],
        )


def refusal_of(letter: DeadLetter, *, is_named: bool) -> str:
    """Why a dead letter is not replayed; empty when it is. A quarantined one has to be named by its id."""
    if not letter.can_replay:
        return "its bytes cannot be decoded"
    is_quarantined = letter.state == "QUARANTINED"
    return "it is quarantined: replay it by its id" if is_quarantined and not is_named else ""


def _replay(operations: Operations, message_ids: Sequence[str], priority: int | None) -> dict[str, str]:
    """Queue dead letters again. Returns the reasons of those that are no dead letters any more, by id."""
    gone = {}
    for message_id in message_ids:
        try:
            operations.replay(message_id, priority)
        except WrongState:
            gone[message_id] = "it was replayed meanwhile"
        except UnknownTask:
            gone[message_id] = "it was purged meanwhile"
    return gone


def _forget(operations: Operations, message_ids: Sequence[str]) -> Ids:
    """Forget dead letters. Returns those that still were dead letters."""
    forgotten: Ids = []
    for message_id in message_ids:
        with suppress(UnknownTask, WrongState):
            letter_by_id(operations, message_id, None)
            operations.forget([operations.loaded(message_id).record])
            forgotten.append(message_id)
    return forgotten


def checked_filters(filters: Mapping[str, Any], limit_max: int = LETTERS_MAX) -> Filters:
    """Filters as the caller gave them, checked."""
    try:
        wanted = msgspec.convert(filters, Filters)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"a filter of dead letters does not fit: {clipped(error)}") from None
    if wanted.limit is not None and not 1 <= wanted.limit <= limit_max:
        raise InvalidMessage(f"limit must be from 1 to {limit_max}, not {wanted.limit}")
    return wanted


def _of_change(filters: LetterFilters) -> Filters:
    """The filters of a replay or a purge, checked. They have no limit unless one is given."""
    return checked_filters({"limit": None, **filters}, NUMBER_MAX)


class FoundLetters(NamedTuple):
    """Dead letters that match the filters, and where the search stopped."""

    letters: list[DeadLetter]
    last: str
    """The id of the last dead letter that was looked at; empty when it was the last one of all."""
    place: int = 0
    """Its number; 0 when it was the last one of all."""


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
    place: int | None = None,
) -> FoundLetters:
    """Dead letters by acceptance. The search stops after `looked_max` of them, or with enough payload bytes.

    Without `read_value`, payloads are not read. It goes on from `place`, which an earlier one returned: the
    dead letter there may be purged meanwhile.
    """
    found: list[DeadLetter] = []
    looked, payloads = 0, None if read_value is None else _Payloads(read_value)
    since_us, until_us = moment_us(wanted.since), moment_us(wanted.until)
    after = place or (0 if wanted.after is None else operations.loaded(wanted.after).record.seq)
    while records := operations.dead_letters(wanted.org_id, after, LOOKED_A_READ):
        for record in records:
            is_early, is_late = record.ended_us < since_us, 0 < until_us < record.ended_us
            stored = None if is_early or is_late else operations.loaded(record.message_id)
            if stored is not None and _fits(wanted, stored):
                found.append(_letter(operations, stored, payloads))
            looked += 1
            is_full = payloads is not None and payloads.size >= LETTERS_BYTES_MAX
            if len(found) == wanted.limit or looked == looked_max or is_full:
                return FoundLetters(found, record.message_id, record.seq)
        after = records[-1].seq
    return FoundLetters(found, "")


def _fits(wanted: Filters, stored: Stored) -> bool:
    """Whether a dead letter matches the filters, except for those of its organization and time."""
    types = {entry["error_type"] for entry in error_history(stored)[-1:]}
    if wanted.type not in (None, stored.envelope.type) or wanted.error_type not in (None, *types):
        return False
    failure = (wanted.failure or "").casefold()
    if failure and failure not in _reason(stored.record, stored).casefold():
        return False
    if wanted.goal_id is wanted.agent_id is wanted.service is None:
        return True
    body = body_of(stored.envelope.payload)
    if body is None:
        return False
    called = [event.detail["service"] for event in stored.history if "service" in event.detail][-1:]
    return (
        wanted.goal_id in (None, body.goal_id)
        and wanted.agent_id in (None, body.agent_id)
        and wanted.service in (None, body.service, *called)
    )


def moment_us(moment: datetime | str | None) -> int:
    """A time as microseconds since the epoch; 0 for None."""
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
