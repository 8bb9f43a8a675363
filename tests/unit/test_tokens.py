"""Tokens of a data folder: made once, found by their checksum, ended by expiry, revocation and rotation."""

import json
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.core.gate import Owner, permit
from postroom.errors import InvalidMessage, InvalidName, StoreDamaged, UnknownToken
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import FILE_NAME, Permissions, TokenLimits, TokenRegistry, digest_of


def expire(folder: Path, token_id: str) -> None:
    """Move the end of a token into the past, as time would."""
    path = folder / FILE_NAME
    content = json.loads(path.read_text())
    del content["crc32"]
    for token in content["tokens"]:
        if token["token_id"] == token_id:
            token["expires"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    path.write_text(json.dumps(content))


def test_a_token_identifies_its_agent_role_and_organization(tmp_path: Path) -> None:
    made = TokenRegistry(tmp_path).create(
        "agent", "acme", "triage", permissions=Permissions(may_send_to=("critic",))
    )
    identity = Agents(tmp_path).identify(made.token)
    assert identity is not None
    assert (identity.name, identity.role, identity.org) == ("triage", "agent", "acme")
    assert identity.may_send_to == ("critic",)
    assert identity.token_id == made.token_id
    assert not identity.is_operator


def test_the_file_holds_no_token(tmp_path: Path) -> None:
    made = TokenRegistry(tmp_path).create("admin")
    assert made.token not in (tmp_path / FILE_NAME).read_text()


def test_an_operator_of_one_organization_operates_only_that_one(tmp_path: Path) -> None:
    made = TokenRegistry(tmp_path).create("operator", "acme")
    identity = Agents(tmp_path).identify(made.token)
    assert identity is not None
    assert permit(identity, "engine.pause", Owner("acme"))
    assert not permit(identity, "engine.pause", Owner("other"))
    assert not identity.is_operator


def test_an_admin_administers_its_organization_or_all_of_them(tmp_path: Path) -> None:
    tokens, agents = TokenRegistry(tmp_path), Agents(tmp_path)
    everywhere = agents.identify(tokens.create("admin").token)
    of_one = agents.identify(tokens.create("admin", "acme").token)
    assert everywhere is not None
    assert of_one is not None
    orgs = ("", "acme", "other")
    assert [permit(everywhere, "token.create", Owner(org)) for org in orgs] == [True, True, True]
    assert [permit(of_one, "token.create", Owner(org)) for org in orgs] == [False, True, False]


def test_an_expired_token_is_refused_and_stays_in_the_list(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    made = tokens.create("operator", expires_s=3600)
    assert Agents(tmp_path).identify(made.token) is not None
    expire(tmp_path, made.token_id)
    assert Agents(tmp_path).identify(made.token) is None
    assert [token.token_id for token in tokens.list()] == [made.token_id]


def test_a_revoked_token_is_refused(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    made = tokens.create("operator")
    tokens.revoke(made.token_id)
    assert Agents(tmp_path).identify(made.token) is None
    with pytest.raises(UnknownToken, match="there is no token"):
        tokens.revoke(made.token_id)


def test_a_slow_reader_does_not_keep_a_token_that_was_revoked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, writer = TokenRegistry(tmp_path), TokenRegistry(tmp_path)
    made = writer.create("agent", "acme", "ann")
    read = known._file.read_all

    def revoked_meanwhile() -> Any:
        found = read()
        monkeypatch.undo()
        writer.revoke(made.token_id)
        other = threading.Thread(target=known.list)
        other.start()
        other.join()
        return found

    monkeypatch.setattr(known._file, "read_all", revoked_meanwhile)
    known.orgs_of("ann")
    assert known.find(digest_of(made.token)) is None


def test_rotation_keeps_the_rights_and_ends_the_old_token(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    old = tokens.create(
        "agent", "acme", "triage", expires_s=3600, permissions=Permissions(may_send_to=("critic",))
    )
    new = tokens.rotate(old.token_id)
    assert Agents(tmp_path).identify(old.token) is None
    identity = Agents(tmp_path).identify(new.token)
    assert identity is not None
    assert (identity.name, identity.org, identity.may_send_to) == ("triage", "acme", ("critic",))
    lifetimes = [token.expires - token.created for token in tokens.list() if token.expires]
    assert lifetimes == [timedelta(seconds=3600)]


def test_an_overlap_keeps_the_old_token_valid_but_not_longer_than_before(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    old = tokens.create("operator", expires_s=60)
    before = tokens.list()[0].expires
    tokens.rotate(old.token_id, overlap_s=3600)
    assert Agents(tmp_path).identify(old.token) is not None
    assert tokens.list()[0].expires == before
    with pytest.raises(UnknownToken):
        tokens.rotate("missing")


def test_a_rotation_keeps_no_entry_that_has_ended(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    old, expired = tokens.create("operator"), tokens.create("operator", expires_s=60)
    expire(tmp_path, expired.token_id)
    made = [tokens.rotate(old.token_id), tokens.rotate(expired.token_id, overlap_s=60)]
    assert [token.token_id for token in tokens.list()] == [one.token_id for one in made]


def test_a_rotation_with_an_overlap_is_refused_at_the_limit(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    tokens.limits = TokenLimits(tokens=1)
    old = tokens.create("operator")
    with pytest.raises(InvalidMessage, match="there are 1 tokens already"):
        tokens.rotate(old.token_id, overlap_s=60)
    assert [(token.token_id, token.expires) for token in tokens.list()] == [(old.token_id, None)]
    tokens.rotate(old.token_id)
    assert len(tokens.list()) == 1


def test_tokens_of_an_organization_leave_room_for_others(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    tokens.limits = TokenLimits(of_organization_max=2)
    made = [tokens.create("agent", "acme", name) for name in ("ada", "ben")]
    with pytest.raises(InvalidMessage, match="'acme' has 2 tokens already, which is the limit"):
        tokens.create("agent", "acme", "cleo")
    with pytest.raises(InvalidMessage, match="'acme' has 2 tokens already"):
        tokens.rotate(made[0].token_id, overlap_s=60)
    tokens.create("agent", "other", "ada")
    tokens.create("operator")
    tokens.revoke(made[0].token_id)
    tokens.create("agent", "acme", "cleo")


def test_the_permissions_of_an_organization_name_a_limited_number(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    tokens.limits = TokenLimits(permitted_names_max=5)
    three = Permissions(only_message=("a", "b"), only_buses=("c",))
    made = tokens.create("agent", "acme", "ada", permissions=three)
    tokens.create("agent", "other", "ben", permissions=three)
    tokens.create("agent", "acme", "cleo")
    with pytest.raises(InvalidMessage, match="the tokens of 'acme' would have more than 5 names"):
        tokens.create("agent", "acme", "dan", permissions=three)
    with pytest.raises(InvalidMessage, match="would have more than 5 names"):
        tokens.rotate(made.token_id, overlap_s=60)
    tokens.rotate(made.token_id)


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
def test_a_bad_token_gets_a_one_line_error_and_changes_nothing(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        TokenRegistry(tmp_path).create(**fields)  # type: ignore[arg-type]
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("name", ["a b", "../x", "a\nb", ""])
def test_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises((InvalidName, InvalidMessage)):
        TokenRegistry(tmp_path).create("agent", "acme", name)


def test_a_damaged_file_refuses_every_token_and_is_not_overwritten(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    made = tokens.create("operator")
    (tmp_path / FILE_NAME).write_text('{"tokens": [{"token_id": 1}]}')
    with pytest.raises(StoreDamaged, match="is not a list of tokens"):
        Agents(tmp_path).identify(made.token)
    with pytest.raises(StoreDamaged):
        tokens.create("operator")
    assert (tmp_path / FILE_NAME).read_text() == '{"tokens": [{"token_id": 1}]}'
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(StoreDamaged, match="it has no such list"):
        TokenRegistry(tmp_path).list()


def test_every_changed_byte_of_the_file_is_found(tmp_path: Path) -> None:
    TokenRegistry(tmp_path).create(
        "agent", "acme", "triage", permissions=Permissions(may_send_to=("critic",))
    )
    path = tmp_path / FILE_NAME
    text = path.read_bytes()
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(StoreDamaged):
            TokenRegistry(tmp_path).list()
    path.write_bytes(text)
    assert TokenRegistry(tmp_path).list()


def test_a_changed_file_is_used_after_its_checksum_is_removed(tmp_path: Path) -> None:
    TokenRegistry(tmp_path).create("agent", "acme", "triage")
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace("triage", "tsiage"))
    with pytest.raises(StoreDamaged, match="remove its field crc32 to use it"):
        TokenRegistry(tmp_path).list()
    path.write_text(re.sub(r',\s*"crc32": \d+', "", path.read_text()))
    [token] = TokenRegistry(tmp_path).list()
    assert token.agent == "tsiage"
    TokenRegistry(tmp_path).create("agent", "acme", "triage")
    assert "crc32" in path.read_text()


def test_the_token_of_an_agent_that_is_registered_has_its_permissions_too(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("planner", "http://127.0.0.1:9001", may_send_to=["coder"])
    made = agents.tokens.create("agent", "acme", "planner", permissions=Permissions(may_send_to=("critic",)))
    other = agents.tokens.create("agent", "other", "planner")
    agents.adopt("planner", "acme")
    assert (queue(tmp_path, made.token), queue(tmp_path, other.token)) == ("planner", "@other:planner")
    identity = agents.identify(made.token)
    assert identity is not None
    assert identity.url == "http://127.0.0.1:9001"
    assert identity.may_send_to == ("coder", "critic")


def test_entries_of_the_file_can_be_read_by_a_program(tmp_path: Path) -> None:
    made = TokenRegistry(tmp_path).create("agent", "acme", "triage")
    content = msgspec.json.decode((tmp_path / FILE_NAME).read_bytes())
    assert content["tokens"][0]["token_id"] == made.token_id


# ---- whose tasks those of a name are -------------------------------------------------------------


def queue(folder: Path, token: str) -> str:
    agents = Agents(folder)
    identity = agents.identify(token)
    assert identity is not None
    return agents.queue_of(identity.org, identity.name)


def as_earlier_version(folder: Path, owners: dict[str, str]) -> None:
    """Write the file as a version did in which the first organization of a name had all its tasks."""
    path = folder / FILE_NAME
    entries = [{**entry, "is_scoped": False} for entry in json.loads(path.read_text())["tokens"]]
    path.write_text(json.dumps({"tokens": entries, "owners": owners}))


def test_a_name_is_one_within_its_organization(tmp_path: Path) -> None:
    tokens = TokenRegistry(tmp_path)
    first, second = tokens.create("agent", "acme", "bot"), tokens.create("agent", "evil", "bot")
    assert queue(tmp_path, first.token) == "@acme:bot"
    assert queue(tmp_path, second.token) == "@evil:bot"


@pytest.mark.parametrize("owners", [{"bot": "acme"}, {}])  # the oldest versions noted none
def test_a_name_of_an_earlier_version_stays_with_its_organization(
    tmp_path: Path, owners: dict[str, str]
) -> None:
    tokens = TokenRegistry(tmp_path)
    old = tokens.create("agent", "acme", "bot", permissions=Permissions(may_claim=("pool",)))
    foreign = tokens.create("agent", "evil", "bot")
    as_earlier_version(tmp_path, owners)
    assert (queue(tmp_path, old.token), queue(tmp_path, foreign.token)) == ("bot", "@evil:bot")
    assert Agents(tmp_path).queue_of("acme", "pool") == "pool"
    tokens.revoke(old.token_id)
    again, pool = tokens.create("agent", "acme", "bot"), tokens.create("agent", "evil", "pool")
    assert (queue(tmp_path, again.token), queue(tmp_path, foreign.token)) == ("bot", "@evil:bot")
    assert queue(tmp_path, pool.token) == "@evil:pool"


def test_every_operator_without_an_agent_has_the_rights_of_its_token(
    tmp_path: Path,
) -> None:
    TokenRegistry(tmp_path).create("operator", "acme")
    second = TokenRegistry(tmp_path).create("operator", "globex", permissions=Permissions(may_read=("ada",)))
    assert queue(tmp_path, second.token) == f"@globex:{second.token_id}"


def test_name_of_a_removed_agent_stays_with_its_organization(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("bot", org="acme")
    foreign = agents.tokens.create("agent", "evil", "bot")
    agents.remove("bot")
    again = agents.tokens.create("agent", "acme", "bot")
    assert (queue(tmp_path, again.token), queue(tmp_path, foreign.token)) == ("bot", "@evil:bot")
    for org in ("", "evil"):
        with pytest.raises(InvalidMessage, match="the name 'bot' belongs to organization 'acme'"):
            agents.add("bot", org=org)


def test_an_agent_is_not_registered_under_a_name_that_tokens_have(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.tokens.create("agent", "acme", "bot")
    with pytest.raises(InvalidMessage, match="whose tasks are those of @acme:bot"):
        agents.add("bot", org="acme")
    agents.add("bot", org="other")
    assert (agents.queue_of("acme", "bot"), agents.queue_of("other", "bot")) == ("@acme:bot", "bot")
