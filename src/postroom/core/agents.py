"""Decisions about agents and their answers: health, takeover, order of parts, joined answers.

Rule 1: nothing here reads a clock or a store. Facts such as the time of the last heartbeat are arguments.
Rule 2: a part of an answer is named by its attempt and its index. Only the newest attempt counts.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.settings_fields import Kept, Seconds, Some, fit_fields

AGENTS_AN_ORGANIZATION_MAX: Final = 100
HEARTBEAT_S: Final = 10.0
MISSED_DEAD: Final = 3
KEEP_RESPONSES_S: Final = 86_400.0
FINAL_PARTS: Final = ("result", "stream_complete", "error")

Health: TypeAlias = Literal["registered", "alive", "suspect", "dead", "asleep"]
"""An agent is asleep until its first registration by a program: its messages wait, and it is never dead."""
OnDead: TypeAlias = Literal["keep", "cancel"]
Receipt: TypeAlias = Literal["stored", "fetched", "shown", "acted_on"]
RECEIPTS: Final[tuple[Receipt, ...]] = ("stored", "fetched", "shown", "acted_on")
Restart: TypeAlias = Literal["raise", "replace"]
Verdict: TypeAlias = Literal["next", "restarted", "repeated", "gap"]


class AgentRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the agents of all organizations."""

    heartbeat_s: Seconds = HEARTBEAT_S
    missed_dead: Some = MISSED_DEAD
    """The number of missed heartbeats after which an agent is dead."""
    keep_responses_s: Kept = KEEP_RESPONSES_S
    """How long an answer waits for its agent before it bounces."""
    on_dead: OnDead = "keep"
    """Whether the open requests of a dead agent are kept for its restart, or cancelled."""
    program: tuple[str, ...] = ()
    """The command that `agent_spawn` starts. Without one, a spawned agent sleeps until it registers."""

    def __post_init__(self) -> None:
        fit_fields(self)


def health_of(registered_ns: int, seen_ns: int, now_ns: int, rules: AgentRules) -> Health:
    """The health of an agent that was registered and last heard of at these times.

    A heartbeat is missed when it is half a period late. The first missed one makes an agent suspect.
    """
    period_ns = round(rules.heartbeat_s * NANOS_PER_S)
    missed = (now_ns - max(seen_ns, registered_ns) - period_ns // 2) // period_ns
    if missed >= rules.missed_dead:
        return "dead"
    if missed >= 1:
        return "suspect"
    return "alive" if seen_ns > registered_ns else "registered"


def may_take_over(lease_until_ns: int, now_ns: int) -> bool:
    """Whether another coordinator may take over the agents of a coordinator with this lease."""
    return lease_until_ns <= now_ns


def is_over(ended_us: int, now_us: int, keep_s: float) -> bool:
    """Whether an answer has waited for its agent for too long."""
    return 0 < ended_us <= now_us - keep_s * 1_000_000


# ---- the order of parts ------------------------------------------------------------------------------


class Cursor(msgspec.Struct, frozen=True):
    """The position of a reader in an answer."""

    attempt: int = 0
    index: int = 0
    """The index of the next part of the attempt."""
    chunks: int = 0
    """Chunks of the attempt so far."""


def judge(cursor: Cursor, attempt: int, index: int) -> Verdict:
    """How a part relates to the position of a reader.

    `next`: it continues the answer. `restarted`: it begins another attempt, and chunks of an earlier one
    were read. `repeated`: it was read before, or belongs to an earlier attempt. `gap`: parts before it are
    missing.
    """
    if attempt < cursor.attempt or (attempt == cursor.attempt and index < cursor.index):
        return "repeated"
    if attempt == cursor.attempt:
        return "next" if index == cursor.index else "gap"
    if index:
        return "gap"
    return "restarted" if cursor.chunks else "next"


def moved(cursor: Cursor, attempt: int, index: int, *, is_chunk: bool) -> Cursor:
    """The cursor after a part that was `next` or `restarted`."""
    chunks = cursor.chunks if attempt == cursor.attempt else 0
    return Cursor(attempt, index + 1, chunks + is_chunk)


def joined_chunks(chunks: Sequence[Any]) -> Any:
    """The chunks of an answer as one value: texts and lists are concatenated, other chunks are a list."""
    if all(isinstance(chunk, str) for chunk in chunks):
        return "".join(chunks)
    if all(isinstance(chunk, list) for chunk in chunks):
        return [item for chunk in chunks for item in chunk]
    return list(chunks)
