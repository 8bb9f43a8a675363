"""Server-sent events, and the routes of buses.

Rule 1: a stream ends when its client disconnects, its token is removed, the server stops, or nothing more
        can come.
Rule 2: a stream reads page by page, so a slow client keeps at most one page in memory.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Message

from postroom.calls.fields import PAGE_DEFAULT
from postroom.calls.server import (
    BusAnswer,
    BusesAnswer,
    BusIdAnswer,
    PostToBus,
    ReadBus,
    RemoveBus,
    RemovedBusAnswer,
)
from postroom.calls.verb import EVENT_STREAM
from postroom.core.gate import visible_org
from postroom.errors import InvalidMessage, SinceIdNotFound
from postroom.message import BusMessage
from postroom.server.access.task_names import own_queue, shown_event, stored_place
from postroom.server.folder.buses import BusRemoved, Follower
from postroom.server.http.exchange import HttpRequest, StreamRefused, disconnection
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.task_handlers import is_valid

T = TypeVar("T")

STREAM_POLL_S = 1.0  # writes of other processes are seen within this
STREAM_GATHER_S = 0.02
STREAM_ALIVE_S = 15.0  # between comments, by which a lost connection is noticed
STREAM_PAGE = 500
STREAM_PAGE_BYTES_MAX = 1024 * 1024  # of message bodies in one write to an event stream


class ResetNotice(msgspec.Struct, frozen=True):
    """The event `reset` of a bus stream: `since` was removed, and the oldest message comes next."""

    since: str


class RemovedNotice(msgspec.Struct, frozen=True):
    """The event `removed` of a bus stream, which is its last."""

    message: str


_encode = msgspec.json.Encoder().encode
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a read of the store or of a bus in a thread."""
ReadPage = Callable[[T], tuple[bytes, T | None]]
"""Reads the page after a position. Returns its bytes and its last position; None when the stream is over."""


async def events(server: TaskServer, request: HttpRequest) -> None:
    last = request.header(b"last-event-id")
    if last and not is_number(last):
        raise InvalidMessage("Last-Event-ID must be the number of an event")
    ids, caller = server.ids, request.identity
    owner = own_queue(server.agents, caller)

    def page(position: int) -> tuple[bytes, int]:
        found = server.tasks.events(after=position, limit=STREAM_PAGE)
        visible = [
            shown_event(ids, caller, ids.shown(event))
            for event in found
            if owner is None or event.queue == owner
        ]
        data = b"".join(sse(str(event.seq), event.kind, _encode(event)) for event in visible)
        return data, found[-1].seq if found else position

    position = stored_place(ids, caller.org, int(last) if last else request.call.after)
    await EventStream(server, request, page, partial(server.read_for, request)).send(position)


async def find_buses(server: TaskServer, request: HttpRequest) -> BusesAnswer:
    """The buses by name that the caller may read."""
    found: dict[str, list[str]] = await server.on_bus(request, lambda: server.buses.names(request.identity))
    allowed = {org: names for org, names in found.items() if names}
    if visible_org(request.identity) is None:
        return BusesAnswer(allowed.pop("", []), allowed)
    return BusesAnswer(sorted({*chain.from_iterable(allowed.values())}))


async def read_bus(server: TaskServer, request: HttpRequest) -> BusAnswer | None:
    call: ReadBus = request.call
    if EVENT_STREAM not in request.header(b"accept"):
        messages = await server.on_bus(
            request,
            lambda: server.buses.read(call.bus, call.since, call.limit, request.identity, call.org_id),
        )
        return BusAnswer(messages)
    since = request.header(b"last-event-id") or call.since
    page = await bus_pages(server, request, since)
    await EventStream(server, request, page, partial(server.on_bus, request)).send(since)
    return None


async def bus_pages(
    server: TaskServer,
    request: HttpRequest,
    since: str,
    shown: Callable[[BusMessage], Any] | None = None,
    bytes_max: int = STREAM_PAGE_BYTES_MAX,
) -> ReadPage[str]:
    """A reader of the bus of the path. `shown` is applied to each message."""
    name, org_id = request.path_param("name"), request.call.org_id
    follower: Follower = await server.on_bus(
        request, lambda: server.buses.follow(name, since, request.identity, org_id)
    )

    def page(position: str) -> tuple[bytes, str | None]:
        try:
            messages = follower.page(PAGE_DEFAULT, bytes_max)
        except SinceIdNotFound:  # it was in an archive that was removed, or never existed
            follower.since = ""
            return sse("", "reset", _encode(ResetNotice(position))), ""
        except BusRemoved:
            return sse("", "removed", _encode(RemovedNotice(f"the bus {name!r} was removed"))), None
        if not messages:
            return b"", position
        data = b"".join(
            sse(message.msg_id, "message", _encode(message if shown is None else shown(message)))
            for message in messages
        )
        return data, messages[-1].msg_id

    return page


