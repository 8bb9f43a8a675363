"""A shipper with everything around it: which sources, what is taken out, where it goes, and when it ends.

Rule 1: nothing reaches the disk or another machine before it was redacted; encrypted payloads are kept whole.
Rule 2: it is a process of its own: shipping shares the disk of those who work, and not their interpreter.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from postroom.contracts.feeds import FileFeeds, StoreFeed, facts_of, redacted
from postroom.core.events import AuditEvent
from postroom.core.redaction import DEFAULT_FIELDS, Level, Redactor, level_for
from postroom.errors import InvalidSetting
from postroom.settings import AuditSettings
from postroom.sinks.chain import read_chain
from postroom.sinks.cipher import Cipher
from postroom.sinks.layout import STREAM
from postroom.sinks.reading import Segments
from postroom.sinks.remote import Publisher
from postroom.sinks.segments import SegmentSink
from postroom.sinks.shipper import Feed, Shipper
from postroom.stores.base import Outbox
from postroom.stores.opening import open_store
from postroom.system.atomic import read_file, replace_file

TOKEN_KEY_BYTES_MIN = 16
CHECKED_EVENTS = 100  # of a store that are compared with the stream before a shipper goes on


class Sources(msgspec.Struct, frozen=True):
    """What is shipped."""

    stores: tuple[str, ...] = ()
    """URLs of the stores of `Tasks`."""
    queue_roots: tuple[Path, ...] = ()
    buses: tuple[Path, ...] = ()
    mail: tuple[Path, ...] = ()
    """Data folders of mail servers."""


class Shipping(msgspec.Struct):
    """A shipper and the sink that it fills."""

    shipper: Shipper
    sink: SegmentSink
    publisher: Publisher | None

    def once(self) -> int:
        """Ship everything that waits, seal it, and send it on; gives how many events that was."""
        shipped = self.shipper.ship()
        self.sink.seal()
        self._publish()
        return shipped

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Ship until `stopped`; what waits then still goes, and is sealed."""
        self.shipper.run(stopped)
        self.sink.seal()
        self._publish()

    def tend(self) -> None:
        """Seal what is due, and send it on."""
        if self.sink.seal_if_due():
            self._publish()

    def _publish(self) -> None:
        if self.publisher is not None:
            self.publisher.publish()


@contextmanager
def opened(folder: Path, sources: Sources, settings: AuditSettings) -> Iterator[Shipping]:
    """A shipper of these sources to a folder, closed at the end."""
    with ExitStack() as stack:
        cipher = None if settings.key_file is None else Cipher.from_file(settings.key_file)
        sink = SegmentSink(
            folder,
            seal_bytes=settings.seal_bytes,
            seal_after_s=settings.seal_after_s,
            prepare=preparing(settings, whole_payloads=cipher is not None),
            cipher=cipher,
        )
        stack.callback(sink.close)
        publisher = None if settings.publish is None else Publisher(folder, settings.publish)
        shipping = Shipping(Shipper(sink, _feeds(sources, settings, sink, stack)), sink, publisher)
        shipping.shipper.tend = shipping.tend
        yield shipping


def _feeds(
    sources: Sources, settings: AuditSettings, sink: SegmentSink, stack: ExitStack
) -> Callable[[], Iterable[Feed]]:
    stores = [_store_feed(url, settings, sink) for url in sources.stores]
    for feed in stores:
        stack.callback(feed.close)
    holds = partial(_holds, sink.folder)
    files = FileFeeds(sources.queue_roots, sources.buses, sources.mail, holds=holds)
    stack.callback(files.close)
    return lambda: [*stores, *files()]


def _store_feed(url: str, settings: AuditSettings, sink: SegmentSink) -> StoreFeed:
    outbox = Outbox(
        backlog_max=settings.backlog_max, when_behind=settings.when_behind, stream=stream_name(sink.folder)
    )
    feed = StoreFeed(open_store(url), "tasks", outbox=outbox, payloads=settings.payloads)
    feed.check(Segments(sink.folder).last_of(feed.source, CHECKED_EVENTS))
    # From now on the store keeps what is not shipped, also while no shipper runs.
    feed.kept(sink.position(feed.source))
    return feed


def _holds(folder: Path, event: AuditEvent) -> bool:
    """Whether the stream holds an event of that name that tells the same, or retention has removed it."""
    checkpoint = read_chain(folder).checkpoint
    if checkpoint is not None and event.seq <= checkpoint.sources.get(event.source, 0):
        return True
    found = Segments(folder).find([event.message_id])
    return any(one.event_id == event.event_id and facts_of(one) == facts_of(event) for one in found)


def stream_name(folder: Path) -> str:
    """A name that the folder keeps wherever it is moved, made with the first shipper."""
    path = folder / STREAM
    try:
        return read_file(path).decode().strip()
    except FileNotFoundError:
        name = f"{folder.name}-{secrets.token_hex(4)}"
        replace_file(path, f"{name}\n".encode(), "group")
        return name


# ---- what is taken out -------------------------------------------------------------------------------


def level_of(settings: AuditSettings) -> Level:
    """How much is taken out."""
    return settings.redaction or level_for(settings.environment)


def redactor_of(settings: AuditSettings) -> Redactor:
    """The one that these settings describe."""
    return Redactor(
        level_of(settings),
        patterns=settings.patterns,
        fields={*DEFAULT_FIELDS, *settings.fields},
        key=None if settings.token_key_file is None else _token_key(settings.token_key_file),
    )


def _token_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InvalidSetting(f"cannot read the token key {path}: {error.strerror}") from None
    if len(key) < TOKEN_KEY_BYTES_MIN:
        raise InvalidSetting(f"the token key {path} must have at least {TOKEN_KEY_BYTES_MIN} bytes")
    return key


def preparing(settings: AuditSettings, *, whole_payloads: bool) -> Callable[[AuditEvent], AuditEvent] | None:
    """What an event goes through before it is written; None when nothing is taken out."""
    if level_of(settings) == "none" and not settings.patterns:
        return None
    return partial(redacted, redactor_of(settings), whole_payloads=whole_payloads)
