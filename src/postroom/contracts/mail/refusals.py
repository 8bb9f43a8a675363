"""Events of refused calls: which client was refused, and why.

Rule 1: an event holds a bounded part of what a client sent.
Rule 2: at most `REFUSAL_EVENTS_MAX` refusals of a client and `REFUSAL_EVENTS_ALL_MAX` of all clients in a
        second are emitted one by one. The others of each client are summed up in one event, and those of
        clients beyond `REFUSAL_CLIENTS_MAX` in a shared one. So a flood cannot fill the disk.
Rule 3: one organization gets at most half of both, so its refusals do not hide those of others.
"""

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core.mail.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S

EVENT_TEXT_CHARS_MAX = 200  # of a client's name, and of the error sentence
REFUSAL_EVENTS_MAX = 20  # of one client in a second, one event each
REFUSAL_EVENTS_ALL_MAX = 100  # of all clients in a second, one event each
REFUSAL_CLIENTS_MAX = 100  # clients whose further refusals are summed up apart
ORGANIZATION_SHARE = 0.5  # of both, for one organization
OTHERS = ""
"""The window of the clients beyond `REFUSAL_CLIENTS_MAX`. No client has this name."""


class _Window:
    """The refusals of one client within a second from its first one."""

    __slots__ = ("began_ns", "detail", "emitted", "org", "suppressed", "user")

    def __init__(self, began_ns: int, user: str, org: str) -> None:
        self.began_ns = began_ns
        self.org = org
        self.user = user
        self.detail: dict[str, object] = {}  # of the last one
        self.emitted = self.suppressed = 0


class Refusals:
    """Emits refusals, and counts those that are not emitted one by one."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._windows: dict[str, _Window] = {}  # by client, the oldest first
        self._emitted = 0  # of all windows

    def record(self, link: Link, error: Mq9Error, kind: str, queue: str = "") -> None:
        window = self._window(link)
        window.detail = {"client": link.name[:EVENT_TEXT_CHARS_MAX], "address": link.address}
        if window.emitted >= REFUSAL_EVENTS_MAX or self._are_emitted(link.org):
            window.suppressed += 1
            return
        window.emitted += 1
        self._emitted += 1
        self._mailboxes.emit_event(
            "rejected",
            queue=queue,
            type=kind,
            sender=link.user,
            **({"org_id": link.org} if link.org else {}),
            error_type=str(error.code),
            error=str(error)[:EVENT_TEXT_CHARS_MAX],
            detail=window.detail,
        )

    def _are_emitted(self, org: str) -> bool:
        """Whether as many refusals of all clients, or of an organization, are emitted as may be."""
        if self._emitted >= REFUSAL_EVENTS_ALL_MAX:
            return True
        of_org = sum(window.emitted for window in self._windows.values() if org and window.org == org)
        return of_org >= REFUSAL_EVENTS_ALL_MAX * ORGANIZATION_SHARE

    def _window(self, link: Link) -> _Window:
        window = self._windows.get(link.client)
        if window is None:
            of_org = sum(each.org == link.org for each in self._windows.values()) if link.org else 0
            is_full = len(self._windows) >= REFUSAL_CLIENTS_MAX
            is_full |= of_org >= REFUSAL_CLIENTS_MAX * ORGANIZATION_SHARE
            name, user, org = (OTHERS, "", "") if is_full else (link.client, link.user, link.org)
            window = self._windows.setdefault(name, _Window(self._mailboxes.now_ns(), user, org))
        return window

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
        self._emitted -= window.emitted
        whose = "this client" if client != OTHERS else "further clients"
        if window.suppressed:
            self._mailboxes.emit_event(
                "rejected",
                sender=window.user,
                error=f"{window.suppressed} more calls of {whose} were refused",
                detail={**window.detail, "refused": window.suppressed},
            )
