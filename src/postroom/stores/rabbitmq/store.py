"""A store whose lanes are in RabbitMQ, over a ledger in SQLite or PostgreSQL.

Rule 1: the ledger is the truth. A message is accepted when the ledger has it, and leased in the ledger.
Rule 2: the broker only says which record to claim next, and to which process. Deliveries that are lost or
        doubled cost time, never a message: `reconcile` repairs them.
Rule 3: a worker whose broker is silent claims from the ledger itself.
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import InvalidSetting, shown_address
from postroom.message import Event, Record, org_of
from postroom.stores.base import Counted, Listing, ready
from postroom.stores.conversion import Progress
from postroom.stores.rabbitmq.lanes import (
    SHARD_PREFIX,
    SHARDS,
    Deliveries,
    LaneDelivery,
    Note,
    Outgoing,
    RabbitLimits,
    Topology,
    is_shard,
    shard_of,
)
from postroom.stores.rabbitmq.transaction import HOMES, RabbitTransaction, own_homes
from postroom.stores.store import Capabilities, Store
from postroom.stores.transaction import Transaction
from postroom.system.addresses import ESCAPED, split_address
from postroom.system.clock import SystemClock
from postroom.system.crypto.encryption import KeysInUse
from postroom.system.handles import reset_after_fork
from postroom.system.log import library_log

if TYPE_CHECKING:
    from postroom.stores.rabbitmq.link import Broker

T = TypeVar("T")

PREFETCH_DEFAULT = 20
PREFETCH_MAX = 1_000
REPUBLISHED_A_SWEEP_MAX = 10_000  # records of one home; the next sweep continues
START_S = 5.0  # how long the first call waits for the broker
LOOK, STOP = "look for new homes", "stop"
SWEEP_CELL = "amqp-sweep"
OPTIONS = ("cafile", "p0", "prefetch", "queues")

_log = library_log("postroom.store")


class BrokerAddress(msgspec.Struct, frozen=True):
    """A store as its URL describes it."""

    nodes: tuple[str, ...]
    """One URL for each node of the broker. They hold the password."""
    shown: str
    """The URL without the password and the ledger."""
    ledger: str
    is_broker_only: bool
    is_quorum: bool
    prefetch: int
    ca_file: str = ""
    """The certificates that a broker's certificate is checked with; empty for those of the system."""


def parse_address(url: str) -> BrokerAddress:
    """Read `amqp://user:password@host:port,host:port/vhost?option=value&ledger=URL`.

    Everything after `ledger=` is the URL of the ledger. No error shows the password.
    """
    head, found, ledger = url.partition("ledger=")
    if not found or not ledger or not head.endswith(("?", "&")):
        raise InvalidSetting("a store in a broker needs a ledger: amqp://host/?ledger=sqlite:///queue.db")
    parts = split_address(head.rstrip("?&"), several=True)
    if parts is None:
        raise InvalidSetting(f"{shown_address(url)} is not the address of a broker: {ESCAPED}")
    user, _, hosts = parts.netloc.rpartition("@")
    shown = f"{user.partition(':')[0]}@{hosts}" if user else hosts
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise InvalidSetting(f"{unknown[0]!r} is not an option of a broker: use one of {', '.join(OPTIONS)}")
    nodes = [host for host in hosts.split(",") if host]
    if not nodes:
        raise InvalidSetting("the URL of a broker names at least one host")
    queues = _choice(options, "queues", "classic" if len(nodes) == 1 else "quorum", "classic", "quorum")
    return BrokerAddress(
        tuple(f"{parts.scheme}://{f'{user}@' if user else ''}{host}{parts.path}" for host in nodes),
        f"{parts.scheme}://{shown}{parts.path}",
        ledger,
        is_broker_only=_choice(options, "p0", "ledger", "ledger", "broker-only") == "broker-only",
        is_quorum=queues == "quorum",
        prefetch=_prefetch(options.get("prefetch", str(PREFETCH_DEFAULT))),
        ca_file=options.get("cafile", ""),
    )


