"""`postroom pipeline`: tables, checks and reports of the whole audit stream."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.render import warn
from postroom.cli.shell import (
    HELP_OPTIONS,
    Shell,
    add_json_option,
    as_path,
    parse_wait,
    path_option,
    together,
)
from postroom.cli.stopping import beside_spark, follower, starting
from postroom.errors import EXIT_OK, EXIT_RUNTIME, InvalidMessage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postroom.pipeline.check import CheckResult
    from postroom.pipeline.jobs import Pipeline, RunSummary

PROGRESS_EVERY_S = 2.0
MESSAGES = click.IntRange(1, 1_000_000_000)
SEED = click.IntRange(0, 2**63 - 1)
BYTES_PER_MB = 1_000_000
CHECK_HORIZON_S = 86_400.0
Command = Callable[..., Any]


def _local_path(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    from postroom.pipeline.paths import need_local

    if value is not None:
        need_local(value)
    return as_path(context, parameter, value)


def folder_option(*names: str, text: str, required: bool) -> Callable[[Command], Command]:
    """An option that names a folder on this machine; an address is refused."""
    return click.option(
        *names, type=click.Path(), callback=_local_path, required=required, metavar="DIR", help=text
    )


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
@folder_option("--out", "folder", text="A new or empty folder for the segments.", required=True)
@click.option(
    "--faults",
    is_flag=True,
    help="Break every rule at some places, and list the places in DIR/_faults.jsonl.",
)
@click.pass_obj
def generate(shell: Shell, messages: int, seed: int, folder: Path, faults: bool) -> None:
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


# ---- on Spark ----------------------------------------------------------------------------------------

EVERY_S = click.FloatRange(0.1, 86_400.0)


def events_option(*, required: bool = True) -> Callable[[Command], Command]:
    return folder_option(
        "--events", text="The folder of the audit stream. Only sealed segments are read.", required=required
    )


def tables_option(command: Command) -> Command:
    return folder_option("--tables", text="The folder of the tables.", required=True)(command)


def _master_option(default: str | None, text: str) -> Callable[[Command], Command]:
    return click.option("--master", default=default, show_default=True, metavar="URL", help=text)


_remote_option = click.option(
    "--remote", metavar="URL", help="A Spark Connect server instead: sc://HOST:PORT."
)
_conf_option = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda _c, _p, texts: _settings(texts),
    help="A setting of Spark. May be repeated.",
)
_MASTERS = "local[N], spark://…, k8s://… or yarn."
LOCAL_MASTER = "local[*]"

spark_options = together(
    _master_option(LOCAL_MASTER, f"Where Spark runs: {_MASTERS}"), _remote_option, _conf_option
)
optional_spark_options = together(
    _master_option(None, f"Ask Spark, which runs at {_MASTERS}  [default: no Spark]"),
    _remote_option,
    _conf_option,
)


def _asks_spark(where: dict[str, Any]) -> bool:
    """Whether a command whose Spark is optional has to use it. A setting of Spark asks for it as well."""
    wanted = bool(where["master"] or where["remote"] or where["conf"])
    where["master"] = where["master"] or LOCAL_MASTER
    return wanted


def _settings(texts: tuple[str, ...]) -> dict[str, str]:
    settings = dict(text.partition("=")[::2] for text in texts)
    for name, value in settings.items():
        if not name or not value:
            raise click.BadParameter(f"{name!r} is not a setting of Spark: it has the form KEY=VALUE")
    return settings


def redaction_option(command: Command) -> Command:
    return click.option(
        "--redaction",
        type=click.Choice(["none", "medium", "full"]),
        default="medium",
        show_default=True,
        help="How much is redacted in payloads and errors of the stream.",
    )(command)


def lineage_option(command: Command) -> Command:
    return click.option(
        "--lineage",
        metavar="PLACE",
        help="Emit OpenLineage events to this file or HTTP address.  [default: none]",
    )(command)


def skip_option(command: Command) -> Command:
    return click.option(
        "--skip-missing",
        is_flag=True,
        help="Skip segments that are missing although later ones exist, and name them.",
    )(command)


@contextmanager
def spark_of(
    master: str, remote: str | None, conf: dict[str, str], *, is_small: bool = False
) -> "Iterator[SparkSession]":
    """The Spark session of a command."""
    from postroom.pipeline.session import spark_session

    with starting:
        spark = spark_session(master, remote, conf, is_small=is_small)
    try:
        yield spark
    finally:
        spark.stop()


def told(shell: Shell) -> Callable[[str], None]:
    """A callback that prints progress on stderr, with the seconds since the start."""
    began = time.monotonic()
    return lambda text: warn(shell.program, f"{time.monotonic() - began:6.1f} s  {text}")


@contextmanager
def _with_lineage(
    shell: Shell, place: str | None, name: str, job: "Pipeline", events: Path | None
) -> "Iterator[None]":
    """Emit the lineage of a job that writes the tables, if a place for it is given."""
    if place is None:
        yield
        return
    from postroom.pipeline import lineage

    emitter = lineage.Lineage(place, name, lambda text: warn(shell.program, text))
    inputs = [] if events is None else [lineage.stream(events)]
    with emitter.run(inputs, lambda: lineage.written(job.tables, job.tables.names())):
        yield


@contextmanager
def _pipeline(
    shell: Shell,
    tables: Path,
    where: dict[str, Any],
    redaction: Any = "medium",
    *,
    events: Path | None = None,
    follows: bool = False,
) -> "Iterator[Pipeline]":
    """The tables on Spark. Small data gets a small session, unless the command `follows` a growing stream."""
    from postroom.pipeline.paths import is_small

    say = told(shell)
    say("starting Spark")
    with spark_of(**where, is_small=not follows and is_small(tables, events)) as spark:
        from postroom.pipeline.jobs import Pipeline
        from postroom.pipeline.session import spark_errors
        from postroom.pipeline.tables import Tables

        with spark_errors():
            yield Pipeline(spark, Tables(tables), level=redaction, progress=say)


def _print_summary(shell: Shell, summary: "RunSummary") -> None:
    import msgspec

    shell.output.facts(
        msgspec.to_builtins(summary),
        f"{summary.segments} new segments, {summary.lines:,} lines, {summary.rejects:,} of them rejected; "
        f"{summary.rows.get('silver_messages', 0):,} messages in all"
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

    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.warmup import as_commands_do
    from postroom.pipeline.warmup import prepare as make

    made = make(as_commands_do, anew=anew, progress=told(shell))
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
@beside_spark
def run(
    shell: Shell,
    /,
    events: Path,
    tables: Path,
    skip_missing: bool,
    redaction: str,
    lineage: str | None,
    **where: Any,
) -> None:
    """Ingest new segments and update every table.

    Segments that were ingested before are not read again. After an interrupted run, run the command again.
    Segments are ingested in the order of their numbers: later segments wait for a missing one. If that is
    lost for good, --skip-missing continues without it.

    \b
    Example:
      postroom pipeline run --events history --tables tables
      postroom pipeline run --events history --tables tables --skip-missing
      postroom pipeline run --events /data/audit --tables /data/tables --master spark://head:7077
    """
    from postroom.pipeline.paths import need_apart, need_stream, need_writable

    need_stream(events)
    need_apart(events, tables)
    need_writable(tables)
    with _pipeline(shell, tables, where, redaction, events=events) as job:
        with _with_lineage(shell, lineage, "pipeline.run", job, events):
            summary = job.run(events, skip_missing=skip_missing)
        _print_summary(shell, summary)


@pipeline.command()
@events_option(required=False)
@tables_option
@spark_options
@redaction_option
@click.pass_obj
@beside_spark
def backfill(shell: Shell, /, events: Path | None, tables: Path, redaction: str, **where: Any) -> None:
    """Rebuild the silver and gold tables from bronze.

    For tables of an earlier version, or after a change of the redaction. Readers see the old rows of a table
    until the new ones are complete.

    \b
    Example:
      postroom pipeline backfill --tables tables
    """
    from postroom.pipeline.paths import need_apart, need_stream, need_tables, need_writable

    if events is None:
        need_tables(tables)
    else:
        need_stream(events)
        need_apart(events, tables)
    need_writable(tables)
    with _pipeline(shell, tables, where, redaction, events=events) as job:
        _print_summary(shell, job.backfill(events))


@pipeline.command()
@events_option()
@tables_option
@click.option(
    "--every",
    "every_s",
    type=EVERY_S,
    metavar="SECONDS",
    help="Run for ever, with a batch every SECONDS.  [default: ingest the present segments and end]",
)
@skip_option
@spark_options
@redaction_option
@click.pass_obj
@follower
@beside_spark
def stream(
    shell: Shell,
    /,
    events: Path,
    tables: Path,
    every_s: float | None,
    skip_missing: bool,
    redaction: str,
    **where: Any,
) -> None:
    """Follow the audit stream: ingest new segments in batches, and update the tables after each batch.

    As with `run`, later segments wait for a missing one. Does not work with --remote: a Spark Connect server
    would run the batches in a process of its own.

    \b
    Example:
      postroom pipeline stream --events history --tables tables
      postroom pipeline stream --events /data/audit --tables /data/tables --every 10
    """
    if where["remote"] is not None:
        raise click.UsageError("a stream has no --remote: repeat `run`, or use --master")
    from postroom.pipeline.paths import need_apart, need_stream, need_writable

    need_stream(events)
    need_apart(events, tables)
    need_writable(tables)
    with _pipeline(shell, tables, where, redaction, follows=True) as job:
        job.stream(events, every_s=every_s, skip_missing=skip_missing)


@pipeline.command()
@events_option(required=False)
@tables_option
@click.pass_obj
def status(shell: Shell, events: Path | None, tables: Path) -> None:
    """Show how far each table is. Needs no Spark.

    `behind` is the number of commits of its source that a silver table has not processed; for bronze and gold
    it is empty. With --events, the first line counts the segments that are not ingested yet, and a line on
    stderr names missing segments that others wait for.

    \b
    Example:
      postroom pipeline status --tables tables --events history
    """
    from postroom.pipeline.paths import need_stream, need_tables

    if events is not None:
        need_stream(events)
    try:
        need_tables(tables)
    except InvalidMessage as error:
        if events is None:
            raise
        warn(shell.program, f"warning: {error}")  # before the first run
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.status import new_segments, status_of

    if events is not None and (note := new_segments(tables, events).sentence()):
        warn(shell.program, note)
    columns = ("table", "version", "rows", "files", "bytes", "behind")
    shell.output.rows(columns, status_of(tables, events), f"there are no tables in {tables}")


@pipeline.command("tables")
@tables_option
@click.option("--compact", is_flag=True, help="Merge small files first. Rows do not change.")
@click.option(
    "--vacuum",
    is_flag=True,
    help="Delete files that no version of the last week uses, and files that killed jobs left.",
)
@click.pass_obj
def list_tables(shell: Shell, tables: Path, compact: bool, vacuum: bool) -> None:
    """List the tables and their columns. Needs no Spark.

    \b
    Example:
      postroom pipeline tables --tables tables
      postroom pipeline tables --tables tables --compact --vacuum
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.status import columns_of, keep_house

    if compact or vacuum:
        keep_house(tables, compact=compact, vacuum=vacuum, progress=told(shell))
    shell.output.rows(("table", "column", "type"), columns_of(tables), f"there are no tables in {tables}")


