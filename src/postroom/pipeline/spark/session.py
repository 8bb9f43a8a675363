"""The Spark session of a command, with the settings that the benchmarks use.

Rule 1: missing software is reported in one line, before a JVM is started.
Rule 2: a local master and its UI listen on loopback only. A cluster decides on its own addresses.
"""

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from postroom.errors import InvalidMessage, InvalidSetting, Unavailable, shown_address
from postroom.pipeline.spark.class_archive import find_java, using_archive
from postroom.system.addresses import split_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

LOCAL_MASTER: Final = "local[*]"
MASTER: Final = re.compile(r"local(\[(\*|[1-9]\d*)(,\d+)?\])?|local-cluster\[.+\]|spark://.+|k8s://.+|yarn")
LOOPBACK: Final = "127.0.0.1"
LOCAL_SHUFFLE_PARTITIONS: Final = 8  # a few for each core; adaptive execution merges small ones
CONCURRENT_WRITERS_MAX: Final = 64  # open files a task, so that rows need not be sorted by day
CONNECT_PORT: Final = 15_002  # the default port of a Spark Connect server
CONNECT_TIMEOUT_S: Final = 10.0
CAUSES_MAX: Final = 20  # nested exceptions that are searched
LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
POOLS: Final = Path(__file__).with_name("pools.xml")
AWAITED: Final = "awaited"  # the scheduler pool with priority

CONTAINER_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# ParallelGC takes the least CPU for throughput, which is all that matters here. Spark loads 150 MB of code;
# without MetaspaceSize that triggers several full collections. A short run spends a third of its CPU on
# compilation, so the optimizing compiler only gets methods that are called twenty times as often as usual.
JAVA_OPTIONS: Final = (
    "-XX:+UseParallelGC -XX:MetaspaceSize=256m"
    " -XX:Tier4InvocationThreshold=100000 -XX:Tier4MinInvocationThreshold=12000"
    " -XX:Tier4CompileThreshold=300000 -XX:Tier4BackEdgeThreshold=800000"
)

MEMORY: Final = "spark.driver.memory"
CLUSTER_DRIVER_MEMORY: Final = "2g"  # executors do the work
DRIVER_OPTIONS: Final = "spark.driver.extraJavaOptions"
SETTINGS: Final[dict[str, str]] = {
    "spark.app.name": "postroom",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    DRIVER_OPTIONS: f"{JAVA_OPTIONS} -Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": f"file:{POOLS}",
    "spark.sql.session.timeZone": "UTC",
    # No SQL here has variables, and ${env:NAME} would be the environment of this process.
    "spark.sql.variable.substitute": "false",
    "spark.sql.adaptive.enabled": "true",
    # Plans as text are not used, but are created for every query, and again whenever it adapts.
    "spark.sql.ui.explainMode": "simple",
    # Errors do not name the Python line: for that, every column would take a dozen calls into the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.maxPlanStringLength": "20000",
    # Extensions are named in `spark.sql.extensions`, and not searched in the class path. It has one, for
    # machine learning, whose registration takes more than a second of every start.
    "spark.sql.extensions.test.loadFromCp": "false",
    # Rows in memory take ten times the size of their file, and Spark decides on broadcasts by that size.
    "spark.sql.sources.fileCompressionFactor": "10",
    "spark.sql.autoBroadcastJoinThreshold": "64m",
    # The JSON reader would evaluate a filter at every field of a line, and nearly every line is an event.
    "spark.sql.json.filterPushdown.enabled": "false",
    "spark.sql.codegen.cache.maxEntries": "1000",  # a run compiles about 300 pieces of code
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.maxConcurrentOutputFileWriters": str(CONCURRENT_WRITERS_MAX),
    # The table's log makes files visible, so Spark may use its fast commit.
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
LOCAL_SETTINGS: Final[dict[str, str]] = {
    # Listing local files is quick; starting a Spark job to list them is slower.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.sql.shuffle.partitions": str(LOCAL_SHUFFLE_PARTITIONS),
    # Half a second of work, so that with few cores the last task of a stage does not delay it for long.
    "spark.sql.files.maxPartitionBytes": "32m",
    # Opening a local file takes a millisecond, so one task reads many small ones.
    "spark.sql.files.openCostInBytes": "1m",
}
UI_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",  # a free one
    "spark.ui.killEnabled": "false",  # the UI has no access control
}
"""For a local session that is monitored. The UI binds to SPARK_LOCAL_IP, which is loopback then."""
QUICK_COMPILER: Final = " -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
SMALL_SETTINGS: Final[dict[str, str]] = {
    # Every plan runs once on a few rows, so generating and compiling code would take longer than running it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # One task a stage: starting a task takes longer than computing its rows.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.files.minPartitionNum": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",  # there are no partitions to merge, and no sizes to wait for
    # The optimizer would compute projections of local rows. Without generated code, a row takes it time that
    # grows with the square of its columns.
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation",
}
"""For a local session with little data. The rows are the same."""
_OF_A_SERVER: Final = ("spark.sql.codegen.cache.maxEntries", "spark.sql.extensions.test.loadFromCp")
REMOTE_SETTINGS: Final = {
    name: value
    for name, value in SETTINGS.items()
    if name.startswith("spark.sql.") and name not in _OF_A_SERVER
}
"""The settings that a Spark Connect client can choose. The server decides on the rest."""


