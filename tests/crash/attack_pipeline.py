"""`attack-pipeline`: statements for `sql` that try to write, to read foreign files or to run code.

Every statement runs through the real command. A trap detects its effects: files that must stay unchanged, a
secret that must not be printed, and places that must stay empty.
"""

# ruff: noqa: S608 - the statements are attacks on purpose

import contextlib
import hashlib
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.spark.session import spark_session
from tests.crash.ledger import Tally
from tests.spark.commands import Commands, Done
from tests.spark.quick import QUICK

MESSAGES = 40
VARIANTS = 120  # of statements in a round that are randomly changed
PROPERTY = "postroom.attacked"
SECRET = "s3cret-of-another-user"  # noqa: S105 - it is the bait
REFUSED = 2

QUESTIONS = (
    "SELECT outcome, count(*) AS n FROM silver_messages GROUP BY outcome ORDER BY n",
    "-- COPY (SELECT 1) TO '/x'\nSELECT '\\' AS a, 'DROP TABLE silver_events' AS b",
    "WITH a AS (FROM silver_events), b AS (SELECT count(*) AS n FROM a WHERE seq > 1) SELECT * FROM b",
    (
        "SELECT type, row_number() OVER (PARTITION BY type ORDER BY created_us) AS n FROM silver_messages,"
        " unnest([1, 2]) AS e WHERE message_id IN (SELECT message_id FROM silver_spans)"
    ),
    "SELECT list_transform(histogram, lambda b: b.n) AS h, median(n) OVER () AS p FROM gold_latency",
    "SELECT DISTINCT stack IS NULL AS f FROM silver_spans JOIN range(2) AS r(i) ON true",
    "UNPIVOT (SELECT n, within FROM gold_sla) ON n, within ORDER BY ALL LIMIT 1 OFFSET 1",
    "VALUES (1, 'INSERT INTO a')",
    "SHOW TABLES",
    "DESCRIBE silver_spans",
    "SUMMARIZE silver_spans",
)
"""Statements that have to be answered."""


def duckdb_attacks(bait: Path, place: Path) -> list[str]:
    """Statements in the dialect of DuckDB that have to be refused."""
    reads = [
        f"{function}('{bait}')"
        for function in (
            "read_csv", "read_csv_auto", "read_text", "read_blob", "read_json", "read_ndjson", "read_parquet",
            "parquet_scan", "parquet_metadata", "sniff_csv", "glob", "query", "query_table",
            "sqlite_scan", "iceberg_scan", "delta_scan",
        )
    ]  # fmt: skip
    return [
        *(f"SELECT * FROM {read}" for read in reads),
        f"SELECT * FROM '{bait}'",
        f'FROM "{bait}"',
        f"SELECT * FROM (WITH \"{bait}\" AS (SELECT 1) SELECT 1), '{bait}'",
        f"SELECT (SELECT max(content) FROM read_text('{bait}')) AS a",
        f"SELECT 1 IN (SELECT content FROM read_text('{bait}')) AS a",
        f"WITH a AS (FROM read_text('{bait}')) SELECT * FROM a",
        f"DESCRIBE SELECT * FROM '{bait}'",
        f"SUMMARIZE '{bait}'",
        f"COPY (SELECT 1) TO '{place}'",
        f"COPY silver_spans TO '{place}' (FORMAT parquet)",
        f"COPY silver_spans FROM '{bait}'",
        f"EXPORT DATABASE '{place}'",
        f"EXPLAIN ANALYZE COPY (SELECT 1) TO '{place}'",
        f"ATTACH '{place}' AS a",
        f"CREATE TABLE a AS SELECT * FROM '{bait}'",
        f"INSTALL httpfs FROM '{bait}'",
        f"LOAD '{bait}'",
        f"SET enable_external_access = true; SELECT * FROM '{bait}'",
        "SET lock_configuration = false",
        "RESET allowed_paths",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "SHOW DATABASES",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM pragma_table_info('silver_spans')",
        "SELECT * FROM information_schema.tables",
        "SELECT * FROM silver_events AT (VERSION => 0)",
        "SELECT 1; SELECT 2",
    ]


