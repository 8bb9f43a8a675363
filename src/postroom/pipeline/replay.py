"""Messages of the past submitted again: to the store they came from, or into a sandbox.

Rule 1: the table says which and in which order; what they said comes from the store, or from the encrypted
        field of the stream. A payload that may have been redacted is never submitted: it is counted. So is
        a message that no task can be made of; the others go on.
Rule 2: a message goes in under (replay id, message id). The replay id is made of what was asked for, so the
        same command, killed and given again, submits the rest and nothing twice.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.events import SCHEMA, AuditEvent
from postroom.errors import InvalidMessage, InvalidSetting
from postroom.pipeline import queries
from postroom.pipeline.session import first_sentence
from postroom.pipeline.submission import COMMIT_MESSAGES, Message, Submitter, chunks, is_fit
from postroom.sinks.cipher import PREFIX, Cipher, UnreadablePayload
from postroom.stores.open import SQLITE, open_store

if TYPE_CHECKING:
    from pyspark.sql import Row

    from postroom.pipeline.tables import Tables
    from postroom.stores.store import Store

ID_CHARS: Final = 12
COMMITS_A_S: Final = 10  # at a limited rate
TELL_EVERY_S: Final = 1.0
SAMPLES_MAX: Final = 5
_COLUMNS: Final = ("message_id", "queue", "type", "parent_message_id")

Progress = Callable[[str], None]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to submit again, and where."""

    where: str
    """A condition on `silver_messages`, in SQL."""
    to: str
    since_us: int | None = None
    """Of the time that a message was created."""
    until_us: int | None = None
    store: str | None = None
    """The store that still has the payloads."""
    key_file: Path | None = None
    """The keys of payloads that are encrypted in the stream."""
    rate: float | None = None
    """At most so many messages a second."""
    replay_id: str = ""
    dry_run: bool = False

    def named(self) -> str:
        """The name of this replay: the same for the same question."""
        if self.replay_id:
            return self.replay_id
        asked = repr((self.where, self.since_us, self.until_us, self.to))
        return f"replay-{hashlib.sha256(asked.encode()).hexdigest()[:ID_CHARS]}"


class Replayed(msgspec.Struct):
    """What came of it."""

    replay_id: str
    selected: int = 0
    submitted: int = 0
    known: int = 0
    """Submitted by an earlier run of this replay."""
    refused: int = 0
    """Nothing is left of what they said but a redacted text, or not even that; or they are unfit."""
    unfit: int = 0
    """Of those refused: they have no queue, or no task can have such a queue or id."""
    refused_samples: list[str] = []


def replay(
    spark: SparkSession, tables: "Tables", wanted: Wanted, progress: Progress = lambda _: None
) -> Replayed:
    """Submit the messages in the order in which they were created."""
    if wanted.store is None and wanted.key_file is None:
        raise InvalidSetting(
            "say where the payloads come from: a store that has them, or the keys of the stream"
        )
    found = Replayed(wanted.named(), refused_samples=[])
    rows = selection(spark, tables, wanted)
    found.selected = rows.count()
    progress(f"{found.replay_id}: {found.selected:,} messages")
    with ExitStack() as stack:
        payload = _payloads(wanted, stack)
        messages = _messages(rows.toLocalIterator(), payload, found)
        if wanted.dry_run:
            found.submitted = sum(1 for _ in messages)
        else:
            submitter = stack.enter_context(Submitter(wanted.to, found.replay_id))
            _submit(messages, submitter, wanted.rate, partial(_tell, found, progress))
            found.submitted, found.known = submitter.new, submitter.known
    return found


def selection(spark: SparkSession, tables: "Tables", wanted: Wanted) -> DataFrame:
    """Grain: message_id, in the order of creation, with the event that told it where keys are given."""
    session = queries.read_only(spark)
    messages = tables.read(session, "silver_messages")
    born = F.coalesce("created_us", "first_us")
    if wanted.since_us is not None:
        messages = messages.where(born >= wanted.since_us)
    if wanted.until_us is not None:
        messages = messages.where(born < wanted.until_us)
    try:
        where = queries.condition(session, wanted.where)
        chosen = messages.where(where).select(*_COLUMNS, "day", born.alias("born_us"))
    except (AnalysisException, ParseException) as error:
        raise InvalidMessage(
            f"{wanted.where!r} is no condition on silver_messages: {first_sentence(str(error))}"
        ) from None
    if wanted.key_file is not None:
        chosen = chosen.join(_created(tables.read(session, "silver_events")), ["day", "message_id"], "left")
    return chosen.orderBy("born_us", "message_id").drop("day", "born_us")


def _created(events: DataFrame) -> DataFrame:
    """Grain: message_id. The day is that of its message, so that Spark opens no other days."""
    told = F.struct("ts_us", "event_id", "payload")
    created = events.where("kind = 'created' AND message_id IS NOT NULL")
    first = created.groupBy("day", "message_id").agg(F.min(told).alias("told"))
    return first.select("day", "message_id", "told.event_id", "told.payload")


# ---- what they said ------------------------------------------------------------------------------------

Payload = Callable[["Row"], str | None]


def _payloads(wanted: Wanted, stack: ExitStack) -> Payload:
    """Looks for the payload of a row where it may be; None when it is nowhere."""
    places: list[Payload] = []
    if wanted.store is not None:
        path = wanted.store.removeprefix(SQLITE)
        if not Path(path).exists():
            raise InvalidSetting(f"there is no store at {path}")
        store = open_store(wanted.store)
        stack.callback(store.close)
        places.append(partial(_stored, store))
    if wanted.key_file is not None:
        places.append(partial(_revealed, Cipher.from_file(wanted.key_file)))

    def payload(row: "Row") -> str | None:
        return next((said for place in places if (said := place(row)) is not None), None)

    return payload


def _stored(store: "Store", row: "Row") -> str | None:
    stored = store.load(row["message_id"])
    return None if stored is None else stored.envelope.payload.decode()


def _revealed(cipher: Cipher, row: "Row") -> str | None:
    """An encrypted payload is whole; any other may have been redacted."""
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


def _messages(rows: Iterator[Any], payload: Payload, found: Replayed) -> Iterator[Message]:
    for row in rows:
        message_id, queue = row["message_id"], row["queue"] or ""
        fit = is_fit(found.replay_id, message_id, queue)
        said = payload(row) if fit else None
        if said is not None:
            yield Message(message_id, queue, said, row["type"] or "", row["parent_message_id"] or "")
            continue
        found.refused += 1
        found.unfit += not fit
        if len(found.refused_samples) < SAMPLES_MAX:
            found.refused_samples.append(message_id)


# ---- submitting ----------------------------------------------------------------------------------------


def _submit(
    messages: Iterator[Message], submitter: Submitter, rate: float | None, tell: Callable[[Submitter], None]
) -> None:
    """In order, a commit after the other. What was known already does not count against the rate."""
    size = COMMIT_MESSAGES if rate is None else max(1, min(COMMIT_MESSAGES, int(rate / COMMITS_A_S)))
    began = told = time.monotonic()
    for chunk in chunks(messages, size):
        if rate is not None:
            time.sleep(max(0.0, began + submitter.new / rate - time.monotonic()))
        submitter.submit(chunk)
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            tell(submitter)
    tell(submitter)


def _tell(found: Replayed, progress: Progress, submitter: Submitter) -> None:
    done = submitter.new + submitter.known + found.refused
    progress(f"{done:,} of {found.selected:,} messages, {found.refused:,} refused")
