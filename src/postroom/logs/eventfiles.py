"""The event files of a mail server: one growing file, and full files that wait for the shipper.

Rule 1: only the server writes, renames and removes files. A renamed file is full and never changes.
Rule 2: the shipper renames a full file once a stream holds all of its events, and does nothing else here.
Rule 3: shipped files are removed first. An unshipped file is removed only above `total_bytes_max`, and the
        number of its events is reported.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from postroom.system.atomic import open_safely

GROWING = "events.jsonl"
COUNT_BYTES = 1 << 20  # bytes per read when counting lines

_FULL = re.compile(r"events-(\d{8,12})(\.shipped)?\.jsonl")


class FullFile(NamedTuple):
    """An event file that is no longer written to."""

    number: int
    path: Path
    is_shipped: bool
    size: int


def full_files(folder: Path) -> list[FullFile]:
    """The full files of a folder, oldest first."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _FULL.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # renamed by the shipper or removed by the server
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(FullFile(int(match[1]), Path(entry.path), bool(match[2]), size))
    return sorted(found)


def is_full_name(name: str) -> bool:
    """Whether the name is that of a full file, shipped or not."""
    return _FULL.fullmatch(name) is not None


def is_full(path: Path) -> bool:
    """Whether the name is that of a full file not yet marked as shipped."""
    match = _FULL.fullmatch(path.name)
    return match is not None and not match[2]


def end_growing(folder: Path) -> None:
    """Rename the growing file to a full one; no effect when the file is missing."""
    number = max((file.number for file in full_files(folder)), default=0) + 1
    with suppress(FileNotFoundError):
        (folder / GROWING).rename(folder / f"events-{number:08}.jsonl")


def mark_shipped(path: Path) -> Path:
    """Rename a full file whose events are all in a stream; returns the new path."""
    marked = path.with_suffix(".shipped.jsonl")
    with suppress(FileNotFoundError):  # the server removed it
        path.rename(marked)
    return marked


def superfluous(files: Iterable[FullFile], shipped_bytes_max: int, total_bytes_max: int) -> list[FullFile]:
    """The files to remove, oldest first: shipped files above their limit, then any file above the total."""
    kept = sorted(files)
    gone = _above([file for file in kept if file.is_shipped], shipped_bytes_max)
    kept = [file for file in kept if file not in gone]
    # Remove every shipped file before the first unshipped one.
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
    """The number of lines in a file."""
    lines = 0
    with os.fdopen(open_safely(path, os.O_RDONLY), "rb", buffering=0) as file:
        while data := file.read(COUNT_BYTES):
            lines += data.count(b"\n")
    return lines
