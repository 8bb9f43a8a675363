"""Parts of the bench of PostgreSQL run, at a size that measures nothing, and yield whole figures.

The part with worker processes is left out: it starts ten interpreters.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from brokersbench import postgres as bench

from tests.postgresserver import postgres
from tests.privatepostgres import PostgresServer

__all__ = ["postgres"]  # a fixture

SIZES = bench.Sizes(
    messages=100, turn_messages=100, slow_messages=10, backlog=200, small_backlog=100, seconds=0.2, turns=1
)


@pytest.mark.parametrize("part", [part for part in bench.PARTS if part != "processes"])
def test_part_yields_figures_with_a_value_and_a_verdict(
    part: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def running(_settings: object) -> Iterator[PostgresServer]:
        yield postgres

    monkeypatch.setattr(bench, "running_postgres", running)
    found = [json.loads(figure.as_json()) for figure in bench.figures(SIZES, part)]
    measured = [figure for figure in found if not figure["name"].startswith("load")]
    assert measured
    for figure in measured:
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)
