"""The queue under the names of zos-agent-mq, so that programs for that library run on postroom unchanged."""

from postroom.contracts.queue import Queue
from postroom.core.formats.queuewire import TOPICS
from postroom.errors import QueueDisabledError, QueueError, TopicError
from postroom.message import DEFAULT_BODY_THRESHOLD

__all__ = ["DEFAULT_BODY_THRESHOLD", "TOPICS", "Queue", "QueueDisabledError", "QueueError", "TopicError"]
