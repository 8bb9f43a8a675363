"""Contexts above `CONTEXT_BYTES_MAX`: they are stored once, and messages refer to them."""

from typing import Any

import pytest

from postroom.engine.message_input import CONTEXT_BYTES_MAX
from postroom.errors import InvalidMessage, ValidationError
from tests.engines import EngineUnderTest
from tests.goalworlds import Opened, database, opened, postgres, url, world
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures

DAY_S = 86_400.0
EVENTS_KEPT_S = 1_000 * DAY_S  # the checks at the end need every event
LARGE = {"pages": ["x" * 1_000 for _ in range(200)], "session": {"é": None}}


def bodies(world: EngineUnderTest) -> int:
    return len(world.engine.store.read(lambda transaction: transaction.cells.page("engine.body")))


@pytest.mark.statement("context-field")
def test_a_large_context_is_stored_once_and_given_to_every_handler(opened: Opened) -> None:
    world = opened(keep_events_s=EVENTS_KEPT_S)
    seen = []

    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> Any:
        seen.append((message.context, list((await ctx.build_context(1_000_000)).parts)))
        if message.payload.get("fails"):
            raise ValidationError("no")

    handles = [world.submit(context=LARGE), world.submit(context=LARGE, payload={"fails": True})]
    ids = [handle.message_id for handle in handles]
    stored = world.engine.store.load(ids[0])
    assert stored is not None
    assert len(stored.envelope.payload) < 1_000
    assert bodies(world) == 1
    world.run_all()
    assert seen == [(LARGE, ["message.pages", "message.session"])] * 2
    assert world.message(ids[0]).context == LARGE
    assert world.wait(world.engine.dlq.show(ids[1])).original_message["context"] == LARGE
    assert world.wait(world.engine.dlq.replay([ids[1]])).message_ids == [ids[1]]
    world.run_all()
    assert seen[2] == seen[0]
    world.wait(world.engine.dlq.purge([ids[1]]))
    assert bodies(world) == 1
    world.clock.advance(8 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert bodies(world) == 0


def test_a_handler_in_a_process_of_its_own_gets_a_large_context(world: EngineUnderTest) -> None:
    world.engine.handler("tool_call", pool="process")(lambda message, _: len(message.context["pages"]))
    handle = world.submit(context=LARGE)
    world.run_all()
    assert world.wait(handle.result(HANG_GUARD_S)) == 200


def test_only_what_is_above_the_limit_is_stored_apart(world: EngineUnderTest) -> None:
    text = "x" * (CONTEXT_BYTES_MAX - len('{"t":""}'))
    world.submit(context={"t": text})
    assert bodies(world) == 0
    world.submit(context={"t": text + "x"})
    assert bodies(world) == 1
    for name in ("metadata", "token_needs"):
        with pytest.raises(InvalidMessage, match=f"^{name} has 65537 bytes"):
            world.submit(**{name: {"t": text + "x"}})
    for wrong in ("", [1], 0, "text"):
        with pytest.raises(InvalidMessage, match=r"^context must be a JSON object"):
            world.submit(context=wrong)


@pytest.mark.statement("recovery-restart")
def test_a_restarted_goal_has_its_large_contexts_and_changed_payloads(opened: Opened) -> None:
    world = opened(keep_events_s=EVENTS_KEPT_S)
    seen = []

    @world.engine.handler("tool_call")
    async def run(message: Any, _: Any) -> None:
        seen.append((message.payload, message.context))

    world.wait(world.engine.goals.start("acme", "g"))
    payload = {"text": "y" * 100_000}
    world.submit(goal_id="g", context=LARGE, payload=payload)
    world.run_all()
    world.wait(world.engine.recovery.restart_entire_goal("g", {"more": 1}))
    world.run_all()
    assert seen == [(payload, LARGE), (payload | {"more": 1}, LARGE)]
    assert bodies(world) == 3
    world.wait(world.engine.goals.fail("g"))
    world.clock.advance(30 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert bodies(world) == 0
