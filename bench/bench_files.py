"""The speed of `Bus` and `Queue` next to the system calls that they consist of.

The limit is a bare Python loop of flock, lstat, one write of the same bytes, and unlock: the cost of an
append without checks, encoding and state.
"""

import fcntl
import itertools
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import yaml
from figures import (
    REPEATS,
    Comparison,
    Figure,
    Goal,
    Report,
    compare,
    machine,
    median_of,
    percentile,
    readable,
    run,
    seconds,
)

from postroom import Bus, Queue
from postroom.message import Durability

BODY = "Step 3 of 7 is done: the parser reads every sample, and its report lies next to the other files."
FIELDS = {"type": "agent_output", "project_id": "my-project", "task_id": "task-001", "run_id": "run-001"}
MESSAGE = {**FIELDS, "body": BODY}

# A repeat consists of many short turns of both sides. A turn is shorter than a time slice of the scheduler,
# so on a busy machine the median turn is one that was not interrupted.
WRITE_TURNS = 200
APPENDS_A_TURN = 50
WARM_UP = 1_000
READ_TURNS = 20
LOOKS_A_TURN = 10
WRITERS = 10
APPENDS_A_WRITER = 2_000
BATCH = 100
BATCHES_A_TURN = 2
MANY_MESSAGES = 100_000
FEW_MESSAGES = 10_000
GO_READS_PER_S = 43_500  # conductor-loop's own reader: 100,000 messages in 2.3 s, measured on another day
YAML_SAMPLE = 2_000  # enough to measure the rate of the YAML loader
NEW_MESSAGES = 10
TAIL_MESSAGES = 100
WAKE_UPS = 100
WAKE_UP_PAUSES_S = (0.002, 0.006)
POLL_INTERVAL_S = 0.2
WAITING_MESSAGES = 20_000
CONSUMED_MANY = 100_000
CONSUMED_FEW = 1_000
SYNCS = 40
SYNC_THREADS = 8
CHILD_PATIENCE_S = 120.0

NS_PER_S, NS_PER_MS, MS_PER_S = 1e9, 1e6, 1e3

forking = multiprocessing.get_context("fork")


def main() -> None:
    report = Report(f"Files: {machine()}; medians of {REPEATS}")
    report.begin()
    for bench in (
        bus_append,
        bus_append_many,
        bus_contention,
        bus_reading,
        bus_following,
        queue_send,
        queue_poll,
        queue_growth,
        durability,
    ):
        with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
            for figure in bench(Path(folder)):
                report.add(figure)
    report.end()


# ---- loops to compare ------------------------------------------------------------------------------


class Loop(Protocol):
    """Writes messages one by one."""

    def run(self, count: int) -> None: ...


class BareLoop:
    """The limit: flock, lstat, one write, unlock, and nothing else."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = str(path)
        self.data = data
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def run(self, count: int) -> None:
        path, data, fd = self.path, self.data, self.fd
        for _ in range(count):
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.lstat(path)
            os.write(fd, data)
            fcntl.flock(fd, fcntl.LOCK_UN)


class BusLoop:
    """Appends to a bus."""

    def __init__(self, path: Path, durability: Durability = "os") -> None:
        self.bus = Bus(path, durability=durability)

    def run(self, count: int) -> None:
        bus = self.bus
        for _ in range(count):
            bus.append(
                type="agent_output", project_id="my-project", task_id="task-001", run_id="run-001", body=BODY
            )


class BatchLoop:
    """Appends to a bus in batches; counts batches."""

    def __init__(self, path: Path) -> None:
        self.bus = Bus(path)
        self.batch = [MESSAGE] * BATCH

    def run(self, count: int) -> None:
        for _ in range(count):
            self.bus.append_many(self.batch)


class QueueLoop:
    """Sends to a queue, each message with its audit line."""

    def __init__(self, root: Path, session: str = "default") -> None:
        self.queue = Queue(root)
        self.session = session

    def run(self, count: int) -> None:
        queue, session = self.queue, self.session
        for _ in range(count):
            queue.send("status", BODY, sender="coordinator", session=session)

    @property
    def file(self) -> Path:
        return self.queue.root / "sessions" / self.session / "messages.jsonl"


def rate(loop: Loop, count: int) -> float:
    """Calls a second."""
    return count / seconds(lambda: loop.run(count))


def against_bare_loop(ours: Loop, bare: BareLoop) -> Comparison:
    """Writes a second, ours and the bare loop's."""
    ours.run(WARM_UP)
    bare.run(WARM_UP)
    return compare(lambda: rate(ours, APPENDS_A_TURN), lambda: rate(bare, APPENDS_A_TURN), turns=WRITE_TURNS)


