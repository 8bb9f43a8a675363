"""The speed of stores on servers, beside the peers of the same server."""

import argparse
import importlib
import tempfile
from pathlib import Path

from brokersbench import postgres
from figures import REPEATS, Report, machine, run

POSTGRES, RABBIT = "postgres", "rabbit"
RABBIT_PARTS = ("throughput", "latency", "backlog", "cluster")
PARTS = (
    *(POSTGRES, *(f"{POSTGRES}-{name}" for name in postgres.PARTS)),
    *(RABBIT, *(f"{RABBIT}-{name}" for name in RABBIT_PARTS)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    report = Report(f"Brokers: {machine()}; medians of {REPEATS}")
    report.begin()
    server, _, part = (options.only or "").partition("-")
    if server in ("", POSTGRES):
        for figure in postgres.figures(postgres.QUICK if options.quick else postgres.Sizes(), part):
            report.add(figure)
    if server in ("", RABBIT):
        rabbit = importlib.import_module("brokersbench.rabbit")  # needs pika and a broker
        with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
            sizes = rabbit.QUICK if options.quick else rabbit.Sizes()
            for figure in rabbit.figures(Path(folder), sizes, part):
                report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