def _choice(options: dict[str, str], name: str, default: str, *allowed: str) -> str:
    value = options.get(name, default)
    if value not in allowed:
        raise InvalidSetting(f"the option {name} is {' or '.join(allowed)}, not {value!r}")
    return value


def _prefetch(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= PREFETCH_MAX:
        raise InvalidSetting(f"prefetch must be a whole number from 1 to {PREFETCH_MAX}, not {text!r}")
    return int(text)


class RabbitStore(Store):
    """Records in a ledger, and the lanes of organizations in RabbitMQ."""

    limits = RabbitLimits()

    def __init__(self, address: BrokerAddress, ledger: Store) -> None:
        try:
            import pika  # type: ignore[import-untyped]  # noqa: F401 - an extra
        except ImportError:
            raise InvalidSetting("RabbitMQ needs pika: install postroom[rabbitmq]") from None
        self._address = address
        self._ledger = ledger
        self.folder = ledger.folder
        self.url = f"{address.shown}?ledger={ledger.url}"
        self.fatal_errors = ledger.fatal_errors
        self.capabilities = _capabilities(address, ledger.capabilities)
        """None while no engine uses this handle: then the times are those of the other processes."""
        self._fresh()
        reset_after_fork(self)

    def _fresh(self) -> None:
        self._mutex = threading.Lock()
        self._broker: Broker | None = None
        self._wakes: list[Callable[[], None]] = []
        self._repairs: SimpleQueue[str] = SimpleQueue()
        """Requests to the thread that repairs lanes: `LOOK` or `STOP`."""
        self.homes: dict[str, str] = {}
        self.deliveries = Deliveries(self._wake)

    def after_fork(self) -> None:
        """A child has neither the thread nor the connections."""
        self._fresh()

    # ---- writing and reading -------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        broker = self._started()
        begun: list[RabbitTransaction] = []

        def run(inner: Transaction) -> T:
            for earlier in begun:  # the ledger runs work again whose commit was rolled back
                earlier.lanes.undo()
            begun[:] = [RabbitTransaction(inner, self)]
            result = work(begun[0])
            begun[0].prepare()
            return result

        try:
            result = self._ledger.write(run, makes_room=makes_room)
        except BaseException:
            for transaction in begun:
                transaction.lanes.undo()
            raise
        self._committed(begun[0], broker)
        return result

    def _committed(self, transaction: RabbitTransaction, broker: "Broker") -> None:
        lanes = transaction.lanes
        self.homes.update(lanes.new_homes)
        broker.acknowledge(lanes.settled())
        if lanes.outgoing:
            self.deliveries.expect(lanes.outgoing)
            broker.publish(lanes.outgoing.values(), set(lanes.new_homes.values()))
        if self.on_commit is not None:
            self.on_commit(transaction)

    def read(self, work: Callable[[Transaction], T]) -> T:
        return self._ledger.read(lambda inner: work(RabbitTransaction(inner, self, is_reading=True)))

    @property
    def is_direct(self) -> bool:
        """Whether claims go to the ledger, because the broker delivers nothing."""
        return not self._wakes or self.deliveries.is_silent(self.limits.silence_s)

    # ---- the broker ----------------------------------------------------------------------------

    def _started(self) -> "Broker":
        """The connections, opened by the first call."""
        if self._broker is None:
            with self._mutex:
                if self._broker is None:
                    self._broker = self._start()
        return self._broker

    def _start(self) -> "Broker":
        import pika

        from postroom.stores.rabbitmq.link import Broker

        try:
            nodes = [pika.URLParameters(node) for node in self._address.nodes]
        except (ValueError, TypeError):
            raise InvalidSetting(f"{self._address.shown} is not the URL of a broker") from None
        for node in nodes:
            node.heartbeat, node.connection_attempts = self.limits.heartbeat_s, 1
            node.socket_timeout = node.stack_timeout = START_S
            if node.ssl_options is not None:
                node.ssl_options = pika.SSLOptions(self._certificates(), node.host)
        host = "" if self.capabilities.is_shared else SystemClock().boot_id()
        broker = Broker(
            nodes,
            self._topology(),
            self.deliveries,
            prefetch=self._address.prefetch,
            host=host,
            on_following=lambda: self._repairs.put(LOOK),
            limits=self.limits,
        )
        try:
            broker.await_first_answer(START_S)
        except InvalidSetting:
            broker.close()
            raise
        return broker

    def _certificates(self) -> ssl.SSLContext:
        """How a broker's certificate is checked: it has to name the host."""
        try:
            return ssl.create_default_context(cafile=self._address.ca_file or None)
        except OSError as error:
            raise InvalidSetting(f"cafile={self._address.ca_file} cannot be read: {error}") from None

    def _topology(self) -> Topology:
        prefix = f"postroom.{self._ledger.identity()}"
        return Topology(prefix, self._address.is_quorum, self.limits.delay_expiry_ms_min)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake()

    @contextmanager
    def receiving(self, wake: Callable[[], None]) -> Iterator[None]:
        broker = self._started()
        with self._mutex:
            self._wakes = [*self._wakes, wake]
            if len(self._wakes) == 1:
                self.deliveries.restart()
                self._repairs = SimpleQueue()
                repair = partial(self._keep_reconciling, self._repairs)
                threading.Thread(target=repair, name="postroom-reconcile", daemon=True).start()
                broker.receive(())
        try:
            yield
        finally:
            with self._mutex:
                self._wakes = [each for each in self._wakes if each is not wake]
                if not self._wakes:
                    self._repairs.put(STOP)
                    broker.stop_receiving()

    def _known_homes(self, transaction: Transaction) -> set[str]:
        homes = own_homes(transaction)
        if len(homes) >= self.limits.own_lanes_max:
            homes.update(f"{SHARD_PREFIX}{number}" for number in range(SHARDS))
        return homes

    # ---- repairing -----------------------------------------------------------------------------

    def _keep_reconciling(self, repairs: "SimpleQueue[str]") -> None:
        look_at = time.monotonic() + self.limits.held_look_s
        sweep_at = time.monotonic() + self.limits.reconcile_s
        while True:
            try:
                what = repairs.get(timeout=max(0.0, look_at - time.monotonic()))
            except Empty:
                what, look_at = "", time.monotonic() + self.limits.held_look_s
            if what == STOP:
                return
            try:
                if what == LOOK:
                    self._started().receive(self._ledger.read(self._known_homes))
                    continue
                self._give_back_held(time.monotonic() - self.limits.held_s)
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self.limits.reconcile_s
                    if self._ledger.write(self._take_sweep, makes_room=True):
                        self.reconcile()
            except Exception as error:  # noqa: BLE001 - an error must not end the thread: the next sweep retries
                _log.warning("the lanes were not compared with the ledger: %s", error)

    def _take_sweep(self, transaction: Transaction) -> bool:
        """Whether this process compares the lanes with the ledger now. One process does it for all."""
        value = transaction.cells.get(SWEEP_CELL, "")
        now, last = transaction.steady_ns, 0 if value is None else int(value)
        if last <= now < last + self.limits.reconcile_s * NANOS_PER_S / 2:
            return False
        transaction.cells.put(SWEEP_CELL, "", b"%d" % now)
        return True

    def reconcile(self) -> int:
        """Publish records that wait in the ledger and not in the broker; returns how many.

        A lane may hold fewer messages than the ledger because another process has them as deliveries. A
        message that is published twice is claimed once.
        """
        broker = self._started()
        if self._wakes:
            broker.receive(self._ledger.read(self._known_homes))
        waiting: dict[str, int] = {}
        queues: dict[str, list[str]] = {}
        for queue, counts in self._ledger.depths().items():
            if org_of(queue) and ready(counts):
                home = self._home_of(queue)
                waiting[home] = waiting.get(home, 0) + ready(counts)
                queues.setdefault(home, []).append(queue)
        found = broker.counts([*waiting])
        republished = 0
        for home, count in waiting.items():
            missing = min(count - found.get(home, 0), REPUBLISHED_A_SWEEP_MAX)
            if missing > 0:
                republished += self._republish(home, queues[home], missing)
        return republished

    def _home_of(self, queue: str) -> str:
        return self._ledger.read(
            lambda transaction: queue if transaction.cells.get(HOMES, queue) is not None else shard_of(queue)
        )

    def _republish(self, home: str, queues: list[str], limit: int) -> int:
        records = [
            record for queue in queues for record in self._ledger.find(Listing(queue, "QUEUED", 0, limit))
        ][:limit]
        _log.info("%d messages of %s are published again", len(records), home)
        outgoing = [Outgoing(home, Note(record.message_id, record.lane)) for record in records]
        self._started().publish(outgoing, [home])
        return len(records)

    def _give_back_held(self, before: float) -> None:
        """Publish deliveries that are held too long again, so that another process can have them.

        So no delivery is held for longer than `held_s` and `held_look_s` together, which is less than the
        shortest consumer timeout that RabbitMQ supports, a minute. They are published and not rejected,
        because a quorum queue drops a message that was returned too often.
        """
        held = self.deliveries.take_held(before)
        if not held:
            return
        try:
            known = self._ledger.read(
                lambda transaction: transaction.records.get_many([each.note.message_id for each in held])
            )
        except BaseException:
            self.deliveries.put_back(held)  # the next look tries again
            raise
        self._started().publish(
            [Outgoing(each.home, each.note) for each in held if self._still_waits(each, known)]
        )
        self._started().acknowledge(held)

    def _still_waits(self, delivery: LaneDelivery, known: dict[str, Record]) -> bool:
        record = known.get(delivery.note.message_id)
        if record is None:
            return delivery.note.envelope is not None
        return is_shard(delivery.home) or record.state == "QUEUED"

    # ---- life ----------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:  # type: ignore[override]
        """Why the ledger cannot write. An unreachable broker delays messages, but the service continues."""
        return self._ledger.trouble

    @property
    def broker_trouble(self) -> str:  # type: ignore[override]
        """Why the broker cannot be used at present; empty when it can."""
        return "" if self._broker is None else self._broker.trouble

    def wall_us(self) -> int:
        return self._ledger.wall_us()

    def identity(self) -> str:
        return self._ledger.identity()

    def keys_in_use(self) -> KeysInUse | None:
        return self._ledger.keys_in_use()

    def convert(self) -> Progress:
        return self._ledger.convert()

    def count_keys(self) -> dict[str, int]:
        return self._ledger.count_keys()

    def retire_key(self, fingerprint: str) -> None:
        self._ledger.retire_key(fingerprint)

    def wipe(self) -> bool:
        return self._ledger.wipe()

    def nudge_channel(self) -> tuple[Callable[[], Any], str] | None:
        return self._ledger.nudge_channel()

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        return self._ledger.events(after, limit)

    def newest_event(self) -> int:
        return self._ledger.newest_event()

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        return self._ledger.depths()

    def sync(self) -> None:
        self._ledger.sync()

    def reopen(self) -> None:
        self._ledger.reopen()

    def close(self) -> None:
        with self._mutex:
            broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()
        self._ledger.close()


def _capabilities(address: BrokerAddress, of_ledger: Capabilities) -> Capabilities:
    """Those of the ledger, without what only the ledger's own lanes or a ledger of everything can do."""
    return msgspec.structs.replace(
        of_ledger,
        is_concurrent=False,
        is_ordered=False,
        keeps_all=not address.is_broker_only,
        is_encryptable=of_ledger.is_encryptable and not address.is_broker_only,
        is_movable=False,
    )
