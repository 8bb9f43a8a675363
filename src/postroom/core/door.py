"""The door: a text that leaves a process, for a log, for telemetry or in an error, is redacted here.

Rule 1: the level is always `medium`, whatever the level of the audit stream: nobody expects secrets in a log,
        and `full` would remove the numbers and the quotations that make a log useful.
Rule 2: IP addresses stay: a log without the address of the server that does not answer helps nobody.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

_KEPT = ("ip",)


def leaving(text: str) -> str:
    """The text as it may leave."""
    return _redactor().text(text)


@cache
def _redactor() -> "Redactor":
    from postroom.core.redaction import Redactor  # noqa: PLC0415 - most commands print no error

    return Redactor("medium", kept=_KEPT)
