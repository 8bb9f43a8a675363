"""A crash before each step of the segment writer, of retention and of publishing."""

from pathlib import Path

import pytest

from postroom.audit.chain import read_chain
from postroom.audit.reader import Segments
from postroom.audit.remote import Publisher
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.testing import FIRST_WALL_US
from tests import children
from tests.children import no_child_left
from tests.quick import quick_path
from tests.segmentstories import SOURCE, events, files_of, sealed_folder, seqs

__all__ = ["no_child_left", "quick_path"]

STEPS = ("write", "fsync", "rename", "replace", "mkdir", "open", "ftruncate", "close", "unlink")


def ship(folder: Path) -> None:
    """Write and seal two batches, or the missing part of them, as a shipper does."""
    with SegmentSink(folder) as sink:
        while (last := sink.position(SOURCE)) < 20:
            sink.write(events(last + 1, min(10, 20 - last)))
            sink.seal()


def shipped_until(folder: Path, step: int) -> bool:
    """Die before the given step; returns whether that step was reached."""

    def job() -> None:
        children.die_at(step, STEPS)
        ship(folder)

    return children.killed(job)


@pytest.mark.usefixtures("no_child_left")
def test_a_crash_at_any_step_loses_and_duplicates_nothing(quick_path: Path) -> None:
    for step in range(children.STEPS_MAX):
        folder = quick_path / f"{step}"
        died = shipped_until(folder, step)
        shipped_until(folder, step // 2)  # recovery can be killed as well
        if folder.exists():
            assert verify(folder) == [], step  # even before recovery
        ship(folder)
        assert list(Segments(folder).events()) == events(1, 20), step
        assert verify(folder) == [], step
        assert len(files_of(folder)) == len(read_chain(folder).entries), step  # each under its own name
        if not died:
            assert step > 40  # the operation has at least that many steps
            return
    pytest.fail("it never came to the end")


@pytest.mark.usefixtures("no_child_left")
def test_a_crash_at_any_step_of_retention(quick_path: Path) -> None:
    def retained_until(folder: Path, step: int) -> bool:
        def job() -> None:
            children.die_at(step, ("write", "fsync", "replace", "unlink", "rmdir", "open"))
            retain(folder, FIRST_WALL_US + 41)

        return children.killed(job)

    for step in range(children.STEPS_MAX):
        folder = quick_path / f"{step}"
        sealed_folder(folder, 3)
        died = retained_until(folder, step)
        assert verify(folder) == [], step
        assert set(seqs(list(Segments(folder).events()))) >= set(range(41, 61))
        with SegmentSink(folder) as sink:
            assert sink.position(SOURCE) == 60
        assert verify(folder) == [], step
        retain(folder, FIRST_WALL_US + 41)
        assert verify(folder) == [], step
        assert len(files_of(folder)) == 1
        if not died:
            assert step > 10  # the operation has at least that many steps
            return
    pytest.fail("it never came to the end")


@pytest.mark.usefixtures("no_child_left")
def test_a_crash_at_any_step_of_publishing_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    sealed_folder(tmp_path / "audit", 2)
    for step in range(children.STEPS_MAX):
        url = f"file://{tmp_path}/copy{step}"

        def dying(step: int = step, url: str = url) -> None:
            children.die_at(step, ("open", "write", "rename", "makedirs", "mkdir", "close"))
            Publisher(tmp_path / "audit", url).publish()

        died = children.killed(dying)
        Publisher(tmp_path / "audit", url).publish()
        copy = tmp_path / f"copy{step}"
        assert verify(copy) == [], step
        assert list(Segments(copy).events()) == events(1, 40), step
        if not died:
            assert step > 5
            return
    pytest.fail("it never came to the end")
