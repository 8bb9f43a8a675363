"""The files of a mail server's events: one that grows, and full ones that wait for the shipper.

Rule 1: the server alone writes, ends and removes files. A file that was renamed is full and never changes.
Rule 2: the shipper renames a full file when a stream holds all of it; that is all it does here.
Rule 3: shipped files go first. One that was not shipped is removed only above `TOTAL_BYTES_MAX`, and its
        events are counted and told.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from postroom.system.atomic import open_safely

GROWING = "events.jsonl"
FILE_BYTES_MAX = 64 << 20  # of the growing file; then it is full
SHIPPED_BYTES_MAX = 128 << 20  # of shipped files that are kept for another look
TOTAL_BYTES_MAX = 1 << 30  # of all full files, shipped or not
COUNT_BYTES = 1 << 20  # read at once to count lines

_FULL = re.compile(r"events-(\d{8,12})(\.shipped)?\.jsonl")


class FullFile(NamedTuple):
    """A file that is written no more."""

    number: int
    path: Path
    is_shipped: bool
    size: int


def full_files(folder: Path) -> list[FullFile]:
    """The full files of a folder, the oldest first."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _FULL.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # the shipper renames, the server removes
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(FullFile(int(match[1]), Path(entry.path), bool(match[2]), size))
    return sorted(found)


def is_full(path: Path) -> bool:
    """Whether a file by this name is full and not yet marked as shipped."""
    match = _FULL.fullmatch(path.name)
    return match is not None and not match[2]


def end_growing(folder: Path) -> None:
    """Make the growing file a full one. Nothing happens when somebody else moved it away."""
    number = max((file.number for file in full_files(folder)), default=0) + 1
    with suppress(FileNotFoundError):
        (folder / GROWING).rename(folder / f"events-{number:08}.jsonl")


def mark_shipped(path: Path) -> Path:
    """Say that a stream holds all of a full file; gives its new name."""
    marked = path.with_suffix(".shipped.jsonl")
    with suppress(FileNotFoundError):  # the server removed it
        path.rename(marked)
    return marked


def superfluous(files: Iterable[FullFile], shipped_bytes_max: int, total_bytes_max: int) -> list[FullFile]:
    """Which files have to go, the oldest first: shipped ones above their limit, then any above the total."""
    kept = sorted(files)
    gone = _above([file for file in kept if file.is_shipped], shipped_bytes_max)
    kept = [file for file in kept if file not in gone]
    # To keep what was not shipped, every shipped one goes before it.
    rest = sorted(kept, key=lambda file: (not file.is_shipped, file.number))
    return gone + _above(rest, total_bytes_max)


def _above(files: list[FullFile], bytes_max: int) -> list[FullFile]:
    total = sum(file.size for file in files)
    gone = []
    for file in files:
        if total <= bytes_max:
            break
        gone.append(file)
        total -= file.size
    return gone


def lines_in(path: Path) -> int:
    """How many lines a file has."""
    lines = 0
    with os.fdopen(open_safely(path, os.O_RDONLY), "rb", buffering=0) as file:
        while data := file.read(COUNT_BYTES):
            lines += data.count(b"\n")
    return lines
