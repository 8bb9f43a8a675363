"""A handler in a process of its own, where a crash or a kill harms no other message.

Rule 1: the child is forked, so it knows every handler, also one that is defined inside a function.
Rule 2: the end of the child ends the call, also when a process that the handler started keeps the pipe open.
Rule 3: a child that must be killed is killed with the processes that it started.
Rule 4: a child survives SIGTERM and SIGINT: its worker decides whether the handler may finish. A service
        manager signals all processes of a service, and the death of a child counts against its message.
"""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from postroom.core.goals.sandbox_rules import bytes_of
from postroom.core.lifecycle import poison
from postroom.engine.messages import Message
from postroom.errors import PostroomError
from postroom.message import Record
from postroom.system.parent import die_with_parent

CHUNK_BYTES = 65_536
EXIT_S = 1.0  # a child that lives longer after it has closed its pipe is killed
EXIT_LOOK_S = 0.001
CHILD_LOOK_S = 0.05  # how often a child whose pipe is open is checked for its end


class ProcessDied(PostroomError):
    """The process of a handler died before it gave an outcome."""

    def __init__(self, status: int) -> None:
        how = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        )
        super().__init__(f"the process of the handler died with {how}")


def needs_process(record: Record, message: Message, pool: str) -> bool:
    """Whether a handler runs in a process of its own: it asks for one, may crash, or has a memory limit.

    Threads and coroutines share the memory of the worker, so only a process can be limited.
    """
    return pool == "process" or poison.runs_alone(record) or _memory_of(message) is not None


def _memory_of(message: Message) -> str | None:
    return None if message.resource_limits is None else message.resource_limits.memory


def limit_memory(message: Message) -> None:
    """Limit what this process may allocate on top of what it has."""
    memory = _memory_of(message)
    if memory is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    most = pages * os.sysconf("SC_PAGE_SIZE") + bytes_of(memory)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))


async def run_alone(call: Callable[[], bytes]) -> bytes:
    """Run `call` in a forked child and return its bytes. Cancelling kills the child."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        _be_child(call, read_fd, write_fd)
    os.close(write_fd)
    status: int | None = None
    try:
        data, status = await _read_all(read_fd, pid)
        if status is None:
            status = await _exit_status(pid)
    finally:
        os.close(read_fd)
        if status is None:
            _kill(pid)
            _, status = await asyncio.shield(asyncio.to_thread(os.waitpid, pid, 0))
    if status:
        raise ProcessDied(status)
    return data


def _be_child(call: Callable[[], bytes], read_fd: int, write_fd: int) -> None:
    """Everything that the child does; it never returns."""
    code = 1
    try:
        os.close(read_fd)
        with suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _left_to_the_worker)
        data = call()
        while data:
            data = data[os.write(write_fd, data) :]
        code = 0
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _left_to_the_worker(*_: object) -> None:
    """Not `SIG_IGN`, which the programs that a handler starts would inherit."""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):  # the child was killed before it had a group
        os.killpg(pid, signal.SIGKILL)


async def _exit_status(pid: int) -> int | None:
    """The exit status of a child, or None when it still runs `EXIT_S` after it has closed its pipe."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + EXIT_S
    while loop.time() < deadline:
        if (status := _ended(pid)) is not None:
            return status
        await asyncio.sleep(EXIT_LOOK_S)
    return None


def _ended(pid: int) -> int | None:
    """The status of a child that has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return status if ended else None


async def _read_all(fd: int, pid: int) -> tuple[bytes, int | None]:
    """Everything that a child writes, and its status if the child ended before its pipe was closed."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    parts: list[bytes] = []
    done: asyncio.Future[None] = loop.create_future()

    def readable() -> bool:
        """Read what is there; False when there is nothing."""
        try:
            part = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if part:
            parts.append(part)
        elif not done.done():
            done.set_result(None)
        return bool(part)

    status: int | None = None
    loop.add_reader(fd, readable)
    try:
        while status is None and not done.done():
            await asyncio.wait([done], timeout=CHILD_LOOK_S)
            if not done.done():
                status = _ended(pid)
        while readable():
            pass
    finally:
        loop.remove_reader(fd)
    return b"".join(parts), status
