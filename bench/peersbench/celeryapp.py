"""The Celery application of the bench: one task that does nothing, acknowledged after it ran.

`celery -A peersbench.celeryapp worker` reads the broker and the file for time marks from the environment.
"""

import os
import time
from typing import Any

from celery import Celery  # type: ignore[import-untyped]

BROKER, MARKS = "PEERS_BROKER", "PEERS_MARKS"


def application(broker: str) -> Celery:
    """As durable as Tasks: persistent messages, publisher confirms, one acknowledgement after each task."""
    made = Celery("peers", broker=broker)
    made.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={"confirm_publish": True},
        task_default_delivery_mode="persistent",
    )
    return made


app = application(os.environ.get(BROKER, "memory://"))


@app.task(name="triage")  # type: ignore[untyped-decorator]
def triage(_payload: Any, mark: bool = False) -> None:
    """Does nothing; a marked task records when it ran."""
    if mark:
        with open(os.environ[MARKS], "a") as file:
            file.write(f"{time.perf_counter_ns()}\n")
