"""The CPU time that the benchmark of the pipeline counts, and the processes that it waits for."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from pipelinebench.spending import spent_by

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
LEAVE_AN_ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that continues, as the JVM of a session does."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_the_usage_of_a_command_includes_its_descendants_only(
    other: subprocess.Popen[bytes],
) -> None:
    taken = spent_by([sys.executable, "-c", LEAVE_AN_ORPHAN])
    assert taken.cpu_s >= 0.3
    assert other.poll() is None
