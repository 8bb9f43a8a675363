"""`postroom pipeline`: work on the audit stream as a whole."""

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
    """An option that names a folder of this machine, and no address."""
    return click.option(
        *names, type=click.Path(), callback=_local_path, required=required, metavar="DIR", help=text
    )


@click.group(context_settings=HELP_OPTIONS)
def pipeline() -> None:
    """Work on the audit stream as a whole.

    \b
    Example:
      postroom pipeline generate --messages 100000 --seed 1 --out history
      postroom pipeline run --events history --tables tables
      postroom pipeline sql --tables tables "SELECT outcome, count(*) FROM silver_messages GROUP BY outcome"
    """


@pipeline.command()
@click.option("--messages", type=MESSAGES, required=True, metavar="N", help="How many messages it has.")
@click.option("--seed", type=SEED, required=True, metavar="S", help="The same seed gives the same bytes.")
@folder_option("--out", "folder", text="A new or empty folder for its segments.", required=True)
@click.option(
    "--faults", is_flag=True, help="Break every rule at some places, and list them in DIR/_faults.jsonl."
)
@click.pass_obj
def generate(shell: Shell, messages: int, seed: int, folder: Path, faults: bool) -> None:
    """Make up a history, with everything that happens to messages of a global queue.

    Organisations of very different size, goals with trees of messages, priorities and promotions, retries,
    dead letters with recurring errors, tokens and cost; lines that come twice, and lines that come late.

    \b
    Example:
      postroom pipeline generate --messages 100000 --seed 1 --out history
      postroom pipeline generate --messages 5000 --seed 2 --out broken --faults
    """
    import gc

    import msgspec

    from postroom.pipeline.generator.generate import generate as make

    gc.disable()  # nothing that it makes is part of a cycle, and there are millions of them
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
    """Says now and then, on a terminal, how far it is."""
    began = told_at = time.monotonic()

    def progress(made: int, lines: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now >= told_at + PROGRESS_EVERY_S:
            told_at = now
            share = made / messages
            left_s = (now - began) * (1 - share) / share
            shell.note(f"{share:.0%}: {made:,} messages, {lines:,} lines, {left_s:.0f} s to go")

    return progress


# ---- on Spark ----------------------------------------------------------------------------------------

EVERY_S = click.FloatRange(0.1, 86_400.0)


def events_option(*, required: bool = True) -> Callable[[Command], Command]:
    return folder_option(
        "--events", text="The folder of the audit stream: its sealed segments are read.", required=required
    )


def tables_option(command: Command) -> Command:
    return folder_option("--tables", text="The folder of the tables.", required=True)(command)


spark_options = together(
    click.option(
        "--master",
        default="local[*]",
        show_default=True,
        metavar="URL",
        help="Where Spark runs: local[N], spark://…, k8s://… or yarn.",
    ),
    click.option(
        "--remote",
        metavar="URL",
        help="A Spark Connect server instead: sc://HOST:PORT.",
    ),
    click.option(
        "--conf",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _c, _p, texts: _settings(texts),
        help="A setting of Spark; may be repeated.",
    ),
)
"""Where a job runs."""


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
        help="What is taken out of payloads and errors that the stream still holds.",
    )(command)


def skip_option(command: Command) -> Command:
    return click.option(
        "--skip-missing",
        is_flag=True,
        help="Give up segments that are missing while later ones are there, and say which.",
    )(command)


@contextmanager
def spark_of(
    master: str, remote: str | None, conf: dict[str, str], *, is_small: bool = False
) -> "Iterator[SparkSession]":
    """The one session of a command."""
    from postroom.pipeline.session import spark_session

    with starting:
        spark = spark_session(master, remote, conf, is_small=is_small)
    try:
        yield spark
    finally:
        spark.stop()


