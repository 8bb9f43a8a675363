"""The speed of goals: branches beside bare cells, merges, checkpoints, conflict checks and sandboxes."""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import REPEATS, Figure, Goal, Report, compare, machine, median_of, run, seconds

from postroom import Engine, Sandbox
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.rules.claims import Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.goals import goals, progress
from postroom.goals.goal_cells import STATES
from postroom.goals.graph import branches
from postroom.sandbox import SandboxPool
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.testing import ManualClock

GOAL = "goal"
PROPERTIES = {"name": "a fact", "value": 1}
BATCH = 10
NUMBERS = itertools.count()
"""No commit repeats an earlier one: writing what is there already would need no sync."""
MS_PER_S = 1e3
US_PER_S = 1e6


class Sizes:
    """How much each part does."""

    def __init__(self, *, quick: bool) -> None:
        self.writes = 20 if quick else 500
        self.facts = 100 if quick else 10_000
        self.active = 20 if quick else 1_000
        self.claims = 4 if quick else 100
        self.runs = 3 if quick else 50


def opened(folder: Path) -> Engine:
    """A fresh engine with one goal."""
    folder.mkdir()
    engine = Engine.open(f"sqlite:///{folder}/queue.db")
    engine.store.write(lambda transaction: goals.start(transaction, "acme", GOAL, {}))
    return engine


def durable(work: Callable[[Transaction], Any]) -> Callable[[Transaction], Any]:
    """Work whose commit is synced, as that of an ordinary message."""

    def synced(transaction: Transaction) -> Any:
        transaction.synced = True
        return work(transaction)

    return synced


def repeated(store: Store, work: Callable[[Transaction, int], Any], count: int) -> float:
    """Seconds of one commit, as the median of many."""
    took = [
        seconds(lambda: store.write(durable(lambda transaction: work(transaction, next(NUMBERS)))))
        for _ in range(count)
    ]
    return statistics.median(took)


# ---- branches --------------------------------------------------------------------------------------


def branch_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A write and a read of a branch, beside those of one cell of the ledger."""
    store = opened(folder / "branch").store

    def bare(transaction: Transaction, number: int) -> None:
        transaction.cells.put("bench", f"n{number}", b'{"name":"a fact","value":1}')

    def staged(transaction: Transaction, number: int) -> None:
        branches.write(transaction, GOAL, f"n{number}", PROPERTIES, replaces=True)

    writes = compare(
        lambda: repeated(store, staged, sizes.writes), lambda: repeated(store, bare, sizes.writes)
    )
    yield Figure(
        "write of a branch", writes.ours * US_PER_S, "us", "one cell of the ledger", writes.ratio,
        (Goal("ratio", "<=", 2),),
    )  # fmt: skip

    def read(work: Callable[[Transaction, int], Any]) -> float:
        numbers = itertools.count()
        return statistics.median(
            seconds(lambda: store.read(lambda transaction: work(transaction, next(numbers))))
            for _ in range(sizes.writes)
        )

    reads = compare(
        lambda: read(lambda transaction, number: branches.branch_node(transaction, GOAL, f"n{number}")),
        lambda: read(lambda transaction, number: transaction.cells.get("bench", f"n{number}")),
    )
    yield Figure(
        "read of a branch", reads.ours * US_PER_S, "us", "one cell of the ledger", reads.ratio,
        (Goal("ratio", "<=", 2),),
    )  # fmt: skip


def merge_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """The merge of a goal with many staged facts."""
    numbers = itertools.count()

    def merge_s() -> float:
        engine = opened(folder / f"merge{next(numbers)}")

        def stage(transaction: Transaction) -> None:
            for number in range(sizes.facts):
                branches.write(transaction, GOAL, f"n{number}", PROPERTIES, replaces=True)

        engine.store.write(stage)
        took = seconds(
            lambda: engine.store.write(
                durable(lambda transaction: goals.complete(transaction, engine.policy, GOAL))
            )
        )
        engine.close()
        return took

    yield Figure(f"merge of {sizes.facts:,} facts", median_of(merge_s), "s", goals=(Goal("value", "<", 1),))


def checkpoint_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A checkpoint, beside a plain commit."""
    store = opened(folder / "checkpoint").store

    def plain(transaction: Transaction, number: int) -> None:
        transaction.cells.put("bench", f"n{number}", b"1")

    def checkpoint(transaction: Transaction, _: int) -> None:
        goal = STATES.get(transaction, GOAL)
        assert goal is not None
        progress.take(transaction, GOAL, goal, "bench")

    took = compare(
        lambda: repeated(store, checkpoint, sizes.writes),
        lambda: repeated(store, plain, sizes.writes),
        turns=3,
    )
    yield Figure(
        "checkpoint", took.ours * US_PER_S, "us", "a plain commit", took.ratio, (Goal("ratio", "<=", 1.2),)
    )


