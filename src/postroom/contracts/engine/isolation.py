"""A handler in a process of its own: what crashes or must be killed there harms nobody else.

The child is forked, so it knows every handler, also one that is defined inside a function.
"""

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from postroom.contracts.engine.messages import Message
from postroom.core.sandboxing import bytes_of
from postroom.errors import PostroomError

_PR_SET_PDEATHSIG = 1
CHUNK_BYTES = 65_536
EXIT_S = 1.0  # a child that lives longer after it has closed its pipe is killed
EXIT_LOOK_S = 0.001


class ProcessDied(PostroomError):
    """The process of a handler died before it gave an outcome."""

    def __init__(self, status: int) -> None:
        how = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        )
        super().__init__(f"the process of the handler died with {how}")


def has_memory_limit(message: Message) -> bool:
    """Whether a message limits its memory, which only a process of its own can enforce."""
    return message.resource_limits is not None and message.resource_limits.memory is not None


def limit_memory(message: Message) -> None:
    """Limit what this process may allocate on top of what it has."""
    if message.resource_limits is None or message.resource_limits.memory is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    most = pages * os.sysconf("SC_PAGE_SIZE") + bytes_of(message.resource_limits.memory)
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
        data = await _read_all(read_fd)
        status = await _exit_status(pid)
    finally:
        os.close(read_fd)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            _, status = await asyncio.shield(asyncio.to_thread(os.waitpid, pid, 0))
    if status:
        raise ProcessDied(status)
    return data


def _be_child(call: Callable[[], bytes], read_fd: int, write_fd: int) -> None:
    """Everything that the child does; it never returns."""
    code = 1
    try:
        os.close(read_fd)
        with suppress(OSError, AttributeError):  # the child ends with its parent, also when that is killed
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        data = call()
        while data:
            data = data[os.write(write_fd, data) :]
        code = 0
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


async def _exit_status(pid: int) -> int | None:
    """The status of a child that has closed its pipe; None when it runs on, as a daemon would."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + EXIT_S
    while loop.time() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait
        if ended:
            return status
        await asyncio.sleep(EXIT_LOOK_S)
    return None


async def _read_all(fd: int) -> bytes:
    """Everything up to the end of a pipe, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    parts: list[bytes] = []
    done: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        try:
            part = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if part:
            parts.append(part)
        elif not done.done():
            done.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await done
    finally:
        loop.remove_reader(fd)
    return b"".join(parts)
