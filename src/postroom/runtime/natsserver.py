"""A NATS server: publish, subscribe, request and reply, and a room that has its own part of the subjects.

Rule 1: everything happens on one loop. A turn takes in what has come, and at its end each connection with
        something to get is written to once.
Rule 2: what the room owns goes to the room and to nobody else: no wildcard of the plain half sees it.
Rule 3: SIGTERM and SIGINT are a lame duck's end: nobody new comes in, everyone is told, and after a moment
        the rest is closed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from postroom.contracts.mail import Room
from postroom.core import natswire as wire
from postroom.core.subjects import Subscriptions, has_wildcard
from postroom.errors import Unavailable
from postroom.runtime.natsconn import (
    AUTHENTICATION_TIMEOUT,
    AUTHORIZATION_VIOLATION,
    STALE_CONNECTION,
    TOO_LARGE_SUBSCRIPTIONS,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_LOGINS,
    TOO_MANY_SUBSCRIPTIONS,
    ServerConnection,
    Subscription,
)
from postroom.runtime.natsoptions import (
    CLIENT_PENDING_BYTES_MAX,
    CLIENT_SUBSCRIPTION_BYTES_MAX,
    LOGINS_MAX,
    ROOM_GROUP_COST_BYTES,
    ROOM_SUBSCRIPTION_COST_BYTES,
    SUBSCRIPTION_COST_BYTES,
    UNFINISHED_BYTES_MAX,
    WILDCARD_TOKEN_COST_BYTES,
    ServerOptions,
    allowed_connections,
    client_of,
    network_of,
)
from postroom.system.callbacks import attempt

PROTOCOL_VERSION = "2.10.0"  # clients compare it: the nats-server whose core protocol this is
BACKLOG = 1024
PINGS_OUT_MAX = 2
TLS_TIMEOUT_S = 5.0
TICK_S = 0.25
ROOM_BODIES_MAX = 200  # handed to the room between two looks at the clock
CLOSE_TIMEOUT_S = 0.4

RunSoon = Callable[[Callable[[], None]], object]


class NatsServer:
    """Listens, routes, and keeps the time."""

    def __init__(self, options: ServerOptions, room: Room | None = None) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.payload_bytes_max = options.payload_bytes_max
        self.pending_bytes_max = options.pending_bytes_max
        self._client_pending_bytes_max = max(CLIENT_PENDING_BYTES_MAX, options.pending_bytes_max)
        self.needs_auth = options.needs_auth
        self.port = options.port
        self.connections: set[ServerConnection] = set()
        self._room = room
        self._subscriptions: Subscriptions[Subscription] = Subscriptions()
        self.match = self._subscriptions.match
        self.literal = self._subscriptions.literal
        self._server: asyncio.Server | None = None
        self._identity = os.urandom(16).hex().upper()
        self._numbers = 0
        self._shares: Counter[str] = Counter()
        """Clients to how many connections they have, those that are being closed included."""
        self._unfinished: dict[str, int] = {}
        """Addresses to what has come of messages that are not complete."""
        self._waiting: dict[str, int] = {}
        """Clients to what those of their connections have waiting that take no more at present."""
        self._subscribed: dict[str, int] = {}
        """Clients to what their subscriptions cost."""
        self._logins: dict[str, int] = {}
        """Addresses to how many of their connections have not logged in."""
        self._turns = 0  # which member of a queue group is next
        self._dirty: list[ServerConnection] = []
        self._publishers: set[ServerConnection] = set()
        """Who gave the room something in this turn."""
        self._turn_open = False
        self._flushing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_ping_s = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        self._lame = False
        self._stop = asyncio.Event()
        self._empty = asyncio.Event()
        """Whether nobody is connected."""
        self._empty.set()
        self.failure: BaseException | None = None
        """Why it had to stop; None when it was asked to."""

    # ---- life ------------------------------------------------------------------------------------------

    async def bind(self) -> None:
        """Take the port, which `port` tells from here on. Nobody can connect yet."""
        context = self.options.tls if self.options.tls_first else None
        try:
            self._server = await self.loop.create_server(
                self._connection,
                self.options.host,
                self.options.port,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=TLS_TIMEOUT_S if context else None,
                start_serving=False,
            )
        except OSError as error:
            raise self._cannot_listen(error) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def start(self, room: Room | None = None) -> None:
        """Listen, for a room that was made after the port was taken."""
        self._room = room or self._room
        if self._server is None:
            await self.bind()
        assert self._server is not None  # noqa: S101 - for the types: it has its port
        try:
            await self._server.start_serving()
        except OSError as error:
            raise self._cannot_listen(error) from None
        self._next_ping_s = self.loop.time() + self.options.ping_interval_s
        self._ticker = self.loop.call_later(TICK_S, self._tick)

    def _cannot_listen(self, error: OSError) -> Unavailable:
        """Asyncio tells the address a second time, and a name that is not known has no number of its own."""
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        return Unavailable(f"cannot listen on {self.options.host} port {self.options.port}: {why}")

    def unbind(self) -> None:
        """Give the port back, when there is nothing to serve."""
        if self._server is not None:
            self._server.close()

    def ask_to_stop(self) -> None:
        self._stop.set()

    async def until_stopped(self) -> None:
        """Serve until somebody asks to stop, and then end."""
        await self._stop.wait()
        await self.close()

    async def close(self) -> None:
        """Tell everyone, wait a moment for them to leave, and close."""
        self._lame = True
        assert self._server is not None  # noqa: S101 - for the types: it was started
        self._server.close()
        for link in list(self.connections):
            link.send(self.info_for(link))
        await self._until_empty(self.options.lame_duck_s)
        await self._finish_room()
        await self._close_connections()
        if self._ticker is not None:
            self._ticker.cancel()
        self._server.close()

    async def _finish_room(self) -> None:
        if self._room is None:
            return
        self._end_turn()
        while self._flushing is not None:
            await asyncio.wait([self._flushing])
        self._room.close()
        await asyncio.sleep(0)  # what it has handed to `run_soon` on its way out is delivered, too

    async def _close_connections(self) -> None:
        for link in list(self.connections):
            link.end()
        await self._until_empty(CLOSE_TIMEOUT_S)
        for link in list(self.connections):
            link.cut()
        await self._until_empty(CLOSE_TIMEOUT_S)

    async def _until_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.ask_to_stop()

    # ---- connections -----------------------------------------------------------------------------------

    def _connection(self) -> ServerConnection:
        self._numbers += 1
        return ServerConnection(self, self._numbers)

    def joined(self, link: ServerConnection) -> str:
        link.network = network_of(link.peer_address)
        client = client_of("", link.network)
        if self._lame or len(self.connections) >= self.options.connections_max or not self._has_share(client):
            return TOO_MANY_CONNECTIONS
        if self.needs_auth and not self._may_log_in(link):
            return TOO_MANY_LOGINS
        self.connections.add(link)
        self._shares[client] += 1
        link.client = client
        self._empty.clear()
        return ""

    def _has_share(self, client: str) -> bool:
        """Whether a client may have one more connection."""
        return self._shares[client] < self.options.client_connections_max

    def _end_share(self, client: str) -> None:
        self._shares[client] -= 1
        if not self._shares[client]:
            del self._shares[client]

    def _move_share(self, link: ServerConnection, client: str) -> bool:
        """Count a connection against who logged in, and no longer its address; whether there is room."""
        if not self._has_share(client):
            return False
        self._end_share(link.client)
        self._shares[client] += 1
        self._count_for(link, client)
        return True

    def _may_log_in(self, link: ServerConnection) -> bool:
        """Whether its address has few connections that have not logged in; this one is counted then."""
        count = self._logins.get(link.network, 0)
        if count >= LOGINS_MAX:
            return False
        self._logins[link.network] = count + 1
        self.loop.call_later(self.options.auth_timeout_s, self._expect_admitted, link)
        return True

    def _end_login(self, address: str) -> None:
        """A connection has logged in, or has ended without that."""
        left = self._logins.pop(address, 0) - 1
        if left > 0:
            self._logins[address] = left

    def _expect_admitted(self, link: ServerConnection) -> None:
        if not link.admitted and not link.is_closing:
            link.fail(AUTHENTICATION_TIMEOUT)

    def holds(self, link: ServerConnection, more: int) -> bool:
        return _add(self._unfinished, link.network, more) <= UNFINISHED_BYTES_MAX

    def waits(self, link: ServerConnection, more: int) -> bool:
        return _add(self._waiting, link.client, more) <= self._client_pending_bytes_max

    def gave_up(self, link: ServerConnection) -> None:
        for subscription in link.subscriptions.values():
            if not subscription.owned:
                self._subscriptions.remove(subscription.subject, subscription)
        link.subscriptions.clear()
        _add(self._subscribed, link.client, -link.subscription_bytes)
        if self.needs_auth and not link.admitted and link in self.connections:
            self._end_login(link.network)
        if self._room is not None:
            attempt(self._room.closed, link)

    def left(self, link: ServerConnection) -> None:
        if link in self.connections:
            self.connections.remove(link)
            self._end_share(link.client)
        if not self.connections:
            self._empty.set()

    def info_for(self, link: ServerConnection) -> bytes:
        facts: dict[str, Any] = {
            "server_id": self._identity,
            "server_name": "postroom",
            "version": PROTOCOL_VERSION,
            "proto": 1,
            "host": self.options.host,
            "port": self.port,
            "headers": True,
            "max_payload": self.payload_bytes_max,
            "client_id": link.number,
            "client_ip": link.peer_address,
        }
        if self.options.needs_auth:
            facts["auth_required"] = True
        if self.options.tls is not None:
            facts["tls_required"] = True
        if self._lame:
            facts["ldm"] = True
        return wire.info(facts)

    def upgrade(self, link: ServerConnection, transport: asyncio.Transport) -> bool:
        if self.options.tls is None or self.options.tls_first:
            return False
        self._keep(self._start_tls(link, transport, self.options.tls))
        return True

    async def _start_tls(
        self, link: ServerConnection, transport: asyncio.Transport, context: ssl.SSLContext
    ) -> None:
        # A client speaks when it has read INFO. From here to the new protocol nothing lets the loop read, so
        # that TLS gets its first byte.
        transport.write(self.info_for(link))
        try:
            secured = await self.loop.start_tls(
                transport, link, context, server_side=True, ssl_handshake_timeout=TLS_TIMEOUT_S
            )
        except OSError:
            link.cut()
            return
        if secured is not None:
            link.secured(secured)

    def _keep(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine, and hold it: the loop alone would let it be collected."""
        task: asyncio.Task[None] = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def admit(self, link: ServerConnection, options: wire.ConnectOptions | None) -> str:
        user = self.options.user_of(options or wire.ConnectOptions())
        if user is None:
            return AUTHORIZATION_VIOLATION
        client = client_of(user, link.network)
        if client != link.client and not self._move_share(link, client):
            return TOO_MANY_CONNECTIONS
        if self.needs_auth and not link.admitted:
            self._end_login(link.network)
        link.user, link.admitted = user, True
        return ""

    def _count_for(self, link: ServerConnection, client: str) -> None:
        """From here on a connection counts against this client."""
        for counts, held in (
            (self._waiting, link.waiting_bytes),
            (self._subscribed, link.subscription_bytes),
        ):
            _add(counts, link.client, -held)
            _add(counts, client, held)
        link.client = client

    # ---- routing ---------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> str:
        link = subscription.link
        if len(link.subscriptions) > self.options.subscriptions_max:
            return TOO_MANY_SUBSCRIPTIONS
        text = self._owned(subscription.subject)
        subscription.owned = text is not None
        subscription.cost = _cost_of(subscription)
        if self._subscribed.get(link.client, 0) + subscription.cost > CLIENT_SUBSCRIPTION_BYTES_MAX:
            return TOO_LARGE_SUBSCRIPTIONS
        self._count_subscription(link, subscription.cost)
        if text is None or self._room is None:
            self._subscriptions.add(subscription.subject, subscription)
            return ""
        link.narrow()
        group = subscription.group.decode("utf-8", "replace")
        refusal = self._room.subscribed(link, subscription.sid.decode("utf-8", "replace"), text, group)
        if refusal:
            self._count_subscription(link, -subscription.cost)
        return refusal or ""

    def _count_subscription(self, link: ServerConnection, cost: int) -> None:
        link.subscription_bytes += cost
        _add(self._subscribed, link.client, cost)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._count_subscription(subscription.link, -subscription.cost)
        if not subscription.owned:
            self._subscriptions.remove(subscription.subject, subscription)
        elif self._room is not None:
            self._room.unsubscribed(subscription.link, subscription.sid.decode("utf-8", "replace"))

    def _owned(self, subject: bytes) -> str | None:
        """The subject as text when it is the room's."""
        if self._room is None:
            return None
        text = subject.decode("utf-8", "replace")
        return text if self._room.owns(text) else None

    def publish(self, link: ServerConnection, head: wire.Head, bodies: list[bytes]) -> int:
        if self._room is not None:
            text = self._owned(head.subject)
            if text is not None:
                return self._give_to_room(link, text, head, bodies)
        each, groups = self.match(head.subject)
        receivers = self._deliver_to_each(link, each, head, bodies) if each else 0
        for members in groups:
            receivers += self._deliver_to_one(link, members, head, bodies)
        if not receivers and head.reply and link.no_responders:
            self._say_no_responders(link, head, len(bodies))
        return len(bodies)

    def _deliver_to_each(
        self, link: ServerConnection, each: tuple[Subscription, ...], head: wire.Head, bodies: list[bytes]
    ) -> int:
        """All bodies to all subscriptions; gives how many these are."""
        receivers = 0
        made, made_for, made_with = b"", b"", False
        for subscription in each:
            receiver = subscription.link
            if receiver.is_closing or (receiver is link and not link.echo):
                continue
            receivers += 1
            if subscription.last:
                self._deliver(subscription, head, subscription.take(bodies))
                continue
            subscription.delivered += len(bodies)
            # Subscribers to one subject often have the same sid: then they get the very same bytes.
            if subscription.sid != made_for or receiver.headers != made_with:
                made_for, made_with = subscription.sid, receiver.headers
                made = wire.passed_on(head, bodies, made_for, with_headers=made_with)
            receiver.send(made)
        return receivers

    def _deliver(self, subscription: Subscription, head: wire.Head, bodies: list[bytes]) -> None:
        link = subscription.link
        if bodies and not link.is_closing:
            link.send(wire.passed_on(head, bodies, subscription.sid, with_headers=link.headers))
        if subscription.last and subscription.delivered >= subscription.last:
            link.drop(subscription)

    def _deliver_to_one(
        self, link: ServerConnection, members: tuple[Subscription, ...], head: wire.Head, bodies: list[bytes]
    ) -> int:
        """Each body to one member of a queue group, by turns; gives whether there is a member."""
        able = [each for each in members if (link.echo or each.link is not link) and not each.link.is_closing]
        if not able:
            return 0
        while bodies:
            able = [each for each in able if not each.last or each.delivered < each.last]
            if not able:
                break
            count = len(able)
            self._turns += 1
            first = self._turns % count
            refused: list[bytes] = []
            for place, member in enumerate(able):
                share = bodies[(place - first) % count :: count]
                taken = member.take(share)
                refused += share[len(taken) :]
                self._deliver(member, head, taken)
            self._turns += len(bodies)
            bodies = refused
        return 1

    @staticmethod
    def _say_no_responders(link: ServerConnection, head: wire.Head, times: int) -> None:
        headers = wire.NO_RESPONDERS % head.subject
        reply = head.reply.decode("utf-8", "surrogateescape")
        for _ in range(times):
            link.answer(reply, b"", headers)

    # ---- the room --------------------------------------------------------------------------------------

    def _give_to_room(
        self, link: ServerConnection, subject: str, head: wire.Head, bodies: list[bytes]
    ) -> int:
        """Gives how many bodies there was time for, at least one."""
        room = self._room
        assert room is not None  # noqa: S101 - for the types: it owns the subject
        reply = head.reply.decode("utf-8", "replace")
        header_bytes = max(head.header_bytes, 0)
        # Plain messages are stored together. What can be answered may take long, and goes one by one.
        step = 1 if reply or header_bytes else ROOM_BODIES_MAX
        taken = 0
        while taken < len(bodies):
            some = bodies[taken : taken + step]
            room.published(link, subject, reply, header_bytes, some)
            taken += len(some)
            if perf_counter() >= link.slice_ends:
                link.slice_ends = 0.0
                break
        self._publishers.add(link)
        self._open_turn()
        return taken

    def has_output(self, link: ServerConnection) -> None:
        self._dirty.append(link)
        self._open_turn()

    def has_room(self, link: ServerConnection) -> None:
        if self._room is not None and not link.is_closing:
            self._room.drained(link)

    def _open_turn(self) -> None:
        if not self._turn_open:
            self._turn_open = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_open = False
        if self._publishers and self._flushing is None and self._room is not None:
            self._flush(self._room)
        dirty, self._dirty = self._dirty, []
        for link in dirty:
            if not attempt(link.write_out):
                link.cut()

    def _flush(self, room: Room) -> None:
        publishers, self._publishers = self._publishers, set()
        try:
            behind = room.flush()
        except Exception as error:  # noqa: BLE001 - without its room the server must not go on
            self._fail(error)
            return
        if behind is not None:
            self._flushing = self._keep(self._await_flush(behind, publishers))

    async def _await_flush(self, behind: Awaitable[None], publishers: set[ServerConnection]) -> None:
        """The room is behind: read nothing more from those who gave it something, until it is not."""
        for link in publishers:
            link.pause_reading()
        try:
            await behind
        except Exception as error:  # noqa: BLE001 - the same
            self._fail(error)
        for link in publishers:
            link.resume_reading()
        self._flushing = None
        self._open_turn()

    # ---- time ------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(min(TICK_S, self.options.ping_interval_s / 2), self._tick)
        now_s = self.loop.time()
        if self._room is not None:
            attempt(self._room.tick)
        for link in [each for each in self.connections if each.paused]:
            link.count_waiting()
            if link.is_stuck(now_s, self.options.write_timeout_s):
                link.cut()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.options.ping_interval_s
            self._ping_the_silent()

    def _ping_the_silent(self) -> None:
        for link in list(self.connections):
            if link.is_closing:
                link.cut()
            elif link.heard:
                link.heard, link.pings_out = False, 0
            elif link.pings_out >= PINGS_OUT_MAX:
                link.fail(STALE_CONNECTION)
            else:
                link.pings_out += 1
                link.send(wire.PING)


