"""What a handle on a store file remembers between two commits."""

from collections import defaultdict

import msgspec

from postroom.core.formats.ids import IdRule
from postroom.stores.base import LANE_COUNTS, Counted
from postroom.stores.codec import PLAIN, Codec
from postroom.stores.event_runs import EVENTS_PER_NEW
from postroom.stores.own_ids import EARLIER_RULE, OwnIds
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import ENGINE_QUEUES, Reading, ask
from postroom.stores.transaction import LimitsCache

Depths = defaultdict[int, dict[Counted, int]]
"""The counters, by the number of the queue."""

_decode_counts = msgspec.json.Decoder(list[tuple[int, Counted, int]]).decode
_decode_depths = msgspec.json.Decoder(dict[Counted, int]).decode


class SqliteKnown(OwnIds):
    """The memory of one handle. A handle that loses it reads the file again."""

    def __init__(self, store_id: str = "", rule: IdRule = EARLIER_RULE, codec: Codec = PLAIN) -> None:
        super().__init__(store_id, rule)
        self.codec = codec
        self.names: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.limits = LimitsCache()
        self.depths: Depths = defaultdict(dict)
        self.total: dict[Counted, int] = {}
        """The counters of all organizations together."""
        self.ready: dict[int, int] = {}
        """The QUEUED records of each organization that has some."""
        self.unfolded: set[int] = set()
        """Queues whose counters may have changed since they were written to the file."""
        self.newest = 0
        """The number of the last event."""
        self.stored = 0
        """The number of the last event in a row of events. Records with larger numbers imply their events."""
        self.implied: dict[tuple[int, Counted], int] = {}
        """What the records with implied events add to the counters."""
        self.folded = 0
        """The counters in the file include the events up to this number."""
        self.deadline_ns = 0
        """No lease and no delay ends before this time."""

    def name_of(self, queue: int, connection: Reading) -> str:
        """The name of a queue."""
        name = self.names.get(queue)
        if name is None:
            name = self.names[queue] = str(
                ask(connection, "SELECT name FROM queues WHERE queue = ?", (queue,))[0][0]
            )
        return name

    def catch_up(self, connection: Reading, *, from_start: bool) -> None:
        """Count what was committed since the last call, or everything that the file holds."""
        for (queue, what), n in self.implied.items():  # a row may hold their events by now
            self.add(queue, what, -n)
        [(folded,)] = ask(connection, sql.FACT, ("counted",)) or [(0,)]
        if from_start or folded > self.stored:  # rows of events that are not counted here may be purged
            self.depths, self.total, self.ready = defaultdict(dict), {}, {}
            for queue, depths in ask(connection, "SELECT queue, depths FROM queues"):
                for what, n in _decode_depths(depths).items():
                    self.add(queue, what, n)
            self.unfolded = set()
            self.stored = folded
        self.folded, self.implied, self.deadline_ns = folded, {}, 0
        for seq, counts in ask(connection, sql.COUNTS_AFTER, (self.stored,)):
            for change in _decode_counts(counts):
                self.add(*change)
            self.stored = seq
        self.newest = self.stored
        for queue, lane, n, last in ask(connection, sql.IMPLIED_COUNTS, (self.stored,)):
            self.add(queue, LANE_COUNTS[lane], n)
            self.implied[queue, LANE_COUNTS[lane]] = n
            self.newest = max(self.newest, last + EVENTS_PER_NEW - 1)

    def add(self, queue: int, what: Counted, change: int) -> None:
        """Change a counter."""
        depths = self.depths[queue]
        depths[what] = depths.get(what, 0) + change
        self.unfolded.add(queue)
        if queue >= ENGINE_QUEUES:
            self.total[what] = self.total.get(what, 0) + change
            if what in LANE_COUNTS:
                left = self.ready.get(queue, 0) + change
                if left:
                    self.ready[queue] = left
                else:
                    self.ready.pop(queue, None)
