"""The speed of `Tasks`, next to other queues on SQLite, in the same run.

Ours always commits the events with the task and checks the lease's token. A peer does what its manual says
for one message, with its usual settings: huey calls a task, dequeues and executes it; litequeue puts, pops
and says done; persist-queue (SQLiteAckQueue) puts, gets and acks. As they come, huey and persist-queue sync
every commit and ours does not, so both are also measured with equal durability on both sides.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import huey  # type: ignore[import-untyped]
import litequeue  # type: ignore[import-untyped]
import persistqueue
from figures import (
    REPEATS,
    Comparison,
    Figure,
    Goal,
    Report,
    compare,
    machine,
    median_of,
    percentile,
    readable,
    run,
    seconds,
)

from postroom import Tasks
from postroom.contracts.tasks.task_operations import NewTask, TaskFields
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.message import Durability, Envelope, State
from postroom.server.access.registry import Identity
from postroom.server.http.writer import StoreWriter
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.transaction import Claim
from postroom.system.crypto.key_file import add_key

T = TypeVar("T")

AGENT = "coder"
PAYLOAD = {
    "type": "issue.triage",
    "repo": "example/project",
    "issue": 42,
    "title": "The parser stops at the first empty line of a sample",
}
BATCH = 50
FILL_BATCH = 1_000
LEASE_S = 300.0
PATIENCE_S = 120.0
SHORT_S = 0.001
PROMOTE_AFTER_NS = 3_600 * 10**9  # promotion is looked at, and does not happen
WAKE_UP_PAUSES_S = (0.005, 0.015)  # 100/s
PROBES = 40
NS_PER_MS, MS_PER_S = 1e6, 1e3
HEALTH_LOOKS_S = 0.005

forking = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `SMALL` only shows that every bench runs."""

    produced: int = 200
    produce_turns: int = 5
    turn_s: float = 0.4
    """A turn ends after this long, also with a peer that waits for a slow disk."""
    waiting: int = 5_000
    """Tasks that wait when consumers begin. Some peers get slower with more."""
    consumed: int = 1_000
    cycles: int = 100
    cycle_turns: int = 5
    wake_ups: int = 200
    few_waiting: int = 1_000
    many_waiting: int = 1_000_000
    claims: int = 10
    claim_turns: int = 20
    lane_claims: int = 50
    lane_turns: int = 10
    listed: int = 100_000
    cancelled: int = 100
    queues: int = 5_000
    sweeps: int = 20
    callers: int = 100
    calls_a_caller: int = 20
    calls_alone: int = 400
    restart_waiting: int = 100_000
    requests: int = 4_000
    connections: int = 16


SMALL = Sizes(
    produced=10,
    produce_turns=1,
    turn_s=0.1,
    waiting=60,
    consumed=40,
    cycles=1,
    cycle_turns=1,
    wake_ups=5,
    few_waiting=20,
    many_waiting=50,
    claims=2,
    claim_turns=1,
    lane_claims=2,
    lane_turns=1,
    listed=20,
    cancelled=2,
    queues=20,
    sweeps=1,
    callers=4,
    calls_a_caller=2,
    calls_alone=4,
    restart_waiting=60,
    requests=20,
    connections=2,
)

