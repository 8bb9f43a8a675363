"""uvicorn as this server uses it: limits on requests and connections, JSON refusals, and a clean end.

Rule 1: every byte of a request is counted: its head, its body, and what frames the body.
Rule 2: a connection whose request was refused before it had arrived is closed. Some of the rest is read and
        thrown away first, because a client that is still sending would not see the answer otherwise.
Rule 3: every answer is JSON, also to what is not HTTP.
"""

import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from postroom.errors import TooMany, Unavailable
from postroom.runtime.agents import Identity
from postroom.runtime.connections import Connections, allowed_connections
from postroom.runtime.schemas import ErrorAnswer

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100  # a short header takes far more memory than bytes on the wire
FRAMING_BYTES_MAX = 64 * 1024  # besides as many as the body has: sizes and extensions of chunks
DISCARDED_BYTES_MAX = 8 * 1024 * 1024  # of a refused request, so that its sender sees the answer
PIPELINED_MAX = 64
LINE_EXTRA_BYTES = 4  # a colon, a blank and the end of the line
FIRST_REQUEST_S = 10.0  # from the connection to the first byte, and between requests without a token
REQUEST_TIMEOUT_S = 30.0  # from the first byte to the last
WRITE_TIMEOUT_S = 30.0  # that a client may leave an answer unread
LINGER_S = 2.0
KEEP_ALIVE_S = 75.0
SHUTDOWN_TIMEOUT_S = 10.0
RETRY_AFTER_S = 1

CONNECTION = "postroom.connection"
"""Where a request's scope has the connection that it came by, until that has shown a token."""


