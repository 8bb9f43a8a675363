"""Each sample of the mq9 design, with a plain NATS client and the subjects as the design writes them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from robustmq.mq9 import Client as SdkClient  # type: ignore[import-untyped]
from robustmq.mq9 import Priority

from tests.integration.mailservers import MailServer, serving
from tests.waiting import HANG_GUARD_S

CREATE = "$mq9.AI.MAILBOX.CREATE"
QUIET_S = 0.2


@pytest.fixture(name="server", scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    with serving(tmp_path_factory.mktemp("mail") / "data") as server:
        yield server


def with_clients(server: MailServer, count: int, work: Callable[..., Awaitable[None]]) -> None:
    async def run() -> None:
        clients = [await nats.connect(server.url, allow_reconnect=False) for _ in range(count)]
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await work(*clients)
        finally:
            for client in clients:
                await client.close()

    asyncio.run(run())


async def ask(client: Client, subject: str, body: object = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    return json.loads((await client.request(subject, data, timeout=HANG_GUARD_S)).data)


async def take(subscription: Any, count: int) -> list[Msg]:
    return [await subscription.next_msg(HANG_GUARD_S) for _ in range(count)]


async def rest(subscription: Any) -> list[Msg]:
    found = []
    try:
        while True:
            found.append(await subscription.next_msg(QUIET_S))
    except nats.errors.TimeoutError:
        return found


def number(message: Msg) -> str:
    assert message.headers is not None
    return message.headers["Mq9-Msg-Id"]


def test_create_with_a_ttl(server: MailServer) -> None:
    async def work(client: Client) -> None:
        reply = await ask(client, CREATE, {"ttl": 3600, "public": False})
        assert reply["is_new"] is True
        again = await ask(client, CREATE, {"ttl": 3600, "public": False})
        assert again["mail_id"] != reply["mail_id"]

    with_clients(server, 1, work)


def test_three_priorities_in_the_subject(server: MailServer) -> None:
    async def work(client: Client) -> None:
        mail_id = (await ask(client, CREATE, {"ttl": 3600, "public": False}))["mail_id"]
        await client.publish(f"$mq9.AI.MAILBOX.MSG.{mail_id}", b"default")
        await client.publish(f"$mq9.AI.MAILBOX.MSG.{mail_id}.urgent", b"urgent")
        await client.publish(f"$mq9.AI.MAILBOX.MSG.{mail_id}.critical", b"highest")
        await client.publish(f"$mq9.AI.MAILBOX.MSG.{mail_id}", b"default, later")
        messages = await take(await client.subscribe(f"$mq9.AI.MAILBOX.MSG.{mail_id}.*"), 4)
        assert [each.data for each in messages] == [b"highest", b"urgent", b"default", b"default, later"]
        assert messages[0].subject == f"$mq9.AI.MAILBOX.MSG.{mail_id}.critical"
        assert messages[2].subject == f"$mq9.AI.MAILBOX.MSG.{mail_id}"
        bare = await take(await client.subscribe(f"$mq9.AI.MAILBOX.MSG.{mail_id}"), 2)
        assert [each.data for each in bare] == [b"default", b"default, later"]

    with_clients(server, 1, work)


def test_storage_by_priority_over_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--normal", "memory") as server:
        found: list[str] = []

        async def send(client: Client) -> None:
            mail_id = (await ask(client, CREATE, {"ttl": 3600}))["mail_id"]
            found.append(mail_id)
            for suffix in (".critical", ".urgent", ""):
                await ask(client, f"$mq9.AI.MAILBOX.MSG.{mail_id}{suffix}", {"suffix": suffix})

        async def read(client: Client) -> None:
            subscription = await client.subscribe(f"$mq9.AI.MAILBOX.MSG.{found[0]}.*")
            payloads = [json.loads(each.data)["suffix"] for each in await take(subscription, 2)]
            assert payloads == [".critical", ".urgent"]
            assert await rest(subscription) == []

        with_clients(server, 1, send)
        server.end(SIGKILL)
        server.start()
        with_clients(server, 1, read)


def test_offline_agents_lose_nothing_and_subscribing_is_querying(server: MailServer) -> None:
    async def work(sender: Client, agent: Client, later: Client) -> None:
        mail_id = (await ask(sender, CREATE, {"ttl": 3600}))["mail_id"]
        subject = f"$mq9.AI.MAILBOX.MSG.{mail_id}"
        before = await agent.subscribe(f"{subject}.*")
        await ask(sender, subject, {"task": 1})
        assert json.loads((await take(before, 1))[0].data) == {"task": 1}
        await before.unsubscribe()
        await ask(sender, subject, {"task": 2})  # while there is no subscriber
        for client in (agent, later):
            subscription = await client.subscribe(f"{subject}.*")
            assert [json.loads(each.data)["task"] for each in await take(subscription, 2)] == [1, 2]
            assert await rest(subscription) == []

    with_clients(server, 3, work)


def test_two_workers_of_a_queue_group(server: MailServer) -> None:
    async def work(producer: Client, one: Client, two: Client) -> None:
        for worker in (producer, one, two):  # each ensures that the mailbox exists
            reply = await ask(worker, CREATE, {"ttl": 3600, "public": True, "name": "task.queue"})
            assert (reply["mail_id"], reply["is_new"]) == ("task.queue", worker is producer)
        subscriptions = [
            await worker.subscribe("$mq9.AI.MAILBOX.MSG.task.queue.*", queue="workers")
            for worker in (one, two)
        ]
        for worker in (one, two):
            await worker.flush()
            await worker.flush()
        for job in range(6):
            await ask(producer, "$mq9.AI.MAILBOX.MSG.task.queue", {"job": job})
        shares = [await rest(subscription) for subscription in subscriptions]
        assert sorted(json.loads(each.data)["job"] for share in shares for each in share) == list(range(6))
        # The first completes its messages and deletes them; the second crashes before that.
        for each in shares[0]:
            assert await ask(one, f"$mq9.AI.MAILBOX.DELETE.task.queue.{number(each)}") == {"deleted": True}
        await two.close()
        again = await take(subscriptions[0], len(shares[1]))
        assert [number(each) for each in again] == [number(each) for each in shares[1]]
        assert await rest(subscriptions[0]) == []

    with_clients(server, 3, work)


def test_the_public_list(server: MailServer) -> None:
    async def work(client: Client, other: Client) -> None:
        await ask(other, CREATE, {"ttl": 3600, "public": True, "name": "vision.results", "desc": "pictures"})
        subscription = await client.subscribe("$mq9.AI.PUBLIC.LIST")
        await ask(other, CREATE, {"ttl": 0.4, "public": True, "name": "short.lived"})
        seen = []
        while {"event": "expired", "mail_id": "short.lived"} not in seen:
            seen.append(json.loads((await subscription.next_msg(HANG_GUARD_S)).data))
        assert {"event": "created", "mail_id": "vision.results", "desc": "pictures", "ttl": 3600} in seen
        assert {"event": "created", "mail_id": "short.lived", "desc": "", "ttl": 0.4} in seen

    with_clients(server, 2, work)


def test_deduplication_by_msg_id(server: MailServer) -> None:
    async def work(sender: Client, agent: Client) -> None:
        mail_id = (await ask(sender, CREATE, {"ttl": 3600}))["mail_id"]
        known: set[str] = set()
        for job in range(3):
            sent = await ask(sender, f"$mq9.AI.MAILBOX.MSG.{mail_id}", {"job": job})
            subscription = await agent.subscribe(f"$mq9.AI.MAILBOX.MSG.{mail_id}.*")
            fresh = [each for each in await take(subscription, job + 1) if number(each) not in known]
            assert [number(each) for each in fresh] == [str(sent["msg_id"])]
            known |= {number(each) for each in fresh}
            await subscription.unsubscribe()

    with_clients(server, 2, work)


def test_a_ttl_cannot_be_changed_and_ends_the_mailbox(server: MailServer) -> None:
    async def work(client: Client) -> None:
        body = {"ttl": 0.5, "public": True, "name": "fixed.ttl"}
        await ask(client, CREATE, body)
        await ask(client, "$mq9.AI.MAILBOX.MSG.fixed.ttl.critical", {"a": 1})
        assert (await ask(client, CREATE, {**body, "ttl": 3600}))["is_new"] is False
        while "error" not in (listed := await ask(client, "$mq9.AI.MAILBOX.LIST.fixed.ttl")):  # noqa: ASYNC110 - time ends it
            await asyncio.sleep(0.02)
        assert listed["code"] == 410
        assert (await ask(client, CREATE, {**body, "ttl": 3600}))["is_new"] is True
        assert (await ask(client, "$mq9.AI.MAILBOX.LIST.fixed.ttl"))["messages"] == []

    with_clients(server, 1, work)


def test_the_demo_of_the_published_sdk(server: MailServer) -> None:
    async def work() -> None:
        got: list[Any] = []

        async def handler(message: Any) -> None:
            got.append(message)

        async with SdkClient(server=server.url) as client:
            mailbox = await client.create(ttl=3600)
            await client.send(mailbox.mail_id, b"hello bytes", priority=Priority.HIGH)
            await client.send(mailbox.mail_id, "hello text")
            await client.send(mailbox.mail_id, {"hello": "dict"}, priority="low")
            await client.subscribe(mailbox.mail_id, handler)
            async with asyncio.timeout(HANG_GUARD_S):
                while len(got) < 3:  # noqa: ASYNC110 - the SDK calls back
                    await asyncio.sleep(0.01)
            metas = await client.list(mailbox.mail_id)
            assert [meta.priority for meta in metas] == [Priority.HIGH, Priority.NORMAL, Priority.LOW]
            await client.delete(mailbox.mail_id, metas[0].msg_id)
            assert len(await client.list(mailbox.mail_id)) == 2
            public = await client.create(ttl=3600, public=True, name="sdk.queue", desc="Shared")
            assert public.mail_id == "sdk.queue"
        assert [message.payload for message in got] == [b"hello bytes", b"hello text", b'{"hello": "dict"}']
        assert [message.msg_id for message in got] == [meta.msg_id for meta in metas]

    asyncio.run(work())


def test_a_rendezvous_of_two_agents_over_a_public_mailbox(server: MailServer) -> None:
    async def agent(name: str) -> tuple[str, bytes]:
        """Announces its address to the others, and greets the first one that it discovers."""
        async with SdkClient(server=server.url) as client:
            meeting = (await client.create(ttl=60, public=True, name="demo.multi-agent.rendezvous")).mail_id
            own = (await client.create(ttl=60)).mail_id
            heard: asyncio.Queue[Any] = asyncio.Queue()
            greeted: asyncio.Queue[Any] = asyncio.Queue()
            await client.subscribe(meeting, heard.put)
            await client.subscribe(own, greeted.put)
            await client.send(meeting, {"name": name, "mail_id": own})
            while (met := json.loads((await heard.get()).payload))["name"] == name:
                pass
            await client.send(met["mail_id"], f"hello {met['name']}, I am {name}")
            return met["name"], (await greeted.get()).payload

    async def work() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            one, two = await asyncio.gather(agent("ada"), agent("bob"))
        assert one == ("bob", b"hello ada, I am bob")
        assert two == ("ada", b"hello bob, I am ada")

    asyncio.run(work())
