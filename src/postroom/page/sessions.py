"""Sessions of the live page: a token is exchanged for a cookie, and every change needs a second secret.

Rule 1: the file holds the SHA-256 of a session's secret and of its token. Neither can be read from it.
Rule 2: a session ends with its token, at its own end, at sign-out, or when newer sessions need its place. No
        organization ends the sessions of one that has fewer.
Rule 3: the secret against forged requests follows from the secret in the cookie. Only a page of the same
        origin can read it, and a forged request cannot send it.
"""

import hashlib
import hmac
import secrets
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final, NamedTuple

from postroom.server.access.tokens import Session, session_file

SECRET_BYTES: Final = 32
SESSION_S: Final = 12 * 3600
SESSIONS_MAX: Final = 1_000
"""Of all callers together; of the organization that has the most, the oldest one ends first."""
SESSIONS_A_TOKEN_MAX: Final = 20
"""Of one token, so that no token ends the sessions of others."""


class SessionLimits(NamedTuple):
    """How many sessions there may be."""

    all: int = SESSIONS_MAX
    of_token: int = SESSIONS_A_TOKEN_MAX


class Sessions:
    """The sessions of a data folder. They survive a restart of the server."""

    def __init__(self, data: Path, limits: SessionLimits | None = None) -> None:
        self._file = session_file(data)
        self._limits = limits or SessionLimits()

    def begin(self, token_sha256: str, org: str, now: datetime | None = None) -> str:
        """Begin a session and return its secret, which is not stored."""
        now = now or datetime.now(UTC)
        secret = secrets.token_urlsafe(SECRET_BYTES)
        begun = Session(_digest(secret), token_sha256, now + timedelta(seconds=SESSION_S), org)
        with self._file.changing() as sessions:
            live = [*(one for one in sessions if one.expires > now), begun]
            own = [one for one in live if one.token_sha256 == token_sha256]
            for ended in own[: -self._limits.of_token]:
                live.remove(ended)
            while len(live) > self._limits.all:
                [(largest, _)] = Counter(one.org for one in live).most_common(1)
                live.remove(next(one for one in live if one.org == largest))
            sessions[:] = live
        return secret

    def token_of(self, secret: str, now: datetime | None = None) -> str | None:
        """The checksum of the token that a session was begun with; None when there is no such session."""
        now, digest = now or datetime.now(UTC), _digest(secret)
        for session in self._file.read():
            if hmac.compare_digest(session.secret_sha256, digest) and session.expires > now:
                return session.token_sha256
        return None

    def end(self, secret: str) -> None:
        """End a session. An unknown one is ignored."""
        digest = _digest(secret)
        with self._file.changing() as sessions:
            sessions[:] = [one for one in sessions if one.secret_sha256 != digest]


def csrf_of(secret: str) -> str:
    """The secret that every change of a session has to send in a header."""
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()


def is_csrf_of(secret: str, given: str) -> bool:
    """Whether a header has the right secret."""
    return hmac.compare_digest(csrf_of(secret).encode(), given.encode("utf-8", "replace"))


def cookie_name(port: int, *, is_tls: bool) -> str:
    """The name of the cookie. Browsers share cookies between ports, so the port is part of the name."""
    return f"{'__Host-' if is_tls else ''}postroom_{port}"


def cookie(name: str, secret: str, *, is_tls: bool) -> str:
    """The header that sets the cookie; with an empty secret, the one that removes it."""
    age_s = SESSION_S if secret else 0
    secure = "; Secure" if is_tls else ""
    return f"{name}={secret}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"


def secret_in(header: str, name: str) -> str:
    """The secret in the cookies of a request; empty without one."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
