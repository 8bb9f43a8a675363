"""`make fuzz`: a million mutated inputs for each parser.

    python -m tests.fuzz.run                                                everything
    python -m tests.fuzz.run --only journal --count 10000                   one parser
    python -m tests.fuzz.run --only journal --seed 7 --first 4711 --count 1   one input again

Prints for each parser how many inputs it got, how many made it crash or do something wrong, and the rate: a
table on a terminal, JSON lines when piped. Exit code 1 when anything is not 0. Failing inputs are kept in
build/fuzz/, each with the command that repeats it.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tests.crash.workers import die_with_parent
from tests.fuzz import fuzzer, targets
from tests.fuzz.fuzzer import Figures
from tests.fuzz.targets import TARGETS

COUNT = 1_000_000
PIECE = 25_000  # inputs that a process tries before it reports
SAVED = Path("build", "fuzz")
PROGRESS_TERMINAL_S = 1.0
PROGRESS_PIPED_S = 60.0


class Screen:
    """What the person is shown."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._started = time.monotonic()
        self._shown = 0.0

    def progress(self, name: str, done: int, *, terminal: bool) -> None:
        now = time.monotonic()
        if now - self._shown < (PROGRESS_TERMINAL_S if terminal else PROGRESS_PIPED_S):
            return
        self._shown = now
        text = f"{now - self._started:6.0f} s  {100 * done // self._inputs:3} %  {name}"
        sys.stderr.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
        sys.stderr.flush()


def work(options: argparse.Namespace, names: list[str]) -> dict[str, Figures]:
    """Every target in turn, its inputs spread over the processes."""
    screen = Screen(options.count * len(names))
    results = {name: Figures(name) for name in names}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="postroom-fuzz-", dir=targets.memory_folder()) as scratch,
        ProcessPoolExecutor(
            options.jobs, context, initializer=_begin, initargs=(os.getpid(), scratch)
        ) as pool,
    ):
        done = 0
        for name in names:
            began = time.monotonic()
            pieces = _pieces(options)
            waiting = {pool.submit(fuzzer.run, name, options.seed, piece) for piece in pieces}
            while waiting:
                ended, waiting = wait(waiting, timeout=1.0)
                done += _collect(ended, results[name])
                screen.progress(name, done, terminal=sys.stderr.isatty())
            show(results[name], time.monotonic() - began, options.seed)
    return results


def _begin(parent: int, scratch: str) -> None:
    """A child just ends when it is interrupted or its parent is gone; the parent removes what is left."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent)
    tempfile.tempdir = scratch


def _pieces(options: argparse.Namespace) -> list[range]:
    stop = options.first + options.count
    return [range(start, min(start + PIECE, stop)) for start in range(options.first, stop, PIECE)]


def _collect(ended: "set[Future[Figures]]", result: Figures) -> int:
    for future in ended:
        result.add(future.result())
    return sum(future.result().inputs for future in ended)


def show(figures: Figures, took_s: float, seed: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
    rate = round(figures.inputs / took_s) if took_s else 0
    if sys.stdout.isatty():
        print(
            f"{figures.target:<22}{figures.inputs:>12,}{figures.crashes:>10,}{figures.wrong:>10,}{rate:>12,}",
            flush=True,
        )
    else:
        row = {"target": figures.target, "inputs": figures.inputs, "crashes": figures.crashes}
        row |= {"wrong": figures.wrong, "inputs_per_s": rate, "seed": seed, "ok": figures.ok}
        print(json.dumps(row), flush=True)
    for failure in figures.failures:
        path = fuzzer.save(failure, SAVED)
        print(f"{failure.kind.upper()}: {failure.what[:200]!r}: {path}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="NAME", help="targets that begin with NAME")
    parser.add_argument("--count", type=int, default=COUNT, help=f"inputs for each target ({COUNT:,})")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--seed", type=int, default=None, help="of all inputs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = secrets.randbits(31)
    names = [name for name in TARGETS if name.startswith(options.only)]
    if not names:
        parser.error(f"no target begins with {options.only!r}; there are {', '.join(TARGETS)}")
    print(f"fuzz: seed {options.seed}, {options.jobs} processes", file=sys.stderr, flush=True)
    if sys.stdout.isatty():
        print(f"{'target':<22}{'inputs':>12}{'crashes':>10}{'wrong':>10}{'inputs/s':>12}", flush=True)
    results = work(options, names)
    failed = [name for name, figures in results.items() if not figures.ok]
    print(f"fuzz: {'FAILED: ' + ', '.join(failed) if failed else 'no crash, nothing wrong'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, BrokenProcessPool):
        print("fuzz: interrupted", file=sys.stderr)
        sys.exit(1)
