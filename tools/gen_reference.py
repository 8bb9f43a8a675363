"""Writes docs/reference/, the statements of the engine and the generated parts of docs/architecture.md.

python tools/gen_reference.py            write the pages
python tools/gen_reference.py --check    fail when a page differs from what would be written
"""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import starmap
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from statements import statements_page

from postroom.cli import main as postroom_cli
from postroom.cli.queue import zosmq
from postroom.cli.shell import CONFIG_NAME, CONFIG_VARIABLE, TRACE_VARIABLE
from postroom.contracts.mail import service
from postroom.contracts.tasks.tasks import STATUS
from postroom.core.formats.events import OPERATIONS, AuditEvent
from postroom.core.gate import GATE, WHO, Entry
from postroom.core.lifecycle.lifecycle import TRANSITIONS
from postroom.core.redaction import Redactor
from postroom.mcp.resources import gated
from postroom.message import Event, EventKind, State
from postroom.page.mount import PageMount
from postroom.pipeline.gold.tables import GOLD
from postroom.server.app import TasksApp
from postroom.server.http.endpoint import STATUS_OF, ServedRoute
from postroom.server.http.openapi import body_name
from postroom.server.nats import server
from postroom.server.routes.table import ROUTES, openapi
from postroom.settings import (
    AlertSettings,
    AuditSettings,
    BusSettings,
    EncryptionSettings,
    QueueSettings,
    Setting,
    Table,
    UpSettings,
    described,
)
from postroom.stores.open import open_store

STORES = {
    "SQLite": "sqlite:///queue.db",
    "PostgreSQL": "postgres://app@db/postroom",
    "RabbitMQ over PostgreSQL": "amqp://broker/?ledger=postgres://app@db/postroom",
    "RabbitMQ over SQLite": "amqp://broker/?ledger=sqlite:///queue.db",
    "the same with `p0=broker-only`": "amqp://broker/?p0=broker-only&ledger=sqlite:///queue.db",
    "memory": "memory://",
}
CAPABILITY_MEANINGS = {
    "is_shared": "processes of several hosts can use it",
    "is_concurrent": "commits of one process run concurrently",
    "is_ordered": "workers that claim at the same time get a lane in its order",
    "keeps_all": "every accepted message is in the ledger",
    "survives_kills": "class `os` outlives `kill -9` of every process of the store",
    "is_encryptable": "a key file encrypts it",
    "is_movable": "`postroom move` can take it elsewhere",
}

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PIPELINE = ROOT / "docs" / "contracts" / "pipeline.md"
SOURCES = ROOT / "src" / "postroom"
HELP_COLUMNS = 88  # independent of the terminal
NOTICE = "<!-- Written by `make docs`. Change the code, not this page. -->"

CLI_HEAD = f"""\
{NOTICE}

# Command line

Two commands are installed: `postroom`, and `zos-mq` with the options and the output of the original queue.

| | |
|---|---|
| Results | on stdout: JSON lines into a pipe or a file (or with `--json`), readable text on a terminal |
| Errors and warnings | on stderr, one line each |
| Exit code | 0 done, 1 failed, 2 wrong call; `doctor` also 3 with warnings and 4 with problems |
| Times | RFC 3339 in UTC, ending in `Z`; lengths of time are seconds in fields whose names end in `_s` |
| Tables | on a terminal: a heading, columns of numbers to the right, `-` for no value |
| Completion | `postroom completion bash`, `zsh` or `fish` prints a script for your shell |
| Signals | SIGTERM and SIGINT end any command; for `follow` that is its normal end, with 0 |
| Colours | on a terminal only, and not when `NO_COLOR` is set |
| Control characters | shown as escapes such as `\\x1b`, never sent to the terminal |
| Bytes that are not UTF-8 | kept; in JSON they are lone surrogates, as with Python's `surrogateescape` |
| A bug in postroom | reported in one line; `{TRACE_VARIABLE}=1` shows the traceback |

Settings have their own page: [settings.md](settings.md).
"""

