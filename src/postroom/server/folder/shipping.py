"""Sets up a shipper: its sources, the redaction, the segment folder and the publisher.

Rule 1: events are redacted before they reach the disk or another machine. Encrypted payloads are kept whole.
Rule 2: the shipper is a separate process. It shares the disk with the workers, but not their interpreter.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from postroom.audit.chain import NO_HASH, read_chain
from postroom.audit.cipher import Cipher
from postroom.audit.heads import StreamHead, fault_of, head_path, note_head, noted_head, stream_of
from postroom.audit.layout import STREAM
from postroom.audit.reader import Segments
from postroom.audit.redaction_marks import mark_of
from postroom.audit.remote import Publisher
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.shipper import Shipper
from postroom.contracts.feeds import FileFeeds, StoreFeed, facts_of, outbox_of, redacted
from postroom.core.formats.events import AuditEvent
from postroom.core.redaction import DEFAULT_FIELDS, Level, Redactor, level_for
from postroom.engine.agents.shown_results import shown_results
from postroom.errors import InvalidSetting, PostroomError, ShippedElsewhere, WriteFailed
from postroom.settings import AuditSettings
from postroom.stores.base import Outbox
from postroom.stores.open import open_store
from postroom.system.atomic import absolute_path, replace_file
from postroom.system.clock import SystemClock
from postroom.system.heartbeat import HEARTBEAT
from postroom.system.log import library_log

_log = library_log("postroom.audit")

TOKEN_KEY_BYTES_MIN = 16
KEEP_DAYS = 90.0
RETAIN_EVERY_S = 3_600.0
DAY_S = 86_400
MICROS_PER_S = 1_000_000
CHECKED_EVENTS = 100  # of a store, compared with the stream before shipping resumes


class Sources(msgspec.Struct, frozen=True):
    """The sources to ship."""

    stores: tuple[str, ...] = ()
    """URLs of the stores of `Tasks`."""
    queue_roots: tuple[Path, ...] = ()
    buses: tuple[Path, ...] = ()
    mail: tuple[Path, ...] = ()
    """Data folders of mail servers."""


class Shipping(msgspec.Struct):
    """A shipper and its sink."""

    shipper: Shipper
    sink: SegmentSink
    publisher: Publisher | None
    stores: list[StoreFeed] = []
    noted: tuple[int, str] = (0, NO_HASH)
    """The head that was recorded last."""
    archive: Publisher | None = None
    keep_days: float | None = None
    """None keeps segments without limit."""
    retained_s: float = -RETAIN_EVERY_S
    """When segments were removed last, by the monotonic clock."""

    def once(self) -> int:
        """Ship all waiting events, seal them and publish them. Returns how many events were shipped."""
        shipped = self.shipper.ship()
        self._seal()
        return shipped

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Ship until `stopped`. Events that wait then are still shipped and sealed."""
        self.shipper.run(stopped)
        self._seal()

    def _seal(self) -> None:
        self.sink.seal()
        self._note_head()
        self._publish()
        self.retain()

    def tend(self) -> None:
        """Seal a segment that is due, record the head of the chain, and publish."""
        HEARTBEAT.beat()
        sealed = self.sink.seal_if_due()
        self._note_head()
        if sealed:
            self._publish()
        if time.monotonic() >= self.retained_s + RETAIN_EVERY_S:
            self.retain()

    def retain(self) -> None:
        """Remove the segments that are old enough, once their copies are complete.

        A copy that fails removes nothing, and the next hour tries again.
        """
        self.retained_s = time.monotonic()
        if self.keep_days is None:
            return
        before_us = SystemClock().wall_us() - round(self.keep_days * DAY_S * MICROS_PER_S)
        try:
            self._publish()
            if self.archive is not None:
                self.archive.publish(before_us)
            removed = retain(self.sink.folder, before_us)
        except PostroomError as error:
            _log.warning("no old segment of the audit stream is removed: %s", error)
            return
        if removed:
            _log.info("%d segments of the stream were removed after %g days", len(removed), self.keep_days)

    def _note_head(self) -> None:
        """Record a newly sealed last segment, in the stores and in a file next to the folder."""
        sealed = self.sink.sealed
        if sealed == self.noted:
            return
        for feed in self.stores:
            feed.sealed(*sealed)
        try:
            note_head(self.sink.folder, StreamHead(stream_of(self.sink.folder), *sealed))
        except WriteFailed as error:
            _log.warning("the head of the chain could not be recorded next to the folder: %s", error)
        self.noted = sealed

    def _publish(self) -> None:
        if self.publisher is not None:
            self.publisher.publish()


