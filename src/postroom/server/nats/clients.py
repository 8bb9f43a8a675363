"""The connections, output and subscriptions of each client of a NATS server, and their limits.

Rule 1: a client is a user, or a network address without a login. A connection counts against its address, and
        from its login on against its user.
Rule 2: connections that are closing count until they are closed.
Rule 3: what counts against a user counts against its organization, too, which has a share of its own.
"""

from postroom.core.mail.clientshares import ClientShares, counted
from postroom.server.nats.options import LOGINS_MAX, ORGANIZATION_SUBSCRIPTION_CLIENTS, ServerOptions


class ClientUsage:
    """Counts by client, and by network address for connections without a login."""

    def __init__(self, options: ServerOptions) -> None:
        limits, pending_bytes_max = options.limits, options.pending_bytes_max
        self._connections = ClientShares(options.client_connections_max, options.client_connections_max)
        self._pending = ClientShares(
            max(limits.client_pending_bytes_max, pending_bytes_max),
            max(limits.organization_pending_bytes_max, pending_bytes_max),
        )
        """Bytes waiting for those connections of each client that are backed up."""
        self._subscriptions = ClientShares(
            limits.client_subscription_bytes_max, limits.organization_subscription_bytes_max
        )
        """Cost of the subscriptions of each client."""
        self._subscription_counts = ClientShares(
            options.subscriptions_max, ORGANIZATION_SUBSCRIPTION_CLIENTS * options.subscriptions_max
        )
        self._logins: dict[str, int] = {}
        """Connections of each address that have not logged in."""
        self._incomplete = ClientShares(limits.incomplete_bytes_max, limits.organization_incomplete_bytes_max)
        """Bytes of incomplete messages, and of input that waits for its turn."""

    def may_connect(self, client: str) -> bool:
        return self._connections.fits(client, 1)

    def add_connection(self, client: str) -> None:
        self._connections.add(client, 1)

    def remove_connection(self, client: str) -> None:
        self._connections.add(client, -1)

    def move(
        self, old: str, new: str, *, incomplete: int, pending: int, subscriptions: int, subscription_cost: int
    ) -> bool:
        """Count a connection against its user instead of its address. False when the user has too many."""
        if not self.may_connect(new):
            return False
        self.remove_connection(old)
        self.add_connection(new)
        for counts, used in (
            (self._incomplete, incomplete),
            (self._pending, pending),
            (self._subscriptions, subscription_cost),
            (self._subscription_counts, subscriptions),
        ):
            counts.add(old, -used)
            counts.add(new, used)
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
        counted(self._logins, network, -1)

    def add_incomplete(self, client: str, more: int) -> bool:
        """Count bytes of incomplete messages and waiting input. False when the client has too many."""
        return self._incomplete.add(client, more)

    def add_pending(self, client: str, more: int) -> bool:
        """Count bytes that wait for a backed-up connection. False when the client has too many."""
        return self._pending.add(client, more)

    def has_subscriptions_left(self, client: str) -> bool:
        return self._subscription_counts.fits(client, 1)

    def may_subscribe(self, client: str, cost: int) -> bool:
        return self._subscriptions.fits(client, cost)

    def add_subscriptions(self, client: str, count: int, cost: int) -> None:
        """Count subscriptions and their cost; negative numbers remove them."""
        self._subscription_counts.add(client, count)
        self._subscriptions.add(client, cost)
