"""Tokens of two organizations at one server: neither sees, gets or changes what belongs to the other."""

import asyncio
import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError

from postroom import Tasks
from postroom.contracts.tasks.task_storage import STORED, STORED_TASKS_MAX, StoredTasks, stored_tasks
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.names import scoped
from postroom.errors import InvalidMessage
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import Permissions, TokenRegistry
from postroom.stores.own_ids import COVERED, IDS_FACT
from tests.integration.commandline import postroom
from tests.integration.ups import Running, running
from tests.waiting import HANG_GUARD_S

ACME, OTHER = "acme", "other"


class World:
    """A running server, and an agent of each organization."""

    def __init__(self, up: Running, data: Path) -> None:
        self.up, self.tokens, self.data = up, TokenRegistry(data), data
        self.acme = self.agent(ACME, "ada")
        self.other = self.agent(OTHER, "bob")

    def agent(self, org: str, name: str) -> str:
        return self.tokens.create("agent", org, name).token

    def call(self, token: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.up.http + path, data, headers)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def stream(self, token: str, place: str, act: Callable[[], str]) -> list[dict[str, str]]:
        """The events that a page gets which goes on from a place, up to a `reset` or one with a given text.

        `act` is called after the first overview, and returns the text.
        """
        headers = {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.up.http}/page/stream?after={place}", headers=headers)  # noqa: S310 - our own server
        found: list[dict[str, str]] = []
        end = ""
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
            while not (end and any(end in event["data"] for event in found)):
                fields: dict[str, str] = {}
                while line := answer.readline().decode().strip():
                    name, _, fields[name] = line.partition(": ")
                if "event" in fields:
                    found.append(fields)
                    if fields["event"] == "reset":
                        break
                    end = end or (act() if fields["event"] == "overview" else "")
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("organizations") / "run"
    with running(data, "--no-audit") as up:
        yield World(up, data)


# ---- NATS ------------------------------------------------------------------------------------------


async def heard(client: Client, subject: str, got: list[bytes], queue: str = "") -> None:
    async def take(message: Any) -> None:
        got.append(message.data)

    await client.subscribe(subject, queue=queue, cb=take)


def test_plain_subjects_of_nats_do_not_cross_organizations(world: World) -> None:
    heard_by = {"acme": list[bytes](), "other": list[bytes](), "all": list[bytes]()}

    async def talk() -> None:
        assert world.up.token is not None
        acme = await nats.connect(world.up.nats, token=world.acme)
        other = await nats.connect(world.up.nats, token=world.other)
        everything = await nats.connect(world.up.nats, token=world.up.token)
        for subject in (">", "_INBOX.>", "_INBOX.*.*"):
            await heard(other, subject, heard_by["other"])
        await heard(other, "news", heard_by["other"], queue="workers")
        await heard(acme, "news", heard_by["acme"])
        await heard(everything, "news", heard_by["all"])
        for client in (other, everything):
            await client.flush()
        await acme.publish("news", b"of acme")
        await acme.publish("_INBOX.secret.1", b"an answer")
        await acme.flush()
        await other.publish("news", b"of other")
        for client in (other, acme, everything):
            await client.drain()

    asyncio.run(talk())
    assert heard_by["acme"] == [b"of acme"]
    assert set(heard_by["other"]) == {b"of other"}
    assert heard_by["all"] == [b"of acme", b"of other"]


def test_an_agent_of_no_organization_hears_none(world: World) -> None:
    token = Agents(world.data).add("loner")
    heard_by = {"loner": list[bytes](), "acme": list[bytes]()}

    async def talk() -> None:
        loner, twin = [await nats.connect(world.up.nats, token=token) for _ in range(2)]
        acme = await nats.connect(world.up.nats, token=world.acme)
        await heard(loner, ">", heard_by["loner"])
        await heard(acme, ">", heard_by["acme"])
        for client in (loner, acme, loner, acme):  # the first ping may overtake the subscription
            await client.flush()
        for client, text in ((acme, b"of acme"), (twin, b"of none")):
            await client.publish("quiet.news", text)
            await client.flush()
        for client in (loner, twin, acme):
            await client.drain()

    asyncio.run(talk())
    assert heard_by == {"loner": [b"of none"], "acme": [b"of acme"]}


async def answers(client: Client, subject: str, text: bytes) -> None:
    async def answer(message: Any) -> None:
        await message.respond(text)

    await client.subscribe(subject, cb=answer)
    for _ in range(2):  # the first ping may overtake the subscription
        await client.flush()


