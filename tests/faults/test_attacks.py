"""Attacks on the first release, each as a test that failed then."""

import contextlib
import enum
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postroom import Bus, Queue
from postroom.contracts.queue import SESSIONS_OPEN_MAX, QueueLimits
from postroom.errors import InvalidMessage, SinceIdNotFound
from tests.waiting import HANG_GUARD_S


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue") as opened:
        yield opened


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    with Bus(tmp_path / "bus.yaml") as opened:
        yield opened


def post(bus: Bus, body: str = "") -> str:
    return bus.append(type="t", project_id="p", body=body)


class Name(str, enum.Enum):  # noqa: UP042 - what people still write, and what a StrEnum is not
    ADA = "ada"
    ASK = "ask"


INTERRUPTED = """
import signal, sys
from postroom import Bus, Queue
from postroom.contracts.queue import SESSIONS_OPEN_MAX, QueueLimits

class Interrupted(Exception):
    pass

def interrupt(number, frame):
    raise Interrupted

queue, bus = Queue(sys.argv[1] + "/queue"), Bus(sys.argv[1] + "/bus.yaml")
queue.send("ask", "x")
signal.signal(signal.SIGALRM, interrupt)
for number in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00001 + (number % 40) * 0.00001)
        for _ in range(50):
            queue.send("ask", "x" * 100)
            queue.poll("a")
            bus.append(type="t", project_id="p")
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        pass
    if queue._session(None)._mutex.locked() or bus._mutex.locked():
        sys.exit("a lock is left behind")
signal.setitimer(signal.ITIMER_REAL, 0)
Queue(sys.argv[1] + "/queue", lock_timeout_s=0.5).send("ask", "still works")
Bus(sys.argv[1] + "/bus.yaml", lock_timeout_s=0.5).append(type="t", project_id="p")
print(queue.check().ok, bus.verify().ok)
"""


def test_an_exception_in_a_signal_handler_releases_the_lock(tmp_path: Path) -> None:
    # In a process without coverage, whose own locks an interrupt could leave locked.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, tmp_path],
        capture_output=True, text=True, timeout=HANG_GUARD_S, check=False, env=environ,
    )  # fmt: skip
    assert run.stdout == "True True\n", run.stderr


def test_a_member_of_a_str_enumeration_is_its_value(queue: Queue, bus: Bus) -> None:
    bus.append(type=Name.ADA, project_id=Name.ASK, parents=[Name.ADA], body=Name.ADA)
    bus.append(type="ada", project_id="ask")
    bus.append_many([{"type": Name.ADA, "project_id": "p", "task_id": "", "run_id": "", "body": Name.ADA}])
    assert [(m.type, m.parents, m.body) for m in bus.read()] == [
        ("ada", ["ada"], "ada"), ("ada", [], ""), ("ada", [], "ada"),
    ]  # fmt: skip
    queue.send(Name.ASK, Name.ADA, to=Name.ADA, sender=Name.ADA, session=Name.ADA, reply_to=Name.ADA)
    assert [m["body"] for m in queue.poll(Name.ADA, Name.ASK, session=Name.ADA)] == ["ada"]
    assert queue.poll("ada", session="ada") == []
    assert queue.sessions() == ["ada"]


@pytest.mark.parametrize(
    "spelling", ['"X-1"', "'X-1'", "X-1 ", "X-1 # c", "X-1\t", '"X\\u002d1"', "|-\n  X-1"]
)
def test_a_foreign_id_that_is_not_plain_is_damage_and_not_a_loop(bus: Bus, spelling: str) -> None:
    record = f"---\nmsg_id: {spelling}\nts: 2026-11-15T00:00:00Z\ntype: t\nproject_id: p\n---\nhello\n"
    bus.path.write_text(record)
    own = post(bus)
    assert [m.msg_id for m in bus.read()] == [own]
    assert len(bus.verify().damaged) == 1
    with pytest.raises(SinceIdNotFound):
        bus.read("X-1")


