"""What the files of a folder of segments are called, and the two locks that guard them.

Names that begin with `_` are ours; Spark and its kind look past them.
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

CHAIN_LOCK_TIMEOUT_S = 30.0  # it is held for a line, a rename and two fsyncs
DIGITS_OF_HASH = 12
MICROS_PER_S = 1_000_000

SEGMENT = re.compile(r"date=\d{4}-\d\d-\d\d/hour=\d\d/(\d{8,})-[0-9a-f]{12}\.jsonl")
_NUMBERED = re.compile(r"(\d{8,})\.(?:jsonl|idx)")
_UNFINISHED = re.compile(rf"\.(?:{re.escape(CHAIN)}|{STREAM})\.\d+{re.escape(TEMPORARY_SUFFIX)}")
"""What a crash kept from taking its place."""


def holds_stream(folder: Path) -> bool:
    """Whether a writer has ever opened this folder, or it is a copy of a stream."""
    return any((folder / name).exists() for name in (CHAIN, OPEN))


def segment_name(n: int, sha256: str, sealed_us: int) -> str:
    """The name of a sealed segment, below the folder."""
    sealed = datetime.fromtimestamp(sealed_us // MICROS_PER_S, UTC)
    return f"date={sealed:%Y-%m-%d}/hour={sealed:%H}/{n:08}-{sha256[:DIGITS_OF_HASH]}.jsonl"


def open_path(folder: Path, n: int) -> Path:
    """The segment that still grows."""
    return folder / OPEN / f"{n:08}.jsonl"


def index_path(folder: Path, n: int) -> Path:
    return folder / INDEX / f"{n:08}.idx"


def numbered(folder: Path, suffix: str) -> dict[int, Path]:
    """The files of a folder of ours by their number, the lowest first. Others are none of our business."""
    found = {}
    for path in folder.glob(f"*{suffix}"):
        if match := _NUMBERED.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def sealed_files(folder: Path) -> Iterator[str]:
    """Every name in a `date=` folder or beside it that is not ours: segments, and what should not be there.

    A link to a folder is one of them. It is not followed here; Spark would.
    """
    for parent, folders, files in os.walk(folder):
        place = Path(parent)
        folders[:] = sorted(name for name in folders if not _is_ours(name))
        links = [name for name in folders if (place / name).is_symlink()]
        for name in sorted(links + [name for name in files if not _is_ours(name)]):
            if place != folder or not _UNFINISHED.fullmatch(name):
                yield (place / name).relative_to(folder).as_posix()


def _is_ours(name: str) -> bool:
    """Spark looks past such a name, unless it has a `=`: then it is a column to it."""
    return name.startswith("_") and "=" not in name


@contextmanager
def chain_locked(folder: Path) -> Iterator[None]:
    """While the chain is written, or looked at together with the files that it names.

    A copy without the lock file is nobody's to write, so its reader needs no lock.
    """
    path = folder / CHAIN_LOCK
    try:
        fd = open_safely(path, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        lock.acquire(fd, CHAIN_LOCK_TIMEOUT_S, path)
        yield
    finally:
        os.close(fd)
