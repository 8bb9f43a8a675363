"""The segment writer: storing, sealing, and the state after errors and crashes."""

import errno
import hashlib
import os
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from postroom.audit.chain import read_chain
from postroom.audit.index import SEGMENT_BYTES_MAX
from postroom.audit.layout import CHAIN, OPEN, TORN
from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.core.formats.events import AuditEvent, from_line, to_line
from postroom.errors import HandleDead, InvalidMessage, InvalidSetting, Unavailable, UnsafePath, WriteFailed
from postroom.message import Durability
from postroom.testing import ManualClock
from tests import children
from tests.children import no_child_left
from tests.faultydisk import FaultyDisk
from tests.quick import quick_path
from tests.segmentstories import SOURCE, events, files_of, sealed_folder, seqs
from tests.smalldisk import small_disk

__all__ = ["no_child_left", "quick_path", "small_disk"]

CLASSES: list[Durability] = ["os", "group", "fsync"]


def growing_file(folder: Path) -> Path:
    [path] = (folder / OPEN).glob("*.jsonl")
    return path


# ---- writing and sealing ---------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_events_can_be_read_at_once_and_after_sealing(tmp_path: Path, durability: Durability) -> None:
    with SegmentSink(tmp_path / "audit", durability=durability) as sink:
        sink.write(events(1, 30))
        assert list(Segments(tmp_path / "audit").events()) == events(1, 30)
        sink.seal()
        sink.write(events(31, 5))
        assert list(Segments(tmp_path / "audit").events()) == events(1, 35)
        assert sink.position(SOURCE) == 35
        assert sink.position("another") == 0


def test_a_sealed_segment_is_plain_lines_under_the_hour_of_sealing(tmp_path: Path) -> None:
    clock = ManualClock()
    with SegmentSink(tmp_path, clock=clock) as sink:
        sink.write(events(1, 3))
        sink.seal()
    [path] = files_of(tmp_path)
    data = path.read_bytes()
    assert data == b"".join(to_line(event) for event in events(1, 3))
    assert path.relative_to(tmp_path).as_posix().startswith("date=2026-02-02/hour=02/00000001-")
    assert path.stem.endswith(hashlib.sha256(data).hexdigest()[:12])
    assert not list((tmp_path / OPEN).iterdir())


