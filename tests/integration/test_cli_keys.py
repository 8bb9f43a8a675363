"""`postroom keys`, and what the other commands do with an encrypted folder."""

import base64
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.system.crypto.encryption import KEY_FILE_VARIABLE
from tests.integration.commandline import isolate, postroom
from tests.integration.ups import running

MARKER = "the canary sings"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "postroom.keys"
    made = postroom("keys", "create", path, "--name", "first")
    assert (made.code, made.line) == (0, {"key_file": str(path), "key": "first"})
    return path


@pytest.fixture
def data(tmp_path: Path, keys: Path) -> Path:
    folder = tmp_path / "run"
    with Tasks.open(f"sqlite:///{folder}/queue.db", key_file=keys) as tasks:
        tasks.enqueue(agent="triage", payload={"text": MARKER})
    return folder


def test_a_key_file_is_never_overwritten(keys: Path) -> None:
    before = keys.read_bytes()
    again = postroom("keys", "create", keys)
    assert again.code == 1
    assert "exists already, and stays as it is" in again.errors
    assert keys.read_bytes() == before
    assert keys.stat().st_mode & 0o777 == 0o600


def test_a_wrong_key_file_is_refused_before_anything_changes(data: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.keys"
    postroom("keys", "create", wrong)
    before = wrong.read_bytes()
    for command in (("up", "--http-port", 0, "--nats-port", 0), ("keys", "rotate")):
        refused = postroom(*command, "--data", data, "--key-file", wrong)
        assert refused.code == 1
        held = postroom("keys", "list", "--key-file", wrong).line
        assert "queue.db needs the key 'first' (fingerprint " in refused.error
        assert f"has the key '{held['key']}' (fingerprint {held['fingerprint']})" in refused.error
    assert wrong.read_bytes() == before
    assert not (data / "mail").exists()


def test_mail_of_another_key_is_refused_before_a_store_is_made(keys: Path, tmp_path: Path) -> None:
    data, wrong = tmp_path / "only-mail", tmp_path / "wrong.keys"
    postroom("keys", "create", wrong)
    with running(data, "--no-http", "--no-audit", "--key-file", str(keys)):
        pass
    (data / "queue.db").unlink()
    refused = postroom("up", "--data", data, "--http-port", 0, "--nats-port", 0, "--key-file", wrong)
    assert (refused.code, (data / "queue.db").exists()) == (1, False)
    assert "the mail log of" in refused.errors


def test_looking_at_the_keys_does_not_turn_encryption_on(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "plain"
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        tasks.enqueue(agent="triage", payload=1)
    listed = postroom("keys", "list", "--data", data, "--key-file", keys)
    assert [line["values"] for line in listed.lines] == [0, 1]
    assert postroom("keys", "retire", "first", "--data", data, "--key-file", keys).code == 1
    assert postroom("tasks", "status", "--data", data).code == 0
    absent = postroom("keys", "list", "--key-file", tmp_path / "none.keys")
    assert (absent.code, "there is no key file" in absent.error) == (1, True)


def test_a_rotation_ends_with_one_key(data: Path, keys: Path) -> None:
    where = ("--data", data, "--key-file", keys)
    refused = postroom("keys", "retire", "first", *where)
    assert refused.code == 1
    assert "'first' encrypts new values: rotate to another key first" in refused.errors
    unknown = postroom("keys", "retire", "none", *where)
    assert (unknown.code, "has no key 'none': its keys are first" in unknown.error) == (1, True)
    rotated = postroom("keys", "rotate", *where, "--name", "second")
    assert (rotated.code, rotated.line["key"], rotated.line["unreadable"]) == (0, "second", 0)
    assert rotated.line["converted"] == 1
    listed = [
        (line["key"], line["current"], line["values"]) for line in postroom("keys", "list", *where).lines
    ]
    assert listed == [("second", True, 1), ("first", False, 0)]
    assert postroom("keys", "retire", "first", *where).code == 0
    assert b"first" not in keys.read_bytes()
    with Tasks.open(f"sqlite:///{data}/queue.db", key_file=keys) as tasks:
        assert [one.payload for one in tasks.claim(agent="triage")] == [{"text": MARKER}]


def test_a_key_file_inside_the_data_folder_is_refused(data: Path, keys: Path) -> None:
    inside = data / "postroom.keys"
    inside.write_bytes(keys.read_bytes())
    inside.chmod(0o600)
    said = f"postroom: key file {inside} is inside the data folder {data}, so every copy of the folder"
    for command in (("up", "--http-port", "0", "--nats-port", "0"), ("keys", "encrypt")):
        refused = postroom(*command, "--data", data, "--key-file", inside)
        assert (refused.code, refused.error.startswith(said)) == (2, True)
    for reading in (
        ("tasks", "status"), ("tasks", "serve"), ("engine", "status"), ("doctor",), ("verify",), ("top",),
        ("backup", "--out", "run.tar"), ("mcp",), ("audit", "ship", "--to", "audit"), ("mail", "serve"),
    ):  # fmt: skip
        refused = postroom("--key-file", inside, *reading, "--data", data)
        assert (refused.code, refused.error.startswith(said)) == (2, True), reading
    for writing in (("keys", "create", data / "new.keys"), ("audit", "key", data / "new.keys", "n")):
        refused = postroom(*writing)
        assert (refused.code, "is inside the data folder" in refused.error) == (2, True), writing
    assert not (data / "new.keys").exists()


def test_a_backup_is_encrypted_and_has_no_key(data: Path, keys: Path, tmp_path: Path) -> None:
    archive, restored = tmp_path / "run.tar", tmp_path / "restored"
    made = postroom("backup", "--data", data, "--out", archive)  # needs no key
    assert (made.code, made.line["encrypted"]) == (0, True)
    content = archive.read_bytes()
    secret = keys.read_bytes().split()[1]
    assert MARKER.encode() not in content
    assert secret not in content
    assert base64.urlsafe_b64decode(secret) not in content
    assert postroom("restore", "--from", archive, "--data", restored).code == 0
    refused = postroom("verify", "--data", restored)
    assert (refused.code, refused.lines[0]["rule"]) == (1, "key")
    doctor = postroom("doctor", "--data", restored)
    found = {one["check"]: one for one in doctor.line["findings"]}
    assert (doctor.code, found["encryption"]["level"], found["stores"]["level"]) == (4, "problem", "ok")
    assert postroom("--key-file", keys, "verify", "--data", restored).code == 0
    doctor = postroom("--key-file", keys, "doctor", "--data", restored)
    found = {one["check"]: one for one in doctor.line["findings"]}
    assert found["encryption"]["what"] == "values are encrypted with the key first"


def test_up_encrypts_by_its_settings_file_and_follows_a_rotation(tmp_path: Path, keys: Path) -> None:
    folder = tmp_path / "served"
    settings = tmp_path / "postroom.toml"
    settings.write_text(f'[encryption]\nkey_file = "{keys.name}"\n')
    place = ("--data", folder, "--key-file", keys)
    with running(folder, "--no-audit", "--no-mail") as up:

        def enqueue() -> int:
            server = ("--url", up.http, "--token", up.token)
            return postroom("tasks", "enqueue", *server, "--agent", "a", "--payload", f'"{MARKER}"').code

        assert enqueue() == 0
        assert postroom("keys", "rotate", *place, "--name", "second").line["unreadable"] == 0
        assert enqueue() == 0
        assert postroom("keys", "retire", "first", *place).code == 0
        assert enqueue() == 0
        status, found = up.get("/tasks?agent=a", up.token)
        assert (status, len(found["tasks"])) == (200, 3)
        assert postroom("keys", "list", *place).line["key"] == "second"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if MARKER.encode() in path.read_bytes()] == []
    assert postroom("tasks", "status", "--data", folder).code == 0


def test_a_command_without_the_key_says_so(data: Path) -> None:
    refused = postroom("tasks", "status", "--data", data)
    assert refused.code == 1
    assert "is encrypted: name its key file" in refused.errors