@pipeline.command()
@tables_option
@optional_spark_options
@click.argument("query", metavar="QUERY")
@click.pass_obj
@beside_spark
def sql(shell: Shell, /, tables: Path, query: str, **where: Any) -> None:
    """Query the tables with SQL; prints JSON lines. Needs no Spark.

    DuckDB answers, in its own dialect. With --master, Spark SQL answers instead: its functions, and tables
    that do not fit one machine. Allowed are queries over the tables of the folder, SHOW TABLES and DESCRIBE;
    with Spark also SHOW COLUMNS and EXPLAIN. Everything else is refused: statements that change data, files
    named by their path, functions that run code. Does not work with --remote: Spark's own parser checks the
    query, and a Spark Connect client has no parser.

    \b
    Example:
      postroom pipeline sql --tables tables "SELECT type, count(*) AS n FROM silver_messages GROUP BY type"
      postroom pipeline sql --tables tables --master 'local[*]' "SELECT typeof(day) FROM gold_cost LIMIT 1"
    """
    if where["remote"] is not None:
        raise click.UsageError("sql has no --remote: a query is checked by Spark's own parser; use --master")
    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    for line in _answers(shell, tables, query, where):
        shell.output.text(line)


def _answers(shell: Shell, folder: Path, query: str, where: dict[str, Any]) -> "Iterator[str]":
    """The rows of a query, by DuckDB unless Spark is asked."""
    from postroom.pipeline.session import need_packages

    need_packages()
    if _asks_spark(where):
        with _pipeline(shell, folder, where) as job:
            yield from job.answers(query)
    else:
        from postroom.pipeline.local_sql import answers
        from postroom.pipeline.tables import Tables

        yield from answers(Tables(folder), query)


