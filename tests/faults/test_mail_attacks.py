"""The mail server under hostile clients: exceptions, registry, quotas, full disks."""

import base64
import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.contracts.mail import mailboxes
from postroom.contracts.mail.cards import card_index, card_registry
from postroom.contracts.mail.options import MailLimits
from postroom.contracts.mail.quotas import RECORD_BYTES
from postroom.contracts.mail.requests import (
    EVENT_TEXT_CHARS_MAX,
    REFUSAL_CLIENTS_MAX,
    REFUSAL_EVENTS_ALL_MAX,
    REFUSAL_EVENTS_MAX,
)
from postroom.core.mail import mq9
from postroom.core.mail.mailbox import GROUP_COST_BYTES, MAILBOX_COST_BYTES, MESSAGE_COST_BYTES, cost_of
from postroom.logs import mail_log
from postroom.logs.mail_log import SegmentLogLimits
from postroom.logs.mail_records import Record
from tests.mailservice import MSG, FakeLink, Harness

LIST = "$mq9.AI.MAILBOX.LIST."
DELETE = "$mq9.AI.MAILBOX.DELETE."
AGENT = "$mq9.AI.AGENT."
NEWEST = "$mq9.AI.MSG."
DEEP = b"[" * 5_000 + b"]" * 5_000


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    Harness.close_all()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "mail")


# ---- exceptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [b"%b", b'{"payload":%b}', b'{"x":%b}'])
@pytest.mark.parametrize("verb", [LIST, f"{NEWEST}FETCH.", f"{NEWEST}QUERY.", f"{NEWEST}ACK."])
def test_a_nested_body_does_not_stop_answers_to_other_clients(
    harness: Harness, verb: str, nested: bytes
) -> None:
    good, bad = FakeLink(), FakeLink()
    mail_id = harness.create(good, ttl=60)
    for number in range(20):
        harness.service.published(good, f"{MSG}{mail_id}.critical", f"_INBOX.good.{number}", 0, [b"x"])
        harness.service.published(bad, f"{verb}{mail_id}", f"_INBOX.bad.{number}", 0, [nested % DEEP])
    harness.settle()
    answers = {reply: json.loads(payload) for reply, payload in good.answers + bad.answers}
    assert all("msg_id" in answers[f"_INBOX.good.{number}"] for number in range(20))
    assert all(answers[f"_INBOX.bad.{number}"]["code"] == 400 for number in range(20))


@pytest.mark.parametrize("verb", ["REGISTER", "REPORT", "UNREGISTER", "DISCOVER"])
def test_a_nested_card_is_refused(harness: Harness, verb: str) -> None:
    body = b'{"name":"a","x":%b}' % DEEP
    assert harness.request(FakeLink(), AGENT + verb, body)["code"] == 400


def test_brackets_in_strings_are_not_depth(harness: Harness) -> None:
    body = json.dumps({"name": "a", "text": '["' * 1_000}).encode()
    assert harness.request(FakeLink(), f"{AGENT}REGISTER", body)["error"] == ""
    deepest = b'{"name":"b","x":%b%b}' % (b"[" * (mq9.JSON_DEPTH_MAX - 1), b"]" * (mq9.JSON_DEPTH_MAX - 1))
    assert harness.request(FakeLink(), f"{AGENT}REGISTER", deepest)["error"] == ""
    assert harness.request(FakeLink(), f"{AGENT}REGISTER", deepest.replace(b"[]", b"[[]]"))["code"] == 400


def test_a_body_that_is_too_long_is_refused(harness: Harness) -> None:
    body = json.dumps({"ttl": 60, "x": "x" * mq9.JSON_BYTES_MAX}).encode()
    assert harness.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE", body)["code"] == 400


class BrokenLink(FakeLink):
    """A connection whose answers raise."""

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:  # noqa: ARG002
        raise ValueError(reply)


@pytest.mark.parametrize("storage", ["os", "group"])
def test_a_callback_that_raises_does_not_stop_other_callbacks(tmp_path: Path, storage: str) -> None:
    harness = Harness(tmp_path, critical=storage)
    good, broken = FakeLink(), BrokenLink()
    mail_id = harness.create(good, ttl=60)
    for number in range(10):
        for link in (broken, good):
            harness.service.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.{number}", 0, [b"x"])
    harness.settle()
    assert len([reply for reply, _ in good.answers if reply.count(".") == 1]) >= 10
    assert harness.service.stats()["messages"] == 20


def test_a_waiting_fetch_that_raises_does_not_keep_others_waiting(harness: Harness) -> None:
    good, broken = FakeLink(), BrokenLink()
    mail_id = harness.create(good, ttl=60)
    wait = json.dumps({"deliver": "earliest", "config": {"max_wait_ms": 60_000}}).encode()
    for link in (broken, good):
        harness.service.published(link, f"{NEWEST}FETCH.{mail_id}", "_INBOX.fetch", 0, [wait])
    harness.publish(good, f"{MSG}{mail_id}", b"x")
    found: Any = harness.answer_of(good, "_INBOX.fetch")
    assert len(found["messages"]) == 1


# ---- events of refusals ------------------------------------------------------------------------


def refusals(harness: Harness) -> list[dict[str, Any]]:
    return [fields for kind, fields in harness.events if kind == "rejected"]


def test_a_refusal_event_holds_a_bounded_part_of_the_request(harness: Harness) -> None:
    link = FakeLink(name="n" * 60_000)
    body = json.dumps({"deliver": "x" * 60_000}).encode()
    harness.request(link, f"{NEWEST}FETCH.{harness.create(link, ttl=60)}", body)
    harness.subscribe(link, "*")
    for event in refusals(harness):
        assert event["detail"]["client"] == "n" * EVENT_TEXT_CHARS_MAX
        assert len(json.dumps(event)) < 1_000
    assert len(refusals(harness)) == 2


