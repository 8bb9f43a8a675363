"""The programs around a coordinator that get killed: they report after each call returned.

agents    `got TOKEN` when an agent has the last part of an answer, before the answer is acknowledged
worker    `ran TOKEN ATTEMPT` at the end of every run of its handler
"""

import asyncio
from pathlib import Path
from typing import Any

from postroom import Coordinator, Engine, Policy
from postroom.core.agents import FINAL_PARTS
from postroom.engine.agents.agent import Agent
from tests.crash.ledger import number_of, token_of
from tests.crash.workers import Report

LEASE_S = 0.5
CRASHES_MAX = 10_000
SLOTS = 4
CHUNKS = 3
ORG = "acme"
PAUSE_S = 0.005
SABOTAGE_S = 0.2  # kills follow a line of another agent, so the window must be long


def open_engine(folder: str | Path) -> Engine:
    policy = Policy(lease_s=LEASE_S, poison_crashes=CRASHES_MAX)
    return Engine.open(f"sqlite:///{folder}/queue.db", policy=policy)


def register(engine: Engine, report: Report = lambda *_: None) -> None:
    """The handler of the requests: every second one streams its answer."""

    @engine.handler("tool_call")
    async def handle(message: Any, context: Any) -> dict[str, Any]:
        token = message.payload["token"]
        for number in range(CHUNKS if token.endswith("1") else 0):
            await context.stream(f"{token}/{number}")
        report("ran", token, context.attempt)
        return {"token": token}


def worker(report: Report, *, folder: str, name: str) -> None:
    """Work until killed."""
    engine = open_engine(folder)
    register(engine, report)
    asyncio.run(engine.run(concurrency=SLOTS, worker_id=name))


def agents(report: Report, *, folder: str, names: list[str], first: int, early: bool = False) -> None:
    """A coordinator with agents that request until killed. First they resume what they find open."""
    asyncio.run(_agents(report, folder, names, first, early=early))


async def _agents(report: Report, folder: str, names: list[str], first: int, *, early: bool) -> None:
    async with Coordinator(open_engine(folder)) as coordinator:
        served = [await coordinator.register(name, ORG) for name in names]
        await asyncio.gather(*(_work(report, agent, first, early=early) for agent in served))


async def _work(report: Report, agent: Agent, first: int, *, early: bool) -> None:
    number = first
    async for part in agent.resume():
        if part.type in FINAL_PARTS:
            token = _got(report, part)
            number = max(number, number_of(token) + 1)  # the key of a token gives its answer again
    while True:
        token = token_of(agent.agent_id, number, number % 2)
        number += 1
        stream = agent.stream(
            type="tool_call",
            payload={"token": token},
            idempotency_key=token,
            restart="replace",
            durability="os",
        )
        await _follow(report, agent, stream, early=early)
        await asyncio.sleep(PAUSE_S)


async def _follow(report: Report, agent: Agent, stream: Any, *, early: bool) -> None:
    chunks: list[Any] = []
    async for part in stream:
        if part.type == "stream_chunk":
            chunks = [*chunks, part.chunk] if part.chunk_index else [part.chunk]
        elif part.type in FINAL_PARTS:
            if early:  # the sabotage that a checker must notice: acknowledged before the agent has it
                await _acknowledge(agent, stream.message_id)
            _got(report, part, chunks)


async def _acknowledge(agent: Agent, message_id: str) -> None:
    await agent.coordinator.write(
        lambda one: one.acknowledge(ORG, agent.agent_id, agent.session, [message_id])
    )
    await asyncio.sleep(SABOTAGE_S)


def _got(report: Report, part: Any, chunks: list[Any] | None = None) -> str:
    """Report the last part of an answer, and complain about one that does not fit."""
    token = part.result["token"] if part.result else ""
    expected = [f"{token}/{number}" for number in range(CHUNKS)] if token.endswith("1") else []
    is_wrong = not token or (chunks is not None and chunks != expected)
    report("wrong" if is_wrong else "got", token or part.request_id)
    return str(token)


async def resumed(engine: Engine, names: list[str]) -> list[str]:
    """What agents find open when they are registered once more."""
    lines: list[str] = []

    def report(*words: Any) -> None:
        lines.append(" ".join(map(str, words)))

    async with Coordinator(engine) as coordinator:
        for name in names:
            agent = await coordinator.register(name, ORG)
            async for part in agent.resume():
                if part.type in FINAL_PARTS:
                    _got(report, part)
    return lines
