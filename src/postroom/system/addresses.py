"""Parsing addresses, without exceptions that quote their passwords."""

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

ESCAPED: Final = "in a name or a password, write @ / : ? # as %40 %2F %3A %3F %23"
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^][:/@]*)(?::[0-9]*)?")


def split_address(url: str, *, several: bool = False) -> SplitResult | None:
    """The parts of an address; None when it is mistyped. `several` allows hosts separated by commas."""
    try:
        parts = urlsplit(url)
        if not several:
            _ = parts.port  # may be too large
    except ValueError:
        return None
    hosts = parts.netloc.rpartition("@")[2]
    if not all(map(_HOST.fullmatch, hosts.split(",") if several else [hosts])):
        return None
    # A / or ? in a password ends the hosts too soon: then the @ after the password is in a later part.
    is_cut = not parts.path and "@" in parts.query and ":" in parts.netloc and "@" not in parts.netloc
    return None if is_cut or "@" in parts.path or "@" in parts.fragment else parts
