"""Every bench of the mail server runs, at a size that measures nothing, and yields whole figures."""

import json
import select
import socket

import bench_mail
import pytest
from mailbench import mail, plain, servers
from mailbench.sizes import SMALL

from tests.waiting import HANG_GUARD_S


@pytest.mark.parametrize("bench", bench_mail.BENCHES, ids=lambda bench: bench.__name__)
def test_a_bench_yields_figures_with_a_value_and_a_verdict(bench: bench_mail.Bench) -> None:
    found = [json.loads(figure.as_json()) for figure in bench(SMALL)]
    assert found
    for figure in found:
        assert figure["value"] > 0
        assert (figure["ratio"] is None) == (figure["against"] is None)
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)


# ---- a reference server that asks whether its clients are still there --------------------------------

OFTEN = 'ping_interval: "50ms"'
PINGS = 4  # two unanswered pings end a connection


def await_ping(connection: socket.socket) -> None:
    assert select.select([connection], [], [], HANG_GUARD_S)[0]
    assert connection.recv(1, socket.MSG_PEEK) == b"P"


def test_byte_counting_subscriber_answers_pings_without_counting_them() -> None:
    with (
        servers.nats_server(OFTEN) as server,
        servers.connected(server, b"SUB a 1\r\n") as subscriber,
        servers.connected(server) as publisher,
    ):
        frame = b"MSG a 1 2\r\nxy\r\n"
        for _ in range(PINGS):
            await_ping(subscriber)
            publisher.sendall(b"PUB a 2\r\nxy\r\nPING\r\n")
            servers.read_until(publisher, b"PONG\r\n")
            servers.receive_bytes([subscriber], len(frame))


def test_idle_connections_answer_pings() -> None:
    with servers.nats_server(OFTEN) as server, servers.connected(server) as idle:
        for _ in range(PINGS):
            await_ping(idle)
            servers.answer_idle([idle])
        assert plain._idle_mb(server, 3) > 0


def test_a_counter_of_messages_answers_pings() -> None:
    with (
        servers.nats_server(OFTEN) as server,
        servers.connected(server, b"SUB a 1\r\n") as subscriber,
        servers.connected(server) as publisher,
    ):
        counter = mail.Counter(subscriber, b"MSG a ")
        for count in range(PINGS):
            await_ping(subscriber)
            publisher.sendall(b"PUB a 2\r\nxy\r\nPING\r\n")
            servers.read_until(publisher, b"PONG\r\n")
            counter.until(count + 1)
