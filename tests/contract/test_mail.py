"""The guarantees of `Mail`: the mq9 design sentence by sentence, in every dialect, through the handler."""

import base64
import errno
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.contracts.mail import LINK_FULL_BYTES, mailboxes
from postroom.contracts.mail.cards import card_registry
from postroom.contracts.mail.mailboxes import hashed
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import MAILBOX_COST_BYTES, cost_of
from postroom.errors import LockTimeout
from postroom.logs import mail_log
from postroom.logs.mail_log import SegmentLogLimits
from tests.faultydisk import FaultyDisk
from tests.mailservice import CREATE, MSG, FakeLink, Harness
from tests.waiting import HANG_GUARD_S

PUBLIC = "$mq9.AI.PUBLIC.LIST"
LIST = "$mq9.AI.MAILBOX.LIST."
DELETE = "$mq9.AI.MAILBOX.DELETE."
NEWEST = "$mq9.AI.MSG."
SDK = "robustmq-mq9-python"


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    Harness.close_all()


COMPACTS_AT_ONCE = SegmentLogLimits(compact_from_bytes=0, compact_factor=0)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "mail")


def said(link: FakeLink) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in link.take()]


def fetch(harness: Harness, link: FakeLink, mail_id: str, **body: Any) -> list[bytes]:
    config = {"num_msgs": body.pop("num_msgs", 100), "max_wait_ms": 0}
    reply = harness.request(link, f"{NEWEST}FETCH.{mail_id}", json.dumps({**body, "config": config}).encode())
    assert reply["error"] == "", reply
    return [base64.b64decode(message["payload"]) for message in reply["messages"]]


def fetch_ids(harness: Harness, link: FakeLink, mail_id: str, **body: Any) -> list[int]:
    config = {"num_msgs": body.pop("num_msgs", 100), "max_wait_ms": 0}
    reply = harness.request(link, f"{NEWEST}FETCH.{mail_id}", json.dumps({**body, "config": config}).encode())
    return [message["msg_id"] for message in reply["messages"]]


def ack(harness: Harness, link: FakeLink, mail_id: str, group: str, msg_id: int) -> Any:
    body = {"group_name": group, "mail_address": mail_id, "msg_id": msg_id}
    return harness.request(link, f"{NEWEST}ACK.{mail_id}", json.dumps(body).encode())


def headed(**headers: str) -> bytes:
    lines = "".join(f"mq9-{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


# ---- kinds of mailboxes ------------------------------------------------------------------------


def test_a_private_id_is_a_random_uuid_made_by_the_server(harness: Harness) -> None:
    link = FakeLink()
    ids = [harness.create(link, ttl=60) for _ in range(20)]
    assert len(set(ids)) == 20
    for mail_id in ids:
        made = uuid.UUID(mail_id)
        assert (str(made), made.version, made.variant) == (mail_id, 4, uuid.RFC_4122)


def test_a_public_mailbox_has_the_name_from_its_create(harness: Harness) -> None:
    assert harness.create(FakeLink(), ttl=60, public=True, name="task.queue") == "task.queue"


def test_a_success_has_both_names_of_the_id_and_no_error_key(harness: Harness) -> None:
    reply = harness.request(FakeLink(), CREATE, b'{"ttl": 60, "public": true, "name": "a", "new": 1}')
    assert reply == {"mail_id": "a", "mail_address": "a", "is_new": True}


def test_an_empty_body_creates_a_private_mailbox(harness: Harness) -> None:
    assert harness.request(FakeLink(), CREATE)["is_new"]


@pytest.mark.parametrize("body", [b'{"name": "mine"}', b'{"name": "mine", "public": null, "ttl": 60}'])
def test_a_name_without_public_makes_a_public_mailbox(harness: Harness, body: bytes) -> None:
    link = FakeLink()
    harness.service.subscribed(link, "1", PUBLIC, "")
    explicit = b'{"name": "mine", "public": true}'
    for each, is_new in ((body, True), (body, False), (explicit, False)):
        reply = harness.request(FakeLink(), CREATE, each)
        assert reply == {"mail_id": "mine", "mail_address": "mine", "is_new": is_new}
    assert [(each["event"], each["mail_id"]) for each in said(link)] == [("created", "mine")]
    assert harness.send(FakeLink(), "mine", b"x")


def test_a_private_mailbox_cannot_be_named(harness: Harness) -> None:
    reply = harness.request(FakeLink(), CREATE, b'{"name": "mine", "public": false, "ttl": 60}')
    assert reply["code"] == 400
    assert harness.service.stats()["mailboxes"] == 0


def test_a_public_name_that_is_the_id_of_a_private_mailbox_is_a_conflict(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link)
    body = json.dumps({"public": True, "name": mail_id}).encode()
    assert harness.request(link, CREATE, body)["code"] == 409


def test_a_prefix_stands_before_the_random_part(harness: Harness) -> None:
    assert harness.create(FakeLink(), prefix="team.a").startswith("team.a.")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"ttl": -1}',
        b'{"ttl": "1"}',
        b'{"ttl": 1e30}',
        b'{"public": true}',
        b'{"public": true, "name": ""}',
        b'{"public": true, "name": "a b"}',
        b'{"public": true, "name": "a.*"}',
        b'{"public": true, "name": ">"}',
        b'{"public": true, "name": "a..b"}',
        b'{"public": true, "name": "a.urgent"}',
        b'{"public": true, "name": "low"}',
        b'{"prefix": "A"}',
        b'{"public": true, "name": "' + b"a" * 129 + b'"}',
        b"[" * 100_000,
    ],
)
def test_a_bad_creation_is_answered_with_code_400(harness: Harness, body: bytes) -> None:
    reply = harness.request(FakeLink(), CREATE, body)
    assert reply["code"] == 400
    assert reply["error"]


def test_names_with_a_dash_or_upper_case_are_allowed(harness: Harness) -> None:
    assert harness.create(FakeLink(), public=True, name="Demo.multi-agent_x") == "Demo.multi-agent_x"


# ---- priorities --------------------------------------------------------------------------------


def test_replay_is_by_priority_and_in_order_within_each(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    words = ["", "critical", "urgent", "normal", "low", "high", "critical", ""]
    for place, word in enumerate(words):
        harness.send(link, mail_id, f"{word or 'normal'}{place}".encode(), word)
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [
        b"critical1",
        b"critical6",
        b"urgent2",
        b"high5",
        b"normal0",
        b"normal3",
        b"normal7",
        b"low4",
    ]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (".*", [b"c", b"u", b"h", b"n", b"l"]),
        ("", [b"n"]),
        (".normal", [b"n"]),
        (".critical", [b"c"]),
        (".urgent", [b"u", b"h"]),
        (".high", [b"u", b"h"]),
        (".low", [b"l"]),
    ],
)
def test_a_subscription_gets_the_priorities_that_it_names(
    harness: Harness, rest: str, expected: list[bytes]
) -> None:
    link, live = FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.subscribe(live, mail_id + rest)
    for word in ["critical", "urgent", "high", "", "low"]:
        harness.send(link, mail_id, (word or "n")[:1].encode(), word)
    harness.subscribe(link, mail_id + rest)
    assert link.payloads() == expected
    assert sorted(live.payloads()) == sorted(expected)


def test_normal_messages_are_lost_with_the_server_where_memory_is_chosen(tmp_path: Path) -> None:
    harness = Harness(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for word in ["critical", "urgent", "high", "normal", "low"]:
        harness.send(link, mail_id, word.encode(), word)
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"critical", b"urgent", b"high"]


