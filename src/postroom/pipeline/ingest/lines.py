"""Whether the lines of a segment are plain, so that Spark's JSON reader reads them without a loss.

The reader silently drops a field that it has no column for, rounds an amount of money, and accepts any time
and any schema. Therefore a decoder checks every line first, without creating its values.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from postroom.core.events import SCHEMA, TS_US_MAX
from postroom.pipeline.schema import EVENTS, REQUIRED

_TYPES: Final[dict[str, Any]] = {
    "ts_us": Annotated[int, msgspec.Meta(ge=0, le=TS_US_MAX)],
    "schema": Annotated[int, msgspec.Meta(le=SCHEMA)],
}
"""Other fields are not decoded. The reader checks their types."""
MONEY_FIELD: Final = "cost_usd"
_EXACT: Final = re.compile(rb"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
"""An amount that the money column holds exactly. Other amounts may be exact too; Spark checks them."""


def _field(name: str) -> tuple[Any, ...]:
    kind = _TYPES.get(name, msgspec.Raw)
    return (name, kind) if name in REQUIRED else (name, kind, None)


PlainLine: Final = msgspec.defstruct(
    "PlainLine", [_field(name) for name in EVENTS.names], forbid_unknown_fields=True, gc=False
)
_decode: Final = msgspec.json.Decoder(PlainLine).decode


def are_plain(segment: Path) -> bool:
    """Whether every line of a file is plain. Blank lines are ignored."""
    with segment.open("rb") as file:
        return all(_is_plain(line) for line in file if not line.isspace())


def _is_plain(line: bytes) -> bool:
    try:
        amount = getattr(_decode(line), MONEY_FIELD)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return amount is None or _EXACT.fullmatch(amount) is not None
