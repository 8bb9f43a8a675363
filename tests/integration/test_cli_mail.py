"""`postroom mail` against real servers, in this process where that is enough."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom import Mail
from tests.contract.natsservers import key_beside, made_certificate, running
from tests.integration.commandline import Result, finish, isolate, postroom, run, run_on_terminal, start
from tests.integration.mailservers import MailServer, serving
from tests.waiting import HANG_GUARD_S


@pytest.fixture(name="server", scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    with serving(tmp_path_factory.mktemp("mail") / "data", "--quota-messages", "50") as server:
        yield server


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: MailServer) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("POSTROOM_MAIL_SERVER", server.url)


def mail(*arguments: object, stdin: bytes = b"") -> Result:
    return postroom("mail", *arguments, stdin=stdin)


def box(*options: object) -> str:
    done = mail("create", "--ttl-s", 60, *options)
    assert (done.code, done.errors) == (0, "")
    return str(done.line["mail_id"])


# ---- the server --------------------------------------------------------------------------------------


def test_serve_prints_one_line_and_ends_with_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        assert server.facts == {
            "url": server.url,
            "data": str(tmp_path / "data"),
            "pid": server.process.pid,
        }
        with Mail(server.url) as client, client.subscribe(client.create(ttl_s=60)):
            assert server.end() == (0, "")  # with a connected client, which is notified first
    assert server.process.stdout is not None
    assert server.process.stdout.closed or server.process.stdout.read() == b""


def test_a_second_server_of_a_folder_is_refused(server: MailServer) -> None:
    done = run("postroom", "mail", "serve", "--data", server.data, "--port", 0)
    assert (done.code, done.raw) == (1, b"")
    said = f"postroom: {server.data} belongs to a mail server that is running (process {server.process.pid})"
    assert done.error == said


def test_a_port_in_use_gives_a_one_line_error_and_leaves_no_files(tmp_path: Path, server: MailServer) -> None:
    done = run("postroom", "mail", "serve", "--data", tmp_path / "run" / "other", "--port", server.port)
    assert (done.code, done.raw) == (1, b"")
    assert done.error == f"postroom: cannot listen on 127.0.0.1 port {server.port}: Address already in use"
    assert not (tmp_path / "run").exists()


def test_an_invalid_host_gives_a_one_line_error(tmp_path: Path) -> None:
    done = run("postroom", "mail", "serve", "--data", tmp_path / "data", "--host", "no host", "--port", 0)
    assert (done.code, done.raw) == (1, b"")
    assert done.error.startswith("postroom: cannot listen on no host port 0: ")
    assert not (tmp_path / "data").exists()


def test_a_symlinked_event_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    done = run("postroom", "mail", "serve", "--data", tmp_path / "data", "--port", 0)
    assert (done.code, done.raw) == (1, b"")
    assert "is a symlink, which is refused" in done.error


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--user", "ada"], "--user needs --password"),
        (["--password", "x"], "--user is missing: it belongs to --password"),
        (["--tls-first"], "need --tls-cert"),
        (["--tls-cert", "missing.pem"], "cannot use missing.pem: No such file or directory"),
        (["--users-file", "missing"], "cannot read the users in missing"),
        (["--users-file", "users"], "line 2 of users is not user:password"),
        (["--quota-bytes", "-1"], "--quota-bytes"),
        (["--normal", "never"], "--normal"),
    ],
)
def test_a_wrong_call_of_serve_gives_a_one_line_error(options: list[str], sentence: str) -> None:
    Path("users").write_text("ada:x\nbob\n")
    done = mail("serve", "--data", "data", "--port", 0, *options)
    assert (done.code, done.raw) == (2, b"")
    assert sentence in done.error
    assert not Path("data").exists()


def test_every_option_of_an_operator_reaches_the_server(tmp_path: Path) -> None:
    certificate = made_certificate(tmp_path)
    (tmp_path / "users").write_text("bob:two\n")
    options = [
        "--user", "ada", "--password", "one", "--users-file", tmp_path / "users", "--token", "three",
        "--tls-cert", certificate, "--tls-key", key_beside(certificate), "--durable-normal",
        "--critical", "os", "--urgent", "os", "--envelope", "always", "--default-ttl-s", 30,
        "--mailboxes-max", 3, "--stored-bytes-max", 10_000, "--quota-messages", 2, "--quota-bytes", 5_000,
        "--dead-letter-after", 2, "--receipts", "--extend", "--payload-bytes-max", 20_000,
        "--pending-bytes-max", 1_000_000, "--connections-max", 10, "--subscriptions-max", 10,
        "--ping-interval-s", 60, "--group-window", 8,
    ]  # fmt: skip
    with serving(tmp_path / "data", *map(str, options)) as server:
        where = ["--server", server.url, "--tls-ca", certificate]
        ada = [*where, "--user", "ada", "--password", "one"]
        made = [mail("create", *who).line["mail_id"] for who in (ada, [*where, "--token", "three"])]
        for size in (10, 10):
            assert mail("send", made[0], "--body", "x" * size, *ada).code == 0
        assert "quota" in mail("send", made[0], "--body", "x", *ada).error
        assert "quota" in mail("send", made[1], "--body", "x" * 5_001, *ada).error
        assert "at most 20000 bytes" in mail("send", made[1], "--body", "x" * 20_001, *ada).error
        assert [each["body"] for each in mail("read", made[0], *ada).lines] == ["x" * 10] * 2
        assert mail("create", *where, "--user", "bob", "--password", "two").code == 0
        assert "3 mailboxes" in mail("create", *ada).error
        assert "wrong user" in mail("create", *where, "--user", "bob", "--password", "one").error
        kinds = {event["kind"] for event in server.events()}
        assert "delivered" in kinds


# ---- mailboxes ---------------------------------------------------------------------------------------


def test_send_read_list_and_delete() -> None:
    mail_id = box()
    first = mail("send", mail_id, "--body", "one").line["msg_id"]
    second = mail("send", mail_id, "--priority", "critical", "--header", "Trace: t1", stdin=b"tw\xffo").line[
        "msg_id"
    ]
    assert mail("read", mail_id).lines == [
        {"msg_id": second, "priority": "critical", "body": "tw\udcffo", "headers": {"Trace": "t1"}},
        {"msg_id": first, "priority": "normal", "body": "one"},
    ]
    assert [row["msg_id"] for row in mail("read", mail_id, "--priority", "normal").lines] == [first]
    listed = mail("list", mail_id).lines
    assert [(row["msg_id"], row["priority"]) for row in listed] == [(second, "critical"), (first, "normal")]
    assert listed[0]["time"].endswith("Z")
    assert mail("delete", mail_id, first, 7).lines == [
        {"msg_id": first, "deleted": True},
        {"msg_id": 7, "deleted": False},
    ]
    assert [row["msg_id"] for row in mail("read", mail_id, "--delete").lines] == [second]
    assert mail("read", mail_id).raw == b""
    assert mail("send", mail_id, "--body", "x", "--no-wait").raw == b""
    assert len(mail("list", mail_id).lines) == 1


def test_an_id_can_stay_in_a_file() -> None:
    Path("box.json").write_bytes(mail("create", "--ttl-s", 60).raw)
    Path("box").write_text(json.loads(Path("box.json").read_text())["mail_id"] + "\n")
    assert mail("send", "@box.json", "--body", "hello").code == 0
    assert mail("read", "@box").line["body"] == "hello"
    Path("other").write_text('{"id": 1}')
    assert mail("read", "@other").error == "postroom: there is no mailbox id in other"
    assert mail("read", "@missing").error.endswith("missing: No such file or directory")


def test_create_prints_whether_the_mailbox_is_new() -> None:
    named = ["create", "--public", "--name", "cli.again", "--ttl-s", 60]
    assert mail(*named).line == {"mail_id": "cli.again", "is_new": True}
    assert mail(*named).line == {"mail_id": "cli.again", "is_new": False}
    env = {"NO_COLOR": "1", **environ()}
    assert run_on_terminal("postroom", "mail", *named, env=env).out == "cli.again exists already\n"
    named[3] = "cli.other"
    assert run_on_terminal("postroom", "mail", *named, env=env).out == "cli.other\n"


def test_public_mailboxes_are_discovered() -> None:
    assert box("--public", "--name", "cli.queue.queue", "--desc", "for all") == "cli.queue.queue"
    private = box()
    found = mail("discover").lines
    assert {"mail_id": "cli.queue.queue", "desc": "for all", "ttl_s": 60} in found
    assert private not in str(found)


def test_follow_prints_stored_and_new_messages_until_sigterm() -> None:
    mail_id = box()
    mail("send", mail_id, "--body", "stored")
    following = start("postroom", "mail", "follow", mail_id)
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["body"] == "stored"
    mail("send", mail_id, "--body", "live")
    assert json.loads(following.stdout.readline())["body"] == "live"
    following.send_signal(signal.SIGTERM)
    assert finish(following) == (0, b"", "")


def test_follow_ends_after_its_timeout() -> None:
    mail_id = box()
    mail("send", mail_id, "--body", "stored")
    done = mail("follow", mail_id, "--timeout-s", 1)
    assert (done.code, [each["body"] for each in done.lines]) == (0, ["stored"])


@pytest.mark.parametrize("option", ["--timeout-s", "--timeout"])
def test_every_command_has_one_name_for_its_timeout(option: str) -> None:
    """The earlier name of the option works, and is not shown."""
    mail_id = box()
    assert mail("send", mail_id, "--body", "x", option, 30).code == 0
    assert mail("read", mail_id, option, 30).line["body"] == "x"
    assert mail("follow", mail_id, option, 0.5).line["body"] == "x"
    assert "no answer to message" in mail("ask", mail_id, "--body", "x", option, 0).error
    for command in ("create", "send", "ask", "read", "follow", "delete", "list", "discover"):
        assert "--timeout-s S" in mail(command, "--help").out
        assert "--timeout " not in mail(command, "--help").out


@pytest.mark.parametrize("option", ["-n", "--count"])
def test_read_and_follow_end_after_n_messages(option: str) -> None:
    mail_id = box()
    for body in ("first", "second"):
        mail("send", mail_id, "--body", body)
    assert mail("follow", mail_id, option, 1).line["body"] == "first"
    assert mail("read", mail_id, option, 1, "--delete").line["body"] == "first"
    assert [each["body"] for each in mail("read", mail_id, option, 5).lines] == ["second"]
    for command in ("read", "follow"):
        done = mail(command, mail_id, option, 0)
        assert (done.code, done.raw) == (2, b"")
        assert "0 is not a number from 1 to " in done.error


def test_ask_prints_the_answer_and_fails_without_one() -> None:
    mail_id = box()
    asking = start(
        "postroom", "mail", "ask", mail_id, "--body", "is it green?", "--timeout-s", str(HANG_GUARD_S)
    )
    question = mail("follow", mail_id, "-n", 1).line
    mail("send", question["headers"]["Mq9-Reply-To"], "--body", "it is")
    code, printed, _ = finish(asking)
    assert (code, json.loads(printed)["body"]) == (0, "it is")
    nobody = mail("ask", mail_id, "--body", "and now?", "--timeout-s", 0)
    assert (nobody.code, nobody.raw) == (1, b"")
    assert "no answer to message" in nobody.error


def test_a_wrong_pair_of_storage_options_is_refused() -> None:
    done = mail("serve", "--data", "data", "--normal", "memory", "--durable-normal")
    assert (done.code, done.raw) == (2, b"")
    assert "exclude each other" in done.error


def test_followers_of_a_group_share_and_delete() -> None:
    mail_id = box()
    for number in range(4):
        mail("send", mail_id, "--body", number)
    done = mail("follow", mail_id, "--group", "g", "--delete", "-n", 3)
    assert [each["body"] for each in done.lines] == ["0", "1", "2"]
    assert [each["body"] for each in mail("read", mail_id).lines] == ["3"]


def test_a_follower_ends_with_its_reader() -> None:
    mail_id = box()
    read_end, write_end = os.pipe()
    following = start("postroom", "mail", "follow", mail_id, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    assert following.wait(HANG_GUARD_S) == 0
    assert following.stderr is not None
    assert following.stderr.read() == b""
    following.stderr.close()


def test_a_terminal_gets_readable_text() -> None:
    mail_id = box()
    mail("send", mail_id, "--body", "hello\x1b[31m", "--priority", "urgent")
    shown = run_on_terminal("postroom", "mail", "read", mail_id, env={"NO_COLOR": "1", **environ()}).out
    assert "urgent" in shown
    assert "hello\\x1b[31m" in shown
    shown = run_on_terminal("postroom", "mail", "list", mail_id, env={"NO_COLOR": "1", **environ()}).out
    assert shown.splitlines()[0].split() == ["msg", "id", "priority", "time"]


def environ() -> dict[str, str]:
    return {"POSTROOM_MAIL_SERVER": os.environ["POSTROOM_MAIL_SERVER"]}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["send", "no.such", "--body", "x"], 1, "the mailbox does not exist"),
        (["read", "no.such"], 1, "the mailbox does not exist"),
        (["follow", "no.such"], 1, "the server refuses the subscription: there may be no such mailbox"),
        (["send", "a b", "--body", "x"], 2, "mail_id must not be empty, or contain blanks or wildcards"),
        (["send", "a", "--body", "x", "--header", "none"], 2, "a header is written as NAME:VALUE"),
        (["create", "--public"], 2, "--public needs --name"),
        (["create", "--name", "x"], 2, "--name needs --public"),
        (["discover", "--server", "http://x"], 2, "the address of a server looks like"),
        (["discover", "--server", "127.0.0.1:1"], 1, "mail server at 127.0.0.1:1: Connection refused"),
        (["discover", "--tls-ca", "missing"], 2, "cannot use the certificates in missing"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(arguments: list[str], code: int, sentence: str) -> None:
    done = mail(*arguments)
    assert (done.code, done.raw) == (code, b"")
    assert sentence in done.error


def test_the_exit_code_is_1_when_the_server_is_gone_or_refuses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    commands = [
        ["create"], ["send", "a", "--body", "x"], ["ask", "a", "--body", "x"], ["read", "a"],
        ["follow", "a"], ["delete", "a", "1"], ["list", "a"], ["discover"],
    ]  # fmt: skip
    with serving(tmp_path / "data", "--user", "ada", "--password", "one") as server:
        for words in commands:
            gone = mail(*words, "--server", f"127.0.0.1:{port}")
            assert (gone.code, gone.raw) == (1, b"")
            sentence = f"cannot reach the mail server at 127.0.0.1:{port}: Connection refused"
            assert gone.error == f"postroom: {sentence}"
            refused = mail(*words, "--server", server.url, "--user", "ada", "--password", "two")
            assert (refused.code, refused.raw) == (1, b"")
            assert "the server refuses the login: wrong user, password or token" in refused.error


def test_the_exit_code_is_1_when_the_server_does_not_answer_in_time() -> None:
    done = mail("create", "--timeout-s", 0)
    assert (done.code, done.raw) == (1, b"")
    assert done.error == "postroom: no answer within 0 s: the call may or may not be done"


def test_a_nats_server_without_mailboxes_is_reported(tmp_path: Path) -> None:
    with running("nats-server", tmp_path) as plain:
        done = mail("create", "--server", plain.url)
    assert done.error == "postroom: the server has no mailboxes: it may be a plain NATS server"


def test_a_full_mailbox_is_reported() -> None:
    mail_id = box()
    with Mail(os.environ["POSTROOM_MAIL_SERVER"]) as client:
        for number in range(50):
            client.send(mail_id, str(number), wait=False)
    assert mail("send", mail_id, "--body", "x").error.endswith(
        "the mailbox holds 50 messages, which is its quota"
    )


def test_a_password_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_MAIL_PASSWORD", "one")
    with serving(tmp_path / "data", "--user", "ada") as server:
        assert mail("create", "--server", server.url, "--user", "ada").code == 0
        monkeypatch.setenv("POSTROOM_MAIL_PASSWORD", "two")
        assert "wrong user" in mail("create", "--server", server.url, "--user", "ada").error