SETTINGS_HEAD = f"""\
{NOTICE}

# Settings

A flag (or an argument in Python) overrides the environment, the environment overrides
`{CONFIG_NAME}`, and `{CONFIG_NAME}` overrides the default. The commands read the file named by `--config`,
else by `{CONFIG_VARIABLE}`, else `./{CONFIG_NAME}` if there is one.

A Python program reads no file. A `Queue` reads these values from the environment unless they are arguments:
root, session, agent id, body threshold and the kill switch. Only the commands read
`POSTROOM_QUEUE_DURABILITY`, `POSTROOM_BUS` and `POSTROOM_BUS_*`: a program passes such values when it opens a
bus or a queue.

An empty variable counts as not set. Where two variables are named, the first wins. An invalid value or an
unknown key is refused with an error that names it. Relative paths in the file are relative to the file.

```toml
[bus]
path = "runs/messagebus.yaml"
rotate_bytes = 10_000_000

[queue]
root = "runs/queue"
session = "nightly"
```

`postroom tasks` has no table here. It takes its settings as flags, and a token from `POSTROOM_TOKEN`.
"""

LIFECYCLE_HEAD = f"""\
{NOTICE}

# The life of a record

A store keeps a record with the state of every message. All transitions are in one table,
`core.lifecycle.lifecycle.TRANSITIONS`, from which this page is generated. Any other transition is refused as
`WrongState`, or as `StaleLease` where a lease is required.
"""

EVENTS_HEAD = f"""\
{NOTICE}

# Events

What happened to a message. Events are committed together with the change they describe, and their numbers
have no gap within a store. The schema is the same for every contract, and closed: there are no other kinds. A
field with its default value is left out of the JSON.

`Tasks.events(after=N)` and `GET /events` return them in order.
"""

AUDIT_EVENTS_HEAD = f"""\
{NOTICE}

# Events of the audit stream

Every event of every contract, in one closed schema, one JSON object a line. A field with its default value is
left out, except the first seven. `seq` has no gap within a `source`, and `event_id` consists of both, so
reading a log again gives the same ids. Fields may be added later; none is removed or changes its meaning
without a new `schema`. How the stream is written and read: [Audit](../contracts/audit.md).
"""

HTTP_HEAD = f"""\
{NOTICE}

# HTTP

The routes of `postroom tasks serve`. Bodies and answers are JSON. Every route except `/health`, `/ready` and
the sign-in of the live page needs a token, as `Authorization: Bearer TOKEN`. `GET /openapi.json` returns the
same as an OpenAPI document. The meaning of the calls: [Tasks](../contracts/tasks.md#over-http),
[Engine](../contracts/engine.md#over-http).

An error is `{{"error": NAME, "message": ONE SENTENCE}}`.
"""

PERMISSIONS_HEAD = f"""\
{NOTICE}

# Permissions

Who may do what with which object, over HTTP, on the live page, over MCP and over NATS. `core.gate` has this
table, and decides by it before anything of the object is read. Every call names its row; a server with a call
that names none does not start. What a token may not know about is answered like what does not exist.

Beside its role, a token may have permissions ([tokens](../contracts/up.md#tokens)): a *read-only* token has
only the rows with "yes"; `--only-message` and `--only-bus` limit the rows that name them to those agents and
buses; `--may-claim`, `--may-read` and `--may-send-to` add objects of other agents.
"""
PLACES = ("HTTP", "page", "MCP", "NATS")

# ---- descriptions that are not in the code; every name needs one ------------------------------------

STATE_MEANINGS: dict[State, str] = {
    "SCHEDULED": "accepted, and delayed",
    "QUEUED": "can be claimed",
    "PROCESSING": "leased to a worker; the lease may have just ended",
    "FAILED": "passed on the way to `RETRYING`, `QUEUED` or `DEAD_LETTER`; never stored",
    "RETRYING": "failed, and delayed until its retry",
    "COMPLETED": "completed by its lease holder; the result was not executed yet",
    "EXECUTING": "its result became a decision, which is being executed",
    "DONE": "its decision was executed",
    "DEAD_LETTER": "failed too often; kept for an operator",
    "CANCELLED": "ended by an operator",
    "EXPIRED": "waited longer than its time to live",
    "QUARANTINED": "crashes workers; kept for an operator",
}

