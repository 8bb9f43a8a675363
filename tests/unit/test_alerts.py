"""When an alert is told, repeated and over."""

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
from postroom.message import Alert
from postroom.server.telemetry.alerts import conditions_of
from postroom.stores.alerts import all_alerts, change, note
from postroom.stores.open import open_store
from postroom.stores.transaction import Transaction

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
