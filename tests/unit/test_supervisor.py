"""A supervised process is restarted when it dies, and ends with its parent."""

import os
import signal
import sys
from pathlib import Path

import pytest

from postroom.server.up.supervisor import Supervisor
from tests.waiting import until

PROGRAM = """
import pathlib, signal, sys
place = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (place / "ended").write_text("politely") and sys.exit(0))
with (place / "starts").open("a") as file:
    file.write("x")
print("I am up", file=sys.stderr, flush=True)
sys.stdin.buffer.read()
(place / "ended").write_text("its parent is gone")
"""


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_dead_process_is_restarted_and_stop_terminates_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor([sys.executable, "-c", PROGRAM, str(tmp_path)], pause_s=0.01)
    supervisor.start()
    until(lambda: text(tmp_path / "starts") == "x" and "I am up" in caplog.text)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: text(tmp_path / "starts") == "xx")
    until(lambda: caplog.text.count("I am up") == 2)
    supervisor.stop()
    assert text(tmp_path / "ended") == "politely"
    assert supervisor.restarts == 1
    assert "ended with -9" in caplog.text


def test_the_process_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        Supervisor([sys.executable, "-c", PROGRAM, str(tmp_path)]).start()
        until(lambda: text(tmp_path / "starts") == "x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: text(tmp_path / "ended") == "its parent is gone")
