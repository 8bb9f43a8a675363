"""Power cuts: an ext4 file system in a loop image, copied while programs write to it.

One cut:
1. Stop every worker (SIGSTOP). Everything reported by then is acknowledged.
2. Sometimes write back one file without a request, as the kernel may at any time.
3. Copy the image, which does not include the page cache. Copy until two copies in a row are equal, so that it
   is one instant of the disk and not a mixture of several.
4. Mount the copy, which replays the journal, and compare. Then let the workers continue.

Runs in its own mount namespace, so no mount is left behind.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

from postroom import Bus, Queue
from postroom.contracts.tasks.tasks import TaskInfo
from postroom.errors import DamagedState, StoreDamaged
from postroom.message import BusMessage, Durability, QueueMessage
from tests.crash import child, mailprograms, taskprograms
from tests.crash.kills import check_hand_overs
from tests.crash.ledger import Delivery, Tally, acknowledged_in, body_of, compare, token_of
from tests.crash.mailprograms import DURABLE, Post
from tests.crash.mailupdates import BOX, MailHarness
from tests.crash.taskprograms import WAL_PAGES_FEW, open_tasks, task_of
from tests.crash.tasks import check_store, delivery_of, ids_of
from tests.crash.workers import STUCK_S, Crew, Worker, scratch_parent
from tests.smalldisk import NotPermitted

IMAGE_BYTES = 16 * 1024 * 1024
TASKS_IMAGE_BYTES = 48 * 1024 * 1024  # a WAL, its database, and a disk reserve
CUTS_PER_ROUND = 25  # then the file system is made again, so that it stays small
LINES_MAX = 20  # reports that a worker may make between two cuts
WRITEBACK_CHANCE = 0.25
COPIES_MAX = 200
UNMOUNT_TRIES = 25

Tick = Callable[[int], None]


def run(side: str, durability: Durability, cuts: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Cut the power that often during a scene, in one durability class."""
    tally = Tally()
    rng = Random(f"{side}/{durability}/{seed}")
    with _folder() as folder:
        while (left := cuts - tally.facts.get("cuts", 0)) > 0:
            cuts_now = min(left, CUTS_PER_ROUND)
            _round(folder, SCENES[side], durability, cuts_now, rng, tally)
            tick(cuts_now)
    return tally


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="postroom-powercuts-", dir=scratch_parent(1)))
    try:
        yield folder
    finally:
        for mounted in (folder / "copy", folder / "live"):
            if mounted.is_mount():
                _system("umount", "--lazy", mounted)
        shutil.rmtree(folder, ignore_errors=True)


def _round(
    folder: Path,
    kind: "type[Scene]",
    durability: Durability,
    cuts: int,
    rng: Random,
    tally: Tally,
) -> None:
    image = folder / "live.img"
    with image.open("wb") as file:
        file.truncate(kind.image_bytes)
    _system("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", image)
    with _mounted(image, folder / "live") as live, Crew() as crew:
        scene = kind(live, durability, crew, rng)
        for _ in range(cuts):
            crew.await_lines(rng.choice(scene.workers), rng.randint(1, LINES_MAX))
            _stop(crew)
            if rng.random() < WRITEBACK_CHANCE:
                _write_back_one(live, rng)
            copied = _copied(image, folder / "copy.img", tally)
            with _mounted(copied, folder / "copy") as after:
                _look(scene, after, tally)
            tally.count("cuts")
            _go_on(crew)
        tally.acknowledged += len(scene.acknowledged())


def _look(scene: "Scene", after: Path, tally: Tally) -> None:
    try:
        scene.compare(after, tally)
    except DamagedState as error:
        if scene.durability != "os":
            tally.breaks(f"after a cut: {error}")
        tally.count("cursors_ahead_of_their_lines")  # refused: a person has to decide
    except StoreDamaged as error:
        tally.breaks(f"after a cut: {error}")


# ---- one cut ---------------------------------------------------------------------------------------


def _stop(crew: Crew) -> None:
    """Stop every worker and read its earlier reports: these were acknowledged."""
    for worker in crew.living():
        os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + STUCK_S
    while not all(_is_stopped(worker.pid) for worker in crew.living()):
        if time.monotonic() > deadline:
            raise TimeoutError("a worker does not stop")
    crew.drain()
    while any(_has_more(worker) for worker in crew.living()):
        crew.drain()


