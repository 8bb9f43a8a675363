"""One source of a generated history: pending events, and the lines that they become.

Rule 1: events are numbered in the order of time, without a gap. A lease's token is the number of its event.
Rule 2: a line is concatenated from JSON fragments. It equals the output of `to_line`.
"""

from bisect import bisect_left
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from postroom.audit.index import LineKeys


class Names(NamedTuple):
    """The ids by which a line is found."""

    message_id: str
    parent_message_id: str = ""
    trace_id: str = ""


NOBODY: Final = Names("")
Lease: TypeAlias = list[int]
"""The token, in a list of one that is filled when the lease begins."""
Waiting: TypeAlias = tuple[int, str, str, Names, Lease | None, bool]
"""The time; fields from `kind` up to the lease; fields after it; the ids; the lease; whether it begins."""

_when: Final = itemgetter(0)


class LineBatch(NamedTuple):
    """Lines and their index entries, which are written together."""

    lines: list[bytes]
    marks: list[LineKeys]


class GeneratedSource:
    """A source. `put` adds an event at its time, `until` returns the lines up to a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.newest_us = 0
        self.hole_wanted = False
        """Whether the next lines begin after a missing number."""
        self.holes: list[int] = []
        self._waiting: list[Waiting] = []
        self.put = self._waiting.append

    def until(self, now_us: int) -> LineBatch:
        """The lines of all events before a time."""
        waiting = self._waiting
        waiting.sort(key=_when)  # the sort is stable
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
        for ts_us, fields, rest, (message_id, parent, trace), lease, opens in due:
            seq += 1
            if lease is None:
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{fields}{rest}\n'
            else:
                if opens:
                    lease[0] = seq
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{fields},"lease":{lease[0]}{rest}\n'
            lines.append(line)
            marks.append(LineKeys(name, seq, ts_us, message_id, parent, trace))
        self.seq = seq
        if due:
            self.newest_us = due[-1][0]
        return LineBatch([*map(str.encode, lines)], marks)
