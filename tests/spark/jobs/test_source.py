"""The format "postroom": what the shipper would ship, read where it is; and messages written once."""

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom import Bus, Queue, Tasks
from postroom.pipeline.ingest.filters import bounds_of, condition_of
from postroom.pipeline.ingest.source import register
from postroom.pipeline.schema import EVENTS
from postroom.pipeline.submission import ReplayMessage, Submitter
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from tests.spark.stories import events_in


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bus that was rotated, a queue with a line that is none, and a store with ends of every kind."""
    folder = tmp_path_factory.mktemp("places")
    bus = Bus(folder / "bus.yaml")
    for number in range(5):
        bus.append(type="FACT", project_id="p", body=f"mail ada@example.com {number}")
        if number == 2:
            bus.rotate()
    queue = Queue(folder / "queue")
    for number in range(4):
        queue.send("ask", f"body {number}", to="ada", session="s", sender="bob")
    queue.poll("ada", session="s")
    with (folder / "queue" / "audit.jsonl").open("ab") as audit:
        audit.write(b"no line of ours\n")
    queue.close()
    with Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
        for number in range(6):
            tasks.enqueue(agent="ada", payload={"n": number, "password": "x"}, type="issue")
        for number, task in enumerate(tasks.claim(agent="ada", limit=4, worker="w1")):
            if number % 2:
                tasks.fail(task.task_id, task.lease, "no route to 10.0.0.1", error_type="IOError")
            else:
                tasks.complete(task.task_id, task.lease, "done")
    return {"bus": folder / "bus.yaml", "queue": folder / "queue", "store": folder / "queue.db"}


def rows_of(found: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in found.select(*EVENTS.names).collect()), key=lambda row: row[0])


def read(spark: SparkSession, places: dict[str, Path], kind: str, **options: str) -> DataFrame:
    where = f"sqlite:///{places[kind]}" if kind == "store" else str(places[kind])
    return spark.read.format("postroom").options(kind=kind, path=where, **options).load()


@pytest.mark.parametrize("kind", ["bus", "queue", "store"])
def test_rows_are_those_that_the_shipper_ships(
    session: SparkSession, places: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    sources = {
        "bus": Sources(buses=(places["bus"],)),
        "queue": Sources(queue_roots=(places["queue"],)),
        "store": Sources(stores=(f"sqlite:///{places['store']}",)),
    }[kind]
    found = rows_of(read(session, places, kind))  # before the shipper may have the store forget something
    with opened(tmp_path / "audit", sources, AuditSettings()) as shipping:
        shipped = shipping.once()
    expected = rows_of(events_in(session, tmp_path / "audit"))
    assert len(found) == shipped > 0
    assert found == expected


def test_redaction_can_be_left_to_the_reader(session: SparkSession, places: dict[str, Path]) -> None:
    raw = read(session, places, "bus", redaction="none").select("payload").collect()
    assert {row.payload for row in raw} == {f"mail ada@example.com {number}" for number in range(5)}


def is_left_to_spark(found: DataFrame) -> bool:
    """Whether Spark filters what the source gives it."""
    plan = found._jdf.queryExecution().executedPlan().toString()
    return re.search(r"^\W*(\d+\))? *Filter ", plan, re.MULTILINE) is not None


WHERE = (
    "kind IN ('created', 'dequeued') AND seq > 3 AND seq <= 9",
    "kind <> 'created' AND worker_id IS NULL",
    "worker_id IS NOT NULL AND NOT (worker_id = 'w2')",
    "error_type LIKE 'IO%' AND priority = 2 AND attempt >= 1",
    "seq = 4",
    "source = 'nobody'",
)


def test_source_filters_mean_the_same_as_in_spark(session: SparkSession, places: dict[str, Path]) -> None:
    everything = read(session, places, "store")
    kept = session.createDataFrame(everything.collect(), EVENTS)
    for where in WHERE:
        found = everything.where(where)
        assert rows_of(found) == rows_of(kept.where(where)), where
        assert not is_left_to_spark(found), where


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store with an address in a payload and in an error, and a bus with one in a detail."""
    folder = tmp_path_factory.mktemp("secrets")
    with Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
        tasks.enqueue(agent="ada", payload="ask ada@example.com")
        [task] = tasks.claim(agent="ada")
        tasks.fail(task.task_id, task.lease, "no mail for ada@example.com")
    bus = Bus(folder / "bus.yaml")
    bus.append(type="FACT", project_id="ada@example.com", body="nothing secret")
    return {"bus": bus.path, "store": folder / "queue.db"}