def test_a_client_that_is_refused_in_a_loop_writes_few_events(harness: Harness) -> None:
    loop, other = FakeLink(name="loop"), FakeLink(address="192.0.2.2")
    for _ in range(REFUSAL_EVENTS_MAX):
        harness.publish(loop, f"{MSG}nobody", b"x")
        harness.subscribe(FakeLink(), "*")  # another connection of the same client
    assert len(refusals(harness)) == REFUSAL_EVENTS_MAX
    harness.publish(other, f"{MSG}nobody", b"x")
    assert len(refusals(harness)) == REFUSAL_EVENTS_MAX + 1
    harness.tick(1)
    summary = refusals(harness)[-1]
    assert summary["detail"]["refused"] == REFUSAL_EVENTS_MAX
    assert summary["detail"]["address"].startswith("192.0.2.1")
    assert len(refusals(harness)) == REFUSAL_EVENTS_MAX + 2
    harness.publish(loop, f"{MSG}nobody", b"x")
    assert len(refusals(harness)) == REFUSAL_EVENTS_MAX + 3
    harness.tick(1)
    assert len(refusals(harness)) == REFUSAL_EVENTS_MAX + 3  # nothing was suppressed this time


def test_refusals_of_many_clients_are_few_events_and_all_are_counted(harness: Harness) -> None:
    calls = 0
    for number in range(2 * REFUSAL_CLIENTS_MAX):
        link = FakeLink(address=f"192.0.{number}.1")
        for _ in range(3):
            harness.publish(link, f"{MSG}nobody", b"x")
            calls += 1
    assert len(refusals(harness)) == REFUSAL_EVENTS_ALL_MAX
    harness.tick(1)
    found = refusals(harness)
    assert len(found) <= REFUSAL_EVENTS_ALL_MAX + REFUSAL_CLIENTS_MAX + 1
    assert sum(event["detail"].get("refused", 1) for event in found) == calls
    assert found[-1]["error"].endswith("more calls of further clients were refused")
    harness.publish(FakeLink(), f"{MSG}nobody", b"x")
    assert len(refusals(harness)) == len(found) + 1  # the next second begins anew


