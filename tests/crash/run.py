"""`make crash`: kills, stops, flipped bits, crashes and errors at every system call, power cuts, long runs.

    python -m tests.crash.run                                       everything
    python -m tests.crash.run --only kills-expire --kills 500       what begins with that name
    python -m tests.crash.run --only powercuts-queue --cuts 100 --seed 7
    python -m tests.crash.run --only soak-tasks --cycles 10000000

Prints for each scenario what was acknowledged, lost, torn and doubled: a table on a terminal, JSON lines
when piped. Exit code 1 when anything is not 0 or could not run.
"""

import argparse
import importlib
import itertools
import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import IO, Any

import msgspec

from postroom.message import Durability
from tests.crash import (
    auditing,
    coordinators,
    engines,
    flips,
    kills,
    mailing,
    powercuts,
    rollbacks,
    syscalls,
    tasks,
)
from tests.crash.ledger import Tally
from tests.crash.workers import die_with_parent
from tests.smalldisk import NotPermitted

KILLS = 23_000
CUTS = 1_000
STOPS = 1_000
CYCLES = 1_000_000
HISTORIES = 2_000
MIX_S = 60
PIPELINE_KILLS = 100
PIPELINE_DELIVERIES = 10
HISTORY_EVENTS = 5_000_000
JOB_S_MAX = 3600.0  # a longer job hangs
PROGRESS_TERMINAL_S = 1.0
PROGRESS_PIPED_S = 60.0
SPLIT_ABOVE = 100  # smaller counts run as one job, so that a seed gives the same run everywhere

KILL_SHARES = {
    "kills-append": 0.07,
    "kills-append-pages": 0.07,
    "kills-append-many": 0.06,
    "kills-rotation": 0.2,
    "kills-side-file": 0.2,
    "kills-cursor": 0.2,
    "kills-expire": 0.2,
    "kills-tasks": 0.5,
    "kills-audit": 0.1,
    "kills-mail": 0.2,
    "kills-engine": 0.3,
    "kills-coordinator": 0.2,
    "kills-rollback": 0.02,
}
"""The five updates of files have equal shares: three forms of append, rotation, side files, cursors, expiry.

Task queues together have half as much, the audit stream a tenth, mail a fifth, the engine 0.3, coordinators a
fifth, rollbacks 0.02.
"""
SIDES = ("bus", "queue")
TASK_RUNS = ("stops-tasks", "mix-tasks", "soak-tasks")
Run = Callable[[int, int, Callable[[int], None]], Tally]


def _from_module(name: str, module: str = "pipelining") -> Run:
    """A scenario whose module is imported only in its own job."""

    def run(count: int, seed: int, tick: Callable[[int], None]) -> Tally:
        runs = importlib.import_module(f"tests.crash.{module}")
        tally: Tally = getattr(runs, name)(count, seed, tick)
        return tally

    return run


PIPELINE_RUNS: dict[str, Run] = {
    "kills-pipeline": _from_module("run_kills"),
    "drivers-pipeline": _from_module("run_pairs", "pipelinedrivers"),
    "deliveries-pipeline": _from_module("run_delivered", "pipelinedelivery"),
    "history-pipeline": _from_module("check_history"),
    "cluster-pipeline": _from_module("run_cluster"),
    "connect-pipeline": _from_module("run_connected"),
    "skew-pipeline": _from_module("run_skewed"),
    "declarative-pipeline": _from_module("run_declared"),
    "disk-pipeline": _from_module("run_full", "pipelinedisk"),
    "archive-pipeline": _from_module("make_archive", "pipelinedisk"),
}
ATTACK_RUNS: dict[str, Run] = {
    "attack-http": _from_module("run", "attack_http"),
    "attack-mail": _from_module("run", "attack_mail"),
    "attack-audit": _from_module("run", "attack_audit"),
    "attack-pipeline": _from_module("run", "attack_pipeline"),
}
"""Hostile clients and hostile input against real servers and commands. Facts: memory_mb, refused."""
BROKER_RUNS: dict[str, Run] = {
    "restarts-rabbitmq": _from_module("run_kills", "rabbitfaults"),
    "ledger-rabbitmq": _from_module("run_ledger_kills", "rabbitfaults"),
    "hole-rabbitmq": _from_module("run_hole", "rabbitfaults"),
    "halfopen-rabbitmq": _from_module("run_half_open", "rabbitfaults"),
    "resets-rabbitmq": _from_module("run_resets", "rabbitfaults"),
    "memory-rabbitmq": _from_module("run_memory", "rabbitfaults"),
    "disk-rabbitmq": _from_module("run_disk", "rabbitfaults"),
    "cluster-rabbitmq": _from_module("run_cluster", "rabbitfaults"),
    "restarts-postgres": _from_module("run_kills", "postgresfaults"),
    "restarts-engine-postgres": _from_module("run_engine_kills", "postgresfaults"),
    "hole-postgres": _from_module("run_hole", "postgresfaults"),
    "halfopen-postgres": _from_module("run_half_open", "postgresfaults"),
    "halfopen-pgbouncer": _from_module("run_half_open_pool", "postgresfaults"),
    "resets-postgres": _from_module("run_resets", "postgresfaults"),
    "standby-postgres": _from_module("run_promotion", "postgresfaults"),
}
"""Faults of a broker or a database under load. Facts: longest_pause_ms, first_after_heal_ms.

On RabbitMQ also broker_after_heal_ms: the ledger delivers until the broker carries messages again.
"""
COUNTED: dict[str, Run] = {
    "kills-audit": auditing.run,
    "histories-audit": auditing.check_histories,
    "kills-mail": mailing.run,
    "kills-engine": engines.run,
    "kills-coordinator": coordinators.run,
    "kills-rollback": rollbacks.run,
    **PIPELINE_RUNS,
    **ATTACK_RUNS,
    **BROKER_RUNS,
}
CALL_POINTS = {
    "syscalls-bus": 380,
    "syscalls-queue": 1950,
    "syscalls-tasks": 4000,
    "syscalls-audit": 1350,
    "syscalls-mail": 2500,
    "errors-bus": 450,
    "errors-queue": 2250,
    "errors-tasks": 3000,
    "errors-audit": 1500,
    "errors-mail": 1500,
}
"""An estimate of their number, for the progress line only."""


