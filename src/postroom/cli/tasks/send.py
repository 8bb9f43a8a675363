"""For senders of tasks: `enqueue` and `wait`."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.shell import Shell, parse_wait
from postroom.cli.tasks.options import (
    durability_option,
    read_json,
    task_argument,
    wait_option,
    where_options,
)
from postroom.cli.tasks.places import open_place, store_tasks
from postroom.errors import InvalidMessage, reason

if TYPE_CHECKING:
    from postroom.client import TaskView

BATCH_TASKS = 1_000  # tasks of a file that are stored in one commit
BATCH_BYTES = 8 * 1024 * 1024  # of lines that go into one request
BATCH_KEYS = {
    "agent", "payload", "task_id", "delay_s", "idempotency_key", "type", "parent", "max_retries",
    "durability",
}  # fmt: skip
SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")
ENDED = (*SUCCEEDED, "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")


@click.command()
@where_options
@click.option(
    "--agent", metavar="NAME", help="The agent that gets the task. With --batch, for lines that name none."
)
@click.option("--payload", metavar="JSON", help="The payload of the task, any JSON.")
@click.option("--payload-file", metavar="FILE", help="Read the payload from a file; - is stdin.")
@click.option("--task-id", metavar="ID", help="The id; a known id is not stored again.  [default: a new id]")
@click.option("--key", "idempotency_key", metavar="TEXT", help="An idempotency key, unique for the agent.")
@click.option("--delay-s", type=parse_wait, default=0.0, metavar="S", help="Delay the task by S seconds.")
@click.option("--type", "kind", default="", metavar="TYPE", help="The type of the task.")
@click.option("--parent", default="", metavar="ID", help="The id of the parent task.")
@click.option(
    "--max-retries", type=click.IntRange(0, 1000), metavar="N", help="How often to retry.  [default: 3]"
)
@durability_option("os; a harness's own with --url")
@click.option("--id-only", is_flag=True, help="Print the bare id, also into a pipe.")
@click.option("--batch", metavar="FILE", help="Store a task for each JSON line of a file; - is stdin.")
@click.option("--wait", "waits", is_flag=True, help="Wait for the result and print it.")
@wait_option
@click.pass_obj
def enqueue(
    shell: Shell, /, data: Path | None, url: str | None, token: str | None, payload: str | None,
    payload_file: str | None, kind: str, id_only: bool, batch: str | None, waits: bool,
    timeout_s: float | None, **fields: Any,
) -> None:  # fmt: skip
    """Store a task and print its id.

    With --batch each line is an object with agent and payload, and if wanted task_id, idempotency_key,
    delay_s, type, parent, max_retries, durability. With --wait the exit code is 1 when there is no result.

    \b
    Example:
      postroom tasks enqueue --data run --agent triage --payload '{"issue": 7}'
      postroom tasks enqueue --data run --agent triage --key delivery-93 --payload-file event.json
      postroom tasks enqueue --data run --agent triage --batch tasks.jsonl
      postroom tasks enqueue --data run --agent triage --payload '{"issue": 7}' --wait --timeout-s 60
    """
    if batch is not None:
        if payload is not None or payload_file is not None or waits:
            raise click.UsageError("--batch has its payloads in its lines, and does not wait for them")
        with open_place(shell, data, url, token, create=True) as place:
            for tasks in read_batch(batch, fields["agent"]):
                print_ids(shell, store_tasks(place, tasks, shell), id_only)
        return
    if fields["agent"] is None:
        raise click.UsageError("Missing option '--agent'")
    task = {**fields, "type": kind, "payload": read_json("--payload", payload, payload_file)}
    with open_place(shell, data, url, token, create=True) as place:
        task_ids = store_tasks(place, [task], shell)
        ended = place.wait(task_ids[0], timeout_s) if waits else None
    if ended is None:
        print_ids(shell, task_ids, id_only)
    else:
        print_end(shell, ended)


def read_batch(file: str, agent: str | None) -> Iterator[list[dict[str, Any]]]:
    """The tasks of a file of JSON lines, in batches for one commit each."""
    with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as lines:
        tasks: list[dict[str, Any]] = []
        size = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            tasks.append(batch_line(number, line, agent))
            size += len(line)
            if len(tasks) == BATCH_TASKS or size >= BATCH_BYTES:
                yield tasks
                tasks, size = [], 0
        if tasks:
            yield tasks


def batch_line(number: int, line: bytes, agent: str | None) -> dict[str, Any]:
    import msgspec

    from postroom.core.fieldfaults import field_fault

    try:
        task = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise InvalidMessage(field_fault(error, f"line {number} of --batch")) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"line {number} of --batch is not a JSON object: {reason(error)}") from None
    for name in task.keys() - BATCH_KEYS:
        raise InvalidMessage(f"line {number} of --batch has an unknown field {name!r}")
    if "payload" not in task:
        raise InvalidMessage(f"line {number} of --batch has no payload")
    if agent is None and "agent" not in task:
        raise InvalidMessage(f"line {number} of --batch names no agent, and there is no --agent")
    return task if "agent" in task else {"agent": agent, **task}


def print_ids(shell: Shell, task_ids: list[str], id_only: bool) -> None:
    for task_id in task_ids:
        if id_only or shell.output.readable:
            shell.output.sentence(task_id)
        else:
            shell.output.json_line({"task_id": task_id})


@click.command()
@task_argument
@where_options
@wait_option
@click.pass_obj
def wait(shell: Shell, /, task_id: str, timeout_s: float | None, **where: Any) -> None:
    """Wait until a task has ended and print its result.

    The exit code is 0 when there is a result, and 1 when the task failed, was cancelled, or has not ended in
    time.

    \b
    Example:
      postroom tasks wait t-1 --data run --timeout-s 60
    """
    with open_place(shell, **where) as place:
        ended = place.wait(task_id, timeout_s)
    print_end(shell, ended)


def print_end(shell: Shell, ended: "TaskView") -> None:
    """Print the end or the current status of a task; raises when there is no result."""
    import msgspec

    task = msgspec.to_builtins(ended)
    facts = {name: task[name] for name in ("task_id", "agent", "status", "state", "result", "errors")}
    if shell.output.readable:
        result = json.dumps(task["result"], indent=2, ensure_ascii=False)
        head = [task["task_id"], task["agent"], task["status"]]
        shell.output.record(head, {"errors": task["errors"]}, result if task["state"] in SUCCEEDED else "")
    else:
        shell.output.json_line(facts)
    if task["state"] not in SUCCEEDED:
        shell.output.flush()
        how = "ended as" if task["state"] in ENDED else "has not ended: it is"
        raise click.ClickException(f"task {task['task_id']} {how} {task['status']}")


COMMANDS = (enqueue, wait)
