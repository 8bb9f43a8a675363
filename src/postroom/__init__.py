"""postroom: logs, mailboxes and task queues for AI agents that survive crashes and are readable for a person.

Names are imported on first use, so that using one contract does not load the dependencies of another.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.calls.submit import SubmitFields
    from postroom.client.mail import Mail
    from postroom.contracts.audit import Audit
    from postroom.contracts.bus import Bus
    from postroom.contracts.queue import Queue
    from postroom.contracts.tasks.tasks import Tasks
    from postroom.core.formats.queuewire import TOPICS
    from postroom.core.goals.advice import Advice
    from postroom.engine import (
        NEVER,
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
        BudgetSpent,
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
    "NEVER",
    "TOPICS",
    "Advice",
    "Adviser",
    "AgentReplaced",
    "AgentRules",
    "Audit",
    "Backpressure",
    "Bounced",
    "Breaker",
    "BudgetSpent",
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
    "SubmitFields",
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

_NAMES_OF = {
    "calls.submit": "SubmitFields",
    "client.mail": "Mail",
    "contracts.audit": "Audit",
    "contracts.bus": "Bus",
    "contracts.queue": "Queue",
    "contracts.tasks.tasks": "Tasks",
    "core.formats.queuewire": "TOPICS",
    "core.goals.advice": "Advice",
    "engine": "NEVER AgentRules Backpressure Breaker Coordinator Guard Handle Organization Policy Retry",
    "goals.advisers.adviser": "Adviser RuleAdviser",
    "goals.advisers.http_adviser": "HttpAdviser",
    "goals.engine": "Engine",
    "goals.graph.graph": "Graph",
    "message": "DEFAULT_BODY_THRESHOLD BusMessage",
    "sandbox": "Sandbox",
    "stores.open": "open_store",
}
"""Names by module. All others are errors."""
_HOME = {name: f"postroom.{module}" for module, names in _NAMES_OF.items() for name in names.split()}
_REGISTERED = {"Engine": "postroom.server.telemetry.worker_telemetry"}
"""Modules that add themselves to what a name stands for."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("postroom")
    if name not in __all__:
        raise AttributeError(f"module 'postroom' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "postroom.errors")), name)
    if name in _REGISTERED:
        import_module(_REGISTERED[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
