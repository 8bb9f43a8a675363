"""Exchange with the original program: its files read here, and what we write reads there.

The original reads line by line, which is written down again here from its description: seek a line `---`,
collect the header up to the next one, then the body up to the next one; a last record counts only when its
body ends in a newline. A line is compared without its CR and LF.
"""

import fcntl
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroom import Bus, SinceIdNotFound
from tests.bustexts import STRUCTURE, bodies, names

SAMPLE = Path(__file__).parents[1] / "data" / "conductor-bus.yaml"
SAMPLE_ID = "MSG-20261115-010112-{}-PID26098-{:04d}"


class Theirs(NamedTuple):
    """A message as the original sees it: the header it knows, and the body's bytes."""

    header: dict[str, Any]
    body: bytes


def original_reads(data: bytes) -> list[Theirs]:
    found: list[Theirs] = []
    state = "seek"
    header: list[bytes] = []
    fields: dict[str, Any] = {}
    body: list[bytes] = []
    for line in data.splitlines(keepends=True) if b"\r" not in data else _lines(data):
        separator = line.rstrip(b"\r\n") == b"---"
        if state == "header" and separator:
            try:
                fields = yaml.safe_load(b"".join(header)) or {}
                state, body = "body", []
            except yaml.YAMLError:
                header = []
        elif state == "header":
            header.append(line)
        elif separator:
            if state == "body":
                found.append(Theirs(fields, b"".join(body)))
            state, header = "header", []
        elif state == "body":
            body.append(line)
    if state == "body" and body and body[-1].endswith(b"\n"):
        found.append(Theirs(fields, b"".join(body)))
    return found


