"""The connections of a PostgreSQL store: its address, a small pool, the schema.

Rule 1: the password of an address stays in this module. Errors and `url` never contain it.
Rule 2: a connection that behaved unexpectedly is closed, never used again.
Rule 3: no call waits indefinitely. The server ends statements after `statement_timeout_s`, the system closes
        a connection whose bytes are not acknowledged within `SENT_TIMEOUT_S`, and a watchdog ends all other
        waits.
Rule 4: when the server refuses the role, the password, the database or the certificate, nothing is retried:
        `StoreRefused` is raised at once.
"""

import re
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlunsplit

from postroom.errors import InvalidMessage, StoreDamaged, StoreRefused, StoreUnreachable, shown_address
from postroom.stores.postgres import refusal
from postroom.system.addresses import ESCAPED, split_address
from postroom.system.handles import leak

try:
    import psycopg
    from psycopg.conninfo import conninfo_attempts, conninfo_to_dict

    from postroom.stores.postgres.trips import Connection
    from postroom.stores.postgres.watchdog import MARK, WaitLimits, Watchdog
except ImportError as missing:  # a store is opened lazily, so this is the first place that needs it
    raise InvalidMessage(
        "a store on PostgreSQL needs the extra postgres: pip install 'postroom[postgres]'"
    ) from missing

SCHEMES = ("postgres://", "postgresql://")
SCHEMA_DEFAULT = "postroom"
IDLE_CONNECTIONS_MAX = 8
POOLED_IDLE_TIMEOUT_S = 2.0  # for the next statement of a transaction behind a pooler
SENT_TIMEOUT_S = 4.0  # for the acknowledgement of sent bytes by the server's host, not for an answer
OLDEST_SERVER = 140_000  # version 14
KEEPALIVE_IDLE_S = 10  # an idle connection is probed after this time ...
KEEPALIVE_INTERVAL_S = 3  # ... that often ...
KEEPALIVES = 3  # ... and counts as lost after this many probes without an answer
_OWN_OPTIONS = ("schema", "listen", "prepare")
_SECRETS = ("password", "sslpassword", "passfile")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,40}")
_TCP = {
    "keepalives_idle": KEEPALIVE_IDLE_S,
    "keepalives_interval": KEEPALIVE_INTERVAL_S,
    "keepalives_count": KEEPALIVES,
    "tcp_user_timeout": round(SENT_TIMEOUT_S * 1000),
}
_WHERE = re.compile(r"^connection failed: |connection to server at .*? failed: ")

_SESSION = (
    "SET statement_timeout = {timeout_ms}; SET idle_in_transaction_session_timeout = {timeout_ms}; "
    "SET timezone = 'UTC'; SET jit = off; "
    # Every query has its index. Plans are made while a store is empty and are kept, so the planner must not
    # be led to read whole tables.
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off; "
    f"SELECT {MARK} FROM pg_stat_activity WHERE pid = pg_backend_pid()"
)

