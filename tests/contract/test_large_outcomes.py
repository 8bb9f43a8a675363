"""Effects with long outcomes: they are stored apart, returned to the next attempt, and forgotten with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.calls.fields import RESULT_BYTES_MAX
from postroom.engine.rules.cells import BODIES, BODY_USES
from postroom.engine.rules.operations import OUTCOME_INLINE_BYTES_MAX, Operations
from tests.engines import EngineUnderTest
from tests.goalworlds import opened_engines

LONG = "x" * (RESULT_BYTES_MAX - 2)


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    for open_engine in opened_engines(url):
        yield open_engine()


def bodies(world: EngineUnderTest) -> int:
    return world.engine.store.read(lambda one: len(one.cells.page(BODIES)) + len(BODY_USES.all(one)))


def working(world: EngineUnderTest, outcome: Any) -> list[Any]:
    """Register a handler whose first attempt fails after its effect; the outcomes that its attempts saw."""
    seen: list[Any] = []
    ran: list[int] = []

    @world.engine.handler("tool_call")
    async def work(_message: Any, ctx: Any) -> int:
        def run() -> Any:
            ran.append(1)
            return outcome

        seen.append(await ctx.effect("work", run))
        if len(seen) == 1:
            raise ConnectionError("after the effect")
        return len(ran)

    return seen


@pytest.mark.statement("mcp-size")
@pytest.mark.parametrize("outcome", [LONG, ["y" * OUTCOME_INLINE_BYTES_MAX], {"short": 1}])
def test_outcome_of_any_size_up_to_the_limit_is_found_by_the_next_attempt(
    world: EngineUnderTest, outcome: Any
) -> None:
    seen = working(world, outcome)
    handle = world.submit()
    world.run_all()
    world.clock.advance(60)
    world.run_all()
    assert seen == [outcome, outcome]
    assert world.wait(handle.result()) == 1
    assert bodies(world) == (0 if outcome == {"short": 1} else 2)
    stored = world.engine.store.load(handle.message_id)
    assert stored is not None
    policy = world.engine.policy
    world.engine.store.write(lambda one: Operations(one, policy).forget([stored.record]))
    assert bodies(world) == 0


def test_outcome_above_the_limit_is_refused(world: EngineUnderTest) -> None:
    working(world, LONG + "x")
    handle = world.submit()
    world.run_all()
    said = world.wait(world.engine.get(handle.message_id)).errors[-1]
    assert said["error_type"] == "ValidationError"
    assert f"at most {RESULT_BYTES_MAX} are kept" in said["error"]


def test_rollback_forgets_a_long_outcome(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def work(message: Any, ctx: Any) -> None:
        if "undo" not in message.payload:
            reversal = {"type": "tool_call", "payload": {"undo": 1}}
            await ctx.effect("work", lambda: LONG, reversal=reversal, reversal_class="REVERSIBLE")

    world.wait(world.engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()
    assert bodies(world) == 2
    [start, *_] = world.wait(world.engine.goals.checkpoints("g"))
    world.wait(world.engine.goals.rollback(start.checkpoint_id))
    world.run_all()
    assert world.wait(world.engine.goals.status("g")).state == "ACTIVE"
    assert bodies(world) == 0
