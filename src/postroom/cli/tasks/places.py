"""Where the tasks are: in a data folder, or at a harness with an address."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.render import warn
from postroom.cli.shell import Shell, StoreAddress

if TYPE_CHECKING:
    from postroom.client import TaskClient
    from postroom.contracts.tasks.tasks import Tasks

DATABASE = "queue.db"


class Folder:
    """The tasks of a data folder."""

    def __init__(self, shell: Shell, data: Path, tasks: "Tasks") -> None:
        self._shell = shell
        self._data = data
        self._tasks = tasks

    def enqueue(self, tasks: list[dict[str, Any]]) -> list[str]:
        queues = self._queues({task["agent"] for task in tasks})
        new: list[Any] = [{**task, "agent": queues[task["agent"]]} for task in tasks]
        return self._tasks.enqueue_many(new)

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
        known, operator = Agents(self._data), Identity("", "operator")
        read = self._tasks.store.read
        for agent in sorted(agents):
            if known.orgs_of(agent):
                queues[agent] = read(partial(target_of, agents=known, caller=operator, name=agent))
            if not known.knows(queues[agent]):
                warn(
                    self._shell.program,
                    f"warning: no token in {self._data} is for the agent {agent!r}: check the name",
                )
        return queues

    def _stored(self, task_id: str) -> str:
        """The id in the store, also by the one that a caller of an organization sees over HTTP."""
        return self._tasks.store.read(lambda transaction: transaction.ids.uncover_id(task_id))

    def wait(self, task_id: str, timeout_s: float | None) -> dict[str, Any]:
        return _builtins(self._tasks.wait(self._stored(task_id), timeout_s))

    def claim(self, agent: str | None, worker: str | None, **terms: Any) -> list[dict[str, Any]]:
        if agent is None:
            raise click.UsageError("--data needs --agent, the agent whose tasks are claimed")
        return [claimed_fields(task) for task in self._tasks.claim(agent=agent, worker=worker, **terms)]

    def report(self, verb: str, task_id: str, lease: int, fields: dict[str, Any]) -> None:
        """A call of the lease holder: complete, heartbeat, fail or release."""
        getattr(self._tasks, verb)(self._stored(task_id), lease, **fields)

    def operate(self, verb: str, task_id: str) -> None:
        """A call of an operator: retry or cancel."""
        getattr(self._tasks, verb)(self._stored(task_id))

    def status(self) -> dict[str, Any]:
        return _builtins(self._tasks.status())

    def show(self, task_id: str) -> dict[str, Any]:
        return _builtins(self._tasks.get(self._stored(task_id)))

    def find(self, **filters: Any) -> list[dict[str, Any]]:
        return [_builtins(line) for line in self._tasks.find(**filters)]


class Remote:
    """The tasks of a harness, over HTTP."""

    def __init__(self, shell: Shell, client: "TaskClient", agent: str | None) -> None:
        self._shell = shell
        self._client = client
        self._agent = {} if agent is None else {"agent": agent}

    def enqueue(self, tasks: list[dict[str, Any]]) -> list[str]:
        import uuid

        # The ids are made here, so that the call can be repeated: the same id stores one task.
        named = [{**task, "task_id": task.get("task_id") or f"t-{uuid.uuid4().hex}"} for task in tasks]
        body = [{key: value for key, value in task.items() if value is not None} for task in named]
        answer = self._client.request("POST", "/queue/enqueue", {"tasks": body})
        if answer.get("warning"):
            warn(self._shell.program, f"warning: {answer['warning']}")
        return list(answer["task_ids"])

    def wait(self, task_id: str, timeout_s: float | None) -> dict[str, Any]:
        return _builtins(self._client.wait(task_id, timeout_s))

    def claim(self, _agent: str | None, _worker: str | None, **terms: Any) -> list[dict[str, Any]]:
        """`agent` and `worker` are unused here: the client was created with them."""
        return [claimed_fields(task) for task in self._client.next_tasks(**terms)]

    def report(self, verb: str, task_id: str, lease: int, fields: dict[str, Any]) -> None:
        renamed = {"decision" if key == "result" else key: value for key, value in fields.items()}
        body = {**self._agent, "task_id": task_id, "lease": lease, **renamed}
        self._client.request("POST", f"/queue/{verb}", body)

    def operate(self, verb: str, task_id: str) -> None:
        from postroom.calls.tasks import CancelTask, RetryTask

        self._client.call({"retry": RetryTask, "cancel": CancelTask}[verb](task_id=task_id))

    def status(self) -> dict[str, Any]:
        from postroom.calls.tasks import ReadTaskStatus

        return dict(self._client.call(ReadTaskStatus()))

    def show(self, task_id: str) -> dict[str, Any]:
        from postroom.calls.tasks import ShowTask

        return dict(self._client.call(ShowTask(task_id=task_id)))

    def find(self, **filters: Any) -> list[dict[str, Any]]:
        from postroom.calls.tasks import FindTasks

        given = {key: value for key, value in filters.items() if value is not None}
        return list(self._client.call(FindTasks(**given))["tasks"])


def _builtins(struct: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(struct))


def claimed_fields(task: Any) -> dict[str, Any]:
    """A claimed task as `next` prints it and a program gets it."""
    names = ("task_id", "payload", "lease", "attempt", "type", "parent", "lease_s")
    return {name: getattr(task, name) for name in names}


# ---- opening -------------------------------------------------------------------------------------------


@contextmanager
def open_place(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None = None,
    *,
    worker: str | None = None,
    create: bool = False,
) -> Iterator[Folder | Remote]:
    data = shell.default_place(data, url)
    check_place(data, url)
    if data is not None:
        shell.show_warnings()
        place = shell.store_place(data)
        if create and not isinstance(place, StoreAddress) and not (place / DATABASE).exists():
            warn(shell.program, f"warning: there was no store in {place}: a new one is made")
        with open_folder(place, create=create) as tasks:
            yield Folder(shell, data, tasks)
        return
    with open_client(str(url), agent or "", token, worker=worker) as client:
        yield Remote(shell, client, agent)


def check_place(data: Path | None, url: str | None, what: str = "tasks") -> None:
    if data is not None and url is not None:
        raise click.UsageError(f"--data and --url name two places for the {what}: give one of them")
    if data is None and url is None:
        raise click.UsageError(f"say where the {what} are: --data DIR, or --url URL with --token TOKEN")


def open_folder(data: Path, *, create: bool = False) -> "Tasks":
    from postroom.contracts.tasks.tasks import Tasks

    if isinstance(data, StoreAddress):
        return Tasks.open(data.url)
    database = data / DATABASE
    if create:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not database.exists():
        from postroom.server.folder.layout import nothing_in

        raise nothing_in(data, "tasks")
    return Tasks.open(f"sqlite:///{database}")


def open_client(url: str, agent: str, token: str | None, **options: Any) -> "TaskClient":
    from postroom.client import TaskClient

    return TaskClient(url, agent=agent, token=needed_token(token), **options)


def needed_token(token: str | None) -> str:
    """The token for `--url`, from the option or the environment."""
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise click.UsageError(f"--url needs a token: pass --token, or set {TOKEN_VARIABLE}")
    return token
