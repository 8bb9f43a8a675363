"""A TCP proxy that can be told to reset connections, to drop an answer, or to swallow everything."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 65_536
LOOK_S = 0.01
ANSWER_S = 0.05  # the server's time to do what nobody waits for any more
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset

Watch = Callable[[bytes], str]
"""What to do with a chunk of a client: "pass", "reset" before it, "reset-after" it was passed on."""


class TcpProxy:
    """Forwards connections to one port of loopback."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.watch: Watch = lambda _chunk: "pass"
        self.is_hole = False
        """Whether bytes are swallowed, in both directions, and new connections get no answer."""
        self.is_stopped = False
        """Whether nothing is read from either side, so that the buffers of senders fill up."""
        self._frozen: set[socket.socket] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._mutex = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.reset_all()

    def reset_all(self) -> None:
        """Reset every connection."""
        with self._mutex:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _reset(*pair)

    def freeze_all(self) -> None:
        """Make every connection half open: whatever is sent on it is swallowed, and so is its end."""
        with self._mutex:
            self._frozen.update(one for pair in self._pairs for one in pair)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", self._target))
                    self._serve(client, server)
                    continue
                _reset(client)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._mutex:
            self._pairs.append((client, server))
        for job in ((client, server, True), (server, client, False)):
            threading.Thread(target=self._pump, args=job, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                while self.is_stopped:
                    time.sleep(LOOK_S)
                if self.is_hole or source in self._frozen:
                    continue
                wish = self.watch(chunk) if is_client else "pass"
                if wish == "reset":
                    break
                target.sendall(chunk)
                if wish == "reset-after":
                    _reset(source)  # the server goes on, and nobody hears its answer
                    time.sleep(ANSWER_S)
                    break
        if source not in self._frozen:
            _reset(source, target)


def _reset(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which would keep it open
        one.close()
