"""A task queue without a server: enqueue, claim, complete, and read the result."""

import tempfile

from postroom import StaleLease, Tasks

with tempfile.TemporaryDirectory() as folder, Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
    task_id = tasks.enqueue(agent="triage", payload={"issue": 7}, idempotency_key="delivery-93")
    again = tasks.enqueue(agent="triage", payload={"issue": 7}, idempotency_key="delivery-93")
    print("stored once:", again == task_id)

    [task] = tasks.claim(agent="triage", lease_s=60.0)
    print("working on:", task.payload, "attempt", task.attempt)
    tasks.complete(task.task_id, task.lease, {"label": "bug"})
    try:
        tasks.complete(task.task_id, task.lease - 1, {"label": "late"})
    except StaleLease:
        print("a stale lease changes nothing:", tasks.get(task_id).result)
