"""`postroom doctor` and `postroom verify --data` on real folders, with and without servers."""

import hashlib
import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks, open_store
from postroom.client import EngineClient
from postroom.logs.mail_records import Framing, Started
from postroom.server.access.tokens import TokenRegistry
from postroom.stores.postgres.connection import Address
from postroom.testing import ManualClock
from tests.integration.commandline import Result, isolate, postroom, run_on_terminal
from tests.integration.ups import running
from tests.postgresserver import database, postgres
from tests.rabbitmqserver import free_port
from tests.smalldisk import read_only, small_disk
from tests.waiting import until

__all__ = ["database", "postgres", "small_disk"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("POSTROOM_HTTP_PORT", "0")  # the ports of this machine are not the tests' business
    monkeypatch.setenv("POSTROOM_NATS_PORT", "0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    made = postroom("tasks", "enqueue", "--data", folder, "--agent", "triage", "--payload", "1")
    assert made.code == 0
    assert postroom("token", "create", "--data", folder, "--role", "admin").code == 0
    return folder


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file with data, and the names of all others."""
    return {
        path.relative_to(folder).as_posix(): ""
        if path.name.endswith("-shm")
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def levels(result: Result) -> dict[str, str]:
    """The worst level of each check."""
    found: dict[str, str] = {}
    for finding in result.line["findings"]:
        known = found.get(finding["check"], "ok")
        found[finding["check"]] = max(known, finding["level"], key=["ok", "warning", "problem"].index)
    return found


def said(result: Result, check: str) -> list[dict[str, Any]]:
    return [finding for finding in result.line["findings"] if finding["check"] == check]


def test_a_healthy_folder_is_well_and_stays_as_it_is(data: Path) -> None:
    before = contents(data)
    result = postroom("doctor", "--data", data)
    assert (result.code, result.line["status"], set(levels(result).values())) == (0, "ok", {"ok"})
    assert said(result, "stores")[0]["what"] == "undamaged: store, tokens"
    assert contents(data) == before
    verified = postroom("verify", "--data", data)
    assert (verified.code, verified.line["clean"]) == (0, True)
    assert "store" in verified.line["checked"]
    assert contents(data) == before


def test_verify_sums_up_a_folder_without_any_messages(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        tasks.status()
    TokenRegistry(tmp_path).create("admin")
    summary = {"clean": True, "violations": 0, "checked": ["store", "tokens"]}
    assert postroom("verify", "--data", tmp_path).line == summary
    assert postroom("verify", "--data", tmp_path, "--json").line == summary


def test_a_folder_of_something_else_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("x")
    for command in ("doctor", "verify"):
        for name, words in (("other", "holds no postroom data"), ("none", "there is no data folder")):
            refused = postroom(command, "--data", tmp_path / name)
            assert (refused.code, refused.raw) == (1, b"")
            assert words in refused.error
            assert f"`postroom up --data {tmp_path / name}`" in refused.error
    assert "is a file, and not a data folder" in postroom("verify", "--data", tmp_path / "file").error
    assert postroom("doctor").code == 2
    assert not list((tmp_path / "other").iterdir())


def test_a_damaged_page_and_wrong_counters_are_found(data: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(data / "queue.db")) as connection:
        connection.execute("UPDATE queues SET depths = '{\"P2\":7}'")
        connection.commit()
    found = postroom("doctor", "--data", data)
    assert (found.code, levels(found)["stores"]) == (4, "problem")
    assert "the queue triage counts" in said(found, "stores")[0]["what"]
    assert postroom("doctor", "--data", data, "--quick").code == 0
    damaged = bytearray((data / "queue.db").read_bytes())
    damaged[4096 * 3 : 4096 * 5] = os.urandom(8192)
    (data / "queue.db").write_bytes(damaged)
    result = postroom("verify", "--data", data)
    assert result.code == 1
    assert {line["rule"] for line in result.lines[:-1]} == {"damage"}
    assert postroom("doctor", "--data", data).code == 4


def test_stuck_leases_dead_letters_and_old_messages_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    clock = ManualClock()
    with Tasks.open(f"sqlite:///{folder / 'queue.db'}", clock=clock) as tasks:
        dead, stuck, _ = (tasks.enqueue(agent="triage", payload=n, max_retries=0) for n in range(3))
        for task in tasks.claim(agent="triage", limit=2, lease_s=5.0):
            if task.task_id == dead:
                tasks.fail(task.task_id, task.lease, error="no")
    with closing(sqlite3.connect(folder / "queue.db")) as connection:  # the clock of this machine goes on
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        connection.execute("UPDATE facts SET value = ? WHERE name = 'clock_boot_id'", (boot,))
        connection.execute("UPDATE facts SET value = ? WHERE name = 'clock_offset_ns'", (10**15,))
        connection.commit()
    result = postroom("doctor", "--data", folder)
    assert result.code == 4
    assert stuck in said(result, "leases")[0]["what"]
    assert said(result, "leases")[0]["command"] == f"postroom up --data {folder}"
    assert "dead letters: 1 message of triage" in said(result, "poison")[0]["what"]
    assert levels(result)["backlog"] == "warning"


def test_registry_mail_and_bus_damage_are_found(data: Path) -> None:
    bus = data / "buses" / "team.yaml"
    bus.parent.mkdir()
    for word in ("one", "two"):
        assert (
            postroom("bus", "post", "--bus", bus, "--type", "note", "--project", "p", "--body", word).code
            == 0
        )
    bus.write_bytes(bus.read_bytes().replace(b"one", b"onE"))
    (data / "tokens.json").write_text('{"tokens":[{"role":7}]}')
    (data / "sessions.json").write_text("[")
    secret = bytes(range(8))
    frame = Framing(secret).frame(Started(1))
    log = data / "mail" / f"mail-{secret.hex()}-00000001.log"
    log.parent.mkdir()
    log.write_bytes(
        frame + frame[:-1] + b"\xff" + frame + frame[:-2]
    )  # damage, and a torn end, which is none
    result = postroom("doctor", "--data", data)
    assert result.code == 4
    texts = " ".join(finding["what"] for finding in said(result, "stores"))
    assert "buses/team.yaml is damaged" in texts
    assert "tokens.json is damaged" in texts
    assert "sessions.json is damaged" in texts
    assert f"{log.relative_to(data)} is damaged: {len(frame)} bytes at {len(frame)}" in texts
    verified = postroom("verify", "--data", data)
    assert verified.code == 1
    damaged = {line["sentence"].partition(":")[0] for line in verified.lines[:-1]}
    mailed = log.relative_to(data).as_posix()
    assert damaged == {"buses/team.yaml", "tokens.json", "sessions.json", mailed}


def test_tokens_that_expire_soon_and_open_folders_are_warnings(data: Path) -> None:
    postroom("token", "create", "--data", data, "--role", "operator", "--expires-s", 3600)
    data.chmod(0o755)
    result = postroom("doctor", "--data", data)
    assert result.code == 3
    assert levels(result)["tokens"] == levels(result)["permissions"] == "warning"
    command = said(result, "tokens")[0]["command"]
    assert command.startswith("postroom token rotate ")
    assert postroom(*command.split()[1:]).code == 0


def test_all_is_well_after_the_traffic_of_a_demo_with_a_bus(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data, "--no-audit") as up:
        for number in range(3):  # as the demo does
            TokenRegistry(data).create("agent", "demo-acme", f"demo-{number}", expires_s=3600)
        note = {"type": "note", "project_id": "p", "body": "hello"}
        with EngineClient(up.http, TokenRegistry(data).create("agent", "acme", "ada").token) as agent:
            for bus in ("team", "news"):
                agent.request("POST", f"/bus/{bus}/messages", note)
        result = postroom("doctor", "--data", data)
        assert (result.code, set(levels(result).values())) == (0, {"ok"}), result.lines
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in data.glob("buses/**/*.yaml")}
    assert modes == {"team.yaml": 0o600, "news.yaml": 0o600}
    assert stat.S_IMODE((data / "buses").stat().st_mode) == 0o700


def test_the_doctor_works_while_servers_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as up:
        token = up.token
        assert token is not None
        url = ("--url", up.http, "--token", token)
        assert postroom("tasks", "enqueue", *url, "--agent", "triage", "--payload", "1").code == 0
        until(lambda: (folder / "audit" / "_open").is_dir() and any((folder / "audit" / "_open").iterdir()))
        result = postroom("doctor", "--data", folder)
        assert (result.code, result.line["status"]) == (0, "ok"), result.out
        assert "runs: http, mail, audit" in said(result, "server")[0]["what"]
        assert postroom("verify", "--data", folder).code == 0
        shown = run_on_terminal("postroom", "doctor", "--data", folder, env={**os.environ, "NO_COLOR": "1"})
        assert "is well" in shown.out


def test_a_newer_format_is_refused_with_a_one_line_error(data: Path) -> None:
    with closing(sqlite3.connect(data / "queue.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    result = postroom("doctor", "--data", data)
    assert result.code == 4
    assert "written by a newer postroom" in said(result, "stores")[0]["what"]
    assert postroom("verify", "--data", data).code == 1


def test_a_store_on_postgresql_is_looked_at_and_never_made(database: str) -> None:
    empty = postroom("doctor", "--data", database)
    assert (empty.code, empty.raw) == (1, b"")
    assert "there is no store at" in empty.error
    with Tasks.open(database) as tasks:
        task_id = tasks.enqueue(agent="triage", payload=1, max_retries=0)
        [task] = tasks.claim(agent="triage")
        tasks.fail(task_id, task.lease, error="no")
    result = postroom("doctor", "--data", database)
    assert (result.code, levels(result)["poison"]) == (3, "warning")


def test_encrypted_values_on_postgresql_are_decrypted_and_nothing_is_noted(
    database: str, tmp_path: Path
) -> None:
    keys = tmp_path / "postroom.keys"
    assert postroom("keys", "create", keys, "--name", "first").code == 0
    with Tasks.open(database) as tasks:
        tasks.enqueue(agent="triage", payload="plain")
    plain = postroom("--key-file", keys, "doctor", "--data", database)
    assert (plain.code, levels(plain)["encryption"]) == (3, "warning")
    assert postroom("tasks", "status", "--data", database).code == 0  # looking has not turned encryption on
    with Tasks.open(database, key_file=keys) as tasks:
        for n in range(2):
            tasks.enqueue(agent="triage", payload=n)
    locked = postroom("doctor", "--data", database)
    assert (locked.code, levels(locked)["encryption"]) == (4, "problem")
    address = Address(database)
    with address.connect() as connection:
        records = f"{address.schema}.records"
        newest = f"(SELECT payload FROM {records} ORDER BY seq DESC LIMIT 1)"  # noqa: S608 - no input
        connection.execute(f"UPDATE {records} SET payload = {newest}")  # noqa: S608 - the same
    found = postroom("--key-file", keys, "doctor", "--data", database)
    assert (found.code, levels(found)["stores"]) == (4, "problem")
    assert "cannot be decrypted with the key 'first'" in said(found, "stores")[0]["what"]
    assert postroom("--key-file", keys, "doctor", "--data", database, "--quick").code == 0


def test_the_store_of_the_settings_is_checked_in_addition_to_the_folder(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert postroom("token", "create", "--data", folder, "--role", "admin").code == 0
    with Tasks.open(database) as tasks:
        tasks.enqueue(agent="triage", payload=1)
        tasks.enqueue(agent="triage", payload=2, delay_s=600)
    monkeypatch.setenv("POSTROOM_UP_STORE", database)
    result = postroom("doctor", "--data", folder)
    assert said(result, "backlog")[0]["what"] == "waiting: 1 message; delayed: 1 message"
    assert said(result, "tokens")[0]["what"].startswith("1 token")
    saved = postroom("backup", "--data", folder, "--out", tmp_path / "run.tar")
    assert saved.code == 0
    assert "is not in the archive" in saved.error


@pytest.fixture
def moved(data: Path, database: str) -> str:
    """The address of the store that `data` had. In the copy that stayed, a lease ended long ago."""
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        [task] = tasks.claim(agent="triage", lease_s=60)
    assert postroom("move", f"sqlite:///{data / 'queue.db'}", database).code == 0
    with Tasks.open(database) as tasks:
        tasks.complete(task.task_id, task.lease, 1)
    with closing(sqlite3.connect(data / "queue.db")) as connection, connection:
        connection.execute("UPDATE facts SET value = ? WHERE name = 'clock_offset_ns'", (10**15,))
    return database


def test_the_store_of_a_moved_file_is_looked_at(
    data: Path, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = postroom("doctor", "--data", data)
    assert (result.code, levels(result)["leases"]) == (3, "ok")
    [found] = said(result, "stores")
    shown = Address(moved).url
    assert found["what"] == f"{data / 'queue.db'} was moved to {shown}; the checks of messages look there"
    assert f"postroom move --undo sqlite:///{data / 'queue.db'} {shown}" in found["command"]
    assert [one["check"] for one in result.line["findings"] if one["check"] == "database"]
    monkeypatch.setenv("POSTROOM_UP_STORE", moved)
    assert postroom("doctor", "--data", data).code == 0


def test_a_moved_store_that_cannot_be_reached_is_named(data: Path) -> None:
    away = f"postgres://app@127.0.0.1:{free_port()}/postroom"
    with closing(open_store(f"sqlite:///{data / 'queue.db'}")) as store:
        store.set_moved(away)
    result = postroom("doctor", "--data", data)
    [found] = said(result, "stores")
    assert (result.code, found["level"]) == (3, "warning")
    assert f"was moved to {away}, which was not checked: " in found["what"]
    assert {"leases", "backlog", "shipper"}.isdisjoint(levels(result))


def test_a_backup_says_that_the_store_was_moved(data: Path, moved: str, tmp_path: Path) -> None:
    saved = postroom("backup", "--data", data, "--out", tmp_path / "run.tar")
    assert saved.code == 0
    assert f"queue.db was moved to {Address(moved).url}, and the store there is not in" in saved.error


@pytest.mark.parametrize("command", [["top", "--once"], ["tasks", "status"], ["engine", "status"]])
def test_reading_the_copy_that_a_move_has_left_is_a_warning(
    data: Path, moved: str, command: list[str], tmp_path: Path
) -> None:
    result = postroom(*command, "--data", data)
    assert result.code == 0
    assert f"was moved to {Address(moved).url}: what is read here is older" in result.error
    settings = tmp_path / "own.toml"
    settings.write_text(f'[up]\nstore = "{moved}"\n')
    followed = postroom("--config", settings, *command, "--data", data)
    there = postroom(*command, "--data", moved)
    assert (followed.errors, there.errors) == ("", "")
    assert set(followed.line) == set(there.line)
    if command[0] == "tasks":
        assert followed.line["agents"]["triage"]["depth"] == 0
        assert followed.line["totals"] == there.line["totals"] == {"completed": 1}
        assert result.line["totals"] != there.line["totals"]


def test_a_read_only_file_system_is_not_damage(small_disk: Path, tmp_path: Path) -> None:
    data = small_disk / "run"
    assert postroom("tasks", "enqueue", "--data", data, "--agent", "triage", "--payload", "1").code == 0
    commands: list[list[Any]] = [
        ["up"], ["backup", "--out", tmp_path / "run.tar"], ["tasks", "status"], ["top", "--once"],
        ["tasks", "enqueue", "--agent", "triage", "--payload", "1"],
    ]  # fmt: skip
    with read_only(small_disk):
        for command in commands:
            refused = postroom(*command, "--data", data)
            assert (refused.code, refused.raw) == (1, b"")
            assert f"{data / 'queue.db'} cannot be opened: Read-only file system" in refused.error
        result = postroom("doctor", "--data", data)
        [found] = [one for one in result.line["findings"] if one["level"] == "problem"]
        assert found["what"] == f"the file system of {data} is read-only"
        assert "mount -o remount,rw" in found["command"]
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        tasks.enqueue(agent="triage", payload=2)
        shutil.copytree(data, small_disk / "crashed")
    (small_disk / "crashed" / "queue.db-shm").unlink()  # the WAL stays, and cannot be read without this file
    with read_only(small_disk):
        result = postroom("doctor", "--data", small_disk / "crashed")
        refused = postroom("verify", "--data", small_disk / "crashed")
    assert (refused.code, refused.raw) == (1, b"")
    assert "cannot be opened: Read-only file system" in refused.error
    assert [one["check"] for one in result.line["findings"] if one["level"] == "problem"] == ["permissions"]


def test_verify_does_not_miss_messages_that_a_moved_store_got_later(data: Path, database: str) -> None:
    source = f"sqlite:///{data / 'queue.db'}"
    assert postroom("audit", "ship", "--data", data, "--to", data / "audit", "--once").code == 0
    assert postroom("move", source, database).code == 0
    with Tasks.open(database) as tasks:
        tasks.enqueue(agent="triage", payload=2)
    assert postroom("audit", "ship", "--store", database, "--to", data / "audit", "--once").code == 0
    verified = postroom("verify", "--data", data)
    assert verified.lines[-1]["violations"] == 0, verified.out
    assert f"was moved to {Address(database).url}: the stream was not compared with it" in verified.errors
