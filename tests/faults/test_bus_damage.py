"""Damaged files: a message is delivered correctly or not at all, and no bytes are changed or deleted."""

import itertools
import logging
import os
from pathlib import Path

import pytest

from postroom import Bus
from postroom.logs import busfile

BODIES = [
    "plain",
    "final newline\n",
    "a\n---\nb\n--- \n---\r\n",
    "",
    "msg_id: MSG-20260205-143052-000000001-PID00001-0001\nts: 2026-01-01T00:00:00Z\ntype: no\nproject_id: p",
    "\r\n\0é漢😀",
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "postroom.bus")


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    bus = Bus(tmp_path / "bus.yaml")
    parents: list[str] = []
    for body in BODIES:
        parents = [bus.append(type="t", project_id="p", task_id="k", body=body, parents=parents)]
    return bus


def record_ends(bus: Bus) -> list[int]:
    """The end of each record, as the writer knows it."""
    data = bus.path.read_bytes()
    starts = [data.index(f"msg_id: {message.msg_id}\nts".encode()) - len("---\n") for message in bus.read()]
    return [start - len("\n") for start in starts[1:]] + [len(data)]


def test_a_file_cut_at_every_byte_gives_the_whole_messages_before_the_cut(bus: Bus) -> None:
    """Cut a file as a killed writer leaves it, then append after the torn record."""
    whole = bus.path.read_bytes()
    messages = bus.read()
    ends = record_ends(bus)
    for size in range(len(whole) + 1):
        bus.path.write_bytes(whole[:size])
        before = [message for message, end in zip(messages, ends, strict=True) if end <= size]
        reader = Bus(bus.path)
        assert reader.read() == before
        assert reader.tail(3) == before[-3:]
        report = reader.verify()
        assert (report.messages, report.damaged, report.bytes) == (len(before), (), size)
        assert bus.path.read_bytes() == whole[:size]

        made = [reader.append(type="t", project_id="p", body=body) for body in ("next", "and one more")]
        after = [message.msg_id for message in reader.read()]
        kept = [message.msg_id for message in before]
        assert after[-2:] == made
        # Where only newlines were missing, the next writer adds them, and the record is complete.
        torn = [
            message.msg_id
            for message, end in zip(messages, ends, strict=True)
            if whole[size:end] in {b"\n", b"\n\n"}
        ]
        assert after[:-2] == kept + torn
        assert after == sorted(after)
        assert bus.path.read_bytes().startswith(whole[:size]), "nothing unparseable is deleted"


