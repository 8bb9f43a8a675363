"""Faults of a broker under load. Each test prints what was accepted, lost and done twice, and the pause."""

import asyncio
import gc
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from postroom import Engine
from postroom.errors import Unavailable
from postroom.stores import rabbitmq_link
from tests.rabbitmqload import TYPE, Load, under_load
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper
from tests.tcpproxy import TcpProxy

PATIENCE_S = 40.0
HOW = ("reset", "reset-after")


def check(load: Load, name: str) -> None:
    print(load.report(name))
    assert load.accepted
    assert not load.refused  # the ledger accepts without the broker
    assert not set(load.accepted) - set(load.done), "accepted messages are lost"
    assert max(load.done.values()) == 1, "a message was done twice without a lease that ended"


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
    async def kill(_load: Load) -> float:
        own_rabbit.kill()
        await asyncio.sleep(1.5)
        await asyncio.to_thread(own_rabbit.start)
        return time.monotonic()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load = asyncio.run(under_load(url, kill))
    check(load, "broker killed and restarted")


def method(class_id: int, method_id: int) -> bytes:
    """How a method begins on the wire."""
    return struct.pack(">HH", class_id, method_id)


PHASES = {
    "login": method(10, 11),
    "declare": method(50, 10),
    "publish": method(60, 40),
    "consume": method(60, 20),
    "acknowledge": method(60, 80),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that pika forgets
def test_connections_that_are_reset_at_every_phase_lose_nothing(rabbit: RabbitServer, tmp_path: Path) -> None:
    with TcpProxy(rabbit.port) as proxy:
        left: list[tuple[bytes, str]] = [(each, how) for each in PHASES.values() for how in HOW]

        def watch(chunk: bytes) -> str:
            if left and left[0][0] in chunk:
                return left.pop(0)[1]
            return "pass"

        async def reset(_load: Load) -> float:
            proxy.watch = watch
            proxy.reset_all()
            deadline = time.monotonic() + PATIENCE_S
            while left and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                if left and left[0][0] in (PHASES["login"], PHASES["declare"], PHASES["consume"]):
                    proxy.reset_all()  # only a new connection does this again
                    await asyncio.sleep(0.5)
            proxy.watch = lambda _chunk: "pass"
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load = asyncio.run(under_load(url, reset))
        assert not left
    gc.collect()
    check(load, "resets at every phase")


def test_a_black_hole_between_engine_and_broker_loses_nothing(rabbit: RabbitServer, tmp_path: Path) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def hole(_load: Load) -> float:
            proxy.is_hole = True
            await asyncio.sleep(3.0)
            proxy.is_hole = False
            proxy.reset_all()
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load = asyncio.run(under_load(url, hole))
    check(load, "black hole of 3 s")


def test_a_broker_with_a_memory_alarm_delays_nothing_for_good(
    own_rabbit: RabbitServer, tmp_path: Path
) -> None:
    async def alarm(_load: Load) -> float:
        await asyncio.to_thread(own_rabbit.ctl, "set_vm_memory_high_watermark", "0.000001")
        await asyncio.sleep(1.5)
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
            await asyncio.sleep(2.0)
            assert load.done, "nothing is delivered without the broker"
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
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            await engine.stop()
            await worker
            lost = set(load.accepted[:sent]) - set(load.done)
            print(f"p0=broker-only, broker killed: sent {sent}, lost {len(lost)}")
            assert set(load.accepted[sent:]) & set(load.done)

    asyncio.run(run())
