"""The core NATS protocol: our server and the real nats-server pass the same tests.

`both` runs a test on each of them. Guarantees of our server alone (limits, shutdown) use `ours`.
"""

import asyncio
import json
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from postroom.server.nats.options import FILES_RESERVED, LAME_DUCK_S
from postroom.server.nats.server import CLOSE_TIMEOUT_S
from tests.contract.natsservers import (
    CONNECT,
    Server,
    Wanted,
    Wire,
    made_certificate,
    running,
    trusting,
)
from tests.waiting import HANG_GUARD_S

KINDS = ("ours", "nats-server")
BARE = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
NO_ECHO = b'CONNECT {"verbose":false,"echo":false,"headers":true,"no_responders":true}\r\n'
FLOOD_BODY = b"x" * 4096
FLOOD_ROUNDS = 400  # more than the buffers of the system and of the server together
TOKEN = "sesame"  # noqa: S105 - a test's


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(request.param, tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("ours", tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- the handshake -----------------------------------------------------------------------------------


def test_the_server_sends_info_first(both: Server) -> None:
    with Wire(both) as wire:
        verb, _, text = wire.info.partition(b" ")
        info = json.loads(text)
    assert verb == b"INFO"
    assert info["headers"] is True
    assert info["max_payload"] == 1 << 20
    assert info["proto"] == 1
    assert info["port"] == both.port
    assert info["client_ip"] == "127.0.0.1"
    assert isinstance(info["client_id"], int)
    assert tuple(map(int, info["version"].split("."))) >= (2, 2, 0)
    assert not {"auth_required", "tls_required", "ldm"} & {key for key, value in info.items() if value}


def test_pong_is_the_very_next_line_after_connect_and_ping(both: Server) -> None:
    with Wire(both, CONNECT + b"PING\r\n") as wire:
        assert wire.line() == b"PONG\r\n"


def test_a_connect_without_verbose_means_verbose(both: Server) -> None:
    with Wire(both, b"CONNECT {}\r\n") as wire:
        assert wire.line() == b"+OK\r\n"


def test_verbose_acknowledges_everything_but_ping(both: Server) -> None:
    with Wire(both, b'CONNECT {"verbose":true}\r\n') as wire:
        answers = wire.ask(b"SUB a 1\r\nPUB a 1\r\nx\r\nUNSUB 1\r\n")
    assert answers == b"+OK\r\n+OK\r\n+OK\r\nMSG a 1 1\r\nx\r\n+OK\r\n"


def test_connect_is_optional_without_logins(both: Server) -> None:
    with Wire(both, b"") as wire:
        assert wire.ask(b"SUB a 1\r\nPUB a 1\r\nx\r\n") == b"+OK\r\n+OK\r\nMSG a 1 1\r\nx\r\n"


@pytest.mark.parametrize("sent", [b"CONNECT {x\r\n", b'CONNECT {"verbose":1}\r\n', b"CONNECT\r\n"])
def test_a_connect_that_is_not_json_ends_the_connection(both: Server, sent: bytes) -> None:
    with Wire(both, b"") as wire:
        assert b"PONG" not in wire.rest(sent + b"PING\r\n")


def test_no_responders_needs_headers(both: Server) -> None:
    with Wire(both, b'CONNECT {"verbose":false,"no_responders":true}\r\n') as wire:
        assert wire.rest(b"PING\r\n") == b"-ERR 'no responders requires headers support'\r\n"


# ---- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"sub a 1\r\npub a 1\r\nx\r\n", b"MSG a 1 1\r\nx\r\n"),
        (b"SUB\ta   1 \r\nPUB a  1\r\nx\r\n", b"MSG a 1 1\r\nx\r\n"),
        (b"SUB a 1\nPUB a 1\nx\r\n", b"MSG a 1 1\r\nx\r\n"),
        (b"SUB a 1\r\nPUB a 0\r\n\r\n", b"MSG a 1 0\r\n\r\n"),
        (b"SUB a 1\r\nPUB a 8\r\nPUB a 1\r\r\n", b"MSG a 1 8\r\nPUB a 1\r\r\n"),
        (b"SUB a 1\r\nPUB a 4\r\n\r\n\r\n\r\n", b"MSG a 1 4\r\n\r\n\r\n\r\n"),
        (b"SUB a 1\r\nPUB a in.box 2\r\nhi\r\n", b"MSG a 1 in.box 2\r\nhi\r\n"),
        (b"SUB a 1\r\nSUB a 2\r\nUNSUB 1 \r\nPUB a 1\r\nx\r\n", b"MSG a 2 1\r\nx\r\n"),
        (b"SUB a 1\r\nSUB b 1\r\nPUB b 1\r\nx\r\nPUB a 1\r\ny\r\n", b"MSG a 1 1\r\ny\r\n"),
        (b"UNSUB 99\r\n", b""),
        (b"+OK\r\n", b""),
        (b"SUB a\xc3\xa4 1\r\nPUB a\xc3\xa4 1\r\nx\r\n", b"MSG a\xc3\xa4 1 1\r\nx\r\n"),
        (b"SUB a..b 1\r\n", b"-ERR 'Invalid Subject'\r\n"),
        (b"SUB a.>.b 1\r\n", b"-ERR 'Invalid Subject'\r\n"),
        (b"SUB .a 1\r\n", b"-ERR 'Invalid Subject'\r\n"),
        (b"SUB a 1\r\nHPUB a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n", b"HMSG a 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"),
        (b"SUB a 1\r\nHPUB a r 12 12\r\nNATS/1.0\r\n\r\n\r\n", b"HMSG a 1 r 12 12\r\nNATS/1.0\r\n\r\n\r\n"),
        (b"SUB a 1\r\nHPUB a 0 2\r\nhi\r\n", b"MSG a 1 2\r\nhi\r\n"),
    ],
)
def test_commands_and_their_answers(both: Server, sent: bytes, answer: bytes) -> None:
    with Wire(both) as wire:
        assert wire.ask(sent) == answer


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"FOO\r\n", b"Unknown Protocol Operation"),
        (b"\r\n", b"Unknown Protocol Operation"),
        (b" PING\r\n", b"Unknown Protocol Operation"),
        (b"MSG a 1 1\r\nx\r\n", b"Unknown Protocol Operation"),
        (b"PUB a 1\r\nxy\r\n", b"Unknown Protocol Operation"),
        (b"PUB a 1\nx\nPING\r\n", b"Unknown Protocol Operation"),
        (b"PUB a 1048577\r\n", b"Maximum Payload Violation"),
        (b"SUB " + b"a" * 5000 + b" 1\r\n", b"maximum control line exceeded"),
        (b"SUB a\r\n", b""),
        (b"SUB a b c d\r\n", b""),
        (b"PUB a\r\n", b""),
        (b"PUB a -1\r\n", b""),
        (b"PUB a one\r\n", b""),
        (b"PUB a b c 1\r\n", b""),
        (b"HPUB a 15 14\r\nNATS/1.0\r\n\r\nhi\r\n", b""),
        (b"UNSUB\r\n", b""),
    ],
)
def test_a_protocol_violation_ends_the_connection(both: Server, sent: bytes, error: bytes) -> None:
    with Wire(both) as wire:
        wire.ask(b"SUB a 1\r\n")
        answer = wire.rest(sent)
    assert b"MSG" not in answer
    if error:
        assert answer == b"-ERR '%b'\r\n" % error


