"""The Celery application: `celery -A enginebench.celeryapp worker` reads its broker from the environment."""

import os

from celery import Celery  # type: ignore[import-untyped]
from peersbench.celeryapp import application

from enginebench import finish

BROKER, QUEUE, TASK = "ENGINEBENCH_CELERY_BROKER", "engine", "note"
PREFETCH = 100  # more than the bench of Tasks lets it have: it is faster with it


def prefetching(broker: str) -> Celery:
    """Persistent messages, publisher confirms, and one acknowledgement after each task."""
    made = application(broker)
    made.conf.worker_prefetch_multiplier = PREFETCH
    return made


app = prefetching(os.environ.get(BROKER, "memory://"))


@app.task(name=TASK)  # type: ignore[untyped-decorator]
def note(run: str, number: int, count: int) -> None:
    finish.note(run, number, count)
