"""Messages a second from the first submit to the last handler, beside Celery, dramatiq and DBOS.

Handlers only note their message. One process submits, one process works, and both run at the same time.
Every side has stored a message when its submit returns, except dramatiq as it comes.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from figures import Figure, Goal, compare, readable
from peersbench import brokers

from enginebench import finish, peers
from enginebench.engines import fresh
from enginebench.probe import fsync_figure
from enginebench.sizes import Sizes

PER_S_GOAL = 5_000

_runs = itertools.count()


class Peer(NamedTuple):
    name: str
    open: peers.Opener
    messages: int
    goal: float | None = None


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    yield fsync_figure(folder)
    with brokers.rabbitmq(folder) as url:
        for peer in (
            Peer("Celery, RabbitMQ", peers.celery, sizes.celery, 4),
            Peer("dramatiq, RabbitMQ", peers.dramatiq_as_it_comes, sizes.dramatiq, 1.5),
            Peer("dramatiq, confirms", peers.dramatiq_confirmed, sizes.dramatiq),
            Peer("DBOS, SQLite", peers.dbos, sizes.dbos, 20),
        ):
            yield beside(peer, fresh(folder), url, sizes)


def beside(peer: Peer, folder: Path, broker: str, sizes: Sizes) -> Figure:
    with peers.ours(folder, broker) as ours, peer.open(folder, broker) as theirs:
        for side in (ours, theirs):
            rate(side, folder, 1)  # waits until the worker has started
        speed = compare(lambda: rate(ours, folder, sizes.ours), lambda: rate(theirs, folder, peer.messages))
    goals = [] if peer.goal is None else [Goal("ratio", ">=", peer.goal), Goal("value", ">=", PER_S_GOAL)]
    against = f"{peer.name}: {readable(speed.theirs)} messages/s"
    return Figure(f"end to end / {peer.name}", speed.ours, "messages/s", against, speed.ratio, goals)


def rate(side: peers.Side, folder: Path, count: int) -> float:
    """Messages a second from the first submit to the last handler."""
    run = f"finished-{next(_runs)}"
    begun = time.perf_counter()
    side.submit(run, count)
    return count / (finish.wait(folder, run) - begun)
