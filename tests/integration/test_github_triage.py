"""The GitHub example works from the event to the label."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_GUARD_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "github_triage" / "run.py"


def test_every_issue_is_labelled_and_answered_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "5 events of opened issues, 4 tasks",
        "the agent was killed and started again",
        "tasks: {'DONE': 4}",
        "issue 11: bug, 1 comment",
        "issue 12: enhancement, 1 comment",
        "issue 13: question, 1 comment",
        "Every issue was handled once.",
    ]
