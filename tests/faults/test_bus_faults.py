"""Failing writes and fsyncs: an error, no half record, and nothing acknowledged that is not stored.

The faults are those of the kernel where possible: a file size limit, a full disk, strace that makes fsync
fail. Where only the moment matters, `os.fsync` is replaced by a function that fails on request.
"""

import itertools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from postroom import Bus
from postroom.errors import HandleDead, Unavailable, WriteFailed
from postroom.message import BusMessage, Durability
from tests.faultydisk import FaultyDisk, in_background
from tests.waiting import HANG_GUARD_S

CLASSES: list[Durability] = ["os", "group", "fsync"]
SYNCED: list[Durability] = ["group", "fsync"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch)


def post(bus: Bus, body: str) -> str:
    return bus.append(type="note", project_id="p", body=body)


def post_many(bus: Bus, *bodies: str) -> list[str]:
    return bus.append_many([{"type": "note", "project_id": "p", "body": body} for body in bodies])


def bodies(messages: list[BusMessage]) -> list[str]:
    return [message.body for message in messages]


def child(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    """Run a script in its own process; returns its output."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- writes that fail ------------------------------------------------------------------------------

SIZE_LIMIT = """
import resource, sys
from postroom import Bus
from postroom.errors import WriteFailed

path, durability = sys.argv[1:]
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
bus = Bus(path, durability=durability)
message = {"type": "note", "project_id": "p", "body": "x" * 20}
made = [bus.append(**message)]
refused = 0
for write in (lambda: bus.append(**message), lambda: bus.append_many([message] * 3)):
    before = bus.path.read_bytes()
    for room in range(0, 160, 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, unlimited[1]))
        try:
            write()
            raise SystemExit("there was no room for it")
        except WriteFailed as error:
            assert error.rolled_back, error
            assert str(error).endswith("File too large; nothing was stored"), error
            refused += 1
        assert bus.path.read_bytes() == before
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    made.append(bus.append(**message))
assert [m.msg_id for m in bus.read()] == made
assert bus.verify().ok
print(refused)
"""


@pytest.mark.parametrize("durability", CLASSES)
def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, durability: Durability) -> None:
    """The limit on file sizes stops a write at any byte of the record or of the batch."""
    assert int(child(SIZE_LIMIT, str(tmp_path / "bus.yaml"), durability)) == 108


FULL_DISK = """
import os, subprocess, sys
from postroom import Bus
from postroom.errors import WriteFailed

folder, durability = sys.argv[1:]
command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
mounted = subprocess.run(command, capture_output=True, text=True)
if mounted.returncode:
    print("REFUSED", mounted.stderr.strip())
    raise SystemExit
bus = Bus(folder + "/bus.yaml", durability=durability)
ballast = folder + "/ballast"
with open(ballast, "wb") as file:
    file.write(bytes(16384))
message = {"type": "note", "project_id": "p", "body": "x" * 1000}
made, failures = [], 0
while failures < 5:
    try:
        made += bus.append_many([message] * 4) if failures % 2 else [bus.append(**message)]
    except WriteFailed as error:
        assert "No space left on device; nothing was stored" in str(error), error
        failures += 1
    assert [m.msg_id for m in bus.read()] == made, "acknowledged and in the file are the same"
assert bus.verify().ok
os.unlink(ballast)
made += bus.append_many([message] * 4)
assert [m.msg_id for m in bus.read()] == made
print(len(made))
"""


@pytest.mark.parametrize("durability", CLASSES)
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, durability: Durability) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("A FULL DISK WAS NOT TRIED: there is no `unshare` for a mount of our own")
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"A FULL DISK WAS NOT TRIED: {tried.stderr.strip()}")
    printed = child(FULL_DISK, str(tmp_path), durability, prefix=("unshare", "--mount"))
    if printed.startswith("REFUSED"):
        pytest.skip(f"A FULL DISK WAS NOT TRIED: no small tmpfs here: {printed}")
    assert int(printed) > 20


# ---- fsyncs that fail, by the kernel ---------------------------------------------------------------

FAILED_FSYNC = """
import sys
from postroom import Bus
from postroom.errors import HandleDead, WriteFailed

path, durability, many = sys.argv[1:]
bus = Bus(path, durability=durability)
message = {"type": "note", "project_id": "p", "body": "x"}
made = []
try:
    while len(made) < 100:
        made += bus.append_many([message] * 3) if many == "many" else [bus.append(**message)]
    raise SystemExit("no fsync failed")
except WriteFailed as error:
    assert error.rolled_back and "Input/output error" in str(error), error
