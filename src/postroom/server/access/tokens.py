"""The tokens of a data folder that can expire, be revoked and be rotated.

Rule 1: a token is shown once, when it is made. The file holds only its SHA-256.
Rule 2: an expired token is refused like an unknown one. It stays in the list until it is revoked.
Rule 3: the agents that a token names are those of its organization. The organization that owned a name in an
        earlier version keeps it, also when its tokens end.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from postroom.calls.fields import EXPIRES_S_MAX, NAMES_MAX, Role
from postroom.calls.tokens import CreateToken, TokenLine
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.names import checked_name
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownToken
from postroom.server.access.registry_file import RegistryFile
from postroom.settings import RATE_MAX

FILE_NAME = "tokens.json"
SESSIONS_FILE_NAME = "sessions.json"
TOKEN_PREFIX = "pr_"  # noqa: S105 - a prefix, and no token
TOKEN_BYTES = 32
DEMO_PREFIX = "demo-"  # of the organizations and agents of the demo
TOKEN_CHARS = len(TOKEN_PREFIX) + 43
TOKEN_ID_BYTES = 6
TOKENS_MAX = 10_000

ROLES: Final = get_args(Role)


class Permissions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a token may do in addition to what its role allows, and what it may not do."""

    may_send_to: tuple[str, ...] = ()
    """Agents that it may send tasks to, in addition to those of its agent."""
    may_claim: tuple[str, ...] = ()
    """Agents whose tasks it may claim and end, in addition to its own."""
    may_read: tuple[str, ...] = ()
    """Agents whose tasks it may read, in addition to its own."""
    only_message: tuple[str, ...] = ()
    """The only agents that it may send messages to; empty for all of its organization."""
    only_buses: tuple[str, ...] = ()
    """The only buses that it may read and post to; empty for all."""
    is_read_only: bool = False
    """Whether it changes nothing."""

    def checked(self) -> "Permissions":
        """The permissions with valid names, none of them twice."""
        names = {
            field: _names("bus" if field == "only_buses" else "agent", getattr(self, field))
            for field in ("may_send_to", "may_claim", "may_read", "only_message", "only_buses")
        }
        return msgspec.structs.replace(self, **names)

    def count(self) -> int:
        """How many names they have."""
        fields = (self.may_send_to, self.may_claim, self.may_read, self.only_message, self.only_buses)
        return sum(map(len, fields))

    def shown(self) -> str:
        """The permissions as words of `postroom token create`."""
        words = ["read-only"] if self.is_read_only else []
        for field in ("may_send_to", "may_claim", "may_read", "only_message", "only_buses"):
            option = "only-bus" if field == "only_buses" else field.replace("_", "-")
            words += [f"{option} {name}" for name in getattr(self, field)]
        return ", ".join(words)


NO_PERMISSIONS = Permissions()
MORE_RIGHTS: Final = ("may_send_to", "may_claim", "may_read")
"""Permissions that operators and admins of all organizations have anyway."""


class RegisteredToken(msgspec.Struct, frozen=True):
    """One entry of the file."""

    token_id: str
    token_sha256: str
    role: Role
    org: str
    """Empty for all organizations."""
    agent: str
    """The agent that the token acts for; empty for an operator or admin without a name."""
    created: datetime
    expires: datetime | None = None
    may_send_to: tuple[str, ...] = ()
    """Read from files of earlier versions. `permissions` has them now."""
    rate: float = 0.0
    """Calls a second that the token may make; 0 for the limit of the server."""
    permissions: Permissions = NO_PERMISSIONS
    is_scoped: bool = False
    """Whether its names are those within its organization. Earlier versions gave a name to the first one."""

    @property
    def is_demo(self) -> bool:
        """Whether `postroom up --demo` made it."""
        return self.org.startswith(DEMO_PREFIX) and self.agent.startswith(DEMO_PREFIX)

    def is_expired(self, now: datetime) -> bool:
        """Whether the token is no longer valid."""
        return self.expires is not None and self.expires <= now

    def line(self, now: datetime) -> TokenLine:
        """What a list of tokens shows of it."""
        allowed = self.permissions
        return TokenLine(
            token_id=self.token_id,
            role=self.role,
            org=self.org,
            agent=self.agent,
            created=self.created,
            expires=self.expires,
            valid=not self.is_expired(now),
            rate=self.rate,
            may_send_to=(*self.may_send_to, *allowed.may_send_to),
            may_claim=allowed.may_claim,
            may_read=allowed.may_read,
            only_message=allowed.only_message,
            only_buses=allowed.only_buses,
            read_only=allowed.is_read_only,
        )


class NewToken(NamedTuple):
    """A token that was just made, and the id that names it in commands and logs."""

    token: str
    token_id: str


class Session(msgspec.Struct, frozen=True):
    """One entry of the file of sessions of the live page."""

    secret_sha256: str
    token_sha256: str
    expires: datetime
    org: str = ""


def session_file(data: Path) -> RegistryFile[Session]:
    """The sessions of a data folder."""
    return RegistryFile(data / SESSIONS_FILE_NAME, "sessions", Session)