async def append_bus(server: TaskServer, request: HttpRequest) -> BusIdAnswer:
    call: PostToBus = request.call
    msg_id = await server.on_bus(request, lambda: server.buses.append(call, request.identity))
    server.wake_streams()
    server.server_log.write("appended", agent=request.identity.name, bus=call.bus, msg_id=msg_id)
    return BusIdAnswer(msg_id)


async def remove_bus(server: TaskServer, request: HttpRequest) -> RemovedBusAnswer:
    call: RemoveBus = request.call
    key = await server.on_bus(request, lambda: server.buses.remove(call.bus, request.identity, call.org_id))
    server.wake_streams()
    server.server_log.write("bus_removed", agent=request.identity.name, bus=call.bus, org=key.org)
    return RemovedBusAnswer(key.name, key.org)


class EventStream(Generic[T]):
    """One event stream to one client."""

    def __init__(
        self,
        server: TaskServer,
        request: HttpRequest,
        page: ReadPage[T],
        run: Run,
        *,
        poll_s: float = STREAM_POLL_S,
        is_allowed: Callable[[], bool] | None = None,
    ) -> None:
        self._poll_s = poll_s
        self._is_allowed = is_allowed or (lambda: is_valid(server, request))
        self._server = server
        self._request = request
        self._page = page
        self._run = run

    async def send(self, position: T) -> None:
        """Send page after page from a position on, until the stream ends."""
        server, request = self._server, self._request
        server.stream_share.take(request.identity)
        disconnected = asyncio.ensure_future(disconnection(request))
        try:
            woken = server.streams_woken
            data, reached = await self._read(position)
            await request.send(STREAM_STARTS)
            await request.send(chunk(data or b": ready\n\n"))
            if reached is not None:
                with server.open_calls.joined(self._is_allowed) as ended:
                    await self._follow(reached, (disconnected, server.long_polls.ending, ended), woken)
            await end_stream(request, disconnected, self._is_allowed)
        finally:
            server.stream_share.give_back(request.identity)
            disconnected.cancel()

    async def _follow(
        self, position: T, ends: tuple["asyncio.Future[None]", ...], woken: "asyncio.Future[None]"
    ) -> None:
        quiet_s = 0.0
        while not any(end.done() for end in ends) and self._is_allowed():
            data, reached = await self._read(position)
            if data:
                await self._request.send(chunk(data))
            if reached is None:
                return
            if reached != position:
                position, quiet_s = reached, 0.0
                continue
            quiet_s += self._poll_s
            if quiet_s >= STREAM_ALIVE_S:
                quiet_s = 0.0
                await self._request.send(chunk(b": alive\n\n"))
            await asyncio.wait(
                (*ends, woken), timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
            if woken.done():
                await asyncio.sleep(STREAM_GATHER_S)
            woken = self._server.streams_woken

    async def _read(self, position: T) -> tuple[bytes, T | None]:
        page: tuple[bytes, T | None] = await self._run(lambda: self._page(position))
        return page


STREAM_STARTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ],
}


def chunk(data: bytes) -> Message:
    """Part of the body of a stream."""
    return {"type": "http.response.body", "body": data, "more_body": True}


async def end_stream(
    request: HttpRequest, disconnected: "asyncio.Future[None]", is_allowed: Callable[[], bool]
) -> None:
    """Complete the reply of a stream. Raises `StreamRefused` when its token or session has ended."""
    is_refused = not disconnected.done() and not is_allowed()
    await request.send({"type": "http.response.body", "body": b""})
    if is_refused:
        raise StreamRefused


def is_number(text: str) -> bool:
    """Whether a text is the number of an event."""
    return _NUMBER.fullmatch(text) is not None


def sse(event_id: str, kind: str, data: bytes) -> bytes:
    """One server-sent event."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)
