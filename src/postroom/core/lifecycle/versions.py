"""Versions of the message format: which are accepted, and how old ones are migrated.

Rule 1: the current major version and the previous one are accepted.
Rule 2: a newer minor version, or any of the previous major version, may have fields that we do not know.
        They are kept and returned.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from postroom.errors import UnsupportedVersion

CURRENT_VERSION: Final = "1.0.0"

_VERSION = re.compile(r"(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})", re.ASCII)

Migration: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns the fields of a message of one major version into those of the next."""


class Version(NamedTuple):
    """A semantic version."""

    major: int
    minor: int
    patch: int


def parse(text: object) -> Version:
    """A version such as 1.0.0."""
    match = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UnsupportedVersion(text, CURRENT_VERSION)
    return Version(*map(int, match.groups()))


def checked(text: object, current: str = CURRENT_VERSION) -> Version:
    """The version, when it is of the current or the previous major version."""
    version, ours = parse(text), parse(current)
    if version.major not in (ours.major, ours.major - 1):
        raise UnsupportedVersion(text, current)
    return version


def is_same_major(text: str, current: str) -> bool:
    """Whether a checked version is of the current major version."""
    return text == current or text.partition(".")[0] == current.partition(".")[0]


def migrated(
    fields: dict[str, Any], migrations: Mapping[int, Migration], current: str = CURRENT_VERSION
) -> dict[str, Any]:
    """The fields of a message in the current major version, by the migration registered for its own."""
    given = fields.get("version")
    if given is None or given == current:
        return fields
    version = checked(given, current)
    migrate = migrations.get(version.major)
    if version.major == parse(current).major or migrate is None:
        return fields
    return {**migrate(dict(fields)), "version": current}


def may_have_unknown_fields(text: object, current: str = CURRENT_VERSION) -> bool:
    """Whether a message of this version may have fields that the current version does not know."""
    version, ours = checked(text, current), parse(current)
    return version.major < ours.major or version.minor > ours.minor
