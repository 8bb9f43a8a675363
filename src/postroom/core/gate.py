"""Who may do what with which object: one table for HTTP, the live page, MCP and NATS.

Rule 1: `permit` decides before anything of the object is read. It needs only the object's owner, which is in
        its key or in a record of its own.
Rule 2: an object of an unknown owner is for operators of all organizations.
Rule 3: what a caller may not know about is answered like what does not exist. The other refusals depend on
        the caller and the call alone.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

Who: TypeAlias = Literal["caller", "organization", "creator"]


class Caller(Protocol):
    """The owner of a token, as far as the table needs to know it."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def org(self) -> str: ...
    @property
    def is_operator(self) -> bool:
        """Whether the caller operates all organizations."""


class Owner(NamedTuple):
    """Whom an object belongs to."""

    org: str | None
    """Empty for no organization: the object is for everybody. None when it is unknown."""
    agent: str = ""
    """The agent that made the object; empty for an operator."""


UNKNOWN: Final = Owner(None)

GATE: Final[Mapping[str, Who]] = MappingProxyType(
    {
        "bus.list": "caller",
        "bus.read": "organization",
        "bus.post": "organization",
        "bus.remove": "creator",
    }
)
"""By object and action: who may do it."""


def permit(caller: Caller, action: str, owner: Owner) -> bool:
    """Whether the caller may do this with an object of this owner."""
    if caller.is_operator:
        return True
    match GATE[action]:
        case "caller":
            return True
        case "organization":
            return owner.org in ("", caller.org)
        case "creator":
            is_made = caller.role == "agent" and caller.name == owner.agent
            return owner.org == caller.org and (is_made or (caller.role != "agent" and caller.org != ""))


def namespaces(caller: Caller) -> tuple[str, ...]:
    """The organizations in which a name of the caller is looked up, in this order; empty for none of them."""
    return (caller.org, "") if caller.org else ("",)
