"""The report of the Spark pipeline on the live page, where its tables exist.

Rule 1: the report is a file of the data folder, no symlink. It runs no code, and its own policy allows none.
Rule 2: it is written again when somebody looks and the tables are newer: by one child process at a time,
        which needs no JVM, ends within `WRITE_S_MAX`, and begins at most every `WRITE_EVERY_S`.
Rule 3: this process imports nothing of Spark. Without its packages, the page shows the commands.
"""

import asyncio
import os
import shlex
import stat
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from postroom.errors import UnsafePath, clipped
from postroom.pipeline.paths import LOGS
from postroom.server.folder.layout import AUDIT_FOLDER, REPORT_FILE, TABLES_FOLDER
from postroom.server.http.exchange import HttpReply, HttpRequest, Refusal
from postroom.server.http.task_server import TaskServer
from postroom.system.atomic import open_safely

REPORT_BYTES_MAX: Final = 64 * 1024 * 1024
WRITE_S_MAX: Final = 300.0
WRITE_EVERY_S: Final = 60.0
PACKAGES: Final = ("deltalake", "duckdb", "jinja2", "pyspark")
"""What `postroom pipeline report` imports of the extra `spark`."""
POLICY: Final = (
    b"default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; "
    b"form-action 'none'; base-uri 'none'; sandbox"
)

_encode = msgspec.json.Encoder().encode


class Files(msgspec.Struct, frozen=True):
    """The times of the newest change of the tables and of the report; None where there is none."""

    tables: float | None
    report: float | None


class Reports:
    """The report of one server, and the process that writes it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._tables_read: float | None = None
        """The newest change of the tables before they were read last."""
        self._due = 0.0
        self._fault = ""

    async def state(self, server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG002 - the token is enough
        """Whether there are tables and a report, and how to write one. Starts to write a newer one."""
        data = server.agents.data
        files = await asyncio.to_thread(files_in, data)
        can_write = all(find_spec(name) is not None for name in PACKAGES)
        if can_write and is_stale(files, self._tables_read):
            self._begin(data, files)
        commands = [_arguments(data)]
        if files.tables is None:
            places = ("--events", str(data / AUDIT_FOLDER), "--tables", str(data / TABLES_FOLDER))
            commands.insert(0, ("pipeline", "run", *places))
        answer = {
            "has_tables": files.tables is not None,
            "written": files.report,
            "is_writing": self._is_writing,
            "fault": self._fault,
            "commands": [shlex.join(("postroom", *words)) for words in commands],
        }
        return HttpReply(200, _encode(answer))

    async def page(self, server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG002 - the token is enough
        """The file."""
        data = await asyncio.to_thread(content_of, server.agents.data / REPORT_FILE)
        headers = (
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", POLICY),
            (b"x-frame-options", b"SAMEORIGIN"),
        )
        return HttpReply(200, data, headers)

    async def close(self) -> None:
        """End the process that writes a report."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    @property
    def _is_writing(self) -> bool:
        return self._task is not None and not self._task.done()

    def _begin(self, data: Path, files: Files) -> None:
        now = asyncio.get_running_loop().time()
        if not self._is_writing and now >= self._due:
            self._due = now + WRITE_EVERY_S
            self._task = asyncio.create_task(self._write(data, files))

    async def _write(self, data: Path, files: Files) -> None:
        try:
            await asyncio.wait_for(self._run(_arguments(data)), WRITE_S_MAX)
        except TimeoutError:
            self._fault = f"it was not written within {WRITE_S_MAX:.0f} s"
        except OSError as error:
            self._fault = f"the process that writes it cannot start: {error}"
        if not self._fault:
            self._tables_read = files.tables

    async def _run(self, arguments: Sequence[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "postroom.cli.main", *arguments,
            stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE,
        )  # fmt: skip
        try:
            _, errors = await process.communicate()
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                process.kill()
            await process.wait()
        said = errors.decode(errors="replace").strip() or f"it ended with {process.returncode}"
        self._fault = clipped(said.splitlines()[-1]) if process.returncode else ""


def _arguments(data: Path) -> tuple[str, ...]:
    tables, report = data / TABLES_FOLDER, data / REPORT_FILE
    return "pipeline", "report", "--tables", str(tables), "--out", str(report)


def is_stale(files: Files, tables_read: float | None) -> bool:
    """Whether there are tables that are newer than the report, or than those that were read for it."""
    if files.tables is None or files.report is None:
        return files.tables is not None
    return files.tables > (files.report if tables_read is None else tables_read)


def files_in(data: Path) -> Files:
    """The files of a data folder."""
    commits = [log.stat().st_mtime for log in (data / TABLES_FOLDER).glob(LOGS)]
    return Files(max(commits, default=None), _time_of(data / REPORT_FILE))


def _time_of(report: Path) -> float | None:
    try:
        found = report.lstat()
    except OSError:
        return None
    return found.st_mtime if stat.S_ISREG(found.st_mode) else None


def content_of(report: Path) -> bytes:
    """The content of the file. A symlink is refused: it could lead to any file that the server may read."""
    try:
        with os.fdopen(open_safely(report, os.O_RDONLY), "rb") as file:
            content = file.read(REPORT_BYTES_MAX + 1)
    except UnsafePath:
        raise Refusal(404, "NotFound", f"{REPORT_FILE} is a symlink or no file, and is not shown") from None
    except OSError:
        content = None
    if content is None or len(content) > REPORT_BYTES_MAX:
        raise Refusal(404, "NotFound", f"there is no report: `postroom pipeline report` writes {REPORT_FILE}")
    return content
