"""Faults of a broker under load. Each test prints what was accepted, lost and done twice, and the pause."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pika  # type: ignore[import-untyped]
import pytest

from postroom import Backpressure, Engine, Policy
from postroom.client import EngineClient
from postroom.errors import InvalidSetting, Overloaded, Unavailable
from postroom.stores.rabbitmq.lanes import RabbitLimits
from postroom.stores.rabbitmq.store import RabbitStore
from postroom.system.crypto.tls import make_self_signed
from tests.integration.commandline import isolate
from tests.integration.ups import running
from tests.postgresserver import database, postgres
from tests.rabbitmqload import LOOK_S, MORE, TYPE, Load, rabbit_store, reset_at_every_phase, under_load
from tests.rabbitmqserver import RabbitServer, is_installed, port_mapper
from tests.tcpproxy import TcpProxy
from tests.waiting import HANG_GUARD_S, until

__all__ = ["database", "postgres"]  # fixtures

CONSUMER_TIMEOUT_MS = 2_000


def check(load: Load, name: str) -> None:
    print(load.report(name))
    assert load.accepted
    assert not load.refused  # the ledger accepts without the broker
    assert not load.lost, "accepted messages are lost"
    assert not load.doubled, "a message was done twice without a lease that ended"


@pytest.fixture(autouse=True)
def _shown_reports(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Reports of tests that pass are printed, too."""
    yield
    printed = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{printed}", end="")


class TlsRabbit(RabbitServer):
    """A broker that also listens with TLS."""

    tls_port = 0
    certificate = Path()


@pytest.fixture(scope="module")
def own_rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRabbit]:
    """A broker of its own, to be killed."""
    if not is_installed():
        pytest.skip("RabbitMQ was NOT tested: install the Debian package rabbitmq-server")
    folder = tmp_path_factory.mktemp("killed")
    with port_mapper() as port:
        server = TlsRabbit(folder, port)
        server.certificate, key = make_self_signed(folder / "tls", (), 1)
        server.tls_port = server.serve_tls(server.certificate, key)
        server.time_out_consumers(CONSUMER_TIMEOUT_MS)
        server.start()
        yield server
        server.stop()


def test_amqps_checks_the_certificate_of_the_broker(own_rabbit: TlsRabbit, tmp_path: Path) -> None:
    def url(options: str) -> str:
        plain = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db", options, port=own_rabbit.tls_port)
        return plain.replace("amqp://", "amqps://")

    async def nothing(load: Load) -> None:
        assert not load.store.broker_trouble
        await load.until(lambda: load.store._started().is_receiving)
        load.heal()

    check(asyncio.run(under_load(url(f"cafile={own_rabbit.certificate}"), nothing)), "TLS")
    with Engine.open(url("")) as engine:  # the system does not know the certificate
        engine.blocking.submit(type=TYPE, org_id="acme", payload={})
        store = cast("RabbitStore", engine.store)
        until(lambda: "not reachable" in store.broker_trouble)
    with Engine.open(url("cafile=/nowhere")) as engine, pytest.raises(InvalidSetting, match="cannot be read"):
        engine.blocking.submit(type=TYPE, org_id="acme", payload={})


def wait_for_consumer_timeout(server: RabbitServer) -> None:
    """Hold a delivery until the broker closes the channel because of it."""
    connection = pika.BlockingConnection(pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{server.port}/"))
    channel = connection.channel()
    name = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_publish("", name, b"held")
    channel.basic_consume(name, lambda *_: None)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="delivery acknowledgement"):
        channel.start_consuming()
    connection.close()


def test_no_delivery_is_held_until_the_consumer_timeout(own_rabbit: RabbitServer, tmp_path: Path) -> None:
    """A busy worker gives back the deliveries that it cannot claim yet, before the broker acts."""

    async def run() -> None:
        url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
        with Engine(rabbit_store(url, RabbitLimits(held_s=0.5, held_look_s=0.2))) as engine:
            held, done = asyncio.Event(), 0

            @engine.handler(TYPE)
            async def handle(_message: Any, _context: Any) -> None:
                nonlocal done
                await held.wait()
                done += 1

            store = cast("RabbitStore", engine.store)
            handles = await engine.submit_many([{"type": TYPE, "org_id": "acme", "payload": {}}] * 10)
            worker = asyncio.create_task(engine.run(concurrency=1))
            await asyncio.to_thread(until, lambda: store.deliveries.count("org:acme", 2) > 0)
            for _ in range(2):  # the channel of the worker may be looked at after the first one
                await asyncio.to_thread(wait_for_consumer_timeout, own_rabbit)
            assert store._started()._epoch == 1, "the broker closed the channel of the worker"
            held.set()
            for each in handles:
                await each.result(timeout_s=HANG_GUARD_S)
            await engine.stop()
            await worker
            assert done == len(handles)

    asyncio.run(run())


