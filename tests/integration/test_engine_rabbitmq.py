"""An engine whose lanes are in RabbitMQ: what a broker carries, moves, delays, loses and doubles."""

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial, wraps
from pathlib import Path
from typing import Any

import msgspec
import pika  # type: ignore[import-untyped]
import psycopg
import pytest

from postroom import Engine, Policy, open_store
from postroom.calls.submit import SubmitFields
from postroom.core.lifecycle.retry import Retry
from postroom.errors import InvalidSetting
from postroom.message import ENGINE_PREFIX, Envelope
from postroom.stores.base import Listing
from postroom.stores.rabbitmq.lanes import (
    Deliveries,
    Note,
    Outgoing,
    RabbitLimits,
    Topology,
    is_shard,
    shard_of,
)
from postroom.stores.rabbitmq.store import RabbitStore
from postroom.stores.rabbitmq.transaction import HOMES, HOMES_A_PAGE, own_homes
from postroom.stores.transaction import Transaction
from tests.engines import EngineUnderTest
from tests.integration.commandline import isolate, postroom
from tests.postgresserver import database, postgres, store_url
from tests.rabbitmqload import rabbit_store
from tests.rabbitmqserver import RabbitServer
from tests.waiting import HANG_GUARD_S
from tests.waiting import until as until_true

__all__ = ["database", "postgres"]

TYPE = "tool_call"
DELIVERY_LIMIT = 2
BROKER_ALONE = RabbitLimits(silence_s=3_600.0, late_ns=3_600 * 10**9)
"""Nothing is claimed from the ledger itself, so that only the broker can deliver."""
SECRET = "s3cret-pw"  # noqa: S105 - of a broker that the test starts


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 2 * HANG_GUARD_S))

    return run


@pytest.fixture
def broker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed from the ledger itself, so that only the broker can deliver."""
    monkeypatch.setattr(RabbitStore, "limits", BROKER_ALONE)
    monkeypatch.setattr(Deliveries, "take_new_home", lambda _self: False)


@pytest.fixture
def url(rabbit: RabbitServer, tmp_path: Path) -> str:
    return rabbit.url(f"sqlite:///{tmp_path}/queue.db")


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(rabbit: RabbitServer, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A store over each kind of ledger."""
    return rabbit.url(store_url(request, tmp_path))


def open_engine(url: str, **limits: Any) -> Engine:
    """An engine with limits of its own. Only the broker can deliver."""
    return Engine(rabbit_store(url, msgspec.structs.replace(BROKER_ALONE, **limits)))


def store_of(engine: Engine) -> RabbitStore:
    assert isinstance(engine.store, RabbitStore)
    return engine.store


@asynccontextmanager
async def working(engine: Engine, **options: Any) -> AsyncIterator[None]:
    worker = asyncio.create_task(engine.run(**options))
    try:
        yield
    finally:
        await engine.stop()
        await worker


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def results(handles: list[Any]) -> list[Any]:
    return [await handle.result(timeout_s=HANG_GUARD_S) for handle in handles]


async def submit(engine: Engine, count: int, **fields: Any) -> list[Any]:
    message: Any = {"type": TYPE, "org_id": "acme", **fields}
    return await engine.submit_many([message | {"payload": {"n": number}} for number in range(count)])


def channel_of(rabbit: RabbitServer) -> Any:
    return pika.BlockingConnection(
        pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{rabbit.port}/")
    ).channel()


async def until_in_broker(engine: Engine, count: int) -> None:
    """Wait until the broker holds so many ids."""
    broker = store_of(engine)._started()
    await until(lambda: broker.counts(["org:acme"]) == {"org:acme": count})


def empty_lanes(rabbit: RabbitServer, store: RabbitStore) -> None:
    """Lose what the broker holds. The ledger still has it."""
    channel = channel_of(rabbit)
    for name in lanes_of(store):
        channel.queue_purge(name)
    channel.connection.close()


def lanes_of(store: RabbitStore, queue: str = "org:acme") -> list[str]:
    return [name for name, _ in store._topology().lanes(queue)]


