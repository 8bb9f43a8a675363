"""The files of a session: lock, lines, cursors that no crash moves back, and atomic compaction."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.formats.queuewire import TOPICS
from postroom.errors import DamagedState, LockTimeout, Unavailable, UnsafePath, WriteFailed
from postroom.logs import queuefile
from postroom.logs.queuecursors import ReadProgress
from postroom.logs.queuefile import WINDOW_BYTES, SessionFiles
from postroom.system import lock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "root" / "sessions" / "s"


@pytest.fixture
def files(folder: Path) -> Iterator[SessionFiles]:
    opened = SessionFiles(folder, "os", 10.0)
    yield opened
    opened.close()


def hold(files: SessionFiles) -> None:
    with files.locked():
        pass


def add(files: SessionFiles, *lines: bytes) -> None:
    for line in lines:
        files.append(line, lambda: None)


def place(files: SessionFiles, agent_id: str, reading: ReadProgress) -> None:
    with files.locked():
        files.write_progress(agent_id, ReadProgress(-1, {"": -1}, [-1]), reading)


class Crash(BaseException):
    """Simulates the death of the process."""


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, call: int, *names: str) -> Iterator[list[str]]:
    """Raise instead of the n-th of these `os` calls (counted from 0)."""
    made: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if len(made) >= call:
                raise Crash(name)
            made.append(name)
            return real(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        with suppress(Crash):
            yield made


# ---- a reading -------------------------------------------------------------------------------------


def test_all_topics_before_the_cursor_are_read() -> None:
    reading = ReadProgress(100, {"ask": 300}, [500])
    assert reading.has_read("status", 99)
    assert not reading.has_read("status", 100)
    assert reading.has_read("ask", 299)
    assert not reading.has_read("ask", 300)
    assert reading.has_read("answer", 500)


def test_the_search_for_unread_starts_at_the_slowest_topic_asked_for() -> None:
    reading = ReadProgress(100, {"ask": 300, "answer": 200})
    assert reading.first_unread(None) == 100
    assert reading.first_unread(frozenset({"ask"})) == 300
    assert reading.first_unread(frozenset({"ask", "answer"})) == 200
    assert reading.first_unread(frozenset({"ask", "status"})) == 100
    assert reading.first_unread(TOPICS) == 100


def test_empty_topic_set_starts_at_the_cursor() -> None:
    assert ReadProgress(100, {"ask": 300}).first_unread(frozenset()) >= 100


# ---- the lock --------------------------------------------------------------------------------------


def test_nothing_is_made_before_the_first_lock(files: SessionFiles, folder: Path) -> None:
    assert not files.exists()
    assert files.open_reader() == -1
    assert files.cursors.agents() == []
    assert not folder.parent.exists()


def test_two_holders_exclude_each_other(files: SessionFiles, folder: Path) -> None:
    other = SessionFiles(folder, "os", 0.01)
    with files.locked(), pytest.raises(LockTimeout, match=r"sessions/s within 0\.01 s"):
        hold(other)
    with other.locked() as size:
        assert size == 0
    other.close()


def test_a_timeout_leaves_the_lock_with_its_holder(files: SessionFiles, folder: Path) -> None:
    first, second = (SessionFiles(folder, "os", 0.01) for _ in range(2))
    with files.locked():
        for other in (first, first, second):
            with pytest.raises(LockTimeout):
                hold(other)
    first.close()
    second.close()


def test_threads_exclude_each_other(files: SessionFiles) -> None:
    def send() -> None:
        for _ in range(50):
            add(files, b"line\n")

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.messages.read_bytes() == b"line\n" * 200


@pytest.mark.parametrize("name", ["messages.jsonl", ".lock"])
def test_a_symlink_in_place_of_a_file_is_refused(files: SessionFiles, folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    victim = folder.parent / "victim"
    victim.write_text("precious")
    (folder / name).symlink_to(victim)
    with pytest.raises(UnsafePath, match="symlink"):
        hold(files)
    assert victim.read_text() == "precious"


def test_a_symlink_created_later_is_refused(files: SessionFiles, folder: Path) -> None:
    add(files, b"one\n")
    files.messages.rename(folder / "moved")
    files.messages.symlink_to(folder / "moved")
    with pytest.raises(UnsafePath, match="symlink"):
        hold(files)
    assert (folder / "moved").read_bytes() == b"one\n"


def test_a_refusal_does_not_keep_the_lock(files: SessionFiles, folder: Path) -> None:
    test_a_symlink_created_later_is_refused(files, folder)
    files.messages.unlink()
    add(files, b"two\n")
    assert files.messages.read_bytes() == b"two\n"


def test_removed_session_is_created_again(files: SessionFiles, folder: Path) -> None:
    add(files, b"one\n")
    files.messages.unlink()
    (folder / ".lock").unlink()
    folder.rmdir()
    add(files, b"two\n")
    assert files.messages.read_bytes() == b"two\n"


def test_locking_gives_up_on_a_session_that_keeps_being_replaced(
    files: SessionFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed_after_waits(monkeypatch, folder / ".lock", queuefile.REOPENS_MAX)
    with pytest.raises(Unavailable, match="replaced faster"):
        hold(files)


def test_a_lock_file_replaced_during_the_wait_is_opened_again(
    files: SessionFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed_after_waits(monkeypatch, folder / ".lock", 2)
    other = SessionFiles(folder, "os", 0.01)
    with files.locked(), pytest.raises(LockTimeout):  # both have the file that has the name now
        hold(other)
    other.close()


def removed_after_waits(monkeypatch: pytest.MonkeyPatch, lock_file: Path, times: int) -> None:
    """Remove the lock file each time that a process has just locked it."""
    real = lock.take_turn
    left = [times]

    def take_turn(fd: int, timeout_s: float, path: Path) -> float:
        ends = real(fd, timeout_s, path)
        if left[0]:
            left[0] -= 1
            lock_file.unlink()
        return ends

    monkeypatch.setattr(lock, "take_turn", take_turn)


def test_a_reopening_thread_waits_for_the_holder(files: SessionFiles) -> None:
    add(files, b"one\n")
    with files.locked() as size:
        reopener = threading.Thread(target=files.reopen)
        reopener.start()
        reopener.join(0.2)
        assert files.read(0, size) == b"one\n"
    reopener.join()
    add(files, b"two\n")
    assert files.messages.read_bytes() == b"one\ntwo\n"


# ---- lines -----------------------------------------------------------------------------------------


def test_a_line_starts_a_new_line_after_an_unfinished_one(files: SessionFiles, folder: Path) -> None:
    folder.mkdir(parents=True)
    files.messages.write_bytes(b"half")
    add(files, b"one\n", b"two\n")
    assert files.messages.read_bytes() == b"half\none\ntwo\n"


def test_an_unfinished_line_written_later_is_noticed(files: SessionFiles) -> None:
    add(files, b"one\n")
    with files.messages.open("ab") as foreign:
        foreign.write(b"half")
    add(files, b"two\n")
    assert files.messages.read_bytes() == b"one\nhalf\ntwo\n"


def test_lines_longer_than_a_window_are_read_whole(files: SessionFiles) -> None:
    content = b"a\n" + b"b" * 3 * WINDOW_BYTES + b"\n\n" + b"c" * WINDOW_BYTES + b"\nhalf"
    add(files, content)
    with files.locked() as size:
        found = list(files.lines(0, size))
        assert [line for _, line in found] == content.split(b"\n")[:-1]
        assert all(content[offset:].startswith(line + b"\n") for offset, line in found)
        assert list(files.lines(2, size)) == found[1:]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", 0), (b"half", 0), (b"one\n", 4), (b"one\nhalf", 4), (b"\n" + b"x" * 100, 1), (b"x" * 100, 0)],
)
def test_the_high_water_mark_is_the_end_of_the_last_whole_line(
    files: SessionFiles, content: bytes, expected: int
) -> None:
    add(files, b"")
    files.messages.write_bytes(content)
    with files.locked() as size:
        assert files.high_water(size) == expected


# ---- cursors ---------------------------------------------------------------------------------------


def test_an_agent_without_files_starts_at_the_beginning(files: SessionFiles) -> None:
    assert files.cursors.read("a") == ReadProgress()


@pytest.mark.parametrize("text", [b"4\n", b"4", b" 4 \n", b"0004\n"])
def test_a_cursor_is_a_decimal_offset(files: SessionFiles, text: bytes) -> None:
    add(files, b"one\n")
    files.cursors.folder.mkdir()
    (files.cursors.folder / "a.cursor").write_bytes(text)
    with files.locked() as size:
        assert files.trusted_progress("a", size) == ReadProgress(4)


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"-1", b"1.5", b"four", b"\xb2", "٤".encode(), b"4 4", b"\0" * 8, b"9" * 19, b"3", b"5"],
)
def test_invalid_cursor_is_damaged_state(files: SessionFiles, text: bytes) -> None:
    add(files, b"one\n")
    files.cursors.folder.mkdir()
    (files.cursors.folder / "a.cursor").write_bytes(text)
    with files.locked() as size, pytest.raises(DamagedState, match="postroom queue repair"):
        files.trusted_progress("a", size)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'{"topics":{"ask":"4"},"taken":[]}',
        b'{"topics":{"ask":4}}',
        b'{"topics":{"ask":3},"taken":[]}',
        b'{"topics":{"ask":8},"taken":[]}',
        b'{"topics":{"ask":-1},"taken":[]}',
        b"\xff",
    ],
)
def test_invalid_topics_file_is_damaged_state(files: SessionFiles, text: bytes) -> None:
    add(files, b"one\n")
    files.cursors.folder.mkdir()
    (files.cursors.folder / "a.topics").write_bytes(text)
    with files.locked() as size, pytest.raises(DamagedState, match="postroom queue repair"):
        files.trusted_progress("a", size)


@pytest.mark.parametrize("name", ["a.cursor", "a.topics"])
@pytest.mark.parametrize("kind", ["symlink", "folder"])
def test_a_cursor_that_is_not_a_file_is_damaged(files: SessionFiles, name: str, kind: str) -> None:
    add(files, b"one\n")
    files.cursors.folder.mkdir()
    path = files.cursors.folder / name
    if kind == "symlink":
        path.symlink_to(files.messages)
    else:
        path.mkdir()
    with files.locked() as size, pytest.raises(DamagedState, match="postroom queue repair"):
        files.trusted_progress("a", size)


def test_agents_are_found_by_their_cursors_alone(files: SessionFiles) -> None:
    add(files, b"one\n")
    place(files, "a", ReadProgress(4))
    place(files, "b.cursor", ReadProgress(0, {"ask": 4}))
    for name in (".hidden.cursor", "c.cursor.12.tmp", "d.cursor.damaged-1", "e", "-f.cursor"):
        (files.cursors.folder / name).touch()
    assert files.cursors.agents() == ["a", "b.cursor"]


def test_progress_round_trips(files: SessionFiles) -> None:
    reading = ReadProgress(4, {"ask": 8, "answer": 12}, [16, 20])
    place(files, "a", reading)
    assert files.cursors.read("a") == reading
    assert (files.cursors.folder / "a.cursor").read_bytes() == b"4\n"


def test_entries_covered_by_the_cursor_are_dropped(files: SessionFiles) -> None:
    place(files, "a", ReadProgress(4, {"ask": 8}, [8]))
    place(files, "a", ReadProgress(12, {"ask": 8}, [8]))
    assert [path.name for path in files.cursors.folder.iterdir()] == ["a.cursor"]


OFFSETS = st.integers(0, 5).map(lambda line: line * 4)
READINGS = st.builds(
    ReadProgress,
    OFFSETS,
    st.dictionaries(st.sampled_from(["ask", "answer"]), OFFSETS),
    st.lists(OFFSETS, max_size=2),
)


def passed(reading: ReadProgress) -> set[tuple[str, int]]:
    """The messages that a progress marks as read, in a file of six lines."""
    return {(topic, at) for topic in TOPICS for at in range(0, 24, 4) if reading.has_read(topic, at)}


@given(before=READINGS, further=READINGS)
def test_crash_never_moves_progress_back(
    tmp_path_factory: pytest.TempPathFactory, before: ReadProgress, further: ReadProgress
) -> None:
    topics = {
        topic: max(before.topics.get(topic, 0), further.topics.get(topic, 0))
        for topic in before.topics | further.topics
    }
    after = ReadProgress(max(before.cursor, further.cursor), topics, [*before.taken, *further.taken])
    folder = tmp_path_factory.mktemp("crash")
    for call in range(10):
        files = SessionFiles(folder / str(call), "os", 10.0)
        place(files, "a", before)
        stored = files.cursors.read("a")
        with crash_at(pytest.MonkeyPatch(), call, "replace", "unlink") as made, files.locked():
            files.write_progress("a", stored, after)
        found = files.cursors.read("a")
        files.close()
        assert passed(before) <= passed(found) <= passed(after)
        if len(made) < call:
            assert passed(found) == passed(after)
            return
    pytest.fail("a place took ten steps to write")


# ---- compaction ------------------------------------------------------------------------------------

LINES = [b"keep-0\n", b"drop-1\n", b"\xff\x00 no text\n", b"drop-3\n", b"drop-4\n", b"\n", b"keep-6\n"]
STARTS = [sum(map(len, LINES[:index])) for index in range(len(LINES) + 1)]
KEPT = b"".join(line for line in LINES if not line.startswith(b"drop"))
READERS = {
    "start": ReadProgress(0),
    "middle": ReadProgress(STARTS[3]),
    "end": ReadProgress(STARTS[7]),
    "topical": ReadProgress(STARTS[1], {"ask": STARTS[4], "answer": STARTS[6]}, [STARTS[3], STARTS[6]]),
}
MOVED = {
    "start": ReadProgress(0),
    "middle": ReadProgress(STARTS[3] - 7),
    "end": ReadProgress(STARTS[7] - 21),
    "topical": ReadProgress(STARTS[1], {"ask": STARTS[4] - 14, "answer": STARTS[6] - 21}, [STARTS[6] - 21]),
}


def dropped(line: bytes) -> str | None:
    if not line.startswith(b"drop"):
        return None
    return line.decode() if line == b"drop-3" else ""


def filled(files: SessionFiles, tail: bytes = b"") -> None:
    add(files, *LINES)
    for agent_id, reading in READERS.items():
        place(files, agent_id, reading)
    with files.locked():
        files.bodies.write("drop-3", b"long")
        files.bodies.write("keep-6", b"long")
    with files.messages.open("ab") as foreign:
        foreign.write(tail)


def compact(files: SessionFiles) -> int:
    with files.locked() as size:
        return files.compact(size, dropped)


def places(files: SessionFiles) -> dict[str, ReadProgress]:
    return {agent_id: files.cursors.read(agent_id) for agent_id in files.cursors.agents()}


def leftovers(files: SessionFiles) -> set[str]:
    known = {"messages.jsonl", "bodies", "cursors", ".lock", "epoch"}
    return {path.name for path in files.folder.iterdir()} - known


def test_compaction_keeps_every_other_byte_and_moves_every_cursor(files: SessionFiles) -> None:
    filled(files, b"half a li")
    assert compact(files) == 3
    assert files.messages.read_bytes() == KEPT + b"half a li"
    assert places(files) == MOVED
    assert [path.name for path in files.bodies.folder.iterdir()] == ["keep-6.txt"]
    assert files.epoch() == 1
    assert leftovers(files) == set()


def test_compaction_of_nothing_changes_nothing(files: SessionFiles) -> None:
    add(files, b"keep\n")
    inode = files.messages.stat().st_ino
    assert compact(files) == 0
    assert files.messages.stat().st_ino == inode
    assert files.epoch() == 0


def test_compaction_copies_lines_longer_than_a_window(files: SessionFiles) -> None:
    kept = [b"keep-" + letter * 2 * WINDOW_BYTES + b"\n" for letter in (b"x", b"y")]
    add(files, b"drop-1\n", kept[0], b"drop-2\n", kept[1])
    assert compact(files) == 2
    assert files.messages.read_bytes() == b"".join(kept)


def test_compaction_can_remove_every_line(files: SessionFiles) -> None:
    add(files, b"drop-1\n", b"drop-2\n")
    place(files, "a", ReadProgress(7, {"ask": 14}, [7]))
    assert compact(files) == 2
    assert files.messages.read_bytes() == b""
    assert places(files) == {"a": ReadProgress(0)}
    add(files, b"keep\n")
    assert files.messages.read_bytes() == b"keep\n"


def test_an_open_handle_follows_to_the_new_file(files: SessionFiles, folder: Path) -> None:
    other = SessionFiles(folder, "os", 10.0)
    filled(other)
    add(other, b"keep-7\n")
    add(files, b"keep-8\n")
    compact(files)
    add(other, b"keep-9\n")
    other.close()
    assert files.messages.read_bytes() == KEPT + b"keep-7\nkeep-8\nkeep-9\n"


def test_interrupted_compaction_leaves_the_old_or_the_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for call in range(100):
        folder = tmp_path / str(call)
        files = SessionFiles(folder, "os", 10.0)
        filled(files)
        with crash_at(monkeypatch, call, "replace", "unlink", "open", "write", "close", "mkdir") as made:
            compact(files)
        complete = len(made) < call
        sender = SessionFiles(folder, "os", 10.0)
        add(sender, b"keep-7\n")  # a sender ignores the journal
        with sender.locked():
            pass
        old = sender.messages.read_bytes() == b"".join(LINES) + b"keep-7\n"
        assert old or sender.messages.read_bytes() == KEPT + b"keep-7\n"
        assert places(sender) == (READERS if old else MOVED)
        assert (sender.bodies.folder / "keep-6.txt").exists()
        assert (sender.bodies.folder / "drop-3.txt").exists() or not old
        assert not (folder / "expire.journal").exists()
        # Compaction can be repeated, and leaves no files behind.
        compact(sender)
        assert sender.messages.read_bytes() == KEPT + b"keep-7\n"
        assert places(sender) == MOVED
        assert not (sender.bodies.folder / "drop-3.txt").exists()
        assert leftovers(sender) == set()
        sender.close()
        outcomes.append(old)
        if complete:
            break
    else:
        pytest.fail("compaction took a hundred steps")
    assert outcomes == sorted(outcomes, reverse=True), "one step decides"
    assert {True, False} <= set(outcomes)


def test_interrupted_journal_is_completed_by_the_next_holder(
    files: SessionFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(files)
    journal = folder / "expire.journal"
    with crash_at(monkeypatch, 2, "replace"):  # the journal, and the new file in its place
        compact(files)
    assert journal.exists()
    step = 0
    while journal.exists():
        # Every holder gets one step further than the previous one, and then dies as well.
        with crash_at(monkeypatch, step, "replace", "unlink"), files.locked():
            pass
        files.close()
        step += 1
    assert step > len(READERS)
    assert places(files) == MOVED
    assert files.messages.read_bytes() == KEPT


def test_unreadable_journal_blocks_all_cursor_moves(files: SessionFiles, folder: Path) -> None:
    filled(files)
    (folder / "expire.journal").write_bytes(b"")
    with pytest.raises(DamagedState, match=r"expire\.journal"), files.locked():
        pass
    add(files, b"keep-7\n")  # but no sender
    assert files.messages.read_bytes().endswith(b"keep-7\n")


@pytest.mark.parametrize(
    "part",
    [
        {"bodies": ["../messages"]},
        {"readings": {"../agent": {"cursor": 0, "topics": {}, "taken": []}}},
        {"epoch": -1},
    ],
)
def test_journal_with_an_invalid_value_is_refused_completely(
    files: SessionFiles, folder: Path, part: dict[str, object]
) -> None:
    add(files, b"one\n")
    journal = {"inode": files.messages.stat().st_ino, "epoch": 1, "readings": {}, "bodies": [], **part}
    (folder / "expire.journal").write_bytes(msgspec.json.encode(journal))
    with pytest.raises(DamagedState), files.locked():
        pass
    assert files.messages.read_bytes() == b"one\n"
    assert (folder / "expire.journal").exists()
    assert not (folder / "agent.cursor").exists()
    assert files.epoch() == 0


def test_a_damaged_cursor_stays_damaged(files: SessionFiles) -> None:
    filled(files)
    in_a_gap = STARTS[4] + 3
    for agent_id, text in {"text": b"x", "beyond": b"9999", "gap": b"%d" % in_a_gap, "line": b"3"}.items():
        (files.cursors.folder / f"{agent_id}.cursor").write_bytes(text)
    compact(files)
    with files.locked() as size:
        for agent_id in ("text", "beyond", "gap", "line"):
            with pytest.raises(DamagedState):
                files.trusted_progress(agent_id, size)
        assert files.trusted_progress("middle", size) == MOVED["middle"]


def test_damaged_epoch_loses_no_message(files: SessionFiles, folder: Path) -> None:
    filled(files)
    (folder / "epoch").write_bytes(b"one\n")
    with pytest.raises(DamagedState, match="epoch"):
        compact(files)
    assert files.messages.read_bytes() == b"".join(LINES)
    assert places(files) == READERS


def test_a_failed_rewrite_raises_and_keeps_the_file(
    files: SessionFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(files)

    def refuse(source: Path, target: Path) -> None:
        if Path(target) == files.messages:
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(WriteFailed, match="Input/output error"):
            compact(files)
    assert files.messages.read_bytes() == b"".join(LINES)
    with files.locked():
        assert places(files) == READERS
    assert leftovers(files) == set()


def test_a_file_that_shrinks_under_its_lock_is_not_replaced(files: SessionFiles) -> None:
    filled(files)
    with files.locked() as size, pytest.raises(Unavailable, match="became shorter"):
        files._copy_without(os.open(os.devnull, os.O_WRONLY), [], size + 1)
