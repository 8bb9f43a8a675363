"""The mail client: blocking with `with Mail(...)`, for asyncio with `async with Mail(...)`.

Rule 1: it speaks the mq9 protocol over plain NATS, so any mq9 server will do.
Rule 2: every subscription has its own connection. A slow reader slows down its own connection and blocks no
        other call.
Rule 3: a subscription reconnects. A message that it has already returned is skipped after that, but not in a
        group, where a redelivered message has to be finished by some member.
Rule 4: a subscription returns its buffered messages by priority.
"""

import asyncio
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import msgspec

from postroom.client.nats import SID, ClientConnection, Login, servers_of
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import RANKS
from postroom.core.mail.mailcalls import (
    CREATE,
    LIST,
    REPLY_TO,
    WITHOUT_PAYLOADS,
    Created,
    Listed,
    MailMessage,
    Payload,
    Priority,
    PublicMailbox,
    Reply,
    address,
    as_bytes,
    checked,
    checked_number,
    checked_text,
    header_block,
    listed,
    message_of,
    suffix,
    wanted_suffix,
)
from postroom.core.nats import natswire as wire
from postroom.core.times import SECONDS_MAX, checked_seconds
from postroom.errors import InvalidMessage, MailUnavailable, PostroomError

DEFAULT_SERVER = "nats://127.0.0.1:4222"
CLIENT_NAME = "postroom"
TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 30.0
REPLY_TTL_S = 60.0  # how long a reply mailbox outlives the timeout, so that a late answer is still accepted
QUIET_S = 0.5  # a mailbox counts as read when no message has arrived for this long
QUEUED_BYTES_MAX = 32 << 20  # buffered by a subscription before it stops reading from its connection
SEEN_MAX = 100_000  # message ids that a subscription remembers
MESSAGE_COST_BYTES = 200  # about what a message takes in memory besides its payload

_Result = TypeVar("_Result")
P = ParamSpec("P")


Messages = list[MailMessage]
Lists = list[Listed]
PublicMailboxes = list[PublicMailbox]


# ---- for asyncio ---------------------------------------------------------------------------------------


class AsyncSubscription:
    """The messages of a mailbox or of the public list: the stored ones first, then new ones."""

    def __init__(self, login: Login, subject: bytes, mail_id: str, group: str = "") -> None:
        self._mail_id = mail_id
        self._group = group
        line = wire.subscribe(subject, SID, group.encode())
        self._connection = ClientConnection(
            login, subscription=line, on_messages=self._receive, on_failure=self._fail
        )
        self._queued: list[tuple[int, int, MailMessage]] = []
        """A heap by priority, and within a priority by arrival."""
        self._received = 0
        self._queued_bytes = 0
        self._paused = False
        self._readable = asyncio.Event()
        """Set while there is a message or a failure to return."""
        self._failure: PostroomError | None = None
        self._seen: dict[int, None] = {}

    async def open(self) -> Self:
        await self._connection.open()
        return self

    def _receive(self, messages: wire.Messages) -> None:
        for body in messages.bodies:
            message = message_of(self._mail_id, messages.head, body)
            if self._group or not self._is_duplicate(message.msg_id):
                self._received += 1
                rank = RANKS.get(message.priority, RANKS["normal"])
                heappush(self._queued, (rank, self._received, message))
                self._queued_bytes += len(body) + MESSAGE_COST_BYTES
        if self._queued:
            self._readable.set()
        if self._queued_bytes > QUEUED_BYTES_MAX:
            self._paused = True
            self._connection.pause_reading()  # each time, because a new connection starts unpaused

    def _is_duplicate(self, msg_id: int) -> bool:
        """Whether this message was received before. Within one connection no message repeats."""
        if not msg_id:
            return False
        if msg_id in self._seen:
            return self._connection.connects != 1
        self._seen[msg_id] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        return False

    def _fail(self, error: PostroomError) -> None:
        self._failure = error
        self._readable.set()

    async def next(self, timeout_s: float | None = None) -> MailMessage | None:
        """The next message; None after the timeout."""
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable.wait()
        except TimeoutError:
            return None
        if not self._queued:
            raise self._failure or MailUnavailable("this subscription is closed")
        message = heappop(self._queued)[2]
        self._queued_bytes -= len(message.payload) + MESSAGE_COST_BYTES
        if not self._queued:
            self._queued_bytes = 0
            if self._failure is None:
                self._readable.clear()
        if self._paused and self._queued_bytes * 2 < QUEUED_BYTES_MAX:
            self._paused = False
            self._connection.resume_reading()
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MailMessage:
        if self._failure is not None and not self._queued and isinstance(self._failure, _Closed):
            raise StopAsyncIteration
        message = await self.next()
        assert message is not None  # noqa: S101 - for mypy: without a timeout there is a message
        return message

    async def close(self) -> None:
        self._fail(_Closed("this subscription is closed"))
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Closed(MailUnavailable):
    """The reader itself closed the subscription."""


