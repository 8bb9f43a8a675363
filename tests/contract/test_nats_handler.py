"""The seam between the NATS server and a handler with subjects of its own."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from postroom.contracts.mail import Link
from postroom.server.nats.options import LOGIN_BYTES_MAX, NatsLimits, ServerOptions
from postroom.server.nats.server import NatsServer, new_loop
from tests.contract.natsservers import CONNECT, key_beside, made_certificate
from tests.waiting import HANG_GUARD_S

LINK_FULL_BYTES = 1 << 20
LONG_REPLAY = 3_000
BURST = 400
BODY = b"x" * 10_000
READ_AHEAD_BYTES = 1 << 16  # without a request, a client reads at most twice this
LOOPS = {"uvloop": new_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True, params=LOOPS)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs on both event loops: uvloop is an extra."""
    monkeypatch.setitem(LOOPS, "this", LOOPS[request.param])


class KeepingHandler:
    """A small handler: records messages under `$own.`, answers requests, and replays on subscribe."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, bytes, bytes]] = []
        self.noted: list[tuple[str, object]] = []
        self.behind: Callable[[], Awaitable[None] | None] = lambda: None
        self.owed: dict[Link, tuple[str, int]] = {}

    def owns(self, subject: str) -> bool:
        return subject.startswith("$own.")

    def published(self, link: Link, subject: str, reply: str, header_bytes: int, bodies: list[bytes]) -> None:
        for body in bodies:
            headers, payload = body[:header_bytes], body[header_bytes:]
            self.kept.append((subject, headers, payload))
            self.noted.append(("published", payload))
            if reply:
                said = b"%s %s" % (link.name.encode(), link.user.encode())
                link.answer(reply, said, b"NATS/1.0\r\nA: b\r\n\r\n")

    def subscribed(self, link: Link, sid: str, subject: str, group: str) -> str | None:
        self.noted.append(("subscribed", (sid, subject, group)))
        if subject.endswith(">"):
            return "no wildcards here"
        if subject == "$own.long":
            self.owed[link] = (sid, LONG_REPLAY)
            self.drained(link)
            return None
        for kept, headers, payload in self.kept:
            link.deliver(sid, kept, "", [(headers, payload)])
        return None

    def refused(self, link: Link, call: str, reply: str, code: int, text: str) -> None:  # noqa: ARG002 - the seam's
        self.noted.append(("refused", (call, code, text)))

    def unsubscribed(self, link: Link, sid: str) -> None:  # noqa: ARG002 - the seam's
        self.noted.append(("unsubscribed", sid))

    def closed(self, link: Link) -> None:
        self.noted.append(("closed", link.number))

    def drained(self, link: Link) -> None:
        sid, left = self.owed.get(link, ("", 0))
        while left and link.pending_bytes < LINK_FULL_BYTES:
            link.deliver(sid, "$own.long", "", [(b"", BODY)])
            left -= 1
        self.owed[link] = (sid, left)

    def flush(self) -> Awaitable[None] | None:
        self.noted.append(("flush", None))
        return self.behind()

    def tick(self) -> None:
        self.noted.append(("tick", None))

    def close(self) -> None:
        self.noted.append(("close", None))

    def notes(self, *kinds: str) -> list[tuple[str, object]]:
        return [note for note in self.noted if note[0] in kinds]


class Client:
    """A connection on the server's own loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        return (await self.reader.readuntil(end)).removesuffix(end)

    async def ask(self, data: bytes = b"") -> bytes:
        self.send(data + b"PING\r\n")
        return await self.until(b"PONG\r\n")

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


Connect = Callable[..., Coroutine[Any, Any, Client]]
Work = Callable[[NatsServer, KeepingHandler, Connect], Coroutine[Any, Any, None]]


def serve(work: Work, **options: Any) -> KeepingHandler:
    """Run a test with a server and its handler."""
    handler = KeepingHandler()

    async def run() -> None:
        server = NatsServer(ServerOptions(port=0, lame_duck_s=0.0, **options), handler)
        await server.start()
        clients: list[Client] = []

        async def connect(said: bytes = CONNECT) -> Client:
            streams = await asyncio.open_connection("127.0.0.1", server.port, limit=READ_AHEAD_BYTES)
            clients.append(Client(*streams))
            await clients[-1].until(b"\r\n")
            await clients[-1].ask(said)
            return clients[-1]

        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await work(server, handler, connect)
        finally:
            for client in clients:
                client.writer.close()
            await server.close()

    with asyncio.Runner(loop_factory=LOOPS["this"]) as runner:
        runner.run(run())
    return handler


def test_owned_subjects_go_to_the_handler_and_to_no_wildcard() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        stranger, sender = await connect(), await connect()
        await stranger.ask(b"SUB > 1\r\nSUB *.a 2\r\nSUB _INBOX.> 3\r\n")
        await sender.ask(b"PUB $own.a 2\r\nhi\r\nHPUB $own.a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n")
        assert handler.kept == [("$own.a", b"", b"hi"), ("$own.a", b"NATS/1.0\r\n\r\n", b"hi")]
        await sender.ask(b"PUB owner 2\r\nhi\r\n")
        assert await stranger.ask() == b"MSG owner 1 2\r\nhi\r\n"

    serve(work)


