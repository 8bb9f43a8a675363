"""Messages that crash their workers.

Rule 1: only the death of a message's own process, which ran nothing else, counts against the message. Such
        deaths are counted apart from retries.
Rule 2: the death of a worker counts against none of its messages, because any of them, or none, may be the
        cause. It marks them: the next attempt of each runs alone, in a process of its own. The message that
        crashed the worker then kills only this process. A lapsed lease marks its message, too: it may be
        all that others see of a dead worker.
Rule 3: the end of an attempt removes the mark. A message whose own process has died runs alone from then on.

`Record.crashes` holds both: 0 without a mark, 1 with it, and 1 more for each death of an own process.
"""

from postroom.message import Record

_MARKED = 1


def after_worker_death(crashes: int) -> int:
    """The worker died, or the lease lapsed."""
    return max(crashes, _MARKED)


def after_own_death(crashes: int) -> int:
    """The process that ran only this message died."""
    return max(crashes, _MARKED) + 1


def after_attempt(crashes: int) -> int:
    """An attempt ended, and the message will have another one."""
    return 0 if crashes == _MARKED else crashes


def runs_alone(record: Record) -> bool:
    """Whether the message must run in a process of its own."""
    return record.crashes > 0


def own_deaths(record: Record) -> int:
    """How often a process died that ran only this message."""
    return max(0, record.crashes - _MARKED)


def is_poison(record: Record, crashes_max: int) -> bool:
    """Whether processes of the message died too often for another delivery."""
    return own_deaths(record) >= crashes_max
