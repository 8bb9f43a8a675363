"""The report stands alone, says what the tables say, lets nothing through, and a real browser shows it."""

import json
import re
import shutil
import struct
import subprocess
import zlib
from decimal import Decimal
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.formats.events import AuditEvent, event_id, to_line
from postroom.core.names import scoped
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import queues as gold
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.report import queries
from postroom.pipeline.report.facts import (
    KEPT,
    REMOVED,
    Attained,
    GoalProfile,
    Pair,
    Pattern,
    Percentiles,
    QueueFacts,
    ReportFacts,
    Spender,
    Suspect,
)
from postroom.pipeline.report.findings import findings
from postroom.pipeline.report.flames import Profile, speedscope, tree
from postroom.pipeline.report.page import POLICY, page
from postroom.pipeline.report.plots import Period, Series, stacked
from postroom.pipeline.report.queries import UNNAMED, ReportReader, goal_of, step_of, write_report
from postroom.pipeline.report.words import clock, count, duration, esc, label, moment, money, share, width
from postroom.pipeline.times import DAY_US, HOUR_US, MICROS_PER_S, MINUTE_US
from tests.spark.commands import Commands, in_its_own_process
from tests.spark.conftest import TablesOf
from tests.spark.oracle import oracle
from tests.spark.stories import write_segment
from tests.waiting import HANG_GUARD_S

EVIL = (
    "\"><script>document.title='broken'</script><img src=https://evil.example/x onerror=alert(1)>&'\x00\x1b]"
)
START_US = 480_000 * HOUR_US
VOID = {"meta", "br", "hr", "img", "link", "input"}


def hostile(text: str = EVIL) -> ReportFacts:
    """A report in which every name and text was chosen by an enemy."""
    at = START_US
    waits = Percentiles(9, 1_000, 20_000, 300_000)
    stacks = [((text, "tool_call"), 700), ((text,), 300), ((text, "waiting"), 50)]
    return ReportFacts(
        since_us=at,
        until_us=at + 30 * HOUR_US,
        step_us=HOUR_US,
        events=70,
        outcomes={"completed": 7, "dead_letter": 1, "open": 1, text: 1},
        latency={0: {at: waits, at + HOUR_US: waits, at + 5 * HOUR_US: waits}},
        overall={0: waits},
        targets_us={0: 10_000},
        sla={0: {at: Attained(30, 3), at + HOUR_US: Attained(4, 4)}},
        throughput={"completed": {at: 7}, "dead letters": {at: 1}},
        depth={at: 3, at + 2 * HOUR_US: 0},
        queues=[QueueFacts(text, 9, 3, 1)],
        errors={text: {at: 50}, **{f"{text}{n}": {at: 1} for n in range(9)}},
        tokens={text: {at: 1_000}},
        spending={"model": [Spender(text, 3, 1_000, Decimal("0.000012"))]},
        cost_usd=Decimal("0.000012"),
        traffic=[Pair(text, text, 5, 1)],
        patterns=[
            Pattern(
                "id", text, f"{text} <n>", 6, 1, at, at, "new", True, 2, (text,), {at: 6}, ((text, text),)
            )
        ],
        suspects=[Suspect(text, text, text, 2, 2, False, at)],
        goals=[GoalProfile(text, text, 3, at, at + HOUR_US, Profile(text, stacks))],
        decisions={"completed": 2},
        decision_queue=QueueFacts(text, 2, 1, 0),
        lapses=1,
        timeouts=1,
    )


