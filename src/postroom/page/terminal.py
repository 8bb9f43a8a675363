"""The overview in a terminal: the same snapshot as the live page, as lines of text.

Rule 1: a line is never wider than the terminal, and never more lines are drawn than it has.
Rule 2: names are shown without control characters: a name cannot change the terminal.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.message import Event
from postroom.page.activity import Activity
from postroom.page.overview import OrganizationRow, OverviewFacts, Snapshot, read_facts, snapshot
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

EVENTS_A_READ_MAX: Final = 1_000
BARS: Final = " ▁▂▃▄▅▆▇█"
BOLD, RED, YELLOW, DIM, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
COLUMNS: Final = (
    "organization",
    "P0",
    "P1",
    "P2",
    "P3",
    "waiting",
    "delayed",
    "working",
    "dead",
    "in/s",
    "done/s",
    "state",
)
NAME_CHARS: Final = 28


class StoreReader:
    """Takes snapshots of a store. It reads each event once."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self.activity = Activity()
        self._position: int | None = None

    def snapshot(self) -> Snapshot:
        """The overview as it is now."""
        facts, events, skipped = self._store.read(self._look)
        if events:
            self.activity.add(events, len(events) / (len(events) + skipped))
            self._position = events[-1].seq
        self.activity.forget(facts.now_us)
        return snapshot(facts, self.activity)

    def _look(self, transaction: Transaction) -> tuple[OverviewFacts, list[Event], int]:
        facts = read_facts(Operations(transaction, self._policy), self._policy)
        first = facts.newest_event - EVENTS_A_READ_MAX
        after = max(first, self._position or 0, 0)
        skipped = 0 if self._position is None else after - self._position
        return facts, transaction.events.read(after, EVENTS_A_READ_MAX), skipped


def drawn(shown: Snapshot, where: str, columns: int, lines: int) -> list[str]:
    """The lines of a terminal of this size."""
    rates = shown.rates
    speeds = f"in {rates.submitted:g}/s   done {rates.completed:g}/s   failed {rates.failed:g}/s"
    busy = sum(one.in_flight for one in shown.workers)
    slots = sum(one.slots for one in shown.workers)
    most = max((one.completed for one in shown.history), default=0) or 1
    bars = "".join(BARS[round(one.completed / most * (len(BARS) - 1))] for one in shown.history)
    found = [
        f"{BOLD}postroom{PLAIN} {_plain(where)}  {shown.at:%H:%M:%S} UTC",
        f"waiting {shown.depth}   delayed {shown.delayed}   {speeds}   backpressure {_stage(shown.stage)}",
        f"{DIM}done a second, last minute{PLAIN} {bars}",
        *_trouble(shown),
        "",
        *_waits(shown),
        "",
        *_organizations(shown.organizations),
        "",
        f"workers {len(shown.workers)} (wanted {shown.wanted_workers}), {busy} of {slots} slots busy",
        *_agents(shown),
    ]
    return [_cut(line, columns) for line in found[:lines]]


def _stage(stage: int) -> str:
    return f"{YELLOW}stage {stage}{PLAIN}" if stage else "none"


def _trouble(shown: Snapshot) -> list[str]:
    needs = [f"{count} {what.replace('_', ' ')}" for what, count in shown.needs.items() if count]
    found = [f"{YELLOW}needs a person: {', '.join(needs)}{PLAIN}"] if needs else []
    found += [f"{RED}{one.level}: {_plain(one.what)}; {one.why}{PLAIN}" for one in shown.verdict.reasons]
    held = [name for name, one in shown.breakers.items() if one.state != "closed" and one.organizations]
    found += (
        [f"{RED}breakers open for an organization: {', '.join(map(_plain, held))}{PLAIN}"] if held else []
    )
    return found


def _waits(shown: Snapshot) -> list[str]:
    rows = [["wait", "p50", "p90", "p99", "target", "messages"]]
    for one in shown.waits:
        p99 = f"{one.p99_ms:g} ms" if one.is_within_target else f"{RED}{one.p99_ms:g} ms{PLAIN}"
        percentiles = [f"{one.p50_ms:g} ms", f"{one.p90_ms:g} ms", p99]
        rows.append([f"P{one.priority}", *percentiles, f"{one.target_ms:g} ms", str(one.count)])
    return _table(rows)


def _organizations(found: Iterable[OrganizationRow]) -> list[str]:
    rows = [[*COLUMNS]]
    for one in sorted(found, key=lambda each: -each.depth):
        state = f"{YELLOW}paused{PLAIN}" if one.paused else _stage(one.stage) if one.stage else ""
        dead = one.states.get("DEAD_LETTER", 0)
        rows.append(
            [
                _plain(one.org_id)[:NAME_CHARS],
                *map(str, one.lanes),
                str(one.depth),
                str(one.delayed),
                str(one.states.get("PROCESSING", 0)),
                f"{YELLOW}{dead}{PLAIN}" if dead else "0",
                f"{one.rates.submitted:g}",
                f"{one.rates.completed:g}",
                state,
            ]
        )
    return _table(rows) if len(rows) > 1 else ["there is no message yet"]


def _agents(shown: Snapshot) -> list[str]:
    counts = ", ".join(f"{count} {health}" for health, count in sorted(shown.health.items()))
    found = [f"agents {counts or 'none'}"]
    for one in shown.agents:
        if one.health in ("dead", "suspect"):
            name = f"{_plain(one.org_id)}/{_plain(one.agent_id)}"
            found.append(f"  {RED}{one.health}{PLAIN} {name}, silent for {one.silent_s:g} s")
    return found


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell. The first one is to the left, the others to the right."""
    widths = [max(_width(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell + " " * (width - _width(cell)) if not place else " " * (width - _width(cell)) + cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return [f"{DIM}{lines[0]}{PLAIN}", *lines[1:]]


def _width(text: str) -> int:
    return len(without_colors(text))


def without_colors(text: str) -> str:
    """The text without the sequences of colors."""
    for color in (BOLD, RED, YELLOW, DIM, PLAIN):
        text = text.replace(color, "")
    return text


def _cut(line: str, columns: int) -> str:
    """The line, or its beginning without colors when it is wider than the terminal."""
    bare = without_colors(line)
    return line if len(bare) <= columns else bare[: max(0, columns - 1)] + "…"


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
