"""Coordinators in several real processes: takeover after a kill, one winner of a race, and a full disk."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import AgentReplaced, Coordinator, Engine
from postroom.engine.agents.agent import Agent
from postroom.engine.agents.agent_operations import AgentInfo
from postroom.engine.agents.coordinator import BEAT_S
from postroom.engine.agents.leases import LEASE_S
from postroom.engine.rules.cells import REQUESTS
from postroom.errors import WriteFailed
from postroom.testing import check_consistency
from tests import children, warmpython
from tests.children import no_child_left
from tests.engines import soon
from tests.smalldisk import fill, small_disk

__all__ = ["no_child_left", "small_disk"]  # fixtures

TAKEOVER_S_MAX = 5.0
REGISTRATIONS = 1_000
PROGRAM = """
import asyncio, sys
from postroom import Coordinator, Engine

async def main():
    async with Coordinator(Engine.open(sys.argv[1])) as coordinator:
        await coordinator.register("planner", "acme")
        print(coordinator.epoch, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def planner(engine: Engine, is_there: Callable[[AgentInfo], bool]) -> AgentInfo:
    """The agent as soon as it is as expected."""
    while True:
        for info in await engine.agents("acme"):
            if is_there(info):
                return info
        await asyncio.sleep(0.01)


# ---- takeover --------------------------------------------------------------------------------------


@pytest.mark.statement("recovery-time-coordinator")
def test_another_coordinator_takes_over_after_a_kill(tmp_path: Path) -> None:
    """The time is printed, not asserted: what bounds it are the lease and the pause between two looks."""
    url = f"sqlite:///{tmp_path}/queue.db"
    with warmpython.popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        first = int(victim.stdout.readline())

        async def scenario() -> None:
            async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
                before = await planner(engine, lambda info: info.epoch == first)
                victim.send_signal(signal.SIGKILL)
                begun = time.monotonic()
                after = await planner(engine, lambda info: info.coordinator == coordinator.id)
                print(f"taken over {time.monotonic() - begun:.2f} s after the kill")
                assert after.epoch == coordinator.epoch > first
                assert after.registered_at == before.registered_at
                assert after.health in ("registered", "alive", "suspect")

        soon(scenario())
    assert LEASE_S + BEAT_S < TAKEOVER_S_MAX


# ---- a race ----------------------------------------------------------------------------------------


def test_registrations_in_two_processes_have_one_winner(tmp_path: Path, no_child_left: None) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    ready_in, ready_out = os.pipe()

    def register(name: str) -> Callable[[], None]:
        async def work() -> None:
            async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
                os.read(ready_in, 1)  # both begin together
                agents = [await coordinator.register("planner", "acme") for _ in range(REGISTRATIONS)]
                sessions = [agent.session for agent in agents]
                assert sessions == sorted(set(sessions))
                (tmp_path / name).write_text(" ".join(map(str, sessions)))
                for agent in agents[:-1]:
                    with pytest.raises(AgentReplaced):
                        await agent.beat()

        return lambda: asyncio.run(work())

    pids = [children.start(register(name)) for name in ("a", "b")]
    os.write(ready_out, b"xx")
    children.wait(*pids)
    for end in (ready_in, ready_out):
        os.close(end)
    sessions = {name: [int(word) for word in (tmp_path / name).read_text().split()] for name in ("a", "b")}
    assert len({*sessions["a"], *sessions["b"]}) == 2 * REGISTRATIONS

    async def scenario() -> None:
        async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
            assert [info.agent_id for info in await engine.agents()] == ["planner"]
            check_consistency(engine.store)
            *_, loser, winner = sorted(own[-1] for own in sessions.values())
            assert (await coordinator.attach("planner", "acme", winner)).session == winner
            with pytest.raises(AgentReplaced):
                await coordinator.attach("planner", "acme", loser)

    soon(scenario())


# ---- a full disk -----------------------------------------------------------------------------------


def test_on_a_full_disk_answers_are_handed_over_and_nothing_is_lost(small_disk: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with (
            Engine.open(f"sqlite:///{small_disk}/queue.db") as engine,
            Coordinator(engine) as coordinator,
        ):

            @engine.handler("tool_call")
            async def tool(message: Any, _ctx: Any) -> Any:
                await gate.wait()
                return {"got": message.payload["n"]}

            worker = asyncio.create_task(engine.run())
            agent = await coordinator.register("planner", "acme")
            streams = [agent.stream(type="tool_call", payload={"n": n}) for n in range(3)]
            for stream in streams:
                assert (await anext(stream)).type == "acknowledgment"
            filler = fill(small_disk)
            with pytest.raises(WriteFailed, match="No space left"):
                await _submit_for_ever(agent)
            gate.set()
            assert [(await anext(stream)).result for stream in streams] == [{"got": n} for n in range(3)]
            for stream in streams:
                assert await anext(stream, None) is None
            filler.unlink()
            assert await agent.request(type="tool_call", payload={"n": 9}) == {"got": 9}
            assert {part.result["got"] async for part in agent.resume() if part.type == "result"} <= {3}
            while engine.store.read(REQUESTS.all):  # noqa: ASYNC110 - the store has no event for it
                await asyncio.sleep(0.01)
            check_consistency(engine.store)
            await engine.stop()
            await worker

    soon(scenario())


async def _submit_for_ever(agent: Agent) -> None:
    payload = {"n": 3, "text": "x" * 10_000}
    while True:
        await agent.submit({"type": "tool_call", "org_id": "acme", "agent_id": "planner", "payload": payload})
