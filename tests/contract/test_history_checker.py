"""The history checker: no findings in clean histories, generated and real, and every planted fault found."""

import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from postroom import Tasks
from postroom.audit.reader import Segments
from postroom.contracts.tasks.task_operations import TaskFields
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.formats import events
from postroom.core.formats.events import AuditEvent
from postroom.core.history.history_checker import RULES, History, HistoryVerdict
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.errors import PostroomError
from postroom.message import Envelope
from postroom.pipeline.generator.faults import Fault
from postroom.pipeline.generator.generate import FAULTS, generate
from postroom.stores.base import ByIds
from postroom.stores.transaction import Claim
from postroom.testing import ManualClock
from tests.quick import QUICK, quick_path

__all__ = ["quick_path"]  # a fixture

HISTORIES = 30
SEED = 4_000
DAY_US = 86_400_000_000
AGENTS = ("a", "b")
ROUNDS = 500
S = 1_000_000_000


def judged(stream: Iterable[AuditEvent], **stretch: int) -> HistoryVerdict:
    history = History(**stretch)  # type: ignore[arg-type]
    for event in stream:
        history.add(event)
    return history.verdict(horizon_us=DAY_US)


# ---- histories that were made up ---------------------------------------------------------------------


def check_clean(folder: Path, seed: int) -> None:
    made = generate(folder, 40 + seed % 300, seed)
    stream = list(Segments(folder).events())
    verdict = judged(stream)
    assert verdict.violations == []
    assert (verdict.events, verdict.repeats, verdict.open) == (made.events, made.repeats, 0)
    assert len(stream) == made.lines
    check_stretch(stream, random.Random(seed))


def check_stretch(stream: list[AuditEvent], chosen: random.Random) -> None:
    """Every part of a clean history is clean."""
    one, other = sorted(event.ts_us for event in chosen.sample(stream, 2))
    history = History(since_us=one, until_us=other)
    for event in stream:
        history.add(event)
    assert history.verdict().violations == []


def check_faulty(folder: Path, seed: int) -> Counter[str]:
    generate(folder, 150 + seed % 400, seed, faults=True)
    planted = msgspec.json.Decoder(Fault).decode_lines((folder / FAULTS).read_bytes())
    found = judged(Segments(folder).events()).violations
    assert Counter((one.rule, one.message_id) for one in found) == Counter(
        (one.rule, one.message_id) for one in planted
    )
    gaps = {one.event_ids for one in found if one.rule == "gap"}
    assert gaps == {one.event_ids for one in planted if one.rule == "gap"}
    return Counter(one.rule for one in planted)


def run(count: int, seed: int) -> Counter[str]:
    """Check a number of clean and of faulty histories; returns how often each rule was violated."""
    planted: Counter[str] = Counter()
    for number in range(seed, seed + count):
        with tempfile.TemporaryDirectory(prefix="postroom-", dir=QUICK) as folder:
            check_clean(Path(folder) / "clean", number)
            planted += check_faulty(Path(folder) / "faulty", number)
    return planted


def test_every_planted_violation_is_found_and_nothing_else() -> None:
    planted = run(HISTORIES, SEED)
    assert set(planted) == set(RULES)


# ---- histories that happened -------------------------------------------------------------------------


