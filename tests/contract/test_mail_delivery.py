"""Deliveries of `Mail`: sharing in a queue group, and the order for a slow subscriber."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.contracts.mail import LINK_FULL_BYTES, LINK_MESSAGES_MAX
from postroom.core.mail.mq9 import PUBLIC_LIST
from postroom.server.nats.server import NatsServer
from tests.contract.test_mail_limits import BODY, DEAF_RECEIVE_BYTES, MSG, Connect, flood, serve
from tests.mailservice import FakeLink, Harness

DELETE = "$mq9.AI.MAILBOX.DELETE."
WINDOW = 32
SYSTEM_MESSAGES = 24  # of 1 KB, for which both sockets together have room
SLOW_BYTES_MAX = 1 << 20  # bytes that a slow connection may get before a critical message


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    Harness.close_all()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "mail")


def filled(harness: Harness, count: int, word: str = "normal") -> tuple[FakeLink, str]:
    sender = FakeLink()
    mail_id = harness.create(sender, ttl=60)
    if count:
        send_many(harness, sender, mail_id, count, word)
    return sender, mail_id


def send_many(harness: Harness, sender: FakeLink, mail_id: str, count: int, word: str = "normal") -> None:
    harness.service.published(
        sender, f"{MSG}{mail_id}.{word}", "", 0, [b"%d" % number for number in range(count)]
    )
    harness.settle()


def joined(harness: Harness, mail_id: str, ranks: str = "*") -> FakeLink:
    worker = FakeLink()
    assert harness.subscribe(worker, f"{mail_id}.{ranks}", "workers") is None
    return worker


def delete(harness: Harness, link: FakeLink, mail_id: str, msg_id: int) -> None:
    assert harness.request(link, f"{DELETE}{mail_id}.{msg_id}") == {"deleted": True}


# ---- windows of a queue group ------------------------------------------------------------------------


def test_a_member_that_joins_late_gets_a_window_of_work_at_once(harness: Harness) -> None:
    _, mail_id = filled(harness, 200)
    first = joined(harness, mail_id)
    assert len(first.got) == WINDOW
    second = joined(harness, mail_id)
    assert len(first.got) == len(second.got) == WINDOW


def test_a_member_gets_one_more_for_each_message_that_it_deletes(harness: Harness) -> None:
    _, mail_id = filled(harness, 100)
    worker = joined(harness, mail_id)
    for done in range(5):
        delete(harness, worker, mail_id, worker.got[done].msg_id)
    assert worker.payloads() == [b"%d" % number for number in range(WINDOW + 5)]


def test_two_members_that_delete_share_everything(harness: Harness) -> None:
    _, mail_id = filled(harness, 200)
    workers = [joined(harness, mail_id), joined(harness, mail_id)]
    done = [0, 0]
    while sum(done) < 200:
        for place, worker in enumerate(workers):
            if done[place] < len(worker.got):
                delete(harness, worker, mail_id, worker.got[done[place]].msg_id)
                done[place] += 1
    assert done == [100, 100]
    assert len({got.msg_id for worker in workers for got in worker.got}) == 200


def test_letters_go_to_a_member_with_room_and_not_to_a_full_window(harness: Harness) -> None:
    sender, mail_id = filled(harness, WINDOW)
    full = joined(harness, mail_id)
    free = joined(harness, mail_id)
    send_many(harness, sender, mail_id, 10)
    assert (len(full.got), len(free.got)) == (WINDOW, 10)


def test_equal_members_take_turns_when_each_deletes_at_once(harness: Harness) -> None:
    sender, mail_id = filled(harness, 0)
    workers = [joined(harness, mail_id), joined(harness, mail_id)]
    for _ in range(6):
        msg_id = harness.send(sender, mail_id, b"x")
        delete(harness, sender, mail_id, msg_id)
    assert [len(worker.got) for worker in workers] == [3, 3]


def test_an_urgent_message_does_not_wait_for_a_window_of_less_urgent_ones(harness: Harness) -> None:
    sender, mail_id = filled(harness, 2 * WINDOW)
    worker = joined(harness, mail_id)
    delete(harness, worker, mail_id, worker.got[0].msg_id)
    harness.send(sender, mail_id, b"stop", "critical")
    assert worker.payloads()[-1] == b"stop"
    send_many(harness, sender, mail_id, WINDOW, "critical")
    assert len(worker.got) == 1 + 2 * WINDOW  # a window of normal and one of critical messages


def test_member_without_deletes_holds_one_window_of_all_priorities(harness: Harness) -> None:
    sender, mail_id = filled(harness, 2 * WINDOW, "low")
    worker = joined(harness, mail_id)
    for word in ("normal", "high", "critical"):
        send_many(harness, sender, mail_id, 2 * WINDOW, word)
    assert len(worker.got) == WINDOW
    delete(harness, worker, mail_id, worker.got[0].msg_id)
    assert len(worker.got) == 2 * WINDOW  # critical messages no longer wait for less urgent ones


def test_an_expired_message_is_not_a_delete(harness: Harness) -> None:
    sender, mail_id = filled(harness, 0)
    harness.publish(sender, MSG + mail_id, b"short", b"NATS/1.0\r\nmq9-ttl: 5\r\n\r\n")
    send_many(harness, sender, mail_id, 2 * WINDOW)
    worker = joined(harness, mail_id)
    harness.tick(6)
    send_many(harness, sender, mail_id, 2 * WINDOW, "critical")
    assert len(worker.got) == 1 + WINDOW


def test_letters_of_a_lost_member_fill_the_windows_of_the_others(harness: Harness) -> None:
    _, mail_id = filled(harness, 2 * WINDOW)
    lost, other = joined(harness, mail_id), joined(harness, mail_id)
    held = [got.msg_id for got in lost.got]
    own = [got.msg_id for got in other.got]
    for msg_id in own[:10]:
        delete(harness, other, mail_id, msg_id)
    harness.close_link(lost)
    assert [got.msg_id for got in other.got] == own + held[:10]
    for msg_id in own[10:]:
        delete(harness, other, mail_id, msg_id)
    assert [got.msg_id for got in other.got] == own + held


def test_deleted_letters_are_not_redelivered_when_their_member_leaves(harness: Harness) -> None:
    _, mail_id = filled(harness, 3)
    lost, other = joined(harness, mail_id), joined(harness, mail_id)
    delete(harness, other, mail_id, lost.got[1].msg_id)  # by which client does not matter
    harness.close_link(lost)
    assert other.payloads() == [b"0", b"2"]


def test_a_group_tracks_exactly_what_its_connected_members_hold(harness: Harness) -> None:
    _, mail_id = filled(harness, 40)
    lost, other = joined(harness, mail_id), joined(harness, mail_id)
    team = harness.service._subscriptions._subscribers[mail_id].queue_groups["workers"]

    def held(*links: FakeLink) -> dict[int, int]:
        return {got.msg_id: link.number for link in links for got in link.got}

    def known() -> dict[int, int]:
        return {msg_id: number for number, member in team.members.items() for msg_id in member.held}

    assert known() == held(lost, other)
    assert set(team.held) == set(known())
    harness.close_link(lost)
    assert known() == held(other)
    assert set(team.held) == set(known())
    harness.tick(61)
    assert known() == {}
    assert team.held == {}


def test_a_window_is_empty_when_a_mailbox_is_created_again(harness: Harness) -> None:
    sender = FakeLink()
    harness.create(sender, name="jobs", public=True, ttl=60)
    worker = joined(harness, "jobs")
    for _ in range(2):
        send_many(harness, sender, "jobs", 2 * WINDOW)
        assert len(worker.take()) == WINDOW
        harness.tick(61)
        harness.create(sender, name="jobs", public=True, ttl=60)


def test_an_ended_subscription_leaves_no_state(harness: Harness) -> None:
    _, mail_id = filled(harness, 100)
    subscriptions = harness.service._subscriptions
    member, plain, full = joined(harness, mail_id), FakeLink(), FakeLink()
    harness.subscribe(plain, f"{mail_id}.*")
    full.pending_bytes = LINK_FULL_BYTES + 1
    harness.subscribe(full, f"{mail_id}.*")
    for link in (member, plain, full):
        harness.service.unsubscribed(link, "1")
    harness.settle()
    assert not subscriptions._by_link
    assert not subscriptions._subscribers
    assert not subscriptions._backlogs
    full.pending_bytes = 0
    harness.service.drained(full)
    assert full.got == []
    assert len(joined(harness, mail_id).got) == WINDOW  # no member holds anything


def test_member_without_deletes_keeps_one_window_for_any_time(harness: Harness) -> None:
    _, mail_id = filled(harness, 2_000)
    slow = joined(harness, mail_id)
    for _ in range(30):
        harness.tick(1.0)
    assert len(slow.got) == WINDOW
    late = joined(harness, mail_id)
    assert len(late.got) == WINDOW
    delete(harness, slow, mail_id, slow.got[0].msg_id)
    harness.tick(1.0)
    assert (len(slow.got), len(late.got)) == (WINDOW + 1, WINDOW)


def test_a_group_continues_after_a_full_connection(harness: Harness) -> None:
    _, mail_id = filled(harness, 2 * WINDOW)
    worker = FakeLink()
    worker.pending_bytes = LINK_FULL_BYTES
    harness.subscribe(worker, f"{mail_id}.*", "workers")
    assert worker.got == []
    worker.pending_bytes = 0
    harness.tick()
    assert len(worker.got) == WINDOW


@pytest.mark.parametrize(("window", "expected"), [(0, 100), (5, 5)])
def test_the_window_is_a_setting(tmp_path: Path, window: int, expected: int) -> None:
    harness = Harness(tmp_path, group_window=window)
    _, mail_id = filled(harness, 100)
    assert len(joined(harness, mail_id).got) == expected


def test_members_get_the_priorities_of_their_subscriptions(harness: Harness) -> None:
    sender, mail_id = filled(harness, 2 * WINDOW)
    urgent = joined(harness, mail_id, "urgent")
    assert urgent.got == []
    harness.send(sender, mail_id, b"now", "urgent")
    assert urgent.payloads() == [b"now"]
    assert len(joined(harness, mail_id, "normal").got) == WINDOW


# ---- what goes first to a connection that has much waiting -------------------------------------------


def test_a_critical_message_overtakes_the_backlog_of_a_live_subscriber(harness: Harness) -> None:
    sender, mail_id = filled(harness, 0)
    slow = FakeLink()
    harness.subscribe(slow, f"{mail_id}.*")
    slow.pending_bytes = LINK_FULL_BYTES + 1
    for number in range(200):
        harness.publish(sender, f"{MSG}{mail_id}", b"%d" % number)
    harness.send(sender, mail_id, b"stop", "critical")
    harness.send(sender, mail_id, b"soon", "urgent")
    assert slow.got == []
    assert slow.is_asked_to_notify
    slow.pending_bytes = 0
    harness.service.drained(slow)
    harness.settle()
    assert slow.payloads() == [b"stop", b"soon", *(b"%d" % number for number in range(200))]
    harness.send(sender, mail_id, b"live")
    assert slow.payloads()[-1] == b"live"


def test_critical_message_overtakes_backlogs_of_other_subscriptions(
    harness: Harness,
) -> None:
    sender, first = filled(harness, 50)
    second, third = harness.create(sender, ttl=60), harness.create(sender, ttl=60)
    slow = FakeLink()
    slow.pending_bytes = LINK_FULL_BYTES + 1
    harness.subscribe(slow, f"{first}.*", sid="1")
    harness.subscribe(slow, f"{second}.*", sid="2")
    harness.subscribe(slow, f"{third}.*", "workers", sid="3")
    harness.send(sender, second, b"stop", "critical")
    harness.send(sender, third, b"job", "critical")
    slow.pending_bytes = 0
    harness.service.drained(slow)
    harness.settle()
    assert sorted(slow.payloads()[:2]) == [b"job", b"stop"]
    assert len(slow.got) == 52


def test_an_interrupted_replay_continues_when_the_connection_has_drained(harness: Harness) -> None:
    harness.limit(replay_step=10)
    _, mail_id = filled(harness, 35)
    link = FakeLink()
    harness.service.subscribed(link, "1", f"{MSG}{mail_id}.*", "")
    link.pending_bytes = LINK_FULL_BYTES + 1
    harness.settle()
    assert 0 < len(link.got) < 35
    link.pending_bytes = 0
    harness.service.drained(link)
    harness.settle()
    assert link.payloads() == [b"%d" % number for number in range(35)]


def test_a_message_deleted_in_the_backlog_is_not_delivered(harness: Harness) -> None:
    sender, mail_id = filled(harness, 0)
    slow = FakeLink()
    harness.subscribe(slow, f"{mail_id}.*")
    slow.pending_bytes = LINK_FULL_BYTES + 1
    ids = [harness.send(sender, mail_id, b"%d" % number) for number in range(3)]
    delete(harness, sender, mail_id, ids[1])
    slow.pending_bytes = 0
    harness.tick()
    assert slow.payloads() == [b"0", b"2"]


def test_a_slow_connection_has_little_before_a_critical_message(tmp_path: Path) -> None:
    async def work(_server: NatsServer, connect: Connect) -> None:
        sender, slow = await connect(), await connect(DEAF_RECEIVE_BYTES)
        mail_id = (await sender.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        slow.send(f"SUB {MSG}{mail_id}.* 1\r\nPING\r\n".encode())
        await slow.until(b"PONG\r\n")
        await flood(sender, mail_id)
        await sender.ask(f"{MSG}{mail_id}.critical", b"stop")
        before = 0
        while await slow.message() == BODY:
            before += len(BODY)
        assert before < SLOW_BYTES_MAX

    serve(tmp_path, work)


def test_stalled_connection_holds_32_messages_before_a_critical_one(tmp_path: Path) -> None:
    async def work(server: NatsServer, connect: Connect) -> None:
        sender = await connect()
        mail_id = (await sender.ask("$mq9.AI.MAILBOX.CREATE"))["mail_id"]
        others = set(server.connections)
        slow = await connect(DEAF_RECEIVE_BYTES)
        [link] = server.connections - others
        slow.send(f"SUB {MSG}{mail_id}.* 1\r\nPING\r\n".encode())
        await slow.until(b"PONG\r\n")
        slow.stop_reading()
        for _ in range(200):
            await sender.ask(f"{MSG}{mail_id}", b"x" * 1_000)
        await sender.ask(f"{MSG}{mail_id}.critical", b"stop")
        assert link.output._messages <= LINK_MESSAGES_MAX
        slow.read_on()
        before = 0
        while await slow.message() != b"stop":
            before += 1
        assert before <= LINK_MESSAGES_MAX + SYSTEM_MESSAGES

    serve(tmp_path, work)


# ---- the public list ---------------------------------------------------------------------------


class Window(FakeLink):
    """A connection that counts everything delivered since the last drain as waiting."""

    def deliver(self, sid: str, subject: str, reply: str, messages: list[tuple[bytes, bytes]]) -> None:
        super().deliver(sid, subject, reply, messages)
        self.pending_bytes += sum(len(payload) for _, payload in messages)

    def drain(self, harness: Harness) -> list[tuple[str, str]]:
        """The deliveries so far; from here on the connection has room."""
        self.pending_bytes = 0
        said = [json.loads(payload) for payload in self.take()]
        harness.service.drained(self)
        return [(each["event"], each["mail_id"]) for each in said]


def listed(harness: Harness, count: int, **facts: Any) -> FakeLink:
    """Public mailboxes with long descriptions."""
    owner = FakeLink()
    for number in range(count):
        harness.create(owner, public=True, name=f"box.{number}", desc="x" * 4_000, **facts)
    return owner


def test_the_public_list_is_sent_as_the_connection_drains(harness: Harness) -> None:
    listed(harness, 100)
    link, found = Window(), []
    assert harness.service.subscribed(link, "1", PUBLIC_LIST, "") is None
    while link.got:
        assert link.pending_bytes <= LINK_FULL_BYTES + 5_000
        found += link.drain(harness)
    assert found == [("created", f"box.{number}") for number in range(100)]


def test_changes_during_the_public_list_are_announced_once(harness: Harness) -> None:
    owner = listed(harness, 50, ttl=60)
    harness.clock.advance(30)
    for number in range(50, 100):
        harness.create(owner, public=True, name=f"box.{number}", desc="x" * 4_000, ttl=60)
    link, found = Window(), []
    harness.service.subscribed(link, "1", PUBLIC_LIST, "")
    sent = len(link.got)
    assert 0 < sent < 50
    harness.create(owner, public=True, name="late", ttl=60)
    harness.tick(30)  # the first fifty end
    while link.got:
        found += link.drain(harness)
    first = [("created", f"box.{number}") for number in range(sent)]
    ended = [("expired", f"box.{number}") for number in range(sent)]
    rest = [("created", f"box.{number}") for number in range(50, 100)]
    assert found == [*first, *ended, *rest, ("created", "late")]
    harness.create(owner, public=True, name="live", ttl=60)
    assert link.drain(harness) == [("created", "live")]


def test_long_public_list_yields_turns_and_ends_with_its_subscription(harness: Harness) -> None:
    harness.limit(entries_a_turn_max=10)
    listed(harness, 35)
    link = FakeLink()
    harness.service.subscribed(link, "1", PUBLIC_LIST, "")
    counts = [len(link.got)]
    for _ in range(2):
        harness.soon.get_nowait()()
        counts.append(len(link.got))
    assert counts == [10, 20, 30]
    harness.service.unsubscribed(link, "1")
    harness.settle()
    assert len(link.got) == 30
    assert not harness.service._subscriptions._public_list._positions
