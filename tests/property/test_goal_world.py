"""1,000 seeded histories of goals keep every rule, and a broken engine is caught."""

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from postroom.goals import progress
from postroom.goals.graph import branches
from tests.goalworld import GoalWorld

SEEDS = 1_000
PARTS = 20


def simulated(first: int) -> tuple[list[str], Counter[str]]:
    """Seeds from `first` on: what failed, and how often each action happened."""
    failed: list[str] = []
    actions: Counter[str] = Counter()
    for seed in range(first, first + SEEDS // PARTS):
        report = GoalWorld(seed).run()
        failed += [str(report)] if report.broken else []
        actions.update(report.actions)
    return failed, actions


def test_no_seed_breaks_a_rule() -> None:
    failed: list[str] = []
    actions: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for broken, counted in pool.map(simulated, range(0, SEEDS, SEEDS // PARTS)):
            failed += broken
            actions.update(counted)
    assert not failed, "\n\n".join(failed[:3])
    assert min(actions.values()) > SEEDS // 10, "an action of the world hardly happens"


def test_a_seed_gives_the_same_history_each_time() -> None:
    assert GoalWorld(7).run().actions == GoalWorld(7).run().actions


def leave_branches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "drop_branch", lambda *_: None)


def forget_the_end_of_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress, "_close", lambda *_: None)


@pytest.mark.parametrize("mutant", [leave_branches, forget_the_end_of_messages])
def test_an_engine_that_breaks_a_rule_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(GoalWorld(seed).run().broken for seed in range(30))
