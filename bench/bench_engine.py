"""The speed of `Engine`: latency by priority, throughput beside other queues, and what its rules cost.

Every process of a worker is its own: the submitting process never runs handlers. Messages are stored as they
come by default: P0 with durability `os`, the others with `group`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from enginebench import claims, latency, noise, policies, processes, throughput, tokens
from enginebench.sizes import QUICK, Sizes
from figures import REPEATS, Figure, machine, run
from parts import parser_of, show

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
    options = parser_of(__doc__, BENCHES).parse_args()
    title = f"Engine: {machine()}; medians of {REPEATS}"
    show(title, BENCHES, options.only, QUICK if options.quick else Sizes())


if __name__ == "__main__":
    run(main)
