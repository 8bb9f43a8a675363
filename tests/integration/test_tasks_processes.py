"""`Tasks` between real processes: concurrent producers and consumers, kill -9, and stalled lease holders."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from postroom import StaleLease, Tasks
from postroom.message import Event
from postroom.testing import check_consistency, explained
from tests import children
from tests.children import no_child_left
from tests.crash.workers import Crew, Report, Worker

__all__ = ["no_child_left"]  # a fixture

PRODUCERS = CONSUMERS = 4
QUEUES = ("left", "right")
RUN_S = 3.0
KILLS = 40
ACKS_MAX = 12  # acknowledgements that a worker reports at most before it is killed
SHORT_LEASE_S = 0.2
ASLEEP_ROUNDS = 10
ASLEEP_LEASE_S = 0.1
WAIT_S = 0.2
PAGE = 100_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


def all_events(tasks: Tasks) -> list[Event]:
    events: list[Event] = []
    while page := tasks.events(after=len(events), limit=PAGE):
        events += page
    return events


# ---- everybody at once -----------------------------------------------------------------------------


def produce(url: str, name: str, until: float, ledger: Path) -> None:
    ids: list[str] = []
    with Tasks.open(url) as tasks:
        while time.monotonic() < until:
            queue = QUEUES[len(ids) % 2]
            if len(ids) % 5:
                ids.append(tasks.enqueue(agent=queue, payload=[name, len(ids)]))
            else:
                ids += tasks.enqueue_many({"agent": queue, "payload": [name, len(ids) + i]} for i in range(3))
    ledger.write_text(json.dumps(ids))


def consume(url: str, name: str, producing: Callable[[], bool], ledger: Path) -> None:
    done: list[str] = []
    queue = QUEUES[int(name) % 2]
    with Tasks.open(url) as tasks:
        while True:
            last_look = not producing()
            claimed = tasks.claim(agent=queue, limit=1 + len(done) % 7, wait_s=WAIT_S, worker=name)
            tasks.complete_many([(task.task_id, task.lease, task.payload) for task in claimed])
            done += [task.task_id for task in claimed]
            if last_look and not claimed:
                break
    ledger.write_text(json.dumps(done))


def check_order(events: list[Event]) -> None:
    """Tasks of a queue were claimed in the order in which they were enqueued."""
    for queue in QUEUES:
        put = [event.message_id for event in events if event.queue == queue and event.kind == "enqueued"]
        given = [event.message_id for event in events if event.queue == queue and event.kind == "dequeued"]
        assert given == put[: len(given)]


def test_four_producers_and_four_consumers(url: str, tmp_path: Path, no_child_left: None) -> None:
    until = time.monotonic() + RUN_S
    produced = [tmp_path / f"produced-{number}" for number in range(PRODUCERS)]
    consumed = [tmp_path / f"consumed-{number}" for number in range(CONSUMERS)]

    def producing() -> bool:
        return not all(ledger.exists() for ledger in produced)

    pids = [
        children.start(lambda n=n: produce(url, f"p{n}", until, produced[n]))  # type: ignore[misc]
        for n in range(PRODUCERS)
    ]
    pids += [
        children.start(lambda n=n: consume(url, str(n), producing, consumed[n]))  # type: ignore[misc]
        for n in range(CONSUMERS)
    ]
    children.wait(*pids)
    acknowledged = [task_id for ledger in produced for task_id in json.loads(ledger.read_text())]
    done = [task_id for ledger in consumed for task_id in json.loads(ledger.read_text())]
    print(f"{len(acknowledged)} tasks through {PRODUCERS} + {CONSUMERS} processes")
    assert len(acknowledged) > PRODUCERS * CONSUMERS
    assert Counter(done) == Counter(acknowledged)  # nothing lost, nothing duplicated
    with Tasks.open(url) as tasks:
        assert tasks.status().totals == {"completed": len(done)}
        assert {agent.lapses for agent in tasks.status().agents.values()} == {0}
        events = all_events(tasks)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    check_order(events)
    assert {message.state for message in explained(events).values()} == {"COMPLETED"}


# ---- kill -9 ---------------------------------------------------------------------------------------


def killed_producer(report: Report, *, url: str, name: str) -> None:
    tasks = Tasks.open(url)
    number = 0
    while True:
        if number % 4:
            task_id = tasks.enqueue(agent="a", payload=[name, number], max_retries=1_000)
            report("stored", task_id)
        else:
            ids = tasks.enqueue_many(
                {"agent": "a", "payload": [name, number, i], "max_retries": 1_000} for i in range(3)
            )
            report(lines=[f"stored {task_id}" for task_id in ids])
        number += 1


def killed_consumer(report: Report, *, url: str, name: str) -> None:
    tasks = Tasks.open(url)
    rng = Random(name)
    while True:
        for task in tasks.claim(agent="a", limit=rng.randint(1, 4), lease_s=SHORT_LEASE_S, wait_s=WAIT_S):
            try:
                if rng.random() < 0.1:
                    tasks.release(task.task_id, task.lease)
                    continue
                tasks.heartbeat(task.task_id, task.lease)
                tasks.complete(task.task_id, task.lease, name)
            except StaleLease:
                report("refused", task.task_id)
            else:
                report("done", task.task_id)


def start(crew: Crew, url: str, role: str, number: int) -> Worker:
    program = killed_producer if role == "producer" else killed_consumer
    return crew.start(f"{role}-{number}", program, url=url, name=f"{role}-{number}")


def test_kill_9_loses_nothing_acknowledged(url: str) -> None:
    rng = Random(9)
    with Crew() as crew, Tasks.open(url) as tasks:
        roles = ["producer", "producer", "consumer", "consumer"]
        workers = [start(crew, url, role, number) for number, role in enumerate(roles)]
        for number in range(KILLS):
            place = rng.randrange(len(workers))
            crew.kill_at_random(workers[place], rng, ACKS_MAX)
            workers[place] = start(crew, url, roles[place], len(roles) + number)
        for worker, role in zip(workers, roles, strict=True):
            if role == "producer":
                worker.kill()
        crew.await_that(lambda: set(tasks.status().totals) == {"completed"}, "finishing everything")
        crew.kill_all()
        check_killed(tasks, list(crew.lines()))


def check_killed(tasks: Tasks, lines: list[str]) -> None:
    said = Counter(line.split(" ")[0] for line in lines)
    stored = [line.removeprefix("stored ") for line in lines if line.startswith("stored ")]
    done = [line.removeprefix("done ") for line in lines if line.startswith("done ")]
    events = all_events(tasks)
    messages = explained(events)  # also: no event shows a call under an ended lease
    assert set(stored) <= messages.keys()
    assert {message.state for message in messages.values()} == {"COMPLETED"}
    completed = [event.message_id for event in events if event.kind == "execution_completed"]
    assert sorted(completed) == sorted(messages)  # each exactly once
    assert Counter(done) <= Counter(completed)
    deliveries = Counter(event.message_id for event in events if event.kind == "dequeued")
    lapses = Counter(event.kind for event in events)["lease_lapsed"]
    print(f"{KILLS} kills: {dict(said)}, {lapses} lapses, deliveries per task {Counter(deliveries.values())}")
    assert said["stored"] > 0
    assert said["done"] > 0
    check_consistency(tasks.store)


# ---- a holder that falls asleep --------------------------------------------------------------------


def holder(report: Report, *, url: str, name: str, go: str) -> None:
    tasks = Tasks.open(url)
    [task] = tasks.claim(agent="a", lease_s=ASLEEP_LEASE_S, worker=name)
    report("holds", task.task_id, task.lease)
    while not Path(go).exists():
        time.sleep(0.001)
    words: dict[str, Callable[[], object]] = {
        "heartbeat": lambda: tasks.heartbeat(task.task_id, task.lease),
        "complete": lambda: tasks.complete(task.task_id, task.lease, "zombie"),
        "release": lambda: tasks.release(task.task_id, task.lease),
        "fail": lambda: tasks.fail(task.task_id, task.lease, "zombie"),
    }
    for word, say in words.items():
        try:
            say()
        except StaleLease:
            report("refused", word)
        else:
            report("accepted", word)
    time.sleep(ASLEEP_LEASE_S * 1_000)


@pytest.mark.parametrize("taken_over", [True, False], ids=["taken over", "nobody else came"])
def test_a_holder_paused_beyond_its_lease_is_refused(url: str, tmp_path: Path, taken_over: bool) -> None:
    with Tasks.open(url) as tasks, Crew() as crew:
        for number in range(ASLEEP_ROUNDS):
            task_id = tasks.enqueue(agent="a", payload=number)
            go = tmp_path / f"go-{number}"
            zombie = crew.start(f"holder-{number}", holder, url=url, name=f"w{number}", go=str(go))
            crew.await_lines(zombie, 1)
            os.kill(zombie.pid, signal.SIGSTOP)
            go.touch()
            while tasks.store.next_work_ns("a") != 0:  # until its lease has ended
                time.sleep(0.005)
            second = tasks.claim(agent="a") if taken_over else []
            os.kill(zombie.pid, signal.SIGCONT)
            crew.await_that(lambda zombie=zombie: len(zombie.lines) >= 5, "hearing what became of it")  # type: ignore[misc]
            assert zombie.lines[1:] == [
                f"refused {word}" for word in ("heartbeat", "complete", "release", "fail")
            ]
            zombie.kill()
            [task] = second or tasks.claim(agent="a")
            assert (task.task_id, task.attempt) == (task_id, 2)
            tasks.complete(task.task_id, task.lease, "second")
            assert tasks.get(task_id).result == "second"
        check_consistency(tasks.store)
