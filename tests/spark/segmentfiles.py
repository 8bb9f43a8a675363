"""The sealed segments of a folder of this machine, as files."""

from pathlib import Path
from typing import NamedTuple

from postroom.pipeline.ingest.segments import SegmentStream


class SegmentFile(NamedTuple):
    number: int
    path: Path
    size: int


def sealed_segments(folder: Path) -> list[SegmentFile]:
    """The oldest first."""
    found = SegmentStream(folder).segments()
    return [SegmentFile(segment.number, folder / segment.name, segment.size) for segment in found]
