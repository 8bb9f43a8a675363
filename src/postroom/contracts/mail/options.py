"""The options of the mail service."""

from pathlib import Path
from typing import Literal

import msgspec

from postroom.core.mail.mq9 import DEFAULT_TTL_S
from postroom.core.mail.mq9replies import Envelope
from postroom.logs.mail_log import SegmentLogLimits
from postroom.logs.mail_records import ROW_BYTES_MAX

Storage = Literal["memory", "os", "group"]
"""When a message counts as stored: at once, when the operating system has it, or after a shared fsync."""


class MailLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    waits_max: int = 100_000
    client_waits_max: int = 50_000  # of one client, and of one organization
    client_groups_max: int = 10_000  # that one client has created, in all mailboxes
    client_remembered_max: int = 1_000_000  # letters that these groups hold, or remember as acknowledged
    organization_remembered_max: int = 2_000_000  # the same, of all clients of one organization
    query_scan_max: int = 1_000  # letters that a query scans in one turn of the loop
    queries_max: int = 64  # of one connection that need more than one turn
    replay_step: int = 1_000  # messages delivered in one turn of the loop
    entries_a_turn_max: int = 1_000
    messages_an_organization_max: int = 1_000_000
    agents_max: int = 100_000
    cards_bytes_max: int = 256 << 20  # memory of all cards
    client_cards_bytes_max: int = 64 << 20  # memory of the cards of one client
    row_bytes_max: int = ROW_BYTES_MAX
    cards_looked_max: int = 10_000
    """Cards that a search looks at; a card counts once for each word that it has."""
    prefix_words_max: int = 3_200
    """Words that a search looks at for those that begin with its words, which share them."""
    log: SegmentLogLimits = SegmentLogLimits()


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
    """Messages of one mailbox; 0 means no quota."""
    quota_bytes: int = 128 << 20
    """Memory that the messages of one mailbox may take up; 0 means no quota."""
    client_quota_bytes: int = 256 << 20
    """Memory that the messages and mailboxes of one client may take up; 0 means no quota. A client is a user,
    or a network address without a login."""
    client_quota_mailboxes: int = 100_000
    client_quota_agents: int = 1_000
    group_window: int = 32
    """Undeleted messages that a member of a queue group may hold; 0 means no limit."""
    dead_letter_after: int = 0
    """Failed deliveries to a group after which a message moves to the mailbox `ID.dead`; 0 is never."""
    receipts: bool = False
    """Whether each delivery is emitted as an event."""
    extend: bool = False
    """Whether the creator of a mailbox may extend its lifetime."""
    key_file: Path | None = None
    """The keys that encrypt the log; None means the key file that the environment names, if any."""
    limits: MailLimits = MailLimits()
