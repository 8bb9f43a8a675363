"""What is forgotten after its time, and that claims go on meanwhile."""

import asyncio
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, Guard, Organization, Policy
from postroom.calls.submit import SubmitFields
from postroom.contracts.tasks.task_storage import COUNTED_BYTES
from postroom.engine.rules.cells import (
    GOALS,
    KEY_ENDS,
    KEYS,
    MESSAGE_BYTES,
    PARTS,
    RATES,
    STORED_BYTES,
    Part,
    joined,
)
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Tier
from postroom.engine.rules.purge import (
    CELLS_A_COMMIT_MAX,
    EVENTS_A_COMMIT_MAX,
    FORGOTTEN_A_COMMIT_MAX,
    LOOKED_A_READ,
    end_turn,
    forget_over,
    take_turn,
)
from postroom.errors import Overloaded, ResultGone
from postroom.goals.goal_cells import GOAL_OF
from postroom.stores.base import Outbox
from postroom.stores.sqlite.ledger import FOLD_EVENTS
from postroom.stores.transaction import Transaction
from tests.engines import EngineUnderTest
from tests.waiting import HANG_GUARD_S

DAY_S = 86_400.0
RULES = Policy(guard=Guard(messages=1_000_000), organization=Organization(max_depth=100_000))


@pytest.fixture(params=["memory", "sqlite"], name="world")
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    world = EngineUnderTest(url, RULES)
    yield world
    world.close()


def finished(world: EngineUnderTest, count: int, **fields: Any) -> list[str]:
    """Messages that were completed now."""
    ids = [handle.message_id for handle in world.submit_many(count, **fields)]
    while claimed := world.claim(1_000):
        world.complete(claimed)
    return ids


def purge(world: EngineUnderTest) -> None:
    world.wait(world.engine.core.purge.run())


def completed(world: EngineUnderTest) -> int:
    found = world.wait(world.engine.status()).organizations.get("acme")
    return 0 if found is None else found.states.get("COMPLETED", 0)


@pytest.mark.statement("retention-default")
def test_one_purge_forgets_everything_that_is_over_in_small_commits(world: EngineUnderTest) -> None:
    finished(world, 4 * LOOKED_A_READ + 7)
    world.clock.advance(8 * DAY_S)
    finished(world, 1)
    purge(world)
    assert completed(world) == 1
    events = world.engine.store.events(limit=100_000)
    deleted = [event.detail["records"] for event in events if event.kind == "deleted"]
    assert sum(deleted) == 4 * LOOKED_A_READ + 7
    assert max(deleted) <= FORGOTTEN_A_COMMIT_MAX


def test_parts_of_a_forgotten_message_go_in_small_commits(world: EngineUnderTest) -> None:
    [message_id] = finished(world, 1)

    def add(transaction: Transaction) -> None:
        for index in range(2 * CELLS_A_COMMIT_MAX + 1):
            PARTS.put(transaction, [Part(message_id, "progress", "")], message_id, 1, index)

    world.engine.store.write(add)
    world.clock.advance(8 * DAY_S)

    def look(transaction: Transaction) -> int:
        return len(PARTS.all(transaction))

    def step(transaction: Transaction) -> list[str]:
        return forget_over(Operations(transaction, RULES), RULES, [message_id])

    assert world.engine.store.write(step) == [message_id]
    assert world.engine.store.read(look) == CELLS_A_COMMIT_MAX + 1
    purge(world)
    assert world.engine.store.read(look) == 0
    assert completed(world) == 0


def test_goals_that_nobody_uses_are_forgotten(world: EngineUnderTest) -> None:
    finished(world, 1, goal_id="old")
    world.clock.advance(29 * DAY_S)
    finished(world, 1, goal_id="young")
    world.clock.advance(2 * DAY_S)
    purge(world)
    assert [key for key, _ in world.engine.store.read(GOALS.all)] == ["acme\x1fyoung"]


def test_rate_limits_of_many_users_are_forgotten(tmp_path: Path) -> None:
    rules = Policy(organization=Organization(user_rate_per_s=10.0, max_depth=100_000))
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", rules)
    messages: list[SubmitFields] = [
        {"type": "tool_call", "org_id": "acme", "payload": {}, "user_id": f"u{number}", "priority": 0}
        for number in range(2 * LOOKED_A_READ)
    ]
    world.wait(world.engine.submit_many(messages))
    assert len(world.engine.store.read(RATES.all)) == 2 * LOOKED_A_READ
    world.clock.advance(7_200)
    purge(world)
    assert world.engine.store.read(RATES.all) == []
    world.close()


