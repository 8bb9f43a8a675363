"""Three agents on one coordinator: a request, a stream, a message between agents, and a crash.

The agents run in a process of their own, which is killed with -9 while an answer is on its way. The same
agents register again in another process, and `resume` gives them what the first process did not get.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from postroom import Coordinator, Engine, StreamRestarted

ORG = "acme"


def open_engine(folder: Path) -> Engine:
    """The queue, with a model that writes word by word, and a slow tool."""
    engine = Engine.open(f"sqlite:///{folder}/queue.db")

    @engine.handler("model_call")
    async def write(message: Any, ctx: Any) -> None:
        for word in message.payload["prompt"].split():
            await ctx.stream(word.upper() + " ")

    @engine.handler("tool_call")
    async def search(message: Any, ctx: Any) -> dict[str, Any]:
        await ctx.progress(0.5, "searching")
        await asyncio.sleep(message.payload["takes_s"])
        return {"found": message.payload["query"]}

    return engine


async def before_the_crash(folder: Path) -> None:
    """The first life of the agents. Their worker is another process."""
    async with Coordinator(open_engine(folder)) as coordinator:
        planner = await coordinator.register("planner", ORG)
        writer = await coordinator.register("writer", ORG)
        await coordinator.register("critic", ORG)

        answer = await planner.request(type="model_call", payload={"prompt": "plan the day"}, timeout_s=30)
        print("planner: the joined answer is", repr(answer))

        print("writer: the stream is", end="")
        stream = writer.stream(type="model_call", payload={"prompt": "to be or not"}, timeout_s=30)
        try:
            async for part in stream:
                print(f" {part.chunk.strip()}" if part.type == "stream_chunk" else f" ({part.type})", end="")
        except StreamRestarted:
            print(" ... and begins again", end="")
        print()

        sent = await planner.send(to="critic", payload={"text": answer})
        print("planner: receipts of the message to critic:", ", ".join(await sent.receipts()))

        async for part in planner.stream(type="tool_call", payload={"query": "weather", "takes_s": 1.0}):
            if part.type == "progress":
                print(
                    "planner: a tool is",
                    part.message,
                    "- and the process of all agents is killed",
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGKILL)


async def after_the_crash(folder: Path) -> None:
    """The second life: each agent registers again, and gets the answers and messages that it missed."""
    async with Coordinator(open_engine(folder)) as coordinator:
        agents = [await coordinator.register(name, ORG) for name in ("planner", "writer", "critic")]
        for agent in agents:
            async for part in agent.resume():
                if part.type == "result":
                    found = part.result["found"]
                    print(f"{agent.agent_id}: resumed in epoch {part.epoch}, and the tool found {found}")
        [letter] = await agents[-1].inbox()
        print("critic: has a message from", letter.sender, "with", letter.payload)
        await letter.done()
        waiting = [agent.agent_id for agent in await coordinator.agents(ORG) if agent.waits_for]
        print("agents that still wait for an answer:", len(waiting))


async def work(folder: Path) -> None:
    """The worker process."""
    engine = open_engine(folder)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: asyncio.ensure_future(engine.stop())
    )
    await engine.run()
    engine.close()


LIVES = {"before": before_the_crash, "after": after_the_crash, "work": work}


def main(folder: Path) -> bool:
    """Run the worker and both lives of the agents; whether the second life ended well."""
    folder.mkdir(parents=True, exist_ok=True)

    def start(life: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, __file__, str(folder), life])

    worker = start("work")
    try:
        killed = start("before").wait()
        print(f"-- killed with signal {-killed} --", flush=True)
        return start("after").wait() == 0
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        asyncio.run(LIVES[sys.argv[2]](Path(sys.argv[1])))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
