"""Recovery of a folder of segments after a crash. The caller holds the writer's lock and the chain's lock.

Rule 1: acknowledged data is never removed. Bytes that are cut off a file are kept in `_torn/`.
Rule 2: every step may be interrupted and repeated.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from postroom.audit.chain import Chain, Entry, parse_chain, read_chain
from postroom.audit.layout import CHAIN, DIGITS_OF_HASH, OPEN, TORN, numbered, open_path
from postroom.audit.segment_retention import finish_removal
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file, sync_folder


def recover(folder: Path) -> tuple[Chain, dict[int, Path]]:
    """The chain, and the open segments, lowest number first. A crash leaves at most one."""
    _cut_chain(folder)
    chain = read_chain(folder)
    finish_removal(folder, chain)
    sealed = {entry.n: entry for entry in chain.entries}
    growing = {}
    for n, path in numbered(folder / OPEN, ".jsonl").items():
        entry = sealed.get(n)
        if entry is not None and not (folder / entry.name).exists():
            move_sealed(folder, entry)
        elif entry is None:
            growing[n] = path
    return chain, growing


def move_sealed(folder: Path, entry: Entry) -> None:
    """The last step of sealing: move the segment to its final path, where every reader finds it."""
    target = folder / entry.name
    make_folder(target.parent, "group")
    open_path(folder, entry.n).rename(target)
    sync_folder(target.parent)
    sync_folder(folder / OPEN)


def rewrite_files(folder: Path) -> None:
    """Write the files again after a failed fsync: the kernel may treat lost pages as clean."""
    for path in [*numbered(folder / OPEN, ".jsonl").values(), folder / CHAIN]:
        with suppress(FileNotFoundError):
            replace_file(path, read_file(path), "group")


def whole_bytes(data: bytes) -> int:
    """The size of the valid part of an open segment.

    A line without a newline was never finished. No line holds a NUL byte: a file system leaves them where a
    power cut lost data, and nothing after them was acknowledged.
    """
    hole = data.find(b"\0")
    return data.rfind(b"\n", 0, hole if hole >= 0 else len(data)) + 1


def cut(folder: Path, path: Path, data: bytes, size: int) -> None:
    """Truncate a file to `size`. The removed bytes are kept, once, under a name with their hash."""
    torn = data[size:]
    digest = hashlib.sha256(torn).hexdigest()[:DIGITS_OF_HASH]
    make_folder(folder / TORN, "group")
    replace_file(folder / TORN / f"{path.name}.{size}-{digest}", torn, "group")
    fd = open_safely(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _cut_chain(folder: Path) -> None:
    path = folder / CHAIN
    with suppress(FileNotFoundError):
        data = read_file(path)
        whole = parse_chain(data).whole_bytes
        if whole < len(data):
            cut(folder, path, data, whole)