def attacks(bait: Path, place: Path) -> list[str]:
    """The same in the dialect of Spark. `bait` is a file with a secret, and `place` should stay empty."""
    write = f"INSERT OVERWRITE DIRECTORY '{place}' USING csv SELECT 1"
    reads = [
        f"SELECT * FROM {form}.`{bait}`"
        for form in (
            "text",
            "csv",
            "json",
            "parquet",
            "orc",
            "binaryFile",
            "delta",
            "avro",
            "xml",
            "postroom",
        )
    ]
    call = f"'java.lang.System', 'setProperty', '{PROPERTY}', 'yes'"
    return [
        # writes
        write,
        f"SELECT r'\\' AS a -- '\n; {write}",
        f"WITH a AS (SELECT r'\\' AS x) {write} -- '",
        f"WITH a AS (SELECT 1) -- x\r{write}",
        f"-- x\r{write}",
        f"/* /* */ */ {write}",
        f"FROM silver_spans INSERT OVERWRITE DIRECTORY '{place}' USING csv SELECT message_id",
        f"INSERT OVERWRITE LOCAL DIRECTORY '{place}' STORED AS TEXTFILE SELECT 1",
        f"CREATE TABLE a USING csv LOCATION '{place}' AS SELECT 1",
        f"CREATE EXTERNAL TABLE a (b INT) USING csv LOCATION '{place}'",
        f"CREATE DATABASE a LOCATION '{place}'",
        "CREATE TEMPORARY VIEW a AS SELECT 1",
        f"CREATE TEMPORARY VIEW a USING text OPTIONS (path '{bait}')",
        f"CREATE TEMPORARY FUNCTION a AS 'x.Y' USING JAR '{bait}'",
        "CREATE FUNCTION a() RETURNS INT RETURN 1",
        "CREATE OR REPLACE TEMPORARY FUNCTION a(x INT) RETURNS INT LANGUAGE PYTHON AS $$ return 1 $$",
        "DECLARE VARIABLE a INT DEFAULT 1",
        "DROP TABLE silver_events",
        "DROP VIEW silver_events",
        "TRUNCATE TABLE silver_events",
        "DELETE FROM silver_events",
        "UPDATE silver_events SET seq = 0",
        "MERGE INTO silver_events a USING silver_spans b ON a.day = b.day WHEN MATCHED THEN DELETE",
        "INSERT INTO silver_events SELECT * FROM silver_events",
        "INSERT INTO silver_events REPLACE WHERE seq > 0 SELECT * FROM silver_events",
        "ALTER VIEW silver_events AS SELECT 1",
        "ANALYZE TABLE silver_events COMPUTE STATISTICS",
        "MSCK REPAIR TABLE silver_events",
        f"LOAD DATA LOCAL INPATH '{bait}' INTO TABLE silver_events",
        "EXPLAIN " + write,
        f"EXPLAIN CREATE TABLE a USING csv LOCATION '{place}' AS SELECT 1",
        # settings and state
        "SET spark.sql.runSQLOnFiles=true",
        "SET a = 1",
        "SET VARIABLE a = 1",
        "RESET",
        f"ADD JAR '{bait}'",
        f"ADD FILE '{bait}'",
        "LIST FILES",
        "CACHE TABLE silver_events",
        "CACHE TABLE a AS SELECT 1",
        "UNCACHE TABLE silver_events",
        "CLEAR CACHE",
        "REFRESH TABLE silver_events",
        f"REFRESH '{bait}'",
        "USE default",
        "KILL 1",
        # foreign files
        *reads,
        f"SELECT * FROM silver_spans, LATERAL (SELECT * FROM text.`{bait}`)",
        f"WITH a AS (SELECT * FROM text.`{bait}`) SELECT * FROM a",
        f"SELECT (SELECT max(value) FROM text.`{bait}`) AS a",
        f"SELECT * FROM silver_spans WHERE stack IN (SELECT value FROM text.`{bait}`)",
        f"SELECT EXISTS (SELECT 1 FROM text.`{bait}`) AS a",
        f"FROM text.`{bait}` |> SELECT value",
        f"TABLE text.`{bait}`",
        f"SELECT * FROM IDENTIFIER('text.`{bait}`')",
        f"SELECT * FROM IDENTIFIER('te' || 'xt.`{bait}`')",
        f"WITH text AS (SELECT 1) SELECT * FROM text.`{bait}`",
        f"SELECT * FROM STREAM text.`{bait}`",
        f"SELECT * FROM read_files('{bait}')",
        f"SELECT * FROM spark_catalog.text.`{bait}`",
        f"DESCRIBE text.`{bait}`",
        f"DESCRIBE QUERY SELECT * FROM text.`{bait}`",
        f"SHOW COLUMNS IN text.`{bait}`",
        f"EXPLAIN EXTENDED SELECT * FROM text.`{bait}`",
        f"SELECT * FROM silver_spans WITH (path='{bait}')",
        f"SELECT from_xml('<a/>', 'a INT', map('rowValidationXSDPath', '{bait}'))",
        f"SELECT from_protobuf(X'00', 'a', '{bait}')",
        f"SELECT from_avro(X'00', '\"string\"', map('avroSchemaUrl', '{bait}'))",
        f"SELECT xpath_string('<!DOCTYPE a [<!ENTITY x SYSTEM \"file://{bait}\">]><a>&x;</a>', '/a')",
        "SELECT * FROM python_worker_logs()",
        "SHOW DATABASES",
        "SHOW CREATE TABLE silver_events",
        "SELECT * FROM silver_events VERSION AS OF 0",
        "SELECT * FROM nobody",
        # code
        f"SELECT reflect({call})",
        f"SELECT java_method({call})",
        f"SELECT try_reflect({call})",
        f"SELECT REFLECT({call})",
        f"SELECT `reflect`({call})",
        f"SELECT system.builtin.reflect({call})",
        f"SELECT builtin.reflect({call})",
        f"SELECT IDENTIFIER('reflect')({call})",
        f"SELECT IDENTIFIER('ref' || 'lect')({call})",
        f"VALUES (reflect({call}))",
        f"SELECT * FROM VALUES (reflect({call})) AS a(b)",
        f"SELECT 1 LIMIT length(reflect({call}))",
        f"SELECT * FROM range(length(reflect({call})))",
        f"SELECT * FROM silver_spans WHERE reflect({call}) IS NULL",
        f"SELECT * FROM silver_spans ORDER BY reflect({call})",
        f"SELECT count(*) FILTER (WHERE reflect({call}) IS NULL) FROM silver_spans",
        f"SELECT transform(array(1), x -> reflect({call}))",
        f"SELECT * FROM silver_spans a JOIN silver_spans b ON reflect({call}) IS NULL",
        f"SELECT sum(depth) OVER (PARTITION BY reflect({call})) FROM silver_spans",
        f"SELECT * FROM silver_spans TABLESAMPLE (10 PERCENT) REPEATABLE (1) WHERE reflect({call}) = ''",
        f"SELECT * FROM silver_spans LATERAL VIEW explode(array(reflect({call}))) AS e",
        f"FROM silver_spans |> EXTEND reflect({call}) AS a",
        f"EXPLAIN SELECT reflect({call})",
        f"SELECT TRANSFORM(message_id) USING 'touch {place}' AS (a STRING) FROM silver_spans",
        f"FROM silver_spans MAP message_id USING 'touch {place}' AS (a STRING)",
        f"FROM silver_spans REDUCE message_id USING 'touch {place}' AS (a STRING)",
        f"EXECUTE IMMEDIATE 'SELECT reflect({call.replace(chr(39), chr(34))})'",
        f"BEGIN SELECT reflect({call}); END",
        f"BEGIN {write}; END",
        "CALL system.anything()",
        "SELECT * FROM my_function(TABLE(silver_spans))",
        f"SELECT 1; SELECT reflect({call})",
        "!touch x",
        f"source {bait}",
    ]


