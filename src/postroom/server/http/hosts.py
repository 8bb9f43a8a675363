"""The hosts that a server answers for. Browsers of other sites get no answer of the page and of MCP.

Rule 1: another site can give its own name the address of this server (DNS rebinding). Its requests carry that
        name as their Host, so only known names are answered.
Rule 2: an address in Host is not such a name. On a loopback connection it has to be a loopback address.
Rule 3: over TLS the browser has compared the name with the certificate, so every Host is answered.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from postroom.core.names import checked_name
from postroom.server.http.exchange import HttpRequest, Refusal

_LOOPBACK = "localhost"


class Hosts:
    """The names of a server: `localhost`, the one at which it listens, and those that the settings allow."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in names)

    def check(self, request: HttpRequest) -> None:
        """Refuse a request with a Host of another server, or with the Origin of another site."""
        host, origin = request.header(b"host").lower(), request.header(b"origin").lower()
        if request.scope.get("scheme") != "https" and not self._is_own(_name(host), request):
            raise _forbidden(
                "this server does not answer for the name in Host: add it to the setting allowed_hosts"
            )
        site = origin.partition("://")[2]
        if origin and site != host and _name(site) not in self._names:
            raise _forbidden(
                "this request comes from another site: add its name to the setting allowed_hosts"
            )

    def _is_own(self, name: str, request: HttpRequest) -> bool:
        if name == _LOOPBACK or name in self._names:
            return True
        address, (local, _) = _address(name), request.scope.get("server") or ("", None)
        on_loopback = (found := _address(local)) is not None and found.is_loopback
        return address is not None and (address.is_loopback or not on_loopback)


def checked_hosts(text: str) -> tuple[str, ...]:
    """The names in the setting, which has commas between them."""
    return tuple(checked_name("host", name.strip()) for name in text.split(",") if name.strip())


def _name(authority: str) -> str:
    """The name or address in a host with or without a port; empty for text that is neither."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _forbidden(sentence: str) -> Refusal:
    return Refusal(403, "Forbidden", sentence)