class _BadRequest(Exception):
    """Stops the parser. The refusal has been sent already."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection: HTTP with limits on the size and duration of requests and answers."""

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
        self.timeout_keep_alive = FIRST_REQUEST_S  # type: ignore[assignment]
        self.config.connections.open(self, self._address)
        self._start_timer(FIRST_REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        self.config.connections.close(self, self._address, self._identity)
        self._identity = None
        super().connection_lost(exc)

    def identify(self, identity: Identity) -> None:
        """The first request showed a token. Raises when the token has too many connections."""
        if self._identity is not None or self._ending or self.transport.is_closing():
            return
        try:
            self.config.connections.identify(self, self._address, identity)
        except (TooMany, Unavailable):
            self.cycle.keep_alive = False
            raise
        self._identity = identity
        self.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]

    def evict(self) -> None:
        """Close this connection in favour of another one."""
        self._refuse(503, "Unavailable", "too many connections have not shown a token: try again soon")
        self.transport.close()

    def shutdown(self) -> None:
        """The server ends: the answer under way is the last."""
        self._keeps_alive = False
        super().shutdown()

    # ---- a request comes in --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._discard(len(data))
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
        if self._starting is not None:  # nothing in this piece was refused
            cycle, app = self._starting
            self._starting = None
            super()._start_asgi_task(cycle, app)
        if self._request_open:  # most requests come in one piece
            self._await_rest()

    def _await_rest(self) -> None:
        """Part of a request is missing: check what came so far, and how long the rest takes."""
        if not self._timer_is_of_request:
            self._stop_timer()
            self._start_timer(REQUEST_TIMEOUT_S)
            self._timer_is_of_request = True
        if self._head_open:
            if self._request_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
            return
        framing = self._request_bytes - self._head_bytes - self._body_bytes
        if framing > FRAMING_BYTES_MAX + self._body_bytes:
            self._refuse(413, "TooLong", "the chunks of the body have too many bytes that are not body")
        elif self.cycle.transport is self.transport:
            self._keeps_alive = self.cycle.keep_alive
            self.cycle.keep_alive = False
            self.cycle.transport = _UntilComplete(self)  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request when the whole piece that it came in is parsed: what follows may be refused."""
        if self._parsing:
            self._starting = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked for another protocol."""

    # ---- what the parser finds -----------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:
            self._refuse(400, "BadRequest", "trailers behind a body are not taken here")
            raise _BadRequest
        if len(self.headers) >= HEADERS_MAX:
            self._refuse(431, "TooLong", f"a head of at most {HEADERS_MAX} headers is taken here")
            raise _BadRequest
        self._head_bytes += len(name) + len(value) + LINE_EXTRA_BYTES
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding" and value.lower() != b"chunked":  # the parser refuses the rest
            self._refuse(400, "BadRequest", "no Transfer-Encoding but 'chunked' is taken here")
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
        if len(self.pipeline) > PIPELINED_MAX:
            self._leave_out()
            raise _BadRequest

    def _leave_out(self) -> None:
        """Too many requests wait: read no more. This one is refused when the others are answered."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0]
        self._overfull, self._request_open = True, False
        self._stop_timer()
        self.flow.resume_reading()  # from here on it counts as reading, so that no request resumes it
        self.transport.pause_reading()

    def on_response_complete(self) -> None:
        if self._overfull and not self.pipeline and not self.transport.is_closing():
            message = f"at most {PIPELINED_MAX} requests may wait on a connection"
            self.transport.write(_answer(429, "TooMany", message))
            self.transport.resume_reading()
            self.end()
        else:
            super().on_response_complete()

    # The next two are as uvicorn's, without what they do for WebSockets: every request comes by here.

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
        if cycle.transport is not self.transport:  # it came in several pieces
            cycle.transport = self.transport
            if not cycle.response_started:
                cycle.keep_alive = self._keeps_alive
        cycle.more_body = False
        cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - as uvicorn calls it
        """What came is not HTTP, or the parser was stopped."""
        if not self._overfull:
            self._refuse(400, "BadRequest", "this is not a request that can be read")

    # ---- refusals ------------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        self._refuse(431, "TooLong", f"a head of at most {HEAD_BYTES_MAX} bytes is taken here")

    def _refuse(self, status: int, error: str, message: str) -> None:
        """Answer the request that is being read, unless an earlier one still waits, and end."""
        if self._ending or self.transport.is_closing():
            return
        cycle = self.cycle
        unanswered = cycle is not None and not cycle.response_complete
        if not unanswered or (not self._head_open and not cycle.response_started and not self.pipeline):
            self.transport.write(_answer(status, error, message))
        if unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self._starting = None
        self.end()

    def end(self) -> None:
        """Close the connection, so that the client can still read the answer."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer(LINGER_S)

    def _discard(self, size: int) -> None:
        self._discardable -= size
        if self._discardable < 0:
            self.transport.abort()

    # ---- time ----------------------------------------------------------------------------------

    def _start_timer(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._timer_is_of_request = False

    def _time_out(self) -> None:
        if self._request_open and not self._ending:
            self._refuse(408, "TooSlow", f"a request has to arrive within {REQUEST_TIMEOUT_S:g} s")
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for a while. An answer that was not read till now is given up."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    # ---- answers that are not read -------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)
        if self._identity is not None:
            unsent = self.transport.get_write_buffer_size()
            try:
                self.config.connections.unsent.take(self._identity, unsent)
            except (TooMany, Unavailable):
                self.transport.abort()
            else:
                self._unsent = unsent

    def resume_writing(self) -> None:
        """The client has read most of it, or the connection is lost."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._unsent and self._identity is not None:
            self.config.connections.unsent.give_back(self._identity, self._unsent)
            self._unsent = 0


class _UntilComplete:
    """The transport of a request that has not arrived in full: closing it lets the client read the answer."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.end()


def _answer(status: int, error: str, message: str) -> bytes:
    """A refusal with which the connection ends."""
    body = msgspec.json.encode(ErrorAnswer(error, message))
    retry_after = b"retry-after: %d\r\n" % RETRY_AFTER_S if status in (429, 503) else b""
    return (
        b"HTTP/1.1 %d %b\r\nconnection: close\r\n%b"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    ) % (status, HTTPStatus(status).phrase.encode(), retry_after, len(body), body)


class ListenerConfig(uvicorn.Config):
    """uvicorn's configuration, and the connections of the server."""

    connections: Connections


def listener_config(app: Any) -> ListenerConfig:
    """How the server listens."""
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
        timeout_keep_alive=KEEP_ALIVE_S,  # type: ignore[arg-type]
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,  # type: ignore[arg-type]
    )
    config.connections = Connections(allowed_connections())
    return config


class HttpServer(uvicorn.Server):
    """A server that ends on SIGTERM and SIGINT: long polls at once, other requests when they are answered."""

    def __init__(
        self, config: uvicorn.Config, *, end_waits: Callable[[], None], started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._end_waits = end_waits
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_waits()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn, and then the process goes on to its own end instead of dying by the signal."""
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
