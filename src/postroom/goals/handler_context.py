"""What a handler gets from goals and sandboxes, besides what `Context` of the queue gives it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from postroom.core.goals.advice import ReversalClass
from postroom.core.tokens.tokens import Grant
from postroom.engine.core import EngineCore
from postroom.engine.handle import Wait
from postroom.engine.messages import Message
from postroom.engine.work.context import Context, ThreadContext
from postroom.goals.advisers.questions import context_of, prompt_additions, reversal_class_of
from postroom.goals.context_provider import TOKEN_BUDGET, BuiltContext, ContextProvider
from postroom.sandbox.pools import BorrowedSandbox, Sandboxes
from postroom.sandbox.sandbox import BlockingSandbox


class Sources(Protocol):
    """Where a context gets its parts: an `Engine`."""

    context_provider: ContextProvider
    sandboxes: Sandboxes


class HandlerContext(Context):
    """One attempt of a message, for an `async` handler."""

    def __init__(
        self,
        sources: Sources,
        core: EngineCore,
        message: Message,
        lease: int,
        attempt: int,
        grant: Grant | None = None,
    ) -> None:
        super().__init__(core, message, lease, attempt, grant)
        self._sources = sources

    async def goal_context(self) -> tuple[Any, int]:
        """The context of the goal, and its version: see `engine.goals.context`."""
        return await context_of(self._core.commits, self.message.goal_id, self.message.org_id)

    async def build_context(self, token_budget: int = TOKEN_BUDGET) -> BuiltContext:
        """What fits into a budget of tokens: see `ContextProvider`."""
        return await self._sources.context_provider.build(self.message, token_budget)

    def sandbox(self) -> BorrowedSandbox:
        """A sandbox for the work of this message, in an `async with` block: see `engine.sandboxes`."""
        return self._sources.sandboxes.sandbox(self.message)

    async def prompt_additions(self) -> list[str]:
        """What recovery has added to the prompt of the message's agent."""
        return await prompt_additions(self._core.commits, self.message)

    async def _reversal_class(self, key: str, reversal: Any) -> ReversalClass | None:
        return await reversal_class_of(self._core.commits, self.message, key, reversal)

    def in_thread(self, wait: Wait) -> "ThreadHandlerContext":
        return ThreadHandlerContext(self, wait)


class ThreadHandlerContext(ThreadContext):
    """As `HandlerContext`, for a plain handler, which runs in a thread. Its calls block."""

    _context: HandlerContext

    def goal_context(self) -> tuple[Any, int]:
        """As `HandlerContext.goal_context`."""
        found: tuple[Any, int] = self._wait(self._context.goal_context())
        return found

    def build_context(self, token_budget: int = TOKEN_BUDGET) -> BuiltContext:
        """As `HandlerContext.build_context`."""
        built: BuiltContext = self._wait(self._context.build_context(token_budget))
        return built

    @contextmanager
    def sandbox(self) -> Iterator[BlockingSandbox]:
        """As `HandlerContext.sandbox`, for a `with` block."""
        borrowed = self._context.sandbox()
        sandbox = self._wait(borrowed.__aenter__())
        try:
            yield BlockingSandbox(sandbox, self._wait)
        finally:
            self._wait(borrowed.__aexit__())

    def prompt_additions(self) -> list[str]:
        """As `HandlerContext.prompt_additions`."""
        return list(self._wait(self._context.prompt_additions()))
