import hashlib
import json
import re
import stat
import threading
from pathlib import Path

import pytest

from postroom.contracts.tasks.tasks import DECISIONS
from postroom.errors import AgentExists, InvalidMessage, InvalidName, StoreDamaged, UnknownAgent
from postroom.server.access.registry import FILE_NAME, MAY_SEND_TO_MAX, Agents, Identity


def test_a_token_identifies_its_owner(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    token = agents.add("triage", "http://10.0.0.7:9000")
    assert agents.identify(token) == Identity("triage", "agent", "http://10.0.0.7:9000")
    assert agents.identify(agents.add("boss", role="operator")) == Identity("boss", "operator", None)


def test_a_token_has_256_bits(tmp_path: Path) -> None:
    tokens = [Agents(tmp_path).add(f"agent-{number}") for number in range(10)]
    assert len(set(tokens)) == 10
    assert all(re.fullmatch(r"pr_[A-Za-z0-9_-]{43}", token) for token in tokens)


def test_the_file_holds_the_hash_and_is_private(tmp_path: Path) -> None:
    token = Agents(tmp_path).add("triage")
    path = tmp_path / FILE_NAME
    text = path.read_text()
    assert token not in text
    assert token.removeprefix("pr_") not in text
    [line] = json.loads(text)["agents"]
    assert line["token_sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert {"name", "role", "url", "created"} < set(line)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("token", ["", "pr_", "x" * 46, "pr_" + "A" * 43, "pr_" + "ä" * 43, "\udcff" * 46])
def test_unknown_tokens_are_refused(tmp_path: Path, token: str) -> None:
    agents = Agents(tmp_path)
    assert agents.identify(token) is None
    agents.add("triage")
    assert agents.identify(token) is None


def test_another_process_adds_and_removes(tmp_path: Path) -> None:
    server, command = Agents(tmp_path), Agents(tmp_path)
    first = command.add("first")
    assert server.identify(first) is not None
    second = command.add("second")
    assert server.identify(second) is not None
    command.remove("first")
    assert [agent.name for agent in server.list()] == ["second"]
    assert server.identify(first) is None
    assert server.identify(second) is not None


def test_a_removed_agent_gets_another_token_when_added_again(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    before = agents.add("triage")
    agents.remove("triage")
    after = agents.add("triage")
    assert agents.identify(before) is None
    assert agents.identify(after) is not None


def test_a_name_can_be_registered_once(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    token = agents.add("triage")
    with pytest.raises(AgentExists, match="already"):
        agents.add("triage")
    assert agents.identify(token) is not None
    with pytest.raises(UnknownAgent, match="no agent"):
        agents.remove("nobody")


def test_the_queue_of_decisions_cannot_be_registered(tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="harness"):
        Agents(tmp_path).add(DECISIONS)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", ".hidden"])
def test_an_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidName):
        Agents(tmp_path).add(name)


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="role"):
        Agents(tmp_path).add("triage", role="root")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://u:p@host", "file:///etc", "http://h/a?b", "http://h\r\nX: y"]
)
def test_a_url_is_checked_before_it_is_stored(tmp_path: Path, url: str) -> None:
    agents = Agents(tmp_path)
    with pytest.raises(InvalidMessage, match="url"):
        agents.add("triage", url)
    assert agents.list() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"agents": [{"name": 1}]}', "\0", '{"x":' + "[" * 5_000])
def test_a_damaged_file_refuses_every_token(tmp_path: Path, text: str) -> None:
    agents = Agents(tmp_path)
    token = agents.add("triage")
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(StoreDamaged):
        Agents(tmp_path).identify(token)


def test_concurrent_additions_are_all_kept(tmp_path: Path) -> None:
    tokens: list[str] = []

    def add(number: int) -> None:
        tokens.append(Agents(tmp_path).add(f"agent-{number}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agents = Agents(tmp_path)
    assert len(agents.list()) == 8
    assert all(agents.identify(token) for token in tokens)


def test_only_agents_with_a_url_can_be_nudged(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("deaf")
    agents.add("listens", "http://127.0.0.1:1")
    assert [*agents.with_url()] == ["listens"]


def test_permissions_to_send_are_changed_later(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    token = agents.add("planner", may_send_to=["critic"])
    server = Agents(tmp_path)
    assert agents.allow("planner", ["coder", "critic"]) == ("critic", "coder")
    planner = server.identify(token)
    assert planner is not None
    assert planner.may_send_to == ("critic", "coder")
    assert agents.deny("planner", ["critic"]) == ("coder",)
    assert agents.list()[0].may_send_to == ("coder",)


def test_a_refused_change_of_permissions_changes_nothing(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    agents.add("planner", may_send_to=["critic"])
    agents.add("boss", role="operator")
    before = agents.list()
    with pytest.raises(UnknownAgent):
        agents.allow("nobody", ["critic"])
    with pytest.raises(InvalidMessage, match="operator"):
        agents.allow("boss", ["critic"])
    with pytest.raises(InvalidMessage, match="has no permission to send to 'coder'"):
        agents.deny("planner", ["critic", "coder"])
    with pytest.raises(InvalidName):
        agents.allow("planner", ["a b"])
    with pytest.raises(InvalidMessage, match="at most"):
        agents.allow("planner", [f"a{n}" for n in range(MAY_SEND_TO_MAX)])
    assert agents.list() == before


def test_an_agent_has_an_organization(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    token = agents.add("caller", org="acme")
    assert agents.identify(token) == Identity("caller", "agent", None, (), "acme")
    assert [agent.org for agent in agents.list()] == ["acme"]
    for wrong in ("a b", "org:x", "../x"):
        with pytest.raises(InvalidName):
            agents.add("other", org=wrong)
    with pytest.raises(InvalidMessage, match="no organization"):
        agents.add("boss", role="operator", org="acme")


def test_a_file_without_organizations_can_be_read(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    token = agents.add("caller")
    path = tmp_path / FILE_NAME
    lines = json.loads(path.read_text())
    del lines["crc32"]
    for line in lines["agents"]:
        del line["org"]
    path.write_text(json.dumps(lines))
    assert Agents(tmp_path).identify(token) == Identity("caller", "agent")
