"""Who may have how many connections to a server.

Rule 1: a connection is anonymous until a request on it showed a token of this server. From then on it is in
        the share of that token, also when later requests show another one.
Rule 2: when there is no room for another anonymous connection, the oldest one of the same address is closed.
        So whoever connects and sends a token at once is served, however many idle connections there are.
Rule 3: operators have room that no agent can use.
"""

from typing import Protocol

from postroom.runtime.agents import Identity
from postroom.runtime.shares import Shares
from postroom.system.descriptors import raise_descriptor_limit

CONNECTIONS_MAX = 16_000
ANONYMOUS_MAX = 4_096  # half of them from one address: as many as reconnect at once after a restart
CONNECTIONS_A_TOKEN_MAX = 2_000
OPERATOR_CONNECTIONS_RESERVE = 64
FILES_RESERVED = 704  # descriptors for the store, bells, buses, and those who follow a bus
UNSENT_BYTES_MAX = 512 * 1024 * 1024
UNSENT_BYTES_A_TOKEN_MAX = 128 * 1024 * 1024
UNSENT_BYTES_RESERVE = 64 * 1024 * 1024


def allowed_connections() -> int:
    """How many connections the server takes, after asking the system for as many descriptors as it gives."""
    return max(8, raise_descriptor_limit(CONNECTIONS_MAX + FILES_RESERVED) - FILES_RESERVED)


class EvictableConnection(Protocol):
    """A connection that can be told to make room."""

    def evict(self) -> None: ...


class Connections:
    """All connections of a server. The limits shrink with the number of connections that are possible."""

    def __init__(self, total: int) -> None:
        self.anonymous_max = min(ANONYMOUS_MAX, total // 4)
        self.anonymous_an_address_max = self.anonymous_max // 2
        with_token = total - self.anonymous_max
        self.each_max = min(CONNECTIONS_A_TOKEN_MAX, with_token // 2)
        reserve = min(OPERATOR_CONNECTIONS_RESERVE, with_token // 4)
        self._shares = Shares("connections", with_token, self.each_max, reserve)
        self.unsent = Shares(
            "bytes of unread answers", UNSENT_BYTES_MAX, UNSENT_BYTES_A_TOKEN_MAX, UNSENT_BYTES_RESERVE
        )
        self._anonymous: dict[str, dict[EvictableConnection, None]] = {}
        self.anonymous = 0

    def open(self, connection: EvictableConnection, address: str) -> None:
        """A new anonymous connection. Another one is closed when there is no room."""
        here = self._anonymous.setdefault(address, {})
        if len(here) >= self.anonymous_an_address_max:
            self._close_oldest(address)
        elif self.anonymous >= self.anonymous_max:
            self._close_oldest(max(self._anonymous, key=lambda known: len(self._anonymous[known])))
        self._anonymous.setdefault(address, {})[connection] = None
        self.anonymous += 1

    def _close_oldest(self, address: str) -> None:
        oldest = next(iter(self._anonymous[address]))
        self._forget(oldest, address)
        oldest.evict()

    def _forget(self, connection: EvictableConnection, address: str) -> bool:
        """Count a connection as anonymous no longer; false when it was not."""
        here = self._anonymous.get(address, {})
        if connection not in here:
            return False
        del here[connection]
        if not here:
            del self._anonymous[address]
        self.anonymous -= 1
        return True

    def identify(self, connection: EvictableConnection, address: str, identity: Identity) -> None:
        """Put a connection into the share of a token; raises when that is used up."""
        self._shares.take(identity)
        self._forget(connection, address)

    def close(self, connection: EvictableConnection, address: str, identity: Identity | None) -> None:
        """A connection has ended."""
        if identity is None:
            self._forget(connection, address)
        else:
            self._shares.give_back(identity)
