"""`Agent`: requests, streams, messages and the inbox of one registered agent.

Rule 1: the last part of an answer is acknowledged after the agent has it: when the iterator is asked for
        more, or closed.
Rule 2: a part that was read and not shown is not acknowledged.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar, Unpack

import msgspec

from postroom.calls.fields import LETTERS_A_READ_MAX
from postroom.calls.submit import MessageOptions, Payload, SubmitFields
from postroom.core.agents import FINAL_PARTS, RECEIPTS, Receipt, Restart, joined_chunks
from postroom.core.formats.jsoninput import ReadValue, decoded_value, raw_value
from postroom.core.times import EPOCH, MICROSECOND, checked_seconds
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.answer_parts import Position
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.core import EngineCore
from postroom.engine.message_input import Prepared
from postroom.engine.messages import result_of
from postroom.engine.rules.cells import SEPARATOR, AgentLetter, Part, joined
from postroom.engine.rules.operations import Operations
from postroom.errors import (
    Bounced,
    CoordinatorStopped,
    InvalidMessage,
    MessageFailed,
    PostroomError,
    StreamRestarted,
    shown,
)

T = TypeVar("T")

PARTS_WAITING_MAX: Final = 1_000  # parts that one reader has not taken; then no more are read for it


class Home(Protocol):
    """What an agent needs of its coordinator."""

    core: EngineCore
    id: str
    epoch: int

    @property
    def wakeups(self) -> int:
        """The number of wake-ups so far."""

    async def write(self, work: Callable[[AgentOperations], T]) -> T:
        """Run operations on agents in a commit."""

    async def read(self, work: Callable[[AgentOperations], T]) -> T:
        """Run operations on agents on one committed state."""

    def look(self) -> None:
        """Read answers as soon as possible."""

    def add_reader(self, agent: "Agent", message_id: str, wakeups: int | None = None) -> "Reader":
        """Begin to read an answer."""

    def remove_reader(self, reader: "Reader") -> None:
        """Stop reading an answer."""

    def handed_over(self, agent: "Agent", message_id: str) -> None:
        """The agent has the last part of an answer."""

    def forget(self, agent: "Agent") -> None:
        """Stop serving an agent."""

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when something may have come for an agent, or after `timeout_s`."""


class Reader:
    """One reader of an answer: its position, and the parts that it has not taken."""

    __slots__ = ("agent", "error", "message_id", "parts", "position", "waiter")

    def __init__(self, agent: "Agent", message_id: str) -> None:
        self.agent = agent
        self.message_id = message_id
        self.position = Position()
        self.parts: deque[Part] = deque()
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> Part:
        """Wait for the next part."""
        while not self.parts:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self.take()

    def take(self) -> Part:
        """The next part, without waiting. There must be one."""
        part = self.parts.popleft()
        if len(self.parts) == PARTS_WAITING_MAX // 2:
            self.agent.coordinator.look()
        return part


class SentMessage:
    """A message that was sent to another agent."""

    def __init__(self, coordinator: Home, message_id: str) -> None:
        self._coordinator = coordinator
        self.message_id = message_id

    async def receipts(self) -> dict[Receipt, Any]:
        """The receipts so far, each with its time. See `core.agents.RECEIPTS`."""
        found = await self._coordinator.read(lambda agents: Inboxes(agents).receipts(self.message_id))
        return {receipt: EPOCH + found[receipt] * MICROSECOND for receipt in RECEIPTS if receipt in found}


class InboxMessage(msgspec.Struct, frozen=True):
    """A message in an inbox."""

    message_id: str
    sender: str
    payload: Any
    is_bounce: bool
    """Whether it is an answer that another agent never fetched; `payload` is the last part of the answer."""
    reason: str
    agent: Any
    key: str

    @property
    def number(self) -> str:
        """The position of the message in its inbox, which names it over HTTP."""
        return self.key.rpartition(SEPARATOR)[2].lstrip("0")

    async def done(self) -> None:
        """The agent has acted on it: it leaves the inbox."""
        await self.agent.coordinator.write(partial(_note, self.agent, [self.key], "acted_on"))