class _TokenIndex(NamedTuple):
    """The tokens of one version of the file, by checksum."""

    version: tuple[int, int, int]
    by_digest: Mapping[str, RegisteredToken]
    owners: Mapping[str, str]
    """By agent: the organization that owns the plain name."""
    orgs: Mapping[str, AbstractSet[str]]
    """By agent: the organizations with tokens that claim its tasks."""


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    tokens: int = TOKENS_MAX
    of_organization_max: int = 2_500
    permitted_names_max: int = 20_000


class TokenRegistry:
    """The tokens of a data folder. A file changed by another process is read again."""

    limits = TokenLimits()

    def __init__(self, data: Path) -> None:
        self._file = RegistryFile(data / FILE_NAME, "tokens", RegisteredToken)
        self._known = _TokenIndex(self._file.version, {}, {}, {})

    def create(
        self,
        role: str,
        org: str = "",
        agent: str = "",
        expires_s: float | None = None,
        permissions: Permissions = NO_PERMISSIONS,
        rate: float = 0.0,
        maker_id: str = "",
    ) -> NewToken:
        """Make a token. An agent's token names the agent and its organization.

        It ends at the latest with the token `maker_id`, if given.
        """
        permissions = checked_permissions(role, org, agent, expires_s, rate, permissions)
        now = datetime.now(UTC)
        expires = None if expires_s is None else now + timedelta(seconds=_lifetime(expires_s))
        made = NewToken(new_token(), secrets.token_hex(TOKEN_ID_BYTES))
        with self._changing() as tokens:
            self._check_room(tokens, org, permissions)
            if any(agent == token.token_id for token in tokens):  # the name of an operator without an agent
                raise InvalidMessage(f"{agent!r} is the id of a token: choose another name of the agent")
            expires = _earliest(expires, _end_of(tokens, maker_id))
            digest = digest_of(made.token)
            tokens.append(
                RegisteredToken(
                    made.token_id, digest, role, org, agent, now, expires,  # type: ignore[arg-type]
                    rate=rate, permissions=permissions, is_scoped=True,
                )
            )  # fmt: skip
        return made

    def revoke(self, token_id: str) -> None:
        """Remove a token. It is refused from now on."""
        with self._changing() as tokens:
            kept = [token for token in tokens if token.token_id != token_id]
            if len(kept) == len(tokens):
                raise _unknown(tokens, token_id)
            tokens[:] = kept

    def rotate(self, token_id: str, overlap_s: float = 0.0, maker_id: str = "") -> NewToken:
        """Make a token with the same rights. The old one is valid for `overlap_s` more seconds.

        Without an overlap, it is removed. The new one ends at the latest with the token `maker_id`, if given.
        """
        checked_seconds("overlap_s", overlap_s, EXPIRES_S_MAX)
        made = NewToken(new_token(), secrets.token_hex(TOKEN_ID_BYTES))
        now = datetime.now(UTC)
        with self._changing() as tokens:
            maker_end = _end_of(tokens, maker_id)
            for index, old in enumerate(tokens):
                if old.token_id == token_id:
                    end = now + timedelta(seconds=overlap_s)
                    end = end if old.expires is None else min(end, old.expires)
                    expires = None if old.expires is None else now + (old.expires - old.created)
                    expires = _earliest(expires, maker_end)
                    successor = msgspec.structs.replace(
                        old, token_id=made.token_id, token_sha256=digest_of(made.token), created=now,
                        expires=expires,
                    )  # fmt: skip
                    kept = [msgspec.structs.replace(old, expires=end)] if end > now else []
                    if kept:
                        self._check_room(tokens, old.org, old.permissions)
                    tokens[index : index + 1] = [*kept, successor]
                    return made
            raise _unknown(tokens, token_id)

    @property
    def version(self) -> object:
        """Differs when a token was changed, also by another process."""
        return self._file.current_version()

    def list(self) -> "list[RegisteredToken]":
        """All tokens in the order in which they were made. A rotated one is followed by its successor."""
        return [*self._file.read()]

    def orgs_of(self, agent: str) -> AbstractSet[str]:
        """The organizations with tokens that claim its tasks; an empty one for operators of all."""
        return self._read().orgs.get(agent, frozenset())

    def owner(self, agent: str) -> str:
        """The organization that has owned the name of an agent since an earlier version; empty for none."""
        return self._recent().owners.get(agent, "")

    def owned_names(self, org: str) -> Sequence[str]:
        """The names that an organization has owned since an earlier version."""
        return [agent for agent, owner in self._recent().owners.items() if owner == org]

    def keep_owner(self, agent: str, org: str) -> None:
        """Note that an organization owns the plain name of an agent."""
        with self._file.changing_all() as content:
            content.owners[agent] = org

    def _check_room(self, tokens: Sequence[RegisteredToken], org: str, permissions: Permissions) -> None:
        """Refuse a token beyond the limits. Every process reads all tokens again after each change."""
        limits, of_org = self.limits, [token for token in tokens if token.org == org]
        if len(tokens) >= limits.tokens:
            raise InvalidMessage(f"there are {limits.tokens} tokens already, which is the limit")
        if org and len(of_org) >= limits.of_organization_max:
            raise InvalidMessage(
                f"{org!r} has {limits.of_organization_max} tokens already, which is the limit: revoke some"
            )
        named = permissions.count()
        named += named and sum(token.permissions.count() for token in of_org)
        if org and named > limits.permitted_names_max:
            raise InvalidMessage(
                f"the permissions of the tokens of {org!r} would have more than "
                f"{limits.permitted_names_max} names: revoke some"
            )

    @contextmanager
    def _changing(self) -> Iterator[MutableSequence[RegisteredToken]]:
        """The tokens, for a change that is written when the block ends. Records the owners of their names."""
        with self._file.changing_all() as content:
            content.owners.update(_owners(content.entries, content.owners))  # before a token is removed
            yield content.entries

    def find(self, digest: str) -> RegisteredToken | None:
        """The valid token with this checksum. A revoked one is found for `CHECK_EVERY_S` more."""
        token = self._recent().by_digest.get(digest) or self._read().by_digest.get(digest)
        return None if token is None or token.is_expired(datetime.now(UTC)) else token

    def _recent(self) -> _TokenIndex:
        """The tokens as they were a moment ago."""
        known = self._known
        return known if self._file.is_fresh and known.version == self._file.version else self._read()

    def _read(self) -> _TokenIndex:
        found, known = self._file.read_all(), self._known
        if known.version != found.version:
            orgs: dict[str, set[str]] = {}
            for token in found.entries:
                for name in filter(None, (token.agent, *token.permissions.may_claim)):
                    orgs.setdefault(name, set()).add(token.org)
            by_digest = {token.token_sha256: token for token in found.entries}
            owners = _owners(found.entries, found.owners)
            self._known = known = _TokenIndex(found.version, by_digest, owners, orgs)
        return known


