"""Triggers: cheap tests of the whole text that decide which rules must run. Most texts trigger none.

Rule 1: a trigger may fire without a match, but every match of a group fires its trigger, even in JSON text
        with escape sequences. Triggers are much cheaper than the rules.
Rule 2: triggers report offsets: every match is in the same string as a reported offset.
"""

import re
from collections.abc import Sequence
from typing import AnyStr, Final, NamedTuple

from postroom.core.redaction.checks import IBAN_CHARS
from postroom.core.redaction.rules import (
    ADDRESSES,
    BEARERS,
    BLOCKS,
    CARDS,
    CLOUDS,
    EMAILS,
    ENCODED,
    EVERYTHING,
    FIELDS,
    IBANS,
    JWTS,
    LINKS,
    NAMED,
    OPAQUE,
    PAIRS,
    PHONES,
    PREFIXED,
    PROGRAMS,
    SHOWN,
    SSNS,
    VENDORS,
    WORDED,
)
from postroom.core.redaction.signs import LOW, SHAPE, Signs
from postroom.core.redaction.texts import ENCODED_CHAR

# A gap that is not an ASCII character. The views do not show it, so it activates every rule.
_RARE: Final = r"(?:\xc2\xa0|\xe2\x80[\x87\x89\x90-\x95\xaf]|\\u(?:00[Aa]0|20(?:0[79]|1[0-5]|2[Ff])))"
_RARE_GAP: Final = re.compile(rf"{_RARE}[ .-]?[0-9(]|[0-9)][ .-]?{_RARE}")
_ESCAPED: Final = re.compile(r"\\(?:/|u00[2-7])")

# Searched in `low`.
_NEXT: Final = (
    r"[\"'\\]{1,8}[ \t\n\r]*,[ \t\n\r]*[bu]?[\"'\\]"  # in a list of arguments: from an option to its value
)
_URL: Final = (
    r"://(?<=[ '\"\\]httk{0}://)(?<!:\"httk{0}://)(?<!: \"httk{0}://)()"  # in a command, not in a member
)
_worded: Final = re.compile(  # `_WORDS` maps the group that matched to groups of rules
    rf"k(?:e(?:y|n(?<=token))(?:{_NEXT}()|-[0a-f]{{32}}()|=(?<=\.key=)(?<!aki\.key=)()"
    rf"|(?: is)? ['`]?{SHOWN}{{16}}|(?<=--token)|(?<=-key) |-0|sib-)"
    r"|-(?:(?:(?<=gocskk-)|(?<=[rm]ak-)|(?<=sq0atk-)|(?<=sq0csk-))()"
    rf"|(?<=kklk-)|(?<=sk-)(?<!task-)(?<!isk-){OPAQUE}{{16}})"
    rf"|a(?:ss(?:word |(?:word|wd|khrase)?{_NEXT}()|(?:wd|khrase)? ()|:())|t-(?<=glkat-)|kk-)"
    r"|ok[abeorsk]-|yki-|hone[a-z .:#]{0,12}[0\[]()"
    rf"|wd?(?:{_NEXT}()|(?<=-kw) ()|(?<=-kwd) ())"
    rf"|s(?:[./](?<=hooks.)()|{_URL.format('s')})|\.(?:office|(?:kt|st|ct|sa)\.)()"
    rf"|i(?<=daki)[0a-f]{{20}}()|rivate-lines: ()"
    rf"|ff(?<=atatt0kff)()|{_URL.format('')})"
).search
_KEYED: Final = VENDORS | WORDED
_OPTIONS: Final = PAIRS | VENDORS | WORDED
_WORDS: Final = (
    WORDED, _OPTIONS, _KEYED, _KEYED, _KEYED, _OPTIONS, _KEYED, _KEYED, PHONES, _OPTIONS, _KEYED, _KEYED,
    _KEYED, VENDORS, _KEYED, _KEYED, BLOCKS, _KEYED, VENDORS,
)  # fmt: skip
_DOTTED: Final = re.compile(r"\.0{1,3}\.0")

_LIST: Final = re.compile(r"\[(?:[\"'\\ \t\r\n]|b[\"'])")  # a list or a tuple that begins with a string
_TAIL: Final = re.compile(r"\.[a-z0.-]{20}")  # of a key with a prefix, such as `ghp_` or `hvs.`

