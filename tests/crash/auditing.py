"""The audit stream under kills, and the history checker on very many histories.

`kills-audit`: the shipper and the programs whose events it ships are killed at random and restarted. At the
end the stream holds every committed event once, in order, and equal to the store; nothing acknowledged is
missing; the chain of segments is intact; and the history checker finds nothing.
`histories-audit`: in clean generated histories the checker finds nothing, in others exactly the planted
faults.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from postroom import Tasks
from postroom.audit import shipper as shipping_module
from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.core.formats.events import AuditEvent, of_store
from postroom.core.history.history_checker import History
from postroom.server.folder.shipping import Shipping, Sources, opened
from postroom.settings import AuditSettings
from tests.contract import test_history_checker
from tests.crash.ledger import Tally
from tests.crash.taskprograms import open_tasks
from tests.crash.tasks import Cast, Tick, finish, killed, portions, scratch
from tests.crash.workers import Crew, Report, Worker

KILLS_PER_ROUND = 25
LOOK_EVERY_S = 0.005
RESULT_FACTS = ("result_bytes", "result_sha256")
SEAL_BYTES = 60_000  # small, so that many segments are sealed and crashes hit the sealing
SEAL_AFTER_S = 0.2
BATCH_FEW = 200
SHIPPERS_SHARE = 0.5  # of the kills


def run(count: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Kill `count` times, in rounds."""
    tally = Tally()
    rng = Random(f"kills-audit/{seed}")
    for number, size in enumerate(portions(count, KILLS_PER_ROUND)):
        with scratch(number) as folder:
            _round(folder, size, rng, tally, sabotage)
        tick(size)
    return tally


def ship(report: Report, *, folder: str, careless: bool = False) -> None:
    """The program that gets killed: it reports after each shipped batch."""
    shipping_module.BATCH_MAX = BATCH_FEW
    while True:
        with contextlib.suppress(FileNotFoundError), _shipping(Path(folder)) as shipping:
            if careless:
                _drop_some(shipping.sink)
            while True:
                shipped = shipping.shipper.ship()
                shipping.tend()
                if shipped:
                    report("shipped", shipped)
                time.sleep(LOOK_EVERY_S)


def _shipping(folder: Path) -> "contextlib.AbstractContextManager[Shipping]":
    settings = AuditSettings(environment="dev", seal_bytes=SEAL_BYTES, seal_after_s=SEAL_AFTER_S)
    return opened(folder / "audit", Sources(stores=(f"sqlite:///{folder}/queue.db",)), settings)


def _drop_some(sink: SegmentSink) -> None:
    write = sink.write

    def careless(events: Sequence[AuditEvent]) -> None:
        half = len(events) // 2
        write([*events[:half], *events[half + 1 :]] if half else events)

    sink.write = careless  # type: ignore[method-assign]


class _AuditCast(Cast):
    """The programs that work on tasks, and a shipper."""

    producer_pause_s = 0.02  # a kill waits for the shipper, which must ship all events until then

    def __init__(self, folder: Path, crew: Crew, rng: Random, sabotage: str) -> None:
        super().__init__(folder, crew, rng, "")
        self._careless = sabotage == "careless"
        self._shipper = self._start_shipper()

    def kill_one(self) -> None:
        if self._rng.random() >= SHIPPERS_SHARE:
            super().kill_one()
            return
        self._crew.kill_at_random(self._shipper, self._rng, 2)
        self._shipper = self._start_shipper()

    def _start_shipper(self) -> Worker:
        return self._crew.start("shipper:", ship, folder=self._folder, careless=self._careless)


def _round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    acknowledged, words = killed(_AuditCast, folder, kills, rng, tally, sabotage)
    with open_tasks(folder) as tasks:
        finish(tasks, words, tally)
        with _shipping(folder) as shipping:
            shipping.once()
        tally.acknowledged += len(acknowledged)
        judge(tasks, folder / "audit", set(acknowledged), tally)


def judge(tasks: Tasks, folder: Path, acknowledged: set[str], tally: Tally) -> None:
    """Compare the stream with the store, with the acknowledged tasks, with its chain, and with itself."""
    segments = Segments(folder, on_trouble=tally.breaks)
    events = list(segments.events())
    tally.count("events", len(events))
    tally.count("segments", len(segments.entries()))
    times = Counter(event.event_id for event in events)
    tally.count("repeated", sum(n - 1 for n in times.values()))
    _judge_numbers(tasks, events, tally)
    _judge_content(tasks, events, acknowledged, tally)
    for finding in verify(folder):
        tally.breaks(f"{finding.file}: {finding.reason}")
    history = History()
    for event in events:
        history.add(event)
    verdict = history.verdict(absent=lambda message: tasks.store.load(message.message_id) is None)
    for violation in verdict.violations:
        tally.breaks(f"{violation.rule}: {violation.sentence}")


def _judge_numbers(tasks: Tasks, events: list[AuditEvent], tally: Tally) -> None:
    numbers = [event.seq for event in events]
    missing = set(range(1, tasks.store.newest_event() + 1)) - set(numbers)
    tally.lost += len(missing)
    first_seen = list(dict.fromkeys(numbers))
    if first_seen != sorted(first_seen):
        tally.breaks("the stream is not in the order of its numbers")
    if numbers and max(numbers) > tasks.store.newest_event():
        tally.breaks("the stream is ahead of the store")


def _as_stored(shown: AuditEvent) -> AuditEvent:
    """An event of the stream without what its shipper adds: the payload, and the digest of the result."""
    detail = {name: value for name, value in shown.detail.items() if name not in RESULT_FACTS}
    return msgspec.structs.replace(shown, payload="", detail=detail)


def _judge_content(tasks: Tasks, events: list[AuditEvent], acknowledged: set[str], tally: Tally) -> None:
    shipped = {event.seq: event for event in events}
    source = f"tasks:{tasks.store.identity()}"
    for event in tasks.store.events(limit=1_000_000):
        shown = shipped.get(event.seq)
        if shown is not None and _as_stored(shown) != of_store(event, source, "tasks"):
            tally.torn += 1
    tokens = {
        msgspec.json.decode(event.payload)["token"]
        for event in events
        if event.kind == "created" and event.payload.startswith('{"token"')
    }
    tally.lost += len(acknowledged - tokens)


def check_histories(count: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Check a number of clean and of faulty histories."""
    tally = Tally()
    for number in range(count):
        try:
            planted = test_history_checker.run(1, 1_000 * seed + number)
        except AssertionError as error:
            tally.breaks(f"history {1_000 * seed + number}: {error}")
        else:
            tally.count("violations_planted_and_found", planted.total())
        tally.count("histories", 2)
        tick(1)
    return tally
