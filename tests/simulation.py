"""Many seeds of `postroom.testing.World`, in parts that processes can share."""

from collections import Counter
from typing import NamedTuple

from postroom.testing.world import StoreName, World


class Part(NamedTuple):
    """A range of seeds."""

    store: StoreName
    first: int
    seeds: int


class PartResult(NamedTuple):
    """What a part gave."""

    seeds: int
    messages: int
    failed: list[str]
    """Reports of failed seeds, each with the command that replays it."""
    actions: Counter[str]


def simulated(part: Part) -> PartResult:
    """Run the seeds of a part."""
    failed: list[str] = []
    actions: Counter[str] = Counter()
    messages = 0
    for seed in range(part.first, part.first + part.seeds):
        report = World(seed, store=part.store).run()
        actions.update(report.actions)
        messages += report.messages
        if not report.ok:
            failed.append(str(report))
    return PartResult(part.seeds, messages, failed, actions)
