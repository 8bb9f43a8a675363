"""What a crash left behind, put in order. The caller holds the writer's lock and the chain's.

Rule 1: nothing that was acknowledged is removed. What is cut off is kept in `_torn/`.
Rule 2: every step may be interrupted and done again.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from postroom.sinks.chain import Chain, Entry, parse_chain, read_chain
from postroom.sinks.layout import CHAIN, DIGITS_OF_HASH, OPEN, TORN, numbered, open_path
from postroom.sinks.retention import finish_removal
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file, sync_folder


def recover(folder: Path) -> tuple[Chain, dict[int, Path]]:
    """The chain, and the segments that still grow, the lowest number first. A crash leaves one at most."""
    _cut_chain(folder)
    chain = read_chain(folder)
    finish_removal(folder, chain)
    sealed = {entry.n: entry for entry in chain.entries}
    growing = {}
    for n, path in numbered(folder / OPEN, ".jsonl").items():
        entry = sealed.get(n)
        if entry is not None and not (folder / entry.name).exists():
            put_in_place(folder, entry)
        elif entry is None:
            growing[n] = path
    return chain, growing


def put_in_place(folder: Path, entry: Entry) -> None:
    """The last step of sealing: from here on everybody sees the segment."""
    target = folder / entry.name
    make_folder(target.parent, "group")
    open_path(folder, entry.n).rename(target)
    sync_folder(target.parent)
    sync_folder(folder / OPEN)


def write_again(folder: Path) -> None:
    """After a failed fsync: the kernel may hold as clean what never reached the disk."""
    for path in [*numbered(folder / OPEN, ".jsonl").values(), folder / CHAIN]:
        with suppress(FileNotFoundError):
            replace_file(path, read_file(path), "group")


def whole_bytes(data: bytes) -> int:
    """How much of a growing segment can be gone on with.

    A line without its end was never finished. No line holds a NUL: a file system puts it where a power cut
    kept the bytes away, and none of what follows was acknowledged.
    """
    hole = data.find(b"\0")
    return data.rfind(b"\n", 0, hole if hole >= 0 else len(data)) + 1


def cut(folder: Path, path: Path, data: bytes, size: int) -> None:
    """Shorten a file to `size`; what is cut off is kept, once, under a name made of what it is."""
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
