"""The client of the wheel works with msgspec alone: no click, no YAML, no SQLite, no server."""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harnesses import serving
from tests.waiting import HANG_GUARD_S

ROOT = Path(__file__).parents[2]

AGENT = """
import importlib.util, sys
from postroom.client import TaskClient

for name in ("click", "yaml", "apsw", "starlette", "uvicorn"):
    assert importlib.util.find_spec(name) is None, name
import postroom
assert "site-packages" in postroom.__file__, postroom.__file__
url, token = sys.argv[1:]
with TaskClient(url, agent="a", token=token) as client:
    client.work(lambda task: {"twice": task.payload * 2}, until_empty=True)
"""


@pytest.fixture(scope="module", name="python")
def python_with_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and msgspec, and nothing else. Needs no network."""
    folder = tmp_path_factory.mktemp("wheel")
    hatchling: list[Any] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(hatchling, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("postroom-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    pip: list[Any] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        packages,
    ]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    found = importlib.util.find_spec("msgspec")
    assert found is not None
    assert found.origin is not None
    (packages / "msgspec").symlink_to(Path(found.origin).parent)
    return python


def clean_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}


def test_the_client_of_the_wheel_works_for_a_real_harness(python: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as harness, harness.tasks() as tasks:
        ids = [tasks.enqueue(agent="a", payload=n) for n in range(3)]
        done = subprocess.run(
            [python, "-c", AGENT, harness.url, harness.token("a")],
            capture_output=True, text=True, check=False, env=clean_environ(), cwd=tmp_path,
            timeout=HANG_GUARD_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [tasks.get(task_id).result for task_id in ids] == [{"twice": n * 2} for n in range(3)]


def test_the_wheel_holds_the_queries_and_the_types(python: Path) -> None:
    (package,) = python.parents[1].glob("lib/python*/site-packages/postroom")
    assert (package / "py.typed").exists()
    assert list((package / "stores" / "sqlite" / "sql").glob("*.sql"))
    assert list((package / "stores" / "postgres" / "sql").glob("*.sql"))
