"""`spark.read.format("postroom")`: bus files, queue roots and SQLite stores as rows of events.

Rule 1: the shipper's feeds read the events, so they have the same numbers and ids as in segments. A fold may
        read rows from both.
Rule 2: only requested values are computed. A filter is evaluated before a row exists, and one on `seq` or
        `source` before an event is read. A column that `.schema(...)` omits costs nothing, and without
        `payload` no message of a store is opened, so `detail` has no digests of results. Spark passes a
        Python source its filters, but not its columns.
Rule 3: reading changes nothing: no cursor, no outbox, no file.
Rule 4: events are redacted as the shipper redacts them, unless `redaction` says otherwise. Spark evaluates
        filters on fields that redaction may change, because a filter on the original value would reveal it.

    events = spark.read.format("postroom").option("kind", "store").option("url", "sqlite:///queue.db").load()
    rows.write.format("postroom").options(url="sqlite:///again.db", replay_id="r1").mode("append").save()
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Row, SparkSession
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

from postroom.audit.shipper import BATCH_MAX, Feed
from postroom.contracts.feeds import REDACTED, FileFeeds, StoreFeed, redacted
from postroom.core.formats.events import AuditEvent
from postroom.core.redaction import Redactor
from postroom.engine.agents.shown_results import shown_results
from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.ingest.filters import Condition, bounds_of, condition_of, sources_of
from postroom.pipeline.schema import EVENTS, REQUIRED
from postroom.pipeline.submission import ReplayMessage, Submitter
from postroom.stores.open import SQLITE, open_store

FORMAT: Final = "postroom"
KINDS: Final = ("bus", "queue", "store")
LEVELS: Final = ("none", "medium", "full")
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
RANGE_EVENTS: Final = 100_000  # of a store, in one partition; a file is one partition
OPEN_PLACES_MAX: Final = 16  # that a worker of a stream keeps open, to continue where it stopped
ALL: Final = 2**63 - 1
_ALWAYS: Final = {*REQUIRED, "schema", "priority"}
"""Fields whose 0 is a value. Every other field is NULL while it has its default, as in a line."""
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def register(spark: SparkSession) -> None:
    """Register the format in a session, and enable filter pushdown."""
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(PostroomSource)


class EventSource(NamedTuple):
    """The checked options of a reader."""

    kind: str
    where: str
    payloads: bool
    level: str


class Range(InputPartition):
    """The events of one source from `first` to `last`, both included."""

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

    def streamReader(self, schema: StructType) -> "EventsStream":  # noqa: N802 - Spark's name
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
        raise InvalidSetting("the option path is missing, or url for a store")
    kind = options.get("kind") or ("store" if where.startswith(SQLITE) else "")
    if kind not in KINDS:
        raise InvalidSetting(f"the option kind must be one of {', '.join(KINDS)}, not {kind!r}")
    level = options.get("redaction", "full")
    if level not in LEVELS:
        raise InvalidSetting(f"the option redaction must be one of {', '.join(LEVELS)}, not {level!r}")
    return EventSource(kind, _checked(kind, where), "payload" in schema.names, level)


def _checked(kind: str, where: str) -> str:
    """The absolute path, because a task may run elsewhere. It has to exist: opening it would create it."""
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
    """The feeds of a bus, a queue root or a store."""

    def __init__(self, place: EventSource) -> None:
        self._store: StoreFeed | None = None
        self._files = FileFeeds()
        if place.kind == "store":
            results = partial(shown_results, whole=False) if place.payloads else None
            self._store = StoreFeed(
                open_store(place.where), "tasks", outbox=None, payloads=place.payloads, results=results
            )
        elif place.kind == "bus":
            self._files = FileFeeds(buses=[Path(place.where)])
        else:
            self._files = FileFeeds(queue_roots=[Path(place.where)])

    def __call__(self) -> list[Feed]:
        return [*self._files()] if self._store is None else [self._store]

    def named(self, source: str) -> Feed:
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
    """Reads the events that exist when the query is planned."""

    def __init__(self, place: EventSource, schema: StructType) -> None:
        self._place = place
        self._schema = schema
        self._conditions: list[Condition] = []
        self._sources: frozenset[str] | None = None
        self._first, self._last = 0, ALL

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept every filter that gives the same result before redaction."""
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

    def _parts(self, feed: Feed) -> Iterator[InputPartition]:
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