@pytest.mark.parametrize(
    ("kind", "column", "level", "left"),
    [
        ("store", "payload", "medium", "<email>"),
        ("store", "payload", "full", "<text:"),
        ("store", "error", "full", "<email>"),
        ("bus", "detail", "full", "<email>"),
    ],
)
def test_a_filter_sees_what_redaction_leaves(
    session: SparkSession, secrets: dict[str, Path], kind: str, column: str, level: str, left: str
) -> None:
    found = read(session, secrets, kind, redaction=level)
    assert found.where(F.col(column).contains("ada@example.com")).collect() == []
    shown = found.where(F.col(column).contains(left)).collect()
    assert [left in row[column] for row in shown] == [True]


@pytest.mark.parametrize(("kind", "column"), [("store", "payload"), ("store", "error"), ("bus", "detail")])
def test_the_source_answers_every_filter_where_nothing_is_taken_out(
    session: SparkSession, secrets: dict[str, Path], kind: str, column: str
) -> None:
    whole = read(session, secrets, kind, redaction="none")
    found = whole.where(F.col(column).contains("ada@example.com"))
    assert found.count() == 1
    assert not is_left_to_spark(found)


def test_a_filter_that_is_not_understood_stays_with_spark(
    session: SparkSession, places: dict[str, Path]
) -> None:
    found = read(session, places, "store").where("seq % 3 = 0 AND kind = 'created'")
    assert {row.seq % 3 for row in found.collect()} == {0}


def test_bounds_narrow_what_is_read() -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual, StringContains

    wanted = [GreaterThan(("seq",), 3), LessThanOrEqual(("seq",), 9), EqualTo(("kind",), "created")]
    conditions = [condition for each in wanted if (condition := condition_of(each)) is not None]
    assert bounds_of(conditions, "seq", (0, 100)) == (4, 9)
    assert condition_of(StringContains(("nobody",), "x")) is None
    assert condition_of(EqualTo(("detail", "inner"), "x")) is None


def test_only_requested_columns_are_computed(session: SparkSession, places: dict[str, Path]) -> None:
    reader = session.read.format("postroom").options(kind="bus", path=str(places["bus"]))
    found = reader.schema("message_id string, seq bigint").load()
    assert found.columns == ["message_id", "seq"]
    assert found.count() == 5
    with pytest.raises(PySparkException, match="an event has no column seq of type string"):
        reader.schema("seq string").load().count()


