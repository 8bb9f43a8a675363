"""The goal act of the demo: a goal of five steps whose third step fails for good.

Each step notes what it does in a file. Step 3 charges a card, sends a mail, and then finds the train full: a
dead letter. Recovery rolls the goal back to the checkpoint before the step, which undoes the charge, and runs
the step again. It reads in the context of the goal what to avoid, and takes another way. The mail cannot be
undone, and is sent exactly once.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postroom import Engine, Policy, Retry, ValidationError

STEPS = 5
TIME_LIMIT_S = 600.0
GOAL = "trip"
POLICY = Policy(lease_s=2.0, retries={"tool_call": Retry(max_retries=0)})

Say = Callable[[str, str, str], None]


def engine_of(folder: Path) -> tuple[Engine, Path]:
    """The engine with its handlers, and the file that they write to."""
    engine = Engine.open(f"sqlite:///{folder / 'queue.db'}", POLICY)
    notes = folder / "notes.txt"

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    @engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> str:
        number = message.payload["step"]
        context, _ = await ctx.goal_context()
        avoided = bool(context.get("avoid_approaches"))
        if number == STEPS - 2:
            undo = {"type": "model_call", "payload": {"refund": number}}
            key = f"charge {'plane' if avoided else 'train'}"
            await ctx.effect(key, lambda: note(key), reversal=undo, reversal_class="COMPENSATABLE")
            await ctx.effect("mail", lambda: note("mail"), reversal_class="IRREVERSIBLE")
            if not avoided:
                raise ValidationError("the train is full")
        note(f"step {number} by {'plane' if avoided else 'train'}")
        return f"step {number}"

    @engine.handler("model_call")
    async def refund(message: Any, ctx: Any) -> None:
        await ctx.effect("refund", lambda: note(f"refund {message.payload['refund']}"))

    return engine, notes


async def travel(engine: Engine, say: Say) -> str:
    """Submit the five steps, one after the other, and complete the goal."""
    worker = asyncio.create_task(engine.run())
    await engine.goals.start("acme", GOAL, context={"to": "Rome"})
    for number in range(1, STEPS + 1):
        await engine.graph.branch(GOAL).save(f"step {number}", {"to": "Rome"})
        handle = await engine.submit(
            type="tool_call", org_id="acme", goal_id=GOAL, task_id=f"t{number}", payload={"step": number}
        )
        async with asyncio.timeout(TIME_LIMIT_S):
            # A step may fail first and be recovered then, and `handle.result` would raise at the failure.
            while (info := await engine.get(handle.message_id)).state != "COMPLETED":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for failure in info.errors:
            say("step", "failed for good", f"step {number}: {failure['error']}")
        say("step", "done", f"{number} of {STEPS}{', in another way' if info.errors else ''}")
    status = await engine.goals.complete(GOAL)
    say("recovery", "used", f"{', '.join(status.tried)}; {status.checkpoints} checkpoints were taken")
    await engine.stop()
    await worker
    return status.state


def act_goals(folder: Path, say: Say) -> bool:
    """Run the act; returns whether everything is as it should be."""
    print("\nAct 4, second part: a goal of five steps, the third of which fails for good\n")
    (folder / "goal").mkdir()
    engine, notes = engine_of(folder / "goal")
    with engine:
        state = asyncio.run(travel(engine, say))
        merged = engine.blocking.wait(engine.graph.main("acme").get(f"step {STEPS}")) is not None
    done = Counter(notes.read_text().splitlines())
    fine = state == "COMPLETED" and merged and done["mail"] == 1
    fine = fine and done["charge train"] == done["refund 3"] == done["charge plane"] == 1
    say("proof", "of the goal", f"mail sent {done['mail']} time, charge undone {done['refund 3']} time")
    return fine
