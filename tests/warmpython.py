"""Starts programs of postroom as processes, forked from a Python that has imported postroom already.

A new Python spends most of its CPU time on imports: half a second for a server. A forked program is a process
like any other: it has its own pid, memory and standard streams, and it can be killed. Only the start of the
interpreter and the console script are missing. Tests of these, of the command lines in /proc and of memory
start a new Python.

The process that forks is `warmtemplate`. It ends when this process does.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import HANG_GUARD_S

STATUS = struct.Struct("i")
LENGTH = struct.Struct("I")
STREAMS = 3
SCRIPTS = {"postroom": "postroom.cli.main", "zos-mq": "postroom.cli.queue.zosmq"}
ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "text", "bufsize"}
OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG")
"""The beginnings of variables that only a new Python reads."""
OF_COVERAGE = "COVERAGE_"
"""The coverage of a process is measured from the start of its Python."""
NOT_COMPARED = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
"""They need no new Python: the template has imported everything, and the program opens its own streams."""


def popen(words: Sequence[Any], **options: Any) -> "subprocess.Popen[bytes]":
    """As `subprocess.Popen`, for `python -c program` and the commands of postroom.

    The program is forked unless its environment or options need a new Python.
    """
    program = _program([str(word) for word in words])
    environ = options.get("env") or os.environ
    if program is None or not options.keys() <= OPTIONS or not _template().suits(environ):
        return subprocess.Popen([str(word) for word in words], **options)
    return WarmProcess(program, **options)


def _program(words: list[str]) -> dict[str, Any] | None:
    """The program of a command line; None for other programs than those of postroom."""
    first, *rest = words
    found: dict[str, Any] = {"is_strict": rest[:2] == ["-W", "error"], "module": "", "code": ""}
    if found["is_strict"]:
        rest = rest[2:]
    name = Path(first).name
    if first == sys.executable and rest[0] == "-c":
        return found | {"code": rest[1], "arguments": rest[2:]}
    if first == sys.executable and rest[:2] == ["-m", SCRIPTS["postroom"]]:
        return found | {"module": rest[1], "arguments": rest[2:]}
    if Path(first).parent == Path(sys.executable).parent and name in SCRIPTS:
        return found | {"module": SCRIPTS[name], "arguments": rest}
    return None


def _interpreter(environ: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environ.items() if name.startswith(OF_THE_INTERPRETER)}
    return {name: value for name, value in read.items() if name not in NOT_COMPARED}


class WarmProcess(subprocess.Popen[bytes]):
    """A forked program. Its parent is the template, which sends the exit status."""

    def __init__(self, program: dict[str, Any], **options: Any) -> None:
        self._status: socket.socket | None = None
        self._program = program
        super().__init__([sys.executable, *program["arguments"]], **options)

    def _execute_child(self, *given: Any) -> None:
        """Called by `Popen` once the pipes exist."""
        cwd, env = given[5:7]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        request = {
            **self._program,
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "env": dict(os.environ if env is None else env),
        }
        streams = [
            number if given == -1 else given for number, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self._status = _template().start(request, streams)
        (self.pid,) = STATUS.unpack(_exactly(self._status, STATUS.size))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As `os.waitpid`: (0, 0) while the program runs."""
        assert self._status is not None
        if flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        said = _exactly(self._status, STATUS.size)
        self._status.close()
        return self.pid, STATUS.unpack(said)[0] if said else signal.SIGKILL

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none when the other side has ended."""
    return connection.recv(size, socket.MSG_WAITALL)


# ---- the template ----------------------------------------------------------------------------------


class Template:
    """The process that forks."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        self._interpreter = _interpreter(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warmtemplate", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        atexit.register(self._end)

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Whether a new Python with this environment would begin as the template did."""
        is_measured = any(name.startswith(OF_COVERAGE) for name in environ)
        return not is_measured and _interpreter(environ) == self._interpreter

    def start(self, request: dict[str, Any], streams: list[int]) -> socket.socket:
        """Fork a program. The returned connection sends its pid, and later its exit status."""
        said = json.dumps(request).encode()
        ours, theirs = socket.socketpair()
        with theirs, self._mutex:
            socket.send_fds(self._control, [LENGTH.pack(len(said))], [*streams, theirs.fileno()])
            self._control.sendall(said)
        return ours

    def _end(self) -> None:
        if os.getpid() == self._owner:  # not in a forked child
            self._control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(HANG_GUARD_S)


_made: list[Template] = []
_making = threading.Lock()


def _template() -> Template:
    with _making:
        if not _made:
            _made.append(Template())
        return _made[0]
