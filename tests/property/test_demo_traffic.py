"""The traffic of `postroom up --demo`: its breakers open now and then, and its backlog stays small."""

import random
from typing import Any

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.server.up.demo import (
    MESSAGES_A_SECOND,
    ORGANIZATIONS,
    POLICY,
    SERVICES,
    call_tool,
    fate_of,
    is_down,
)
from tests.engines import EngineUnderTest

HOUR_S = 3_600
STEP_S = 2
BACKLOG_MAX = 60
OPEN_SHARE_MAX = 0.3
SEED = 7


def test_each_service_is_down_for_a_short_while_and_never_all_at_once() -> None:
    down = {name: {second for second in range(HOUR_S) if is_down(name, second)} for name in SERVICES}
    assert {name: len(seconds) for name, seconds in down.items()} == dict.fromkeys(SERVICES, 150)
    assert not set.intersection(*down.values())


def test_an_hour_of_tool_calls_opens_breakers_that_close_by_themselves() -> None:
    world = EngineUnderTest("memory://", POLICY)
    try:
        backlogs, opened = simulate(world, random.Random(SEED))
        states = world.wait(world.engine.status()).organizations
        dead = sum(one.states.get("DEAD_LETTER", 0) for one in states.values())
        done = sum(one.states.get("COMPLETED", 0) for one in states.values())
    finally:
        world.close()
    assert max(backlogs) <= BACKLOG_MAX
    assert 0 < opened / len(backlogs) <= OPEN_SHARE_MAX
    assert dead < 0.03 * done  # no more than the invalid ones


def simulate(world: EngineUnderTest, rng: random.Random) -> tuple[list[int], int]:
    """The backlog after each step, and how many steps saw an open breaker."""
    started_ns = world.clock.boot_ns()

    @world.engine.handler("tool_call")
    async def call(message: Any, ctx: Any) -> None:
        call_tool(message.payload, ctx.attempt, (world.clock.boot_ns() - started_ns) / NANOS_PER_S)

    backlogs, opened = [], 0
    for _ in range(0, HOUR_S, STEP_S):
        for _call in range(round(MESSAGES_A_SECOND / 2 * STEP_S)):  # the other half are model calls
            tool = rng.choice(SERVICES)
            payload = {"tool": tool, "fate": fate_of(rng.random())}
            world.submit(org_id=rng.choice(ORGANIZATIONS), service=tool, payload=payload)
        world.run_all()
        status = world.wait(world.engine.status())
        backlogs.append(sum(one.depth + one.delayed for one in status.organizations.values()))
        opened += any(one.state == "open" for one in status.breakers.values())
        world.clock.advance(STEP_S)
    return backlogs, opened
