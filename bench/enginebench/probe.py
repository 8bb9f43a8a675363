"""How long a small write and its fsync take on this disk, for the figures that depend on it."""

import os
import statistics
from pathlib import Path

from figures import Figure, median_of, seconds

PROBES = 40
BYTES = b"x" * 128
MS_PER_S = 1e3


def fsync_figure(folder: Path) -> Figure:
    return Figure("fsync probe: write and fsync", median_of(lambda: fsync_ms(folder / "probe")), "ms")


def fsync_ms(path: Path) -> float:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write_and_sync() -> None:
        os.write(fd, BYTES)
        os.fsync(fd)

    try:
        return statistics.median(seconds(write_and_sync) for _ in range(PROBES)) * MS_PER_S
    finally:
        os.close(fd)