Bench = Callable[[Path, Sizes], Iterator[Figure]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", default="", metavar="NAME", help="benches whose names begin with NAME")
    options = parser.parse_args()
    report = Report(f"Tasks: {machine()}; medians of {REPEATS}")
    report.begin()
    for bench in BENCHES:
        if bench.__name__.startswith(options.only):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in bench(Path(folder), SMALL if options.small else Sizes()):
                    report.add(figure)
    report.end()


# ---- what is compared ------------------------------------------------------------------------------


class Peer(Protocol):
    """A queue in a folder. Both verbs stop at `until` and return how many messages they handled."""

    def produce(self, count: int, until: float) -> int: ...

    def consume(self, count: int, until: float) -> int: ...

    def fill(self, count: int) -> None:
        """Produce as fast as possible; not measured."""

    def close(self) -> None: ...


Maker = Callable[[Path], Peer]


class Ours:
    """`Tasks`, one at a time or in batches."""

    def __init__(
        self, folder: Path, batch: int = 1, durability: Durability = "os", *, claims_next: bool = False
    ) -> None:
        self.tasks = Tasks.open(f"sqlite:///{folder}/queue.db", durability=durability)
        self.tasks.store.steady_ns()  # opens the file, which is not measured
        self.batch = batch
        self.claims_next = claims_next

    def produce(self, count: int, until: float) -> int:
        for done in range(count):
            if time.perf_counter() >= until:
                return done
            self.tasks.enqueue(agent=AGENT, payload=PAYLOAD)
        return count

    def consume(self, count: int, until: float) -> int:
        if self.claims_next:
            return self._consume_in_one_call(count, until)
        done = 0
        while done < count and time.perf_counter() < until:
            claimed = self.tasks.claim(agent=AGENT, limit=min(self.batch, count - done))
            if len(claimed) == 1:
                self.tasks.complete(claimed[0].task_id, claimed[0].lease)
            else:
                self.tasks.complete_many((task.task_id, task.lease, None) for task in claimed)
            done += len(claimed)
        return done

    def _consume_in_one_call(self, count: int, until: float) -> int:
        """A worker's loop in which `complete` also claims the next task."""
        claimed, done = self.tasks.claim(agent=AGENT), 0
        while claimed and done < count and time.perf_counter() < until:
            claimed = self.tasks.complete(claimed[0].task_id, claimed[0].lease, claim_next=1)
            done += 1
        return done

    def fill(self, count: int) -> None:
        for first in range(0, count, FILL_BATCH):
            size = min(FILL_BATCH, count - first)
            self.tasks.enqueue_many([{"agent": AGENT, "payload": PAYLOAD}] * size)

    def close(self) -> None:
        self.tasks.close()


class Huey:
    """`SqliteHuey`, which syncs every commit by default.

    With `fsync=False` it never syncs, so that a power cut can damage its whole file. Ours always keeps the
    file whole, so beside that one there is no goal.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.file = str(folder / "huey.db")
        self.huey = huey.SqliteHuey(filename=self.file, **settings)
        self.task = self.huey.task(name="triage")(_do_nothing)
        self.huey.pending_count()  # opens the file, which is not measured

    def produce(self, count: int, until: float) -> int:
        for done in range(count):
            if time.perf_counter() >= until:
                return done
            self.task(PAYLOAD)
        return count

    def consume(self, count: int, until: float) -> int:
        done = 0
        while done < count and time.perf_counter() < until:
            task = self.huey.dequeue()
            if task is not None:
                self.huey.execute(task)
                done += 1
        return done

    def fill(self, count: int) -> None:
        quick = Huey(Path(self.file).parent, fsync=False)
        quick.produce(count, time.perf_counter() + PATIENCE_S)
        quick.close()

    def close(self) -> None:
        self.huey.storage.close()


def _do_nothing(payload: Any) -> None:
    """The work itself is not measured."""


class LiteQueue:
    """`litequeue.LiteQueue`, which does not sync."""

    def __init__(self, folder: Path) -> None:
        self.queue = litequeue.LiteQueue(str(folder / "lite.db"))

    def produce(self, count: int, until: float) -> int:
        for done in range(count):
            if time.perf_counter() >= until:
                return done
            self.queue.put(json.dumps(PAYLOAD))
        return count

    def consume(self, count: int, until: float) -> int:
        done = 0
        while done < count and time.perf_counter() < until:
            message = self.queue.pop()
            if message is not None:
                json.loads(message.data)
                self.queue.done(message.message_id)
                done += 1
        return done

    def fill(self, count: int) -> None:
        self.produce(count, time.perf_counter() + PATIENCE_S)

    def close(self) -> None:
        self.queue.close()


class PersistQueue:
    """`persistqueue.SQLiteAckQueue`, which always syncs every commit."""

    def __init__(self, folder: Path) -> None:
        self.queue = persistqueue.SQLiteAckQueue(str(folder / "persist"))

    def produce(self, count: int, until: float) -> int:
        for done in range(count):
            if time.perf_counter() >= until:
                return done
            self.queue.put(PAYLOAD)
        return count

    def consume(self, count: int, until: float) -> int:
        for done in range(count):
            if time.perf_counter() >= until:
                return done
            self.queue.ack(self.queue.get(block=False))
        return count

    def fill(self, count: int) -> None:
        connection: Any = self.queue._putter  # noqa: SLF001 - it has no setting for this
        connection.execute("PRAGMA synchronous = OFF")
        self.produce(count, time.perf_counter() + PATIENCE_S)
        connection.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        self.queue.close()


def unsynced_huey(folder: Path) -> Huey:
    return Huey(folder, fsync=False)


@dataclass(frozen=True)
class Pair:
    """Our settings, a peer, and the ratio to reach."""

    what: str
    theirs: Maker
    goal: float | None = None
    batch: int = 1
    durability: Durability = "os"
    claims_next: bool = False

    def mine(self, folder: Path) -> Peer:
        return Ours(folder, self.batch, self.durability, claims_next=self.claims_next)

    def figure(self, name: str, speed: Comparison) -> Figure:
        synced = ", both synced" if self.durability != "os" else ""
        goals = [] if self.goal is None else [Goal("ratio", ">=", self.goal)]
        against = f"{self.what}: {readable(speed.theirs)} tasks/s"
        return Figure(f"{name} / {self.what}{synced}", speed.ours, "tasks/s", against, speed.ratio, goals)


# ---- produce ---------------------------------------------------------------------------------------

PRODUCING = (
    Pair("huey", Huey, 2),
    Pair("huey, fsync=False", unsynced_huey),
    Pair("litequeue", LiteQueue, 1.3),
    Pair("persist-queue", PersistQueue, 2),
    Pair("huey", Huey, durability="group"),
    Pair("persist-queue", PersistQueue, durability="group"),
)


def produce(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    yield Figure("fsync probe: write and fsync", median_of(lambda: probe_ms(folder / "probe")), "ms")
    for pair in PRODUCING:
        yield pair.figure("enqueue", produced(pair, fresh(folder), sizes))


def produced(pair: Pair, folder: Path, sizes: Sizes) -> Comparison:
    mine, theirs = pair.mine(folder), pair.theirs(folder)

    def rate(peer: Peer) -> float:
        begun = time.perf_counter()
        done = peer.produce(sizes.produced, begun + sizes.turn_s)
        return done / (time.perf_counter() - begun)

    for peer in (mine, theirs):
        peer.fill(sizes.produced)
    try:
        return compare(lambda: rate(mine), lambda: rate(theirs), turns=sizes.produce_turns)
    finally:
        mine.close()
        theirs.close()


def probe_ms(path: Path) -> float:
    data = json.dumps(PAYLOAD).encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write_and_sync() -> None:
        os.write(fd, data)
        os.fsync(fd)

    try:
        return statistics.median(seconds(write_and_sync) for _ in range(PROBES)) * MS_PER_S
    finally:
        os.close(fd)


# ---- consume ---------------------------------------------------------------------------------------


CONSUMING = (
    Pair("huey", Huey, 1.5),
    Pair("huey", Huey, 4, batch=BATCH),
    Pair("huey, fsync=False", unsynced_huey),
    Pair("huey, fsync=False", unsynced_huey, batch=BATCH),
)
"""By one and by four worker processes."""
CONSUMING_ALONE = (
    Pair("litequeue", LiteQueue, 5),
    Pair("persist-queue", PersistQueue, 2),
    Pair("huey", Huey, durability="group"),
    Pair("huey", Huey, 1, durability="group", claims_next=True),
    Pair("persist-queue", PersistQueue, durability="group"),
    Pair("two calls", Ours, 1, claims_next=True),
)


def consume(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    for pair, workers in [*itertools.product(CONSUMING, (1, 4)), *((pair, 1) for pair in CONSUMING_ALONE)]:
        name = "claim+complete" if pair.batch == 1 else f"claim+complete({pair.batch})"
        if pair.claims_next:
            name = "complete with claim_next"
        yield pair.figure(f"{name} x{workers}", consumed(pair, folder, workers, sizes))


def consumed(pair: Pair, folder: Path, workers: int, sizes: Sizes) -> Comparison:
    return compare(
        lambda: consumed_rate(pair.mine, fresh(folder), workers, sizes),
        lambda: consumed_rate(pair.theirs, fresh(folder), workers, sizes),
    )


def consumed_rate(make: Maker, folder: Path, workers: int, sizes: Sizes) -> float:
    """Tasks per second of all workers, from the first start to the last end."""
    filling = make(folder)
    filling.fill(sizes.waiting)
    filling.close()
    gate = forking.Barrier(workers)

    def work() -> tuple[float, float, int]:
        peer = make(folder)
        gate.wait(PATIENCE_S)
        begun = time.perf_counter()
        done = peer.consume(sizes.consumed // workers, begun + sizes.turn_s)
        ended = time.perf_counter()
        peer.close()
        return begun, ended, done

    results = in_processes(work, workers)
    took_s = max(ended for _, ended, _ in results) - min(begun for begun, _, _ in results)
    return sum(done for _, _, done in results) / took_s


def in_processes(work: Callable[[], T], count: int = 1) -> list[T]:
    """The results of the same work in `count` forked processes."""
    results = forking.SimpleQueue()
    children = [forking.Process(target=lambda: results.put(work()), daemon=True) for _ in range(count)]
    for child in children:
        child.start()
    found: list[T] = [results.get() for _ in children]
    for child in children:
        child.join(PATIENCE_S)
    return found


_numbers = itertools.count()


def fresh(folder: Path) -> Path:
    """A new subfolder."""
    path = folder / f"run-{next(_numbers)}"
    path.mkdir()
    return path


# ---- batches, wake-ups, depth ----------------------------------------------------------------------


def cycles(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    single, batched = Ours(fresh(folder)), Ours(fresh(folder))
    wanted: list[TaskFields] = [{"agent": AGENT, "payload": PAYLOAD}] * BATCH

    def in_batches() -> None:
        for _ in range(sizes.cycles):
            batched.tasks.enqueue_many(wanted)
            claimed = batched.tasks.claim(agent=AGENT, limit=BATCH)
            assert len(claimed) == BATCH
            batched.tasks.complete_many((task.task_id, task.lease, None) for task in claimed)

    def one_by_one() -> None:
        for _ in range(sizes.cycles):
            single.tasks.enqueue(agent=AGENT, payload=PAYLOAD)
            [task] = single.tasks.claim(agent=AGENT)
            single.tasks.complete(task.task_id, task.lease)

    speed = compare(
        lambda: BATCH * sizes.cycles / seconds(in_batches),
        lambda: sizes.cycles / seconds(one_by_one),
        turns=sizes.cycle_turns,
    )
    single.close()
    batched.close()
    yield Figure(
        f"full cycles in batches of {BATCH}, 1 process",
        speed.ours,
        "cycles/s",
        f"one by one: {readable(speed.theirs)} cycles/s",
        speed.ratio,
        [Goal("value", ">=", 40_000)],
    )


def wake_up(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    delays_ms = [wake_ups_ms(fresh(folder), sizes.wake_ups) for _ in range(REPEATS)]
    p50_ms = statistics.median(percentile(each, 0.5) for each in delays_ms)
    p99_ms = statistics.median(percentile(each, 0.99) for each in delays_ms)
    yield Figure(
        "enqueue to claim in another process, p50", p50_ms, "ms", "100/s", goals=[Goal("value", "<", 1.5)]
    )
    yield Figure(
        "enqueue to claim in another process, p99", p99_ms, "ms", "100/s", goals=[Goal("value", "<", 10)]
    )


def wake_ups_ms(folder: Path, count: int) -> list[float]:
    """The times from the start of an enqueue in another process to the return of a waiting claim."""
    tasks = Tasks.open(f"sqlite:///{folder}/queue.db")
    tasks.enqueue(agent=AGENT, payload=0)
    tasks.claim(agent=AGENT)

    def write() -> None:
        writer = Tasks.open(f"sqlite:///{folder}/queue.db")
        for _ in range(count):
            time.sleep(random.uniform(*WAKE_UP_PAUSES_S))
            writer.enqueue(agent=AGENT, payload=time.monotonic_ns())

    child = forking.Process(target=write, daemon=True)
    child.start()
    delays_ms: list[float] = []
    while len(delays_ms) < count:
        for task in tasks.claim(agent=AGENT, wait_s=PATIENCE_S):
            delays_ms.append((time.monotonic_ns() - task.payload) / NS_PER_MS)
            tasks.complete(task.task_id, task.lease)
    child.join(PATIENCE_S)
    tasks.close()
    return delays_ms


def depth(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    def claimer(waiting: int) -> Callable[[], float]:
        filled = Ours(fresh(folder))
        filled.fill(waiting)
        return lambda: claim_ms(filled.tasks, sizes.claims)

    cost = compare(claimer(sizes.many_waiting), claimer(sizes.few_waiting), turns=sizes.claim_turns)
    yield Figure(
        f"claim, {sizes.many_waiting:,} waiting, p50",
        cost.ours,
        "ms",
        f"{sizes.few_waiting:,} waiting: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("ratio", "<=", 1.5)],
    )


def lanes(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    one = filled_lanes(fresh(folder), (2,), sizes)
    four = filled_lanes(fresh(folder), (0, 1, 2, 3), sizes)
    cost = compare(
        lambda: lane_claim_ms(four, (0, 1, 2, 3), sizes.lane_claims),
        lambda: lane_claim_ms(one, (2,), sizes.lane_claims),
        turns=sizes.lane_turns,
    )
    four.close()
    one.close()
    yield Figure(
        "claim by four lanes with promotion, p50",
        cost.ours,
        "ms",
        f"by one lane: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("ratio", "<=", 1.3)],
    )


def filled_lanes(folder: Path, priorities: tuple[int, ...], sizes: Sizes) -> SqliteStore:
    """A store with enough messages in each lane for all claims."""
    store = SqliteStore(folder / "queue.db")
    count = 2 * REPEATS * sizes.lane_turns * sizes.lane_claims
    for priority in priorities:
        message = Envelope(queue=AGENT, payload=json.dumps(PAYLOAD).encode(), priority=priority)
        for first in range(0, count, FILL_BATCH):
            some = [message] * min(FILL_BATCH, count - first)
            store.write(lambda transaction, some=some: transaction.insert(some))  # type: ignore[misc]
    return store


def lane_claim_ms(store: SqliteStore, lanes: tuple[int, ...], claims: int) -> float:
    ages_ns = (PROMOTE_AFTER_NS,) * (len(lanes) - 1)
    terms = Claim(AGENT, "bench", 1, round(LEASE_S * NANOS_PER_S), lanes, ages_ns)
    took_s = [
        seconds(lambda: store.write(lambda transaction: transaction.claim(terms))) for _ in range(claims)
    ]
    return statistics.median(took_s) * MS_PER_S


def listing(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Cancelled tasks are found by an index. COMPLETED ones are not: the second figure is the worst case."""
    filled = Ours(folder)
    filled.fill(sizes.listed)
    for line in filled.tasks.find(limit=sizes.cancelled):
        filled.tasks.cancel(line.task_id)
    yield listing_figure(filled.tasks, "CANCELLED", sizes.cancelled, sizes)
    yield listing_figure(filled.tasks, "COMPLETED", 0, sizes)
    filled.close()


def listing_figure(tasks: Tasks, state: State, count: int, sizes: Sizes) -> Figure:
    def look() -> None:
        assert len(tasks.find(state=state, limit=sizes.cancelled)) == count

    took_ms = median_of(lambda: seconds(look)) * MS_PER_S
    return Figure(f"list {count} {state} tasks of {sizes.listed:,}", took_ms, "ms")


def sweeping(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A sweep that finds one overdue task, with many idle queues and with none."""
    many, few = Ours(fresh(folder)).tasks, Ours(fresh(folder)).tasks
    for first in range(0, sizes.queues, FILL_BATCH):
        numbers = range(first, min(first + FILL_BATCH, sizes.queues))
        many.enqueue_many(
            {"agent": f"agent-{number}", "payload": 0, "delay_s": LEASE_S} for number in numbers
        )
    cost = compare(lambda: sweep_ms(many), lambda: sweep_ms(few), turns=sizes.sweeps)
    many.close()
    few.close()
    yield Figure(
        f"sweep with one task due, {sizes.queues:,} queues",
        cost.ours,
        "ms",
        f"1 queue: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("ratio", "<=", 1.5)],
    )


def sweep_ms(tasks: Tasks) -> float:
    tasks.enqueue(agent=AGENT, payload=0, delay_s=SHORT_S)
    time.sleep(2 * SHORT_S)

    def sweep() -> None:
        assert tasks.sweep() == 1

    return seconds(sweep) * MS_PER_S


def claim_ms(tasks: Tasks, claims: int) -> float:
    """The median time of some claims, whose tasks are then released."""
    took_s: list[float] = []
    claimed = []
    for _ in range(claims):
        begun = time.perf_counter()
        claimed += tasks.claim(agent=AGENT)
        took_s.append(time.perf_counter() - begun)
    assert len(claimed) == claims
    for task in claimed:
        tasks.release(task.task_id, task.lease)
    return statistics.median(took_s) * MS_PER_S


# ---- many callers, one commit ----------------------------------------------------------------------


_SYNCED = NewTask(agent=AGENT, payload=PAYLOAD, durability="group")


def _enqueue_synced(tasks: Tasks) -> str:
    return tasks.enqueue(agent=AGENT, payload=PAYLOAD, durability="group")


def callers(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    yield Figure("fsync probe: write and fsync", median_of(lambda: probe_ms(folder / "probe")), "ms")
    tasks = [Ours(fresh(folder)).tasks for _ in range(3)]
    calls = sizes.callers * sizes.calls_a_caller

    def alone() -> float:
        return sizes.calls_alone / seconds(lambda: _repeat_synced(tasks[0], sizes.calls_alone))

    def as_coroutines() -> float:
        return calls / seconds(lambda: asyncio.run(_coroutines(tasks[1], sizes)))

    def as_threads() -> float:
        return calls / seconds(lambda: _threads(tasks[2], sizes))

    for each in tasks:
        _enqueue_synced(each)
    for what, together, goals in (
        ("asyncio callers, one writer thread", as_coroutines, [Goal("ratio", ">=", 10)]),
        ("threads", as_threads, []),
    ):
        speed = compare(together, alone)
        yield Figure(
            f"enqueue, group, {sizes.callers} {what}",
            speed.ours,
            "tasks/s",
            f"1 caller: {readable(speed.theirs)} tasks/s",
            speed.ratio,
            goals,
        )
    for each in tasks:
        each.close()


def _repeat_synced(tasks: Tasks, count: int) -> None:
    for _ in range(count):
        _enqueue_synced(tasks)


async def _coroutines(tasks: Tasks, sizes: Sizes) -> None:
    writer = StoreWriter(tasks)
    caller_identity = Identity("bench", "operator")

    async def caller() -> None:
        for _ in range(sizes.calls_a_caller):
            await writer.submit(lambda operations: operations.enqueue([_SYNCED]), caller_identity)

    await asyncio.gather(*(caller() for _ in range(sizes.callers)))
    writer.close()


def _threads(tasks: Tasks, sizes: Sizes) -> None:
    crew = [
        threading.Thread(target=_repeat_synced, args=(tasks, sizes.calls_a_caller))
        for _ in range(sizes.callers)
    ]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


# ---- restart ---------------------------------------------------------------------------------------

FIRST_CLAIM = """
import sys
from postroom import Tasks
assert len(Tasks.open(sys.argv[1]).claim(agent=sys.argv[2])) == 1
"""


def restart(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    fill_and_die(folder, sizes.restart_waiting)
    url = f"sqlite:///{folder}/queue.db"

    def first_claim() -> float:
        command = [sys.executable, "-c", FIRST_CLAIM, url, AGENT]
        return seconds(lambda: subprocess.run(command, check=True))

    def bare_start() -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", "import postroom"], check=True))

    cost = compare(first_claim, bare_start)
    yield Figure(
        f"start to first claim, {sizes.restart_waiting:,} waiting",
        cost.ours,
        "s",
        f"a bare Python: {readable(cost.theirs)} s",
        cost.ratio,
        [Goal("value", "<", 1)],
    )
    yield Figure(
        f"start to GET /health, {sizes.restart_waiting:,} waiting",
        median_of(lambda: health_s(folder)),
        "s",
        "postroom tasks serve",
        goals=[Goal("value", "<", 1)],
    )


def fill_and_die(folder: Path, count: int) -> None:
    """Leave the file as a killed process leaves it, without a checkpoint."""

    def fill() -> None:
        Ours(folder).fill(count)
        os.kill(os.getpid(), signal.SIGKILL)

    child = forking.Process(target=fill, daemon=True)
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == -signal.SIGKILL


def health_s(folder: Path) -> float:
    begun = time.perf_counter()
    with serving(folder):
        return time.perf_counter() - begun


# ---- HTTP ------------------------------------------------------------------------------------------


def http(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    filling = Ours(folder, durability="group")  # as a server enqueues
    filling.fill(REPEATS * sizes.requests)
    filling.close()
    token = added_agent(folder)
    with serving(folder) as port:
        rates = [
            in_processes(lambda: requests_per_s(port, token, sizes.requests, sizes.connections))[0]
            for _ in range(REPEATS)
        ]
    yield Figure(
        f"POST /queue/next, {sizes.connections} connections",
        statistics.median(rates),
        "requests/s",
        "one server process, claims synced",
        goals=[Goal("value", ">=", 5_000)],
    )


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "postroom.cli.main", *words]


def added_agent(folder: Path) -> str:
    words = ("tasks", "agent", "add", AGENT, "--data", str(folder))
    done = subprocess.run(command(*words), check=True, capture_output=True, text=True)
    return str(json.loads(done.stdout)["token"])


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A server on the tasks of a folder, from its first successful health check on."""
    port = free_port()
    words = ("tasks", "serve", "--data", str(folder), "--port", str(port))
    server = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_health(port, server)
        yield port
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def await_health(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S) as answer,
        ):
            assert answer.status == 200
            return
        time.sleep(HEALTH_LOOKS_S)
    raise TimeoutError("the server does not answer")


def requests_per_s(port: int, token: str, count: int, connections: int) -> float:
    """Requests per second over bare sockets, with one request at a time on each connection."""
    body = json.dumps({"agent": AGENT}).encode()
    request = (
        f"POST /queue/next HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    poller = select.poll()
    opened = {}
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poller.register(connection, select.POLLIN)
        opened[connection.fileno()] = connection
    begun = time.perf_counter()
    for connection in opened.values():
        connection.sendall(request)
    sent, received = connections, 0
    while received < count:
        for fd, _ in poller.poll():
            _expect_a_task(opened[fd])
            received += 1
            if sent < count:
                opened[fd].sendall(request)
                sent += 1
    took_s = time.perf_counter() - begun
    for connection in opened.values():
        connection.close()
    return count / took_s


def _expect_a_task(connection: socket.socket) -> None:
    """Read one whole answer and check that it holds a task."""
    data = connection.recv(65_536)
    assert data.startswith(b"HTTP/1.1 200"), data[:200]
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65_536)


# ---- encryption ------------------------------------------------------------------------------------


def encryption(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """The processor time of a task from enqueue to completion, with a key file and without one."""
    add_key(folder / "keys", "bench")
    for batch in (1, 100):
        cost = compare(
            lambda batch=batch: task_cpu_us(fresh(folder), folder / "keys", batch, sizes.consumed),  # type: ignore[misc]
            lambda batch=batch: task_cpu_us(fresh(folder), None, batch, sizes.consumed),  # type: ignore[misc]
            turns=1,
        )
        yield Figure(
            f"encrypted task, batches of {batch}, processor time",
            cost.ours,
            "us",
            f"without a key file: {readable(cost.theirs)} us",
            cost.ratio,
            [Goal("ratio", "<=", 2.0)],
        )


def task_cpu_us(folder: Path, keys: Path | None, batch: int, count: int) -> float:
    with Tasks.open(f"sqlite:///{folder}/queue.db", key_file=keys) as tasks:
        begun = time.process_time()
        for _ in range(0, count, batch):
            tasks.enqueue_many([{"agent": AGENT, "payload": PAYLOAD}] * batch)
            claimed = tasks.claim(agent=AGENT, limit=batch)
            tasks.complete_many([(one.task_id, one.lease, PAYLOAD) for one in claimed])
        return (time.process_time() - begun) / count * 1e6


BENCHES: tuple[Bench, ...] = (
    produce, consume, cycles, lanes, listing, sweeping, wake_up, callers, restart, http, depth, encryption,
)  # fmt: skip

if __name__ == "__main__":
    run(main)
