"""One source of a generated history: events that wait for their time, and the lines that they become.

Rule 1: numbers are given in the order of time, without a gap, and a lease's token is the number of its event.
Rule 2: a line is put together from pieces that are JSON already. It is what `to_line` would write.
"""

from bisect import bisect_left
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

import msgspec


class LineKeys(msgspec.Struct, frozen=True, gc=False):
    """What a sink wants to know of a line."""

    source: str
    seq: int
    ts_us: int
    message_id: str = ""
    parent_message_id: str = ""
    trace_id: str = ""


class Names(NamedTuple):
    """What a line can be found by."""

    message_id: str
    parent_message_id: str = ""
    trace_id: str = ""


NOBODY: Final = Names("")
Lease: TypeAlias = list[int]
"""The token, once it is known."""
Waiting: TypeAlias = tuple[int, str, str, Names, Lease | None, bool]
"""When; the fields from `kind` up to the lease; what stands behind it; whose; which lease; if it begins."""

_when: Final = itemgetter(0)


class LineBatch(NamedTuple):
    """Lines that are written together."""

    lines: list[bytes]
    marks: list[LineKeys]


class GeneratedSource:
    """A source. `put` takes an event for its time, `until` gives the lines that are due."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.newest_us = 0
        self.hole_wanted = False
        """The next lines begin behind a number that is missing."""
        self.holes: list[int] = []
        self._waiting: list[Waiting] = []
        self.put = self._waiting.append

    def until(self, now_us: int) -> LineBatch:
        """The lines of everything before a time."""
        waiting = self._waiting
        waiting.sort(key=_when)  # what was put first stays first
        n = bisect_left(waiting, now_us, key=_when)
        due = waiting[:n]
        del waiting[:n]
        if due and self.hole_wanted and self.seq:
            self.hole_wanted = False
            self.seq += 1
            self.holes.append(self.seq)
        return self._written(due)

    def _written(self, due: list[Waiting]) -> LineBatch:
        lines: list[str] = []
        marks: list[LineKeys] = []
        name, seq = self.name, self.seq
        head = f'{{"event_id":"{name}#'
        for ts_us, told, rest, (message_id, parent, trace), lease, opens in due:
            seq += 1
            if lease is None:
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{told}{rest}\n'
            else:
                if opens:
                    lease[0] = seq
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{told},"lease":{lease[0]}{rest}\n'
            lines.append(line)
            marks.append(LineKeys(name, seq, ts_us, message_id, parent, trace))
        self.seq = seq
        if due:
            self.newest_us = due[-1][0]
        return LineBatch([*map(str.encode, lines)], marks)
