"""Clients that an agent embeds: `TaskClient` for a harness, `EngineClient` for the global queue.

Rule 1: importing this package needs the standard library and msgspec alone; `mail` is imported by name.
"""

from postroom.client.engine import EngineClient, MessageView
from postroom.client.tasks import Task, TaskClient, TaskView
from postroom.client.worker import StopWork, TaskEnd, TaskFailed
from postroom.errors import (
    GuardTripped,
    HarnessRefused,
    InvalidMessage,
    KeyReused,
    MessageFailed,
    NoResult,
    NotAllowed,
    NotHeld,
    Overloaded,
    PostroomError,
    Rejected,
    ResultGone,
    StaleLease,
    Unavailable,
    UnknownTask,
    UnknownType,
    Unreachable,
    UnsupportedVersion,
    ValidationError,
    WrongState,
)

__all__ = [
    "EngineClient",
    "GuardTripped",
    "HarnessRefused",
    "InvalidMessage",
    "KeyReused",
    "MessageFailed",
    "MessageView",
    "NoResult",
    "NotAllowed",
    "NotHeld",
    "Overloaded",
    "PostroomError",
    "Rejected",
    "ResultGone",
    "StaleLease",
    "StopWork",
    "Task",
    "TaskClient",
    "TaskEnd",
    "TaskFailed",
    "TaskView",
    "Unavailable",
    "UnknownTask",
    "UnknownType",
    "Unreachable",
    "UnsupportedVersion",
    "ValidationError",
    "WrongState",
]
