"""What is said to the JVM of a session past PySpark, because no setting does it."""

import logging
import subprocess
from typing import TYPE_CHECKING, Any, Final

from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.logger import PySparkLogger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_S: Final = 10.0  # it puts away its files
FUNCTIONS: Final = "org.apache.spark.sql.functions"
COLUMN_CLASSES: Final = {
    FUNCTIONS: FUNCTIONS,
    "functions": FUNCTIONS,
    "PythonUtils": "org.apache.spark.api.python.PythonUtils",
    "PythonSQLUtils": "org.apache.spark.sql.api.python.PythonSQLUtils",
}
"""What PySpark calls the classes that columns are made with, and what they are called."""


class CachedJavaClass(JavaClass):  # type: ignore[misc]
    """A class of the JVM. It is asked once for each of its methods, and not at every call."""

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)
        setattr(self, name, method)
        return method


def cache_classes(spark: "SparkSession") -> None:
    """Tell PySpark where the classes are that it makes columns with.

    It asks for them by name at every column, and the JVM looks for each of several names that it might mean
    in all of Spark's 280 archives.
    """
    jvm = _jvm(spark)
    for name, full_name in COLUMN_CLASSES.items():
        setattr(jvm, name, CachedJavaClass(full_name, jvm._gateway_client))  # noqa: SLF001 - as PySpark makes its own


def silence_query_logger() -> None:
    """What Spark refuses is told by the exception. PySpark would also print it, with the stack of the JVM."""
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True


def disable_checksum_files(spark: "SparkSession") -> None:
    """Hadoop writes a file of checksums beside each local one; a table leaves it behind.

    It also starts a program for each, to set its mode.
    """
    hadoop = _jvm(spark).org.apache.hadoop.fs
    local = _jvm(spark).java.net.URI("file:///")
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - not to be had otherwise
    hadoop.FileSystem.get(local, configuration).setWriteChecksum(False)


def _jvm(spark: "SparkSession") -> Any:
    return spark.sparkContext._jvm  # noqa: SLF001 - not to be had otherwise


def end_jvm() -> bool:
    """End the JVM of this process, whatever it does, if there is one. No thread can speak to it then."""
    jvm = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - nothing else names it
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
    """Those who wait for its answers would complain, each with a traceback."""
    logging.disable()
    context = SparkContext._active_spark_context  # noqa: SLF001 - nothing else names it
    server: Any = getattr(context, "_accumulatorServer", None)  # there is none while it starts
    if server is not None:
        server.handle_error = lambda *_: None
