"""Mailboxes and agents of several organizations: to each client, those of the others do not exist."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.contracts.mail.options import MailLimits
from postroom.contracts.mail.requests import REFUSAL_EVENTS_ALL_MAX, REFUSAL_EVENTS_MAX
from postroom.core.mail.mailbox import Mailbox
from postroom.logs.mail_log import SegmentLog
from postroom.logs.mail_records import AgentRecord, Opened, Put, Record
from postroom.server.access.registry import Identity
from postroom.server.access.tokens import Permissions
from postroom.system.crypto.key_file import add_key
from tests.mailservice import CREATE, MSG, FakeLink, Harness

API = "$mq9.AI."
LIST = f"{API}MAILBOX.LIST."
DELETE = f"{API}MAILBOX.DELETE."
PUBLIC_LIST = f"{API}PUBLIC.LIST"


class World:
    """A service, and a client of each kind."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.harness = Harness(folder, **options)
        self.acme = FakeLink(user="acme/ada", org="acme")
        self.friend = FakeLink(user="acme/amy", org="acme")
        self.other = FakeLink(user="other/bob", org="other")
        self.operator = FakeLink(user="root")
        self.nobody = FakeLink(user="loner", sees_all=False)
        """An agent of no organization."""

    def ask(self, link: FakeLink, subject: str, **body: Any) -> Any:
        return self.harness.request(link, API + subject, json.dumps(body).encode())

    def listed(self, link: FakeLink) -> set[str]:
        """The public mailboxes that a new subscription gets."""
        link.take()
        assert self.harness.service.subscribed(link, "p", PUBLIC_LIST, "") is None
        self.harness.settle()
        self.harness.service.unsubscribed(link, "p")
        return {json.loads(entry)["mail_id"] for entry in link.take()}

    def agents(self, link: FakeLink, **search: Any) -> list[str]:
        return [card["text"] for card in self.ask(link, "AGENT.DISCOVER", **search)["agents"]]

    def boxes(self) -> list[Mailbox]:
        return [*self.harness.service._mailboxes.by_key.values()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path / "mail")
    Harness.close_all()


# ---- names -----------------------------------------------------------------------------------------


def test_each_organization_has_mailboxes_of_its_own_under_the_same_name(world: World) -> None:
    harness = world.harness
    for link, body in ((world.acme, b"of acme"), (world.other, b"of other")):
        reply = world.ask(link, "MAILBOX.CREATE", name="tasks", public=True)
        assert reply == {"mail_id": "tasks", "mail_address": "tasks", "is_new": True}
        harness.send(link, "tasks", body)
    for _ in range(2):
        for link, text in ((world.acme, "of acme"), (world.friend, "of acme"), (world.other, "of other")):
            assert [each["payload"] for each in harness.request(link, f"{LIST}tasks")["messages"]] == [text]
        assert harness.request(world.operator, f"{LIST}tasks")["code"] == 409
        harness.reopen()


def test_global_client_resolves_a_shared_mailbox_before_the_only_owned_one(
    world: World,
) -> None:
    harness = world.harness
    harness.create(world.acme, name="help", public=True)
    harness.send(world.operator, "help", b"to acme")
    assert world.ask(world.operator, "MAILBOX.CREATE", name="help", public=True)["is_new"]
    harness.send(world.operator, "help", b"to all")
    texts = {
        link.user: [each["payload"] for each in harness.request(link, f"{LIST}help")["messages"]]
        for link in (world.acme, world.other, world.operator)
    }
    assert texts == {"acme/ada": ["to acme"], "other/bob": ["to all"], "root": ["to all"]}


def test_a_mailbox_without_an_organization_is_shared_by_all(world: World) -> None:
    harness = world.harness
    harness.create(world.operator, name="help", public=True)
    for link in (world.acme, world.other, world.nobody):
        assert not world.ask(link, "MAILBOX.CREATE", name="help", public=True)["is_new"]
        harness.send(link, "help", b"a question")
        assert "help" in world.listed(link)
    assert len(harness.request(world.acme, f"{LIST}help")["messages"]) == 3


def test_an_agent_of_no_organization_sees_no_mailbox_of_one(world: World) -> None:
    mail_id = world.harness.create(world.acme)
    assert world.harness.request(world.nobody, LIST + mail_id)["code"] == 404
    assert "messages" in world.harness.request(world.operator, LIST + mail_id)


