"""How a NATS server listens, whom it lets in, and where it stops."""

import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from postroom.core import natswire as wire
from postroom.system.descriptors import raise_descriptor_limit

DEFAULT_PORT = 4222
TOKEN_USER = "token"  # noqa: S105 - whoever brings the token: many may have the same
CONNECTIONS_MAX = 65_536
CLIENT_CONNECTIONS_SHARE = 0.5  # of all connections: what one client may have
SUBSCRIPTIONS_MAX = 100_000  # of one connection
PENDING_BYTES_MAX = 64 * 1024 * 1024
CLIENT_PENDING_BYTES_MAX = 256 * 1024 * 1024  # on all connections of one client
CLIENT_SUBSCRIPTION_BYTES_MAX = 128 * 1024 * 1024  # what all subscriptions of one client cost
SUBSCRIPTION_COST_BYTES = 400  # of memory, besides its texts: 310 measured
WILDCARD_TOKEN_COST_BYTES = 420  # of each token of a subject with a wildcard: 400 measured
ROOM_SUBSCRIPTION_COST_BYTES = 1_000  # of one to a mailbox: 880 measured
ROOM_GROUP_COST_BYTES = 1_200  # of a queue group there: 1,120 measured
LOGIN_BYTES_MAX = 8 * 1024  # that a connection may send before it has logged in
LOGINS_MAX = 64  # connections of one address that have not logged in yet
UNFINISHED_BYTES_MAX = 128 * 1024 * 1024  # of incomplete messages on all connections of one address
WRONG_LOGIN_S = 0.2  # before a wrong password is answered
PING_INTERVAL_S = 120.0
AUTH_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 10.0
LAME_DUCK_S = 0.5  # with what closing may take, two seconds at most
IPV6_CLIENT_BITS = 64
FILES_RESERVED = 64  # of those that the system lets us open: what is no connection


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server listens, whom it lets in, and where it stops."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords by user."""
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    tls_first: bool = False
    """Begin with the handshake. NATS clients want INFO in the clear first, unless they are told."""
    payload_bytes_max: int = wire.PAYLOAD_BYTES_MAX
    pending_bytes_max: int = PENDING_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX
    subscriptions_max: int = SUBSCRIPTIONS_MAX
    ping_interval_s: float = PING_INTERVAL_S
    auth_timeout_s: float = AUTH_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S
    lame_duck_s: float = LAME_DUCK_S

    @property
    def needs_auth(self) -> bool:
        return bool(self.users or self.token)

    @property
    def client_connections_max(self) -> int:
        return max(1, int(self.connections_max * CLIENT_CONNECTIONS_SHARE))

    def user_of(self, said: wire.ConnectOptions) -> str | None:
        """Who somebody is that says CONNECT; None for nobody we know."""
        if not self.needs_auth:
            return ""
        if self.token and _same(said.auth_token, self.token):
            return TOKEN_USER
        password = self.users.get(said.user)
        return said.user if password is not None and _same(said.password, password) else None


def client_of(user: str, network: str) -> str:
    """Whose quota a connection uses: who logged in by name, otherwise its network address."""
    return f"user:{user}" if user not in ("", TOKEN_USER) else f"address:{network}"


def network_of(address: str) -> str:
    """An IPv4 address, or the network of 64 bits of an IPv6 address, which one client has to itself."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_CLIENT_BITS), strict=False))


def _same(given: str, wanted: str) -> bool:
    """Takes as long whatever is given."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))


def allowed_connections() -> int:
    """How many connections the system lets us have, after asking for as many files as we can get.

    The rest is for everything else: who only opens connections must not keep a room from its next file.
    """
    return max(1, raise_descriptor_limit(CONNECTIONS_MAX + FILES_RESERVED) - FILES_RESERVED)
