"""A running `postroom up`, and a plain HTTP client of it."""

import json
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.integration.commandline import finish, start
from tests.waiting import HANG_GUARD_S


class Running:
    """A running `postroom up`."""

    def __init__(self, process: "subprocess.Popen[bytes]", facts: dict[str, Any]) -> None:
        self.process = process
        self.http: str = facts["http"]
        self.nats: str = facts["nats"] or ""
        self.token: str | None = facts["token"]

    def get(self, path: str, token: str | None, context: ssl.SSLContext | None = None) -> tuple[int, Any]:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.http + path, headers=headers)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S, context=context) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def is_ready(self) -> bool:
        """Whether the server takes calls."""
        try:
            return self.get("/ready", None)[0] == HTTPStatus.OK
        except OSError:
            return False

    def parts(self, data: Path) -> dict[str, Any]:
        return dict(json.loads((data / "up.json").read_text())["parts"])


@contextmanager
def running(data: Path, *options: object) -> Iterator[Running]:
    process = start("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0, *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(finish(process).errors)
        yield Running(process, json.loads(line))
    finally:
        process.terminate()
        finish(process)


def answer_to_login(url: str, token: str) -> bytes:
    """What the server says to a login, up to the end of the connection."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=HANG_GUARD_S) as client:
        client.sendall(b'CONNECT {"verbose":false,"auth_token":"%b"}\r\nPING\r\n' % token.encode())
        return b"".join(iter(lambda: client.recv(4096), b""))