def ranges(feed: Feed, after: int, up_to: int) -> Iterator[Range]:
    """Many tasks read ranges of a store. One task reads a file, because its lines have no index."""
    step = RANGE_EVENTS if isinstance(feed, StoreFeed) else ALL
    after = max(after, 0)
    if isinstance(feed, StoreFeed) and (oldest := feed.read(after, 1)):
        after = oldest[0].seq - 1  # shipped events may have been deleted
    while after < up_to:
        last = min(after + step, up_to)
        yield Range(feed.source, after + 1, last)
        after = last


def _newest(feed: Feed, after: int, limit: int) -> int:
    """The number of the last event after `after`, at most `limit` events further."""
    if isinstance(feed, StoreFeed):
        return min(after + feed.waiting(after), after + limit)
    while limit > 0 and (events := feed.read(after, min(limit, BATCH_MAX))):
        after = events[-1].seq
        limit -= len(events)
    return after


def batches(
    feed: Feed, wanted: Range, schema: StructType, place: EventSource, conditions: list[Condition]
) -> Iterator[pa.RecordBatch]:
    """The events of a range that meet the conditions, as Arrow batches."""
    columns = to_arrow_schema(schema, timezone="UTC")
    redact = _redaction(place)
    after = wanted.first - 1
    while after < wanted.last and (events := feed.read(after, min(BATCH_MAX, wanted.last - after))):
        after = events[-1].seq
        chosen = [event for event in events if event.seq <= wanted.last and passes(event, conditions)]
        if chosen:
            shown = [redact(event) for event in chosen]
            arrays = [pa.array([value(event, f.name) for event in shown], f.type) for f in columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def passes(event: AuditEvent, conditions: list[Condition]) -> bool:
    return all(condition.holds(value(event, condition.column)) for condition in conditions)


def value(event: AuditEvent, column: str) -> Any:
    """A field as in a line: NULL while it has its default."""
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
"""The open feeds of this worker. A file continues at the last position instead of at its start."""


def _kept(place: EventSource) -> _Feeds:
    feeds = _kept_open.get(place)
    if feeds is None:
        if len(_kept_open) >= OPEN_PLACES_MAX:
            _kept_open.pop(next(iter(_kept_open))).close()
        feeds = _kept_open[place] = _Feeds(place)
    return feeds


class EventsStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams events as they arrive. An offset is the last number of each source."""

    def __init__(self, place: EventSource, schema: StructType, limit: int | None) -> None:
        self._place = place
        self._schema = schema
        self._limit = limit
        self._end: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._end = self._latest({}, ALL)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else ALL
        return self._latest(start, rows)

    def _latest(self, start: dict[str, int], limit: int) -> dict[str, int]:
        """The last number of each source. A source that no longer exists keeps its number."""
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


class SubmittedCounts(WriterCommitMessage):
    """What a Spark task has submitted."""

    def __init__(self, new: int, known: int) -> None:
        self.new = new
        self.known = known


class MessagesWriter(DataSourceWriter):
    """Submits rows as tasks. Options: `url`, `replay_id`; columns: those of `ReplayMessage`.

    A Spark task that is retried, or runs twice, submits nothing twice: the store knows each key.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        url, replay_id = options.get("url") or options.get("path"), options.get("replay_id")
        if not url or not replay_id:
            raise InvalidSetting(
                "the options url and replay_id are missing: where the messages go, and under which name"
            )
        missing = [name for name in ("message_id", "queue", "payload") if name not in schema.names]
        if missing:
            raise InvalidSetting(
                f"messages need the columns message_id, queue and payload: {missing[0]} is missing"
            )
        self._url = url
        self._replay_id = replay_id
        self._columns = [name for name in ReplayMessage._fields if name in schema.names]

    def write(self, iterator: Iterator[Row]) -> SubmittedCounts:
        messages = (ReplayMessage(**{name: row[name] or "" for name in self._columns}) for row in iterator)
        with Submitter(self._url, self._replay_id) as submitter:
            submitter.submit(messages)
            return SubmittedCounts(submitter.new, submitter.known)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing to do: each Spark task has committed its own messages."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Submitted messages stay. Writing again under the same replay id adds the rest."""
