"""Runs a program as an agent or as the executor of decisions: JSON on its stdin, JSON on its stdout.

Rule 1: stdin, stdout and stderr are temporary files and not pipes, so that a program that reads nothing or
        prints a lot blocks nothing.
Rule 2: a program has its own process group, and the whole group is ended when its task is lost.
Rule 3: no program outlives this process: the end of `Programs` ends them, and a guard in the group ends the
        program when this process is killed.
Rule 4: a program inherits the environment without the token.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Self

from postroom.errors import reason

OUTPUT_BYTES_MAX = 1024 * 1024  # of a result
ERROR_LINES = 10  # of stderr that go into the error
ERROR_BYTES = 4_000
CHECK_EVERY_S = 0.2  # whether the task is lost, or the output too long
TERM_GRACE_S = 5.0
TOKEN_VARIABLE = "POSTROOM_TOKEN"  # noqa: S105 - the name of a variable
SHELL = "/bin/sh"
# The guard reads a pipe from this process. A line means that the program has ended; the end of the pipe means
# that this process has. The guard is not a child of the program, which may wait for all of its children.
GUARD = '( (if read -r _ < "/dev/fd/$2"; then exit 0; fi; kill -KILL 0) & ); exec /bin/sh -c "$1"'
CANNOT_RUN = (126, 127)  # exit codes of a shell: the program cannot be executed, or does not exist


class ProgramFailed(Exception):
    """The program failed, was ended, or printed something that is not JSON."""


class CannotRun(ProgramFailed):
    """The shell could not execute or find the program."""


class Programs:
    """The programs that one command runs, in any number of threads. They end with it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True  # before the look: a thread may be starting a program
        for process in list(self._running):
            _end(process)

    def run(self, command: str, task: Any, lost: threading.Event | None = None) -> Any:
        """Run a shell command with `task` as JSON on its stdin, and return the JSON value that it printed.

        No output counts as null. Ends the program when `lost` is set. Raises `ProgramFailed`, and
        `CannotRun` when there is no such program.
        """
        import msgspec

        environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        with (
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
            _guard_pipe() as guard_fd,
        ):
            stdin.write(msgspec.json.encode(task) + b"\n")
            stdin.seek(0)
            process = subprocess.Popen(  # noqa: S603 - running what the user names is the purpose
                [SHELL, "-c", GUARD, SHELL, command, str(guard_fd)],
                stdin=stdin,
                stdout=out,
                stderr=errors,
                env=environ,
                start_new_session=True,
                pass_fds=(guard_fd,),
            )
            self._running.add(process)
            try:
                if not self._ended:  # else nobody would end this one
                    _wait(process, out, lost)
            finally:
                _end(process)
                self._running.discard(process)
            if process.returncode != 0:
                kind = CannotRun if process.returncode in CANNOT_RUN else ProgramFailed
                raise kind(_failure(process.returncode, errors))
            return _decoded(out)


@contextmanager
def _guard_pipe() -> Iterator[int]:
    """The reading end of a pipe whose writing end only this process has. A line ends the guard."""
    reading, writing = os.pipe()
    try:
        yield reading
        os.write(writing, b"\n")
    finally:
        os.close(reading)
        os.close(writing)


def _wait(process: subprocess.Popen[bytes], out: IO[bytes], lost: threading.Event | None) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(CHECK_EVERY_S)
            return
        if lost is not None and lost.is_set():
            raise ProgramFailed("it was ended, because the lease of its task is over")
        if os.fstat(out.fileno()).st_size > OUTPUT_BYTES_MAX:
            raise ProgramFailed(f"it printed more than {OUTPUT_BYTES_MAX} bytes")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first, then SIGKILL. Does nothing when the process has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_GRACE_S)


def _failure(code: int, errors: IO[bytes]) -> str:
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERROR_BYTES))
    lines = errors.read().decode("utf-8", "replace").splitlines()
    last_lines = "\n".join(lines[-ERROR_LINES:]).strip()
    return f"{how}: {last_lines}" if last_lines else how


def _decoded(out: IO[bytes]) -> Any:
    import msgspec

    if out.seek(0, os.SEEK_END) > OUTPUT_BYTES_MAX:
        raise ProgramFailed(f"it printed more than {OUTPUT_BYTES_MAX} bytes")
    out.seek(0)
    text = out.read()
    try:
        return msgspec.json.decode(text) if text.strip() else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProgramFailed(f"its output is not JSON: {reason(error)}") from None
