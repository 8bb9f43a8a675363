"""Retention removes whole segments, oldest first, and replaces their lines in the chain by a checkpoint.

Rule 1: the age of a segment is counted from its sealing, not from the times of its events. A source with a
        wrong clock neither keeps a segment forever nor removes a new one.
Rule 2: it stops at the first segment that is too new, and removes nothing when the chain is damaged.
"""

import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import msgspec

from postroom.audit.chain import Chain, ChainCheckpoint, ChainEntry, chain_lines, read_chain
from postroom.audit.heads import StreamHead, fault_of, note_head, noted_head, stream_of
from postroom.audit.layout import CHAIN, chain_locked, index_path
from postroom.core.times import utc_text
from postroom.errors import LockTimeout, StoreDamaged, WriteFailed
from postroom.system.atomic import absolute_path, replace_file, sync_folder
from postroom.system.clock import SystemClock


def retain(folder: str | os.PathLike[str], before_us: int) -> list[str]:
    """Remove the segments sealed before `before_us`; returns their names.

    It may run while a writer is active. A segment is removed only together with all earlier ones, so that
    the chain stays contiguous.
    """
    place = absolute_path("the folder of segments", folder)
    try:
        with chain_locked(place):
            chain = read_chain(place)
            finish_removal(place, chain)
            old = list(takewhile(lambda entry: entry.sealed_us < before_us, chain.entries))
            if not old or chain.faults:  # nothing is removed before the damage was examined
                return []
            _remove(place, chain, old)
    except (WriteFailed, LockTimeout):
        raise
    except OSError as error:  # the next retention or the next writer completes the removal
        raise WriteFailed(place, error, rolled_back=False) from error
    return [entry.name for entry in old]


def why_kept(folder: str | os.PathLike[str]) -> str:
    """Why retention kept the remaining segments, as a clause."""
    chain = read_chain(absolute_path("the folder of segments", folder))
    if chain.faults:
        return f"line {chain.faults[0].line} of the chain is damaged (see verify)"
    if not chain.entries:
        return "no sealed segment is left"
    oldest = chain.entries[0]
    return f"the oldest remaining segment, {oldest.name}, was sealed at {utc_text(oldest.sealed_us * 1000)}"


def _remove(folder: Path, chain: Chain, old: list[ChainEntry]) -> None:
    """Record a checkpoint in place of the oldest entries of the chain, then remove their segments."""
    # The newest segment becomes the recorded head, because the recorded one may be about to be removed.
    noted = noted_head(folder)
    if noted is not None:
        if fault := fault_of(noted, stream_of(folder), chain):
            raise StoreDamaged(f"nothing is removed from {folder}: {fault}")
        note_head(folder, StreamHead(noted.stream, chain.last, chain.head))
    before = chain.checkpoint
    chain.checkpoint = ChainCheckpoint(
        checkpoint=old[-1].n,
        head=old[-1].hash,
        events=sum(entry.events for entry in old) + (before.events if before else 0),
        bytes=sum(entry.bytes for entry in old) + (before.bytes if before else 0),
        sources=Chain(checkpoint=before, entries=old).positions(),
        max_ts_us=max([entry.max_ts_us for entry in old] + ([before.max_ts_us] if before else [])),
        removed_us=SystemClock().wall_us(),
        removing={entry.name: entry.sha256 for entry in old},
    )
    chain.entries = chain.entries[len(old) :]
    replace_file(folder / CHAIN, chain_lines(chain), "group")  # this commits the removal of the files
    finish_removal(folder, chain)


def finish_removal(folder: Path, chain: Chain) -> None:
    """Remove the files that the checkpoint lists for removal. The caller holds the chain's lock."""
    checkpoint = chain.checkpoint
    if checkpoint is None or not checkpoint.removing:
        return
    for name in checkpoint.removing:
        path = folder / name
        with suppress(FileNotFoundError):
            index_path(folder, int(path.name.partition("-")[0])).unlink()
        with suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)
        for empty in (path.parent, path.parent.parent):
            with suppress(OSError):  # not empty
                empty.rmdir()
    sync_folder(folder)
    chain.checkpoint = msgspec.structs.replace(checkpoint, removing={})
    replace_file(folder / CHAIN, chain_lines(chain), "group")
