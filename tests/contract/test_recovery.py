"""What happens to a goal whose step fails for good."""

from typing import Any

import pytest

from postroom import Guard
from postroom.errors import (
    InvalidSetting,
    ValidationError,
)
from tests.engines import EngineUnderTest
from tests.goalworlds import (
    Choosing,
    Opened,
    alerts,
    database,
    opened,
    postgres,
    run_failing_step,
    url,
    world,
)

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures


@pytest.mark.statement("recovery-adviser")
def test_a_step_that_fails_for_good_is_rolled_back_and_takes_another_way(world: EngineUnderTest) -> None:
    engine = world.engine
    log: list[str] = []

    @engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        context, _ = await ctx.goal_context()
        name = message.payload["step"]
        await ctx.effect(f"mail-{name}", lambda: log.append(f"mail {name}"), reversal_class="IRREVERSIBLE")
        if name == 3 and not context.get("avoid_approaches"):
            raise ValidationError("the first way is closed")
        log.append(f"done {name}")

    world.wait(engine.goals.start("acme", "g"))
    for number in range(1, 6):
        world.submit(goal_id="g", task_id=f"t{number}", payload={"step": number})
        world.run_all()
    assert log == [
        "mail 1", "done 1", "mail 2", "done 2", "mail 3", "done 3", "mail 4", "done 4", "mail 5", "done 5",
    ]  # fmt: skip
    status = world.wait(engine.goals.status("g"))
    assert status.tried == ["rollback_to_checkpoint"]
    context, _ = world.wait(engine.goals.context("g"))
    assert context["avoid_approaches"] == ["tool_call: the first way is closed"]
    assert context["previous_failure"]["error_type"] == "ValidationError"
    [used] = alerts(world, "Recovery")
    assert used.detail["tool"] == "rollback_to_checkpoint"
    assert used.error
    assert world.wait(engine.goals.complete("g")).state == "COMPLETED"


@pytest.mark.statement("checkpoint-learning")
def test_recovery_undoes_what_the_step_did_and_the_step_may_do_it_again(world: EngineUnderTest) -> None:
    engine = world.engine
    log: list[str] = []

    @engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        undo = {"type": "model_call", "payload": {}}
        await ctx.effect("charge", lambda: log.append("charge"), reversal=undo, reversal_class="REVERSIBLE")
        await ctx.effect("mail", lambda: log.append("mail"), reversal_class="IRREVERSIBLE")
        if not (await ctx.goal_context())[0].get("avoid_approaches"):
            raise ValidationError("no")

    @engine.handler("model_call")
    async def undo(message: Any, ctx: Any) -> None:
        log.append(f"undo {message.metadata['undoes']}")

    world.wait(engine.goals.start("acme", "g"))
    handle = world.submit(goal_id="g")
    world.run_all()
    assert world.state(handle) == "COMPLETED"
    assert log == ["charge", "mail", "undo charge", "charge"]


@pytest.mark.statement("recovery-restart")
def test_recovery_tries_a_rollback_then_a_restart_then_a_person(world: EngineUnderTest) -> None:
    engine = world.engine
    runs: list[str] = []

    @engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        runs.append(message.message_id)
        raise ValidationError("never")

    world.wait(engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()
    status = world.wait(engine.goals.status("g"))
    assert status.tried == ["rollback_to_checkpoint", "restart_entire_goal"]
    assert status.state == "ACTIVE"
    assert len(runs) == 3
    assert len(set(runs)) == 2
    assert alerts(world, "GoalNeedsPerson")


@pytest.mark.statement("recovery-bounded")
def test_recoveries_are_bounded_by_the_guard_of_the_goal(opened: Opened) -> None:
    world = opened(guard=Guard(recoveries=1))
    run_failing_step(world)
    assert world.wait(world.engine.goals.status("g")).tried == ["rollback_to_checkpoint"]
    assert alerts(world, "RecoveryExhausted")


@pytest.mark.statement("recovery-own-tools")
def test_a_tool_of_the_application_gets_what_it_asks_for(opened: Opened) -> None:
    adviser = Choosing(recovery="swap_model")
    world = opened(adviser)
    got: list[Any] = []

    @world.engine.recovery_tool
    async def swap_model(goal_id: Any, message_id: Any, failure: Any) -> None:
        got.append((goal_id, message_id, failure["error_type"], failure["dependants"]))

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        raise ValidationError("never")

    world.wait(world.engine.goals.start("acme", "g"))
    waiting = world.submit(goal_id="g", delay_s=60)
    handle = world.submit(goal_id="g")
    world.run_all()
    assert got == [("g", handle.message_id, "ValidationError", [waiting.message_id])]
    [question] = adviser.questions
    assert question.kind == "recovery"
    assert {"swap_model", "rollback_to_checkpoint", "modify_agent_prompts", "person"} <= set(question.options)
    with pytest.raises(InvalidSetting):
        world.engine.recovery_tool(3)  # type: ignore[type-var]


@pytest.mark.statement("recovery-prompts", "recovery-agent")
@pytest.mark.parametrize("tool", ["modify_agent_prompts", "create_alternative_agent"])
def test_the_other_built_in_tools_run_the_step_again(opened: Opened, tool: Any) -> None:
    world = opened(Choosing(recovery=tool))
    spawned: list[str] = []
    runs: list[Any] = []
    world.engine.handler("agent_spawn")(lambda message, _: spawned.append(message.payload["agent_id"]))

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        runs.append(await ctx.prompt_additions())
        if len(runs) == 1:
            raise ValidationError("the prompt was unclear")

    world.wait(world.engine.goals.start("acme", "g"))
    handle = world.submit(goal_id="g", agent_id="a1")
    world.run_all()
    assert world.state(handle) == "COMPLETED"
    if tool == "modify_agent_prompts":
        assert runs == [[], ["An earlier attempt failed: the prompt was unclear"]]
    else:
        assert len(spawned) == 1
