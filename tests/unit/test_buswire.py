"""The bus file format: every written message reads back, and no other bytes read as a message."""

import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.core.formats import buswire, foreign_bus
from postroom.core.formats.buswire import decode, draft, encode
from postroom.core.formats.ids import bus_id, origin
from postroom.errors import InvalidMessage
from postroom.message import BusMessage
from tests.bustexts import FIRST, SECOND, TS, bodies, names, structured

MOMENT = datetime(2026, 2, 5, 14, 30, 52, 123456, tzinfo=UTC)


def wire(body: str = "", msg_id: str = FIRST, **fields: Any) -> bytes:
    """One record as written to a file."""
    return encode(
        draft(
            fields.get("type", "note"),
            fields.get("project_id", "p"),
            fields.get("task_id", ""),
            fields.get("run_id", ""),
            fields.get("parents", ()),
            fields.get("attachment_path", ""),
            body,
            fields.get("ts", ""),
        ),
        msg_id,
        TS,
    )


def foreign(body: str, msg_id: str = FIRST, extra: str = "") -> bytes:
    """One record as the original program writes it."""
    end = "" if body.endswith("\n") else "\n"
    return (
        f"---\nmsg_id: {msg_id}\nts: {TS}\ntype: note\nproject_id: p\ntask_id: t\nrun_id: r\n{extra}---\n"
        f"{body}{end}"
    ).encode()


def read(data: bytes) -> list[BusMessage]:
    return decode(data, legacy_line=0).messages


def bodies_in(data: bytes) -> list[str]:
    return [message.body for message in read(data)]


# ---- what we write ------------------------------------------------------------------------------


def test_a_record_has_the_documented_layout() -> None:
    data = wire("hello", type="agent_started", task_id="task-001", parents=[SECOND], attachment_path="a/b.md")
    head = (
        f"msg_id: {FIRST}\nts: {TS}\ntype: agent_started\nproject_id: p\ntask_id: task-001\n"
        f'run_id: ""\nparents:\n  - {SECOND}\nattachment_path: a/b.md\nbody_bytes: 5\n'
    ).encode()
    crc = b"%08x" % zlib.crc32(head + b"hello")
    assert data == b"---\n" + head + b"crc: " + crc + b"\n---\nhello\n"


def test_optional_keys_are_omitted_when_empty() -> None:
    data = wire("hello")
    for key in (b"parents", b"attachment_path", b"body_escape"):
        assert key not in data


def test_every_field_reads_back() -> None:
    data = wire("b", type="t", task_id="k", run_id="r", parents=[FIRST, SECOND], attachment_path="x y/é.md")
    assert read(data) == [
        BusMessage(FIRST, MOMENT, "t", "p", "k", "r", [FIRST, SECOND], "x y/é.md", "b", {}),
    ]


def test_preset_time_replaces_the_clock_time() -> None:
    data = wire(ts="2001-02-03T04:05:06.7Z")
    assert b"\nts: 2001-02-03T04:05:06.7Z\n" in data
    assert read(data)[0].ts == datetime(2001, 2, 3, 4, 5, 6, 700_000, tzinfo=UTC)


