"""The verbs of tokens. Only admins may call them."""

from datetime import datetime
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from postroom.calls.fields import EXPIRES_S_MAX, Id, Name, Names, Rate, Role
from postroom.calls.verb import REFUSED, Route, Verb, get, post


class TokenLine(msgspec.Struct, frozen=True):
    """A token without its text. An empty `org` means all organizations."""

    token_id: str
    role: Role
    org: str
    agent: str
    created: datetime
    expires: datetime | None
    valid: bool
    rate: float
    may_send_to: tuple[str, ...]
    may_claim: tuple[str, ...]
    may_read: tuple[str, ...]
    only_message: tuple[str, ...]
    only_buses: tuple[str, ...]
    read_only: bool


class TokensAnswer(msgspec.Struct, frozen=True):
    """The tokens that the admin may change, in the order in which they were made."""

    tokens: list[TokenLine]


class ListTokens(Verb, frozen=True, kw_only=True):
    """Tokens, without their texts."""

    route: ClassVar[Route] = get("/tokens", "token.list", TokensAnswer)


class MadeTokenAnswer(msgspec.Struct, frozen=True):
    """A new token, which is never answered again, and the id that names it."""

    token: str
    token_id: str


class CreateToken(Verb, frozen=True, kw_only=True):
    """Make a token. Only this answer contains it.

    Without `org`, the token is for the organization of the admin, or for all.
    """

    role: Role
    org: Name | None = None
    agent: Name | None = None
    expires_s: Annotated[float, Meta(ge=1, le=EXPIRES_S_MAX)] | None = None
    rate: Rate = 0.0
    may_send_to: Names = ()
    may_claim: Names = ()
    may_read: Names = ()
    only_message: Names = ()
    only_buses: Names = ()
    read_only: bool = False

    route: ClassVar[Route] = post("/tokens", "token.create", MadeTokenAnswer, status=201, refusals=REFUSED)


class RevokedAnswer(msgspec.Struct, frozen=True):
    """The id of a token that is refused from now on."""

    token_id: str


class RevokeToken(Verb, frozen=True, kw_only=True):
    """Revoke a token."""

    token_id: Id = msgspec.field(name="id")

    route: ClassVar[Route] = post("/tokens/{id}/revoke", "token.end", RevokedAnswer)


class RotateToken(RevokeToken, frozen=True, kw_only=True):
    """Replace a token by one with the same rights.

    The old token stays valid for `overlap_s` more seconds.
    """

    overlap_s: Annotated[float, Meta(ge=0, le=EXPIRES_S_MAX)] = 0.0

    route: ClassVar[Route] = post("/tokens/{id}/rotate", "token.end", MadeTokenAnswer, status=201)
