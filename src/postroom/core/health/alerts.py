"""When a person is told of an alert, and when it is over.

Rule 1: events of level alert with one name, of one organization, are one alert. A person is told when it
        begins, at most every `REPEAT_S` while it goes on, and once when it is over.
Rule 2: an alert about a condition is over with the condition. Any other alert is over when it was not raised
        for `QUIET_S`.
Rule 3: a sink that has not accepted a notice is tried again until it has. A later notice of the same alert
        replaces it, so one alert owes each sink at most one notice.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.core.lifecycle.backpressure import ALERTS
from postroom.message import Alert

MICROS_PER_S: Final = 1_000_000
REPEAT_S: Final = 600.0
QUIET_S: Final = 3_600.0
KEPT_S: Final = 7 * 86_400.0
"""How long an alert that is over stays in the list."""
ALERTS_MAX: Final = 1_000  # of one store; further ones are events only
TEXT_CHARS_MAX: Final = 2_000
SEND_S_MAX: Final = 20.0  # a notice that is under way longer was lost with its server
RETRY_S: Final = 2.0
RETRY_S_MAX: Final = 600.0

POISON: Final = "Poison message"
PAUSED: Final = "Paused"
ENDS: Final[Mapping[str, str]] = {"Resumed": PAUSED}
"""Events of level alert that say that another alert is over."""


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether an alert is over."""

    now_us: int
    place: str
    """The server whose conditions these are."""
    conditions: Mapping[str, str] = {}
    """The conditions that hold, by the name of their alert."""
    stages: Mapping[str, int] = {}
    """The stages of backpressure of organizations; that of all of them has the empty name."""
    quarantined: Collection[str] = ()
    """Organizations with quarantined messages."""


def raised(known: Alert | None, name: str, org_id: str, text: str, now_us: int, place: str = "") -> Alert:
    """The alert after it was raised. It is told again when it was over, or was told long ago."""
    text = text[:TEXT_CHARS_MAX]
    if known is None:
        return Alert(
            name=name, org_id=org_id, place=place, text=text, first_us=now_us, last_us=now_us, told_us=now_us
        )
    if known.resolved_us:
        again = replace(known, text=text, first_us=now_us, last_us=now_us, count=1, resolved_us=0)
        return _telling(again, now_us)
    known = replace(known, text=text, last_us=now_us, count=known.count + 1)
    return _telling(known, now_us) if now_us - known.told_us >= REPEAT_S * MICROS_PER_S else known


def over(alert: Alert, now_us: int) -> Alert:
    """The alert after its end."""
    return alert if alert.resolved_us else _telling(replace(alert, resolved_us=now_us), now_us)


def _telling(alert: Alert, now_us: int) -> Alert:
    return replace(alert, notice=alert.notice + 1, told_us=now_us, tries=0, next_us=0, error="")


def is_over(alert: Alert, facts: AlertFacts) -> bool:
    """Whether an alert that is not over yet is over now."""
    if alert.place:
        return alert.place == facts.place and alert.name not in facts.conditions
    for stage, name in ALERTS.items():
        if alert.name == name:
            return facts.stages.get(alert.org_id, 0) < stage
    if alert.name == POISON:
        return alert.org_id not in facts.quarantined
    return alert.name != PAUSED and facts.now_us - alert.last_us >= QUIET_S * MICROS_PER_S


def is_forgotten(alert: Alert, now_us: int) -> bool:
    """Whether an alert that is over leaves the list."""
    return bool(alert.resolved_us) and now_us - alert.resolved_us >= KEPT_S * MICROS_PER_S


# ---- notices -----------------------------------------------------------------------------------------


def owed(alert: Alert, sinks: Collection[str], now_us: int) -> list[str]:
    """The sinks that the newest notice of an alert goes to now."""
    if now_us < alert.next_us:
        return []
    return [name for name in sinks if alert.sent.get(name, 0) < alert.notice]


def sending(alert: Alert, now_us: int) -> Alert:
    """The alert while its notice is sent: no other server sends it meanwhile."""
    return replace(alert, tries=alert.tries + 1, next_us=now_us + round(SEND_S_MAX * MICROS_PER_S))


def sent(alert: Alert, notice: int, accepted: Collection[str], error: str, now_us: int) -> Alert:
    """The alert after sinks accepted a notice of it. `error` says why another one did not."""
    told = {**alert.sent, **dict.fromkeys(accepted, notice)}
    if alert.notice != notice:  # there is a newer one, which is sent anyway
        return replace(alert, sent=told)
    pause_s = min(RETRY_S * 2.0 ** min(alert.tries - 1, 30), RETRY_S_MAX) if error else 0.0
    return replace(alert, sent=told, error=error, next_us=now_us + round(pause_s * MICROS_PER_S))