CALLS: dict[str, str] = {
    "accept": "`Tasks.enqueue`",
    "wake": "`Tasks.claim`, `Tasks.sweep`",
    "promote": "",
    "lease": "`Tasks.claim`",
    "start": "",
    "renew": "`Tasks.heartbeat`",
    "complete": "`Tasks.complete`",
    "release": "`Tasks.release`",
    "defer": "",
    "fail": "`Tasks.fail`",
    "lapse": "`Tasks.claim`, `Tasks.sweep`",
    "retry": "`Tasks.fail`, `Tasks.claim`, `Tasks.sweep`",  # a lapsed lease is retried at once: see NARROWER
    "bury": "`Tasks.fail`, `Tasks.claim`, `Tasks.sweep`",
    "hand_over": "`Tasks.open_decision`",
    "settle": "`Tasks.settle`",
    "cancel": "`Tasks.cancel`",
    "expire": "",
    "quarantine": "",
    "replay": "`Tasks.retry`",
}
"""The call that makes a transition; empty if no contract has one."""

NARROWER: dict[EventKind, str] = {"retry_scheduled": "`Tasks.fail`"}
"""Kinds that only some calls of the verb write."""

ALSO: dict[EventKind, str] = {
    "created": "`Tasks.enqueue`, `Tasks.open_decision` (of the decision)",
    "enqueued": "`Tasks.retry` (after `replayed`), `Tasks.open_decision` (of the decision)",
    "execution_completed": "`Tasks.settle` (of the decision)",
    "duplicate": "`Tasks.enqueue` (a known id or key)",
    "deleted": "`Tasks.purge` (once a batch)",
}
"""Events without a transition, or that accompany another transition."""

KIND_MEANINGS: dict[EventKind, str] = {
    "created": "it was accepted",
    "enqueued": "it can be claimed from now on",
    "promoted": "it was claimed as if in a higher lane, because it has waited long",
    "dequeued": "a worker got a lease; the number of this event is its token",
    "conflict_detected": "it conflicts with another message",
    "conflict_resolved": "its conflict was resolved",
    "conflict_resolution_failed": "its conflict could not be resolved",
    "execution_started": "the handler of a message began; of a task: its result became a decision",
    "execution_completed": "its lease holder completed it",
    "execution_failed": "its lease holder reported a failure",
    "retry_scheduled": "it is retried after a pause",
    "deferred": "it waits, for the reason in the detail; no retry is counted",
    "dead_letter": "it is not retried any more",
    "heartbeat": "its lease holder extended the lease",
    "lease_lapsed": "its lease ended without a heartbeat",
    "released": "its lease holder returned it unfinished",
    "cancelled": "it was cancelled",
    "expired": "it waited too long",
    "quarantined": "it was quarantined",
    "replayed": "an operator retried it after its end",
    "duplicate": "it was enqueued again, and the first one stands",
    "rejected": "it was refused",
    "delivered": "its result was executed",
    "deleted": "ended records were removed; the event names no message",
    "breaker_opened": "the circuit breaker of a service it needs opened",
    "breaker_closed": "the circuit breaker closed again",
    "tokens_reserved": "tokens of a model were reserved for its attempt",
    "tokens_returned": "its reservation ended: what was used, and what was returned",
    "tokens_refused": "no model had its tokens",
    "tokens_borrowed": "part of its tokens is of a lower tier",
    "tokens_rebalanced": "a window of a model began with other pools: loans repaid, unused tokens moved",
    "agent_health": "an agent is registered, alive, suspect, dead, left or forgotten; `detail` has `health`",
    "receipt": "a message to an agent was stored, fetched, shown or acted on; `detail` has `receipt`",
    "bounced": "a message or an answer cannot reach its agent; `error` says why",
    "alert": "an operator should look",
    "alert_sent": "a sink accepted the notice of an alert; `detail` has `alert`, `status` and `sink`",
}

