"""`spark.read.format("postroom")`: bus files, queue roots and SQLite stores as rows of the wire.

Rule 1: events have the numbers and ids that the shipper gives them, because the same feeds read them. So rows
        from here and rows of segments are the same rows, and a fold may take both.
Rule 2: what Spark does not ask for is not made. A filter is answered before a row exists, one on `seq` or
        `source` before an event is read; a column that `.schema(...)` leaves out costs nothing, and without
        `payload` no message of a store is opened. Spark tells a Python source of filters, and not of columns.
Rule 3: reading moves nothing: no cursor, no outbox, no file.
Rule 4: what the shipper takes out before it writes is taken out here, unless `redaction` says otherwise. A
        filter sees what a row shows: Spark answers those on fields that redaction may change, because an
        answer from the event itself would tell what was taken out.

    events = spark.read.format("postroom").option("kind", "store").option("url", "sqlite:///queue.db").load()
    rows.write.format("postroom").options(url="sqlite:///again.db", replay_id="r1").mode("append").save()
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    Filter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from postroom.contracts.feeds import REDACTED, FileFeeds, StoreFeed, redacted
from postroom.core.events import AuditEvent
from postroom.core.redaction import Redactor
from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.ingest.filters import Condition, bounds_of, condition_of, sources_of
from postroom.pipeline.schema import EVENTS, REQUIRED
from postroom.pipeline.submission import Message, Submitter
from postroom.sinks.shipper import BATCH_MAX, Feed
from postroom.stores.open import SQLITE, open_store

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

FORMAT: Final = "postroom"
KINDS: Final = ("bus", "queue", "store")
LEVELS: Final = ("none", "medium", "full")
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
RANGE_EVENTS: Final = (
    100_000  # of a store, in one partition; a file is one, as it can only be read from its start
)
OPEN_PLACES_MAX: Final = 16  # that a worker of a stream keeps open, to go on where it stopped
ALL: Final = 2**63 - 1
_ALWAYS: Final = {*REQUIRED, "schema", "priority"}
"""Fields whose 0 is told. Every other field is NULL while it has its default, as on the wire."""
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def register(spark: "SparkSession") -> None:
    """Make the format known to a session, and let Spark hand it filters."""
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(PostroomSource)


class EventSource(NamedTuple):
    """What is read, and how."""

    kind: str
    where: str
    payloads: bool
    level: str


class Range(InputPartition):
    """Events of one source, from a number to a number, both included."""

    def __init__(self, source: str, first: int, last: int) -> None:
        super().__init__((source, first, last))
        self.source, self.first, self.last = source, first, last


class PostroomSource(DataSource):
    """Options: `kind` (bus, queue, store), `path` or `url`, `redaction`; of a stream `rows_per_batch`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return EVENTS

    def reader(self, schema: StructType) -> "EventsReader":
        return EventsReader(event_source(self.options, schema), schema)

    def streamReader(self, schema: StructType) -> "EventsStream":  # noqa: N802 - Spark's word
        limit = self.options.get("rows_per_batch")
        return EventsStream(event_source(self.options, schema), schema, None if limit is None else int(limit))

    def writer(self, schema: StructType, overwrite: bool) -> "MessagesWriter":
        if overwrite:
            raise InvalidSetting("messages are only added to a store: write with mode append")
        return MessagesWriter(self.options, schema)


# ---- options -----------------------------------------------------------------------------------------


def event_source(options: Mapping[str, str], schema: StructType) -> EventSource:
    """The options of a reader, checked."""
    for field in schema.fields:
        known = next((own for own in EVENTS.fields if own.name == field.name), None)
        if known is None or known.dataType != field.dataType:
            raise InvalidSetting(
                f"an event has no column {field.name} of type {field.dataType.simpleString()}"
            )
    where = options.get("path") or options.get("url")
    if not where:
        raise InvalidSetting("say what to read: the option path, or url for a store")
    kind = options.get("kind") or ("store" if where.startswith(SQLITE) else "")
    if kind not in KINDS:
        raise InvalidSetting(f"the option kind is {', '.join(KINDS)}, and not {kind!r}")
    level = options.get("redaction", "full")
    if level not in LEVELS:
        raise InvalidSetting(f"the option redaction is {', '.join(LEVELS)}, and not {level!r}")
    return EventSource(kind, _checked(kind, where), "payload" in schema.names, level)


