"""Limits on the connections of a server, in total, per address and per token.

Rule 1: a connection is anonymous until a request on it carries a token of this server. Then it counts in the
        share of that token, even if later requests carry another one.
Rule 2: when the anonymous connections are at their limit, the oldest one of the same network is closed. A
        client that sends a token right after connecting is served, however many idle connections there are.
Rule 3: operators have a reserve that agents cannot use.
"""

from typing import Protocol

from postroom.server.access.registry import Identity
from postroom.server.access.shares import Shares
from postroom.server.nats.options import network_of
from postroom.system.resources import raise_descriptor_limit

CONNECTIONS_MAX = 16_000
ANONYMOUS_MAX = 4_096  # half of them from one address, enough for all agents to reconnect after a restart
CONNECTIONS_A_TOKEN_MAX = 2_000
OPERATOR_CONNECTIONS_RESERVE = 64
FILES_RESERVED = 704  # descriptors for the store, the notifier, buses and bus streams
UNSENT_BYTES_MAX = 512 * 1024 * 1024
UNSENT_BYTES_A_TOKEN_MAX = 128 * 1024 * 1024
UNSENT_BYTES_RESERVE = 64 * 1024 * 1024


def allowed_connections() -> int:
    """Raise the limit of open files, and return how many connections fit into it."""
    return max(8, raise_descriptor_limit(CONNECTIONS_MAX + FILES_RESERVED) - FILES_RESERVED)


class EvictableConnection(Protocol):
    """A connection that can be closed in favour of another."""

    def evict(self) -> None: ...


class ConnectionLimits:
    """The connections of a server. With few descriptors, all limits are lower."""

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
        """By network: one client owns 64 bits of IPv6 addresses."""
        self.anonymous = 0

    def open(self, connection: EvictableConnection, address: str) -> None:
        """Add an anonymous connection, and close another one when the limit is reached."""
        network = network_of(address)
        of_network = self._anonymous.setdefault(network, {})
        if len(of_network) >= self.anonymous_an_address_max:
            self._close_oldest(network)
        elif self.anonymous >= self.anonymous_max:
            self._close_oldest(max(self._anonymous, key=lambda known: len(self._anonymous[known])))
        self._anonymous.setdefault(network, {})[connection] = None
        self.anonymous += 1

    def _close_oldest(self, network: str) -> None:
        oldest = next(iter(self._anonymous[network]))
        self._forget(oldest, network)
        oldest.evict()

    def _forget(self, connection: EvictableConnection, network: str) -> bool:
        """Stop counting a connection as anonymous. Returns False when it was not."""
        of_network = self._anonymous.get(network, {})
        if connection not in of_network:
            return False
        del of_network[connection]
        if not of_network:
            del self._anonymous[network]
        self.anonymous -= 1
        return True

    def identify(self, connection: EvictableConnection, address: str, identity: Identity) -> None:
        """Count a connection in the share of a token. Raises when the share is used up."""
        self._shares.take(identity)
        self._forget(connection, network_of(address))

    def close(self, connection: EvictableConnection, address: str, identity: Identity | None) -> None:
        """Remove a connection that has ended."""
        if identity is None:
            self._forget(connection, network_of(address))
        else:
            self._shares.give_back(identity)
