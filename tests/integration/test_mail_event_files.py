"""The files of a mail server's events: bounded, and followed by the shipper without loss or repeat."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.shipper import Shipper
from postroom.contracts.feeds import FileFeeds
from postroom.logs import eventfiles
from postroom.server.nats.mail_server import EventFileLimits, EventLog

KILLS = 3


SMALL = EventFileLimits(file_bytes_max=1_000, shipped_bytes_max=2_500, total_bytes_max=10_000)


def opened(folder: Path) -> EventLog:
    log = EventLog(folder / eventfiles.GROWING, lambda _: None)
    log.limits = SMALL
    log.open()
    return log


def tell(log: EventLog, first: int, last: int) -> None:
    for number in range(first, last):
        log("created", queue="q", message_id=f"q/{number}")
        log.write()


@contextmanager
def shipper(mail: Path, stream: Path) -> Iterator[Shipper]:
    feeds = FileFeeds(mail_folders=[mail])
    with SegmentSink(stream) as sink:
        yield Shipper(sink, feeds)
    feeds.close()


def shipped(stream: Path) -> list[str]:
    return [event.message_id for event in Segments(stream).events() if event.kind == "created"]


def ids(first: int, last: int) -> list[str]:
    return [f"q/{number}" for number in range(first, last)]


def test_a_shipper_follows_full_files_without_loss_or_repeat(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with shipper(tmp_path, tmp_path / "audit") as one:
        for first in range(0, 200, 7):
            tell(log, first, first + 7)
            one.ship()
    assert shipped(tmp_path / "audit") == ids(0, 203)
    with shipper(tmp_path, tmp_path / "audit") as next_one:
        assert next_one.ship() == 0
        tell(log, 203, 230)
        next_one.ship()
    assert shipped(tmp_path / "audit") == ids(0, 230)
    log.close()


def test_shipped_files_are_removed_and_leave_no_descriptor_open(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with shipper(tmp_path, tmp_path / "audit") as one:
        for first in range(0, 500, 10):
            tell(log, first, first + 10)
            one.ship()
        held = [
            path for path in Path("/proc/self/fd").iterdir() if "events" in str(path.resolve(strict=False))
        ]
    files = eventfiles.full_files(tmp_path)
    assert all(file.is_shipped for file in files)
    assert sum(file.size for file in files) <= SMALL.shipped_bytes_max + SMALL.file_bytes_max + 100
    assert len(held) <= len(files) + 2
    assert log.stats()["events_removed"] == 0
    log.close()
    assert shipped(tmp_path / "audit") == ids(0, 500)


def test_without_a_shipper_the_files_are_bounded_and_removals_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path)
    tell(log, 0, 500)
    stats = log.stats()
    log.close()
    assert stats["event_bytes"] <= SMALL.total_bytes_max + SMALL.file_bytes_max + 1_000
    assert stats["events_removed"] > 0
    assert "were not all shipped" in caplog.text
    with shipper(tmp_path, tmp_path / "audit") as one:
        one.ship()
    left = shipped(tmp_path / "audit")
    assert left == ids(500 - len(left), 500)
    alerts = [event for event in Segments(tmp_path / "audit").events() if event.error_type == "EventsRemoved"]
    assert alerts
    assert not [file for file in eventfiles.full_files(tmp_path) if not file.is_shipped]


def test_a_removed_file_that_is_being_shipped_is_read_to_its_end(tmp_path: Path) -> None:
    log = opened(tmp_path)
    tell(log, 0, 30)
    with shipper(tmp_path, tmp_path / "audit") as one:
        assert one.waiting() > 0  # now the files are open
        for file in eventfiles.full_files(tmp_path):
            file.path.unlink()
        tell(log, 30, 40)
        one.ship()
    assert shipped(tmp_path / "audit") == ids(0, 40)
    log.close()


def test_shipped_files_are_removed_before_unshipped_ones() -> None:
    files = [
        eventfiles.FullFile(number, Path(f"{number}"), is_shipped=number in (2, 4), size=10)
        for number in range(1, 6)
    ]
    assert [file.number for file in eventfiles.superfluous(files, 20, 100)] == []
    assert [file.number for file in eventfiles.superfluous(files, 10, 100)] == [2]
    assert [file.number for file in eventfiles.superfluous(files, 20, 20)] == [2, 4, 1]


PROGRAM = """
import sys
from pathlib import Path
from postroom.logs import eventfiles
from postroom.server.nats.mail_server import EventFileLimits, EventLog
log = EventLog(Path(sys.argv[1]) / eventfiles.GROWING, lambda _: None)
log.limits = EventFileLimits(file_bytes_max=1_000, shipped_bytes_max=2_500)
log.open()
number = int(sys.argv[2])
while True:
    log("created", queue="q", message_id=f"q/{number}")
    log.write()
    print(number, flush=True)
    number += 1
"""


def test_a_killed_server_loses_no_written_event(tmp_path: Path) -> None:
    written: list[int] = []
    with shipper(tmp_path, tmp_path / "audit") as one:
        for turn in range(KILLS):
            first = written[-1] + 2 if written else 0  # the next one may be written but not acknowledged
            command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(first)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                written += [int(server.stdout.readline()) for _ in range(40 + 7 * turn)]
                one.ship()
                server.kill()
                written += [int(line) for line in server.stdout.read().splitlines()]
        one.ship()
    found = shipped(tmp_path / "audit")
    assert len(found) == len(set(found))
    assert {f"q/{number}" for number in written} <= set(found)
