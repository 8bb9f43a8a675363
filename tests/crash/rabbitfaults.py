"""Long faults under an engine on RabbitMQ with a PostgreSQL ledger.

Kills of broker and ledger, a black hole, half-open connections, resets, alarms, and one node of three that
stops.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.ledger import Tally
from tests.privatepostgres import PostgresServer, running_postgres
from tests.rabbitmqload import MORE, Load, reset_at_every_phase, under_load
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper, rabbitmq, start_together
from tests.smalldisk import NotPermitted, filled, mounted
from tests.tcpproxy import TcpProxy

KILLS = 5
HOLE_S = 30.0
RESET_ROUNDS = 3
NODES = 3
DISK_MIB = 256
DISK_LEFT_BYTES = 4 << 20  # the broker has an alarm below 50 MB
HEALED_WITHIN_S = 5.0

Tick = Callable[[int], None]


@contextmanager
def _folder() -> Iterator[Path]:
    if not is_installed():
        raise NotPermitted("RabbitMQ is not installed")
    with tempfile.TemporaryDirectory(prefix="postroom-rabbit-") as folder:
        yield Path(folder)


@contextmanager
def _servers() -> Iterator[tuple[RabbitServer, PostgresServer]]:
    with _folder() as folder, rabbitmq(folder / "mq") as broker, running_postgres() as ledger:
        yield broker, ledger


def _tally(load: Load, tick: Tick, *, refuses: bool = False) -> Tally:
    """`refuses` says whether submits may fail: only when the ledger itself is away."""
    tick(1)
    first, broker = load.first_after_heal_s, load.broker_after_heal_s
    tally = Tally(acknowledged=len(load.accepted), lost=load.lost, doubled=load.doubled)
    tally.facts = {
        "longest_pause_ms": round(1_000 * load.pause_s),
        "first_after_heal_ms": -1 if first is None else round(1_000 * first),
        "broker_after_heal_ms": -1 if broker is None else round(1_000 * broker),
        "refused": load.refused,
    }
    if load.refused and not refuses:
        tally.breaks(f"{load.refused} submits were refused although the ledger was there")
    if first is None or first > HEALED_WITHIN_S:
        tally.breaks(f"the first message came {first} s after the heal")
    return tally


def run_kills(_count: int, _seed: int, tick: Tick) -> Tally:
    """Kill the broker again and again."""
    with _servers() as (broker, ledger):

        async def kill(load: Load) -> None:
            for _ in range(KILLS):
                broker.kill()
                await asyncio.to_thread(broker.start)
                load.heal()
                await load.work_on()

        return _tally(asyncio.run(under_load(broker.url(ledger.new_store()), kill)), tick)


def run_ledger_kills(_count: int, _seed: int, tick: Tick) -> Tally:
    """Kill the ledger again and again, under messages of every priority."""
    with _servers() as (broker, ledger):

        async def kill(load: Load) -> None:
            for _ in range(KILLS):
                await load.work_on()
                ledger.kill()
                await asyncio.to_thread(ledger.start)
                load.heal()

        load = asyncio.run(under_load(broker.url(ledger.new_store()), kill))
        return _tally(load, tick, refuses=True)


def run_hole(_count: int, _seed: int, tick: Tick) -> Tally:
    """Swallow everything between engine and broker for longer than heartbeats allow."""
    with _servers() as (broker, ledger), TcpProxy(broker.port) as proxy:

        async def hole(load: Load) -> None:
            proxy.is_hole = True
            await asyncio.sleep(HOLE_S)
            proxy.is_hole = False
            load.heal()

        url = broker.url(ledger.new_store(), port=proxy.port)
        return _tally(asyncio.run(under_load(url, hole)), tick)


def run_half_open(_count: int, _seed: int, tick: Tick) -> Tally:
    """Swallow everything on connections that exist, until heartbeats give them up."""
    with _servers() as (broker, ledger), TcpProxy(broker.port) as proxy:

        async def freeze(load: Load) -> None:
            proxy.freeze_all()
            load.heal()  # new connections work from now on: the engine has to find the dead ones
            await load.until(lambda: load.store.broker_trouble)
            await load.until(lambda: not load.store.broker_trouble)

        url = broker.url(ledger.new_store(), port=proxy.port)
        return _tally(asyncio.run(under_load(url, freeze)), tick)


def run_resets(_count: int, _seed: int, tick: Tick) -> Tally:
    """Reset connections before and after each kind of method."""
    with _servers() as (broker, ledger), TcpProxy(broker.port) as proxy:

        async def reset(load: Load) -> None:
            for _ in range(RESET_ROUNDS):
                await reset_at_every_phase(proxy, load)
            load.heal()

        url = broker.url(ledger.new_store(), port=proxy.port)
        return _tally(asyncio.run(under_load(url, reset)), tick)


def run_memory(_count: int, _seed: int, tick: Tick) -> Tally:
    """A memory alarm of the broker, again and again."""
    with _servers() as (broker, ledger):

        async def alarm(load: Load) -> None:
            for _ in range(KILLS):
                await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.000001")
                await _under_alarm(load)
                await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.4")
                load.heal()
                await load.until(lambda: not load.store.broker_trouble)

        return _tally(asyncio.run(under_load(broker.url(ledger.new_store()), alarm)), tick)


def run_disk(_count: int, _seed: int, tick: Tick) -> Tally:
    """A disk of the broker that is full."""
    with (
        _folder() as folder,
        mounted(folder / "disk", DISK_MIB) as disk,
        rabbitmq(disk / "mq") as broker,
        running_postgres() as ledger,
    ):

        async def fill(load: Load) -> None:
            with filled(disk, DISK_LEFT_BYTES):
                await _under_alarm(load)
            load.heal()
            await load.until(lambda: not load.store.broker_trouble)

        return _tally(asyncio.run(under_load(broker.url(ledger.new_store()), fill)), tick)


async def _under_alarm(load: Load) -> None:
    await load.until(lambda: "alarm" in load.store.broker_trouble)
    await load.work_on()


def run_cluster(_count: int, _seed: int, tick: Tick) -> Tally:
    """Stop one node of three, the one that the engine is connected to."""
    with _folder() as folder, port_mapper() as mapper, running_postgres() as ledger:
        nodes = [RabbitServer(folder / f"mq{number}", mapper, f"n{number}x") for number in range(NODES)]
        try:
            start_together(nodes)
            hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)

            async def stop(load: Load) -> None:
                await asyncio.to_thread(nodes[0].stop)
                load.heal()  # the other two work: the engine has to connect to one of them
                await load.work_on(10 * MORE)
                await asyncio.to_thread(nodes[0].start)
                load.heal()

            url = f"amqp://guest:guest@{hosts}/?ledger={ledger.new_store()}"
            tally = _tally(asyncio.run(under_load(url, stop)), tick)
            queues = nodes[1].ctl("list_queues", "name", "type")
            if ".p2\tquorum" not in queues:
                tally.breaks("the lanes of a cluster are not quorum queues")
            return tally
        finally:
            for node in nodes:
                node.stop()
