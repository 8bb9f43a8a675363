"""`Mail` against a real server: plain and for asyncio, across restarts, with TLS and with passwords."""

import asyncio
import json
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Mail, MailRefused, MailUnavailable
from postroom.client.mail import QUEUED_BYTES_MAX
from postroom.client.nats import servers_of
from postroom.core.mail.mailcalls import message_of
from postroom.core.nats.natswire import ControlLine
from postroom.errors import InvalidMessage, InvalidSetting
from tests.contract.natsservers import key_beside, made_certificate, running
from tests.integration.mailservers import MailServer, serving
from tests.waiting import HANG_GUARD_S

MANY = 1_200
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.fixture(name="server", scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    with serving(tmp_path_factory.mktemp("mail") / "data") as server:
        yield server


@pytest.fixture(name="mail")
def one_client(server: MailServer) -> Iterator[Mail]:
    with Mail(server.url) as mail:
        yield mail


def test_a_subscription_above_the_limit_of_a_client_fails(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--subscriptions-max", "2") as server, Mail(server.url) as mail:
        box = mail.create(ttl_s=60)
        with mail.subscribe(box) as first:  # the client itself has one for answers
            with pytest.raises(MailUnavailable, match="has too many"), mail.subscribe(box) as second:
                second.next(HANG_GUARD_S)
            mail.send(box, "x")
            assert first.next(HANG_GUARD_S) is not None


def test_messages_are_returned_in_the_order_of_priority(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    first = mail.send(box, {"job": 1})
    second = mail.send(box, "stop", priority="critical", headers={"Trace": "t1"})
    third = mail.send(box, b"\xff\x00", priority="urgent")
    assert first < second < third
    found = mail.messages(box)
    assert [(each.msg_id, each.priority, each.payload) for each in found] == [
        (second, "critical", b"stop"),
        (third, "urgent", b"\xff\x00"),
        (first, "normal", b'{"job":1}'),
    ]
    assert found[0].headers["Trace"] == "t1"
    assert (found[0].text, found[2].json()) == ("stop", {"job": 1})
    assert [each.payload for each in mail.messages(box, priority="normal")] == [b'{"job":1}']
    assert [(each.msg_id, each.priority) for each in mail.list(box)] == [
        (second, "critical"),
        (third, "urgent"),
        (first, "normal"),
    ]
    assert mail.delete(box, second)
    assert not mail.delete(box, second)
    assert [each.msg_id for each in mail.messages(box)] == [third, first]


def test_priorities_of_one_rank_are_read_together(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    for word in ("urgent", "high", "low"):
        mail.send(box, word, priority=word)
    assert [each.payload for each in mail.messages(box, priority="urgent")] == [b"urgent", b"high"]


def test_several_threads_may_use_one_client(server: MailServer) -> None:
    mail = Mail(server.url)
    boxes: list[str] = []
    threads = [threading.Thread(target=lambda: boxes.append(mail.create(ttl_s=60))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mail.close()
    assert len(set(boxes)) == 8


def test_a_message_above_the_limit_of_the_server_is_refused_by_the_client(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    with pytest.raises(InvalidMessage, match="at most 1048576 bytes"):
        mail.send(box, b"x" * (1 << 20) + b"x")
    assert mail.send(box, b"x" * (1 << 20))


def test_a_subscription_returns_stored_and_then_new_messages(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    mail.send(box, "stored")
    with mail.subscribe(box) as messages:
        assert messages.next(HANG_GUARD_S) == mail.messages(box)[0]
        assert messages.next(0.0) is None
        mail.send(box, "live", wait=False)
        live = messages.next(HANG_GUARD_S)
        assert live is not None
        assert live.payload == b"live"
    assert list(messages) == []


def test_a_slow_reader_gets_the_most_urgent_buffered_message(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    with mail.subscribe(box) as messages:
        for number in range(200):
            mail.send(box, str(number), wait=False)
        mail.send(box, "stop", priority="critical")
        while len(messages._inner._queued) < 201:
            threading.Event().wait(0.01)
        got = [messages.next(HANG_GUARD_S) for _ in range(201)]
    assert [message.text for message in got if message] == ["stop", *map(str, range(200))]


def test_ask_returns_the_answer_sent_to_a_private_mailbox(mail: Mail, server: MailServer) -> None:
    box = mail.create(ttl_s=60)

    def answer() -> None:
        with Mail(server.url) as other, other.subscribe(box) as questions:
            question = questions.next(HANG_GUARD_S)
            assert question is not None
            other.send(question.reply_to, f"{question.headers['Trace']}: {question.text} is green")

    answering = threading.Thread(target=answer)
    answering.start()
    got = mail.ask(box, "main", priority="urgent", headers={"Trace": "t1"}, timeout_s=HANG_GUARD_S)
    answering.join()
    assert got.text == "t1: main is green"
    assert got.mail_id == mail.messages(box)[0].reply_to != box
    assert got.reply_to == ""


def test_ask_without_an_answer_raises_and_keeps_the_message(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    with pytest.raises(MailUnavailable, match="no answer to message") as error:
        mail.ask(box, "anybody?", timeout_s=0.0)
    assert str(mail.list(box)[0].msg_id) in str(error.value)
    with pytest.raises(MailRefused):
        mail.ask("no.such.box", "anybody?", timeout_s=HANG_GUARD_S)


def test_an_iteration_ends_when_another_thread_closes_it(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    mail.send(box, "one")
    messages = mail.subscribe(box)
    found = []
    for message in messages:
        found.append(message.payload)
        threading.Timer(0.05, messages.close).start()
    assert found == [b"one"]


def test_a_group_shares_messages(mail: Mail, server: MailServer) -> None:
    box = mail.create("pool.work", ttl_s=60, public=True)
    with (
        Mail(server.url) as other,
        mail.subscribe(box, group="g") as one,
        other.subscribe(box, group="g") as two,
    ):
        for number in range(10):
            mail.send(box, str(number))
        got = [[], []]  # type: list[list[bytes]]
        for place, member in enumerate((one, two)):
            while (message := member.next(0.5)) is not None:
                got[place].append(message.payload)
        assert sorted(got[0] + got[1]) == [b"%d" % number for number in range(10)]
        assert len(got[0]) == len(got[1]) == 5


def test_close_returns_after_the_server_has_unsubscribed(server: MailServer) -> None:
    """Otherwise the server could still deliver messages, which would be lost with the connection."""
    said: list[bytes] = []
    ends: list[asyncio.Future[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: list[bytes]) -> None:
        while line := await reader.readline():
            heard.append(line)
            writer.write(line)
        writer.close()
        await writer.wait_closed()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", server.port)
        ends.extend(map(asyncio.ensure_future, (pump(reader, onward[1], said), pump(onward[0], writer, []))))

    async def work() -> None:
        async with await asyncio.start_server(between, "127.0.0.1", 0) as listening:
            url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            async with Mail(url) as mail:
                subscription = await mail.subscribe(await mail.create(ttl_s=60), group="g")
                said.clear()
                await subscription.close()
                assert said == [b"UNSUB 1\r\n", b"PING\r\n"]
            await asyncio.gather(*ends)

    asyncio.run(work())


def test_public_mailboxes_can_be_found_and_private_ones_cannot(mail: Mail) -> None:
    private = mail.create(ttl_s=60)
    hidden = mail.create(ttl_s=60)
    mail.create("shown.name", public=True, ttl_s=60, desc="for all")
    found = {each.mail_id: each for each in mail.public()}
    assert found["shown.name"].desc == "for all"
    assert found["shown.name"].ttl_s == 60
    assert private not in found
    assert hidden not in found


def test_a_mailbox_above_the_list_limit_is_read_whole(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    for number in range(MANY):
        mail.send(box, str(number), wait=False)
    assert len(mail.list(box)) == 1000
    assert [int(each.payload) for each in mail.messages(box)] == list(range(MANY))


def test_a_mailbox_above_the_reply_limit_is_read_whole(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    for number in range(4):
        mail.send(box, b"%d" % number * (1 << 19), wait=False)
    assert len(mail.list(box)) == 4
    assert [each.payload[:1] for each in mail.messages(box)] == [b"0", b"1", b"2", b"3"]


def test_a_refusal_of_the_server_raises_with_its_code(mail: Mail) -> None:
    with pytest.raises(MailRefused, match="does not exist") as refused:
        mail.send("nowhere", "x")
    assert refused.value.code == 404
    with pytest.raises(MailRefused, match="refuses the subscription"):
        mail.subscribe("nowhere")
    with pytest.raises(MailRefused, match="needs a name"):
        mail.create(public=True)
    with pytest.raises(MailRefused, match="private mailbox has no name"):
        mail.create("named")
    mail.create()  # and the client continues to work


@pytest.mark.parametrize("mail_id", ["", "a b", "a.*", ">", "a\r\nPUB x 0\r\n"])
def test_nothing_that_would_break_the_protocol_is_sent(mail: Mail, mail_id: str) -> None:
    with pytest.raises(InvalidMessage):
        mail.send(mail_id, "x")


def test_invalid_arguments_of_send_and_subscribe_are_refused(mail: Mail) -> None:
    with pytest.raises(InvalidMessage, match="priority"):
        mail.send("a", "x", priority="soon")  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="header"):
        mail.send("a", "x", headers={"A": "b\r\nC: d"})
    with pytest.raises(InvalidMessage, match="group"):
        mail.subscribe("a", group="a b")


TEXTS: list[Any] = [1, None, b"x", ["x"], object()]
SECONDS: list[Any] = ["x", -1, True, float("nan"), float("inf"), object()]
WORDS: list[Any] = ["hihg", 1, None, ["high"], "HIGH"]


@pytest.mark.parametrize(
    ("call", "values", "sentence"),
    [
        (lambda mail, _, value: mail.send(value, "x"), TEXTS, "mail_id must be text"),
        (lambda mail, _, value: mail.list(value), TEXTS, "mail_id must be text"),
        (lambda mail, _, value: mail.delete(value, 1), TEXTS, "mail_id must be text"),
        (lambda mail, _, value: mail.messages(value), TEXTS, "mail_id must be text"),
        (lambda mail, _, value: mail.subscribe(value), TEXTS, "mail_id must be text"),
        (
            lambda mail, box, value: mail.send(box, "x", priority=value),
            WORDS,
            "priority must be one of critical, urgent, high, normal, low, not ",
        ),
        (
            lambda mail, box, value: mail.subscribe(box, priority=value),
            WORDS,
            "priority must be one of critical, urgent, high, normal, low, or * for all, not ",
        ),
        (lambda mail, box, value: mail.messages(box, priority=value), WORDS, "priority must be one of "),
        (
            lambda mail, box, value: mail.send(box, value),
            [object(), {"a": object()}, {(1, 2): 3}, ENDLESS],
            "payload must be bytes, text, or what JSON can hold, not ",
        ),
        (lambda mail, box, value: mail.send(box, value), ["\ud800", ["\ud800"]], "payload holds lone surr"),
        (
            lambda mail, box, value: mail.send(box, "x", headers=value),
            [1, "a:b", ["a"]],
            "headers must be a dict of text, not ",
        ),
        (
            lambda mail, box, value: mail.send(box, "x", headers=value),
            [{"a": 1}, {b"a": b"b"}, {"a": "\ud800"}],
            " of a header ",
        ),
        (lambda mail, box, value: mail.ask(box, "x", headers=value), [1, "a:b"], "headers must be a dict"),
        (lambda mail, _, value: mail.create(ttl_s=value), SECONDS, "ttl_s must be a number of seconds"),
        (
            lambda mail, _, value: mail.create(value, public=True),
            [1, ["n"], b"n", "n\ud800"],
            "name ",
        ),
        (
            lambda mail, _, value: mail.create("n", public=True, desc=value),
            [1, b"n", "\ud800"],
            "desc ",
        ),
        (lambda mail, _, value: mail.create("n", public=value), [1, "yes", None], "public must be true or"),
        (lambda mail, box, value: mail.subscribe(box, group=value), TEXTS, "group must be text"),
        (
            lambda mail, box, value: mail.delete(box, value),
            ["1", None, 1.5, -1, True],
            "msg_id must be the number of a message, not ",
        ),
        (lambda mail, box, value: mail.messages(box, quiet_s=value), SECONDS, "quiet_s must be a number of"),
        (lambda mail, _, value: mail.public(quiet_s=value), SECONDS, "quiet_s must be a number of"),
        (lambda mail, box, value: mail.ask(box, "x", timeout_s=value), SECONDS, "timeout_s must be a number"),
        (lambda mail, box, value: mail.subscribe(box).next(value), SECONDS, "timeout_s must be a number"),
        (lambda _, __, value: Mail(value), TEXTS, "server must be text"),
        (lambda _, __, value: Mail(user=value), TEXTS, "user must be text"),
        (lambda _, __, value: Mail(password=value), TEXTS, "password must be text"),
        (lambda _, __, value: Mail(name=value), TEXTS, "name must be text"),
        (lambda _, __, value: Mail(timeout_s=value), SECONDS, "timeout_s must be a number"),
        (lambda _, __, value: Mail(tls=value), [True, "ca.pem"], "tls must be an ssl.SSLContext, not "),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_kind_give_a_one_line_error(
    mail: Mail, call: Callable[[Mail, str, Any], object], values: list[Any], sentence: str
) -> None:
    box = mail.create(ttl_s=60)
    for value in values:
        with pytest.raises(InvalidMessage) as refused:
            call(mail, box, value)
        assert sentence in str(refused.value)
        assert "\n" not in str(refused.value)
    assert mail.list(box) == []


def test_bytes_of_every_kind_are_sent_as_they_are(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    for payload in (b"\x00a", bytearray(b"\x00a"), memoryview(b"\x00a")):
        mail.send(box, payload)
    assert [each.payload for each in mail.messages(box)] == [b"\x00a"] * 3


def test_ensure_returns_whether_the_mailbox_is_new(mail: Mail) -> None:
    assert mail.ensure("ensured", public=True, ttl_s=60) == ("ensured", True)
    assert mail.ensure("ensured", public=True, ttl_s=60) == ("ensured", False)
    assert mail.create("ensured", public=True) == "ensured"


def test_the_same_calls_for_asyncio(server: MailServer) -> None:
    async def work() -> None:
        async with Mail(server.url) as mail:
            box = await mail.create(ttl_s=60)
            number = await mail.send(box, "hello", priority="urgent")
            async with await mail.subscribe(box) as messages:
                async for message in messages:
                    assert (message.msg_id, message.payload) == (number, b"hello")
                    assert await mail.delete(box, number)
                    break
            assert await mail.list(box) == []
            assert await mail.messages(box) == []
            sends = [mail.send(box, str(each)) for each in range(100)]
            assert len(set(await asyncio.gather(*sends))) == 100

    asyncio.run(work())


def test_a_slow_reader_delays_no_other_call(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    with mail.subscribe(box) as messages:
        for number in range(80):
            mail.send(box, b"%03d" % number + b"x" * (QUEUED_BYTES_MAX // 60), wait=False)
        assert len(mail.list(box)) == 80
        found = [messages.next(HANG_GUARD_S) for _ in range(80)]
        assert [int(each.payload[:3]) for each in found if each is not None] == list(range(80))


def test_a_subscription_outlives_its_server(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data") as server,
        Mail(server.url) as mail,
        Mail(server.url, timeout_s=0.2) as hasty,
    ):
        box = mail.create(ttl_s=60)
        before = mail.send(box, "before", priority="critical")
        with mail.subscribe(box) as messages, mail.subscribe(box, group="g") as member:
            assert [each.next(HANG_GUARD_S).msg_id for each in (messages, member)] == [before] * 2  # type: ignore[union-attr]
            server.end(signal.SIGKILL)
            with pytest.raises(MailUnavailable):
                hasty.send(box, "nobody is there")
            server.start()
            after = mail.send(box, "after", priority="critical")
            message = messages.next(HANG_GUARD_S)
            assert message is not None
            assert message.msg_id == after  # it skips messages that it returned before
            again = [member.next(HANG_GUARD_S).msg_id for _ in range(2)]  # type: ignore[union-attr]
            assert again == [before, after]  # some member has to finish it


def test_a_subscription_to_an_expired_mailbox_raises_after_a_reconnect(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, Mail(server.url) as mail:
        box = mail.create(ttl_s=0.5)
        with mail.subscribe(box) as messages:
            server.end()
            server.start()
            with pytest.raises(MailRefused):
                messages.next(HANG_GUARD_S)


def test_passwords_and_tokens(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("# who\nada:one\nbob:two:three\n")
    with serving(tmp_path / "data", "--users-file", str(tmp_path / "users"), "--token", "t0ken") as server:
        host = f"127.0.0.1:{server.port}"
        for url, words in {
            f"nats://ada:one@{host}": {},
            f"nats://t0ken@{host}": {},
            f"nats://{host}": {"user": "bob", "password": "two:three"},
            host: {"token": "t0ken"},
        }.items():
            with Mail(url, **words) as mail:  # type: ignore[arg-type]
                mail.create(ttl_s=60)
        for url in (f"nats://{host}", f"nats://ada:two@{host}"):
            with pytest.raises(MailRefused, match="wrong user, password or token"), Mail(url):
                pass


def test_tls(tmp_path: Path) -> None:
    certificate = made_certificate(tmp_path)
    words = ("--tls-cert", str(certificate), "--tls-key", str(key_beside(certificate)))
    with serving(tmp_path / "data", *words) as server:
        assert server.url.startswith("tls://")
        trusting = ssl.create_default_context(cafile=certificate)
        with Mail(server.url, tls=trusting) as mail:
            box = mail.create(ttl_s=60)
            mail.send(box, b"x" * 500_000)
            assert [len(each.payload) for each in mail.messages(box)] == [500_000]
        with (
            pytest.raises(MailUnavailable, match=r"TLS failed: self.signed certificate.*--tls-ca"),
            Mail(server.url),
        ):
            pass
        elsewhere = server.url.replace(
            "127.0.0.1", "127.1"
        )  # the same address, and no name of the certificate
        with pytest.raises(MailUnavailable, match="mismatch") as refused, Mail(elsewhere, tls=trusting):
            pass
        assert "--tls-ca" not in str(refused.value)


def test_nothing_is_sent_in_the_clear_with_tls(server: MailServer) -> None:
    with pytest.raises(MailRefused, match="no TLS"), Mail(f"tls://127.0.0.1:{server.port}"):
        pass


def say_something_else(listening: socket.socket) -> None:
    with listening.accept()[0] as accepted:
        accepted.sendall(b"HTTP/1.1 400\r\n\r\n")
        accepted.recv(1)


def test_a_nats_server_without_mailboxes_is_reported(tmp_path: Path) -> None:
    refused = pytest.raises(MailUnavailable, match="plain NATS server")
    with running("nats-server", tmp_path) as plain, Mail(plain.url) as mail, refused:
        mail.create()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=say_something_else, args=[listening]).start()
        url = f"nats://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(MailUnavailable, match="does not speak NATS"), Mail(url):
            pass


def test_the_next_server_of_the_list_is_tried(server: MailServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Mail(f"nats://127.0.0.1:{port},{server.url}") as mail:
        mail.create(ttl_s=60)
    with pytest.raises(MailUnavailable, match="Connection refused"), Mail(f"nats://127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize("address", ["", "http://host", "nats://", "nats://host:port"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidSetting):
        Mail(address)


def test_credentials_in_addresses_are_used() -> None:
    found = servers_of("nats://a%40b:p%3Aw@h:1, tls://t@[::1], h2", user="u", password="p", token="")  # noqa: S106
    assert [(each.host, each.port, each.tls, each.user, each.password, each.token) for each in found] == [
        ("h", 1, False, "a@b", "p:w", ""),
        ("::1", 4222, True, "u", "p", "t"),
        ("h2", 4222, False, "u", "p", ""),
    ]


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"raw", b"", (0, "urgent", b"raw")),
        (b"raw", b"NATS/1.0\r\nMq9-Msg-Id: 7\r\n\r\n", (7, "urgent", b"raw")),
        (b'{"msg_id":"7","priority":"high","payload":"aGk="}', b"", (7, "high", b"hi")),
        (b'{"msg_id":"7","priority":"high","payload":" "}', b"", (7, "high", b"")),
        (b'{"msg_id":"7"}', b"", (0, "urgent", b'{"msg_id":"7"}')),
        (
            b'{"msg_id":"7","priority":"high","payload":"#"}',
            b"NATS/1.0\r\nmq9-msg-id: 8\r\n\r\n",
            (8, "urgent", None),
        ),
    ],
)
def test_a_message_is_read_in_every_form(
    body: bytes, headers: bytes, expected: tuple[int, str, bytes | None]
) -> None:
    head = ControlLine(b"$mq9.AI.MAILBOX.MSG.a.b.urgent", b"", len(headers) or -1, len(headers) + len(body))
    found = message_of("a.b", head, headers + body)
    assert (found.msg_id, found.priority) == expected[:2]
    assert found.payload == (body if expected[2] is None else expected[2])


def test_a_payload_that_is_not_json_raises(mail: Mail) -> None:
    box = mail.create(ttl_s=60)
    mail.send(box, "{")
    with pytest.raises(InvalidMessage, match="not JSON"):
        mail.messages(box)[0].json()


def test_a_closed_client_raises(server: MailServer) -> None:
    mail = Mail(server.url)
    box = mail.create(ttl_s=60)
    messages = mail.subscribe(box)
    mail.close()
    mail.close()
    with pytest.raises(MailUnavailable, match="closed"):
        messages.next()
    assert json.dumps(mail.list(box)) == "[]"  # the next call connects again
    mail.close()