def test_an_answer_reaches_the_caller_and_no_wildcard_of_other_clients() -> None:
    async def work(_server: NatsServer, _shelf: KeepingHandler, connect: Connect) -> None:
        stranger = await connect()
        asking = await connect(CONNECT.replace(b"{", b'{"name":"sdk",'))
        await stranger.ask(b"SUB > 1\r\nSUB _INBOX.> 2\r\nSUB _INBOX.me.* g 3\r\n")
        await asking.ask(b"SUB _INBOX.me.* 9\r\n")
        asking.send(b"PUB $own.a _INBOX.me.1 0\r\n\r\n")
        head = b"HMSG _INBOX.me.1 9 18 22\r\nNATS/1.0\r\nA: b\r\n\r\nsdk \r\n"
        assert await asking.until(b"sdk \r\n") + b"sdk \r\n" == head
        assert await stranger.ask() == b""

    serve(work)


def test_an_inbox_on_another_connection_is_found_by_its_exact_name() -> None:
    async def work(_server: NatsServer, _shelf: KeepingHandler, connect: Connect) -> None:
        inbox, asking = await connect(b'CONNECT {"verbose":false}\r\n'), await connect()
        await inbox.ask(b"SUB _INBOX.exact 5\r\n")
        await asking.ask(b"PUB $own.a _INBOX.exact 0\r\n\r\n")
        assert await inbox.ask() == b"MSG _INBOX.exact 5 1\r\n \r\n"  # without headers, which it cannot read

    serve(work)


def test_a_refused_subscription_is_an_error_that_clients_survive() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        answer = await client.ask(b"SUB $own.> 1\r\n")
        assert answer == b"-ERR 'Permissions Violation for Subscription to \"$own.>\"'\r\n"
        await client.ask(b"UNSUB 1\r\n")
        assert handler.notes("unsubscribed") == []

    serve(work)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (b"CONNECT {nonsense\r\n", ("connect", 400)),
        (b'CONNECT {"no_responders":true,"headers":false}\r\n', ("connect", 400)),
        (b"NONSENSE\r\n", ("command", 400)),
        (b"PUB a 99999999999\r\n", ("command", 400)),
        (b"SUB a..b 1\r\n", ("subscribe", 400)),
        (b'CONNECT {"headers":false}\r\nHPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n', ("publish", 400)),
    ],
)
def test_calls_that_break_the_protocol_are_reported_to_the_handler(
    said: bytes, refused: tuple[str, int]
) -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        client.send(said)
        error = await client.until(b"'\r\n")
        [(_, (call, code, text))] = cast("list[tuple[str, Any]]", handler.notes("refused"))
        assert (call, code) == refused
        assert text.encode() in error

    serve(work)


@pytest.mark.parametrize("said", [b"PUB a 1\r\n", b"CONNECT " + b"x" * LOGIN_BYTES_MAX])
def test_calls_before_the_login_are_reported_to_the_handler(said: bytes) -> None:
    async def work(server: NatsServer, handler: KeepingHandler, _connect: Connect) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        await reader.readuntil(b"-ERR")
        assert len(handler.notes("refused")) == 1
        writer.close()

    serve(work, token="secret")  # noqa: S106 - of this test


def test_a_client_that_does_not_read_is_reported_to_the_handler() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        slow, sender = await connect(), await connect()
        await slow.ask(b"SUB flood 1\r\n")
        cast("asyncio.Transport", slow.writer.transport).pause_reading()
        while not handler.notes("refused"):
            await sender.ask(b"PUB flood %d\r\n%b\r\n" % (len(BODY), BODY) * 100)
        assert handler.notes("refused") == [("refused", ("deliver", 429, "Slow Consumer"))]

    serve(work, pending_bytes_max=1 << 20)


def test_a_replay_begins_with_subscribe_and_unsub_counts_it() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        await client.ask(b"".join(b"PUB $own.a 1\r\n%d\r\n" % number for number in range(5)))
        answer = await client.ask(b"SUB $own.a g 1\r\n")
        assert answer == b"".join(b"MSG $own.a 1 1\r\n%d\r\n" % number for number in range(5))
        await client.ask(b"UNSUB 1 6\r\n")
        assert handler.notes("unsubscribed") == []
        await client.ask(b"UNSUB 1 2\r\n")
        assert handler.notes("subscribed", "unsubscribed") == [
            ("subscribed", ("1", "$own.a", "g")),
            ("unsubscribed", "1"),
        ]

    serve(work)


def test_closed_is_called_once_for_each_connection() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        one, two = await connect(), await connect()
        await one.ask(b"SUB $own.a 1\r\n")
        two.send(b"NONSENSE\r\n")
        await two.until(b"-ERR 'Unknown Protocol Operation'\r\n")
        await one.leave()
        while len(handler.notes("closed")) < 2:  # noqa: ASYNC110 - the server's loop is this one
            await asyncio.sleep(0)

    handler = serve(work)
    assert sorted(handler.notes("closed")) == [("closed", 1), ("closed", 2)]
    assert handler.notes("close") == [("close", None)]


