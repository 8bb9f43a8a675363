"""Messages of an engine that are submitted and handled while something happens to its servers.

Rule 1: a fault calls `heal` at the moment in which the server, the network or the disk is well again, not
        when the engine has recovered: the engine's recovery is what is measured.
Rule 2: on RabbitMQ the ledger delivers while the broker is away. So `broker_after_heal_s` is measured, too:
        the time until the broker delivers a message that was submitted after the heal.
"""

import asyncio
import itertools
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from postroom import Engine
from postroom.errors import StoreUnreachable, Unavailable
from postroom.stores.open import open_store
from postroom.stores.rabbitmq.lanes import LaneDelivery, RabbitLimits
from postroom.stores.rabbitmq.store import RabbitStore
from tests.tcpproxy import TcpProxy
from tests.waiting import HANG_GUARD_S

TYPE = "tool_call"
HOW = ("reset", "reset-after")
BROKER_PATIENCE_S = 120.0  # two heartbeats have to be missed, and a broker starts slowly on a busy machine
LOAD_PAUSE_S = 0.01
LOOK_S = 0.02
MORE = 20
RESET_S = 0.5  # after this time a new connection is forced, when only that can reach the next phase


class Load:
    """Submits to two organizations in every priority while something goes wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.store = cast("RabbitStore", engine.store)
        self.accepted: list[str] = []
        self.refused = 0
        self.unsure = 0
        """Submits whose outcome is unknown, and says so: they may be done."""
        self._heals: list[tuple[float, int]] = []
        """When the fault ended each time, and how many messages were accepted before."""
        self._delivered: dict[str, float] = {}
        """When the broker delivered a message first."""
        self.done: Counter[str] = Counter()
        self._times: list[float] = []
        self._stopping = False

        @engine.handler(TYPE)
        async def handle(message: Any, _context: Any) -> None:
            self.done[message.message_id] += 1
            self._times.append(time.monotonic())

        if isinstance(engine.store, RabbitStore):
            self._note_deliveries()

    def _note_deliveries(self) -> None:
        add = self.store.deliveries.add

        def noted(delivery: LaneDelivery) -> bool:
            self._delivered.setdefault(delivery.note.message_id, time.monotonic())
            return add(delivery)

        self.store.deliveries.add = noted  # type: ignore[method-assign]

    def heal(self) -> None:
        """The cause of a fault is gone now."""
        self._heals.append((time.monotonic(), len(self.accepted)))

    async def submit(self) -> None:
        for number in itertools.count():
            if self._stopping:
                return
            try:
                handle = await self._engine.submit(
                    type=TYPE,
                    org_id=f"org{number % 2}",
                    payload={},
                    priority=number % 4,
                )
                self.accepted.append(handle.message_id)
            except StoreUnreachable as error:
                self.unsure += not error.rolled_back
                self.refused += 1
            except Unavailable:
                self.refused += 1
            await asyncio.sleep(LOAD_PAUSE_S)

    async def work_on(self, more: int = MORE) -> None:
        """Wait until so many further messages are done. A fault that stops all work fails here."""
        wanted = len(self.done) + more
        await self.until(lambda: len(self.done) >= wanted)

    async def until(self, condition: Callable[[], object], within_s: float = HANG_GUARD_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"it never came true; {self.report('so far')}"
            await asyncio.sleep(LOOK_S)

    async def finish(self) -> None:
        """Stop submitting, and wait until everything accepted is done. What is not done then is lost."""
        self._stopping = True
        with suppress(AssertionError):
            await self.until(lambda: not set(self.accepted) - set(self.done))

    @property
    def lost(self) -> int:
        """Messages that were accepted and are not done."""
        return len(set(self.accepted) - set(self.done))

    @property
    def doubled(self) -> int:
        return sum(times - 1 for times in self.done.values())

    @property
    def first_after_heal_s(self) -> float | None:
        """How long after a heal the first message was done; the longest of all heals."""
        return _longest(
            next((at - healed for at in self._times if at > healed), None) for healed, _ in self._heals
        )

    @property
    def broker_after_heal_s(self) -> float | None:
        """How long after the last heal the broker delivered a message that was submitted after it."""
        if not self._heals:
            return None
        healed, count = self._heals[-1]
        found = (self._delivered.get(message_id) for message_id in self.accepted[count:])
        return min((at - healed for at in found if at is not None), default=None)

    @property
    def pause_s(self) -> float:
        """The longest time without a handled message."""
        return max((after - before for before, after in itertools.pairwise(self._times)), default=0.0)

    def report(self, name: str) -> str:
        """What a fault did, in one line."""
        text = f"{name}: accepted {len(self.accepted)}, lost {self.lost}, duplicated {self.doubled}, "
        text += f"longest pause {self.pause_s:.1f} s"
        first = self.first_after_heal_s
        if first is not None:
            text += f", first delivery {first:.2f} s after the heal"
        broker = self.broker_after_heal_s
        return text if broker is None else f"{text}, by the broker {broker:.2f} s after it"


def _longest(times: Iterable[float | None]) -> float | None:
    """The longest time; None when there is none, or when one of them never came."""
    found = list(times)
    return None if None in found else max(cast("list[float]", found), default=None)


def rabbit_store(url: str, limits: RabbitLimits) -> RabbitStore:
    """A store with limits of its own."""
    store = open_store(url)
    assert isinstance(store, RabbitStore)
    store.limits = limits
    return store


async def under_load(
    url: str, fault: Callable[[Load], Awaitable[None]], limits: RabbitLimits | None = None
) -> Load:
    """Run a fault while messages are submitted and worked on, until the broker carries them again."""
    engine = Engine.open(url) if limits is None else Engine(rabbit_store(url, limits))
    load = Load(engine)
    worker = asyncio.create_task(engine.run())
    submitting = asyncio.create_task(load.submit())
    try:
        await load.work_on()
        await fault(load)
        await load.work_on()
        if isinstance(engine.store, RabbitStore):
            await load.until(lambda: load.broker_after_heal_s is not None, BROKER_PATIENCE_S)
        await load.finish()
    finally:
        submitting.cancel()
        await engine.stop()
        await worker
        engine.close()
    return load


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
ONCE_A_CONNECTION = (PHASES["login"], PHASES["declare"], PHASES["consume"])


async def reset_at_every_phase(proxy: TcpProxy, load: Load) -> None:
    """Reset a connection before and after each kind of method that the engine sends."""
    left: list[tuple[bytes, str]] = [(each, how) for each in PHASES.values() for how in HOW]

    def watch(chunk: bytes) -> str:
        if left and left[0][0] in chunk:
            return left.pop(0)[1]
        return "pass"

    proxy.watch = watch
    proxy.reset_all()
    while left:
        count = len(left)
        with suppress(AssertionError):
            await load.until(lambda count=count: len(left) < count, within_s=RESET_S)  # type: ignore[misc]
        if left and left[0][0] in ONCE_A_CONNECTION:
            proxy.reset_all()
    proxy.watch = lambda _chunk: "pass"
