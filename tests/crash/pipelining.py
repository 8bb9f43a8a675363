"""The pipeline under kills, over millions of events with faults, on a cluster, and with skewed data.

`kills-pipeline`: ingest, folds, gold and retention are killed at random moments, and restarted at once. One
of five is killed with its JVM. The others leave a JVM that continues their work beside the next driver, as a
cluster would. At the end every row of every table equals that of an undisturbed run.
`history-pipeline`: in millions of events with planted faults, `check` finds all faults and nothing else.
`cluster-pipeline`: `run`, `stream`, `check`, `retain` and `backfill` on two workers whose Python has no
postroom give the same rows and findings as in one local process.
`connect-pipeline`: the same, except `stream`, with a Spark Connect server.
`skew-pipeline`: a history in which one organization has nine of ten events costs at most twice as much as an
even one, also on a cluster: for each stage, the CPU time of its longest task counts.
`declarative-pipeline`: `spark-pipelines run`, twice over a growing history, gives the same rows.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from postroom.audit.layout import STREAM
from postroom.pipeline.declarative import CONF_FOLDER, SEGMENTS, write_project
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import FAULTS, generate
from postroom.pipeline.query.check import RULES, SAMPLES_MAX
from tests.crash.ledger import Tally
from tests.crash.pipelinejob import Plan
from tests.crash.tasks import Tick
from tests.spark.cluster import Made, connect_server, do_at, do_on_cluster
from tests.spark.clusterjob import KEEP_DAYS
from tests.spark.commands import Done, in_its_own_process
from tests.spark.plainrows import all_rows, rows_in
from tests.spark.stories import write_segment

COMMANDS = Path(sys.executable).parent
DAY_US = 86_400_000_000
KILLS_A_ROUND = 4
ROUND_MESSAGES = 400
DELAY_S_MAX = 1.0  # from the start of a step to the kill; many steps take less
WITH_JVM = 0.2  # of the kills; a JVM takes half a minute until it is useful
ROUNDS_A_KILL = 3
STEPS = {
    "run": [
        "bronze", "silver_events", "silver_messages", "silver_attempts", "silver_spans", "gold_latency",
        "gold_flow", "gold_depth", "gold_cost", "gold_traffic", "gold_flames", "gold_dlq_patterns",
    ],
    "retain": [
        "silver_departed", "bronze_rejects", "bronze_events", "silver_events", "silver_attempts",
        "silver_spans", "silver_messages",
    ],
}  # fmt: skip
EVENTS_A_MESSAGE = 4.4
MESSAGES_CLUSTER = 20_000
MESSAGES_CONNECT = 2_000
MESSAGES_SKEW = 40_000
ORGANIZATIONS = 50
GIANT_PERCENT = 90
SKEW_MAX = 2.0
MESSAGES_DECLARED = 2_000
NOT_DECLARED = {"bronze_rejects", "silver_spans", "gold_flames"}  # as docs/howto/declarative-pipeline.md says
SKEW_CONF = {"spark.sql.shuffle.partitions": "8", "spark.sql.adaptive.coalescePartitions.enabled": "false"}


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postroom-pipeline-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# ---- a driver ----------------------------------------------------------------------------------------------


Gateway = dict[str, str]
"""Tells a driver how to connect to an existing JVM; empty for a driver with its own JVM."""
OWN_JVM: Gateway = {}


@contextmanager
def lasting_jvm(folder: Path) -> Iterator[Gateway]:
    """A JVM that outlives its drivers."""
    with started("host", folder) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


@contextmanager
def driver(plan: Plan, folder: Path, gateway: Gateway = OWN_JVM) -> "Iterator[subprocess.Popen[str]]":
    """The process that runs a plan."""
    with started(msgspec.json.encode(plan).decode(), folder, gateway) as process:
        yield process


@contextmanager
def started(what: str, folder: Path, gateway: Gateway = OWN_JVM) -> "Iterator[subprocess.Popen[str]]":
    """A process group of a driver, with its JVM if it has its own."""
    with (folder / "errors").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.pipelinejob", what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "SPARK_LOCAL_DIRS": str(folder / "local"), **gateway},
        )
    try:
        with process:
            yield process
    finally:
        end_group(process.pid)


def end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def finished(plan: Plan, folder: Path, gateway: Gateway = OWN_JVM) -> list[float]:
    """Run a plan to its end. Returns its cost."""
    with driver(plan, folder, gateway) as process:
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
        if process.wait() != 0:
            raise RuntimeError((folder / "errors").read_text()[-4000:])
    return [float(word) for word in said[-1].split()[1:]]


# ---- kills -------------------------------------------------------------------------------------------------


def run_kills(count: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Kill `count` times, in rounds, all over the same history."""
    tally = Tally()
    rng = Random(f"kills-pipeline/{seed}")
    with scratch() as folder, lasting_jvm(folder) as gateway:
        segments = generated(folder / "whole", ROUND_MESSAGES, rng.randrange(2**31), faults=False)
        now_us = middle_us(segments) + KEEP_DAYS * DAY_US
        calm = Plan(str(folder / "calm"), str(folder / "whole"), ["run", "retain", "run"], now_us)
        finished(calm, folder, gateway)
        expected = all_rows(Tables(folder / "calm"))
        left = count
        for number in range(ROUNDS_A_KILL * count):
            plan = Plan(str(folder / f"{number}"), str(folder / f"{number}-events"), calm.jobs, now_us)
            kills = kill_round(plan, segments, min(left, KILLS_A_ROUND), rng, tally, gateway)
            compare(expected, all_rows(Tables(Path(plan.tables))), tally)
            tick(kills)
            left -= kills
            if not left:
                return tally
    raise RuntimeError(f"{left} jobs of {count} had always ended before they were killed")


