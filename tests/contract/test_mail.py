"""What `Mail` promises: the mq9 design sentence by sentence, in every dialect, through the room's seam."""

import base64
import errno
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.contracts.mail import LINK_FULL_BYTES, agents, mailboxes, recovery, subscriptions
from postroom.contracts.mail.mailboxes import hashed
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import MAILBOX_COST_BYTES, cost_of
from postroom.errors import LockTimeout
from postroom.logs import mail_log
from tests.faultydisk import FaultyDisk
from tests.mailrooms import CREATE, HANG_GUARD_S, MSG, FakeLink, Rooms

PUBLIC = "$mq9.AI.PUBLIC.LIST"
LIST = "$mq9.AI.MAILBOX.LIST."
DELETE = "$mq9.AI.MAILBOX.DELETE."
NEWEST = "$mq9.AI.MSG."
SDK = "robustmq-mq9-python"


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    Rooms.close_all()


@pytest.fixture
def rooms(tmp_path: Path) -> Rooms:
    return Rooms(tmp_path / "mail")


def said(link: FakeLink) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in link.take()]


def fetch(rooms: Rooms, link: FakeLink, mail_id: str, **body: Any) -> list[bytes]:
    config = {"num_msgs": body.pop("num_msgs", 100), "max_wait_ms": 0}
    reply = rooms.request(link, f"{NEWEST}FETCH.{mail_id}", json.dumps({**body, "config": config}).encode())
    assert reply["error"] == "", reply
    return [base64.b64decode(message["payload"]) for message in reply["messages"]]


def fetch_ids(rooms: Rooms, link: FakeLink, mail_id: str, **body: Any) -> list[int]:
    config = {"num_msgs": body.pop("num_msgs", 100), "max_wait_ms": 0}
    reply = rooms.request(link, f"{NEWEST}FETCH.{mail_id}", json.dumps({**body, "config": config}).encode())
    return [message["msg_id"] for message in reply["messages"]]


def ack(rooms: Rooms, link: FakeLink, mail_id: str, group: str, msg_id: int) -> Any:
    body = {"group_name": group, "mail_address": mail_id, "msg_id": msg_id}
    return rooms.request(link, f"{NEWEST}ACK.{mail_id}", json.dumps(body).encode())


def headed(**headers: str) -> bytes:
    lines = "".join(f"mq9-{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


# ---- kinds of mailboxes ------------------------------------------------------------------------


def test_a_private_id_is_a_random_uuid_made_by_the_server(rooms: Rooms) -> None:
    link = FakeLink()
    ids = [rooms.create(link, ttl=60) for _ in range(20)]
    assert len(set(ids)) == 20
    for mail_id in ids:
        made = uuid.UUID(mail_id)
        assert (str(made), made.version, made.variant) == (mail_id, 4, uuid.RFC_4122)


def test_a_public_mailbox_has_the_name_that_its_user_chose(rooms: Rooms) -> None:
    assert rooms.create(FakeLink(), ttl=60, public=True, name="task.queue") == "task.queue"


def test_a_success_has_both_names_of_the_id_and_no_error_key(rooms: Rooms) -> None:
    reply = rooms.request(FakeLink(), CREATE, b'{"ttl": 60, "public": true, "name": "a", "new": 1}')
    assert reply == {"mail_id": "a", "mail_address": "a", "is_new": True}


def test_an_empty_body_creates_a_private_mailbox(rooms: Rooms) -> None:
    assert rooms.request(FakeLink(), CREATE)["is_new"]


@pytest.mark.parametrize("body", [b'{"name": "mine"}', b'{"name": "mine", "public": false, "ttl": 60}'])
def test_a_private_mailbox_cannot_be_named(rooms: Rooms, body: bytes) -> None:
    assert rooms.request(FakeLink(), CREATE, body)["code"] == 400
    assert rooms.room.stats()["mailboxes"] == 0


def test_a_public_name_that_is_the_id_of_a_private_mailbox_is_a_conflict(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link)
    body = json.dumps({"public": True, "name": mail_id}).encode()
    assert rooms.request(link, CREATE, body)["code"] == 409


def test_a_prefix_stands_before_the_random_part(rooms: Rooms) -> None:
    assert rooms.create(FakeLink(), prefix="team.a").startswith("team.a.")


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
def test_a_bad_creation_is_answered_with_code_400(rooms: Rooms, body: bytes) -> None:
    reply = rooms.request(FakeLink(), CREATE, body)
    assert reply["code"] == 400
    assert reply["error"]


def test_names_with_a_dash_or_upper_case_are_allowed(rooms: Rooms) -> None:
    assert rooms.create(FakeLink(), public=True, name="Demo.multi-agent_x") == "Demo.multi-agent_x"


# ---- priorities --------------------------------------------------------------------------------


def test_replay_is_critical_then_urgent_then_normal_and_in_order_inside_each(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    words = ["", "critical", "urgent", "normal", "low", "high", "critical", ""]
    for place, word in enumerate(words):
        rooms.send(link, mail_id, f"{word or 'normal'}{place}".encode(), word)
    rooms.subscribe(link, f"{mail_id}.*")
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
    rooms: Rooms, rest: str, expected: list[bytes]
) -> None:
    link, live = FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.subscribe(live, mail_id + rest)
    for word in ["critical", "urgent", "high", "", "low"]:
        rooms.send(link, mail_id, (word or "n")[:1].encode(), word)
    rooms.subscribe(link, mail_id + rest)
    assert link.payloads() == expected
    assert sorted(live.payloads()) == sorted(expected)


def test_normal_messages_are_lost_with_the_server_where_memory_is_chosen(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    for word in ["critical", "urgent", "high", "normal", "low"]:
        rooms.send(link, mail_id, word.encode(), word)
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"critical", b"urgent", b"high"]


@pytest.mark.parametrize("options", [{}, {"normal": "os"}, {"normal": "group"}], ids=str)
def test_every_message_that_has_an_id_survives_a_restart(tmp_path: Path, options: dict[str, str]) -> None:
    rooms = Rooms(tmp_path, **options)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    for word in ["low", "normal", "critical"]:
        rooms.send(link, mail_id, word.encode(), word)
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"critical", b"normal", b"low"]


def test_without_a_folder_everything_works_and_nothing_is_kept() -> None:
    rooms = Rooms(None)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.send(link, mail_id, b"c", "critical")
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"c"]
    rooms.reopen()
    assert rooms.subscribe(link, f"{mail_id}.*") is not None


# ---- store first -------------------------------------------------------------------------------


