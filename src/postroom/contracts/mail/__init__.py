"""Mailboxes of the mq9 design: a message is stored first, then pushed, and ends with its mailbox.

This module is the seam between a NATS server and the mail service. The server owns the sockets and shows
each connection to the service as a `Link`. The service owns the mailboxes: to the server,
`postroom.contracts.mail.service.MailService` is a `SubjectHandler`.

Rule 1: every method is called on the server's event loop and returns at once.
Rule 2: nothing is pushed or answered before it is stored as its storage class says.
Rule 3: the id of a private mailbox is its only key. It is shown only to clients that sent it.
"""

from collections.abc import Awaitable
from typing import Protocol

from postroom.core.gate import Caller

LINK_FULL_BYTES = 128 << 10  # bytes waiting for a connection; above, the service delivers no more,
LINK_MESSAGES_MAX = 32  # and messages
MESSAGE_LEAST_BYTES = LINK_FULL_BYTES // LINK_MESSAGES_MAX


class Link(Protocol):
    """One connection, as the service sees it. On a closed connection every method does nothing."""

    number: int
    """Unique for the life of the server."""
    user: str
    """The user that logged in; empty without a login."""
    client: str
    """Whose quota the connection uses: the user, or the network address. Stable across reconnects."""
    org: str
    """The organization that the client belongs to; empty for none."""
    sees_all: bool
    """Whether the client may use the mailboxes of every organization."""
    identity: Caller | None
    """The owner of the client's token; None for a client without one, which has every permission."""
    name: str
    """The name that the client gave in CONNECT."""
    address: str
    """Host and port of the peer."""
    headers: bool
    """Whether the client understands headers."""

    @property
    def is_closing(self) -> bool:
        """Whether the connection has ended. `SubjectHandler.closed` was called, or is about to be."""

    @property
    def pending_bytes(self) -> int:
        """Bytes waiting to be sent. From `LINK_FULL_BYTES` on the service pauses until `drained`.

        A delivered message counts as at least `MESSAGE_LEAST_BYTES`.
        """

    def notify_when_drained(self) -> None:
        """Request one call of `SubjectHandler.drained` when few bytes wait for the connection."""

    def deliver(self, sid: str, subject: str, reply: str, messages: list[tuple[bytes, bytes]]) -> None:
        """Queue messages for a subscription: the headers and the payload of each. Never blocks."""

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        """Answer a request of this connection. Wildcard subscriptions of other clients do not get it."""


class SubjectHandler(Protocol):
    """Takes everything that is published or subscribed under its own subjects."""

    def owns(self, subject: str) -> bool:
        """Whether a published or subscribed subject belongs to this handler."""

    def published(self, link: Link, subject: str, reply: str, header_bytes: int, bodies: list[bytes]) -> None:
        """Take a batch of messages. Each body begins with `header_bytes` bytes of headers.

        Call `flush` after the last batch of a turn.
        """

    def subscribed(self, link: Link, sid: str, subject: str, group: str) -> str | None:
        """Take a subscription. Returns why it is refused, without the mailbox's id; None when accepted."""

    def refused(self, link: Link, call: str, reply: str, code: int, text: str) -> None:
        """The server refused a call: emit an event, and answer a call that has a `reply`."""

    def unsubscribed(self, link: Link, sid: str) -> None:
        """A subscription ended. Unknown subscriptions are ignored."""

    def closed(self, link: Link) -> None:
        """A connection ended, and all its subscriptions with it."""

    def drained(self, link: Link) -> None:
        """A connection that called `notify_when_drained` can take more."""

    def flush(self) -> Awaitable[None] | None:
        """Write the batch. While a returned awaitable is pending, read nothing more from its publishers."""

    def tick(self) -> None:
        """Handle lifetimes, delays and waiting fetches that are due. Call it a few times a second."""

    def close(self) -> None:
        """Write everything, and end."""