@pytest.mark.parametrize("options", [{}, {"normal": "os"}, {"normal": "group"}], ids=str)
def test_every_message_that_has_an_id_survives_a_restart(tmp_path: Path, options: dict[str, str]) -> None:
    harness = Harness(tmp_path, **options)
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for word in ["low", "normal", "critical"]:
        harness.send(link, mail_id, word.encode(), word)
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"critical", b"normal", b"low"]


def test_without_a_folder_everything_works_and_nothing_is_kept() -> None:
    harness = Harness(None)
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.send(link, mail_id, b"c", "critical")
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"c"]
    harness.reopen()
    assert harness.subscribe(link, f"{mail_id}.*") is not None


# ---- store first -------------------------------------------------------------------------------


def test_critical_message_is_synced_before_push_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.subscribe(link, f"{mail_id}.*")
    disk = FaultyDisk(monkeypatch)
    disk.hold()
    link.answers.clear()
    harness.service.published(link, f"{MSG}{mail_id}.critical", "_INBOX.a", 0, [b"first"])
    harness.service.flush()
    disk.entered.wait()
    assert (link.got, link.answers) == ([], [])
    other = FakeLink()
    harness.service.published(other, CREATE, "", 0, [b'{"name":"other","public":true}'])
    harness.service.subscribed(other, "1", f"{MSG}other.*", "")
    harness.service.published(link, f"{MSG}other", "_INBOX.b", 0, [b"normal needs no disk"])
    assert other.payloads() == [b"normal needs no disk"]
    disk.gate.set()
    harness.settle()
    assert link.payloads() == [b"first"]
    assert [reply for reply, _ in link.answers] == ["_INBOX.b", "_INBOX.a"]


def test_a_client_that_waits_for_no_answer_sees_its_messages_in_order(harness: Harness) -> None:
    link, early, late = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.subscribe(early, f"{mail_id}.*")
    link.answers.clear()
    for word in ["low", "normal", "urgent", "normal", "critical"]:  # all in one turn of the loop
        harness.service.published(link, f"{MSG}{mail_id}.{word}", "", 0, [word.encode()])
    harness.service.subscribed(late, "1", f"{MSG}{mail_id}.*", "")
    harness.service.published(link, LIST + mail_id, "_INBOX.l", 0, [b"{}"])
    harness.settle()
    assert early.payloads() == [b"low", b"normal", b"urgent", b"normal", b"critical"]
    assert late.payloads() == [b"critical", b"urgent", b"normal", b"normal", b"low"]
    assert len(harness.answer_of(link, "_INBOX.l")["messages"]) == 5


def eighty_wait_for_one_fsync(harness: Harness) -> FakeLink:
    """One turn of the loop runs as few of the callbacks as allowed."""
    harness.limit(log=SegmentLogLimits(tasks_a_turn_s=0.0))
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    link.answers.clear()
    for number in range(80):
        harness.service.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.{number}", 0, [b""])
    harness.service.flush()
    return link


def test_callbacks_after_one_fsync_run_in_bounded_pieces_and_in_order(harness: Harness) -> None:
    link = eighty_wait_for_one_fsync(harness)
    turns = []
    while len(link.answers) < 80:
        harness.soon.get(timeout=HANG_GUARD_S)()
        turns.append(len(link.answers))
    assert turns[0] == 80 // mail_log.TASKS_SHARE
    assert turns == sorted(turns)
    assert [reply for reply, _ in link.answers] == [f"_INBOX.{number}" for number in range(80)]


def test_callers_waiting_for_the_disk_are_answered_at_close(harness: Harness) -> None:
    link = eighty_wait_for_one_fsync(harness)
    harness.soon.get(timeout=HANG_GUARD_S)()
    harness.service.close()
    assert [reply for reply, _ in link.answers] == [f"_INBOX.{number}" for number in range(80)]


