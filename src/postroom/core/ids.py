"""Message ids of the bus: sortable as text, readable by a person.

    MSG-20260205-143052-000123456-PID12345-0042
        date     time   nanoseconds pid   sequence

Rule: ids are made while the file's lock is held and are larger than the last one in the file,
also when the clock stepped back or the sequence wrapped.
"""

import re
from datetime import UTC, datetime, timedelta

from postroom.core.times import NANOS_PER_S, second_texts

SEQUENCE_MODULUS = 10_000
PID_MODULUS = 100_000

_BUS_ID = re.compile(r"MSG-(\d{8}-\d{6})-(\d{9})-PID(\d{5})-(\d{4})", re.ASCII)


def origin(pid: int) -> str:
    """The part of an id that names the process."""
    return f"PID{pid % PID_MODULUS:05d}-"


def bus_id(epoch_ns: int, process: str, sequence: int, last: str) -> tuple[str, str]:
    """The next id after `last`, and its timestamp: at `epoch_ns` if that is later, else just after `last`.

    On the path of every append. A leading 1 that is cut off keeps the zeros, faster than a format does.
    """
    in_id, in_ts = second_texts(epoch_ns // NANOS_PER_S)
    nanos = str(NANOS_PER_S + epoch_ns % NANOS_PER_S)[1:]
    tail = process + str(SEQUENCE_MODULUS + sequence % SEQUENCE_MODULUS)[1:]
    msg_id = f"MSG-{in_id}-{nanos}-{tail}"
    return msg_id if msg_id > last else _after(last, tail, msg_id), f"{in_ts}.{nanos[:6]}Z"


def _after(last: str, tail: str, candidate: str) -> str:
    """The clock has not moved past `last`: keep its instant, or go one nanosecond on."""
    match = _BUS_ID.fullmatch(last)
    if match is None:
        return candidate  # a foreign id, which has no place in our order
    same_instant = f"MSG-{match[1]}-{match[2]}-{tail}"
    if same_instant > last:
        return same_instant
    nanos = int(match[2]) + 1
    if nanos < NANOS_PER_S:
        return f"MSG-{match[1]}-{nanos:09d}-{tail}"
    try:
        second = datetime.strptime(match[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) + timedelta(seconds=1)
    except (ValueError, OverflowError):
        return candidate
    return f"MSG-{second:%Y%m%d-%H%M%S}-{0:09d}-{tail}"
