"""A secret that reached the stream as it was goes no further than the table of what the stream says.

The segments here are those of a shipper that was told to redact nothing. Everything behind `bronze_events`,
the patterns of the dead letters and the report among it, is made for people to look at and to send on.
"""

from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.report.queries import write_report
from tests.spark.stories import happened, write_segment

CANARY = "sk-live-c4n4ry0fTheC0alM1ne5678901234"
MAIL = "canary.bird@coalmine.example"
SECRETS = (CANARY, MAIL)
LETTERS = 5


def letter(number: int) -> list[bytes]:
    """A message that says the secrets in every place in which a user's words can stand."""
    name, first = f"m{number}", 10 * number
    said = f"login of {MAIL} failed with api_key={CANARY} in attempt {number}"
    facts = {"type": "tool_call", "queue": "work", "org_id": "acme", "goal_id": "g", "agent_id": "ada"}
    return [
        happened("c", first + 1, name, payload=f'{{"to":"{MAIL}","api_key":"{CANARY}"}}', **facts),
        happened("c", first + 2, name, "enqueued", **facts),
        happened("c", first + 3, name, "dequeued", lease=first + 3, worker_id="w", **facts),
        happened("c", first + 4, name, "execution_failed", error_type="E", error=said, **facts),
        happened("c", first + 5, name, "dead_letter", error_type="E", error=said, **facts),
    ]


def test_no_table_for_people_and_no_report_holds_a_secret(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path / "events", 1, [line for number in range(LETTERS) for line in letter(number)])
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables).run(tmp_path / "events")
    told = {name: [str(row) for row in tables.read(spark, name).collect()] for name in tables.names()}
    assert all(secret in "".join(told["bronze_events"]) for secret in SECRETS)  # they were there
    assert len(told["gold_dlq_patterns"]) == 1
    del told["bronze_events"]
    report = tmp_path / "report.html"
    write_report(tables, report)
    told["report"] = [file.read_text() for file in sorted(tmp_path.glob("*.*")) if file.is_file()]
    assert told["report"]
    leaks = {name for name, rows in told.items() for secret in SECRETS if secret in "".join(rows)}
    assert leaks == set()