def _checked(kind: str, where: str) -> str:
    """Nothing is made by looking at it, and a task may run elsewhere than here: the path is a whole one."""
    path = Path(where.removeprefix("file://") if kind != "store" else where.removeprefix(SQLITE)).absolute()
    if not path.exists():
        raise InvalidSetting(f"there is no {kind} at {path}")
    return f"{SQLITE}{path}" if kind == "store" else str(path)


@contextmanager
def _opened(place: EventSource) -> Iterator["_Feeds"]:
    feeds = _Feeds(place)
    try:
        yield feeds
    finally:
        feeds.close()


class _Feeds:
    """The sources at a place."""

    def __init__(self, place: EventSource) -> None:
        self._store: StoreFeed | None = None
        self._files = FileFeeds()
        if place.kind == "store":
            self._store = StoreFeed(open_store(place.where), "tasks", outbox=None, payloads=place.payloads)
        elif place.kind == "bus":
            self._files = FileFeeds(buses=[Path(place.where)])
        else:
            self._files = FileFeeds(queue_roots=[Path(place.where)])

    def __call__(self) -> "list[Feed]":
        return [*self._files()] if self._store is None else [self._store]

    def named(self, source: str) -> "Feed":
        for feed in self():
            if feed.source == source:
                return feed
        raise Unavailable(f"{source} is gone, or cannot be reached from where this task runs")

    def close(self) -> None:
        self._files.close()
        if self._store is not None:
            self._store.close()


# ---- a batch -----------------------------------------------------------------------------------------


class EventsReader(DataSourceReader):
    """The events that are there when the query is planned."""

    def __init__(self, place: EventSource, schema: StructType) -> None:
        self._place = place
        self._schema = schema
        self._conditions: list[Condition] = []
        self._sources: frozenset[str] | None = None
        self._first, self._last = 0, ALL

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's word
        """Take every filter that can be answered exactly before anything is taken out."""
        hidden = frozenset() if self._place.level == "none" else REDACTED
        left = []
        for found in filters:
            condition = condition_of(found)
            if condition is None or condition.column in hidden:
                left.append(found)
            else:
                self._conditions.append(condition)
        self._first, self._last = bounds_of(self._conditions, "seq", (0, ALL))
        self._sources = sources_of(self._conditions)
        return left

    def partitions(self) -> list[InputPartition]:
        with _opened(self._place) as feeds:
            return [part for feed in feeds() for part in self._parts(feed)]

    def _parts(self, feed: "Feed") -> Iterator[InputPartition]:
        if self._sources is not None and feed.source not in self._sources:
            return
        newest = min(_newest(feed, 0, ALL), self._last)
        yield from ranges(feed, self._first - 1, newest)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Range):  # there are no events at all
            return
        with _opened(self._place) as feeds:
            yield from batches(
                feeds.named(partition.source), partition, self._schema, self._place, self._conditions
            )


def ranges(feed: "Feed", after: int, up_to: int) -> Iterator[Range]:
    """A store is read in ranges by many tasks at once; a file by one, because its lines are not numbered."""
    step = RANGE_EVENTS if isinstance(feed, StoreFeed) else ALL
    after = max(after, 0)
    if isinstance(feed, StoreFeed) and (oldest := feed.read(after, 1)):
        after = oldest[0].seq - 1  # what was shipped may be forgotten
    while after < up_to:
        last = min(after + step, up_to)
        yield Range(feed.source, after + 1, last)
        after = last


def _newest(feed: "Feed", after: int, limit: int) -> int:
    """The number of the last event behind `after`, `limit` events ahead at most."""
    if isinstance(feed, StoreFeed):
        return min(after + feed.waiting(after), after + limit)
    while limit > 0 and (events := feed.read(after, min(limit, BATCH_MAX))):
        after = events[-1].seq
        limit -= len(events)
    return after