class AsyncMail:
    """The asyncio form of `Mail`. Made by `async with Mail(...)`."""

    def __init__(self, login: Login, timeout_s: float) -> None:
        self._login = login
        self._timeout_s = timeout_s
        self._connection = ClientConnection(login)
        self._subscriptions: weakref.WeakSet[AsyncSubscription] = weakref.WeakSet()
        """Weak, because the event loop keeps open subscriptions alive."""

    async def open(self) -> Self:
        await self._connection.open()
        return self

    async def close(self) -> None:
        """Close every subscription, and the connection once the server has read what was sent."""
        for subscription in list(self._subscriptions):
            await subscription.close()
        await self._connection.close()

    async def _call(self, subject: bytes, payload: bytes, headers: bytes = b"") -> Reply:
        return checked(await self._connection.request(subject, payload, headers, timeout_s=self._timeout_s))

    async def create(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> str:
        """Create a mailbox and return its id. An existing mailbox is not changed."""
        return (await self.ensure(name, ttl_s=ttl_s, public=public, desc=desc)).mail_id

    async def ensure(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> Created:
        """As `create`; also returns whether the mailbox is new."""
        if not isinstance(public, bool):
            raise InvalidMessage(f"public must be true or false, not {public!r}")
        fields = {
            "ttl": None if ttl_s is None else checked_seconds("ttl_s", ttl_s),
            "name": checked_text("name", name) or None,
            "public": public if public or name else None,  # without it, a name alone means a public mailbox
            "desc": checked_text("desc", desc) or None,
        }
        body = {key: value for key, value in fields.items() if value is not None}
        reply = await self._call(CREATE, msgspec.json.encode(body))
        return Created(reply.mail_id or reply.mail_address, reply.is_new)

    async def send(
        self,
        mail_id: str,
        payload: Payload,
        *,
        priority: Priority = "normal",
        headers: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> int:
        """Send a message and return its id once it is stored. Without `wait`: return 0 at once."""
        subject = address(mail_id, after=suffix(priority))
        block = b"" if headers is None else header_block(headers)
        if not wait:
            await self._connection.publish(subject, as_bytes(payload), block)
            return 0
        return int((await self._call(subject, as_bytes(payload), block)).msg_id or 0)

    async def ask(
        self,
        mail_id: str,
        payload: Payload,
        *,
        priority: Priority = "normal",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> MailMessage:
        """Send a message, wait for the answer and return it.

        The answer is the first message in a private mailbox that is made for it. Its id is in the header
        `Mq9-Reply-To`, which the receiver reads as `MailMessage.reply_to`.
        """
        checked_seconds("timeout_s", timeout_s, SECONDS_MAX - REPLY_TTL_S)
        content, own_headers = as_bytes(payload), headers or {}
        header_block(own_headers)  # checked before the reply mailbox is made
        reply_to = await self.create(ttl_s=timeout_s + REPLY_TTL_S)
        all_headers = {**own_headers, REPLY_TO: reply_to}
        msg_id = await self.send(mail_id, content, priority=priority, headers=all_headers)
        subscription = await self.subscribe(reply_to)
        try:
            answer = await subscription.next(timeout_s)
        finally:
            await subscription.close()
        if answer is None:
            raise MailUnavailable(
                f"no answer to message {msg_id} within {timeout_s:g} s; the message is stored"
            )
        return answer

    async def subscribe(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", group: str = ""
    ) -> AsyncSubscription:
        """Receive the stored messages of a mailbox by priority, then new ones. A group shares them."""
        if any(char.isspace() for char in checked_text("group", group)):
            raise InvalidMessage("the name of a group must not contain blanks")
        return await self._subscribed(address(mail_id, after=wanted_suffix(priority)), mail_id, group)

    async def _subscribed(self, subject: bytes, mail_id: str, group: str = "") -> AsyncSubscription:
        subscription = AsyncSubscription(self._login, subject, mail_id, group)
        await subscription.open()
        self._subscriptions.add(subscription)
        return subscription

    async def messages(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", quiet_s: float = QUIET_S
    ) -> Messages:
        """The messages that a mailbox holds now.

        Reads until every message of the mailbox's list has arrived, or no message for `quiet_s`.
        """
        wanted_suffix(priority)
        checked_seconds("quiet_s", quiet_s)
        rows = await self.list(mail_id)
        rank = RANKS.get(priority)
        missing = {each.msg_id for each in rows if rank is None or RANKS.get(each.priority) == rank}
        if not missing and len(rows) < replies.LIST_MAX:
            return []
        found: Messages = []
        subscription = await self.subscribe(mail_id, priority=priority)
        try:
            while missing or len(rows) >= replies.LIST_MAX:
                message = await subscription.next(quiet_s)
                if message is None:
                    break
                found.append(message)
                missing.discard(message.msg_id)
        finally:
            await subscription.close()
        return found

    async def list(self, mail_id: str) -> Lists:
        """List the first thousand messages of a mailbox by priority, without their payloads."""
        return listed(await self._call(address(mail_id, what=LIST), WITHOUT_PAYLOADS))

    async def delete(self, mail_id: str, msg_id: int) -> bool:
        """Delete a message; False when the mailbox did not hold it."""
        subject = address(mail_id, what=mq9.DELETE, after=f".{checked_number(msg_id)}")
        reply = await self._call(subject, b"{}")
        return reply.deleted is not False

    async def public(self, *, quiet_s: float = QUIET_S) -> PublicMailboxes:
        """List the public mailboxes."""
        checked_seconds("quiet_s", quiet_s)
        found: dict[str, PublicMailbox] = {}
        subscription = await self._subscribed(mq9.PUBLIC_LIST.encode(), "")
        try:
            while (message := await subscription.next(quiet_s)) is not None:
                event = message.json()
                mail_id = event["mail_id"]
                found.pop(mail_id, None)
                if event.get("event") == "created":
                    found[mail_id] = PublicMailbox(mail_id, event.get("desc", ""), event.get("ttl", 0))
        finally:
            await subscription.close()
        return [*found.values()]


# ---- blocking ------------------------------------------------------------------------------------------


class Subscription:
    """The blocking form of `AsyncSubscription`: for a `for` loop."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], inner: AsyncSubscription) -> None:
        self._run = run
        self._inner = inner

    def next(self, timeout_s: float | None = None) -> MailMessage | None:
        """The next message; None after the timeout."""
        found: MailMessage | None = self._run(self._inner.next(timeout_s))
        return found

    def __iter__(self) -> Iterator[MailMessage]:
        with suppress(_Closed):
            while True:
                message = self.next()
                assert message is not None  # noqa: S101 - for mypy: without a timeout there is a message
                yield message

    def close(self) -> None:
        self._run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _waits(
    call: Callable[Concatenate[AsyncMail, P], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate["Mail", P], _Result]:
    """The blocking form of a call, with its arguments, types and docstring."""

    @wraps(call)
    def blocking(mail: "Mail", /, *args: P.args, **kwargs: P.kwargs) -> _Result:
        return mail._run(call(mail._opened(), *args, **kwargs))  # noqa: SLF001 - a method of `Mail`

    return blocking


class Mail:
    """A client of a mail server. `with` gives blocking calls, `async with` the same calls as coroutines.

    The client connects on entry or with the first call. It must not be used in a forked process.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        user: str = "",
        password: str = "",
        token: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = CLIENT_NAME,
    ) -> None:
        given = {"server": server, "user": user, "password": password, "token": token, "name": name}
        for argument, value in given.items():
            checked_text(argument, value)
        if tls is not None and not isinstance(tls, ssl.SSLContext):
            raise InvalidMessage(f"tls must be an ssl.SSLContext, not {type(tls).__name__}")
        servers = servers_of(server, user=user, password=password, token=token)
        self._login = Login(servers, name, tls)
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._async: AsyncMail | None = None
        self._opening = threading.Lock()
        self._inner: AsyncMail | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> AsyncMail:
        self._async = await AsyncMail(self._login, self._timeout_s).open()
        return self._async

    async def __aexit__(self, *_: object) -> None:
        if self._async is not None:
            await self._async.close()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the event loop --------------------------------------------------------------------------------

    def _opened(self) -> AsyncMail:
        with self._opening:
            if self._inner is None:
                self._start()
                try:
                    self._inner = self._run(AsyncMail(self._login, self._timeout_s).open())
                except BaseException:
                    self._stop()
                    raise
            return self._inner

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mail-client", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the client's event loop and wait for its result."""
        if self._loop is None:
            work.close()
            raise MailUnavailable("this client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the connection once the server has read what was sent."""
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                self._run(inner.close())
            finally:
                self._stop()

    # ---- the calls -------------------------------------------------------------------------------------

    create = _waits(AsyncMail.create)
    ensure = _waits(AsyncMail.ensure)
    send = _waits(AsyncMail.send)
    ask = _waits(AsyncMail.ask)
    messages = _waits(AsyncMail.messages)
    list = _waits(AsyncMail.list)
    delete = _waits(AsyncMail.delete)
    public = _waits(AsyncMail.public)

    def subscribe(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", group: str = ""
    ) -> Subscription:
        """Receive the stored messages of a mailbox by priority, then new ones. A group shares them."""
        inner = self._run(self._opened().subscribe(mail_id, priority=priority, group=group))
        return Subscription(self._run, inner)
