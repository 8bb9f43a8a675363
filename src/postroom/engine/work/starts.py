"""When handlers began, until an event tells it.

Rule 1: no start has a commit of its own. That of a short handler is told with its outcome, that of a longer
        one in the next cycle after a look of the worker.
"""

from collections.abc import Sequence
from typing import TypeAlias

from postroom.engine.rules.outcomes import Outcome
from postroom.message import Record

Start: TypeAlias = tuple[int, int]
"""The lease of the attempt, and the time."""


class Starts:
    """The handlers of one worker that began and of which no event tells yet, by message id."""

    def __init__(self) -> None:
        self._running: dict[str, Start] = {}
        self._late: dict[str, Start] = {}

    def add(self, record: Record, now_us: int) -> None:
        """The handler of a message begins."""
        self._running[record.message_id] = record.lease, now_us

    def look(self) -> bool:
        """Let the next cycle tell of the handlers that still run; returns whether there are any."""
        self._late |= self._running
        self._running = {}
        return bool(self._late)

    def take(self, outcomes: Sequence[Outcome]) -> tuple[dict[str, Start], dict[str, int]]:
        """What a commit tells: starts that are late, and the times of those that ended."""
        late, self._late = self._late, {}
        ended: dict[str, int] = {}
        for one in outcomes:
            lease, ts_us = self._running.get(one.message_id, (0, 0))
            if lease == one.lease:
                del self._running[one.message_id]
                ended[one.message_id] = ts_us
        return late, ended

    def put_back(self, late: dict[str, Start], outcomes: Sequence[Outcome], ended: dict[str, int]) -> None:
        """The commit failed: a later one tells of them."""
        again = {
            one.message_id: (one.lease, ended[one.message_id]) for one in outcomes if one.message_id in ended
        }
        self._late = late | again | self._late
