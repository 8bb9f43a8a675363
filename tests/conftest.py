"""What holds for every test: the Hypothesis profiles, and a summary that hides nothing.

At the end of a run it says how long each part took (a part is a folder below tests/) and which broker was
tested, and names every test that did not run, with the reason.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePath

import apsw
import pytest
from hypothesis import HealthCheck, settings

from postroom.stores.sqlite import file, store
from tests.postgresserver import EmptyStores, running_stores
from tests.rabbitmqserver import RabbitServer, is_installed, rabbitmq

TESTS = "tests"
BROKER = pytest.StashKey[str]()
"""The version of the broker that was tested."""
DATABASE = pytest.StashKey[str]()
"""The version of PostgreSQL that was tested."""

# No deadline and no speed check: how fast the machine is today is not a property of the code.
settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("default"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def _new_stores_are_copies() -> Iterator[None]:
    """A new SQLite store is a copy of a migrated one. The migrations take ten times as long as the copy."""
    migrated = apsw.Connection(":memory:")
    file.migrate(migrated, Path(":memory:"))
    image = migrated.serialize("main")
    migrated.close()

    def migrate(connection: apsw.Connection, path: Path) -> None:
        if connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is not None:
            file.migrate(connection, path)
            return
        own = apsw.Connection(":memory:")  # of this thread, and of this process after a fork
        own.deserialize("main", image)
        with connection.backup("main", own, "main") as copy:
            copy.step(-1)
        own.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "migrate", migrate)
        yield


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[RabbitServer]:
    """One RabbitMQ for all tests that need a broker. Each store has its own lanes in it."""
    if not is_installed():
        pytest.skip("RabbitMQ was NOT tested: install the Debian package rabbitmq-server")
    with rabbitmq(tmp_path_factory.mktemp("rabbitmq")) as server:
        pytestconfig.stash[BROKER] = server.version
        yield server


@pytest.fixture(scope="session")
def postgres_stores(pytestconfig: pytest.Config) -> Iterator[EmptyStores]:
    """The stores of one PostgreSQL server for all tests."""
    with running_stores() as stores:
        pytestconfig.stash[DATABASE] = stores.server.version
        yield stores


@pytest.fixture
def emptied_database(postgres_stores: EmptyStores) -> Iterator[str]:
    """The address of an empty store, which an earlier test may have used."""
    url = postgres_stores.take()
    yield url
    postgres_stores.give_back(url)


def part_of(nodeid: str) -> str:
    """`tests/unit/test_ids.py::test_order` belongs to `unit`."""
    folders = PurePath(nodeid.partition("::")[0]).parent.parts
    below = folders[1:] if folders[:1] == (TESTS,) else folders
    return below[0] if below else "(top)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write_times(terminalreporter)
    write_servers(terminalreporter)
    write_not_run(terminalreporter)


def write_times(terminal: pytest.TerminalReporter) -> None:
    spent_s: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for reports in terminal.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent_s[part_of(report.nodeid)] += report.duration
                tests[part_of(report.nodeid)].add(report.nodeid)
    if not spent_s:
        return
    terminal.section("time each part took")
    for part in sorted(spent_s, key=lambda part: -spent_s[part]):
        terminal.line(f"{part:<12} {spent_s[part]:8.1f} s {len(tests[part]):6} tests")
    total_tests = sum(len(names) for names in tests.values())
    terminal.line(f"{'all':<12} {sum(spent_s.values()):8.1f} s {total_tests:6} tests")


def write_servers(terminal: pytest.TerminalReporter) -> None:
    for what, key in (("broker", BROKER), ("database", DATABASE)):
        version = terminal.config.stash.get(key, None)
        if version is not None:
            terminal.line(f"The {what} was {version}.")


def write_not_run(terminal: pytest.TerminalReporter) -> None:
    skipped = terminal.stats.get("skipped", [])
    if not skipped:
        return
    terminal.section(f"{len(skipped)} NOT RUN", red=True, bold=True)
    for report in skipped:
        # A skip carries (file, line, reason); anything else is shown as it is.
        where_and_why = report.longrepr
        reason = where_and_why[2] if isinstance(where_and_why, tuple) else str(where_and_why)
        terminal.line(f"NOT RUN: {report.nodeid}: {reason.removeprefix('Skipped: ')}", red=True)