@pipeline.command()
@tables_option
@path_option(
    "--out",
    metavar="FILE",
    text="The HTML file to write. It is self-contained and loads nothing.",
    required=True,
)
@path_option(
    "--speedscope", metavar="FILE", text="Also write the flame graphs of the goals as a speedscope file."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="PRIORITY=TIME",
    callback=lambda _c, _p, texts: _targets(texts),
    help="How long messages of a priority may wait, such as P0=10ms. May be repeated.  [default: no targets]",
)
@click.pass_obj
def report(
    shell: Shell, /, tables: Path, out: Path, speedscope: Path | None, targets: dict[int, int]
) -> None:
    """Write a report of the tables as one HTML file. Needs no Spark.

    It shows latency, throughput, queue depth, errors, dead letters and their patterns, tokens and cost, which
    agents talk to each other, and flame graphs of the largest goals; with --target also how many messages
    were delivered in time. The file works offline and has no script.

    \b
    Example:
      postroom pipeline report --tables tables --out report.html
      postroom pipeline report --tables tables --out report.html --target P0=10ms --target P1=50ms
      postroom pipeline report --tables tables --out report.html --speedscope goals.json
    """
    from postroom.pipeline.paths import need_place, need_tables

    need_tables(tables)
    for file in (out, speedscope):
        if file is not None:
            need_place(file)
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.report.queries import write_report
    from postroom.pipeline.tables import Tables

    facts = write_report(Tables(tables), out, speedscope, targets_us=targets, progress=told(shell))
    shell.output.facts(
        {"report": str(out), "messages": facts.messages, "events": facts.events, "goals": len(facts.goals)},
        f"{out} is a report of {facts.messages:,} messages",
    )