@given(bodies)
@example("")
@example("---")
@example("a\n---\nb\n--- \n---   \r\r\n----\n")
@example(f"msg_id: {SECOND}\n")
@example("no final newline")
@example("many\n\n\n")
@example("\r\n")
@example("\ud83d".encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape"))
def test_every_body_reads_back_exactly_alone_and_among_others(body: str) -> None:
    record = wire(body)
    assert bodies_in(record) == [body]
    among = b"\n".join([wire("before"), wire(body, SECOND), wire("after")])
    decoded = decode(among, legacy_line=0)
    assert [message.body for message in decoded.messages] == ["before", body, "after"]
    assert decoded.damaged == []
    assert decoded.consumed == len(among)


@given(names, names, st.text(max_size=30), st.text(max_size=30), st.lists(names, max_size=3))
@example("no", "012", "1:30", "~", ["null"])
@example("---", "- a", "a: b", "#", ["'", '"', "\\"])
@example(" lead", "trail ", "\n", "\r\n", ["\x85\u2028\ufeff\ufffe\x7f\0"])
def test_every_field_reads_back_exactly_here_and_as_yaml(
    kind: str, project_id: str, task_id: str, run_id: str, parents: list[str]
) -> None:
    data = wire("b", type=kind, project_id=project_id, task_id=task_id, run_id=run_id, parents=parents)
    message = read(data)[0]
    assert (message.type, message.project_id, message.task_id, message.run_id, message.parents) == (
        kind, project_id, task_id, run_id, parents
    )  # fmt: skip
    header = yaml.safe_load(data.split(b"\n---\n")[0])
    assert (header["type"], header["project_id"], header["task_id"], header["run_id"]) == (
        kind, project_id, task_id, run_id
    )  # fmt: skip
    assert header.get("parents", []) == parents


@pytest.mark.parametrize(
    "word", ["no", "Yes", "ON", "null", "True", "y", "N", "012", "1:30", "1e3", ".inf", "~"]
)
def test_yaml_keywords_are_quoted(word: str) -> None:
    """Defect 6 of the original: implicit types."""
    assert f'\ntask_id: "{word}"\n'.encode() in wire(task_id=word)


everyday = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["note", "no", "a: b"]),
        "project_id": st.sampled_from(["p", "q"]),
        "task_id": st.sampled_from(["", "t"]),
        "run_id": st.just("r"),
        "body": bodies,
    }
)


def one_by_one(messages: list[Mapping[str, Any]]) -> list[buswire.Draft]:
    return [
        draft(m["type"], m["project_id"], m["task_id"], m["run_id"], (), "", m["body"]) for m in messages
    ]  # fmt: skip


@given(st.lists(everyday, min_size=1, max_size=6), st.sampled_from([b"", b"\n", b"\n\n"]))
def test_a_batch_has_the_bytes_of_its_messages_one_by_one(
    messages: list[Mapping[str, Any]], before: bytes
) -> None:
    drafts = one_by_one(messages)
    msg_ids = [f"{FIRST[:-4]}{number:04d}" for number in range(len(messages))]
    records = [encode(drafted, msg_id, TS) for drafted, msg_id in zip(drafts, msg_ids, strict=True)]
    expected = before + b"\n".join(records)
    assert buswire.encode_batch(buswire.batch(drafts), msg_ids, TS, before) == expected
    together = buswire.everyday_batch(messages)
    if not any("---" in message["body"] or not message["body"].isprintable() for message in messages):
        assert together is not None, "this is what it is made for"
    if together is not None:
        assert buswire.encode_batch(together, msg_ids, TS, before) == expected


@given(
    st.integers(-(10**18), 4 * 10**18),
    st.integers(0, 30_000),
    st.sampled_from(["", FIRST, "zzz", "MSG-20991231-235959-999999999-PID99999-9999"]),
    bodies,
    st.sampled_from(["", TS]),
)
def test_encode_next_equals_bus_id_and_encode(
    epoch_ns: int, sequence: int, last: str, body: str, preset_ts: str
) -> None:
    drafted = draft("note", "p", "t", "r", (), "", body, preset_ts)
    msg_id, ts = bus_id(epoch_ns, origin(7), sequence, last)
    expected = msg_id, encode(drafted, msg_id, ts, b"\n")
    assert buswire.encode_next(drafted, epoch_ns, origin(7), sequence, last, b"\n") == expected


EVERYDAY = {"type": "t", "project_id": "p", "task_id": "k", "run_id": "r", "body": "b"}