# Searched in the text itself.
_CLOUD: Final = re.compile(rf"A(?:(?:KIA|SIA|ROA|IDA|BIA|CCA|Iza|A(?<=EAA)){OPAQUE}{{16}}|UTH ())")
_OPTION: Final = re.compile(
    r"-(?:u(?:s[0-9]|(?:ser)?[ \"'\\])|[ap][ \"'\\]|secret[ \"'\\]|[fikLsSv]{1,4}u[ \"'\\])"
)
_HASH: Final = re.compile(r"\$[A-Za-z0-9./+=,$_-]{16}")
_ASSIGNED: Final = re.compile(r"value[\"'\\]{0,8}(?:[ \t]|\\{1,7}t){0,4}=")  # searched in `low`
_PLUS: Final = re.compile(r"\+[1-9](?:[ ()./-]{0,2}[0-9]){7}")

# Searched in `shape`.
_COUNTRY: Final = re.compile(b"AA00")
_RUN: Final = b"0" * 10
_CARD_RUN: Final = b"0" * 13
_CARD_STARTS: Final = "23456"
_LETTERS: Final = frozenset(b"Aabcdefghijklmnopqrstuvwxyz")
_WORD: Final = _LETTERS | {ord("0")}
# Everything that consists of groups of digits; `_GROUPS` maps the group that matched to groups of rules. The
# last one is a gap of two characters.
_grouped: Final = re.compile(
    rb"0-(?:0(?:000(?:-0000(?<=0000-0000-0000)()|-0(?<=0000-0000-0)()|(?<=-000-0000)()|(?<=000-00-0000)()"
    rb"|00(?:-0000(?<=0000-000000-0000)|0(?<=000000-0000000))())"
    rb"|0{0,2}-0(?:(?<=0-00-0)0(?:-00){3}-0()|(?<=0-0-0)(?:-0){10}()|0{0,2}-0()))|-000(?<=000--000)())"
).search
_DIGITS: Final = CARDS | ADDRESSES
_GROUPS: Final = (0, CARDS | IBANS, IBANS, PHONES, SSNS, CARDS, _DIGITS, _DIGITS, ADDRESSES, EVERYTHING)
_IBAN_HEAD: Final = re.compile(r"(?<![A-Za-z0-9])([A-Za-z]{2})(?:[0-9]{2}[A-Za-z0-9]{0,8})?$")
_IBAN_HEAD_CHARS: Final = 12  # at most, before ten digits in a row


class TriggerHits(NamedTuple):
    """The result of the triggers for one text."""

    active: int
    """The groups that may match in the text, or in a string within its JSON."""
    raw: str = ""
    """The text, one character per byte."""
    signs: Sequence[int] = ()
    """Offsets of possible assignments to a field."""
    places: Sequence[int] = ()
    """Offsets of all other possible matches."""


NOTHING: Final = TriggerHits(0)


class Triggers:
    """Runs the triggers. `always` are the groups that have none and are always active."""

    def __init__(self, signs: Signs, always: int) -> None:
        self._signs = signs
        self._always = always

    def scan(self, text: str) -> TriggerHits:
        """The groups that may match; `NOTHING` means that none can."""
        is_ascii = text.isascii()
        data = text.encode() if is_ascii else text.encode("utf-8", "surrogatepass")
        raw = text if is_ascii else data.decode("latin-1")
        escapes = "\\" in raw
        if escapes and _ESCAPED.search(raw):
            return TriggerHits(EVERYTHING, raw)
        if (raw is not text or (escapes and "\\u" in raw)) and _RARE_GAP.search(raw):
            return TriggerHits(EVERYTHING, raw)
        low = data.translate(LOW).decode("latin-1")
        signs, places, values = self._signs.find(raw, low)
        active = ADDRESSES | PROGRAMS if places else 0
        if values:
            places += values
            active |= NAMED | PAIRS if self._signs.names_value(low) else NAMED
        active |= _keys(raw, low, places) | _numbers(raw, low, data.translate(SHAPE), places)
        if "@" in raw or "=" in raw or "%" in raw:
            active |= _links(raw, places)
            if "=" in raw and (match := _ASSIGNED.search(low)):
                active |= NAMED
                places += _starts(_ASSIGNED, low, match)
        if _LIST.search(low) or ("=" in raw and '="' in raw):
            listed = self._signs.listed(low)
            if listed:
                places += listed
                active |= NAMED | PAIRS
            elif active & PROGRAMS:
                active |= PAIRS
        active |= self._always | FIELDS if signs else self._always
        return TriggerHits(active, raw, signs, places) if active else NOTHING


