"""`postroom bus`: the append-only log."""

import itertools
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.render import warn
from postroom.cli.server_options import token_option
from postroom.cli.shell import (
    COUNT,
    HELP_OPTIONS,
    Shell,
    Stopped,
    add_json_option,
    body_options,
    durability_option,
    note_missing,
    path_option,
    read_body,
    reader_gone,
    sentence,
    timeout_option,
)
from postroom.errors import EXIT_OK, EXIT_RUNTIME, PostroomError

if TYPE_CHECKING:
    from postroom.contracts.bus import Bus, BusReport
    from postroom.message import BusMessage

TAIL_DEFAULT = 10
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
LONG_WORK_BYTES = 64 * 1024 * 1024  # from this size on, `verify` says what it is doing

_UNITS = {
    "": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|[kmg]i?)b?", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """A number of bytes such as 4096, 10MB (a million each) or 10MiB (1,048,576 each)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 4096, 10MB or 10MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


bus_option = path_option("--bus", "path", metavar="PATH", text="The bus file.  [default: $POSTROOM_BUS]")
archives_option = click.option("--archives", is_flag=True, help="Read the archives, too.")
limit_option = click.option("--limit", type=COUNT, metavar="N", help="Stop after the first N messages.")
since_option = click.option(
    "--since", "since_id", metavar="MSG_ID", default="", help="Start after this message."
)


@click.group(context_settings=HELP_OPTIONS)
def bus() -> None:
    """The append-only message log.

    One YAML file with many writers. Every reader keeps its own position.

    \b
    Example:
      export POSTROOM_BUS=runs/messagebus.yaml
      postroom bus post --type progress --project demo --body "half way"
      postroom bus follow
    """


@bus.command()
@bus_option
@click.option(
    "--type", "kind", required=True, metavar="TYPE", help="The type of the message, such as agent_started."
)
@click.option("--project", "project_id", required=True, metavar="ID", help="The project of the message.")
@click.option("--task", "task_id", default="", metavar="ID", help="The task of the message.")
@click.option("--run", "run_id", default="", metavar="ID", help="The run of the message.")
@click.option(
    "--parent",
    "parents",
    multiple=True,
    metavar="MSG_ID",
    help="A message that this one answers. May be repeated.",
)
@click.option(
    "--attachment", metavar="PATH", help="A file below the folder of the bus, relative to that folder."
)
@click.option("--ts", metavar="TIME", help="The time of the message, RFC 3339.  [default: now]")
@body_options
@durability_option
@click.option("--id-only", is_flag=True, help="Print the bare id, also into a pipe.")
@click.pass_obj
def post(
    shell: Shell, /, path: Path | None, kind: str, parents: tuple[str, ...], body: str | None,
    body_file: str | None, durability: str | None, id_only: bool, **fields: str | None,
) -> None:  # fmt: skip
    """Append one message and print its id.

    The body is kept byte for byte.

    \b
    Example:
      postroom bus post --bus bus.yaml --type note --project demo --body "hello"
      make test 2>&1 | postroom bus post --bus bus.yaml --type log --project demo --task t1
      START=$(postroom bus post --id-only --bus bus.yaml --type start --project demo --body "")
      postroom bus post --bus bus.yaml --type stop --project demo --parent "$START" --body done
    """
    from postroom.core.formats.buswire import BODY_BYTES_MAX

    with shell.bus(path, durability) as log:
        text = read_body(shell, body, body_file, BODY_BYTES_MAX)
        msg_id = log.append(type=kind, parents=parents, body=text, **fields)  # type: ignore[arg-type]
    shell.output.msg_id(msg_id, bare=id_only)


@bus.command()
@bus_option
@since_option
@limit_option
@archives_option
@click.pass_obj
def read(shell: Shell, path: Path | None, since_id: str, limit: int | None, archives: bool) -> None:
    """Print all messages, or those after --since, oldest first.

    \b
    Example:
      postroom bus read --bus bus.yaml --limit 20
      postroom bus read --bus bus.yaml --since MSG-20261115-010112-326360337-PID26098-0001
    """
    print_messages(shell, itertools.islice(opened(shell, path).scan(since_id, archives=archives), limit))


@bus.command()
@bus_option
@click.option("-n", "count", type=COUNT, default=TAIL_DEFAULT, show_default=True, help="How many messages.")
@click.pass_obj
def tail(shell: Shell, path: Path | None, count: int) -> None:
    """Print the last messages, oldest first.

    \b
    Example:
      postroom bus tail --bus bus.yaml -n 3
    """
    print_messages(shell, opened(shell, path).tail(count))


