"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The small sizes only show that the bench runs."""

    messages: int = 200_000
    fan_out_messages: int = 40_000
    requests: int = 2_000
    client_messages: int = 30_000
    client_requests: int = 1_000
    connections: int = 1_000
    stored: int = 60_000
    durable: int = 4_000
    replayed: int = 100_000
    mailboxes: int = 10_000
    mailbox_ttl_s: float = 2.0
    crowd_mailboxes: int = 20_000
    crowd_messages: int = 100_000
    sends: int = 40_000


SMALL = Sizes(
    messages=800,
    fan_out_messages=800,
    requests=20,
    client_messages=200,
    client_requests=20,
    connections=10,
    stored=800,
    durable=200,
    replayed=800,
    mailboxes=100,
    mailbox_ttl_s=0.2,
    crowd_mailboxes=20,
    crowd_messages=400,
    sends=400,
)
