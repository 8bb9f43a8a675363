"""Wake-ups of a queue, in this process and across processes."""

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
from tests.waiting import HANG_GUARD_S

__all__ = ["no_child_left", "small_disk"]  # fixtures


@pytest.fixture
def notifier(tmp_path: Path) -> Iterator[Notifier]:
    notifier = Notifier(tmp_path / "bells")
    yield notifier
    notifier.close()


def test_notification_arrives_in_process_with_or_without_a_folder(notifier: Notifier) -> None:
    for each in (notifier, Notifier(None)):
        heard = threading.Event()
        with each.subscribed("q", heard.set):
            each.notify("q")
            assert heard.wait(HANG_GUARD_S)


def test_callbacks_run_for_their_queue_and_only_inside_the_block() -> None:
    notifier = Notifier(None)
    heard: list[str] = []
    with (
        notifier.subscribed("q", lambda: heard.append("q")),
        notifier.subscribed("r", lambda: heard.append("r")),
    ):
        notifier.notify("r")
        notifier.notify("nobody")
        assert heard == ["r"]
    notifier.notify("q")
    assert heard == ["r"]


def test_every_waiter_is_notified() -> None:
    notifier = Notifier(None)
    heard: list[int] = []
    with notifier.subscribed("q", lambda: heard.append(1)), notifier.subscribed("q", lambda: heard.append(2)):
        notifier.notify("q")
    assert sorted(heard) == [1, 2]


def test_a_notification_of_another_process_arrives(
    tmp_path: Path, notifier: Notifier, no_child_left: None
) -> None:
    heard = threading.Event()
    with notifier.subscribed("q", heard.set):
        if not notifier.hears_other_processes:
            pytest.skip("a wake-up by another process was NOT tested: this system has no inotify")
        ringing = children.start(lambda: Notifier(tmp_path / "bells").notify("q"))
        children.wait(ringing)
        assert heard.wait(HANG_GUARD_S)
        heard.clear()
        children.run(lambda: Notifier(tmp_path / "bells").notify("q"))  # the file is there already
        assert heard.wait(HANG_GUARD_S)


def test_an_inherited_notifier_works_in_a_forked_child(notifier: Notifier, no_child_left: None) -> None:
    heard = threading.Event()

    def child() -> None:
        heard_in_child = threading.Event()
        with notifier.subscribed("child", heard_in_child.set):
            notifier.notify("q")
            assert heard_in_child.wait(HANG_GUARD_S)
        notifier.close()

    with notifier.subscribed("q", heard.set):
        if not notifier.hears_other_processes:
            pytest.skip("a wake-up by another process was NOT tested: this system has no inotify")
        notifier.notify("q")
        assert heard.wait(HANG_GUARD_S)
        heard.clear()
        pid = children.start(child)
        assert heard.wait(HANG_GUARD_S)
        stop = threading.Event()

        def ring_until_heard() -> None:
            while not stop.wait(0.01):
                notifier.notify("child")

        ringing = threading.Thread(target=ring_until_heard)
        ringing.start()
        children.wait(pid)
        stop.set()
        ringing.join()


@pytest.mark.parametrize("call", ["inotify_new", "inotify_add"])
def test_without_inotify_notifications_of_other_processes_are_missed(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The system has no inotify, or the folder cannot be watched."""
    monkeypatch.setattr(module, call, lambda *_: -1)
    with notifier.subscribed("q", lambda: None):
        assert not notifier.hears_other_processes


def test_an_unwritable_notification_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    heard = threading.Event()
    notifier = Notifier(tmp_path / "file" / "bells")
    notifier.notify("q")
    alone = Notifier(None)
    with alone.subscribed("q", heard.set):
        alone.notify("q")
    assert heard.is_set()


def test_the_number_of_open_files_is_limited(tmp_path: Path) -> None:
    notifier = Notifier(tmp_path / "bells", open_files_max=4)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        notifier.notify(f"q{number}")
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_closed_notifier_closes_its_files_and_works_again(notifier: Notifier) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        heard = threading.Event()
        with notifier.subscribed("q", heard.set):
            notifier.notify("q")
            assert heard.wait(HANG_GUARD_S)
        notifier.close()
        for thread in threading.enumerate():
            if thread.name == "postroom-notifier":
                thread.join(HANG_GUARD_S)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert not notifier.hears_other_processes


def test_on_a_full_disk_only_the_wake_up_is_lost(small_disk: Path, no_child_left: None) -> None:
    """Writing to a page that cannot be allocated kills the process, so the page is allocated first."""
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"x" * 4096):
            pass

    def wait_and_ring() -> None:
        notifier = Notifier(small_disk / "bells")
        heard = threading.Event()
        with notifier.subscribed("q", heard.set):
            notifier.notify("q")
            assert heard.wait(HANG_GUARD_S)
        notifier.close()

    children.run(wait_and_ring)
