"""Payloads, the slow way: parsed, walked and written. It defines what the quick way has to come to.

Rule 1: JSON stays JSON of the same structure: the same names (made distinct where redacting would make two
        the same), the same nesting. Only strings and numbers change.
Rule 2: what is too deep is replaced as a whole, never passed on.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from postroom.core.redaction.fields import NO_OWNERS, is_long, words_of
from postroom.core.redaction.rules import Compiled
from postroom.core.redaction.texts import Texts, encodable, shape_of

DEPTH_MAX: Final = 100  # of nesting; what lies deeper becomes <deep>
NAMES_CACHED_MAX: Final = 10_000  # field names whose verdict is remembered
NAME_CHARS_MAX: Final = 100  # of a name that is remembered
INT_CARD_MIN: Final = 10**12  # a number below it is no card
INT_CARD_MAX: Final = 10**19
INT_DIGITS_MAX: Final = 600  # Python may refuse to read longer ones; they become 0

DEEP: Final = "<deep>"
_OTHER: Final = "<other>"

_VALUE: Final = "value"
_LABELS: Final = ("name", "key", "header", "field", "variable", "parameter")
# Each of these words has a letter that the first look jumps to.
_OPTION: Final = re.compile(
    r"--?(?:[A-Za-z0-9]{1,32}[_.-]){0,4}(?i:password|passwd|passphrase|pass|pwd|pw|token|(?:api|access|secret)-?key)"
)


encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_encode_any = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class Work(NamedTuple):
    """What is to be done with the strings of a payload."""

    rules: tuple[Compiled, ...]
    suspects: Collection[str] | None = None
    """The strings on which a rule has to be tried; None is all of them."""
    pairs: bool = True
    """Whether a name may stand beside its value: in two members of an object, or two items of a list."""


class Values:
    """Redacts what JSON can hold. At the full level strings become their shape, and numbers 0."""

    def __init__(
        self, texts: Texts, fields: list[list[str]], tails: list[list[str]], *, full: bool, numbers: bool
    ) -> None:
        self._texts = texts
        self._full = full
        self._every_number = numbers
        """Whether a rule may be meant for any number, and not only for those that may be cards."""
        self._long = tuple("".join(words) for words in fields if is_long(words))
        self._short = frozenset(tuple(words) for words in fields if not is_long(words))
        self._tails = frozenset(map(tuple, tails))
        """Those that need a word in front."""
        self._verdicts: dict[Any, tuple[Any, bool]] = {}
        self._all = Work(texts.rules)

    def value(self, obj: Any) -> Any:
        """What a program hands in; the argument is left as it is."""
        try:
            return self._walk(obj, self._all, DEPTH_MAX)
        except RecursionError:
            return DEEP

    def parsed(self, text: str, work: Callable[[], Work]) -> str | None:
        """A payload redacted, or None when it is not JSON. The work is asked for when it is."""
        try:
            return self._written(_load(text), work, encode)
        except json.JSONDecodeError:
            return None
        except ValueError:  # a number that Python does not read, or one that JSON does not write
            lenient = json.loads(text, parse_int=_readable_int, parse_float=_finite)
            return self._written(lenient, work, _encode_any)
        except RecursionError:
            return f'"{DEEP}"'

    def _written(self, obj: Any, work: Callable[[], Work], write: Callable[[Any], str]) -> str:
        text = write(self._walk(obj, work(), DEPTH_MAX))
        return text if text.isascii() else encodable(text)

    def string(self, text: str, work: Work) -> str:
        """A string of a payload: without its matches, or at the full level its shape."""
        suspect = work.suspects is None or text in work.suspects
        redacted = self._texts.settled(text, work.rules) if suspect else text
        return shape_of(text) if self._full and not self._texts.is_marker(redacted) else redacted

    def judged(self, name: Any) -> tuple[Any, bool]:
        """What a field's name becomes, and whether its value goes as a whole.

        It is remembered, because names come again and again.
        """
        return self._verdicts.get(name) or self._judge(name)

    def masked(self, obj: Any, depth: int) -> Any:
        """What stands below a field's name: every string and number of it goes."""
        if obj is None or obj is True or obj is False or obj == "":
            return obj
        if isinstance(obj, dict):
            if not depth:
                return DEEP
            names = self._members(dict.fromkeys(obj), self._all, 0)
            return {
                name: self.masked(value, depth - 1) for name, value in zip(names, obj.values(), strict=True)
            }
        if isinstance(obj, (list, tuple)):
            return [self.masked(item, depth - 1) for item in obj] if depth else DEEP
        if isinstance(obj, int) and abs(obj) >= INT_CARD_MAX:
            return "<redacted>"
        found = str(obj) if isinstance(obj, (str, int, float)) else _OTHER
        return found if self._texts.is_marker(found) else self._texts.marked("redacted", found)

    def _walk(self, obj: Any, work: Work, depth: int) -> Any:
        kind = type(obj)
        if kind is str:
            return self.string(obj, work) if obj else obj
        if kind is dict:
            return self._members(obj, work, depth - 1) if depth else DEEP
        if kind is list:
            return self._items(obj, work, depth - 1) if depth else DEEP
        if obj is None or kind is bool:
            return obj
        if kind is int or kind is float:
            return 0 if self._full else self._number(obj, work)
        return self._foreign(obj, work, depth)

    def _members(self, obj: dict[Any, Any], work: Work, depth: int) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        if work.pairs and len(obj) > 1 and not self._full:
            obj = self._without_named_values(obj, depth)
        verdicts = self._verdicts
        for name, value in obj.items():
            kept, secret = verdicts.get(name) or self._judge(name)
            if kept in redacted:
                kept = _distinct(kept, redacted)
            if secret:
                redacted[kept] = self.masked(value, depth)
            elif type(value) is str and value:  # most are, and a call less counts
                redacted[kept] = self.string(value, work)
            else:
                redacted[kept] = self._walk(value, work, depth)
        return redacted

    def _without_named_values(self, obj: dict[Any, Any], depth: int) -> dict[Any, Any]:
        """`{"name": "password", "value": …}` without the value; any other object as it is."""
        values = [name for name in obj if isinstance(name, str) and name[-5:].lower() == _VALUE]
        if not values or not any(self._is_label(name, said) for name, said in obj.items()):
            return obj
        return obj | {name: self.masked(obj[name], depth) for name in values}

    def _is_label(self, name: Any, said: Any) -> bool:
        is_label = isinstance(name, str) and isinstance(said, str) and name.lower().endswith(_LABELS)
        return is_label and self.judged(said)[1]

    def _items(self, obj: list[Any], work: Work, depth: int) -> list[Any]:
        redacted = [self._walk(item, work, depth) for item in obj]
        if work.pairs and not self._full:
            for at, (option, value) in enumerate(itertools.pairwise(obj), 1):
                is_option = type(option) is str and option[:1] == "-" and type(value) is str
                if is_option and _tells(option, value, obj):
                    redacted[at] = self.masked(value, 0)
        return redacted

    def _number(self, number: float, work: Work) -> Any:
        if self._full:
            return 0
        if type(number) is float and work is not self._all:
            return number  # of a payload, and not written out
        if not (INT_CARD_MIN <= abs(number) < INT_CARD_MAX or (self._every_number and type(number) is int)):
            return number
        if abs(number) >= INT_CARD_MAX or number != int(number):
            return number
        digits = str(int(number))
        redacted = self._texts.settled(digits, work.rules)
        return number if redacted == digits else redacted.removeprefix("-")

    def _foreign(self, obj: Any, work: Work, depth: int) -> Any:
        """What only a program hands in. JSON knows no such type, so neither does the redacted value."""
        if isinstance(obj, str):
            return self._walk(str(obj), work, depth)
        if isinstance(obj, dict):
            return self._walk(dict(obj), work, depth)
        if isinstance(obj, (list, tuple)):
            return self._walk(list(obj), work, depth)
        if isinstance(obj, _WholeFloat):
            return self._number(obj, work)
        if isinstance(obj, (int, float)):
            return self._number(int(obj) if isinstance(obj, int) else float(obj), work)
        return _OTHER

    def _judge(self, name: Any) -> tuple[Any, bool]:
        if not isinstance(name, str):
            return self._walk(name, self._all, 0), False
        words = words_of(name)
        glued = "".join(words)
        secret = glued.endswith(self._long) or glued.removesuffix("s").endswith(self._long)
        secret = secret or any(tuple(words[at:]) in self._short for at in range(len(words)))
        secret = secret or any(
            tuple(words[at:]) in self._tails and words[at - 1] not in NO_OWNERS for at in range(1, len(words))
        )
        verdict = (self._texts.settled(name, self._texts.rules), secret)
        if len(self._verdicts) < NAMES_CACHED_MAX and len(name) < NAME_CHARS_MAX:
            self._verdicts[name] = verdict
        return verdict


