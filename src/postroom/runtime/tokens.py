"""The tokens of a data folder that can expire, be revoked and be rotated.

Rule 1: a token is shown once, when it is made. The file holds only its SHA-256.
Rule 2: an expired token is refused like an unknown one. It stays in the list until it is revoked.
"""

import hashlib
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from postroom.contracts.tasks import DECISIONS
from postroom.core.names import checked_name
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownToken
from postroom.runtime.registry_file import RegistryFile
from postroom.settings import RATE_MAX

FILE_NAME = "tokens.json"
SESSIONS_FILE_NAME = "sessions.json"
TOKEN_PREFIX = "pr_"  # noqa: S105 - a prefix, and no token
TOKEN_BYTES = 32
TOKEN_CHARS = len(TOKEN_PREFIX) + 43
TOKEN_ID_BYTES = 6
TOKENS_MAX = 10_000
NAMES_MAX = 1_000  # in one permission of a token
EXPIRES_S_MAX = 10 * 365 * 86_400.0

Role: TypeAlias = Literal["agent", "operator", "admin"]
ROLES: Final = get_args(Role)


class Permissions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a token may do, beside what its role allows, and what it may not do."""

    may_send_to: tuple[str, ...] = ()
    """Agents that it may send tasks to, beside those of its agent."""
    may_claim: tuple[str, ...] = ()
    """Agents whose tasks it may claim and end, beside its own."""
    may_read: tuple[str, ...] = ()
    """Agents whose tasks it may read, beside its own."""
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

    def shown(self) -> str:
        """The permissions as words of `postroom token create`."""
        words = ["read-only"] if self.is_read_only else []
        for field in ("may_send_to", "may_claim", "may_read", "only_message", "only_buses"):
            words += [f"{field.replace('_', '-')} {name}" for name in getattr(self, field)]
        return ", ".join(words)


NO_PERMISSIONS = Permissions()


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

    def is_expired(self, now: datetime) -> bool:
        """Whether the token is no longer valid."""
        return self.expires is not None and self.expires <= now


class NewToken(NamedTuple):
    """A token that was just made, and the id that names it in commands and logs."""

    token: str
    token_id: str


class Session(msgspec.Struct, frozen=True):
    """One entry of the file of sessions of the live page."""

    secret_sha256: str
    token_sha256: str
    expires: datetime


def session_file(data: Path) -> RegistryFile[Session]:
    """The sessions of a data folder."""
    return RegistryFile(data / SESSIONS_FILE_NAME, "sessions", Session)


class Tokens:
    """The tokens of a data folder. A file changed by another process is read again."""

    def __init__(self, data: Path) -> None:
        self._file = RegistryFile(data / FILE_NAME, "tokens", RegisteredToken)
        self._version = self._file.version
        self._by_digest: dict[str, RegisteredToken] = {}
        self._first_orgs: dict[str, str] = {}
        """By agent: the organization that was the first to have a token of this name."""

    def create(
        self,
        role: str,
        org: str = "",
        agent: str = "",
        expires_s: float | None = None,
        permissions: Permissions = NO_PERMISSIONS,
        rate: float = 0.0,
    ) -> NewToken:
        """Make a token. An agent's token names the agent and its organization."""
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
            raise InvalidMessage(f"rate must be from 0 to {RATE_MAX:g} calls a second, not {rate!r}")
        permissions = permissions.checked()
        now = datetime.now(UTC)
        expires = None if expires_s is None else now + timedelta(seconds=_lifetime(expires_s))
        made = NewToken(new_token(), secrets.token_hex(TOKEN_ID_BYTES))
        with self._file.changing() as tokens:
            if len(tokens) >= TOKENS_MAX:
                raise InvalidMessage(f"there are {TOKENS_MAX} tokens already, which is the limit")
            digest = digest_of(made.token)
            tokens.append(
                RegisteredToken(
                    made.token_id, digest, role, org, agent, now, expires,  # type: ignore[arg-type]
                    rate=rate, permissions=permissions,
                )
            )  # fmt: skip
        return made

    def revoke(self, token_id: str) -> None:
        """Remove a token. It is refused from now on."""
        with self._file.changing() as tokens:
            kept = [token for token in tokens if token.token_id != token_id]
            if len(kept) == len(tokens):
                raise UnknownToken(token_id)
            tokens[:] = kept

    def rotate(self, token_id: str, overlap_s: float = 0.0) -> NewToken:
        """Make a token with the same rights. The old one is valid for `overlap_s` more seconds."""
        checked_seconds("overlap_s", overlap_s, EXPIRES_S_MAX)
        made = NewToken(new_token(), secrets.token_hex(TOKEN_ID_BYTES))
        now = datetime.now(UTC)
        with self._file.changing() as tokens:
            for index, old in enumerate(tokens):
                if old.token_id == token_id:
                    end = now + timedelta(seconds=overlap_s)
                    end = end if old.expires is None else min(end, old.expires)
                    tokens[index] = msgspec.structs.replace(old, expires=end)
                    lifetime = None if old.expires is None else now + (old.expires - old.created)
                    # Beside the old one, which may decide whose tasks those of its name are.
                    tokens.insert(
                        index + 1,
                        msgspec.structs.replace(
                            old, token_id=made.token_id, token_sha256=digest_of(made.token), created=now,
                            expires=lifetime,
                        ),
                    )  # fmt: skip
                    return made
            raise UnknownToken(token_id)

    def list(self) -> "list[RegisteredToken]":
        """All tokens in the order in which they were made. A rotated one is followed by its successor."""
        return [*self._file.read()]

    def names(self, agent: str) -> bool:
        """Whether a token names this agent."""
        return any(token.agent == agent for token in self._file.read())

    def first_org(self, agent: str) -> str:
        """The first organization with a token of this agent, as of the last `find`; empty for none."""
        return self._first_orgs.get(agent, "")

    def find(self, digest: str) -> RegisteredToken | None:
        """The valid token with this checksum. A revoked one is found for `CHECK_EVERY_S` more."""
        if not self._file.is_fresh or self._version != self._file.version or digest not in self._by_digest:
            tokens = self._file.read()
            if self._version != self._file.version:
                self._version = self._file.version
                self._by_digest = {token.token_sha256: token for token in tokens}
                self._first_orgs = {token.agent: token.org for token in reversed(tokens) if token.org}
        token = self._by_digest.get(digest)
        return None if token is None or token.is_expired(datetime.now(UTC)) else token


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
