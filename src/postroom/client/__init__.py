"""Clients that an agent embeds: `TaskClient` for a harness, and `postroom.client.mail` for a mail server.

Rule 1: importing this package needs the standard library and msgspec alone; `mail` is imported by name.
"""

from postroom.client.tasks import (
    InvalidArgument,
    NoResult,
    NotAllowed,
    NotHeld,
    Refused,
    StaleLease,
    StopWork,
    Task,
    TaskClient,
    TaskClientError,
    TaskEnd,
    TaskFailed,
    TaskInfo,
    UnknownTask,
    Unreachable,
    WrongState,
)

__all__ = [
    "InvalidArgument",
    "NoResult",
    "NotAllowed",
    "NotHeld",
    "Refused",
    "StaleLease",
    "StopWork",
    "Task",
    "TaskClient",
    "TaskClientError",
    "TaskEnd",
    "TaskFailed",
    "TaskInfo",
    "UnknownTask",
    "Unreachable",
    "WrongState",
]