ON_DISK = (
    "CASE current_setting('synchronous_commit') "
    "WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
"""In a transaction: its commit waits for the disk, also when the role, the database or the server says `off`.

It holds for one transaction, so that it also works behind a pooler. Other values stay as they are.
"""


class Address:
    """The address of a store, taken apart.

    `postgres://user@host:port/db?schema=x&listen=off&prepare=off`; all other options go to libpq, such as
    `sslmode=verify-full` or several hosts with `target_session_attrs=read-write`.
    """

    def __init__(self, url: str, limits: WaitLimits | None = None) -> None:
        parts = split_address(url, several=True)
        if parts is None:
            raise InvalidMessage(f"{shown_address(url)} is not the address of a database: {ESCAPED}")
        options = parse_qsl(parts.query, keep_blank_values=True)
        own = {name: value for name, value in options if name in _OWN_OPTIONS}
        self.schema = own.get("schema", SCHEMA_DEFAULT)
        self.listens = own.get("listen", "on") != "off"
        self.prepares = own.get("prepare", "on") != "off"
        rest = [(name, value) for name, value in options if name not in _OWN_OPTIONS]
        given = {name for name, _ in rest}
        self._tcp: dict[str, Any] = {name: value for name, value in _TCP.items() if name not in given}
        self.watchdog = Watchdog(self.connect, limits or WaitLimits())
        self._secrets = [value for name, value in rest if name in _SECRETS and value]
        user, at, hosts = parts.netloc.rpartition("@")
        name, colon, password = user.partition(":")
        if colon and password:
            self._secrets += [password, unquote(password)]
        shown = [(name, value) for name, value in options if name not in _SECRETS]
        self.url = urlunsplit(("postgres", f"{name}{at}{hosts}", parts.path, urlencode(shown), ""))
        public = [(name, value) for name, value in rest if name not in _SECRETS]
        self.psql = urlunsplit(("postgres", f"{name}{at}{hosts}", parts.path, urlencode(public), ""))
        """The address for psql, without a password."""
        self._conninfo = urlunsplit(
            ("postgresql", parts.netloc, parts.path, urlencode(rest, quote_via=quote), "")
        )
        if not _SCHEMA.fullmatch(self.schema):
            raise InvalidMessage(
                f"schema must be lowercase letters, digits and underscores, not {self.schema!r}"
            )
        try:
            conninfo_to_dict(self._conninfo)
        except psycopg.Error as error:
            raise InvalidMessage(
                f"{self.url} is not the address of a database: {self.hidden(error)}"
            ) from None

    def hidden(self, error: object) -> str:
        """The text of an error as one line, without the password."""
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def connect(self) -> Connection:
        """A connection with the settings of a store. Raises `StoreRefused` when a retry cannot help."""
        try:
            connection = self._connect()
        except psycopg.OperationalError as error:
            connection = self._connect_once_more(error)
        timeout_ms = round(self.watchdog.limits.statement_timeout_s * 1000)
        try:
            with self.watchdog.watching(connection):
                session = connection.run(_SESSION.format(timeout_ms=timeout_ms))
                connection.mark = _mark(connection, session)
        except BaseException:
            self.watchdog.drop(connection)
            raise
        return connection

    def _connect(self) -> Connection:
        connection = Connection.connect(
            self._conninfo, autocommit=True, prepare_threshold=0 if self.prepares else None,
            connect_timeout=self.watchdog.limits.connect_timeout_s,
            application_name="postroom", client_encoding="UTF8",
            **self._tcp,
        )  # fmt: skip
        connection.watchdog = self.watchdog
        return connection

    def _connect_once_more(self, error: psycopg.OperationalError) -> Connection:
        """Find out whether the server refuses this client, or is only not ready yet."""
        if refusal.is_local(error):
            raise self._refused(error) from None
        hosts = conninfo_attempts(conninfo_to_dict(self._conninfo))
        if not refusal.are_ready(hosts, error, self.watchdog.limits.connect_timeout_s):
            raise error
        try:
            return self._connect()  # it may have become ready after the first attempt
        except psycopg.OperationalError as second:
            if str(second) != str(error):
                raise
            raise self._refused(second) from None

    def _refused(self, error: object) -> StoreRefused:
        return StoreRefused(self.url, _WHERE.sub("", self.hidden(error)))

    def after_fork(self) -> None:
        """A child does not have the thread of the watchdog."""
        self.watchdog.fresh()


def _mark(connection: Connection, session: Any) -> str:
    """The mark of a session; empty when it is unknown.

    Behind a pooler, each transaction may run in another process of the server, and libpq knows none of them.
    """
    mark = (session.get_value(0, 0) or b"").decode() if session.ntuples else ""
    return mark if mark.startswith(f"{connection.pgconn.backend_pid}-") else ""


class Pool:
    """Idle connections. A caller takes one, and returns it after a success."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.watchdog = address.watchdog
        self._idle: list[Connection] = []
        self._is_closed = False

    def take(self) -> Connection:
        """An idle connection, or a new one. A pool that was closed is in use again."""
        self._is_closed = False
        with suppress(IndexError):
            return self._idle.pop()
        return self._address.connect()

    def give_back(self, connection: Connection) -> None:
        """Keep a healthy connection for the next caller. After `close`, nobody else would close it."""
        is_idle = connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if is_idle and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(connection)
            if self._is_closed:  # looked at last, so that either this thread or the one that closes sees it
                self.close()
        else:
            self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection."""
        self.watchdog.drop(connection)

    def close(self) -> None:
        """Close all idle connections, and those that callers give back from now on."""
        self._is_closed = True
        with suppress(IndexError):  # another thread took the last one
            while self._idle:
                self.drop(self._idle.pop())

    def after_fork(self) -> None:
        """A child must neither use nor close the connections of its parent."""
        for connection in self._idle:
            leak(connection)
        self._idle = []
        self._address.after_fork()


# ---- SQL in files ----------------------------------------------------------------------------------


@cache
def migrations(schema: str) -> dict[int, str]:
    """The scripts of the schema, by number."""
    scripts = {}
    for file in resources.files("postroom.stores.postgres.sql").iterdir():
        number = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if number:
            scripts[int(number[1])] = _in_schema(file.read_text(), schema)
    return dict(sorted(scripts.items()))


@cache
def queries(schema: str) -> dict[str, str]:
    """The named queries."""
    text = resources.files("postroom.stores.postgres.sql").joinpath("queries.sql").read_text()
    found = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    named = zip(found[::2], found[1::2], strict=True)
    return {name: _in_schema(query.strip(), schema) for name, query in named}


def _in_schema(text: str, schema: str) -> str:
    return re.sub(rf"\b{SCHEMA_DEFAULT}\.", f"{schema}.", text)


def migrate(connection: Connection, address: Address) -> None:
    """Bring the schema to the current version, one script per transaction. Other workers may be at work."""
    schema = address.schema
    if connection.info.server_version < OLDEST_SERVER:
        raise StoreDamaged(
            f"{address.url} is PostgreSQL {connection.info.server_version // 10_000}: use 14 or newer"
        )
    if connection.info.parameter_status("server_encoding") != "UTF8":
        raise StoreDamaged(f"the database {address.url} is not encoded in UTF8: create one that is")
    scripts = migrations(schema)
    version = _version(connection, schema)
    if version > max(scripts):
        raise StoreDamaged(
            f"{address.url} was written by a newer postroom (its version {version}): upgrade this one"
        )
    for number, script in scripts.items():
        if number > version:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 2)", [schema])
                if _version(connection, schema) < number:
                    _apply(connection, schema, number, script)


