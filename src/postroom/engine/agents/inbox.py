"""Messages between agents: the receipts of a sent message, and the inbox of its recipient."""

from collections.abc import AsyncIterator, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from postroom.core.agents import RECEIPTS, Receipt
from postroom.core.formats.jsoninput import ReadValue, decoded_value, raw_value
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.rules.cells import SEPARATOR, Letter, joined

if TYPE_CHECKING:
    from postroom.engine.agents.agent import Agent
    from postroom.engine.agents.coordinator import Coordinator


class SentMessage:
    """A message that was sent to another agent."""

    def __init__(self, coordinator: "Coordinator", message_id: str) -> None:
        self._coordinator = coordinator
        self.message_id = message_id

    async def receipts(self) -> dict[Receipt, Any]:
        """The receipts so far, each with its time. See `core.agents.RECEIPTS`."""
        found = await self._coordinator.read(lambda agents: agents.receipts(self.message_id))
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

    async def page(self, after: str = "") -> list[InboxMessage]:
        """Up to `LETTERS_A_READ_MAX` messages behind the one with this `number`. Long ones stay JSON."""
        agent = self._agent
        self._after = joined(agent.org_id, agent.agent_id, int(after)) if after else ""
        found = await self._page(raw_value)
        await self._show(found)
        return found

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
            lambda agents: agents.letters(agent.org_id, agent.agent_id, after)
        )
        return bool(found)

    async def _page(self, read_value: ReadValue = decoded_value) -> list[InboxMessage]:
        """The next messages. Their senders get the receipt `fetched`."""
        agent, after = self._agent, self._after

        def read(agents: AgentOperations) -> list[tuple[str, Letter]]:
            agents.held(agent.org_id, agent.agent_id, agent.session)
            return agents.letters(agent.org_id, agent.agent_id, after, read_value)

        found = await agent.coordinator.read(read)
        if not found:
            return []
        self._after = found[-1][0]
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
    agents.note_receipt(agent.org_id, agent.agent_id, agent.session, keys, receipt)
