"""The mail server under hostile clients: exceptions, registry, quotas, full disks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.contracts.mail import agents
from postroom.contracts.mail.shelves import RECORD_BYTES
from postroom.core import mq9
from postroom.core.mailbox import GROUP_COST_BYTES, MAILBOX_COST_BYTES, MESSAGE_COST_BYTES, cost_of
from tests.mailrooms import MSG, FakeLink, Rooms

LIST = "$mq9.AI.MAILBOX.LIST."
AGENT = "$mq9.AI.AGENT."
NEWEST = "$mq9.AI.MSG."
DEEP = b"[" * 5_000 + b"]" * 5_000


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    Rooms.close_all()


@pytest.fixture
def rooms(tmp_path: Path) -> Rooms:
    return Rooms(tmp_path / "mail")


# ---- exceptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [b"%b", b'{"payload":%b}', b'{"x":%b}'])
@pytest.mark.parametrize("verb", [LIST, f"{NEWEST}FETCH.", f"{NEWEST}QUERY.", f"{NEWEST}ACK."])
def test_a_nested_body_costs_no_other_client_its_answer(rooms: Rooms, verb: str, nested: bytes) -> None:
    good, bad = FakeLink(), FakeLink()
    mail_id = rooms.create(good, ttl=60)
    for number in range(20):
        rooms.room.published(good, f"{MSG}{mail_id}.critical", f"_INBOX.good.{number}", b"", b"x")
        rooms.room.published(bad, f"{verb}{mail_id}", f"_INBOX.bad.{number}", b"", nested % DEEP)
    rooms.settle()
    answers = {reply: json.loads(payload) for reply, payload in good.answers + bad.answers}
    assert all("msg_id" in answers[f"_INBOX.good.{number}"] for number in range(20))
    assert all(answers[f"_INBOX.bad.{number}"]["code"] == 400 for number in range(20))


@pytest.mark.parametrize("verb", ["REGISTER", "REPORT", "UNREGISTER", "DISCOVER"])
def test_a_nested_card_is_refused(rooms: Rooms, verb: str) -> None:
    body = b'{"name":"a","x":%b}' % DEEP
    assert rooms.request(FakeLink(), AGENT + verb, body)["code"] == 400


def test_brackets_in_strings_are_not_depth(rooms: Rooms) -> None:
    body = json.dumps({"name": "a", "text": '["' * 1_000}).encode()
    assert rooms.request(FakeLink(), f"{AGENT}REGISTER", body)["error"] == ""
    deepest = b'{"name":"b","x":%b%b}' % (b"[" * (mq9.JSON_DEPTH_MAX - 1), b"]" * (mq9.JSON_DEPTH_MAX - 1))
    assert rooms.request(FakeLink(), f"{AGENT}REGISTER", deepest)["error"] == ""
    assert rooms.request(FakeLink(), f"{AGENT}REGISTER", deepest.replace(b"[]", b"[[]]"))["code"] == 400


def test_a_body_that_is_too_long_is_refused(rooms: Rooms) -> None:
    body = json.dumps({"ttl": 60, "x": "x" * mq9.JSON_BYTES_MAX}).encode()
    assert rooms.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE", body)["code"] == 400


class BrokenLink(FakeLink):
    """A connection whose answers raise."""

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:  # noqa: ARG002
        raise ValueError(reply)


@pytest.mark.parametrize("storage", ["os", "group"])
def test_a_callback_that_raises_does_not_end_the_turn_of_others(tmp_path: Path, storage: str) -> None:
    rooms = Rooms(tmp_path, critical=storage)
    good, broken = FakeLink(), BrokenLink()
    mail_id = rooms.create(good, ttl=60)
    for number in range(10):
        for link in (broken, good):
            rooms.room.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.{number}", b"", b"x")
    rooms.settle()
    assert len([reply for reply, _ in good.answers if reply.count(".") == 1]) >= 10
    assert rooms.room.stats()["messages"] == 20


def test_a_waiting_fetch_that_raises_does_not_keep_others_waiting(rooms: Rooms) -> None:
    good, broken = FakeLink(), BrokenLink()
    mail_id = rooms.create(good, ttl=60)
    wait = json.dumps({"deliver": "earliest", "config": {"max_wait_ms": 60_000}}).encode()
    for link in (broken, good):
        rooms.room.published(link, f"{NEWEST}FETCH.{mail_id}", "_INBOX.fetch", b"", wait)
    rooms.publish(good, f"{MSG}{mail_id}", b"x")
    found: Any = rooms.answer_of(good, "_INBOX.fetch")
    assert len(found["messages"]) == 1


# ---- the registry ------------------------------------------------------------------------------


def agent(rooms: Rooms, link: FakeLink, verb: str, **body: Any) -> Any:
    return rooms.request(link, AGENT + verb, json.dumps(body).encode())


def test_a_name_that_another_client_holds_cannot_be_taken_changed_or_removed(rooms: Rooms) -> None:
    holder, thief = FakeLink(), FakeLink()
    assert agent(rooms, holder, "REGISTER", name="ada", mailbox="ada.in", text="mine")["error"] == ""
    for verb in ("REGISTER", "REPORT", "UNREGISTER"):
        assert agent(rooms, thief, verb, name="ada", text="theirs")["code"] == 409
        assert agent(rooms, thief, verb, name="ada", **{"secret": "guess"})["code"] == 409
    assert agent(rooms, thief, "UNREGISTER", mailbox="ada.in")["code"] == 409
    assert agent(rooms, thief, "REGISTER", name="eve", mailbox="ada.in")["error"] == ""
    assert agent(rooms, thief, "REGISTER", name="ada.in")["error"] == ""
    [card] = agent(rooms, thief, "DISCOVER", text="mine")["agents"]
    assert card["name"] == "ada"
    assert agent(rooms, holder, "REPORT", mailbox="ada.in", report_info="here") == {"error": ""}
    assert agent(rooms, holder, "UNREGISTER", mailbox="ada.in") == {"error": ""}
    assert agent(rooms, thief, "REGISTER", name="ada", text="theirs")["error"] == ""


def test_the_secret_of_a_name_works_on_every_connection_and_stands_in_no_card(rooms: Rooms) -> None:
    holder, other = FakeLink(), FakeLink(address="192.0.2.2")
    secret = agent(rooms, holder, "REGISTER", name="ada")["secret"]
    assert agent(rooms, other, "REPORT", name="ada", secret=secret, report_info="x") == {"error": ""}
    assert agent(rooms, other, "REGISTER", name="ada", secret=secret, text="again")["secret"] == secret
    rooms.reopen()
    assert secret not in json.dumps(agent(rooms, holder, "DISCOVER"))
    assert agent(rooms, FakeLink(address="192.0.2.3"), "UNREGISTER", name="ada")["code"] == 409
    assert agent(rooms, holder, "UNREGISTER", name="ada", secret=secret) == {"error": ""}


def test_the_same_login_needs_no_secret(rooms: Rooms) -> None:
    agent(rooms, FakeLink(user="ada"), "REGISTER", name="a")
    assert agent(rooms, FakeLink(user="eve"), "UNREGISTER", name="a")["code"] == 409
    rooms.reopen()
    rooms.tick(10 * agents.HOLD_S)
    assert agent(rooms, FakeLink(user="ada"), "REGISTER", name="a")["error"] == ""
    assert agent(rooms, FakeLink(user="ada"), "UNREGISTER", name="a") == {"error": ""}


def test_a_name_goes_on_at_its_address_when_the_connection_ends_and_is_free_later(rooms: Rooms) -> None:
    first = FakeLink()
    agent(rooms, first, "REGISTER", name="ada")
    stranger = FakeLink(address="192.0.2.2")
    rooms.close_link(first)
    assert agent(rooms, stranger, "REGISTER", name="ada")["code"] == 409
    second = FakeLink()
    assert agent(rooms, second, "REGISTER", name="ada")["error"] == ""
    rooms.tick(2 * agents.HOLD_S)
    assert agent(rooms, stranger, "REGISTER", name="ada")["code"] == 409  # its connection is there
    rooms.close_link(second)
    assert agent(rooms, stranger, "REGISTER", name="ada")["error"] == ""


@pytest.mark.parametrize("verb", ["REGISTER", "REPORT"])
def test_a_card_has_one_limit_whatever_the_call(rooms: Rooms, verb: str) -> None:
    link = FakeLink()
    agent(rooms, link, "REGISTER", name="ada", text="kept")
    assert agent(rooms, link, verb, name="ada", report_info="x" * agents.CARD_BYTES_MAX)["code"] == 400
    [card] = agent(rooms, link, "DISCOVER")["agents"]
    assert (card["text"], card.get("report_info")) == ("kept", None)


def test_reports_count_against_the_limit_of_all_cards(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "CARDS_BYTES_MAX", 100_000)
    link = FakeLink()
    for name in ("a", "b"):
        agent(rooms, link, "REGISTER", name=name)
    answers = [agent(rooms, link, "REPORT", name=name, report_info="x" * 60_000) for name in ("a", "b")]
    assert [answer.get("code") for answer in answers] == [None, 429]
    rooms.reopen()
    assert agent(rooms, link, "REPORT", name="b", report_info="x" * 60_000)["code"] == 429
    assert agent(rooms, link, "UNREGISTER", name="a") == {"error": ""}
    assert agent(rooms, link, "REPORT", name="b", report_info="x" * 60_000) == {"error": ""}


def test_one_client_can_neither_register_all_agents_nor_use_up_their_memory(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = Rooms(rooms.folder and rooms.folder / "other", client_quota_agents=2)
    greedy, other = FakeLink(), FakeLink(address="192.0.2.2")
    assert [agent(rooms, greedy, "REGISTER", name=name).get("code") for name in "abc"] == [None, None, 429]
    assert agent(rooms, FakeLink(), "REGISTER", name="c")["code"] == 429  # reconnecting helps nobody
    rooms.reopen()
    assert agent(rooms, greedy, "REGISTER", name="c")["code"] == 429
    assert agent(rooms, other, "REGISTER", name="c")["error"] == ""
    assert agent(rooms, greedy, "UNREGISTER", name="a") == {"error": ""}
    monkeypatch.setattr(agents, "CLIENT_CARDS_BYTES_MAX", 5_000)
    assert agent(rooms, greedy, "REGISTER", name="d", text="x" * 5_000)["code"] == 429
    assert agent(rooms, greedy, "REGISTER", name="d")["error"] == ""


def test_cards_are_part_of_what_lives_in_the_log(rooms: Rooms) -> None:
    link = FakeLink()
    shelves = rooms.room._shelves
    before = shelves._durable_bytes
    agent(rooms, link, "REGISTER", name="ada", text="x" * 10_000)
    agent(rooms, link, "REPORT", name="ada", report_info="x" * 10_000)
    size = len(shelves.agents["ada"].card)
    assert shelves._durable_bytes == before + size + RECORD_BYTES
    rooms.reopen()
    assert rooms.room._shelves._durable_bytes == before + size + RECORD_BYTES
    agent(rooms, link, "UNREGISTER", name="ada")
    assert rooms.room._shelves._durable_bytes == before


# ---- quotas ------------------------------------------------------------------------------------


def test_empty_messages_cost_memory_too(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, stored_bytes_max=MAILBOX_COST_BYTES + 10 * MESSAGE_COST_BYTES)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.room.published_many(link, f"{MSG}{mail_id}", [b""] * 8)
    rooms.room.published_many(link, f"{MSG}{mail_id}", [b""] * 8)  # of these two fit
    assert rooms.room.stats()["messages"] == 10


@pytest.mark.parametrize("word", ["critical", "normal"])
def test_one_client_cannot_use_up_the_server_for_another(tmp_path: Path, word: str) -> None:
    quota = MAILBOX_COST_BYTES + 5 * cost_of(1)
    rooms = Rooms(tmp_path, client_quota_bytes=quota, normal="group")
    greedy, other = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = rooms.create(greedy, ttl=60)
    subject = f"{MSG}{mail_id}.{word}"
    rooms.room.published_many(greedy, subject, [b"x"] * 4)
    rooms.settle()
    numbers = [rooms.send(greedy, mail_id, b"x", word)]
    for link in (greedy, FakeLink()):  # reconnecting helps nobody
        assert rooms.request(link, subject, b"x")["code"] == 429
        assert rooms.request(link, "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    assert rooms.send(other, mail_id, b"x", word)
    rooms.reopen()
    assert rooms.request(FakeLink(), subject, b"x")["code"] == 429
    assert rooms.request(FakeLink(), f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{numbers[0]}") == {"deleted": True}
    rooms.send(FakeLink(), mail_id, b"x", word)
    rooms.tick(60)
    assert rooms.room.stats()["bytes"] == 0
    assert all(account.empty for account in rooms.room._shelves.accounts._accounts.values())


def test_mailboxes_of_one_client_are_bounded_and_given_back(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, client_quota_mailboxes=2)
    for _ in range(2):
        rooms.create(FakeLink(), ttl=60)
    assert rooms.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    rooms.create(FakeLink(user="ada"), ttl=60)
    rooms.reopen()
    assert rooms.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    rooms.tick(60)
    rooms.create(FakeLink(), ttl=60)


def test_pull_groups_count_against_who_made_the_mailbox(tmp_path: Path) -> None:
    quota = MAILBOX_COST_BYTES + 2 * GROUP_COST_BYTES
    rooms = Rooms(tmp_path, client_quota_bytes=quota)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)

    def codes(*names: str) -> list[int | None]:
        bodies = [json.dumps({"group_name": name, "config": {"max_wait_ms": 0}}).encode() for name in names]
        return [rooms.request(link, f"{NEWEST}FETCH.{mail_id}", body).get("code") for body in bodies]

    assert codes("a", "b", "c", "a") == [None, None, 429, None]
    rooms.reopen()
    assert codes("c", "a") == [429, None]
    rooms.tick(60)
    assert rooms.room.stats()["bytes"] == 0


def test_everything_that_leaves_a_mailbox_is_given_back_exactly(rooms: Rooms) -> None:
    link, other = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = rooms.create(link, ttl=60)
    start = rooms.room.stats()
    send = f"{NEWEST}SEND.{mail_id}"
    for number, who in enumerate((link, other)):
        for word in ("urgent", "normal"):
            keyed = f"NATS/1.0\r\nmq9-key: k{word}\r\nmq9-tags: a,b\r\nmq9-priority: {word}\r\n\r\n".encode()
            rooms.request(who, send, b"replaced %d" % number, keyed)
            lived = f"NATS/1.0\r\nmq9-ttl: 5\r\nmq9-delay: 2\r\nmq9-priority: {word}\r\n\r\n".encode()
            rooms.request(who, send, b"short", lived)
        rooms.room.published_many(who, f"{MSG}{mail_id}.critical", [b"1", b"22", b"333"])
        rooms.settle()
    rooms.tick(3)
    assert rooms.room.stats()["messages"] == 2 + 4 + 6
    rooms.tick(3)  # the short ones are over
    box = rooms.room._shelves.boxes[mail_id]
    assert box.bytes == sum(letter.cost for letter in box.letters.values())
    for number in list(box.letters):
        rooms.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{number}")
    assert (box.bytes, box.reserved, box.reserved_bytes) == (0, 0, 0)
    assert rooms.room.stats() | {"clients": 0} == start | {"clients": 0}
    assert rooms.room._shelves.accounts.of(other.client).empty
    assert rooms.room._shelves._durable_bytes == 0