def test_old_events_are_forgotten_unless_a_shipper_waits_for_them(world: EngineUnderTest) -> None:
    store = world.engine.store
    world.submit_many(2 * EVENTS_A_COMMIT_MAX, priority=0)  # in one commit, whose events are one row
    world.submit_many(FOLD_EVENTS // 2, priority=0)
    newest = store.events(limit=100_000)[-1].seq
    world.clock.advance(8 * DAY_S)
    store.write(lambda transaction: transaction.set_outbox(Outbox(shipped=newest - 7)))
    world.submit(priority=0)
    purge(world)
    first = store.events()[0].seq
    assert 2 * EVENTS_A_COMMIT_MAX < first <= newest - 6
    store.write(lambda transaction: transaction.set_outbox(None))
    purge(world)
    assert store.events()[0].seq > first
    assert "created" in [event.kind for event in store.events() if event.seq > newest]


def test_keys_outlive_their_messages_and_are_forgotten_in_time(world: EngineUnderTest) -> None:
    finished(world, 1, idempotency_key="k")
    world.clock.advance(8 * DAY_S)
    purge(world)
    assert [key for key, _ in world.engine.store.read(KEYS.all)] == ["acme\x1fk"]
    world.clock.advance(23 * DAY_S)
    again = world.submit(idempotency_key="k")
    assert not again.duplicate
    purge(world)
    assert world.engine.store.read(KEY_ENDS.all) == []
    assert world.submit(idempotency_key="k").message_id == again.message_id


def test_message_that_was_replayed_meanwhile_stays(world: EngineUnderTest) -> None:
    handle = world.submit()
    [claimed] = world.claim()
    world.finish(
        Outcome(
            kind="failed", message_id=claimed.record.message_id, lease=claimed.record.lease, is_final=True
        )
    )
    world.clock.advance(100 * DAY_S)
    world.wait(world.engine.dlq.replay([handle.message_id]))
    ids = [handle.message_id]
    world.engine.store.write(lambda transaction: forget_over(Operations(transaction, RULES), RULES, ids))
    assert world.state(handle) == "QUEUED"


def test_one_process_purges_at_a_time(world: EngineUnderTest) -> None:
    write = world.engine.core.commits.write
    assert world.wait(write(lambda operations: take_turn(operations, "a")))
    assert not world.wait(write(lambda operations: take_turn(operations, "b")))
    finished(world, 1)
    world.clock.advance(8 * DAY_S - 61)
    assert world.wait(write(lambda operations: take_turn(operations, "b"))), "a turn ends by itself"
    world.clock.advance(59)
    purge(world)
    assert completed(world) == 1
    world.wait(write(lambda operations: end_turn(operations, "b")))
    world.clock.advance(100)
    purge(world)
    assert completed(world) == 0


def test_worker_purges_while_it_reports(tmp_path: Path) -> None:
    async def run() -> None:
        rules = Policy(organization=Organization(retention_s=0.001))
        with Engine.open(f"sqlite:///{tmp_path}/queue.db", rules) as engine:
            engine.handler("tool_call")(lambda _message, _ctx: None)
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            first = asyncio.create_task(engine.run())
            await handle.result(timeout_s=HANG_GUARD_S)
            await engine.stop()
            await first
            second = asyncio.create_task(engine.run())
            for _ in range(2_000):
                if not (await engine.status()).organizations["acme"].states.get("COMPLETED"):
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("nothing was purged")
            await engine.stop()
            await second

    asyncio.run(run())


# ---- what one organization may store ---------------------------------------------------------------


def limited(tmp_path: Path, rules: Organization) -> EngineUnderTest:
    return EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(organization=rules))


def test_ended_messages_count_in_the_messages_of_an_organization(tmp_path: Path) -> None:
    world = limited(tmp_path, Organization(max_stored_messages=10))
    finished(world, 8)
    with pytest.raises(Overloaded, match="organization acme stores 8 of at most 10 messages"):
        world.submit_many(3)
    world.submit_many(2)
    with pytest.raises(Overloaded, match="stores 10 of at most 10 messages"):
        world.submit()
    world.submit(org_id="other")
    world.clock.advance(8 * DAY_S)
    purge(world)
    world.submit()
    world.close()