@pipeline.command()
@tables_option
@click.option(
    "--horizon-s",
    type=parse_wait,
    default=CHECK_HORIZON_S,
    show_default=True,
    metavar="S",
    help="How long an open message may have no event before it counts as lost.",
)
@optional_spark_options
@click.pass_obj
@beside_spark
def check(shell: Shell, /, tables: Path, horizon_s: float, **where: Any) -> int:
    """Check all events of the tables, and print every violation of a guarantee.

    The guarantees: no accepted message is lost, no message is delivered that was not accepted, leases of one
    message never overlap, a message ends once, and no number of a source is missing or used twice. The output
    is a line for each violation, at most a thousand per rule, with the events that prove it. Messages that
    `retain` removed are not missing. The exit code is 0 without violations, and 1 otherwise. Tables of up to
    200,000 events, from which nothing was removed, are checked without Spark, unless --master asks for it.

    \b
    Example:
      postroom pipeline check --tables tables
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    verdict = _verdict(shell, tables, horizon_s, where)
    rows = [sample._asdict() | {"event_ids": list(sample.event_ids)} for sample in verdict.samples]
    history = f"{verdict.events:,} events, {verdict.messages:,} messages accepted"
    shell.output.rows(("rule", "message_id", "event_ids", "sentence"), rows, f"clean: {history}")
    if verdict.violations:
        counts = ", ".join(f"{n:,} {rule}" for rule, n in verdict.counts.items())
        warn(shell.program, f"{verdict.violations:,} violations in {history}: {counts}")
    return EXIT_RUNTIME if verdict.violations else EXIT_OK


def _verdict(shell: Shell, folder: Path, horizon_s: float, where: dict[str, Any]) -> "CheckResult":
    """By the engine that fits the size of the tables."""
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.small_check import check_small, is_small
    from postroom.pipeline.tables import Tables

    if not _asks_spark(where) and is_small(tables := Tables(folder)):
        return check_small(tables, horizon_s=horizon_s)
    with _pipeline(shell, folder, where) as job:
        from postroom.pipeline.check import check_tables

        return check_tables(job.spark, job.tables, horizon_s=horizon_s)


@pipeline.command()
@tables_option
@path_option(
    "--rules",
    metavar="FILE",
    text="Expectations in TOML instead of the built-in ones: tables [[expect]].",
)
@lineage_option
@click.pass_obj
def expect(shell: Shell, /, tables: Path, rules: Path | None, lineage: str | None) -> int:
    """Measure what is expected of the tables, and print each expectation. Needs no Spark.

    The kinds are not_null, unique, known_values, freshness and reject_rate. An expectation is breached if
    the share of rows that break it exceeds its `most`; of freshness, if the newest row is older than `most`
    seconds. The exit code is 0 without a breach, and 1 otherwise. With --lineage, an OpenLineage event tells
    the result of every expectation. A report names breaches of the built-in expectations.

    \b
    Example:
      postroom pipeline expect --tables tables
      postroom pipeline expect --tables tables --rules expectations.toml --lineage lineage.jsonl
    """
    import msgspec

    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline import lineage as emitting
    from postroom.pipeline.expectations import EXPECTATIONS, breaches, measure, read_expectations
    from postroom.pipeline.tables import Tables

    wanted = EXPECTATIONS if rules is None else read_expectations(rules)
    there = Tables(tables)
    measured = measure(there, wanted, time.time_ns() // 1000)
    broken = breaches(measured)
    if lineage is not None:
        emitter = emitting.Lineage(lineage, "pipeline.expect", lambda text: warn(shell.program, text))
        emitter.emit("FAIL" if broken else "COMPLETE", emitting.measured(there, measured), ())
    columns = ("table", "kind", "columns", "rows", "broken", "most", "holds")
    shell.output.rows(columns, map(msgspec.to_builtins, measured), "nothing is expected")
    for one in broken:
        warn(shell.program, f"breached: {one.sentence}")
    return EXIT_RUNTIME if broken else EXIT_OK


def _targets(texts: tuple[str, ...]) -> dict[int, int]:
    """The targets in microseconds, by priority."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"[Pp]?(\d{1,3})=(\d{1,9}(?:\.\d{1,6})?)(us|ms|s)", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not a priority and a time, such as P0=10ms or P1=0.5s")
        found[int(match[1])] = round(float(match[2]) * {"us": 1, "ms": 1_000, "s": 1_000_000}[match[3]])
    return found


