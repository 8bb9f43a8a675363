"""For operators: look at queues and tasks, retry and cancel."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.render import rfc3339, warn
from postroom.cli.shell import Shell, parse_time
from postroom.cli.tasks.options import task_argument, where_options
from postroom.cli.tasks.places import open_place
from postroom.errors import UnknownTask, WrongState

if TYPE_CHECKING:
    from postroom.client import TaskClient

LIST_DEFAULT = 100
PAGE = 1_000  # tasks that are read at once
STATES = (
    "SCHEDULED", "QUEUED", "PROCESSING", "RETRYING", "COMPLETED", "EXECUTING", "DONE", "DEAD_LETTER",
    "CANCELLED", "EXPIRED", "QUARANTINED",
)  # fmt: skip
STATUSES = {
    "pending": ("SCHEDULED", "QUEUED", "RETRYING"),
    "claimed": ("PROCESSING",),
    "completed": ("COMPLETED", "EXECUTING"),
    "done": ("DONE",),
    "failed": ("DEAD_LETTER",),
    "cancelled": ("CANCELLED",),
    "expired": ("EXPIRED",),
    "quarantined": ("QUARANTINED",),
}  # as in the contract, which --help must not import


@click.command()
@where_options
@click.pass_obj
def status(shell: Shell, /, **where: Any) -> None:
    """Show the state of every queue.

    For each agent: the depth of its queue and the age of the oldest task, the tasks in flight and their lease
    holders, and how many leases have lapsed.

    \b
    Example:
      postroom tasks status --data run
      postroom tasks status --url http://127.0.0.1:8800 | jq .agents.triage.depth
    """
    from postroom.calls.tasks import ReadTaskStatus

    with open_place(shell, **where) as place:
        facts = place.call(ReadTaskStatus())
    if not shell.output.readable:
        shell.output.json_line(facts)
        return
    rows = [{"agent": name, **queue} for name, queue in facts["agents"].items()]
    for row in rows:
        row["oldest_age_s"] = None if row["oldest_age_s"] is None else f"{row['oldest_age_s']:.1f}"
    columns = ["agent", "depth", "oldest_age_s", "in_flight", "holders", "lapses", "states"]
    shell.output.rows(columns, rows, empty="there is no task yet")
    if facts.get("events_waiting") is not None:
        shell.output.facts({}, f"{facts['events_waiting']} events wait for the audit stream")


@click.command()
@task_argument
@where_options
@click.pass_obj
def show(shell: Shell, /, task_id: str, **where: Any) -> None:
    """Show everything about a task, with its whole history.

    \b
    Example:
      postroom tasks show t-1 --data run
    """
    from postroom.calls.tasks import ShowTask
    from postroom.core.times import EPOCH, MICROSECOND

    with open_place(shell, **where) as place:
        task = place.call(ShowTask(task_id=task_id))
    task["history"] = [
        {"at": rfc3339(EPOCH + event["ts_us"] * MICROSECOND), **event} for event in task["history"]
    ]
    if not shell.output.readable:
        shell.output.json_line(task)
        return
    history = task.pop("history")
    shell.output.record([task.pop("task_id"), task.pop("agent"), task.pop("status")], task, "")
    rows = [{**event, "error": event.get("error")} for event in history]
    shell.output.rows(["seq", "at", "kind", "state", "attempt", "worker_id", "error"], rows, empty="")


def parse_states(text: str) -> tuple[str, ...]:
    """The states of a status in lower case, or one state in any case."""
    if text in STATUSES:
        return STATUSES[text]
    if text.upper() in STATES:
        return (text.upper(),)
    known = f"a status is one of {', '.join(STATUSES)}, a state one of {', '.join(STATES)}"
    raise click.BadParameter(f"{text!r} is neither a status nor a state: {known}")


@click.command(name="list")
@where_options
@click.option("--agent", metavar="NAME", help="Only tasks of this agent.")
@click.option(
    "--state",
    "states",
    type=parse_states,
    metavar="STATE",
    help=f"Only tasks in this state ({', '.join(STATES)}), or of this status ({', '.join(STATUSES)}).",
)
@click.option(
    "--after",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    metavar="SEQ",
    help="Start after the task of this number.",
)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=LIST_DEFAULT, show_default=True, metavar="N",
    help="List at most N tasks.",
)  # fmt: skip
@click.pass_obj
def list_tasks(
    shell: Shell, /, states: tuple[str, ...] | None, agent: str | None, after: int, limit: int, **where: Any
) -> None:
    """List tasks, in the order they were accepted.

    The status is a short word (pending, claimed, completed, done, failed); the state is more exact. --state
    takes either.

    \b
    Example:
      postroom tasks list --data run --agent triage
      postroom tasks list --data run --state pending
      postroom tasks list --data run --state DEAD_LETTER
    """
    with open_place(shell, **where) as place:
        pages = [find(place, agent, state, after, limit) for state in states or (None,)]
    rows = sorted((row for page in pages for row in page), key=lambda row: row["seq"])[:limit]
    columns = ["seq", "task_id", "agent", "status", "state", "attempt", "created_at"]
    shell.output.rows(columns, rows, empty="there is no such task")


@click.command()
@click.argument("task_id", metavar="TASK_ID", required=False)
@where_options
@click.option("--all-dead", is_flag=True, help="Retry every dead letter, instead of one task.")
@click.option("--agent", metavar="NAME", help="Only dead letters of this agent.")
@click.option(
    "--since",
    type=parse_time,
    metavar="TIME",
    help="Only tasks that became dead letters since TIME (RFC 3339).",
)
@click.pass_obj
def retry(
    shell: Shell, /, task_id: str | None, all_dead: bool, agent: str | None, since: Any, **where: Any
) -> None:
    """Put a task that ended without a result back into its queue.

    Takes a task in the state DEAD_LETTER, CANCELLED, EXPIRED or QUARANTINED; any other is refused. The task
    is QUEUED again, at the end of its queue. Its retry count starts at 0, so it has all its retries again;
    its attempt number still increases, and its errors and history stay.

    With --all-dead, --agent or --since instead of a TASK_ID, the command retries every matching dead letter,
    but no cancelled or expired task. It prints a line for each, and at the end how many were retried and how
    many were skipped because another program changed them meanwhile.

    \b
    Example:
      postroom tasks retry t-1 --data run
      postroom tasks retry --all-dead --data run
      postroom tasks retry --agent triage --since 2026-11-17T08:00:00Z --data run
    """
    from postroom.calls.tasks import RetryTask

    many = all_dead or agent is not None or since is not None
    if many == (task_id is not None):
        raise click.UsageError("give one TASK_ID, or say which dead letters: --all-dead, --agent, --since")
    with open_place(shell, **where) as place:
        if task_id is not None:
            place.call(RetryTask(task_id=task_id))
            print_retried(shell, task_id)
            return
        retried = skipped = 0
        for dead_letter in dead_letters(place, agent, since):
            try:
                place.call(RetryTask(task_id=dead_letter))
            except (WrongState, UnknownTask) as error:  # another program changed it meanwhile
                warn(shell.program, f"warning: {error}")
                skipped += 1
            else:
                print_retried(shell, dead_letter)
                retried += 1
    counts = f"{retried} dead letters were queued again, {skipped} were skipped"
    shell.output.facts({"retried": retried, "skipped": skipped}, counts)


def print_retried(shell: Shell, task_id: str) -> None:
    shell.output.facts({"task_id": task_id, "action": "retry"}, f"{task_id} is queued, with all its retries")


def find(
    place: "TaskClient", agent: str | None, state: str | None, after: int, limit: int
) -> list[dict[str, Any]]:
    from postroom.calls.tasks import FindTasks

    given: dict[str, Any] = {"agent": agent, "state": state}
    named = {name: value for name, value in given.items() if value is not None}
    found: list[dict[str, Any]] = place.call(FindTasks(**named, after=after, limit=limit))["tasks"]
    return found


def dead_letters(place: "TaskClient", agent: str | None, since: Any) -> Iterator[str]:
    """The ids of dead letters, in the order the tasks were accepted."""
    from postroom.core.times import parse_utc

    after = 0
    while page := find(place, agent, "DEAD_LETTER", after, PAGE):
        for line in page:
            if since is None or parse_utc(line["ended_at"]) >= since:
                yield line["task_id"]
        after = page[-1]["seq"]


@click.command()
@task_argument
@where_options
@click.pass_obj
def cancel(shell: Shell, /, task_id: str, **where: Any) -> None:
    """Cancel a task. A worker that has claimed it loses its lease.

    \b
    Example:
      postroom tasks cancel t-1 --data run
    """
    from postroom.calls.tasks import CancelTask

    with open_place(shell, **where) as place:
        place.call(CancelTask(task_id=task_id))
    shell.output.facts({"task_id": task_id, "action": "cancel"}, f"{task_id} is cancelled")


COMMANDS = (status, show, list_tasks, retry, cancel)
