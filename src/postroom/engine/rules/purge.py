"""Retention: messages, idempotency keys, events and small values are forgotten after their time.

Rule 1: reads find what has passed its retention. Only the removal itself commits, a few messages at a time
        with a rest after each commit, so claims do not wait for it.
Rule 2: one process purges a store at a time.
Rule 3: every commit looks again: a message that was replayed meanwhile stays.
Rule 4: damaged values of one organization stay. They keep nothing of the others.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.rules.cells import (
    CIRCUITS,
    GOALS,
    KEY_ENDS,
    KEYS,
    PARTS,
    PURGES,
    RATES,
    SEPARATOR,
    WORKERS,
    Kind,
    PurgeTurn,
)
from postroom.engine.rules.extensions import Forget, on_purge
from postroom.engine.rules.operations import MICROS_PER_S, Operations
from postroom.engine.rules.policy import FAILED_KEPT_FACTOR, KEEP_GOALS_S, Policy
from postroom.errors import UnreadableValue
from postroom.message import Record, org_of
from postroom.stores.base import EVERYTHING, Listing
from postroom.stores.purge import purge_events
from postroom.stores.transaction import Transaction
from postroom.system.log import library_log

_log = library_log("postroom.engine")

T = TypeVar("T")

LOOKED_A_READ: Final = 500
FORGOTTEN_A_COMMIT_MAX: Final = 25
CELLS_A_COMMIT_MAX: Final = 500
EVENTS_A_COMMIT_MAX: Final = 1_000
REST: Final = 2  # a commit of a purge is followed by a rest of this many times its duration
TURN_S: Final = 60.0
QUIET_NS: Final = 3_600 * NANOS_PER_S  # after which an unused breaker, rate limit or worker is forgotten


class Committer(Protocol):
    """What a purge needs of an engine."""

    policy: Policy

    async def read(self, work: Callable[[Operations], T]) -> T:
        """Run `work` on committed values."""

    async def write(self, work: Callable[[Operations], T], *, makes_room: bool = False) -> T:
        """Run `work` and commit it."""


class EnginePurge:
    """Forgets what has passed its retention in one store."""

    def __init__(self, commits: Committer) -> None:
        self._commits = commits
        self._name = os.urandom(8).hex()
        self._purged_to: dict[str, str] = {}
        """Where the functions of `on_purge` continue, by kind of cell."""

    async def run(self) -> None:
        """Forget everything that has passed its retention, unless another process is doing that."""
        if not await self._commits.write(partial(take_turn, name=self._name), makes_room=True):
            return
        await self._records()
        await self._keys()
        await self._events()
        for kind in (CIRCUITS, RATES, WORKERS, GOALS):
            await self._cells(kind)
        for forget in on_purge:
            self._purged_to |= await self._commit(partial(_forget_more, forget=forget, after=self._purged_to))
        await self._commits.write(partial(end_turn, name=self._name), makes_room=True)

    async def _records(self) -> None:
        policy = self._commits.policy
        after: int | None = 0
        while after is not None:
            found, after = await self._commits.read(partial(find_over, policy=policy, after=after))
            for chunk in chunks([record.message_id for record in found], FORGOTTEN_A_COMMIT_MAX):
                await self._forget(chunk)

    async def _forget(self, message_ids: list[str]) -> None:
        """Forget messages. One with damaged values stays, and the others do not stay with it."""
        policy, left = self._commits.policy, message_ids
        try:
            while left:
                left = await self._commit(partial(forget_over, policy=policy, message_ids=left))
        except (UnreadableValue, msgspec.DecodeError) as error:
            if len(left) == 1:
                _log.warning("message %s cannot be forgotten: %s", left[0], error)
                return
            for message_id in left:
                await self._forget([message_id])

    async def _keys(self) -> None:
        keep_s = self._commits.policy.keep_keys_s
        while await self._commits.read(partial(find_old_keys, keep_s=keep_s)):
            await self._commit(partial(forget_old_keys, keep_s=keep_s))

    async def _events(self) -> None:
        keep_s, before = self._commits.policy.keep_events_s, 0
        while (first := await self._commits.read(partial(find_old_event, keep_s=keep_s))) > before:
            before = first  # the newest event stays in every store, so it may be found twice
            await self._commit(partial(forget_old_events, keep_s=keep_s))

    async def _cells(self, kind: Kind[Any]) -> None:
        after, is_more = "", True
        while is_more:
            quiet, after = await self._commits.read(partial(find_quiet, kind=kind, after=after))
            for chunk in chunks(quiet, CELLS_A_COMMIT_MAX):
                await self._commit(partial(forget_quiet, kind=kind, keys=chunk))
            is_more = bool(after)

    async def _commit(self, work: Callable[[Operations], T]) -> T:
        """Commit a part of the purge, keep the turn, and rest."""

        def both(operations: Operations) -> T:
            take_turn(operations, self._name)
            return work(operations)

        loop = asyncio.get_running_loop()
        started = loop.time()
        result = await self._commits.write(both, makes_room=True)
        await asyncio.sleep(REST * (loop.time() - started))
        return result


def chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))


# ---- turns -----------------------------------------------------------------------------------------


def take_turn(operations: Operations, name: str) -> bool:
    """Begin or continue a purge; False while another process purges."""
    transaction = operations.transaction
    now, turn = transaction.steady_ns, PURGES.get(transaction, "")
    if turn is not None and turn.name != name and now < turn.until_ns:
        return False
    PURGES.put(transaction, PurgeTurn(name, now + round(TURN_S * NANOS_PER_S)), "")
    return True


def end_turn(operations: Operations, name: str) -> None:
    """The purge is complete."""
    turn = PURGES.get(operations.transaction, "")
    if turn is not None and turn.name == name:
        PURGES.put(operations.transaction, None, "")


# ---- messages --------------------------------------------------------------------------------------


def find_over(operations: Operations, policy: Policy, after: int) -> tuple[list[Record], int | None]:
    """Messages after number `after` that have passed their retention, and the number to continue from.

    The number is None at the end. Records are in the order of acceptance, so the search ends at the first one
    that is younger than the shortest retention.
    """
    transaction = operations.transaction
    seen = transaction.records.find(Listing(after=after, limit=LOOKED_A_READ))
    found = [record for record in seen if is_over(record, policy, transaction.wall_us)]
    rules = (policy.organization, *policy.organizations.values())
    young_us = transaction.wall_us - min(rule.keep_s for rule in rules) * MICROS_PER_S
    is_end = len(seen) < LOOKED_A_READ or seen[-1].created_us > young_us
    return found, None if is_end else seen[-1].seq


def forget_over(operations: Operations, policy: Policy, message_ids: Sequence[str]) -> list[str]:
    """Forget messages, after another check. Returns those that have too many parts for one commit."""
    transaction = operations.transaction
    records = [record for record in map(transaction.records.get, message_ids) if record is not None]
    over = [record for record in records if is_over(record, policy, transaction.wall_us)]
    room, gone = CELLS_A_COMMIT_MAX, list[Record]()
    for record in over:
        room -= PARTS.drop_under(transaction, record.message_id, limit=room)
        if room <= 0:
            break
        gone.append(record)
    operations.forget(gone)
    return [record.message_id for record in over[len(gone) :]]


def is_over(record: Record, policy: Policy, wall_us: int) -> bool:
    """Whether a message has passed its retention."""
    org_id = org_of(record.queue)
    if not org_id or not record.ended_us:
        return False
    keep_s = policy.organization_of(org_id).keep_s
    if record.state in ("DEAD_LETTER", "QUARANTINED"):
        keep_s = max(policy.keep_dead_s, keep_s)
    elif record.state in ("CANCELLED", "EXPIRED"):
        keep_s *= FAILED_KEPT_FACTOR
    return record.ended_us < wall_us - keep_s * MICROS_PER_S


# ---- keys ------------------------------------------------------------------------------------------


def find_old_keys(operations: Operations, keep_s: float) -> list[str]:
    """Keys of forgotten messages that are too old, in order of their age."""
    before_us = operations.transaction.wall_us - keep_s * MICROS_PER_S
    found = KEY_ENDS.scan(operations.transaction, limit=CELLS_A_COMMIT_MAX)
    return [key for key, _ in found if int(key.partition(SEPARATOR)[0]) < before_us]


def forget_old_keys(operations: Operations, keep_s: float) -> None:
    """Forget the oldest keys of forgotten messages."""
    transaction = operations.transaction
    for entry in find_old_keys(operations, keep_s):
        seen_us, org_id, key = entry.split(SEPARATOR, 2)
        with suppress(msgspec.DecodeError):  # a damaged one stays
            used = KEYS.get(transaction, org_id, key)
            if used is not None and used.seen_us == int(seen_us):  # else the key was used again
                KEYS.put(transaction, None, org_id, key)
        transaction.cells.put(KEY_ENDS.name, entry, None)


# ---- events ----------------------------------------------------------------------------------------


def find_old_event(operations: Operations, keep_s: float) -> int:
    """The number of the oldest event when it may be forgotten; 0 when there is none to forget."""
    transaction = operations.transaction
    outbox = transaction.outbox()
    for event in transaction.events.read(0, 1):
        is_shipped = outbox is None or event.seq <= outbox.shipped
        if is_shipped and event.ts_us < _events_before_us(transaction, keep_s):
            return event.seq
    return 0


def forget_old_events(operations: Operations, keep_s: float) -> None:
    """Forget the oldest events, except those that a shipper still has to take."""
    transaction = operations.transaction
    before_us = _events_before_us(transaction, keep_s)
    purge_events(transaction, EVERYTHING, before_us, EVENTS_A_COMMIT_MAX)


def _events_before_us(transaction: Transaction, keep_s: float) -> int:
    """The time before which events may be forgotten; 0 when they are kept for ever."""
    return round(max(0, transaction.wall_us - keep_s * MICROS_PER_S))


# ---- small values ----------------------------------------------------------------------------------


def find_quiet(operations: Operations, kind: Kind[Any], after: str) -> tuple[list[str], str]:
    """Keys above `after` whose values are unused, and the key to continue from; empty at the end."""
    transaction = operations.transaction
    found, following = kind.sweep(transaction, after, LOOKED_A_READ)
    return [key for key, value in found if _is_quiet(kind, value, transaction)], following


def forget_quiet(operations: Operations, kind: Kind[Any], keys: Sequence[str]) -> None:
    """Forget values that are still unused."""
    transaction = operations.transaction
    for key in keys:
        value = kind.get(transaction, key)
        if value is not None and _is_quiet(kind, value, transaction):
            transaction.cells.put(kind.name, key, None)


def _is_quiet(kind: Kind[Any], value: Any, transaction: Transaction) -> bool:
    if kind is GOALS:
        return bool(value.seen_us < transaction.wall_us - round(KEEP_GOALS_S * MICROS_PER_S))
    if kind is CIRCUITS:
        used_ns = max(value.open_until, value.probe_until, *value.failed_at, 0)
    else:
        used_ns = value.next_ns if kind is RATES else value.seen_ns
    return bool(used_ns < transaction.steady_ns - QUIET_NS)


def _forget_more(operations: Operations, forget: Forget, after: Mapping[str, str]) -> Mapping[str, str]:
    return forget(operations.transaction, after)
