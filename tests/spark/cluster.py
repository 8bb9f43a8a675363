"""A cluster and a Connect server on loopback, of what the pip package of Spark has, and a bare Python."""

import os
import re
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.spark.session import LOOPBACK
from tests.spark.quick import QUICK_JVM

WORKERS = 2
LOOK_EVERY_S = 0.1
SPARK_BIN = Path(pyspark.__file__).parent / "bin"
DEPLOY = "org.apache.spark.deploy"
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
WORKER_CORES, WORKER_MEMORY_MIB = 1, 700
HERE = ("--host", LOOPBACK, "--port", "0", "--webui-port", "0")
DAEMON = {
    "SPARK_LOCAL_IP": LOOPBACK,
    "SPARK_DAEMON_MEMORY": "192m",
    "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
    "SPARK_NO_DAEMONIZE": "1",
}


class Daemon:
    """A part of the cluster, and its log."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, *words: str, **environ: str) -> None:
        self._log = folder / f"{name}.log"
        environment = {**os.environ, **DAEMON, "SPARK_LOG_DIR": str(folder), **environ}
        program = SPARK_BIN / ("spark-submit" if name == "connect" else "spark-class")
        with self._log.open("wb") as sink:
            self._process = stack.enter_context(
                subprocess.Popen([program, *words], stdout=sink, stderr=sink, env=environment)
            )
        stack.callback(self._process.kill)

    def said(self, wanted: str) -> str:
        """Wait until its log says something; gives that."""
        while not (found := re.search(wanted, self._log.read_text())):
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(LOOK_EVERY_S)
        return found[1]


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers of one core each; gives the master's URL."""
    with ExitStack() as stack:
        master = Daemon(stack, folder, "master", f"{DEPLOY}.master.Master", *HERE)
        url = master.said(r"Starting Spark master at (spark://\S+)")
        for number in range(WORKERS):
            size = ("--cores", str(WORKER_CORES), "--memory", f"{WORKER_MEMORY_MIB}m")
            place = ("--work-dir", str(folder / f"work-{number}"))
            Daemon(stack, folder, f"worker-{number}", f"{DEPLOY}.worker.Worker", *HERE, *place, *size, url)
        yield url


@contextmanager
def standalone_in(spark: SparkSession, folder: Path) -> Iterator[str]:
    """The same master and workers in the JVM of a session: three JVMs fewer. Executors are processes."""
    context: Any = spark.sparkContext
    jvm, deploy = context._jvm, context._jvm.org.apache.spark.deploy
    start_master = _module(deploy.master, "Master").startRpcEnvAndEndpoint
    start_worker = _module(deploy.worker, "Worker").startRpcEnvAndEndpoint
    conf, nothing = jvm.org.apache.spark.SparkConf(False), _module(jvm.scala, "None")
    conf.set("spark.master.rest.enabled", "false")  # it has a port of its own
    with ExitStack() as stack:
        master = start_master(LOOPBACK, 0, 0, conf)._1()
        stack.callback(master.shutdown)
        masters = context._gateway.new_array(jvm.java.lang.String, 1)
        masters[0] = url = str(master.address().toSparkURL())
        for number in range(WORKERS):
            place = str(folder / f"work-{number}")
            size = (WORKER_CORES, WORKER_MEMORY_MIB)
            worker = start_worker(LOOPBACK, 0, 0, *size, masters, place, nothing, conf, nothing)
            stack.callback(worker.shutdown)
        yield url


def _module(package: Any, name: str) -> Any:
    """An object of Scala."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server whose Python has no postroom; gives its URL."""
    conf = {
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.extraJavaOptions": DAEMON["SPARK_DAEMON_JAVA_OPTS"],
        "spark.local.dir": str(folder / "local"),
        "spark.sql.session.timeZone": "Asia/Tokyo",  # a server's own taste must not matter
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    settings = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    with ExitStack() as stack:
        words = (
            "--master",
            "local[2]",
            *settings,
            "--class",
            CONNECT,
            "spark-internal",
        )
        python = str(bare_python(folder))
        server = Daemon(stack, folder, "connect", *words, PYSPARK_PYTHON=python, SPARK_DAEMON_MEMORY="1g")
        port = server.said(r"Spark Connect server started at: \S*:(\d+)")
        yield f"sc://{LOOPBACK}:{port}"


def bare_python(folder: Path) -> Path:
    """A Python that has Spark and Arrow and no postroom, and that notes in `calls` when it is called."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "bare")], check=True)
    python = folder / "bare" / "bin" / "python"
    [packages] = (folder / "bare").glob("lib/python*/site-packages")
    # The packages alone: what a .pth file in there adds, such as an editable install, is not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {python} -I "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    subprocess.run([script, "-c", "import pyspark, pyarrow"], check=True)
    missing = subprocess.run([script, "-c", "import postroom"], check=False, capture_output=True)
    assert b"No module named 'postroom'" in missing.stderr
    (folder / "calls").unlink()
    return script


class Made(NamedTuple):
    """What steps of `clusterjob` have made, and what they said."""

    tables: Tables
    said: list[str]


def do_at(url: str, tables: Path, *steps: str, **environ: str) -> Made:
    """Let a driver of its own do steps on tables somewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.clusterjob", url, str(tables), *steps],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Made(Tables(tables), done.stdout.splitlines())


def do_on_cluster(folder: Path, *steps: str) -> Made:
    """Steps done by a cluster of its own."""
    with standalone(folder) as master:
        return do_on_workers(master, folder, *steps)


def do_on_workers(master: str, folder: Path, *steps: str) -> Made:
    """Steps done by the two workers of a master, whose Python has no postroom."""
    python = str(bare_python(folder))
    done = do_at(master, folder / "there", *steps, PYSPARK_PYTHON=python, SPARK_LOCAL_IP=LOOPBACK)
    assert done.said.pop() == str(WORKERS)
    assert "pyspark.daemon" in (folder / "calls").read_text()
    return done
