"""What can be chosen for a room."""

from typing import Literal

import msgspec

from postroom.core.mq9 import DEFAULT_TTL_S
from postroom.core.mq9replies import Envelope

Storage = Literal["memory", "os", "group"]
"""When a message counts as stored: at once, with the operating system, after a shared fsync."""


class MailOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are what the mq9 design says, except that normal messages outlive the server's process."""

    critical: Storage = "group"
    urgent: Storage = "group"
    """Also for `high`."""
    normal: Storage = "os"
    """Also for `low`."""
    envelope: Envelope = "auto"
    default_ttl_s: float = DEFAULT_TTL_S
    mailboxes_max: int = 1_000_000
    stored_bytes_max: int = 1 << 30
    """What all messages and mailboxes cost, which stand in memory."""
    quota_messages: int = 0
    """Of one mailbox; 0 is no quota."""
    quota_bytes: int = 128 << 20
    """What the messages of one mailbox cost; 0 is no quota."""
    client_quota_bytes: int = 256 << 20
    """What the messages and mailboxes of one client cost; 0 is no quota. A client is who logged in, or an
    address."""
    client_quota_mailboxes: int = 100_000
    client_quota_agents: int = 1_000
    group_window: int = 32
    """Undeleted messages that a member of a queue group holds before the others get more; 0 is no limit."""
    dead_letter_after: int = 0
    """Failed deliveries to a group after which a message goes to the mailbox `ID.dead`; 0 is never."""
    receipts: bool = False
    """Whether each delivery becomes an event."""
    extend: bool = False
    """Whether a mailbox's creator may give it more time."""
