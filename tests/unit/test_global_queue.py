"""The global queue alone, without goals and sandboxes."""

import subprocess
import sys

ALONE = """
import asyncio, sys
from postroom.engine import GlobalQueue
from postroom.stores.open import open_store

async def main():
    async with GlobalQueue(open_store("memory://")) as queue:
        @queue.handler("tool_call")
        def double(message, ctx):
            return ctx.effect("k", lambda: 2 * message.payload["n"])

        working = asyncio.create_task(queue.run())
        print(await queue.request(type="tool_call", org_id="acme", goal_id="g", payload={"n": 4}))
        await queue.stop()
        await working

asyncio.run(main())
print([name for name in sys.modules if name.startswith(("postroom.goals", "postroom.sandbox"))])
"""


def test_queue_runs_handlers_without_goals_and_sandboxes() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["8", "[]"]
