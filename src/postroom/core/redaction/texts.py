"""Redaction of one text: every match of a rule is replaced by a marker.

Rule 1: a text is redacted until nothing changes. A marker such as `<email>` is never searched.
Rule 2: a text that still changes after `PASSES_MAX` passes is replaced as a whole.
Rule 3: words with percent signs (`token%3Dabc`) are searched as the text that they stand for. A word with a
        match is replaced by that text, without the match. The same holds for Base64 at the full level, but
        there the whole word is replaced.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from postroom.core.redaction.rules import BUILT_IN, FIELDS, QUOTATIONS, QUOTES, Compiled
from postroom.core.redaction.signs import Signs, folded

PASSES_MAX: Final = 20  # a text that still changes after this is replaced by its shape
TOKEN_HEX_DIGITS: Final = 12

DECODINGS_MAX: Final = 3  # a text that was encoded more often is not opened further

ENCODED_CHAR: Final = re.compile("%([2-7][0-9A-Fa-f])")  # no control characters: a log line stays one line
_ENCODED_WORD: Final = re.compile(r"[^\x00-\x20\"'<>%]*+%[^\x00-\x20\"'<>]*+")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{16,}+={0,2}")
_URL_SAFE: Final = str.maketrans("-_", "+/")
_PRINTABLE: Final = bytes([9, 10, 13, *range(32, 127)])
_OTHERS_PART: Final = 10  # at most one byte of so many is not printable where Base64 holds a text
_SHAPES: Final = tuple(f"<text:{1 << bits}>" for bits in range(64))


def shape_of(text: str) -> str:
    """`<text:32>` for 17 to 32 characters: a power of two, because an exact length can reveal a word."""
    return _SHAPES[(len(text) - 1).bit_length()] if text else ""


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, because sinks write UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Texts:
    """Applies rules to texts. With a `key`, markers carry a token."""

    def __init__(
        self,
        rules: Sequence[Compiled],
        signs: Signs,
        custom: Collection[str],
        key: bytes | None,
        scan: Callable[[str], Any],
    ) -> None:
        """`scan` finds the groups of rules that may match in a text."""
        self.rules = tuple(rules)
        self._signs = signs
        self._key = key
        self._scan = scan
        self._rules_of: dict[int, tuple[Compiled, ...]] = {}
        known = "|".join(sorted({*BUILT_IN, *custom}))
        token = f"[0-9a-f]{{{TOKEN_HEX_DIGITS}}}"
        self._marker = re.compile(rf"(<(?:(?:{known})(?::{token})?|text:[0-9]{{1,10}})>)")
        self._quoted_marker = re.compile(f"[BFRUbfru]{{0,2}}[{QUOTES}]{self._marker.pattern}[{QUOTES}]?")

    def is_marker(self, text: str) -> bool:
        """Whether the whole text is one marker."""
        return text[:1] == "<" and self._marker.fullmatch(text) is not None

    def active_rules(self, active: int) -> tuple[Compiled, ...]:
        """The rules of the given groups."""
        rules = self._rules_of.get(active)
        if rules is None:
            rules = self._rules_of[active] = tuple(rule for rule in self.rules if rule.group & active)
        return rules

    def settled(self, text: str, rules: tuple[Compiled, ...]) -> str:
        """The text, redacted until nothing changes; the same object when nothing changed at all."""
        for _ in range(PASSES_MAX):
            text = self.replaced(text, rules)
            opened = _ENCODED_WORD.sub(self._opened, text) if "%" in text else text
            if opened == text:
                return text
            text, rules = opened, (*self.rules, *(rule for rule in rules if rule not in self.rules))
        return shape_of(text)

    def _opened(self, word: "re.Match[str]") -> str:
        """A percent-encoded word, decoded and redacted; the word itself when it has no secret."""
        plain = word[0]
        for _ in range(DECODINGS_MAX):
            plain = ENCODED_CHAR.sub(lambda encoded: chr(int(encoded[1], 16)), plain)
        redacted = self._redacted(plain)
        return word[0] if redacted is plain else redacted

    def _redacted(self, text: str) -> str:
        rules = self.active_rules(self._scan(text).active)
        return self.replaced(text, rules) if rules else text

    def replaced(self, text: str, rules: tuple[Compiled, ...]) -> str:
        """As `settled`, without opening what is encoded."""
        parts = self._marker.split(text) if "<" in text else [text]
        assigns: bool | None = None
        until = len(rules)  # rules after the last one that changed something need no second pass
        for _ in range(PASSES_MAX + 1):
            last = 0
            for number, rule in enumerate(rules, 1):
                if number > until and not last:
                    break
                if rule.group == FIELDS:
                    # Searched once: no replacement puts a field name before a sign.
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
        """The settled text with quotations replaced, except those that hold only a marker."""
        for _ in range(PASSES_MAX):
            settled = self.settled(_BASE64.sub(self._unwrapped, text), rules)
            for quotation in QUOTATIONS:
                settled = quotation.sub(self._quoted, settled)
            if settled == text:
                return text
            text = settled
        return shape_of(text)

    def _unwrapped(self, word: "re.Match[str]") -> str:
        """A marker for Base64 with a secret in it; any other word as it is."""
        inner = [word[0]]
        for _ in range(DECODINGS_MAX):
            inner = [text for found in inner if (text := _from_base64(found))]
            if any(self._redacted(text) is not text for text in inner):
                return self.marked("key", word[0])
            inner = [found for text in inner for found in _BASE64.findall(text)]
        return word[0]

    def _quoted(self, quotation: "re.Match[str]") -> str:
        found = quotation[0]
        return found if self._quoted_marker.fullmatch(found) else self.marked("quoted", found)

    def _apply(self, rule: Compiled, parts: list[str]) -> bool:
        """Apply a rule to every other part; the parts between them are markers."""
        changed = False
        for at in range(len(parts) - 1, -1, -2):
            part = parts[at]
            if part and rule.hint(part) and (found := self._without(rule, part)):
                parts[at : at + 1] = found
                changed = True
        return changed

    def _without(self, rule: Compiled, text: str) -> list[str]:
        """The text split into unchanged parts and markers, alternating. Empty when nothing matched."""
        done = 0
        parts: list[str] = []
        check = rule.check
        search = rule.search if "\\" in text or "%" in text or "\x1b" in text else rule.search_plain
        match = search(text)
        while match:
            start, end = match.span(match.lastindex or 0)
            behind = match.end()
            if check:
                # A candidate that fails the check may overlap one that passes, such as the 20 of `%20` before
                # a card.
                behind = end = start + check(text[start:end])
            if end > start:
                parts += text[done:start], self.marked(rule.name, text[start:end], rule.fold)
                done = end
            at = max(behind, start + 1)
            match = search(text, at) if at < len(text) else None
        if parts:
            parts.append(text[done:])
        return parts

    def marked(self, name: str, found: str, fold: Callable[[str], str] | None = None) -> str:
        """The marker that replaces what was found."""
        if self._key is None:
            return f"<{name}>"
        value = (fold(found) if fold else found).encode("utf-8", "surrogatepass")
        return f"<{name}:{hmac.digest(self._key, value, hashlib.sha256).hex()[:TOKEN_HEX_DIGITS]}>"


def _from_base64(word: str) -> str:
    """The text that a word is the Base64 of; empty when it is none."""
    letters = word.rstrip("=").translate(_URL_SAFE)
    letters = letters[: len(letters) - (len(letters) % 4 == 1)]  # cut off within a group
    data = base64.b64decode(letters + "=" * (-len(letters) % 4))
    others = len(data.translate(None, _PRINTABLE))
    return "" if others * _OTHERS_PART > len(data) else data.decode("utf-8", "replace")
