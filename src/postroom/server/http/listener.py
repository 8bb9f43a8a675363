"""uvicorn with limits on requests and connections, JSON refusals, and a clean shutdown.

Rule 1: every byte of a request is counted: its head, its body, and the framing of its chunks.
Rule 2: a request that is refused before it has arrived closes its connection. Part of the rest is read and
        discarded first, because a client that is still sending would not see the reply otherwise.
Rule 3: every reply is JSON, even to bytes that are not HTTP.
Rule 4: every refusal is given to `ListenerConfig.refused`, because no handler sees it. A connection that is
        closed while it is idle has made no call, and is not a refusal.
Rule 5: with TLS, connections come from `TlsListener`, which sees failed handshakes.
"""

import signal
import socket
import ssl
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from postroom.calls.server import ErrorAnswer
from postroom.errors import TooMany, Unavailable
from postroom.server.access.refusal_events import RefusedCall
from postroom.server.access.registry import Identity
from postroom.server.http.connections import ConnectionLimits, allowed_connections
from postroom.server.http.exchange import ANONYMOUS
from postroom.server.http.tls_listener import FailedHandshake, TlsListener

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100  # a short header takes far more memory than bytes on the wire
FRAMING_BYTES_MAX = 64 * 1024  # plus the length of the body: sizes and extensions of chunks
DISCARDED_BYTES_MAX = 8 * 1024 * 1024  # of a refused request, so that its sender sees the reply
PIPELINED_MAX = 64
LINE_EXTRA_BYTES = 4  # a colon, a space, CR and LF
LINGER_S = 2.0
SHUTDOWN_TIMEOUT_S = 10.0
RETRY_AFTER_S = 1

UNROUTED = "request"
"""What the event of a refusal names when the request has no route yet."""
UNREAD = "reply"
"""The same, for a reply that the client does not read."""
UNCONNECTED = "connect"
"""The same, for a connection that is refused without a request."""

CONNECTION = "postroom.connection"
"""The key of the connection in a request's scope, while the connection is anonymous."""


class HttpTimeouts(NamedTuple):
    """How long a connection may take."""

    first_request_s: float = 10.0
    """To the first byte, and between requests without a token."""
    request_s: float = 30.0
    """From the first byte to the last."""
    write_s: float = 30.0
    """How long a client may leave a reply unread."""
    keep_alive_s: float = 75.0


