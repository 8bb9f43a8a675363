"""Many seeds of the worlds of `postroom.testing`, in parts that processes can share."""

from collections import Counter
from typing import Literal, NamedTuple

from postroom.testing.world import World
from tests.agentworld import AgentReport, AgentWorld


class Part(NamedTuple):
    """A range of seeds."""

    world: Literal["memory", "sqlite", "agents"]
    """The store of an engine, or the world of coordinators and agents."""
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
        report = AgentWorld(seed).run() if part.world == "agents" else World(seed, store=part.world).run()
        messages += report.requests if isinstance(report, AgentReport) else report.messages
        actions.update(report.actions)
        if not report.ok:
            failed.append(str(report))
    return PartResult(part.seeds, messages, failed, actions)
