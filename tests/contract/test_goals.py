"""What goals promise: life, context, checkpoints and hooks."""

import asyncio
from functools import partial
from typing import Any

import pytest

from postroom import Engine
from postroom.errors import (
    ContextChanged,
    GoalEnded,
    InvalidMessage,
    InvalidName,
    UnknownCheckpoint,
    UnknownGoal,
)
from tests.engines import EngineUnderTest
from tests.goalworlds import (
    cells_of,
    database,
    nothing,
    opened,
    postgres,
    reasons,
    url,
    world,
)

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures


# ---- life ------------------------------------------------------------------------------------------


def test_a_goal_starts_once_and_ends_once(world: EngineUnderTest) -> None:
    goals = world.engine.goals
    assert world.wait(goals.start("acme", "g", context={"plan": 1})) == "g"
    assert world.wait(goals.start("acme", "g", context={"plan": 2})) == "g"
    assert world.wait(goals.context("g")) == ({"plan": 1}, 1)
    with pytest.raises(InvalidMessage, match="the goal id 'g' is taken: choose another one"):
        world.wait(goals.start("bolt", "g"))
    assert world.wait(goals.complete("g")).state == "COMPLETED"
    assert world.wait(goals.complete("g")).state == "COMPLETED"
    with pytest.raises(GoalEnded, match="cannot fail goal 'g': it is COMPLETED"):
        world.wait(goals.fail("g"))
    assert world.wait(goals.start("acme"))


@pytest.mark.parametrize(
    ("org_id", "goal_id"), [("", "g"), ("a b", "g"), ("acme", ""), ("acme", "a#b"), ("acme", 7)]
)
def test_a_goal_with_a_bad_name_is_refused(world: EngineUnderTest, org_id: Any, goal_id: Any) -> None:
    with pytest.raises((InvalidName, InvalidMessage)):
        world.wait(world.engine.goals.start(org_id, goal_id))


def test_what_does_not_exist_is_named(world: EngineUnderTest) -> None:
    goals = world.engine.goals
    for call in (
        goals.status("x"),
        goals.complete("x"),
        goals.fail("x"),
        goals.context("x"),
        goals.checkpoints("x"),
    ):
        with pytest.raises(UnknownGoal, match="there is no goal 'x'"):
            world.wait(call)
    for name in ("x#1", "x", "", "#1"):
        with pytest.raises(UnknownCheckpoint):
            world.wait(goals.rollback(name))


def test_a_rollback_of_an_ended_goal_says_that_the_goal_has_ended(world: EngineUnderTest) -> None:
    goals = world.engine.goals
    world.wait(goals.start("acme", "g"))
    taken = world.wait(goals.checkpoint("g"))
    world.wait(goals.complete("g"))
    with pytest.raises(GoalEnded, match="cannot roll back goal 'g': it is COMPLETED"):
        world.wait(goals.rollback(taken.checkpoint_id))


@pytest.mark.statement("goal-context")
def test_context_changes_by_compare_and_set(world: EngineUnderTest) -> None:
    goals = world.engine.goals
    world.wait(goals.start("acme", "g"))
    assert world.wait(goals.set_context("g", {"a": 1}, expect_version=1)) == 2
    with pytest.raises(ContextChanged, match="has version 2, not 1"):
        world.wait(goals.set_context("g", {"a": 2}, expect_version=1))
    assert world.wait(goals.context("g")) == ({"a": 1}, 2)
    with pytest.raises(InvalidMessage, match="at most 65536"):
        world.wait(goals.set_context("g", {"a": "x" * 70_000}, 2))
    with pytest.raises(InvalidMessage):
        world.wait(goals.set_context("g", 7, 2))  # type: ignore[arg-type]


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.statement("checkpoint-three-points")
def test_checkpoints_are_taken_at_the_three_points(world: EngineUnderTest) -> None:
    engine = world.engine
    world.wait(engine.goals.start("acme", "g"))

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        if message.payload.get("long"):
            world.clock.advance(11)
        if message.payload.get("final"):
            await ctx.effect("mail", lambda: 1, reversal_class="IRREVERSIBLE")

    world.submit(goal_id="g", task_id="t1")
    world.submit(goal_id="g", task_id="t1")
    world.run(1)
    assert reasons(world) == ["start"]
    world.run_all()
    assert reasons(world) == ["start", "task"]
    world.submit(goal_id="g", task_id="t2", payload={"long": True})
    world.submit(goal_id="g", task_id="t2", delay_s=60)
    world.run_all()
    assert reasons(world) == ["start", "task", "operation"]
    world.submit(goal_id="g", task_id="t3", payload={"final": True})
    world.run_all()
    assert reasons(world) == ["start", "task", "operation", "irreversible", "task"]
    node = world.wait(engine.graph.main("acme").get("goal:g"))
    assert node is not None
    assert node.properties["checkpoint"] == "g#5"


def test_messages_of_goals_that_were_not_started_leave_no_cells(world: EngineUnderTest) -> None:
    world.engine.handler("tool_call")(nothing)
    world.submit(goal_id="g")
    world.submit()
    world.run_all()
    kinds = ("goal.message", "goal.of", "goal.open", "goal.checkpoint")
    assert all(not world.engine.store.read(partial(cells_of, kind=kind)) for kind in kinds)


# ---- hooks -----------------------------------------------------------------------------------------


@pytest.mark.statement("memory-hooks")
def test_hooks_run_as_messages_after_the_completion(world: EngineUnderTest) -> None:
    got: list[Any] = []

    @world.engine.hook("tool_call")
    async def remember(message: Any, result: Any) -> None:
        got.append((message.message_id, message.state, result))

    world.engine.handler("tool_call")(lambda *_: {"x": 1})
    handle = world.submit()
    assert world.run() == 1
    assert got == []
    world.run_all()
    assert got == [(handle.message_id, "COMPLETED", {"x": 1})]


def test_callers_cannot_submit_the_work_of_goals(world: EngineUnderTest) -> None:
    with pytest.raises(InvalidMessage, match="goal_work"):
        world.submit(type="goal_work")


def test_testing_engine_has_goals_of_its_own() -> None:
    engine = Engine.open("memory://")
    inline = engine.testing()

    async def story() -> None:
        await inline.goals.start("acme", "g")
        payload = {"node_id": "n", "properties": {"x": 1}}
        handle = await inline.submit(type="memory_save", org_id="acme", goal_id="g", payload=payload)
        await handle.result()
        node = await inline.graph.branch("g").get("n")
        assert node is not None
        assert node.properties == {"x": 1}
        assert await engine.graph.branch("g").get("n") is None

    asyncio.run(story())
    inline.close()
    engine.close()
