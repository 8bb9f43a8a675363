"""A connection to a NATS server, made again whenever it is lost.

Rule 1: what has no answer yet when the connection is lost fails: nobody knows whether it was done. Nothing
        is sent a second time.
Rule 2: a password goes to whoever the address names. With TLS, nothing but the server's first line is read
        in the clear, and nothing is said.
Rule 3: a server that refuses who we are, or what we subscribe to, is not asked again.
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

from postroom.core import natswire as wire
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

_log = logging.getLogger("postroom.mail")


class Server(NamedTuple):
    """Where a server listens, and who we are to it."""

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
    """How to get in: the servers in turn, and what each is told."""

    servers: list[Server]
    name: str
    tls: ssl.SSLContext | None


def servers_of(addresses: str, *, user: str, password: str, token: str) -> list[Server]:
    """The servers of a text such as `nats://user:password@host:4222`, several with commas."""
    found = [_server_of(text.strip(), user, password, token) for text in addresses.split(",") if text.strip()]
    if not found:
        raise InvalidSetting("the address of the server is empty")
    return found


def _server_of(text: str, user: str, password: str, token: str) -> Server:
    parts = urlsplit(text if "://" in text else f"nats://{text}")
    try:
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if parts.scheme not in ("nats", "tls") or not host:
        raise InvalidSetting("the address of a server looks like nats://host:4222 or tls://host:4222")
    name, secret = unquote(parts.username or ""), parts.password
    if name and secret is None:  # as other clients read it: alone, it is a token
        return Server(host, port, parts.scheme == "tls", user, password, name)
    if name:
        return Server(host, port, parts.scheme == "tls", name, unquote(secret or ""), token)
    return Server(host, port, parts.scheme == "tls", user, password, token)


class _Socket(asyncio.Protocol):
    """One connection of the network: commands in, bytes out."""

    def __init__(self, got: Callable[["_Socket", wire.Command], None], lost: Callable[[], None]) -> None:
        self._got = got
        self._lost = lost
        self._reader = wire.ServerReader(payload_bytes_max=MESSAGE_BYTES_MAX)
        self.transport: asyncio.Transport | None = None
        self.info: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.pongs: list[asyncio.Future[None]] = []
        self.payload_bytes_max = wire.PAYLOAD_BYTES_MAX
        self.refusal: PostroomError | None = None
        self.heard = True
        self._room = asyncio.Event()
        self._room.set()
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        for command in self._reader.feed(data):
            match command:
                case wire.Info() if not self.info.done():
                    self._begin(command.options)
                case wire.Ping():
                    self.write(wire.PONG)
                case wire.Pong():
                    if self.pongs:
                        _settle(self.pongs.pop(0))
                case wire.Fault():
                    self.refusal = MailUnavailable("what answers there does not speak NATS")
                    self.close()
                case _:
                    self._got(self, command)

    def _begin(self, options: bytes) -> None:
        try:
            info = msgspec.json.decode(options, type=dict[str, Any])
            self.payload_bytes_max = int(info.get("max_payload", wire.PAYLOAD_BYTES_MAX))
            self.info.set_result(info)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError):
            self.info.set_exception(MailUnavailable("what answers there does not speak NATS"))

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    async def pinged(self) -> None:
        """Everything written so far was taken in by the server."""
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pongs.append(pong)
        self.write(wire.PING)
        await pong

    async def admitted(self) -> None:
        """The server has taken in what it was told first; raises what it has against it."""
        await self.pinged()
        if self.refusal is not None:
            raise self.refusal
        if self.transport is None:
            raise MailUnavailable("the server closed the connection")

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def room(self) -> None:
        """Wait while much is on its way."""
        await self._room.wait()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self.transport = None
        self._room.set()
        self._gone.set()
        gone = self.refusal or MailUnavailable("the server closed the connection")
        waits: list[asyncio.Future[Any]] = [self.info, *self.pongs]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(gone)
                waiting.exception()  # it may be that nobody waits
        self._lost()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    async def ended(self) -> None:
        """Close, and wait until it is gone."""
        if self.transport is None:
            return
        self.transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._gone.wait()
        except TimeoutError:
            self.transport.abort()
            await asyncio.sleep(0)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class ClientConnection:
    """One connection that lasts. `subscription` is what it asks for each time that it is made."""

    def __init__(
        self,
        login: Login,
        *,
        subscription: bytes = b"",
        took: Callable[[wire.Messages], None] | None = None,
        failed: Callable[[PostroomError], None] | None = None,
    ) -> None:
        self._login = login
        self._inbox = f"_INBOX.{secrets.token_hex(INBOX_BYTES)}"
        self._subscription = subscription or wire.subscribe(f"{self._inbox}.*".encode(), SID)
        self._took = took or self._answered
        self._failed = failed
        self._socket: _Socket | None = None
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._asked: dict[bytes, asyncio.Future[wire.Messages]] = {}
        self._asks = 0
        self._task: asyncio.Task[None] | None = None
        self._pinger: asyncio.TimerHandle | None = None
        self._next = 0
        self._failure: PostroomError | None = None
        self.made = 0
        """How often its subscription was asked for."""

    # ---- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, or say why that is not possible."""
        await self._dial()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Let the server take in what was sent, and end.

        It also takes in that nobody listens here any more: what comes to a mailbox from now on goes to
        others, and is not lost on a connection that is about to close.
        """
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._pinger is not None:
            self._pinger.cancel()
        socket, self._socket = self._socket, None
        self._failure = self._failure or MailUnavailable("this client is closed")
        self._up.set()
        if socket is not None and socket.transport is not None:
            socket.write(wire.unsubscribe(SID))
            with suppress(PostroomError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await socket.pinged()
            await socket.ended()

    async def _keep(self) -> None:
        """Make the connection again, as often as it takes."""
        while True:
            await self._lost.wait()
            _log.warning("the connection to the mail server is lost; it is made again")
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
        self._up.set()
        if self._failed is not None:
            self._failed(error)

    async def _dial(self) -> None:
        """Try each server once."""
        for left in reversed(range(len(self._login.servers))):
            server = self._login.servers[self._next % len(self._login.servers)]
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._socket = await self._connected(server)
            except (OSError, MailUnavailable, TimeoutError) as error:
                self._next += 1
                if not left:
                    raise MailUnavailable(
                        f"cannot reach the mail server at {server.shown}: {_why(error)}"
                    ) from None
            else:
                break
        self._lost.clear()
        self._up.set()
        self._pinger = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    async def _connected(self, server: Server) -> _Socket:
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_connection(
            lambda: _Socket(self._got, self._dropped), server.host, server.port
        )
        try:
            info = await socket.info
            if info.get("tls_required") or server.tls or self._login.tls is not None:
                await self._secure(socket, server, info)
            self.made += 1
            socket.write(wire.connect(self._said(server)) + self._subscription)
            await socket.admitted()
        except BaseException:
            await socket.ended()
            raise
        return socket

    async def _secure(self, socket: _Socket, server: Server, info: dict[str, Any]) -> None:
        if not (info.get("tls_required") or info.get("tls_available")):
            raise MailRefused(FORBIDDEN, "the server has no TLS, and nothing is said to it without")
        context = self._login.tls or ssl.create_default_context()
        assert socket.transport is not None  # noqa: S101 - for the types: it has just sent something
        try:
            socket.transport = await asyncio.get_running_loop().start_tls(
                socket.transport, socket, context, server_hostname=server.host
            )
        except OSError:
            socket.transport = None  # it is closed, and nobody is told
            await asyncio.sleep(0)
            raise

    def _said(self, server: Server) -> dict[str, Any]:
        said: dict[str, Any] = {
            "verbose": False, "pedantic": False, "headers": True, "no_responders": True, "echo": True,
            "lang": "python", "version": "1", "protocol": 1, "name": self._login.name,
        }  # fmt: skip
        who = {"user": server.user, "pass": server.password, "auth_token": server.token}
        return said | {key: value for key, value in who.items() if value}

    def _dropped(self) -> None:
        """A socket is gone; one that was never up has been told of by whoever dialled."""
        if self._socket is None or self._socket.transport is not None:
            return
        self._up.clear()
        self._lost.set()
        if self._pinger is not None:
            self._pinger.cancel()
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(
                    MailUnavailable(
                        "the connection was lost before an answer came: it may or may not be done"
                    )
                )

    def _ping(self) -> None:
        socket = self._socket
        if socket is None or socket.transport is None:
            return
        if not socket.heard:
            socket.transport.abort()
            return
        socket.heard = False
        self._ping_now(socket)
        self._pinger = asyncio.get_running_loop().call_later(PING_EVERY_S, self._ping)

    @staticmethod
    def _ping_now(socket: _Socket) -> None:
        socket.pongs.append(asyncio.get_running_loop().create_future())
        socket.write(wire.PING)

    # ---- what comes ------------------------------------------------------------------------------------

    def _got(self, socket: _Socket, command: wire.Command) -> None:
        if isinstance(command, wire.Messages):
            self._took(command)
        elif isinstance(command, wire.Error):
            socket.refusal = _refusal(command.text)
            if self._failed is not None and self._socket is socket and "permissions" in command.text.lower():
                self._fail(socket.refusal)

    def _answered(self, messages: wire.Messages) -> None:
        asked = self._asked.pop(messages.head.subject, None)
        if asked is not None and not asked.done():
            asked.set_result(messages)

    def hold(self) -> None:
        """Read nothing more for now."""
        if self._socket is not None and self._socket.transport is not None:
            self._socket.transport.pause_reading()

    def go_on(self) -> None:
        if self._socket is not None and self._socket.transport is not None:
            self._socket.transport.resume_reading()

    # ---- what goes -------------------------------------------------------------------------------------

    async def publish(self, subject: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> None:
        """Send, without an answer. Waits for a connection, and while much is on its way."""
        socket = await self._ready()
        if len(headers) + len(payload) > socket.payload_bytes_max:
            raise InvalidMessage(f"a message to this server has at most {socket.payload_bytes_max} bytes")
        socket.write(wire.publish(subject, payload, reply=reply, headers=headers))
        await socket.room()

    async def _ready(self) -> _Socket:
        while True:
            await self._up.wait()
            if self._failure is not None:
                raise self._failure
            if self._socket is not None and self._socket.transport is not None:
                return self._socket
            await asyncio.sleep(0)

    async def request(
        self, subject: bytes, payload: bytes, headers: bytes = b"", *, timeout_s: float
    ) -> wire.Messages:
        """Send, and wait for the answer."""
        self._asks += 1
        reply = b"%b.%d" % (self._inbox.encode(), self._asks)
        future: asyncio.Future[wire.Messages] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready()
                self._asked[reply] = future
                await self.publish(subject, payload, headers, reply)
                return await future
        except TimeoutError:
            raise MailUnavailable(f"no answer within {timeout_s:g} s: it may or may not be done") from None
        finally:
            self._asked.pop(reply, None)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)


def _refusal(text: str) -> PostroomError:
    """What an -ERR means to us. A mailbox's id may stand in it, and is not passed on."""
    said = text.lower()
    if "authorization" in said or "authentication" in said:
        return MailRefused(FORBIDDEN, "the server does not let us in: wrong user, password or token")
    if "permissions" in said:
        return MailRefused(FORBIDDEN, "the server refuses the subscription: there may be no such mailbox")
    return MailUnavailable(f"the server ended the connection: {text}")