@contextmanager
def opened(folder: Path, sources: Sources, settings: AuditSettings) -> Iterator[Shipping]:
    """Open a shipper of these sources to a folder, and close it at the end.

    All checks that can refuse run before the folder is made.
    """
    folder = absolute_path("the folder of segments", folder)
    with ExitStack() as stack:
        cipher = None if settings.key_file is None else Cipher.from_file(settings.key_file)
        prepare = redaction_of(settings, whole_payloads=cipher is not None)
        publisher = None if settings.publish is None else Publisher(folder, settings.publish)
        archive = None if settings.archive is None else Publisher(folder, settings.archive)
        stream = stream_of(folder) or _new_name(folder)
        stores = [store_feed(url, settings, stream, stack) for url in sources.stores]
        found = FileFeeds(sources.queue_roots, sources.buses, sources.mail, holds=partial(_holds, folder))
        files = stack.enter_context(closing(found))
        files()
        _check_heads(folder, stores)
        sink = SegmentSink(
            folder,
            seal_bytes=settings.seal_bytes,
            seal_after_s=settings.seal_after_s,
            prepare=prepare,
            redaction=redaction_mark(settings),
            cipher=cipher,
        )
        stack.callback(sink.close)
        stream_name(folder, stream)
        for feed in stores:
            _resume(feed, sink)
        shipping = Shipping(
            Shipper(sink, lambda: [*stores, *files()]), sink, publisher, stores,
            archive=archive, keep_days=kept_days(settings),
        )  # fmt: skip
        shipping.shipper.tend = shipping.tend
        yield shipping


def kept_days(settings: AuditSettings) -> float | None:
    """How many days segments are kept. Without a copy, none is removed unless the settings say so."""
    has_copy = settings.archive is not None or settings.publish is not None
    return KEEP_DAYS if settings.keep_days is None and has_copy else settings.keep_days


def store_feed(url: str, settings: AuditSettings, stream: str, stack: ExitStack) -> StoreFeed:
    """The feed of a store whose events go to `stream`. The stack closes the store."""
    store = open_store(url)
    stack.callback(store.close)
    stored = outbox_of(store) or Outbox()
    outbox = Outbox(
        backlog_max=settings.backlog_max,
        when_behind=settings.when_behind,
        stream=stream,
        segment=stored.segment,
        head=stored.head,
    )
    shown = None if settings.results == "off" else partial(shown_results, whole=settings.results == "full")
    return StoreFeed(store, "tasks", outbox=outbox, payloads=settings.payloads, results=shown)


def _check_heads(folder: Path, stores: Iterable[StoreFeed]) -> None:
    """Refuse a folder that was truncated, wiped or replaced: shipping into it would hide the loss."""
    stream, chain = stream_of(folder), read_chain(folder)
    noted = noted_head(folder)
    fault = "" if noted is None else fault_of(noted, stream, chain)
    if fault:
        raise ShippedElsewhere(
            f"{folder} is not continued: {fault}; remove {head_path(folder)} if a new stream is wanted"
        )
    for feed in stores:
        head = feed.noted_head()
        if head is not None and (fault := fault_of(head, stream, chain)):
            raise ShippedElsewhere(
                f"{folder} is not continued: {fault}; run `postroom audit detach` if a new stream is wanted"
            )


def _resume(feed: StoreFeed, sink: SegmentSink) -> None:
    feed.check(Segments(sink.folder).last_of(feed.source, CHECKED_EVENTS))
    # From now on the store keeps unshipped events, even while no shipper runs.
    feed.kept(sink.position(feed.source))


def _holds(folder: Path, event: AuditEvent) -> bool:
    """Whether the stream holds this event with the same facts, or retention has removed it."""
    checkpoint = read_chain(folder).checkpoint
    if checkpoint is not None and event.seq <= checkpoint.sources.get(event.source, 0):
        return True
    found = Segments(folder).find([event.message_id])
    return any(one.event_id == event.event_id and facts_of(one) == facts_of(event) for one in found)


def _new_name(folder: Path) -> str:
    return f"{folder.name}-{secrets.token_hex(4)}"


def stream_name(folder: Path, new: str = "") -> str:
    """The name of the stream, which stays the same when the folder is moved. The first shipper makes it."""
    name = stream_of(folder)
    if not name:
        name = new or _new_name(folder)
        replace_file(folder / STREAM, f"{name}\n".encode(), "group")
    return name


# ---- redaction ---------------------------------------------------------------------------------------


def level_of(settings: AuditSettings) -> Level:
    """The redaction level of these settings."""
    return settings.redaction or level_for(settings.environment)


def redactor_of(settings: AuditSettings) -> Redactor:
    """The redactor of these settings."""
    key, path = None, settings.token_key_file
    if path is not None:
        try:
            key = path.read_bytes().strip()
        except OSError as error:
            raise InvalidSetting(f"cannot read the token key {path}: {error.strerror}") from None
        if len(key) < TOKEN_KEY_BYTES_MIN:
            raise InvalidSetting(f"the token key {path} must have at least {TOKEN_KEY_BYTES_MIN} bytes")
    fields = {*DEFAULT_FIELDS, *settings.fields}
    return Redactor(level_of(settings), patterns=settings.patterns, fields=fields, key=key)


def redaction_of(
    settings: AuditSettings, *, whole_payloads: bool
) -> Callable[[AuditEvent], AuditEvent] | None:
    """The redaction of an event before it is written; None when the settings redact nothing."""
    if level_of(settings) == "none" and not settings.patterns:
        return None
    return partial(redacted, redactor_of(settings), whole_payloads=whole_payloads)


def redaction_mark(settings: AuditSettings) -> str:
    """The mark of this redaction; empty when it is not that of the built-in rules alone."""
    has_own_rules = settings.patterns or settings.fields or settings.token_key_file is not None
    return "" if has_own_rules else mark_of(level_of(settings))