def _has_more(worker: Worker) -> bool:
    before = len(worker.lines)
    worker.read()
    return len(worker.lines) > before


def _is_stopped(pid: int) -> bool:
    """Whether every thread of the process has stopped, also one inside an fsync."""
    return all(
        Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(") ")[2][0] == "T"
        for thread in os.listdir(f"/proc/{pid}/task")
    )


def _go_on(crew: Crew) -> None:
    for worker in crew.living():
        os.kill(worker.pid, signal.SIGCONT)


def _write_back_one(live: Path, rng: Random) -> None:
    files = sorted(path for path in live.rglob("*") if path.is_file() and path.stat().st_size)
    if files:
        fd = os.open(rng.choice(files), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _copied(image: Path, target: Path, tally: Tally) -> Path:
    """The image at one instant: two equal copies in a row."""
    before = _extents(image)
    for _ in range(COPIES_MAX):
        now = _extents(image)
        if now == before:
            _write_extents(target, now, image.stat().st_size)
            return target
        tally.count("copies_repeated")
        before = now
    raise TimeoutError("the disk does not come to rest")


def _extents(image: Path) -> list[tuple[int, bytes]]:
    """Everything in a file except its holes, which are most of it."""
    found: list[tuple[int, bytes]] = []
    with image.open("rb", buffering=0) as file:
        end = 0
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # only a hole remains
                return found
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, os.pread(file.fileno(), end - start, start)))


def _write_extents(target: Path, extents: list[tuple[int, bytes]], size: int) -> None:
    with target.open("wb", buffering=0) as file:
        file.truncate(size)
        for start, data in extents:
            file.seek(start)
            file.write(data)