class Inbox:
    """The messages to one agent that it has not acted on."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._after = ""

    def __await__(self) -> Generator[Any, None, list[InboxMessage]]:
        return self._all().__await__()

    async def page(
        self, after: str = "", *, limit: int = LETTERS_A_READ_MAX, peek: bool = False
    ) -> list[InboxMessage]:
        """Up to `limit` messages after the one with this `number`. Long ones stay JSON.

        Their senders get the receipt `fetched`, unless this is a `peek`.
        """
        agent = self._agent
        self._after = joined(agent.org_id, agent.agent_id, int(after)) if after else ""
        return await self._page(raw_value, limit, peek=peek)

    async def _all(self) -> list[InboxMessage]:
        found: list[InboxMessage] = []
        while page := await self._page():
            found += page
        await self._show(found)
        return found

    async def __aiter__(self) -> AsyncIterator[InboxMessage]:
        coordinator = self._agent.coordinator
        while True:
            for message in await self._page():
                await self._show([message])
                yield message
            if not await self._has_more():
                await coordinator.wait_for_news(coordinator.core.wakeups.look_again_s)

    async def _has_more(self) -> bool:
        agent, after = self._agent, self._after
        found = await agent.coordinator.read(
            lambda agents: Inboxes(agents).letters(agent.org_id, agent.agent_id, after)
        )
        return bool(found)

    async def _page(
        self, read_value: ReadValue = decoded_value, limit: int = LETTERS_A_READ_MAX, *, peek: bool = False
    ) -> list[InboxMessage]:
        """The next messages. Their senders get the receipt `fetched`, unless this is a `peek`."""
        agent, after = self._agent, self._after

        def read(agents: AgentOperations) -> list[tuple[str, AgentLetter]]:
            agents.held(agent.org_id, agent.agent_id, agent.session)
            return Inboxes(agents).letters(agent.org_id, agent.agent_id, after, read_value, limit)

        found = await agent.coordinator.read(read)
        if not found:
            return []
        self._after = found[-1][0]
        if not peek:
            await agent.coordinator.write(partial(_note, agent, [key for key, _ in found], "fetched"))
        return [
            InboxMessage(
                letter.message_id, letter.sender, letter.body, letter.is_bounce, letter.reason, agent, key
            )
            for key, letter in found
        ]

    async def _show(self, messages: list[InboxMessage]) -> None:
        if messages:
            keys = [message.key for message in messages]
            await self._agent.coordinator.write(partial(_note, self._agent, keys, "shown"))


def _note(agent: "Agent", keys: list[str], receipt: Receipt, agents: AgentOperations) -> None:
    Inboxes(agents).note_receipt(agent.org_id, agent.agent_id, agent.session, keys, receipt)


class Agent:
    """One registered agent. Its calls raise `AgentReplaced` once the same id was registered again."""

    __slots__ = ("agent_id", "coordinator", "is_local", "org_id", "reading", "session", "shown")

    def __init__(
        self, coordinator: Home, org_id: str, agent_id: str, session: int, *, is_local: bool = True
    ) -> None:
        self.coordinator = coordinator
        self.org_id = org_id
        self.agent_id = agent_id
        self.session = session
        """The fencing number of the registration."""
        self.is_local = is_local
        """Whether it lives in this process, and so has no heartbeat of its own."""
        self.reading: Counter[str] = Counter()
        """How many readers each request has in this process."""
        self.shown: set[str] = set()
        """Requests whose last part was handed over, until that is committed."""

    def __repr__(self) -> str:
        return f"Agent({self.agent_id!r}, {self.org_id!r})"

    # ---- requests ------------------------------------------------------------------------------

    async def request(
        self,
        *,
        type: str,  # noqa: A002
        payload: Payload,
        timeout_s: float | None = None,
        **fields: Unpack[MessageOptions],
    ) -> Any:
        """Submit a message and wait for its answer. A streamed answer is joined.

        `fields` are those of `Engine.submit`. Raises `MessageFailed`, and `TimeoutError` after `timeout_s`:
        the late answer is kept for `resume`.
        """
        stream = self.stream(type=type, payload=payload, timeout_s=timeout_s, restart="replace", **fields)
        return await join(stream)

    def stream(
        self,
        *,
        type: str,  # noqa: A002
        payload: Payload,
        timeout_s: float | None = None,
        restart: Restart = "raise",
        **fields: Unpack[MessageOptions],
    ) -> "AnswerStream":
        """Submit a message and iterate over the parts of its answer, the last one included.

        When another attempt begins the answer again, the iterator raises `StreamRestarted` once and then goes
        on. With `restart="replace"` the parts of the new attempt follow, with chunk indexes from 0 on.
        """
        if restart not in ("raise", "replace"):
            raise InvalidMessage(f'restart must be "raise" or "replace", not {restart!r}')
        for name in ("org_id", "agent_id"):
            if name in fields:
                raise InvalidMessage(f"{name} follows from the agent, and cannot be set")
        message: SubmitFields = {
            **fields,
            "type": type,
            "payload": payload,
            "org_id": self.org_id,
            "agent_id": self.agent_id,
        }
        return AnswerStream(self, message, timeout_s=timeout_s, restart=restart)

    async def submit(self, message: SubmitFields, timeout_s: float | None = None) -> tuple[str, bool]:
        """Store a request without waiting for its answer; its id, and whether it was known before."""
        core = self.coordinator.core

        def store(operations: Operations, prepared: list[Prepared]) -> tuple[str, bool]:
            agents = AgentOperations(operations.transaction, core.policy)
            return agents.request(self.agent_id, self.session, prepared[0], timeout_s)

        return await core.submits.accept([message], store)

    async def resume(self) -> AsyncIterator[Part]:
        """The parts of every open request that nobody in this process reads, until all of them have ended.

        These are late answers, and the requests of an agent that was restarted.
        """
        streams = [
            AnswerStream(self, None, message_id=message_id, restart="replace")
            for message_id in await self._unread()
        ]
        pending = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = pending.pop(task)  # a stream that stays in `pending` was not shown
                    with suppress(Bounced):  # the request has ended for this agent
                        part = task.result()
                        if part is not None:
                            yield part
                            pending[asyncio.ensure_future(anext(stream, None))] = stream
        finally:
            for task, stream in pending.items():
                task.cancel()
                stream.close(is_shown=False)
            for stream in streams:
                stream.close()

    async def _unread(self) -> list[str]:
        """The open requests that nobody in this process reads."""

        def read(agents: AgentOperations) -> list[str]:
            agents.held(self.org_id, self.agent_id, self.session)
            return agents.open_requests(self.org_id, self.agent_id)

        found = await self.coordinator.read(read)
        return [one for one in found if one not in self.reading and one not in self.shown]

    # ---- messages between agents ---------------------------------------------------------------

    async def send(self, *, to: str, payload: Any, **fields: Unpack[MessageOptions]) -> SentMessage:
        """Send a message to another agent of the organization. Raises `Bounced` when it cannot get it."""
        core = self.coordinator.core
        if not isinstance(to, str):
            raise InvalidMessage(f"to must be the name of an agent, not {shown(to)}")
        message: SubmitFields = {
            **fields,
            "type": "agent_message",
            "payload": {"to": to, "body": payload},
            "org_id": self.org_id,
            "agent_id": self.agent_id,
        }

        def store(operations: Operations, prepared: list[Prepared]) -> str:
            agents = AgentOperations(operations.transaction, core.policy)
            return Inboxes(agents).send(self.agent_id, self.session, prepared[0], to, payload)

        try:
            message_id = await core.submits.accept([message], store)
        except Bounced as bounced:
            reason = bounced.reason
            detail = {"agent_id": self.agent_id, "sender": self.agent_id, "recipient": bounced.recipient}
            with suppress(PostroomError):
                await self.coordinator.write(lambda agents: agents.emit_bounce(self.org_id, reason, **detail))
            raise
        core.wakeups.wake_readers()
        return SentMessage(self.coordinator, message_id)

    def inbox(self) -> Inbox:
        """The messages of other agents that this agent has not acted on.

        `await agent.inbox()` gives those that are there. `async for` also waits for new ones.
        """
        return Inbox(self)

    # ---- life ----------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Say that the agent is alive; for agents that live outside of the process of their coordinator."""
        await self.coordinator.write(
            lambda agents: agents.beat(self.org_id, self.agent_id, self.session, self.coordinator.id)
        )

    async def leave(self) -> None:
        """End the registration. Open requests are treated like those of a dead agent."""
        await self.coordinator.write(lambda agents: agents.leave(self.org_id, self.agent_id, self.session))
        self.coordinator.forget(self)


