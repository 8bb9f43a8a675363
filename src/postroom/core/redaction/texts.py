"""One text without what the rules find, and with markers in its place.

Rule 1: a text is redacted until nothing changes, and a marker such as `<email>` is never looked into.
Rule 2: a text that is too stubborn is replaced as a whole.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

from postroom.core.redaction.checks import iban
from postroom.core.redaction.rules import BUILT_IN, FIELDS, QUOTATIONS, QUOTES, Compiled
from postroom.core.redaction.signs import Signs
from postroom.core.redaction.views import folded

PASSES_MAX: Final = 20  # a text that still changes then becomes its shape
TOKEN_HEX_DIGITS: Final = 12

_SHAPES: Final = tuple(f"<text:{1 << bits}>" for bits in range(64))


def shape_of(text: str) -> str:
    """`<text:32>`: 17 to 32 characters. The next power of two, because a length alone can tell a word."""
    return _SHAPES[(len(text) - 1).bit_length()] if text else ""


def encodable(text: str) -> str:
    """The text with each lone surrogate replaced: every sink writes UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Texts:
    """Applies rules to texts. With a `key` a marker carries a token."""

    def __init__(
        self, rules: Sequence[Compiled], signs: Signs, custom: Collection[str], key: bytes | None
    ) -> None:
        self.rules = tuple(rules)
        self._signs = signs
        self._key = key
        self._rules_of: dict[int, tuple[Compiled, ...]] = {}
        known = "|".join(sorted({*BUILT_IN, *custom}))
        token = f"[0-9a-f]{{{TOKEN_HEX_DIGITS}}}"
        self._marker = re.compile(rf"(<(?:(?:{known})(?::{token})?|text:[0-9]{{1,10}})>)")
        self._quoted_marker = re.compile(f"[BFRUbfru]{{0,2}}[{QUOTES}]{self._marker.pattern}[{QUOTES}]?")

    def is_marker(self, text: str) -> bool:
        """Whether it is a marker and nothing else."""
        return text[:1] == "<" and self._marker.fullmatch(text) is not None

    def awake(self, woken: int) -> tuple[Compiled, ...]:
        """The rules of some groups."""
        rules = self._rules_of.get(woken)
        if rules is None:
            rules = self._rules_of[woken] = tuple(rule for rule in self.rules if rule.group & woken)
        return rules

    def settled(self, text: str, rules: tuple[Compiled, ...]) -> str:
        """The text, redacted until nothing changes; the very same one when nothing does."""
        parts = self._marker.split(text) if "<" in text else [text]
        assigns: bool | None = None
        until = len(rules)  # behind the rule that changed something last, nothing is new
        for _ in range(PASSES_MAX + 1):
            last = 0
            for number, rule in enumerate(rules, 1):
                if number > until and not last:
                    break
                if rule.group == FIELDS:
                    # Asked once: what is taken out meanwhile brings no name in front of a sign.
                    assigns = bool(self._signs.find(text, folded(text))[0]) if assigns is None else assigns
                    if not assigns:
                        continue
                if self._apply(rule, parts):
                    last = number
            if not last:
                return text if len(parts) == 1 else "".join(parts)
            until = last
        return shape_of(text)

    def without_quotations(self, text: str, rules: tuple[Compiled, ...]) -> str:
        """The text settled, and without what is quoted. A quotation of a marker alone stays."""
        for _ in range(PASSES_MAX):
            settled = self.settled(text, rules)
            for quotation in QUOTATIONS:
                settled = quotation.sub(self._quoted, settled)
            if settled == text:
                return text
            text = settled
        return shape_of(text)

    def _quoted(self, quotation: "re.Match[str]") -> str:
        found = quotation[0]
        return found if self._quoted_marker.fullmatch(found) else self.marked("quoted", found)

    def _apply(self, rule: Compiled, parts: list[str]) -> bool:
        """Apply a rule to every other part. Those between are markers, which are left alone."""
        changed = False
        for at in range(len(parts) - 1, -1, -2):
            part = parts[at]
            if part and rule.hint(part) and (found := self._without(rule, part)):
                parts[at : at + 1] = found
                changed = True
        return changed

    def _without(self, rule: Compiled, text: str) -> list[str]:
        """The text cut up: what stays and markers in turn. Empty when all of it stays."""
        done = 0
        parts: list[str] = []
        check = rule.check
        search = rule.search if "\\" in text or "%" in text or "\x1b" in text else rule.search_plain
        match = search(text)
        while match:
            start, end = match.span(match.lastindex or 0)
            behind = match.end()
            if check:
                # What fails the check may hide what passes it, as the 20 of `%20` in front of a card does.
                # Not so for an IBAN, which takes long to check.
                end = start + check(text[start:end])
                behind = behind if check is iban and end == start else end
            if end > start:
                parts += text[done:start], self.marked(rule.name, text[start:end], rule.fold)
                done = end
            at = max(behind, start + 1)
            match = search(text, at) if at < len(text) else None
        if parts:
            parts.append(text[done:])
        return parts

    def marked(self, name: str, found: str, fold: Callable[[str], str] | None = None) -> str:
        """The marker that stands for what was found."""
        if self._key is None:
            return f"<{name}>"
        value = (fold(found) if fold else found).encode("utf-8", "surrogatepass")
        return f"<{name}:{hmac.digest(self._key, value, hashlib.sha256).hex()[:TOKEN_HEX_DIGITS]}>"
