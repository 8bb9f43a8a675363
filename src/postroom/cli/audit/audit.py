"""`postroom audit`: the stream of all events."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.server_options import store_option
from postroom.cli.shell import (
    COUNT,
    COUNT_MAX,
    HELP_OPTIONS,
    Shell,
    Stopped,
    StoreAddress,
    add_json_option,
    as_folder,
    as_path,
    parse_time,
    path_option,
    reader_gone,
)
from postroom.errors import EXIT_RUNTIME

if TYPE_CHECKING:
    from postroom.contracts.audit import Audit
    from postroom.core.history.tracing import Span
    from postroom.settings import AuditSettings

SERVICE = "postroom-audit"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise
DATABASE = "queue.db"
TAIL_DEFAULT = 20
FOLLOW_EVERY_S = 0.5
EVENT_COLUMNS = ("time", "kind", "queue", "message_id", "worker_id", "error")
SPAN_COLUMNS = (
    "at_ms", "message", "type", "queue", "waited_ms", "took_ms", "attempts", "outcome", "next_try", "error",
)  # fmt: skip
STEPS_MAX = 10  # deepest indent of a message in a trace; a deeper message shows its depth as a number
KEEP_DAYS_MAX = 365_000.0  # a thousand years
PATH = click.Path(path_type=Path)
CONTRACTS = ("bus", "queue", "mail", "tasks", "engine", "audit")
folder_argument = click.argument(
    "folder", type=click.Path(), callback=as_path, required=False, metavar="[FOLDER]"
)
key_option = path_option(
    "--key-file",
    metavar="FILE",
    text="The keys of encrypted payloads.  [default: the setting audit.key_file]",
)


@click.group(context_settings=HELP_OPTIONS)
def audit() -> None:
    """The audit stream: every event of every contract, in sealed and chained files.

    FOLDER is the folder that `ship` writes to.  [default: the setting audit.folder]

    \b
    Example:
      postroom audit ship --data run --to audit
      postroom audit trace audit TASK_ID
      postroom audit verify audit
    """


# ---- writing -----------------------------------------------------------------------------------------


def _as_stream(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """The folder of a stream, or the address of a database that has its table."""
    from postroom.stores.open import POSTGRES

    is_table = value is not None and value.startswith(POSTGRES)
    return StoreAddress.of(str(value)) if is_table else as_path(context, parameter, value)


@audit.command()
@click.option(
    "--to",
    "folder",
    type=click.Path(),
    callback=_as_stream,
    metavar="FOLDER",
    help="The folder of the stream, or a database for a stream in a table (postgres://...).",
)
@click.option(
    "--data",
    type=click.Path(),
    multiple=True,
    callback=lambda context, parameter, names: tuple(as_folder(context, parameter, name) for name in names),
    metavar="DIR",
    help="A harness's data folder.",
)
@store_option("A store, such as sqlite:///run/queue.db.", multiple=True)
@click.option(
    "--queue",
    "roots",
    type=PATH,
    multiple=True,
    metavar="ROOT",
    help="A queue's folder.",
)
@click.option("--bus", "buses", type=PATH, multiple=True, metavar="FILE", help="A bus file.")
@click.option("--mail", type=PATH, multiple=True, metavar="DIR", help="A mail server's data folder.")
@click.option("--once", is_flag=True, help="Ship the waiting events, seal them and exit.")
@click.option("--while-stdin", is_flag=True, hidden=True, help="Exit when stdin ends: the parent has exited.")
@click.pass_obj
def ship(
    shell: Shell, /, folder: Path | None, data: tuple[Path, ...], store: tuple[str, ...],
    roots: tuple[Path, ...], buses: tuple[Path, ...], mail: tuple[Path, ...], once: bool, while_stdin: bool,
) -> None:  # fmt: skip
    """Ship events to the stream as they are committed, until SIGTERM.

    No event is lost when the shipper is killed: the next one continues where the stream ends. Secrets and
    personal data are redacted as the settings audit.environment and audit.redaction say; the default is full.

    \b
    Example:
      postroom audit ship --data run --bus runs/bus.yaml --to audit
      postroom audit ship --store postgres://app@db/postroom --to postgres://audit@db/postroom
    """
    from postroom.server.folder.shipping import Sources
    from postroom.server.telemetry.export import exporting

    _check_exists("bus", buses)
    for path in buses:
        shell.bus(path).need_bus()
    _check_exists("queue", roots)
    _check_exists("mail server's data folder", mail)
    stores = (*map(_existing, store), *(f"sqlite:///{_database(path)}" for path in data))
    if not (stores or roots or buses or mail):
        raise click.UsageError(
            "say what to ship: --data DIR, --store URL, --queue ROOT, --bus FILE or --mail DIR"
        )
    settings = shell.settings.audit
    shell.show_warnings()
    with _shipping(
        _folder(shell, folder, "--to FOLDER"), Sources(stores, roots, buses, mail), settings
    ) as shipping:
        if once:
            shipped = shipping.once()
        else:
            shell.output.facts({"folder": str(folder or settings.folder)}, "shipping; SIGTERM ends it")
            shell.output.flush()
            progress = shipping.shipper.progress
            with exporting(SERVICE) as telemetry:
                if telemetry is not None:
                    telemetry.observe(progress.gauges())
                shipping.run(_until_stopped(shell, progress, while_stdin=while_stdin))
            shipped = progress.shipped
    shell.output.facts({"shipped": shipped}, f"{shipped} events shipped")


def _shipping(folder: Path, sources: Any, settings: "AuditSettings") -> Any:
    """A shipper to a folder or to a table."""
    if isinstance(folder, StoreAddress):
        from postroom.server.folder.audit_table import opened_table

        return opened_table(folder.url, sources, settings)
    from postroom.server.folder.shipping import opened

    return opened(folder, sources, settings)


@audit.command()
@click.argument("address", metavar="URL")
@path_option("--to", "folder", metavar="FOLDER", text="The folder of segments.")
@click.pass_obj
def export(shell: Shell, address: str, folder: Path | None) -> None:
    """Write the events of a table to segments, which the pipeline and every other command read.

    The next export continues where the folder ends. The table stays as it is.

    \b
    Example:
      postroom audit export postgres://audit@db/postroom --to audit
      postroom pipeline run --events audit --tables tables
    """
    from postroom.server.folder.audit_table import export_table
    from postroom.stores.open import POSTGRES

    if not address.startswith(POSTGRES):
        raise click.UsageError("URL is the address of a database: postgres://user@host/db")
    shell.show_warnings()
    exported = export_table(address, _folder(shell, folder, "--to FOLDER"), shell.settings.audit)
    shell.output.facts({"exported": exported}, f"{exported} events exported")


@audit.command()
@path_option("--data", metavar="DIR", text="A harness's data folder.")
@click.option("--store", metavar="URL", help="A store, such as sqlite:///run/queue.db.")
@click.pass_obj
def detach(shell: Shell, data: Path | None, store: str | None) -> None:
    """Mark a store as no longer shipped: it keeps no more events for a shipper, and delays no task.

    \b
    Example:
      postroom audit detach --data run
    """
    from postroom.contracts.feeds import set_outbox
    from postroom.stores.open import open_store

    if (data is None) == (store is None):
        raise click.UsageError("say which store: --data DIR, or --store URL")
    opened = open_store(f"sqlite:///{_database(data)}" if data is not None else _existing(str(store)))
    set_outbox(opened, None)
    opened.close()
    shell.output.facts({"store": "detached"}, "the store no longer keeps events for a shipper")


def _existing(url: str) -> str:
    """Refuse a store that does not exist: opening it would make it."""
    scheme, _, path = url.partition("sqlite:///")
    if not scheme and not Path(path).exists():
        raise click.ClickException(f"there is no store at {path}")
    return url


def _check_exists(what: str, paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.exists():
            raise click.ClickException(f"there is no {what} at {path}")


def _database(data: Path) -> Path:
    database = data.absolute() / DATABASE
    if not database.exists():
        from postroom.server.folder.layout import nothing_in

        raise nothing_in(data, "tasks")
    return database


def _until_stopped(shell: Shell, progress: Any, *, while_stdin: bool) -> Callable[[float], bool]:
    """A wait that ends at once at a signal, and prints the progress on a terminal."""
    import signal

    from postroom.system.heartbeat import BEAT_EVERY_S, HEARTBEAT

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if while_stdin:
        from postroom.system.parent import stop_with_stdin

        stop_with_stdin()

    def stopped(wait_s: float) -> bool:
        shell.note_progress(f"{progress.shipped} events shipped, {progress.waiting} waiting")
        HEARTBEAT.beat()
        while wait_s > BEAT_EVERY_S and not stop.wait(BEAT_EVERY_S):
            HEARTBEAT.beat()
            wait_s -= BEAT_EVERY_S
        return stop.wait(wait_s)

    return stopped


@audit.command()
@click.argument("folder", type=click.Path(), callback=_as_stream, required=False, metavar="[FOLDER]")
@click.option(
    "--keep-days",
    type=click.FloatRange(0, KEEP_DAYS_MAX),
    callback=lambda _c, _p, days: _number(days),
    required=True,
    metavar="N",
    help="How many days events are kept.",
)
@click.pass_obj
def retain(shell: Shell, folder: Path | None, keep_days: float) -> None:
    """Remove segments that were sealed more than N days ago, the oldest first. `verify` stays clean.

    When no segment is removed, the output says why. Of a stream in a table, whole months that ended more than
    N days ago are removed: export them first if you still need them.

    \b
    Example:
      postroom audit retain audit --keep-days 90
      postroom audit retain postgres://audit@db/postroom --keep-days 90
    """
    before = datetime.now(UTC) - timedelta(days=keep_days)
    if isinstance(folder, StoreAddress):
        from postroom.server.folder.audit_table import retain_table

        shell.show_warnings()
        removed = retain_table(folder.url, before)
        shell.output.facts({"removed": removed}, f"{len(removed)} months removed")
        return
    audit = _audit(shell, folder)
    removed = audit.retain(before)
    if removed:
        shell.output.facts({"removed": removed}, f"{len(removed)} segments removed")
    else:
        why = audit.why_kept()
        shell.output.facts({"removed": [], "why": why}, f"no segment removed: {why}")


@audit.command()
@click.argument("file", type=click.Path(), callback=as_path, metavar="FILE")
@click.argument("name", metavar="NAME")
@click.pass_obj
def key(shell: Shell, file: Path, name: str) -> None:
    """Add a key to FILE, and encrypt payloads with it from now on.

    The earlier keys stay in the file, to read payloads that were encrypted with them.

    \b
    Example:
      postroom audit key audit.keys 2026-11
    """
    from postroom.server.folder.layout import check_key_place
    from postroom.system.crypto.key_file import add_key

    check_key_place(file)
    add_key(file, name)
    shell.output.facts({"key": name}, f"{file} has the key {name}")


# ---- reading -----------------------------------------------------------------------------------------


@audit.command()
@folder_argument
@click.option(
    "-n",
    "count",
    type=COUNT,
    default=TAIL_DEFAULT,
    show_default=True,
    metavar="N",
    help="How many events.",
)
@click.option("--follow", is_flag=True, help="Then print new events as they arrive.")
@key_option
@click.pass_obj
def tail(shell: Shell, folder: Path | None, count: int, follow: bool, key_file: Path | None) -> None:
    """Print the last events, and with --follow new ones as they arrive.

    \b
    Example:
      postroom audit tail audit -n 50
      postroom audit tail audit --follow
    """
    followed = _audit(shell, folder, key_file).follow(count)
    if not follow:
        _print_events(shell, next(followed))
        return
    try:
        while not reader_gone():
            _print_events(shell, next(followed))
            time.sleep(FOLLOW_EVERY_S)
    except Stopped:
        return  # the normal end of a follower


@audit.command()
@folder_argument
@click.option("--since", type=parse_time, metavar="TIME", help="Only events from this time on.")
@click.option("--until", type=parse_time, metavar="TIME", help="Only events before this time.")
@click.option(
    "--kind",
    callback=lambda _c, _p, text: _kind(text),
    metavar="KIND",
    help="Only this kind, such as dead_letter.",
)
@click.option(
    "--contract",
    type=click.Choice(CONTRACTS),
    metavar="NAME",
    help="Only bus, queue, mail, tasks, engine or audit.",
)
@click.option("--queue", metavar="NAME", help="Only this queue, bus or session.")
@click.option("--org", "org_id", metavar="ID", help="Only this organization.")
@click.option("--agent", "agent_id", metavar="ID", help="Only this agent.")
@click.option("--goal", "goal_id", metavar="ID", help="Only this goal.")
@click.option("--message", "message_id", metavar="ID", help="Only this message; uses the index.")
@click.option(
    "--type", "type_", metavar="TYPE", help="Only this type of message; only `created` events have it."
)
@click.option("--error-type", metavar="NAME", help="Only events with an error of this class.")
@click.option("--limit", type=click.IntRange(1, COUNT_MAX), metavar="N", help="Print at most N events.")
@key_option
@click.pass_obj
def query(
    shell: Shell, /, folder: Path | None, since: datetime | None, until: datetime | None, limit: int | None,
    key_file: Path | None, type_: str | None, **equal: str | None,
) -> None:  # fmt: skip
    """Print events by time and by their fields.

    \b
    Example:
      postroom audit query audit --kind dead_letter --since 2026-11-01T00:00:00Z
    """
    filters = {name: value for name, value in {**equal, "type": type_}.items() if value is not None}
    found = _audit(shell, folder, key_file).query(since=since, until=until, **filters)
    _print_events(shell, islice(found, limit))


@audit.command()
@click.argument("first", required=False, metavar="[FOLDER]")
@click.argument("second", required=False, metavar="MESSAGE")
@key_option
@click.pass_obj
def trace(shell: Shell, first: str | None, second: str | None, key_file: Path | None) -> None:
    """Show one request through all its messages, with times: audit trace [FOLDER] MESSAGE.

    MESSAGE is the id of any of these messages. A failed attempt is shown with its error, and a message that
    waits for a retry with the time of the retry.

    \b
    Example:
      postroom audit trace audit t41c0ffee-17
    """
    if first is None or (second is None and shell.settings.audit.folder is None):
        raise click.UsageError("say which message to trace: [FOLDER] MESSAGE")
    message = first if second is None else second  # a single argument is the message
    if not message:
        raise click.UsageError("the id of the message is empty")
    if first == "":
        raise click.UsageError("the path of the folder is empty")
    spans = _audit(shell, None if second is None else Path(first), key_file).trace(message)
    if shell.output.readable:
        shell.output.rows(SPAN_COLUMNS, chain.from_iterable(map(_span_rows, spans)), "")
        return
    for span in spans:
        shell.output.json_line(_plain(span))


@audit.command()
@folder_argument
@click.option("--goal", "goal_id", metavar="GOAL_ID", help="The messages of this goal.")
@click.option("--trace", "trace_id", metavar="ID", help="The messages of this trace, or with this message.")
@path_option("--out", metavar="FILE", text="An .svg file, or a .json file for speedscope.")
@click.pass_obj
def flame(
    shell: Shell, folder: Path | None, goal_id: str | None, trace_id: str | None, out: Path | None
) -> None:
    """Draw where the messages of a goal or a trace spent their time, as a flame graph.

    A frame is a type of message below that of its parent. The time until a delivery is a frame of its own.
    The stream is read; Spark is not needed.

    \b
    Example:
      postroom audit flame audit --goal g1 --out g1.svg
      postroom audit flame audit --trace t41c0ffee-17 --out trace.json
    """
    if (goal_id is None) == (trace_id is None):
        raise click.UsageError("give one of --goal and --trace")
    if out is None or out.suffix not in (".svg", ".json"):
        raise click.UsageError("--out names an .svg or a .json file")
    from postroom.pipeline.report.flames import profile_of, speedscope, svg_file

    audit = _audit(shell, folder)
    spans = audit.goal(goal_id) if goal_id is not None else audit.trace(str(trace_id))
    profile = profile_of(str(goal_id or trace_id), spans)
    if out.suffix == ".svg":
        text = svg_file(profile)
    else:
        import msgspec

        text = msgspec.json.encode(speedscope([profile], profile.name)).decode()
    out.write_text(text, "utf-8")
    facts = {"path": str(out), "messages": len(spans), "total_us": profile.total_us}
    shell.output.facts(facts, f"{out} has the time of {len(spans)} messages")


@audit.command()
@folder_argument
@click.option("--head", metavar="HASH", help="An earlier recorded head, to detect a truncated stream.")
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="URL",
    help="A store that is shipped to this stream: the store also holds the recorded head.",
)
@click.pass_obj
def verify(shell: Shell, folder: Path | None, head: str | None, stores: tuple[str, ...]) -> None:
    """Check that no segment was changed after it was sealed.

    Prints every changed file; the exit code is then 1. The shipper records the last sealed segment in
    FOLDER.head, next to the folder. With that file, a folder that was emptied, truncated or replaced is
    detected, too.

    \b
    Example:
      postroom audit verify audit
    """
    audit = _audit(shell, folder)
    noted = []
    for url in stores:
        from postroom.contracts.feeds import head_in
        from postroom.stores.open import open_store

        with closing(open_store(_existing(url))) as store:
            noted += [found for found in [head_in(store)] if found is not None]
    findings = audit.verify(head, noted=noted)
    for finding in findings:
        shell.output.facts(
            {"file": finding.file, "reason": finding.reason}, f"{finding.file}: {finding.reason}"
        )
    if findings:
        raise click.exceptions.Exit(EXIT_RUNTIME)
    facts = audit.summary()
    is_known = bool(head or noted) or audit.head_is_noted()
    unknown = "" if is_known else "; the head is unknown, so a truncated stream would not be noticed"
    shell.output.facts(
        {**facts, "head_known": is_known},
        f"{facts['segments']} segments, {facts['events']} events: unchanged since they were sealed{unknown}",
    )


# ---- pieces ------------------------------------------------------------------------------------------


def _folder(shell: Shell, folder: Path | None, option: str = "its FOLDER") -> Path:
    found = folder or shell.settings.audit.folder
    if found is None:
        raise click.UsageError(f"there is no stream to use: name {option}, or set POSTROOM_AUDIT")
    return found


def _audit(shell: Shell, folder: Path | None, key_file: Path | None = None) -> "Audit":
    from postroom.audit.cipher import Cipher
    from postroom.contracts.audit import Audit

    shell.show_warnings()
    place, keys = _folder(shell, folder), key_file or shell.settings.audit.key_file
    audit = Audit(place, cipher=None if keys is None else Cipher.from_file(keys))
    audit.need_stream()
    return audit


def _kind(text: str | None) -> str | None:
    """Check a kind. The module of the kinds is imported only when a kind is given."""
    from typing import get_args

    from postroom.message import EventKind

    kinds = get_args(EventKind)
    if text is not None and text not in kinds:
        raise click.BadParameter(f"there is no kind {text!r}; the kinds are {', '.join(kinds)}")
    return text


def _number(days: float) -> float:
    if days != days:  # noqa: PLR0124 - only NaN differs from itself
        raise click.BadParameter("nan is not a number of days")
    return days


# ---- printing ----------------------------------------------------------------------------------------


def _print_events(shell: Shell, events: Any) -> None:
    if not shell.output.readable:
        for event in events:
            shell.output.json_line(_plain(event))
        shell.output.flush()
        return
    names = ("kind", "queue", "message_id", "worker_id", "error")
    rows = (
        {"time": _time_text(event.ts_us), **{name: getattr(event, name) for name in names}}
        for event in events
    )
    shell.output.rows(EVENT_COLUMNS, rows, "no events")


def _plain(struct: Any) -> Any:
    """A struct as values that JSON has."""
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(struct))


def _time_text(ts_us: int) -> str:
    """A time as text; the number itself when no date can represent it."""
    from postroom.core.times import utc_text

    try:
        return utc_text(ts_us * 1000)
    except OverflowError:
        return str(ts_us)


def _span_rows(span: "Span") -> Iterator[dict[str, Any]]:
    """A row for the message, and one for each attempt that failed."""
    indent = "  " * min(span.depth, STEPS_MAX)
    message = f"{indent}[{span.depth}] " if span.depth > STEPS_MAX else indent
    message += span.message_id
    yield {
        "at_ms": f"{span.offset_us / 1000:.1f}",
        "message": message,
        "type": span.type,
        "queue": span.queue,
        "waited_ms": None if span.wait_us is None else f"{span.wait_us / 1000:.1f}",
        "took_ms": f"{span.total_us / 1000:.1f}",
        "attempts": span.attempts,
        "outcome": span.outcome,
        "next_try": None if span.due_us is None else _time_text(span.due_us),
    }
    for failure in span.failures:
        yield {
            "at_ms": f"{failure.offset_us / 1000:.1f}",
            "message": message,
            "attempts": failure.attempt,
            "outcome": "failed",
            "error": ": ".join(filter(None, (failure.error_type, failure.error))),
        }


add_json_option(audit)