def batches(
    feed: "Feed", wanted: Range, schema: StructType, place: EventSource, conditions: list[Condition]
) -> Iterator[pa.RecordBatch]:
    """The events of a range as Arrow, those alone that pass the conditions."""
    columns = to_arrow_schema(schema, timezone="UTC")
    redact = _redaction(place)
    after = wanted.first - 1
    while after < wanted.last and (events := feed.read(after, min(BATCH_MAX, wanted.last - after))):
        after = events[-1].seq
        chosen = [event for event in events if event.seq <= wanted.last and passes(event, conditions)]
        if chosen:
            told = [redact(event) for event in chosen]
            arrays = [pa.array([value(event, f.name) for event in told], f.type) for f in columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def passes(event: AuditEvent, conditions: list[Condition]) -> bool:
    return all(condition.holds(value(event, condition.column)) for condition in conditions)


def value(event: AuditEvent, column: str) -> Any:
    """A field as the wire tells it: NULL while it has its default."""
    found = getattr(event, column)
    if column in _ALWAYS:
        return found
    if column == "detail":
        return _encode(found).decode() if found else None
    return found or None


def _redaction(place: EventSource) -> Callable[[AuditEvent], AuditEvent]:
    if place.level == "none":
        return lambda event: event
    return partial(redacted, Redactor(place.level))  # type: ignore[arg-type]  # checked with the options


# ---- a stream ----------------------------------------------------------------------------------------

_kept_open: dict[EventSource, _Feeds] = {}
"""Of this worker: a file that was read to some place is read on from there, and not from its start."""


def _kept(place: EventSource) -> _Feeds:
    feeds = _kept_open.get(place)
    if feeds is None:
        if len(_kept_open) >= OPEN_PLACES_MAX:
            _kept_open.pop(next(iter(_kept_open))).close()
        feeds = _kept_open[place] = _Feeds(place)
    return feeds


class EventsStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The events as they come. An offset is the last number of each source."""

    def __init__(self, place: EventSource, schema: StructType, limit: int | None) -> None:
        self._place = place
        self._schema = schema
        self._limit = limit
        self._end: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's word
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's word
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's word
        self._end = self._latest({}, ALL)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else ALL
        return self._latest(start, rows)

    def _latest(self, start: dict[str, int], limit: int) -> dict[str, int]:
        """Sources that are gone keep their number: what was read of them stays read."""
        found = dict(start)
        for feed in _kept(self._place)():
            after = start.get(feed.source, 0)
            newest = _newest(feed, after, limit)
            if self._end is not None:
                newest = min(newest, max(after, self._end.get(feed.source, 0)))
            if newest > after:
                found[feed.source] = newest
            limit -= newest - after
        return found

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        feeds = _kept(self._place)
        return [
            part
            for source, last in end.items()
            if last > start.get(source, 0)
            for part in ranges(feeds.named(source), start.get(source, 0), last)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)  # noqa: S101 - `partitions` makes no others
        feed = _kept(self._place).named(partition.source)
        return batches(feed, partition, self._schema, self._place, [])


# ---- a sink ------------------------------------------------------------------------------------------


class Submitted(WriterCommitMessage):
    """What a task of Spark has done."""

    def __init__(self, new: int, known: int) -> None:
        self.new = new
        self.known = known


class MessagesWriter(DataSourceWriter):
    """Submits rows as tasks. Options: `url`, `replay_id`; columns: those of `Message`.

    A task of Spark that is tried again, or runs twice, finds what was submitted before under the same key.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        url, replay_id = options.get("url") or options.get("path"), options.get("replay_id")
        if not url or not replay_id:
            raise InvalidSetting(
                "say where the messages go and under which name: the options url and replay_id"
            )
        missing = [name for name in ("message_id", "queue", "payload") if name not in schema.names]
        if missing:
            raise InvalidSetting(
                f"messages need the columns message_id, queue and payload: {missing[0]} is missing"
            )
        self._url = url
        self._replay_id = replay_id
        self._columns = [name for name in Message._fields if name in schema.names]

    def write(self, iterator: "Iterator[Row]") -> Submitted:
        messages = (Message(**{name: row[name] or "" for name in self._columns}) for row in iterator)
        with Submitter(self._url, self._replay_id) as submitter:
            submitter.submit(messages)
            return Submitted(submitter.new, submitter.known)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Each task of Spark has committed its own; together they are all."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was submitted stays. Writing again under the same replay id adds the rest."""
