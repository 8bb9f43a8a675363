"""Clients that an agent embeds: `TaskClient` for a harness, `EngineClient` for the global queue.

Rule 1: importing this package needs the standard library and msgspec alone; `mail` is imported by name.
"""

from postroom.client.engine import EngineClient, MessageView, RemoteAgent
from postroom.client.tasks import TaskClient, TaskView
from postroom.client.worker import StopWork, Task, TaskEnd, TaskFailed
from postroom.errors import (
    AgentReplaced,
    Bounced,
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
    StreamRestarted,
    Unavailable,
    UnknownTask,
    UnknownType,
    Unreachable,
    UnsupportedVersion,
    ValidationError,
    WrongState,
)

__all__ = [
    "AgentReplaced",
    "Bounced",
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
    "RemoteAgent",
    "ResultGone",
    "StaleLease",
    "StopWork",
    "StreamRestarted",
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
