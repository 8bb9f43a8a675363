"""Fixtures: the places where the knowledge graph can be, as arguments of `Engine.open`."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from tests.falkordbservers import FalkorServer
from tests.postgresserver import database, postgres, store_url

__all__ = ["database", "engine", "falkordb", "place", "postgres", "run"]


@pytest.fixture(scope="module")
def falkordb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FalkorServer]:
    with FalkorServer(tmp_path_factory.mktemp("falkordb")) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "postgres", "falkordb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """How an engine is opened: its store, and its graph."""
    if request.param == "falkordb":
        address = request.getfixturevalue("falkordb").url
        return {"url": "memory://", "graph": f"{address}/g{uuid.uuid4().hex}"}
    return {"url": store_url(request, tmp_path)}


@pytest.fixture
def engine(place: Any) -> Iterator[Engine]:
    with Engine.open(**place) as opened:
        yield opened


def run(engine: Any, coroutine: Any) -> Any:
    """Run a coroutine to its end."""
    return engine.blocking.wait(coroutine)
