"""One connection of the NATS server: what it said about itself, its subscriptions, and what waits for it.

Rule 1: nothing here waits. What is sent is put aside and goes out once per turn of the loop.
Rule 2: who does not read what it asked for is cut off; nobody else notices.
Rule 3: a connection that broke a rule is told so, and what it still sends is thrown away for a moment before
        it is closed: closing at once would throw away the explanation instead.
Rule 4: one connection has a slice of each turn. What it sent beyond that waits, and nothing more is read from
        it until that is done.
Rule 5: a connection that has still to log in is read up to the end of its first line, and that is short.
"""

import asyncio
import contextlib
import logging
import socket
from time import perf_counter
from typing import Protocol, cast

from postroom.contracts.mail import LINK_FULL_BYTES
from postroom.core import natswire as wire
from postroom.core.subjects import Match, is_pattern
from postroom.runtime.natsoptions import LOGIN_BYTES_MAX, WRONG_LOGIN_S

_log = logging.getLogger("postroom.mail")
LINGER_S = 1.0
SLICE_S = 0.005  # of a turn, for what one connection sent

AUTHORIZATION_VIOLATION = "Authorization Violation"
AUTHENTICATION_TIMEOUT = "Authentication Timeout"
STALE_CONNECTION = "Stale Connection"
INVALID_SUBJECT = "Invalid Subject"
HEADERS_NOT_SUPPORTED = "message headers not supported"
NO_RESPONDERS_NEEDS_HEADERS = "no responders requires headers support"
INTERNAL_ERROR = "Internal Server Error"
TOO_MANY_CONNECTIONS = "maximum connections exceeded"
TOO_MUCH_UNFINISHED = "too much of unfinished messages from this address"
TOO_MANY_LOGINS = "too many connections of this address have not logged in"
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"
TOO_LARGE_SUBSCRIPTIONS = "maximum size of the subscriptions of this client exceeded"


def _raw(text: str) -> bytes:
    """The bytes that a text of the wire was."""
    return text.encode("utf-8", "surrogateescape")


class _Rest(wire.Messages, frozen=True, gc=False):
    """What a turn had no time for of many messages in a row. Their +OK is on its way."""


class Subscription:
    """What a connection wants to get."""

    __slots__ = ("cost", "delivered", "group", "last", "link", "owned", "sid", "subject")

    def __init__(self, link: "ServerConnection", request: wire.Subscribe) -> None:
        self.link = link
        self.subject = request.subject
        self.group = request.group
        self.sid = request.sid
        self.owned = False
        """Whether the room has it, and not the plain half."""
        self.cost = 0  # counted against its client
        self.delivered = 0
        self.last = 0
        """The number of the last message that it wants; 0 for no end."""

    def take(self, bodies: list[bytes]) -> list[bytes]:
        """Count what is delivered; gives as much of it as is still wanted."""
        if self.last:
            bodies = bodies[: self.last - self.delivered]
        self.delivered += len(bodies)
        return bodies


class Hub(Protocol):
    """The server, as one of its connections sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def pending_bytes_max(self) -> int: ...

    @property
    def payload_bytes_max(self) -> int: ...

    @property
    def needs_auth(self) -> bool: ...

    def info_for(self, link: "ServerConnection") -> bytes: ...

    def joined(self, link: "ServerConnection") -> str:
        """Why there is no room for one more connection; empty when there is."""

    def holds(self, link: "ServerConnection", more: int) -> bool:
        """Count what has come of messages that are not complete; whether its address may have so much."""

    def waits(self, link: "ServerConnection", more: int) -> bool:
        """Count what a connection does not take at present; whether its client may have so much."""

    def gave_up(self, link: "ServerConnection") -> None:
        """It gets nothing any more."""

    def left(self, link: "ServerConnection") -> None:
        """It is gone."""

    def upgrade(self, link: "ServerConnection", transport: asyncio.Transport) -> bool:
        """Say INFO and begin TLS, if it is wanted; whether it is."""

    def admit(self, link: "ServerConnection", options: wire.ConnectOptions | None) -> str:
        """Why it may not go on; empty when it may. None is for a connection that has not said CONNECT."""

    def publish(self, link: "ServerConnection", head: wire.Head, bodies: list[bytes]) -> int:
        """How many of them were taken: all, unless the connection's slice of the turn is over."""

    def subscribe(self, subscription: Subscription) -> str:
        """What is wrong with it; empty when it was taken."""

    def unsubscribe(self, subscription: Subscription) -> None: ...

    def match(self, subject: bytes) -> Match[Subscription]: ...

    def literal(self, subject: bytes) -> tuple[Subscription, ...]: ...

    def has_output(self, link: "ServerConnection") -> None:
        """Write it out at the end of this turn."""

    def has_room(self, link: "ServerConnection") -> None:
        """What was backed up has gone out."""


