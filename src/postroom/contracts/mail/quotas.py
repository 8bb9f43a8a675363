"""Quotas of clients, organizations, mailboxes and the whole server.

Rule 1: everything stored is counted against the client that sent or created it, also after a reconnect.
Rule 2: a batch is admitted as a whole or refused as a whole.
Rule 3: an organization has at most a share of what the server stores, however many clients it has.
"""

import math

from postroom.contracts.mail.options import MailOptions
from postroom.core.mail.mailbox import (
    MESSAGE_COST_BYTES,
    NOBODY,
    Letter,
    MailAccount,
    Mailbox,
    MailUsage,
    PullGroup,
    group_cost,
    mailbox_cost,
    organization_of,
)
from postroom.core.mail.mq9 import Mq9Error

ORGANIZATION_SHARE = 0.5  # of the bytes, the mailboxes and the agents of a server
ACCOUNTS_TIDIED_FROM = 1_024  # number of accounts from which empty ones are dropped
RECORD_BYTES = 100  # about what a letter costs in the log besides its own bytes
MEMORY_ONLY_BYTES = MESSAGE_COST_BYTES - RECORD_BYTES  # of a letter's cost, the part that is not in the log


class Accounts(dict[str, MailAccount]):
    """Accounts by client. Use an account within one call only: an empty account may be dropped later."""

    def __init__(self) -> None:
        super().__init__()
        self._organizations: dict[str, MailUsage] = {}
        self._tidy_at = ACCOUNTS_TIDIED_FROM

    def __missing__(self, client: str) -> MailAccount:
        if len(self) >= self._tidy_at:
            for gone in [each for each in self.values() if each.empty]:
                del self[gone.name]
            used = (account.organization for account in self.values())
            self._organizations = {usage.name: usage for usage in used if usage is not None}
            self._tidy_at = max(ACCOUNTS_TIDIED_FROM, 2 * len(self))
        org = organization_of(client)
        usage = self._organizations.setdefault(org, MailUsage(org)) if org else None
        account = self[client] = MailAccount(client, usage)
        return account


class Quotas:
    """The totals of one server."""

    def __init__(self, options: MailOptions) -> None:
        self._options = options
        self._limits = options.limits
        self.accounts = Accounts()
        self.messages = self.stored_bytes = 0
        self.log_bytes = 0  # about what the live messages and agents take up in the log
        self._mailbox_messages_max = options.quota_messages or math.inf
        self._mailbox_bytes_max = options.quota_bytes or math.inf
        self._client_bytes_max = options.client_quota_bytes or math.inf
        self._bytes_max = options.stored_bytes_max
        self._organization_bytes_max = int(options.stored_bytes_max * ORGANIZATION_SHARE)
        self._organization_mailboxes_max = int(options.mailboxes_max * ORGANIZATION_SHARE)

    # ---- admission -----------------------------------------------------------------------------

    def admit_letters(self, box: Mailbox, account: MailAccount, count: int, cost: int) -> None:
        """Refuse letters that do not all fit together."""
        if len(box.letters) + len(box.delayed) + box.reserved + count > self._mailbox_messages_max:
            quota = self._options.quota_messages
            raise Mq9Error(429, f"the mailbox holds {quota} messages, which is its quota")
        if box.bytes + box.reserved_bytes + cost > self._mailbox_bytes_max:
            quota = self._options.quota_bytes
            raise Mq9Error(429, f"the mailbox may hold {quota} bytes, which is its quota")
        if account.bytes + cost > self._client_bytes_max or self.stored_bytes + cost > self._bytes_max:
            self._admit_cost(account, cost)
        if account.organization is not None:
            self._admit_share(account.organization, cost)
            if account.organization.messages + count > self._limits.messages_an_organization_max:
                raise share_used(account.organization, self._limits.messages_an_organization_max, "messages")

    def admit_mailbox(self, account: MailAccount, cost: int, existing: int) -> None:
        """Refuse one more mailbox in addition to the `existing` ones."""
        options = self._options
        if existing >= options.mailboxes_max:
            raise Mq9Error(429, f"there are {options.mailboxes_max} mailboxes, which is the limit")
        if account.mailboxes >= (options.client_quota_mailboxes or math.inf):
            raise Mq9Error(429, f"this client has {options.client_quota_mailboxes} mailboxes, its quota")
        of_org, most = account.organization, self._organization_mailboxes_max
        if of_org is not None and of_org.mailboxes >= most:
            raise share_used(of_org, most, "mailboxes")
        self._admit_cost(account, cost)

    def admit_group(self, account: MailAccount, name: str) -> None:
        """Refuse a pull group that does not fit the quota of its creator."""
        self._admit_cost(account, group_cost(name))

    def _admit_cost(self, account: MailAccount, cost: int) -> None:
        if account.bytes + cost > self._client_bytes_max:
            quota = self._options.client_quota_bytes
            raise Mq9Error(429, f"this client may store {quota} bytes, which is its quota")
        if self.stored_bytes + cost > self._bytes_max:
            raise Mq9Error(429, f"the server stores {self._bytes_max} bytes, which is its limit")
        if account.organization is not None:
            self._admit_share(account.organization, cost)

    def _admit_share(self, organization: MailUsage, cost: int) -> None:
        if organization.bytes + cost > self._organization_bytes_max:
            raise share_used(organization, self._organization_bytes_max, "bytes")

    # ---- counting ------------------------------------------------------------------------------

    def count(self, letter: Letter, count: int, nbytes: int) -> None:
        """Add `count` letters like this one, which cost `nbytes` together; negative numbers remove."""
        self.messages += count
        self.stored_bytes += nbytes
        letter.account.add(nbytes, messages=count)
        if letter.durable:
            self.log_bytes += nbytes - MEMORY_ONLY_BYTES * count

    def add_mailbox(self, box: Mailbox, account: MailAccount) -> None:
        """Count a mailbox against its creator."""
        box.account = account
        box.cost = mailbox_cost(box.mail_id, box.desc, box.org)
        account.add(box.cost, mailboxes=1)
        self.stored_bytes += box.cost

    def remove_mailbox(self, box: Mailbox) -> None:
        """Stop counting a mailbox and its pull groups."""
        box.account.add(-box.cost, mailboxes=-1)
        self.stored_bytes -= box.cost
        for name, group in box.groups.items():
            group.forget_all()
            group.account.groups -= 1
            self._add_cost(group.account, -group_cost(name))
            group.account = NOBODY  # an acknowledgement may still be on its way to the disk

    def add_group(self, name: str, group: PullGroup, account: MailAccount) -> None:
        """Count a pull group against its creator."""
        group.account = account
        group.count()
        account.groups += 1
        self._add_cost(account, group_cost(name))

    def _add_cost(self, account: MailAccount, cost: int) -> None:
        account.add(cost)
        self.stored_bytes += cost

    def count_agent(self, card: bytes, count: int) -> None:
        """Count the record of an agent in the log; -1 removes it."""
        self.log_bytes += count * (len(card) + RECORD_BYTES)


def share_used(organization: MailUsage, most: int, what: str) -> Mq9Error:
    return Mq9Error(429, f"the organization {organization.name!r} may have {most} {what}, which is its share")
