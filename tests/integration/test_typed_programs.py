"""The types of the public surface, as mypy --strict sees them in the programs of users."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MISTAKES = """
from typing import Any

from postroom import Coordinator, Engine, Retry, SubmitFields, Tasks

engine = Engine.open("memory://")
tasks = Tasks.open("memory://")
common: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}


@engine.handler("tool_call", retry=Retry(max_retries=1), pool="process")
async def run(message: Any, ctx: Any) -> str:
    return "done"


@engine.handler("tool_call", time_out_s=1.0)  # a misspelt option
async def misspelt(message: Any, ctx: Any) -> None: ...


@engine.handler("tool_call", pool="fibre")  # no such pool
async def pooled(message: Any, ctx: Any) -> None: ...


async def main() -> None:
    handle = await engine.submit(**common)
    await engine.submit(type="tool_call", org_id="acme", payload={}, idempotencykey="k")  # a misspelt field
    await engine.submit(type="tool_call", payload={})  # no organization
    await engine.submit(type="tool_call", org_id="acme", payload=[])  # not an object
    await engine.submit(type="tool_call", org_id="acme", payload={}, priority="high")  # not a number
    await engine.submit(type="tool_call", org_id="acme", payload={}, durability="disk")  # no such class
    await engine.submit_many([common, {**common, "delay_s": 1.0}])
    await engine.submit_many([{"type": "tool_call", "org_id": "acme"}])  # no payload
    await engine.submit_many([{**common, "delay": 1.0}])  # a misspelt field
    await engine.request(**common, timeout_s=1.0)
    await engine.request(**common, timeout=1.0)  # a misspelt field
    handle.message_id.append("x")  # a text
    handle.results()  # a misspelt method
    await engine.dlq.replay(error_type="ValueError", dry_run=True)
    await engine.dlq.replay(error="ValueError")  # a misspelt filter
    (await engine.dlq.list())[0].can_replay.real
    (await engine.dlq.list())[0].can_be_replayed  # a misspelt attribute
    (await engine.get("m")).errors[0]["error_type"].upper()
    (await engine.get("m")).errors[0]["kind"]  # a misspelt key
    await engine.goals.start("acme", goal="trip")  # a misspelt field
    async with Coordinator(engine) as coordinator:
        agent = await coordinator.register("planner", "acme")
        await agent.request(type="model_call", payload={}, priority=1)
        await agent.request(type="model_call", payload={}, org_id="zen")  # follows from the agent
        await agent.request(type="model_call", payload={}, modells=["m"])  # a misspelt field
        async for part in agent.stream(type="model_call", payload={}):
            print(part.chunk_number)  # a misspelt attribute
        sent = await agent.send(to="writer", payload={}, priority=1)
        await sent.receipt()  # a misspelt method


engine.blocking.submit(**common).result(timeout_s=1.0)
engine.blocking.submit(type="tool_call", org_id="acme", payload={}, tokns=1)  # a misspelt field
tasks.enqueue(agent="a", payload={}, delay=1.0)  # a misspelt field
tasks.enqueue_many([{"agent": "a", "payload": {}, "max_retries": 1}])
tasks.enqueue_many([{"agent": "a", "payload": {}, "maxretries": 1}])  # a misspelt field
tasks.claim(agent="a")[0].tasc_id  # a misspelt attribute
"""


def test_type_checker_finds_each_planted_mistake_and_none_in_the_examples(tmp_path: Path) -> None:
    program = tmp_path / "planted_mistakes.py"
    program.write_text(MISTAKES)
    planted = {number for number, line in enumerate(MISTAKES.splitlines(), 1) if "  # " in line}
    checked = subprocess.run(  # the configuration and the cache of `make check`
        [sys.executable, "-m", "mypy", "--no-pretty", "examples", str(program)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not checked.stderr
    errors = re.findall(r"^(.*):(\d+): error: ", checked.stdout, re.MULTILINE)
    # Only the name: the cache has the path of an earlier run when the text is the same.
    assert {Path(file).name for file, _ in errors} == {program.name}, checked.stdout
    assert {int(number) for _, number in errors} == planted, checked.stdout
