"""A small HTTP server in a worker. The harness sends nudges to `POST /task`; `GET /health` answers 200.

Rule 1: a nudge may be lost. What the endpoint cannot take at once is dropped.
"""

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

NUDGE_BODY_BYTES_MAX = 64 * 1024
NUDGE_READ_S = 5.0
NUDGES_AT_ONCE_MAX = 16
_SUCCESS_BELOW = 300


class _NudgeServer(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * NUDGES_AT_ONCE_MAX

    def __init__(self, address: tuple[str, int], on_nudge: Callable[[], None]) -> None:
        self.on_nudge = on_nudge
        self._free_threads = threading.BoundedSemaphore(NUDGES_AT_ONCE_MAX)
        super().__init__(address, _NudgeHandler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind would do a DNS lookup of our name
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_threads.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that disconnect or do not speak HTTP."""


class _NudgeHandler(BaseHTTPRequestHandler):
    server: _NudgeServer
    timeout = NUDGE_READ_S

    def do_POST(self) -> None:
        if self.path != "/task":
            return self._reply(404)
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > NUDGE_BODY_BYTES_MAX:
            return self._reply(413)
        self.rfile.read(int(length))  # names a task; the worker claims whichever task is next
        self.server.on_nudge()
        return self._reply(202)

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" else 404)

    def _reply(self, status: int) -> None:
        body = b'{"status":"ok"}' if status < _SUCCESS_BELOW else b'{"status":"refused"}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the worker logs the tasks themselves."""


@contextlib.contextmanager
def nudge_endpoint(address: tuple[str, int] | None, on_nudge: Callable[[], None]) -> Iterator[None]:
    """Call `on_nudge` for every nudge while the block runs; without an address, do nothing."""
    if address is None:
        yield
        return
    with _NudgeServer(address, on_nudge) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name="nudges", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