def _tells(option: str, value: str, arguments: list[Any]) -> bool:
    """Whether an option of a command says that its value is a secret."""
    if value[:1] in ("", "-"):
        return False
    if option in ("-u", "--user"):  # of curl, with an address: the first look notices that
        pages = (type(item) is str and item.startswith(("http://", "https://")) for item in arguments)
        return arguments[0] == "curl" and ":" in value and any(pages)
    return _OPTION.fullmatch(option) is not None


def _distinct(name: Any, taken: Collection[Any]) -> str:
    number = 2
    while (candidate := f"{name}#{number}") in taken:
        number += 1
    return candidate


# ---- numbers as they are written ------------------------------------------------------------------------


class _WholeFloat(float):
    """A number such as `4111111111111111.0`, which may be a card."""

    __slots__ = ()


_WHOLE: Final = re.compile(r"-?[0-9]{13,19}\.0+")


def _float(digits: str) -> float:
    """Only a number that is written out may be a card: of others the first look sees nothing."""
    return _WholeFloat(digits) if _WHOLE.fullmatch(digits) else float(digits)


_load = json.JSONDecoder(parse_float=_float).decode


def _readable_int(digits: str) -> int:
    return int(digits) if len(digits) <= INT_DIGITS_MAX else 0


def _finite(digits: str) -> float:
    return number if math.isfinite(number := _float(digits)) else 0.0
