"""Clients that an agent embeds: `TaskClient` for a harness, and `postroom.client.mail` for a mail server.

Rule 1: importing this package needs the standard library and msgspec alone; `mail` is imported by name.
"""

from postroom.client.tasks import Task, TaskClient, TaskView
from postroom.client.worker import StopWork, TaskEnd, TaskFailed
from postroom.errors import (
    HarnessRefused,
    InvalidMessage,
    NoResult,
    NotAllowed,
    NotHeld,
    PostroomError,
    Rejected,
    StaleLease,
    Unavailable,
    UnknownTask,
    Unreachable,
    WrongState,
)

__all__ = [
    "HarnessRefused",
    "InvalidMessage",
    "NoResult",
    "NotAllowed",
    "NotHeld",
    "PostroomError",
    "Rejected",
    "StaleLease",
    "StopWork",
    "Task",
    "TaskClient",
    "TaskEnd",
    "TaskFailed",
    "TaskView",
    "Unavailable",
    "UnknownTask",
    "Unreachable",
    "WrongState",
]