@pytest.mark.statement("broker-restart")
def test_a_killed_broker_that_restarts_loses_nothing(own_rabbit: RabbitServer, tmp_path: Path) -> None:
    async def kill(load: Load) -> None:
        own_rabbit.kill()
        await load.work_on()
        await asyncio.to_thread(own_rabbit.start)
        load.heal()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load = asyncio.run(under_load(url, kill))
    check(load, "broker killed and restarted")


APP = """
from postroom import Backpressure, Engine, Policy

engine = Engine.open("memory://")


@engine.handler("tool_call")
async def call(message, ctx):
    return {"double": 2 * message.payload["n"]}
"""


def test_up_on_a_broker_degrades_without_it_and_recovers(
    own_rabbit: RabbitServer, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    Path("doubling.py").write_text(APP)
    url = own_rabbit.url(database)
    with running(
        tmp_path / "run", "--store", url, "--no-mail", "--no-audit", "--app", "doubling:engine"
    ) as up:
        assert up.token is not None

        def health() -> dict[str, Any]:
            return dict(up.get("/health", None)[1])

        with EngineClient(up.http, up.token) as remote:

            def double(n: int) -> int:
                one = remote.submit(type="tool_call", org_id="acme", payload={"n": n})
                return int(remote.result(one, HANG_GUARD_S)["double"])

            assert double(1) == 2
            assert health()["status"] == "ok"
            own_rabbit.kill()
            until(lambda: "broker" in health().get("parts", {}))
            assert "the broker is not reachable" in health()["parts"]["broker"]
            assert double(2) == 4  # by the database
            assert up.is_ready()
            own_rabbit.start()
            until(lambda: health()["status"] == "ok")
            assert double(3) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that pika forgets
def test_connections_that_are_reset_at_every_phase_lose_nothing(rabbit: RabbitServer, database: str) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def reset(load: Load) -> None:
            await reset_at_every_phase(proxy, load)
            load.heal()

        load = asyncio.run(under_load(rabbit.url(database, port=proxy.port), reset))
    gc.collect()
    check(load, "resets at every phase")


def test_a_black_hole_between_engine_and_broker_loses_nothing(rabbit: RabbitServer, database: str) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def hole(load: Load) -> None:
            proxy.is_hole = True
            await load.work_on(2 * MORE)
            await load.until(lambda: load.store.broker_trouble and not load.store._started().is_receiving)
            proxy.is_hole = False
            load.heal()

        load = asyncio.run(
            under_load(rabbit.url(database, port=proxy.port), hole, RabbitLimits(heartbeat_s=1))
        )
    check(load, "black hole")


@pytest.mark.parametrize(
    ("kind", "limit", "alarming", "usual"),
    [
        ("memory", "set_vm_memory_high_watermark", "0.000001", "0.4"),
        ("disk", "set_disk_free_limit", "1000000000000000", "50000000"),
    ],
)
def test_a_broker_with_an_alarm_delays_nothing_for_good(
    own_rabbit: RabbitServer, tmp_path: Path, kind: str, limit: str, alarming: str, usual: str
) -> None:
    async def alarm(load: Load) -> None:
        await asyncio.to_thread(own_rabbit.ctl, limit, alarming)
        await load.until(lambda: "alarm" in load.store.broker_trouble)
        await load.work_on()
        await asyncio.to_thread(own_rabbit.ctl, limit, usual)
        load.heal()

    url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db")
    load = asyncio.run(under_load(url, alarm))
    check(load, f"{kind} alarm")


@pytest.mark.statement("broker-acknowledgment")
def test_half_open_connections_to_the_broker_lose_nothing(rabbit: RabbitServer, database: str) -> None:
    with TcpProxy(rabbit.port) as proxy:

        async def freeze(load: Load) -> None:
            proxy.freeze_all()
            load.heal()  # new connections work from now on: the engine has to find the dead ones
            await load.until(lambda: load.store.broker_trouble)
            await load.until(lambda: not load.store.broker_trouble)

        load = asyncio.run(
            under_load(rabbit.url(database, port=proxy.port), freeze, RabbitLimits(heartbeat_s=1))
        )
    check(load, "half-open connections")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
def test_a_broker_that_is_away_from_the_beginning_is_used_when_it_comes(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    with TcpProxy(rabbit.port) as proxy:
        proxy.watch = lambda _chunk: "reset"

        async def come(load: Load) -> None:
            await load.work_on()
            proxy.watch = lambda _chunk: "pass"
            load.heal()

        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        load = asyncio.run(under_load(url, come, RabbitLimits(reconnect_s_max=0.2)))
    gc.collect()
    check(load, "broker away at first")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
def test_the_depth_is_known_while_the_broker_is_away(rabbit: RabbitServer, database: str) -> None:
    """The ledger has the depth: stage 4 goes on to refuse all but P0."""
    policy = Policy(backpressure=Backpressure(scale=1, light=2, heavy=3, emergency=4))
    with TcpProxy(rabbit.port) as proxy:
        proxy.watch = lambda _chunk: "reset"
        with Engine.open(rabbit.url(database, port=proxy.port), policy) as engine:
            for _ in range(5):
                engine.blocking.submit(type=TYPE, org_id="acme", payload={}, priority=0)
            until(lambda: cast("RabbitStore", engine.store).broker_trouble)
            for priority in (1, 2, 3):
                with pytest.raises(Overloaded, match="has 5 messages waiting"):
                    engine.blocking.submit(type=TYPE, org_id="acme", payload={}, priority=priority)
            engine.blocking.submit(type=TYPE, org_id="acme", payload={}, priority=0)
    gc.collect()


def test_closing_a_store_leaves_no_socket_open_when_the_broker_is_silent(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    with TcpProxy(rabbit.port) as proxy:
        url = rabbit.url(f"sqlite:///{tmp_path}/queue.db", port=proxy.port)
        with Engine(rabbit_store(url, RabbitLimits(close_timeout_s=0.4))) as engine:
            asyncio.run(engine.submit(type=TYPE, org_id="acme", payload={}))
            assert not engine.store.broker_trouble
            before = open_sockets()
            proxy.is_hole = True
        gc.collect()  # a socket that is collected unclosed is a warning, which fails the test
        assert open_sockets() < before


def open_sockets() -> int:
    """The sockets of this process."""
    return sum(
        str(link.readlink()).startswith("socket:")
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )


def test_p0_of_broker_only_may_be_lost_and_goes_on_after_a_restart(
    own_rabbit: RabbitServer, tmp_path: Path
) -> None:
    """The mode without the ledger: what a kill of the broker loses is printed, not asserted."""

    async def run() -> None:
        url = own_rabbit.url(f"sqlite:///{tmp_path}/queue.db", "p0=broker-only")
        with Engine.open(url) as engine:
            load = Load(engine)

            async def submit() -> None:
                with suppress(Unavailable):  # once the loss of the connection is seen
                    handle = await engine.submit(type=TYPE, org_id="acme", payload={}, priority=0)
                    load.accepted.append(handle.message_id)

            for number in range(600):
                await submit()
                if number == 300:
                    own_rabbit.kill()
            await asyncio.to_thread(own_rabbit.start)
            worker = asyncio.create_task(engine.run())
            sent, deadline = len(load.accepted), time.monotonic() + HANG_GUARD_S
            while not set(load.accepted[sent:]) & set(load.done) and time.monotonic() < deadline:
                await submit()
                await asyncio.sleep(LOOK_S)
            await engine.stop()
            await worker
            lost = set(load.accepted[:sent]) - set(load.done)
            print(f"p0=broker-only, broker killed: sent {sent}, lost {len(lost)}")
            assert set(load.accepted[sent:]) & set(load.done)

    asyncio.run(run())
