"""The triage agent: reads an issue and decides. It changes nothing itself: the harness executes decisions."""

import os
import re
from typing import Any

from postroom.client import Task, TaskClient

# A real agent would call a model here. The client sends heartbeats while such a call runs.
LABELS = {
    "bug": re.compile(r"crash|error|raises|broken", re.IGNORECASE),
    "enhancement": re.compile(r"please add|would be nice|feature", re.IGNORECASE),
    "question": re.compile(r"how do i|\?", re.IGNORECASE),
}


def triage(task: Task) -> dict[str, Any]:
    """Return a decision: what to do, why, and the actions."""
    issue = task.payload["issue"]
    text = f"{issue['title']}\n{issue['body']}"
    label = next((name for name, pattern in LABELS.items() if pattern.search(text)), None)
    if label is None:
        return {"decision": "skip", "rationale": "the text matches no label", "actions": []}
    return {
        "decision": "label_and_respond",
        "rationale": f"the text reads like a {label}",
        "actions": [
            {"type": "add_labels", "labels": [label]},
            {"type": "comment", "body": f"Thank you! This looks like a {label}."},
        ],
    }


def main() -> None:
    url, token = os.environ["HARNESS_URL"], os.environ["POSTROOM_TOKEN"]
    with TaskClient(url, agent="triage", token=token) as client:
        client.work(triage, lease_s=2.0)  # until SIGTERM; a short lease, so that the tour need not wait


if __name__ == "__main__":
    main()