class AnswerStream:
    """An iterator over the parts of one answer. The message is submitted with the first step."""

    def __init__(
        self,
        agent: Agent,
        message: SubmitFields | None,
        *,
        message_id: str = "",
        timeout_s: float | None = None,
        restart: Restart = "raise",
    ) -> None:
        self._is_closed = True  # `__del__` also runs when a check below raises
        self._agent = agent
        self._message = message
        self._timeout_s = None if timeout_s is None else checked_seconds("timeout_s", timeout_s)
        self._deadline: float | None = None
        self._restart = restart
        self._reader: Reader | None = None
        self._held: Part | None = None
        """The part that begins another attempt, until `StreamRestarted` was raised."""
        self._attempt = 0
        """The attempt whose chunks were handed out last."""
        self._is_last = False
        self._is_closed = False
        self.message_id = message_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        if self._is_last or self._is_closed:
            self.close()
            raise StopAsyncIteration
        part = self._held or await self._next()
        is_restart = self._attempt and part.attempt > self._attempt
        if is_restart and self._held is None and self._restart == "raise":
            self._held = part
            raise StreamRestarted(part.request_id, part.attempt)
        self._held = None
        if is_restart:
            self._attempt = 0
        if part.type == "stream_chunk":
            self._attempt = part.attempt
        self._is_last = part.type in FINAL_PARTS
        if self._is_last:
            self._agent.shown.add(self.message_id)
        return part

    async def _next(self) -> Part:
        if self._reader is not None and self._reader.parts:
            return self._reader.take()  # a part that is there needs no timeout
        try:
            if self._timeout_s is None:
                return await self._part()
            if self._deadline is None:
                self._deadline = asyncio.get_running_loop().time() + self._timeout_s
            async with asyncio.timeout_at(self._deadline):
                return await self._part()
        except TimeoutError:
            self.close()
            what = self.message_id or "the request"
            waited = f"the answer to {what} did not come within {self._timeout_s:g} s"
            raise TimeoutError(f"{waited}: agent.resume() returns the answer once it has arrived") from None
        except BaseException:
            self.close()
            raise

    async def _part(self) -> Part:
        if self._reader is None:
            coordinator = self._agent.coordinator
            wakeups: int | None = None
            if self._message is not None:
                wakeups = coordinator.wakeups
                self.message_id, is_known = await self._agent.submit(self._message, self._timeout_s)
                wakeups = None if is_known else wakeups  # a known message may have ended long ago
            self._reader = coordinator.add_reader(self._agent, self.message_id, wakeups)
        return await self._reader.next()

    def close(self, *, is_shown: bool = True) -> None:
        """Stop reading. An answer whose last part was shown to the agent is acknowledged."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reader is not None:
            self._agent.coordinator.remove_reader(self._reader)
        if self._is_last and is_shown:
            self._agent.coordinator.handed_over(self._agent, self.message_id)
        elif self._is_last:
            self._agent.shown.discard(self.message_id)

    def __del__(self) -> None:
        """Acknowledge an answer whose loop was left by `break` at the last part."""
        self.close()


async def join(stream: AnswerStream) -> Any:
    """The answer as one value. Raises `MessageFailed`."""
    chunks: list[Any] = []
    async for part in stream:
        if part.type == "stream_chunk":
            if part.chunk_index == 0:
                chunks.clear()
            chunks.append(part.chunk)
        elif part.type == "error":
            raise await _failure(stream, part)
        elif part.type in FINAL_PARTS:
            stream.close()
            return joined_chunks(chunks) if part.type == "stream_complete" else part.result
    raise CoordinatorStopped(stream.message_id)


async def _failure(stream: AnswerStream, part: Part) -> MessageFailed:
    """The error of a message that ended without a result."""
    stream.close()
    error = part.error or {}
    try:
        result_of(await stream._agent.coordinator.core.commits.load(part.request_id))  # noqa: SLF001 - the same module
    except MessageFailed as failed:
        return failed
    except PostroomError:
        pass
    history = [{"error_type": error.get("type", ""), "error": error.get("message", "")}]
    return MessageFailed(part.request_id, error.get("type", ""), history)
