"""`postroom pipeline`: tables, checks and reports of the whole audit stream."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.pipeline.pipeline_messages import replay, retain
from postroom.cli.pipeline.pipeline_options import (
    TablesPlace,
    events_option,
    lineage_option,
    pipeline_on_spark,
    progress_on_stderr,
    redaction_option,
    skip_option,
    spark_options,
    tables_option,
    with_lineage,
)
from postroom.cli.pipeline.pipeline_queries import check, expect, report, sql
from postroom.cli.pipeline.pipeline_rejects import rejects
from postroom.cli.pipeline.stopping import beside_spark, follower
from postroom.cli.render import warn
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option
from postroom.errors import InvalidMessage

if TYPE_CHECKING:
    from postroom.pipeline.jobs import RunSummary
    from postroom.pipeline.lineage import JobRun

PROGRESS_EVERY_S = 2.0
MESSAGES = click.IntRange(1, 1_000_000_000)
SEED = click.IntRange(0, 2**63 - 1)
BYTES_PER_MB = 1_000_000
EVERY_S = click.FloatRange(0.1, 86_400.0)


@click.group(context_settings=HELP_OPTIONS)
def pipeline() -> None:
    """Tables, checks and reports of the whole audit stream.

    \b
    Example:
      postroom pipeline generate --messages 100000 --seed 1 --out history
      postroom pipeline run --events history --tables tables
      postroom pipeline sql --tables tables "SELECT outcome, count(*) FROM silver_messages GROUP BY outcome"
    """


@pipeline.command()
@click.option("--messages", type=MESSAGES, required=True, metavar="N", help="How many messages to generate.")
@click.option("--seed", type=SEED, required=True, metavar="S", help="The same seed gives the same bytes.")
@click.option("--out", "place", required=True, metavar="DIR", help="A new or empty folder for the segments.")
@click.option(
    "--faults",
    is_flag=True,
    help="Break every rule at some places, and list the places in DIR/_faults.jsonl.",
)
@click.pass_obj
def generate(shell: Shell, messages: int, seed: int, place: str, faults: bool) -> None:
    """Generate an audit stream with all kinds of events of a global queue.

    It has organisations of very different size, goals with trees of messages, priorities and promotions,
    retries, dead letters with recurring errors, tokens and cost, duplicate lines and late lines.

    \b
    Example:
      postroom pipeline generate --messages 100000 --seed 1 --out history
      postroom pipeline generate --messages 5000 --seed 2 --out broken --faults
    """
    import gc

    import msgspec

    from postroom.pipeline.generator.generate import generate as make
    from postroom.pipeline.paths import need_local

    folder = need_local(place)
    gc.disable()  # the millions of objects have no cycles, so collections would only cost time
    try:
        made = make(folder, messages, seed, faults=faults, progress=_progress(shell, messages))
    finally:
        gc.enable()
    shell.output.facts(
        msgspec.to_builtins(made),
        f"{made.messages:,} messages and {made.events:,} events in {made.segments} segments, "
        f"{made.bytes / BYTES_PER_MB:,.0f} MB",
    )


def _progress(shell: Shell, messages: int) -> Callable[[int, int], None]:
    """A callback that prints the progress on a terminal from time to time."""
    began = noted_at = time.monotonic()

    def progress(made: int, lines: int) -> None:
        nonlocal noted_at
        now = time.monotonic()
        if now >= noted_at + PROGRESS_EVERY_S:
            noted_at = now
            share = made / messages
            left_s = (now - began) * (1 - share) / share
            shell.note(f"{share:.0%}: {made:,} messages, {lines:,} lines, {left_s:.0f} s to go")

    return progress


def _print_summary(shell: Shell, summary: "RunSummary") -> None:
    import msgspec

    shell.output.facts(
        msgspec.to_builtins(summary),
        f"{summary.segments} new segments, {summary.lines:,} lines, {summary.rejects:,} of them rejected; "
        f"{summary.rows.get('silver_messages', 0):,} messages in all"
        f"{f'; {summary.taken_up:,} rejected lines are events now' if summary.taken_up else ''}"
        f"{summary.note and '; '}{summary.note}",
    )


@pipeline.command()
@click.option("--anew", is_flag=True, help="Also if there is an archive.")
@click.pass_obj
def prepare(shell: Shell, anew: bool) -> None:
    """Let every later command on this machine start some seconds sooner.

    Java reads thousands of classes of Spark whenever it starts. This runs a small history once, and keeps the
    classes in an archive of about 200 MB that Java can map into its memory: in $POSTROOM_CACHE, or
    else in postroom's folder of your cache. After an update of Java or Spark, give it again. To undo it,
    delete the file; nothing needs it.

    \b
    Example:
      postroom pipeline prepare
    """
    import msgspec

    from postroom.pipeline.spark.session import need_packages

    need_packages()
    from postroom.pipeline.warmup import as_commands_do
    from postroom.pipeline.warmup import prepare as make

    made = make(as_commands_do, anew=anew, progress=progress_on_stderr(shell))
    is_new = f"written in {made.seconds:.0f} s" if made.is_new else "there already"
    shell.output.facts(
        msgspec.to_builtins(made), f"{made.archive}: {made.bytes / BYTES_PER_MB:,.0f} MB, {is_new}"
    )


@pipeline.command()
@events_option()
@tables_option
@skip_option
@spark_options
@redaction_option
@lineage_option
@click.pass_obj
@with_lineage
@beside_spark
def run(
    shell: Shell,
    /,
    events: tuple[str, ...],
    tables: TablesPlace,
    skip_missing: bool,
    redaction: str,
    lineage: "JobRun | None",
    **where: Any,
) -> None:
    """Ingest new segments and update every table.

    Segments that were ingested before are not read again. If nothing is new, no Spark is started. After an
    interrupted run, run the command again.
    Segments are ingested in the order of their numbers: later segments wait for a missing one. If that is
    lost for good, --skip-missing continues without it.

    \b
    Example:
      postroom pipeline run --events history --tables tables
      postroom pipeline run --events history --tables tables --skip-missing
      postroom pipeline run --events /data/audit --tables /data/tables --master spark://head:7077
    """
    _need_places(events, tables)
    if _finds_nothing(shell, tables, events):
        return
    is_small = _is_small(tables, events, skip_missing=skip_missing)
    with pipeline_on_spark(shell, tables, where, redaction, is_small=is_small, lineage=lineage) as job:
        _print_summary(shell, job.run(events, skip_missing=skip_missing))


def _need_places(events: tuple[str, ...], tables: TablesPlace) -> None:
    """Raise if a place cannot be what it is given as, before Spark starts."""
    from postroom.pipeline.paths import need_apart, need_stream, need_writable

    for place in events:
        need_stream(place)
        need_apart(place, tables.place)
    need_writable(tables.place)


def _finds_nothing(shell: Shell, tables: TablesPlace, events: tuple[str, ...]) -> bool:
    """Print the summary without starting Spark, if no segment is new and every table is up to date."""
    opened = tables.open()
    from postroom.pipeline.jobs import nothing_new

    summary = nothing_new(opened, tables.streams(events))
    if summary is not None:
        _print_summary(shell, summary)
    return summary is not None


def _is_small(tables: TablesPlace, events: tuple[str, ...], *, skip_missing: bool = False) -> bool:
    """Whether the tables and the new segments are small."""
    from postroom.pipeline.ingest.segments import named_hashes

    opened = tables.open()
    pending = [
        stream.pending(opened, skip_missing=skip_missing, hashes=named_hashes)
        for stream in tables.streams(events)
    ]
    return opened.is_small_with(sum(each.bytes for each in pending))


@pipeline.command()
@events_option(required=False)
@tables_option
@spark_options
@redaction_option
@lineage_option
@click.pass_obj
@with_lineage
@beside_spark
def backfill(
    shell: Shell,
    /,
    events: tuple[str, ...],
    tables: TablesPlace,
    redaction: str,
    lineage: "JobRun | None",
    **where: Any,
) -> None:
    """Rebuild the silver and gold tables from bronze.

    For tables of an earlier version, or after a change of the redaction. Readers see the old rows of a table
    until the new ones are complete.

    \b
    Example:
      postroom pipeline backfill --tables tables
    """
    from postroom.pipeline.paths import need_tables

    if not events:
        need_tables(tables.place)
    _need_places(events, tables)
    is_small = _is_small(tables, events)
    with pipeline_on_spark(shell, tables, where, redaction, is_small=is_small, lineage=lineage) as job:
        _print_summary(shell, job.backfill(events))


@pipeline.command()
@events_option()
@tables_option
@click.option(
    "--every",
    "every_s",
    type=EVERY_S,
    metavar="SECONDS",
    help="Run until stopped, with a batch every SECONDS.  [default: ingest the present segments and end]",
)
@skip_option
@spark_options
@redaction_option
@lineage_option
@click.pass_obj
@with_lineage
@follower
@beside_spark
def stream(
    shell: Shell,
    /,
    events: tuple[str, ...],
    tables: TablesPlace,
    every_s: float | None,
    skip_missing: bool,
    redaction: str,
    lineage: "JobRun | None",
    **where: Any,
) -> None:
    """Follow the audit stream: ingest new segments in batches, and update the tables after each batch.

    Without --every it ends with the summary that `run` prints.
    Spark's Structured Streaming carries the events; the number of a micro-batch stands in their commit. As
    with `run`, later segments wait for a missing one. With --remote, a loop looks for new segments instead: a
    Spark Connect server would call the code of a micro-batch in a process of its own.

    \b
    Example:
      postroom pipeline stream --events history --tables tables
      postroom pipeline stream --events /data/audit --tables /data/tables --every 10
    """
    _need_places(events, tables)
    is_endless = every_s is not None
    is_small = not is_endless and _is_small(tables, events, skip_missing=skip_missing)
    with pipeline_on_spark(
        shell, tables, where, redaction, is_small=is_small, is_endless=is_endless, lineage=lineage
    ) as job:
        _print_summary(shell, job.stream(events, every_s=every_s, skip_missing=skip_missing))


@pipeline.command()
@events_option(required=False)
@tables_option
@click.pass_obj
def status(shell: Shell, events: tuple[str, ...], tables: TablesPlace) -> None:
    """Show how far each table is. Needs no Spark.

    `behind` is the number of commits of its source that a silver table has not processed; for bronze and gold
    it is empty. With --events, the first line counts the segments that are not ingested yet, and a line on
    stderr names missing segments that others wait for. The numbers of rows are those of the tables' logs.

    \b
    Example:
      postroom pipeline status --tables tables --events history
    """
    from postroom.pipeline.paths import need_stream, need_tables

    for place in events:
        need_stream(place)
    try:
        need_tables(tables.place)
    except InvalidMessage as error:
        if not events:
            raise
        warn(shell.program, f"warning: {error}")  # before the first run
    opened = tables.open()
    from postroom.pipeline.status import status_of

    streams = tables.streams(events)
    for stream in streams:
        if note := stream.pending(opened).sentence():
            warn(shell.program, f"{stream}: {note}" if len(streams) > 1 else note)
    columns = ("table", "version", "rows", "files", "bytes", "behind")
    shell.output.rows(columns, status_of(opened, streams), f"there are no tables in {tables}")


@pipeline.command("tables")
@tables_option
@click.option("--compact", is_flag=True, help="Merge small files first. Rows do not change.")
@click.option(
    "--vacuum",
    is_flag=True,
    help="Delete files that no version of the last week uses, and files that killed jobs left.",
)
@click.pass_obj
def list_tables(shell: Shell, tables: TablesPlace, compact: bool, vacuum: bool) -> None:
    """List the tables and their columns. Needs no Spark.

    \b
    Example:
      postroom pipeline tables --tables tables
      postroom pipeline tables --tables tables --compact --vacuum
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    opened = tables.open()
    from postroom.pipeline.status import columns_of, keep_house

    if compact or vacuum:
        keep_house(opened, compact=compact, vacuum=vacuum, progress=progress_on_stderr(shell))
    shell.output.rows(("table", "column", "type"), columns_of(opened), f"there are no tables in {tables}")


for command in (sql, report, check, expect, rejects, retain, replay):
    pipeline.add_command(command)
add_json_option(pipeline)
