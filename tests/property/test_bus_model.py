"""`Bus` against a small model in memory: after any operations in any order, both hold the same messages.

The model is a list of messages for each file. Two handles stand for two processes. Writers of the original
program, and writers that are killed in the middle of a record, take part.
"""

import contextlib
import fcntl
import itertools
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postroom import Bus, BusMessage, SinceIdNotFound
from postroom.core.formats import buswire, ids
from postroom.core.times import epoch_ns_of
from tests.bustexts import TS, bodies

IDLE_PASSES_MAX = 100
QUIET_ASKS = 20
START = datetime(2026, 2, 5, 14, 30, 52, tzinfo=UTC)
kinds = st.sampled_from(["note", "fact", "no", "a: b"])
tasks = st.sampled_from(["", "t1", "012", "é\n"])
drafts = st.fixed_dictionaries(
    {"type": kinds, "task_id": tasks, "body": bodies}, optional={"run_id": st.sampled_from(["", "r1"])}
)
# A body of conductor-loop, which does not escape: without lines that it would read as a separator.
foreign_bodies = st.text(st.characters(exclude_characters="-", exclude_categories=["Cs"]), max_size=30).map(
    lambda text: "x" + text.rstrip("\n")
)


class Sent(NamedTuple):
    """A message as the model knows it."""

    msg_id: str
    type: str
    task_id: str
    parents: tuple[str, ...]
    body: str
    ts: datetime


class Follower:
    """Reads new messages, and fails instead of waiting forever when none arrives."""

    def __init__(self, bus: Bus, begun_at: int) -> None:
        self.position = begun_at  # among all messages ever
        self.idle = 0
        self.stream: Iterator[BusMessage] = bus.follow(stop=self.gives_up)

    def gives_up(self) -> bool:
        self.idle += 1
        return self.idle > IDLE_PASSES_MAX

    def take(self, count: int) -> list[BusMessage]:
        self.idle = 0
        self.position += count
        return list(itertools.islice(self.stream, count))


def seen(messages: list[BusMessage]) -> list[Sent]:
    return [Sent(m.msg_id, m.type, m.task_id, tuple(m.parents), m.body, m.ts) for m in messages]


class BusMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bus-model-"))
        self.path = self.folder / "bus.yaml"
        self.now = START
        self.archived: list[list[Sent]] = []
        self.current: list[Sent] | None = None
        self.torn = 0
        self.foreign = 0
        self.followers: list[Follower] = []
        self.buses = [self.opened(), self.opened()]

    def opened(self) -> Bus:
        return Bus(self.path, clock=lambda: self.now, poll_interval_s=0.001)

    def teardown(self) -> None:
        self.followers = []
        for bus in self.buses:
            bus.close()
        shutil.rmtree(self.folder)

    # ---- the model ----

    def everything(self) -> list[Sent]:
        return [*itertools.chain.from_iterable(self.archived), *(self.current or [])]

    def note(self, msg_ids: list[str], sent: list[dict[str, Any]], ts: datetime) -> None:
        known = {message.msg_id for message in self.everything()}
        assert known.isdisjoint(msg_ids)
        if not self.foreign:
            assert sorted(known | set(msg_ids)) == [m.msg_id for m in self.everything()] + msg_ids
        if self.current is None:
            self.current = []
        for msg_id, message in zip(msg_ids, sent, strict=True):
            task_id, parents = message.get("task_id", ""), tuple(message.get("parents", ()))
            when = message.get("ts", ts)
            self.current.append(Sent(msg_id, message["type"], task_id, parents, message["body"], when))

    # ---- writing ----

    @rule(handle=st.integers(0, 1), message=drafts, reply=st.booleans(), preset=st.booleans())
    def append(self, handle: int, message: dict[str, Any], reply: bool, preset: bool) -> None:
        known = self.everything()
        if reply and known:
            message = {**message, "parents": [known[-1].msg_id, known[0].msg_id]}
        if preset:
            message = {**message, "ts": START - timedelta(days=1)}
        self.note([self.buses[handle].append(project_id="p", **message)], [message], self.now)

    @rule(handle=st.integers(0, 1), messages=st.lists(drafts, max_size=5))
    def append_many(self, handle: int, messages: list[dict[str, Any]]) -> None:
        made = self.buses[handle].append_many([{"project_id": "p", **message} for message in messages])
        if messages:
            self.note(made, messages, self.now)

    @rule(body=foreign_bodies)
    def original_appends(self, body: str) -> None:
        self.foreign += 1
        msg_id = f"MSG-original-{self.foreign:04d}"
        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            separator = "\n" if self.path.stat().st_size else ""
            header = f"msg_id: {msg_id}\nts: {TS}\ntype: FACT\nproject_id: p\ntask_id: t1\nrun_id: r\n"
            file.write(f"{separator}---\n{header}---\n{body}\n".encode())
        ts = datetime.fromisoformat(TS)
        self.current = [*(self.current or []), Sent(msg_id, "FACT", "t1", (), body, ts)]

    @rule(message=drafts, share=st.floats(0, 1))
    def writer_is_killed(self, message: dict[str, Any], share: float) -> None:
        """Any part of a record, from its first byte to all but its last ones."""
        draft = buswire.draft(message["type"], "p", message["task_id"], "", (), "", message["body"])
        last = max((message.msg_id for message in self.everything()), default="")
        msg_id, ts = ids.bus_id(epoch_ns_of(self.now), ids.origin(1), self.torn, last)
        record = buswire.encode(draft, msg_id, ts)
        # A foreign body has no length: it extends to the next recognisable record start.
        least = len(buswire.START) if self.current and "original" in self.current[-1].msg_id else 1
        most = len(record.rstrip(b"\n")) - 1
        torn = record[: least + int(share * (most - least))]
        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write((b"\n" if self.path.stat().st_size else b"") + torn)
        self.torn += 1
        self.current = self.current or []
        # A postroom writer comes next: after a torn header, a foreign record would be read as its body.
        self.append(
            0, {"type": "note", "task_id": "", "body": "after the torn one"}, reply=False, preset=False
        )

    @rule(seconds=st.sampled_from([0.000_001, 1, 3600, -0.5, -1, -3600, -86_400]))
    def clock_steps(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(handle=st.integers(0, 1))
    def rotate(self, handle: int) -> None:
        archive = self.buses[handle].rotate()
        assert (archive is not None) == bool(self.current)
        if archive is not None:
            self.archived.append(self.current or [])
            self.current = None

    @rule(handle=st.integers(0, 1), how=st.sampled_from(["close", "anew", "reopen"]))
    def reopen(self, handle: int, how: str) -> None:
        match how:
            case "close":
                self.buses[handle].close()
            case "anew":
                self.buses[handle].close()
                self.buses[handle] = self.opened()
            case _:
                assert self.buses[handle].reopen().messages == len(self.current or [])

    # ---- reading ----

    @rule(handle=st.integers(0, 1), limit=st.none() | st.integers(0, 5), archives=st.booleans())
    def read(self, handle: int, limit: int | None, archives: bool) -> None:
        expected = self.everything() if archives else self.current or []
        assert seen(self.buses[handle].read(limit=limit, archives=archives)) == expected[:limit]
        assert seen(list(self.buses[handle].scan(archives=archives))) == expected

    @precondition(lambda self: self.everything())
    @rule(handle=st.integers(0, 1), data=st.data(), archives=st.booleans())
    def read_since(self, handle: int, data: st.DataObject, archives: bool) -> None:
        everything = self.everything()
        position = data.draw(st.integers(0, len(everything) - 1))
        since = everything[position].msg_id
        bus = self.buses[handle]
        if archives or since in {message.msg_id for message in self.current or []}:
            assert seen(bus.read(since, archives=archives)) == everything[position + 1 :]
            assert seen(bus.poll(since, 0, archives=archives)) == everything[position + 1 :]
            return
        with pytest.raises(SinceIdNotFound) as caught:
            bus.read(since)
        held = [since in {message.msg_id for message in file} for file in self.archived]
        assert caught.value.archive == bus.archives()[held.index(True)]

    @precondition(lambda self: self.everything())
    @rule(handle=st.integers(0, 1), archives=st.booleans())
    def read_since_nowhere(self, handle: int, archives: bool) -> None:
        with pytest.raises(SinceIdNotFound):
            self.buses[handle].read("MSG-nowhere", archives=archives)

    @rule(handle=st.integers(0, 1), n=st.integers(0, 12))
    def tail(self, handle: int, n: int) -> None:
        current = self.current or []
        assert seen(self.buses[handle].tail(n)) == current[max(0, len(current) - n) :]

    @rule(handle=st.integers(0, 1), kind=st.none() | kinds, task=st.none() | tasks, archives=st.booleans())
    def query(self, handle: int, kind: str | None, task: str | None, archives: bool) -> None:
        known = self.everything()
        parent = known[0].msg_id if known and task is None else None
        since, until = START, self.now + timedelta(microseconds=1)
        found = self.buses[handle].query(
            type=kind, task_id=task, parent=parent, since=since, until=until, archives=archives
        )
        assert seen(found) == [
            message
            for message in (known if archives else self.current or [])
            if kind in {None, message.type}
            and task in {None, message.task_id}
            and (parent is None or parent in message.parents)
            and since <= message.ts < until
        ]

    @precondition(lambda self: self.current and len(self.followers) < 3)
    @rule(handle=st.integers(0, 1))
    def begin_to_follow(self, handle: int) -> None:
        begun_at = len(self.everything()) - len(self.current or [])
        self.followers.append(Follower(self.buses[handle], begun_at))
        self.follow(len(self.followers) - 1, 1)

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 2), most=st.integers(1, 20))
    def follow(self, which: int, most: int) -> None:
        follower = self.followers[which % len(self.followers)]
        new = self.everything()[follower.position :][:most]
        assert seen(follower.take(len(new))) == new

    # ---- always ----

    @invariant()
    def counts_and_archives_agree(self) -> None:
        bus = self.buses[0]
        assert len(bus.archives()) == len(self.archived)
        assert bus.archives() == sorted(bus.archives(), key=lambda path: path.stat().st_mtime_ns)
        report = bus.verify()
        assert report.messages == bus.count() == len(self.current or [])
        assert len(report.damaged) <= self.torn


