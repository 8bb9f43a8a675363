"""Fixtures: engines with goals on every store, and what tests of goals look at."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Advice, Adviser, Policy, Retry, ValidationError
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
    "opened_engines",
    "postgres",
    "reasons",
    "run_failing_step",
    "url",
    "world",
]

Opened = Callable[..., EngineUnderTest]
ONCE = {"tool_call": Retry(max_retries=0), "model_call": Retry(max_retries=0)}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, tmp_path)


@pytest.fixture
def opened(url: str) -> Iterator[Opened]:
    yield from opened_engines(url, retries=ONCE)


def opened_engines(url: str, **defaults: Any) -> Iterator[Opened]:
    """What opens engines on a store. They are checked and closed at the end."""
    made: list[EngineUnderTest] = []

    def open_engine(adviser: Adviser | None = None, **rules: Any) -> EngineUnderTest:
        made.append(EngineUnderTest(url, Policy(adviser=adviser, **{**defaults, **rules})))
        return made[-1]

    yield open_engine
    for one in made:
        check_consistency(one.engine.store)
        one.close()


@pytest.fixture
def world(opened: Opened) -> EngineUnderTest:
    return opened()


def run_failing_step(world: EngineUnderTest) -> None:
    """Run the only step of goal `g`. It fails for good."""

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        raise ValidationError("never")

    world.wait(world.engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()


def nothing(*_: Any) -> None:
    """A handler that does nothing."""


def cells_of(transaction: Transaction, kind: str) -> list[tuple[str, bytes]]:
    return transaction.cells.page(kind)


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
