"""Decoders for JSON that other programs wrote, and limits that are checked before anything is decoded.

Rule 1: input that cannot be decoded raises `msgspec.DecodeError` with a plain reason: wrong syntax, types,
        encoding or nesting. A `RecursionError` never leaves this module.
Rule 2: a decoded value of an open type is nested at most `NESTING_MAX` levels deep, so that every later step
        (redaction, encoding, printing) can walk it.
Rule 3: the checks of undecoded JSON look at bytes alone, and build no object for a value. Their counts are
        exact up to the place where a decoder would stop.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from postroom.errors import InvalidMessage

JSON_ELEMENTS_MAX: Final = 200_000
"""Commas, colons and opening brackets outside of strings. Decoding them takes less than 50 ms, for which no
other thread runs."""
PIECE_BYTES: Final = 64 * 1024
"""Bytes that are counted at once. Other threads can run between two pieces."""
NESTING_MAX = 100  # levels of lists and objects in a value whose type is open
TOO_DEEP = f"it is nested deeper than {NESTING_MAX} levels"
NOT_UTF8 = "it is not UTF-8"

_ELEMENTS: Final = b",:[{"
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # signed: 1 level down, or 1 up

T = TypeVar("T")

ReadValue: TypeAlias = Callable[[bytes], Any]
"""What a view makes of a stored JSON value."""
decoded_value: Final[ReadValue] = msgspec.json.Decoder().decode
_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode


def raw_value(data: bytes) -> msgspec.Raw | None:
    """The JSON of a value with its syntax checked, for a reply that passes it on. None for null."""
    return None if data == b"null" else _raw(data)


def guarded(
    decode: Callable[[bytes], T], open_part: Callable[[T], Any] | None = None
) -> Callable[[bytes], T]:
    """The decoder with `DecodeError` as its only error. `open_part` returns the value of an open type."""

    def decoded(data: bytes) -> T:
        try:
            found = decode(data)
        except RecursionError:
            raise msgspec.DecodeError(TOO_DEEP) from None
        except UnicodeDecodeError:
            raise msgspec.DecodeError(NOT_UTF8) from None
        if open_part is not None and is_deep(open_part(found)):
            raise msgspec.DecodeError(TOO_DEEP)
        return found

    return decoded


def is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than `NESTING_MAX` deep. Computed without recursion."""
    inner = [value]
    for _ in range(NESTING_MAX + 1):
        nested = [one for one in inner if isinstance(one, (dict, list))]
        if not nested:
            return False
        inner = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]
    return True


# ---- before anything is decoded --------------------------------------------------------------------


def check_json(what: str, data: bytes, depth_max: int, elements_max: int = JSON_ELEMENTS_MAX) -> None:
    """Raise `InvalidMessage` for JSON that has too many elements or levels to be decoded."""
    has_few = len(data) <= elements_max or _count(data, _ELEMENTS) <= elements_max
    if has_few and _count_brackets(data) <= depth_max:
        return
    for size in sizes(data):
        if size.depth > depth_max:
            raise InvalidMessage(f"{what} is nested more than {depth_max} levels deep")
        if size.elements > elements_max:
            raise InvalidMessage(
                f"{what} has more than {elements_max} JSON elements (values and names of fields): "
                "send less in one call, or data in one string"
            )


def is_nested_deeper(data: bytes, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    return _count_brackets(data) > levels and any(size.depth > levels for size in sizes(data))


class Size(NamedTuple):
    """Counts of a part of a JSON text, strings excluded."""

    elements: int
    depth: int


def sizes(data: bytes) -> Iterator[Size]:
    """The size of the text up to the end of each piece."""
    elements = level = deepest = 0
    for piece in _outside_of_strings(data):
        steps = memoryview(piece.translate(_STEPS, _NO_BRACKETS)).cast("b")
        levels = [*accumulate(steps, initial=level)]
        level, deepest = levels[-1], max(deepest, *levels)
        elements += _count(piece, _ELEMENTS)
        yield Size(elements, deepest)


def _count_brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _count(data: bytes, wanted: bytes) -> int:
    return len(data) - len(data.translate(None, wanted))


def _outside_of_strings(data: bytes) -> Iterator[bytes]:
    """Each piece without its strings."""
    start, is_in_string = 0, False
    while start < len(data):
        piece = data[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character belongs to it
            piece = data[start : start + PIECE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
