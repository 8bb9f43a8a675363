"""The named values that an engine keeps in its store, by kind. Each kind has one type.

Rule 1: the parts of a key are joined by a character that no part can hold, so keys with the same first parts
        are neighbours.
"""

import math
from contextlib import suppress
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from postroom.core.agents import Health, Receipt
from postroom.core.lifecycle.backpressure import Throttle
from postroom.core.lifecycle.breaker import Circuit
from postroom.core.tokens.tokens import Account, Grant
from postroom.stores.base import CHUNKS, Cells

T = TypeVar("T")

SEPARATOR: Final = "\x1f"
SCAN_MAX: Final = 1_000
PAGE: Final = 16  # the first look at the keys below a prefix: most prefixes have few
_LAST: Final = "\uffff"


def joined(*parts: str | int) -> str:
    """A key made of parts. Numbers are padded, so that they sort as numbers."""
    if len(parts) == 1 and isinstance(parts[0], str):  # most keys have one part
        return parts[0]
    return SEPARATOR.join([f"{part:020d}" if isinstance(part, int) else part for part in parts])


class HasCells(Protocol):
    """What keeps named values: a transaction, or a graph outside of the store."""

    @property
    def cells(self) -> Cells:
        """The values."""


class Kind(Generic[T]):
    """The cells of one kind."""

    def __init__(self, name: str, value_type: type[T]) -> None:
        self.name = name
        self._decode = msgspec.json.Decoder(value_type).decode
        self._encode = msgspec.json.Encoder().encode

    def get(self, transaction: HasCells, *parts: str | int) -> T | None:
        """The value of a key; None when there is none."""
        value = transaction.cells.get(self.name, joined(*parts))
        return None if value is None else self._decode(value)

    def put(self, transaction: HasCells, value: T | None, *parts: str | int) -> int:
        """Set the value of a key, and return its bytes; None removes it."""
        encoded = None if value is None else self._encode(value)
        transaction.cells.put(self.name, joined(*parts), encoded)
        return len(encoded or b"")

    def all(self, transaction: HasCells) -> list[tuple[str, T]]:
        """Every key with its value."""
        found = self.scan(transaction)
        while found and len(found) % SCAN_MAX == 0 and (more := self.scan(transaction, found[-1][0])):
            found += more
        return found

    def scan(self, transaction: HasCells, after: str = "", limit: int = SCAN_MAX) -> list[tuple[str, T]]:
        """Keys above `after` with their values."""
        return [(key, self._decode(value)) for key, value in transaction.cells.page(self.name, after, limit)]

    def sweep(
        self, transaction: HasCells, after: str = "", limit: int = SCAN_MAX
    ) -> tuple[list[tuple[str, T]], str]:
        """As `scan`, without values that cannot be decoded, and the key to continue from; empty at the end.

        The damage of one organization must not end a sweep for all.
        """
        page = transaction.cells.page(self.name, after, limit)
        found: list[tuple[str, T]] = []
        for key, value in page:
            with suppress(msgspec.DecodeError):
                found.append((key, self._decode(value)))
        return found, page[-1][0] if len(page) == limit else ""

    def under(
        self,
        transaction: HasCells,
        *parts: str | int,
        limit: int = SCAN_MAX,
        after: str = "",
        bytes_max: float = math.inf,
    ) -> list[tuple[str, T]]:
        """Keys above `after` that begin with these parts and have more, with their values.

        Returns at most `limit`, and stops at the value that reaches `bytes_max`.
        """
        prefix = joined(*parts) + SEPARATOR
        after, size = after or prefix, PAGE
        found: list[tuple[str, T]] = []
        while len(found) < limit:
            size = min(size, limit - len(found))
            page = transaction.cells.page(self.name, after, size)
            for key, value in page:
                if not key.startswith(prefix) or bytes_max <= 0:
                    return found
                found.append((key, self._decode(value)))
                bytes_max -= len(value)
            if len(page) < size:
                break
            after, size = page[-1][0], 4 * size
        return found

    def drop_under(self, transaction: HasCells, *parts: str | int, limit: int | None = None) -> int:
        """Remove keys that begin with these parts and have more, at most `limit`; returns how many."""
        prefix = joined(*parts) + SEPARATOR
        dropped = 0
        while limit is None or dropped < limit:
            page = SCAN_MAX if limit is None else min(SCAN_MAX, limit - dropped)
            found = [
                key for key, _ in transaction.cells.page(self.name, prefix, page) if key.startswith(prefix)
            ]
            for key in found:
                transaction.cells.put(self.name, key, None)
            dropped += len(found)
            if len(found) < page:
                break
        return dropped


