"""The public contract of `Bus`, sentence by sentence."""

import fcntl
import gc
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import Bus, BusMessage, LockTimeout, Rejected, SinceIdNotFound, Unavailable
from postroom.contracts.bus import discover
from postroom.errors import InvalidMessage, UnsafePath
from postroom.message import Durability

ID = re.compile(r"MSG-\d{8}-\d{6}-\d{9}-PID\d{5}-\d{4}", re.ASCII)
NOON = datetime(2026, 2, 5, 14, 30, 52, 123456, tzinfo=UTC)
SEPARATOR = b"\n"
CLASSES: list[Durability] = ["os", "group", "fsync"]


class Clock:
    """A clock that moves only when a test advances it."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now

    def step(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bus(tmp_path: Path, clock: Clock) -> Iterator[Bus]:
    with Bus(tmp_path / "messagebus.yaml", clock=clock, poll_interval_s=0.01) as bus:
        yield bus


def post(bus: Bus, body: str = "", **fields: Any) -> str:
    return bus.append(**{"type": "note", "project_id": "p", "body": body, **fields})


def bodies(messages: list[BusMessage]) -> list[str]:
    return [message.body for message in messages]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- appending ------------------------------------------------------------------------------------


def test_the_public_names() -> None:
    for name in ("Bus", "BusMessage", "LockTimeout", "SinceIdNotFound", "Rejected", "Unavailable"):
        assert hasattr(postroom, name)


def test_an_append_returns_the_id_under_which_the_message_is_read(bus: Bus) -> None:
    msg_id = bus.append(
        type="agent_started", project_id="my-project", task_id="t1", run_id="r1", body="Agent started"
    )
    assert ID.fullmatch(msg_id)
    message = bus.read()[0]
    assert message == BusMessage(
        msg_id, NOON, "agent_started", "my-project", "t1", "r1", [], "", "Agent started", {}
    )


def test_ids_and_timestamps_come_from_the_injected_clock(bus: Bus, clock: Clock) -> None:
    clock.now = datetime(2031, 12, 24, 18, 0, 0, 7, tzinfo=timezone(timedelta(hours=1)))
    assert post(bus).startswith("MSG-20311224-170000-000007000-PID")
    assert bus.read()[0].ts == datetime(2031, 12, 24, 17, 0, 0, 7, tzinfo=UTC)


def test_without_a_clock_the_time_is_now(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    before = datetime.now(UTC)
    post(bus)
    assert before - timedelta(microseconds=1) <= bus.read()[0].ts <= datetime.now(UTC)


def test_a_naive_clock_is_refused_and_nothing_stays_locked(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", clock=lambda: NOON.replace(tzinfo=None))
    with pytest.raises(InvalidMessage, match="has no time zone"):
        post(bus)
    assert post(Bus(tmp_path / "bus.yaml", lock_timeout_s=0.01))


@pytest.mark.parametrize(
    ("ts", "stored"),
    [
        ("2020-01-02T03:04:05Z", "2020-01-02T03:04:05Z"),
        ("2020-01-02T03:04:05.123456789Z", "2020-01-02T03:04:05.123456789Z"),
        ("2020-01-02T03:04:05+05:30", "2020-01-01T21:34:05Z"),
        (datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC), "2020-01-02T03:04:05.000000Z"),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00.000000Z"),
    ],
)
def test_a_preset_timestamp_is_kept_in_utc(bus: Bus, ts: datetime | str, stored: str) -> None:
    post(bus, ts=ts)
    assert f"\nts: {stored}\n".encode() in bus.path.read_bytes()
    assert bus.read()[0].ts == datetime.fromisoformat(stored)


@pytest.mark.parametrize("ts", ["now", "2020-01-02T03:04:05", 0, NOON.replace(tzinfo=None)])
def test_invalid_timestamp_is_refused(bus: Bus, ts: Any) -> None:
    with pytest.raises(InvalidMessage):
        post(bus, ts=ts)
    assert not bus.path.exists()


@pytest.mark.parametrize("field", ["type", "project_id"])
@pytest.mark.parametrize("value", ["", "  ", None])
def test_type_and_project_are_required(bus: Bus, field: str, value: Any) -> None:
    with pytest.raises(Rejected, match=f"^{field} (is empty|must be text, not NoneType)$"):
        post(bus, **{field: value})
    with pytest.raises(Rejected, match=f"^{field} (is empty|must be text, not NoneType)$"):
        bus.append_many([{"type": "a", "project_id": "b"}, {"type": "a", "project_id": "b", field: value}])
    assert not bus.path.exists()


def test_replies_name_their_parents(bus: Bus) -> None:
    question = post(bus, "question")
    answer = post(bus, "answer", parents=[question])
    post(bus, "both", parents=(question, answer))
    post(bus, "from an empty iterator", parents=iter([]))
    assert [message.parents for message in bus.read()] == [[], [question], [question, answer], []]


def test_the_file_is_laid_out_as_documented(bus: Bus) -> None:
    """The first record without a blank line before it, every other with one."""
    post(bus, "one")
    post(bus, "two\n")
    bus.append_many([{"type": "t", "project_id": "p", "body": text} for text in ("three", "")])
    lines = bus.path.read_text().split("\n")
    assert lines[0] == "---"
    starts = [n for n, line in enumerate(lines) if line.startswith("msg_id: ")]
    assert [lines[start - 2 : start] for start in starts[1:]] == [["", "---"]] * 3
    assert [lines[start - 3] for start in starts[1:]] == ["one", "two", "three"]


@pytest.mark.parametrize("durability", CLASSES)
def test_an_appended_message_is_visible_to_all_readers_at_once(
    tmp_path: Path, durability: Durability
) -> None:
    bus = Bus(tmp_path / "new" / "folder" / "bus.yaml", durability=durability)
    for number in range(3):
        msg_id = post(bus, str(number))
        assert Bus(bus.path).read()[-1].msg_id == msg_id


ROUND_TRIP = [
    "",
    "\n",
    "\n\n\n",
    "plain",
    "final newline\n",
    "many final newlines\n\n\n\n",
    "---",
    "---\n",
    "a\n---\nb",
    "--- \n---  \n---\r\n---\r\r\n----\n-- -\n ---\n---x",
    "---\nmsg_id: MSG-1\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n---\nforged\n",
    "msg_id: MSG-1",
    "key: value\n- item\n? x\n# c\n&a *a !t |\n",
    "CRLF\r\nlines\r\n",
    "\r",
    "NUL \0 inside \0",
    "\ufeffBOM \u2028 \x85 \x1b[31m",
    "é漢字😀\U0010ffff",
    "undecodable \udcff\udc80 bytes",
    "tab\there",
    "x" * 300_000,
    "msg_id: " + "y" * 300_000,
]


def test_every_body_round_trips(bus: Bus) -> None:
    """Defects 1 and 2 of the original: a `---` line cut the body, the final newline was not kept."""
    for body in ROUND_TRIP:
        post(bus, body)
    assert bodies(bus.read()) == ROUND_TRIP
    assert bodies(bus.tail(len(ROUND_TRIP))) == ROUND_TRIP
    assert bus.verify().ok
    assert bus.verify().messages == len(ROUND_TRIP)


def test_bodies_that_quote_ids_do_not_move_a_reader(bus: Bus) -> None:
    """A body may begin with `msg_id: `, directly after the separator that closes the header."""
    first = post(bus, "first")
    post(bus, "second")
    for quoted in (first, "MSG-99980101-000000-000000000-PID00001-0001"):
        post(bus, f"msg_id: {quoted}\nis what I answer to")
    assert bodies(bus.read(first))[0] == "second"
    assert len(bus.read(first)) == 3
    with pytest.raises(SinceIdNotFound):
        bus.read("MSG-99980101-000000-000000000-PID00001-0001")
    assert post(Bus(bus.path, clock=lambda: NOON)).startswith("MSG-20260205-143052-")
    assert len(bus.tail(3)) == 3


def test_quoted_id_at_a_window_edge_is_not_taken_for_a_record(bus: Bus) -> None:
    from postroom.logs.busfile import BACKWARD_FIRST_BYTES

    for padding in range(BACKWARD_FIRST_BYTES - 80, BACKWARD_FIRST_BYTES - 20):
        bus.path.unlink(missing_ok=True)
        first = post(bus, "first")
        quoting = f"msg_id: {first}\n{'x' * padding}"
        made = post(bus, quoting)
        assert bodies(bus.read(first)) == [quoting]
        assert bodies(bus.tail(1)) == [quoting]
        assert post(Bus(bus.path, clock=lambda: NOON - timedelta(days=1))) > made


def test_records_across_window_ends_are_read_whole(bus: Bus) -> None:
    sent = [f"msg_id: {number:0300}" for number in range(3000)]
    bus.append_many([{"type": "t", "project_id": "p", "body": body} for body in sent])
    assert bodies(bus.read()) == sent
    assert bus.verify().ok


# ---- order -----------------------------------------------------------------------------------------


def test_ids_increase_when_the_clock_stands_still_or_steps_back(bus: Bus, clock: Clock) -> None:
    made = []
    for step in (0, 0, 1, -3600, 0, 1800, -86_400, 0):
        clock.step(step)
        made.append(post(bus))
        made += bus.append_many([{"type": "t", "project_id": "p"}] * 2)
    assert made == sorted(set(made))
    assert [message.msg_id for message in bus.read()] == made


def test_ids_increase_across_handles_with_different_clocks(bus: Bus, clock: Clock) -> None:
    late = Bus(bus.path, clock=lambda: NOON - timedelta(days=365))
    made = [post(handle) for _ in range(5) for handle in (bus, late)]
    assert made == sorted(set(made))


def test_ids_increase_across_a_rotation_and_a_clock_that_stepped_back(bus: Bus, clock: Clock) -> None:
    first = post(bus)
    bus.rotate()
    clock.step(-3600)
    second = post(Bus(bus.path, clock=clock))
    assert second > first


def test_ids_increase_after_a_writer_was_killed_at_the_start_of_a_file(bus: Bus, clock: Clock) -> None:
    first = post(bus)
    bus.rotate()
    bus.path.write_bytes(b"---\nms")
    clock.step(-3600)
    assert post(Bus(bus.path, clock=clock)) > first


def test_ids_increase_when_the_sequence_wraps(bus: Bus) -> None:
    made = bus.append_many([{"type": "t", "project_id": "p"}] * 10_050)
    assert made == sorted(set(made))


def test_foreign_last_id_does_not_affect_own_ids(bus: Bus, clock: Clock) -> None:
    before = post(bus)
    with bus.path.open("a") as file:
        file.write("\n---\nmsg_id: zzz\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n---\nforeign\n")
    clock.step(-3600)
    made = [post(bus), post(bus)]
    assert before < made[0]
    assert made == sorted(made)
    assert [message.msg_id for message in bus.read("zzz")] == made


# ---- append_many ------------------------------------------------------------------------------------


def test_append_many_takes_one_lock_and_one_write(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_write, real_flock = os.write, fcntl.flock

    def write(fd: int, data: bytes) -> int:
        calls.append("write")
        return real_write(fd, data)

    def flock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            calls.append("lock")
        real_flock(fd, operation)

    post(bus, "before")
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr("postroom.system.lock.flock", flock)
    made = bus.append_many(
        {"type": "t", "project_id": "p", "task_id": "k", "run_id": "r", "body": str(number)}
        for number in range(100)
    )
    assert calls == ["lock", "write"]
    assert [message.msg_id for message in bus.read()[1:]] == made
    assert bodies(bus.read()[1:]) == [str(number) for number in range(100)]


def test_append_many_of_nothing_does_nothing(bus: Bus) -> None:
    assert bus.append_many([]) == []
    assert not bus.path.exists()


def test_append_many_with_one_bad_message_writes_none(bus: Bus, tmp_path: Path) -> None:
    good = {"type": "t", "project_id": "p"}
    for bad, sentence in (
        ({**good, "typo": 1, "also": 2}, "unknown message fields: also, typo"),
        ({**good, "body": 5}, "the body must be text, not int"),
        ({**good, "attachment": "../x"}, f"attachment '../x' is not inside {tmp_path}"),
        ({**good, "ts": "never"}, "'never' is not an RFC 3339 time such as 2026-02-05T14:30:52.123456Z"),
    ):
        with pytest.raises(Rejected) as caught:
            bus.append_many([good, bad, good])
        assert str(caught.value) == sentence
    assert not bus.path.exists()


# ---- attachments ------------------------------------------------------------------------------------


def test_an_attachment_is_stored_relative_to_the_root(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "inner")
    for given in ("out/report.md", Path("out", "x y.md"), tmp_path / "absolute.md", "a/../b.md", "link/c.md"):
        post(bus, attachment=given)
    assert [message.attachment_path for message in bus.read()] == [
        "out/report.md", "out/x y.md", "absolute.md", "b.md", "inner/c.md"
    ]  # fmt: skip
    post(bus)
    assert bus.read()[-1].attachment_path == ""


def test_the_root_is_the_bus_files_folder_unless_given(tmp_path: Path) -> None:
    assert Bus(tmp_path / "a" / "bus.yaml").root == tmp_path / "a"
    bus = Bus(tmp_path / "a" / "bus.yaml", root=tmp_path)
    assert bus.root == tmp_path
    post(bus, attachment=tmp_path / "b" / "file")
    assert bus.read()[0].attachment_path == "b/file"


@pytest.mark.parametrize(
    "outside",
    ["..", "../x", "a/../../x", "/etc/passwd", ".", "", "a\0b", "escape/x", "escape", "loop/x", b"x"],
)
def test_an_attachment_outside_the_root_is_refused(bus: Bus, tmp_path: Path, outside: Any) -> None:
    (tmp_path / "escape").symlink_to(tmp_path.parent)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UnsafePath, match=r"^attachment .* (is not inside|is not a path|cannot be resolved)"):
        post(bus, attachment=outside)
    assert not bus.path.exists()


# ---- reading ---------------------------------------------------------------------------------------


def test_reading_a_missing_bus_does_not_create_it(bus: Bus) -> None:
    assert bus.read() == bus.tail() == bus.query() == bus.poll(timeout_s=0) == []
    assert bus.archives() == []
    assert bus.read("MSG-1") == []
    assert bus.count() == 0
    assert bus.rotate() is None
    assert bus.verify().ok
    assert not bus.path.exists()


def test_a_bus_in_a_folder_that_does_not_exist_is_empty_too(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "missing" / "bus.yaml")
    assert bus.read(archives=True) == bus.tail() == bus.poll(timeout_s=0) == []
    assert bus.archives() == []
    assert not bus.path.parent.exists()


def test_since_means_after_in_the_file(bus: Bus) -> None:
    made = [post(bus, str(number)) for number in range(5)]
    for position, msg_id in enumerate(made):
        assert bodies(bus.read(msg_id)) == [str(n) for n in range(position + 1, 5)]


def test_since_is_a_position_and_not_a_comparison(bus: Bus) -> None:
    """The original makes ids before it takes the lock, so its files are not always in their order."""
    for msg_id in ("MSG-3", "MSG-1", "MSG-2"):
        with bus.path.open("a") as file:
            header = f"msg_id: {msg_id}\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p"
            file.write(f"---\n{header}\n---\nx\n\n")
    assert [message.msg_id for message in bus.read("MSG-3")] == ["MSG-1", "MSG-2"]
    assert [message.msg_id for message in bus.read("MSG-2")] == []


def test_limit_keeps_the_first(bus: Bus) -> None:
    made = [post(bus, str(number)) for number in range(5)]
    assert bodies(bus.read(limit=2)) == ["0", "1"]
    assert bodies(bus.read(made[1], 2)) == ["2", "3"]
    assert bus.read(limit=0) == []
    calls: list[Callable[[], object]] = [
        lambda: bus.read(limit=-1), lambda: bus.query(limit=-1), lambda: bus.tail(-1)
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidMessage, match="0 or more"):
            call()


@pytest.mark.parametrize("unknown", ["MSG-1", "\ud800", "LEGACY-LINE-000000001", "LEGACY-LINE-x"])
def test_unknown_since_id_raises(bus: Bus, unknown: str) -> None:
    post(bus)
    for call in (bus.read, lambda since: bus.poll(since, 0), lambda since: next(bus.follow(since))):
        with pytest.raises(SinceIdNotFound) as caught:
            call(unknown)
        assert str(caught.value) == f"since id {unknown!r} not found in {bus.path}: it is not in this bus"
        assert (caught.value.since_id, caught.value.archive) == (unknown, None)
        assert isinstance(caught.value, LookupError)


def test_scan_gives_the_same_as_read(bus: Bus) -> None:
    made = [post(bus, str(number)) for number in range(10)]
    assert list(bus.scan()) == bus.read()
    assert list(bus.scan(made[3])) == bus.read(made[3])


def test_tail_gives_the_last_in_order(bus: Bus) -> None:
    for number in range(10):
        post(bus, f"{number} {'x' * 5000}")
    for n in (0, 1, 3, 10, 11, 1000):
        assert bodies(bus.tail(n)) == bodies(bus.read())[max(0, 10 - n) :]
    assert bus.count() == 10


def bytes_read_by(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    total = 0
    real = os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        nonlocal total
        data = real(fd, count, offset)
        total += len(data)
        return data

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", pread)
        call()
    return total


def test_since_and_tail_read_only_the_end_of_the_file(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for _ in range(2):
        bus.append_many([{"type": "t", "project_id": "p", "body": "x" * 100}] * 20_000)
        recent = bus.tail(10)[0].msg_id
        costs.append(bytes_read_by(lambda recent=recent: bus.read(recent), monkeypatch))  # type: ignore[misc]
        costs.append(bytes_read_by(lambda: bus.tail(100), monkeypatch))
    assert bus.path.stat().st_size > 8_000_000
    assert costs[:2] == costs[2:], "twice the file, the same cost"
    assert max(costs) < 150_000


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["a", "b", "c", "d"]),
        ({"type": "x"}, ["a", "b"]),
        ({"type": "X"}, []),
        ({"project_id": "q"}, ["c"]),
        ({"task_id": "t1"}, ["a", "d"]),
        ({"task_id": ""}, ["b", "c"]),
        ({"run_id": "r1", "type": "y"}, ["d"]),
        ({"since": NOON + timedelta(seconds=1)}, ["b", "c", "d"]),
        ({"until": NOON + timedelta(seconds=1)}, ["a"]),
        ({"since": "2026-02-05T14:30:53.123456Z", "until": "2026-02-05T15:30:55.123456+01:00"}, ["b", "c"]),
        ({"limit": 2}, ["a", "b"]),
        ({"type": "x", "limit": 1}, ["a"]),
    ],
)
def test_query_returns_messages_that_match_every_field(
    bus: Bus, clock: Clock, wanted: dict[str, Any], found: list[str]
) -> None:
    for fields in (
        {"body": "a", "type": "x", "task_id": "t1"},
        {"body": "b", "type": "x", "run_id": "r1"},
        {"body": "c", "type": "y", "project_id": "q"},
        {"body": "d", "type": "y", "task_id": "t1", "run_id": "r1"},
    ):
        post(bus, **fields)
        clock.step(1)
    assert bodies(bus.query(**wanted)) == found


def test_query_finds_the_replies_of_a_message(bus: Bus) -> None:
    question = post(bus, "question")
    post(bus, "unrelated")
    post(bus, "reply", parents=["other", question])
    assert bodies(bus.query(parent=question)) == ["reply"]
    bus.rotate()
    assert bus.query(parent=question) == []
    assert bodies(bus.query(parent=question, archives=True)) == ["reply"]
    with pytest.raises(InvalidMessage):
        bus.query(since="2026-02-05")


# ---- waiting ----------------------------------------------------------------------------------------


def test_poll_gives_an_empty_list_on_timeout(bus: Bus) -> None:
    last = post(bus)
    for timeout_s in (0, 0.02):
        assert bus.poll(last, timeout_s=timeout_s) == []


def test_poll_returns_all_messages(bus: Bus) -> None:
    made = bus.append_many([{"type": "t", "project_id": "p", "body": "x" * 1000}] * 1000)
    assert [message.msg_id for message in bus.poll()] == made
    assert [message.msg_id for message in bus.poll(made[99], timeout_s=0)] == made[100:]


@pytest.mark.parametrize("exists", [False, True])
def test_poll_waits_for_new_messages(tmp_path: Path, exists: bool) -> None:
    bus = Bus(tmp_path / "bus.yaml", poll_interval_s=3600)
    last = post(bus) if exists else ""
    got: list[BusMessage] = []
    waiter = threading.Thread(target=lambda: got.extend(bus.poll(last)))
    waiter.start()
    post(Bus(bus.path), "new")
    waiter.join()
    assert bodies(got) == ["new"]


def test_follow_yields_existing_and_then_new_messages(bus: Bus) -> None:
    first = post(bus, "0")
    post(bus, "1")
    follower = bus.follow(first)
    assert next(follower).body == "1"
    for number in range(2, 6):
        post(bus, str(number))
        assert next(follower).body == str(number)


def test_follow_ends_when_stop_returns_true(bus: Bus) -> None:
    post(bus, "0")
    asked = iter([False, False, True])
    assert bodies(list(bus.follow(stop=lambda: next(asked)))) == ["0"]


def test_a_follower_survives_rotations(bus: Bus) -> None:
    follower = bus.follow(post(bus, "start"))
    post(bus, "begun")
    assert next(follower).body == "begun"
    for number in range(42):
        post(bus, str(number))
        if number % 3 == 0:
            bus.rotate()
        if number % 7 == 6:
            new = [str(n) for n in range(number - 6, number + 1)]
            assert bodies(list(itertools.islice(follower, 7))) == new


def test_a_follower_started_before_the_bus_reads_later_archives(bus: Bus) -> None:
    polls = iter(range(100))

    def stop() -> bool:
        match next(polls):
            case 0:  # there was nothing; now a whole file is written and archived
                post(bus, "0")
                bus.rotate()
                post(bus, "1")
                bus.rotate()
                post(bus, "2")
        return False

    assert bodies(list(itertools.islice(bus.follow(stop=stop), 3))) == ["0", "1", "2"]


def test_a_new_follower_does_not_begin_in_the_archives_unless_asked(bus: Bus) -> None:
    post(bus, "old")
    bus.rotate()

    def stop() -> bool:
        if bus.path.exists():
            return True
        post(bus, "new")
        return False

    assert bodies(list(bus.follow(stop=stop))) == ["new"]
    assert bodies(list(itertools.islice(bus.follow(archives=True), 2))) == ["old", "new"]


def test_a_second_rotation_while_the_follower_changes_files_loses_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race: another rotation happens between listing the archives and opening the bus file."""
    from postroom.logs import busfile

    follower = bus.follow()
    post(bus, "0")
    assert next(follower).body == "0"
    bus.rotate()
    post(bus, "1")
    real = busfile.open_position
    left = [3]

    def open_after_a_rotation(path: Path) -> Any:
        if path == bus.path and left[0]:
            left[0] -= 1
            bus.rotate()
            if left[0] != 1:  # at first the name is missing, later it is the next file
                post(bus, f"after {left[0]}")
        return real(path)

    monkeypatch.setattr(busfile, "open_position", open_after_a_rotation)
    assert bodies(list(itertools.islice(follower, 2))) == ["1", "after 2"]
    post(bus, "end")
    assert bodies(list(itertools.islice(follower, 2))) == ["end", "after 0"]