def _version(connection: Connection, schema: str) -> int:
    """The version of the schema; 0 when there is none.

    The catalog is asked, because `to_regclass` may not see a table that another session has just made.
    """
    found = connection.execute(
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = 'migrations'",
        [schema],
    )
    if found.fetchone() is None:
        return 0
    rows = connection.execute(f"SELECT max(version) FROM {schema}.migrations").fetchone()  # type: ignore[arg-type, unused-ignore]
    return int(rows[0]) if rows and rows[0] is not None else 0


def versions(url: str) -> tuple[int, int]:
    """The version of the store at an address, 0 when there is none, and the newest known one."""
    address = Address(url)
    try:
        with address.connect() as connection:
            return _version(connection, address.schema), max(migrations(address.schema))
    except psycopg.Error as error:
        raise unreachable(address, error, rolled_back=True) from None


def _apply(connection: Connection, schema: str, number: int, script: str) -> None:
    connection.execute("SET LOCAL statement_timeout = 0")
    head = (
        f"CREATE SCHEMA IF NOT EXISTS {schema}; "
        f"CREATE TABLE IF NOT EXISTS {schema}.migrations "
        "(version int PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    try:
        connection.run(f"{head};\n{script};\nINSERT INTO {schema}.migrations VALUES ({number})")
    except (psycopg.errors.InsufficientPrivilege, psycopg.OperationalError):
        raise
    except psycopg.Error as error:
        raise StoreDamaged(f"migration {number} failed: {error}") from error


def unreachable(address: Address, error: object, *, rolled_back: bool) -> StoreUnreachable:
    """The error for a server that does not answer."""
    return StoreUnreachable(address.url, address.hidden(error), rolled_back=rolled_back)
