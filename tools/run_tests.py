"""`make test`: all tests, in three processes beside each other.

A test of Spark keeps one core busy, with plans of small queries, and the others mostly wait for processes,
sockets and disks. What the tests of Spark print comes when the others are done.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack

SPARK = "tests/spark"
HALVES = (f"{SPARK}/rows", f"{SPARK}/jobs")
"""Each with a session of its own."""
PYTEST = (sys.executable, "-m", "pytest")


def main() -> int:
    with ExitStack() as stack:
        halves = []
        for half in HALVES:
            told = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen([*PYTEST, half], stdout=told, stderr=subprocess.STDOUT)
            stack.callback(process.terminate)
            halves.append((process, told))
        codes = [subprocess.run([*PYTEST, f"--ignore={SPARK}"], check=False).returncode]
        for process, told in halves:
            codes.append(process.wait())
            told.seek(0)
            sys.stdout.buffer.write(told.read())
            sys.stdout.buffer.flush()
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
