"""Processes that work on one bus at the same time, for `test_bus_processes`.

Run as a program in an interpreter of its own, which then forks: `python -m tests.integration.busworkers
SCENARIO BUS FOLDER`. Every worker writes what was acknowledged to it into a file of its own in FOLDER.
"""

import fcntl
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from postroom import Bus

ROUNDS = 100
BATCH_MAX = 8
BODIES = ["", "x" * 50, "---\n", "two\nlines\n\n", "msg_id: MSG-1\n", "é\r\n", "y" * 5000]
END = "end"


def start_together(workers: list[Callable[[], None]]) -> None:
    """Fork a process for each worker, start all at the same moment, and wait for all."""
    waiting, go = os.pipe()
    children = []
    for worker in workers:
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(waiting, 1)  # returns when the other end is closed everywhere
            code = 1
            try:
                worker()
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    os.close(waiting)
    os.close(go)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(f"workers ended with {codes}")


def write(bus: Bus, ledger: Path, seed: int) -> None:
    """Append single messages and batches, and record each id as soon as it is acknowledged."""
    chance = random.Random(seed)
    with ledger.open("w") as file:
        for number in range(ROUNDS):
            size = chance.randrange(1, BATCH_MAX)
            sent = [f"{seed} {number}.{item} {chance.choice(BODIES)}" for item in range(size)]
            if size == 1:
                made = [bus.append(type="t", project_id="p", body=sent[0])]
            else:
                made = bus.append_many({"type": "t", "project_id": "p", "body": body} for body in sent)
            file.writelines(json.dumps(pair) + "\n" for pair in zip(made, sent, strict=True))


def write_as_the_original(path: Path, ledger: Path, seed: int) -> None:
    """Open, lock, a newline, the record, close: two writes, without a check whether the file was rotated."""
    with ledger.open("w") as file:
        for number in range(ROUNDS):
            msg_id, body = f"MSG-original-{seed}-{number:04d}", f"{seed} {number}\nof the original"
            header = f"msg_id: {msg_id}\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n"
            with path.open("ab", buffering=0) as log:
                fcntl.flock(log, fcntl.LOCK_EX)
                if os.fstat(log.fileno()).st_size:
                    log.write(b"\n")
                log.write(f"---\n{header}---\n{body}\n".encode())
            file.write(json.dumps([msg_id, body]) + "\n")


def follow(bus: Bus, ledger: Path) -> None:
    """Read messages until the one that is marked as the last."""
    with ledger.open("w") as file:
        for message in bus.follow():
            if message.body == END:
                return
            file.write(json.dumps([message.msg_id, message.body]) + "\n")


def of_own(path: Path, ledger: Path, seed: int, rotate_bytes: int | None = None) -> Callable[[], None]:
    """A worker that opens the bus itself."""
    return lambda: write(Bus(path, lock_timeout_s=60, rotate_bytes=rotate_bytes), ledger, seed)


def hammer(path: Path, folder: Path) -> None:
    start_together([of_own(path, folder / f"{seed}", seed) for seed in range(10)])


def inherited(path: Path, folder: Path) -> None:
    """One open bus, in use before the fork, shared by all children and by the parent afterwards."""
    bus = Bus(path, lock_timeout_s=60)
    write(bus, folder / "parent-before", 100)

    def child(seed: int) -> Callable[[], None]:
        return lambda: write(bus, folder / f"{seed}", seed)

    start_together([child(seed) for seed in range(8)])
    write(bus, folder / "parent-after", 101)


def inherited_group(path: Path, folder: Path) -> None:
    """The same with group commit, whose threads and tickets do not cross the fork."""
    bus = Bus(path, lock_timeout_s=60, durability="group")
    bus.append(type="t", project_id="p", body="before")
    (folder / "parent").write_text(json.dumps([bus.tail(1)[0].msg_id, "before"]) + "\n")
    start_together([lambda seed=seed: write(bus, folder / f"{seed}", seed) for seed in range(3)])  # type: ignore[misc]


def rotating(path: Path, folder: Path) -> None:
    start_together([of_own(path, folder / f"{seed}", seed, rotate_bytes=20_000) for seed in range(4)])


def with_the_original(path: Path, folder: Path) -> None:
    def original(seed: int) -> Callable[[], None]:
        return lambda: write_as_the_original(path, folder / f"original-{seed}", seed)

    start_together(
        [
            *[of_own(path, folder / f"{seed}", seed) for seed in range(3)],
            *[original(seed) for seed in range(3)],
        ]
    )


def followed(path: Path, folder: Path) -> None:
    """Followers in their own processes, started before the bus exists, until two writers are done."""
    begin = Bus(path).append(type="t", project_id="p", body="begin")
    (folder / "begin").write_text(json.dumps([begin, "begin"]) + "\n")

    def write_and_end() -> None:
        start_together([of_own(path, folder / f"{seed}", seed, rotate_bytes=3_000) for seed in range(2)])
        Bus(path).append(type="t", project_id="p", body=END)

    start_together(
        [
            lambda: follow(Bus(path, poll_interval_s=0.05), folder / "seen-1"),
            lambda: follow(Bus(path, poll_interval_s=0.05), folder / "seen-2"),
            write_and_end,
        ]
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
