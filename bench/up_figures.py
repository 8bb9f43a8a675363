"""Figures of a running `postroom up`: its start, the memory of its idle parts, and submits over HTTP."""

import compileall
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from figures import Figure, Goal, percentile

import postroom

READY_S = 1.0
IDLE_MB = 120.0
SUBMITS_A_SECOND = 4_000.0
CONNECTIONS = 16


@contextmanager
def _up(data: Path) -> Iterator[tuple[dict[str, Any], float]]:
    """A running `postroom up` with all parts: its addresses, and how long it took."""
    command = [sys.executable, "-m", "postroom.cli.main", "--json", "up", "--data", str(data)]
    begun = time.perf_counter()
    ports = ["--http-port", "0", "--nats-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            yield facts, time.perf_counter() - begun
        finally:
            process.send_signal(signal.SIGTERM)


def start_figures(folder: Path, starts: int, idle_s: float) -> Iterator[Figure]:
    """From the command to the line with the addresses, and the memory of all its processes when idle."""
    compileall.compile_dir(Path(postroom.__file__).parent, quiet=2)  # as an installation does
    times, sums, parts = [], [], ""
    for number in range(starts):
        with _up(folder / f"run-{number}") as (facts, ready_s):
            times.append(ready_s)
            time.sleep(idle_s)
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


def submit_rate(url: str, token: str, seconds: float) -> float:
    """Messages a second that `CONNECTIONS` clients submit together, each waiting for its answers."""
    address = urlsplit(url)
    counts = [0] * CONNECTIONS
    end = time.perf_counter() + seconds

    def submit(place: int) -> None:
        body = json.dumps({"type": "tool_call", "org_id": "bench", "priority": 0, "payload": {"n": place}})
        head = f"POST /engine/messages HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
        with socket.create_connection((address.hostname, address.port)) as connection:
            while time.perf_counter() < end:
                connection.sendall(request)
                answer = connection.recv(65536)
                while not answer.endswith(b"}"):  # the head alone has come
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 202"), answer
                counts[place] += 1

    begun = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(submit, range(CONNECTIONS)))
    return sum(counts) / (time.perf_counter() - begun)


def submit_figures(folder: Path, seconds: float) -> Iterator[Figure]:
    """P0 messages, which backpressure never refuses: one a request, on connections that wait for answers."""
    with _up(folder / "run") as (facts, _):
        rate = submit_rate(facts["http"], facts["token"], seconds)
    yield Figure(
        f"HTTP submit of Engine, {CONNECTIONS} connections",
        rate,
        "messages/s",
        "one message a request; the clients are one Python process on the same machine",
        goals=[Goal("value", ">=", SUBMITS_A_SECOND)],
    )