AUDIT_FIELD_MEANINGS = {
    "event_id": "`SOURCE#SEQ`: the same each time the source is read",
    "seq": "its number: gap-free and growing within a source",
    "ts_us": "time, in microseconds of UTC; the order is `seq`",
    "kind": "what happened",
    "contract": "`bus`, `queue`, `mail`, `tasks`, `engine`, or `audit` for the stream itself",
    "source": "the store or file of the event",
    "schema": "the version of this schema",
    "queue": "the queue, bus, session or mailbox; a private mailbox only as a hash",
    "org_id": "the organization of the message",
    "user_id": "the user of the message",
    "agent_id": "the receiving or sending agent",
    "message_id": "the message",
    "goal_id": "the goal of the message",
    "task_id": "the task of the message",
    "parent_message_id": "the parent message; in `created`",
    "type": "the message's type; in `created`",
    "priority": "its lane, 0 to 3; 0 is first",
    "state": "where the message is after it",
    "attempt": "deliveries so far",
    "worker_id": "the worker that holds or held the lease",
    "trace_id": "the request of the message, if its sender gave one",
    "span_id": "its part of that request",
    "duration_us": "how long it waited (`dequeued`), or was worked on (`execution_*`, `lease_lapsed`)",
    "error_type": "the class of an error",
    "error": "what the error says, redacted",
    "model": "the model that was called",
    "tokens_in": "input tokens",
    "tokens_out": "output tokens",
    "cost_usd": "cost of the call",
    "body_bytes": "the length of the sent payload",
    "payload": "the payload as text, redacted; encrypted if it begins with `enc:`. With "
    '`results = "full"`, `execution_completed` has the result here',
    "sender": "the sender",
    "recipient": "the addressed or receiving agent",
    "service": "the service of a breaker or a budget",
    "lease": "the token of the lease",
    "detail": "further facts of one kind of event",
    "prior": "the previous state, for an end or a replay",
}

FIELD_MEANINGS = {
    "seq": "its number: gap-free and growing within a store",
    "ts_us": "microseconds of UTC, for people; the order is `seq`",
    "kind": "see below",
    "queue": "the queue, which is named after its agent",
    "message_id": "the task's id",
    "state": "where the message is after it",
    "attempt": "deliveries so far",
    "priority": "its lane; 0 is first",
    "lease": "the token of the lease",
    "worker_id": "the worker that holds or held the lease",
    "duration_us": "how long it waited (`dequeued`), or was worked on (`execution_*`, `lease_lapsed`)",
    "error_type": "the class of an error",
    "error": "the text of the error",
    "type": "the message's type; in `created` only",
    "parent_message_id": "the parent message; in `created` only",
    "body_bytes": "the length of its payload; in `created` only",
    "detail": "facts of one kind of event: `key`, `from`, `delay_s`, `decision`, `records`",
    "prior": "the previous state, for an end or a replay",
}

LAYER_MEANINGS = {
    "cli": "parse, call a contract, print",
    "testing": "for users: clock, faults, StoreContract",
    "mcp": "tools for agents over MCP",
    "page": "the live page",
    "server": "servers, harness, shipper process",
    "pipeline": "Spark tables from the audit stream",
    "engine": "the global queue",
    "goals": "goals, decisions, the knowledge graph",
    "sandbox": "where the code of an agent runs",
    "contracts": "Bus, Queue, Tasks, Mail, Audit, their feeds",
    "logs": "append-only files",
    "nudges": "wake-ups",
    "stores": "records with leases",
    "audit": "the audit stream",
    "mailclient": "client of a mail server",
    "system": "locks, whole-file updates, fork, clocks",
    "natsclient": "a NATS connection",
    "core": "formats and decisions, as pure functions",
    "settings": "what can be configured",
    "message": "messages, records and events",
    "errors": "the tree of errors",
    "calls": "the verbs: fields, route, permission, words of each",
    "client": "what an agent embeds: the standard library and msgspec alone",
}
"""Every module of the import contract has its words here."""

