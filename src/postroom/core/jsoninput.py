"""Decoders for JSON that other programs wrote.

Rule 1: input that cannot be decoded raises `msgspec.DecodeError` with a plain reason: wrong syntax, types,
        encoding or nesting. A `RecursionError` never leaves this module.
Rule 2: a decoded value of an open type is nested at most `NESTING_MAX` levels deep, so that every later step
        (redaction, encoding, printing) can walk it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

NESTING_MAX = 100  # levels of lists and objects in a value whose type is open
TOO_DEEP = f"it is nested deeper than {NESTING_MAX} levels"
NOT_UTF8 = "it is not UTF-8"

T = TypeVar("T")


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


def is_deep(value: Any, levels: int = NESTING_MAX) -> bool:
    """Whether lists and objects are nested more than `levels` deep. Computed without recursion."""
    inner = [value]
    for _ in range(levels + 1):
        nested = [one for one in inner if isinstance(one, (dict, list))]
        if not nested:
            return False
        inner = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]
    return True
