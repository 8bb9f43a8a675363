"""Which organization is served next: deficit round robin inside a priority.

Rule 1: organizations that wait take turns. On its turn an organization gets as many messages as its weight;
        a weight below 1 makes it pass turns.
Rule 2: the state belongs to one worker. It is small and may be lost.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

T = TypeVar("T")

PROMOTED_EVERY: Final = 8
"""While P0 is not empty, at least one of this many deliveries is a promoted message."""
WEIGHT_DEFAULT: Final = 1.0
WEIGHT_MIN: Final = 0.01  # an organization passes up to 1 / weight turns, and a claim has to end


class Rotation:
    """Where one worker is in its round over the organizations, for each priority."""

    def __init__(self) -> None:
        self.last: dict[int, str] = {}
        """The organization that was served last, by priority."""
        self.deficit: dict[tuple[int, str], float] = {}
        self.unfinished: dict[int, str] = {}
        """The organization whose turn a full claim interrupted, by priority. Its turn goes on."""
        self.since_promoted = 0
        """Deliveries of accepted P0 messages since the last promoted one."""

    def share(
        self, priority: int, waiting: Mapping[str, list[T]], limit: int, weight: Callable[[str], float]
    ) -> list[T]:
        """Take up to `limit` messages, in turns. What is taken is removed from the lists.

        Turns follow the order of `waiting`, from the organization after the one that was served last.
        """
        taken: list[T] = []
        turns = [name for name in self._turns(priority, [*waiting]) if waiting[name]]
        while turns and len(taken) < limit:
            for name in turns:
                room = limit - len(taken)
                if not room:
                    break
                credit = self.deficit.get((priority, name), 0.0)
                if self.unfinished.get(priority) != name:
                    credit += weight(name)
                count = min(int(credit), len(waiting[name]), room)
                taken += waiting[name][:count]
                del waiting[name][:count]
                self._settle(priority, name, credit - count, empty=not waiting[name])
            turns = [name for name in turns if waiting[name]]
        return taken

    def _turns(self, priority: int, names: list[str]) -> list[str]:
        """The names from the one whose turn is next on, and around."""
        first, last = self.unfinished.get(priority), self.last.get(priority)
        start = names.index(last) + 1 if last in names else 0
        if first in names:
            start = names.index(first)
        return names[start:] + names[:start]

    def _settle(self, priority: int, name: str, credit: float, *, empty: bool) -> None:
        """Note what is left of a turn. An organization of which nothing waits keeps no credit."""
        if empty or credit <= 0:
            self.deficit.pop((priority, name), None)
        else:
            self.deficit[priority, name] = credit
        if credit >= 1 and not empty:
            self.unfinished[priority] = name
        else:
            self.unfinished.pop(priority, None)
            self.last[priority] = name

    def promoted_is_due(self) -> bool:
        """Whether the next delivery must be a promoted message, if there is one."""
        return self.since_promoted >= PROMOTED_EVERY - 1

    def count(self, *, promoted: bool) -> None:
        """Note a delivery while P0 is not empty."""
        self.since_promoted = 0 if promoted else self.since_promoted + 1
