"""Times as text: RFC 3339 is parsed, and UTC is written with every digit."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.times import (
    SECONDS_MAX,
    checked_seconds,
    epoch_ns_of,
    normal_utc,
    parse_utc,
    second_texts,
    utc_text,
)
from postroom.errors import InvalidMessage

NAIVE = datetime  # named to say that a time without a zone is intended
KATHMANDU = timezone(timedelta(hours=5, minutes=45))


@pytest.mark.parametrize(
    ("given_text", "stored"),
    [
        ("2026-02-05T14:30:52Z", "2026-02-05T14:30:52Z"),
        ("2026-02-05t14:30:52z", "2026-02-05T14:30:52Z"),
        ("2026-02-05 14:30:52.1Z", "2026-02-05T14:30:52.1Z"),
        ("2026-02-05T14:30:52.123456789Z", "2026-02-05T14:30:52.123456789Z"),
        ("2026-02-05T00:30:00.5+05:45", "2026-02-04T18:45:00.5Z"),
        ("2026-12-31T23:30:00-01:00", "2027-01-01T00:30:00Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
    ],
)
def test_a_preset_text_moves_to_utc_and_keeps_its_digits(given_text: str, stored: str) -> None:
    assert normal_utc(given_text) == stored
    assert parse_utc(stored) == parse_utc(given_text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-02-05",
        "2026-02-05T14:30:52",
        "2026-02-05T14:30Z",
        "2026-02-30T00:00:00Z",
        "2026-02-05T14:30:60Z",
        "2026-02-05T14:30:52.1234567890Z",
        "2026-02-05T14:30:52Z\n",
        "٢٠٢٦-02-05T14:30:52Z",
        "0001-01-01T00:00:00+01:00",
        "2026-02-05T14:30:52+99:99",
    ],
)
def test_an_invalid_rfc_3339_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage):
        normal_utc(text)


def test_digits_below_a_microsecond_are_truncated() -> None:
    assert parse_utc("2026-02-05T14:30:52.123456999Z").microsecond == 123456


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (11, "11"),
        (10.5, "10.5"),
        (True, "True"),
        (None, "None"),
        ("5", "'5'"),
        (1 << 99, "a larger number"),
        (-(1 << 99), "a smaller number"),
        (float("nan"), "nan"),
        (["x" * 100], f"['{'x' * 58}..."),
    ],
)
def test_an_invalid_duration_is_shown_as_given(value: object, shown: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        checked_seconds("wait_s", value, 10)
    assert str(refused.value) == f"wait_s must be a number of seconds from 0 to 10, not {shown}"


def test_a_duration_may_equal_its_limit() -> None:
    assert checked_seconds("wait_s", 10, 10) == 10
    assert checked_seconds("wait_s", SECONDS_MAX) == SECONDS_MAX


@pytest.mark.parametrize("value", [0, 1.5, b"2026-02-05T14:30:52Z", ["2026"]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(InvalidMessage, match="aware datetime or RFC 3339"):
        normal_utc(value)  # type: ignore[arg-type]


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="has no time zone"):
        normal_utc(NAIVE(2026, 2, 5))


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_datetime_that_does_not_exist_in_utc_is_refused(hours: int) -> None:
    zone = timezone(timedelta(hours=hours))
    edge = datetime.max.replace(tzinfo=zone) if hours < 0 else datetime.min.replace(tzinfo=zone)
    with pytest.raises(InvalidMessage, match="not a time that exists"):
        normal_utc(edge)


def test_early_years_keep_their_zeros() -> None:
    """On some platforms strftime does not pad the year, and a reader needs four digits."""
    assert normal_utc(datetime(1, 1, 1, tzinfo=UTC)) == "0001-01-01T00:00:00.000000Z"
    assert second_texts(epoch_ns_of(datetime(987, 6, 5, 4, 3, 2, tzinfo=UTC)) // 10**9) == (
        "09870605-040302",
        "0987-06-05T04:03:02",
    )


def test_nanoseconds_are_counted_from_1970() -> None:
    assert epoch_ns_of(datetime(1970, 1, 1, tzinfo=UTC)) == 0
    assert epoch_ns_of(datetime(1970, 1, 1, 5, 45, 1, 2, tzinfo=KATHMANDU)) == 1_000_002_000
    assert utc_text(1_000_002_999) == "1970-01-01T00:00:01.000002Z"
    assert utc_text(-1) == "1969-12-31T23:59:59.999999Z"


@given(st.datetimes(NAIVE(2, 1, 1), NAIVE(9998, 12, 31), timezones=st.timezones()))
def test_every_datetime_survives_storing(moment: datetime) -> None:
    assert parse_utc(normal_utc(moment)) == moment.astimezone(UTC)
