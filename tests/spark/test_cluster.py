"""The same job on a cluster of two workers, whose Python has no postroom."""

import os
import re
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest

from postroom.pipeline.tables import Tables
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import rows_of

MESSAGES, SEED = 1_500, 11
WORKERS = 2
LOOK_EVERY_S = 0.1
SPARK_CLASS = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
DAEMON = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_MEMORY": "192m",
    "SPARK_NO_DAEMONIZE": "1",
}


def daemon(stack: ExitStack, folder: Path, name: str, said: str, *words: str) -> str:
    """Start a part of the cluster, and wait until its log says something; gives that."""
    log = folder / f"{name}.log"
    environment = {**os.environ, **DAEMON, "SPARK_LOG_DIR": str(folder)}
    with log.open("wb") as sink:
        process = stack.enter_context(
            subprocess.Popen([SPARK_CLASS, *words], stdout=sink, stderr=sink, env=environment)
        )
    stack.callback(process.kill)
    while not (found := re.search(said, log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(LOOK_EVERY_S)
    return found[1]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A standalone cluster on loopback, of what the pip package of Spark brings along."""
    deploy, here = "org.apache.spark.deploy", ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as stack:
        url = daemon(
            stack,
            tmp_path,
            "master",
            r"Starting Spark master at (spark://\S+)",
            f"{deploy}.master.Master",
            *here,
        )
        for number in range(WORKERS):
            places = ("--work-dir", str(tmp_path / f"work-{number}"), "--cores", "1", "--memory", "700m")
            words = (f"{deploy}.worker.Worker", *here, *places, url)
            daemon(stack, tmp_path, f"worker-{number}", r"Successfully registered with master (\S+)", *words)
        yield url


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python that has Spark and Arrow and no postroom, and that notes when it is called."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    [packages] = (tmp_path / "bare").glob("lib/python*/site-packages")
    # The packages alone: what a .pth file in there adds, such as an editable install, is not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {python} -I "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    subprocess.run([script, "-c", "import pyspark, pyarrow"], check=True)
    missing = subprocess.run([script, "-c", "import postroom"], check=False, capture_output=True)
    assert b"No module named 'postroom'" in missing.stderr
    (tmp_path / "calls").unlink()
    return script


def test_two_workers_without_postroom_make_the_same_tables(
    tables_of: TablesOf, master: str, bare_python: Path, tmp_path: Path
) -> None:
    events, local = tables_of(MESSAGES, SEED)
    words = ["-m", "tests.spark.clusterjob", master, str(events), str(tmp_path / "tables")]
    environment = {**os.environ, "PYSPARK_PYTHON": str(bare_python), "SPARK_LOCAL_IP": "127.0.0.1"}
    found = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(WORKERS)]
    assert "pyspark.daemon" in (tmp_path / "calls").read_text()
    made = Tables(tmp_path / "tables")
    assert made.names() == local.names()
    for name in local.names():
        assert rows_of(made, name) == rows_of(local, name), name
