"""Tells people of alerts: looks for conditions of the server, ends alerts, and sends their notices.

Rule 1: a notice is claimed in the store before it is sent, and its outcome is stored after it. A process that
        dies in between leaves the notice to the next one, so a sink gets each notice at least once.
Rule 2: servers of one store share its alerts. Each looks after its own conditions.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from postroom.core.health import alerts
from postroom.core.health.alerts import POISON, AlertFacts
from postroom.core.health.diagnosis import Finding, diagnose
from postroom.engine.inspection import status_of
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.message import Alert, queue_of
from postroom.server.folder.diagnosis import facts_of_server
from postroom.server.telemetry.alert_sinks import SendNotice, notice_of
from postroom.stores.alerts import all_alerts, change
from postroom.stores.base import by_state
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

CHECK_EVERY_S: Final = 15.0
NOTICES_A_LOOK_MAX: Final = 100
CONDITIONS: Final[Mapping[str, str]] = {
    "disk": "Disk low",
    "tokens": "Token ends",
    "certificate": "Certificate ends",
    "server": "Part down",
    "shipper": "Mail events wait",
    "expectations": "Breach",
}
"""The alert of each check of a server, as `doctor` makes it."""


class Alerter:
    """Looks after the alerts of a store, for one server."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        data: Path,
        sinks: Mapping[str, SendNotice],
        *,
        place: str,
        certificate: Path | None = None,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        """`place` names the server in its conditions."""
        self._store = store
        self._policy = policy
        self._data = data
        self._sinks = sinks
        self._place = place
        self._certificate = certificate
        self._check_every_s = check_every_s
        self._checked_s = -check_every_s

    def look(self) -> None:
        """Check the conditions when they are due, and send what is owed."""
        if time.monotonic() >= self._checked_s + self._check_every_s:
            self._checked_s = time.monotonic()
            self.check(conditions_of(diagnose(facts_of_server(self._data, self._certificate))))
        for _ in range(NOTICES_A_LOOK_MAX):
            if not self._send_next():
                return

    def check(self, conditions: Mapping[str, str]) -> None:
        """Raise the alerts of conditions that hold, and end the alerts that are over."""
        known = self._store.read(lambda transaction: all_alerts(transaction.cells))
        open_ones = [one for one in known if not one.resolved_us]
        mine = {one.name for one in open_ones if one.place == self._place}
        new = {name: text for name, text in conditions.items() if name not in mine}
        facts = self._store.read(lambda transaction: self._facts(transaction, open_ones, conditions))
        done = [one for one in open_ones if alerts.is_over(one, facts)]
        gone = [one for one in known if alerts.is_forgotten(one, facts.now_us)]
        if not (new or done or gone):
            return

        def work(transaction: Transaction) -> None:
            for name, text in new.items():
                transaction.alert(name, text, place=self._place)
            for one in done:
                change(transaction.cells, one, lambda now: alerts.over(now, transaction.wall_us))
            for one in gone:
                change(transaction.cells, one, lambda _: None)

        self._store.control(work)

    def _facts(
        self, transaction: Transaction, open_ones: Collection[Alert], conditions: Mapping[str, str]
    ) -> AlertFacts:
        status = status_of(Operations(transaction, self._policy), self._policy, with_idle=False)
        poisoned = [one.org_id for one in open_ones if one.name == POISON]
        return AlertFacts(
            now_us=transaction.wall_us,
            place=self._place,
            conditions=conditions,
            stages={"": status.stage, **{name: one.stage for name, one in status.organizations.items()}},
            quarantined=[
                org_id
                for org_id in poisoned
                if by_state(transaction.lanes.depth(queue_of(org_id))).get("QUARANTINED")
            ],
        )

    # ---- sending -------------------------------------------------------------------------------

    def _send_next(self) -> bool:
        """SendNotice the next notice that is owed; returns whether there was one."""
        if not self._store.read(self._owed):
            return False
        claimed = self._store.control(self._claim)
        if claimed is None:  # another server was faster
            return False
        alert, names = claimed
        notice = notice_of(alert)
        failures = {name: self._sinks[name](notice) for name in names}
        accepted = [name for name in names if not failures[name]]
        error = "; ".join(filter(None, failures.values()))

        def work(transaction: Transaction) -> None:
            now_us = transaction.wall_us
            change(
                transaction.cells, alert, lambda now: alerts.sent(now, alert.notice, accepted, error, now_us)
            )
            status = "resolved" if alert.resolved_us else "firing"
            for name in accepted:
                detail = {"alert": alert.name, "status": status, "sink": name, "tries": alert.tries}
                transaction.emit("alert_sent", queue_of(alert.org_id), detail=detail)

        self._store.control(work)
        return True

    def _owed(self, transaction: Transaction) -> tuple[Alert, list[str]] | None:
        """The first alert of which a notice is owed now, and the sinks that it goes to."""
        for one in all_alerts(transaction.cells):
            names = alerts.owed(one, self._sinks, transaction.wall_us)
            if names:
                return one, names
        return None

    def _claim(self, transaction: Transaction) -> tuple[Alert, list[str]] | None:
        owed = self._owed(transaction)
        if owed is None:
            return None
        alert, names = owed
        claimed = change(transaction.cells, alert, lambda now: alerts.sending(now, transaction.wall_us))
        return None if claimed is None else (claimed, names)


def conditions_of(findings: Collection[Finding]) -> dict[str, str]:
    """The conditions that findings show, by the name of their alert."""
    found: dict[str, str] = {}
    for one in findings:
        name = CONDITIONS.get(one.check)
        if name is not None and one.level != "ok":
            found[name] = f"{found[name]}; {one.what}" if name in found else one.what
    return found
