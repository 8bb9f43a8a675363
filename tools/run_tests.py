"""`make test`: all tests, in three processes at the same time.

Most tests wait for processes, sockets and disks, so that three processes keep two cores busy. The first one
prints as it runs; the output of the others follows when it is done. The end shows how long each one took.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

GROUP_LIMIT_S = 3_600.0  # a hang guard for what the time limit of a test does not interrupt

SLOW = ["tests/integration", "tests/crash"]
SPARK = ["tests/spark"]
# Only tests/integration uses this plugin, and its import takes seconds.
NO_SCHEMATHESIS = ["-p", "no:schemathesis"]
GROUPS = {
    "slow": SLOW,
    "others": [*(f"--ignore={folder}" for folder in SLOW + SPARK), *NO_SCHEMATHESIS],
    "spark": [*SPARK, *NO_SCHEMATHESIS],
}


class Group:
    """Some of the tests, in a process of their own. A thread notes when it ends."""

    def __init__(self, name: str, output: IO[bytes] | None) -> None:
        self.name = name
        self.code = 0
        self.wall_s = self.cpu_s = 0.0
        command = [sys.executable, "-m", "pytest", *GROUPS[name]]
        self._process = subprocess.Popen(
            command, stdout=output, stderr=output and subprocess.STDOUT, env=caching_bytecode(os.environ)
        )
        self._limit = threading.Timer(GROUP_LIMIT_S, self._process.kill)
        self._watch = threading.Thread(target=self._note_end, args=(time.monotonic(),))
        for thread in (self._limit, self._watch):
            thread.daemon = True
            thread.start()

    def _note_end(self, begun: float) -> None:
        _, status, used = os.wait4(self._process.pid, 0)
        self._limit.cancel()
        self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
        self.wall_s = time.monotonic() - begun
        # With all children that were waited for. The JVM of the Spark session ends later and is missing.
        self.cpu_s = used.ru_utime + used.ru_stime

    def wait(self) -> None:
        self._watch.join()

    def terminate(self) -> None:
        if self._watch.is_alive():
            self._process.terminate()


def caching_bytecode(environ: Mapping[str, str]) -> dict[str, str]:
    """Without cached bytecode, each Python process that a test starts would compile all of postroom."""
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / name for name in list(GROUPS)[1:]}
        groups = [start(name, outputs.get(name)) for name in GROUPS]
        try:
            for group in groups:
                group.wait()
                if group.name in outputs:
                    sys.stdout.write(outputs[group.name].read_text(errors="replace"))
        finally:
            for group in groups:
                group.terminate()
    print_times(groups)
    return next((abs(group.code) for group in groups if group.code), 0)


def start(name: str, output: Path | None) -> Group:
    if output is None:
        return Group(name, None)
    with output.open("wb") as file:
        return Group(name, file)


def print_times(groups: list[Group]) -> None:
    print("group          wall       CPU  exit code")
    for group in groups:
        print(f"{group.name:<8} {group.wall_s:8.0f} s {group.cpu_s:7.0f} s {group.code:10}")


if __name__ == "__main__":
    sys.exit(main())