@contextlib.contextmanager
def _mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    _system("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """A worker that was just killed may keep its last file open for a moment."""
    for _ in range(UNMOUNT_TRIES):
        if subprocess.run(["umount", folder], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.02)
    _system("umount", "--lazy", folder)


def _system(*command: str | Path) -> None:
    """A file system tool, which is not on the PATH of ordinary users."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
    except FileNotFoundError:
        raise NotPermitted(f"{command[0]} is not installed") from None
    if done.returncode:
        raise NotPermitted(f"{command[0]}: {done.stderr.strip()}")


# ---- what runs, and what must be left of it ------------------------------------------------------------


class Scene(Protocol):
    """Some workers, and the state that must remain of their work."""

    image_bytes: ClassVar[int]
    durability: Durability
    workers: list[Worker]

    def __init__(self, folder: Path, durability: Durability, crew: Crew, rng: Random) -> None: ...

    def acknowledged(self) -> dict[str, str]: ...

    def compare(self, folder: Path, tally: Tally) -> None: ...


class _Bus:
    """Two processes with two threads each append to one bus, which rotates from time to time."""

    image_bytes: ClassVar[int] = IMAGE_BYTES

    def __init__(self, folder: Path, durability: Durability, crew: Crew, rng: Random) -> None:
        self._crew = crew
        self.durability = durability
        options = {
            "path": str(folder / "bus.yaml"),
            "durability": durability,
            "threads": 2,
            "sizes": (0, 3_000),
            "rotate_bytes": 200_000,
        }
        self.workers = [
            crew.start(name, child.bus_writer, name=name, seed=rng.getrandbits(32), **options)
            for name in ("a", "b")
        ]

    def acknowledged(self) -> dict[str, str]:
        return acknowledged_in(self._crew.lines())

    def compare(self, folder: Path, tally: Tally) -> None:
        bus = Bus(folder / "bus.yaml")
        delivered = bus.read(archives=True)
        _count(self.acknowledged(), map(_from_bus, delivered), self.durability, tally)
        ids = [message.msg_id for message in delivered]
        if ids != sorted(set(ids)):
            tally.breaks("the ids do not rise through the file")
        token = token_of("after", 0, 100)
        msg_id = bus.append(type="t", project_id="p", task_id=token, body=body_of(token))
        if [message.msg_id for message in bus.read(archives=True)] != [*ids, msg_id]:
            tally.breaks("an append after the cut did not simply add its message")
        bus.close()


def _from_bus(message: BusMessage) -> Delivery:
    return Delivery(message.task_id, message.msg_id, message.body)


class _Queue:
    """A sender with two threads, one of the class `os`, and a consumer that also expires."""

    image_bytes: ClassVar[int] = IMAGE_BYTES

    def __init__(self, folder: Path, durability: Durability, crew: Crew, rng: Random) -> None:
        self.durability = durability
        root = str(folder / "queue")
        sending = {"root": root, "sizes": (0, 1_500), "body_threshold": 700}
        self._sender = crew.start(
            "sender",
            child.queue_sender,
            name="s",
            seed=rng.getrandbits(32),
            durability=durability,
            threads=2,
            gone_chance=0.2,
            **sending,
        )
        # Its messages may be lost after a cut, but no cursor may be beyond lost lines.
        crew.start("careless", child.queue_sender, name="careless", seed=rng.getrandbits(32), **sending)
        self._poller = crew.start(
            "poller",
            child.queue_poller,
            root=root,
            agent="consumer",
            seed=rng.getrandbits(32),
            durability=durability,
            expire_chance=0.1,
        )
        self.workers = [self._sender]

    def acknowledged(self) -> dict[str, str]:
        return acknowledged_in(self._sender.lines)

    def compare(self, folder: Path, tally: Tally) -> None:
        with Queue(folder / "queue") as queue:
            everything = queue.poll("fresh")
            whole = [message for message in everything if "_body_error" not in message]
            tally.count("side_files_missing_as_reported", len(everything) - len(whole))
            _count(self.acknowledged(), map(_from_queue, whole), self.durability, tally)
            self._compare_hand_overs(queue, everything, tally)
            msg_id = queue.send("status", "after")
            if [message["msg_id"] for message in queue.poll("consumer")] != [msg_id]:
                tally.breaks("a message sent after the cut was not what the consumer got")

    def _compare_hand_overs(self, queue: Queue, everything: list[QueueMessage], tally: Tally) -> None:
        """Messages delivered before the cut are not delivered again."""
        before = [_by_id(line) for line in self._poller.lines]
        after = [_by_id(line) for line in child.lines_of(queue.poll("consumer"))]
        if self.durability == "os":
            tally.count("handed_over_again", len(set(before) & set(after)))
            return
        part = Tally()
        order = [_by_id(line) for line in child.lines_of(everything)]
        in_file = set(order)
        still_there = [line for line in before if line in in_file]
        check_hand_overs(order, [still_there, after], part)
        tally.doubled += part.doubled
        tally.lost += part.lost
        tally.count("cut_off_by_the_cut", part.facts["cut_off_by_a_kill"])


def _by_id(line: str) -> str:
    """A poller's line without topic and token: a side file, and the token with it, may be lost."""
    return "any " + line.rpartition(" ")[2]


def _from_queue(message: QueueMessage) -> Delivery:
    token, _, body = message["body"].partition("\n")
    return Delivery(token, message["msg_id"], body)


class _Tasks:
    """A producer with two threads, one of the class `os`, and a consumer, on one store."""

    image_bytes: ClassVar[int] = TASKS_IMAGE_BYTES

    def __init__(self, folder: Path, durability: Durability, crew: Crew, rng: Random) -> None:
        self.durability = durability
        place = {"folder": str(folder / "tasks"), "wal_pages": rng.choice(WAL_PAGES_FEW)}
        shared = {"agent": "coder", **place}
        self._producer = crew.start(
            "producer",
            taskprograms.producer,
            name="p",
            seed=rng.getrandbits(32),
            durability=durability,
            threads=2,
            batch=3,
            sizes=(0, 1_500),
            **shared,
        )
        # Its tasks may be lost after a cut, but nothing else.
        crew.start(
            "careless",
            taskprograms.producer,
            name="careless",
            seed=rng.getrandbits(32),
            pause_s=0.005,
            agent="other",
            **place,
        )
        self._consumer = crew.start(
            "consumer", taskprograms.consumer, name="c", seed=rng.getrandbits(32), batch=3, **shared
        )
        self.workers = [self._producer]

    def acknowledged(self) -> dict[str, str]:
        return acknowledged_in(self._producer.lines)

    def compare(self, folder: Path, tally: Tally) -> None:
        with open_tasks(folder / "tasks") as tasks:
            infos = {task_id: tasks.get(task_id) for task_id in ids_of(tasks, "coder")}
            _count(self.acknowledged(), map(delivery_of, infos.values()), self.durability, tally)
            gone = [line for line in self._consumer.lines if not _is_kept(line, infos)]
            if self.durability == "os":
                tally.count("words_lost_as_documented", len(gone))
            else:
                tally.lost += len(gone)
            check_store(tasks, folder / "tasks", tally)
            task_id = tasks.enqueue(**task_of(token_of("after", 0, 100), "new"))
            if [task.task_id for task in tasks.claim(agent="new")] != [task_id]:
                tally.breaks("a task enqueued after the cut was not what a claim gave")


def _is_kept(line: str, infos: dict[str, TaskInfo]) -> bool:
    """Whether a consumer's call is still in the task's history, with its result."""
    word, task_id, lease = line.split(" ")[:3]
    info = infos.get(task_id)
    kind = {"claimed": "dequeued", "completed": "execution_completed"}[word]
    if info is None or not any(event.kind == kind and event.lease == int(lease) for event in info.history):
        return False
    return word == "claimed" or info.result == {"under": int(lease)}


class _Mail:
    """A mail server, two senders, and a member of a queue group that deletes."""

    image_bytes: ClassVar[int] = IMAGE_BYTES

    def __init__(self, folder: Path, durability: Durability, crew: Crew, rng: Random) -> None:
        self.durability = durability
        place = {"folder": str(folder)}
        storage = "os" if durability == "os" else "group"
        crew.await_lines(crew.start("server", mailprograms.server, storage=storage, **place), 1)
        post = Post(folder)
        post.asked(mailprograms.CREATE, b'{"name":"%b","public":true,"ttl":0}' % BOX.encode())
        post.close()
        self.workers = [
            crew.start(name, mailprograms.sender, name=name, seed=rng.getrandbits(32), boxes=[BOX], **place)
            for name in ("a", "b")
        ]
        self._member = crew.start("member", mailprograms.member, box=BOX, seed=rng.getrandbits(32), **place)

    def _rows(self, worker: Worker, word: str) -> list[list[str]]:
        rows = [line.split(" ") for line in worker.lines]
        return [row for row in rows if row[0] == word]

    def acknowledged(self) -> dict[str, str]:
        """Without messages that may have been deleted."""
        gone = {row[1] for row in self._rows(self._member, "deleting")}
        sent = [row for worker in self.workers for row in self._rows(worker, "sent")]
        return {token: msg_id for _, _, word, token, msg_id in sent if word in DURABLE and msg_id not in gone}

    def compare(self, folder: Path, tally: Tally) -> None:
        harness = MailHarness(folder / "mail")
        found = harness.replayed()
        _count(self.acknowledged(), iter(found), self.durability, tally)
        deleted = {row[2] for row in self._rows(self._member, "deleted") if row[1] in DURABLE}
        undead = deleted & {delivery.msg_id for delivery in found}
        if self.durability == "os":
            tally.count("words_lost_as_documented", len(undead))
        elif undead:
            tally.breaks(f"{len(undead)} deleted messages came again")
        numbers = [delivery.msg_id for delivery in found]
        [answer] = harness.ask((f"{mailprograms.MSG}{BOX}.urgent", b"after"))
        if [each.msg_id for each in harness.replayed()] != [*numbers, str(answer["msg_id"])]:
            tally.breaks("a send after the cut did not simply add its message")
        harness.service.close()


SCENES: dict[str, type[Scene]] = {"bus": _Bus, "queue": _Queue, "tasks": _Tasks, "mail": _Mail}


def _count(
    acknowledged: dict[str, str], delivered: Iterator[Delivery], durability: Durability, tally: Tally
) -> None:
    """`os` promises nothing after a cut: a loss is recorded as a fact, not as a failure."""
    part = Tally()
    compare(acknowledged, delivered, part)
    tally.count("acknowledged_before_a_cut", len(acknowledged))
    tally.doubled += part.doubled
    tally.torn += part.torn
    tally.broken += part.broken
    if durability == "os":
        tally.count("lost_as_documented", part.lost)
    else:
        tally.lost += part.lost
    tally.count("unacknowledged_but_whole", part.facts["unacknowledged_but_whole"])
