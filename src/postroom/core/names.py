"""Names that become file names: agents, sessions, recipients."""

import re
from functools import lru_cache

from postroom.errors import InvalidName

NAME_CHARS_MAX = 128  # leaves room for every suffix we add below the usual limit of 255

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def plain(text: str) -> str:
    """The text itself. A member of a `str` enumeration would otherwise be written by its own name."""
    return text if type(text) is str else str.__str__(text)


def checked_name(kind: str, name: object) -> str:
    """`name` itself when it is safe as a file name on every system, else `InvalidName`."""
    if type(name) is str and is_name(name):
        return name
    if not isinstance(name, str) or not is_name(name):
        raise InvalidName(kind, name)
    return plain(name)


@lru_cache(maxsize=1024)  # every send and poll asks, and the agents of a machine are few
def is_name(text: str) -> bool:
    """Whether the whole text is a name."""
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None