def one_record(folder: Path) -> bytes:
    """The bytes that an append adds to a bus, including its empty line."""
    loop = BusLoop(folder / "one.yaml")
    loop.run(1)
    return b"\n" + loop.bus.path.read_bytes()


# ---- Bus: writing --------------------------------------------------------------------------------


def bus_append(folder: Path) -> Iterator[Figure]:
    bare = BareLoop(folder / "bare", one_record(folder))
    speed = against_bare_loop(BusLoop(folder / "bus.yaml"), bare)
    yield Figure(
        "bus append, 1 writer",
        speed.ours,
        "messages/s",
        f"the bare loop: {readable(speed.theirs)} writes/s",
        speed.ratio,
        [Goal("ratio", ">=", 0.4)],
    )


def bus_append_many(folder: Path) -> Iterator[Figure]:
    batches, single = BatchLoop(folder / "batches.yaml"), BusLoop(folder / "single.yaml")
    batches.run(WARM_UP // BATCH)
    single.run(WARM_UP)
    speed = compare(
        lambda: BATCH * rate(batches, BATCHES_A_TURN), lambda: rate(single, APPENDS_A_TURN), turns=WRITE_TURNS
    )
    yield Figure(
        f"bus append_many({BATCH}), 1 writer",
        speed.ours,
        "messages/s",
        f"one by one: {readable(speed.theirs)} messages/s",
        speed.ratio,
        [Goal("ratio", ">=", 5)],
    )


def bus_contention(folder: Path) -> Iterator[Figure]:
    data = one_record(folder)
    number = itertools.count()
    p99_ms: dict[str, list[float]] = {"bare": [], "bus": []}

    def contended(kind: str, make: Callable[[Path], Loop]) -> float:
        per_s, slow_ms = contend(make, folder / f"{kind}-{next(number)}")
        p99_ms[kind].append(slow_ms)
        return per_s

    speed = compare(
        lambda: contended("bus", BusLoop), lambda: contended("bare", lambda path: BareLoop(path, data))
    )
    yield Figure(
        f"bus append, {WRITERS} writer processes",
        speed.ours,
        "messages/s",
        f"{WRITERS} bare loops: {readable(speed.theirs)} writes/s",
        speed.ratio,
        [Goal("ratio", ">=", 0.4)],
    )
    ours_ms, theirs_ms = statistics.median(p99_ms["bus"]), statistics.median(p99_ms["bare"])
    yield Figure(
        f"bus append, {WRITERS} writer processes, p99",
        ours_ms,
        "ms",
        f"{WRITERS} bare loops: {readable(theirs_ms)} ms",
        ours_ms / theirs_ms,
        [Goal("value", "<", 10)],
    )


def contend(make: Callable[[Path], Loop], path: Path) -> tuple[float, float]:
    """Writes a second of all processes on one file, and the p99 of one write in milliseconds."""
    gate = forking.Barrier(WRITERS)
    results = forking.SimpleQueue()

    def write() -> None:
        loop = make(path)
        stamps_ns = array("q", bytes(8 * (APPENDS_A_WRITER + 1)))
        gate.wait(CHILD_PATIENCE_S)
        stamps_ns[0] = time.monotonic_ns()
        for index in range(1, APPENDS_A_WRITER + 1):
            loop.run(1)
            stamps_ns[index] = time.monotonic_ns()
        results.put(stamps_ns.tobytes())

    children = [forking.Process(target=write, daemon=True) for _ in range(WRITERS)]
    for child in children:
        child.start()
    stamps_ns = [array("q", results.get()) for _ in children]
    for child in children:
        child.join(CHILD_PATIENCE_S)
    took_ns = max(each[-1] for each in stamps_ns) - min(each[0] for each in stamps_ns)
    single_ns = [after - before for each in stamps_ns for before, after in itertools.pairwise(each)]
    return WRITERS * APPENDS_A_WRITER * NS_PER_S / took_ns, percentile(single_ns, 0.99) / NS_PER_MS


# ---- Bus: reading --------------------------------------------------------------------------------


def bus_reading(folder: Path) -> Iterator[Figure]:
    large = filled_bus(folder / "large.yaml", MANY_MESSAGES)
    small = filled_bus(folder / "small.yaml", FEW_MESSAGES)
    yield read_all(large)
    yield read_foreign(folder / "foreign.yaml")
    yield read_since(large, small)
    yield read_tail(large, small)


def filled_bus(path: Path, count: int) -> Bus:
    loop = BatchLoop(path)
    loop.run(count // BATCH)
    return loop.bus


def read_against_yaml(bus: Bus) -> Comparison:
    """Messages a second, and the headers a second of a YAML loader alone."""
    header = re.compile(r"^---\n(msg_id: .*?)^---$", re.MULTILINE | re.DOTALL)
    headers = [match[1] for match in itertools.islice(header.finditer(bus.path.read_text()), YAML_SAMPLE)]

    def ours() -> float:
        return MANY_MESSAGES / seconds(lambda: expect(MANY_MESSAGES, bus.read()))

    def theirs() -> float:
        return len(headers) / seconds(lambda: [yaml.load(each, Loader=yaml.CSafeLoader) for each in headers])

    return compare(ours, theirs)


def read_foreign(path: Path) -> Figure:
    """A file as conductor-loop writes it: no lengths, no checksums, nanoseconds."""
    with path.open("w") as file:
        for number in range(MANY_MESSAGES):
            nanos = f"{number:09d}"
            file.write(
                f"---\nmsg_id: MSG-20261115-010112-{nanos}-PID26098-{number % 10_000:04d}\n"
                f"ts: 2026-11-15T01:01:12.{nanos}Z\ntype: agent_output\nproject_id: my-project\n"
                f"task_id: task-001\nrun_id: run-001\n---\n{BODY}\n\n"
            )
    speed = read_against_yaml(Bus(path))
    return Figure(
        f"bus read, {MANY_MESSAGES:,} messages of conductor-loop's writer",
        speed.ours,
        "messages/s",
        f"yaml.CSafeLoader: {readable(speed.theirs)} headers/s; "
        f"conductor-loop's reader, measured elsewhere: {readable(GO_READS_PER_S)} messages/s",
        speed.ratio,
        [Goal("ratio", ">=", 5), Goal("value", ">=", GO_READS_PER_S)],
    )


def read_all(bus: Bus) -> Figure:
    speed = read_against_yaml(bus)
    return Figure(
        f"bus read, {MANY_MESSAGES:,} messages",
        speed.ours,
        "messages/s",
        f"yaml.CSafeLoader: {readable(speed.theirs)} headers/s",
        speed.ratio,
        [Goal("ratio", ">=", 5)],
    )


def read_since(large: Bus, small: Bus) -> Figure:
    def look(bus: Bus) -> Callable[[], float]:
        since_id = bus.tail(NEW_MESSAGES + 1)[0].msg_id
        return lambda: typical_ms(lambda: expect(NEW_MESSAGES, bus.read(since_id)))

    cost = compare(look(large), look(small), turns=READ_TURNS)
    return Figure(
        f"bus read, {NEW_MESSAGES} new of {MANY_MESSAGES:,}",
        cost.ours,
        "ms",
        f"{NEW_MESSAGES} new of {FEW_MESSAGES:,}: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("value", "<", 1), Goal("ratio", "<=", 1.5)],
    )


def read_tail(large: Bus, small: Bus) -> Figure:
    def look(bus: Bus) -> Callable[[], float]:
        return lambda: typical_ms(lambda: expect(TAIL_MESSAGES, bus.tail(TAIL_MESSAGES)))

    cost = compare(look(large), look(small), turns=READ_TURNS)
    return Figure(
        f"bus tail({TAIL_MESSAGES}) of {MANY_MESSAGES:,}",
        cost.ours,
        "ms",
        f"of {FEW_MESSAGES:,}: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("value", "<", 2)],
    )


def typical_ms(work: Callable[[], object]) -> float:
    return statistics.median(seconds(work) for _ in range(LOOKS_A_TURN)) * MS_PER_S


def expect(count: int, found: Sequence[object]) -> None:
    """Check that the reader found every message."""
    assert len(found) == count


def bus_following(folder: Path) -> Iterator[Figure]:
    delays_ms = [wake_ups_ms(folder / f"bus-{repeat}.yaml") for repeat in range(REPEATS)]
    p50_ms = statistics.median(percentile(each, 0.5) for each in delays_ms)
    p99_ms = statistics.median(percentile(each, 0.99) for each in delays_ms)
    against = f"the poll interval: {POLL_INTERVAL_S * MS_PER_S:.0f} ms"
    share = p50_ms / (POLL_INTERVAL_S * MS_PER_S)
    yield Figure("bus follow, append to reader, p50", p50_ms, "ms", against, share, [Goal("value", "<", 2)])
    yield Figure("bus follow, append to reader, p99", p99_ms, "ms")


def wake_ups_ms(path: Path) -> list[float]:
    """The time from the start of an append in another process until a follower has the message."""
    bus = Bus(path, poll_interval_s=POLL_INTERVAL_S)
    begun_at = bus.append(**MESSAGE)

    def write() -> None:
        writer = Bus(path)
        for _ in range(WAKE_UPS):
            time.sleep(random.uniform(*WAKE_UP_PAUSES_S))
            writer.append(**FIELDS, body=str(time.monotonic_ns()))

    child = forking.Process(target=write, daemon=True)
    child.start()
    delays_ms = [
        (time.monotonic_ns() - int(message.body)) / NS_PER_MS
        for message in itertools.islice(bus.follow(begun_at), WAKE_UPS)
    ]
    child.join(CHILD_PATIENCE_S)
    return delays_ms


# ---- Queue ---------------------------------------------------------------------------------------


def queue_send(folder: Path) -> Iterator[Figure]:
    loop = QueueLoop(folder / "queue")
    loop.run(1)
    speed = against_bare_loop(loop, BareLoop(folder / "bare", loop.file.read_bytes()))
    yield Figure(
        "queue send with its audit line, 1 process",
        speed.ours,
        "messages/s",
        f"the bare loop: {readable(speed.theirs)} writes/s",
        speed.ratio,
        [Goal("ratio", ">=", 0.3)],
    )


def queue_poll(folder: Path) -> Iterator[Figure]:
    loop = QueueLoop(folder / "queue")
    loop.run(WAITING_MESSAGES)
    lines = loop.file.read_bytes().splitlines()
    decode = msgspec.json.Decoder().decode
    number = itertools.count()

    def ours() -> float:
        agent = f"agent-{next(number)}"  # a new agent has all messages unread
        return WAITING_MESSAGES / seconds(lambda: expect(WAITING_MESSAGES, loop.queue.poll(agent)))

    def theirs() -> float:
        return WAITING_MESSAGES / seconds(lambda: [decode(line) for line in lines])

    speed = compare(ours, theirs)
    yield Figure(
        f"queue poll, {WAITING_MESSAGES:,} waiting",
        speed.ours,
        "messages/s",
        f"msgspec alone: {readable(speed.theirs)} lines/s",
        speed.ratio,
        [Goal("value", ">=", 250_000)],
    )


def queue_growth(folder: Path) -> Iterator[Figure]:
    def poller(session: str, consumed: int) -> Callable[[], float]:
        loop = QueueLoop(folder / "queue", session)
        loop.run(consumed)
        take(loop, consumed)
        return lambda: statistics.median(one_poll_s(loop) for _ in range(LOOKS_A_TURN)) * MS_PER_S

    def one_poll_s(loop: QueueLoop) -> float:
        loop.run(NEW_MESSAGES)
        return seconds(lambda: take(loop, NEW_MESSAGES))

    def take(loop: QueueLoop, count: int) -> None:
        expect(count, loop.queue.poll("agent", session=loop.session))

    cost = compare(poller("long", CONSUMED_MANY), poller("short", CONSUMED_FEW), turns=READ_TURNS)
    yield Figure(
        f"queue poll, {NEW_MESSAGES} new after {CONSUMED_MANY:,}",
        cost.ours,
        "ms",
        f"{NEW_MESSAGES} new after {CONSUMED_FEW:,}: {readable(cost.theirs)} ms",
        cost.ratio,
        [Goal("ratio", "<=", 1.5)],
    )


# ---- durability ----------------------------------------------------------------------------------


def durability(folder: Path) -> Iterator[Figure]:
    """For information: these figures depend mostly on the disk."""
    data = one_record(folder)
    yield Figure("fsync probe: write and fsync", median_of(lambda: probe_ms(folder / "probe", data)), "ms")
    shared, own = BusLoop(folder / "group.yaml", "group"), BusLoop(folder / "fsync.yaml", "fsync")
    speed = compare(lambda: synced_rate(shared, SYNC_THREADS), lambda: synced_rate(own, 1))
    yield Figure(
        f"bus append, group, {SYNC_THREADS} threads",
        speed.ours,
        "messages/s",
        f"fsync, 1 thread: {readable(speed.theirs)} messages/s",
        speed.ratio,
    )


def probe_ms(path: Path, data: bytes) -> float:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write_and_sync() -> None:
        os.write(fd, data)
        os.fsync(fd)

    try:
        return statistics.median(seconds(write_and_sync) for _ in range(SYNCS)) * MS_PER_S
    finally:
        os.close(fd)


def synced_rate(loop: Loop, threads: int) -> float:
    def write_together() -> None:
        crew = [threading.Thread(target=loop.run, args=(SYNCS,)) for _ in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()

    return threads * SYNCS / seconds(write_together)


if __name__ == "__main__":
    run(main)
