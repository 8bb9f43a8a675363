"""The addresses at which agents want to be nudged. Their hosts are not resolved here."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from postroom.errors import InvalidMessage

URL_CHARS_MAX = 2_048
PORTS = {"http": 80, "https": 443}

_UNSAFE = re.compile(r"[^\x21-\x7e]")


class Target(NamedTuple):
    """The parts of a nudge address."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def checked_url(url: str) -> str:
    """Return the address of an agent unchanged. Raises `InvalidMessage`."""
    parse_url(url)
    return url


def parse_url(url: str) -> Target:
    """Parse the address of an agent, without resolving its host."""
    if not isinstance(url, str) or len(url) > URL_CHARS_MAX or _UNSAFE.search(url):
        raise InvalidMessage(f"url must be at most {URL_CHARS_MAX} printable ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidMessage(f"url is not an address: {error}") from None
    if parts.scheme not in PORTS:
        raise InvalidMessage("url must begin with http:// or https://")
    if not host or parts.username is not None or parts.password is not None:
        raise InvalidMessage("url must name a host, and no user")
    if parts.query or parts.fragment or port == 0:
        raise InvalidMessage("url must have a port above 0, if any, no query and no fragment")
    return Target(parts.scheme, host, port or PORTS[parts.scheme], parts.path.rstrip("/"))
