"""What every route does, once who asks and what for is known.

Rule 1: whose task it is follows from the token. A body that names somebody else is refused.
Rule 2: a task of another agent is as unknown as one that does not exist.
Rule 3: what changes the store goes through the writer; what looks at it, through the readers. Nothing here
        blocks the event loop.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET
from starlette.types import Message, Receive, Scope, Send

from postroom.contracts import task_operations
from postroom.contracts.task_input import LEASE_S_MAX, checked_results, checked_terms
from postroom.contracts.task_operations import TaskOperations
from postroom.contracts.tasks import (
    DECISIONS,
    STATUS,
    AgentStatus,
    Status,
    Task,
    TaskInfo,
    Tasks,
)
from postroom.errors import InvalidMessage, PostroomError, SinceIdNotFound, UnknownTask
from postroom.message import Record, State
from postroom.runtime.agents import Agents, Identity
from postroom.runtime.buses import Buses
from postroom.runtime.harness import Harness
from postroom.runtime.longpoll import WAITERS_MAX, LongPolls
from postroom.runtime.metrics import CONTENT_TYPE, ServerCounters, metrics_text
from postroom.runtime.openapi import EVENT_STREAM, JSON
from postroom.runtime.result_polls import ResultPolls
from postroom.runtime.schemas import (
    PAGE_DEFAULT,
    STREAM_PAGE_BYTES_MAX,
    BusAnswer,
    BusIdAnswer,
    BusQuery,
    ClaimedTask,
    ClaimedTasks,
    CompleteBody,
    CompletedAnswer,
    EnqueueBody,
    EnqueueManyBody,
    ErrorAnswer,
    FailBody,
    FindQuery,
    HealthAnswer,
    HolderBody,
    LinesAnswer,
    NewBusMessage,
    NewTaskAnswer,
    NewTasksAnswer,
    NextBody,
    ResetNotice,
    ResultBody,
    ShowQuery,
    StatusAnswer,
    TaskAnswer,
)
from postroom.runtime.server_log import ServerLog
from postroom.runtime.shares import Shares
from postroom.runtime.writer import TASK_BYTES, StoreWriter
from postroom.stores.base import ByIds
from postroom.stores.transaction import Claim

T = TypeVar("T")

BUS_THREADS = 8  # a bus that another process holds stops no look at the store
BUS_THREADS_A_TOKEN_MAX = 2
READERS = 2  # threads that look at the store; it has one connection for that
READERS_A_TOKEN_MAX = 1
STREAMS_MAX = 256
STREAMS_A_TOKEN_MAX = 32
OPERATOR_STREAMS_RESERVE = 32
POLLS_A_TOKEN_MAX = 1_000
OPERATOR_POLLS_RESERVE = 100
BODY_BYTES_MAX = 512 * 1024 * 1024  # of all bodies that are arriving or being worked on
BODY_BYTES_A_TOKEN_MAX = 64 * 1024 * 1024
BODY_BYTES_RESERVE = 128 * 1024 * 1024
TERMS_KEPT_MAX = 1_024
HEALTH_LOOK_S = 0.5
STREAM_LOOK_S = 1.0  # what another process wrote is seen within this
STREAM_GATHER_S = 0.02
STREAM_ALIVE_S = 15.0  # a comment, so that a connection that is disconnected is noticed
STREAM_PAGE = 500

_encode = msgspec.json.Encoder().encode
JSON_TYPE = (b"content-type", JSON.encode())
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


class Refusal(Exception):
    """An answer that is not a success, and not an error of a contract."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


class ClientDisconnected(Exception):
    """Whoever asked has closed the connection."""


class HttpReply(NamedTuple):
    """An answer, ready to be sent."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)


NOTHING = HttpReply(204, b"", ())
OPERATORS_ONLY = "only an operator may do that, and this token is an agent's"


class HttpRequest:
    """One request, decoded."""

    __slots__ = ("body", "body_bytes_held", "identity", "query", "receive", "scope", "send", "size", "token")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.token = ""
        self.identity: Identity = _NOBODY
        self.body: Any = None
        self.size = 0
        """Bytes of the body."""
        self.body_bytes_held = 0
        """Of the bytes that bodies may have in memory; only a body that came in several pieces is counted."""
        self.query: Any = None

    def header(self, name: bytes) -> str:
        """The value of a header, or nothing."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value, "latin-1")
        return ""

    def in_path(self, name: str) -> str:
        """What stands in the path at that place."""
        return str(self.scope["path_params"][name])


