"""The sweep of a coordinator: health of agents, answers that bounce, and what was kept long enough.

Rule 1: one transaction looks at a limited number of cells. `Swept` says where the next one continues.
Rule 2: an answer that bounces is stored for its creator in the commit that closes the request.
Rule 3: an id of a creator is any text. It never becomes a part of a key, unless it is a name.
"""

from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.calls.submit import CreatedBy
from postroom.core.agents import is_over, joined_chunks
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import is_name
from postroom.engine.agents.agent_operations import AgentOperations, agent_of
from postroom.engine.agents.answer_parts import UNDECODABLE, damaged_answer, last_part
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.messages import body_of
from postroom.engine.rules.cells import (
    AGENT_COUNTS,
    AGENTS,
    BOUNCES,
    LETTERS,
    PARTS,
    REQUESTS,
    SEPARATOR,
    AgentEntry,
    AgentLetter,
    Bounce,
    Part,
)
from postroom.engine.rules.operations import PARTS_MAX, Operations
from postroom.message import Stored

AGENTS_A_SWEEP_MAX: Final = 1_000
REQUESTS_A_SWEEP_MAX: Final = 500
BOUNCE_BYTES_MAX: Final = 1_048_576  # of the chunks that a bounce joins
MICROS_PER_S: Final = 1_000_000

_encode = msgspec.json.Encoder().encode


