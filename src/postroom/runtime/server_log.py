"""The log of a server: one JSON object a line, written by a thread of its own.

Rule 1: no token and no payload is ever written.
Rule 2: nobody waits for whoever reads it. When that one is too slow, lines are dropped and counted.
Rule 3: what a stranger can cause is written at most once a second, with how often it happened.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

LINES_WAITING_MAX = 10_000
GATHER_S = 0.02  # one write for what happens within this
FIELD_CHARS_MAX = 1_000
CLOSE_TIMEOUT_S = 2.0
RARELY_S = 1.0

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class ServerLog:
    """Lines on a stream. `write` may be called from any thread."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._lines: deque[dict[str, Any]] = deque()
        self._news = threading.Event()
        self._closed = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._rare: dict[str, tuple[float, int]] = {}

    def write(self, event: str, *, task_id: str = "", agent: str = "", **facts: Any) -> None:
        """Say that something happened."""
        if len(self._lines) >= LINES_WAITING_MAX:
            self._dropped += 1
            return
        line = {"ts": time.time(), "event": event, "task_id": task_id, "agent": agent, **facts}
        self._lines.append(line)
        if not self._news.is_set():
            self._news.set()
            if self._thread is None:
                self._start()

    def write_rarely(self, event: str, **facts: Any) -> None:
        """As `write`, at most once in `RARELY_S` for an event; `times` says how often it happened."""
        written, times = self._rare.get(event, (-RARELY_S, 0))
        now = time.monotonic()
        if now < written + RARELY_S:
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
            self._news.wait()
            if not self._closed:
                time.sleep(GATHER_S)
            self._news.clear()
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
        except (OSError, ValueError):  # nobody reads any more
            self._dropped += len(lines)

    def close(self) -> None:
        """Write what waits, unless whoever reads has stopped."""
        self._closed = True
        self._news.set()
        with self._starting:  # somebody's first line may be about to start it
            thread = self._thread
        if thread is None:
            self._flush()
        else:
            thread.join(CLOSE_TIMEOUT_S)
            if not thread.is_alive():
                self._flush()


def _text(line: dict[str, Any]) -> str:
    moment = datetime.fromtimestamp(line["ts"], UTC)
    line["ts"] = moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    for name, value in line.items():
        if isinstance(value, str) and len(value) > FIELD_CHARS_MAX:
            line[name] = value[:FIELD_CHARS_MAX]
    return _encode(line).decode("utf-8", "replace") + "\n"


def error_location(error: BaseException) -> str:
    """Which error, and the line that raised it. What it says is left out: it may quote a payload."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class ServerLogHandler(logging.Handler):
    """What libraries log, as lines of a server_log."""

    def __init__(self, server_log: ServerLog) -> None:
        super().__init__(logging.WARNING)
        self._server_log = server_log

    def emit(self, record: logging.LogRecord) -> None:
        facts = {"logger": record.name, "level": record.levelname}
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = error_location(record.exc_info[1])
        else:
            facts["message"] = record.getMessage()
        if record.name == "uvicorn.error" and record.levelno == logging.WARNING:  # of what is not HTTP
            self._server_log.write_rarely("log", **facts)
        else:
            self._server_log.write("log", **facts)
