"""`postroom verify`: checks the guarantees of the contracts, and all data of a folder."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from postroom.cli.render import warn
from postroom.cli.shell import HELP_OPTIONS, Shell, as_path, json_option, parse_time, parse_wait, path_option
from postroom.errors import EXIT_OK, EXIT_RUNTIME, PostroomError, Unavailable

if TYPE_CHECKING:
    from datetime import datetime

    from postroom.audit.reader import Segments
    from postroom.core.formats.events import AuditEvent
    from postroom.core.history.history_checker import History, HistoryVerdict, Open
    from postroom.message import Event, Stored
    from postroom.stores.store import Store

HORIZON_S = 86_400.0
MICROS_PER_S = 1_000_000
PAGE = 1_000  # events of the store per read
COLUMNS = ("rule", "message_id", "event_ids", "sentence")


@click.command(name="verify", context_settings=HELP_OPTIONS)
@click.argument("folder", type=click.Path(), callback=as_path, required=False, metavar="[FOLDER]")
@path_option("--data", metavar="DIR", text="Check all data of this data folder instead.")
@click.option(
    "--store",
    metavar="URL",
    help="The store that was shipped to the stream, such as sqlite:///run/queue.db. Messages that are open "
    "in the stream have to be in the store.",
)
@click.option(
    "--horizon-s",
    type=parse_wait,
    metavar="S",
    help="How long an open message may have no event before it counts as lost; 0: never.  "
    f"[default: {HORIZON_S:g}, with --store 0]",
)
@click.option(
    "--unordered", is_flag=True,
    help="Do not check the order of deliveries: workers of a store on PostgreSQL claim at the same time.  "
    "[default: with --store postgres://... or amqp://...]",
)  # fmt: skip
@click.option(
    "--since", type=parse_time, metavar="TIME",
    help="Start at this RFC 3339 time, such as 2026-02-05T14:30:00Z.",
)  # fmt: skip
@click.option("--until", type=parse_time, metavar="TIME", help="End at this time.")
@click.pass_obj
def verify_command(
    shell: Shell, /, folder: Path | None, data: Path | None, store: str | None, horizon_s: float | None,
    unordered: bool, since: "datetime | None", until: "datetime | None",
) -> int:  # fmt: skip
    """Check the audit stream in FOLDER, or all data of a folder, and print every violation of a guarantee.

    The guarantees: no accepted message is lost, no message is delivered that was not accepted, leases of one
    message never overlap, first deliveries are in order, and a message ends once. The output is a line for
    each violation, with the events that prove it, and at last one line with the figures of what was checked.
    The exit code is 0 without violations, and 1 otherwise.

    With --data, the store, the buses, the mail, the registry and the audit stream of a data folder are read
    whole. Damage is a violation, too. The folder is not changed, and servers may run meanwhile.

    \b
    Example:
      postroom verify audit
      postroom verify audit --store sqlite:///run/queue.db
      postroom verify --data run
      postroom verify audit --since 2026-02-05T00:00:00Z --horizon-s 3600
    """
    from postroom.core.history.history_checker import History
    from postroom.core.times import epoch_ns_of
    from postroom.stores.open import SERVERS

    if folder is None and data is None:
        raise click.UsageError("say what to check: the FOLDER of an audit stream, or --data DIR")
    if folder is not None and data is not None:
        raise click.UsageError(
            f"--data checks the audit stream of {data}, too: leave out the FOLDER {folder}, or --data"
        )
    given = {"--store": store, "--since": since, "--until": until, "--horizon-s": horizon_s}
    unused = [name for name, value in given.items() if value is not None]
    if data is not None and unused:
        raise click.UsageError(f"--data checks the whole folder, so {unused[0]} has no effect: leave it out")
    if data is not None:
        return _verify_data(shell, data, unordered=unordered)
    assert folder is not None  # noqa: S101 - for the type checker: checked above
    if store is not None and until is not None:
        raise click.UsageError("--store compares with the present, so it cannot be used with --until")
    since_us, until_us = (None if time is None else epoch_ns_of(time) // 1000 for time in (since, until))
    overlaps = unordered or (store is not None and store.startswith(SERVERS))
    history = History(since_us=since_us, until_us=until_us, ordered=not overlaps)
    if horizon_s is None:
        horizon_s = HORIZON_S if store is None else 0.0
    horizon_us = round(horizon_s * MICROS_PER_S) or None
    damage = _damage_of_stream(folder, store)
    try:
        _read(shell, folder, history, since_us, until_us)
        if store is None:
            verdict = history.verdict(horizon_us=horizon_us)
        else:
            verdict = _compared_with_store(history, store, horizon_us, stretch_ends=until_us is not None)
    except (click.ClickException, PostroomError) as error:
        if not damage:
            raise
        warn(shell.program, f"warning: the history was not checked: {error}")
        return _show(shell, damage, 0, {}, "the files of the stream")
    stretch = (
        f"{verdict.events:,} events of {len(verdict.sources)} sources, "
        f"{verdict.accepted:,} messages accepted, {verdict.open:,} open"
    )
    return _show(shell, damage + _rows(verdict), verdict.more, _figures(verdict), stretch)


# ---- the stream --------------------------------------------------------------------------------------


def _read(shell: Shell, folder: Path, history: "History", since_us: int | None, until_us: int | None) -> None:
    from postroom.audit.reader import Segments

    segments = Segments(folder, on_trouble=lambda text: warn(shell.program, f"warning: {text}"))
    add = history.add
    n = 0
    for events in _blocks(segments, since_us, until_us):
        for event in events:
            add(event)
        n += len(events)
        shell.note_progress(f"{n:,} events read")


def _blocks(segments: "Segments", since_us: int | None, until_us: int | None) -> "Iterator[list[AuditEvent]]":
    """The events of whole segments. `History` cuts them to --since and --until."""
    from postroom.audit.reader import StreamPosition

    entries = segments.entries()
    first = next((entry.n for entry in entries if since_us is None or entry.max_ts_us >= since_us), None)
    if first is None:  # only the open segment can hold such events
        first = entries[-1].n + 1 if entries else 0
    later = [entry.n for entry in entries if until_us is not None and entry.min_ts_us > until_us]
    for events, place in segments.after(StreamPosition(first, 0)):
        if place.n not in later:
            yield events


# ---- the store that was shipped ----------------------------------------------------------------------


class ReadableStore(Protocol):
    """A store, or a snapshot of one."""

    def identity(self) -> str: ...

    def events(self, after: int, limit: int) -> "list[Event]": ...

    def load(self, message_id: str) -> "Stored | None": ...


def _compared_with_store(
    history: "History", url: str, horizon_us: int | None, *, stretch_ends: bool
) -> "HistoryVerdict":
    """Check that open messages of the stream are in the store, unless they ended after the stream ends."""
    with closing(_opened(url)) as store:
        source = _source_of(history, store)
        if source is None:
            raise click.ClickException(
                f"{url} was not shipped to this stream: none of its sources is {store.identity()}"
            )
        if not stretch_ends:
            _read_on(history, store, source)
        return history.verdict(horizon_us=horizon_us, absent=_absent(store, source))


def _opened(url: str) -> "Store":
    from postroom.stores.open import SQLITE, open_store

    path = url.removeprefix(SQLITE)
    if path != url and not Path(path).exists():
        raise click.ClickException(f"there is no store at {url}")
    return open_store(url)


def _source_of(history: "History", store: ReadableStore) -> str | None:
    """The name of the store in the stream; None when it was not shipped to it."""
    identity = store.identity()
    return next((source for source in history.sources() if source.endswith(f":{identity}")), None)


def _read_on(history: "History", store: ReadableStore, source: str) -> None:
    """Add the events of the store that are not shipped yet."""
    from postroom.core.formats.events import of_store

    contract, last = history.sources()[source]
    while found := store.events(last, PAGE):
        if found[0].seq != last + 1:
            raise click.ClickException(
                f"the stream ends at event {last}, and the store has purged the events after it"
            )
        for event in found:
            history.add(of_store(event, source, contract))
        last = found[-1].seq


def _absent(store: ReadableStore, source: str) -> "Callable[[Open], bool]":
    def absent(message: "Open") -> bool:
        return message.source == source and store.load(message.message_id) is None

    return absent


# ---- a data folder -----------------------------------------------------------------------------------


def _verify_data(shell: Shell, data: Path, *, unordered: bool) -> int:
    """Check every file of a data folder, then the history in its audit stream against its store."""
    from postroom.server.folder.layout import checked_data_folder
    from postroom.server.folder.verification import DataCheck

    check = DataCheck(checked_data_folder(data), shell.note)
    faults = list(check.faults())
    rows = [
        _damage_row("key" if fault.is_locked else "damage", f"{fault.file}: {fault.reason}")
        for fault in faults
    ]
    # The history needs a store and a stream that can be read.
    is_readable = not {"store", "audit"} & {fault.part for fault in faults}
    verdict = _history_of(shell, data, ordered=not unordered) if is_readable else None
    rows += [] if verdict is None else _rows(verdict)
    more = 0 if verdict is None else verdict.more
    facts = {"checked": check.checked, **({} if verdict is None else _figures(verdict))}
    return _show(shell, rows, more, facts, ", ".join(check.checked) or "nothing is stored yet")


def _history_of(shell: Shell, data: Path, *, ordered: bool) -> "HistoryVerdict | None":
    from postroom.audit.layout import holds_stream
    from postroom.core.history.history_checker import History
    from postroom.server.folder.layout import AUDIT_FOLDER, DATABASE
    from postroom.stores.sqlite.snapshot import SqliteSnapshot, read_at_rest_or_live

    if not holds_stream(data / AUDIT_FOLDER):
        return None
    history = History(since_us=None, until_us=None, ordered=ordered)
    _read(shell, data / AUDIT_FOLDER, history, None, None)

    def judge(snapshot: SqliteSnapshot) -> "HistoryVerdict":
        if snapshot.moved_to:
            there = f"postroom verify {data / AUDIT_FOLDER} --store {snapshot.moved_to}"
            text = f"{snapshot.path} was moved to {snapshot.moved_to}: the stream was not compared with it"
            warn(shell.program, f"warning: {text}; to compare: {there}")
            return history.verdict(horizon_us=None)
        source = _source_of(history, snapshot) if snapshot.is_current else None
        if source is None:
            return history.verdict(horizon_us=None)
        _read_on(history, snapshot, source)
        return history.verdict(horizon_us=None, absent=_absent(snapshot, source))

    if not (data / DATABASE).exists():
        return history.verdict(horizon_us=None)
    return read_at_rest_or_live(data / DATABASE, judge)


# ---- output ------------------------------------------------------------------------------------------


def _damage_of_stream(folder: Path, store: str | None) -> list[dict[str, Any]]:
    """The damage that `postroom audit verify` finds."""
    from postroom.audit.layout import holds_stream
    from postroom.audit.verify import verify
    from postroom.contracts.feeds import head_in
    from postroom.server.folder.layout import is_data_folder
    from postroom.system.atomic import absolute_path

    place = absolute_path("the folder of segments", folder)
    if not holds_stream(place):
        hint = f": a data folder is checked with `postroom verify --data {folder}`"
        raise Unavailable(f"{place} holds no audit stream{hint if is_data_folder(folder) else ''}")
    heads = []
    if store is not None:
        with closing(_opened(store)) as opened:
            heads = [head for head in [head_in(opened)] if head is not None]
    return [_damage_row("damage", f"{found.file}: {found.reason}") for found in verify(folder, noted=heads)]


def _damage_row(rule: str, sentence: str) -> dict[str, Any]:
    return {"rule": rule, "message_id": "", "event_ids": [], "sentence": sentence}


def _rows(verdict: "HistoryVerdict") -> list[dict[str, Any]]:
    import msgspec

    return [msgspec.to_builtins(violation) for violation in verdict.violations]


def _figures(verdict: "HistoryVerdict") -> dict[str, int]:
    return {
        "events": verdict.events,
        "sources": len(verdict.sources),
        "accepted": verdict.accepted,
        "open": verdict.open,
    }


def _show(shell: Shell, rows: list[dict[str, Any]], more: int, facts: dict[str, Any], checked: str) -> int:
    """Print the violations, and then one line that sums them up, also when there is none."""
    if rows:
        shell.output.rows(COLUMNS, rows, "")
    if more:
        warn(shell.program, f"{more} further violations are not shown")
    n = len(rows) + more
    said = f"{n:,} {'violation' if n == 1 else 'violations'} in {checked}" if n else f"clean: {checked}"
    shell.output.facts({"clean": n == 0, "violations": n, **facts}, said)
    return EXIT_RUNTIME if n else EXIT_OK


verify_command.params.append(json_option())