@pytest.mark.parametrize(
    "unusual",
    [
        {**EVERYDAY, "body": "a\n---\nb"},
        {**EVERYDAY, "body": "\udcff"},
        {**EVERYDAY, "body": None},
        {**EVERYDAY, "body": ["b"]},
        {**EVERYDAY, "task_id": ["unhashable"]},
        {**EVERYDAY, "parents": []},
        {"type": "t", "project_id": "p"},
        {**{key: value for key, value in EVERYDAY.items() if key != "run_id"}, "ts": TS},
        {},
    ],
)
def test_everyday_batch_rejects_unusual_messages(unusual: dict[str, Any]) -> None:
    assert buswire.everyday_batch([EVERYDAY, EVERYDAY]) is not None
    assert buswire.everyday_batch([EVERYDAY, unusual, EVERYDAY]) is None
    assert buswire.everyday_batch([]) is None


def test_a_large_batch_is_measured_message_by_message() -> None:
    large = {**EVERYDAY, "body": "x" * (buswire.BODY_BYTES_MAX // 4)}
    assert buswire.everyday_batch([EVERYDAY, large]) is None


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"type": ""}, "type is empty"),
        ({"type": " \t\u3000"}, "type is empty"),
        ({"project_id": ""}, "project_id is empty"),
        ({"type": 5}, "type must be text, not int"),
        ({"type": ["t"]}, "type must be text, not list"),
        ({"task_id": None}, "task_id must be text, not NoneType"),
        ({"run_id": b"r"}, "run_id must be text, not bytes"),
        ({"run_id": "\ud800"}, "run_id holds lone surrogates, which are not Unicode text"),
        ({"parents": FIRST}, "parents must be a list of message ids, not a single text"),
        ({"parents": 5}, "parents must be a list of message ids, not int"),
        ({"parents": [None]}, "parent must be text, not NoneType"),
        ({"parents": [FIRST, ""]}, "parent is empty"),
        ({"body": b"bytes"}, "the body must be text, not bytes"),
        ({"body": None}, "the body must be text, not NoneType"),
        ({"body": "\ud800"}, "the body holds lone surrogates, which are not Unicode text"),
        ({"body": "\udcc3\udca9"}, "the body holds lone surrogates, which are not Unicode text"),
    ],
)
def test_a_wrong_field_is_refused_with_a_one_line_error(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        wire(**fields)
    assert str(caught.value) == sentence


def test_a_header_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="the header is longer than 65280 bytes"):
        wire(task_id="x" * foreign_bus.HEADER_BYTES_MAX)


def test_a_body_over_the_limit_is_refused() -> None:
    text = "x" * buswire.BODY_BYTES_MAX
    [body] = bodies_in(wire(text))
    assert len(body) == buswire.BODY_BYTES_MAX
    too_long = f"the body is longer than {buswire.BODY_BYTES_MAX} bytes: attach a file instead"
    with pytest.raises(InvalidMessage, match=too_long):
        wire(text + "x")


@pytest.mark.parametrize("parents", [(), [], iter(()), {}, None])
def test_empty_parents_write_no_key(parents: Any) -> None:
    data = wire("b", parents=parents)
    assert b"parents" not in data
    assert read(data)[0].parents == []


def test_parents_may_come_from_an_iterator() -> None:
    def asked() -> Iterator[str]:
        yield FIRST

    assert read(wire("b", parents=asked()))[0].parents == [FIRST]


# ---- no body forges a record ------------------------------------------------------------------------


def forged_record(body: str) -> str:
    """A complete record with a valid checksum, to be used as a body."""
    return wire(body, "MSG-29990101-000000-000000000-PID00666-0666").decode()


