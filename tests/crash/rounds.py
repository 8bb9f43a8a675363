"""Kills in rounds. Each round has a folder of its own, so that checking a store stays quick."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.crash.ledger import Tally
from tests.crash.workers import scratch_parent

KILLS_PER_ROUND = 20

Tick = Callable[[int], None]
"""Called after each round with its number of kills."""
Round = Callable[[Path, int, Random, Tally], None]
"""Kills in a folder, and adds what it finds to the tally."""


def in_rounds(scenario: str, kills: int, seed: int, tick: Tick, one_round: Round) -> Tally:
    """Kill `kills` times."""
    tally = Tally()
    rng = Random(f"{scenario}/{seed}")
    for number, first in enumerate(range(0, kills, KILLS_PER_ROUND)):
        count = min(KILLS_PER_ROUND, kills - first)
        with scratch(number) as folder:
            one_round(folder, count, rng, tally)
        tick(count)
    return tally


@contextmanager
def scratch(number: int) -> Iterator[Path]:
    """A folder for one round, on disk and in memory by turns."""
    folder = Path(tempfile.mkdtemp(prefix="postroom-kills-", dir=scratch_parent(number)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
