"""Which message is delivered next: deficit round robin inside a class, and the share of promoted messages.

Rule 1: organizations that wait take turns. On its turn an organization gets as many messages as its weight;
        a weight below 1 makes it pass turns.
Rule 2: promotion gives a share, not precedence. While messages of a class wait, one of `PROMOTED_EVERY`
        deliveries is a message of a lower class that its age has promoted to this class, or above.
        Organizations take turns in this share, too.
Rule 3: the state belongs to one worker. It is small and may be lost: then promoted messages are passed over
        by at most `PROMOTED_EVERY` - 1 deliveries more.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

T = TypeVar("T")

PROMOTED_EVERY: Final = 8
"""One of this many deliveries is a promoted message, while one waits and higher classes are not empty."""
PROMOTED: Final = -1
"""The rotation over organizations that have promoted messages, besides those of the classes."""
WEIGHT_DEFAULT: Final = 1.0
WEIGHT_MIN: Final = 0.01  # an organization passes up to 1 / weight turns, and a claim has to end


class Rotation:
    """The position of one worker in its rounds over the organizations, one round for each priority."""

    def __init__(self) -> None:
        self.last: dict[int, str] = {}
        """The organization that was served last, by priority."""
        self.deficit: dict[tuple[int, str], float] = {}
        self.unfinished: dict[int, str] = {}
        """The organization whose turn a full claim interrupted, by priority. Its turn continues."""
        self.passed_over = 0
        """Deliveries since the last promoted one, while promoted messages waited."""

    def promoted_in(self, limit: int) -> int:
        """How many of the next `limit` deliveries are promoted messages, if that many wait."""
        return (self.passed_over + limit) // PROMOTED_EVERY

    def mix(
        self,
        lane: int,
        accepted: Mapping[str, list[T]],
        promoted: Mapping[str, list[T]],
        limit: int,
        weight: Callable[[str], float],
    ) -> list[T]:
        """Take up to `limit` messages of a class, and the promoted ones whose turn comes among them.

        Ends with the messages of the class: promoted ones are not passed over then. What is taken is removed
        from the lists, and counts once it is noted.
        """
        taken: list[T] = []
        until_due = PROMOTED_EVERY - 1 - self.passed_over
        while len(taken) < limit:
            if not until_due:
                taken += self.share(PROMOTED, promoted, 1, weight)
                until_due = PROMOTED_EVERY - 1
            own = self.share(lane, accepted, min(until_due, limit - len(taken)), weight)
            if not own:
                break
            taken += own
            until_due -= len(own)
        return taken

    def note(self, *, promoted: bool) -> None:
        """Note a delivery while promoted messages wait."""
        self.passed_over = 0 if promoted else min(self.passed_over + 1, PROMOTED_EVERY - 1)

    def note_none_waits(self) -> None:
        """No promoted message waits, so none is passed over."""
        self.passed_over = 0

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
