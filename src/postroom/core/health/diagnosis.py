"""What `postroom doctor` concludes from the facts about a data folder.

Rule 1: every finding says what is wrong, why it matters, and the command that mends it.
Rule 2: nothing here looks at anything. The facts are arguments, the current time among them.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.core.health import health
from postroom.core.health.facts import (
    OPEN_FILES_MIN,
    BacklogFacts,
    DatabaseFacts,
    Facts,
    MoveFacts,
    StoreFacts,
)
from postroom.core.health.health import BACKLOG_AGE_S, Check, HealthFacts, Level, messages, span

DISK_FREE_BYTES_MIN = 1 << 30  # less is a warning
DISK_FREE_SHARE_MIN = 10  # on a small disk: less than a tenth is one
CLOCK_AHEAD_S = 5.0  # the newest event may come from a clock that was this much ahead
LEASE_LATE_S = 60.0  # after its end, a lease should have been swept
LEASE_LONG_S = 3_600.0  # a message that is worked on longer than this is worth a look
BACKLOG_SHARE = 0.8  # of the depth at which a queue refuses messages
SHIPPER_LAG_S = 60.0
TOKEN_SOON_S = 7 * 86_400.0
CERTIFICATE_SOON_S = 14 * 86_400.0
TRANSACTION_LONG_S = 300.0  # an open transaction keeps old rows of all tables
DEAD_ROWS_MIN = 100_000  # fewer old rows are not a problem, even in a small table
MAIL_FILES_WAITING = 2  # full files of Mail's events; one may be under way
SHOWN_MAX = 5  # names in one finding

MICROS_PER_S = 1_000_000
GIB = 1 << 30
NETWORK_DISKS: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p"})
RECOUNT: Final = (
    "LOCK TABLE postroom.count_changes IN EXCLUSIVE MODE; "
    "DELETE FROM postroom.count_changes WHERE counter <> 'LAPSES'; "
    "DELETE FROM postroom.counts WHERE counter <> 'LAPSES'; "
    "INSERT INTO postroom.count_changes SELECT queue, "
    "CASE state WHEN 'QUEUED' THEN 'P' || lane ELSE state END, count(*) FROM postroom.records GROUP BY 1, 2"
)
"""Counts the records again in one transaction. Commits wait for it, because each writes a change."""


class Finding(msgspec.Struct, frozen=True):
    """One conclusion."""

    check: str
    level: Level
    what: str
    why: str = ""
    command: str = ""


# ---- conclusions -------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """Every finding; a check without a warning or problem has one that says so."""
    found: list[Finding] = []
    for check in _CHECKS:
        *made, fine = [*check(facts)] or [Finding("", "ok", "")]
        found += made or ([fine] if fine.what else [])
    return found


def worst(findings: Sequence[Finding]) -> Level:
    """The highest level of the findings."""
    return health.worst(finding.level for finding in findings)


def _health(facts: Facts, check: Check) -> Iterator[Finding]:
    """The findings of one check about the flow of messages."""
    flow = facts.store.flow if facts.store else HealthFacts()
    broken = facts.server.broken if facts.server else {}
    for reason in health.judge(replace(flow, broken=broken)).reasons:
        if reason.check == check:
            yield Finding(check, reason.level, reason.what, reason.why, _cure(facts, check))


def _cure(facts: Facts, check: Check) -> str:
    match check:
        case "backlog" if facts.store is not None and facts.store.flow.is_paused:
            return f"postroom engine resume --data {_place(facts)}"
        case "backlog":
            return f"{_up(facts)} --app MODULE:ENGINE"
        case "breakers":
            return f"postroom engine status --data {_place(facts)}"
        case "server":
            return "read the log of `postroom up`: its last lines with this part say why"


def _environment(facts: Facts) -> Iterator[Finding]:
    found = facts.environment
    if found.sqlite_fault:
        yield Finding(
            "environment", "problem", found.sqlite_fault,
            "stores cannot be opened, or can be damaged by several processes", "pip install --upgrade apsw",
        )  # fmt: skip
    if found.open_files_max < OPEN_FILES_MIN:
        yield Finding(
            "environment", "warning", f"a process may open only {found.open_files_max} files",
            "a server refuses connections once it has reached the limit", f"ulimit -n {64 * OPEN_FILES_MIN}",
        )  # fmt: skip
    text = f"postroom {found.postroom}, Python {found.python}, SQLite {found.sqlite}"
    yield Finding("environment", "ok", text)


def _permissions(facts: Facts) -> Iterator[Finding]:
    folder = facts.folder
    if folder is None:
        return
    if folder.is_read_only:
        yield Finding(
            "permissions", "problem", f"the file system of {folder.path} is read-only",
            "no server can start; Linux makes a file system read-only when its disk fails",
            "read the log of the kernel (dmesg), and when the disk is well: "
            f"mount -o remount,rw $(findmnt -n -o TARGET -T {folder.path})",
        )  # fmt: skip
    elif not folder.is_writable:
        yield Finding(
            "permissions", "problem", f"this user cannot write to {folder.path}",
            "servers of this user cannot start", f"chown -R $(id -un) {folder.path}",
        )  # fmt: skip
    if folder.mode & 0o077:
        yield Finding(
            "permissions", "warning", f"other users can enter {folder.path} (mode {folder.mode:o})",
            "it holds messages and the registry of tokens", f"chmod 700 {folder.path}",
        )  # fmt: skip
    if folder.foreign and folder.is_writable:
        yield Finding(
            "permissions", "problem", f"this user cannot read and write {_names(folder.foreign)}",
            "a command was run as another user, and servers of this user will fail",
            f"chown -R $(id -un) {folder.path}",
        )  # fmt: skip
    yield Finding("permissions", "ok", "only this user can read the folder")


def _disk(facts: Facts) -> Iterator[Finding]:
    folder = facts.folder
    if folder is None:
        return
    free = f"{_size(folder.free_bytes)} of {_size(folder.total_bytes)} are free below {folder.path}"
    enlarge = f"df -h {folder.path}; du -sh {folder.path}/*"
    if folder.free_bytes <= folder.reserve_bytes:
        yield Finding(
            "disk", "problem", free, "posts to a bus are refused, and soon new messages are, too", enlarge
        )
    elif folder.free_bytes < min(DISK_FREE_BYTES_MIN, folder.total_bytes // DISK_FREE_SHARE_MIN):
        yield Finding("disk", "warning", free, "new messages are refused on a full disk", enlarge)
    if folder.filesystem in NETWORK_DISKS:
        yield Finding(
            "disk", "problem", f"{folder.path} is on a network disk ({folder.filesystem})",
            "file locks between machines are not reliable there, and SQLite can be damaged",
            "postroom move sqlite:///DIR/queue.db postgres://USER@HOST/DB, or use a local disk",
        )  # fmt: skip
    yield Finding("disk", "ok", f"{_size(folder.free_bytes)} are free")


def _clock(facts: Facts) -> Iterator[Finding]:
    ahead_s = (facts.clock.newest_us - facts.clock.now_us) / MICROS_PER_S
    if ahead_s > CLOCK_AHEAD_S:
        yield Finding(
            "clock", "warning", f"the newest event is {span(ahead_s)} in the future",
            "the clock of the machine was wrong or is; times in logs and reports are out of order",
            "timedatectl set-ntp true",
        )  # fmt: skip
    yield Finding("clock", "ok", "no event is in the future")


def _up(facts: Facts) -> str:
    """The command that serves what was looked at."""
    folder = facts.data if facts.folder else "DIR"
    if facts.store is None or facts.store.is_folder:
        return f"postroom up --data {facts.data}"
    return f"postroom up --data {folder} --store {facts.store.name}"


def _place(facts: Facts) -> str:
    """Where the messages are, as `--data` takes it."""
    return facts.data if facts.store is None or facts.store.is_folder else facts.store.name


def _parts(facts: Facts) -> Iterator[Finding]:
    server = facts.server
    if server is None:
        return
    yield from _health(facts, "server")
    for name, restarts in server.restarts.items():
        if restarts and name not in server.broken:
            times = "once" if restarts == 1 else f"{restarts} times"
            yield Finding(
                "server", "warning", f"the part {name} was restarted {times}",
                "it died, and may die again", "read the log of `postroom up` for the event `ended`",
            )  # fmt: skip
    for port in server.ports:
        if port.is_taken:
            yield Finding(
                "server", "warning", f"another program listens on {port.address}, the port of {port.part}",
                "`postroom up` cannot start there",
                f"postroom up --data {facts.data} --{port.part}-port 0, or end that program",
            )  # fmt: skip
    text = f"`postroom up` runs: {', '.join(server.parts) or 'it is starting'}"
    yield Finding(
        "server", "ok", text if server.is_running else "`postroom up` does not run, and its ports are free"
    )


def _stores(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if facts.moved is not None:
        yield _moved(facts.moved)
    if store is not None:
        yield from _format(facts, store)
        for fault in store.faults:
            yield _damage(facts, store.name, fault, is_folder=store.is_folder)
    for found in facts.faults:
        if not found.is_locked:
            yield _damage(facts, found.file, found.reason)
    if facts.copies and (store is None or not store.faults):
        yield Finding(
            "stores", "ok", f"{_names(facts.copies)} holds the store as it was before an upgrade",
            "it is needed only to go back to the earlier version",
            " ".join(["rm", *(f"{facts.data}/{name}" for name in facts.copies)]),
        )  # fmt: skip
    text = f"undamaged: {', '.join(facts.checked)}" if facts.checked else "not read (--quick)"
    yield Finding("stores", "ok", text)


def _format(facts: Facts, store: StoreFacts) -> Iterator[Finding]:
    if store.format > store.newest_format:
        yield Finding(
            "stores", "problem", f"{store.name} has format {store.format}, written by a newer postroom",
            f"this version knows formats up to {store.newest_format} and refuses it",
            "pip install --upgrade postroom",
        )  # fmt: skip
    elif store.format < store.newest_format:
        copy = ", and keeps a copy" if store.is_folder else ""
        yield Finding(
            "stores", "warning", f"{store.name} has the earlier format {store.format}",
            f"the next start upgrades it to {store.newest_format}{copy}",
            f"postroom backup --data {facts.data} --out before-upgrade.tar"
            if store.is_folder
            else "pg_dump --schema=postroom --file before-upgrade.sql",
        )  # fmt: skip


def _moved(moved: MoveFacts) -> Finding:
    what = f"{moved.path} was moved to {moved.to}"
    if moved.fault:
        return Finding(
            "stores", "warning", f"{what}, which was not checked: {moved.fault}",
            "the messages are there, and the file is a copy that takes no writes",
            f"postroom doctor --data {moved.to}, with its password",
        )  # fmt: skip
    return Finding(
        "stores", "warning", f"{what}; the checks of messages look there",
        "the settings do not name that store, so commands with --data read the copy, which takes no writes",
        f"set store = {moved.to} in [up] of the settings, or, if the move was killed half-way: "
        f"postroom move --undo sqlite:///{moved.path} {moved.to}",
    )  # fmt: skip


def _damage(facts: Facts, file: str, reason: str, *, is_folder: bool = True) -> Finding:
    return Finding(
        "stores", "problem", f"{file} is damaged: {reason}",
        "messages or events in it may be lost; damaged bytes are kept in place",
        f"postroom verify --data {facts.data}, then postroom restore --from BACKUP --data NEW_DIR"
        if is_folder
        else "restore the schema postroom from a dump of pg_dump into another database, and use that one",
    )  # fmt: skip


def _database(facts: Facts) -> Iterator[Finding]:
    database = facts.database
    if database is None:
        return
    yield from _indexes(database)
    if database.wrong_counters:
        yield Finding(
            "database", "problem", f"counters are wrong: {'; '.join(database.wrong_counters[:SHOWN_MAX])}",
            "limits of queues and backpressure act on a wrong depth",
            _psql(database, RECOUNT.replace("postroom.", f"{database.schema}.")),
        )  # fmt: skip
    if database.oldest_s > TRANSACTION_LONG_S:
        program = database.oldest_program or "a program"
        yield Finding(
            "database", "warning", f"a transaction of {program} is open since {span(database.oldest_s)}",
            "autovacuum removes no row that it could still see, so tables grow and claims get slow",
            _psql(database, f"SELECT pg_terminate_backend({database.oldest_pid})"),
        )  # fmt: skip
    for table, (dead, live) in database.dead_rows.items():
        if dead >= DEAD_ROWS_MIN and dead > live:
            yield Finding(
                "database", "warning",
                f"the table {table} has about {dead:,} old rows and {live:,} live ones",
                "claims read them, too; autovacuum does not keep up, or is switched off",
                _psql(database, f"VACUUM (ANALYZE) {database.schema}.{table}"),
            )  # fmt: skip
    if database.hears is False:
        yield Finding(
            "database", "warning", "LISTEN does not work over this address",
            "waiting workers of other machines poll instead of being woken, as behind PgBouncer",
            "add listen=off to the address, or connect to the server itself",
        )  # fmt: skip
    woken = {None: "wake-ups are switched off", True: "LISTEN works", False: ""}[database.hears]
    yield Finding("database", "ok", f"all indexes are valid, no transaction is old, and {woken}")


def _indexes(database: DatabaseFacts) -> Iterator[Finding]:
    for name in database.broken_indexes:
        yield Finding(
            "database", "problem", f"the index {name} is not valid",
            "no query uses it, so claims read whole tables; a unique index may have let in duplicates",
            _psql(database, f"REINDEX INDEX CONCURRENTLY {database.schema}.{name}"),
        )  # fmt: skip
    for name, statement in database.missing_indexes.items():
        yield Finding(
            "database", "problem", f"the index {name} is missing", "claims read whole tables",
            _psql(database, statement),
        )  # fmt: skip


def _psql(database: DatabaseFacts, statement: str) -> str:
    quoted = statement.replace("'", "'\\''")
    return f"psql '{database.psql}' -c '{quoted}'"


def _encryption(facts: Facts) -> Iterator[Finding]:
    for fault in facts.faults:
        if fault.is_locked:
            yield Finding(
                "encryption", "problem", fault.reason, f"{fault.file} cannot be opened or checked without it",
                f"postroom --key-file FILE doctor --data {facts.data}",
            )  # fmt: skip
    found = facts.encryption
    if found is not None and found.plain:
        yield Finding(
            "encryption", "warning", f"{found.plain} values are not encrypted yet",
            "they were stored before encryption was turned on",
            f"postroom keys encrypt --data {_place(facts)}",
        )  # fmt: skip
    text = "" if found is None else f"values are encrypted with the key {found.key}"
    if found is not None and found.outdated:
        text += f"; {found.outdated} values use an earlier key"
    yield Finding("encryption", "ok", text)


def _leases(facts: Facts) -> Iterator[Finding]:
    leases = facts.store.leases if facts.store else ()
    late = [lease for lease in leases if lease.late_s > LEASE_LATE_S]
    if late:
        longest = max(lease.late_s for lease in late)
        yield Finding(
            "leases", "problem",
            f"{_count(late, 'lease')} ended up to {span(longest)} ago and were not taken back: "
            f"{_names([lease.message_id for lease in late])}",
            "their messages wait, because no server and no worker sweeps the store",
            _up(facts),
        )  # fmt: skip
    long = [lease for lease in leases if lease not in late and lease.claimed_s > LEASE_LONG_S]
    for lease in long[:SHOWN_MAX]:
        verb = "engine" if lease.is_engine else "tasks"
        yield Finding(
            "leases", "warning",
            f"{lease.message_id} of {lease.queue} is worked on by {lease.worker_id or 'a worker'} "
            f"since {span(lease.claimed_s)}",
            "the worker sends heartbeats but may hang",
            f"postroom {verb} cancel {lease.message_id} --data {_place(facts)}",
        )  # fmt: skip
    yield Finding("leases", "ok", "no lease is stuck" if _is_read(facts) else "")


def _failures(facts: Facts) -> Iterator[Finding]:
    for queue in facts.store.queues if facts.store else ():
        if queue.quarantined:
            yield Finding(
                "poison", "problem", f"in quarantine: {messages(queue.quarantined)} of {queue.name}",
                "each of them killed its workers, and is delivered no more",
                _listing(facts, queue, "QUARANTINED"),
            )  # fmt: skip
        if queue.dead_letters:
            yield Finding(
                "poison", "warning", f"dead letters: {messages(queue.dead_letters)} of {queue.name}",
                "they failed for good, and wait for a decision", _listing(facts, queue, "DEAD_LETTER"),
            )  # fmt: skip
    text = "no dead letters, and nothing in quarantine" if _is_read(facts) else ""
    yield Finding("poison", "ok", text)


def _listing(facts: Facts, queue: BacklogFacts, state: str) -> str:
    if queue.is_engine:
        return f"postroom engine dlq list --data {_place(facts)} --org {queue.name}"
    return f"postroom tasks list --data {_place(facts)} --agent {queue.name} --state {state}"


def _backlog(facts: Facts) -> Iterator[Finding]:
    """Of the engine, and of each agent's queue."""
    yield from _health(facts, "backlog")
    queues = facts.store.queues if facts.store else ()
    for queue in (each for each in queues if not each.is_engine):
        if queue.depth_max and queue.depth >= queue.depth_max:
            yield Finding(
                "backlog", "problem", f"the queue {queue.name} is full: {queue.depth} messages",
                "new messages are refused", _more_workers(facts, queue),
            )  # fmt: skip
        elif queue.depth_max and queue.depth >= BACKLOG_SHARE * queue.depth_max:
            yield Finding(
                "backlog", "warning",
                f"{queue.depth} of at most {queue.depth_max} messages are in {queue.name}, delayed or not",
                "new messages are refused when the queue is full", _more_workers(facts, queue),
            )  # fmt: skip
        elif queue.oldest_s is not None and queue.oldest_s > BACKLOG_AGE_S:
            waited = f"in {queue.name} has waited {span(queue.oldest_s)}"
            yield Finding(
                "backlog", "warning", f"the oldest of {messages(queue.waiting)} {waited}",
                "too few workers claim from this queue, or none", _more_workers(facts, queue),
            )  # fmt: skip
    waiting, delayed = sum(queue.waiting for queue in queues), sum(queue.delayed for queue in queues)
    text = f"waiting: {messages(waiting)}" + (f"; delayed: {messages(delayed)}" if delayed else "")
    yield Finding("backlog", "ok", text if _is_read(facts) else "")


