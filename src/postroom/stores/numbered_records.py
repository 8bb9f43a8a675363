"""Records of a database that finds a message with an id of its own by number."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from postroom.errors import UnreadableValue
from postroom.message import Record, Stored
from postroom.stores.base import Head, Kept, Records, stored_message
from postroom.stores.codec import Codec
from postroom.stores.own_ids import OwnIds


class _Ledger(Protocol):
    @property
    def known(self) -> OwnIds: ...

    @property
    def codec(self) -> Codec: ...


L = TypeVar("L", bound=_Ledger)


class NumberedRecords(Records, Generic[L]):
    """The reads that SQLite and PostgreSQL share."""

    _ledger: L

    @abstractmethod
    def kept(self, record: Record) -> Kept: ...

    @abstractmethod
    def sealed_payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Payloads by the numbers of their messages, as they are stored."""

    @abstractmethod
    def sealed_results(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Results by the numbers of their messages, as they are stored, without messages that have none."""

    @abstractmethod
    def numbered_heads(self, numbers: Sequence[int]) -> dict[int, Head]:
        """The heads of messages by their numbers."""

    def load(self, message_id: str) -> Stored | None:
        record = self.get(message_id)
        return None if record is None else stored_message(record, self.kept(record))

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._ledger.known.own_number(each))}
        opened = self._ledger.codec.open_payloads(self.sealed_payloads([*own]))
        found = {own[number]: payload for number, payload in opened.items()}
        return found | super().payloads([each for each in message_ids if each not in found])

    def results(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._ledger.known.own_number(each))}
        found = {}
        for number, result in self.sealed_results([*own]).items():
            with suppress(UnreadableValue):
                found[own[number]] = self._ledger.codec.open("result", number, result)
        return found | super().results([each for each in message_ids if each not in found])

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        numbers = [self._ledger.known.own_number(message_id) for message_id in message_ids]
        if not all(numbers):
            return super().heads(message_ids)
        found, wanted = self.numbered_heads(numbers), set(message_ids)
        heads = [found[number] for number in numbers if number in found]
        return [head for head in heads if head.record.message_id in wanted]
