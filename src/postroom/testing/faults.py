"""A store whose writes fail as planned."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from postroom.errors import Unavailable
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

T = TypeVar("T")

LOST_ANSWER = "the write was committed, and its answer is lost"

Fault = Literal["none", "crash", "lost_answer", "duplicate", "delay", "lost_wakeup"]
"""What can happen to a write.

`crash`: it fails before the commit, so nothing is stored. `lost_answer`: it is committed, and the caller gets
an error. `duplicate`: it runs twice. `delay`: it takes long. `lost_wakeup`: it wakes no waiting claim.
"""


class Crashed(Unavailable):
    """Raised by a `FaultyStore` instead of an answer."""


class FaultyStore(Store):
    """A store whose writes fail as planned: the first write has the first fault, and so on.

    A plan may be endless, such as a generator of random choices. After its end nothing fails; `inject` adds
    to it. `delay` is called to let time pass, for example `lambda: clock.advance(60)`.

        store = FaultyStore(MemoryStore(), ["none", "lost_answer"])
        tasks = Tasks(store)
    """

    def __init__(
        self, store: Store, plan: Iterable[Fault] = (), *, delay: Callable[[], None] = lambda: time.sleep(0.1)
    ) -> None:
        self.store = store
        self.url = store.url
        self.happened: list[Fault] = []
        """The faults so far, one for each write."""
        self._plan = iter(plan)
        self._injected: list[Fault] = []
        self._delay = delay
        store.on_commit = self._committed

    def _committed(self, transaction: Transaction) -> None:
        if self.on_commit is not None:
            self.on_commit(transaction)

    def inject(self, *faults: Fault) -> None:
        """Add faults for the next writes. The plan continues after them."""
        self._injected += faults

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        fault = self._next_fault()
        if fault == "duplicate":
            self.store.write(work, makes_room=makes_room)
        result: T = self.store.write(_FAULTY.get(fault, _unchanged)(work), makes_room=makes_room)
        if fault == "lost_answer":
            raise Crashed(LOST_ANSWER)
        return result

    def write_many(
        self, works: Sequence[Callable[[Transaction], Any]], *, makes_room: bool = False
    ) -> list[Any]:
        fault = self._next_fault()
        if fault == "duplicate":
            self.store.write_many(works, makes_room=makes_room)
        faulty = [_FAULTY.get(fault, _unchanged)(work) for work in works]
        outcomes = self.store.write_many(faulty, makes_room=makes_room)
        return [Crashed(LOST_ANSWER)] * len(works) if fault == "lost_answer" else outcomes

    def _next_fault(self) -> Fault:
        fault: Fault = self._injected.pop(0) if self._injected else next(self._plan, "none")
        self.happened.append(fault)
        if fault == "delay":
            self._delay()
        return fault

    def read(self, work: Callable[[Transaction], T]) -> T:
        return self.store.read(work)

    def identity(self) -> str:
        return self.store.identity()

    def sync(self) -> None:
        self.store.sync()

    def reopen(self) -> None:
        self.store.reopen()

    def close(self) -> None:
        self.store.close()


def _crashing(work: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    def crash(transaction: Transaction) -> T:
        work(transaction)
        raise Crashed("the process ended before its write was committed")

    return crash


class _AlwaysEmpty(set[str]):
    """The queues to wake after a commit: always empty, so that no waiting claim is woken."""

    def add(self, queue: str, /) -> None:
        """Ignore the queue."""

    def update(self, *_: Iterable[str]) -> None:
        """Ignore the queues."""


def _without_wakeup(work: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    def run(transaction: Transaction) -> T:
        ready, transaction.ready = transaction.ready, _AlwaysEmpty()
        try:
            return work(transaction)
        finally:
            transaction.ready = ready

    return run


def _unchanged(work: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
    return work


_FAULTY: dict[Fault, Callable[[Callable[[Transaction], Any]], Callable[[Transaction], Any]]] = {
    "crash": _crashing,
    "lost_wakeup": _without_wakeup,
}