def echo(engine: Engine) -> list[tuple[str, int]]:
    """A handler that notes what it gets."""
    seen: list[tuple[str, int]] = []

    @engine.handler(TYPE)
    async def handle(message: Any, _context: Any) -> Any:
        seen.append((message.org_id, message.payload["n"]))
        return message.payload["n"]

    return seen


# ---- delivery ------------------------------------------------------------------------------------------


@pytest.mark.statement("broker")
@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_messages_of_all_priorities_and_organizations_are_delivered_once(any_url: str) -> None:
    with Engine.open(any_url) as engine:
        seen = echo(engine)
        async with working(engine):
            handles = []
            for priority in range(4):
                for org_id in ("acme", "beta"):
                    handles += await submit(engine, 25, priority=priority, org_id=org_id)
            assert await results(handles) == [*range(25)] * 8
        assert len(seen) == 200
        assert not engine.store.broker_trouble


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_two_organizations_give_messages_the_same_id(any_url: str) -> None:
    given = "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b11"
    with Engine.open(any_url) as engine:
        echo(engine)
        handles = []
        for org_id in ("acme", "beta"):
            handles += await submit(engine, 1, message_id=given, org_id=org_id)
        assert [handle.message_id for handle in handles] == [given, f"@beta:{given}"]
        async with working(engine):
            assert await results(handles) == [0, 0]


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_messages_wait_in_the_broker_until_a_worker_starts(url: str) -> None:
    with Engine.open(url) as submitter:
        handles = await submit(submitter, 30)
        store = store_of(submitter)
        await until(lambda: store._started().counts(["org:acme"]) == {"org:acme": 30})
        with Engine.open(url) as engine:
            echo(engine)
            async with working(engine):
                assert await results(handles) == [*range(30)]
        assert store._started().counts(["org:acme"]) == {"org:acme": 0}


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_two_workers_share_the_messages(any_url: str) -> None:
    with Engine.open(any_url) as one, Engine.open(any_url) as other:
        seen = [echo(one), echo(other)]
        async with working(one, concurrency=2), working(other, concurrency=2):
            await until(
                lambda: store_of(one)._started().is_receiving and store_of(other)._started().is_receiving
            )
            await results(await submit(one, 200))
        assert len(seen[0]) + len(seen[1]) == 200
        assert seen[0]
        assert seen[1]


@pytest.mark.statement("broker-acknowledgment")
@in_loop
async def test_a_second_delivery_of_a_message_is_dropped(any_url: str, broker_alone: None) -> None:
    with Engine.open(any_url) as engine:
        seen = echo(engine)
        handles = await submit(engine, 5)
        store = store_of(engine)
        twice = [Outgoing("org:acme", Note(handle.message_id, 2)) for handle in handles]
        unknown = Outgoing("org:acme", Note("nobody", 2))
        store._started().publish([*twice, unknown, *twice])
        async with working(engine):
            await results(handles)
            handles = await submit(engine, 1)
            await results(handles)
            await until(lambda: not store.deliveries.count("org:acme", 2))
        assert len(seen) == 6
        assert store._started().counts(["org:acme"]) == {"org:acme": 0}


# ---- retries, delays, promotion ------------------------------------------------------------------------