def test_a_batch_is_flushed_once_and_later_messages_afterwards() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        disk = asyncio.get_running_loop().create_future()
        handler.behind = lambda: disk
        client.send(b"PUB $own.a 1\r\n1\r\n" * 3)
        while not handler.notes("flush"):  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        other = await connect()
        await other.ask(b"PUB $own.a 1\r\n2\r\n")
        client.send(b"PUB $own.a 1\r\n3\r\n")
        await other.ask()  # the loop has polled every socket once more
        assert [what for kind, what in handler.notes("published", "flush")] == [b"1"] * 3 + [None, b"2"]
        handler.behind = lambda: None
        disk.set_result(None)
        assert await client.ask() == b""
        kinds = [what for kind, what in handler.notes("published", "flush")]
        assert kinds[:5] == [b"1", b"1", b"1", None, b"2"]
        assert kinds[5:].count(b"3") == 1
        assert kinds[-1] is None

    serve(work)


def test_a_long_replay_continues_when_drained_and_is_not_cut_off() -> None:
    async def work(server: NatsServer, _shelf: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        client.send(b"SUB $own.long 1\r\n")
        while not any(link.output.paused for link in server.connections):  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        for _ in range(LONG_REPLAY):
            await client.until(b"\r\n")
            assert await client.reader.readexactly(len(BODY) + 2) == BODY + b"\r\n"

    serve(work, pending_bytes_max=4 << 20)


def test_a_server_whose_handler_fails_stops_and_reports_why() -> None:
    class Lost(Exception):
        pass

    async def work(server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        def fail() -> None:
            raise Lost

        handler.behind = fail
        client = await connect()
        client.send(b"PUB $own.a 1\r\n1\r\n")
        await server.until_stopped()
        assert isinstance(server.failure, Lost)

    serve(work)


def test_the_handler_gets_ticks() -> None:
    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        while len(handler.notes("tick")) < 2:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)

    serve(work)


@pytest.mark.parametrize("subject", [b"$own.\xff", b"\xff\xfe"])
def test_subjects_that_are_not_utf8_are_handled(subject: bytes) -> None:
    async def work(_server: NatsServer, _shelf: KeepingHandler, connect: Connect) -> None:
        client = await connect()
        await client.ask(b"SUB %b %b\r\nPUB %b %b 1\r\nx\r\nUNSUB %b\r\n" % ((subject,) * 5))
        assert await client.ask() == b""

    serve(work)


def test_a_failed_handshake_leaves_nothing_behind(tmp_path: Path) -> None:
    certificate = made_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key_beside(certificate))

    async def work(server: NatsServer, _shelf: KeepingHandler, _connect: Connect) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b"no TLS at all, and in the clear\r\n")
            await reader.read()
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)

    serve(work, tls=context)


def test_a_burst_of_one_connection_delays_no_other_and_keeps_its_order() -> None:

    async def work(_server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        busy, other = await connect(b'CONNECT {"headers":true}\r\n'), await connect()
        same = b"".join(b"PUB $own.a 3\r\n%03d\r\n" % number for number in range(BURST // 2))
        different = b"".join(
            b"PUB $own.%d 3\r\n%03d\r\n" % (number, number) for number in range(BURST // 2, BURST)
        )
        busy.send(same + different + b"PING\r\n")
        while not handler.kept:  # noqa: ASYNC110 - the server's loop is this one
            await asyncio.sleep(0)
        await other.ask()
        assert len(handler.kept) < BURST
        assert (await busy.until(b"PONG\r\n")).count(b"+OK\r\n") == BURST
        assert [int(payload) for _, _, payload in handler.kept] == list(range(BURST))
        await busy.ask(b"PUB $own.a 1\r\n1\r\n")  # and its input is read again

    serve(work, limits=NatsLimits(slice_s=0.0))


def test_waiting_commands_end_with_their_connection() -> None:

    async def work(server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        busy, other = await connect(), await connect()
        busy.send(b"PUB $own.a 1\r\n1\r\n" * BURST)
        while not handler.kept:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        for link in list(server.connections):
            if link.number == 1:
                link.cut()
        count = len(handler.kept)
        await other.ask()
        assert len(handler.kept) == count < BURST

    serve(work, limits=NatsLimits(slice_s=0.0))


def test_output_that_a_flush_makes_does_not_stop_what_waits() -> None:

    async def work(server: NatsServer, handler: KeepingHandler, connect: Connect) -> None:
        busy = await connect()

        def answer() -> None:
            for link in server.connections:
                link.send(b"PING\r\n")

        handler.behind = answer
        busy.send(b"".join(b"PUB $own.%d 1\r\nx\r\n" % number for number in range(BURST)) + b"PING\r\n")
        await busy.until(b"PONG\r\n")
        assert len(handler.kept) == BURST

    serve(work, limits=NatsLimits(slice_s=0.0))