def told(shell: Shell) -> Callable[[str], None]:
    """Progress on stderr, with the seconds since the beginning."""
    began = time.monotonic()
    return lambda text: warn(shell.program, f"{time.monotonic() - began:6.1f} s  {text}")


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
    """Spark with the tables. The session fits the size of the data, unless it `follows` what may grow."""
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
        f"{summary.segments} new segments, {summary.lines:,} lines, {summary.rejects:,} of them no events; "
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
@click.pass_obj
@beside_spark
def run(
    shell: Shell, /, events: Path, tables: Path, skip_missing: bool, redaction: str, **where: Any
) -> None:
    """Take the segments that are new, and bring every table up to them.

    What was taken before is not read again. A run that was interrupted is simply started again. Segments are
    taken in the order of their numbers: where one is missing, those behind it wait for it. If it is lost for
    good, --skip-missing goes on without it.

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
        _print_summary(shell, job.run(events, skip_missing=skip_missing))


@pipeline.command()
@events_option(required=False)
@tables_option
@spark_options
@redaction_option
@click.pass_obj
@beside_spark
def backfill(shell: Shell, /, events: Path | None, tables: Path, redaction: str, **where: Any) -> None:
    """Make the silver and gold tables anew from all of bronze.

    For tables of an earlier version, or after a change of the redaction. Readers see the old rows of a table
    until its new ones are complete.

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
    help="Go on for ever, with a batch so often. Without it: all that is there, then the end.",
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
    """Follow the audit stream: a batch of new segments, and the tables up to it, again and again.

    As with `run`, segments behind one that is missing wait for it. Behind Spark Connect it does not work: a
    server would call back into a process of its own.

    \b
    Example:
      postroom pipeline stream --events history --tables tables
      postroom pipeline stream --events /data/audit --tables /data/tables --every 10
    """
    if where["remote"] is not None:
        raise click.UsageError("a stream has no --remote: give `run` again and again, or use --master")
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
    """How far each table has come. It needs no Spark.

    `behind` counts the commits of its source that a silver table has not seen; where nobody counts them, as
    for bronze and gold, it is empty. With --events, the first line counts the segments that nobody took so
    far, and a sentence on stderr names those that the others wait for.

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
@click.option("--compact", is_flag=True, help="Join small files first. Rows stay as they are.")
@click.option(
    "--vacuum",
    is_flag=True,
    help="Delete files that no version of the last week names, and what killed jobs left.",
)
@click.pass_obj
def list_tables(shell: Shell, tables: Path, compact: bool, vacuum: bool) -> None:
    """The tables and their columns. It needs no Spark.

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
@spark_options
@click.argument("query", metavar="QUERY")
@click.pass_obj
@beside_spark
def sql(shell: Shell, /, tables: Path, query: str, **where: Any) -> None:
    """Ask the tables with the SQL of Spark; prints JSON lines.

    Queries over the tables of the folder, and SHOW TABLES, SHOW COLUMNS, DESCRIBE and EXPLAIN. Whatever else
    Spark could do is refused: statements that change something, files that are named by their path,
    functions that run code. With --remote it does not work: a query is checked by Spark's own parser, which a
    Spark Connect client does not have.

    \b
    Example:
      postroom pipeline sql --tables tables "SELECT type, count(*) AS n FROM silver_messages GROUP BY type"
    """
    if where["remote"] is not None:
        raise click.UsageError("sql has no --remote: a query is checked by Spark's own parser; use --master")
    from postroom.pipeline.paths import need_tables

    need_tables(tables)
    with _pipeline(shell, tables, where) as job:
        for line in job.answers(query):
            shell.output.text(line)


