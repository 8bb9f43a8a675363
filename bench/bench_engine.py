"""The speed of `Engine`: latency by priority, throughput beside other queues, and what its rules cost.

Every process of a worker is its own: the submitting process never runs handlers. Messages are stored as they
come by default: P0 with durability `os`, the others with `group`.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from enginebench import claims, latency, noise, policies, processes, throughput, tokens
from enginebench.sizes import QUICK, Sizes
from figures import REPEATS, Figure, Report, machine, run

Bench = Callable[[Path, Sizes], Iterator[Figure]]

BENCHES: dict[str, Bench] = {
    "latency": latency.figures,
    "throughput": throughput.figures,
    "processes": processes.figures,
    "policies": policies.figures,
    "claim": claims.figures,
    "noise": noise.figures,
    "tokens": tokens.figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=BENCHES, help="one part")
    options = parser.parse_args()
    report = Report(f"Engine: {machine()}; medians of {REPEATS}")
    report.begin()
    for name, bench in BENCHES.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                for figure in bench(Path(folder), QUICK if options.quick else Sizes()):
                    report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