# ---- conflicts -------------------------------------------------------------------------------------


class Claiming:
    """Messages that are claimed and released, some with operations."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        folder.mkdir()
        self._clock = ManualClock()
        self.engine = Engine.open(f"sqlite:///{folder}/queue.db", clock=self._clock)
        self._rotation = Rotation()
        self._sizes = sizes
        self.submit("busy", sizes.active, "busy")
        while len(self.claim("busy")) == BATCH:
            pass

    def submit(self, org_id: str, count: int, target: str = "") -> None:
        """Store messages; each one with an operation on a target of its own, if a name is given."""
        for first in range(0, count, BATCH):
            self.engine.blocking.submit_many(
                {
                    "type": "tool_call",
                    "org_id": org_id,
                    "payload": {},
                    "priority": 0,
                    "operation": {"target": f"{target}{first + number}"} if target else None,
                }
                for number in range(min(BATCH, count - first))
            )

    def claim(self, worker: str) -> list[Any]:
        """One claim."""
        policy = self.engine.policy

        def work(transaction: Transaction) -> list[Any]:
            transaction.synced = True
            return Claims(transaction, policy, worker, self._rotation, {}).claim(BATCH)

        return self.engine.store.write(work)

    def cycle_s(self, target: str) -> float:
        """The median of some claims; their messages are completed afterwards."""
        took = []
        for _ in range(self._sizes.claims):
            self.submit("busy", BATCH, target)
            begun = time.perf_counter()
            claimed = self.claim("w")
            took.append(time.perf_counter() - begun)
            assert len(claimed) == BATCH
            outcomes = [
                Outcome(
                    kind="completed", message_id=one.record.message_id, lease=one.record.lease, body=one.body
                )
                for one in claimed
            ]
            self._finish(outcomes)
        return statistics.median(took)

    def _finish(self, outcomes: list[Outcome]) -> None:
        policy = self.engine.policy
        self.engine.store.write(lambda transaction: Operations(transaction, policy).finish(outcomes))


def conflict_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """A claim of messages with operations, beside one without, while many operations are active."""
    claiming = Claiming(folder / "conflict", sizes)
    # "about" sorts before "busy": a check that reads on behind its target would read the active ones.
    took = compare(lambda: claiming.cycle_s("about"), lambda: claiming.cycle_s(""))
    yield Figure(
        f"claim of {BATCH} with {sizes.active:,} operations", took.ours * MS_PER_S, "ms",
        "without operations", took.ratio, (Goal("ratio", "<=", 1.1),),
    )  # fmt: skip


# ---- sandboxes -------------------------------------------------------------------------------------


def sandbox_figures(_: Path, sizes: Sizes) -> Iterator[Figure]:
    """The time until a program has run: in a warm sandbox, and with the creation of one."""
    for kind in ("process", "bubblewrap"):
        warm, cold = asyncio.run(_sandboxes(kind, sizes.runs))
        if warm is None or cold is None:
            continue
        goal = (Goal("value", "<", 5),) if kind == "process" else ()
        yield Figure(
            f"warm sandbox ({kind}), p50", warm * MS_PER_S, "ms", "until a program has run", goals=goal
        )
        yield Figure(f"cold sandbox ({kind}), p50", cold * MS_PER_S, "ms", "created, run, destroyed")


async def _sandboxes(kind: str, runs: int) -> tuple[float | None, float | None]:
    from postroom.sandbox.sandbox import bubblewrap_trouble  # noqa: PLC0415 - for this part alone

    if kind == "bubblewrap" and bubblewrap_trouble():
        print(f"bubblewrap is left out: {bubblewrap_trouble()}")
        return None, None
    pool = SandboxPool(kind, size=2)
    await pool.fill()
    warm, cold = [], []
    for _ in range(runs):
        begun = time.perf_counter()
        async with pool.sandbox() as box:
            await box.run(["true"])
            warm.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        async with await Sandbox.open(kind).create() as box:
            await box.run(["true"])
        cold.append(time.perf_counter() - begun)
    await pool.close()
    return statistics.median(warm), statistics.median(cold)


BENCHES: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
    "branch": branch_figures,
    "merge": merge_figures,
    "checkpoint": checkpoint_figures,
    "conflict": conflict_figures,
    "sandbox": sandbox_figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=BENCHES, help="one part")
    options = parser.parse_args()
    report = Report(f"Goals: {machine()}; medians of {REPEATS}")
    report.begin()
    for name, bench in BENCHES.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in bench(Path(folder), Sizes(quick=options.quick)):
                    report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
