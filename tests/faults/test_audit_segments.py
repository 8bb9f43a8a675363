"""A folder of segments under real processes: killed at random and at system calls, verified at work.

`run(kills, seed)` is what `make crash` does more often.
"""

import secrets
import tempfile
from pathlib import Path
from random import Random

import pytest

from postroom.audit.chain import read_chain
from postroom.audit.reader import Segments
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.message import Durability
from tests.crash import syscalls
from tests.crash.ledger import Tally
from tests.crash.segmentupdates import SEGMENT_UPDATES
from tests.crash.updates import Update
from tests.crash.workers import Crew, Report, scratch_parent
from tests.quick import quick_path
from tests.segmentstories import SOURCE, events, seqs

__all__ = ["quick_path"]

KILLS = 20
SEAL_BYTES = 6_000
DURABILITIES: tuple[Durability, ...] = ("os", "group")


# ---- kills at random -------------------------------------------------------------------------------


def ship(report: Report, folder: Path, seed: int) -> None:
    """Continue from the sink's position, and report every acknowledged position."""
    rng = Random(seed)
    sink = SegmentSink(folder, seal_bytes=SEAL_BYTES, durability=DURABILITIES[seed % 2])
    while True:
        count = rng.choice([1, 3, 10, 40])
        sink.write(events(sink.position(SOURCE) + 1, count, payload="x" * rng.randrange(60)))
        report(sink.position(SOURCE))
        if rng.random() < 0.1:
            sink.seal()


def run(kills: int, seed: int, *, sabotage: bool = False) -> Tally:
    """Kill the writer repeatedly, and check all guarantees after each kill and at the end."""
    rng = Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory(dir=scratch_parent(seed)) as parent:
        folder = Path(parent) / "audit"
        retained = acknowledged = 0
        for _ in range(kills):
            with Crew() as crew:
                worker = crew.start("shipper", ship, folder=folder, seed=rng.randrange(1 << 30))
                crew.kill_at_random(worker, rng, 6)
                acknowledged = max([acknowledged, *(int(line) for line in worker.lines)])
            tally.count("kills")
            if not folder.exists():
                continue
            if sabotage:
                for path in folder.glob("_open/*.jsonl"):
                    path.write_bytes(b"")
            retained = _judge(folder, acknowledged, retained, tally)
            if rng.random() < 0.2:
                retain(folder, _sealed_us(folder, rng.randrange(3)))
                retained = _judge(folder, acknowledged, 0, tally)
        tally.acknowledged = acknowledged
    return tally


def _sealed_us(folder: Path, which: int) -> int:
    """The time of sealing of a segment: retention before that time removes the earlier ones."""
    entries = read_chain(folder).entries
    return entries[which].sealed_us if -len(entries) <= which < len(entries) else 0


def _judge(folder: Path, acknowledged: int, retained: int, tally: Tally) -> int:
    """The stored events have no gap and include all acknowledged ones."""
    for finding in verify(folder):
        tally.breaks(f"{finding.file}: {finding.reason}")
    found = seqs(list(Segments(folder, on_trouble=tally.breaks).events()))
    chain = read_chain(folder)
    first = chain.checkpoint.sources.get(SOURCE, 0) + 1 if chain.checkpoint else 1
    tally.doubled += len(found) - len(set(found))
    tally.lost += len(set(range(first, acknowledged + 1)) - set(found))
    if found != list(range(first, first + len(found))):
        tally.breaks(f"the events from {first} on are not in order")
    return max(retained, first - 1)


def test_kills_lose_and_duplicate_nothing() -> None:
    seed = secrets.randbits(32)
    print(f"run({KILLS}, {seed})")
    tally = run(KILLS, seed)
    assert tally.facts["kills"] == KILLS
    assert tally.acknowledged
    assert tally.ok, tally


def test_a_sink_that_loses_acknowledged_events_is_caught() -> None:
    assert run(6, seed=1, sabotage=True).lost > 0


# ---- kills and errors at system calls --------------------------------------------------------------

CALLS = {"segments-seal": ("fsync", "rename", "write"), "segments-retain": ("unlink", "rename")}
ERRORS = {"segments-write": ("write", "ENOSPC"), "segments-seal": ("fsync", "EIO")}


def update_named(name: str) -> Update:
    return next(update for update in SEGMENT_UPDATES if update.name == name)


@pytest.mark.parametrize("name", CALLS)
def test_a_kill_at_a_system_call_loses_and_duplicates_nothing(name: str) -> None:
    tally = Tally()
    for call in CALLS[name]:
        variants = ",".join(f"?{variant}" for variant in syscalls.VARIANTS.get(call, (call,)))
        for k in range(1, syscalls.POINTS_MAX):
            injection = [f"{variants}:signal=KILL:when={k}"]
            if not syscalls._once(update_named(name), "group", injection, tally).killed:
                assert k > 1
                break
    assert tally.ok, tally


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_system_call_loses_and_duplicates_nothing(name: str) -> None:
    tally = Tally()
    call, error = ERRORS[name]
    for k in range(1, syscalls.POINTS_MAX):
        injection = [f"{call}:error={error}:when={k}"]
        outcome = syscalls._once(update_named(name), "group", injection, tally, retry=True)
        if not outcome.injected:
            assert k > 1
            break
        assert any(attempt.outcome == "ok" for attempt in outcome.attempts), outcome.attempts
    assert tally.ok, tally


# ---- at work ---------------------------------------------------------------------------------------


def test_a_folder_is_clean_while_its_writer_seals_and_retention_runs(quick_path: Path) -> None:
    """Verify, readers and retention run while a writer seals continuously."""
    with Crew() as crew:
        writer = crew.start("shipper", ship, folder=quick_path / "audit", seed=3)
        crew.await_lines(writer, 1)
        for number in range(25):
            assert verify(quick_path / "audit") == []
            troubles: list[str] = []
            segments = Segments(quick_path / "audit", on_trouble=troubles.append)
            found = seqs(list(segments.events()))
            assert found == list(range(found[0], found[0] + len(found)))
            assert troubles == []
            if number % 5 == 4:
                retain(quick_path / "audit", _sealed_us(quick_path / "audit", -5))
            crew.await_lines(writer, 2)
    assert len(read_chain(quick_path / "audit").entries) > 1
