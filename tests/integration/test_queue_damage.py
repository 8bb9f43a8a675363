"""`Queue` under faults: flipped bits, truncated files, a full disk, failing fsyncs. Errors, but no loss."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from postroom import PostroomError, Queue
from postroom.errors import DamagedState, HandleDead, WriteFailed
from postroom.message import Durability
from tests.quick import quick_path

NOW = datetime(2026, 6, 10, tzinfo=UTC)
THRESHOLD_BYTES = 16
DISK_BYTES = 128 * 1024
DURABLE: list[Durability] = ["group", "fsync"]

__all__ = ["quick_path"]  # a fixture


@pytest.fixture
def root(quick_path: Path) -> Path:
    return quick_path / "root"


def opened(root: Path, durability: Durability = "os") -> Queue:
    return Queue(root, body_threshold=THRESHOLD_BYTES, durability=durability, clock=lambda: NOW)


def messages_of(root: Path) -> Path:
    return root / "sessions" / "default" / "messages.jsonl"


def cursors_of(root: Path) -> Path:
    return root / "sessions" / "default" / "cursors"


def bodies(messages: list[Any]) -> list[str]:
    return [message["body"] for message in messages]


def flips(path: Path) -> Iterator[bytes]:
    """Flip each bit of a file in turn, in place; yields the changed content."""
    data = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    try:
        for bit in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            os.pwrite(fd, flipped[bit // 8 : bit // 8 + 1], bit // 8)
            yield bytes(flipped)
            os.pwrite(fd, data[bit // 8 : bit // 8 + 1], bit // 8)
    finally:
        os.close(fd)


# ---- flipped bits and cut files ----------------------------------------------------------------------


def test_no_flipped_bit_delivers_a_wrong_message_or_deletes_anything(root: Path) -> None:
    with opened(root) as queue:
        queue.send("ask", "J *", to="a", reply_to="m-0")
        queue.send("answer", "the second is in a side file")
        intact = queue.tail()
        for flipped in flips(messages_of(root)):
            found = queue.poll("a")
            assert [message for message in [*found, *queue.tail()] if message not in intact] == []
            assert queue.expire() == 0
            assert messages_of(root).read_bytes() == flipped
            (cursors_of(root) / "a.cursor").unlink(missing_ok=True)
        assert queue.poll("a") == intact


def test_no_flipped_bit_of_a_side_file_delivers_a_wrong_body(root: Path) -> None:
    with opened(root) as queue:
        msg_id = queue.send("ask", "a body that is long enough")
        path = root / "sessions" / "default" / "bodies" / f"{msg_id}.txt"
        for _ in flips(path):
            (message,) = queue.tail()
            assert message["body"] == f"@file:{msg_id}.txt"
            assert message["_body_error"]
        (message,) = queue.tail()
        assert message["body"] == "a body that is long enough"


def test_file_truncated_at_any_byte_delivers_complete_lines(root: Path, quick_path: Path) -> None:
    with opened(root) as queue:
        for number in range(2):
            queue.send("ask", f"{number}")
    data = messages_of(root).read_bytes()
    for end in range(len(data) + 1):
        cut = quick_path / "cut"
        messages_of(cut).parent.mkdir(parents=True)
        messages_of(cut).write_bytes(data[:end])
        whole = [str(number) for number in range(data[:end].count(b"\n"))]
        with opened(cut) as queue:
            assert bodies(queue.tail()) == whole
            assert bodies(queue.poll("a")) == whole
            assert bodies(queue.poll("a")) == []
            queue.send("ask", "next")
            # A line that lacked only its newline is complete once the next writer has ended it.
            ended = [str(len(whole))] if data[end : end + 1] == b"\n" else []
            assert bodies(queue.poll("a")) == [*ended, "next"]
            assert messages_of(cut).read_bytes().startswith(data[:end])
            assert queue.expire() == 0
        shutil.rmtree(cut)


@pytest.mark.parametrize("suffix", ["cursor", "topics"])
def test_flipped_cursor_bit_is_an_error_or_another_offset(root: Path, quick_path: Path, suffix: str) -> None:
    # An offset has no checksum, because other programs read the format. An invalid offset is refused, and
    # every delivered message is correct.
    with opened(root) as queue:
        for number in range(4):
            queue.send("ask", f"{number}")
        queue.poll("a", None if suffix == "cursor" else "ask", keep_filtered=True)
        path = cursors_of(root) / f"a.{suffix}"
        keep = quick_path / path.name
        shutil.copy(path, keep)
        refused = 0
        for flipped in flips(keep):
            for left in cursors_of(root).iterdir():
                left.unlink()
            path.write_bytes(flipped)
            try:
                found = bodies(queue.poll("a"))
            except DamagedState:
                refused += 1
                assert path.read_bytes() == flipped
                assert list(queue.check().cursors) == ["a"]
            else:
                assert set(found) <= {"0", "1", "2", "3"}
        assert refused > len(keep.read_bytes()) * 4


# ---- a full disk -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(quick_path: Path) -> Iterator[Path]:
    folder = quick_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "postroom-test", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a full disk was not tried: there is no mount command")
    if result.returncode:
        pytest.skip(f"a full disk was not tried: mounting a tmpfs is not permitted ({result.stderr.strip()})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(queue: Queue, make_body: Callable[[int], str]) -> list[str]:
    """Send until the disk is full. Returns the acknowledged messages."""
    acknowledged: list[str] = []
    for number in range(100_000):
        body = make_body(number)
        try:
            queue.send("ask", body)
        except WriteFailed:
            return acknowledged
        acknowledged.append(body)
    raise AssertionError("the disk never got full")


@pytest.mark.parametrize("durability", ["os", "group", "fsync"])
@pytest.mark.parametrize("size", [10, 3000])
def test_a_full_disk_raises_and_loses_nothing(small_disk: Path, durability: Durability, size: int) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (DISK_BYTES // 2))
    with opened(small_disk / "root", durability) as queue:
        queue.send("ask", "gone", ttl_s=0)
        acknowledged = fill(queue, lambda number: f"{number}:".ljust(size, "x"))
        for _ in range(3):  # and again
            with suppress(WriteFailed):
                queue.send("ask", "one more".ljust(size))
                acknowledged.append("one more".ljust(size))
        assert bodies(queue.tail(10_000)) == acknowledged, "nothing half written can be seen"
        assert queue.check().ok
        assert queue.check().unused_bodies == ()
        received: list[str] = []
        with suppress(WriteFailed):  # there may be no room for a cursor: then nothing is delivered
            received = bodies(queue.poll("a"))
        with suppress(WriteFailed):
            queue.expire()
        assert bodies(queue.tail(10_000)) == acknowledged
        ballast.unlink()
        received += bodies(queue.poll("a"))
        assert received == acknowledged
        assert queue.expire() in (0, 1)
        queue.send("ask", "room again")
        assert bodies(queue.poll("a")) == ["room again"]
        assert bodies(queue.poll("b")) == [*acknowledged, "room again"]


# ---- an fsync that fails -----------------------------------------------------------------------------


class Disk:
    """Wraps `os.fsync`: it can be made to fail or to block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = os.fsync
        self.failing: Callable[[str], bool] = lambda _: False
        self.calls: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        self.calls.append(name)
        self.entered.set()
        self.gate.wait()
        if self.failing(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.real(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def fails_for(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def test_the_os_class_needs_no_fsync_to_send_and_poll(root: Path, disk: Disk) -> None:
    disk.failing = lambda _: True
    with opened(root) as queue:
        queue.send("ask", "short")
        queue.send("ask", "a body that is long enough")
        assert len(queue.poll("a")) == 2
    assert disk.calls == []


@pytest.mark.parametrize("durability", DURABLE)
def test_the_durable_classes_sync_before_they_acknowledge(
    root: Path, disk: Disk, durability: Durability
) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "first")
        disk.calls.clear()
        queue.send("ask", "short")
        assert disk.calls == ["messages.jsonl"]
        disk.calls.clear()
        msg_id = queue.send("ask", "a body that is long enough")
        assert [name for name in disk.calls if msg_id in name]
        assert disk.calls[-2:] == ["bodies", "messages.jsonl"]
        disk.calls.clear()
        queue.poll("a")
        assert [name for name in disk.calls if "a.cursor" in name]
        assert disk.calls[-1] == "cursors"


@pytest.mark.parametrize("durability", DURABLE)
@pytest.mark.parametrize("body", ["short", "a body that is long enough"])
def test_queue_acknowledges_nothing_after_a_failed_fsync_until_reopened(
    root: Path, disk: Disk, durability: Durability, body: str
) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "safe")
        before = messages_of(root).read_bytes()
        disk.failing = fails_for("messages.jsonl")
        with pytest.raises(WriteFailed, match="Input/output error") as caught:
            queue.send("ask", body)
        assert caught.value.rolled_back
        assert messages_of(root).read_bytes() == before
        disk.failing = lambda _: False
        with pytest.raises(HandleDead, match="reopen"):
            queue.send("ask", body)
        assert messages_of(root).read_bytes() == before
        queue.reopen()
        queue.send("ask", "again")
        assert bodies(queue.poll("a")) == ["safe", "again"]
        assert queue.check().ok
        assert queue.check().unused_bodies == ()


@pytest.mark.parametrize("durability", DURABLE)
def test_unsynced_side_file_has_no_line(root: Path, disk: Disk, durability: Durability) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "safe")
        disk.failing = lambda name: name.endswith(".tmp") or name == "bodies"
        with pytest.raises(WriteFailed):
            queue.send("ask", "a body that is long enough")
        disk.failing = fails_for("bodies")
        with pytest.raises(WriteFailed):
            queue.send("ask", "a body that is long enough")
        disk.failing = lambda _: False
        queue.send("ask", "again")
        assert bodies(queue.poll("a")) == ["safe", "again"]
        assert not list((root / "sessions/default/bodies").glob(".*"))


