"""The door: a text that leaves a process, for a log, for telemetry or in an error, is redacted here.

Rule 1: the level is always `medium`, whatever the level of the audit stream: nobody expects secrets in a log,
        and `full` would remove the numbers and the quotations that make a log useful.
Rule 2: IP addresses stay: a log without the address of the server that does not answer helps nobody.
Rule 3: redacting twice changes nothing, so a text may pass the door more than once.
"""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

CACHED_CHARS_MAX: Final = 64
"""Names of agents, types and events repeat. Longer texts rarely do."""
TEXTS_CACHED_MAX: Final = 4_096
_KEPT: Final = ("ip",)
_MASKED: Final = "<redacted>"
ID_CHARS: Final = 36
_is_id: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}").fullmatch


def leaving(text: str) -> str:
    """The redacted text."""
    if len(text) == ID_CHARS and _is_id(text):
        return text
    return _short(text) if len(text) <= CACHED_CHARS_MAX else _redactor().text(text)


def leaving_value(value: Any) -> Any:
    """Apply `leaving` to each text in a value. Numbers and other types stay."""
    if isinstance(value, str):
        return leaving(value)
    if isinstance(value, Mapping):
        return leaving_facts(value)
    if isinstance(value, list | tuple):
        return type(value)([leaving_value(one) for one in value])
    return value


def leaving_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `leaving` to named facts. A text or a list with a secret name is replaced."""
    left = {}
    for name, value in facts.items():
        kept, is_secret = _named(name)
        if value.__class__ is float or value.__class__ is int or not value:
            left[kept] = value
        elif is_secret and isinstance(value, str | list | tuple):
            left[kept] = _MASKED
        else:
            left[kept] = leaving(value) if value.__class__ is str else leaving_value(value)
    return left


@lru_cache(TEXTS_CACHED_MAX)
def _short(text: str) -> str:
    return _redactor().text(text)


@lru_cache(TEXTS_CACHED_MAX)
def _named(name: str) -> tuple[str, bool]:
    """The redacted name, and whether its value is secret."""
    return leaving(name), _redactor().is_secret(name)


@cache
def _redactor() -> "Redactor":
    from postroom.core.redaction import Redactor  # noqa: PLC0415 - most commands print no error

    return Redactor("medium", kept=_KEPT)