def test_no_flipped_bit_delivers_a_wrong_message_or_changes_the_file(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    messages = bus.read()
    fd = os.open(bus.path, os.O_RDWR)
    losses = 0
    for position, byte in enumerate(whole):
        for bit in range(8):
            damaged = bytes([byte ^ 1 << bit])
            os.pwrite(fd, damaged, position)
            got = bus.read()
            if got != messages:
                losses += 1
                missing = [message for message in messages if message not in got]
                assert len(missing) == 1
                assert got == [message for message in messages if message is not missing[0]]
            if got != messages and bit == position % 8:  # the slower checks, for one bit of each byte
                report = bus.verify()
                assert report.damaged or report.torn_tail_bytes
                assert report.messages == len(got)
                assert bus.tail(len(messages)) == got
            assert os.pread(fd, len(whole) + 1, 0) == whole[:position] + damaged + whole[position + 1 :]
        os.pwrite(fd, bytes([byte]), position)
    os.close(fd)
    assert bus.read() == messages
    assert losses > len(whole) * 7, "nearly every bit is covered by a checksum or by the format"


def test_torn_tails_may_follow_each_other(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    record = whole[: record_ends(bus)[0]]
    made = [message.msg_id for message in bus.read()]
    for cut in range(1, len(record) - 1, 5):
        with bus.path.open("ab") as file:
            file.write(b"\n" + record[:cut])
        made.append(bus.append(type="t", project_id="p", body=f"after {cut}"))
    assert [message.msg_id for message in bus.read()] == made
    assert len(bus.verify().damaged) == len(range(1, len(record) - 1, 5))


def test_a_reader_continues_after_a_torn_record(tmp_path: Path, bus: Bus) -> None:
    follower = Bus(bus.path, poll_interval_s=0.01).follow()
    for body in BODIES:
        assert next(follower).body == body
    whole = bus.path.read_bytes()
    with bus.path.open("ab") as file:
        file.write(b"\n" + whole[:100])
    assert Bus(bus.path).poll(bus.tail(1)[0].msg_id, timeout_s=0) == []
    bus.append(type="t", project_id="p", body="next")
    assert next(follower).body == "next"


@pytest.mark.parametrize("block", [b"\0" * 4096, b"\xff" * 512, b"\n" * 100, b"---\n" * 50, os.urandom(2000)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_overwritten_block_loses_only_the_records_it_hit(bus: Bus, block: bytes, overwrite: bool) -> None:
    whole = bus.path.read_bytes()
    messages = bus.read()
    middle = record_ends(bus)[2]
    rest = whole[middle + len(block) :] if overwrite else whole[middle:]
    bus.path.write_bytes(whole[:middle] + block + rest)
    got = bus.read()
    assert got[:3] == messages[:3]
    assert [message for message in messages if message in got] == got
    if not overwrite:
        assert got == messages
    bus.append(type="t", project_id="p", body="still writes")
    assert bus.read()[-1].body == "still writes"


def test_append_rolled_back_during_a_read_is_not_reported_as_damage(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read returns a mix of old and new bytes; the second read does not."""
    messages = bus.read()
    real = os.pread
    looks = []

    def pread(fd: int, count: int, offset: int) -> bytes:
        data = real(fd, count, offset)
        looks.append(offset)
        return data.replace(b"plain", b"PLAIN") if len(looks) == 1 else data

    reported: list[object] = []
    fd = os.open(bus.path, os.O_RDONLY)
    monkeypatch.setattr(os, "pread", pread)
    parts = list(busfile.decode_from(fd, 0, 0))
    os.close(fd)
    reported += [damage for part in parts for damage in part.damaged]
    assert [message for part in parts for message in part.messages] == messages
    assert reported == []


# ---- where damage begins and how long it is --------------------------------------------------------------

JUNK = b"no record\n"


def places(bus: Bus) -> list[bytes]:
    """The bytes that `verify` calls damaged."""
    data = bus.path.read_bytes()
    return [data[damage.offset : damage.offset + damage.length] for damage in bus.verify().damaged]


def records(bus: Bus) -> list[bytes]:
    """Each record with the blank line after it, if there is one."""
    data = bus.path.read_bytes()
    starts = [0, *(end + 1 for end in record_ends(bus)[:-1]), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(starts)]


def test_a_damaged_record_reaches_from_its_first_byte_to_the_next_record(bus: Bus) -> None:
    for number, record in enumerate(whole := records(bus)):
        damaged = record.replace(b"type: t", b"type: u")
        bus.path.write_bytes(b"".join([*whole[:number], damaged, *whole[number + 1 :]]))
        assert places(bus) == [damaged]


def test_bytes_between_records_are_damage_from_the_first_to_the_last(bus: Bus) -> None:
    first, *rest = records(bus)
    assert first.endswith(b"\n\n")
    bus.path.write_bytes(first[:-1] + JUNK + b"\n" + b"".join(rest))
    assert places(bus) == [JUNK + b"\n"]


def test_bytes_after_the_last_record_are_damage_to_the_end_of_the_file(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    for tail in (JUNK, JUNK[:-1], b"\n" + JUNK):
        bus.path.write_bytes(whole + tail)
        assert places(bus) == [tail]
        report = bus.verify()
        assert (report.bytes, report.torn_tail_bytes) == (len(whole) + len(tail), 0)


def test_an_unfinished_record_is_counted_from_its_first_byte(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    torn = records(bus)[0][:-10]
    bus.path.write_bytes(whole + b"\n" + torn)
    assert (bus.verify().damaged, bus.verify().torn_tail_bytes) == ((), len(torn))
    bus.append(type="t", project_id="p", body="next")
    assert places(bus) == [torn + b"\n\n"], "with the newlines that the next writer put behind it"


def test_text_before_the_first_record_is_damage_line_by_line(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    bus.path.write_bytes(b"one\ntwo lines\n\n" + whole)
    assert places(bus) == [b"one\n", b"two lines\n"]


def test_a_first_record_without_its_first_line_is_damage_up_to_its_body(bus: Bus) -> None:
    whole = bus.path.read_bytes()
    bus.path.write_bytes(b"??" + whole[2:])
    header, _, _ = whole.partition(b"\n---\n")
    lines = [*(b"??" + header[2:] + b"\n").splitlines(keepends=True)]
    body = b"plain\n\n"
    assert places(bus) == [*lines[:-1], lines[-1] + b"---\n", body]


def test_a_stretch_without_a_record_is_damage_up_to_a_possible_start(bus: Bus) -> None:
    """The bytes are reported in parts that cover all of them exactly once."""
    from postroom.core.formats import buswire

    whole = bus.path.read_bytes()
    junk = b"x" * 2 * buswire.RECORD_BYTES_MAX + b"\n"
    bus.path.write_bytes(whole[: record_ends(bus)[0]] + junk + whole[record_ends(bus)[0] :])
    found = places(bus)
    assert b"".join(found) == junk + b"\n"
    assert len(found) > 1
