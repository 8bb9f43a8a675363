"""Replay: submits past messages again, to the store that they came from or to a sandbox.

Rule 1: `silver_messages` selects and orders the messages, in a sealed database. Their payloads come from the
        store, or from the encrypted field of the stream. A payload that may be redacted is never submitted,
        but counted as refused. So is a message that cannot be a task.
Rule 2: a message is submitted under the key (replay id, message id). The replay id is a hash of the request,
        so the same command, killed and repeated, submits the rest and nothing twice.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from postroom.audit.cipher import PREFIX, Cipher, UnreadablePayload
from postroom.core.formats.events import SCHEMA, AuditEvent
from postroom.errors import InvalidMessage, InvalidSetting
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.database import Database
from postroom.pipeline.spark.session import first_sentence
from postroom.pipeline.submission import COMMIT_MESSAGES, ReplayMessage, Submitter, chunks, is_fit
from postroom.stores.open import SQLITE, open_store

ID_CHARS: Final = 12
COMMITS_A_S: Final = 10  # at a limited rate
REPORT_EVERY_S: Final = 1.0
SAMPLES_MAX: Final = 5

Progress = Callable[[str], None]


class ReplaySelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages to submit again, and where."""

    where: str
    """A condition on `silver_messages`, in SQL."""
    to: str
    since_us: int | None = None
    """Bounds of the creation time."""
    until_us: int | None = None
    store: str | None = None
    """The store that still has the payloads."""
    key_file: Path | None = None
    """The keys of payloads that are encrypted in the stream."""
    rate: float | None = None
    """The maximum number of messages a second."""
    replay_id: str = ""
    dry_run: bool = False

    def resolved_id(self) -> str:
        """The replay id: the given one, or a hash of the request."""
        if self.replay_id:
            return self.replay_id
        text = repr((self.where, self.since_us, self.until_us, self.to))
        return f"replay-{hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS]}"


class ReplayResult(msgspec.Struct):
    """The result of a replay."""

    replay_id: str
    selected: int = 0
    submitted: int = 0
    known: int = 0
    """Submitted by an earlier run of this replay."""
    refused: int = 0
    """Their payload is redacted or gone, or they are unfit."""
    unfit: int = 0
    """Of those refused: without a queue, or with a queue or id that no task can have."""
    refused_samples: list[str] = []


def replay(tables: Tables, request: ReplaySelection, progress: Progress = lambda _: None) -> ReplayResult:
    """Submit the messages in the order in which they were created."""
    if request.store is None and request.key_file is None:
        raise InvalidSetting(
            "the source of the payloads is missing: a store that has them, or the keys of the stream"
        )
    found = ReplayResult(request.resolved_id(), refused_samples=[])
    database = selection(tables, request)
    found.selected = database.rows("SELECT count(*) AS n FROM chosen")[0]["n"]
    progress(f"{found.replay_id}: {found.selected:,} messages")
    with ExitStack() as stack:
        payload = _payloads(request, stack)
        rows = database.each(_ROWS if request.key_file is None else _ROWS_WITH_EVENTS)
        messages = _messages(rows, payload, found)
        if request.dry_run:
            found.submitted = sum(1 for _ in messages)
        else:
            submitter = stack.enter_context(Submitter(request.to, found.replay_id))
            _submit(messages, submitter, request.rate, partial(_report, found, progress))
            found.submitted, found.known = submitter.new, submitter.known
    return found


def selection(tables: Tables, request: ReplaySelection) -> Database:
    """A database with the view `chosen` of messages. DuckDB parses the condition as one expression."""
    database = Database(tables, ("silver_messages",), with_partitions=True)
    if request.key_file is not None:
        database.open(tables, "silver_events", with_partitions=True)
    database.seal()
    conditions = [request.where]
    if request.since_us is not None:
        conditions.append(f"coalesce(created_us, first_us) >= {request.since_us}")
    if request.until_us is not None:
        conditions.append(f"coalesce(created_us, first_us) < {request.until_us}")
    try:
        database.select("chosen", "silver_messages", conditions)
    except duckdb.Error as error:
        raise InvalidMessage(
            f"{request.where!r} is not a condition on silver_messages: {first_sentence(str(error))}"
        ) from None
    return database


