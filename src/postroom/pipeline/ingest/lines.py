"""The hash of a segment, and whether its lines are plain, so that Spark's JSON reader loses nothing.

The reader silently drops a field that it has no column for, rounds an amount of money, and accepts any time
and any schema. Therefore a decoder checks every line first, without creating its values.

Rule: these functions are sent to executors by value. They use the standard library, Arrow, msgspec and
constants of this module. Without msgspec no line counts as plain, and Spark validates each of them.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from postroom.core.formats.events import SCHEMA, TS_US_MAX
from postroom.pipeline.schema import EVENTS, REQUIRED

FIELDS: Final = tuple(EVENTS.names)
KINDS: Final = {field.name: field.dataType.typeName() for field in EVENTS.fields}
UNDECODED: Final = ("detail", "ts_us", "schema")
"""Any JSON, and numbers with limits of their own."""
NEEDED: Final = tuple(REQUIRED)
NEWEST_SCHEMA: Final = SCHEMA
TIME_MAX_US: Final = TS_US_MAX
MONEY_FIELD: Final = "cost_usd"
EXACT: Final = rb"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
"""An amount that the money column holds exactly. Other amounts may be exact too; Spark checks them."""


class Inspected(NamedTuple):
    """What was found in the bytes of a segment."""

    lines: int
    """Without blank lines."""
    is_plain: bool
    """Whether Spark's JSON reader reads all lines without a loss."""
    sha256: str


def inspect(data: bytes) -> tuple[int, bool, str]:
    """Inspect the bytes of a segment; returns the fields of `Inspected`."""
    import hashlib  # noqa: PLC0415 - an executor has only this function

    lines = [line for line in data.split(b"\n") if line and not line.isspace()]
    return len(lines), all(are_plain(lines)), hashlib.sha256(data).hexdigest()


def are_plain(lines: Iterable[bytes], *, strict: bool = False) -> Iterator[bool]:
    """Whether each line is plain. If `strict`, all of its values have the types of their columns, too."""
    try:
        import msgspec  # noqa: PLC0415 - an executor may lack it
    except ImportError:
        yield from (False for _ in lines)
        return
    decode = msgspec.json.Decoder(_plain_line(strict=strict)).decode
    exact = re.compile(EXACT).fullmatch
    for line in lines:
        try:
            amount = getattr(decode(line), MONEY_FIELD)
            is_plain = amount is None or exact(amount) is not None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            is_plain = False
        yield is_plain


def _plain_line(*, strict: bool) -> Any:
    """A struct of the known fields. Unless `strict`, most are not decoded: the reader checks their types."""
    import msgspec  # noqa: PLC0415 - see above

    types = {"string": str, "long": _whole_number(63), "integer": _whole_number(31)} if strict else {}
    kinds: dict[str, Any] = {
        **{
            name: types[kind] if name in NEEDED else types[kind] | None
            for name, kind in KINDS.items()
            if kind in types and name not in UNDECODED
        },
        "ts_us": Annotated[int, msgspec.Meta(ge=0, le=TIME_MAX_US)],
        "schema": Annotated[int, msgspec.Meta(le=NEWEST_SCHEMA)],
    }
    fields: list[Any] = [
        (name, kinds.get(name, msgspec.Raw), *(() if name in NEEDED else (None,))) for name in FIELDS
    ]
    return msgspec.defstruct("PlainLine", fields, forbid_unknown_fields=True, gc=False)


def _whole_number(bits: int) -> Any:
    import msgspec  # noqa: PLC0415 - see above

    return Annotated[int, msgspec.Meta(ge=-(2**bits), le=2**bits - 1)]


def inspect_lines(lines: pa.Array) -> pa.Array:
    """Whether the reader surely reads each line of a column without a loss, for `arrow_udf`."""
    return pa.array([*are_plain(lines.to_pylist(), strict=True)], "bool")


def inspect_files(files: pa.Array) -> pa.Array:
    """Inspect files for `arrow_udf`: a column of their bytes, or of their paths on this machine."""
    found = [inspect(_bytes_of(file.as_py())) for file in files]
    columns = [
        pa.array([lines for lines, _, _ in found], "int64"),
        pa.array([is_plain for _, is_plain, _ in found], "bool"),
        pa.array([sha256 for _, _, sha256 in found], "string"),
    ]
    return pa.StructArray.from_arrays(columns, ["lines", "is_plain", "sha256"])


def _bytes_of(file: bytes | str) -> bytes:
    if isinstance(file, bytes):
        return file
    with open(file, "rb") as opened:  # noqa: PTH123 - an executor has only these functions
        return opened.read()
