"""Spark's thrift server in an existing session: an SQL endpoint for tools that speak JDBC or ODBC to Hive.

Rule 1: its clients share one session, so that they see the temporary views of `views.create_views`, and no
        jar of Delta is needed.
Rule 2: it has no access control, so it listens on loopback unless a host is given.
"""

import os
from typing import TYPE_CHECKING, Final

from postroom.errors import InvalidSetting
from postroom.pipeline.spark.jvm import jvm_of
from postroom.pipeline.spark.session import LOOPBACK, is_classic, spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PORT: Final = 10_000  # that such tools assume
ONE_SESSION: Final = "spark.sql.hive.thriftServer.singleSession"


def serve(spark: "SparkSession", host: str = LOOPBACK, port: int = PORT) -> int:
    """Start the server in a session, with which it ends; returns its port. Port 0 is any free one."""
    if not is_classic(spark):
        raise InvalidSetting(
            "the thrift server runs in the JVM of the driver, and a Spark Connect client has none"
        )
    jvm = jvm_of(spark)
    thriftserver = jvm.org.apache.spark.sql.hive.thriftserver
    if thriftserver.HiveThriftServer2.listener() is not None:  # Hive would ignore another port
        raise InvalidSetting("this process has a thrift server already")
    # Else Hive leaves a derby.log in the current folder.
    jvm.java.lang.System.getProperties().putIfAbsent("derby.stream.error.file", os.devnull)
    spark.conf.set("hive.server2.thrift.bind.host", host)
    spark.conf.set("hive.server2.thrift.port", port)
    session = spark._jsparkSession  # noqa: SLF001 - there is no public way
    session.sessionState().conf().setConfString(ONE_SESSION, "true")  # Spark lets a new session alone set it
    ends_jvm_on_error = False
    with spark_errors():  # such as a port that is in use
        server = thriftserver.HiveThriftServer2.startWithSparkSession(session, ends_jvm_on_error)
    [listening] = [each for each in server.getServices() if each.getName() == "ThriftBinaryCLIService"]
    return int(listening.getPortNumber())
