"""Mailboxes of the mq9 design: stored first, then pushed, gone when their time is over.

The two sides of the seam to a server. The server has the sockets, the room has the mailboxes:
`postroom.contracts.mail.service.MailService` is the one room, and a `Link` is one connection of a server.

Rule 1: every method is called on the server's loop and returns at once.
Rule 2: nothing is pushed or answered before it is stored as its class says.
Rule 3: a private mailbox's id is its only key. It is shown to nobody who did not bring it along.
"""

from collections.abc import Awaitable
from typing import Protocol

LINK_FULL_BYTES = 128 << 10  # that wait for a connection before the room hands it no more


class Link(Protocol):
    """One connection, as the room sees it. On a closed one all methods do nothing."""

    @property
    def number(self) -> int:
        """Unique for the life of the server."""

    @property
    def user(self) -> str:
        """Who it is; empty when it did not authenticate."""

    @property
    def client(self) -> str:
        """Whose quota it uses: who logged in, or the network address. The same on every connection."""

    @property
    def name(self) -> str:
        """What the client calls itself."""

    @property
    def address(self) -> str:
        """Where it comes from: host and port."""

    @property
    def headers(self) -> bool:
        """Whether it can read headers."""

    @property
    def is_closing(self) -> bool:
        """Whether it has ended. `Room.closed` has been called, or is about to be."""

    @property
    def pending_bytes(self) -> int:
        """What waits for it. With more than `LINK_FULL_BYTES` the room pauses until `drained`."""

    def want_room(self) -> None:
        """Ask for a call of `Room.drained` when little waits for it. It is called at most once for that."""

    def deliver(self, sid: str, subject: str, reply: str, messages: list[tuple[bytes, bytes]]) -> None:
        """Queue messages for a subscription: the headers and the payload of each. Never blocks."""

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        """Answer a request of this connection. No stranger's wildcard sees it."""


class Room(Protocol):
    """What takes everything under the mq9 prefix."""

    def owns(self, subject: str) -> bool:
        """Whether a published or subscribed subject is the room's."""

    def published(self, link: Link, subject: str, reply: str, header_bytes: int, bodies: list[bytes]) -> None:
        """Messages of a connection in a row. Each body begins with `header_bytes` bytes of headers.

        Call `flush` after the last one of a turn.
        """

    def subscribed(self, link: Link, sid: str, subject: str, group: str) -> str | None:
        """None when taken; otherwise why it is refused, without the mailbox's id."""

    def unsubscribed(self, link: Link, sid: str) -> None:
        """A subscription ended; harmless when the room did not take it."""

    def closed(self, link: Link) -> None:
        """A connection ended, and all its subscriptions with it."""

    def drained(self, link: Link) -> None:
        """A connection that had much waiting for it can take more."""

    def flush(self) -> Awaitable[None] | None:
        """Write what a batch left behind. An awaitable asks to read no further until it is done."""

    def tick(self) -> None:
        """Let time pass: lifetimes, delays, waiting fetches. Call it a few times a second."""

    def close(self) -> None:
        """Write everything, and end."""
