"""Values as text for a person, and text for HTML.

Rule: every value in a drawing passes through `esc`, numbers included. The template escapes by itself.
"""

from datetime import UTC, datetime
from decimal import Decimal
from html import escape
from typing import Final

from postroom.pipeline.times import DAY_US, HOUR_US, MICROS_PER_S, MINUTE_US

TENTH_US: Final = MICROS_PER_S // 10
SMALL: Final = Decimal("0.0001")
LABEL_MAX: Final = 34  # characters of a name in a drawing

_UNITS: Final = (
    (DAY_US, "d"),
    (HOUR_US, "h"),
    (MINUTE_US, "min"),
    (MICROS_PER_S, "s"),
    (1_000, "ms"),
)
_LONG_UNITS: Final = ((DAY_US, "day"), (HOUR_US, "hour"), (MINUTE_US, "minute"), (MICROS_PER_S, "second"))
_SIZES: Final = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


def printable(value: object) -> str:
    """The text of a value, with a visible sign for each character that a browser may not show."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in str(value)
    )


def esc(value: object) -> str:
    """Printable text for an element or a quoted attribute."""
    return escape(printable(value))


def duration(us: float) -> str:
    """A duration with three digits and a suitable unit."""
    for size, unit in _UNITS:
        if us >= size:
            return f"{_digits(us / size)} {unit}"
    return f"{us:.0f} µs"


def count(n: float) -> str:
    """A whole number; from ten thousand on, with three digits and a unit."""
    if n < 10_000:  # noqa: PLR2004 - up to there all digits are shown
        return f"{n:,.0f}"
    size, unit = next(found for found in _SIZES if n >= found[0])
    return f"{_digits(n / size)} {unit}"


def share(part: float) -> str:
    """A share in percent. Less than all never reads as 100 %."""
    percent = 100 * part
    if 99.95 <= percent < 100:  # noqa: PLR2004 - it would be rounded up
        return "99.9 %"
    return "100 %" if percent == 100 else f"{percent:.1f} %"  # noqa: PLR2004 - the whole


def money(amount: Decimal) -> str:
    """Dollars; below one with four decimal places, below 0.0001 with all."""
    if amount >= 1 or not amount:
        return f"${amount:,.2f}"
    return f"${amount:.4f}" if amount >= SMALL else f"${amount.normalize():f}"


def moment(us: int, step_us: int = MINUTE_US) -> str:
    """A date and a time of day in UTC."""
    return f"{datetime.fromtimestamp(us // MICROS_PER_S, UTC):%Y-%m-%d} {clock(us, step_us)}"


def day(us: int) -> str:
    return datetime.fromtimestamp(us // MICROS_PER_S, UTC).strftime("%d %b").lstrip("0")


def clock(us: int, step_us: int = MINUTE_US) -> str:
    """A time of day in UTC, with the digits that times `step_us` apart need."""
    time = datetime.fromtimestamp(us // MICROS_PER_S, UTC)
    if step_us < MICROS_PER_S:
        return f"{time:%H:%M:%S}.{us % MICROS_PER_S // TENTH_US}"
    return f"{time:%H:%M}" if step_us >= MINUTE_US and not us % MINUTE_US else f"{time:%H:%M:%S}"


def width(step_us: int) -> str:
    """The width of a column in words: `hour`, `5 minutes`."""
    size, unit = next(
        ((size, unit) for size, unit in _LONG_UNITS if step_us % size == 0), (MICROS_PER_S, "second")
    )
    n = step_us / size
    return unit if n == 1 else f"{n:g} {unit}s"


def label(text: str, characters: int = LABEL_MAX) -> str:
    """A name of at most `characters`, with its middle left out."""
    if len(text) <= characters:
        return text
    tail = (characters - 1) // 3
    return f"{text[: characters - 1 - tail]}…{text[-tail:] if tail else ''}"


def plural(n: int, word: str) -> str:
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def _digits(value: float) -> str:
    """Three digits, without trailing zeros."""
    for limit, form in ((9.995, ".2f"), (99.95, ".1f")):
        if value < limit:
            text = format(value, form)
            return text.rstrip("0").rstrip(".")
    return f"{value:,.0f}"
