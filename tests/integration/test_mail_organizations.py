"""Organizations at a real mail server: each operation by each kind of client, before and after a restart."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats
import pytest
from nats.aio.client import Client

from postroom import Mail
from postroom.errors import MailRefused
from postroom.server.access.tokens import Permissions, TokenRegistry
from tests.integration.mailservers import MailServer, serving
from tests.waiting import HANG_GUARD_S, until

API = "$mq9.AI."
QUIET_S = 0.15
OUTSIDERS = ("other", "operator of other")
INSIDERS = ("ada", "amy", "operator of acme", "operator of all")
CALLS = (
    ("list", "MAILBOX.LIST.{box}", b""),
    ("send", "MAILBOX.MSG.{box}.urgent", b"a message"),
    ("send3", "MSG.SEND.{box}", b"a message"),
    ("fetch", "MSG.FETCH.{box}", b'{"group_name":"g"}'),
    ("ack", "MSG.ACK.{box}", b'{"group_name":"g","msg_id":1}'),
    ("query", "MSG.QUERY.{box}", b"{}"),
    ("delete", "MAILBOX.DELETE.{box}.1", b""),
    ("delete3", "MSG.DELETE.{box}.1", b""),
    ("subscribe", "MAILBOX.MSG.{box}.*", b""),
)


class World(NamedTuple):
    server: MailServer
    tokens: dict[str, str]
    boxes: dict[str, str]

    def refused(self, kind: str, after: int = 0, count: int = 0) -> list[dict[str, Any]]:
        """The events of refused calls after the first ones, as soon as there are so many."""
        until(lambda: len(self._rejected(kind)) >= after + count)
        return self._rejected(kind)[after:]

    def _rejected(self, kind: str) -> list[dict[str, Any]]:
        return [
            each for each in self.server.events() if each["kind"] == "rejected" and each.get("type") == kind
        ]


async def connect(server: MailServer, token: str) -> Client:
    async def ignore(_: Exception) -> None:
        """A refused subscription is reported here, too."""

    return await nats.connect(server.url, token=token or None, error_cb=ignore, allow_reconnect=False)


async def call(client: Client, subject: str, body: bytes = b"") -> Any:
    return json.loads((await client.request(API + subject, body, timeout=HANG_GUARD_S)).data)


async def may_subscribe(client: Client, subject: str) -> bool:
    """Whether a subscription is accepted; nats-py reports the refusal as an error of the connection."""
    await client.subscribe(API + subject)
    for _ in range(2):  # the first ping may overtake the subscription
        await client.flush()
    return client.last_error is None


async def outcome(client: Client, name: str, subject: str, body: bytes) -> int:
    """200, or the code of the refusal."""
    if name == "subscribe":
        return 200 if await may_subscribe(client, subject) else 404
    answer = await call(client, subject, body)
    return int(answer.get("code", 200))


def in_client(world: World, who: str, work: Any) -> Any:
    async def run() -> Any:
        client = await connect(world.server, world.tokens[who])
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def make_tokens(data: Path) -> dict[str, str]:
    tokens = TokenRegistry(data)
    only = Permissions(only_message=("amy",))
    return {
        "ada": tokens.create("agent", "acme", "ada").token,
        "amy": tokens.create("agent", "acme", "amy").token,
        "to amy only": tokens.create("agent", "acme", "eve", permissions=only).token,
        "other": tokens.create("agent", "other", "bob").token,
        "operator of acme": tokens.create("operator", "acme").token,
        "operator of other": tokens.create("operator", "other").token,
        "operator of all": tokens.create("operator").token,
    }


@pytest.fixture(scope="module", params=["started", "restarted"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("organizations")
    tokens = make_tokens(data)
    with serving(data / "mail", "--tokens", str(data)) as server:
        found = World(server, tokens, {})

        async def create(client: Client) -> None:
            public = await call(client, "MAILBOX.CREATE", b'{"name":"acme.public","public":true}')
            private = await call(client, "MAILBOX.CREATE", b"{}")
            found.boxes.update(public=public["mail_id"], private=private["mail_id"])
            for box in found.boxes.values():
                await call(client, f"MAILBOX.MSG.{box}", b"of acme")
                await call(client, f"MSG.FETCH.{box}", b'{"group_name":"g"}')
            await call(client, "AGENT.REGISTER", b'{"name":"coder","mailbox":"acme.public"}')

        in_client(found, "ada", create)
        if request.param == "restarted":
            assert server.end()[0] == 0
            server.start()
        yield found


@pytest.mark.parametrize("kind", ["public", "private"])
@pytest.mark.parametrize(("name", "subject", "body"), CALLS, ids=[name for name, _, _ in CALLS])
def test_an_operation_is_for_the_organization_and_for_operators_of_all(
    world: World, kind: str, name: str, subject: str, body: bytes
) -> None:
    box = world.boxes[kind]
    before = len(world.refused(name))

    def of(who: str) -> int:
        filled = subject.format(box=box)
        return int(in_client(world, who, lambda client: outcome(client, name, filled, body)))

    assert {who: of(who) for who in INSIDERS} == dict.fromkeys(INSIDERS, 200)
    assert {who: of(who) for who in OUTSIDERS} == dict.fromkeys(OUTSIDERS, 404)
    refused = world.refused(name, before, len(OUTSIDERS))
    assert [each["org_id"] for each in refused] == ["other", "other"]
    assert world.boxes["private"] not in json.dumps(refused)


def test_an_organization_finds_its_own_mailboxes_and_agents_alone(world: World) -> None:
    async def found(client: Client) -> tuple[set[str], list[str]]:
        got: set[str] = set()

        async def take(message: Any) -> None:
            got.add(json.loads(message.data)["mail_id"])

        await client.subscribe(f"{API}PUBLIC.LIST", cb=take)
        for _ in range(2):
            await client.flush()
        await asyncio.sleep(QUIET_S)
        return got, [card["name"] for card in (await call(client, "AGENT.DISCOVER"))["agents"]]

    for who in INSIDERS:
        assert in_client(world, who, found) == ({"acme.public"}, ["coder"])
    for who in OUTSIDERS:
        assert in_client(world, who, found) == (set(), [])


def test_a_plain_publish_of_an_outsider_is_dropped_and_is_an_event(world: World) -> None:
    before = len(world.refused("send"))

    async def send(client: Client) -> None:
        await client.publish(f"{API}MAILBOX.MSG.{world.boxes['private']}", b"from outside")
        await client.flush()

    async def stored(client: Client) -> list[str]:
        listed = await call(client, f"MAILBOX.LIST.{world.boxes['private']}")
        return [each["payload"] for each in listed["messages"]]

    in_client(world, "other", send)
    assert "from outside" not in in_client(world, "ada", stored)
    assert [each["sender"] for each in world.refused("send", before, 1)] == ["other/bob"]


def test_a_token_with_only_message_sends_into_the_mailboxes_of_that_agent(world: World) -> None:
    before = len(world.refused("send"))

    async def create(client: Client) -> str:
        return str((await call(client, "MAILBOX.CREATE", b"{}"))["mail_id"])

    of_amy, own = (in_client(world, who, create) for who in ("amy", "to amy only"))

    async def send(client: Client) -> dict[str, int]:
        boxes = {"amy": of_amy, "own": own, "ada": world.boxes["private"]}
        return {
            name: (await call(client, f"MAILBOX.MSG.{box}", b"x")).get("code", 200)
            for name, box in boxes.items()
        }

    assert in_client(world, "to amy only", send) == {"amy": 200, "own": 200, "ada": 403}
    assert [each["error_type"] for each in world.refused("send", before, 1)] == ["403"]


def test_without_tokens_every_client_uses_every_mailbox(tmp_path: Path) -> None:
    with serving(tmp_path / "mail") as server:
        world = World(server, {"a": "", "b": ""}, {})

        async def create(client: Client) -> str:
            return str((await call(client, "MAILBOX.CREATE", b"{}"))["mail_id"])

        box = in_client(world, "a", create)

        async def use(client: Client) -> dict[str, int]:
            return {
                name: await outcome(client, name, subject.format(box=box), body)
                for name, subject, body in CALLS
            }

        codes = in_client(world, "b", use)
        assert codes == dict.fromkeys(codes, 200)


def test_a_read_only_token_is_refused_with_the_reason(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path / "run")
    reader = tokens.create("operator", permissions=Permissions(is_read_only=True)).token
    with serving(tmp_path / "mail", "--tokens", str(tmp_path / "run")) as server:
        for token, said in ((reader, "a read-only token is not for NATS"), ("x", "wrong user, password or")):
            with pytest.raises(MailRefused, match=said), Mail(server.url, token=token):
                pass
        with socket.create_connection(("127.0.0.1", server.port), HANG_GUARD_S) as connection:
            connection.sendall(b'CONNECT {"auth_token":"%b"}\r\n' % reader.encode())
            lines = connection.makefile("rb").readlines()
        assert lines[-1] == b"-ERR 'Authorization Violation: a read-only token is not for NATS'\r\n"