SEAMS = (
    ("Store", "stores/base.py", "Records"),
    ("", "stores/base.py", "Events"),
    ("", "stores/base.py", "Cells"),
    ("", "stores/base.py", "Lanes"),
    ("", "stores/store.py", "Store"),
    ("Log", "logs/appendfile.py", "AppendFile"),
    ("Nudge", "nudges/notifier.py", "Notifier"),
    ("", "nudges/watch.py", "Watch"),
    ("Event sink", "audit/shipper.py", "Sink"),
    ("", "audit/shipper.py", "Feed"),
)
FORK_HOOKS = {"before_fork", "after_fork", "after_fork_in_parent"}


def pages() -> dict[Path, str]:
    """The text of every generated page."""
    return {
        PAGES / "cli.md": cli_page(),
        PAGES / "settings.md": settings_page(),
        PAGES / "lifecycle.md": lifecycle_page(),
        PAGES / "events.md": events_page(),
        PAGES / "audit-events.md": audit_events_page(),
        PAGES / "http.md": http_page(),
        PAGES / "permissions.md": permissions_page(),
        ARCHITECTURE: architecture_page(),
        ROOT / "docs" / "contracts" / "engine-statements.md": statements_page(),
        PIPELINE: pipeline_page(),
    }


def rows(head: str, lines: Iterable[str]) -> str:
    """A table."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines]) + "\n"


# ---- commands and settings -------------------------------------------------------------------------


def cli_page() -> str:
    sections = [
        *command_sections(postroom_cli.cli, postroom_cli.PROGRAM, None),
        *command_sections(zosmq.cli, zosmq.PROGRAM, None),
    ]
    return "\n".join([CLI_HEAD, *sections])


def command_sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    """The help of a command and of its subcommands."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=HELP_COLUMNS, **command.context_settings
    )
    help_text = command.get_help(context).rstrip()
    yield f"## {context.command_path}\n\n```text\n{help_text}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            if found := command.get_command(context, below):
                yield from command_sections(found, below, context)


def settings_page() -> str:
    tables = [
        table("bus", BusSettings),
        table("queue", QueueSettings),
        table("audit", AuditSettings),
        table("up", UpSettings),
        table("alerts", AlertSettings),
        table("encryption", EncryptionSettings),
    ]
    return "\n".join([SETTINGS_HEAD, *tables])


def table(name: str, settings: Table) -> str:
    head = "| key | must be | default | environment | meaning |"
    return f"## `[{name}]`\n\n{rows(head, map(setting_row, described(settings)))}"


def setting_row(setting: Setting) -> str:
    default = "not set" if setting.default is None else f"`{str(setting.default).lower()}`"
    variables = "<br>".join(f"`{variable}`" for variable in setting.variables)
    return f"| `{setting.key}` | {setting.wants} | {default} | {variables} | {setting.description} |"


# ---- the life of a record ----------------------------------------------------------------------------


def lifecycle_page() -> str:
    return "\n".join(
        [
            LIFECYCLE_HEAD,
            "## The diagram\n",
            f"```mermaid\n{diagram()}\n```\n",
            "## States\n",
            rows("| state | foreman's word | |", map(state_row, get_args(State))),
            "## Transitions\n",
            rows("| from | verb | to | event | call |", transition_rows()),
        ]
    )


