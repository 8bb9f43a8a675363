"""The guarantees of `Queue`, sentence by sentence."""

import errno
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import (
    DEFAULT_BODY_THRESHOLD,
    TOPICS,
    LockTimeout,
    PostroomError,
    Queue,
    QueueDisabledError,
    QueueError,
    TopicError,
)
from postroom.contracts import queue as contract
from postroom.contracts.queue import SESSIONS_OPEN_MAX, TAIL_FIRST_BYTES, QueueLimits
from postroom.core.formats import queuewire as wire
from postroom.errors import DamagedState, InvalidMessage, InvalidName, InvalidSetting, UnsafePath
from postroom.logs.queuecursors import ReadProgress
from postroom.nudges.watch import Watch
from tests import children
from tests.children import no_child_left

START = datetime(2026, 6, 10, tzinfo=UTC)
KEYS = ["msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s"]
SWITCHES = ["ZOS_MQ_DISABLED", "POSTROOM_QUEUE_DISABLED"]
BAD_NAMES = ["", "..", ".a", "-a", "a/b", "a\n", "a b", "\u0430gent", "a" * 129]
CANARY = "canary-4711"

__all__ = ["no_child_left"]  # a fixture
pytestmark = pytest.mark.usefixtures("no_child_left")


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("POSTROOM_", "ZOS_", "XDG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def queue(root: Path, clock: Clock) -> Iterator[Queue]:
    with Queue(root, clock=clock) as opened:
        yield opened


def session_of(queue: Queue, name: str = "default") -> Path:
    return queue.root / "sessions" / name


def messages_of(queue: Queue) -> Path:
    return session_of(queue) / "messages.jsonl"


def lines_of(queue: Queue) -> list[dict[str, Any]]:
    return [json.loads(line) for line in messages_of(queue).read_bytes().splitlines()]


def cursor_of(queue: Queue, agent_id: str, session: str = "default") -> int:
    path = session_of(queue, session) / "cursors" / f"{agent_id}.cursor"
    return int(path.read_text()) if path.exists() else 0


def audit_of(queue: Queue) -> list[dict[str, Any]]:
    return [json.loads(line) for line in queue.audit_path.read_bytes().splitlines()]


def bodies(messages: list[Any]) -> list[str]:
    return [message["body"] for message in messages]


def foreign(queue: Queue, **changed: Any) -> None:
    """A line as another program appends it: the documented keys, no checksum."""
    record: dict[str, Any] = {
        "msg_id": "f-1",
        "ts": "2026-06-10T00:00:00Z",
        "from": "zos",
        "to": None,
        "topic": "ask",
        "body": "foreign",
        "in_reply_to": None,
        "ttl_s": None,
    }
    raw(queue, json.dumps(record | changed).encode() + b"\n")


def raw(queue: Queue, data: bytes) -> None:
    messages_of(queue).parent.mkdir(parents=True, exist_ok=True)
    with messages_of(queue).open("ab") as file:
        file.write(data)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- names and exceptions --------------------------------------------------------------------------


def test_the_public_names_exist() -> None:
    assert frozenset({"ask", "answer", "broadcast", "spawn-request", "status"}) == TOPICS
    assert DEFAULT_BODY_THRESHOLD == 3584
    assert postroom.Queue is Queue


def test_the_exceptions_have_the_documented_base_classes() -> None:
    assert issubclass(TopicError, QueueError)
    assert issubclass(TopicError, ValueError)
    assert issubclass(QueueDisabledError, QueueError)
    assert issubclass(QueueDisabledError, RuntimeError)


def test_the_attributes_exist(root: Path) -> None:
    queue = Queue(root)
    assert queue.root == root
    assert queue.body_threshold == DEFAULT_BODY_THRESHOLD
    assert queue.audit_path == root / "audit.jsonl"


@pytest.mark.parametrize("threshold", [-1, 1.5, "10", True])
def test_a_threshold_is_a_number_of_bytes(root: Path, threshold: Any) -> None:
    with pytest.raises(ValueError, match="body_threshold"):
        Queue(root, body_threshold=threshold)


def test_an_unknown_durability_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="os, group, fsync"):
        Queue(root, durability="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan])
def test_a_lock_timeout_is_positive(root: Path, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="lock_timeout_s"):
        Queue(root, lock_timeout_s=timeout_s)


@pytest.mark.parametrize("value", ["", b""])
def test_an_empty_root_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="root"):
        Queue(value)


def test_nothing_is_written_before_the_first_use(root: Path) -> None:
    Queue(root).close()
    assert not root.exists()


# ---- send ------------------------------------------------------------------------------------------


def test_a_send_is_one_line_with_the_documented_keys_in_their_order(queue: Queue) -> None:
    msg_id = queue.send("ask", "how far?", to="builder", ttl_s=600, sender="coordinator", reply_to="m-0")
    (line,) = lines_of(queue)
    assert list(line) == [*KEYS, "crc"]
    assert {key: line[key] for key in KEYS} == {
        "msg_id": msg_id,
        "ts": "2026-06-10T00:00:00.000000Z",
        "from": "coordinator",
        "to": "builder",
        "topic": "ask",
        "body": "how far?",
        "in_reply_to": "m-0",
        "ttl_s": 600,
    }


def test_omitted_fields_are_null_and_the_sender_anonymous(queue: Queue) -> None:
    queue.send("status", "fine")
    (line,) = lines_of(queue)
    assert (line["from"], line["to"], line["in_reply_to"], line["ttl_s"]) == ("anonymous", None, None, None)


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_topic_of_the_set_can_be_sent(queue: Queue, topic: str) -> None:
    queue.send(topic, "x")
    assert [message["topic"] for message in queue.poll("a")] == [topic]


@pytest.mark.parametrize("topic", ["news", "", "Ask", "ask\n", None, 5])
def test_an_unknown_topic_is_refused_and_nothing_is_stored(queue: Queue, topic: Any) -> None:
    with pytest.raises(TopicError):
        queue.send(topic, "x" * 5000)
    assert queue.tail() == []
    assert not session_of(queue).exists()


@pytest.mark.parametrize("ttl_s", [-1, -0.5, math.nan, math.inf, 10**400, True, "600"])
def test_an_invalid_ttl_is_refused(queue: Queue, ttl_s: Any) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        queue.send("ask", "x", ttl_s=ttl_s)
    assert queue.tail(include_expired=True) == []


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("parameter", ["to", "session", "sender"])
def test_a_bad_name_is_a_value_error_on_send(queue: Queue, parameter: str, name: str) -> None:
    with pytest.raises(ValueError, match="is not allowed") as caught:
        queue.send("ask", "x", **{parameter: name})  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidName)
    assert not (queue.root / "sessions").exists()


@pytest.mark.parametrize("body", [None, b"bytes", 5])
def test_a_body_is_text(queue: Queue, body: Any) -> None:
    with pytest.raises(InvalidMessage, match="must be text"):
        queue.send("ask", body)


@pytest.mark.parametrize("size", [1, 5000])
def test_lone_surrogates_are_refused(queue: Queue, size: int) -> None:
    with pytest.raises(InvalidMessage, match="surrogates"):
        queue.send("ask", "\ud800" * size)
    assert queue.tail() == []


def test_a_body_over_the_limit_is_refused(queue: Queue) -> None:
    with pytest.raises(InvalidMessage, match=f"longer than {wire.BODY_BYTES_MAX} bytes"):
        queue.send("ask", "x" * (wire.BODY_BYTES_MAX + 1))


@pytest.mark.parametrize("reply_to", ["", 5])
def test_a_bad_reply_id_is_refused(queue: Queue, reply_to: Any) -> None:
    with pytest.raises(InvalidMessage, match="reply_to"):
        queue.send("ask", "x", reply_to=reply_to)


def test_ids_are_unique_and_are_names(queue: Queue, root: Path, clock: Clock) -> None:
    with Queue(root, clock=clock) as other:
        ids = [q.send("ask", "x") for q in (queue, other) for _ in range(50)]
    assert len(set(ids)) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", msg_id) for msg_id in ids)


@pytest.mark.parametrize(
    "body", ["", "\n", "a\nb\r\n", "\0", "ünï¢öde 🤖", '{"msg_id": "x"}', '","crc":"0"}']
)
def test_every_body_comes_back(queue: Queue, body: str) -> None:
    queue.send("ask", body)
    assert bodies(queue.poll("a")) == [body]


