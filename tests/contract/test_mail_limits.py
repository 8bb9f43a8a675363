"""The mail server at its limits: a subscriber that reads nothing, and a full disk."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from postroom.contracts.mail import LINK_FULL_BYTES
from postroom.contracts.mail.service import MailService
from postroom.server.nats.options import NatsLimits, ServerOptions
from postroom.server.nats.server import NatsServer, new_loop
from tests.contract.natsservers import CONNECT
from tests.smalldisk import fill, small_disk
from tests.waiting import HANG_GUARD_S

__all__ = ["small_disk"]  # a fixture

MSG = "$mq9.AI.MAILBOX.MSG."
DELETE = "$mq9.AI.MAILBOX.DELETE."
DEAF_RECEIVE_BYTES = 4096
BODY = b"x" * 20_000
MESSAGES = 300  # more than all the buffers of a connection hold
LARGE_MAILBOX = 50_000


class Client:
    """A connection on the server's own loop that can stop reading."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._asked = 0

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, end: bytes) -> bytes:
        return await self._reader.readuntil(end)

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def ask(self, subject: str, payload: bytes = b"") -> Any:
        """Send a request and return its answer."""
        inbox = self.request(subject, payload)
        return await self.answer(inbox)

    def request(self, subject: str, payload: bytes = b"") -> bytes:
        self._asked += 1
        inbox = b"_INBOX.%d" % self._asked
        self.send(b"SUB %b %d\r\n" % (inbox, self._asked + 1))
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), inbox, len(payload), payload))
        return inbox

    async def answer(self, inbox: bytes) -> Any:
        line = await self.until(b"\r\n")
        assert line.startswith(b"MSG %b " % inbox), line
        return json.loads((await self.read(int(line.split()[-1]) + 2))[:-2])

    async def message(self) -> bytes:
        """The body of the next message."""
        return (await self.numbered())[1]

    async def numbered(self) -> tuple[int, bytes]:
        """The id and the body of the next message."""
        line = await self.until(b"\r\n")
        verb, *_, header_bytes, size = line.split()
        assert verb == b"HMSG", line
        content = (await self.read(int(size) + 2))[:-2]
        headers, body = content[: int(header_bytes)], content[int(header_bytes) :]
        return int(headers.partition(b"Mq9-Msg-Id: ")[2].split()[0]), body

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def read_on(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Everything sent so far is still written."""
        self._writer.close()

    def close(self) -> None:
        self._writer.transport.abort()


Connect = Callable[..., Awaitable[Client]]
Work = Callable[[NatsServer, Connect], Awaitable[None]]


def serve(folder: Path, work: Work, **options: Any) -> None:
    """Run a test beside a mail server."""

    async def run() -> None:
        service = MailService(folder, asyncio.get_running_loop().call_soon_threadsafe)
        server = NatsServer(ServerOptions(port=0, lame_duck_s=0.0, **options), service)
        await server.start()
        clients: list[Client] = []

        async def connect(receive_bytes: int = 0) -> Client:
            made = socket.socket()
            if receive_bytes:  # set before connecting: afterwards the system may already have enlarged it
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            made.connect(("127.0.0.1", server.port))
            streams = await asyncio.open_connection(sock=made, limit=receive_bytes or 1 << 20)
            clients.append(Client(*streams))
            clients[-1].send(CONNECT + b"PING\r\n")
            await clients[-1].until(b"PONG\r\n")
            return clients[-1]

        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await work(server, connect)
        finally:
            for client in clients:
                client.close()
            await server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def flood(sender: Client, mail_id: str) -> None:
    for _ in range(MESSAGES):
        await sender.ask(f"{MSG}{mail_id}", BODY)


def test_letters_of_a_member_that_reads_nothing_are_redelivered(tmp_path: Path) -> None:
    async def work(server: NatsServer, connect: Connect) -> None:
        sender, deaf, well = await connect(), await connect(DEAF_RECEIVE_BYTES), await connect()
        mail_id = (await sender.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        deaf.send(f"SUB {MSG}{mail_id}.* g 1\r\nPING\r\n".encode())
        await deaf.until(b"PONG\r\n")
        well.send(f"SUB {MSG}{mail_id}.* g 1\r\n".encode())
        sending = asyncio.create_task(flood(sender, mail_id))
        got = 0
        while got < MESSAGES:
            msg_id, body = await well.numbered()
            assert body == BODY
            well.send(f"PUB {DELETE}{mail_id}.{msg_id} 0\r\n\r\n".encode())
            got += 1
        await sending
        assert len(server.connections) == 2

    serve(tmp_path, work, write_timeout_s=0.3)


def test_a_slow_reader_is_not_stuck(tmp_path: Path) -> None:

    async def work(server: NatsServer, connect: Connect) -> None:
        sender = await connect()
        mail_id = (await sender.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        others = set(server.connections)
        slow = await connect(DEAF_RECEIVE_BYTES)
        [link] = server.connections - others
        slow.send(f"SUB {MSG}{mail_id}.* 1\r\nPING\r\n".encode())
        await slow.until(b"PONG\r\n")
        assert not link.output.is_stuck(0.0, 5.0)
        await flood(sender, mail_id)
        now_s = server.loop.time()
        assert not link.output.is_stuck(now_s, 5.0)
        assert not link.output.is_stuck(now_s + 4, 5.0)
        before = link.pending_bytes
        while link.pending_bytes == before:
            await slow.read(len(BODY))
        assert not link.output.is_stuck(now_s + 6, 5.0)
        assert not link.output.is_stuck(now_s + 10, 5.0)
        assert link.output.is_stuck(now_s + 12, 5.0)

    serve(tmp_path, work, ping_interval_s=2 * HANG_GUARD_S, limits=NatsLimits(tick_s=HANG_GUARD_S))


def test_a_connection_cut_at_any_byte_of_a_send_stores_nothing_of_it(tmp_path: Path) -> None:
    async def work(server: NatsServer, connect: Connect) -> None:
        client = await connect()
        await client.ask("$mq9.AI.MAILBOX.CREATE", b'{"name":"box","public":true}')
        frame = b"HPUB $mq9.AI.MAILBOX.MSG.box.critical 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
        for at in range(len(frame)):
            cut = await connect()
            cut.send(frame[:at])
            cut.leave()
        while len(server.connections) > 1:  # noqa: ASYNC110 - the server's loop is this one
            await asyncio.sleep(0)
        assert (await client.ask("$mq9.AI.MAILBOX.LIST.box"))["messages"] == []
        client.send(frame)
        assert len((await client.ask("$mq9.AI.MAILBOX.LIST.box"))["messages"]) == 1

    serve(tmp_path, work)


def test_a_subscriber_that_reads_nothing_does_not_affect_others(tmp_path: Path) -> None:
    async def work(server: NatsServer, connect: Connect) -> None:
        sender, deaf, well = await connect(), await connect(DEAF_RECEIVE_BYTES), await connect()
        mail_id = (await sender.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        for each in (deaf, well):
            each.send(f"SUB {MSG}{mail_id}.* 1\r\nPING\r\n".encode())
            await each.until(b"PONG\r\n")
        sending = asyncio.create_task(flood(sender, mail_id))
        for _ in range(MESSAGES):
            assert await well.message() == BODY
        await sending
        assert len(server.connections) == 3  # messages that it does not read stay in the mailbox
        assert max(link.pending_bytes for link in server.connections) < LINK_FULL_BYTES + 2 * len(BODY)

    serve(tmp_path, work, pending_bytes_max=1 << 20)


def test_a_full_disk_refuses_sends_and_recovers_without_loss(small_disk: Path) -> None:
    acknowledged: list[int] = []
    folder = small_disk / "mail"

    async def work(server: NatsServer, connect: Connect) -> None:
        client, other = await connect(), await connect()
        mail_id = (await client.ask("$mq9.AI.MAILBOX.CREATE", b'{"name":"box","public":true,"ttl":0}'))[
            "mail_id"
        ]
        subject = f"{MSG}{mail_id}.urgent"
        acknowledged.append((await client.ask(subject, b"before"))["msg_id"])
        filler = fill(small_disk)
        full = {"code": 503, "error": "the mail log cannot be written: No space left on device"}
        assert await client.ask(subject, BODY) == full  # half written, and truncated again
        assert in_trouble(server)
        assert await other.ask(subject, BODY) == full
        assert await other.ask("$mq9.AI.MAILBOX.CREATE") == full
        assert await other.ask(f"{MSG}{mail_id}", b"normal") == full
        filler.unlink()
        while in_trouble(server):  # noqa: ASYNC110 - a service has no event for it
            await asyncio.sleep(0)
        assert len((await client.ask("$mq9.AI.MAILBOX.LIST.box"))["messages"]) == 1
        acknowledged.append((await other.ask(subject, b"after"))["msg_id"])

    serve(folder, work)

    async def look(_: NatsServer, connect: Connect) -> None:
        client = await connect()
        listed = await client.ask("$mq9.AI.MAILBOX.LIST.box")
        assert [message["msg_id"] for message in listed["messages"]] == acknowledged

    serve(folder, look)


def test_server_starts_on_a_full_disk_and_stores_when_there_is_space(small_disk: Path) -> None:
    folder, subject = small_disk / "mail", f"{MSG}box.urgent"

    async def begin(_: NatsServer, connect: Connect) -> None:
        client = await connect()
        await client.ask("$mq9.AI.MAILBOX.CREATE", b'{"name":"box","public":true,"ttl":0}')
        assert (await client.ask(subject, b"first"))["msg_id"] == 1

    async def refused(server: NatsServer, connect: Connect) -> None:
        client = await connect()
        assert in_trouble(server)
        assert len((await client.ask("$mq9.AI.MAILBOX.LIST.box"))["messages"]) == 1
        assert (await client.ask(subject, b"second"))["code"] == 503

    async def stored(server: NatsServer, connect: Connect) -> None:
        await refused(server, connect)
        (small_disk / "filler").unlink()
        while in_trouble(server):  # noqa: ASYNC110 - a service has no event for it
            await asyncio.sleep(0)
        client = await connect()
        assert "msg_id" in await client.ask(subject, b"second")

    async def look(_: NatsServer, connect: Connect) -> None:
        client = await connect()
        assert len((await client.ask("$mq9.AI.MAILBOX.LIST.box"))["messages"]) == len(("first", "second"))

    serve(folder, begin)
    fill(small_disk)
    for work in (refused, stored, look):
        serve(folder, work)


def in_trouble(server: NatsServer) -> bool:
    service = server._handler
    assert isinstance(service, MailService)
    return bool(service.trouble)


def test_a_query_of_a_large_mailbox_leaves_turns_to_others(tmp_path: Path) -> None:
    async def work(_: NatsServer, connect: Connect) -> None:
        asking, other = await connect(), await connect()
        mail_id = (await asking.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        asking.send(f"PUB {MSG}{mail_id} 1\r\nx\r\n".encode() * LARGE_MAILBOX)
        await asking.ask(f"{MSG}{mail_id}.low", b"last")
        answers: list[str] = []

        async def query() -> None:
            found = await asking.ask(f"$mq9.AI.MSG.QUERY.{mail_id}", b'{"tags":"none"}')
            assert found["messages"] == []
            answers.append("query")

        async def ping() -> None:
            for _ in range(3):
                other.send(b"PING\r\n")
                await other.until(b"PONG\r\n")
                answers.append("ping")

        await asyncio.gather(query(), ping())
        assert answers == ["ping", "ping", "ping", "query"]

    serve(tmp_path, work)
