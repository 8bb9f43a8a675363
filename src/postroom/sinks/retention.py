"""Retention: whole segments go, the oldest first, and a checkpoint stands for them in the chain.

Rule 1: a segment is as old as its sealing. What its events say of their times does not count: a wrong clock
        neither keeps a segment for good nor lets a new one go.
Rule 2: it stops at the first segment that is too new, and at a damaged chain it does not begin.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from postroom.core.times import utc_text
from postroom.errors import LockTimeout, StoreDamaged, WriteFailed
from postroom.sinks.chain import Chain, Checkpoint, Entry, chain_lines, read_chain
from postroom.sinks.heads import StreamHead, fault_of, note_head, noted_head, stream_of
from postroom.sinks.layout import CHAIN, chain_locked, index_path
from postroom.system.atomic import absolute_path, replace_file, sync_folder
from postroom.system.clock import SystemClock


def retain(folder: str | os.PathLike[str], before_us: int) -> list[str]:
    """Remove the segments that were sealed before `before_us`; returns their names.

    It may run beside the writer. A segment goes only with all before it, so that the chain stays one piece.
    """
    place = absolute_path("the folder of segments", folder)
    try:
        with chain_locked(place):
            return _remove_oldest(place, before_us)
    except (WriteFailed, LockTimeout):
        raise
    except OSError as error:  # the next retention, or the next writer, goes on with it
        raise WriteFailed(place, error, rolled_back=False) from error


def why_kept(folder: str | os.PathLike[str]) -> str:
    """What retention stopped at, in half a sentence."""
    chain = read_chain(absolute_path("the folder of segments", folder))
    if chain.faults:
        return f"line {chain.faults[0].line} of the chain is damaged, and verify says more"
    if not chain.entries:
        return "no sealed segment is left"
    oldest = chain.entries[0]
    return f"the oldest that is left, {oldest.name}, was sealed at {utc_text(oldest.sealed_us * 1000)}"


def _remove_oldest(folder: Path, before_us: int) -> list[str]:
    chain = read_chain(folder)
    finish_removal(folder, chain)
    old = _oldest(chain, before_us)
    if not old:
        return []
    _note_newest(folder, chain)
    chain.checkpoint = _checkpoint(chain.checkpoint, old)
    chain.entries = chain.entries[len(old) :]
    replace_file(folder / CHAIN, chain_lines(chain), "group")  # now they are gone, whoever removes them
    finish_removal(folder, chain)
    return [entry.name for entry in old]


def _note_newest(folder: Path, chain: Chain) -> None:
    """Replace the noted head by the newest segment: the noted one may be about to go."""
    noted = noted_head(folder)
    if noted is None:
        return
    if fault := fault_of(noted, stream_of(folder), chain):
        raise StoreDamaged(f"nothing of {folder} is removed: {fault}")
    note_head(folder, StreamHead(noted.stream, chain.last, chain.head))


def finish_removal(folder: Path, chain: Chain) -> None:
    """Remove what a checkpoint says is being removed. The caller holds the chain's lock."""
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
            with suppress(OSError):  # others are in it
                empty.rmdir()
    sync_folder(folder)
    chain.checkpoint = msgspec.structs.replace(checkpoint, removing={})
    replace_file(folder / CHAIN, chain_lines(chain), "group")


def _oldest(chain: Chain, before_us: int) -> list[Entry]:
    old: list[Entry] = []
    if chain.faults:
        return old  # damage is looked into before anything of it is removed
    for entry in chain.entries:
        if entry.sealed_us >= before_us:
            break
        old.append(entry)
    return old


def _checkpoint(before: Checkpoint | None, old: list[Entry]) -> Checkpoint:
    gone = Chain(checkpoint=before, entries=old)
    return Checkpoint(
        checkpoint=old[-1].n,
        head=old[-1].hash,
        events=sum(entry.events for entry in old) + (before.events if before else 0),
        bytes=sum(entry.bytes for entry in old) + (before.bytes if before else 0),
        sources=gone.positions(),
        max_ts_us=max([entry.max_ts_us for entry in old] + ([before.max_ts_us] if before else [])),
        removed_us=SystemClock().wall_us(),
        removing={entry.name: entry.sha256 for entry in old},
    )
