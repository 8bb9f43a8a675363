"""postroom: logs, mailboxes and task queues for AI agents that survive crashes and are readable for a person.

Names are imported on first use, so that using one contract does not load the dependencies of another.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.client.mail import Mail
    from postroom.contracts.audit import Audit
    from postroom.contracts.bus import Bus
    from postroom.contracts.queue import Queue
    from postroom.contracts.tasks.tasks import Tasks
    from postroom.core.formats.queuewire import TOPICS
    from postroom.core.goals.advice import Advice
    from postroom.engine import (
        AgentRules,
        Backpressure,
        Breaker,
        Coordinator,
        Guard,
        Handle,
        Organization,
        Policy,
        Retry,
    )
    from postroom.errors import (
        AgentReplaced,
        Bounced,
        CoordinatorStopped,
        EffectUnknown,
        GuardTripped,
        KeyReused,
        LockTimeout,
        MailRefused,
        MailUnavailable,
        MessageFailed,
        Overloaded,
        PostroomError,
        QueueDisabledError,
        QueueError,
        QueueFull,
        RateLimited,
        Rejected,
        ResultGone,
        SinceIdNotFound,
        StaleLease,
        StreamRestarted,
        TokensExhausted,
        ToolFailed,
        TopicError,
        Unavailable,
        UnknownTask,
        UnknownType,
        UnsupportedVersion,
        ValidationError,
        WrongState,
    )
    from postroom.goals.advisers.adviser import Adviser, RuleAdviser
    from postroom.goals.advisers.http_adviser import HttpAdviser
    from postroom.goals.engine import Engine
    from postroom.goals.graph.graph import Graph
    from postroom.message import DEFAULT_BODY_THRESHOLD, BusMessage
    from postroom.sandbox import Sandbox
    from postroom.stores.open import open_store

    __version__: str

__all__ = [
    "DEFAULT_BODY_THRESHOLD",
    "TOPICS",
    "Advice",
    "Adviser",
    "AgentReplaced",
    "AgentRules",
    "Audit",
    "Backpressure",
    "Bounced",
    "Breaker",
    "Bus",
    "BusMessage",
    "Coordinator",
    "CoordinatorStopped",
    "EffectUnknown",
    "Engine",
    "Graph",
    "Guard",
    "GuardTripped",
    "Handle",
    "HttpAdviser",
    "KeyReused",
    "LockTimeout",
    "Mail",
    "MailRefused",
    "MailUnavailable",
    "MessageFailed",
    "Organization",
    "Overloaded",
    "Policy",
    "PostroomError",
    "Queue",
    "QueueDisabledError",
    "QueueError",
    "QueueFull",
    "RateLimited",
    "Rejected",
    "ResultGone",
    "Retry",
    "RuleAdviser",
    "Sandbox",
    "SinceIdNotFound",
    "StaleLease",
    "StreamRestarted",
    "Tasks",
    "TokensExhausted",
    "ToolFailed",
    "TopicError",
    "Unavailable",
    "UnknownTask",
    "UnknownType",
    "UnsupportedVersion",
    "ValidationError",
    "WrongState",
    "__version__",
    "open_store",
]

_HOME = {
    "Sandbox": "postroom.sandbox",
    "Graph": "postroom.goals.graph.graph",
    "Advice": "postroom.core.goals.advice",
    "HttpAdviser": "postroom.goals.advisers.http_adviser",
    "RuleAdviser": "postroom.goals.advisers.adviser",
    "Adviser": "postroom.goals.advisers.adviser",
    "Coordinator": "postroom.engine",
    "AgentRules": "postroom.engine",
    "AgentReplaced": "postroom.errors",
    "Bounced": "postroom.errors",
    "CoordinatorStopped": "postroom.errors",
    "StreamRestarted": "postroom.errors",
    "Retry": "postroom.engine",
    "Policy": "postroom.engine",
    "Organization": "postroom.engine",
    "Handle": "postroom.engine",
    "Guard": "postroom.engine",
    "Engine": "postroom.goals.engine",
    "Breaker": "postroom.engine",
    "Backpressure": "postroom.engine",
    "ValidationError": "postroom.errors",
    "UnsupportedVersion": "postroom.errors",
    "UnknownType": "postroom.errors",
    "ResultGone": "postroom.errors",
    "RateLimited": "postroom.errors",
    "Overloaded": "postroom.errors",
    "MessageFailed": "postroom.errors",
    "KeyReused": "postroom.errors",
    "GuardTripped": "postroom.errors",
    "EffectUnknown": "postroom.errors",
    "Audit": "postroom.contracts.audit",
    "StaleLease": "postroom.errors",
    "Tasks": "postroom.contracts.tasks.tasks",
    "UnknownTask": "postroom.errors",
    "open_store": "postroom.stores.open",
    "QueueFull": "postroom.errors",
    "WrongState": "postroom.errors",
    "Bus": "postroom.contracts.bus",
    "BusMessage": "postroom.message",
    "DEFAULT_BODY_THRESHOLD": "postroom.message",
    "LockTimeout": "postroom.errors",
    "Mail": "postroom.client.mail",
    "MailRefused": "postroom.errors",
    "MailUnavailable": "postroom.errors",
    "PostroomError": "postroom.errors",
    "Queue": "postroom.contracts.queue",
    "QueueDisabledError": "postroom.errors",
    "QueueError": "postroom.errors",
    "Rejected": "postroom.errors",
    "SinceIdNotFound": "postroom.errors",
    "TOPICS": "postroom.core.formats.queuewire",
    "TokensExhausted": "postroom.errors",
    "ToolFailed": "postroom.errors",
    "TopicError": "postroom.errors",
    "Unavailable": "postroom.errors",
}


_REGISTERED = {"Engine": "postroom.server.telemetry.worker_telemetry"}
"""Modules that add themselves to what a name stands for."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("postroom")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        if name in _REGISTERED:
            import_module(_REGISTERED[name])
        globals()[name] = value
        return value
    msg = f"module 'postroom' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