class Reader(HTMLParser):
    """What a page is made of; tags have to close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def assert_stands_alone(text: str) -> None:
    """Nothing in a page asks for anything outside of it, or could run."""
    reader = Reader(text)
    assert not {tag for tag, _ in reader.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "image",
        "use",
    }
    for _, attributes in reader.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            if name in ("href", "src", "xlink:href"):
                assert (value or "").startswith("#")
    css = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in css
    assert "@import" not in css
    policies = [attributes["content"] for _, attributes in reader.tags if "http-equiv" in attributes]
    assert policies == [POLICY]
    assert POLICY.startswith("default-src 'none'")


def test_hostile_values_stay_text() -> None:
    text = page(hostile())
    assert_stands_alone(text)
    assert "\x00" not in text
    assert "\x1b" not in text
    said = "".join(Reader(text).text)
    assert "<script>document.title='broken'</script>" in said  # as text, where it can be read


def test_a_report_of_empty_tables_says_so() -> None:
    empty = ReportFacts(
        since_us=0, until_us=HOUR_US, step_us=HOUR_US, events=0, outcomes={}, latency={}, overall={},
        targets_us={}, sla={}, throughput={}, depth={}, queues=[], errors={}, tokens={}, spending={},
        cost_usd=Decimal(0), traffic=[], patterns=[], suspects=[], goals=[],
        decisions={}, decision_queue=None, lapses=0, timeouts=0,
    )  # fmt: skip
    text = page(empty)
    assert_stands_alone(text)
    assert "There is no dead letter." in text


def test_every_plot_has_words_and_a_table() -> None:
    reader = Reader(page(hostile("name")))
    drawings = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawings) >= 10
    assert all(
        one.get("aria-hidden") == "true" or (one["role"], bool(one["aria-label"])) == ("img", True)
        for one in drawings
    )
    assert sum(tag == "table" for tag, _ in reader.tags) >= 10
    for headline in (
        "Latency",
        "Targets",
        "Queue depth",
        "Errors",
        "Dead letters",
        "Traffic",
        "Flame graphs",
    ):
        assert headline in reader.text


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (duration(999), "999 µs"), (duration(1_530), "1.53 ms"), (duration(60_000_000), "1 min"),
        (count(9_999), "9,999"), (count(12_345), "12.3 k"), (share(0.9999), "99.9 %"), (share(1), "100 %"),
        (money(Decimal("1234.5")), "$1,234.50"), (money(Decimal("0.000012")), "$0.000012"),
        (esc("<a b='c'>\x07"), "&lt;a b=&#x27;c&#x27;&gt;\N{REPLACEMENT CHARACTER}"),
    ],
)  # fmt: skip
def test_values_are_formatted_for_people(said: str, value: str) -> None:
    assert said == value


# ---- from real tables --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(
    tables_of: TablesOf, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path, ReportFacts]:
    """A history, its report, its file for speedscope, and what is in them: as the command makes them."""
    folder, tables = tables_of()
    place = tmp_path_factory.mktemp("report")
    out, goals = place / "report.html", place / "goals.json"
    known: list[ReportFacts] = []

    def noted(*words: Any, **named: Any) -> ReportFacts:
        known.append(write_report(*words, **named))
        return known[0]

    words = ("--tables", tables.folder, "--out", out, "--speedscope", goals, "--target", "P0=10ms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "write_report", noted)
        done = commands("report", *words, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == known[0].messages
    return folder, out, goals, known[0]


def test_the_report_matches_the_oracle(drawn: tuple[Path, Path, Path, ReportFacts]) -> None:
    folder, out, _, facts = drawn
    text = out.read_text()
    assert_stands_alone(text)
    con = oracle(folder)

    def ask(sql: str) -> Any:
        return con.execute(sql).fetchall()

    assert facts.outcomes == dict(ask("SELECT outcome, count(*) FROM messages GROUP BY outcome"))
    assert facts.cost_usd == ask("SELECT sum(cost_usd) FROM events")[0][0]
    for priority, n, exact in ask(
        "SELECT priority, count(*), quantile_disc(queue_us, 0.95) FROM messages "
        "WHERE queue_us IS NOT NULL GROUP BY 1"
    ):
        found = facts.overall[priority]
        assert found.n == n
        assert exact <= found.p95_us <= exact * 17 / 16
    assert esc(f"{facts.messages:,} messages") in text
    assert (
        sum(sum(times.values()) for times in facts.tokens.values())
        == ask("SELECT sum(tokens_in + tokens_out) FROM events")[0][0]
    )
    assert (
        sum(pattern.n for pattern in facts.patterns)
        == ask("SELECT count(*) FROM events WHERE kind = 'dead_letter'")[0][0]
    )


def test_depth_of_a_shared_queue_counts_all_organizations(spark: SparkSession, tmp_path: Path) -> None:
    """Each is full at another time: the highest sum is neither the highest of one nor the sum of both."""
    minutes = [
        (0, "a", "shared", 5, 0), (1, "b", "shared", 3, 0), (2, "a", "shared", 0, 2),
        (3, "b", "shared", 1, 0), (2, "b", "other", 1, 1),
    ]  # fmt: skip
    flows = spark.createDataFrame(
        [("2025-01-01", START_US + n * MINUTE_US, *rest) for n, *rest in minutes],
        "day STRING, minute_us BIGINT, org_id STRING, queue STRING, arrived BIGINT, left BIGINT",
    )
    tables = Tables(tmp_path / "tables")
    tables.replace("gold_depth", gold.depth(flows))
    names = ["shared"] * 7 + ["other"] * 3
    tables.replace("silver_messages", spark.createDataFrame([(name,) for name in names], "queue STRING"))
    ends = spark.createDataFrame([(START_US,), (START_US + DAY_US,)], "ts_us BIGINT")
    tables.replace("silver_events", ends)
    depth, queues = ReportReader(tables, {})._depth()
    assert queues == [QueueFacts("shared", 7, 8, 7), QueueFacts("other", 3, 0, 0)]
    assert depth == {START_US: 8, **{START_US + n * HOUR_US: 7 for n in range(1, 25)}}  # it rests


def test_speedscope_gets_every_microsecond(drawn: tuple[Path, Path, Path, ReportFacts]) -> None:
    _, _, goals, facts = drawn
    file = json.loads(goals.read_text())
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    first = next(one for one in file["profiles"] if one["name"] == facts.goals[0].goal_id)
    assert first["endValue"] == sum(first["weights"]) == facts.goals[0].profile.total_us
    assert [tuple(frames[n] for n in sample) for sample in first["samples"]] == [
        path for path, _ in facts.goals[0].profile.stacks
    ]
    assert len(file["profiles"]) > len(facts.goals)


def test_the_width_of_a_flame_is_the_sum_of_its_children() -> None:
    profile = Profile("g", [(("a",), 5), (("a", "b"), 7), (("a", "b", "c"), 1), (("d",), 2)])
    root = tree(profile)
    assert (root.total_us, root.below["a"].total_us, root.below["a"].own_us) == (15, 13, 5)
    assert root.below["a"].below["b"].total_us == 8
    assert speedscope([profile], "x")["profiles"][0]["weights"] == [5, 7, 1, 2]


def test_the_report_is_drawn_without_java(
    tables_of: TablesOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables = tables_of()
    out = tmp_path / "report.html"
    done = in_its_own_process(
        "report", "--tables", tables.folder, "--out", out, PATH="", JAVA_HOME=str(tmp_path)
    )
    assert done.code == 0, done.stderr
    assert_stands_alone(out.read_text())


def test_the_report_matches_spark_on_the_same_tables(
    spark: SparkSession, drawn: tuple[Path, Path, Path, ReportFacts], tables_of: TablesOf
) -> None:
    """The page is drawn from what DuckDB reads of them."""
    facts, (_, tables) = drawn[-1], tables_of()
    for name in (
        "gold_latency",
        "gold_errors",
        "gold_tokens",
        "gold_depth",
        "gold_traffic",
        "silver_messages",
    ):
        tables.read(spark, name).createOrReplaceTempView(name)

    def ask(sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.sql(sql).collect()]

    def over_time(name: str, measure: str, table: str) -> set[tuple[Any, ...]]:
        at = f"hour_us - hour_us % {facts.step_us}"
        return set(ask(f"SELECT {name}, {at}, sum({measure}) FROM {table} GROUP BY ALL"))  # noqa: S608

    def flat(series: dict[str, dict[int, int]]) -> set[tuple[Any, ...]]:
        return {(name, at, n) for name, times in series.items() for at, n in times.items()}

    assert facts.step_us % HOUR_US == 0
    waits = {(p, at, one.n) for p, times in facts.latency.items() for at, one in times.items()}
    assert waits == over_time("priority", "n", "gold_latency")
    assert flat(facts.errors) == over_time("coalesce(error_type, 'without a class')", "n", "gold_errors")
    models = over_time("coalesce(model, 'unnamed')", "tokens_in + tokens_out", "gold_tokens")
    assert flat(facts.tokens) == models
    peak = """SELECT max(depth) FROM (SELECT sum(sum(arrived - left)) OVER (ORDER BY minute_us) AS depth
              FROM gold_depth GROUP BY minute_us)"""
    assert [(max(facts.depth.values()),)] == ask(peak)
    sizes = dict(ask("SELECT queue, count(*) FROM silver_messages GROUP BY queue"))
    assert all(one.messages == sizes[one.name] for one in facts.queues)
    within = "SELECT count(queue_us), count_if(queue_us <= 10000) FROM silver_messages WHERE priority = 0"
    assert [tuple(facts.attained(0))] == ask(within)
    assert set(facts.sla) == {0}


def test_targets_are_those_that_somebody_sets(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    where = ("report", "--tables", tables_of()[1].folder, "--out", tmp_path / "report.html")
    assert commands(*where).code == 0
    text = (tmp_path / "report.html").read_text()
    assert "Nobody set a target" in text
    assert 'class="target' not in text
    assert "in time" not in text
    assert commands(*where, "--target", "P1=50ms", "--target", "3=0.5s").code == 0
    text = (tmp_path / "report.html").read_text()
    assert "target 50 ms" in text
    assert "target 500 ms" in text
    assert "Nobody set a target" not in text
    done = commands(*where, "--target", "urgent=now")
    assert done.code == 2
    assert "'urgent=now' is not a priority and a time, such as P0=10ms" in done.stderr
    refused = commands(*where, "--target", "P9=3s")
    assert (refused.code, "'P9=3s' names no priority: there are P0 to P3" in refused.stderr) == (2, True)


# ---- short histories -----------------------------------------------------------------------------------

SECOND = MICROS_PER_S
SHORT = (
    # kind, seconds, message, state
    ("created", 0, "m1", "QUEUED"), ("enqueued", 0, "m1", "QUEUED"), ("created", 1, "m2", "QUEUED"),
    ("dequeued", 2, "m1", "PROCESSING"), ("lease_lapsed", 9, "m1", "QUEUED"),
    ("dequeued", 20, "m1", "PROCESSING"), ("execution_completed", 50, "m1", "COMPLETED"),
    ("created", 50, "d1", "QUEUED"), ("enqueued", 50, "d1", "QUEUED"), ("dequeued", 51, "d1", "PROCESSING"),
    ("execution_failed", 52, "d1", "RETRYING"), ("enqueued", 53, "d1", "QUEUED"),
    ("dequeued", 53, "d1", "PROCESSING"), ("execution_completed", 54, "d1", "COMPLETED"),
)  # fmt: skip


@pytest.fixture(scope="module")
def short_tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """A minute: a task is put back, one stays open, a decision is tried twice, and a bus has a message."""
    folder = tmp_path_factory.mktemp("short")
    events = [
        AuditEvent(
            event_id=event_id("store", n), seq=n, ts_us=START_US + 1000 + at * SECOND, kind=kind,  # type: ignore[arg-type]
            contract="tasks", source="store", schema=1, message_id=message, state=state,  # type: ignore[arg-type]
            queue=scoped("acme", DECISIONS) if message == "d1" else "work",
            type="decision" if message == "d1" else "job",
            priority=1, lease=n if kind == "dequeued" else 0, sender="ada" if message == "m2" else "",
            error_type="TimeoutError" if kind == "execution_failed" else "",
        )
        for n, (kind, at, message, state) in enumerate(SHORT, 1)
    ]  # fmt: skip
    events += [
        AuditEvent(
            event_id=event_id(contract, n), seq=n, ts_us=START_US + 55 * SECOND, kind=kind, contract=contract,  # type: ignore[arg-type]
            source=contract, schema=1, message_id=f"of {contract}", type="note",
        )
        for contract, n, kind in (("bus", 1, "created"), ("mail", 1, "created"), ("mail", 2, "deleted"))
    ]  # fmt: skip
    write_segment(folder / "events", 1, [to_line(event) for event in events])
    tables = Tables(folder / "tables")
    Pipeline(spark, tables).run(folder / "events")
    return tables


@pytest.fixture(scope="module")
def short(short_tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> ReportFacts:
    return write_report(short_tables, tmp_path_factory.mktemp("drawn") / "report.html")


def test_columns_are_as_fine_as_a_history_is_short(short: ReportFacts) -> None:
    step_us = SECOND // 2
    assert (short.since_us, short.until_us) == (START_US, START_US + 55 * SECOND + step_us)
    assert short.step_us == step_us
    times = short.throughput["completed"]
    assert {at: n for at, n in times.items() if n} == {START_US + 50 * SECOND: 1}
    assert set(short.latency[1]) == {START_US}  # that of the message which was delivered
    assert short.errors == {
        "without a class": {START_US + 9 * SECOND: 1},
        "TimeoutError": {START_US + 52 * SECOND: 1},
    }


def test_a_message_that_is_put_back_is_not_a_second_arrival(short: ReportFacts) -> None:
    assert short.queues == [QueueFacts("work", 2, 2, 1)]
    depths = [short.depth[START_US + at * SECOND] for at in (0, 1, 2, 3, 9, 19, 20, 21, 55)]
    assert depths == [1, 2, 2, 1, 2, 2, 2, 1, 1]


def test_a_message_of_a_bus_is_kept_and_not_open(short: ReportFacts) -> None:
    assert short.outcomes == {"completed": 1, "open": 1, KEPT: 1, REMOVED: 1}
    said = "".join(Reader(page(short)).text)
    assert "kept for readers" in said
    assert "100 %ended well" in said


def test_decisions_of_the_harness_are_shown_apart(short: ReportFacts) -> None:
    assert short.decisions == {"completed": 1}
    assert short.decision_queue == QueueFacts(DECISIONS, 1, 1, 0)
    assert short.overall[1].n == 1
    assert sum(short.throughput["completed"].values()) == 1
    text = page(short)
    said = "".join(Reader(text).text)
    assert "1decisions of the harness" in said
    assert "The harness' own queue, of its decisions" in said
    assert "Decisions of the harness are among them." not in said
    assert said.index("A decision is what the harness does") < said.index("What stands out")
    assert "Decisions of the harness are among them." in page(hostile("x"))  # whose columns are hours


def test_a_contract_is_not_a_sender(short: ReportFacts) -> None:
    assert {(pair.sender, pair.recipient, pair.messages) for pair in short.traffic} == {
        ("ada", "work", 1),
        (UNNAMED, "work", 1),
        (UNNAMED, UNNAMED, 2),
    }


def test_lapsed_leases_and_timeouts_stand_out(short: ReportFacts) -> None:
    assert (short.lapses, short.timeouts) == (1, 1)
    said = [one.text for one in findings(short)]
    assert any(text.startswith("1 lease lapsed: the worker died, hung, or sent no heart") for text in said)
    assert "1 error is a timeout." in said
    said = [one.text for one in findings(short._replace(lapses=0, timeouts=3))]
    assert not any("lapsed" in text for text in said)
    assert "3 errors are timeouts." in said


def test_priorities_are_explained_before_they_are_named(short: ReportFacts) -> None:
    for facts in (short, hostile("x")):
        said = "".join(Reader(page(facts)).text).partition("What stands out")[0]
        assert "Mail sets them: critical is P0, urgent and high are P1, normal is P2, low is P3." in said
        assert "Every task is P2." in said
    assert "are priorities" not in page(short._replace(latency={}, sla={}))


def test_hours_whose_events_were_deleted_are_drawn_from_gold(
    tables_of: TablesOf, spark: SparkSession, tmp_path: Path
) -> None:
    tables = Tables(tmp_path / "tables")
    shutil.copytree(tables_of()[1].folder, tables.folder)
    whole = write_report(tables, tmp_path / "report.html")
    last_us = max(file.high["ts_us"] for file in tables.files("silver_events"))
    late = tables.read(spark, "silver_events").where(f"ts_us > {last_us - HOUR_US}")
    rest = spark.createDataFrame(late.collect(), late.schema)  # not of the files that it replaces
    tables.replace("silver_events", rest, partition_by=("day",))
    facts = write_report(tables, tmp_path / "report.html")
    assert facts.events < whole.events
    assert (facts.since_us, facts.until_us, facts.step_us) == (whole.since_us, whole.until_us, whole.step_us)
    assert facts.throughput == whole.throughput


@pytest.mark.parametrize(
    ("span_us", "step_us"),
    [
        (0, SECOND // 10), (59 * SECOND, SECOND // 2), (61 * SECOND, SECOND), (3600 * SECOND, 60 * SECOND),
        (DAY_US - 1, 15 * 60 * SECOND), (DAY_US, HOUR_US), (100 * HOUR_US, HOUR_US),
        (30 * DAY_US, 4 * HOUR_US),
    ],
)  # fmt: skip
def test_the_width_of_a_column_follows_the_span(span_us: int, step_us: int) -> None:
    assert step_of(START_US, START_US + span_us) == step_us


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (moment(START_US), "2024-10-04 00:00"), (moment(START_US + 5 * SECOND), "2024-10-04 00:00:05"),
        (moment(START_US, SECOND), "2024-10-04 00:00:00"), (clock(START_US + HOUR_US, SECOND), "01:00:00"),
        (clock(START_US + SECOND // 2, SECOND // 2), "00:00:00.5"),
        (clock(START_US + 61 * SECOND), "00:01:01"),
        (clock(START_US, SECOND // 2), "00:00:00.0"), (clock(START_US, HOUR_US), "00:00"),
        (width(HOUR_US), "hour"), (width(5 * SECOND), "5 seconds"), (width(SECOND // 2), "0.5 seconds"),
        (width(15 * 60 * SECOND), "15 minutes"),
    ],
)  # fmt: skip
def test_times_are_as_exact_as_they_need_to_be(said: str, text: str) -> None:
    assert said == text


@pytest.mark.parametrize("width", [501, 1062])
@pytest.mark.parametrize(
    "span_us",
    [
        SECOND // 2, 7 * SECOND // 10, SECOND, 7 * SECOND // 2, 7 * SECOND, 31 * SECOND, 55 * SECOND,
        61 * SECOND, 7 * 60 * SECOND, 50 * 60 * SECOND, 5 * HOUR_US, 23 * HOUR_US, 30 * HOUR_US, 6 * DAY_US,
        50 * DAY_US, 700 * DAY_US,
    ],
)  # fmt: skip
def test_names_of_ticks_have_room(span_us: int, width: int) -> None:
    """A character of them is 6.2 pixels wide, or less."""
    for since_us in (START_US, START_US + 17 * SECOND, START_US + 23 * HOUR_US):
        over = Period(since_us, since_us + span_us, SECOND // 10)
        series = [Series("c0", "n", {since_us: 1.0})]
        drawn = stacked(series, title="t", said="s", words=count, over=over, width=width)
        ticks = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)<', drawn)
        assert ticks
        edges = [(float(x) - 3.1 * len(name), float(x) + 3.1 * len(name)) for x, name in ticks]
        assert all(left[1] < right[0] for left, right in pairwise(edges))
        assert edges[-1][1] <= width


def test_dead_letters_stand_out_without_a_systematic_error(short: ReportFacts) -> None:
    pattern = hostile("x").patterns[0]._replace(error_type="ValueError", systematic=False, n=4)
    facts = short._replace(outcomes={"dead_letter": 6}, patterns=[pattern])
    [said] = [one for one in findings(facts) if "dead letter" in one.text]
    assert said.level == "warn"
    assert said.text == (
        "6 messages ended as dead letters, without a systematic error. "
        "The most frequent is ValueError, 4 times: " + label(pattern.pattern, 120)
    )
    [said] = [one for one in findings(facts._replace(patterns=[])) if "dead letter" in one.text]
    assert said.text == "6 messages ended as dead letters, without a systematic error."


def test_missing_names_are_shown_in_words() -> None:
    pattern = hostile("x").patterns[0]._replace(error_type="", orgs=0, types=())
    facts = hostile("x")._replace(patterns=[pattern])
    said = [one.text for one in findings(facts)]
    assert "New or more frequent in the last day: an error without a class." in said
    assert "0 organizations" not in page(facts)
    assert "2024-10-04 00:00 to 2024-10-04 00:00</div>" in page(facts)


def test_text_has_one_size_in_every_drawing() -> None:
    """A drawing that is stretched beyond its own width would enlarge its text."""
    reader = Reader(page(hostile("name")))
    for tag, attributes in reader.tags:
        if tag == "svg" and attributes.get("role") == "img":
            wide = int((attributes["viewbox"] or "").split()[2])
            assert attributes["style"] == f"min-width:{0.8 * wide:.0f}px;max-width:{wide}px"
    assert "auto-fit,minmax(min(100%,440px)" not in page(hostile())


# ---- in a browser ------------------------------------------------------------------------------------


def browse(place: Path, html: Path, *arguments: str) -> bytes:
    browser = shutil.which("chromium")
    assert browser is not None, (
        "this test needs the browser of Debian's package chromium: apt-get install chromium"
    )
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
        f"--user-data-dir={place / 'profile'}", "--window-size=1280,2400", *arguments, html.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, check=True, timeout=HANG_GUARD_S).stdout


def colours(png: bytes) -> tuple[int, int, int]:
    """Width, height, and how many different lines of pixels there are. A page that is not drawn has one."""
    width, height = struct.unpack(">II", png[16:24])
    body, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    pixels = zlib.decompress(body)
    stride = len(pixels) // height
    return width, height, len({pixels[n * stride : (n + 1) * stride] for n in range(height)})


def test_a_goal_is_drawn_whose_messages_have_no_place_and_no_time() -> None:
    """They name each other as their parents, and nobody has told that they were created."""
    row = {"org_id": "o", "hour_us": None, "stack": None, "messages": 2, "work_us": 5, "wait_us": 0}
    goal = goal_of("g", [row], (0, DAY_US))
    assert goal == GoalProfile("g", "o", 2, None, None, Profile("g", [(("?",), 5)]))
    facts = hostile("words")._replace(goals=[goal])
    assert "2 messages</p>" in page(facts)
    with_hour = goal_of("g", [row, {**row, "hour_us": HOUR_US}], (0, DAY_US))
    assert (with_hour.from_us, with_hour.until_us) == (HOUR_US, 2 * HOUR_US)
    of_a_minute = goal_of("g", [{**row, "hour_us": HOUR_US}], (HOUR_US + 5, HOUR_US + 60))
    assert (of_a_minute.from_us, of_a_minute.until_us) == (HOUR_US + 5, HOUR_US + 60)


def test_a_browser_shows_it(drawn: tuple[Path, Path, Path, ReportFacts], tmp_path: Path) -> None:
    _, out, _, facts = drawn
    picture = tmp_path / "report.png"
    dom = browse(tmp_path, out, f"--screenshot={picture}", "--dump-dom").decode()
    width, height, lines = colours(picture.read_bytes())
    assert (width, height) == (1280, 2400)
    assert lines > 500
    assert dom.count("<svg") == out.read_text().count("<svg")
    assert esc(facts.goals[0].goal_id) in dom


MEASURED = """<script>onload = () => {
    const ends = [...document.querySelectorAll("svg.wide")].map(one => one.getBoundingClientRect().right);
    document.title = JSON.stringify([ends.length, Math.max(...ends), document.documentElement.scrollWidth]);
}</script></body>"""


def test_a_narrow_window_shows_the_whole_of_every_plot_over_time(tmp_path: Path) -> None:
    out = tmp_path / "narrow.html"
    out.write_text(page(hostile("agent-name")).replace(POLICY, "").replace("</body>", MEASURED))
    dom = browse(tmp_path, out, "--window-size=500,2400", "--dump-dom").decode()
    plots, right, scrolled = json.loads(re.findall(r"<title>(.*?)</title>", dom)[0])
    assert plots >= 5
    assert right <= 500
    assert scrolled <= 500


def test_a_browser_runs_no_hostile_value(tmp_path: Path) -> None:
    out = tmp_path / "hostile.html"
    out.write_text(page(hostile()))
    dom = browse(tmp_path, out, "--dump-dom").decode()
    assert "<title>postroom: " in dom
    assert "<script" not in dom
    assert "<img" not in dom
