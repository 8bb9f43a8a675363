"""The output of one connection of the NATS server.

Rule 1: output is buffered, and written once per turn of the loop.
Rule 2: a client that does not read its messages is cut off; other clients are not affected.
"""

import asyncio
import contextlib
import fcntl
import socket
from typing import Protocol

from postroom.contracts.mail import LINK_FULL_BYTES, LINK_MESSAGES_MAX, MESSAGE_LEAST_BYTES, Link
from postroom.server.nats.clients import ClientUsage

SLOW_CONSUMER = "Slow Consumer"
TOO_MANY = 429  # the code of this refusal, as in HTTP
SIOCOUTQNSD = 0x894B  # asks Linux for the unsent bytes of a socket
UNSENT_BYTES = 4 << 10  # of a connection with mailboxes, in its socket


class OutputHub(Protocol):
    """The server, as the output of a connection sees it."""

    loop: asyncio.AbstractEventLoop
    pending_bytes_max: int
    usage: ClientUsage

    def has_output(self, output: "ConnectionOutput") -> None:
        """Write the output at the end of this turn of the loop."""

    def drained(self, link: Link) -> None:
        """A connection that was backed up can take more."""

    def refused(self, link: Link, why: str, code: int, call: str = "connect") -> str:
        """Make an event of a refused call. Returns the reason."""


class OutputLink(Link, Protocol):
    """The connection of an output."""

    def cut(self) -> None:
        """End at once, and discard the output."""


class ConnectionOutput:
    """What waits to be written to one connection."""

    __slots__ = (
        *("_bytes", "_chunks", "_hub", "link", "_messages", "_notifies", "_sent_bytes", "_socket"),
        *("_stalled_at", "_stalled_bytes", "closed", "counted_bytes", "paused", "transport"),
    )

    def __init__(self, hub: OutputHub, link: OutputLink) -> None:
        self._hub = hub
        self.link = link
        self.transport: asyncio.Transport | None = None
        self.closed = False
        """Whether nothing more is accepted."""
        self._chunks: list[bytes] = []
        self._bytes = 0
        self._messages = 0  # of mailboxes, since the socket had sent everything
        self._socket: socket.socket | None = None
        self._sent_bytes = 0
        self._notifies = False
        self.paused = False
        """Whether the transport has more than it can write."""
        self.counted_bytes = 0  # bytes that count against the limit of the client
        self._stalled_at = 0.0
        self._stalled_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that the operating system does not have yet, or more for small messages of mailboxes."""
        waiting = self._bytes + (self.transport.get_write_buffer_size() if self.transport is not None else 0)
        if self._messages >= LINK_MESSAGES_MAX and not waiting:
            self._messages = int(self._has_unsent())
        return max(waiting, self._messages * MESSAGE_LEAST_BYTES)

    def send(self, data: bytes) -> None:
        """Buffer bytes until the turn ends."""
        if self.closed:
            return
        if not self._chunks:
            self._hub.has_output(self)
        self._chunks.append(data)
        self._bytes += len(data)
        if self._bytes > LINK_FULL_BYTES:  # a large buffer does not wait for the end of the turn
            self.write_out()

    def count_messages(self, count: int) -> None:
        """Count buffered messages of mailboxes. Many of them do not wait for the end of the turn."""
        self._messages += count
        if self._messages >= LINK_MESSAGES_MAX:
            self.write_out()

    def write_out(self) -> None:
        """Write the buffer. A connection with too many bytes waiting is cut off."""
        transport, chunks, size = self.transport, self._chunks, self._bytes
        if transport is None or not chunks:
            return
        if self.pending_bytes > self._hub.pending_bytes_max:
            self._overflow()
            return
        transport.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        self._chunks, self._bytes = [], 0
        self._sent_bytes += size
        if self.paused:
            self.count_waiting()
        if self._notifies and not self.paused:
            self._notifies = False
            self._hub.loop.call_soon(self._hub.drained, self.link)

    def discard(self) -> None:
        """Drop the buffer, and accept nothing more."""
        self.closed = True
        self._chunks, self._bytes = [], 0

    def narrow(self) -> None:
        """Keep the buffers of transport and socket small: messages in them cannot be overtaken.

        The transport is paused while it has anything that the system did not take.
        """
        if self.transport is None:
            return
        self.transport.set_write_buffer_limits(high=1)  # with 0, TLS is paused while it has nothing
        self._socket = self.transport.get_extra_info("socket")
        if self._socket is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def _has_unsent(self) -> bool:
        """Whether the socket has bytes for which the peer or the network has no room."""
        found = bytearray(4)
        with contextlib.suppress(OSError):
            if self._socket is not None:
                fcntl.ioctl(self._socket.fileno(), SIOCOUTQNSD, found)
                return any(found)
        return True

    def notify_when_drained(self) -> None:
        """Request one call of `drained`: after the next write, or when a paused transport resumes."""
        self._notifies = True

    def pause(self) -> None:
        self.paused = True
        self._stalled_at = self._hub.loop.time()

    def resume(self) -> None:
        self.paused = self._notifies = False
        self.count_waiting()

    def count_waiting(self) -> None:
        """Count the bytes that wait in a paused transport against the client. Above its limit, overflow."""
        waiting = self.transport.get_write_buffer_size() if self.paused and self.transport is not None else 0
        more, self.counted_bytes = waiting - self.counted_bytes, waiting
        if not self._hub.usage.pending.add(self.link.client, more) and more > 0:
            self._overflow()

    def _overflow(self) -> None:
        """Too many bytes wait. Drop everything now, and close the connection after the current callback."""
        if not self.closed:
            self._hub.refused(self.link, SLOW_CONSUMER, TOO_MANY, "deliver")
        self.discard()
        # Uncounted at once, so that other connections of the client can continue.
        self._hub.usage.pending.add(self.link.client, -self.counted_bytes)
        self.counted_bytes = 0
        self._hub.loop.call_soon(self.link.cut)

    def is_stuck(self, now_s: float, patience_s: float) -> bool:
        """Whether the transport is paused and has written nothing for `patience_s`."""
        if not self.paused or self.transport is None:
            return False
        taken = self._sent_bytes - self.transport.get_write_buffer_size()
        if taken != self._stalled_bytes:
            self._stalled_bytes, self._stalled_at = taken, now_s
        return now_s - self._stalled_at > patience_s
