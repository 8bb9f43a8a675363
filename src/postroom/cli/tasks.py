"""`postroom tasks`: the task queue that a harness owns.

A command works on a data folder (`--data`) or through a harness (`--url`). Both ways are the same verbs with
the same results: `Folder` speaks to the contract, `Remote` to the HTTP protocol.
"""

import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.program import TOKEN_VARIABLE, CannotRun, ProgramFailed, end_programs, run_program
from postroom.cli.render import OutputFailed, rfc3339, warn
from postroom.cli.shell import (
    HELP_OPTIONS,
    Decorated,
    Shell,
    TimeoutOption,
    add_json_option,
    parse_wait,
    path_option,
    together,
)
from postroom.errors import InvalidMessage, UnknownTask, WrongState, reason

if TYPE_CHECKING:
    from postroom.client import TaskClient, TaskEnd
    from postroom.contracts.tasks import Task, Tasks
    from postroom.runtime.agents import Agents

DATABASE = "queue.db"
HOST_DEFAULT = "127.0.0.1"
PORT_DEFAULT = 8800
BUS_MAX_BYTES_DEFAULT = 1 << 30
LEASE_S_DEFAULT = 300.0  # as the contract has it, without importing it
LEASE_AT_WORK_S_DEFAULT = 75.0  # as the client has it
BATCH_TASKS = 1_000  # of a file that go into one commit
BATCH_BYTES = 8 * 1024 * 1024  # of lines that go into one request
LEASE_S_MAX = 2_592_000.0  # as the contract has it
CONCURRENCY_DEFAULT = 4  # decisions at the same time
LIST_DEFAULT = 100
PAGE = 1_000  # of tasks that are looked at together
PORT = click.IntRange(0, 65535)
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
}  # foreman's words, as the contract has them
SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")
ENDED = (*SUCCEEDED, "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")
BATCH_KEYS = {
    "agent", "payload", "task_id", "delay_s", "idempotency_key", "type", "parent", "max_retries",
    "durability",
}  # fmt: skip


# ---- the same verbs, here and there --------------------------------------------------------------------


class Folder:
    """The tasks of a data folder."""

    def __init__(self, shell: Shell, data: Path, tasks: "Tasks") -> None:
        self._shell = shell
        self._data = data
        self.tasks = tasks

    def enqueue(self, tasks: list[dict[str, Any]]) -> list[str]:
        task_ids = self.tasks.enqueue_many(tasks)
        self._warn_of_strangers({task["agent"] for task in tasks})
        return task_ids

    def _warn_of_strangers(self, agents: set[str]) -> None:
        """Warn of agents that nobody registered. A folder without any registered agent needs none."""
        from postroom.runtime.agents import FILE_NAME, Agents

        if not (self._data / FILE_NAME).exists():
            return
        known = {agent.name for agent in Agents(self._data).list()}
        for agent in sorted(agents - known):
            warn(self._shell.program, f"warning: no agent {agent!r} is registered in {self._data}")

    def wait(self, task_id: str, timeout_s: float | None) -> dict[str, Any]:
        return _plain(self.tasks.wait(task_id, timeout_s))

    def take(self, agent: str | None, worker: str | None, **terms: Any) -> list[dict[str, Any]]:
        if agent is None:
            raise click.UsageError("--data needs --agent: whose tasks?")
        return [_given(task) for task in self.tasks.claim(agent=agent, worker=worker, **terms)]

    def say(self, verb: str, task_id: str, lease: int, facts: dict[str, Any]) -> None:
        getattr(self.tasks, verb)(task_id, lease, **facts)

    def order(self, verb: str, task_id: str) -> None:
        getattr(self.tasks, verb)(task_id)

    def status(self) -> dict[str, Any]:
        return _plain(self.tasks.status())

    def show(self, task_id: str) -> dict[str, Any]:
        return _plain(self.tasks.get(task_id))

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        return [_plain(line) for line in self.tasks.find(**wanted)]


