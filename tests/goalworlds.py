"""Fixtures: engines with goals on every store, and what tests of goals look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import Advice, Adviser, Policy, Retry
from postroom.stores.transaction import Transaction
from postroom.testing import check_consistency
from tests.engines import EngineUnderTest
from tests.postgresserver import database, postgres, store_url

__all__ = [
    "ONCE",
    "Choosing",
    "Opened",
    "alerts",
    "cells_of",
    "database",
    "nothing",
    "opened",
    "postgres",
    "reasons",
    "url",
    "world",
]

Opened = Callable[..., EngineUnderTest]
ONCE = {"tool_call": Retry(max_retries=0), "model_call": Retry(max_retries=0)}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, tmp_path)


@pytest.fixture
def opened(url: Any) -> Any:
    made: list[EngineUnderTest] = []

    def open_engine(adviser: Adviser | None = None, **rules: Any) -> EngineUnderTest:
        made.append(EngineUnderTest(url, Policy(retries=ONCE, adviser=adviser, **rules)))
        return made[-1]

    yield open_engine
    for one in made:
        check_consistency(one.engine.store)
        one.close()


@pytest.fixture
def world(opened: Opened) -> EngineUnderTest:
    return opened()


def nothing(*_: Any) -> None:
    """A handler that does nothing."""


def cells_of(transaction: Transaction, kind: str) -> list[tuple[str, bytes]]:
    return transaction.cells(kind)


def reasons(world: EngineUnderTest, goal_id: Any = "g") -> Any:
    return [one.reason for one in world.wait(world.engine.goals.checkpoints(goal_id))]


def alerts(world: EngineUnderTest, error_type: Any) -> Any:
    events = world.engine.store.events(0, 10_000)
    return [event for event in events if event.kind == "alert" and event.error_type == error_type]


class Choosing(Adviser):
    """Chooses by the kind of question, and keeps the questions."""

    def __init__(self, confidence: Any = 1.0, **choices: Any) -> None:
        self.choices, self.confidence = choices, confidence
        self.questions: list[Any] = []

    async def advise(self, question: Any) -> Any:
        self.questions.append(question)
        return Advice(self.choices[question.kind], self.confidence, "chosen in a test")
