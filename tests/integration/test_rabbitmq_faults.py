"""Faults of a broker under load. Each test prints what was accepted, lost and done twice, and the pause."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from postroom import Engine
from postroom.errors import Unavailable
from postroom.stores import rabbitmq_link
from tests.postgresserver import database, postgres
from tests.rabbitmqload import LOOK_S, MORE, TYPE, Load, reset_at_every_phase, under_load
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper
from tests.tcpproxy import TcpProxy

__all__ = ["database", "postgres"]  # fixtures

PATIENCE_S = 40.0


def check(load: Load, name: str) -> None:
    print(load.report(name))
    assert load.accepted
    assert not load.refused  # the ledger accepts without the broker
    assert not load.lost, "accepted messages are lost"
    assert not load.doubled, "a message was done twice without a lease that ended"


@pytest.fixture(scope="module")
def own_rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A broker of its own, to be killed."""
    if not is_installed():
        pytest.skip("RabbitMQ was NOT tested: install the Debian package rabbitmq-server")
    with port_mapper() as port:
        server = RabbitServer(tmp_path_factory.mktemp("killed"), port)
        server.start()
        yield server
        server.stop()


def test_a_killed_broker_that_restarts_loses_nothing(own_rabbit: RabbitServer, tmp_path: Path) -> None:
    async def kill(load: Load) -> float:
        own_rabbit.kill()
        await load.work_on()
        await asyncio.to_thread(own_rabbit.start)
        return time.monotonic()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load = asyncio.run(under_load(url, kill))
    check(load, "broker killed and restarted")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that pika forgets
def test_connections_that_are_reset_at_every_phase_lose_nothing(rabbit: RabbitServer, database: str) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def reset(load: Load) -> float:
            await reset_at_every_phase(proxy, load)
            return time.monotonic()

        load = asyncio.run(under_load(rabbit.url(database, port=proxy.port), reset))
    gc.collect()
    check(load, "resets at every phase")


def test_a_black_hole_between_engine_and_broker_loses_nothing(rabbit: RabbitServer, database: str) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def hole(load: Load) -> float:
            proxy.is_hole = True
            await load.work_on(2 * MORE)
            proxy.is_hole = False
            proxy.reset_all()
            return time.monotonic()

        load = asyncio.run(under_load(rabbit.url(database, port=proxy.port), hole))
    check(load, "black hole")


def test_a_broker_with_a_memory_alarm_delays_nothing_for_good(
    own_rabbit: RabbitServer, tmp_path: Path
) -> None:
    async def alarm(load: Load) -> float:
        await asyncio.to_thread(own_rabbit.ctl, "set_vm_memory_high_watermark", "0.000001")
        await load.until(lambda: "alarm" in load.store.broker_trouble)
        await load.work_on()
        await asyncio.to_thread(own_rabbit.ctl, "set_vm_memory_high_watermark", "0.4")
        return time.monotonic()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load = asyncio.run(under_load(url, alarm))
    check(load, "memory alarm")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
def test_a_broker_that_is_away_from_the_beginning_is_used_when_it_comes(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq_link, "RECONNECT_S_MAX", 0.2)
    with TcpProxy(rabbit.port) as proxy:
        proxy.watch = lambda _chunk: "reset"

        async def come(load: Load) -> float:
            await load.work_on()
            proxy.watch = lambda _chunk: "pass"
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load = asyncio.run(under_load(url, come))
    gc.collect()
    check(load, "broker away at first")


def test_p0_of_broker_only_may_be_lost_and_goes_on_after_a_restart(
    own_rabbit: RabbitServer, tmp_path: Path
) -> None:
    """The mode without the ledger: what a kill of the broker loses is printed, not asserted."""

    async def run() -> None:
        url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db", "p0=broker-only")
        with Engine.open(url) as engine:
            load = Load(engine)

            async def submit() -> None:
                with suppress(Unavailable):  # once the loss of the connection is seen
                    handle = await engine.submit(type=TYPE, org_id="acme", payload={}, priority=0)
                    load.accepted.append(handle.message_id)

            for number in range(600):
                await submit()
                if number == 300:
                    own_rabbit.kill()
            await asyncio.to_thread(own_rabbit.start)
            worker = asyncio.create_task(engine.run())
            sent, deadline = len(load.accepted), time.monotonic() + PATIENCE_S
            while not set(load.accepted[sent:]) & set(load.done) and time.monotonic() < deadline:
                await submit()
                await asyncio.sleep(LOOK_S)
            await engine.stop()
            await worker
            lost = set(load.accepted[:sent]) - set(load.done)
            print(f"p0=broker-only, broker killed: sent {sent}, lost {len(lost)}")
            assert set(load.accepted[sent:]) & set(load.done)

    asyncio.run(run())
