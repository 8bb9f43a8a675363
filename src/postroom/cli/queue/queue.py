"""`postroom queue`, and the commands that `zos-mq` shares with it.

Each command is one function. `zos-mq` gives it the options of the original program; `postroom queue` adds a
few. `render.Output` chooses the form of the output.
"""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from postroom.cli.render import warn
from postroom.cli.shell import (
    COUNT,
    HELP_OPTIONS,
    Shell,
    TimeoutOption,
    add_json_option,
    as_path,
    note_missing,
    parse_wait,
    read_body,
)
from postroom.errors import EXIT_OK, EXIT_RUNTIME, InvalidMessage

if TYPE_CHECKING:
    from postroom.contracts.queue import Queue
    from postroom.contracts.queuecheck import QueueReport

TAIL_DEFAULT = 10
ASK_TIMEOUT_S = 30.0
NAMES_SHOWN = 10  # in a warning
TOPICS = (
    "answer",
    "ask",
    "broadcast",
    "spawn-request",
    "status",
)  # as in the contract, which --help must not import


def parse_seconds(text: str) -> float | int:
    """A number of seconds. Whole numbers stay whole, because the queue stores them as given."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of seconds") from None


root_option = click.Option(
    ["--root"],
    type=click.Path(),
    callback=as_path,
    metavar="DIR",
    help="The folder of the queue.  [default: $POSTROOM_QUEUE_ROOT, $ZOS_MQ_ROOT, $ZOS_HOME/agent-mq, "
    "else a folder of the user]",
)
session_option = click.Option(
    ["--session"],
    metavar="NAME",
    help="The session.  [default: $POSTROOM_QUEUE_SESSION, $ZOS_MQ_SESSION, else default]",
)
every_session_option = click.Option(
    ["--session"], metavar="NAME", help="One session only.  [default: every session]"
)
agent_option = click.Option(
    ["--agent", "agent_id"], required=True, metavar="ID", help="The agent that reads."
)
body_option = click.Option(["--body"], metavar="TEXT", help="The body; - is stdin.  [default: stdin]")
body_file_option = click.Option(
    ["--body-file"], metavar="FILE", help="Read the body from a file; - is stdin."
)
ttl_option = click.Option(
    ["--ttl", "ttl_s"],
    type=parse_seconds,
    metavar="S",
    help="Seconds until the message expires.  [default: never]",
)
sender_option = click.Option(
    ["--sender"],
    metavar="ID",
    help="The agent that sends.  [default: $POSTROOM_QUEUE_AGENT_ID, $ZOS_MQ_AGENT_ID, else anonymous]",
)
durability_option = click.Option(
    ["--durability"],
    type=click.Choice(["os", "group", "fsync"]),
    help="When the message counts as stored: in the page cache, or after an fsync.  "
    "[default: from the settings, else os]",
)
send_options: list[click.Parameter] = [
    click.Option(["--topic"], required=True, type=click.Choice(TOPICS), help="The topic of the message."),
    body_option,
    click.Option(["--to"], metavar="ID", help="The recipient.  [default: every agent]"),
    ttl_option,
    session_option,
    sender_option,
    click.Option(["--reply-to"], metavar="MSG_ID", help="The message that this one answers."),
]
poll_options: list[click.Parameter] = [
    agent_option,
    click.Option(
        ["--topic", "topics"],
        multiple=True,
        type=click.Choice(TOPICS),
        help="Only this topic; messages of other topics are skipped for good. May be repeated.",
    ),
    session_option,
]
tail_options: list[click.Parameter] = [
    click.Option(
        ["-n", "count"], type=COUNT, default=TAIL_DEFAULT, show_default=True, help="How many messages."
    ),
    session_option,
    click.Option(["--include-expired"], is_flag=True, help="Also print expired messages."),
]


# ---- the commands of the original ---------------------------------------------------------------


def send(
    shell: Shell, /, session: str | None, sender: str | None, body: str | None, body_file: str | None = None,
    root: Path | None = None, durability: str | None = None, id_only: bool = False, **fields: Any,
) -> None:  # fmt: skip
    """Store one message and print its id."""
    session, sender = chosen_session(shell, session), chosen_sender(shell, sender)
    with shell.queue(root, durability) as mailbox:
        text = queue_body(shell, body, body_file)
        msg_id = mailbox.send(body=text, session=session, sender=sender, **fields)
    shell.output.msg_id(msg_id, bare=id_only)


def poll(
    shell: Shell, /, agent_id: str, topics: tuple[str, ...], session: str | None, root: Path | None = None,
    durability: str | None = None, **terms: Any,
) -> None:  # fmt: skip
    """Print the new messages of an agent.

    They then count as read. The agent's cursor is stored before anything is printed: a crash loses messages
    rather than repeating them.
    """
    name = chosen_session(shell, session)
    with shell.queue(root, durability) as mailbox:
        messages = mailbox.poll(agent_id, topics or None, name, **terms)
        if not messages:
            note_nothing_to_read(shell, mailbox, name, agent_id)
    print_messages(shell, messages)


def tail(
    shell: Shell, /, count: int, session: str | None, include_expired: bool, root: Path | None = None
) -> None:
    """Print the last messages of a session, without marking them as read."""
    name = chosen_session(shell, session)
    with shell.queue(root) as mailbox:
        messages = mailbox.tail(count, name, include_expired=include_expired)
        note_missing(shell, mailbox.root)
        note_empty(shell, mailbox, name)
    print_messages(shell, messages)


def expire(shell: Shell, /, session: str | None, root: Path | None = None) -> None:
    """Remove expired messages and print how many."""
    with shell.queue(root) as mailbox:
        dropped = mailbox.expire(chosen_session(shell, session))
    shell.output.number(dropped, f"{dropped} expired messages were removed")


def status(shell: Shell, /, session: str | None, root: Path | None = None) -> None:
    """Count the messages of each session."""
    with shell.queue(root) as mailbox:
        counts = mailbox.status(session)
        note_missing(shell, mailbox.root)
        if session is not None:
            note_empty(shell, mailbox, session)
    if shell.output.form == "zos":
        shell.output.pretty(counts)
        return
    by_session = counts if session is None else {session: counts}
    rows = [{"session": name, **facts} for name, facts in by_session.items()]
    columns = ["session", "messages", "expired", "unreadable", "queue_bytes", "by_topic", "cursors"]
    shell.output.rows(columns, rows, empty="there is no session yet")


# ---- the commands of postroom alone -------------------------------------------------------------


def inbox(shell: Shell, /, agent_id: str, session: str | None, root: Path | None) -> None:
    """Show how far an agent has read.

    `empty` is true only when every line was read and none holds a new message for the agent.
    """
    name = chosen_session(shell, session)
    with shell.queue(root) as mailbox:
        facts = mailbox.inbox(agent_id, name)
        note_missing(shell, mailbox.root)
        note_nothing_to_read(shell, mailbox, name, agent_id)
    state = "no message is waiting" if facts["empty"] else "messages are waiting"
    place = f"{facts['cursor']} of {facts['high_water']} bytes in epoch {facts['epoch']}"
    shell.output.facts({"agent_id": agent_id, **facts}, f"{agent_id}: {state}; it has read {place}")


def ask(
    shell: Shell, /, to: str, body: str | None, body_file: str | None, sender: str | None, timeout_s: float,
    ttl_s: float | None, session: str | None, root: Path | None,
) -> None:  # fmt: skip
    """Send a question, wait for the answer and print it."""
    session, sender = chosen_session(shell, session), chosen_sender(shell, sender)
    with shell.queue(root) as mailbox:
        text = queue_body(shell, body, body_file)
        answer = mailbox.ask(text, to, sender=sender, timeout_s=timeout_s, ttl_s=ttl_s, session=session)
    if answer is None:
        raise click.ClickException(f"{to} did not answer within {timeout_s:g} s")
    print_messages(shell, [answer])


def register(shell: Shell, /, agent_id: str, session: str | None, root: Path | None) -> None:
    """Register an agent.

    Once an agent is registered, `send` warns about recipients that are not.
    """
    with shell.queue(root) as mailbox:
        name = chosen_session(shell, session)
        mailbox.register(agent_id, name)
    shell.output.facts({"agent_id": agent_id, "session": name}, f"{agent_id} is registered in session {name}")


def agents(shell: Shell, /, session: str | None, root: Path | None) -> None:
    """List the registered agents."""
    with shell.queue(root) as mailbox:
        rows = [{"agent_id": name} for name in mailbox.agents(chosen_session(shell, session))]
    shell.output.rows(["agent_id"], rows, empty="no agent is registered")


def check(shell: Shell, /, session: str | None, root: Path | None) -> int:
    """Check every file of a session and list the damage.

    The exit code is 1 when there is any. No file is changed.
    """
    with shell.queue(root) as mailbox:
        names = mailbox.sessions() if session is None else [session]
        reports = [mailbox.check(name) for name in names]
        note_missing(shell, mailbox.root)
        if session is not None:
            note_empty(shell, mailbox, session)
    for report in reports:
        print_report(shell, report)
    return EXIT_OK if all(report.ok for report in reports) else EXIT_RUNTIME


def repair(
    shell: Shell, /, agent_id: str | None, to: str | None, msg_id: str | None, body: str | None,
    body_file: str | None, session: str | None, root: Path | None,
) -> None:  # fmt: skip
    """Repair a damaged cursor or side file.

    A cursor is set to a position that you choose: "start" delivers all messages again, "end" none of the
    present ones. A side file is restored from a copy, which has to match the checksum in the message. The
    damaged file is kept under another name.
    """
    if (agent_id is None) == (msg_id is None):
        raise click.UsageError("say what to repair: --agent with --to, or --message with its body")
    name = chosen_session(shell, session)
    with shell.queue(root) as mailbox:
        if msg_id is not None:
            mailbox.repair_body(msg_id, queue_body(shell, body, body_file), name)
            shell.output.facts({"msg_id": msg_id}, f"the side file of {msg_id} is restored")
            return
        if to is None:
            raise click.UsageError("--agent needs --to: start, end or an offset")
        offset = mailbox.repair_cursor(str(agent_id), parse_position(to), name)
    shell.output.facts({"agent_id": agent_id, "cursor": offset}, f"{agent_id} continues at offset {offset}")


def parse_position(text: str) -> Literal["start", "end"] | int:
    match text:
        case "start" | "end":
            return text
        case _ if text.isascii() and text.isdigit():
            return int(text)
    raise click.BadParameter(f"{text!r} is not start, end or an offset in bytes", param_hint="'--to'")


# ---- shared parts -------------------------------------------------------------------------------


def note_nothing_to_read(shell: Shell, mailbox: "Queue", session: str, agent_id: str) -> None:
    """Warn about a session without messages and an unregistered agent: both may be typing errors."""
    note_empty(shell, mailbox, session)
    known = mailbox.agents(session)
    if known and agent_id not in known and shell.output.form != "zos":
        warn(
            shell.program,
            f"warning: {agent_id!r} is not registered in session {session!r}; registered: {shortened(known)}",
        )


def note_empty(shell: Shell, mailbox: "Queue", session: str) -> None:
    """Warn about a session without messages, and name those that have some. `zos-mq` prints no warning."""
    if shell.output.form == "zos" or not mailbox.root.exists() or mailbox.holds_messages(session):
        return
    found = [name for name in mailbox.sessions() if mailbox.holds_messages(name)]
    others = f"; sessions with messages: {shortened(found)}" if found else ""
    warn(shell.program, f"warning: session {session!r} below {mailbox.root} holds no messages{others}")


def shortened(names: list[str]) -> str:
    """The first names, and the number of the others."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def chosen_session(shell: Shell, session: str | None) -> str:
    return shell.settings.queue.session if session is None else session