def permissions_of(given: CreateToken | TokenLine) -> Permissions:
    """The permissions that a call or an answer names."""
    return Permissions(
        may_send_to=given.may_send_to,
        may_claim=given.may_claim,
        may_read=given.may_read,
        only_message=given.only_message,
        only_buses=given.only_buses,
        is_read_only=given.read_only,
    )


def checked_permissions(
    role: str, org: str, agent: str, expires_s: float | None, rate: float, permissions: Permissions
) -> Permissions:
    """The permissions of a new token without duplicates. Raises what is wrong with its terms."""
    if role not in ROLES:
        raise InvalidMessage(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    if role == "agent" and not (agent and org):
        raise InvalidMessage("the token of an agent needs the agent and its organization")
    for what, name in (("organization", org), ("agent", agent)):
        if name:
            checked_name(what, name)
    if agent == DECISIONS:
        raise InvalidMessage(f"{DECISIONS} is the queue of the harness: choose another name")
    if not 0 <= rate <= RATE_MAX:  # NaN, too
        raise InvalidMessage(f"rate must be from 0 to {RATE_MAX:,.0f} calls a second, not {rate!r}")
    if expires_s is not None:
        _lifetime(expires_s)
    return permissions.checked()


def _owners(tokens: Sequence[RegisteredToken], noted: Mapping[str, str]) -> dict[str, str]:
    """Who owns plain names: as noted, or the first organization that a token of an earlier version names."""
    owners = dict(noted)
    earlier = [token for token in tokens if token.org and not token.is_scoped]
    for token in earlier:
        if token.agent:
            owners.setdefault(token.agent, token.org)
    for token in earlier:
        allowed = token.permissions
        for name in (*token.may_send_to, *allowed.may_send_to, *allowed.may_claim, *allowed.may_read):
            owners.setdefault(name, token.org)
    return owners


def _end_of(tokens: Iterable[RegisteredToken], token_id: str) -> datetime | None:
    """When a token ends; None for never, and for no id."""
    if not token_id:
        return None
    for token in tokens:
        if token.token_id == token_id:
            return token.expires
    raise UnknownToken(token_id)


def _unknown(tokens: Iterable[RegisteredToken], given: str) -> UnknownToken:
    """The error for an id that no token has. It may be a token itself, whose id is in the folder."""
    digest = digest_of(given)
    known_id = next((token.token_id for token in tokens if token.token_sha256 == digest), "")
    return UnknownToken(given, known_id=known_id)


def _earliest(*ends: datetime | None) -> datetime | None:
    return min((end for end in ends if end is not None), default=None)


def _names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(checked_name(what, name) for name in names))
    if len(found) > NAMES_MAX:
        raise InvalidMessage(f"a token names at most {NAMES_MAX} in each permission")
    return found


def _lifetime(expires_s: float) -> float:
    return checked_seconds("expires_s", expires_s, EXPIRES_S_MAX, shortest_s=1.0)


def new_token() -> str:
    """A random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """The checksum of a token, as the files hold it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
