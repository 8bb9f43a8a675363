"""JSON that other programs wrote: one kind of error, and a bound on nesting."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.formats.auditlines import of_audit_line, of_mail_line
from postroom.core.formats.events import SCHEMA, AuditEvent, decode_lines, from_line, to_line
from postroom.core.formats.jsoninput import (
    JSON_ELEMENTS_MAX,
    NESTING_MAX,
    PIECE_BYTES,
    TOO_DEEP,
    Size,
    check_json,
    guarded,
    is_deep,
    is_nested_deeper,
    sizes,
)
from postroom.errors import InvalidMessage

DEPTHS = (NESTING_MAX + 1, 500, 980, 1_100, 200_000)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def event(detail: dict[str, Any]) -> AuditEvent:
    return AuditEvent(
        event_id="s#1",
        seq=1,
        ts_us=1,
        kind="created",
        contract="mail",
        source="s",
        schema=SCHEMA,
        detail=detail,
    )


def deep_line(levels: int, field: bytes = b"detail") -> bytes:
    """An event with a field of this nesting: the detail, or a field that the schema does not know."""
    return to_line(event({})).replace(b"}\n", b',"%b":{"x":%b}}\n' % (field, nested(levels - 1)))


def test_depth_counts_lists_and_objects() -> None:
    value: Any = 1
    for level in range(NESTING_MAX):
        value = [value] if level % 2 else {"a": value}
    assert not is_deep(value)
    assert is_deep([value])
    assert not is_deep({})
    assert not is_deep("[[[")


@pytest.mark.parametrize("levels", DEPTHS)
def test_a_deep_event_is_one_bad_line(levels: int) -> None:
    line = deep_line(levels)
    for decode in (from_line, decode_lines):
        with pytest.raises(msgspec.DecodeError, match="nested deeper than 100 levels"):
            decode(line)
    assert from_line(deep_line(NESTING_MAX)).detail
    assert len(decode_lines(deep_line(NESTING_MAX) * 2)) == 2


def test_deeply_nested_unknown_field_is_decoded_without_recursion_error() -> None:
    with pytest.raises(msgspec.DecodeError, match="nested deeper"):
        from_line(deep_line(200_000, b"unknown"))


@pytest.mark.parametrize("levels", DEPTHS)
def test_a_deep_line_of_a_source_becomes_an_alert(levels: int) -> None:
    mail = b'{"kind":"created","ts_us":1,"detail":{"x":%b}}' % nested(levels)
    found = of_mail_line(mail, "mail:1", 7)
    assert (found.kind, found.seq, found.error) == (
        "alert",
        7,
        TOO_DEEP,
    )
    queue = b'{"ts":"2026-02-05T14:30:52Z","op":"send","session":"s","more":%b}' % nested(200_000)
    assert of_audit_line(queue, "queue:1", 7).error == found.error


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"kind":"created","ts_us":1,"queue":"\xff"}', "it is not UTF-8"),
        (b'{"kind":"created","ts_us":999999999999999999999}', "ts_us"),
        (b'{"kind":"created","ts_us":-1}', "ts_us"),
        (b'{"kind":"created","ts_us":1,"attempt":99999999999999999999}', "attempt"),
    ],
)
def test_an_undecodable_mail_line_becomes_an_alert(line: bytes, says: str) -> None:
    found = of_mail_line(line, "mail:1", 1)
    assert (found.kind, found.error_type, found.ts_us) == ("alert", "UnreadableLine", 0)
    assert says in found.error
    assert "codec" not in found.error


def test_an_unknown_operation_is_named() -> None:
    found = of_audit_line(b'{"ts":"2026-02-05T14:30:52Z","op":"purge","session":"s"}', "queue:1", 1)
    assert found.error == "a queue has no operation 'purge'"


def test_a_guarded_decoder_passes_other_errors_on() -> None:
    decode = guarded(msgspec.json.Decoder(int).decode)
    assert decode(b"1") == 1
    with pytest.raises(msgspec.ValidationError):
        decode(b'"a"')


# ---- before anything is decoded --------------------------------------------------------------------

JSON = st.recursive(
    st.integers() | st.booleans() | st.text(st.sampled_from('a"\\\n,:[]{}'), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def elements(value: Any) -> int:
    """The commas, colons and opening brackets of a value."""
    if isinstance(value, dict):
        return max(1, 2 * len(value)) + sum(elements(inner) for inner in value.values())
    return max(1, len(value)) + sum(map(elements, value)) if isinstance(value, list) else 0


def levels(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(
        (levels(inner) for inner in (value.values() if isinstance(value, dict) else value)), default=0
    )


@given(JSON)
def test_elements_and_levels_are_counted_outside_of_strings(value: Any) -> None:
    data = msgspec.json.encode(value)
    assert [*sizes(data)] == [Size(elements(value), levels(value))]
    for most in range(levels(value) + 2):
        assert is_nested_deeper(data, most) is (levels(value) > most)


@pytest.mark.parametrize("shift", range(24))
def test_a_string_may_lie_across_pieces(shift: int) -> None:
    value = [
        "x" * (PIECE_BYTES - shift),
        '\\"[[',
        "\\\\",
        '\\\\\\"{,',
        [["", 1]],
        "\\" * PIECE_BYTES,
        {"a": [2]},
    ]
    data = msgspec.json.encode(value)
    assert [*sizes(data)][-1] == Size(elements(value), 3)


@pytest.mark.parametrize("one", [b"{}", b"[]", b"1", b'"a"', b'{"k":1}'])
def test_a_body_of_too_many_elements_is_refused_before_it_is_decoded(one: bytes) -> None:
    most = JSON_ELEMENTS_MAX // max(1, elements([msgspec.json.decode(one)]))
    check_json("the body", b"[" + b",".join([one] * most) + b"]", 3)
    with pytest.raises(InvalidMessage, match=r"^the body has more than 200000 JSON elements"):
        check_json("the body", b"[" + b",".join([one] * (most + 1)) + b"]", 3)


def test_a_long_text_has_few_elements() -> None:
    check_json("the body", msgspec.json.encode({"text": ", [{:" * JSON_ELEMENTS_MAX}), 1)


@pytest.mark.parametrize("depth", [4, 5_000, 1_000_000])
def test_a_body_of_too_many_levels_is_refused_before_it_is_decoded(depth: int) -> None:
    for data in (nested(depth), b"[" * depth, b'{"a":' * depth):
        with pytest.raises(InvalidMessage, match=r"JSON elements|nested more than 3 levels deep"):
            check_json("the body", data, 3)


def test_text_that_is_not_json_is_checked_up_to_its_end() -> None:
    for data in (b"", b'"', b"\\", b'"\\', b"\xff" * 9, b"]]]]", b'[["', b'"\\"' * 99):
        check_json("the body", data, 3)
