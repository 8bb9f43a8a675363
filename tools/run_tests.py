"""`make test`: all tests, in three processes at the same time.

Most tests wait for processes, sockets and disks, so that three processes keep two cores busy. The first one
prints as it runs; the output of the others follows when it is done.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = ["tests/integration", "tests/crash"]
SPARK = ["tests/spark"]
OTHERS = [f"--ignore={folder}" for folder in SLOW + SPARK]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("others", "spark")]
        first = subprocess.Popen(pytest(SLOW))
        background = [start(*pair) for pair in zip((OTHERS, SPARK), outputs, strict=True)]
        try:
            codes = [first.wait()]
            for process, output in zip(background, outputs, strict=True):
                codes.append(process.wait())
                sys.stdout.write(output.read_text(errors="replace"))
        finally:
            for process in (first, *background):
                process.terminate()
    return next((code for code in codes if code), 0)


def pytest(selection: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *selection]


def start(selection: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(pytest(selection), stdout=file, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    sys.exit(main())