@bus.command()
@bus_option
@since_option
@archives_option
@timeout_option("Stop after S seconds.  [default: never]")
@click.option("-n", "count", type=COUNT, metavar="N", help="Start with the last N messages instead of all.")
@click.option("--new", "only_new", is_flag=True, help="Start with the next message, as -n 0 does.")
@click.option("--type", "kind", metavar="TYPE", help="Only messages of this type; -n counts these.")
@click.pass_obj
def follow(
    shell: Shell, path: Path | None, since_id: str, archives: bool, timeout_s: float | None,
    count: int | None, only_new: bool, kind: str | None,
) -> None:  # fmt: skip
    """Print the stored messages, then new ones as they arrive.

    Follows the file across rotations. Ends at a signal, after --timeout-s, or when its output is closed.

    \b
    Example:
      postroom bus follow --bus bus.yaml | jq -r .body
      postroom bus follow --bus bus.yaml --new --type error
    """
    if only_new and count is not None:
        raise click.UsageError("give -n or --new, not both")
    count = 0 if only_new else count
    if since_id and count is not None:
        raise click.UsageError("give --since, or one of -n and --new, not both")
    log = shell.bus(path)
    log.need_bus()
    if count is not None:
        since_id = before_last(log, count, kind)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def stop() -> bool:
        return reader_gone() or (deadline is not None and time.monotonic() >= deadline)

    try:
        for message in log.follow(since_id, archives=archives, stop=stop):
            if kind is not None and message.type != kind:
                continue
            shell.output.bus_message(message)
            shell.output.flush()
    except Stopped:
        return  # the normal end of a follower


@bus.command()
@bus_option
@click.option("--type", metavar="TYPE", help="Only messages of this type.")
@click.option("--project", "project_id", metavar="ID", help="Only messages of this project.")
@click.option("--task", "task_id", metavar="ID", help="Only messages of this task.")
@click.option("--run", "run_id", metavar="ID", help="Only messages of this run.")
@click.option("--since", metavar="TIME", help="Only messages from this time on, RFC 3339.")
@click.option("--until", metavar="TIME", help="Only messages before this time, RFC 3339.")
@click.option("--parent", metavar="MSG_ID", help="Only answers to this message.")
@limit_option
@archives_option
@click.pass_obj
def query(shell: Shell, /, path: Path | None, **filters: Any) -> None:
    """Print the messages that match every given field.

    Reads the whole file.

    \b
    Example:
      postroom bus query --bus bus.yaml --task t1 --type error
      postroom bus query --bus bus.yaml --since 2026-11-15T00:00:00Z --until 2026-11-16T00:00:00Z
    """
    print_messages(shell, opened(shell, path).query(**filters))


@bus.command()
@bus_option
@click.pass_obj
def count(shell: Shell, path: Path | None) -> None:
    """Print the number of messages in the file.

    \b
    Example:
      postroom bus count --bus bus.yaml
    """
    shell.output.number(opened(shell, path).count())


@bus.command()
@bus_option
@click.option(
    "--root",
    type=FOLDER,
    metavar="DIR",
    help="Rotate every bus below this folder instead of one.",
)
@click.option(
    "--max-size",
    type=parse_size,
    metavar="SIZE",
    help="Rotate only files of at least this size, such as 10MB.",
)
@click.pass_obj
def rotate(shell: Shell, path: Path | None, root: Path | None, max_size: int | None) -> int:
    """Rename the file to an archive.

    The next message starts a new file. Safe while writers and followers of postroom are running; not while
    the original conductor-loop writes.

    \b
    Example:
      postroom bus rotate --bus bus.yaml
      postroom bus rotate --root runs --max-size 10MB
    """
    if root is None:
        return rotate_all(shell, [shell.bus_path(path)], max_size)
    if path is not None:
        raise click.UsageError("give --bus or --root, not both")
    if max_size is None:
        raise click.UsageError("--root needs --max-size, such as 10MB")
    from postroom.contracts.bus import discover as find

    shell.note(f"looking for buses below {root}")
    return rotate_all(shell, find(root), max_size)


@bus.command()
@bus_option
@click.pass_obj
def verify(shell: Shell, path: Path | None) -> int:
    """Check every record, and list damage and duplicate ids.

    The exit code is 1 when there are any. The file is not changed: damaged bytes stay where they are, and
    readers skip them. An unfinished record at the end is reported, but is not damage.

    \b
    Example:
      postroom bus verify --bus bus.yaml
    """
    log = shell.bus(path)
    log.need_bus()
    size = log.path.stat().st_size
    if size >= LONG_WORK_BYTES:
        shell.note(f"checking {log.path}, {size:,} bytes")
    report = log.verify()
    print_report(shell, report)
    return EXIT_OK if report.ok else EXIT_RUNTIME