def test_every_accepted_call_between_refusals_is_emitted(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for _ in range(2 * REFUSAL_EVENTS_MAX):
        harness.publish(link, f"{MSG}nobody", b"x")
        harness.publish(link, f"{MSG}{mail_id}", b"x")
    assert harness.kinds().count("created") == 2 * REFUSAL_EVENTS_MAX + 1


def test_suppressed_refusals_are_summed_up_when_the_service_closes(harness: Harness) -> None:
    link = FakeLink()
    for _ in range(REFUSAL_EVENTS_MAX + 3):
        harness.publish(link, f"{MSG}nobody", b"x")
    harness.service.close()
    assert refusals(harness)[-1]["detail"]["refused"] == 3


# ---- waiting fetches ---------------------------------------------------------------------------


def wait_for(harness: Harness, link: FakeLink, mail_id: str, wait_ms: int = 60_000) -> Any:
    body = json.dumps({"deliver": "earliest", "config": {"max_wait_ms": wait_ms}}).encode()
    return harness.request(link, f"{NEWEST}FETCH.{mail_id}", body)


def test_one_client_has_at_most_its_share_of_the_waiting_fetches(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "mail", limits=MailLimits(waits_max=10, client_waits_max=5))
    greedy, other = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = harness.create(greedy, ttl=3600)
    assert [wait_for(harness, greedy, mail_id) for _ in range(5)] == [None] * 5
    assert wait_for(harness, FakeLink(), mail_id)["messages"] == []  # another connection of the same client
    assert [wait_for(harness, other, mail_id) for _ in range(5)] == [None] * 5
    assert wait_for(harness, FakeLink(address="192.0.2.3"), mail_id)["messages"] == []
    harness.tick(60)
    assert wait_for(harness, greedy, mail_id) is None


def test_waiting_fetches_end_with_their_connection(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "mail", limits=MailLimits(client_waits_max=2))
    mail_id = harness.create(FakeLink(), ttl=3600)
    for _ in range(3):
        link = FakeLink()
        assert [wait_for(harness, link, mail_id) for _ in range(2)] == [None] * 2
        harness.close_link(link)
    reader = FakeLink()
    assert wait_for(harness, reader, mail_id) is None
    harness.send(FakeLink(), mail_id, b"x")
    assert len(reader.answers) == 1


def test_a_fetch_that_is_due_after_its_connection_has_ended_takes_nothing(harness: Harness) -> None:
    gone, reader = FakeLink(), FakeLink()
    mail_id = harness.create(gone, ttl=0)
    body = json.dumps({"group_name": "g", "deliver": "earliest"}).encode()
    harness.service.published(gone, f"{MSG}{mail_id}.critical", "", 0, [b"x"])
    harness.service.published(
        gone, f"{NEWEST}FETCH.{mail_id}", "_INBOX.late", 0, [body]
    )  # waits for the disk
    harness.close_link(gone)
    assert len(harness.request(reader, f"{NEWEST}FETCH.{mail_id}", body)["messages"]) == 1


def test_a_fetch_waits_no_longer_than_the_limit(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    assert wait_for(harness, link, mail_id, 10**12) is None
    harness.tick(mq9.WAIT_MS_MAX / 1000 - 1)
    assert len(link.answers) == 1  # to the create
    harness.tick(1)
    assert json.loads(link.answers[-1][1])["messages"] == []


def test_ended_waits_leave_nothing_behind(harness: Harness) -> None:
    mail_id = harness.create(FakeLink(), ttl=0)
    for _ in range(3 * mailboxes.WAITS_TIDIED_FROM):
        link = FakeLink()
        wait_for(harness, link, mail_id)
        harness.service.closed(link)
    assert len(harness.service._mailboxes.deadlines._waits) <= mailboxes.WAITS_TIDIED_FROM
    assert harness.service._fetches._waits == {}


# ---- names -------------------------------------------------------------------------------------

TWINS = ["\u0430lerts", "\uff41lerts", "alerts\u200b", "a\u034flerts", "\u03b1lerts", "alerts\u0338"]


@pytest.mark.parametrize("twin", TWINS)
def test_a_look_alike_name_is_refused_in_every_call(harness: Harness, twin: str) -> None:
    link = FakeLink()
    body = json.dumps({"name": twin, "public": True, "ttl": 0}).encode()
    refused = harness.request(link, "$mq9.AI.MAILBOX.CREATE", body)
    assert refused["code"] == 400
    assert refused["error"].startswith("the mailbox name ")
    for card in ({"name": twin}, {"mailbox": twin}, {"name": "agent", "mailbox": twin}):
        refused = agent(harness, link, "REGISTER", **card)
        assert refused["code"] == 400
        assert refused["error"].startswith("the agent's name ")


def test_stored_look_alike_names_stay_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, link, twin = Harness(tmp_path), FakeLink(), TWINS[0]
    with monkeypatch.context() as earlier:
        earlier.setattr(mq9, "look_alike_fault", lambda _: "")
        harness.create(link, name=twin, public=True, ttl=0)
        agent(harness, link, "REGISTER", name=twin, mailbox=twin)
    harness.close_link(link)
    harness.reopen()
    link = FakeLink()
    harness.send(link, twin, b"x")
    harness.create(link, name=twin, public=True, ttl=0)
    assert agent(harness, link, "REPORT", name=twin) == {"error": ""}
    assert agent(harness, link, "REGISTER", name=twin, mailbox=twin)["error"] == ""
    assert agent(harness, link, "UNREGISTER", name=twin) == {"error": ""}
    assert agent(harness, link, "REGISTER", name=twin)["code"] == 400


# ---- the registry ------------------------------------------------------------------------------


def agent(harness: Harness, link: FakeLink, verb: str, **body: Any) -> Any:
    return harness.request(link, AGENT + verb, json.dumps(body).encode())


def test_name_held_by_a_client_cannot_be_taken_changed_or_removed(harness: Harness) -> None:
    holder, thief = FakeLink(), FakeLink()
    assert agent(harness, holder, "REGISTER", name="ada", mailbox="ada.in", text="mine")["error"] == ""
    for verb in ("REGISTER", "REPORT", "UNREGISTER"):
        assert agent(harness, thief, verb, name="ada", text="theirs")["code"] == 409
        assert agent(harness, thief, verb, name="ada", secret=verb)["code"] == 409
    assert agent(harness, thief, "UNREGISTER", mailbox="ada.in")["code"] == 409
    assert agent(harness, thief, "REGISTER", name="eve", mailbox="ada.in")["code"] == 409
    assert agent(harness, thief, "REGISTER", name="ada.in")["error"] == ""
    [card] = agent(harness, thief, "DISCOVER", text="mine")["agents"]
    assert card["name"] == "ada"
    assert agent(harness, holder, "REPORT", mailbox="ada.in", report_info="here") == {"error": ""}
    assert agent(harness, holder, "UNREGISTER", mailbox="ada.in") == {"error": ""}
    assert agent(harness, thief, "REGISTER", name="ada", text="theirs")["error"] == ""


def test_a_card_cannot_name_the_mailbox_of_another_agent(harness: Harness) -> None:
    holder, thief = FakeLink(), FakeLink(address="192.0.2.2")
    agent(harness, holder, "REGISTER", name="holder", mailbox="inbox.holder")
    agent(harness, holder, "REGISTER", mailbox="inbox.nameless")
    agent(harness, holder, "REGISTER", name="plain")
    for mailbox in ("inbox.holder", "inbox.nameless", "plain"):
        for card in ({"name": "thief"}, {"name": "thief", "secret": "guess"}, {}):
            assert agent(harness, thief, "REGISTER", mailbox=mailbox, **card)["code"] == 409
    assert agent(harness, thief, "REGISTER", name="thief", mailbox="inbox.thief")["error"] == ""
    assert agent(harness, thief, "REGISTER", name="thief", mailbox="inbox.holder")["code"] == 409
    found = harness.request(thief, f"{AGENT}DISCOVER")["agents"]
    assert [card["mailbox"] for card in found if card["name"] == "thief"] == ["inbox.thief"]
    assert agent(harness, holder, "REPORT", mailbox="inbox.holder") == {"error": ""}


def test_agents_of_one_holder_may_share_a_mailbox_until_they_end(harness: Harness) -> None:
    holder, other = FakeLink(), FakeLink(address="192.0.2.2")
    for name in ("one", "two"):
        assert agent(harness, holder, "REGISTER", name=name, mailbox="inbox.shared")["error"] == ""
    assert agent(harness, holder, "REGISTER", name="one", mailbox="inbox.shared")["error"] == ""
    for name in ("one", "two"):
        agent(harness, holder, "UNREGISTER", name=name)
    assert agent(harness, other, "REGISTER", name="three", mailbox="inbox.shared")["error"] == ""


def test_the_secret_of_a_name_works_on_every_connection_and_is_in_no_card(harness: Harness) -> None:
    holder, other = FakeLink(), FakeLink(address="192.0.2.2")
    secret = agent(harness, holder, "REGISTER", name="ada")["secret"]
    assert agent(harness, other, "REPORT", name="ada", secret=secret, report_info="x") == {"error": ""}
    assert agent(harness, other, "REGISTER", name="ada", secret=secret, text="again")["secret"] == secret
    harness.reopen()
    assert secret not in json.dumps(agent(harness, holder, "DISCOVER"))
    assert agent(harness, FakeLink(address="192.0.2.3"), "UNREGISTER", name="ada")["code"] == 409
    assert agent(harness, holder, "UNREGISTER", name="ada", secret=secret) == {"error": ""}


def test_the_same_login_needs_no_secret(harness: Harness) -> None:
    agent(harness, FakeLink(user="ada"), "REGISTER", name="a")
    assert agent(harness, FakeLink(user="eve"), "UNREGISTER", name="a")["code"] == 409
    harness.reopen()
    harness.tick(10 * card_registry.HOLD_S)
    assert agent(harness, FakeLink(user="ada"), "REGISTER", name="a")["error"] == ""
    assert agent(harness, FakeLink(user="ada"), "UNREGISTER", name="a") == {"error": ""}


def test_name_stays_with_its_address_after_disconnect_then_is_free(harness: Harness) -> None:
    first = FakeLink()
    agent(harness, first, "REGISTER", name="ada")
    stranger = FakeLink(address="192.0.2.2")
    harness.close_link(first)
    assert agent(harness, stranger, "REGISTER", name="ada")["code"] == 409
    second = FakeLink()
    assert agent(harness, second, "REGISTER", name="ada")["error"] == ""
    harness.tick(2 * card_registry.HOLD_S)
    assert agent(harness, stranger, "REGISTER", name="ada")["code"] == 409  # its connection is open
    harness.close_link(second)
    assert agent(harness, stranger, "REGISTER", name="ada")["error"] == ""


@pytest.mark.parametrize("verb", ["REGISTER", "REPORT"])
def test_a_card_has_one_limit_whatever_the_call(harness: Harness, verb: str) -> None:
    link = FakeLink()
    agent(harness, link, "REGISTER", name="ada", text="kept")
    assert (
        agent(harness, link, verb, name="ada", report_info="x" * card_registry.CARD_BYTES_MAX)["code"] == 400
    )
    [card] = agent(harness, link, "DISCOVER")["agents"]
    assert (card["text"], card.get("report_info")) == ("kept", None)


def test_reports_count_against_the_limit_of_all_cards(harness: Harness) -> None:
    harness.limit(cards_bytes_max=200_000)
    link = FakeLink()
    for name in ("a", "b"):
        agent(harness, link, "REGISTER", name=name)
    answers = [agent(harness, link, "REPORT", name=name, report_info="x" * 60_000) for name in ("a", "b")]
    assert [answer.get("code") for answer in answers] == [None, 429]
    harness.reopen()
    assert agent(harness, link, "REPORT", name="b", report_info="x" * 60_000)["code"] == 429
    assert agent(harness, link, "UNREGISTER", name="a") == {"error": ""}
    assert agent(harness, link, "REPORT", name="b", report_info="x" * 60_000) == {"error": ""}


def test_one_client_cannot_use_up_agent_registrations_or_memory(harness: Harness) -> None:
    harness = Harness(harness.folder and harness.folder / "other", client_quota_agents=2)
    greedy, other = FakeLink(), FakeLink(address="192.0.2.2")
    assert [agent(harness, greedy, "REGISTER", name=name).get("code") for name in "abc"] == [None, None, 429]
    assert agent(harness, FakeLink(), "REGISTER", name="c")["code"] == 429  # reconnecting does not help
    harness.reopen()
    assert agent(harness, greedy, "REGISTER", name="c")["code"] == 429
    assert agent(harness, other, "REGISTER", name="c")["error"] == ""
    assert agent(harness, greedy, "UNREGISTER", name="a") == {"error": ""}
    harness.limit(client_cards_bytes_max=5_000)
    assert agent(harness, greedy, "REGISTER", name="d", text="x" * 5_000)["code"] == 429
    assert agent(harness, greedy, "REGISTER", name="d")["error"] == ""


def test_cards_count_as_live_bytes_of_the_log(harness: Harness) -> None:
    link = FakeLink()
    mailboxes = harness.service._mailboxes
    before = mailboxes.quotas.log_bytes
    agent(harness, link, "REGISTER", name="ada", text="x" * 10_000)
    agent(harness, link, "REPORT", name="ada", report_info="x" * 10_000)
    size = len(mailboxes.agents["", "ada"].card)
    assert mailboxes.quotas.log_bytes == before + size + RECORD_BYTES
    harness.reopen()
    assert harness.service._mailboxes.quotas.log_bytes == before + size + RECORD_BYTES
    agent(harness, link, "UNREGISTER", name="ada")
    assert harness.service._mailboxes.quotas.log_bytes == before


# ---- quotas ------------------------------------------------------------------------------------


def test_empty_messages_cost_memory_too(tmp_path: Path) -> None:
    harness = Harness(tmp_path, stored_bytes_max=MAILBOX_COST_BYTES + 10 * MESSAGE_COST_BYTES)
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.service.published(link, f"{MSG}{mail_id}", "", 0, [b""] * 8)
    harness.service.published(link, f"{MSG}{mail_id}", "", 0, [b""] * 8)  # two of these fit
    assert harness.service.stats()["messages"] == 10


@pytest.mark.parametrize("word", ["critical", "normal"])
def test_one_client_cannot_use_up_the_server_for_another(tmp_path: Path, word: str) -> None:
    quota = MAILBOX_COST_BYTES + 5 * cost_of(1)
    harness = Harness(tmp_path, client_quota_bytes=quota, normal="group")
    greedy, other = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = harness.create(greedy, ttl=60)
    subject = f"{MSG}{mail_id}.{word}"
    harness.service.published(greedy, subject, "", 0, [b"x"] * 4)
    harness.settle()
    numbers = [harness.send(greedy, mail_id, b"x", word)]
    for link in (greedy, FakeLink()):  # reconnecting does not help
        assert harness.request(link, subject, b"x")["code"] == 429
        assert harness.request(link, "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    assert harness.send(other, mail_id, b"x", word)
    harness.reopen()
    assert harness.request(FakeLink(), subject, b"x")["code"] == 429
    assert harness.request(FakeLink(), f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{numbers[0]}") == {"deleted": True}
    harness.send(FakeLink(), mail_id, b"x", word)
    harness.tick(60)
    assert harness.service.stats()["bytes"] == 0
    assert all(account.empty for account in harness.service._mailboxes.quotas.accounts.values())


def test_mailboxes_of_one_client_are_bounded_and_released(tmp_path: Path) -> None:
    harness = Harness(tmp_path, client_quota_mailboxes=2)
    for _ in range(2):
        harness.create(FakeLink(), ttl=60)
    assert harness.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    harness.create(FakeLink(user="ada"), ttl=60)
    harness.reopen()
    assert harness.request(FakeLink(), "$mq9.AI.MAILBOX.CREATE")["code"] == 429
    harness.tick(60)
    harness.create(FakeLink(), ttl=60)


def test_a_description_costs_its_bytes_and_not_its_characters(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    plain = harness.create(FakeLink(), name="plain", public=True, ttl=0, desc="x" * 4_000)
    before = harness.service.stats()["bytes"]
    assert before == MAILBOX_COST_BYTES + 4_000
    harness.create(FakeLink(), name="robots", public=True, ttl=0, desc="\U0001f916" * 4_000)
    cost = harness.service.stats()["bytes"] - before
    assert cost >= MAILBOX_COST_BYTES + 4 * 4_000
    body = json.dumps({"group_name": "\u6f22" * 128}).encode()
    harness.request(FakeLink(), f"{NEWEST}FETCH.{plain}", body)
    assert harness.service.stats()["bytes"] >= before + cost + GROUP_COST_BYTES + 2 * 128
    after = harness.service.stats()["bytes"]
    harness.reopen()
    assert harness.service.stats()["bytes"] == after


def test_the_words_of_a_card_cost_their_bytes(harness: Harness) -> None:
    link = FakeLink()
    agent(harness, link, "REGISTER", name="a", text="x" * 10_000)
    cost = harness.service._agents._cost
    assert cost >= card_registry.AGENT_COST_BYTES + 2 * 10_000  # in the card and in the index
    agent(harness, link, "REGISTER", name="b", text="\U00020000" * 10_000)
    assert harness.service._agents._cost - cost >= card_registry.AGENT_COST_BYTES + 2 * 40_000


def test_a_search_looks_at_a_limited_number_of_longer_words(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    for number in range(20):
        text = " ".join(f"zzzz{number:02}{word:02}" for word in range(20))
        agent(harness, link, "REGISTER", name=f"a{number:02}", text=text)
    looked, since = [], card_index.SortedTexts.since

    def counted(texts: card_index.SortedTexts, text: str) -> Iterator[str]:
        for each in since(texts, text):
            looked.append(each)
            yield each

    monkeypatch.setattr(card_index.SortedTexts, "since", counted)
    assert len(agent(harness, link, "DISCOVER", text="zzz zzzz", limit=100)["agents"]) == 20
    assert len(looked) == 2 * 400
    looked.clear()
    harness.limit(prefix_words_max=60)
    found = agent(harness, link, "DISCOVER", text="zzz zzzz", limit=100)["agents"]
    assert [card["name"] for card in found] == ["a00", "a01"]  # 30 words each
    assert len(looked) == 60


def test_search_reads_a_limited_number_of_cards_rare_words_first(harness: Harness) -> None:
    link = FakeLink()
    for number in range(20):
        agent(
            harness, link, "REGISTER", name=f"a{number:02}", text="common rare" if number > 16 else "common"
        )

    def found(text: str) -> list[str]:
        return [card["name"] for card in agent(harness, link, "DISCOVER", text=text, limit=100)["agents"]]

    assert len(found("common rare")) == 20
    harness.limit(cards_looked_max=5)
    assert found("common rare") == ["a17", "a18", "a19", "a00", "a01"]
    harness.limit(cards_looked_max=2)
    assert found("common rare") == found("common ra rar rare") == ["a17", "a18"]


def test_the_end_of_a_long_search_is_not_looked_at(harness: Harness) -> None:
    link = FakeLink()
    agent(harness, link, "REGISTER", name="a", text="plumber")
    for count, found in ((card_registry.SEARCH_CHARS_MAX - 7, 1), (card_registry.SEARCH_CHARS_MAX, 0)):
        assert len(agent(harness, link, "DISCOVER", text=" " * count + "plumber")["agents"]) == found


def test_a_page_beyond_the_last_agent_is_empty(harness: Harness) -> None:
    link = FakeLink()
    agent(harness, link, "REGISTER", name="a", text="plumber")
    for page in (2, 10**18):
        for search in ({}, {"text": "plumber"}):
            assert agent(harness, link, "DISCOVER", page=page, limit=100, **search)["agents"] == []


def fetched(harness: Harness, link: FakeLink, mail_id: str, group: str, count: int = 10) -> Any:
    config = {"num_msgs": count, "max_wait_ms": 0}
    body = {"group_name": group, "deliver": "earliest", "config": config}
    return harness.request(link, f"{NEWEST}FETCH.{mail_id}", json.dumps(body).encode())


def acknowledged(harness: Harness, link: FakeLink, mail_id: str, msg_id: int) -> Any:
    body = {"group_name": "g", "mail_address": mail_id, "msg_id": msg_id}
    return harness.request(link, f"{NEWEST}ACK.{mail_id}", json.dumps(body).encode())


def test_pull_groups_count_against_their_creator(tmp_path: Path) -> None:
    harness = Harness(tmp_path, client_quota_bytes=MAILBOX_COST_BYTES + 2 * GROUP_COST_BYTES)
    owner, stranger = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = harness.create(owner, ttl=60)

    def codes(link: FakeLink, *names: str) -> list[int | None]:
        return [fetched(harness, link, mail_id, name).get("code") for name in names]

    assert codes(stranger, "a", "b", "c", "d", "a") == [None, None, None, 429, None]
    assert codes(owner, "e", "f", "h") == [None, None, 429]
    harness.reopen()
    assert codes(stranger, "d", "a") == [429, None]
    assert codes(owner, "h", "e") == [429, None]
    harness.tick(60)
    assert harness.service.stats()["bytes"] == 0


def test_pull_groups_of_a_client_are_few_in_all_mailboxes_together(harness: Harness) -> None:
    harness.limit(client_groups_max=4)
    owner, stranger = FakeLink(), FakeLink(address="192.0.2.2")
    boxes = [harness.create(owner, ttl=60 + number) for number in range(3)]
    for mail_id in boxes[:2]:
        for group in ("a", "b"):
            assert fetched(harness, stranger, mail_id, group)["error"] == ""
    assert fetched(harness, stranger, boxes[2], "a")["code"] == 429
    assert fetched(harness, owner, boxes[2], "a")["error"] == ""
    harness.reopen()
    assert fetched(harness, stranger, boxes[2], "b")["code"] == 429
    harness.tick(60)  # the first mailbox ends, and its groups with it
    assert fetched(harness, stranger, boxes[2], "b")["error"] == ""


def test_the_letters_that_pull_groups_of_a_client_remember_are_bounded(harness: Harness) -> None:
    harness.limit(client_remembered_max=50)
    owner, workers = FakeLink(), [FakeLink(address="192.0.2.2") for _ in range(3)]
    mail_id = filled(harness, owner, 100)
    numbers = list(harness.service._mailboxes.by_key[mail_id].letters)
    account = harness.service._mailboxes.quotas.accounts[workers[0].client]
    assert len(fetched(harness, workers[0], mail_id, "g", 40)["messages"]) == 40
    assert len(fetched(harness, workers[1], mail_id, "g", 40)["messages"]) == 10
    assert fetched(harness, workers[2], mail_id, "g", 40)["code"] == 429
    assert acknowledged(harness, workers[2], mail_id, numbers[80])["code"] == 429
    assert len(fetched(harness, owner, mail_id, "other", 40)["messages"]) == 40
    assert account.remembered == 50
    assert acknowledged(harness, workers[0], mail_id, numbers[39])["error"] == ""
    assert account.remembered == 10  # earlier ones are not remembered one by one
    harness.request(owner, f"{DELETE}{mail_id}.{numbers[45]}")
    assert account.remembered == 9
    harness.close_link(workers[1])
    assert account.remembered == 0
    assert len(fetched(harness, workers[2], mail_id, "g", 40)["messages"]) == 40
    harness.tick(60)
    assert account.remembered == account.groups == account.bytes == 0


def test_usage_shrinks_exactly_when_messages_leave_a_mailbox(harness: Harness) -> None:
    link, other = FakeLink(), FakeLink(address="192.0.2.2")
    mail_id = harness.create(link, ttl=60)
    start = harness.service.stats()
    send = f"{NEWEST}SEND.{mail_id}"
    for number, who in enumerate((link, other)):
        for word in ("urgent", "normal"):
            keyed = f"NATS/1.0\r\nmq9-key: k{word}\r\nmq9-tags: a,b\r\nmq9-priority: {word}\r\n\r\n".encode()
            harness.request(who, send, b"replaced %d" % number, keyed)
            lived = f"NATS/1.0\r\nmq9-ttl: 5\r\nmq9-delay: 2\r\nmq9-priority: {word}\r\n\r\n".encode()
            harness.request(who, send, b"short", lived)
        harness.service.published(who, f"{MSG}{mail_id}.critical", "", 0, [b"1", b"22", b"333"])
        harness.settle()
    harness.tick(3)
    assert harness.service.stats()["messages"] == 2 + 4 + 6
    harness.tick(3)  # the lifetimes of the short ones are over
    box = harness.service._mailboxes.by_key[mail_id]
    assert box.bytes == sum(letter.cost for letter in box.letters.values())
    for number in list(box.letters):
        harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{number}")
    assert (box.bytes, box.reserved, box.reserved_bytes) == (0, 0, 0)
    assert harness.service.stats() | {"clients": 0} == start | {"clients": 0}
    assert harness.service._mailboxes.quotas.accounts[other.client].empty
    assert harness.service._mailboxes.quotas.log_bytes == 0


# ---- the log -----------------------------------------------------------------------------------


def on_disk(harness: Harness) -> bytes:
    assert harness.folder is not None
    return b"".join(path.read_bytes() for path in sorted(harness.folder.glob("mail-*.log*")))


def pass_time(harness: Harness, seconds: float, step_s: float = 5.0) -> None:
    for _ in range(round(seconds / step_s)):
        harness.tick(step_s)


def test_deleted_replaced_and_expired_messages_leave_the_disk(harness: Harness) -> None:
    link = FakeLink()
    kept, short = harness.create(link, ttl=0), harness.create(link, ttl=10)
    numbers = [harness.send(link, kept, b"kept-%d" % number * 100, "critical") for number in range(20)]
    deleted = harness.send(link, kept, b"secret-deleted", "critical")
    harness.send(link, short, b"secret-expired", "urgent")
    keyed = b"NATS/1.0\r\nmq9-key: k\r\nmq9-priority: urgent\r\n\r\n"
    harness.request(link, f"{NEWEST}SEND.{kept}", b"secret-replaced", keyed)
    harness.request(link, f"{NEWEST}SEND.{kept}", b"newest", keyed)
    agent(harness, link, "REGISTER", name="ada", text="secret-card")
    agent(harness, link, "UNREGISTER", name="ada")
    harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{kept}.{deleted}")
    pass_time(harness, 10)
    assert on_disk(harness).count(b"secret-") == 4
    pass_time(harness, 60)
    assert b"secret-" not in on_disk(harness)
    harness.reopen()
    harness.subscribe(link, f"{kept}.*")
    assert [got.msg_id for got in link.got][:20] == numbers
    assert link.payloads()[20:] == [b"newest"]


def test_messages_deleted_before_a_restart_leave_the_disk_as_well(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    number = harness.send(link, mail_id, b"secret", "critical")
    harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{number}")
    harness.reopen()
    assert b"secret" in on_disk(harness)
    pass_time(harness, 60)
    assert b"secret" not in on_disk(harness)


def test_a_copy_without_gain_is_not_repeated(harness: Harness) -> None:
    harness.limit(log=SegmentLogLimits(compact_from_bytes=10_000, segment_bytes_max=5_000))
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    for number in range(10):
        agent(harness, link, "REGISTER", name=f"agent-{number}", text="x" * 3_000)
        harness.send(link, mail_id, b"x" * 1_000, "critical")
    log = harness.service._mailboxes.journal.log
    assert log is not None
    harness.service._mailboxes.quotas.log_bytes = 0  # whatever the estimate is
    pass_time(harness, 120)
    sequence = log._sequence
    pass_time(harness, 600)
    assert log._sequence == sequence


def test_copies_because_of_removals_are_rate_limited(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    for _ in range(10):
        harness.send(link, mail_id, b"x" * 10_000, "critical")
    harness.limit(log=SegmentLogLimits(compact_bytes_per_s=1_000))  # the live bytes take 100 s and more
    agent(harness, link, "REGISTER", name="ada")
    copies: list[float] = []
    log = harness.service._mailboxes.journal.log
    assert log is not None
    copy = log.copy

    def counted(alive: Iterator[Record], now_s: float) -> None:
        copies.append(now_s)
        copy(alive, now_s)

    monkeypatch.setattr(log, "copy", counted)
    for _ in range(100):  # one removal after the other, for 500 s
        agent(harness, link, "REPORT", name="ada", report_info="x")
        harness.tick(5)
    assert 4 <= len(copies) <= 5


def test_a_copy_that_does_not_fit_on_the_disk_loses_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    numbers = [harness.send(link, mail_id, b"kept", "critical") for _ in range(5)]
    deleted = harness.send(link, mail_id, b"secret", "critical")
    harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{deleted}")
    log = harness.service._mailboxes.journal.log
    assert log is not None
    pass_time(harness, 30)
    harness.clock.advance(5)
    harness.service.tick()  # the copy is requested

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        harness.settle()
        assert log._copying is not None
        patched.setattr(mail_log, "write_all", full)
        harness.tick()
        assert harness.service.trouble
        assert log._copying is None
        pass_time(harness, 60)
    assert on_disk(harness).count(b"kept") == 5
    pass_time(harness, 120)
    assert not harness.service.trouble
    assert b"secret" not in on_disk(harness)
    assert on_disk(harness).count(b"kept") == 5
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert [got.msg_id for got in link.got] == numbers


@pytest.mark.parametrize("storage", ["os", "group"])
def test_every_call_that_meets_a_full_disk_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    harness = Harness(tmp_path, critical=storage, extend=True)
    link = FakeLink()
    mail_id = harness.create(link, name="box", public=True, ttl=60)
    number = harness.send(link, mail_id, b"before", "urgent")
    fetch = json.dumps({"group_name": "g", "deliver": "earliest", "config": {"max_wait_ms": 0}}).encode()
    ack = json.dumps({"group_name": "g", "mail_address": mail_id, "msg_id": number}).encode()
    harness.request(link, f"{NEWEST}FETCH.{mail_id}", fetch)
    start = harness.service.stats()
    doomed = harness.send(link, mail_id, b"doomed", "urgent")
    calls = {
        f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{doomed}": b"",
        f"{MSG}{mail_id}.critical": b"x",
        f"{NEWEST}SEND.{mail_id}": b"x",
        "$mq9.AI.MAILBOX.CREATE": b'{"name":"other","public":true}',
        f"$mq9.AI.MAILBOX.EXTEND.{mail_id}": b'{"ttl":120}',
        f"{NEWEST}FETCH.{mail_id}": fetch.replace(b'"g"', b'"h"'),
        f"{NEWEST}ACK.{mail_id}": ack,
        f"{AGENT}REGISTER": b'{"name":"ada"}',
    }
    headers = b"NATS/1.0\r\nmq9-priority: urgent\r\nmq9-delay: 1\r\n\r\n"

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(mail_log, "write_all", full)
        for place, (subject, payload) in enumerate(calls.items()):  # one batch finds the disk full together
            given = headers if ".SEND." in subject else b""
            harness.service.published(link, subject, f"_INBOX.full.{place}", len(given), [given + payload])
        harness.service.published(link, f"{LIST}{mail_id}", "_INBOX.full.list", 0, [b""])
        harness.settle()
        answers = [harness.answer_of(link, f"_INBOX.full.{place}") for place in [*range(len(calls)), "list"]]
        assert [answer["code"] for answer in answers] == [503] * (len(calls) + 1)
        assert harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{doomed}")["code"] == 503
    pass_time(harness, 10)
    assert not harness.service.trouble
    assert harness.request(link, f"$mq9.AI.MAILBOX.DELETE.{mail_id}.{doomed}") == {"deleted": False}
    [again] = harness.request(link, f"{NEWEST}FETCH.{mail_id}", fetch)["messages"]
    assert again["msg_id"] == number  # a refused acknowledgement does not count
    stats = harness.service.stats()
    assert (stats["messages"], stats["mailboxes"]) == (start["messages"], start["mailboxes"])
    box = harness.service._mailboxes.by_key[mail_id]
    assert (box.reserved, box.reserved_bytes, box.syncing) == (0, 0, 0)
    harness.send(link, mail_id, b"after", "critical")
    harness.create(link, name="other", public=True)
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"after", b"before"]


def test_records_of_an_earlier_version_count_against_no_client(tmp_path: Path) -> None:
    folder = tmp_path / "mail"
    folder.mkdir()
    secret = bytes(range(8))
    rows: list[list[object]] = [
        [0, 0],
        [1, 1, "box", True, True, "", 0.0, 1, 0, ""],
        [4, 1, 5, "critical", b"single", b"", 1, 0, 0, "", []],
        [8, 1, 6, "urgent", 1, [b"first of a row", b"second"]],
        [6, 1, "g", 0, [0, 0, 0, 0], [5]],
        [7, "ada", 1, b'{"name":"ada","text":"old"}'],
    ]
    bodies = [msgspec.msgpack.encode(row) for row in rows]
    seed = int.from_bytes(secret[4:], "little")
    frames = [struct.pack("<4sII", secret[:4], len(body), zlib.crc32(body, seed)) + body for body in bodies]
    (folder / f"mail-{secret.hex()}-00000001.log").write_bytes(b"".join(frames))
    harness = Harness(folder)
    assert harness.kinds() == []
    link = FakeLink()
    harness.subscribe(link, "box.*")
    assert link.payloads() == [b"single", b"first of a row", b"second"]
    assert harness.service._mailboxes.quotas.accounts[link.client].empty
    assert agent(harness, link, "REGISTER", name="ada", text="new")["error"] == ""  # no member holds it
    assert harness.service.stats()["bytes"] == sum(
        [MAILBOX_COST_BYTES, GROUP_COST_BYTES, cost_of(6), cost_of(14), cost_of(6)]
    )


# ---- queries of large mailboxes --------------------------------------------------------------------


def filled(harness: Harness, link: FakeLink, count: int) -> str:
    mail_id = harness.create(link, ttl=60)
    harness.service.published(link, f"{MSG}{mail_id}", "", 0, [b"%d" % number for number in range(count)])
    harness.settle()
    return mail_id


def query(harness: Harness, link: FakeLink, inbox: str, mail_id: str, **body: Any) -> None:
    harness.service.published(link, f"{NEWEST}QUERY.{mail_id}", inbox, 0, [json.dumps(body).encode()])


def test_a_query_is_answered_after_scanning_the_whole_mailbox(harness: Harness) -> None:
    harness.limit(query_scan_max=10)
    link, short = FakeLink(), FakeLink()
    mail_id, small = filled(harness, link, 95), filled(harness, link, 5)
    harness.request(link, f"{NEWEST}SEND.{mail_id}", b"a", b"NATS/1.0\r\nmq9-tags: t\r\n\r\n")
    first = b"NATS/1.0\r\nmq9-tags: t\r\nmq9-priority: critical\r\n\r\n"
    removed = harness.request(link, f"{NEWEST}SEND.{mail_id}", b"b", first)["msg_id"]
    query(harness, link, "_INBOX.first", mail_id, tags="t")
    query(harness, link, "_INBOX.second", mail_id, limit=3)
    query(harness, short, "_INBOX.short", small, tags="t")
    assert [inbox for inbox, _ in short.answers] == ["_INBOX.short"]
    for _ in range(5):
        harness.soon.get_nowait()()
    assert harness.answer_of(link, "_INBOX.first") is None
    harness.request(link, f"{DELETE}{mail_id}.{removed}")
    found = harness.answer_of(link, "_INBOX.first")["messages"]
    assert [base64.b64decode(each["payload"]) for each in found] == [b"a"]
    assert len(harness.answer_of(link, "_INBOX.second")["messages"]) == 3


def test_running_queries_of_a_connection_are_limited_and_end_with_it(harness: Harness) -> None:
    harness.limit(query_scan_max=10, queries_max=3)
    greedy, other = FakeLink(), FakeLink()
    mail_id = filled(harness, FakeLink(), 100)
    for number in range(4):
        query(harness, greedy, f"_INBOX.{number}", mail_id, tags="t")
    query(harness, other, "_INBOX.other", mail_id, tags="t")
    assert [json.loads(answer)["code"] for _, answer in greedy.answers] == [429]
    while not other.answers:
        harness.soon.get_nowait()()
    assert len(greedy.answers) == 2  # they take turns
    harness.service.closed(greedy)
    assert not harness.service._fetches._queries
    harness.settle()
    assert len(greedy.answers) == 2


def test_a_query_of_a_mailbox_that_ends_meanwhile_is_answered(harness: Harness) -> None:
    harness.limit(query_scan_max=10)
    link = FakeLink()
    mail_id = filled(harness, link, 100)
    query(harness, link, "_INBOX.query", mail_id, tags="t")
    harness.tick(60)
    assert harness.answer_of(link, "_INBOX.query")["code"] == 410
