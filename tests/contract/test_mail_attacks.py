"""The mail server under hostile clients: exceptions, registry, quotas, full disks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.core import mq9
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

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
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
