"""Runs a target over inputs that follow from a seed and a number each."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.fuzz.targets import TARGETS, Target, Wrong

SAVED_MAX = 20  # failing inputs kept of one target
TICK_EVERY = 1000


class Failure(msgspec.Struct, frozen=True):
    """An input that showed something."""

    target: str
    seed: int
    number: int
    kind: str
    """`crash` or `wrong`."""
    what: str
    input: str
    """As `repr` gives it."""


class Figures(msgspec.Struct):
    """What one target came to."""

    target: str
    inputs: int = 0
    crashes: int = 0
    wrong: int = 0
    work_s: float = 0.0
    failures: list[Failure] = []

    def add(self, other: "Figures") -> None:
        self.inputs += other.inputs
        self.crashes += other.crashes
        self.wrong += other.wrong
        self.work_s += other.work_s
        self.failures = (self.failures + other.failures)[:SAVED_MAX]

    @property
    def ok(self) -> bool:
        return not (self.crashes or self.wrong)


def run(name: str, seed: int, numbers: range, tick: Callable[[int], None] = lambda _: None) -> Figures:
    """Try the inputs with these numbers."""
    figures = Figures(name)
    target = TARGETS[name]()
    began = time.perf_counter()
    log = logging.getLogger("postroom")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it has much to say about damage
    try:
        for failure in _failures(target, name, seed, numbers, tick):
            figures.crashes += failure.kind == "crash"
            figures.wrong += failure.kind == "wrong"
            figures.failures = [*figures.failures, failure][:SAVED_MAX]
    finally:
        log.setLevel(level)
        target.close()
    figures.inputs = len(numbers)
    figures.work_s = time.perf_counter() - began
    return figures


def _failures(
    target: Target, name: str, seed: int, numbers: range, tick: Callable[[int], None]
) -> Iterator[Failure]:
    for number in numbers:
        target.rng.seed(seed << 32 | number)
        data = target.input()
        try:
            target.check(data)
        except Wrong as error:
            yield Failure(name, seed, number, "wrong", str(error), repr(data))
        except Exception as error:  # noqa: BLE001 - that is what a crash is
            yield Failure(name, seed, number, "crash", repr(error), repr(data))
        if (number + 1) % TICK_EVERY == 0:
            tick(TICK_EVERY)


def save(failure: Failure, folder: Path) -> Path:
    """Keep a failing input, and how to try it again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.target}-{failure.seed}-{failure.number}.txt"
    again = (
        f"python -m tests.fuzz.run --only {failure.target} --seed {failure.seed} "
        f"--first {failure.number} --count 1"
    )
    path.write_text(
        f"{failure.kind}: {failure.what}\n{again}\n{failure.input}\n", "utf-8", "backslashreplace"
    )
    return path
