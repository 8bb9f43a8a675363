"""What a broker is given and holds: persistent messages, confirms, the prefetch, the sweep of workers."""

import asyncio
from typing import Any

import pytest

from postroom import Engine
from postroom.stores.rabbitmq.lanes import RabbitLimits, Topology
from tests.integration.test_engine_rabbitmq import (
    TYPE,
    any_url,
    broker_alone,
    channel_of,
    echo,
    empty_lanes,
    in_loop,
    open_engine,
    results,
    store_of,
    submit,
    until,
    url,
    working,
)
from tests.rabbitmqserver import RabbitServer

__all__ = ["any_url", "broker_alone", "url"]  # fixtures

PERSISTENT = 2
PREFETCH = 5


@pytest.mark.statement("durable-queues", "confirms")
@in_loop
async def test_lanes_are_durable_and_only_p0_is_published_without_confirm(
    url: str, rabbit: RabbitServer
) -> None:
    with Engine.open(url) as engine:
        await submit(engine, 1, priority=0)
        await submit(engine, 1, priority=2)
        store = store_of(engine)
        broker = store._started()
        await until(lambda: broker.counts(["org:acme"]) == {"org:acme": 2})
        await until(lambda: not broker.backlog)
        assert broker._safe is not None
        assert broker._fast is not None
        assert broker._safe.confirms
        assert broker._safe._published == 1
        assert not broker._fast.confirms
        channel = channel_of(rabbit)
        for lane in (0, 2):
            name = store._topology().lane("org:acme", lane)
            channel.queue_declare(name, passive=True, durable=True)
            _, properties, _ = channel.basic_get(name)
            assert properties.delivery_mode == PERSISTENT
            assert not properties.headers, "a history that the broker could act on"
        channel.connection.close()


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_a_large_context_is_delivered_from_the_ledger(any_url: str) -> None:
    context = {"pages": ["x" * 1_000 for _ in range(200)]}
    with Engine.open(any_url) as engine:
        engine.handler(TYPE)(lambda message, _: message.context == context)
        handles = await submit(engine, 2, context=context)
        async with working(engine):
            assert await results(handles) == [True, True]


@pytest.mark.statement("concurrency-bound")
@in_loop
async def test_a_process_holds_no_more_deliveries_of_a_lane_than_its_prefetch(url: str) -> None:
    """So a message waits behind at most that many others for a process that is busy."""
    with Engine.open(url.replace("ledger=", f"prefetch={PREFETCH}&ledger=")) as engine:
        free = asyncio.Event()

        @engine.handler(TYPE)
        async def handle(_message: Any, _context: Any) -> None:
            await free.wait()

        handles = await submit(engine, 4 * PREFETCH)
        store = store_of(engine)
        broker = store._started()
        await until(lambda: broker.counts(["org:acme"]) == {"org:acme": 4 * PREFETCH})
        async with working(engine, concurrency=1):
            await until(lambda: store.deliveries.count("org:acme", 2) == PREFETCH)
            assert broker.counts(["org:acme"])["org:acme"] >= 2 * PREFETCH
            free.set()
            await results(handles)


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_messages_refused_by_the_broker_are_published_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, full = Topology._arguments, {"x-max-length": 1, "x-overflow": "reject-publish"}
    monkeypatch.setattr(Topology, "_arguments", lambda *args: {**arguments(*args), **full})
    with open_engine(url, refused_pause_s=3_600.0) as engine:
        echo(engine)
        handles = await submit(engine, 4)
        broker = store_of(engine)._started()
        await until(lambda: len(broker._refused) == 3)
        assert broker._safe is not None
        assert broker._safe._published == 4, "refused messages are published without a pause"
        broker.limits = RabbitLimits(refused_pause_s=0.1)
        broker._soon(broker._publish_refused)
        async with working(engine):
            assert await results(handles) == [*range(4)]


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_workers_compare_the_lanes_with_the_ledger_from_time_to_time(
    url: str, rabbit: RabbitServer
) -> None:
    with open_engine(url, reconcile_s=0.3, held_look_s=0.1) as engine:
        echo(engine)
        handles = await submit(engine, 5)
        store = store_of(engine)
        await until(lambda: store._started().counts(["org:acme"]) == {"org:acme": 5})
        empty_lanes(rabbit, store)
        async with working(engine):
            assert await results(handles) == [*range(5)]
