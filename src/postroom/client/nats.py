"""A connection to a NATS server that reconnects whenever it is lost.

Rule 1: a request without an answer fails when the connection is lost, because the client cannot know whether
        it was executed. Nothing is sent twice.
Rule 2: credentials are sent to the server that the address names. With TLS, only the server's first line is
        read in the clear, and the client sends nothing before the handshake.
Rule 3: after a refused login or subscription the client does not reconnect.
"""

import asyncio
import logging
import os
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import msgspec

from postroom.client.connections import untrusted
from postroom.core.nats import natswire as wire
from postroom.errors import InvalidMessage, InvalidSetting, MailRefused, MailUnavailable, PostroomError

DEFAULT_PORT = 4222
MESSAGE_BYTES_MAX = 64 << 20  # of one message from a server
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
SID = b"1"  # of a connection's only subscription
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 2.0
PING_EVERY_S = 30.0
INBOX_BYTES = 16
FORBIDDEN = 403
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"

_log = logging.getLogger("postroom.mail")


class Server(NamedTuple):
    """The address of a server, and the credentials for it."""

    host: str
    port: int
    tls: bool
    user: str = ""
    password: str = ""
    token: str = ""

    @property
    def shown(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Login(NamedTuple):
    """The servers, which are tried in turn, the client's name, and the TLS settings."""

    servers: list[Server]
    name: str
    tls: ssl.SSLContext | None


def servers_of(addresses: str, *, user: str, password: str, token: str) -> list[Server]:
    """Parse addresses such as `nats://user:password@host:4222`, separated by commas."""
    found = [_server_of(text.strip(), user, password, token) for text in addresses.split(",") if text.strip()]
    if not found:
        raise InvalidSetting("the address of the server is empty")
    return found


def _server_of(text: str, user: str, password: str, token: str) -> Server:
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme not in ("nats", "tls") or not host:
        raise InvalidSetting("the address of a server looks like nats://host:4222 or tls://host:4222")
    name, secret = unquote(parts.username or ""), parts.password
    if name and secret is None:  # a user without a password is a token, as in other NATS clients
        return Server(host, port, parts.scheme == "tls", user, password, name)
    if name:
        return Server(host, port, parts.scheme == "tls", name, unquote(secret or ""), token)
    return Server(host, port, parts.scheme == "tls", user, password, token)


class _Socket(asyncio.Protocol):
    """One TCP connection: parses commands, writes bytes."""

    def __init__(
        self, on_command: Callable[["_Socket", wire.Command], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_command = on_command
        self._on_lost = on_lost
        self._reader = wire.ServerReader(payload_bytes_max=MESSAGE_BYTES_MAX)
        self.transport: asyncio.Transport | None = None
        self.info: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.pongs: list[asyncio.Future[None]] = []
        self.payload_bytes_max = wire.PAYLOAD_BYTES_MAX
        self.refusal: PostroomError | None = None
        self.received_data = True
        """Since the last ping."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received_data = True
        for command in self._reader.feed(data):
            match command:
                case wire.Info() if not self.info.done():
                    self._read_info(command.options)
                case wire.Ping():
                    self.write(wire.PONG)
                case wire.Pong():
                    if self.pongs:
                        _settle(self.pongs.pop(0))
                case wire.ProtocolFault():
                    self.refusal = MailUnavailable("the server does not speak NATS")
                    self.close()
                case _:
                    self._on_command(self, command)

    def _read_info(self, options: bytes) -> None:
        try:
            info = msgspec.json.decode(options, type=dict[str, Any])
            self.payload_bytes_max = int(info.get("max_payload", wire.PAYLOAD_BYTES_MAX))
            self.info.set_result(info)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError):
            self.info.set_exception(MailUnavailable("the server does not speak NATS"))

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    async def flush(self) -> None:
        """Wait until the server has read everything written so far, by a ping and its pong."""
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pongs.append(pong)
        self.write(wire.PING)
        await pong

    async def accepted(self) -> None:
        """Wait until the server has read the first commands; raises its refusal."""
        await self.flush()
        if self.refusal is not None:
            raise self.refusal
        if self.transport is None:
            raise MailUnavailable("the server closed the connection")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drain(self) -> None:
        """Wait while the write buffer is full."""
        await self._writable.wait()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the cause makes no difference
        self.transport = None
        self._writable.set()
        self._closed.set()
        error = self.refusal or MailUnavailable("the server closed the connection")
        futures: list[asyncio.Future[Any]] = [self.info, *self.pongs]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: perhaps no coroutine waits for it
        self._on_lost()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    async def wait_closed(self) -> None:
        """Close the connection and wait for the end; abort after `CLOSE_TIMEOUT_S`."""
        if self.transport is None:
            return
        self.transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._closed.wait()
        except TimeoutError:
            self.transport.abort()
            await asyncio.sleep(0)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class ClientConnection:
    """A connection that reconnects. `subscription` is sent again on each connect."""

    def __init__(
        self,
        login: Login,
        *,
        subscription: bytes = b"",
        on_messages: Callable[[wire.Messages], None] | None = None,
        on_failure: Callable[[PostroomError], None] | None = None,
    ) -> None:
        self._login = login
        self._inbox = f"_INBOX.{secrets.token_hex(INBOX_BYTES)}"
        self._subscription = subscription or wire.subscribe(f"{self._inbox}.*".encode(), SID)
        self._on_messages = on_messages or self._receive_answer
        self._on_failure = on_failure
        self._socket: _Socket | None = None
        self._ready = asyncio.Event()
        """Set while connected, and for good after a failure."""
        self._lost = asyncio.Event()
        self._requests: dict[bytes, asyncio.Future[wire.Messages]] = {}
        """By reply subject."""
        self._requests_made = 0
        self._reconnecting: asyncio.Task[None] | None = None
        self._pinger: asyncio.TimerHandle | None = None
        self._next_server = 0
        self._failure: PostroomError | None = None
        self.connects = 0

    # ---- connecting ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; raises when no server accepts the client."""
        await self._dial()
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def close(self) -> None:
        """Unsubscribe, wait until the server has read everything, and close.

        The unsubscribe lets the server deliver later messages to other members of a group, instead of losing
        them on a connection that is about to close.
        """
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._reconnecting
        if self._pinger is not None:
            self._pinger.cancel()
        socket, self._socket = self._socket, None
        self._failure = self._failure or MailUnavailable("this client is closed")
        self._ready.set()
        if socket is not None and socket.transport is not None:
            socket.write(wire.unsubscribe(SID))
            with suppress(PostroomError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await socket.flush()
            await socket.wait_closed()

    async def _reconnect(self) -> None:
        while True:
            await self._lost.wait()
            _log.warning("the connection to the mail server is lost; reconnecting")
            pause_s = RETRY_FIRST_S
            while True:
                try:
                    await self._dial()
                    break
                except MailRefused as error:
                    self._fail(error)
                    return
                except (PostroomError, OSError):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_LAST_S)

    def _fail(self, error: PostroomError) -> None:
        self._failure = error
        self._ready.set()
        if self._on_failure is not None:
            self._on_failure(error)

    async def _dial(self) -> None:
        """Try each server once."""
        for left in reversed(range(len(self._login.servers))):
            server = self._login.servers[self._next_server % len(self._login.servers)]
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._socket = await self._connect(server)
            except (OSError, MailUnavailable, TimeoutError) as error:
                self._next_server += 1
                if not left:
                    raise MailUnavailable(
                        f"cannot reach the mail server at {server.shown}: {_reason(error)}"
                    ) from None
            else:
                break
        self._lost.clear()
        self._ready.set()
        self._pinger = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    async def _connect(self, server: Server) -> _Socket:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_connection(
            lambda: _Socket(self._handle, self._connection_lost), server.host, server.port
        )
        try:
            info = await socket.info
            if info.get("tls_required") or server.tls or self._login.tls is not None:
                await self._start_tls(socket, server, info)
            self.connects += 1
            socket.write(wire.connect(self._connect_options(server)) + self._subscription)
            await socket.accepted()
        except BaseException:
            await socket.wait_closed()
            raise
        return socket

    async def _start_tls(self, socket: _Socket, server: Server, info: dict[str, Any]) -> None:
        if not (info.get("tls_required") or info.get("tls_available")):
            raise MailRefused(FORBIDDEN, "the server has no TLS, and this client sends nothing without it")
        context = self._login.tls or ssl.create_default_context()
        assert socket.transport is not None  # noqa: S101 - for mypy: the server's first line has arrived
        try:
            socket.transport = await asyncio.get_running_loop().start_tls(
                socket.transport, socket, context, server_hostname=server.host
            )
        except OSError:
            socket.transport = None  # closed without a call of connection_lost
            await asyncio.sleep(0)
            raise

    def _connect_options(self, server: Server) -> dict[str, Any]:
        options: dict[str, Any] = {
            "verbose": False, "pedantic": False, "headers": True, "no_responders": True, "echo": True,
            "lang": "python", "version": "1", "protocol": 1, "name": self._login.name,
        }  # fmt: skip
        credentials = {"user": server.user, "pass": server.password, "auth_token": server.token}
        return options | {key: value for key, value in credentials.items() if value}

    def _connection_lost(self) -> None:
        """Fail open requests and reconnect. `_dial` itself reports a connection that was never accepted."""
        if self._socket is None or self._socket.transport is not None:
            return
        self._ready.clear()
        self._lost.set()
        if self._pinger is not None:
            self._pinger.cancel()
        requests, self._requests = self._requests, {}
        for future in requests.values():
            if not future.done():
                future.set_exception(
                    MailUnavailable(
                        "the connection was lost before an answer came: the call may or may not be done"
                    )
                )

    def _ping(self) -> None:
        socket = self._socket
        if socket is None or socket.transport is None:
            return
        if not socket.received_data:
            socket.transport.abort()
            return
        socket.received_data = False
        self._ping_now(socket)
        self._pinger = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    @staticmethod
    def _ping_now(socket: _Socket) -> None:
        socket.pongs.append(asyncio.get_running_loop().create_future())
        socket.write(wire.PING)

    # ---- receiving -------------------------------------------------------------------------------------

    def _handle(self, socket: _Socket, command: wire.Command) -> None:
        if isinstance(command, wire.Messages):
            self._on_messages(command)
        elif isinstance(command, wire.Error):
            socket.refusal = _refusal(command.text)
            is_subscriber = self._on_failure is not None and self._socket is socket
            refused = command.text.lower()
            if is_subscriber and ("permissions" in refused or TOO_MANY_SUBSCRIPTIONS in refused):
                self._fail(socket.refusal)

    def _receive_answer(self, messages: wire.Messages) -> None:
        future = self._requests.pop(messages.head.subject, None)
        if future is not None and not future.done():
            future.set_result(messages)

    def pause_reading(self) -> None:
        if self._socket is not None and self._socket.transport is not None:
            self._socket.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._socket is not None and self._socket.transport is not None:
            self._socket.transport.resume_reading()

    # ---- sending ---------------------------------------------------------------------------------------

    async def publish(self, subject: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> None:
        """Send without an answer. Waits for a connection, and while the write buffer is full."""
        socket = await self._connected_socket()
        if len(headers) + len(payload) > socket.payload_bytes_max:
            raise InvalidMessage(f"a message to this server has at most {socket.payload_bytes_max} bytes")
        socket.write(wire.publish(subject, payload, reply=reply, headers=headers))
        await socket.drain()

    async def _connected_socket(self) -> _Socket:
        while True:
            await self._ready.wait()
            if self._failure is not None:
                raise self._failure
            if self._socket is not None and self._socket.transport is not None:
                return self._socket
            await asyncio.sleep(0)

    async def request(
        self, subject: bytes, payload: bytes, headers: bytes = b"", *, timeout_s: float
    ) -> wire.Messages:
        """Send and wait for the answer."""
        self._requests_made += 1
        reply = b"%b.%d" % (self._inbox.encode(), self._requests_made)
        future: asyncio.Future[wire.Messages] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected_socket()
                self._requests[reply] = future
                await self.publish(subject, payload, headers, reply)
                return await future
        except TimeoutError:
            raise MailUnavailable(
                f"no answer within {timeout_s:g} s: the call may or may not be done"
            ) from None
        finally:
            self._requests.pop(reply, None)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS failed: {untrusted(error, '--tls-ca, tls= in Python, or SSL_CERT_FILE')}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)


def _refusal(text: str) -> PostroomError:
    """The error for an -ERR of the server. Its text may hold a mailbox id, which is a secret."""
    lowered = text.lower()
    if "read-only token" in lowered:
        return MailRefused(FORBIDDEN, "the server refuses the login: a read-only token is not for NATS")
    if "authorization" in lowered or "authentication" in lowered:
        return MailRefused(FORBIDDEN, "the server refuses the login: wrong user, password or token")
    if "permissions" in lowered:
        return MailRefused(FORBIDDEN, "the server refuses the subscription: there may be no such mailbox")
    if TOO_MANY_SUBSCRIPTIONS in lowered:
        return MailUnavailable("the server refuses the subscription: this client has too many")
    return MailUnavailable(f"the server ended the connection: {text}")
