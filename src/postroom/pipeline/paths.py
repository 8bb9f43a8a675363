"""Checks the paths of a command before Spark starts, so that a mistake is reported within a second.

Rule: nothing here imports Spark, Arrow or the tables.
"""

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from postroom.audit.layout import CHAIN, STREAM
from postroom.errors import InvalidMessage
from postroom.settings import is_address

SMALL_BYTES: Final = 8_000_000  # of segments and tables; about 15,000 events
LOGS: Final = "*/_delta_log"  # of the tables, below their folder


def normalized(place: Path | str) -> str:
    """The absolute path of a folder of this machine, or an address without a slash at its end."""
    text = str(place)
    if text.startswith("file:"):
        return unquote(urlsplit(text).path).rstrip("/") or "/"
    return text.rstrip("/") if is_address(text) else str(Path(text).absolute())


def local_path(place: Path | str) -> Path | None:
    """The folder of this machine that a place names; None for an address such as `s3://bucket`."""
    text = normalized(place)
    return None if is_address(text) else Path(text)


def need_local(place: str) -> Path:
    """The folder of this machine that a place names. Raises for an address."""
    folder = local_path(place)
    if folder is None:
        raise InvalidMessage(f"{place} is not a folder of this machine")
    return folder


def need_stream(place: Path | str) -> None:
    """Raise unless the folder has segments, or was created by a shipper. An address is not checked here."""
    events = local_path(place)
    if events is None:
        return
    if not events.is_dir():
        raise InvalidMessage(f"there is no folder {events}: give the folder of an audit stream as --events")
    signs = (events / CHAIN, events / STREAM)
    if not any(sign.exists() for sign in signs) and not any(events.glob("date=*/hour=*")):
        raise InvalidMessage(
            f"{events} is not an audit stream: it has no segments (date=…/hour=…/…) and no {CHAIN}"
        )


def need_apart(events: Path | str, tables: Path | str) -> None:
    """Raise if one folder contains the other: a reader of the stream would find files of the tables."""
    stream, folder = (
        normalized(place) if (here := local_path(place)) is None else str(here.resolve())
        for place in (events, tables)
    )
    if stream == folder:
        raise InvalidMessage(
            f"--events and --tables are the same folder, {events}: give the tables their own"
        )
    for inner, outer in ((stream, folder), (folder, stream)):
        if inner.startswith(f"{outer.rstrip('/')}/"):
            raise InvalidMessage(f"{inner} lies in {outer}: give --events and --tables separate folders")


def need_writable(place: Path | str) -> None:
    """Raise unless the folder is writable, or can be created, and has no files of another kind."""
    tables = local_path(place)
    if tables is None:
        return
    there = tables
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InvalidMessage(f"tables cannot be written to {tables}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InvalidMessage(f"tables cannot be written to {tables}: there is no permission to write {there}")
    if tables.is_dir() and not _holds_tables(tables) and (other := _other_entry(tables)):
        raise InvalidMessage(f"{tables} is not a folder of tables: it has no table, but {other}")


def _other_entry(folder: Path) -> str:
    """A file that is not of a table or a job, or a part of an audit stream; empty when there is none."""
    for path in folder.iterdir():
        is_hidden = path.name.startswith((".", "_"))
        if path.name == CHAIN or path.name.startswith("date=") or (path.is_file() and not is_hidden):
            return path.name
    return ""


def need_tables(place: Path | str) -> None:
    """Raise unless the folder has at least one committed table. An address is not checked here."""
    tables = local_path(place)
    if tables is not None and not _holds_tables(tables):
        raise InvalidMessage(f"there are no tables in {tables}")


def _holds_tables(tables: Path) -> bool:
    return any(any(log.iterdir()) for log in tables.glob(LOGS))


def need_place(file: Path) -> None:
    """Raise unless a file can be written there: its folder exists, and it is not a folder itself."""
    if file.is_dir():
        raise InvalidMessage(f"{file} is a folder: give the name of the file to write")
    if not file.absolute().parent.is_dir():
        raise InvalidMessage(f"there is no folder {file.absolute().parent} to write {file.name} to")
