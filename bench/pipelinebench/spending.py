"""Seconds of the clock, and seconds of all cores, of this process and of everything it started."""

import ctypes
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS_A_S = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
STOLEN = 8  # the field of a line of /proc/stat


@dataclass(frozen=True)
class Spent:
    """What a piece of work took."""

    wall_s: float
    cpu_s: float
    stolen_s: float
    """What the host kept of our cores for others meanwhile. If it is much, the clock says nothing."""

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s, {self.cores()}"

    def cores(self) -> str:
        stolen = f", {self.stolen_s:.0f} s stolen by the host" if self.stolen_s >= 1 else ""
        return f"{self.cpu_s:.1f} CPU s{stolen}"


def spent(work: Callable[[], object]) -> Spent:
    """What one call takes."""
    begun, before, stolen_s = time.perf_counter(), _cpu_of_tree_s(), _stolen_s()
    work()
    return Spent(time.perf_counter() - begun, _cpu_of_tree_s() - before, _stolen_s() - stolen_s)


def median(takes: Sequence[Spent]) -> Spent:
    return Spent(
        statistics.median(one.wall_s for one in takes),
        statistics.median(one.cpu_s for one in takes),
        statistics.median(one.stolen_s for one in takes),
    )


def spent_by(command: Sequence[str]) -> Spent:
    """What a command takes from its start to its end, a JVM that outlives it for a moment included."""
    # An orphan becomes our child, so that its seconds are counted when it ends.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    others = _children()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun, stolen_s = time.perf_counter(), _stolen_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall_s = time.perf_counter() - begun
    _reap(others)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(wall_s, cpu_s, _stolen_s() - stolen_s)


def _reap(others: set[int]) -> None:
    """Wait for the orphans, which end by themselves. Others were there before, such as a JVM of our own."""
    while orphans := _children() - others:
        for pid in orphans:
            with suppress(ChildProcessError):  # somebody else has waited for it
                os.waitpid(pid, 0)


def _children() -> set[int]:
    return {pid for pid, (parent, _) in _processes().items() if parent == os.getpid()}


def _stolen_s() -> float:
    """Since the machine started, of all its cores."""
    total, *_ = Path("/proc/stat").read_text().splitlines()
    return int(total.split()[STOLEN]) / TICKS_A_S


def _cpu_of_tree_s() -> float:
    """Of this process and all below it, also those that have ended and were waited for."""
    there = _processes()
    return sum(cpu_s for pid, (_, cpu_s) in there.items() if _is_ours(pid, there))


def _is_ours(pid: int, there: dict[int, tuple[int, float]]) -> bool:
    while pid in there and pid != os.getpid():
        pid = there[pid][0]
    return pid == os.getpid()


def _processes() -> dict[int, tuple[int, float]]:
    """The parent and the CPU seconds of every process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                told = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            found[int(folder.name)] = (int(told[1]), sum(map(int, told[11:15])) / TICKS_A_S)
    return found
