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
        self.connections = ClientShares(options.client_connections_max, options.client_connections_max)
        self.pending = ClientShares(
            max(limits.client_pending_bytes_max, pending_bytes_max),
            max(limits.organization_pending_bytes_max, pending_bytes_max),
        )
        """Bytes waiting for those connections of each client that are backed up."""
        self.subscriptions = ClientShares(
            limits.client_subscription_bytes_max, limits.organization_subscription_bytes_max
        )
        """Cost of the subscriptions of each client."""
        self.subscription_counts = ClientShares(
            options.subscriptions_max, ORGANIZATION_SUBSCRIPTION_CLIENTS * options.subscriptions_max
        )
        self._logins: dict[str, int] = {}
        """Connections of each address that have not logged in."""
        self.incomplete = ClientShares(limits.incomplete_bytes_max, limits.organization_incomplete_bytes_max)
        """Bytes of incomplete messages, and of input that waits for its turn."""

    def move(
        self, old: str, new: str, *, incomplete: int, pending: int, subscriptions: int, subscription_cost: int
    ) -> bool:
        """Count a connection against its user instead of its address. False when the user has too many."""
        if not self.connections.fits(new, 1):
            return False
        for counts, used in (
            (self.connections, 1),
            (self.incomplete, incomplete),
            (self.pending, pending),
            (self.subscriptions, subscription_cost),
            (self.subscription_counts, subscriptions),
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

    def add_subscriptions(self, client: str, count: int, cost: int) -> None:
        """Count subscriptions and their cost; negative numbers remove them."""
        self.subscription_counts.add(client, count)
        self.subscriptions.add(client, cost)
