"""For agents: claim tasks, report about them, or run a program for each."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.program import CannotRun, ProgramFailed, Programs
from postroom.cli.render import OutputFailed
from postroom.cli.server_options import HOST_DEFAULT, PORT
from postroom.cli.shell import Shell, parse_wait
from postroom.cli.tasks.options import (
    agent_option,
    lease_s_option,
    leased_options,
    read_json,
    where_options,
)
from postroom.cli.tasks.places import claimed_fields, open_place

if TYPE_CHECKING:
    from postroom.client import Task, TaskEnd

# As in the contract and in the client, which --help must not import.
LEASE_S_DEFAULT = 300.0
LEASE_AT_WORK_S_DEFAULT = 75.0
POLL_EVERY_S_DEFAULT = 10.0
GRACE_S_DEFAULT = 20.0


@click.command(name="next")
@where_options
@agent_option
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N",
    help="Claim at most N tasks.",
)  # fmt: skip
@click.option(
    "--wait-s", type=parse_wait, default=0.0, metavar="S", help="Wait up to S seconds for the first task."
)
@lease_s_option(LEASE_S_DEFAULT)
@click.option("--worker", metavar="NAME", help="The name of the lease holder, for `status`.")
@click.pass_obj
def next_tasks(
    shell: Shell, /, agent: str | None, worker: str | None, limit: int, wait_s: float, lease_s: float,
    **where: Any,
) -> None:  # fmt: skip
    """Claim the next task and print it.

    Prints nothing when no task is ready. Every later call about the task needs its lease.

    \b
    Example:
      postroom tasks next --data run --agent triage
      postroom tasks next --url http://127.0.0.1:8800 --agent triage --wait-s 30
    """
    holder = worker if where["url"] else worker or agent
    with open_place(shell, **where, agent=agent, worker=holder) as place:
        claimed = [claimed_fields(task) for task in place.next_tasks(limit, wait_s, lease_s)]
    for task in claimed:
        if not shell.output.readable:
            shell.output.json_line(task)
            continue
        facts = {name: task[name] for name in ("lease", "attempt", "type", "parent")}
        payload = json.dumps(task["payload"], indent=2, ensure_ascii=False)
        shell.output.record([task["task_id"]], facts, payload)


@click.command()
@leased_options
@click.option("--decision", metavar="JSON", help="The result.  [default: null]")
@click.option("--decision-file", metavar="FILE", help="Read the result from a file; - is stdin.")
@click.pass_obj
def complete(
    shell: Shell, /, task_id: str, lease: int, decision: str | None, decision_file: str | None, **where: Any
) -> None:
    """Complete a task with a decision.

    \b
    Example:
      postroom tasks complete t-1 --data run --lease 17 --decision '{"label": "bug"}'
    """
    result = read_json("--decision", decision, decision_file, default=None)
    with open_place(shell, **where) as place:
        place.complete_task(task_id, result, lease=lease)
    shell.output.facts({"task_id": task_id, "action": "complete"}, f"{task_id} is complete")


@click.command()
@leased_options
@click.pass_obj
def heartbeat(shell: Shell, /, task_id: str, lease: int, **where: Any) -> None:
    """Renew the lease of a task.

    The lease runs its whole length from now.

    \b
    Example:
      postroom tasks heartbeat t-1 --data run --lease 17
    """
    with open_place(shell, **where) as place:
        place.heartbeat(task_id, lease=lease)
    shell.output.facts({"task_id": task_id, "action": "heartbeat"}, f"the lease of {task_id} is renewed")


@click.command()
@leased_options
@click.option("--error", required=True, metavar="TEXT", help="Why it failed.")
@click.option(
    "--retry-in-s",
    type=parse_wait,
    metavar="S",
    help="Seconds until the retry.  [default: a pause that grows with each retry]",
)
@click.pass_obj
def fail(
    shell: Shell, /, task_id: str, lease: int, error: str, retry_in_s: float | None, **where: Any
) -> None:
    """Report that a task failed.

    The task is retried after a pause, or becomes a dead letter.

    \b
    Example:
      postroom tasks fail t-1 --data run --lease 17 --error "no such label" --retry-in-s 60
    """
    with open_place(shell, **where) as place:
        place.fail_task(task_id, error, retry_in_s, lease=lease)
    shell.output.facts({"task_id": task_id, "action": "fail"}, f"{task_id} has failed")


@click.command()
@leased_options
@click.pass_obj
def release(shell: Shell, /, task_id: str, lease: int, **where: Any) -> None:
    """Give a task back without working on it.

    The task keeps its place in the queue, and no failure is counted.

    \b
    Example:
      postroom tasks release t-1 --data run --lease 17
    """
    with open_place(shell, **where) as place:
        place.release_task(task_id, lease=lease)
    shell.output.facts({"task_id": task_id, "action": "release"}, f"{task_id} is queued again")


# ---- a program as an agent -----------------------------------------------------------------------------


@click.command()
@where_options
@click.option("--agent", required=True, metavar="NAME", help="The agent whose tasks are claimed.")
@click.option(
    "--exec",
    "command",
    required=True,
    metavar="CMD",
    help="A shell command that gets the task as JSON on its stdin and prints the decision as JSON. Any exit "
    "code but 0 fails the task, with the last lines of stderr as the error; 126 and 127 (the command cannot "
    "be executed, or does not exist) end the worker instead.",
)
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N",
    help="How many tasks are handled at the same time.",
)  # fmt: skip
@lease_s_option(LEASE_AT_WORK_S_DEFAULT)
@click.option("--nudge-port", type=PORT, metavar="N", help="Listen on this port for nudges of the harness.")
@click.option(
    "--nudge-host",
    default=HOST_DEFAULT,
    show_default=True,
    metavar="HOST",
    help="Where --nudge-port listens.",
)
@click.option(
    "--poll-every-s", type=parse_wait, default=POLL_EVERY_S_DEFAULT, show_default=True, metavar="S",
    help="How often to look for tasks without a nudge.",
)  # fmt: skip
@click.option(
    "--grace-s", type=parse_wait, default=GRACE_S_DEFAULT, show_default=True, metavar="S",
    help="How long programs may run after SIGTERM; then they are ended, and their tasks released.",
)  # fmt: skip
@click.option("--until-empty", is_flag=True, help="End when the queue is empty.")
@click.option(
    "--worker",
    metavar="NAME",
    help="The name of the lease holder, for `status`.  [default: machine and process]",
)
@click.pass_obj
def work(
    shell: Shell, /, data: Path | None, url: str | None, agent: str, token: str | None, command: str,
    poll_every_s: float, worker: str | None, **terms: Any,
) -> None:  # fmt: skip
    """Be an agent: run a program for every task, and print a line about each.

    Works through a harness, or on a data folder without one. Heartbeats are sent while the program runs.
    After SIGTERM the running programs may finish. When a worker is killed, its programs are killed, too.

    \b
    Example:
      export POSTROOM_TOKEN=pr_...
      postroom tasks work --url http://127.0.0.1:8800 --agent triage --exec './triage.py'
      postroom tasks work --data run --agent echo --exec 'jq .payload' --until-empty
    """
    from postroom.client import StopWork, TaskFailed
    from postroom.client.calls import RETRIES
    from postroom.core.names import checked_name

    def handler(task: "Task") -> Any:
        try:
            return programs.run(command, claimed_fields(task), task.lost)
        except CannotRun as error:
            raise StopWork(f"the program cannot be run, and no task has failed: {error}") from None
        except ProgramFailed as error:
            raise TaskFailed(str(error)) from None

    shell.show_warnings()
    programs = Programs()
    if url is None:
        checked_name("agent", agent)
    options: dict[str, Any] = {"poll_every_s": poll_every_s, "worker": worker, "retries": RETRIES}
    with open_place(shell, data, url, token, agent, **options) as client, programs:
        try:
            client.work(handler, on_end=end_printer(shell, agent), **terms)
        except StopWork as error:
            raise click.ClickException(str(error)) from None


def end_printer(shell: Shell, agent: str) -> "Callable[[TaskEnd], None]":
    """A function that prints a line for each task that a worker has ended."""
    mutex = threading.Lock()

    def print_end(end: "TaskEnd") -> None:
        facts = {
            "task_id": end.task.task_id, "agent": agent, "attempt": end.task.attempt,
            "outcome": end.outcome, "duration_s": round(end.duration_s, 3),
        }  # fmt: skip
        sentence = f"{end.task.task_id}  {end.outcome}  attempt {end.task.attempt}  {end.duration_s:.1f} s"
        if end.error:
            facts["error"] = end.error
            sentence += f"  {end.error.splitlines()[0]}"
        # The work continues when the reader of the lines has closed the pipe.
        with mutex, suppress(OSError, OutputFailed):
            shell.output.facts(facts, sentence)
            shell.output.flush()

    return print_end


COMMANDS = (next_tasks, complete, heartbeat, fail, release, work)
