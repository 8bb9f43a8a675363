"""msgspec's validation errors as sentences for users, without its type names and paths such as `$.limit`.

Rule 1: a sentence begins with the field, named as the caller wrote it.
Rule 2: an error text that is not known here is quoted unchanged, so that no reason is lost.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from postroom.errors import NAME_RULE, shown

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_BOUNDS = {"<=": "at most {}", ">=": "at least {}", "<": "less than {}", ">": "more than {}"}
_UNKNOWN_FIELD = r"Object contains unknown field `(.+)`"
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


def field_fault(error: msgspec.ValidationError, whole: str, kind: Any = None) -> str:
    """Why a value is invalid. `whole` names the value, `kind` is its expected type."""
    text = str(error)
    found = _PLACE.search(text)
    path = found[1] if found else ""
    said = text[: found.start()] if found else text
    for pattern, sentence in _SENTENCES:
        if match := re.fullmatch(pattern, said, re.DOTALL):
            more = _known_fields(kind, path) if pattern == _UNKNOWN_FIELD else _choices(kind, path)
            return f"{path or whole} {sentence(match)}{more}"
    return f"{path or whole} is invalid: {said}"


def _wrong_type(match: re.Match[str]) -> str:
    wanted = [_WORDS.get(name, name) for name in match[1].split(" | ")]
    return f"must be {' or '.join(wanted)}, not {_WORDS.get(match[2], match[2])}"


def _wrong_length(match: re.Match[str]) -> str:
    unit = "characters" if match[1] == "str" else "items"
    return f"must have {_BOUNDS[match[2]].format(match[3])} {unit}"


def _out_of_bounds(match: re.Match[str]) -> str:
    return f"must be {_BOUNDS[match[2]].format(match[3].removesuffix('.0'))}"


_SENTENCES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"Object missing required field `(.+)`", lambda match: f"lacks the field {shown(match[1])}"),
    (
        _UNKNOWN_FIELD,
        lambda match: f"has a field {shown(match[1])}, which is not known",
    ),
    (r"Expected `([^`]+)`, got `([^`]+)`", _wrong_type),
    (r"Expected `(\w+)` of length (<=|>=) (\d+)", _wrong_length),
    (r"Expected `(\w+)` (<=|>=|<|>) (\S+)", _out_of_bounds),
    (r"Expected `str` matching regex .+", lambda _: f"is not allowed: use {NAME_RULE}"),
    (r"Invalid enum value (.+)", lambda match: f"cannot be {match[1]}"),
    (r"(?:Number|Integer value) out of range", lambda _: "is too large a number"),
)


def _fields(kind: Any) -> dict[str, msgspec.inspect.Type]:
    """The fields of a struct by name; none for another type."""
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return {}
    info = msgspec.inspect.type_info(kind)
    return {field.encode_name: field.type for field in getattr(info, "fields", ())}


def _known_fields(kind: Any, path: str) -> str:
    """The fields of the whole value. Those of a part of the value are not listed."""
    if path or not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return ""
    return f": the fields are {', '.join(_fields(kind))}" if _fields(kind) else ": it takes no fields"


def _choices(kind: Any, path: str) -> str:
    """The allowed values of the field, when its type is a list of words."""
    found = _fields(kind).get(path)
    for part in getattr(found, "types", (found,)):
        if isinstance(part, msgspec.inspect.LiteralType):
            return f": it is one of {', '.join(map(str, part.values))}"
    return ""


def unencodable(error: Exception) -> str:
    """Why a value cannot be written as JSON."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return "it holds lone surrogates, which are not Unicode text"
    if match := re.fullmatch(r"Encoding objects of type (.+) is unsupported", str(error)):
        return f"it holds a value of type {match[1]}"
    if str(error).startswith("Only dicts with"):
        return "it holds a dict with a key that is not text"
    return str(error)
