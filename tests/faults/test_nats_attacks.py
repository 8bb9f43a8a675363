"""The NATS server under connections that do not log in, send incomplete messages, or do not read."""

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from postroom.server.nats import connection, router
from postroom.server.nats import options as natsoptions
from postroom.server.nats.options import (
    LOGIN_BYTES_MAX,
    LOGINS_MAX,
    NatsLimits,
    ServerOptions,
    TokenOwner,
    client_of,
    network_of,
)
from postroom.server.nats.server import ENDED_A_TURN_MAX, NatsServer, new_loop
from tests.contract.natsservers import CONNECT, Server, Wanted, Wire, running
from tests.crash.memory import peak_mb
from tests.waiting import HANG_GUARD_S

USERS = {"ann": "secret"}
LOGIN = b'CONNECT {"verbose":false,"user":"ann","pass":"secret"}\r\n'
WRONG = LOGIN.replace(b"secret", b"wrong")
VIOLATION = b"-ERR 'Authorization Violation'\r\n"
WRONG_LOGIN_S_MIN = 0.1
MB = 1 << 20


@pytest.mark.parametrize("piece", [b"PUB a 1000000\r\n" + b"x" * 100_000, b"CONNECT {" + b" " * 100_000])
def test_input_before_the_login_is_bounded(tmp_path: Path, piece: bytes) -> None:
    with running("ours", tmp_path, Wanted(users=USERS)) as server:
        with Wire(server, b"") as wire:
            assert wire.rest(piece).startswith(b"-ERR '")
        with Wire(server, b"") as wire:
            for start in range(0, LOGIN_BYTES_MAX, 1_000):
                wire.send(piece[start : start + 1_000])
            assert wire.rest().startswith(b"-ERR '")


def test_commands_in_the_same_packet_as_the_login_are_handled(tmp_path: Path) -> None:
    with running("ours", tmp_path, Wanted(users=USERS)) as server, Wire(server, b"") as wire:
        body = b"x" * 100_000
        wire.send(LOGIN + b"SUB a 1\r\nPUB a %d\r\n%b\r\n" % (len(body), body))
        assert wire.until(b"\r\n") == b"MSG a 1 %d" % len(body)
    with running("ours", tmp_path, Wanted(users=USERS)) as server, Wire(server, b"") as wire:
        for byte in LOGIN:
            wire.send(bytes([byte]))
        assert wire.ask() == b""


def test_connections_that_have_not_logged_in_are_few_for_each_address(tmp_path: Path) -> None:
    with running("ours", tmp_path, Wanted(users=USERS)) as server, ExitStack() as stack:
        welcome = stack.enter_context(Wire(server, LOGIN))
        assert welcome.ask() == b""
        silent = [stack.enter_context(Wire(server, b"")) for _ in range(LOGINS_MAX)]
        with Wire(server, b"") as refused:
            assert b"-ERR 'too many connections" in refused.rest()
        assert welcome.ask() == b""
        silent[0].send(LOGIN)
        assert silent[0].ask() == b""
        with Wire(server, LOGIN) as again:
            assert again.ask() == b""
        assert silent[1].rest(b"PING\r\n") == VIOLATION
        with Wire(server, LOGIN) as another, Wire(server, LOGIN) as more:
            assert another.ask() == more.ask() == b""


def test_after_a_wrong_password_there_is_no_second_try(tmp_path: Path) -> None:
    with running("ours", tmp_path, Wanted(users=USERS)) as server, Wire(server, WRONG + LOGIN) as wire:
        assert wire.rest() == VIOLATION


def test_a_connection_cannot_log_in_again_as_somebody_else(tmp_path: Path) -> None:
    with running("ours", tmp_path, Wanted(users={**USERS, "bob": "other"})) as server:
        with Wire(server, LOGIN + b"SUB a 1\r\n" + LOGIN) as again:  # as itself
            assert again.ask() == b""
        other = LOGIN.replace(b"ann", b"bob").replace(b"secret", b"other")
        with Wire(server, LOGIN + b"SUB a 1\r\n" + other) as wire:
            assert wire.rest() == VIOLATION


TOO_MANY = b"-ERR 'maximum connections exceeded'\r\n"
OTHER_ADDRESS = "127.0.0.2"