def chosen_sender(shell: Shell, sender: str | None) -> str:
    return shell.settings.queue.agent_id if sender is None else sender


def queue_body(shell: Shell, body: str | None, body_file: str | None) -> str:
    from postroom.core.formats.queuewire import BODY_BYTES_MAX

    text = read_body(shell, body, body_file, BODY_BYTES_MAX)
    if not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text):
        raise InvalidMessage("the body is not UTF-8, and a queue holds text only")
    return text


def print_messages(shell: Shell, messages: Iterable[Any]) -> None:
    for message in messages:
        shell.output.queue_message(message)


def print_report(shell: Shell, report: "QueueReport") -> None:
    import msgspec

    if not shell.output.readable:
        shell.output.json_line({**msgspec.to_builtins(report), "ok": report.ok})
        return
    shell.output.text(f"{report.session}: {shell.output.verdict(report.ok)}, {report.messages:,} lines")
    faults = [
        *({"what": "session", "reason": reason} for reason in report.state),
        *({"what": f"line at {d.offset}", "reason": d.reason} for d in report.unreadable),
        *({"what": f"cursor of {agent}", "reason": reason} for agent, reason in report.cursors.items()),
        *({"what": f"body of {b.msg_id}", "reason": b.reason} for b in report.bodies),
    ]
    if faults:
        shell.output.rows(["what", "reason"], faults, empty="")
    if report.unused_bodies:
        shell.output.text(f"{len(report.unused_bodies):,} side files that no line names")


