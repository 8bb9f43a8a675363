"""One connection of the NATS server: its commands, its subscriptions, and its output.

Rule 1: nothing here blocks. Output is buffered, and written once per turn of the loop.
Rule 2: a client that does not read its messages is cut off; other clients are not affected.
Rule 3: a client that broke the protocol gets an error, and its further input is discarded for a moment before
        the connection is closed: closing at once could discard the error on its way to the client.
Rule 4: a turn of the loop has a time slice for the commands of all connections. Input beyond it waits for a
        slice of a later turn, and nothing more is read from the connection until it is handled.
Rule 5: before its login a connection is read up to the end of its first line, which has a low limit.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol, cast

from postroom.core.gate import Caller
from postroom.core.nats import natswire as wire
from postroom.core.nats.subjects import is_pattern
from postroom.server.nats.options import LOGIN_BYTES_MAX, ServerOptions, TokenOwner, address_of
from postroom.server.nats.output import ConnectionOutput, OutputHub
from postroom.server.nats.router import Router, ServerSubscription
from postroom.system.log import library_log

_log = library_log("postroom.mail")

COMMANDS_A_READ_MAX = 512  # that are parsed at a time
RATED_BODIES_MAX = 200  # messages of a token with a rate that are counted at a time

AUTHORIZATION_VIOLATION = "Authorization Violation"
READ_ONLY_TOKEN = f"{AUTHORIZATION_VIOLATION}: a read-only token is not for NATS"
AUTHENTICATION_TIMEOUT = "Authentication Timeout"
STALE_CONNECTION = "Stale Connection"
INVALID_SUBJECT = "Invalid Subject"
TLS_REQUIRED = "Secure Connection - TLS Required"
HEADERS_NOT_SUPPORTED = "message headers not supported"
NO_RESPONDERS_NEEDS_HEADERS = "no responders requires headers support"
INTERNAL_ERROR = "Internal Server Error"
TOO_MANY_CONNECTIONS = "maximum connections exceeded"
TOO_MUCH_INCOMPLETE = "too many bytes of incomplete messages and waiting input of this client"
TOO_MANY_LOGINS = "too many connections of this address have not logged in"
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"
TOO_LARGE_SUBSCRIPTIONS = "maximum size of the subscriptions of this client exceeded"
BAD_REQUEST, UNAUTHORIZED, TOO_SLOW, TOO_MANY = 400, 401, 408, 429  # codes of refused calls, as in HTTP


def _encoded(text: str) -> bytes:
    """The bytes on the wire of a decoded text."""
    return text.encode("utf-8", "surrogateescape")


class _Remainder(wire.Messages, frozen=True, gc=False):
    """Messages for the handler for which a slice had no time. Their +OK is sent already."""


class _Deliveries(NamedTuple):
    """Deliveries for which a slice had no time. Each step makes a few of them."""

    steps: Iterator[None]


_Pending = wire.Command | _Deliveries


class Hub(OutputHub, Protocol):
    """The server, as its connections see it."""

    options: ServerOptions
    router: Router

    def info_for(self, link: "ServerConnection") -> bytes: ...

    def accept(self, link: "ServerConnection") -> str:
        """Accept a connection. Returns why it is refused; empty when accepted."""

    def release(self, link: "ServerConnection") -> None:
        """The connection ends: drop its subscriptions and counts."""

    def closed(self, link: "ServerConnection") -> None:
        """The connection is closed."""

    def upgrade(self, link: "ServerConnection", transport: asyncio.Transport) -> bool:
        """Send INFO and start TLS if it is required. Returns whether it is."""

    def admit(self, link: "ServerConnection", options: wire.ConnectOptions | None) -> str:
        """Log a connection in. Returns why it is refused; empty when accepted.

        `options` is None for a client that has not sent CONNECT.
        """

    def take_calls(self, link: "ServerConnection", head: wire.ControlLine, count: int) -> int:
        """Count messages of a connection with a rate. Returns how many are allowed; others are refused."""

    def owned(self, subject: bytes) -> str | None:
        """The subject as text if the handler owns it."""

    def publish_to_handler(
        self, link: "ServerConnection", subject: str, head: wire.ControlLine, bodies: list[bytes]
    ) -> int:
        """Publish until the slice of the connection ends. Returns how many bodies, at least one."""

    def slice_ends(self) -> float:
        """When the slice of this turn ends; 0 when a connection that has input now has to wait."""

    def wait(self, link: "ServerConnection") -> None:
        """Call `run` of the connection in a slice of a later turn."""

    def subscribe(self, link: "ServerConnection", subscription: ServerSubscription) -> str:
        """Returns why it is refused; empty when accepted."""

    def unsubscribe(self, link: "ServerConnection", subscription: ServerSubscription) -> None: ...


class ServerConnection(asyncio.Protocol):
    """One connection of the server; to the handler, a `Link`."""

    __slots__ = (
        *("_backlog", "_backlog_bytes", "_holds", "_hub", "_insecure", "_login_bytes", "_reader"),
        *("_released", "_transport", "_waits", "address", "admitted", "caller", "client", "echo"),
        *("headers", "heard", "held_bytes", "identity", "login", "name", "network", "no_responders"),
        *("number", "org", "output", "pings_out", "rate", "sees_all", "send", "slice_ends"),
        *("subscription_bytes", "subscription_count", "subscriptions", "token", "user", "verbose"),
    )

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self.number = number
        self.user = self.name = self.client = self.network = self.token = self.caller = self.org = ""
        self.address = ""
        """Host and port of the peer."""
        self.rate = 0.0
        """Messages a second that the token may publish; 0 for no limit."""
        self.sees_all = False
        self.identity: Caller | None = None
        self.login: TokenOwner | None = None
        """Who has logged in by CONNECT. A later CONNECT cannot change it."""
        self.verbose = self.echo = True
        self.headers = self.no_responders = self.admitted = False
        self.subscriptions: dict[bytes, ServerSubscription] = {}
        self.subscription_count = self.subscription_bytes = 0  # and their cost, as counted against the client
        self.output = ConnectionOutput(hub, self)
        self.send: Callable[[bytes], None] = self.output.send
        self._reader = wire.ClientReader(payload_bytes_max=hub.options.payload_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._backlog: list[_Pending] = []
        """Commands that wait for a slice. They come before what the reader has."""
        self._waits = False
        """Whether input waits for a slice."""
        self._holds = 0
        """How many callers of `pause_reading` have not called `resume_reading`."""
        self.slice_ends = 0.0
        self._login_bytes = self.held_bytes = self._backlog_bytes = 0
        self._released = False
        self._insecure = False
        """Whether TLS is required and has not begun. A client that sends now sends in the clear."""
        self.heard = True
        self.pings_out = 0

    # ---- the transport's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # that of uvloop is not a subclass
        self._transport = self.output.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = address_of(peer[0], peer[1]) if peer else ""
        refusal = self._hub.accept(self)
        if not refusal and self._hub.upgrade(self, transport):
            self._insecure = True
            return
        transport.write(self._hub.info_for(self))
        if refusal:
            self._reject(refusal)

    def _reject(self, refusal: str) -> None:
        """Close at once: lingering connections each need an open file."""
        if self._transport is not None:
            self._transport.write(wire.error(refusal))
            self._release()
            self._transport.close()

    def secured(self, transport: asyncio.Transport) -> None:
        """TLS has started: use its transport from here on."""
        self._transport = self.output.transport = transport
        self._insecure = False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        self._release()
        self._transport = self.output.transport = None
        self.output.count_waiting()
        self._hub.closed(self)

    def pause_writing(self) -> None:
        self.output.pause()

    def resume_writing(self) -> None:
        self.output.resume()
        self._hub.drained(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self.output.closed:
            return
        if self._insecure:
            self._hub.refused(self, TLS_REQUIRED, BAD_REQUEST)
            self.cut()
            return
        if not self.admitted and self._hub.options.needs_auth:
            data = self._log_in(data)
            if not data:
                return
        if self._waits:
            self._reader.keep(data)
            self._count_held()
            return
        self.slice_ends = self._hub.slice_ends()
        if self.slice_ends:
            self._read(data)
        else:
            self._reader.keep(data)
        self._count_held()
        if not (self._backlog or self._reader.has_more) or self.output.closed:
            return
        self._waits = True
        self.pause_reading()
        self._hub.wait(self)

    def run(self, slice_ends: float) -> None:
        """Handle input that waited, until the slice ends."""
        self.slice_ends = slice_ends
        commands, self._backlog = self._backlog, []
        if commands:
            self._handle(commands)
        else:
            self._read()
        self._count_held()
        if self.output.closed:
            return
        if self._backlog or self._reader.has_more:
            self._hub.wait(self)
        else:
            self._waits = False
            self.resume_reading()

    def _read(self, data: bytes = b"") -> None:
        """Handle commands of the input, until the slice ends."""
        size = self._reader.held_bytes + len(data)
        commands = self._reader.feed(data, COMMANDS_A_READ_MAX)
        self._backlog_bytes = size - self._reader.held_bytes
        self._handle(commands)

    def _count_held(self) -> None:
        """Count the input that is buffered against the client. Above the limit, the connection ends."""
        held_bytes = self._reader.held_bytes + (self._backlog_bytes if self._backlog else 0)
        if held_bytes != self.held_bytes and not self._released:
            more, self.held_bytes = held_bytes - self.held_bytes, held_bytes
            if not self._hub.usage.incomplete.add(self.client, more) and more > 0:
                self._refuse(TOO_MUCH_INCOMPLETE, TOO_MANY, "publish")

    def _log_in(self, data: bytes) -> bytes:
        """Read the line with the login. Returns the data after it when the login succeeded."""
        line_end = data.find(b"\n") + 1 or len(data)
        self._login_bytes += line_end
        if self._login_bytes > LOGIN_BYTES_MAX:
            self._refuse(wire.LINE_TOO_LONG, BAD_REQUEST)
            return b""
        commands = self._reader.feed(data[:line_end])
        if not commands and data[line_end - 1 : line_end] == b"\n":  # a message before the login
            self._refuse(AUTHORIZATION_VIOLATION, UNAUTHORIZED)
        self._handle(commands)
        return data[line_end:] if self.admitted and not self.output.closed else b""

    def _handle(self, commands: Sequence[_Pending]) -> None:
        """Handle the commands that fit the slice; the others wait for a later one."""
        try:
            for place, command in enumerate(commands):
                if place and perf_counter() >= self.slice_ends:
                    self._backlog = list(commands[place:])
                    return
                if type(command) is wire.Messages:
                    rest = self._messages(command.head, command.bodies)
                else:
                    rest = self._other_command(command)
                if self.output.closed:
                    return
                if rest:
                    self._backlog = [*rest, *commands[place + 1 :]]
                    return
        except Exception:  # noqa: BLE001 - it affects this connection only
            _log.exception("connection %d is closed: one of its commands failed", self.number)
            self.fail(INTERNAL_ERROR)

    # ---- commands --------------------------------------------------------------------------------------

    def _messages(self, head: wire.ControlLine, bodies: list[bytes]) -> Sequence[_Pending]:
        """Returns what has to wait because the slice is over."""
        if not self.admitted and (refusal := self._hub.admit(self, None)):
            self.fail(refusal)
            return ()
        if head.header_bytes >= 0 and not self.headers:
            self._refuse(HEADERS_NOT_SUPPORTED, BAD_REQUEST, "publish")
            return ()
        if self.rate:
            return self._rated(head, bodies)
        if self.verbose:
            self.send(wire.OK * len(bodies))
        return self._publish(head, bodies)

    def _rated(self, head: wire.ControlLine, bodies: list[bytes]) -> Sequence[_Pending]:
        """Publish as many messages as the rate of the token allows."""
        rest: Sequence[_Pending] = ()
        while bodies and not rest:
            some, bodies = bodies[:RATED_BODIES_MAX], bodies[RATED_BODIES_MAX:]
            allowed = some[: self._hub.take_calls(self, head, len(some))]
            if self.verbose:
                self.send(wire.OK * len(allowed))
            if allowed:
                rest = self._publish(head, allowed)
            if perf_counter() >= self.slice_ends:
                break
        return [*rest, wire.Messages(head, bodies)] if bodies else rest

    def _publish(self, head: wire.ControlLine, bodies: list[bytes]) -> Sequence[_Pending]:
        subject = self._hub.owned(head.subject)
        if subject is None:
            steps = self._hub.router.publish(self, head, bodies)
            return () if steps is None else self._deliver_more(steps)
        taken = self._hub.publish_to_handler(self, subject, head, bodies)
        return [_Remainder(head, bodies[taken:])] if taken < len(bodies) else ()

    def _deliver_more(self, steps: Iterator[None]) -> Sequence[_Pending]:
        for _ in steps:
            if perf_counter() >= self.slice_ends:
                return [_Deliveries(steps)]
        return ()

    def _other_command(self, command: _Pending) -> Sequence[_Pending]:
        match command:
            case _Deliveries():
                return self._deliver_more(command.steps)
            case _Remainder():
                return self._publish(command.head, command.bodies)
            case wire.ProtocolFault():
                self._refuse(command.text, BAD_REQUEST, "command")
            case wire.Connect():
                self._connect(command.options)
            case _ if not self.admitted and (refusal := self._hub.admit(self, None)):
                self.fail(refusal)
            case wire.Ping():
                self.send(wire.PONG)
            case wire.Subscribe():
                self._subscribe(command)
            case wire.Unsubscribe():
                self._unsubscribe(command)
            case _:
                pass  # PONG needs no answer; +OK and INFO mean nothing to a server
        return ()

    def _connect(self, text: bytes) -> None:
        try:
            options = wire.connect_options(text)
        except wire.ProtocolBroken as error:
            self._refuse(error.args[0], BAD_REQUEST)
            return
        refusal = self._hub.admit(self, options)
        if refusal.startswith(AUTHORIZATION_VIOLATION):
            # Answered after a delay, and nothing is read meanwhile, to slow guessing down.
            self._login_bytes = LOGIN_BYTES_MAX  # no second attempt on this connection
            self.pause_reading()
            self._hub.loop.call_later(self._hub.options.limits.wrong_login_s, self.fail, refusal)
            return
        if refusal:
            self._reject(refusal)
            return
        if options.no_responders and not options.headers:
            self._refuse(NO_RESPONDERS_NEEDS_HEADERS, BAD_REQUEST)
            return
        self.name, self.verbose, self.echo = options.name, options.verbose, options.echo
        self.headers, self.no_responders = options.headers, options.no_responders
        self._send_ok()

    def _subscribe(self, request: wire.Subscribe) -> None:
        if request.sid in self.subscriptions:  # nats-server keeps the first as well
            self._send_ok()
            return
        if not is_pattern(request.subject):
            self.send(wire.error(self._hub.refused(self, INVALID_SUBJECT, BAD_REQUEST, "subscribe")))
            return
        subscription = ServerSubscription(self, request.subject, request.group, request.sid)
        self.subscriptions[request.sid] = subscription
        refusal = self._hub.subscribe(self, subscription)
        if refusal:
            self.subscriptions.pop(request.sid, None)
            if refusal == TOO_MANY_SUBSCRIPTIONS:  # as nats-server says it
                self.send(wire.error(refusal))
            else:
                self.send(wire.permissions_violation("Subscription", request.subject))
            return
        self._send_ok()

    def _unsubscribe(self, request: wire.Unsubscribe) -> None:
        subscription = self.subscriptions.get(request.sid)
        if subscription is not None:
            subscription.last = request.after
            if subscription.delivered >= request.after:
                self.drop(subscription)
        self._send_ok()

    def _send_ok(self) -> None:
        if self.verbose:
            self.send(wire.OK)

    # ---- deliveries ------------------------------------------------------------------------------------

    def deliver(self, sid: str, subject: str, reply: str, messages: list[tuple[bytes, bytes]]) -> None:
        """Deliver messages of the handler to a subscription of this connection."""
        subscription = self.subscriptions.get(_encoded(sid))
        if subscription is not None:
            self.push(subscription, _encoded(subject), _encoded(reply), messages)
            self.output.count_messages(len(messages))

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        self._hub.router.answer(self, _encoded(reply), headers, payload)

    def push(
        self,
        subscription: ServerSubscription,
        subject: bytes,
        reply: bytes,
        messages: list[tuple[bytes, bytes]],
    ) -> None:
        """Send messages of the handler to a subscription."""
        if self.output.closed:
            return
        messages = subscription.take(messages)
        if not self.headers:
            messages = [(b"", payload) for _, payload in messages]
        self.send(wire.messages(subject, subscription.sid, reply, messages))
        if subscription.delivered == subscription.last:
            self.drop(subscription)

    def drop(self, subscription: ServerSubscription) -> None:
        """End a subscription."""
        if self.subscriptions.pop(subscription.sid, None) is not None:
            self._hub.unsubscribe(self, subscription)

    @property
    def holder(self) -> tuple[str, str]:
        """Whose turns the commands take, within those of the organization."""
        return self.org, self.client

    @property
    def pending_bytes(self) -> int:
        return self.output.pending_bytes

    def notify_when_drained(self) -> None:
        self.output.notify_when_drained()

    # ---- the end ---------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        return self.output.closed

    @property
    def peer_address(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    def pause_reading(self) -> None:
        """Stop reading until every caller of this method has called `resume_reading`."""
        self._holds += 1
        if self._holds == 1 and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._holds -= 1
        if not self._holds and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _refuse(self, why: str, code: int, call: str = "connect") -> None:
        """Make an event of a refused call, send the error, and end."""
        self.fail(self._hub.refused(self, why, code, call))

    def fail(self, text: str) -> None:
        """Send an error, and end."""
        self.send(wire.error(text))
        self.end()

    def end(self) -> None:
        """Write the output, and end."""
        self.output.write_out()
        if self.output.closed or self._transport is None:
            return
        self._release()
        if self._waits:
            self.resume_reading()  # to discard what comes
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._hub.loop.call_later(self._hub.options.limits.linger_s, self._transport.close)
        else:
            self._transport.close()

    def cut(self) -> None:
        """End at once, and discard the output."""
        self._release()
        if self._transport is not None:
            self._transport.abort()

    def _release(self) -> None:
        """Accept and deliver nothing from now on."""
        if not self._released:
            self._released = True
            self.output.discard()
            self._hub.usage.incomplete.add(self.client, -self.held_bytes)
            self.held_bytes = 0
            self._reader = wire.ClientReader()  # frees the incomplete message
            self._hub.release(self)
