"""The connections to RabbitMQ: one that publishes and one that receives, in one thread of this process.

Rule 1: this module decides nothing about a message. A delivery that it loses is repaired from the ledger.
Rule 2: publishing and receiving have a connection each: a broker with an alarm stops reading from connections
        that publish, and acknowledgements must still arrive.
Rule 3: a message is published afresh from its record, so it carries no `x-death` header of an earlier life.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pika  # type: ignore[import-untyped]
from pika.adapters.select_connection import IOLoop, SelectConnection  # type: ignore[import-untyped]
from pika.exceptions import AMQPError  # type: ignore[import-untyped]

from postroom.errors import InvalidSetting, Unavailable
from postroom.stores.rabbitmq.lanes import Deliveries, LaneDelivery, Note, Outgoing, RabbitLimits, Topology
from postroom.system.log import library_log

UNCONFIRMED_MAX = 1_000  # messages in flight to the broker
OUTBOX_MAX = 100_000  # messages that wait for the broker; those beyond are published by the next sweep
RECONNECT_S = 0.1
ANSWER_S = 10.0  # how long the broker may take to answer a question
CLOSE_LOOK_S = 0.01
HOST_EXPIRY_MS = 60_000  # after a crash of the broker, another host may use the lanes after this time
HOST_REFUSED = 406  # PRECONDITION_FAILED
NO_TAG = 2**64

_log = library_log("postroom.store")
if logging.getLogger("pika").level == logging.NOTSET:
    # pika logs seven errors for each failed attempt. `_Link` logs one line per outage.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Note).decode


class _Link:
    """One connection, reopened whenever it is lost."""

    def __init__(
        self,
        loop: IOLoop,
        nodes: Sequence[pika.ConnectionParameters],
        opened: Callable[[Any], None],
        lost: Callable[[], None],
        limits: RabbitLimits,
    ) -> None:
        self._loop = loop
        self._nodes = nodes
        self._on_open = opened
        self._on_lost = lost
        self._limits = limits
        self._is_encrypted = any(node.ssl_options is not None for node in nodes)
        self._failures = 0
        self._connection: Any = None
        self._closing = False
        self.trouble = ""
        """Why there is no connection; empty while there is one."""

    def open(self) -> None:
        """Connect, and connect again whenever the connection is lost."""
        self._closing = False
        self._connect()

    def _connect(self) -> None:
        if self._closing:
            return
        node = self._nodes[self._failures % len(self._nodes)]
        self._connection = SelectConnection(
            node,
            on_open_callback=self._opened,
            on_open_error_callback=self._lost,
            on_close_callback=self._lost,
            custom_ioloop=self._loop,
        )

    def _opened(self, connection: Any) -> None:
        self.trouble = ""
        if self._closing:
            self.drop()
        else:
            self._on_open(connection)

    def works(self) -> None:
        """The connection works: forget earlier failures, so that the next reconnect is quick."""
        self._failures = 0

    def _lost(self, _connection: Any, error: BaseException) -> None:
        self._on_lost()
        if self._closing:
            return
        if not self.trouble:
            _log.warning("the broker is not reachable, reconnecting: %s", type(error).__name__)
        self.trouble = f"the broker is not reachable: {type(error).__name__}"
        self._failures += 1
        pause_s = min(RECONNECT_S * 2 ** min(self._failures - 1, 10), self._limits.reconnect_s_max)
        self._loop.call_later(pause_s, self._connect)

    def join_frames(self) -> None:
        """Send the frames that wait with one system call: pika uses one for each frame.

        The buffers are pika's own. A version that keeps them elsewhere is only slower.
        """
        transport = getattr(self._connection, "_transport", None)
        buffers = getattr(transport, "_tx_buffers", None)
        if buffers is not None and len(buffers) > 1 and not self._is_encrypted:
            joined = b"".join(buffers)
            buffers.clear()
            buffers.append(joined)

    @property
    def is_closed(self) -> bool:
        """Whether no connection is open or about to open."""
        return self._connection is None or self._connection.is_closed

    def drop(self) -> None:
        """Close the connection, so that it is opened again."""
        with suppress(AMQPError):
            if self._connection is not None and self._connection.is_open:
                self._connection.close()

    def close(self) -> None:
        """Close the connection for good."""
        self._closing = True
        self.drop()

    def abort(self) -> None:
        """Close the socket, also when the broker does not confirm the end. The transport is of pika."""
        transport = getattr(self._connection, "_transport", None)
        if transport is not None and not self.is_closed:
            transport.abort()


class _PublishingChannel:
    """A channel that publishes, with or without confirms."""

    def __init__(self, channel: Any, topology: Topology, returned: Callable[[Outgoing], None]) -> None:
        self._channel = channel
        self._topology = topology
        self._returned = returned
        self._declared: set[str] = set()
        self._properties: dict[str, pika.BasicProperties] = {}
        self._published = 0
        self.unconfirmed: dict[int, Outgoing] = {}
        self.confirms = False
        channel.add_on_return_callback(self._on_return)

    def confirm(self, freed: Callable[[], None], refused: Callable[[Outgoing], None]) -> None:
        """Have the broker confirm or refuse each message."""
        self.confirms = True
        self._freed = freed
        self._refused = refused
        self._channel.confirm_delivery(self._on_confirm)

    def publish(self, outgoing: Outgoing) -> None:
        """Publish one message. The queues that it needs are declared first, on the same channel."""
        home, channel = outgoing.home, self._channel
        if home not in self._declared:
            for name, arguments in self._topology.lanes(home):
                channel.queue_declare(name, durable=True, arguments=arguments)
            self._declared.add(home)
            self._properties[home] = pika.BasicProperties(delivery_mode=2, type=home)
        exchange = self._declare_delay(outgoing.delay_ms) if outgoing.delay_ms else ""
        lane = self._topology.lane(home, outgoing.note.lane)
        channel.basic_publish(exchange, lane, _encode(outgoing.note), self._properties[home], mandatory=True)
        if self.confirms:
            self._published += 1
            self.unconfirmed[self._published] = outgoing

    def _declare_delay(self, delay_ms: int) -> str:
        """Declare a delay queue each time it is used: a declaration restarts the time until it expires."""
        name, arguments = self._topology.delay(delay_ms)
        self._channel.exchange_declare(name, "fanout", durable=True, auto_delete=True)
        self._channel.queue_declare(name, durable=True, arguments=arguments)
        self._channel.queue_bind(name, name)
        return name

    def _on_return(self, _channel: Any, _method: Any, properties: Any, body: bytes) -> None:
        """No queue took a message, because its lane was deleted: declare the lane and publish again."""
        self._declared.discard(properties.type)
        self._returned(Outgoing(properties.type, _decode(body)))

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        numbers: Iterable[int] = (method.delivery_tag,)
        if method.multiple:
            numbers = [number for number in self.unconfirmed if number <= method.delivery_tag]
        for number in numbers:
            outgoing = self.unconfirmed.pop(number, None)
            if outgoing is not None and isinstance(method, pika.spec.Basic.Nack):
                self._refused(outgoing)
        self._freed()


class Broker:
    """Publishes and receives. Every public method may be called from any thread."""

    _is_scheduled = False
    """Whether the loop is about to run the calls of other threads."""

    def __init__(
        self,
        nodes: Sequence[pika.ConnectionParameters],
        topology: Topology,
        deliveries: Deliveries,
        *,
        prefetch: int,
        host: str,
        on_following: Callable[[], None],
        limits: RabbitLimits,
    ) -> None:
        self._nodes = nodes
        self._topology = topology
        self._deliveries = deliveries
        self._prefetch = prefetch
        self.limits = limits
        self._host = host
        """The only host of the ledger; empty when the ledger may be used from several."""
        self._on_following = on_following
        """Called when this process begins to receive announcements of new homes. Earlier ones were missed."""
        self._todo: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._renew()
        self._urgent: deque[Outgoing] = deque()
        self._outbox: deque[Outgoing] = deque()
        self._refused: deque[Outgoing] = deque()
        """Messages that the broker refused, as a full queue does. They are published again after a pause."""
        self._fast: _PublishingChannel | None = None
        """For P0, without confirms."""
        self._safe: _PublishingChannel | None = None
        self._asking: Any = None
        """A channel for questions."""
        self._is_blocked = False
        self._announced: deque[str] = deque()
        self._homes: set[str] = set()
        self._consumed: set[str] = set()
        self._channel: Any = None
        self._epoch = 0
        self._outstanding: set[int] = set()
        """The tags of deliveries that are not acknowledged."""
        self._wants_to_receive = False
        self._checked: Future[None] = Future()
        """Done when the broker has answered for the first time."""
        self._thread = threading.Thread(target=self._run, name="postroom-broker", daemon=True)
        self._thread.start()

    # ---- from any thread -----------------------------------------------------------------------

    def publish(self, outgoing: Iterable[Outgoing], new_homes: Iterable[str] = ()) -> None:
        """Publish messages, and tell receivers about new lanes."""
        for one in outgoing:
            waiting = self._urgent if one.note.lane == 0 and not one.delay_ms else self._outbox
            if len(waiting) < OUTBOX_MAX:
                waiting.append(one)
        self._announced.extend(new_homes)
        self._soon(self._flush)

    def acknowledge(self, deliveries: Sequence[LaneDelivery]) -> None:
        """The ledger has decided about these deliveries."""
        if deliveries:
            self._soon(partial(self._acknowledge, deliveries))

    def receive(self, homes: Iterable[str]) -> None:
        """Receive the deliveries of these homes, too."""
        self._soon(partial(self._receive, set(homes)))

    def stop_receiving(self) -> None:
        """Return what was delivered and not decided about to the broker."""
        self._soon(self._stop_receiving)

    def counts(self, homes: Sequence[str]) -> dict[str, int]:
        """How many messages wait in the broker for each home. Raises `Unavailable`."""
        answer: Future[dict[str, int]] = Future()
        self._soon(partial(self._count, homes, answer))
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            raise Unavailable("the broker has not answered") from None

    def await_first_answer(self, timeout_s: float) -> None:
        """Wait until the broker has answered once. Raises `InvalidSetting` when it refused this host."""
        with suppress(TimeoutError):
            self._checked.result(timeout_s)

    @property
    def is_receiving(self) -> bool:
        """Whether deliveries can arrive."""
        return self._channel is not None

    @property
    def trouble(self) -> str:
        """Why the broker cannot be used; empty when it can."""
        return self._publishing.trouble or ("the broker has an alarm" if self._is_blocked else "")

    @property
    def backlog(self) -> int:
        """Messages that are not published or not confirmed yet."""
        unconfirmed = 0 if self._safe is None else len(self._safe.unconfirmed)
        return len(self._urgent) + len(self._outbox) + len(self._refused) + unconfirmed

    def close(self) -> None:
        """Publish what waits, then close the connections."""
        deadline = time.monotonic() + self.limits.close_timeout_s
        while self.backlog and not self.trouble and time.monotonic() < deadline:
            time.sleep(CLOSE_LOOK_S)
        self._soon(self._stop)
        self._thread.join(self.limits.close_timeout_s)

    def _soon(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(ValueError, OSError):  # the loop is closed: the next one does it
                self._loop.add_callback_threadsafe(self._work)

    # ---- in the thread -------------------------------------------------------------------------

    def _renew(self) -> None:
        """Make a new event loop and links that are not open yet."""
        self._loop = IOLoop()
        self._is_scheduled = False
        self._publishing = _Link(
            self._loop, self._nodes, self._open_publishing, self._lost_publishing, self.limits
        )
        self._receiving = _Link(
            self._loop, self._nodes, self._open_receiving, self._lost_receiving, self.limits
        )

    def _run(self) -> None:
        while not self._is_stopping:
            self._publishing.open()
            if self._wants_to_receive:
                self._receiving.open()
            try:
                self._loop.add_callback_threadsafe(self._work)  # also calls that an earlier loop did not run
                self._loop.start()
            except Exception as error:  # noqa: BLE001 - pika fails in its loop when a new connection is reset
                _log.warning("the connections to the broker are opened again: %s", type(error).__name__)
                self._lost_publishing()
                self._lost_receiving()
            loop = self._loop
            if not self._is_stopping:
                time.sleep(RECONNECT_S)
                self._renew()
            loop.close()

    def _work(self) -> None:
        self._is_scheduled = False
        while self._todo:
            try:
                self._todo.popleft()()
            except AMQPError as error:  # the link notices by itself
                _log.debug("the broker is not usable at present: %s", type(error).__name__)

    def _stop(self) -> None:
        self._is_stopping = True
        self._publishing.close()
        self._receiving.close()
        self._stop_when_closed(time.monotonic() + self.limits.close_timeout_s / 2)

    def _stop_when_closed(self, deadline: float) -> None:
        if self._publishing.is_closed and self._receiving.is_closed:
            self._loop.stop()
        elif time.monotonic() > deadline:
            self._publishing.abort()
            self._receiving.abort()
            self._loop.call_later(CLOSE_LOOK_S, self._loop.stop)  # sockets are closed in the next turn
        else:
            self._loop.call_later(CLOSE_LOOK_S, partial(self._stop_when_closed, deadline))

    # ---- publishing ----------------------------------------------------------------------------

    def _open_publishing(self, connection: Any) -> None:
        connection.add_on_connection_blocked_callback(lambda *_: self._block(is_blocked=True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._block(is_blocked=False))
        connection.channel(on_open_callback=self._open_asking)

    def _open_asking(self, channel: Any) -> None:
        channel.add_on_close_callback(self._asking_closed)
        channel.exchange_declare(self._news, "fanout", durable=True)
        if not self._host:
            self._host_accepted(channel)
            return
        # The queue lives as long as one process consumes it, and no process of another host can declare it.
        # It is durable, because RabbitMQ 4.3 refuses other queues that several connections share.
        arguments = {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._host,
            "x-expires": HOST_EXPIRY_MS,
        }
        name = f"{self._topology.prefix}.one-host"

        def declared(_frame: Any) -> None:
            channel.basic_consume(name, lambda *_: None, auto_ack=True)
            self._host_accepted(channel)

        channel.queue_declare(name, durable=True, auto_delete=True, arguments=arguments, callback=declared)

    def _host_accepted(self, channel: Any) -> None:
        self._asking = channel
        connection = channel.connection
        connection.channel(on_open_callback=self._open_fast)
        connection.channel(on_open_callback=self._open_safe)
        if not self._checked.done():
            self._checked.set_result(None)

    def _asking_closed(self, _channel: Any, error: BaseException) -> None:
        self._asking = None
        if getattr(error, "reply_code", 0) == HOST_REFUSED and not self._checked.done():
            self._checked.set_exception(
                InvalidSetting(
                    "the ledger is a SQLite file and a worker of another host uses the same lanes: "
                    "workers on several hosts need a PostgreSQL ledger"
                )
            )
        self._publishing.drop()

    def _open_fast(self, channel: Any) -> None:
        channel.add_on_close_callback(lambda *_: self._publishing.drop())
        self._fast = _PublishingChannel(channel, self._topology, self._urgent.append)
        self._flush()

    def _open_safe(self, channel: Any) -> None:
        channel.add_on_close_callback(lambda *_: self._publishing.drop())
        safe = _PublishingChannel(channel, self._topology, self._outbox.append)
        safe.confirm(self._flush, self._note_refused)
        self._safe = safe
        self._publishing.works()
        self._flush()

    def _lost_publishing(self) -> None:
        if not self._checked.done():
            self._checked.set_result(None)
        if self._safe is not None:  # not confirmed: publish again; a doubled delivery does no harm
            self._outbox.extendleft(reversed(self._safe.unconfirmed.values()))
        self._outbox.extend(self._refused)
        self._refused.clear()
        self._fast = self._safe = self._asking = None
        self._is_blocked = False

    def _note_refused(self, outgoing: Outgoing) -> None:
        if not self._refused:
            self._loop.call_later(self.limits.refused_pause_s, self._publish_refused)
        self._refused.append(outgoing)

    def _publish_refused(self) -> None:
        self._outbox.extend(self._refused)
        self._refused.clear()
        self._flush()

    def _block(self, *, is_blocked: bool) -> None:
        self._is_blocked = is_blocked
        if is_blocked:
            _log.warning("the broker has an alarm and takes no messages: the ledger keeps them")
        self._flush()

    def _flush(self) -> None:
        """Publish what waits, as far as the broker takes it."""
        if self._is_blocked:
            return
        fast, safe = self._fast, self._safe
        while fast is not None and self._urgent:
            fast.publish(self._urgent.popleft())
        while safe is not None and self._outbox and len(safe.unconfirmed) < UNCONFIRMED_MAX:
            safe.publish(self._outbox.popleft())
        while self._asking is not None and self._announced:
            self._asking.basic_publish(self._news, "", self._announced.popleft().encode())
        self._publishing.join_frames()

    @property
    def _news(self) -> str:
        return f"{self._topology.prefix}.news"

    def _count(self, homes: Sequence[str], answer: "Future[dict[str, int]]") -> None:
        if self._asking is None:
            answer.set_exception(Unavailable("the broker is not reachable"))
            return
        counts: dict[str, int] = {}
        names = [(home, *lane) for home in homes for lane in self._topology.lanes(home)]
        left = len(names)

        def counted(home: str, frame: Any) -> None:
            nonlocal left
            counts[home] = counts.get(home, 0) + frame.method.message_count
            left -= 1
            if not left and not answer.done():
                answer.set_result(counts)

        for home, name, arguments in names:
            self._asking.queue_declare(
                name, durable=True, arguments=arguments, callback=partial(counted, home)
            )
        if not names:
            answer.set_result(counts)

    # ---- receiving -----------------------------------------------------------------------------

    def _receive(self, homes: set[str]) -> None:
        self._homes |= homes
        if not self._wants_to_receive:
            self._wants_to_receive = True
            self._receiving.open()
        self._consume()

    def _stop_receiving(self) -> None:
        self._wants_to_receive = False
        self._receiving.close()

    def _open_receiving(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._open_consumer)

    def _open_consumer(self, channel: Any) -> None:
        self._epoch += 1
        channel.add_on_close_callback(lambda *_: self._receiving.drop())
        channel.add_on_cancel_callback(lambda *_: self._receiving.drop())  # a lane was deleted
        channel.basic_qos(prefetch_count=self._prefetch)
        channel.exchange_declare(self._news, "fanout", durable=True)
        channel.queue_declare("", exclusive=True, callback=partial(self._follow_news, channel))

    def _follow_news(self, channel: Any, frame: Any) -> None:
        name = frame.method.queue

        def bound(_frame: Any) -> None:
            channel.basic_consume(name, self._on_news, auto_ack=True)
            self._channel = channel
            self._receiving.works()
            self._consume()
            self._on_following()

        channel.queue_bind(name, self._news, callback=bound)

    def _on_news(self, _channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        home = body.decode()
        if home not in self._homes:
            self._deliveries.note_new_home()
        self._receive({home})

    def _consume(self) -> None:
        channel, epoch = self._channel, self._epoch
        if channel is None or not channel.is_open:
            return
        for home in sorted(self._homes - self._consumed):
            self._consumed.add(home)
            received = partial(self._received, home, epoch)
            for name, arguments in self._topology.lanes(home):
                channel.queue_declare(name, durable=True, arguments=arguments)
                channel.basic_consume(name, received)

    def _received(
        self, home: str, epoch: int, channel: Any, method: Any, _properties: Any, body: bytes
    ) -> None:
        try:
            note = _decode(body)
        except msgspec.MsgspecError:
            _log.warning("a message in a lane of %s cannot be decoded and is dropped", home)
            channel.basic_ack(method.delivery_tag)
            return
        delivery = LaneDelivery(home, note, method.delivery_tag, epoch, time.monotonic())
        if self._deliveries.add(delivery):
            self._outstanding.add(method.delivery_tag)
        else:
            channel.basic_ack(method.delivery_tag)

    def _lost_receiving(self) -> None:
        self._channel = None
        self._outstanding.clear()
        self._consumed.clear()
        self._deliveries.clear()

    def _acknowledge(self, deliveries: Sequence[LaneDelivery]) -> None:
        if self._channel is None or not self._channel.is_open:
            return
        tags = {each.tag for each in deliveries if each.epoch == self._epoch} & self._outstanding
        self._outstanding -= tags
        first_left = min(self._outstanding, default=NO_TAG)
        together = [tag for tag in tags if tag < first_left]
        if together:
            self._channel.basic_ack(max(together), multiple=True)
        for tag in tags.difference(together):
            self._channel.basic_ack(tag)
        self._receiving.join_frames()
