import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from deltalake import DeltaTable
from py4j.protocol import REFLECTION_COMMAND_NAME  # type: ignore[import-untyped]
from pyspark.errors.utils import is_debugging_enabled
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.audit.layout import STREAM
from postroom.core.formats.events import to_line
from postroom.errors import InvalidMessage, TableChanged, Unavailable
from postroom.pipeline import jobs, paths
from postroom.pipeline.delta import delta_log, file_groups, file_index
from postroom.pipeline.delta.delta_log import RENAMED, Txn
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.gold.tables import FORM, GOLD
from postroom.pipeline.ingest.segments import HASH
from postroom.pipeline.jobs import Pipeline, nothing_new
from postroom.pipeline.spark.session import AWAITED, LOCAL_SHUFFLE_PARTITIONS, in_pool
from postroom.pipeline.times import MINUTE_US
from tests.spark.commands import begun
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import Rows, all_rows, records, rows_of
from tests.spark.quick import QUICK
from tests.spark.realstore import Store
from tests.spark.rows.test_gold import FILES
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import HOUR_US, NOW_US, Story, happened, write_segment

FEWEST_TASKS = "spark.sql.files.minPartitionNum"


def test_a_folder_that_is_none_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="is not a folder of segments"):
        Pipeline(spark, Tables(tmp_path / "tables"), gold={}).run(tmp_path / "nowhere")


def test_tables_of_an_earlier_version_are_rebuilt(spark: SparkSession, story: Story, tmp_path: Path) -> None:
    """One that did not know two fields, which nobody in these stories tells of."""
    old = Tables(tmp_path / "tables")
    lines = story.tables.read(spark, "bronze_events").drop("service", "model")
    old.replace("bronze_events", lines, partition_by=("date",))
    Pipeline(spark, old, gold={}).backfill()
    for name in old.names():
        if name != "bronze_events":
            assert rows_of(old, name) == rows_of(story.tables, name), name


FEW_GOLD = {name: GOLD[name] for name in ("gold_flow", "gold_depth", "gold_latency")}


