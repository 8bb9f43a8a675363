"""Any program as an agent, or as what executes decisions: JSON on its stdin, JSON on its stdout.

Rule 1: its files are temporary ones, no pipes: a program that reads nothing or prints a lot blocks nobody.
Rule 2: it is a process group of its own, and the whole group ends when its work is no longer wanted.
Rule 3: none outlives us: `end_programs` is the last thing that its caller does, and a guard in the group ends
        it when we are killed.
Rule 4: it inherits the environment without our token.
"""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from postroom.errors import reason

OUTPUT_BYTES_MAX = 1024 * 1024  # what a result may have
ERROR_LINES = 10  # of stderr that tell why it failed
ERROR_BYTES = 4_000
LOOK_EVERY_S = 0.2  # at whether its work is still wanted
TERM_GRACE_S = 5.0
TOKEN_VARIABLE = "POSTROOM_TOKEN"  # noqa: S105 - the name of a variable
SHELL = "/bin/sh"
# The guard reads a pipe of ours. A line says that the program has ended, the pipe's end says that we have. It
# is no child of the program, which may wait for all of its children.
GUARD = '( (if read -r _ < "/dev/fd/$2"; then exit 0; fi; kill -KILL 0) & ); exec /bin/sh -c "$1"'
CANNOT_RUN = (126, 127)  # exit codes of a shell: the program cannot be executed, or is not there


_running: set[subprocess.Popen[bytes]] = set()


class ProgramFailed(Exception):
    """It ended with a failure, was ended, or printed what is not JSON."""


class CannotRun(ProgramFailed):
    """The shell could not execute it, or did not find it."""


def run_program(command: str, given: Any, unwanted: threading.Event | None = None) -> Any:
    """Run a command line of the shell with `given` as JSON on its stdin; what it printed, decoded.

    Nothing printed is null. Raises `ProgramFailed`, and `CannotRun` when there is no such program.
    """
    import msgspec

    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        _guard_pipe() as guarded,
    ):
        stdin.write(msgspec.json.encode(given) + b"\n")
        stdin.seek(0)
        process = subprocess.Popen(  # noqa: S603 - running what the user names is the purpose
            [SHELL, "-c", GUARD, SHELL, command, str(guarded)],
            stdin=stdin,
            stdout=out,
            stderr=errors,
            env=environ,
            start_new_session=True,
            pass_fds=(guarded,),
        )
        _running.add(process)
        try:
            _wait(process, out, unwanted)
        finally:
            _end(process)
            _running.discard(process)
        if process.returncode != 0:
            kind = CannotRun if process.returncode in CANNOT_RUN else ProgramFailed
            raise kind(_why(process.returncode, errors))
        return _decoded(out)


@contextmanager
def _guard_pipe() -> Iterator[int]:
    """The reading end of a pipe whose other end only this process has. A line in it lets the guard go."""
    reading, writing = os.pipe()
    try:
        yield reading
        os.write(writing, b"\n")
    finally:
        os.close(reading)
        os.close(writing)


def end_programs() -> None:
    """End what still runs in other threads."""
    for process in list(_running):
        _end(process)


def _wait(process: subprocess.Popen[bytes], out: IO[bytes], unwanted: threading.Event | None) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY_S)
            return
        if unwanted is not None and unwanted.is_set():
            raise ProgramFailed("it was ended, because the task is no longer ours")
        if os.fstat(out.fileno()).st_size > OUTPUT_BYTES_MAX:
            raise ProgramFailed(f"it printed more than {OUTPUT_BYTES_MAX} bytes")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely first; a no-op for one that has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_GRACE_S)


def _why(code: int, errors: IO[bytes]) -> str:
    end = f"exit code {code}" if code > 0 else f"signal {-code}"
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERROR_BYTES))
    lines = errors.read().decode("utf-8", "replace").splitlines()
    said = "\n".join(lines[-ERROR_LINES:]).strip()
    return f"{end}: {said}" if said else end


def _decoded(out: IO[bytes]) -> Any:
    import msgspec

    if out.seek(0, os.SEEK_END) > OUTPUT_BYTES_MAX:
        raise ProgramFailed(f"it printed more than {OUTPUT_BYTES_MAX} bytes")
    out.seek(0)
    text = out.read()
    try:
        return msgspec.json.decode(text) if text.strip() else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProgramFailed(f"what it printed is not JSON: {reason(error)}") from None
