"""uvicorn as this server uses it: a limit on heads, an end that lets nobody wait, and no log of its own."""

import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 32 * 1024
LINE_EXTRA_BYTES = 4
REQUEST_TIMEOUT_S = 30.0  # from the first byte to the last
KEEP_ALIVE_S = 75.0
CONNECTIONS_MAX = 12_000
SHUTDOWN_TIMEOUT_S = 10.0

_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)
_TOO_LONG_BODY = b'{"error":"TooLong","message":"a head of at most %d bytes is taken here"}' % HEAD_BYTES_MAX


class LimitedProtocol(HttpToolsProtocol):
    """HTTP with an end to how long a head may be, and how long a request may take to arrive."""

    _head_bytes = 0
    _head_open = True
    _request_open = False
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._head_open:
            self._head_bytes += len(data)
            self._request_open = True
        super().data_received(data)
        if self._request_open:  # most requests come in one piece, and need no timer
            self._start_timer()
            if self._head_open and self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()

    def on_headers_complete(self) -> None:
        self._head_open = False
        # What came in one piece with a body is counted exactly; a head that came alone was counted already.
        if self._head_bytes > HEAD_BYTES_MAX and self._head_size() > HEAD_BYTES_MAX:
            self._refuse_head()
            return
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_open, self._request_open = True, False
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _head_size(self) -> int:
        """As it came: each line has a colon, a blank and its end besides."""
        return len(self.url) + sum(len(name) + len(value) + LINE_EXTRA_BYTES for name, value in self.headers)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_LONG % (len(_TOO_LONG_BODY), _TOO_LONG_BODY))
            self.transport.close()


def listener_config(app: Any) -> uvicorn.Config:
    """How the server listens."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,  # type: ignore[arg-type]
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,  # type: ignore[arg-type]
    )


class Listener(uvicorn.Server):
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
