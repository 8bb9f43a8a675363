"""Failed TLS handshakes over HTTP and NATS are events with an address and a reason, and a flood is summed."""

import asyncio
import json
import socket
import ssl
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from postroom import Tasks
from postroom.server.access.refusal_events import EVENTS_EACH_MAX
from postroom.system.crypto.tls import make_self_signed
from tests.integration.mailservers import serving
from tests.integration.ups import Running, running
from tests.waiting import HANG_GUARD_S, until

FLOOD = 30


def rejected(data: Path) -> list[dict[str, Any]]:
    """The refused calls that are events of the store."""
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        return [
            {**one.detail, "error_type": one.error_type, "error": one.error}
            for one in tasks.store.events()
            if one.kind == "rejected"
        ]


def trusting_none() -> ssl.SSLContext:
    """A client that trusts authorities, and not the certificate of the server."""
    return ssl.create_default_context()


def too_old() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


class World:
    """A running server with TLS."""

    def __init__(self, up: Running, data: Path, certificate: Path) -> None:
        self.up, self.data, self.certificate = up, data, certificate

    def connect(self, url: str) -> socket.socket:
        address = urlsplit(url)
        return socket.create_connection((address.hostname or "", address.port or 0), timeout=HANG_GUARD_S)

    def plain(self, data: bytes) -> None:
        """Send bytes to the port of HTTP, and read until the end of the connection."""
        with self.connect(self.up.http) as client, suppress(ConnectionResetError):
            client.sendall(data)
            while client.recv(4096):
                pass

    def handshake(self, url: str, context: ssl.SSLContext) -> None:
        """A handshake that fails, after the INFO of a NATS server."""
        with self.connect(url) as client:
            if url == self.up.nats:
                client.recv(4096)
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                context.wrap_socket(client, server_hostname="localhost")

    def refused(self, why: str) -> list[dict[str, Any]]:
        return [one for one in rejected(self.data) if why in one["error"]]

    def mail_refused(self, why: str) -> list[dict[str, Any]]:
        lines = (self.data / "mail" / "events.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [one for one in found if one["kind"] == "rejected" and why in one["error"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_self_signed(tmp_path_factory.mktemp("certificate") / "tls", (), 1)


@pytest.fixture(scope="module")
def world(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("refused") / "run"
    with running(data, "--no-audit", "--tls-cert", files[0], "--tls-key", files[1]) as up:
        yield World(up, data, files[0])


@pytest.mark.statement("encryption-transit")
def test_plain_http_to_the_port_of_tls_is_an_event(world: World) -> None:
    world.plain(b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n\r\n")
    until(lambda: world.refused("plain HTTP to the port of TLS"))
    [event] = world.refused("plain HTTP to the port of TLS")
    assert event["address"].startswith("127.0.0.1:")
    assert (event["via"], event["call"], event["status"]) == ("http", "connect", 400)
    assert event["error_type"] == "TlsFailed"
    assert "secret" not in json.dumps(event)


@pytest.mark.parametrize(
    ("client", "why"),
    [(trusting_none, "does not trust the certificate"), (too_old, "version of TLS is too old")],
)
def test_a_failed_handshake_is_an_event_with_its_reason(world: World, client: Any, why: str) -> None:
    world.handshake(world.up.http, client())
    until(lambda: world.refused(why))
    assert world.refused(why)[0]["address"].startswith("127.0.0.1:")


def test_silent_connection_is_not_an_event_and_does_not_stop_the_server(world: World) -> None:
    before = len(rejected(world.data))
    for _ in range(3):
        world.connect(world.up.http).close()
    trusting = ssl.create_default_context(cafile=world.certificate)
    assert world.up.get("/engine/status", world.up.token, trusting)[0] == 200
    assert world.up.get("/engine/status", "pr_" + "x" * 43, trusting)[0] == 401
    until(lambda: len(rejected(world.data)) > before)
    assert rejected(world.data)[-1]["status"] == 401
    assert len(rejected(world.data)) == before + 1


@pytest.mark.parametrize(
    ("client", "why"),
    [(trusting_none, "does not trust the certificate"), (too_old, "version of TLS is too old")],
)
def test_a_failed_handshake_over_nats_is_an_event_with_its_reason(
    world: World, client: Any, why: str
) -> None:
    world.handshake(world.up.nats, client())
    until(lambda: world.mail_refused(why))
    [event] = world.mail_refused(why)
    assert (event["type"], event["error_type"]) == ("connect", "400")
    assert event["detail"]["address"].startswith("127.0.0.1:")


def test_a_login_over_nats_without_tls_is_an_event(world: World) -> None:
    with world.connect(world.up.nats) as client:
        assert b'"tls_required":true' in client.recv(4096)
        client.sendall(b'CONNECT {"auth_token":"secret"}\r\nPING\r\n')
        with suppress(ConnectionResetError):
            assert b"PONG" not in b"".join(iter(lambda: client.recv(4096), b""))
    until(lambda: world.mail_refused("does not speak TLS"))
    assert "secret" not in json.dumps(world.mail_refused("does not speak TLS"))

    async def flush() -> None:
        trusting = ssl.create_default_context(cafile=world.certificate)
        good = await nats.connect(world.up.nats, token=world.up.token, tls=trusting)
        await good.flush()
        await good.close()

    asyncio.run(flush())


def test_a_failed_handshake_of_a_server_that_begins_with_tls_is_an_event(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ("--tls-first", "--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    with serving(tmp_path / "mail", *words) as server:
        for data in (b"CONNECT {}\r\n", b""):
            with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as client:
                client.sendall(data)
                with suppress(ConnectionResetError):
                    client.shutdown(socket.SHUT_WR)
                    assert client.recv(4096)[:4] != b"INFO"

        async def flush() -> None:
            trusting = ssl.create_default_context(cafile=files[0])
            good = await nats.connect(server.url, tls=trusting, tls_handshake_first=True)
            await good.flush()
            await good.close()

        asyncio.run(flush())
        until(lambda: any(one["kind"] == "rejected" for one in server.events()))
        [event] = [one for one in server.events() if one["kind"] == "rejected"]
        assert "does not speak TLS" in event["error"]
        assert event["detail"]["address"].startswith("127.0.0.1:")
        assert server.end()[0] == 0


def test_a_flood_of_failed_handshakes_is_summed(files: tuple[Path, Path], tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data, "--no-audit", "--no-mail", "--tls-cert", files[0], "--tls-key", files[1]) as up:
        world = World(up, data, files[0])
        for _ in range(FLOOD):
            world.plain(b"GET / HTTP/1.1\r\n\r\n")
    found = rejected(data)  # the stop has ended the window
    assert sum(one.get("refused", 1) for one in found) == FLOOD
    assert len(found) <= 2 * (EVENTS_EACH_MAX + 1)  # of at most two windows
