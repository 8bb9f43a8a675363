"""No command prints the password of an address, however it is mistyped or given."""

import sys
from pathlib import Path

import pytest

from tests.integration.commandline import isolate, postroom, run

PLANTED = "Pq7rT-wX2v"
RIGHT = f"postgres://u:{PLANTED}@127.0.0.1:1/d"  # nothing listens there
BARE = f"u:{PLANTED}@h/d"
WRONG = [
    f"postgres//u:{PLANTED}@h/d",
    f"postgres:/u:{PLANTED}@h/d",
    f"postgre:/u:{PLANTED}@h/d",
    f"postgre://u:{PLANTED}@h/d",
    f"postgres:u:{PLANTED}@h/d",
    f"postgres://u:{PLANTED}@[::1/d",
    f"postgres://u:{PLANTED}@h:port/d",
    f"postgres://u:{PLANTED}/x@h/d",
    f"postgres://u:1/{PLANTED}@h/d",
    f"postgres://u:1?{PLANTED}@h/d",
    f"postgres://u:1#{PLANTED}@h/d",
    f"postgres://h:1/d?password={PLANTED}&nonsense=1",
    f"amqp://u:{PLANTED}@[::1/?ledger=postgres://u:{PLANTED}@h/d",
    f"amqp://u:{PLANTED}@h:x/?ledger=postgres://u:{PLANTED}@[::1/d",
    f"amqp//u:{PLANTED}@h/?ledger=sqlite:///q.db",
    f"amqp://u:{PLANTED}@h/",
    f"nats://u:{PLANTED}@h:4222",
    f"nats:/{PLANTED}@h:4222",
    f"redis://:{PLANTED}@h:6379/0",
    BARE,
]
COMMANDS = [
    ("move", "@", "postgres://h/d"),
    ("move", "--undo", "@", "postgres://h/d"),
    ("move", "sqlite:///there.db", "@"),
    ("up", "--data", "new", "--store", "@"),
    ("up", "--data", "@"),
    ("top", "--data", "@"),
    ("doctor", "--data", "@"),
    ("backup", "--data", "@", "--out", "b.tar"),
    ("tasks", "serve", "--store", "@"),
    ("audit", "detach", "--store", "@"),
    ("audit", "ship", "--store", "@", "--out", "stream"),
    ("verify", "stream", "--store", "@"),
    ("mail", "serve", "--data", "@"),
    ("mcp", "--url", "@", "--token", "t"),
    ("bus", "tail", "--bus", "@"),
    ("pipeline", "run", "--events", "@", "--tables", "t"),
    ("pipeline", "run", "--events", "e", "--tables", "@"),
    ("pipeline", "run", "--events", "e", "--tables", "t", "--remote", "@"),
    ("--config", "@", "bus", "tail"),
]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    Path("there.db").touch()
    Path("stream").mkdir()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_error_about_an_address_shows_no_password(command: tuple[str, ...]) -> None:
    for address in (RIGHT, *WRONG):
        if address == RIGHT and command[0] != "move":
            continue  # commands wait for a server that does not answer
        if address == BARE and command[0] == "pipeline":
            continue  # a path, which Arrow quotes
        done = postroom(*(address if word == "@" else word for word in command))
        assert done.code != 0, (address, done)
        assert PLANTED not in done.errors + done.out
        assert "unexpected" not in done.errors
        assert "Traceback" not in done.errors


@pytest.mark.parametrize("name", ["UP_STORE", "DATA", "BUS", "CONFIG"])
def test_error_about_a_variable_shows_no_password(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in WRONG:
        monkeypatch.setenv(f"POSTROOM_{name}", address)
        for command in (("top",), ("bus", "tail"), ("up", "--data", "new")):
            if command[0] == "up" and name != "UP_STORE":
                continue
            done = postroom(*command)
            assert PLANTED not in done.errors + done.out
            assert "unexpected" not in done.errors


@pytest.mark.parametrize("key", ["up.data", "up.store", "bus.path", "queue.root", "up.no_such"])
def test_error_about_the_settings_file_shows_no_password(key: str) -> None:
    table, name = key.split(".")
    for address in WRONG:
        Path("postroom.toml").write_text(f"[{table}]\n{name} = '{address}'\n")
        for command in (("top",), ("bus", "tail"), ("config", "show")):
            done = postroom(*command)
            assert PLANTED not in done.errors
            assert "unexpected" not in done.errors


def test_traceback_of_an_error_shows_no_password() -> None:
    done = run("postroom", "move", WRONG[0], "x", env={"POSTROOM_TRACEBACK": "1", "PATH": sys.prefix})
    assert done.code == 1
    assert PLANTED not in done.errors
