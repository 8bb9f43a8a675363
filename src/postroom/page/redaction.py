"""What a page shows of texts that others wrote: redacted as the settings say, and cut to a length.

Rule 1: every text that a sender, a worker or an agent can choose passes through here before it is sent to a
        page. Only names and ids that are addresses do not: those of organizations, agents, goals, buses,
        checkpoints, decisions and messages.
Rule 2: redaction takes microseconds for each character. So one view redacts at most `REDACTED_CHARS_MAX`, and
        in a thread: `shown_by` makes its reply. A text that does not fit is not shown.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

REDACTOR: Final = "postroom.redactor"
"""The key of the function that gives the redactor, in the scope of a request."""
PAYLOAD_CHARS_MAX: Final = 100_000
REDACTED_CHARS_MAX: Final = 500_000
"""Of all texts of one view."""
_LEFT: Final = "postroom.redacted_chars_left"
NAMES_KEPT_MAX: Final = 1_024
"""How many types, workers and errors the stream remembers in their redacted form."""
_ID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_CUT: Final = "\n... cut: it is longer than the page shows"

Hide: TypeAlias = Callable[[str], str]
"""Redacts a text."""


def shown_json(request: HttpRequest, value: Any) -> str:
    """A value as indented JSON, redacted."""
    data = msgspec.json.encode(value)
    if not _fits(request, data):
        return _too_long(data)
    return _cut(msgspec.json.format(_redactor(request).payload(data.decode()), indent=2))


def shown_body(request: HttpRequest, text: str) -> str:
    """The body of a message that is text, redacted."""
    return _cut(_redactor(request).payload(text)) if _fits(request, text) else _too_long(text)


def shown_text(request: HttpRequest, text: str) -> str:
    """The text of an error or of another program, redacted."""
    return _cut(_redactor(request).text(text)) if _fits(request, text) else _too_long(text)


def shown_name(request: HttpRequest, text: str) -> str:
    """A name that others chose, redacted. An id stays, because links are made of ids."""
    return text if _ID.fullmatch(text) else shown_text(request, text)


def shown_texts(request: HttpRequest, value: Any) -> Any:
    """A JSON-like value in which each name and each string is redacted as a text. Ids stay."""
    if isinstance(value, str):
        return shown_name(request, value)
    if isinstance(value, dict):
        return {shown_name(request, name): shown_texts(request, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [shown_texts(request, one) for one in value]
    return value


def names_hidden(redactor: "Redactor") -> Hide:
    """Redacts names, of which the same few come again and again. Ids stay."""

    @lru_cache(NAMES_KEPT_MAX)
    def hide(text: str) -> str:
        return text if not text or _ID.fullmatch(text) else redactor.text(text)

    return hide


def _redactor(request: HttpRequest) -> "Redactor":
    found: Callable[[], Redactor] = request.scope[REDACTOR]
    return found()


async def shown_by(server: TaskServer, request: HttpRequest, view: Callable[[], Any]) -> HttpReply:
    """The reply of a view, which is made in a reader thread."""
    return HttpReply(200, await server.read_for(request, lambda: msgspec.json.encode(view())))


def begin_view(request: HttpRequest) -> None:
    """Let a further view of a stream redact as many characters as the first."""
    request.scope.pop(_LEFT, None)


def _fits(request: HttpRequest, text: str | bytes) -> bool:
    """Whether the view of a request may redact a text, too."""
    left: int = request.scope.get(_LEFT, REDACTED_CHARS_MAX) - len(text)
    if left >= 0:
        request.scope[_LEFT] = left
    return left >= 0


def _too_long(text: str | bytes) -> str:
    return (
        f"Not shown: it has {len(text):,} characters, and one view shows at most {REDACTED_CHARS_MAX:,} "
        "of texts and payloads."
    )


def _cut(text: str) -> str:
    return text if len(text) <= PAYLOAD_CHARS_MAX else text[:PAYLOAD_CHARS_MAX] + _CUT
