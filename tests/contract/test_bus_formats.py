"""Foreign bus files: CRLF line ends, other orders of the keys, headers that cannot be read, duplicates."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from postroom import Bus
from postroom.contracts.bus import discover
from postroom.core.formats import buswire, foreign_bus
from postroom.core.formats.buswire import decode
from postroom.message import BusMessage
from tests.bustexts import FIRST, SECOND, TS, bodies, structured

THIRD = "MSG-20260205-143052-000000003-PID00001-0003"
SAMPLE = Path(__file__).parents[1] / "data" / "conductor-bus.yaml"


def plain(body: str, msg_id: str) -> str:
    """A record as conductor-loop writes it."""
    return f"---\nmsg_id: {msg_id}\nts: {TS}\ntype: FACT\nproject_id: p\ntask_id: t\nrun_id: r\n---\n{body}\n"


def sorted_keys(body: str, msg_id: str, **more: Any) -> str:
    """A record by a program that dumps a mapping with PyYAML, which sorts its keys."""
    header = {"msg_id": msg_id, "ts": TS, "type": "FACT", "project_id": "p", "task_id": "t", **more}
    return f"---\n{yaml.safe_dump(header).replace(repr(TS), TS)}---\n{body}\n"


def written(folder: Path, *records: str, end: str = "\n") -> Bus:
    path = folder / "bus.yaml"
    path.write_bytes("\n".join(records).replace("\n", end).encode())
    return Bus(path, poll_interval_s=0.01)


def shown(messages: list[BusMessage]) -> list[tuple[str, str]]:
    return [(message.msg_id, message.body) for message in messages]


# ---- CRLF ------------------------------------------------------------------------------------------


def test_a_file_of_the_original_that_was_converted_to_crlf_reads_as_before(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.path.write_bytes(SAMPLE.read_bytes())
    expected = bus.read()
    bus.path.write_bytes(SAMPLE.read_bytes().replace(b"\n", b"\r\n"))
    assert bus.read() == expected
    assert bus.tail(3) == expected[-3:]
    for position, message in enumerate(expected):
        assert bus.read(message.msg_id) == expected[position + 1 :]
    report = bus.verify()
    assert (report.ok, report.messages, report.unchecked) == (True, 8, 8)
    assert discover(tmp_path) == [bus.path]


def test_own_records_converted_to_crlf_match_their_checksum_or_are_damage(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    texts = ["one", "two\nlines\n", "", "a\n---\nmsg_id: x", "msg_id: y\nz"]
    for text in [*texts, "holds\r\na CRLF"]:
        bus.append(type="t", project_id="p", body=text)
    expected = bus.read()[:-1]
    bus.path.write_bytes(bus.path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    assert bus.read() == expected
    report = bus.verify()
    assert (report.checked, report.unchecked) == (len(texts), 0)
    assert [damage.reason for damage in report.damaged] == ["the checksum does not match"]
    made = bus.append(type="t", project_id="p", body="next")
    assert made > expected[-1].msg_id
    assert shown(bus.read(expected[-1].msg_id)) == [(made, "next")]


def test_a_follower_continues_after_a_crlf_record(tmp_path: Path) -> None:
    bus = written(tmp_path, plain("one", FIRST), plain("two\nlines", SECOND), end="\r\n")
    follower = bus.follow()
    assert shown(list(itertools.islice(follower, 2))) == [(FIRST, "one"), (SECOND, "two\nlines")]
    made = bus.append(type="t", project_id="p", body="three")
    assert next(follower).msg_id == made
    with bus.path.open("ab") as file:
        file.write(("\n" + plain("four", THIRD)).replace("\n", "\r\n").encode())
    assert (message := next(follower)).msg_id == THIRD
    assert message.body == "four"


# ---- the order of the keys ---------------------------------------------------------------------------


def test_a_record_whose_id_is_not_the_first_key_is_read(tmp_path: Path) -> None:
    bus = written(
        tmp_path,
        sorted_keys("one", FIRST, issue_id="I", parents=[THIRD]),
        plain("two", SECOND),
        sorted_keys("three\n\nlines", THIRD, meta={"k": "v"}),
    )
    messages = bus.read()
    assert shown(messages) == [(FIRST, "one"), (SECOND, "two"), (THIRD, "three\n\nlines")]
    assert messages[0].parents == [THIRD]
    assert [message.extra for message in messages] == [{"issue_id": "I"}, {}, {"meta": {"k": "v"}}]
    for n in range(4):
        assert bus.tail(n) == messages[3 - n :]
    for position, message in enumerate(messages):
        assert bus.read(message.msg_id) == messages[position + 1 :]
    assert bus.verify().ok
    assert discover(tmp_path) == [bus.path]


def test_a_follower_continues_after_a_record_with_another_key_order(tmp_path: Path) -> None:
    bus = written(tmp_path, sorted_keys("one", FIRST))
    follower = bus.follow()
    assert next(follower).body == "one"
    made = bus.append(type="t", project_id="p", body="two")
    assert next(follower).msg_id == made
    with bus.path.open("a") as file:
        file.write("\n" + sorted_keys("three", THIRD))
    assert next(follower).body == "three"
    bus.append(type="t", project_id="p", body="four")
    assert next(follower).body == "four"


def test_a_body_that_quotes_an_id_is_not_taken_for_its_record(tmp_path: Path) -> None:
    quoting = f"see\ntype: x\nmsg_id: {FIRST}\nhere"
    bus = written(tmp_path, sorted_keys("one", FIRST), plain(quoting, SECOND), plain("three", THIRD))
    assert shown(bus.read(FIRST)) == [(SECOND, quoting), (THIRD, "three")]


@pytest.mark.parametrize("window", [64, 200, 4096])
def test_windows_of_any_size_give_the_same_records(tmp_path: Path, window: int) -> None:
    from postroom.logs import busfile

    records = [
        plain("one\n---\nno: header", FIRST),
        sorted_keys("two\n---\ntext", SECOND, zeta="x" * 300),
        plain("three", THIRD),
        sorted_keys("four", FIRST + "9"),
    ]
    bus = written(tmp_path, *records)
    expected = shown(bus.read())
    assert [body for _, body in expected] == ["one\n---\nno: header", "two\n---\ntext", "three", "four"]
    with bus.path.open("rb") as file:
        parts = list(busfile.decode_from(file.fileno(), 0, 0, window))
    assert shown([message for part in parts for message in part.messages]) == expected


@pytest.mark.parametrize("padding", range(0, 400, 50))
def test_windows_that_end_anywhere_in_a_record_give_the_same_records(tmp_path: Path, padding: int) -> None:
    from postroom.logs.busfile import BACKWARD_FIRST_BYTES

    long = sorted_keys("two\n---\ntext", SECOND, zeta="x" * (BACKWARD_FIRST_BYTES - padding))
    bus = written(tmp_path, plain("one\n---\nno: header", FIRST), long, plain("three", THIRD))
    expected = shown(bus.read())
    assert [body for _, body in expected] == ["one\n---\nno: header", "two\n---\ntext", "three"]
    assert shown(bus.tail(2)) == expected[-2:]
    assert shown(bus.read(SECOND)) == expected[2:]


# ---- what cannot be read is reported -------------------------------------------------------------------

UNREADABLE = {
    "no id": f"id: 5\nts: {TS}\ntype: x\nproject_id: p\n",
    "a quoted id": f"type: x\nmsg_id: 'A'\nts: {TS}\nproject_id: p\n",
    "a quoted key": f'type: x\n"msg_id": A\nts: {TS}\nproject_id: p\n',
    "a flow mapping": f"{{msg_id: A, ts: '{TS}', type: x, project_id: p}}\n",
    "two ids": f"type: x\nmsg_id: A\nmsg_id: B\nts: {TS}\nproject_id: p\n",
    "no time": "type: x\nmsg_id: A\nproject_id: p\n",
    "no YAML": f"type: x\nmsg_id: A\nts: {TS}\nmeta: [\n",
}


@pytest.mark.parametrize("header", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_unreadable_header_is_reported_and_not_part_of_the_previous_body(
    tmp_path: Path, header: str, end: str
) -> None:
    bad = f"---\n{header}---\nlost\n"
    bus = written(tmp_path, plain("one", FIRST), bad, plain("two", SECOND), end=end)
    assert shown(bus.read()) == [(FIRST, "one"), (SECOND, "two")]
    (damage,) = bus.verify().damaged
    offset = len((plain("one", FIRST) + "\n").replace("\n", end))
    assert (damage.offset, damage.length) == (offset, len((bad + "\n").replace("\n", end)))


def test_a_truncated_header_is_reported_without_losing_later_records(tmp_path: Path) -> None:
    torn = f"---\ntype: x\nmsg_id: A\nts: {TS}\n"
    for following in (plain("two", SECOND), sorted_keys("two", SECOND)):
        bus = written(tmp_path, plain("one", FIRST), torn, following)
        assert shown(bus.read()) == [(FIRST, "one"), (SECOND, "two")]
        assert [damage.reason for damage in bus.verify().damaged] == ["the header has no end"]


def test_a_body_may_hold_separators_and_lists_of_keys(tmp_path: Path) -> None:
    texts = [
        "a\n---\nb",
        "a\n---\ntitle: x\ntype: y\n---\nb",
        "---\n---\n---",
        "a\n---\nmsg_id is: 5",
        "# a\n---\n# b",
    ]
    bus = written(tmp_path, *(plain(text, f"{FIRST}{n}") for n, text in enumerate(texts)))
    assert [message.body for message in bus.read()] == texts
    assert bus.verify().ok


# ---- no body of ours forges a record ---------------------------------------------------------------------

FORGED = [
    f"ts: {TS}\nmsg_id: {THIRD}\ntype: forged\nproject_id: p",
    f"ts: {TS}\nmsg_id: {THIRD}\ntype: forged\nproject_id: p\n---\nx",
    f"---\nts: {TS}\nmsg_id: {THIRD}\ntype: forged\nproject_id: p\n---\nx",
    f"---\r\nmsg_id: {THIRD}\r\nts: {TS}\r\ntype: forged\r\nproject_id: p\r\n---\r\nx",
    f"x\n---\r\nts: {TS}\r\nmsg_id: {THIRD}\r\ntype: forged\r\nproject_id: p\r\n---\r\nx",
]


@pytest.mark.parametrize("body", FORGED)
@pytest.mark.parametrize("following", [plain("next", SECOND), sorted_keys("next", SECOND)])
def test_body_forges_no_record_when_a_byte_of_its_record_is_damaged(
    tmp_path: Path, body: str, following: str
) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    made = bus.append(type="t", project_id="p", body=body)
    whole = bus.path.read_bytes() + b"\n" + following.encode()
    bus.path.write_bytes(whole)
    assert shown(bus.read()) == [(made, body), (SECOND, "next")]
    assert shown(bus.tail(1)) == [(SECOND, "next")]
    with pytest.raises(LookupError):
        bus.read(THIRD)
    for position in range(whole.index(following.encode()[:4] + following.encode()[4:10], 5)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        assert all(message.type != "forged" for message in decode(bytes(damaged), legacy_line=0).messages)


@given(st.lists(st.one_of(structured, st.sampled_from(FORGED)), max_size=4), st.sampled_from(["\n", "\r\n"]))
def test_a_body_of_ours_made_of_foreign_header_lines_comes_back(parts: list[str], end: str) -> None:
    body = end.join(parts)
    draft = buswire.draft("t", "p", "", "", (), "", body)
    data = buswire.encode(draft, FIRST, TS) + b"\n" + sorted_keys("next", SECOND).encode()
    assert shown(decode(data, legacy_line=0).messages) == [(FIRST, body), (SECOND, "next")]


# ---- the plain shape of the original's writer, without a YAML parser --------------------------------------

texts = st.one_of(
    st.from_regex(foreign_bus.PLAIN_VALUE, fullmatch=True).map(bytes.decode),
    st.sampled_from(
        [
            "null",
            "~",
            "no",
            "012",
            "1:30",
            "a:b:c",
            "https://x.org/y",
            "a:",
            "a : b",
            "a: b",
            "a #b",
            "- a",
            "'it''s'",
            '"\\n"',
            "&a b",
            "*a",
            "é",
        ]
    ),
    st.text(max_size=12).map(json.dumps),
)


keys = st.sampled_from(["msg_id", "kind", "url", "k", '"n"', '"a: b"', "null", "'q'", "é", '""', "a b"])
items = st.one_of(
    texts.map(lambda text: [f"    - {text}"]),
    st.lists(st.tuples(keys, texts), min_size=1, max_size=3).map(
        lambda pairs: [f"    {'  ' if at else '- '}{key}: {text}" for at, (key, text) in enumerate(pairs)]
    ),
)
TIMES = [TS, "2026-02-05T14:30:52Z", "2026-02-05T14:30:52.123456789Z", "2026-13-05T14:30:52Z"]


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Headers that have the plain layout, or differ from it in a value or a line."""
    lines = [f"msg_id: {draw(st.sampled_from([FIRST, 'x', '7', 'a.b-c_d']))}"]
    lines.append(f"ts: {draw(st.sampled_from(TIMES))}")
    lines += [f"{key}: {draw(texts)}" for key in ("type", "project_id", "task_id", "run_id")]
    if draw(st.booleans()):
        lines.append(f"issue_id: {draw(texts)}")
    for key in ("parents", "links"):
        if draw(st.booleans()):
            lines.append(f"{key}:")
            for _ in range(draw(st.integers(1, 3))):
                lines += draw(items)
    if draw(st.booleans()):
        lines += ["meta:", *(f"    {draw(keys)}: {draw(texts)}" for _ in range(draw(st.integers(1, 3))))]
    return "".join(f"{line}\n" for line in lines).encode()


