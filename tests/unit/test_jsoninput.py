"""JSON that other programs wrote: one kind of error, and a bound on nesting."""

from typing import Any

import msgspec
import pytest

from postroom.core.auditlines import of_audit_line, of_mail_line
from postroom.core.events import SCHEMA, AuditEvent, decode_lines, from_line, to_line
from postroom.core.jsoninput import NESTING_MAX, TOO_DEEP, guarded, is_deep

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
