"""Finding assignment signs (`:`, `=`, `>`) that follow the name of a field.

The text is searched in reverse: the search jumps from sign to sign instead of trying every name at every
character, and a name that does not match fails at its first letter.

Texts are searched in views with one character per byte. `low`: lower-case letters, every digit as 0, p and x
as k, _ as a dot, and ( as [: one search for a character costs less than several. `shape`: every digit as 0,
every capital as A, and every separator between groups as a dash.
"""

import re
from collections.abc import Collection
from typing import Final, TypeAlias

from postroom.core.redaction.fields import JOINT, is_long
from postroom.core.redaction.rules import BUILT_IN

_DIGITS: Final = b"0123456789"
_CAPITALS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOW: Final = bytes.maketrans(
    _CAPITALS + b"px_(" + _DIGITS, b"abcdefghijklmnokqrstuvwkyz" + b"kk.[" + b"0" * 10
)
SHAPE: Final = bytes.maketrans(_CAPITALS + b" ()./" + _DIGITS, b"A" * 26 + b"-----" + b"0" * 10)

# After a colon, in either direction; at last a port or a star between two colons, as in `.pgpass`.
_IPV6: Final = r":()|[0a-f][0a-f]{0,4}:(?:[0a-f]{1,4}:()|(?<=[0:]0000:)())|\*:()"

_VALUE: Final = "value"  # the member next to a name; the first group of the pattern for colons
_VALUE_GROUP: Final = 1

_Ends: TypeAlias = "dict[str, _Ends]"


def folded(text: str) -> str:
    """The view `low`."""
    return text.encode("utf-8", "surrogatepass").translate(LOW).decode("latin-1")


class Signs:
    """Finds assignments to the given fields and, in the same pass, possible IPv6 addresses."""

    def __init__(self, fields: Collection[list[str]]) -> None:
        ends: _Ends = {}
        for words in fields:
            backwards = [folded(word[::-1]) for word in reversed(words)]
            _add(ends, backwards)
            if is_long(words):
                _add(ends, ["s" + backwards[0], *backwards[1:]])
        self._names = _alternatives(ends)
        if [_VALUE] not in fields:
            _add(ends, [folded(_VALUE[::-1])], "()")
        names_and_value = _alternatives(ends)
        self._equals, self._tag = re.compile(f"={self._behind('=')}"), re.compile(f">{self._behind('>')}")
        # One search for colons finds assignments, possible addresses (a colon near a colon) and the member
        # `value` next to a name; the groups tell them apart.
        self._colon = re.compile(f":(?:{self._behind(':', names_and_value)}|{_IPV6})").search
        self._comma = re.compile(f",{self._behind(',')}").finditer
        # A string that ends in a field's name and is not itself the name of a member.
        self._named = re.compile(rf"[,}}\]][ \t\n\r]*\"[ _.-]*+{self._names}").search

    def _behind(self, sign: str, names: str = "") -> str:
        ours = "".join(f"(?<!{sign}{folded(name[::-1])})" for name in BUILT_IN)  # `<phone>` and `<phone:…>`
        return rf"[ \"'\\\]\t\n\r_.-]*+{names or self._names}(?:(?!<)|{ours})"

    def find(self, raw: str, low: str) -> tuple[list[int], list[int], list[int]]:
        """The offsets of assignment signs, of possible addresses, and of values next to a name."""
        back = low[::-1]
        signs: list[int] = []
        addresses: list[int] = []
        values: list[int] = []
        match = self._colon(back)
        while match:
            group = match.lastindex
            found = signs if group is None else values if group == _VALUE_GROUP else addresses
            found.append(len(back) - 1 - match.start())
            match = self._colon(back, match.start() + 1)
        if "=" in raw:
            signs += [len(back) - 1 - match.start() for match in self._equals.finditer(back)]
        if ">" in raw:
            signs += [len(back) - 1 - match.start() for match in self._tag.finditer(back)]
        if "\\" in raw and "\\t" in raw:  # a tab, or a backslash before a name that begins with t
            signs += self.find(raw.replace("\\t", "  "), low.replace("\\t", "  "))[0]
        return signs, addresses, values

    def listed(self, low: str) -> list[int]:
        """The offsets of commas after a name, as in `["password", "…"]`."""
        return [len(low) - 1 - match.start() for match in self._comma(low[::-1])]

    def names_value(self, low: str) -> bool:
        """Whether a JSON string ends in a field's name, as in `{"name": "password", "value": …}`."""
        return self._named(low[::-1]) is not None


def _add(ends: _Ends, words: list[str], group: str = "") -> None:
    """Add a name to the tree, letter by letter. An empty key stands for the joint between two words.

    The pattern of the name ends with `group`.
    """
    for number, word in enumerate(words):
        if number:
            ends = ends.setdefault("", {})
        for letter in word:
            ends = ends.setdefault(letter, {})
    ends["end"] = {group: {}}


def _alternatives(ends: _Ends) -> str:
    if not ends:
        return "(?!)"
    if "end" in ends:
        return next(iter(ends["end"]))
    parts = [
        (re.escape(letter) if letter else f"{JOINT}*") + _alternatives(rest)
        for letter, rest in sorted(ends.items())
    ]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
