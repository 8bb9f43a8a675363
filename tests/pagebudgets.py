"""An engine with a token budget, a service that is down, and a handler that holds its messages."""

import asyncio
from typing import Any

from postroom import Breaker, Engine, Policy
from postroom.core.lifecycle.retry import Retry

POLICY = Policy(
    tokens={"providers": {"local": {"models": {"small": {"tokens_per_minute": 1_000}}}}},
    breaker=Breaker(failures=3, cooldown_s=300.0),
)
NO_RETRY = Retry(max_retries=0)


def opened(url: str, released: asyncio.Event) -> Engine:
    """The engine of a store. Model calls are held until `released` is set."""
    found = Engine.open(url, POLICY)

    @found.handler("tool_call", service="slack", retry=NO_RETRY)
    async def call(_message: Any, _ctx: Any) -> None:
        raise ConnectionError("the service is down")

    @found.handler("model_call")
    async def hold(_message: Any, _ctx: Any) -> None:
        await released.wait()

    return found


engine = opened("memory://", asyncio.Event())
"""For `--app`, which gives the server the same policy and the same services."""