def test_one_address_has_at_most_its_share_of_the_connections(tmp_path: Path) -> None:
    with running("ours", tmp_path, Wanted(connections_max=8)) as server, ExitStack() as stack:
        share = [stack.enter_context(Wire(server)) for _ in range(4)]
        assert [wire.ask() for wire in share] == [b""] * 4
        with Wire(server, b"") as refused:
            assert refused.rest() == TOO_MANY
        others = [stack.enter_context(Wire(server, address=OTHER_ADDRESS)) for _ in range(4)]
        assert [wire.ask() for wire in others] == [b""] * 4
        share[0].socket.close()
        with eventually_admitted(server, CONNECT) as again:
            assert again.ask() == b""


def test_one_login_has_at_most_its_share_of_the_connections(tmp_path: Path) -> None:
    users = {"ann": "secret", "bob": "secret"}
    with (
        running("ours", tmp_path, Wanted(users=users, connections_max=8)) as server,
        ExitStack() as stack,
    ):
        addresses = ["127.0.0.1", OTHER_ADDRESS] * 2
        share = [stack.enter_context(Wire(server, LOGIN, address=address)) for address in addresses]
        assert [wire.ask() for wire in share] == [b""] * 4
        with Wire(server, LOGIN + b"PING\r\n") as refused:
            assert refused.rest() == TOO_MANY
        bob = LOGIN.replace(b"ann", b"bob")
        others = [stack.enter_context(Wire(server, bob)) for _ in range(4)]
        assert [wire.ask() for wire in others] == [b""] * 4
        share[0].socket.close()
        with eventually_admitted(server, LOGIN) as again:
            assert again.ask() == b""


def test_one_organization_has_at_most_its_share_of_the_connections(tmp_path: Path) -> None:
    users = {"acme/ann": "secret", "acme/amy": "secret", "other/bob": "secret"}
    with (
        running("ours", tmp_path, Wanted(users=users, connections_max=8)) as server,
        ExitStack() as stack,
    ):
        ann, amy, bob = (LOGIN.replace(b"ann", user.encode()) for user in users)
        share = [stack.enter_context(Wire(server, login)) for login in (ann, amy, ann, amy)]
        assert [wire.ask() for wire in share] == [b""] * 4
        for login in (ann, amy):
            with Wire(server, login + b"PING\r\n") as refused:
                assert refused.rest() == TOO_MANY
        others = [stack.enter_context(Wire(server, bob)) for _ in range(4)]
        assert [wire.ask() for wire in others] == [b""] * 4
        share[0].socket.close()
        with eventually_admitted(server, amy) as again:
            assert again.ask() == b""


def eventually_admitted(server: Server, connect: bytes) -> Wire:
    """A new connection, after the server has noticed that another one was closed."""
    while True:
        wire = Wire(server, b"")
        try:
            wire.ask(connect)
        except (EOFError, OSError):
            wire.socket.close()
        else:
            return wire


def test_connections_that_are_being_closed_count_as_well() -> None:

    async def work(server: NatsServer) -> None:
        lingering = await opened(server.port, b"CONNECT {broken\r\n")
        assert (await lingering[0].readline()).startswith(b"-ERR '")
        delayed = await opened(server.port, WRONG)
        reader, writer = await opened(server.port, b"")
        assert await reader.readline() == TOO_MANY
        lingering[1].close()
        while len(server.connections) > 1:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        reader, again = await opened(server.port, LOGIN + b"PING\r\n")
        assert await reader.readline() == b"PONG\r\n"
        for each in (delayed[1], writer, again):
            each.close()

    served(
        work,
        users=USERS,
        connections_max=4,
        auth_timeout_s=2 * HANG_GUARD_S,
        limits=NatsLimits(linger_s=2 * HANG_GUARD_S, wrong_login_s=2 * HANG_GUARD_S),
    )


async def opened(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await reader.readline()
    return reader, writer


def test_a_wrong_password_is_answered_late_and_delays_no_other_client() -> None:
    assert NatsLimits().wrong_login_s >= WRONG_LOGIN_S_MIN

    async def work(server: NatsServer) -> None:
        guesser, guessing = await opened(server.port, WRONG)
        for _ in range(3):
            reader, writer = await opened(server.port, LOGIN + b"PING\r\n")
            assert await reader.readuntil(b"PONG\r\n")
            writer.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guesser.readline(), 0.01)
        guessing.close()

    served(
        work, users=USERS, auth_timeout_s=2 * HANG_GUARD_S, limits=NatsLimits(wrong_login_s=2 * HANG_GUARD_S)
    )


