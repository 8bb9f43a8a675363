"""The client of mailboxes: plain with `with Mail(...)`, and for asyncio with `async with Mail(...)`.

Rule 1: it speaks the mq9 design's dialect over plain NATS, so any server of mailboxes will do.
Rule 2: a subscription has a connection of its own. Who reads slowly is sent less, and blocks no other call.
Rule 3: a subscription outlives its connection: it is made again, and a message that it gave before is passed
        over. A member of a group gets such a message again, because somebody has to finish it.
Rule 4: of what a subscription holds for its reader, the most urgent comes first.
"""

import asyncio
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from postroom.client.nats import SID, ClientConnection, Login, servers_of
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core import natswire as wire
from postroom.core.mailbox import RANKS
from postroom.core.mailcalls import (
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
from postroom.core.times import SECONDS_MAX, checked_seconds
from postroom.errors import InvalidMessage, MailUnavailable, PostroomError

DEFAULT_SERVER = "nats://127.0.0.1:4222"
CLIENT_NAME = "postroom"
TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 30.0
REPLY_TTL_S = 60.0  # that a reply mailbox lives on behind the timeout: a late answer is not refused at once
QUIET_S = 0.5  # without anything new, a mailbox counts as read
QUEUED_BYTES_MAX = 32 << 20  # that a subscription holds for its reader before it asks for no more
SEEN_MAX = 100_000  # message ids that a subscription remembers
MESSAGE_COST_BYTES = 200  # about what one takes in memory besides its payload

_Result = TypeVar("_Result")


Messages = list[MailMessage]
Lists = list[Listed]
PublicMailboxes = list[PublicMailbox]


# ---- for asyncio ---------------------------------------------------------------------------------------


class AsyncSubscription:
    """The messages of a mailbox, or the public list: what is stored first, and then what comes."""

    def __init__(self, login: Login, subject: bytes, mail_id: str, group: str = "") -> None:
        self._mail_id = mail_id
        self._group = group
        line = wire.subscribe(subject, SID, group.encode())
        self._connection = ClientConnection(login, subscription=line, took=self._took, failed=self._failed)
        self._queued: list[tuple[int, int, MailMessage]] = []
        """A heap: the most urgent first, and inside a rank in the order in which they came."""
        self._taken = 0
        self._queued_bytes = 0
        self._held = False
        self._some = asyncio.Event()
        self._failure: PostroomError | None = None
        self._seen: dict[int, None] = {}

    async def open(self) -> Self:
        await self._connection.open()
        return self

    def _took(self, messages: wire.Messages) -> None:
        for body in messages.bodies:
            message = message_of(self._mail_id, messages.head, body)
            if self._group or not self._is_known(message.msg_id):
                self._taken += 1
                heappush(self._queued, (RANKS.get(message.priority, RANKS["normal"]), self._taken, message))
                self._queued_bytes += len(body) + MESSAGE_COST_BYTES
        if self._queued:
            self._some.set()
        if self._queued_bytes > QUEUED_BYTES_MAX:
            self._held = True
            self._connection.hold()  # each time: a connection that was made again reads on

    def _is_known(self, msg_id: int) -> bool:
        """Only another connection repeats messages."""
        if not msg_id:
            return False
        if msg_id in self._seen:
            return self._connection.made != 1
        self._seen[msg_id] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        return False

    def _failed(self, error: PostroomError) -> None:
        self._failure = error
        self._some.set()

    async def next(self, timeout_s: float | None = None) -> MailMessage | None:
        """The next message; None when none came in time."""
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._some.wait()
        except TimeoutError:
            return None
        if not self._queued:
            raise self._failure or MailUnavailable("this subscription is closed")
        message = heappop(self._queued)[2]
        self._queued_bytes -= len(message.payload) + MESSAGE_COST_BYTES
        if not self._queued:
            self._queued_bytes = 0
            if self._failure is None:
                self._some.clear()
        if self._held and self._queued_bytes * 2 < QUEUED_BYTES_MAX:
            self._held = False
            self._connection.go_on()
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MailMessage:
        if self._failure is not None and not self._queued and isinstance(self._failure, _Closed):
            raise StopAsyncIteration
        message = await self.next()
        assert message is not None  # noqa: S101 - for the types: without a timeout there is one
        return message

    async def close(self) -> None:
        """End it: nothing more comes."""
        self._failed(_Closed("this subscription is closed"))
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Closed(MailUnavailable):
    """The reader ended it itself."""


class AsyncMail:
    """Mailboxes, for asyncio. Made by `async with Mail(...)`."""

    def __init__(self, login: Login, timeout_s: float) -> None:
        self._login = login
        self._timeout_s = timeout_s
        self._connection = ClientConnection(login)
        self._subscriptions: weakref.WeakSet[AsyncSubscription] = weakref.WeakSet()
        """An open one is held by the loop."""

    async def open(self) -> Self:
        await self._connection.open()
        return self

    async def close(self) -> None:
        """Let the server take in what was sent, and end every subscription."""
        for subscription in list(self._subscriptions):
            await subscription.close()
        await self._connection.close()

    async def _call(self, subject: bytes, payload: bytes, headers: bytes = b"") -> Reply:
        return checked(await self._connection.request(subject, payload, headers, timeout_s=self._timeout_s))

    async def create(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> str:
        """Make a mailbox; gives its id. One that exists is left as it is."""
        return (await self.ensure(name, ttl_s=ttl_s, public=public, desc=desc)).mail_id

    async def ensure(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> Created:
        """As `create`; also gives whether the mailbox is new."""
        if not isinstance(public, bool):
            raise InvalidMessage(f"public must be true or false, not {public!r}")
        wanted = {
            "ttl": None if ttl_s is None else checked_seconds("ttl_s", ttl_s),
            "name": checked_text("name", name) or None,
            "public": public or None,
            "desc": checked_text("desc", desc) or None,
        }
        body = {key: value for key, value in wanted.items() if value is not None}
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
        """Send; gives the message's id once it is stored. Without `wait` nobody says whether it was: 0."""
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
        """Send, and give the answer: the first message in a private mailbox that the message names.

        Whoever answers sends to `MailMessage.reply_to`, the header `Mq9-Reply-To`.
        """
        checked_seconds("timeout_s", timeout_s, SECONDS_MAX - REPLY_TTL_S)
        content, given = as_bytes(payload), headers or {}
        header_block(given)  # refused before a mailbox is made for the answer
        reply_to = await self.create(ttl_s=timeout_s + REPLY_TTL_S)
        sent = {**given, REPLY_TO: reply_to}
        msg_id = await self.send(mail_id, content, priority=priority, headers=sent)
        subscription = await self.subscribe(reply_to)
        try:
            answer = await subscription.next(timeout_s)
        finally:
            await subscription.close()
        if answer is None:
            raise MailUnavailable(f"nobody answered message {msg_id} within {timeout_s:g} s; it is stored")
        return answer

    async def subscribe(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", group: str = ""
    ) -> AsyncSubscription:
        """The messages of a mailbox: what is stored by priority, then what comes. A group shares them."""
        if any(char.isspace() for char in checked_text("group", group)):
            raise InvalidMessage("the name of a group has no blanks")
        return await self._subscribed(address(mail_id, after=wanted_suffix(priority)), mail_id, group)

    async def _subscribed(self, subject: bytes, mail_id: str, group: str = "") -> AsyncSubscription:
        subscription = AsyncSubscription(self._login, subject, mail_id, group)
        await subscription.open()
        self._subscriptions.add(subscription)
        return subscription

    async def messages(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", quiet_s: float = QUIET_S
    ) -> Messages:
        """What a mailbox holds now: until the last that its list names, or until nothing came for a while."""
        wanted_suffix(priority)
        checked_seconds("quiet_s", quiet_s)
        rows = await self.list(mail_id)
        rank = RANKS.get(priority)
        wanted = {each.msg_id for each in rows if rank is None or RANKS.get(each.priority) == rank}
        if not wanted and len(rows) < replies.LIST_MAX:
            return []
        found: Messages = []
        subscription = await self.subscribe(mail_id, priority=priority)
        try:
            while wanted or len(rows) >= replies.LIST_MAX:
                message = await subscription.next(quiet_s)
                if message is None:
                    break
                found.append(message)
                wanted.discard(message.msg_id)
        finally:
            await subscription.close()
        return found

    async def list(self, mail_id: str) -> Lists:
        """What a mailbox holds now, without what it says: the first thousand, in the order of priority."""
        return listed(await self._call(address(mail_id, what=LIST), WITHOUT_PAYLOADS))

    async def delete(self, mail_id: str, msg_id: int) -> bool:
        """Take a message away; whether it was there."""
        subject = address(mail_id, what=mq9.DELETE, after=f".{checked_number(msg_id)}")
        reply = await self._call(subject, b"{}")
        return reply.deleted is not False

    async def public(self, *, quiet_s: float = QUIET_S) -> PublicMailboxes:
        """The public mailboxes that there are."""
        checked_seconds("quiet_s", quiet_s)
        found: dict[str, PublicMailbox] = {}
        subscription = await self._subscribed(mq9.PUBLIC_LIST.encode(), "")
        try:
            while (message := await subscription.next(quiet_s)) is not None:
                said = message.json()
                found.pop(said["mail_id"], None)
                if said.get("event") == "created":
                    found[said["mail_id"]] = PublicMailbox(
                        said["mail_id"], said.get("desc", ""), said.get("ttl", 0)
                    )
        finally:
            await subscription.close()
        return [*found.values()]


# ---- plain ---------------------------------------------------------------------------------------------


class Subscription:
    """As `AsyncSubscription`, for a `for` loop."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], inner: AsyncSubscription) -> None:
        self._run = run
        self._inner = inner

    def next(self, timeout_s: float | None = None) -> MailMessage | None:
        """The next message; None when none came in time."""
        found: MailMessage | None = self._run(self._inner.next(timeout_s))
        return found

    def __iter__(self) -> Iterator[MailMessage]:
        with suppress(_Closed):
            while True:
                message = self.next()
                assert message is not None  # noqa: S101 - for the types: without a timeout there is one
                yield message

    def close(self) -> None:
        """End it: nothing more comes."""
        self._run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mail:
    """The mailboxes of a server. `with` gives calls that wait, `async with` the same calls to be awaited.

    It connects when it is entered, or with the first call. It belongs to the process that made it.
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

    # ---- the loop behind it ----------------------------------------------------------------------------

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
        """Do something on the client's loop, and wait for it."""
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
        """Let the server take in what was sent, and end."""
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                self._run(inner.close())
            finally:
                self._stop()

    # ---- the calls -------------------------------------------------------------------------------------

    def create(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> str:
        """Make a mailbox; gives its id. One that exists is left as it is."""
        return self._run(self._opened().create(name, ttl_s=ttl_s, public=public, desc=desc))

    def ensure(
        self, name: str = "", *, ttl_s: float | None = None, public: bool = False, desc: str = ""
    ) -> Created:
        """As `create`; also gives whether the mailbox is new."""
        return self._run(self._opened().ensure(name, ttl_s=ttl_s, public=public, desc=desc))

    def send(
        self,
        mail_id: str,
        payload: Payload,
        *,
        priority: Priority = "normal",
        headers: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> int:
        """Send; gives the message's id once it is stored. Without `wait` nobody says whether it was: 0."""
        mail = self._opened()
        return self._run(mail.send(mail_id, payload, priority=priority, headers=headers, wait=wait))

    def ask(
        self,
        mail_id: str,
        payload: Payload,
        *,
        priority: Priority = "normal",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> MailMessage:
        """Send, and give the answer: the first message in a private mailbox that the message names.

        Whoever answers sends to `MailMessage.reply_to`, the header `Mq9-Reply-To`.
        """
        mail = self._opened()
        return self._run(mail.ask(mail_id, payload, priority=priority, headers=headers, timeout_s=timeout_s))

    def subscribe(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", group: str = ""
    ) -> Subscription:
        """The messages of a mailbox: what is stored by priority, then what comes. A group shares them."""
        inner = self._run(self._opened().subscribe(mail_id, priority=priority, group=group))
        return Subscription(self._run, inner)

    def messages(
        self, mail_id: str, *, priority: Priority | Literal["*"] = "*", quiet_s: float = QUIET_S
    ) -> Messages:
        """What a mailbox holds now: until the last that its list names, or until nothing came for a while."""
        return self._run(self._opened().messages(mail_id, priority=priority, quiet_s=quiet_s))

    def list(self, mail_id: str) -> Lists:
        """What a mailbox holds now, without what it says: the first thousand, in the order of priority."""
        return self._run(self._opened().list(mail_id))

    def delete(self, mail_id: str, msg_id: int) -> bool:
        """Take a message away; whether it was there."""
        return self._run(self._opened().delete(mail_id, msg_id))

    def public(self, *, quiet_s: float = QUIET_S) -> PublicMailboxes:
        """The public mailboxes that there are."""
        return self._run(self._opened().public(quiet_s=quiet_s))
