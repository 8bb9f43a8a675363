"""Sessions of the live page: their ends, their bound, and the secret against forged requests."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from postroom.page.sessions import (
    SESSION_S,
    SESSIONS_MAX,
    SessionLimits,
    Sessions,
    cookie,
    cookie_name,
    csrf_of,
    is_csrf_of,
    secret_in,
)
from postroom.server.access.tokens import SESSIONS_FILE_NAME, Session, session_file

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_session_knows_its_token_until_its_end(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    secret = sessions.begin("digest", "acme", NOW)
    assert sessions.token_of(secret, NOW) == "digest"
    assert Sessions(tmp_path).token_of(secret, NOW) == "digest"  # after a restart
    assert sessions.token_of(secret, NOW + timedelta(seconds=SESSION_S)) is None
    assert sessions.token_of("other", NOW) is None
    assert secret not in (tmp_path / SESSIONS_FILE_NAME).read_text()


def test_a_session_ends_at_sign_out(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    first, second = sessions.begin("a", "acme", NOW), sessions.begin("b", "acme", NOW)
    sessions.end(first)
    sessions.end("unknown")
    assert (sessions.token_of(first, NOW), sessions.token_of(second, NOW)) == (None, "b")


def test_sessions_are_bounded_and_the_oldest_ends_first(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    oldest, second = sessions.begin("a", "acme", NOW), sessions.begin("b", "acme", NOW)
    file = session_file(tmp_path)
    with file.changing() as entries:
        entries += [Session(str(n), "c", NOW + timedelta(hours=1), "acme") for n in range(SESSIONS_MAX - 2)]
    newest = sessions.begin("d", "acme", NOW)
    assert len(file.read()) == SESSIONS_MAX
    found = [sessions.token_of(secret, NOW) for secret in (oldest, second, newest)]
    assert found == [None, "b", "d"]


def test_one_token_does_not_end_the_sessions_of_other_callers(tmp_path: Path) -> None:
    found = Sessions(tmp_path, SessionLimits(all=5, of_token=3))
    operator = found.begin("operator", "")
    secrets = [found.begin("agent", "acme") for _ in range(10)]
    assert found.token_of(operator) == "operator"
    assert [found.token_of(secret) for secret in secrets] == [None] * 7 + ["agent"] * 3


def test_one_organization_does_not_end_the_sessions_of_other_callers(tmp_path: Path) -> None:
    found = Sessions(tmp_path, SessionLimits(all=5))
    others = [found.begin("a", "acme"), found.begin("b", "")]
    flood = [found.begin(f"token-{number}", "flood") for number in range(10)]
    assert [found.token_of(secret) for secret in others] == ["a", "b"]
    assert [found.token_of(secret) for secret in flood] == [None] * 7 + ["token-7", "token-8", "token-9"]


def test_the_secret_against_forged_requests_belongs_to_one_session() -> None:
    assert is_csrf_of("secret", csrf_of("secret"))
    assert not is_csrf_of("secret", csrf_of("other"))
    assert not is_csrf_of("secret", "")
    assert not is_csrf_of("secret", "\udce9")


def test_the_cookie_is_strict_and_secure_over_tls() -> None:
    plain, secure = cookie_name(8800, is_tls=False), cookie_name(443, is_tls=True)
    assert cookie(plain, "s", is_tls=False) == (
        f"postroom_8800=s; Path=/; Max-Age={SESSION_S}; HttpOnly; SameSite=Strict"
    )
    assert cookie(secure, "", is_tls=True) == (
        "__Host-postroom_443=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict; Secure"
    )
    assert secret_in("a=b; postroom_8800=s; postroom_8801=t", plain) == "s"
    assert secret_in("", plain) == ""
    assert secret_in("postroom_8801=t; \x00", plain) == ""
