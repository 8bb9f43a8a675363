"""The package `zos_agent_mq`: programs written for that library run on the installed distribution."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import postroom
import zos_agent_mq

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from zos_agent_mq import DEFAULT_BODY_THRESHOLD, TOPICS, Queue, QueueDisabledError, QueueError, TopicError
import zos_agent_mq
assert zos_agent_mq.__file__.startswith(sys.argv[1]), zos_agent_mq.__file__

q = Queue()
msg_id = q.send("ask", "What is the build status?", to="builder", ttl_s=600)
for m in q.poll("builder"):
    print(m["from"], m["topic"], m["body"])
    q.send("answer", "Build green.", to=m["from"], reply_to=m["msg_id"])
try:
    q.send("unknown", "x")
except TopicError as error:
    assert isinstance(error, QueueError) and isinstance(error, ValueError)
assert issubclass(QueueDisabledError, RuntimeError) and DEFAULT_BODY_THRESHOLD == 3584
assert TOPICS == frozenset({"ask", "answer", "broadcast", "spawn-request", "status"})
"""


def test_package_exports_the_same_objects() -> None:
    for name in zos_agent_mq.__all__:
        assert getattr(zos_agent_mq, name) is getattr(postroom, name)


def test_program_for_zos_agent_mq_runs_on_the_wheel(tmp_path: Path) -> None:
    hatchling: list[Any] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(hatchling, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("postroom-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert (installed / "zos_agent_mq" / "py.typed").exists()
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "ZOS_MQ_ROOT": str(tmp_path / "mq")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(installed)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("anonymous ask What is the build status?\n", "")