def test_an_inbox_takes_nothing_from_another_organization(world: World) -> None:
    got: list[bytes] = []

    async def attack() -> None:
        acme, friend = [await nats.connect(world.up.nats, token=world.acme) for _ in range(2)]
        other = await nats.connect(world.up.nats, token=world.other)
        for inbox in ("_INBOX.acme", "_INBOX.acmes.*"):
            await heard(acme, inbox, got)
        await heard(acme, "_INBOX.acmes.*", got, queue="workers")
        for _ in range(2):
            await acme.flush()
        for inbox in ("_INBOX.acme", "_INBOX.acmes.1"):
            await other.publish(inbox, b"forged")
            await other.publish("$mq9.AI.MAILBOX.CREATE", b"{}", reply=inbox)  # its answer goes to the inbox
            with pytest.raises(NoRespondersError):
                await other.request(inbox, b"forged", timeout=HANG_GUARD_S)
        await other.flush()
        await friend.publish("_INBOX.acme", b"of acme")
        for client in (friend, acme, other):
            await client.drain()

    asyncio.run(attack())
    assert got == [b"of acme"]


def test_no_other_organization_sees_the_answer_to_a_request(world: World) -> None:
    seen: list[bytes] = []

    async def ask() -> bytes:
        acme, service = [await nats.connect(world.up.nats, token=world.acme) for _ in range(2)]
        spy = await nats.connect(world.up.nats, token=world.other)
        await answers(service, "service.of.acme", b"a secret")
        inbox = acme.new_inbox()
        waiting = await acme.subscribe(inbox)
        for pattern in (inbox, f"{inbox.rpartition('.')[0]}.*", "_INBOX.>", ">"):
            await heard(spy, pattern, seen)
        await heard(spy, inbox, seen, queue="spies")
        for client in (spy, acme, spy, acme):
            await client.flush()
        await acme.publish("service.of.acme", b"?", reply=inbox)
        try:
            return (await waiting.next_msg(timeout=HANG_GUARD_S)).data
        finally:
            for client in (acme, service, spy):
                await client.drain()

    assert asyncio.run(ask()) == b"a secret"
    assert seen == []


def test_organization_cannot_read_the_inbox_of_an_operator(world: World) -> None:
    seen: list[bytes] = []

    async def ask() -> list[bytes]:
        operator, service = [await nats.connect(world.up.nats, token=world.up.token) for _ in range(2)]
        acme = await nats.connect(world.up.nats, token=world.acme)

        async def answer_and_listen(message: Any) -> None:
            for inbox in (message.reply, f"{message.reply.rpartition('.')[0]}.*"):
                await heard(acme, inbox, seen)
                await heard(acme, inbox, seen, queue="spies")
            for _ in range(2):
                await acme.flush()
            await message.respond(b"of acme")

        await acme.subscribe("asked.first", cb=answer_and_listen)
        await acme.flush()
        await answers(service, "asked.second", b"of an operator")
        try:
            return [
                (await operator.request(subject, b"?", timeout=HANG_GUARD_S)).data
                for subject in ("asked.first", "asked.second")
            ]
        finally:
            for client in (operator, service, acme):
                await client.drain()

    assert asyncio.run(ask()) == [b"of acme", b"of an operator"]
    assert b"of an operator" not in seen


def test_an_operator_of_all_organizations_asks_and_answers_each_of_them(world: World) -> None:
    async def ask() -> list[bytes]:
        acme = await nats.connect(world.up.nats, token=world.acme)
        everything = await nats.connect(world.up.nats, token=world.up.token)
        await answers(acme, "asked.by.operator", b"of acme")
        await answers(everything, "asked.by.acme", b"of the operator")
        try:
            return [
                (await client.request(subject, b"?", timeout=HANG_GUARD_S)).data
                for client, subject in ((everything, "asked.by.operator"), (acme, "asked.by.acme"))
            ]
        finally:
            await acme.close()
            await everything.close()

    assert asyncio.run(ask()) == [b"of acme", b"of the operator"]


def test_a_revoked_token_of_a_user_named_token_ends_its_nats_connection(world: World) -> None:
    made = world.tokens.create("operator", agent="token")

    async def connected_until_revoked() -> None:
        closed = asyncio.Event()

        async def note_closed() -> None:
            closed.set()

        client = await nats.connect(
            world.up.nats, token=made.token, allow_reconnect=False, closed_cb=note_closed
        )
        await client.flush()
        world.tokens.revoke(made.token_id)
        await asyncio.wait_for(closed.wait(), 10)

    asyncio.run(connected_until_revoked())