@bus.command()
@click.option(
    "--root",
    type=FOLDER,
    metavar="DIR",
    default=".",
    show_default="the current folder",
    help="Where to look.",
)
@click.pass_obj
def discover(shell: Shell, root: Path) -> None:
    """List the bus files below a folder, without archives.

    \b
    Example:
      postroom bus discover --root runs
    """
    from postroom.contracts.bus import discover as find

    rows = ({"path": str(path), "bytes": size_of(path)} for path in find(root))
    shell.output.rows(["bytes", "path"], rows, empty=f"there is no bus below {root}")


@bus.command()
@click.argument("name", metavar="NAME")
@click.option("--url", metavar="URL", required=True, help="The address of the server.")
@token_option
@click.option(
    "--org-id", metavar="ORG", default="", help="Its organization, for an operator of all organizations."
)
@click.pass_obj
def remove(shell: Shell, name: str, url: str, token: str | None, org_id: str) -> None:
    """Remove a bus of a server, with its archives. Its streams end.

    The agent that created the bus may do that, and operators.

    \b
    Example:
      postroom bus remove plan --url http://127.0.0.1:8800 --token $TOKEN
    """
    from urllib.parse import quote

    from postroom.cli.places import needed_token
    from postroom.client.calls import HttpClient

    with HttpClient(url, needed_token(token)) as client:
        path = f"/bus/{quote(name, safe='')}/remove?org_id={quote(org_id, safe='')}"
        removed = client.request("POST", path, retries=0)
    of = f" of {removed['org_id']}" if removed["org_id"] else ""
    shell.output.facts(removed, f"the bus {removed['bus']}{of} is removed")


add_json_option(bus)


def opened(shell: Shell, path: Path | None) -> "Bus":
    """A bus to read. Refuses a file that is not a bus, and warns when there is no file."""
    log = shell.bus(path)
    note_missing(shell, log.path)
    log.need_bus()
    return log


def before_last(log: "Bus", count: int, kind: str | None) -> str:
    """The id of the message before the last `count` messages of a type; empty for the whole file."""
    window = count + 1
    while True:
        messages = log.tail(window)
        matching = [at for at, message in enumerate(messages) if kind is None or message.type == kind]
        whole = len(messages) < window
        first = len(messages) if count == 0 else matching[-count] if len(matching) >= count else 0
        if first > 0:
            return messages[first - 1].msg_id
        if whole:
            return ""
        window *= 2


# ---- printing ----------------------------------------------------------------------------------


def print_messages(shell: Shell, messages: Iterable["BusMessage"]) -> None:
    for message in messages:
        shell.output.bus_message(message)


def print_report(shell: Shell, report: "BusReport") -> None:
    import msgspec

    if not shell.output.readable:
        shell.output.json_line({**msgspec.to_builtins(report), "ok": report.ok})
        return
    damaged, duplicates = msgspec.to_builtins(report.damaged), msgspec.to_builtins(report.duplicates)
    shell.output.sentence(report.path)
    shell.output.text(
        f"{shell.output.verdict(report.ok)}: {report.messages:,} messages in {report.bytes:,} bytes, "
        f"{report.checked:,} with a correct checksum, {report.unchecked:,} without one"
    )
    if report.torn_tail_bytes:
        shell.output.text(f"{report.torn_tail_bytes:,} bytes of an unfinished record at the end")
    if damaged:
        shell.output.rows(["offset", "length", "reason"], damaged, empty="")
    if duplicates:
        shell.output.text(f"{len(duplicates):,} records with the id of an earlier one")
        shell.output.rows(["offset", "first_offset", "msg_id"], duplicates, empty="")


# ---- rotating ----------------------------------------------------------------------------------


def rotate_all(shell: Shell, paths: list[Path], max_size: int | None) -> int:
    """Rotate every file. A failure does not stop the others."""
    worst = EXIT_OK
    for path in paths:
        try:
            size = size_of(path)
            with shell.bus(path) as log:
                archive = log.rotate(max_size or 1)
        except (PostroomError, OSError) as error:
            warn(shell.program, sentence(error))
            worst = EXIT_RUNTIME
            continue
        facts = {"path": str(path), "bytes": size, "archive": None if archive is None else str(archive)}
        done = "is not rotated" if archive is None else f"is now {archive}"
        shell.output.facts(facts, f"{path} {done} ({size:,} bytes)")
    return worst


def size_of(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
