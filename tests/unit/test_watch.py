"""A wake-up may be duplicated or late, but a change between the read and the wait is not lost.

The poll interval of these tests is longer than the hang guard, so a wait that returns was woken.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postroom.nudges import watch as watch_module
from postroom.nudges.watch import Watch

NEVER_S = 3600.0
AT_ONCE_S = 0.001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def watch(path: Path) -> Iterator[Watch]:
    watch = Watch(path, NEVER_S)
    yield watch
    watch.close()


def write(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def drained(watch: Watch) -> Watch:
    """A watcher that is armed and has no pending wake-up."""
    watch.arm()
    while watch.wait(AT_ONCE_S):
        pass
    return watch


def test_a_write_between_read_and_wait_wakes(watch: Watch, path: Path) -> None:
    write(path)
    drained(watch)
    write(path)
    watch.wait(NEVER_S)


def test_a_new_file_wakes(watch: Watch, path: Path) -> None:
    drained(watch)
    write(path)
    watch.wait(NEVER_S)
    drained(watch)  # now the file itself is watched
    write(path)
    watch.wait(NEVER_S)


@pytest.mark.parametrize("change", ["rename away", "rename over", "remove"])
def test_a_rotation_wakes(watch: Watch, path: Path, change: str) -> None:
    write(path)
    other = path.with_name("other")
    write(other)
    drained(watch)
    changes: dict[str, Callable[[], None]] = {
        "rename away": lambda: os.rename(path, path.with_name("archive")),
        "rename over": lambda: os.replace(other, path),
        "remove": lambda: os.unlink(path),
    }
    changes[change]()
    watch.wait(NEVER_S)


def test_after_a_rotation_the_new_file_is_watched(watch: Watch, path: Path) -> None:
    write(path)
    drained(watch)
    os.rename(path, path.with_name("archive"))
    write(path)
    drained(watch)
    write(path)
    watch.wait(NEVER_S)


def test_a_write_during_the_wait_wakes(watch: Watch, path: Path) -> None:
    write(path)
    drained(watch)
    waiter = threading.Thread(target=watch.wait, args=(NEVER_S,))
    waiter.start()
    write(path)
    waiter.join()


def test_an_old_file_no_longer_wakes(watch: Watch, path: Path) -> None:
    write(path)
    watch.arm()
    archive = path.with_name("archive")
    os.rename(path, archive)
    write(path)
    drained(watch)
    write(archive)
    assert not watch.wait(AT_ONCE_S)


def test_the_timeout_bounds_the_wait(watch: Watch, path: Path) -> None:
    write(path)
    drained(watch)
    for timeout_s in (AT_ONCE_S, 0.0, -1.0):
        watch.wait(timeout_s)


def test_the_poll_interval_bounds_the_wait(path: Path) -> None:
    watch = Watch(path, AT_ONCE_S)
    drained(watch)
    watch.wait(NEVER_S)
    watch.close()


@pytest.mark.parametrize("missing", ["instance", "watches"])
def test_without_inotify_a_wait_takes_the_poll_interval(
    path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "inotify_new" if missing == "instance" else "inotify_add"
    monkeypatch.setattr(watch_module, name, lambda *_: -1)
    watch = Watch(path, AT_ONCE_S)
    watch.arm()
    watch.wait(NEVER_S)
    watch.close()


def test_a_missing_folder_is_only_a_pause(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "missing" / "file", AT_ONCE_S)
    watch.arm()
    watch.wait(NEVER_S)
    watch.close()


def test_closing_twice_is_harmless(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = Watch(path, NEVER_S)
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