_ROWS: Final = """
    SELECT message_id, queue, type, parent_message_id FROM chosen
    ORDER BY coalesce(created_us, first_us), message_id
"""
"""The messages in the order of their creation."""
_ROWS_WITH_EVENTS: Final = """
    SELECT message_id, queue, type, parent_message_id, event.event_id, event.payload
    FROM chosen LEFT JOIN (
        SELECT day, message_id, min({'ts_us': ts_us, 'event_id': event_id, 'payload': payload}) AS event
        FROM silver_events SEMI JOIN chosen USING (day, message_id) WHERE kind = 'created' GROUP BY ALL
    ) USING (day, message_id)
    ORDER BY coalesce(created_us, first_us), message_id
"""
"""The same with their `created` events, which are in the day of their message."""


# ---- payloads ------------------------------------------------------------------------------------------

Row = dict[str, Any]
Payload = Callable[[Row], str | None]


def _payloads(request: ReplaySelection, stack: ExitStack) -> Payload:
    """A function that looks up the payload of a row; it returns None when there is none."""
    places: list[Payload] = []
    if request.store is not None:
        path = request.store.removeprefix(SQLITE)
        if not Path(path).exists():
            raise InvalidSetting(f"there is no store at {path}")
        store = open_store(request.store)
        stack.callback(store.close)
        places.append(
            lambda row: (
                None if (known := store.load(row["message_id"])) is None else known.envelope.payload.decode()
            )
        )
    if request.key_file is not None:
        places.append(partial(_revealed, Cipher.from_file(request.key_file)))

    def payload(row: Row) -> str | None:
        return next((said for place in places if (said := place(row)) is not None), None)

    return payload


def _revealed(cipher: Cipher, row: Row) -> str | None:
    """The decrypted payload. A payload that is not encrypted may have been redacted."""
    if not (row["payload"] or "").startswith(PREFIX):
        return None
    sealed = AuditEvent(
        event_id=row["event_id"], seq=0, ts_us=0, kind="created", contract="audit", source="", schema=SCHEMA,
        payload=row["payload"],
    )  # fmt: skip
    try:
        return cipher.decrypt(sealed).payload
    except UnreadablePayload:
        return None


def _messages(rows: Iterator[Any], payload: Payload, found: ReplayResult) -> Iterator[ReplayMessage]:
    for row in rows:
        message_id, queue = row["message_id"], row["queue"] or ""
        fit = is_fit(found.replay_id, message_id, queue)
        said = payload(row) if fit else None
        if said is not None:
            yield ReplayMessage(message_id, queue, said, row["type"] or "", row["parent_message_id"] or "")
            continue
        found.refused += 1
        found.unfit += not fit
        if len(found.refused_samples) < SAMPLES_MAX:
            found.refused_samples.append(message_id)


# ---- submitting ----------------------------------------------------------------------------------------


def _submit(
    messages: Iterator[ReplayMessage],
    submitter: Submitter,
    rate: float | None,
    report: Callable[[Submitter], None],
) -> None:
    """Submit in order, one commit after the other. Known messages do not count against the rate."""
    size = COMMIT_MESSAGES if rate is None else max(1, min(COMMIT_MESSAGES, int(rate / COMMITS_A_S)))
    began = reported = time.monotonic()
    for chunk in chunks(messages, size):
        if rate is not None:
            time.sleep(max(0.0, began + submitter.new / rate - time.monotonic()))
        submitter.submit(chunk)
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            report(submitter)
    report(submitter)


def _report(found: ReplayResult, progress: Progress, submitter: Submitter) -> None:
    done = submitter.new + submitter.known + found.refused
    progress(f"{done:,} of {found.selected:,} messages, {found.refused:,} refused")