class Remote:
    """The tasks of a harness, over HTTP."""

    def __init__(self, shell: Shell, client: "TaskClient", agent: str | None) -> None:
        self._shell = shell
        self._client = client
        self._agent = {} if agent is None else {"agent": agent}

    def enqueue(self, tasks: list[dict[str, Any]]) -> list[str]:
        import uuid

        # With an id of our own the call can be repeated: the same id stores one task.
        named = [{**task, "task_id": task.get("task_id") or f"t-{uuid.uuid4().hex}"} for task in tasks]
        wanted = [{key: value for key, value in task.items() if value is not None} for task in named]
        answer = self._client.request("POST", "/queue/enqueue", {"tasks": wanted})
        if answer.get("warning"):
            warn(self._shell.program, f"warning: {answer['warning']}")
        return list(answer["task_ids"])

    def wait(self, task_id: str, timeout_s: float | None) -> dict[str, Any]:
        return _plain(self._client.wait(task_id, timeout_s))

    def take(self, _agent: str | None, _worker: str | None, **terms: Any) -> list[dict[str, Any]]:
        """The client knows whose and by whom."""
        return [_given(task) for task in self._client.next_tasks(**terms)]

    def say(self, verb: str, task_id: str, lease: int, facts: dict[str, Any]) -> None:
        word = {"decision" if key == "result" else key: value for key, value in facts.items()}
        body = {**self._agent, "task_id": task_id, "lease": lease, **word}
        self._client.request("POST", f"/queue/{verb}", body)

    def order(self, verb: str, task_id: str) -> None:
        self._client.request("POST", f"/tasks/{_quoted(task_id)}/{verb}", {})

    def status(self) -> dict[str, Any]:
        return dict(self._client.request("GET", "/queue/status"))

    def show(self, task_id: str) -> dict[str, Any]:
        return dict(self._client.request("GET", f"/tasks/{_quoted(task_id)}"))

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({key: value for key, value in wanted.items() if value is not None})
        return list(self._client.request("GET", f"/tasks?{query}")["tasks"])


def _plain(struct: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(struct))


def _given(task: Any) -> dict[str, Any]:
    names = ("task_id", "payload", "lease", "attempt", "type", "parent", "lease_s")
    return {name: getattr(task, name) for name in names}


def _quoted(task_id: str) -> str:
    return urllib.parse.quote(task_id, safe="")


# ---- which of the two ----------------------------------------------------------------------------------


@contextmanager
def place(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None = None,
    *,
    worker: str | None = None,
    create: bool = False,
) -> Iterator[Folder | Remote]:
    """Where the tasks are: in a folder, or behind an address."""
    check_place(data, url)
    if data is not None:
        shell.show_warnings()
        if create and not (data / DATABASE).exists():
            warn(shell.program, f"warning: there was no store in {data}: a new one is made")
        with open_folder(data, create=create) as tasks:
            yield Folder(shell, data, tasks)
        return
    with open_client(str(url), agent or "", token, worker=worker) as client:
        yield Remote(shell, client, agent)


def check_place(data: Path | None, url: str | None) -> None:
    if data is not None and url is not None:
        raise click.UsageError("--data and --url name two places for the tasks: give one of them")
    if data is None and url is None:
        raise click.UsageError("say where the tasks are: --data DIR, or --url URL with --token TOKEN")


def open_folder(data: Path, *, create: bool = False) -> "Tasks":
    from postroom.contracts.tasks import Tasks

    database = data / DATABASE
    if create:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not database.exists():
        raise click.ClickException(
            f"there are no tasks in {data}: {DATABASE} is not there, and only serve and enqueue make it"
        )
    return Tasks.open(f"sqlite:///{database}")


def open_client(url: str, agent: str, token: str | None, **options: Any) -> "TaskClient":
    from postroom.client import TaskClient

    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise click.UsageError(f"--url needs a token: pass --token, or set {TOKEN_VARIABLE}")
    return TaskClient(url, agent=agent, token=token, **options)


# ---- options -------------------------------------------------------------------------------------------


FOLDER = click.Path(file_okay=False)
data_option = path_option("--data", metavar="DIR", text="The data folder of a harness.", kind=FOLDER)
needed_data_option = path_option(
    "--data", metavar="DIR", text="The data folder of the harness.", required=True, kind=FOLDER
)
url_option = click.option("--url", metavar="URL", help="The address of a harness, instead of --data.")
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help=f"The token for --url. Others can see it in a list of processes.  [default: ${TOKEN_VARIABLE}]",
)
where_options = together(data_option, url_option, token_option)
agent_option = click.option("--agent", metavar="NAME", help="Whose queue. An agent's token says it already.")
needed_agent_option = click.option("--agent", required=True, metavar="NAME", help="Whose queue.")
task_argument = click.argument("task_id", metavar="TASK_ID")
lease_option = click.option(
    "--lease", type=click.INT, required=True, metavar="N", help="The lease that came with the task."
)


def lease_s_option(default: float) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--lease-s",
        type=parse_wait,
        default=default,
        show_default=True,
        metavar="S",
        help="How long it is ours without a heartbeat.",
    )


timeout_option = click.option(
    "--timeout-s",
    cls=TimeoutOption,
    type=parse_wait,
    metavar="S",
    help="Wait at most so many seconds.  [default: until the task has ended]",
)


def durability_option(default: str) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--durability",
        type=click.Choice(["os", "group", "fsync"]),
        help="When a task counts as stored: in the page cache, or after an fsync (shared with others, or its "
        f"own).  [default: {default}]",
    )


def parse_time(text: str) -> Any:
    """An instant, as RFC 3339 has it."""
    from postroom.core.times import parse_utc

    try:
        return parse_utc(text)
    except InvalidMessage as error:
        raise click.BadParameter(str(error)) from None


