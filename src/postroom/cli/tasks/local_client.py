"""A `TaskClient` for a data folder: its calls go to the store itself, without a server."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from postroom.calls.tasks import (
    CancelTask,
    Complete,
    EnqueueMany,
    Fail,
    FindTasks,
    Heartbeat,
    Next,
    ReadTaskStatus,
    Release,
    RetryTask,
    ShowTask,
)
from postroom.cli.shell import StoreAddress
from postroom.client.connections import Call, Connections
from postroom.client.tasks import TaskClient
from postroom.contracts.tasks.tasks import LeasedTask, Tasks
from postroom.errors import HandleDead, InvalidMessage

_OF_ONE_TASK: dict[Any, Callable[[Tasks, str, Any], Any]] = {
    Complete: lambda tasks, task_id, verb: {
        "tasks": tasks.complete(task_id, verb.lease, verb.decision, claim_next=verb.claim_next)
    },
    Heartbeat: lambda tasks, task_id, verb: tasks.heartbeat(task_id, verb.lease),
    Fail: lambda tasks, task_id, verb: tasks.fail(task_id, verb.lease, verb.error, verb.retry_in_s),
    Release: lambda tasks, task_id, verb: tasks.release(task_id, verb.lease),
    CancelTask: lambda tasks, task_id, _: tasks.cancel(task_id),
    RetryTask: lambda tasks, task_id, _: tasks.retry(task_id),
    ShowTask: lambda tasks, task_id, verb: tasks.wait(task_id, verb.wait_s),
}
"""The answers to verbs about one task, by its id in the store."""

STOP_CHECK_S = 0.25  # how often a wait for a task checks whether the worker is stopping


class LocalClient(TaskClient):
    """`TaskClient` on a store of this machine. It needs no token: write access to the folder is enough."""

    def __init__(
        self, tasks: Tasks, agent: str, data: Path, warn: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__("http://localhost", agent, "none", **options)
        self._connections = _StoreConnection(tasks, data, warn)


class _StoreConnection(Connections):
    """Answers verbs as the routes of a server do."""

    def __init__(self, tasks: Tasks, data: Path, warn: Callable[[str], None]) -> None:
        super().__init__("http://localhost")
        self.url = tasks.store.url
        self._tasks = tasks
        self._data = data
        self._warn = warn

    def ask(self, call: Call) -> Any:
        try:
            return msgspec.to_builtins(self._answer(call))
        except HandleDead:
            self._tasks.reopen()
            raise

    def _answer(self, call: Call) -> Any:
        tasks = self._tasks
        verb: Any = call.verb
        match verb:
            case Next():
                return {"tasks": self._claim(call, verb)}
            case EnqueueMany(tasks=new):
                return {"task_ids": self._enqueue(new)}
            case FindTasks(agent=agent, state=state, after=after, limit=limit):
                found = tasks.find(agent=agent or None, state=state or None, after=after, limit=limit)
                return {"tasks": found}
            case ReadTaskStatus():
                return tasks.status()
        of_one_task = _OF_ONE_TASK.get(type(verb))
        if of_one_task is None:
            raise InvalidMessage(f"{call.path} needs a harness")
        return of_one_task(tasks, self._stored(verb.task_id), verb)

    def _stored(self, task_id: str) -> str:
        """The id in the store, also by the one that a caller of an organization sees over HTTP."""
        return self._tasks.store.read(lambda transaction: transaction.ids.uncover_id(task_id))

    def _enqueue(self, new: list[Any]) -> list[str]:
        queues = self._queues({task["agent"] for task in new})
        named: list[Any] = [{**task, "agent": queues[task["agent"]]} for task in new]
        return self._tasks.enqueue_many(named)

    def _queues(self, agents: set[str]) -> dict[str, str]:
        """The queues of agents. Warns of those without a token; a folder that has no registry needs none."""
        from postroom.server.access import tokens
        from postroom.server.access.registry import FILE_NAME, Agents, Identity
        from postroom.server.access.task_names import target_of

        queues = {agent: agent for agent in agents}
        data = self._data
        if isinstance(data, StoreAddress):
            return queues
        if not any((data / name).exists() for name in (FILE_NAME, tokens.FILE_NAME)):
            return queues
        known, operator = Agents(data), Identity("", "operator")
        read = self._tasks.store.read
        for agent in sorted(agents):
            if known.orgs_of(agent):
                queues[agent] = read(partial(target_of, agents=known, caller=operator, name=agent))
            if not known.knows(queues[agent]):
                self._warn(f"warning: no token in {data} is for the agent {agent!r}: check the name")
        return queues

    def _claim(self, call: Call, claim: Next) -> list[LeasedTask]:
        """Wait in short pieces, so that a worker that is stopping does not wait to the end."""
        if not claim.agent:
            raise click.UsageError("--data needs --agent, the agent whose tasks are claimed")
        deadline = time.monotonic() + claim.wait_s
        while True:
            claimed = self._tasks.claim(
                agent=claim.agent,
                limit=claim.limit,
                lease_s=claim.lease_s,
                wait_s=min(STOP_CHECK_S, max(0.0, deadline - time.monotonic())),
                worker=claim.worker,
            )
            if claimed or call.aborted or time.monotonic() >= deadline:
                return claimed

    def close(self) -> None:
        """Nothing to close here: the caller closes the store."""