def test_the_chain_describes_each_segment(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write([*events(5, 3), *events(7, 2, "bus:b")])
        sink.seal()
        sink.write(events(8, 1))
        sink.seal()
        head = sink.head
    first, second = read_chain(tmp_path).entries
    assert (first.n, first.events, first.bytes) == (1, 5, files_of(tmp_path)[0].stat().st_size)
    assert first.sources == {SOURCE: (5, 7), "bus:b": (7, 8)}
    assert (first.min_ts_us, first.max_ts_us) == (events(5, 1)[0].ts_us, events(8, 1)[0].ts_us)
    assert second.prev == first.hash
    assert second.hash == head


def test_a_segment_is_sealed_when_it_is_full(tmp_path: Path) -> None:
    batch = b"".join(to_line(event) for event in events(1, 10))
    with SegmentSink(tmp_path, seal_bytes=2 * len(batch) + 50, durability="os") as sink:
        for first in (1, 11, 21, 31, 41):
            sink.write(events(first, 10))
    assert [entry.events for entry in read_chain(tmp_path).entries] == [20, 20]
    assert seqs(list(Segments(tmp_path).events())) == list(range(1, 51))


def test_batch_larger_than_seal_bytes_is_not_split(tmp_path: Path) -> None:
    with SegmentSink(tmp_path, seal_bytes=1_000, durability="os") as sink:
        sink.write(events(1, 100))
        assert sink.seal_if_due()
    assert [entry.events for entry in read_chain(tmp_path).entries] == [100]


def test_a_segment_is_sealed_when_it_is_old(tmp_path: Path) -> None:
    clock = ManualClock()
    with SegmentSink(tmp_path, seal_after_s=60.0, clock=clock) as sink:
        clock.advance(100)  # an empty segment has no age
        sink.write(events(1, 1))
        clock.advance(59)
        assert not sink.seal_if_due()
        clock.advance(1)
        assert sink.seal_if_due()
        assert not sink.seal_if_due()
        sink.write(events(2, 1))
        clock.advance(60)
        sink.write(events(3, 1))
    assert [entry.events for entry in read_chain(tmp_path).entries] == [1, 1]


def test_nothing_is_sealed_where_nothing_was_written(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write([])
        sink.seal()
        sink.seal()
    assert read_chain(tmp_path).entries == []
    assert verify(tmp_path) == []


def test_encoded_lines_are_written_unchanged(tmp_path: Path) -> None:
    story = events(1, 10)
    with SegmentSink(tmp_path) as sink:
        sink.write_lines([to_line(event) for event in story], story)
        sink.seal()
        assert sink.position(SOURCE) == 10
        assert Segments(tmp_path).find({f"{SOURCE}-m1"}) == story[4:9]


@pytest.mark.parametrize("lines", [[b"{}"], [b"{}\n", b"{}\n"], [b"{\n}\n"], [b"{}\n\n"], []])
def test_lines_without_their_mark_or_newline_are_refused(tmp_path: Path, lines: list[bytes]) -> None:
    with SegmentSink(tmp_path) as sink, pytest.raises(InvalidMessage, match="newline"):
        sink.write_lines(lines, events(1, 1))


def test_every_field_comes_back(tmp_path: Path) -> None:
    [plain] = events(1, 1, payload='{"a": "\\u2028 \\n"}')
    full = msgspec.structs.replace(
        plain,
        priority=0,
        state="COMPLETED",
        cost_usd=Decimal("0.000000125"),
        detail={"a": [1, {"b": None}]},
        error="ü\n",
    )
    with SegmentSink(tmp_path) as sink:
        sink.write([full])
        sink.seal()
    assert list(Segments(tmp_path).events()) == [full]
    assert b'"cost_usd":1.25E-7' in files_of(tmp_path)[0].read_bytes()


def test_prepare_runs_before_anything_touches_the_disk(tmp_path: Path) -> None:
    def without_secret(event: AuditEvent) -> AuditEvent:
        return msgspec.structs.replace(event, payload=event.payload.replace("secret", "***"))

    with SegmentSink(tmp_path, prepare=without_secret) as sink:
        sink.write(events(1, 5, payload="my secret"))
        assert b"secret" not in growing_file(tmp_path).read_bytes()
    assert {event.payload for event in Segments(tmp_path).events()} == {"my ***"}


def test_a_segment_is_marked_only_if_this_sink_has_redacted_all_of_it(tmp_path: Path) -> None:
    def sink() -> SegmentSink:
        return SegmentSink(tmp_path, prepare=lambda event: event, redaction="full:1")

    with sink() as first:
        first.write(events(1, 2))
        first.seal()
        first.write(events(3, 1))
        first.write_lines([to_line(event) for event in events(4, 1)], events(4, 1))
        first.write(events(5, 1))
        first.seal()
        first.write(events(6, 1))  # and it is left open
    with sink() as second:
        second.write(events(7, 1))
        second.seal()
        second.write(events(8, 1))
        second.seal()
    assert [entry.redaction for entry in read_chain(tmp_path).entries] == ["full:1", "", "", "full:1"]
    assert b"redaction" not in (tmp_path / CHAIN).read_bytes().splitlines()[1]
    assert verify(tmp_path) == []


def test_a_mark_needs_a_redaction(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="needs a redacting function"):
        SegmentSink(tmp_path, redaction="full:1")


def test_limits_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="seal_bytes"):
        SegmentSink(tmp_path, seal_bytes=SEGMENT_BYTES_MAX + 1)
    with SegmentSink(tmp_path, durability="os") as sink:
        sink.segment_bytes_max = 5_000
        with pytest.raises(InvalidMessage, match="at once"):
            sink.write(events(1, 100))
        assert sink.position(SOURCE) == 0


# ---- one writer ------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = SegmentSink(tmp_path)
    with pytest.raises(Unavailable, match="already has a writer; only one at a time is allowed"):
        SegmentSink(tmp_path)
    first.write(events(1, 1))
    first.close()
    with SegmentSink(tmp_path) as second:
        assert second.position(SOURCE) == 1
    first.write(events(2, 1))  # takes the lock of the folder again
    assert first.position(SOURCE) == 2
    first.close()


@pytest.mark.usefixtures("no_child_left")
def test_a_forked_child_is_a_second_writer(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 1))

        def child() -> None:
            with pytest.raises(Unavailable, match="already has a writer"):
                sink.write(events(2, 1))

        children.run(child)
        sink.write(events(2, 1))
    assert seqs(list(Segments(tmp_path).events())) == [1, 2]


