"""The NATS server, and the mail server on top of it."""