def by_the_general_parser(header: bytes, body: bytes) -> BusMessage | None:
    try:
        return foreign_bus.foreign_message(header, body)
    except foreign_bus.DamagedRecord:
        return None


@given(headers(), st.binary(max_size=30))
@example(SAMPLE.read_bytes().split(b"---\n")[1], b"hello")
def test_every_header_that_the_plain_shape_accepts_reads_as_by_yaml(header: bytes, body: bytes) -> None:
    match = foreign_bus.plain_pattern(foreign_bus.PLAIN_LAYOUT).fullmatch(b"---\n" + header + b"---\n")
    message = foreign_bus.plain_message(match, body) if match is not None else None
    if message is not None:
        assert message == by_the_general_parser(header, body)


@given(st.from_regex(foreign_bus.plain_pattern(foreign_bus.PLAIN_LAYOUT), fullmatch=True))
def test_every_text_of_the_plain_shape_reads_as_by_yaml(opening: bytes) -> None:
    match = foreign_bus.plain_pattern(foreign_bus.PLAIN_LAYOUT).match(opening)
    assert match is not None
    message = foreign_bus.plain_message(match, b"body")
    if message is not None:
        assert message == by_the_general_parser(opening[4:-4], b"body")


def test_the_plain_records_of_a_real_file_need_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight records, one has a header that is not plain, and the last one has no record after it."""
    expected = decode(SAMPLE.read_bytes(), legacy_line=0)
    asked: list[bytes] = []
    real = foreign_bus.yaml_header

    def counted(header: bytes) -> dict[str, Any]:
        asked.append(header)
        return real(header)

    monkeypatch.setattr(foreign_bus, "yaml_header", counted)
    assert decode(SAMPLE.read_bytes(), legacy_line=0) == expected
    assert len(asked) == 2


@given(st.lists(st.tuples(bodies, st.sampled_from([plain, sorted_keys])), max_size=5))
def test_a_file_reads_the_same_with_and_without_the_fast_path(records: list[tuple[str, Any]]) -> None:
    made = (make(body, f"{FIRST}{n}") for n, (body, make) in enumerate(records))
    data = "\n".join(made).encode("utf-8", "surrogateescape")
    fast = decode(data, legacy_line=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buswire, "decode_plain", lambda _data, start, _offset, _out: start)
        assert decode(data, legacy_line=0) == fast


@pytest.mark.parametrize("excess", range(-24, 24, 3))
def test_headers_near_the_limit_read_the_same_on_both_paths(excess: int) -> None:
    header = plain("", FIRST).replace("run_id: r\n", f"run_id: {'r' * foreign_bus.HEADER_BYTES_MAX}\n")
    surplus = len(header.partition("---\n")[2].partition("---\n")[0]) - foreign_bus.HEADER_BYTES_MAX - excess
    long = header.replace("r" * surplus, "", 1)
    for body in ("body\n", "msg_id: x\n"):
        data = (long.removesuffix("\n") + body + "\n" + plain("next", SECOND)).encode()
        fast = decode(data, legacy_line=0)
        assert fast.messages[-1].body == "next"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buswire, "decode_plain", lambda _data, start, _offset, _out: start)
            assert decode(data, legacy_line=0) == fast


yaml_values = st.recursive(
    st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=8), yaml_values, max_size=4))
def test_a_header_is_built_as_yaml_builds_it(fields: dict[str, Any]) -> None:
    header = yaml.dump(fields, allow_unicode=True).encode()
    try:
        expected = yaml.load(header, Loader=yaml.CBaseLoader)  # noqa: S506 - builds text, lists and dicts only
    except yaml.YAMLError:
        return
    if not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header)):
        assert foreign_bus.yaml_header(header) == expected


# ---- what verify says ------------------------------------------------------------------------------------


def test_a_duplicate_record_is_reported_and_an_unordered_one_is_not(tmp_path: Path) -> None:
    records = [
        plain("b", SECOND),
        plain("a", FIRST),
        plain("c", THIRD),
        plain("again", FIRST),
        plain("b", SECOND),
    ]
    bus = written(tmp_path, *records[:3])
    assert bus.verify().ok, "ids of foreign records may stand in any order"
    bus = written(tmp_path, *records)
    report = bus.verify()
    starts = [0, *itertools.accumulate(len(record) + 1 for record in records)]
    assert [(d.msg_id, d.offset, d.first_offset) for d in report.duplicates] == [
        (FIRST, starts[3], starts[1]),
        (SECOND, starts[4], starts[0]),
    ]
    assert (report.ok, report.messages, report.damaged) == (False, 5, ())


def test_a_copy_of_a_record_of_ours_is_reported(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    made = bus.append(type="t", project_id="p", body="once")
    record = bus.path.read_bytes()
    bus.append(type="t", project_id="p", body="other")
    bus.path.write_bytes(bus.path.read_bytes() + b"\n" + record)
    assert [duplicate.msg_id for duplicate in bus.verify().duplicates] == [made]


# ---- nesting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5_000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_a_header_of_any_depth_is_one_damaged_record(tmp_path: Path, depth: int, opening: str) -> None:
    deep = plain("deep", SECOND).replace("run_id: r\n", f"meta: {opening * depth}\n")
    bus = written(tmp_path, plain("one", FIRST), deep, plain("three", THIRD))
    assert shown(bus.read()) == [(FIRST, "one"), (THIRD, "three")]
    assert shown(bus.tail(1)) == [(THIRD, "three")]
    assert [damage.offset for damage in bus.verify().damaged] == [len(plain("one", FIRST)) + 1]


# ---- who may read ----------------------------------------------------------------------------------------


def test_a_new_bus_is_readable_by_others_unless_the_umask_forbids_it(tmp_path: Path) -> None:
    """As in conductor-loop. A user who can read the file can hold its lock, as the Bus page says."""
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            bus = Bus(tmp_path / f"{umask}.yaml")
            bus.append(type="t", project_id="p")
        finally:
            os.umask(before)
        assert bus.path.stat().st_mode & 0o777 == mode


# ---- places ----------------------------------------------------------------------------------------------


def test_follower_reports_a_gap_when_its_file_was_removed(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", poll_interval_s=0.01)
    gaps: list[str] = []
    first = bus.append(type="t", project_id="p", body="1")
    follower = bus.follow(on_gap=gaps.append)
    assert next(follower).msg_id == first
    archive = bus.rotate()
    second = bus.append(type="t", project_id="p", body="2")
    assert (next(follower).msg_id, gaps) == (second, []), "a rotation leaves no gap"
    lost = bus.rotate()
    bus.append(type="t", project_id="p", body="3")
    for path in (archive, lost, bus.rotate()):
        assert path is not None
        path.unlink()
    fourth = bus.append(type="t", project_id="p", body="4")
    assert (next(follower).msg_id, gaps) == (fourth, [second])
    with pytest.raises(LookupError):
        bus.read(second, archives=True)


def test_rewritten_file_with_the_last_message_leaves_no_gap(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", poll_interval_s=0.01)
    gaps: list[str] = []
    bus.append(type="t", project_id="p", body="1")
    follower = bus.follow(on_gap=gaps.append)
    next(follower)
    copy = tmp_path / "copy"
    copy.write_bytes(bus.path.read_bytes())
    copy.replace(bus.path)
    bus.append(type="t", project_id="p", body="2")
    assert (next(follower).body, gaps) == ("2", [])


@pytest.mark.parametrize("since", ["", " ", "\t\n", "\u3000"])
def test_blank_since_id_means_all_messages(tmp_path: Path, since: str) -> None:
    bus = written(tmp_path, plain("one", FIRST), plain("two", SECOND))
    assert len(bus.read(since)) == len(bus.poll(since, timeout_s=0)) == 2
    assert next(bus.follow(since)).body == "one"