def test_nothing_tells_a_foreign_mailbox_from_none(world: World) -> None:
    harness, foreign = world.harness, []
    private = harness.create(world.acme, ttl=10)
    harness.create(world.acme, ttl=10, name="secret.plan", public=True)
    gone = harness.create(world.acme, ttl=1)
    number = harness.send(world.acme, private, b"hello")
    harness.tick(2)
    assert harness.request(world.acme, LIST + gone)["code"] == 410
    for mail_id in (private, "secret.plan", gone, "never.was"):
        answers = [
            harness.request(world.other, f"{API}{call}", body)
            for call, body in (
                (f"MAILBOX.LIST.{mail_id}", b""),
                (f"MAILBOX.MSG.{mail_id}", b"x"),
                (f"MSG.SEND.{mail_id}", b"x"),
                (f"MSG.FETCH.{mail_id}", b'{"group_name":"g"}'),
                (f"MSG.FETCH.{mail_id}", b"{}"),
                (f"MSG.ACK.{mail_id}", b'{"group_name":"g","msg_id":%d}' % number),
                (f"MSG.QUERY.{mail_id}", b"{}"),
                (f"MAILBOX.DELETE.{mail_id}.{number}", b""),
                (f"MSG.DELETE.{mail_id}.{number}", b""),
            )
        ]
        refusals = [harness.subscribe(world.other, f"{mail_id}.*", group) for group in ("", "g")]
        foreign.append((answers, refusals))
    assert all(each == foreign[-1] for each in foreign)
    assert {answer["code"] for answer in foreign[-1][0]} == {404}
    for name in (private, "secret.plan", "never.was"):
        assert world.ask(world.other, "MAILBOX.CREATE", name=name, public=True)["is_new"]
    rejected = [fields for kind, fields in harness.events if kind == "rejected"]
    assert {fields["org_id"] for fields in rejected if fields["sender"] == "other/bob"} == {"other"}


def test_dead_letters_stay_in_the_organization(tmp_path: Path) -> None:
    world = World(tmp_path / "mail", dead_letter_after=1)
    harness = world.harness
    harness.create(world.acme, name="work", public=True)
    harness.create(world.other, name="work.dead", public=True)
    harness.send(world.acme, "work", b"poison")
    assert harness.subscribe(world.friend, "work.*", group="g") is None
    harness.close_link(world.friend)
    dead = {each.org: len(each.letters) for each in world.boxes() if each.mail_id == "work.dead"}
    assert dead == {"acme": 1, "other": 0}
    Harness.close_all()


# ---- the share of one organization -----------------------------------------------------------------


def test_one_organization_stores_at_most_half_of_the_bytes(tmp_path: Path) -> None:
    world = World(tmp_path / "mail", stored_bytes_max=40_000)
    harness = world.harness
    of_acme, of_other = harness.create(world.acme), harness.create(world.other)
    while "error" not in (reply := harness.request(world.acme, f"{MSG}{of_acme}", b"x" * 900)):
        pass
    said = "the organization 'acme' may have 20000 bytes, which is its share"
    for _ in range(2):
        assert reply == {"error": said, "code": 429}
        reply = harness.request(world.friend, f"{MSG}{of_acme}", b"x" * 900)
        harness.reopen()
    assert world.ask(world.friend, "MAILBOX.CREATE", desc="x" * 900)["error"] == said
    harness.send(world.other, of_other, b"x" * 9_000)
    number = harness.request(world.acme, f"{LIST}{of_acme}")["messages"][0]["msg_id"]
    assert harness.request(world.acme, f"{DELETE}{of_acme}.{number}") == {"deleted": True}
    harness.send(world.friend, of_acme, b"x" * 900)
    Harness.close_all()


def test_one_organization_makes_half_of_the_mailboxes(tmp_path: Path) -> None:
    world = World(tmp_path / "mail", mailboxes_max=8)
    for number in range(4):
        world.harness.create((world.acme, world.friend)[number % 2], name=f"box.{number}", public=True)
    refused = world.ask(world.friend, "MAILBOX.CREATE", name="box.4", public=True)
    said = "the organization 'acme' may have 4 mailboxes, which is its share"
    assert refused == {"error": said, "code": 429}
    for link in (world.other, world.operator, world.nobody):
        world.harness.create(link, name=f"box.{link.user.partition('/')[0]}", public=True)
    Harness.close_all()


def test_one_organization_has_a_limit_of_messages(world: World) -> None:
    world.harness.limit(messages_an_organization_max=3)
    harness = world.harness
    mail_id = harness.create(world.operator, name="for.all", public=True)
    for link in (world.acme, world.friend, world.acme):
        harness.send(link, mail_id, b"x")
    assert harness.request(world.friend, f"{MSG}{mail_id}", b"x") == {
        "error": "the organization 'acme' may have 3 messages, which is its share",
        "code": 429,
    }
    for link in (world.other, world.operator, world.nobody):
        harness.send(link, mail_id, b"x")


