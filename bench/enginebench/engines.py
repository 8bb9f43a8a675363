"""Engines of the bench, and worker processes for them."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from postroom import Backpressure, Engine, Policy

TYPE = "tool_call"
SLOTS_DEFAULT = 10
PATIENCE_S = 300.0
LOOK_S = 0.005
NEVER = 10**9
ADMIT_ALL = Policy(backpressure=Backpressure(scale=NEVER, light=NEVER, heavy=NEVER, emergency=NEVER))
"""The rules of an engine that admits a flood."""
FILL_BATCH = 1_000
NO_VARIABLES: Mapping[str, str] = {}

_numbers = itertools.count()


def fresh(folder: Path) -> Path:
    """A new folder inside."""
    path = folder / f"run-{next(_numbers)}"
    path.mkdir()
    return path


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder}/queue.db"


def open_engine(url: str) -> Engine:
    return Engine.open(url, ADMIT_ALL)


def batches(count: int) -> Iterator[int]:
    """The sizes of the batches in which so many messages are submitted."""
    for first in range(0, count, FILL_BATCH):
        yield min(FILL_BATCH, count - first)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that imports the parts of the bench."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **variables, "PYTHONPATH": path}


@contextlib.contextmanager
def workers(
    url: str,
    kind: str,
    count: int = 1,
    slots: int = SLOTS_DEFAULT,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Iterator[Callable[[], None]]:
    """Worker processes that are ready; yields the function that has them begin."""
    words = [sys.executable, "-m", "enginebench.worker", url, kind, str(slots)]
    children = [
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(variables), text=True
        )
        for _ in range(count)
    ]

    def begin() -> None:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("begin\n")
            child.stdin.flush()

    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield begin
    finally:
        for child in children:
            child.communicate(timeout=PATIENCE_S)  # closes the input


def await_completed(engine: Engine, count: int) -> None:
    """Return when so many messages are completed."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(states.get("COMPLETED", 0) for states in engine.store.count().values()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("the workers did not complete all messages")
        time.sleep(LOOK_S)
