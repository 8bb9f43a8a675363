"""Every bit of a 64 kB file of postroom, flipped in turn.

For each flip the whole file is read by the readers' code: for the bus the window reader that `read`, `scan`
and `verify` use; for the queue `Queue.tail`. Every `SAMPLE_EVERY`-th flip also goes through `Bus.read`,
`tail` and `verify`, or through `Queue.check` and a `poll` of a new agent.

    torn       delivered messages that differ from the written ones in any field
    doubled    messages delivered more than once
    lost       messages that are missing although nothing was reported: no damage, no unfinished tail
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from postroom import Bus, Queue
from postroom.core.formats import queuewire
from postroom.logs import busfile
from postroom.message import BusMessage, QueueMessage
from tests.crash.ledger import Tally
from tests.crash.workers import scratch_parent

FILE_BYTES = 64 * 1024
FLIPS = FILE_BYTES * 8
SAMPLE_EVERY = 997  # a prime, so that every bit of a byte gets its turn
TICK_EVERY = 1000

Tick = Callable[[int], None]
Outcome = tuple[list[Any], bool]
"""The messages that were delivered, and whether damage or an unfinished tail was reported."""

FORGED = "---\nmsg_id: MSG-forged\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n---\nforged\n"
LEGACY_LOOK = "[2026-02-05 14:30:52] ERROR: a legacy line that nobody wrote\n"
BODIES = (
    # The first body of the file: after one damaged line, a careless reader takes it for a record.
    f"msg_id: MSG-forged\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n---\n{LEGACY_LOOK}---\n",
    LEGACY_LOOK,
    "",
    "one line",
    "a final newline\n",
    FORGED,
    f"text\n\n{FORGED}\n{FORGED}",
    "---\r\n--- \n---  \nbody_bytes: 5\ncrc: 00000000\n",
    "no: 012\n1:30: *alias\n&anchor [1, {2: 3}]\n",
    "Umlaute äöü, \u2028, \U0001f600, \x00, \x1b[31m",
    "\n\n\n",
    'JSON: {"msg_id":"m","crc":"00000000"} \\" \\n @file:x',
    "J" * 300 + "*" * 300 + "\x0b\x0e\x02\x1a" * 50,  # one flip away from a newline
)
FILLER_CHARS = 3_000  # about 40 records in the file, so that it can be read half a million times


def body_number(number: int) -> str:
    """Each of the bodies above in turn, every second one followed by much plain text."""
    return BODIES[number // 2 % len(BODIES)] + str(number) * (number % 2 * FILLER_CHARS // len(str(number)))


def run(kind: str, first: int, stop: int, tick: Tick = lambda _: None) -> Tally:
    """Flip the bits from `first` to before `stop` of a bus or queue file."""
    with tempfile.TemporaryDirectory(prefix="postroom-flips-", dir=scratch_parent(1)) as folder:
        return _run_bus(Path(folder), first, stop, tick) if kind == "bus" else _run_queue(
            Path(folder), first, stop, tick
        )  # fmt: skip


def flipped(fd: int, original: bytes, bit: int) -> bytes:
    """Flip one bit of the file. Returns the new content."""
    byte = bytes([original[bit // 8] ^ 1 << bit % 8])
    os.pwrite(fd, byte, bit // 8)
    return original[: bit // 8] + byte + original[bit // 8 + 1 :]


def _run_all(
    path: Path,
    bits: range,
    look: Callable[[int], Outcome],
    expected: dict[str, Any],
    id_of: Callable[[Any], str],
    tick: Tick,
) -> Tally:
    original = path.read_bytes()
    everything = list(expected.values())
    tally = Tally(acknowledged=len(everything) if bits.start == 0 else 0)  # once for all parts of the file
    with _descriptor(path) as fd:
        for bit in bits:
            image = flipped(fd, original, bit)
            _judge(look(bit), everything, expected, id_of, tally)
            if os.pread(fd, FILE_BYTES + 1, 0) != image:
                tally.breaks(f"reading changed the file after bit {bit} was flipped")
            os.pwrite(fd, original[bit // 8 : bit // 8 + 1], bit // 8)
            if (bit + 1) % TICK_EVERY == 0:
                tick(TICK_EVERY)
    if path.read_bytes() != original:
        tally.breaks("the file is not as it was before the flips")
    return tally


def _judge(
    outcome: Outcome,
    everything: list[Any],
    expected: dict[str, Any],
    id_of: Callable[[Any], str],
    tally: Tally,
) -> None:
    messages, reported = outcome
    tally.count("flips")
    tally.count("reported", reported)
    if messages == everything:
        tally.count("harmless")
        return
    ids = {id_of(message) for message in messages}
    tally.torn += sum(1 for message in messages if expected.get(id_of(message)) != message)
    tally.doubled += len(messages) - len(ids)
    tally.count("skipped_messages", len(expected.keys() - ids))
    if not reported:
        tally.lost += len(expected.keys() - ids)


# ---- Bus -------------------------------------------------------------------------------------------


def _run_bus(folder: Path, first: int, stop: int, tick: Tick) -> Tally:
    path = folder / "bus.yaml"
    make_bus_file(path)
    expected = {message.msg_id: message for message in Bus(path).read()}
    with _descriptor(path) as fd:

        def look(bit: int) -> Outcome:
            outcome = _read_bus(fd)
            if bit % SAMPLE_EVERY == 0:
                _compare_calls(path, outcome)
            return outcome

        return _run_all(path, range(first, stop), look, expected, lambda message: message.msg_id, tick)


def make_bus_file(path: Path) -> None:
    """Exactly 64 kB, written by `Bus`, with every kind of record that it writes."""
    bus = Bus(path)
    msg_ids = [bus.append(type="first", project_id="p", body=BODIES[0])]
    number = 0
    while path.stat().st_size < FILE_BYTES - 8_000:
        number += 1
        msg_ids.append(
            bus.append(
                type=("info", "no", "tä g")[number % 3],
                project_id="p",
                task_id=f"task-{number}" if number % 2 else "",
                run_id="012" if number % 5 else "run",
                parents=msg_ids[-(number % 4) :] if number % 4 else (),
                attachment="out/report.md" if number % 7 == 0 else None,
                body=body_number(number),
            )
        )
    before = path.stat().st_size
    bus.append(type="t", project_id="p", body="x" * 1000)
    other = path.stat().st_size - before - 1000
    bus.append(type="t", project_id="p", body="y" * (FILE_BYTES - path.stat().st_size - other))
    bus.close()
    if path.stat().st_size != FILE_BYTES:
        raise AssertionError(f"{path.stat().st_size} bytes instead of {FILE_BYTES}")


def _read_bus(fd: int) -> Outcome:
    messages: list[BusMessage] = []
    damaged = end = 0
    for part in busfile.decode_from(fd, 0, 0):
        messages += part.messages
        damaged += len(part.damaged)
        end += part.consumed
    return messages, damaged > 0 or end < FILE_BYTES


def _compare_calls(path: Path, outcome: Outcome) -> None:
    bus = Bus(path)
    messages, reported = outcome
    report = bus.verify()
    agree = (
        bus.read() == messages
        and bus.tail(FILE_BYTES) == messages
        and bus.tail(10) == messages[-10:]
        and reported == (bool(report.damaged) or report.torn_tail_bytes > 0)
    )
    if not agree:
        raise AssertionError("read, tail and verify do not agree")


# ---- Queue -----------------------------------------------------------------------------------------


def _run_queue(folder: Path, first: int, stop: int, tick: Tick) -> Tally:
    with Queue(folder) as queue:
        path = make_queue_file(queue)
        expected = {message["msg_id"]: message for message in queue.tail(FILE_BYTES)}

        def look(bit: int) -> Outcome:
            messages = queue.tail(FILE_BYTES)
            *lines, torn = path.read_bytes().split(b"\n")
            unreadable = sum(queuewire.readable(line) is None for line in lines)
            if bit % SAMPLE_EVERY == 0 and queue.poll(f"agent-{bit}") != messages:
                raise AssertionError("poll and tail do not agree")
            if bit % SAMPLE_EVERY == 0 and len(queue.check().unreadable) != unreadable:
                raise AssertionError("check does not report what a reader passes over")
            return messages, unreadable > 0 or torn != b""

        return _run_all(path, range(first, stop), look, expected, _queue_id, tick)


def _queue_id(message: QueueMessage) -> str:
    return message["msg_id"]


def make_queue_file(queue: Queue) -> Path:
    """Exactly 64 kB, written by `Queue`, with inline and side-file bodies."""
    path = queue.root / "sessions" / "default" / "messages.jsonl"
    number = 0
    queue.send("status", "first")
    while path.stat().st_size < FILE_BYTES - 5_000:
        number += 1
        queue.send(
            ("ask", "answer", "broadcast", "spawn-request", "status")[number % 5],
            "z" * 5_000 if number % 15 == 0 else body_number(number),
            to=(None, "all", "agent-b")[number % 3] if number % 3 < 2 else None,
            ttl_s=(None, 86_400, 1e9)[number % 3],
            sender=f"agent-{number % 4}",
            reply_to=f"m-{number}" if number % 6 == 0 else None,
        )
    before = path.stat().st_size
    queue.send("status", "x" * 1000)
    other = path.stat().st_size - before - 1000
    left = FILE_BYTES - path.stat().st_size
    queue.send("status", "y" * (left - other))
    if path.stat().st_size != FILE_BYTES:
        raise AssertionError(f"{path.stat().st_size} bytes instead of {FILE_BYTES}")
    return path


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)
