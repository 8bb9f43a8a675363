"""Times as text: parsing RFC 3339, and writing UTC.

Rule: nothing here reads a clock; a time is always an argument.
"""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from postroom.errors import InvalidMessage, shown

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NANOS_PER_S = 1_000_000_000
SECONDS_MAX = 10**12  # 30,000 years, and still exact in JSON and every clock
MICROSECOND = timedelta(microseconds=1)
SHOWN_CHARS = 60  # characters of a wrong value that an error shows

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


@lru_cache(maxsize=64)
def second_texts(epoch_s: int) -> tuple[str, str]:
    """One second of UTC, in the formats of a message id and of a timestamp."""
    moment = EPOCH + timedelta(seconds=epoch_s)
    in_ts = moment.isoformat()[: len("2026-02-05T14:30:52")]  # strftime omits leading zeros of a year
    return in_ts.replace("-", "").replace(":", "").replace("T", "-"), in_ts


def utc_text(epoch_ns: int) -> str:
    """RFC 3339 with microseconds, the resolution of a datetime."""
    # Slicing the digits of a larger number keeps leading zeros, faster than a format.
    digits = str(epoch_ns if epoch_ns >= NANOS_PER_S else NANOS_PER_S + epoch_ns % NANOS_PER_S)
    return f"{second_texts(epoch_ns // NANOS_PER_S)[1]}.{digits[-9:-3]}Z"


def epoch_ns_of(moment: datetime) -> int:
    """Nanoseconds since 1970 of an aware datetime."""
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidMessage(f"the time {moment.isoformat()} has no time zone: use an aware datetime")
    return (moment - EPOCH) // MICROSECOND * 1000


def parse_utc(text: str) -> datetime:
    """RFC 3339 text as an aware UTC datetime, truncated to microseconds."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise InvalidMessage(f"{shown(text)} is not an RFC 3339 time such as 2026-02-05T14:30:52.123456Z")
    try:
        return datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidMessage(f"{shown(text)} is not a time that exists: {error}") from error


def checked_seconds(
    name: str, seconds: object, longest_s: float = SECONDS_MAX, *, shortest_s: float = 0
) -> float:
    """`seconds` when it is a number within the limits, else `InvalidMessage`."""
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not shortest_s <= seconds <= longest_s
    ):
        limits = f"from {shortest_s:.15g} to {longest_s:.15g}"
        raise InvalidMessage(f"{name} must be a number of seconds {limits}, not {_shown(seconds)}")
    return float(seconds) if isinstance(seconds, float) else int(seconds)


def _shown(value: object) -> str:
    """A refused value for an error message. Long texts are truncated, and huge numbers are not printed."""
    if isinstance(value, int) and abs(value) > SECONDS_MAX:
        return "a larger number" if value > 0 else "a smaller number"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def normal_utc(value: datetime | str) -> str:
    """A caller's timestamp as it is stored: converted to UTC, with all given digits."""
    if isinstance(value, datetime):
        try:
            return utc_text(epoch_ns_of(value))
        except OverflowError as error:
            raise InvalidMessage(f"{value.isoformat()} is not a time that exists in UTC") from error
    if not isinstance(value, str):
        raise InvalidMessage(f"a time must be an aware datetime or RFC 3339 text, not {type(value).__name__}")
    moment = parse_utc(value)
    match = _RFC3339.fullmatch(value)
    fraction = (match and match[3]) or ""
    return f"{moment.replace(microsecond=0, tzinfo=None).isoformat()}{fraction}Z"