@pytest.fixture(scope="module")
def few(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `events` of few messages, and their `tables`. A test takes a copy."""
    folder = tmp_path_factory.mktemp("few")
    generate(folder / "events", 50, 3)
    (folder / "events" / STREAM).write_text("few\n")  # a copy is the same stream
    Pipeline(spark, Tables(folder / "tables"), gold=FEW_GOLD).run(folder / "events")
    return folder


class Killed(Exception):
    pass


def killed(*_: object, **__: object) -> None:
    raise Killed


class OldForms(NamedTuple):
    """Gold tables as another version of postroom has written them, and their rows of this version."""

    tables: Tables
    job: Pipeline
    expected: dict[str, Rows]
    ids: dict[str, str]

    def run(self, few: Path) -> None:
        self.job.run(few / "events")
        assert all_rows(self.tables) == self.expected
        assert {name: self.tables.table_id(name) for name in self.ids} == self.ids
        assert {name: self.tables.partitions(name) for name in self.ids} == {
            name: list(GOLD[name].partition_by) for name in self.ids
        }


@pytest.fixture
def old_forms(spark: SparkSession, few: Path, tmp_path: Path) -> OldForms:
    """One without a column, and one that had no partitions; the second is made of the first."""
    gold = {name: GOLD[name] for name in ("gold_flow", "gold_depth")}
    shutil.copytree(few / "tables", tmp_path / "tables")
    tables = Tables(tmp_path / "tables")
    expected = all_rows(tables)
    for name, lost in {"gold_flow": "left", "gold_depth": "day"}.items():
        rows = spark.createDataFrame(tables.read(spark, name).drop(lost).collect())
        shutil.rmtree(tables.folder / name)
        tables.forget(name)
        partitions = GOLD[name].partition_by if name == "gold_flow" else ()
        tables.append(
            name, rows, partition_by=partitions, txns=[Txn("silver_events", 7), Txn("gold_flow", 7)]
        )
    ids = {name: tables.table_id(name) for name in gold}
    return OldForms(tables, Pipeline(spark, tables, gold=gold), expected, ids)


def test_a_gold_table_of_another_form_is_rebuilt_and_keeps_its_id(old_forms: OldForms, few: Path) -> None:
    old_forms.run(few)


def test_next_run_finishes_a_run_killed_while_it_changed_partitions(
    old_forms: OldForms, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after(patch, killed)
        with pytest.raises(Killed):
            old_forms.job.run(few / "events")
    assert old_forms.tables.files("gold_depth") == []
    assert nothing_new(old_forms.tables, old_forms.job.streams(few / "events")) is None
    old_forms.run(few)


def test_another_job_may_rebuild_a_table_while_its_partitions_change(
    spark: SparkSession, old_forms: OldForms, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two commits. Then the rows of this job are not committed a second time."""
    other = Pipeline(spark, Tables(old_forms.tables.folder), gold={"gold_depth": GOLD["gold_depth"]})
    ends: list[int] = []

    def overtaken() -> None:
        other.run(few / "events")
        ends.append(other.tables.version("gold_depth"))

    after(monkeypatch, overtaken)
    old_forms.run(few)
    assert ends == [old_forms.tables.version("gold_depth")] == [2]


def after(patch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen after the next table was emptied to change its partitions."""
    emptied = delta_log._emptied

    def with_event(*what: Any) -> DeltaTable:
        delta = emptied(*what)
        happens()
        return delta

    patch.setattr(delta_log, "_emptied", with_event)


def test_a_changed_schema_of_gold_needs_a_new_form_number(tables_of: TablesOf) -> None:
    """Whoever gives a gold table another column or partition raises `FORM`, and writes both here.

    A table with an oracle in a file has its columns there.
    """
    _, tables = tables_of()
    forms = [(name, tables.schema(name).simpleString(), GOLD[name].partition_by) for name in sorted(GOLD)]
    said = {file.stem: file.read_text("utf-8").partition("\n")[0] for file in FILES.glob("*.sql")}
    for name, columns, partitions in forms:
        if name in said:
            assert said[name] == f"-- {columns} by {', '.join(partitions)}"
    of_first = [form for form in forms if form[0] not in said]
    assert (FORM, crc32(repr(of_first).encode())) == (6, 3437660071)


STEPS = ("bronze", "silver_events", "silver_messages", "silver_spans")


def kill_during(step: str, events: Path, tables: Path) -> None:
    """Start a run, and kill it with its JVM when it says that it begins with a step."""
    conf = [f"--conf={name}={value}" for name, value in QUICK.items()]
    words = ("run", "--events", events, "--tables", tables, "--master", "local[2]", *conf)
    with begun(f"  {step}", *words) as process:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_killed_run_is_finished_by_the_next_one(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    """One kill at one step; `make crash` does a hundred, of gold and `retain` as well, at any moment."""
    events, undisturbed = tables_of()
    step = random.SystemRandom().choice(STEPS)
    kill_during(step, events, tmp_path)
    tables = Tables(tmp_path)
    for name, rows in all_rows(tables).items():  # whatever is there is whole
        assert rows.total() == sum(file.rows for file in tables.files(name))
    Pipeline(spark, tables, gold={}).run(events)
    for name, rows in all_rows(tables).items():
        assert rows == rows_of(undisturbed, name), (name, step)


def took(job: Pipeline, events: Path) -> list[int]:
    """The numbers of the segments that are taken into bronze now."""
    [stream] = streams = job.streams(events)
    job._find_new_segments(streams)
    return [segment.number for batch in job._ingest(stream) for segment in batch]


def replace_stream(events: Path, prefix: str, numbers: range) -> None:
    """Another stream at the same place, without a name."""
    shutil.rmtree(events, ignore_errors=True)
    for number in numbers:
        write_segment(events, number, [happened(prefix, number, f"{prefix}{number}"), b"no"])


def test_another_stream_at_the_same_path_is_ingested_from_its_start(
    spark: SparkSession, tmp_path: Path
) -> None:
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})
    replace_stream(events, "one", range(1, 4))
    assert took(job, events) == [1, 2, 3]
    replace_stream(events, "two", range(1, 3))  # it does not even have the number that was the last
    assert took(job, events) == [1, 2]
    write_segment(events, 3, [happened("two", 3, "two3")])
    assert took(job, events) == [3]
    replace_stream(events, "three", range(1, 5))
    (events / STREAM).write_text("three\n")
    assert took(job, events) == [1, 2, 3, 4]
    assert took(job, events) == []
    found = [json.loads(row)["segment"] for row in rows_of(tables, "bronze_rejects").elements()]
    assert len(found) == len(set(found)) == 9  # a bad line in all but one


def test_a_stream_that_gets_a_name_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """Tables of earlier versions knew it by its place, and remembered no hash."""
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})
    replace_stream(events, "one", range(1, 3))
    assert took(job, events) == [1, 2]
    tables.mark("bronze_events", [Txn(f"segments of {events}{HASH}", -1)])
    (events / STREAM).write_text("one\n")
    write_segment(events, 3, [happened("one", 3, "one3")])
    assert took(job, events) == [3]
    assert tables.last_txn("bronze_events", "stream one") == 3


def test_a_stream_ingests_a_segment_that_was_truncated_when_it_was_noticed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a folder that is still being copied. The file source of Spark notices a file once."""
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    generate(events, 50, 3)
    lines = sum(len(segment.path.read_bytes().splitlines()) for segment in sealed_segments(events))
    *_, last = sealed_segments(events)
    whole = last.path.read_bytes()
    last.path.write_bytes(whole[: len(whole) // 2])
    job = Pipeline(spark, tables, gold={})
    job.stream(events)
    assert sum(file.rows for file in tables.files("bronze_events")) == lines - len(whole.splitlines())
    last.path.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(job, "_refresh_tables", killed)
        with pytest.raises(Killed):
            job.stream(events)
    job.stream(events)  # nothing arrives, and still it ends what was begun
    assert sum(file.rows for file in tables.files("bronze_events")) == lines
    assert rows_of(tables, "bronze_rejects").total() == 0
    assert tables.last_txn("silver_events", "bronze_events") == tables.version("bronze_events")


def test_an_event_repeated_on_another_date_is_kept_once(spark: SparkSession, tmp_path: Path) -> None:
    """A bad line has them written together, in files of the same name and at the same place."""
    for number, date in enumerate(("2025-01-05", "2025-01-06"), 1):
        write_segment(tmp_path / "events", number, [happened("s", 1, "m1"), b"{"], date)
    tables = Tables(tmp_path / "tables")
    spark.conf.set(FEWEST_TASKS, "1")
    try:
        Pipeline(spark, tables, gold={}).run(tmp_path / "events")
    finally:
        spark.conf.unset(FEWEST_TASKS)
    names = {Path(file.path).name for file in tables.files("bronze_events")}
    assert (len(tables.files("bronze_events")), len(names)) == (2, 1)
    assert [rows_of(tables, name).total() for name in ("bronze_events", "silver_events")] == [2, 1]


def test_a_segment_of_repeated_events_changes_nothing(spark: SparkSession, few: Path, tmp_path: Path) -> None:
    shutil.copytree(few, tmp_path, dirs_exist_ok=True)
    job = Pipeline(spark, Tables(tmp_path / "tables"), gold=FEW_GOLD)
    *_, last = sealed_segments(tmp_path / "events")
    before = all_rows(job.tables)
    date = last.path.parts[-3].removeprefix("date=")
    write_segment(tmp_path / "events", last.number + 1, last.path.read_bytes().splitlines(), date)
    for _ in range(2):
        assert job.run(tmp_path / "events").rows["gold_depth"] > 0
    after = all_rows(job.tables)
    assert {name for name in before if before[name] != after[name]} == {"bronze_events"}


GOLD_OF_EACH_KIND = {
    name: GOLD[name]
    for name in ("gold_flow", "gold_depth", "gold_latency", "gold_crashes", "gold_poison_suspects")
}


PAID: dict[str, object] = {"model": "m", "tokens_in": 5, "tokens_out": 7, "cost_usd": 0.25}
FAILED: dict[str, object] = {"error_type": "Timeout", "error": "no answer within 12 s"}
LIFE: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("created", "QUEUED", {}),
    ("enqueued", "QUEUED", {}),
    ("dequeued", "EXECUTING", {}),
    ("execution_failed", "EXECUTING", {**PAID, **FAILED}),
    ("dead_letter", "DEAD", FAILED),
    ("replayed", "QUEUED", {}),
    ("execution_completed", "DONE", {}),
)
"""Each a minute after the one before."""
LATE = slice(2, 5)
BY_HOUR = (
    *("gold_latency", "gold_sla", "gold_throughput", "gold_errors", "gold_flow", "gold_depth"),
    *("gold_tokens", "gold_cost", "gold_dlq_templates", "gold_flames"),
)


def life_of(message_id: str, seq: int, hour: int) -> list[bytes]:
    """A message that fails, is replayed as a dead letter, and ends well."""
    named = {"queue": "q", "org_id": "o", "type": "t", "goal_id": "g", "agent_id": "a", "priority": 1}
    return [
        happened(
            "s", seq + n, message_id, kind, state=state, attempt=1, **named, **facts,
            ts_us=NOW_US + hour * HOUR_US + n * MINUTE_US,
        )
        for n, (kind, state, facts) in enumerate(LIFE)
    ]  # fmt: skip


def counted_openings(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each table is opened from now on."""
    opened: Counter[str] = Counter()
    open_last = Tables._latest

    def counting(tables: Tables, name: str) -> DeltaTable | None:
        opened[name] += 1
        return open_last(tables, name)

    patch.setattr(Tables, "_latest", counting)
    return opened


def test_late_events_rewrite_the_rows_of_their_hour(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read off the log. The messages are of several hours, across midnight; one of the first hour waits.

    Spark writes the files of the hours and of the late events. The tables to compare with are written here.
    """
    monkeypatch.setattr(file_groups, "HOURLY_EVENTS_MIN", 0)  # as of a stream with many
    gold = {name: GOLD[name] for name in BY_HOUR}
    lives = [life_of(f"m{hour}", 10 * hour, hour) for hour in (0, 6, 19)]
    lives += [life_of("waits", 300, 0)[:2], life_of("beside", 310, 5)]
    delayed = life_of("m5", 50, 5)
    late = delayed[LATE]  # when it was dequeued, failed and became a dead letter
    del delayed[LATE]
    write_segment(tmp_path / "events", 1, [text for life in (*lives, delayed) for text in life])
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold=gold)
    with monkeypatch.context() as large:
        large.setattr(paths, "SMALL_BYTES", 0)
        job.run(tmp_path / "events")
        versions = {name: tables.version(name) for name in tables.names()}
        write_segment(tmp_path / "events", 2, late)
        opened = counted_openings(large)
        job.run(tmp_path / "events")
    assert max(opened.values()) <= 2  # `silver_events` has eight readers
    rewritten = set()
    for name, version in versions.items():
        _, removed = tables.changed(name, version)
        for row in records(tables, name, removed):
            moments = [
                row[column] for column in ("hour_us", "minute_us", "first_us", "start_us") if column in row
            ]
            assert moments[0] // HOUR_US == NOW_US // HOUR_US + 5, name
            rewritten.add(name)
    assert rewritten >= {"silver_messages", "silver_spans", *BY_HOUR}
    whole = Tables(tmp_path / "whole")
    Pipeline(spark, whole, gold=gold).run(tmp_path / "events")
    assert all_rows(tables) == all_rows(whole)


def test_late_events_rewrite_every_gold_table_with_hours(tables_of: TablesOf) -> None:
    _, tables = tables_of()
    hourly = {name for name in GOLD if {"hour_us", "minute_us"} & set(tables.schema(name).names)}
    assert hourly - {file.stem for file in FILES.glob("*.sql")} == set(BY_HOUR)


class Disturbed(Tables):
    """Another program compacts a table after it was read, and before what was computed is committed."""

    disturbs: set[str]

    def stage(self, name: str, df: Any, **how: Any) -> Any:
        staged = super().stage(name, df, **how)
        if name in self.disturbs:
            self.disturbs.remove(name)
            assert DeltaTable(self.folder / name).optimize.compact()["numFilesRemoved"] > 1
        return staged


class Compacted(NamedTuple):
    """Tables after two deliveries, three of which another program compacted during the second one."""

    events: Path
    tables: Tables
    told: list[str]


@pytest.fixture(scope="module")
def compacted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Compacted:
    """A message that ended long ago lies in another file than one that goes on, and both files are joined."""
    folder = tmp_path_factory.mktemp("compacted")
    events, tables = folder / "events", Disturbed(folder / "tables")
    facts = {"queue": "q", "state": "QUEUED", "attempt": 1}
    early = [
        happened("s", 1, "ended", ts_us=NOW_US - 3 * HOUR_US),
        happened("s", 2, "ended", "dequeued", ts_us=NOW_US - 3 * HOUR_US, **facts),
        happened("s", 3, "ended", "execution_completed", ts_us=NOW_US - 3 * HOUR_US + 1, **facts),
        happened("s", 4, "open"),
        happened("s", 5, "open", "dequeued", **facts),
    ]
    write_segment(events, 1, early)
    Pipeline(spark, Tables(tables.folder), gold=GOLD_OF_EACH_KIND).run(events)
    write_segment(events, 2, [happened("s", 6, "open", "lease_lapsed", **facts)])
    told: list[str] = []
    tables.disturbs = {"silver_messages", "silver_attempts", "silver_spans"}
    Pipeline(spark, tables, gold=GOLD_OF_EACH_KIND, progress=told.append).run(events)
    assert tables.disturbs == set()
    return Compacted(events, tables, told)


def test_a_compaction_by_another_program_during_a_step_doubles_nothing(
    spark: SparkSession, compacted: Compacted, tmp_path: Path
) -> None:
    told = " ".join(compacted.told)
    assert "another writer changed table silver_messages after it was read" in told
    whole = Tables(tmp_path / "whole")
    Pipeline(spark, whole, gold=GOLD_OF_EACH_KIND).run(compacted.events)
    assert all_rows(compacted.tables) == all_rows(whole)


@pytest.mark.parametrize(("cores", "batches"), [(1, [1, 1, 1, 1]), (3, [3, 1])])
def test_a_batch_of_segments_grows_with_the_cores(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, batches: list[int]
) -> None:
    for number in range(1, 5):
        write_segment(tmp_path / "events", number, [happened("s", number, f"m{number}")])
    job = Pipeline(spark, Tables(tmp_path / "tables"))
    assert job._cores() == spark.sparkContext.defaultParallelism
    [stream] = streams = job.streams(tmp_path / "events")
    monkeypatch.setattr(jobs, "BATCH_BYTES_PER_CORE", stream.segments()[0].size)
    monkeypatch.setattr(job, "_cores", lambda: cores)
    monkeypatch.setattr(job, "_ingest_batch", lambda *_: True)
    job._find_new_segments(streams)
    assert [len(batch) for batch in job._ingest(stream)] == batches


def test_two_jobs_at_once_end_with_the_rows_of_one(
    spark: SparkSession, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes all files, as of large tables."""
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    shutil.copytree(few / "events", tmp_path / "events")

    def run() -> None:
        with suppress(TableChanged):  # the other one was faster five times
            Pipeline(spark, Tables(tmp_path / "tables"), gold=FEW_GOLD).run(tmp_path / "events")

    with ThreadPoolExecutor() as pool:
        for job in [pool.submit(run) for _ in range(2)]:
            job.result()
    Pipeline(spark, Tables(tmp_path / "tables"), gold=FEW_GOLD).run(tmp_path / "events")
    assert all_rows(Tables(tmp_path / "tables")) == all_rows(Tables(few / "tables"))


def test_a_table_that_keeps_changing_is_given_up_with_a_one_line_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segment(tmp_path / "events", 1, [happened("s", 1, "m1")])
    job = Pipeline(spark, Tables(tmp_path / "tables"), gold={})
    tries: list[str] = []

    def changed(_: Tables, name: str, *, rebuild: bool) -> None:
        tries.append(name)
        raise TableChanged(name)

    monkeypatch.setattr(job, "_refresh_table", changed)
    with pytest.raises(Unavailable, match="another writer changed table silver_events after it was read"):
        job.run(tmp_path / "events")
    assert tries == ["silver_events"] * jobs.TRIES_MAX


def test_after_a_compaction_nothing_is_computed_again(
    spark: SparkSession, compacted: Compacted, tmp_path: Path
) -> None:
    shutil.copytree(compacted.tables.folder, tmp_path / "tables")
    tables = Tables(tmp_path / "tables")
    before = all_rows(tables)
    assert sum(tables.compact(name) for name in tables.names()) > 0
    files = {name: tables.files(name) for name in tables.names()}
    Pipeline(spark, tables, gold=GOLD_OF_EACH_KIND).run(compacted.events)
    assert {name: tables.files(name) for name in tables.names()} == files
    assert all_rows(tables) == before


COUNTED_BY_TYPE = ("gold_throughput", "gold_errors")


def types_of(rows: Rows) -> set[str | None]:
    return {json.loads(row)["type"] for row in rows}


def test_events_of_a_store_are_counted_by_the_type_of_their_message(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A store tells it once, when a message is created. Here that comes before the rest, or behind it."""
    told = [to_line(event) for event in Store().events()]
    halves = [
        [line.rstrip() for line in told[: len(told) // 2]],
        [line.rstrip() for line in told[len(told) // 2 :]],
    ]
    gold = {name: GOLD[name] for name in COUNTED_BY_TYPE}
    found: list[dict[str, Rows]] = []
    for name, order in (("first", halves), ("last", halves[::-1])):
        tables = Tables(tmp_path / name / "tables")
        for number, lines in enumerate(order, 1):
            write_segment(tmp_path / name / "events", number, lines)
            Pipeline(spark, tables, gold=gold).run(tmp_path / name / "events")
        found.append({each: rows_of(tables, each) for each in (*COUNTED_BY_TYPE, "silver_attempts")})
        if name == "first":
            assert tables.last_txn("silver_messages", RENAMED) == -1  # so nothing was made anew
    assert found[0] == found[1]
    assert types_of(found[0]["gold_throughput"]) == {"t", "decision"}
    assert types_of(found[0]["silver_attempts"]) == {"t", "decision"}
    assert types_of(found[0]["gold_errors"]) <= {"t", "decision"}


def test_of_two_events_with_one_number_the_same_is_kept_in_any_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In one run or in two; the fold of what lost is undone."""
    twins = [
        happened("s", 1, "m1", "dead_letter", payload="one"),
        happened("s", 1, "m2", "cancelled", payload="two"),
    ]
    gold = {"gold_throughput": GOLD["gold_throughput"]}
    found = []
    for n, deliveries in enumerate([[twins], [twins[:1], twins[1:]], [twins[1:], twins[:1]]]):
        events, tables = tmp_path / f"{n}" / "events", Tables(tmp_path / f"{n}" / "tables")
        for number, lines in enumerate(deliveries, 1):
            write_segment(events, number, lines)
            Pipeline(spark, tables, gold=gold).run(events)
        found.append({name: rows for name, rows in all_rows(tables).items() if not name.startswith("bronze")})
        assert found[-1]["silver_events"].total() == 1
    assert all(each == found[0] for each in found)


def test_an_empty_message_id_is_not_a_message(spark: SparkSession, tmp_path: Path) -> None:
    empty = happened("s", 1, "", "heartbeat", org_id="", worker_id="w", attempt=1)
    write_segment(tmp_path / "events", 1, [empty, happened("s", 2, "m")])
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables, gold={}).run(tmp_path / "events")
    assert {json.loads(row)["message_id"] for row in rows_of(tables, "silver_events")} == {None, "m"}
    assert {json.loads(row)["message_id"] for row in rows_of(tables, "silver_messages")} == {"m"}
    assert rows_of(tables, "silver_attempts").total() == 0


@pytest.mark.usefixtures("spark")
def test_a_column_does_not_query_the_jvm_for_its_python_line() -> None:
    assert not is_debugging_enabled()


def test_a_column_does_not_look_up_its_functions_in_the_jvm(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> None:
        F.when(F.col("a") > 1, F.coalesce("b", "c")).alias("d")

    made()  # who calls a method for the first time asks once
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    asked: list[str] = []
    send = client.send_command

    def noted(text: str, *more: object, **others: object) -> Any:
        asked.append(text)
        return send(text, *more, **others)

    monkeypatch.setattr(client, "send_command", noted)
    made()
    assert asked
    assert [text for text in asked if text.startswith(REFLECTION_COMMAND_NAME)] == []


def test_a_session_does_not_look_for_extensions(spark: SparkSession) -> None:
    """Spark's own would be found, with functions for machine learning whose types take a second."""
    context: Any = spark.sparkContext
    catalyst = context._jvm.org.apache.spark.sql.catalyst
    known = getattr(getattr(catalyst.analysis, "FunctionRegistry$"), "MODULE$").internal()
    assert not known.functionExists(catalyst.FunctionIdentifier("vector_to_array"))
    assert known.functionExists(catalyst.FunctionIdentifier("bloom_filter_agg"))  # it is asked as it should


def test_what_others_wait_for_goes_first(spark: SparkSession) -> None:
    pool = spark.sparkContext._jsc.sc().getPoolForName(AWAITED)
    assert pool.get().minShare() > LOCAL_SHUFFLE_PARTITIONS  # more than it can use
    for chosen in (AWAITED, None):
        in_pool(spark, chosen)
        assert spark.sparkContext.getLocalProperty("spark.scheduler.pool") == (chosen or "default")


def test_file_index_finds_only_the_file_that_holds_the_message(spark: SparkSession, tmp_path: Path) -> None:
    """A task gives its files of several days one name."""
    tables = Tables(tmp_path)
    day = F.date_add(F.lit("2025-01-01").cast("date"), F.col("id").cast("int"))
    rows = spark.range(2).coalesce(1).select(F.col("id").cast("string").alias("message_id"), day.alias("day"))
    tables.append("silver_messages", rows, partition_by=("day",))
    files = tables.files("silver_messages")
    assert (len(files), len({Path(file.path).name for file in files})) == (2, 1)
    ids = rows.where("message_id = '1'").select("message_id")
    with ExitStack() as held:
        lookup = file_index.lookup(ids, held)
        [found] = file_index.files_with_ids(spark, tables, "silver_messages", lookup)
    assert found.partition == {"day": "2025-01-02"}


def test_replay_does_not_rewrite_files_of_finished_messages(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_groups, "HOURLY_EVENTS_MIN", 0)  # as of a stream with many
    lives = [
        ("a", 9, ("created", "execution_completed")),
        ("b", 9, ("created", "execution_failed", "dead_letter")),
        ("c", 6, ("created", "execution_completed")),
    ]
    told = [(life, NOW_US - hours * HOUR_US, kind) for life, hours, kinds in lives for kind in kinds]
    first = [
        happened("s", seq, life, kind, ts_us=ts_us + seq, attempt=1)
        for seq, (life, ts_us, kind) in enumerate(told, 1)
    ]
    again = [happened("s", 31, "b", "replayed"), happened("s", 32, "b", "dequeued", attempt=2)]
    tables, files = Tables(tmp_path / "tables"), []
    for number, lines in enumerate(([*first, happened("s", 30, "now")], again), 1):
        write_segment(tmp_path / "events", number, lines)
        Pipeline(spark, tables, gold={}).run(tmp_path / "events")
        names = ("silver_messages", "silver_spans", "silver_attempts")
        files.append({name: {file.path for file in tables.files(name)} for name in names})
    stayed = {name: {lot_of(path) for path in files[0][name] & files[1][name]} for name in files[0]}
    # By the hour of noon less nine and less six. Of the dead letter, only what was tried before is as it was.
    assert stayed == {
        "silver_messages": {"3", "6", "open"},
        "silver_spans": {"3", "6", "open"},
        "silver_attempts": {"3", "6"},
    }
    assert {lot_of(path) for path in files[0]["silver_messages"]} == {"3", "6", "dead", "open"}


def lot_of(path: str) -> str:
    """With which rows those of a file lie."""
    number = int(path.removesuffix(".parquet").rpartition("-")[2])
    names = {file_groups.OPEN: "open", file_groups.DEAD: "dead"}
    return names.get(number, str(number - file_groups.HOURS_FROM))