def test_headers_from_a_client_without_header_support_end_the_connection(both: Server) -> None:
    with Wire(both, BARE) as wire:
        assert b"MSG" not in wire.rest(b"SUB a 1\r\nHPUB a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n")


def test_a_client_without_headers_gets_the_payload_alone(both: Server) -> None:
    with Wire(both) as sender, Wire(both, BARE) as receiver:
        receiver.ask(b"SUB plain 1\r\n")
        sender.ask(b"HPUB plain 12 14\r\nNATS/1.0\r\n\r\nhi\r\n")
        assert receiver.ask() == b"MSG plain 1 2\r\nhi\r\n"


def test_a_body_of_the_largest_size_passes(both: Server) -> None:
    body = bytes(range(256)) * 4096
    with Wire(both) as wire:
        wire.send(b"SUB big 1\r\nPUB big %d\r\n%b\r\n" % (len(body), body))
        assert wire.until(b"\r\n") == b"MSG big 1 %d" % len(body)
        assert wire.until(b"\xff\r\n") == body[:-1]


def test_a_frame_may_come_in_any_pieces(both: Server) -> None:
    sent = b"SUB cut 1\r\nPUB cut 3\r\na\r\n\r\nHPUB cut 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
    answer = b"MSG cut 1 3\r\na\r\n\r\nHMSG cut 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
    with Wire(both) as wire:
        for letter in sent:
            wire.send(bytes([letter]))
        assert wire.ask() == answer
    for at in range(1, len(sent), 5):
        with Wire(both) as wire:
            wire.send(sent[:at])
            assert wire.ask(sent[at:]) == answer