@pytest.mark.statement("broker-retry")
@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_a_retry_and_a_delayed_message_come_back_through_delay_queues(any_url: str) -> None:
    policy = Policy(retries={TYPE: Retry(delay_s=0.2)})
    with Engine.open(any_url, policy) as engine:

        @engine.handler(TYPE)
        async def handle(_message: Any, context: Any) -> int:
            if context.attempt < 3:
                raise RuntimeError("not yet")
            return int(context.attempt)

        async with working(engine):
            [handle_] = await submit(engine, 1)
            assert await handle_.result(timeout_s=HANG_GUARD_S) == 3
            [later] = await submit(engine, 1, delay_s=0.4)
            assert await later.result(timeout_s=HANG_GUARD_S) == 3
        delays = [
            (event.message_id, event.state)
            for event in engine.store.events(limit=1_000)
            if event.state in ("SCHEDULED", "RETRYING")
        ]
        retried = [(handle_.message_id, "RETRYING")] * 2
        assert delays == [*retried, (later.message_id, "SCHEDULED"), *[(later.message_id, "RETRYING")] * 2]


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_a_delay_queue_that_expired_is_declared_before_the_next_message(
    url: str, rabbit: RabbitServer
) -> None:
    """A message to a queue that is gone costs the connection: the broker closes its channel."""
    delay_ms = 300
    with open_engine(url, delay_expiry_ms_min=1) as engine:
        await submit(engine, 1)
        store, home = store_of(engine), "org:acme"
        broker, channel = store._started(), channel_of(rabbit)
        exchange, _ = store._topology().delay(delay_ms)
        await until(lambda: broker._safe is not None and broker.counts([home]) == {home: 1})
        first_connection = broker._safe
        for count in (2, 3):
            broker.publish([Outgoing(home, Note(f"m{count}", 2), delay_ms)])
            await until(lambda count=count: broker.counts([home]) == {home: count})  # type: ignore[misc]
            channel = await until_gone(channel, exchange)
        assert broker._safe is first_connection, "the delay queue was not declared again"
        channel.connection.close()


