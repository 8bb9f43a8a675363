"""A model for tests: a server that speaks the chat-completions API and answers from a script."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Asked", "said", "scripted"]

Asked = dict[str, Any]
"""A question as the model sees it: kind, options and facts."""


def said(choice: str, confidence: float = 0.9, **fields: Any) -> bytes:
    """The answer of a model that chooses an option."""
    content = json.dumps({"choice": choice, "confidence": confidence, "reasoning": "as scripted", **fields})
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@contextmanager
def scripted(answer: Callable[[Asked], bytes]) -> Iterator[tuple[str, list[Asked]]]:
    """A server whose model calls `answer`. Yields its address, and the questions that it got."""
    questions: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = json.loads(body["messages"][1]["content"])
            asked["facts"] = json.loads(asked["facts"])
            questions.append(asked)
            data = answer(asked)
            with suppress(ConnectionError):  # the adviser has not waited
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", questions
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
