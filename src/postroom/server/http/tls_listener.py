"""A listener with TLS that sees failed handshakes, which the servers of asyncio and uvloop hide.

Rule 1: a connection in its handshake counts as one without a token, and the oldest of its address gives way.
Rule 2: a failed handshake is a refusal. A connection that ends before its first byte, or that sends none,
        has made no call, and is not a refusal.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, cast

from postroom.server.http.connections import ConnectionLimits
from postroom.server.nats.options import address_of
from postroom.system.crypto.tls import handshake_fault
from postroom.system.log import library_log

FIRST_BYTE_S = 10.0
HANDSHAKE_S = 10.0  # from the first byte to the end of the handshake
ACCEPTS_A_TURN_MAX = 100
ACCEPT_PAUSE_S = 1.0  # after a failed accept, as without open files
BAD_REQUEST, TOO_SLOW, UNAVAILABLE = 400, 408, 503  # codes of refused calls

_log = library_log("postroom.tls")


class FailedHandshake(NamedTuple):
    """A connection that was refused before its first call."""

    host: str
    address: str
    """Host and port of the peer."""
    status: int
    error_type: str
    error: str


class _Handshake(asyncio.Protocol):
    """A connection up to the end of its handshake."""

    def __init__(self, listener: "TlsListener", connection: socket.socket, peer: tuple[str, int]) -> None:
        self.host = peer[0]
        self.address = address_of(*peer)
        self.is_done = False
        self._listener = listener
        self.task = asyncio.get_running_loop().create_task(listener.shake_hands(self, connection))

    def evict(self) -> None:
        """Close this connection in favour of another one."""
        message = "there are too many connections without a token: try again soon"
        self._listener.failed(FailedHandshake(self.host, self.address, UNAVAILABLE, "Unavailable", message))
        self.task.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done: pass the connection to its protocol."""
        self.is_done = True
        self._listener.pass_on(self, cast("asyncio.Transport", transport))


class TlsListener:
    """Accepts the connections of listening sockets, and gives each a protocol after its handshake."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        connections: ConnectionLimits,
        failed: Callable[[FailedHandshake], None],
        first_byte_s: float = FIRST_BYTE_S,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.failed = failed
        self._first_byte_s, self._handshake_s = first_byte_s, handshake_s
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Accept connections."""
        if not self._is_closed:
            self._listening.settimeout(0)
            self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accept no more connections, and close those in their handshake."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listening)
            self._listening.close()
            for task in self._tasks:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN_MAX):
            try:
                connection, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no connection is accepted for %g s: %s", ACCEPT_PAUSE_S, error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(ACCEPT_PAUSE_S, self.start)
                return
            self._begin(connection, peer[:2])

    def _begin(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        connection.settimeout(0)
        handshake = _Handshake(self, connection, peer)
        self._tasks.add(handshake.task)
        self._connections.open(handshake, handshake.host)

        def end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._connections.close(handshake, handshake.host, None)
            if not handshake.is_done:
                connection.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a connection from %s failed: %r", handshake.address, error)

        handshake.task.add_done_callback(end)

    async def shake_hands(self, handshake: _Handshake, connection: socket.socket) -> None:
        """Do the handshake of a connection."""
        if not await self._has_sent(connection):
            return
        try:
            await self._loop.connect_accepted_socket(
                lambda: handshake, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:
            is_slow = isinstance(error, ConnectionAbortedError)
            status, kind = (TOO_SLOW, "TooSlow") if is_slow else (BAD_REQUEST, "TlsFailed")
            self.failed(
                FailedHandshake(handshake.host, handshake.address, status, kind, handshake_fault(error))
            )

    def pass_on(self, handshake: _Handshake, transport: asyncio.Transport) -> None:
        """Give a connection its protocol."""
        self._connections.close(handshake, handshake.host, None)
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    async def _has_sent(self, connection: socket.socket) -> bool:
        """Wait for the first byte. False when the peer sends none."""
        readable = asyncio.Event()
        self._loop.add_reader(connection, readable.set)
        try:
            async with asyncio.timeout(self._first_byte_s):
                await readable.wait()
            return bool(connection.recv(1, socket.MSG_PEEK))
        except OSError:  # a timeout, too
            return False
        finally:
            with suppress(OSError):
                self._loop.remove_reader(connection)
