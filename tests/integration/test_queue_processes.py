"""`Queue` between real processes: many senders, forks, compaction beside traffic, kill -9 at every step."""

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postroom import Queue
from tests import children
from tests.children import no_child_left
from tests.quick import quick_path
from tests.waiting import HANG_GUARD_S

SENDERS = 8
EACH = 120
LONG = 5000
START = datetime(2026, 6, 10, tzinfo=UTC)
__all__ = ["no_child_left", "quick_path"]  # fixtures
pytestmark = pytest.mark.usefixtures("no_child_left")
STEPS = ("open", "write", "close", "replace", "rename", "unlink", "mkdir", "ftruncate", "fsync")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def body_of(sender: str, number: int) -> str:
    text = f"{sender}:{number}:"
    return text + "x" * (LONG if number % 3 == 0 else number % 50)


def send_all(queue: Queue, sender: str) -> None:
    for number in range(EACH):
        queue.send("ask", body_of(sender, number), sender=sender)


def bodies(messages: Iterable[Any]) -> list[str]:
    return [message["body"] for message in messages]


def check_everything_came_once(root: Path, senders: Iterable[str]) -> None:
    with Queue(root) as queue:
        report = queue.check()
        assert report.ok, "nothing is torn"
        assert report.unused_bodies == ()
        found = queue.poll("judge")
        assert queue.poll("judge") == []
    by_sender: dict[str, list[str]] = {sender: [] for sender in senders}
    for message in found:
        by_sender[message["from"]].append(message["body"])
    for sender, texts in by_sender.items():
        assert texts == [body_of(sender, number) for number in range(EACH)], "all of it, once, in order"
    assert len({message["msg_id"] for message in found}) == len(found)


# ---- many at the same time ---------------------------------------------------------------------------


def test_eight_processes_tear_lose_and_duplicate_nothing(root: Path) -> None:
    def sender(name: str) -> Callable[[], None]:
        def job() -> None:
            with Queue(root) as queue:
                send_all(queue, name)

        return job

    names = [f"s{number}" for number in range(SENDERS)]
    children.run(*map(sender, names))
    check_everything_came_once(root, names)


def test_eight_forked_children_tear_lose_and_duplicate_nothing(root: Path) -> None:
    names = [f"s{number}" for number in range(SENDERS)]
    with Queue(root) as queue:
        queue.poll("parent")  # every descriptor is open when the children are forked

        def child(name: str) -> Callable[[], None]:
            return lambda: send_all(queue, name)

        pids = [children.start(child(name)) for name in names]
        send_all(queue, "parent")
        children.wait(*pids)
    check_everything_came_once(root, [*names, "parent"])


def test_children_forked_while_threads_hold_the_lock_are_not_stuck(root: Path) -> None:
    names = [f"s{number}" for number in range(SENDERS)]
    with Queue(root) as queue:
        queue.send("status", "open")
        queue.poll("judge")
        stop = threading.Event()

        def keep_busy() -> None:
            while not stop.is_set():
                queue.send("status", "busy", session="busy")
                queue.poll("thread", session="busy")

        def child(name: str) -> Callable[[], None]:
            def job() -> None:
                queue.send("status", "from a child", session="busy")
                send_all(queue, name)

            return job

        threads = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            children.wait(*[children.start(child(name)) for name in names])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert bodies(queue.poll("other", session="busy")).count("from a child") == SENDERS
        assert queue.check("busy").ok
    check_everything_came_once(root, names)