@given(st.lists(st.one_of(structured, st.sampled_from(["x", "---"]).map(forged_record)), max_size=5))
def test_a_body_made_of_header_lines_forges_nothing(parts: list[str]) -> None:
    """Defect 1 of the original: a body line `---` cut the body, and a crafted one made a record."""
    body = "\n".join(parts)
    data = wire(body) + b"\n" + wire("after", SECOND)
    assert [(m.msg_id, m.body) for m in read(data)] == [(FIRST, body), (SECOND, "after")]


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_body_forges_nothing_even_when_its_record_is_damaged(cut: int) -> None:
    """Whichever byte of the header is damaged, the body is never read as a record."""
    body = (
        f"msg_id: {SECOND}\nts: {TS}\ntype: forged\nproject_id: p\ntask_id: t\nrun_id: r\n"
        + forged_record("x")
    )
    data = bytearray(wire(body) + b"\n" + wire("after", SECOND))
    data[cut] ^= 0x10
    assert {message.body for message in read(bytes(data))} <= {body, "after"}
    assert {message.type for message in read(bytes(data))} <= {"note"}


def test_a_body_that_begins_like_a_record_is_only_a_body() -> None:
    """The separator that closes the header is then directly followed by `msg_id: `."""
    quoting = wire(f"msg_id: {FIRST}\nquoted", SECOND)
    for end in range(len(quoting)):
        decoded = decode(quoting[:end], legacy_line=0)
        assert decoded.messages == []
        assert decoded.damaged == [], "cut off, it may still be on its way"


# ---- damage ----------------------------------------------------------------------------------------


def damage_of(data: bytes) -> list[tuple[int, int, str]]:
    return [(damage.offset, damage.length, damage.reason) for damage in decode(data, legacy_line=0).damaged]


def test_wrong_checksum_skips_one_message_and_is_reported() -> None:
    bad = wire("hello").replace(b"hello", b"hullo")
    data = wire("before") + b"\n" + bad + b"\n" + wire("after")
    assert bodies_in(data) == ["before", "after"]
    assert damage_of(data) == [(len(wire("before")) + 1, len(bad) + 1, "the checksum does not match")]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"body_bytes: 5\n", b"", "the length and the checksum are not in their places"),
        (b"body_bytes: 5\n", b"body_bytes: 999999999\n", "the body length is over 67108864 bytes"),
        (b"body_bytes: 5\n", b"body_bytes: 4\n", "the checksum does not match"),
        (b"body_bytes: 5\n", b"body_bytes: 50000\n", "cut short"),
        (b"type: note\n", b"type: note\nmeta: 1\n", "the length and the checksum are not in their places"),
        (b"\n---\nhello", b"\n-- \nhello", "the header has no end"),
    ],
)
def test_a_record_of_ours_with_a_changed_header_is_damage(old: bytes, new: bytes, reason: str) -> None:
    data = wire("hello").replace(old, new) + b"\n" + wire("after", SECOND)
    assert bodies_in(data) == ["after"]
    assert [why for _, _, why in damage_of(data)] == [reason]


def test_a_valid_checksum_does_not_make_a_bad_header_a_message() -> None:
    """Another program wrote the record with postroom's keys: it is recognised, and not delivered."""
    for old, new in ((b"Z\n", b"+01:00\n"), (b"Z\n", b"\n"), (b'task_id: ""', b'task_id: "a" "b"')):
        data = wire("hello").replace(old, new, 1)
        head = data[4 : data.index(b"crc: ")]
        crc = b"crc: %08x" % zlib.crc32(head + b"hello")
        data = re.sub(rb"crc: [0-9a-f]{8}", crc, data)
        assert read(data) == []
        assert "a header line cannot be read" in damage_of(data)[0][2]


def test_bytes_between_records_are_damage_and_blank_lines_are_not() -> None:
    assert damage_of(wire("a") + b"\n\n\n" + wire("b", SECOND)) == []
    data = wire("a") + b"junk\n\n" + wire("b", SECOND)
    assert bodies_in(data) == ["a", "b"]
    assert damage_of(data) == [(len(wire("a")), 6, "not a record")]


