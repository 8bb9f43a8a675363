"""A proxy that speaks PostgreSQL's TLS to clients and forwards to a server without TLS, on loopback."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

CHUNK_BYTES = 65_536
SSL_REQUEST = struct.pack(">ii", 8, 80877103)


class TlsProxy:
    """Forwards connections to one port. The wheel's server is built without TLS."""

    def __init__(self, target: int, certificate: Path, key: Path) -> None:
        self._target = target
        self.handshakes = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._listening, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._start(self._serve, client)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), plain:
            while plain.recv(len(SSL_REQUEST)) != SSL_REQUEST:
                plain.sendall(b"N")  # a request for Kerberos
            plain.sendall(b"S")
            with (
                self._context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", self._target)) as server,
            ):
                self.handshakes += 1
                self._sockets += [client, server]
                back = self._start(_pump, server, client)
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
