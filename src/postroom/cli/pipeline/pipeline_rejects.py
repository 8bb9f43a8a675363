"""The commands of `postroom pipeline rejects`."""

from typing import Any

import click

from postroom.cli.pipeline.pipeline_options import (
    TablesPlace,
    pipeline_on_spark,
    redaction_option,
    spark_options,
    tables_option,
)
from postroom.cli.pipeline.stopping import beside_spark
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option


@click.group(context_settings=HELP_OPTIONS)
def rejects() -> None:
    """Lines that are not events: list them, or take up those that can be read now.

    \b
    Example:
      postroom pipeline rejects list --tables tables
      postroom pipeline rejects retry --tables tables
    """


@rejects.command("list")
@tables_option
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, metavar="N", help="At most N lines.")
@click.pass_obj
def list_rejects(shell: Shell, tables: TablesPlace, limit: int) -> None:
    """List rejected lines, the oldest segment first, each with the reason. Needs no Spark.

    \b
    Example:
      postroom pipeline rejects list --tables tables
      postroom pipeline rejects list --tables tables --limit 10 --json
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    opened = tables.open()
    from postroom.pipeline.query.database import Database
    from postroom.pipeline.query.expectations import REJECTS

    found = Database(opened, [REJECTS]).each(
        f"SELECT segment, reason, line FROM {REJECTS} ORDER BY segment, line LIMIT {limit}"  # noqa: S608 - ours
    )
    shell.output.rows(("segment", "reason", "line"), found, "no line was rejected")


@rejects.command()
@tables_option
@spark_options
@redaction_option
@click.pass_obj
@beside_spark
def retry(shell: Shell, /, tables: TablesPlace, redaction: str, **where: Any) -> None:
    """Take up the rejected lines that this version can read, each once, and update every table.

    After an upgrade `run` does the same before it ingests new segments.

    \b
    Example:
      postroom pipeline rejects retry --tables tables
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    is_small = tables.open().is_small_with(0)
    with pipeline_on_spark(shell, tables, where, redaction, is_small=is_small) as job:
        taken = job.retry_rejects().taken_up
    shell.output.facts({"taken_up": taken}, f"{taken:,} rejected lines are events now")


add_json_option(rejects)