def test_files_are_for_their_owner_alone(queue: Queue) -> None:
    queue.send("ask", "x" * 5000)
    queue.poll("a")
    modes = {path.stat().st_mode & 0o077 for path in (queue.root, *queue.root.rglob("*"))}
    assert modes == {0}


# ---- side files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "externalized"), [(3584, False), (3585, True), (100_000, True)])
def test_a_body_over_the_threshold_goes_to_a_side_file(queue: Queue, size: int, externalized: bool) -> None:
    body = "x" * size
    msg_id = queue.send("ask", body)
    (line,) = lines_of(queue)
    assert line["body"] == (f"@file:{msg_id}.txt" if externalized else body)
    side_file = session_of(queue) / "bodies" / f"{msg_id}.txt"
    assert (side_file.read_bytes() == body.encode()) if externalized else not side_file.exists()
    (message,) = queue.poll("a")
    assert message["body"] == body
    assert message.get("_body_source") == ("side-file" if externalized else None)
    assert set(message) - {"_body_source"} == set(KEYS)


def test_the_threshold_counts_utf_8_bytes(root: Path) -> None:
    with Queue(root, body_threshold=9) as queue:
        queue.send("ask", "ü" * 4)
        queue.send("ask", "ü" * 5)
        assert [message.get("_body_source") for message in queue.poll("a")] == [None, "side-file"]


def test_a_threshold_of_zero_leaves_only_the_empty_body_in_line(root: Path) -> None:
    with Queue(root, body_threshold=0) as queue:
        queue.send("ask", "")
        queue.send("ask", "x")
        assert [message.get("_body_source") for message in queue.poll("a")] == [None, "side-file"]


def test_a_line_never_exceeds_4095_bytes(root: Path) -> None:
    # Control characters take six bytes each in JSON: the body is short, and its line is not.
    with Queue(root, body_threshold=100_000) as queue:
        for size in [*range(3800, 4000), *range(600, 700)]:
            queue.send("ask", ("\x01" if size < 1000 else "x") * size)
        sizes = [len(line) for line in messages_of(queue).read_bytes().splitlines(keepends=True)]
        assert max(sizes) == 4095
        found = queue.poll("a")
        assert {message.get("_body_source") for message in found} == {None, "side-file"}
        assert [len(body) for body in bodies(found)] == [*range(3800, 4000), *range(600, 700)]


def test_the_longest_line_of_a_side_file_fits_too(queue: Queue) -> None:
    name = "n" * 128
    queue.send("spawn-request", "x" * 5000, to=name, sender=name, session=name, reply_to="\x01" * 256)
    (line,) = (session_of(queue, name) / "messages.jsonl").read_bytes().splitlines(keepends=True)
    assert len(line) <= 4095


@pytest.mark.parametrize("body", ["@file:", "@file:x", "@file:../../secret.txt", "@file:other.txt"])
def test_a_body_that_looks_like_a_side_file_is_only_a_body(queue: Queue, body: str) -> None:
    queue.send("ask", body)
    (message,) = queue.poll("a")
    assert message["body"] == body
    assert message["_body_source"] == "side-file"


def test_a_foreign_line_with_a_side_file_of_its_own_id_is_followed(queue: Queue) -> None:
    foreign(queue, msg_id="f-9", body="@file:f-9.txt")
    folder = session_of(queue) / "bodies"
    folder.mkdir()
    (folder / "f-9.txt").write_text("long text")
    (message,) = queue.poll("a")
    assert (message["body"], message["_body_source"]) == ("long text", "side-file")


@pytest.mark.parametrize(
    ("msg_id", "body"),
    [
        ("f-1", "@file:f-2.txt"),
        ("f-1", "@file:../secret.txt"),
        ("../secret", "@file:../secret.txt"),
        ("f-1", "@file:/etc/passwd"),
    ],
)
def test_a_foreign_line_that_names_another_file_is_never_followed(
    queue: Queue, msg_id: str, body: str
) -> None:
    foreign(queue, msg_id=msg_id, body=body)
    (session_of(queue) / "bodies").mkdir()
    (session_of(queue) / "bodies" / "f-2.txt").write_text("secret")
    (session_of(queue) / "secret.txt").write_text("secret")
    (tailed,) = queue.tail()
    (polled,) = queue.poll("a")
    assert tailed == polled
    assert polled["body"] == body
    assert not {"_body_source", "_body_error"} & set(polled)


