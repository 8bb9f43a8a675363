"""Writes docs/reference/ from the code: commands, settings, events, HTTP, and the life of a record.

python tools/gen_reference.py            write the pages
python tools/gen_reference.py --check    fail when a page is not what it would write
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from postroom.cli import main as postroom_cli
from postroom.cli import zosmq
from postroom.cli.shell import CONFIG_NAME, CONFIG_VARIABLE, TRACE_VARIABLE
from postroom.contracts.tasks import STATUS
from postroom.core.events import OPERATIONS, AuditEvent
from postroom.core.lifecycle import TRANSITIONS
from postroom.message import Event, EventKind, State
from postroom.runtime.endpoint import STATUS_OF
from postroom.runtime.openapi import Route
from postroom.runtime.routes import ROUTES, openapi
from postroom.settings import AuditSettings, BusSettings, QueueSettings, Setting, Table, described

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
HELP_COLUMNS = 88  # whatever the terminal of whoever runs this
NOTICE = "<!-- Written by `make docs`. Change the code, not this page. -->"

CLI_HEAD = f"""\
{NOTICE}

# Command line

Two commands are installed: `postroom`, and `zos-mq` with the options and the output of the original queue.

| | |
|---|---|
| Results | on stdout: JSON lines into a pipe or a file (or with `--json`), readable text on a terminal |
| Errors and warnings | on stderr, one line each |
| Exit code | 0 done, 1 failed, 2 wrong call |
| Signals | SIGTERM and SIGINT end any command; for `follow` that is its normal end, with 0 |
| Colours | on a terminal only, and not when `NO_COLOR` is set |
| Control characters | shown as escapes such as `\\x1b`, never sent to the terminal |
| Bytes that are not UTF-8 | kept; in JSON they are lone surrogates, as Python's `surrogateescape` has them |
| A bug in postroom | is reported in one line, too; `{TRACE_VARIABLE}=1` shows where it is |

Settings have their own page: [settings.md](settings.md).
"""

SETTINGS_HEAD = f"""\
{NOTICE}

# Settings

A flag (or an argument in Python) is stronger than the environment, the environment is stronger than
`{CONFIG_NAME}`, and that is stronger than the default. The commands read the file named by `--config`, else
by `{CONFIG_VARIABLE}`, else `./{CONFIG_NAME}` if there is one.

A Python program reads no file. Of the environment it reads what a `Queue` needs where no argument says it:
root, session, agent id, body threshold and the kill switch. `POSTROOM_QUEUE_DURABILITY`, `POSTROOM_BUS` and
`POSTROOM_BUS_*` reach the commands alone: a program says such things when it opens a bus or a queue.

An empty variable counts as not set. Where two variables are named, the first is stronger. A value that does
not fit is refused in one sentence that names it, and so is a key that does not exist. Relative paths in the
file are relative to the file.

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

A store keeps a record for every message: where it is on its way. Every step on that way is in one table,
`core.lifecycle.TRANSITIONS`, and these pages are drawn from it. What is not in the table cannot happen: it is
refused as `WrongState`, or as `StaleLease` where a lease has to be shown.
"""

EVENTS_HEAD = f"""\
{NOTICE}

# Events

What happened to a message, once. Events are committed with what they tell about, or not at all, and their
numbers have no gap within a store. The schema is the same for every contract, and closed: a kind that is not
here does not exist. A field that has its default is left out of the JSON.

`Tasks.events(after=N)` and `GET /events` give them in order.
"""

AUDIT_EVENTS_HEAD = f"""\
{NOTICE}

# Events of the audit stream

Every event of every contract, in one closed schema, one JSON object a line. A field that has its default is
left out; the first seven always stand. `seq` has no gap within a `source`, and `event_id` is made of both, so
reading a log again repeats ids and invents none. A field may be added later; none is removed or changes its
meaning without a new `schema`. How the stream is written and read: [Audit](../contracts/audit.md).
"""

HTTP_HEAD = f"""\
{NOTICE}

# HTTP

