"""What `postroom doctor` says about the server of a store on PostgreSQL, and the commands that mend it."""

import asyncio
import shlex
from typing import Any

import pytest

from postroom import Engine, Tasks
from postroom.server.folder.diagnosis import facts_of_store
from postroom.stores.postgres.connection import Address
from postroom.stores.postgres.store import PostgresStore
from tests.integration.commandline import Result, postroom
from tests.pgbouncer import behind, program, running_bouncer
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer

__all__ = ["database", "postgres"]  # fixtures


@pytest.fixture
def store(postgres: PostgresServer) -> str:
    """A store of its own, whose tables a test may break, with two tasks and a message."""
    url = postgres.new_store()
    with Tasks.open(url) as tasks:
        for number in range(2):
            tasks.enqueue(agent="triage", payload=number)

    async def submit() -> None:
        async with Engine.open(url) as engine:
            await engine.submit(type="tool_call", org_id="acme", payload={})

    asyncio.run(submit())
    return url


def ask(url: str, statement: str) -> Any:
    """Run a statement on the tables of a store, which the statement calls `postroom`."""
    address = Address(url)
    with address.connect() as connection:
        found = connection.execute(statement.replace("postroom.", f"{address.schema}."))  # type: ignore[arg-type, unused-ignore]
        return found.fetchall() if found.description else None


def findings(result: Result, check: str) -> list[dict[str, str]]:
    return [one for one in result.line["findings"] if one["check"] == check]


def follow(url: str, finding: dict[str, str]) -> None:
    """Run the statement of a command with psql, over the same address."""
    name, address, option, statement = shlex.split(finding["command"])
    assert (name, option) == ("psql", "-c")
    assert Address(address).psql == Address(url).psql == address
    with Address(url).connect() as connection:
        connection.run(statement)


def test_a_healthy_server_is_one_line(store: str) -> None:
    result = postroom("doctor", "--data", store)
    assert (result.code, result.line["status"]) == (0, "ok"), result.out
    [found] = findings(result, "database")
    assert found["what"] == "all indexes are valid, no transaction is old, and LISTEN works"
    [found] = findings(postroom("doctor", "--data", f"{store}&listen=off"), "database")
    assert "wake-ups are switched off" in found["what"]


def test_wrong_counters_are_found_and_counted_again(store: str) -> None:
    ask(store, "SELECT postroom.fold_counts()")
    ask(store, "UPDATE postroom.counts SET n = n + 5 WHERE queue = 'triage'")
    ask(store, "INSERT INTO postroom.count_changes VALUES ('org:acme', 'DONE', 1), ('gone', 'LAPSES', 3)")
    result = postroom("doctor", "--data", store)
    [found] = findings(result, "database")
    assert (result.code, found["level"]) == (4, "problem")
    assert "the queue triage counts 7 records as P2, and holds 2" in found["what"]
    assert "the queue org:acme counts 1 records as DONE, and holds 0" in found["what"]
    assert "all organizations counts 1 records as DONE, and holds 0" in found["what"]
    assert postroom("doctor", "--data", store, "--quick").code == 0  # records are not counted
    follow(store, found)
    assert postroom("doctor", "--data", store).code == 0
    ask(store, "SELECT postroom.fold_counts()")
    assert postroom("doctor", "--data", store).code == 0
    assert ask(store, "SELECT n FROM postroom.counts WHERE counter = 'LAPSES'") == [(3,)]


def test_missing_and_invalid_indexes_are_found_and_made_again(store: str) -> None:
    ask(store, "DROP INDEX postroom.records_delayed")
    ask(
        store,
        "UPDATE pg_index SET indisvalid = false "
        "WHERE indexrelid = 'postroom.records_ready'::regclass",  # as after a failure
    )
    result = postroom("doctor", "--data", store, "--quick")
    found = findings(result, "database")
    assert [one["what"] for one in found] == [
        "the index records_ready is not valid", "the index records_delayed is missing",
    ]  # fmt: skip
    assert result.code == 4
    for one in found:
        follow(store, one)
    assert postroom("doctor", "--data", store).code == 0


def test_an_earlier_schema_is_a_warning_and_is_not_upgraded(store: str) -> None:
    [[newest]] = ask(store, "SELECT max(version) FROM postroom.migrations")
    ask(store, f"DELETE FROM postroom.migrations WHERE version = {newest}")  # noqa: S608 - a number
    result = postroom("doctor", "--data", store)
    [found] = findings(result, "stores")
    assert (result.code, found["command"].split()[0]) == (3, "pg_dump")
    assert f"has the earlier format {newest - 1}" in found["what"]
    assert ask(store, "SELECT max(version) FROM postroom.migrations") == [(newest - 1,)]
    ask(store, "INSERT INTO postroom.migrations VALUES (9999)")
    newer = postroom("doctor", "--data", store)
    assert (newer.code, "newer postroom" in findings(newer, "stores")[0]["what"]) == (4, True)


def test_old_rows_and_the_oldest_transaction_are_facts(store: str) -> None:
    schema = Address(store).schema
    with Address(store).connect() as held:
        held.execute("SET application_name = 'report'")
        held.execute("BEGIN")
        opened = PostgresStore(store)
        try:
            facts = facts_of_store(opened, store, deep=False).database
        finally:
            opened.close()
        assert facts is not None
        assert (facts.oldest_pid, facts.oldest_program) == (held.info.backend_pid, "report")
        assert facts.oldest_s > 0
        assert (facts.schema, facts.dead_rows.keys() >= {"records", "cells", "counts"}) == (schema, True)
        held.execute("ROLLBACK")


def test_a_pooler_does_not_pass_wake_ups_on(postgres: PostgresServer, database: str) -> None:
    if program() is None:
        pytest.skip("PgBouncer was NOT tested: install the Debian package pgbouncer")
    with Tasks.open(database) as tasks:
        tasks.enqueue(agent="triage", payload=1)
    with running_bouncer(postgres, size=2) as port:
        address = behind(port, database).replace("listen=off", "listen=on")
        [found] = findings(postroom("doctor", "--data", address), "database")
    assert (found["level"], found["what"]) == ("warning", "LISTEN does not work over this address")
