"""Bells: rung for a queue, heard by who waits for it, in this process and in others."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from postroom.nudges import notifier as module
from postroom.nudges.notifier import Notifier
from tests import children
from tests.children import no_child_left
from tests.smalldisk import small_disk

LONG_S = 60.0  # a hang, not a measurement

__all__ = ["no_child_left", "small_disk"]  # fixtures


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Notifier]:
    bell = Notifier(tmp_path / "bells")
    yield bell
    bell.close()


def test_a_ring_is_heard_in_the_same_process_with_or_without_a_folder(bell: Notifier) -> None:
    for each in (bell, Notifier(None)):
        heard = threading.Event()
        with each.heard_by("q", heard.set):
            each.ring("q")
            assert heard.wait(LONG_S)


def test_only_the_own_queue_and_only_inside_the_block() -> None:
    bell = Notifier(None)
    heard: list[str] = []
    with bell.heard_by("q", lambda: heard.append("q")), bell.heard_by("r", lambda: heard.append("r")):
        bell.ring("r")
        bell.ring("nobody")
        assert heard == ["r"]
    bell.ring("q")
    assert heard == ["r"]


def test_everybody_who_waits_hears_it() -> None:
    bell = Notifier(None)
    heard: list[int] = []
    with bell.heard_by("q", lambda: heard.append(1)), bell.heard_by("q", lambda: heard.append(2)):
        bell.ring("q")
    assert sorted(heard) == [1, 2]


def test_a_ring_of_another_process_is_heard(tmp_path: Path, bell: Notifier, no_child_left: None) -> None:
    heard = threading.Event()
    with bell.heard_by("q", heard.set):
        if not bell.reaches_others:
            pytest.skip("this system has no inotify")
        ringing = children.start(lambda: Notifier(tmp_path / "bells").ring("q"))
        children.wait(ringing)
        assert heard.wait(LONG_S)
        heard.clear()
        children.run(lambda: Notifier(tmp_path / "bells").ring("q"))  # the file is there already
        assert heard.wait(LONG_S)


def test_an_inherited_bell_rings_and_hears_in_the_child(bell: Notifier, no_child_left: None) -> None:
    heard = threading.Event()

    def child() -> None:
        heard_in_child = threading.Event()
        with bell.heard_by("child", heard_in_child.set):
            bell.ring("q")
            assert heard_in_child.wait(LONG_S)
        bell.close()

    with bell.heard_by("q", heard.set):
        if not bell.reaches_others:
            pytest.skip("this system has no inotify")
        bell.ring("q")
        assert heard.wait(LONG_S)
        heard.clear()
        pid = children.start(child)
        assert heard.wait(LONG_S)
        stop = threading.Event()

        def ring_until_heard() -> None:
            while not stop.wait(0.01):
                bell.ring("child")

        ringing = threading.Thread(target=ring_until_heard)
        ringing.start()
        children.wait(pid)
        stop.set()
        ringing.join()


def test_without_inotify_it_says_that_nobody_else_is_heard(
    bell: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "inotify_new", lambda: -1)
    with bell.heard_by("q", lambda: None):
        assert not bell.reaches_others


def test_a_folder_that_cannot_be_watched_is_no_error(bell: Notifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "inotify_add", lambda *_: -1)
    with bell.heard_by("q", lambda: None):
        assert not bell.reaches_others


def test_a_ring_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    heard = threading.Event()
    bell = Notifier(tmp_path / "file" / "bells")
    bell.ring("q")
    alone = Notifier(None)
    with alone.heard_by("q", heard.set):
        alone.ring("q")
    assert heard.is_set()


def test_only_so_many_files_stay_open(bell: Notifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_FILES_MAX", 4)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        bell.ring(f"q{number}")
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_closed_bell_closes_everything_and_works_again(bell: Notifier) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        heard = threading.Event()
        with bell.heard_by("q", heard.set):
            bell.ring("q")
            assert heard.wait(LONG_S)
        bell.close()
        for thread in threading.enumerate():
            if thread.name == "postroom-bell":
                thread.join(LONG_S)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert not bell.reaches_others


def test_on_a_full_disk_it_is_only_not_heard(small_disk: Path, no_child_left: None) -> None:
    """A page that cannot be had ends a process, so it is asked for before it is written to."""
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"x" * 4096):
            pass

    def wait_and_ring() -> None:
        bell = Notifier(small_disk / "bells")
        heard = threading.Event()
        with bell.heard_by("q", heard.set):
            bell.ring("q")
            assert heard.wait(LONG_S)
        bell.close()

    children.run(wait_and_ring)
