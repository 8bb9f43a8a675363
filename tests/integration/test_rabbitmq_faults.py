"""Faults of a broker under load. Each test prints what was accepted, lost and done twice, and the pause."""

import asyncio
import gc
import itertools
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from postroom.errors import Unavailable
from postroom.stores import rabbitmq_link
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper
from tests.tcpproxy import TcpProxy

TYPE = "tool_call"
PATIENCE_S = 40.0
LOAD_PAUSE_S = 0.01
HOW = ("reset", "reset-after")


class Load:
    """Submits to two organizations in every priority while something goes wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.accepted: list[str] = []
        self.refused = 0
        self.done: Counter[str] = Counter()
        self._times: list[float] = []
        self._stopping = False

        @engine.handler(TYPE)
        async def handle(message: Any, _context: Any) -> None:
            self.done[message.message_id] += 1
            self._times.append(time.monotonic())

    async def submit(self) -> None:
        for number in itertools.count():
            if self._stopping:
                return
            try:
                handle = await self._engine.submit(
                    type=TYPE, org_id=f"org{number % 2}", payload={}, priority=number % 4
                )
                self.accepted.append(handle.message_id)
            except Unavailable:
                self.refused += 1
            await asyncio.sleep(LOAD_PAUSE_S)

    async def finish(self) -> None:
        """Stop submitting, and wait until everything accepted is done."""
        self._stopping = True
        deadline = time.monotonic() + PATIENCE_S
        while set(self.accepted) - set(self.done) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def report(self, name: str, healed: float | None = None) -> str:
        lost = len(set(self.accepted) - set(self.done))
        doubled = sum(times - 1 for times in self.done.values())
        pause_s = max((b - a for a, b in itertools.pairwise(self._times)), default=0.0)
        text = (
            f"{name}: accepted {len(self.accepted)}, refused {self.refused}, lost {lost}, doubled {doubled}"
        )
        text += f", longest pause {pause_s:.1f} s"
        if healed is not None:
            first = next((at for at in self._times if at > healed), None)
            text += (
                f", first delivery {'never' if first is None else f'{first - healed:.2f} s'} after the heal"
            )
        return text


async def under_load(
    url: str, name: str, fault: Callable[[Load], Awaitable[float | None]]
) -> tuple[Load, Engine]:
    """Run a fault while messages are submitted and worked on."""
    engine = Engine.open(url)
    load = Load(engine)
    worker = asyncio.create_task(engine.run())
    submitting = asyncio.create_task(load.submit())
    try:
        await asyncio.sleep(0.5)
        healed = await fault(load)
        await asyncio.sleep(0.5)
        await load.finish()
        print(load.report(name, healed))
    finally:
        submitting.cancel()
        await engine.stop()
        await worker
        engine.close()
    return load, engine


def check(load: Load) -> None:
    assert load.accepted
    assert not load.refused  # the ledger accepts without the broker
    assert not set(load.accepted) - set(load.done), "accepted messages are lost"
    assert max(load.done.values()) == 1, "a message was done twice without a lease that ended"


@pytest.fixture(scope="module")
def own_rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A broker of its own, to be killed."""
    if not is_installed():
        pytest.skip("RabbitMQ is not installed")
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
    load, _ = asyncio.run(under_load(url, "broker killed and restarted", kill))
    check(load)


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
        load, _ = asyncio.run(under_load(url, f"{len(left)} resets", reset))
        assert not left
    gc.collect()
    check(load)


def test_a_black_hole_between_engine_and_broker_loses_nothing(rabbit: RabbitServer, tmp_path: Path) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def hole(_load: Load) -> float:
            proxy.is_hole = True
            await asyncio.sleep(3.0)
            proxy.is_hole = False
            proxy.reset_all()
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load, _ = asyncio.run(under_load(url, "black hole of 3 s", hole))
    check(load)


def test_a_broker_with_a_memory_alarm_delays_nothing_for_good(
    own_rabbit: RabbitServer, tmp_path: Path
) -> None:
    async def alarm(_load: Load) -> float:
        await asyncio.to_thread(own_rabbit.ctl, "set_vm_memory_high_watermark", "0.000001")
        await asyncio.sleep(1.5)
        await asyncio.to_thread(own_rabbit.ctl, "set_vm_memory_high_watermark", "0.4")
        return time.monotonic()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load, _ = asyncio.run(under_load(url, "memory alarm", alarm))
    check(load)


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
        load, _ = asyncio.run(under_load(url, "broker away at first", come))
    gc.collect()
    check(load)


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
