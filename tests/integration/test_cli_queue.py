"""`postroom queue`: its output, the stored messages, and its exit codes."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from postroom import TOPICS, Queue
from postroom.cli.queue import queue as commands
from tests.integration.commandline import Result, finish, isolate, postroom, run_on_terminal, start, zos_mq


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("POSTROOM_QUEUE_ROOT", str(tmp_path / "queue"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def send(*arguments: object, stdin: bytes = b"") -> str:
    done = postroom("queue", "send", *arguments, stdin=stdin)
    assert (done.code, done.errors) == (0, "")
    return str(done.line["msg_id"])


def poll(agent: str, *arguments: object) -> list[Any]:
    done = postroom("queue", "poll", "--agent", agent, *arguments)
    assert (done.code, done.errors) == (0, "")
    return done.lines


def texts(messages: list[Any]) -> list[str]:
    return [message["body"] for message in messages]


def test_the_topics_are_those_of_the_contract() -> None:
    assert set(commands.TOPICS) == TOPICS


# ---- send, poll, tail, expire, status ---------------------------------------------------------------


def test_every_field_of_a_message_is_stored_and_printed() -> None:
    question = send("--topic", "ask", "--to", "builder", "--sender", "boss", "--body", "green?")
    reply = send(
        *("--topic", "answer", "--to", "boss", "--sender", "builder", "--reply-to", question),
        *("--ttl", "600", "--body", "yes", "--durability", "fsync"),
    )
    (message,) = poll("boss")
    assert message.pop("ts").endswith("Z")
    assert message == {
        "msg_id": reply,
        "from": "builder",
        "to": "boss",
        "topic": "answer",
        "body": "yes",
        "in_reply_to": question,
        "ttl_s": 600,
    }


@pytest.mark.parametrize(
    "body", ["", "hello", "two\nlines\n", "ünïcödé 漢字 🦀", "NUL \0", "x" * 5000, "@file:x.txt"]
)
def test_a_body_comes_from_an_option_a_file_or_stdin(body: str) -> None:
    raw = body.encode()
    Path("body.txt").write_bytes(raw)
    common = ("--topic", "broadcast")
    send(*common, stdin=raw)
    send(*common, "--body", "-", stdin=raw)
    send(*common, "--body-file", "-", stdin=raw)
    send(*common, "--body-file", "body.txt")
    send(*common, "--body", body)
    assert texts(poll("anyone")) == [body] * 5


def test_a_body_that_is_not_text_is_refused(root: Path) -> None:
    done = postroom("queue", "send", "--topic", "ask", stdin=b"\xff")
    assert done.code == 2
    assert "not UTF-8" in done.error
    assert Queue(root).tail() == []


def test_a_poll_prints_new_messages_once() -> None:
    send("--topic", "ask", "--body", "1")
    assert texts(poll("a")) == ["1"]
    assert poll("a") == []
    send("--topic", "ask", "--body", "2")
    assert texts(poll("a")) == ["2"]
    assert texts(poll("b")) == ["1", "2"]


def test_a_filtered_poll_skips_the_rest_unless_keep_filtered() -> None:
    send("--topic", "ask", "--body", "question")
    send("--topic", "status", "--body", "fine")
    assert texts(poll("a", "--topic", "status")) == ["fine"]
    assert poll("a") == []
    assert texts(poll("b", "--topic", "status", "--keep-filtered")) == ["fine"]
    assert texts(poll("b")) == ["question"]
    assert texts(poll("c", "--topic", "status", "--topic", "ask")) == ["question", "fine"]


def test_a_limited_poll_leaves_the_rest_for_the_next_one() -> None:
    for number in range(3):
        send("--topic", "ask", "--body", str(number))
    assert texts(poll("a", "--limit", 2)) == ["0", "1"]
    assert poll("a", "--limit", 0) == []
    assert texts(poll("a", "--limit", 2)) == ["2"]


def test_sessions_and_roots_are_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send("--topic", "ask", "--body", "default")
    send("--topic", "ask", "--session", "night", "--body", "night")
    send("--topic", "ask", "--root", tmp_path / "other", "--body", "other")
    assert texts(poll("a", "--session", "night")) == ["night"]
    assert texts(poll("a", "--root", tmp_path / "other")) == ["other"]
    before = postroom("queue", "--root", tmp_path / "other", "tail")
    assert texts(before.lines) == ["other"]
    monkeypatch.setenv("ZOS_MQ_SESSION", "night")
    assert texts(postroom("queue", "tail").lines) == ["night"]
    assert texts(poll("a", "--session", "default")) == ["default"]


def test_the_sender_is_the_agent_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    send("--topic", "ask", "--body", "1")
    monkeypatch.setenv("ZOS_MQ_AGENT_ID", "zos")
    send("--topic", "ask", "--body", "2")
    monkeypatch.setenv("POSTROOM_QUEUE_AGENT_ID", "ours")
    send("--topic", "ask", "--body", "3")
    send("--topic", "ask", "--sender", "flag", "--body", "4")
    assert [message["from"] for message in poll("a")] == ["anonymous", "zos", "ours", "flag"]


def test_expire_and_tail(root: Path) -> None:
    send("--topic", "ask", "--ttl", "0", "--body", "gone")
    send("--topic", "ask", "--ttl", "0.0", "--session", "night", "--body", "gone, too")
    send("--topic", "ask", "--body", "stays")
    assert texts(postroom("queue", "tail").lines) == ["stays"]
    assert texts(postroom("queue", "tail", "--include-expired").lines) == ["gone", "stays"]
    assert postroom("queue", "expire", "--session", "night").raw == b"1\n"
    assert postroom("queue", "expire").raw == b"1\n"
    assert texts(postroom("queue", "tail", "-n", 5, "--include-expired").lines) == ["stays"]


def test_status_is_one_line_for_each_session() -> None:
    empty = postroom("queue", "status")
    assert (empty.code, empty.raw) == (0, b"")
    assert "there is nothing at" in empty.error
    send("--topic", "ask", "--body", "1")
    send("--topic", "status", "--session", "night", "--body", "2")
    poll("a")
    both = postroom("queue", "status").lines
    assert [row["session"] for row in both] == ["default", "night"]
    assert both[0]["by_topic"] == {"ask": 1}
    assert list(both[0]["cursors"]) == ["a"]
    assert postroom("queue", "status", "--session", "night").line == both[1]


def test_the_kill_switch_of_the_environment_and_of_the_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send("--topic", "ask", "--ttl", "0", "--body", "gone")
    send("--topic", "ask", "--body", "waits")
    for variable, value in (("POSTROOM_QUEUE_DISABLED", "1"), ("POSTROOM_CONFIG", "off.toml")):
        Path("off.toml").write_text("[queue]\ndisabled = true\n")
        with monkeypatch.context() as patch:
            patch.setenv("POSTROOM_QUEUE_DISABLED", "")  # restore the environment after each run
            patch.setenv(variable, value)
            done = postroom("queue", "send", "--topic", "ask", "--body", "no")
            assert (done.code, done.raw) == (1, b"")
            assert "kill switch" in done.error
            assert poll("a") == []
            assert postroom("queue", "expire").raw == b"0\n"
    assert texts(poll("a")) == ["waits"]


WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "no topic": (["send", "--body", "x"], "--topic"),
    "unknown topic": (["send", "--topic", "gossip", "--body", "x"], "gossip"),
    "unknown topic to poll": (["poll", "--agent", "a", "--topic", "gossip"], "gossip"),
    "two bodies": (["send", "--topic", "ask", "--body", "x", "--body-file", "y"], "once"),
    "negative ttl": (["send", "--topic", "ask", "--body", "x", "--ttl", "-1"], "ttl_s"),
    "endless ttl": (["send", "--topic", "ask", "--body", "x", "--ttl", "inf"], "ttl_s"),
    "no ttl": (["send", "--topic", "ask", "--body", "x", "--ttl", "soon"], "soon"),
    "bad recipient": (["send", "--topic", "ask", "--body", "x", "--to", "../b"], "'../b'"),
    "bad sender": (["send", "--topic", "ask", "--body", "x", "--sender", ""], "''"),
    "bad session": (["tail", "--session", "a/b"], "'a/b'"),
    "no agent": (["poll"], "--agent"),
    "bad agent": (["poll", "--agent", "a\n"], "agent"),
    "negative wait": (["poll", "--agent", "a", "--wait", "-1"], "--wait"),
    "endless wait": (["poll", "--agent", "a", "--wait", "inf"], "--wait"),
    "no wait": (["poll", "--agent", "a", "--wait", "soon"], "soon"),
    "empty root": (["tail", "--root", ""], "empty"),
    "negative count": (["tail", "-n", "-1"], "-n"),
    "nothing to repair": (["repair"], "--agent"),
    "two things to repair": (["repair", "--agent", "a", "--message", "m"], "--agent"),
    "no place": (["repair", "--agent", "a"], "--to"),
    "bad place": (["repair", "--agent", "a", "--to", "middle"], "middle"),
    "repair where nothing is": (["repair", "--message", "m-1", "--body", "x"], "no session"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_call_gives_a_one_line_error_and_exit_code_2(case: str, root: Path) -> None:
    arguments, expected = WRONG_CALLS[case]
    done = postroom("queue", *arguments)
    assert (done.code, done.raw) == (2, b"")
    assert done.error.startswith("postroom: ")
    assert expected in done.error
    assert not any(file.stat().st_size for file in root.rglob("messages.jsonl"))


@pytest.mark.parametrize("value", ["many", "-1"])
def test_a_variable_that_cannot_be_used_is_refused_by_name(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOS_MQ_BODY_THRESHOLD", value)
    done = postroom("queue", "tail")
    assert done.code == 2
    assert "ZOS_MQ_BODY_THRESHOLD" in done.error
    assert repr(value) in done.error


def test_the_settings_file_reaches_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTROOM_QUEUE_ROOT")
    Path("postroom.toml").write_text(
        '[queue]\nroot = "here"\nsession = "night"\nagent_id = "me"\n'
        'body_threshold = 3\ndurability = "group"\n'
    )
    send("--topic", "ask", "--body", "long enough")
    (message,) = poll("a")
    assert (message["from"], message["_body_source"]) == ("me", "side-file")
    assert [path.name for path in Path("here", "sessions").iterdir()] == ["night"]


# ---- inbox, ask, register, check, repair -------------------------------------------------------------


def test_the_inbox_proves_that_nothing_waits() -> None:
    send("--topic", "ask", "--body", "1")
    assert postroom("queue", "inbox", "--agent", "a").line["empty"] is False
    poll("a")
    facts = postroom("queue", "inbox", "--agent", "a").line
    assert facts["empty"] is True
    assert facts["cursor"] == facts["high_water"] > 0
    assert (facts["agent_id"], facts["epoch"]) == ("a", 0)


def test_ask_prints_the_answer(root: Path) -> None:
    def answer() -> None:
        with Queue(root) as queue:
            (question,) = queue.poll("builder", wait_s=30)
            queue.send("answer", "yes", to=question["from"], sender="builder", reply_to=question["msg_id"])

    builder = threading.Thread(target=answer)
    builder.start()
    process = start(
        "postroom",
        "queue",
        "ask",
        "--to",
        "builder",
        "--sender",
        "boss",
        "--body",
        "green?",
        "--timeout-s",
        30,
    )
    done = finish(process)
    builder.join()
    assert (done.code, done.errors) == (0, "")
    assert (done.line["from"], done.line["body"]) == ("builder", "yes")


def test_ask_without_an_answer_fails() -> None:
    done = postroom("queue", "ask", "--to", "nobody", "--body", "hello?", "--timeout-s", "0.01")
    assert (done.code, done.raw) == (1, b"")
    assert done.error == "postroom: nobody did not answer within 0.01 s"


def test_registered_agents_and_the_warning_about_others() -> None:
    assert postroom("queue", "agents") == Result(0, b"", "")
    assert postroom("queue", "register", "--agent", "a").line == {"agent_id": "a", "session": "default"}
    assert postroom("queue", "agents").line == {"agent_id": "a"}
    send("--topic", "ask", "--to", "a", "--body", "1")
    done = postroom("queue", "send", "--topic", "ask", "--to", "b", "--body", "2")
    assert done.code == 0
    assert done.error.startswith("postroom: warning: ")
    assert "'b'" in done.error


def test_check_and_repair_of_a_cursor(root: Path) -> None:
    send("--topic", "ask", "--body", "1")
    poll("a")
    assert postroom("queue", "check").line["ok"] is True
    cursor = root / "sessions" / "default" / "cursors" / "a.cursor"
    cursor.write_text("7")
    done = postroom("queue", "poll", "--agent", "a")
    assert done.code == 1
    assert "repair" in done.error
    report = postroom("queue", "check", "--session", "default")
    assert (report.code, report.line["ok"], list(report.line["cursors"])) == (1, False, ["a"])
    assert postroom("queue", "repair", "--agent", "a", "--to", "start").line == {"agent_id": "a", "cursor": 0}
    assert texts(poll("a")) == ["1"]
    end = postroom("queue", "inbox", "--agent", "a").line["high_water"]
    assert postroom("queue", "repair", "--agent", "a", "--to", end).line["cursor"] == end
    assert postroom("queue", "repair", "--agent", "a", "--to", "end").line["cursor"] == end
    assert poll("a") == []


def test_check_and_repair_of_a_side_file(root: Path) -> None:
    body = "long " * 1000
    msg_id = send("--topic", "ask", "--body", body)
    side_file = root / "sessions" / "default" / "bodies" / f"{msg_id}.txt"
    side_file.write_text("other")
    (fault,) = postroom("queue", "check").line["bodies"]
    assert fault["msg_id"] == msg_id
    (damaged,) = poll("a")
    assert damaged["_body_error"]
    wrong = postroom("queue", "repair", "--message", msg_id, "--body", "wrong")
    assert wrong.code == 2
    assert postroom("queue", "repair", "--message", msg_id, stdin=body.encode()).line == {"msg_id": msg_id}
    assert texts(poll("b")) == [body]


def test_an_unreadable_line_is_one_warning_on_stderr(root: Path) -> None:
    send("--topic", "ask", "--body", "1")
    messages = root / "sessions" / "default" / "messages.jsonl"
    with messages.open("ab") as file:
        file.write(b"{broken\x1b[31m\n")
    done = postroom("queue", "poll", "--agent", "a")
    assert texts(done.lines) == ["1"]
    assert done.error.startswith("postroom: warning: ")
    assert "\x1b" not in done.errors
    report = postroom("queue", "check")
    assert (report.code, len(report.line["unreadable"])) == (1, 1)


# ---- real processes and terminals --------------------------------------------------------------------


def test_a_waiting_poll_prints_new_messages() -> None:
    process = start("postroom", "queue", "poll", "--agent", "a", "--wait", 30)
    send("--topic", "ask", "--body", "at last")
    done = finish(process)
    assert (done.code, done.errors, texts(done.lines)) == (0, "", ["at last"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_waiting_poll(root: Path, number: signal.Signals) -> None:
    process = start("postroom", "queue", "poll", "--agent", "a", "--wait", 60)
    wait_for_first_poll(root)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.raw, done.error) == (1, b"", "postroom: interrupted")


def wait_for_first_poll(root: Path) -> None:
    """The audit line shows that the poll has looked once and now waits."""
    audit = root / "audit.jsonl"
    ticking = threading.Event()
    while not (audit.exists() and audit.stat().st_size):
        ticking.wait(0.01)


def test_a_terminal_gets_records_tables_and_sentences(root: Path) -> None:
    send("--topic", "ask", "--to", "a", "--sender", "b", "--ttl", "60", "--body", "\x1b[2Jhello\nworld")
    shown = click.unstyle(run_on_terminal("postroom", "queue", "tail").out)
    assert shown.startswith("ask  b -> a  20")
    assert "ttl: 60 s" in shown
    assert shown.endswith("\n    \\x1b[2Jhello\n    world\n")
    status = run_on_terminal("postroom", "queue", "status", env={"NO_COLOR": "1"}).out.splitlines()
    assert status[0].split() == [
        "session",
        "messages",
        "expired",
        "unreadable",
        "queue",
        "bytes",
        "by",
        "topic",
        "cursors",
    ]
    assert status[1].split()[:2] == ["default", "1"]
    assert "messages are waiting" in run_on_terminal("postroom", "queue", "inbox", "--agent", "a").out
    assert "default: ok, 1 lines" in click.unstyle(run_on_terminal("postroom", "queue", "check").out)
    assert "0 expired messages" in run_on_terminal("postroom", "queue", "expire").out
    assert "no agent is registered" in run_on_terminal("postroom", "queue", "agents").out
    (root / "sessions" / "default" / "cursors").mkdir(exist_ok=True)
    (root / "sessions" / "default" / "cursors" / "a.cursor").write_text("7")
    damaged = run_on_terminal("postroom", "queue", "check")
    assert damaged.code == 1
    assert "default: DAMAGED, 1 lines" in click.unstyle(damaged.out)
    assert "cursor of a" in damaged.out
    json_line = run_on_terminal("postroom", "queue", "tail", "--json").out
    assert json.loads(json_line)["body"] == "\x1b[2Jhello\nworld"
    assert "\x1b" not in json_line


# ---- slips in a name -------------------------------------------------------------------------------

READERS = [("poll", "--agent", "ada"), ("inbox", "--agent", "ada"), ("tail",), ("status",), ("check",)]


@pytest.mark.parametrize("words", READERS)
def test_a_session_without_messages_is_named_with_those_that_have_some(
    root: Path, words: tuple[str, ...]
) -> None:
    send("--topic", "ask", "--to", "ada", "--body", "1")
    send("--topic", "ask", "--to", "ada", "--body", "2", "--session", "nightly")
    for _ in range(2):  # a poll creates the folder of the session, which is not a message
        done = postroom("queue", *words, "--session", "nihgtly")
        assert done.code == 0
        assert done.error == (
            f"postroom: warning: session 'nihgtly' below {root} holds no messages; "
            "sessions with messages: default, nightly"
        )
    assert postroom("queue", *words, "--session", "nightly").errors == ""


def test_a_poll_of_a_wrong_folder_warns_that_it_is_empty(tmp_path: Path) -> None:
    send("--topic", "ask", "--to", "ada", "--body", "1")
    done = postroom("queue", "poll", "--agent", "ada", "--root", tmp_path / "qeueu")
    assert (done.code, done.out) == (0, "")
    assert done.error == f"postroom: warning: session 'default' below {tmp_path / 'qeueu'} holds no messages"


def test_many_sessions_are_not_all_named() -> None:
    for number in range(12):
        send("--topic", "ask", "--body", "1", "--session", f"s{number:02}")
    assert postroom("queue", "tail").error.endswith("s07, s08, s09 and 2 more")


@pytest.mark.parametrize("command", ["poll", "inbox"])
def test_an_unregistered_agent_is_named_when_others_are_registered(command: str) -> None:
    send("--topic", "broadcast", "--body", "1")
    postroom("queue", "poll", "--agent", "daa")
    assert postroom("queue", command, "--agent", "daa").errors == ""
    postroom("queue", "register", "--agent", "ada")
    assert postroom("queue", command, "--agent", "daa").error == (
        "postroom: warning: 'daa' is not registered in session 'default'; registered: ada"
    )
    assert postroom("queue", command, "--agent", "ada").errors == ""


def test_the_commands_of_the_original_print_no_such_warning(root: Path) -> None:
    send("--topic", "ask", "--body", "1")
    done = zos_mq("--root", root, "poll", "--agent", "ada", "--session", "other")
    assert (done.code, done.errors) == (0, "")
