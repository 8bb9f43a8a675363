"""Runs the tests with branch coverage, child processes included, and fails below a minimum.

The gate counts only branches. Coverage's own percentage also counts lines, which makes it higher.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "postroom")
BRANCHES_PERCENT_MIN = 95.0
# The contracts alone, and the contracts with the layers below them.
GATES = {
    "contracts": ("contracts",),
    "contracts, logs, nudges, core": ("contracts", "logs", "nudges", "core"),
}


class Tally(NamedTuple):
    """The number of branches, and of those that were taken."""

    branches: int = 0
    taken: int = 0

    def plus(self, summary: dict[str, Any]) -> Tally:
        return Tally(self.branches + summary["num_branches"], self.taken + summary["covered_branches"])

    @property
    def percent(self) -> float:
        return 100.0 * self.taken / self.branches if self.branches else 100.0


def main() -> int:
    coverage("erase")
    tests = coverage("run", "-m", "pytest", *sys.argv[1:])
    coverage("combine", "--quiet")
    coverage("report")
    tallies = branches_by_part()
    for part, tally in sorted(tallies.items()):
        show(part, tally)
    reached = [gate_holds(name, parts, tallies) for name, parts in GATES.items()]
    return tests or (0 if all(reached) else 1)


def branches_by_part() -> dict[str, Tally]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "coverage.json")
        coverage("json", "--quiet", "-o", str(target))
        measured = json.loads(target.read_text())
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    for name, file in measured["files"].items():
        # The first folder or file below the package: contracts, logs, message.py.
        part = Path(name).relative_to(PACKAGE).parts[0]
        tallies[part] = tallies[part].plus(file["summary"])
    return tallies


def gate_holds(name: str, parts: tuple[str, ...], tallies: dict[str, Tally]) -> bool:
    found = [tallies.get(part, Tally()) for part in parts]
    tally = Tally(sum(each.branches for each in found), sum(each.taken for each in found))
    holds = tally.branches > 0 and tally.percent >= BRANCHES_PERCENT_MIN
    show(name, tally, f"goal {BRANCHES_PERCENT_MIN:.0f} %: {'reached' if holds else 'MISSED'}")
    return holds


def show(name: str, tally: Tally, remark: str = "") -> None:
    print(
        f"{name:<32} {tally.taken:5} of {tally.branches:5} branches {tally.percent:6.1f} %  {remark}".rstrip()
    )


def coverage(*arguments: str) -> int:
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
