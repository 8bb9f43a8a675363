"""`postroom bus`: its output, the stored messages, and its exit codes."""

import json
import os
import signal
import subprocess
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click
import pytest

from postroom import Bus
from postroom.cli import shell
from postroom.cli.bus import parse_size
from postroom.errors import InvalidMessage
from tests.integration.commandline import (
    BIN,
    Result,
    call,
    finish,
    isolate,
    locked,
    postroom,
    run,
    run_on_terminal,
    start,
)
from tests.waiting import HANG_GUARD_S

PIPE_BYTES = 64 * 1024  # bytes that a pipe buffers before its writer blocks


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus.yaml"


def post(path: Path, *arguments: object, stdin: bytes = b"") -> str:
    done = postroom("bus", "post", "--bus", path, "--type", "note", "--project", "p", *arguments, stdin=stdin)
    assert (done.code, done.errors) == (0, "")
    return str(done.line["msg_id"])


def filled(path: Path, count: int, body: str = "text") -> list[str]:
    with Bus(path) as bus:
        return bus.append_many(
            {"type": "note", "project_id": "p", "body": f"{body} {n}"} for n in range(count)
        )


def damage(path: Path) -> None:
    """Change one letter of the first body."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b"text 0", b"texT 0", 1))


def bodies(done: Result) -> list[str]:
    assert done.code == 0
    return [message["body"] for message in done.lines]


# ---- post ------------------------------------------------------------------------------------------

BODIES = [
    b"",
    b"hello",
    b"two\nlines\n",
    b"many newlines\n\n\n",
    b"---\nmsg_id: MSG-forged\n---\nbody\n",
    b"--- \n---\r\n\r\n",
    b"NUL \x00 and not UTF-8 \xff\xfe\x80",
    "ünïcödé 漢字 🦀".encode(),
]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_from_stdin_or_a_file_is_kept_byte_for_byte(path: Path, body: bytes) -> None:
    Path("body.bin").write_bytes(body)
    post(path, stdin=body)
    post(path, "--body", "-", stdin=body)
    post(path, "--body-file", "-", stdin=body)
    post(path, "--body-file", "body.bin")
    stored = [message.body.encode("utf-8", "surrogateescape") for message in Bus(path).read()]
    assert stored == [body] * 4
    printed = postroom("bus", "read", "--bus", path)
    assert [text.encode("utf-8", "surrogateescape") for text in bodies(printed)] == [body] * 4


def test_a_body_from_the_command_line_keeps_its_bytes(path: Path) -> None:
    done = subprocess.run(
        [
            BIN / "postroom",
            "bus",
            "post",
            "--bus",
            path,
            "--type",
            "t",
            "--project",
            "p",
            "--body",
            b"a\xff\xc3",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert done.returncode == 0
    assert Bus(path).read()[0].body.encode("utf-8", "surrogateescape") == b"a\xff\xc3"


def test_every_field_of_a_message_is_stored_and_printed(path: Path) -> None:
    Path("report.md").touch()
    first = post(path)
    second = post(path)
    done = postroom(
        *("bus", "post", "--bus", path, "--type", "stop", "--project", "p1", "--task", "t1", "--run", "r1"),
        *("--parent", first, "--parent", second, "--attachment", "report.md", "--body", "done"),
        *("--ts", "2026-02-05T14:30:52.5+01:00", "--durability", "fsync"),
    )
    assert postroom("bus", "tail", "--bus", path, "-n", 1).line == {
        "msg_id": done.line["msg_id"],
        "ts": "2026-02-05T13:30:52.500000Z",
        "type": "stop",
        "project_id": "p1",
        "task_id": "t1",
        "run_id": "r1",
        "parents": [first, second],
        "attachment_path": "report.md",
        "body": "done",
    }


def test_id_only_prints_the_bare_id(path: Path) -> None:
    done = postroom("bus", "post", "--bus", path, "--type", "t", "--project", "p", "--id-only")
    assert done.out == Bus(path).read()[0].msg_id + "\n"


WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "no type": (["post", "--bus", "b", "--project", "p"], "--type"),
    "no project": (["post", "--bus", "b", "--type", "t"], "--project"),
    "empty type": (["post", "--bus", "b", "--type", "", "--project", "p"], "type"),
    "two bodies": (
        ["post", "--bus", "b", "--type", "t", "--project", "p", "--body", "x", "--body-file", "y"],
        "once",
    ),
    "no time": (["post", "--bus", "b", "--type", "t", "--project", "p", "--ts", "noon"], "noon"),
    "no bus": (["read"], "POSTROOM_BUS"),
    "unknown option": (["read", "--bus", "b", "--tail"], "--tail"),
    "unknown command": (["reed"], "reed"),
    "negative count": (["tail", "--bus", "b", "-n", "-1"], "-n"),
    "huge count": (["read", "--bus", "b", "--limit", "9" * 30], "--limit"),
    "empty path": (["read", "--bus", ""], "empty"),
    "endless timeout": (["follow", "--bus", "b", "--timeout-s", "inf"], "--timeout-s"),
    "no timeout": (["follow", "--bus", "b", "--timeout-s", "nan"], "--timeout-s"),
    "no size": (["rotate", "--root", ".", "--max-size", "big"], "10MiB"),
    "no limit": (["rotate", "--root", "."], "--max-size"),
    "two places": (["rotate", "--bus", "b", "--root", ".", "--max-size", "1"], "not both"),
    "no folder": (["discover", "--root", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_call_gives_a_one_line_error_and_exit_code_2(case: str) -> None:
    arguments, expected = WRONG_CALLS[case]
    done = postroom("bus", *arguments)
    assert (done.code, done.raw) == (2, b"")
    assert done.error.startswith("postroom: ")
    assert expected in done.error
    assert not Path("b").exists()


def test_failures_give_a_one_line_error_and_exit_code_1(path: Path) -> None:
    post(path)
    Path("link.yaml").symlink_to(path)
    common = ("--type", "t", "--project", "p")
    for arguments in (
        ("post", "--bus", path, *common, "--attachment", "../secret"),
        ("post", "--bus", path, *common, "--body-file", "missing.txt"),
        ("post", "--bus", "link.yaml", *common),
        ("read", "--bus", "link.yaml"),
        ("read", "--bus", path, "--since", "MSG-unknown"),
        ("verify", "--bus", "missing.yaml"),
    ):
        done = postroom("bus", *arguments)
        assert (done.code, done.raw) == (1, b"")
        assert done.error.startswith("postroom: ")
        assert "Traceback" not in done.errors


def test_a_lock_timeout_is_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    post(path)
    monkeypatch.setenv("POSTROOM_BUS_LOCK_TIMEOUT_S", "0.02")
    with locked(path):
        done = postroom("bus", "post", "--bus", path, "--type", "t", "--project", "p")
    assert done.code == 1
    assert "could not lock" in done.error
    assert len(Bus(path).read()) == 1


def test_a_body_over_the_limit_is_refused_without_reading_on(path: Path) -> None:
    Path("big").write_bytes(b"x" * 11)
    with pytest.raises(InvalidMessage, match="longer than 10 bytes"):
        shell.read_body(shell.Shell("postroom"), None, "big", bytes_max=10)


# ---- read, tail, query, count ----------------------------------------------------------------------


def test_read_takes_since_and_limit(path: Path) -> None:
    ids = filled(path, 5)
    assert bodies(postroom("bus", "read", "--bus", path)) == [f"text {n}" for n in range(5)]
    assert bodies(postroom("bus", "read", "--bus", path, "--since", ids[1], "--limit", 2)) == [
        "text 2",
        "text 3",
    ]
    assert bodies(postroom("bus", "read", "--bus", path, "--limit", 0)) == []


def test_read_across_a_rotation_needs_archives(path: Path) -> None:
    ids = filled(path, 3)
    assert postroom("bus", "rotate", "--bus", path).code == 0
    post(path, "--body", "new")
    done = postroom("bus", "read", "--bus", path, "--since", ids[1])
    assert done.code == 1
    assert "--archives" in done.error
    assert bodies(postroom("bus", "read", "--bus", path, "--since", ids[1], "--archives")) == [
        "text 2",
        "new",
    ]


def test_tail_prints_the_last_ten_or_n(path: Path) -> None:
    filled(path, 12)
    assert bodies(postroom("bus", "tail", "--bus", path)) == [f"text {n}" for n in range(2, 12)]
    assert bodies(postroom("bus", "tail", "--bus", path, "-n", 2)) == ["text 10", "text 11"]


def test_query_takes_every_field(path: Path) -> None:
    with Bus(path) as bus:
        first = bus.append(
            type="a", project_id="p", task_id="t", run_id="r", body="1", ts="2026-01-01T00:00:00Z"
        )
        bus.append(type="b", project_id="q", parents=[first], body="2", ts="2026-01-02T00:00:00Z")
        bus.append(type="b", project_id="p", body="3", ts="2026-01-03T00:00:00Z")
    for arguments, expected in (
        (["--type", "b"], ["2", "3"]),
        (["--type", "b", "--limit", "1"], ["2"]),
        (["--type", "b", "--project", "p"], ["3"]),
        (["--task", "t"], ["1"]),
        (["--run", "r"], ["1"]),
        (["--parent", first], ["2"]),
        (["--since", "2026-01-02T00:00:00Z"], ["2", "3"]),
        (["--until", "2026-01-02T00:00:00Z"], ["1"]),
        (["--type", "c"], []),
    ):
        assert bodies(postroom("bus", "query", "--bus", path, *arguments)) == expected


def test_count_prints_a_number(path: Path) -> None:
    filled(path, 3)
    assert postroom("bus", "count", "--bus", path).raw == b"3\n"


def test_a_missing_file_reads_as_empty_with_a_warning(path: Path) -> None:
    for command in ("read", "tail", "query", "count"):
        done = postroom("bus", command, "--bus", path)
        assert (done.code, done.out.strip("0\n")) == (0, "")
        assert f"there is nothing at {path} yet" in done.error
    assert not path.exists()


def test_skipped_damage_is_one_warning_on_stderr(path: Path) -> None:
    filled(path, 3)
    damage(path)
    done = postroom("bus", "read", "--bus", path)
    assert bodies(done) == ["text 1", "text 2"]
    assert done.error.startswith("postroom: warning: ")
    assert "offset 0" in done.error


# ---- rotate, verify, discover ----------------------------------------------------------------------


def test_rotate_names_the_archive_or_prints_that_nothing_was_rotated(path: Path) -> None:
    filled(path, 3)
    size = path.stat().st_size
    left = postroom("bus", "rotate", "--bus", path, "--max-size", "1MB")
    assert left.line == {"path": str(path), "bytes": size, "archive": None}
    facts = postroom("bus", "rotate", "--bus", path).line
    assert (facts["bytes"], Path(facts["archive"]).stat().st_size) == (size, size)
    assert not path.exists()
    assert postroom("bus", "rotate", "--bus", path).line["archive"] is None


def test_rotate_of_a_folder_continues_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a/big.yaml": 50, "b/small.yaml": 1, "c/taken.yaml": 50, "d/e/big.yaml": 50}
    for name, count in sizes.items():
        filled(tmp_path / name, count)
    monkeypatch.setenv("POSTROOM_BUS_LOCK_TIMEOUT_S", "0.02")
    with locked(tmp_path / "c" / "taken.yaml"):
        done = postroom("bus", "rotate", "--root", tmp_path, "--max-size", "4KB")
    assert done.code == 1
    assert "taken.yaml" in done.error
    rotated = {Path(facts["path"]).relative_to(tmp_path).as_posix(): facts["archive"] for facts in done.lines}
    assert {name: bool(archive) for name, archive in rotated.items()} == {
        "a/big.yaml": True,
        "b/small.yaml": False,
        "d/e/big.yaml": True,
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("10MB", 10_000_000),
        ("10 MB", 10_000_000),
        ("1.5k", 1500),
        ("2GiB", 2**31),
        ("1KiB", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "10XB", "1e3", "١٠", "10MB "])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_size(text)


def test_verify_of_a_whole_file(path: Path) -> None:
    filled(path, 3)
    with path.open("ab") as file:
        file.write(b"\n---\nmsg_id: MSG-half")
    report = postroom("bus", "verify", "--bus", path)
    assert report.code == 0
    assert report.line["ok"] is True
    assert (report.line["messages"], report.line["checked"], report.line["damaged"]) == (3, 3, [])
    assert report.line["torn_tail_bytes"] > 0


def test_verify_of_a_damaged_file_lists_the_damage_and_fails(path: Path) -> None:
    filled(path, 3)
    damage(path)
    report = postroom("bus", "verify", "--bus", path)
    assert report.code == 1
    assert report.line["ok"] is False
    (fault,) = report.line["damaged"]
    assert fault["offset"] == 0
    assert fault["reason"]


def test_discover_lists_buses_and_nothing_else(tmp_path: Path) -> None:
    filled(tmp_path / "runs" / "a.yaml", 1)
    filled(tmp_path / "runs" / "deep" / "b", 2)
    postroom("bus", "rotate", "--bus", tmp_path / "runs" / "a.yaml")
    filled(tmp_path / "runs" / "a.yaml", 1)
    (tmp_path / "runs" / "other.yaml").write_text("key: value\n")
    found = postroom("bus", "discover", "--root", "runs")
    assert [row["path"] for row in found.lines] == ["runs/a.yaml", "runs/deep/b"]
    assert [row["bytes"] for row in found.lines] == [Path(row["path"]).stat().st_size for row in found.lines]


# ---- settings --------------------------------------------------------------------------------------


def test_the_bus_comes_from_the_file_then_the_environment_then_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("in-file", "in-named-file", "in-variable", "in-flag"):
        (tmp_path / name).mkdir()
        filled(tmp_path / name / "bus.yaml", 1, name)
    Path("postroom.toml").write_text('[bus]\npath = "in-file/bus.yaml"\n')
    Path("in-named-file/named.toml").write_text('[bus]\npath = "bus.yaml"\n')
    assert bodies(postroom("bus", "read")) == ["in-file 0"]
    monkeypatch.setenv("POSTROOM_CONFIG", "in-named-file/named.toml")
    assert bodies(postroom("bus", "read")) == ["in-named-file 0"]
    assert bodies(postroom("--config", "postroom.toml", "bus", "read")) == ["in-file 0"]
    monkeypatch.setenv("POSTROOM_BUS", "in-variable/bus.yaml")
    assert bodies(postroom("--config", "postroom.toml", "bus", "read")) == ["in-variable 0"]
    assert bodies(postroom("bus", "read", "--bus", "in-flag/bus.yaml")) == ["in-flag 0"]


def test_settings_of_the_bus_are_applied(path: Path) -> None:
    Path("postroom.toml").write_text("[bus]\nrotate_bytes = 300\n")
    for _ in range(4):
        post(path, "--body", "x" * 100)
    assert len(Bus(path).archives()) > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [("[bus]\nrotate = 1\n", "bus.rotate"), ("[buss]\n", "buss"), ("[bus\n", "TOML"), ("bus = 1", "table")],
)
def test_a_settings_file_that_cannot_be_used_is_refused_by_name(path: Path, text: str, named: str) -> None:
    Path("postroom.toml").write_text(text)
    done = postroom("bus", "read", "--bus", path)
    assert done.code == 2
    assert named in done.error


def test_a_named_settings_file_must_exist() -> None:
    done = postroom("--config", "missing.toml", "bus", "read")
    assert done.code == 2
    assert "cannot read missing.toml" in done.error


def test_help_and_version_need_no_settings() -> None:
    Path("postroom.toml").write_text("broken")
    assert postroom("bus", "post", "--help").code == 0
    assert postroom("--version").out.startswith("postroom ")


# ---- real processes --------------------------------------------------------------------------------


def read_line(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_follow_prints_at_once_and_ends_cleanly_at_a_signal(path: Path, number: signal.Signals) -> None:
    filled(path, 1)
    process = start("postroom", "bus", "follow", "--bus", path)
    assert read_line(process)["body"] == "text 0"
    post(path, "--body", "second")
    assert read_line(process)["body"] == "second"
    Bus(path).rotate()
    post(path, "--body", "third")
    assert read_line(process)["body"] == "third"
    process.send_signal(number)
    assert finish(process) == Result(0, b"", "")


def test_follow_waits_for_a_file_and_ends_after_its_timeout(path: Path) -> None:
    assert postroom("bus", "follow", "--bus", path, "--timeout-s", "0.01") == Result(0, b"", "")
    ids = filled(path, 2)
    done = postroom("bus", "follow", "--bus", path, "--since", ids[0], "--timeout-s", "0.01")
    assert bodies(done) == ["text 1"]


def follow(path: Path, *arguments: object) -> list[str]:
    done = postroom("bus", "follow", "--bus", path, *arguments, "--timeout-s", "0.01")
    assert (done.code, done.errors) == (0, "")
    return bodies(done)


def test_follow_starts_with_the_last_messages_if_asked(path: Path) -> None:
    assert follow(path, "-n", 2) == follow(path, "--new") == []
    filled(path, 3)
    assert follow(path, "-n", 2) == ["text 1", "text 2"]
    assert follow(path, "-n", 3) == follow(path, "-n", 9) == ["text 0", "text 1", "text 2"]
    assert follow(path, "-n", 0) == follow(path, "--new") == []


def test_follow_shows_one_type_and_counts_only_its_messages(path: Path) -> None:
    bus = Bus(path)
    for number in range(30):
        bus.append(type="error" if number % 10 == 0 else "note", project_id="p", body=str(number))
    assert follow(path, "--type", "error") == ["0", "10", "20"]
    assert follow(path, "--type", "error", "-n", 2) == ["10", "20"]
    assert follow(path, "--type", "error", "-n", 9) == ["0", "10", "20"]
    assert follow(path, "--type", "nothing", "-n", 1) == []


def test_follow_new_prints_only_later_messages(path: Path) -> None:
    filled(path, 2)
    process = start("postroom", "bus", "follow", "--bus", path, "--new", "--type", "note")
    poster = Bus(path)
    printed = Event()

    def keep_posting() -> None:  # until the follower, which takes a moment to start, has read one
        while not printed.wait(0.05):
            poster.append(type="other", project_id="p", body="passed over")
            poster.append(type="note", project_id="p", body="new")

    poster_thread = Thread(target=keep_posting)
    poster_thread.start()
    try:
        assert read_line(process)["body"] == "new"
    finally:
        printed.set()
        poster_thread.join()
        process.terminate()
        finish(process)


@pytest.mark.parametrize(
    "arguments", [["-n", 1, "--new"], ["--since", "X", "-n", 1], ["--since", "X", "--new"]]
)
def test_follow_accepts_only_one_start_option(path: Path, arguments: list[object]) -> None:
    done = postroom("bus", "follow", "--bus", path, *arguments)
    assert done.code == 2
    assert "not both" in done.errors


def test_follow_ends_at_once_when_its_output_is_closed(path: Path) -> None:
    filled(path, 1)
    process = start("postroom", "bus", "follow", "--bus", path)
    read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(HANG_GUARD_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_closed_pipe_is_not_an_error(path: Path) -> None:
    filled(path, 500, "x" * (PIPE_BYTES // 100))
    process = start("postroom", "bus", "read", "--bus", path)
    read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(HANG_GUARD_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_closed_stderr_does_not_stop_the_command(path: Path) -> None:
    filled(path, 3)
    damage(path)
    reader, writer = os.pipe()
    os.close(reader)
    done = run("postroom", "bus", "read", "--bus", path, stderr=writer)
    os.close(writer)
    assert bodies(done) == ["text 1", "text 2"]


def test_output_that_cannot_be_written_is_an_error(path: Path) -> None:
    filled(path, 1)
    for environ in ({}, {"PYTHONUNBUFFERED": "1"}):  # the write fails at the end, or at the first line
        with Path("/dev/full").open("wb") as full:
            done = run("postroom", "bus", "read", "--bus", path, stdout=full, env={**os.environ, **environ})
        assert done.code == 1
        assert done.error == "postroom: cannot write the output: No space left on device"


def test_without_standard_descriptors_no_output_goes_to_the_bus(path: Path) -> None:
    command = f'"{BIN}/postroom" bus post --bus "{path}" --type t --project p >&- <&-'
    done = subprocess.run(["sh", "-c", command], check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    report = Bus(path).verify()
    assert (report.messages, report.damaged, report.torn_tail_bytes) == (1, (), 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_that_waits_for_its_body(path: Path, number: signal.Signals) -> None:
    common = ("--type", "t", "--project", "p")
    process = start("postroom", "bus", "post", "--bus", path, *common, stdin=subprocess.PIPE)
    wait_until_it_reads(process)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.raw, done.error) == (1, b"", "postroom: interrupted")
    assert not path.exists()


def wait_until_it_reads(process: subprocess.Popen[bytes]) -> None:
    """Fill its stdin: when the pipe has accepted more than it buffers, the command has begun to read."""
    assert process.stdin is not None
    process.stdin.write(b"x" * (2 * PIPE_BYTES))
    process.stdin.flush()


def test_importing_the_command_line_imports_no_contract() -> None:
    heavy = {"postroom.contracts", "postroom.settings", "postroom.message", "yaml", "msgspec", "asyncio"}
    program = f"import sys, postroom.cli.main; print({heavy}.intersection(sys.modules))"
    done = subprocess.run([BIN / "python", "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_an_unexpected_error_is_one_line_without_the_trace_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def broken() -> None:
        raise KeyError("slip")

    done = call(broken, "broken")
    assert done.code == 1
    assert done.error.startswith("broken: unexpected KeyError: 'slip'")
    monkeypatch.setenv("POSTROOM_TRACEBACK", "1")
    done = call(broken, "broken")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.errors
    assert done.errors.endswith("KeyError: 'slip'\n")


# ---- terminals -------------------------------------------------------------------------------------

NASTY = "\x1b[2J\x1b]0;title\x07 bell\r over \x9b31m \u202egnp.exe \x00\nsecond line"


def nasty_bus(path: Path) -> None:
    with Bus(path) as bus:
        bus.append(type="\x1b[31mred", project_id="p\x07", task_id="t", body=NASTY, parents=["\x1b[0m"])


def assert_harmless(shown: str) -> None:
    for char in "\x07\x08\x00\r\x9b\x7f\u202e":
        assert char not in shown


def test_a_terminal_gets_a_readable_record_in_colour(path: Path) -> None:
    post(path, "--task", "t1", "--body", "hello\nworld\n")
    done = run_on_terminal("postroom", "bus", "tail", "--bus", path)
    assert done.code == 0
    assert "\x1b[" in done.out
    plain = click.unstyle(done.out)
    assert plain.startswith("note  p/t1  20")
    assert plain.endswith("\n    hello\n    world\n")


def test_no_colours_when_they_are_not_wanted(path: Path) -> None:
    post(path)
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in run_on_terminal("postroom", "bus", "tail", "--bus", path, env=env).out


def test_nothing_in_a_message_is_executed_by_a_terminal(path: Path) -> None:
    nasty_bus(path)
    shown = run_on_terminal("postroom", "bus", "tail", "--bus", path, env={"NO_COLOR": "1"}).out
    assert "\x1b" not in shown
    assert_harmless(shown)
    assert (
        "\\x1b[2J\\x1b]0;title\\x07 bell\\x0d over \\x9b31m \\u202egnp.exe \\x00\n    second line\n" in shown
    )


def test_json_on_a_terminal_is_json_and_harmless(path: Path) -> None:
    nasty_bus(path)
    for arguments in (("--json", "bus", "tail", "--bus", path), ("bus", "tail", "--bus", path, "--json")):
        done = run_on_terminal("postroom", *arguments)
        assert "\x1b" not in done.out
        assert_harmless(done.out)
        assert done.line["body"] == NASTY


def test_reports_on_a_terminal_are_text(path: Path, tmp_path: Path) -> None:
    filled(path, 3)
    damage(path)
    verified = run_on_terminal("postroom", "bus", "verify", "--bus", path)
    assert verified.code == 1
    assert "DAMAGED: 2 messages" in click.unstyle(verified.out)
    assert "offset  length" in verified.out
    assert "path" in run_on_terminal("postroom", "bus", "discover", "--root", tmp_path).out
    assert "bus.yaml is now" in run_on_terminal("postroom", "bus", "rotate", "--bus", path).out
    assert "is not rotated" in run_on_terminal("postroom", "bus", "rotate", "--bus", path).out
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no bus below" in run_on_terminal("postroom", "bus", "discover", "--root", empty).out


@pytest.mark.parametrize(
    "command",
    [
        ("post", "--type", "note", "--project", "p", "--body", "x"),
        ("read",), ("tail",), ("query",), ("count",), ("verify",), ("rotate",), ("follow", "--timeout", "0"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_bus_is_refused_with_a_one_line_error(command: tuple[str, ...]) -> None:
    Path("README.md").write_text("# A project\n\nSome text.\n")
    done = postroom("bus", command[0], "--bus", "README.md", *command[1:])
    assert (done.code, done.out) == (1, "")
    assert done.error == ("postroom: README.md is not a bus file: it is not empty and holds no bus record")
    assert Path("README.md").read_text() == "# A project\n\nSome text.\n"
