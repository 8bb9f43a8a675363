"""60 kills -9 of the senders and workers of an engine; `make crash` does the same 3,000 times.

A worker is also killed at each point of an effect: before its intent is committed, between the intent and the
call, between the call and the commit of its outcome, and after that.
"""

import os
import secrets
import signal
from pathlib import Path

import pytest

from postroom.engine.rules.operations import Operations
from tests.crash import engines
from tests.crash.engineprograms import FINISH_LEASE_S, OnUnknown, effects_file, open_engine, register
from tests.crash.engines import finish
from tests.crash.ledger import Tally

KILLS = 60
TOKEN = "s.0.0"  # noqa: S105 - the name of a message


@pytest.mark.statement("persistent")
def test_kills_lose_nothing_accepted_and_repeat_no_effect() -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only kills-engine --kills {KILLS} --seed {seed}")
    tally = engines.run(KILLS, seed)
    assert tally.facts["kills"] == KILLS
    assert tally.facts["attempts"] > tally.acknowledged > 0
    assert tally.facts["tokens"] > 0
    assert tally.facts["reserved"] > 0, "no look met a reservation"
    assert tally.ok, tally


@pytest.mark.parametrize(("sabotage", "count"), [("early", "lost"), ("plain", "doubled")])
def test_a_broken_program_is_caught(sabotage: str, count: str) -> None:
    tally = Tally()
    for seed in range(10):
        tally.add(engines.run(10, seed, sabotage=sabotage))
        if getattr(tally, count):
            break
    assert getattr(tally, count), tally


# ---- each point of an effect -----------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker_that_dies(folder: Path, point: str, on_unknown: OnUnknown) -> int:
    """Run a worker in its own process, which kills itself at a point. Returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        begin = Operations.begin_effect

        def begin_and_die(*arguments: object, **options: object) -> None:
            begin(*arguments, **options)  # type: ignore[arg-type]
            die()  # inside the transaction: the intent is written, but not committed

        if point == "before the intent":
            Operations.begin_effect = begin_and_die  # type: ignore[method-assign]
        with open_engine(folder) as engine:
            register(engine, folder, on_unknown, die=lambda here: die() if here == point else None)
            finish(engine)
    finally:
        os._exit(1)


POINTS: dict[str, dict[OnUnknown, tuple[str, int]]] = {
    "before the intent": {
        "raise": ("COMPLETED", 1),
        "run": ("COMPLETED", 1),
        "probe": ("COMPLETED", 1),
    },
    "after the intent": {
        "raise": ("DEAD_LETTER", 0),
        "run": ("COMPLETED", 1),
        "probe": ("COMPLETED", 1),
    },
    "after the run": {
        "raise": ("DEAD_LETTER", 1),
        "run": ("COMPLETED", 2),  # the handler declared that a repeat does no harm
        "probe": ("COMPLETED", 1),
    },
    "after the outcome": {
        "raise": ("COMPLETED", 1),
        "run": ("COMPLETED", 1),
        "probe": ("COMPLETED", 1),
    },
}
"""The point of death and the options of the effect; the end of the message, and how often the effect ran."""


@pytest.mark.statement("effects-once")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("on_unknown", ["raise", "run", "probe"])
def test_worker_killed_at_each_point_of_an_effect(point: str, on_unknown: OnUnknown, tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        handle = engine.blocking.submit(type="tool_call", org_id="acme", payload={"token": TOKEN})
    assert worker_that_dies(tmp_path, point, on_unknown) == -signal.SIGKILL
    with open_engine(tmp_path, FINISH_LEASE_S) as engine:
        register(engine, tmp_path, on_unknown)
        finish(engine)
        info = engine.blocking.get(handle.message_id)
        letter = next(iter(engine.blocking.dlq.list()), None)
    happened = effects_file(tmp_path).read_text().split() if effects_file(tmp_path).exists() else []
    assert (info.state, len(happened)) == POINTS[point][on_unknown]
    if letter is not None:
        assert letter.failure_reason.startswith("EffectUnknown")
