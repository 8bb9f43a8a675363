"""The alerts of a store: one cell each, written in the transaction that emits the event.

Rule 1: an alert is in the store before anybody is told of it, so the end of a process loses none.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from postroom.core.health import alerts
from postroom.message import Alert
from postroom.stores.base import Cells

ALERT: Final = "alert"
_SEPARATOR: Final = "\x1f"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Alert).decode


def all_alerts(cells: Cells) -> list[Alert]:
    """The alerts of a store, those that are over included."""
    return [_decode(value) for _, value in cells.page(ALERT, limit=alerts.ALERTS_MAX)]


def change(cells: Cells, alert: Alert, decide: Callable[[Alert], Alert | None]) -> Alert | None:
    """Decide about an alert as it is now, and store the decision; None removes it."""
    key = _key(alert.name, alert.org_id, alert.place)
    value = cells.get(ALERT, key)
    if value is None:
        return None
    before = _decode(value)
    after = decide(before)
    if after != before:
        cells.put(ALERT, key, None if after is None else _encode(after))
    return after


def note(cells: Cells, name: str, org_id: str, text: str, now_us: int, place: str = "") -> None:
    """An event of level alert is emitted: raise its alert, or end the one that it says is over."""
    ended = alerts.ENDS.get(name)
    key = _key(ended or name, org_id, place)
    value = cells.get(ALERT, key)
    known = None if value is None else _decode(value)
    if ended is not None:
        after = None if known is None else alerts.over(known, now_us)
    elif known is None and not _has_room(cells):
        after = None
    else:
        after = alerts.raised(known, name, org_id, text, now_us, place)
    if after is not None:
        cells.put(ALERT, key, _encode(after))


def _has_room(cells: Cells) -> bool:
    """Whether a further alert fits. The one that has been over for the longest time makes room for it."""
    found = all_alerts(cells)
    if len(found) < alerts.ALERTS_MAX:
        return True
    over = [alert for alert in found if alert.resolved_us]
    if over:
        oldest = min(over, key=lambda alert: alert.resolved_us)
        cells.put(ALERT, _key(oldest.name, oldest.org_id, oldest.place), None)
    return bool(over)


def _key(name: str, org_id: str, place: str) -> str:
    return _SEPARATOR.join((name, org_id, place))