def test_concurrent_pollers_senders_and_expire_lose_no_live_message(root: Path, tmp_path: Path) -> None:
    senders = ["s0", "s1", "s2"]
    pollers = ["p0", "p1", "p2"]
    expected = len(senders) * EACH
    done = tmp_path / "done"

    def sender(name: str) -> Callable[[], None]:
        def job() -> None:
            with Queue(root) as queue:
                for number in range(EACH):
                    queue.send("ask", body_of(name, number), sender=name)
                    queue.send("status", body_of(name, number), sender=name, ttl_s=0)

        return job

    def poller(name: str) -> Callable[[], None]:
        def job() -> None:
            got: list[str] = []
            with Queue(root) as queue:
                while len(got) < expected:
                    wanted = "ask" if name == "p0" else None
                    got += bodies(queue.poll(name, wanted, wait_s=HANG_GUARD_S, keep_filtered=name == "p0"))
                got += bodies(queue.poll(name))
            (tmp_path / name).write_text(json.dumps(got))

        return job

    def expirer() -> None:
        with Queue(root) as queue:
            while not done.exists():
                queue.expire()
            queue.expire()

    expire_pid = children.start(expirer)
    poll_pids = [children.start(poller(name)) for name in pollers]
    children.run(*map(sender, senders))
    children.wait(*poll_pids)
    done.touch()
    children.wait(expire_pid)

    everything = Counter(body_of(name, number) for name in senders for number in range(EACH))
    for name in pollers:
        assert Counter(json.loads((tmp_path / name).read_text())) == everything
    with Queue(root) as queue:
        assert queue.inbox("p1")["epoch"] > 0, "it did run"
        assert queue.status("default")["messages"] == expected
        report = queue.check()
    assert report.ok
    assert report.unused_bodies == ()


def test_pollers_with_one_name_share_without_duplicates(root: Path, tmp_path: Path) -> None:
    with Queue(root) as queue:
        send_all(queue, "s0")

    def poller(number: int) -> Callable[[], None]:
        def job() -> None:
            with Queue(root) as queue:
                got = [body for _ in range(10) for body in bodies(queue.poll("shared"))]
            (tmp_path / f"got-{number}").write_text(json.dumps(got))

        return job

    children.run(*[poller(number) for number in range(4)])
    shares = [json.loads((tmp_path / f"got-{number}").read_text()) for number in range(4)]
    assert sorted(body for share in shares for body in share) == sorted(body_of("s0", n) for n in range(EACH))


# ---- waking and asking -------------------------------------------------------------------------------


def wait_until_polled(root: Path, agent_id: str) -> None:
    """Wait until the agent has polled once without a result."""
    audit = root / "audit.jsonl"
    give_up = time.monotonic() + HANG_GUARD_S
    while not audit.exists() or f'"{agent_id}"' not in audit.read_text():
        assert time.monotonic() < give_up, f"{agent_id} never polled"
        os.sched_yield()


@pytest.mark.parametrize("polling_only", [False, True])
def test_a_waiting_poll_is_woken_by_another_process(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polling_only: bool
) -> None:
    if polling_only:  # as without inotify
        monkeypatch.setattr("postroom.nudges.watch.inotify_new", lambda: -1)

    def poller() -> None:
        with Queue(root) as queue:
            (tmp_path / "got").write_text(json.dumps(bodies(queue.poll("a", wait_s=HANG_GUARD_S))))

    pid = children.start(poller)
    wait_until_polled(root, "a")
    with Queue(root) as queue:
        queue.send("ask", "not for you", to="b")
        queue.send("ask", "wake up", to="a")
    children.wait(pid)
    assert json.loads((tmp_path / "got").read_text()) == ["wake up"]


def test_a_poll_that_waits_for_a_missing_session_is_woken(root: Path, tmp_path: Path) -> None:
    def poller() -> None:
        with Queue(root) as queue:
            found = queue.poll("a", session="new", wait_s=HANG_GUARD_S)
            (tmp_path / "got").write_text(json.dumps(bodies(found)))

    pid = children.start(poller)
    wait_until_polled(root, "a")
    with Queue(root) as queue:
        queue.send("ask", "wake up", session="new")
    children.wait(pid)
    assert json.loads((tmp_path / "got").read_text()) == ["wake up"]


