"""A NATS server: publish, subscribe, request and reply, and a handler with subjects of its own.

Rule 1: everything runs on one event loop, in the turns of `loop_turns`.
Rule 2: subjects that the handler owns go to the handler only: no wildcard of a plain subscription sees them.
Rule 3: SIGTERM and SIGINT start a lame-duck shutdown: no new connections, every client is notified, and the
        remaining connections are closed after a moment.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from postroom.contracts.mail import Link, SubjectHandler
from postroom.core.gate import entry_of, refused
from postroom.core.nats import natswire as wire
from postroom.core.nats.subjects import has_wildcard
from postroom.errors import RateExceeded, Unavailable
from postroom.server.access.rates import RateLimits
from postroom.server.http.connections import ConnectionLimits
from postroom.server.http.tls_listener import FailedHandshake, TlsListener
from postroom.server.nats.clients import ClientUsage
from postroom.server.nats.connection import (
    AUTHENTICATION_TIMEOUT,
    AUTHORIZATION_VIOLATION,
    BAD_REQUEST,
    READ_ONLY_TOKEN,
    STALE_CONNECTION,
    TOO_LARGE_SUBSCRIPTIONS,
    TOO_MANY,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_LOGINS,
    TOO_MANY_SUBSCRIPTIONS,
    TOO_SLOW,
    UNAUTHORIZED,
    ServerConnection,
)
from postroom.server.nats.loop_turns import LoopTurns
from postroom.server.nats.options import (
    MAILBOX_GROUP_COST_BYTES,
    MAILBOX_SUBSCRIPTION_COST_BYTES,
    SUBSCRIPTION_COST_BYTES,
    WILDCARD_TOKEN_COST_BYTES,
    ServerOptions,
    allowed_connections,
    client_of,
    network_of,
    token_of,
)
from postroom.server.nats.output import SLOW_CONSUMER
from postroom.server.nats.router import Router, ServerSubscription
from postroom.system.callbacks import attempt
from postroom.system.crypto.tls import handshake_fault

PROTOCOL_VERSION = "2.10.0"  # the nats-server with the same core protocol: clients compare versions
BACKLOG = 1024
PINGS_OUT_MAX = 2
ENDED_A_TURN_MAX = 500  # plain subscriptions of an ended connection that are removed in one turn of the loop
TLS_TIMEOUT_S = 5.0
HANDLER_BODIES_MAX = 200  # messages for the handler between two checks of the clock
CLOSE_TIMEOUT_S = 0.4
TOKEN_ENDED = "the token of an open connection has expired or was revoked"  # noqa: S105 - a sentence

RunSoon = Callable[[Callable[[], None]], object]


ENTRIES: Mapping[str, str] = {"CONNECT": "nats.connect", "PUB": "nats.message", "SUB": "nats.message"}
"""By command: who may send it, its entry in the table of `core.gate`. Subjects of Mail have their own."""


class NatsServer:
    """Accepts connections, routes messages, and runs timers."""

    def __init__(self, options: ServerOptions, handler: SubjectHandler | None = None) -> None:
        for command, entry in ENTRIES.items():
            entry_of(entry, f"the command {command} of NATS")
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.pending_bytes_max = options.pending_bytes_max
        self.port = options.port
        self.connections: set[ServerConnection] = set()
        self._handler = handler
        self.usage = ClientUsage(options)
        self._rates = RateLimits()
        self.router = Router(options.limits.step_cost_max)
        self._turns = LoopTurns(self.loop, options.limits.slice_s, self._fail)
        self.slice_ends, self.wait = self._turns.slice_ends, self._turns.wait
        self.has_output = self._turns.has_output
        self._server: asyncio.Server | None = None
        self._tls_listeners: list[TlsListener] = []
        self._identity = os.urandom(16).hex().upper()
        self._last_number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_ping_s = 0.0
        self._next_token_check_s = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        self._lame = False
        self._stop = asyncio.Event()
        self._empty = asyncio.Event()
        """Set while there is no connection."""
        self._empty.set()
        self.failure: BaseException | None = None
        """The error that stopped the server; None after a normal stop."""

    # ---- start and stop --------------------------------------------------------------------------------

    async def bind(self) -> None:
        """Bind the port, and set `port`. Connections are not accepted yet."""
        try:
            self._server = await self.loop.create_server(
                self._connection,
                self.options.host,
                self.options.port,
                backlog=BACKLOG,
                start_serving=False,
            )
        except OSError as error:
            raise self._cannot_listen(error) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def start(self, handler: SubjectHandler | None = None) -> None:
        """Accept connections. The handler may be created after `bind`."""
        self._handler = self._turns.handler = handler or self._handler
        if self._server is None:
            await self.bind()
        assert self._server is not None  # noqa: S101 - for the types: `bind` was called
        try:
            if self.options.tls is not None and self.options.tls_first:
                self._listen_with_tls(self._server, self.options.tls)
            else:
                await self._server.start_serving()
        except OSError as error:
            raise self._cannot_listen(error) from None
        self._next_ping_s = self.loop.time() + self.options.ping_interval_s
        self._ticker = self.loop.call_later(self.options.limits.tick_s, self._tick)

    def _listen_with_tls(self, bound: asyncio.Server, context: ssl.SSLContext) -> None:
        """Accept connections that begin with TLS. The bound server would hide failed handshakes."""
        handshakes = ConnectionLimits(self.options.connections_max)
        for each in bound.sockets:
            listening = socket.socket(fileno=os.dup(each.fileno()))
            listening.listen(BACKLOG)
            listener = TlsListener(
                listening, context, self._connection, connections=handshakes, failed=self._handshake_failed
            )
            listener.start()
            self._tls_listeners.append(listener)

    def _handshake_failed(self, failed: FailedHandshake) -> None:
        link = self._connection()
        link.address = failed.address
        link.client = client_of("", network_of(failed.host))
        self.refused(link, failed.error, failed.status)

    def _cannot_listen(self, error: OSError) -> Unavailable:
        """The error of a failed bind. asyncio's own text would repeat the address."""
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        return Unavailable(f"cannot listen on {self.options.host} port {self.options.port}: {why}")

    def unbind(self) -> None:
        """Release the port."""
        if self._server is not None:
            self._server.close()
        for listener in self._tls_listeners:
            listener.close()

    def ask_to_stop(self) -> None:
        self._stop.set()

    async def until_stopped(self) -> None:
        """Serve until `ask_to_stop`, and then close."""
        await self._stop.wait()
        await self.close()

    async def close(self) -> None:
        """Notify every client, wait a moment for them to leave, and close."""
        self._lame = True
        self.unbind()
        for link in list(self.connections):
            link.send(self.info_for(link))
        await self._until_empty(self.options.lame_duck_s)
        if self._handler is not None:
            await self._turns.finish()
            self._handler.close()
            await asyncio.sleep(0)  # also run the calls that the handler gave to `run_soon` while closing
        for link in list(self.connections):
            link.end()
        await self._until_empty(CLOSE_TIMEOUT_S)
        for link in list(self.connections):
            link.cut()
        await self._until_empty(CLOSE_TIMEOUT_S)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _until_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.ask_to_stop()

    # ---- connections -----------------------------------------------------------------------------------

    def _connection(self) -> ServerConnection:
        self._last_number += 1
        return ServerConnection(self, self._last_number)

    def accept(self, link: ServerConnection) -> str:
        link.network = network_of(link.peer_address)
        client = client_of("", link.network)
        is_full = len(self.connections) >= self.options.connections_max
        link.client = client
        if self._lame or is_full or not self.usage.connections.fits(client, 1):
            return self.refused(link, TOO_MANY_CONNECTIONS, TOO_MANY)
        if self.options.needs_auth:
            if not self.usage.add_login(link.network):
                return self.refused(link, TOO_MANY_LOGINS, TOO_MANY)
            self.loop.call_later(self.options.auth_timeout_s, self._check_login, link)
        self.connections.add(link)
        self.usage.connections.add(client, 1)
        self._empty.clear()
        return ""

    def _check_login(self, link: ServerConnection) -> None:
        if not link.admitted and not link.is_closing:
            link.fail(self.refused(link, AUTHENTICATION_TIMEOUT, UNAUTHORIZED))

    def refused(self, link: Link, why: str, code: int, call: str = "connect", reply: str = "") -> str:
        """Make an event of a refused call, and answer it at `reply`. Returns the reason."""
        if self._handler is not None:
            attempt(self._handler.refused, link, call, reply, code, why)
        return why

    def release(self, link: ServerConnection) -> None:
        ended = [each for each in link.subscriptions.values() if not each.owned]
        link.subscriptions.clear()
        left = (
            len(ended) - link.subscription_count,
            sum(each.cost for each in ended) - link.subscription_bytes,
        )
        self._count_subscriptions(link, *left)
        if len(ended) <= ENDED_A_TURN_MAX:
            self._forget(link, ended)
        else:
            self._start_task(self._forget_in_turns(link, ended))
        if self.options.needs_auth and not link.admitted and link in self.connections:
            self.usage.end_login(link.network)
        if self._handler is not None:
            attempt(self._handler.closed, link)

    def _forget(self, link: ServerConnection, ended: list[ServerSubscription]) -> None:
        self.router.remove(ended)
        self._count_subscriptions(link, -len(ended), -sum(each.cost for each in ended))

    async def _forget_in_turns(self, link: ServerConnection, ended: list[ServerSubscription]) -> None:
        for start in range(0, len(ended), ENDED_A_TURN_MAX):
            self._forget(link, ended[start : start + ENDED_A_TURN_MAX])
            await asyncio.sleep(0)

    def closed(self, link: ServerConnection) -> None:
        if link in self.connections:
            self.connections.remove(link)
            self.usage.connections.add(link.client, -1)
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
            "max_payload": self.options.payload_bytes_max,
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
        self._start_task(self._start_tls(link, transport, self.options.tls))
        return True

    async def _start_tls(
        self, link: ServerConnection, transport: asyncio.Transport, context: ssl.SSLContext
    ) -> None:
        # A client sends its first byte when it has read INFO. The loop does not read between this write and
        # the new protocol, so that byte goes to TLS.
        transport.write(self.info_for(link))
        try:
            secured = await self.loop.start_tls(
                transport, link, context, server_side=True, ssl_handshake_timeout=TLS_TIMEOUT_S
            )
        except OSError as error:
            self.refused(link, handshake_fault(error), BAD_REQUEST)
            link.cut()
            return
        if secured is not None:
            link.secured(secured)

    def _start_task(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine, and keep a reference: the loop alone would let the task be collected."""
        task: asyncio.Task[None] = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def admit(self, link: ServerConnection, options: wire.ConnectOptions | None) -> str:
        owner = self.options.owner_of(options or wire.ConnectOptions())
        if owner is None:
            return self.refused(link, AUTHORIZATION_VIOLATION, UNAUTHORIZED)
        if owner.identity is not None and refused(owner.identity, ENTRIES["CONNECT"]):
            return self.refused(link, READ_ONLY_TOKEN, UNAUTHORIZED)
        token = "" if options is None else token_of(options)
        if link.login is not None and (link.login, link.token) != (owner, token):
            # Its subscriptions and waiting calls would go on after the end of their token.
            return self.refused(link, AUTHORIZATION_VIOLATION, UNAUTHORIZED)
        client = client_of(owner.user, link.network)
        if client != link.client:
            if not self.usage.move(
                link.client,
                client,
                incomplete=link.held_bytes,
                pending=link.output.counted_bytes,
                subscriptions=link.subscription_count,
                subscription_cost=link.subscription_bytes,
            ):
                return self.refused(link, TOO_MANY_CONNECTIONS, TOO_MANY)
            link.client = client
        if self.options.needs_auth and not link.admitted:
            self.usage.end_login(link.network)
        link.user, link.caller, link.rate, link.org, link.sees_all, link.identity = owner
        link.admitted, link.login = True, None if options is None else owner
        link.token = token
        return ""

    # ---- routing ---------------------------------------------------------------------------------------

    def subscribe(self, link: ServerConnection, subscription: ServerSubscription) -> str:
        if not self.usage.subscription_counts.fits(link.client, 1):
            return self.refused(link, TOO_MANY_SUBSCRIPTIONS, TOO_MANY, "subscribe")
        text = self.owned(subscription.subject)
        subscription.owned = text is not None
        subscription.cost = _cost_of(subscription)
        if not self.usage.subscriptions.fits(link.client, subscription.cost):
            return self.refused(link, TOO_LARGE_SUBSCRIPTIONS, TOO_MANY, "subscribe")
        self._count_subscriptions(link, 1, subscription.cost)
        if text is None or self._handler is None:
            self.router.add(subscription)
            return ""
        link.output.narrow()
        group = subscription.group.decode("utf-8", "replace")
        refusal = self._handler.subscribed(link, subscription.sid.decode("utf-8", "replace"), text, group)
        if refusal:
            self._count_subscriptions(link, -1, -subscription.cost)
        return refusal or ""

    def _count_subscriptions(self, link: ServerConnection, count: int, cost: int) -> None:
        link.subscription_count += count
        link.subscription_bytes += cost
        self.usage.add_subscriptions(link.client, count, cost)

    def unsubscribe(self, link: ServerConnection, subscription: ServerSubscription) -> None:
        self._count_subscriptions(link, -1, -subscription.cost)
        if not subscription.owned:
            self.router.remove((subscription,))
        elif self._handler is not None:
            self._handler.unsubscribed(link, subscription.sid.decode("utf-8", "replace"))

    def owned(self, subject: bytes) -> str | None:
        if self._handler is None:
            return None
        text = subject.decode("utf-8", "replace")
        return text if self._handler.owns(text) else None

    def take_calls(self, link: ServerConnection, head: wire.ControlLine, count: int) -> int:
        found = self._rates.take(link.caller, link.rate, count)
        refused = count - found.calls
        if refused:
            why = str(RateExceeded(link.user, link.rate, found.wait_s))
            link.send(wire.permissions_violation("Publish", head.subject, why))
            reply = head.reply.decode("utf-8", "replace")
            for _ in range(refused):
                self.refused(link, why, TOO_MANY, "publish", reply)
        return found.calls

    # ---- the handler -----------------------------------------------------------------------------------

    def publish_to_handler(
        self, link: ServerConnection, subject: str, head: wire.ControlLine, bodies: list[bytes]
    ) -> int:
        assert self._handler is not None  # noqa: S101 - for the types: it owns the subject
        reply = head.reply.decode("utf-8", "replace")
        header_bytes = max(head.header_bytes, 0)
        # Plain messages are stored together. Calls with an answer may take long, and go one by one.
        step = 1 if reply or header_bytes else HANDLER_BODIES_MAX
        taken = 0
        while taken < len(bodies):
            some = bodies[taken : taken + step]
            self._handler.published(link, subject, reply, header_bytes, some)
            taken += len(some)
            if perf_counter() >= link.slice_ends:
                break
        self._turns.published(link)
        return taken

    def drained(self, link: Link) -> None:
        if self._handler is not None and not link.is_closing:
            self._handler.drained(link)

    # ---- time ------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        every_s = min(self.options.limits.tick_s, self.options.ping_interval_s / 2)
        self._ticker = self.loop.call_later(every_s, self._tick)
        now_s = self.loop.time()
        if self._handler is not None:
            attempt(self._handler.tick)
        for link in [each for each in self.connections if each.output.paused]:
            link.output.count_waiting()
            if link.output.is_stuck(now_s, self.options.write_timeout_s):
                self.refused(link, SLOW_CONSUMER, TOO_SLOW, "deliver")
                link.cut()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.options.ping_interval_s
            self._ping_silent_clients()
        if now_s >= self._next_token_check_s:
            self._next_token_check_s = now_s + self.options.limits.token_check_s
            self._end_revoked()

    def _end_revoked(self) -> None:
        """Close the connections whose token was revoked or has expired."""
        identify = self.options.identify
        if identify is None:
            return
        of_registry = [link for link in self.connections if link.admitted and link.caller]
        owners = {token: identify(token) for token in {link.token for link in of_registry}}
        for link in of_registry:
            owner = owners[link.token]
            if owner is not None:
                link.rate = owner.rate
            elif not link.is_closing:
                self.refused(link, TOKEN_ENDED, UNAUTHORIZED)
                link.fail(AUTHORIZATION_VIOLATION)

    def _ping_silent_clients(self) -> None:
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


def _cost_of(subscription: ServerSubscription) -> int:
    """The memory that a subscription takes up."""
    texts = len(subscription.subject) + len(subscription.sid) + len(subscription.group)
    if subscription.owned:
        return (
            MAILBOX_SUBSCRIPTION_COST_BYTES + texts + (MAILBOX_GROUP_COST_BYTES if subscription.group else 0)
        )
    if not has_wildcard(subscription.subject):
        return SUBSCRIPTION_COST_BYTES + texts
    tokens = subscription.subject.count(b".") + 1
    return SUBSCRIPTION_COST_BYTES + texts + WILDCARD_TOKEN_COST_BYTES * tokens


def new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where uvloop is installed, otherwise that of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    options: ServerOptions,
    *,
    make_handler: Callable[[RunSoon], SubjectHandler] | None = None,
    ready: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called with the port."""
    connections_max = min(options.connections_max, allowed_connections())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = NatsServer(replace(options, connections_max=connections_max))
        await server.bind()  # before the handler, which creates its folder
        handler: SubjectHandler | None = None
        try:
            handler = make_handler(loop.call_soon_threadsafe) if make_handler else None
            await server.start(handler)
        except BaseException:
            server.unbind()
            if handler is not None:
                handler.close()
            raise
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.ask_to_stop)
        ready(server.port)
        await server.until_stopped()
        if server.failure is not None:
            raise server.failure

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
