"""The guard of a goal as a budget: what attempts cost ends the messages that would cost more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import BudgetSpent, Guard, GuardTripped, Retry
from postroom.engine.rules.outcomes import Outcome, Usage
from tests.engines import EngineUnderTest
from tests.goalworlds import Opened, alerts, opened_engines


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    yield from opened_engines("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db")


def spending(world: EngineUnderTest, **usage: Any) -> list[str]:
    """Register a model call that reports this usage, and fails when its payload says so; its calls."""
    calls: list[str] = []

    @world.engine.handler("model_call")
    async def call(message: Any, ctx: Any) -> str:
        calls.append(message.message_id)
        ctx.usage(**usage)
        if message.payload.get("fails"):
            raise ConnectionError("the model hung up")
        return "paid"

    return calls


@pytest.mark.statement("guard-attempts")
def test_queued_messages_end_when_their_goal_has_spent_its_money(opened: Opened) -> None:
    world = opened(guard=Guard(usd=5.0))
    calls = spending(world, cost_usd=1.0)
    handles = world.submit_many(100, type="model_call", goal_id="g")
    other = world.submit(type="model_call", goal_id="another")
    while world.run(slots=1):
        pass
    assert len(calls) == 6
    assert world.state(other) == "COMPLETED"
    assert [world.state(handle) for handle in handles].count("DEAD_LETTER") == 95
    with pytest.raises(BudgetSpent, match="goal g has used 5 of at most 5 US dollars") as ended:
        world.wait(handles[-1].result())
    assert ended.value.error_history[-1]["error_type"] == "GuardTripped"


@pytest.mark.statement("guard-attempts")
def test_failed_attempts_count_and_their_retries_end(opened: Opened) -> None:
    world = opened(guard=Guard(tokens=100), retries={"model_call": Retry(max_retries=9, delay_s=1.0)})
    calls = spending(world, tokens_in=30, tokens_out=20)
    handle = world.submit(type="model_call", goal_id="g", payload={"fails": True})
    for _ in range(10):
        world.run_all()
        world.clock.advance(600)
    assert len(calls) == 2
    errors = world.wait(world.engine.get(handle.message_id)).errors
    assert [error["error_type"] for error in errors] == ["ConnectionError", "ConnectionError", "GuardTripped"]


def test_a_repeated_outcome_counts_once(opened: Opened) -> None:
    world = opened(guard=Guard(tokens=100))
    calls = spending(world, tokens_in=60)
    world.submit_many(2, type="model_call", goal_id="g", payload={"fails": True})
    [claimed, _] = world.claim(2)
    outcome = Outcome(
        kind="failed", message_id=claimed.record.message_id, lease=claimed.record.lease, error="x",
        type=claimed.type, body=claimed.body, usage=Usage(tokens_in=60),
    )  # fmt: skip
    world.finish(outcome)
    world.finish(outcome)
    world.submit(type="model_call", goal_id="g")
    assert calls == []


def test_tokens_without_a_price_of_the_handler_cost_what_the_budgets_say(opened: Opened) -> None:
    models = {"small": {"tokens_per_day": 10_000, "usd_per_million_tokens": 1_000.0}}
    world = opened(guard=Guard(usd=1.0), tokens={"providers": {"p": {"models": models}}})
    spending(world, model="small", tokens_out=1_000)
    world.submit(type="model_call", goal_id="g")
    world.run_all()
    with pytest.raises(GuardTripped, match="1 of at most 1 US dollars"):
        world.submit(type="model_call", goal_id="g")


def test_budget_that_is_spent_starts_no_recovery(opened: Opened) -> None:
    world = opened(guard=Guard(usd=1.0))
    spending(world, cost_usd=1.0)
    world.wait(world.engine.goals.start("acme", "g"))
    first, second = world.submit_many(2, type="model_call", goal_id="g")
    while world.run(slots=1):
        pass
    assert (world.state(first), world.state(second)) == ("COMPLETED", "DEAD_LETTER")
    assert not alerts(world, "Recovery")
    assert world.wait(world.engine.goals.status("g")).failure["error_type"] == "GuardTripped"


def test_rollback_of_a_goal_that_has_spent_its_budget_undoes_its_effects(opened: Opened) -> None:
    world = opened(guard=Guard(usd=1.0))
    undone: list[str] = []

    @world.engine.handler("tool_call")
    async def book(message: Any, ctx: Any) -> None:
        if "undo" in message.payload:
            undone.append(message.payload["undo"])
            return
        reversal = {"type": "tool_call", "payload": {"undo": "trip"}}
        await ctx.effect("book", lambda: "t1", reversal=reversal, reversal_class="REVERSIBLE")
        ctx.usage(cost_usd=2.0)

    world.wait(world.engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()
    [start, *_] = world.wait(world.engine.goals.checkpoints("g"))
    world.wait(world.engine.goals.rollback(start.checkpoint_id))
    world.run_all()
    assert undone == ["trip"]
    assert world.wait(world.engine.goals.status("g")).state == "ACTIVE"