def _breakers(facts: Facts) -> Iterator[Finding]:
    yield from _health(facts, "breakers")
    yield Finding("breakers", "ok", "")


def _more_workers(facts: Facts, queue: BacklogFacts) -> str:
    return f"postroom tasks work --data {_place(facts)} --agent {queue.name} --exec COMMAND"


def _shipper(facts: Facts) -> Iterator[Finding]:
    shipper = facts.store.shipper if facts.store else None
    command = _up(facts)
    if shipper is not None and shipper.waiting > shipper.backlog_max:
        how = "refused" if shipper.refuses else "slowed down"
        yield Finding(
            "shipper", "problem", f"{shipper.waiting} events wait for the audit stream",
            f"new messages are {how}", command,
        )  # fmt: skip
    elif shipper is not None and shipper.waiting and shipper.oldest_s > SHIPPER_LAG_S:
        yield Finding(
            "shipper", "warning",
            f"{shipper.waiting} events wait for the audit stream, the oldest for {span(shipper.oldest_s)}",
            f"no shipper runs; at {shipper.backlog_max} waiting events new messages are slowed or refused",
            f"{command}, or without a stream: postroom audit detach --data {facts.data}",
        )  # fmt: skip
    rows = facts.store.quarantined_rows if facts.store else 0
    if rows:
        subject, verb = ("1 row", "is") if rows == 1 else (f"{rows} rows", "are")
        yield Finding(
            "shipper", "problem", f"{subject} of events cannot be read, and {verb} kept apart",
            "the audit stream has alerts instead of their events, because the disk or the file is damaged",
            f"postroom verify --data {facts.data}, then postroom restore --from BACKUP --data NEW_DIR",
        )  # fmt: skip
    if facts.mail_files_waiting >= MAIL_FILES_WAITING:
        yield Finding(
            "shipper", "warning", f"{facts.mail_files_waiting} full files of Mail's events are not shipped",
            "the oldest are removed when they fill 1 GiB", command,
        )  # fmt: skip
    shipped = "events are not shipped"
    if shipper is not None:
        shipped = f"{shipper.waiting} events wait to be shipped"
    yield Finding("shipper", "ok", shipped if _is_read(facts) else "")


