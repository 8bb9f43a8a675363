"""The index of a segment, and searches with a valid, a damaged and a missing index."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.audit import index as index_module
from postroom.audit.index import BLOCK_WORDS, Index, IndexBuilder, IndexDamaged, key_of
from postroom.audit.layout import INDEX
from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.testing import FIRST_WALL_US
from tests.segmentstories import SOURCE, events, sealed_folder, seqs


def mark(message_id: str, parent: str = "", trace: str = "") -> Any:
    return SimpleNamespace(message_id=message_id, parent_message_id=parent, trace_id=trace)


SHA256 = "5e" * 32


def built(path: Path, ids: list[str]) -> Index:
    builder = IndexBuilder()
    builder.add([mark(one) for one in ids], range(0, 10 * len(ids), 10))
    path.write_bytes(builder.encode(SHA256))
    return Index(path, SHA256)


def test_the_hash_of_an_id_is_the_same_on_every_machine() -> None:
    assert key_of("t1-17") == 0x7FA3_204F_4000_0000


@given(st.lists(st.sampled_from(["a", "b", "c", "ü", "\ud800", "x" * 300]), max_size=40))
def test_every_offset_of_an_id_is_found(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    index = built(tmp_path_factory.mktemp("index") / "i.idx", ids)
    for one in {*ids, "missing"}:
        assert index.offsets(one) == [10 * at for at, other in enumerate(ids) if other == one]
    index.close()


def test_two_ids_with_one_hash_share_their_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "key_of", lambda _: 7 << 28)
    index = built(tmp_path / "i.idx", ["a", "b", "a"])
    assert index.offsets("a") == index.offsets("b") == [0, 10, 20]
    index.close()


def test_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    ids = [f"m{n // 3}" for n in range(BLOCK_WORDS + 100)]
    path = tmp_path / "i.idx"
    built(path, ids).close()
    good = path.read_bytes()
    seen = 0
    for at in range(0, len(good), 19):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        for one in ("m0", "m100", "m203", "none"):
            try:
                index = Index(path, SHA256)
                found = index.offsets(one)
                index.close()
            except IndexDamaged:
                seen += 1
            else:
                assert found == [10 * n for n, other in enumerate(ids) if other == one], at
    assert seen


@pytest.mark.parametrize("cut", [0, 5, 16, 100, -1])
def test_an_index_that_is_cut_short_is_damaged(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "i.idx"
    built(path, ["a"] * 20).close()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(IndexDamaged):
        Index(path, SHA256)


def test_an_index_without_words_finds_nothing(tmp_path: Path) -> None:
    index = built(tmp_path / "i.idx", [])
    assert index.offsets("a") == []
    index.close()


def test_the_index_of_another_segment_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "i.idx", ["a"]).close()
    with pytest.raises(IndexDamaged, match="of another segment"):
        Index(tmp_path / "i.idx", "00" * 32)


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=60), st.sets(st.sampled_from("abcdx")))
def test_many_ids_at_once_give_the_offsets_of_each(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str], wanted: set[str]
) -> None:
    index = built(tmp_path_factory.mktemp("index") / "i.idx", ids)
    found = index.offsets_of({key_of(one) for one in wanted})
    assert found == [10 * at for at, one in enumerate(ids) if one in wanted]
    index.close()


# ---- finding ---------------------------------------------------------------------------------------


def expected(wanted: str, count: int = 80) -> list[int]:
    return [
        event.seq
        for event in events(1, count)
        if wanted in {event.message_id, event.parent_message_id, event.trace_id}
    ]


IDS = [f"{SOURCE}-m3", f"{SOURCE}-m4", f"{SOURCE}-m8", f"{SOURCE}-trace2", f"{SOURCE}-m16", "missing"]


@pytest.mark.parametrize("wanted", IDS)
def test_find_by_message_parent_and_trace(tmp_path: Path, wanted: str) -> None:
    sealed_folder(tmp_path, 3, 23)
    with SegmentSink(tmp_path) as sink:
        sink.write(events(70, 11))  # not sealed yet
        troubles: list[str] = []
        assert seqs(Segments(tmp_path, on_trouble=troubles.append).find([wanted])) == expected(wanted)
    assert troubles == []


def test_find_of_many_ids_gives_each_event_once(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    many = {f"{SOURCE}-m{n}" for n in range(100)} | {f"{SOURCE}-trace1", ""}
    assert seqs(Segments(tmp_path).find(many)) == list(range(1, 81))


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [Path.unlink, damaged])
@pytest.mark.parametrize("wanted", IDS)
def test_find_reads_the_segment_without_a_valid_index_and_reports_it(
    tmp_path: Path, wanted: str, damage: Any
) -> None:
    sealed_folder(tmp_path)
    damage(tmp_path / INDEX / "00000002.idx")
    troubles: list[str] = []
    assert seqs(Segments(tmp_path, on_trouble=troubles.append).find([wanted])) == expected(wanted)
    [sentence] = troubles
    assert "00000002-" in sentence
    assert "read completely" in sentence


def test_find_ignores_swapped_indexes(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    second, third = (tmp_path / INDEX / f"0000000{n}.idx" for n in (2, 3))
    data = second.read_bytes(), third.read_bytes()
    second.write_bytes(data[1])
    third.write_bytes(data[0])
    troubles: list[str] = []
    segments = Segments(tmp_path, on_trouble=troubles.append)
    for wanted in IDS:
        assert seqs(segments.find([wanted])) == expected(wanted)
    assert ["is the index of another segment" in sentence for sentence in troubles] == [True, True]


def test_repeated_searches_return_each_event_once(tmp_path: Path) -> None:
    sealed_folder(tmp_path, 3, 23)
    (tmp_path / INDEX / "00000002.idx").unlink()
    with SegmentSink(tmp_path) as sink:
        sink.write(events(70, 11))
        troubles: list[str] = []
        with Segments(tmp_path, on_trouble=troubles.append).searching() as find:
            assert seqs(find([f"{SOURCE}-m9"])) == [45, 46, 47, 48, 49]
            assert seqs(find([f"{SOURCE}-trace2"])) == [*range(40, 45), *range(50, 60)]
            assert find([f"{SOURCE}-trace2"]) == []
            rest = seqs(find([f"{SOURCE}-m{n}" for n in range(100)]))
            assert rest == [*range(1, 40), *range(60, 81)]
    assert len(troubles) == 1


def test_a_search_keeps_few_indexes_open(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    segments = Segments(tmp_path)
    segments.indexes_max = 2
    with segments.searching() as find:
        found = find([f"{SOURCE}-trace{n}" for n in range(3)]) + find([f"{SOURCE}-trace{n}" for n in (3, 4)])
    assert seqs(found) == list(range(1, 81))


def test_an_id_with_quotes_and_umlauts_is_found_by_scanning_too(tmp_path: Path) -> None:
    odd = 'a"\\ü\n/'
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 3, odd))
        assert seqs(Segments(tmp_path).find([f"{odd}-m0"])) == [1, 2, 3]


# ---- reading ---------------------------------------------------------------------------------------


def test_events_filters_by_time_and_sources(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 20))
        sink.seal()
        sink.write(events(21, 20, "bus:b"))
        sink.seal()
        sink.write(events(41, 20))
        segments = Segments(tmp_path)
        since, until = FIRST_WALL_US + 10, FIRST_WALL_US + 45
        assert seqs(list(segments.events(since, until))) == list(range(10, 45))
        assert seqs(list(segments.events(since_us=since, sources={"bus:b"}))) == list(range(21, 41))
        assert seqs(list(segments.events(until_us=until, sources=[SOURCE]))) == [
            *range(1, 21),
            *range(41, 45),
        ]


def test_events_opens_only_matching_segments(tmp_path: Path) -> None:
    files = sealed_folder(tmp_path)
    for path in (files[0], files[1], files[3]):
        path.unlink()
    troubles: list[str] = []
    segments = Segments(tmp_path, on_trouble=troubles.append)
    assert seqs(list(segments.events(FIRST_WALL_US + 41, FIRST_WALL_US + 61))) == list(range(41, 61))
    assert troubles == []
    assert seqs(list(segments.events())) == list(range(41, 61))
    assert [sentence.endswith("is missing") for sentence in troubles] == [True] * 3


def emptied(data: bytes) -> bytes:
    return data[:0]


def without_a_line(data: bytes) -> bytes:
    return data[data.index(b"\n") + 1 :]


def without_its_end(data: bytes) -> bytes:
    return data[:-1] + b"\x0b"


def with_one_more(data: bytes) -> bytes:
    return data + data[: data.index(b"\n") + 1]


@pytest.mark.parametrize("change", [emptied, without_a_line, without_its_end, with_one_more])
def test_changed_segment_length_is_reported_once(tmp_path: Path, change: Any) -> None:
    files = sealed_folder(tmp_path)
    files[1].write_bytes(change(files[1].read_bytes()))
    troubles: list[str] = []
    segments = Segments(tmp_path, on_trouble=troubles.append)
    for _ in range(2):
        assert set(seqs(list(segments.events()))) >= {*range(1, 21), *range(41, 81)}
    [sentence] = [sentence for sentence in troubles if "is not as it was sealed" in sentence]
    assert files[1].name in sentence


def test_a_reader_keeps_its_position_while_the_writer_seals(tmp_path: Path) -> None:
    with SegmentSink(tmp_path) as sink:
        sink.write(events(1, 10))
        reader = Segments(tmp_path).events()
        assert next(reader).seq == 1
        sink.seal()
        sink.write(events(11, 10))
        assert [event.seq for event in reader] == list(range(2, 11))


def test_blocks_end_where_lines_end(tmp_path: Path) -> None:
    sealed_folder(tmp_path)
    for size in (1, 100, 333, 5_000):
        segments = Segments(tmp_path)
        segments.block_bytes = size
        assert seqs(list(segments.events())) == list(range(1, 81))
