"""A driver of its own, to be killed: does jobs on a folder of tables, and says what it begins with.

Its argument is a `Plan` as JSON. Each line that it prints begins with the job, such as `run silver_spans`.
"""

import sys
from pathlib import Path
from typing import Literal

import msgspec
from pyspark.sql import SparkSession

from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.retain import Policy, Retention
from postroom.pipeline.session import SETTINGS, spark_session
from postroom.pipeline.tables import Tables

KEEP_DAYS = 2
NANOS_PER_S = 1e9
CONF = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": f"{SETTINGS['spark.driver.extraJavaOptions']} -XX:TieredStopAtLevel=1",
    "spark.sql.shuffle.partitions": "2",
}


class Plan(msgspec.Struct):
    """What is done, in which order, with which settings of Spark."""

    tables: str
    events: str
    jobs: list[Literal["run", "retain"]]
    now_us: int = 0
    """What `retain` takes for the present."""
    conf: dict[str, str] = {}


def main(plan: Plan) -> None:
    spark = spark_session("local[2]", conf={**CONF, **plan.conf})
    tables = Tables(Path(plan.tables))
    for job in plan.jobs:

        def tell(text: str, job: str = job) -> None:
            print(job, text, flush=True)

        if job == "run":
            Pipeline(spark, tables, progress=tell).run(Path(plan.events))
        else:
            policy = Policy(keep_days=KEEP_DAYS)
            Retention(spark, tables, policy, now_us=plan.now_us, progress=tell).run()
    print("done", *costs(spark), flush=True)
    spark.stop()


def costs(spark: SparkSession) -> tuple[float, float]:
    """CPU seconds of all tasks; and of the longest one of each stage: what no further core would save."""
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
        told = stage.taskMetricsDistributions()
        if told.isDefined():
            longest += told.get().executorCpuTime().apply(0) / NANOS_PER_S
    return every, longest


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