class Work:
    """Two agents, their workers and an operator, with random actions."""

    def __init__(self, tasks: Tasks, clock: ManualClock, seed: int) -> None:
        self.tasks = tasks
        self.clock = clock
        self.random = random.Random(seed)
        self.ids: list[str] = []
        self.held: list[tuple[str, int]] = []

    def go_on(self) -> None:
        verbs = (
            self.enqueue, self.enqueue, self.enqueue_ranked, self.claim, self.claim, self.claim_by_rank,
            self.speak, self.speak, self.speak, self.order, self.put_aside, self.wait, self.decide,
        )  # fmt: skip
        try:
            self.random.choice(verbs)()
        except PostroomError:
            return  # refused: then nothing may have happened

    def enqueue(self) -> None:
        agent = self.random.choice(AGENTS)
        new: TaskFields = {
            "agent": agent,
            "payload": 1,
            "delay_s": self.random.choice((0, 0, 0, 5)),
            "task_id": f"{agent}-{self.random.randrange(20)}" if self.random.random() < 0.2 else None,
        }
        self.ids += self.tasks.enqueue_many([new] * self.random.choice((1, 1, 3)))

    def enqueue_ranked(self) -> None:
        new = [
            Envelope(
                queue="a",
                payload=b"1",
                priority=self.random.randrange(4),
                ttl_ns=self.random.choice((0, 9 * S)),
            )
            for _ in range(3)
        ]
        self.ids += [one.message_id for one in self.tasks.store.write(lambda t: t.insert(new))]

    def claim(self) -> None:
        limit, lease_s = self.random.choice((1, 4)), self.random.choice((5.0, 60.0))
        claimed = self.tasks.claim(agent=self.random.choice(AGENTS), limit=limit, lease_s=lease_s)
        self.held += [(task.task_id, task.lease) for task in claimed]

    def claim_by_rank(self) -> None:
        """Claim as the engine does: over all lanes, with promotion by age."""
        terms = Claim("a", "w", 3, 60 * S, (0, 1, 2, 3), (5 * S, 15 * S, 30 * S))
        found = self.tasks.store.write(lambda transaction: transaction.claim(terms))
        self.held += [(delivery.message_id, delivery.lease) for delivery in found]

    def speak(self) -> None:
        if not self.held:
            return
        task_id, lease = self.random.choice(self.held[-8:])
        match self.random.randrange(6):
            case 0:
                self.tasks.heartbeat(task_id, lease)
            case 1:
                self.tasks.release(task_id, lease)
            case 2:
                self.tasks.fail(task_id, lease, "no", self.random.choice((None, 0.0, 3.0)))
            case _:
                self.tasks.complete(task_id, lease, {"decision": "go"})

    def order(self) -> None:
        if self.ids:
            task_id = self.random.choice(self.ids)
            self.random.choice((self.tasks.cancel, self.tasks.retry))(task_id)

    def wait(self) -> None:
        self.clock.advance(self.random.choice((0.5, 6.0, 70.0)))
        self.tasks.sweep()

    def put_aside(self) -> None:
        if self.ids:
            pick = ByIds((self.random.choice(self.ids),))
            self.tasks.store.write(
                lambda t: t.apply(pick, lambda record, now: lifecycle.quarantine(record, now, "poison"))
            )

    def decide(self) -> None:
        for task_id in self.random.sample(self.ids, min(10, len(self.ids))):
            self.tasks.open_decision(task_id)
        for decision in self.tasks.claim(agent=DECISIONS, limit=3):
            self.tasks.settle(decision)


def shipped_events(tasks: Tasks) -> Iterator[AuditEvent]:
    found = tasks.store.events(0, 1_000_000)
    return (events.of_store(event, "tasks:s", "tasks") for event in found)


@pytest.mark.parametrize("seed", range(6))
def test_real_store_has_no_violations(seed: int, quick_path: Path) -> None:
    clock = ManualClock()
    url = f"sqlite:///{quick_path}/queue.db"
    with Tasks.open(url, clock=clock, retry=RetryPolicy(max_retries=2)) as tasks:
        work = Work(tasks, clock, seed)
        for _ in range(ROUNDS):
            work.go_on()
        stream = list(shipped_events(tasks))
        verdict = judged(stream)
        assert verdict.violations == []
        counts = tasks.store.count()
        open_states = {"SCHEDULED", "QUEUED", "RETRYING", "PROCESSING"}
        still_open = sum(
            n for states in counts.values() for state, n in states.items() if state in open_states
        )
        assert verdict.open == still_open
        check_stretch(stream, random.Random(seed))
    assert {one.kind for one in stream} >= {
        "dequeued", "lease_lapsed", "released", "dead_letter", "replayed", "promoted", "expired", "cancelled",
        "quarantined", "retry_scheduled", "duplicate", "execution_started", "delivered",
    }  # fmt: skip
