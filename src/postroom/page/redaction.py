"""What a page shows of payloads: redacted as the settings say, and cut to a length."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom.runtime.http_messages import HttpRequest

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

REDACTOR: Final = "postroom.redactor"
"""The key of the function that gives the redactor, in the scope of a request."""
PAYLOAD_CHARS_MAX: Final = 100_000
_CUT: Final = "\n... cut: it is longer than the page shows"


def shown_json(request: HttpRequest, value: Any) -> str:
    """A value as indented JSON, redacted."""
    redactor: Callable[[], Redactor] = request.scope[REDACTOR]
    redacted = redactor().payload(msgspec.json.encode(value).decode())
    return _cut(msgspec.json.format(redacted, indent=2))


def shown_body(request: HttpRequest, text: str) -> str:
    """The body of a message that is text, redacted."""
    redactor: Callable[[], Redactor] = request.scope[REDACTOR]
    return _cut(redactor().payload(text))


def shown_text(request: HttpRequest, text: str) -> str:
    """The text of an error or of another program, redacted."""
    redactor: Callable[[], Redactor] = request.scope[REDACTOR]
    return _cut(redactor().text(text))


def _cut(text: str) -> str:
    return text if len(text) <= PAYLOAD_CHARS_MAX else text[:PAYLOAD_CHARS_MAX] + _CUT
