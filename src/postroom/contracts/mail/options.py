"""The options of the mail service."""

from pathlib import Path
from typing import Literal

import msgspec

from postroom.core.mail.mq9 import DEFAULT_TTL_S
from postroom.core.mail.mq9replies import Envelope

Storage = Literal["memory", "os", "group"]
"""When a message counts as stored: at once, when the operating system has it, or after a shared fsync."""


class MailOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of the mq9 design, except that normal messages survive the server process."""

    critical: Storage = "group"
    urgent: Storage = "group"
    """Also for `high`."""
    normal: Storage = "os"
    """Also for `low`."""
    envelope: Envelope = "auto"
    default_ttl_s: float = DEFAULT_TTL_S
    mailboxes_max: int = 1_000_000
    stored_bytes_max: int = 1 << 30
    """Memory that all messages and mailboxes may take up."""
    quota_messages: int = 0
    """Messages of one mailbox; 0 is no quota."""
    quota_bytes: int = 128 << 20
    """Memory that the messages of one mailbox may take up; 0 is no quota."""
    client_quota_bytes: int = 256 << 20
    """Memory that the messages and mailboxes of one client may take up; 0 is no quota. A client is a user, or
    a network address without a login."""
    client_quota_mailboxes: int = 100_000
    client_quota_agents: int = 1_000
    group_window: int = 32
    """Undeleted messages that a member of a queue group may hold; 0 is no limit."""
    dead_letter_after: int = 0
    """Failed deliveries to a group after which a message moves to the mailbox `ID.dead`; 0 is never."""
    receipts: bool = False
    """Whether each delivery is emitted as an event."""
    extend: bool = False
    """Whether the creator of a mailbox may extend its lifetime."""
    key_file: Path | None = None
    """The keys that encrypt the log; None means the key file that the environment names, if any."""
