"""The options and limits of a NATS server, and the identity of its clients."""

import hmac
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from postroom.core.gate import Caller
from postroom.core.nats import natswire as wire
from postroom.system.resources import raise_descriptor_limit

DEFAULT_PORT = 4222
TOKEN_USER = "token"  # noqa: S105 - the user of every client with the token
CONNECTIONS_MAX = 65_536
CLIENT_CONNECTIONS_SHARE = 0.5  # of all connections that one client, or one organization, may have
SUBSCRIPTIONS_MAX = 100_000  # on all connections of one client
ORGANIZATION_SUBSCRIPTION_CLIENTS = 2  # factor for all clients of one organization together
PENDING_BYTES_MAX = 64 * 1024 * 1024
SUBSCRIPTION_COST_BYTES = 400  # memory of a subscription without its texts: 310 measured
WILDCARD_TOKEN_COST_BYTES = 420  # memory of each token of a subject with a wildcard: 400 measured
MAILBOX_SUBSCRIPTION_COST_BYTES = 1_000  # memory of a subscription to a mailbox: 880 measured
MAILBOX_GROUP_COST_BYTES = 1_200  # memory of its queue group: 1,120 measured
LOGIN_BYTES_MAX = 8 * 1024  # that a connection may send before its login
LOGINS_MAX = 64  # connections of one address that have not logged in
PING_INTERVAL_S = 120.0
AUTH_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 10.0
LAME_DUCK_S = 0.5  # with the time for closing, a stop takes two seconds at most
IPV6_CLIENT_BITS = 64
FILES_RESERVED = 64  # open files that are not for connections


class TokenOwner(NamedTuple):
    """Who has logged in."""

    user: str
    caller: str = ""
    """Names the token of a registry, without its text."""
    rate: float = 0.0
    """Messages a second that clients with the token may publish; 0 for no limit."""
    org: str = ""
    """The organization of the token; empty for none."""
    sees_all: bool = True
    """Whether messages and mailboxes of every organization are for it."""
    identity: Caller | None = None
    """The owner of a token of the registry. Who logs in otherwise has every permission."""


@dataclass(frozen=True, kw_only=True)
class NatsLimits:
    """Limits and intervals that users do not set."""

    client_pending_bytes_max: int = 256 * 1024 * 1024  # on all connections of one client
    organization_pending_bytes_max: int = 512 * 1024 * 1024  # on all connections of one organization
    client_subscription_bytes_max: int = 128 * 1024 * 1024  # memory of all subscriptions of one client
    organization_subscription_bytes_max: int = 256 * 1024 * 1024  # of all subscriptions of one organization
    incomplete_bytes_max: int = 128 * 1024 * 1024  # of incomplete messages and waiting input of one client
    organization_incomplete_bytes_max: int = 256 * 1024 * 1024  # of all clients of one organization
    step_cost_max: int = 4 << 20  # of the deliveries between two checks of the clock; see `router`
    slice_s: float = 0.005
    """Time for the commands of all connections in a turn of the loop."""
    tick_s: float = 0.25
    token_check_s: float = 0.2
    """Between checks that the tokens of connections are still valid."""
    wrong_login_s: float = 0.2
    """Delay of the answer to a wrong password."""
    linger_s: float = 1.0
    """How long input is discarded before a connection is closed."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of a NATS server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords by user."""
    token: str = field(default="", repr=False)
    identify: Callable[[str], "TokenOwner | None"] | None = None
    """The owner of a token of a registry; None for a token that is not valid."""
    tls: ssl.SSLContext | None = None
    tls_first: bool = False
    """Start with the TLS handshake. By default NATS clients expect INFO in the clear first."""
    payload_bytes_max: int = wire.PAYLOAD_BYTES_MAX
    pending_bytes_max: int = PENDING_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX
    subscriptions_max: int = SUBSCRIPTIONS_MAX
    ping_interval_s: float = PING_INTERVAL_S
    auth_timeout_s: float = AUTH_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S
    lame_duck_s: float = LAME_DUCK_S
    limits: NatsLimits = NatsLimits()

    @property
    def needs_auth(self) -> bool:
        return bool(self.users or self.token or self.identify)

    @property
    def client_connections_max(self) -> int:
        return max(1, int(self.connections_max * CLIENT_CONNECTIONS_SHARE))

    def owner_of(self, options: wire.ConnectOptions) -> TokenOwner | None:
        """The owner of a CONNECT; None when the login is wrong."""
        if not self.needs_auth:
            return TokenOwner("")
        if self.token and _same(options.auth_token, self.token):
            return TokenOwner(TOKEN_USER)
        if self.identify is not None and (owner := self.identify(token_of(options))) is not None:
            return owner
        password = self.users.get(options.user)
        is_right = password is not None and _same(options.password, password)
        return TokenOwner(options.user) if is_right else None


def token_of(options: wire.ConnectOptions) -> str:
    """The token of a login. Clients without tokens send it as the password."""
    return options.auth_token or options.password


def client_of(user: str, network: str) -> str:
    """The client whose quota a connection uses: its user, otherwise its network address."""
    return f"user:{user}" if user not in ("", TOKEN_USER) else f"address:{network}"


def address_of(host: str, port: int) -> str:
    """The address of a peer, as events name it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def network_of(address: str) -> str:
    """An IPv4 address, or the 64-bit network of an IPv6 address, which one client owns."""
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
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))


def allowed_connections() -> int:
    """The number of connections that the system allows, after raising the limit of open files.

    Some files are reserved: clients that only open connections must not keep the mail log from a new file.
    """
    return max(1, raise_descriptor_limit(CONNECTIONS_MAX + FILES_RESERVED) - FILES_RESERVED)
