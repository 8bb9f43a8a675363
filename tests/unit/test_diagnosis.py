"""What the doctor concludes from facts."""

from typing import Any

import pytest
from msgspec.structs import replace

from postroom.core.health.diagnosis import Finding, diagnose, worst
from postroom.core.health.facts import (
    BacklogFacts,
    ClockFacts,
    DatabaseFacts,
    EnvironmentFacts,
    Facts,
    FileFault,
    FolderFacts,
    LeaseFacts,
    MoveFacts,
    PortFacts,
    ServerFacts,
    ShipperFacts,
    StoreFacts,
    TokenFacts,
)

NOW_US = 1_800_000_000_000_000
DAY_US = 86_400_000_000
GIB = 1 << 30
FOLDER = FolderFacts("run", 0o700, is_writable=True, free_bytes=50 * GIB, total_bytes=100 * GIB)
STORE = StoreFacts("queue.db", 6, 6)
WELL = Facts(
    "run",
    EnvironmentFacts("1.0", "3.11.7", "3.54.1"),
    ClockFacts(NOW_US, NOW_US),
    folder=FOLDER,
    server=ServerFacts(is_running=False),
    store=STORE,
    tokens=(TokenFacts("t1", "admin", "", None),),
    checked=("store",),
)


def environment(**fields: Any) -> Facts:
    return replace(WELL, environment=replace(WELL.environment, **fields))


def folder(**fields: Any) -> Facts:
    return replace(WELL, folder=replace(FOLDER, **fields))


def server(**fields: Any) -> Facts:
    return replace(WELL, server=ServerFacts(**fields))


def store(**fields: Any) -> Facts:
    return replace(WELL, store=replace(STORE, **fields))


def database(**fields: Any) -> Facts:
    return replace(WELL, database=DatabaseFacts("postgres://h/db", "s", hears=True, **fields))


def with_queue(**fields: Any) -> Facts:
    return replace(WELL, store=replace(STORE, queues=(BacklogFacts("triage", 3, 100, **fields),)))


def with_lease(*, claimed_s: float = 100.0, late_s: float = 0.0) -> Facts:
    lease = LeaseFacts("t-1", "triage", "w1", claimed_s, late_s)
    return replace(WELL, store=replace(STORE, leases=(lease,)))


def with_shipper(*fields: Any) -> Facts:
    return replace(WELL, store=replace(STORE, shipper=ShipperFacts(*fields)))


def with_token(expires_us: int) -> Facts:
    return replace(WELL, tokens=(*(WELL.tokens or ()), TokenFacts("t2", "agent", "ada", expires_us)))


RESTARTED = server(is_running=True, parts={"mail": "running"}, restarts={"mail": 1})
BROKEN = server(is_running=True, parts={"mail": "restarting"}, broken={"mail": "restarting after 1 failures"})
TAKEN = server(is_running=False, ports=(PortFacts("http", "h:1", is_taken=True),))
TORN = replace(WELL, faults=(FileFault("bus", "buses/a.yaml", "torn"),))
NO_ADMIN = replace(WELL, tokens=(TokenFacts("t3", "agent", "ada", None),))


def test_a_token_of_the_demo_may_expire_soon() -> None:
    made = TokenFacts("t2", "agent", "demo-coder", WELL.clock.now_us + 1_000_000, is_demo=True)
    findings = diagnose(replace(WELL, tokens=(*(WELL.tokens or ()), made)))
    assert [each for each in findings if each.level != "ok"] == []


def test_a_healthy_folder_has_a_line_for_every_check_and_no_advice() -> None:
    findings = diagnose(WELL)
    assert worst(findings) == "ok"
    assert not any(finding.command for finding in findings)
    names = [finding.check for finding in findings]
    assert len(names) == len(set(names)) == 11


