"""A disk of a few megabytes, in memory, that can really be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

SMALL_DISK_MIB = 16
BALLAST = "ballast"  # what fills it


class NotPermitted(Exception):
    """This machine lets us mount nothing."""


@contextmanager
def mounted(folder: Path, size_mib: int = SMALL_DISK_MIB) -> Iterator[Path]:
    """A small tmpfs in a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPermitted(f"mounting a tmpfs needs root ({error})") from None
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One to fill; who may not mount is told that the test did not run."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(mounted(tmp_path / "disk"))
        except NotPermitted as error:
            pytest.skip(f"a full disk was NOT tested: {error}")
        yield folder


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """While the disk takes no writes."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextmanager
def filled(disk: Path, left: int) -> Iterator[None]:
    """While so many bytes are left."""
    there = os.statvfs(disk)
    (disk / BALLAST).write_bytes(bytes(there.f_bavail * there.f_frsize - left))
    try:
        yield
    finally:
        (disk / BALLAST).unlink()


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return filler
