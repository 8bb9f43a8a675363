"""A new verb takes three files, as CONTRIBUTING.md shows: a copy of the sources with them serves it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postroom import Engine
from tests.waiting import HANG_GUARD_S

ROOT = Path(__file__).parents[2]
POSTROOM = Path(sys.executable).parent / "postroom"

CLIENT = """
import sys
from postroom.calls.messages import CountMessages
from postroom.client import EngineClient
with EngineClient(*sys.argv[1:3]) as client:
    print(client.call(CountMessages(org_id=sys.argv[3])))
"""
LIBRARY = """
import sys
from postroom import Engine
with Engine.open(sys.argv[1]) as engine:
    print(engine.blocking.count(org_id="acme"))
"""


class Place(NamedTuple):
    """A server from the changed sources, and its folder."""

    url: str
    data: Path
    source: Path
    tokens: dict[str, str]

    def python(self, program: str, *arguments: object) -> str:
        return run(self.source, sys.executable, "-c", program, *arguments)

    def count(self, *arguments: object) -> Any:
        said = run(self.source, POSTROOM, "engine", "count", *arguments, "--json")
        return json.loads(said)["count"]


def run(source: Path, *command: object) -> str:
    environ = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [*map(str, command)], env=environ, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def insert(file: Path, text: str, before: str) -> None:
    source = file.read_text("utf-8")
    assert source.count(before) == 1, before
    file.write_text(source.replace(before, text + before), "utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("verb")
    source, data = folder / "src", folder / "run"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## A new verb")[2]
    verb, method, line, command = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:4]
    package = source / "postroom"
    declared = package / "calls" / "messages.py"
    declared.write_text(f"{declared.read_text('utf-8')}\n\n{verb}", "utf-8")
    insert(package / "engine/global_queue.py", f"{method}\n", "    async def sweep(self)")
    insert(package / "engine/global_queue.py", line, "    pause = waits(GlobalQueue.pause)")
    insert(package / "cli/engine/operate.py", f"{command}\n\n", "COMMANDS = (")
    insert(package / "cli/engine/operate.py", "count, ", "status, list_messages")

    data.mkdir()
    with Engine.open(f"sqlite:///{data / 'queue.db'}") as engine:
        for org_id in ("acme", "acme", "other"):
            engine.blocking.submit(type="tool_call", org_id=org_id, payload={"tool": "x"})
    tokens = {
        "boss": run(source, POSTROOM, "token", "create", "--role", "operator", "--data", data),
        "ada": run(
            source,
            POSTROOM,
            "token",
            "create",
            "--role",
            "agent",
            "--agent",
            "ada",
            "--org",
            "acme",
            "--data",
            data,
        ),
    }
    process = subprocess.Popen(
        [POSTROOM, "tasks", "serve", "--data", data, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        yield Place(url, data, source, {name: json.loads(made)["token"] for name, made in tokens.items()})
    finally:
        process.terminate()
        process.communicate(timeout=HANG_GUARD_S)


def test_the_thin_client_calls_a_new_verb(place: Place) -> None:
    assert int(place.python(CLIENT, place.url, place.tokens["boss"], "acme")) == 2
    assert int(place.python(CLIENT, place.url, place.tokens["boss"], "")) == 3


def test_an_agent_calls_a_new_verb_for_its_organization_only(place: Place) -> None:
    assert int(place.python(CLIENT, place.url, place.tokens["ada"], "")) == 2
    with pytest.raises(AssertionError, match="its organization only"):
        place.python(CLIENT, place.url, place.tokens["ada"], "other")


def test_a_command_calls_a_new_verb_in_a_folder_and_at_a_server(place: Place) -> None:
    assert place.count("--data", place.data) == 3
    assert place.count("--data", place.data, "--org", "acme") == 2
    assert place.count("--url", place.url, "--token", place.tokens["boss"], "--org", "acme") == 2


def test_plain_code_calls_a_new_verb(place: Place) -> None:
    assert int(place.python(LIBRARY, f"sqlite:///{place.data / 'queue.db'}")) == 2


def test_the_document_of_the_server_has_a_new_verb(place: Place) -> None:
    program = "import json; from postroom.server.routes.table import openapi; print(json.dumps(openapi()))"
    operation = json.loads(place.python(program))["paths"]["/engine/count"]["get"]
    assert operation["summary"] == "How many messages of an organization have not ended"
    assert [field["name"] for field in operation["parameters"]] == ["org_id"]
