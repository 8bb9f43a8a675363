"""The disk reserve: blocks that are freed on a full disk."""

import errno
import os
from pathlib import Path

import pytest

from postroom.errors import UnsafePath, WriteFailed
from postroom.stores.disk_reserve import DiskReserve

SIZE = 64 * 1024


def test_the_reserve_allocates_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "ballast"
    ballast = DiskReserve(path, SIZE)
    assert not ballast.whole
    ballast.fill()
    assert ballast.whole
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 >= SIZE


def test_a_freed_reserve_can_be_filled_again(tmp_path: Path) -> None:
    ballast = DiskReserve(tmp_path / "ballast", SIZE)
    ballast.fill()
    assert ballast.free()
    assert not (tmp_path / "ballast").exists()
    assert not ballast.whole
    assert not ballast.free()
    ballast.fill()
    assert (tmp_path / "ballast").stat().st_size == SIZE


def test_another_process_finds_the_reserve_whole(tmp_path: Path) -> None:
    DiskReserve(tmp_path / "ballast", SIZE).fill()
    before = (tmp_path / "ballast").stat().st_mtime_ns
    again = DiskReserve(tmp_path / "ballast", SIZE)
    again.fill()
    assert again.whole
    assert (tmp_path / "ballast").stat().st_mtime_ns == before


def test_a_reserve_of_no_size_needs_no_file(tmp_path: Path) -> None:
    ballast = DiskReserve(tmp_path / "ballast", 0)
    assert ballast.whole
    ballast.fill()
    assert not (tmp_path / "ballast").exists()


def test_without_space_filling_fails_and_leaves_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        os.pwrite(fd, b"x" * 4096, offset)  # a part of the reserve was allocated
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    ballast = DiskReserve(tmp_path / "ballast", SIZE)
    with pytest.raises(WriteFailed, match="No space left"):
        ballast.fill()
    assert not ballast.whole
    assert (tmp_path / "ballast").stat().st_size == 0


def test_a_link_in_place_of_the_reserve_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "ballast").symlink_to(tmp_path / "victim")
    with pytest.raises((UnsafePath, WriteFailed)):
        DiskReserve(tmp_path / "ballast", SIZE).fill()
    assert (tmp_path / "victim").read_bytes() == b"kept"