def _keys(raw: str, low: str, places: list[int]) -> int:  # noqa: C901, PLR0912 - loops take longer
    active = 0
    match = _worded(low)
    while match:
        active |= _WORDS[match.lastindex or 0]
        places.append(match.start())
        match = _worded(low, match.start() + 1)
    if match := _TAIL.search(low):
        active |= PREFIXED | VENDORS
        places += _starts(_TAIL, low, match)
    if "earer " in low:
        active |= BEARERS
        places += _every("earer ", low)
    if "A" in raw:
        if match := _CLOUD.search(raw):
            active |= CLOUDS | WORDED
            places += _starts(_CLOUD, raw, match)
        if ":AA" in raw:
            active |= VENDORS
            places += _every(":AA", raw)
    if "J" in raw and "eyJ" in raw:
        active |= JWTS
        places += _every("eyJ", raw)
    if "B" in raw and "asic " in low:
        active |= BEARERS
        places += _every("asic ", low)
    if "B" in raw and "--BEGIN " in raw:
        active |= BLOCKS
        places += _every("--BEGIN ", raw)
    if match := _OPTION.search(raw):
        active |= VENDORS | WORDED | PROGRAMS
        places += _starts(_OPTION, raw, match)
    if "~" in raw and "Q~" in raw:
        active |= VENDORS
        places += _every("Q~", raw)
    if "'" in raw and "dentified by" in low:
        active |= WORDED
        places += _every("dentified by", low)
    if "$" in raw and (match := _HASH.search(raw)):
        active |= VENDORS
        places += _starts(_HASH, raw, match)
    if "K" in raw:
        if "SK" in raw:
            active |= VENDORS
            places += _every("SK", raw)
        if "HRKU-" in raw:
            active |= WORDED
            places += _every("HRKU-", raw)
    if "q" in raw and "mysql" in raw:
        active |= PROGRAMS
        places += _every("mysql", raw)
    return active


def _numbers(raw: str, low: str, shape: bytes, places: list[int]) -> int:
    """Triggers for everything that consists of digits."""
    active = 0
    match = _grouped(shape)
    while match:
        group = _GROUPS[match.lastindex or 0]
        if (group != ADDRESSES or _DOTTED.search(low, *match.span())) and (
            group != IBANS or raw[match.start() + 1] == " "
        ):
            active |= group
            places.append(match.start())
        match = _grouped(shape, match.start() + 1)
    at = shape.find(_RUN)
    # With escapes, addresses or terminal colours in the text, the character before a number or an IBAN may
    # not belong to the same word.
    escapes = at >= 0 and ("\\" in raw or "%" in raw or "@" in raw or "\x1b" in raw)
    while at >= 0:
        before = shape[at - 1] if at else 0
        if before in _LETTERS and (escapes or _begins_iban(raw, at)):
            active |= IBANS
            places.append(at)
        # Card numbers begin like this; times in microseconds and hashes do not.
        begins = raw[at] in _CARD_STARTS and before not in _WORD
        if (begins or escapes) and shape.startswith(_CARD_RUN, at):
            active |= CARDS
            places.append(at)
        at = shape.find(_RUN, at + len(_RUN))
    if country := _COUNTRY.search(shape):
        active |= IBANS
        places += _starts(_COUNTRY, shape, country)
    if "+" in raw and (plus := _PLUS.search(raw)):
        active |= PHONES
        places += _starts(_PLUS, raw, plus)
    return active


def _begins_iban(raw: str, at: int) -> bool:
    """Whether the word in which ten digits in a row begin starts like an IBAN."""
    before = raw[max(0, at - _IBAN_HEAD_CHARS - 1) : at]
    if len(before) > _IBAN_HEAD_CHARS and before.isalnum() and before.isascii():
        return False  # within a longer word, such as a hash
    head = _IBAN_HEAD.search(raw, max(0, at - _IBAN_HEAD_CHARS), at)
    return head is not None and head[1].upper() in IBAN_CHARS


def _links(raw: str, places: list[int]) -> int:
    active = 0
    for sought, groups in (("@", EMAILS | LINKS), ("%40", EMAILS | LINKS), ("=", LINKS)):
        if sought in raw:
            active |= groups
            places += _every(sought, raw)
    if "%" in raw and (match := ENCODED_CHAR.search(raw)):
        active |= ENCODED
        places += _starts(ENCODED_CHAR, raw, match)
    return active | VENDORS if "@" in raw and "jdbc:" in raw else active


def _every(sought: str, text: str) -> list[int]:
    """All offsets of a text that is known to occur."""
    found = [text.find(sought)]
    while (at := text.find(sought, found[-1] + len(sought))) >= 0:
        found.append(at)
    return found


def _starts(pattern: "re.Pattern[AnyStr]", text: AnyStr, match: "re.Match[AnyStr]") -> list[int]:
    """The offsets of the first match and all later ones."""
    return [match.start(), *(more.start() for more in pattern.finditer(text, match.end()))]
