"""The queue's line format: what postroom writes, what it accepts, and what no other program can forge."""

import json
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.formats import queuewire as wire
from postroom.core.times import SECONDS_MAX, utc_text
from postroom.errors import InvalidMessage, QueueError, TopicError
from postroom.message import QueueMessage

SENT_NS = 1_781_049_600_000_000_000  # 2026-06-10T00:00:00Z
SECOND_NS = 1_000_000_000

LINE = wire.QueueLine(
    msg_id="m-1",
    ts="2026-06-10T00:00:00Z",
    sender="coordinator",
    to=None,
    topic="ask",
    body="how far?",
    in_reply_to=None,
    ttl_s=600,
)


def foreign(**changed: Any) -> bytes:
    """A line as another program writes it: the documented keys, no checksum."""
    record: dict[str, Any] = {
        "msg_id": "f-1",
        "ts": "2026-06-10T00:00:00Z",
        "from": "zos",
        "to": None,
        "topic": "ask",
        "body": "text",
        "in_reply_to": None,
        "ttl_s": None,
    }
    record |= changed
    return json.dumps({key: value for key, value in record.items() if value is not ...}).encode()


# ---- writing ---------------------------------------------------------------------------------------


def test_a_line_is_the_documented_object_with_a_checksum_at_its_end() -> None:
    assert wire.encode_line(LINE) == (
        b'{"msg_id":"m-1","ts":"2026-06-10T00:00:00Z","from":"coordinator","to":null,"topic":"ask",'
        b'"body":"how far?","in_reply_to":null,"ttl_s":600,"crc":"' + checksum_of(LINE) + b'"}\n'
    )


def checksum_of(line: wire.QueueLine) -> bytes:
    before = wire.encode_line(line).rpartition(b',"crc":"')[0]
    return b"%08x" % zlib.crc32(before)


def test_a_line_decodes_to_the_eight_keys_and_nothing_else() -> None:
    assert wire.decode_line(wire.encode_line(LINE)[:-1]) == {
        "msg_id": "m-1",
        "ts": "2026-06-10T00:00:00Z",
        "from": "coordinator",
        "to": None,
        "topic": "ask",
        "body": "how far?",
        "in_reply_to": None,
        "ttl_s": 600,
    }


@given(st.text())
def test_every_body_comes_back_and_stays_on_one_line(body: str) -> None:
    data = wire.encode_line(msgspec.structs.replace(LINE, body=body))
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert wire.decode_line(data[:-1])["body"] == body


def test_a_body_that_spells_a_checksum_or_a_record_is_only_a_body() -> None:
    body = '","crc":"00000000"}\n{"msg_id":"forged","crc":"00000000"}'
    data = wire.encode_line(msgspec.structs.replace(LINE, body=body))
    assert data.count(b"\n") == 1
    assert wire.decode_line(data[:-1])["body"] == body


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="lone surrogates"):
        wire.encode_line(msgspec.structs.replace(LINE, in_reply_to="\ud800"))


# ---- reading ---------------------------------------------------------------------------------------


def test_no_flipped_bit_gives_another_message() -> None:
    data = wire.encode_line(LINE)[:-1]
    intact = wire.decode_line(data)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        for line in bytes(flipped).split(b"\n"):
            message = wire.readable(line)
            assert message is None or message == intact


def test_no_shortened_line_is_a_message() -> None:
    data = wire.encode_line(LINE)[:-1]
    assert [end for end in range(len(data)) if wire.readable(data[:end]) is not None] == []


def test_a_foreign_line_needs_no_checksum() -> None:
    assert wire.decode_line(foreign(body="hello"))["body"] == "hello"


@pytest.mark.parametrize("missing", ["to", "in_reply_to", "ttl_s"])
def test_a_foreign_line_may_omit_fields_with_a_default(missing: str) -> None:
    message = wire.decode_line(foreign(**{missing: ...}))
    assert message == wire.decode_line(foreign())


OURS_ALONE = {"body_bytes": 4, "body_crc": "00000000", "_body_source": "side-file", "_body_error": "no"}


@pytest.mark.parametrize("missing", ["to", "in_reply_to", "ttl_s"])
@pytest.mark.parametrize("extra", OURS_ALONE)
def test_eight_other_keys_are_completed(missing: str, extra: str) -> None:
    message = wire.decode_line(foreign(**{missing: ..., extra: OURS_ALONE[extra]}))
    assert message == wire.decode_line(foreign())


