"""`postroom token` with `--url`: the tokens of a running `postroom up`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import Result, isolate, postroom
from tests.integration.ups import Running, running
from tests.waiting import until


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("token-url") / "run"


@pytest.fixture(scope="module")
def up(data: Path) -> Iterator[Running]:
    with running(data, "--no-audit", "--no-mail") as found:
        yield found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def remote(up: Running, *words: object, token: str | None = None) -> Result:
    return postroom("token", *words, "--url", up.http, "--token", token or up.token)


def is_valid(up: Running, token: str) -> bool:
    return up.get("/whoami", token)[0] == 200


def test_a_token_is_made_listed_rotated_and_revoked_at_a_running_server(up: Running, data: Path) -> None:
    wish = ("--role", "agent", "--org", "acme", "--agent", "ada", "--rate", 5, "--expires-s", 3600)
    rights = ("--may-read", "bob", "--only-message", "lead", "--only-bus", "team", "--read-only")
    made = remote(up, "create", *wish, *rights)
    assert (made.code, made.errors) == (0, "")
    assert list(made.line) == ["token", "token_id", "role", "org", "agent"]
    assert (made.line["role"], made.line["org"], made.line["agent"]) == ("agent", "acme", "ada")
    assert is_valid(up, made.line["token"])
    assert remote(up, "list").lines == postroom("token", "list", "--data", data).lines
    line = next(one for one in remote(up, "list").lines if one["token_id"] == made.line["token_id"])
    assert line["permissions"] == "read-only, may-read bob, only-message lead, only-bus team"
    assert (line["rate"], line["valid"]) == (5.0, True)
    first = next(one for one in remote(up, "list").lines if one["role"] == "admin")
    assert (first["expires"], first["rate"]) == (None, None)
    turned = remote(up, "rotate", made.line["token_id"])
    assert (turned.code, list(turned.line)) == (0, ["token", "token_id", "replaces"])
    assert turned.line["replaces"] == made.line["token_id"]
    assert is_valid(up, turned.line["token"])
    until(lambda: not is_valid(up, made.line["token"]))
    ended = remote(up, "revoke", turned.line["token_id"])
    assert ended.line == {"token_id": turned.line["token_id"], "revoked": True}
    until(lambda: not is_valid(up, turned.line["token"]))


def test_bare_token_is_printed_and_admin_token_comes_from_environment(
    up: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert up.token is not None
    monkeypatch.setenv("POSTROOM_TOKEN", up.token)
    made = postroom("token", "create", "--url", up.http, "--role", "operator", "--token-only")
    assert is_valid(up, made.out.strip())
    token_id = remote(up, "list").lines[-1]["token_id"]
    turned = postroom("token", "rotate", token_id, "--url", up.http, "--token-only", "--overlap-s", 60)
    assert is_valid(up, turned.out.strip())
    assert is_valid(up, made.out.strip())


def test_an_admin_of_one_organization_makes_tokens_of_that_one(up: Running, data: Path) -> None:
    admin = TokenRegistry(data).create("admin", "globex").token
    made = remote(up, "create", "--role", "agent", "--agent", "gus", token=admin)
    assert made.line["org"] == "globex"
    assert {one["org"] for one in remote(up, "list", token=admin).lines} == {"globex"}
    refused = remote(up, "create", "--role", "admin", "--org", "acme", token=admin)
    assert (refused.code, "for its organization only" in refused.error) == (1, True)


def test_a_token_instead_of_its_id_is_not_repeated(up: Running, data: Path) -> None:
    made = TokenRegistry(data).create("operator")
    for verb in ("revoke", "rotate"):
        local, over_http = postroom("token", verb, made.token, "--data", data), remote(up, verb, made.token)
        assert (local.code, over_http.code, local.raw, over_http.raw) == (1, 1, b"", b"")
        assert local.error == f"postroom: this is a token, not the id of a token: its id is {made.token_id}"
        assert "this is a token, not the id of a token: `postroom token list`" in over_http.error
        unknown = postroom("token", verb, "pr_" + "x" * 43, "--data", data)
        assert unknown.error == over_http.error
    assert made.token_id in [known.token_id for known in TokenRegistry(data).list()]


@pytest.mark.parametrize(
    "words",
    [
        ("revoke", "3fa1dee7a434"),
        ("rotate", "3fa1dee7a434"),
        ("rotate", "a/../b"),
        ("create", "--role", "agent", "--agent", "ada"),
        ("create", "--role", "admin", "--agent", "a/b"),
        ("create", "--role", "admin", "--org", "a b"),
        ("create", "--role", "operator", "--may-read", "ada"),
        ("create", "--role", "agent", "--org", "acme", "--agent", "x", "--may-read", "a/b"),
        ("create", "--role", "operator", "--expires-s", "0.5"),
        ("create", "--role", "agent", "--org", "acme", "--agent", "harness.decisions"),
    ],
)
def test_errors_are_those_of_the_folder(up: Running, data: Path, words: tuple[str, ...]) -> None:
    local, over_http = postroom("token", *words, "--data", data), remote(up, *words)
    assert (over_http.code, over_http.raw, over_http.error) == (local.code, b"", local.error)


def test_callers_without_permission_are_refused_with_a_one_line_error(up: Running, data: Path) -> None:
    operator = TokenRegistry(data).create("operator").token
    for words in (("list",), ("revoke", "x"), ("create", "--role", "admin"), ("rotate", "x")):
        assert "admin" in remote(up, *words, token=operator).error
        unknown = remote(up, *words, token="pr_" + "x" * 43)
        assert (unknown.code, unknown.raw, "token" in unknown.error) == (1, b"", True)
        assert postroom("token", *words).code == 2
        assert "--url needs a token" in postroom("token", *words, "--url", up.http).error
        assert "two places" in remote(up, *words, "--data", data).error
        assert "no effect" in postroom("token", *words, "--data", data, "--token", "pr_x").error
    nobody = postroom("token", "create", "--role", "admin", "--url", "http://127.0.0.1:1", "--token", "pr_x")
    assert (nobody.code, "cannot reach http://127.0.0.1:1" in nobody.error) == (1, True)