# ---- Tasks -----------------------------------------------------------------------------------------


def test_two_organizations_have_tasks_of_the_same_id(world: World) -> None:
    """Each sees and ends its own one under the id that it gave, and operators see whose a task is."""
    assert world.up.token is not None
    for org, name in ((ACME, "anna"), (OTHER, "otto")):
        token = world.tokens.create("agent", org, name, permissions=Permissions(may_send_to=(name,))).token
        task = {"agent": name, "payload": f"of {org}", "task_id": "build"}
        assert world.call(token, "/queue/enqueue", task) == (201, {"task_id": "build"})
        assert world.call(token, "/queue/enqueue", task) == (201, {"task_id": "build"})  # no second one
        child = {"agent": name, "payload": 1, "parent": "build", "task_id": "child", "delay_s": 60}
        world.call(token, "/queue/enqueue", child)
        assert world.call(token, "/tasks/child")[1]["parent"] == "build"
        claimed = world.call(token, "/queue/next", {})[1]
        assert (claimed["task_id"], claimed["payload"]) == ("build", f"of {org}")
        held = {"task_id": "build", "lease": claimed["lease"]}
        assert world.call(token, "/queue/heartbeat", held) == (202, {"task_id": "build"})
        assert world.call(token, "/queue/complete", {**held, "decision": org})[0] == 202
        found = world.call(token, "/tasks/build?wait_s=1")[1]
        assert (found["task_id"], found["payload"], found["result"]) == ("build", f"of {org}", org)
        assert {event["message_id"] for event in found["history"]} == {"build"}
        assert [line["task_id"] for line in world.call(token, "/tasks")[1]["tasks"]] == ["build", "child"]
        status, answer = world.call(token, "/queue/fail", {**held, "lease": 1, "error": "late"})
        assert (status, "@" in answer["message"]) == (409, False)
        foreign = world.call(token, f"/tasks/@{OTHER if org == ACME else ACME}:build")
        assert foreign[0] == 404
        seen = world.call(world.up.token, f"/tasks/@{org}:build")[1]
        assert (seen["task_id"], seen["payload"]) == (f"@{org}:build", f"of {org}")


def test_no_number_of_the_store_is_in_what_an_organization_sees(world: World) -> None:
    """Ids of tasks, places in lists and numbers of events tell nothing about the others, and still work."""
    assert world.up.token is not None
    token = world.tokens.create("agent", ACME, "nina", permissions=Permissions(may_send_to=("nina",))).token
    sent = [
        world.call(token, "/queue/enqueue", {"agent": "nina", "payload": number})[1]["task_id"]
        for number in range(3)
    ]
    lines = world.call(token, "/tasks?limit=2")[1]["tasks"]
    assert [line["task_id"] for line in lines] == sent[:2]
    [last] = world.call(token, f"/tasks?after={lines[-1]['seq']}")[1]["tasks"]
    assert last["task_id"] == sent[2]
    seen = world.call(world.up.token, f"/tasks/{sent[0]}")[1]
    assert seen["task_id"] != sent[0]  # an operator of all organizations sees the id in the store
    number = seen["task_id"].rsplit("-", 1)[1]
    assert [
        line["task_id"] for line in world.call(world.up.token, f"/tasks?after={int(number) - 1}")[1]["tasks"]
    ]
    found = world.call(token, f"/tasks/{sent[0]}")[1]
    assert (found["task_id"], found["payload"]) == (sent[0], 0)
    events = found["history"]
    assert {event["message_id"] for event in events} == {sent[0]}
    assert all(event["seq"] >= COVERED for event in events)
    claimed = world.call(token, "/queue/next", {"limit": 3})[1]["tasks"]
    assert [task["task_id"] for task in claimed] == sent
    done = {"task_id": sent[0], "lease": claimed[0]["lease"], "decision": 1}
    assert world.call(token, "/queue/complete", done)[0] == 202
    status, answer = world.call(token, "/queue/complete", {**done, "lease": 5})
    assert (status, answer["message"]) == (
        409, f"lease 5 of task '{sent[0]}' is no longer valid: stop working on it",
    )  # fmt: skip
    assert all(int(task_id.rsplit("-", 1)[1]) >= COVERED for task_id in sent)
    for number in range(3):
        world.call(token, "/engine/messages", {"type": "tool_call", "payload": {"tool": str(number)}})
    first = world.call(token, "/engine/messages?limit=2")[1]
    rest = world.call(token, f"/engine/messages?cursor={first['cursor']}")[1]["messages"]
    found_messages = [*first["messages"], *rest]
    assert len({message["message_id"] for message in found_messages}) == len(found_messages) >= 3
    assert int(first["cursor"]) >= COVERED
    events = world.call(token, f"/engine/messages/{found_messages[0]['message_id']}")[1]["history"]
    assert events
    assert all(event["seq"] >= COVERED for event in events)


