"""`make simulate`: seeded histories of engines and of agents on all cores; see `postroom.testing.world`.

    python tools/simulate.py                               100,000 seeds
    python tools/simulate.py --seeds 500 --first 100000    others

One seed of `SQLITE_EVERY` also runs on SQLite, and one of `AGENTS_EVERY` in the world of coordinators and
agents. A failed seed is printed with the command that replays it, and the exit code is 1 then.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulation import Part, PartResult, simulated

SEEDS = 100_000
PART_SEEDS = 50
SQLITE_EVERY = 10
AGENTS_EVERY = 10
FAILURES_SHOWN_MAX = 10
PROGRESS_TERMINAL_S = 1.0
PROGRESS_PIPED_S = 60.0


def parts(first: int, seeds: int) -> Iterator[Part]:
    """All seeds in memory, the first tenth of each part on SQLite, and that tenth with agents."""
    for start in range(first, first + seeds, PART_SEEDS):
        count = min(PART_SEEDS, first + seeds - start)
        yield Part("memory", start, count)
        yield Part("sqlite", start, -(-count // SQLITE_EVERY))
        yield Part("agents", start, -(-count // AGENTS_EVERY))


class Progress:
    """What came in so far, and the line that shows it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.seeds = 0
        self.messages = 0
        self.failed = 0
        self.started = self._shown = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def add(self, result: PartResult) -> None:
        self.seeds += result.seeds
        self.messages += result.messages
        self.failed += len(result.failed)
        for text in result.failed[: max(0, FAILURES_SHOWN_MAX - self.failed + len(result.failed))]:
            print(f"\n{text}", flush=True)
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < (PROGRESS_TERMINAL_S if self._on_terminal else PROGRESS_PIPED_S):
            return
        self._shown = now
        left_s = (now - self.started) / self.seeds * (self.total - self.seeds)
        line = f"{self.seeds:,} of {self.total:,} histories, {self.failed} failed, {left_s:.0f} s left"
        print(f"\r{line}   " if self._on_terminal else line, end="" if self._on_terminal else "\n",
              file=sys.stderr, flush=True)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run seeded histories of an engine on all cores.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many ({SEEDS:,})")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    work = [*parts(options.first, options.seeds)]
    progress = Progress(sum(part.seeds for part in work))
    with ProcessPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(simulated, part) for part in work]):
            progress.add(done.result())
    took_s = time.monotonic() - progress.started
    print(
        f"\n{progress.seeds:,} histories with {progress.messages:,} messages in {took_s:.0f} s: "
        f"{progress.failed} failed"
    )
    return 1 if progress.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