def test_a_torn_header_does_not_swallow_the_next_message() -> None:
    """Defect 3 of the original."""
    for torn in (wire("lost"), foreign("lost")):
        for end in range(1, torn.index(b"\n---\n", 4)):
            data = torn[:end] + b"\n\n" + wire("kept", SECOND)
            assert bodies_in(data) == ["kept"], torn[:end]


def test_incomplete_record_at_the_end_is_not_damage() -> None:
    record = wire("hello")
    for end in range(len(record)):
        decoded = decode(record[:end], legacy_line=0)
        assert (decoded.messages, decoded.damaged, decoded.consumed) == ([], [], 0)


def test_bytes_beyond_the_record_limit_are_reported_as_damage() -> None:
    data = b"x" * (buswire.RECORD_BYTES_MAX + 100)
    decoded = decode(data, at_file_end=False)
    assert [damage.reason for damage in decoded.damaged] == ["no record start found"]
    assert len(data) - decoded.consumed == len(buswire.MARKER), "a record's start may be on the edge"


@given(st.binary(max_size=300), st.integers(0, 4))
def test_any_bytes_decode_without_an_error_and_never_twice(noise: bytes, where: int) -> None:
    records = [wire(str(number), f"{FIRST[:-1]}{number}") for number in range(4)]
    data = b"\n".join([*records[:where], noise, *records[where:]])
    decoded = decode(data, legacy_line=0)
    ours = [message.body for message in decoded.messages if message.type == "note"]
    assert ours == sorted(set(ours)), "in order, none twice"
    assert decoded.consumed <= len(data)


# ---- foreign records -----------------------------------------------------------------------------


def test_a_foreign_body_runs_to_the_next_record() -> None:
    data = foreign("a\n---\nb") + b"\n" + foreign("", SECOND) + b"\n" + wire("c", SECOND)
    assert bodies_in(data) == ["a\n---\nb", "", "c"]
    assert decode(data, legacy_line=0).unchecked == 2


def test_last_foreign_record_without_newline_is_not_damage() -> None:
    data = foreign("hello")
    assert bodies_in(data) == ["hello"]
    assert bodies_in(data[:-1]) == []


def test_a_foreign_record_at_the_end_is_held_back_while_a_writer_is_active() -> None:
    decoded = decode(foreign("hello"), legacy_line=0, settled_tail=False)
    assert (decoded.messages, decoded.held_back, decoded.consumed) == ([], True, 0)
    decoded = decode(foreign("hello") + b"\n" + wire("next"), legacy_line=0, settled_tail=False)
    assert [message.body for message in decoded.messages] == ["hello", "next"]


def test_extra_keys_and_object_parents_are_kept() -> None:
    extra = (
        f"parents:\n    - msg_id: {SECOND}\n      kind: reply\nmeta:\n    k: 'no'\n    n: 012\nissue_id: X\n"
    )
    message = read(foreign("b", extra=extra))[0]
    assert message.parents == [SECOND]
    assert message.extra == {
        "parents": [{"msg_id": SECOND, "kind": "reply"}],
        "meta": {"k": "no", "n": "012"},
        "issue_id": "X",
    }


@pytest.mark.parametrize("value", ["no", "012", "1:30", "true", "null_", "2026-01-01", "1e3"])
def test_foreign_scalars_have_no_implicit_types(value: str) -> None:
    data = foreign("b").replace(b"task_id: t\n", b"task_id: %b\n" % value.encode())
    assert read(data)[0].task_id == value


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("a: &x 1\nb: *x\n", "the header uses aliases"),
        (f"a: {'[' * 20}{']' * 20}\n", "the header is nested too deeply"),
        ("a: [\n", "the header is not YAML"),
        ("\t: \n", "the header is not YAML"),
        ("? [a]\n: b\n", "the header is not YAML"),
        ("parents: one\n", "a header field is missing or malformed"),
        ("parents:\n  - kind: reply\n", "a header field is missing or malformed"),
        ("attachment_path: [a]\n", "a header field is missing or malformed"),
        (f"a: {'x' * foreign_bus.HEADER_BYTES_MAX}\n", "the header is longer than 65536 bytes"),
    ],
)
def test_a_tricky_foreign_header_is_damage(extra: str, reason: str) -> None:
    data = foreign("b", extra=extra) + b"\n" + wire("after", SECOND)
    assert bodies_in(data) == ["after"]
    assert damage_of(data)[0][2].startswith(reason)


