"""The seam between an engine and its telemetry. Without telemetry an engine only checks for None."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.operations import Submitted
from postroom.engine.rules.outcomes import Outcome

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
