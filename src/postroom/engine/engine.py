"""`Engine`: the global queue of an agent system, with priorities, retries, dead letters and policies.

The store remembers what was done. A message is leased to one worker at a time, and delivered at least once.
An effect of a handler happens once (`ctx.effect`).
"""

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec.structs import replace

from postroom.contracts.tasks.task_input import checked_text
from postroom.core.lifecycle.versions import Migration
from postroom.core.names import is_name
from postroom.engine import inspection
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations
from postroom.engine.agents.bounces import Bounces
from postroom.engine.agents.parts import joined_answer
from postroom.engine.blocking import Blocking
from postroom.engine.core import EngineCore
from postroom.engine.dlq import DeadLetters
from postroom.engine.explanation import explain
from postroom.engine.handle import Handle
from postroom.engine.inspection import EngineStatus, MessageInfo
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.engine.telemetry import on_work
from postroom.engine.token_status import Tokens
from postroom.engine.work.handlers import Handler, check_shape, checked_handler
from postroom.engine.work.worker import DRAIN_S, Worker
from postroom.errors import InvalidMessage, InvalidSetting, clipped, shown
from postroom.goals.advisers.adviser import Adviser
from postroom.goals.builtin_handlers import BuiltIn
from postroom.goals.context_provider import ContextProvider, GoalContextProvider
from postroom.goals.decisions import Decisions
from postroom.goals.goals import Goals
from postroom.goals.graph.graph import Graph, Graphs, LedgerGraph
from postroom.goals.recovery import Recovery
from postroom.goals.registry import Conflicts
from postroom.sandbox.pools import Sandboxes
from postroom.stores.open import open_store
from postroom.stores.store import Store
from postroom.system.clock import Clock
from postroom.system.handles import Closing

