"""Live pages: one reader of the store feeds all open pages by server-sent events.

Rule 1: the store is read once for all pages: events every `TICK_S`, the overview every `SNAPSHOT_S`. Nothing
        is read while no page is open.
Rule 2: a page has a position, and gets every event after it or a `reset`. A page that reconnects sends its
        position, so it misses nothing. After a `reset` it loads its view again.
Rule 3: a slow page keeps no memory: it gets what the shared buffer still has when it is ready.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from postroom.core.gate import visible_org
from postroom.core.names import unscoped
from postroom.engine.rules.operations import Operations
from postroom.errors import PostroomError, Unavailable
from postroom.message import Event, EventKind, org_of
from postroom.page.activity import Activity
from postroom.page.overview import OverviewFacts, Snapshot, read_facts, seen_by, snapshot, with_names_hidden
from postroom.page.redaction import Hide, names_hidden
from postroom.server.access.shares import Shares
from postroom.server.http.exchange import HttpRequest, disconnection
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.event_streams import STREAM_STARTS, chunk, end_stream, is_number, sse
from postroom.server.telemetry.server_log import error_location
from postroom.stores.transaction import Transaction

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

TICK_S: Final = 0.1
BUSY_TICK_S: Final = 0.25
"""Between two reads while events come in masses."""
SNAPSHOT_S: Final = 1.0
LINGER_S: Final = 5.0
"""How long the reader goes on after the last page, so that a page that comes back finds its figures."""
EVENTS_A_TICK_MAX: Final = 200
EVENTS_FIRST_MAX: Final = 1_000  # that the first figures are computed from
RECENT_EVENTS: Final = 30  # that a new page begins with
CATCH_UP_MAX: Final = 2_000  # events that a page may have missed when it reconnects
BATCHES_KEPT_MAX: Final = 100
RETRY_MS: Final = 500
"""How soon a browser connects again after it lost its connection."""
PAGES_MAX: Final = 512
PAGES_A_TOKEN_MAX: Final = 128
OPERATOR_PAGES_RESERVE: Final = 64

_QUIET: Final[frozenset[EventKind]] = frozenset({"heartbeat"})
_encode = msgspec.json.Encoder().encode


class Happening(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event as a page shows it."""

    ts_us: int
    kind: str
    org_id: str
    message_id: str
    type: str = ""
    error_type: str = ""
    parent_message_id: str = ""


class Batch:
    """The events of one tick, encoded once for each organization that looks."""

    def __init__(
        self, after: int, last: int, place: str, happenings: Sequence[Happening], *, skipped: bool = False
    ) -> None:
        self.after = after
        """The position before the batch."""
        self.last = last
        self._place = place
        """The position after it, as pages get it."""
        self._skipped = skipped
        """Whether events at the beginning were not read, because there were too many."""
        self._happenings = happenings
        self._encoded: dict[str | None, bytes] = {}

    @property
    def count(self) -> int:
        """How many events it has."""
        return len(self._happenings)

    def encoded(self, org_id: str | None) -> bytes:
        """The batch as a server-sent event for an organization, or for all; empty when nothing is for it."""
        found = self._encoded.get(org_id)
        if found is None:
            seen = [_shown(one, org_id or "") for one in self._happenings if is_seen(one, org_id)]
            data = _encode({"events": seen, "skipped": self._skipped})
            found = sse(self._place, "events", data) if seen or self._skipped else b""
            self._encoded[org_id] = found
        return found


def _shown(happening: Happening, org_id: str) -> Happening:
    """An event with the ids that callers of an organization gave."""
    if not org_id:
        return happening
    return msgspec.structs.replace(
        happening,
        message_id=unscoped(org_id, happening.message_id),
        parent_message_id=unscoped(org_id, happening.parent_message_id),
    )


def is_seen(happening: Happening, org_id: str | None) -> bool:
    """Whether callers of an organization see an event. None stands for operators, who see all."""
    return org_id is None or (bool(org_id) and happening.org_id == org_id)


def happenings_of(events: Sequence[Event], hide: Hide) -> list[Happening]:
    """Events as pages show them. In a thread: redaction takes long."""
    return [
        Happening(
            event.ts_us, event.kind, org_of(event.queue), event.message_id, hide(event.type),
            hide(event.error_type), hide(event.parent_message_id),
        )
        for event in events
        if event.kind not in _QUIET
    ]  # fmt: skip


class _Look(msgspec.Struct):
    """What one read of the store found."""

    newest: int
    events: list[Event]
    happenings: list[Happening]
    """Those of the events that pages get."""
    after: int
    facts: OverviewFacts | None


