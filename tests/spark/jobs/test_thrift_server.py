"""A BI tool beside the pipeline: Hive's own JDBC driver, over a socket of loopback."""

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.query.thrift_server import serve
from postroom.pipeline.query.views import create_views
from postroom.pipeline.spark.jvm import jvm_of
from postroom.pipeline.spark.session import LOOPBACK
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import records

BY_OUTCOME = "SELECT outcome, count(*) AS n FROM messages GROUP BY outcome"


def rows_by_jdbc(spark: SparkSession, port: int, query: str) -> list[tuple[str, ...]]:
    """What a client with a connection of its own reads."""
    jvm = jvm_of(spark)
    url, nothing = f"jdbc:hive2://{LOOPBACK}:{port}/default", jvm.java.util.Properties()
    connection = jvm.org.apache.hive.jdbc.HiveDriver().connect(url, nothing)
    try:
        found: Any = connection.createStatement().executeQuery(query)
        columns = range(1, found.getMetaData().getColumnCount() + 1)
        rows = []
        while found.next():
            rows.append(tuple(found.getString(column) for column in columns))
        return rows
    finally:
        connection.close()


def test_a_bi_tool_reads_the_views_of_the_session(spark: SparkSession, tables_of: TablesOf) -> None:
    _, tables = tables_of()
    session = spark.newSession()  # so that other tests do not find the views
    views = create_views(session, tables)
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(Unavailable, match="already in use"):
        serve(session, port=taken.getsockname()[1])
    port = serve(session, port=0)
    assert [row[1] for row in rows_by_jdbc(spark, port, "SHOW VIEWS")] == views
    outcomes = Counter(row["outcome"] for row in records(tables, "silver_messages"))
    assert rows_by_jdbc(spark, port, f"{BY_OUTCOME} ORDER BY outcome") == [
        (outcome, str(n)) for outcome, n in sorted(outcomes.items())
    ]
    session.range(3).createOrReplaceTempView("messages")  # as after a run
    assert rows_by_jdbc(spark, port, "SELECT count(*) FROM messages") == [("3",)]
    with pytest.raises(InvalidSetting, match="has a thrift server already"):
        serve(session)
    assert not Path("derby.log").exists()  # in the folder in which the JVM was started


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_a_spark_connect_client_has_no_jvm_for_it(connect: str) -> None:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    client: Any = ConnectSession(connect)
    try:
        with pytest.raises(InvalidSetting, match="runs in the JVM of the driver"):
            serve(client)
    finally:
        client.client.close()