def test_one_organization_registers_half_of_the_agents(world: World) -> None:
    world.harness.limit(agents_max=4)
    for name, link in (("ann", world.acme), ("amy", world.friend)):
        assert not world.ask(link, "AGENT.REGISTER", name=name)["error"]
    assert not world.ask(world.acme, "AGENT.REGISTER", name="ann", text="new")["error"]
    said = "the organization 'acme' may have 2 agents, which is its share"
    assert world.ask(world.acme, "AGENT.REGISTER", name="bo") == {"error": said, "code": 429}
    assert not world.ask(world.other, "AGENT.REGISTER", name="bo")["error"]


def test_one_organization_has_at_most_its_share_of_the_waiting_fetches(tmp_path: Path) -> None:
    world = World(tmp_path / "mail", limits=MailLimits(client_waits_max=4))
    mail_id = world.harness.create(world.operator, name="for.all", public=True)

    def wait(link: FakeLink) -> Any:
        return world.ask(link, f"MSG.FETCH.{mail_id}", config={"max_wait_ms": 60_000})

    assert [wait(link) for link in (world.acme, world.friend) * 2] == [None] * 4
    assert wait(world.friend)["messages"] == []
    assert [wait(link) for link in (world.other, world.nobody, world.operator)] == [None] * 3
    world.harness.close_link(world.acme)
    assert wait(world.friend) is None
    Harness.close_all()


def test_the_groups_of_one_organization_hold_a_limited_number_of_messages(world: World) -> None:
    world.harness.limit(organization_remembered_max=30)
    harness = world.harness
    mail_id = harness.create(world.operator, name="for.all", public=True)
    for _ in range(50):
        harness.send(world.operator, mail_id, b"x")

    def fetched(link: FakeLink, group: str) -> Any:
        return world.ask(
            link,
            f"MSG.FETCH.{mail_id}",
            group_name=group,
            deliver="earliest",
            config={"num_msgs": 20},
        )

    assert len(fetched(world.acme, "a")["messages"]) == 20
    assert len(fetched(world.friend, "f")["messages"]) == 10
    said = "the groups of this organization hold 30 messages, which is the limit: acknowledge them first"
    refused = fetched(world.friend, "f")
    assert (refused["error"], refused["code"]) == (said, 429)
    for link in (world.other, world.nobody, world.operator):
        assert len(fetched(link, link.user)["messages"]) == 20
    harness.close_link(world.acme)
    assert len(fetched(world.friend, "f")["messages"]) == 20


def test_the_refusals_of_one_organization_hide_none_of_another(world: World) -> None:
    links = [FakeLink(user=f"acme/{number}", org="acme") for number in range(8)]
    for link in links:
        for _ in range(REFUSAL_EVENTS_MAX):
            world.ask(link, "MAILBOX.LIST.absent")
    for _ in range(REFUSAL_EVENTS_MAX):
        world.ask(world.other, "MAILBOX.LIST.absent")
    refused = [facts["org_id"] for kind, facts in world.harness.events if kind == "rejected"]
    assert refused.count("acme") == REFUSAL_EVENTS_ALL_MAX / 2
    assert refused.count("other") == REFUSAL_EVENTS_MAX


# ---- deliveries ------------------------------------------------------------------------------------


def test_a_push_reaches_the_subscribers_of_the_organization_alone(world: World) -> None:
    harness = world.harness
    for link in (world.acme, world.other):
        harness.create(link, name="tasks", public=True)
    for link in (world.friend, world.other):
        assert harness.subscribe(link, "tasks.*", group="g", sid="2") is None
        assert harness.subscribe(link, "tasks.*") is None
    harness.send(world.acme, "tasks", b"of acme")
    assert world.friend.take() == [b"of acme"] * 2
    assert world.other.take() == []


def test_a_subscription_outlives_its_mailbox_in_its_organization_alone(world: World) -> None:
    harness = world.harness
    harness.create(world.acme, ttl=1, name="tasks", public=True)
    assert harness.subscribe(world.friend, "tasks.*") is None
    harness.tick(2)
    harness.create(world.other, name="tasks", public=True)
    harness.send(world.other, "tasks", b"of other")
    assert world.friend.take() == []
    harness.create(world.acme, name="tasks", public=True)
    harness.send(world.acme, "tasks", b"of acme")
    assert world.friend.take() == [b"of acme"]


