"""The program that the harness runs for each decision: it performs the actions with the GitHub API.

It may run twice for one decision, if the harness is killed after an action and before it has recorded it.
Labels are a set, so adding them again changes nothing. A comment contains the decision's id, so that it is
posted only once.
"""

import json
import os
import sys
import urllib.request
from typing import Any

TIMEOUT_S = 10.0


def call(method: str, path: str, body: Any = None) -> Any:
    """One call of the API. An error response ends this program, and the attempt fails."""
    request = urllib.request.Request(  # noqa: S310 - the address is configured, not received
        os.environ["GITHUB_API_URL"] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Accept": "application/vnd.github+json", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - see above
        return json.load(answer)


def act(job: dict[str, Any]) -> None:
    """Perform every action of a decision."""
    issue = f"/repos/{job['payload']['repo']}/issues/{job['payload']['issue']['number']}"
    mark = f"<!-- {job['decision_id']} -->"
    for action in job["decision"]["actions"]:
        match action:
            case {"type": "add_labels", "labels": labels}:
                call("POST", f"{issue}/labels", {"labels": labels})
            case {"type": "comment", "body": text}:
                if not any(mark in comment["body"] for comment in call("GET", f"{issue}/comments")):
                    call("POST", f"{issue}/comments", {"body": f"{text}\n\n{mark}"})
            case _:
                sys.exit(f"the action {action!r} is not allowed")


if __name__ == "__main__":
    act(json.load(sys.stdin))
