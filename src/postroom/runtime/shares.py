"""Shares: one caller cannot use up a resource that all callers of a server share."""

from postroom.errors import TooMany, Unavailable
from postroom.runtime.agents import Identity

RETRY_AFTER_S = 5.0


class Shares:
    """A resource with `total_max` units: at most `each_max` for one agent, and a reserve for operators.

    Agents together may use `total_max - reserve`. An operator may use all that is left.
    """

    def __init__(self, what: str, total_max: int, each_max: int, reserve: int) -> None:
        self._what = what
        self._total_max = total_max
        self._each_max = each_max
        self._reserve = reserve
        self._by_holder: dict[tuple[str, str], int] = {}
        self.used = 0

    def take(self, identity: Identity, amount: int = 1) -> None:
        """Take units. Raises `TooMany` when the caller's share is used up, `Unavailable` when all are."""
        available = self._total_max
        own = self._by_holder.get(identity.holder, 0) + amount
        if not identity.is_operator:
            available -= self._reserve
            if own > self._each_max:
                raise TooMany(identity.name, self._what, self._each_max, RETRY_AFTER_S)
        if self.used + amount > available:
            raise Unavailable(
                f"the server allows at most {available} {self._what} at a time: try again later"
            )
        self._by_holder[identity.holder] = own
        self.used += amount

    def give_back(self, identity: Identity, amount: int = 1) -> None:
        """Return units that were taken."""
        self.used -= amount
        left = self._by_holder[identity.holder] - amount
        if left:
            self._by_holder[identity.holder] = left
        else:
            del self._by_holder[identity.holder]
