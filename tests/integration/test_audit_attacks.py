"""Hostile input for the commands of the audit stream: it is reported and passed over, and ends nothing."""

from pathlib import Path

import apsw
import pytest

from postroom import Tasks
from postroom.contracts.audit import Audit
from postroom.core.events import to_line
from postroom.sinks.segments import SegmentSink
from tests.integration.commandline import isolate, postroom, run_on_terminal
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
    # A queue's line has no open field: below the limit of the decoder an unknown one is passed over.
    assert kinds == ["created", "alert" if source == "mail" else "created", "alert", "created"]
    assert postroom("audit", "verify", "audit").code == 0


def test_a_first_line_without_end_is_shipped_as_alerts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "events.jsonl").write_bytes(b"[" * ((3 << 20) - 9) + b"\n" + MAIL % (1, 1, b""))
    done = postroom("audit", "ship", "--mail", "data", "--to", "audit", "--once")
    assert done.line["shipped"] == 4
    assert Audit(tmp_path / "audit").tail(1)[0].message_id == "q/1"


@pytest.mark.parametrize("sealed", [True, False])
def test_a_deep_line_of_a_segment_is_left_out_and_told(sealed: bool, tmp_path: Path) -> None:
    with SegmentSink(tmp_path / "audit") as sink:
        sink.write([event({})])
        if sealed:
            sink.seal()
    [segment] = (tmp_path / "audit").glob("date=*/hour=*/*.jsonl" if sealed else "_open/*.jsonl")
    with segment.open("ab") as file:
        file.write(deep_line(700) + deep_line(50_000))
        file.write(deep_line(3).replace(b'"seq":1', b'"seq":2').replace(b"s#1", b"s#2"))
    told = [] if sealed else ["s#1", "s#2"]
    for command in (("tail",), ("query", "--kind", "created")):
        done = postroom("audit", *command, "audit")
        assert done.code == 0
        assert [line["event_id"] for line in done.lines] == (told or ["s#1"])
        if not sealed:
            assert done.errors.count("nested deeper than 100 levels") == 2
    done = postroom("verify", "audit")
    assert done.code == 0
    assert postroom("audit", "verify", "audit").code == (1 if sealed else 0)
    with SegmentSink(tmp_path / "audit") as sink:  # the next writer goes on behind it
        assert sink.position("s") == (1 if sealed else 2)


def test_a_time_that_no_calendar_has_is_shown_as_a_number(tmp_path: Path) -> None:
    with SegmentSink(tmp_path / "audit") as sink:
        line = to_line(event({})).replace(b'"ts_us":1', b'"ts_us":99999999999999999999')
        sink.write_lines([line], [event({})])
        sink.seal()
    done = run_on_terminal("postroom", "audit", "tail", "audit")
    assert done.code == 0
    assert "99999999999999999999" in done.out


def test_a_deep_row_of_a_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Tasks.open(f"sqlite:///{tmp_path}/run/queue.db") as tasks:
        tasks.enqueue(agent="ada", payload=1)
        [task] = tasks.claim(agent="ada")
        tasks.complete(task.task_id, task.lease, "ok")
    database = apsw.Connection(f"{tmp_path}/run/queue.db")
    deep = f'[{{"seq":1,"ts_us":1,"kind":"created","queue":"q","detail":{{"x":{nested(50_000).decode()}}}}}]'
    database.execute("UPDATE events SET batch = ?", (deep,))
    database.close()
    done = postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    assert done.code == 1
    assert "queue.db is damaged" in done.error
