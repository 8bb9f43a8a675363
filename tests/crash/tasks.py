"""Task queues under kills, stops and load: nothing accepted is lost, and no stale call is accepted.

`kills-tasks`: producers, consumers and a harness are killed at random and restarted. At the end, every
acknowledged task is done, with one completion, under the lease that its result names.
`stops-tasks`: holders are stopped until their leases have ended and other workers have the tasks.
`mix-tasks`: four producers and four consumers at once; checks the order and the longest wait.
`soak-tasks`: very many cycles, during which the files must not grow.
"""

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import apsw

from postroom import Tasks
from postroom.contracts.tasks.tasks import Retention, TaskInfo
from tests.crash import taskprograms
from tests.crash.ledger import Delivery, Tally, acknowledged_in, compare, number_of, token_of
from tests.crash.taskprograms import WAL_PAGES_FEW, open_tasks, task_of
from tests.crash.workers import STUCK_S, Crew, Worker, scratch_parent

KILLS_PER_ROUND = 25
LINES_MAX = 8
LEASE_S = 0.1  # short, so that some leases of live workers end too
PRODUCER_PAUSE_S = 0.001  # the tasks have to be finished by the end of each round
AGENT = "coder"
FOUND_MAX = 1_000
EVENTS_MAX = 10_000
DELIVERIES_SHOWN_MAX = 4

HOLDERS = 4
STOPS_PER_ROUND = 200
STOPPED_LEASE_S = 0.06

MIX_QUEUES = ("left", "right")
MIX_CREWS = 2  # of a producer and a consumer, for each queue
MIX_STALL_US = 500_000
LOOK_EVERY_S = 0.5

SOAK_BATCH = 50
SOAK_POINTS = 10
SOAK_SETTLED_POINT = 2  # by then the file has reached its size
SOAK_GROWTH_MAX = 1.5

Tick = Callable[[int], None]