def read_json(option: str, text: str | None, file: str | None, default: Any = ...) -> Any:
    """A JSON value from an option, a file or stdin."""
    import sys

    import msgspec

    if text is not None and file is not None:
        raise click.UsageError(f"give it once: {option} or {option}-file, not both")
    if text is None and file is None:
        if default is not ...:
            return default
        raise click.UsageError(f"give {option} JSON, or {option}-file FILE (- is stdin)")
    if file is not None:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    else:
        raw = os.fsencode(str(text))
    given = option if file is None else f"{option}-file"
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"{given} is not JSON: {reason(error)}") from None
    except RecursionError:
        raise InvalidMessage(f"{given} is nested too deeply") from None


# ---- the harness ---------------------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS)
def tasks() -> None:
    """The task queue of a harness and its agents.

    Every agent has a queue. A task is leased to whoever takes it; what is not heard of in time goes to
    somebody else, at least once.

    \b
    Example:
      postroom tasks enqueue --data run --agent triage --payload '{"issue": 7}'
      postroom tasks next --data run --agent triage
      postroom tasks status --data run
    """


@tasks.command()
@needed_data_option
@click.option("--host", default=HOST_DEFAULT, show_default=True, metavar="HOST", help="Where to listen.")
@click.option(
    "--port",
    type=PORT,
    default=PORT_DEFAULT,
    show_default=True,
    metavar="N",
    help="The port; 0 takes a free one.",
)
@click.option(
    "--execute",
    metavar="CMD",
    help="A command of the shell that acts on each decision: JSON with task_id, agent, payload and decision "
    "on its stdin. It has to end with 0.",
)
@click.option(
    "--allow-nudge",
    "nudge_hosts",
    multiple=True,
    metavar="HOST",
    help="A private host at which agents may be nudged. May be repeated.",
)
@click.option(
    "--bus-max-bytes",
    type=click.IntRange(1),
    default=BUS_MAX_BYTES_DEFAULT,
    show_default=True,
    metavar="N",
    help="Bytes of one bus with its archives; a post beyond that is refused.",
)
@path_option(
    "--audit",
    metavar="FOLDER",
    text="Take every event there, in a process beside; see `postroom audit ship`.",
)
@click.option(
    "--max-lease-s", "lease_s_max", type=parse_wait, default=LEASE_S_MAX, show_default=True, metavar="S",
    help="The longest lease that is given. Who asks for a longer one gets this.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=CONCURRENCY_DEFAULT, show_default=True, metavar="N",
    help="How many decisions are executed at the same time.",
)  # fmt: skip
@click.option("--in-order", is_flag=True, help="Execute the decisions of each agent one after the other.")
@durability_option("group")
@click.pass_obj
def serve(
    shell: Shell,
    /,
    data: Path,
    host: str,
    port: int,
    execute: str | None,
    nudge_hosts: tuple[str, ...],
    bus_max_bytes: int,
    audit: Path | None,
    durability: Any,
    **terms: Any,
) -> None:
    """Run the harness: HTTP for the agents, and the loops behind it.

    Agents take their tasks there and bring their decisions; --execute acts on those. Without it results stay
    completed. Its address is printed once it listens; logs are JSON lines on stderr. SIGTERM ends it cleanly.

    \b
    Example:
      postroom tasks serve --data run --port 8800
      postroom tasks serve --data run --execute './act-on-decision'
    """
    try:
        from postroom.runtime.http import serve as run_server
    except ModuleNotFoundError as error:  # only this command needs more than the core
        missing = f"the server needs {error.name}, which is not installed: pip install 'postroom[server]'"
        raise click.ClickException(missing) from None

    def say_where(taken: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{taken}"
        shell.output.facts({"url": url, "data": str(data), "pid": os.getpid()}, f"{data} is served at {url}")
        shell.output.flush()

    from postroom.contracts.tasks import Tasks

    with Tasks.open(f"sqlite:///{data / DATABASE}") as store:  # opens nothing yet
        acting = None if execute is None else executor(store, execute)
        try:
            run_server(
                data, host=host, port=port, execute=acting, allowed_nudge_hosts=nudge_hosts, ready=say_where,
                durability=durability or "group", bus_max_bytes=bus_max_bytes,
                beside=shipping(shell, data, audit), **terms,
            )  # fmt: skip
        finally:
            end_programs()


@contextmanager
def shipping(shell: Shell, data: Path, folder: Path | None) -> Iterator[None]:
    """The shipper runs beside the harness, and ends after it."""
    import sys

    from postroom.runtime.supervisor import Supervisor

    if folder is None:
        yield
        return
    config = [] if shell.config is None else ["--config", str(shell.config)]
    what = ["audit", "ship", "--data", str(data), "--to", str(folder), "--while-stdin"]
    companion = Supervisor([sys.executable, "-m", "postroom.cli.main", *config, *what])
    companion.start()
    try:
        yield
    finally:
        companion.stop()


def executor(store: "Tasks", command: str) -> Callable[["Task"], None]:
    """What a harness calls for each decision."""

    def execute(decision: "Task") -> None:
        task = store.get(decision.parent)
        run_program(
            command,
            {
                "task_id": task.task_id,
                "agent": task.agent,
                "type": task.type,
                "payload": task.payload,
                "decision": decision.payload,
                "decision_id": decision.task_id,
                "attempt": decision.attempt,
            },
        )

    return execute


# ---- tasks in ------------------------------------------------------------------------------------------


@tasks.command()
@where_options
@click.option("--agent", metavar="NAME", help="Whose queue. With --batch, of lines that name none.")
@click.option("--payload", metavar="JSON", help="What is to be done, any JSON.")
@click.option("--payload-file", metavar="FILE", help="Take the payload from a file; - is stdin.")
@click.option("--task-id", metavar="ID", help="Its id; the same id stores one task.  [default: a new one]")
@click.option("--key", "idempotency_key", metavar="TEXT", help="The same key stores one task of an agent.")
@click.option(
    "--delay-s", type=parse_wait, default=0.0, metavar="S", help="Hold it back for so many seconds."
)
@click.option("--type", "kind", default="", metavar="TYPE", help="What kind of task it is.")
@click.option("--parent", default="", metavar="ID", help="The task it comes from.")
@click.option(
    "--max-retries", type=click.IntRange(0, 1000), metavar="N", help="How often to try again.  [default: 3]"
)
@durability_option("os; a harness's own with --url")
@click.option("--id-only", is_flag=True, help="Print the bare id, also into a pipe.")
@click.option("--batch", metavar="FILE", help="Store a task for each JSON line of a file; - is stdin.")
@click.option("--wait", "waits", is_flag=True, help="Wait for the result and print it.")
@timeout_option
@click.pass_obj
def enqueue(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    token: str | None,
    payload: str | None,
    payload_file: str | None,
    kind: str,
    id_only: bool,
    batch: str | None,
    waits: bool,
    timeout_s: float | None,
    **fields: Any,
) -> None:
    """Store a task and print its id.

    With --batch each line is an object with agent, payload, and what else a task may have: task_id,
    idempotency_key, delay_s, type, parent, max_retries. With --wait the exit code is 1 when there is no
    result.

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
        with place(shell, data, url, token, create=True) as there:
            for tasks in read_batch(batch, fields["agent"]):
                print_ids(shell, there.enqueue(tasks), id_only)
        return
    if fields["agent"] is None:
        raise click.UsageError("Missing option '--agent'")
    task = {**fields, "type": kind, "payload": read_json("--payload", payload, payload_file)}
    with place(shell, data, url, token, create=True) as there:
        task_ids = there.enqueue([task])
        ended = there.wait(task_ids[0], timeout_s) if waits else None
    if ended is None:
        print_ids(shell, task_ids, id_only)
    else:
        print_end(shell, ended)


def read_batch(file: str, agent: str | None) -> Iterator[list[dict[str, Any]]]:
    """The tasks of a file of JSON lines, in pieces that fit into one commit."""
    import sys

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
        raise InvalidMessage(f"line {number} of --batch has {name!r}, which no task has")
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


@tasks.command()
@task_argument
@where_options
@timeout_option
@click.pass_obj
def wait(
    shell: Shell,
    task_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    timeout_s: float | None,
) -> None:
    """Wait until a task has ended and print its result.

    The exit code is 0 when there is a result, and 1 when the task failed, was cancelled, or has not ended in
    time.

    \b
    Example:
      postroom tasks wait t-1 --data run --timeout-s 60
    """
    with place(shell, data, url, token) as there:
        ended = there.wait(task_id, timeout_s)
    print_end(shell, ended)


def print_end(shell: Shell, task: Mapping[str, Any]) -> None:
    """How a task has ended, or how it stands; raises when there is no result."""
    import json

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


# ---- the words of an agent -----------------------------------------------------------------------------


@tasks.command(name="next")
@where_options
@agent_option
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="At most so many.",
)
@click.option(
    "--wait-s", type=parse_wait, default=0.0, metavar="S", help="Wait up to so many seconds for the first."
)
@lease_s_option(LEASE_S_DEFAULT)
@click.option("--worker", metavar="NAME", help="Who takes it, for the status.")
@click.pass_obj
def take(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None,
    worker: str | None,
    **terms: Any,
) -> None:
    """Lease the next task and print it.

    Nothing is printed when there is none. The lease in it has to be shown with every later word.

    \b
    Example:
      postroom tasks next --data run --agent triage
      postroom tasks next --url http://127.0.0.1:8800 --agent triage --wait-s 30
    """
    with place(shell, data, url, token, agent, worker=worker) as there:
        found = there.take(agent, worker, **terms)
    for task in found:
        print_task(shell, task)


def print_task(shell: Shell, task: dict[str, Any]) -> None:
    import json

    if not shell.output.readable:
        shell.output.json_line(task)
        return
    facts = {
        "lease": task["lease"],
        "attempt": task["attempt"],
        "type": task["type"],
        "parent": task["parent"],
    }
    shell.output.record([task["task_id"]], facts, json.dumps(task["payload"], indent=2, ensure_ascii=False))


@tasks.command()
@task_argument
@where_options
@agent_option
@lease_option
@click.option("--decision", metavar="JSON", help="The result.  [default: null]")
@click.option("--decision-file", metavar="FILE", help="Take the result from a file; - is stdin.")
@click.pass_obj
def complete(
    shell: Shell,
    task_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None,
    lease: int,
    decision: str | None,
    decision_file: str | None,
) -> None:
    """Say that a task is done, and what was decided.

    \b
    Example:
      postroom tasks complete t-1 --data run --lease 17 --decision '{"label": "bug"}'
    """
    result = read_json("--decision", decision, decision_file, default=None)
    with place(shell, data, url, token, agent) as there:
        there.say("complete", task_id, lease, {"result": result})
    shell.output.facts({"task_id": task_id, "said": "complete"}, f"{task_id} is complete")


@tasks.command()
@task_argument
@where_options
@agent_option
@lease_option
@click.pass_obj
def heartbeat(
    shell: Shell,
    task_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None,
    lease: int,
) -> None:
    """Say that somebody still works on a task.

    Its lease runs its whole length from now.

    \b
    Example:
      postroom tasks heartbeat t-1 --data run --lease 17
    """
    with place(shell, data, url, token, agent) as there:
        there.say("heartbeat", task_id, lease, {})
    shell.output.facts({"task_id": task_id, "said": "heartbeat"}, f"{task_id} is still ours")


@tasks.command()
@task_argument
@where_options
@agent_option
@lease_option
@click.option("--error", required=True, metavar="TEXT", help="Why.")
@click.option(
    "--retry-in-s",
    type=parse_wait,
    metavar="S",
    help="When to try it again.  [default: a pause that grows]",
)
@click.pass_obj
def fail(
    shell: Shell,
    task_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None,
    lease: int,
    error: str,
    retry_in_s: float | None,
) -> None:
    """Say that a task failed.

    It is tried again after a pause, or becomes a dead letter.

    \b
    Example:
      postroom tasks fail t-1 --data run --lease 17 --error "no such label" --retry-in-s 60
    """
    wish = {} if retry_in_s is None else {"retry_in_s": retry_in_s}
    with place(shell, data, url, token, agent) as there:
        there.say("fail", task_id, lease, {"error": error, **wish})
    shell.output.facts({"task_id": task_id, "said": "fail"}, f"{task_id} has failed")


@tasks.command()
@task_argument
@where_options
@agent_option
@lease_option
@click.pass_obj
def release(
    shell: Shell,
    task_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str | None,
    lease: int,
) -> None:
    """Give a task back untouched.

    It keeps its place, and nothing is counted against it.

    \b
    Example:
      postroom tasks release t-1 --data run --lease 17
    """
    with place(shell, data, url, token, agent) as there:
        there.say("release", task_id, lease, {})
    shell.output.facts({"task_id": task_id, "said": "release"}, f"{task_id} waits again")


@tasks.command()
@where_options
@needed_agent_option
@click.option(
    "--exec",
    "command",
    required=True,
    metavar="CMD",
    help="A command of the shell: the task as JSON on its stdin, the decision as JSON on its stdout. Ending "
    "with anything but 0 fails the task, with the last lines of stderr as the error; 126 and 127 (it cannot "
    "be executed, or is not there) end the worker instead.",
)
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N",
    help="How many tasks at the same time.",
)  # fmt: skip
@lease_s_option(LEASE_AT_WORK_S_DEFAULT)
@click.option("--nudge-port", type=PORT, metavar="N", help="Wait at this port for nudges of the harness.")
@click.option(
    "--nudge-host", default=HOST_DEFAULT, show_default=True, metavar="HOST", help="Where to wait for them."
)
@click.option(
    "--poll-every-s", type=parse_wait, default=10.0, show_default=True, metavar="S",
    help="How often to look without a nudge.",
)  # fmt: skip
@click.option(
    "--grace-s", type=parse_wait, default=20.0, show_default=True, metavar="S",
    help="How long what runs may go on after SIGTERM; then it is ended and given back.",
)  # fmt: skip
@click.option("--until-empty", is_flag=True, help="End when there is nothing to take.")
@click.option("--worker", metavar="NAME", help="Who works, for the status.  [default: machine and process]")
@click.pass_obj
def work(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    agent: str,
    token: str | None,
    command: str,
    poll_every_s: float,
    worker: str | None,
    **terms: Any,
) -> None:
    """Be an agent: run a program for every task, and print a line about each.

    Works through a harness, or on a data folder without one. Heartbeats are sent while the program runs.
    SIGTERM lets it finish, and then ends. A worker that is killed takes its program with it.

    \b
    Example:
      export POSTROOM_TOKEN=pr_...
      postroom tasks work --url http://127.0.0.1:8800 --agent triage --exec './triage.py'
      postroom tasks work --data run --agent echo --exec 'jq .payload' --until-empty
    """
    from postroom.client import StopWork, TaskFailed

    def handler(task: Any) -> Any:
        try:
            return run_program(command, _given(task), task.lost)
        except CannotRun as error:
            raise StopWork(f"the program cannot be run, and no task has failed: {error}") from None
        except ProgramFailed as error:
            raise TaskFailed(str(error)) from None

    check_place(data, url)
    shell.show_warnings()
    options = {"poll_every_s": poll_every_s, "worker": worker}
    with working_client(data, url, agent, token, options) as client:
        try:
            client.work(handler, on_end=print_ends(shell, agent), **terms)
        except StopWork as error:
            raise click.ClickException(str(error)) from None
        finally:
            end_programs()


@contextmanager
def working_client(
    data: Path | None, url: str | None, agent: str, token: str | None, options: dict[str, Any]
) -> "Iterator[TaskClient]":
    """A worker's client: to a harness, or to a data folder itself."""
    if data is None:
        with open_client(str(url), agent, token, **options) as client:
            yield client
        return
    from postroom.cli.local_client import LocalClient
    from postroom.core.names import checked_name

    checked_name("agent", agent)
    with open_folder(data) as tasks:
        yield LocalClient(tasks, agent, **options)


def print_ends(shell: Shell, agent: str) -> "Callable[[TaskEnd], None]":
    """Prints a line for each task that a worker has finished."""
    import threading

    mutex = threading.Lock()

    def print_one(end: "TaskEnd") -> None:
        facts = {
            "task_id": end.task.task_id, "agent": agent, "attempt": end.task.attempt,
            "outcome": end.outcome, "duration_s": round(end.duration_s, 3),
        }  # fmt: skip
        sentence = f"{end.task.task_id}  {end.outcome}  attempt {end.task.attempt}  {end.duration_s:.1f} s"
        if end.error:
            facts["error"] = end.error
            sentence += f"  {end.error.splitlines()[0]}"
        # Who reads the lines may go away: the work goes on.
        with mutex, suppress(OSError, OutputFailed):
            shell.output.facts(facts, sentence)
            shell.output.flush()

    return print_one


# ---- looking -------------------------------------------------------------------------------------------


@tasks.command()
@where_options
@click.pass_obj
def status(shell: Shell, data: Path | None, url: str | None, token: str | None) -> None:
    """Show how every queue stands.

    How many tasks wait and for how long, how many are being worked on and by whom, and how many leases ran
    out.

    \b
    Example:
      postroom tasks status --data run
      postroom tasks status --url http://127.0.0.1:8800 | jq .agents.triage.depth
    """
    with place(shell, data, url, token) as there:
        facts = there.status()
    if not shell.output.readable:
        shell.output.json_line(facts)
        return
    rows = [{"agent": name, **queue, "oldest_age_s": _age(queue)} for name, queue in facts["agents"].items()]
    columns = ["agent", "depth", "oldest_age_s", "in_flight", "holders", "lapses", "states"]
    shell.output.rows(columns, rows, empty="there is no task yet")
    if facts.get("events_waiting") is not None:
        shell.output.facts({}, f"{facts['events_waiting']} events wait for the audit stream")


def _age(queue: Mapping[str, Any]) -> str | None:
    return None if queue["oldest_age_s"] is None else f"{queue['oldest_age_s']:.1f}"


@tasks.command()
@task_argument
@where_options
@click.pass_obj
def show(shell: Shell, task_id: str, data: Path | None, url: str | None, token: str | None) -> None:
    """Show everything about a task, with its whole history.

    \b
    Example:
      postroom tasks show t-1 --data run
    """
    with place(shell, data, url, token) as there:
        task = there.show(task_id)
    task["history"] = [{"at": event_time(event), **event} for event in task["history"]]
    if not shell.output.readable:
        shell.output.json_line(task)
        return
    history = task.pop("history")
    shell.output.record([task.pop("task_id"), task.pop("agent"), task.pop("status")], task, "")
    rows = [{**event, "error": event.get("error")} for event in history]
    shell.output.rows(["seq", "at", "kind", "state", "attempt", "worker_id", "error"], rows, empty="")


def event_time(event: Mapping[str, Any]) -> str:
    from postroom.core.times import EPOCH, MICROSECOND

    return rfc3339(EPOCH + event["ts_us"] * MICROSECOND)


def parse_states(text: str) -> tuple[str, ...]:
    """The states that a word means: a status in lower case, else a state in any case."""
    if text in STATUSES:
        return STATUSES[text]
    if text.upper() in STATES:
        return (text.upper(),)
    known = f"a status is one of {', '.join(STATUSES)}, a state one of {', '.join(STATES)}"
    raise click.BadParameter(f"{text!r} is neither a status nor a state: {known}")


@tasks.command(name="list")
@where_options
@click.option("--agent", metavar="NAME", help="Only of this agent.")
@click.option(
    "--state",
    "states",
    type=parse_states,
    metavar="STATE",
    help=f"Only in this state ({', '.join(STATES)}), or of this status ({', '.join(STATUSES)}).",
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
    help="Stop after so many.",
)  # fmt: skip
@click.pass_obj
def find(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    token: str | None,
    states: tuple[str, ...] | None,
    limit: int,
    **wanted: Any,
) -> None:
    """List tasks, in the order they came.

    The status is the short word (pending, claimed, completed, done, failed); the state says more exactly
    where a task is. --state takes either.

    \b
    Example:
      postroom tasks list --data run --agent triage
      postroom tasks list --data run --state pending
      postroom tasks list --data run --state DEAD_LETTER
    """
    with place(shell, data, url, token) as there:
        found = [there.find(state=state, limit=limit, **wanted) for state in states or (None,)]
    rows = sorted((row for page in found for row in page), key=lambda row: row["seq"])[:limit]
    columns = ["seq", "task_id", "agent", "status", "state", "attempt", "created_at"]
    shell.output.rows(columns, rows, empty="there is no such task")


# ---- what an operator says -----------------------------------------------------------------------------


@tasks.command()
@click.argument("task_id", metavar="TASK_ID", required=False)
@where_options
@click.option("--all-dead", is_flag=True, help="Every dead letter, instead of one task.")
@click.option("--agent", metavar="NAME", help="Only dead letters of this agent.")
@click.option(
    "--since", type=parse_time, metavar="TIME", help="Only what became a dead letter since then (RFC 3339)."
)
@click.pass_obj
def retry(
    shell: Shell,
    task_id: str | None,
    data: Path | None,
    url: str | None,
    token: str | None,
    all_dead: bool,
    agent: str | None,
    since: Any,
) -> None:
    """Put a task that ended without a result back into its queue.

    Takes a task in the state DEAD_LETTER, CANCELLED, EXPIRED or QUARANTINED; any other is refused. The task
    is QUEUED again, at the end of its queue. Its retry count starts at 0, so it has all its retries again;
    its attempt goes on counting, and its errors and history stay.

    With --all-dead, --agent or --since instead of a TASK_ID it takes every dead letter that fits, but nothing
    that was cancelled or has expired. It prints a line for each, and at the end how many were put back and
    how many were skipped because somebody else had changed them meanwhile.

    \b
    Example:
      postroom tasks retry t-1 --data run
      postroom tasks retry --all-dead --data run
      postroom tasks retry --agent triage --since 2026-11-17T08:00:00Z --data run
    """
    many = all_dead or agent is not None or since is not None
    if many == (task_id is not None):
        raise click.UsageError("give one TASK_ID, or say which dead letters: --all-dead, --agent, --since")
    with place(shell, data, url, token) as there:
        if task_id is not None:
            there.order("retry", task_id)
            print_retried(shell, task_id)
            return
        retried = skipped = 0
        for found in dead_letters(there, agent, since):
            try:
                there.order("retry", found)
            except (WrongState, UnknownTask) as error:
                warn(shell.program, f"warning: {error}")  # somebody else was faster
                skipped += 1
            else:
                print_retried(shell, found)
                retried += 1
    counts = f"{retried} dead letters wait again, {skipped} were skipped"
    shell.output.facts({"retried": retried, "skipped": skipped}, counts)


def print_retried(shell: Shell, task_id: str) -> None:
    shell.output.facts({"task_id": task_id, "said": "retry"}, f"{task_id} waits again, with all its retries")


def dead_letters(there: Folder | Remote, agent: str | None, since: Any) -> Iterator[str]:
    """The ids of dead letters, in the order the tasks were accepted."""
    from postroom.core.times import parse_utc

    after = 0
    while page := there.find(agent=agent, state="DEAD_LETTER", after=after, limit=PAGE):
        for line in page:
            if since is None or parse_utc(line["ended_at"]) >= since:
                yield line["task_id"]
        after = page[-1]["seq"]


@tasks.command()
@task_argument
@where_options
@click.pass_obj
def cancel(shell: Shell, task_id: str, data: Path | None, url: str | None, token: str | None) -> None:
    """Have nobody work on a task any more.

    \b
    Example:
      postroom tasks cancel t-1 --data run
    """
    with place(shell, data, url, token) as there:
        there.order("cancel", task_id)
    shell.output.facts({"task_id": task_id, "said": "cancel"}, f"{task_id} is cancelled")


add_json_option(tasks)


# ---- who may speak -------------------------------------------------------------------------------------


@tasks.group(context_settings=HELP_OPTIONS)
def agent() -> None:
    """The agents of a harness, and their tokens.

    \b
    Example:
      postroom tasks agent add triage --data run
      postroom tasks agent list --data run
    """


@agent.command()
@click.argument("name", metavar="NAME")
@needed_data_option
@click.option("--url", metavar="URL", help="Where it listens for nudges.")
@click.option("--operator", is_flag=True, help="It may see and do everything, in every queue.")
@click.option(
    "--may-send-to",
    multiple=True,
    metavar="NAME",
    help="An agent that it may send tasks to. May be repeated, and changed later by `allow` and `deny`.",
)
@click.option("--token-only", is_flag=True, help="Print the bare token, also into a pipe.")
@click.pass_obj
def add(
    shell: Shell,
    name: str,
    data: Path,
    url: str | None,
    operator: bool,
    may_send_to: tuple[str, ...],
    token_only: bool,
) -> None:
    """Make an agent known and print its token.

    The token is shown this once; only its checksum is kept.

    \b
    Example:
      postroom tasks agent add triage --data run --url http://127.0.0.1:9001
      postroom tasks agent add planner --data run --may-send-to critic --may-send-to coder
      export POSTROOM_TOKEN=$(postroom tasks agent add boss --data run --operator --token-only)
    """
    from postroom.runtime.agents import Agents

    role = "operator" if operator else "agent"
    token = Agents(data).add(name, url, role=role, may_send_to=may_send_to)  # type: ignore[arg-type]
    if token_only:
        shell.output.sentence(token)
        return
    facts = {"name": name, "role": role, "url": url, "may_send_to": list(may_send_to), "token": token}
    shell.output.facts(facts, token)


@agent.command(name="list")
@needed_data_option
@click.pass_obj
def list_agents(shell: Shell, data: Path) -> None:
    """List the agents. Their tokens are not known to anybody else.

    \b
    Example:
      postroom tasks agent list --data run
    """
    rows = [
        {
            "name": known.name, "role": known.role, "url": known.url,
            "may_send_to": list(known.may_send_to), "created": rfc3339(known.created),
        }
        for known in registered(data).list()
    ]  # fmt: skip
    shell.output.rows(["name", "role", "url", "may_send_to", "created"], rows, empty="nobody is known yet")


targets_option = click.option(
    "--may-send-to",
    "targets",
    multiple=True,
    required=True,
    metavar="NAME",
    help="The agent that is sent to. May be repeated.",
)


@agent.command()
@click.argument("name", metavar="NAME")
@needed_data_option
@targets_option
@click.pass_obj
def allow(shell: Shell, name: str, data: Path, targets: tuple[str, ...]) -> None:
    """Let an agent send tasks to further agents. Its token stays the same.

    A harness that is running knows of it within 0.2 s.

    \b
    Example:
      postroom tasks agent allow planner --may-send-to critic --data run
    """
    print_targets(shell, name, registered(data).allow(name, targets))


@agent.command()
@click.argument("name", metavar="NAME")
@needed_data_option
@targets_option
@click.pass_obj
def deny(shell: Shell, name: str, data: Path, targets: tuple[str, ...]) -> None:
    """Let an agent send no more tasks to these agents. What it has sent stays.

    \b
    Example:
      postroom tasks agent deny planner --may-send-to critic --data run
    """
    print_targets(shell, name, registered(data).deny(name, targets))


def registered(data: Path) -> "Agents":
    """The agents of a data folder, which has to be there."""
    from postroom.runtime.agents import Agents

    if not data.is_dir():
        raise click.ClickException(f"there is no data folder {data}")
    return Agents(data)


def print_targets(shell: Shell, name: str, may_send_to: tuple[str, ...]) -> None:
    sentence = f"{name} may send to {', '.join(may_send_to) or 'nobody'}"
    shell.output.facts({"name": name, "may_send_to": list(may_send_to)}, sentence)


@agent.command()
@click.argument("name", metavar="NAME")
@needed_data_option
@click.pass_obj
def remove(shell: Shell, name: str, data: Path) -> None:
    """Take an agent's token away. Its tasks stay.

    \b
    Example:
      postroom tasks agent remove triage --data run
    """
    registered(data).remove(name)
    shell.output.facts({"name": name, "said": "remove"}, f"{name} is removed")


add_json_option(agent)
