"""Where the tasks are: in a data folder, or at a harness with an address."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postroom.cli.places import check_place, needed_token, store_in
from postroom.cli.render import warn
from postroom.cli.shell import Shell

if TYPE_CHECKING:
    from postroom.client import TaskClient


@contextmanager
def open_place(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None = None,
    *,
    create: bool = False,
    **options: Any,
) -> Iterator["TaskClient"]:
    """A client of the tasks: of a harness, or of a data folder."""
    data = shell.default_place(data, url)
    check_place(data, url, "tasks")
    if data is None:
        from postroom.client import TaskClient

        with TaskClient(str(url), agent or "", needed_token(token), **options) as client:
            yield client
        return
    from postroom.cli.tasks.local_client import LocalClient
    from postroom.contracts.tasks.tasks import Tasks

    shell.show_warnings()
    with Tasks.open(store_in(shell, data, "tasks", create=create)) as tasks:
        yield LocalClient(tasks, agent or "", data, partial(warn, shell.program), **{"retries": 0, **options})


def store_tasks(place: "TaskClient", tasks: list[dict[str, Any]], shell: Shell) -> list[str]:
    """Store tasks, all or none, and return their ids."""
    import uuid

    from postroom.calls.tasks import EnqueueMany
    from postroom.cli.tasks.local_client import LocalClient

    new: list[Any] = tasks
    if not isinstance(place, LocalClient):
        # The ids are made here, so that the call can be repeated: the same id stores one task.
        named = [{**task, "task_id": task.get("task_id") or f"t-{uuid.uuid4().hex}"} for task in tasks]
        new = [{key: value for key, value in task.items() if value is not None} for task in named]
    answer = place.call(EnqueueMany(tasks=new))
    if answer.get("warning"):
        warn(shell.program, f"warning: {answer['warning']}")
    return list(answer["task_ids"])


def claimed_fields(task: Any) -> dict[str, Any]:
    """A claimed task as `next` prints it and a program gets it."""
    names = ("task_id", "payload", "lease", "attempt", "type", "parent", "lease_s")
    return {name: getattr(task, name) for name in names}