# ---- the command line ---------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS, params=[root_option])
@click.pass_obj
def queue(shell: Shell, root: Path | None) -> None:
    """The mailbox of the agents on one machine.

    A message has a topic, and may have a recipient. The queue keeps a cursor for each reader.

    \b
    Example:
      export POSTROOM_QUEUE_ROOT=runs/queue
      postroom queue send --topic ask --to builder --body "is it green?"
      postroom queue poll --agent builder
    """
    shell.queue_root = root


def command(
    name: str, callback: Callable[..., Any], params: list[click.Parameter], *examples: str
) -> click.Command:
    """A command whose help is the callback's docstring and examples."""
    text = f"{inspect.getdoc(callback)}\n\n\b\nExample:\n" + "\n".join(f"  {example}" for example in examples)
    return click.Command(
        name,
        callback=click.pass_obj(callback),
        params=params,
        help=text,
        context_settings=HELP_OPTIONS,
    )


def add(name: str, callback: Callable[..., Any], params: list[click.Parameter], *examples: str) -> None:
    queue.add_command(command(name, callback, [*params, root_option], *examples))


add(
    "send",
    send,
    [
        *send_options,
        body_file_option,
        durability_option,
        click.Option(["--id-only"], is_flag=True, help="Print the bare id, also into a pipe."),
    ],
    'postroom queue send --topic ask --to builder --ttl 600 --body "is it green?"',
    "git diff | postroom queue send --topic broadcast",
)
add(
    "poll",
    poll,
    [
        *poll_options,
        click.Option(
            ["--wait", "wait_s"],
            type=parse_wait,
            default=0.0,
            metavar="S",
            help="Wait up to S seconds for the first message.",
        ),
        click.Option(
            ["--keep-filtered"], is_flag=True, help="Keep messages of other topics for a later poll."
        ),
        click.Option(
            ["--limit"],
            type=COUNT,
            metavar="N",
            help="Print at most N messages; the next poll gets the rest.  [default: all]",
        ),
        durability_option,
    ],
    "postroom queue poll --agent builder --wait 30",
    "postroom queue poll --agent builder --topic ask --keep-filtered",
    "postroom queue poll --agent builder --limit 1",
)
add("tail", tail, tail_options, "postroom queue tail -n 3 --session nightly")
add("expire", expire, [session_option], "postroom queue expire --session nightly")
add("status", status, [every_session_option], "postroom queue status --session nightly")
add("inbox", inbox, [agent_option, session_option], "postroom queue inbox --agent builder")
add(
    "ask",
    ask,
    [
        click.Option(["--to"], required=True, metavar="ID", help="The agent to ask."),
        body_option,
        body_file_option,
        sender_option,
        TimeoutOption(
            ["--timeout-s"],
            type=parse_wait,
            default=ASK_TIMEOUT_S,
            show_default=True,
            metavar="S",
            help="How long to wait for the answer.",
        ),
        ttl_option,
        session_option,
    ],
    'postroom queue ask --to builder --timeout-s 60 --body "is it green?"',
)
add("register", register, [agent_option, session_option], "postroom queue register --agent builder")
add("agents", agents, [session_option], "postroom queue agents")
add("check", check, [every_session_option], "postroom queue check --session nightly")
add(
    "repair",
    repair,
    [
        click.Option(["--agent", "agent_id"], metavar="ID", help="The agent whose cursor to set."),
        click.Option(["--to"], metavar="POSITION", help="start, end, or an offset at which a line starts."),
        click.Option(
            ["--message", "msg_id"], metavar="MSG_ID", help="The message whose side file to restore."
        ),
        body_option,
        body_file_option,
        session_option,
    ],
    "postroom queue repair --agent builder --to end",
    "postroom queue repair --message MSG_ID --body-file copy.txt",
)
add_json_option(queue)