def test_a_waiting_poll_survives_a_compaction(root: Path, tmp_path: Path) -> None:
    with Queue(root) as queue:
        for _ in range(10):
            queue.send("ask", "gone", ttl_s=0)

    def poller() -> None:
        with Queue(root) as queue:
            (tmp_path / "got").write_text(json.dumps(bodies(queue.poll("a", wait_s=HANG_GUARD_S))))

    pid = children.start(poller)
    wait_until_polled(root, "a")
    with Queue(root) as queue:
        assert queue.expire() == 10
        queue.send("ask", "wake up")
    children.wait(pid)
    assert json.loads((tmp_path / "got").read_text()) == ["wake up"]


def test_two_processes_ask_and_answer(root: Path) -> None:
    rounds = 20

    def helper() -> None:
        with Queue(root) as queue:
            answered = 0
            while answered < rounds * 2:
                for question in queue.poll("helper", "ask", wait_s=HANG_GUARD_S):
                    answer = question["body"][::-1]
                    queue.send(
                        "answer", answer, question["from"], reply_to=question["msg_id"], sender="helper"
                    )
                    answered += 1

    def asker(name: str) -> Callable[[], None]:
        def job() -> None:
            with Queue(root) as queue:
                for number in range(rounds):
                    question = body_of(name, number)
                    answer = queue.ask(question, "helper", sender=name, timeout_s=HANG_GUARD_S)
                    assert answer is not None
                    assert answer["body"] == question[::-1]
                assert queue.poll(name) == [], "nothing is delivered a second time"

        return job

    children.run(helper, asker("a0"), asker("a1"))


# ---- kill -9 at every step -----------------------------------------------------------------------------


