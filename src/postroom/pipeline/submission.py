"""Submits replayed messages as tasks of a store, each once for a replay.

Rule 1: a message is submitted under the key (replay id, message id), which the store remembers. A replay that
        is killed and repeated, or runs twice, adds nothing twice.
Rule 2: the payload is submitted unchanged. A payload that is not JSON becomes a JSON string.
Rule 3: the priority is dropped. Tasks have none: a claim only looks at the default priority, and a task of
        another one would wait indefinitely.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import KEY_CHARS_MAX
from postroom.contracts.backlog import Backlog
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.core.names import checked_name, is_name
from postroom.errors import InvalidMessage
from postroom.message import Envelope
from postroom.stores.transaction import Accepted, Transaction
from postroom.system.handles import Closing

COMMIT_MESSAGES: Final = 200  # in one commit of the store
_MAX_RETRIES: Final = RetryPolicy().max_retries


class ReplayMessage(NamedTuple):
    """A message to submit again."""

    message_id: str
    queue: str
    payload: str
    type: str = ""
    parent_message_id: str = ""


class Submitter(Closing):
    """Submits messages to the store at `url`, in order."""

    def __init__(self, url: str, replay_id: str) -> None:
        self._tasks = Tasks.open(url)
        self._backlog = Backlog(self._tasks.store)
        self._replay_id = checked_name("replay id", replay_id)
        self.new = 0
        self.known = 0
        """Messages that this replay had submitted before."""

    def submit(self, messages: Iterable[ReplayMessage]) -> None:
        """Submit the messages, `COMMIT_MESSAGES` in each commit."""
        for chunk in chunks(messages, COMMIT_MESSAGES):
            envelopes = [*map(self._envelope, chunk)]
            self._backlog.hold_up()
            accepted = self._tasks.store.write(partial(_insert, envelopes))
            known = sum(each.duplicate for each in accepted)
            self.known += known
            self.new += len(accepted) - known

    def _envelope(self, message: ReplayMessage) -> Envelope:
        key = _key(self._replay_id, message.message_id)
        if key is None:
            raise InvalidMessage(
                f"{message.message_id!r} is not a message id: nothing can be remembered under it"
            )
        queue, payload = checked_name("queue", message.queue), message.payload.encode()
        try:
            msgspec.json.decode(payload)
        except msgspec.DecodeError:
            payload = msgspec.json.encode(message.payload)
        return Envelope(
            queue=queue,
            payload=payload,
            key=key,
            type=message.type,
            parent_message_id=message.parent_message_id,
            max_retries=_MAX_RETRIES,
        )

    def close(self) -> None:
        self._tasks.close()


def _insert(envelopes: list[Envelope], transaction: Transaction) -> list[Accepted]:
    """Insert messages, each in the durability class of its queue."""
    return transaction.insert(
        [replace(each, durability=transaction.limits(each.queue).durability or "os") for each in envelopes]
    )


def is_fit(replay_id: str, message_id: str, queue: str) -> bool:
    """Whether a task can have this key and this queue."""
    return _key(replay_id, message_id) is not None and is_name(queue)


def _key(replay_id: str, message_id: str) -> str | None:
    key = f"{replay_id}:{message_id}"
    return key if message_id and len(key) <= KEY_CHARS_MAX else None


def chunks(messages: Iterable[ReplayMessage], size: int) -> Iterator[list[ReplayMessage]]:
    """The messages in lists of at most `size`."""
    rest = iter(messages)
    while chunk := list(islice(rest, size)):
        yield chunk
