"""Structured Streaming over the segments of audit streams: micro-batches of their events.

Rule 1: a micro-batch carries the events that are committed. Only segments that could not be ingested with
        their micro-batch, such as those after a missing segment, are read from their files later.
Rule 2: the number of a micro-batch stands in the commit of its events, under the id of its query. If Spark
        delivers it again after a crash, it is not committed again.
Rule 3: the numbers of segments in the table decide what is new, so that `run` and `stream` can alternate.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import ceil
from threading import Event, Lock

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from postroom.errors import Unavailable
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.segments import SegmentStream


class MicroBatch:
    """The events of one micro-batch."""

    def __init__(self, rows: DataFrame, query_id: str, number: int) -> None:
        self._rows = rows
        self._query_id = query_id
        self._number = number

    def events(self, stream: SegmentStream) -> DataFrame:
        """Rows of `bronze_events`: those of one stream."""
        return self._rows.where(F.col(bronze.STREAM) == str(stream)).drop(bronze.STREAM)

    def txn(self, stream: SegmentStream) -> Txn:
        """What the commit of its events of a stream records."""
        return Txn(f"micro-batches of {stream.ingest_id}, query {self._query_id}", self._number)


class MicroBatches:
    """Starts a query over some streams, and hands its micro-batches on, one at a time."""

    def __init__(
        self,
        spark: SparkSession,
        streams: Sequence[tuple[SegmentStream, int]],
        checkpoint: str,
        *,
        bytes_max: int,
        ingest: Callable[[MicroBatch], None],
        catch_up: Callable[[], None],
        is_behind: Callable[[], bool],
        progress: Callable[[str], None],
    ) -> None:
        """`streams` have the number of the last ingested segment each; a batch has about `bytes_max` of each.

        `catch_up` does what an interrupted micro-batch has left, and ingests segments that were incomplete
        when Spark noticed them: its file source reports a file once.
        """
        self._events = reduce(
            DataFrame.union,
            [bronze.arriving_events(spark, str(stream), last, bytes_max) for stream, last in streams],
        )
        self._checkpoint = checkpoint
        self._ingest = ingest
        self._catch_up = catch_up
        self._is_behind = is_behind
        self._progress = progress
        self._one_at_a_time = Lock()
        self._is_unfinished = True  # an earlier process may have been killed half way
        self._query: StreamingQuery | None = None
        self._has_started = Event()
        self._failures: list[Exception] = []

    def follow(self, every_s: float | None) -> None:
        """Ingest what has arrived and end; with `every_s`, run such a batch periodically."""
        is_retried = every_s is not None
        writer = self._events.writeStream.foreachBatch(partial(self._arrived, is_retried=is_retried))
        writer = writer.option("checkpointLocation", self._checkpoint)
        if every_s is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{every_s} seconds")
        try:
            self._query = writer.start()
            self._has_started.set()
            while every_s is not None and not self._query.awaitTermination(ceil(every_s)):
                if self._is_unfinished or self._is_behind():
                    self._guarded(self._catch_up, is_retried=is_retried)
            self._query.awaitTermination()
        except StreamingQueryException as wrapped:
            # Spark wraps our exception, and has its trace as text.
            raise (self._failures or [wrapped])[0] from None
        self._guarded(self._catch_up, is_retried=False)

    def _arrived(self, rows: DataFrame, number: int, *, is_retried: bool) -> None:
        self._has_started.wait()
        assert self._query is not None  # noqa: S101 - it is set before the event
        batch = MicroBatch(rows, str(self._query.id), number)
        try:
            self._guarded(lambda: self._ingest(batch), is_retried=is_retried)
        except Exception as error:
            self._failures.append(error)
            raise

    def _guarded(self, step: Callable[[], None], *, is_retried: bool) -> None:
        """Do a step. With `is_retried`, one that another try may repair is left to `catch_up`."""
        try:
            with self._one_at_a_time:
                self._is_unfinished = True
                step()
                self._is_unfinished = False
        except Unavailable as error:
            if not is_retried:
                raise
            self._progress(f"{error}; the next batch tries again")
