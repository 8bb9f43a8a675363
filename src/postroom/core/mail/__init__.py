"""Mailboxes and the mq9 protocol as pure values. Time is an argument, and a connection is a number."""
