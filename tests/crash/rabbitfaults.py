"""Long faults of RabbitMQ under load: kills, a black hole, and one node of three that stops."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.ledger import Tally
from tests.rabbitmqload import Load, under_load
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper, rabbitmq
from tests.smalldisk import NotPermitted
from tests.tcpproxy import TcpProxy

KILLS = 5
HOLE_S = 30.0
NODES = 3
AWAY_S = 5.0

Tick = Callable[[int], None]


@contextmanager
def _folder() -> Iterator[Path]:
    if not is_installed():
        raise NotPermitted("RabbitMQ is not installed")
    with tempfile.TemporaryDirectory(prefix="postroom-rabbit-") as folder:
        yield Path(folder)


def _tally(load: Load, tick: Tick) -> Tally:
    tick(1)
    tally = Tally(acknowledged=len(load.accepted), facts={"longest_pause_ms": round(1_000 * load.pause_s)})
    tally.lost, tally.doubled = load.lost, load.doubled
    if load.refused:
        tally.breaks(f"{load.refused} submits were refused although the ledger was there")
    return tally


def run_kills(_count: int, _seed: int, tick: Tick) -> Tally:
    """Kill the broker again and again."""
    with _folder() as folder, rabbitmq(folder / "mq") as server:

        async def kill(_load: Load) -> float:
            for _ in range(KILLS):
                server.kill()
                await asyncio.to_thread(server.start)
                await asyncio.sleep(1.0)
            return time.monotonic()

        return _tally(asyncio.run(under_load(server.url(f"sqlite:///{folder}/q.db"), kill)), tick)


def run_hole(_count: int, _seed: int, tick: Tick) -> Tally:
    """Swallow everything between engine and broker for longer than heartbeats allow."""
    with _folder() as folder, rabbitmq(folder / "mq") as server, TcpProxy(server.port) as proxy:

        async def hole(_load: Load) -> float:
            proxy.is_hole = True
            await asyncio.sleep(HOLE_S)
            proxy.is_hole = False
            proxy.reset_all()
            return time.monotonic()

        url = server.url(f"sqlite:///{folder}/q.db", port=proxy.port)
        return _tally(asyncio.run(under_load(url, hole)), tick)


def run_cluster(_count: int, _seed: int, tick: Tick) -> Tally:
    """Stop one node of three, the one that the engine is connected to."""
    with _folder() as folder, port_mapper() as mapper:
        nodes = [RabbitServer(folder / f"mq{number}", mapper, f"n{number}x") for number in range(NODES)]
        try:
            for node in nodes:
                node.join([each.node for each in nodes])
                node.start()
            hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            url = f"amqp://guest:guest@{hosts}/?ledger=sqlite:///{folder}/q.db"

            async def stop(_load: Load) -> float:
                await asyncio.to_thread(nodes[0].stop)
                await asyncio.sleep(AWAY_S)
                await asyncio.to_thread(nodes[0].start)
                return time.monotonic()

            tally = _tally(asyncio.run(under_load(url, stop)), tick)
            queues = nodes[1].ctl("list_queues", "name", "type")
            if ".p2\tquorum" not in queues:
                tally.breaks("the lanes of a cluster are no quorum queues")
            return tally
        finally:
            for node in nodes:
                node.stop()
