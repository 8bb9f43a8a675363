"""How a worker process of any side tells the bench that a run is done.

The handler of every side notes its message here. A message that is delivered twice counts once.
"""

import os
import time
from pathlib import Path

FOLDER = "ENGINEBENCH_FINISHED"
NANOS_PER_S = 1e9
PATIENCE_S = 300.0
LOOK_S = 0.005

_seen: dict[str, set[int]] = {}


def note(run: str, number: int, count: int) -> None:
    """The handler of message `number` of a run ran. The last one of `count` writes down the time."""
    seen = _seen.setdefault(run, set())
    seen.add(number)
    if len(seen) == count:
        path = Path(os.environ[FOLDER], run)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(str(time.perf_counter_ns()))
        unfinished.rename(path)


def wait(folder: Path, run: str) -> float:
    """When the last message of a run was handled, on the clock `time.perf_counter`."""
    path = folder / run
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker did not finish run {run}")
        time.sleep(LOOK_S)
    return int(path.read_text()) / NANOS_PER_S