class Trap:
    """Files and a secret that a statement must not touch."""

    def __init__(self, folder: Path, tables: Path) -> None:
        self.bait = folder / "bait.csv"
        self.bait.write_text(f"{SECRET}\n")
        self.place = folder / "place"
        self._tables = tables
        self._before = self._state()

    def harm(self, done: Done) -> str:
        """The effects of a statement, in a few words; empty without any."""
        if self.place.exists():
            return "wrote a file"
        if self._state() != self._before:
            return "changed the tables"
        if SECRET in done.stdout or SECRET in done.stderr:
            return "read a foreign file"
        return ""

    def _state(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self._tables.rglob("*")):
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def changed(statement: str, rng: random.Random) -> str:
    """A variation of a statement: comments, other white space, other letters, within another query."""
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        if kind == 0:
            statement = (
                rng.choice(("/* SELECT */ ", "-- SELECT 1\n", "--\r", "\t\n", "/* /* */ */")) + statement
            )
        elif kind == 1:
            statement = re.sub(
                r" (?=[A-Z])", lambda _: rng.choice((" ", "\r", "\n", "/**/")), statement, count=3
            )
        elif kind == 2:
            statement = re.sub(r"\b(SELECT|FROM|INSERT|WITH)\b", lambda word: word[0].title(), statement)
        elif kind == 3 and statement.startswith("SELECT"):
            statement = f"WITH harmless AS (SELECT r'\\' AS a) {statement}"
        elif kind == 4 and statement.startswith("SELECT"):
            statement = f"SELECT * FROM ({statement}) AS a"
        elif kind == 5:
            statement = f"{statement} -- '"
    return statement


