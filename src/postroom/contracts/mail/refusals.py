"""Events of refused calls: who was refused, and why.

Rule 1: an event holds little of what a client said.
Rule 2: a client that is refused again and again is told of a few times a second. The rest is one event with
        their number.
"""

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S

EVENT_TEXT_CHARS_MAX = 200  # of a client's name and of the sentence that it was told
REFUSALS_TOLD_MAX = 20  # of one client in a second


class _Second:
    """The refusals of one client since its first one that is not summed up."""

    __slots__ = ("began_ns", "detail", "told", "untold", "user")

    def __init__(self, began_ns: int, user: str) -> None:
        self.began_ns = began_ns
        self.user = user
        self.detail: dict[str, object] = {}  # of the last one that was told
        self.told = self.untold = 0


class Refusals:
    """What is told of them, and how many are not."""

    def __init__(self, shelves: Mailboxes) -> None:
        self._shelves = shelves
        self._seconds: dict[str, _Second] = {}  # by client, the earliest first

    def tell(self, link: Link, error: Mq9Error, kind: str, queue: str = "") -> None:
        second = self._seconds.get(link.client)
        if second is None:
            second = self._seconds[link.client] = _Second(self._shelves.now_ns(), link.user)
        if second.told >= REFUSALS_TOLD_MAX:
            second.untold += 1
            return
        second.told += 1
        second.detail = {"client": link.name[:EVENT_TEXT_CHARS_MAX], "address": link.address}
        self._shelves.tell(
            "rejected",
            queue=queue,
            type=kind,
            sender=link.user,
            error_type=str(error.code),
            error=str(error)[:EVENT_TEXT_CHARS_MAX],
            detail=second.detail,
        )

    def tick(self) -> None:
        """Sum up the seconds that are over."""
        until_ns = self._shelves.now_ns() - NANOS_PER_S
        while self._seconds:
            client, second = next(iter(self._seconds.items()))
            if second.began_ns > until_ns:
                return
            self._sum_up(client)

    def close(self) -> None:
        for client in list(self._seconds):
            self._sum_up(client)

    def _sum_up(self, client: str) -> None:
        second = self._seconds.pop(client)
        if second.untold:
            self._shelves.tell(
                "rejected",
                sender=second.user,
                error=f"{second.untold} more calls of this client were refused",
                detail={**second.detail, "refused": second.untold},
            )