_NOBODY = Identity("", "agent")
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a look at the store or at a bus where it may block."""
Handler = Callable[[HttpRequest], Awaitable[HttpReply | None]]
"""Answers a request; None when it has sent everything itself."""


class TaskHandlers:
    """Everything that the routes share while the server runs."""

    def __init__(
        self, tasks: Tasks, agents: Agents, harness: Harness, buses: Buses, server_log: ServerLog
    ) -> None:  # fmt: skip
        self.tasks = tasks
        self.agents = agents
        self.harness = harness
        self.buses = buses
        self.server_log = server_log
        self.openapi_json = b"{}"
        self.lease_s_max = LEASE_S_MAX
        """A longer wish is cut to this; the answer says how long the lease is."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(READERS, "postroom-reader")
        self._read_turns = lru_cache(TERMS_KEPT_MAX)(lambda _: asyncio.Semaphore(READERS_A_TOKEN_MAX))
        self._health_thread = ThreadPoolExecutor(1, "postroom-health")
        self._bus_threads = ThreadPoolExecutor(BUS_THREADS, "postroom-bus")
        self._bus_turns = lru_cache(TERMS_KEPT_MAX)(lambda _: asyncio.Semaphore(BUS_THREADS_A_TOKEN_MAX))
        self.writer = StoreWriter(tasks, self._loop)
        self.long_polls = LongPolls(tasks, self.writer, self.read, self._loop)
        self._health_looked = -HEALTH_LOOK_S
        self._health_parts: dict[str, str] = {}
        self.result_polls = ResultPolls(tasks, self.read, self.long_polls)
        self._streams_woken = self._loop.create_future()
        self._streams = Shares("event streams", STREAMS_MAX, STREAMS_A_TOKEN_MAX, OPERATOR_STREAMS_RESERVE)
        self._polls = Shares("long polls", WAITERS_MAX, POLLS_A_TOKEN_MAX, OPERATOR_POLLS_RESERVE)
        self.body_bytes = Shares(
            "bytes of bodies", BODY_BYTES_MAX, BODY_BYTES_A_TOKEN_MAX, BODY_BYTES_RESERVE
        )
        self._terms = lru_cache(TERMS_KEPT_MAX)(checked_terms)  # an agent asks on the same terms all day

    def read(self, look: Callable[[], T]) -> "asyncio.Future[T]":
        """Look at the store where it may block."""
        return self._loop.run_in_executor(self._readers, look)

    async def read_for(self, request: HttpRequest, look: Callable[[], T]) -> T:
        """Look at the store for a request. One token never has all the readers: the next of it waits."""
        async with self._read_turns(request.identity.name):
            return await self.read(look)

    async def on_bus(self, request: HttpRequest, look: Callable[[], T]) -> T:
        """Do something with a bus. That may take long, so one token never has all the threads."""
        async with self._bus_turns(request.identity.name):
            return await self._loop.run_in_executor(self._bus_threads, look)

    def wake_streams(self) -> None:
        """Something happened: those who follow look now."""
        if self._streams.used and not self._streams_woken.done():
            self._streams_woken.set_result(None)
            self._streams_woken = self._loop.create_future()

    def end_waits(self) -> None:
        """Send home whoever waits, so that the server can end."""
        self.long_polls.end()

    def close(self) -> None:
        """Finish what waits for the store."""
        self.end_waits()
        self.writer.close()
        self._readers.shutdown()
        self._health_thread.shutdown()
        self._bus_threads.shutdown()
        self.buses.close()

    # ---- tasks for agents ----------------------------------------------------------------------

    async def next(self, request: HttpRequest) -> HttpReply:
        body: NextBody = request.body
        agent = _owner(request)
        if agent is None:
            raise InvalidMessage("an operator has to name the agent whose tasks it wants")
        lease_s = min(body.lease_s, self.lease_s_max)
        terms = self._terms(agent, body.limit, lease_s, body.worker)
        if body.wait_s:
            claimed = await self._wait(request, terms, body.wait_s)
        else:
            claimed = await self.writer.submit(terms, request.identity)
        if not claimed:
            return NOTHING
        self.wake_streams()
        self.harness.lease_given(lease_s)
        for task in claimed:
            self.server_log.write("claimed", task_id=task.task_id, agent=agent, attempt=task.attempt)
        shown = [_shown(task) for task in claimed]
        return HttpReply(200, _encode(shown[0] if body.limit == 1 else ClaimedTasks(shown)))

    async def _wait(self, request: HttpRequest, terms: Claim, wait_s: float) -> list[Task]:
        """A long poll. What was claimed for somebody who is disconnected by then is given back at once."""
        self._polls.take(request.identity)
        disconnected = asyncio.ensure_future(_disconnection(request.receive))
        try:
            claimed = await self.long_polls.claim(terms, request.identity, wait_s, disconnected)
            if disconnected.done():
                await self._release(request, claimed)
                raise ClientDisconnected
            return claimed
        finally:
            self._polls.give_back(request.identity)
            disconnected.cancel()

    async def _release(self, request: HttpRequest, claimed: list[Task]) -> None:
        for task in claimed:
            with suppress(PostroomError):
                await self.writer.submit(_releasing(task), request.identity, makes_room=True)

    async def complete(self, request: HttpRequest) -> HttpReply:
        body: CompleteBody = request.body
        owner = _owner(request)

        def work(operations: TaskOperations) -> tuple[bool, list[Task]]:
            """Whether the task was completed before, and what was claimed next."""
            record = _mine(operations, body.task_id, owner)
            if record.queue == DECISIONS:
                operations.settle(body.task_id, body.lease)
                return False, []
            results = checked_results([(body.task_id, body.lease, body.decision)])
            claimed = operations.complete(results, body.claim_next)
            return record.lease == body.lease and record.state in _DECIDED, claimed

        repeated, claimed = await self.writer.submit(
            work, request.identity, TASK_BYTES * (1 + body.claim_next) + request.size, makes_room=True
        )
        if repeated:  # the first may stand in the same commit, so it is read after that
            await self.read_for(request, lambda: _check_same_decision(self.tasks, body))
        self.harness.wake()
        return self._completed(request, body.task_id, claimed)

    def _completed(self, request: HttpRequest, task_id: str, claimed: list[Task]) -> HttpReply:
        for task in claimed:
            self.harness.lease_given(task.lease_s)
            self.server_log.write("claimed", task_id=task.task_id, agent=task.agent, attempt=task.attempt)
        self._said(request, "completed", task_id)
        return HttpReply(202, _encode(CompletedAnswer(task_id, [_shown(task) for task in claimed])))

    async def heartbeat(self, request: HttpRequest) -> HttpReply:
        body: HolderBody = request.body
        return await self._word(
            request, "heartbeat", lambda operations: operations.heartbeat(body.task_id, body.lease)
        )

    async def fail(self, request: HttpRequest) -> HttpReply:
        body: FailBody = request.body
        return await self._word(
            request,
            "failed",
            lambda operations: operations.fail(body.task_id, body.lease, body.error, body.retry_in_s),
        )

    async def release(self, request: HttpRequest) -> HttpReply:
        body: HolderBody = request.body
        return await self._word(
            request, "released", lambda operations: operations.release(body.task_id, body.lease)
        )

    async def _word(
        self, request: HttpRequest, event: str, say: Callable[[TaskOperations], None]
    ) -> HttpReply:
        """What a holder says about a task, which has to be its own agent's."""
        task_id, owner = request.body.task_id, _owner(request)

        def work(operations: TaskOperations) -> None:
            _mine(operations, task_id, owner)
            say(operations)

        return await self._say(request, event, task_id, work, makes_room=True)

    async def _say(
        self,
        request: HttpRequest,
        event: str,
        task_id: str,
        work: Callable[[TaskOperations], None],
        *,
        makes_room: bool,
    ) -> HttpReply:
        await self.writer.submit(work, request.identity, TASK_BYTES + request.size, makes_room=makes_room)
        return self._said(request, event, task_id)

    def _said(self, request: HttpRequest, event: str, task_id: str) -> HttpReply:
        """The answer to a word that is committed."""
        self.wake_streams()
        self.server_log.write(event, task_id=task_id, agent=request.identity.name)
        return HttpReply(202, _encode(TaskAnswer(task_id)))

    # ---- what operators do, and agents that may send ------------------------------------------

    async def enqueue(self, request: HttpRequest) -> HttpReply:
        many = isinstance(request.body, EnqueueManyBody)
        new: list[EnqueueBody] = request.body.tasks if many else [request.body]
        agents = {task.agent for task in new}
        sender = "" if request.identity.is_operator else request.identity.name
        if sender:
            _check_may_send(request.identity, agents)
        warning = self._unregistered(agents)
        self.tasks.check_backlog()
        tasks = [task_operations.NewTask(**msgspec.structs.asdict(task), sender=sender) for task in new]
        task_ids: list[str] = await self.writer.submit(
            lambda operations: operations.enqueue(tasks),
            request.identity,
            TASK_BYTES * len(new) + request.size,
        )
        self.wake_streams()
        for added, task_id in zip(new, task_ids, strict=True):
            self.server_log.write("enqueued", task_id=task_id, agent=added.agent)
        answer = NewTasksAnswer(task_ids, warning) if many else NewTaskAnswer(task_ids[0], warning)
        return HttpReply(201, _encode(answer))

    def _unregistered(self, agents: set[str]) -> str:
        """A warning about agents that have no token here, and so may never take what is sent to them."""
        missing = sorted(agent for agent in agents if not self.agents.knows(agent))
        return f"no agent {', '.join(map(repr, missing))} is registered here" if missing else ""

    async def cancel(self, request: HttpRequest) -> HttpReply:
        task_id = request.in_path("id")
        return await self._say(
            request, "cancelled", task_id, lambda operations: operations.cancel(task_id), makes_room=True
        )

    async def retry(self, request: HttpRequest) -> HttpReply:
        task_id = request.in_path("id")
        return await self._say(
            request, "retried", task_id, lambda operations: operations.retry(task_id), makes_room=False
        )

    async def result(self, request: HttpRequest) -> HttpReply:
        """Only a nudge: whether there is a result, the harness sees for itself."""
        body: ResultBody = request.body
        owner = _owner(request)
        await self.read_for(request, lambda: _seen(self.tasks, body.task_id, owner))
        self.harness.wake()
        return HttpReply(202, _encode(TaskAnswer(body.task_id)))

    # ---- looking -------------------------------------------------------------------------------

    async def show(self, request: HttpRequest) -> HttpReply:
        query: ShowQuery = request.query
        info = await self._readable(request)
        if query.wait_s and not info.ended:
            await self._wait_for_end(request, info.task_id, query.wait_s)
            info = await self._readable(request)
        return HttpReply(200, _encode(info))

    async def _readable(self, request: HttpRequest) -> TaskInfo:
        """A task, for its agent, its sender and operators; unknown to everybody else."""
        task_id, owner = request.in_path("id"), _own_queue(request.identity)
        info = await self.read_for(request, lambda: self.tasks.get(task_id))
        if owner is not None and owner not in (info.agent, info.sender):
            raise UnknownTask(task_id)
        return info

    async def _wait_for_end(self, request: HttpRequest, task_id: str, wait_s: float) -> None:
        """A long poll for a result. It counts in the token's share, as one for a task does."""
        self._polls.take(request.identity)
        disconnected = asyncio.ensure_future(_disconnection(request.receive))
        try:
            await self.result_polls.wait(task_id, wait_s, disconnected)
            if disconnected.done():
                raise ClientDisconnected
        finally:
            self._polls.give_back(request.identity)
            disconnected.cancel()

    async def find(self, request: HttpRequest) -> HttpReply:
        query: FindQuery = request.query
        owner = _own_queue(request.identity)
        if owner is not None and query.agent not in (UNSET, owner):
            raise Refusal(403, "Forbidden", f"this token is {owner}'s, and lists no other agent's tasks")
        agent = owner or (query.agent or None)
        state = query.state or None
        lines = await self.read_for(
            request, lambda: self.tasks.find(agent=agent, state=state, after=query.after, limit=query.limit)
        )
        return HttpReply(200, _encode(LinesAnswer(lines)))

    async def status(self, request: HttpRequest) -> HttpReply:
        found = await self.read_for(request, self.tasks.status)
        owner = _own_queue(request.identity)
        if owner is None:
            return HttpReply(200, _encode(StatusAnswer(found.agents, found.totals, self.harness.status())))
        own = {agent: status for agent, status in found.agents.items() if agent == owner}
        return HttpReply(200, _encode(StatusAnswer(own, _totals(own.values()))))

    async def health(self, request: HttpRequest) -> HttpReply:  # noqa: ARG002 - it is the same for everybody
        if self.tasks.store.trouble:
            return HttpReply(
                503, _encode(ErrorAnswer("Unavailable", "the store cannot be written to at present"))
            )
        if self.writer.alive and self.harness.alive:
            parts = await self._parts()
            return HttpReply(200, _encode(HealthAnswer("degraded" if parts else "ok", parts)))
        return HttpReply(
            503, _encode(ErrorAnswer("Unavailable", "a thread of the server has ended: restart it"))
        )

    async def _parts(self) -> dict[str, str]:
        """What `_degraded` found lately: anybody may ask for the health, as often as they like."""
        if self._loop.time() >= self._health_looked + HEALTH_LOOK_S:
            self._health_looked = self._loop.time()
            self._health_parts = await self._loop.run_in_executor(self._health_thread, self._degraded)
        return self._health_parts

    def _degraded(self) -> dict[str, str]:
        """What does not work, by name. Anybody may ask, so no bus is named."""
        parts: dict[str, str] = {}
        if self.buses.disk_is_nearly_full():
            parts["disk"] = "the disk is nearly full: posts to buses are refused"
        full = len(self.buses.full())
        if full:
            parts["buses"] = f"{full} of the buses have no room: an operator has to move archives away"
        return parts

    async def openapi(self, request: HttpRequest) -> HttpReply:  # noqa: ARG002
        return HttpReply(200, self.openapi_json)

    async def metrics(self, request: HttpRequest) -> HttpReply:
        status = await self.read_for(request, self.tasks.status)
        server = ServerCounters(
            self.harness.status(), self.long_polls.count, self.writer.turns, self.requests
        )  # fmt: skip
        return HttpReply(200, metrics_text(status, server), ((b"content-type", CONTENT_TYPE.encode()),))

    # ---- streams -------------------------------------------------------------------------------

    async def events(self, request: HttpRequest) -> None:
        last = request.header(b"last-event-id")
        if last and not _NUMBER.fullmatch(last):
            raise InvalidMessage("Last-Event-ID must be the number of an event")
        owner = _own_queue(request.identity)

        def page(position: int) -> tuple[bytes, int]:
            events = self.tasks.events(after=position, limit=STREAM_PAGE)
            shown = [event for event in events if owner is None or event.queue == owner]
            data = b"".join(_sse(str(event.seq), event.kind, _encode(event)) for event in shown)
            return data, events[-1].seq if events else position

        await self._stream(
            request, page, int(last) if last else request.query.after, partial(self.read_for, request)
        )

    async def read_bus(self, request: HttpRequest) -> HttpReply | None:
        query: BusQuery = request.query
        name = request.in_path("name")
        path = self.buses.path(name)
        if EVENT_STREAM not in request.header(b"accept"):
            messages = await self.on_bus(request, lambda: self.buses.read(name, query.since, query.limit))
            return HttpReply(200, _encode(BusAnswer(messages)))
        looks: tuple[int, int, int] | None = None
        since = request.header(b"last-event-id") or query.since
        follower = self.buses.follow(name, since)

        def page(position: str) -> tuple[bytes, str]:
            nonlocal looks
            before = _looks(path)
            if before == looks:
                return b"", position
            try:
                messages = follower.page(PAGE_DEFAULT, STREAM_PAGE_BYTES_MAX)
            except SinceIdNotFound:  # in an archive that is disconnected, or nowhere ever
                follower.since = ""
                return _sse("", "reset", _encode(ResetNotice(position))), ""
            if not messages:
                looks = before
                return b"", position
            data = b"".join(_sse(message.msg_id, "message", _encode(message)) for message in messages)
            return data, messages[-1].msg_id

        await self._stream(request, page, since, partial(self.on_bus, request))
        return None

    async def append_bus(self, request: HttpRequest) -> HttpReply:
        body: NewBusMessage = request.body
        name = request.in_path("name")
        msg_id = await self.on_bus(request, lambda: self.buses.append(name, body, request.identity))
        self.wake_streams()
        self.server_log.write("appended", agent=request.identity.name, bus=name, msg_id=msg_id)
        return HttpReply(201, _encode(BusIdAnswer(msg_id)))

    async def _stream(
        self, request: HttpRequest, page: Callable[[T], tuple[bytes, T]], position: T, run: Run
    ) -> None:
        """Send page after page as long as somebody listens whose token is worth something."""
        self._streams.take(request.identity)
        disconnected = asyncio.ensure_future(_disconnection(request.receive))
        try:
            woken = self._streams_woken
            data, behind = await run(lambda: page(position))
            await request.send(_STREAM_STARTS)
            await request.send(_piece(data or b": ready\n\n"))
            await self._follow(request, page, behind, run, disconnected, woken)
            await request.send({"type": "http.response.body", "body": b""})
        finally:
            self._streams.give_back(request.identity)
            disconnected.cancel()

    async def _follow(
        self,
        request: HttpRequest,
        page: Callable[[T], tuple[bytes, T]],
        position: T,
        run: Run,
        disconnected: "asyncio.Future[None]",
        woken: "asyncio.Future[None]",
    ) -> None:
        quiet_s = 0.0
        ends = (disconnected, self.long_polls.ending)
        while not any(end.done() for end in ends) and self.agents.identify(request.token) is not None:
            at = position
            data, position = await run(lambda at=at: page(at))  # type: ignore[misc]
            if data:
                await request.send(_piece(data))
            if position != at:
                quiet_s = 0.0
                continue
            quiet_s += STREAM_LOOK_S
            if quiet_s >= STREAM_ALIVE_S:
                quiet_s = 0.0
                await request.send(_piece(b": alive\n\n"))
            await asyncio.wait(
                (*ends, woken), timeout=STREAM_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
            if woken.done():
                await asyncio.sleep(STREAM_GATHER_S)
            woken = self._streams_woken


_STREAM_STARTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _piece(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _sse(number: str, kind: str, data: bytes) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (number.encode(), kind.encode(), data)


async def _disconnection(receive: Receive) -> None:
    """Return when the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _looks(path: Path) -> tuple[int, int, int]:
    """What changes with every post. A new file can have the inode and the size of a removed one."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


# ---- whose task it is ------------------------------------------------------------------------------


def _own_queue(identity: Identity) -> str | None:
    """The one queue that somebody sees; None for all."""
    return None if identity.is_operator else identity.name


def _check_may_send(identity: Identity, agents: set[str]) -> None:
    for agent in sorted(agents - set(identity.may_send_to)):
        raise Refusal(
            403,
            "Forbidden",
            f"agent {identity.name!r} may not send to {agent!r}. Whoever has the data folder allows it by: "
            f"postroom tasks agent allow {identity.name} --may-send-to {agent} --data DIR",
        )


def _owner(request: HttpRequest) -> str | None:
    """Whose tasks a request is about: the token says it. An operator may name an agent, or mean any."""
    identity, body = request.identity, request.body
    if identity.is_operator:
        return str(body.agent) if body.agent is not None else None
    if body.agent not in (None, identity.name) or body.agent_url not in (None, identity.name, identity.url):
        raise Refusal(403, "Forbidden", f"this token is {identity.name}'s, and speaks for nobody else")
    return identity.name


def _mine(operations: TaskOperations, task_id: str, owner: str | None) -> Record:
    """The record as it is within the commit; unknown when it is not the owner's."""
    record = operations.record(task_id)
    if owner is not None and record.queue != owner:
        raise UnknownTask(task_id)
    return record


def _seen(tasks: Tasks, task_id: str, owner: str | None) -> None:
    [record] = tasks.store.find(ByIds((task_id,)))
    if owner is not None and record.queue != owner:
        raise UnknownTask(task_id)


_DECIDED: frozenset[State] = frozenset({"COMPLETED", "EXECUTING", "DONE"})
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


def _check_same_decision(tasks: Tasks, body: CompleteBody) -> None:
    """The word was said before under this lease: repeating it is fine, changing it is not."""
    if _encode_sorted(tasks.get(body.task_id).result) != _encode_sorted(body.decision):
        raise Refusal(
            409, "WrongState", f"task {body.task_id!r} was completed with another decision, which stands"
        )


def _releasing(task: Task) -> Callable[[TaskOperations], None]:
    return lambda operations: operations.release(task.task_id, task.lease)


def _shown(task: Task) -> ClaimedTask:
    return ClaimedTask(
        task.task_id, task.payload, task.lease, task.attempt, task.lease_s, task.type, task.parent
    )  # fmt: skip


def _totals(queues: Iterable[AgentStatus]) -> dict[Status, int]:
    totals: dict[Status, int] = {}
    for queue in queues:
        for state, n in queue.states.items():
            totals[STATUS[state]] = totals.get(STATUS[state], 0) + n
    return totals