def test_a_guessed_number_of_the_store_is_answered_like_an_unknown_one(world: World) -> None:
    """What a guess finds would count the store, and so would its covered form."""
    assert world.up.token is not None
    token = world.tokens.create("agent", ACME, "gus", permissions=Permissions(may_send_to=("gus",))).token

    def enqueue(**fields: Any) -> str:
        body = {"agent": "gus", "payload": 1, **fields}
        return str(world.call(token, "/queue/enqueue", body)[1]["task_id"])

    own = enqueue()
    guess = world.call(world.up.token, f"/tasks/{own}")[1]["task_id"]
    prefix, number = guess.rsplit("-", 1)
    claimed = world.call(token, "/queue/next", {})[1]
    assert claimed["task_id"] == own
    lease = world.call(world.up.token, f"/tasks/{own}")[1]["history"][-1]["seq"]
    held = {"task_id": own, "lease": claimed["lease"]}
    assert world.call(token, "/queue/heartbeat", held)[0] == 202
    assert world.call(token, "/queue/heartbeat", {**held, "lease": lease})[0] == 409
    for unknown in (guess, f"{prefix}-{2 * COVERED + 1}", f"{prefix}-{10**6}"):
        message = f"there is no task '{unknown}'"
        for path, body in (
            (f"/tasks/{unknown}", None),
            (f"/page/tasks/{unknown}", None),
            ("/queue/heartbeat", {**held, "task_id": unknown}),
            ("/queue/complete", {**held, "task_id": unknown, "decision": own}),
            ("/harness/result", {"task_id": unknown}),
        ):
            status, answer = world.call(token, path, body)
            assert (path, status, answer["message"]) == (path, 404, message)
    for path in (f"/tasks?after={number}", f"/engine/messages?cursor={number}", f"/events?after={number}"):
        status, answer = world.call(token, path)
        assert (status, "of an earlier answer" in answer["message"]) == (400, True)
    refused = world.call(token, f"/tasks?agent={guess}")
    assert (refused[0], own in str(refused)) == (403, False)
    failed = {**held, "lease": 5, "error": guess}
    assert guess not in world.call(token, "/queue/fail", failed)[1]["message"]

    child = enqueue(parent=guess)
    assert world.call(token, f"/tasks/{child}")[1]["parent"] == guess
    assert enqueue(task_id=guess, payload="given") == guess  # a name as any other
    assert world.call(token, f"/tasks/{guess}")[1]["payload"] == "given"
    assert world.call(token, f"/tasks/{own}")[1]["payload"] == 1
    new = {"type": "tool_call", "payload": {"tool": "x"}, "parent_message_id": guess}
    sent = world.call(token, "/engine/messages", new)[1]["message_id"]
    assert own not in json.dumps(world.call(token, f"/engine/messages/{sent}")[1])


