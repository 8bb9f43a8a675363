"""The three durability classes, and the error when a message cannot be stored."""

import fcntl
import tempfile
from pathlib import Path
from typing import get_args

from postroom import Bus, LockTimeout
from postroom.message import Durability


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "messagebus.yaml")

        for durability in get_args(Durability):  # os, group, fsync: fastest first, safest last
            with Bus(path, durability=durability) as bus:
                bus.append_many({"type": "entry", "project_id": "ledger", "body": str(n)} for n in range(3))
                print(f"{durability:>6}: stored, {bus.count()} messages")

        # Another holder keeps the lock: nothing is stored, and the caller gets an error.
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                Bus(path, lock_timeout_s=0.1).append(type="entry", project_id="ledger", body="late")
            except LockTimeout as error:
                print(" error:", str(error).replace(folder, "..."))
        print(" after:", Bus(path).count(), "messages, damage:", len(Bus(path).verify().damaged))


if __name__ == "__main__":
    main()
