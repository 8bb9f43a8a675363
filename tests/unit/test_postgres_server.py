"""`PostgresServer`: the private server of tests and benchmarks."""

import psycopg

from postroom.testing.postgres_server import PostgresServer, running_postgres


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


def _kept(url: str) -> list[tuple[int, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT n FROM kept").fetchall()