class UsedKey(msgspec.Struct, frozen=True):
    """The message that was accepted under an idempotency key."""

    message_id: str
    digest: str
    seen_us: int


class Pressure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The backpressure of one organization, or of all of them."""

    stage: int = 0
    throttle: Throttle = Throttle()


class Likeness(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the messages that a rule holds have in common, besides organization and type."""

    rule_id: str
    error_type: str
    """That of the dead letters which the rule was made for."""
    service: str = ""
    payload: dict[str, Any] = {}
    """Entries of the payload. A dot stands before a name in an inner object."""


class PauseInfo(msgspec.Struct, frozen=True):
    """A pause, and since when."""

    since_us: int
    kill: bool = False
    likeness: Likeness | None = None
    """What the messages that it stops have in common; None for all of its type."""


class KeyEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message in the line of its ordering key."""

    message_id: str
    due_ns: int = 0
    """When its own delay ends."""
    stops: bool = False
    """Whether the key stops when this message becomes a dead letter."""
    is_dead: bool = False


class Effect(msgspec.Struct, frozen=True, omit_defaults=True):
    """An effect that a handler began, and its outcome when it is known."""

    attempt: int
    begun_us: int
    is_done: bool = False
    outcome: Any = None
    reversal: Any = None
    number: int = 0
    """Its number among the effects of its goal; 0 without a goal."""
    target: str = ""
    """What it works on, and no other operation meanwhile."""
    outcome_ref: str = ""
    """The digest of an outcome that is stored apart, because it is long."""


class WorkerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker process, as it last reported."""

    seen_us: int
    seen_ns: int
    slots: int = 0
    in_flight: int = 0
    claims: int = 0
    """Claims in the last 30 s."""
    promoted: int = 0
    """How many of them were of promoted messages."""


class GoalUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a goal has used up."""

    messages: int = 0
    tokens: int = 0
    usd: float = 0.0
    seen_us: int = 0
    """When the goal was used last."""


class PurgeTurn(msgspec.Struct, frozen=True):
    """The process that purges the store, and until when no other process may."""

    name: str
    until_ns: int


class Bucket(msgspec.Struct, frozen=True):
    """A rate limit: when the next submit is admitted."""

    next_ns: int


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response: one step of the answer to a request."""

    request_id: str
    type: str
    timestamp: str
    chunk: Any = None
    chunk_index: int | None = None
    attempt: int = 0
    progress: float | None = None
    message: str = ""
    result: Any = None
    error: dict[str, Any] | None = None
    total_chunks: int | None = None
    epoch: int = 0
    """The epoch of the coordinator that handed the part over; 0 without a coordinator."""


class CoordinatorInfo(msgspec.Struct, frozen=True):
    """A coordinator, and until when no other coordinator takes over its agents."""

    epoch: int
    """Larger than the epoch of every coordinator that was started before."""
    seen_ns: int
    until_ns: int
    name: str = ""


class AgentEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered agent."""

    session: int
    """The fencing number of its registration: a later registration of the same id has a larger one."""
    coordinator: str
    registered_us: int
    registered_ns: int
    seen_ns: int = 0
    """Its own last heartbeat. An agent in the process of its coordinator lives as long as the coordinator."""
    is_local: bool = True
    health: Health = "registered"


class OpenRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request whose last part was not handed over yet."""

    type: str
    submitted_us: int
    timeout_s: float | None = None


class AgentLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message in the inbox of an agent."""

    message_id: str
    sender: str
    body: Any
    stored_us: int
    is_bounce: bool = False
    """Whether it is an answer that its agent never fetched."""
    reason: str = ""
    is_notice: bool = False
    """Whether the engine itself wrote it: then it has no receipts."""
    is_apart: bool = False
    """Whether its body is in `LETTER_BODIES`, because it is long."""


class Bounce(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer that its agent never fetched, kept for the user or the system that created the message."""

    message_id: str
    agent_id: str
    creator_type: Literal["user", "agent", "system"]
    creator_id: str
    answer: Any
    reason: str
    bounced_us: int


class WantedProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent whose program a supervisor keeps running."""

    command: tuple[str, ...]
    """Empty for an agent that sleeps, because no program was configured."""
    message_id: str
    """The `agent_spawn` message that asked for it."""
    tools: tuple[str, ...] = ()
    prompt: str = ""


class Hold(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens that are reserved for an attempt, until its lease ends."""

    message_id: str
    lease: int
    attempt: int
    org_id: str
    grant: Grant


