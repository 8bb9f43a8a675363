"""Every command in deploy/ as a real process: it starts, serves or works, and stops by SIGTERM."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postroom import Engine
from tests.deployfiles import commands, instructions
from tests.integration.commandline import finish, isolate, start
from tests.postgresserver import database, postgres
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "postgres"]

APP = """
import os
from postroom import Engine

engine = Engine.open(os.environ["POSTROOM_STORE"])

@engine.handler("tool_call")
def call_tool(message, context):
    return "done"
"""
SERVERS = [pytest.param(words, id=name) for name, words in commands() if words[0] == "up"]
WORKERS = [pytest.param(words, id=name) for name, words in commands() if words[0] != "up"]


@contextmanager
def running(words: list[str], store: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Any]:
    """The first line of a command with other paths, another database and free ports. It has to stop well."""
    isolate(monkeypatch, folder)
    monkeypatch.setenv("POSTROOM_STORE", store)
    here = {"/data": str(folder / "data"), "/var/lib/postroom": str(folder / "data")}
    words = [store if word.startswith("postgres://") else here.get(word, word) for word in words]
    ports = ["--http-port", "0", "--nats-port", "0"] if words[0] == "up" else []
    process = start("postroom", *words, *ports)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, finish(process).errors
        yield json.loads(line)
    finally:
        process.terminate()
        ended = finish(process)
    assert ended.code == 0, ended.errors


def check_health(url: str) -> None:
    """Run the health check of the container file at another port. It raises when the server is not ready."""
    words = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    assert words[:2] == ["python", "-c"]
    code, changed = re.subn(r"(?<=127\.0\.0\.1):\d+", f":{urlsplit(url).port}", words[2])
    assert changed == 1
    exec(code, {})  # noqa: S102 - a line of deploy/


@pytest.mark.parametrize("words", SERVERS)
def test_a_server_of_the_deploy_folder_becomes_ready_and_stops(
    words: list[str], database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with running(words, database, monkeypatch, tmp_path) as facts:
        check_health(facts["http"])
        with urllib.request.urlopen(f"{facts['http']}/health", timeout=HANG_GUARD_S) as answer:  # noqa: S310 - our own
            assert json.load(answer)["status"] == "ok"
        assert (facts["nats"], facts["token"]) != ("", "")
    assert (tmp_path / "data" / "tokens.json").exists()
    assert (tmp_path / "data" / "queue.db").exists() == ("--store" not in words)


@pytest.mark.parametrize("words", WORKERS)
def test_a_worker_of_deploy_works_and_stops(
    words: list[str], database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)

    async def request() -> Any:
        async with Engine.open(database) as engine:
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            return await handle.result(timeout_s=HANG_GUARD_S)

    with running(words, database, monkeypatch, tmp_path) as facts:
        assert facts["workers"] == 1
        assert asyncio.run(request()) == "done"
