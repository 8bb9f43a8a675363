"""The programs that get killed: writers and consumers that report after each call has returned.

The harness forks them. By hand, with the reports on standard output:

    python -m tests.crash.child bus_writer '{"path": "/tmp/x/bus.yaml", "name": "w", "seed": 1}'
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from postroom import TOPICS, Bus, Queue
from postroom.message import Durability, QueueMessage
from tests.crash.ledger import body_of, token_of
from tests.crash.workers import Report, reporter

REPORT_BYTES_MAX = 4096  # bytes that a pipe accepts in one piece
GONE = "gone"  # the writer name of messages that are expired when they are sent


def bus_writer(
    report: Report,
    *,
    path: str,
    name: str,
    seed: int,
    sizes: tuple[int, int] = (0, 400),
    batch: int = 1,
    rotate_bytes: int | None = None,
    rotate_chance: float = 0.0,
    durability: Durability = "os",
    threads: int = 1,
    early: bool = False,
) -> None:
    """Append forever. `early` is a sabotage that the checker must detect: it reports before it writes."""
    bus = Bus(path, rotate_bytes=rotate_bytes, durability=durability)

    def write(thread: int) -> None:
        rng = Random(seed * 1000 + thread)
        number = 0
        while True:
            count = rng.randint(1, batch)
            tokens = [token_of(f"{name}-{thread}", number + i, _size(rng, sizes)) for i in range(count)]
            number += count
            if early:
                report(lines=[f"{token} early" for token in tokens])
                time.sleep(0.01)
            msg_ids = _append(bus, tokens)
            if not early:
                report(
                    lines=[f"{token} {msg_id}" for token, msg_id in zip(tokens, msg_ids, strict=True)],
                )
            if rng.random() < rotate_chance:
                bus.rotate()

    _in_threads(write, threads)


def _append(bus: Bus, tokens: list[str]) -> list[str]:
    messages = [
        {"type": "crash", "project_id": "p", "task_id": token, "body": body_of(token)} for token in tokens
    ]
    if len(messages) > 1:
        return bus.append_many(messages)
    return [bus.append(type="crash", project_id="p", task_id=tokens[0], body=body_of(tokens[0]))]


def bus_follower(report: Report, *, path: str) -> None:
    """Report every message, from the oldest archive on, as it arrives."""
    for message in Bus(path, poll_interval_s=0.02).follow(archives=True):
        report(message.task_id, message.msg_id)


def queue_sender(
    report: Report,
    *,
    root: str,
    name: str,
    seed: int,
    sizes: tuple[int, int] = (0, 300),
    body_threshold: int = 3584,
    gone_chance: float = 0.0,
    pause_s: float = 0.0,
    durability: Durability = "os",
    threads: int = 1,
    early: bool = False,
) -> None:
    """Send to all agents forever; `gone_chance` is the share of messages that are expired at once."""
    queue = Queue(root, body_threshold, durability=durability)
    topics = sorted(TOPICS)

    def send(thread: int) -> None:
        rng = Random(seed * 1000 + thread)
        number = 0
        while True:
            if rng.random() < gone_chance:
                token = token_of(f"{GONE}-{name}", 0, _size(rng, sizes))
                queue.send(rng.choice(topics), f"{token}\n{body_of(token)}", ttl_s=0)
                continue
            token = token_of(f"{name}-{thread}", number, _size(rng, sizes))
            number += 1
            if early:
                report(token, "early")
                time.sleep(0.01)
            msg_id = queue.send(rng.choice(topics), f"{token}\n{body_of(token)}")
            if not early:
                report(token, msg_id)
            if pause_s:
                time.sleep(pause_s)

    _in_threads(send, threads)


def queue_poller(
    report: Report,
    *,
    root: str,
    agent: str,
    seed: int,
    keep_filtered: bool = False,
    expire_chance: float = 0.0,
    durability: Durability = "os",
    late: bool = False,
) -> None:
    """Poll forever and report the messages. `late` is a sabotage: it reports before the cursor is written."""
    queue = Queue(root, durability=durability)
    rng = Random(seed)
    topics = sorted(TOPICS)
    cursor = Path(root, "sessions", "default", "cursors", f"{agent}.cursor")
    while True:
        before = cursor.read_bytes() if late and cursor.exists() else b"0\n"
        if keep_filtered:
            found = queue.poll(agent, rng.choice(topics), keep_filtered=True)
        else:
            found = queue.poll(agent)
        if late and found:
            after = cursor.read_bytes()
            cursor.write_bytes(before)
            _report_messages(report, found)
            time.sleep(0.01)
            cursor.write_bytes(after)
        else:
            _report_messages(report, found)
        if rng.random() < expire_chance:
            queue.expire()


def lines_of(messages: list[QueueMessage]) -> Iterator[str]:
    """How a poller reports messages: topic, token, id."""
    for message in messages:
        yield f"{message['topic']} {message['body'].partition(chr(10))[0]} {message['msg_id']}"


def _report_messages(report: Report, messages: list[QueueMessage]) -> None:
    """Write pieces that a pipe accepts whole, so that a kill can only cut off the end of a delivery."""
    piece: list[str] = []
    size = 0
    for line in lines_of(messages):
        if size + len(line) + 1 > REPORT_BYTES_MAX:
            report(lines=piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if piece:
        report(lines=piece)


def queue_expirer(report: Report, *, root: str) -> None:
    """Expire forever, and report how many messages each call removed."""
    queue = Queue(root)
    while True:
        report(queue.expire())


def _size(rng: Random, sizes: tuple[int, int]) -> int:
    """Mostly small, sometimes up to the maximum, so that both short and long writes get killed."""
    low, high = sizes
    return low + int((high - low) * rng.random() ** 2)


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    if threads == 1:
        work(0)
        return
    started = [threading.Thread(target=_or_die, args=(work, n), daemon=True) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def _or_die(work: Callable[[int], None], thread: int) -> None:
    """When one thread fails, the whole process ends, so that the other threads do not hide it."""
    try:
        work(thread)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the process
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (bus_writer, bus_follower, queue_sender, queue_poller, queue_expirer)
}


def main(arguments: list[str]) -> None:
    name, options = arguments
    PROGRAMS[name](reporter(sys.stdout.fileno()), **json.loads(options))


if __name__ == "__main__":
    main(sys.argv[1:])
