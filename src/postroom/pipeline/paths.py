"""Checks the paths of a command before Spark starts, so that a mistake is reported within a second.

Rule: nothing here imports Spark or the tables.
"""

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from postroom.errors import InvalidMessage
from postroom.settings import ADDRESS
from postroom.sinks.layout import CHAIN, STREAM

DATA: Final = frozenset({".jsonl", ".parquet"})
SMALL_BYTES: Final = 8_000_000  # of segments and tables; about 15,000 events
LOGS: Final = "*/_delta_log"  # of the tables, below their folder


def need_local(text: str) -> None:
    """Refuse an address such as s3://bucket: as a path it would be a folder named `s3:`."""
    if ADDRESS.match(text):
        raise InvalidMessage(
            f"{text} is not a folder of this machine: tables and segments lie on a file system with locks "
            "and atomic rename, so mount it, or give a path"
        )


def local_path(place: Path | str) -> Path:
    """The absolute path of a folder that is given as a path or as a `file:` URI."""
    text = str(place)
    if text.startswith("file:"):
        return Path(unquote(urlsplit(text).path))
    if isinstance(place, str):
        need_local(place)
    return Path(place).absolute()


def need_stream(events: Path) -> None:
    """Raise unless the folder has segments, or was created by a shipper."""
    if not events.is_dir():
        raise InvalidMessage(f"there is no folder {events}: give the folder of an audit stream as --events")
    signs = (events / CHAIN, events / STREAM)
    if not any(sign.exists() for sign in signs) and not any(events.glob("date=*/hour=*")):
        raise InvalidMessage(
            f"{events} is not an audit stream: it has no segments (date=…/hour=…/…) and no {CHAIN}"
        )


def need_apart(events: Path, tables: Path) -> None:
    """Raise if one folder contains the other: a reader of the stream would find files of the tables."""
    stream, folder = events.resolve(), tables.resolve()
    if stream == folder:
        raise InvalidMessage(
            f"--events and --tables are the same folder, {events}: give the tables their own"
        )
    for inner, outer in ((stream, folder), (folder, stream)):
        if inner.is_relative_to(outer):
            raise InvalidMessage(f"{inner} lies in {outer}: give --events and --tables separate folders")


def need_writable(tables: Path) -> None:
    """Raise unless the folder is writable, or can be created, and has no files of another kind."""
    place = tables.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise InvalidMessage(f"tables cannot be written to {tables}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InvalidMessage(f"tables cannot be written to {tables}: there is no permission to write {place}")
    if tables.is_dir() and not _holds_tables(tables) and (other := _other_entry(tables)):
        raise InvalidMessage(f"{tables} is not a folder of tables: it has no table, but {other}")


def _other_entry(folder: Path) -> str:
    """A file that no job writes beside tables, or a part of an audit stream; empty when there is none."""
    for path in folder.iterdir():
        is_hidden = path.name.startswith((".", "_"))
        if path.name == CHAIN or path.name.startswith("date=") or (path.is_file() and not is_hidden):
            return path.name
    return ""


def need_tables(tables: Path) -> None:
    """Raise unless the folder has at least one committed table."""
    if not _holds_tables(tables):
        raise InvalidMessage(f"there are no tables in {tables.absolute()}")


def _holds_tables(tables: Path) -> bool:
    return any(any(log.iterdir()) for log in tables.glob(LOGS))


def is_small(*folders: Path | None) -> bool:
    """Whether the data files below these folders have at most `SMALL_BYTES`. Stops counting at the limit."""
    size = 0
    for folder in folders:
        for path in () if folder is None else folder.rglob("*"):
            if path.suffix in DATA:
                size += _size(path)
                if size > SMALL_BYTES:
                    return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # compacted meanwhile
        return 0


def need_place(file: Path) -> None:
    """Raise unless a file can be written there: its folder exists, and it is no folder itself."""
    if file.is_dir():
        raise InvalidMessage(f"{file} is a folder: give the name of the file to write")
    if not file.absolute().parent.is_dir():
        raise InvalidMessage(f"there is no folder {file.absolute().parent} to write {file.name} to")
