"""A driver of its own: works on tables on a cluster, behind a Spark Connect server, or in one process.

Arguments: where, the tables, and the steps in their order: `run:EVENTS`, `silver:EVENTS` (a run without
gold), `stream:EVENTS`, `retain:NOW_US`, `backfill` and `check`. What a check proves is printed, a line for
each; the last line is the number of executors of a cluster.
"""

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline import paths
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.query.check import check_tables
from postroom.pipeline.retention import RetentionJob, RetentionPolicy
from postroom.pipeline.spark.session import spark_session
from tests.spark.quick import QUICK, QUICK_JVM, UNCOMPILED

KEEP_DAYS = 2
CONF = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "2",
    **QUICK,
    "spark.executor.extraJavaOptions": QUICK_JVM,
}


def main(url: str, tables: str, *steps: str) -> None:
    paths.SMALL_BYTES = 0  # type: ignore[misc]  # executors read and write the files, as of large tables
    is_short = all(step.startswith("silver:") for step in steps)
    conf = {**CONF, **UNCOMPILED} if is_short else CONF
    spark = spark_session(remote=url) if url.startswith("sc://") else spark_session(url, conf=conf)
    try:
        for step in steps:
            do(step, spark, Tables(Path(tables)))
        if url.startswith("spark://"):
            hosts = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
            print(hosts - 1)  # the driver is one of them
    finally:
        spark.stop()


def do(step: str, spark: SparkSession, tables: Tables) -> None:
    job, _, with_what = step.partition(":")
    pipeline = Pipeline(spark, tables, gold={} if job == "silver" else None, progress=tell)
    if job in ("run", "silver"):
        pipeline.run(Path(with_what))
    elif job == "stream":
        pipeline.stream(Path(with_what))
    elif job == "backfill":
        pipeline.backfill()
    elif job == "retain":
        RetentionJob(
            spark, tables, RetentionPolicy(keep_days=KEEP_DAYS), now_us=int(with_what), progress=tell
        ).run()
    elif job == "check":
        proven(tables)
    else:
        raise ValueError(step)


def proven(tables: Tables) -> None:
    verdict = check_tables(tables)
    print(verdict.events, verdict.messages, *sorted(verdict.counts.items()))
    for sample in verdict.samples:
        print(*sample)


def tell(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