def test_the_bus_equals_the_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "postroom.bus")
    run_state_machine_as_test(BusMachine, settings=settings(max_examples=40, stateful_step_count=30))


# ---- concurrent histories --------------------------------------------------------------------------

batches = st.lists(st.lists(bodies, min_size=1, max_size=4), min_size=1, max_size=6)


class History:
    """Writers in threads, each with its own handle, while readers read."""

    def __init__(self, path: Path, rotate_bytes: int | None) -> None:
        self.path = path
        self.rotate_bytes = rotate_bytes
        self.acknowledged: list[list[tuple[str, str]]] = []
        self.looks: list[list[BusMessage]] = []
        self.done = threading.Event()
        self.errors: list[BaseException] = []

    def write(self, plan: list[list[str]], mine: list[tuple[str, str]]) -> None:
        with Bus(self.path, rotate_bytes=self.rotate_bytes) as bus:
            for batch in plan:
                made = bus.append_many({"type": "t", "project_id": "p", "body": body} for body in batch)
                mine += zip(made, batch, strict=True)

    def look(self) -> None:
        bus = Bus(self.path, poll_interval_s=0.001)
        while not self.done.is_set():
            self.looks.append(bus.read(archives=True))

    def follow(self) -> None:
        bus = Bus(self.path, poll_interval_s=0.001)
        seen: list[BusMessage] = []
        counts: list[int] = []

        def stop() -> bool:
            """Stop when several calls returned nothing; `stop` is called after each file of a pass."""
            counts.append(len(seen) if self.done.is_set() else -1)
            return counts[-1] >= 0 and counts[-QUIET_ASKS:] == [counts[-1]] * QUIET_ASKS

        for message in bus.follow(archives=True, stop=stop):
            seen.append(message)  # noqa: PERF402 - `stop` looks at how many there are
        self.looks.append(seen)

    def guarded(self, action: Any, *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                action(*arguments)
            except BaseException as error:  # noqa: BLE001 - told to the test by `run`
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def run(self, plans: list[list[list[str]]]) -> list[BusMessage]:
        readers = [self.guarded(self.look), self.guarded(self.follow)]
        self.acknowledged = [[] for _ in plans]
        writers = [self.guarded(self.write, *pair) for pair in zip(plans, self.acknowledged, strict=True)]
        for writer in writers:
            writer.join()
        self.done.set()
        for reader in readers:
            reader.join()
        assert self.errors == []
        return Bus(self.path).read(archives=True)


@settings(max_examples=25)
@given(st.lists(batches, min_size=2, max_size=4), st.none() | st.integers(300, 3000))
def test_every_reader_sees_a_prefix_and_every_writer_keeps_its_order(
    plans: list[list[list[str]]], rotate_bytes: int | None
) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bus-history-")))
        history = History(folder / "bus.yaml", rotate_bytes)
        final = history.run(plans)
        order = [message.msg_id for message in final]
        assert order == sorted(set(order))
        by_id = {message.msg_id: message.body for message in final}
        acknowledged = list(itertools.chain.from_iterable(history.acknowledged))
        assert by_id == dict(acknowledged)
        for plan, mine in zip(plans, history.acknowledged, strict=True):
            made = [msg_id for msg_id, _ in mine]
            assert made == sorted(made)
            assert [body for _, body in mine] == list(itertools.chain.from_iterable(plan))
        for look in history.looks:
            assert look == final[: len(look)]
        assert any(look == final for look in history.looks), "the follower saw everything"
