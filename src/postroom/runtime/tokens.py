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

from postroom.core.names import checked_name
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownToken
from postroom.runtime.registry_file import RegistryFile
from postroom.settings import RATE_MAX

FILE_NAME = "tokens.json"
TOKEN_PREFIX = "pr_"  # noqa: S105 - a prefix, and no token
TOKEN_BYTES = 32
TOKEN_CHARS = len(TOKEN_PREFIX) + 43
TOKEN_ID_BYTES = 6
TOKENS_MAX = 10_000
EXPIRES_S_MAX = 10 * 365 * 86_400.0

Role: TypeAlias = Literal["agent", "operator", "admin"]
ROLES: Final = get_args(Role)


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
    """Agents that the token may send tasks to, beside those of its agent."""
    rate: float = 0.0
    """Calls a second that the token may make; 0 for the limit of the server."""

    def is_expired(self, now: datetime) -> bool:
        """Whether the token is no longer valid."""
        return self.expires is not None and self.expires <= now


class NewToken(NamedTuple):
    """A token that was just made, and the id that names it in commands and logs."""

    token: str
    token_id: str


class Tokens:
    """The tokens of a data folder. A file changed by another process is read again."""

    def __init__(self, data: Path) -> None:
        self._file = RegistryFile(data / FILE_NAME, "tokens", RegisteredToken)
        self._version = self._file.version
        self._by_digest: dict[str, RegisteredToken] = {}

    def create(
        self,
        role: str,
        org: str = "",
        agent: str = "",
        expires_s: float | None = None,
        may_send_to: Iterable[str] = (),
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
        if not 0 <= rate <= RATE_MAX:  # NaN, too
            raise InvalidMessage(f"rate must be from 0 to {RATE_MAX:g} calls a second, not {rate!r}")
        targets = tuple(dict.fromkeys(checked_name("agent", name) for name in may_send_to))
        now = datetime.now(UTC)
        expires = None if expires_s is None else now + timedelta(seconds=_lifetime(expires_s))
        made = NewToken(new_token(), secrets.token_hex(TOKEN_ID_BYTES))
        with self._file.changing() as tokens:
            if len(tokens) >= TOKENS_MAX:
                raise InvalidMessage(f"there are {TOKENS_MAX} tokens already, which is the limit")
            digest = digest_of(made.token)
            tokens.append(
                RegisteredToken(made.token_id, digest, role, org, agent, now, expires, targets, rate)  # type: ignore[arg-type]
            )
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
                    tokens.append(
                        msgspec.structs.replace(
                            old, token_id=made.token_id, token_sha256=digest_of(made.token), created=now,
                            expires=lifetime,
                        )
                    )  # fmt: skip
                    return made
            raise UnknownToken(token_id)

    def list(self) -> "list[RegisteredToken]":
        """All tokens in the order in which they were made."""
        return [*self._file.read()]

    def find(self, digest: str) -> RegisteredToken | None:
        """The valid token with this checksum. A revoked one is found for `CHECK_EVERY_S` more."""
        if not self._file.is_fresh or self._version != self._file.version or digest not in self._by_digest:
            tokens = self._file.read()
            self._version = self._file.version
            self._by_digest = {token.token_sha256: token for token in tokens}
        token = self._by_digest.get(digest)
        return None if token is None or token.is_expired(datetime.now(UTC)) else token


def _lifetime(expires_s: float) -> float:
    return checked_seconds("expires_s", expires_s, EXPIRES_S_MAX, shortest_s=1.0)


def new_token() -> str:
    """A random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """The checksum of a token, as the files hold it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
