"""When an alert is told, repeated and over."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from postroom import Engine
from postroom.core.health import alerts
from postroom.core.health.alerts import MICROS_PER_S, POISON, REPEAT_S, AlertFacts
from postroom.core.health.diagnosis import diagnose
from postroom.core.health.facts import (
    CertificateFacts,
    ClockFacts,
    EnvironmentFacts,
    Facts,
    FolderFacts,
)
from postroom.core.lifecycle.backpressure import CRITICAL, EMERGENCY, EMERGENCY_STAGE, HEAVY
from postroom.engine.rules.policy import Policy
from postroom.logs import eventfiles
from postroom.message import Alert
from postroom.pipeline.delta.storage import as_storage
from postroom.pipeline.query.expectations import keep_breach
from postroom.server.folder.diagnosis import facts_of_server
from postroom.server.folder.layout import MAIL_FOLDER
from postroom.server.telemetry.alerts import Alerter, conditions_of
from postroom.stores.alerts import all_alerts, change, note
from postroom.stores.memory import MemoryStore
from postroom.stores.open import open_store
from postroom.stores.transaction import Transaction
from postroom.system.manual_clock import ManualClock
from postroom.testing.faults import Crashed, Fault, FaultyStore

NOW = 1_700_000_000 * MICROS_PER_S
DAY_US = 86_400 * MICROS_PER_S
FACTS = AlertFacts(now_us=NOW, place="here")


def new(name: str = POISON, org_id: str = "acme", place: str = "") -> Alert:
    return alerts.raised(None, name, org_id, "m1", NOW, place)


def test_repeated_alert_is_told_once_until_the_pause_is_over() -> None:
    first = new()
    soon = alerts.raised(first, POISON, "acme", "m2", NOW + 1)
    assert (soon.notice, soon.count, soon.text) == (1, 2, "m2")
    late = alerts.raised(soon, POISON, "acme", "m3", NOW + round(REPEAT_S * MICROS_PER_S))
    assert (late.notice, late.count) == (2, 3)


def test_end_is_told_once_and_a_new_beginning_again() -> None:
    ended = alerts.over(new(), NOW + 5)
    assert (ended.notice, ended.resolved_us) == (2, NOW + 5)
    assert alerts.over(ended, NOW + 6) == ended
    again = alerts.raised(ended, POISON, "acme", "m2", NOW + 7)
    assert (again.notice, again.first_us, again.resolved_us, again.count) == (3, NOW + 7, 0, 1)


@pytest.mark.statement("stage-alert")
def test_stage_alerts_end_below_their_stage() -> None:
    for name, stage in ((CRITICAL, HEAVY), (EMERGENCY, EMERGENCY_STAGE)):
        for found, is_over in ((stage, False), (stage - 1, True)):
            facts = replace(FACTS, stages={"acme": found, "zen": EMERGENCY_STAGE})
            assert alerts.is_over(new(name), facts) is is_over


@pytest.mark.statement("poison-alert")
def test_poison_ends_when_nothing_is_quarantined_and_a_pause_when_it_is_resumed() -> None:
    assert not alerts.is_over(new(), replace(FACTS, quarantined=["acme"]))
    assert alerts.is_over(new(), replace(FACTS, quarantined=["zen"]))
    long_after = replace(FACTS, now_us=NOW + DAY_US)
    assert not alerts.is_over(new(alerts.PAUSED), long_after)
    assert alerts.is_over(new("CompensationFailed"), long_after)
    assert not alerts.is_over(new("CompensationFailed"), FACTS)


def test_condition_ends_only_where_it_was_found() -> None:
    alert = new("Disk low", "", "here")
    assert not alerts.is_over(alert, replace(FACTS, conditions={"Disk low": "1 GiB"}))
    assert alerts.is_over(alert, FACTS)
    assert not alerts.is_over(alert, replace(FACTS, place="there"))


def test_notice_is_owed_to_each_sink_until_it_is_accepted() -> None:
    sinks = ("webhook", "command")
    alert = new()
    assert alerts.owed(alert, sinks, NOW) == ["webhook", "command"]
    claimed = alerts.sending(alert, NOW)
    assert alerts.owed(claimed, sinks, NOW + 1) == []
    lost_us = NOW + round(alerts.SEND_S_MAX * MICROS_PER_S)
    assert alerts.owed(claimed, sinks, lost_us) == ["webhook", "command"]  # its server was killed
    half = alerts.sent(claimed, 1, ["command"], "webhook is down", NOW)
    assert alerts.owed(half, sinks, NOW + 1) == []
    assert alerts.owed(half, sinks, NOW + DAY_US) == ["webhook"]
    done = alerts.sent(half, 1, ["webhook"], "", NOW)
    assert alerts.owed(done, sinks, NOW + DAY_US) == []
    assert alerts.owed(alerts.over(done, NOW), sinks, NOW) == ["webhook", "command"]


def test_outcome_of_an_older_notice_leaves_the_newer_one_owed() -> None:
    claimed = alerts.sending(new(), NOW)
    newer = alerts.over(claimed, NOW + 1)
    assert alerts.owed(alerts.sent(newer, claimed.notice, ["webhook"], "", NOW), ["webhook"], NOW + 1)


def test_pauses_between_tries_grow_to_a_limit() -> None:
    alert, pauses = new(), []
    for _ in range(20):
        alert = alerts.sent(alerts.sending(alert, NOW), 1, [], "down", NOW)
        pauses.append((alert.next_us - NOW) / MICROS_PER_S)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (alerts.RETRY_S, alerts.RETRY_S_MAX)


def test_conditions_of_a_server_are_disk_and_certificate() -> None:
    gib = 1 << 30
    folder = FolderFacts("d", 0o700, True, False, (), gib // 2, 100 * gib, 0, "ext4")
    facts = Facts(
        data="d",
        environment=EnvironmentFacts("1", "3.11", "3.53", "", 4096),
        clock=ClockFacts(NOW, 0),
        folder=folder,
        certificate=CertificateFacts("cert.pem", NOW + 3 * DAY_US),
    )
    found = conditions_of(diagnose(facts))
    assert found.keys() == {"Disk low", "Certificate ends"}
    assert found["Certificate ends"] == "the certificate cert.pem ends in 3 days"
    ended = replace(facts, folder=None, certificate=CertificateFacts("cert.pem", NOW - 1))
    assert conditions_of(diagnose(ended)) == {"Certificate ends": "the certificate cert.pem has ended"}
    assert conditions_of(diagnose(replace(ended, certificate=None))) == {}


def test_pause_goes_on_until_the_last_one_of_its_organization_is_resumed() -> None:
    with Engine.open("memory://") as engine:
        blocking = engine.blocking
        for type_name in ("model_call", "tool_call"):
            blocking.pause(org_id="acme", type=type_name)
        over = []
        for type_name in ("tool_call", "model_call"):
            blocking.resume(org_id="acme", type=type_name)
            [paused] = blocking.alerts()
            over.append(bool(paused.resolved_us))
    assert over == [False, True]


def test_alert_that_is_over_makes_room_for_a_new_one() -> None:
    store, names = open_store("memory://"), {f"org-{number}" for number in range(alerts.ALERTS_MAX)}

    def add(*organizations: str) -> set[str]:
        """Raise an alert of each organization; the organizations that have one then."""

        def work(transaction: Transaction) -> set[str]:
            for org_id in organizations:
                note(transaction.cells, POISON, org_id, "m1", NOW)
            return {alert.org_id for alert in all_alerts(transaction.cells)}

        return store.write(work)

    assert add(*names, "acme") == names
    over = new(org_id="org-7")
    store.write(lambda one: change(one.cells, over, lambda now: alerts.over(now, NOW + 5)))
    assert add("acme") == names - {"org-7"} | {"acme"}
    store.close()


def test_breaches_and_waiting_events_of_mail_are_conditions_of_a_server(tmp_path: Path) -> None:
    def mine() -> set[str]:
        return conditions_of(diagnose(facts_of_server(tmp_path, None))).keys() & {
            "Breach",
            "Mail events wait",
        }

    assert mine() == set()
    event = {"eventTime": "2026-01-01T00:00:00Z", "run": {"runId": "r"}}
    kept = tmp_path / "tables" / keep_breach(as_storage(tmp_path / "tables"), event)
    assert mine() == {"Breach"}
    os.utime(kept, (0, 0))
    assert mine() == set()
    (tmp_path / MAIL_FOLDER).mkdir()
    for _ in range(2):
        (tmp_path / MAIL_FOLDER / eventfiles.GROWING).write_bytes(b"{}\n")
        eventfiles.end_growing(tmp_path / MAIL_FOLDER)
    assert mine() == {"Mail events wait"}


# ---- seeded worlds -----------------------------------------------------------------------------------

FAULTS: tuple[Fault, ...] = ("none", "none", "none", "crash", "lost_answer", "duplicate")
SEEDS = 100


class Died(BaseException):
    """The process of a server ends between a notice and its outcome."""


class AlertWorld:
    """Alerts that begin and end while servers die, sinks refuse, and writes are lost."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = ManualClock()
        self.store = FaultyStore(MemoryStore(clock=self.clock), self._faults())
        self.told: dict[str, list[dict[str, str]]] = {"webhook": [], "command": []}
        self.is_calm = False

    def _faults(self) -> Iterator[Fault]:
        while not self.is_calm:
            yield self.chance.choice(FAULTS)

    def send(self, name: str, notice: bytes) -> str:
        fate = (
            "accepts"
            if self.is_calm
            else self.chance.choice(("accepts", "refuses", "dies before", "dies after"))
        )
        if fate in ("accepts", "dies after"):
            self.told[name].append(json.loads(notice))
        if fate.startswith("dies"):
            raise Died
        return "" if fate == "accepts" else "down"

    def alert(self, name: str) -> None:
        with suppress(Crashed):
            self.store.write(lambda transaction: transaction.alert(name, "text", "org:acme"))

    def serve(self) -> None:
        """A server that sends what is owed, and perhaps dies meanwhile."""
        sinks = {name: lambda notice, name=name: self.send(name, notice) for name in self.told}
        server = Alerter(self.store, Policy(), Path(), sinks, place="here", check_every_s=float("inf"))
        with suppress(Died, Crashed):
            server.look()

    def run(self) -> None:
        for _ in range(30):
            self.chance.choice((lambda: self.alert("Paused"), lambda: self.alert("Resumed"), self.serve))()
            self.clock.advance(self.chance.choice((0.1, 3.0, 30.0)))
        self.is_calm = True
        for _ in range(4):
            self.clock.advance(2 * alerts.RETRY_S_MAX)
            self.serve()
            self.alert("Resumed")


def test_newest_state_of_an_alert_reaches_each_sink_under_crashes() -> None:
    actions: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = AlertWorld(seed)
        world.run()
        known = world.store.read(lambda transaction: all_alerts(transaction.cells))
        for name, told in world.told.items():
            for one in known:
                newest = max((int(notice["id"].rpartition("/")[2]) for notice in told), default=0)
                assert (newest, one.sent[name], bool(one.resolved_us)) == (one.notice, one.notice, True), seed
                assert told[-1]["status"] == "resolved", seed
            ends = {notice["id"] for notice in told if notice["status"] == "resolved"}
            begun = [identity.rsplit("/", 2)[1] for identity in ends]
            assert len(begun) == len(set(begun)), (
                seed
            )  # one end of each beginning; a repeated notice has the same id
            actions.update(notice["status"] for notice in told)
    assert min(actions.values()) > SEEDS // 2
