"""Hostile input for the audit commands: it is reported and skipped, and stops nothing."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from postroom import Tasks
from postroom.audit.heads import StreamHead
from postroom.audit.segment_writer import SegmentSink
from postroom.cli.shell import plain
from postroom.contracts.audit import Audit
from postroom.core.formats.events import to_line
from postroom.errors import WriteFailed
from postroom.server.folder import shipping
from postroom.stores.event_quarantine import ALERT
from postroom.stores.event_runs import UNREADABLE
from tests.integration.commandline import Result, isolate, postroom, run_on_terminal
from tests.unit.test_jsoninput import deep_line, event, nested


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


MAIL = b'{"kind":"created","ts_us":%d,"queue":"q","message_id":"q/%d"%b}\n'
QUEUE = b'{"ts":"2026-02-05T14:30:52Z","op":"send","session":"s","msg_id":"m%d"%b}\n'


def with_deep_lines(source: str) -> bytes:
    """A good line, two deep ones and a good one: one below the recursion limit and one far above it."""
    extra = (b"", b',"detail":{"x":%b}' % nested(900), b',"detail":{"x":%b}' % nested(100_000), b"")
    if source == "mail":
        return b"".join(MAIL % (n, n, more) for n, more in enumerate(extra, 1))
    return b"".join(QUEUE % (n, more) for n, more in enumerate(extra, 1))


@pytest.mark.parametrize("source", ["mail", "queue"])
def test_deep_lines_of_a_source_are_shipped_as_alerts(source: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    name = "events.jsonl" if source == "mail" else "audit.jsonl"
    (tmp_path / "data" / name).write_bytes(with_deep_lines(source))
    done = postroom("audit", "ship", f"--{source}", "data", "--to", "audit", "--once")
    assert (done.code, done.line["shipped"], done.errors) == (0, 4, "")
    kinds = [event.kind for event in Audit(tmp_path / "audit").query()]
    # A queue's line has no open field: an unknown field below the decoder's limit is ignored.
    assert kinds == ["created", "alert" if source == "mail" else "created", "alert", "created"]
    assert postroom("audit", "verify", "audit").code == 0


def test_a_first_line_without_end_is_shipped_as_alerts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "events.jsonl").write_bytes(b"[" * ((3 << 20) - 9) + b"\n" + MAIL % (1, 1, b""))
    done = postroom("audit", "ship", "--mail", "data", "--to", "audit", "--once")
    assert done.line["shipped"] == 4
    assert Audit(tmp_path / "audit").tail(1)[0].message_id == "q/1"


@pytest.mark.parametrize("sealed", [True, False])
def test_deep_line_of_a_segment_is_skipped_and_reported(sealed: bool, tmp_path: Path) -> None:
    with SegmentSink(tmp_path / "audit") as sink:
        sink.write([event({})])
        if sealed:
            sink.seal()
    [segment] = (tmp_path / "audit").glob("date=*/hour=*/*.jsonl" if sealed else "_open/*.jsonl")
    with segment.open("ab") as file:
        file.write(deep_line(700) + deep_line(50_000))
        file.write(deep_line(3).replace(b'"seq":1', b'"seq":2').replace(b"s#1", b"s#2"))
    expected = [] if sealed else ["s#1", "s#2"]
    for command in (("tail",), ("query", "--kind", "created")):
        done = postroom("audit", *command, "audit")
        assert done.code == 0
        assert [line["event_id"] for line in done.lines] == (expected or ["s#1"])
        if not sealed:
            assert done.errors.count("nested deeper than 100 levels") == 2
    assert postroom("verify", "audit").code == (1 if sealed else 0)
    assert postroom("audit", "verify", "audit").code == (1 if sealed else 0)
    with SegmentSink(tmp_path / "audit") as sink:  # the next writer continues after it
        assert sink.position("s") == (1 if sealed else 2)


def test_out_of_range_time_is_shown_as_a_number(tmp_path: Path) -> None:
    with SegmentSink(tmp_path / "audit") as sink:
        line = to_line(event({})).replace(b'"ts_us":1', b'"ts_us":99999999999999999999')
        sink.write_lines([line], [event({})])
        sink.seal()
    done = run_on_terminal("postroom", "audit", "tail", "audit")
    assert done.code == 0
    assert "99999999999999999999" in done.out


def test_a_deep_row_of_a_store_is_shipped_as_alerts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Tasks.open(f"sqlite:///{tmp_path}/run/queue.db") as tasks:
        tasks.enqueue(agent="ada", payload=1)
        [task] = tasks.claim(agent="ada")
        tasks.complete(task.task_id, task.lease, "ok")
    database = apsw.Connection(f"{tmp_path}/run/queue.db")
    deep = f'[{{"seq":1,"ts_us":1,"kind":"created","queue":"q","detail":{{"x":{nested(50_000).decode()}}}}}]'
    database.execute("UPDATE events SET batch = ?", (deep,))
    database.close()
    for _ in range(2):  # the second one ships the alerts about what the first one kept
        assert ship().code == 0
    errors = [json.loads(line)["error_type"] for line in postroom("audit", "tail", "audit").raw.splitlines()]
    assert errors == [UNREADABLE, UNREADABLE, ALERT, ALERT]


# ---- what was removed from outside --------------------------------------------------------------------


def stream_of_tasks(count: int = 2) -> None:
    """A stream with the given number of sealed segments."""
    Path("run").mkdir(exist_ok=True)
    for _ in range(count):
        with Tasks.open("sqlite:///run/queue.db") as tasks:
            tasks.enqueue(agent="ada", payload=1)
        assert ship().code == 0


def ship() -> Result:
    return postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")


def remove(folder: str, *patterns: str) -> None:
    for pattern in patterns:
        for path in sorted(Path(folder).rglob(pattern), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def cut_last_segment() -> None:
    chain = Path("audit/_chain.jsonl")
    first, _, _ = chain.read_bytes().split(b"\n")
    chain.write_bytes(first + b"\n")
    remove("audit", "*/*/00000002-*", "00000002.idx")


def wipe_and_begin() -> None:
    remove("audit", "*")
    with SegmentSink("audit") as sink:
        sink.write([event({})])
        sink.seal()


ATTACKS: dict[str, tuple[Callable[[], None], str]] = {
    "wiped but for its folders": (
        lambda: remove("audit", "*.jsonl", "*.idx", "date=*/*", "date=*"),
        "no segment",
    ),
    "wiped": (lambda: remove("audit", "*"), "it was wiped"),
    "cut": (cut_last_segment, "segment 2 was recorded as sealed, but the chain ends with segment 1"),
    "replaced": (wipe_and_begin, "it was replaced"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_verify_detects_removed_segments_and_replaced_streams(attack: str) -> None:
    stream_of_tasks()
    assert postroom("audit", "verify", "audit").line["head_known"] is True
    do, says = ATTACKS[attack]
    do()
    done = postroom("audit", "verify", "audit")
    assert done.code == 1
    assert says in done.out + done.errors
    assert len((done.out + done.errors).splitlines()) == 1
    again = ship()  # continuing would hide it
    assert again.code != 0
    assert len(again.errors.splitlines()) == 1
    assert postroom("audit", "verify", "audit").code == 1


def test_verify_uses_the_head_recorded_in_a_store() -> None:
    stream_of_tasks()
    Path("audit.head").unlink()
    assert (
        postroom("audit", "verify", "audit", "--store", "sqlite:///run/queue.db").line["head_known"] is True
    )
    cut_last_segment()
    assert postroom("audit", "verify", "audit").line["head_known"] is False  # as of any copy
    done = postroom("audit", "verify", "audit", "--store", "sqlite:///run/queue.db")
    assert (done.code, done.line["reason"].partition(",")[0]) == (1, "segment 2 was recorded as sealed")
    assert "segment 2 was recorded" in ship().error


def test_retention_keeps_the_noted_head_valid() -> None:
    stream_of_tasks()
    assert len(postroom("audit", "retain", "audit", "--keep-days", "0").line["removed"]) == 2
    assert postroom("audit", "verify", "audit").code == 0
    stream_of_tasks(1)
    assert postroom("audit", "verify", "audit").line["head_known"] is True


def test_a_damaged_head_raises_a_one_line_error() -> None:
    stream_of_tasks(1)
    Path("audit.head").write_bytes(b"\xff")
    assert "audit.head cannot be read as the head of a stream" in postroom("audit", "verify", "audit").error


def test_an_unwritable_head_file_does_not_stop_the_shipper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, head: StreamHead) -> None:
        raise WriteFailed(folder, OSError(errno.EROFS, os.strerror(errno.EROFS)))

    monkeypatch.setattr(shipping, "note_head", refuse)
    Path("run").mkdir()
    with Tasks.open("sqlite:///run/queue.db") as tasks:
        tasks.enqueue(agent="ada", payload=1)
    done = ship()
    assert (done.code, done.line["shipped"]) == (0, 2)
    assert "could not be recorded next to the folder" in done.error
    assert not (tmp_path / "audit.head").exists()


def test_verify_of_a_folder_without_a_stream_fails(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = postroom("verify", "empty")
    assert (done.code, done.out) == (1, "")
    assert done.error == f"postroom: {tmp_path}/empty holds no audit stream"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bus", "missing.yaml"),
        ("--mail", "missing"),
        ("--queue", "missing"),
        ("--store", "sqlite:///missing.db"),
        ("--store", "postgres://nowhere"),
        ("--data", "missing"),
        ("--mail", "linked"),
        (),
    ],
)
def test_refused_shipper_creates_no_files(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    done = postroom("audit", "ship", *arguments, "--to", "audit", "--once")
    assert done.code in (1, 2)
    assert len(done.errors.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "linked"] == []


@pytest.mark.parametrize(
    "settings",
    [
        'redaction = "medium"\n[audit.patterns]\nx = "("',
        'token_key_file = "missing"',
        'key_file = "missing"',
        'publish = "nothing://x"',
    ],
)
def test_refused_setting_creates_no_files(settings: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "postroom.toml").write_text(f"[audit]\n{settings}\n")
    done = postroom("audit", "ship", "--mail", "data", "--to", "audit", "--once")
    assert done.code in (1, 2)
    assert len(done.errors.splitlines()) == 1
    assert not (tmp_path / "audit").exists()


def test_refused_second_stream_creates_no_files(tmp_path: Path) -> None:
    stream_of_tasks(1)
    done = postroom("audit", "ship", "--data", "run", "--to", "second", "--once")
    assert "go to another stream already" in done.error
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("audit", "tail", "-n", "x"), "'x' is not a whole number"),
        (("audit", "tail", "-n", "-1"), "-1 is not a number from 0 to 1000000000"),
        (("audit", "retain", ".", "--keep-days", "x"), "'x' is not a number"),
    ],
)
def test_invalid_number_is_reported_in_plain_words(arguments: tuple[str, ...], says: str) -> None:
    done = postroom(*arguments)
    assert done.code == 2
    assert says in done.error


def test_a_usage_error_of_several_lines_becomes_one() -> None:
    assert (
        plain("Missing option '--to'. Choose from:\n\ta,\n\tb") == "Missing option '--to'. Choose from: a, b"
    )