def _add(counts: dict[str, int], key: str, more: int) -> int:
    """Add to a count, and forget it at zero. Gives the count."""
    count = counts.pop(key, 0) + more
    if count > 0:
        counts[key] = count
    return count


def _cost_of(subscription: Subscription) -> int:
    """The memory that a subscription takes up."""
    texts = len(subscription.subject) + len(subscription.sid) + len(subscription.group)
    if subscription.owned:
        return ROOM_SUBSCRIPTION_COST_BYTES + texts + (ROOM_GROUP_COST_BYTES if subscription.group else 0)
    if not has_wildcard(subscription.subject):
        return SUBSCRIPTION_COST_BYTES + texts
    tokens = subscription.subject.count(b".") + 1
    return SUBSCRIPTION_COST_BYTES + texts + WILDCARD_TOKEN_COST_BYTES * tokens


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop of uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    options: ServerOptions,
    *,
    make_room: Callable[[RunSoon], Room] | None = None,
    ready: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is told the port."""
    most = min(options.connections_max, allowed_connections())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = NatsServer(replace(options, connections_max=most))
        await server.bind()  # before the room, which makes its folder
        room: Room | None = None
        try:
            room = make_room(loop.call_soon_threadsafe) if make_room else None
            await server.start(room)
        except BaseException:
            server.unbind()
            if room is not None:
                room.close()
            raise
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.ask_to_stop)
        ready(server.port)
        await server.until_stopped()
        if server.failure is not None:
            raise server.failure

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
