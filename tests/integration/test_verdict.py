"""One verdict on the health of a queue, wherever somebody asks."""

import json
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from postroom.calls.submit import SubmitFields
from postroom.client.calls import HttpClient
from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import finish, isolate, postroom, run_on_terminal, start

WAITING = 1_960
UNATTENDED = [("backlog", "problem", "no worker runs, and 1,960 messages wait (stage 3)")]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store whose messages wait without a worker."""
    isolate(monkeypatch, tmp_path)
    data = tmp_path / "run"
    data.mkdir(mode=0o700)
    with Engine.open(f"sqlite:///{data / 'queue.db'}") as engine:
        message: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}, "priority": 1}
        engine.blocking.submit_many([message] * WAITING)
    return data


def said(verdict: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(reason["check"], reason["level"], reason["what"]) for reason in verdict["reasons"]]


def test_all_five_views_give_the_same_verdict(folder: Path) -> None:
    doctor = postroom("doctor", "--data", folder, "--quick")
    assert (doctor.code, doctor.line["status"]) == (4, "problem")
    findings = [each for each in doctor.line["findings"] if each["level"] != "ok"]
    assert said({"reasons": findings}) == UNATTENDED
    assert said(postroom("engine", "status", "--data", folder).line["verdict"]) == UNATTENDED
    assert said(postroom("top", "--data", folder, "--once").line["verdict"]) == UNATTENDED
    operator = TokenRegistry(folder).create("operator").token
    agent = TokenRegistry(folder).create("agent", agent="x", org="other").token
    process = start("postroom", "tasks", "serve", "--data", folder, "--port", 0)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        client = HttpClient(url, operator)
        health = client.request("GET", "/health")
        for_everybody = [("backlog", "problem", "no worker runs, and messages wait (stage 3)")]
        assert (health["status"], said(health["verdict"])) == ("degraded", for_everybody)
        assert said(client.request("GET", "/page/overview")["verdict"]) == UNATTENDED
        assert said(client.request("GET", "/engine/status")["verdict"]) == UNATTENDED
        assert client.request("GET", "/ready")["status"] == "degraded"  # other servers are no better
        other = HttpClient(url, agent)
        for path in ("/engine/status", "/page/overview"):
            assert other.request("GET", path)["verdict"] == {"level": "ok", "reasons": []}, path
        other.close()
        client.close()
    finally:
        process.terminate()
        finish(process)


@pytest.mark.parametrize("command", [("engine", "status"), ("top", "--once")], ids=str)
def test_terminals_show_the_reasons(folder: Path, command: tuple[str, ...]) -> None:
    assert UNATTENDED[0][2] in run_on_terminal("postroom", *command, "--data", folder).out
