"""A command ends at the first signal, in one sentence, and its JVM with it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from postroom.pipeline.spark import event_logs
from tests.spark.commands import begun
from tests.spark.conftest import TablesOf

LOOK_S = 0.1
AWAY_S = 20.0


def members(group: int) -> list[str]:
    """The processes of a group that are not over."""
    told = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=2) for line in told.stdout.splitlines()]
    return [args for pgid, stat, args in lines if int(pgid) == group and not stat.startswith("Z")]


def stopped(
    send: Callable[[int], None],
    seen: str,
    wait_s: float,
    *words: object,
    meanwhile: Callable[[list[str]], None] = lambda _: None,
) -> tuple[int, list[str]]:
    """Its exit code and what it says, when it gets a signal some time after it says something."""
    before: list[str] = []
    with begun(seen, *words, before=before) as process:
        assert process.stderr is not None
        meanwhile(before)
        time.sleep(wait_s)
        send(process.pid)
        try:
            rest = process.stderr.read().splitlines()
            code = process.wait(AWAY_S)
            assert members(process.pid) == []
        finally:
            if members(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    return code, rest


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def press_ctrl_c_twice(pid: int) -> None:
    for _ in range(2):
        os.killpg(pid, signal.SIGINT)
        time.sleep(LOOK_S)


def look_at_the_ui(said: list[str]) -> None:
    """It listens on loopback, and shows the job."""
    [url] = [line.partition("Spark's UI: ")[2].strip() for line in said if "Spark's UI: " in line]
    assert url.startswith("http://127.0.0.1:")
    with urlopen(f"{url}/api/v1/applications") as answer:  # noqa: S310 - on loopback
        assert [application["name"] for application in json.load(answer)] == ["postroom"]


def test_a_stream_ends_in_the_middle_of_a_table(tables_of: TablesOf, tmp_path: Path) -> None:
    events, _ = tables_of()
    words = ("stream", "--events", events, "--tables", tmp_path, "--every", 5, "--master", "local[2]")
    code, rest = stopped(terminate, "  silver_events", 0.5, *words, meanwhile=look_at_the_ui)
    assert code == 0, rest  # as every follower's
    assert not (tmp_path / event_logs.FOLDER).exists()  # one without an end would fill the disk
    assert "postroom: interrupted" not in rest
    assert all(line.startswith("postroom: ") for line in rest)


def test_a_command_ends_while_spark_starts(tables_of: TablesOf) -> None:
    """Left alone, such a JVM would never notice that nobody wants it."""
    _, tables = tables_of()
    words = ("retain", "--tables", tables.folder, "--keep-days", 9999, "--dry-run", "--master", "local[2]")
    code, rest = stopped(press_ctrl_c_twice, "starting Spark", 0.3, *words)
    assert (code, rest[-1]) == (1, "postroom: interrupted")
    assert "Traceback" not in "".join(rest)