def _expectations(facts: Facts) -> Iterator[Finding]:
    if facts.breach:
        yield Finding(
            "expectations", "warning", f"the tables of the pipeline break an expectation: {facts.breach}",
            "reports over them may be wrong", f"postroom pipeline check --tables {facts.data}/tables",
        )  # fmt: skip
    yield Finding("expectations", "ok", "")


def _tokens(facts: Facts) -> Iterator[Finding]:
    if facts.tokens is None:
        return
    now_us = facts.clock.now_us
    valid = [token for token in facts.tokens if token.expires_us is None or token.expires_us > now_us]
    if facts.tokens and not any(token.role == "admin" for token in valid):
        yield Finding(
            "tokens", "warning", "no token of an admin is valid", "nobody can make tokens over HTTP",
            f"postroom token create --data {facts.data} --role admin",
        )  # fmt: skip
    for token in valid:
        if token.is_demo:
            continue
        if token.expires_us is not None and token.expires_us - now_us < TOKEN_SOON_S * MICROS_PER_S:
            left_s = (token.expires_us - now_us) / MICROS_PER_S
            yield Finding(
                "tokens", "warning",
                f"the token {token.token_id} of {token.agent or token.role} expires in {span(left_s)}",
                "its calls are refused from then on",
                f"postroom token rotate {token.token_id} --data {facts.data} --overlap-s 3600",
            )  # fmt: skip
    for token in facts.tokens:
        if token not in valid:
            yield Finding(
                "tokens", "ok", f"the token {token.token_id} of {token.agent or token.role} has expired",
                "it is refused, and only takes up a place in the list",
                f"postroom token revoke {token.token_id} --data {facts.data}",
            )  # fmt: skip
    yield Finding("tokens", "ok", f"{_count(facts.tokens, 'token')}, none expires soon")


