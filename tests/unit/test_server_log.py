import io
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from postroom.server.telemetry.server_log import (
    FIELD_CHARS_MAX,
    LogLimits,
    ServerLog,
    ServerLogHandler,
    error_location,
)
from tests.waiting import HANG_GUARD_S


def fail() -> None:
    raise ValueError("a secret payload")


def lines_of(stream: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_is_an_object_with_the_same_first_fields() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.write("claimed", task_id="t-1", agent="triage", attempt=2)
    server_log.write("stopped")
    server_log.close()
    first, second = lines_of(stream)
    assert first.pop("ts").endswith("Z")
    assert first == {"event": "claimed", "task_id": "t-1", "agent": "triage", "attempt": 2}
    assert list(second)[:4] == ["ts", "event", "task_id", "agent"]


@pytest.mark.parametrize("text", ["two\nlines", 'quote"s', "\x1b[31m", "ä\U0001f600", "\0"])
def test_any_field_value_stays_on_one_line(text: str) -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.write("refused", agent=text, odd=object)
    server_log.close()
    [line] = lines_of(stream)
    assert line["agent"] == text


def test_events_of_anonymous_callers_are_logged_rarely_and_counted() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.limits = LogLimits(rarely_s=3_600.0)
    for _ in range(1_000):
        server_log.write_rarely("refused", status=401)
    server_log.limits = LogLimits(rarely_s=0.0)
    server_log.write_rarely("refused", status=401)
    server_log.close()
    assert [line["times"] for line in lines_of(stream)] == [1, 1_000]


def test_warnings_about_malformed_http_are_logged_rarely() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.limits = LogLimits(rarely_s=3_600.0)
    handler = ServerLogHandler(server_log)
    for level, name in ((logging.WARNING, "uvicorn.error"), (logging.ERROR, "uvicorn.error")) * 3:
        handler.emit(logging.LogRecord(name, level, "", 0, "something", None, None))
    server_log.close()
    levels = [line["level"] for line in lines_of(stream)]
    assert sorted(levels) == ["ERROR"] * 3 + ["WARNING"]


def test_a_long_field_is_truncated() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.write("refused", task_id="x" * 5 * FIELD_CHARS_MAX)
    server_log.close()
    assert len(lines_of(stream)[0]["task_id"]) == FIELD_CHARS_MAX


def test_a_stopped_reader_does_not_block_writers() -> None:
    reading, writing = os.pipe()
    stuck = os.fdopen(writing, "w")
    server_log = ServerLog(stuck)
    server_log.limits = LogLimits(lines_waiting_max=100, close_timeout_s=0.1)
    for _ in range(3_000):
        server_log.write("claimed", task_id="x" * 100)
    server_log.close()
    with os.fdopen(reading, "rb") as reader:
        assert reader.read(100)
        stuck_thread = server_log._thread
        while stuck_thread is not None and stuck_thread.is_alive():
            reader.read(65_536)
    stuck.close()


def test_dropped_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.limits = LogLimits(lines_waiting_max=10)
    monkeypatch.setattr(server_log, "_start", lambda: None)  # nothing is written before the end
    for _ in range(15):
        server_log.write("claimed")
    server_log.close()
    lines = lines_of(stream)
    assert [line["event"] for line in lines] == ["claimed"] * 10 + ["lines_dropped"]
    assert lines[-1]["lines"] == 5


def test_a_closed_stream_is_not_an_error() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    stream.close()
    server_log.write("claimed")
    server_log.close()


def test_the_message_of_an_error_is_left_out() -> None:
    with pytest.raises(ValueError, match="secret") as raised:
        fail()
    location = error_location(raised.value)
    assert location.startswith("ValueError at ")
    assert Path(__file__).name in location
    assert "secret" not in location


def test_library_logs_become_lines() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    logger = logging.getLogger("library")
    handler = ServerLogHandler(server_log)
    logger.addHandler(handler)
    logger.info("too quiet")
    logger.warning("about %s", "this")
    try:
        fail()
    except ValueError:
        logger.exception("it broke")
    logger.removeHandler(handler)
    server_log.close()
    about, broke = lines_of(stream)
    assert (about["event"], about["logger"], about["message"]) == ("log", "library", "about this")
    assert broke["error"].startswith("ValueError at ")
    assert "secret" not in stream.getvalue()


def test_close_waits_for_a_thread_that_is_just_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_made, is_closing = threading.Event(), threading.Event()

    class Slow(threading.Thread):
        def start(self) -> None:
            is_made.set()
            is_closing.wait(HANG_GUARD_S)
            time.sleep(0.05)  # so that close is called first
            super().start()

    stream = io.StringIO()
    server_log = ServerLog(stream)
    writer = threading.Thread(target=server_log.write, args=("nudge_failed",))
    monkeypatch.setattr("postroom.server.telemetry.server_log.threading.Thread", Slow)
    writer.start()
    assert is_made.wait(HANG_GUARD_S)
    is_closing.set()
    server_log.close()
    writer.join()
    assert [line["event"] for line in lines_of(stream)] == ["nudge_failed"]


def test_the_log_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    server_log = ServerLog()
    server_log.write("serving")
    server_log.close()
    assert json.loads(capsys.readouterr().err)["event"] == "serving"