def spark_session(
    master: str = LOCAL_MASTER,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    *,
    is_small: bool = False,
    with_ui: bool = False,
) -> "SparkSession":
    """The session of this process: on a master, or at the Spark Connect server `remote`.

    With `is_small`, a local session skips optimizations that only pay off for many rows. With `with_ui`, a
    local session has Spark's UI on a free port of loopback.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with _quiet():
        need_packages()
        from pyspark.sql import SparkSession  # noqa: PLC0415 - lazy

        builder = SparkSession.Builder()
        with spark_errors():
            if remote is not None:
                return _remote_session(builder, remote, {**REMOTE_SETTINGS, **(conf or {})})
            if not MASTER.fullmatch(master):  # Spark would report it as well, with a stack trace
                raise InvalidSetting(
                    f"{master!r} is not a master: it is local[N], spark://HOST:PORT, k8s://URL or yarn"
                )
            _need_java()
            spark = (
                builder.master(master)
                .config(map={**settings(master, conf or {}, is_small=is_small, with_ui=with_ui)})
                .getOrCreate()
            )
            from postroom.pipeline.spark import jvm  # noqa: PLC0415 - lazy

            jvm.configure(spark, is_local=master.startswith("local"))
            return spark


def is_classic(spark: "SparkSession") -> bool:
    """Whether a session has its JVM in this process's control, and is not a Spark Connect client."""
    return hasattr(spark, "_jsparkSession")


def is_local(spark: "SparkSession") -> bool:
    """Whether the tasks of a session run in a JVM of this machine, which sees all files of it."""
    return is_classic(spark) and str(spark.sparkContext.master).startswith("local")


def in_pool(spark: "SparkSession", pool: str | None) -> None:
    """Set the scheduler pool of this thread. With Spark Connect the server decides."""
    if is_classic(spark):
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", pool or "default")


