"""A crash or an error at every system call of each update, by strace injection.

The process that does the update is forked and waits; strace attaches to it with one injection; then it
continues. `signal=KILL:when=k` ends it at the start of the k-th call of that name. Over all names and all k,
every state between two system calls occurs once. `error=...` makes the k-th call fail instead, and the
process retries with the same handle, as a program would.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from postroom.errors import HandleDead, PostroomError, WriteFailed
from postroom.message import Durability
from tests.crash.ledger import Tally
from tests.crash.mailupdates import MAIL_UPDATES
from tests.crash.segmentupdates import SEGMENT_UPDATES
from tests.crash.taskupdates import TASK_UPDATES
from tests.crash.updates import ATTEMPTS_MAX, BUS_UPDATES, QUEUE_UPDATES, Attempt, Expected, Update
from tests.crash.workers import STUCK_S, die_with_parent, let_be_traced, scratch_parent

UPDATES = {
    "bus": BUS_UPDATES,
    "queue": QUEUE_UPDATES,
    "tasks": TASK_UPDATES,
    "audit": SEGMENT_UPDATES,
    "mail": MAIL_UPDATES,
}
POINTS_MAX = 500  # of one system call in one update: far above the real numbers
DURABILITIES: tuple[Durability, ...] = ("os", "group", "fsync")
WAIT_CALLS = {"rt_sigtimedwait", "restart_syscall"}  # how the process waits for strace

ERRORS = {
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "openat": ("EMFILE", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
    "unlink": ("EIO",),
    "mkdir": ("ENOSPC",),
    "flock": ("ENOLCK", "EINTR"),
    "pread64": ("EIO",),
    "read": ("EIO",),
    "newfstatat": ("EIO",),
    "fstat": ("EIO",),
    "lstat": ("EIO",),
    "ftruncate": ("EIO",),
    "getdents64": ("EIO",),
    "linkat": ("EIO",),
    "pwrite64": ("ENOSPC", "EIO"),
    "fdatasync": ("EIO",),
    "fallocate": ("ENOSPC",),
}
"""Not close(): an injected error leaves the descriptor open, which a real error does not."""
VARIANTS = {
    "rename": ("rename", "renameat", "renameat2"),
    "unlink": ("unlink", "unlinkat"),
    "mkdir": ("mkdir", "mkdirat"),
}
"""Names of the same call on different machines. Only one of them exists on each."""
DOUBLE_FAULTS = {"write": "ftruncate:error=EIO", "fsync": "ftruncate:error=EIO"}
"""Calls where an error is followed by an error of the rollback."""

Tick = Callable[[int], None]


class Unavailable(Exception):
    """strace is missing or may not attach here."""


class Outcome(msgspec.Struct, frozen=True):
    """The end of one traced process."""

    killed: bool
    injected: bool
    attempts: list[Attempt]
    calls: list[str]


def run(kind: str, side: str, tick: Tick = lambda _: None) -> Tally:
    """`kind` is crash or error, `side` is the updated part."""
    tally = Tally()
    for update in UPDATES[side]:
        if kind == "error" and not update.repeats:
            continue
        for durability in DURABILITIES:
            part = (
                _crashes(update, durability, tick) if kind == "crash" else _errors(update, durability, tick)
            )
            part.broken = [f"{update.name}/{durability}: {sentence}" for sentence in part.broken]
            tally.add(part)
    return tally


def _crashes(update: Update, durability: Durability, tick: Tick) -> Tally:
    tally = Tally()
    whole = _once(update, durability, [], tally)
    if [attempt.outcome for attempt in whole.attempts] != ["ok"]:
        tally.breaks(f"without a crash it said {whole.attempts}")
    for call in sorted(set(whole.calls) - WAIT_CALLS):
        for k in range(1, POINTS_MAX):
            outcome = _once(update, durability, [f"{call}:signal=KILL:when={k}"], tally)
            if not outcome.killed:
                break
            tally.count("points")
            tick(1)
    return tally


def _errors(update: Update, durability: Durability, tick: Tick) -> Tally:
    tally = Tally()
    for call, names in ERRORS.items():
        calls = ",".join(f"?{variant}" for variant in VARIANTS.get(call, (call,)))
        faults = [[f"{calls}:error={name}"] for name in names]
        if call in DOUBLE_FAULTS and update not in TASK_UPDATES:  # SQLite cannot open without ftruncate
            faults.append([f"{calls}:error={names[0]}", DOUBLE_FAULTS[call]])
        for first, *others in faults:
            for k in range(1, POINTS_MAX):
                outcome = _once(update, durability, [f"{first}:when={k}", *others], tally, retry=True)
                if not outcome.injected:
                    break
                tally.count("points")
                _count_outcomes(outcome, tally)
                tick(1)
    return tally


def _count_outcomes(outcome: Outcome, tally: Tally) -> None:
    if not any(attempt.outcome == "ok" for attempt in outcome.attempts):
        tally.breaks(f"it did not recover from one error: {outcome.attempts}")
    for attempt in outcome.attempts[:1]:
        tally.count(" ".join(["first_try", attempt.outcome, *attempt.words[: attempt.outcome != "ok"]]))


# ---- one process -----------------------------------------------------------------------------------


def _once(
    update: Update, durability: Durability, injections: list[str], tally: Tally, *, retry: bool = False
) -> Outcome:
    """Prepare an update, run it under injection, and check the result."""
    folder = Path(tempfile.mkdtemp(prefix="postroom-syscalls-", dir=scratch_parent(1)))
    try:
        expected = update.prepare(folder)
        outcome = _traced(update, folder, durability, injections, retry=retry)
        part = _judged(update, folder, expected, outcome.attempts)
        part.broken = [f"{' '.join(injections) or 'nothing injected'}: {text}" for text in part.broken]
        if not part.ok and not part.broken:
            part.breaks(f"{' '.join(injections)}: lost {part.lost}, torn {part.torn}, doubled {part.doubled}")
        tally.add(part)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _traced(
    update: Update, folder: Path, durability: Durability, injections: list[str], *, retry: bool
) -> Outcome:
    trace = folder / "trace.txt"
    ours, theirs = socket.socketpair()
    pid = _forked(update, folder, durability, theirs, retry=retry)
    theirs.close()
    try:
        strace = _attach(pid, trace, injections)
        os.kill(pid, signal.SIGUSR1)
        status = _wait_for(pid, update, folder)
        strace.wait(timeout=STUCK_S)
        if strace.stderr is not None:
            strace.stderr.close()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    text = trace.read_text(errors="replace")
    return Outcome(
        killed=os.WIFSIGNALED(status),
        injected="(INJECTED)" in text,
        attempts=_received(ours),
        calls=re.findall(r"^\d+\s+(\w+)\(", text, re.MULTILINE),
    )


def _forked(
    update: Update, folder: Path, durability: Durability, to_parent: socket.socket, *, retry: bool
) -> int:
    """Start the process that does the update; it waits for SIGUSR1."""
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return pid
    try:
        die_with_parent(parent)
        let_be_traced()
        logging.getLogger("postroom").setLevel(logging.CRITICAL)
        signal.sigwait({signal.SIGUSR1})
        _attempt(update, folder, durability, to_parent, tries=ATTEMPTS_MAX if retry else 1)
    finally:
        os._exit(0)


def _attempt(
    update: Update, folder: Path, durability: Durability, to_parent: socket.socket, tries: int
) -> None:
    handle: Any = None
    for number in range(tries):
        words: list[str] = []
        try:
            handle = handle or update.open(folder, durability)
            words = update.act(handle, number)
            outcome = "ok"
        except HandleDead:
            outcome = "dead"
            handle.reopen()
        except (PostroomError, OSError) as error:
            kept_nothing = isinstance(error, WriteFailed) and error.rolled_back
            outcome = "void" if kept_nothing else "failed"
            words = [type(error).__name__, str(error)]
        # Uses a system call of no update, so that no injection can hit the report.
        to_parent.send(msgspec.json.encode(Attempt(number, outcome, words)) + b"\n")
        if outcome == "ok":
            return


def _received(ours: socket.socket) -> list[Attempt]:
    data = b""
    while piece := ours.recv(1 << 16):
        data += piece
    ours.close()
    return [msgspec.json.decode(line, type=Attempt) for line in data.splitlines()]


def _attach(pid: int, trace: Path, injections: list[str]) -> "subprocess.Popen[str]":
    command = ["strace", "-f", "-o", str(trace), "-e", "trace=all"]
    for injection in injections:
        command += ["-e", f"inject={injection}"]
    try:
        strace = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise Unavailable("strace is not installed") from None
    said = strace.stderr.readline() if strace.stderr is not None else ""
    if "attached" not in said:
        raise Unavailable(f"strace may not attach here: {said.strip()}")
    return strace


def _wait_for(pid: int, update: Update, folder: Path) -> int:
    if update.assist is None:
        return os.waitpid(pid, 0)[1]
    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        update.assist(folder)
        time.sleep(0.001)
    raise TimeoutError(f"{update.name} hangs")


def _judged(update: Update, folder: Path, expected: Expected, attempts: list[Attempt]) -> Tally:
    """In a separate process, which shares nothing with the crashed one or with this one."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tally = Tally()
            try:
                update.judge(folder, expected, attempts, tally)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
                tally.breaks(f"judging failed with {error!r}")
            os.write(write_end, msgspec.json.encode(tally))
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return msgspec.json.decode(data, type=Tally)