async def until_gone(channel: Any, exchange: str) -> Any:
    """Wait until an exchange has expired with its queue. Returns a channel that is open."""
    deadline = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < deadline:
        try:
            channel.exchange_declare(exchange, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return channel.connection.channel()
        await asyncio.sleep(0.1)
    raise AssertionError(f"{exchange} did not expire")


@pytest.mark.statement("broker-dead-letters")
@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_failing_message_becomes_a_dead_letter_and_can_be_replayed(url: str) -> None:
    with Engine.open(url, Policy(retries={TYPE: Retry(max_retries=1, delay_s=0.1)})) as engine:
        is_healed = False

        @engine.handler(TYPE)
        async def handle(_message: Any, _context: Any) -> str:
            if not is_healed:
                raise RuntimeError("broken")
            return "healed"

        async with working(engine):
            [handle_] = await submit(engine, 1)
            await until_async(engine, handle_.message_id, "DEAD_LETTER")
            is_healed = True
            await engine.dlq.replay([handle_.message_id])
            assert await handle_.result(timeout_s=HANG_GUARD_S) == "healed"


async def until_async(engine: Engine, message_id: str, state: str) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while (await engine.get(message_id)).state != state:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_messages_keep_their_priority_when_all_have_aged(any_url: str) -> None:
    """Bulk of the same organization does not stand in front of urgent messages, in the broker either."""
    policy = Policy(promote_after_s=(0.001, 0.001, 0.001))
    with Engine.open(any_url, policy) as engine:
        seen = echo(engine)
        bulk = await submit(engine, 100, priority=3)
        await until_in_broker(engine, 100)
        urgent = [*await submit(engine, 10, priority=0), *await submit(engine, 10, priority=1)]
        await until_in_broker(engine, 120)
        async with working(engine, concurrency=1):
            await results(urgent)
            assert len(seen) < 80, "bulk came first"
            await results(bulk)
        kinds = [event.kind for event in engine.store.events(limit=10_000)]
        assert kinds.count("promoted") == 110, "all but P0"


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_aged_bulk_does_not_stop_fresh_messages_of_other_organizations(any_url: str) -> None:
    policy = Policy(promote_after_s=(3_600, 0.1, 0.1))
    with Engine.open(any_url, policy) as engine:
        order: list[str] = []

        @engine.handler(TYPE)
        async def handle(message: Any, _context: Any) -> None:
            order.append(message.org_id)

        bulk = await submit(engine, 200, priority=3, org_id="bulk")
        async with working(engine, concurrency=1):
            await until(lambda: len(order) > 20)
            await results(await submit(engine, 40, priority=1, org_id="other"))
            begun = order.index("other")
            assert order[begun : begun + 16].count("bulk") <= 4  # one of eight, and while deliveries come
            assert len(order) < 200
            await results(bulk)


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_five_rounds_of_retry_and_promotion_lose_nothing(url: str, rabbit: RabbitServer) -> None:
    """A message that passes the same queues again and again carries no history that the broker acts on."""
    rounds, count = 5, 10
    policy = Policy(
        promote_after_s=(0.1, 0.1, 0.1),
        retries={TYPE: Retry(max_retries=rounds, delay_s=0.5, delay_s_max=0.5)},
    )
    with Engine.open(url, policy) as engine:
        failed = 0

        @engine.handler(TYPE)
        async def handle(_message: Any, context: Any) -> int:
            nonlocal failed
            if context.attempt <= rounds:
                failed += 1
                raise RuntimeError("again")
            return int(context.attempt)

        def has_failed(times: int) -> bool:
            return failed >= times

        handles = await submit(engine, count, priority=3)
        for turn in range(rounds + 1):
            await until_in_broker(engine, count)
            async with working(engine):
                await until(partial(has_failed, count * min(turn + 1, rounds)))
                if turn == rounds:
                    assert await results(handles) == [rounds + 1] * count
        assert failed == count * rounds


# ---- organizations -----------------------------------------------------------------------------------------


@pytest.mark.statement("broker-many-organizations")
@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_organizations_beyond_the_limit_share_shards_and_get_turns(any_url: str) -> None:
    with open_engine(any_url, own_lanes_max=5) as engine:
        seen = echo(engine)
        for number in range(5):
            await submit(engine, 1, org_id=f"own{number}")
        hot = "hot"
        twin = next(f"t{n}" for n in range(10_000) if shard_of(f"org:t{n}") == shard_of("org:hot"))
        await submit(engine, 60, org_id=hot)
        await submit(engine, 3, org_id=twin)
        homes = store_of(engine).homes
        assert {is_shard(homes[f"{ENGINE_PREFIX}own{n}"]) for n in range(5)} == {False}
        assert homes[ENGINE_PREFIX + hot] == homes[ENGINE_PREFIX + twin] == shard_of("org:hot")
        async with working(engine, concurrency=4):
            await until(lambda: len(seen) == 68)
        last = max(index for index, (org_id, _) in enumerate(seen) if org_id == twin)
        assert last < 30  # the hot organization does not go first with all its messages


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_250_organizations_are_served(url: str) -> None:
    with Engine.open(url) as engine:
        seen = echo(engine)
        messages: list[SubmitFields] = [
            {"type": TYPE, "org_id": f"o{number}", "payload": {"n": number}, "priority": number % 4}
            for number in range(250)
        ]
        async with working(engine):
            await results(await engine.submit_many(messages))
        assert {org_id for org_id, _ in seen} == {f"o{number}" for number in range(250)}
        homes = store_of(engine).homes.values()
        assert sum(not is_shard(home) for home in homes) == RabbitLimits().own_lanes_max
        assert sum(is_shard(home) for home in homes) == 50


def test_two_processes_never_both_take_the_last_own_lanes(
    rabbit: RabbitServer, emptied_database: str
) -> None:
    url, has_taken, has_ended = rabbit.url(emptied_database), threading.Event(), threading.Event()
    few = RabbitLimits(own_lanes_max=1)
    with closing(rabbit_store(url, few)) as one, closing(rabbit_store(url, few)) as other:

        def take_first(transaction: Transaction) -> None:
            transaction.insert([Envelope(queue="org:one", payload=b"{}")])
            has_taken.set()
            until_true(lambda: has_ended.is_set() or waits_for_lock(emptied_database))

        def take_second(transaction: Transaction) -> None:
            transaction.insert([Envelope(queue="org:other", payload=b"{}")])
            has_ended.set()

        first = threading.Thread(target=one.write, args=(take_first,))
        first.start()
        assert has_taken.wait(HANG_GUARD_S)
        other.write(take_second)
        first.join(HANG_GUARD_S)
        assert one.read(own_homes) == {"org:one"}
        assert [record.queue for record in one.find(Listing())] == ["org:one", "org:other"]


def waits_for_lock(database: str) -> bool:
    with psycopg.connect(database.partition("?")[0]) as connection:
        found = connection.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        return found.fetchone() is not None


def test_a_new_worker_consumes_every_home_also_more_than_there_should_be(url: str) -> None:
    names = {f"org:{number}" for number in range(HOMES_A_PAGE + 5)}
    with closing(open_store(url.partition("ledger=")[2])) as ledger:
        ledger.write(lambda transaction: [transaction.cells.put(HOMES, name, b"1") for name in names])
    with open_engine(url, own_lanes_max=2) as engine:
        store = store_of(engine)
        assert names | {f"shard-{number}" for number in range(64)} == store.read(store._known_homes)


# ---- repair ------------------------------------------------------------------------------------------------


@pytest.mark.statement("ledger-is-truth")
@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_the_sweep_publishes_what_the_broker_lost(any_url: str, rabbit: RabbitServer) -> None:
    with Engine.open(any_url) as engine:
        echo(engine)
        handles = await submit(engine, 20) + await submit(engine, 5, priority=0, org_id="beta")
        store = store_of(engine)
        await until(
            lambda: store._started().counts(["org:acme", "org:beta"]) == {"org:acme": 20, "org:beta": 5}
        )
        assert store.reconcile() == 0
        channel = channel_of(rabbit)
        for name in lanes_of(store) + lanes_of(store, "org:beta"):
            channel.queue_delete(name)
        channel.connection.close()
        assert store.reconcile() == 25
        async with working(engine):
            await results(handles)


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_messages_dropped_at_the_delivery_limit_are_published_again(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = Topology._arguments
    monkeypatch.setattr(
        Topology, "_arguments", lambda *args: {**arguments(*args), "x-delivery-limit": DELIVERY_LIMIT}
    )
    with Engine.open(rabbit.url(f"sqlite:///{tmp_path}/queue.db", "queues=quorum")) as engine:
        seen = echo(engine)
        handles = await submit(engine, 5, priority=0)
        store = store_of(engine)
        await until(lambda: store._started().counts(["org:acme"]) == {"org:acme": 5})
        channel, lane = channel_of(rabbit), store._topology().lane("org:acme", 0)
        for _ in range(DELIVERY_LIMIT + 1):
            while channel.basic_get(lane)[0] is not None:
                pass
            channel.basic_nack(0, multiple=True, requeue=True)  # all of them
        channel.connection.close()
        await until(lambda: store._started().counts(["org:acme"]) == {"org:acme": 0})
        assert store.reconcile() == 5
        async with working(engine):
            assert await results(handles) == [*range(5)]
        assert len(seen) == 5


@pytest.mark.statement("broker-silent")
@in_loop
async def test_a_worker_claims_from_the_ledger_when_the_broker_is_silent(
    url: str, rabbit: RabbitServer
) -> None:
    with Engine.open(url) as engine:
        echo(engine)
        handles = await submit(engine, 5)
        store = store_of(engine)
        await until(lambda: store._started().counts(["org:acme"]) == {"org:acme": 5})
        empty_lanes(rabbit, store)
        async with working(engine):
            await results(handles)


@pytest.mark.usefixtures("broker_alone")
@in_loop
async def test_a_lane_that_was_deleted_is_declared_again(
    url: str, rabbit: RabbitServer, broker_alone: None
) -> None:
    with Engine.open(url) as engine:
        echo(engine)
        async with working(engine):
            await results(await submit(engine, 1))
            channel = channel_of(rabbit)
            for name in lanes_of(store_of(engine)):
                channel.queue_delete(name)
            channel.connection.close()
            await results(await submit(engine, 5))


# ---- the address -----------------------------------------------------------------------------------------


@pytest.mark.statement("many-machines")
@in_loop
async def test_a_sqlite_ledger_is_refused_to_a_second_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(url) as engine:
        await submit(engine, 1)
        monkeypatch.setattr("postroom.system.clock.SystemClock.boot_id", lambda _self: "another-host")
        with Engine.open(url) as other, pytest.raises(InvalidSetting, match="PostgreSQL ledger"):
            await submit(other, 1)


@in_loop
async def test_processes_may_promote_after_different_times(any_url: str, broker_alone: None) -> None:
    with Engine.open(any_url, Policy(promote_after_s=(1, 2, 3))) as one, Engine.open(any_url) as other:
        echo(other)
        async with working(other):
            await results(await submit(one, 5, priority=3))


@in_loop
async def test_p0_that_only_the_broker_has_is_stored_when_a_worker_gets_it(
    rabbit: RabbitServer, tmp_path: Path, broker_alone: None
) -> None:
    url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", "p0=broker-only")
    with Engine.open(url) as engine:
        seen = echo(engine)
        handles = await submit(engine, 10, priority=0)
        keyed = await engine.submit(
            type=TYPE, org_id="acme", payload={"n": 99}, priority=0, idempotency_key="k"
        )
        assert engine.store.load(handles[0].message_id) is None
        assert engine.store.load(keyed.message_id) is not None
        async with working(engine):
            await until(lambda: len(seen) == 11)
            assert await results(handles) == [*range(10)]


@in_loop
async def test_the_password_is_in_no_log(
    rabbit: RabbitServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rabbit.ctl(
        "eval",
        f'rabbit_auth_backend_internal:add_user(<<"agent">>, <<"{SECRET}">>, <<"test">>), '
        'All = <<".*">>, '
        'rabbit_auth_backend_internal:set_permissions(<<"agent">>, <<"/">>, All, All, All, <<"test">>).',
    )
    url = rabbit.url(f"sqlite:///{tmp_path}/queue.db").replace("guest:guest", f"agent:{SECRET}")
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "pika"):
        with Engine.open(url) as engine:
            echo(engine)
            async with working(engine):
                [handle] = await submit(engine, 1)
                await handle.result(timeout_s=HANG_GUARD_S)
                assert SECRET not in await engine.explain(handle.message_id)
                assert SECRET not in engine.store.url
        wrong = url.replace(SECRET, f"{SECRET}-wrong").replace("queue.db", "other.db")
        with Engine.open(wrong) as engine:
            await submit(engine, 1)
            store = store_of(engine)
            await until(lambda: "not reachable" in store.broker_trouble)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("any_url", ["postgres"], indirect=True)
def test_commands_take_the_address_of_a_broker(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    where = ("--data", any_url)
    payload = json.dumps({"n": 1})
    sent = postroom("engine", "submit", *where, "--type", TYPE, "--org", "acme", "--payload", payload)
    assert sent.code == 0, sent.errors
    found = postroom("engine", "status", *where).line["organizations"]["acme"]["states"]
    assert found == {"QUEUED": 1}
    assert "QUEUED" in postroom("engine", "explain", *where, sent.line["message_id"]).out
    with Engine.open(any_url) as engine:
        assert store_of(engine).reconcile() == 0, "the command did not wait until the broker had the message"
        echo(engine)
        asyncio.run(_worked(engine, sent.line["message_id"]))
    wrong = postroom("engine", "status", "--data", any_url.replace("ledger=", "colour=red&ledger="))
    assert wrong.code == 2
    assert "guest:guest" not in wrong.errors
    assert "'colour' is not an option of a broker" in wrong.errors


async def _worked(engine: Engine, message_id: str) -> None:
    async with working(engine):
        assert await engine.handle(message_id).result(timeout_s=HANG_GUARD_S) == 1


def test_a_missing_pika_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pika", None)
    with pytest.raises(InvalidSetting, match=r"install postroom\[rabbitmq\]"):
        Engine.open("amqp://h/?ledger=memory://")


def test_claim_that_ends_a_lapsed_lease_gives_its_tokens_back_at_once(any_url: str) -> None:
    small = {"tokens_per_minute": 1_000}
    policy = Policy(tokens={"providers": {"p": {"models": {"small": small}}}})
    with closing(EngineUnderTest(any_url, policy)) as engine:
        engine.clock.advance(60.5)
        engine.submit(tokens=900)
        until_true(engine.claim)
        engine.clock.advance(16)
        assert engine.claim(limit=0) == [], "ends the lease and takes nothing"
        events = engine.engine.store.events(0, 1_000)
        [returned] = [event for event in events if event.kind == "tokens_returned"]
        assert returned.detail["tokens"] == 900
