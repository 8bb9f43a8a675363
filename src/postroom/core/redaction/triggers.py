"""What is worth a look: a text is looked at as a whole first, and most texts hold nothing.

Rule 1: a trigger may only be too eager. Each test is necessary for a match of its group, also in a JSON text
        with escapes, and much cheaper than the rules.
Rule 2: it tells where: each match lies in the same string as a place that is told.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from postroom.core.redaction.rules import (
    ADDRESSES,
    BEARERS,
    BLOCKS,
    CARDS,
    CLOUDS,
    EMAILS,
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
    SHOWN,
    SSNS,
    VENDORS,
    WORDED,
)
from postroom.core.redaction.signs import Signs
from postroom.core.redaction.views import LOW, SHAPE

# A gap of a sign that is no byte. No view shows it, so it wakes every rule.
_RARE: Final = r"(?:\xc2\xa0|\xe2\x80[\x87\x89\x90-\x95\xaf]|\\u(?:00[Aa]0|20(?:0[79]|1[0-5]|2[Ff])))"
_RARE_GAP: Final = re.compile(rf"{_RARE}[ .-]?[0-9(]|[0-9)][ .-]?{_RARE}")
_ESCAPED: Final = re.compile(r"\\(?:/|u00[2-7])")

# In `low`.
_NEXT: Final = r"\"[ \t\n\r]*,[ \t\n\r]*\"[^\"-]"  # of a list of arguments: an option, and what belongs to it
_URL: Final = (
    r"://(?<=[ '\"\\]httk{0}://)(?<!:\"httk{0}://)(?<!: \"httk{0}://)()"  # of a command, not of a member
)
_worded: Final = re.compile(  # the group that took part says what it may be, as `_WORDS` has it
    rf"k(?:e(?:y|n(?<=token))(?:{_NEXT}()|-[0a-f]{{32}}()|=(?<=_key=)(?<!aki_key=)()"
    rf"|(?: is)? ['`]?{SHOWN}{{16}}|(?<=--token)|(?<=-key) |-0)"
    r"|-(?:(?:(?<=gocskk-)|(?<=[rm]ak-)|(?<=sq0atk-)|(?<=sq0csk-))()"
    rf"|(?<=sk-)(?<!task-)(?<!isk-){OPAQUE}{{16}})"
    rf"|a(?:ss(?:word |(?:word|wd|khrase)?{_NEXT}()|(?:wd|khrase)? ()|:())|t-(?<=glkat-)|kk-)"
    r"|ok[abeorsk]-|yki-|hone[a-z .:#]{0,12}[0(]()"
    rf"|wd?(?:{_NEXT}()|(?<=-kw) ()|(?<=-kwd) ())"
    rf"|s(?:[./](?<=hooks.)()|{_URL.format('s')})|\.(?:office|(?:kt|st|ct|sa)\.)()"
    rf"|i(?<=daki)[0a-f]{{20}}()|rivate-lines: ()| (?<= -k )()"
    rf"|ff(?<=atatt0kff)()|{_URL.format('')})"
).search
_KEYED: Final = VENDORS | WORDED
_OPTIONS: Final = PAIRS | WORDED
_WORDS: Final = (
    WORDED, _OPTIONS, _KEYED, _KEYED, _KEYED, _OPTIONS, _KEYED, _KEYED, PHONES, _OPTIONS, _KEYED, _KEYED,
    _KEYED, VENDORS, _KEYED, _KEYED, BLOCKS, VENDORS, _KEYED, VENDORS,
)  # fmt: skip
_DOTTED: Final = re.compile(r"\.0{1,3}\.0")

# As it is.
_PREFIXED: Final = re.compile(rf"_{OPAQUE}{{20}}")
_CLOUD: Final = re.compile(rf"A(?:KIA|SIA|ROA|IDA|BIA|CCA|Iza){OPAQUE}{{16}}")
_HASH: Final = re.compile(r"\$[A-Za-z0-9./+=,$_-]{16}")
_ASSIGNED: Final = re.compile(r"value[\"'\\]{0,8}(?:[ \t]|\\{1,7}t){0,4}=")  # in `low`
_PLUS: Final = re.compile(r"\+[1-9](?:[ ()./-]{0,2}[0-9]){7}")

# In `shape`.
_COUNTRY: Final = re.compile("AA00")
_CARD_RUN: Final = "0" * 13
_CARD_STARTS: Final = "23456"
_WORD: Final = "0Aabcdefghijklmnopqrstuvwxyz"
# All that is made of groups of digits; the group that took part says what it may be. The last is a gap of two
# signs, which may stand for one.
_grouped: Final = re.compile(
    r"0-(?:0(?:000(?:-0000(?<=0000-0000-0000)()|(?<=-000-0000)()|(?<=000-00-0000)())"
    r"|00000-0000(?<=0000-000000-0000)()|0{0,2}-0{1,3}-0())|-000(?<=000--000)())"
).search
_GROUPS: Final = (0, CARDS, PHONES, SSNS, CARDS, ADDRESSES, EVERYTHING)


class Look(NamedTuple):
    """What a first look at a text has shown."""

    woken: int
    """The groups of which the text, or a string within its JSON, may hold something."""
    raw: str = ""
    """The text, one character a byte."""
    signs: Sequence[int] = ()
    """Where an assignment to a field may be."""
    places: Sequence[int] = ()
    """Where anything else may be."""


NOTHING: Final = Look(0)


class Triggers:
    """Looks at texts. `always` are the groups for which there is no trigger."""

    def __init__(self, signs: Signs, always: int) -> None:
        self._signs = signs
        self._always = always

    def look(self, text: str) -> Look:
        """What the text may hold; `NOTHING` is certain."""
        data = text.encode("utf-8", "surrogatepass")
        raw = text if text.isascii() else data.decode("latin-1")
        escapes = "\\" in raw
        if escapes and _ESCAPED.search(raw):
            return Look(EVERYTHING, raw)
        if (raw is not text or (escapes and "\\u" in raw)) and _RARE_GAP.search(raw):
            return Look(EVERYTHING, raw)
        low = data.translate(LOW).decode("latin-1")
        signs, places, values = self._signs.find(raw, low)
        woken = ADDRESSES if places else 0
        if values:
            places += values
            woken |= NAMED | PAIRS if self._signs.names_value(low) else NAMED
        woken |= _keys(raw, low, places) | _numbers(raw, low, data.translate(SHAPE).decode("latin-1"), places)
        if "@" in raw or "=" in raw or "%" in raw:
            woken |= _links(raw, places)
            if "=" in raw and (match := _ASSIGNED.search(low)):
                woken |= NAMED
                places += _starts(_ASSIGNED, low, match)
        if woken & VENDORS and '"curl"' in raw:
            woken |= PAIRS
        woken |= self._always | FIELDS if signs else self._always
        return Look(woken, raw, signs, places) if woken else NOTHING


def _keys(raw: str, low: str, places: list[int]) -> int:  # noqa: C901, PLR0912 - loops take longer
    woken = 0
    match = _worded(low)
    while match:
        woken |= _WORDS[match.lastindex or 0]
        places.append(match.start())
        match = _worded(low, match.start() + 1)
    if "_" in raw and (match := _PREFIXED.search(raw)):
        woken |= PREFIXED
        places += _starts(_PREFIXED, raw, match)
    if "earer " in low:
        woken |= BEARERS
        places += _every("earer ", low)
    if "A" in raw:
        if match := _CLOUD.search(raw):
            woken |= CLOUDS
            places += _starts(_CLOUD, raw, match)
        if ":AA" in raw:
            woken |= VENDORS
            places += _every(":AA", raw)
    if "J" in raw and "eyJ" in raw:
        woken |= JWTS
        places += _every("eyJ", raw)
    if "G" in raw and "SG." in raw:
        woken |= VENDORS
        places += _every("SG.", raw)
    if "B" in raw and "asic " in low:
        woken |= BEARERS
        places += _every("asic ", low)
    if "B" in raw and "--BEGIN " in raw:
        woken |= BLOCKS
        places += _every("--BEGIN ", raw)
    if "$" in raw and (match := _HASH.search(raw)):
        woken |= VENDORS
        places += _starts(_HASH, raw, match)
    if "K" in raw and "SK" in raw:
        woken |= VENDORS
        places += _every("SK", raw)
    if "q" in raw and "mysql" in raw:
        woken |= VENDORS
        places += _every("mysql", raw)
    return woken


def _numbers(raw: str, low: str, shape: str, places: list[int]) -> int:
    """What is made of digits."""
    woken = 0
    match = _grouped(shape)
    while match:
        group = _GROUPS[match.lastindex or 0]
        if group != ADDRESSES or _DOTTED.search(low, *match.span()):
            woken |= group
            places.append(match.start())
        match = _grouped(shape, match.start() + 1)
    at = shape.find(_CARD_RUN)
    while at >= 0:
        # As cards begin; a time in microseconds does not, nor does a hash. An escape may end in a digit, and
        # an address that is taken out just before one. The colour of a terminal ends in a letter.
        begins = raw[at] in _CARD_STARTS and (not at or shape[at - 1] not in _WORD)
        if begins or "\\" in raw or "%" in raw or "@" in raw or "\x1b" in raw:
            woken |= CARDS
            places.append(at)
        at = shape.find(_CARD_RUN, at + len(_CARD_RUN))
    if match := _COUNTRY.search(shape):
        woken |= IBANS
        places += _starts(_COUNTRY, shape, match)
    if "+" in raw and (match := _PLUS.search(raw)):
        woken |= PHONES
        places += _starts(_PLUS, raw, match)
    return woken


def _links(raw: str, places: list[int]) -> int:
    woken = 0
    for sought, groups in (("@", EMAILS | LINKS), ("%40", EMAILS | LINKS), ("=", LINKS)):
        if sought in raw:
            woken |= groups
            places += _every(sought, raw)
    return woken | VENDORS if "@" in raw and "jdbc:" in raw else woken


def _every(sought: str, text: str) -> list[int]:
    """Where it stands; it is there."""
    found = [text.find(sought)]
    while (at := text.find(sought, found[-1] + len(sought))) >= 0:
        found.append(at)
    return found


def _starts(pattern: "re.Pattern[str]", text: str, match: "re.Match[str]") -> list[int]:
    """Where the first match and those behind it begin."""
    return [match.start(), *(more.start() for more in pattern.finditer(text, match.end()))]
