"""The signs of life between a part and its supervisor."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.server.up.parts import PartCommand, SupervisedParts, part_states
from postroom.system.heartbeat import START_S, VARIABLE, HeartbeatSender, Pulse
from tests.waiting import until

BEATS_ONCE = """
import sys
from postroom.system.heartbeat import HEARTBEAT
HEARTBEAT.beat()
print("{}", flush=True)
sys.stdin.buffer.read(1)
"""


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse(0.0)
    yield made
    made.close()


def test_silence_counts_from_the_last_beat(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(pulse.writing))
    assert pulse.silent_s(START_S) == 0.0  # it may be starting until then
    assert pulse.silent_s(START_S + 1) == 1.0
    beating = HeartbeatSender()
    assert VARIABLE not in os.environ
    beating.beat()
    assert pulse.silent_s(20.0) == 0.0
    beating.beat()  # too early for another byte
    assert pulse.silent_s(27.0) == 7.0
    pulse.started()


def test_a_full_pipe_and_an_absent_supervisor_stop_nothing(pulse: Pulse) -> None:
    os.write(pulse.writing, bytes(65_536))
    with pytest.raises(BlockingIOError):
        os.write(pulse.writing, b".")
    os.environ[VARIABLE] = str(pulse.writing)
    HeartbeatSender().beat()
    HeartbeatSender().beat()
    pulse.started()


def test_a_part_that_stops_beating_is_hung_and_goes_on(tmp_path: Path) -> None:
    program = (sys.executable, "-c", BEATS_ONCE)
    parts = SupervisedParts(tmp_path, [PartCommand("http", program)], stop_grace_s=5.0, beat_late_s=0.01)
    try:
        parts.start(lambda: False)

        def shown() -> str:
            parts.write_states()
            return part_states(tmp_path)["http"].shown

        until(lambda: shown() == "hung")
        assert part_states(tmp_path)["http"].restarts == 0
        assert "has given no sign of life" in part_states(tmp_path)["http"].fault
    finally:
        parts.stop()