class TokenUse(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an organization used of a model in the window that ends at `until_ns`."""

    until_ns: int = 0
    used: int = 0
    borrowed: int = 0
    refused: int = 0


KEYS: Final = Kind("engine.key", UsedKey)
KEY_ENDS: Final = Kind("engine.key_end", bool)
"""Keys whose message is forgotten: time of use, organization, key -> True."""
CIRCUITS: Final = Kind("engine.breaker", Circuit)
"""Breakers: organization, service -> circuit. An empty organization stands for all of them."""
PRESSURES: Final = Kind("engine.pressure", Pressure)
PAUSES: Final = Kind("engine.pause", PauseInfo)
"""Organization, type -> pause; for a rule that holds some messages of a type also its id."""
HELD: Final = Kind("engine.held", str)
"""Rule, number of the message -> message id."""
PARKED: Final = Kind("engine.parked", str)
"""Messages of a paused type: type, organization, number -> message id."""
LINES: Final = Kind("engine.line", KeyEntry)
"""Messages of an ordering key: organization, key, number -> entry."""
LINE_OF: Final = Kind("engine.line_of", str)
"""Message id -> the key of its entry in `LINES`."""
EFFECTS: Final = Kind("engine.effect", Effect)
PARTS: Final = Kind(CHUNKS, list[Part])
"""Message id, attempt, index of the last part -> consecutive parts that one commit stored."""
COORDINATORS: Final = Kind("engine.coordinator", CoordinatorInfo)
EPOCHS: Final = Kind("engine.epoch", int)
"""The last number that a coordinator or a registration got."""
AGENTS: Final = Kind("engine.agent", AgentEntry)
"""Organization, agent -> its registration."""
AGENT_COUNTS: Final = Kind("engine.agents", int)
"""Organization -> its agents that are not dead."""
REQUESTS: Final = Kind("engine.request", OpenRequest)
"""Organization, agent, message id -> a request whose answer was not handed over."""
LETTERS: Final = Kind("engine.letter", AgentLetter)
"""Organization, agent, number -> a message in its inbox."""
LETTER_BODIES: Final = Kind("engine.letter_body", msgspec.Raw)
"""The key of a message in `LETTERS` -> its long body. What counts and lists messages does not read it."""
INBOXES: Final = Kind("engine.inbox", int)
"""Organization, agent -> how many messages its inbox holds; absent for one that was not counted yet."""
BOUNCES: Final = Kind("engine.bounce", Bounce)
"""Organization, number -> an answer that waits for the user or the system that created its message."""
RECEIPTS: Final = Kind("engine.receipt", dict[Receipt, int])
"""Message id -> what its recipient has done with it, each with its time."""
PROGRAMS: Final = Kind("engine.program", WantedProgram)
"""Organization, agent -> the program that runs the agent."""
REASSIGNED: Final = Kind("engine.reassigned", str)
"""Message id -> the agent that its next attempts run as, for messages of goals."""
WORKERS: Final = Kind("engine.worker", WorkerInfo)
GOALS: Final = Kind("engine.goal", GoalUse)
RATES: Final = Kind("engine.rate", Bucket)
ACCOUNTS: Final = Kind("engine.tokens", Account)
"""Provider, model -> the books of the model."""
HOLDS: Final = Kind("engine.token_holds", list[Hold])
"""The complement of the first lease of a claim -> what the claim has reserved and still holds."""
HOLDS_SWEPT: Final = Kind("engine.token_sweep", str)
"""A sweep looks at some of `HOLDS`. The last key that it looked at; absent after the end of the list."""
TOKEN_USES: Final = Kind("engine.token_use", TokenUse)
"""Provider, model, organization -> its use."""
DEPENDANTS: Final = Kind("engine.dependant", bool)
"""Parent, child -> True: messages that wait for a message. Stored only while the engine has token budgets."""
PURGES: Final = Kind("engine.purge", PurgeTurn)
BODY_USES: Final = Kind("engine.body_use", bool)
"""Digest, message id -> True: the messages that refer to a large payload."""
STORED_BYTES: Final = Kind("engine.stored_bytes", int)
"""Organization -> bytes of what is stored for its messages, of pieces that are counted."""
MESSAGE_BYTES: Final = Kind("engine.message_bytes", int)
"""Message id -> its part of `STORED_BYTES`, so that forgetting the message gives it back."""
BODIES: Final = "engine.body"
"""The kind of large payloads: digest -> bytes."""