def statements(count: int, rng: random.Random, bait: Path, place: Path) -> Iterator[str]:
    """Every attack, and variations of some."""
    known = duckdb_attacks(bait, place) + attacks(bait, place)
    yield from known
    for _ in range(count * VARIANTS):
        yield changed(rng.choice(known), rng)


def attack(commands: Commands, tables: Path, trap: Trap, each: Iterator[str], tally: Tally) -> None:
    """Run each statement through the command, and check whether it did any harm."""
    for statement in each:
        done = commands("sql", "--tables", tables, "--", statement)
        harm = trap.harm(done)
        if harm:
            tally.breaks(f"{statement!r} {harm}")
            return
        if done.code == REFUSED and not done.stdout:
            tally.count("refused")
        else:
            tally.breaks(f"{statement!r} was not refused: exit code {done.code}, {done.stdout[:200]!r}")


def run(count: int, seed: int, tick: Callable[[int], None] = lambda _: None) -> Tally:
    """Attack the command."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name, _session(Path(name)) as spark:
        folder = Path(name)
        generate(folder / "events", MESSAGES, seed)
        tables = Tables(folder / "tables")
        Pipeline(spark, tables).run(folder / "events")
        commands, trap = Commands(spark), Trap(folder, tables.folder)
        each = statements(count, random.Random(seed), trap.bait, trap.place)
        attack(commands, tables.folder, trap, each, tally)
        for question in QUESTIONS:
            done = commands("sql", "--tables", tables.folder, "--", question)
            tally.acknowledged += done.code == 0 and bool(done.stdout)
            if done.code:
                tally.breaks(f"{question!r} was refused: {done.stderr.splitlines()[-1]}")
            if harm := trap.harm(done):
                tally.breaks(f"{question!r} {harm}")
    tick(count)
    return tally


@contextlib.contextmanager
def _session(folder: Path) -> Iterator[SparkSession]:
    spark = spark_session(
        "local[2]",
        conf={
            **QUICK,
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        },
    )
    try:
        yield spark
    finally:
        spark.stop()