def test_the_public_list_has_the_visible_mailboxes_and_their_changes(world: World) -> None:
    harness = world.harness
    harness.create(world.operator, name="for.all", public=True)
    harness.create(world.acme, ttl=5, name="of.acme", public=True)
    assert world.listed(world.acme) == world.listed(world.operator) == {"for.all", "of.acme"}
    assert world.listed(world.other) == world.listed(world.nobody) == {"for.all"}
    links = (world.friend, world.other, world.operator)
    for link in links:
        harness.service.subscribed(link, "p", PUBLIC_LIST, "")
        harness.settle()
        link.take()
    harness.create(world.acme, name="new.one", public=True)
    harness.tick(6)
    events = [[json.loads(entry)["event"] for entry in link.take()] for link in links]
    assert events == [["created", "expired"], [], ["created", "expired"]]


# ---- permissions -----------------------------------------------------------------------------------


def ada_who_may_message(*names: str) -> Identity:
    return Identity("ada", "agent", org="acme", permissions=Permissions(only_message=names))


def test_only_message_token_sends_to_the_mailboxes_of_its_agents(world: World) -> None:
    harness = world.harness
    of_amy, of_ada = harness.create(world.friend), harness.create(world.acme)
    harness.create(world.operator, name="help", public=True)
    world.acme.identity = ada_who_may_message("ada")
    for mail_id in (of_amy, "help"):
        for send in (f"{MSG}{mail_id}", f"{API}MSG.SEND.{mail_id}"):
            assert harness.request(world.acme, send, b"x")["code"] == 403
        harness.publish(world.acme, f"{MSG}{mail_id}", b"x")
        assert harness.request(world.acme, LIST + mail_id)["messages"] == []
    harness.send(world.acme, of_ada, b"a note")
    world.acme.identity = ada_who_may_message("amy")
    harness.send(world.acme, of_amy, b"hello")


def test_a_token_deletes_no_message_where_it_may_not_send(world: World) -> None:
    harness = world.harness
    harness.create(world.operator, name="help", public=True)
    numbers = {box: harness.send(world.friend, box, b"x") for box in (harness.create(world.friend), "help")}
    world.acme.identity = ada_who_may_message("ada")
    for mail_id, number in numbers.items():
        for delete in (f"{DELETE}{mail_id}.{number}", f"{API}MSG.DELETE.{mail_id}.{number}"):
            assert harness.request(world.acme, delete)["code"] == 403
            assert harness.request(world.acme, f"{delete}9")["code"] == 403  # the same without such a message
        assert len(harness.request(world.friend, LIST + mail_id)["messages"]) == 1
    own = harness.create(world.acme)
    number = harness.send(world.acme, own, b"a note")
    assert harness.request(world.acme, f"{DELETE}{own}.{number}")["deleted"]


# ---- agents ----------------------------------------------------------------------------------------


def test_agents_are_found_in_their_organization_alone(world: World) -> None:
    for _ in range(2):
        for link, text in ((world.acme, "of acme"), (world.other, "of other"), (world.operator, "of all")):
            name = "helper" if link is world.operator else "coder"
            assert (
                world.ask(link, "AGENT.REGISTER", name=name, mailbox=f"{name}.box", text=text)["error"] == ""
            )
        assert world.agents(world.friend) == ["of acme", "of all"]
        assert world.agents(world.other) == ["of other", "of all"]
        assert world.agents(world.nobody) == ["of all"]
        assert world.agents(world.operator) == ["of acme", "of other", "of all"]
        assert world.agents(world.friend, text="other") == []
        assert world.agents(world.friend, text="acme") == ["of acme"]
        world.harness.reopen()


def test_words_of_foreign_cards_do_not_change_a_search(world: World) -> None:
    world.ask(world.acme, "AGENT.REGISTER", name="a", text="plumbing")
    assert world.agents(world.acme, text="plumb") == ["plumbing"]
    world.ask(world.other, "AGENT.REGISTER", name="b", text="plumb")
    assert world.agents(world.acme, text="plumb") == ["plumbing"]


def test_foreign_cards_do_not_change_the_order_of_a_search(world: World) -> None:
    texts = ["rare", *["known common"] * 6, *["x"] * 3]
    for number, text in enumerate(texts):
        world.ask(world.acme, "AGENT.REGISTER", name=f"n{number}", text=text)
    before = world.agents(world.acme, text="rare common known")
    assert before == texts[:7]  # among many cards, two known words say more than a rare one
    for number in range(100):
        world.ask(world.other, "AGENT.REGISTER", name=f"n{number}", text=f"known rare word{number}")
    assert world.agents(world.acme, text="rare common known") == before
    assert world.agents(world.acme, text="word") == []