def diagram() -> str:
    """All verbs between the same two states share one arrow."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for arrow in TRANSITIONS:
        verbs.setdefault((arrow.source or "[*]", arrow.target), []).append(arrow.verb)
    arrows = [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in verbs.items()]
    left = {arrow.source for arrow in TRANSITIONS}
    ends = [f"    {state} --> [*]" for state in get_args(State) if state not in left]
    return "\n".join(["stateDiagram-v2", *arrows, *ends])


def state_row(state: State) -> str:
    return f"| `{state}` | {STATUS[state]} | {STATE_MEANINGS[state]} |"


def transition_rows() -> Iterator[str]:
    for arrow in TRANSITIONS:
        source = "" if arrow.source is None else f"`{arrow.source}`"
        call = NARROWER.get(arrow.kind, CALLS[arrow.verb])
        yield f"| {source} | {arrow.verb} | `{arrow.target}` | `{arrow.kind}` | {call} |"


# ---- events ------------------------------------------------------------------------------------------


def events_page() -> str:
    return "\n".join(
        [
            EVENTS_HEAD,
            "## Fields\n",
            rows("| field | is | default | |", starmap(field_row, properties(Event).items())),
            "## Kinds\n",
            rows("| kind | what happened | verbs | calls |", map(kind_row, get_args(EventKind))),
            "A kind without a call is reserved for later contracts: nothing writes it today.\n",
        ]
    )


def field_row(name: str, schema: dict[str, Any]) -> str:
    kind = "string" if "enum" in schema else shape(schema)
    return f"| `{name}` | {kind} | {default(schema)} | {FIELD_MEANINGS[name]} |"


def kind_row(kind: EventKind) -> str:
    verbs = list(dict.fromkeys(arrow.verb for arrow in TRANSITIONS if arrow.kind == kind))
    calls = [ALSO[kind]] if kind in ALSO else []
    if kind != "created":
        calls[:0] = dict.fromkeys(call for verb in verbs for call in calls_of(verb, kind))
    return f"| `{kind}` | {KIND_MEANINGS[kind]} | {', '.join(verbs)} | {', '.join(calls)} |"


def calls_of(verb: str, kind: EventKind) -> list[str]:
    return [call for call in NARROWER.get(kind, CALLS[verb]).split(", ") if call]


def audit_events_page() -> str:
    operations = (
        f"| `{contract}` | {operation} | {', '.join(f'`{kind}`' for kind in kinds)} |"
        for contract, table in OPERATIONS.items()
        for operation, kinds in table.items()
    )
    fields = properties(AuditEvent)
    return "\n".join(
        [
            AUDIT_EVENTS_HEAD,
            "## Fields\n",
            rows("| field | is | default | |", (audit_field_row(*field) for field in fields.items())),
            "## Operations and their kinds\n",
            rows("| contract | operation | kinds |", operations),
            "The kinds are described on the page of [events](events.md#kinds).\n",
        ]
    )


def audit_field_row(name: str, schema: dict[str, Any]) -> str:
    kind = "string" if "enum" in schema or name in ("state", "kind", "contract") else shape(schema)
    if name == "cost_usd":
        kind = "number, exact"
    return f"| `{name}` | {kind} | {default(schema)} | {AUDIT_FIELD_MEANINGS[name]} |"


# ---- architecture ------------------------------------------------------------------------------------


def architecture_page() -> str:
    text = ARCHITECTURE.read_text("utf-8")
    parts = {"layers": layers_drawing(), "seams": seams_table(), "capabilities": capabilities_table()}
    for name, part in parts.items():
        text = with_part(text, name, part)
    return text


def pipeline_page() -> str:
    """The page of the pipeline with its gold tables."""
    found = (
        f"| `{name}` | {table.grain} | {', '.join(f'`{column}`' for column in table.partition_by)} "
        f"| {table.source} |"
        for name, table in sorted(GOLD.items())
    )
    table = rows("| table | a row for each | partition | built from |", found)
    return with_part(PIPELINE.read_text("utf-8"), "gold", table)


def with_part(text: str, name: str, part: str) -> str:
    """The page with the lines between the two markers replaced."""
    start, end = f"<!-- {name}: written by `make docs` -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{part}\n{end}{after}"


def layers_drawing() -> str:
    """A box for each layer of the import contract, the importing layer above the imported one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers: list[str] = next(found["layers"] for found in contracts if found["type"] == "layers")
    boxes = [re.findall(r"\w+", layer) for layer in layers]
    left = max(len(name) for box in boxes for name in box)
    right = max(len(LAYER_MEANINGS[name]) for box in boxes for name in box)
    border = f"+{'-' * (left + 2)}+{'-' * (right + 2)}+"
    lines = ["```text", border]
    for box in boxes:
        lines += (f"| {name:{left}} | {LAYER_MEANINGS[name]:{right}} |" for name in box)
        lines.append(border)
    return "\n".join([*lines, "```", ""])


