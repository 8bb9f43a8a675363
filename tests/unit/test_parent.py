"""A process that was started with a pipe as its stdin ends with its parent."""

import os
import signal
import subprocess
import sys

from tests.waiting import HANG_GUARD_S

HUNG = """
import signal, time
from postroom.system.parent import stop_with_stdin
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stop_with_stdin(grace_s=0.1)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
READER = """
import subprocess, sys
from postroom.system.parent import stop_with_stdin
stop_with_stdin()
print(subprocess.run([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], stdout=-1).stdout)
"""
PARENT = """
import os, signal, subprocess, sys
program, held = sys.argv[1:]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
child = subprocess.Popen([sys.executable, "-c", program], pass_fds=(int(held),), **pipes)
child.stdout.readline()
os.kill(child.pid, signal.SIGSTOP)
os.waitpid(child.pid, os.WUNTRACED)
os.kill(os.getpid(), signal.SIGKILL)
"""


def started(program: str, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_that_does_not_end_with_its_parent_kills_itself() -> None:
    with started(HUNG) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait(HANG_GUARD_S) == -signal.SIGKILL


def test_a_stopped_process_ends_with_its_parent_too() -> None:
    reading, writing = os.pipe()  # the child has the writing end until it ends
    with open(reading, "rb") as alive:
        command = [sys.executable, "-c", PARENT, HUNG, str(writing)]
        killed = subprocess.run(command, pass_fds=(writing,), timeout=HANG_GUARD_S, check=False)
        os.close(writing)
        assert killed.returncode == -signal.SIGKILL
        assert alive.read() == b""


def test_what_the_process_starts_reads_an_empty_stdin() -> None:
    with started(READER) as process:
        assert process.stdout is not None
        assert b"0" in process.stdout.readline()
