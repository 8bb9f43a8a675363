"""Updates of a folder of segments that are crashed at each system call, and the rules that must hold then."""

from pathlib import Path

from postroom.audit.layout import OPEN
from postroom.audit.reader import Segments
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.message import Durability
from postroom.system.clock import SystemClock
from postroom.testing import FIRST_WALL_US
from tests.crash.ledger import Tally
from tests.crash.updates import Attempt, Expected, Update
from tests.segmentstories import SOURCE, events, sealed_folder

OLD_EVENTS = 40
BATCH = 10
FIRST_LEFT = 21  # of the second of two old segments


def _folder(folder: Path) -> Path:
    return folder / "deep" / "audit"


def _open(folder: Path, durability: Durability) -> SegmentSink:
    return SegmentSink(_folder(folder), durability=durability)


def _prepare_nothing(folder: Path) -> Expected:
    SystemClock()  # imports must not be affected by the injected errors
    return {"": ["0"]}


def _prepare_sealed(folder: Path) -> Expected:
    sealed_folder(_folder(folder), 2, OLD_EVENTS // 2)
    return {"": [str(OLD_EVENTS)]}


def _prepare_growing(folder: Path) -> Expected:
    _prepare_sealed(folder)
    with _open(folder, "os") as sink:
        sink.write(events(OLD_EVENTS + 1, BATCH))
    return {"": [str(OLD_EVENTS + BATCH)]}


def _prepare_torn(folder: Path) -> Expected:
    expected = _prepare_growing(folder)
    [growing] = (_folder(folder) / OPEN).iterdir()
    with growing.open("ab") as file:
        file.write(b'{"event_id":"to')
    return expected


# ---- what is done ----------------------------------------------------------------------------------


def _write(sink: SegmentSink, attempt: int) -> list[str]:
    """As a shipper does: continue from the position of the sink."""
    sink.write(events(sink.position(SOURCE) + 1, BATCH))
    return [str(sink.position(SOURCE))]


def _seal(sink: SegmentSink, attempt: int) -> list[str]:
    position = sink.position(SOURCE)
    sink.seal()
    return [str(position)]


def _retain(sink: SegmentSink, attempt: int) -> list[str]:
    retain(sink.folder, FIRST_WALL_US + FIRST_LEFT)
    return [str(sink.position(SOURCE))]


# ---- what must hold --------------------------------------------------------------------------------


def _judge(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    reported = [int(attempt.words[0]) for attempt in attempts if attempt.outcome == "ok"]
    tally.acknowledged = max([int(expected[""][0]), *reported])
    if _folder(folder).exists():
        _judge_files(_folder(folder), tally, "before recovery")
    with _open(folder, "group") as sink:
        held = sink.position(SOURCE)
        _judge_files(sink.folder, tally, "after recovery")
        sink.write(events(held + 1, 1))
        sink.seal()
    _judge_files(_folder(folder), tally, "after going on")


def _judge_files(folder: Path, tally: Tally, when: str) -> None:
    for finding in verify(folder):
        tally.breaks(f"{when}: {finding.file}: {finding.reason}")
    troubles: list[str] = []
    found = [event.seq for event in Segments(folder, on_trouble=troubles.append).events()]
    for sentence in troubles:
        tally.breaks(f"{when}: {sentence}")
    tally.doubled += len(found) - len(set(found))
    first_left = found[0] if found[:1] == [FIRST_LEFT] else 1
    tally.lost += len(set(range(first_left, tally.acknowledged + 1)) - set(found))
    if found != list(range(first_left, first_left + len(found))):
        tally.breaks(f"{when}: the events are not in order")


SEGMENT_UPDATES = [
    Update(name="segments-first-write", prepare=_prepare_nothing, open=_open, act=_write, judge=_judge),
    Update(name="segments-write", prepare=_prepare_growing, open=_open, act=_write, judge=_judge),
    Update(name="segments-seal", prepare=_prepare_growing, open=_open, act=_seal, judge=_judge),
    # Not with errors: where ftruncate always fails, a torn tail cannot be removed.
    Update(
        name="segments-recover", prepare=_prepare_torn, open=_open, act=_seal, judge=_judge, repeats=False
    ),
    Update(name="segments-retain", prepare=_prepare_sealed, open=_open, act=_retain, judge=_judge),
]