for attempt in (lambda: bus.append(**message), lambda: bus.append_many([message]), bus.rotate):
    try:
        attempt()
        raise SystemExit("a dead handle wrote")
    except HandleDead:
        pass
assert [m.msg_id for m in bus.read()] == made
report = bus.reopen()
assert report.ok and report.messages == len(made) and not report.torn_tail_bytes
made.append(bus.append(**message))
assert [m.msg_id for m in Bus(path).read()] == made
print(len(made))
"""


@pytest.mark.parametrize("durability", SYNCED)
@pytest.mark.parametrize("many", ["one", "many"])
def test_after_a_failed_fsync_the_handle_is_dead_until_it_is_reopened(
    tmp_path: Path, durability: Durability, many: str
) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("A FAILING FSYNC OF THE KERNEL WAS NOT TRIED: strace is not installed")
    # The first fsync makes the new file's name durable, the next three belong to messages.
    prefix = (strace, "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=fsync")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"A FAILING FSYNC OF THE KERNEL WAS NOT TRIED: {tried.stderr.strip()}")
    printed = child(
        FAILED_FSYNC, str(tmp_path / "bus.yaml"), durability, many,
        prefix=(*prefix, "-e", "inject=fsync:error=EIO:when=5"),
    )  # fmt: skip
    trace = (tmp_path / "trace").read_text()
    assert len(re.findall(r"fsync.*EIO.*INJECTED", trace)) == 1
    assert int(printed) == (4 if many == "one" else 10)


def test_os_durability_never_calls_fsync(tmp_path: Path, disk: FaultyDisk) -> None:
    disk.failing = disk.with_folders = True
    bus = Bus(tmp_path / "new" / "bus.yaml")
    post(bus, "fine")
    bus.rotate()
    bus.close()
    assert bodies(bus.read(archives=True)) == ["fine"]


# ---- fsyncs that fail at a chosen moment -----------------------------------------------------------


@pytest.mark.parametrize("durability", SYNCED)
@pytest.mark.parametrize("write", [post, post_many])
def test_a_failed_fsync_raises_write_failed(
    tmp_path: Path, disk: FaultyDisk, durability: Durability, write: Callable[[Bus, str], object]
) -> None:
    bus = Bus(tmp_path / "bus.yaml", durability=durability)
    post(bus, "durable")
    content = bus.path.read_bytes()
    disk.failing = True
    with pytest.raises(WriteFailed) as caught:
        write(bus, "lost")
    assert str(caught.value) == f"could not write {bus.path}: Input/output error; nothing was stored"
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value, OSError)
    assert bus.path.read_bytes() == content
    disk.failing = False
    with pytest.raises(HandleDead) as dead:
        write(bus, "refused")
    assert str(dead.value) == (f"an earlier fsync of {bus.path} failed: call reopen() before writing again")
    bus.close()
    with pytest.raises(HandleDead):
        write(bus, "closing does not wake the dead")
    assert bus.reopen().messages == 1
    write(bus, "again")
    assert bodies(bus.read()) == ["durable", "again"]


@pytest.mark.parametrize("durability", SYNCED)
def test_a_failed_fsync_of_the_new_files_name_is_an_error(
    tmp_path: Path, disk: FaultyDisk, durability: Durability
) -> None:
    bus = Bus(tmp_path / "bus.yaml", durability=durability)
    disk.failing = disk.with_folders = True
    with pytest.raises(WriteFailed):
        post(bus, "lost")
    assert bus.read() == []
    with pytest.raises(HandleDead):
        post(bus, "refused")
    disk.failing = False
    bus.reopen()
    post(bus, "again")
    assert bodies(bus.read()) == ["again"]


def test_no_thread_gets_an_id_for_an_unsynced_message(tmp_path: Path, disk: FaultyDisk) -> None:
    """Threads write through one handle and reopen it when it dies; fsync fails again and again."""
    bus = Bus(tmp_path / "bus.yaml", durability="group")
    acknowledged: list[list[str]] = [[] for _ in range(4)]
    started = threading.Barrier(5)

    def write(mine: list[str]) -> None:
        started.wait()
        for number in range(60):
            try:
                mine.append(post(bus, str(number)))
            except (WriteFailed, HandleDead):
                bus.reopen()

    threads = [in_background(partial(write, mine)) for mine in acknowledged]
    started.wait()
    while any(thread.is_alive() for thread in threads):
        disk.failing = not disk.failing
    disk.failing = False
    for thread in threads:
        thread.join()
    read = [message.msg_id for message in bus.read()]
    assert set(itertools.chain.from_iterable(acknowledged)) <= set(read)
    assert read == sorted(set(read))
    assert bus.verify().ok


def test_rollback_keeps_messages_of_other_processes(tmp_path: Path, disk: FaultyDisk) -> None:
    bus, other = Bus(tmp_path / "bus.yaml", durability="group"), Bus(tmp_path / "bus.yaml")
    post(bus, "durable")
    disk.hold()
    failures: list[WriteFailed] = []

    def write() -> None:
        with pytest.raises(WriteFailed) as caught:
            post(bus, "unsure")
        failures.append(caught.value)

    writer = in_background(write)
    assert disk.entered.wait(HANG_GUARD_S)
    post(other, "acknowledged")
    disk.failing = True
    disk.gate.set()
    writer.join()
    assert bodies(bus.read()) == ["durable", "unsure", "acknowledged"]
    assert str(failures[0]).endswith("the data may or may not be stored")


@pytest.mark.parametrize("durability", SYNCED)
def test_a_rotation_whose_fsync_fails_loses_nothing(
    tmp_path: Path, disk: FaultyDisk, durability: Durability
) -> None:
    bus = Bus(tmp_path / "bus.yaml", durability=durability)
    post(bus, "durable")
    disk.failing = disk.with_folders = True
    with pytest.raises(OSError, match="Input/output error"):
        bus.rotate()
    disk.failing = False
    bus.reopen()
    post(bus, "again")
    assert bodies(bus.read(archives=True)) == ["durable", "again"]


# ---- readers of what is taken back -----------------------------------------------------------------


def write_in_vain(bus: Bus, disk: FaultyDisk, meanwhile: Callable[[], None], *lost: str) -> None:
    """A write that readers can see while its fsync runs, which then fails."""
    disk.hold()

    def write() -> None:
        with pytest.raises(WriteFailed):
            post_many(bus, *lost)

    writer = in_background(write)
    assert disk.entered.wait(HANG_GUARD_S)
    meanwhile()
    disk.failing = True
    disk.gate.set()
    writer.join()
    disk.failing = False
    bus.reopen()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("durability", SYNCED)
def test_follower_continues_after_reading_a_failed_write(
    tmp_path: Path, disk: FaultyDisk, before: int, lost: int, durability: Durability
) -> None:
    """The record written in its place, shorter or longer, is new; earlier ones are not repeated."""
    bus = Bus(tmp_path / "bus.yaml", durability=durability, poll_interval_s=0.01)
    bus.path.touch()
    kept = [f"before {n}" for n in range(before)]
    post_many(bus, *kept)
    follower = bus.follow()
    assert bodies(list(itertools.islice(follower, before))) == kept
    vain = [f"in vain {n}" for n in range(lost)]

    def see() -> None:
        assert bodies(list(itertools.islice(follower, lost))) == vain

    for replacement in ("a", "much longer than what it replaces " * 20):
        write_in_vain(bus, disk, see, *vain)
        post(bus, replacement)
        assert next(follower).body == replacement
    post(bus, "end")
    assert next(follower).body == "end"


def test_id_of_a_failed_append_is_not_reused(tmp_path: Path, disk: FaultyDisk) -> None:
    from datetime import UTC, datetime

    bus = Bus(tmp_path / "bus.yaml", durability="fsync", clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    post(bus, "durable")
    seen: list[str] = []
    write_in_vain(bus, disk, lambda: seen.extend(message.msg_id for message in bus.read()), "in vain")
    assert post(bus, "again") > max(seen)


# ---- memory ----------------------------------------------------------------------------------------

SCAN = """
import resource, sys
from postroom import Bus

small, bus = Bus(sys.argv[1]), Bus(sys.argv[2])
assert small.verify().messages == sum(1 for _ in small.scan()) == 100
before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = total = 0
for message in bus.scan():
    count += 1
    total += len(message.body)
assert bus.verify().messages == count
after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(count, total, after_kb - before_kb)
"""


def test_a_scan_of_a_large_file_stays_in_bounded_memory(tmp_path: Path) -> None:
    small, bus = Bus(tmp_path / "small.yaml"), Bus(tmp_path / "bus.yaml")
    small.append_many([{"type": "note", "project_id": "p", "body": "x" * 10_000}] * 100)
    with bus.path.open("wb") as file:
        for _ in range(100):
            file.write(small.path.read_bytes() + b"\n")
    assert bus.path.stat().st_size > 100_000_000
    count, total, grown_kb = map(int, child(SCAN, str(small.path), str(bus.path)).split())
    assert (count, total) == (10_000, 100_000_000)
    assert grown_kb < 16 * 1024
