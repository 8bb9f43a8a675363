"""What leaves the tables, what stays, and that nothing is lost on the way."""

import json
import shutil
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.delta.tables import StagedFiles, Tables
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.query.check import ViolationSample, check_tables
from postroom.pipeline.retention import (
    ORDER,
    Retained,
    RetentionJob,
    RetentionPolicy,
    read_holds,
    read_org_days,
)
from postroom.pipeline.times import DAY_US
from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import Rows, column, records, rows_of
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import write_segment


def kept_rows(tables: Tables) -> dict[str, Rows]:
    """Without gold, which follows with the next run."""
    return {name: rows_of(tables, name) for name in ORDER}


def messages_of(tables: Tables) -> list[dict[str, Any]]:
    return [json.loads(row) for row in rows_of(tables, "silver_messages")]


def copy_of(tables: Tables, folder: Path) -> Tables:
    shutil.copytree(tables.folder, folder)
    return Tables(folder)


@pytest.fixture
def tables(tables_of: TablesOf, tmp_path: Path) -> Tables:
    """A copy of its own."""
    return copy_of(tables_of()[1], tmp_path / "tables")


def leaving(messages: list[dict[str, Any]], policy: RetentionPolicy, now_us: int) -> set[str]:
    """The rules once more, in plain Python."""
    gone = set()
    for row in messages:
        days = policy.org_days.get(row["org_id"], policy.keep_days)
        if row["outcome"] in {"dead_letter", "quarantined"}:
            days = max(days, policy.failures_days)
        is_held = row["org_id"] in policy.held_orgs or row["goal_id"] in policy.held_goals
        if row["last_us"] < now_us - days * DAY_US and not is_held:
            gone.add(row["message_id"])
    return gone


def dated(policy: RetentionPolicy, age_days: int) -> RetentionPolicy:
    """The same rules with other ages."""
    return RetentionPolicy(
        keep_days=age_days,
        org_days=dict.fromkeys(policy.org_days, age_days + 1),
        held_orgs=policy.held_orgs,
        held_goals=policy.held_goals,
    )


def is_near(messages: list[dict[str, Any]], policy: RetentionPolicy, now_us: int) -> bool:
    """Whether a message becomes old enough within the next ten minutes."""
    return leaving(messages, policy, now_us) != leaving(messages, policy, now_us + 600_000_000)


