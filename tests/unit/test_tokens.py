"""Tokens of a data folder: made once, found by their checksum, ended by expiry, revocation and rotation."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from postroom.errors import InvalidMessage, InvalidName, StoreDamaged, UnknownToken
from postroom.runtime.agents import Agents
from postroom.runtime.tokens import FILE_NAME, Permissions, Tokens


def expire(folder: Path, token_id: str) -> None:
    """Move the end of a token into the past, as time would."""
    path = folder / FILE_NAME
    content = json.loads(path.read_text())
    for token in content["tokens"]:
        if token["token_id"] == token_id:
            token["expires"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    path.write_text(json.dumps(content))


def test_a_token_identifies_its_agent_role_and_organization(tmp_path: Path) -> None:
    made = Tokens(tmp_path).create(
        "agent", "acme", "triage", permissions=Permissions(may_send_to=("critic",))
    )
    identity = Agents(tmp_path).identify(made.token)
    assert identity is not None
    assert (identity.name, identity.role, identity.org) == ("triage", "agent", "acme")
    assert identity.may_send_to == ("critic",)
    assert identity.token_id == made.token_id
    assert not identity.is_operator


def test_the_file_holds_no_token(tmp_path: Path) -> None:
    made = Tokens(tmp_path).create("admin")
    assert made.token not in (tmp_path / FILE_NAME).read_text()


def test_an_operator_of_one_organization_operates_only_that_one(tmp_path: Path) -> None:
    made = Tokens(tmp_path).create("operator", "acme")
    identity = Agents(tmp_path).identify(made.token)
    assert identity is not None
    assert identity.operates("acme")
    assert not identity.operates("other")
    assert not identity.is_operator


def test_only_an_admin_of_all_organizations_is_an_admin(tmp_path: Path) -> None:
    tokens, agents = Tokens(tmp_path), Agents(tmp_path)
    everywhere = agents.identify(tokens.create("admin").token)
    of_one = agents.identify(tokens.create("admin", "acme").token)
    assert everywhere is not None
    assert of_one is not None
    assert everywhere.is_admin
    assert not of_one.is_admin


def test_an_expired_token_is_refused_and_stays_in_the_list(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    made = tokens.create("operator", expires_s=3600)
    assert Agents(tmp_path).identify(made.token) is not None
    expire(tmp_path, made.token_id)
    assert Agents(tmp_path).identify(made.token) is None
    assert [token.token_id for token in tokens.list()] == [made.token_id]


def test_a_revoked_token_is_refused(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    made = tokens.create("operator")
    tokens.revoke(made.token_id)
    assert Agents(tmp_path).identify(made.token) is None
    with pytest.raises(UnknownToken, match="there is no token"):
        tokens.revoke(made.token_id)


def test_rotation_keeps_the_rights_and_ends_the_old_token(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    old = tokens.create(
        "agent", "acme", "triage", expires_s=3600, permissions=Permissions(may_send_to=("critic",))
    )
    new = tokens.rotate(old.token_id)
    assert Agents(tmp_path).identify(old.token) is None
    identity = Agents(tmp_path).identify(new.token)
    assert identity is not None
    assert (identity.name, identity.org, identity.may_send_to) == ("triage", "acme", ("critic",))
    lifetimes = [token.expires - token.created for token in tokens.list()[1:] if token.expires]
    assert lifetimes == [timedelta(seconds=3600)]


def test_an_overlap_keeps_the_old_token_valid_but_not_longer_than_before(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    old = tokens.create("operator", expires_s=60)
    before = tokens.list()[0].expires
    tokens.rotate(old.token_id, overlap_s=3600)
    assert Agents(tmp_path).identify(old.token) is not None
    assert tokens.list()[0].expires == before
    with pytest.raises(UnknownToken):
        tokens.rotate("missing")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"role": "root"}, "role must be one of agent, operator, admin, not 'root'"),
        ({"role": "agent"}, "the token of an agent needs the agent and its organization"),
        ({"role": "agent", "org": "acme"}, "the token of an agent needs the agent and its organization"),
        ({"role": "operator", "expires_s": 0}, "expires_s must be a number of seconds from 1"),
        ({"role": "operator", "expires_s": float("nan")}, "expires_s must be a number of seconds"),
    ],
)
def test_a_bad_token_gets_one_sentence_and_changes_nothing(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        Tokens(tmp_path).create(**fields)  # type: ignore[arg-type]
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("name", ["a b", "../x", "a\nb", ""])
def test_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises((InvalidName, InvalidMessage)):
        Tokens(tmp_path).create("agent", "acme", name)


def test_a_damaged_file_refuses_every_token_and_is_not_overwritten(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    made = tokens.create("operator")
    (tmp_path / FILE_NAME).write_text('{"tokens": [{"token_id": 1}]}')
    with pytest.raises(StoreDamaged, match="is not a list of tokens"):
        Agents(tmp_path).identify(made.token)
    with pytest.raises(StoreDamaged):
        tokens.create("operator")
    assert (tmp_path / FILE_NAME).read_text() == '{"tokens": [{"token_id": 1}]}'
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(StoreDamaged, match="it has no such list"):
        Tokens(tmp_path).list()


def test_the_token_of_an_agent_that_is_registered_has_its_permissions_too(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("planner", "http://127.0.0.1:9001", may_send_to=["coder"])
    made = agents.tokens.create("agent", "acme", "planner", permissions=Permissions(may_send_to=("critic",)))
    identity = agents.identify(made.token)
    assert identity is not None
    assert identity.url == "http://127.0.0.1:9001"
    assert identity.may_send_to == ("coder", "critic")


def test_entries_of_the_file_can_be_read_by_a_program(tmp_path: Path) -> None:
    made = Tokens(tmp_path).create("agent", "acme", "triage")
    content = msgspec.json.decode((tmp_path / FILE_NAME).read_bytes())
    assert content["tokens"][0]["token_id"] == made.token_id
