"""Payloads, the quick way: only the strings in question are touched, and the rest of the text stays as it is.

What is inside a string and what is not is told by counting quotation marks. A rule that looks across one, as
the names of fields do, and an escape mean something only where the text is JSON.
"""

import json
import re
from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

from postroom.core.redaction.rules import CUSTOM, EVERYTHING, PAIRS
from postroom.core.redaction.texts import Texts, encodable
from postroom.core.redaction.triggers import Look
from postroom.core.redaction.values import Values, encode

_SURROGATE: Final = re.compile(r"\\u[Dd][89A-Fa-f]")
_ENDS_NAME: Final = re.compile(r"\"[ \t\n\r]*:")
_CONSTANT: Final = re.compile(r":[ \t\n\r]*(?:null|true|false)")

_decode = json.JSONDecoder().raw_decode


class _NeedsParserError(Exception):
    """The quick way ends here."""


class _Segment(NamedTuple):
    """What stands between two quotation marks."""

    at: int
    """The first place of interest in it."""
    start: int
    end: int
    inside: bool
    """Whether it is a string, and not what stands between two strings."""


_Edit: TypeAlias = tuple[int, int, str]
"""From where to where, and what stands there then."""


class Splicing:
    """Replaces suspicious strings where they stand."""

    def __init__(self, texts: Texts, values: Values) -> None:
        self._texts = texts
        self._values = values

    def spliced(self, text: str, look: Look) -> str | None:
        """The text with only its suspicious strings redacted, or None when it has to be parsed."""
        raw = look.raw
        escapes = "\\" in raw
        if look.woken & (CUSTOM | PAIRS) or (escapes and _SURROGATE.search(raw)):
            return None
        if (look.signs or escapes) and not _is_json(text):
            return None
        quotes = _unescaped(raw) if escapes else raw
        edits: list[_Edit] = []
        try:
            for segment in _segments(quotes, look):
                if edits and segment.start <= edits[-1][1]:
                    continue  # masked already
                edit = self._masking(raw, quotes, segment) if segment.at in look.signs else None
                edit = edit or self._editing(raw, quotes, segment, look.woken)
                if edit:
                    edits.append(edit)
        except _NeedsParserError:
            return None
        return _edited(raw, edits) if edits else text

    def _editing(self, raw: str, quotes: str, segment: _Segment, woken: int) -> _Edit | None:
        """What a string becomes, if anything else."""
        literal = raw[segment.start : segment.end]
        found = _decoded(literal)
        redacted = self._texts.settled(found, self._texts.awake(woken))
        if redacted is found:
            return None
        if not segment.inside or _ENDS_NAME.match(quotes, segment.end):
            raise _NeedsParserError  # a bare number, or a name
        return segment.start, segment.end, redacted if literal is found else _literal(redacted)

    def _masking(self, raw: str, quotes: str, segment: _Segment) -> _Edit | None:
        """What the string behind a colon becomes, if that is what the name in front of it demands."""
        if segment.inside:
            return None
        name_end = segment.start - 1
        _, secret = self._values.judged(_decoded(raw[quotes.rfind('"', 0, name_end) + 1 : name_end]))
        if not secret:
            return None
        behind = quotes[segment.start : segment.end].strip()
        if behind != ":":
            if _CONSTANT.match(behind):
                return None
            raise _NeedsParserError  # a number, a list or an object
        start = segment.end + 1
        end = quotes.index('"', start)
        return start, end, self._values.masked(_decoded(raw[start:end]), 0)


def suspects(look: Look) -> Collection[str] | None:
    """The strings of a payload that are worth a look; None is all of them."""
    if look.woken == EVERYTHING or look.woken & CUSTOM:
        return None
    quotes = _unescaped(look.raw) if "\\" in look.raw else look.raw
    return {_decoded(look.raw[segment.start : segment.end]) for segment in _segments(quotes, look)}


def _segments(quotes: str, look: Look) -> list[_Segment]:
    """Each segment that has a place of interest in it, once, in order."""
    found: list[_Segment] = []
    counted = done = 0
    inside = False
    for at in sorted([*look.signs, *look.places]):
        if at >= done:
            inside ^= quotes.count('"', counted, at) & 1 == 1
            counted = at
            end = quotes.find('"', at)
            done = len(quotes) if end < 0 else end
            found.append(_Segment(at, quotes.rfind('"', 0, at) + 1, done, inside))
    return found


def _edited(raw: str, edits: list[_Edit]) -> str:
    kept: list[str] = []
    done = 0
    for start, end, new in edits:
        kept += raw[done:start], new
        done = end
    kept.append(raw[done:])
    text = "".join(kept)
    return text if text.isascii() else text.encode("latin-1").decode()


def _is_json(text: str) -> bool:
    try:
        if _decode(text)[1] != len(text):
            json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _decoded(literal: str) -> str:
    """What stands between two quotation marks of a JSON text, of which each character is a byte."""
    text = literal if literal.isascii() else literal.encode("latin-1").decode()
    if "\\" not in text:
        return text
    decoded: str = json.loads(f'"{text}"', strict=False)
    return decoded


def _literal(text: str) -> str:
    literal = encode(text)[1:-1]
    return literal if literal.isascii() else encodable(literal).encode().decode("latin-1")


def _unescaped(raw: str) -> str:
    """The text with no quotation marks but those around strings."""
    return raw.replace("\\\\", "__").replace('\\"', "__")
