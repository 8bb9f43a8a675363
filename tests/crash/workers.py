"""Forked processes that report on a pipe, and are killed while they work.

Rule 1: a line on the pipe is an acknowledgement: it is written after the call has returned.
Rule 2: a kill waits for reported progress, never for a time; then it comes at a random instant.
Rule 3: a worker that is far ahead of its reader waits, so a round writes a bounded amount.
Rule 4: only processes started here are signalled, each by its pid, and each dies with its parent.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

STUCK_S = 120.0  # a worker that reports nothing for this long hangs
STACKS_S = 0.2  # for the stacks of one process
SPIN_MAX_S = 0.005
READ_BYTES = 1 << 16
REPORTS_AHEAD_MAX = 8  # unread reports before a worker has to wait; a power of two
GAP_FIRST_S = 0.000_3
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61

Report = Callable[..., None]
"""Called with the words of one line, or with a list of several lines."""
Program = Callable[[Report], None]


class WorkerFailed(Exception):
    """A child raised, or reported nothing for too long: the harness or the code under test is at fault."""


class Worker:
    """One child and its reported lines so far."""

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self.lines: list[str] = []
        self.alive = True
        self.gap_s = GAP_FIRST_S
        """The time from one line to the next, as last observed."""
        self._rest = b""
        self.fd, write_end = _short_pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(program, write_end, parent)
        os.close(write_end)
        os.set_blocking(self.fd, False)

    def read(self) -> bool:
        """Read the pipe; false once it has ended."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        *complete, self._rest = (self._rest + data).split(b"\n")
        for line in complete:
            text = line.decode()
            if text.startswith("!"):
                raise WorkerFailed(f"{self.name}: {text[1:]}")
            self.lines.append(text)
        return bool(data)

    def kill(self) -> None:
        """Kill it with -9 and read its last lines."""
        if not self.alive:
            return
        self.alive = False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.set_blocking(self.fd, True)
        while self.read():
            pass
        os.close(self.fd)


class Crew:
    """The workers of one round. The remaining ones are killed at the end of the block."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def start(self, name: str, program: Callable[..., None], /, **options: Any) -> Worker:
        worker = Worker(name, partial(program, **options))
        self.workers.append(worker)
        return worker

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    def drain(self, timeout_s: float = 0.0) -> None:
        """Read the lines of all workers, so that none blocks on a full pipe."""
        poller = select.poll()
        by_fd = {worker.fd: worker for worker in self.living()}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(timeout_s * 1000):
            if not by_fd[fd].read():
                raise WorkerFailed(f"{by_fd[fd].name} ended by itself")

    def await_lines(self, worker: Worker, more: int) -> None:
        """Return when the worker has reported that many more lines."""
        wanted = len(worker.lines) + more
        self.drain()
        began, count = time.monotonic(), len(worker.lines)
        while len(worker.lines) < wanted:
            if time.monotonic() - began > STUCK_S:
                self.show_stacks()
                raise WorkerFailed(f"{worker.name} made no progress in {STUCK_S:g} s")
            self.drain(0.1)
        if len(worker.lines) > count:
            worker.gap_s = (time.monotonic() - began) / (len(worker.lines) - count)

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        """Drain until the condition is true."""
        deadline = time.monotonic() + STUCK_S
        while not condition():
            if time.monotonic() > deadline:
                raise WorkerFailed(f"{what} did not happen in {STUCK_S:g} s")
            self.drain(0.01)

    def show_stacks(self) -> None:
        """Have every worker, and the processes of its handlers, print the stacks of its threads to stderr."""
        for worker in self.living():
            for pid in (worker.pid, *_children(worker.pid)):
                print(f"stacks of {worker.name}, process {pid}:", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(STACKS_S)

    def kill_at_random(self, worker: Worker, rng: Random, lines_max: int) -> None:
        """After some reported progress, at a random instant during the next two calls."""
        self.await_lines(worker, rng.randint(0, lines_max))
        until = time.perf_counter() + min(rng.uniform(0, 2 * worker.gap_s), SPIN_MAX_S)
        while time.perf_counter() < until:
            pass
        worker.kill()

    def kill_all(self) -> None:
        for worker in self.living():
            worker.kill()

    def lines(self) -> Iterator[str]:
        """All reports, including those of dead workers."""
        for worker in self.workers:
            yield from worker.lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.living():
            with contextlib.suppress(WorkerFailed):
                worker.kill()


def _short_pipe() -> tuple[int, int]:
    """A pipe that keeps writes separate and buffers only a few of them, where the system supports that."""
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        return os.pipe()
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, REPORTS_AHEAD_MAX * os.sysconf("SC_PAGESIZE"))
    return read_end, write_end


def _children(pid: int) -> list[int]:
    """The processes that a process has started, where the system says so."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _be_child(program: Program, fd: int, parent: int) -> None:
    """Run the program and exit without returning to the parent's code: no tests continue here."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        logging.getLogger("postroom").setLevel(logging.CRITICAL)
        program(reporter(fd))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        last = traceback.format_exc().strip().replace("\n", " | ")
        with contextlib.suppress(OSError):
            os.write(fd, f"!{last}\n".encode())
    finally:
        os._exit(1)


def reporter(fd: int) -> Report:
    """Writes lines at once: a line is on the pipe completely, or was never reported."""

    def report(*words: object, lines: list[str] | None = None) -> None:
        whole = [" ".join(map(str, words))] if lines is None else lines
        os.write(fd, "".join(f"{line}\n" for line in whole).encode())

    return report


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel end this process when its parent ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)


def let_be_traced() -> None:
    """Where only an ancestor may trace a process, allow any process to trace this one, so that strace can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))


def scratch_parent(number: int) -> Path | None:
    """The folder of a round: on disk and in memory in turn, because writes tear at different points there."""
    memory = Path("/dev/shm")  # noqa: S108 - only folders with random names are made in it
    return memory if number % 2 and os.access(memory, os.W_OK) else None