def middle_us(messages: list[dict[str, Any]]) -> int:
    times = sorted(row["last_us"] for row in messages)
    return int(times[len(times) // 2])


def policy_for(messages: list[dict[str, Any]]) -> RetentionPolicy:
    """One with every kind of rule."""
    orgs = [name for name, _ in Counter(row["org_id"] for row in messages).most_common(3)]
    old = [row for row in messages if row["last_us"] < middle_us(messages) and row["org_id"] not in orgs]
    goals = Counter(row["goal_id"] for row in old if row["goal_id"] and row["outcome"] == "completed")
    return RetentionPolicy(
        keep_days=7,
        org_days={orgs[0]: 8, orgs[2]: 30},
        failures_days=90,
        held_orgs=frozenset([orgs[1]]),
        held_goals=frozenset([goals.most_common(1)[0][0]]),
    )


class Pass(NamedTuple):
    """One undisturbed run."""

    policy: RetentionPolicy
    now_us: int
    gone: set[str]
    before: dict[str, Rows]
    counted: list[Retained]
    found: list[Retained]
    tables: Tables
    archive: str


@pytest.fixture(scope="module")
def whole(spark: SparkSession, tables_of: TablesOf, tmp_path_factory: pytest.TempPathFactory) -> Pass:
    folder = tmp_path_factory.mktemp("retain")
    tables = copy_of(tables_of()[1], folder / "tables")
    messages = messages_of(tables)
    policy, now_us = policy_for(messages), middle_us(messages) + 7 * DAY_US
    before, archive = kept_rows(tables), f"file://{folder}/archive"
    job = RetentionJob(spark, tables, policy, now_us=now_us, archive=archive)
    counted = job.run(dry_run=True)
    assert kept_rows(tables) == before
    gone = leaving(messages, policy, now_us)
    return Pass(policy, now_us, gone, before, counted, job.run(), tables, archive)


def test_messages_are_deleted_as_a_whole(whole: Pass) -> None:
    for rule in ("org_days", "failures_days", "held_orgs", "held_goals"):
        names = set(RetentionPolicy.__struct_fields__) - {rule}
        other = RetentionPolicy(**{name: getattr(whole.policy, name) for name in names})
        messages = [json.loads(row) for row in whole.before["silver_messages"]]
        if rule != "failures_days":  # of few messages, perhaps none of the old ones failed
            assert leaving(messages, other, whole.now_us) != whole.gone, rule
    assert whole.gone
    for told in whole.found[: len(ORDER)]:
        kept = rows_of(whole.tables, told.table)
        left = whole.before[told.table] - kept
        assert kept <= whole.before[told.table]
        assert (told.before, told.deleted) == (whole.before[told.table].total(), left.total())
        if told.table != "bronze_rejects":
            assert column(left, "message_id") == whole.gone & column(whole.before[told.table], "message_id")
            assert column(kept, "message_id").isdisjoint(whole.gone)


def test_a_dry_run_counts_the_same(whole: Pass) -> None:
    assert [(told.table, told.deleted) for told in whole.counted] == [
        (told.table, told.deleted) for told in whole.found
    ]


def test_what_leaves_is_in_the_archive(spark: SparkSession, whole: Pass) -> None:
    for told in whole.found:
        if told.table in {"silver_messages", "bronze_events"}:
            stored = spark.read.parquet(f"{whole.archive}/{told.table}")
            assert stored.count() == told.deleted == told.archived
            ids = {row.message_id for row in stored.select("message_id").distinct().collect()}
            assert ids - {None} == whole.gone


def test_a_later_run_sees_nothing_new_and_brings_nothing_back(
    spark: SparkSession, whole: Pass, tmp_path: Path
) -> None:
    versions = {name: whole.tables.version(name) for name in ORDER}
    Pipeline(spark, whole.tables, gold={}).run(tmp_path)
    assert {name: whole.tables.version(name) for name in ORDER} == versions


FOLLOWED = {name: GOLD[name] for name in ("gold_throughput", "gold_latency")}
"""A gold table that adds up, and one whose hours are made anew."""


def gold_rows(tables: Tables) -> dict[str, Rows]:
    return {name: rows_of(tables, name) for name in FOLLOWED}


def oldest_segment(events: Path, folder: Path) -> Path:
    """A folder of its own with the first segment of another one."""
    first = sealed_segments(events)[0]
    write_segment(folder, 1, first.path.read_bytes().splitlines())
    return folder


def test_deleted_rows_stay_deleted_when_their_segment_is_ingested_again(
    spark: SparkSession, tables_of: TablesOf, whole: Pass, tmp_path: Path
) -> None:
    events, untouched = tables_of()
    counted = gold_rows(untouched)
    tables = copy_of(whole.tables, tmp_path / "tables")
    kept = {name: rows for name, rows in kept_rows(tables).items() if name.startswith("silver")}
    job = Pipeline(spark, tables, gold=FOLLOWED)
    again = oldest_segment(events, tmp_path / "again")
    taken = job.run(again)
    assert (taken.segments, taken.lines > 0) == (1, True)
    assert {name: rows_of(tables, name) for name in kept} == kept
    assert gold_rows(tables) == counted
    # Bronze has the lines once more. They leave with the next pass, and are counted there alone.
    found = {
        told.table: told.deleted
        for told in RetentionJob(spark, tables, whole.policy, now_us=whole.now_us).run()
    }
    assert found["bronze_events"] > 0
    assert {name for name, deleted in found.items() if deleted} == {"bronze_events"}
    assert column(rows_of(tables, "bronze_events"), "message_id").isdisjoint(whole.gone)
    # And what is made anew is made of what is left, but for days of which something is not.
    job.backfill()
    del kept["silver_spans"]  # below a parent that left they have another root by now
    assert {name: rows_of(tables, name) for name in kept} == kept
    last_us = max(row["newest_us"] for row in records(tables, deleted_numbers.TABLE))
    last_day = f"{datetime.fromtimestamp(last_us // 1_000_000, UTC):%Y-%m-%d}"
    for name, rows in gold_rows(tables).items():
        assert of_days(rows, last_day) == of_days(counted[name], last_day), name


def of_days(rows: Rows, last: str) -> Rows:
    """Rows up to a day."""
    return Counter({row: n for row, n in rows.items() if json.loads(row)["day"] <= last})


def test_gold_is_deleted_by_an_age_of_its_own(spark: SparkSession, whole: Pass, tmp_path: Path) -> None:
    tables = copy_of(whole.tables, tmp_path / "tables")
    before = rows_of(tables, "gold_throughput")
    days = sorted({json.loads(row)["day"] for row in before})
    newest_us = int(datetime.fromisoformat(f"{days[-1]}T00:00:00+00:00").timestamp()) * 1_000_000
    policy = RetentionPolicy(keep_days=10, gold_days=10, held_orgs=whole.policy.held_orgs)
    job = RetentionJob(spark, tables, policy, now_us=newest_us + 10 * DAY_US)
    found = {told.table: told for told in job.run()}
    after = rows_of(tables, "gold_throughput")
    assert {json.loads(row)["day"] for row in after} == {days[-1]}
    assert found["gold_throughput"].deleted == before.total() - after.total() > 0
    assert found["gold_flow"].deleted == 0
    with pytest.raises(
        InvalidSetting, match="gold is kept at least as long as the rest: 9 days are less than 10"
    ):
        RetentionJob(spark, tables, RetentionPolicy(keep_days=10, gold_days=9), now_us=0)


class Losing(Tables):
    """One whose stage loses what it was given for a table, as a disk might."""

    loses = ""

    def stage(self, name: str, df: Any, **how: Any) -> StagedFiles:
        staged = super().stage(name, df, **how)
        return staged._replace(adds=staged.adds[name == self.loses :])


@pytest.mark.parametrize("name", [deleted_numbers.TABLE, "bronze_events"])
def test_nothing_is_deleted_when_the_counts_do_not_match(
    spark: SparkSession, tables: Tables, whole: Pass, name: str
) -> None:
    losing = Losing(tables.folder)
    losing.loses = name
    with pytest.raises(Unavailable, match=rf"{name} .*nothing was deleted"):
        RetentionJob(spark, losing, whole.policy, now_us=whole.now_us).run()
    assert kept_rows(tables) == whole.before


def test_retain_is_refused_while_silver_is_behind(spark: SparkSession, tables: Tables, whole: Pass) -> None:
    rows = tables.read(spark, "bronze_events").limit(1)
    tables.append("bronze_events", rows, partition_by=bronze.PARTITIONS)
    with pytest.raises(Unavailable, match="silver_events has not seen all of bronze_events"):
        RetentionJob(spark, tables, whole.policy, now_us=whole.now_us).run()


class Stopping(Tables):
    """One whose process ends before a commit, when bronze has lost something and silver has not."""

    def commit(self, name: str, staged: StagedFiles, removed: Any = (), **how: Any) -> None:
        if name == "silver_events":
            raise KeyboardInterrupt
        super().commit(name, staged, removed, **how)


def test_a_killed_pass_can_be_run_again(
    spark: SparkSession, tables: Tables, whole: Pass, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        RetentionJob(spark, Stopping(tables.folder), whole.policy, now_us=whole.now_us).run()
    assert rows_of(tables, "bronze_events") != whole.before["bronze_events"]
    early = copy_of(tables, tmp_path / "early")
    RetentionJob(spark, tables, whole.policy, now_us=whole.now_us).run()
    assert kept_rows(tables) == kept_rows(whole.tables)
    assert rows_of(tables, deleted_numbers.TABLE) == rows_of(whole.tables, deleted_numbers.TABLE)
    # Or silver is made anew instead, of what bronze has left.
    Pipeline(spark, early, gold={}).backfill()
    assert checked(early) == set()


# ---- what leaves is not missed ---------------------------------------------------------------------------


def checked(tables: Tables) -> set[ViolationSample]:
    return set(check_tables(tables).samples)


def test_after_each_pass_the_checker_gives_the_same_result_for_the_rest(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    """Also where numbers never came in: that is still told, and told once."""
    tables = copy_of(tables_of(faults=True)[1], tmp_path / "tables")
    before, messages = checked(tables), messages_of(tables)
    policy, now_us = policy_for(messages), middle_us(messages) + 7 * DAY_US
    gone: set[str] = set()
    for pass_us in (now_us - DAY_US, now_us):
        gone |= leaving(messages, policy, pass_us)
        RetentionJob(spark, tables, policy, now_us=pass_us).run()
        assert checked(tables) == {one for one in before if one.message_id not in gone}
    assert gone & {one.message_id for one in before}
    assert {one.rule for one in before if one.message_id == ""} == {"gap"}


def test_a_later_pass_records_only_new_numbers(spark: SparkSession, whole: Pass, tmp_path: Path) -> None:
    tables = copy_of(whole.tables, tmp_path / "tables")
    RetentionJob(spark, tables, whole.policy, now_us=whole.now_us).run()
    assert tables.version(deleted_numbers.TABLE) == 0
    RetentionJob(spark, tables, RetentionPolicy(keep_days=1), now_us=whole.now_us + 400 * DAY_US).run()
    assert messages_of(tables) == []
    runs = [row for row in records(tables, deleted_numbers.TABLE) if row["message"] is None]
    sources = {row["source"] for row in runs}
    assert len(runs) == len(sources)  # each is one run by now
    assert checked(tables) == set()


def test_the_command_finds_nothing_missing(commands: Commands, whole: Pass) -> None:
    done = commands("check", "--tables", whole.tables.folder)
    assert (done.code, done.stdout) == (0, ""), done.stderr


def test_the_command_counts_the_rows_to_delete(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    """`make crash` kills it; here it only counts, by every kind of rule."""
    _, tables = tables_of()
    messages = messages_of(tables)
    now_us = time.time_ns() // 1000
    middle_days = (now_us - middle_us(messages)) // DAY_US
    policies = [dated(policy_for(messages), middle_days + more) for more in range(-2, 3)]
    # The command reads the clock later: no message may become old enough meanwhile.
    policy = next(one for one in policies if not is_near(messages, one, now_us))
    age_days = policy.keep_days
    (tmp_path / "tiers").write_text("".join(f"{org} {days}\n" for org, days in policy.org_days.items()))
    holds = [f"org {name}\n" for name in policy.held_orgs] + [f"goal {name}\n" for name in policy.held_goals]
    (tmp_path / "holds").write_text("".join(holds))
    rules = ("--keep-days", age_days, "--org-days", tmp_path / "tiers", "--hold", tmp_path / "holds")
    words = ("--tables", tables.folder, *rules, "--dry-run", "--master", "local[2]")
    before = kept_rows(tables)
    done = commands("retain", *words)
    assert done.code == 0, done.stderr
    told = {row["table"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert told["silver_messages"]["deleted"] == len(leaving(messages, policy, now_us)) > 0
    assert kept_rows(tables) == before


def test_tiers_and_holds_are_read_from_lines(tmp_path: Path) -> None:
    tiers, holds = tmp_path / "tiers", tmp_path / "holds"
    tiers.write_text("# a comment\n\norg-1 30\norg-2   90\n")
    holds.write_text("org org-1\ngoal g-7\n")
    assert read_org_days(tiers) == {"org-1": 30, "org-2": 90}
    assert read_holds(holds) == (frozenset(["org-1"]), frozenset(["g-7"]))
    for text in ("org-1 0", "org-1 x", "org-1", "org-1 1\norg-1 2"):
        tiers.write_text(text)
        with pytest.raises(InvalidSetting, match=r"of .*tiers is not"):
            read_org_days(tiers)
    holds.write_text("user u-1")
    with pytest.raises(InvalidSetting, match="is not a hold"):
        read_holds(holds)
    with pytest.raises(InvalidSetting, match="cannot read"):
        read_holds(tmp_path / "nowhere")
    holds.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSetting, match="it is not UTF-8"):
        read_holds(holds)
