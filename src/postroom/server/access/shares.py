"""Shares: neither one caller nor one organization can use up what all callers of a server share."""

from collections import Counter
from typing import Any

from postroom.errors import TooMany, Unavailable
from postroom.server.access.registry import Identity

RETRY_AFTER_S = 5.0
ORGANIZATION_PARTS = 2
"""All agents share a resource in this many equal parts. One organization gets at most one of them."""


class Shares:
    """A resource with `total_max` units, of which `reserve` are for operators.

    One agent may use `each_max`, one organization half of what agents together may use, and an operator all
    that is left.
    """

    def __init__(self, what: str, total_max: int, each_max: int, reserve: int) -> None:
        self._what = what
        self._total_max = total_max
        self._each_max = each_max
        self._reserve = reserve
        self._organization_max = max(1, (total_max - reserve) // ORGANIZATION_PARTS)
        self._by_holder: Counter[tuple[str, str]] = Counter()
        self._by_organization: Counter[str] = Counter()
        self.used = 0

    def take(self, identity: Identity, amount: int = 1) -> None:
        """Take units. Raises `TooMany` when the caller's share is used up, `Unavailable` when all are."""
        holder, org = identity.holder, identity.org
        of_holder = self._by_holder.get(holder, 0) + amount
        of_organization = self._by_organization.get(org, 0) + amount
        available = self._total_max
        if not identity.is_operator:
            available -= self._reserve
            if of_holder > self._each_max:
                raise TooMany(identity.name, self._what, self._each_max, RETRY_AFTER_S)
            if org and of_organization > self._organization_max:
                raise TooMany(org, self._what, self._organization_max, RETRY_AFTER_S)
        if self.used + amount > available:
            raise Unavailable(
                f"the server allows at most {available} {self._what} at a time: try again later"
            )
        self._by_holder[holder] = of_holder
        self._by_organization[org] = of_organization
        self.used += amount

    def give_back(self, identity: Identity, amount: int = 1) -> None:
        """Return units that were taken."""
        self.used -= amount
        lower(self._by_holder, identity.holder, amount)
        lower(self._by_organization, identity.org, amount)


def lower(counts: Counter[Any], key: object, amount: int) -> None:
    """Count less for a key, and forget it at zero."""
    left = counts[key] - amount
    if left:
        counts[key] = left
    else:
        del counts[key]
