"""Mailboxes against a model of a few lists: any calls, restarts and crashes in any order.

A crash is a copy of the folder at that moment, opened by another service. Everything that was acknowledged as
durable by then has to be in the copy.
"""

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from postroom.contracts.mail.options import MailLimits
from postroom.logs.mail_log import SegmentLogLimits
from tests.mailservice import CREATE, MSG, FakeLink, Harness
from tests.quick import QUICK

EXAMPLES = settings().max_examples
STEPS = 40
NAMES = ["a", "b.c"]
WORDS = ["critical", "urgent", "high", "normal", "low"]
RANKS = {"critical": 0, "urgent": 1, "high": 1, "normal": 2, "low": 3}
DURABLE = {"critical", "urgent", "high"}  # whatever the option `normal` says
FILTERS = {"*": {0, 1, 2, 3}, "critical": {0}, "urgent": {1}, "normal": {2}, "low": {3}}
TEAMS = ["", "t", "u"]

names = st.sampled_from(NAMES)
choices = st.integers(0, 1_000_000)


class Message:
    """A message as the model knows it."""

    def __init__(self, msg_id: int, word: str) -> None:
        self.msg_id = msg_id
        self.word = word
        self.order = (RANKS[word], msg_id)


class Mailboxes(RuleBasedStateMachine):
    NORMAL = "memory"
    SERVICE_LIMITS = MailLimits()

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="mail-model-", dir=QUICK))
        self.folders = 0
        self.harness = Harness(self.top / "0", normal=self.NORMAL, limits=self.SERVICE_LIMITS)
        self.caller = FakeLink()
        self.now = 0.0
        self.ends: dict[str, float] = {}
        self.stored: dict[str, list[Message]] = {name: [] for name in NAMES}
        self.acked: dict[str, set[int]] = {name: set() for name in NAMES}
        self.plain: list[tuple[FakeLink, str, set[int], list[int]]] = []
        self.members: list[tuple[FakeLink, str, str, set[int]]] = []

    def teardown(self) -> None:
        Harness.close_all()
        shutil.rmtree(self.top)

    # ---- the model's own words -----------------------------------------------------------------

    def lives(self, name: str) -> bool:
        return self.now < self.ends.get(name, 0.0)

    def ordered(self, name: str, ranks: set[int]) -> list[Message]:
        found = [message for message in self.stored[name] if message.order[0] in ranks]
        return sorted(found, key=lambda message: message.order)

    def forget_links(self) -> None:
        self.plain.clear()
        self.members.clear()
        self.caller = FakeLink()

    def lose_memory(self) -> None:
        for name in NAMES if self.NORMAL == "memory" else ():
            self.stored[name] = [message for message in self.stored[name] if message.word in DURABLE]

    # ---- calls ---------------------------------------------------------------------------------

    @rule(name=names, ttl=st.sampled_from([3, 10, 1_000]))
    def create(self, name: str, ttl: int) -> None:
        body = json.dumps({"name": name, "public": True, "ttl": ttl}).encode()
        reply = self.harness.request(self.caller, CREATE, body)
        assert reply["is_new"] is not self.lives(name)
        if not self.lives(name):
            self.ends[name] = self.now + ttl
            self.stored[name] = []
            self.acked[name] = set()

    @rule(name=names, word=st.sampled_from(WORDS))
    def send(self, name: str, word: str) -> None:
        reply = self.harness.request(self.caller, f"{MSG}{name}.{word}", b"x")
        assert ("error" in reply) is not self.lives(name)
        if not self.lives(name):
            return
        assert reply["msg_id"] > self.newest(name)
        self.keep(name, reply["msg_id"], word)

    def newest(self, name: str) -> int:
        return max((message.msg_id for message in self.stored[name]), default=0)

    def keep(self, name: str, msg_id: int, word: str) -> None:
        message = Message(msg_id, word)
        self.stored[name].append(message)
        for _, where, ranks, expected in self.plain:
            if where == name and message.order[0] in ranks:
                expected.append(message.msg_id)

    @rule(name=names, word=st.sampled_from(WORDS), count=st.integers(2, 5))
    def send_many(self, name: str, word: str, count: int) -> None:
        """Send several messages without waiting for answers; their ids are read from a list."""
        self.harness.service.published(self.caller, f"{MSG}{name}.{word}", "", 0, [b"x"] * count)
        self.harness.settle()
        if self.lives(name):
            rows = self.harness.request(self.caller, f"$mq9.AI.MAILBOX.LIST.{name}")["messages"]
            newest = self.newest(name)
            fresh = sorted(row["msg_id"] for row in rows if row["msg_id"] > newest)
            assert len(fresh) == count
            for msg_id in fresh:
                self.keep(name, msg_id, word)

    @rule(name=names, choice=choices)
    def delete(self, name: str, choice: int) -> None:
        stored = self.stored[name]
        msg_id = stored[choice % len(stored)].msg_id if stored else 1
        reply = self.harness.request(self.caller, f"$mq9.AI.MAILBOX.DELETE.{name}.{msg_id}")
        if self.lives(name):
            assert reply["deleted"] is bool(stored)
            self.stored[name] = [message for message in stored if message.msg_id != msg_id]
        else:
            assert "error" in reply

    @rule(name=names, kind=st.sampled_from(sorted(FILTERS)), team=st.sampled_from(TEAMS))
    def subscribe(self, name: str, kind: str, team: str) -> None:
        link = FakeLink()
        refusal = self.harness.subscribe(link, f"{name}.{kind}", team)
        assert (refusal is None) is self.lives(name)
        if refusal is not None:
            return
        if team:
            self.members.append((link, name, team, FILTERS[kind]))
        else:
            replay = [message.msg_id for message in self.ordered(name, FILTERS[kind])]
            assert [got.msg_id for got in link.got] == replay
            self.plain.append((link, name, FILTERS[kind], replay))

    @precondition(lambda self: self.members or self.plain)
    @rule(choice=choices)
    def lose(self, choice: int) -> None:
        everybody = [*self.members, *self.plain]
        link = everybody[choice % len(everybody)][0]
        self.harness.close_link(link)
        self.members = [member for member in self.members if member[0] is not link]
        self.plain = [listener for listener in self.plain if listener[0] is not link]

    @rule(name=names, limit=st.integers(1, 4), choice=choices)
    def fetch_and_acknowledge(self, name: str, limit: int, choice: int) -> None:
        body = {"group_name": "g", "deliver": "earliest", "config": {"num_msgs": limit, "max_wait_ms": 0}}
        reply = self.harness.request(self.caller, f"$mq9.AI.MSG.FETCH.{name}", json.dumps(body).encode())
        if not self.lives(name):
            assert reply["code"] in {404, 410}
            return
        new = [
            message for message in self.ordered(name, {0, 1, 2, 3}) if message.msg_id not in self.acked[name]
        ]
        ids = [message["msg_id"] for message in reply["messages"]]
        assert ids == [message.msg_id for message in new[:limit]]
        assert all(base64.b64decode(message["payload"]) == b"x" for message in reply["messages"])
        if ids:
            last = choice % len(ids)
            body = {"group_name": "g", "mail_address": name, "msg_id": ids[last]}
            answer = self.harness.request(self.caller, f"$mq9.AI.MSG.ACK.{name}", json.dumps(body).encode())
            assert answer == {"error": ""}
            self.acked[name].update(ids[: last + 1])

    # ---- time and trouble ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 600.0]), ticks=st.booleans())
    def wait(self, seconds: float, ticks: bool) -> None:
        self.harness.clock.advance(seconds)
        self.now += seconds
        if ticks:
            self.harness.tick()
        for name in NAMES:
            if not self.lives(name):
                self.stored[name] = []

    @rule()
    def restart(self) -> None:
        self.harness.reopen()
        self.forget_links()
        self.lose_memory()

    @rule()
    def crash(self) -> None:
        self.folders += 1
        folder = self.top / str(self.folders)
        shutil.copytree(self.top / str(self.folders - 1), folder)
        before = self.harness
        self.harness = Harness(folder, normal=self.NORMAL, limits=self.SERVICE_LIMITS)
        self.harness.service.close()
        self.harness.clock = before.clock
        self.harness.service = self.harness.opened()
        self.forget_links()
        self.lose_memory()

    # ---- what always holds ---------------------------------------------------------------------

    @invariant()
    def plain_listeners_got_everything_once_in_order(self) -> None:
        for link, _, _, expected in self.plain:
            assert [got.msg_id for got in link.got] == expected

    @invariant()
    def every_message_is_with_one_living_member_of_each_team(self) -> None:
        for name in NAMES:
            for team in TEAMS[1:]:
                members = [member for member in self.members if member[1:3] == (name, team)]
                held: list[int] = [got.msg_id for member in members for got in member[0].got]
                alive = {message.msg_id for message in self.stored[name]}
                wanted = set().union(*[ranks for *_, ranks in members])
                assert len(held) == len(set(held))
                assert {message.msg_id for message in self.ordered(name, wanted)} <= set(held) & alive

    @invariant()
    def the_list_is_what_is_stored(self) -> None:
        for name in NAMES:
            reply: Any = self.harness.request(self.caller, f"$mq9.AI.MAILBOX.LIST.{name}")
            if self.lives(name):
                listed = [message["msg_id"] for message in reply["messages"]]
                assert listed == [message.msg_id for message in self.ordered(name, {0, 1, 2, 3})]
            else:
                assert reply["code"] in {404, 410}


class SmallSteps(Mailboxes):
    """The same with limits so small that segments end, are copied, and replays come in pieces.

    Normal messages survive a restart here.
    """

    NORMAL = "os"
    SERVICE_LIMITS = MailLimits(
        replay_step=2,
        log=SegmentLogLimits(
            segment_bytes_max=300, compact_from_bytes=500, compact_factor=0, compact_step_records=2
        ),
    )


TestMailboxes = Mailboxes.TestCase
TestMailboxes.settings = settings(max_examples=max(1, EXAMPLES // 4), stateful_step_count=STEPS)
TestSmallSteps = SmallSteps.TestCase
TestSmallSteps.settings = settings(max_examples=max(1, EXAMPLES // 4), stateful_step_count=STEPS)
