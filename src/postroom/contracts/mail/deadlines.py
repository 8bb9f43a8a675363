"""Deadlines of mailboxes, letters, delays and waiting fetches, the earliest first."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

WAITS_TIDIED_FROM = 1_024  # number of wait deadlines from which those of ended waits are dropped

Kind = Literal["box", "letter", "delayed", "wait"]


class Deadline(NamedTuple):
    """`number` is that of a letter or of a wait."""

    due_ns: int
    kind: Kind
    serial: int
    number: int


class Deadlines:
    """Two heaps. Waits have their own, because most of them end before their deadline."""

    def __init__(self) -> None:
        self.is_waiting: Callable[[int, int], bool] = lambda _serial, _number: True
        """Whether a wait, by mailbox and number, has not ended."""
        self._deadlines: list[Deadline] = []
        self._waits: list[Deadline] = []
        self._tidy_at = WAITS_TIDIED_FROM

    def add(self, due_ns: int, kind: Kind, serial: int, number: int = 0) -> None:
        heappush(self._deadlines, Deadline(due_ns, kind, serial, number))

    def add_wait(self, due_ns: int, serial: int, number: int) -> None:
        if len(self._waits) >= self._tidy_at:
            self._tidy_waits()
        heappush(self._waits, Deadline(due_ns, "wait", serial, number))

    def _tidy_waits(self) -> None:
        self._waits = [wait for wait in self._waits if self.is_waiting(wait.serial, wait.number)]
        heapify(self._waits)
        self._tidy_at = max(WAITS_TIDIED_FROM, 2 * len(self._waits))

    def is_due(self, now_ns: int) -> bool:
        return self._due_heap(now_ns) is not None

    def pop_due(self, now_ns: int) -> Deadline | None:
        heap = self._due_heap(now_ns)
        return heappop(heap) if heap is not None else None

    def _due_heap(self, now_ns: int) -> list[Deadline] | None:
        """The heap with the earliest deadline that is over."""
        found: list[Deadline] | None = None
        for heap in (self._deadlines, self._waits):
            if heap and heap[0].due_ns <= now_ns and (found is None or heap[0] < found[0]):
                found = heap
        return found