if TYPE_CHECKING:
    from postroom.engine.inline import InlineEngine

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Engine(Closing):
    """The messages of all organizations in one store, and the workers of this process."""

    def __init__(
        self,
        store: Store,
        policy: Policy | None = None,
        *,
        adviser: Adviser | None = None,
        graph: Graph | str | None = None,
    ) -> None:
        rules = Policy() if policy is None else policy
        self._core = self._new_core(store, rules if adviser is None else replace(rules, adviser=adviser))
        self.dlq = DeadLetters(self._core)
        self.tokens = Tokens(self._core)
        self.bounces = Bounces(self._core)
        self.blocking = Blocking(self)
        self.drain_s = DRAIN_S
        """How long `stop` waits for running handlers."""
        self._workers: list[Worker] = []
        place = Graph.open(graph) if isinstance(graph, str) else graph
        self._place = LedgerGraph(self._core) if place is None else place
        self.goals = Goals(self._core, self._place)
        self.graph = Graphs(self._place, self.goals)
        self.decisions = Decisions(self._core)
        self.conflicts = Conflicts(self._core)
        self.recovery = Recovery(self._core, self.goals)
        self._core.context_provider = GoalContextProvider(self._core, self.graph)
        BuiltIn(self._core, self.goals, self.graph, self.recovery).register()

    def _new_core(self, store: Store, policy: Policy) -> EngineCore:
        return EngineCore(store, policy)

    def on(self, store: Store) -> "Engine":
        """An engine with the same rules, types and handlers on another store."""
        engine = Engine(store, self.policy, graph=None if self._place.is_embedded else self._place)
        engine.core.share(self.core)
        return engine

    @property
    def core(self) -> EngineCore:
        """The inside of the engine, for servers."""
        return self._core

    @property
    def sandboxes(self) -> Sandboxes:
        """Warm sandboxes of the agents in this process."""
        return self._core.sandboxes

    @property
    def context_provider(self) -> ContextProvider:
        """Builds the context of a message. An application may set its own."""
        provider: ContextProvider = self._core.context_provider
        return provider

    @context_provider.setter
    def context_provider(self, provider: ContextProvider) -> None:
        self._core.context_provider = provider

    @property
    def policy(self) -> Policy:
        """The rules of the engine."""
        return self._core.policy

    @property
    def store(self) -> Store:
        """The store of the engine."""
        return self._core.store

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

    # ---- types and handlers --------------------------------------------------------------------

    def handler(self, type: str, **options: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:  # noqa: A002
        """Register a function as the handler of a message type.

        Options: `timeout_s`, `service`, `payload` (the shape of the payload), `retry`, `batch`, `within_ms`,
        and `pool` ("thread" or "process") for functions that are not async.
        """

        def register(run: Callable[..., T]) -> Callable[..., T]:
            try:
                handler = checked_handler(Handler(run=run, **options))
            except TypeError as error:
                raise InvalidSetting(f"an option of the handler does not fit: {clipped(error)}") from None
            self.register_type(type, payload=handler.payload)
            if type in self._core.handlers:
                name = getattr(self._core.handlers[type].run, "__name__", "a function")
                raise InvalidSetting(f"type {type} has a handler already: {name}")
            self._core.handlers[type] = handler
            self._core.services[type] = handler.service
            return run

        return register

    def register_type(self, type: str, *, payload: Any = None) -> None:  # noqa: A002
        """Accept messages of this type, with payloads of this shape. None accepts any JSON object.

        The keys of the default handler of the type no longer bind: another handler is meant to run.
        """
        if not isinstance(type, str) or not is_name(type):
            raise InvalidSetting(f"a message type is a name, not {shown(type)}")
        check_shape(payload)
        self._core.registry.payload_keys.pop(type, None)
        if payload is not None or type not in self._core.registry.types:
            self._core.registry.types[type] = payload

    def mcp(
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Make the tools of an MCP server handlers of `tool_call`, whose `service` is this name.

        The server is a command that speaks MCP over its stdin and stdout, with `env` in its environment, or
        an address, called with `headers`. The payload is `{"tool": name, "arguments": {...}}`.
        """
        servers = self._core.mcp_servers
        servers.add(name, command, url, headers, env)
        if getattr(self._core.handlers.get("tool_call"), "run", None) != servers.handle:
            self.handler("tool_call")(servers.handle)

    def hook(self, type: str) -> Callable[[Callable[..., T]], Callable[..., T]]:  # noqa: A002
        """Register a function that runs after each completed message of a type, as a message of its own.

        It is called with what `get` returns and with the result, at least once.
        """

        def register(run: Callable[..., T]) -> Callable[..., T]:
            name = getattr(run, "__name__", "")
            if not callable(run) or not name:
                raise InvalidSetting(f"a hook is a function with a name, not {shown(run)}")
            self._core.hooks.setdefault(type, {})[name] = run
            return run

        if not isinstance(type, str) or not is_name(type):
            raise InvalidSetting(f"a message type is a name, not {shown(type)}")
        return register

    def recovery_tool(self, run: F) -> F:
        """Register a function that the adviser may choose when a step of a goal fails for good.

        It is called with those of goal_id, message_id, checkpoint_id, agent_id, task, specialized_for,
        prompt_additions, failure and decision_id that its signature names.
        """
        return self.recovery.tool(run)

    def migration(self, from_major: int) -> Callable[[Migration], Migration]:
        """Register a function that turns the fields of one major version into those of the next."""

        def register(migrate: Migration) -> Migration:
            self._core.registry.migrations[from_major] = migrate
            return migrate

        return register

    # ---- submitting ----------------------------------------------------------------------------

    async def submit(self, **fields: Any) -> Handle:
        """Store one message and return its handle. `type`, `org_id` and `payload` are required.

        Also: priority (0 to 3), agent_id, user_id, goal_id, task_id, parent_message_id, created_by,
        idempotency_key, ordering_key, on_dead, delay_s, expires_at, max_retries, service, context, metadata,
        resource_limits, tokens, models, token_needs, model_preferences, traceparent, tracestate, version,
        durability.
        """
        [handle] = await self.submit_many([fields])
        return handle

    async def submit_many(self, messages: Iterable[Mapping[str, Any]]) -> list[Handle]:
        """As `submit`, for each of the keyword sets, in one commit: all or none."""
        submitted = await self._core.submit(messages)
        return [Handle(self._core, one.message_id, duplicate=one.duplicate) for one in submitted]

    async def request(self, *, timeout_s: float | None = None, **fields: Any) -> Any:
        """Submit one message and wait for its answer; a streamed answer is joined.

        For programs without a coordinator. After `timeout_s` the message still runs.
        Raises `MessageFailed` and `TimeoutError`.
        """
        handle = await self.submit(**fields)
        await self._core.wait_for_end(handle.message_id, timeout_s)
        return joined_answer([part async for part in handle], await self._core.load(handle.message_id))

    # ---- working -------------------------------------------------------------------------------

    def run(
        self, *, concurrency: int | None = None, worker_id: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Work in this process until `stop`, on up to `concurrency` messages at a time.

        The default is the smaller one of WORKER_PREFETCH and WORKER_CONCURRENCY. Both default to 10.
        """
        if worker_id is not None:
            checked_text("worker_id", worker_id)
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise InvalidSetting(f"concurrency must be a whole number from 1 on, not {shown(concurrency)}")
        worker = Worker(self._core, worker_id=worker_id, slots=concurrency, drain_s=self.drain_s)
        self._workers.append(worker)  # at once: a `stop` may come before the coroutine has begun
        if self._core.telemetry is None:
            for export in on_work:
                export(self)
        return self._run(worker)

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            self._workers.remove(worker)
            if not self._workers:
                await self._core.mcp_servers.close()
                await self._core.sandboxes.close()

    @property
    def is_working(self) -> bool:
        """Whether a worker of this process runs."""
        return bool(self._workers)

    async def stop(self) -> None:
        """Have the workers of this process claim no more, finish within `drain_s`, and release the rest."""
        for worker in list(self._workers):
            worker.stop()

    # ---- looking and operating -----------------------------------------------------------------

    async def get(self, message_id: str) -> MessageInfo:
        """Everything about a message. Raises `UnknownTask`."""
        return await self._core.read(lambda operations: inspection.info_of(operations, message_id))

    async def explain(self, message_id: str) -> str:
        """Which rule holds a message, and what would release it, in one paragraph."""
        return await self._core.read(
            lambda operations: explain(operations, self.policy, message_id, self._core.services)
        )

    async def status(self) -> EngineStatus:
        """Depths, stages, workers, breakers and pauses."""
        return await self._core.read(lambda operations: inspection.status_of(operations, self.policy))

    async def agents(self, org_id: str | None = None) -> list[AgentInfo]:
        """The registered agents of an organization, or of all: health, open requests, unhandled messages."""
        return await self._core.read(
            lambda operations: AgentOperations(operations.transaction, self.policy).list(org_id)
        )

    async def cancel(self, message_id: str) -> None:
        """Cancel a message. Its running handler is cancelled within a second.

        Raises `WrongState` when the message has ended.
        """
        await self._core.write(lambda operations: operations.cancel(message_id), makes_room=True)
        for worker in self._workers:
            worker.look()

    async def pause(self, *, org_id: str = "", type: str = "", kill: bool = False) -> None:  # noqa: A002
        """Deliver nothing of an organization, of a type, of both together, or nothing at all.

        `kill` is the kill switch: submits are refused, and running handlers are cancelled and their messages
        released.
        """
        self._check_scope(org_id, type)
        if not isinstance(kill, bool) or (kill and type):
            raise InvalidMessage(
                "the kill switch is True or False, for an organization or for all, not for a type"
            )
        await self._core.control(lambda operations: operations.pause(org_id, type, kill=kill))

    async def resume(self, *, org_id: str = "", type: str = "") -> None:  # noqa: A002
        """End a pause of the same scope."""
        self._check_scope(org_id, type)
        await self._core.control(lambda operations: operations.resume(org_id, type))
        if type:
            after: str | None = ""
            while after is not None:
                after = await self._core.control(partial(_unpark, type, org_id, after))
        self._core.wake_workers()

    def _check_scope(self, org_id: str, type_name: str) -> None:
        for name, value in (("org_id", org_id), ("type", type_name)):
            if not isinstance(value, str) or (value and not is_name(value)):
                raise InvalidMessage(f"{name} must be a name, not {shown(value)}")

    def handle(self, message_id: str) -> Handle:
        """The handle of a message that was submitted earlier."""
        return Handle(self._core, message_id)

    async def put_back(self, worker_id: str) -> int:
        """A worker's process has died: end its leases now. Returns how many."""
        checked_text("worker_id", worker_id)
        return await self._core.write(lambda operations: operations.crash_worker(worker_id), makes_room=True)

    async def sweep(self) -> int:
        """Put back, wake and expire overdue messages; returns how many. Workers do this by themselves."""
        return await self._core.write(lambda operations: operations.sweep(), makes_room=True)

    def testing(self) -> "InlineEngine":
        """An engine in memory with the same handlers, which runs them inline on a clock that tests move."""
        from postroom.engine.inline import InlineEngine  # noqa: PLC0415 - it imports this module

        return InlineEngine(self)

    def close(self) -> None:
        """Close files and threads. The next call opens them again."""
        self.blocking.close()
        self._place.close()
        self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()
        self.close()


def _unpark(type_name: str, org_id: str, after: str, operations: Operations) -> str | None:
    return operations.unpark(type_name, org_id, after)
