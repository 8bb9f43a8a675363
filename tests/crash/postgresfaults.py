"""Long faults of PostgreSQL under load: kills, a black hole, half-open connections, resets, a promotion."""

import asyncio
import random
import time
from collections.abc import Callable

from tests import rabbitmqload
from tests.crash.ledger import Tally
from tests.pgbouncer import behind, program, running_bouncer
from tests.postgresload import Report, under_load
from tests.privatepostgres import running_postgres, running_standby
from tests.smalldisk import NotPermitted
from tests.tcpproxy import TcpProxy

KILLS = 5
HOLE_S = 30.0
RESETS_S = 20.0
RESET_SHARE = 0.02  # of the chunks that clients send
HEALED_WITHIN_S = 5.0

Tick = Callable[[int], None]


def _tally(report: Report, tick: Tick) -> Tally:
    tick(1)
    tally = Tally(acknowledged=len(report.accepted), lost=report.lost, doubled=report.duplicated)
    tally.facts = {
        "longest_pause_ms": round(1_000 * report.pause_s),
        "first_after_heal_ms": round(1_000 * report.first_after_heal_s),
        "unsure": report.unsure,
        "unavailable": report.failed,
    }
    if report.first_after_heal_s > HEALED_WITHIN_S:
        tally.breaks(f"the first message came {report.first_after_heal_s:.1f} s after the heal")
    return tally


def run_kills(_count: int, _seed: int, tick: Tick) -> Tally:
    """Kill the server again and again."""
    with running_postgres() as server:

        def kill(report: Report) -> None:
            for turn in range(KILLS):
                server.kill()
                server.start()
                if turn < KILLS - 1:
                    report.heal()
                    report.work_on()

        return _tally(under_load(server.new_store(), kill), tick)


def run_engine_kills(_count: int, _seed: int, tick: Tick) -> Tally:
    """The same under an engine, whose submits wait while the server is away."""
    with running_postgres() as server:

        async def kill(load: rabbitmqload.Load) -> None:
            for _ in range(KILLS):
                server.kill()
                await asyncio.to_thread(server.start)
                load.heal()
                await load.work_on()

        load = asyncio.run(rabbitmqload.under_load(server.new_store(), kill))
    tick(1)
    first = load.first_after_heal_s
    tally = Tally(acknowledged=len(load.accepted), lost=load.lost, doubled=load.doubled)
    tally.facts = {
        "longest_pause_ms": round(1_000 * load.pause_s),
        "first_after_heal_ms": -1 if first is None else round(1_000 * first),
        "unsure": load.unsure,
        "refused": load.refused,
    }
    if first is None or first > HEALED_WITHIN_S:
        tally.breaks(f"the first message came {first} s after the heal")
    return tally


def run_hole(_count: int, _seed: int, tick: Tick) -> Tally:
    """Swallow everything between clients and server, for longer than any call waits."""
    with running_postgres() as server, TcpProxy(server.port) as proxy:

        def hole(_report: Report) -> None:
            proxy.is_hole = True
            time.sleep(HOLE_S)
            proxy.is_hole = False

        return _tally(under_load(_through(proxy, server.new_store()), hole), tick)


def run_half_open(_count: int, _seed: int, tick: Tick) -> Tally:
    """Swallow everything on connections that exist. New ones work: clients have to give the old ones up."""
    with running_postgres() as server, TcpProxy(server.port) as proxy:
        report = under_load(_through(proxy, server.new_store()), lambda _report: proxy.freeze_all())
        return _tally(report, tick)


def run_half_open_pool(_count: int, _seed: int, tick: Tick) -> Tally:
    """The same on the connections to a PgBouncer."""
    if program() is None:
        raise NotPermitted("PgBouncer is not installed")
    with running_postgres() as server, running_bouncer(server, size=20) as port, TcpProxy(port) as proxy:
        report = under_load(behind(proxy.port, server.new_store()), lambda _report: proxy.freeze_all())
        return _tally(report, tick)


def run_resets(_count: int, seed: int, tick: Tick) -> Tally:
    """Reset connections before and after random chunks, in every phase of submit, claim and complete."""
    chance = random.Random(seed)

    def watch(_chunk: bytes) -> str:
        return chance.choice(("reset", "reset-after")) if chance.random() < RESET_SHARE else "pass"

    with running_postgres() as server, TcpProxy(server.port) as proxy:

        def reset(_report: Report) -> None:
            proxy.watch = watch
            time.sleep(RESETS_S)
            proxy.watch = lambda _chunk: "pass"

        return _tally(under_load(_through(proxy, server.new_store()), reset), tick)


def run_promotion(_count: int, _seed: int, tick: Tick) -> Tally:
    """Kill the primary and promote its standby."""
    with running_postgres() as server, running_standby(server) as (standby, url):

        def promote(report: Report) -> None:
            report.work_on(1_000)
            server.kill()
            standby.promote()

        return _tally(under_load(url, promote), tick)


def _through(proxy: TcpProxy, url: str) -> str:
    head, _, path = url.rpartition("/")
    return f"{head.rpartition(':')[0]}:{proxy.port}/{path}"