def run(scenario: str, count: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Run one scenario: a number of kills, stops, seconds or cycles."""
    tally = Tally()
    rng = Random(f"{scenario}/{seed}")
    match scenario:
        case "kills-tasks":
            for number, size in enumerate(portions(count, KILLS_PER_ROUND)):
                with scratch(number) as folder:
                    _kill_round(folder, size, rng, tally, sabotage)
                tick(size)
        case "stops-tasks":
            for number, size in enumerate(portions(count, STOPS_PER_ROUND)):
                with scratch(number) as folder:
                    _stop_round(folder, size, rng, tally)
                tick(size)
        case "mix-tasks":
            with scratch(0) as folder:
                _mix(folder, count, rng, tally, tick)
        case "soak-tasks":
            with scratch(0) as folder:
                _soak(folder, count, tally, tick)
        case _:
            raise ValueError(scenario)
    return tally


def portions(count: int, size: int) -> list[int]:
    return [min(size, count - first) for first in range(0, count, size)]


@contextmanager
def scratch(number: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="postroom-tasks-", dir=scratch_parent(number)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- kills -------------------------------------------------------------------------------------------


class Cast:
    """The processes of a round of kills, and their replacements."""

    producer_pause_s = PRODUCER_PAUSE_S

    def __init__(self, folder: Path, crew: Crew, rng: Random, sabotage: str) -> None:
        self._folder = str(folder)
        self._crew = crew
        self._rng = rng
        self._sabotage = sabotage
        self._wal_pages = rng.choice(WAL_PAGES_FEW)
        self._names = (f"w{number}" for number in itertools.count())
        self.living = [self._producer("a"), self._producer("b"), self._consumer(), self._consumer()]
        self.living.append(self._harness())

    def kill_one(self) -> None:
        """Kill one process, and start a replacement."""
        place = self._rng.randrange(len(self.living))
        worker = self.living[place]
        self._crew.kill_at_random(worker, self._rng, LINES_MAX if worker.lines else 1)
        kind, _, writer = worker.name.partition(":")
        match kind:
            case "producer":
                self.living[place] = self._producer(writer)
            case "consumer":
                self.living[place] = self._consumer()
            case _:
                self.living[place] = self._harness()

    def _producer(self, writer: str) -> Worker:
        """The producer continues after the last acknowledged number; the next one may be stored already."""
        name = f"producer:{writer}"
        before = [worker.lines[-1] for worker in self._crew.workers if worker.name == name and worker.lines]
        first = number_of(before[-1].split(" ")[0]) + 1 if before else 0
        return self._crew.start(
            name,
            taskprograms.producer,
            name=writer,
            first=first,
            batch=4,
            pause_s=self.producer_pause_s,
            early=self._sabotage == "early",
            **self._shared(),
        )

    def _consumer(self) -> Worker:
        name = next(self._names)
        return self._crew.start(
            f"consumer:{name}",
            taskprograms.consumer,
            name=name,
            lease_s=LEASE_S,
            batch=4,
            wayward=not self._sabotage,
            early=self._sabotage == "late",
            **self._shared(),
        )

    def _harness(self) -> Worker:
        return self._crew.start("harness:", taskprograms.harness, lease_s=LEASE_S, **self._place())

    def _shared(self) -> dict[str, object]:
        return {"seed": self._rng.getrandbits(32), **self._place()}

    def _place(self) -> dict[str, object]:
        return {"folder": self._folder, "agent": AGENT, "wal_pages": self._wal_pages}


def killed(
    cast: type[Cast], folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str
) -> tuple[dict[str, str], list[list[str]]]:
    """Kill one process repeatedly, and all at the end. Returns the acknowledgements and the reports."""
    with Crew() as crew:
        players = cast(folder, crew, rng, sabotage)
        for _ in range(kills):
            players.kill_one()
            tally.count("kills")
        crew.kill_all()
        lines = [*crew.lines()]
        acknowledged = acknowledged_in(producers_lines(crew.workers))
    return acknowledged, [line.split(" ") for line in lines]


def _kill_round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    acknowledged, reports = killed(Cast, folder, kills, rng, tally, sabotage)
    tally.acknowledged += len(acknowledged)
    with open_tasks(folder) as tasks:
        finish(tasks, reports, tally)
        _judge(tasks, folder, acknowledged, reports, tally)


def producers_lines(workers: Iterable[Worker]) -> Iterator[str]:
    for worker in workers:
        if worker.name.startswith("producer"):
            yield from worker.lines


def finish(tasks: Tasks, reports: list[list[str]], tally: Tally) -> None:
    """Finish the rest, as the next consumer and harness would, after the leases of dead workers."""

    def report(*words: object) -> None:
        reports.append([str(word) for word in words])

    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        claimed = tasks.claim(agent=AGENT, limit=100, lease_s=STUCK_S)
        taskprograms.report_claims(report, claimed)
        for task in claimed:
            tasks.complete(task.task_id, task.lease, {"under": task.lease})
            report("completed", task.task_id, task.lease)
        taskprograms.drain(report, tasks, AGENT, STUCK_S)
        totals = tasks.status().totals
        if not (totals.get("pending") or totals.get("claimed") or tasks.find(agent=AGENT, state="COMPLETED")):
            return
        time.sleep(0.005)
    tally.breaks(f"not everything comes to an end: {tasks.status().totals}")


def _judge(
    tasks: Tasks, folder: Path, acknowledged: dict[str, str], reports: list[list[str]], tally: Tally
) -> None:
    infos = [tasks.get(task_id) for task_id in ids_of(tasks, AGENT)]
    compare(acknowledged, map(delivery_of, infos), tally)
    for info in infos:
        if info.state != "DONE":
            tally.breaks(f"{info.task_id} is {info.state} in the end")
    _judge_completions(infos, reports, tally)
    _judge_executions(infos, reports, tally)
    _judge_deliveries(infos, reports, tally)
    check_store(tasks, folder, tally)


def ids_of(tasks: Tasks, agent: str) -> list[str]:
    found: list[str] = []
    after = 0
    while lines := tasks.find(agent=agent, after=after, limit=FOUND_MAX):
        found += [line.task_id for line in lines]
        after = lines[-1].seq
    return found


def delivery_of(info: TaskInfo) -> Delivery:
    return Delivery(info.payload["token"], info.task_id, info.payload["body"])


def _judge_completions(infos: list[TaskInfo], reports: list[list[str]], tally: Tally) -> None:
    """One completion for each task, under the lease that its result names; no other was acknowledged."""
    accepted: defaultdict[str, set[int]] = defaultdict(set)
    refused: defaultdict[str, set[int]] = defaultdict(set)
    for row in reports:
        if row[0] == "completed":
            accepted[row[1]].add(int(row[2]))
        elif row[0] == "stale":
            refused[row[1]].add(int(row[-1]))
    for info in infos:
        final = info.result["under"]
        if accepted[info.task_id] - {final}:
            tally.breaks(f"{info.task_id}: completed under {accepted[info.task_id]}, but kept is {final}")
        if final in refused[info.task_id]:
            tally.breaks(f"{info.task_id}: lease {final} was refused, and its result was kept")
        ends = [event.lease for event in info.history if event.kind == "execution_completed"]
        if ends != [final]:
            tally.breaks(f"{info.task_id}: its history has completions under {ends}, its result {final}")
    tally.count("stale_words_refused", sum(len(leases) for leases in refused.values()))


def _judge_executions(infos: list[TaskInfo], reports: list[list[str]], tally: Tally) -> None:
    """Every result was executed before its task was done, at least once, and always the same result."""
    executed: defaultdict[str, set[str]] = defaultdict(set)
    settled: Counter[str] = Counter()
    for row in reports:
        if row[0] == "executed":
            executed[row[2]].add(row[4])
            tally.count("executions")
        elif row[0] == "settled":
            settled[row[2]] += 1
    for info in infos:
        if executed[info.task_id] != {str(info.result["under"])}:
            tally.breaks(f"{info.task_id}: the results {executed[info.task_id]} were executed")
        tally.doubled += max(0, settled[info.task_id] - 1)


def _judge_deliveries(infos: list[TaskInfo], reports: list[list[str]], tally: Tally) -> None:
    """How often each task was delivered, by its history, which must have every delivery."""
    reported: defaultdict[str, set[int]] = defaultdict(set)
    for row in reports:
        if row[0] == "claimed":
            reported[row[1]].add(int(row[2]))
            tally.torn += row[3] == "TORN"
    for info in infos:
        leases = [event.lease for event in info.history if event.kind == "dequeued"]
        if reported[info.task_id] - set(leases):
            tally.breaks(f"{info.task_id}: a delivery is missing in its history")
        if leases != sorted(set(leases)):
            tally.breaks(f"{info.task_id}: its leases do not rise")
        times = len(leases) if len(leases) <= DELIVERIES_SHOWN_MAX else f"over_{DELIVERIES_SHOWN_MAX}"
        tally.count(f"delivered_{times}_times")


def check_store(tasks: Tasks, folder: Path, tally: Tally) -> None:
    """The database is sound, its counters are right, and no event is missing or duplicated."""
    connection = apsw.Connection(str(folder / "queue.db"))
    rows = connection.execute("PRAGMA integrity_check").fetchall()
    if rows != [("ok",)]:
        tally.breaks(f"SQLite finds {rows[:3]}")
    counted = Counter(
        state
        for state, n in connection.execute("SELECT state, count(*) FROM records GROUP BY state")
        for _ in range(n)
    )
    connection.close()
    shown: Counter[str] = Counter()
    for queue in tasks.status().agents.values():
        shown.update(queue.states)
    if counted != shown:
        tally.breaks(f"the counters say {dict(shown)}, and there are {dict(counted)}")
    after = 0
    while events := tasks.events(after, EVENTS_MAX):
        numbers = [event.seq for event in events]
        if numbers != list(range(after + 1, after + 1 + len(events))):
            tally.breaks(f"the numbers of the events after {after} have a gap or come twice")
        after = numbers[-1]


# ---- stops -------------------------------------------------------------------------------------------


def _stop_round(folder: Path, stops: int, rng: Random, tally: Tally) -> None:
    """Holders are stopped, their leases end, other workers get the tasks; then the holders call."""
    options = {"folder": str(folder), "agent": AGENT, "lease_s": STOPPED_LEASE_S}
    with Crew() as crew, open_tasks(folder) as tasks:
        holders = [
            crew.start(f"h{n}", taskprograms.holder, name=f"h{n}", seed=rng.getrandbits(32), **options)
            for n in range(min(HOLDERS, stops))
        ]
        left = stops
        while left > 0:
            some = holders[:left]
            _stop_some(crew, some, tasks, rng, tally)
            left -= len(some)
        check_store(tasks, folder, tally)


def _stop_some(crew: Crew, holders: list[Worker], tasks: Tasks, rng: Random, tally: Tally) -> None:
    tokens = [token_of("stop", number, rng.randint(0, 200)) for number in range(len(holders))]
    ids = tasks.enqueue_many(task_of(token, AGENT) for token in tokens)
    tally.acknowledged += len(ids)
    held: dict[str, Worker] = {}
    crew.await_that(lambda: _see_held(holders, ids, held), "claiming")
    for worker in holders:
        os.kill(worker.pid, signal.SIGSTOP)
    kept = _taken_over(tasks, ids, rng)
    for worker in holders:
        os.kill(worker.pid, signal.SIGCONT)
    crew.await_that(lambda: all(worker.lines[-1].startswith("said") for worker in holders), "speaking")
    for worker in holders:
        _, task_id, _, *answers = worker.lines[-1].split(" ")
        for answer in answers:
            tally.count("stale_words")
            if not answer.endswith(":refused"):
                tally.breaks(f"{task_id}: a stale {answer}")
        tally.count("stops")
        info = tasks.get(task_id)
        if (info.state, info.result) != kept[task_id]:
            tally.breaks(f"{task_id}: a stale call changed {kept[task_id]} to {info.state}, {info.result}")
    for task_id in ids:
        if tasks.get(task_id).state == "PROCESSING":
            tasks.cancel(task_id)


def _see_held(holders: list[Worker], ids: list[str], held: dict[str, Worker]) -> bool:
    """Whether each holder holds one of these tasks."""
    for worker in holders:
        last = worker.lines[-1].split(" ") if worker.lines else [""]
        if last[0] == "holds" and last[1] in ids:
            held[last[1]] = worker
    return len(held) == len(holders)


def _taken_over(tasks: Tasks, ids: list[str], rng: Random) -> dict[str, tuple[str, object]]:
    """Claim the tasks after their leases have ended, and finish some. Returns the state that must stay."""
    kept: dict[str, tuple[str, object]] = {}
    while len(kept) < len(ids):
        for task in tasks.claim(agent=AGENT, limit=len(ids), lease_s=STUCK_S, wait_s=STUCK_S):
            fate = rng.choice(["keep", "complete", "cancel"])
            if fate == "complete":
                tasks.complete(task.task_id, task.lease, "by the next one")
            elif fate == "cancel":
                tasks.cancel(task.task_id)
            info = tasks.get(task.task_id)
            kept[task.task_id] = (info.state, info.result)
    return kept


# ---- everybody at once -------------------------------------------------------------------------------


def _mix(folder: Path, length_s: int, rng: Random, tally: Tally, tick: Tick) -> None:
    with Crew() as crew:
        producers, consumers = _mixed_crew(crew, folder, rng)
        for _ in range(length_s):
            _drain_for(crew, 1.0)
            tick(1)
        for producer in producers:
            producer.kill()
        sent = [line.split(" ") for producer in producers for line in producer.lines]
        with open_tasks(folder) as tasks:
            tally.count("waiting_when_producers_end", tasks.status().totals.get("pending", 0))
            crew.await_that(lambda: _all_completed(crew, tasks), "consuming everything")
        _drain_for(crew, LOOK_EVERY_S)  # the latest completion is about to be reported
        crew.kill_all()
    reports = [line.split(" ") for consumer in consumers for line in consumer.lines]
    acknowledged = {token: task_id for token, task_id, _ in sent}
    tally.acknowledged += len(acknowledged)
    _judge_mix(acknowledged, reports, tally)
    waits = [int(row[2]) for row in sent] + [int(row[-1]) for row in reports if row[-1]]
    tally.count("longest_wait_of_a_call_us", max(waits))
    tally.count("waits_above_500_ms", sum(wait > MIX_STALL_US for wait in waits))
    tally.count("tasks_per_s", len(acknowledged) // length_s)
    with open_tasks(folder) as tasks:
        check_store(tasks, folder, tally)


def _mixed_crew(crew: Crew, folder: Path, rng: Random) -> tuple[list[Worker], list[Worker]]:
    producers: list[Worker] = []
    consumers: list[Worker] = []
    for queue, number in itertools.product(MIX_QUEUES, range(MIX_CREWS)):
        name = f"{queue}{number}"
        options = {"folder": str(folder), "agent": queue, "name": name, "timed": True}
        producers.append(crew.start(f"p-{name}", taskprograms.producer, seed=rng.getrandbits(32), **options))
        consumers.append(
            crew.start(f"c-{name}", taskprograms.consumer, seed=rng.getrandbits(32), batch=10, **options)
        )
    return producers, consumers


def _drain_for(crew: Crew, length_s: float) -> None:
    until = time.monotonic() + length_s
    while time.monotonic() < until:
        crew.drain(0.01)


def _all_completed(crew: Crew, tasks: Tasks) -> bool:
    """Read from time to time, so that no worker blocks on a full pipe."""
    _drain_for(crew, LOOK_EVERY_S)
    totals = tasks.status().totals
    return not totals.get("pending") and not totals.get("claimed")


def _judge_mix(acknowledged: dict[str, str], reports: list[list[str]], tally: Tally) -> None:
    """Everything was claimed and completed once, and leases were given in the order of each queue."""
    claims: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    done: Counter[str] = Counter()
    for row in reports:
        if row[0] == "completed":
            done[row[1]] += 1
        elif row[0] == "claimed":
            queue = next(queue for queue in MIX_QUEUES if row[3].startswith(queue))
            claims[queue].append((int(row[2]), int(row[1].rpartition("-")[2]), row[3]))
        else:
            tally.breaks(f"a consumer reported {' '.join(row)}")
    tally.lost += len(set(acknowledged.values()) - done.keys())
    tally.doubled += sum(times - 1 for times in done.values())
    for queue, claimed in claims.items():
        places = [seq for _, seq, _ in sorted(claimed)]
        if places != sorted(places):
            tally.breaks(f"{queue}: tasks were handed out in another order than they came")
        _judge_writers([token for _, _, token in sorted(claimed)], tally)


def _judge_writers(tokens: list[str], tally: Tally) -> None:
    last: dict[str, int] = {}
    for token in tokens:
        writer = token.rsplit(".", 2)[0]
        if number_of(token) != last.get(writer, -1) + 1:
            tally.breaks(f"{token} came after number {last.get(writer)} of its writer")
        last[writer] = number_of(token)


# ---- very many cycles --------------------------------------------------------------------------------


def _soak(folder: Path, cycles: int, tally: Tally, tick: Tick) -> None:
    """Full cycles with hardly any retention: the files keep their early size."""
    tasks = open_tasks(folder, retention=Retention(finished_s=0.0, dead_s=0.0, events_s=0.0, keys_s=0.0))
    wanted = [task_of(token_of("soak", number, 100), AGENT) for number in range(SOAK_BATCH)]
    part = max(SOAK_BATCH, cycles // SOAK_POINTS)
    sizes: list[int] = []
    for _ in range(SOAK_POINTS):
        for _ in range(part // SOAK_BATCH):
            tasks.enqueue_many(wanted)
            claimed = tasks.claim(agent=AGENT, limit=SOAK_BATCH)
            tasks.complete_many((task.task_id, task.lease, None) for task in claimed)
            tally.acknowledged += len(claimed)
        sizes.append(_kib(folder / "queue.db"))
        tally.count(f"kib_at_{len(sizes):02d}", sizes[-1])
        tally.count(f"wal_kib_at_{len(sizes):02d}", _kib(folder / "queue.db-wal"))
        tick(part)
    tally.count("tasks_left", sum(tasks.status().totals.values()))
    if sizes[-1] > SOAK_GROWTH_MAX * sizes[SOAK_SETTLED_POINT]:
        tally.breaks(f"the file grows with the cycles: {sizes} KiB")
    check_soaked(folder, tally)
    tasks.close()


def _kib(path: Path) -> int:
    return path.stat().st_size // 1024 if path.exists() else 0


def check_soaked(folder: Path, tally: Tally) -> None:
    connection = apsw.Connection(str(folder / "queue.db"))
    for table in ("records", "events", "keys"):
        rows = connection.execute(f"SELECT count(*) FROM {table}").get  # noqa: S608 - a constant
        tally.count(f"rows_in_{table}", rows)
    if connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
        tally.breaks("SQLite finds the database damaged")
    connection.close()
