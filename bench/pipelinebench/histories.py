"""Histories to measure with, and folders that get them piece by piece."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from postroom.audit.layout import segment_name
from postroom.pipeline.ingest.segments import SegmentStream

EVENTS_A_MESSAGE = 4.41  # as it comes out
SEED = "7"
SEALED_US = 1_736_380_800_000_000  # the first microsecond of 2025-01-09
LINES_BYTES = 1 << 18
SEGMENT_BYTES = 1 << 27  # at most; as those of a history


def history(folder: Path, events: int) -> Path:
    """A history of about so many events; made once."""
    made = folder / f"history-{events}"
    if not made.exists():
        messages = str(max(1, round(events / EVENTS_A_MESSAGE)))
        command = [sys.executable, "-m", "postroom.cli.main", "pipeline", "generate", "--out", str(made)]
        subprocess.run(
            [*command, "--messages", messages, "--seed", SEED], check=True, stdout=subprocess.DEVNULL
        )
    return made


class Piece(NamedTuple):
    """Sealed segments, and the number of their lines."""

    segments: list[Path]
    lines: int


def pieces(events: Path, folder: Path, count: int) -> list[Piece]:
    """The lines of a history, in their order, as so many pieces of about the same size.

    Their names match their bytes. A folder of them is like a copy of a stream without its chain.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run whose folder was kept
    folder.mkdir(parents=True)
    segments = [events / segment.name for segment in SegmentStream(events).segments()]
    piece_bytes = -(-sum(segment.stat().st_size for segment in segments) // count)
    each = -(-piece_bytes // SEGMENT_BYTES)
    size = -(-piece_bytes // each)
    parts = enumerate(_parts(_lines(segments, min(size, LINES_BYTES)), size), 1)
    sealed = [_sealed(folder, number, part) for number, part in parts]
    groups = [sealed[first : first + each] for first in range(0, len(sealed), each)]
    return [Piece([path for path, _ in group], sum(lines for _, lines in group)) for group in groups]


def _sealed(folder: Path, number: int, parts: Iterable[bytes]) -> tuple[Path, int]:
    """Write a segment, named as the shipper names it, and count its lines."""
    digest, lines, unnamed = hashlib.sha256(), 0, folder / f"{number:08}"
    with unnamed.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            lines += part.count(b"\n")
    path = folder / segment_name(number, digest.hexdigest(), SEALED_US)
    path.parent.mkdir(parents=True, exist_ok=True)
    return unnamed.rename(path), lines


def _parts(lines: Iterator[bytes], size: int) -> Iterator[Iterator[bytes]]:
    """Lines in groups of about `size` bytes. Each group has to be used up before the next."""
    for first in lines:
        yield _up_to(first, lines, size)


def _up_to(first: bytes, lines: Iterator[bytes], size: int) -> Iterator[bytes]:
    yield first
    left = size - len(first)
    while left > 0 and (some := next(lines, b"")):
        yield some
        left -= len(some)


def _lines(segments: Sequence[Path], size: int) -> Iterator[bytes]:
    """Lines of about `size` bytes at a time, each whole."""
    for segment in segments:
        with segment.open("rb") as file:
            while lines := file.readlines(size):
                yield b"".join(lines)


def add(piece: Piece, folder: Path) -> None:
    """Let a folder of segments have those of a piece too."""
    for segment in piece.segments:
        place = folder.joinpath(*segment.parts[-3:])
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(segment, place)
