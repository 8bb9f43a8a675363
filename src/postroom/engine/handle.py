"""What `submit` returns: a handle to wait for the answer, to cancel, and to ask why nothing happens."""

from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from postroom.engine.agents.answer_parts import Position, read_on, whole_answer
from postroom.engine.explanation import explain
from postroom.engine.rules.cells import Part

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

T = TypeVar("T")


class Wait(Protocol):
    """Runs a coroutine to its end, from a thread without an event loop."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Return its result."""


LOOK_S = 0.1  # how often a reader of parts looks for new ones


class Handle:
    """A submitted message."""

    def __init__(self, core: "EngineCore", message_id: str, *, duplicate: bool = False) -> None:
        self._core = core
        self.message_id = message_id
        self.duplicate = duplicate
        """Whether the message was accepted by an earlier submit with the same key."""

    def __repr__(self) -> str:
        return f"Handle({self.message_id!r})"

    async def result(self, timeout_s: float | None = None) -> Any:
        """The result of the message, when it has one; a streamed answer is joined.

        Raises `MessageFailed` when the message ended without a result, and `TimeoutError` after `timeout_s`.
        """
        await self._core.wakeups.wait_for_end(self.message_id, timeout_s)
        return await self._core.commits.read(partial(whole_answer, message_id=self.message_id))

    async def cancel(self) -> None:
        """As `Engine.cancel`."""
        await self._core.commits.write(lambda operations: operations.cancel(self.message_id), makes_room=True)

    async def explain(self) -> str:
        """As `Engine.explain`."""
        core = self._core
        return await core.commits.read(
            lambda operations: explain(operations, core.policy, self.message_id, core.handlers.registered)
        )

    async def __aiter__(self) -> AsyncIterator[Part]:
        """The parts of the answer as they come: acknowledgment, progress and chunks, then the end."""
        async for part in follow(self._core, self.message_id):
            yield part


async def follow(core: "EngineCore", message_id: str) -> AsyncIterator[Part]:
    """The parts of an answer from the beginning, as they come."""
    position = Position()
    while True:
        parts, is_complete = await core.commits.read(
            partial(read_on, message_id=message_id, position=position)
        )
        for at, part in parts:
            position = at
            yield part
        if is_complete:
            return
        if not parts:
            await core.wakeups.wait_for_news(message_id, LOOK_S)


class BlockingHandle:
    """A message that was submitted. Each call waits."""

    def __init__(self, handle: Handle, wait: Wait) -> None:
        self._handle = handle
        self._wait = wait
        self.message_id = handle.message_id
        self.duplicate = handle.duplicate

    def result(self, timeout_s: float | None = None) -> Any:
        """As `Handle.result`."""
        return self._wait(self._handle.result(timeout_s=timeout_s))

    def cancel(self) -> None:
        """As `Handle.cancel`."""
        self._wait(self._handle.cancel())

    def explain(self) -> str:
        """As `Handle.explain`."""
        return self._wait(self._handle.explain())

    def __iter__(self) -> Iterator[Part]:
        """The parts of the answer as they come."""
        parts = aiter(self._handle)

        async def following() -> Part | None:
            return await anext(parts, None)

        while (part := self._wait(following())) is not None:
            yield part
