"""The options of `postroom pipeline`, and how its commands reach tables and Spark."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from postroom.cli.pipeline.stopping import starting
from postroom.cli.render import warn
from postroom.cli.shell import Shell, together

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postroom.pipeline.delta.tables import Tables
    from postroom.pipeline.ingest.segments import SegmentStream
    from postroom.pipeline.jobs import Pipeline
    from postroom.pipeline.lineage import JobRun

Command = Callable[..., Any]


class TablesPlace(NamedTuple):
    """Where the tables are, and how this process reaches them and the streams."""

    place: str
    storage: Mapping[str, str]
    mounts: Mapping[str, str]

    def __str__(self) -> str:
        return self.place

    def open(self) -> "Tables":
        from postroom.pipeline.spark.session import need_packages

        need_packages()
        from postroom.pipeline.delta.storage import Access
        from postroom.pipeline.delta.tables import Tables

        return Tables(self.place, Access(self.storage, self.mounts))

    def streams(self, events: tuple[str, ...]) -> "list[SegmentStream]":
        from postroom.pipeline.delta.storage import Access, Storage
        from postroom.pipeline.ingest.segments import SegmentStream

        return [SegmentStream(Storage(place, Access(self.storage, self.mounts))) for place in events]


def _pairs(what: str, form: str) -> Callable[..., dict[str, str]]:
    """A callback that reads words of the form KEY=VALUE."""

    def read(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
        pairs = dict(text.partition("=")[::2] for text in texts)
        for name, value in pairs.items():
            if not name or not value:
                raise click.BadParameter(f"{name!r} is not {what}: it has the form {form}")
        return pairs

    return read


def events_option(*, required: bool = True) -> Callable[[Command], Command]:
    return click.option(
        "--events",
        multiple=True,
        required=required,
        metavar="URI",
        help="The folder of an audit stream: a path, or an address that Hadoop knows. Only sealed segments "
        "are read. May be repeated.",
    )


_tables_options = together(
    click.option(
        "--tables",
        required=True,
        metavar="URI",
        help="The folder of the tables: a path, or an address such as s3a://bucket/tables.",
    ),
    click.option(
        "--storage",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_pairs("a storage option", "KEY=VALUE"),
        help="A storage option of delta-rs for addresses, such as AWS_ENDPOINT_URL. May be repeated.",
    ),
    click.option(
        "--mount",
        multiple=True,
        metavar="START=URI",
        callback=_pairs("a mount", "START=URI"),
        help="Where this process finds addresses that only Hadoop knows, as viewfs:///=file:///data. May be "
        "repeated.",
    ),
)


def tables_option(command: Command) -> Command:
    """The place of the tables, as one `TablesPlace`."""

    @wraps(command)
    def with_place(
        *arguments: Any, tables: str, storage: dict[str, str], mount: dict[str, str], **options: Any
    ) -> Any:
        return command(*arguments, tables=TablesPlace(tables, storage, mount), **options)

    return _tables_options(with_place)


spark_options = together(
    click.option(
        "--master",
        default="local[*]",
        show_default=True,
        metavar="URL",
        help="Where Spark runs: local[N], spark://…, k8s://… or yarn.",
    ),
    click.option("--remote", metavar="URL", help="A Spark Connect server instead: sc://HOST:PORT."),
    click.option(
        "--conf",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_pairs("a setting of Spark", "KEY=VALUE"),
        help="A setting of Spark. May be repeated.",
    ),
    click.option(
        "--monitor/--no-monitor",
        default=True,
        show_default=True,
        help="Spark's UI on a free port of loopback, with a local master, and an event log next to local "
        "tables.",
    ),
)


def redaction_option(command: Command) -> Command:
    return click.option(
        "--redaction",
        type=click.Choice(["none", "medium", "full"]),
        default="medium",
        show_default=True,
        help="How much is redacted in payloads and errors of the stream.",
    )(command)


lineage_option = click.option(
    "--lineage",
    metavar="PLACE",
    help="Emit OpenLineage events to this file or HTTP address.  [default: none]",
)


def with_lineage(command: Command) -> Command:
    """Emit OpenLineage events about the run of a command with `lineage_option`, when that option is given.

    It stands outside of `beside_spark`, so that a job that is stopped emits its end, too.
    """

    @wraps(command)
    def emitting(shell: Shell, /, *, lineage: str | None, **options: Any) -> Any:
        if lineage is None:
            return command(shell, lineage=None, **options)
        from postroom.pipeline.lineage import JobRun

        run = JobRun(lineage, f"pipeline.{command.__name__}", lambda text: warn(shell.program, text))
        with run.running():
            return command(shell, lineage=run, **options)

    return emitting


def skip_option(command: Command) -> Command:
    return click.option(
        "--skip-missing",
        is_flag=True,
        help="Skip segments that are missing although later ones exist, and name them.",
    )(command)


@contextmanager
def spark_of(
    master: str, remote: str | None, conf: dict[str, str], *, is_small: bool = False, monitor: bool = False
) -> "Iterator[SparkSession]":
    """The Spark session of a command."""
    from postroom.pipeline.spark.session import spark_session

    with starting:
        spark = spark_session(master, remote, conf, is_small=is_small, with_ui=monitor)
    try:
        yield spark
    finally:
        spark.stop()


def progress_on_stderr(shell: Shell) -> Callable[[str], None]:
    """A callback that prints progress on stderr, with the seconds since the start."""
    began = time.monotonic()
    return lambda text: warn(shell.program, f"{time.monotonic() - began:6.1f} s  {text}")


@contextmanager
def pipeline_on_spark(
    shell: Shell,
    place: TablesPlace,
    where: dict[str, Any],
    redaction: Any = "medium",
    *,
    is_small: bool | None = None,
    is_endless: bool = False,
    lineage: "JobRun | None" = None,
) -> "Iterator[Pipeline]":
    """The tables on Spark. If it is not said whether data are small, the size of the tables decides.

    An endless job has no event log, which would fill the disk.
    """
    say = progress_on_stderr(shell)
    tables = place.open()
    if is_small is None:
        is_small = tables.is_small_with(0)
    if where.get("monitor") and not is_endless:
        where = {**where, "conf": {**_event_log(tables, where["remote"], say), **where["conf"]}}
    say("starting Spark")
    with spark_of(**where, is_small=is_small) as spark:
        from postroom.pipeline.jobs import Pipeline
        from postroom.pipeline.spark.session import is_classic, spark_errors

        if is_classic(spark) and (url := spark.sparkContext.uiWebUrl):
            say(f"Spark's UI: {url}")
        with spark_errors():
            yield Pipeline(spark, tables, level=redaction, progress=say, lineage=lineage)


def _event_log(tables: "Tables", remote: str | None, say: Callable[[str], None]) -> dict[str, str]:
    """The settings for an event log next to local tables. A Spark Connect server has its own."""
    from postroom.pipeline.spark.event_logs import event_log_settings

    local = tables.storage.local
    if remote is not None or local is None:
        return {}
    try:
        return event_log_settings(local)
    except OSError as error:  # the tables may be read-only for this user
        say(f"Spark writes no event log: {error.strerror or error}")
        return {}
