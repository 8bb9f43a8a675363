"""Limits of what one client may do: the rate of its calls, and which of its refused calls become events.

Rule 1: a client that was silent for `BURST_S` may make the calls of that time at once, and always one call.
Rule 2: in one window, at most `each_max` refusals of a client and `all_max` of all clients are events. Others
        are only counted.
Rule 3: at most `clients_max` clients are counted apart. The refusals of further clients have one sum.
Rule 4: the clients of one organization use at most half of both. Those of no organization count as one.
"""

from collections import Counter
from typing import Generic, NamedTuple, TypeVar

BURST_S = 1.0

T = TypeVar("T")


class Allowance(NamedTuple):
    """How many of the calls are allowed, and the state that remains."""

    calls: int
    paid_until_s: float
    """The time up to which the rate is used up."""
    wait_s: float
    """The time until one more call is allowed."""


def allowance(paid_until_s: float, rate: float, calls: int, now_s: float) -> Allowance:
    """The calls that a caller with this rate may make now, up to `calls`."""
    burst_s = max(BURST_S, 1 / rate)
    begin_s = max(paid_until_s, now_s - burst_s)
    allowed = min(calls, int((now_s - begin_s) * rate + 1e-9))  # a float may lack a little of a whole call
    paid_until_s = begin_s + allowed / rate
    return Allowance(allowed, paid_until_s, max(0.0, paid_until_s + 1 / rate - now_s))


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
        self._noted: Counter[str] = Counter()
        self._noted_of: Counter[str] = Counter()
        self._sums: dict[str | None, RefusalSum[T]] = {}
        self._sums_of: Counter[str] = Counter()

    def add(self, organization: str, client: str, refused: T) -> bool:
        """Count a refusal. Returns whether it becomes an event."""
        if self._noted[client] < self._each_max and _has_room(self._noted_of, organization, self._all_max):
            self._noted[client] += 1
            self._noted_of[organization] += 1
            return True
        key: str | None = client
        if client not in self._sums:
            if _has_room(self._sums_of, organization, self._clients_max):
                self._sums_of[organization] += 1
            else:
                key = None
        before = self._sums.get(key)
        self._sums[key] = RefusalSum(refused, 1 if before is None else before.calls + 1, key is None)
        return False

    def end(self) -> list[RefusalSum[T]]:
        """The sums of the window, which begins again."""
        sums = [*self._sums.values()]
        for counts in (self._noted, self._noted_of, self._sums, self._sums_of):
            counts.clear()
        return sums


def _has_room(counts: Counter[str], organization: str, all_max: int) -> bool:
    return counts.total() < all_max and counts[organization] < all_max // 2