def test_a_symlink_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    SegmentSink(tmp_path / "audit").close()
    (tmp_path / "audit" / CHAIN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="symlink"):
        SegmentSink(tmp_path / "audit")


def test_files_are_private(tmp_path: Path) -> None:
    sealed_folder(tmp_path / "audit", 1)
    for path in [tmp_path / "audit", *(tmp_path / "audit").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


# ---- what a crash leaves ---------------------------------------------------------------------------


def test_the_next_writer_continues_the_open_segment(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 7))
    with SegmentSink(tmp_path) as sink:
        assert sink.position(SOURCE) == 7
        sink.write(events(8, 3))
        sink.seal()
    assert [entry.events for entry in read_chain(tmp_path).entries] == [10]
    assert verify(tmp_path) == []
    assert Segments(tmp_path).find({f"{SOURCE}-m1"}) == events(5, 5)


@pytest.mark.parametrize(
    "tail", [b'{"event_id":"x', b'{"event_id":"x\0\0\0\0\n', b"\0" * 5000 + b"\n" + b"{}\n"]
)
def test_a_torn_tail_is_cut_off_and_kept(tmp_path: Path, tail: bytes) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 4))
    with growing_file(tmp_path).open("ab") as file:
        file.write(tail)
    assert verify(tmp_path) == []
    with SegmentSink(tmp_path) as sink:
        assert sink.position(SOURCE) == 4
        sink.write(events(5, 1))
        sink.seal()
    assert list(Segments(tmp_path).events()) == events(1, 5)
    [torn] = (tmp_path / TORN).iterdir()
    assert torn.read_bytes() == tail
    assert verify(tmp_path) == []


def test_a_torn_line_of_the_chain_was_never_sealed(tmp_path: Path) -> None:
    sealed_folder(tmp_path, 2)
    with SegmentSink(tmp_path) as sink:
        sink.write(events(41, 2))
    with (tmp_path / CHAIN).open("ab") as file:
        file.write(b'{"n":3,"name":')
    assert verify(tmp_path) == []
    with SegmentSink(tmp_path) as sink:
        assert sink.position(SOURCE) == 42
        sink.seal()
    assert len(read_chain(tmp_path).entries) == 3
    assert verify(tmp_path) == []


def test_a_damaged_line_of_the_open_segment_stays_in_place(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 6))
    path = growing_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"seq":3,', b'"seq":#,'))
    with SegmentSink(tmp_path) as sink:
        assert sink.position(SOURCE) == 6
        sink.seal()
    troubles: list[str] = []
    segments = Segments(tmp_path, on_trouble=troubles.append)
    assert seqs(list(segments.events())) == [1, 2, 4, 5, 6]
    assert segments.bad_lines == 1
    [sentence] = troubles
    assert "00000001" in sentence
    assert seqs(segments.find({f"{SOURCE}-m1"})) == [5, 6]
    assert verify(tmp_path) == []


# ---- what an error leaves --------------------------------------------------------------------------