def _certificate(facts: Facts) -> Iterator[Finding]:
    if facts.certificate is None:
        return
    left_s = (facts.certificate.ends_us - facts.clock.now_us) / MICROS_PER_S
    command = "renew it; a restart of `postroom up` uses the new one"
    if left_s <= 0:
        yield Finding(
            "certificate", "problem", f"the certificate {facts.certificate.path} has ended",
            "clients refuse the connection", command,
        )  # fmt: skip
    elif left_s < CERTIFICATE_SOON_S:
        yield Finding(
            "certificate", "warning",
            f"the certificate {facts.certificate.path} ends in {span(left_s)}",
            "clients refuse the connection from then on", command,
        )  # fmt: skip
    yield Finding("certificate", "ok", f"the certificate ends in {span(left_s)}")


def _is_read(facts: Facts) -> bool:
    """Whether messages were read: a store of another format, or one that was moved away, is not."""
    store = facts.store
    if store is None or store.format != store.newest_format:
        return False
    return facts.moved is None or not store.is_folder


_CHECKS = (
    _environment, _permissions, _disk, _clock, _parts, _stores, _database, _encryption, _leases, _failures,
    _backlog, _breakers, _shipper, _expectations, _tokens, _certificate,
)  # fmt: skip
"""Each ends with what it says when all is well, which is dropped when it has found something."""


# ---- words -------------------------------------------------------------------------------------------


def _names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB else f"{n / (1 << 20):.1f} MiB"