@pytest.mark.parametrize("durability", DURABLE)
def test_unsynced_cursor_delivers_nothing(root: Path, disk: Disk, durability: Durability) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "x")
        disk.failing = lambda name: "a.cursor" in name
        with pytest.raises(WriteFailed):
            queue.poll("a")
        disk.failing = lambda _: False
        assert bodies(queue.poll("a")) == ["x"]


@pytest.mark.parametrize("durability", DURABLE)
def test_cursor_does_not_pass_unsynced_lines(root: Path, disk: Disk, durability: Durability) -> None:
    # The lines may be of another sender with another class. After a failure the next fsync proves nothing.
    with opened(root) as careless, opened(root, durability) as queue:
        careless.send("ask", "x")
        queue.poll("b")
        careless.send("ask", "y")
        disk.failing = fails_for("messages.jsonl")
        with pytest.raises(WriteFailed):
            queue.poll("a")
        disk.failing = lambda _: False
        with pytest.raises(HandleDead):
            queue.poll("a")
        queue.reopen()
        assert bodies(queue.poll("a")) == ["x", "y"]


@pytest.mark.parametrize("durability", DURABLE)
def test_failed_folder_fsync_of_a_cursor_never_redelivers(
    root: Path, disk: Disk, durability: Durability
) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "x")
        queue.poll("b")
        disk.failing = fails_for("cursors")
        with pytest.raises(WriteFailed, match="may or may not"):
            queue.poll("a")
        disk.failing = lambda _: False
        queue.send("ask", "y")
        assert bodies(queue.poll("a")) in (["y"], ["x", "y"])


