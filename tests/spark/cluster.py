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
from typing import NamedTuple

import pyspark

from postroom.pipeline.tables import Tables
from tests.spark.quick import QUICK_JVM

WORKERS = 2
LOOK_EVERY_S = 0.1
SPARK_BIN = Path(pyspark.__file__).parent / "bin"
DEPLOY = "org.apache.spark.deploy"
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
HERE = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
DAEMON = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_MEMORY": "192m",
    "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JVM} -XX:+UseSerialGC",
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
            places = ("--work-dir", str(folder / f"work-{number}"), "--cores", "1", "--memory", "700m")
            Daemon(stack, folder, f"worker-{number}", f"{DEPLOY}.worker.Worker", *HERE, *places, url)
        yield url


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server whose Python has no postroom; gives its URL."""
    here = "127.0.0.1"
    conf = {
        "spark.connect.grpc.binding.address": here,
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": here,
        "spark.driver.host": here,
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
        yield f"sc://{here}:{port}"


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
    """Steps done by two workers whose Python has no postroom."""
    python = str(bare_python(folder))
    with standalone(folder) as master:
        done = do_at(master, folder / "there", *steps, PYSPARK_PYTHON=python, SPARK_LOCAL_IP="127.0.0.1")
    assert done.said.pop() == str(WORKERS)
    assert "pyspark.daemon" in (folder / "calls").read_text()
    return done