@pytest.mark.parametrize("extra", OURS_ALONE)
def test_reserved_keys_of_foreign_lines_are_removed(extra: str) -> None:
    assert wire.decode_line(foreign(**{extra: OURS_ALONE[extra]})) == wire.decode_line(foreign())


def test_undocumented_keys_are_dropped() -> None:
    assert wire.decode_line(foreign(priority="high")) == wire.decode_line(foreign())


NO_MESSAGES = {
    "empty": b"",
    "blank": b"   ",
    "no JSON": b"hello",
    "half an object": b'{"msg_id":"a","ts":',
    "a list": b"[]",
    "null": b"null",
    "invalid UTF-8": foreign(body="X").replace(b"X", b"\xff"),
    "a lone surrogate": foreign(body="X").replace(b"X", rb"\ud800"),
    "a raw NUL": b"\0" * 100,
    "a byte order mark": b"\xef\xbb\xbf" + foreign(),
    "two objects": foreign() + foreign(),
    "no id": foreign(msg_id=...),
    "no topic": foreign(topic=...),
    "no body": foreign(body=...),
    "no sender": foreign(**{"from": ...}),
    "no time": foreign(ts=...),
    "a number for a body": foreign(body=5),
    "a text for a ttl": foreign(ttl_s="600"),
    "a flag for a ttl": foreign(ttl_s=True),
    "a list of recipients": foreign(to=["a"]),
    "deeply nested": b'{"x":' + b"[" * 100_000,
    "a checksum of something else": foreign()[:-1] + b',"crc":"00000000"}',
    "a checksum that is not a number": foreign()[:-1] + b',"crc":"zzzzzzzz"}',
}


@pytest.mark.parametrize("line", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_invalid_line_is_unreadable(line: bytes) -> None:
    assert wire.readable(line) is None
    with pytest.raises(wire.UnreadableLine):
        wire.decode_line(line)


# ---- side files ------------------------------------------------------------------------------------


def test_line_refers_only_to_its_own_side_file() -> None:
    own = wire.decode_line(foreign(msg_id="f-1", body="@file:f-1.txt"))
    assert wire.in_side_file(own)


@pytest.mark.parametrize(
    ("msg_id", "body"),
    [
        ("f-1", "@file:f-2.txt"),
        ("f-1", "@file:f-1"),
        ("f-1", "@file:f-1.txt "),
        ("f-1", " @file:f-1.txt"),
        ("f-1", "@file:../bodies/f-1.txt"),
        ("f-1", "text"),
        ("../../secret", "@file:../../secret.txt"),
        ("/etc/passwd", "@file:/etc/passwd.txt"),
        ("..", "@file:...txt"),
        ("", "@file:.txt"),
    ],
)
def test_no_other_body_names_a_file(msg_id: str, body: str) -> None:
    assert not wire.in_side_file(wire.decode_line(foreign(msg_id=msg_id, body=body)))


def test_a_side_file_is_compared_with_length_and_checksum() -> None:
    raw = b"long text"
    message = wire.decode_line(
        foreign(body="@file:f-1.txt", body_bytes=len(raw), body_crc=wire.body_checksum(raw))
    )
    assert wire.body_fault(message, raw) == ""
    assert "bytes instead of" in wire.body_fault(message, raw[:-1])
    assert "checksum" in wire.body_fault(message, raw[::-1])


def test_a_foreign_side_file_is_accepted_unchecked() -> None:
    message = wire.decode_line(foreign(body="@file:f-1.txt"))
    assert wire.body_fault(message, b"whatever") == ""


# ---- time to live ----------------------------------------------------------------------------------


def aged(ttl_s: float | None, ts: str = "2026-06-10T00:00:00Z") -> QueueMessage:
    return wire.decode_line(foreign(ttl_s=ttl_s, ts=ts))


def test_expiry_begins_exactly_at_ts_plus_ttl() -> None:
    assert not wire.is_expired(aged(600), SENT_NS + 600 * SECOND_NS - 1)
    assert wire.is_expired(aged(600), SENT_NS + 600 * SECOND_NS)


@given(st.integers(0, 10**12), st.integers(0, 10**9))
def test_expiry_is_exact_for_every_fraction_of_a_second(ttl_us: int, sent_us: int) -> None:
    sent_ns = SENT_NS + sent_us * 1000
    message = aged(ttl_us / 1_000_000, utc_text(sent_ns))
    due_ns = sent_ns + ttl_us * 1000
    assert wire.is_expired(message, due_ns)
    assert not wire.is_expired(message, due_ns - 1000)


def test_zero_seconds_are_over_at_once() -> None:
    assert wire.is_expired(aged(0), SENT_NS)
    assert not wire.is_expired(aged(0), SENT_NS - 1)


@pytest.mark.parametrize("ttl_s", [None, 1e308, 10**30])
def test_message_without_ttl_never_expires(ttl_s: float | None) -> None:
    assert not wire.is_expired(aged(ttl_s), 2**62)


@pytest.mark.parametrize("ttl_s", [-1, -1e308, -(10**30)])
def test_a_foreign_ttl_below_zero_is_over_at_once(ttl_s: float) -> None:
    assert wire.is_expired(aged(ttl_s), SENT_NS)


@pytest.mark.parametrize("ts", ["yesterday", "2026-06-10", "2026-06-10T00:00:00", "2026-13-40T00:00:00Z", ""])
def test_a_line_with_an_invalid_time_never_expires(ts: str) -> None:
    assert not wire.is_expired(aged(0, ts), 2**62)


def test_another_time_zone_is_the_same_instant() -> None:
    message = aged(1, "2026-06-10T02:00:00+02:00")
    assert not wire.is_expired(message, SENT_NS)
    assert wire.is_expired(message, SENT_NS + SECOND_NS)


# ---- addressing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "agent_id", "addressed"),
    [
        (None, "a", True),
        ("all", "a", True),
        ("broadcast", "a", True),
        ("a", "a", True),
        ("b", "a", False),
        ("A", "a", False),
        ("", "a", False),
    ],
)
def test_is_for_matches_the_agent_and_everyone(to: str | None, agent_id: str, addressed: bool) -> None:
    assert wire.is_for(wire.decode_line(foreign(to=to)), agent_id) is addressed