def kill_round(
    plan: Plan, segments: list[Path], kills: int, rng: Random, tally: Tally, gateway: Gateway
) -> int:
    """Three deliveries, each killed during its ingestion; then a killed retention.

    Returns the number of kills: a kill that comes too late leaves no work for another one.
    """
    done = 0
    for number in range(kills):
        deliver(plan, segments[: len(segments) * (number + 1) // (KILLS_A_ROUND - 1)])
        # Deleted events must not be ingested again, so retention waits for the last delivery.
        job = "retain" if number == KILLS_A_ROUND - 1 else "run"
        killed = msgspec.structs.replace(plan, jobs=plan.jobs if job == "retain" else ["run"])
        chosen = OWN_JVM if rng.random() < WITH_JVM else gateway
        if not kill_in(f"{job} {rng.choice(STEPS[job])}", killed, rng, tally, chosen):
            break
        done += 1
        look(Tables(Path(plan.tables)), tally)
    deliver(plan, segments)
    finished(plan, Path(plan.tables).parent, gateway)
    return done


def generated(folder: Path, messages: int, seed: int, *, faults: bool = True) -> list[Path]:
    """The segments of a history, in order."""
    generate(folder, messages, seed, faults=faults)
    return sorted(folder.glob("date=*/hour=*/*.jsonl"), key=lambda path: path.name)


def deliver(plan: Plan, segments: list[Path]) -> None:
    put(Path(plan.events), segments)


def put(events: Path, segments: list[Path]) -> None:
    """Copy segments into the folder that is read, as the sink does: complete and in order."""
    for path in segments:
        place = events.joinpath(*path.parts[-3:])
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.hardlink_to(path)


def middle_us(segments: list[Path]) -> int:
    times = sorted(json.loads(line)["ts_us"] for path in segments for line in path.read_bytes().splitlines())
    return int(times[len(times) // 2])


def kill_in(step: str, plan: Plan, rng: Random, tally: Tally, gateway: Gateway) -> bool:
    """Kill the driver at a random moment after it has started a step; False when it ended before."""
    with driver(plan, Path(plan.tables).parent, gateway) as process:
        assert process.stdout is not None
        if not any(text.startswith(step) for text in process.stdout):
            tally.count("ended_before")
            return False
        time.sleep(rng.uniform(0, DELAY_S_MAX))
        end_group(process.pid)
        is_killed = process.wait() == -signal.SIGKILL
    tally.count("kills" if is_killed else "ended_before", 1)
    if is_killed:
        tally.count(f"in_{step.replace(' ', '_')}")
        tally.count("beside_a_jvm_that_goes_on" if gateway else "with_their_jvm")
    return is_killed


def look(tables: Tables, tally: Tally) -> None:
    """All tables that a reader finds after a kill are complete."""
    for name, rows in all_rows(tables).items():
        if rows.total() != sum(file.rows for file in tables.files(name)):
            tally.torn += 1


def compare(expected: dict[str, Counter[str]], found: dict[str, Counter[str]], tally: Tally) -> None:
    """Compare every table row by row."""
    for name in expected.keys() | found.keys():
        want, have = expected.get(name, Counter()), found.get(name, Counter())
        tally.acknowledged += want.total()
        tally.lost += (want - have).total()
        tally.doubled += (have - want).total()
        if want != have:
            tally.breaks(f"{name} is not what an undisturbed run makes of it")


# ---- a large history with faults ---------------------------------------------------------------------------


def check_history(events: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Through the commands, as a person would."""
    tally = Tally()
    with scratch() as folder:
        messages = round(events / EVENTS_A_MESSAGE)
        command("generate", "--messages", messages, "--seed", seed, "--out", folder / "events", "--faults")
        run = command("run", "--events", folder / "events", "--tables", folder / "tables")
        judged = command("check", "--tables", folder / "tables", code=1)
        planted = [json.loads(line) for line in (folder / "events" / FAULTS).read_text().splitlines()]
    tally.acknowledged = json.loads(run.stdout)["rows"]["silver_events"]
    judge([fault for fault in planted if fault["rule"] in RULES], judged, tally)
    tick(events)
    return tally


def command(*words: object, code: int = 0, **environ: str) -> Done:
    done = in_its_own_process(*words, **environ)
    if done.code != code:
        raise RuntimeError(f"{words[0]} ended with {done.code}: {done.stderr[-4000:]}")
    return done


def judge(planted: list[dict[str, Any]], judged: Done, tally: Tally) -> None:
    """The counts match the planted faults, and each reported violation was planted."""
    counts = Counter(fault["rule"] for fault in planted)
    for rule, n in counts.items():
        tally.count(f"planted_{rule}", n)
        if f" {n:,} {rule}" not in judged.stderr:
            tally.breaks(
                f"{n} violations of {rule} were planted, and it says {judged.stderr.splitlines()[-1]}"
            )
    known = Counter((fault["rule"], fault["message_id"]) for fault in planted)
    shown = Counter((row["rule"], row["message_id"]) for row in map(json.loads, judged.stdout.splitlines()))
    tally.doubled += (shown - known).total()
    few = {rule for rule, n in counts.items() if n <= SAMPLES_MAX}
    tally.lost += sum(n for (rule, _), n in (known - shown).items() if rule in few)


# ---- a cluster ---------------------------------------------------------------------------------------------


def run_cluster(
    times: int, seed: int, tick: Tick = lambda _: None, messages: int = MESSAGES_CLUSTER
) -> Tally:
    """Every job over a growing history, there and here."""
    tally = Tally()
    with scratch() as folder:
        half, whole, now_us = two_deliveries(folder, messages, seed)
        steps = [f"run:{half}", f"stream:{whole}", "check", f"retain:{now_us}", "check", "backfill"]
        there = do_on_cluster(folder, *steps)
        compare_done(do_at("local[2]", folder / "here", *steps), there, tally)
    tick(times)
    return tally


def run_connected(
    times: int, seed: int, tick: Tick = lambda _: None, messages: int = MESSAGES_CONNECT
) -> Tally:
    """The same except the stream, by a process without Java, at a server without postroom."""
    tally = Tally()
    with scratch() as folder, connect_server(folder) as url:
        half, whole, now_us = two_deliveries(folder, messages, seed)
        first, *more = (f"run:{half}", f"run:{whole}", "check", f"retain:{now_us}", "check", "backfill")
        command("run", "--events", half, "--tables", folder / "there", "--remote", url, JAVA_HOME="/nowhere")
        there = do_at(url, folder / "there", *more, JAVA_HOME="/nowhere")
        compare_done(do_at("local[2]", folder / "here", first, *more), there, tally)
        if "pyspark.daemon" not in (folder / "calls").read_text():
            tally.breaks("the server's own Python was not asked")
    tick(times)
    return tally


def two_deliveries(folder: Path, messages: int, seed: int) -> tuple[Path, Path, int]:
    """A history with half of its segments, the whole one, and a time at which half of it may be deleted."""
    whole, half = folder / "whole", folder / "half"
    segments = generated(whole, messages, seed)
    put(half, segments[: len(segments) // 2])
    for events in (half, whole):
        (events / STREAM).write_text("the same\n")
    return half, whole, middle_us(segments) + KEEP_DAYS * DAY_US


def compare_done(here: Made, there: Made, tally: Tally) -> None:
    """The rows of every table, and the findings of the checks."""
    compare(all_rows(here.tables), all_rows(there.tables), tally)
    tally.count("lines_of_checks", len(here.said))
    if here.said != there.said or len(here.said) < 2:
        tally.breaks("the checks do not say the same")


# ---- one giant ---------------------------------------------------------------------------------------------


def run_skewed(times: int, seed: int, tick: Tick = lambda _: None, messages: int = MESSAGES_SKEW) -> Tally:
    """The same history twice: with equal organizations, and with nearly all events in one."""
    tally = Tally()
    longest = {}
    with scratch() as folder:
        generate(folder / "plain", messages, seed)
        for name, giant in (("uniform", 0), ("skewed", GIANT_PERCENT)):
            tally.acknowledged += share_out(folder / "plain", folder / name, giant)
            plan = Plan(str(folder / f"{name}-tables"), str(folder / name), ["run"], conf=SKEW_CONF)
            every, longest[name] = finished(plan, folder)
            tally.count(f"{name}_cpu_ms", round(every * 1000))
            tally.count(f"{name}_longest_tasks_ms", round(longest[name] * 1000))
    ratio = longest["skewed"] / longest["uniform"]
    if ratio > SKEW_MAX:
        tally.breaks(f"one giant costs {ratio:.1f} times as much as equals do")
    tick(times)
    return tally


def share_out(source: Path, target: Path, giant_percent: int) -> int:
    """Copy a history and assign its messages to organizations; `giant` percent of them to the first one."""
    lines = 0
    for path in source.glob("date=*/hour=*/*.jsonl"):
        events = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        for event in events:
            drawn = crc32(event.get("message_id", "").encode())
            is_giants = drawn // ORGANIZATIONS % 100 < giant_percent
            event["org_id"] = f"org-{0 if is_giants else drawn % ORGANIZATIONS}"
        date, number = path.parts[-3].partition("=")[2], int(path.name.partition("-")[0])
        write_segment(target, number, [msgspec.json.encode(event) for event in events], date)
        lines += len(events)
    return lines


# ---- declared ----------------------------------------------------------------------------------------------


def run_declared(
    times: int, seed: int, tick: Tick = lambda _: None, messages: int = MESSAGES_DECLARED
) -> Tally:
    """Half of a history, and all of it: the second run continues after the first one."""
    tally = Tally()
    with scratch() as folder:
        segments = generated(folder / "whole", messages, seed)
        plan = Plan(str(folder / "here"), str(folder / "events"), ["run"])
        project = write_project(folder / "project", folder / "events").parent
        for count in (len(segments) // 2, len(segments)):
            deliver(plan, segments[:count])
            spark_pipelines("run", project)
        finished(plan, folder)
        expected = all_rows(Tables(folder / "here"))
        found = {table.name: rows_in(table) for table in (project / "tables").iterdir()}
        if found.pop(SEGMENTS).total() != len(segments):
            tally.breaks("a segment has no hash, or more than one")
        compare({name: expected[name] for name in expected.keys() - NOT_DECLARED}, found, tally)
    tick(times)
    return tally


def spark_pipelines(command: str, project: Path) -> None:
    """As a person calls it, with the virtual environment active."""
    done = subprocess.run(
        ["spark-pipelines", command],
        cwd=project,
        env={
            **os.environ,
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}",
            "SPARK_CONF_DIR": str(project / CONF_FOLDER),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"spark-pipelines {command} ended with {done.returncode}: {done.stdout[-4000:]}")
