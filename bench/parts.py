"""The command line of a bench with parts. Each part gets a folder of its own and yields figures."""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from figures import Figure, Report

Sizes = TypeVar("Sizes")


def parser_of(description: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every bench with parts has: `--quick` and `--only`."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=parts, help="one part")
    return parser


def show(
    title: str,
    parts: Mapping[str, Callable[[Path, Sizes], Iterator[Figure]]],
    only: str | None,
    sizes: Sizes,
) -> None:
    """Run one part, or all of them, and print their figures."""
    report = Report(title)
    report.begin()
    for name, figures in parts.items():
        if only in (None, name):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in figures(Path(folder), sizes):
                    report.add(figure)
    report.end()