def test_too_little_memory_for_the_bodies_loses_nothing(queue: Queue, tmp_path: Path) -> None:
    sent = [queue.send("broadcast", f"{number}" * 20_000_000) for number in range(3)]
    code = (
        "import resource, sys; from postroom import Queue; q = Queue(sys.argv[1]); q.inbox('ada')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (60_000_000, -1))\n"
        "try: q.poll('ada')\n"
        "except MemoryError: print('MemoryError')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, queue.root],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert run.stdout == "MemoryError\n", run.stderr
    assert [m["msg_id"] for m in queue.poll("ada")] == sent


def test_bodies_of_one_poll_are_bounded_and_the_rest_comes_next(queue: Queue) -> None:
    queue.limits = QueueLimits(poll_bytes_max=20_000)
    for number in range(5):
        queue.send("ask", f"{number}" * 8_000)
    taken = [[m["body"][0] for m in queue.poll("a")] for _ in range(4)]
    assert taken == [["0", "1"], ["2", "3"], ["4"], []]


def test_limit_returns_the_first_and_keeps_the_rest(queue: Queue) -> None:
    for number in range(5):
        queue.send("ask" if number % 2 else "status", str(number))
    assert [m["body"] for m in queue.poll("a", limit=2)] == ["0", "1"]
    assert [m["body"] for m in queue.poll("a", "status", keep_filtered=True, limit=1)] == ["2"]
    assert [m["body"] for m in queue.poll("a", limit=0)] == []
    assert [m["body"] for m in queue.poll("a")] == ["3", "4"]
    with pytest.raises(InvalidMessage, match="0 or more"):
        queue.poll("a", limit=-1)


def test_no_free_descriptor_is_not_taken_for_a_lost_body(queue: Queue) -> None:
    sent = queue.send("ask", "x" * 5_000)
    queue.inbox("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))
        with contextlib.suppress(OSError):
            opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(300))
        with pytest.raises(Exception, match="Too many open files"):
            queue.poll("a")
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (message,) = queue.poll("a")
    assert (message["msg_id"], message["body"]) == (sent, "x" * 5_000)


@pytest.mark.parametrize("kind", ["symlink", "unreadable"])
def test_an_archive_that_was_moved_away_does_not_stop_the_bus(bus: Bus, tmp_path: Path, kind: str) -> None:
    post(bus)
    archive = bus.rotate()
    assert archive is not None
    cold = tmp_path / "cold"
    archive.rename(cold)
    if kind == "symlink":
        archive.symlink_to(cold)
    else:
        archive.mkdir()
    own = post(bus)
    assert [m.msg_id for m in bus.read()] == [own]
    with pytest.raises(SinceIdNotFound):
        bus.read("MSG-unknown")


def test_garbage_collected_handles_close_their_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Queue(tmp_path / "q").send("ask", "x")
    before = descriptors()
    for _ in range(50):
        Queue(tmp_path / "q").send("ask", "x")
        post(Bus(tmp_path / "b.yaml"))
    assert descriptors() <= before


@pytest.mark.parametrize("change", [(b"\n", b"\r\n"), (b"\n", b" \n"), (b'"}\n', b'","x":1}\n')])
def test_a_changed_line_of_ours_is_not_taken_for_a_foreign_one(
    queue: Queue, change: tuple[bytes, bytes]
) -> None:
    queue.send("status", "pay 10")
    path = queue.root / "sessions/default/messages.jsonl"
    path.write_bytes(path.read_bytes().replace(b"pay 10", b"pay 99").replace(*change))
    assert queue.poll("a") == []
    assert len(queue.check().unreadable) == 1


def test_a_body_may_contain_checksum_lines(queue: Queue) -> None:
    for body in ('"crc":', '","crc":"00000000"}', '\\"crc":', "crc"):
        queue.send("ask", body)
        assert [m["body"] for m in queue.poll("a")] == [body]


def test_a_line_of_many_windows_is_read_once(queue: Queue) -> None:
    sent = queue.send("ask", "before")
    with (queue.root / "sessions/default/messages.jsonl").open("ab") as file:
        file.write(b"y" * 40_000_000 + b"\n")
    queue.send("ask", "behind")
    assert queue.status("default")["unreadable"] == 1
    assert [m["body"] for m in queue.tail(5)] == ["before", "behind"]
    assert queue.poll("a")[0]["msg_id"] == sent


def test_check_reports_a_damaged_epoch_and_journal(queue: Queue) -> None:
    queue.send("ask", "x")
    folder = queue.root / "sessions/default"
    for name in ("epoch", "expire.journal"):
        (folder / name).write_text("junk")
        report = queue.check()
        assert not report.ok
        assert name in report.state[0]
        (folder / name).unlink()
    (folder / "bodies").write_text("a file")
    assert "bodies" in queue.check().state[0]


def test_a_follower_stops_in_the_middle_of_a_backlog(bus: Bus) -> None:
    bus.append_many([{"type": "t", "project_id": "p", "body": "x" * 1000}] * 3000)
    assert 0 < sum(1 for _ in bus.follow(stop=lambda: True)) < 3000


def test_a_follower_continues_in_a_file_rewritten_by_an_editor(bus: Bus) -> None:
    for body in ("one", "two", "three"):
        post(bus, body)
    seen: list[str] = []
    follower = bus.follow()
    seen += [next(follower).body for _ in range(3)]
    edited = bus.path.with_suffix(".edited")
    edited.write_bytes(bus.path.read_bytes())
    edited.replace(bus.path)
    post(bus, "four")
    seen.append(next(follower).body)
    assert seen == ["one", "two", "three", "four"]


def test_relative_paths_keep_their_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bus, queue = Bus("b.yaml"), Queue("q")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    post(bus)
    queue.send("ask", "x")
    assert (tmp_path / "b.yaml").exists()
    assert (tmp_path / "q/audit.jsonl").exists()
    assert list((tmp_path / "other").iterdir()) == []


def test_invalid_values_raise_a_one_line_error(bus: Bus, queue: Queue, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: queue.send("ask", "x", ttl_s=10**4400),
        lambda: queue.poll("a", wait_s=10**400),
        lambda: bus.poll(timeout_s=10**400),
        lambda: Bus(tmp_path / "x", rotate_bytes="10"),  # type: ignore[arg-type]
        lambda: bus.tail("5"),  # type: ignore[arg-type]
        lambda: bus.read(limit="3"),  # type: ignore[arg-type]
        lambda: bus.rotate("3"),  # type: ignore[arg-type]
        lambda: bus.read(since_id=5),  # type: ignore[arg-type]
        lambda: bus.append_many([["type"]]),  # type: ignore[list-item]
        lambda: bus.append_many([1]),  # type: ignore[list-item]
        lambda: Bus(b"x"),  # type: ignore[arg-type]
        lambda: Bus("a\0b"),
        lambda: Queue("a\0b"),
    ]
    for call in calls:
        with pytest.raises(InvalidMessage) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_threads_may_use_an_evicted_session(queue: Queue) -> None:
    count = SESSIONS_OPEN_MAX + 6

    def send(worker: int) -> None:
        for number in range(2 * count):
            queue.send("ask", f"{worker}-{number}", session=f"s{number % count}")

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [m["body"] for session in queue.sessions() for m in queue.poll("a", session=session)]
    assert len(taken) == len(set(taken)) == 4 * 2 * count
