"""The log of a server: one JSON object per line, written by its own thread.

Rule 1: no token and no payload is ever logged, and each line is redacted.
Rule 2: `write` never waits for the reader of the log. When the reader is too slow, lines are dropped and
        counted.
Rule 3: events that a caller without a token can cause are logged at most once a second, with their number.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

from postroom.core.door import leaving, leaving_value

GATHER_S = 0.02  # events within this go into one write
FIELD_CHARS_MAX = 1_000

_encode = msgspec.json.Encoder(enc_hook=lambda value: leaving(repr(value))).encode


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    lines_waiting_max: int = 10_000
    rarely_s: float = 1.0
    close_timeout_s: float = 2.0


class ServerLog:
    """Writes lines to a stream. Safe to share between threads."""

    limits = LogLimits()

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._lines: deque[dict[str, Any]] = deque()
        self._woken = threading.Event()
        self._closed = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._rare: dict[str, tuple[float, int]] = {}
        self.listener: Callable[[dict[str, Any]], None] | None = None
        """Called with each line before it is written. It must not wait."""

    def write(self, event: str, *, task_id: str = "", agent: str = "", **facts: Any) -> None:
        """Log an event."""
        if len(self._lines) >= self.limits.lines_waiting_max:
            self._dropped += 1
            return
        line = {"ts": time.time(), "event": event, "task_id": task_id, "agent": agent, **facts}
        self._lines.append(line)
        if self.listener is not None:
            self.listener(line)
        if not self._woken.is_set():
            self._woken.set()
            if self._thread is None:
                self._start()

    def write_rarely(self, event: str, **facts: Any) -> None:
        """Like `write`, but at most once per event in `rarely_s`. `times` counts the occurrences."""
        written, times = self._rare.get(event, (-self.limits.rarely_s, 0))
        now = time.monotonic()
        if now < written + self.limits.rarely_s:
            self._rare[event] = written, times + 1
            return
        self._rare[event] = now, 0
        self.write(event, times=times + 1, **facts)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="postroom-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._woken.wait()
            if not self._closed:
                time.sleep(GATHER_S)
            self._woken.clear()
            self._flush()

    def _flush(self) -> None:
        lines = []
        while self._lines:
            lines.append(_text(self._lines.popleft()))
        if self._dropped:
            lines.append(_text({"ts": time.time(), "event": "lines_dropped", "lines": self._dropped}))
            self._dropped = 0
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # the stream is closed
            self._dropped += len(lines)

    def close(self) -> None:
        """Write the pending lines, unless the reader has stopped."""
        self._closed = True
        self._woken.set()
        with self._starting:  # another thread may be starting it
            thread = self._thread
        if thread is None:
            self._flush()
        else:
            thread.join(self.limits.close_timeout_s)
            if not thread.is_alive():
                self._flush()


def _text(line: dict[str, Any]) -> str:
    moment = datetime.fromtimestamp(line["ts"], UTC)
    for name, value in line.items():  # the names are those of this package
        if value.__class__ is str:
            line[name] = leaving(value)[:FIELD_CHARS_MAX]
        elif value.__class__ is not int and value.__class__ is not float:
            line[name] = leaving_value(value)
    line["ts"] = moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    return _encode(line).decode("utf-8", "replace") + "\n"


def error_location(error: BaseException) -> str:
    """The type of an error and the line that raised it, without the message, which may quote a payload."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class ServerLogHandler(logging.Handler):
    """Writes the log records of libraries to a server log."""

    def __init__(self, server_log: ServerLog) -> None:
        super().__init__(logging.WARNING)
        self._server_log = server_log

    def emit(self, record: logging.LogRecord) -> None:
        facts = {"logger": record.name, "level": record.levelname}
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = error_location(record.exc_info[1])
        else:
            facts["message"] = record.getMessage()
        if (
            record.name == "uvicorn.error" and record.levelno == logging.WARNING
        ):  # about input that is not HTTP
            self._server_log.write_rarely("log", **facts)
        else:
            self._server_log.write("log", **facts)
