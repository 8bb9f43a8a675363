"""A standalone cluster on loopback, of what the pip package of Spark brings along, and a bare Python."""

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

import pyspark

from postroom.pipeline.tables import Tables

WORKERS = 2
LOOK_EVERY_S = 0.1
SPARK_CLASS = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
DEPLOY = "org.apache.spark.deploy"
HERE = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
DAEMON = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_MEMORY": "192m",
    "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "SPARK_NO_DAEMONIZE": "1",
}


class Daemon:
    """A part of the cluster, and its log."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, *words: str) -> None:
        self._log = folder / f"{name}.log"
        environment = {**os.environ, **DAEMON, "SPARK_LOG_DIR": str(folder)}
        with self._log.open("wb") as sink:
            self._process = stack.enter_context(
                subprocess.Popen([SPARK_CLASS, *words], stdout=sink, stderr=sink, env=environment)
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


def run_on_cluster(folder: Path, events: Path, *words: str) -> Tables:
    """The tables of a history, made by two workers whose Python has no postroom."""
    python = bare_python(folder)
    environment = {**os.environ, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    with standalone(folder) as master:
        job = [sys.executable, "-m", "tests.spark.clusterjob", master, str(events), str(folder / "tables")]
        found = subprocess.run([*job, *words], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(WORKERS)]
    assert "pyspark.daemon" in (folder / "calls").read_text()
    return Tables(folder / "tables")
