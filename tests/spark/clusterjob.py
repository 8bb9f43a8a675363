"""A driver of its own: brings tables up to a history on a cluster, or behind a Spark Connect server.

Arguments: its URL, events, tables, and `silver` or `gold`: how far. Prints how many executors a cluster had.
"""

import sys
from pathlib import Path

from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.session import spark_session
from postroom.pipeline.tables import Tables
from tests.spark.quick import QUICK, QUICK_JVM

CONF = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "2",
    **QUICK,
    "spark.executor.extraJavaOptions": QUICK_JVM,
}


def main(url: str, events: str, tables: str, layer: str) -> None:
    is_cluster = url.startswith("spark://")
    spark = spark_session(url, conf=CONF) if is_cluster else spark_session(remote=url)
    try:
        told = Pipeline(
            spark,
            Tables(Path(tables)),
            gold={} if layer == "silver" else None,
            progress=lambda text: print(text, file=sys.stderr),
        )
        told.run(Path(events))
        if is_cluster:
            hosts = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
            print(hosts - 1)  # the driver is one of them
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
