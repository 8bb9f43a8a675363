"""The file names of a folder of segments, and the two locks that protect it.

Names that begin with `_` are internal; Spark and similar readers ignore them.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from postroom.system import lock
from postroom.system.atomic import TEMPORARY_SUFFIX, open_safely

OPEN = "_open"
CHAIN = "_chain.jsonl"
INDEX = "_index"
TORN = "_torn"
STREAM = "_stream"  # the name of the stream
WRITER_LOCK = "_writer.lock"
CHAIN_LOCK = "_chain.lock"

CHAIN_LOCK_TIMEOUT_S = 30.0  # the lock is held for a line, a rename and two fsyncs
DIGITS_OF_HASH = 12
MICROS_PER_S = 1_000_000

SEGMENT = re.compile(r"date=\d{4}-\d\d-\d\d/hour=\d\d/(\d{8,})-[0-9a-f]{12}\.jsonl")
_NUMBERED = re.compile(r"(\d{8,})\.(?:jsonl|idx)")
_UNFINISHED = re.compile(rf"\.(?:{re.escape(CHAIN)}|{STREAM})\.\d+{re.escape(TEMPORARY_SUFFIX)}")
"""A temporary file that a crash left behind."""


def holds_stream(folder: Path) -> bool:
    """Whether the folder holds a stream, or a copy of one."""
    return any((folder / name).exists() for name in (CHAIN, OPEN))


def segment_name(n: int, sha256: str, sealed_us: int) -> str:
    """The path of a sealed segment relative to the folder."""
    sealed = datetime.fromtimestamp(sealed_us // MICROS_PER_S, UTC)
    return f"date={sealed:%Y-%m-%d}/hour={sealed:%H}/{n:08}-{sha256[:DIGITS_OF_HASH]}.jsonl"


def open_path(folder: Path, n: int) -> Path:
    """The path of a segment that is still open."""
    return folder / OPEN / f"{n:08}.jsonl"


def index_path(folder: Path, n: int) -> Path:
    return folder / INDEX / f"{n:08}.idx"


def numbered(folder: Path, suffix: str) -> dict[int, Path]:
    """The numbered files of an internal folder, lowest number first. Other files are ignored."""
    found = {}
    for path in folder.glob(f"*{suffix}"):
        if match := _NUMBERED.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def sealed_files(folder: Path) -> Iterator[str]:
    """The names of all files that are not internal: segments, and files that should not be there.

    A symlink to a folder is listed and not followed. (Spark would follow it.)
    """
    for parent, folders, files in os.walk(folder):
        place = Path(parent)
        folders[:] = sorted(name for name in folders if not _is_internal(name))
        links = [name for name in folders if (place / name).is_symlink()]
        for name in sorted(links + [name for name in files if not _is_internal(name)]):
            if place != folder or not _UNFINISHED.fullmatch(name):
                yield (place / name).relative_to(folder).as_posix()


def _is_internal(name: str) -> bool:
    """Whether Spark ignores the name. With a `=` in it, Spark reads it as a partition column."""
    return name.startswith("_") and "=" not in name


@contextmanager
def chain_locked(folder: Path) -> Iterator[None]:
    """Hold the chain's lock, while writing the chain or reading it together with the files it names.

    A published copy has no lock file and no writer, so reading it needs no lock.
    """
    path = folder / CHAIN_LOCK
    try:
        fd = open_safely(path, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        lock.acquire(fd, CHAIN_LOCK_TIMEOUT_S, folder)
        yield
    finally:
        os.close(fd)