What `postroom tasks serve` answers. JSON in and out. Every route but `/health` wants a token, as
`Authorization: Bearer TOKEN`. The same as an OpenAPI document: `GET /openapi.json`. What it all means:
[Tasks](../contracts/tasks.md#over-http).

An error is `{{"error": NAME, "message": ONE SENTENCE}}`.
"""

# ---- what the code has no words for; every name has to have its sentence here --------------------------

STATE_MEANINGS: dict[State, str] = {
    "SCHEDULED": "accepted, and held back until its delay is over",
    "QUEUED": "waits for somebody to claim it",
    "PROCESSING": "leased: somebody works on it, or did until now",
    "FAILED": "a moment on the way to `RETRYING`, `QUEUED` or `DEAD_LETTER`; never at rest",
    "RETRYING": "failed, and held back until it is tried again",
    "COMPLETED": "done by its holder, and nobody has acted on the result",
    "EXECUTING": "its result is a decision of its own, which is being executed",
    "DONE": "its decision was executed",
    "DEAD_LETTER": "failed more often than it may; kept for a person",
    "CANCELLED": "nobody wants it any more",
    "EXPIRED": "waited longer than it was worth",
    "QUARANTINED": "brings workers down; kept for a person",
}

CALLS: dict[str, str] = {
    "accept": "`Tasks.enqueue`",
    "wake": "`Tasks.claim`, `Tasks.sweep`",
    "promote": "",
    "lease": "`Tasks.claim`",
    "renew": "`Tasks.heartbeat`",
    "complete": "`Tasks.complete`",
    "release": "`Tasks.release`",
    "defer": "",
    "fail": "`Tasks.fail`",
    "lapse": "`Tasks.claim`, `Tasks.sweep`",
    "retry": "`Tasks.fail`, `Tasks.claim`, `Tasks.sweep`",  # a lapse is tried again at once, see NARROWER
    "bury": "`Tasks.fail`, `Tasks.claim`, `Tasks.sweep`",
    "hand_over": "`Tasks.open_decision`",
    "settle": "`Tasks.settle`",
    "cancel": "`Tasks.cancel`",
    "expire": "",
    "quarantine": "",
    "replay": "`Tasks.retry`",
}
"""The call that makes a transition; empty while no contract has one."""

NARROWER: dict[EventKind, str] = {"retry_scheduled": "`Tasks.fail`"}
"""Where not every call of the verb writes this kind."""

ALSO: dict[EventKind, str] = {
    "created": "`Tasks.enqueue`, `Tasks.open_decision` (of the decision)",
    "enqueued": "`Tasks.retry` (after `replayed`), `Tasks.open_decision` (of the decision)",
    "execution_completed": "`Tasks.settle` (of the decision)",
    "duplicate": "`Tasks.enqueue` (a known id or key)",
    "deleted": "`Tasks.purge` (once a batch)",
}
"""Events that tell of no transition, or that come along with another."""

KIND_MEANINGS: dict[EventKind, str] = {
    "created": "it was accepted",
    "enqueued": "it can be claimed from now on",
    "promoted": "it was claimed as one of a better lane, because it has waited long",
    "dequeued": "somebody holds a lease; the number of this event is its token",
    "conflict_detected": "it collides with another message",
    "conflict_resolved": "and that was settled",
    "conflict_resolution_failed": "and that could not be settled",
    "execution_started": "its result became a decision, which is to be executed",
    "execution_completed": "its holder said that it is done",
    "execution_failed": "its holder said that it failed",
    "retry_scheduled": "it is tried again after a pause",
    "deferred": "it waits, for a reason that the detail names; nothing is counted against it",
    "dead_letter": "it is not tried again",
    "heartbeat": "its holder is still at work",
    "lease_lapsed": "its holder was not heard of in time",
    "released": "its holder gave it back untouched",
    "cancelled": "somebody cancelled it",
    "expired": "it waited too long",
    "quarantined": "it was put aside",
    "replayed": "a person tries it again",
    "duplicate": "it was enqueued once more, and the first one stands",
    "rejected": "it was refused",
    "delivered": "its result was acted on",
    "deleted": "records that were over are forgotten; it names no message",
    "breaker_opened": "something it needs is out of order",
    "breaker_closed": "and works again",
    "tokens_reserved": "part of a budget was set aside for it",
    "tokens_returned": "and given back",
    "alert": "a person should look",
}

AUDIT_FIELD_MEANINGS = {
    "event_id": "`SOURCE#SEQ`: the same whenever and by whomever the source is read",
    "seq": "its number: gap-free and growing within a source",
    "ts_us": "when it happened, microseconds of UTC; the order is `seq`",
    "kind": "what happened",
    "contract": "`bus`, `queue`, `mail`, `tasks`, `engine`, or `audit` for the stream itself",
    "source": "the store or the file that it comes from",
    "schema": "the version of this schema",
    "queue": "the queue, bus, session or mailbox; a private mailbox only as a hash",
    "org_id": "the organization it belongs to",
    "user_id": "the user it is for",
    "agent_id": "the agent it is for, or who sent it",
    "message_id": "the message",
    "goal_id": "the goal it serves",
    "task_id": "the task it belongs to",
    "parent_message_id": "the message it comes from; in `created`",
    "type": "the message's type; in `created`",
    "priority": "its lane, 0 to 3; 0 goes first",
    "state": "where the message is after it",
    "attempt": "deliveries so far",
    "worker_id": "who holds or held the lease",
    "trace_id": "the request it belongs to, where the sender says so",
    "span_id": "its part of that request",
    "duration_us": "how long it waited (`dequeued`), or was worked on (`execution_*`, `lease_lapsed`)",
    "error_type": "the class of an error",
    "error": "what the error says, redacted",
    "model": "the model that was called",
    "tokens_in": "tokens that went in",
    "tokens_out": "tokens that came out",
    "cost_usd": "what that cost",
    "body_bytes": "the length of the payload as it was sent",
    "payload": "the payload as text, redacted; or encrypted, when it begins with `enc:`",
    "sender": "who sent it",
    "recipient": "whom it is for, or who took it",
    "service": "the service that a breaker or a budget is about",
    "lease": "the token of the lease that it is about",
    "detail": "further facts of one kind of event",
    "prior": "the state before, of an end or a replay",
}

FIELD_MEANINGS = {
    "seq": "its number: gap-free and growing within a store",
    "ts_us": "microseconds of UTC, for people; the order is `seq`",
    "kind": "see below",
    "queue": "whose queue it is about: the agent",
    "message_id": "the task's id",
    "state": "where the message is after it",
    "attempt": "deliveries so far",
    "priority": "its lane; 0 goes first",
    "lease": "the token of the lease that it is about",
    "worker_id": "who holds or held that lease",
    "duration_us": "how long it waited (`dequeued`), or was worked on (`execution_*`, `lease_lapsed`)",
    "error_type": "the class of an error",
    "error": "what the error says",
    "type": "the message's type; in `created` only",
    "parent_message_id": "what it comes from; in `created` only",
    "body_bytes": "the length of its payload; in `created` only",
    "detail": "facts of one kind of event: `key`, `from`, `delay_s`, `decision`, `records`",
    "prior": "the state before, of an end or a replay",
}


def pages() -> dict[Path, str]:
    """Every page, as it should be."""
    return {
        PAGES / "cli.md": cli_page(),
        PAGES / "settings.md": settings_page(),
        PAGES / "lifecycle.md": lifecycle_page(),
        PAGES / "events.md": events_page(),
        PAGES / "audit-events.md": audit_events_page(),
        PAGES / "http.md": http_page(),
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
    """The help of a command, and then of the commands below it."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=HELP_COLUMNS, **command.context_settings
    )
    help_text = command.get_help(context).rstrip()
    yield f"## {context.command_path}\n\n```text\n{help_text}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from command_sections(command.commands[below], below, context)


