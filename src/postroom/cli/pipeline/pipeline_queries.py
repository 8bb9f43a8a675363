"""The commands of `postroom pipeline` that read the tables: queries, reports, checks, expectations, names."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.pipeline.pipeline_options import (
    TablesPlace,
    lineage_option,
    progress_on_stderr,
    tables_option,
    with_lineage,
)
from postroom.cli.render import warn
from postroom.cli.shell import Shell, parse_wait, path_option
from postroom.errors import EXIT_OK, EXIT_RUNTIME, Unavailable

if TYPE_CHECKING:
    from postroom.pipeline.delta.tables import Tables
    from postroom.pipeline.lineage import JobRun

CHECK_HORIZON_S = 86_400.0
PRIORITIES = range(4)


@click.command()
@tables_option
@click.argument("query", metavar="QUERY")
@click.pass_obj
def sql(shell: Shell, /, tables: TablesPlace, query: str) -> None:
    """Query the tables with SQL; prints JSON lines. Needs no Spark.

    DuckDB answers, in its own dialect. Allowed are queries over the tables of the folder, SHOW TABLES,
    DESCRIBE and SUMMARIZE. Everything else is refused: statements that change data, files named by their
    path, table functions that read files.

    \b
    Example:
      postroom pipeline sql --tables tables "SELECT type, count(*) AS n FROM silver_messages GROUP BY type"
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    there = tables.open()
    from postroom.pipeline.query.sql import answers

    for line in answers(there, query):
        shell.output.text(line)


_rules_option = path_option(
    "--rules",
    metavar="FILE",
    text="Expectations in TOML instead of the built-in ones: tables [[expect]].",
)


@click.command()
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
@_rules_option
@click.pass_obj
def report(
    shell: Shell,
    /,
    tables: TablesPlace,
    out: Path,
    speedscope: Path | None,
    targets: dict[int, int],
    rules: Path | None,
) -> None:
    """Write a report of the tables as one HTML file. Needs no Spark.

    It shows latency, throughput, queue depth, errors, dead letters and their patterns, tokens and cost, which
    agents talk to each other, and flame graphs of the largest goals; with --target also how many messages
    were delivered in time. Its first findings are breached expectations: those of --rules, or the built-in
    ones. The file works offline and has no script.

    \b
    Example:
      postroom pipeline report --tables tables --out report.html
      postroom pipeline report --tables tables --out report.html --target P0=10ms --target P1=50ms
      postroom pipeline report --tables tables --out report.html --speedscope goals.json
    """
    from postroom.pipeline.paths import need_place, need_tables

    need_tables(tables.place)
    for file in (out, speedscope):
        if file is not None:
            need_place(file)
    opened = tables.open()
    from postroom.pipeline.query.expectations import read_expectations
    from postroom.pipeline.report.queries import write_report

    facts = write_report(
        opened,
        out,
        speedscope,
        targets_us=targets,
        expected=None if rules is None else read_expectations(rules),
        progress=progress_on_stderr(shell),
    )
    shell.output.facts(
        {"report": str(out), "messages": facts.messages, "events": facts.events, "goals": len(facts.goals)},
        f"{out} is a report of {facts.messages:,} messages",
    )


@click.command()
@tables_option
@click.option(
    "--horizon-s",
    type=parse_wait,
    default=CHECK_HORIZON_S,
    show_default=True,
    metavar="S",
    help="How long an open message may have no event before it counts as lost.",
)
@click.pass_obj
def check(shell: Shell, /, tables: TablesPlace, horizon_s: float) -> int:
    """Check all events of the tables, and print every violation of a guarantee.

    The guarantees: no accepted message is lost, no message is delivered that was not accepted, leases of one
    message never overlap, a message ends once, and no number of a source is missing or used twice. The output
    is a line for each violation, at most a thousand per rule, with the events that prove it. Messages that
    `retain` removed are not missing. The exit code is 0 without violations, and 1 otherwise. Needs no Spark:
    DuckDB sorts the events, on the disk if they are many, and one process checks them.

    \b
    Example:
      postroom pipeline check --tables tables
    """
    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    there = tables.open()
    from postroom.pipeline.query.check import check_tables

    verdict = check_tables(there, horizon_s=horizon_s)
    rows = [sample._asdict() | {"event_ids": list(sample.event_ids)} for sample in verdict.samples]
    history = f"{verdict.events:,} events, {verdict.messages:,} messages accepted"
    shell.output.rows(("rule", "message_id", "event_ids", "sentence"), rows, f"clean: {history}")
    if verdict.violations:
        counts = ", ".join(f"{n:,} {rule}" for rule, n in verdict.counts.items())
        warn(shell.program, f"{verdict.violations:,} violations in {history}: {counts}")
    return EXIT_RUNTIME if verdict.violations else EXIT_OK


@click.command()
@tables_option
@_rules_option
@lineage_option
@click.pass_obj
@with_lineage
def expect(shell: Shell, /, tables: TablesPlace, rules: Path | None, lineage: "JobRun | None") -> int:
    """Measure what is expected of the tables, and print each expectation. Needs no Spark.

    The kinds are not_null, unique, known_values, freshness and reject_rate. An expectation is breached if
    the share of rows that break it exceeds its `most`; of freshness, if the newest row is older than `most`
    seconds. The exit code is 0 without a breach, and 1 otherwise. The results of a breach are also an event,
    a file in `_breaches` next to the tables; --lineage emits it, and the results without a breach. `report`
    names breaches, with the same --rules.

    \b
    Example:
      postroom pipeline expect --tables tables
      postroom pipeline expect --tables tables --rules expectations.toml --lineage lineage.jsonl
    """
    import msgspec

    from postroom.pipeline.paths import need_tables

    need_tables(tables.place)
    there = tables.open()
    from postroom.pipeline.query.expectations import EXPECTATIONS, breaches, measure, read_expectations

    wanted = EXPECTATIONS if rules is None else read_expectations(rules)
    measured = measure(there, wanted, time.time_ns() // 1000)
    broken = breaches(measured)
    if broken or lineage:
        from postroom.pipeline.lineage import JobRun
        from postroom.pipeline.lineage import measured as assertions

        run = lineage or JobRun(None, "pipeline.expect")
        event = run.end("FAIL" if broken else "COMPLETE", assertions(there, measured))
        if broken:
            _keep_breach(shell, there, event)
    columns = ("table", "kind", "columns", "rows", "broken", "most", "holds")
    shell.output.rows(columns, map(msgspec.to_builtins, measured), "nothing is expected")
    for one in broken:
        warn(shell.program, f"breached: {one.sentence}")
    return EXIT_RUNTIME if broken else EXIT_OK


def _keep_breach(shell: Shell, tables: "Tables", event: dict[str, Any]) -> None:
    """Write the event next to the tables. A reader without permission to write still gets the result."""
    from postroom.pipeline.query.expectations import BREACHES, keep_breach

    try:
        keep_breach(tables.storage, event)
    except (OSError, Unavailable) as error:
        warn(shell.program, f"warning: no event was written to {tables.storage}/{BREACHES}: {error}")


def _targets(texts: tuple[str, ...]) -> dict[int, int]:
    """The targets in microseconds, by priority."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"[Pp]?(\d{1,3})=(\d{1,9}(?:\.\d{1,6})?)(us|ms|s)", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not a priority and a time, such as P0=10ms or P1=0.5s")
        if int(match[1]) not in PRIORITIES:
            raise click.BadParameter(f"{text!r} names no priority: there are P0 to P3")
        found[int(match[1])] = round(float(match[2]) * {"us": 1, "ms": 1_000, "s": 1_000_000}[match[3]])
    return found
