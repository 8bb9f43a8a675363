"""Checks of arguments before anything is sent. Each returns the argument, or raises `InvalidMessage`."""

import math
from typing import Any

import msgspec

from postroom.errors import InvalidMessage, shown

_encode = msgspec.json.Encoder().encode


def text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} must be a text, not {shown(value)}")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidMessage(f"{name} holds lone surrogates, which are not Unicode text")
    return value


def count(name: str, number: int, *, least: int = 0) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidMessage(f"{name} must be a whole number, {least} or more, not {shown(number)}")
    return number


def seconds(name: str, value: float) -> float:
    if not _is_number(value) or not 0 <= value < float("inf"):
        raise InvalidMessage(f"{name} must be a number of seconds, 0 or more, not {shown(value)}")
    return value


def positive_seconds(name: str, value: float) -> float:
    if not _is_number(value) or not 0 < value < float("inf"):
        raise InvalidMessage(f"{name} must be a number of seconds above 0, not {shown(value)}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def token(value: str) -> str:
    """A token that fits into a header. The error does not show the token."""
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value:
        raise InvalidMessage("token must be printable ASCII")
    return value


def json_bytes(name: str, value: Any) -> bytes:
    try:
        data = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"{name} cannot be written as JSON: {_encoding_fault(error)}") from None
    # msgspec writes null for NaN and infinity.
    if data.find(b"null") >= 0 and not _is_finite(msgspec.to_builtins(value)):
        raise InvalidMessage(f"{name} holds NaN or an infinite number, which JSON cannot hold")
    return data


def _is_finite(value: Any) -> bool:
    """Whether no number in a nested value is NaN or infinite. Without recursion: values may be deep."""
    level = [value]
    while level:
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            return False
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return True


def _encoding_fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return "it holds lone surrogates, which are not Unicode text"
    if str(error).startswith("Only dicts with"):
        return "it holds a dict with a key that is not text"
    kind = str(error).removeprefix("Encoding objects of type ").removesuffix(" is unsupported")
    return str(error) if kind == str(error) else f"it holds a value of type {kind}"
