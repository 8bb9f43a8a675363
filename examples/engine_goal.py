"""A goal whose step fails for good: it is rolled back, runs again with what was learned, and is merged."""

import asyncio
from typing import Any

from postroom import Engine, ValidationError

engine = Engine.open("memory://")


@engine.handler("tool_call")
async def book(_: Any, ctx: Any) -> dict[str, str]:
    """Book a seat. The context of the goal says what did not work before."""
    context, _ = await ctx.goal_context()
    await ctx.effect("mail", lambda: print("a mail is sent"), reversal_class="IRREVERSIBLE")
    if not context.get("avoid_approaches"):
        raise ValidationError("the train is full")
    return {"by": "plane", "because": context["previous_failure"]["error"]}


async def recovered(message_id: str) -> Any:
    """Wait until the message is done. It is a dead letter for a moment, until recovery runs it again."""
    for _ in range(500):
        if (await engine.get(message_id)).state == "COMPLETED":
            break
        await asyncio.sleep(0.02)
    return await engine.get(message_id)


async def main() -> None:
    """Start a goal, let its step fail once, and complete it."""
    worker = asyncio.create_task(engine.run())
    await engine.goals.start("acme", "trip", context={"to": "Rome"})
    handle = await engine.submit(type="tool_call", org_id="acme", goal_id="trip", payload={})
    print((await recovered(handle.message_id)).result)
    await engine.graph.branch("trip").save("trip", {"booked": True}, [("to", "Rome")])
    status = await engine.goals.complete("trip")
    print(status.state, "after", status.tried)
    node = await engine.graph.main().get("trip")
    print(node.properties if node else None)
    await engine.stop()
    await worker


asyncio.run(main())
engine.close()
