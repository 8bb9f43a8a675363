"""The three ways into redaction: payloads, texts, values."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, TypeAlias

from postroom.core.redaction.fields import DEFAULT_FIELDS, HEADERS, assignments, split_fields
from postroom.core.redaction.rules import CUSTOM, LONG_NUMBERS, PAIRS, RULES, Compiled, Rule, compiled
from postroom.core.redaction.signs import Signs
from postroom.core.redaction.splicing import Splicing, suspects
from postroom.core.redaction.texts import PASSES_MAX, Texts, encodable, shape_of
from postroom.core.redaction.triggers import NOTHING, Look, Triggers
from postroom.core.redaction.values import Values, Work

Level: TypeAlias = Literal["none", "medium", "full"]

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_HEAD: Final = 5  # the rules that come before a deployment's own fields


def level_for(environment: str | None) -> Level:
    """The level of an environment. One that is unknown is treated as production."""
    levels: dict[str | None, Level] = {"dev": "none", "staging": "medium"}
    return levels.get(environment, "full")


class Redactor:
    """Takes out of payloads and texts what a level forbids.

    `patterns` are further rules: a marker's name and a pattern of `re`, whose first group is replaced if it
    has one. With a `key` a marker carries a token: the same value gives the same token, and nobody without
    the key can tell which.
    """

    def __init__(
        self,
        level: Level = "full",
        *,
        patterns: Mapping[str, str] = {},
        fields: Collection[str] = DEFAULT_FIELDS,
        key: bytes | None = None,
    ) -> None:
        if level not in ("none", "medium", "full"):
            raise ValueError(f'"{level}" is no level of redaction: none, medium or full.')
        self._full = level == "full"
        self._none = level == "none"
        names, tails = split_fields(fields)
        signs = Signs([*names, *tails, *HEADERS])
        custom = [_custom(name, pattern) for name, pattern in patterns.items()]
        rules = (*custom, *map(compiled, (*RULES[:_HEAD], *assignments(names, tails), *RULES[_HEAD:])))
        self._texts = Texts(rules, signs, patterns, key)
        self._values = Values(self._texts, names, tails, full=self._full, numbers=bool(custom))
        self._splicing = Splicing(self._texts, self._values)
        self._look: Callable[[str], Look] = Triggers(signs, CUSTOM if custom else 0).look
        self._long_numbers = (compiled(LONG_NUMBERS),)

    def payload(self, text: str) -> str:
        """A body: JSON text in, JSON text out. What is not JSON is one string."""
        if self._none:
            return text
        if not text.isascii():
            text = encodable(text)
        look = self._look(text)
        if look is NOTHING and not self._full:
            return text
        for _ in range(PASSES_MAX):
            redacted = self._json(text, look)
            if redacted is not None:
                return redacted
            # Not JSON: what is left of it might be, now that something is gone.
            redacted = self._values.string(text, Work(self._texts.awake(look.woken)))
            if redacted == text:
                return text
            text = redacted
            look = self._look(text)
        return shape_of(text)

    def text(self, text: str) -> str:
        """What a program says, such as an error. Words stay; the full level drops quotations and numbers."""
        if self._none:
            return text
        if not text.isascii():
            text = encodable(text)
        rules = self._texts.awake(self._look(text).woken)
        if self._full:
            return self._texts.without_quotations(text, rules + self._long_numbers)
        return self._texts.settled(text, rules)

    def value(self, obj: Any) -> Any:
        """What JSON can hold, redacted like a payload; the argument is left as it is."""
        return obj if self._none else self._values.value(obj)

    def _json(self, text: str, look: Look) -> str | None:
        """A payload redacted, the quick way if there is one, or None when it is not JSON."""
        redacted = None if self._full else self._splicing.spliced(text, look)
        if redacted is not None:
            return redacted
        return self._values.parsed(text, lambda: _work(self._texts.awake(look.woken), look))


def _work(rules: tuple[Compiled, ...], look: Look) -> Work:
    return Work(rules, suspects(look), pairs=bool(look.woken & PAIRS))


def _custom(name: str, pattern: str) -> Compiled:
    if not _NAME.fullmatch(name):
        raise ValueError(f'"{name}" names no pattern: small letters, digits, - and _, at most 32.')
    try:
        return compiled(Rule(name, CUSTOM, pattern, ("",)), 0)
    except re.error as error:
        raise ValueError(f'The pattern "{name}" is no regular expression: {error}.') from None
