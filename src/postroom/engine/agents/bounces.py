"""Answers that bounced to a user or to a system: `engine.bounces`.

Rule 1: an agent gets its bounces in its inbox. Users and systems have no inbox, so theirs are kept here.
Rule 2: a bounce is kept until `done`, or as long as messages of its organization.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from postroom.calls.fields import BOUNCES_A_READ_MAX
from postroom.calls.submit import CreatedBy
from postroom.core.names import is_name
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.rules.cells import BOUNCES, SCAN_MAX, SEPARATOR, Bounce, joined
from postroom.errors import InvalidMessage, shown
from postroom.stores.transaction import Transaction

if TYPE_CHECKING:
    from postroom.engine.commits import Commits

_KEY: Final = re.compile(r"([^/]+)/(\d{1,18})", re.ASCII)


class BouncedAnswer(msgspec.Struct, frozen=True):
    """An answer that its agent never fetched."""

    key: str
    """Names the bounce in `done`, and in `after` of the next `list`."""
    org_id: str
    message_id: str
    agent_id: str
    """The agent that did not fetch the answer."""
    created_by: CreatedBy
    reason: str
    answer: Any
    """The last part of the answer. The chunks of a streamed answer are joined in its `chunk`."""
    bounced_at: datetime


Keys: TypeAlias = list[str]


class Bounces:
    """`engine.bounces`."""

    def __init__(self, commits: "Commits") -> None:
        self._commits = commits

    async def list(
        self,
        org_id: str | None = None,
        *,
        created_by: str | None = None,
        after: str = "",
        limit: int = BOUNCES_A_READ_MAX,
    ) -> "list[BouncedAnswer]":
        """Bounces of an organization, or of all, the oldest first. `created_by` is such as user:ada."""
        return await self._commits.read(
            lambda operations: listed(
                operations.transaction, org_id, created_by=created_by, after=after, limit=limit
            )
        )

    async def done(self, *keys: str) -> Keys:
        """The creator has these bounces: they are removed. Returns the keys that were there."""
        return await self._commits.write(
            lambda operations: removed(operations.transaction, keys), makes_room=True
        )


def listed(
    transaction: Transaction,
    org_id: str | None = None,
    *,
    created_by: str | None = None,
    after: str = "",
    limit: int = BOUNCES_A_READ_MAX,
) -> list[BouncedAnswer]:
    """Bounces after a key, at most `limit`."""
    if type(limit) is not int or not 0 < limit <= BOUNCES_A_READ_MAX:
        raise InvalidMessage(f"limit must be from 1 to {BOUNCES_A_READ_MAX}, not {shown(limit)}")
    creator = None if created_by is None else parse_creator(created_by)
    prefix = "" if org_id is None else joined(org_id) + SEPARATOR
    place = max(prefix, _cell_key(after)) if after else prefix
    found: list[BouncedAnswer] = []
    while page := BOUNCES.scan(transaction, place):
        for key, kept in page:
            if not key.startswith(prefix):
                return found
            if creator is None or creator == CreatedBy(kept.creator_type, kept.creator_id):
                found.append(_answer(key, kept))
            if len(found) == limit:
                return found
        if len(page) < SCAN_MAX:
            break
        place = page[-1][0]
    return found


def removed(transaction: Transaction, keys: Sequence[str], org_id: str | None = None) -> list[str]:
    """Remove bounces, those of one organization only if it is named. Returns the keys that were there."""
    gone = []
    for key in dict.fromkeys(keys):
        cell_key = _cell_key(key)
        is_own = org_id is None or cell_key.startswith(joined(org_id) + SEPARATOR)
        if is_own and transaction.cells.get(BOUNCES.name, cell_key) is not None:
            transaction.cells.put(BOUNCES.name, cell_key, None)
            gone.append(key)
    return gone


def parse_creator(text: str) -> CreatedBy:
    """A creator in the form of `created_by`: a type, a colon and an id."""
    kind, colon, creator_id = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon or kind not in ("user", "system", "agent"):
        raise InvalidMessage(f"created_by must be such as user:ada or system:billing, not {shown(text)}")
    return CreatedBy(kind, creator_id)  # type: ignore[arg-type]


def _cell_key(key: str) -> str:
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None or not is_name(match[1]):
        raise InvalidMessage(f"{shown(key)} is not the key of a bounce")
    return joined(match[1], int(match[2]))


def _answer(key: str, kept: Bounce) -> BouncedAnswer:
    org_id, number = key.split(SEPARATOR)
    return BouncedAnswer(
        key=f"{org_id}/{int(number)}",
        org_id=org_id,
        message_id=kept.message_id,
        agent_id=kept.agent_id,
        created_by=CreatedBy(kept.creator_type, kept.creator_id),
        reason=kept.reason,
        answer=kept.answer,
        bounced_at=EPOCH + kept.bounced_us * MICROSECOND,
    )
