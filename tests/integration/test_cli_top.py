"""`postroom top`: once, in a pipe, on a terminal, from a folder and from a server."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from postroom import Engine
from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import finish, isolate, postroom, start
from tests.waiting import HANG_GUARD_S, until


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    data = tmp_path / "run"
    data.mkdir()
    with Engine.open(f"sqlite:///{data / 'queue.db'}") as engine:
        engine.blocking.submit(type="tool_call", org_id="acme", payload={}, priority=1)
    return data


def test_once_in_a_pipe_is_one_json_object(folder: Path) -> None:
    found = postroom("top", "--data", folder, "--once").line
    assert found["depth"] == 1
    assert found["organizations"][0]["lanes"] == [0, 1, 0, 0]


def test_a_folder_without_a_store_gives_a_one_line_error(folder: Path) -> None:
    refused = postroom("top", "--data", folder / "nothing", "--once")
    assert refused.code == 1
    assert "there are no messages in" in refused.error
    assert postroom("top").code == 2


def test_a_server_gives_the_same_overview(folder: Path) -> None:
    token = TokenRegistry(folder).create("operator").token
    process = start("postroom", "tasks", "serve", "--data", folder, "--port", 0)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        found = postroom("top", "--url", url, "--token", token, "--once", "--json").line
        assert (found["depth"], found["organizations"][0]["org_id"]) == (1, "acme")
        assert postroom("top", "--url", url, "--token", "pr_wrong", "--once").code == 1
    finally:
        process.terminate()
        finish(process)


def test_a_terminal_is_drawn_until_it_is_interrupted_and_then_restored(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "postroom.cli.main", "top", "--data", str(folder), "--every-s", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""

    def has(text: bytes) -> bool:
        nonlocal drawn
        drawn += os.read(ours, 65536)
        return text in drawn

    until(lambda: has(b"acme"))
    drawn = b""
    until(lambda: has(b"acme"))  # it is live
    process.send_signal(signal.SIGINT)
    until(lambda: has(b"\x1b[?1049l"))
    assert process.wait(HANG_GUARD_S) == 0
    os.close(ours)
    assert b"Traceback" not in drawn
