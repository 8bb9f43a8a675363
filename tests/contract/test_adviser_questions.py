"""What an adviser is asked, when it is not asked, and what waits for its answer."""

import asyncio
import threading
from typing import Any

import pytest

from postroom import Engine, HttpAdviser, Policy, Retry, ValidationError
from postroom.errors import RollbackRefused
from tests.engines import EngineUnderTest
from tests.goalworlds import Choosing, Opened, alerts, database, opened, postgres, run_failing_step, url
from tests.scriptedmodel import Asked, said, scripted
from tests.waiting import HANG_GUARD_S, eventually

__all__ = ["database", "opened", "postgres", "url"]  # fixtures


async def failing_messages_and_a_healthy_one(engine: Engine, questions: list[Asked]) -> str:
    """Fail as many messages as the worker has slots; while their model is asked, run a P0 message."""

    @engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> Any:
        if message.payload.get("fails"):
            raise RuntimeError("again")
        return "done"

    worker = asyncio.create_task(engine.run(concurrency=4))
    failing: Any = {"type": "tool_call", "org_id": "acme", "payload": {"fails": True}, "priority": 1}
    await engine.submit_many([failing] * 4)
    await eventually(lambda: len(questions) == 4)
    healthy = await engine.submit(type="tool_call", org_id="acme", payload={}, priority=0)
    result: str = await healthy.result(HANG_GUARD_S)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    return result


@pytest.mark.statement("retry-adviser-choice")
def test_a_healthy_message_runs_while_a_slow_model_thinks_about_failures() -> None:
    answered = threading.Event()

    def answer(_: Asked) -> bytes:
        answered.wait(HANG_GUARD_S)
        return said("keep")

    with scripted(answer) as (address, questions):
        adviser = HttpAdviser(address, "small", timeout_s=2 * HANG_GUARD_S)
        with Engine.open("memory://", adviser=adviser) as engine:
            assert asyncio.run(failing_messages_and_a_healthy_one(engine, questions)) == "done"
        answered.set()
    assert {one["kind"] for one in questions} == {"demotion"}


@pytest.mark.statement("retry-adviser-choice")
@pytest.mark.parametrize(
    ("fields", "is_asked"),
    [
        ({"priority": 1, "max_retries": 1}, True),
        ({"priority": 1, "max_retries": 0}, False),
        ({"priority": 3, "max_retries": 1}, False),
    ],
)
def test_the_adviser_is_asked_about_a_demotion_only_when_there_is_a_choice(
    fields: Any, is_asked: bool
) -> None:
    adviser = Choosing(demotion="keep")
    world = EngineUnderTest("memory://", Policy(adviser=adviser))

    @world.engine.handler("tool_call", retry=Retry(max_retries=5))
    async def step(message: Any, ctx: Any) -> None:
        raise RuntimeError("again")

    world.submit(**fields)
    world.run()
    world.close()
    assert bool(adviser.questions) is is_asked


def first(questions: list[Asked], kind: str) -> Any:
    """The facts of the first question of a kind."""
    return next(one["facts"] for one in questions if one["kind"] == kind)


@pytest.mark.statement("recovery-adviser")
def test_a_model_is_told_what_a_person_would_read(opened: Opened) -> None:
    """A scripted server: its questions have the payload, the context, the failures and the tools."""
    choices = {"demotion": "keep", "recovery": "person", "reversal_class": "REVERSIBLE", "merge": "branch"}
    with scripted(lambda asked: said(choices[asked["kind"]])) as (address, questions):
        world = opened(HttpAdviser(address, "small"))

        @world.engine.handler("model_call")
        async def fail_twice(message: Any, ctx: Any) -> None:
            raise RuntimeError("the room is taken")

        @world.engine.handler("tool_call")
        async def book(message: Any, ctx: Any) -> None:
            undo = {"type": "model_call", "payload": {}}
            await ctx.effect("book room", lambda: {"booking": "b7"}, reversal=undo)
            raise ValidationError("the room is taken")

        @world.engine.recovery_tool
        def call_the_hotel(goal_id: str) -> None:
            """Ask the hotel for another room."""

        world.wait(world.engine.goals.start("acme", "trip", context={"city": "Rome"}))
        world.submit(type="model_call", goal_id="trip", payload={"room": "x" * 9_000}, max_retries=1)
        world.run_all()
        world.submit(goal_id="trip", payload={"room": 12})
        world.run_all()
        main = world.engine.graph.main()
        world.wait(main.save("hotel", {"stars": 1}))
        world.wait(world.engine.goals.start("acme", "other", context={"why": "a survey"}))
        world.wait(world.engine.graph.branch("other").save("hotel", {"stars": 2}))
        world.wait(main.save("hotel", {"stars": 3}))
        world.wait(world.engine.goals.complete("other"))
    demotion = first(questions, "demotion")
    assert demotion["payload"].startswith('{"room":"xxx')
    assert len(demotion["payload"]) < 9_000
    assert (demotion["context"], demotion["retries_left"]) == ('{"city":"Rome"}', 1)
    effect = first(questions, "reversal_class")
    assert (effect["payload"], effect["outcome"]) == ('{"room":12}', '{"booking":"b7"}')
    recovery = first(questions, "recovery")
    assert (recovery["payload"], recovery["context"]) == ('{"room":12}', '{"city":"Rome"}')
    assert [one["error"] for one in recovery["history"]] == ["the room is taken"]
    assert "Ask the hotel for another room." in recovery["tools"]["call_the_hotel"]
    assert "checkpoint_id" in recovery["tools"]["rollback_to_checkpoint"]
    assert first(questions, "merge")["context"] == '{"why":"a survey"}'


def test_the_class_of_an_effect_delays_no_handler(opened: Opened) -> None:
    """The adviser is asked when a rollback needs the class, once for all effects of a pattern."""
    adviser = Choosing(reversal_class="COMPENSATABLE")
    world = opened(adviser)
    undone = []

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        undo = {"type": "model_call", "payload": message.payload}
        await ctx.effect("charge", lambda: 1, reversal=undo)

    @world.engine.handler("model_call")
    async def undo(message: Any, ctx: Any) -> None:
        undone.append(message.payload["number"])

    world.wait(world.engine.goals.start("acme", "g"))
    for number in range(3):
        world.submit(goal_id="g", payload={"number": number})
    world.run_all()
    assert adviser.questions == []
    world.wait(world.engine.goals.rollback("g#1"))
    world.run_all()
    assert [one.kind for one in adviser.questions] == ["reversal_class"]
    assert undone == [2, 1, 0]


def test_an_effect_that_the_adviser_cannot_classify_blocks_a_rollback(opened: Opened) -> None:
    world = opened(Choosing(0.2, reversal_class="REVERSIBLE"))

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        await ctx.effect("charge", lambda: 1, reversal={"type": "model_call", "payload": {}})

    world.wait(world.engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()
    assert [one.reason for one in world.wait(world.engine.goals.checkpoints("g"))][1:2] == ["irreversible"]
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))


def test_a_step_that_only_a_person_can_recover_is_no_question_for_the_adviser(opened: Opened) -> None:
    adviser = Choosing(recovery="person")
    world = opened(adviser)
    world.engine.recovery._built_in.clear()
    run_failing_step(world)
    assert adviser.questions == []
    assert alerts(world, "GoalNeedsPerson")
