"""kill -9 at random points of every update, and the messages that readers get afterwards.

Each scenario runs in rounds. A round has its own folder, kills some workers while the others continue, reads
beside them after every kill, and at the end compares everything acknowledged with everything that a new
reader gets.
"""

import itertools
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from postroom import TOPICS, Bus, Queue
from postroom.errors import PostroomError
from postroom.message import BusMessage, QueueMessage
from tests.crash import child
from tests.crash.ledger import (
    AppendOnly,
    Delivery,
    Tally,
    acknowledged_in,
    check_writers_in_order,
    compare,
    writer_of,
)
from tests.crash.workers import Crew, Worker, scratch_parent

KILLS_PER_ROUND = 20
DRAINS_MAX = 1000

Tick = Callable[[int], None]
Round = Callable[[Path, int, Random, Tally, str], None]


def run(scenario: str, kills: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Run one scenario until it has killed that often. `tick` is called with the number of new kills."""
    tally = Tally()
    rng = Random(f"{scenario}/{seed}")
    for number, first in enumerate(range(0, kills, KILLS_PER_ROUND)):
        count = min(KILLS_PER_ROUND, kills - first)
        folder = Path(tempfile.mkdtemp(prefix="postroom-kills-", dir=scratch_parent(number)))
        try:
            SCENARIOS[scenario](folder, count, rng, tally, sabotage)
        except PostroomError as error:
            tally.breaks(f"a reader beside the killed met {error!r}".replace(str(folder), "..."))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tick(count)
    return tally


# ---- Bus -------------------------------------------------------------------------------------------


class BusShape(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the writers of a bus scenario."""

    sizes: tuple[int, int] = (0, 400)
    batch: int = 1
    rotate_bytes: int | None = None
    rotate_chance: float = 0.0
    writers_max: int = 3
    lines_max: int = 12
    """The most acknowledgements that a writer reports before it is killed."""


def _bus_round(shape: BusShape, folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    path = folder / "bus.yaml"
    names = (f"w{number}" for number in itertools.count())

    def writer() -> Worker:
        name = next(names)
        options = {
            "path": str(path),
            "name": name,
            "seed": rng.getrandbits(32),
            "sizes": shape.sizes,
            "batch": shape.batch,
            "rotate_bytes": shape.rotate_bytes,
            "rotate_chance": shape.rotate_chance,
            "early": sabotage == "early",
        }
        return crew.start(name, child.bus_writer, **options)

    seen: list[BusMessage] = []
    bytes_kept = AppendOnly(path)
    with Crew() as crew:
        writers = [writer() for _ in range(rng.randint(1, shape.writers_max))]
        follower = crew.start("follower", child.bus_follower, path=str(path))
        for _ in range(kills):
            place = rng.randrange(len(writers))
            crew.kill_at_random(writers[place], rng, shape.lines_max)
            tally.count("kills")
            seen += Bus(path).read(seen[-1].msg_id if seen else "", archives=True)
            if shape.rotate_bytes is None:
                bytes_kept.look()
            writers[place] = writer()
        for survivor in writers:
            survivor.kill()
        delivered = Bus(path).read(archives=True)
        crew.await_that(lambda: len(follower.lines) >= len(delivered), "following to the end")
    acknowledged = acknowledged_in(
        line for worker in crew.workers if worker is not follower for line in worker.lines
    )
    tally.acknowledged += len(acknowledged)
    compare(acknowledged, map(_from_bus, delivered), tally)
    check_writers_in_order((message.task_id for message in delivered), tally)
    _check_bus_readers(delivered, seen, follower.lines, tally)
    _check_bus_files(path, tally)
    bytes_kept.check(tally)


def _from_bus(message: BusMessage) -> Delivery:
    return Delivery(message.task_id, message.msg_id, message.body)


def _check_bus_readers(
    delivered: list[BusMessage], seen: list[BusMessage], followed: list[str], tally: Tally
) -> None:
    if seen != delivered[: len(seen)]:
        tally.breaks("a reader beside the writers saw something else than the last reader")
    if followed != [f"{message.task_id} {message.msg_id}" for message in delivered]:
        tally.breaks("the follower saw something else than the last reader")
    msg_ids = [message.msg_id for message in delivered]
    if msg_ids != sorted(set(msg_ids)):
        tally.breaks("the ids do not rise through the file")


def _check_bus_files(path: Path, tally: Tally) -> None:
    for file in [*Bus(path).archives(), path]:
        report = Bus(file).verify()
        tally.count("torn_records_skipped", len(report.damaged) + (report.torn_tail_bytes > 0))
        if report.unchecked:
            tally.breaks(f"{report.unchecked} messages without a checksum, which nobody wrote")
    tally.count("archives", len(Bus(path).archives()))


# ---- Queue: sending --------------------------------------------------------------------------------


def _side_file_round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    names = (f"s{number}" for number in itertools.count())

    def sender() -> Worker:
        name = next(names)
        options = {
            "root": str(folder),
            "name": name,
            "seed": rng.getrandbits(32),
            "sizes": (0, 40_000),
            "body_threshold": 200,
            "early": sabotage == "early",
        }
        return crew.start(name, child.queue_sender, **options)

    seen: list[Delivery] = []
    bytes_kept = AppendOnly(folder / "sessions" / "default" / "messages.jsonl")
    with Crew() as crew, Queue(folder) as queue:
        senders = [sender() for _ in range(rng.randint(1, 3))]
        for _ in range(kills):
            place = rng.randrange(len(senders))
            crew.kill_at_random(senders[place], rng, 8)
            tally.count("kills")
            seen += _polled(queue, "beside", tally)
            bytes_kept.look()
            senders[place] = sender()
        crew.kill_all()
        seen += _polled(queue, "beside", tally)
        delivered = _polled(queue, "afterwards", tally)
        report = queue.check()
    acknowledged = acknowledged_in(crew.lines())
    tally.acknowledged += len(acknowledged)
    compare(acknowledged, delivered, tally)
    check_writers_in_order((delivery.token for delivery in delivered), tally)
    if seen != delivered:
        tally.breaks("an agent that polled beside the senders was given something else than one afterwards")
    bytes_kept.check(tally)
    if report.bodies or report.cursors:
        tally.breaks(f"the check found {report.bodies or report.cursors}")
    tally.count("torn_lines_skipped", len(report.unreadable))
    tally.count("side_files_without_line", len(report.unused_bodies))


def _polled(queue: Queue, agent: str, tally: Tally, topic: str | None = None) -> list[Delivery]:
    """Everything unread of an agent."""
    delivered: list[Delivery] = []
    for _ in range(DRAINS_MAX):
        found = queue.poll(agent, topic, keep_filtered=topic is not None)
        if not found:
            break
        delivered += [_from_queue(message, tally) for message in found]
    return delivered


def _from_queue(message: QueueMessage, tally: Tally) -> Delivery:
    if "_body_error" in message:
        tally.breaks(f"{message['msg_id']}: {message['_body_error']}")
    token, _, body = message["body"].partition("\n")
    if writer_of(token).startswith(child.GONE):
        tally.breaks(f"{token} was delivered after it had expired")
    return Delivery(token, message["msg_id"], body)


# ---- Queue: cursors --------------------------------------------------------------------------------


def _cursor_round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    """One agent polls, is killed, and is restarted: nothing comes twice, and only deliveries are cut."""
    keep_filtered = rng.random() < 0.5 and not sabotage
    sending = {
        "root": str(folder),
        "name": "s",
        "seed": rng.getrandbits(32),
        "pause_s": 0.000_2,  # the poller should return often, and find few messages each time
    }

    def poller() -> Worker:
        options = {
            "root": str(folder),
            "agent": "consumer",
            "seed": rng.getrandbits(32),
            "keep_filtered": keep_filtered,
            "late": sabotage == "late",
        }
        return crew.start("poller", child.queue_poller, **options)

    pollers: list[Worker] = []
    with Crew() as crew, Queue(folder) as queue:
        sender = crew.start("sender", child.queue_sender, **sending)
        for _ in range(kills):
            pollers.append(poller())
            crew.kill_at_random(pollers[-1], rng, 12)
            tally.count("kills")
        sender.kill()
        left = [line for topic in sorted(TOPICS) for line in _left_for(queue, topic, keep_filtered)]
        in_file = _polled(queue, "everything", tally)
        order = [*child.lines_of(queue.tail(len(in_file)))]
    acknowledged = acknowledged_in(sender.lines)
    tally.acknowledged += len(acknowledged)
    compare(acknowledged, in_file, tally)
    parts = [*(poller.lines for poller in pollers), left]
    if not keep_filtered:
        order, parts = _one_topic(order), [_one_topic(part) for part in parts]
    check_hand_overs(order, parts, tally)


def _left_for(queue: Queue, topic: str, keep_filtered: bool) -> list[str]:
    """The undelivered messages of the consumer, in the form of a poller's report."""
    found = queue.poll("consumer", topic, keep_filtered=True) if keep_filtered else queue.poll("consumer")
    return [*child.lines_of(found)]


def _one_topic(lines: list[str]) -> list[str]:
    return ["any " + line.partition(" ")[2] for line in lines]


def check_hand_overs(order: list[str], parts: list[list[str]], tally: Tally) -> None:
    """Compare the deliveries to the killed consumers of one agent, in order, with the file.

    At most once: a kill may cut off the last delivery of its consumer, and nothing else may be missing.
    """
    by_topic: defaultdict[str, list[str]] = defaultdict(list)
    for line in order:
        by_topic[line.partition(" ")[0]].append(line)
    given = [line for part in parts for line in part]
    tally.doubled += len(given) - len(set(given))
    tally.count("handed_over", len(set(given)))
    missing_runs = 0
    for topic, lines in by_topic.items():
        place = {line: number for number, line in enumerate(lines)}
        for part in parts:
            places = [place[line] for line in part if line.partition(" ")[0] == topic]
            left_out = len(set(range(places[0], places[-1] + 1)) - set(places)) if places else 0
            tally.lost += left_out
            if places != sorted(places):
                tally.breaks("one consumer was given messages out of order")
        runs, length = _missing_runs([line in set_of for line in lines] if (set_of := set(given)) else [])
        missing_runs += runs
        tally.count("cut_off_by_a_kill", length)
    if missing_runs > len(parts):
        tally.breaks(f"{missing_runs} gaps in what was handed over, but only {len(parts)} consumers")


def _missing_runs(present: list[bool]) -> tuple[int, int]:
    runs = sum(1 for before, here in itertools.pairwise([True, *present]) if before and not here)
    return runs, present.count(False)


# ---- Queue: expire ---------------------------------------------------------------------------------


def _expire_round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    """Compaction is killed while a sender sends and three agents read across the moved offsets."""
    options = {
        "root": str(folder),
        "name": "s",
        "seed": rng.getrandbits(32),
        "sizes": (0, 900),
        "body_threshold": 500,
        "gone_chance": 0.5,
        "early": sabotage == "early",
    }
    given: dict[str, list[Delivery]] = {"steady": [], "lagging": [], "picky": []}
    with Crew() as crew, Queue(folder) as queue:
        sender = crew.start("sender", child.queue_sender, **options)
        for number in range(kills):
            expirer = crew.start("expirer", child.queue_expirer, root=str(folder))
            crew.kill_at_random(expirer, rng, 4)
            tally.count("kills")
            tally.count("dropped", sum(map(int, expirer.lines)))
            given["steady"] += _polled(queue, "steady", tally)
            given["picky"] += _polled(queue, "picky", tally, rng.choice(sorted(TOPICS)))
            if number % 5 == 0:
                given["lagging"] += _polled(queue, "lagging", tally)
            crew.await_lines(sender, 1)
        sender.kill()
        for topic in sorted(TOPICS):
            given["picky"] += _polled(queue, "picky", tally, topic)
        given["steady"] += _polled(queue, "steady", tally)
        given["lagging"] += _polled(queue, "lagging", tally)
        _check_expired(queue, tally)
    acknowledged = acknowledged_in(sender.lines)
    tally.acknowledged += len(acknowledged)
    for agent, deliveries in given.items():
        compare(acknowledged, deliveries, tally)
        if agent != "picky":
            check_writers_in_order((delivery.token for delivery in deliveries), tally)


def _check_expired(queue: Queue, tally: Tally) -> None:
    queue.expire()
    report = queue.check()
    if not report.ok:
        tally.breaks(f"the check found {report}")
    if len(report.unused_bodies) > 1:  # the sender itself was killed once
        tally.breaks(f"{len(report.unused_bodies)} side files are left of expired messages")
    if queue.status()["default"]["expired"]:
        tally.breaks("expired messages are left behind expire()")
    tally.count("epochs", queue.inbox("steady")["epoch"])


SCENARIOS: dict[str, Round] = {
    "kills-append": partial(_bus_round, BusShape()),
    "kills-append-pages": partial(_bus_round, BusShape(sizes=(2_000, 400_000), lines_max=3)),
    "kills-append-many": partial(_bus_round, BusShape(sizes=(0, 8_000), batch=20, lines_max=40)),
    "kills-rotation": partial(
        _bus_round, BusShape(sizes=(0, 3_000), rotate_bytes=12_000, rotate_chance=0.1, writers_max=2)
    ),
    "kills-side-file": _side_file_round,
    "kills-cursor": _cursor_round,
    "kills-expire": _expire_round,
}
