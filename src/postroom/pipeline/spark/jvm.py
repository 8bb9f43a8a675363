"""Changes to the JVM of a session for which Spark has no setting."""

import logging
import subprocess
from typing import TYPE_CHECKING, Any, Final

from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.logger import PySparkLogger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_S: Final = 10.0  # the JVM deletes its temporary files
FUNCTIONS: Final = "org.apache.spark.sql.functions"
COLUMN_CLASSES: Final = {
    FUNCTIONS: FUNCTIONS,
    "functions": FUNCTIONS,
    "PythonUtils": "org.apache.spark.api.python.PythonUtils",
    "PythonSQLUtils": "org.apache.spark.sql.api.python.PythonSQLUtils",
}
"""PySpark's names of the classes that create columns, and their full names."""


class CachedJavaClass(JavaClass):  # type: ignore[misc]
    """A class of the JVM whose methods are looked up once, and not at every call."""

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)
        setattr(self, name, method)
        return method


def configure(spark: "SparkSession", *, is_local: bool) -> None:
    """Configure a new session where Spark has no setting."""
    # PySpark would log errors with the stack of the JVM. The exception has the message.
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True
    # PySpark looks these classes up by name for every column, and the JVM then searches Spark's 280 archives
    # for each of several candidate names.
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - there is no public way
    for name, full_name in COLUMN_CLASSES.items():
        setattr(jvm, name, CachedJavaClass(full_name, jvm._gateway_client))  # noqa: SLF001 - as PySpark creates its own
    if is_local:
        # Hadoop would start a program for the checksum file of each local file, to set its mode.
        configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - there is no public way
        files = jvm.org.apache.hadoop.fs.FileSystem
        files.get(jvm.java.net.URI("file:///"), configuration).setWriteChecksum(False)


def end_jvm() -> bool:
    """End the JVM of this process, if there is one. No thread can call it afterwards."""
    jvm = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - there is no public way
    if jvm is None:
        return False
    _silence()
    jvm.terminate()
    try:
        jvm.wait(END_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
    return True


def _silence() -> None:
    """Suppress the tracebacks of threads that wait for the JVM."""
    logging.disable()
    context = SparkContext._active_spark_context  # noqa: SLF001 - there is no public way
    server: Any = getattr(context, "_accumulatorServer", None)  # there is none while it starts
    if server is not None:
        server.handle_error = lambda *_: None
