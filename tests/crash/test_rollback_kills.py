"""20 kills -9 of a process that rolls a goal back; `make crash` does the same 460 times."""

import secrets

import pytest

from tests.crash import rollbacks
from tests.crash.ledger import Tally

KILLS = 20


@pytest.mark.statement("rollback-crash")
def test_a_rollback_that_is_killed_and_resumed_has_the_same_end() -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only kills-rollback --kills {KILLS} --seed {seed}")
    tally = rollbacks.run(KILLS, seed)
    assert tally.facts["kills"] >= KILLS
    assert tally.acknowledged > 0
    assert tally.ok, tally


def test_compensations_that_are_not_effects_are_caught() -> None:
    tally = Tally()
    for seed in range(10):
        tally.add(rollbacks.run(10, seed, sabotage="plain"))
        if tally.doubled:
            break
    assert tally.doubled, tally
