"""Verifying that no segment of a folder was changed, removed, added or moved since it was sealed.

Rule 1: files and chain are read under the chain's lock, so that an active writer causes no finding.
Rule 2: a state that a crash leaves and recovery repairs is not a finding.
Rule 3: the open segment is not covered. Anyone who can write to the folder can also forge a new chain, so the
        shipper records the head outside the folder, and operators can do the same.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from postroom.audit.chain import NO_HASH, Chain, read_chain
from postroom.audit.heads import StreamHead, fault_of, noted_head, stream_of
from postroom.audit.layout import (
    CHAIN,
    INDEX,
    OPEN,
    chain_locked,
    index_path,
    numbered,
    open_path,
    sealed_files,
)
from postroom.errors import InvalidMessage, UnsafePath
from postroom.system.atomic import absolute_path, open_safely

READ_BYTES = 1 << 20


class IntegrityFinding(NamedTuple):
    """A file that differs from what was written."""

    file: str
    """Its path relative to the folder."""
    reason: str


class _FolderSnapshot(NamedTuple):
    """The chain and the file names of a folder at one moment."""

    chain: Chain
    files: set[str]
    growing: set[int]
    indexes: set[int]


def verify(
    folder: str | os.PathLike[str], head: str | None = None, *, noted: Iterable[StreamHead] = ()
) -> list[IntegrityFinding]:
    """Every segment, index and chain line that differs from what was written; empty when all are intact.

    `head` is the hash of a segment that was recorded elsewhere: it must still be in the chain. The same holds
    for the head recorded next to the folder, and for those recorded in stores (`noted`).
    """
    place = absolute_path("the folder of segments", folder)
    if not place.is_dir():
        raise InvalidMessage(f"{place} is not a folder")
    # Heads are read before the chain: a segment sealed meanwhile is in the chain before its head is recorded.
    heads = [one for one in (noted_head(place), *noted) if one is not None]
    seen = _snapshot(place)
    findings = [*_check_links(seen), *_check_heads(place, seen.chain, head, heads)]
    findings += _check_segments(place, seen)
    findings += _check_indexes(place, seen)
    removed = read_chain(place).checkpoint  # by a retention that ran meanwhile
    last = removed.checkpoint if removed else 0
    gone = {
        name for entry in seen.chain.entries if entry.n <= last for name in (entry.name, _index_name(entry.n))
    }
    return [finding for finding in findings if finding.file not in gone]


def _snapshot(folder: Path) -> _FolderSnapshot:
    with chain_locked(folder):
        return _FolderSnapshot(
            read_chain(folder),
            set(sealed_files(folder)),
            set(numbered(folder / OPEN, ".jsonl")),
            set(numbered(folder / INDEX, ".idx")),
        )


# ---- the chain -------------------------------------------------------------------------------------


def _check_links(seen: _FolderSnapshot) -> Iterator[IntegrityFinding]:
    chain = seen.chain
    for fault in chain.faults:
        yield IntegrityFinding(CHAIN, f"line {fault.line}: {fault.reason}")
    faulty = {fault.line for fault in chain.faults}
    last, prev = (chain.checkpoint.checkpoint, chain.checkpoint.head) if chain.checkpoint else (0, NO_HASH)
    for line, entry in zip(chain.lines, chain.entries, strict=True):
        reason = ""
        if entry.n > last + 1:
            reason = f"{_lines_of(last + 1, entry.n - 1)} missing in front of it"
        elif entry.n <= last:
            reason = f"segment {entry.n} comes after segment {last}"
        elif entry.prev != prev:
            reason = f"segment {entry.n} does not follow from the line before it"
        if reason and line - 1 not in faulty:
            yield IntegrityFinding(CHAIN, f"line {line}: {reason}")
        last, prev = entry.n, entry.hash
    unsealed = min(seen.growing - {entry.n for entry in chain.entries}, default=0)
    if unsealed > last + 1 and not faulty:
        yield IntegrityFinding(CHAIN, f"{_lines_of(last + 1, unsealed - 1)} missing at the end")


def _lines_of(first: int, last: int) -> str:
    return (
        f"the line of segment {first} is" if first == last else f"the lines of segments {first} to {last} are"
    )


def _check_heads(
    folder: Path, chain: Chain, head: str | None, noted: Iterable[StreamHead]
) -> Iterator[IntegrityFinding]:
    known = {entry.hash for entry in chain.entries} | {chain.checkpoint.head if chain.checkpoint else NO_HASH}
    if head is not None and head not in known:
        yield IntegrityFinding(
            CHAIN, f"the recorded head {head} is not in it: its end was cut off, or it was rewritten"
        )
    stream = stream_of(folder)
    for fault in dict.fromkeys(fault_of(one, stream, chain) for one in noted):
        if fault:
            yield IntegrityFinding(CHAIN, fault)


# ---- the files -------------------------------------------------------------------------------------


def _check_segments(folder: Path, seen: _FolderSnapshot) -> Iterator[IntegrityFinding]:
    holders = {entry.sha256: entry.n for entry in seen.chain.entries}
    for entry in seen.chain.entries:
        path = folder / entry.name
        if entry.name not in seen.files and entry.n in seen.growing:
            path = open_path(folder, entry.n)  # sealed, but not yet moved; recovery will do it
        if fault := _content_fault(path, entry.bytes, entry.sha256, holders):
            yield IntegrityFinding(entry.name, fault)
    removing = seen.chain.checkpoint.removing if seen.chain.checkpoint else {}
    for name in sorted(seen.files - {entry.name for entry in seen.chain.entries}):
        sha256 = removing.get(name)
        if sha256 is None or _content_fault(folder / name, None, sha256, {}) not in {"", "it was removed"}:
            is_link = (folder / name).is_symlink()
            yield IntegrityFinding(name, "it is a symlink" if is_link else "it is not in the chain")


def _content_fault(path: Path, size: int | None, sha256: str, holders: dict[str, int]) -> str:
    """Read and hash a whole file. Returns why it differs, or an empty text."""
    sha, real_size = hashlib.sha256(), 0
    try:
        with os.fdopen(open_safely(path, os.O_RDONLY), "rb", buffering=0) as file:
            while data := file.read(READ_BYTES):
                sha.update(data)
                real_size += len(data)
    except FileNotFoundError:
        return "it was removed"
    except (OSError, UnsafePath) as error:
        return f"it cannot be read: {error}"
    digest = sha.hexdigest()
    if digest == sha256:
        return ""
    if digest in holders:
        return f"it holds the content of segment {holders[digest]}"
    if size is None or real_size == size:
        return "it was changed"
    how = "cut short" if real_size < size else "added to"
    return f"it was {how}: it has {real_size} bytes instead of {size}"


def _check_indexes(folder: Path, seen: _FolderSnapshot) -> Iterator[IntegrityFinding]:
    for entry in seen.chain.entries:
        if fault := _content_fault(index_path(folder, entry.n), None, entry.index, {}):
            yield IntegrityFinding(_index_name(entry.n), fault)
    removing: Iterable[str] = seen.chain.checkpoint.removing if seen.chain.checkpoint else ()
    being_removed = {int(Path(name).name.partition("-")[0]) for name in removing}
    owners = {entry.n for entry in seen.chain.entries} | seen.growing | being_removed
    for n in sorted(seen.indexes - owners):
        yield IntegrityFinding(_index_name(n), "it belongs to no segment")


def _index_name(n: int) -> str:
    return f"{INDEX}/{n:08}.idx"
