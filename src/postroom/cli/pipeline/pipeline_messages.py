"""The commands of `postroom pipeline` that delete messages, or submit them again."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.pipeline.pipeline_options import (
    TablesPlace,
    lineage_option,
    pipeline_on_spark,
    progress_on_stderr,
    spark_options,
    tables_option,
    with_lineage,
)
from postroom.cli.pipeline.stopping import beside_spark
from postroom.cli.shell import Shell, path_option
from postroom.errors import EXIT_RUNTIME

if TYPE_CHECKING:
    from postroom.pipeline.lineage import JobRun

DAYS = click.IntRange(1, 36_500)


@click.command()
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
@lineage_option
@click.pass_obj
@with_lineage
@beside_spark
def retain(
    shell: Shell,
    /,
    tables: TablesPlace,
    keep_days: int,
    org_days: Path | None,
    failures_days: int | None,
    gold_days: int | None,
    hold: Path | None,
    archive: str | None,
    dry_run: bool,
    lineage: "JobRun | None",
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

    need_tables(tables.place)
    from postroom.pipeline.spark.session import need_packages

    need_packages()
    from postroom.pipeline.retention import RetentionJob, RetentionPolicy, read_holds, read_org_days

    orgs, goals = (frozenset[str](), frozenset[str]()) if hold is None else read_holds(hold)
    policy = RetentionPolicy(
        keep_days=keep_days,
        org_days={} if org_days is None else read_org_days(org_days),
        failures_days=failures_days or 0,
        gold_days=gold_days or 0,
        held_orgs=orgs,
        held_goals=goals,
    )
    with pipeline_on_spark(shell, tables, where) as job:
        retention = RetentionJob(
            job.spark,
            job.tables,
            policy,
            now_us=time.time_ns() // 1000,
            archive=archive,
            progress=progress_on_stderr(shell),
            lineage=lineage,
        )
        found = retention.run(dry_run=dry_run)
    rows = (msgspec.to_builtins(each) for each in found)
    shell.output.rows(("table", "before", "deleted", "archived"), rows, "")


@click.command()
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
@click.pass_obj
def replay(
    shell: Shell,
    /,
    tables: TablesPlace,
    condition: str,
    since: int | None,
    until: int | None,
    to: str,
    store: str | None,
    key_file: Path | None,
    rate: float | None,
    replay_id: str,
    dry_run: bool,
) -> None:
    """Submit past messages again, in the order in which they were created. Needs no Spark.

    A message is refused and counted if only its redacted payload is known, or if no task can have its queue
    or id; the exit code is then 1. Running the same command again submits only missing messages: a store
    remembers a replay for 30 days. DuckDB evaluates the condition, in its dialect.

    \b
    Example:
      postroom pipeline replay --tables tables --where "goal_id = 'g-7'" --store sqlite:///run/queue.db \\
        --to sqlite:///sandbox.db --dry-run
    """
    import msgspec

    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    there = tables.open()
    from postroom.pipeline.replay import ReplaySelection
    from postroom.pipeline.replay import replay as submit

    wanted = ReplaySelection(
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
    found = submit(there, wanted, progress_on_stderr(shell))
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
