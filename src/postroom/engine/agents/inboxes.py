"""Inboxes: messages from one agent to another, and what their recipient has done with them.

Rule 1: a message enters an inbox in the commit that submits it, or bounces before anything is written.
Rule 2: a receipt is noted once. The receipt `acted_on` removes the message from its inbox.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import LETTERS_A_READ_MAX
from postroom.core.agents import Receipt
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.engine.agents.agent_operations import AgentOperations, agent_of
from postroom.engine.message_input import Prepared
from postroom.engine.rules.cells import (
    AGENTS,
    INBOXES,
    LETTER_BODIES,
    LETTERS,
    RECEIPTS,
    SEPARATOR,
    AgentLetter,
    Part,
    joined,
)
from postroom.engine.rules.operations import Operations
from postroom.errors import Bounced, InvalidMessage
from postroom.message import ENGINE_PREFIX

INBOX_MAX: Final = 10_000  # messages in the inbox of one agent that nobody has acted on
LETTER_INLINE_BYTES: Final = 4 * 1024  # a longer body has a cell of its own
LETTERS_BYTES_A_READ_MAX: Final = 2 * 1024 * 1024  # and one more message

_encode = msgspec.json.Encoder().encode


class Inboxes:
    """The inboxes of agents and the receipts of their messages in one transaction."""

    def __init__(self, agents: AgentOperations) -> None:
        self.agents = agents
        self.transaction = agents.transaction

    def send(self, sender: str, session: int, prepared: Prepared, to: str, body: Any) -> str:
        """Submit a message to another agent and put it into its inbox. Raises `Bounced`."""
        self.agents.held(prepared.org_id, sender, session)
        self.check_recipient(prepared.org_id, to)
        [submitted] = Operations(self.transaction, self.agents.policy).submit([prepared])
        self.deliver(prepared.org_id, to, sender, submitted.message_id, body)
        return submitted.message_id

    def check_recipient(self, org_id: str, agent_id: str) -> None:
        """Raise `Bounced` unless an agent can get a message."""
        entry = AGENTS.get(self.transaction, org_id, agent_id)
        if entry is None:
            raise Bounced(agent_id, "no agent of this name is registered")
        if self.agents.health(entry) == "dead":
            raise Bounced(agent_id, "the agent is dead")
        if self._letter_count(org_id, agent_id) >= INBOX_MAX:
            raise Bounced(agent_id, f"its inbox holds {INBOX_MAX} messages that it has not acted on")

    def deliver(self, org_id: str, agent_id: str, sender: str, message_id: str, body: Any) -> None:
        """Add a message to an inbox. A repeated delivery of the same message adds nothing."""
        if not self.receipts(message_id):
            letter = AgentLetter(message_id, sender, body, self.transaction.wall_us)
            self.put_letter(org_id, agent_id, letter)
            self._receive(org_id, agent_id, letter, "stored")

    def put_letter(self, org_id: str, agent_id: str, letter: AgentLetter) -> None:
        """Add a message to the end of an inbox."""
        INBOXES.put(self.transaction, self._letter_count(org_id, agent_id) + 1, org_id, agent_id)
        key, body = joined(org_id, agent_id, self.agents.next_number()), msgspec.Raw(_encode(letter.body))
        if len(body) > LETTER_INLINE_BYTES:
            LETTER_BODIES.put(self.transaction, body, key)
            letter = replace(letter, body=None, is_apart=True)
        LETTERS.put(self.transaction, letter, key)

    def drop_letter(self, key: str, letter: AgentLetter) -> None:
        """Remove a message from its inbox."""
        LETTERS.put(self.transaction, None, key)
        if letter.is_apart:
            LETTER_BODIES.put(self.transaction, None, key)
        inbox = agent_of(key)
        counted = INBOXES.get(self.transaction, *inbox)
        if counted is not None:
            INBOXES.put(self.transaction, counted - 1 or None, *inbox)

    def _letter_count(self, org_id: str, agent_id: str) -> int:
        counted = INBOXES.get(self.transaction, org_id, agent_id)
        if counted is not None:
            return counted
        return len(LETTERS.under(self.transaction, org_id, agent_id, limit=INBOX_MAX))

    def notify(self, org_id: str, agent_id: str, part: Part) -> None:
        """Put a part that the agent did not ask for into its inbox, if it can get messages."""
        try:
            self.check_recipient(org_id, agent_id)
        except Bounced:
            return
        body = msgspec.to_builtins(part)
        letter = AgentLetter(part.request_id, "", body, self.transaction.wall_us, is_notice=True)
        self.put_letter(org_id, agent_id, letter)

    def receipts(self, message_id: str) -> dict[Receipt, int]:
        """What the recipient of a message has done with it, each with its time."""
        return RECEIPTS.get(self.transaction, message_id) or {}

    def _receive(self, org_id: str, recipient: str, letter: AgentLetter, receipt: Receipt) -> None:
        """Note a receipt, once."""
        known = self.receipts(letter.message_id)
        if receipt in known or letter.is_bounce or letter.is_notice:
            return
        RECEIPTS.put(self.transaction, {**known, receipt: self.transaction.wall_us}, letter.message_id)
        self.transaction.emit(
            "receipt",
            ENGINE_PREFIX + org_id,
            type="agent_message",
            detail={
                "message_id": letter.message_id,
                "sender": letter.sender,
                "recipient": recipient,
                "receipt": receipt,
            },
        )

    def letters(
        self,
        org_id: str,
        agent_id: str,
        after: str = "",
        read_value: ReadValue = decoded_value,
        limit: int = LETTERS_A_READ_MAX,
    ) -> list[tuple[str, AgentLetter]]:
        """Messages in an inbox after a key, each with its key. `read_value` reads their long bodies."""
        found: list[tuple[str, AgentLetter]] = []
        left = LETTERS_BYTES_A_READ_MAX
        for key, letter in LETTERS.under(
            self.transaction, org_id, agent_id, limit=limit, after=after, bytes_max=left
        ):
            if letter.is_apart and left <= 0:
                break
            body = LETTER_BODIES.get(self.transaction, key) if letter.is_apart else None
            left -= 0 if body is None else len(body)
            found.append((key, letter if body is None else replace(letter, body=read_value(bytes(body)))))
        return found

    def note_receipt(
        self, org_id: str, agent_id: str, session: int, keys: Sequence[str], receipt: Receipt
    ) -> None:
        """Store that messages were fetched, shown or acted on. The last removes them from the inbox."""
        self.agents.held(org_id, agent_id, session)
        for key in keys:
            parts = key.split(SEPARATOR)
            if parts[:2] != [org_id, agent_id]:
                raise InvalidMessage(f"{key!r} is not the key of a message in the inbox of {agent_id}")
            letter = LETTERS.get(self.transaction, key)
            if letter is None:
                continue
            if receipt == "acted_on":
                self.drop_letter(key, letter)
            self._receive(org_id, agent_id, letter, receipt)
