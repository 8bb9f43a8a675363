"""`attack-http`: hostile clients against a real `postroom tasks serve`, while an agent and an operator work.

Each attack takes seconds and sends a bounded amount. No attack may cause a refusal or a loss for the
well-behaved agent and operator, and the server's memory stays below a bound.
"""

import contextlib
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from postroom.server.access.registry import Agents
from postroom.server.http.task_server import POLLS_A_TOKEN_MAX
from tests.crash.kills import Tick
from tests.crash.ledger import Tally
from tests.crash.memory import peak_mb
from tests.waiting import HANG_GUARD_S, until

MEMORY_MB_MAX = 512
BUS_MAX_BYTES = 24 * 1024 * 1024
PIECE = 0x10000
REFUSALS = frozenset({400, 401, 408, 413, 429, 431, 503, 507})
SOFT_DESCRIPTORS = 1024
HOLD_S = 2.0  # for which an attack continues once it is complete


class Scale(NamedTuple):
    """The size of the attacks. The small one is for the normal tests."""

    endless_bytes: int = 48 * 1024 * 1024
    idle: int = 2_500
    polls: int = 1_100
    streams: int = 300
    unread: int = 100
    slow_bodies: int = 100
    depth: int = 1_000_000


SMALL = Scale(
    endless_bytes=20 * 1024 * 1024, idle=150, polls=50, streams=60, unread=8, slow_bodies=20, depth=1_000_000
)


def run(count: int, seed: int, tick: Tick, scale: Scale | None = None) -> Tally:
    """All attacks, `count` times, in a random order."""
    tally = Tally()
    rng = Random(f"attack-http/{seed}")
    _raise_own_limit()
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="postroom-attack-") as folder:
            _round(Path(folder), rng, scale or Scale(), tally)
        tick(1)
    return tally


