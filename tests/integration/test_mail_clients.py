"""The guarantees of the mq9 design, tested by each published client against a real `postroom mail serve`."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from langchain_mq9 import Mq9Toolkit  # type: ignore[import-untyped]

from tests.integration.mailclients import (
    MSG,
    Client,
    Clients,
    NatsJs,
    NatsPy,
    Ours,
    Refusal,
    Sdk,
    installed_npm_package,
)
from tests.integration.mailservers import MailServer, serving
from tests.waiting import until

KINDS = ("nats-py", "nats.js", "robustmq", "Mail")
PUBLIC_LIST = "$mq9.AI.PUBLIC.LIST"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
AS_SDK = {"critical": "high", "urgent": "high", "high": "high", "normal": "normal", "low": "low"}
Connect = Callable[[], Client]


@pytest.fixture(name="server", scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    with serving(tmp_path_factory.mktemp("mail") / "data") as server:
        yield server


@pytest.fixture(name="pool", scope="module")
def all_clients(tmp_path_factory: pytest.TempPathFactory, server: MailServer) -> Iterator[Clients]:
    pool = Clients(installed_npm_package(tmp_path_factory.mktemp("npm")))
    yield pool
    pool.close()


@pytest.fixture(name="clients")
def clients_of_a_test(pool: Clients) -> Iterator[Clients]:
    yield pool
    pool.release()


@pytest.fixture(name="connect", params=KINDS)
def connections(request: pytest.FixtureRequest, clients: Clients, server: MailServer) -> Connect:
    return lambda: clients.connect(request.param, server.url)


def test_a_private_id_cannot_be_guessed_and_is_in_no_public_list(
    connect: Connect, clients: Clients, server: MailServer
) -> None:
    client = connect()
    one, two = client.create(), client.create()
    assert one != two
    assert UUID.fullmatch(one)
    watching = clients.connect("nats-py", server.url)
    assert isinstance(watching, NatsPy)
    seen: list[bytes] = []
    watching.subscribe(PUBLIC_LIST, "", lambda _subject, data, _number: seen.append(data))
    name = f"shown.{one[:8]}"
    client.create(public=True, name=name, desc="all see it")
    until(lambda: any(name.encode() in data for data in seen))
    assert not any(one.encode() in data for data in seen)


def test_stored_messages_arrive_by_priority_and_then_new_ones(connect: Connect) -> None:
    client, other = connect(), connect()
    box = client.create()
    for number in range(3):
        for word in reversed(client.words):
            client.send(box, f"{word}{number}".encode(), word)
    assert len(client.list(box)) == 9
    inbox = other.listen(box)
    got = inbox.take(9)
    assert [each.payload.decode() for each in got] == [
        f"{word}{n}" for word in client.words for n in range(3)
    ]
    assert [each.word for each in got] == [word for word in client.words for _ in range(3)]
    client.send(box, b"new", client.words[-1])
    assert inbox.payloads(1) == [b"new"]
    assert inbox.rest() == []
    assert len({each.msg_id for each in got}) == 9


def test_every_subscription_replays_from_the_start(connect: Connect) -> None:
    client, other = connect(), connect()
    box = client.create()
    for number in range(5):
        client.send(box, b"%d" % number)
    client.list(box)
    expected = [b"0", b"1", b"2", b"3", b"4"]
    one, two = client.listen(box), other.listen(box)
    assert one.payloads(5) == two.payloads(5) == expected
    one.close()
    again = client.listen(box)
    assert again.payloads(5) == expected
    assert two.rest() == again.rest() == []


def test_a_subscription_to_one_priority_gets_nothing_else(connect: Connect) -> None:
    client = connect()
    box = client.create()
    for word in client.words:
        client.send(box, word.encode(), word)
    client.list(box)
    for word in client.words:
        inbox = client.listen(box, word=word)
        assert inbox.payloads(1) == [word.encode()]
        assert inbox.rest() == []


def test_create_is_idempotent_and_keeps_the_first_lifetime(connect: Connect) -> None:
    client = connect()
    name = f"once.{time.monotonic_ns()}"
    assert client.create(1, public=True, name=name) == name
    client.send(name, b"kept")
    assert client.create(3600, public=True, name=name) == name
    assert len(client.list(name)) == 1
    until(lambda: is_refused(lambda: client.list(name), 410))
    assert client.create(60, public=True, name=name) == name
    assert client.list(name) == []


def is_refused(call: Callable[[], object], code: int) -> bool:
    try:
        call()
    except Refusal as error:
        return error.code == code
    return False


def test_a_group_shares_messages_and_redelivers_those_of_a_lost_member(
    connect: Connect, clients: Clients
) -> None:
    client, one, two = connect(), connect(), connect()
    box = client.create(public=True, name=f"work.{time.monotonic_ns()}")
    first, second = one.listen(box, group="workers"), two.listen(box, group="workers")
    for number in range(10):
        client.send(box, b"%d" % number)
    client.list(box)
    mine, others = first.rest(), second.rest()
    assert sorted(int(each.payload) for each in mine + others) == list(range(10))
    assert len(mine) == len(others) == 5
    one.delete(box, mine[0].msg_id)
    clients.end(one)
    assert [each.payload for each in second.take(4)] == [each.payload for each in mine[1:]]
    assert second.rest() == []
    clients.end(two)
    assert len(client.listen(box, group="workers").take(9)) == 9  # no connected member holds anything


def test_list_and_delete(connect: Connect) -> None:
    client = connect()
    box = client.create()
    for word in reversed(client.words):
        client.send(box, b"x", word)
    listed = client.list(box)
    assert [word for _, word in listed] == list(client.words)
    client.delete(box, listed[1][0])
    client.delete(box, listed[1][0])  # already deleted, which is not an error
    assert client.list(box) == [listed[0], listed[2]]
    assert [each.msg_id for each in client.listen(box).take(2)] == [listed[0][0], listed[2][0]]


@pytest.mark.parametrize(
    "payload", [b"", b"\x80\x00abc", b'{"msg_id": "7", "payload": "no base64!"}', b"x" * 100_000], ids=len
)
def test_any_bytes_arrive_as_they_were(connect: Connect, payload: bytes) -> None:
    client = connect()
    box = client.create()
    client.send(box, payload)
    assert client.listen(box).payloads(1) == [payload]


def test_refusals_have_codes_and_leave_the_connection_alone(connect: Connect) -> None:
    client = connect()
    assert is_refused(lambda: client.list("no.such.box"), 404)
    if isinstance(client, Ours):
        assert is_refused(lambda: client.listen("no.such.box"), 403)
    else:
        client.listen("no.such.box")
    if isinstance(client, NatsPy | NatsJs):
        for subject in ("*", ">", "*.*"):
            client.subscribe(MSG + subject, "", lambda *_: None)
    if isinstance(client, NatsPy | NatsJs):
        until(lambda: any("permissions violation" in error.lower() for error in client.errors))
    client.send("no.such.box", b"dropped")
    assert client.create()
    assert client.is_connected  # type: ignore[attr-defined]


def test_wildcards_of_other_clients_match_no_mailbox(
    connect: Connect, clients: Clients, server: MailServer
) -> None:
    stranger = clients.connect("nats-py", server.url)
    assert isinstance(stranger, NatsPy)
    seen: dict[str, list[tuple[str, bytes]]] = {}

    def watch(pattern: str) -> None:
        received = seen.setdefault(pattern, [])
        stranger.subscribe(pattern, "", lambda subject, data, _number: received.append((subject, data)))

    for pattern in (">", "_INBOX.>", "*.>", "$mq9.>", "$mq9.AI.MAILBOX.MSG.>"):
        watch(pattern)
    client = connect()
    box = client.create()
    inbox = client.listen(box)
    client.send(box, b"private")
    assert inbox.payloads(1) == [b"private"]
    client.list(box)
    fence = ("_INBOX.fence", b"behind all that happened before it")
    stranger.publish(*fence)
    until(lambda: all(fence in seen[pattern] for pattern in (">", "_INBOX.>", "*.>")))
    received = [each for messages in seen.values() for each in messages]
    assert not any(box in subject or box.encode() in data or b"private" in data for subject, data in received)
    assert not seen["$mq9.>"]
    assert not seen["$mq9.AI.MAILBOX.MSG.>"]


@pytest.mark.parametrize("reading", KINDS)
def test_every_client_reads_messages_of_every_other_client(
    connect: Connect, clients: Clients, server: MailServer, reading: str
) -> None:
    sender, reader = connect(), clients.connect(reading, server.url)
    box = sender.create()
    for word in reversed(sender.words):
        sender.send(box, word.encode(), word)
    numbers = [number for number, _ in sender.list(box)]
    sdk = isinstance(reader, Sdk)
    expected = [AS_SDK[word] if sdk else word for word in sender.words]
    got = reader.listen(box).take(3)
    assert [(each.word, each.msg_id) for each in got] == list(zip(expected, numbers, strict=True))
    assert [each.payload.decode() for each in got] == list(sender.words)
    assert reader.list(box) == list(zip(numbers, expected, strict=True))


@pytest.mark.parametrize("normal", ["", "memory"])
def test_messages_survive_kill_9_except_normal_ones_in_memory(
    clients: Clients, tmp_path: Path, normal: str
) -> None:
    with serving(tmp_path / "data", *(["--normal", normal] if normal else [])) as server:
        boxes: dict[str, str] = {}
        for kind in KINDS:
            client = clients.connect(kind, server.url)
            boxes[kind] = client.create()
            for word in client.words:
                client.send(boxes[kind], word.encode(), word)
            client.list(boxes[kind])  # answered when earlier messages are stored
            clients.end(client)
        server.end(SIGKILL)
        server.start()
        for kind, box in boxes.items():
            client = clients.connect(kind, server.url)
            durable = [word for word in client.words if not normal or word in ("critical", "urgent", "high")]
            inbox = client.listen(box)
            assert [each.payload.decode() for each in inbox.take(len(durable))] == durable
            assert inbox.rest() == []
            clients.end(client)


def test_normal_messages_survive_with_the_group_class(clients: Clients, tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--durable-normal") as server:
        client = clients.connect("Mail", server.url)
        box = client.create()
        client.send(box, b"kept")
        client.list(box)
        clients.end(client)
        server.end(SIGKILL)
        server.start()
        client = clients.connect("robustmq", server.url)
        assert client.listen(box).payloads(1) == [b"kept"]
        clients.end(client)


def test_the_tools_of_langchain(server: MailServer) -> None:
    tools: dict[str, Any] = {tool.name: tool for tool in Mq9Toolkit(server=server.url).get_tools()}
    assert len(tools) == 6

    async def work() -> None:
        async def use(part: str, **words: Any) -> str:
            [name] = [name for name in tools if part in name]
            return str(await tools[name].ainvoke(words))

        made = await use("create_mailbox", ttl=60)
        found = UUID.search(made)
        assert found, made
        box = found[0]
        await use("send", mail_id=box, content="hello from a chain", priority="high")
        await use("send", mail_id=box, content="and again", priority="low")
        read = await use("get_messages", mail_id=box)
        assert read.index("hello from a chain") < read.index("and again")
        listed = await use("list", mail_id=box)
        number = re.search(r"msg_id=(\d+)  priority=high", listed)
        assert number, listed
        await use("delete", mail_id=box, msg_id=number[1])
        assert "hello from a chain" not in await use("get_messages", mail_id=box)
        assert "chain.queue" in await use("create_public", name="chain.queue", ttl=60, desc="d")

    asyncio.run(work())


def test_the_newest_dialect_by_hand(clients: Clients, server: MailServer) -> None:
    client = clients.connect("nats-py", server.url)
    assert isinstance(client, NatsPy)
    box = client.create()

    def ask(subject: str, **body: Any) -> dict[str, Any]:
        reply = dict(client.request(f"$mq9.AI.{subject}", json.dumps(body).encode()))
        assert reply["error"] == ""
        return reply

    sent = [ask(f"MSG.SEND.{box}", n=number)["msg_id"] for number in range(3)]
    fetch = {"group_name": "g", "deliver": "earliest", "config": {"num_msgs": 2, "max_wait_ms": 0}}
    assert [each["msg_id"] for each in ask(f"MSG.FETCH.{box}", **fetch)["messages"]] == sent[:2]
    ask(f"MSG.ACK.{box}", group_name="g", mail_address=box, msg_id=sent[1])
    assert [each["msg_id"] for each in ask(f"MSG.FETCH.{box}", **fetch)["messages"]] == sent[2:]
    ask("AGENT.REGISTER", name="ada", description="reviews pull requests")
    assert [each["name"] for each in ask("AGENT.DISCOVER", text="pull")["agents"]] == ["ada"]
    ask("AGENT.UNREGISTER", name="ada")