DAYS = click.IntRange(1, 36_500)


@pipeline.command()
@tables_option
@click.option(
    "--keep-days",
    type=DAYS,
    required=True,
    metavar="N",
    help="How many days messages are kept: 7, 30, 90 or any other number.",
)
@path_option(
    "--org-days",
    metavar="FILE",
    text="Organizations with a number of days of their own: lines of an id and a number.",
)
@click.option(
    "--failures-days",
    type=DAYS,
    metavar="N",
    help="Keep dead letters and quarantined messages at least N days.",
)
@click.option(
    "--gold-days",
    type=DAYS,
    metavar="N",
    help="Remove days of gold tables after N days.  [default: never]",
)
@path_option("--hold", metavar="FILE", text="Legal holds, kept at any age: lines of `org ID` or `goal ID`.")
@click.option("--archive", metavar="PATH", help="Write removed rows to this Hadoop path first.")
@click.option("--dry-run", is_flag=True, help="Only count, change nothing.")
@spark_options
@click.pass_obj
@beside_spark
def retain(
    shell: Shell,
    /,
    tables: Path,
    keep_days: int,
    org_days: Path | None,
    failures_days: int | None,
    gold_days: int | None,
    hold: Path | None,
    archive: str | None,
    dry_run: bool,
    **where: Any,
) -> None:
    """Remove messages from the tables whose end or last event is older than their time to keep.

    A message is removed as a whole, with its events. Rows are counted before they are deleted, and with
    --archive first read back from the archive. Gold tables keep their figures for --gold-days. Deleted files
    stay on the disk for a week, and then until the next `retain` or `tables --vacuum`; those of gold until
    `tables --vacuum`.

    \b
    Example:
      postroom pipeline retain --tables tables --keep-days 30 --failures-days 90 --dry-run
      postroom pipeline retain --tables tables --keep-days 7 --org-days tiers --hold holds --archive s3a://b/a
    """
    import msgspec

    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    from postroom.pipeline.session import need_packages

    need_packages()
    from postroom.pipeline.retention.retain import Policy, RetentionJob, read_holds, read_org_days

    orgs, goals = (frozenset[str](), frozenset[str]()) if hold is None else read_holds(hold)
    policy = Policy(
        keep_days=keep_days,
        org_days={} if org_days is None else read_org_days(org_days),
        failures_days=failures_days or 0,
        gold_days=gold_days or 0,
        held_orgs=orgs,
        held_goals=goals,
    )
    with _pipeline(shell, tables, where) as job:
        retention = RetentionJob(
            job.spark,
            job.tables,
            policy,
            now_us=time.time_ns() // 1000,
            archive=archive,
            progress=told(shell),
        )
        found = retention.run(dry_run=dry_run)
    rows = (msgspec.to_builtins(each) for each in found)
    shell.output.rows(("table", "before", "deleted", "archived"), rows, "")