def test_messages_are_stored_without_subscribers_and_replayed_to_the_first(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for number in range(5):
        harness.publish(link, f"{MSG}{mail_id}", str(number).encode())
    late = FakeLink()
    harness.subscribe(late, mail_id)
    harness.publish(link, f"{MSG}{mail_id}", b"live")
    assert late.payloads() == [b"0", b"1", b"2", b"3", b"4", b"live"]


def test_every_subscription_gets_everything_and_so_does_the_same_one_again(harness: Harness) -> None:
    link, other = FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.send(link, mail_id, b"x")
    harness.subscribe(link, mail_id)
    harness.subscribe(other, mail_id)
    harness.service.unsubscribed(link, "1")
    harness.publish(other, f"{MSG}{mail_id}", b"y")
    harness.subscribe(link, mail_id)
    assert link.payloads() == [b"x", b"x", b"y"]
    assert other.payloads() == [b"x", b"y"]


def test_a_long_replay_comes_in_pieces_and_more_urgent_letters_first(harness: Harness) -> None:
    harness.limit(replay_step=10)
    link, late = FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    ids = [harness.send(link, mail_id, str(number).encode()) for number in range(35)]
    late.pending_bytes = LINK_FULL_BYTES + 1
    harness.subscribe(late, f"{mail_id}.*")
    assert late.got == []
    harness.send(link, mail_id, b"new and urgent", "urgent")
    harness.request(link, f"{DELETE}{mail_id}.{ids[20]}")
    late.pending_bytes = 0
    harness.service.drained(late)
    assert 0 < len(late.got) <= 10
    harness.settle()
    expected = [str(number).encode() for number in range(35) if number != 20]
    assert late.payloads() == [b"new and urgent", *expected]


def test_a_paused_replay_continues_with_a_tick_without_a_drained_call(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.send(link, mail_id, b"x")
    link.pending_bytes = LINK_FULL_BYTES + 1
    harness.subscribe(link, mail_id)
    link.pending_bytes = 0
    harness.tick()
    assert link.payloads() == [b"x"]


# ---- lifetime ----------------------------------------------------------------------------------


def test_a_mailbox_ends_with_its_time_and_its_messages_with_it(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=10)
    harness.send(link, mail_id, b"x", "critical")
    harness.clock.advance(9.5)
    assert len(harness.request(link, LIST + mail_id)["messages"]) == 1
    harness.clock.advance(0.5)
    assert harness.request(link, f"{MSG}{mail_id}", b"late")["code"] == 410
    assert harness.subscribe(link, mail_id) is not None
    harness.tick()
    harness.reopen()
    assert harness.request(link, LIST + mail_id)["code"] in {404, 410}
    assert harness.service.stats()["messages"] == 0


def test_a_ttl_of_zero_is_unlimited_and_the_default_is_a_day(harness: Harness) -> None:
    link = FakeLink()
    ever, day = harness.create(link, ttl=0), harness.create(link)
    harness.tick(86_399)
    assert "error" not in harness.request(link, LIST + day)
    harness.tick(1)
    harness.reopen()
    assert "error" in harness.request(link, LIST + day)
    assert "error" not in harness.request(link, LIST + ever)


def test_a_second_create_succeeds_and_changes_nothing(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, ttl=10, public=True, name="q", desc="first")
    harness.send(link, "q", b"x")
    harness.clock.advance(6)
    again = harness.request(link, CREATE, b'{"ttl":1000,"public":true,"name":"q","desc":"second"}')
    assert again == {"mail_id": "q", "mail_address": "q", "is_new": False}
    assert len(harness.request(link, LIST + "q")["messages"]) == 1
    harness.service.subscribed(link, "5", PUBLIC, "")
    assert said(link) == [{"event": "created", "mail_id": "q", "desc": "first", "ttl": 10}]
    harness.clock.advance(4)
    assert harness.request(link, LIST + "q")["code"] == 410


def test_ttl_keeps_running_while_the_server_is_down(
    harness: Harness,
) -> None:
    link = FakeLink()
    mail_id, short = harness.create(link, ttl=100), harness.create(link, ttl=30)
    harness.clock.advance(20)
    harness.service.close()
    harness.clock.advance(20)
    harness.clock.reboot()
    harness.service = harness.opened()
    assert harness.request(link, LIST + short)["code"] in {404, 410}
    harness.clock.advance(59)
    assert "error" not in harness.request(link, LIST + mail_id)
    harness.clock.advance(1)
    assert harness.request(link, LIST + mail_id)["code"] == 410


def test_ttl_ignores_wall_clock_changes_across_a_restart(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=100)
    harness.clock.step_wall(10_000)
    assert "error" not in harness.request(link, LIST + mail_id)
    harness.clock.step_wall(-100_000)
    harness.reopen()
    harness.clock.advance(100)
    assert harness.request(link, LIST + mail_id)["code"] == 410


def test_expired_mailbox_stays_expired_when_the_clock_is_set_back(
    harness: Harness,
) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=100)
    harness.tick(100)
    harness.clock.step_wall(-50)
    harness.reopen()
    assert harness.request(link, LIST + mail_id)["code"] == 404


def test_recreated_mailbox_starts_empty_with_new_message_ids(harness: Harness) -> None:
    link, worker = FakeLink(), FakeLink()
    harness.create(link, ttl=10, public=True, name="q")
    first = harness.send(link, "q", b"old", "critical")
    harness.subscribe(worker, "q.*", "workers")
    harness.tick(10)
    assert harness.create(link, ttl=10, public=True, name="q") == "q"
    assert harness.request(link, LIST + "q")["messages"] == []
    second = harness.send(link, "q", b"new", "critical")
    assert second > first
    assert worker.payloads() == [b"old", b"new"]  # a subscriber to a name stays subscribed
    harness.reopen()
    assert [item["msg_id"] for item in harness.request(link, LIST + "q")["messages"]] == [second]
    assert harness.send(link, "q", b"after a restart") > second


def test_ten_thousand_mailboxes_end_in_bounded_pieces(harness: Harness) -> None:
    link = FakeLink()
    for _ in range(10_000):
        harness.service.published(link, CREATE, "", 0, [b'{"ttl":5}'])
    harness.settle()
    harness.clock.advance(5)
    harness.service.tick()
    left = harness.service.stats()["mailboxes"]
    assert left == 10_000 - mailboxes.DEADLINES_A_TURN_MAX
    harness.settle()
    assert harness.service.stats()["mailboxes"] == 0


# ---- discovery ---------------------------------------------------------------------------------


def test_public_list_has_existing_mailboxes_then_changes(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, ttl=50, public=True, name="vision.results", desc="images")
    harness.create(link, ttl=50)
    harness.service.subscribed(link, "7", PUBLIC, "")
    assert said(link) == [{"event": "created", "mail_id": "vision.results", "desc": "images", "ttl": 50}]
    harness.create(link, ttl=9, public=True, name="task.queue")
    assert said(link) == [{"event": "created", "mail_id": "task.queue", "desc": "", "ttl": 9}]
    harness.tick(9)
    assert said(link) == [{"event": "expired", "mail_id": "task.queue"}]
    harness.service.unsubscribed(link, "7")
    harness.tick(60)
    assert link.got == []


def test_no_client_can_write_to_the_public_list(harness: Harness) -> None:
    link = FakeLink()
    harness.service.subscribed(link, "7", PUBLIC, "")
    assert harness.request(link, PUBLIC, b'{"event":"created"}')["code"] == 403
    assert link.got == []


# ---- the id is the only key --------------------------------------------------------------------


@pytest.mark.parametrize(
    "subject",
    [
        "$mq9.>",
        "$mq9.*.>",
        "$mq9.AI.>",
        f"{MSG}*",
        f"{MSG}*.*",
        f"{MSG}>",
        f"{MSG}*.critical",
        f"{MSG}a.*.critical",
        CREATE,
        f"{LIST}x",
        "$mq9.AI.AGENT.REGISTER",
        f"{NEWEST}SEND.x",
        "$mq9.AI.PUBLIC.*",
        MSG,
    ],
)
def test_no_wildcard_and_no_foreign_subject_can_be_subscribed_to(harness: Harness, subject: str) -> None:
    spy, link = FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    assert harness.service.owns(subject)
    assert harness.service.subscribed(spy, "1", subject, "") is not None
    harness.send(link, mail_id, b"secret")
    assert spy.got == []


@pytest.mark.parametrize("mail_id", ["*", ">", "a.*", "nobody", ""])
def test_a_send_to_an_unknown_mailbox_is_refused_and_stores_nothing(harness: Harness, mail_id: str) -> None:
    link = FakeLink()
    harness.publish(link, MSG + mail_id, b"x")
    assert link.answers == []
    assert harness.request(link, MSG + mail_id, b"x")["code"] in {403, 404}
    assert harness.service.stats()["messages"] == 0
    assert harness.kinds() == ["rejected", "rejected"]


def test_private_id_appears_in_no_event_refusal_or_foreign_answer(tmp_path: Path) -> None:
    harness = Harness(tmp_path, receipts=True, dead_letter_after=1, quota_messages=3)
    link, other, spy = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(link, ttl=60)
    harness.service.subscribed(spy, "1", PUBLIC, "")
    for word in ["", "critical", "urgent", "high"]:
        harness.publish(link, f"{MSG}{mail_id}.{word}".rstrip("."), b"secret body")
    harness.subscribe(other, f"{mail_id}.*", "workers")
    harness.close_link(other)
    fetch(harness, link, mail_id, group_name="g", deliver="earliest")
    harness.request(link, f"{DELETE}{mail_id}.x")
    harness.request(link, CREATE, json.dumps({"name": mail_id, "public": True}).encode())
    harness.request(spy, "$mq9.AI.AGENT.DISCOVER", b"{}")
    harness.tick(61)
    refusal = harness.subscribe(link, mail_id)
    shown = f"{harness.events} {spy.got} {spy.answers} {refusal} {harness.service.stats()}"
    assert {"created", "delivered", "dead_letter", "rejected", "expired"} <= set(harness.kinds())
    assert mail_id not in shown
    assert "secret body" not in shown
    assert hashed(mail_id) in shown


def test_errors_name_no_mailbox(harness: Harness) -> None:
    link = FakeLink()
    secret = "0d9c2b2e-secret"  # noqa: S105
    asked = [f"{MSG}{secret}", LIST + secret, f"{DELETE}{secret}.1", f"{NEWEST}FETCH.{secret}"]
    asked += [f"{NEWEST}QUERY.{secret}", f"$mq9.AI.MAILBOX.EXTEND.{secret}"]
    for subject in asked:
        assert secret not in json.dumps(harness.request(link, subject, b"{}"))


# ---- groups ------------------------------------------------------------------------------------


def test_each_message_goes_to_one_member_and_all_share_the_work(harness: Harness) -> None:
    sender, workers = FakeLink(), [FakeLink(), FakeLink(), FakeLink()]
    mail_id = harness.create(sender, ttl=60)
    for worker in workers:
        harness.subscribe(worker, f"{mail_id}.*", "workers")
    sent = [str(number).encode() for number in range(30)]
    for payload in sent:
        harness.publish(sender, f"{MSG}{mail_id}", payload)
    got = [worker.payloads() for worker in workers]
    assert sorted(payload for part in got for payload in part) == sorted(sent)
    assert [len(part) for part in got] == [10, 10, 10]


def test_groups_and_plain_subscribers_do_not_take_from_each_other(harness: Harness) -> None:
    sender, one, two, plain = FakeLink(), FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(sender, ttl=60)
    harness.subscribe(one, f"{mail_id}.*", "a")
    harness.subscribe(two, f"{mail_id}.*", "b")
    harness.subscribe(plain, f"{mail_id}.*")
    harness.publish(sender, f"{MSG}{mail_id}", b"x")
    assert one.payloads() == two.payloads() == plain.payloads() == [b"x"]


def test_a_new_member_gets_only_letters_that_no_member_holds(harness: Harness) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(sender, ttl=60)
    harness.send(sender, mail_id, b"c", "critical")
    harness.send(sender, mail_id, b"n")
    harness.subscribe(one, f"{mail_id}.critical", "w")
    harness.subscribe(two, f"{mail_id}.*", "w")
    assert one.payloads() == [b"c"]
    assert two.payloads() == [b"n"]


@pytest.mark.parametrize("how", ["closed", "unsubscribed"])
def test_undeleted_letters_of_a_lost_member_are_redelivered_in_order(harness: Harness, how: str) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(sender, ttl=60)
    for word in ["", "urgent", "critical", ""]:
        harness.send(sender, mail_id, (word or "n").encode(), word)
    harness.subscribe(one, f"{mail_id}.*", "w")
    harness.subscribe(two, f"{mail_id}.*", "w")
    done = one.got[0].msg_id
    assert harness.request(one, f"{DELETE}{mail_id}.{done}") == {"deleted": True}
    assert two.got == []
    if how == "closed":
        harness.close_link(one)
    else:
        harness.service.unsubscribed(one, "1")
    assert two.payloads() == [b"urgent", b"n", b"n"]


def test_when_the_last_member_is_gone_the_next_gets_everything_undeleted(harness: Harness) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(sender, ttl=60)
    harness.send(sender, mail_id, b"a")
    harness.send(sender, mail_id, b"b")
    harness.subscribe(one, f"{mail_id}.*", "w")
    harness.request(one, f"{DELETE}{mail_id}.{one.got[0].msg_id}")
    harness.close_link(one)
    harness.subscribe(two, f"{mail_id}.*", "w")
    assert two.payloads() == [b"b"]


def test_a_member_is_a_connection_whatever_the_number_of_its_subscriptions(harness: Harness) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = harness.create(sender, ttl=60)
    harness.subscribe(one, f"{mail_id}.*", "w", sid="1")
    harness.subscribe(one, f"{mail_id}.*", "w", sid="2")
    harness.send(sender, mail_id, b"x")
    assert len(one.got) == 1
    harness.subscribe(two, f"{mail_id}.*", "w")
    harness.service.unsubscribed(one, one.got[0].sid)
    assert two.got == []  # it still exists, and still holds the letter
    harness.close_link(one)
    assert two.payloads() == [b"x"]


# ---- delete and list ---------------------------------------------------------------------------


def test_delete_reports_whether_the_message_existed(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    msg_id = harness.send(link, mail_id, b"x", "critical")
    assert harness.request(link, f"{DELETE}{mail_id}.{msg_id}", b"{}") == {"deleted": True}
    assert harness.request(link, f"{DELETE}{mail_id}.{msg_id}", b"{}") == {"deleted": False}
    assert harness.request(link, f"{DELETE}{mail_id}.{msg_id + 1}", b"{}") == {"deleted": False}
    assert harness.request(link, f"{DELETE}{mail_id}.x")["code"] == 400
    assert harness.request(link, f"{DELETE}{mail_id}.")["code"] == 400
    assert harness.request(link, f"{DELETE}nobody.1")["code"] == 404
    harness.reopen()
    assert harness.request(link, LIST + mail_id)["messages"] == []


def test_list_has_the_keys_and_priorities_of_each_dialect(harness: Harness) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = harness.create(link, ttl=60)
    first = harness.send(link, mail_id, b"a\xff", "urgent")
    raw = harness.request(link, LIST + mail_id)
    assert raw["mail_id"] == mail_id
    assert raw["messages"][0]["msg_id"] == first
    assert raw["messages"][0]["priority"] == "urgent"
    assert raw["messages"][0]["payload"] == "a\ufffd"
    assert (
        raw["messages"][0]["ts"] == raw["messages"][0]["create_time"] == harness.clock.wall_us() // 1_000_000
    )
    message = harness.request(sdk, LIST + mail_id, b"{}")["messages"][0]
    assert (message["msg_id"], message["priority"]) == (str(first), "high")


def test_list_is_bounded(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for _ in range(1_001):
        harness.service.published(link, f"{MSG}{mail_id}", "", 0, [b"x"])
    assert len(harness.request(link, LIST + mail_id)["messages"]) == 1_000


def test_only_a_list_with_payloads_ends_at_the_size_limit_of_a_reply(harness: Harness) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = harness.create(link, ttl=60)
    numbers = [harness.send(link, mail_id, b"x" * (replies.REPLY_BYTES_MAX // 2)) for _ in range(5)]
    assert len(harness.request(link, LIST + mail_id)["messages"]) == 2
    rows = harness.request(link, LIST + mail_id, b'{"payload":false}')["messages"]
    assert [row["msg_id"] for row in rows] == numbers
    assert "payload" not in rows[0]
    assert len(harness.request(sdk, LIST + mail_id, b"{}")["messages"]) == 5


# ---- how a message looks -----------------------------------------------------------------------


def test_raw_client_gets_the_bytes_and_headers_of_the_sender(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    headers = b"NATS/1.0\r\nTrace: 1\r\nmq9-Msg-ID: 666\r\n\r\n"
    msg_id = harness.request(link, f"{MSG}{mail_id}.normal", b'{"msg_id": 9}', headers)["msg_id"]
    harness.subscribe(link, f"{mail_id}.*")
    expected = f"NATS/1.0\r\nMq9-Msg-Id: {msg_id}\r\nTrace: 1\r\n\r\n".encode()
    assert link.got[0].subject == MSG + mail_id
    assert (link.got[0].headers, link.got[0].payload) == (expected, b'{"msg_id": 9}')


def test_client_without_headers_gets_the_id_in_the_reply_subject(harness: Harness) -> None:
    link, plain = FakeLink(), FakeLink(headers=False)
    mail_id = harness.create(link, ttl=60)
    stored = harness.send(link, mail_id, b"0", "urgent")
    harness.subscribe(plain, f"{mail_id}.*")
    harness.service.published(link, MSG + mail_id, "", 0, [b"1", b"2"])
    harness.settle()
    assert plain.payloads() == [b"0", b"1", b"2"]
    assert plain.got[0].reply == f"{DELETE}{mail_id}.{stored}"
    ids = [int(got.reply.rpartition(".")[2]) for got in plain.got]
    assert [row["msg_id"] for row in harness.request(link, LIST + mail_id)["messages"]] == ids
    for got in plain.got:
        harness.publish(plain, got.reply)
    assert harness.service.stats()["messages"] == 0


def test_the_event_of_a_refusal_names_the_client(harness: Harness) -> None:
    link = FakeLink(name="worker-7")
    harness.request(link, f"{MSG}nobody", b"x")
    harness.subscribe(link, "nobody.*")
    details = [fields["detail"] for kind, fields in harness.events if kind == "rejected"]
    assert details == [{"client": "worker-7", "address": link.address}] * 2


@pytest.mark.parametrize(
    ("word", "seen"), [("critical", "high"), ("urgent", "high"), ("", "normal"), ("low", "low")]
)
@pytest.mark.parametrize("payload", [b"", b"\x80abc", b'{"msg_id": 1}'])
def test_the_sdk_gets_an_envelope_with_its_own_priorities(
    harness: Harness, word: str, seen: str, payload: bytes
) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = harness.create(link, ttl=60)
    msg_id = harness.send(link, mail_id, payload, word)
    harness.subscribe(sdk, f"{mail_id}.*")
    envelope = json.loads(sdk.got[0].payload)
    assert sdk.got[0].subject == f"{MSG}{mail_id}.{seen}"
    assert (envelope["msg_id"], envelope["priority"]) == (str(msg_id), seen)
    assert envelope["payload"]  # an empty name would count as none
    assert base64.b64decode(envelope["payload"]) == payload


@pytest.mark.parametrize(("mode", "name", "enveloped"), [("always", "", True), ("never", SDK, False)])
def test_the_envelope_can_be_forced(mode: str, name: str, enveloped: bool) -> None:
    harness = Harness(None, envelope=mode)
    link = FakeLink(name)
    mail_id = harness.create(link, ttl=60)
    harness.send(link, mail_id, b"x")
    harness.subscribe(link, mail_id)
    assert (link.payloads() != [b"x"]) is enveloped


# ---- the newest dialect ------------------------------------------------------------------------


def test_send_fetch_ack_in_priority_order(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    for priority in ["normal", "urgent", "critical"]:
        reply = harness.request(link, f"{NEWEST}SEND.q", priority.encode(), headed(priority=priority))
        assert reply["error"] == ""
    ids = fetch_ids(harness, link, "q", group_name="g", deliver="earliest")
    assert fetch(harness, link, "q", group_name="g") == [b"critical", b"urgent", b"normal"]
    assert ack(harness, link, "q", "g", ids[-1]) == {
        "error": ""
    }  # acknowledging the last of a batch covers the whole batch
    assert fetch(harness, link, "q", group_name="g") == []
    harness.request(link, f"{NEWEST}SEND.q", b"late", headed(priority="critical"))
    assert fetch(harness, link, "q", group_name="g") == [b"late"]
    assert fetch(harness, link, "q", group_name="other", deliver="earliest") == [
        b"critical",
        b"late",
        b"urgent",
        b"normal",
    ]


def test_an_acknowledgement_covers_fetched_letters_and_no_others(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    normal = [harness.send(link, "q", f"n{number}".encode()) for number in range(4)]
    assert fetch_ids(harness, link, "q", group_name="g", deliver="earliest", num_msgs=2) == normal[:2]
    critical = harness.send(link, "q", b"c", "critical")
    ack(harness, link, "q", "g", normal[1])
    assert fetch_ids(harness, link, "q", group_name="g") == [critical, *normal[2:]]
    ack(harness, link, "q", "g", critical)
    ack(harness, link, "q", "g", normal[0])  # late and repeated: the position does not move back
    assert fetch_ids(harness, link, "q", group_name="g") == normal[2:]


def test_ack_does_not_cover_later_letters_fetched_earlier(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    normal = [harness.send(link, "q", b"n") for _ in range(3)]
    assert fetch_ids(harness, link, "q", group_name="g", deliver="earliest") == normal
    assert fetch_ids(harness, link, "q", group_name="g", num_msgs=1) == normal[:1]
    ack(harness, link, "q", "g", normal[0])
    assert fetch_ids(harness, link, "q", group_name="g") == normal[1:]
    critical = harness.send(link, "q", b"c", "critical")
    assert fetch_ids(harness, link, "q", group_name="g", num_msgs=1) == [critical]
    ack(harness, link, "q", "g", critical)
    assert fetch_ids(harness, link, "q", group_name="g") == normal[1:]


def test_two_connections_of_a_group_never_hold_the_same_message(harness: Harness) -> None:
    one, two = FakeLink(), FakeLink()
    harness.create(one, name="q", public=True)
    sent = [harness.send(one, "q", b"x") for _ in range(4)]
    assert fetch_ids(harness, one, "q", group_name="g", deliver="earliest", num_msgs=3) == sent[:3]
    assert fetch_ids(harness, two, "q", group_name="g") == sent[3:]
    ack(harness, one, "q", "g", sent[0])
    harness.close_link(one)
    assert fetch_ids(harness, two, "q", group_name="g") == sent[1:]


def test_the_position_of_a_group_survives_a_restart(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    sent = [harness.send(link, "q", b"x", "urgent") for _ in range(4)]
    assert fetch_ids(harness, link, "q", group_name="late", deliver="latest") == []
    fetch_ids(harness, link, "q", group_name="g", deliver="earliest", num_msgs=3)
    ack(harness, link, "q", "g", sent[1])
    harness.reopen()
    sent.append(harness.send(link, "q", b"y", "critical"))
    assert fetch_ids(harness, link, "q", group_name="g") == [sent[4], sent[2], sent[3]]
    assert fetch_ids(harness, link, "q", group_name="late") == [sent[4]]


def test_the_start_position_of_a_fetch(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    first = harness.send(link, "q", b"1")
    harness.clock.advance(100)
    second = harness.send(link, "q", b"2")
    now_s = harness.clock.wall_us() // 1_000_000
    assert fetch_ids(harness, link, "q") == []
    assert fetch_ids(harness, link, "q", deliver="earliest") == [first, second]
    assert fetch_ids(harness, link, "q", deliver="from_id", from_id=second) == [second]
    assert fetch_ids(harness, link, "q", deliver="from_time", from_time=now_s - 50) == [second]
    assert fetch_ids(harness, link, "q", group_name="g", deliver="latest") == []
    assert fetch_ids(harness, link, "q", group_name="g", deliver="earliest") == []
    again = fetch_ids(harness, link, "q", group_name="g", deliver="earliest", force_deliver=True)
    assert again == [first, second]
    harness.reopen()


def test_a_fetch_waits_for_the_first_message_or_the_end_of_its_time(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    body = json.dumps({"config": {"max_wait_ms": 2_000}}).encode()
    assert harness.request(link, f"{NEWEST}FETCH.q", body) is None
    harness.send(link, "q", b"x")
    assert len(json.loads(link.answers[-2][1])["messages"]) == 1
    assert harness.request(link, f"{NEWEST}FETCH.q", body) is None
    count = len(link.answers)
    harness.tick(1.9)
    assert len(link.answers) == count
    harness.tick(0.1)
    assert json.loads(link.answers[-1][1]) == {"error": "", "messages": []}


def test_a_key_keeps_the_newest(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    for priority, payload in [("urgent", b"1"), ("urgent", b"2"), ("normal", b"3"), ("urgent", b"4")]:
        harness.request(link, f"{NEWEST}SEND.q", payload, headed(key="state", priority=priority))
    harness.request(link, f"{NEWEST}SEND.q", b"other", headed(key="k2", priority="urgent"))
    assert fetch(harness, link, "q", deliver="earliest") == [b"4", b"other"]
    harness.reopen()
    assert fetch(harness, link, "q", deliver="earliest") == [b"4", b"other"]


@pytest.mark.parametrize("priority", ["normal", "critical"])
def test_a_delayed_message_comes_when_it_is_due(harness: Harness, priority: str) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    reply = harness.request(link, f"{NEWEST}SEND.q", b"later", headed(delay="60", priority=priority))
    assert reply == {"error": "", "msg_id": -1}
    harness.reopen()
    harness.subscribe(link, "q.*")
    harness.tick(59)
    assert link.got == []
    harness.tick(1)
    assert link.payloads() == [b"later"]
    harness.reopen()
    harness.tick(0)
    assert len(harness.request(link, LIST + "q")["messages"]) == 1


def test_a_messages_own_lifetime(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    harness.request(link, f"{NEWEST}SEND.q", b"short", headed(ttl="30", priority="urgent"))
    harness.reopen()
    harness.clock.advance(30)
    assert fetch(harness, link, "q", deliver="earliest") == []
    harness.tick()
    assert harness.service.stats()["messages"] == 0
    assert harness.kinds()[-1] == "expired"


def test_query_searches_by_key_tags_and_time_without_fetching(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True, ttl=0)
    harness.request(link, f"{NEWEST}SEND.q", b"1", headed(key="k", tags="a,b"))
    harness.clock.advance(10)
    harness.request(link, f"{NEWEST}SEND.q", b"2", headed(tags="b"))

    def query(**body: Any) -> list[bytes]:
        reply = harness.request(link, f"{NEWEST}QUERY.q", json.dumps(body).encode())
        return [base64.b64decode(message["payload"]) for message in reply["messages"]]

    assert query() == query() == [b"1", b"2"]
    assert query(key="k") == [b"1"]
    assert query(tags="b,a") == query(tags=["a"]) == [b"1"]
    assert query(since=harness.clock.wall_us() // 1_000_000 - 5) == [b"2"]
    assert query(limit=1) == [b"1"]


def test_the_newest_delete(harness: Harness) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    msg_id = harness.send(link, "q", b"x")
    assert harness.request(link, f"{NEWEST}DELETE.q.{msg_id}", b'""') == {"error": "", "deleted": True}


@pytest.mark.parametrize(
    "headers", [headed(priority="soon"), headed(delay="x"), headed(ttl="-1"), headed(key="k" * 2_000)]
)
def test_invalid_send_options_are_refused(harness: Harness, headers: bytes) -> None:
    link = FakeLink()
    harness.create(link, name="q", public=True)
    assert harness.request(link, f"{NEWEST}SEND.q", b"x", headers)["code"] == 400
    assert harness.service.stats()["messages"] == 0


def test_agents_are_registered_found_by_their_words_and_unregistered(harness: Harness) -> None:
    link = FakeLink()

    def agent(verb: str, **body: Any) -> Any:
        return harness.request(link, f"$mq9.AI.AGENT.{verb}", json.dumps(body).encode())

    assert agent("REGISTER", name="t", mailbox="t.in", payload="Translation; EN, ZH")["error"] == ""
    assert agent("REGISTER", name="i", skills=[{"tags": ["image processing"]}])["error"] == ""
    assert agent("REGISTER", payload="nameless")["code"] == 400

    def found(**body: Any) -> list[str]:
        return [card["name"] for card in agent("DISCOVER", **body)["agents"]]

    assert found() == ["i", "t"]
    assert found(limit=1, page=2) == ["t"]
    assert found(text="image") == found(text="PROCESS") == ["i"]
    assert found(semantic="zh translation please") == ["t"]
    assert agent("REPORT", name="t", report_info="running") == {"error": ""}
    assert agent("REPORT", name="nobody", report_info="x")["code"] == 404
    harness.reopen()
    assert agent("DISCOVER", text="translation")["agents"][0]["report_info"] == "running"
    assert agent("UNREGISTER", mailbox="t.in") == {"error": ""}
    assert found(text="translation") == []
    harness.reopen()
    assert found() == ["i"]


def test_a_card_may_hold_anything_and_be_replaced(harness: Harness) -> None:
    link = FakeLink()
    mailboxes: list[object] = [[], {"a": []}, 7, None, "box"]
    for mailbox in mailboxes:
        body = json.dumps({"name": "ada", "mailbox": mailbox}).encode()
        assert harness.request(link, "$mq9.AI.AGENT.REGISTER", body)["error"] == ""
    assert harness.request(link, "$mq9.AI.AGENT.UNREGISTER", b'{"mailbox":"box"}') == {"error": ""}
    assert harness.request(link, "$mq9.AI.AGENT.DISCOVER")["agents"] == []


def test_the_cards_of_all_agents_are_bounded(harness: Harness) -> None:
    link = FakeLink()

    def register(name: str) -> Any:
        body = json.dumps({"name": name, "text": "x" * 1_000}).encode()
        return harness.request(link, "$mq9.AI.AGENT.REGISTER", body)

    harness.limit(cards_bytes_max=3 * (2_000 + card_registry.AGENT_COST_BYTES))
    assert [register(name).get("code") for name in ("a", "b", "c")] == [None, None, 429]
    harness.reopen()
    assert register("c")["code"] == 429
    harness.request(link, "$mq9.AI.AGENT.UNREGISTER", b'{"name":"a"}')
    assert register("c")["error"] == ""


def test_an_acknowledgement_of_an_unknown_letter_is_not_remembered(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    first, second = harness.send(link, mail_id, b"1"), harness.send(link, mail_id, b"2")
    assert fetch_ids(harness, link, mail_id, group_name="g", deliver="earliest") == [first, second]
    for number in (first, first, 10**9, 2**62, -1):
        assert ack(harness, link, mail_id, "g", number) == {"error": ""}
    assert harness.service._mailboxes.by_key[mail_id].groups["g"].done == set()
    assert fetch_ids(harness, link, mail_id, group_name="g") == [second]


def test_the_name_of_a_pull_group_is_bounded(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    body = json.dumps({"group_name": "g" * (mq9.NAME_CHARS_MAX + 1)}).encode()
    assert harness.request(link, f"{NEWEST}FETCH.{mail_id}", body)["code"] == 400


def test_an_unknown_subject_is_answered(harness: Harness) -> None:
    for subject in ["$mq9.AI.NOTHING", "$mq9.x", f"{CREATE}.more", "$mq9.AI.MSG.PEEK.q"]:
        assert harness.request(FakeLink(), subject)["code"] == 400


# ---- beyond the design, off unless asked -------------------------------------------------------


TWO_MESSAGES = 2 * cost_of(1)


@pytest.mark.parametrize(
    "options",
    [
        {"quota_messages": 2},
        {"quota_bytes": TWO_MESSAGES},
        {"client_quota_bytes": MAILBOX_COST_BYTES + TWO_MESSAGES},
        {"stored_bytes_max": MAILBOX_COST_BYTES + TWO_MESSAGES},
    ],
)
def test_quotas_refuse_with_429_and_count_reserved_letters(tmp_path: Path, options: dict[str, int]) -> None:
    harness = Harness(tmp_path, **options)
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    for number in range(3):  # in one batch: the first two are not stored yet when the third comes
        harness.service.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.q{number}", 0, [b"x"])
    harness.settle()
    answers = {reply: json.loads(payload) for reply, payload in link.answers}
    assert [answers[f"_INBOX.q{number}"].get("code") for number in range(3)] == [None, None, 429]
    msg_id = answers["_INBOX.q0"]["msg_id"]
    harness.request(link, f"{DELETE}{mail_id}.{msg_id}")
    harness.send(link, mail_id, b"x", "critical")


def test_the_number_of_mailboxes_is_bounded() -> None:
    harness = Harness(None, mailboxes_max=1)
    harness.create(FakeLink(), ttl=60)
    assert harness.request(FakeLink(), CREATE)["code"] == 429


@pytest.mark.parametrize("word", ["", "critical"])
def test_after_enough_failed_deliveries_a_message_goes_to_the_dead_letters(tmp_path: Path, word: str) -> None:
    harness = Harness(tmp_path, dead_letter_after=2)
    link = FakeLink()
    mail_id = harness.create(link, ttl=60)
    msg_id = harness.send(link, mail_id, b"poison", word)
    for _ in range(2):
        worker = FakeLink()
        harness.subscribe(worker, f"{mail_id}.*", "w")
        assert worker.payloads() == [b"poison"]
        harness.close_link(worker)
    assert harness.request(link, LIST + mail_id)["messages"] == []
    harness.subscribe(link, f"{mail_id}.dead.*")
    assert link.payloads() == [b"poison"]
    assert b"Mq9-Dead-Msg-Id: %d\r\nMq9-Dead-Deliveries: 2\r\n" % msg_id in link.got[0].headers
    harness.tick(60)
    assert harness.service.stats()["mailboxes"] == 0


def test_the_creator_can_extend_a_mailbox_with_the_option(tmp_path: Path) -> None:
    harness = Harness(tmp_path, extend=True)
    owner, other, nameless = FakeLink(user="anna"), FakeLink(user="otto"), FakeLink()
    mail_id = harness.create(owner, ttl=10)
    subject = f"$mq9.AI.MAILBOX.EXTEND.{mail_id}"
    assert harness.request(other, subject, b'{"ttl":100}')["code"] == 403
    assert harness.request(nameless, subject, b'{"ttl":100}')["code"] == 403
    assert harness.request(owner, subject, b'{"ttl":5}')["code"] == 400
    assert harness.request(FakeLink(user="anna"), subject, b'{"ttl":100}')["ttl"] == 100
    harness.tick(50)
    harness.reopen()
    harness.tick(49)
    assert "error" not in harness.request(owner, LIST + mail_id)
    harness.tick(1)
    assert harness.request(owner, LIST + mail_id)["code"] == 410
    mine = harness.create(nameless, ttl=10)
    assert harness.request(FakeLink(), f"$mq9.AI.MAILBOX.EXTEND.{mine}", b'{"ttl":99}')["code"] == 403
    assert harness.request(nameless, f"$mq9.AI.MAILBOX.EXTEND.{mine}", b'{"ttl":99}')["ttl"] == 99


def test_extending_is_refused_without_the_option(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=10)
    assert harness.request(link, f"$mq9.AI.MAILBOX.EXTEND.{mail_id}", b'{"ttl":99}')["code"] == 403


def test_deliveries_are_emitted_only_with_receipts(tmp_path: Path) -> None:
    for receipts in (False, True):
        harness = Harness(tmp_path / str(receipts), receipts=receipts)
        link = FakeLink(user="anna")
        harness.create(link, public=True, name="q")
        msg_id = harness.send(link, "q", b"x", "urgent")
        harness.subscribe(link, "q.*")
        fetch(harness, link, "q", deliver="earliest")
        harness.request(link, f"{DELETE}q.{msg_id}")
        delivered = ["delivered", "delivered"] if receipts else []
        assert harness.kinds() == ["created", "created", *delivered, "deleted"]
        assert harness.events[1][1]["message_id"] == harness.events[-1][1]["message_id"] == f"q/{msg_id}"


# ---- the log -----------------------------------------------------------------------------------


def log_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("mail-*.log"), key=lambda path: path.name[-12:])


def test_two_servers_cannot_share_a_folder(harness: Harness) -> None:
    harness.limit(log=SegmentLogLimits(lock_wait_s=0.0))
    with pytest.raises(LockTimeout):
        harness.opened()


@pytest.mark.parametrize("cut", [1, 5, 12, 40])
def test_a_torn_end_is_skipped_and_kept(harness: Harness, cut: int) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.send(link, mail_id, b"whole", "critical")
    harness.send(link, mail_id, b"torn" * 100, "critical")
    harness.service.close()
    assert harness.folder is not None
    path = log_files(harness.folder)[0]
    os.truncate(path, path.stat().st_size - cut)
    before = path.read_bytes()
    harness.service = harness.opened()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"whole"]
    assert path.read_bytes() == before
    assert harness.kinds()[-1] == "quarantined"


def test_a_damaged_stretch_loses_only_its_records_and_survives_compaction(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    for number in range(5):
        harness.send(link, mail_id, b"message-%d" % number, "critical")
    harness.service.close()
    assert harness.folder is not None
    path = log_files(harness.folder)[0]
    data = bytearray(path.read_bytes())
    data[data.index(b"message-2") + 3] ^= 1
    path.write_bytes(data)
    harness.service = harness.opened()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"message-0", b"message-1", b"message-3", b"message-4"]
    harness.limit(log=COMPACTS_AT_ONCE)
    harness.tick()
    harness.tick()
    assert not path.exists()
    assert any(b"essage-2"[:2] in kept.read_bytes() for kept in harness.folder.glob("*.damaged-*"))
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"message-0", b"message-1", b"message-3", b"message-4"]


def test_compaction_keeps_live_records_and_shrinks_the_log(harness: Harness) -> None:
    few = SegmentLogLimits(segment_bytes_max=20_000, compact_from_bytes=50_000, compact_step_records=3)
    harness.limit(log=few)
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.request(link, "$mq9.AI.AGENT.REGISTER", b'{"name":"a"}')
    harness.request(link, f"{NEWEST}SEND.{mail_id}", b"later", headed(delay="50", priority="urgent"))
    kept = [harness.send(link, mail_id, b"kept-%d" % number, "urgent") for number in range(10)]
    fetch_ids(harness, link, mail_id, group_name="g", deliver="earliest", num_msgs=4)
    ack(harness, link, mail_id, "g", kept[3])
    for _ in range(100):
        msg_id = harness.send(link, mail_id, b"x" * 1_000, "critical")
        harness.request(link, f"{DELETE}{mail_id}.{msg_id}")
        harness.tick()
    for _ in range(20):
        harness.tick()
    assert harness.folder is not None
    assert sum(path.stat().st_size for path in log_files(harness.folder)) < 80_000
    harness.reopen()
    assert fetch_ids(harness, link, mail_id, group_name="g") == kept[4:]
    assert fetch_ids(harness, link, mail_id, deliver="earliest") == kept
    assert len(harness.request(link, "$mq9.AI.AGENT.DISCOVER")["agents"]) == 1
    harness.tick(50)
    assert fetch(harness, link, mail_id, deliver="earliest")[-1] == b"later"


def test_failed_fsync_stops_acknowledgements_until_a_new_segment_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.subscribe(link, f"{mail_id}.*")
    before = len(log_files(tmp_path))
    disk = FaultyDisk(monkeypatch)
    disk.failing = True
    assert harness.request(link, f"{MSG}{mail_id}.critical", b"1") is None
    assert harness.service.trouble
    assert harness.request(link, f"{MSG}{mail_id}.critical", b"2")["code"] == 503
    assert harness.request(link, CREATE)["code"] == 503
    assert "error" not in harness.request(link, f"{MSG}{mail_id}", b"in memory")
    harness.tick()  # the new segment fails as well
    assert harness.service.trouble
    assert link.take() == [b"in memory"]
    disk.failing = False
    harness.tick()
    assert not harness.service.trouble
    assert link.take() == [b"1"]
    assert json.loads(link.answers[-1][1])["msg_id"]
    assert len(log_files(tmp_path)) > before
    assert "alert" in harness.kinds()
    harness.send(link, mail_id, b"3", "critical")
    harness.reopen()
    again = FakeLink()
    harness.subscribe(again, f"{mail_id}.*")
    assert again.payloads() == [b"1", b"3"]


def test_a_full_disk_refuses_durable_calls_and_loses_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.send(link, mail_id, b"before", "urgent")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(mail_log, "write_all", full)
        harness.service.published(link, f"{MSG}{mail_id}.urgent", "", 0, [b"waits"])  # cannot be answered
        assert harness.request(link, f"{MSG}{mail_id}.urgent", b"meets it")["code"] == 503
        assert harness.request(link, f"{MSG}{mail_id}.urgent", b"no")["code"] == 503
        harness.tick()
        assert harness.service.trouble
    harness.tick()
    assert not harness.service.trouble
    harness.send(link, mail_id, b"after", "urgent")
    harness.events.clear()
    harness.reopen()
    assert harness.events == []  # the half record that the full disk accepted is gone
    harness.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"before", b"waits", b"after"]


@pytest.mark.parametrize("word", ["critical", "normal", "low"])
@pytest.mark.parametrize("normal", ["memory", "os", "group"])
@pytest.mark.parametrize("quota", [0, 7])
def test_a_batch_has_the_same_effect_as_its_messages_one_by_one(
    tmp_path: Path, word: str, normal: str, quota: int
) -> None:
    payloads = [b"%d" % number for number in range(10)]
    seen = []
    for many in (False, True):
        harness = Harness(tmp_path / str(many), normal=normal, quota_messages=quota)
        sender, sdk, *others = FakeLink(), FakeLink(name="robustmq-x"), FakeLink(), FakeLink(), FakeLink()
        mail_id = harness.create(sender, name="box", public=True, ttl=0)
        for link, team in zip([sdk, *others], ["", "", "g", "g"], strict=True):
            harness.subscribe(link, f"{mail_id}.*", team)
        subject = f"{MSG}{mail_id}.{word}"
        for batch in (payloads[:5], payloads[5:]):
            if many:
                harness.service.published(sender, subject, "", 0, batch)
            else:
                for payload in batch:
                    harness.service.published(sender, subject, "", 0, [payload])
        harness.settle()
        harness.publish(sender, f"{MSG}{mail_id}.urgent", b"last")
        harness.service.published(sender, f"{MSG}nobody", "", 0, [b"1", b"2"])
        listed = harness.request(sender, f"$mq9.AI.MAILBOX.LIST.{mail_id}")["messages"]
        shown = [(each["msg_id"], each["payload"], each["priority"]) for each in listed]
        got = [[(each.subject, each.msg_id) for each in link.got] for link in (sdk, *others)]
        harness.reopen()
        again = FakeLink()
        harness.subscribe(again, f"{mail_id}.*")
        seen.append((shown, got, again.payloads(), harness.kinds(), harness.service.stats()))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == (quota or len(payloads) + 1)


@pytest.mark.parametrize("priority", ["critical", "normal"])
def test_each_message_of_a_batch_with_a_reply_is_answered(harness: Harness, priority: str) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    headers = b"NATS/1.0\r\nmq9-key: k\r\n\r\n"
    harness.service.published(link, f"{MSG}{mail_id}.{priority}", "_INBOX.batch", 0, [b"1", b"2"])
    harness.service.published(
        link, f"{MSG}{mail_id}", "_INBOX.batch", len(headers), [headers + b"3", headers + b"4"]
    )
    harness.settle()
    answers = [json.loads(payload)["msg_id"] for reply, payload in link.answers if reply == "_INBOX.batch"]
    listed = harness.request(link, LIST + mail_id)["messages"]
    assert len(answers) == 4
    assert [row["payload"] for row in listed] == ["1", "2", "4"]  # the key has replaced one of them
    assert [row["msg_id"] for row in listed] == [*answers[:2], answers[3]]


def test_other_calls_of_a_batch_run_one_by_one(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    bodies = [b"{}", b"[", b'{"payload":false}']
    harness.service.published(link, LIST + mail_id, "_INBOX.batch", 0, bodies)
    harness.settle()
    answers = [json.loads(payload) for reply, payload in link.answers if reply == "_INBOX.batch"]
    assert [answer.get("code", 0) for answer in answers] == [0, 400, 0]


@pytest.mark.parametrize("row_bytes_max", [0, 1 << 20], ids=["each", "row"])
def test_a_batch_survives_a_restart_without_its_deleted_messages(
    harness: Harness, row_bytes_max: int
) -> None:
    harness.limit(row_bytes_max=row_bytes_max)
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.service.published(
        link, f"{MSG}{mail_id}.critical", "", 0, [b"%d" % number for number in range(5)]
    )
    harness.settle()
    numbers = [row["msg_id"] for row in harness.request(link, LIST + mail_id)["messages"]]
    assert harness.request(link, f"{DELETE}{mail_id}.{numbers[2]}") == {"deleted": True}
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert [(got.msg_id, got.payload) for got in link.got] == [
        (number, b"%d" % place) for place, number in enumerate(numbers) if place != 2
    ]


def test_a_payload_cannot_pass_for_a_record(harness: Harness) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.service.close()
    assert harness.folder is not None
    frames = log_files(harness.folder)[0].read_bytes()
    harness.service = harness.opened()
    forged = frames.replace(frames[:4], b"\0\0\0\0")  # the sender does not know the folder's secret
    harness.send(link, mail_id, forged + b"BREAK", "critical")
    harness.service.close()
    path = log_files(harness.folder)[-1]
    path.write_bytes(path.read_bytes().replace(b"BREAK", b"BROKE"))
    harness.service = harness.opened()
    stats = harness.service.stats()
    assert (stats["mailboxes"], stats["messages"], stats["bytes"]) == (1, 0, MAILBOX_COST_BYTES)


def test_compaction_keeps_records_that_are_not_synced_yet(harness: Harness) -> None:
    harness.limit(log=COMPACTS_AT_ONCE)
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    harness.reopen()
    harness.service.published(link, f"{MSG}{mail_id}.critical", "", 0, [b"on its way"])
    harness.service.flush()
    harness.service.tick()
    for _ in range(4):
        harness.tick()
    assert harness.folder is not None
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"on its way"]


def test_segments_with_deletes_stay_while_an_earlier_one_cannot_be_removed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = harness.create(link, ttl=0)
    early = harness.send(link, mail_id, b"deleted before", "critical")
    late = harness.send(link, mail_id, b"deleted after", "critical")
    assert harness.folder is not None
    first = log_files(harness.folder)[0]
    harness.limit(log=SegmentLogLimits(compact_from_bytes=0, compact_factor=0, segment_bytes_max=50))
    harness.request(link, f"{DELETE}{mail_id}.{early}")
    unlink, fails = os.unlink, True

    def stubborn(path: Path) -> None:
        if fails and path == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    monkeypatch.setattr(os, "unlink", stubborn)
    for deleted in (early, late):
        for _ in range(12):
            harness.tick()
        harness.request(link, f"{DELETE}{mail_id}.{deleted}")
    for _ in range(12):
        harness.tick()
    assert first.exists()
    harness.reopen()
    harness.subscribe(link, f"{mail_id}.*")
    assert link.take() == []
    fails = False
    for _ in range(12):
        harness.tick()
    assert not first.exists()


def test_mailbox_survives_stale_records_left_by_a_crashed_compaction(
    harness: Harness,
) -> None:
    link = FakeLink()
    harness.create(link, ttl=5)
    harness.reopen()
    harness.tick(5)
    harness.service.close()
    assert harness.folder is not None
    log_files(harness.folder)[0].unlink()  # the segment with the creation, not that with the end
    harness.service = harness.opened()
    mail_id = harness.create(link, ttl=0)
    harness.reopen()
    harness.send(link, mail_id, b"alive", "critical")