class Job(msgspec.Struct, frozen=True):
    """A part of a scenario that one process runs."""

    scenario: str
    first: int
    count: int
    seed: int


class Answer(msgspec.Struct):
    """A line from a job to its parent: progress, or its end."""

    done: int | None = None
    """The progress since the last line, possibly 0."""
    tally: Tally | None = None
    missing: str = ""
    error: str = ""

    @property
    def failure(self) -> str:
        """Why there are no figures; empty when there are, or when the reason is known."""
        return self.error or ("" if self.tally or self.missing else "the job ended without figures")


class Result(msgspec.Struct):
    """One scenario, with the results of its jobs so far."""

    scenario: str
    jobs: int
    seed: int
    tally: Tally = msgspec.field(default_factory=Tally)
    missing: str = ""
    error: str = ""
    ended: int = 0
    work_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.tally.ok and not self.error and not self.missing


# ---- which jobs there are --------------------------------------------------------------------------


def planned(options: argparse.Namespace) -> list[Job]:
    """Every job of the chosen scenarios."""
    chosen = list(dict.fromkeys(name for only in options.only or [""] for name in beginning_with(only)))
    total = sum(share for name, share in KILL_SHARES.items() if name in chosen)
    jobs = []
    for name in chosen:
        match name.split("-")[0]:
            case _ if name in PIPELINE_RUNS | ATTACK_RUNS | BROKER_RUNS:
                jobs += _imported_jobs(name, options)
            case "kills":
                jobs += _split(name, round(options.kills * KILL_SHARES[name] / total), 2, options.seed)
            case "flips":
                jobs += _split(name, flips.FLIPS, 8, options.seed)
            case "powercuts":
                jobs += _split(name, options.cuts, 2, options.seed)
            case "stops":
                jobs += _split(name, options.stops, 2, options.seed)
            case "mix":
                jobs.append(Job(name, 0, options.mix_s, options.seed))
            case "histories":
                jobs += _split(name, options.histories, 2, options.seed)
            case "soak":
                jobs.append(Job(name, 0, options.cycles, options.seed))
            case _:
                jobs.append(Job(name, 0, CALL_POINTS[name], options.seed))
    return jobs


def beginning_with(only: str) -> list[str]:
    """The scenario of that name, or all whose names begin with it."""
    names = [*KILL_SHARES, *(f"flips-{side}" for side in SIDES), *CALL_POINTS, *TASK_RUNS, "histories-audit"]
    names += [*PIPELINE_RUNS, *ATTACK_RUNS, *BROKER_RUNS]
    names += [
        f"powercuts-{side}-{durability}" for side in powercuts.SCENES for durability in syscalls.DURABILITIES
    ]
    return [only] if only in names else [name for name in names if name.startswith(only)]