def test_a_connection_cut_at_any_byte_of_a_frame_publishes_nothing_of_it(both: Server) -> None:
    frame = b"HPUB torn 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
    with Wire(both) as watcher:
        watcher.ask(b"SUB torn 1\r\n")
        for at in range(len(frame)):
            with Wire(both) as wire:
                wire.ask(frame[:at] if at == 0 else b"")
                wire.send(frame[:at])
        with Wire(both) as wire:
            wire.ask(frame)
        assert watcher.ask() == b"HMSG torn 1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"


def test_a_burst_arrives_whole_and_in_order(both: Server) -> None:
    bodies = [b"%07d" % number for number in range(5_000)]
    bodies[1_234] = b"PUB b 7"  # looks like a frame
    with Wire(both) as wire:
        answer = wire.ask(b"SUB b 1\r\n" + b"".join(b"PUB b 7\r\n%b\r\n" % body for body in bodies))
    assert answer == b"".join(b"MSG b 1 7\r\n%b\r\n" % body for body in bodies)


# ---- subjects, groups, ends --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        (b"a.b", b"a.b", True),
        (b"a.b", b"a.B", False),
        (b"a.*", b"a.b", True),
        (b"a.*", b"a", False),
        (b"a.*", b"a.b.c", False),
        (b"a.>", b"a.b.c", True),
        (b"a.>", b"a", False),
        (b">", b"a.b", True),
        (b"*.b", b"a.b", True),
        (b"*.*.c", b"a.b.c", True),
        (b"a*.b", b"ax.b", False),
        (b"a*.b", b"a*.b", True),
        (b"a.*.>", b"a.b", False),
        (b"a.*.>", b"a.b.c.d", True),
    ],
)
def test_wildcards(both: Server, pattern: bytes, subject: bytes, matches: bool) -> None:
    with Wire(both) as wire:
        answer = wire.ask(b"SUB %b 1\r\nPUB %b 1\r\nx\r\n" % (pattern, subject))
    assert answer == (b"MSG %b 1 1\r\nx\r\n" % subject if matches else b"")


def test_every_matching_subscription_of_a_connection_gets_its_own(both: Server) -> None:
    with Wire(both) as wire:
        answer = wire.ask(b"SUB a.b 1\r\nSUB a.* 2\r\nSUB a.b 3\r\nPUB a.b 1\r\nx\r\n")
    assert Counter(answer.split(b"x\r\n")) == Counter(
        [b"MSG a.b 1 1\r\n", b"MSG a.b 2 1\r\n", b"MSG a.b 3 1\r\n", b""]
    )


def test_a_queue_group_delivers_each_message_to_one_of_all_members(both: Server) -> None:
    count = 300
    with Wire(both) as one, Wire(both) as two, Wire(both) as other, Wire(both) as sender:
        for wire, group in ((one, b"g"), (two, b"g"), (other, b"h")):
            wire.ask(b"SUB job.* %b 1\r\n" % group)
        sender.ask(b"".join(b"PUB job.x 3\r\n%03d\r\n" % number for number in range(count)))
        found = [wire.ask().split(b"\r\n")[1::2] for wire in (one, two, other)]
    everything = [b"%03d" % number for number in range(count)]
    assert sorted(found[0] + found[1]) == everything
    assert found[0] == sorted(found[0])
    assert found[1] == sorted(found[1])
    assert found[2] == everything
    assert min(map(len, found)) > 0


