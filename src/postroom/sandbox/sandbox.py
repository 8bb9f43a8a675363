"""The seam of a sandbox: create, run, reset, destroy. `Sandbox.open(kind)` gives one of a kind.

Rule 1: `run` never outlives its time limit: the whole process group is killed.
Rule 2: `reset` removes what a run leaves behind.
Rule 3: a sandbox that cannot isolate says so: `process` has limits, but the network and files of the user.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import msgspec

from postroom.core.goals.sandbox_rules import bytes_of
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, InvalidSetting, SandboxUnavailable
from postroom.system.log import library_log

_log = library_log("postroom.sandbox")

OUTPUT_BYTES_MAX: Final = 1024 * 1024
TIMEOUT_S: Final = 60.0
FILES_MAX: Final = 256
FILE_BYTES_MAX: Final = 256 * 1024 * 1024
TIMED_OUT: Final = 124
RETRY_AFTER_S: Final = 5.0
PROBE_AGAIN_S: Final = 60.0
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class RunLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run may use."""

    time: float | None = None
    """Seconds."""
    memory: str | None = None
    """Bytes with a unit, such as 256MB."""


class Completed(msgspec.Struct, frozen=True):
    """The result of a run."""

    exit_code: int
    """As in a shell: 128 and the number of a signal; 124 after the time limit."""
    stdout: str
    stderr: str
    timed_out: bool = False


def checked_limits(limits: object) -> RunLimits:
    """Limits as a caller gave them."""
    try:
        found = msgspec.convert({} if limits is None else limits, RunLimits, from_attributes=True)
        if found.memory is not None:
            bytes_of(found.memory)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidMessage(f"resource_limits does not fit: {error}") from None
    if found.time is not None:
        checked_seconds("resource_limits.time", found.time)
    return found