@pytest.mark.parametrize("durability", ["os", "group", "fsync"])
@pytest.mark.parametrize("failing", ["messages.jsonl.tmp", ".expire.journal", "default", "cursors", "epoch"])
def test_a_failed_fsync_of_expire_loses_and_repeats_nothing(
    root: Path, disk: Disk, durability: Durability, failing: str
) -> None:
    with opened(root, durability) as queue:
        queue.send("ask", "gone", ttl_s=0)
        queue.send("ask", "read")
        queue.poll("a")
        queue.send("ask", "gone, too", ttl_s=0)
        queue.send("ask", "left")
        disk.failing = lambda name: failing in name
        with suppress(PostroomError):
            queue.expire()
        disk.failing = lambda _: False
        queue.reopen()
        assert bodies(queue.poll("a")) == ["left"]
        assert bodies(queue.poll("b")) == ["read", "left"]
        assert queue.expire() in (0, 2)
        assert queue.check().ok


def held_up(disk: Disk, send: Callable[[], object]) -> tuple[threading.Thread, list[WriteFailed]]:
    """A send whose line is written, and whose fsync has begun."""
    failures: list[WriteFailed] = []

    def run() -> None:
        try:
            send()
        except WriteFailed as error:
            failures.append(error)

    disk.entered.clear()
    disk.gate.clear()
    thread = threading.Thread(target=run)
    thread.start()
    disk.entered.wait()
    return thread, failures


@pytest.mark.parametrize("how", ["poll", "keep", "ask"])
def test_failed_group_fsync_keeps_messages_already_read(root: Path, disk: Disk, how: str) -> None:
    # If the line were removed, the cursor would be beyond the end and would skip the next lines.
    with opened(root, "group") as sender, opened(root) as reader:
        first = sender.send("ask", "first")
        reader.poll("a", "ask", keep_filtered=True)
        thread, failures = held_up(disk, lambda: sender.send("answer", "second", "a", reply_to=first))
        if how == "poll":
            assert bodies(reader.poll("a")) == ["second"]
        elif how == "keep":
            assert bodies(reader.poll("a", "answer", keep_filtered=True)) == ["second"]
        else:
            taken = reader._take_answer(reader._session(None), "a", first, 0, 0)
            assert taken is not None
        disk.failing = fails_for("messages.jsonl")
        disk.gate.set()
        thread.join()
        assert [error.rolled_back for error in failures] == [False]
        disk.failing = lambda _: False
        sender.reopen()
        sender.send("answer", "third.", "a")  # as long as the second
        assert bodies(reader.poll("a")) == ["third."]
        assert bodies(reader.poll("b")) == ["first"]


