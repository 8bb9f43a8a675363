"""The buses of a server: one file each, below the data folder."""

import threading
from collections import OrderedDict
from pathlib import Path

from postroom.contracts.bus import Bus
from postroom.core.names import checked_name
from postroom.errors import InvalidMessage
from postroom.message import BusMessage, Durability
from postroom.runtime.bodies import BUS_ANSWER_BYTES_MAX, NewBusMessage

FOLDER = "buses"
SUFFIX = ".yaml"
OPEN_BUSES_MAX = 64  # those that were used last
BUSES_MAX = 1_000


class Buses:
    """Buses by name. Safe to share between threads."""

    def __init__(self, data: Path, durability: Durability) -> None:
        self._folder = data / FOLDER
        self._durability: Durability = durability
        self._open: OrderedDict[str, Bus] = OrderedDict()
        self._mutex = threading.Lock()

    def path(self, name: str) -> Path:
        """Where a bus lies."""
        return self._folder / f"{checked_name('bus', name)}{SUFFIX}"

    def append(self, name: str, new: NewBusMessage) -> str:
        """Append a message and give its id."""
        path = self.path(name)
        if not path.exists() and self._folder.exists():
            buses = sum(1 for file in self._folder.iterdir() if file.suffix == SUFFIX)
            if buses >= BUSES_MAX:
                raise InvalidMessage(f"there are {BUSES_MAX} buses already, and no more are made")
        return self._bus(name).append(
            type=new.type,
            project_id=new.project_id,
            task_id=new.task_id,
            run_id=new.run_id,
            parents=new.parents,
            attachment=new.attachment,
            body=new.body,
            ts=new.ts,
        )

    def read(self, name: str, since: str, limit: int) -> list[BusMessage]:
        """The messages after `since`: at most `limit`, and fewer when they are long."""
        messages: list[BusMessage] = []
        left = BUS_ANSWER_BYTES_MAX
        for message in self._bus(name).scan(since, archives=bool(since)):
            left -= len(message.body)
            if messages and left < 0:
                break
            messages.append(message)
            if len(messages) == limit:
                break
        return messages

    def _bus(self, name: str) -> Bus:
        path = self.path(name)
        with self._mutex:
            bus = self._open.pop(name, None) or Bus(path, durability=self._durability)
            self._open[name] = bus
            if len(self._open) > OPEN_BUSES_MAX:
                self._open.popitem(last=False)[1].close()
        return bus

    def close(self) -> None:
        """Close every file."""
        with self._mutex:
            for bus in self._open.values():
                bus.close()
            self._open.clear()
