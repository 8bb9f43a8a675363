"""The speed of `postroom up`: its start, idle memory, MCP tool calls over stdio, submits over HTTP."""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from figures import REPEATS, Figure, Goal, Report, machine, percentile, run
from mcp import Client, StdioServerParameters

READY_S = 1.0
IDLE_MB = 120.0
MCP_P50_MS = 10.0
SUBMITS_A_SECOND = 4_000.0
CONNECTIONS = 16
IDLE_S = 3.0  # from ready to the look at the memory


@dataclass(frozen=True)
class Sizes:
    """The quick one only shows that everything runs."""

    calls: int = 1_000
    starts: int = 5
    submit_s: float = 4.0


QUICK = Sizes(calls=5, starts=1, submit_s=0.2)


@contextmanager
def _up(data: Path) -> Iterator[tuple[dict[str, Any], float]]:
    """A running `postroom up` with all parts: its addresses, and how long it took."""
    command = [sys.executable, "-m", "postroom.cli.main", "--json", "up", "--data", str(data)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--http-port", "0", "--nats-port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        yield facts, time.perf_counter() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def start_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """From the command to the line with the addresses, and the memory of all its processes when idle."""
    times, sums, parts = [], [], ""
    for number in range(sizes.starts):
        with _up(folder / f"run-{number}") as (facts, ready_s):
            times.append(ready_s)
            time.sleep(IDLE_S)
            found = _memory_mb(facts["pid"])
        sums.append(sum(found.values()))
        parts = ", ".join(f"{name} {size:.0f}" for name, size in found.items())
    goal = [Goal("value", "<", READY_S)]
    yield Figure("up ready, p50", percentile(times, 0.5), "s", f"slowest: {max(times):.2f} s", goals=goal)
    limit = [Goal("value", "<", IDLE_MB)]
    yield Figure("up idle, memory of all parts", percentile(sums, 0.5), "MB", parts, goals=limit)


def _memory_mb(pid: int) -> dict[str, float]:
    """Proportional set size of `up` and its parts: shared pages are counted once."""
    threads = Path(f"/proc/{pid}/task").iterdir()  # each part is the child of a thread
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    found = {"up": _pss_mb(pid)}
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        found[" ".join(words[4:6])] = _pss_mb(int(child))
    return found


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(line)


def submit_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Messages of one organization, one for each request, on connections that wait for each answer."""
    with _up(folder / "run") as (facts, _):
        address = urlsplit(facts["http"])
        counts = [0] * CONNECTIONS
        end = time.perf_counter() + sizes.submit_s

        def submit(place: int) -> None:
            body = json.dumps({"type": "tool_call", "org_id": "bench", "payload": {"n": place}})
            head = (
                f"POST /engine/messages HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {facts['token']}\r\n"
            )
            request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
            with socket.create_connection((address.hostname, address.port)) as connection:
                while time.perf_counter() < end:
                    connection.sendall(request)
                    answer = connection.recv(65536)
                    while not answer.endswith(b"}"):  # the head alone has come
                        answer += connection.recv(65536)
                    assert answer.startswith(b"HTTP/1.1 202"), answer
                    counts[place] += 1

        threads = [threading.Thread(target=submit, args=(place,)) for place in range(CONNECTIONS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = sum(counts) / (time.perf_counter() - begun)
    yield Figure(
        f"HTTP submit of Engine, {CONNECTIONS} connections",
        rate,
        "messages/s",
        "one message a request; the clients are one Python process on the same machine",
        goals=[Goal("value", ">=", SUBMITS_A_SECOND)],
    )


def mcp_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A tool that writes and one that reads, one call after the other."""
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


BENCHES: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
    "start": start_figures,
    "mcp": mcp_figures,
    "submit": submit_figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=BENCHES, help="one part")
    options = parser.parse_args()
    report = Report(f"up: {machine()}; times of {Sizes().calls} calls, not {REPEATS} repeats")
    report.begin()
    for name, bench in BENCHES.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in bench(Path(folder), QUICK if options.quick else Sizes()):
                    report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