class Sandbox(ABC):
    """An isolated place to run programs in."""

    kind: str
    isolates = False
    """Whether a run has no network and sees no files but its own and those of the system."""

    @staticmethod
    def open(kind: "SandboxKind" = "auto") -> "Sandbox":
        """A sandbox of a kind: `bubblewrap`, `process` (limits only), `mock` (runs nothing), or `auto`.

        A subclass of `Sandbox` is a kind, too.
        """
        if isinstance(kind, type) and issubclass(kind, Sandbox):
            return kind()
        match kind:
            case "mock":
                return MockSandbox()
            case "process":
                return ProcessSandbox()
            case "bubblewrap":
                return BubblewrapSandbox()
            case "auto":
                if bubblewrap_trouble() == "":
                    return BubblewrapSandbox()
                _log.warning("no isolation, only limits: %s", bubblewrap_trouble())
                return ProcessSandbox()
        raise InvalidSetting(f"a sandbox is auto, bubblewrap, process or mock, not {kind!r}")

    @abstractmethod
    async def create(self, resource_limits: Any = None) -> "Sandbox":
        """Make the sandbox ready. Raises `SandboxUnavailable`."""

    @abstractmethod
    async def run(self, argv: Sequence[str], timeout_s: float | None = None, stdin: bytes = b"") -> Completed:
        """Run a program to its end, within the limits."""

    @abstractmethod
    async def reset(self) -> None:
        """Remove what runs have left behind."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove the sandbox."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.destroy()


SandboxKind: TypeAlias = str | type[Sandbox]


class BlockingSandbox:
    """A sandbox for plain code: `wait` runs a coroutine of the sandbox to its end."""

    def __init__(self, sandbox: Sandbox, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._sandbox = sandbox
        self._wait = wait

    def run(self, argv: Sequence[str], timeout_s: float | None = None, stdin: bytes = b"") -> "Completed":
        """As `Sandbox.run`."""
        completed: Completed = self._wait(self._sandbox.run(argv, timeout_s, stdin))
        return completed

    def reset(self) -> None:
        """As `Sandbox.reset`."""
        self._wait(self._sandbox.reset())


def checked_argv(argv: object) -> list[str]:
    """A program and its arguments."""
    if isinstance(argv, str) or not isinstance(argv, Sequence) or not argv:
        raise InvalidMessage('argv must be a list such as ["python3", "-c", "print(1)"]')
    if not all(isinstance(each, str) and "\0" not in each for each in argv):
        raise InvalidMessage("argv must be a list of texts without NUL")
    return list(argv)


class MockSandbox(Sandbox):
    """Runs nothing: it keeps what it was asked to run, and answers what a test sets."""

    kind = "mock"
    isolates = True

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.answers: dict[str, Completed] = {}
        """Program -> what its runs give."""
        self.is_created = False
        self.limits = RunLimits()

    async def create(self, resource_limits: Any = None) -> "Sandbox":
        self.limits = checked_limits(resource_limits)
        self.is_created = True
        return self

    async def run(self, argv: Sequence[str], timeout_s: float | None = None, stdin: bytes = b"") -> Completed:
        command = checked_argv(argv)
        if not self.is_created:
            raise SandboxUnavailable("create it first", RETRY_AFTER_S)
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        self.runs.append(command)
        return self.answers.get(command[0], Completed(0, stdin.decode(errors="replace"), ""))

    async def reset(self) -> None:
        self.runs.clear()

    async def destroy(self) -> None:
        self.is_created = False


class ProcessSandbox(Sandbox):
    """A process group with limits, in a folder of its own and without the environment of the caller."""

    kind = "process"

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._limits = RunLimits()

    async def create(self, resource_limits: Any = None) -> "Sandbox":
        self._limits = checked_limits(resource_limits)
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="postroom-sandbox-"))
            except OSError as error:
                raise SandboxUnavailable(str(error), RETRY_AFTER_S) from error
        return self

    async def run(self, argv: Sequence[str], timeout_s: float | None = None, stdin: bytes = b"") -> Completed:
        command = checked_argv(argv)
        if self._folder is None:
            raise SandboxUnavailable("create it first", RETRY_AFTER_S)
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        given = [seconds for seconds in (timeout_s, self._limits.time) if seconds is not None]
        limit_s = min(given, default=TIMEOUT_S)
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command(self._folder, limited(command, self._limits, limit_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._folder,
                env={**ENVIRONMENT, "HOME": str(self._folder), "TMPDIR": str(self._folder)},
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxUnavailable(f"the program could not be started: {error}", RETRY_AFTER_S) from error
        return await _finished(child, stdin, limit_s)

    def _command(self, folder: Path, command: list[str]) -> list[str]:  # noqa: ARG002 - others need the folder
        return command

    async def reset(self) -> None:
        if self._folder is not None:
            await asyncio.to_thread(_empty, self._folder)

    async def destroy(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


_NOBODY: Final = "65534"
_APART: Final = (
    "--unshare-all", "--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL",
)  # fmt: skip
"""Namespaces of its own and no privileges, also when the worker runs as root."""
_PROC: Final = (
    "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys",
    "--ro-bind-try", "/proc/sysrq-trigger", "/proc/sysrq-trigger",
)  # fmt: skip
"""The kernel lets processes of root write its settings in any namespace: they are read-only here."""


class BubblewrapSandbox(ProcessSandbox):
    """As `process`, with namespaces of its own: no network, no other processes, a private file system."""

    kind = "bubblewrap"
    isolates = True

    async def create(self, resource_limits: Any = None) -> "Sandbox":
        trouble = bubblewrap_trouble()
        if trouble:
            raise SandboxUnavailable(trouble, RETRY_AFTER_S)
        return await super().create(resource_limits)

    def _command(self, folder: Path, command: list[str]) -> list[str]:
        system = [
            part
            for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ssl")
            if Path(path).exists()
            for part in ("--ro-bind", path, path)
        ]
        return [
            "bwrap", *_APART, "--die-with-parent", "--new-session", *system, *_PROC,
            "--dev", "/dev", "--tmpfs", "/tmp",  # noqa: S108 - a private one
            "--bind", str(folder), str(folder), "--chdir", str(folder), "--", *command,
        ]  # fmt: skip


_probe: tuple[str, float] | None = None
"""What the last probe of bubblewrap found, and when."""


def bubblewrap_trouble() -> str:
    """Why bubblewrap cannot be used here; empty when it can. A failed probe is repeated after a while."""
    global _probe  # noqa: PLW0603 - one probe serves the whole process
    if _probe is None or (_probe[0] and time.monotonic() - _probe[1] >= PROBE_AGAIN_S):
        _probe = _probed(), time.monotonic()
    return _probe[0]


def _probed() -> str:
    import subprocess  # noqa: PLC0415 - for the probe alone

    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (Debian package bubblewrap)"
    try:
        probe = subprocess.run(  # noqa: S603 - a fixed command
            [program, *_APART, "--ro-bind", "/", "/", *_PROC, "true"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run here: {error}"
    return "" if probe.returncode == 0 else f"this kernel does not permit it: {probe.stderr.strip()}"


def limited(command: list[str], limits: RunLimits, limit_s: float) -> list[str]:
    """A command under the limits of a shell: memory, processor time, files, no core dumps."""
    rules = [f"ulimit -t {max(1, round(limit_s) + 1)}", f"ulimit -n {FILES_MAX}", "ulimit -c 0"]
    rules.append(f"ulimit -f {FILE_BYTES_MAX // 512}")
    if limits.memory is not None:
        rules.append(f"ulimit -v {max(1, bytes_of(limits.memory) // 1024)}")
    return ["/bin/sh", "-c", f'{" && ".join(rules)} && exec "$@"', "sh", *command]


async def _finished(child: asyncio.subprocess.Process, stdin: bytes, limit_s: float) -> Completed:
    timed_out = False
    try:
        async with asyncio.timeout(limit_s):
            stdout, stderr = await _communicated(child, stdin)
            await child.wait()
    except TimeoutError:
        timed_out, stdout, stderr = True, b"", b""
    finally:
        _kill(child)
    code = await child.wait()
    if timed_out:
        return Completed(TIMED_OUT, "", f"the program ran longer than {limit_s:g} s", timed_out=True)
    code = code if code >= 0 else 128 - code
    return Completed(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


async def _communicated(child: asyncio.subprocess.Process, stdin: bytes) -> tuple[bytes, bytes]:
    assert child.stdin is not None  # noqa: S101 - for the type checker
    assert child.stdout is not None  # noqa: S101 - as above
    assert child.stderr is not None  # noqa: S101 - as above
    with contextlib.suppress(ConnectionError):
        child.stdin.write(stdin)
        await child.stdin.drain()
        child.stdin.close()
    both = await asyncio.gather(_read(child.stdout), _read(child.stderr))
    return both[0], both[1]


async def _read(stream: asyncio.StreamReader) -> bytes:
    """The first part of an output; the rest is read and dropped, so that the program is not blocked."""
    kept = bytearray()
    while part := await stream.read(65_536):
        kept += part[: OUTPUT_BYTES_MAX - len(kept)]
    return bytes(kept)


def _kill(child: asyncio.subprocess.Process) -> None:
    """Kill the process group: what a program has started ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _empty(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