@pytest.mark.parametrize("members", [2, 40])
def test_messages_that_come_one_by_one_go_to_all_members_of_a_group(both: Server, members: int) -> None:
    with Wire(both) as one, Wire(both) as two, Wire(both) as sender:
        for wire in (one, two):
            wire.ask(b"".join(b"SUB single g %d\r\n" % sid for sid in range(members // 2)))
        for _ in range(100):
            sender.ask(b"PUB single 1\r\nx\r\n")
        found = [wire.ask().count(b"\r\nx\r\n") for wire in (one, two)]
    assert sum(found) == 100
    assert min(found) > 0


def test_a_member_that_leaves_a_group_gets_nothing_more(both: Server) -> None:
    with Wire(both) as one, Wire(both) as two:
        one.ask(b"SUB left g 1\r\n")
        two.ask(b"SUB left g 1\r\n")
        one.ask(b"UNSUB 1\r\n")
        assert two.ask(b"PUB left 1\r\nx\r\n" * 5) == b"MSG left 1 1\r\nx\r\n" * 5


@pytest.mark.parametrize(("before", "gets"), [(0, 2), (1, 2), (3, 3)])
def test_unsub_with_a_number_counts_from_the_subscription(both: Server, before: int, gets: int) -> None:
    publish = b"PUB n 1\r\nx\r\n"
    with Wire(both) as wire:
        answer = wire.ask(b"SUB n 1\r\n" + publish * before + b"UNSUB 1 2\r\n" + publish * 4)
        assert answer == b"MSG n 1 1\r\nx\r\n" * gets
        assert wire.ask(b"SUB n 1\r\n" + publish) == b"MSG n 1 1\r\nx\r\n"  # the number is free again


def test_a_group_continues_when_a_member_has_reached_its_limit(both: Server) -> None:
    with Wire(both) as wire:
        answer = wire.ask(b"SUB q g 1\r\nSUB q g 2\r\nUNSUB 1 1\r\n" + b"PUB q 1\r\nx\r\n" * 20)
    assert answer.count(b"MSG q 1 1\r\n") <= 1
    assert answer.count(b"\r\nx\r\n") == 20


def test_without_echo_a_client_does_not_get_its_own_messages(both: Server) -> None:
    with Wire(both, NO_ECHO) as silent, Wire(both) as other:
        silent.ask(b"SUB e 1\r\nSUB e g 2\r\n")
        other.ask(b"SUB e 7\r\n")
        assert silent.ask(b"PUB e 1\r\nx\r\n") == b""
        assert other.ask() == b"MSG e 7 1\r\nx\r\n"
        other.ask(b"PUB e 1\r\ny\r\n")
        assert silent.ask().count(b"\r\ny\r\n") == 2


# ---- request and reply -------------------------------------------------------------------------------


def test_a_request_without_responders_is_answered_at_once(both: Server) -> None:
    with Wire(both) as wire:
        answer = wire.ask(b"SUB in.* 1\r\nPUB nobody.there in.5 1\r\nx\r\n")
    head, _, headers = answer.partition(b"\r\n")
    assert head.startswith(b"HMSG in.5 1 ")
    assert headers.startswith(b"NATS/1.0 503\r\n")
    assert b"Nats-Subject: nobody.there\r\n" in headers


def test_only_clients_that_asked_for_it_get_no_responders(both: Server) -> None:
    with Wire(both, BARE) as wire:
        assert wire.ask(b"SUB in.* 1\r\nPUB nobody.there in.5 1\r\nx\r\n") == b""
    with Wire(both) as wire:
        assert wire.ask(b"SUB in.* 1\r\nPUB nobody.there 1\r\nx\r\n") == b""


def test_a_reply_reaches_another_connection(both: Server) -> None:
    with Wire(both) as asking, Wire(both) as serving:
        serving.ask(b"SUB svc g 1\r\n")
        asking.ask(b"SUB _INBOX.me.* 1\r\n")
        asking.ask(b"PUB svc _INBOX.me.7 1\r\n?\r\n")
        assert serving.ask() == b"MSG svc 1 _INBOX.me.7 1\r\n?\r\n"
        serving.ask(b"PUB _INBOX.me.7 1\r\n!\r\n")
        assert asking.ask() == b"MSG _INBOX.me.7 1 1\r\n!\r\n"


def test_jetstream_requests_have_no_responders(both: Server) -> None:
    with Wire(both) as wire:
        assert b"503" in wire.ask(b"SUB in 1\r\nPUB $JS.API.INFO in 0\r\n\r\n")


# ---- a real client -----------------------------------------------------------------------------------


def test_nats_py_publishes_subscribes_requests_and_drains(both: Server) -> None:
    async def work() -> None:
        serving, asking = await nats.connect(both.url), await nats.connect(both.url)

        async def double(message: Any) -> None:
            await message.respond(message.data * 2)

        await serving.subscribe("double.*", queue="workers", cb=double)
        listening = await asking.subscribe("news.>")
        await serving.flush()
        await asking.flush()
        assert (await asking.request("double.x", b"ab", timeout=HANG_GUARD_S)).data == b"abab"
        assert (await asking.request("double.x", b"ab", timeout=HANG_GUARD_S, old_style=True)).data == b"abab"
        with pytest.raises(nats.errors.NoRespondersError):
            await asking.request("nobody", b"", timeout=HANG_GUARD_S)
        await serving.publish("news.today", b"body", headers={"Kind": "test"})
        message = await listening.next_msg(timeout=HANG_GUARD_S)
        assert (message.subject, message.data, message.headers) == ("news.today", b"body", {"Kind": "test"})
        await serving.drain()
        await asking.drain()

    asyncio.run(work())


def test_nats_py_survives_a_refused_subject(both: Server) -> None:
    async def work() -> None:
        client = await nats.connect(both.url)
        await client.publish("$mq9.AI.MAILBOX.DELETE.m.", b"")  # an empty last token
        await client.flush()
        await client.flush()
        assert client.is_connected
        await client.close()

    asyncio.run(work())


# ---- who may come in ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "welcome"),
    [
        (b'CONNECT {"verbose":false,"user":"ann","pass":"secret"}\r\n', True),
        (b'CONNECT {"verbose":false,"user":"ann","pass":"wrong"}\r\n', False),
        (b'CONNECT {"verbose":false,"user":"bob","pass":"secret"}\r\n', False),
        (b'CONNECT {"verbose":false,"auth_token":"secret"}\r\n', False),
        (b'CONNECT {"verbose":false}\r\n', False),
        (b"", False),
    ],
)
def test_user_and_password(kind: str, tmp_path: Path, sent: bytes, welcome: bool) -> None:
    with running(kind, tmp_path, Wanted(users={"ann": "secret"})) as server, Wire(server, b"") as wire:
        assert json.loads(wire.info[5:])["auth_required"] is True
        if welcome:
            assert wire.ask(sent) == b""
        else:
            assert wire.rest(sent + b"PING\r\n") == b"-ERR 'Authorization Violation'\r\n"


def test_a_token(kind: str, tmp_path: Path) -> None:
    async def come_in(server: Server, token: str) -> None:
        client = Client()
        try:
            await client.connect(f"nats://{token}@127.0.0.1:{server.port}", allow_reconnect=False)
        finally:
            await client.close()  # when it is refused, nats-py leaves its connection open

    with running(kind, tmp_path, Wanted(token=TOKEN)) as server:
        asyncio.run(come_in(server, TOKEN))
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
            asyncio.run(come_in(server, "rabbit"))


def test_a_client_without_a_valid_login_is_disconnected(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path, Wanted(token=TOKEN)) as server, Wire(server, b"") as wire:
        assert wire.rest() == b"-ERR 'Authentication Timeout'\r\n"


@pytest.mark.parametrize("first", [False, True])
def test_tls(kind: str, tmp_path: Path, first: bool) -> None:
    certificate = made_certificate(tmp_path)
    body = b"x" * 300_000

    async def work(server: Server) -> None:
        client = await nats.connect(
            f"tls://127.0.0.1:{server.port}", tls=trusting(certificate), tls_handshake_first=first
        )
        listening = await client.subscribe("over.tls")
        await client.publish("over.tls", body)
        assert (await listening.next_msg(timeout=HANG_GUARD_S)).data == body
        await client.drain()

    with running(kind, tmp_path, Wanted(certificate=certificate, tls_first=first)) as server:
        asyncio.run(work(server))
        asyncio.run(work(server))


def test_a_client_without_tls_gets_nothing_where_tls_is_required(kind: str, tmp_path: Path) -> None:
    wanted = Wanted(certificate=made_certificate(tmp_path), connections_max=2)
    with running(kind, tmp_path, wanted) as server:
        for _ in range(4):  # and does not use up the place of another client
            with Wire(server, b"") as wire:
                assert json.loads(wire.info[5:])["tls_required"] is True
                assert b"PONG" not in wire.rest(CONNECT + b"PING\r\n")


def test_clients_that_refuse_the_certificate_do_not_affect_others(kind: str, tmp_path: Path) -> None:
    wanted = Wanted(certificate=made_certificate(tmp_path), tls_first=True)
    with running(kind, tmp_path, wanted) as server:
        for _ in range(3):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as plain,
                pytest.raises(ssl.SSLCertVerificationError),
            ):
                ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as plain,
            trusting(wanted.certificate or tmp_path).wrap_socket(plain, server_hostname="localhost") as safe,
        ):
            assert safe.recv(5) == b"INFO "