def test_large_pieces_count_until_their_message_is_forgotten(tmp_path: Path) -> None:
    world = limited(tmp_path, Organization(max_stored_bytes=300_000))
    text = "x" * 100_000
    world.submit(payload={"text": text})
    [claimed] = world.claim()
    record = claimed.record
    part = Part(record.message_id, "stream_chunk", "", chunk=text)

    def stream(transaction: Transaction) -> None:
        operations = Operations(transaction, world.engine.policy)
        operations.add_parts(record.message_id, record.lease, [part], 0)
        operations.begin_effect(record.message_id, record.lease, "pay", runs_unknown=False)
        operations.end_effect(record.message_id, record.lease, "pay", "y" * 2 * COUNTED_BYTES)

    world.engine.store.write(stream)
    world.submit(payload={"text": text[: COUNTED_BYTES // 2]})  # too small to be counted
    world.finish(
        Outcome(
            kind="completed", message_id=record.message_id, lease=record.lease, org_id="acme",
            result=text.encode(),
        )
    )  # fmt: skip
    used = world.engine.store.read(lambda transaction: STORED_BYTES.get(transaction, "acme"))
    assert used is not None
    assert 300_000 + 2 * COUNTED_BYTES <= used <= 300_000 + 3 * COUNTED_BYTES
    with pytest.raises(Overloaded, match="of at most 300,000 bytes of messages"):
        world.submit()
    world.submit(org_id="other", payload={"text": text})
    world.complete(world.claim(10))
    world.clock.advance(8 * DAY_S)
    purge(world)
    assert world.engine.store.read(STORED_BYTES.all) == world.engine.store.read(MESSAGE_BYTES.all) == []
    world.submit()
    world.close()


@pytest.mark.statement("retention-tiers")
def test_each_tier_keeps_its_messages_for_its_days(tmp_path: Path) -> None:
    tiers: dict[str, Tier | float] = {
        "free": "free", "starter": "starter", "pro": "pro", "large": "enterprise", "own": 45,
    }  # fmt: skip
    policy = Policy(organizations={name: Organization(tier=tier) for name, tier in tiers.items()})
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", policy)
    ids = {finished(world, 1, org_id=name)[0]: name for name in tiers}
    kept = []
    for days in (6, 8, 32, 46, 3_000):
        world.clock.advance(days * DAY_S)
        purge(world)
        found = world.engine.store.read(lambda transaction: transaction.records.get_many([*ids]))
        kept.append({ids[message_id] for message_id in found})
    world.close()
    assert kept == [
        {"free", "starter", "pro", "large", "own"},
        {"starter", "pro", "large", "own"},
        {"pro", "large"},
        {"large"},
        {"large"},
    ]


def test_infinite_times_keep_dead_letters_keys_and_events(world: EngineUnderTest) -> None:
    rules = Policy(keep_dead_s=math.inf, keep_keys_s=math.inf, keep_events_s=math.inf)
    world.engine.core.commits.policy = rules
    [first] = finished(world, 1, idempotency_key="k")
    dead = world.submit()
    world.run_all()  # there is no handler
    world.clock.advance(10_000 * DAY_S)
    events = len(world.engine.store.events())
    purge(world)
    assert world.state(dead) == "DEAD_LETTER"
    with pytest.raises(ResultGone, match=first):
        world.submit(idempotency_key="k")
    assert len(world.engine.store.events()) > events


def test_damaged_values_of_one_organization_keep_nothing_of_the_others(world: EngineUnderTest) -> None:
    [damaged] = finished(world, 1, org_id="bad", idempotency_key="k")
    finished(world, 3, org_id="acme")
    soon = datetime.fromtimestamp(world.clock.wall_us() / 1e6 + 3_600, UTC)
    expired, other = world.submit(org_id="bad", expires_at=soon), world.submit(expires_at=soon)

    def damage(transaction: Transaction) -> None:
        for kind, key in ((KEYS, ("bad", "k")), (GOALS, ("bad", "g")), (GOAL_OF, (expired.message_id,))):
            transaction.cells.put(kind.name, joined(*key), b"{")

    world.engine.store.write(damage)
    world.clock.advance(2 * 3_600)
    world.wait(world.engine.sweep())
    assert (world.state(expired), world.state(other)) == ("EXPIRED", "EXPIRED")
    world.clock.advance(31 * DAY_S)
    purge(world)
    purge(world)
    assert completed(world) == 0
    assert world.wait(world.engine.get(damaged)).state == "COMPLETED"
    assert world.engine.store.read(lambda transaction: transaction.cells.get(KEYS.name, joined("bad", "k")))
