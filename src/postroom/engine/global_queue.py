"""`GlobalQueue`: the queue of an agent system, with priorities, retries, dead letters and policies.

The store remembers what was done. A message is leased to one worker at a time, and delivered at least once.
An effect of a handler happens once (`ctx.effect`).

Rule 1: this class knows messages and their handlers. `goals.engine` adds goals and sandboxes to it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self, TypeAlias, TypeVar, Unpack

from postroom.calls.messages import ListFields, MessageList
from postroom.calls.submit import SubmitFields
from postroom.contracts.tasks.task_input import checked_text
from postroom.core.lifecycle.retry import Retry
from postroom.core.lifecycle.versions import Migration
from postroom.core.names import is_name
from postroom.engine import inspection
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations
from postroom.engine.agents.bounces import Bounces
from postroom.engine.blocking import (
    BlockingBounces,
    BlockingDeadLetters,
    BlockingPart,
    BlockingTokens,
    LoopThread,
    waits,
)
from postroom.engine.core import EngineCore
from postroom.engine.dlq import DeadLetters
from postroom.engine.explanation import explain
from postroom.engine.handle import BlockingHandle, Handle
from postroom.engine.inspection import EngineStatus, MessageInfo
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.engine.token_status import Tokens
from postroom.engine.work.default_handlers import default_handlers
from postroom.engine.work.handlers import Handler, Pool, Shape, check_shape, checked_handler
from postroom.engine.work.mcp_tools import McpServers
from postroom.engine.work.worker import DRAIN_S, Worker
from postroom.errors import InvalidMessage, InvalidSetting, shown
from postroom.message import Alert
from postroom.stores.alerts import all_alerts
from postroom.stores.store import Store
from postroom.system.handles import Closing

Handles: TypeAlias = list[Handle]
BlockingHandles: TypeAlias = list[BlockingHandle]
Agents: TypeAlias = list[AgentInfo]
Alerts: TypeAlias = list[Alert]
F = TypeVar("F", bound=Callable[..., Any])

on_work: Final[list[Callable[["GlobalQueue"], None]]] = []
"""Called with a queue without telemetry that begins to work. An exporter registers itself here."""


class GlobalQueue(Closing):
    """The messages of all organizations in one store, and the workers of this process."""

    def __init__(self, store: Store, policy: Policy | None = None) -> None:
        self._core = self._new_core(store, Policy() if policy is None else policy)
        self._core.handlers.built_in |= default_handlers(self._core)
        self._commits = self._core.commits
        self.mcp_servers = McpServers()
        self.dlq = DeadLetters(self._commits)
        self.tokens = Tokens(self._commits)
        self.bounces = Bounces(self._commits)
        self.blocking = Blocking(self)
        self.drain_s = DRAIN_S
        """How long `stop` waits for running handlers."""
        self._workers: list[Worker] = []

    def _new_core(self, store: Store, policy: Policy) -> EngineCore:
        return EngineCore(store, policy)

    @property
    def core(self) -> EngineCore:
        """The inside of the engine, for servers."""
        return self._core

    @property
    def policy(self) -> Policy:
        """The rules of the engine."""
        return self._core.policy

    @property
    def store(self) -> Store:
        """The store of the engine."""
        return self._core.store

    # ---- types and handlers --------------------------------------------------------------------

    def handler(
        self,
        type: str,  # noqa: A002
        *,
        timeout_s: float | None = None,
        service: str = "",
        tool: str = "",
        payload: Shape = None,
        retry: Retry | None = None,
        batch: int = 1,
        within_ms: float = 20.0,
        pool: Pool = "thread",
    ) -> Callable[[F], F]:
        """Register a function as the handler of a message type.

        `service` and `tool` make it the handler of the messages that name them, beside others of the type:
        the more specific one runs. The tool is a text in the payload.
        `payload` is the shape of the payload. `batch` is how many messages one call gets, collected for
        `within_ms`. `pool` is where a function runs that is not async.
        """

        def register(run: F) -> F:
            handler = checked_handler(
                Handler(
                    run=run,
                    timeout_s=timeout_s,
                    service=service,
                    tool=tool,
                    payload=payload,
                    retry=retry,
                    batch=batch,
                    within_ms=within_ms,
                    pool=pool,
                )
            )
            self.register_type(type)
            self._core.handlers.add(type, handler)
            return run

        return register

    def register_type(self, type: str, *, payload: Shape = None) -> None:  # noqa: A002
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
        server = self.mcp_servers.add(name, command, url, headers, env)
        self._core.handlers.add("tool_call", Handler(run=server.handle, service=name, is_own=True))

    def migration(self, from_major: int) -> Callable[[Migration], Migration]:
        """Register a function that turns the fields of one major version into those of the next."""

        def register(migrate: Migration) -> Migration:
            self._core.registry.migrations[from_major] = migrate
            return migrate

        return register

    # ---- submitting ----------------------------------------------------------------------------

    async def submit(self, **fields: Unpack[SubmitFields]) -> Handle:
        """Store one message and return its handle. `type`, `org_id` and `payload` are required."""
        [handle] = await self.submit_many([fields])
        return handle

    async def submit_many(self, messages: Iterable[SubmitFields]) -> Handles:
        """As `submit`, for each of the keyword sets, in one commit: all or none."""
        submitted = await self._core.submits.submit(messages)
        return [Handle(self._core, one.message_id, duplicate=one.duplicate) for one in submitted]

    async def request(self, /, *, timeout_s: float | None = None, **fields: Unpack[SubmitFields]) -> Any:
        """Submit one message and wait for its answer; a streamed answer is joined.

        For programs without a coordinator. After `timeout_s` the message still runs.
        Raises `MessageFailed` and `TimeoutError`.
        """
        handle = await self.submit(**fields)
        return await handle.result(timeout_s)

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
        if self._core.additions.telemetry is None:
            for export in on_work:
                export(self)
        return self._run(worker)

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            self._workers.remove(worker)
            if not self._workers:
                for close in (self.mcp_servers.close, *self._core.additions.closing):
                    await close()

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
        return await self._commits.read(
            lambda operations: inspection.info_of(self._core, operations, message_id)
        )

    async def list(self, **fields: Unpack[ListFields]) -> MessageList:
        """Messages, the newest first: org_id, state, type, goal_id, agent_id, since, text, cursor, limit.

        `text` is an id, or is searched in a message and its error. A call looks at a bounded number of
        messages, so a page may be short: the list ends with an empty cursor.
        """
        query = inspection.checked_query(fields)
        org_id, before = query.org_id or None, int(query.cursor or 0)
        text = query.text.strip()
        return await self._commits.read(
            lambda operations: inspection.list_messages(operations, query, org_id, before, text)
        )

    async def explain(self, message_id: str) -> str:
        """Which rule holds a message, and what would release it, in one paragraph."""
        return await self._commits.read(
            lambda operations: explain(operations, self.policy, message_id, self._core.handlers.registered)
        )

    async def status(self) -> EngineStatus:
        """Depths, stages, workers, breakers and pauses."""
        return await self._commits.read(lambda operations: inspection.status_of(operations, self.policy))

    async def alerts(self) -> Alerts:
        """What a person is told of: alerts that go on, and those that were over in the last seven days."""
        return await self._commits.read(lambda operations: all_alerts(operations.transaction.cells))

    async def agents(self, org_id: str | None = None) -> Agents:
        """The registered agents of an organization, or of all: health, open requests, unhandled messages."""
        return await self._commits.read(
            lambda operations: AgentOperations(operations.transaction, self.policy).list(org_id)
        )

    async def cancel(self, message_id: str) -> None:
        """Cancel a message. Its running handler is cancelled within a second.

        Raises `WrongState` when the message has ended.
        """
        await self._commits.write(lambda operations: operations.cancel(message_id), makes_room=True)
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
        await self._commits.control(lambda operations: operations.pause(org_id, type, kill=kill))

    async def resume(self, *, org_id: str = "", type: str = "") -> None:  # noqa: A002
        """End a pause of the same scope."""
        self._check_scope(org_id, type)
        await self._commits.control(lambda operations: operations.resume(org_id, type))
        if type:
            after: str | None = ""
            while after is not None:
                after = await self._commits.control(partial(_unpark, type, org_id, after))
        self._core.wakeups.wake_workers()

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
        return await self._commits.write(
            lambda operations: operations.crash_worker(worker_id), makes_room=True
        )

    async def sweep(self) -> int:
        """Put back, wake and expire overdue messages; returns how many. Workers do this by themselves."""
        return await self._commits.write(lambda operations: operations.sweep(), makes_room=True)

    def close(self) -> None:
        """Close files and threads. The next call opens them again."""
        self.blocking.close()
        self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()
        self.close()


def _unpark(type_name: str, org_id: str, after: str, operations: Operations) -> str | None:
    return operations.unpark(type_name, org_id, after)


class Blocking(BlockingPart[GlobalQueue]):
    """`engine.blocking`: the verbs of an engine for plain code."""

    def __init__(self, engine: GlobalQueue) -> None:
        self._thread = LoopThread()
        super().__init__(engine, self._thread.wait)
        self.dlq = BlockingDeadLetters(engine.dlq, self.wait)
        self.tokens = BlockingTokens(engine.tokens, self.wait)
        self.bounces = BlockingBounces(engine.bounces, self.wait)

    request = waits(GlobalQueue.request)
    agents = waits(GlobalQueue.agents)
    stop = waits(GlobalQueue.stop)
    get = waits(GlobalQueue.get)
    list = waits(GlobalQueue.list)
    explain = waits(GlobalQueue.explain)
    status = waits(GlobalQueue.status)
    alerts = waits(GlobalQueue.alerts)
    put_back = waits(GlobalQueue.put_back)
    cancel = waits(GlobalQueue.cancel)
    pause = waits(GlobalQueue.pause)
    resume = waits(GlobalQueue.resume)

    def submit(self, **fields: Unpack[SubmitFields]) -> BlockingHandle:
        """As `Engine.submit`."""
        return BlockingHandle(self.wait(self.of.submit(**fields)), self.wait)

    def submit_many(self, messages: Iterable[SubmitFields]) -> BlockingHandles:
        """As `Engine.submit_many`."""
        return [BlockingHandle(handle, self.wait) for handle in self.wait(self.of.submit_many(messages))]

    def run(self, *, concurrency: int | None = None, worker_id: str | None = None) -> None:
        """As `Engine.run`, in the calling thread."""
        asyncio.run(self.of.run(concurrency=concurrency, worker_id=worker_id))

    def close(self) -> None:
        """End the thread of the event loop."""
        self._thread.close()
