"""Random deliveries: late, repeated and shuffled lines give the same tables.

`deliveries-pipeline`: the lines of a history, some of them repeated, are shuffled and ingested in a few runs.
The result must have the rows of one run that got the lines in their order. About every second delivery uses
limits so low that its ids are shuffled instead of broadcast.
"""

from collections import Counter
from itertools import count as numbers
from pathlib import Path
from random import Random

from postroom.pipeline.delta.tables import Tables
from tests.crash.ledger import Tally
from tests.crash.pipelinejob import Plan
from tests.crash.pipelining import Gateway, compare, finished, generated, lasting_jvm, scratch
from tests.crash.tasks import Tick, portions
from tests.spark.plainrows import all_rows
from tests.spark.stories import write_segment

DELIVERIES_A_HISTORY = 5
HISTORY_MESSAGES = 300
RUNS_MAX = 5
SEGMENTS_MAX = 3  # of a run
REPEATED_MAX = 0.6  # of the lines
LATE = (0.01, 0.2, 1.0)
"""The share of lines that arrive in a random run instead of their own."""
DATES = ("2025-01-05", "2025-01-06", "2025-02-01")

Lines = list[bytes]


def run_delivered(deliveries: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """A number of deliveries, of a few histories."""
    tally = Tally()
    rng = Random(f"deliveries-pipeline/{seed}")
    with scratch() as folder, lasting_jvm(folder) as gateway:
        for history, share in enumerate(portions(deliveries, DELIVERIES_A_HISTORY)):
            whole, calm = folder / f"{history}-whole", folder / f"{history}-calm"
            segments = generated(whole, HISTORY_MESSAGES, rng.randrange(2**31), faults=False)
            finished(Plan(str(calm), str(whole), ["run"]), folder, gateway)
            expected = derived(Tables(calm))
            lines = [line for path in segments for line in path.read_bytes().splitlines()]
            for number in range(share):
                tables = delivered(folder / f"{history}-{number}", lines, rng, tally, gateway)
                compare(expected, derived(tables), tally)
                tick(1)
    return tally


def delivered(folder: Path, lines: Lines, rng: Random, tally: Tally, gateway: Gateway) -> Tables:
    """The tables of lines in random order."""
    folder.mkdir()
    events = folder / "events"
    plan = Plan(str(folder / "tables"), str(events), ["run"], is_large=rng.random() < 0.5)
    number = numbers(1)
    for arrived in runs(lines, rng):
        for part in dealt(arrived, rng.randint(1, SEGMENTS_MAX), rng):
            write_segment(events, next(number), part, rng.choice(DATES))
        finished(plan, folder, gateway)
        tally.count("runs")
    return Tables(folder / "tables")


def runs(lines: Lines, rng: Random) -> list[Lines]:
    """The lines of each run: most in order, some at random, and some repeated."""
    comes: list[Lines] = [[] for _ in range(rng.randint(1, RUNS_MAX))]
    late = rng.choice(LATE)
    for place, line in enumerate(lines):
        turn = place * len(comes) // len(lines)
        comes[rng.randrange(len(comes)) if rng.random() < late else turn].append(line)
    for line in rng.choices(lines, k=int(rng.uniform(0, REPEATED_MAX) * len(lines))):
        rng.choice(comes).append(line)
    for arrived in comes:
        rng.shuffle(arrived)
    return comes


def dealt(lines: Lines, parts: int, rng: Random) -> list[Lines]:
    """Lines in a few segments, one of which may be empty."""
    piles: list[Lines] = [[] for _ in range(parts)]
    for line in lines:
        rng.choice(piles).append(line)
    return [pile for pile in piles if pile]


def derived(tables: Tables) -> dict[str, Counter[str]]:
    """The rows of all tables except bronze, which keeps every line as it arrived."""
    return {name: rows for name, rows in all_rows(tables).items() if not name.startswith("bronze_")}
