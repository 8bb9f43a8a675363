"""Output in its three forms."""

import io
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import click
import pytest

from postroom.cli.render import Form, Output, OutputFailed, bus_object, json_text, warn, width
from postroom.message import BusMessage

MESSAGE = BusMessage(
    "MSG-1",
    datetime(2026, 11, 15, 1, 2, 3, 456, tzinfo=UTC),
    "note",
    "p",
    "",
    "r",
    ["MSG-0"],
    "out/a.md",
    "line 1\nline \x1b[2J\n",
    {"issue_id": "I-7"},
)


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


class Printed:
    """An output, and the text that it printed."""

    def __init__(
        self,
        form: Form = "auto",
        environ: Mapping[str, str] | None = None,
        *,
        terminal: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        self.buffer = io.BytesIO()
        kind = Terminal if terminal else io.TextIOWrapper
        self.output = Output(kind(self.buffer, encoding), form, environ or {})

    @property
    def text(self) -> str:
        self.output.flush()
        return self.buffer.getvalue().decode()

    @property
    def plain(self) -> str:
        return click.unstyle(self.text)


def test_a_pipe_gets_json() -> None:
    printed = Printed()
    printed.output.bus_message(MESSAGE)
    assert json.loads(printed.text) == {
        "msg_id": "MSG-1",
        "ts": "2026-11-15T01:02:03.000456Z",
        "type": "note",
        "project_id": "p",
        "task_id": "",
        "run_id": "r",
        "parents": ["MSG-0"],
        "attachment_path": "out/a.md",
        "body": "line 1\nline \x1b[2J\n",
        "extra": {"issue_id": "I-7"},
    }


def test_a_terminal_gets_a_record() -> None:
    printed = Printed(terminal=True)
    printed.output.bus_message(MESSAGE)
    assert printed.plain == (
        "note  p/r  2026-11-15T01:02:03.000456Z\n"
        "  id: MSG-1\n"
        "  parents: MSG-0\n"
        "  attachment: out/a.md\n"
        "  issue_id: I-7\n"
        "    line 1\n"
        "    line \\x1b[2J\n"
    )


def test_foreign_header_keys_are_escaped_too() -> None:
    printed = Printed(terminal=True, environ={"NO_COLOR": "1"})
    nasty = BusMessage("\x1b[1m", MESSAGE.ts, "t", "p", "", "", [], "", "", {"\x1b[2J": {"deep": ["\x07"]}})
    printed.output.bus_message(nasty)
    assert printed.text == ("t  p  2026-11-15T01:02:03.000456Z\n  id: \\x1b[1m\n  \\x1b[2J: deep=\\x07\n")


@pytest.mark.parametrize(
    ("environ", "terminal", "colourful"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_colours(environ: dict[str, str], terminal: bool, colourful: bool) -> None:
    assert (
        "\x1b[" in Printed(environ=environ, terminal=terminal).output.style("x", "bold", "red")
    ) is colourful


def test_a_queue_message_in_both_forms() -> None:
    message = {
        "msg_id": "m-1",
        "ts": "2026-11-15T00:00:00Z",
        "from": "a",
        "to": None,
        "topic": "ask",
        "body": "@file:m-1.txt",
        "in_reply_to": "m-0",
        "ttl_s": 1.5,
        "_body_error": "gone",
    }
    piped, shown = Printed(), Printed(terminal=True)
    piped.output.queue_message(message)
    shown.output.queue_message(message)
    assert json.loads(piped.text) == message
    assert shown.plain == (
        "ask  a -> all  2026-11-15T00:00:00Z\n"
        "  id: m-1\n  in reply to: m-0\n  ttl: 1.5 s\n  body error: gone\n"
        "    @file:m-1.txt\n"
    )


@pytest.mark.parametrize(
    ("form", "terminal", "bare", "expected"),
    [
        ("auto", False, False, '{"msg_id":"m"}\n'),
        ("auto", False, True, "m\n"),
        ("auto", True, False, "m\n"),
        ("json", True, False, '{"msg_id":"m"}\n'),
        ("zos", False, False, "m\n"),
        ("zos", True, False, "m\n"),
    ],
)
def test_an_id(form: Form, terminal: bool, bare: bool, expected: str) -> None:
    printed = Printed(form, terminal=terminal)
    printed.output.msg_id("m", bare=bare)
    assert printed.text == expected


def test_a_table_is_aligned_by_display_width() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "漢字", "by_topic": {"ask": 1}, "n": 1},
        {"name": "e\u0301\n", "by_topic": {}, "n": None},
    ]
    printed = Printed(terminal=True)
    printed.output.rows(["name", "by_topic", "n"], rows, empty="none")
    assert printed.plain == "name  by topic  n\n漢字  ask=1     1\ne\u0301\\n   -         -\n"
    assert (width("abc"), width("漢字"), width("e\u0301")) == (3, 4, 1)


def test_empty_tables_print_a_sentence() -> None:
    piped, shown = Printed(), Printed(terminal=True)
    piped.output.rows(["a"], [], empty="none")
    shown.output.rows(["a"], [], empty="none")
    assert (piped.text, shown.text) == ("", "none\n")


def test_facts_and_numbers() -> None:
    piped, shown = Printed(), Printed(terminal=True)
    for printed in (piped, shown):
        printed.output.facts({"a": 1}, "a is \x1b 1")
        printed.output.number(3, "three things")
        printed.output.number(4)
    assert (piped.text, shown.text) == ('{"a":1}\n3\n4\n', "a is \\x1b 1\nthree things\n4\n")


def test_unencodable_characters_are_escaped_and_json_stays_utf8() -> None:
    shown = Printed(terminal=True, encoding="ascii")
    shown.output.text("grün 漢")
    assert shown.text == "gr\\xfcn \\u6f22\n"
    piped = Printed(encoding="ascii")
    piped.output.json_line("grün 漢")
    assert piped.text == '"grün 漢"\n'


def test_json_keeps_bytes_that_are_not_text() -> None:
    assert json_text({"body": "a\udcff\x7f"}) == '{"body":"a\\udcff\\u007f"}'
    assert json_text({"when": MESSAGE.ts}) == '{"when":"2026-11-15 01:02:03.000456+00:00"}'
    assert "extra" not in bus_object(BusMessage("i", MESSAGE.ts, "t", "p", "", "", [], "", "", {}))


def pour(output: Output) -> None:
    output.text("x" * 100_000)
    output.flush()


def test_a_failed_output_write_raises_output_failed() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        with pytest.raises(OutputFailed, match="No space left"):
            pour(Output(full))
        let_it_close(full)


def test_a_closed_pipe_raises_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        with pytest.raises(BrokenPipeError):
            pour(Output(closed))
        let_it_close(closed)


def let_it_close(stream: TextIO) -> None:
    """The buffered output is dropped."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def test_a_warning_is_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    warn("postroom", "a\nb\x1b")
    assert capsys.readouterr().err == "postroom: a\\nb\\x1b\n"