class ServerConnection(asyncio.Protocol):
    """The protocol of one connection; to the room, a `Link`."""

    __slots__ = (
        *(
            "_backlog",
            "_closing",
            "_gave_up",
            "_holds",
            "_hub",
            "_held_bytes",
            "_insecure",
            "_login_bytes",
            "_out",
            "_out_bytes",
            "_reader",
            "_sent_bytes",
            "_transport",
            "_wants_room",
            "network",
            "admitted",
            "client",
        ),
        *("echo", "headers", "heard", "name", "no_responders", "number", "paused", "pings_out", "stalled_at"),
        *("slice_ends", "stalled_bytes", "subscription_bytes", "subscriptions", "user", "verbose"),
        "waiting_bytes",
    )

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self.number = number
        self.user = self.name = self.client = self.network = ""
        self.verbose = self.echo = True
        self.headers = self.no_responders = self.admitted = False
        self.subscriptions: dict[bytes, Subscription] = {}
        self._reader = wire.ClientReader(payload_bytes_max=hub.payload_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._backlog: list[wire.Command] = []
        """What was read and has to wait for the next turn."""
        self._holds = 0
        """How many want that nothing is read from it."""
        self.slice_ends = 0.0
        self._login_bytes = self._held_bytes = 0
        self._closing = self._gave_up = False
        self._insecure = False
        """Whether TLS is required and has not begun: whoever speaks now speaks in the clear."""
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._sent_bytes = 0
        self._wants_room = False
        self.heard = True
        self.pings_out = 0
        self.paused = False
        self.stalled_at = 0.0
        self.stalled_bytes = 0
        self.waiting_bytes = self.subscription_bytes = 0  # as counted against its client

    # ---- the transport's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its parents
        self._transport = transport
        refusal = self._hub.joined(self)
        if not refusal and self._hub.upgrade(self, transport):
            self._insecure = True
            return
        transport.write(self._hub.info_for(self))
        if refusal:
            self._turn_away(refusal)

    def _turn_away(self, refusal: str) -> None:
        """Close at once: it has said little yet, and those who linger need a file each."""
        if self._transport is not None:
            self._transport.write(wire.error(refusal))
            self._give_up()
            self._transport.close()

    def secured(self, transport: asyncio.Transport) -> None:
        """TLS is on: everything goes through another transport from here on."""
        self._transport, self._insecure = transport, False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self._give_up()
        self._transport = None
        self.count_waiting()
        self._hub.left(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.stalled_at = self._hub.loop.time()

    def resume_writing(self) -> None:
        self.paused = self._wants_room = False
        self.count_waiting()
        self._hub.has_room(self)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._closing:
            return
        if self._insecure:
            self.cut()
            return
        if not self.admitted and self._hub.needs_auth:
            data = self._log_in(data)
            if not data:
                return
        commands = self._reader.feed(data)
        held_bytes = self._reader.held_bytes
        if held_bytes != self._held_bytes:
            more, self._held_bytes = held_bytes - self._held_bytes, held_bytes
            if not self._hub.holds(self, more):
                self.fail(TOO_MUCH_UNFINISHED)
                return
        if self._backlog:
            self._backlog += commands
            return
        self._take(commands)
        if self._backlog:
            self.pause_reading()

    def _log_in(self, data: bytes) -> bytes:
        """Read the line that says who it is. Gives what follows it, when that was right."""
        line_end = data.find(b"\n") + 1 or len(data)
        self._login_bytes += line_end
        if self._login_bytes > LOGIN_BYTES_MAX:
            self.fail(wire.LINE_TOO_LONG)
            return b""
        commands = self._reader.feed(data[:line_end])
        if not commands and data[line_end - 1 : line_end] == b"\n":  # a message, by nobody we know
            self.fail(AUTHORIZATION_VIOLATION)
        self._take(commands)
        return data[line_end:] if self.admitted and not self._closing else b""

    def _take(self, commands: list[wire.Command]) -> None:
        """Do what fits this turn; the rest is put off to the next."""
        try:
            self._carry_out(commands)
        except Exception:  # noqa: BLE001 - it concerns this connection alone
            _log.exception("connection %d is closed: one of its commands failed", self.number)
            self.fail(INTERNAL_ERROR)

    def _carry_out(self, commands: list[wire.Command]) -> None:
        self.slice_ends = perf_counter() + SLICE_S
        for place, command in enumerate(commands):
            if type(command) is wire.Messages:
                rest = self._messages(command.head, command.bodies)
            else:
                rest = self._other(command)
            if self._closing:
                return
            if rest is not None:
                self._backlog = [*rest, *commands[place + 1 :]]
                if self._backlog:
                    self._hub.loop.call_soon(self._go_on)
                return

    def _go_on(self) -> None:
        if self._closing:
            return
        commands, self._backlog = self._backlog, []
        self._take(commands)
        if not self._backlog:
            self.resume_reading()

    # ---- commands --------------------------------------------------------------------------------------

    def _messages(self, head: wire.Head, bodies: list[bytes]) -> list[wire.Command] | None:
        """What of them has to wait; None while there is time for more."""
        if not self.admitted and (refusal := self._hub.admit(self, None)):
            self.fail(refusal)
            return None
        if head.header_bytes >= 0 and not self.headers:
            self.fail(HEADERS_NOT_SUPPORTED)
            return None
        if self.verbose:
            self.send(wire.OK * len(bodies))
        return self._publish(head, bodies)

    def _publish(self, head: wire.Head, bodies: list[bytes]) -> list[wire.Command] | None:
        taken = self._hub.publish(self, head, bodies)
        if taken < len(bodies):
            return [_Rest(head, bodies[taken:])]
        return [] if self.slice_ends == 0.0 else None

    def _other(self, command: wire.Command) -> list[wire.Command] | None:
        match command:
            case _Rest():
                return self._publish(command.head, command.bodies)
            case wire.Fault():
                self.fail(command.text)
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
                pass  # PONG was heard, and that is all it says; +OK and INFO are nothing to a server
        return [] if perf_counter() >= self.slice_ends else None

    def _connect(self, options: bytes) -> None:
        try:
            said = wire.connect_options(options)
        except wire.Broken as error:
            self.fail(error.args[0])
            return
        refusal = self._hub.admit(self, said)
        if refusal:
            self._refuse_login(refusal)
            return
        if said.no_responders and not said.headers:
            self.fail(NO_RESPONDERS_NEEDS_HEADERS)
            return
        self.name, self.verbose, self.echo = said.name, said.verbose, said.echo
        self.headers, self.no_responders = said.headers, said.no_responders
        self._okay()

    def _refuse_login(self, refusal: str) -> None:
        """Answer a wrong password after a while, and read nothing meanwhile: guessing takes time."""
        if refusal != AUTHORIZATION_VIOLATION:
            self._turn_away(refusal)
            return
        self._login_bytes = LOGIN_BYTES_MAX  # no second try on this connection
        self.pause_reading()
        self._hub.loop.call_later(WRONG_LOGIN_S, self.fail, refusal)

    def _subscribe(self, request: wire.Subscribe) -> None:
        if request.sid in self.subscriptions:  # nats-server keeps the first, too
            self._okay()
            return
        if not is_pattern(request.subject):
            self.send(wire.error(INVALID_SUBJECT))
            return
        subscription = Subscription(self, request)
        self.subscriptions[request.sid] = subscription
        refusal = self._hub.subscribe(subscription)
        if refusal:
            self.subscriptions.pop(request.sid, None)
            self.send(wire.permissions_violation("Subscription", request.subject))
            return
        self._okay()

    def _unsubscribe(self, request: wire.Unsubscribe) -> None:
        subscription = self.subscriptions.get(request.sid)
        if subscription is not None:
            subscription.last = request.after
            if subscription.delivered >= request.after:
                self.drop(subscription)
        self._okay()

    def _okay(self) -> None:
        if self.verbose:
            self.send(wire.OK)

    # ---- what goes out ---------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Put bytes aside until the turn ends."""
        if self._closing:
            return
        if not self._out:
            self._hub.has_output(self)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > LINK_FULL_BYTES:  # much of it is not left to the end of the turn
            self.write_out()

    def deliver(self, sid: str, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """One message of the room for a subscription of this connection."""
        subscription = self.subscriptions.get(_raw(sid))
        if subscription is not None:
            self._push(subscription, _raw(subject), _raw(reply), headers, payload)

    def deliver_many(self, sid: str, subject: str, messages: list[tuple[bytes, bytes]]) -> None:
        """Several messages of the room in a row."""
        subscription = self.subscriptions.get(_raw(sid))
        if subscription is None:
            return
        if self.headers and not subscription.last:
            subscription.delivered += len(messages)
            self.send(wire.messages(_raw(subject), subscription.sid, messages))
            return
        for headers, payload in messages:
            self.deliver(sid, subject, "", headers, payload)

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        """Answer a request. A stranger's wildcard must not see what may hold a private id."""
        subject = _raw(reply)
        matched = self._hub.match(subject)
        everyone = [*matched.each, *(member for group in matched.groups for member in group)]
        for subscription in [each for each in everyone if each.link is self] or self._hub.literal(subject):
            subscription.link._push(subscription, subject, b"", headers, payload)  # noqa: SLF001

    def _push(
        self, subscription: Subscription, subject: bytes, reply: bytes, headers: bytes, payload: bytes
    ) -> None:
        if self._closing:
            return
        if not self.headers:
            headers = b""
        self.send(wire.message(subject, subscription.sid, reply, headers, payload))
        subscription.delivered += 1
        if subscription.delivered == subscription.last:
            self.drop(subscription)

    def drop(self, subscription: Subscription) -> None:
        """End a subscription."""
        if self.subscriptions.pop(subscription.sid, None) is not None:
            self._hub.unsubscribe(subscription)

    @property
    def pending_bytes(self) -> int:
        """What is not in the hands of the system yet."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return waiting + self._out_bytes

    def narrow(self) -> None:
        """Leave little in the buffers below us: what stands there cannot be overtaken any more."""
        if self._transport is None:
            return
        self._transport.set_write_buffer_limits(high=LINK_FULL_BYTES)
        found = self._transport.get_extra_info("socket")
        if found is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LINK_FULL_BYTES)

    def want_room(self) -> None:
        """More than `LINK_FULL_BYTES` waits: the transport is paused, or the turn ends with a write."""
        self._wants_room = True

    def write_out(self) -> None:
        """Hand over what this turn put aside. Who has too much waiting already is cut off."""
        transport, out, size = self._transport, self._out, self._out_bytes
        if transport is None or not out:
            return
        if self.pending_bytes > self._hub.pending_bytes_max:
            self._overflow()
            return
        transport.write(out[0] if len(out) == 1 else b"".join(out))
        self._out, self._out_bytes = [], 0
        self._sent_bytes += size
        if self.paused:
            self.count_waiting()
        if self._wants_room and not self.paused:
            self._wants_room = False
            self._hub.loop.call_soon(self._hub.has_room, self)

    def count_waiting(self) -> None:
        """Count what waits against the client, while the connection takes no more. Over its limit, end."""
        waiting = (
            self._transport.get_write_buffer_size() if self.paused and self._transport is not None else 0
        )
        more, self.waiting_bytes = waiting - self.waiting_bytes, waiting
        if not self._hub.waits(self, more) and more > 0:
            self._overflow()

    def _overflow(self) -> None:
        """Too much waits. From here on nothing is kept for it; it is cut off when whoever sends is done."""
        self._closing = True
        self._out, self._out_bytes = [], 0
        self._hub.waits(self, -self.waiting_bytes)  # given back at once: the next one of its client may go on
        self.waiting_bytes = 0
        self._hub.loop.call_soon(self.cut)

    def is_stuck(self, now_s: float, patience_s: float) -> bool:
        """Whether it is backed up and has taken nothing at all for so long."""
        if not self.paused or self._transport is None:
            return False
        taken = self._sent_bytes - self._transport.get_write_buffer_size()
        if taken != self.stalled_bytes:
            self.stalled_bytes, self.stalled_at = taken, now_s
        return now_s - self.stalled_at > patience_s

    # ---- the end ---------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def peer_address(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if peer else ""

    @property
    def address(self) -> str:
        """Where it comes from: host and port."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{f'[{peer[0]}]' if ':' in peer[0] else peer[0]}:{peer[1]}" if peer else ""

    def pause_reading(self) -> None:
        """Read nothing more until everyone who asked for that has called `resume_reading`."""
        self._holds += 1
        if self._holds == 1 and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._holds -= 1
        if not self._holds and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def fail(self, text: str) -> None:
        """Tell what is wrong, and end."""
        self.send(wire.error(text))
        self.end()

    def end(self) -> None:
        """Write what is waiting, and end."""
        self.write_out()
        if self._closing or self._transport is None:
            return
        self._give_up()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._hub.loop.call_later(LINGER_S, self._transport.close)
        else:
            self._transport.close()

    def cut(self) -> None:
        """End at once: whatever is waiting is thrown away."""
        self._give_up()
        if self._transport is not None:
            self._transport.abort()

    def _give_up(self) -> None:
        """Nothing is taken or given from here on."""
        if not self._gave_up:
            self._closing = self._gave_up = True
            self._out, self._out_bytes = [], 0
            self._hub.holds(self, -self._held_bytes)
            self._held_bytes = 0
            self._reader = wire.ClientReader()  # what it has not finished is given back
            self._hub.gave_up(self)