def _raise_own_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _lower_limit() -> None:
    """As a server is usually started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT_DESCRIPTORS, hard), hard))


def _round(folder: Path, rng: Random, scale: Scale, tally: Tally) -> None:
    with _serving(folder / "data") as target:
        good = _Good(target, tally)
        good.start()
        attacks = [*ATTACKS]
        rng.shuffle(attacks)
        try:
            for attack in attacks:
                attack(_Mallory(target, scale, rng, tally))
                good.went_on(attack.__name__)
        finally:
            good.stop()
        good.check()
        _check_server(target, tally)


def _check_server(target: "_Target", tally: Tally) -> None:
    memory_mb = target.peak_memory_mb()
    tally.facts["memory_mb"] = max(memory_mb, tally.facts.get("memory_mb", 0))
    if memory_mb > MEMORY_MB_MAX:
        tally.breaks(f"the server used {memory_mb} MB of memory, and at most {MEMORY_MB_MAX} are allowed")
    if target.process.poll() is not None:
        tally.breaks(f"the server ended with {target.process.returncode}")
        return
    target.process.send_signal(signal.SIGTERM)
    if target.process.wait(HANG_GUARD_S):
        tally.breaks(f"the server ended with {target.process.returncode} after SIGTERM")


# ---- the server ------------------------------------------------------------------------------------


class _Target:
    """A server with an operator, a well-behaved agent and a hostile one."""

    def __init__(self, data: Path, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.data = data
        self.process = process
        self.port = port
        agents = Agents(data)
        self.tokens = {name: agents.add(name) for name in ("worker", "mallory")}
        self.tokens["boss"] = agents.add("boss", role="operator")

    def peak_memory_mb(self) -> int:
        return peak_mb(self.process.pid)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_GUARD_S)

    def ask(self, who: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_GUARD_S)
        try:
            return _asked(connection, self.tokens.get(who, ""), method, path, body)
        finally:
            connection.close()


def _asked(
    connection: http.client.HTTPConnection, token: str, method: str, path: str, body: object
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    raw = answer.read()
    return answer.status, json.loads(raw) if raw else None


@contextlib.contextmanager
def _serving(data: Path) -> Iterator[_Target]:
    words = ("tasks", "serve", "--data", str(data), "--port", "0", "--durability", "os")
    process = subprocess.Popen(
        [sys.executable, "-m", "postroom.cli.main", *words, "--bus-max-bytes", str(BUS_MAX_BYTES)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=_lower_limit,  # noqa: PLW1509 - it only calls the system
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield _Target(data, process, int(url.rpartition(":")[2]))
    finally:
        process.kill()
        process.communicate()


# ---- those who behave ------------------------------------------------------------------------------


class _Good:
    """An operator that enqueues on new connections, and an agent that uses one open connection."""

    def __init__(self, target: _Target, tally: Tally) -> None:
        self._target = target
        self._tally = tally
        self._stopped = threading.Event()
        self._enqueued: list[str] = []
        self._completed: set[str] = set()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._boss, self._agent)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it met, it should not have
            self._tally.breaks(f"a client that behaves met {type(error).__name__}: {error}")

    def _boss(self) -> None:
        while not self._stopped.is_set():
            task = {"agent": "worker", "payload": len(self._enqueued)}
            status, answer = self._target.ask("boss", "POST", "/queue/enqueue", task)
            self._expect(status, (201,), "enqueue", answer)
            self._enqueued.append(answer["task_id"])
            status, answer = self._target.ask("boss", "GET", "/queue/status")
            self._expect(status, (200,), "status", answer)
            self._follow_events()

    def _follow_events(self) -> None:
        """Open an event stream, as a page of an operator does."""
        connection = http.client.HTTPConnection("127.0.0.1", self._target.port, timeout=HANG_GUARD_S)
        with contextlib.closing(connection):
            token = self._target.tokens["boss"]
            connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
            with contextlib.closing(connection.getresponse()) as answer:
                self._expect(answer.status, (200,), "events", answer.reason)

    def _agent(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._target.port, timeout=HANG_GUARD_S)
        try:
            while self._worked(connection) or not self._stopped.is_set():
                pass
        finally:
            connection.close()

    def _worked(self, connection: http.client.HTTPConnection) -> bool:
        token = self._target.tokens["worker"]
        status, task = _asked(connection, token, "POST", "/queue/next", {"wait_s": 0.2})
        self._expect(status, (200, 204), "next", task)
        if status != http.HTTPStatus.OK:
            return False
        word = {"task_id": task["task_id"], "lease": task["lease"], "decision": task["payload"]}
        status, answer = _asked(connection, token, "POST", "/queue/complete", word)
        self._expect(status, (202,), "complete", answer)
        self._completed.add(task["task_id"])
        return True

    def _expect(self, status: int, wanted: tuple[int, ...], what: str, answer: Any) -> None:
        if status not in wanted:
            raise AssertionError(f"{what} was answered with {status}: {answer}")

    def went_on(self, attack: str) -> None:
        """Wait until agent and operator have made progress after an attack."""
        before = len(self._enqueued), len(self._completed)

        def more() -> bool:
            if not all(thread.is_alive() for thread in self._threads):
                raise AssertionError(f"a client that behaves had ended during {attack}")
            return len(self._enqueued) > before[0] and len(self._completed) > before[1]

        until(more)

    def check(self) -> None:
        """Everything acknowledged is stored and done."""
        self._tally.acknowledged += len(self._enqueued) + len(self._completed)
        missing = set(self._enqueued) - self._completed
        for task_id in self._enqueued:
            status, task = self._target.ask("boss", "GET", f"/tasks/{task_id}")
            lost = status != http.HTTPStatus.OK or task["state"] != "COMPLETED" or task_id in missing
            self._tally.lost += lost


# ---- those who do not ------------------------------------------------------------------------------


class _Mallory:
    """The common parts of the attacks."""

    def __init__(self, target: _Target, scale: Scale, rng: Random, tally: Tally) -> None:
        self.target = target
        self.scale = scale
        self.rng = rng
        self.tally = tally

    def head(self, method: str, path: str, *, token: bool = True) -> bytes:
        shown = f"Authorization: Bearer {self.target.tokens['mallory']}\r\n" if token else ""
        return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{shown}".encode()

    def post(self, path: str, body: bytes) -> bytes:
        return self.head("POST", path) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    @contextlib.contextmanager
    def many(self, count: int, raw: bytes) -> Iterator[list[socket.socket]]:
        """Connections that have all sent the same bytes. The server may close some of them."""
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(count):
                connection = stack.enter_context(self.target.connect())
                with contextlib.suppress(OSError):
                    connection.sendall(raw)
                opened.append(connection)
            yield opened

    def await_refusals(self, opened: list[socket.socket]) -> None:
        """Wait until some connections were refused, and count them."""
        until(lambda: any(_status(connection) in REFUSALS for connection in opened))
        self.count_refusals(opened)

    def count_refusals(self, opened: list[socket.socket]) -> None:
        self.tally.count("refused", sum(_status(connection) in REFUSALS for connection in opened))


def _status(connection: socket.socket) -> int:
    """The status of the reply on a connection so far; 0 without one."""
    connection.settimeout(0.0)
    try:
        line = connection.recv(len("HTTP/1.1 200 "), socket.MSG_PEEK)
        return int(line.split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def endless_requests(mallory: _Mallory) -> None:
    """Trailers, extensions, tiny chunks, bodies and heads without end."""
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    parts = [
        (chunked + b"0\r\n", b"X-Trailer: " + b"x" * 4_000 + b"\r\n"),
        (chunked + b"0\r\nX-Trailer: ", b"x" * PIECE),
        (chunked + b"1;x=", b"x" * PIECE),
        (chunked, b"1\r\n \r\n" * 10_000),
        (chunked, b"10000\r\n" + b" " * PIECE + b"\r\n"),
        (b"X: ", b"x" * PIECE),
    ]
    for begin, piece in mallory.rng.sample(parts, len(parts)):
        token = mallory.rng.random() < 0.5
        with mallory.target.connect() as connection:
            connection.sendall(mallory.head("POST", "/queue/next", token=token) + begin)
            if _sent(connection, piece, mallory.scale.endless_bytes):
                mallory.tally.breaks(f"a request of {mallory.scale.endless_bytes} bytes was read to its end")
            mallory.tally.count("refused")


def _sent(connection: socket.socket, piece: bytes, size: int) -> bool:
    """Whether the server accepted all of it."""
    try:
        for _ in range(size // len(piece)):
            connection.sendall(piece)
    except OSError:
        return False
    return True


def idle_connections(mallory: _Mallory) -> None:
    """Connections that send nothing, and some that send half a head."""
    with mallory.many(mallory.scale.idle, b"") as idle, mallory.many(50, b"GET / HTTP/1.1\r\nX: ") as slow:
        time.sleep(HOLD_S)
        mallory.count_refusals(idle + slow)


def long_polls(mallory: _Mallory) -> None:
    poll = mallory.post("/queue/next", b'{"wait_s": 30}')
    with mallory.many(mallory.scale.polls, poll) as opened:
        if mallory.scale.polls > POLLS_A_TOKEN_MAX:
            mallory.await_refusals(opened)


def unread_streams(mallory: _Mallory) -> None:
    with mallory.many(mallory.scale.streams, mallory.head("GET", "/events") + b"\r\n") as opened:
        mallory.await_refusals(opened)


def full_bus(mallory: _Mallory) -> None:
    """Post until the bus is full; then request it on many connections that do not read the reply."""
    message = {"type": "INFO", "project_id": "p", "body": "x" * 3_000_000}
    status = 201
    while status == http.HTTPStatus.CREATED:
        status, _ = mallory.target.ask("mallory", "POST", "/bus/flood/messages", message)
    mallory.tally.count("refused")
    if status != http.HTTPStatus.INSUFFICIENT_STORAGE:
        mallory.tally.breaks(f"a post to a full bus was answered with {status}")
    held = sum(file.stat().st_size for file in (mallory.target.data / "buses").glob("flood*"))
    if held > BUS_MAX_BYTES:
        mallory.tally.breaks(f"a bus of at most {BUS_MAX_BYTES} bytes holds {held}")
    until(lambda: "buses" in mallory.target.ask("", "GET", "/health")[1].get("parts", {}))
    with mallory.many(mallory.scale.unread, mallory.head("GET", "/bus/flood/messages") + b"\r\n"):
        time.sleep(HOLD_S)


def slow_bodies(mallory: _Mallory) -> None:
    """Many long bodies whose last byte never arrives."""
    body = b" " * 3_900_000
    raw = mallory.head("POST", "/bus/flood/messages") + b"Content-Length: 4000000\r\n\r\n" + body
    with mallory.many(mallory.scale.slow_bodies, raw) as opened:
        mallory.await_refusals(opened)


def nested_json(mallory: _Mallory) -> None:
    for depth in (5_000, mallory.scale.depth):
        for piece in (b"[", b'{"a":'):
            body = b'{"task_id": "x", "lease": 1, "decision": ' + piece * (depth // len(piece))
            status, _ = mallory.target.ask("mallory", "POST", "/queue/complete", body)
            mallory.tally.count("refused")
            if status != http.HTTPStatus.BAD_REQUEST:
                mallory.tally.breaks(f"JSON of {depth} levels was answered with {status}")


def pipelined_requests(mallory: _Mallory) -> None:
    """Far more requests than replies that are read."""
    with mallory.target.connect() as connection:
        if _sent(
            connection, (mallory.head("GET", "/health", token=False) + b"\r\n") * 1_000, 16 * 1024 * 1024
        ):
            mallory.tally.breaks("16 MiB of pipelined requests were taken")
        mallory.tally.count("refused")


ATTACKS = (
    endless_requests,
    idle_connections,
    long_polls,
    unread_streams,
    full_bus,
    slow_bodies,
    nested_json,
    pipelined_requests,
)
