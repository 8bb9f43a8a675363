"""The entry points of redaction: payloads, texts and values."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from postroom.core.redaction.fields import DEFAULT_FIELDS, HEADERS, assignments, split_fields
from postroom.core.redaction.rules import CUSTOM, LONG_NUMBERS, PAIRS, RULES, Compiled, Rule
from postroom.core.redaction.signs import Signs
from postroom.core.redaction.splicing import Splicing, suspects
from postroom.core.redaction.texts import PASSES_MAX, Texts, encodable, shape_of
from postroom.core.redaction.triggers import NOTHING, TriggerHits, Triggers
from postroom.core.redaction.values import JsonValues, Work

Level: TypeAlias = Literal["none", "medium", "full"]

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_HEAD: Final = 5  # number of rules that are applied before those for fields


def level_for(environment: str | None) -> Level:
    """The level of an environment. An unknown environment is treated as production."""
    levels: dict[str | None, Level] = {"dev": "none", "staging": "medium"}
    return levels.get(environment, "full")


class Redactor:
    """Redacts payloads and texts according to a level.

    `patterns` are further rules: the name of a marker and a regular expression, whose first group (if it has
    one) is replaced. With a `key`, a marker carries a token: equal values have equal tokens, and the value
    cannot be guessed from the token without the key. Rules whose marker is in `kept` do not apply.
    """

    def __init__(
        self,
        level: Level = "full",
        *,
        patterns: Mapping[str, str] = {},
        fields: Collection[str] = DEFAULT_FIELDS,
        key: bytes | None = None,
        kept: Collection[str] = (),
    ) -> None:
        if level not in ("none", "medium", "full"):
            raise ValueError(f'"{level}" is not a level of redaction: use none, medium or full.')
        self._full = level == "full"
        self._none = level == "none"
        names, tails = split_fields(fields)
        signs = Signs([*names, *tails, *HEADERS])
        custom = [_custom(name, pattern) for name, pattern in patterns.items()]
        built_in = (*RULES[:_HEAD], *assignments(names, tails), *RULES[_HEAD:])
        rules = (*custom, *(Compiled(rule) for rule in built_in if rule.name not in kept))
        self._scan: Callable[[str], TriggerHits] = Triggers(signs, CUSTOM if custom else 0).scan
        self._texts = Texts(rules, signs, patterns, key, self._scan)
        self._values = JsonValues(self._texts, names, tails, full=self._full, numbers=bool(custom))
        self._splicing = Splicing(self._texts, self._values)
        self._long_numbers = (Compiled(LONG_NUMBERS),)

    def payload(self, text: str) -> str:
        """A redacted message body. JSON stays JSON; any other text is treated as one string."""
        if self._none:
            return text
        if not text.isascii():
            text = encodable(text)
        hits = self._scan(text)
        if hits is NOTHING and not self._full:
            return text
        for _ in range(PASSES_MAX):
            redacted = None if self._full else self._splicing.spliced(text, hits)
            if redacted is None:
                redacted = self._values.parsed(text, partial(self._work, hits))
            if redacted is not None:
                return redacted
            # The text is not JSON, but its redacted form may be: try again.
            redacted = self._values.string(text, Work(self._texts.active_rules(hits.active)))
            if redacted == text:
                return text
            text = redacted
            hits = self._scan(text)
        return shape_of(text)

    def text(self, text: str) -> str:
        """A redacted program message, such as an error. Words stay; "full" drops quotations and numbers."""
        if self._none:
            return text
        if not text.isascii():
            text = encodable(text)
        rules = self._texts.active_rules(self._scan(text).active)
        if self._full:
            return self._texts.without_quotations(text, rules + self._long_numbers)
        return self._texts.settled(text, rules)

    def value(self, obj: Any) -> Any:
        """A copy of a JSON-like value, redacted like a payload."""
        return obj if self._none else self._values.value(obj)

    def is_secret(self, name: str) -> bool:
        """Whether the value of a field of this name is redacted as a whole."""
        return self._values.judged(name)[1]

    def _work(self, hits: TriggerHits) -> Work:
        return Work(self._texts.active_rules(hits.active), suspects(hits), pairs=bool(hits.active & PAIRS))


def _custom(name: str, pattern: str) -> Compiled:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f'"{name}" is not a name for a pattern: use lower-case letters, digits, - and _, at most 32.'
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f'The pattern "{name}" is not a regular expression: {error}.') from None
    return Compiled(Rule(name, CUSTOM, pattern, ("",)), 0)