class Scene:
    """A session with all kinds of messages, and the messages that each agent has not read."""

    def __init__(self, folder: Path) -> None:
        self.now = START
        self.template = folder / "template"
        self.folder = folder
        self.begin(self.template)
        self.left = self.deliver(self.copy("judged"))

    def open(self, root: Path) -> Queue:
        return Queue(root, body_threshold=16, clock=lambda: self.now)

    def begin(self, root: Path) -> None:
        with self.open(root) as queue:
            for number in range(12):
                topic = ("ask", "status", "answer")[number % 3]
                body = f"{number} " + "long" * (5 if number % 4 else 0)
                queue.send(topic, body, ttl_s=5 if number % 2 else None)
                if number == 3:
                    queue.poll("early")
                if number == 8:
                    queue.poll("late")
                    queue.poll("picky", "ask", keep_filtered=True)
                    queue.poll("picky", "answer", keep_filtered=True)
            files = queue._session(None)
            with files.locked():  # as `ask` does: a message out of order
                offset = [at for at, _ in files.lines(0, 10**6)][10]
                picky = files.cursors.read("picky")
                files.write_progress("picky", picky, type(picky)(picky.cursor, picky.topics, [offset]))
        self.now += timedelta(seconds=5)

    def copy(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return Path(shutil.copytree(self.template, self.folder / name))

    def deliver(self, root: Path) -> dict[str, list[str]]:
        with self.open(root) as queue:
            return {agent: bodies(queue.poll(agent)) for agent in ("early", "late", "picky", "new")}


@pytest.fixture
def scene(quick_path: Path) -> Scene:
    return Scene(quick_path)


def kill_at_every_step(
    scene: Scene,
    job: Callable[[Path], None],
    judge: Callable[[Path, bool], None],
    prepare: Callable[[Path], None] = lambda _: None,
) -> int:
    """Run a job in a child that is killed before its n-th step, for every n until the job completes."""
    for step in range(children.STEPS_MAX):
        root = scene.copy("killed")
        prepare(root)

        def die_half_way(root: Path = root, step: int = step) -> None:
            children.die_at(step, STEPS)
            job(root)

        was_killed = children.killed(die_half_way)
        judge(root, was_killed)
        if not was_killed:
            return step
    raise AssertionError("the job never ended")


def test_expire_killed_at_any_step_repeats_and_loses_nothing(scene: Scene) -> None:
    outcomes = []

    def expire(root: Path) -> None:
        with scene.open(root) as queue:
            assert queue.expire() == 6

    def judge(root: Path, _: bool) -> None:
        with scene.open(root) as queue:
            queue.send("status", "behind", to="new")
        assert scene.deliver(root) == scene.left | {"new": [*scene.left["new"], "behind"]}
        with scene.open(root) as queue:
            assert queue.check().ok
            outcomes.append(queue.inbox("new")["epoch"])
            assert queue.expire() == (0 if outcomes[-1] else 6)
            assert queue.status("default")["messages"] == 7
            assert queue.check().unused_bodies == ()
        assert not [path for path in root.rglob("messages*") if path.name != "messages.jsonl"]

    assert kill_at_every_step(scene, expire, judge) > 20
    assert outcomes == sorted(outcomes), "one step decides"
    assert set(outcomes) == {0, 1}


def test_completion_of_an_interrupted_expire_can_be_killed(scene: Scene) -> None:
    def expire_and_die(root: Path) -> None:
        replace = os.replace

        def replace_and_die(source: Any, target: Any) -> None:
            replace(source, target)
            if Path(target).name == "messages.jsonl":
                children.die()

        setattr(os, "replace", replace_and_die)  # noqa: B010 - of this child alone
        scene.open(root).expire()

    def prepare(root: Path) -> None:
        assert children.killed(lambda: expire_and_die(root))
        assert (root / "sessions/default/expire.journal").exists()

    def look(root: Path) -> None:
        with scene.open(root) as queue:
            queue.status()

    def judge(root: Path, _: bool) -> None:
        assert scene.deliver(root) == scene.left
        assert not (root / "sessions/default/expire.journal").exists()

    assert kill_at_every_step(scene, look, judge, prepare) > 10


def test_killed_send_is_stored_completely_or_not_at_all(scene: Scene) -> None:
    there = []

    def send(root: Path) -> None:
        with scene.open(root) as queue:
            queue.send("ask", "long" * 10, to="new")

    def judge(root: Path, _: bool) -> None:
        with scene.open(root) as queue:
            queue.send("ask", "next", to="new")
            found = bodies(queue.poll("new"))
            assert queue.check().ok
        assert found in (
            [*scene.left["new"], "next"],
            [*scene.left["new"], "long" * 10, "next"],
        )
        there.append(len(found))

    kill_at_every_step(scene, send, judge)
    assert len(set(there)) == 2
    assert there == sorted(there)


@pytest.mark.parametrize("keep_filtered", [False, True])
def test_killed_poll_leaves_all_or_no_messages_to_the_next(
    scene: Scene, tmp_path: Path, keep_filtered: bool
) -> None:
    wanted = ["status", "ask"] if keep_filtered else None
    with scene.open(scene.copy("judged")) as queue:
        everything = bodies(queue.poll("picky", wanted, keep_filtered=keep_filtered))
        rest = bodies(queue.poll("picky"))
    handed_over = tmp_path / "handed-over"
    outcomes = set()

    def poll(root: Path) -> None:
        with scene.open(root) as queue:
            handed_over.write_text(
                json.dumps(bodies(queue.poll("picky", wanted, keep_filtered=keep_filtered)))
            )

    def judge(root: Path, was_killed: bool) -> None:
        got = json.loads(handed_over.read_text()) if handed_over.exists() and not was_killed else []
        handed_over.unlink(missing_ok=True)
        with scene.open(root) as queue:
            again = bodies(queue.poll("picky", wanted, keep_filtered=keep_filtered))
            assert bodies(queue.poll("picky")) == rest, "what was kept is still there"
        assert got + again in (everything, []), "never twice"
        outcomes.add((len(got), len(again)))

    kill_at_every_step(scene, poll, judge)
    total = len(everything)
    assert outcomes == {(0, total), (0, 0), (total, 0)}
