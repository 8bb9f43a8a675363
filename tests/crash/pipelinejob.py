"""A separate driver, to be killed: runs jobs on a folder of tables, and prints which job it starts.

Its argument is a `Plan` as JSON. Each printed line begins with the job, such as `run silver_spans`. Where the
environment names the gateway of a JVM, the driver uses that JVM, which continues when its driver has ended.
With `host` as its argument it starts such a JVM, prints how to connect, and waits until its input ends.
"""

import json
import os
import sys
from pathlib import Path
from typing import Literal

import msgspec
from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from postroom.errors import PostroomError
from postroom.pipeline import paths
from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.storage import NO_ACCESS, Access
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.retention import RetentionJob, RetentionPolicy
from postroom.pipeline.silver import span_tree
from postroom.pipeline.spark.session import spark_session
from postroom.pipeline.status import keep_house
from tests.spark.clusterjob import KEEP_DAYS
from tests.spark.quick import QUICK

NANOS_PER_S = 1e9
LAKE = "lake"
GATEWAY_PORT, GATEWAY_SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
CONF = {
    "spark.driver.memory": "1g",
    **QUICK,
    "spark.sql.shuffle.partitions": "2",
}


class Plan(msgspec.Struct):
    """The jobs, their order, and the settings of Spark."""

    tables: str
    events: str
    jobs: list[Literal["run", "retain", "backfill", "compact"]]
    now_us: int = 0
    """The present time for `retain`."""
    conf: dict[str, str] = {}
    is_large: bool = False
    """Whether its limits are so low that ids are shuffled instead of broadcast."""
    mount: str = ""
    """The folder that Hadoop knows as `viewfs:///lake`."""
    gold: list[str] | None = None
    """The gold tables; None for all."""
    by_spark: bool = False
    """Whether Spark reads and writes the files of small tables too."""


def main(plan: Plan) -> None:
    is_guest = GATEWAY_PORT in os.environ
    mounted = {f"spark.hadoop.fs.viewfs.mounttable.default.link./{LAKE}": plan.mount} if plan.mount else {}
    spark = guest() if is_guest else spark_session("local[2]", conf={**CONF, **mounted, **plan.conf})
    if plan.by_spark:
        paths.SMALL_BYTES = 0  # type: ignore[misc]
    if plan.is_large:
        file_index.BROADCAST_IDS_MAX = span_tree.BROADCAST_NODES_MAX = 0  # type: ignore[misc]
    tables = Tables(
        plan.tables, Access(mounts={f"viewfs:///{LAKE}": plan.mount}) if plan.mount else NO_ACCESS
    )
    try:
        do(plan, spark, tables)
    except PostroomError as error:
        sys.exit(str(error))
    print("done", *costs(spark), flush=True)
    if not is_guest:
        spark.stop()


def do(plan: Plan, spark: SparkSession, tables: Tables) -> None:
    gold = None if plan.gold is None else {name: GOLD[name] for name in plan.gold}
    for job in plan.jobs:

        def tell(text: str, job: str = job) -> None:
            print(job, text, flush=True)

        match job:
            case "run":
                Pipeline(spark, tables, gold=gold, progress=tell).run(Path(plan.events))
            case "backfill":
                Pipeline(spark, tables, gold=gold, progress=tell).backfill()
            case "compact":
                keep_house(tables, compact=True, vacuum=False, progress=tell)
            case "retain":
                policy = RetentionPolicy(keep_days=KEEP_DAYS)
                RetentionJob(spark, tables, policy, now_us=plan.now_us, progress=tell).run()


def guest() -> SparkSession:
    """A session in the existing JVM."""
    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    context = gateway.jvm.org.apache.spark.SparkContext.getOrCreate()
    jvm_context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(context)
    return SparkSession(SparkContext(gateway=gateway, jsc=jvm_context))


def host() -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the JVM
    spark = spark_session("local[2]", conf=CONF)
    parameters = spark.sparkContext._gateway.java_parameters  # type: ignore[union-attr]
    way_in = {
        GATEWAY_PORT: str(parameters.port),
        GATEWAY_SECRET: parameters.auth_token,
        "PYSPARK_PYTHON": sys.executable,
    }
    print(json.dumps(way_in), file=said, flush=True)
    sys.stdin.read()
    spark.stop()


def costs(spark: SparkSession) -> tuple[float, float]:
    """CPU seconds of all tasks, and of the longest task of each stage, which more cores would not save."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    quantiles = spark.sparkContext._gateway.new_array(jvm.double, 1)  # type: ignore[union-attr]
    quantiles[0] = 1.0
    store = spark.sparkContext._jsc.sc().statusStore()
    stages = store.stageList(None, False, True, quantiles, jvm.java.util.ArrayList())
    every, longest = 0.0, 0.0
    for at in range(stages.size()):
        stage = stages.apply(at)
        every += stage.executorCpuTime() / NANOS_PER_S
        metrics = stage.taskMetricsDistributions()
        if metrics.isDefined():
            longest += metrics.get().executorCpuTime().apply(0) / NANOS_PER_S
    return every, longest


if __name__ == "__main__":
    if sys.argv[1] == "host":
        host()
    else:
        main(msgspec.json.decode(sys.argv[1], type=Plan))
