"""A local stand-in for the two GitHub endpoints that the triage needs: labels and comments of an issue."""

import json
import re
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = re.compile(r"/repos/([\w.-]+/[\w.-]+)/issues/(\d+)/(labels|comments)", re.ASCII)


class FakeGitHub(ThreadingHTTPServer):
    """Labels and comments by issue. The first call fails, as calls of the real API sometimes do."""

    daemon_threads = True

    def __init__(self) -> None:
        self.labels: dict[int, set[str]] = defaultdict(set)
        self.comments: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.faults = 1
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeGitHub

    def do_GET(self) -> None:
        found = PATH.fullmatch(self.path)
        if found is None or found[3] != "comments":
            return self._reply(404, {"message": "Not Found"})
        return self._reply(200, self.server.comments[int(found[2])])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = PATH.fullmatch(self.path)
        if found is None:
            return self._reply(404, {"message": "Not Found"})
        if self.server.faults:
            self.server.faults -= 1
            return self._reply(502, {"message": "Server Error"})
        number = int(found[2])
        if found[3] == "labels":
            self.server.labels[number].update(body["labels"])
            return self._reply(200, [{"name": name} for name in sorted(self.server.labels[number])])
        self.server.comments[number].append({"body": body["body"]})
        return self._reply(201, body)

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""
