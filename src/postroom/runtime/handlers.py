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
    TasksStatus,
)
from postroom.errors import InvalidMessage, PostroomError, SinceIdNotFound, UnknownTask
from postroom.message import Record, State
from postroom.runtime.agents import Agents, Identity
from postroom.runtime.buses import Buses
from postroom.runtime.endings import Endings
from postroom.runtime.harness import Harness
from postroom.runtime.longpoll import WAITERS_MAX, LongPolls
from postroom.runtime.openapi import EVENT_STREAM, JSON
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
    ErrorAnswer,
    FailBody,
    FindQuery,
    HealthAnswer,
    HolderBody,
    LinesAnswer,
    NewBusMessage,
    NewTask,
    NewTaskAnswer,
    NewTasks,
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
from postroom.runtime.writer import TASK_BYTES, Writer
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
STREAM_ALIVE_S = 15.0  # a comment, so that a connection that is gone is noticed
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


class Gone(Exception):
    """Whoever asked has closed the connection."""


class Reply(NamedTuple):
    """An answer, ready to be sent."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)


NOTHING = Reply(204, b"", ())
OPERATORS_ONLY = "only an operator may do that, and this token is an agent's"


class Call:
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
Handler = Callable[[Call], Awaitable[Reply | None]]
"""Answers a call; None when it has sent everything itself."""


class TaskHandlers:
    """Everything that the routes share while the server runs."""

    def __init__(
        self, tasks: Tasks, agents: Agents, harness: Harness, buses: Buses, journal: ServerLog
    ) -> None:  # fmt: skip
        self.tasks = tasks
        self.agents = agents
        self.harness = harness
        self.buses = buses
        self.journal = journal
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
        self.writer = Writer(tasks, self._loop)
        self.waiting = LongPolls(tasks, self.writer, self.read, self._loop)
        self._health_looked = -HEALTH_LOOK_S
        self._health_parts: dict[str, str] = {}
        self.endings = Endings(tasks, self.read, self.waiting)
        self._stirred = self._loop.create_future()
        self._streams = Shares("event streams", STREAMS_MAX, STREAMS_A_TOKEN_MAX, OPERATOR_STREAMS_RESERVE)
        self._polls = Shares("long polls", WAITERS_MAX, POLLS_A_TOKEN_MAX, OPERATOR_POLLS_RESERVE)
        self.body_bytes = Shares(
            "bytes of bodies", BODY_BYTES_MAX, BODY_BYTES_A_TOKEN_MAX, BODY_BYTES_RESERVE
        )
        self._terms = lru_cache(TERMS_KEPT_MAX)(checked_terms)  # an agent asks on the same terms all day

    def read(self, look: Callable[[], T]) -> "asyncio.Future[T]":
        """Look at the store where it may block."""
        return self._loop.run_in_executor(self._readers, look)

    async def read_for(self, call: Call, look: Callable[[], T]) -> T:
        """Look at the store for a request. One token never has all the readers: the next of it waits."""
        async with self._read_turns(call.identity.name):
            return await self.read(look)

    async def on_bus(self, call: Call, look: Callable[[], T]) -> T:
        """Do something with a bus. That may take long, so one token never has all the threads."""
        async with self._bus_turns(call.identity.name):
            return await self._loop.run_in_executor(self._bus_threads, look)

    def stir(self) -> None:
        """Something happened: those who follow look now."""
        if self._streams.used and not self._stirred.done():
            self._stirred.set_result(None)
            self._stirred = self._loop.create_future()

    def end_waits(self) -> None:
        """Send home whoever waits, so that the server can end."""
        self.waiting.end()

    def close(self) -> None:
        """Finish what waits for the store."""
        self.end_waits()
        self.writer.close()
        self._readers.shutdown()
        self._health_thread.shutdown()
        self._bus_threads.shutdown()
        self.buses.close()

    # ---- tasks for agents ----------------------------------------------------------------------

    async def next(self, call: Call) -> Reply:
        body: NextBody = call.body
        agent = _owner(call)
        if agent is None:
            raise InvalidMessage("an operator has to name the agent whose tasks it wants")
        lease_s = min(body.lease_s, self.lease_s_max)
        terms = self._terms(agent, body.limit, lease_s, body.worker)
        if body.wait_s:
            claimed = await self._wait(call, terms, body.wait_s)
        else:
            claimed = await self.writer.submit(terms, call.identity)
        if not claimed:
            return NOTHING
        self.stir()
        self.harness.lease_given(lease_s)
        for task in claimed:
            self.journal.write("claimed", task_id=task.task_id, agent=agent, attempt=task.attempt)
        shown = [_shown(task) for task in claimed]
        return Reply(200, _encode(shown[0] if body.limit == 1 else ClaimedTasks(shown)))

    async def _wait(self, call: Call, terms: Claim, wait_s: float) -> list[Task]:
        """A long poll. What was claimed for somebody who is gone by then is given back at once."""
        self._polls.take(call.identity)
        gone = asyncio.ensure_future(_gone(call.receive))
        try:
            claimed = await self.waiting.claim(terms, call.identity, wait_s, gone)
            if gone.done():
                await self._release(call, claimed)
                raise Gone
            return claimed
        finally:
            self._polls.give_back(call.identity)
            gone.cancel()

    async def _release(self, call: Call, claimed: list[Task]) -> None:
        for task in claimed:
            with suppress(PostroomError):
                await self.writer.submit(_releasing(task), call.identity, makes_room=True)

    async def complete(self, call: Call) -> Reply:
        body: CompleteBody = call.body
        owner = _owner(call)

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
            work, call.identity, TASK_BYTES * (1 + body.claim_next) + call.size, makes_room=True
        )
        if repeated:  # the first may stand in the same commit, so it is read after that
            await self.read_for(call, lambda: _check_same_decision(self.tasks, body))
        self.harness.wake()
        return self._completed(call, body.task_id, claimed)

    def _completed(self, call: Call, task_id: str, claimed: list[Task]) -> Reply:
        for task in claimed:
            self.harness.lease_given(task.lease_s)
            self.journal.write("claimed", task_id=task.task_id, agent=task.agent, attempt=task.attempt)
        self._said(call, "completed", task_id)
        return Reply(202, _encode(CompletedAnswer(task_id, [_shown(task) for task in claimed])))

    async def heartbeat(self, call: Call) -> Reply:
        body: HolderBody = call.body
        return await self._word(
            call, "heartbeat", lambda operations: operations.heartbeat(body.task_id, body.lease)
        )

    async def fail(self, call: Call) -> Reply:
        body: FailBody = call.body
        return await self._word(
            call,
            "failed",
            lambda operations: operations.fail(body.task_id, body.lease, body.error, body.retry_in_s),
        )

    async def release(self, call: Call) -> Reply:
        body: HolderBody = call.body
        return await self._word(
            call, "released", lambda operations: operations.release(body.task_id, body.lease)
        )

    async def _word(self, call: Call, event: str, say: Callable[[TaskOperations], None]) -> Reply:
        """What a holder says about a task, which has to be its own agent's."""
        task_id, owner = call.body.task_id, _owner(call)

        def work(operations: TaskOperations) -> None:
            _mine(operations, task_id, owner)
            say(operations)

        return await self._say(call, event, task_id, work, makes_room=True)

    async def _say(
        self,
        call: Call,
        event: str,
        task_id: str,
        work: Callable[[TaskOperations], None],
        *,
        makes_room: bool,
    ) -> Reply:
        await self.writer.submit(work, call.identity, TASK_BYTES + call.size, makes_room=makes_room)
        return self._said(call, event, task_id)

    def _said(self, call: Call, event: str, task_id: str) -> Reply:
        """The answer to a word that is committed."""
        self.stir()
        self.journal.write(event, task_id=task_id, agent=call.identity.name)
        return Reply(202, _encode(TaskAnswer(task_id)))

    # ---- what operators do, and agents that may send ------------------------------------------

    async def enqueue(self, call: Call) -> Reply:
        many = isinstance(call.body, NewTasks)
        new: list[NewTask] = call.body.tasks if many else [call.body]
        agents = {task.agent for task in new}
        sender = "" if call.identity.is_operator else call.identity.name
        if sender:
            _check_may_send(call.identity, agents)
        warning = self._unregistered(agents)
        self.tasks.check_backlog()
        tasks = [task_operations.NewTask(**msgspec.structs.asdict(task), sender=sender) for task in new]
        task_ids: list[str] = await self.writer.submit(
            lambda operations: operations.enqueue(tasks), call.identity, TASK_BYTES * len(new) + call.size
        )
        self.stir()
        for added, task_id in zip(new, task_ids, strict=True):
            self.journal.write("enqueued", task_id=task_id, agent=added.agent)
        answer = NewTasksAnswer(task_ids, warning) if many else NewTaskAnswer(task_ids[0], warning)
        return Reply(201, _encode(answer))

    def _unregistered(self, agents: set[str]) -> str:
        """A warning about agents that have no token here, and so may never take what is sent to them."""
        missing = sorted(agent for agent in agents if not self.agents.knows(agent))
        return f"no agent {', '.join(map(repr, missing))} is registered here" if missing else ""

    async def cancel(self, call: Call) -> Reply:
        task_id = call.in_path("id")
        return await self._say(
            call, "cancelled", task_id, lambda operations: operations.cancel(task_id), makes_room=True
        )

    async def retry(self, call: Call) -> Reply:
        task_id = call.in_path("id")
        return await self._say(
            call, "retried", task_id, lambda operations: operations.retry(task_id), makes_room=False
        )

    async def result(self, call: Call) -> Reply:
        """Only a nudge: whether there is a result, the harness sees for itself."""
        body: ResultBody = call.body
        owner = _owner(call)
        await self.read_for(call, lambda: _seen(self.tasks, body.task_id, owner))
        self.harness.wake()
        return Reply(202, _encode(TaskAnswer(body.task_id)))

    # ---- looking -------------------------------------------------------------------------------

    async def show(self, call: Call) -> Reply:
        query: ShowQuery = call.query
        info = await self._readable(call)
        if query.wait_s and not info.ended:
            await self._wait_for_end(call, info.task_id, query.wait_s)
            info = await self._readable(call)
        return Reply(200, _encode(info))

    async def _readable(self, call: Call) -> TaskInfo:
        """A task, for its agent, its sender and operators; unknown to everybody else."""
        task_id, owner = call.in_path("id"), _own_queue(call.identity)
        info = await self.read_for(call, lambda: self.tasks.get(task_id))
        if owner is not None and owner not in (info.agent, info.sender):
            raise UnknownTask(task_id)
        return info

    async def _wait_for_end(self, call: Call, task_id: str, wait_s: float) -> None:
        """A long poll for a result. It counts in the token's share, as one for a task does."""
        self._polls.take(call.identity)
        gone = asyncio.ensure_future(_gone(call.receive))
        try:
            await self.endings.wait(task_id, wait_s, gone)
            if gone.done():
                raise Gone
        finally:
            self._polls.give_back(call.identity)
            gone.cancel()

    async def find(self, call: Call) -> Reply:
        query: FindQuery = call.query
        owner = _own_queue(call.identity)
        if owner is not None and query.agent not in (UNSET, owner):
            raise Refusal(403, "Forbidden", f"this token is {owner}'s, and lists no other agent's tasks")
        agent = owner or (query.agent or None)
        state = query.state or None
        lines = await self.read_for(
            call, lambda: self.tasks.find(agent=agent, state=state, after=query.after, limit=query.limit)
        )
        return Reply(200, _encode(LinesAnswer(lines)))

    async def status(self, call: Call) -> Reply:
        found = await self.read_for(call, self.tasks.status)
        owner = _own_queue(call.identity)
        if owner is None:
            return Reply(200, _encode(StatusAnswer(found.agents, found.totals, self.harness.status())))
        own = {agent: status for agent, status in found.agents.items() if agent == owner}
        return Reply(200, _encode(StatusAnswer(own, _totals(own.values()))))

    async def health(self, call: Call) -> Reply:  # noqa: ARG002 - it is the same for everybody
        if self.tasks.store.trouble:
            return Reply(
                503, _encode(ErrorAnswer("Unavailable", "the store cannot be written to at present"))
            )
        if self.writer.alive and self.harness.alive:
            parts = await self._parts()
            return Reply(200, _encode(HealthAnswer("degraded" if parts else "ok", parts)))
        return Reply(503, _encode(ErrorAnswer("Unavailable", "a thread of the server has ended: restart it")))

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

    async def openapi(self, call: Call) -> Reply:  # noqa: ARG002
        return Reply(200, self.openapi_json)

    async def metrics(self, call: Call) -> Reply:
        status = await self.read_for(call, self.tasks.status)
        lines = [*_queue_metrics(status.agents), *_stream_metrics(status), *self._own_metrics()]
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Reply(200, "".join(f"{line}\n" for line in lines).encode(), (kind,))

    def _own_metrics(self) -> Iterable[str]:
        harness = self.harness.status()
        yield "# TYPE postroom_loop_runs_total counter"
        for name, loop in harness.loops.items():
            yield f'postroom_loop_runs_total{{loop="{name}"}} {loop.runs}'
        yield "# TYPE postroom_loop_errors_total counter"
        for name, loop in harness.loops.items():
            yield f'postroom_loop_errors_total{{loop="{name}"}} {loop.errors}'
        yield "# TYPE postroom_decisions_executed_total counter"
        yield f"postroom_decisions_executed_total {harness.executed}"
        yield "# TYPE postroom_nudges_total counter"
        yield f'postroom_nudges_total{{outcome="sent"}} {harness.nudges_sent}'
        yield f'postroom_nudges_total{{outcome="failed"}} {harness.nudges_failed}'
        yield "# TYPE postroom_waiting_requests gauge"
        yield f"postroom_waiting_requests {self.waiting.count}"
        yield "# TYPE postroom_commits_total counter"
        yield f"postroom_commits_total {self.writer.turns}"
        yield "# TYPE postroom_requests_total counter"
        for (route, status), count in sorted(self.requests.items()):
            yield f'postroom_requests_total{{route="{route}",status="{status}"}} {count}'

    # ---- streams -------------------------------------------------------------------------------

    async def events(self, call: Call) -> None:
        last = call.header(b"last-event-id")
        if last and not _NUMBER.fullmatch(last):
            raise InvalidMessage("Last-Event-ID must be the number of an event")
        owner = _own_queue(call.identity)

        def page(position: int) -> tuple[bytes, int]:
            events = self.tasks.events(after=position, limit=STREAM_PAGE)
            shown = [event for event in events if owner is None or event.queue == owner]
            data = b"".join(_sse(str(event.seq), event.kind, _encode(event)) for event in shown)
            return data, events[-1].seq if events else position

        await self._stream(call, page, int(last) if last else call.query.after, partial(self.read_for, call))

    async def read_bus(self, call: Call) -> Reply | None:
        query: BusQuery = call.query
        name = call.in_path("name")
        path = self.buses.path(name)
        if EVENT_STREAM not in call.header(b"accept"):
            messages = await self.on_bus(call, lambda: self.buses.read(name, query.since, query.limit))
            return Reply(200, _encode(BusAnswer(messages)))
        looks: tuple[int, int, int] | None = None
        since = call.header(b"last-event-id") or query.since
        follower = self.buses.follow(name, since)

        def page(position: str) -> tuple[bytes, str]:
            nonlocal looks
            before = _looks(path)
            if before == looks:
                return b"", position
            try:
                messages = follower.page(PAGE_DEFAULT, STREAM_PAGE_BYTES_MAX)
            except SinceIdNotFound:  # in an archive that is gone, or nowhere ever
                follower.since = ""
                return _sse("", "reset", _encode(ResetNotice(position))), ""
            if not messages:
                looks = before
                return b"", position
            data = b"".join(_sse(message.msg_id, "message", _encode(message)) for message in messages)
            return data, messages[-1].msg_id

        await self._stream(call, page, since, partial(self.on_bus, call))
        return None

    async def append_bus(self, call: Call) -> Reply:
        body: NewBusMessage = call.body
        name = call.in_path("name")
        msg_id = await self.on_bus(call, lambda: self.buses.append(name, body, call.identity))
        self.stir()
        self.journal.write("appended", agent=call.identity.name, bus=name, msg_id=msg_id)
        return Reply(201, _encode(BusIdAnswer(msg_id)))

    async def _stream(self, call: Call, page: Callable[[T], tuple[bytes, T]], position: T, run: Run) -> None:
        """Send page after page as long as somebody listens whose token is worth something."""
        self._streams.take(call.identity)
        gone = asyncio.ensure_future(_gone(call.receive))
        try:
            stirred = self._stirred
            data, behind = await run(lambda: page(position))
            await call.send(_STREAM_STARTS)
            await call.send(_piece(data or b": ready\n\n"))
            await self._follow(call, page, behind, run, gone, stirred)
            await call.send({"type": "http.response.body", "body": b""})
        finally:
            self._streams.give_back(call.identity)
            gone.cancel()

    async def _follow(
        self,
        call: Call,
        page: Callable[[T], tuple[bytes, T]],
        position: T,
        run: Run,
        gone: "asyncio.Future[None]",
        stirred: "asyncio.Future[None]",
    ) -> None:
        quiet_s = 0.0
        ends = (gone, self.waiting.ending)
        while not any(end.done() for end in ends) and self.agents.identify(call.token) is not None:
            at = position
            data, position = await run(lambda at=at: page(at))  # type: ignore[misc]
            if data:
                await call.send(_piece(data))
            if position != at:
                quiet_s = 0.0
                continue
            quiet_s += STREAM_LOOK_S
            if quiet_s >= STREAM_ALIVE_S:
                quiet_s = 0.0
                await call.send(_piece(b": alive\n\n"))
            await asyncio.wait(
                (*ends, stirred), timeout=STREAM_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
            if stirred.done():
                await asyncio.sleep(STREAM_GATHER_S)
            stirred = self._stirred


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


async def _gone(receive: Receive) -> None:
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


def _owner(call: Call) -> str | None:
    """Whose tasks a call is about: the token says it. An operator may name an agent, or mean any."""
    identity, body = call.identity, call.body
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


def _queue_metrics(agents: dict[str, AgentStatus]) -> Iterable[str]:
    yield "# TYPE postroom_queue_depth gauge"
    yield from (f'postroom_queue_depth{{agent="{name}"}} {agent.depth}' for name, agent in agents.items())
    yield "# TYPE postroom_in_flight gauge"
    yield from (f'postroom_in_flight{{agent="{name}"}} {agent.in_flight}' for name, agent in agents.items())
    yield "# TYPE postroom_oldest_age_seconds gauge"
    for name, agent in agents.items():
        yield f'postroom_oldest_age_seconds{{agent="{name}"}} {agent.oldest_age_s or 0:.3f}'
    yield "# TYPE postroom_lapses_total counter"
    yield from (f'postroom_lapses_total{{agent="{name}"}} {agent.lapses}' for name, agent in agents.items())
    yield "# TYPE postroom_tasks gauge"
    for name, agent in agents.items():
        for state, n in sorted(agent.states.items()):
            yield f'postroom_tasks{{agent="{name}",state="{state}"}} {n}'


def _stream_metrics(status: TasksStatus) -> Iterable[str]:
    """Nothing when nobody ships the events."""
    if status.events_waiting is not None:
        yield "# TYPE postroom_events_waiting gauge"
        yield f"postroom_events_waiting {status.events_waiting}"
        yield "# TYPE postroom_held_up_total counter"
        yield f"postroom_held_up_total {status.held_up}"