# ---- limits ------------------------------------------------------------------------------------------


def test_info_announces_the_payload_limit(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path, Wanted(payload_bytes_max=100)) as server:
        with Wire(server) as wire:
            assert json.loads(wire.info[5:])["max_payload"] == 100
            assert wire.ask(b"PUB a 100\r\n%b\r\n" % (b"x" * 100)) == b""
            assert wire.rest(b"PUB a 101\r\n") == b"-ERR 'Maximum Payload Violation'\r\n"
        with Wire(server) as wire:
            assert wire.rest(b"HPUB a 12 101\r\n") == b"-ERR 'Maximum Payload Violation'\r\n"


def test_a_connection_above_the_limit_gets_an_error(kind: str, tmp_path: Path) -> None:
    wanted = Wanted(connections_max=2)
    with (
        running(kind, tmp_path, wanted) as server,
        Wire(server) as one,
        Wire(server, address="127.0.0.2") as two,  # ours gives the second place to another client
    ):
        one.ask()
        two.ask()
        with Wire(server, b"") as three:
            assert three.rest() == b"-ERR 'maximum connections exceeded'\r\n"
        assert one.ask() == two.ask() == b""


def test_connections_leave_files_for_everything_else(tmp_path: Path) -> None:
    allowed = 10
    wanted = Wanted(files_max=FILES_RESERVED + allowed)
    with running("ours", tmp_path, wanted) as server, ExitStack() as stack:
        addresses = [f"127.0.0.{1 + number % 2}" for number in range(3 * FILES_RESERVED)]
        wires = [stack.enter_context(Wire(server, b"", address=address)) for address in addresses]
        for wire in wires[:allowed]:
            assert wire.ask() == b""
        for wire in wires[allowed:]:  # each is closed after its error, and then needs no file
            assert wire.rest() == b"-ERR 'maximum connections exceeded'\r\n"