def test_a_foreign_record_without_a_time_is_damage() -> None:
    data = re.sub(rb"ts: [^\n]+\n", b"", foreign("b"))
    assert read(data) == []
    assert "missing or malformed" in damage_of(data)[0][2]


def test_a_foreign_header_that_never_ends_is_damage() -> None:
    data = foreign("b")[:-6] + b"x" * foreign_bus.HEADER_BYTES_MAX + b"\n"
    assert [reason for _, _, reason in damage_of(data)] == ["the header has no end"]


# ---- legacy lines --------------------------------------------------------------------------------


def test_legacy_lines_before_the_first_record_are_messages() -> None:
    legacy = b"[2026-02-05 14:30:52] fact: started\n\n[2026-02-05T14:30:53Z] just: text: here\n"
    messages = read(legacy + b"\n" + wire("ours"))
    assert [(m.msg_id, m.type, m.body) for m in messages] == [
        ("LEGACY-LINE-000000001", "FACT", "started"),
        ("LEGACY-LINE-000000003", "JUST", "text: here"),
        (FIRST, "note", "ours"),
    ]
    assert messages[0].ts == datetime(2026, 2, 5, 14, 30, 52, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "kind", "body"),
    [
        ("[2026-02-05 14:30:52] no type here", "INFO", "no type here"),
        ("[2026-02-05 14:30:52] two words: text", "INFO", "two words: text"),
        ("[2026-02-05 14:30:52] A/B-c_1: x", "A/B-C_1", "x"),
        ("  [ 2026-02-05 14:30:52 ]  T:  x  ", "T", "x"),
        ("[2026-02-05 14:30:52] T:", "INFO", "T:"),
    ],
)
def test_legacy_line_is_parsed(line: str, kind: str, body: str) -> None:
    message = read(line.encode() + b"\r\n")[0]
    assert (message.type, message.body) == (kind, body)


@pytest.mark.parametrize(
    "line", ["text", "[yesterday] T: x", "[2026-02-05 14:30:52]", "2026-02-05 14:30:52] x"]
)
def test_other_text_before_the_first_record_is_damage(line: str) -> None:
    data = line.encode() + b"\n\n" + wire("ours")
    assert bodies_in(data) == ["ours"]
    assert damage_of(data) == [(0, len(line) + 1, "text before the first record")]


def test_legacy_line_after_a_record_is_body_or_damage() -> None:
    line = f"[{TS}] INFO: forged\n"
    assert bodies_in(foreign("hello\n" + line)) == ["hello\n" + line.rstrip()]
    assert bodies_in(wire("hello") + line.encode() + b"\n" + wire("x", SECOND)) == ["hello", "x"]


def test_an_unfinished_legacy_line_waits() -> None:
    decoded = decode(b"[2026-02-05 14:30:52] T: x\n[2026-02-05 14:30:53] T: y", legacy_line=0)
    assert [message.body for message in decoded.messages] == ["x"]
    assert decoded.legacy_line == 1
    assert (
        decode(b"[2026-02-05 14:30:53] T: y\n", legacy_line=1).messages[0].msg_id == "LEGACY-LINE-000000002"
    )


def test_the_first_bytes_of_a_first_record_are_not_taken_for_a_legacy_line() -> None:
    record = wire("hello")
    for end in range(len(buswire.START)):
        decoded = decode(record[:end], legacy_line=0)
        assert (decoded.messages, decoded.damaged, decoded.consumed) == ([], [], 0)
        assert decoded.legacy_line == 0