def test_follower_reads_messages_written_just_before_a_rotation(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postroom.logs import busfile

    follower = bus.follow()
    post(bus, "0")
    assert next(follower).body == "0"
    real = busfile.identity
    pending = ["between"]

    def identity(path: Path) -> Any:
        if path == bus.path and pending:  # the file was read to its end, and is not yet known to be rotated
            post(bus, pending.pop())
            bus.rotate()
            post(bus, "next")
        return real(path)

    monkeypatch.setattr(busfile, "identity", identity)
    assert bodies(list(itertools.islice(follower, 2))) == ["between", "next"]


# ---- rotation --------------------------------------------------------------------------------------


def test_rotation_renames_the_file_and_the_next_write_begins_a_new_one(bus: Bus) -> None:
    post(bus, "old")
    content = bus.path.read_bytes()
    archive = bus.rotate()
    assert archive == bus.path.with_name("messagebus.yaml.20260205-143052.archived")
    assert archive.read_bytes() == content
    assert not bus.path.exists()
    post(bus, "new")
    assert bodies(bus.read()) == ["new"]
    assert bodies(bus.read(archives=True)) == ["old", "new"]


def test_archives_of_one_second_or_a_stepped_clock_have_ordered_names(bus: Bus, clock: Clock) -> None:
    """Defect 5 of the original: archives of the same second overwrote each other."""
    made = []
    for number, step in enumerate((0, 0, 0, -5, 0, 60, 0)):
        clock.step(step)
        post(bus, str(number))
        made.append(bus.rotate())
    assert bus.archives() == made
    assert len(set(made)) == 7
    assert bodies(bus.read(archives=True)) == [str(number) for number in range(7)]


def test_more_archives_of_one_second_than_four_digits_hold_stay_in_order(bus: Bus) -> None:
    stem = f"{bus.path.name}.20260205-143052"
    for number in (9_998, 9_999, 10_000):
        (bus.path.parent / f"{stem}-{number}.archived").touch()
    post(bus)
    assert bus.rotate() == bus.path.with_name(f"{stem}-10001.archived")
    assert [archive.name.rpartition("-")[2] for archive in bus.archives()] == [
        "9998.archived", "9999.archived", "10000.archived", "10001.archived"
    ]  # fmt: skip


def test_other_files_are_not_archives(bus: Bus, tmp_path: Path) -> None:
    for name in (
        "messagebus.yaml.archived",
        "messagebus.yaml.20260205-143052.archived.bak",
        "xmessagebus.yaml.20260205-143052.archived",
        "messagebus.yaml2.20260205-143052.archived",
        "messagebus.yaml.20260205-14305٢.archived",
    ):
        (tmp_path / name).write_text("not ours")
    assert bus.archives() == []


def test_rotation_below_the_size_does_nothing(bus: Bus) -> None:
    bus.path.touch()
    assert bus.rotate() is None
    post(bus)
    size = bus.path.stat().st_size
    assert bus.rotate(min_bytes=size + 1) is None
    assert bus.rotate(min_bytes=size) is not None


def test_rotate_bytes_archives_before_a_file_exceeds_it(tmp_path: Path, clock: Clock) -> None:
    bus = Bus(tmp_path / "bus.yaml", rotate_bytes=1000, clock=clock)
    made = [post(bus, "x" * (number % 7 * 50)) for number in range(50)]
    big = post(bus, "y" * 2000)
    made += [big, post(bus)]
    sizes = {path: path.stat().st_size for path in [*bus.archives(), bus.path]}
    over = [path for path, size in sizes.items() if size > 1000]
    assert len(over) == 1, "only a message that is larger by itself"
    assert [message.msg_id for message in Bus(over[0]).read()] == [big]
    assert [message.msg_id for message in bus.read(archives=True)] == made


def test_rotated_since_id_raises_and_archives_find_it(bus: Bus) -> None:
    made = []
    for number in range(6):
        made.append(post(bus, str(number)))
        if number in {1, 3}:
            bus.rotate()
    for call in (bus.read, lambda since: bus.poll(since, 0), lambda since: next(bus.follow(since))):
        with pytest.raises(SinceIdNotFound, match=r"it was rotated into .*; pass archives=True") as caught:
            call(made[0])
        assert caught.value.archive == bus.archives()[0]
    for position, since in enumerate(made):
        expected = [str(number) for number in range(position + 1, 6)]
        assert bodies(bus.read(since, archives=True)) == expected
        assert bodies(bus.poll(since, 0, archives=True)) == expected
        assert bodies(list(itertools.islice(bus.follow(since, archives=True), len(expected)))) == expected
    assert bodies(bus.read(made[0], 2, archives=True)) == ["1", "2"]


def test_unknown_id_raises_between_rotation_and_next_file(bus: Bus) -> None:
    known = post(bus)
    bus.rotate()
    with pytest.raises(SinceIdNotFound):
        bus.read("MSG-unknown")
    assert bus.read(known, archives=True) == []


def test_a_reader_whose_archive_was_removed_continues_with_the_next(bus: Bus) -> None:
    post(bus, "0")
    follower = bus.follow()
    assert next(follower).body == "0"
    removed = bus.rotate()
    assert removed is not None
    post(bus, "1")
    bus.rotate()
    post(bus, "2")
    removed.unlink()
    assert bodies(list(itertools.islice(follower, 2))) == ["1", "2"]


def test_a_writer_follows_a_rotation_or_removal_by_another_process(bus: Bus) -> None:
    post(bus, "0")
    Bus(bus.path, clock=lambda: NOON).rotate()
    post(bus, "1")
    assert bodies(bus.read()) == ["1"]
    bus.path.unlink()
    post(bus, "2")
    assert bodies(bus.read()) == ["2"]


# ---- locking ---------------------------------------------------------------------------------------


def test_the_lock_is_flock_on_the_bus_file_itself(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock also excludes writers of conductor-loop."""
    post(bus)
    real = os.write
    found: list[str] = []

    def write(fd: int, data: bytes) -> int:
        with open(bus.path) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append("free")
            except BlockingIOError:
                found.append("locked")
        return real(fd, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        post(bus)
    assert found == ["locked"]
    with open(bus.path) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released afterwards


def test_a_lock_timeout_raises_and_writes_nothing(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", lock_timeout_s=0.02)
    post(bus, "before")
    with open(bus.path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for call in (
            lambda: post(bus),
            lambda: bus.append_many([{"type": "t", "project_id": "p"}]),
            bus.rotate,
        ):
            with pytest.raises(LockTimeout, match=r"could not lock .* within 0.02 s"):
                call()
        assert bodies(bus.read()) == ["before"], "readers do not wait for the lock"
        assert bodies(bus.tail(1)) == ["before"]
    post(bus, "after")
    assert bodies(bus.read()) == ["before", "after"]


def test_append_gives_up_on_a_file_that_keeps_being_replaced(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(bus)
    monkeypatch.setattr(bus._file, "lock_end", lambda _: -1)
    with pytest.raises(Unavailable, match="is replaced faster than it can be locked"):
        post(bus)


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "folder"])
def test_only_a_regular_file_is_a_bus(tmp_path: Path, kind: str) -> None:
    """Defect 7 of the original; the race is in the integration tests."""
    path = tmp_path / "bus.yaml"
    target = tmp_path / "target.yaml"
    match kind:
        case "symlink":
            post(Bus(target))
            path.symlink_to(target)
        case "dangling":
            path.symlink_to(target)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    content = target.read_bytes() if target.exists() else None
    bus = Bus(path)
    for call in (
        lambda: post(bus),
        bus.read,
        bus.tail,
        bus.count,
        bus.rotate,
        bus.verify,
        lambda: bus.poll("", 0),
    ):
        with pytest.raises(UnsafePath, match=r"is a symlink, which is refused$|is not a regular file$"):
            call()
    assert (target.read_bytes() if target.exists() else None) == content


def test_a_symlink_put_in_place_of_an_open_bus_is_refused(bus: Bus, tmp_path: Path) -> None:
    post(bus, "kept")
    target = tmp_path / "target"
    bus.path.rename(target)
    content = target.read_bytes()
    bus.path.symlink_to(target)
    for call in (lambda: post(bus), bus.rotate, bus.read):
        with pytest.raises(UnsafePath):
            call()
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"path": ""}, "the bus path is empty"),
        ({"path": "  "}, "the bus path is empty"),
        ({"lock_timeout_s": 0}, "lock_timeout_s must be "),
        ({"lock_timeout_s": float("nan")}, "lock_timeout_s must be "),
        ({"poll_interval_s": -1}, "poll_interval_s must be "),
        ({"rotate_bytes": 0}, "rotate_bytes must be positive, not 0"),
        ({"durability": "disk"}, "durability must be one of os, group, fsync, not 'disk'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        Bus(**{"path": "bus.yaml", **arguments})
    assert str(caught.value).startswith(sentence)


# ---- verify and discover ------------------------------------------------------------------------------


def test_verify_reports_counts(bus: Bus) -> None:
    made = [post(bus, body) for body in ("a", "b", "c")]
    report = bus.verify()
    assert (report.messages, report.checked, report.unchecked, report.damaged) == (3, 3, 0, ())
    assert (report.path, report.bytes, report.torn_tail_bytes) == (
        str(bus.path), bus.path.stat().st_size, 0
    )  # fmt: skip
    assert report.ok
    assert len(made) == 3


def test_damage_is_skipped_reported_logged_once_and_left_in_place(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    for body in ("one", "two", "three"):
        post(bus, body)
    whole = bus.path.read_bytes()
    damaged = whole.replace(b"two", b"twO")
    bus.path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "postroom.bus"):
        for _ in range(3):
            assert bodies(bus.read()) == ["one", "three"]
            assert bodies(bus.tail(2)) == ["one", "three"]
    offset = whole.index(b"---", whole.index(b"one\n"))
    length = whole.index(b"---", whole.index(b"two\n")) - offset
    assert [record.message for record in caplog.records] == [
        f"{bus.path}: skipped {length} bytes at offset {offset}: the checksum does not match"
    ]
    report = bus.verify()
    assert not report.ok
    assert [(damage.offset, damage.length) for damage in report.damaged] == [(offset, length)]
    assert bus.path.read_bytes() == damaged


def test_a_torn_tail_is_not_damage_but_a_destroyed_last_record_is(bus: Bus) -> None:
    post(bus, "one")
    size = bus.path.stat().st_size
    post(bus, "two")
    whole = bus.path.read_bytes()
    bus.path.write_bytes(whole[:-10])
    report = bus.verify()
    assert report.ok
    assert report.torn_tail_bytes == len(whole) - 10 - size - len(SEPARATOR)
    bus.path.write_bytes(whole[:size] + whole[size:].replace(b"---\nmsg_id", b"---\nmsg-id"))
    report = bus.verify()
    assert not report.ok
    assert (report.bytes, report.torn_tail_bytes) == (len(whole), 0)


def test_discover_finds_the_buses_below_a_folder(tmp_path: Path) -> None:
    buses = [Bus(tmp_path / name) for name in ("b.yaml", "deep/er/a.yaml", "deep/c")]
    for bus in buses:
        post(bus)
        bus.rotate()
        post(bus)
    (tmp_path / "other.yaml").write_text("key: value\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "link.yaml").symlink_to(buses[0].path)
    os.mkfifo(tmp_path / "fifo.yaml")
    assert discover(tmp_path) == sorted(bus.path for bus in buses)
    assert discover(tmp_path / "missing") == []


# ---- life ------------------------------------------------------------------------------------------


def test_a_closed_bus_opens_again_when_it_is_used(bus: Bus) -> None:
    post(bus, "0")
    bus.close()
    bus.close()
    post(bus, "1")
    with bus as same:
        assert same is bus
        post(bus, "2")
    assert bodies(bus.read()) == ["0", "1", "2"]


def test_no_use_of_a_bus_leaves_descriptors_open(tmp_path: Path) -> None:
    since = post(Bus(tmp_path / "bus.yaml"), "0")
    before = descriptors()
    for _ in range(5):
        bus = Bus(tmp_path / "bus.yaml", clock=lambda: NOON)
        post(bus)
        bus.read()
        bus.read(since, limit=0, archives=True)
        bus.read(limit=1)
        bus.scan(since, archives=True)  # never iterated
        bus.tail(1)
        bus.count()
        bus.query(limit=1)
        bus.poll(since, 0, archives=True)
        next(bus.follow(since, archives=True)).body  # noqa: B018 - then given up
        bus.verify()
        bus.rotate()
        with pytest.raises(SinceIdNotFound):
            bus.read(since)
        with pytest.raises(SinceIdNotFound):
            bus.scan("MSG-unknown", archives=True)
        del bus  # never closed
    assert descriptors() == before


def test_threads_share_a_bus(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", rotate_bytes=20_000)
    made: list[list[str]] = [[] for _ in range(8)]

    def write(mine: list[str]) -> None:
        for number in range(50):
            mine.append(post(bus, str(number)))
            mine.extend(bus.append_many([{"type": "t", "project_id": "p"}] * 2))

    threads = [threading.Thread(target=write, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = [message.msg_id for message in bus.read(archives=True)]
    assert read == sorted(read)
    assert sorted(itertools.chain.from_iterable(made)) == read
    for mine in made:
        assert mine == sorted(mine)


OTHER_FILES = {
    "markdown": b"# A project\n\nText with a rule below it.\n\n---\n\nMore text.\n",
    "front matter": b"---\ntitle: A page\nauthor: ada\n---\n\nText.\n",
    "json": b'{"msg_id": "m-1", "type": "note"}\n',
    "indented json": b'{\n  "msg_id": "m-1",\n  "ts": 1\n}\n',
    "yaml": b"key: value\n",
    "text without a newline": b"hello",
    "binary": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "long": b"word " * 100_000,
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_not_a_bus_is_neither_written_nor_renamed(tmp_path: Path, name: str) -> None:
    bus = Bus(tmp_path / "file")
    bus.path.write_bytes(OTHER_FILES[name])
    for change in (
        lambda: bus.append(type="note", project_id="p"),
        lambda: bus.append(type="note", project_id="p"),  # a second attempt is refused as well
        lambda: bus.append_many([{"type": "note", "project_id": "p"}]),
        bus.rotate,
        bus.need_bus,
    ):
        with pytest.raises(UnsafePath, match="is not a bus file"):
            change()
    assert bus.path.read_bytes() == OTHER_FILES[name]
    assert list(tmp_path.iterdir()) == [bus.path]


def test_a_handle_refuses_another_file_that_took_the_place_of_its_bus(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "file")
    bus.append(type="note", project_id="p")
    bus.path.unlink()
    bus.path.write_text("key: value\n")
    with pytest.raises(UnsafePath, match="is not a bus file"):
        bus.append(type="note", project_id="p")
    bus.path.unlink()
    assert bus.append(type="note", project_id="p")
    assert bus.count() == 1


RECORD = b"---\nmsg_id: M-1\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n---\nbody\n"
BUS_FILES = {
    "empty": b"",
    "blank": b"\n \n",
    "foreign": RECORD,
    "crlf": RECORD.replace(b"\n", b"\r\n"),
    "byte order mark": b"\xef\xbb\xbf" + RECORD,
    "another order of keys": b"---\ntype: t\nmsg_id: M-1\nproject_id: p\n---\nbody\n",
    "comment in the header": b"---\n# written by hand\nmsg_id: M-1\ntype: t\nproject_id: p\n---\nbody\n",
    "torn": RECORD[:8],
    "damaged first line": b"-?" + RECORD[2:],
    "damaged far behind the start": b"text\n" * 10_000 + b"\n" + RECORD,
    "zeros of a power cut": bytes(4096) + b"end of a body\n",
    "legacy lines": b"[2026-02-05 14:30:52] FACT: one\n",
    "text before a legacy line": b"log of run 1\n[2026-02-05 14:30:52] FACT: one\n",
}


@pytest.mark.parametrize("name", BUS_FILES)
def test_foreign_and_damaged_buses_accept_appends(tmp_path: Path, name: str) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.path.write_bytes(BUS_FILES[name])
    bus.need_bus()
    msg_id = bus.append(type="note", project_id="p", body="mine")
    assert bus.path.read_bytes().startswith(BUS_FILES[name])
    assert [message.body for message in bus.tail(1) if message.msg_id == msg_id] == ["mine"]