@pytest.mark.parametrize(
    ("facts", "check", "level", "words"),
    [
        (environment(sqlite_fault="too old"), "environment", "problem", "too old"),
        (environment(open_files_max=256), "environment", "warning", "256 files"),
        (folder(mode=0o755), "permissions", "warning", "mode 755"),
        (folder(is_read_only=True), "permissions", "problem", "system of run is read-only"),
        (folder(is_writable=False), "permissions", "problem", "cannot write"),
        (folder(foreign=("queue.db",)), "permissions", "problem", "queue.db"),
        (folder(free_bytes=GIB // 2), "disk", "warning", "512.0 MiB of"),
        (folder(free_bytes=9, reserve_bytes=9), "disk", "problem", "are free below run"),
        (folder(filesystem="nfs4"), "disk", "problem", "network disk"),
        (replace(WELL, clock=ClockFacts(NOW_US, NOW_US + DAY_US)), "clock", "warning", "24 h in the future"),
        (BROKEN, "server", "problem", "mail does not work: restarting after 1 failures"),
        (RESTARTED, "server", "warning", "restarted once"),
        (TAKEN, "server", "warning", "listens on h:1"),
        (store(format=7), "stores", "problem", "newer postroom"),
        (store(format=5), "stores", "warning", "earlier format 5"),
        (store(format=5, is_folder=False), "stores", "warning", "earlier format 5"),
        (database(wrong_counters=("q counts 1",)), "database", "problem", "counters are wrong: q counts 1"),
        (database(broken_indexes=("i",)), "database", "problem", "the index i is not valid"),
        (database(missing_indexes={"i": "CREATE INDEX i"}), "database", "problem", "the index i is missing"),
        (database(oldest_s=301.0, oldest_program="psql"), "database", "warning", "psql is open since 5 min"),
        (database(dead_rows={"records": (100_000, 9)}), "database", "warning", "about 100,000 old rows"),
        (replace(WELL, database=DatabaseFacts("p", "s", hears=False)), "database", "warning", "LISTEN"),
        (replace(WELL, moved=MoveFacts("q", "pg")), "stores", "warning", "q was moved to pg"),
        (replace(WELL, moved=MoveFacts("q", "pg", "no")), "stores", "warning", "was not checked: no"),
        (store(faults=("page 3",)), "stores", "problem", "queue.db is damaged: page 3"),
        (TORN, "stores", "problem", "buses/a.yaml is damaged"),
        (with_lease(late_s=90.0), "leases", "problem", "t-1"),
        (with_lease(claimed_s=7_200.0), "leases", "warning", "since 2 h"),
        (with_queue(quarantined=1), "poison", "problem", "1 message of triage"),
        (with_queue(dead_letters=2), "poison", "warning", "2 messages of triage"),
        (with_queue(oldest_s=601.0), "backlog", "warning", "has waited 10 min"),
        (with_queue(oldest_s=601.0, delayed=2), "backlog", "warning", "the oldest of 1 message in triage"),
        (store(queues=(BacklogFacts("q", 80, 100),)), "backlog", "warning", "80 of at most 100"),
        (store(queues=(BacklogFacts("q", 100, 100),)), "backlog", "problem", "is full"),
        (with_shipper(10, 5, 1.0, True), "shipper", "problem", "10 events wait"),
        (with_shipper(10, 50, 61.0), "shipper", "warning", "the oldest for 61 s"),
        (store(quarantined_rows=2), "shipper", "problem", "2 rows of events cannot be read, and are kept"),
        (replace(WELL, mail_files_waiting=2), "shipper", "warning", "2 full files"),
        (with_token(NOW_US + DAY_US), "tokens", "warning", "t2 of ada expires in 24 h"),
        (NO_ADMIN, "tokens", "warning", "no token of an admin"),
    ],
)  # fmt: skip
def test_each_trouble_is_found_with_a_reason_and_a_command(
    facts: Facts, check: str, level: str, words: str
) -> None:
    findings = [finding for finding in diagnose(facts) if finding.level != "ok"]
    assert [(finding.check, finding.level) for finding in findings] == [(check, level)]
    assert words in findings[0].what
    assert findings[0].why
    assert findings[0].command
    assert worst(diagnose(facts)) == level


@pytest.mark.parametrize(
    "facts",
    [
        with_lease(late_s=59.0),
        database(oldest_s=299.0, dead_rows={"records": (99_999, 0), "events": (100_000, 100_000)}),
        with_queue(oldest_s=599.0),
        with_shipper(10, 50, 59.0),
        with_token(NOW_US + 8 * DAY_US),
        replace(WELL, mail_files_waiting=1),
    ],
)
def test_below_its_threshold_nothing_is_reported(facts: Facts) -> None:
    assert worst(diagnose(facts)) == "ok"


def test_nothing_is_said_about_the_messages_of_a_store_that_was_not_opened() -> None:
    known = {finding.check for finding in diagnose(store(format=5))}
    assert {finding.check for finding in diagnose(WELL)} - known == {"leases", "poison", "backlog", "shipper"}


def test_nothing_is_said_about_the_messages_of_a_copy_that_a_move_has_left() -> None:
    left = replace(WELL, moved=MoveFacts("run/queue.db", "postgres://x", "it does not answer"))
    assert {finding.check for finding in diagnose(left)}.isdisjoint(
        {"leases", "poison", "backlog", "shipper"}
    )


def test_commands_name_the_store_of_the_messages() -> None:
    late = LeaseFacts("t-1", "triage", "w1", 100.0, 90.0)
    there = replace(
        STORE,
        name="postgres://x",
        is_folder=False,
        leases=(late,),
        queues=(BacklogFacts("q", 0, 9, dead_letters=1),),
    )
    commands = {finding.check: finding.command for finding in diagnose(replace(WELL, store=there))}
    assert commands["leases"] == "postroom up --data run --store postgres://x"
    assert commands["poison"] == "postroom tasks list --data postgres://x --agent q --state DEAD_LETTER"


def test_an_expired_token_is_reported_but_is_not_a_problem() -> None:
    findings = diagnose(with_token(NOW_US - 1))
    assert worst(findings) == "ok"
    assert (
        Finding(
            "tokens",
            "ok",
            "the token t2 of ada has expired",
            "it is refused, and only takes up a place in the list",
            "postroom token revoke t2 --data run",
        )
        in findings
    )
