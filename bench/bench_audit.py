"""The speed of the audit stream: the cost of shipping, writing, redaction, and finding one request.

python bench/bench_audit.py [--events 5000000] [--only ship|segments|redaction|trace]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from auditbench import redaction, segments
from figures import Figure, Goal, Report, compare, machine, median_of, readable, run, seconds

from postroom import Tasks
from postroom.audit.reader import Segments
from postroom.contracts.audit import Audit
from postroom.core.formats.events import from_line
from postroom.core.history.tracing import related

AGENT = "coder"
PAYLOAD = {
    "type": "issue.triage",
    "issue": 42,
    "title": "The parser stops at the first empty line of a sample",
}
CYCLES = 8_000  # two seconds, in which the shipper ships several times
WARM_UP = 300
SHIP_COST_MAX = 0.9  # of the speed without a shipper
EVENTS = 5_000_000
EVENTS_A_MESSAGE = 4.4  # approximately
TRACE_S_MAX = 2.0


# ---- the cost of shipping ---------------------------------------------------------------------------


def cycles(tasks: Tasks, count: int) -> None:
    """Enqueue, claim and complete, one by one."""
    for _ in range(count):
        tasks.enqueue(agent=AGENT, payload=PAYLOAD)
        [task] = tasks.claim(agent=AGENT)
        tasks.complete(task.task_id, task.lease, {"ok": True})


@contextmanager
def shipper(data: Path) -> Iterator[None]:
    """A shipper as a real process, with the default settings."""
    command = [
        sys.executable,
        "-m",
        "postroom.cli.main",
        "audit",
        "ship",
        "--data",
        str(data),
        "--to",
        f"{data}/audit",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # printed when the shipper is ready
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def rate(*, shipped: bool) -> float:
    """Full cycles a second in a new store."""
    folder = Path(tempfile.mkdtemp(prefix="postroom-bench-"))
    try:
        with Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
            cycles(tasks, WARM_UP)
            if not shipped:
                return CYCLES / seconds(lambda: cycles(tasks, CYCLES))
            with shipper(folder):
                return CYCLES / seconds(lambda: cycles(tasks, CYCLES))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shipping() -> Iterator[Figure]:
    speed = compare(lambda: rate(shipped=True), lambda: rate(shipped=False))
    yield Figure(
        "Tasks, full cycles, with a shipper",
        speed.ours,
        "cycles/s",
        f"without: {readable(speed.theirs)} cycles/s",
        speed.ratio,
        [Goal("ratio", ">=", SHIP_COST_MAX)],
    )


# ---- one request in a long history -----------------------------------------------------------------------


def trace(events: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        history = Path(folder) / "history"
        begun = time.perf_counter()
        command = [sys.executable, "-m", "postroom.cli.main", "pipeline", "generate", "--out", str(history)]
        subprocess.run(
            [*command, "--messages", str(round(events / EVENTS_A_MESSAGE)), "--seed", "7"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        generated_s = time.perf_counter() - begun
        audit = Audit(history)
        held = audit.summary()["events"]
        yield Figure(
            "generate a history",
            held / generated_s,
            "events/s",
            "start of the process included",
            goals=[Goal("value", ">=", 100_000)],
        )
        message = _some_message(history)
        by_index = median_of(lambda: seconds(lambda: Audit(history).trace(message)))
        by_scan = seconds(lambda: scan(history, message))
        yield Figure(
            f"trace one request of {held:,} events",
            by_index,
            "s",
            f"a full scan: {readable(by_scan)} s",
            by_index / by_scan,
            [Goal("value", "<", TRACE_S_MAX)],
        )


def _some_message(history: Path) -> str:
    """A message with a parent, from the middle of the history."""
    sealed = Segments(history).entries()
    path = history / sealed[len(sealed) // 2].name
    with path.open("rb") as file:
        return next(event.message_id for event in map(from_line, file) if event.parent_message_id)


def scan(history: Path, message: str) -> int:
    """The same request without an index: every line is read once for each level of the tree."""
    known, new = {message}, {message}
    while new:
        found = [
            event
            for event in Segments(history).events()
            if not new.isdisjoint((event.message_id, event.parent_message_id, event.trace_id))
        ]
        new = related(found, known)
        known |= new
    return len(known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=EVENTS, help="number of events in the searched history")
    parser.add_argument("--only", default="", help="one part: ship, segments, redaction or trace")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "ship": shipping,
        "segments": segments.run,
        "redaction": redaction.run,
        "trace": lambda: trace(options.events),
    }
    report = Report(f"The audit stream on {machine()}")
    report.begin()
    for name, part in parts.items():
        if options.only in ("", name):
            for figure in part():
                report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