def _imported_jobs(name: str, options: argparse.Namespace) -> list[Job]:
    match name.split("-", maxsplit=1)[0]:
        case "kills":
            return _split(name, options.pipeline_kills, 4, options.seed, above=PIPELINE_KILLS // 4)
        case "deliveries":
            return [Job(name, 0, PIPELINE_DELIVERIES, options.seed)]
        case "history":
            return [Job(name, 0, options.history_events, options.seed)]
    return [Job(name, 0, 1, options.seed)]


def _split(scenario: str, count: int, parts: int, seed: int, above: int = SPLIT_ABOVE) -> list[Job]:
    parts = parts if count > above else 1
    edges = [count * part // parts for part in range(parts + 1)]
    return [
        Job(scenario, first, stop - first, seed + part)
        for part, (first, stop) in enumerate(itertools.pairwise(edges))
    ]


def done_here(job: Job, tick: Callable[[int], None]) -> Tally:
    """Run a job in this process."""
    match job.scenario.split("-"):
        case ["kills" | "stops" | "mix" | "soak", "tasks"]:
            return tasks.run(job.scenario, job.count, job.seed, tick)
        case _ if job.scenario in COUNTED:
            return COUNTED[job.scenario](job.count, job.seed, tick)
        case ["kills", *_]:
            return kills.run(job.scenario, job.count, job.seed, tick)
        case ["flips", side]:
            return flips.run(side, job.first, job.first + job.count, tick)
        case ["syscalls" | "errors" as fault, side]:
            return syscalls.run("crash" if fault == "syscalls" else "error", side, tick)
        case ["powercuts", side, durability]:
            chosen = msgspec.convert(durability, Durability)
            return powercuts.run(side, chosen, job.count, job.seed, tick)
    raise ValueError(job.scenario)


# ---- a job, in its own process -----------------------------------------------------------------------


def job_main(text: str) -> int:
    """Report on standard output; leave nothing behind when asked to end."""
    die_with_parent(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.getLogger("postroom").setLevel(logging.CRITICAL)
    answer = Answer()
    try:
        tally = done_here(msgspec.json.decode(text, type=Job), lambda more: _say(sys.stdout, {"done": more}))
        answer = Answer(tally=tally)
    except (NotPermitted, syscalls.Unavailable) as error:
        answer = Answer(missing=str(error))
    except KeyboardInterrupt:
        return 1
    except Exception:  # noqa: BLE001 - the parent prints it
        answer = Answer(error=traceback.format_exc())
    _say(sys.stdout, msgspec.to_builtins(answer))
    return 0


def _say(stream: IO[str], value: Any) -> None:
    stream.write(json.dumps(value, ensure_ascii=False) + "\n")
    stream.flush()


class Running:
    """A job's process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        self.done = 0
        command = [sys.executable, "-m", "tests.crash.run", "--job", msgspec.json.encode(job).decode()]
        if job.scenario.startswith("powercuts"):
            command = ["unshare", "--mount", *command]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the job
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        if self.process.stdout is None:
            raise AssertionError("a pipe was asked for")
        self.output = self.process.stdout

    def ended(self) -> Answer:
        """The process closed its output without a result."""
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip()
        if self.job.scenario.startswith("powercuts") and said.startswith("unshare:"):
            return Answer(missing=said)
        return Answer(error=f"the job ended with exit code {code}: {said}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.output.close()
        self._errors.close()


# ---- all jobs ----------------------------------------------------------------------------------------


class Board:
    """The waiting, running and finished jobs, and their display."""

    def __init__(self, jobs: list[Job], seed: int) -> None:
        self.waiting = deque(jobs)
        self.running: dict[int, Running] = {}
        self.results: dict[str, Result] = {}
        for job in jobs:
            known = self.results.setdefault(job.scenario, Result(job.scenario, 0, seed))
            known.jobs += 1
        self._units = {name: sum(job.count for job in jobs if job.scenario == name) for name in self.results}
        self._done = dict.fromkeys(self.results, 0)
        self._shown = 0.0
        self._started = time.monotonic()

    def work(self, processes: int) -> None:
        """Run the jobs, several at a time."""
        selector = selectors.DefaultSelector()
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < processes:
                    running = Running(self.waiting.popleft())
                    self.running[running.output.fileno()] = running
                    selector.register(running.output, selectors.EVENT_READ)
                for key, _ in selector.select(timeout=1.0):
                    self._hear(self.running[key.fd], selector)
                self._end_overdue(selector)
                self._show_progress()
        finally:
            for running in self.running.values():
                running.close()

    def _hear(self, running: Running, selector: selectors.BaseSelector) -> None:
        line = running.output.readline()
        answer = msgspec.json.decode(line, type=Answer) if line else running.ended()
        if answer.done is not None:
            self._done[running.job.scenario] += answer.done
            return
        self._settle(running, answer, selector)

    def _settle(self, running: Running, answer: Answer, selector: selectors.BaseSelector) -> None:
        selector.unregister(running.output)
        del self.running[running.output.fileno()]
        running.close()
        result = self.results[running.job.scenario]
        result.ended += 1
        result.work_s += time.monotonic() - running.started
        result.missing = result.missing or answer.missing
        result.error = result.error or answer.failure
        if answer.tally is not None:
            result.tally.add(answer.tally)
        if result.ended == result.jobs:
            clear_progress()
            show(result)

    def _end_overdue(self, selector: selectors.BaseSelector) -> None:
        for running in list(self.running.values()):
            if time.monotonic() - running.started > JOB_S_MAX:
                self._settle(running, Answer(error=f"stopped after {JOB_S_MAX:g} s"), selector)

    def _show_progress(self) -> None:
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._shown < (PROGRESS_TERMINAL_S if terminal else PROGRESS_PIPED_S):
            return
        self._shown = now
        names = sorted({running.job.scenario for running in self.running.values()})
        parts = [f"{name} {100 * self._done[name] // (self._units[name] or 1)} %" for name in names]
        text = f"{now - self._started:6.0f} s  {', '.join(parts)}; {len(self.waiting)} jobs waiting"
        sys.stderr.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
        sys.stderr.flush()


def clear_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


# ---- showing -----------------------------------------------------------------------------------------

COLUMNS = ("acknowledged", "lost", "torn", "doubled")


def show_head() -> None:
    if sys.stdout.isatty():
        print(f"{'scenario':<24}" + "".join(f"{name:>14}" for name in COLUMNS) + "   notes", flush=True)


def show(result: Result) -> None:
    figures = {name: getattr(result.tally, name) for name in COLUMNS}
    if not sys.stdout.isatty():
        row = {"scenario": result.scenario, **figures, "ok": result.ok, "seed": result.seed}
        row |= {"facts": result.tally.facts, "work_s": round(result.work_s, 1)}
        row |= {"broken": result.tally.broken, "missing": result.missing, "error": result.error}
        _say(sys.stdout, row)
        return
    facts = ", ".join(f"{fact.replace('_', ' ')} {number:,}" for fact, number in result.tally.facts.items())
    print(
        f"{result.scenario:<24}"
        + "".join(f"{figure:>14,}" for figure in figures.values())
        + f"   {facts} ({result.work_s:.0f} s)",
        flush=True,
    )
    for sentence in result.tally.broken:
        print(f"    BROKEN: {sentence}")
    if result.error:
        print(f"    FAILED: {result.error}")
    if result.missing:
        print(f"    NOT RUN: {result.missing}")


def verdict(results: list[Result], allow_missing: bool) -> int:
    missing = [result for result in results if result.missing]
    failed = [result for result in results if not result.ok and not (result.missing and allow_missing)]
    for result in missing:
        say = "allowed by --allow-missing" if allow_missing else "a failure unless --allow-missing is given"
        print(f"NOT RUN: {result.scenario}: {result.missing} ({say})", file=sys.stderr)
    for result in failed:
        again = f"python -m tests.crash.run --only {result.scenario} --seed {result.seed}"
        print(f"FAILED: {result.scenario}; again: {again}", file=sys.stderr)
    if not failed:
        ran = f"{len(results) - len(missing)} of {len(results)} scenarios ran"
        print(f"crash: {ran}, everything in them that must be 0 is 0", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.run", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="scenarios that begin with NAME; may be repeated"
    )
    parser.add_argument("--kills", type=int, default=KILLS, help=f"in all ({KILLS:,})")
    parser.add_argument("--cuts", type=int, default=CUTS, help=f"for each class and contract ({CUTS:,})")
    parser.add_argument("--stops", type=int, default=STOPS, help=f"of lease holders ({STOPS:,})")
    parser.add_argument("--histories", type=int, default=HISTORIES, help=f"to check ({HISTORIES:,})")
    parser.add_argument("--cycles", type=int, default=CYCLES, help=f"of the soak ({CYCLES:,})")
    parser.add_argument("--mix-s", type=int, default=MIX_S, help=f"seconds of the mix ({MIX_S})")
    parser.add_argument("--pipeline-kills", type=int, default=PIPELINE_KILLS, help=f"({PIPELINE_KILLS})")
    parser.add_argument("--history-events", type=int, default=HISTORY_EVENTS, help=f"({HISTORY_EVENTS:,})")
    parser.add_argument("--seed", type=int, default=None, help="of every random choice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--allow-missing", action="store_true", help="do not fail for what may not run here")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        return job_main(options.job)
    if options.seed is None:
        options.seed = secrets.randbits(31)
    for only in options.only or []:
        if not beginning_with(only):
            parser.error(f"no scenario begins with {only!r}")
    jobs = planned(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"crash: seed {options.seed}, {options.jobs} processes", file=sys.stderr, flush=True)
    show_head()
    board = Board(jobs, options.seed)
    try:
        board.work(options.jobs)
    except KeyboardInterrupt:
        clear_progress()
        print("crash: interrupted; nothing is left behind", file=sys.stderr)
        return 1
    return verdict(list(board.results.values()), options.allow_missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