def settings_page() -> str:
    tables = [table("bus", BusSettings), table("queue", QueueSettings), table("audit", AuditSettings)]
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
    """Arrows between the same two states are one arrow with all their verbs."""
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
            "A kind without a call is kept for the contracts to come: nothing writes it today.\n",
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
            "## Which operation is told as what\n",
            rows("| contract | operation | kinds |", operations),
            "What the kinds mean is on the page of [events](events.md#kinds).\n",
        ]
    )


def audit_field_row(name: str, schema: dict[str, Any]) -> str:
    kind = "string" if "enum" in schema or name in ("state", "kind", "contract") else shape(schema)
    if name == "cost_usd":
        kind = "number, exact"
    return f"| `{name}` | {kind} | {default(schema)} | {AUDIT_FIELD_MEANINGS[name]} |"


# ---- HTTP --------------------------------------------------------------------------------------------


def http_page() -> str:
    schemas: dict[str, Any] = openapi()["components"]["schemas"]
    routes = [served.route for served in ROUTES]
    bodies = dict.fromkeys(body.__name__ for route in routes for body in route.bodies)
    answers = [name for name in schemas if name not in bodies]
    return "\n".join(
        [
            HTTP_HEAD,
            "## Routes\n",
            rows("| route | who | what it does | answers | refusals |", route_rows()),
            "`text/event-stream` has `id`, `event` and `data` each; `Last-Event-ID` goes on behind one. A",
            "bus stream whose place is gone sends the event `reset` and goes on with the oldest message.\n",
            "## Errors\n",
            rows("| error | status |", error_rows()),
            "Besides: 400 `BadRequest` for what is not HTTP or has trailers, 401 `Unauthorized`, 403",
            "`Forbidden`, 408 `TooSlow`, 413 and 431 `TooLong`; for a route that is not here 404 `NotFound`",
            "or 405 `MethodNotAllowed`. 429, 503 and 507 say `Retry-After`.\n",
            "## Queries\n",
            *(query_section(route) for route in routes if properties(route.query)),
            "## Bodies\n",
            "A field that is not here is refused.\n",
            *(struct_section(name, schemas[name]) for name in bodies),
            "## Answers\n",
            *(struct_section(name, schemas[name]) for name in answers),
        ]
    )


def route_rows() -> Iterator[str]:
    for route, operators_only in ((served.route, served.operators_only) for served in ROUTES):
        who = "anybody" if route.is_open else "operators" if operators_only else "agents, operators"
        answers = "<br>".join(f"{status} {answer(kinds)}".strip() for status, kinds in route.answers.items())
        answers += ", or `text/event-stream`" if route.streams else ""
        refusals = ", ".join(map(str, route.refusals))
        yield f"| `{route.method} {route.path}` | {who} | {route.summary} | {answers} | {refusals} |"


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


def query_section(route: Route) -> str:
    return struct_section(f"{route.method} {route.path}", {"properties": properties(route.query)})


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
    said = f"{schema['description']}\n\n" if "description" in schema else ""
    return f"### `{name}`\n\n{said}{rows('| field | is | default |', lines)}"


def default(schema: dict[str, Any]) -> str:
    return f"`{msgspec.json.encode(schema['default']).decode()}`" if "default" in schema else ""


def shape(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        return "; or ".join(shape(one) for one in schema["anyOf"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema:
        listed = ", ".join(f"`{one}`" for one in schema["enum"])
        return ENUMS.get(frozenset(schema["enum"]), listed)
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {shape(schema['items'])}{bounds(schema)}"
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