def test_calls_for_a_foreign_agent_are_those_for_an_unknown_one(world: World) -> None:
    secret = world.ask(world.acme, "AGENT.REGISTER", name="coder", mailbox="box", text="x")["secret"]
    for call in ("REPORT", "UNREGISTER"):
        for facts in ({"name": "coder"}, {"name": "coder", "secret": secret}, {"mailbox": "box"}):
            assert world.ask(world.other, f"AGENT.{call}", **facts)["code"] == 404
    assert world.ask(world.other, "AGENT.REGISTER", name="spy", mailbox="box", text="y")["error"] == ""


def test_shared_name_is_taken_until_it_expires_then_can_be_owned(world: World) -> None:
    world.ask(world.operator, "AGENT.REGISTER", name="helper", text="of all")
    assert world.ask(world.acme, "AGENT.REGISTER", name="helper", text="of acme")["code"] == 409
    world.harness.close_link(world.operator)
    world.harness.clock.advance(2 * 3_600)
    assert world.ask(world.acme, "AGENT.REGISTER", name="helper", text="of acme")["error"] == ""
    assert world.agents(world.friend) == ["of acme"]
    assert world.agents(world.other) == []
    world.harness.reopen()
    assert world.agents(world.friend) == ["of acme"]
    assert world.agents(world.other) == []


# ---- the log ---------------------------------------------------------------------------------------

OLD = (
    Opened(7, "task.queue", True, True, "", 0.0, 1, 0, "acme/ada", "user:acme/ada"),
    Put(7, 5, "normal", b"kept", b"", 1, client="user:acme/ada"),
    AgentRecord("helper", 3, b'{"name":"helper","text":"old"}', "user:acme/ada", b"", 1),
)


def without_last(record: Record) -> bytes:
    """A record as an earlier version wrote it, without the organization."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    return msgspec.msgpack.encode(fields[:-1] if fields[0] in (1, 7) else fields)


def test_log_of_an_earlier_version_is_kept_without_an_organization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Harness(tmp_path / "mail").service.close()
    with monkeypatch.context() as earlier:
        earlier.setattr("postroom.logs.mail_records._encode", without_last)
        harness = Harness(tmp_path / "mail")
        log = harness.service._mailboxes.journal.log
        assert isinstance(log, SegmentLog)
        for record in OLD:
            log.append(record)
        harness.settle()
        harness.service.close()
    world = World(tmp_path / "mail")
    for link in (world.acme, world.other, world.operator):
        [message] = world.harness.request(link, f"{LIST}task.queue")["messages"]
        assert message["payload"] == "kept"
        assert world.agents(link) == ["old"]
    assert {box.org for box in world.boxes()} == {""}
    Harness.close_all()


def test_an_earlier_version_reads_the_log_of_this_one() -> None:
    class OldOpened(msgspec.Struct, array_like=True, tag=1, frozen=True):
        serial: int
        mail_id: str

    new = Opened(7, "task.queue", True, True, "", 0.0, 1, 0, "acme/ada", "user:acme/ada", "acme")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=OldOpened) == OldOpened(7, "task.queue")


def test_the_organization_survives_compaction_and_encryption(tmp_path: Path) -> None:
    key = tmp_path / "postroom.keys"
    add_key(key, "first")
    for name, options in (("plain", {}), ("encrypted", {"key_file": key})):
        world = World(tmp_path / name, **options)
        harness = world.harness
        private = harness.create(world.acme)
        harness.send(world.acme, private, b"hello")
        world.ask(world.acme, "AGENT.REGISTER", name="coder", text="of acme")
        for _ in range(2):
            mailboxes = harness.service._mailboxes
            log = mailboxes.journal.log
            assert log is not None
            log.copy(mailboxes.journal.live_records(mailboxes.agents, mailboxes.by_key), 0.0)
            harness.settle()
            harness.reopen()
            assert len(harness.request(world.friend, LIST + private)["messages"]) == 1
            assert harness.request(world.other, LIST + private)["code"] == 404
            assert (world.agents(world.friend), world.agents(world.other)) == (["of acme"], [])
        assert (b"of acme" in read_segments(tmp_path / name)) == (name == "plain")
        Harness.close_all()


def read_segments(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("mail-*.log"))


def test_a_mailbox_of_an_organization_costs_more_and_gives_it_back(world: World) -> None:
    service = world.harness.service
    world.harness.create(world.operator, ttl=1)
    plain = service.stats()["bytes"]
    world.harness.create(world.acme, ttl=1)
    assert service.stats()["bytes"] - plain > plain
    world.harness.tick(2)
    assert service.stats()["bytes"] == 0
    assert service._mailboxes._of_orgs == {}
    assert world.harness.request(world.acme, CREATE, b"{}")["is_new"]
