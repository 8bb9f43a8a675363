"""The system clocks, and the manual clock for tests."""

import time
import uuid
from pathlib import Path

import pytest

from postroom.system import clock
from postroom.system.clock import SystemClock
from postroom.testing import ManualClock


def test_the_steady_clock_never_goes_back() -> None:
    machine = SystemClock()
    readings = [machine.boot_ns() for _ in range(1_000)]
    assert readings == sorted(readings)


def test_the_boot_id_is_the_machines_and_the_same_for_all() -> None:
    assert SystemClock().boot_id() == SystemClock().boot_id()
    if Path(clock._BOOT_ID).exists():
        assert SystemClock().boot_id() == Path(clock._BOOT_ID).read_text(encoding="ascii").strip()


def test_without_a_boot_id_the_boot_time_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_BOOT_ID", str(tmp_path / "missing"))
    assert uuid.UUID(SystemClock().boot_id()).version == 5


def test_the_wall_clock_is_utc_in_microseconds() -> None:
    before = time.time_ns() // 1000
    assert before <= SystemClock().wall_us() <= time.time_ns() // 1000


def test_manual_clock_moves_only_when_advanced() -> None:
    manual = ManualClock()
    first = (manual.boot_id(), manual.boot_ns(), manual.wall_us())
    assert (manual.boot_id(), manual.boot_ns(), manual.wall_us()) == first
    manual.advance(1.5)
    assert (manual.boot_ns() - first[1], manual.wall_us() - first[2]) == (1_500_000_000, 1_500_000)
    manual.step_wall(-3_600)
    assert (manual.boot_ns() - first[1], manual.wall_us() - first[2]) == (1_500_000_000, -3_598_500_000)
    with pytest.raises(ValueError, match="step_wall"):
        manual.advance(-1)


def test_reboot_changes_the_boot_id_and_resets_the_clock() -> None:
    manual = ManualClock()
    manual.advance(5_000)
    before, wall_us = (manual.boot_id(), manual.boot_ns()), manual.wall_us()
    manual.reboot()
    assert manual.boot_id() != before[0]
    assert manual.boot_ns() < before[1]
    assert manual.wall_us() == wall_us
