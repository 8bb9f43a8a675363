"""Events of refused calls: which client was refused, and why.

Rule 1: an event holds a bounded part of what a client sent.
Rule 2: at most `REFUSAL_EVENTS_MAX` refusals of a client in a second are emitted one by one. The others are
        summed up in one event.
"""

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S

EVENT_TEXT_CHARS_MAX = 200  # of a client's name, and of the error sentence
REFUSAL_EVENTS_MAX = 20  # of one client in a second, one event each


class _Window:
    """The refusals of one client within a second from its first one."""

    __slots__ = ("began_ns", "detail", "emitted", "suppressed", "user")

    def __init__(self, began_ns: int, user: str) -> None:
        self.began_ns = began_ns
        self.user = user
        self.detail: dict[str, object] = {}  # of the last one that was emitted
        self.emitted = self.suppressed = 0


class Refusals:
    """Emits refusals, and counts those that are not emitted one by one."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._windows: dict[str, _Window] = {}  # by client, the oldest first

    def record(self, link: Link, error: Mq9Error, kind: str, queue: str = "") -> None:
        window = self._windows.get(link.client)
        if window is None:
            window = self._windows[link.client] = _Window(self._mailboxes.now_ns(), link.user)
        if window.emitted >= REFUSAL_EVENTS_MAX:
            window.suppressed += 1
            return
        window.emitted += 1
        window.detail = {"client": link.name[:EVENT_TEXT_CHARS_MAX], "address": link.address}
        self._mailboxes.emit_event(
            "rejected",
            queue=queue,
            type=kind,
            sender=link.user,
            error_type=str(error.code),
            error=str(error)[:EVENT_TEXT_CHARS_MAX],
            detail=window.detail,
        )

    def tick(self) -> None:
        """Emit the summaries of the windows that have ended."""
        until_ns = self._mailboxes.now_ns() - NANOS_PER_S
        while self._windows:
            client, window = next(iter(self._windows.items()))
            if window.began_ns > until_ns:
                return
            self._emit_summary(client)

    def close(self) -> None:
        for client in list(self._windows):
            self._emit_summary(client)

    def _emit_summary(self, client: str) -> None:
        window = self._windows.pop(client)
        if window.suppressed:
            self._mailboxes.emit_event(
                "rejected",
                sender=window.user,
                error=f"{window.suppressed} more calls of this client were refused",
                detail={**window.detail, "refused": window.suppressed},
            )
