"""`PostgresServer`: the private server of tests and benchmarks."""

from pathlib import Path

import psycopg
import pytest

from tests.privatepostgres import PROGRAMS_VARIABLE, PostgresServer, running_postgres


@pytest.mark.statement("database-restart")
def test_a_killed_server_starts_again_with_what_was_committed() -> None:
    with running_postgres() as server:
        url = server.new_database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute("INSERT INTO kept VALUES (7)")
        folder = server.folder
        server.kill()
        server.start()
        assert _kept(url) == [(7,)]
    assert not folder.exists()
    assert isinstance(server, PostgresServer)


def test_a_version_that_was_asked_for_and_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRAMS_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=PROGRAMS_VARIABLE):
        PostgresServer(tmp_path / "data")


def _kept(url: str) -> list[tuple[int, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT n FROM kept").fetchall()
