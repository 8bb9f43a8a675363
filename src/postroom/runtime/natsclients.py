"""The connections, output and subscriptions of each client of a NATS server, and their limits.

Rule 1: a client is a user, or a network address without a login. A connection counts against its address, and
        from its login on against its user.
Rule 2: connections that are closing count until they are closed.
"""

from collections import Counter

from postroom.runtime.natsoptions import (
    CLIENT_PENDING_BYTES_MAX,
    CLIENT_SUBSCRIPTION_BYTES_MAX,
    INCOMPLETE_BYTES_MAX,
    LOGINS_MAX,
    ServerOptions,
)


class ClientUsage:
    """Counts by client, and by network address for connections without a login."""

    def __init__(self, options: ServerOptions) -> None:
        self._connections_max = options.client_connections_max
        self._pending_bytes_max = max(CLIENT_PENDING_BYTES_MAX, options.pending_bytes_max)
        self._connections: Counter[str] = Counter()
        self._logins: dict[str, int] = {}
        """Connections of each address that have not logged in."""
        self._incomplete: dict[str, int] = {}
        """Bytes of incomplete messages of each address."""
        self._pending: dict[str, int] = {}
        """Bytes waiting for those connections of each client that are backed up."""
        self._subscriptions: dict[str, int] = {}
        """Cost of the subscriptions of each client."""

    def may_connect(self, client: str) -> bool:
        return self._connections[client] < self._connections_max

    def add_connection(self, client: str) -> None:
        self._connections[client] += 1

    def remove_connection(self, client: str) -> None:
        self._connections[client] -= 1
        if not self._connections[client]:
            del self._connections[client]

    def move(self, old: str, new: str, *, pending: int, subscription_cost: int) -> bool:
        """Count a connection against its user instead of its address. False when the user has too many."""
        if not self.may_connect(new):
            return False
        self.remove_connection(old)
        self.add_connection(new)
        for counts, used in ((self._pending, pending), (self._subscriptions, subscription_cost)):
            _add(counts, old, -used)
            _add(counts, new, used)
        return True

    def add_login(self, network: str) -> bool:
        """Count a connection that has not logged in. False, uncounted, when its address has too many."""
        count = self._logins.get(network, 0)
        if count >= LOGINS_MAX:
            return False
        self._logins[network] = count + 1
        return True

    def end_login(self, network: str) -> None:
        """A connection has logged in, or has ended without a login."""
        _add(self._logins, network, -1)

    def add_incomplete(self, network: str, more: int) -> bool:
        """Count bytes of incomplete messages. False when the address has too many."""
        return _add(self._incomplete, network, more) <= INCOMPLETE_BYTES_MAX

    def add_pending(self, client: str, more: int) -> bool:
        """Count bytes that wait for a backed-up connection. False when the client has too many."""
        return _add(self._pending, client, more) <= self._pending_bytes_max

    def may_subscribe(self, client: str, cost: int) -> bool:
        return self._subscriptions.get(client, 0) + cost <= CLIENT_SUBSCRIPTION_BYTES_MAX

    def add_subscription(self, client: str, cost: int) -> None:
        """Count the cost of a subscription; a negative cost removes it."""
        _add(self._subscriptions, client, cost)


def _add(counts: dict[str, int], key: str, more: int) -> int:
    """Add to a count, and drop it at zero. Returns the count."""
    count = counts.pop(key, 0) + more
    if count > 0:
        counts[key] = count
    return count