def seams_table() -> str:
    return rows("| seam | class | methods |", starmap(seam_row, SEAMS))


def capabilities_table() -> str:
    """What each kind of store declares. Opening a store connects to nothing."""
    declared = []
    for url in STORES.values():
        store = open_store(url)
        declared.append(store.capabilities)
        store.close()
    return rows(
        f"| | {' | '.join(STORES)} |",
        (
            f"| {meaning} | {' | '.join('yes' if getattr(one, name) else 'no' for one in declared)} |"
            for name, meaning in CAPABILITY_MEANINGS.items()
        ),
    )


def seam_row(seam: str, path: str, name: str) -> str:
    tree = ast.parse((SOURCES / path).read_text("utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef) and is_seam_method(node)]
    abstract = [node for node in methods if decorated(node, "abstractmethod")]
    shown = ", ".join(map(method_call, abstract or methods))
    if abstract and abstract != methods:
        others = (method_call(node) for node in methods if node not in abstract)
        shown += f"; with a default: {', '.join(others)}"
    return f"| {f'**{seam}**' if seam else ''} | `{name}` in `{path}` | {shown} |"


def is_seam_method(method: ast.FunctionDef) -> bool:
    return method.name[0] != "_" and method.name not in FORK_HOOKS and not decorated(method, "property")


def decorated(method: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(found, ast.Name) and found.id == name for found in method.decorator_list)


def method_call(method: ast.FunctionDef) -> str:
    names = [found.arg for found in [*method.args.args[1:], *method.args.kwonlyargs]]
    return f"`{method.name}({', '.join(names)})`"


# ---- HTTP --------------------------------------------------------------------------------------------


def http_page() -> str:
    schemas: dict[str, Any] = openapi()["components"]["schemas"]
    bodies = dict.fromkeys(body_name(body) for served in ROUTES for body in served.bodies)
    answers = [name for name in schemas if name not in bodies]
    return "\n".join(
        [
            HTTP_HEAD,
            "## Routes\n",
            rows("| route | permission | what it does | answers | refusals |", route_rows()),
            "Each message of a `text/event-stream` has `id`, `event` and `data`. With `Last-Event-ID` a",
            "stream continues after that id. A bus stream whose position no longer exists sends the event",
            "`reset` and continues with the oldest message.\n",
            "## Errors\n",
            rows("| error | status |", error_rows()),
            "Also: 400 `BadRequest` for requests that are not HTTP or have trailers, 401 `Unauthorized`, 403",
            "`Forbidden`, 408 `TooSlow`, 413 and 431 `TooLong`; for an unknown route 404 `NotFound`",
            "or 405 `MethodNotAllowed`. 429, 503 and 507 have `Retry-After`.\n",
            "## Queries\n",
            *(query_section(served) for served in ROUTES if properties(served.query)),
            "## Bodies\n",
            "Unknown fields are refused.\n",
            *(struct_section(name, schemas[name]) for name in bodies),
            "## Answers\n",
            *(struct_section(name, schemas[name]) for name in answers),
        ]
    )


def route_rows() -> Iterator[str]:
    for served in ROUTES:
        route, who = served.route, f"[`{served.route.permission}`](permissions.md)"
        answers = "<br>".join(f"{status} {answer(kinds)}".strip() for status, kinds in route.answers.items())
        answers += ", or `text/event-stream`" if route.streams else ""
        refusals = ", ".join(map(str, route.refusals))
        yield f"| `{route.method} {route.path}` | {who} | {served.summary} | {answers} | {refusals} |"


def permissions_page() -> str:
    by_entry: dict[str, dict[str, list[str]]] = {action: {} for action in GATE}
    for place, action, call in gated_calls():
        by_entry[action].setdefault(place, []).append(f"`{call}`")
    return "\n".join(
        [
            PERMISSIONS_HEAD,
            rows(
                "| permission | to | who | a read-only token | only | also | HTTP | page | MCP | NATS |",
                (
                    permission_row(action, entry, [calls.get(place, []) for place in PLACES])
                    for (action, entry), calls in zip(GATE.items(), by_entry.values(), strict=True)
                ),
            ),
            "## Who\n",
            rows("| who | means |", (f"| {who} | {meaning} |" for who, meaning in WHO.items())),
        ]
    )


def gated_calls() -> Iterator[tuple[str, str, str]]:
    """Where each permission is needed: the place, the permission and the call."""
    for served in ROUTES:
        yield "HTTP", served.route.permission, f"{served.route.method} {served.route.path}"
    for served in PageMount(TasksApp(nullcontext), Redactor).routes():
        yield "page", served.route.permission, f"{served.route.method} {served.route.path}"
    for name, entry in gated():
        yield "MCP", entry, name
    for name, entry in {**server.ENTRIES, **service.ENTRIES}.items():
        yield "NATS", entry, name


def permission_row(action: str, entry: Entry, places: Iterable[list[str]]) -> str:
    permissions = (entry.only, *entry.also)
    only, *also = (f"`{name}`" if name else "" for name in permissions)
    where = " | ".join("<br>".join(calls) for calls in places)
    may_read = "no" if entry.changes else "yes"
    return f"| `{action}` | {entry.what} | {entry.who} | {may_read} | {only} | {' '.join(also)} | {where} |"


def answer(kinds: Any) -> str:
    if kinds is None:
        return ""
    if isinstance(kinds, str):
        return f"`{kinds}`"
    return " or ".join(f"`{getattr(kind, '__name__', kind)}`" for kind in kinds)


def error_rows() -> Iterator[str]:
    for kind, status in STATUS_OF.items():
        rest = ", any other" if kind.__name__ in {"Rejected", "Unavailable", "PostroomError"} else ""
        yield f"| `{kind.__name__}`{rest} | {status} |"


def query_section(served: ServedRoute) -> str:
    name = f"{served.route.method} {served.route.path}"
    return struct_section(name, {"properties": properties(served.query)})


def properties(struct: type) -> dict[str, Any]:
    """The fields of a struct, as JSON schemas."""
    components = msgspec.json.schema_components([struct])[1]
    found: dict[str, Any] = components[struct.__name__]["properties"]
    return found


def struct_section(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    lines = [
        f"| `{field}` | {shape(found)} | {'required' if field in required else default(found)} |"
        for field, found in schema["properties"].items()
    ]
    said = f"{inspect.cleandoc(schema['description'])}\n\n" if "description" in schema else ""
    return f"### `{name}`\n\n{said}{rows('| field | is | default |', lines)}"


def default(schema: dict[str, Any]) -> str:
    return f"`{msgspec.json.encode(schema['default']).decode()}`" if "default" in schema else ""


def shape(schema: dict[str, Any]) -> str:
    """A short description of a JSON schema."""
    if "anyOf" in schema:
        return "; or ".join(shape(one) for one in schema["anyOf"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema:
        listed = ", ".join(f"`{one}`" for one in schema["enum"])
        return ENUMS.get(frozenset(schema["enum"]), listed)
    kind = schema.get("type", "any JSON")
    if kind == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return f"list of {' and '.join(map(shape, items))}{bounds(schema)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {shape(schema['additionalProperties'])}"
    return f"{kind}{bounds(schema)}"


ENUMS = {
    frozenset(get_args(State)): "a [state](lifecycle.md#states)",
    frozenset(get_args(EventKind)): "a [kind](events.md#kinds)",
}
BOUNDS = {
    "minimum": "at least {:,}",
    "exclusiveMinimum": "above {:,}",
    "maximum": "at most {:,}",
    "maxLength": "at most {:,} characters",
    "maxItems": "at most {:,}",
}


def bounds(schema: dict[str, Any]) -> str:
    said = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema]
    said += ["not empty"] if schema.get("minLength") or schema.get("minItems") else []
    return f", {', '.join(said)}" if said else ""


def main(arguments: list[str]) -> int:
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text("utf-8") != text]
    for page in stale:
        if arguments == ["--check"]:
            print(f"{page.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pages()[page], "utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
