"""Which refused calls become events of their own, and which are only counted.

Rule 1: in one window, at most `each_max` refusals of a client and `all_max` of all clients are events.
Rule 2: at most `clients_max` clients are counted apart. The refusals of further clients have one sum.
"""

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RefusalSum(NamedTuple, Generic[T]):
    """The refusals of a client in one window that are not events of their own."""

    last: T
    calls: int
    is_shared: bool
    """Whether the count is that of several clients. `last` is then a refusal of one of them."""


class RefusalWindow(Generic[T]):
    """Counts the refusals of one period of time."""

    def __init__(self, *, each_max: int, all_max: int, clients_max: int) -> None:
        self._each_max = each_max
        self._all_max = all_max
        self._clients_max = clients_max
        self._noted: dict[str, int] = {}
        self._sums: dict[str | None, RefusalSum[T]] = {}
        self._all = 0

    def add(self, client: str, refused: T) -> bool:
        """Count a refusal. Returns whether it becomes an event."""
        noted = self._noted.get(client, 0)
        if noted < self._each_max and self._all < self._all_max:
            self._noted[client] = noted + 1
            self._all += 1
            return True
        key = client if client in self._sums or len(self._sums) < self._clients_max else None
        before = self._sums.get(key)
        self._sums[key] = RefusalSum(refused, 1 if before is None else before.calls + 1, key is None)
        return False

    def end(self) -> list[RefusalSum[T]]:
        """The sums of the window, which begins again."""
        sums = [*self._sums.values()]
        self._noted.clear()
        self._sums.clear()
        self._all = 0
        return sums
