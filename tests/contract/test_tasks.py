"""The guarantees of `Tasks`, on every store."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postroom import QueueFull, StaleLease, Tasks, UnknownTask, WrongState
from postroom.calls.fields import JSON_DEPTH_MAX
from postroom.contracts.tasks.task_input import checked_terms
from postroom.contracts.tasks.task_operations import NewTask, TaskOperations
from postroom.contracts.tasks.task_views import agents_status
from postroom.contracts.tasks.tasks import DECISIONS, LeasedTask, Retention, TaskInfo, TaskLimits
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.errors import InvalidMessage, InvalidName, PostroomError, Rejected
from postroom.message import Event
from postroom.testing import ManualClock, check_consistency
from tests import children
from tests.children import no_child_left
from tests.faultydisk import FaultyDisk, in_background
from tests.postgresserver import database, postgres, store_url

__all__ = ["database", "postgres"]  # fixtures

__all__ = ["no_child_left"]  # a fixture

LONG_S = 60.0  # a hang guard, not a measurement
FOR_EVER_S = 10 * LONG_S
DAY_S = 86_400


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request, tmp_path)


@pytest.fixture
def tasks(url: str, clock: ManualClock) -> Iterator[Tasks]:
    with Tasks.open(url, clock=clock) as tasks:
        yield tasks
        check_consistency(tasks.store)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Tasks]:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        yield tasks


def take(tasks: Tasks, **terms: Any) -> LeasedTask:
    [task] = tasks.claim(agent="a", **terms)
    return task


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


# ---- the straight way ------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_a_claim_ends_with_enough_bytes(
    tasks: Tasks, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """With a delay that is over, the claim is the general one of all stores."""
    monkeypatch.setattr("postroom.stores.base.CLAIM_BYTES_MAX", 2_500)
    for number in range(7):
        tasks.enqueue(agent="a", payload=[number, "x" * 1_000], delay_s=delay_s)
    tasks.enqueue(agent="a", payload=[7, "x" * 9_000], delay_s=delay_s)
    clock.advance(10)
    claimed = [[task.payload[0] for task in tasks.claim(agent="a", limit=100)] for _ in range(5)]
    assert claimed == [[0, 1, 2], [3, 4, 5], [6, 7], [], []]


def test_a_task_from_its_beginning_to_its_end(tasks: Tasks, clock: ManualClock) -> None:
    task_id = tasks.enqueue(agent="a", payload={"issue": 7}, type="issue.triage", parent="p")
    clock.advance(2)
    task = take(tasks, worker="w-1")
    assert task == LeasedTask(
        task_id, {"issue": 7}, task.lease, 1, "a", type="issue.triage", parent="p", lease_s=300.0
    )
    clock.advance(1)
    tasks.heartbeat(task_id, task.lease)
    clock.advance(1)
    tasks.complete(task_id, task.lease, {"decision": "skip"})
    info = tasks.get(task_id)
    began = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=clock.wall_us()) - timedelta(seconds=4)
    assert (info.status, info.state, info.agent, info.payload, info.result) == (
        "completed",
        "COMPLETED",
        "a",
        {"issue": 7},
        {"decision": "skip"},
    )
    assert (info.created_at, info.claimed_at, info.last_heartbeat, info.completed_at) == tuple(
        began + timedelta(seconds=seconds) for seconds in (0, 2, 3, 4)
    )
    assert (info.retry_count, info.attempt, info.worker, info.type, info.parent, info.errors) == (
        0,
        1,
        "w-1",
        "issue.triage",
        "p",
        [],
    )
    assert kinds(info.history) == ["created", "enqueued", "dequeued", "execution_completed"]
    assert tasks.claim(agent="a") == []


def test_a_refused_task_creates_no_queue(tasks: Tasks) -> None:
    too_long = "x" * 2_000_000
    refused, kept = tasks.run_many(
        [
            lambda operations: operations.enqueue([NewTask(agent="ghost", payload=too_long)]),
            lambda operations: operations.enqueue([NewTask(agent="a", payload=1)]),
        ]
    )
    assert isinstance(refused, InvalidMessage)
    with pytest.raises(InvalidMessage, match="max_payload_bytes"):
        tasks.enqueue(agent="ghost", payload=too_long)
    assert tasks.get(kept[0]).status == "pending"
    assert "ghost" not in tasks.status().agents


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_payload_nested_too_deeply_is_refused(tasks: Tasks) -> None:
    tasks.enqueue(agent="a", payload=nested(JSON_DEPTH_MAX))
    tasks.enqueue(agent="a", payload=[[]] * 2 * JSON_DEPTH_MAX)  # wide, but not deep
    with pytest.raises(InvalidMessage, match="the payload is nested more than 200 levels deep"):
        tasks.enqueue(agent="a", payload=nested(JSON_DEPTH_MAX + 1))
    [task] = tasks.claim(agent="a")
    with pytest.raises(InvalidMessage, match="the result is nested"):
        tasks.complete(task.task_id, task.lease, nested(JSON_DEPTH_MAX + 1))


@pytest.mark.parametrize(
    "payload",
    [None, True, 0, -1.5, "", "ü\n\0", [], {}, {"a": [{"b": None}]}, "x" * 100_000, 2**60, [[[[]]]]],
)
def test_any_json_is_a_payload_and_a_result(tasks: Tasks, payload: Any) -> None:
    tasks.enqueue(agent="a", payload=payload)
    task = take(tasks)
    assert task.payload == payload
    tasks.complete(task.task_id, task.lease, payload)
    assert tasks.get(task.task_id).result == payload


def test_an_agent_has_its_own_queue_in_order(tasks: Tasks) -> None:
    ids = [tasks.enqueue(agent="a", payload=number) for number in range(5)]
    tasks.enqueue(agent="b", payload="other")
    claimed = tasks.claim(agent="a", limit=2) + tasks.claim(agent="a", limit=100)
    assert [task.task_id for task in claimed] == ids
    assert [task.payload for task in claimed] == list(range(5))
    assert [task.payload for task in tasks.claim(agent="b", limit=100)] == ["other"]
    assert tasks.claim(agent="nobody") == []


def test_a_batch_is_stored_and_claimed(tasks: Tasks) -> None:
    ids = tasks.enqueue_many(
        {"agent": "a", "payload": number, "task_id": f"t{number}"} for number in range(10)
    )
    assert ids == [f"t{number}" for number in range(10)]
    claimed = tasks.claim(agent="a", limit=10)
    tasks.complete_many([(task.task_id, task.lease, task.payload) for task in claimed])
    assert tasks.status().totals == {"completed": 10}
    assert tasks.enqueue_many([]) == []
    tasks.complete_many([])


def test_a_batch_is_all_or_nothing(tasks: Tasks) -> None:
    first, second = tasks.enqueue_many([{"agent": "a", "payload": 1}, {"agent": "a", "payload": 2}])
    claimed = {task.task_id: task.lease for task in tasks.claim(agent="a", limit=2)}
    with pytest.raises(StaleLease):
        tasks.complete_many([(first, claimed[first], 1), (second, claimed[first], 1)])
    with pytest.raises(UnknownTask):
        tasks.complete_many([(first, claimed[first], 1), ("nobody", 1, 1)])
    assert tasks.status().totals == {"claimed": 2}


# ---- the same task twice ---------------------------------------------------------------------------


def test_the_same_id_or_key_is_one_task(tasks: Tasks) -> None:
    assert tasks.enqueue(agent="a", payload=1, task_id="t") == "t"
    assert tasks.enqueue(agent="a", payload=2, task_id="t") == "t"
    keyed = tasks.enqueue(agent="a", payload=3, idempotency_key="k")
    assert tasks.enqueue(agent="a", payload=4, idempotency_key="k") == keyed
    assert tasks.enqueue(agent="a", payload=5, task_id=keyed) == keyed
    assert tasks.enqueue(agent="b", payload=6, idempotency_key="k") != keyed
    assert [task.payload for task in tasks.claim(agent="a", limit=10)] == [1, 3]
    assert kinds(tasks.events()).count("duplicate") == 3
    assert tasks.get(keyed).idempotency_key == "k"


def test_a_repeated_last_call_is_not_an_error_and_changes_nothing(tasks: Tasks) -> None:
    words: list[Callable[[LeasedTask], object]] = [
        lambda task: tasks.complete(task.task_id, task.lease, "first"),
        lambda task: tasks.release(task.task_id, task.lease),
        lambda task: tasks.fail(task.task_id, task.lease, "no", retry_in_s=0),
        lambda task: tasks.fail(task.task_id, task.lease, "no", retry_in_s=60),
    ]
    for word in words:
        tasks.enqueue(agent="a", payload=1)
        task = take(tasks)
        word(task)
        before = tasks.events()
        word(task)
        assert tasks.events() == before
        for left in tasks.claim(agent="a", limit=10):
            tasks.complete(left.task_id, left.lease)


# ---- leases ----------------------------------------------------------------------------------------


def words_of(tasks: Tasks) -> list[Callable[[str, int], object]]:
    return [
        tasks.heartbeat,
        tasks.complete,
        tasks.release,
        lambda task_id, lease: tasks.fail(task_id, lease, "no"),
    ]


def refused(tasks: Tasks, task_id: str, lease: int, error: type[PostroomError] = StaleLease) -> None:
    for word in words_of(tasks):
        before = tasks.events(), tasks.status()
        with pytest.raises(error):
            word(task_id, lease)
        assert (tasks.events(), tasks.status()) == before


def test_a_lease_ends_after_300_s_without_a_heartbeat(tasks: Tasks, clock: ManualClock) -> None:
    tasks.enqueue(agent="a", payload=1)
    zombie = take(tasks, worker="zombie")
    clock.advance(299.9)
    assert tasks.claim(agent="a") == []
    tasks.heartbeat(zombie.task_id, zombie.lease)
    clock.advance(299.9)
    assert tasks.claim(agent="a") == []
    clock.advance(0.1)
    refused(tasks, zombie.task_id, zombie.lease)
    second = take(tasks, worker="second")
    assert (second.task_id, second.attempt) == (zombie.task_id, 2)
    assert second.lease > zombie.lease
    refused(tasks, zombie.task_id, zombie.lease)
    tasks.complete(second.task_id, second.lease, "mine")
    refused(tasks, zombie.task_id, zombie.lease)  # a completed task is not moved back
    assert tasks.get(zombie.task_id).result == "mine"
    assert tasks.get(zombie.task_id).errors == ["the lease ran out"]
    assert tasks.status().agents["a"].lapses == 1
    assert tasks.store.read(lambda found: agents_status(found, [])) == {}


def test_a_late_call_does_not_revive_a_dead_task(tasks: Tasks, clock: ManualClock) -> None:
    tasks.enqueue(agent="a", payload=1, max_retries=0)
    task = take(tasks)
    clock.advance(300)
    assert tasks.sweep() == 1
    assert tasks.get(task.task_id).status == "failed"
    refused(tasks, task.task_id, task.lease)
    assert tasks.get(task.task_id).state == "DEAD_LETTER"


def test_a_foreign_lease_and_an_unknown_task_are_refused(tasks: Tasks) -> None:
    first, second = (tasks.enqueue(agent="a", payload=number) for number in range(2))
    leases = {task.task_id: task.lease for task in tasks.claim(agent="a", limit=2)}
    for lease in (0, -1, leases[second], 2**70):
        refused(tasks, first, lease)
    for unknown in ("nobody", "", "x" * 1_000, f"{first}0", "t-" + "9" * 5_000, "ü", "\ud800", "../etc"):
        refused(tasks, unknown, leases[first], UnknownTask)
        for look in (tasks.get, tasks.cancel, tasks.retry, tasks.open_decision):
            with pytest.raises(UnknownTask):
                look(unknown)


def test_competing_agents_share_a_queue(tasks: Tasks) -> None:
    ids = [tasks.enqueue(agent="a", payload=number) for number in range(60)]
    got: dict[str, list[str]] = {"w1": [], "w2": [], "w3": []}

    def work(name: str) -> None:
        while claimed := tasks.claim(agent="a", limit=3, worker=name):
            got[name] += [task.task_id for task in claimed]
            tasks.complete_many([(task.task_id, task.lease, name) for task in claimed])

    threads = [threading.Thread(target=work, args=(name,)) for name in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(task_id for ids_of in got.values() for task_id in ids_of) == sorted(ids)
    assert all(tasks.get(task_id).worker in got for task_id in ids[:5])


def test_the_status_names_the_holders(tasks: Tasks, clock: ManualClock) -> None:
    for number in range(5):
        tasks.enqueue(agent="a", payload=number)
    tasks.enqueue(agent="a", payload=5, delay_s=60)
    tasks.claim(agent="a", limit=2, worker="w1")
    tasks.claim(agent="a", worker="w2")
    clock.advance(7)
    status = tasks.status()
    mine = status.agents["a"]
    assert (mine.depth, mine.oldest_age_s, mine.in_flight, mine.holders, mine.lapses) == (
        3,
        7.0,
        3,
        {"w1": 2, "w2": 1},
        0,
    )
    assert mine.states == {"QUEUED": 2, "SCHEDULED": 1, "PROCESSING": 3}
    assert status.totals == {"pending": 3, "claimed": 3}


# ---- failures --------------------------------------------------------------------------------------


def test_four_failed_attempts_make_a_dead_letter_that_can_be_retried(
    tasks: Tasks, clock: ManualClock
) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    for number in range(2):
        task = take(tasks)
        tasks.fail(task_id, task.lease, f"error {number}", error_type="Boom")
        assert tasks.claim(agent="a") == []  # it waits for a while
        clock.advance(60)
    take(tasks)
    clock.advance(300)  # the third one is never delivered again
    task = take(tasks)
    assert task.attempt == 4
    tasks.fail(task_id, task.lease, "error 3")
    info = tasks.get(task_id)
    assert (info.status, info.state, info.retry_count, info.attempt) == ("failed", "DEAD_LETTER", 4, 4)
    assert info.errors == ["error 0", "error 1", "the lease ran out", "error 3"]
    assert kinds(tasks.events())[-1] == "dead_letter"
    assert [event.error_type for event in info.history if event.error][:2] == ["Boom", "Boom"]
    clock.advance(DAY_S)
    assert (tasks.claim(agent="a"), tasks.sweep()) == ([], 0)

    tasks.retry(task_id)
    for _ in range(3):
        task = take(tasks)
        tasks.fail(task_id, task.lease, "again", retry_in_s=0)
    task = take(tasks)
    assert task.attempt == 8
    tasks.complete(task_id, task.lease, "at last")
    info = tasks.get(task_id)
    assert (info.status, info.result, len(info.errors)) == ("completed", "at last", 7)
    with pytest.raises(
        WrongState, match=r"cannot retry .* and only DEAD_LETTER, CANCELLED, EXPIRED and QUARANTINED can be"
    ):
        tasks.retry(task_id)


def test_the_pauses_between_attempts_are_the_policys_or_the_callers(clock: ManualClock, url: str) -> None:
    tasks = Tasks.open(url, clock=clock, retry=RetryPolicy(max_retries=5, first_delay_s=10, factor=3))
    task_id = tasks.enqueue(agent="a", payload=1)
    for wish_s, pause_s in ((None, 10), (None, 30), (5.5, 5.5), (0, 0)):
        task = take(tasks)
        tasks.fail(task_id, task.lease, "no", retry_in_s=wish_s)
        if pause_s:
            clock.advance(pause_s - 0.1)
            assert tasks.claim(agent="a") == []
            clock.advance(0.1)
    assert take(tasks).attempt == 5
    tasks.close()


def test_a_task_may_have_its_own_max_retries(tasks: Tasks) -> None:
    task_id = tasks.enqueue(agent="a", payload=1, max_retries=0)
    tasks.fail(task_id, take(tasks).lease, "no")
    assert (tasks.get(task_id).status, tasks.get(task_id).max_retries) == ("failed", 0)


def test_a_long_error_is_truncated_and_an_odd_one_is_kept(tasks: Tasks) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    tasks.fail(task_id, take(tasks).lease, "x" * 100_000, retry_in_s=0)
    tasks.fail(task_id, take(tasks).lease, 'zwei\nZeilen "ü"\u2028\0', retry_in_s=0)
    assert [len(error) for error in tasks.get(task_id).errors] == [4_000, 17]
    assert tasks.get(task_id).errors[1] == 'zwei\nZeilen "ü"\u2028\0'


def test_a_released_task_keeps_its_position_and_retry_count(tasks: Tasks) -> None:
    first, second = (tasks.enqueue(agent="a", payload=number) for number in range(2))
    for _ in range(10):
        task = take(tasks)
        assert task.task_id == first
        tasks.release(first, task.lease)
    assert tasks.get(first).retry_count == 0
    assert [task.task_id for task in tasks.claim(agent="a", limit=2)] == [first, second]


# ---- later, never ----------------------------------------------------------------------------------


def test_a_delayed_task_waits_for_its_time(tasks: Tasks, clock: ManualClock) -> None:
    late = tasks.enqueue(agent="a", payload="late", delay_s=3_600)
    now = tasks.enqueue(agent="a", payload="now")
    assert [task.task_id for task in tasks.claim(agent="a", limit=9, lease_s=DAY_S)] == [now]
    assert tasks.get(late).status == "pending"
    clock.advance(3_599)
    assert tasks.claim(agent="a") == []
    clock.advance(1)
    assert take(tasks).task_id == late


def test_a_cancelled_task_has_ended_for_its_holder_too(tasks: Tasks) -> None:
    waiting, held = (tasks.enqueue(agent="a", payload=number) for number in range(2))
    tasks.cancel(waiting)
    task = take(tasks)
    assert task.task_id == held
    tasks.cancel(held)
    refused(tasks, held, task.lease)
    for task_id in (waiting, held):
        assert tasks.get(task_id).status == "cancelled"
        with pytest.raises(WrongState, match="it is CANCELLED"):
            tasks.cancel(task_id)
    tasks.retry(held)
    assert take(tasks).task_id == held


# ---- bad input -------------------------------------------------------------------------------------

BAD_TASKS: dict[str, dict[str, Any]] = {
    "no agent": {"agent": ""},
    "agent with a slash": {"agent": "a/b"},
    "agent of the wrong kind": {"agent": 7},
    "agent too long": {"agent": "a" * 129},
    "payload that is not JSON": {"payload": object()},
    "payload with a key that is not text": {"payload": {(1, 2): 3}},
    "payload with half a character": {"payload": "\ud800"},
    "payload that is not a number": {"payload": {"share": [1, math.nan]}},
    "payload that is infinite": {"payload": -math.inf},
    "payload too long": {"payload": "x" * 1_048_576},
    "id with a space": {"task_id": "a b"},
    "id of the wrong kind": {"task_id": 5},
    "empty id": {"task_id": ""},
    "negative delay": {"delay_s": -1},
    "delay that is text": {"delay_s": "soon"},
    "delay that never ends": {"delay_s": math.inf},
    "delay that is not a number": {"delay_s": math.nan},
    "delay of a year and a day": {"delay_s": 400 * DAY_S},
    "delay that is true": {"delay_s": True},
    "empty key": {"idempotency_key": ""},
    "key too long": {"idempotency_key": "k" * 513},
    "key of the wrong kind": {"idempotency_key": 1},
    "key with half a character": {"idempotency_key": "\udcff"},
    "type of the wrong kind": {"type": None},
    "type too long": {"type": "t" * 257},
    "parent of the wrong kind": {"parent": 3},
    "negative retries": {"max_retries": -1},
    "retries that are true": {"max_retries": True},
    "too many retries": {"max_retries": 1_001},
    "unknown durability": {"durability": "forever"},
}


@pytest.mark.parametrize("why", BAD_TASKS)
def test_a_bad_task_is_refused_with_a_one_line_error_and_nothing_is_stored(tasks: Tasks, why: str) -> None:
    bad: Any = {"agent": "a", "payload": 1, **BAD_TASKS[why]}
    with pytest.raises(Rejected) as single:
        tasks.enqueue(**bad)
    with pytest.raises(Rejected):
        tasks.enqueue_many([{"agent": "a", "payload": 1}, bad])
    for text in (str(single.value),):
        assert text
        assert "\n" not in text
        assert len(text) < 400
    assert isinstance(single.value, InvalidMessage | InvalidName)
    assert (tasks.events(), tasks.status().totals) == ([], {})


@pytest.mark.parametrize("bad", [7, None, {}, {"agent": "a"}, {"agent": "a", "payload": 1, "agnet": "b"}])
def test_an_invalid_task_is_refused(tasks: Tasks, bad: Any) -> None:
    with pytest.raises(InvalidMessage, match="not a task"):
        tasks.enqueue_many([bad])


@pytest.mark.parametrize(
    "terms",
    [
        {"agent": "a b"}, {"limit": 0}, {"limit": 1_001}, {"limit": True}, {"limit": "1"}, {"lease_s": 0},
        {"lease_s": -1}, {"lease_s": math.nan}, {"lease_s": 31 * DAY_S}, {"lease_s": "x"}, {"wait_s": -1},
        {"wait_s": math.inf}, {"wait_s": None}, {"worker": 5}, {"worker": "w" * 257}, {"worker": "\ud800"},
    ],
)  # fmt: skip
def test_an_invalid_claim_leases_nothing(tasks: Tasks, terms: dict[str, Any]) -> None:
    tasks.enqueue(agent="a", payload=1)
    with pytest.raises((InvalidMessage, InvalidName)):
        tasks.claim(**{"agent": "a", **terms})
    assert tasks.status().totals == {"pending": 1}


def test_an_invalid_call_changes_nothing(tasks: Tasks) -> None:
    tasks.enqueue(agent="a", payload=1)
    task = take(tasks)
    bad_words: list[Callable[[], object]] = [
        lambda: tasks.complete(task.task_id, "7"),  # type: ignore[arg-type]
        lambda: tasks.complete(task.task_id, True),
        lambda: tasks.complete(task.task_id, None),  # type: ignore[arg-type]
        lambda: tasks.complete(task.task_id, task.lease, object()),
        lambda: tasks.complete(task.task_id, task.lease, "x" * 1_048_576),
        lambda: tasks.complete(task.task_id, task.lease, math.nan),
        lambda: tasks.complete_many([(task.task_id, task.lease)]),  # type: ignore[list-item]
        lambda: tasks.complete_many([7]),  # type: ignore[list-item]
        lambda: tasks.sweep("x"),  # type: ignore[arg-type]
        lambda: tasks.forget_events("x"),  # type: ignore[arg-type]
        lambda: tasks.complete(5, task.lease),  # type: ignore[arg-type]
        lambda: tasks.complete(["t"], task.lease),  # type: ignore[arg-type]
        lambda: tasks.fail(task.task_id, task.lease, None),  # type: ignore[arg-type]
        lambda: tasks.fail(task.task_id, task.lease, "\ud800"),
        lambda: tasks.fail(task.task_id, task.lease, "no", retry_in_s=-1),
        lambda: tasks.fail(task.task_id, task.lease, "no", retry_in_s=math.nan),
        lambda: tasks.fail(task.task_id, task.lease, "no", retry_in_s=400 * DAY_S),
        lambda: tasks.fail(task.task_id, task.lease, "no", error_type=5),  # type: ignore[arg-type]
        lambda: tasks.fail(task.task_id, task.lease, "no", error_type="\ud800"),
        lambda: tasks.limit_queue("a b"),
        lambda: tasks.limit_queue("a", max_depth=0),
        lambda: tasks.limit_queue("a", max_depth=2**70),
        lambda: tasks.limit_queue("a", max_payload_bytes=True),
        lambda: tasks.find(agent="a/b"),
        lambda: tasks.find(state="LOST"),  # type: ignore[arg-type]
        lambda: tasks.find(limit=0),
        lambda: tasks.find(limit="1"),  # type: ignore[arg-type]
        lambda: tasks.find(after=-1),
        lambda: tasks.events(after=2**70),
        lambda: tasks.events(limit=-1),
    ]
    before = tasks.events(), tasks.status()
    for word in bad_words:
        with pytest.raises(Rejected):
            word()
        assert (tasks.events(), tasks.status()) == before


def test_an_error_that_is_not_text_is_refused(tasks: Tasks) -> None:
    with pytest.raises(InvalidMessage, match="error must be text, not NoneType"):
        tasks.fail("t-1", 1, None)  # type: ignore[arg-type]


def test_an_address_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="not None"):
        Tasks.open(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", [None, {"nothing": None}, ["null"], [1.5, None]])
def test_none_is_a_valid_payload(tasks: Tasks, payload: Any) -> None:
    tasks.enqueue(agent="a", payload=payload)
    assert take(tasks).payload == payload


def test_an_unknown_durability_is_refused(url: str) -> None:
    with pytest.raises(InvalidMessage, match="durability must be one of"):
        Tasks.open(url, durability="forever")  # type: ignore[arg-type]


def test_a_full_queue_reports_when_to_retry(tasks: Tasks) -> None:
    tasks.limit_queue("a", max_depth=2, max_payload_bytes=10)
    tasks.enqueue_many([{"agent": "a", "payload": 1}] * 2)
    with pytest.raises(QueueFull, match="try again in 1 s") as full:
        tasks.enqueue(agent="a", payload=1)
    assert (full.value.retry_after_s, full.value.depth, full.value.max_depth) == (1.0, 2, 2)
    tasks.claim(agent="a")
    with pytest.raises(InvalidMessage, match="takes at most 10"):
        tasks.enqueue(agent="a", payload="123456789")
    tasks.enqueue(agent="a", payload=1)


# ---- looking ---------------------------------------------------------------------------------------


def test_tasks_are_found_page_by_page(tasks: Tasks) -> None:
    ids = [tasks.enqueue(agent="ab"[number % 2], payload=number) for number in range(6)]
    tasks.cancel(ids[1])
    first = tasks.find(limit=4)
    rest = tasks.find(after=first[-1].seq, limit=4)
    assert [line.task_id for line in first + rest] == ids
    assert [line.task_id for line in tasks.find(agent="b")] == ids[1::2]
    assert [line.task_id for line in tasks.find(state="CANCELLED")] == [ids[1]]
    assert tasks.find(agent="b", state="CANCELLED")[0].status == "cancelled"
    assert tasks.find(agent="nobody") == []


def test_events_continue_after_the_last_number(tasks: Tasks) -> None:
    for number in range(3):
        tasks.enqueue(agent="a", payload=number)
    seen: list[Event] = []
    while page := tasks.events(after=seen[-1].seq if seen else 0, limit=2):
        seen += page
    assert [event.seq for event in seen] == [1, 2, 3, 4, 5, 6]
    assert kinds(seen) == ["created", "enqueued"] * 3


# ---- waiting ---------------------------------------------------------------------------------------


ONLY_RINGS = TaskLimits(look_again_s=FOR_EVER_S, look_again_deaf_s=FOR_EVER_S)
"""Waiters do not poll, so only a wake-up can end a wait."""


def test_a_wait_is_ended_by_another_thread(url: str) -> None:
    tasks = Tasks.open(url)
    tasks.limits = ONLY_RINGS
    got: list[LeasedTask] = []
    waiting = in_background(lambda: got.extend(tasks.claim(agent="a", wait_s=FOR_EVER_S)))
    while not tasks.notifier._callbacks:
        waiting.join(0.001)
    tasks.enqueue(agent="b", payload="not for it")
    task_id = tasks.enqueue(agent="a", payload=1)
    waiting.join(LONG_S)
    assert [task.task_id for task in got] == [task_id]
    tasks.close()


def test_a_wait_is_ended_by_another_process(on_disk: Tasks, no_child_left: None) -> None:
    on_disk.limits = ONLY_RINGS
    task_id = on_disk.enqueue(agent="a", payload=1, delay_s=LONG_S)
    on_disk.claim(agent="a", wait_s=0.01)  # open before the fork
    if not on_disk.notifier.hears_other_processes:
        pytest.skip("a wake-up by another process was NOT tested: this system has no inotify")
    asleep, fall_asleep = os.pipe()

    def child() -> None:
        waiting = in_background(take_and_complete)
        while not on_disk.notifier._callbacks:
            waiting.join(0.001)
        os.write(fall_asleep, b"!")
        waiting.join(LONG_S)
        on_disk.close()

    def take_and_complete() -> None:
        [task] = on_disk.claim(agent="a", wait_s=FOR_EVER_S)
        on_disk.complete(task.task_id, task.lease, "woken")

    pid = children.start(child)
    assert os.read(asleep, 1) == b"!"
    later = on_disk.enqueue(agent="a", payload=2)
    children.wait(pid)
    assert (on_disk.get(later).result, on_disk.get(task_id).status) == ("woken", "pending")
    os.close(asleep)
    os.close(fall_asleep)


@pytest.mark.parametrize("how", ["complete", "fail", "cancel"])
def test_a_wait_for_a_result_ends_when_the_task_ends(url: str, how: str) -> None:
    tasks = Tasks.open(url)
    tasks.limits = ONLY_RINGS
    task_id = tasks.enqueue(agent="a", payload=1, max_retries=0)
    got: list[TaskInfo] = []
    waiting = in_background(lambda: got.append(tasks.wait(task_id)))
    while not tasks.notifier._callbacks:
        waiting.join(0.001)
    task = take(tasks)
    tasks.heartbeat(task_id, task.lease)
    match how:
        case "complete":
            tasks.complete(task_id, task.lease, {"label": "bug"})
        case "fail":
            tasks.fail(task_id, task.lease, "no")
        case "cancel":
            tasks.cancel(task_id)
    waiting.join(LONG_S)
    [info] = got
    assert info == tasks.get(task_id)
    assert info.ended
    assert info.result == ({"label": "bug"} if how == "complete" else None)
    assert tasks.wait(task_id, 0) == info  # an ended task is returned at once
    assert tasks.notifier._callbacks == {}
    tasks.close()


def test_a_wait_for_a_result_is_woken_by_another_process(on_disk: Tasks, no_child_left: None) -> None:
    on_disk.limits = ONLY_RINGS
    task_id = on_disk.enqueue(agent="a", payload=1)
    on_disk.claim(agent="b", wait_s=0.01)
    if not on_disk.notifier.hears_other_processes:
        pytest.skip("a wake-up by another process was NOT tested: this system has no inotify")
    begin, begun = os.pipe()

    def child() -> None:
        os.read(begin, 1)
        task = take(on_disk)
        on_disk.complete(task_id, task.lease, "done elsewhere")
        on_disk.close()

    pid = children.start(child)
    got: list[TaskInfo] = []
    waiting = in_background(lambda: got.append(on_disk.wait(task_id, FOR_EVER_S)))
    while not on_disk.notifier._callbacks:
        waiting.join(0.001)
    os.write(begun, b"!")
    waiting.join(LONG_S)
    children.wait(pid)
    assert [info.result for info in got] == ["done elsewhere"]
    os.close(begin)
    os.close(begun)


def test_a_wait_for_a_result_that_takes_too_long_gives_the_task_as_it_is(tasks: Tasks) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    assert tasks.wait(task_id, 0.01).status == "pending"
    take(tasks)
    info = tasks.wait(task_id, 0)
    assert (info.status, info.ended) == ("claimed", False)
    with pytest.raises(UnknownTask):
        tasks.wait("nothing", 0.01)
    with pytest.raises(InvalidMessage, match="timeout_s must be"):
        tasks.wait(task_id, -1)


def test_a_lost_wake_up_only_delays_a_result(url: str) -> None:
    tasks = Tasks.open(url)
    task_id = tasks.enqueue(agent="a", payload=1)
    tasks.store.on_commit = None
    got: list[TaskInfo] = []
    waiting = in_background(lambda: got.append(tasks.wait(task_id)))
    task = take(tasks)
    tasks.complete(task_id, task.lease, "late")
    waiting.join(LONG_S)
    assert [info.result for info in got] == ["late"]
    tasks.close()


def test_a_task_shows_when_its_lease_ends(tasks: Tasks, clock: ManualClock) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    assert tasks.get(task_id).lease_ends_at is None
    task = take(tasks, lease_s=60.0)
    claimed = tasks.get(task_id)
    assert claimed.claimed_at is not None
    assert claimed.lease_ends_at == claimed.claimed_at + timedelta(seconds=60)
    clock.advance(10)
    tasks.heartbeat(task_id, task.lease)
    assert tasks.get(task_id).lease_ends_at == claimed.lease_ends_at + timedelta(seconds=10)
    tasks.complete(task_id, task.lease)
    assert tasks.get(task_id).lease_ends_at is None


def test_keys_belong_to_their_sender(tasks: Tasks) -> None:
    new: dict[str, Any] = {"agent": "a", "payload": 1, "idempotency_key": "issue-7"}
    ids = [tasks.enqueue(**new, sender=sender) for sender in ("planner", "critic", "")]
    assert len(set(ids)) == 3
    assert [tasks.enqueue(**new, sender=sender) for sender in ("planner", "critic", "")] == ids
    assert [tasks.get(task_id).sender for task_id in ids] == ["planner", "critic", ""]
    with pytest.raises(InvalidName):
        tasks.enqueue(agent="a", payload=1, sender="a:b")


@pytest.mark.parametrize("how", ["enqueue", "release", "fail", "retry"])
def test_every_call_that_makes_a_task_ready_notifies(url: str, how: str) -> None:
    tasks = Tasks.open(url)
    task_id = tasks.enqueue(agent="a", payload=1, max_retries=9)
    task = take(tasks)
    if how == "retry":
        tasks.cancel(task_id)
    heard = threading.Event()
    with tasks.notifier.subscribed("a", heard.set):
        match how:
            case "enqueue":
                tasks.enqueue(agent="a", payload=2)
            case "release":
                tasks.release(task_id, task.lease)
            case "fail":
                tasks.fail(task_id, task.lease, "no", retry_in_s=0)
            case "retry":
                tasks.retry(task_id)
        assert heard.wait(LONG_S)
    tasks.close()


def test_a_wait_finds_due_tasks_without_a_wake_up(url: str) -> None:
    """A task that becomes due is found even when every wake-up is lost."""
    tasks = Tasks.open(url)
    assert tasks.claim(agent="a", wait_s=0.01) == []
    tasks.enqueue(agent="a", payload="due soon", delay_s=0.05)
    assert [task.payload for task in tasks.claim(agent="a", wait_s=LONG_S)] == ["due soon"]
    tasks.enqueue(agent="b", payload=1)
    tasks.claim(agent="b", lease_s=0.05)
    [again] = tasks.claim(agent="b", wait_s=LONG_S)
    assert again.attempt == 2
    tasks.close()


# ---- what a harness does ---------------------------------------------------------------------------


def test_a_result_becomes_a_decision_that_is_executed_once(tasks: Tasks) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    assert tasks.open_decision(task_id) is None  # no worker has finished it
    task = take(tasks)
    tasks.complete(task_id, task.lease, {"label": "bug"})
    decision_id = tasks.open_decision(task_id)
    assert decision_id is not None
    assert tasks.open_decision(task_id) is None
    assert (tasks.get(task_id).status, tasks.get(task_id).state) == ("completed", "EXECUTING")
    [decision] = tasks.claim(agent=DECISIONS)
    assert (decision.task_id, decision.payload, decision.parent) == (decision_id, {"label": "bug"}, task_id)
    tasks.settle(decision)
    tasks.settle(decision)  # the call is repeated after a lost answer
    assert tasks.get(task_id).status == "done"
    tasks.complete(task_id, task.lease, "late")  # the same call under the same lease again
    assert (tasks.get(task_id).status, tasks.get(task_id).result) == ("done", {"label": "bug"})
    assert tasks.claim(agent=DECISIONS) == []


def test_a_decision_that_keeps_failing_ends_in_the_dead_letters(tasks: Tasks, clock: ManualClock) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    tasks.complete(task_id, take(tasks).lease, "x")
    decision_id = tasks.open_decision(task_id)
    assert decision_id is not None
    for _ in range(4):
        [decision] = tasks.claim(agent=DECISIONS)
        tasks.fail(decision.task_id, decision.lease, "the service is down")
        clock.advance(60)
    assert tasks.claim(agent=DECISIONS) == []
    assert (tasks.get(decision_id).status, tasks.get(task_id).status) == ("failed", "completed")
    tasks.retry(decision_id)
    [decision] = tasks.claim(agent=DECISIONS)
    tasks.settle(decision)
    assert tasks.get(task_id).status == "done"


def test_a_decision_is_settled_only_by_its_holder(tasks: Tasks, clock: ManualClock) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    tasks.complete(task_id, take(tasks).lease, "x")
    tasks.open_decision(task_id)
    [zombie] = tasks.claim(agent=DECISIONS)
    clock.advance(300)
    [second] = tasks.claim(agent=DECISIONS)
    with pytest.raises(StaleLease):
        tasks.settle(zombie)
    assert tasks.get(task_id).state == "EXECUTING"
    tasks.settle(second)
    assert tasks.get(task_id).state == "DONE"


# ---- several calls, one commit ---------------------------------------------------------------------


def test_several_calls_share_a_commit_and_each_gets_its_outcome(tasks: Tasks) -> None:
    held = tasks.enqueue(agent="a", payload=0)
    task = take(tasks)
    answers = tasks.run_many(
        [
            lambda operations: operations.enqueue([NewTask(agent="a", payload=1, task_id="one")]),
            lambda operations: operations.complete({held: (task.lease, b'"ok"')}),
            lambda operations: operations.complete({held: (task.lease + 1, b'"stale"')}),
            lambda operations: operations.claim(checked_terms("a", 1, 60.0, None)),
            lambda operations: operations.cancel("nobody"),
        ]
    )
    assert (answers[0], answers[1], answers[3][0].payload) == (["one"], [], 1)
    assert isinstance(answers[2], StaleLease)
    assert isinstance(answers[4], UnknownTask)
    assert tasks.get(held).result == "ok"


def test_a_result_of_the_same_commit_is_not_yet_a_decision(tasks: Tasks) -> None:
    """Otherwise the decision would be executed without its content, where uncommitted data cannot be read."""
    held = tasks.enqueue(agent="a", payload=0)
    task = take(tasks)
    tasks.run_many(
        [lambda t: t.complete({held: (task.lease, b'"content"')}), lambda t: t.open_decision(held)]
    )
    if tasks.get(held).state == "COMPLETED":
        tasks.open_decision(held)
    assert tasks.claim(agent=DECISIONS)[0].payload == "content"


def test_a_purge_is_not_run_inside_a_commit(url: str, clock: ManualClock) -> None:
    tasks = Tasks.open(url, clock=clock)
    tasks.limits = TaskLimits(purge_every_s=0.0)
    tasks.enqueue(agent="a", payload=1)
    [[task]] = tasks.run_many([lambda operations: operations.claim(checked_terms("a", 1, 60.0, None))])
    assert task.payload == 1
    tasks.close()


def test_a_call_that_fails_half_way_does_not_affect_the_others(tasks: Tasks) -> None:
    def half_way(operations: TaskOperations) -> None:
        operations.enqueue([NewTask(agent="a", payload="half")])
        operations.cancel("nobody")

    whole = NewTask(agent="a", payload="whole")
    answers = tasks.run_many([lambda operations: operations.enqueue([whole]), half_way])
    assert isinstance(answers[1], UnknownTask)
    assert [line.task_id for line in tasks.find()] == answers[0]


def test_completing_can_claim_the_next_tasks_in_the_same_commit(tasks: Tasks) -> None:
    for number in range(5):
        tasks.enqueue(agent="a", payload=number)
    [first] = tasks.claim(agent="a", worker="w", lease_s=60.0)
    before = len(tasks.events())
    following = tasks.complete(first.task_id, first.lease, "done", claim_next=2)
    assert [task.payload for task in following] == [1, 2]
    assert [task.lease_s for task in following] == [60.0, 60.0]
    assert {tasks.get(task.task_id).worker for task in following} == {"w"}
    new = tasks.events()[before:]
    assert [event.kind for event in new] == ["execution_completed", "dequeued", "dequeued"]
    last = tasks.complete_many([(task.task_id, task.lease, None) for task in following], claim_next=10)
    assert [task.payload for task in last] == [3, 4]
    with pytest.raises(StaleLease):
        tasks.complete(last[0].task_id, last[0].lease + 100, claim_next=1)
    for wrong in (-1, 1_001, "1", True):
        with pytest.raises(InvalidMessage, match="claim_next must be from 0 to 1000"):
            tasks.complete(last[0].task_id, last[0].lease, claim_next=wrong)  # type: ignore[arg-type]


# ---- keeping ---------------------------------------------------------------------------------------


def test_finished_tasks_stay_7_days_and_dead_letters_90(url: str, clock: ManualClock) -> None:
    tasks = Tasks.open(url, clock=clock)
    done, dead, waiting = (tasks.enqueue(agent="a", payload=number, max_retries=0) for number in range(3))
    tasks.complete(done, take(tasks).lease)
    tasks.fail(dead, take(tasks).lease, "no")

    def kept_after(days: int) -> set[str]:
        clock.advance(days * DAY_S)
        tasks.purge()
        return {line.task_id for line in tasks.find()}

    assert kept_after(6) == {done, dead, waiting}
    assert kept_after(2) == {dead, waiting}
    assert kept_after(81) == {dead, waiting}
    assert kept_after(2) == {waiting}
    assert tasks.status().totals == {"pending": 1}
    tasks.close()


def test_the_retention_can_be_set(url: str, clock: ManualClock) -> None:
    tasks = Tasks.open(url, clock=clock, retention=Retention(finished_s=10, dead_s=20, keys_s=30))
    first = tasks.enqueue(agent="a", payload=1, idempotency_key="k")
    tasks.complete(first, take(tasks).lease)
    clock.advance(11)
    tasks.purge()
    assert tasks.find() == []
    assert tasks.enqueue(agent="a", payload=1, idempotency_key="k") == first  # its key is known for longer
    clock.advance(20)
    tasks.purge()
    assert tasks.enqueue(agent="a", payload=1, idempotency_key="k") != first
    tasks.close()


def test_claims_purge_expired_tasks(url: str, clock: ManualClock) -> None:
    tasks = Tasks.open(url, clock=clock, retention=Retention(finished_s=1))
    tasks.limits = TaskLimits(purge_every_calls=5)
    for number in range(20):
        tasks.enqueue(agent="a", payload=number)
        tasks.complete(*_ids(take(tasks)))
        clock.advance(1)
    assert len(tasks.find()) < 10
    tasks.close()


def _ids(task: LeasedTask) -> tuple[str, int]:
    return task.task_id, task.lease


# ---- life ------------------------------------------------------------------------------------------


def test_a_closed_queue_can_be_used_again(tasks: Tasks) -> None:
    task_id = tasks.enqueue(agent="a", payload=1)
    tasks.close()
    assert tasks.get(task_id).status == "pending"
    tasks.reopen()
    assert take(tasks).task_id == task_id


def test_the_durability_of_a_task_is_its_own_or_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(monkeypatch)
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as plain:
        plain.enqueue(agent="a", payload=1)
        assert disk.calls == 0
        plain.enqueue(agent="a", payload=1, durability="fsync")
        assert disk.calls == 1
        plain.limit_queue("careful", durability="group")
        plain.enqueue(agent="careful", payload=1)
        assert disk.calls == 2
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db", durability="group") as careful:
        careful.enqueue(agent="a", payload=1)
        assert disk.calls == 3
        careful.enqueue(agent="a", payload=1, durability="os")
        assert disk.calls == 3


def test_children_use_the_tasks_that_they_inherit(on_disk: Tasks, no_child_left: None) -> None:
    on_disk.enqueue(agent="a", payload="parent's")
    on_disk.claim(agent="a", wait_s=0.01)

    def child() -> None:
        for number in range(20):
            on_disk.enqueue(agent="b", payload=number)
        while claimed := on_disk.claim(agent="b", limit=3):
            on_disk.complete_many([(task.task_id, task.lease, None) for task in claimed])
        on_disk.close()

    children.run(*[child] * 4)
    assert on_disk.status().totals == {"claimed": 1, "completed": 80}
    check_consistency(on_disk.store)


def test_an_id_of_another_agents_task_is_refused_and_stores_nothing(tasks: Tasks) -> None:
    """A task dropped as a duplicate would be lost silently."""
    tasks.enqueue(agent="a", payload=1, task_id="job")
    before = tasks.events()
    with pytest.raises(InvalidMessage, match="is taken by a task of another agent"):
        tasks.enqueue_many([{"agent": "b", "payload": 2}, {"agent": "b", "payload": 3, "task_id": "job"}])
    assert tasks.events() == before
    assert tasks.claim(agent="b") == []


def test_only_the_harness_fills_the_queue_of_decisions(tasks: Tasks) -> None:
    with pytest.raises(InvalidMessage, match="only the harness adds tasks"):
        tasks.enqueue(agent=DECISIONS, payload="forged")
