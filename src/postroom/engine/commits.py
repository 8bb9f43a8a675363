"""The reads and commits of one engine, from coroutines."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.message import Stored
from postroom.stores.commit_thread import CommitThread
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

T = TypeVar("T")
Work: TypeAlias = Callable[[Transaction], Any]


class Commits:
    """Runs operations under the rules of the engine."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.policy = policy

        def commit(works: list[Work], makes_room: bool) -> list[Any]:
            return store.write_many(works, makes_room=makes_room)

        self._thread = CommitThread(store, commit)
        self._cycles = CommitThread(store, commit) if store.capabilities.is_concurrent else self._thread
        """Commits of workers: submits do not wait for them where the store allows it."""

    async def write(self, work: Callable[[Operations], T], *, makes_room: bool = False) -> T:
        """Run operations in a transaction, and return once it is committed."""
        policy = self.policy
        committed: asyncio.Future[T] = self._thread.submit(
            lambda transaction: work(Operations(transaction, policy)), makes_room=makes_room
        )
        return await committed

    async def control(self, work: Callable[[Operations], T]) -> T:
        """As `write`, for the order of an operator, which also succeeds on a full disk."""
        policy = self.policy
        return await self._thread.control(lambda transaction: work(Operations(transaction, policy)))

    async def write_raw(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        """As `write`, for work that needs no operations."""
        committed: asyncio.Future[T] = self._thread.submit(work, makes_room=makes_room)
        return await committed

    def write_cycle(
        self, work: Callable[[Transaction], T], *, makes_room: bool = False
    ) -> "asyncio.Future[T]":
        """Commit the outcomes and claims of a worker."""
        return self._cycles.submit(work, makes_room=makes_room)

    async def read(self, work: Callable[[Operations], T]) -> T:
        """Run operations on one consistent committed state."""
        policy = self.policy
        return await self._thread.read(lambda transaction: work(Operations(transaction, policy)))

    async def load(self, message_id: str) -> Stored:
        """Everything about one message. Raises `UnknownTask`."""
        return await self.read(lambda operations: operations.loaded(message_id))

    def close(self) -> None:
        """Commit what waits, and end the threads. The next call starts them again."""
        self._thread.close()
        self._cycles.close()
