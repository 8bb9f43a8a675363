"""What the layers above add to the work of one engine. A queue alone has none of it."""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

from postroom.engine.messages import Message
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.engine.telemetry import EngineTelemetry
from postroom.stores.transaction import Transaction


class Additions:
    """Set by the class that opens the engine, before its workers run."""

    def __init__(self) -> None:
        self.telemetry: EngineTelemetry | None = None
        """None while nothing is exported."""
        self.new_context: Callable[..., Any] | None = None
        """Makes the context of an attempt from the arguments of `Context`; None means a `Context`."""
        self.before: dict[str, Callable[[Message], Awaitable[None]]] = {}
        """What runs before the handler of a message type. An exception is the outcome of the attempt."""
        self.on_finish: list[Callable[[Transaction, Policy, Sequence[Outcome], Collection[str]], None]] = []
        """Called in the transaction of outcomes, with the ids of messages whose outcome came too late."""
        self.keeps_priority: Callable[[Message, Exception], Awaitable[bool]] | None = None
        """Whether the retry of a message keeps its priority; None leaves it to the policy."""
        self.loops: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Background loops of every worker."""
        self.closing: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What the last worker of a process closes."""
