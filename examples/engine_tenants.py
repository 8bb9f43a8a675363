"""The global queue: two organizations, a handler with an effect, a result, and a replayed dead letter.

`engine.run()` works in this process. Several processes can share the store: each one runs the same program.
"""

import asyncio
import tempfile
from typing import Any

from postroom import Engine, MessageFailed, ValidationError

folder = tempfile.TemporaryDirectory()
engine = Engine.open(f"sqlite:///{folder.name}/queue.db")
known_customers = {"ada"}


@engine.handler("tool_call", timeout_s=30, service="payments")
async def charge(message: Any, ctx: Any) -> Any:
    """Charge a customer. The effect is not repeated when the message is retried or replayed."""
    customer, amount = message.payload["customer"], message.payload["amount"]
    if customer not in known_customers:
        raise ValidationError(f"{customer} is unknown")  # never retried: a dead letter at once
    await ctx.progress(0.5, "charging")
    return await ctx.effect("charge", lambda: {"charged": amount})


async def main() -> None:
    """Submit for two organizations, look at the dead letter, and replay it."""
    worker = asyncio.create_task(engine.run())
    order: dict[str, Any] = {"type": "tool_call", "agent_id": "shop", "priority": 1}
    good = await engine.submit(
        **order, org_id="acme", payload={"customer": "ada", "amount": 7}, idempotency_key="order-1"
    )
    bad = await engine.submit(**order, org_id="zen", payload={"customer": "bob", "amount": 9})
    print("acme:", await good.result(timeout_s=30))
    try:
        await bad.result(timeout_s=30)
    except MessageFailed as error:
        print("zen:", error.state)

    for letter in await engine.dlq.list(org_id="zen"):
        print("dead letter:", letter.failure_reason)
    known_customers.add("bob")
    await engine.dlq.replay(org_id="zen")
    print("zen, replayed:", await bad.result(timeout_s=30))
    await engine.stop()
    await worker


asyncio.run(main())
engine.close()
folder.cleanup()
