"""The chain and its checkpoint: the format of their lines, and the changes that `verify` detects."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from postroom.audit import verify as verify_module
from postroom.audit.chain import NO_HASH, ChainEntry, chain_line, chain_lines, parse_chain, read_chain
from postroom.audit.layout import CHAIN, CHAIN_LOCK, INDEX, OPEN, STREAM
from postroom.audit.reader import Segments
from postroom.audit.segment_retention import retain, why_kept
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import IntegrityFinding, verify
from postroom.errors import InvalidMessage
from postroom.testing import FIRST_WALL_US, ManualClock
from tests.children import no_child_left
from tests.quick import quick_path
from tests.segmentstories import SOURCE, events, files_of, sealed_folder, seqs

__all__ = ["no_child_left", "quick_path"]


def named(folder: Path, head: str | None = None) -> list[str]:
    return [finding.file for finding in verify(folder, head)]


def name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def lines_of_chain(folder: Path) -> list[bytes]:
    return (folder / CHAIN).read_bytes().splitlines(keepends=True)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---- the lines -------------------------------------------------------------------------------------


def test_hashes_can_be_recomputed_from_the_files(tmp_path: Path) -> None:
    sealed_folder(tmp_path, 3)
    prev = NO_HASH
    for line in lines_of_chain(tmp_path):
        entry = json.loads(line)
        body = line.replace(f',"hash":"{entry["hash"]}"'.encode(), b"").rstrip(b"\n")
        assert hashlib.sha256(body).hexdigest() == entry["hash"]
        assert entry["prev"] == prev
        assert hashlib.sha256((tmp_path / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]
        prev = entry["hash"]


def test_a_line_with_a_field_of_a_later_version_stays_as_it_is(tmp_path: Path) -> None:
    sealed_folder(tmp_path, 1)
    entry = json.loads(lines_of_chain(tmp_path)[0])
    del entry["hash"]
    body = json.dumps({**entry, "later": 1}, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    data = body[:-1] + f',"hash":"{digest}"}}\n'.encode()
    chain = parse_chain(data)
    assert chain.faults == []
    assert chain_lines(chain) == data


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"x",
        b'{"n":1,"hash":"00"}',
        b"\xff\xfe",
        chain_line(
            ChainEntry(
                n=1,
                name="n",
                events=1,
                bytes=1,
                sha256="",
                prev="",
                min_ts_us=0,
                max_ts_us=0,
                sealed_us=0,
                sources={},
                index="",
            )
        )[0]
        .replace(b'"n":1', b'"n":2')
        .strip(),
    ],
)
def test_parse_chain_reports_invalid_lines(line: bytes) -> None:
    [fault] = parse_chain(line + b"\n").faults
    assert fault.line == 1


# ---- verify names the file -------------------------------------------------------------------------


def test_a_clean_folder_has_no_finding(tmp_path: Path) -> None:
    assert verify(tmp_path) == []
    sealed_folder(tmp_path)
    assert verify(tmp_path) == []
    with pytest.raises(InvalidMessage, match="not a folder"):
        verify(tmp_path / "nowhere")


def test_a_flipped_bit_is_reported_at_any_offset(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    size = files[2].stat().st_size
    for at in [0, 1, size // 3, size // 2, size - 1]:
        flip(files[2], at)
        assert verify(tmp_path) == [IntegrityFinding(name(tmp_path, files[2]), "it was changed")], at
        flip(files[2], at)
    assert verify(tmp_path) == []


def test_a_dropped_line_is_named(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:7] + lines[8:]))
    [finding] = verify(tmp_path)
    assert finding.file == name(tmp_path, files[1])
    assert finding.reason.startswith("it was cut short")


def test_an_added_line_is_named(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    files[3].write_bytes(files[3].read_bytes() + files[0].read_bytes())
    [finding] = verify(tmp_path)
    assert finding.file == name(tmp_path, files[3])
    assert finding.reason.startswith("it was added to")


@pytest.mark.parametrize("which", range(4))
def test_a_removed_segment_is_named(tmp_path: Path, which: int) -> None:
    files = sealed_folder(tmp_path)
    files[which].unlink()
    assert verify(tmp_path) == [IntegrityFinding(name(tmp_path, files[which]), "it was removed")]


@pytest.mark.parametrize("which", range(4))
def test_a_removed_line_of_the_chain_is_named_and_so_is_its_segment(tmp_path: Path, which: int) -> None:
    files = sealed_folder(tmp_path)
    lines = lines_of_chain(tmp_path)
    (tmp_path / CHAIN).write_bytes(b"".join(lines[:which] + lines[which + 1 :]))
    findings = verify(tmp_path)
    assert IntegrityFinding(name(tmp_path, files[which]), "it is not in the chain") in findings
    in_chain = [finding for finding in findings if finding.file == CHAIN]
    assert len(in_chain) == (which < 3)  # removing the last one leaves no gap, but its segment is reported
    assert all(f"segment {which + 1} is missing" in finding.reason for finding in in_chain)
    others = {CHAIN, name(tmp_path, files[which]), f"{INDEX}/{which + 1:08}.idx"}
    assert {finding.file for finding in findings} <= others


@pytest.mark.parametrize("which", range(4))
def test_a_flipped_bit_in_the_chain_is_named_with_its_line(tmp_path: Path, which: int) -> None:
    sealed_folder(tmp_path)
    lines = lines_of_chain(tmp_path)
    for at in (0, 5, 60, len(lines[which]) - 10):
        changed = bytearray(lines[which])
        changed[at] ^= 4
        (tmp_path / CHAIN).write_bytes(b"".join([*lines[:which], bytes(changed), *lines[which + 1 :]]))
        assert IntegrityFinding(CHAIN, f"line {which + 1}: it was changed") in verify(tmp_path)


def test_a_segment_removed_together_with_its_line_leaves_a_gap(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    lines = lines_of_chain(tmp_path)
    for which in (1, 2):
        files[which].unlink()
        (tmp_path / INDEX / f"{which + 1:08}.idx").unlink()
    (tmp_path / CHAIN).write_bytes(lines[0] + lines[3])
    [finding] = verify(tmp_path)
    assert finding == IntegrityFinding(
        CHAIN, "line 2: the lines of segments 2 to 3 are missing in front of it"
    )


def test_verify_detects_a_truncated_chain_by_the_recorded_head(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    head = read_chain(tmp_path).head
    assert verify(tmp_path, head) == []
    (tmp_path / CHAIN).write_bytes(b"".join(lines_of_chain(tmp_path)[:3]))
    files[3].unlink()
    (tmp_path / INDEX / "00000004.idx").unlink()
    assert verify(tmp_path) == []  # the folder alone cannot show it
    [finding] = verify(tmp_path, head)
    assert finding.file == CHAIN
    assert head in finding.reason


def test_verify_detects_a_truncated_chain_by_the_open_segment(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    with SegmentSink(tmp_path) as sink:
        sink.write(events(81, 1))
    (tmp_path / CHAIN).write_bytes(b"".join(lines_of_chain(tmp_path)[:3]))
    files[3].unlink()
    (tmp_path / INDEX / "00000004.idx").unlink()
    assert verify(tmp_path) == [IntegrityFinding(CHAIN, "the line of segment 4 is missing at the end")]
    with SegmentSink(tmp_path) as sink:  # a later writer does not hide it
        sink.seal()
    assert named(tmp_path) == [CHAIN]


@pytest.mark.parametrize(
    "stranger", ["date=2026-01-01/hour=00/00000009-0123456789ab.jsonl", "notes.jsonl", "a/b", "_x=1/b.jsonl"]
)
def test_an_added_file_is_named(tmp_path: Path, stranger: str) -> None:
    sealed_folder(tmp_path)
    (tmp_path / stranger).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / stranger).write_bytes(b"{}\n")
    assert verify(tmp_path) == [IntegrityFinding(stranger, "it is not in the chain")]


@pytest.mark.parametrize("name", [CHAIN, STREAM])
def test_verify_ignores_temporary_files_of_a_crash(tmp_path: Path, name: str) -> None:
    sealed_folder(tmp_path)
    (tmp_path / f".{name}.4711.tmp").write_bytes(b"half")
    assert verify(tmp_path) == []


def test_a_swapped_pair_is_named(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    second, third = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(third)
    files[2].write_bytes(second)
    assert verify(tmp_path) == [
        IntegrityFinding(name(tmp_path, files[1]), "it holds the content of segment 3"),
        IntegrityFinding(name(tmp_path, files[2]), "it holds the content of segment 2"),
    ]


def test_swapped_lines_of_the_chain_are_named(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    first, second, third, fourth = lines_of_chain(tmp_path)
    (tmp_path / CHAIN).write_bytes(first + third + second + fourth)
    assert set(named(tmp_path)) == {CHAIN}


def test_verify_detects_a_replaced_line_and_segment(tmp_path: Path) -> None:
    """Changing a segment and rewriting its line breaks the link to the next line."""
    files = sealed_folder(tmp_path)
    lines = lines_of_chain(tmp_path)
    flip(files[1], 30)
    entry = json.loads(lines[1])
    del entry["hash"]
    entry["sha256"] = hashlib.sha256(files[1].read_bytes()).hexdigest()
    body = json.dumps(entry, separators=(",", ":")).encode()
    lines[1] = body[:-1] + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    (tmp_path / CHAIN).write_bytes(b"".join(lines))
    assert verify(tmp_path) == [
        IntegrityFinding(CHAIN, "line 3: segment 3 does not follow from the line before it")
    ]


def test_a_symlink_in_place_of_a_segment_is_named(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path / "audit")
    files[0].rename(tmp_path / "moved")
    files[0].symlink_to(tmp_path / "moved")
    [finding] = verify(tmp_path / "audit")
    assert finding.file == name(tmp_path / "audit", files[0])
    assert "symlink" in finding.reason


def test_verify_detects_a_changed_index(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    flip(tmp_path / INDEX / "00000002.idx", 40)
    (tmp_path / INDEX / "00000003.idx").unlink()
    (tmp_path / INDEX / "00000007.idx").write_bytes(b"")
    assert verify(tmp_path) == [
        IntegrityFinding("_index/00000002.idx", "it was changed"),
        IntegrityFinding("_index/00000003.idx", "it was removed"),
        IntegrityFinding("_index/00000007.idx", "it belongs to no segment"),
    ]


def without_indexes(folder: Path) -> None:
    shutil.rmtree(folder / INDEX)


def with_a_file_for_them(folder: Path) -> None:
    shutil.rmtree(folder / INDEX)
    (folder / INDEX).write_bytes(b"")


@pytest.mark.parametrize("damage", [without_indexes, with_a_file_for_them])
def test_verify_names_each_removed_index(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    sealed_folder(tmp_path)
    damage(tmp_path)
    assert named(tmp_path) == [f"{INDEX}/{n:08}.idx" for n in range(1, 5)]


def test_a_copy_without_locks_is_clean(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    (tmp_path / OPEN).rmdir()
    (tmp_path / CHAIN_LOCK).unlink()
    assert verify(tmp_path) == []
    assert len(list(Segments(tmp_path).events())) == 80


@pytest.mark.parametrize("link", ["date=2021-01-01", "date=2021-01-01/hour=00", "_x=1", "notes"])
def test_a_linked_folder_is_named_and_not_followed(tmp_path: Path, link: str) -> None:
    folder = tmp_path / "audit"
    sealed_folder(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.jsonl").write_bytes(b"{}\n")
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(tmp_path / "elsewhere")
    assert verify(folder) == [IntegrityFinding(link, "it is a symlink")]


def test_a_file_whose_name_begins_with_a_dot_is_named(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    hidden = [files[0].with_name(".hidden.jsonl"), tmp_path / ".notes", tmp_path / ".more" / "x.jsonl"]
    for path in hidden:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}\n")
    (tmp_path / f".{CHAIN}.4711.tmp").write_bytes(b"")  # left by a crash of retention
    assert set(named(tmp_path)) == {name(tmp_path, path) for path in hidden}


# ---- retention -------------------------------------------------------------------------------------


def test_retention_removes_whole_old_segments_and_stays_clean(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    noted = read_chain(tmp_path).entries
    removed = retain(tmp_path, FIRST_WALL_US + 41)  # segments 1 and 2 hold 1 to 40
    assert removed == [name(tmp_path, path) for path in files[:2]]
    assert files_of(tmp_path) == files[2:]
    assert sorted(path.name for path in (tmp_path / INDEX).iterdir()) == ["00000003.idx", "00000004.idx"]
    assert verify(tmp_path) == []
    assert verify(tmp_path, noted[3].hash) == []
    assert verify(tmp_path, noted[1].hash) == []
    checkpoint = read_chain(tmp_path).checkpoint
    assert checkpoint is not None
    assert (checkpoint.checkpoint, checkpoint.events, checkpoint.removing) == (2, 40, {})
    assert seqs(list(Segments(tmp_path).events())) == list(range(41, 81))
    assert retain(tmp_path, FIRST_WALL_US + 41) == []


def test_retention_forgets_no_position(tmp_path: Path) -> None:
    clock = ManualClock()
    with SegmentSink(tmp_path, clock=clock) as sink:
        sink.write(events(1, 5, "bus:old"))
        sink.seal()
        clock.advance(10)
        sink.write(events(6, 5))
        sink.seal()
        assert len(retain(tmp_path, FIRST_WALL_US + 1)) == 1  # beside the writer
        clock.advance(10)
        sink.write(events(11, 1))
        sink.seal()
    assert len(retain(tmp_path, clock.wall_us())) == 1
    with SegmentSink(tmp_path) as sink:
        assert (sink.position("bus:old"), sink.position(SOURCE)) == (5, 11)
        sink.write(events(12, 1))
        sink.seal()
    assert [entry.n for entry in read_chain(tmp_path).entries] == [3, 4]
    assert verify(tmp_path) == []


@pytest.mark.parametrize("year_s", [-10 * 365 * 86_400, 10 * 365 * 86_400])
def test_retention_uses_the_time_of_sealing_and_not_of_events(tmp_path: Path, year_s: int) -> None:
    """A date in the future does not keep a segment, and one in the past does not remove a new one."""
    clock = ManualClock()
    [event] = events(1, 1)
    with SegmentSink(tmp_path, clock=clock) as sink:
        sink.write([replace(event, ts_us=event.ts_us + year_s * 1_000_000)])
        sink.seal()
    assert retain(tmp_path, FIRST_WALL_US) == []
    assert "was sealed at 2026-02-02T" in why_kept(tmp_path)
    assert len(retain(tmp_path, FIRST_WALL_US + 1)) == 1
    assert why_kept(tmp_path) == "no sealed segment is left"


def test_chain_continues_after_all_segments_were_removed(tmp_path: Path) -> None:
    sealed_folder(tmp_path, 2)
    head = read_chain(tmp_path).head
    assert len(retain(tmp_path, FIRST_WALL_US + 1_000)) == 2
    assert verify(tmp_path, head) == []
    assert files_of(tmp_path) == []
    with SegmentSink(tmp_path) as sink:
        assert (sink.position(SOURCE), sink.head) == (40, head)
        sink.write(events(41, 1))
        sink.seal()
    [entry] = read_chain(tmp_path).entries
    assert (entry.n, entry.prev) == (3, head)
    assert verify(tmp_path) == []


def test_verify_names_segments_removed_without_retention(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    assert len(retain(tmp_path, FIRST_WALL_US + 21)) == 1
    files[0].parent.mkdir(parents=True, exist_ok=True)
    files[0].write_bytes(b"{}\n")  # the name of one that retention removed
    files[1].unlink()
    assert named(tmp_path) == [name(tmp_path, files[1]), name(tmp_path, files[0])]


def test_verify_ignores_segments_that_retention_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sealed_folder(tmp_path)
    files[3].unlink()
    look = verify_module._snapshot

    def look_and_remove(folder: Path) -> verify_module._FolderSnapshot:
        seen = look(folder)
        retain(folder, FIRST_WALL_US + 41)
        return seen

    monkeypatch.setattr(verify_module, "_snapshot", look_and_remove)
    assert verify(tmp_path) == [IntegrityFinding(name(tmp_path, files[3]), "it was removed")]


def test_a_changed_checkpoint_is_named(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    retain(tmp_path, FIRST_WALL_US + 41)
    chain = (tmp_path / CHAIN).read_bytes()
    (tmp_path / CHAIN).write_bytes(chain.replace(b'"events":40', b'"events":41', 1))
    assert verify(tmp_path)[0] == IntegrityFinding(CHAIN, "line 1: it was changed")
    (tmp_path / CHAIN).write_bytes(chain.partition(b"\n")[2])
    assert verify(tmp_path) == [
        IntegrityFinding(CHAIN, "line 1: the lines of segments 1 to 2 are missing in front of it")
    ]


def test_a_damaged_chain_is_not_shortened(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    flip(tmp_path / CHAIN, 40)
    assert retain(tmp_path, FIRST_WALL_US + 1_000) == []
    assert len(files_of(tmp_path)) == 4
    assert "line 1 of the chain is damaged" in why_kept(tmp_path)
