"""The event source: recorded issue events become tasks. A repeated event is one task."""

import argparse
import json
from pathlib import Path

from postroom import Tasks

AGENT = "triage"
RECORDED = Path(__file__).parent / "events.json"


def enqueue_events(tasks: Tasks, recorded: Path = RECORDED) -> list[str]:
    """Store a task for each opened issue; returns one id for each event, also for repeated ones."""
    events = json.loads(recorded.read_text("utf-8"))
    opened = [event for event in events if event["payload"]["action"] == "opened"]
    return tasks.enqueue_many(
        {
            "agent": AGENT,
            "type": "issue.triage",
            "idempotency_key": event["delivery"],
            "payload": {
                "repo": event["payload"]["repository"]["full_name"],
                "issue": event["payload"]["issue"],
            },
        }
        for event in opened
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the data folder of the harness")
    with Tasks.open(f"sqlite:///{parser.parse_args().data / 'queue.db'}") as tasks:
        ids = enqueue_events(tasks)
    print(f"{len(ids)} events of opened issues, {len(set(ids))} tasks")


if __name__ == "__main__":
    main()
