"""Messages that bring their workers down.

Rule 1: a lapsed lease is a crash, and it is counted apart from retries.
Rule 2: the first crash may be a neighbour's fault, so it is not held against the message. From then on the
        message runs alone in a process of its own, and each further crash is its own.
"""

from postroom.message import Record


def runs_alone(record: Record) -> bool:
    """Whether the message must run in a process of its own."""
    return record.crashes > 0


def own_crashes(record: Record) -> int:
    """Crashes that happened while the message ran alone."""
    return max(0, record.crashes - 1)


def is_poison(record: Record, crashes_max: int) -> bool:
    """Whether the message has crashed alone too often to be delivered again."""
    return own_crashes(record) >= crashes_max