class FailingWrites:
    """Replaces `os.write`: it fails after a number of bytes, like a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.left = -1
        self._code = code
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if self.left < 0:
            return self._write(fd, data)
        if self.left == 0:
            raise OSError(self._code, os.strerror(self._code))
        piece = bytes(data)[: self.left]
        self.left -= len(piece)
        return self._write(fd, piece)


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_stores_nothing_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, code: int
) -> None:
    disk = FailingWrites(monkeypatch, code)
    with SegmentSink(tmp_path, durability=durability) as sink:
        sink.write(events(1, 5))
        disk.left = 700
        with pytest.raises(WriteFailed, match="nothing was stored"):
            sink.write(events(6, 5))
        assert sink.position(SOURCE) == 5
        assert list(Segments(tmp_path).events()) == events(1, 5)
        disk.left = -1
        sink.write(events(6, 5))
        sink.seal()
    assert list(Segments(tmp_path).events()) == events(1, 10)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("left", [0, 10, 200, 1_250, 1_400])
def test_a_full_disk_at_sealing_keeps_the_segment_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    disk = FailingWrites(monkeypatch, errno.ENOSPC)
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 50))
        disk.left = left
        with pytest.raises(WriteFailed, match="No space left"):
            sink.seal()
        assert verify(tmp_path) == []
        assert sink.position(SOURCE) == 50
        disk.left = -1
        sink.write(events(51, 1))
        sink.seal()
    assert list(Segments(tmp_path).events()) == events(1, 51)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("durability", ["group", "fsync"])
def test_after_a_failed_fsync_the_sink_is_dead_until_reopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    disk = FaultyDisk(monkeypatch)
    with SegmentSink(tmp_path, durability=durability) as sink:
        sink.write(events(1, 5))
        disk.failing = True
        with pytest.raises(WriteFailed, match="nothing was stored"):
            sink.write(events(6, 5))
        disk.failing = False
        with pytest.raises(HandleDead):
            sink.write(events(6, 5))
        with pytest.raises(HandleDead):
            sink.position(SOURCE)
        before = growing_file(tmp_path).stat().st_ino
        sink.reopen()
        assert growing_file(tmp_path).stat().st_ino != before  # rewritten, not only synced again
        assert sink.position(SOURCE) == 5
        sink.write(events(6, 5))
        sink.seal()
    assert list(Segments(tmp_path).events()) == events(1, 10)


def test_sealing_waits_for_the_disk_before_each_step_that_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        steps.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def noted_rename(old: Path, new: Path) -> None:
        steps.append(f"rename {Path(old).name}")
        rename(old, new)

    with SegmentSink(tmp_path, durability="os") as sink:
        sink.write(events(1, 5))
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted_rename)
        sink.seal()
        monkeypatch.undo()
    hour = files_of(tmp_path)[0].parent.name
    order = [
        "fsync 00000001.jsonl",
        f"fsync {CHAIN}",
        "rename 00000001.jsonl",
        f"fsync {hour}",
        f"fsync {OPEN}",
    ]
    assert [step for step in steps if step in order] == order
    assert steps.index("fsync _index") < steps.index(f"fsync {CHAIN}")


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("fails_at", range(12))
def test_any_failed_fsync_in_sealing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, fails_at: int
) -> None:
    """Fails the fsync of the data, the index, the chain or a folder: acknowledged events are stored once."""
    real = os.fsync
    with SegmentSink(tmp_path, durability=durability) as sink:
        sink.write(events(1, 5))
        calls, sealed = iter(range(100)), False

        def fsync(fd: int) -> None:
            if not sealed and next(calls) == fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            sink.seal()
        except WriteFailed:
            sealed = True
            assert verify(tmp_path) == []
            sink.reopen()
        sealed = True
        assert sink.position(SOURCE) == 5
        sink.write(events(6, 5))
        sink.seal()
    assert list(Segments(tmp_path).events()) == events(1, 10)
    assert verify(tmp_path) == []


def test_failed_sealing_discards_the_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk(monkeypatch)
    with SegmentSink(tmp_path, seal_bytes=100, durability="os") as sink:
        sink.write(events(1, 5))
        disk.failing = True
        with pytest.raises(WriteFailed, match="nothing was stored"):
            sink.write(events(6, 5))
        disk.failing = False
        sink.reopen()
        assert sink.position(SOURCE) == 5
        sink.write(events(6, 5))
    assert list(Segments(tmp_path).events()) == events(1, 10)


def write_without_end(sink: SegmentSink) -> None:
    while True:
        sink.write(events(sink.position(SOURCE) + 1, 500, payload="x" * 500))


def test_a_real_full_disk_stores_nothing(small_disk: Path) -> None:
    folder = small_disk / "audit"
    with SegmentSink(folder, seal_bytes=3 << 20, durability="os") as sink:
        with pytest.raises(WriteFailed, match="No space left"):
            write_without_end(sink)
        kept = sink.position(SOURCE)
        assert verify(folder) == []
        assert seqs(list(Segments(folder).events())) == list(range(1, kept + 1))
        with pytest.raises(WriteFailed, match="No space left"):
            sink.write(events(kept + 1, 5_000, payload="x" * 500))
        files_of(folder)[0].unlink()  # free space in an unsupported way
        sink.write(events(kept + 1, 500, payload="x" * 500))
        assert sink.position(SOURCE) == kept + 500
        sink.seal()
    assert [finding.reason for finding in verify(folder)] == ["it was removed"]


def test_from_line_reads_a_line_of_a_segment(tmp_path: Path) -> None:
    [path] = sealed_folder(tmp_path, 1, 3)
    assert [from_line(line) for line in path.read_bytes().splitlines()] == events(1, 3)