def settings(
    master: str, conf: Mapping[str, str], *, is_small: bool = False, with_ui: bool = False
) -> dict[str, str]:
    """The settings of a session on a master, overridden by `conf`."""
    if not master.startswith("local"):
        return {**SETTINGS, MEMORY: CLUSTER_DRIVER_MEMORY, **conf}
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    options = f"{SETTINGS[DRIVER_OPTIONS]}{_huge_pages()}{using_archive()}"
    # One GiB for plans and joins and one for each core, but at most half of the memory.
    gib = max(1, min(1 + (os.cpu_count() or 1), _memory_bytes() // 2 >> 30))
    own = {MEMORY: f"{gib}g", DRIVER_OPTIONS: options}
    if with_ui:
        own |= UI_SETTINGS
    if is_small:
        own |= {**SMALL_SETTINGS, DRIVER_OPTIONS: options + QUICK_COMPILER}
    return {**SETTINGS, **LOCAL_SETTINGS, **own, **conf}


def _memory_bytes() -> int:
    """The bytes of memory of the machine, or of the container."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # there is no limit
            size = min(size, int(limit.read_text()))
    return size


def _huge_pages() -> str:
    """The option for huge pages, which save some CPU. Without system support the JVM may not start."""
    try:
        has_them = "[never]" not in HUGE_PAGES.read_text()
    except OSError:
        return ""
    return " -XX:+UseTransparentHugePages" if has_them else ""


def need_packages() -> None:
    """Raise if a package of the extra `spark` is not installed."""
    try:
        for name in ("deltalake", "duckdb", "jinja2", "openlineage", "pyspark", "xxhash"):
            import_module(name)
    except ImportError as error:
        raise InvalidSetting(
            f"the pipeline needs {error.name}, which is not installed: pip install 'postroom[spark]'"
        ) from None


def _remote_session(builder: "SparkSession.Builder", remote: str, conf: Mapping[str, str]) -> "SparkSession":
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 - lazy

    _need_server(remote)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)  # the error is raised as well
    try:
        return builder.remote(remote).config(map={**conf}).getOrCreate()
    except ImportError as error:
        raise InvalidSetting(
            f"Spark Connect: {first_sentence(str(error)).rstrip('.')}: pip install 'postroom[spark]'"
        ) from None


def _need_server(remote: str) -> None:
    """Raise if no server listens: Spark's client would retry for ten minutes."""
    url = split_address(remote)
    if url is None or url.scheme != "sc" or not url.hostname:
        raise InvalidSetting(
            f"{shown_address(remote)!r} is not a Spark Connect server: it has the form sc://HOST:PORT"
        )
    try:
        socket.create_connection((url.hostname, url.port or CONNECT_PORT), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Unavailable(
            f"there is no Spark Connect server at {shown_address(remote)}: {error.strerror or error}"
        ) from None


def _need_java() -> None:
    if find_java() is None:
        home = os.environ.get("JAVA_HOME")
        where = f"there is none in JAVA_HOME={home}" if home else "there is none on the PATH"
        raise InvalidSetting(f"the pipeline needs Java 17 or 21, and {where}: install it, or set JAVA_HOME")


@contextmanager
def _quiet() -> "Iterator[None]":
    """Suppress PySpark's warning about an untested pandas, which is not used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\..*")
        yield


@contextmanager
def spark_errors() -> "Iterator[None]":
    """Convert Spark's errors to one line: `InvalidMessage` for a refused query, else `Unavailable`."""
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - lazy
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # noqa: PLC0415 - lazy
    from pyspark.errors import AnalysisException, ParseException, PySparkException  # noqa: PLC0415 - lazy

    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise InvalidMessage(f"Spark refuses it: {first_sentence(str(error))}") from None
    except (PySparkException, Py4JJavaError) as error:
        raise Unavailable(f"Spark failed: {first_sentence(_cause(error))}") from None
    except DeltaError as error:
        raise Unavailable(f"a table cannot be read or written: {first_sentence(str(error))}") from None


@contextmanager
def table_errors(name: str) -> "Iterator[None]":
    """Convert errors of a table to one line that names it."""
    import duckdb  # noqa: PLC0415 - lazy
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - lazy

    try:
        yield
    except (DeltaError, duckdb.Error) as error:
        advice = "; delete its folder, and `postroom pipeline run` rebuilds it" * name.startswith("gold_")
        raise Unavailable(
            f"table {name} cannot be read: {first_sentence(str(error)).rstrip('.')}{advice}"
        ) from None


def _cause(error: Exception) -> str:
    """The message of the innermost exception in the JVM."""
    thrown = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if thrown is None:
        return str(error)
    for _ in range(CAUSES_MAX):
        cause = thrown.getCause()
        # The message of a ClassNotFoundException is only a name.
        if cause is None or cause.getClass().getSimpleName() == "ClassNotFoundException":
            break
        thrown = cause
    return str(thrown.getMessage() or thrown.toString())


def first_sentence(text: str) -> str:
    """The message of an error, without its code and without the plan that follows."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "it does not say why"
    return (first.partition("] ")[2] or first).partition(" SQLSTATE")[0]