def test_subscription_above_the_limit_is_refused_without_disconnect(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path, Wanted(subscriptions_max=2)) as server, Wire(server) as wire:
        answer = wire.ask(b"SUB a 1\r\nSUB b 2\r\nSUB c 3\r\n")
        assert answer == b"-ERR 'maximum subscriptions exceeded'\r\n"
        assert wire.ask(b"PUB a 1\r\nx\r\nPUB c 1\r\nx\r\n") == b"MSG a 1 1\r\nx\r\n"


def test_a_client_that_does_not_read_is_cut_off_without_affecting_others(kind: str, tmp_path: Path) -> None:
    frame = b"PUB flood %d\r\n%b\r\n" % (len(FLOOD_BODY), FLOOD_BODY)
    wanted = Wanted(pending_bytes_max=1 << 20)
    with (
        running(kind, tmp_path, wanted) as server,
        Wire(server, receive_bytes=4096) as deaf,
        Wire(server) as well,
        Wire(server) as sender,
    ):
        deaf.ask(b"SUB flood 1\r\n")
        well.ask(b"SUB flood 1\r\nSUB small 2\r\n")
        for _ in range(FLOOD_ROUNDS):
            sender.ask(frame * 10)
            assert well.ask().count(FLOOD_BODY) == 10
        sender.ask(b"PUB small 1\r\nx\r\n")
        assert well.ask() == b"MSG small 2 1\r\nx\r\n"
        assert len(deaf.rest()) < FLOOD_ROUNDS * 10 * len(frame)


