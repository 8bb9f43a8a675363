"""Agents without a program: they sleep, their messages wait, and a registration wakes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import AgentRules, Organization, Policy
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.agent_sweeps import sweep_agents
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.agents.leases import WantedPrograms
from postroom.stores.transaction import Transaction
from tests.engines import EngineUnderTest
from tests.goalworlds import Choosing, Opened, opened_engines


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    yield from opened_engines(url, organizations={"small": Organization(max_agents=1)})


def control(world: EngineUnderTest, kind: str, org_id: str = "acme", **payload: Any) -> Any:
    """The reply to `agent_spawn` or `agent_terminate`."""
    handle = world.submit(type=f"agent_{kind}", org_id=org_id, payload=payload, max_retries=0)
    world.run_all()
    return world.wait(handle.result())


def agents(world: EngineUnderTest) -> dict[str, str]:
    """The health of each agent."""
    policy = world.engine.policy

    def listed(transaction: Transaction) -> dict[str, str]:
        return {one.agent_id: one.health for one in AgentOperations(transaction, policy).list()}

    return world.engine.store.read(listed)


@pytest.mark.statement("agent-asleep", "type-agent-spawn")
def test_agent_without_a_program_sleeps_until_it_registers(opened: Opened) -> None:
    world = opened()
    assert control(world, "spawn", agent_id="writer") == {"agent_id": "writer", "health": "asleep"}
    world.clock.advance(10_000)
    world.engine.store.write(lambda one: sweep_agents(AgentOperations(one, world.engine.policy)))
    assert agents(world) == {"writer": "asleep"}
    sent = world.submit(type="agent_message", payload={"to": "writer", "body": "good morning"})
    world.run_all()
    assert world.state(sent) == "COMPLETED"

    def wake(transaction: Transaction) -> Any:
        operations = AgentOperations(transaction, world.engine.policy)
        operations.register("acme", "writer", "c1")
        [(_, letter)] = Inboxes(operations).letters("acme", "writer")
        return letter.body

    assert world.engine.store.write(wake) == "good morning"
    assert agents(world)["writer"] != "asleep"
    assert control(world, "spawn", agent_id="writer") == {"agent_id": "writer", "health": "asleep"}
    assert agents(world)["writer"] != "asleep", "a registered agent is not put to sleep"


def test_terminated_agent_that_sleeps_is_forgotten(opened: Opened) -> None:
    world = opened()
    control(world, "spawn", "small", agent_id="writer")
    over = world.submit(type="agent_spawn", org_id="small", payload={"agent_id": "more"}, max_retries=0)
    world.run_all()
    assert world.state(over) == "DEAD_LETTER"
    assert control(world, "terminate", "small", agent_id="writer") == {"agent_id": "writer", "ended": True}
    assert agents(world) == {}
    assert control(world, "spawn", "small", agent_id="more")["health"] == "asleep"


def test_supervisor_with_a_program_starts_agents_that_sleep(opened: Opened) -> None:
    world = opened()
    control(world, "spawn", agent_id="writer", tools=["search"], prompt="Write briefly.")

    def wanted(transaction: Transaction, *program: str) -> Any:
        policy = Policy(agents=AgentRules(program=program))
        return WantedPrograms(transaction, policy).wanted_by("supervisor")

    assert world.engine.store.write(wanted) == {}
    [(agent, program)] = world.engine.store.write(lambda one: wanted(one, "agent", "--now")).items()
    assert agent == ("acme", "writer")
    assert (program.command, program.tools) == (("agent", "--now"), ("search",))
    assert program.prompt == "Write briefly."


@pytest.mark.parametrize("prompt", [7, "x" * 16_001, "a\0b"])
def test_prompt_that_does_not_fit_is_refused(opened: Opened, prompt: Any) -> None:
    world = opened()
    handle = world.submit(type="agent_spawn", payload={"agent_id": "a", "prompt": prompt})
    world.run_all()
    assert (
        "a text of up to 16000 characters"
        in world.wait(world.engine.get(handle.message_id)).errors[-1]["error"]
    )


@pytest.mark.statement("recovery-agent")
@pytest.mark.parametrize("goal_id", ["g", "a goal with spaces"])
def test_alternative_agent_has_tools_and_prompt_and_runs_the_step(opened: Opened, goal_id: str) -> None:
    world = opened(Choosing(recovery="create_alternative_agent"))
    runs: list[tuple[str, list[str]]] = []

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        runs.append((message.agent_id, await ctx.prompt_additions()))
        if message.agent_id == "a1":
            raise ValueError("this agent cannot")

    control(world, "spawn", agent_id="a1", tools=["search"])
    world.wait(world.engine.goals.start("acme", goal_id))
    handle = world.submit(goal_id=goal_id, agent_id="a1", task_id="t", max_retries=0)
    world.run_all()
    assert world.state(handle) == "COMPLETED"
    first, (agent_id, additions) = runs
    assert first == ("a1", [])
    assert agent_id.startswith("alternative-1-")
    assert additions == ["Your task: t\nYou are specialized for: tool_call: this agent cannot"]
    assert agents(world) == {"a1": "asleep", agent_id: "asleep"}
    wanted = world.engine.store.write(
        lambda one: WantedPrograms(one, Policy(agents=AgentRules(program=("x",)))).wanted_by("s")
    )
    assert (wanted["acme", agent_id].tools, wanted["acme", agent_id].prompt) == (("search",), additions[0])
