"""Faults of a broker under load. Each test prints messages accepted, lost and done twice, and the longest pause."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from postroom.errors import Unavailable
from postroom.stores import rabbitmq_link
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper
from tests.tcpproxy import Proxy, proxied

TYPE = "tool_call"
PATIENCE_S = 40.0
LOAD_PAUSE_S = 0.01


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
        while set(self.accepted) - set(self.done) and time.monotonic() < deadline:
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


@pytest.fixture
def own_rabbit(tmp_path: Path) -> Any:
    """A broker of its own, to be killed."""
    if not is_installed():
        pytest.skip("RabbitMQ is not installed")
    with port_mapper() as port:
        server = RabbitServer(tmp_path / "mq", port)
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


def test_connections_that_are_reset_at_every_phase_lose_nothing(rabbit: RabbitServer, tmp_path: Path) -> None:
    with proxied(rabbit.port) as proxy:

        async def reset(_load: Load) -> float:
            for _ in range(15):
                proxy.reset()
                await asyncio.sleep(0.1)
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load, _ = asyncio.run(under_load(url, "15 resets", reset))
    check(load)


def test_a_black_hole_between_engine_and_broker_loses_nothing(rabbit: RabbitServer, tmp_path: Path) -> None:
    with proxied(rabbit.port) as proxy:
        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load, _ = asyncio.run(under_load(url, "black hole of 3 s", lambda _: _hole(proxy, 3.0)))
    check(load)


async def _hole(proxy: Proxy, seconds: float) -> float:
    proxy.hold()
    await asyncio.sleep(seconds)
    proxy.heal()
    return time.monotonic()


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


def test_a_broker_that_is_away_from_the_beginning_is_used_when_it_comes(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq_link, "RECONNECT_S_MAX", 0.2)
    with proxied(rabbit.port) as proxy:
        proxy.refuse()

        async def come(load: Load) -> float:
            await asyncio.sleep(2.0)
            assert load.done, "nothing is delivered without the broker"
            proxy.heal()
            return time.monotonic()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load, _ = asyncio.run(under_load(url, "broker away at first", come))
    check(load)


def test_p0_of_broker_only_may_be_lost_and_is_counted(own_rabbit: RabbitServer, tmp_path: Path) -> None:
    """The mode without the ledger: what a kill of the broker loses is printed, not asserted."""

    async def run() -> tuple[int, int]:
        url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db", "p0=broker-only")
        seen: set[str] = set()
        with Engine.open(url) as engine:

            @engine.handler(TYPE)
            async def handle(message: Any, _context: Any) -> None:
                seen.add(message.message_id)

            sent: set[str] = set()
            for number in range(600):
                handle_ = await engine.submit(type=TYPE, org_id="acme", payload={}, priority=0)
                sent.add(handle_.message_id)
                if number == 300:
                    own_rabbit.kill()
            await asyncio.to_thread(own_rabbit.start)
            worker = asyncio.create_task(engine.run())
            deadline = time.monotonic() + 5.0
            while sent - seen and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            await engine.stop()
            await worker
        return len(sent), len(sent - seen)

    sent, lost = asyncio.run(run())
    print(f"p0=broker-only, broker killed: sent {sent}, lost {lost}")
    assert lost < sent