def test_reading_leaves_a_store_as_it_was(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has forgotten events, which may have been shipped before."""
    path = tmp_path / "queue.db"
    monkeypatch.setattr("postroom.stores.sqlite.ledger.FOLD_EVENTS", 10)  # so that it forgets so few
    with Tasks.open(f"sqlite:///{path}") as tasks:
        for number in range(20):
            tasks.enqueue(agent="ada", payload=number)
        tasks.forget_events(20)
        told = tasks.store.events()
    before = path.read_bytes()
    found = read(session, {"store": path}, "store").where("seq > 5").collect()
    assert sorted(row.seq for row in found) == [event.seq for event in told]
    assert told[0].seq > 6  # there is a gap, or nothing was tried
    assert path.read_bytes() == before
    with Tasks.open(f"sqlite:///{path}") as tasks:
        assert tasks.store.events() == told


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "bus"}, "the option path is missing"),
        ({"path": "nowhere", "kind": "bus"}, "there is no bus at"),
        ({"path": "nowhere", "kind": "pigeon"}, "the option kind must be one of bus, queue, store"),
        ({"url": "sqlite:///nowhere.db"}, "there is no store at"),
    ],
)
def test_wrong_options_are_refused(session: SparkSession, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(PySparkException, match=sentence):
        session.read.format("postroom").options(**options).load().count()


# ---- a stream ------------------------------------------------------------------------------------------


def drain(session: SparkSession, options: dict[str, str], folder: Path) -> list[list[str]]:
    """What a stream reads until it has everything, one list for each batch."""
    batches: list[list[str]] = []

    def keep(batch: DataFrame, _: int) -> None:
        batches.append([row.event_id for row in batch.select("event_id").collect()])

    stream = session.readStream.format("postroom").options(**options).load()
    writer = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder))
    writer.trigger(availableNow=True).start().awaitTermination()
    return batches


def test_a_stream_goes_on_where_it_stopped(session: SparkSession, tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.append_many([{"type": "FACT", "project_id": "p", "body": str(n)} for n in range(7)])
    options = {"kind": "bus", "path": str(bus.path), "rows_per_batch": "3"}
    first = drain(session, options, tmp_path / "checkpoint")
    assert [len(batch) for batch in first] == [3, 3, 1]
    bus.rotate()
    bus.append_many([{"type": "FACT", "project_id": "p", "body": str(n)} for n in range(2)])
    second = drain(session, options, tmp_path / "checkpoint")
    whole = session.read.format("postroom").options(**options).load()
    seen = [name for batch in [*first, *second] for name in batch]
    assert sorted(seen) == sorted(row.event_id for row in whole.collect())
    assert len(seen) == 9
    assert drain(session, options, tmp_path / "checkpoint") == []


def test_a_stream_of_a_store(session: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with Tasks.open(url) as tasks:
        tasks.enqueue_many([{"agent": "ada", "payload": n} for n in range(20)])
        found = drain(session, {"url": url}, tmp_path / "checkpoint")
        assert sum(map(len, found)) == tasks.store.newest_event()


# ---- the sink ------------------------------------------------------------------------------------------


@pytest.fixture
def messages(session: SparkSession) -> DataFrame:
    return session.range(40).select(
        F.concat(F.lit("m"), F.col("id").cast("string")).alias("message_id"),
        F.lit("ada").alias("queue"),
        F.format_string('{"n": %d}', "id").alias("payload"),
        F.lit("issue").alias("type"),
    )


def write(messages: DataFrame, url: str, replay_id: str) -> None:
    messages.write.format("postroom").options(url=url, replay_id=replay_id).mode("append").save()


def test_messages_are_submitted_once_for_a_replay(messages: DataFrame, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/again.db"
    with Submitter(url, "r1") as submitter:  # a task of Spark that was lost half way
        submitter.submit(
            [ReplayMessage("m3", "ada", '{"n": 3}', "issue"), ReplayMessage("m4", "ada", '{"n": 4}')]
        )
    for replay_id in ("r1", "r1", "r2"):
        write(messages.repartition(3), url, replay_id)
    with Tasks.open(url) as tasks:
        lines = tasks.find(agent="ada", limit=1_000)
        said = [tasks.get(line.task_id) for line in lines]
    assert len(said) == 80
    assert sorted(info.payload["n"] for info in said) == sorted([*range(40), *range(40)])
    assert {info.idempotency_key for info in said} == {f"{r}:m{n}" for r in ("r1", "r2") for n in range(40)}


def test_what_cannot_be_submitted_is_refused(messages: DataFrame, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/again.db"
    with pytest.raises(PySparkException, match="payload is missing"):
        write(messages.drop("payload"), url, "r1")
    with pytest.raises(PySparkException, match="url and replay_id"):
        messages.write.format("postroom").option("url", url).mode("append").save()
    with pytest.raises(PySparkException, match="mode append"):
        messages.write.format("postroom").options(url=url, replay_id="r").mode("overwrite").save()
