"""The mark of a redaction: two programs with the same mark redact in the same way.

Rule 1: a mark is a level and a digest of the source of `core.redaction`, such as `full:5c1f...`. Any change
        of that package changes the digest, so nobody has to remember to raise a version.
Rule 2: only the built-in rules have a mark. Own patterns, own fields and tokens do not.
Rule 3: `full` removes everything that `medium` removes: redacting its result at `medium` changes nothing.
"""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

from postroom.core import redaction
from postroom.core.redaction import Level

DIGITS: Final = 32
_SUFFICIENT: Final[dict[Level, tuple[Level, ...]]] = {
    "none": (),
    "medium": ("medium", "full"),
    "full": ("full",),
}


def mark_of(level: Level) -> str:
    """The mark of the built-in rules at a level; empty when nothing is redacted."""
    return "" if level == "none" else f"{level}:{_rules_digest()}"


def sufficient_marks(level: Level) -> frozenset[str]:
    """The marks of texts that a redaction at this level would not change."""
    return frozenset(map(mark_of, _SUFFICIENT[level]))


@cache
def _rules_digest() -> str:
    digest = hashlib.sha256()
    for name in redaction.MODULES:
        text = files(redaction).joinpath(f"{name}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()[:DIGITS]