# ---- what callers may say --------------------------------------------------------------------------


def test_the_topics_are_closed() -> None:
    assert frozenset({"ask", "answer", "broadcast", "spawn-request", "status"}) == wire.TOPICS


@pytest.mark.parametrize("topic", ["", "Ask", "ask ", "ask\n", "news", None, 1, b"ask", ["ask"]])
def test_another_topic_is_refused(topic: object) -> None:
    with pytest.raises(TopicError) as caught:
        wire.checked_topic(topic)
    assert isinstance(caught.value, QueueError)
    assert isinstance(caught.value, ValueError)


def test_a_filter_is_one_topic_or_several() -> None:
    assert wire.checked_topics(None) is None
    assert wire.checked_topics("ask") == frozenset({"ask"})
    assert wire.checked_topics(topic for topic in ("ask", "status")) == frozenset({"ask", "status"})
    for wrong in (["ask", "news"], [], ""):
        with pytest.raises(TopicError):
            wire.checked_topics(wrong)


@pytest.mark.parametrize("ttl_s", [None, 0, 1, 0.5, SECONDS_MAX])
def test_a_ttl_is_a_number_of_seconds_or_none(ttl_s: float | None) -> None:
    assert wire.checked_ttl(ttl_s) == ttl_s


@pytest.mark.parametrize(
    "ttl_s", [-1, -0.001, float("nan"), float("inf"), SECONDS_MAX + 1, 1e308, 10**400, True, "600", [1]]
)
def test_another_ttl_is_refused(ttl_s: object) -> None:
    with pytest.raises(InvalidMessage, match="ttl_s"):
        wire.checked_ttl(ttl_s)


@pytest.mark.parametrize("reply_to", ["", 5, b"m-1", "x" * (wire.REPLY_TO_CHARS_MAX + 1)])
def test_a_bad_reply_id_is_refused(reply_to: object) -> None:
    with pytest.raises(InvalidMessage, match="reply_to"):
        wire.checked_reply_to(reply_to)


def test_a_reply_id_of_any_writer_is_taken() -> None:
    for reply_to in ("any id: of another program", "x" * wire.REPLY_TO_CHARS_MAX, None):
        assert wire.checked_reply_to(reply_to) == reply_to
