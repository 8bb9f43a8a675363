"""The report of the Spark pipeline beside the live numbers, where its tables exist.

Rule 1: the report is a file of the data folder. It runs no code, and its own policy allows none.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec

from postroom.pipeline.paths import LOGS
from postroom.runtime.http_messages import HttpReply, HttpRequest, Refusal
from postroom.runtime.task_server import TaskServer

TABLES_FOLDER: Final = "tables"
REPORT_FILE: Final = "report.html"
REPORT_BYTES_MAX: Final = 64 * 1024 * 1024
POLICY: Final = (
    b"default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; "
    b"form-action 'none'; base-uri 'none'; sandbox"
)

_encode = msgspec.json.Encoder().encode


async def state(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - the token is enough
    found = await asyncio.to_thread(_state, server.agents.data)
    return HttpReply(200, _encode(found))


def _state(data: Path) -> dict[str, Any]:
    """Whether there are tables and a report, and how to write one."""
    report, tables = data / REPORT_FILE, data / TABLES_FOLDER
    has_tables = next(tables.glob(LOGS), None) is not None
    written = report.stat().st_mtime if report.is_file() else None
    command = f"postroom pipeline report --tables {tables} --out {report}"
    return {"has_tables": has_tables, "written": written, "command": command}


async def page(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - the token is enough
    data = await asyncio.to_thread(_content, server.agents.data / REPORT_FILE)
    headers = (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", POLICY),
        (b"x-frame-options", b"SAMEORIGIN"),
    )
    return HttpReply(200, data, headers)


def _content(report: Path) -> bytes:
    try:
        if report.stat().st_size <= REPORT_BYTES_MAX:
            return report.read_bytes()
    except OSError:
        pass
    raise Refusal(404, "NotFound", f"there is no report: `postroom pipeline report` writes {REPORT_FILE}")
