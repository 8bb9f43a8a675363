"""Follow a bus while another thread writes to it and rotates it: each message comes exactly once."""

import tempfile
import threading
from pathlib import Path

from postroom import Bus

TICKS = 30


def write(path: Path) -> None:
    """Append enough messages for several rotations."""
    with Bus(path, rotate_bytes=1_500) as bus:
        for number in range(TICKS):
            bus.append(type="tick", project_id="clock", body=str(number))
        bus.append(type="end", project_id="clock")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "messagebus.yaml")
        writer = threading.Thread(target=write, args=(path,))
        writer.start()

        bus = Bus(path)
        ticks = []
        for message in bus.follow(archives=True):  # from the first message, even if it is archived
            if message.type == "end":
                break
            ticks.append(int(message.body))
        writer.join()

        assert ticks == list(range(TICKS))
        print(f"{len(ticks)} ticks in order, across {len(bus.archives())} archives")


if __name__ == "__main__":
    main()