def test_a_critical_message_is_neither_pushed_nor_answered_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = Rooms(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.subscribe(link, f"{mail_id}.*")
    disk = FaultyDisk(monkeypatch)
    disk.hold()
    link.answers.clear()
    rooms.room.published(link, f"{MSG}{mail_id}.critical", "_INBOX.a", 0, [b"first"])
    rooms.room.flush()
    disk.entered.wait()
    assert (link.got, link.answers) == ([], [])
    other = FakeLink()
    rooms.room.published(other, CREATE, "", 0, [b'{"name":"other","public":true}'])
    rooms.room.subscribed(other, "1", f"{MSG}other.*", "")
    rooms.room.published(link, f"{MSG}other", "_INBOX.b", 0, [b"normal needs no disk"])
    assert other.payloads() == [b"normal needs no disk"]
    disk.gate.set()
    rooms.settle()
    assert link.payloads() == [b"first"]
    assert [reply for reply, _ in link.answers] == ["_INBOX.b", "_INBOX.a"]


def test_who_waits_for_no_answer_still_sees_what_it_sent_in_order(rooms: Rooms) -> None:
    link, early, late = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.subscribe(early, f"{mail_id}.*")
    link.answers.clear()
    for word in ["low", "normal", "urgent", "normal", "critical"]:  # all in one turn of the loop
        rooms.room.published(link, f"{MSG}{mail_id}.{word}", "", 0, [word.encode()])
    rooms.room.subscribed(late, "1", f"{MSG}{mail_id}.*", "")
    rooms.room.published(link, LIST + mail_id, "_INBOX.l", 0, [b"{}"])
    rooms.settle()
    assert early.payloads() == [b"low", b"normal", b"urgent", b"normal", b"critical"]
    assert late.payloads() == [b"critical", b"urgent", b"normal", b"normal", b"low"]
    assert len(rooms.answer_of(link, "_INBOX.l")["messages"]) == 5


def eighty_wait_for_one_fsync(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    """And a turn of the loop tells as few of them as it may."""
    monkeypatch.setattr(mail_log, "TASKS_TURN_S", 0.0)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    link.answers.clear()
    for number in range(80):
        rooms.room.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.{number}", 0, [b""])
    rooms.room.flush()
    return link


def test_all_who_waited_for_one_fsync_are_told_in_bounded_pieces_and_in_order(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = eighty_wait_for_one_fsync(rooms, monkeypatch)
    turns = []
    while len(link.answers) < 80:
        rooms.soon.get(timeout=HANG_GUARD_S)()
        turns.append(len(link.answers))
    assert turns[0] == 80 // mail_log.TASKS_SHARE
    assert turns == sorted(turns)
    assert [reply for reply, _ in link.answers] == [f"_INBOX.{number}" for number in range(80)]


def test_who_waited_for_the_disk_is_told_when_the_room_closes(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = eighty_wait_for_one_fsync(rooms, monkeypatch)
    rooms.soon.get(timeout=HANG_GUARD_S)()
    rooms.room.close()
    assert [reply for reply, _ in link.answers] == [f"_INBOX.{number}" for number in range(80)]


def test_messages_wait_while_nobody_listens_and_all_come_at_once(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    for number in range(5):
        rooms.publish(link, f"{MSG}{mail_id}", str(number).encode())
    late = FakeLink()
    rooms.subscribe(late, mail_id)
    rooms.publish(link, f"{MSG}{mail_id}", b"live")
    assert late.payloads() == [b"0", b"1", b"2", b"3", b"4", b"live"]


def test_every_subscription_gets_everything_and_so_does_the_same_one_again(rooms: Rooms) -> None:
    link, other = FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.send(link, mail_id, b"x")
    rooms.subscribe(link, mail_id)
    rooms.subscribe(other, mail_id)
    rooms.room.unsubscribed(link, "1")
    rooms.publish(other, f"{MSG}{mail_id}", b"y")
    rooms.subscribe(link, mail_id)
    assert link.payloads() == [b"x", b"x", b"y"]
    assert other.payloads() == [b"x", b"y"]


def test_a_long_replay_is_fed_in_pieces_and_what_is_more_urgent_comes_first(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "REPLAY_STEP", 10)
    link, late = FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    ids = [rooms.send(link, mail_id, str(number).encode()) for number in range(35)]
    late.pending_bytes = LINK_FULL_BYTES + 1
    rooms.subscribe(late, f"{mail_id}.*")
    assert late.got == []
    rooms.send(link, mail_id, b"new and urgent", "urgent")
    rooms.request(link, f"{DELETE}{mail_id}.{ids[20]}")
    late.pending_bytes = 0
    rooms.room.drained(late)
    assert 0 < len(late.got) <= 10
    rooms.settle()
    expected = [str(number).encode() for number in range(35) if number != 20]
    assert late.payloads() == [b"new and urgent", *expected]


def test_a_paused_replay_goes_on_with_a_tick_when_nobody_says_so(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.send(link, mail_id, b"x")
    link.pending_bytes = LINK_FULL_BYTES + 1
    rooms.subscribe(link, mail_id)
    link.pending_bytes = 0
    rooms.tick()
    assert link.payloads() == [b"x"]


# ---- lifetime ----------------------------------------------------------------------------------


def test_a_mailbox_ends_with_its_time_and_its_messages_with_it(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=10)
    rooms.send(link, mail_id, b"x", "critical")
    rooms.clock.advance(9.5)
    assert len(rooms.request(link, LIST + mail_id)["messages"]) == 1
    rooms.clock.advance(0.5)
    assert rooms.request(link, f"{MSG}{mail_id}", b"late")["code"] == 410
    assert rooms.subscribe(link, mail_id) is not None
    rooms.tick()
    rooms.reopen()
    assert rooms.request(link, LIST + mail_id)["code"] in {404, 410}
    assert rooms.room.stats()["messages"] == 0


def test_zero_is_for_ever_and_nothing_said_is_a_day(rooms: Rooms) -> None:
    link = FakeLink()
    ever, day = rooms.create(link, ttl=0), rooms.create(link)
    rooms.tick(86_399)
    assert "error" not in rooms.request(link, LIST + day)
    rooms.tick(1)
    rooms.reopen()
    assert "error" in rooms.request(link, LIST + day)
    assert "error" not in rooms.request(link, LIST + ever)


def test_a_second_create_succeeds_and_changes_nothing(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, ttl=10, public=True, name="q", desc="first")
    rooms.send(link, "q", b"x")
    rooms.clock.advance(6)
    again = rooms.request(link, CREATE, b'{"ttl":1000,"public":true,"name":"q","desc":"second"}')
    assert again == {"mail_id": "q", "mail_address": "q", "is_new": False}
    assert len(rooms.request(link, LIST + "q")["messages"]) == 1
    rooms.room.subscribed(link, "5", PUBLIC, "")
    assert said(link) == [{"event": "created", "mail_id": "q", "desc": "first", "ttl": 10}]
    rooms.clock.advance(4)
    assert rooms.request(link, LIST + "q")["code"] == 410


def test_the_remaining_time_survives_a_restart_and_counts_on_while_the_server_is_down(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id, short = rooms.create(link, ttl=100), rooms.create(link, ttl=30)
    rooms.clock.advance(20)
    rooms.room.close()
    rooms.clock.advance(20)
    rooms.clock.reboot()
    rooms.room = rooms.opened()
    assert rooms.request(link, LIST + short)["code"] in {404, 410}
    rooms.clock.advance(59)
    assert "error" not in rooms.request(link, LIST + mail_id)
    rooms.clock.advance(1)
    assert rooms.request(link, LIST + mail_id)["code"] == 410


def test_setting_the_wall_clock_ends_nothing_and_prolongs_nothing_over_a_restart(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=100)
    rooms.clock.step_wall(10_000)
    assert "error" not in rooms.request(link, LIST + mail_id)
    rooms.clock.step_wall(-100_000)
    rooms.reopen()
    rooms.clock.advance(100)
    assert rooms.request(link, LIST + mail_id)["code"] == 410


def test_what_has_expired_stays_so_when_the_clock_is_set_back_over_a_restart(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=100)
    rooms.tick(100)
    rooms.clock.step_wall(-50)
    rooms.reopen()
    assert rooms.request(link, LIST + mail_id)["code"] == 404


def test_a_name_created_again_after_its_end_starts_empty_with_new_message_ids(rooms: Rooms) -> None:
    link, worker = FakeLink(), FakeLink()
    rooms.create(link, ttl=10, public=True, name="q")
    first = rooms.send(link, "q", b"old", "critical")
    rooms.subscribe(worker, "q.*", "workers")
    rooms.tick(10)
    assert rooms.create(link, ttl=10, public=True, name="q") == "q"
    assert rooms.request(link, LIST + "q")["messages"] == []
    second = rooms.send(link, "q", b"new", "critical")
    assert second > first
    assert worker.payloads() == [b"old", b"new"]  # who listens to a name goes on listening
    rooms.reopen()
    assert [item["msg_id"] for item in rooms.request(link, LIST + "q")["messages"]] == [second]
    assert rooms.send(link, "q", b"after a restart") > second


def test_ten_thousand_mailboxes_end_in_bounded_pieces(rooms: Rooms) -> None:
    link = FakeLink()
    for _ in range(10_000):
        rooms.room.published(link, CREATE, "", 0, [b'{"ttl":5}'])
    rooms.settle()
    rooms.clock.advance(5)
    rooms.room.tick()
    left = rooms.room.stats()["mailboxes"]
    assert left == 10_000 - mailboxes.DEADLINES_A_TURN_MAX
    rooms.settle()
    assert rooms.room.stats()["mailboxes"] == 0


# ---- discovery ---------------------------------------------------------------------------------


def test_the_public_list_tells_what_is_there_then_what_comes_and_goes(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, ttl=50, public=True, name="vision.results", desc="images")
    rooms.create(link, ttl=50)
    rooms.room.subscribed(link, "7", PUBLIC, "")
    assert said(link) == [{"event": "created", "mail_id": "vision.results", "desc": "images", "ttl": 50}]
    rooms.create(link, ttl=9, public=True, name="task.queue")
    assert said(link) == [{"event": "created", "mail_id": "task.queue", "desc": "", "ttl": 9}]
    rooms.tick(9)
    assert said(link) == [{"event": "expired", "mail_id": "task.queue"}]
    rooms.room.unsubscribed(link, "7")
    rooms.tick(60)
    assert link.got == []


def test_nobody_can_write_to_the_public_list(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.room.subscribed(link, "7", PUBLIC, "")
    assert rooms.request(link, PUBLIC, b'{"event":"created"}')["code"] == 403
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
def test_no_wildcard_and_no_foreign_subject_can_be_subscribed_to(rooms: Rooms, subject: str) -> None:
    spy, link = FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    assert rooms.room.owns(subject)
    assert rooms.room.subscribed(spy, "1", subject, "") is not None
    rooms.send(link, mail_id, b"secret")
    assert spy.got == []


@pytest.mark.parametrize("mail_id", ["*", ">", "a.*", "nobody", ""])
def test_a_send_to_nowhere_is_refused_and_stores_nothing(rooms: Rooms, mail_id: str) -> None:
    link = FakeLink()
    rooms.publish(link, MSG + mail_id, b"x")
    assert link.answers == []
    assert rooms.request(link, MSG + mail_id, b"x")["code"] in {403, 404}
    assert rooms.room.stats()["messages"] == 0
    assert rooms.kinds() == ["rejected", "rejected"]


def test_a_private_id_appears_in_no_event_no_refusal_and_no_strangers_answer(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, receipts=True, dead_letter_after=1, quota_messages=3)
    link, other, spy = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(link, ttl=60)
    rooms.room.subscribed(spy, "1", PUBLIC, "")
    for word in ["", "critical", "urgent", "high"]:
        rooms.publish(link, f"{MSG}{mail_id}.{word}".rstrip("."), b"secret body")
    rooms.subscribe(other, f"{mail_id}.*", "workers")
    rooms.close_link(other)
    fetch(rooms, link, mail_id, group_name="g", deliver="earliest")
    rooms.request(link, f"{DELETE}{mail_id}.x")
    rooms.request(link, CREATE, json.dumps({"name": mail_id, "public": True}).encode())
    rooms.request(spy, "$mq9.AI.AGENT.DISCOVER", b"{}")
    rooms.tick(61)
    refusal = rooms.subscribe(link, mail_id)
    shown = f"{rooms.events} {spy.got} {spy.answers} {refusal} {rooms.room.stats()}"
    assert {"created", "delivered", "dead_letter", "rejected", "expired"} <= set(rooms.kinds())
    assert mail_id not in shown
    assert "secret body" not in shown
    assert hashed(mail_id) in shown


def test_errors_name_no_mailbox(rooms: Rooms) -> None:
    link = FakeLink()
    secret = "0d9c2b2e-secret"  # noqa: S105
    asked = [f"{MSG}{secret}", LIST + secret, f"{DELETE}{secret}.1", f"{NEWEST}FETCH.{secret}"]
    asked += [f"{NEWEST}QUERY.{secret}", f"$mq9.AI.MAILBOX.EXTEND.{secret}"]
    for subject in asked:
        assert secret not in json.dumps(rooms.request(link, subject, b"{}"))


# ---- groups ------------------------------------------------------------------------------------


def test_each_message_goes_to_one_member_and_all_share_the_work(rooms: Rooms) -> None:
    sender, workers = FakeLink(), [FakeLink(), FakeLink(), FakeLink()]
    mail_id = rooms.create(sender, ttl=60)
    for worker in workers:
        rooms.subscribe(worker, f"{mail_id}.*", "workers")
    sent = [str(number).encode() for number in range(30)]
    for payload in sent:
        rooms.publish(sender, f"{MSG}{mail_id}", payload)
    got = [worker.payloads() for worker in workers]
    assert sorted(payload for part in got for payload in part) == sorted(sent)
    assert [len(part) for part in got] == [10, 10, 10]


def test_groups_and_plain_subscribers_do_not_take_from_each_other(rooms: Rooms) -> None:
    sender, one, two, plain = FakeLink(), FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(sender, ttl=60)
    rooms.subscribe(one, f"{mail_id}.*", "a")
    rooms.subscribe(two, f"{mail_id}.*", "b")
    rooms.subscribe(plain, f"{mail_id}.*")
    rooms.publish(sender, f"{MSG}{mail_id}", b"x")
    assert one.payloads() == two.payloads() == plain.payloads() == [b"x"]


def test_a_member_that_joins_gets_only_what_nobody_holds(rooms: Rooms) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(sender, ttl=60)
    rooms.send(sender, mail_id, b"c", "critical")
    rooms.send(sender, mail_id, b"n")
    rooms.subscribe(one, f"{mail_id}.critical", "w")
    rooms.subscribe(two, f"{mail_id}.*", "w")
    assert one.payloads() == [b"c"]
    assert two.payloads() == [b"n"]


@pytest.mark.parametrize("how", ["closed", "unsubscribed"])
def test_what_a_lost_member_did_not_delete_goes_to_the_others_in_order(rooms: Rooms, how: str) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(sender, ttl=60)
    for word in ["", "urgent", "critical", ""]:
        rooms.send(sender, mail_id, (word or "n").encode(), word)
    rooms.subscribe(one, f"{mail_id}.*", "w")
    rooms.subscribe(two, f"{mail_id}.*", "w")
    done = one.got[0].msg_id
    assert rooms.request(one, f"{DELETE}{mail_id}.{done}") == {"deleted": True}
    assert two.got == []
    if how == "closed":
        rooms.close_link(one)
    else:
        rooms.room.unsubscribed(one, "1")
    assert two.payloads() == [b"urgent", b"n", b"n"]


def test_when_the_last_member_is_gone_the_next_gets_everything_undeleted(rooms: Rooms) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(sender, ttl=60)
    rooms.send(sender, mail_id, b"a")
    rooms.send(sender, mail_id, b"b")
    rooms.subscribe(one, f"{mail_id}.*", "w")
    rooms.request(one, f"{DELETE}{mail_id}.{one.got[0].msg_id}")
    rooms.close_link(one)
    rooms.subscribe(two, f"{mail_id}.*", "w")
    assert two.payloads() == [b"b"]


def test_a_member_is_a_connection_whatever_the_number_of_its_subscriptions(rooms: Rooms) -> None:
    sender, one, two = FakeLink(), FakeLink(), FakeLink()
    mail_id = rooms.create(sender, ttl=60)
    rooms.subscribe(one, f"{mail_id}.*", "w", sid="1")
    rooms.subscribe(one, f"{mail_id}.*", "w", sid="2")
    rooms.send(sender, mail_id, b"x")
    assert len(one.got) == 1
    rooms.subscribe(two, f"{mail_id}.*", "w")
    rooms.room.unsubscribed(one, one.got[0].sid)
    assert two.got == []  # it still lives, and still holds it
    rooms.close_link(one)
    assert two.payloads() == [b"x"]


# ---- delete and list ---------------------------------------------------------------------------


def test_delete_says_whether_there_was_something(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    msg_id = rooms.send(link, mail_id, b"x", "critical")
    assert rooms.request(link, f"{DELETE}{mail_id}.{msg_id}", b"{}") == {"deleted": True}
    assert rooms.request(link, f"{DELETE}{mail_id}.{msg_id}", b"{}") == {"deleted": False}
    assert rooms.request(link, f"{DELETE}{mail_id}.{msg_id + 1}", b"{}") == {"deleted": False}
    assert rooms.request(link, f"{DELETE}{mail_id}.x")["code"] == 400
    assert rooms.request(link, f"{DELETE}{mail_id}.")["code"] == 400
    assert rooms.request(link, f"{DELETE}nobody.1")["code"] == 404
    rooms.reopen()
    assert rooms.request(link, LIST + mail_id)["messages"] == []


def test_list_holds_what_each_dialect_looks_for_in_its_own_words(rooms: Rooms) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = rooms.create(link, ttl=60)
    first = rooms.send(link, mail_id, b"a\xff", "urgent")
    raw = rooms.request(link, LIST + mail_id)
    assert raw["mail_id"] == mail_id
    assert raw["messages"][0]["msg_id"] == first
    assert raw["messages"][0]["priority"] == "urgent"
    assert raw["messages"][0]["payload"] == "a\ufffd"
    assert raw["messages"][0]["ts"] == raw["messages"][0]["create_time"] == rooms.clock.wall_us() // 1_000_000
    message = rooms.request(sdk, LIST + mail_id, b"{}")["messages"][0]
    assert (message["msg_id"], message["priority"]) == (str(first), "high")


def test_list_is_bounded(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    for _ in range(1_001):
        rooms.room.published(link, f"{MSG}{mail_id}", "", 0, [b"x"])
    assert len(rooms.request(link, LIST + mail_id)["messages"]) == 1_000


def test_a_list_with_payloads_ends_where_a_reply_is_full_and_one_without_goes_on(rooms: Rooms) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = rooms.create(link, ttl=60)
    numbers = [rooms.send(link, mail_id, b"x" * (replies.REPLY_BYTES_MAX // 2)) for _ in range(5)]
    assert len(rooms.request(link, LIST + mail_id)["messages"]) == 2
    rows = rooms.request(link, LIST + mail_id, b'{"payload":false}')["messages"]
    assert [row["msg_id"] for row in rows] == numbers
    assert "payload" not in rows[0]
    assert len(rooms.request(sdk, LIST + mail_id, b"{}")["messages"]) == 5


# ---- how a message looks -----------------------------------------------------------------------


def test_a_raw_client_gets_the_senders_bytes_and_headers_and_the_id_in_a_header(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    headers = b"NATS/1.0\r\nTrace: 1\r\nmq9-Msg-ID: 666\r\n\r\n"
    msg_id = rooms.request(link, f"{MSG}{mail_id}.normal", b'{"msg_id": 9}', headers)["msg_id"]
    rooms.subscribe(link, f"{mail_id}.*")
    expected = f"NATS/1.0\r\nMq9-Msg-Id: {msg_id}\r\nTrace: 1\r\n\r\n".encode()
    assert link.got[0].subject == MSG + mail_id
    assert (link.got[0].headers, link.got[0].payload) == (expected, b'{"msg_id": 9}')


def test_a_client_without_headers_finds_the_id_in_the_reply_subject_which_deletes(rooms: Rooms) -> None:
    link, plain = FakeLink(), FakeLink(headers=False)
    mail_id = rooms.create(link, ttl=60)
    stored = rooms.send(link, mail_id, b"0", "urgent")
    rooms.subscribe(plain, f"{mail_id}.*")
    rooms.room.published(link, MSG + mail_id, "", 0, [b"1", b"2"])
    rooms.settle()
    assert plain.payloads() == [b"0", b"1", b"2"]
    assert plain.got[0].reply == f"{DELETE}{mail_id}.{stored}"
    ids = [int(got.reply.rpartition(".")[2]) for got in plain.got]
    assert [row["msg_id"] for row in rooms.request(link, LIST + mail_id)["messages"]] == ids
    for got in plain.got:
        rooms.publish(plain, got.reply)
    assert rooms.room.stats()["messages"] == 0


def test_a_refusal_tells_the_events_which_client_it_was(rooms: Rooms) -> None:
    link = FakeLink(name="worker-7")
    rooms.request(link, f"{MSG}nobody", b"x")
    rooms.subscribe(link, "nobody.*")
    details = [fields["detail"] for kind, fields in rooms.events if kind == "rejected"]
    assert details == [{"client": "worker-7", "address": link.address}] * 2


@pytest.mark.parametrize(
    ("word", "seen"), [("critical", "high"), ("urgent", "high"), ("", "normal"), ("low", "low")]
)
@pytest.mark.parametrize("payload", [b"", b"\x80abc", b'{"msg_id": 1}'])
def test_the_sdk_gets_an_envelope_in_its_own_words(
    rooms: Rooms, word: str, seen: str, payload: bytes
) -> None:
    link, sdk = FakeLink(), FakeLink(SDK)
    mail_id = rooms.create(link, ttl=60)
    msg_id = rooms.send(link, mail_id, payload, word)
    rooms.subscribe(sdk, f"{mail_id}.*")
    envelope = json.loads(sdk.got[0].payload)
    assert sdk.got[0].subject == f"{MSG}{mail_id}.{seen}"
    assert (envelope["msg_id"], envelope["priority"]) == (str(msg_id), seen)
    assert envelope["payload"]  # an empty one would be taken for none
    assert base64.b64decode(envelope["payload"]) == payload


@pytest.mark.parametrize(("mode", "name", "enveloped"), [("always", "", True), ("never", SDK, False)])
def test_the_envelope_can_be_forced(mode: str, name: str, enveloped: bool) -> None:
    rooms = Rooms(None, envelope=mode)
    link = FakeLink(name)
    mail_id = rooms.create(link, ttl=60)
    rooms.send(link, mail_id, b"x")
    rooms.subscribe(link, mail_id)
    assert (link.payloads() != [b"x"]) is enveloped


# ---- the newest dialect ------------------------------------------------------------------------


def test_send_fetch_ack_in_priority_order(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    for priority in ["normal", "urgent", "critical"]:
        reply = rooms.request(link, f"{NEWEST}SEND.q", priority.encode(), headed(priority=priority))
        assert reply["error"] == ""
    ids = fetch_ids(rooms, link, "q", group_name="g", deliver="earliest")
    assert fetch(rooms, link, "q", group_name="g") == [b"critical", b"urgent", b"normal"]
    assert ack(rooms, link, "q", "g", ids[-1]) == {"error": ""}  # the last of a batch is for the whole batch
    assert fetch(rooms, link, "q", group_name="g") == []
    rooms.request(link, f"{NEWEST}SEND.q", b"late", headed(priority="critical"))
    assert fetch(rooms, link, "q", group_name="g") == [b"late"]
    assert fetch(rooms, link, "q", group_name="other", deliver="earliest") == [
        b"critical",
        b"late",
        b"urgent",
        b"normal",
    ]


def test_an_acknowledgement_neither_skips_what_was_not_fetched_nor_repeats_what_was(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    normal = [rooms.send(link, "q", f"n{number}".encode()) for number in range(4)]
    assert fetch_ids(rooms, link, "q", group_name="g", deliver="earliest", num_msgs=2) == normal[:2]
    critical = rooms.send(link, "q", b"c", "critical")
    ack(rooms, link, "q", "g", normal[1])
    assert fetch_ids(rooms, link, "q", group_name="g") == [critical, *normal[2:]]
    ack(rooms, link, "q", "g", critical)
    ack(rooms, link, "q", "g", normal[0])  # late and again: nothing moves back
    assert fetch_ids(rooms, link, "q", group_name="g") == normal[2:]


def test_an_acknowledgement_does_not_cover_what_was_fetched_before_and_comes_behind(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    normal = [rooms.send(link, "q", b"n") for _ in range(3)]
    assert fetch_ids(rooms, link, "q", group_name="g", deliver="earliest") == normal
    assert fetch_ids(rooms, link, "q", group_name="g", num_msgs=1) == normal[:1]
    ack(rooms, link, "q", "g", normal[0])
    assert fetch_ids(rooms, link, "q", group_name="g") == normal[1:]
    critical = rooms.send(link, "q", b"c", "critical")
    assert fetch_ids(rooms, link, "q", group_name="g", num_msgs=1) == [critical]
    ack(rooms, link, "q", "g", critical)
    assert fetch_ids(rooms, link, "q", group_name="g") == normal[1:]


def test_two_connections_of_a_group_never_hold_the_same(rooms: Rooms) -> None:
    one, two = FakeLink(), FakeLink()
    rooms.create(one, name="q", public=True)
    sent = [rooms.send(one, "q", b"x") for _ in range(4)]
    assert fetch_ids(rooms, one, "q", group_name="g", deliver="earliest", num_msgs=3) == sent[:3]
    assert fetch_ids(rooms, two, "q", group_name="g") == sent[3:]
    ack(rooms, one, "q", "g", sent[0])
    rooms.close_link(one)
    assert fetch_ids(rooms, two, "q", group_name="g") == sent[1:]


def test_a_groups_place_survives_a_restart(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    sent = [rooms.send(link, "q", b"x", "urgent") for _ in range(4)]
    assert fetch_ids(rooms, link, "q", group_name="late", deliver="latest") == []
    fetch_ids(rooms, link, "q", group_name="g", deliver="earliest", num_msgs=3)
    ack(rooms, link, "q", "g", sent[1])
    rooms.reopen()
    sent.append(rooms.send(link, "q", b"y", "critical"))
    assert fetch_ids(rooms, link, "q", group_name="g") == [sent[4], sent[2], sent[3]]
    assert fetch_ids(rooms, link, "q", group_name="late") == [sent[4]]


def test_where_a_fetch_begins(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    first = rooms.send(link, "q", b"1")
    rooms.clock.advance(100)
    second = rooms.send(link, "q", b"2")
    now_s = rooms.clock.wall_us() // 1_000_000
    assert fetch_ids(rooms, link, "q") == []
    assert fetch_ids(rooms, link, "q", deliver="earliest") == [first, second]
    assert fetch_ids(rooms, link, "q", deliver="from_id", from_id=second) == [second]
    assert fetch_ids(rooms, link, "q", deliver="from_time", from_time=now_s - 50) == [second]
    assert fetch_ids(rooms, link, "q", group_name="g", deliver="latest") == []
    assert fetch_ids(rooms, link, "q", group_name="g", deliver="earliest") == []
    again = fetch_ids(rooms, link, "q", group_name="g", deliver="earliest", force_deliver=True)
    assert again == [first, second]
    rooms.reopen()


def test_a_fetch_waits_for_the_first_message_or_the_end_of_its_time(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    body = json.dumps({"config": {"max_wait_ms": 2_000}}).encode()
    assert rooms.request(link, f"{NEWEST}FETCH.q", body) is None
    rooms.send(link, "q", b"x")
    assert len(json.loads(link.answers[-2][1])["messages"]) == 1
    assert rooms.request(link, f"{NEWEST}FETCH.q", body) is None
    count = len(link.answers)
    rooms.tick(1.9)
    assert len(link.answers) == count
    rooms.tick(0.1)
    assert json.loads(link.answers[-1][1]) == {"error": "", "messages": []}


def test_a_key_keeps_the_newest(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    for priority, payload in [("urgent", b"1"), ("urgent", b"2"), ("normal", b"3"), ("urgent", b"4")]:
        rooms.request(link, f"{NEWEST}SEND.q", payload, headed(key="state", priority=priority))
    rooms.request(link, f"{NEWEST}SEND.q", b"other", headed(key="k2", priority="urgent"))
    assert fetch(rooms, link, "q", deliver="earliest") == [b"4", b"other"]
    rooms.reopen()
    assert fetch(rooms, link, "q", deliver="earliest") == [b"4", b"other"]


@pytest.mark.parametrize("priority", ["normal", "critical"])
def test_a_delayed_message_comes_when_it_is_due(rooms: Rooms, priority: str) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    reply = rooms.request(link, f"{NEWEST}SEND.q", b"later", headed(delay="60", priority=priority))
    assert reply == {"error": "", "msg_id": -1}
    rooms.reopen()
    rooms.subscribe(link, "q.*")
    rooms.tick(59)
    assert link.got == []
    rooms.tick(1)
    assert link.payloads() == [b"later"]
    rooms.reopen()
    rooms.tick(0)
    assert len(rooms.request(link, LIST + "q")["messages"]) == 1


def test_a_messages_own_lifetime(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    rooms.request(link, f"{NEWEST}SEND.q", b"short", headed(ttl="30", priority="urgent"))
    rooms.reopen()
    rooms.clock.advance(30)
    assert fetch(rooms, link, "q", deliver="earliest") == []
    rooms.tick()
    assert rooms.room.stats()["messages"] == 0
    assert rooms.kinds()[-1] == "expired"


def test_query_looks_by_key_tags_and_time_and_takes_nothing(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True, ttl=0)
    rooms.request(link, f"{NEWEST}SEND.q", b"1", headed(key="k", tags="a,b"))
    rooms.clock.advance(10)
    rooms.request(link, f"{NEWEST}SEND.q", b"2", headed(tags="b"))

    def query(**body: Any) -> list[bytes]:
        reply = rooms.request(link, f"{NEWEST}QUERY.q", json.dumps(body).encode())
        return [base64.b64decode(message["payload"]) for message in reply["messages"]]

    assert query() == query() == [b"1", b"2"]
    assert query(key="k") == [b"1"]
    assert query(tags="b,a") == query(tags=["a"]) == [b"1"]
    assert query(since=rooms.clock.wall_us() // 1_000_000 - 5) == [b"2"]
    assert query(limit=1) == [b"1"]


def test_the_newest_delete(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    msg_id = rooms.send(link, "q", b"x")
    assert rooms.request(link, f"{NEWEST}DELETE.q.{msg_id}", b'""') == {"error": "", "deleted": True}


@pytest.mark.parametrize(
    "headers", [headed(priority="soon"), headed(delay="x"), headed(ttl="-1"), headed(key="k" * 2_000)]
)
def test_bad_wishes_are_refused(rooms: Rooms, headers: bytes) -> None:
    link = FakeLink()
    rooms.create(link, name="q", public=True)
    assert rooms.request(link, f"{NEWEST}SEND.q", b"x", headers)["code"] == 400
    assert rooms.room.stats()["messages"] == 0


def test_agents_are_registered_found_by_their_words_and_unregistered(rooms: Rooms) -> None:
    link = FakeLink()

    def agent(verb: str, **body: Any) -> Any:
        return rooms.request(link, f"$mq9.AI.AGENT.{verb}", json.dumps(body).encode())

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
    rooms.reopen()
    assert agent("DISCOVER", text="translation")["agents"][0]["report_info"] == "running"
    assert agent("UNREGISTER", mailbox="t.in") == {"error": ""}
    assert found(text="translation") == []
    rooms.reopen()
    assert found() == ["i"]


def test_a_card_may_hold_anything_and_be_replaced(rooms: Rooms) -> None:
    link = FakeLink()
    mailboxes: list[object] = [[], {"a": []}, 7, None, "box"]
    for mailbox in mailboxes:
        body = json.dumps({"name": "ada", "mailbox": mailbox}).encode()
        assert rooms.request(link, "$mq9.AI.AGENT.REGISTER", body)["error"] == ""
    assert rooms.request(link, "$mq9.AI.AGENT.UNREGISTER", b'{"mailbox":"box"}') == {"error": ""}
    assert rooms.request(link, "$mq9.AI.AGENT.DISCOVER")["agents"] == []


def test_the_cards_of_all_agents_are_bounded(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()

    def register(name: str) -> Any:
        body = json.dumps({"name": name, "text": "x" * 1_000}).encode()
        return rooms.request(link, "$mq9.AI.AGENT.REGISTER", body)

    monkeypatch.setattr(agents, "CARDS_BYTES_MAX", 3 * (2_000 + agents.AGENT_COST_BYTES))
    assert [register(name).get("code") for name in ("a", "b", "c")] == [None, None, 429]
    rooms.reopen()
    assert register("c")["code"] == 429
    rooms.request(link, "$mq9.AI.AGENT.UNREGISTER", b'{"name":"a"}')
    assert register("c")["error"] == ""


def test_an_acknowledgement_of_what_is_not_there_is_not_remembered(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    first, second = rooms.send(link, mail_id, b"1"), rooms.send(link, mail_id, b"2")
    assert fetch_ids(rooms, link, mail_id, group_name="g", deliver="earliest") == [first, second]
    for number in (first, first, 10**9, 2**62, -1):
        assert ack(rooms, link, mail_id, "g", number) == {"error": ""}
    assert rooms.room._shelves.boxes[mail_id].groups["g"].done == set()
    assert fetch_ids(rooms, link, mail_id, group_name="g") == [second]


def test_the_name_of_a_pull_group_is_bounded(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    body = json.dumps({"group_name": "g" * (mq9.NAME_CHARS_MAX + 1)}).encode()
    assert rooms.request(link, f"{NEWEST}FETCH.{mail_id}", body)["code"] == 400


def test_an_unknown_subject_is_answered(rooms: Rooms) -> None:
    for subject in ["$mq9.AI.NOTHING", "$mq9.x", f"{CREATE}.more", "$mq9.AI.MSG.PEEK.q"]:
        assert rooms.request(FakeLink(), subject)["code"] == 400


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
def test_quotas_refuse_with_429_and_count_what_is_under_way(tmp_path: Path, options: dict[str, int]) -> None:
    rooms = Rooms(tmp_path, **options)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    for number in range(3):  # in one batch: the first two are not stored yet when the third comes
        rooms.room.published(link, f"{MSG}{mail_id}.critical", f"_INBOX.q{number}", 0, [b"x"])
    rooms.settle()
    answers = {reply: json.loads(payload) for reply, payload in link.answers}
    assert [answers[f"_INBOX.q{number}"].get("code") for number in range(3)] == [None, None, 429]
    msg_id = answers["_INBOX.q0"]["msg_id"]
    rooms.request(link, f"{DELETE}{mail_id}.{msg_id}")
    rooms.send(link, mail_id, b"x", "critical")


def test_the_number_of_mailboxes_is_bounded() -> None:
    rooms = Rooms(None, mailboxes_max=1)
    rooms.create(FakeLink(), ttl=60)
    assert rooms.request(FakeLink(), CREATE)["code"] == 429


@pytest.mark.parametrize("word", ["", "critical"])
def test_after_enough_failed_deliveries_a_message_goes_to_the_dead_letters(tmp_path: Path, word: str) -> None:
    rooms = Rooms(tmp_path, dead_letter_after=2)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=60)
    msg_id = rooms.send(link, mail_id, b"poison", word)
    for _ in range(2):
        worker = FakeLink()
        rooms.subscribe(worker, f"{mail_id}.*", "w")
        assert worker.payloads() == [b"poison"]
        rooms.close_link(worker)
    assert rooms.request(link, LIST + mail_id)["messages"] == []
    rooms.subscribe(link, f"{mail_id}.dead.*")
    assert link.payloads() == [b"poison"]
    assert b"Mq9-Dead-Msg-Id: %d\r\nMq9-Dead-Deliveries: 2\r\n" % msg_id in link.got[0].headers
    rooms.tick(60)
    assert rooms.room.stats()["mailboxes"] == 0


def test_a_creator_can_give_a_mailbox_more_time_where_that_is_allowed(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, extend=True)
    owner, other, nameless = FakeLink(user="anna"), FakeLink(user="otto"), FakeLink()
    mail_id = rooms.create(owner, ttl=10)
    subject = f"$mq9.AI.MAILBOX.EXTEND.{mail_id}"
    assert rooms.request(other, subject, b'{"ttl":100}')["code"] == 403
    assert rooms.request(nameless, subject, b'{"ttl":100}')["code"] == 403
    assert rooms.request(owner, subject, b'{"ttl":5}')["code"] == 400
    assert rooms.request(FakeLink(user="anna"), subject, b'{"ttl":100}')["ttl"] == 100
    rooms.tick(50)
    rooms.reopen()
    rooms.tick(49)
    assert "error" not in rooms.request(owner, LIST + mail_id)
    rooms.tick(1)
    assert rooms.request(owner, LIST + mail_id)["code"] == 410
    mine = rooms.create(nameless, ttl=10)
    assert rooms.request(FakeLink(), f"$mq9.AI.MAILBOX.EXTEND.{mine}", b'{"ttl":99}')["code"] == 403
    assert rooms.request(nameless, f"$mq9.AI.MAILBOX.EXTEND.{mine}", b'{"ttl":99}')["ttl"] == 99


def test_extending_is_refused_unless_it_was_asked_for(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=10)
    assert rooms.request(link, f"$mq9.AI.MAILBOX.EXTEND.{mail_id}", b'{"ttl":99}')["code"] == 403


def test_deliveries_become_events_only_where_receipts_are_asked_for(tmp_path: Path) -> None:
    for receipts in (False, True):
        rooms = Rooms(tmp_path / str(receipts), receipts=receipts)
        link = FakeLink(user="anna")
        rooms.create(link, public=True, name="q")
        msg_id = rooms.send(link, "q", b"x", "urgent")
        rooms.subscribe(link, "q.*")
        fetch(rooms, link, "q", deliver="earliest")
        rooms.request(link, f"{DELETE}q.{msg_id}")
        delivered = ["delivered", "delivered"] if receipts else []
        assert rooms.kinds() == ["created", "created", *delivered, "deleted"]
        assert rooms.events[1][1]["message_id"] == rooms.events[-1][1]["message_id"] == f"q/{msg_id}"


# ---- the log -----------------------------------------------------------------------------------


def log_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("mail-*.log"), key=lambda path: path.name[-12:])


def test_two_servers_cannot_share_a_folder(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_log, "LOCK_WAIT_S", 0.0)
    with pytest.raises(LockTimeout):
        rooms.opened()


@pytest.mark.parametrize("cut", [1, 5, 12, 40])
def test_a_torn_end_is_skipped_and_kept(rooms: Rooms, cut: int) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.send(link, mail_id, b"whole", "critical")
    rooms.send(link, mail_id, b"torn" * 100, "critical")
    rooms.room.close()
    assert rooms.folder is not None
    path = log_files(rooms.folder)[0]
    os.truncate(path, path.stat().st_size - cut)
    before = path.read_bytes()
    rooms.room = rooms.opened()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"whole"]
    assert path.read_bytes() == before
    assert rooms.kinds()[-1] == "quarantined"


def test_a_damaged_middle_costs_only_itself_and_is_kept_when_the_log_is_compacted(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    for number in range(5):
        rooms.send(link, mail_id, b"message-%d" % number, "critical")
    rooms.room.close()
    assert rooms.folder is not None
    path = log_files(rooms.folder)[0]
    data = bytearray(path.read_bytes())
    data[data.index(b"message-2") + 3] ^= 1
    path.write_bytes(data)
    rooms.room = rooms.opened()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"message-0", b"message-1", b"message-3", b"message-4"]
    monkeypatch.setattr(mail_log, "COMPACT_FROM_BYTES", 0)
    monkeypatch.setattr(mail_log, "COMPACT_FACTOR", 0)
    rooms.tick()
    rooms.tick()
    assert not path.exists()
    assert any(b"essage-2"[:2] in kept.read_bytes() for kept in rooms.folder.glob("*.damaged-*"))
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"message-0", b"message-1", b"message-3", b"message-4"]


def test_compaction_keeps_what_lives_and_shrinks_the_log(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_log, "SEGMENT_BYTES_MAX", 20_000)
    monkeypatch.setattr(mail_log, "COMPACT_FROM_BYTES", 50_000)
    monkeypatch.setattr(mail_log, "COMPACT_STEP_RECORDS", 3)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.request(link, "$mq9.AI.AGENT.REGISTER", b'{"name":"a"}')
    rooms.request(link, f"{NEWEST}SEND.{mail_id}", b"later", headed(delay="50", priority="urgent"))
    kept = [rooms.send(link, mail_id, b"kept-%d" % number, "urgent") for number in range(10)]
    fetch_ids(rooms, link, mail_id, group_name="g", deliver="earliest", num_msgs=4)
    ack(rooms, link, mail_id, "g", kept[3])
    for _ in range(100):
        msg_id = rooms.send(link, mail_id, b"x" * 1_000, "critical")
        rooms.request(link, f"{DELETE}{mail_id}.{msg_id}")
        rooms.tick()
    for _ in range(20):
        rooms.tick()
    assert rooms.folder is not None
    assert sum(path.stat().st_size for path in log_files(rooms.folder)) < 80_000
    rooms.reopen()
    assert fetch_ids(rooms, link, mail_id, group_name="g") == kept[4:]
    assert fetch_ids(rooms, link, mail_id, deliver="earliest") == kept
    assert len(rooms.request(link, "$mq9.AI.AGENT.DISCOVER")["agents"]) == 1
    rooms.tick(50)
    assert fetch(rooms, link, mail_id, deliver="earliest")[-1] == b"later"


def test_after_a_failed_fsync_nothing_is_acknowledged_until_a_new_segment_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = Rooms(tmp_path, normal="memory")
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.subscribe(link, f"{mail_id}.*")
    before = len(log_files(tmp_path))
    disk = FaultyDisk(monkeypatch)
    disk.failing = True
    assert rooms.request(link, f"{MSG}{mail_id}.critical", b"1") is None
    assert rooms.room.trouble
    assert rooms.request(link, f"{MSG}{mail_id}.critical", b"2")["code"] == 503
    assert rooms.request(link, CREATE)["code"] == 503
    assert "error" not in rooms.request(link, f"{MSG}{mail_id}", b"in memory")
    rooms.tick()  # the new segment fails too
    assert rooms.room.trouble
    assert link.take() == [b"in memory"]
    disk.failing = False
    rooms.tick()
    assert not rooms.room.trouble
    assert link.take() == [b"1"]
    assert json.loads(link.answers[-1][1])["msg_id"]
    assert len(log_files(tmp_path)) > before
    assert "alert" in rooms.kinds()
    rooms.send(link, mail_id, b"3", "critical")
    rooms.reopen()
    again = FakeLink()
    rooms.subscribe(again, f"{mail_id}.*")
    assert again.payloads() == [b"1", b"3"]


def test_a_full_disk_refuses_what_is_durable_and_loses_nothing(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.send(link, mail_id, b"before", "urgent")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(mail_log, "write_all", full)
        rooms.room.published(link, f"{MSG}{mail_id}.urgent", "", 0, [b"waits"])  # nobody can be told
        assert rooms.request(link, f"{MSG}{mail_id}.urgent", b"meets it")["code"] == 503
        assert rooms.request(link, f"{MSG}{mail_id}.urgent", b"no")["code"] == 503
        rooms.tick()
        assert rooms.room.trouble
    rooms.tick()
    assert not rooms.room.trouble
    rooms.send(link, mail_id, b"after", "urgent")
    rooms.events.clear()
    rooms.reopen()
    assert rooms.events == []  # the half record that the full disk had taken is gone
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.payloads() == [b"before", b"waits", b"after"]


@pytest.mark.parametrize("word", ["critical", "normal", "low"])
@pytest.mark.parametrize("normal", ["memory", "os", "group"])
@pytest.mark.parametrize("quota", [0, 7])
def test_many_in_a_row_are_the_same_as_each_for_itself(
    tmp_path: Path, word: str, normal: str, quota: int
) -> None:
    payloads = [b"%d" % number for number in range(10)]
    seen = []
    for many in (False, True):
        rooms = Rooms(tmp_path / str(many), normal=normal, quota_messages=quota)
        sender, sdk, *others = FakeLink(), FakeLink(name="robustmq-x"), FakeLink(), FakeLink(), FakeLink()
        mail_id = rooms.create(sender, name="box", public=True, ttl=0)
        for link, team in zip([sdk, *others], ["", "", "g", "g"], strict=True):
            rooms.subscribe(link, f"{mail_id}.*", team)
        subject = f"{MSG}{mail_id}.{word}"
        for batch in (payloads[:5], payloads[5:]):
            if many:
                rooms.room.published(sender, subject, "", 0, batch)
            else:
                for payload in batch:
                    rooms.room.published(sender, subject, "", 0, [payload])
        rooms.settle()
        rooms.publish(sender, f"{MSG}{mail_id}.urgent", b"last")
        rooms.room.published(sender, f"{MSG}nobody", "", 0, [b"1", b"2"])
        listed = rooms.request(sender, f"$mq9.AI.MAILBOX.LIST.{mail_id}")["messages"]
        shown = [(each["msg_id"], each["payload"], each["priority"]) for each in listed]
        got = [[(each.subject, each.msg_id) for each in link.got] for link in (sdk, *others)]
        rooms.reopen()
        again = FakeLink()
        rooms.subscribe(again, f"{mail_id}.*")
        seen.append((shown, got, again.payloads(), rooms.kinds(), rooms.room.stats()))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == (quota or len(payloads) + 1)


@pytest.mark.parametrize("row_bytes_max", [0, 1 << 20], ids=["each", "row"])
def test_many_in_a_row_survive_a_restart_without_those_that_were_deleted(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, row_bytes_max: int
) -> None:
    monkeypatch.setattr(recovery, "ROW_BYTES_MAX", row_bytes_max)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.room.published(link, f"{MSG}{mail_id}.critical", "", 0, [b"%d" % number for number in range(5)])
    rooms.settle()
    numbers = [row["msg_id"] for row in rooms.request(link, LIST + mail_id)["messages"]]
    assert rooms.request(link, f"{DELETE}{mail_id}.{numbers[2]}") == {"deleted": True}
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert [(got.msg_id, got.payload) for got in link.got] == [
        (number, b"%d" % place) for place, number in enumerate(numbers) if place != 2
    ]


def test_a_payload_cannot_pass_for_a_record(rooms: Rooms) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.room.close()
    assert rooms.folder is not None
    frames = log_files(rooms.folder)[0].read_bytes()
    rooms.room = rooms.opened()
    forged = frames.replace(frames[:4], b"\0\0\0\0")  # its sender does not know the folder's secret
    rooms.send(link, mail_id, forged + b"BREAK", "critical")
    rooms.room.close()
    path = log_files(rooms.folder)[-1]
    path.write_bytes(path.read_bytes().replace(b"BREAK", b"BROKE"))
    rooms.room = rooms.opened()
    stats = rooms.room.stats()
    assert (stats["mailboxes"], stats["messages"], stats["bytes"]) == (1, 0, MAILBOX_COST_BYTES)


def test_compaction_does_not_forget_what_is_on_its_way_to_the_disk(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_log, "COMPACT_FROM_BYTES", 0)
    monkeypatch.setattr(mail_log, "COMPACT_FACTOR", 0)
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    rooms.reopen()
    rooms.room.published(link, f"{MSG}{mail_id}.critical", "", 0, [b"on its way"])
    rooms.room.flush()
    rooms.room.tick()
    for _ in range(4):
        rooms.tick()
    assert rooms.folder is not None
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.take() == [b"on its way"]


def test_a_segment_that_cannot_be_removed_keeps_those_that_tell_what_was_deleted(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    mail_id = rooms.create(link, ttl=0)
    early = rooms.send(link, mail_id, b"deleted before", "critical")
    late = rooms.send(link, mail_id, b"deleted after", "critical")
    assert rooms.folder is not None
    first = log_files(rooms.folder)[0]
    rooms.reopen()
    rooms.request(link, f"{DELETE}{mail_id}.{early}")
    unlink = os.unlink

    def stubborn(path: Path) -> None:
        if path == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    monkeypatch.setattr(mail_log, "COMPACT_FROM_BYTES", 0)
    monkeypatch.setattr(mail_log, "COMPACT_FACTOR", 0)
    monkeypatch.setattr(mail_log, "SEGMENT_BYTES_MAX", 50)
    monkeypatch.setattr(os, "unlink", stubborn)
    for deleted in (early, late):
        for _ in range(12):
            rooms.tick()
        rooms.request(link, f"{DELETE}{mail_id}.{deleted}")
    for _ in range(12):
        rooms.tick()
    assert first.exists()
    rooms.reopen()
    rooms.subscribe(link, f"{mail_id}.*")
    assert link.take() == []
    monkeypatch.setattr(os, "unlink", unlink)
    for _ in range(12):
        rooms.tick()
    assert not first.exists()


def test_a_mailbox_is_not_ended_by_what_a_crash_in_compaction_left_of_an_earlier_one(rooms: Rooms) -> None:
    link = FakeLink()
    rooms.create(link, ttl=5)
    rooms.reopen()
    rooms.tick(5)
    rooms.room.close()
    assert rooms.folder is not None
    log_files(rooms.folder)[0].unlink()  # the one with the creation; the one with the end is still there
    rooms.room = rooms.opened()
    mail_id = rooms.create(link, ttl=0)
    rooms.reopen()
    rooms.send(link, mail_id, b"alive", "critical")
