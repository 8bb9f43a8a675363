"""The slow path for payloads: parse, walk, encode. It defines the result that the fast path must match.

Rule 1: JSON keeps its structure: the same names (numbered where redaction makes two equal) and the same
        nesting. Only strings and numbers change.
Rule 2: a value that is nested too deeply is replaced as a whole.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, NamedTuple

from postroom.core.redaction.fields import NO_OWNERS, is_long, words_of
from postroom.core.redaction.rules import PROGRAMS, Compiled
from postroom.core.redaction.texts import Texts, encodable, shape_of

DEPTH_MAX: Final = 100  # levels of nesting; deeper values become <deep>
NAMES_CACHED_MAX: Final = 10_000  # field names with a cached verdict
NAME_CHARS_MAX: Final = 100  # longer names are not cached
INT_CARD_MIN: Final = 10**12  # a smaller number is not a card
INT_CARD_MAX: Final = 10**19
INT_DIGITS_MAX: Final = 600  # Python may refuse to parse longer numbers; they become 0

DEEP: Final = "<deep>"
_OTHER: Final = "<other>"

_VALUE: Final = "value"
_PAIR: Final = 2
LONG_CHARS_MIN: Final = 20  # a shorter value without a digit is a secret only in a list of two items
_LABELS: Final = ("name", "key", "header", "field", "variable", "parameter")
# Each of these words contains a letter that the triggers search for.
_OPTION: Final = re.compile(
    r"--?(?:[A-Za-z0-9]{1,32}[_.-]){0,4}(?i:password|passwd|passphrase|pass|pwd|pw|token|secret|(?:api|access|secret)-?key)"
)


encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_encode_any = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class Work(NamedTuple):
    """How to redact the strings of a payload."""

    rules: tuple[Compiled, ...]
    suspects: Collection[str] | None = None
    """The strings to which rules are applied; None stands for all of them."""
    pairs: bool = True
    """Whether a field name may be next to its value: in two members of an object, or two items of a list."""


class JsonValues:
    """Redacts JSON values. At the full level strings become their shape, and numbers become 0."""

    def __init__(
        self, texts: Texts, fields: list[list[str]], tails: list[list[str]], *, full: bool, numbers: bool
    ) -> None:
        self._texts = texts
        self._full = full
        self._every_number = numbers
        """Whether rules apply to every number, not only to possible card numbers."""
        self._long = tuple("".join(words) for words in fields if is_long(words))
        self._short = frozenset(tuple(words) for words in fields if not is_long(words))
        self._tails = frozenset(map(tuple, tails))
        """Names that match only after another word."""
        self._verdicts: dict[Any, tuple[Any, bool]] = {}
        self._all = Work(texts.rules)

    def value(self, obj: Any) -> Any:
        """A redacted copy of a Python value."""
        try:
            return self._walk(obj, self._all, DEPTH_MAX)
        except RecursionError:
            return DEEP

    def parsed(self, text: str, work: Callable[[], Work]) -> str | None:
        """The redacted payload, or None when it is not JSON; `work` is only called for JSON."""
        try:
            return self._written(_load(text), work, encode)
        except json.JSONDecodeError:
            return None
        except ValueError:  # a number that Python does not parse, or that JSON cannot represent
            lenient = json.loads(
                text,
                parse_int=lambda digits: int(digits) if len(digits) <= INT_DIGITS_MAX else 0,
                parse_float=lambda digits: number if math.isfinite(number := _float(digits)) else 0.0,
            )
            return self._written(lenient, work, _encode_any)
        except RecursionError:
            return f'"{DEEP}"'

    def _written(self, obj: Any, work: Callable[[], Work], write: Callable[[Any], str]) -> str:
        text = write(self._walk(obj, work(), DEPTH_MAX))
        return text if text.isascii() else encodable(text)

    def string(self, text: str, work: Work) -> str:
        """A redacted string of a payload; at the full level, its shape."""
        suspect = work.suspects is None or text in work.suspects
        redacted = self._texts.settled(text, work.rules) if suspect else text
        return shape_of(text) if self._full and not self._texts.is_marker(redacted) else redacted

    def judged(self, name: Any) -> tuple[Any, bool]:
        """The redacted name of a field, and whether its whole value is secret. Cached: names repeat."""
        return self._verdicts.get(name) or self._judge(name)

    def masked(self, obj: Any, depth: int) -> Any:
        """The value of a secret field, with every string and number replaced."""
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
                kept = next(new for n in itertools.count(2) if (new := f"{kept}#{n}") not in redacted)
            if secret:
                redacted[kept] = self.masked(value, depth)
            elif type(value) is str and value:  # the most common case, without one more call
                redacted[kept] = self.string(value, work)
            else:
                redacted[kept] = self._walk(value, work, depth)
        return redacted

    def _without_named_values(self, obj: dict[Any, Any], depth: int) -> dict[Any, Any]:
        """`{"name": "password", "value": …}` with the value masked; any other object unchanged."""
        strings = [name for name in obj if isinstance(name, str)]
        values = [name for name in strings if name[-5:].lower() == _VALUE]
        labels = [obj[name] for name in strings if values and name.lower().endswith(_LABELS)]
        if not any(isinstance(said, str) and self.judged(said)[1] for said in labels):
            return obj
        return obj | {name: self.masked(obj[name], depth) for name in values}

    def _items(self, obj: list[Any], work: Work, depth: int) -> list[Any]:
        redacted = [self._walk(item, work, depth) for item in obj]
        if work.pairs and not self._full and len(obj) > 1 and type(obj[0]) is str:
            for at, new in self._arguments(obj):
                redacted[at] = self._texts.settled(new, work.rules)
            for at, (name, value) in enumerate(itertools.pairwise(obj), 1):
                if type(name) is type(value) is str and self._is_named(name, value, obj):
                    redacted[at] = self.masked(value, 0)
        return redacted

    def _arguments(self, obj: list[Any]) -> Iterator[tuple[int, str]]:
        """The arguments of a known program that hold a secret. They are searched in the list as a text."""
        strings = [item if type(item) is str else "" for item in obj]
        if any(item[:1] == "-" for item in strings):
            before = encode(strings)
            rules = self._texts.active_rules(PROGRAMS)
            after = self._texts.replaced(before, rules)
            if after is not before:
                for at, (old, new) in enumerate(zip(strings, _load(after), strict=True)):
                    if old != new and self._texts.replaced(old, rules) is old:
                        start = next(n for n, char in enumerate(new) if old[n : n + 1] != char)
                        yield at, old[:start] + self._texts.marked("key", old[start:])

    def _is_named(self, name: str, value: str, obj: list[Any]) -> bool:
        """Whether a string of a list is the value of the option or of the name before it."""
        if name[:1] == "-":
            return value[:1] not in ("", "-") and _OPTION.fullmatch(name) is not None
        is_likely = len(obj) == _PAIR or len(value) >= LONG_CHARS_MIN or any(map(str.isdigit, value))
        return is_likely and self.judged(name)[1]

    def _number(self, number: float, work: Work) -> Any:
        if self._full:
            return 0
        if type(number) is float and work is not self._all:
            return number  # in a payload, and not written with all its digits
        if not (INT_CARD_MIN <= abs(number) < INT_CARD_MAX or (self._every_number and type(number) is int)):
            return number
        if abs(number) >= INT_CARD_MAX or number != int(number):
            return number
        digits = str(int(number))
        redacted = self._texts.settled(digits, work.rules)
        return number if redacted == digits else redacted.removeprefix("-")

    def _foreign(self, obj: Any, work: Work, depth: int) -> Any:
        """Convert Python types that JSON does not have, and redact the result."""
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


# ---- numbers as written in the JSON text ----------------------------------------------------------------


class _WholeFloat(float):
    """A number such as `4111111111111111.0`, which may be a card number."""

    __slots__ = ()


_WHOLE: Final = re.compile(r"-?[0-9]{13,19}\.0+")


def _float(digits: str) -> float:
    """Only a number written with all its digits may be a card: triggers cannot detect any other form."""
    return _WholeFloat(digits) if _WHOLE.fullmatch(digits) else float(digits)


_load = json.JSONDecoder(parse_float=_float).decode
