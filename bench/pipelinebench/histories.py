"""Histories to measure with, and folders that get them piece by piece."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from postroom.pipeline.ingest.segments import EventStream

EVENTS_A_MESSAGE = 4.41  # as it comes out
SEED = "7"
DAY = "2025-01-09"
LINES_BYTES = 1 << 18


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


def pieces(events: Path, folder: Path, count: int) -> list[Path]:
    """The lines of a history, in their order, as so many segments of about the same size."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run whose folder was kept
    segments = [events / segment.name for segment in EventStream(events).segments()]
    size = -(-sum(segment.stat().st_size for segment in segments) // count)
    made: list[Path] = []
    for line in _lines(segments):
        if not made or made[-1].stat().st_size >= size:
            number = len(made) + 1
            made.append(folder / f"date={DAY}" / "hour=00" / f"{number:08}-{number:012x}.jsonl")
            made[-1].parent.mkdir(parents=True, exist_ok=True)
        with made[-1].open("ab") as file:
            file.write(line)
    return made


def _lines(segments: Sequence[Path]) -> Iterator[bytes]:
    """Many lines at a time, each whole."""
    for segment in segments:
        with segment.open("rb") as file:
            while lines := file.readlines(LINES_BYTES):
                yield b"".join(lines)


def add(segment: Path, folder: Path) -> None:
    """Let a folder of segments have this one too."""
    place = folder.joinpath(*segment.parts[-3:])
    place.parent.mkdir(parents=True, exist_ok=True)
    os.link(segment, place)