def test_a_symlink_in_place_of_a_side_file_is_not_followed(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    foreign(queue, msg_id="f-9", body="@file:f-9.txt")
    (session_of(queue) / "bodies").mkdir()
    (session_of(queue) / "bodies" / "f-9.txt").symlink_to(tmp_path / "secret")
    (message,) = queue.poll("a")
    assert message["body"] == "@file:f-9.txt"
    assert "symlink" in message["_body_error"]


def removed(path: Path) -> None:
    path.unlink()


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    path.write_bytes(b"y" + path.read_bytes()[1:])


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_symlink(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize("damage", [removed, shortened, changed, no_text, a_folder, as_symlink])
def test_an_unreadable_side_file_is_a_body_error_and_never_a_wrong_body(
    queue: Queue, damage: Callable[[Path], None]
) -> None:
    msg_id = queue.send("ask", "x" * 5000)
    queue.send("ask", "next")
    damage(session_of(queue) / "bodies" / f"{msg_id}.txt")
    first, second = queue.poll("a")
    assert first["body"] == f"@file:{msg_id}.txt"
    assert first["_body_error"]
    assert "_body_source" not in first
    assert set(first) == {*KEYS, "_body_error"}
    assert second["body"] == "next"


def test_a_foreign_line_cannot_claim_a_side_file(queue: Queue) -> None:
    foreign(queue, _body_source="side-file", _body_error="no")
    (message,) = queue.poll("a")
    assert list(message) == KEYS


def test_a_body_is_on_disk_before_its_line(queue: Queue) -> None:
    def send_and_die() -> None:
        children.die_at(0, ["replace"], after=True)
        queue.send("ask", "x" * 5000)

    assert children.killed(send_and_die)
    assert len(list((session_of(queue) / "bodies").iterdir())) == 1
    assert queue.poll("a") == []


def test_a_failed_send_leaves_no_side_file(queue: Queue, root: Path) -> None:
    queue.send("ask", "x" * 5000)
    before = snapshot(session_of(queue))
    with Queue(root, lock_timeout_s=0.01) as hurried:
        with queue._session(None).locked(), pytest.raises(LockTimeout):
            hurried.send("ask", "y" * 5000)
        with pytest.raises(InvalidMessage, match="surrogates"):
            hurried.send("ask", "y" * 5000, reply_to="\ud800")
    assert snapshot(session_of(queue)) == before


# ---- poll: what is delivered ------------------------------------------------------------------------


def test_a_message_is_delivered_with_the_documented_keys(queue: Queue) -> None:
    msg_id = queue.send("ask", "x", to="a", ttl_s=60, sender="b", reply_to="m-0")
    (message,) = queue.poll("a")
    assert message == {
        "msg_id": msg_id,
        "ts": "2026-06-10T00:00:00.000000Z",
        "from": "b",
        "to": "a",
        "topic": "ask",
        "body": "x",
        "in_reply_to": "m-0",
        "ttl_s": 60,
    }


@pytest.mark.parametrize("to", [None, "all", "broadcast"])
def test_none_all_and_broadcast_mean_every_consumer(queue: Queue, to: str | None) -> None:
    queue.send("ask", "x", to=to)
    for agent_id in ("a", "b", "latecomer"):
        (message,) = queue.poll(agent_id)
        assert message["to"] == to


def test_an_agent_gets_only_messages_addressed_to_it(queue: Queue) -> None:
    queue.send("ask", "for a", to="a")
    queue.send("ask", "for b", to="b")
    queue.send("ask", "for A", to="A")
    assert bodies(queue.poll("a")) == ["for a"]
    assert bodies(queue.poll("b")) == ["for b"]


def test_messages_come_in_the_order_they_were_sent_and_once(queue: Queue) -> None:
    for number in range(5):
        queue.send("ask", str(number))
    assert bodies(queue.poll("a")) == ["0", "1", "2", "3", "4"]
    assert queue.poll("a") == []
    queue.send("ask", "5")
    assert bodies(queue.poll("a")) == ["5"]


@pytest.mark.parametrize("topics", ["ask", ["ask"], ("ask",), {"ask"}, iter(["ask"])])
def test_a_topic_filter_is_a_text_or_any_iterable(queue: Queue, topics: Any) -> None:
    queue.send("ask", "yes")
    queue.send("status", "no")
    assert bodies(queue.poll("a", topics)) == ["yes"]


@pytest.mark.parametrize("topics", ["news", ["ask", "news"], [""], [None], "", [["ask"]]])
@pytest.mark.parametrize("keep_filtered", [False, True])
def test_an_unknown_topic_is_refused_in_a_filter_and_the_cursor_stays(
    queue: Queue, topics: Any, keep_filtered: bool
) -> None:
    queue.send("ask", "x")
    with pytest.raises(TopicError):
        queue.poll("a", topics, keep_filtered=keep_filtered)
    assert cursor_of(queue, "a") == 0


@pytest.mark.parametrize("keep_filtered", [False, True])
def test_empty_filter_is_refused_and_skips_nothing(queue: Queue, keep_filtered: bool) -> None:
    queue.send("ask", "x")
    with pytest.raises(TopicError, match="empty"):
        queue.poll("a", [], keep_filtered=keep_filtered)
    assert bodies(queue.poll("a")) == ["x"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_a_value_error_on_every_other_call(queue: Queue, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: queue.poll(name),
        lambda: queue.poll("a", session=name),
        lambda: queue.tail(session=name),
        lambda: queue.expire(name),
        lambda: queue.status(name),
        lambda: queue.inbox(name),
        lambda: queue.inbox("a", name),
        lambda: queue.ask("x", name),
        lambda: queue.ask("x", "a", sender=name),
        lambda: queue.register(name),
        lambda: queue.register("a", name),
        lambda: queue.agents(name),
        lambda: queue.check(name),
        lambda: queue.repair_cursor(name, "end"),
        lambda: queue.repair_body(name, "x"),
    ]
    for call in calls:
        with pytest.raises(InvalidName):
            call()


@pytest.mark.parametrize("ttl_s", [0, 1, 600, 0.1, 0.534259])
def test_a_message_is_expired_when_now_is_ts_plus_ttl(queue: Queue, clock: Clock, ttl_s: float) -> None:
    for _ in range(2):
        queue.send("ask", "x", ttl_s=ttl_s)
    clock.now = START + timedelta(seconds=ttl_s) - timedelta(microseconds=1)
    live = queue.poll("a")
    clock.now = START + timedelta(seconds=ttl_s)
    assert (len(live), queue.poll("b")) == (2, [])


def test_without_a_ttl_a_message_never_expires(queue: Queue, clock: Clock) -> None:
    queue.send("ask", "x")
    clock.forward(10**10)
    assert bodies(queue.poll("a")) == ["x"]


# ---- poll: the cursor is the acknowledgement --------------------------------------------------------


def test_the_cursor_is_the_byte_offset_after_the_last_complete_line(queue: Queue) -> None:
    queue.send("ask", "x")
    queue.poll("a")
    assert (session_of(queue) / "cursors" / "a.cursor").read_text().strip().isdigit()
    assert cursor_of(queue, "a") == messages_of(queue).stat().st_size


def test_cursor_passes_messages_that_are_filtered_expired_or_for_others(queue: Queue, clock: Clock) -> None:
    queue.send("status", "another topic")
    queue.send("ask", "for another", to="b")
    queue.send("ask", "expired", ttl_s=1)
    clock.forward(1)
    assert queue.poll("a", "ask") == []
    assert cursor_of(queue, "a") == messages_of(queue).stat().st_size
    clock.forward(-1)
    assert queue.poll("a") == []


def test_a_crash_before_the_cursor_is_written_loses_nothing(queue: Queue) -> None:
    queue.send("ask", "x")

    def poll_and_die() -> None:
        children.die_at(0, ["replace"])
        queue.poll("a")

    assert children.killed(poll_and_die)
    assert cursor_of(queue, "a") == 0
    assert bodies(queue.poll("a")) == ["x"]


@pytest.mark.parametrize("body", ["short", "long" * 2000])
def test_the_cursor_is_on_disk_before_the_messages_are_returned(
    queue: Queue, tmp_path: Path, body: str
) -> None:
    queue.send("ask", body)
    handed_over = tmp_path / "handed-over"

    def poll_and_die() -> None:
        children.die_at(0, ["replace"], after=True)
        queue.poll("a")
        handed_over.touch()

    assert children.killed(poll_and_die)
    assert not handed_over.exists()
    assert cursor_of(queue, "a") == messages_of(queue).stat().st_size
    assert queue.poll("a") == [], "under-delivery, never double delivery"


def test_failed_cursor_write_delivers_nothing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send("ask", "x")

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(PostroomError, match="No space left"):
            queue.poll("a")
    assert bodies(queue.poll("a")) == ["x"]


def test_a_torn_tail_is_never_consumed(queue: Queue) -> None:
    queue.send("ask", "whole")
    complete = messages_of(queue).read_bytes()
    raw(queue, complete[:-1])  # everything but its newline
    assert bodies(queue.poll("a")) == ["whole"]
    assert cursor_of(queue, "a") == len(complete)
    assert queue.poll("a") == []
    assert cursor_of(queue, "a") == len(complete)
    raw(queue, b"\n")
    assert bodies(queue.poll("a")) == ["whole"]


def test_a_send_after_a_torn_tail_is_delivered_and_the_tail_stays(queue: Queue) -> None:
    raw(queue, b'{"msg_id":"half')
    queue.send("ask", "x")
    assert bodies(queue.poll("a")) == ["x"]
    assert messages_of(queue).read_bytes().startswith(b'{"msg_id":"half\n{')


def test_unreadable_lines_are_skipped_and_logged(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    raw(queue, b"no json\n")
    queue.send("ask", "x")
    with caplog.at_level(logging.WARNING, "postroom.queue"):
        assert bodies(queue.poll("a")) == ["x"]
    assert "offset 0" in caplog.text
    assert messages_of(queue).read_bytes().startswith(b"no json\n")


def test_blank_lines_are_skipped_silently(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    raw(queue, b"\n  \n")
    queue.send("ask", "x")
    assert bodies(queue.poll("a")) == ["x"]
    assert caplog.text == ""


def test_a_line_that_was_changed_is_not_delivered(queue: Queue) -> None:
    queue.send("ask", "seven")
    queue.send("ask", "eight")
    messages_of(queue).write_bytes(messages_of(queue).read_bytes().replace(b"seven", b"SEVEN"))
    assert bodies(queue.poll("a")) == ["eight"]


def test_foreign_lines_are_delivered(queue: Queue) -> None:
    foreign(queue, body="hello", to="a")
    foreign(queue, body="not for you", to="b")
    assert bodies(queue.poll("a")) == ["hello"]


def test_no_foreign_line_stops_a_poll(queue: Queue) -> None:
    for line in (
        {"msg_id": "f", "ts": "x", "from": "z", "topic": "ask", "body": "1", "body_bytes": 1, "body_crc": "",
         "in_reply_to": None},
        {"msg_id": "f", "ts": "x", "from": "z", "topic": "ask", "body": "2", "_body_source": "", "to": "a",
         "_body_error": ""},
        {"msg_id": "f", "ts": "9999-12-31T23:59:59-23:59", "from": "", "topic": "news", "body": "3",
         "ttl_s": -1e308},
        {"msg_id": "", "ts": "", "from": "", "topic": "", "body": "@file:.txt", "ttl_s": 1e308},
    ):  # fmt: skip
        raw(queue, json.dumps(line).encode() + b"\n")
    queue.send("ask", "x")
    assert bodies(queue.tail()) == ["1", "2", "3", "@file:.txt", "x"]
    assert bodies(queue.poll("a")) == ["1", "2", "3", "@file:.txt", "x"]
    assert queue.status("default")["messages"] == 5
    assert queue.expire() == 0


@pytest.mark.parametrize("keep_filtered", [False, True])
def test_a_limit_leaves_the_rest_for_later(queue: Queue, keep_filtered: bool) -> None:
    for number in range(7):
        queue.send("ask", str(number), to="b" if number == 3 else "a")
    wanted = "ask" if keep_filtered else None
    parts = [bodies(queue.poll("a", wanted, limit=2, keep_filtered=keep_filtered)) for _ in range(4)]
    assert parts == [["0", "1"], ["2", "4"], ["5", "6"], []]
    assert queue.poll("a") == []


def test_a_limit_of_zero_moves_nothing(queue: Queue) -> None:
    queue.send("ask", "x", to="b")
    queue.send("ask", "y", to="a")
    assert queue.poll("a", limit=0) == []
    assert queue.poll("a", limit=0, wait_s=60) == []
    assert cursor_of(queue, "a") == 0
    assert bodies(queue.poll("a", limit=10**9)) == ["y"]


@pytest.mark.parametrize("limit", [-1, 1.5, True, "2"])
def test_a_limit_is_a_number_of_messages(queue: Queue, limit: Any) -> None:
    queue.send("ask", "x")
    with pytest.raises(InvalidMessage, match="number of messages"):
        queue.poll("a", limit=limit)
    with pytest.raises(InvalidMessage, match="number of messages"):
        queue.tail(limit)
    assert bodies(queue.poll("a")) == ["x"]


def test_long_bodies_are_delivered_in_several_polls(queue: Queue) -> None:
    queue.limits = QueueLimits(poll_bytes_max=10_000)
    sizes = [4000, 4000, 4000, 20_000, 4000]
    for size in sizes:
        queue.send("ask", "x" * size)
    parts = [list(map(len, bodies(queue.poll("a")))) for _ in range(5)]
    assert [size for part in parts for size in part] == sizes
    assert parts[0] == [4000, 4000]


def test_message_is_not_lost_when_its_body_exceeds_memory(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("ask", "x" * 5000)

    def too_little_memory(path: Path) -> bytes:
        if path.parent.name == "bodies":
            raise MemoryError
        return path.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr("postroom.logs.queuefile.read_file", too_little_memory)
        with pytest.raises(MemoryError):
            queue.poll("a")
    assert bodies(queue.poll("a")) == ["x" * 5000]


def test_long_backlog_is_delivered_in_several_polls(queue: Queue) -> None:
    queue.limits = QueueLimits(poll_bytes_max=1000)
    for number in range(20):
        queue.send("ask", str(number))
    parts = [bodies(queue.poll("a")) for _ in range(20)]
    assert [body for part in parts for body in part] == [str(number) for number in range(20)]
    assert len(parts[0]) < 20


def test_repair_moves_the_cursor_past_an_oversized_line(queue: Queue) -> None:
    queue.limits = QueueLimits(poll_bytes_max=1000)
    queue.send("ask", "before")
    raw(queue, b"x" * 3500 + b"\n")
    queue.send("ask", "behind")
    assert bodies(queue.poll("a")) == ["before"]
    with pytest.raises(DamagedState, match="more than 1000 bytes"):
        queue.poll("a")
    (damage,) = queue.check().unreadable
    queue.repair_cursor("a", damage.offset + damage.length)
    assert bodies(queue.poll("a")) == ["behind"]


def test_partial_poll_does_not_repeat_messages(queue: Queue) -> None:
    for number in range(20):
        queue.send("ask" if number % 2 else "status", str(number))
    assert len(queue.poll("a", "ask", keep_filtered=True)) == 10
    queue.limits = QueueLimits(poll_bytes_max=1000)
    found = [
        body for _ in range(20) for body in bodies(queue.poll("a", ["ask", "status"], keep_filtered=True))
    ]
    assert found == [str(number) for number in range(0, 20, 2)]


@pytest.mark.parametrize("damage", ["", "x", "1", "-1", "99999999", "9" * 30])
def test_a_damaged_cursor_is_an_error_and_not_a_guess(queue: Queue, damage: str) -> None:
    queue.send("ask", "x")
    queue.poll("a")
    (session_of(queue) / "cursors" / "a.cursor").write_text(damage)
    for call in (lambda: queue.poll("a"), lambda: queue.inbox("a"), lambda: queue.ask("?", "b", sender="a")):
        with pytest.raises(DamagedState, match="postroom queue repair"):
            call()
    assert (session_of(queue) / "cursors" / "a.cursor").read_text() == damage
    assert len(queue.poll("b")) >= 1, "nobody else is held up"


# ---- sessions --------------------------------------------------------------------------------------


def test_sessions_do_not_see_each_other(queue: Queue) -> None:
    queue.send("ask", "one", session="s1")
    queue.send("ask", "two", session="s2")
    queue.send("ask", "default")
    assert bodies(queue.poll("a", session="s1")) == ["one"]
    assert bodies(queue.tail(session="s2")) == ["two"]
    assert bodies(queue.poll("a")) == ["default"]
    assert cursor_of(queue, "a", "s2") == 0
    assert queue.sessions() == ["default", "s1", "s2"]


def test_many_sessions_need_few_descriptors(queue: Queue) -> None:
    count = SESSIONS_OPEN_MAX + 6
    queue.send("ask", "x", session="s0")
    before = open_descriptors()
    for turn in range(2):
        for number in range(count):
            queue.send("ask", f"{turn}", session=f"s{number}")
    assert open_descriptors() <= before + SESSIONS_OPEN_MAX * 2
    assert all(bodies(queue.poll("a", session=f"s{number}"))[-2:] == ["0", "1"] for number in range(count))


def test_a_stray_file_among_the_sessions_is_not_a_session(queue: Queue) -> None:
    queue.send("ask", "x")
    (queue.root / "sessions" / ".hidden").mkdir()
    (queue.root / "sessions" / "notes").write_text("not ours")
    assert queue.sessions()[0] == "default"
    assert queue.status()["default"]["messages"] == 1
    assert queue.expire() == 0


# ---- the kill switch -------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_kill_switch_freezes_every_path_and_loses_nothing(
    queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    queue.send("ask", "waiting", ttl_s=100)
    queue.send("ask", "expired", ttl_s=1)
    clock.forward(1)
    before = snapshot(queue.root)
    monkeypatch.setenv(switch, "1")
    for size in (1, 5000):
        with pytest.raises(QueueDisabledError):
            queue.send("ask", "x" * size)
    with pytest.raises(QueueDisabledError):
        queue.ask("x", "b")
    with pytest.raises(QueueDisabledError):
        queue.ask("x", "b", session="other")
    with pytest.raises(QueueDisabledError):
        queue.register("a")
    assert queue.poll("a") == []
    assert queue.poll("a", "ask") == []
    assert queue.poll("a", wait_s=60) == []
    assert queue.poll("a", "ask", keep_filtered=True) == []
    assert queue.poll("a", session="other") == []
    assert queue.expire() == 0
    assert queue.expire("default") == 0
    assert snapshot(queue.root) == before
    assert not session_of(queue, "other").exists()
    assert bodies(queue.tail()) == ["waiting"], "a peek changes nothing"
    monkeypatch.delenv(switch)
    assert bodies(queue.poll("a")) == ["waiting"]
    assert queue.expire() == 1


@pytest.mark.parametrize(
    ("ours", "original", "disabled"),
    [
        ("1", "", True),
        ("1", "0", True),
        ("true", "0", True),
        ("0", "1", False),
        ("", "1", True),
        ("", "0", False),
        ("", "", False),
    ],
)
def test_our_kill_switch_takes_precedence(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, ours: str, original: str, disabled: bool
) -> None:
    monkeypatch.setenv("POSTROOM_QUEUE_DISABLED", ours)
    monkeypatch.setenv("ZOS_MQ_DISABLED", original)
    if disabled:
        with pytest.raises(QueueDisabledError):
            queue.send("ask", "x")
    else:
        queue.send("ask", "x")


@pytest.mark.parametrize("switch", SWITCHES)
def test_invalid_kill_switch_value_raises_in_every_call(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    queue.send("ask", "x")
    monkeypatch.setenv(switch, "maybe")
    for call in (lambda: queue.send("ask", "y"), lambda: queue.poll("a"), queue.expire):
        with pytest.raises(InvalidSetting, match=switch):
            call()
    monkeypatch.delenv(switch)
    assert bodies(queue.poll("a")) == ["x"]


@pytest.mark.parametrize("call", ["poll", "ask"])
def test_the_kill_switch_reaches_a_call_that_waits(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class LateWatch(Watch):
        """While a call waits, another handle sends a message, and then the kill switch is set."""

        def wait(self, _: float) -> bool:
            if not os.environ.get("ZOS_MQ_DISABLED"):
                reply_to = next((message["msg_id"] for message in queue.tail()), "m-0")
                queue.send("answer", "too late", to="a", reply_to=reply_to)
                monkeypatch.setenv("ZOS_MQ_DISABLED", "1")
            return True

    monkeypatch.setattr(contract, "Watch", LateWatch)
    if call == "poll":
        assert queue.poll("a", wait_s=60) == []
    else:
        assert queue.ask("?", "b", sender="a", timeout_s=60) is None
    assert not (session_of(queue) / "cursors").exists()
    monkeypatch.delenv("ZOS_MQ_DISABLED")
    assert "too late" in bodies(queue.poll("a"))


# ---- the audit log ---------------------------------------------------------------------------------


def test_a_send_entry_has_exactly_its_keys(queue: Queue) -> None:
    msg_id = queue.send("ask", "ü" * 3, to="b", ttl_s=60, sender="a", reply_to="m-0")
    assert audit_of(queue) == [
        {
            "ts": "2026-06-10T00:00:00.000000Z",
            "op": "send",
            "session": "default",
            "msg_id": msg_id,
            "topic": "ask",
            "to": "b",
            "from": "a",
            "body_bytes": 6,
            "externalized": False,
            "ttl_s": 60,
        }
    ]


def test_a_long_send_is_marked_as_externalized(queue: Queue) -> None:
    queue.send("ask", "x" * 5000)
    (entry,) = audit_of(queue)
    assert (entry["externalized"], entry["body_bytes"]) == (True, 5000)


def test_a_poll_entry_has_exactly_its_keys(queue: Queue) -> None:
    queue.send("ask", "x", session="s")
    size = (session_of(queue, "s") / "messages.jsonl").stat().st_size
    queue.poll("a", ["status", "ask"], "s")
    queue.poll("a", session="s")
    common = {"ts": "2026-06-10T00:00:00.000000Z", "op": "poll", "session": "s", "agent_id": "a"}
    assert audit_of(queue)[1:] == [
        {**common, "topics": ["ask", "status"], "matched": 1, "cursor_from": 0, "cursor_to": size},
        {**common, "topics": None, "matched": 0, "cursor_from": size, "cursor_to": size},
    ]


def test_an_expire_entry_has_exactly_its_keys(queue: Queue) -> None:
    queue.send("ask", "x", ttl_s=0)
    queue.expire()
    assert audit_of(queue)[1] == {
        "ts": "2026-06-10T00:00:00.000000Z",
        "op": "expire",
        "session": "default",
        "dropped": 1,
        "epoch": 1,
    }


def test_no_body_ever_reaches_the_audit_log(queue: Queue, clock: Clock) -> None:
    for body in (CANARY, CANARY * 1000, f"@file:{CANARY}", f"{CANARY}\n{CANARY}", f'"{CANARY}'):
        queue.send("ask", body, to="a")
        queue.send("ask", body, ttl_s=1)
    foreign(queue, body=CANARY, msg_id="f-1")
    raw(queue, f"{CANARY} {CANARY}\n".encode())
    raw(queue, CANARY.encode())
    queue.tail(100)
    queue.poll("b", "status")
    queue.poll("a", "ask", keep_filtered=True)
    queue.send("answer", CANARY, to="a", reply_to="m-0")
    queue.ask(CANARY, "a", timeout_s=0)
    queue.poll("a")
    clock.forward(1)
    queue.expire()
    queue.check()
    assert queue.audit_path.stat().st_size > 1000
    assert CANARY.encode() not in queue.audit_path.read_bytes()


def test_tail_writes_no_audit_line(queue: Queue) -> None:
    queue.send("ask", "x")
    before = queue.audit_path.read_bytes()
    queue.tail()
    queue.status()
    queue.inbox("a")
    queue.check()
    queue.agents()
    assert queue.audit_path.read_bytes() == before


def test_failed_audit_write_loses_no_message(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue.root.mkdir()
    queue.audit_path.symlink_to(tmp_path / "elsewhere")
    queue.send("ask", "x")
    queue.send("ask", "gone", ttl_s=0)
    assert bodies(queue.poll("a")) == ["x"]
    assert queue.expire() == 1
    assert "audit line is missing" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


# ---- tail ------------------------------------------------------------------------------------------


def test_tail_gives_the_last_live_messages_in_their_order(queue: Queue, clock: Clock) -> None:
    for number in range(20):
        queue.send("ask", str(number), to="somebody", ttl_s=1 if number == 18 else None)
    clock.forward(1)
    assert bodies(queue.tail(3)) == ["16", "17", "19"]
    assert len(queue.tail()) == 10
    assert len(queue.tail(100)) == 19
    assert queue.tail(0) == []
    assert bodies(queue.tail(2, include_expired=True)) == ["18", "19"]


def test_tail_dereferences_side_files(queue: Queue) -> None:
    queue.send("ask", "x" * 5000)
    (message,) = queue.tail()
    assert (message["body"], message["_body_source"]) == ("x" * 5000, "side-file")
    assert set(message) == {*KEYS, "_body_source"}


def test_tail_moves_no_cursor_and_writes_nothing(queue: Queue) -> None:
    queue.send("ask", "x")
    queue.poll("a")
    queue.send("ask", "y")
    before = snapshot(queue.root)
    queue.tail()
    assert snapshot(queue.root) == before
    assert bodies(queue.poll("a")) == ["y"]


def test_tail_of_nothing_is_empty_and_makes_nothing(queue: Queue) -> None:
    assert queue.tail() == []
    assert queue.tail(session="other") == []
    assert not queue.root.exists()


def test_tail_needs_no_lock(queue: Queue) -> None:
    queue.send("ask", "x")
    with queue._session(None).locked():
        assert bodies(queue.tail()) == ["x"]


def test_tail_leaves_out_torn_and_unreadable_lines(queue: Queue) -> None:
    queue.send("ask", "x")
    raw(queue, b"no json\n")
    queue.send("ask", "y")
    raw(queue, b'{"msg_id":')
    assert bodies(queue.tail()) == ["x", "y"]


def test_tail_reads_further_back_when_needed(queue: Queue) -> None:
    for number in range(50):
        text = f"{number:02}" + "x" * (TAIL_FIRST_BYTES // 20)
        queue.send("ask", text, ttl_s=0 if 5 <= number < 45 else None)
    assert [body[:2] for body in bodies(queue.tail(7))] == ["03", "04", "45", "46", "47", "48", "49"]
    assert len(queue.tail(11)) == 10


def test_tail_refuses_a_negative_number(queue: Queue) -> None:
    with pytest.raises(InvalidMessage):
        queue.tail(-1)


def test_tail_keeps_no_descriptor(queue: Queue) -> None:
    queue.send("ask", "x")
    before = open_descriptors()
    for n in (0, 1, 100):
        queue.tail(n)
    assert open_descriptors() == before


# ---- expire ----------------------------------------------------------------------------------------


def test_expire_removes_expired_messages_and_returns_their_number(queue: Queue, clock: Clock) -> None:
    long_gone = queue.send("ask", "x" * 5000, ttl_s=10)
    long_kept = queue.send("ask", "y" * 5000, ttl_s=11)
    queue.send("ask", "gone", ttl_s=10)
    queue.send("ask", "kept")
    clock.forward(10)
    assert queue.expire() == 2
    assert queue.expire() == 0
    assert [path.name for path in (session_of(queue) / "bodies").iterdir()] == [f"{long_kept}.txt"]
    assert long_gone.encode() not in messages_of(queue).read_bytes()
    assert bodies(queue.poll("a")) == ["y" * 5000, "kept"]


def test_expire_without_a_session_means_the_default_one(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in ("default", "s1", "s1", "s2"):
        queue.send("ask", "x", ttl_s=0, session=session)
    assert queue.expire() == 1
    assert queue.expire("s2") == 1
    monkeypatch.setenv("ZOS_MQ_SESSION", "s1")
    assert queue.expire() == 2
    assert queue.expire("nowhere") == 0
    assert not session_of(queue, "nowhere").exists()


def test_expire_of_an_empty_root_is_nothing(queue: Queue) -> None:
    assert queue.expire() == 0
    assert not queue.root.exists()


def test_expire_keeps_every_cursor_at_its_message(queue: Queue, clock: Clock) -> None:
    agents = []
    for number in range(12):
        queue.send("ask", str(number), ttl_s=5 if number % 3 else None)
        agent_id = f"a{number}"
        queue.poll(agent_id)
        agents.append(agent_id)
    clock.forward(5)
    assert queue.expire() == 8
    queue.send("ask", "new")
    for number, agent_id in enumerate(agents):
        left = [str(other) for other in range(number + 1, 12) if other % 3 == 0]
        assert bodies(queue.poll(agent_id)) == [*left, "new"]


def test_expire_keeps_topic_positions_at_their_messages(queue: Queue, clock: Clock) -> None:
    for number in range(12):
        queue.send("ask" if number % 2 else "status", str(number), ttl_s=5 if number % 3 else None)
        queue.poll(f"a{number}", "ask", keep_filtered=True)
    clock.forward(5)
    queue.expire()
    for number in range(12):
        asked = [str(other) for other in range(number + 1, 12) if other % 3 == 0 and other % 2]
        status = [str(other) for other in range(0, 12, 6)]
        assert bodies(queue.poll(f"a{number}", "ask", keep_filtered=True)) == asked
        assert bodies(queue.poll(f"a{number}")) == status


def test_expire_keeps_unreadable_lines_unchanged(queue: Queue) -> None:
    garbage = [b"no json\n", b"\xff\xfe\x00\n", b"\n", b'{"msg_id":1}\n', b"\r\n"]
    for line in garbage:
        queue.send("ask", "x", ttl_s=0)
        raw(queue, line)
    queue.send("ask", "damaged", ttl_s=0)
    damaged = messages_of(queue).read_bytes().splitlines(keepends=True)[-1].replace(b"damaged", b"DAMAGED")
    queue.send("ask", "kept")
    kept = messages_of(queue).read_bytes().splitlines(keepends=True)[-1]
    raw(queue, damaged + b"torn")
    assert queue.expire() == 6
    assert messages_of(queue).read_bytes() == b"".join(garbage) + kept + damaged + b"torn"


def test_expire_never_touches_the_side_file_of_a_damaged_line(queue: Queue) -> None:
    msg_id = queue.send("ask", "x" * 5000, ttl_s=0)
    messages_of(queue).write_bytes(messages_of(queue).read_bytes().replace(b"anonymous", b"Anonymous"))
    assert queue.expire() == 0
    assert (session_of(queue) / "bodies" / f"{msg_id}.txt").exists()


def test_expire_raises_the_epoch_only_when_offsets_change(queue: Queue) -> None:
    queue.send("ask", "x")
    queue.expire()
    assert queue.inbox("a")["epoch"] == 0
    queue.send("ask", "x", ttl_s=0)
    queue.expire()
    assert queue.inbox("a")["epoch"] == 1


# ---- status ----------------------------------------------------------------------------------------


def test_status_counts_everything(queue: Queue, clock: Clock) -> None:
    queue.send("ask", "x", ttl_s=1)
    queue.send("ask", "x" * 5000)
    queue.send("status", "x")
    queue.poll("a")
    raw(queue, b"no json\n")
    clock.forward(1)
    assert queue.status("default") == {
        "messages": 4,
        "expired": 1,
        "by_topic": {"ask": 2, "status": 1},
        "queue_bytes": messages_of(queue).stat().st_size,
        "cursors": {"a": cursor_of(queue, "a")},
        "unreadable": 1,
    }


def test_status_without_a_session_covers_all(queue: Queue) -> None:
    queue.send("ask", "x", session="s1")
    queue.send("ask", "x", session="s2")
    assert {name: counts["messages"] for name, counts in queue.status().items()} == {"s1": 1, "s2": 1}


def test_status_of_nothing_is_empty_and_makes_nothing(queue: Queue) -> None:
    assert queue.status() == {}
    assert queue.status("nowhere")["messages"] == 0
    assert not queue.root.exists()


def test_status_survives_a_damaged_cursor(queue: Queue) -> None:
    queue.send("ask", "x")
    queue.poll("a")
    queue.poll("b")
    (session_of(queue) / "cursors" / "a.cursor").write_text("x")
    assert list(queue.status("default")["cursors"]) == ["b"]


# ---- environment -----------------------------------------------------------------------------------


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Queue().root == tmp_path / "home/.local/share/postroom/queue"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Queue().root == tmp_path / "data/postroom/queue"
    monkeypatch.setenv("ZOS_HOME", str(tmp_path / "zos"))
    assert Queue().root == tmp_path / "zos/agent-mq"
    monkeypatch.setenv("ZOS_MQ_ROOT", str(tmp_path / "mq"))
    assert Queue().root == tmp_path / "mq"
    monkeypatch.setenv("POSTROOM_QUEUE_ROOT", str(tmp_path / "ours"))
    assert Queue().root == tmp_path / "ours"
    assert Queue(tmp_path / "told").root == tmp_path / "told"


def test_the_threshold_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("ZOS_MQ_BODY_THRESHOLD", "100")
    assert Queue(root).body_threshold == 100
    monkeypatch.setenv("POSTROOM_QUEUE_BODY_THRESHOLD", "200")
    assert Queue(root).body_threshold == 200
    assert Queue(root, body_threshold=300).body_threshold == 300
    monkeypatch.setenv("POSTROOM_QUEUE_BODY_THRESHOLD", "many")
    with pytest.raises(ValueError, match="POSTROOM_QUEUE_BODY_THRESHOLD"):
        Queue(root)


def test_the_session_comes_from_the_environment_at_every_call(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ZOS_MQ_SESSION", "POSTROOM_QUEUE_SESSION"):
        monkeypatch.setenv(variable, variable)
        queue.send("ask", variable)
        assert bodies(queue.poll("a")) == [variable]
        assert bodies(queue.tail(session=variable)) == [variable]
    queue.send("ask", "told", session="told")
    assert bodies(queue.poll("a", session="told")) == ["told"]
    monkeypatch.setenv("POSTROOM_QUEUE_SESSION", "../up")
    with pytest.raises(InvalidName):
        queue.send("ask", "x")


def test_the_sender_comes_from_the_environment_at_every_call(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("ask", "x")
    monkeypatch.setenv("ZOS_MQ_AGENT_ID", "zos")
    queue.send("ask", "x")
    monkeypatch.setenv("POSTROOM_QUEUE_AGENT_ID", "ours")
    queue.send("ask", "x")
    queue.send("ask", "x", sender="told")
    assert [message["from"] for message in queue.poll("a")] == ["anonymous", "zos", "ours", "told"]
    monkeypatch.setenv("POSTROOM_QUEUE_AGENT_ID", "no name")
    with pytest.raises(InvalidName):
        queue.send("ask", "x")


# ---- beyond: filters that keep -----------------------------------------------------------------------


def test_topic_filter_skips_other_topics_unless_keep_filtered(queue: Queue) -> None:
    for topic in ("ask", "status", "ask", "answer"):
        queue.send(topic, topic)
    assert bodies(queue.poll("keeps", "ask", keep_filtered=True)) == ["ask", "ask"]
    assert bodies(queue.poll("keeps")) == ["status", "answer"]
    assert bodies(queue.poll("eats", "ask")) == ["ask", "ask"]
    assert queue.poll("eats") == []


def test_kept_messages_are_delivered_once_and_in_order(queue: Queue) -> None:
    queue.send("ask", "1")
    queue.send("status", "2")
    assert bodies(queue.poll("a", "ask", keep_filtered=True)) == ["1"]
    queue.send("ask", "3")
    queue.send("status", "4")
    assert bodies(queue.poll("a", ["ask", "status"], keep_filtered=True)) == ["2", "3", "4"]
    assert queue.poll("a") == []


def test_keeping_without_a_filter_is_a_plain_poll(queue: Queue) -> None:
    queue.send("ask", "x")
    assert bodies(queue.poll("a", keep_filtered=True)) == ["x"]
    assert cursor_of(queue, "a") == messages_of(queue).stat().st_size


def test_plain_filter_skips_messages_kept_before(queue: Queue) -> None:
    queue.send("status", "kept")
    queue.poll("a", "ask", keep_filtered=True)
    queue.poll("a", "ask")
    assert queue.poll("a") == []


# ---- beyond: waiting -------------------------------------------------------------------------------


def test_a_waiting_poll_returns_existing_messages_at_once(queue: Queue) -> None:
    queue.send("ask", "x")
    assert bodies(queue.poll("a", wait_s=60)) == ["x"]


def test_a_waiting_poll_wakes_for_its_own_messages_only(queue: Queue, root: Path) -> None:
    def send() -> None:
        with Queue(root) as other:
            other.send("ask", "for another", to="b")
            other.send("status", "another topic")
            other.send("ask", "for a", to="a")

    sender = threading.Thread(target=send)
    sender.start()
    assert bodies(queue.poll("a", "ask", wait_s=60)) == ["for a"]
    sender.join()


@pytest.mark.parametrize("wait_s", [0.01, 0])
def test_a_wait_ends_when_its_time_is_over(queue: Queue, wait_s: float) -> None:
    assert queue.poll("a", wait_s=wait_s) == []


@pytest.mark.parametrize("seconds", [-1, math.nan, "5", None])
def test_a_wait_is_a_number_of_seconds(queue: Queue, seconds: Any) -> None:
    with pytest.raises(InvalidMessage, match="wait_s"):
        queue.poll("a", wait_s=seconds)
    with pytest.raises(InvalidMessage, match="timeout_s"):
        queue.ask("?", "b", timeout_s=seconds)
    assert not queue.root.exists()


# ---- beyond: asking --------------------------------------------------------------------------------


def answering(queue: Queue, **answer: Any) -> threading.Thread:
    """Another agent that waits for one question and answers it."""

    def answer_one() -> None:
        with Queue(queue.root, clock=lambda: START) as other:
            (question,) = other.poll("helper", "ask", wait_s=60)
            other.send("status", "noise", to=question["from"])
            other.send("answer", "to another question", to=question["from"], reply_to="m-0")
            fields = {"to": question["from"], "reply_to": question["msg_id"], "body": "42", **answer}
            other.send("answer", **fields)

    thread = threading.Thread(target=answer_one)
    thread.start()
    return thread


@pytest.mark.parametrize("body", ["42", "long" * 2000, "@file:x"])
def test_ask_gives_the_answer_and_leaves_the_rest(queue: Queue, body: str) -> None:
    helper = answering(queue, body=body)
    answer = queue.ask("how much?", "helper", sender="me", timeout_s=60)
    helper.join()
    assert answer is not None
    assert (answer["topic"], answer["body"], answer["to"]) == ("answer", body, "me")
    assert bodies(queue.poll("me")) == ["noise", "to another question"]
    assert queue.poll("me") == []


def test_ask_returns_none_without_an_answer(queue: Queue) -> None:
    assert queue.ask("anybody?", "nobody", sender="me", timeout_s=0.01) is None
    assert bodies(queue.poll("nobody")) == ["anybody?"]


def test_an_answer_that_was_polled_is_not_given_again(queue: Queue) -> None:
    asked: list[Any] = []
    asker = threading.Thread(
        target=lambda: asked.append(queue.ask("?", "helper", sender="me", timeout_s=0.5))
    )
    with Queue(queue.root) as other:
        asker.start()
        (question,) = other.poll("helper", wait_s=60)
        with other._session(None).locked() as size:  # no other process can write in between
            line = b'{"msg_id":"f","ts":"","from":"h","topic":"answer","body":"42","in_reply_to":"%b"}\n'
            other._session(None)._file.append(line % question["msg_id"].encode(), size)
            other._session(None).write_progress(
                "me", ReadProgress(), ReadProgress(0, {"answer": messages_of(queue).stat().st_size})
            )
    asker.join()
    assert asked == [None]


def test_ask_ignores_unrelated_and_expired_answers(queue: Queue) -> None:
    for answer in ({"to": "somebody"}, {"ttl_s": 0}):
        helper = answering(queue, **answer)
        assert queue.ask("?", "helper", sender="me", timeout_s=0.2) is None
        helper.join()


def test_an_answer_is_found_after_a_compaction(queue: Queue) -> None:
    for _ in range(20):
        queue.send("ask", "x" * 100, ttl_s=0)
    helper_done: list[bool] = []

    def answer_one() -> None:
        with Queue(queue.root) as other:
            (question,) = other.poll("helper", wait_s=60)
            assert other.expire() == 20
            other.send("answer", "42", to="me", reply_to=question["msg_id"])
            helper_done.append(True)

    helper = threading.Thread(target=answer_one)
    helper.start()
    answer = queue.ask("?", "helper", sender="me", timeout_s=60)
    helper.join()
    assert helper_done
    assert answer is not None
    assert answer["body"] == "42"
    assert "42" not in bodies(queue.poll("me"))


def test_answers_taken_ahead_are_remembered_within_a_limit(queue: Queue) -> None:
    queue.limits = QueueLimits(taken_max=3)
    taken = []

    def asked(number: int) -> None:
        helper = answering(queue, body=str(number))
        answer = queue.ask("?", "helper", sender="me", timeout_s=60)
        helper.join()
        assert answer is not None
        taken.append(answer["body"])

    for number in range(3):
        asked(number)
    # "to another question" is unread and older: nothing can be forgotten until it is polled.
    with pytest.raises(QueueError, match="poll first"):
        asked(3)
    assert taken == ["0", "1", "2"]
    assert [body for body in bodies(queue.poll("me")) if body.isdigit()] == ["3"]
    for number in range(4, 6):
        asked(number)
    assert [body for body in bodies(queue.poll("me")) if body.isdigit()] == []


def test_answers_taken_in_a_row_need_no_memory(queue: Queue) -> None:
    queue.limits = QueueLimits(taken_max=3)

    def answer_all() -> None:
        with Queue(queue.root) as other:
            for _ in range(8):
                (question,) = other.poll("helper", "ask", wait_s=60)
                other.send("answer", question["body"], to="me", reply_to=question["msg_id"])

    helper = threading.Thread(target=answer_all)
    helper.start()
    answers = [queue.ask(str(number), "helper", sender="me", timeout_s=60) for number in range(8)]
    helper.join()
    assert [answer and answer["body"] for answer in answers] == [str(number) for number in range(8)]
    assert queue.poll("me", "answer", keep_filtered=True) == []
    assert queue.poll("me") == []


# ---- beyond: proof of emptiness ----------------------------------------------------------------------


def test_an_inbox_proves_what_was_read(queue: Queue) -> None:
    assert queue.inbox("a") == {"cursor": 0, "high_water": 0, "epoch": 0, "topics": {}, "empty": True}
    assert not queue.root.exists()
    queue.send("ask", "x")
    size = messages_of(queue).stat().st_size
    assert queue.inbox("a") == {"cursor": 0, "high_water": size, "epoch": 0, "topics": {}, "empty": False}
    queue.poll("a", "ask", keep_filtered=True)
    assert queue.inbox("a")["topics"] == {"ask": size}
    assert queue.inbox("a")["empty"]
    queue.send("status", "y")
    assert not queue.inbox("a")["empty"]
    size = messages_of(queue).stat().st_size
    queue.poll("a")
    raw(queue, b"torn")
    assert queue.inbox("a") == {"cursor": size, "high_water": size, "epoch": 0, "topics": {}, "empty": True}


def test_an_inbox_is_empty_only_when_every_topic_was_read(queue: Queue) -> None:
    for topic in sorted(TOPICS):
        queue.send(topic, "x")
    for topic in sorted(TOPICS):
        assert not queue.inbox("a")["empty"]
        queue.poll("a", topic, keep_filtered=True)
    assert queue.inbox("a")["empty"]


def test_a_foreign_topic_that_waits_makes_an_inbox_not_empty(queue: Queue) -> None:
    queue.send("ask", "a")
    raw(queue, b'{"msg_id":"f1","ts":"","from":"x","topic":"gossip","body":"b"}\n')
    queue.poll("ada", sorted(TOPICS), keep_filtered=True)
    assert not queue.inbox("ada")["empty"]
    assert bodies(queue.poll("ada")) == ["b"]
    assert queue.inbox("ada")["empty"]


# ---- beyond: registered agents -----------------------------------------------------------------------


def test_unknown_recipients_are_reported_once_agents_register(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send("ask", "x", to="stranger")
    assert caplog.text == ""
    queue.register("known")
    queue.register("known")
    for to in ("known", None, "all", "broadcast"):
        queue.send("ask", "x", to=to)
    assert caplog.text == ""
    queue.send("ask", "x", to="stranger")
    assert "'stranger'" in caplog.text
    marked = [entry.get("unknown_recipient", False) for entry in audit_of(queue)]
    assert marked == [False] * 5 + [True]
    assert len(queue.poll("stranger")) == 5, "it is reported, and delivered all the same"


def test_agents_register_in_a_session(queue: Queue) -> None:
    assert queue.agents() == []
    for agent_id in ("b", "a", "x.tmp", "a.1.tmp"):
        queue.register(agent_id)
    queue.register("c", "other")
    assert queue.agents() == ["a", "a.1.tmp", "b", "x.tmp"]
    assert queue.agents("other") == ["c"]


def test_threads_can_register_the_same_agent(queue: Queue) -> None:
    failures: list[BaseException] = []

    def register() -> None:
        try:
            for _ in range(50):
                queue.register("a")
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert queue.agents() == ["a"]


# ---- beyond: check and repair ------------------------------------------------------------------------


def test_check_of_an_intact_session_is_ok(queue: Queue) -> None:
    queue.send("ask", "x" * 5000)
    queue.poll("a")
    report = queue.check()
    assert report.ok
    assert (report.session, report.messages) == ("default", 1)
    assert queue.check("nowhere").ok
    assert not session_of(queue, "nowhere").exists()


def test_check_reports_all_damage(queue: Queue) -> None:
    raw(queue, b"no json\n")
    lost = queue.send("ask", "x" * 5000)
    queue.send("ask", "y" * 5000)
    queue.poll("a")
    queue.poll("b")
    (session_of(queue) / "bodies" / f"{lost}.txt").unlink()
    (session_of(queue) / "bodies" / "m-orphan.txt").write_text("nobody's")
    (session_of(queue) / "cursors" / "a.cursor").write_text("3")
    report = queue.check()
    assert not report.ok
    assert report.messages == 3
    assert [(damage.offset, damage.length) for damage in report.unreadable] == [(0, 8)]
    assert [fault.msg_id for fault in report.bodies] == [lost]
    assert list(report.cursors) == ["a"]
    assert report.unused_bodies == ("m-orphan",)


@pytest.mark.parametrize("suffix", ["cursor", "topics"])
@pytest.mark.parametrize(("to", "left"), [("start", ["x", "y"]), ("end", []), (None, ["y"])])
def test_a_damaged_cursor_can_be_set(queue: Queue, suffix: str, to: Any, left: list[str]) -> None:
    queue.send("ask", "x")
    size = messages_of(queue).stat().st_size
    queue.send("ask", "y")
    queue.poll("a")
    path = session_of(queue) / "cursors" / f"a.{suffix}"
    path.write_text("damaged")
    assert not queue.check().ok
    offset = queue.repair_cursor("a", size if to is None else to)
    assert offset == cursor_of(queue, "a")
    assert queue.check().ok
    kept = [other for other in path.parent.iterdir() if other.name.startswith(f"{path.name}.damaged-")]
    assert [other.read_text() for other in kept] == ["damaged"]
    assert bodies(queue.poll("a")) == left


@pytest.mark.parametrize("to", [-1, 3, 10**6, True, 1.5, "middle"])
def test_a_cursor_is_not_set_to_the_middle_of_a_line(queue: Queue, to: Any) -> None:
    queue.send("ask", "x")
    with pytest.raises(InvalidMessage):
        queue.repair_cursor("a", to)
    assert bodies(queue.poll("a")) == ["x"]


def test_a_cursor_goes_to_the_end_of_the_last_whole_line(queue: Queue) -> None:
    queue.send("ask", "x")
    size = messages_of(queue).stat().st_size
    raw(queue, b"torn")
    assert queue.repair_cursor("a", "end") == size


def test_repair_makes_no_session(queue: Queue) -> None:
    queue.send("ask", "x")
    for call in (
        lambda: queue.repair_cursor("a", "start", "nowhere"),
        lambda: queue.repair_body("m-1", "x", "nowhere"),
    ):
        with pytest.raises(InvalidMessage, match="no session 'nowhere'"):
            call()
    assert queue.sessions() == ["default"]


@pytest.mark.parametrize("damage", [a_folder, as_symlink])
def test_a_cursor_that_is_not_a_file_can_be_set(queue: Queue, damage: Callable[[Path], None]) -> None:
    queue.send("ask", "x")
    queue.poll("a")
    damage(session_of(queue) / "cursors" / "a.cursor")
    assert list(queue.check().cursors) == ["a"]
    assert queue.status("default")["cursors"] == {}
    assert queue.expire() == 0
    queue.repair_cursor("a", "start")
    assert queue.check().ok
    assert bodies(queue.poll("a")) == ["x"]


def test_a_lost_side_file_is_restored_only_from_a_matching_copy(queue: Queue) -> None:
    msg_id = queue.send("ask", "x" * 5000)
    path = session_of(queue) / "bodies" / f"{msg_id}.txt"
    path.write_bytes(b"damaged")
    for wrong in ("x" * 4999, "y" * 5000):
        with pytest.raises(InvalidMessage, match="not the body"):
            queue.repair_body(msg_id, wrong)
    queue.repair_body(msg_id, "x" * 5000)
    assert bodies(queue.poll("a")) == ["x" * 5000]
    kept = [other.read_bytes() for other in path.parent.iterdir() if other != path]
    assert kept == [b"damaged"]


def test_only_a_line_with_a_side_file_can_get_one(queue: Queue) -> None:
    msg_id = queue.send("ask", "short")
    for unknown in (msg_id, "m-unknown"):
        with pytest.raises(InvalidMessage, match="no message"):
            queue.repair_body(unknown, "short")
    assert not (session_of(queue) / "bodies").exists()


# ---- life ------------------------------------------------------------------------------------------


def test_a_closed_queue_opens_again(queue: Queue) -> None:
    queue.send("ask", "x")
    queue.close()
    queue.close()
    assert bodies(queue.poll("a")) == ["x"]


def test_a_closed_queue_holds_no_descriptor(root: Path) -> None:
    before = open_descriptors()
    with Queue(root) as queue:
        queue.send("ask", "x", session="s1")
        queue.poll("a", session="s2", wait_s=0.01)
        assert open_descriptors() > before
    assert open_descriptors() == before


def test_reopening_waits_for_a_thread_at_work(queue: Queue) -> None:
    queue.send("ask", "x")
    with queue._session(None).locked() as size:
        reopener = threading.Thread(target=queue.reopen)
        reopener.start()
        reopener.join(0.2)
        assert size == messages_of(queue).stat().st_size
    reopener.join()
    assert bodies(queue.poll("a")) == ["x"]


def test_a_lock_that_stays_held_is_a_timeout(queue: Queue, root: Path) -> None:
    queue.send("ask", "x")
    with Queue(root, lock_timeout_s=0.01) as hurried, queue._session(None).locked():
        for call in (lambda: hurried.send("ask", "y"), lambda: hurried.poll("a"), hurried.expire):
            with pytest.raises(LockTimeout):
                call()
    assert bodies(queue.poll("a")) == ["x"]


def test_a_symlink_in_place_of_the_queue_is_refused(queue: Queue, tmp_path: Path) -> None:
    messages_of(queue).parent.mkdir(parents=True)
    messages_of(queue).symlink_to(tmp_path / "elsewhere")
    for call in (lambda: queue.send("ask", "x"), lambda: queue.poll("a"), queue.tail):
        with pytest.raises(UnsafePath):
            call()
    assert not (tmp_path / "elsewhere").exists()


def test_threads_share_a_queue(queue: Queue) -> None:
    received: list[list[str]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for turn in range(25):
            queue.send("ask", f"{number}-{turn}", session=f"s{turn % 2}")
            received[number] += bodies(queue.poll(f"a{number}", session="s0"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(f"{number}-{turn}" for number in range(4) for turn in range(0, 25, 2))
    for number in range(4):
        received[number] += bodies(queue.poll(f"a{number}", session="s0"))
        assert sorted(received[number]) == everything


def test_status_inbox_and_check_take_no_lock(queue: Queue, root: Path) -> None:
    queue.send("ask", "x", to="ada")
    queue.poll("bob")
    with Queue(root, lock_timeout_s=0.01) as other, queue._session(None).locked():
        assert other.status("default")["messages"] == 1
        assert other.inbox("ada")["empty"] is False
        assert other.inbox("bob")["empty"] is True
        assert other.check().ok
        assert [message["body"] for message in other.tail()] == ["x"]


def test_inspecting_a_copy_changes_nothing(queue: Queue, root: Path, tmp_path: Path) -> None:
    queue.send("ask", "x")
    copy = tmp_path / "copy"
    (copy / "sessions" / "default").mkdir(parents=True)
    lines = copy / "sessions" / "default" / "messages.jsonl"
    lines.write_bytes((root / "sessions" / "default" / "messages.jsonl").read_bytes())
    looking = Queue(copy)
    assert (looking.status("default")["messages"], looking.inbox("ada")["empty"]) == (1, False)
    assert looking.check().ok
    assert [path.name for path in sorted(copy.rglob("*")) if path.is_file()] == ["messages.jsonl"]


def test_inspection_takes_the_lock_after_damage_or_a_cut_compaction(queue: Queue, root: Path) -> None:
    queue.send("ask", "x")
    with Queue(root, lock_timeout_s=0.01) as other, queue._session(None).locked():
        journal = root / "sessions" / "default" / "expire.journal"
        journal.write_text("{}")
        for call in (other.status, lambda: other.inbox("ada"), other.check):
            with pytest.raises(LockTimeout):
                call()
        journal.unlink()
        with (root / "sessions" / "default" / "messages.jsonl").open("a") as file:
            file.write("no message\n")
        with pytest.raises(LockTimeout):  # possibly an append that is being rolled back
            other.check()
    assert len(queue.check().unreadable) == 1
