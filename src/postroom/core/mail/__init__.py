"""Mailboxes and the mq9 protocol as pure values."""