class Swept(msgspec.Struct, frozen=True):
    """The keys after which the next sweep continues; empty at the end of a kind."""

    agents: str = ""
    requests: str = ""
    letters: str = ""
    bounces: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the sweep has seen everything."""
        return self == Swept()


def sweep(agents: AgentOperations, after: Swept) -> Swept:
    """Look at the next agents, requests, inboxes and bounces."""
    return Swept(
        sweep_agents(agents, after.agents),
        sweep_requests(agents, after.requests),
        sweep_letters(agents, after.letters),
        sweep_bounces(agents, after.bounces),
    )


# ---- agents ----------------------------------------------------------------------------------------


def sweep_agents(agents: AgentOperations, after: str = "", limit: int = AGENTS_A_SWEEP_MAX) -> str:
    """Store the health of agents, and forget agents that have been dead for long enough."""
    seen, following = AGENTS.sweep(agents.transaction, after, limit)
    for key, entry in seen:
        org_id, agent_id = agent_of(key)
        health = agents.health(entry)
        if health != entry.health:
            _change_health(agents, org_id, agent_id, entry, replace(entry, health=health))
        elif health == "dead" and _is_forgotten(agents, org_id, agent_id, entry):
            AGENTS.put(agents.transaction, None, org_id, agent_id)
            agents.emit_health(org_id, agent_id, "forgotten", entry.coordinator)
    return following


def _change_health(
    agents: AgentOperations, org_id: str, agent_id: str, before: AgentEntry, after: AgentEntry
) -> None:
    if after.health == "dead":
        agents.count(org_id, -1)
    elif before.health == "dead":  # its coordinator was only slow: the agent is counted, whatever the limit
        count = AGENT_COUNTS.get(agents.transaction, org_id) or 0
        AGENT_COUNTS.put(agents.transaction, count + 1, org_id)
    agents.set_health(org_id, agent_id, before, after)


def _is_forgotten(agents: AgentOperations, org_id: str, agent_id: str, entry: AgentEntry) -> bool:
    """Whether a dead agent was silent for the retention of its organization, and waits for no answer."""
    keep_s = max(agents.rules.keep_responses_s, agents.policy.organization_of(org_id).keep_s)
    silent_ns = agents.transaction.steady_ns - max(entry.seen_ns, entry.registered_ns)
    if silent_ns < keep_s * NANOS_PER_S:
        return False
    return not REQUESTS.under(agents.transaction, org_id, agent_id, limit=1)


# ---- requests --------------------------------------------------------------------------------------


def sweep_requests(agents: AgentOperations, after: str = "", limit: int = REQUESTS_A_SWEEP_MAX) -> str:
    """Bounce answers that nobody fetches, and cancel requests of dead agents if the rules say so."""
    seen, following = REQUESTS.sweep(agents.transaction, after, limit)
    for key, _ in seen:
        with suppress(msgspec.DecodeError):  # of values of one agent
            _sweep_request(agents, *agent_of(key), key.split(SEPARATOR, 2)[2])
    return following


def _sweep_request(agents: AgentOperations, org_id: str, agent_id: str, message_id: str) -> None:
    transaction, rules = agents.transaction, agents.rules
    record = transaction.records.get(message_id)
    if record is None:
        bounce(agents, org_id, agent_id, message_id, "the result is no longer kept")
        return
    entry = AGENTS.get(transaction, org_id, agent_id)
    is_gone = entry is None or agents.health(entry) == "dead"
    if is_gone and rules.on_dead == "cancel":
        if record.state not in lifecycle.ENDED:
            Operations(transaction, agents.policy).cancel(message_id)
        bounce(agents, org_id, agent_id, message_id, "the agent is dead")
    elif is_over(record.ended_us, transaction.wall_us, rules.keep_responses_s):
        bounce(agents, org_id, agent_id, message_id, "the agent did not fetch it in time")


def bounce(agents: AgentOperations, org_id: str, agent_id: str, message_id: str, reason: str) -> None:
    """Close a request without its agent, and store the answer for the creator of the message."""
    transaction = agents.transaction
    REQUESTS.put(transaction, None, org_id, agent_id, message_id)
    stored = transaction.records.load(message_id)
    creator = None if stored is None else _creator(stored)
    if stored is not None and creator is not None:
        answer = msgspec.to_builtins(_whole_answer(agents, stored))
        if creator.type == "agent" and is_name(creator.id):
            letter = AgentLetter(
                message_id, agent_id, answer, transaction.wall_us, is_bounce=True, reason=reason
            )
            Inboxes(agents).put_letter(org_id, creator.id, letter)
        else:
            kept = Bounce(message_id, agent_id, creator.type, creator.id, answer, reason, transaction.wall_us)
            BOUNCES.put(transaction, kept, org_id, agents.next_number())
    agents.emit_bounce(
        org_id, reason, message_id=message_id, agent_id=agent_id, recipient=creator.id if creator else ""
    )


def _creator(stored: Stored) -> CreatedBy | None:
    body = body_of(stored.envelope.payload)
    return None if body is None else body.created_by


def _whole_answer(agents: AgentOperations, stored: Stored) -> Part:
    """The last part of an answer. Its chunks are joined in `chunk`, up to `BOUNCE_BYTES_MAX`."""
    record = stored.record
    try:
        cells = PARTS.under(agents.transaction, record.message_id, record.attempt, limit=PARTS_MAX)
        chunks = [part.chunk for _, parts in cells for part in parts if part.chunk_index is not None]
        last = last_part(stored, len(chunks))
        if last.type != "stream_complete" or len(_encode(chunks)) > BOUNCE_BYTES_MAX:
            return last
        return replace(last, chunk=joined_chunks(chunks))
    except UNDECODABLE as error:
        return damaged_answer(record, error)


# ---- retention -------------------------------------------------------------------------------------


def sweep_letters(agents: AgentOperations, after: str = "", limit: int = REQUESTS_A_SWEEP_MAX) -> str:
    """Forget messages in inboxes that were kept as long as messages of their organization."""
    seen, following = LETTERS.sweep(agents.transaction, after, limit)
    for key, letter in seen:
        org_id, agent_id = agent_of(key)
        if not _is_old(agents, org_id, letter.stored_us):
            continue
        Inboxes(agents).drop_letter(key, letter)
        reason = "the agent did not act on it in time"
        agents.emit_bounce(
            org_id, reason, message_id=letter.message_id, agent_id=agent_id, recipient=letter.sender
        )
    return following


def sweep_bounces(agents: AgentOperations, after: str = "", limit: int = REQUESTS_A_SWEEP_MAX) -> str:
    """Forget bounces that were kept as long as messages of their organization."""
    seen, following = BOUNCES.sweep(agents.transaction, after, limit)
    for key, kept in seen:
        if _is_old(agents, key.partition(SEPARATOR)[0], kept.bounced_us):
            agents.transaction.cells.put(BOUNCES.name, key, None)
    return following


def _is_old(agents: AgentOperations, org_id: str, stored_us: int) -> bool:
    keep_s = agents.policy.organization_of(org_id).keep_s
    return stored_us <= agents.transaction.wall_us - keep_s * MICROS_PER_S