def _lines(data: bytes) -> list[bytes]:
    """A line ends in LF and in nothing else."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def stored_body(body: str) -> bytes:
    """A body as conductor-loop sees it: with the space added after `---`, and its final newline."""
    lines = body.encode("utf-8", "surrogateescape").split(b"\n")
    escaped = [
        line.replace(b"---", b"--- ", 1) if line.rstrip(b"\r").rstrip(b" ") == b"---" else line
        for line in lines
    ]
    stored = b"\n".join(escaped)
    return stored if stored.endswith(b"\n") else stored + b"\n"


def original_appends(path: Path, body: str, msg_id: str, **extra: str) -> None:
    """Append as conductor-loop does: under flock, a newline if the file is not empty, then the record."""
    more = "".join(f"{key}: {value}\n" for key, value in extra.items())
    end = "" if body.endswith("\n") else "\n"
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.stat().st_size:
            file.write(b"\n")
        header = (
            f'msg_id: {msg_id}\nts: 2026-11-15T01:01:12.5Z\ntype: FACT\nproject_id: p\ntask_id: ""\n{more}'
        )
        file.write(f"---\n{header}---\n{body}{end}".encode())


# ---- their files here ------------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path: Path) -> Bus:
    shutil.copy(SAMPLE, tmp_path / "bus.yaml")
    return Bus(tmp_path / "bus.yaml")


def test_every_message_of_a_file_of_the_original_reads_right(sample: Bus) -> None:
    messages = sample.read()
    nanos = [
        "326360337", "326525352", "326570686", "326605826", "326651834", "326716774", "326807164", "326830330"
    ]  # fmt: skip
    expected_ids = [SAMPLE_ID.format(nano, number) for number, nano in enumerate(nanos, 1)]
    assert [message.msg_id for message in messages] == expected_ids
    assert [message.body for message in messages] == [
        "Agent started successfully",
        "hello",
        "two",
        "three lines\n\nwith: yaml\n- look\n- alikes",
        "unicode é 漢字 😀 and tab\there",
        "an issue",
        "",
        "last one has no newline",
    ]
    assert [message.type for message in messages] == [
        "agent_started", "FACT", "FACT", "FACT", "agent_output", "ISSUE", "FACT", "FACT"
    ]  # fmt: skip
    first, fifth, sixth = messages[0], messages[4], messages[5]
    assert (first.project_id, first.task_id, first.run_id) == ("my-project", "task-001", "run-001")
    assert first.ts == datetime.fromisoformat("2026-11-15T01:01:12.326384Z")
    assert (fifth.project_id, fifth.task_id, fifth.run_id) == (
        "p: tricky 'quotes' \"and\" #hash",
        "no",
        "012",
    )
    assert fifth.parents == ["MSG-20260205-143052-000123456-PID12345-0001"]
    assert fifth.extra == {"parents": [{"msg_id": fifth.parents[0], "kind": "reply"}]}
    assert sixth.extra == {
        "issue_id": sixth.msg_id,
        "links": [{"url": "https://example.org/x", "label": "x"}],
        "meta": {"k": "v", "n": "1:30"},
    }
    assert [message.extra for message in messages if message not in {5: fifth, 6: sixth}.values()] == [{}] * 6
    assert all(message.attachment_path == "" for message in messages)


def test_a_file_of_the_original_verifies_and_is_not_touched_by_reading(sample: Bus) -> None:
    report = sample.verify()
    assert report.ok
    assert (report.messages, report.checked, report.unchecked, report.torn_tail_bytes) == (8, 0, 8, 0)
    everything = sample.read()
    for position, message in enumerate(everything):
        assert sample.read(message.msg_id) == everything[position + 1 :]
        assert sample.tail(position) == everything[len(everything) - position :]
    assert sample.query(parent="MSG-20260205-143052-000123456-PID12345-0001") == [everything[4]]
    assert sample.path.read_bytes() == SAMPLE.read_bytes()


def test_append_to_a_conductor_loop_file_continues_its_ids(sample: Bus) -> None:
    theirs = sample.read()
    made = sample.append(type="note", project_id="p", body="ours", parents=[theirs[-1].msg_id])
    assert made > theirs[-1].msg_id
    assert sample.read()[:-1] == theirs
    assert sample.read(theirs[-1].msg_id)[0].body == "ours"
    assert sample.path.read_bytes().startswith(SAMPLE.read_bytes() + b"\n---\nmsg_id: ")
    assert len(original_reads(sample.path.read_bytes())) == 9


def test_a_file_of_the_original_reads_as_documented(sample: Bus) -> None:
    """Check the reader in this file with the sample: eight messages with these ids."""
    theirs = original_reads(SAMPLE.read_bytes())
    assert [message.header["msg_id"] for message in theirs] == [message.msg_id for message in sample.read()]


def test_a_reader_continues_when_the_original_appends(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", poll_interval_s=0.01)
    follower = bus.follow()
    for number in range(10):
        if number % 2:
            bus.append(type="t", project_id="p", body=f"{number}")
        else:
            original_appends(bus.path, f"{number}", f"MSG-{number}", meta="x")
        assert next(follower).body == f"{number}"
    assert [message.body for message in bus.read()] == [f"{number}" for number in range(10)]
    assert [message.extra for message in bus.read()] == [{"meta": "x"}, {}] * 5
    assert len(original_reads(bus.path.read_bytes())) == 10


def test_a_foreign_record_at_the_end_is_held_back_until_its_writer_is_done(tmp_path: Path) -> None:
    """A foreign record has no length: while its writer holds the lock, more of its body may follow."""
    bus = Bus(tmp_path / "bus.yaml")
    original_appends(bus.path, "whole", "MSG-1")
    with bus.path.open("ab", buffering=0) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        header = b"msg_id: MSG-2\nts: 2026-01-01T00:00:00Z\ntype: t\nproject_id: p\n"
        writer.write(b"\n---\n" + header + b"---\nfirst line\n")
        assert [message.body for message in bus.read()] == ["whole"]
        writer.write(b"second line\n")
    assert [message.body for message in bus.read()] == ["whole", "first line\nsecond line"]


def test_a_foreign_record_that_outgrows_the_window_meanwhile_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postroom.logs import busfile

    bus = Bus(tmp_path / "bus.yaml")
    original_appends(bus.path, "line\n", "MSG-1")
    real = busfile.settled_size
    more = ["\n" * 2 * busfile.WINDOW_BYTES + "end\n"]  # the window always ends in a newline

    def settled_size(fd: int) -> int | None:
        with bus.path.open("a") as writer:
            writer.write(more.pop() if more else "")
        return real(fd)

    monkeypatch.setattr(busfile, "settled_size", settled_size)
    assert [message.body.replace("\n", "") for message in bus.read()] == ["lineend"]


def test_legacy_lines_are_messages_with_a_position(tmp_path: Path) -> None:
    path = tmp_path / "bus.yaml"
    path.write_text(
        "[2026-02-05 14:30:52] FACT: one\n"
        "some remark\n"
        "[2026-02-05T14:30:53Z] two words\n"
        "\n"
        "[2026-02-05 14:30:54] error: three\n"
    )
    bus = Bus(path)
    original_appends(path, "four", "MSG-4")
    bus.append(type="t", project_id="p", body="five")
    assert [(message.msg_id[:21], message.type, message.body) for message in bus.read()][:4] == [
        ("LEGACY-LINE-000000001", "FACT", "one"),
        ("LEGACY-LINE-000000003", "INFO", "two words"),
        ("LEGACY-LINE-000000005", "ERROR", "three"),
        ("MSG-4", "FACT", "four"),
    ]
    everything = bus.read()
    for position, message in enumerate(everything):
        assert bus.read(message.msg_id) == everything[position + 1 :]
        assert bus.tail(position) == everything[len(everything) - position :]
    with pytest.raises(SinceIdNotFound):
        bus.read("LEGACY-LINE-000000002")
    report = bus.verify()
    assert (report.messages, report.checked, report.unchecked) == (5, 1, 4)
    assert [damage.reason for damage in report.damaged] == ["text before the first record"]


def test_a_follower_continues_after_legacy_lines(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", poll_interval_s=0.01)
    bus.path.write_text("[2026-02-05 14:30:52] FACT: one\n")
    follower = bus.follow()
    assert next(follower).body == "one"
    with bus.path.open("a") as file:
        file.write("[2026-02-05 14:30:53] FACT: two\n")
    assert next(follower).msg_id == "LEGACY-LINE-000000002"
    bus.append(type="t", project_id="p", body="three")
    assert next(follower).body == "three"


# ---- our files there -------------------------------------------------------------------------------


fields = st.fixed_dictionaries(
    {"type": names, "project_id": names, "body": bodies},
    optional={
        "task_id": st.text(max_size=20),
        "run_id": st.text(max_size=20),
        "parents": st.lists(names, max_size=3),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(fields, min_size=1, max_size=5))
@example([{"type": "t", "project_id": "p", "body": body} for body in STRUCTURE])
def test_conductor_loop_reads_any_body(tmp_path: Path, sent: list[dict[str, Any]]) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.path.unlink(missing_ok=True)
    made = [bus.append(**message) for message in sent[:2]] + bus.append_many(sent[2:])
    ours = bus.read()
    theirs = original_reads(bus.path.read_bytes())
    assert [message.header["msg_id"] for message in theirs] == made == [message.msg_id for message in ours]
    for position, (mine, there, message) in enumerate(zip(ours, theirs, sent, strict=True)):
        for key in ("type", "project_id", "task_id", "run_id"):
            assert there.header[key] == message.get(key, "") == getattr(mine, key)
        assert there.header.get("parents", []) == message.get("parents", []) == list(mine.parents)
        assert there.header["ts"] == mine.ts
        assert mine.body == message["body"]
        separator = b"\n" if position < len(sent) - 1 else b""
        assert there.body == stored_body(message["body"]) + separator


def test_conductor_loop_reads_an_attachment(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    bus.append(type="t", project_id="p", attachment="out/a: b.md")
    assert original_reads(bus.path.read_bytes())[0].header["attachment_path"] == "out/a: b.md"


def test_the_escape_key_is_written_only_for_escaped_bodies(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    for body in ("----", " ---", "---x", "-- -", "--- x\n", "msg_id: x"):
        bus.append(type="t", project_id="p", body=body)
    assert b"body_escape" not in bus.path.read_bytes()
    for body in ("---", "a\n--- \nb", "---\r"):
        bus.append(type="t", project_id="p", body=body)
    assert bus.path.read_bytes().count(b"\nbody_escape: dash-space\n") == 3
