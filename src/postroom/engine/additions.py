"""Hooks of one engine, which the layers above fill in. A plain queue has none."""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from postroom.engine.messages import Message
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.operations import Submitted
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.stores.transaction import Transaction

Submit: TypeAlias = Callable[[list[Any]], Awaitable[list[Submitted]]]
NoteOutcome: TypeAlias = Callable[[Outcome | None], None]


class EngineTelemetry(Protocol):
    """Notes what an engine does."""

    async def send(self, messages: Sequence[Mapping[str, Any]], submit: Submit) -> list[Submitted]:
        """Call `submit` with the messages, each with the trace context under which it is sent."""

    def received(self, claimed: Sequence[Claimed], worker_id: str, started_ns: int) -> None:
        """A worker has claimed messages, in a commit that began at `started_ns`."""

    def processing(self, claimed: Claimed, worker_id: str) -> AbstractContextManager[NoteOutcome]:
        """The attempt of a message during a block. The block reports its outcome."""

    def in_child(self) -> None:
        """This process was forked for a handler: collect its spans."""

    def from_child(self) -> bytes:
        """In such a process: the spans of the handler."""

    def add(self, spans: bytes) -> None:
        """Export the spans of a handler in a forked process."""

    def settled(self, outcomes: Sequence[Outcome], stale: Sequence[str], started_ns: int) -> None:
        """Outcomes were committed; those of `stale` messages came too late."""


async def noted(
    telemetry: EngineTelemetry, claimed: Claimed, worker_id: str, attempt: Awaitable[Outcome | None]
) -> Outcome | None:
    """Run an attempt, and report its outcome."""
    with telemetry.processing(claimed, worker_id) as note:
        outcome = await attempt
        note(outcome)
    return outcome


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