class Live:
    """The shared reader, and the streams of the open pages."""

    def __init__(self, server: TaskServer, redactor: "Callable[[], Redactor]") -> None:
        self._server = server
        self._redactor = redactor
        self._hide: Hide | None = None
        self._loop = asyncio.get_running_loop()
        self._share = Shares("open pages", PAGES_MAX, PAGES_A_TOKEN_MAX, OPERATOR_PAGES_RESERVE)
        self._activity = Activity()
        self._batches: deque[Batch] = deque(maxlen=BATCHES_KEPT_MAX)
        self._position = 0
        self._has_begun = False
        self._shown: tuple[OverviewFacts, Snapshot] | None = None
        """The newest snapshot; None before the first."""
        self._encoded: dict[str | None, bytes] = {}
        self._snapshot_number = 0
        self._snapshot_due = 0.0
        self._wanted_until = 0.0
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None

    # ---- reading the store ---------------------------------------------------------------------

    async def overview(self, org_id: str | None) -> bytes:
        """The newest snapshot as JSON, at most about `SNAPSHOT_S` old."""
        await self._start()
        return self._snapshot_for(org_id)

    def expect_page(self) -> "asyncio.Task[None]":
        """Start the reader unless it runs: a browser that loads the page asks for the snapshot soon."""
        self._wanted_until = self._loop.time() + LINGER_S
        if self._task is None or self._task.done():
            self._shown = None
            self._task = asyncio.create_task(self._run())
        return self._task

    async def _start(self) -> None:
        """Start the reader unless it runs, and wait for its first snapshot."""
        running = self.expect_page()
        while self._shown is None:
            changed = self._changed
            await asyncio.wait((changed, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not changed.done():
                running.result()  # raises what ended it

    async def _run(self) -> None:
        """Read until no page is open any more. A store that fails is read again."""
        self._activity, self._position, self._snapshot_due = Activity(), 0, 0.0
        self._has_begun = False
        self._batches.clear()
        hide = await self._hiding()
        while self._share.used or self._loop.time() < self._wanted_until or self._shown is None:
            pause_s = TICK_S
            try:
                pause_s = await self._tick(hide)
            except PostroomError as error:
                if self._shown is None:
                    raise
                self._server.server_log.write_rarely("page_failed", error=error_location(error))
            await asyncio.sleep(pause_s)

    async def _hiding(self) -> Hide:
        """What hides secrets. It is made in a thread, because its rules take long to compile."""
        if self._hide is None:
            self._hide = names_hidden(await asyncio.to_thread(self._redactor))
        return self._hide

    async def _tick(self, hide: Hide) -> float:
        """Read once. Returns the pause before the next read."""
        is_due = self._loop.time() >= self._snapshot_due
        is_first, self._has_begun = not self._has_begun, True
        look = await self._server.read(lambda: self._look(is_due, is_first, hide))
        has_events = look.newest > self._position
        if has_events:
            self._note_events(look, is_first)
        if look.facts is not None:
            self._snapshot_due = self._loop.time() + SNAPSHOT_S
            self._activity.forget(look.facts.now_us)
            whole = snapshot(look.facts, self._activity, await self._server.part_facts())
            self._shown = look.facts, await self._server.read(lambda: with_names_hidden(whole, hide))
            self._encoded = {}
            self._snapshot_number += 1
        if has_events or look.facts is not None:
            self._changed.set_result(None)
            self._changed = self._loop.create_future()
        return BUSY_TICK_S if len(look.events) == EVENTS_A_TICK_MAX else TICK_S

    def _look(self, is_due: bool, is_first: bool, hide: Hide) -> _Look:
        position, policy = self._position, self._server.engine.policy

        def work(transaction: Transaction) -> _Look:
            newest = transaction.events.newest()
            limit = EVENTS_FIRST_MAX if is_first else EVENTS_A_TICK_MAX
            after = max(position, newest - limit)
            events = transaction.events.read(after, limit) if newest > position else []
            facts = read_facts(Operations(transaction, policy), policy) if is_due else None
            return _Look(newest, events, [], after, facts)

        look = self._server.engine.store.read(work)
        look.happenings = happenings_of(look.events[-RECENT_EVENTS:] if is_first else look.events, hide)
        return look

    def _note_events(self, look: _Look, is_first: bool) -> None:
        skipped = 0 if is_first else look.after - self._position
        if look.events:
            self._activity.add(look.events, len(look.events) / (len(look.events) + skipped))
        last = look.events[-1].seq if look.events else look.newest
        after = self._position
        if is_first and look.events:
            after = look.events[-RECENT_EVENTS:][0].seq - 1
        self._batches.append(Batch(after, last, self.place(last), look.happenings, skipped=skipped > 0))
        self._position = last

    def _snapshot_for(self, org_id: str | None) -> bytes:
        found = self._encoded.get(org_id)
        if found is None:
            if self._shown is None:
                raise Unavailable("the overview is not ready: try again soon")
            facts, whole = self._shown
            own = whole if org_id is None else seen_by(whole, facts, self._activity, org_id)
            found = self._encoded[org_id] = _encode(own)
        return found

    # ---- one page ------------------------------------------------------------------------------

    async def stream(self, request: HttpRequest, is_allowed: Callable[[], bool]) -> None:
        """Send one page everything that happens, until it closes, its session ends or the server stops."""
        identity = request.identity
        self._share.take(identity)
        disconnected = asyncio.ensure_future(disconnection(request))
        try:
            await self._start()
            page = _Page(self, request, visible_org(identity))
            await request.send(STREAM_STARTS)
            await page.begin(request.header(b"last-event-id") or request.call.after)
            with self._server.open_calls.joined(is_allowed) as ended:
                ends = (disconnected, self._server.long_polls.ending, ended)
                while not any(end.done() for end in ends) and is_allowed():
                    changed = self._changed
                    await page.send_news()
                    await asyncio.wait(
                        (*ends, changed), timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED
                    )
            await end_stream(request, disconnected, is_allowed)
        finally:
            self._share.give_back(identity)
            self._wanted_until = self._loop.time() + LINGER_S
            disconnected.cancel()

    def recent_position(self) -> int:
        """The position from which a new page gets the last few events."""
        position, count = self._position, 0
        for batch in reversed(self._batches):
            count += batch.count
            if count > 2 * RECENT_EVENTS:
                break
            position = batch.after
        return position

    async def missed(self, request: HttpRequest, position: int) -> list[Batch] | None:
        """The batches between a position and that of the reader; None when they are gone."""
        if position >= self._position:
            return []
        kept = [batch for batch in self._batches if batch.last > position]
        if kept and kept[0].after == position:
            return kept
        if self._position - position > CATCH_UP_MAX:
            return None
        upto, place = self._position, self.place(self._position)
        hide = await self._hiding()

        def look() -> Batch | None:
            events = self._server.engine.store.events(position, CATCH_UP_MAX)
            found = [event for event in events if event.seq <= upto]
            is_whole = bool(found) and found[0].seq == position + 1
            return Batch(position, upto, place, happenings_of(found, hide)) if is_whole else None

        batch = await self._server.read_for(request, look)
        return None if batch is None else [batch]

    def news(self, position: int, snapshot_number: int, org_id: str | None) -> tuple[bytes, int, int, bool]:
        """Updates for a page: their bytes, the new position and snapshot, and whether events are gone."""
        batches = [batch for batch in self._batches if batch.last > position]
        is_gone = bool(batches) and batches[0].after > position
        data = b"".join(batch.encoded(org_id) for batch in batches) if not is_gone else b""
        if snapshot_number != self._snapshot_number:
            data += sse(self.place(self._position), "overview", self._snapshot_for(org_id))
        return data, self._position, self._snapshot_number, is_gone

    def place(self, position: int) -> str:
        """A position as pages get it: covered, because numbers of events count those of all organizations."""
        return str(self._server.ids.cover(position))

    def position_of(self, place: str) -> int | None:
        """The event number of a position that a page sends; None when no page was given it."""
        return self._server.ids.place(int(place))

    @property
    def position(self) -> int:
        """The number of the last event that was read."""
        return self._position

    async def close(self) -> None:
        """End the reader."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))


class _Page:
    """One open page: its position, and what it was sent."""

    def __init__(self, live: Live, request: HttpRequest, org_id: str | None) -> None:
        self._live = live
        self._request = request
        self._org_id = org_id
        self._position = live.position
        self._snapshot_number = 0

    async def begin(self, last_event_id: str) -> None:
        """Send what the page missed since it was last connected; `reset` when that is no longer known.

        A new page begins with the last few events.
        """
        await self._send(b"retry: %d\n\n" % RETRY_MS)
        if not is_number(last_event_id):
            self._position = self._live.recent_position()
            return
        position = self._live.position_of(last_event_id)
        missed = None if position is None else await self._live.missed(self._request, position)
        if missed is None:
            await self._reset()
        elif missed:
            self._position = missed[-1].last
            await self._send(b"".join(batch.encoded(self._org_id) for batch in missed))

    async def send_news(self) -> None:
        data, position, self._snapshot_number, is_gone = self._live.news(
            self._position, self._snapshot_number, self._org_id
        )
        self._position = position
        if is_gone:
            await self._reset()
        if data:
            await self._send(data)

    async def _reset(self) -> None:
        await self._send(sse(self._live.place(self._position), "reset", b"{}"))

    async def _send(self, data: bytes) -> None:
        if data:
            await self._request.send(chunk(data))
