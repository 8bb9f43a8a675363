"""Token budgets: a reservation, a loan by importance, a shortage, and the books afterwards.

P1 reserves 300 of the 1,000 tokens of a model. A message that others wait for may borrow from lower tiers.
"""

import asyncio
from typing import Any

from postroom import Engine, Policy, TokensExhausted

policy = Policy(
    tokens={
        "providers": {"openai": {"models": {"small": {"tokens_per_day": 1_000, "requests_per_minute": 60}}}},
        "tiers": [0.4, 0.3, 0.2, 0.1],
    }
)
engine = Engine.open("memory://", policy)


@engine.handler("model_call")
async def call(message: Any, ctx: Any) -> str:
    """A model call that reports the tokens of its answer."""
    ctx.use_tokens(message.payload["uses"])
    return f"{ctx.model} answered, {ctx.tokens} tokens are returned"


async def show(title: str) -> None:
    """Print the books of the model."""
    model = (await engine.tokens.status()).providers["openai"].models["small"]
    figures = f"used {model.used}, reserved {model.reserved}, free {model.free}, borrowed {model.borrowed}"
    print(f"{title}: {figures}")


async def main() -> None:
    """Run three messages: one within its tier, one with a loan, and one that finds nothing left."""
    order: dict[str, Any] = {"type": "model_call", "org_id": "acme", "models": ["small"]}
    plain = await engine.submit(**order, payload={"uses": 120}, tokens=200, priority=1)
    worker = asyncio.create_task(engine.run())
    print("plain:", await plain.result(timeout_s=30))
    await show("after it")

    blocked = await engine.submit(**order, payload={"uses": 300}, tokens=300, priority=1, delay_s=0.5)
    for _ in range(4):  # messages that wait for it make it important
        await engine.submit(**order, payload={"uses": 1}, parent_message_id=blocked.message_id, delay_s=3_600)
    print("important:", await blocked.result(timeout_s=30))
    await show("after it")

    urgent = await engine.submit(**order, payload={"uses": 1}, tokens=900, priority=0)
    try:
        await urgent.result(timeout_s=30)
    except TokensExhausted as error:
        print("urgent:", error.error_history[-1]["error"])
    await engine.stop()
    await worker


asyncio.run(main())
engine.close()
