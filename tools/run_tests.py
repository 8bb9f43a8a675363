"""`make test`: all tests, in four processes at the same time. `make quick`: unit and contract tests.

Most tests wait for processes, sockets and disks, so that four processes keep two cores busy. A process that
ends makes room for the next group. The first group prints as it runs; the output of the others follows when
it is done. The end shows how long each one took.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

MEMORY = "/dev/shm"  # noqa: S108 - only private folders are made in it
GROUP_LIMIT_S = 40_000.0  # a hang guard for what the time limit of a test does not interrupt

AT_ONCE = 4

INTEGRATION = ["tests/integration"]
# A fork copies the page tables of its process. Tests that fork at each step of an update run in a process
# that has imported little, where they take half of the CPU time.
FORKING = [
    "tests/crash",
    "tests/faults/test_audit_segments.py",
    "tests/faults/test_audit_steps.py",
    "tests/integration/test_bus_processes.py",
    "tests/integration/test_queue_processes.py",
    "tests/integration/test_tasks_processes.py",
]
SPARK = ["tests/spark"]
# As many jobs as make both processes with a Spark end at about the same time.
SPARK_ROWS = [
    "tests/spark/rows",
    "tests/spark/jobs/test_bench_pipeline.py",
    "tests/spark/jobs/test_replay.py",
    "tests/spark/jobs/test_retain.py",
    "tests/spark/jobs/test_source.py",
]
# Only test_openapi uses this plugin, and its import takes seconds.
NO_SCHEMATHESIS = ["-p", "no:schemathesis"]
SHORT_LIVED_FOLDERS = ["-o", "tmp_path_retention_policy=failed"]


def without(*paths: str) -> list[str]:
    """The options that leave tests to other groups."""
    return [f"--ignore={path}" for path in paths]


# Both halves take about the same time. Each starts brokers and databases of its own.
FIRST_HALF = sorted(str(path) for path in Path("tests/integration").glob("test_[a-g]*.py"))
GROUPS = {
    "integration a-g": [*(path for path in FIRST_HALF if path not in FORKING), *NO_SCHEMATHESIS],
    "integration h-z": [*INTEGRATION, *without(*FIRST_HALF, *FORKING)],
    "others": [*without(*INTEGRATION, *FORKING, *SPARK), *NO_SCHEMATHESIS],
    "spark": [*SPARK, *without(*SPARK_ROWS), *NO_SCHEMATHESIS],
    "spark rows": [*SPARK_ROWS, *NO_SCHEMATHESIS],
    "forking": [*FORKING, *NO_SCHEMATHESIS],
}
"""In the order in which they start. Spark has two, because one would leave a core idle at the end."""


def contract(*names: str) -> list[str]:
    """The contract tests in the files whose names begin with one of `names`."""
    return sorted(str(path) for name in names for path in Path("tests/contract").glob(f"test_{name}*.py"))


# Three parts of the contract tests: the longer two end at about the same time.
OF_STORES = contract("native", "postgres", "rabbitmq", "store", "tasks")
OF_ENGINES = contract("engine", "goal", "coordinator")
QUICK_GROUPS = {
    "unit": ["tests/unit", *NO_SCHEMATHESIS],
    "stores": [*OF_STORES, *NO_SCHEMATHESIS],
    "engines": [*OF_ENGINES, *NO_SCHEMATHESIS],
    "others": ["tests/contract", *without(*OF_STORES, *OF_ENGINES), *NO_SCHEMATHESIS],
}


class Group:
    """Some of the tests, in a process of their own."""

    def __init__(self, name: str, arguments: Iterable[str], output: Path | None) -> None:
        self.name = name
        self.arguments = arguments
        self.output = output
        self.code = 1  # until it has ended
        self.wall_s = self.cpu_s = 0.0
        self.ended = threading.Event()
        self._is_cancelled = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            if not self._is_cancelled:
                self._run()
        finally:
            self.ended.set()

    def _run(self) -> None:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", *self.arguments]
        with contextlib.ExitStack() as stack:
            output = None if self.output is None else stack.enter_context(self.output.open("wb"))
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output and subprocess.STDOUT, env=caching_bytecode(os.environ)
            )
        # pytest prints the stacks of all threads on SIGABRT.
        limit = threading.Timer(GROUP_LIMIT_S, self._process.send_signal, [signal.SIGABRT])
        limit.daemon = True
        limit.start()
        _, status, used = os.wait4(self._process.pid, 0)
        limit.cancel()
        self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
        self.wall_s = time.monotonic() - begun
        self.cpu_s = used.ru_utime + used.ru_stime  # with all children that were waited for

    def terminate(self) -> None:
        self._is_cancelled = True
        if self._process is not None and not self.ended.is_set():
            self._process.terminate()


def caching_bytecode(environ: Mapping[str, str]) -> dict[str, str]:
    """Without cached bytecode, each Python process that a test starts would compile all of postroom."""
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main(given: list[str]) -> int:
    is_quick = given == ["quick"]
    arguments = QUICK_GROUPS if is_quick else GROUPS
    memory = MEMORY if is_quick and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        if is_quick:  # nothing waits for a disk
            arguments = {
                name: [*options, f"--basetemp={folder}/{name}.tmp", *SHORT_LIVED_FOLDERS]
                for name, options in arguments.items()
            }
        first = next(iter(arguments))
        groups = {
            name: Group(name, options, None if name == first else Path(folder) / name)
            for name, options in arguments.items()
        }
        waiting = deque(groups.values())
        for _ in range(AT_ONCE):
            threading.Thread(target=run_in_turn, args=(waiting,), daemon=True).start()
        try:
            for group in groups.values():
                group.ended.wait()
                if group.output is not None:
                    sys.stdout.write(group.output.read_text(errors="replace"))
        finally:
            for group in groups.values():
                group.terminate()
    print_times(groups.values())
    return next((abs(group.code) for group in groups.values() if group.code), 0)


def run_in_turn(waiting: deque[Group]) -> None:
    with contextlib.suppress(IndexError):  # every group has begun
        while True:
            waiting.popleft().run()


def print_times(groups: Iterable[Group]) -> None:
    print("group                 wall       CPU  exit code")
    for group in groups:
        print(f"{group.name:<15} {group.wall_s:8.0f} s {group.cpu_s:7.0f} s {group.code:10}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
