"""Runs the commands: in this process where possible, otherwise as real processes."""

import contextlib
import fcntl
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from postroom.cli import main, shell
from postroom.cli.queue import zosmq
from tests import warmpython
from tests.waiting import HANG_GUARD_S

BIN = Path(sys.executable).parent


class Result(NamedTuple):
    code: int
    raw: bytes
    errors: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def lines(self) -> list[Any]:
        """Every line of the output, decoded as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def line(self) -> Any:
        (only,) = self.lines
        return only

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.errors.endswith("\n")
        (only,) = self.errors.splitlines()
        return only


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Tests do not see the settings of the user, and do not write outside their own folder."""
    for variable in list(os.environ):
        if variable.startswith(("POSTROOM_", "ZOS_", "XDG_")) or variable in ("NO_COLOR", "PYTHONUNBUFFERED"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(folder)


def call(command: click.Command, program: str, *arguments: object, stdin: bytes = b"") -> Result:
    """Run a command in this process, with everything except the process itself."""
    out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    before, environ = sys.stdin, dict(os.environ)
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = shell.run(command, program, [str(argument) for argument in arguments])
    finally:
        sys.stdin = before
        for name in os.environ.keys() - environ.keys():  # such as the key file, which children inherit
            del os.environ[name]
        os.environ.update(environ)
    assert isinstance(out.buffer, io.BytesIO)
    return Result(code, out.buffer.getvalue(), errors.getvalue())


def postroom(*arguments: object, stdin: bytes = b"") -> Result:
    return call(main.cli, "postroom", *arguments, stdin=stdin)


def zos_mq(*arguments: object, stdin: bytes = b"") -> Result:
    return call(zosmq.cli, "zos-mq", *arguments, stdin=stdin)


def start(program: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """A real process of an installed command."""
    chosen: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return warmpython.popen([BIN / program, *arguments], **(chosen | options))


def finish(process: subprocess.Popen[bytes], stdin: bytes | None = None) -> Result:
    try:
        raw, errors = process.communicate(stdin, timeout=HANG_GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Result(process.returncode, raw or b"", (errors or b"").decode())


def run(program: str, *arguments: object, **options: Any) -> Result:
    return finish(start(program, *arguments, **options))


def run_on_terminal(program: str, *arguments: object, env: Mapping[str, str] | None = None) -> Result:
    """The same with a terminal as stdout; the result has the bytes that the terminal received."""
    controller, terminal = pty.openpty()
    environ = {"TERM": "xterm", **{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, **(env or {})}
    try:
        process = start(program, *arguments, stdout=terminal, env=environ)
    finally:
        os.close(terminal)
    shown = b"".join(_until_closed(controller))
    os.close(controller)
    result = finish(process)
    return result._replace(raw=shown.replace(b"\r\n", b"\n"))


def _until_closed(controller: int) -> Iterator[bytes]:
    # A terminal without any writer raises an error instead of an end of file.
    with contextlib.suppress(OSError):
        while piece := os.read(controller, 65536):
            yield piece


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that writers need."""
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
