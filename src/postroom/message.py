"""The nouns of the file half: what a message of each contract is, once it is decoded.

Rule 1: nothing here changes after it was made.
Rule 2: a message says nothing about its delivery; positions and leases live elsewhere.
"""

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

Durability = Literal["os", "group", "fsync"]
"""When an append counts as stored: in the page cache, after a shared fsync, after its own fsync."""


DEFAULT_BODY_THRESHOLD = 3584  # a queue's line with its other keys stays below one 4096-byte page


class BusMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a `Bus`."""

    msg_id: str
    ts: datetime
    type: str
    project_id: str
    task_id: str
    run_id: str
    parents: list[str]
    attachment_path: str
    body: str
    extra: dict[str, Any] = {}
    """Header keys that this version does not know; the original program writes some."""


QueueMessage = TypedDict(
    "QueueMessage",
    {
        "msg_id": str,
        "ts": str,
        "from": str,
        "to": NotRequired[str | None],
        "topic": str,
        "body": str,
        "in_reply_to": NotRequired[str | None],
        "ttl_s": NotRequired[float | int | None],
        "body_bytes": NotRequired[int],
        "body_crc": NotRequired[str],
        "_body_source": NotRequired[str],
        "_body_error": NotRequired[str],
    },
)
"""One message of a `Queue`. Delivered, it always has the first eight keys; `body_bytes` and `body_crc` stand
only on disk, beside the name of a side file, and those with an underscore only in what is delivered."""


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a log that is not a message. It is skipped and kept."""

    offset: int
    length: int
    reason: str
