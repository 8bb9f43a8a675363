"""`make demo` finishes, kills a worker, and proves that nothing was lost."""

import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_GUARD_S

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_demo_proves_that_nothing_acknowledged_was_lost(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, DEMO, "--folder", tmp_path / "files"],
        capture_output=True, text=True, timeout=4 * HANG_GUARD_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.rstrip().endswith("Nothing acknowledged was lost.")
    assert "kill -9" in run.stdout
    assert "answers_missing" in run.stdout
    counts = re.findall(r"acknowledged +(\d+) +stored +(\d+) +lost (\d+) +doubled (\d+)", run.stdout)
    assert len(counts) == 2  # the bus and the queue of act 1
    for acknowledged, stored, lost, doubled in counts:
        assert int(stored) >= int(acknowledged) > 0
        assert (lost, doubled) == ("0", "0")
    (act_2,) = re.findall(
        r"acknowledged +(\d+) +done +(\d+) +lost (\d+) +doubled (\d+) +wrong (\d+)", run.stdout
    )
    assert act_2 == ("24", "24", "0", "0", "0")
    (act_3,) = re.findall(
        r"stored +(\d+) +after kill -9 +(\d+) +done +(\d+) +lost (\d+) +doubled (\d+)", run.stdout
    )
    assert act_3 == ("9", "9", "9", "0", "0")
    assert "private mailbox: 9\n" in run.stdout
    assert run.stdout.count(" kill -9     ") == 3
    (act_4,) = re.findall(
        r"accepted +(\d+) +completed +(\d+) +quarantined (\d+) +lost (\d+) +doubled (\d+)", run.stdout
    )
    assert act_4 == ("421", "420", "1", "0", "0")
    for line in (
        r"zen +is served +after \d+ ms; \d of \d{2,3} waiting messages went first",
        r"acme +progress +400 of 400 done",
        r"poison +kills +worker process \d+; the supervisor starts another one",
        r"poison +quarantined +after it ran alone and killed 3 processes",
        r"neighbours +finished +6 of 6;",
        r"slack +is down +\d calls failed, so its breaker is open",
        r"github +is up +5 of 5 calls done meanwhile",
        r"slack +is up +its breaker is closed",
        r"zen +replayed +3 orders, all done; charged 3 times in all",
        r"planner: the joined answer is 'PLAN THE DAY '",
        r"writer: the stream is \(acknowledgment\) TO BE OR NOT \(stream_complete\)",
        r"planner: resumed in epoch \d+, and the tool found weather",
        r"critic: has a message from planner",
        r"agents that still wait for an answer: 0",
        r"step +failed for good +step 3: the train is full",
        r"step +done +3 of 5, in another way",
        r"recovery +used +rollback_to_checkpoint; ",
        r"proof +of the goal +mail sent 1 time, charge undone 1 time",
    ):
        assert re.search(line, run.stdout), line
    assert int(re.findall(r"that were refused: (\d+)", run.stdout)[0]) > 0
    for step in ("SIGSTOP", "took over", "SIGCONT", "all done", "lease_lapsed"):
        assert step in run.stdout
    ((told, given),) = re.findall(
        r"events in the stream (\d+), numbers given by their sources (\d+)", run.stdout
    )
    assert int(told) == int(given) > 100
    assert "about 20 seconds on two idle cores" in run.stdout[: run.stdout.index("$ postroom pipeline run")]
    (act_6,) = re.findall(r"in the tables (\d+), messages (\d+), tables (\d+), segments left 0", run.stdout)
    assert act_6[0] == told
    assert (tmp_path / "files" / "report.html").read_text().startswith("<!doctype html>")
    assert f"The report: {(tmp_path / 'files' / 'report.html').as_uri()}" in run.stdout
    commands = run.stdout[run.stdout.index(f"Everything stays in {tmp_path / 'files'}") :].splitlines()[1:-2]
    assert [command.split()[1:3] for command in commands] == [
        ["audit", "tail"], ["audit", "query"], ["pipeline", "status"], ["pipeline", "report"],
        ["bus", "tail"], ["queue", "status"], ["tasks", "status"],
    ]  # fmt: skip
    for command in commands:
        copied = subprocess.run(
            ["/bin/sh", "-c", command], cwd="/", env={"HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=4 * HANG_GUARD_S, check=False,
        )  # fmt: skip
        assert (copied.returncode, bool(copied.stdout)) == (0, True), f"{command}\n{copied.stderr}"


def test_demo_refuses_a_folder_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    run = subprocess.run(
        [sys.executable, DEMO, "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert run.returncode == 1
    assert "is not empty" in run.stderr
    assert (tmp_path / "mine").read_text() == "precious"
