"""The speed of `postroom up`: its start and memory, MCP tool calls, submits over HTTP, and the live page."""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import REPEATS, Figure, Goal, Report, machine, percentile, run
from mcp import Client, StdioServerParameters
from page_figures import page_figures
from up_figures import start_figures, submit_figures

from postroom.server.access.tokens import TokenRegistry

MCP_P50_MS = 10.0


@dataclass(frozen=True)
class Sizes:
    """The quick one only shows that everything runs."""

    calls: int = 1_000
    starts: int = 5
    submit_s: float = 4.0
    messages: int = 1_000_000
    loads: int = 20
    seconds: float = 4.0
    events: int = 100
    pages: int = 50
    idle_s: float = 3.0  # from ready to the look at the memory


QUICK = Sizes(
    calls=5, starts=1, submit_s=0.2, messages=100, loads=1, seconds=0.1, events=1, pages=2, idle_s=0.0
)


def mcp_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A tool that writes and one that reads, one call after the other."""
    TokenRegistry(folder / "run").create("agent", "bench", "bench")  # makes the data folder
    times = asyncio.run(_call_times(folder, sizes.calls))
    for tool, found in times.items():
        yield Figure(
            f"MCP tool call over stdio, {tool}, p50",
            percentile(found, 0.5),
            "ms",
            f"p99: {percentile(found, 0.99):.1f} ms",
            goals=[Goal("value", "<", MCP_P50_MS)],
        )


async def _call_times(folder: Path, calls: int) -> dict[str, list[float]]:
    command = ["-m", "postroom.cli.main", "mcp", "--data", str(folder / "run"), "--agent", "bench"]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with Client(parameters) as client:
        sent = await client.call_tool("submit", {"type": "tool_call", "payload": {}})
        message_id = sent.structured_content["message_id"]
        arguments = {"submit": {"type": "tool_call", "payload": {}}, "result": {"id": message_id}}
        times: dict[str, list[float]] = {tool: [] for tool in arguments}
        for _ in range(calls):
            for tool, given in arguments.items():
                begun = time.perf_counter()
                answer = await client.call_tool(tool, given)
                times[tool].append((time.perf_counter() - begun) * 1_000)
                assert not answer.is_error, answer.content
    return times


def live_page_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """The live page in a real browser."""
    yield from page_figures(
        folder,
        messages=sizes.messages,
        loads=sizes.loads,
        seconds=sizes.seconds,
        events=sizes.events,
        pages=sizes.pages,
    )


def up_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """The start of `postroom up`, and the memory of its idle parts."""
    yield from start_figures(folder, sizes.starts, sizes.idle_s)


def http_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Submits over HTTP."""
    yield from submit_figures(folder, sizes.submit_s)


BENCHES: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
    "start": up_figures,
    "mcp": mcp_figures,
    "submit": http_figures,
    "page": live_page_figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=BENCHES, help="one part")
    parser.add_argument("--messages", type=int, default=Sizes.messages, help="stored before the first view")
    options = parser.parse_args()
    sizes = Sizes(messages=options.messages)
    report = Report(f"up: {machine()}; times of {Sizes().calls} calls, not {REPEATS} repeats")
    report.begin()
    for name, bench in BENCHES.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in bench(Path(folder), QUICK if options.quick else sizes):
                    report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