@pipeline.command()
@tables_option
@path_option(
    "--out",
    metavar="FILE",
    text="The HTML file to write. It stands alone: nothing is loaded from anywhere.",
    required=True,
)
@path_option(
    "--speedscope", metavar="FILE", text="Also write the goals' flame graphs as a file for speedscope."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="PRIORITY=TIME",
    callback=lambda _c, _p, texts: _targets(texts),
    help="How long messages of a priority may wait, as in P0=10ms; may be repeated.  [default: no targets]",
)
@click.pass_obj
def report(
    shell: Shell, /, tables: Path, out: Path, speedscope: Path | None, targets: dict[int, int]
) -> None:
    """Draw what the tables say, as one HTML file. It needs no Spark.

    Latency, throughput, queue depth, errors, dead letters and their patterns, tokens and cost, who talks to
    whom, and flame graphs of the largest goals. With --target, how many messages were delivered in time. It
    can be read offline, and has no script in it.

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
        f"{out} tells of {facts.messages:,} messages",
    )


@pipeline.command()
@tables_option
@click.option(
    "--horizon-s",
    type=parse_wait,
    default=CHECK_HORIZON_S,
    show_default=True,
    metavar="S",
    help="How long an open message may be silent before it counts as lost.",
)
@spark_options
@click.pass_obj
@beside_spark
def check(shell: Shell, /, tables: Path, horizon_s: float, **where: Any) -> int:
    """Check the whole history in the tables, and print the violations that it proves.

    Nothing accepted is lost, nothing is delivered that was not accepted, leases of one message never overlap,
    a life ends once, and no number of a source is missing or stands for two events. One line for each
    violation, at most a thousand of each rule, with the events that prove it. What `retain` let leave is not
    missing. The exit code is 0 when there is none, and 1 otherwise. Tables of up to 200,000 events, from
    which nothing was let leave, are checked without Spark.

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

    if is_small(tables := Tables(folder)):
        return check_small(tables, horizon_s=horizon_s)
    with _pipeline(shell, folder, where) as job:
        from postroom.pipeline.check import check_tables

        return check_tables(job.spark, job.tables, horizon_s=horizon_s)


def _targets(texts: tuple[str, ...]) -> dict[int, int]:
    """The targets of --target, in microseconds by priority."""
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
    help="How long messages stay: 7, 30, 90 or any other.",
)
@path_option(
    "--org-days",
    metavar="FILE",
    text="Organizations with a tier of their own: lines of an id and a number of days.",
)
@click.option(
    "--failures-days",
    type=DAYS,
    metavar="N",
    help="Dead letters and quarantined messages stay at least so long.",
)
@click.option(
    "--gold-days",
    type=DAYS,
    metavar="N",
    help="Days of gold tables leave after so long.  [default: never]",
)
@path_option("--hold", metavar="FILE", text="What stays whatever its age: lines of `org ID` or `goal ID`.")
@click.option("--archive", metavar="PATH", help="Write what leaves to this Hadoop path first.")
@click.option("--dry-run", is_flag=True, help="Only count.")
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
    """Let messages leave the tables that ended or last moved longer ago than they are kept.

    A message leaves as a whole, with its events. Rows are counted before any is deleted, and with --archive
    read back from there. Gold tables keep what they counted, for --gold-days. Files stay on the disk for a
    week, and then until the next `retain`, or `tables --vacuum`; those of gold until `tables --vacuum`.

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
    "--since", metavar="TIME", callback=lambda _c, _p, text: _micros(text), help="Created from then on."
)
@click.option("--until", metavar="TIME", callback=lambda _c, _p, text: _micros(text), help="Created before.")
@click.option("--to", required=True, metavar="URL", help="The store they go to, or a new one as a sandbox.")
@click.option("--store", metavar="URL", help="The store that still has the payloads.")
@path_option("--key-file", metavar="FILE", text="The keys of payloads that the stream holds encrypted.")
@click.option(
    "--rate", type=click.FloatRange(0.1, 1e6), metavar="N", help="At most so many messages a second."
)
@click.option(
    "--replay-id",
    default="",
    metavar="NAME",
    help="The name it is remembered by.  [default: made of --where, --since, --until and --to]",
)
@click.option("--dry-run", is_flag=True, help="Only count.")
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
    """Submit messages of the past again, in the order in which they were created.

    A message whose payload is only known redacted is refused and counted, and so is one with a queue or
    an id that no task can have; then the command ends with 1. The same command given again submits what is
    missing, and nothing twice within the 30 days for which a store remembers it. With --remote it does not
    work: the condition is checked by Spark's own parser.

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
        f"{found.known:,} were there, {found.refused - found.unfit:,} refused because only a redacted "
        f"payload is left, {found.unfit:,} because no task can have their queue or id",
    )
    if found.refused and not dry_run:
        raise click.exceptions.Exit(EXIT_RUNTIME)


def _micros(text: str | None) -> int | None:
    from postroom.core.times import epoch_ns_of, parse_utc

    return None if text is None else epoch_ns_of(parse_utc(text)) // 1000


add_json_option(pipeline)