@pipeline.command()
@tables_option
@click.option("--where", "condition", required=True, metavar="SQL", help="A condition on silver_messages.")
@click.option(
    "--since",
    metavar="TIME",
    callback=lambda _c, _p, text: _micros(text),
    help="Only messages created from then on.",
)
@click.option(
    "--until",
    metavar="TIME",
    callback=lambda _c, _p, text: _micros(text),
    help="Only messages created before.",
)
@click.option("--to", required=True, metavar="URL", help="The store to submit to; a new one is a sandbox.")
@click.option("--store", metavar="URL", help="The store that still has the payloads.")
@path_option("--key-file", metavar="FILE", text="The keys of encrypted payloads.")
@click.option("--rate", type=click.FloatRange(0.1, 1e6), metavar="N", help="At most N messages per second.")
@click.option(
    "--replay-id",
    default="",
    metavar="NAME",
    help="The name of the replay.  [default: made of --where, --since, --until and --to]",
)
@click.option("--dry-run", is_flag=True, help="Only count, change nothing.")
@spark_options
@click.pass_obj
@beside_spark
def replay(
    shell: Shell,
    /,
    tables: Path,
    condition: str,
    since: int | None,
    until: int | None,
    to: str,
    store: str | None,
    key_file: Path | None,
    rate: float | None,
    replay_id: str,
    dry_run: bool,
    **where: Any,
) -> None:
    """Submit past messages again, in the order in which they were created.

    A message is refused and counted if only its redacted payload is known, or if no task can have its queue
    or id; the exit code is then 1. Running the same command again submits only missing messages: a store
    remembers a replay for 30 days. Does not work with --remote: Spark's own parser checks the condition.

    \b
    Example:
      postroom pipeline replay --tables tables --where "goal_id = 'g-7'" --store sqlite:///run/queue.db \\
        --to sqlite:///sandbox.db --dry-run
    """
    import msgspec

    from postroom.pipeline.paths import need_tables

    if where["remote"] is not None:
        raise click.UsageError("replay has no --remote: its condition is checked by Spark's own parser")
    need_tables(tables)
    with _pipeline(shell, tables, where) as job:
        from postroom.pipeline.replay import ReplayRequest
        from postroom.pipeline.replay import replay as submit

        wanted = ReplayRequest(
            where=condition,
            to=to,
            since_us=since,
            until_us=until,
            store=store,
            key_file=key_file,
            rate=rate,
            replay_id=replay_id,
            dry_run=dry_run,
        )
        found = submit(job.spark, job.tables, wanted, told(shell))
    word = "would be submitted" if dry_run else "submitted"
    shell.output.facts(
        msgspec.to_builtins(found),
        f"{found.replay_id}: {found.submitted:,} of {found.selected:,} messages {word}, "
        f"{found.known:,} were known, {found.refused - found.unfit:,} refused because only a redacted "
        f"payload is left, {found.unfit:,} because no task can have their queue or id",
    )
    if found.refused and not dry_run:
        raise click.exceptions.Exit(EXIT_RUNTIME)


def _micros(text: str | None) -> int | None:
    from postroom.core.times import epoch_ns_of, parse_utc

    return None if text is None else epoch_ns_of(parse_utc(text)) // 1000


add_json_option(pipeline)