class _BadRequest(Exception):
    """Stops the parser after the refusal was sent."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection: HTTP with limits on the size and duration of requests and replies."""

    config: "ListenerConfig"

    _identity: Identity | None = None
    _address = ""
    _request_bytes = 0
    _head_bytes = 0
    _body_bytes = 0
    _head_open = True
    _request_open = False
    _starting: tuple[RequestResponseCycle, Any] | None = None
    _parsing = False
    _keeps_alive = True
    _overfull = False
    _ending = False
    _discardable = DISCARDED_BYTES_MAX
    _timer: TimerHandle | None = None
    _timer_is_of_request = False
    _write_timer: TimerHandle | None = None
    _unsent = 0

    # ---- the connection ------------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        first_request_s = self.config.timeouts.first_request_s
        self.timeout_keep_alive = first_request_s  # type: ignore[assignment]
        self.config.connections.open(self, self._address)
        self._start_timer(first_request_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        self.config.connections.close(self, self._address, self._identity)
        self._identity = None
        super().connection_lost(exc)

    def identify(self, identity: Identity) -> None:
        """Count the connection in the share of its first token. Raises when the share is used up."""
        if self._identity is not None or self._ending or self.transport.is_closing():
            return
        try:
            self.config.connections.identify(self, self._address, identity)
        except (TooMany, Unavailable):
            self.cycle.keep_alive = False
            raise
        self._identity = identity
        self.timeout_keep_alive = self.config.timeouts.keep_alive_s  # type: ignore[assignment]

    def evict(self) -> None:
        """Close this connection in favour of another one."""
        message = "there are too many connections without a token: try again soon"
        self._refuse(503, "Unavailable", message, UNCONNECTED)
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after the current reply, because the server stops."""
        self._keeps_alive = False
        super().shutdown()

    # ---- incoming bytes -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._discardable -= len(data)
            if self._discardable < 0:
                self.transport.abort()
            return
        if self._overfull:
            return
        self._request_bytes += len(data)
        self._request_open = True
        self._parsing = True
        super().data_received(data)
        self._parsing = False
        if self._ending:
            return
        if self._starting is not None:  # no part of this piece was refused
            cycle, app = self._starting
            self._starting = None
            super()._start_asgi_task(cycle, app)
        if self._request_open:  # most requests come in one piece
            self._await_rest()

    def _await_rest(self) -> None:
        """Check the part of a request that has arrived, and limit the time for the rest."""
        if not self._timer_is_of_request:
            self._stop_timer()
            self._start_timer(self.config.timeouts.request_s)
            self._timer_is_of_request = True
        if self._head_open:
            if self._request_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
            return
        framing = self._request_bytes - self._head_bytes - self._body_bytes
        if framing > FRAMING_BYTES_MAX + self._body_bytes:
            self._refuse(413, "TooLong", "the chunk framing of the body is too long")
        elif self.cycle.transport is self.transport:
            self._keeps_alive = self.cycle.keep_alive
            self.cycle.keep_alive = False
            self.cycle.transport = _UntilComplete(self)  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the handler after the whole piece is parsed, because the rest of it may be refused."""
        if self._parsing:
            self._starting = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: a request to upgrade is answered as plain HTTP."""

    # ---- parser callbacks ----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:
            self._refuse(400, "BadRequest", "trailers after a body are not accepted")
            raise _BadRequest
        if len(self.headers) >= HEADERS_MAX:
            self._refuse(431, "TooLong", f"a request may have at most {HEADERS_MAX} headers")
            raise _BadRequest
        self._head_bytes += len(name) + len(value) + LINE_EXTRA_BYTES
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif (
            name == b"transfer-encoding" and value.lower() != b"chunked"
        ):  # the parser refuses other combinations
            self._refuse(400, "BadRequest", "the only Transfer-Encoding accepted is 'chunked'")
            raise _BadRequest
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_bytes += len(self.url)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
            raise _BadRequest
        if self._identity is None:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]
        super().on_headers_complete()
        self._head_open = False
        if len(self.pipeline) > PIPELINED_MAX:  # stop reading: this one is refused after the others
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0]
            self._overfull, self._request_open = True, False
            self._stop_timer()
            self.flow.resume_reading()  # uvicorn now assumes that it reads: no request resumes the transport
            self.transport.pause_reading()
            raise _BadRequest

    def on_response_complete(self) -> None:
        if self._overfull and not self.pipeline and not self.transport.is_closing():
            message = f"at most {PIPELINED_MAX} requests may wait on a connection"
            self.transport.write(_refusal_bytes(429, "TooMany", message))
            self._note(429, "TooMany", message)
            self.transport.resume_reading()
            self.end()
        else:
            super().on_response_complete()

    # The next two are uvicorn's methods without their WebSocket branches, because every request uses them.

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._head_open, self._request_open = True, False
        self._request_bytes = self._head_bytes = self._body_bytes = 0
        if self._timer is not None:
            self._stop_timer()
        cycle = self.cycle
        if cycle.response_complete:
            return
        if cycle.transport is not self.transport:  # the request came in several pieces
            cycle.transport = self.transport
            if not cycle.response_started:
                cycle.keep_alive = self._keeps_alive
        cycle.more_body = False
        cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - as uvicorn calls it
        """Refuse bytes that are not HTTP. After `_BadRequest`, the refusal was sent before."""
        if not self._overfull:
            self._refuse(400, "BadRequest", "this is not an HTTP request that can be parsed")

    # ---- refusals ------------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        self._refuse(431, "TooLong", f"the head of a request may have at most {HEAD_BYTES_MAX} bytes")

    def _note(self, status: int, error: str, message: str, call: str = UNROUTED) -> None:
        address = f"{self.client[0]}:{self.client[1]}" if self.client else ""
        identity = self._identity or ANONYMOUS
        self.config.refused(RefusedCall(identity, address, "http", call, status, error, message))

    def _refuse(self, status: int, error: str, message: str, call: str = UNROUTED) -> None:
        """Refuse the request that is being read, unless an earlier one is unanswered, and close."""
        if self._ending or self.transport.is_closing():
            return
        self._note(status, error, message, call)
        cycle = self.cycle
        unanswered = cycle is not None and not cycle.response_complete
        if not unanswered or (not self._head_open and not cycle.response_started and not self.pipeline):
            self.transport.write(_refusal_bytes(status, error, message))
        if unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self._starting = None
        self.end()

    def end(self) -> None:
        """Close the connection in a way that lets the client read the reply."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer(LINGER_S)

    # ---- timeouts ------------------------------------------------------------------------------

    def _start_timer(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._timer_is_of_request = False

    def _time_out(self) -> None:
        if self._request_open and not self._ending:
            within = f"{self.config.timeouts.request_s:g} s"
            self._refuse(408, "TooSlow", f"a request has to arrive within {within}")
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. A reply that is still unread is dropped."""
        if self.transport.get_write_buffer_size():
            self._abort_unread()
        super().timeout_keep_alive_handler()

    # ---- unread replies -----------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Count the unsent bytes, because the client reads too slowly."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.config.timeouts.write_s, self._abort_unread)
        if self._identity is not None:
            unsent = self.transport.get_write_buffer_size()
            try:
                self.config.connections.unsent.take(self._identity, unsent)
            except (TooMany, Unavailable) as error:
                self._note(429, type(error).__name__, str(error), UNREAD)
                self.transport.abort()
            else:
                self._unsent = unsent

    def _abort_unread(self) -> None:
        within = f"{self.config.timeouts.write_s:g} s"
        self._note(408, "TooSlow", f"a reply has to be read within {within}", UNREAD)
        self.transport.abort()

    def resume_writing(self) -> None:
        """Stop counting: the client has read most of the reply, or the connection is lost."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._unsent and self._identity is not None:
            self.config.connections.unsent.give_back(self._identity, self._unsent)
            self._unsent = 0


class _UntilComplete:
    """The transport of an incomplete request. Closing it lets the client read the reply."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.end()


def _refusal_bytes(status: int, error: str, message: str) -> bytes:
    """The bytes of a refusal that ends the connection."""
    body = msgspec.json.encode(ErrorAnswer(error, message))
    retry_after = b"retry-after: %d\r\n" % RETRY_AFTER_S if status in (429, 503) else b""
    return (
        b"HTTP/1.1 %d %b\r\nconnection: close\r\n%b"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    ) % (status, HTTPStatus(status).phrase.encode(), retry_after, len(body), body)


class ListenerConfig(uvicorn.Config):
    """uvicorn's configuration with the connections of the server."""

    timeouts = HttpTimeouts()
    connections: ConnectionLimits
    refused: Callable[[RefusedCall], None]
    """Called for each refusal that no handler sees."""

    def note_handshake(self, failed: FailedHandshake) -> None:
        """A connection was refused before its first request."""
        self.refused(
            RefusedCall(
                ANONYMOUS, failed.address, "http", UNCONNECTED, failed.status, failed.error_type, failed.error
            )
        )


def listener_config(
    app: Any, refused: Callable[[RefusedCall], None], tls: tuple[Path, Path | None] | None = None
) -> ListenerConfig:
    """The configuration of uvicorn for an application; `tls` is a certificate and its key."""
    certificate, key = tls or (None, None)
    config = ListenerConfig(
        app,
        http=LimitedProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=ListenerConfig.timeouts.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,  # type: ignore[arg-type]
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    config.connections = ConnectionLimits(allowed_connections())
    config.refused = refused
    return config


class HttpServer(uvicorn.Server):
    """Ends on SIGTERM and SIGINT: long polls at once, other requests after their reply."""

    config: ListenerConfig

    def __init__(
        self, config: ListenerConfig, *, end_waits: Callable[[], None], started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._end_waits = end_waits
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        if not config.is_ssl:
            await super().startup(sockets)
        else:
            await super().startup([])  # uvicorn's own servers do not tell about failed handshakes
            self._listen_with_tls(sockets or [], config.ssl)
        self._started()

    def _listen_with_tls(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        assert context is not None  # noqa: S101 - for the types: `load` has made it
        for listening in sockets:
            server = TlsListener(
                listening,
                context,
                lambda: LimitedProtocol(self.config, self.server_state, self.lifespan.state),
                connections=self.config.connections,
                failed=self.config.note_handshake,
            )
            server.start()
            self.servers.append(server)  # type: ignore[arg-type]  # it has what uvicorn calls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_waits()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn, but the process does not raise the signal again after the shutdown."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        before = [(number, signal.signal(number, self.handle_exit)) for number in signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
