"""Whole-file updates: the file is old or new, no symlink is followed, and no temporary file remains."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from postroom.errors import UnsafePath, WriteFailed
from postroom.message import Durability
from postroom.system import atomic

CLASSES: list[Durability] = ["os", "group", "fsync"]


@pytest.mark.parametrize("durability", CLASSES)
def test_a_file_is_replaced_whole_and_leaves_no_temporary(tmp_path: Path, durability: Durability) -> None:
    path = tmp_path / "cursor"
    atomic.replace_file(path, b"old", durability)
    atomic.replace_file(path, b"new and longer", durability)
    assert atomic.read_file(path) == b"new and longer"
    assert os.listdir(tmp_path) == ["cursor"]


def test_reader_sees_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    contents = {b"a" * 10_000, b"b" * 20_000}
    atomic.replace_file(path, b"a" * 10_000, "os")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for content in contents:
                atomic.replace_file(path, content, "os")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {atomic.read_file(path) for _ in range(500)}
    finally:
        stop.set()
        writer.join()
    assert seen <= contents


@pytest.mark.parametrize("durability", ["group", "fsync"])
def test_a_failed_fsync_leaves_the_old_file(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cursor"
    atomic.replace_file(path, b"old", durability)
    monkeypatch.setattr(os, "fsync", _input_output_error)
    with pytest.raises(WriteFailed) as caught:
        atomic.replace_file(path, b"new", durability)
    assert caught.value.rolled_back
    assert caught.value.errno == errno.EIO
    assert atomic.read_file(path) == b"old"
    assert os.listdir(tmp_path) == ["cursor"]


def test_a_failed_fsync_of_the_folder_says_that_the_new_file_may_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "sync_folder", _input_output_error)
    with pytest.raises(WriteFailed, match="may or may not be stored"):
        atomic.replace_file(tmp_path / "cursor", b"new", "fsync")


def test_a_missing_folder_is_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match="No such file or directory; nothing was stored"):
        atomic.replace_file(tmp_path / "nowhere" / "cursor", b"new", "os")


def test_replace_file_replaces_a_symlink_and_not_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path = tmp_path / "cursor"
    path.symlink_to(target)
    atomic.replace_file(path, b"new", "os")
    assert target.read_bytes() == b"precious"
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"


def test_a_planted_temporary_symlink_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path = tmp_path / "cursor"
    (tmp_path / f".cursor.{os.getpid()}{atomic.TEMPORARY_SUFFIX}").symlink_to(target)
    with pytest.raises(UnsafePath):
        atomic.replace_file(path, b"new", "os")
    assert target.read_bytes() == b"precious"


def test_open_safely_refuses_special_files(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    listener = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listener))
        for path in (link, fifo, listener, tmp_path):
            for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
                with pytest.raises(UnsafePath, match=r"is a symlink, which is refused|is not a regular file"):
                    atomic.open_safely(path, flags)
    assert not (tmp_path / "target").exists()


def test_a_missing_file_stays_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.read_file(tmp_path / "missing")


def test_new_files_and_folders_are_private_by_default(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    atomic.make_folder(folder, "os")
    atomic.replace_file(folder / "file", b"", "os")
    assert (tmp_path / "a").stat().st_mode & 0o777 == atomic.PRIVATE_FOLDER_MODE
    assert (folder / "file").stat().st_mode & 0o777 == atomic.PRIVATE_FILE_MODE


@pytest.mark.parametrize("durability", CLASSES)
def test_making_a_folder_again_changes_nothing(tmp_path: Path, durability: Durability) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        atomic.make_folder(folder, durability)
    assert folder.is_dir()


def test_write_all_continues_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    atomic.write_all(fd, b"0123456789")
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def _input_output_error(_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
