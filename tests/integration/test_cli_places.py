"""What commands say about a place that does not fit: a data folder, a settings file, a name in use."""

import shlex
from pathlib import Path

import pytest

from postroom import Engine, Tasks
from postroom.cli.tokens.token import create as token_create
from tests.integration.commandline import isolate, postroom


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with Tasks.open(f"sqlite:///{tmp_path}/run/queue.db") as tasks:
        tasks.enqueue(agent="triage", payload=1)
    return tmp_path / "run"


# ---- data folders ------------------------------------------------------------------------------------


def test_a_token_starts_a_folder_that_is_absent_or_empty_and_says_so() -> None:
    Path("empty").mkdir()
    for name in ("new", "empty"):
        made = postroom("token", "create", "--data", name, "--role", "admin")
        assert (made.code, made.line["token"].startswith("pr_")) == (0, True)
        assert made.error == f"postroom: warning: there was no data folder {name}: a new one is made"
        assert postroom("token", "create", "--data", name, "--role", "admin").errors == ""
    Path("settled").mkdir()
    Path("settled/postroom.toml").write_text("[up]\nhttp_port = 0\n")
    Path("settled/tables").mkdir()
    made = postroom("token", "create", "--data", "settled", "--role", "admin")
    assert (made.code, made.line["token"].startswith("pr_")) == (0, True)
    refused = postroom("token", "create", "--data", "bad", "--role", "admin", "--agent", "a/b")
    assert (refused.code, Path("bad").exists()) == (2, False)


