"""`StoreContract` for PostgreSQL, then what holds for it alone: processes, faults, migrations, secrets."""

from pathlib import Path

import pytest

from postroom.stores.postgres import PostgresStore
from postroom.stores.store import Store
from postroom.testing import ManualClock, StoreContract
from postroom.testing.postgres_server import PostgresServer
from tests.postgresserver import database, postgres

__all__ = ["database", "postgres"]  # fixtures


class TestPostgres(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres
        self.databases: dict[Path, str] = {}

    def open(self, folder: Path, clock: ManualClock) -> Store:
        if folder not in self.databases:
            self.databases[folder] = self.server.new_store()
        return PostgresStore(self.databases[folder], clock=clock)
