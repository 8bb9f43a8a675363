"""The speed of the mail server, next to the real nats-server in the same run.

Both servers are separate processes with the same clients: bare sockets, which are the cheapest clients, and
nats-py. The publisher sends prepared pieces and the subscriber counts bytes, so that only the server and the
system below it are measured.
"""

import argparse
from collections.abc import Callable, Iterator

from figures import REPEATS, Figure, Report, machine, run
from mailbench import mail, plain
from mailbench.sizes import SMALL, Sizes

Bench = Callable[[Sizes], Iterator[Figure]]

BENCHES: tuple[Bench, ...] = (
    plain.one_to_one,
    plain.requests,
    plain.clients,
    plain.idle,
    mail.stored,
    mail.durable,
    mail.replay,
    mail.mailboxes,
    mail.crowd,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    names = ", ".join(bench.__name__ for bench in BENCHES)
    parser.add_argument("--only", default="", metavar="PART", help=f"what begins with PART, of {names}")
    options = parser.parse_args()
    report = Report(f"Mail: {machine()}; medians of {REPEATS}")
    report.begin()
    for bench in BENCHES:
        if bench.__name__.startswith(options.only):
            for figure in bench(SMALL if options.small else Sizes()):
                report.add(figure)
    report.end()


if __name__ == "__main__":
    run(main)
