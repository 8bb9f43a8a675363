"""Writes of all requests: shares of the waiting calls, turns of their callers, and merged claims.

Rule 1: when more calls wait than fit into one commit, they have turns, one call at a time.
Rule 2: who has a call that does not fit into a commit has the first turn in the next one.
Rule 3: a token has a share of the waiting calls and of their bytes, and so has an organization. Operators
        have a reserve.
"""

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import CLAIM_MAX
from postroom.contracts.tasks.task_operations import LeasedTask, TaskCall, TaskOperations
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.formats.jsoninput import raw_value
from postroom.errors import Unavailable
from postroom.server.access.registry import Identity
from postroom.server.access.shares import Shares
from postroom.server.access.turns import Owner, Turns, owner_of
from postroom.stores.commit_thread import CommitThread, Submission
from postroom.stores.transaction import Claim

TASK_BYTES = 1_024  # counted per task besides the bytes of its call, for work and memory
TURN_MAX = 256  # calls in one commit
TURN_BYTES_MAX = 4 * 1024 * 1024  # bytes in one commit; a larger call has a commit of its own
WAITING_MAX = 10_000
WAITING_A_TOKEN_MAX = 1_000
WAITING_RESERVE = 1_000
WAITING_BYTES_MAX = 512 * 1024 * 1024
WAITING_BYTES_A_TOKEN_MAX = 64 * 1024 * 1024
WAITING_BYTES_RESERVE = 128 * 1024 * 1024


class _WaitingCall(msgspec.Struct, frozen=True):
    """A call or claim of one request."""

    call: TaskCall | Claim
    identity: Identity
    size: int
    """Bytes counted in the share of its token."""
    work: int
    """Bytes counted in a commit."""


_Waiting: TypeAlias = Submission[_WaitingCall]


class StoreWriter:
    """Runs calls on `tasks` in a thread, many in one commit."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._calls = Shares("calls that wait", WAITING_MAX, WAITING_A_TOKEN_MAX, WAITING_RESERVE)
        self._bytes = Shares(
            "bytes of calls that wait", WAITING_BYTES_MAX, WAITING_BYTES_A_TOKEN_MAX, WAITING_BYTES_RESERVE
        )
        self._closing = False
        self.turns = 0
        """Commits made so far."""
        self._thread = CommitThread(tasks.store, self._commit, _TurnOrder, self._give_back)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.alive

    def submit(
        self, call: TaskCall | Claim, identity: Identity, size: int = TASK_BYTES, *, makes_room: bool = False
    ) -> "asyncio.Future[Any]":
        """Return a future with the result of a call or claim, or its error, after the commit.

        `size` is the bytes counted in the caller's share. `makes_room` marks calls that must also succeed on
        a full disk.
        """
        if self._closing:
            raise Unavailable("the server is stopping: try again soon")
        self._calls.take(identity)
        try:
            self._bytes.take(identity, size)
        except Unavailable:
            self._calls.give_back(identity)
            raise
        work = call.limit * TASK_BYTES if isinstance(call, Claim) else size
        return self._thread.submit(_WaitingCall(call, identity, size, work), makes_room=makes_room)

    def _give_back(self, call: _WaitingCall) -> None:
        self._calls.give_back(call.identity)
        self._bytes.give_back(call.identity, call.size)

    def close(self) -> None:
        """Commit the waiting calls, then end the thread."""
        self._closing = True
        self._thread.close()

    def _commit(self, calls: list[_WaitingCall], makes_room: bool) -> list[Any]:
        """Run calls in their order, then claims."""
        self.turns += 1
        others = {index: one.call for index, one in enumerate(calls) if not isinstance(one.call, Claim)}
        claims = merged(calls) if len(others) < len(calls) else []
        outcomes = self._tasks.run_many([*others.values(), *claims], makes_room=makes_room)
        if not claims:
            return outcomes
        answers = dict(zip(others, outcomes, strict=False))
        for claim, outcome in zip(claims, outcomes[len(others) :], strict=True):
            answers |= claim.divided(outcome)
        return [answers[index] for index in range(len(calls))]


class _TurnOrder:
    """Calls by organization and token, as long as more wait than fit into one commit."""

    def __init__(self) -> None:
        self._waiting: Turns[_Waiting] = Turns()

    def take(self, arrived: list[_Waiting]) -> tuple[list[_Waiting], bool]:
        """As many calls as fit into one commit. Whose call does not fit keeps its turn for the next one."""
        if (
            not self._waiting
            and len(arrived) <= TURN_MAX
            and sum(one.work.work for one in arrived) <= TURN_BYTES_MAX
        ):
            return arrived, False
        for one in arrived:
            self._waiting.add(one.work.identity, one)
        group: list[_Waiting] = []
        left = TURN_BYTES_MAX
        unfit: set[Owner] = set()

        def fits(one: _Waiting) -> bool:
            owner = owner_of(one.work.identity)
            if group and one.work.work > left:
                unfit.add(owner)
            return owner not in unfit

        while len(group) < TURN_MAX and (fitting := self._waiting.take(fits, unfit)) is not None:
            group.append(fitting)
            left -= fitting.work.work
        return group, bool(self._waiting)


class _MergedClaim(msgspec.Struct):
    """One claim for several requests. Payloads stay JSON, because the requests pass them on."""

    terms: Claim
    limits: dict[int, int] = {}
    """How many of the tasks each call gets at most, by its index."""

    def __call__(self, operations: TaskOperations) -> list[LeasedTask]:
        return operations.claim(replace(self.terms, limit=sum(self.limits.values())), raw_value)

    def divided(self, outcome: Any) -> dict[int, Any]:
        """The tasks of each call, the first ones for the first call; or the error of all."""
        if isinstance(outcome, Exception):
            return dict.fromkeys(self.limits, outcome)
        tasks = iter(outcome)
        return {index: [*islice(tasks, limit)] for index, limit in self.limits.items()}


def merged(calls: Sequence[_WaitingCall]) -> list[_MergedClaim]:
    """The claims among the calls: those on equal terms in as few as `CLAIM_MAX` allows."""
    claims: list[_MergedClaim] = []
    latest: dict[Claim, _MergedClaim] = {}
    for index, call in enumerate(one.call for one in calls):
        if isinstance(call, Claim):
            terms = replace(call, limit=0)
            if terms not in latest or sum(latest[terms].limits.values()) + call.limit > CLAIM_MAX:
                latest[terms] = _MergedClaim(terms)
                claims.append(latest[terms])
            latest[terms].limits[index] = call.limit
    return claims
