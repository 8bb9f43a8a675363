"""`Queue` against a small model in memory: step by step, and with several workers at the same time."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom import TOPICS, Queue
from postroom.contracts import queue as contract
from postroom.nudges.watch import Watch
from tests import children
from tests.children import no_child_left
from tests.quick import QUICK

EXAMPLES = settings().max_examples
AGENTS = ["a", "b", "c"]
THRESHOLD_BYTES = 16

__all__ = ["no_child_left"]  # a fixture

agents = st.sampled_from(AGENTS)
topics = st.sampled_from(sorted(TOPICS))
filters = st.sets(topics, min_size=1)
recipients = st.sampled_from([None, "all", "broadcast", *AGENTS])
limits = st.sampled_from([None, None, 0, 1, 2])
lives = st.sampled_from([None, None, 0, 0.5, 1, 5])
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=THRESHOLD_BYTES * 2),
    st.sampled_from(["", "@file:x", "x" * 5000]),
)
garbage = st.sampled_from([b"no json", b"\xff\x00", b"", b"{}", b'{"msg_id":"half', b"  "])


# ---- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    msg_id: str
    topic: str
    to: str | None
    body: str
    at: datetime
    ttl_s: float | None
    reply_to: str | None = None

    def is_for(self, agent: str) -> bool:
        return self.to in (None, "all", "broadcast", agent)

    def is_live(self, now: datetime) -> bool:
        return self.ttl_s is None or now < self.at + timedelta(seconds=self.ttl_s)


@dataclass
class Model:
    """The messages sent, and those that each agent has read."""

    now: datetime = datetime(2026, 6, 10, tzinfo=UTC)
    lines: list[Sent | bytes] = field(default_factory=list)
    torn: bytes = b""
    through: dict[str, set[str]] = field(default_factory=lambda: {agent: set() for agent in AGENTS})

    @property
    def sent(self) -> list[Sent]:
        return [line for line in self.lines if isinstance(line, Sent)]

    def add(self, message: Sent) -> None:
        if self.torn:
            self.lines.append(self.torn)  # the unfinished line of a dead writer was ended
            self.torn = b""
        self.lines.append(message)

    def poll(self, agent: str, wanted: set[str] | None, limit: int | None, *, keep: bool) -> list[Sent]:
        found: list[Sent] = []
        for message in self.unread(agent):
            if limit is not None and len(found) >= limit:
                break
            chosen = wanted is None or message.topic in wanted
            if chosen or not keep:
                self.through[agent].add(message.msg_id)
            if chosen and message.is_for(agent) and message.is_live(self.now):
                found.append(message)
        return found

    def unread(self, agent: str) -> list[Sent]:
        return [message for message in self.sent if message.msg_id not in self.through[agent]]

    def is_empty(self, agent: str) -> bool:
        return not any(m.is_for(agent) and m.is_live(self.now) for m in self.unread(agent))

    def expire(self) -> int:
        live = [line for line in self.lines if isinstance(line, bytes) or line.is_live(self.now)]
        dropped = len(self.lines) - len(live)
        self.lines = live
        return dropped

    def tail(self, n: int, *, include_expired: bool) -> list[Sent]:
        shown = [message for message in self.sent if include_expired or message.is_live(self.now)]
        return shown[-n:] if n else []


class AnsweringWatch(Watch):
    """An agent that waits for an answer gets one, after the other operations."""

    machine: "QueueMachine"

    def wait(self, _: float) -> bool:
        self.machine.answer()
        return True


class QueueMachine(RuleBasedStateMachine):
    """Every call returns the result of the model."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="queue-model-", dir=QUICK))
        self.model = Model()
        self.queue, self.other = self.opened(), self.opened()
        self.received: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self.answers: list[Callable[[], None]] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(contract, "Watch", type("TheWatch", (AnsweringWatch,), {"machine": self}))

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        self.patch.undo()
        for agent in AGENTS:  # kept messages are still there
            self.poll_all(agent)
            assert self.queue.inbox(agent)["empty"]
        report = self.queue.check()
        assert not report.bodies
        assert not report.cursors
        assert not report.unused_bodies
        self.queue.close()
        self.other.close()
        shutil.rmtree(self.folder)

    def opened(self) -> Queue:
        return Queue(self.folder, body_threshold=THRESHOLD_BYTES, clock=lambda: self.model.now)

    @property
    def messages(self) -> Path:
        return self.folder / "sessions" / "default" / "messages.jsonl"

    # ---- sending

    @rule(topic=topics, to=recipients, body=texts, ttl_s=lives)
    def send(self, topic: str, to: str | None, body: str, ttl_s: float | None) -> None:
        self.do_send(topic, to, body, ttl_s)

    def do_send(
        self, topic: str, to: str | None, body: str, ttl_s: float | None = None, reply_to: str | None = None
    ) -> str:
        msg_id = self.queue.send(topic, body, to, ttl_s, reply_to=reply_to)
        self.model.add(Sent(msg_id, topic, to, body, self.model.now, ttl_s, reply_to))
        return msg_id

    @precondition(lambda self: not self.model.torn)
    @rule(line=garbage)
    def somebody_writes_garbage(self, line: bytes) -> None:
        self.write_raw(line + b"\n")
        self.model.lines.append(line)

    @precondition(lambda self: not self.model.torn)
    @rule(line=st.sampled_from([b"no json", b'{"msg_id":"half']))
    def a_writer_dies_in_the_middle_of_its_line(self, line: bytes) -> None:
        self.write_raw(line)
        self.model.torn = line

    def write_raw(self, data: bytes) -> None:
        self.messages.parent.mkdir(parents=True, exist_ok=True)
        with self.messages.open("ab") as file:
            file.write(data)

    # ---- receiving

    @rule(agent=agents)
    def poll_all(self, agent: str) -> None:
        self.compare(agent, self.queue.poll(agent), self.model.poll(agent, None, None, keep=False))
        assert self.queue.inbox(agent)["empty"]

    @rule(agent=agents, wanted=st.none() | filters, limit=limits)
    def poll_some_and_eat_the_rest(self, agent: str, wanted: set[str] | None, limit: int | None) -> None:
        expected = self.model.poll(agent, wanted, limit, keep=False)
        self.compare(agent, self.queue.poll(agent, wanted, limit=limit), expected)

    @rule(agent=agents, wanted=filters, limit=limits)
    def poll_some_and_keep_the_rest(self, agent: str, wanted: set[str], limit: int | None) -> None:
        expected = self.model.poll(agent, wanted, limit, keep=True)
        self.compare(agent, self.queue.poll(agent, wanted, keep_filtered=True, limit=limit), expected)

    def compare(self, agent: str, found: list[Any], expected: list[Sent]) -> None:
        assert as_seen(found) == as_seen(expected)
        self.received[agent] += [message["msg_id"] for message in found]

    @rule(agent=agents, to=agents, ttl_s=lives)
    def ask_in_vain(self, agent: str, to: str, ttl_s: float | None) -> None:
        assert self.queue.ask("?", to, sender=agent, timeout_s=0, ttl_s=ttl_s) is None
        self.note_the_question(to, ttl_s)

    @rule(
        agent=agents,
        to=agents,
        noise=topics,
        body=texts,
        ttl_s=st.sampled_from([None, 1, 5]),
        n=st.integers(1, 2),
    )
    def ask(self, agent: str, to: str, noise: str, body: str, ttl_s: float | None, n: int) -> None:
        def reply() -> None:
            question = self.note_the_question(to, None)
            self.do_send(noise, agent, "meanwhile")
            for _ in range(n):
                self.do_send("answer", agent, body, ttl_s, question)

        self.answers.append(reply)
        found = self.queue.ask("?", to, sender=agent, timeout_s=60)
        assert found is not None
        asked = found["in_reply_to"]
        first = next(message for message in self.model.sent if message.reply_to == asked)
        self.compare(agent, [found], [first])
        self.model.through[agent].add(first.msg_id)

    def note_the_question(self, to: str, ttl_s: float | None) -> str:
        question = self.queue.tail(1, include_expired=True)[0]["msg_id"]
        self.model.add(Sent(question, "ask", to, "?", self.model.now, ttl_s))
        return question

    def answer(self) -> None:
        self.queue, self.other = self.other, self.queue
        for reply in self.answers:
            reply()
        self.answers.clear()
        self.queue, self.other = self.other, self.queue

    # ---- looking and keeping

    @rule(n=st.integers(0, 6), include_expired=st.booleans())
    def tail(self, n: int, include_expired: bool) -> None:
        found = self.queue.tail(n, include_expired=include_expired)
        assert as_seen(found) == as_seen(self.model.tail(n, include_expired=include_expired))

    @rule()
    def expire(self) -> None:
        assert self.queue.expire("default") == self.model.expire()

    @rule()
    def status(self) -> None:
        counts = self.queue.status("default")
        assert counts["messages"] == len(self.model.lines)
        assert counts["unreadable"] == len(self.model.lines) - len(self.model.sent)
        assert counts["expired"] == sum(not message.is_live(self.model.now) for message in self.model.sent)
        assert sum(counts["by_topic"].values()) == len(self.model.sent)

    @rule(agent=agents)
    def inbox(self, agent: str) -> None:
        proof = self.queue.inbox(agent)
        assert 0 <= proof["cursor"] <= proof["high_water"]
        assert proof["empty"] == self.model.is_empty(agent)

    # ---- time and processes

    @rule(seconds=st.sampled_from([0.5, 1, 5, -1]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += timedelta(seconds=seconds)

    @rule(how=st.sampled_from(["close", "reopen", "another"]))
    def reopen(self, how: Literal["close", "reopen", "another"]) -> None:
        if how == "close":
            self.queue.close()
            self.queue = self.opened()
        elif how == "reopen":
            self.queue.reopen()
        else:
            self.queue, self.other = self.other, self.queue

    @invariant()
    def nothing_is_delivered_twice(self) -> None:
        for agent, ids in getattr(self, "received", {}).items():
            assert len(set(ids)) == len(ids), f"{agent} got a message twice"

    @invariant()
    def the_file_is_what_was_written(self) -> None:
        if not hasattr(self, "model") or not self.messages.exists():
            return
        *lines, torn = self.messages.read_bytes().split(b"\n")
        assert torn == self.model.torn
        assert len(lines) == len(self.model.lines)
        for line, expected in zip(lines, self.model.lines, strict=True):
            if isinstance(expected, bytes):
                assert line == expected
            else:
                assert json.loads(line)["msg_id"] == expected.msg_id


def as_seen(messages: list[Any]) -> list[tuple[str, str, str]]:
    return [
        (message.msg_id, message.topic, message.body)
        if isinstance(message, Sent)
        else (message["msg_id"], message["topic"], message["body"])
        for message in messages
    ]


TestQueueModel = QueueMachine.TestCase
TestQueueModel.settings = settings(max_examples=max(10, EXAMPLES // 2), stateful_step_count=30)


# ---- at the same time --------------------------------------------------------------------------------

WORKERS = 3
POOL = "pool"  # several workers poll under this name, and share the messages

steps = st.one_of(
    st.tuples(st.just("send"), topics, st.sampled_from([None, "w0", "w1", "w2", POOL]), st.integers(0, 40)),
    st.tuples(st.just("send-expired"), topics, st.integers(0, 40)),
    st.tuples(st.just("poll")),
    st.tuples(st.just("poll-one")),
    st.tuples(st.just("keep"), filters),
    st.tuples(st.just("pool")),
    st.tuples(st.just("expire")),
    st.tuples(st.just("reopen")),
)
programs = st.lists(st.lists(steps, min_size=5, max_size=15), min_size=WORKERS, max_size=WORKERS)


class History:
    """The operations of one worker, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str | None]] = []
        self.got: list[list[str]] = []
        self.pooled: list[str] = []


def work(queue: Queue, number: int, program: list[Any], history: History) -> None:
    me = f"w{number}"
    for step in program:
        match step:
            case ("send", topic, to, size):
                history.sent.append((queue.send(topic, "x" * size, to, sender=me), to))
            case ("send-expired", topic, size):
                queue.send(topic, "x" * size, ttl_s=0, sender=me)
            case ("poll",):
                history.got.append(ids(queue.poll(me)))
            case ("poll-one",):
                history.got.append(ids(queue.poll(me, limit=1)))
            case ("keep", wanted):
                history.got.append(ids(queue.poll(me, wanted, keep_filtered=True)))
            case ("pool",):
                history.pooled += ids(queue.poll(POOL))
            case ("expire",):
                queue.expire()
            case ("reopen",):
                queue.close()


def ids(messages: list[Any]) -> list[str]:
    return [message["msg_id"] for message in messages]


def judge(root: Path, histories: list[History]) -> None:
    """Every message is in the file in its sender's order, and every agent got its messages once."""
    with Queue(root) as queue:
        place = {msg_id: index for index, msg_id in enumerate(ids(queue.tail(10_000)))}
        sent = [entry for history in histories for entry in history.sent]
        assert set(place) == {msg_id for msg_id, _ in sent}
        for history in histories:
            positions = [place[msg_id] for msg_id, _ in history.sent]
            assert positions == sorted(positions)
        for number, history in enumerate(histories):
            handed_out = [*history.got, ids(queue.poll(f"w{number}"))]
            assert all([place[m] for m in part] == sorted(place[m] for m in part) for part in handed_out)
            check_once(f"w{number}", [m for part in handed_out for m in part], sent)
        check_once(POOL, [m for h in histories for m in h.pooled] + ids(queue.poll(POOL)), sent)
        assert queue.expire() >= 0
        assert queue.check().ok


def check_once(agent: str, got: list[str], sent: list[tuple[str, str | None]]) -> None:
    assert sorted(got) == sorted(msg_id for msg_id, to in sent if to in (None, agent))


@settings(max_examples=max(10, EXAMPLES // 5))
@given(programs=programs, shared=st.booleans())
def test_threads_lose_duplicate_and_reorder_nothing(programs: list[Any], shared: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="queue-threads-", dir=QUICK) as folder:
        root = Path(folder)
        one = Queue(root, body_threshold=THRESHOLD_BYTES)
        queues = [one if shared else Queue(root, body_threshold=THRESHOLD_BYTES) for _ in programs]
        histories = [History() for _ in programs]
        failures: list[BaseException] = []
        together = threading.Barrier(len(programs))

        def run(number: int) -> None:
            try:
                together.wait()
                work(queues[number], number, programs[number], histories[number])
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for queue in {one, *queues}:
            queue.close()
        if failures:
            raise failures[0]
        judge(root, histories)


@pytest.mark.usefixtures("no_child_left")
@settings(max_examples=max(10, EXAMPLES // 10))
@given(programs=programs, inherited=st.booleans())
def test_processes_lose_duplicate_and_reorder_nothing(programs: list[Any], inherited: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="queue-processes-", dir=QUICK) as folder:
        root = Path(folder, "root")
        parent = Queue(root, body_threshold=THRESHOLD_BYTES)
        if inherited:
            parent.expire()
            parent.status("default")
            parent.poll("parent")  # its files are open when the children are forked

        def job(number: int) -> Callable[[], None]:
            def run() -> None:
                history = History()
                queue = parent if inherited else Queue(root, body_threshold=THRESHOLD_BYTES)
                work(queue, number, programs[number], history)
                Path(folder, f"history-{number}").write_text(json.dumps(vars(history)))

            return run

        children.run(*[job(number) for number in range(len(programs))])
        parent.close()
        histories = []
        for number in range(len(programs)):
            history = History()
            vars(history).update(json.loads(Path(folder, f"history-{number}").read_text()))
            histories.append(history)
        judge(root, histories)
        assert not [name for name in os.listdir(root) if name.endswith(".tmp")]
