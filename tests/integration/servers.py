"""The task server as a real process, and a plain HTTP client."""

import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from postroom import Tasks
from postroom.server.access.registry import Agents
from postroom.server.folder.buses import BUS_BYTES_MAX
from tests import warmpython
from tests.waiting import HANG_GUARD_S

# Fails a decision whose payload says so, and records the others.
PROGRAM = """
import sys
from pathlib import Path
from postroom.server.app import serve

data = Path(sys.argv[1])

def execute(decision):
    if decision.payload == "fail":
        raise ValueError("a secret result")
    with (data / "executed").open("a") as file:
        file.write(f"{decision.parent}\\n")

serve(
    data, port=int(sys.argv[2]), durability="os", execute=execute if sys.argv[3] == "execute" else None,
    bus_max_bytes=int(sys.argv[4]), allowed_nudge_hosts=sys.argv[5:],
    ready=lambda port: print(port, flush=True),
)
"""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A server of a data folder with an operator and two agents."""

    def __init__(
        self,
        data: Path,
        *nudge_hosts: str,
        execute: bool = False,
        bus_max_bytes: int = BUS_BYTES_MAX,
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        self.data = data
        self._descriptors = descriptors
        data.mkdir(exist_ok=True)
        self.agents = Agents(data)
        self.tokens = {name: self.agents.add(name) for name in ("triage", "review")}
        self.tokens["boss"] = self.agents.add("boss", role="operator")
        self._words = ("execute" if execute else "", str(bus_max_bytes), *nudge_hosts)
        self.start()

    def start(self, port: int = 0) -> None:
        self.log = self.data / "log"
        with self.log.open("ab") as errors:
            self.process = self._started([sys.executable, "-c", PROGRAM, str(self.data), str(port)], errors)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def _started(self, command: list[str], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
        words, limits = [*command, *self._words], self._descriptors
        if limits is None:
            return warmpython.popen(words, stdout=subprocess.PIPE, stderr=errors)
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),  # noqa: PLW1509 - it only calls the system
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=HANG_GUARD_S)
        return self.process.returncode

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log so far; every line must be JSON."""
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    @contextmanager
    def tasks(self) -> Iterator[Tasks]:
        """The store itself, not through the server."""
        with Tasks.open(f"sqlite:///{self.data / 'queue.db'}") as tasks:
            yield tasks

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_GUARD_S)

    def send(
        self,
        who: str | None,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request, on a connection of its own."""
        sent = {**(headers or {})}
        if who is not None:
            sent["Authorization"] = f"Bearer {self.tokens.get(who, who)}"
        data = json.dumps(body).encode() if body is not None else raw
        connection = self.connect()
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, who: str | None, path: str, **headers: str) -> Answer:
        return self.send(who, "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, who: str | None, path: str, **body: object) -> Answer:
        return self.send(who, "POST", path, body)

    def enqueue(self, agent: str = "triage", payload: object = None, **keywords: object) -> str:
        answer = self.post("boss", "/queue/enqueue", agent=agent, payload=payload, **keywords)
        assert answer.status == 201, answer
        return str(answer.json["task_id"])

    def claim(self, who: str = "triage", **keywords: object) -> Any:
        answer = self.post(who, "/queue/next", **keywords)
        assert answer.status == 200, answer
        return answer.json

    @contextmanager
    def stream(self, who: str, path: str, **headers: str) -> Iterator["Stream"]:
        """An open event stream."""
        connection = self.connect()
        sent = {k.replace("_", "-"): v for k, v in headers.items()}
        sent |= {"Authorization": f"Bearer {self.tokens[who]}", "Accept": "text/event-stream"}
        connection.request("GET", path, headers=sent)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield Stream(answer)
        finally:
            # A stream does not end by itself: without this, closing would continue to read.
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


class Message(NamedTuple):
    id: str
    event: str
    data: Any


class Stream:
    """Server-sent events, one by one."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer
        self.kind = answer.headers["content-type"]

    def next(self) -> Message | None:
        """The next event; None at the end of the stream."""
        fields: dict[str, str] = {}
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            if text.startswith(":"):
                continue
            if not text:
                if fields:
                    return Message(fields["id"], fields["event"], json.loads(fields["data"]))
                continue
            name, _, value = text.partition(": ")
            fields[name] = value
        return None

    def take(self, count: int) -> list[Message]:
        return [message for message in (self.next() for _ in range(count)) if message is not None]


@contextmanager
def serving(data: Path, *nudge_hosts: str, **options: Any) -> Iterator[Server]:
    server = Server(data, *nudge_hosts, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()
