"""Turns: organizations take turns on a shared resource, and so do the tokens of each.

Rule 1: when work of several organizations waits, each gets one turn. So do the tokens of an organization in
        its turns. A token without an organization has turns of its own.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from postroom.server.access.registry import Identity
from postroom.server.access.shares import ORGANIZATION_PARTS, lower

T = TypeVar("T")

Holder: TypeAlias = tuple[str, str]
Owner: TypeAlias = str | Holder
"""An organization, or a token without one."""


class TurnTaker(Protocol):
    """Who calls: the owner of a token, or a connection."""

    @property
    def org(self) -> str: ...

    @property
    def holder(self) -> Holder: ...


def owner_of(identity: TurnTaker) -> Owner:
    """Who has a turn."""
    return identity.org or identity.holder


class Turns(Generic[T]):
    """Waiting items by organization and token. The next in turn comes first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, dict[Holder, deque[T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, identity: TurnTaker, item: T) -> None:
        """Queue an item after the other work of its token."""
        tokens = self._waiting.setdefault(owner_of(identity), {})
        tokens.setdefault(identity.holder, deque()).append(item)

    def take(self, fits: Callable[[T], bool], without: Collection[Owner] = ()) -> T | None:
        """Remove and return the next item in turn that fits; None when nothing fits.

        Items that do not fit keep their turn. The owners in `without` are skipped.
        """
        for owner, tokens in self._waiting.items():
            if owner in without:
                continue
            holder = next((holder for holder, items in tokens.items() if fits(items[0])), None)
            if holder is not None:
                return self._removed(owner, holder)
        return None

    def _removed(self, owner: Owner, holder: Holder) -> T:
        tokens = self._waiting.pop(owner)
        items = tokens.pop(holder)
        item = items.popleft()
        if items:
            tokens[holder] = items  # after the other tokens
        if tokens:
            self._waiting[owner] = tokens  # after the other organizations
        return item


class _Work(NamedTuple):
    identity: Identity
    call: Callable[[], Any]
    future: "asyncio.Future[Any]"


class SharedThreads:
    """Threads that work for all callers in turns. One token and one organization get only a part of them."""

    def __init__(self, name: str, threads: int, a_token_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._token_max = a_token_max
        self._organization_max = max(1, threads // ORGANIZATION_PARTS)
        self._waiting: Turns[_Work] = Turns()
        self._by_token: Counter[Holder] = Counter()
        self._by_owner: Counter[Owner] = Counter()
        self._running = 0

    def run(self, identity: Identity, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a call in a thread when it has its turn."""
        work = _Work(identity, call, self._loop.create_future())
        self._waiting.add(identity, work)
        self._begin()
        return work.future

    def run_for_server(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a call of the server itself, which does not wait for a turn."""
        return self._loop.run_in_executor(self._pool, call)

    def _begin(self) -> None:
        while self._running < self._threads and (work := self._waiting.take(self._may_run)) is not None:
            if work.future.done():  # its caller has left
                continue
            self._by_token[work.identity.holder] += 1
            self._by_owner[owner_of(work.identity)] += 1
            self._running += 1
            self.run_for_server(work.call).add_done_callback(partial(self._end, work))

    def _may_run(self, work: _Work) -> bool:
        holder, owner = work.identity.holder, owner_of(work.identity)
        return self._by_token[holder] < self._token_max and (
            not work.identity.org or self._by_owner[owner] < self._organization_max
        )

    def _end(self, work: _Work, ran: "asyncio.Future[Any]") -> None:
        lower(self._by_token, work.identity.holder, 1)
        lower(self._by_owner, owner_of(work.identity), 1)
        self._running -= 1
        error = ran.exception()
        if not work.future.done():
            if error is None:
                work.future.set_result(ran.result())
            else:
                work.future.set_exception(error)
        self._begin()

    def close(self) -> None:
        """Finish the running calls, and end the threads."""
        self._pool.shutdown()
