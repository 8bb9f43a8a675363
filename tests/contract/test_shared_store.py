"""`Engine` and `Tasks` in one store: each sees its own messages only, and both are woken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, Tasks, UnknownTask, open_store
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.message import ENGINE_PREFIX
from postroom.server.access.registry import Agents
from postroom.server.harness.followers import ResultFollower
from postroom.server.harness.harness import Harness
from tests.engines import EngineUnderTest


class Both:
    """An engine and the task queues of its store."""

    def __init__(self, url: str) -> None:
        self.test = EngineUnderTest(url)
        self.engine = self.test.engine
        self.tasks = Tasks(self.engine.store)

    def submit(self, **fields: Any) -> str:
        return self.test.submit(**fields).message_id

    def complete_message(self) -> str:
        message_id = self.submit()
        self.test.complete(self.test.claim())
        return message_id


@pytest.fixture(params=["memory", "sqlite"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'queue.db'}"
    opened = Both(url)
    yield opened
    opened.tasks.close()
    opened.test.close()


def test_the_commits_of_one_store_wake_both_contracts(both: Both) -> None:
    woken: list[str] = []
    with (
        both.tasks.notifier.subscribed("triage", lambda: woken.append("agent")),
        both.engine.core.wakeups.listening_for_work(lambda: woken.append("engine")),
    ):
        both.submit()
        assert set(woken) == {"engine"}
        both.tasks.enqueue(agent="triage", payload=1)
        assert set(woken) == {"engine", "agent"}


def test_every_listener_of_a_store_is_called() -> None:
    store = open_store("memory://")
    called: list[int] = []
    for number in range(3):
        store.add_commit_listener(lambda _, number=number: called.append(number))  # type: ignore[misc]
    store.write(lambda transaction: transaction.emit("alert"))
    assert called == [0, 1, 2]


def test_status_and_lists_of_tasks_leave_messages_out(both: Both) -> None:
    both.submit()
    task_ids = [both.tasks.enqueue(agent=agent, payload=1) for agent in ("a", "b", "a")]
    both.submit(org_id="other")
    assert list(both.tasks.status().agents) == ["a", "b"]
    assert [line.task_id for line in both.tasks.find()] == task_ids
    assert [line.task_id for line in both.tasks.find(limit=2)] == task_ids[:2]
    second = both.tasks.find()[1].seq
    assert [line.task_id for line in both.tasks.find(after=second)] == task_ids[2:]
    assert [line.task_id for line in both.tasks.find(state="QUEUED", agent="a")] == task_ids[::2]


CALLS: dict[str, Callable[[Tasks, str, int], object]] = {
    "get": lambda tasks, message_id, _: tasks.get(message_id),
    "wait": lambda tasks, message_id, _: tasks.wait(message_id, 0),
    "heartbeat": lambda tasks, message_id, lease: tasks.heartbeat(message_id, lease),
    "complete": lambda tasks, message_id, lease: tasks.complete(message_id, lease, 1),
    "fail": lambda tasks, message_id, lease: tasks.fail(message_id, lease, "x"),
    "release": lambda tasks, message_id, lease: tasks.release(message_id, lease),
    "cancel": lambda tasks, message_id, _: tasks.cancel(message_id),
    "retry": lambda tasks, message_id, _: tasks.retry(message_id),
    "open_decision": lambda tasks, message_id, _: tasks.open_decision(message_id),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_message_is_not_a_task(both: Both, name: str) -> None:
    message_id = both.submit()
    [claimed] = both.test.claim()
    with pytest.raises(UnknownTask):
        CALLS[name](both.tasks, message_id, claimed.record.lease)
    assert both.test.wait(both.engine.get(message_id)).state == "PROCESSING"


def test_a_task_is_not_a_message(both: Both) -> None:
    task_id = both.tasks.enqueue(agent="triage", payload=1)
    for call in (both.engine.get, both.engine.explain, both.engine.cancel, both.engine.dlq.show):
        with pytest.raises(UnknownTask):
            both.test.wait(call(task_id))
    assert both.test.claim() == []
    assert both.tasks.get(task_id).state == "QUEUED"


def test_a_completed_message_becomes_no_decision(both: Both, tmp_path: Path) -> None:
    message_id = both.complete_message()
    task_id = both.tasks.enqueue(agent="triage", payload=1)
    [task] = both.tasks.claim(agent="triage")
    both.tasks.complete(task_id, task.lease, "result")
    logged: list[str] = []
    ResultFollower(both.tasks, tmp_path, lambda event, **_: logged.append(event)).open_decisions()
    assert logged == ["decision_opened"]
    assert [line.agent for line in both.tasks.find(agent=DECISIONS)] == [DECISIONS]
    assert both.test.wait(both.engine.get(message_id)).state == "COMPLETED"


def test_the_harness_executes_tasks_only(both: Both, tmp_path: Path) -> None:
    both.complete_message()
    executed: list[str] = []
    harness = Harness(
        both.tasks, agents=Agents(tmp_path), execute=lambda decision: executed.append(decision.parent)
    )
    harness.step()
    assert executed == []


def test_a_message_nudges_no_agent(both: Both, tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("acme", "http://127.0.0.1:9")
    harness = Harness(both.tasks, agents=agents, allowed_nudge_hosts=["127.0.0.1"])
    harness.step()
    both.submit(org_id="acme")
    harness.nudge_agents()
    assert harness.status().nudges_sent == harness.status().nudges_failed == 0
    assert harness._nudger.sent == 0


def test_a_sweep_of_tasks_requeues_messages(both: Both) -> None:
    message_id = both.submit()
    both.test.claim()
    both.test.clock.advance(3_600)
    assert both.tasks.sweep() == 1
    assert both.test.wait(both.engine.get(message_id)).state == "QUEUED"


def test_a_purge_of_tasks_keeps_messages(both: Both) -> None:
    message_id = both.complete_message()
    both.test.clock.advance(365 * 86_400)
    both.tasks.purge()
    assert both.test.wait(both.engine.get(message_id)).state == "COMPLETED"


def test_a_batch_with_a_message_completes_nothing(both: Both) -> None:
    both.submit()
    [claimed] = both.test.claim()
    both.tasks.enqueue(agent="triage", payload=1)
    [task] = both.tasks.claim(agent="triage")
    finished = [(task.task_id, task.lease, 1), (claimed.record.message_id, claimed.record.lease, 1)]
    with pytest.raises(UnknownTask):
        both.tasks.complete_many(finished)
    assert both.tasks.get(task.task_id).state == "PROCESSING"


def test_no_wake_up_file_is_made_for_an_organization(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        engine = Engine(tasks.store)
        engine.blocking.submit(type="tool_call", org_id="acme", payload={})
        names = [path.name for path in (tmp_path / "queue.db.bells").iterdir()]
        assert not [name for name in names if name.startswith(ENGINE_PREFIX)]
        engine.close()


def test_repeating_a_submit_with_its_id_stores_one_message(both: Both) -> None:
    fields = {"message_id": "0190163d-8694-739b-aea5-966c26f8ad91", "ordering_key": "k"}
    first, second = both.test.submit(**fields), both.test.submit(**fields)
    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.message_id == second.message_id
    assert [claimed.record.message_id for claimed in both.test.claim(5)] == [first.message_id]
