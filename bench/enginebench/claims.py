"""The cost of one claim of 10 messages: flat, however many wait and of however many organizations.

The cost of one submit stands beside it, for information.

The clock of the store stands still, so that filling a large store ages no message. Then it is moved by a
minute, after which every message counts as P0.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure, Goal, compare, readable, seconds

from enginebench.direct import Direct
from enginebench.engines import ADMIT_ALL, TYPE, batches, fresh, url_in
from enginebench.sizes import Sizes
from postroom.stores.base import LANES
from postroom.testing import ManualClock

BATCH = 10
AGE_S = 60.0
FLAT = 1.5
MS_PER_S = 1e3


class Waiting:
    """A store in which messages of all priorities wait."""

    def __init__(self, folder: Path, waiting: int, organizations: int) -> None:
        self.clock = ManualClock()
        self._engine = Direct(url_in(folder), ADMIT_ALL, {}, self.clock)
        numbers = itertools.count()
        for size in batches(waiting):
            places = [
                (n % organizations, n // organizations % LANES) for n in itertools.islice(numbers, size)
            ]
            self._engine.fill(_message(*place) for place in sorted(places))  # equal ones are stored together

    def claim_ms(self, claims: int) -> float:
        """The median of some claims; the messages are released afterwards."""
        took_s: list[float] = []
        claimed = []
        for _ in range(claims):
            begun = time.perf_counter()
            found = self._engine.claim(BATCH)
            took_s.append(time.perf_counter() - begun)
            assert len(found) == BATCH
            claimed += found
        self._engine.finish(claimed, "released")
        return statistics.median(took_s) * MS_PER_S

    def submit_ms(self, submits: int) -> float:
        """The median of some submits of one message. The messages stay in the store."""
        took_s = [seconds(lambda: self._engine.submit([_message(0, LANES - 1)])) for _ in range(submits)]
        return statistics.median(took_s) * MS_PER_S

    def close(self) -> None:
        self._engine.close()


def _message(organization: int, priority: int) -> dict[str, Any]:
    return {
        "type": TYPE,
        "org_id": f"org-{organization}",
        "priority": priority,
        "payload": {},
        "goal_id": "goal",
        "task_id": "task",
        "durability": "os",
    }


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    few, *more = sizes.waiting
    for waiting in more:
        yield from _beside(
            Waiting(fresh(folder), waiting, 1),
            Waiting(fresh(folder), few, 1),
            (f"{waiting:,} waiting", f"{few:,} waiting"),
            sizes,
        )
    few, *more = sizes.organizations
    for organizations in more:
        yield from _beside(
            Waiting(fresh(folder), sizes.waiting_of_all, organizations),
            Waiting(fresh(folder), sizes.waiting_of_all, few),
            (f"{organizations:,} organizations", f"{few:,} organization"),
            sizes,
        )


def _beside(many: Waiting, few: Waiting, names: tuple[str, str], sizes: Sizes) -> Iterator[Figure]:
    for age in ("", ", all promoted"):
        cost = compare(
            lambda: many.claim_ms(sizes.claims), lambda: few.claim_ms(sizes.claims), turns=sizes.claim_turns
        )
        goals = [] if age else [Goal("ratio", "<=", FLAT)]
        against = f"{names[1]}: {readable(cost.theirs)} ms"
        yield Figure(f"claim of {BATCH}, {names[0]}{age}", cost.ours, "ms", against, cost.ratio, goals)
        for side in (many, few):
            side.clock.advance(AGE_S)
    cost = compare(lambda: many.submit_ms(sizes.claims), lambda: few.submit_ms(sizes.claims))
    against = f"{names[1]}: {readable(cost.theirs)} ms"
    yield Figure(f"submit, {names[0]}", cost.ours, "ms", against, cost.ratio)
    many.close()
    few.close()