def test_a_dead_member_of_a_group_does_not_take_messages_with_it_for_long(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as server, Wire(server) as sender, Wire(server) as alive:
        alive.ask(b"SUB job g 1\r\n")
        with Wire(server) as dying:
            dying.ask(b"SUB job g 1\r\n")
            dying.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        while True:  # until the server has noticed
            sender.ask(b"PUB job 1\r\nx\r\n" * 8)
            if alive.ask().count(b"\r\nx\r\n") == 8:
                break


def test_silent_clients_are_pinged_and_dead_ones_disconnected(kind: str, tmp_path: Path) -> None:
    wanted = Wanted(ping_interval_s=0.1)
    with running(kind, tmp_path, wanted) as server, Wire(server) as dead, Wire(server) as alive:
        for _ in range(6):
            alive.until(b"PING\r\n")
            alive.send(b"PONG\r\n")
        answer = dead.rest()
        assert answer.count(b"PING\r\n") == 2
        assert answer.endswith(b"-ERR 'Stale Connection'\r\n")
        alive.send(b"SUB a 1\r\nPUB a 1\r\nx\r\n")
        assert alive.until(b"\r\nx\r\n").endswith(b"MSG a 1 1")


# ---- the end -----------------------------------------------------------------------------------------


def test_a_lame_duck_shutdown_notifies_every_client(tmp_path: Path) -> None:
    with running("ours", tmp_path) as server, Wire(server) as wire:
        wire.ask(b"SUB a 1\r\n")
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(wire.line()[5:])["ldm"] is True
        assert wire.ask(b"PUB a 1\r\nx\r\n") == b"MSG a 1 1\r\nx\r\n"  # it is served until the end
        assert wire.rest() == b""
        assert server.process.wait(HANG_GUARD_S) == 0
        with pytest.raises(OSError, match="refused"):
            Wire(server)


def test_nats_py_is_notified_of_a_lame_duck_shutdown(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        notified = asyncio.Event()

        async def take_note() -> None:
            notified.set()

        client = await nats.connect(server.url, lame_duck_mode_cb=take_note, allow_reconnect=False)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_GUARD_S):
            await notified.wait()
        await client.close()

    with running("ours", tmp_path) as server:
        asyncio.run(work(server))
        assert server.process.wait(HANG_GUARD_S) == 0


def test_the_timeouts_of_a_shutdown_add_up_to_less_than_two_seconds() -> None:
    assert LAME_DUCK_S + 2 * CLOSE_TIMEOUT_S < 2.0


def test_a_shutdown_does_not_wait_for_a_client_that_reads_nothing(tmp_path: Path) -> None:
    with running("ours", tmp_path) as server, Wire(server) as deaf:
        deaf.ask(b"SUB a 1\r\n")
        with Wire(server) as sender:
            sender.ask(b"PUB a %d\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20)) * 8)
        assert server.end() == 0
