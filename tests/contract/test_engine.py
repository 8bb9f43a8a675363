"""What `Engine` promises, on every store."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import postroom
from postroom import Backpressure, Breaker, Engine, Guard, Handle, Organization, Policy, Retry
from postroom.calls.submit import SubmitFields
from postroom.core.formats.events import of_store
from postroom.core.history.history_checker import History
from postroom.core.lifecycle import poison
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.rules import claims
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.operations import Operations
from postroom.engine.work.handlers import ended
from postroom.engine.work.worker import Worker
from postroom.errors import (
    EffectUnknown,
    GuardTripped,
    InvalidExpiry,
    InvalidMessage,
    InvalidName,
    InvalidParent,
    InvalidPriority,
    InvalidSetting,
    KeyReused,
    MessageFailed,
    Overloaded,
    ResultGone,
    UnknownTask,
    UnknownType,
    UnsupportedVersion,
    ValidationError,
    WrongState,
)
from postroom.message import Envelope
from postroom.stores.store import Store
from postroom.testing import FIRST_WALL_US, ManualClock, check_consistency
from tests.engines import EngineUnderTest, soon
from tests.postgresserver import database, postgres, store_url
from tests.waiting import HANG_GUARD_S, eventually

__all__ = ["database", "postgres"]  # fixtures

DAY_S = 86_400.0
EVENTS_KEPT_S = 1_000 * DAY_S
Opened = Callable[..., EngineUnderTest]
NOW = datetime.fromtimestamp(FIRST_WALL_US / 1e6, UTC)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, tmp_path)


@pytest.fixture
def opened(url: str) -> Iterator[Opened]:
    made: list[EngineUnderTest] = []

    def open_engine(**rules: Any) -> EngineUnderTest:
        kept = {"keep_events_s": EVENTS_KEPT_S, **rules}  # the checks at the end need every event
        made.append(EngineUnderTest(url, Policy(**kept)))
        return made[-1]

    yield open_engine
    for one in made:
        check_consistency(one.engine.store)
        check_history(one.engine.store)
        one.close()


def check_history(store: Store) -> None:
    """The events of the store, as the audit stream gets them, break no rule of a history."""
    checker = History()
    for event in store.events(0, 100_000):
        checker.add(of_store(event, "tasks:x", "tasks"))
    assert not checker.verdict().violations


@pytest.fixture
def world(opened: Opened) -> EngineUnderTest:
    return opened()


def ids(handles: list[Handle]) -> list[str]:
    return [handle.message_id for handle in handles]


def claimed_ids(world: EngineUnderTest, limit: int = 1) -> list[str]:
    """The next messages; they are completed at once."""
    claimed = world.claim(limit)
    world.complete(claimed)
    return [one.record.message_id for one in claimed]


# ---- starts ----------------------------------------------------------------------------------------


def starts_of(world: EngineUnderTest, message_id: str) -> list[tuple[str, int, str]]:
    """The kind, attempt and worker of the events of a message that workers caused."""
    events = [event for event in world.engine.store.events(0, 100_000) if event.message_id == message_id]
    return [(event.kind, event.attempt, event.worker_id) for event in events if event.worker_id]


@pytest.mark.statement("events-started")
def test_start_of_a_handler_is_an_event_with_its_worker(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    def run(message: Any, ctx: Any) -> None:
        world.clock.advance(0.25)
        if message.payload:
            raise ConnectionError

    good, bad = world.submit(), world.submit(payload={"fails": True}, max_retries=0)
    alone = world.submit(resource_limits={"memory": "1GB"})  # in a process of its own
    world.run_all()
    for handle, end in (
        (good, "execution_completed"),
        (alone, "execution_completed"),
        (bad, "execution_failed"),
    ):
        told = starts_of(world, handle.message_id)
        assert told == [(kind, 1, "w") for kind in ("dequeued", "execution_started", end)]
    moments = {
        event.kind: event.ts_us
        for event in world.engine.store.events(0, 1000)
        if event.message_id == good.message_id
    }
    assert moments["dequeued"] <= moments["execution_started"] < moments["execution_completed"]


def test_start_is_told_while_the_handler_still_runs(world: EngineUnderTest) -> None:
    may_end = asyncio.Event()

    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        await may_end.wait()

    handle = world.submit()

    async def work() -> None:
        worker = Worker(world.engine._core, worker_id="w")
        running = asyncio.create_task(worker.run())
        await eventually(lambda: len(starts_of(world, handle.message_id)) > 1)
        assert starts_of(world, handle.message_id)[-1] == ("execution_started", 1, "w")
        may_end.set()
        await eventually(lambda: len(starts_of(world, handle.message_id)) > 2)
        worker.stop()
        await running

    world.wait(work())
    assert [kind for kind, *_ in starts_of(world, handle.message_id)].count("execution_started") == 1


def test_attempt_that_is_not_begun_has_no_start(world: EngineUnderTest) -> None:
    handle = world.submit()  # no handler
    world.run_all()
    assert [kind for kind, *_ in starts_of(world, handle.message_id)] == ["dequeued", "execution_failed"]


# ---- messages --------------------------------------------------------------------------------------


@pytest.mark.statement("message-id", "goal-and-task", "created-by")
def test_message_gets_its_fields_and_generated_ids(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> dict[str, Any]:  # in its own process: the memory is limited
        return {
            "attempt": ctx.attempt,
            "payload": message.payload,
            "created_by": [message.created_by.type, message.created_by.id],
            "generated": [bool(message.goal_id), bool(message.task_id)],
            "created_at": message.created_at.isoformat(),
            "memory": message.resource_limits.memory,
        }

    handle = world.submit(
        payload={"tool": "search"}, agent_id="a1", user_id="u1", priority=1, context={"k": 1},
        metadata={"m": 2}, resource_limits={"time": 5, "memory": "1GB"}, model_preferences=["x"],
        token_needs={"max": 10}, traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    )  # fmt: skip
    world.run_all()
    assert world.wait(handle.result()) == {
        "attempt": 1,
        "payload": {"tool": "search"},
        "created_by": ["agent", "a1"],
        "generated": [True, True],
        "created_at": NOW.isoformat(),
        "memory": "1GB",
    }
    assert handle.message_id[14] == "7"


@pytest.mark.statement("persistent")
def test_default_durability_survives_a_kill_of_the_store(world: EngineUnderTest) -> None:
    """A database server loses the class `os` when it is killed; the page cache of a SQLite file does not."""
    urgent, named, other = (
        world.engine.store.load(world.submit(**fields).message_id)
        for fields in ({"priority": 0}, {"priority": 0, "durability": "os"}, {"priority": 1})
    )
    assert urgent is not None
    assert named is not None
    assert other is not None
    is_server = world.engine.store.url.startswith("postgres")
    assert urgent.record.durability == ("group" if is_server else "os")
    assert named.record.durability == "os"
    assert other.record.durability == "group"


@pytest.mark.statement("json-refused", "version-two-majors")
@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"type": "nonsense"}, UnknownType, "model_call"),
        ({"priority": 4}, InvalidPriority, "0 to 3"),
        ({"priority": -1}, InvalidPriority, "0 to 3"),
        ({"priority": True}, InvalidPriority, "0 to 3"),
        ({"priority": "1"}, InvalidPriority, "0 to 3"),
        ({"expires_at": NOW - timedelta(seconds=1)}, InvalidExpiry, "past"),
        ({"expires_at": NOW.replace(tzinfo=None) + timedelta(hours=1)}, InvalidExpiry, "time zone"),
        ({"expires_at": 5}, InvalidExpiry, "time zone"),
        ({"expires_at": NOW + timedelta(seconds=5), "delay_s": 6}, InvalidExpiry, "delay_s"),
        ({"message_id": "0190f0f0-0000-7000-8000-000000000000",
          "parent_message_id": "0190f0f0-0000-7000-8000-000000000000"}, InvalidParent, "itself"),
        ({"org_id": "a/b"}, InvalidName, "org_id"),
        ({"org_id": ""}, InvalidName, "org_id"),
        ({"org_id": None}, InvalidName, "org_id"),
        ({"version": "3.0.0"}, UnsupportedVersion, "3.0.0"),
        ({"version": "one"}, UnsupportedVersion, "one"),
        ({"payload": [1]}, ValidationError, "JSON object"),
        ({"payload": {"x": float("nan")}}, InvalidMessage, "JSON"),
        ({"created_by": {"type": "robot", "id": "x"}}, InvalidMessage, "created_by"),
        ({"resource_limits": {"memory": "much"}}, InvalidMessage, "1GB"),
        ({"delay_s": -1}, InvalidMessage, "delay_s"),
        ({"colour": "red"}, InvalidMessage, "colour"),
        ({"on_dead": "panic"}, InvalidMessage, "on_dead"),
        ({"traceparent": "x"}, InvalidMessage, "Trace Context"),
    ],
)  # fmt: skip
def test_wrong_message_is_refused_with_its_own_error(
    world: EngineUnderTest, fields: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        world.submit(**fields)
    assert not world.engine.store.count()


@pytest.mark.statement("additive", "version-semantic")
def test_unknown_fields_of_a_newer_minor_version_survive(world: EngineUnderTest) -> None:
    handle = world.submit(version="1.7.0", colour="red")
    assert world.message(handle.message_id).extra == {"colour": "red"}


@pytest.mark.statement("version-migration")
def test_migration_runs_on_the_way_in(opened: Opened) -> None:
    world = opened(version="2.0.0")

    @world.engine.migration(1)
    def one_to_two(fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "payload": {"tool": fields["payload"]["name"]}}

    handle = world.submit(version="1.4.0", payload={"name": "search"})
    message = world.message(handle.message_id)
    assert message.payload == {"tool": "search"}
    assert message.version == "2.0.0"
    with pytest.raises(UnsupportedVersion):
        world.submit(version="0.9.0")


def test_registered_shape_is_checked_at_submit(world: EngineUnderTest) -> None:
    class Call(msgspec.Struct):
        tool: str

    @world.engine.handler("tool_call", payload=Call)
    async def run(message: Any, _ctx: Any) -> str:
        return str(message.payload.tool)

    with pytest.raises(ValidationError, match="tool"):
        world.submit(payload={"tool": 1})
    handle = world.submit(payload={"tool": "x"})
    world.run_all()
    assert world.wait(handle.result()) == "x"


@pytest.mark.statement("own-types")
def test_registered_type_is_accepted(world: EngineUnderTest) -> None:
    world.engine.register_type("report")
    assert world.state(world.submit(type="report")) == "QUEUED"


@pytest.mark.statement("large-payload")
def test_large_payload_is_stored_once_and_given_to_the_handler(opened: Opened) -> None:
    world = opened(body_inline_bytes_max=100)
    sizes = []

    @world.engine.handler("tool_call")
    async def run(message: Any, _ctx: Any) -> None:
        sizes.append(len(message.payload["text"]))

    handles = [world.submit(payload={"text": "x" * 5_000}) for _ in range(2)]
    cells = world.engine.store.read(lambda transaction: transaction.cells.page("engine.body"))
    assert len(cells) == 1
    world.run_all()
    assert sizes == [5_000, 5_000]
    assert world.message(handles[0].message_id).payload == {"text": "x" * 5_000}
    world.clock.advance(8 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert not world.engine.store.read(lambda transaction: transaction.cells.page("engine.body"))


# ---- keys ------------------------------------------------------------------------------------------


@pytest.mark.statement("deduplication")
def test_repeated_key_gives_the_first_message_and_its_result(world: EngineUnderTest) -> None:
    runs = []

    @world.engine.handler("tool_call")
    async def run(_message: Any, _ctx: Any) -> str:
        runs.append(1)
        return "done"

    first = world.submit(idempotency_key="k", payload={"a": 1})
    world.run_all()
    again = world.submit(idempotency_key="k", payload={"a": 1})
    world.run_all()
    assert again.duplicate
    assert again.message_id == first.message_id
    assert world.wait(again.result()) == "done"
    assert runs == [1]


@pytest.mark.statement("organization-queue")
def test_two_organizations_give_messages_the_same_id(world: EngineUnderTest) -> None:
    given = "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b11"

    @world.engine.handler("tool_call")
    async def run(message: Any, _ctx: Any) -> str:
        return f"{message.org_id} {message.message_id}"

    first = world.submit(message_id=given, payload={"of": "acme"})
    second = world.submit(message_id=given, payload={"of": "zen"}, org_id="zen")
    assert (first.message_id, second.message_id) == (given, f"@zen:{given}")
    for again in (given, f"@zen:{given}"):
        repeated = world.submit(message_id=again, payload={"of": "zen"}, org_id="zen")
        assert (repeated.message_id, repeated.duplicate) == (second.message_id, True)
        with pytest.raises(KeyReused):
            world.submit(message_id=again, payload={"of": "nobody"}, org_id="zen")
    child = world.submit(parent_message_id=given, org_id="zen")
    assert world.message(child.message_id).parent_message_id == second.message_id
    for handle, org in ((first, "acme"), (second, "zen")):
        message = world.message(handle.message_id)
        assert (message.payload, message.org_id) == ({"of": org}, org)
    world.run_all()
    assert world.wait(first.result()) == f"acme {given}"
    assert world.wait(second.result()) == f"zen @zen:{given}"
    with pytest.raises(InvalidMessage, match="message_id must be a UUID"):
        world.submit(message_id=f"@acme:{given}", org_id="zen")
    with pytest.raises(InvalidMessage, match="a form that only the store itself uses"):
        world.submit(message_id=child.message_id)


def test_one_batch_gives_messages_of_two_organizations_the_same_ids(world: EngineUnderTest) -> None:
    parent, given = "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b11", "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b12"
    batch: list[SubmitFields] = [
        {
            "type": "tool_call",
            "org_id": org,
            "payload": {"of": org},
            "message_id": message_id,
            "parent_message_id": parent if message_id == given else "",
        }
        for org in ("acme", "zen")
        for message_id in (parent, given)
    ]
    handles = world.wait(world.engine.submit_many(batch))
    assert [each.message_id for each in handles] == [parent, given, f"@zen:{parent}", f"@zen:{given}"]
    again = world.wait(world.engine.submit_many(reversed(batch)))
    assert [(each.message_id, each.duplicate) for each in reversed(again)] == [
        (each.message_id, True) for each in handles
    ]
    parents = [world.message(handles[place].message_id).parent_message_id for place in (1, 3)]
    assert parents == [parent, f"@zen:{parent}"]


@pytest.mark.statement("message-id")
def test_an_id_within_an_organization_is_that_of_its_stored_message(world: EngineUnderTest) -> None:
    given = "3e5e4b1c-8f5f-4a3b-9d1d-2f0c6d1a7b11"
    first = world.submit(message_id=given)
    again = world.submit(message_id=f"@acme:{given}")
    assert (first.message_id, again.message_id, again.duplicate) == (given, given, True)
    other = world.submit(message_id=f"@zen:{given}", org_id="zen")
    assert (other.message_id, other.duplicate) == (f"@zen:{given}", False)


def test_key_with_another_payload_is_refused(world: EngineUnderTest) -> None:
    world.submit(idempotency_key="k", payload={"a": 1})
    with pytest.raises(KeyReused):
        world.submit(idempotency_key="k", payload={"a": 2})
    world.submit(idempotency_key="k", payload={"a": 2}, org_id="other")


def test_key_whose_result_is_gone_is_refused_and_free_after_30_days(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def run(_message: Any, _ctx: Any) -> None: ...

    world.submit(idempotency_key="k")
    world.run_all()
    world.clock.advance(8 * DAY_S)
    world.wait(world.engine.core.purge.run())
    with pytest.raises(ResultGone):
        world.submit(idempotency_key="k")
    world.clock.advance(23 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert not world.submit(idempotency_key="k").duplicate


def test_submit_many_is_all_or_none(world: EngineUnderTest) -> None:
    world.submit(idempotency_key="k", payload={"a": 1})
    good: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}
    with pytest.raises(KeyReused):
        world.wait(world.engine.submit_many([good, {**good, "idempotency_key": "k"}]))
    assert world.engine.store.count()["org:acme"] == {"QUEUED": 1}
    first, second = world.wait(world.engine.submit_many([{**good, "idempotency_key": "n"}] * 2))
    assert first.message_id == second.message_id


# ---- retries and dead letters ----------------------------------------------------------------------


def failing(
    world: EngineUnderTest, error: BaseException, type_name: str = "tool_call", **options: Any
) -> None:
    @world.engine.handler(type_name, **options)
    async def run(_message: Any, _ctx: Any) -> None:
        raise error


@pytest.mark.statement("retry-demotion")
def test_each_retry_demotes_from_the_accepted_priority(world: EngineUnderTest) -> None:
    failing(world, RuntimeError("boom"))
    handle = world.submit(priority=1)
    lanes = []
    for _ in range(6):
        world.run_all()
        lanes.append(world.wait(world.engine.get(handle.message_id)).priority)
        world.clock.advance(40)
    info = world.wait(world.engine.get(handle.message_id))
    assert lanes[:4] == [2, 3, 3, 3]
    assert info.accepted_priority == 1
    assert info.state == "DEAD_LETTER"
    assert info.attempt == 6
    [letter] = world.wait(world.engine.dlq.list())
    assert letter.failure_reason == "Max retries exceeded"
    assert len(letter.error_history) == 6
    assert letter.can_replay
    assert letter.original_message["priority"] == 1
    with pytest.raises(MessageFailed) as failed:
        world.wait(handle.result())
    assert failed.value.error_history[0]["error"] == "boom"


@pytest.mark.statement("retry-keeps-class")
def test_hook_keeps_the_priority_of_a_retry(opened: Opened) -> None:
    world = opened(keep_priority=lambda _message, error: isinstance(error, RuntimeError))
    failing(world, RuntimeError("boom"))
    handle = world.submit(priority=0)
    world.run_all()
    assert world.wait(world.engine.get(handle.message_id)).priority == 0


@pytest.mark.statement("retry-count", "retry-defaults")
@pytest.mark.parametrize(
    ("type_name", "retries", "delays"),
    [
        ("model_call", 3, [1, 2, 4]),
        ("tool_call", 5, [1, 2, 4, 8, 16]),
        ("memory_save", 10, [1, 2, 3]),
        ("memory_retrieve", 5, [0.5, 1.0, 1.5]),
        ("agent_spawn", 3, [1, 2, 4]),
    ],
)
def test_retry_rule_of_each_type(type_name: str, retries: int, delays: list[float]) -> None:
    rule = Policy().retry_of(type_name)
    assert rule.max_retries == retries
    assert [rule.delay_ns(n, 0.0) / 1e9 for n in range(len(delays))] == delays
    assert rule.delay_ns(0, 1.0) > rule.delay_ns(0, 0.0)


@pytest.mark.statement("retry-never")
def test_validation_error_is_never_retried(world: EngineUnderTest) -> None:
    failing(world, postroom.ValidationError("bad"))
    handle = world.submit()
    world.run_all()
    assert world.state(handle) == "DEAD_LETTER"
    assert world.wait(world.engine.get(handle.message_id)).attempt == 1


@pytest.mark.statement("retry-rate-limit")
@pytest.mark.parametrize(("after_s", "wait_s"), [(7.0, 7.0), (None, 60.0)])
def test_rate_limit_is_retried_when_the_service_says(
    world: EngineUnderTest, after_s: float | None, wait_s: float
) -> None:
    failing(world, postroom.RateLimited(retry_after_s=after_s))
    handle = world.submit()
    world.run_all()
    world.clock.advance(wait_s - 0.1)
    assert not world.claim()
    world.clock.advance(0.2)
    assert [one.record.message_id for one in world.claim()] == [handle.message_id]


def test_message_without_a_handler_goes_to_the_dead_letters(world: EngineUnderTest) -> None:
    handle = world.submit(type="model_call")
    world.run_all()
    assert world.state(handle) == "DEAD_LETTER"
    [letter] = world.wait(world.engine.dlq.list(type="model_call"))
    assert "NoHandler" in letter.failure_reason


class Search(msgspec.Struct):
    tool: str


def test_message_of_get_is_the_one_that_its_handler_got(world: EngineUnderTest) -> None:
    seen: list[Any] = []

    @world.engine.handler("tool_call", payload=Search, retry=Retry(max_retries=0))
    async def search(message: Any, _ctx: Any) -> None:
        seen.append(message)
        if len(seen) > 1:
            raise ValidationError("never")

    fields: dict[str, Any] = {"payload": {"tool": "x"}, "agent_id": "ada", "metadata": {"a": 1}}
    done, dead = (world.submit(**fields, goal_id="trip", version="1.9.0", colour="red") for _ in range(2))
    world.run_all()
    assert [world.message(one.message_id) for one in (done, dead)] == [
        seen[0], msgspec.structs.replace(seen[1], retry_count=1),
    ]  # fmt: skip
    assert seen[0].payload == Search("x")


def test_message_that_its_handler_cannot_take_is_shown_as_it_was_accepted(world: EngineUnderTest) -> None:
    handle = world.submit(payload={"odd": 1})
    world.engine.handler("tool_call", payload=Search)(lambda *_: None)
    assert world.message(handle.message_id).payload == {"odd": 1}
    envelope = Envelope(queue="org:acme", payload=b"\xff", type="tool_call")
    [damaged] = world.engine.store.write(lambda transaction: transaction.insert([envelope]))
    assert world.wait(world.engine.get(damaged.message_id)).message is None


def test_result_joins_a_streamed_answer(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def stream(message: Any, ctx: Any) -> Any:
        for chunk in message.payload.get("chunks", []):
            await ctx.stream(chunk)
        return {"whole": False}

    text, plain = world.submit(payload={"chunks": ["He", "llo"]}), world.submit()
    world.run_all()
    assert world.wait(text.result()) == "Hello"
    assert world.wait(plain.result()) == {"whole": False}
    assert world.engine.blocking.wait(world.engine.handle(text.message_id).result()) == "Hello"


@pytest.mark.statement("dlq-undecodable")
def test_bytes_that_cannot_be_decoded_reach_the_dead_letters(world: EngineUnderTest) -> None:
    envelope = Envelope(queue="org:acme", payload=b"\xffnot json", type="tool_call")
    world.engine.store.write(lambda transaction: transaction.insert([envelope]))
    failing(world, RuntimeError("never called"))
    world.run_all()
    [letter] = world.wait(world.engine.dlq.list())
    assert letter.original_bytes == b"\xffnot json"
    assert not letter.can_replay


@pytest.mark.statement("stored-for-replay", "dlq-structure", "events-replay")
def test_replay_runs_again_and_dry_run_does_not(world: EngineUnderTest) -> None:
    works: list[int] = []

    @world.engine.handler("model_call", retry=Retry(max_retries=0))
    async def run(_message: Any, _ctx: Any) -> str:
        if not works:
            works.append(1)
            raise RuntimeError("boom")
        return "done"

    handle = world.submit(type="model_call", priority=2)
    world.run_all()
    assert world.wait(world.engine.dlq.replay(dry_run=True)).message_ids == [handle.message_id]
    assert world.state(handle) == "DEAD_LETTER"
    assert world.wait(world.engine.dlq.replay(priority=0, type="model_call")).replayed == 1
    assert world.wait(world.engine.get(handle.message_id)).priority == 0
    world.run_all()
    assert world.wait(handle.result()) == "done"
    assert not world.wait(world.engine.dlq.list())
    with pytest.raises(WrongState):
        world.wait(world.engine.dlq.replay([handle.message_id]))


def test_dead_letters_are_filtered_and_purged(world: EngineUnderTest) -> None:
    failing(world, postroom.ValidationError("bad"))
    failing(world, postroom.ValidationError("bad"), "model_call")
    world.submit(org_id="one")
    world.submit(org_id="two", type="model_call")
    world.run_all()
    assert [each.original_message["org_id"] for each in world.wait(world.engine.dlq.list(org_id="two"))] == [
        "two"
    ]
    assert len(world.wait(world.engine.dlq.list(since=NOW - timedelta(hours=1)))) == 2
    assert not world.wait(world.engine.dlq.list(until=NOW - timedelta(hours=1)))
    with pytest.raises(InvalidMessage):
        world.wait(world.engine.dlq.list(colour="red"))  # type: ignore[call-arg]
    assert len(world.wait(world.engine.dlq.purge(org_id="one"))) == 1
    assert len(world.wait(world.engine.dlq.list())) == 1


@pytest.mark.statement("dlq-retention")
def test_dead_letters_are_kept_longer_than_results(world: EngineUnderTest) -> None:
    failing(world, postroom.ValidationError("bad"))

    @world.engine.handler("model_call")
    async def run(_message: Any, _ctx: Any) -> None: ...

    dead, done = world.submit(), world.submit(type="model_call")
    world.run_all()
    world.clock.advance(8 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert world.state(dead) == "DEAD_LETTER"
    with pytest.raises(UnknownTask):
        world.state(done)
    world.clock.advance(83 * DAY_S)
    world.wait(world.engine.core.purge.run())
    with pytest.raises(UnknownTask):
        world.state(dead)


@pytest.mark.statement("retention-tiers")
def test_retention_follows_the_tier_of_the_organization(opened: Opened) -> None:
    world = opened(organizations={"big": Organization(tier="pro")})

    @world.engine.handler("tool_call")
    async def run(_message: Any, _ctx: Any) -> None: ...

    small, big = world.submit(org_id="small"), world.submit(org_id="big")
    world.run_all()
    world.clock.advance(80 * DAY_S)
    world.wait(world.engine.core.purge.run())
    assert world.state(big) == "COMPLETED"
    with pytest.raises(UnknownTask):
        world.state(small)


# ---- order -----------------------------------------------------------------------------------------


@pytest.mark.statement("priority-field", "workers-alike")
def test_workers_take_priorities_in_order_and_fifo_inside(world: EngineUnderTest) -> None:
    handles = {priority: [world.submit(priority=priority) for _ in range(2)] for priority in (3, 1, 0, 2)}
    expected = [one.message_id for priority in range(4) for one in handles[priority]]
    assert claimed_ids(world, 8) == expected


@pytest.mark.statement("promotion-times", "order-best-effort")
@pytest.mark.parametrize(("age_s", "promoted_to"), [(29, 3), (31, 2), (46, 1), (51, 0)])
def test_waiting_messages_are_promoted_step_by_step(
    world: EngineUnderTest, age_s: float, promoted_to: int
) -> None:
    """Beside the class that a message is promoted to, and beside those below, it is one of eight."""
    old = world.submit(priority=3).message_id
    world.clock.advance(age_s)
    for priority in range(3):
        world.submit_many(10, priority=priority)
    assert claimed_ids(world, 31).index(old) == (30 if promoted_to == 3 else 10 * promoted_to + 7)


@pytest.mark.statement("promotion-share")
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_promoted_messages_get_one_of_eight_deliveries(world: EngineUnderTest, priority: int) -> None:
    promoted = ids(world.submit_many(5, priority=3))
    world.clock.advance(60)
    fresh = ids(world.submit_many(30, priority=priority))
    order = claimed_ids(world, 24)
    assert order[:7] == fresh[:7]
    assert [order.index(each) for each in promoted[:3]] == [7, 15, 23]


@pytest.mark.statement("promotion-share")
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_aged_bulk_does_not_stop_fresh_messages_of_other_organizations(
    world: EngineUnderTest, limit: int
) -> None:
    bulk = set(ids(world.submit_many(200, priority=3, org_id="bulk")))
    world.clock.advance(60)
    fresh = [
        message_id
        for priority in (1, 2)
        for message_id in ids(world.submit_many(20, priority=priority, org_id="other"))
    ]
    order = [message_id for _ in range(45 // limit + 1) for message_id in claimed_ids(world, limit)]
    assert [each for each in order if each not in bulk] == fresh
    assert [at for at, each in enumerate(order[:45]) if each in bulk] == [7, 15, 23, 31, 39]
    assert bulk.issuperset(order[45:]), "only bulk waits"


def test_promoted_messages_take_all_deliveries_when_nothing_else_waits(world: EngineUnderTest) -> None:
    bulk = ids(world.submit_many(20, priority=3))
    world.clock.advance(60)
    assert claimed_ids(world, 10) == bulk[:10]
    fresh = ids(world.submit_many(8, priority=1))
    assert claimed_ids(world, 10) == [*fresh[:7], bulk[10], fresh[7], bulk[11]]


def test_old_p1_messages_do_not_take_the_share_of_old_p3_messages(world: EngineUnderTest) -> None:
    """Both are promoted to P0, and P1 goes on to be the higher class."""
    bulk = ids(world.submit_many(3, priority=3))
    urgent = ids(world.submit_many(30, priority=1))
    world.clock.advance(60)
    order = claimed_ids(world, 16)
    assert [order.index(each) for each in bulk[:2]] == [7, 15]
    assert [each for each in order if each not in bulk] == urgent[:14]


def test_organizations_take_turns_in_the_share_of_promoted_messages(world: EngineUnderTest) -> None:
    flood = set(ids(world.submit_many(50, priority=3, org_id="flood")))
    small = set(ids(world.submit_many(2, priority=2, org_id="small")))
    world.clock.advance(60)
    world.submit_many(40, priority=0)
    order = claimed_ids(world, 32)
    assert len(small.intersection(order)) == len(flood.intersection(order)) == 2


def test_the_oldest_promoted_message_of_an_organization_goes_first(world: EngineUnderTest) -> None:
    """Whatever its priority: promoted P2 messages that keep coming do not starve a P3 message."""
    old = world.submit(priority=3).message_id
    world.clock.advance(60)
    world.submit_many(5, priority=2)
    world.clock.advance(60)
    world.submit_many(8, priority=0)
    assert claimed_ids(world, 8)[7] == old


def test_message_that_is_held_back_does_not_use_the_share(world: EngineUnderTest) -> None:
    first, *_ = (world.submit(priority=3, ordering_key="k") for _ in range(3))
    world.claim(1)  # the other ones have to wait for it
    free = world.submit(priority=3)
    world.clock.advance(60)
    fresh = ids(world.submit_many(8, priority=0))
    order = claimed_ids(world, 8)
    assert order == [*fresh[:7], free.message_id], first


def test_every_worker_gives_promoted_messages_their_share(world: EngineUnderTest) -> None:
    promoted = set(ids(world.submit_many(20, priority=3)))
    world.clock.advance(60)
    world.submit_many(50, priority=1)
    workers = [Rotation() for _ in range(3)]
    for turn in range(48):
        world.rotation = workers[turn % 3]
        promoted.difference_update(claimed_ids(world))
    assert len(promoted) == 20 - 48 // 8


@pytest.mark.statement("four-classes")
def test_promotion_is_an_event_and_keeps_the_accepted_priority(world: EngineUnderTest) -> None:
    handle = world.submit(priority=3)
    world.clock.advance(31)
    assert claimed_ids(world) == [handle.message_id]
    info = world.wait(world.engine.get(handle.message_id))
    assert "promoted" in [event.kind for event in info.history]
    assert info.accepted_priority == 3


@pytest.mark.statement("organization-queue")
def test_organizations_take_turns_inside_a_priority(world: EngineUnderTest) -> None:
    world.submit_many(50, org_id="flood")
    small = ids(world.submit_many(2, org_id="small"))
    order = claimed_ids(world, 6)
    assert set(small) < set(order)


@pytest.mark.statement("tenants-turns")
def test_weights_share_the_deliveries(opened: Opened) -> None:
    world = opened(organizations={"heavy": Organization(weight=3.0)})
    heavy = set(ids(world.submit_many(40, org_id="heavy")))
    world.submit_many(40, org_id="light")
    order = claimed_ids(world, 20)
    assert len(heavy & set(order)) == 15


def test_small_weight_gets_its_share(opened: Opened) -> None:
    world = opened(organizations={"tiny": Organization(weight=0.25)})
    tiny = set(ids(world.submit_many(40, org_id="tiny")))
    world.submit_many(40, org_id="usual")
    order = [each for _ in range(10) for each in claimed_ids(world, 2)]
    assert len(tiny & set(order)) == 4


@pytest.mark.statement("ordering-key", "order-parallel")
def test_ordering_key_is_strict(world: EngineUnderTest) -> None:
    first, second, third = (world.submit(ordering_key="k", priority=priority) for priority in (3, 0, 0))
    other = world.submit(priority=3)
    claimed = world.claim(10)
    assert [one.record.message_id for one in claimed] == [first.message_id, other.message_id]
    assert not world.claim(10)
    world.complete(claimed)
    assert claimed_ids(world, 10) == [second.message_id]
    assert claimed_ids(world, 10) == [third.message_id]


@pytest.mark.statement("order-dead-head")
def test_dead_head_stops_its_key_only_when_asked_to(world: EngineUnderTest) -> None:
    failing(world, postroom.ValidationError("bad"))
    world.submit(ordering_key="go")
    following = world.submit(ordering_key="go", type="model_call")
    stopping = world.submit(ordering_key="stop", on_dead="stop")
    blocked = world.submit(ordering_key="stop", type="model_call")
    world.run()
    world.run()
    assert world.state(following) == "DEAD_LETTER"  # it has no handler, so it ran
    assert world.state(blocked) == "SCHEDULED"
    assert stopping.message_id in world.wait(blocked.explain())
    world.wait(world.engine.dlq.replay([stopping.message_id]))
    [again] = world.claim(10)
    assert again.record.message_id == stopping.message_id
    world.complete([again])
    assert claimed_ids(world, 10) == [blocked.message_id]


def test_cancelled_message_leaves_the_line_of_its_key(world: EngineUnderTest) -> None:
    first, second, third = (world.submit(ordering_key="k") for _ in range(3))
    world.wait(second.cancel())
    world.wait(first.cancel())
    assert claimed_ids(world, 10) == [third.message_id]


def test_retry_keeps_its_place_in_the_line_of_its_key(world: EngineUnderTest) -> None:
    first, second = (world.submit(ordering_key="k") for _ in range(2))
    [one] = world.claim()
    world.fail(one)
    assert not world.claim()
    world.clock.advance(5)
    assert claimed_ids(world) == [first.message_id]
    assert claimed_ids(world) == [second.message_id]


# ---- crashes ---------------------------------------------------------------------------------------


def die_alone(world: EngineUnderTest, claimed: Claimed) -> None:
    """The process that runs only this message dies."""
    assert poison.runs_alone(claimed.record)
    world.finish(ended(claimed, "crashed", "the process of the handler died with signal 9"))


@pytest.mark.statement("poison-detection", "poison-quarantine")
def test_process_deaths_count_apart_from_retries_and_quarantine(
    world: EngineUnderTest,
) -> None:
    handle = world.submit()
    assert world.claim()
    world.wait(world.engine.put_back("w"))
    for _ in range(3):
        [claimed] = world.claim()
        die_alone(world, claimed)
    assert not world.claim()
    info = world.wait(world.engine.get(handle.message_id))
    assert info.state == "QUARANTINED"
    assert info.retry_count == 0
    assert info.crashes == 3
    assert world.message(handle.message_id).payload == {}
    alerts = [event for event in world.engine.store.events() if event.kind == "alert"]
    assert handle.message_id in alerts[-1].error
    [letter] = world.wait(world.engine.dlq.list())
    assert "Poison" in letter.failure_reason
    assert "is QUARANTINED: its own process died 3 times" in world.wait(handle.explain())
    done = world.wait(world.engine.dlq.replay())
    assert (done.replayed, done.refused) == (0, 1)
    assert done.reasons == {"it is quarantined: replay it by its id": 1}
    assert world.wait(world.engine.dlq.replay([handle.message_id])).message_ids == [handle.message_id]
    [claimed] = world.claim()
    assert not poison.runs_alone(claimed.record)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_deaths_of_workers_and_lapsed_leases_never_count(world: EngineUnderTest, is_noticed: bool) -> None:
    world.submit()
    for _ in range(20):
        [claimed] = world.claim()
        if is_noticed:
            world.wait(world.engine.put_back("w"))
        else:
            world.clock.advance(16)
    [claimed] = world.claim()
    assert poison.runs_alone(claimed.record)
    assert world.wait(world.engine.get(claimed.record.message_id)).crashes == 0


def test_message_runs_alone_once_after_the_death_of_its_worker(world: EngineUnderTest) -> None:
    world.submit(max_retries=9)

    def claim(*, alone: bool) -> Claimed:
        world.clock.advance(300)
        [claimed] = world.claim()
        assert poison.runs_alone(claimed.record) == alone
        return claimed

    claim(alone=False)
    world.wait(world.engine.put_back("w"))
    world.finish(ended(claim(alone=True), "released"))  # it did not come to an end: it is still to run alone
    world.fail(claim(alone=True))
    claim(alone=False)
    world.wait(world.engine.put_back("w"))
    die_alone(world, claim(alone=True))
    world.fail(claim(alone=True))
    claim(alone=True)  # a message whose own process has died keeps away from others


def test_own_process_outlives_a_sigterm_for_all_processes_of_a_service(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call", pool="process")
    def run(_message: Any, _ctx: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        told = subprocess.run(["sh", "-c", "kill -TERM $$"], check=False)
        return f"done, and its program ended with {told.returncode}"

    handle = world.submit()
    world.run_all()
    assert world.wait(handle.result()) == "done, and its program ended with -15"


@pytest.mark.statement("poison-bystanders")
def test_messages_that_run_next_to_a_killer_have_no_crash_counted(world: EngineUnderTest) -> None:
    world.submit_many(10)
    claimed = world.claim(10)
    world.clock.advance(16)
    claimed = world.claim(10)
    world.complete(claimed)
    infos = [world.wait(world.engine.get(one.record.message_id)) for one in claimed]
    assert [info.crashes for info in infos] == [0] * 10
    assert {info.state for info in infos} == {"COMPLETED"}


@pytest.mark.statement("poison-bystanders")
def test_suspect_runs_alone_and_its_crash_affects_no_other_message(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def run(message: Any, _ctx: Any) -> int:
        if message.payload.get("kills"):
            os.kill(os.getpid(), 9)
        return os.getpid()

    killer, neighbour = world.submit(payload={"kills": 1}), world.submit()
    world.claim(2)  # a worker that dies with both
    world.clock.advance(16)
    for _ in range(8):
        world.run()
    assert world.wait(neighbour.result()) != os.getpid()
    assert world.state(killer) == "QUARANTINED"
    last_crash = world.wait(world.engine.get(killer.message_id)).errors[-2]
    assert last_crash["error_type"] == "ProcessDied"
    assert last_crash["error"] == "the process of the handler died with signal 9"
    assert world.wait(world.engine.get(neighbour.message_id)).crashes == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_batch_handler_gets_a_list_when_its_message_runs_alone(
    world: EngineUnderTest, is_async: bool
) -> None:
    def run(messages: list[Any], contexts: list[Any]) -> list[Any]:
        assert len(messages) == len(contexts)
        return [ValidationError("odd") if one.payload.get("odd") else "done" for one in messages]

    async def run_async(messages: list[Any], contexts: list[Any]) -> list[Any]:
        return run(messages, contexts)

    world.engine.handler("tool_call", batch=5)(run_async if is_async else run)
    good, odd = world.submit(), world.submit(payload={"odd": 1})
    world.claim(2)  # a worker that dies with both
    world.clock.advance(16)
    for _ in range(4):
        world.run()
    assert world.wait(good.result()) == "done"
    assert world.wait(world.engine.get(odd.message_id)).errors[-1]["error"] == "odd"


# ---- breakers --------------------------------------------------------------------------------------


@pytest.mark.statement("breaker-per-service", "breaker-cooldown")
def test_breaker_opens_defers_probes_and_closes(world: EngineUnderTest) -> None:
    healthy: list[int] = []

    @world.engine.handler("tool_call", service="slack", retry=Retry(max_retries=0))
    async def run(_message: Any, _ctx: Any) -> None:
        if not healthy:
            raise ConnectionError("down")

    @world.engine.handler("model_call")
    async def other(_message: Any, _ctx: Any) -> None: ...

    world.submit_many(5)
    world.run_all()
    assert world.wait(world.engine.status()).breakers["slack"].state == "open"
    waiting = [world.submit(), world.submit()]
    untouched = world.submit(type="model_call")
    world.run_all()
    assert world.state(untouched) == "COMPLETED"
    assert world.state(waiting[0]) == "SCHEDULED"
    assert "breaker" in world.wait(waiting[0].explain())
    healthy.append(1)
    world.clock.advance(301)
    world.run_all()
    world.clock.advance(2)
    world.run_all()
    assert [world.state(each) for each in waiting] == ["COMPLETED"] * 2
    assert world.wait(world.engine.status()).breakers["slack"].state == "closed"
    kinds = [event.kind for event in world.engine.store.events()]
    assert kinds.count("breaker_opened") == kinds.count("breaker_closed") == 1


@pytest.mark.statement("breaker-cooldown")
def test_failed_probe_opens_the_breaker_again(world: EngineUnderTest) -> None:
    failing(world, ConnectionError("down"), service="slack", retry=Retry(max_retries=0))
    world.submit_many(5)
    world.run_all()
    world.clock.advance(301)
    probes = world.submit_many(3)
    world.run_all()
    states = [world.state(each) for each in probes]
    assert states.count("DEAD_LETTER") == 1
    assert world.wait(world.engine.status()).breakers["slack"].state == "open"


@pytest.mark.statement("breaker-policy")
def test_open_breaker_fails_messages_by_policy(opened: Opened) -> None:
    world = opened(breaker=Breaker(failures=1, on_open="fail"))
    failing(world, ConnectionError("down"), service="slack", retry=Retry(max_retries=0))
    world.submit()
    world.run_all()
    handle = world.submit()
    world.run_all()
    assert world.wait(world.engine.get(handle.message_id)).errors[-1]["error_type"] == "BreakerOpen"


def test_validation_errors_do_not_open_a_breaker(world: EngineUnderTest) -> None:
    failing(world, postroom.ValidationError("bad"), service="slack")
    world.submit_many(10)
    world.run_all()
    assert world.wait(world.engine.status()).breakers == {}


# ---- backpressure ----------------------------------------------------------------------------------

SMALL = Backpressure(scale=2, light=4, heavy=6, emergency=8)


@pytest.mark.statement("stage-light", "stage-heavy", "stage-emergency")
def test_stages_throttle_then_refuse_all_but_p0(opened: Opened) -> None:
    world = opened(backpressure=SMALL)
    world.submit_many(5, priority=1)
    world.submit(priority=3)  # one a second is always admitted
    with pytest.raises(Overloaded) as refused:
        world.submit(priority=3)
    assert 0 < refused.value.retry_after <= 1
    world.submit(priority=2)
    world.submit_many(2, priority=1)
    assert world.wait(world.engine.status()).stage == 4
    for priority in (1, 2, 3):
        with pytest.raises(Overloaded):
            world.submit(priority=priority)
    world.submit(priority=0)
    alerts = [event.error_type for event in world.engine.store.events() if event.kind == "alert"]
    assert "Queue depth critical" in alerts
    assert "EMERGENCY: Queue overflow" in alerts
    assert "rejected" in [event.kind for event in world.engine.store.events()]


def test_p0_obeys_max_depth(opened: Opened) -> None:
    world = opened(organization=Organization(max_depth=3))
    world.submit_many(3, priority=0)
    with pytest.raises(Overloaded):
        world.submit(priority=0)


@pytest.mark.statement("stage-thresholds")
def test_stage_is_left_at_four_fifths_of_its_threshold(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=10, light=20, heavy=30, emergency=40))
    world.submit_many(41, priority=1)
    with pytest.raises(Overloaded):
        world.submit(priority=1)
    world.submit(priority=0)
    world.complete(world.claim(9))
    with pytest.raises(Overloaded):
        world.submit(priority=1)  # 33 are above four fifths of 40
    world.complete(world.claim(1))
    world.submit(priority=1)


@pytest.mark.statement("stage-rate")
def test_throttled_rate_follows_completions(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=2, light=4, heavy=10_000, emergency=20_000))
    world.submit_many(200, priority=2)
    for _ in range(10):  # ten a second are completed
        world.submit(priority=0)
        world.complete(world.claim(11))
        world.clock.advance(1)
    admitted = 0
    for _ in range(100):
        try:
            world.submit(priority=3)
            admitted += 1
        except Overloaded:
            pass
        world.clock.advance(0.01)
    assert 4 <= admitted <= 11


@pytest.mark.statement("stage-cause")
def test_only_organizations_above_their_fair_share_are_throttled(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=10, light=20, heavy=30, emergency=40))
    world.submit_many(38, priority=1, org_id="flood")
    world.submit_many(2, priority=1, org_id="small")
    world.submit(priority=0, org_id="flood")
    with pytest.raises(Overloaded):
        world.submit(priority=1, org_id="flood")
    world.submit(priority=1, org_id="small")


@pytest.mark.statement("organization-limit")
def test_organizations_that_are_idle_cost_a_submit_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = opened(backpressure=Backpressure(scale=4, light=8, heavy=30, emergency=40))
    for org_id in ("idle", "quiet", "small", "flood"):
        world.submit(org_id=org_id)
    world.complete(world.claim(4))
    world.submit(priority=1, org_id="small")
    world.submit_many(8, priority=1, org_id="flood")
    kind = type(world.engine.store.write(lambda transaction: transaction.lanes))

    def scan(_self: object) -> None:
        raise AssertionError("a submit reads the queues of all organizations")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "queues", scan)
        world.submit(priority=3, org_id="flood")
        with pytest.raises(Overloaded, match="organization flood has 9"):
            world.submit(priority=3, org_id="flood")
        world.submit_many(2, priority=3, org_id="small")


@pytest.mark.statement("stage-batch")
@pytest.mark.parametrize(("priority", "most"), [(0, 100), (1, 41), (2, 41), (3, 41)])
def test_batch_is_held_to_the_stage_that_it_causes(opened: Opened, priority: int, most: int) -> None:
    world = opened(backpressure=Backpressure(scale=10, light=20, heavy=30, emergency=40))
    if priority:
        with pytest.raises(Overloaded, match=rf"which refuses P{priority}: try again in 5 s"):
            world.submit_many(most + 1, priority=priority)
        assert world.wait(world.engine.status()).depth == 0
    world.submit_many(most, priority=priority)
    assert world.wait(world.engine.status()).depth == most


def test_batch_is_refused_whole_for_one_of_its_classes(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=10, light=20, heavy=30, emergency=40))
    message: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}
    batch: list[SubmitFields] = [{**message, "priority": 0 if n < 41 else 1} for n in range(42)]
    with pytest.raises(Overloaded) as refused:
        world.wait(world.engine.submit_many(batch))
    assert str(refused.value) == (
        "organization acme would have 42 messages waiting (stage 4, above 40), which refuses P1: "
        "try again in 5 s"
    )
    assert world.wait(world.engine.status()).depth == 0
    world.wait(world.engine.submit_many(batch[:41]))


def test_batch_counts_for_all_organizations_together(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=10, light=20, heavy=30, emergency=40))
    world.submit_many(6, priority=1, org_id="a")
    world.submit_many(6, priority=1, org_id="b")
    with pytest.raises(Overloaded, match="organization c would have 30"):
        world.submit_many(30, priority=1, org_id="c")
    world.submit_many(10, priority=1, org_id="c")
    assert world.wait(world.engine.status()).depth == 22


def test_organization_after_many_paused_ones_has_its_turn(
    world: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "ORGANIZATIONS_A_CLAIM_MAX", 3)
    for number in range(5):
        world.submit(org_id=f"paused-{number}", priority=0)
        world.wait(world.engine.pause(org_id=f"paused-{number}"))
    waiting = [world.submit(org_id="zoe", priority=0) for _ in range(3)]
    found = [one.record.message_id for _ in range(8) for one in world.claim()]
    assert found == [handle.message_id for handle in waiting]


def test_batch_counts_all_of_its_organizations_as_active(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=5, light=10, heavy=20, emergency=40))
    batch: list[SubmitFields] = [
        {"type": "tool_call", "org_id": org_id, "payload": {}, "priority": 3}
        for org_id in ["acme"] * 30 + ["initech"] * 15
    ]
    with pytest.raises(Overloaded, match="of all organizations"):
        world.wait(world.engine.submit_many(batch))  # acme has more than half of what would wait
    world.wait(world.engine.submit_many(batch[5:]))


def test_throttled_batch_takes_as_many_admissions_as_it_has_messages(opened: Opened) -> None:
    world = opened(backpressure=Backpressure(scale=2, light=4, heavy=100, emergency=200))
    world.submit_many(10, priority=3)
    for seconds in (9.5, 0.4):
        world.clock.advance(seconds)
        with pytest.raises(Overloaded, match="which throttles P3"):
            world.submit(priority=3)
    world.submit(priority=2)
    world.clock.advance(0.2)
    world.submit(priority=3)


def test_retry_is_not_refused_by_backpressure(opened: Opened) -> None:
    world = opened(backpressure=SMALL)
    failing(world, RuntimeError("boom"))
    handle = world.submit(priority=1)
    world.submit_many(8, priority=1)
    [one] = world.claim()
    world.fail(one)
    world.clock.advance(5)
    world.submit_many(3, priority=0)
    assert handle.message_id in claimed_ids(world, 20)


@pytest.mark.statement("organization-limit", "rate-limits")
def test_rates_of_organizations_and_users_are_limited(opened: Opened) -> None:
    world = opened(
        organizations={"acme": Organization(rate_per_s=2.0), "b": Organization(user_rate_per_s=1.0)}
    )
    world.submit()
    world.submit()
    with pytest.raises(Overloaded, match="2 messages a second"):
        world.submit()
    world.submit(org_id="other")
    world.submit(org_id="b", user_id="u1")
    world.submit(org_id="b", user_id="u2")
    with pytest.raises(Overloaded):
        world.submit(org_id="b", user_id="u1")
    world.clock.advance(1)
    world.submit()


# ---- guards, pauses, cancel ------------------------------------------------------------------------


@pytest.mark.statement("guard-budget")
def test_guard_ends_a_goal(opened: Opened) -> None:
    world = opened(guard=Guard(messages=3, hops=2, tokens=100))
    depths = []

    @world.engine.handler("agent_message")
    async def talk(message: Any, ctx: Any) -> None:
        depths.append(message.hop)
        await ctx.submit(type="agent_message", payload={"to": "x", "body": "again"})

    handle = world.submit(type="agent_message", payload={"to": "x", "body": "hi"})
    for _ in range(10):
        world.run_all()
        world.clock.advance(60)
    assert depths == [0, 1, 2]
    assert world.state(handle) == "COMPLETED"
    [letter] = world.wait(world.engine.dlq.list())
    assert letter.error_history[-1]["error_type"] == "GuardTripped"
    for _ in range(3):
        world.submit(goal_id="g")
    with pytest.raises(GuardTripped, match="messages"):
        world.submit(goal_id="g")


@pytest.mark.statement("guard-budget")
def test_guard_counts_tokens_and_money(opened: Opened) -> None:
    world = opened(guard=Guard(tokens=100, usd=1.0))

    @world.engine.handler("model_call")
    async def call(_message: Any, ctx: Any) -> None:
        ctx.usage(model="m", tokens_in=60, tokens_out=60, cost_usd=0.1)

    world.submit(type="model_call", goal_id="g")
    world.run_all()
    with pytest.raises(GuardTripped, match="tokens"):
        world.submit(type="model_call", goal_id="g")
    completed = [event for event in world.engine.store.events() if event.kind == "execution_completed"]
    assert completed[-1].detail["tokens_in"] == 60


@pytest.mark.statement("kill-switch")
@pytest.mark.parametrize(
    "scope", [{"org_id": "acme"}, {"type": "tool_call"}, {}, {"org_id": "acme", "type": "tool_call"}]
)
def test_pause_holds_messages_until_resume(world: EngineUnderTest, scope: dict[str, Any]) -> None:
    handle = world.submit()
    other = world.submit(org_id="other", type="model_call")
    world.wait(world.engine.pause(**scope))
    assert claimed_ids(world, 5) == ([other.message_id] if scope else [])
    assert "paused" in world.wait(handle.explain())
    world.wait(world.engine.resume(**scope))
    assert handle.message_id in claimed_ids(world, 5)


@pytest.mark.statement("kill-switch")
def test_kill_switch_refuses_submits(world: EngineUnderTest) -> None:
    world.wait(world.engine.pause(org_id="acme", kill=True))
    with pytest.raises(Overloaded, match="kill switch"):
        world.submit()
    world.submit(org_id="other")
    world.wait(world.engine.resume(org_id="acme"))
    world.submit()


@pytest.mark.statement("expires-at")
def test_expired_message_is_not_delivered(world: EngineUnderTest) -> None:
    handle = world.submit(expires_at=NOW + timedelta(seconds=10))
    world.clock.advance(11)
    assert not world.claim()
    assert world.state(handle) == "EXPIRED"
    with pytest.raises(MessageFailed, match="EXPIRED"):
        world.wait(handle.result())


@pytest.mark.statement("not-before")
def test_delayed_message_waits(world: EngineUnderTest) -> None:
    handle = world.submit(delay_s=10)
    assert not world.claim()
    assert "due in 10.0 s" in world.wait(handle.explain())
    world.clock.advance(10)
    assert claimed_ids(world) == [handle.message_id]


def test_cancelled_message_is_not_delivered(world: EngineUnderTest) -> None:
    handle = world.submit()
    world.wait(handle.cancel())
    assert not world.claim()
    with pytest.raises(WrongState):
        world.wait(handle.cancel())
    with pytest.raises(UnknownTask):
        world.wait(world.engine.cancel("nonsense"))


@pytest.mark.statement("explain")
def test_explain_names_the_holder_and_the_missing_worker(world: EngineUnderTest) -> None:
    handle = world.submit()
    assert "no worker" in world.wait(handle.explain())
    world.claim(worker="bob")
    assert "bob" in world.wait(handle.explain())


def test_status_shows_lanes_and_depth(world: EngineUnderTest) -> None:
    world.submit_many(2, priority=0)
    world.submit(priority=3)
    status = world.wait(world.engine.status())
    assert status.organizations["acme"].lanes == [2, 0, 0, 1]
    assert status.organizations["acme"].depth == status.depth == 3
    assert status.stage == 0


# ---- effects ---------------------------------------------------------------------------------------


@pytest.mark.statement("effects-once")
def test_effect_happens_once_over_retries(world: EngineUnderTest) -> None:
    charges = []

    def charge() -> str:
        charges.append(1)
        return "charged"

    @world.engine.handler("tool_call")
    async def run(_message: Any, ctx: Any) -> Any:
        outcome = await ctx.effect("invoice-42", charge)
        if ctx.attempt == 1:
            raise RuntimeError("after the effect")
        return outcome

    handle = world.submit()
    world.run_all()
    world.clock.advance(5)
    world.run_all()
    assert world.wait(handle.result()) == "charged"
    assert charges == [1]


def test_effect_without_an_outcome_is_unknown_to_the_next_attempt(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> Any:
        def charge() -> str:
            if ctx.attempt == 1:
                raise TimeoutError("nobody knows")
            return "charged"

        options = message.payload
        probe = (lambda: options["probed"]) if "probed" in options else None
        return await ctx.effect("k", charge, probe=probe, on_unknown=options.get("on_unknown", "raise"))

    unknown = world.submit()
    run_again = world.submit(payload={"on_unknown": "run"})
    probed = world.submit(payload={"probed": "it happened"})
    nothing = world.submit(payload={"probed": None})
    world.run_all()
    world.clock.advance(5)
    world.run_all()
    with pytest.raises(MessageFailed) as failed:
        world.wait(unknown.result())
    assert failed.value.error_history[-1]["error_type"] == EffectUnknown.__name__
    assert world.wait(run_again.result()) == "charged"
    assert world.wait(probed.result()) == "it happened"
    assert world.wait(nothing.result()) == "charged"


def test_effect_that_failed_is_run_again(world: EngineUnderTest) -> None:
    @world.engine.handler("tool_call")
    async def run(_message: Any, ctx: Any) -> Any:
        def charge() -> str:
            if ctx.attempt == 1:
                raise ValueError("declined")
            return "charged"

        return await ctx.effect("k", charge)

    handle = world.submit()
    world.run_all()
    world.clock.advance(5)
    world.run_all()
    assert world.wait(handle.result()) == "charged"


# ---- a running worker ------------------------------------------------------------------------------


@pytest.mark.statement("parallel", "isolation-process")
def test_worker_runs_async_plain_and_process_handlers(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:

            @engine.handler("tool_call")
            async def one(_message: Any, ctx: Any) -> str:
                await ctx.progress(0.5, "half")
                return "async"

            @engine.handler("model_call")
            def two(_message: Any, ctx: Any) -> str:
                ctx.progress(0.5)
                child = ctx.submit(type="tool_call", payload={})
                return f"{threading.current_thread().name} {child.result(timeout_s=HANG_GUARD_S)}"

            @engine.handler("memory_save", pool="process")
            def three(_message: Any, ctx: Any) -> Any:
                return ctx.effect("k", lambda: "process")

            worker = asyncio.create_task(engine.run())
            results = []
            for kind in ("tool_call", "model_call", "memory_save"):
                handle = await engine.submit(type=kind, org_id="acme", payload={})
                results.append(await handle.result(timeout_s=HANG_GUARD_S))
            assert results[0] == "async"
            assert results[1].startswith("postroom-handler")
            assert results[2] == "process"
            await engine.stop()
            await worker

    soon(scenario())


@pytest.mark.statement("response-parts")
def test_parts_of_an_answer_come_in_order(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:

            @engine.handler("model_call")
            async def run(_message: Any, ctx: Any) -> None:
                await ctx.progress(0.1, "thinking")
                for word in "abc":
                    await ctx.stream(word)

            worker = asyncio.create_task(engine.run())
            handle = await engine.submit(type="model_call", org_id="acme", payload={})
            parts = [part async for part in handle]
            kinds = [part.type for part in parts]
            assert kinds == ["acknowledgment", "progress", *["stream_chunk"] * 3, "stream_complete"]
            assert [part.chunk for part in parts[2:5]] == list("abc")
            assert [part.chunk_index for part in parts[2:5]] == [0, 1, 2]
            assert parts[-1].total_chunks == 3
            await engine.stop()
            await worker

    soon(scenario())


def test_cancel_reaches_a_running_handler(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:
            cancelled, started = asyncio.Event(), asyncio.Event()
            seen = threading.Event()

            @engine.handler("tool_call")
            async def run(_message: Any, _ctx: Any) -> None:
                started.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

            @engine.handler("model_call")
            def plain(_message: Any, ctx: Any) -> None:
                started.set()
                while not ctx.cancelled:
                    time.sleep(0.01)
                seen.set()

            @engine.handler("memory_save", pool="process")
            def alone(_message: Any, _ctx: Any) -> None:
                time.sleep(60)

            worker = asyncio.create_task(engine.run())
            for kind in ("tool_call", "model_call", "memory_save"):
                started.clear()
                handle = await engine.submit(type=kind, org_id="acme", payload={})
                if kind == "memory_save":
                    await asyncio.sleep(0.5)
                else:
                    await asyncio.wait_for(started.wait(), HANG_GUARD_S)
                await handle.cancel()
                with pytest.raises(MessageFailed, match="CANCELLED"):
                    await handle.result(timeout_s=HANG_GUARD_S)
            await asyncio.wait_for(cancelled.wait(), HANG_GUARD_S)
            await asyncio.to_thread(seen.wait, HANG_GUARD_S)
            await engine.stop()
            await asyncio.wait_for(worker, HANG_GUARD_S)

    soon(scenario())


def test_stop_finishes_running_handlers_and_releases_the_rest(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:
            engine.drain_s = 0.3
            started = asyncio.Event()

            @engine.handler("tool_call")
            async def run(message: Any, _ctx: Any) -> str:
                started.set()
                await asyncio.sleep(0.05 if message.payload.get("quick") else 60)
                return "done"

            worker = asyncio.create_task(engine.run())
            quick = await engine.submit(type="tool_call", org_id="acme", payload={"quick": 1})
            slow = await engine.submit(type="tool_call", org_id="acme", payload={})
            await started.wait()
            await asyncio.sleep(0.02)
            await engine.stop()
            await worker
            assert (await engine.get(quick.message_id)).state == "COMPLETED"
            info = await engine.get(slow.message_id)
            assert info.state == "QUEUED"
            assert "released" in [event.kind for event in info.history] or info.attempt == 0

    soon(scenario())


def test_cancelled_worker_releases_its_messages(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:
            started = asyncio.Event()

            @engine.handler("tool_call")
            async def run(_message: Any, _ctx: Any) -> None:
                started.set()
                await asyncio.sleep(60)

            worker = asyncio.create_task(engine.run())
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            await asyncio.wait_for(started.wait(), HANG_GUARD_S)
            worker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await worker
            assert (await engine.get(handle.message_id)).state == "QUEUED"

    soon(scenario())


@pytest.mark.statement("batching")
def test_batch_handler_gets_many_messages_and_one_error_fails_one(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine:
            sizes = []

            @engine.handler("tool_call", batch=25, within_ms=200, retry=Retry(max_retries=0))
            async def run(messages: Any, _contexts: Any) -> list[Any]:
                sizes.append(len(messages))
                return [
                    ValueError("odd") if message.payload["n"] == 3 else message.payload["n"]
                    for message in messages
                ]

            worker = asyncio.create_task(engine.run())
            message: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}
            handles = await engine.submit_many([{**message, "payload": {"n": n}} for n in range(50)])
            results = [
                await handle.result(timeout_s=HANG_GUARD_S) for n, handle in enumerate(handles) if n != 3
            ]
            assert results == [n for n in range(50) if n != 3]
            with pytest.raises(MessageFailed, match="odd"):
                await handles[3].result(timeout_s=HANG_GUARD_S)
            assert max(sizes) == 25
            await engine.stop()
            await worker

    soon(scenario())


@pytest.mark.statement("limit-time")
def test_handler_timeout_is_retried(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url, Policy(retries={"tool_call": Retry(max_retries=0)})) as engine:

            @engine.handler("tool_call", timeout_s=0.05)
            async def run(_message: Any, _ctx: Any) -> None:
                await asyncio.sleep(60)

            worker = asyncio.create_task(engine.run())
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            with pytest.raises(MessageFailed, match="longer than"):
                await handle.result(timeout_s=HANG_GUARD_S)
            await engine.stop()
            await worker

    soon(scenario())


def test_leases_are_renewed_while_a_handler_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, renewed = Operations.heartbeat, []

    def counting(operations: Operations, leases: Any) -> list[str]:
        renewed.append(leases)
        return renew(operations, leases)

    monkeypatch.setattr(Operations, "heartbeat", counting)

    async def scenario() -> None:
        async with Engine.open(url, Policy(lease_s=4.0)) as engine:
            runs = []

            @engine.handler("tool_call")
            async def run(_message: Any, _ctx: Any) -> str:
                runs.append(1)
                begun = time.monotonic()
                while len(renewed) < 3 or time.monotonic() < begun + 4.5:  # noqa: ASYNC110 - no event tells it
                    await asyncio.sleep(0.1)
                return "done"

            worker = asyncio.create_task(engine.run())
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            assert await handle.result(timeout_s=HANG_GUARD_S) == "done"
            assert runs == [1]
            await engine.stop()
            await worker

    soon(scenario())


def test_heartbeats_continue_after_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, errors = Operations.heartbeat, [RuntimeError("unexpected")]

    def failing_once(operations: Operations, leases: Any) -> list[str]:
        if errors:
            raise errors.pop()
        return renew(operations, leases)

    monkeypatch.setattr(Operations, "heartbeat", failing_once)
    test_leases_are_renewed_while_a_handler_runs(url, monkeypatch)
    assert not errors


def test_blocking_verbs_work_in_plain_code(url: str) -> None:
    engine = Engine.open(url)

    @engine.handler("tool_call")
    async def run(message: Any, _ctx: Any) -> Any:
        return message.payload["n"]

    thread = threading.Thread(target=engine.blocking.run)
    thread.start()
    try:
        handle = engine.blocking.submit(type="tool_call", org_id="acme", payload={"n": 5})
        assert handle.result(timeout_s=HANG_GUARD_S) == 5
        assert [part.type for part in handle][-1] == "result"
        assert engine.blocking.get(handle.message_id).state == "COMPLETED"
        many = engine.blocking.submit_many(
            [{"type": "tool_call", "org_id": "acme", "payload": {"n": n}} for n in range(3)]
        )
        assert [each.result(timeout_s=HANG_GUARD_S) for each in many] == [0, 1, 2]
        assert engine.blocking.status().organizations["acme"].states["COMPLETED"] == 4
    finally:
        engine.blocking.stop()
        thread.join(HANG_GUARD_S)
        engine.close()


@pytest.mark.statement("local-development")
def test_testing_runs_handlers_inline_on_a_manual_clock() -> None:
    engine = Engine.open("memory://")
    runs = []

    @engine.handler("tool_call")
    async def run(_message: Any, ctx: Any) -> str:
        runs.append(ctx.attempt)
        if ctx.attempt < 3:
            raise RuntimeError("boom")
        return "done"

    async def scenario() -> None:
        test = engine.testing()
        handle = await test.submit(type="tool_call", org_id="acme", payload={})
        assert runs == [1]
        assert await handle.result() == "done"
        assert runs == [1, 2, 3]
        test.close()

    soon(scenario())
    engine.close()


def test_testing_runs_children_that_a_handler_waits_for() -> None:
    engine = Engine.open("memory://")

    @engine.handler("tool_call")
    async def child(message: Any, ctx: Any) -> Any:
        if ctx.attempt < 3:
            raise RuntimeError("boom")
        return message.payload["n"]

    @engine.handler("model_call")
    async def parent(_message: Any, ctx: Any) -> Any:
        children = [await ctx.submit(type="tool_call", payload={"n": n}) for n in range(3)]
        late = await ctx.submit(type="tool_call", payload={"n": 3}, delay_s=600)
        return await asyncio.gather(*(one.result() for one in [*children, late]))

    @engine.handler("agent_message")
    def grandparent(_message: Any, ctx: Any) -> Any:
        return ctx.submit(type="model_call", payload={}).result()

    async def scenario() -> None:
        with engine.testing() as test:
            handle = await test.submit(type="agent_message", org_id="acme", payload={})
            assert await handle.result() == [0, 1, 2, 3]
            info = await test.get(handle.message_id)
            assert (info.attempt, info.crashes) == (1, 0)

    soon(scenario())
    engine.close()


def test_testing_keeps_the_output_of_a_process_handler() -> None:
    engine = Engine.open("memory://")
    called = []

    @engine.handler("tool_call")
    async def child(_message: Any, _ctx: Any) -> str:
        return "child"

    @engine.handler("model_call", pool="process")
    def parent(_message: Any, ctx: Any) -> Any:
        ctx.effect("call", lambda: called.append(ctx.attempt))
        if ctx.attempt == 1:
            raise RuntimeError("boom")
        return ctx.submit(type="tool_call", payload={}).message_id

    async def scenario() -> None:
        with engine.testing() as test:
            handle = await test.submit(type="model_call", org_id="acme", payload={})
            assert await test.handle(await handle.result()).result() == "child"
            assert called == [1]

    soon(scenario())
    engine.close()


def test_failed_attempt_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine.open("memory://")

    @engine.handler("tool_call", retry=Retry(max_retries=0))
    async def run(message: Any, _ctx: Any) -> Any:
        return message.payload["missing"]

    with caplog.at_level("INFO", "postroom.engine"), engine.testing() as test:
        soon(test.submit(type="tool_call", org_id="acme", payload={}))
    engine.close()
    assert 'message.payload["missing"]' in caplog.text


def test_testing_ends_the_wait_for_a_child_that_cannot_end() -> None:
    engine = Engine.open("memory://")

    @engine.handler("model_call")
    async def parent(_message: Any, ctx: Any) -> str:
        child = await ctx.submit(type="tool_call", payload={}, delay_s=2 * HANG_GUARD_S)
        with pytest.raises(TimeoutError):
            await child.result(timeout_s=HANG_GUARD_S)
        return "gave up"

    async def scenario() -> None:
        with engine.testing() as test:
            handle = await test.submit(type="model_call", org_id="acme", payload={})
            assert await handle.result() == "gave up"

    soon(scenario())
    engine.close()


def test_invalid_settings_are_refused() -> None:
    engine = Engine.open("memory://", clock=ManualClock())
    with pytest.raises(TypeError):
        engine.handler("tool_call", colour="red")(print)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting):
        engine.handler("tool_call", timeout_s=-1)(print)
    with pytest.raises(InvalidSetting, match="retry must be a Retry"):
        engine.handler("tool_call", retry=3)(print)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="takes two arguments"):
        engine.handler("tool_call")(lambda _message: None)
    with pytest.raises(InvalidSetting):
        Policy(promote_after_s=(1.0,))
    with pytest.raises(InvalidMessage):
        Engine.open(5)  # type: ignore[arg-type]
    engine.close()
