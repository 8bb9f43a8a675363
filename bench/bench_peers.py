"""The speed of `Tasks` next to Celery on Redis and on RabbitMQ, in the same run.

Every side acknowledges on disk: Tasks with durability `group`, Redis with `appendfsync always`, RabbitMQ with
persistent messages and publisher confirms. Every worker is one process that takes one task at a time and
acknowledges it after it ran. The task does nothing, so that only the queue is measured.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import REPEATS, Comparison, Figure, Report, compare, machine, readable, run
from peersbench import brokers
from peersbench.celeryapp import BROKER, MARKS, application

from postroom import Tasks

AGENT = "coder"
PAYLOAD = {"type": "issue.triage", "repo": "example/project", "issue": 42, "title": "The parser stops"}
PATIENCE_S = 120.0
LOOK_S = 0.01
NANOS_PER_S = 1e9


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The small sizes only show that the bench runs."""

    sent: int = 500
    worked: int = 1_500


SMALL = Sizes(sent=10, worked=20)


class Ours:
    """`Tasks` on SQLite, called by the producer and the worker without a server."""

    def __init__(self, folder: Path) -> None:
        self.tasks = Tasks.open(f"sqlite:///{folder}/queue.db", durability="group")
        self.tasks.store.steady_ns()  # opens the file before the measurement

    def send(self, count: int) -> float:
        """Tasks a second."""
        begun = time.perf_counter()
        for _ in range(count):
            self.tasks.enqueue(agent=AGENT, payload=PAYLOAD)
        return count / (time.perf_counter() - begun)

    def work(self, count: int) -> float:
        """Tasks a second of a worker that starts when all tasks are enqueued."""
        self.send(count)
        begun = time.perf_counter()
        for _ in range(count):
            [task] = self.tasks.claim(agent=AGENT)
            self.tasks.complete(task.task_id, task.lease)
        return count / (time.perf_counter() - begun)

    def drain(self) -> None:
        while claimed := self.tasks.claim(agent=AGENT, limit=100):
            self.tasks.complete_many((task.task_id, task.lease, None) for task in claimed)


class Celery:
    """Celery with one worker process of the pool `solo`."""

    def __init__(self, broker: str, folder: Path) -> None:
        self.broker = broker
        self.marks = folder / "marks"
        self.app = application(broker)
        self.task = self.app.task(name="triage")(_do_nothing)
        self.queues = itertools.count()
        self._send(1, "opening")

    def _send(self, count: int, queue: str, **arguments: Any) -> None:
        for _ in range(count):
            self.task.apply_async((PAYLOAD,), arguments, queue=queue)

    def send(self, count: int) -> float:
        begun = time.perf_counter()
        self._send(count, "sent")
        return count / (time.perf_counter() - begun)

    def work(self, count: int) -> float:
        """Tasks a second between the first and the last task, by the worker's own clock."""
        queue = f"worked{next(self.queues)}"
        self.marks.unlink(missing_ok=True)
        self._send(1, queue, mark=True)
        self._send(count, queue)
        self._send(1, queue, mark=True)
        with self._worker(queue):
            _await(lambda: self.marks.exists() and len(self.marks.read_text().splitlines()) == 2)
        first, last = map(int, self.marks.read_text().split())
        return count / ((last - first) / NANOS_PER_S)

    @contextlib.contextmanager
    def _worker(self, queue: str) -> Iterator[None]:
        words = ["-m", "celery", "-A", "peersbench.celeryapp", "worker", "-P", "solo", "-Q", queue]
        words += ["--without-gossip", "--without-mingle", "-l", "ERROR"]
        environment = os.environ | {
            BROKER: self.broker,
            MARKS: str(self.marks),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _do_nothing(payload: Any, mark: bool = False) -> None:
    """The producer only needs the task's name."""


def _await(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError("the worker did not finish its queue in time")
        time.sleep(LOOK_S)


def figures(sizes: Sizes) -> Iterator[Figure]:
    for name, broker in (("Redis", brokers.redis), ("RabbitMQ", brokers.rabbitmq)):
        with (
            tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder,
            broker(Path(folder)) as url,
        ):
            yield from _beside(f"Celery, {name}", Ours(Path(folder)), Celery(url, Path(folder)), sizes)


def _beside(name: str, ours: Ours, peer: Celery, sizes: Sizes) -> Iterator[Figure]:
    sent = compare(lambda: ours.send(sizes.sent), lambda: peer.send(sizes.sent))
    yield _figure("enqueue on disk", name, sent)
    ours.drain()
    worked = compare(lambda: ours.work(sizes.worked), lambda: peer.work(sizes.worked))
    yield _figure("one worker, one by one", name, worked)


def _figure(what: str, peer: str, speed: Comparison) -> Figure:
    name = f"{what} / {peer}"
    return Figure(name, speed.ours, "tasks/s", f"{peer}: {readable(speed.theirs)} tasks/s", speed.ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    report = Report(f"Tasks beside Celery: {machine()}; medians of {REPEATS}")
    report.begin()
    for figure in figures(SMALL if options.small else Sizes()):
        report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
