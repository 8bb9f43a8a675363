"""The output of the command line: JSON lines for programs, tables and records for people.

Rule 1: a terminal gets the readable form; pipes, files and --json get one JSON value per line.
Rule 2: colours only on a terminal, and not when NO_COLOR is set.
Rule 3: control characters of messages and paths are shown as escapes, so that no header field and no body
        reaches the terminal as a command.
Rule 4: bytes that are not UTF-8 are kept: in JSON they are escaped lone surrogates, which Python reads back.
"""

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from postroom.core.door import leaving
from postroom.core.text import visible, visible_json, visible_line
from postroom.errors import Unavailable

if TYPE_CHECKING:
    from postroom.message import BusMessage

Style = Literal["bold", "dim", "red", "green", "cyan"]
Form = Literal["auto", "json", "zos"]
"""auto: readable on a terminal, else JSON; json: always JSON; zos: the output of `zos-mq`."""

BODY_INDENT = "    "
COLUMN_GAP = "  "
_NUMBER = re.compile(r"-|-?[\d,]+(?:\.\d+)?")  # a dash: no value

_STYLES: dict[Style, dict[str, Any]] = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    "red": {"fg": "red"},
    "green": {"fg": "green"},
    "cyan": {"fg": "cyan"},
}


class OutputFailed(Unavailable):
    """The output could not be written, for example because the disk is full."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"cannot write the output: {cause.strerror or cause}")


class Output:
    """Prints results to a stream, in the form that fits the stream."""

    def __init__(self, stream: TextIO, form: Form = "auto", environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self.form = form
        self._colours = self._terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

    @property
    def readable(self) -> bool:
        """Whether the output is for a person."""
        return self._terminal and self.form == "auto"

    def style(self, text: str, *styles: Style) -> str:
        if not self._colours:
            return text
        return click.style(text, **{key: value for name in styles for key, value in _STYLES[name].items()})

    # ---- one result, in both forms ---------------------------------------------------------

    def verdict(self, is_ok: bool) -> str:
        """The result of a check, in one word."""
        return self.style("ok", "bold", "green") if is_ok else self.style("DAMAGED", "bold", "red")

    def bus_message(self, message: "BusMessage") -> None:
        if not self.readable:
            self.json_line(bus_object(message))
            return
        place = "/".join(part for part in (message.project_id, message.task_id, message.run_id) if part)
        details = {
            "id": message.msg_id,
            "parents": ", ".join(message.parents),
            "attachment": message.attachment_path,
        }
        extra = ((str(key), _cell(value)) for key, value in message.extra.items())
        head = [message.type, place, rfc3339(message.ts)]
        self._record(head, [*details.items(), *extra], message.body)

    def queue_message(self, message: Mapping[str, Any]) -> None:
        if not self.readable:
            self.json_line(message)
            return
        details = {
            "id": str(message["msg_id"]),
            "in reply to": str(message.get("in_reply_to") or ""),
            "ttl": "" if message.get("ttl_s") is None else f"{message['ttl_s']} s",
            "body error": str(message.get("_body_error") or ""),
        }
        route = f"{message['from']} -> {message.get('to') or 'all'}"
        head = [str(message["topic"]), route, str(message["ts"])]
        self._record(head, details.items(), str(message["body"]))

    def record(self, head: Sequence[str], details: Mapping[str, Any], body: str) -> None:
        """Print a heading, details below it, and a body. For people only."""
        shown = (
            (name.replace("_", " "), _cell(value))
            for name, value in details.items()
            if value not in ("", None)
        )
        self._record(head, shown, body)

    def msg_id(self, msg_id: str, *, bare: bool = False) -> None:
        """Print the id of a stored message."""
        if bare or self.readable or self.form == "zos":
            self.text(visible_line(msg_id))
        else:
            self.json_line({"msg_id": msg_id})

    def number(self, value: int, sentence: str = "") -> None:
        """Print a number, which is JSON, too; on a terminal the sentence, if there is one."""
        self.text(sentence if sentence and self.readable else str(value))

    def facts(self, facts: Mapping[str, Any], sentence: str) -> None:
        """Print an object for programs, a sentence for people."""
        if self.readable:
            self.sentence(sentence)
        else:
            self.json_line(facts)

    def document(self, facts: Mapping[str, Any]) -> None:
        """Print an object as indented JSON on a terminal, and as one line of JSON otherwise."""
        if self.readable:
            self.pretty(facts)
        else:
            self.json_line(facts)

    def rows(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], empty: str) -> None:
        """Print a table for people, one object per line for programs. `columns` are keys of the rows."""
        if not self.readable:
            for row in rows:
                self.json_line(row)
            return
        cells = [[visible_line(_cell(row.get(column))) for column in columns] for row in rows]
        if not cells:
            self.sentence(empty)
            return
        self._table([column.replace("_", " ") for column in columns], cells)

    # ---- the pieces ------------------------------------------------------------------------

    def json_line(self, value: object) -> None:
        self.text(json_text(value))

    def pretty(self, value: object) -> None:
        """Print one indented JSON document."""
        self.text(visible_json(json.dumps(value, indent=2, sort_keys=False, default=str)))

    def sentence(self, text: str) -> None:
        """Print a line of text, its control characters escaped."""
        self.text(visible_line(text))

    def text(self, line: str) -> None:
        """Print a line that holds no control characters."""
        self._write(line + "\n")

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(error) from error

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        if not self.readable:
            encoding = "utf-8"  # JSON is always UTF-8
        try:
            self._stream.buffer.write(text.encode(encoding, "backslashreplace"))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(error) from error

    def _table(self, names: list[str], cells: list[list[str]]) -> None:
        columns = list(zip(*cells, strict=True))
        widths = [max(map(width, (name, *column))) for name, column in zip(names, columns, strict=True)]
        numbers = [all(map(_NUMBER.fullmatch, column)) for column in columns]
        self.text(self.style(_aligned(names, widths, numbers), "bold"))
        for row in cells:
            self.text(_aligned(row, widths, numbers))

    def _record(self, head: Sequence[str], details: Iterable[tuple[str, str]], body: str) -> None:
        first, *rest = map(visible_line, head)
        self.text(COLUMN_GAP.join([self.style(first, "bold", "cyan"), *rest]))
        for name, value in details:
            if value:
                self.text(f"  {self.style(visible_line(name) + ':', 'dim')} {visible_line(value)}")
        for line in body.removesuffix("\n").split("\n") if body else ():
            self.text(BODY_INDENT + visible(line))


def bus_object(message: "BusMessage") -> dict[str, Any]:
    """A bus message with the field names of the file."""
    fields: dict[str, Any] = {
        "msg_id": message.msg_id,
        "ts": rfc3339(message.ts),
        "type": message.type,
        "project_id": message.project_id,
        "task_id": message.task_id,
        "run_id": message.run_id,
        "parents": list(message.parents),
        "attachment_path": message.attachment_path,
        "body": message.body,
    }
    return {**fields, "extra": message.extra} if message.extra else fields


def rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def json_text(value: object) -> str:
    """One line of JSON, its control characters escaped."""
    return visible_json(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_cell(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "-"
    return str(value)


def _aligned(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    """One row. Columns of numbers are aligned to the right."""
    padded = (
        " " * (wide - width(cell)) + cell if is_number else cell + " " * (wide - width(cell))
        for cell, wide, is_number in zip(cells, widths, numbers, strict=True)
    )
    return COLUMN_GAP.join(padded).rstrip()


def width(text: str) -> int:
    """The width of a text in columns of a terminal."""
    if text.isascii():
        return len(text)
    shown = [char for char in text if not unicodedata.combining(char)]
    return len(shown) + sum(unicodedata.east_asian_width(char) in "WF" for char in shown)


def warn(program: str, text: str) -> None:
    """Print a line on stderr. A closed stderr does not stop the work."""
    with suppress(OSError):
        sys.stderr.write(f"{program}: {visible_line(leaving(text))}\n")
        sys.stderr.flush()
