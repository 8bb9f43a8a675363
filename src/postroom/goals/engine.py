"""`Engine`: the global queue with goals, the knowledge graph, decisions, recovery, hooks and sandboxes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from msgspec.structs import replace

import postroom.goals.extensions  # noqa: F401 - it adds goals to the transactions of the engine
from postroom.core.tokens.tokens import Grant
from postroom.engine.blocking import BlockingPart, waits
from postroom.engine.core import EngineCore
from postroom.engine.global_queue import Blocking, GlobalQueue
from postroom.engine.handle import Wait
from postroom.engine.inline import InlineCore
from postroom.engine.messages import Message
from postroom.engine.rules.policy import CONTROL_TYPES, Policy
from postroom.engine.work.context import Context, ThreadContext
from postroom.errors import InvalidMessage, shown
from postroom.goals.advisers.adviser import Adviser
from postroom.goals.advisers.patterns import AdvisedDeadLetters
from postroom.goals.advisers.questions import (
    context_of,
    keeps_priority,
    prompt_additions,
)
from postroom.goals.builtin_handlers import BuiltIn, Hooks
from postroom.goals.context_provider import TOKEN_BUDGET, BuiltContext, ContextProvider, GoalContextProvider
from postroom.goals.decisions import Decisions
from postroom.goals.goals import Goals
from postroom.goals.graph.falkordb import FalkorGraph
from postroom.goals.graph.graph import Graph, Graphs, LedgerGraph, View
from postroom.goals.operation_registry import Conflicts
from postroom.goals.recovery import Recovery
from postroom.goals.reversals import Reversals
from postroom.sandbox.pools import BorrowedSandbox, Sandboxes
from postroom.sandbox.sandbox import BlockingSandbox
from postroom.stores.memory import MemoryStore
from postroom.stores.open import open_store
from postroom.stores.store import Store
from postroom.system.clock import Clock
from postroom.system.manual_clock import ManualClock

F = TypeVar("F", bound=Callable[..., Any])


class BlockingGoals(BlockingPart[Goals]):
    """`engine.blocking.goals`."""

    start = waits(Goals.start)
    complete = waits(Goals.complete)
    fail = waits(Goals.fail)
    rollback = waits(Goals.rollback)
    list = waits(Goals.list)
    status = waits(Goals.status)
    checkpoints = waits(Goals.checkpoints)
    effects = waits(Goals.effects)
    checkpoint = waits(Goals.checkpoint)
    context = waits(Goals.context)
    set_context = waits(Goals.set_context)


class BlockingView(BlockingPart[View]):
    """A view of `engine.blocking.graph`."""

    get = waits(View.get)
    save = waits(View.save)
    update = waits(View.update)
    neighbours = waits(View.neighbours)


class BlockingGraph:
    """`engine.blocking.graph`."""

    def __init__(self, graphs: Graphs, wait: Wait) -> None:
        self._graphs = graphs
        self._wait = wait

    def branch(self, goal_id: str, org_id: str | None = None) -> BlockingView:
        """As `Graphs.branch`."""
        return BlockingView(self._graphs.branch(goal_id, org_id), self._wait)

    def main(self, org_id: str | None = None) -> BlockingView:
        """As `Graphs.main`."""
        return BlockingView(self._graphs.main(org_id), self._wait)


class BlockingDecisions(BlockingPart[Decisions]):
    """`engine.blocking.decisions`."""

    list = waits(Decisions.list)
    show = waits(Decisions.show)
    answer = waits(Decisions.answer)
    rules = waits(Decisions.rules)
    held = waits(Decisions.held)
    forget = waits(Decisions.forget)


class BlockingConflicts(BlockingPart[Conflicts]):
    """`engine.blocking.conflicts`."""

    active = waits(Conflicts.active)
    waiting = waits(Conflicts.waiting)


class BlockingEngine(Blocking):
    """`engine.blocking`, with goals, the graph, decisions and conflicts."""

    def __init__(self, engine: "Engine") -> None:
        super().__init__(engine)
        self.goals = BlockingGoals(engine.goals, self.wait)
        self.graph = BlockingGraph(engine.graph, self.wait)
        self.decisions = BlockingDecisions(engine.decisions, self.wait)
        self.conflicts = BlockingConflicts(engine.conflicts, self.wait)


class ContextSources(Protocol):
    """Where a context gets its parts: an `Engine`."""

    context_provider: ContextProvider
    sandboxes: Sandboxes


class HandlerContext(Context):
    """One attempt of a message, for an `async` handler."""

    def __init__(
        self,
        sources: ContextSources,
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


class Engine(GlobalQueue):
    """The messages and goals of all organizations in one store, and the workers of this process."""

    dlq: AdvisedDeadLetters

    def __init__(
        self,
        store: Store,
        policy: Policy | None = None,
        *,
        adviser: Adviser | None = None,
        graph: Graph | str | None = None,
    ) -> None:
        rules = Policy() if policy is None else policy
        super().__init__(store, rules if adviser is None else replace(rules, adviser=adviser))
        commits = self.core.commits
        place = FalkorGraph(graph) if isinstance(graph, str) else graph
        self._place = LedgerGraph(commits) if place is None else place
        self.dlq = AdvisedDeadLetters(commits)
        reversals = Reversals(self.core, lambda: self.mcp_servers)
        self.goals = Goals(commits, self.core.wakeups, self._place, reversals)
        self.graph = Graphs(self._place, self.goals)
        self.decisions = Decisions(commits)
        self.conflicts = Conflicts(commits)
        self.recovery = Recovery(commits, self.goals, reversals)
        self.sandboxes = Sandboxes(commits)
        """Warm sandboxes of the agents in this process."""
        self.context_provider: ContextProvider = GoalContextProvider(commits, self.graph)
        """Builds the context of a message. An application may set its own."""
        self.hooks = Hooks()
        self.blocking: BlockingEngine = BlockingEngine(self)
        BuiltIn(self.core, self.goals, self.graph, self.recovery, self.hooks, self.dlq, reversals).register()
        additions = self.core.additions
        additions.new_context = partial(HandlerContext, self)
        additions.keeps_priority = partial(keeps_priority, self.core.commits)
        additions.on_finish.append(self.hooks.note_completed)
        additions.before = dict.fromkeys(CONTROL_TYPES, self.sandboxes.follow)
        additions.loops += [self.sandboxes.keep_warm, self.dlq.keep_looking]
        additions.closing.append(self.sandboxes.close)

    @classmethod
    def open(
        cls,
        url: str,
        policy: Policy | None = None,
        clock: Clock | None = None,
        adviser: Adviser | None = None,
        graph: Graph | str | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> Self:
        """The engine of `sqlite:///dir/queue.db`, `postgres://user@host/db` or `memory://`.

        `adviser` answers questions instead of the rules. `graph` is the knowledge graph, such as
        `falkordb://host:port/name`, when it is not in the store. `key_file` encrypts what is stored.
        """
        if not isinstance(url, str):
            raise InvalidMessage(f"a store is named by text such as sqlite:///queue.db, not {shown(url)}")
        return cls(open_store(url, clock=clock, key_file=key_file), policy, adviser=adviser, graph=graph)

    def on(self, store: Store) -> "Engine":
        """An engine with the same rules, types and handlers on another store."""
        engine = Engine(store, self.policy, graph=None if self._place.is_embedded else self._place)
        engine._share(self)
        return engine

    def _share(self, other: "Engine") -> None:
        """Use the types, handlers, hooks and tools of another engine, also those registered later."""
        self.core.share(other.core)
        self.mcp_servers = other.mcp_servers
        self.hooks.functions = other.hooks.functions
        self.recovery.registered = other.recovery.registered

    def hook(self, type: str) -> Callable[[F], F]:  # noqa: A002
        """Register a function that runs after each completed message of a type, as a message of its own.

        It is called with what `get` returns and with the result, at least once.
        """

        def register(run: F) -> F:
            self.hooks.add(type, run)
            return run

        self.hooks.check(type)
        return register

    def recovery_tool(self, run: F) -> F:
        """Register a function that the adviser may choose when a step of a goal fails for good.

        It is called with those of goal_id, message_id, checkpoint_id, agent_id, task, specialized_for,
        prompt_additions, failure and decision_id that its signature names.
        """
        return self.recovery.tool(run)

    def testing(self) -> "InlineEngine":
        """An engine in memory with the same handlers, which runs them inline on a clock that tests move."""
        from postroom.goals.engine import InlineEngine  # noqa: PLC0415 - it imports this module

        return InlineEngine(self)

    def close(self) -> None:
        """Close files and threads. The next call opens them again."""
        super().close()
        self._place.close()


class InlineEngine(Engine):
    """As `Engine`, with the handlers of another engine. `clock` is the clock that tests move."""

    def __init__(self, engine: Engine) -> None:
        self.clock = ManualClock()
        super().__init__(MemoryStore(clock=self.clock), engine.policy)
        self._share(engine)

    def _new_core(self, store: Store, policy: Policy) -> EngineCore:
        self._inline = InlineCore(store, policy)
        self._inline.clock = self.clock
        return self._inline

    async def drain(self) -> None:
        """Run handlers until nothing can run without moving the clock."""
        await self._inline.drain()

    async def advance(self, seconds: float) -> None:
        """Move the clock, and run what becomes due."""
        self.clock.advance(seconds)
        await self.drain()