@pytest.mark.parametrize(
    "command",
    [
        ("token", "create", "--role", "admin"),
        ("token", "list"),
        ("token", "revoke", "x"),
        ("tasks", "agent", "add", "a"),
        ("tasks", "agent", "list"),
        ("mcp", "--agent", "planner"),
        ("backup", "--out", "run.tar"),
        ("keys", "list"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(command: tuple[str, ...]) -> None:
    Path("photos").mkdir()
    Path("photos/cat.jpg").touch()
    assert postroom("keys", "create", "postroom.keys").code == 0
    key = ("--key-file", "postroom.keys") if command[0] == "keys" else ()
    refused = postroom(*command, "--data", "photos", *key)
    start = "check the path, or start a data folder there with `postroom up --data photos`"
    assert refused.error == f"postroom: photos holds no postroom data: {start}"
    assert (refused.code, [path.name for path in Path("photos").iterdir()]) == (1, ["cat.jpg"])


def test_workers_do_not_make_a_store(tmp_path: Path) -> None:
    Path("app.py").write_text('from postroom import Engine\nengine = Engine.open("memory://")\n')
    refused = postroom("engine", "work", "--app", "app:engine", "--data", "typo")
    assert (refused.code, Path("typo").exists()) == (1, False)
    assert f"there are no messages in {tmp_path / 'typo'}: check the path" in refused.error


@pytest.mark.parametrize(
    "command",
    [
        ("token", "list"),
        ("tasks", "list"),
        ("tasks", "status"),
        ("tasks", "next", "--agent", "triage"),
        ("tasks", "work", "--agent", "nobody", "--exec", "true", "--until-empty"),
        ("tasks", "agent", "list"),
        ("engine", "status"),
        ("engine", "goals", "list"),
        ("engine", "goals", "start", "acme"),
        ("top", "--once"),
        ("doctor",),
    ],
)
def test_the_environment_and_the_settings_name_the_data_folder(
    command: tuple[str, ...], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = postroom(*command)
    assert (missing.code, "--data DIR" in missing.error) == (2, True)
    Path("postroom.toml").write_text(f"[up]\ndata = '{data}'\n")
    assert postroom(*command).code != 2
    Path("postroom.toml").unlink()
    monkeypatch.setenv("POSTROOM_DATA", str(data))
    assert postroom(*command).code != 2
    assert postroom("token", "list", "--data", "elsewhere").error.startswith(
        "postroom: there is no data folder"
    )


def test_an_address_goes_before_the_data_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_DATA", "run")
    monkeypatch.setenv("POSTROOM_TOKEN", "x")
    for command in (("token", "list"), ("tasks", "status"), ("engine", "status")):
        assert "cannot reach" in postroom(*command, "--url", "http://127.0.0.1:1").error


# ---- settings files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("token", "list"), ("tasks", "status"), ("top", "--once")])
def test_a_named_settings_file_must_exist_and_be_valid(
    command: tuple[str, ...], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("broken.toml").write_text("[up]\nhttp_prot = 1\n")
    for name in ("broken.toml", "absent.toml"):
        refused = postroom("--config", name, *command, "--data", data)
        assert (refused.code, refused.raw, name in refused.error) == (2, b"", True)
        monkeypatch.setenv("POSTROOM_CONFIG", name)
        assert name in postroom(*command, "--data", data).error
        monkeypatch.delenv("POSTROOM_CONFIG")
    assert postroom(*command, "--data", data).code == 0
    monkeypatch.setenv("POSTROOM_CONFIG", "absent.toml")
    assert postroom("init", "--out", "absent.toml").code == 0  # it may be there to write the file


# ---- tokens ------------------------------------------------------------------------------------------


def test_the_examples_of_token_create_run() -> None:
    text = token_create.help or ""
    lines = text.partition("Example:")[2].replace("\\\n", " ").splitlines()
    found = [shlex.split(line)[1:] for line in lines if "postroom token" in line and "$" not in line]
    local = [words for words in found if "--url" not in words]
    assert len(local) == 4
    for words in local:
        made = postroom(*words)
        assert (made.code, made.line["token"].startswith("pr_")) == (0, True), words
    shown = [one["permissions"] for one in postroom("token", "list", "--data", "run").lines]
    assert shown[-2:] == [
        "may-send-to builder, may-claim builder, may-read critic",
        "read-only, only-message lead, only-bus team",
    ]


def test_organizations_may_have_agents_of_the_same_name(data: Path) -> None:
    create = ("token", "create", "--data", data, "--role", "agent", "--agent", "triage", "--org")
    for org in ("acme", "acme", "globex"):
        made = postroom(*create, org)
        assert (made.code, made.errors, made.line["org"]) == (0, "", org)


def test_permissions_without_effect_are_refused(data: Path) -> None:
    create = ("token", "create", "--data", data, "--may-claim", "b", "--role")
    refused = postroom(*create, "admin")
    assert (refused.code, "--may-claim is for the token of an agent" in refused.error) == (2, True)
    assert postroom(*create, "operator", "--org", "acme", "--agent", "a").code == 0


# ---- operators ---------------------------------------------------------------------------------------


def test_a_resume_says_when_nothing_was_paused(data: Path) -> None:
    with Engine.open(f"sqlite:///{data}/queue.db") as engine:
        engine.blocking.submit(type="tool_call", org_id="acme", payload={})
    resume = ("engine", "resume", "--data", data, "--org")
    unknown = postroom(*resume, "nope")
    assert (unknown.code, unknown.raw) == (1, b"")
    assert "nothing was paused: organization nope has no messages and no pause" in unknown.error
    assert postroom(*resume, "acme").line["was_paused"] is False
    assert postroom("engine", "pause", "--data", data, "--org", "acme").code == 0
    assert postroom(*resume, "acme").line["was_paused"] is True


def test_verify_says_which_of_two_places_is_too_many(data: Path) -> None:
    refused = postroom("verify", "--data", data, "audit")
    assert (refused.code, "leave out the FOLDER audit, or --data" in refused.error) == (2, True)
    refused = postroom("verify", "--data", data, "--since", "2026-02-05T00:00:00Z")
    assert (refused.code, "--since has no effect" in refused.error) == (2, True)
