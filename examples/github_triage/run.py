"""The whole way of an issue: event, queue, triage agent, decision, and the harness that executes it.

    python examples/github_triage/run.py

Each part is a local process, and GitHub is a small stand-in. One call of the API fails, one event is
repeated, and the agent is killed and started again. In the end every issue has its label and one comment.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fake_github import FakeGitHub

from postroom import Tasks

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TIME_LIMIT_S = 600.0
EXPECTED = {11: {"bug"}, 12: {"enhancement"}, 13: {"question"}}  # 14 has no text to judge: skipped


def start(*command: object, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def until_done(data: Path) -> dict[str, int]:
    """Wait until every task is done; returns the number of tasks by state."""
    deadline = time.monotonic() + TIME_LIMIT_S
    counts: dict[str, int] = {}
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        while time.monotonic() < deadline:
            states = tasks.status().agents["triage"].states
            counts = {str(state): count for state, count in states.items() if count}
            if set(counts) == {"DONE"}:
                return counts
            time.sleep(0.1)
    sys.exit(f"not every task was done in time: {counts}")


def tour(folder: Path, github: FakeGitHub) -> None:
    data = folder / "run"
    added = subprocess.run(
        [BIN / "postroom", "tasks", "agent", "add", "triage", "--data", data], check=True, capture_output=True
    )
    token = json.loads(added.stdout)["token"]
    act = shlex.join([sys.executable, str(HERE / "act_on_decision.py")])
    serve = [BIN / "postroom", "tasks", "serve", "--data", data, "--port", "0", "--execute", act]
    agent = [sys.executable, HERE / "triage_agent.py"]

    subprocess.run([sys.executable, HERE / "event_source.py", "--data", data], check=True)
    harness = start(*serve, GITHUB_API_URL=github.url)
    running = [harness]
    try:
        assert harness.stdout is not None
        url = json.loads(harness.stdout.readline())["url"]
        first = start(*agent, HARNESS_URL=url, POSTROOM_TOKEN=token)
        running.append(first)
        time.sleep(0.3)
        first.kill()  # at any point of its work
        print("the agent was killed and started again", flush=True)
        running.append(start(*agent, HARNESS_URL=url, POSTROOM_TOKEN=token))
        print("tasks:", until_done(data))
    finally:
        for process in running:
            process.terminate()
            process.communicate()


def main() -> None:
    github = FakeGitHub()
    threading.Thread(target=github.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="postroom-triage-") as folder:
        tour(Path(folder), github)
    for number, labels in sorted(github.labels.items()):
        print(f"issue {number}: {', '.join(sorted(labels))}, {len(github.comments[number])} comment")
    assert dict(github.labels) == EXPECTED
    assert all(len(github.comments[number]) == 1 for number in EXPECTED)
    assert set(github.comments) == set(EXPECTED)
    github.server_close()
    print("Every issue was handled once.")


if __name__ == "__main__":
    main()
