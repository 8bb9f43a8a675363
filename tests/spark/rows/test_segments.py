"""In which order segments are taken. No Spark is needed to decide it."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from postroom.audit.layout import CHAIN, STREAM
from postroom.audit.remote import Publisher
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.core.formats.events import AuditEvent
from postroom.errors import InvalidMessage
from postroom.pipeline.delta.tables import StagedFiles, Tables
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.segments import (
    TABLE,
    Gap,
    PendingSegments,
    Segment,
    SegmentStream,
    batches,
    ingest_txns,
)
from postroom.server.folder.shipping import stream_name
from tests.spark.stories import happened, write_segment

NONE, SEGMENTS = -1, 5
FAR_FUTURE_US = 1 << 60


def folder_with(place: Path, *numbers: int) -> Path:
    """Without a chain, as a copy of the segments alone."""
    for number in numbers:
        write_segment(place, number, [happened("s", number, "m")])
    return place


def pending_segments(folder: Path, ingested: int, *, skip_missing: bool = False) -> PendingSegments:
    return SegmentStream(folder).pending_after(ingested, skip_missing=skip_missing)


def ingest_id(folder: Path) -> str:
    return SegmentStream(folder).ingest_id


def numbers(found: list[Segment]) -> list[int]:
    return [segment.number for segment in found]


def told(pending: PendingSegments) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    return numbers(pending.ready), numbers(pending.waiting), [(gap.first, gap.last) for gap in pending.gaps]


def seal_one(sink: SegmentSink, seq: int) -> None:
    sink.write([msgspec.json.decode(happened("s", seq, "m"), type=AuditEvent)])
    sink.seal()


@pytest.fixture
def chained(tmp_path: Path) -> Path:
    """A folder as a sink leaves it."""
    with SegmentSink(tmp_path / "chained", durability="os") as sink:
        for number in range(1, SEGMENTS + 1):
            seal_one(sink, number)
    return tmp_path / "chained"


def file_of(folder: Path, number: int) -> Path:
    [path] = folder.glob(f"date=*/hour=*/{number:08}-*.jsonl")
    return path


def forget(folder: Path, *numbers: int) -> None:
    for number in numbers:
        file_of(folder, number).unlink()


def cut(folder: Path, number: int) -> bytes:
    """All but its last byte stays; gives what it was."""
    path = file_of(folder, number)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    return whole


@pytest.mark.parametrize(
    ("short", "sentence"),
    [
        (1, "segment 1 is truncated or missing, and 4 later segments wait for it"),
        (3, "segment 3 is truncated or missing, and 2 later segments wait for it"),
        (5, "segment 5 is truncated or missing and waited for"),
    ],
)
def test_later_segments_wait_for_one_that_is_still_being_copied(
    chained: Path, short: int, sentence: str
) -> None:
    whole = cut(chained, short)
    pending = pending_segments(chained, NONE)
    before, behind = list(range(1, short)), list(range(short + 1, SEGMENTS + 1))
    assert (*told(pending), pending.sentence()) == (before, behind, [(short, short)], sentence)
    assert told(pending_segments(chained, short - 1 or NONE)) == ([], behind, [(short, short)])
    assert told(pending_segments(chained, short)) == (
        behind,
        [],
        [],
    )  # it was taken, and shall not come again
    given_up = pending_segments(chained, NONE, skip_missing=True)
    assert told(given_up) == ([1, 2, 3, 4, 5], [], [(short, short)])
    assert given_up.sentence() == f"segment {short} is truncated or missing and skipped"
    file_of(chained, short).write_bytes(whole)
    assert told(pending_segments(chained, NONE)) == ([1, 2, 3, 4, 5], [], [])


def test_consecutive_segments_are_ready(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1, 2, 3)
    assert told(pending_segments(folder, NONE)) == ([1, 2, 3], [], [])
    assert told(pending_segments(folder, 2)) == ([3], [], [])
    assert told(pending_segments(folder, 3)) == ([], [], [])
    assert pending_segments(folder, NONE).sentence() == ""


def test_events_after_a_missing_number_wait(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1, 2, 4, 7, 8)
    pending = pending_segments(folder, NONE)
    assert told(pending) == ([1, 2], [4, 7, 8], [(3, 3), (5, 6)])
    assert pending.sentence() == "segments 3, 5 to 6 are missing, and 3 later segments wait for it"
    assert told(pending_segments(folder, 2)) == ([], [4, 7, 8], [(3, 3), (5, 6)])
    assert told(pending_segments(folder, 4)) == ([], [7, 8], [(5, 6)])


def test_skipping_missing_segments_returns_the_rest_and_the_missing_numbers(tmp_path: Path) -> None:
    pending = pending_segments(folder_with(tmp_path, 4, 6), 2, skip_missing=True)
    assert told(pending) == ([4, 6], [], [(3, 3), (5, 5)])
    assert pending.sentence() == "segments 3, 5 are missing and skipped"


def test_a_chain_tells_with_which_number_a_folder_begins(chained: Path) -> None:
    assert told(pending_segments(chained, NONE)) == ([1, 2, 3, 4, 5], [], [])
    forget(chained, 1, 2)
    assert told(pending_segments(chained, NONE)) == ([], [3, 4, 5], [(1, 2)])
    (chained / CHAIN).unlink()
    assert told(pending_segments(chained, NONE)) == ([3, 4, 5], [], [])


def test_what_retention_removed_before_the_first_run_is_not_missing(chained: Path) -> None:
    assert retain(chained, FAR_FUTURE_US)
    with SegmentSink(chained, durability="os") as sink:
        seal_one(sink, 6)
    assert told(pending_segments(chained, NONE)) == ([6], [], [])
    assert told(pending_segments(chained, 3)) == ([], [6], [(4, 5)])  # these were never seen, and are gone


def forged(line: bytes, *, hashed: bool) -> bytes:
    """A line of the chain with a mark, and with `hashed` with the hash that it then has."""
    body, _, digest = line.rstrip(b"\n").removesuffix(b'"}').rpartition(b',"hash":"')
    body += b',"redaction":"full:1"'
    if hashed:
        digest = hashlib.sha256(body + b"}").hexdigest().encode()
    return body + b',"hash":"' + digest + b'"}\n'


@pytest.mark.parametrize("hashed", [True, False])
def test_a_mark_that_was_written_into_the_chain_later_does_not_count(chained: Path, hashed: bool) -> None:
    lines = (chained / CHAIN).read_bytes().splitlines(keepends=True)
    lines[2] = forged(lines[2], hashed=hashed)
    (chained / CHAIN).write_bytes(b"".join(lines))
    assert {segment.redaction for segment in pending_segments(chained, NONE).ready} == {""}


def test_a_mark_counts_for_the_file_that_the_chain_names(chained: Path) -> None:
    with SegmentSink(chained, durability="os", prepare=lambda event: event, redaction="full:1") as sink:
        seal_one(sink, 6)
    ready = pending_segments(chained, NONE).ready
    assert [segment.redaction for segment in ready] == [""] * SEGMENTS + ["full:1"]
    path = file_of(chained, 6)
    path.rename(path.with_name(f"{6:08}-{'0' * 12}.jsonl"))
    assert {segment.redaction for segment in pending_segments(chained, NONE).ready} == {""}


def test_a_batch_is_bounded() -> None:
    found = [Segment(number, "", size) for number, size in enumerate((4, 6, 1, 20, 2))]
    assert [numbers(batch) for batch in batches(found, 10)] == [[0, 1], [2], [3], [4]]


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="is not a folder of segments"):
        pending_segments(tmp_path / "nowhere", NONE)


def test_a_gap_reads_as_a_person_says_it() -> None:
    assert [str(Gap(3, 3)), str(Gap(3, 5))] == ["3", "3 to 5"]


def test_a_segment_outside_the_chain_has_to_match_its_hash(
    chained: Path,
) -> None:
    """A folder is copied, and its chain comes last."""
    (chained / CHAIN).unlink()
    whole = cut(chained, 3)
    assert told(pending_segments(chained, 2)) == ([], [4, 5], [(3, 3)])
    assert told(pending_segments(chained, 2, skip_missing=True)) == ([3, 4, 5], [], [(3, 3)])
    file_of(chained, 3).write_bytes(whole)
    assert told(pending_segments(chained, 2)) == ([3, 4, 5], [], [])


@pytest.mark.parametrize(
    ("existing", "short", "ready", "waiting"),
    [((1, 2, 3), 1, [], [2, 3]), ((4, 5), 4, [], [5]), ((1,), 1, [], []), ((1, 2, 3), 2, [1], [3])],
)
def test_segments_without_a_chain_wait_for_a_truncated_one_before_them(
    tmp_path: Path, existing: tuple[int, ...], short: int, ready: list[int], waiting: list[int]
) -> None:
    """Also if nothing is ingested, and it is the first one."""
    whole = cut(folder_with(tmp_path, *existing), short)
    pending = pending_segments(tmp_path, NONE)
    assert (*told(pending), pending.short) == (ready, waiting, [(short, short)], (short,))
    given_up = pending_segments(tmp_path, NONE, skip_missing=True)
    assert told(given_up) == (list(existing), [], [(short, short)])
    file_of(tmp_path, short).write_bytes(whole)
    assert told(pending_segments(tmp_path, NONE)) == (list(existing), [], [])


def test_segments_wait_for_a_truncated_one_before_a_damaged_chain_line(chained: Path) -> None:
    lines = (chained / CHAIN).read_bytes().splitlines(keepends=True)
    (chained / CHAIN).write_bytes(b"".join([b"damaged\n", *lines[1:]]))
    cut(chained, 1)
    assert told(pending_segments(chained, NONE)) == ([], [2, 3, 4, 5], [(1, 1)])


def test_a_stream_is_known_by_its_name_wherever_it_lies(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    assert ingest_id(one) != ingest_id(other)  # they have no names, and are known by their places
    name = stream_name(one)
    (other / STREAM).write_text(f"{name}\n")
    assert ingest_id(one) == ingest_id(other)
    (one / STREAM).unlink()
    stream_name(one)  # it was deleted, and is begun anew at the same place
    assert ingest_id(one) != ingest_id(other)


def test_a_published_copy_is_continued_where_the_folder_was_read(chained: Path, tmp_path: Path) -> None:
    stream_name(chained)
    stream, tables = SegmentStream(chained), Tables(tmp_path / "tables")
    txns = ingest_txns(stream.ingest_id, stream.segments()[2])
    tables.commit(TABLE, StagedFiles(bronze.ROWS, bronze.PARTITIONS, []), txns=txns)
    Publisher(chained, f"file://{tmp_path}/copy").publish()
    assert told(SegmentStream(tmp_path / "copy").pending(tables)) == ([4, 5], [], [])


@pytest.mark.parametrize("said", [b"", b"\n", b"\xff\xfe"])
def test_an_empty_stream_name_is_refused(tmp_path: Path, said: bytes) -> None:
    (tmp_path / STREAM).write_bytes(said)
    with pytest.raises(InvalidMessage, match="names no stream"):
        ingest_id(tmp_path)
