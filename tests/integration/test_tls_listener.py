"""Limits of connections in their TLS handshake: a real listener in this process, with short limits."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import uvloop

from postroom.server.http.connections import ConnectionLimits
from postroom.server.http.tls_listener import FailedHandshake, TlsListener
from postroom.system.crypto.tls import make_self_signed, server_context
from tests.waiting import HANG_GUARD_S

SHORT_S = 0.2
FEW = 8  # connections, of which one address may have one without a token


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # that of uvloop is not a subclass

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Place:
    """A running listener."""

    def __init__(self, port: int, certificate: Path, connections: ConnectionLimits) -> None:
        self.port, self.certificate, self.connections = port, certificate, connections
        self.failed: list[FailedHandshake] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that does no handshake."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def echo(self, text: bytes) -> bytes:
        trusting = ssl.create_default_context(cafile=self.certificate)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trusting)
        writer.write(text)
        answer = await reader.readexactly(len(text))
        writer.close()
        return answer


def serve(
    folder: Path, work: Callable[[Place], Awaitable[None]], total: int = 1_000, **limits: float
) -> None:
    certificate, key = make_self_signed(folder / "tls", (), 1)

    async def run() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        place = Place(listening.getsockname()[1], certificate, ConnectionLimits(total))
        listener = TlsListener(
            listening,
            server_context(certificate, key),
            Echo,
            connections=place.connections,
            failed=place.failed.append,
            **limits,
        )
        listener.start()
        async with asyncio.timeout(HANG_GUARD_S):
            await work(place)
            listener.close()
            await listener.wait_closed()
            await asyncio.sleep(0)
        assert place.connections.anonymous == 0

    uvloop.run(run())


def test_many_handshakes_at_once_succeed(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        texts = [b"%d" % number for number in range(100)]
        assert await asyncio.gather(*map(place.echo, texts)) == texts
        assert place.failed == []

    serve(tmp_path, work)


def test_the_oldest_handshake_of_an_address_gives_way(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        reader, writer = await place.connect()
        assert await place.echo(b"served") == b"served"
        assert await reader.read() == b""
        writer.close()
        [failed] = place.failed
        assert (failed.status, failed.error_type) == (503, "Unavailable")
        assert failed.address.startswith("127.0.0.1:")

    serve(tmp_path, work, FEW)


def test_a_handshake_that_takes_too_long_is_a_refusal(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        reader, writer = await place.connect()
        writer.write(b"\x16\x03\x01")  # the head of a record, and no more
        assert await reader.read() == b""
        writer.close()
        assert [(one.status, one.error_type) for one in place.failed] == [(408, "TooSlow")]
        assert "too long" in place.failed[0].error

    serve(tmp_path, work, handshake_s=SHORT_S)


def test_a_silent_connection_is_closed_and_is_not_a_refusal(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        reader, writer = await place.connect()
        assert await reader.read() == b""
        writer.close()
        assert place.failed == []

    serve(tmp_path, work, first_byte_s=SHORT_S)


def test_a_stop_closes_the_connections_in_their_handshake(tmp_path: Path) -> None:
    clients: list[socket.socket] = []

    async def work(place: Place) -> None:
        for data in (b"", b"\x16\x03\x01"):
            client = socket.create_connection(("127.0.0.1", place.port), timeout=HANG_GUARD_S)
            client.sendall(data)
            clients.append(client)
        await place.echo(b"both are accepted")

    serve(tmp_path, work)
    for client in clients:
        with client, suppress(ConnectionResetError):
            assert client.recv(1) == b""
