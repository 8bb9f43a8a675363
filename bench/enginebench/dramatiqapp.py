"""The dramatiq application: `dramatiq enginebench.dramatiqapp` reads its broker from the environment.

Its queues are durable and its messages persistent as it comes; it acknowledges a message after it ran.
"""

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from enginebench import finish

BROKER, ACTOR = "ENGINEBENCH_DRAMATIQ_BROKER", "note"

if BROKER in os.environ:
    dramatiq.set_broker(RabbitmqBroker(url=os.environ[BROKER]))

    @dramatiq.actor(actor_name=ACTOR)
    def note(run: str, number: int, count: int) -> None:
        finish.note(run, number, count)
