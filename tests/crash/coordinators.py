"""Coordinators and agents on one SQLite file that are killed -9.

`kills-coordinator`: at the end, every request that was stored has been answered, and its agent has had the
last part. No agent that lives has had a last part twice. An agent that was killed before it could acknowledge
a last part gets it again when it is restarted.
"""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.engine.rules.cells import REQUESTS
from postroom.testing import check_consistency
from tests.crash import agentprograms
from tests.crash.agentprograms import open_engine, register
from tests.crash.engines import finish, records_of
from tests.crash.ledger import Tally, number_of
from tests.crash.rounds import Tick, in_rounds
from tests.crash.workers import Crew, Worker

LINES_MAX = 6
AGENTS = {"c0": ["a0", "a1"], "c1": ["a2"]}


def run(kills: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Kill `kills` times, in rounds with a file each."""
    return in_rounds("kills-coordinator", kills, seed, tick, partial(_round, sabotage=sabotage))


class Cast:
    """The coordinators and the worker of a round, and their replacements."""

    def __init__(self, folder: Path, crew: Crew, rng: Random, sabotage: str) -> None:
        self._folder = str(folder)
        self._crew = crew
        self._rng = rng
        self._sabotage = sabotage
        self._numbers = itertools.count()
        self.living = {name: self._start(name) for name in (*AGENTS, "worker")}

    def kill_one(self) -> None:
        """Kill one process, mostly a coordinator with its agents, and start a replacement."""
        name = self._rng.choice((*AGENTS, *AGENTS, "worker"))
        self._crew.kill_at_random(self.living[name], self._rng, LINES_MAX)
        self.living[name] = self._start(name)

    def _start(self, name: str) -> Worker:
        number = next(self._numbers)
        if name == "worker":
            return self._crew.start(
                f"worker:{number}", agentprograms.worker, folder=self._folder, name=f"w{number}"
            )
        before = [line for one in self._crew.workers if one.name == name for line in one.lines]
        numbers = [number_of(line.split(" ")[1]) for line in before]
        return self._crew.start(
            name,
            agentprograms.agents,
            folder=self._folder,
            names=AGENTS[name],
            first=max(numbers, default=-1) + 1,
            early=self._sabotage == "early",
        )


def _round(folder: Path, kills: int, rng: Random, tally: Tally, *, sabotage: str) -> None:
    with Crew() as crew:
        cast = Cast(folder, crew, rng, sabotage)
        for _ in range(kills):
            cast.kill_one()
            tally.count("kills")
        crew.kill_all()
        lives = [one.lines for one in crew.workers if one.name in AGENTS]
    with open_engine(folder) as engine:
        register(engine)
        finish(engine)
    lives.append(_resumed(folder))
    _judge(folder, lives, tally)


def _resumed(folder: Path) -> list[str]:
    """The last agents of the round fetch every answer that is still open."""
    with open_engine(folder) as engine:
        names = [*itertools.chain.from_iterable(AGENTS.values())]
        return list(engine.blocking.wait(agentprograms.resumed(engine, names)))


def _judge(folder: Path, lives: list[list[str]], tally: Tally) -> None:
    """Compare the answers that agents got with the stored requests."""
    had: Counter[str] = Counter()
    for lines in lives:
        for line, times in Counter(lines).items():
            word, token = line.split(" ")
            had[token] += times
            tally.doubled += times - 1  # twice in one life
            if word == "wrong":
                tally.breaks(f"an agent had a wrong answer to {token}")
    with open_engine(folder) as engine:
        for record in records_of(engine):
            stored = engine.store.load(record.message_id)
            assert stored is not None
            token = str(msgspec.json.decode(stored.envelope.payload)["payload"]["token"])
            tally.acknowledged += 1
            tally.lost += not had[token]
            if record.state not in lifecycle.ENDED:
                tally.breaks(f"request {token} is {record.state} at the end")
        tally.count("redelivered", sum(times - 1 for times in had.values() if times > 1))
        for key, _ in engine.store.read(REQUESTS.all):
            tally.breaks(f"request {key!r} is still open")
        try:
            check_consistency(engine.store)
        except (AssertionError, ValueError) as error:
            tally.breaks(str(error).partition("\n")[0])
