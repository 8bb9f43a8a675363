"""A connection to PostgreSQL that runs several statements in one trip to the server.

Rule 1: a statement is prepared once for each connection. Its parameters have the types that the statement
        gives them, so the same statement serves numbers of every size.
Rule 2: all statements of a trip are sent before the first answer is read. After an error the server skips the
        rest of the trip, and the error is raised.

psycopg's own pipelines wait for the socket after every statement, which costs three times the processor time.
"""

import itertools
import re
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import psycopg
from psycopg import errors as sql_errors
from psycopg.adapt import Transformer
from psycopg.generators import fetch_many, send
from psycopg.pq import ExecStatus, Format

Statement = tuple[str, Any]
"""A statement with `%s` or `%(name)s` for parameters, and their values: a sequence or a mapping."""

_PARAMETER = re.compile(r"%(?:\((\w+)\))?[sb]")
_BYTEA_ARRAY = struct.Struct(">iiIii")  # dimensions, has nulls, type of elements, length, first index
_LENGTH = struct.Struct(">i")
_BYTEA = 17
_GOOD = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)


class _Parsed(NamedTuple):
    text: bytes
    names: tuple[str, ...]
    """The names of its parameters; empty when they have none."""


class StatementResult(NamedTuple):
    """The outcome of one statement."""

    rows: list[Any]
    changed: int
    """How many rows were found or changed."""


class Connection(psycopg.Connection[Any]):
    """A connection of a store."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prepared_names: dict[str, bytes] = {}
        """The names of prepared statements."""
        self._numbers = itertools.count()
        self.watchdog: Any = None
        """Closes the connection when the server stops answering; see `postgres_watchdog`."""
        self.waits_since = 0.0
        """Since when this connection waits for an answer; 0 while it does not."""
        self.mark = ""
        """Names its session on the server; empty behind a pooler, where transactions switch sessions."""
        self.lock_number = 0
        """The advisory lock that its transaction holds, which names the session, too; 0 without one."""

    def watched(self) -> AbstractContextManager[None]:
        """During the block, a server that does not answer in time is given up."""
        watching: AbstractContextManager[None] = self.watchdog.watching(self)
        return watching

    def wait(self, *args: Any, **options: Any) -> Any:
        self.waits_since = time.monotonic()
        try:
            return super().wait(*args, **options)
        finally:
            self.waits_since = 0.0

    def run(self, text: str) -> Any:
        """Run SQL without parameters, one statement or several; the result of the last one."""
        result = self.run_unchecked(text)
        check(self, result)
        return result

    def run_unchecked(self, text: str) -> Any:
        """As `run`. An error is in the result, and is not raised."""
        self.waits_since = time.monotonic()
        try:
            return self.pgconn.exec_(text.encode())
        finally:
            self.waits_since = 0.0

    def trip(self, statements: Sequence[Statement]) -> list[StatementResult]:
        """Run statements in one trip, and return their outcomes."""
        ready = [(text, *_bound(text, values)) for text, values in statements]
        pgconn, new = self.pgconn, dict[str, bytes]()
        pgconn.enter_pipeline_mode()
        is_own: list[bool] = []
        """For each result, whether it belongs to a statement and not to its preparation."""
        for text, values, formats in ready:
            if self.prepare_threshold is None:
                pgconn.send_query_params(_parsed(text).text, values, None, formats, Format.BINARY)
            else:
                name = self._prepared_names.get(text) or new.get(text)
                if name is None:
                    name = new[text] = b"postroom_%d" % next(self._numbers)
                    pgconn.send_prepare(name, _parsed(text).text)
                    is_own.append(False)
                pgconn.send_query_prepared(name, values, formats, Format.BINARY)
            is_own.append(True)
        pgconn.pipeline_sync()
        results = self.wait(_results(pgconn))
        pgconn.exit_pipeline_mode()
        for result in results:
            check(self, result)
        self._prepared_names.update(new)
        return [self._answer(result) for result, own in zip(results, is_own, strict=True) if own]

    def _answer(self, result: Any) -> StatementResult:
        if not result.nfields:
            return StatementResult([], result.command_tuples or 0)
        transformer = Transformer(self)
        transformer.set_pgresult(result)
        return StatementResult(transformer.load_rows(0, result.ntuples, tuple), result.ntuples)


def _results(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    """Send what is buffered, and read the result of every statement up to the end of the trip."""
    yield from send(pgconn)
    found: list[Any] = []
    while True:
        results = yield from fetch_many(pgconn)
        if results and results[-1].status == ExecStatus.PIPELINE_SYNC:
            return found
        found += results


def check(connection: Connection, result: Any) -> None:
    """Raise the error that a result reports. An error without an SQLSTATE is one of the connection."""
    if result.status not in _GOOD:
        error = sql_errors.error_from_result(result, connection.info.encoding)
        raise error if error.sqlstate else psycopg.OperationalError(str(error))


def _bound(text: str, values: Any) -> tuple[list[bytes | None], list[Format]]:
    """The values of a statement in the order of its parameters, and their formats."""
    if isinstance(values, Mapping):
        values = [values[name] for name in _parsed(text).names]
    dumped = [_dumped(value) for value in values]
    return [data for data, _ in dumped], [form for _, form in dumped]


@cache
def _parsed(text: str) -> _Parsed:
    """A statement as the server reads it."""
    names: list[str] = []

    def numbered(found: re.Match[str]) -> str:
        name = found[1]
        if name is None or name not in names:
            names.append(name)
        return f"${names.index(name) + 1 if name else len(names)}"

    parsed = _PARAMETER.sub(numbered, text)
    return _Parsed(parsed.encode(), tuple(filter(None, names)))


def _dumped(value: Any) -> tuple[bytes | None, Format]:
    """A value as the server reads it: bytes as they are, everything else as text."""
    match value:
        case None:
            return None, Format.TEXT
        case int():
            return b"%d" % value, Format.TEXT
        case str():
            return value.encode(), Format.BINARY  # as text, it would end at a NUL
        case list() if value and isinstance(value[0], bytes):
            head = _BYTEA_ARRAY.pack(1, 0, _BYTEA, len(value), 1)
            return head + b"".join(_LENGTH.pack(len(one)) + one for one in value), Format.BINARY
        case list():
            return f"{{{','.join(map(_element, value))}}}".encode(), Format.TEXT
    return value, Format.BINARY


def _element(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
