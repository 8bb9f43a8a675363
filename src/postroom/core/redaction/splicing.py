"""The fast path for payloads: only suspicious strings are replaced; the rest of the text stays unchanged.

Counting quotation marks tells whether a position is inside a string. Field names and escape sequences are
only meaningful in JSON, so a text with either is checked to be JSON first.
"""

import json
import re
from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

from postroom.core.redaction.rules import CUSTOM, ENCODED, EVERYTHING, NAMED, PAIRS, PROGRAMS, VENDORS, WORDED
from postroom.core.redaction.texts import Texts, encodable
from postroom.core.redaction.triggers import TriggerHits
from postroom.core.redaction.values import JsonValues, encode

_SURROGATE: Final = re.compile(r"\\u[Dd][89A-Fa-f]")
_ENDS_NAME: Final = re.compile(r"\"[ \t\n\r]*:")
_CONSTANT: Final = re.compile(r":[ \t\n\r]*(?:null|true|false)")

_decode = json.JSONDecoder().raw_decode


_ACROSS: Final = ENCODED | NAMED | PROGRAMS | VENDORS | WORDED  # their matches may contain quotation marks


class _NeedsParserError(Exception):
    """The fast path cannot handle this payload."""


class _Segment(NamedTuple):
    """The text between two quotation marks."""

    at: int
    """The first offset in it that a trigger reported."""
    start: int
    end: int
    inside: bool
    """Whether it is a string, rather than the text between two strings."""


_Edit: TypeAlias = tuple[int, int, str]
"""Start, end, and the replacement."""


class Splicing:
    """Replaces suspicious strings in place."""

    def __init__(self, texts: Texts, values: JsonValues) -> None:
        self._texts = texts
        self._values = values

    def spliced(self, text: str, hits: TriggerHits) -> str | None:
        """The text with only its suspicious strings redacted, or None when it has to be parsed."""
        raw = hits.raw
        escapes = "\\" in raw
        if hits.active & (CUSTOM | PAIRS) or (escapes and _SURROGATE.search(raw)):
            return None
        if (hits.signs or escapes or hits.active & _ACROSS) and not _is_json(text):
            return None
        quotes = _unescaped(raw) if escapes else raw
        edits: list[_Edit] = []
        try:
            for segment in _segments(quotes, hits):
                if edits and segment.start <= edits[-1][1]:
                    continue  # masked already
                edit = self._masking(raw, quotes, segment) if segment.at in hits.signs else None
                edit = edit or self._editing(raw, quotes, segment, hits.active)
                if edit:
                    edits.append(edit)
        except _NeedsParserError:
            return None
        return _edited(raw, edits) if edits else text

    def _editing(self, raw: str, quotes: str, segment: _Segment, active: int) -> _Edit | None:
        """The edit that redacts a string; None when it stays unchanged."""
        literal = raw[segment.start : segment.end]
        found = _decoded(literal)
        redacted = self._texts.settled(found, self._texts.active_rules(active))
        if redacted is found:
            return None
        if not segment.inside or _ENDS_NAME.match(quotes, segment.end):
            raise _NeedsParserError  # a bare number, or a name
        plain = literal is found and '"' not in redacted and "\\" not in redacted
        return segment.start, segment.end, redacted if plain else _literal(redacted)

    def _masking(self, raw: str, quotes: str, segment: _Segment) -> _Edit | None:
        """The edit that masks the string after a colon; None when the name before it is not secret."""
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


def suspects(hits: TriggerHits) -> Collection[str] | None:
    """The strings of a payload that may need redaction; None stands for all of them."""
    if hits.active == EVERYTHING or hits.active & CUSTOM:
        return None
    quotes = _unescaped(hits.raw) if "\\" in hits.raw else hits.raw
    return {_decoded(hits.raw[segment.start : segment.end]) for segment in _segments(quotes, hits)}


def _segments(quotes: str, hits: TriggerHits) -> list[_Segment]:
    """Each segment with an offset that a trigger reported, once, in order."""
    found: list[_Segment] = []
    counted = done = 0
    inside = False
    for at in sorted([*hits.signs, *hits.places]):
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
    """Decode a string literal, without its quotation marks, from a JSON text with one character per byte."""
    text = literal if literal.isascii() else literal.encode("latin-1").decode()
    if "\\" not in text:
        return text
    decoded: str = json.loads(f'"{text}"', strict=False)
    return decoded


def _literal(text: str) -> str:
    literal = encode(text)[1:-1]
    return literal if literal.isascii() else encodable(literal).encode().decode("latin-1")


def _unescaped(raw: str) -> str:
    """The text with escaped quotation marks masked, so that only those around strings remain."""
    return raw.replace("\\\\", "__").replace('\\"', "__")