def test_the_incomplete_messages_of_an_address_are_bounded() -> None:

    async def work(server: NatsServer) -> None:
        part = b"PUB a 100000\r\n" + b"x" * 90_000
        kept = [await opened(server.port, part) for _ in range(2)]
        while sum(server.usage.incomplete.used.values()) < 2 * len(part):  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        reader, writer = await opened(server.port, part)
        assert (await reader.readline()).startswith(b"-ERR 'too many bytes of incomplete messages")
        writer.close()
        kept[0][1].write(b"x" * 10_000 + b"\r\nPING\r\n")
        assert await kept[0][0].readuntil(b"PONG\r\n")
        for _, writer in kept:
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        assert not server.usage.incomplete

    served(work, limits=NatsLimits(incomplete_bytes_max=200_000))


def served(work: Callable[[NatsServer], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        server = NatsServer(ServerOptions(port=0, lame_duck_s=0.0, **options))
        await server.start()
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await work(server)
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_is_its_login_or_its_address(address: str, network: str) -> None:
    assert network_of(address) == network
    assert client_of("", network) == client_of("token", network) == f"address:{network}"
    assert client_of("ann", network) == "user:ann"


# ---- output that nobody reads ------------------------------------------------------------------------


def growth_mb(server: Server, attack: Callable[[], object]) -> int:
    """How much memory of the server an attack has added."""
    before = peak_mb(server.process.pid)
    attack()
    return peak_mb(server.process.pid) - before


def test_fan_out_to_own_subscriptions_is_limited(tmp_path: Path) -> None:
    subscriptions = b"".join(b"SUB a %d\r\n" % sid for sid in range(600))
    frame = b"PUB a %d\r\n%b\r\n" % (MB, bytes(MB))
    with (
        running("ours", tmp_path, Wanted(pending_bytes_max=8 * MB)) as server,
        Wire(server, receive_bytes=4096) as attacker,
        Wire(server) as other,
    ):
        attacker.ask(subscriptions)
        other.ask(b"SUB b 1\r\n")
        assert growth_mb(server, lambda: attacker.rest(frame)) < 64
        assert other.ask(b"PUB b 1\r\nx\r\n") == b"MSG b 1 1\r\nx\r\n"


class Deaf:
    """A subscriber that reads nothing, from a given address."""

    def __init__(self, port: int, host: str) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.bind((host, 0))
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(CONNECT + b"SUB flood 1\r\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_pending_output_of_all_connections_of_a_client_is_bounded() -> None:
    frame = b"PUB flood %d\r\n%b\r\n" % (MB // 4, bytes(MB // 4))

    async def work(server: NatsServer) -> None:
        reader, writer = await opened(server.port, CONNECT + b"PING\r\n")
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(Deaf(server.port, "127.0.0.2"))
            stack.enter_context(Deaf(server.port, "127.0.0.3"))
            while subscriptions_to(server, b"flood") < 9:  # noqa: ASYNC110 - the loop is the server's
                await asyncio.sleep(0)
            for _ in range(40):
                writer.write(frame + b"PING\r\n")
                await reader.readuntil(b"PONG\r\n")
                assert sum(link.pending_bytes for link in of(server, "127.0.0.2")) <= 9 * MB
            assert 0 < len(of(server, "127.0.0.2")) < 8
            assert len(of(server, "127.0.0.3")) == 1
        while len(server.connections) > 1:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        assert not server.usage.pending
        writer.close()

    served(work, pending_bytes_max=8 * MB, limits=NatsLimits(client_pending_bytes_max=8 * MB))


def subscriptions_to(server: NatsServer, subject: bytes) -> int:
    return sum(each.subject == subject for link in server.connections for each in link.subscriptions.values())


def of(server: NatsServer, address: str) -> list[connection.ServerConnection]:
    return [link for link in server.connections if link.network == address and not link.is_closing]


def test_the_cost_of_the_subscriptions_of_a_client_is_bounded() -> None:

    async def work(server: NatsServer) -> None:
        first, to_first = await opened(server.port, CONNECT)
        second, to_second = await opened(server.port, CONNECT)

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
            writer.write(data + b"PING\r\n")
            return (await reader.readuntil(b"PONG\r\n")).removesuffix(b"PONG\r\n")

        long = b"x" * 3_900
        assert await ask(first, to_first, b"SUB %b 1\r\nSUB %b.a 2\r\n" % (long, long)) == b""
        assert await ask(second, to_second, b"SUB %b 1\r\nSUB b g%b 2\r\n" % (long, long)) == b""
        for subject in (long, b"*" + b".x" * 100):
            refused = await ask(second, to_second, b"SUB %b 3\r\n" % subject)
            assert refused.startswith(b"-ERR 'Permissions Violation for Subscription")
        assert await ask(first, to_first, b"UNSUB 1\r\nSUB %b 3\r\n" % long) == b""
        for writer in (to_first, to_second):
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        assert not server.usage.subscriptions

    served(work, limits=NatsLimits(client_subscription_bytes_max=20_000))


def test_the_cost_of_the_subscriptions_of_an_organization_is_bounded() -> None:

    async def work(server: NatsServer) -> None:
        (first, to_first), (second, to_second), (other, to_other) = [
            await logged_in(server, token) for token in ("acme/ann", "acme/amy", "other/bob")
        ]

        async def subscribed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(b"SUB %b 1\r\nPING\r\n" % (b"x" * 3_900))
            return (await reader.readuntil(b"PONG\r\n")).removesuffix(b"PONG\r\n")

        assert await subscribed(first, to_first) == b""
        assert await subscribed(second, to_second) == b""
        third, to_third = await logged_in(server, "acme/amy")
        assert (await subscribed(third, to_third)).startswith(b"-ERR 'Permissions Violation for Subscription")
        assert await subscribed(other, to_other) == b""
        to_first.close()
        while len(server.connections) > 3:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        assert await subscribed(third, to_third) == b""
        for writer in (to_second, to_third, to_other):
            writer.close()

    served(work, identify=owner, limits=NatsLimits(organization_subscription_bytes_max=10_000))


def test_the_subscriptions_of_a_client_and_of_an_organization_are_limited() -> None:
    limit = 4
    too_many = b"-ERR 'maximum subscriptions exceeded'\r\n"

    async def work(server: NatsServer) -> None:
        async def ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
            streams[1].write(data + b"PING\r\n")
            return (await streams[0].readuntil(b"PONG\r\n")).removesuffix(b"PONG\r\n")

        def subscribe(sids: range) -> bytes:
            return b"".join(b"SUB a.* %d\r\n" % sid for sid in sids)

        tokens = ("acme/ann", "acme/ann", "acme/ben", "acme/cleo", "other/ann")
        first, second, ben, cleo, other = [await logged_in(server, token) for token in tokens]
        assert await ask(first, subscribe(range(limit - 1))) == b""
        assert await ask(second, subscribe(range(2))) == too_many
        assert await ask(ben, subscribe(range(limit))) == b""
        assert await ask(cleo, subscribe(range(1))) == too_many
        assert await ask(other, subscribe(range(limit))) == b""
        assert await ask(first, b"UNSUB 0\r\n") == b""
        assert await ask(cleo, subscribe(range(2))) == too_many
        for _, writer in (first, second, ben, cleo, other):
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        assert not server.usage.subscription_counts

    served(work, identify=owner, subscriptions_max=limit)


# ---- turns -------------------------------------------------------------------------------------------

WILDCARDS = 2_000
PUBLISHED = 300
STEPS_MAX = 10  # that one organization makes while a call of another waits


def owner(token: str) -> TokenOwner:
    """The owner of a token such as `acme/ann`; that of `/op` is an operator."""
    org = token.partition("/")[0]
    return TokenOwner(token, token, org=org, sees_all=not org)


async def logged_in(server: NatsServer, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    login = CONNECT.replace(b"{", b'{"auth_token":"%b",' % token.encode())
    reader, writer = await opened(server.port, login + b"PING\r\n")
    await reader.readuntil(b"PONG\r\n")
    return reader, writer


async def discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(MB):
        pass


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"PING\r\n")
    await reader.readuntil(b"PONG\r\n")


def deliveries_of(server: NatsServer, org: str) -> int:
    links = (link for link in server.connections if link.org == org)
    return sum(each.delivered for link in links for each in link.subscriptions.values())


@pytest.mark.parametrize("publishers", [1, 40])
@pytest.mark.parametrize(("subject", "batch"), [("x.a", PUBLISHED), ("x%d.a", 1)])
def test_a_call_of_one_organization_waits_for_few_deliveries_of_another(
    subject: str, batch: int, publishers: int
) -> None:
    flood = b"".join(
        b"PUB %b 1\r\nx\r\n" % (subject % ((n,) * subject.count("%"))).encode() for n in range(PUBLISHED)
    )
    cost = router.SUBSCRIPTION_COST + batch * (router.MESSAGE_COST + 1)
    a_step = batch * (1 + natsoptions.NatsLimits.step_cost_max // cost)
    wildcards = b"".join(b"SUB *.a %d\r\n" % sid for sid in range(WILDCARDS))

    async def work(server: NatsServer) -> None:
        other, to_other = await logged_in(server, "other/bob")
        all_read, to_reader = await logged_in(server, "acme/reader")
        to_reader.write(wildcards)
        await answered(all_read, to_reader)
        reading = asyncio.create_task(discard(all_read))
        writers = [(await logged_in(server, f"acme/ann{number}"))[1] for number in range(publishers)]
        for writer in writers:
            writer.write(flood)
        while not deliveries_of(server, "acme"):  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        for _ in range(3):
            before = deliveries_of(server, "acme")
            await answered(other, to_other)
            assert 0 < deliveries_of(server, "acme") - before <= STEPS_MAX * a_step
        for writer in (to_other, to_reader, *writers):
            writer.close()
        await reading

    served(work, identify=owner, limits=NatsLimits(slice_s=0.0))


@pytest.mark.parametrize(
    "flood",
    [
        b"PING\r\n",
        b"SUB a.* 1\r\nUNSUB 1\r\n",
        b'CONNECT {"verbose":false,"auth_token":"acme/ann"}\r\n',
        b"PUB nobody.%d answers 1\r\nx\r\n",
    ],
)
def test_every_command_has_turns(flood: bytes) -> None:
    commands = b"".join(flood.replace(b"%d", b"%d" % number) for number in range(PUBLISHED))

    async def work(server: NatsServer) -> None:
        other, to_other = await logged_in(server, "other/bob")
        busy, to_busy = await logged_in(server, "acme/ann")
        to_busy.write(b"SUB begin 98\r\n" + commands + b"SUB end 99\r\n")
        while not subscriptions_to(server, b"begin"):  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        await answered(other, to_other)
        assert not subscriptions_to(server, b"end")
        await answered(busy, to_busy)
        while not subscriptions_to(server, b"end"):
            await answered(busy, to_busy)
        for writer in (to_other, to_busy):
            writer.close()

    served(work, identify=owner, limits=NatsLimits(slice_s=0.0))


def test_a_subscription_that_ends_during_many_deliveries_gets_nothing_more() -> None:

    async def work(server: NatsServer) -> None:
        reader, writer = await opened(server.port, CONNECT)
        writer.write(
            b"".join(b"SUB a %d\r\nSUB a g%d %d\r\n" % (sid, sid, -sid) for sid in range(1, WILDCARDS))
        )
        await answered(reader, writer)
        _, sender = await opened(server.port, CONNECT)
        sender.write(b"PUB a 1\r\nx\r\n")
        while not deliveries_of(server, ""):  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        writer.write(b"UNSUB %d\r\nUNSUB -%d\r\nPING\r\n" % ((WILDCARDS - 1,) * 2))
        got = await reader.readuntil(b"PONG\r\n")
        while got.count(b"MSG") < 2 * WILDCARDS - 4:
            got += await reader.readuntil(b"x\r\n")
        assert b"MSG a %d " % (WILDCARDS - 2) in got
        assert b"%d 1\r\n" % (WILDCARDS - 1) not in got
        for each in (writer, sender):
            each.close()

    served(work, limits=NatsLimits(slice_s=0.0, step_cost_max=router.SUBSCRIPTION_COST))


def test_subscriptions_of_one_organization_cost_no_message_of_another() -> None:
    async def work(server: NatsServer) -> None:
        streams = [await logged_in(server, token) for token in ("acme/ann", "other/bob", "other/eve", "/op")]
        links = {link.user: link for link in server.connections}
        for (reader, writer), wanted in zip(streams, (b"a.b", b"a.*", b">", b"*.b"), strict=True):
            writer.write(b"SUB %b 1\r\nSUB %b g 2\r\n" % (wanted, wanted))
            await answered(reader, writer)

        def users(found: tuple[router.ServerSubscription, ...]) -> set[str]:
            return {user for user, link in links.items() if any(each.link is link for each in found)}

        ann, op, others = "acme/ann", "/op", {"other/bob", "other/eve"}
        for user, reached in ((ann, {ann, op}), ("other/bob", others | {op}), (op, set(links))):
            each, groups = server.router.match(links[user], b"a.b")
            assert users(each) == reached
            assert [users(members) for members in groups] == [reached]
        index = next(each.index for each in links["acme/ann"].subscriptions.values())
        assert index is not None
        kept = index.match(b"a.b")
        assert len(index) == kept.size == 2
        reader, writer = streams[1]
        writer.write(b"SUB a.> 3\r\nUNSUB 3\r\n")
        await answered(reader, writer)
        assert index.match(b"a.b") is kept  # it was not looked up again
        for _, writer in streams:
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        assert not server.router._of_orgs
        assert not server.router._of_all

    served(work, identify=owner)


@pytest.mark.parametrize("wanted", [b">", b"a.%d", b"*.%d"])
def test_subscriptions_of_an_ended_connection_are_removed_in_turns(wanted: bytes) -> None:
    many = 6 * ENDED_A_TURN_MAX

    async def work(server: NatsServer) -> None:
        other, to_other = await logged_in(server, "acme/bob")
        to_other.write(b"SUB > 1\r\nSUB a.0 2\r\n")
        await answered(other, to_other)
        reader, writer = await logged_in(server, "acme/ann")
        writer.write(
            b"".join(b"SUB %b %d\r\n" % (wanted.replace(b"%d", b"%d" % sid), sid) for sid in range(many))
        )
        await answered(reader, writer)
        [index] = server.router._of_orgs.values()
        writer.close()
        left = [len(index)]
        while left[-1] > 2:
            await asyncio.sleep(0)
            left.append(len(index))
        assert max(before - after for before, after in itertools.pairwise(left)) <= 2 * ENDED_A_TURN_MAX
        to_other.write(b"PUB a.0 1\r\nx\r\n")
        for _ in range(2):
            assert await other.readuntil(b"\r\nx\r\n")
        to_other.close()
        while server.connections:  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        assert not server.usage.subscriptions
        assert not server.router._of_orgs

    served(work, identify=owner)


def test_input_that_waits_is_limited_for_each_organization() -> None:
    flood = b"PUB a.%d 1\r\nx\r\n" * 3_000

    async def work(server: NatsServer) -> None:
        floods = [await logged_in(server, f"acme/ann{number}") for number in range(4)]
        other, to_other = await logged_in(server, "globex/bob")
        for writer in (to_other, *(writer for _, writer in floods)):
            writer.write(flood)
        ends = [asyncio.create_task(reader.read()) for reader, _ in floods]
        said, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert all(b"waiting input" in end.result() for end in said)
        assert len(said) < len(floods)
        assert server.usage.incomplete.fits("acme/ann", 0)
        to_other.write(b"PING\r\n")
        assert await other.readuntil(b"PONG\r\n")
        for writer in (to_other, *(writer for _, writer in floods)):
            writer.close()
        while server.connections:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)
        assert not server.usage.incomplete
        await asyncio.wait(ends)

    served(work, identify=owner, limits=NatsLimits(slice_s=0.0, organization_incomplete_bytes_max=100_000))


def test_a_revoked_token_ends_what_waits() -> None:
    revoked: set[str] = set()

    async def work(server: NatsServer) -> None:
        all_read, to_reader = await logged_in(server, "acme/reader")
        to_reader.write(b"".join(b"SUB *.a %d\r\n" % sid for sid in range(WILDCARDS)))
        await answered(all_read, to_reader)
        reading = asyncio.create_task(discard(all_read))
        reader, writer = await logged_in(server, "acme/ann")
        writer.write(b"".join(b"PUB x%d.a 1\r\nx\r\n" % number for number in range(10 * PUBLISHED)))
        while not deliveries_of(server, "acme"):  # noqa: ASYNC110 - the loop is the server's
            await asyncio.sleep(0)
        revoked.add("acme/ann")
        assert await reader.read() == VIOLATION
        done = deliveries_of(server, "acme")
        await answered(*await logged_in(server, "acme/bob"))
        assert deliveries_of(server, "acme") == done < 10 * PUBLISHED * WILDCARDS
        for each in (writer, to_reader):
            each.close()
        await reading

    served(
        work,
        identify=lambda token: None if token in revoked else owner(token),
        limits=NatsLimits(slice_s=0.0, tick_s=0.001, token_check_s=0.0),
    )