def test_ids_and_positions_from_before_the_upgrade_are_still_understood(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        old = [tasks.enqueue(agent=scoped(ACME, "nina"), payload=number) for number in range(3)]
        [task] = tasks.claim(agent=scoped(ACME, "nina"))
        places = [line.seq for line in tasks.find(agent=scoped(ACME, "nina"))]
    with sqlite3.connect(data / "queue.db") as file:
        file.execute("DELETE FROM facts WHERE name = ?", (IDS_FACT,))
    with running(data, "--no-audit") as up:
        world = World(up, data)
        permissions = Permissions(may_send_to=("nina",))
        token = world.tokens.create("agent", ACME, "nina", permissions=permissions).token
        found = [world.call(token, f"/tasks/{task_id}")[1] for task_id in old]
        assert [one["payload"] for one in found] == [0, 1, 2]
        assert [world.call(token, f"/tasks/{one['task_id']}")[1] for one in found] == found
        rest = world.call(token, f"/tasks?after={places[1]}")[1]["tasks"]
        assert [line["task_id"] for line in rest] == [found[2]["task_id"]]
        held = {"task_id": task.task_id, "lease": task.lease}
        assert world.call(token, "/queue/complete", {**held, "decision": 1})[0] == 202
        new = world.call(token, "/queue/enqueue", {"agent": "nina", "payload": 3})[1]["task_id"]
        plain = world.call(up.token or "", f"/tasks/{new}")[1]["task_id"]
        assert [world.call(token, f"/tasks/{task_id}")[0] for task_id in (new, plain)] == [200, 404]


def numbers_in(value: Any) -> set[int]:
    """All whole numbers of an answer."""
    if isinstance(value, dict):
        return numbers_in([*value.values()])
    if isinstance(value, list):
        return set().union(*map(numbers_in, value))
    text = str(value)
    return {int(text)} if text.isdigit() else set()


def test_no_number_on_the_page_of_an_organization_grows_with_the_others(world: World) -> None:
    """Neither in lists and the overview, nor in the stream. A guessed number finds nothing out."""
    assert world.up.token is not None
    org, many = "paged", 300
    operator = world.tokens.create("operator", org).token
    agent = world.tokens.create("agent", org, "pia", permissions=Permissions(may_send_to=("pia",))).token
    sent: list[str] = []
    tasks: list[str] = []

    def submit(token: str, count: int) -> list[str]:
        messages = [{"type": "tool_call", "payload": {}, "delay_s": 600}] * count
        found: list[str] = world.call(token, "/engine/messages", {"messages": messages})[1]["message_ids"]
        return found

    def submit_one() -> str:
        sent.extend(submit(agent, 1))
        return sent[-1]

    def numbers() -> set[int]:
        """All numbers that the page gets after three more messages and tasks."""
        sent.extend(submit(agent, 3))
        task = {"agent": "pia", "payload": 1}
        tasks.extend(world.call(agent, "/queue/enqueue", task)[1]["task_id"] for _ in range(3))
        lists = ("/page/messages?limit=2", "/page/agents/pia/tasks?limit=2", "/page/overview")
        found = [
            world.call(agent, path)
            for path in (*lists, f"/page/messages/{sent[-1]}", f"/page/tasks/{tasks[-1]}")
        ]
        found += [world.call(operator, path) for path in (lists[0], lists[2])]
        assert {status for status, _ in found} == {200}
        events = world.stream(agent, "", submit_one)
        data = [json.loads(event["data"]) for event in events]
        return numbers_in([[answer for _, answer in found], [event["id"] for event in events], data])

    def plain(numbers: set[int]) -> set[int]:
        """Numbers that may count something: neither covered nor a time."""
        return {number for number in numbers if 10 < number < 10**12}

    known = plain(numbers())
    submit(world.other, many)
    assert plain(numbers()) <= known
    stored = world.call(world.up.token, f"/engine/messages/{sent[-1]}")[1]["history"][0]["seq"]
    assert stored > many

    for path, name, wanted in (
        ("/page/messages", "message", sent),
        ("/page/agents/pia/tasks", "task", tasks),
    ):
        page = world.call(agent, f"{path}?limit=4")[1]
        rest = world.call(agent, f"{path}?cursor={page['cursor']}")[1]
        found = [line[f"{name}_id"] for line in [*page[f"{name}s"], *rest[f"{name}s"]]]
        assert found == wanted[::-1]
        status, answer = world.call(agent, f"{path}?cursor={stored}")
        assert (status, "'cursor' must be the cursor" in answer["message"]) == (400, True)

    place = world.stream(agent, "", submit_one)[-1]["id"]
    submit(world.other, 1)
    missed = submit(agent, 1)
    found = world.stream(agent, place, submit_one)
    events = [
        one for event in found if event["event"] == "events" for one in json.loads(event["data"])["events"]
    ]
    assert [one["message_id"] for one in events] == [*missed, sent[-1]]
    assert [event["event"] for event in world.stream(agent, str(stored), submit_one)] == ["reset"]


def test_a_task_of_an_operator_keeps_its_id_for_its_agent(world: World) -> None:
    assert world.up.token is not None
    token = world.tokens.create("agent", ACME, "olga", permissions=Permissions(may_send_to=("olga",))).token
    world.call(world.up.token, "/queue/enqueue", {"agent": "olga", "payload": 1, "task_id": "given"})
    claimed = world.call(token, "/queue/next", {})[1]
    done = {"task_id": "given", "lease": claimed["lease"], "decision": 2}
    assert (claimed["task_id"], world.call(token, "/queue/complete", done)[0]) == ("given", 202)
    status, answer = world.call(token, "/queue/enqueue", {"agent": "olga", "payload": 2, "task_id": "given"})
    assert (status, "another sender" in answer["message"]) == (400, True)
    world.call(token, "/queue/enqueue", {"agent": "olga", "payload": 3, "task_id": "own"})
    again = {"agent": "olga", "payload": 4, "task_id": "own"}
    status, answer = world.call(world.up.token, "/queue/enqueue", again)
    assert (status, "'acme'" in answer["message"]) == (400, True)


def test_two_organizations_have_agents_of_the_same_name(world: World) -> None:
    """Each has its queue, and neither learns of the other. Operators see both, and name one of them."""
    assert world.up.token is not None
    allowed = Permissions(may_send_to=("twin",))
    tokens = {
        org: world.tokens.create("agent", org, "twin", permissions=allowed).token for org in (ACME, OTHER)
    }
    for org, token in tokens.items():
        task = {"agent": "twin", "payload": org, "idempotency_key": "once"}
        status, sent = world.call(token, "/queue/enqueue", task)
        assert (status, "warning" in sent) == (201, False)
        assert world.call(token, "/queue/enqueue", task)[1] == sent
        found = world.call(token, f"/tasks/{sent['task_id']}")[1]
        assert (found["agent"], found["sender"], found["idempotency_key"]) == ("twin", "twin", "@twin:once")
    for org, token in tokens.items():
        [line] = world.call(token, "/tasks?agent=twin")[1]["tasks"]
        assert line["agent"] == "twin"
        assert [*world.call(token, "/queue/status")[1]["agents"]] == ["twin"]
        claimed = world.call(token, "/queue/next", {})[1]
        assert (claimed["task_id"], claimed["payload"]) == (line["task_id"], org)
        assert world.call(token, f"/tasks/{line['task_id']}")[1]["worker"] == "twin"
        foreign = f"@{OTHER if org == ACME else ACME}:twin"
        assert world.call(token, "/queue/next", {"agent": foreign})[0] == 403
        assert world.call(token, f"/tasks?agent={foreign}")[0] == 403
        assert world.call(token, "/queue/enqueue", {"agent": foreign, "payload": 1})[0] == 403
    assert {"@acme:twin", "@other:twin"} <= {*world.call(world.up.token, "/queue/status")[1]["agents"]}
    status, answer = world.call(world.up.token, "/queue/enqueue", {"agent": "twin", "payload": 1})
    assert (status, "several organizations have an agent 'twin'" in answer["message"]) == (400, True)
    assert world.call(world.up.token, "/queue/enqueue", {"agent": "@other:twin", "payload": 1})[0] == 201
    assert world.call(tokens[OTHER], "/queue/next", {})[1]["payload"] == 1
    assert world.call(tokens[ACME], "/queue/next", {})[0] == 204


def test_operator_name_means_the_only_agent_unless_the_plain_queue_exists(world: World) -> None:
    assert world.up.token is not None
    status, sent = world.call(world.up.token, "/queue/enqueue", {"agent": "used", "payload": "for none"})
    assert (status, "'used'" in sent["warning"]) == (201, True)
    solo, used = world.agent(ACME, "solo"), world.agent(ACME, "used")
    assert world.call(world.up.token, "/queue/enqueue", {"agent": "solo", "payload": 2})[0] == 201
    assert world.call(solo, "/queue/next", {})[1]["payload"] == 2
    local = ("tasks", "enqueue", "--data", world.data, "--agent", "solo", "--payload", "3")
    assert (postroom(*local).code, world.call(solo, "/queue/next", {})[1]["payload"]) == (0, 3)
    world.call(world.up.token, "/queue/enqueue", {"agent": "used", "payload": "for none"})
    assert world.call(used, "/queue/next", {})[0] == 204


def test_an_admin_gives_names_within_its_organization_alone(world: World) -> None:
    """Also names that other organizations and operators use: it learns nothing of them."""
    assert world.up.token is not None
    world.agent(ACME, "owned")
    admin = world.tokens.create("admin", OTHER).token
    names = ["owned", "nobody"]
    for name in names:
        body = {"role": "agent", "agent": name, "may_claim": names, "may_send_to": names}
        status, answer = world.call(admin, "/tokens", body)
        assert (status, "warning" in answer) == (201, False)
        world.call(world.up.token, "/queue/enqueue", {"agent": "@acme:owned", "payload": 1})
        assert world.call(answer["token"], "/queue/next", {"agent": "owned"})[0] == 204


def test_two_organizations_give_messages_the_same_id(world: World) -> None:
    """Each sees and cancels its own one under the id that it gave, and cannot tell whether others use it."""
    assert world.up.token is not None
    given, other = "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b11", "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b12"
    path = f"/engine/messages/{given}"
    for org, token in ((ACME, world.acme), (OTHER, world.other)):
        message = {"type": "tool_call", "payload": {"of": org}, "message_id": given, "delay_s": 600}
        assert world.call(token, path)[0] == 404
        assert world.call(token, "/engine/messages", message)[1]["message_id"] == given
        assert world.call(token, "/engine/messages", message)[1] == {"message_id": given, "duplicate": True}
        child = {**message, "message_id": other, "parent_message_id": given}
        assert world.call(token, "/engine/messages", {"messages": [child]})[1] == {"message_ids": [other]}
        shown = world.call(token, path)[1]
        assert (shown["message_id"], shown["message"]["message_id"]) == (given, given)
        assert (shown["message"]["payload"], "@" in json.dumps(shown["history"])) == ({"of": org}, False)
        shown = world.call(token, f"/engine/messages/{other}")[1]
        assert shown["message"]["parent_message_id"] == given
        found = world.call(token, "/engine/messages?text=of")[1]["messages"]
        assert {given, other} <= {line["message_id"] for line in found}
        assert world.call(token, path + "/explain")[0] == 200
        for page in (
            "/page/messages",
            f"/page/messages?text={given}",
            f"/page{path.removeprefix('/engine')}",
        ):
            shown = json.dumps(world.call(token, page)[1])
            assert (given in shown, "@" in shown) == (True, False), page
        seen = given if org == ACME else f"@other:{given}"  # the first one has the plain id
        stored = world.call(world.up.token, f"/engine/messages/{seen}")[1]
        assert (stored["message_id"], stored["message"]["payload"]) == (seen, {"of": org})
    assert world.call(world.other, path + "/cancel", {})[1] == {"message_id": given}
    assert world.call(world.other, path)[1]["state"] == "CANCELLED"
    assert world.call(world.acme, path)[1]["state"] == "SCHEDULED"
    assert world.call(world.acme, f"/engine/messages/@other:{given}")[0] == 404


def test_operators_without_a_name_do_not_share_one(world: World) -> None:
    tokens = [world.tokens.create("operator", org).token for org in (ACME, OTHER)]
    for token in tokens:
        assert world.call(token, "/queue/status") == (200, {"agents": {}, "totals": {}})


def test_no_agent_has_the_id_of_a_token_as_its_name(world: World) -> None:
    """Tasks knows an operator without a name by the id of its token."""
    made, admin = world.tokens.create("operator", ACME), world.tokens.create("admin", OTHER)
    status, answer = world.call(admin.token, "/tokens", {"role": "agent", "agent": made.token_id})
    assert (status, "is the id of a token" in answer["message"]) == (400, True)


def test_no_token_is_that_of_the_queue_of_the_harness(world: World) -> None:
    with pytest.raises(InvalidMessage, match="the queue of the harness"):
        world.agent(ACME, DECISIONS)


def test_an_organization_neither_makes_nor_settles_decisions(world: World) -> None:
    """It could end its tasks without the harness. So could one that owned the name in an earlier version."""
    allowed = Permissions(may_send_to=(DECISIONS,), may_claim=(DECISIONS,))
    token = world.tokens.create("agent", ACME, "eve", permissions=allowed).token
    with Tasks.open(f"sqlite:///{world.data}/queue.db") as tasks:
        tasks.enqueue(agent=scoped(ACME, "eve"), payload=1)
        [task] = tasks.claim(agent=scoped(ACME, "eve"))
        tasks.complete(task.task_id, task.lease, "result")
        decision_id = tasks.open_decision(task.task_id)
    [line] = world.call(token, "/tasks?agent=eve")[1]["tasks"]
    history = world.call(token, f"/tasks/{line['task_id']}")[1]["history"]
    [shown] = [event["detail"]["decision"] for event in history if event["kind"] == "execution_started"]
    assert int(shown.rsplit("-", 1)[1]) >= COVERED
    assert world.call(world.up.token or "", f"/tasks/{shown}")[1]["task_id"] == decision_id
    for path, body in (("enqueue", {"payload": 1}), ("next", {})):
        status, answer = world.call(token, f"/queue/{path}", {"agent": DECISIONS, **body})
        assert (status, "only the harness" in answer["message"]) == (400, True)
    assert world.up.token is not None
    own = {"agent": scoped(ACME, DECISIONS)}
    status, decision = world.call(world.up.token, "/queue/next", own)
    assert (status, decision["payload"]) == (200, "result")
    end = {"task_id": decision["task_id"], "lease": decision["lease"], "decision": None, **own}
    assert world.call(world.up.token, "/queue/complete", end)[0] == 202
    with Tasks.open(f"sqlite:///{world.data}/queue.db") as tasks:
        assert tasks.get(task.task_id).status == "done"


# ---- buses -----------------------------------------------------------------------------------------

NEWS = {"type": "INFO", "project_id": "demo", "body": "of acme"}


def test_a_bus_belongs_to_the_organization_that_created_it(world: World) -> None:
    """To others it does not exist, and they may have one of the same name."""
    path = "/bus/acme-news/messages"
    assert world.call(world.acme, path, NEWS)[0] == 201
    for token in (world.other, world.tokens.create("operator", OTHER).token):
        for read in (path, "/page/buses/acme-news"):
            assert world.call(token, read) == (200, {"messages": []})
        assert "acme-news" not in world.call(token, "/page/buses")[1]["buses"]
    colleague = world.agent(ACME, "colleague")
    assert "acme-news" in world.call(colleague, "/page/buses")[1]["buses"]
    assert world.call(colleague, path, NEWS)[0] == 201
    assert len(world.call(world.up.token or "", path)[1]["messages"]) == 2
    assert world.call(world.other, path, NEWS)[0] == 201
    assert len(world.call(world.other, path)[1]["messages"]) == 1


def test_a_bus_of_an_operator_is_shared_by_all_organizations(world: World) -> None:
    path = "/bus/for-all/messages"
    for token in (world.up.token or "", world.acme, world.other):
        assert world.call(token, path, NEWS)[0] == 201
        assert world.call(token, path)[0] == 200


def test_a_stream_of_a_name_has_nothing_of_another_organizations_bus(world: World) -> None:
    request = urllib.request.Request(  # noqa: S310 - our own server
        world.up.http + "/bus/not-yet/messages",
        headers={"authorization": f"Bearer {world.other}", "accept": "text/event-stream"},
    )
    with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as stream:  # noqa: S310
        assert stream.readline() == b": ready\n"
        assert world.call(world.acme, "/bus/not-yet/messages", NEWS)[0] == 201
        assert world.call(world.other, "/bus/not-yet/messages", {**NEWS, "body": "of other"})[0] == 201
        lines = iter(stream.readline, b"")
        assert b"of other" in next(line for line in lines if line.startswith(b"data:"))


# ---- what the tasks of an organization take up -----------------------------------------------------


def test_an_agent_of_a_plain_name_adds_to_the_share_of_its_organization(world: World) -> None:
    token = Agents(world.data).add("pia", may_send_to=["pia"], org="plain")
    with Tasks.open(f"sqlite:///{world.data}/queue.db") as tasks:
        tasks.enqueue(agent="pia", payload="of before")
        assert world.call(token, "/queue/enqueue", {"agent": "pia", "payload": 1})[0] == 201
        used = tasks.store.read(lambda transaction: stored_tasks(transaction, "plain"))
        assert used == StoredTasks(2, queues=1)


def test_organization_at_its_share_of_tasks_does_not_affect_others(world: World) -> None:
    def note(tasks: int) -> None:
        value = msgspec.json.encode(StoredTasks(tasks))
        with Tasks.open(f"sqlite:///{world.data}/queue.db") as opened:
            opened.store.write(lambda transaction: transaction.cells.put(STORED, "full", value))

    allowed = Permissions(may_send_to=("sue",))
    sue, other = (
        world.tokens.create("agent", org, "sue", permissions=allowed).token for org in ("full", "roomy")
    )
    new = {"agent": "sue", "payload": 1}
    assert world.call(sue, "/queue/enqueue", new)[0] == 201
    note(STORED_TASKS_MAX)
    status, refusal = world.call(sue, "/queue/enqueue", new)
    assert (status, refusal["error"]) == (429, "Overloaded")
    assert refusal["message"].startswith("organization full stores 5,000,000 of at most 5,000,000 tasks;")
    assert world.call(other, "/queue/enqueue", new)[0] == 201
    status, task = world.call(sue, "/queue/next", {"agent": "sue"})
    assert status == 200
    body = {"task_id": task["task_id"], "lease": task["lease"], "decision": {}}
    assert world.call(sue, "/queue/complete", body)[0] == 202
    note(STORED_TASKS_MAX - 1)
    assert world.call(sue, "/queue/enqueue", new)[0] == 201
