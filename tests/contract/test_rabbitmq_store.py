"""`StoreContract` for a store with its lanes in RabbitMQ, its URL, and what it does without a broker."""

from pathlib import Path

import pytest

from postroom import Engine, open_store
from postroom.errors import InvalidSetting
from postroom.stores.rabbitmq.lanes import (
    DELAY_EXPIRY_FACTOR,
    DELAY_MS_MAX,
    DELAY_STEP_MS,
    SHARDS,
    Deliveries,
    LaneDelivery,
    Note,
    Topology,
    delay_step_ms,
    shard_of,
)
from postroom.stores.rabbitmq.store import PREFETCH_DEFAULT, parse_address
from postroom.stores.store import Store
from postroom.testing import ManualClock, StoreContract
from tests.postgresserver import postgres
from tests.privatepostgres import PostgresServer
from tests.rabbitmqserver import RabbitServer

__all__ = ["postgres"]  # a fixture


class TestRabbitOverSqlite(StoreContract):
    """The contract, with the records in SQLite."""

    @pytest.fixture(autouse=True)
    def _server(self, rabbit: RabbitServer) -> None:
        self.server = rabbit

    def open(self, folder: Path, clock: ManualClock) -> Store:
        return open_store(self.server.url(f"sqlite:///{folder}/queue.db"), clock=clock)


class TestRabbitOverPostgres(StoreContract):
    """The contract, with the records in PostgreSQL."""

    @pytest.fixture(autouse=True)
    def _servers(self, rabbit: RabbitServer, postgres: PostgresServer) -> None:
        self.server = rabbit
        self.ledgers = postgres
        self.databases: dict[Path, str] = {}

    def open(self, folder: Path, clock: ManualClock) -> Store:
        if folder not in self.databases:
            self.databases[folder] = self.ledgers.new_store()
        return open_store(self.server.url(self.databases[folder]), clock=clock)


# ---- the URL -------------------------------------------------------------------------------------------


def test_everything_after_ledger_is_the_url_of_the_ledger() -> None:
    url = "amqps://me:secret@a:1,b:2/v?prefetch=5&p0=broker-only&ledger=postgres://u:pw@h/db?sslmode=require&a=b"
    address = parse_address(url)
    assert address.ledger == "postgres://u:pw@h/db?sslmode=require&a=b"
    assert address.nodes == ("amqps://me:secret@a:1/v", "amqps://me:secret@b:2/v")
    assert address.shown == "amqps://me@a:1,b:2/v"
    assert (address.is_broker_only, address.is_quorum, address.prefetch) == (True, True, 5)


def test_one_node_has_classic_queues_unless_the_url_says_otherwise() -> None:
    assert not parse_address("amqp://h/?ledger=memory://").is_quorum
    assert parse_address("amqp://h/?queues=quorum&ledger=memory://").is_quorum
    assert parse_address("amqp://h/?ledger=memory://").prefetch == PREFETCH_DEFAULT


@pytest.mark.parametrize(
    "url",
    [
        "amqp://me:secret@h/",
        "amqp://me:secret@h/?ledger=",
        "amqp://me:secret@h/?colour=red&ledger=memory://",
        "amqp://me:secret@h/?p0=never&ledger=memory://",
        "amqp://me:secret@h/?queues=stream&ledger=memory://",
        "amqp://me:secret@h/?prefetch=0&ledger=memory://",
        "amqp://me:secret@h/?prefetch=secret&ledger=memory://",
        "amqp://me:secret@/?ledger=memory://",
        "amqp://me:secret@h:secret/?ledger=memory://",
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSetting) as refused, Engine.open(url) as engine:
        engine.blocking.submit(type="tool_call", org_id="acme", payload={})
    assert "secret@" not in str(refused.value)
    assert "me:" not in str(refused.value)


def test_the_url_of_a_store_shows_no_password() -> None:
    store = open_store("amqp://me:secret@h/?ledger=memory://")
    assert store.url == "amqp://me@h/?ledger=memory://"


# ---- lanes and delays --------------------------------------------------------------------------------------


@pytest.mark.statement("broker-priorities")
@pytest.mark.parametrize("is_quorum", [False, True])
def test_a_message_stays_in_the_lane_of_its_priority(is_quorum: bool) -> None:
    expected = {"x-queue-type": "quorum"} if is_quorum else {}
    lanes = Topology("x", is_quorum).lanes("org:acme")
    assert lanes == [(f"x.acme.{name}", expected) for name in ("p0", "lane1", "lane2", "lane3")]


@pytest.mark.parametrize("delay_ms", [1, 99, 101, 9_999, 10_001, 61_234, 86_400_000, 10**11])
def test_delay_queues_add_up_to_the_delay_in_few_steps(delay_ms: int) -> None:
    waited, steps = 0, 0
    while waited < delay_ms and steps < 100:
        step = delay_step_ms(delay_ms - waited)
        name, arguments = Topology("x").delay(step)
        assert name == f"x.delay.{step}"
        assert arguments["x-message-ttl"] == step <= DELAY_MS_MAX
        assert DELAY_EXPIRY_FACTOR * step <= arguments["x-expires"] < 2**32
        waited += step
        steps += 1
    assert waited < delay_ms + DELAY_STEP_MS
    assert steps <= 6 + delay_ms // DELAY_MS_MAX


def test_shards_are_used_evenly() -> None:
    counts: dict[str, int] = {}
    for number in range(64 * SHARDS):
        shard = shard_of(f"org:{number}")
        counts[shard] = counts.get(shard, 0) + 1
    assert len(counts) == SHARDS
    assert max(counts.values()) < 3 * min(counts.values())


# ---- deliveries ------------------------------------------------------------------------------------------


def delivery(message_id: str, tag: int, lane: int = 2, arrived: float = 0.0) -> LaneDelivery:
    return LaneDelivery("org:acme", Note(message_id, lane), tag, 1, arrived)


def test_deliveries_of_messages_that_were_claimed_without_them_are_refused() -> None:
    deliveries = Deliveries(lambda: None)
    assert deliveries.add(delivery("a", 1))
    assert [each.tag for each in deliveries.forget({"a", "b"})] == [1]
    assert not deliveries.add(delivery("b", 2))
    assert deliveries.add(delivery("b", 3))  # published again, after a retry
    deliveries.forget({"c"})
    deliveries.expect(["c"])
    assert deliveries.add(delivery("c", 4))
    assert [each.tag for each in deliveries.take("org:acme", 2, 10)] == [3, 4]


def test_deliveries_keep_their_order_when_they_are_put_back() -> None:
    deliveries = Deliveries(lambda: None)
    for tag in range(1, 5):
        deliveries.add(delivery(f"m{tag}", tag, lane=tag % 2))
    taken = deliveries.take("org:acme", 1, 5)
    deliveries.put_back(taken)
    assert [each.tag for each in deliveries.take("org:acme", 1, 1)] == [1]
    assert deliveries.homes(0) == ["org:acme"]
    assert [each.tag for each in deliveries.take_old(1.0, lane=0)] == [2, 4]
    assert [each.tag for each in deliveries.take_old(1.0)] == [3]
    deliveries.add(LaneDelivery("org:acme", Note("m5", 2, is_delayed=True), 5, 1, 0.0))
    assert not deliveries.take_old(1.0)
    assert [each.tag for each in deliveries.take_held(1.0)] == [5]
    assert deliveries.is_silent(1.0)  # nothing waits, and the last one arrived long ago
