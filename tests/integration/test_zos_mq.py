"""`zos-mq`: exactly the options, the output and the exit codes of the original."""

import json
from pathlib import Path

import pytest

from postroom import Queue
from postroom.cli.queue import zosmq
from tests.integration.commandline import isolate, postroom, run, run_on_terminal, zos_mq

ORIGINAL_OPTIONS = {
    "send": {"--topic", "--body", "--to", "--ttl", "--session", "--sender", "--reply-to"},
    "poll": {"--agent", "--topic", "--session"},
    "tail": {"-n", "--session", "--include-expired"},
    "expire": {"--session"},
    "status": {"--session"},
}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("ZOS_MQ_ROOT", str(tmp_path / "mq"))


def test_the_options_are_those_of_the_original() -> None:
    found = {
        name: {text for option in command.params for text in option.opts}
        for name, command in zosmq.cli.commands.items()
    }
    assert found == ORIGINAL_OPTIONS
    assert [option.opts for option in zosmq.cli.params] == [["--root"]]


def test_send_prints_the_bare_id_and_poll_one_object_a_line() -> None:
    sent = zos_mq(
        "send", "--topic", "ask", "--to", "builder", "--ttl", 600, "--sender", "boss", "--body", "green?"
    )
    assert (sent.code, sent.errors) == (0, "")
    msg_id = sent.out.removesuffix("\n")
    assert "\n" not in msg_id
    polled = zos_mq("poll", "--agent", "builder")
    message = polled.line
    assert list(message) == ["msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s"]
    assert (message["msg_id"], message["from"], message["ttl_s"]) == (msg_id, "boss", 600)
    reply = zos_mq("send", "--topic", "answer", "--to", "boss", "--reply-to", msg_id, "--body", "yes")
    assert reply.code == 0
    assert (
        zos_mq("poll", "--agent", "boss", "--topic", "answer", "--topic", "ask").line["in_reply_to"] == msg_id
    )
    assert zos_mq("poll", "--agent", "builder").raw == b""


@pytest.mark.parametrize("arguments", [[], ["--body", "-"]])
def test_a_body_comes_from_stdin(arguments: list[str]) -> None:
    assert zos_mq("send", "--topic", "ask", *arguments, stdin="grün\n".encode()).code == 0
    assert zos_mq("tail").line["body"] == "grün\n"


def test_tail_shows_the_last_ones_and_expired_ones_when_asked() -> None:
    for number in range(12):
        zos_mq("send", "--topic", "status", "--body", number)
    zos_mq("send", "--topic", "status", "--ttl", 0, "--body", "gone")
    assert [m["body"] for m in zos_mq("tail").lines] == [str(n) for n in range(2, 12)]
    assert [m["body"] for m in zos_mq("tail", "-n", 2).lines] == ["10", "11"]
    assert [m["body"] for m in zos_mq("tail", "-n", 2, "--include-expired").lines] == ["11", "gone"]


def test_expire_prints_how_many() -> None:
    zos_mq("send", "--topic", "status", "--ttl", 0, "--body", "gone")
    assert zos_mq("expire", "--session", "other").raw == b"0\n"
    assert zos_mq("expire").raw == b"1\n"


def test_status_is_one_pretty_document() -> None:
    zos_mq("send", "--topic", "ask", "--body", "1")
    zos_mq("send", "--topic", "status", "--session", "night", "--body", "2")
    done = zos_mq("status")
    status = json.loads(done.out)
    assert done.out == json.dumps(status, indent=2) + "\n"
    assert list(status) == ["default", "night"]
    assert {"messages", "expired", "by_topic", "queue_bytes", "cursors"} <= set(status["default"])
    assert json.loads(zos_mq("status", "--session", "night").out)["by_topic"] == {"status": 1}


def test_the_root_goes_in_front_of_the_command(tmp_path: Path) -> None:
    assert zos_mq("--root", tmp_path / "else", "send", "--topic", "ask", "--body", "x").code == 0
    assert [m["body"] for m in Queue(tmp_path / "else").tail()] == ["x"]
    assert zos_mq("tail", "--root", tmp_path / "else").code == 2


def test_the_root_is_found_as_the_original_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOS_MQ_ROOT")
    monkeypatch.setenv("ZOS_HOME", str(tmp_path / "zos"))
    zos_mq("send", "--topic", "ask", "--body", "x")
    assert (tmp_path / "zos" / "agent-mq" / "sessions" / "default" / "messages.jsonl").exists()
    monkeypatch.delenv("ZOS_HOME")
    zos_mq("send", "--topic", "ask", "--body", "x")
    assert (tmp_path / "home/.local/share/postroom/queue/sessions/default/messages.jsonl").exists()


def test_both_spellings_see_the_same_queue() -> None:
    zos_mq("send", "--topic", "ask", "--body", "x")
    assert postroom("queue", "poll", "--agent", "a").line["body"] == "x"
    assert zos_mq("poll", "--agent", "a").raw == b""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["gossip"],
        ["send", "--body", "x"],
        ["send", "--topic", "gossip", "--body", "x"],
        ["send", "--topic", "ask", "--body", "x", "--ttl", "-1"],
        ["send", "--topic", "ask", "--body", "x", "--body-file", "y"],
        ["poll"],
        ["poll", "--agent", "a/b"],
        ["poll", "--agent", "a", "--wait", "1"],
        ["tail", "--session", "../up"],
        ["tail", "--json"],
        ["inbox", "--agent", "a"],
    ],
)
def test_a_wrong_call_ends_with_2(arguments: list[str]) -> None:
    done = zos_mq(*arguments)
    assert (done.code, done.raw) == (2, b"")
    assert "Traceback" not in done.errors


def test_failures_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOS_MQ_DISABLED", "1")
    done = zos_mq("send", "--topic", "ask", "--body", "x")
    assert (done.code, done.raw) == (1, b"")
    assert done.error.startswith("zos-mq: ")
    assert zos_mq("poll", "--agent", "a").code == 0
    monkeypatch.delenv("ZOS_MQ_DISABLED")
    monkeypatch.setenv("ZOS_MQ_ROOT", "/dev/null/mq")
    done = zos_mq("send", "--topic", "ask", "--body", "x")
    assert (done.code, done.raw) == (1, b"")
    assert "Traceback" not in done.errors


def test_the_installed_command_prints_the_same_on_a_terminal() -> None:
    sent = run("zos-mq", "send", "--topic", "ask", "--body", "\x1b[2Jhello")
    assert sent.code == 0
    shown = run_on_terminal("zos-mq", "tail")
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert (shown.line["msg_id"], shown.line["body"]) == (sent.out.strip(), "\x1b[2Jhello")
    assert json.loads(run_on_terminal("zos-mq", "status").out)["default"]["messages"] == 1