def test_failed_group_fsync_removes_unread_messages(root: Path, disk: Disk) -> None:
    with opened(root, "group") as sender, opened(root) as reader:
        sender.send("ask", "first")
        reader.poll("a")
        thread, failures = held_up(disk, lambda: sender.send("ask", "second"))
        disk.failing = fails_for("messages.jsonl")
        disk.gate.set()
        thread.join()
        assert [error.rolled_back for error in failures] == [True]
        disk.failing = lambda _: False
        sender.reopen()
        sender.send("ask", "third.")
        assert bodies(reader.poll("a")) == ["third."]


def test_failed_group_fsync_keeps_messages_of_other_processes(root: Path, disk: Disk) -> None:
    with opened(root, "group") as sender, opened(root) as other:
        other.send("ask", "safe")
        sender.poll("b")
        thread, failures = held_up(disk, lambda: sender.send("ask", "first"))
        other.send("ask", "other's")
        disk.failing = fails_for("messages.jsonl")
        disk.gate.set()
        thread.join()
        assert [error.rolled_back for error in failures] == [False]
        assert bodies(other.poll("a")) == ["safe", "first", "other's"]


def test_unreadable_cursor_prevents_the_rollback(root: Path, disk: Disk) -> None:
    with opened(root, "group") as sender, opened(root) as reader:
        sender.send("ask", "first")
        reader.poll("a")
        (cursors_of(root) / "a.cursor").write_text("damaged")
        disk.failing = fails_for("messages.jsonl")
        with pytest.raises(WriteFailed, match="may or may not"):
            sender.send("ask", "second")
        assert bodies(reader.poll("b")) == ["first", "second"]


def test_threads_share_one_fsync_and_its_failure(root: Path, disk: Disk) -> None:
    with opened(root, "group") as queue:
        queue.send("ask", "safe")
        first, first_failures = held_up(disk, lambda: queue.send("ask", "one"))
        rest = []
        for number in range(3):
            failures: list[WriteFailed] = []

            def run(number: int = number, failures: list[WriteFailed] = failures) -> None:
                try:
                    queue.send("ask", f"more {number}")
                except WriteFailed as error:
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            rest.append((thread, failures))
        while messages_of(root).read_bytes().count(b"\n") < 5:
            os.sched_yield()
        disk.failing = fails_for("messages.jsonl")
        disk.gate.set()
        for thread, _ in [(first, first_failures), *rest]:
            thread.join()
        failed = [error for failures in (first_failures, *(f for _, f in rest)) for error in failures]
        assert len(failed) == 4
        disk.failing = lambda _: False
        queue.reopen()
        survivors = bodies(queue.poll("a"))
        assert survivors[0] == "safe"
        assert survivors[1:] == [] if all(error.rolled_back for error in failed) else True


@pytest.mark.parametrize("depth", [5_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_of_any_depth_is_one_unreadable_line(
    tmp_path: Path, depth: int, opening: str, closing: str
) -> None:
    queue = Queue(tmp_path)
    queue.send("ask", "one")
    files = queue._session(None)
    deep = f"{opening * depth}1{closing * depth}"
    message = f'{{"msg_id":"x","ts":"","from":"a","topic":"ask","body":"b","more":{deep}}}'
    with files.messages.open("a") as file:
        file.write(f'{deep}\n{opening * depth}\n{{"msg_id":{deep}}}\n{message}\n')
    queue.send("ask", "two", ttl_s=0)
    queue.send("ask", "three")
    assert [found["body"] for found in queue.tail(9)] == ["one", "three"]
    assert len(queue.check().unreadable) == queue.status("default")["unreadable"] == 4
    assert queue.expire() == 1
    assert len(queue.check().unreadable) == 4, "kept"
    assert [found["body"] for found in queue.poll("ada")] == ["one", "three"]
    assert queue.inbox("ada")["empty"]

    for text in (deep, f'{{"topics":{deep},"taken":[]}}', opening * depth):
        (files.cursors.folder / "ada.topics").write_text(text)
        with pytest.raises(DamagedState):
            queue.poll("ada")
        assert list(queue.check().cursors) == ["ada"]
    queue.repair_cursor("ada", "end")
    for name in ("expire.journal", "epoch"):
        path = files.folder / name
        path.write_text(deep)
        assert queue.check().state
        path.unlink()
    assert queue.check().ok is False, "the unreadable lines are still there"
    assert queue.poll("ada") == []
