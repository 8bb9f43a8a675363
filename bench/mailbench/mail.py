"""Mailboxes: store-first delivery, durable sends, replays, and the cost of many mailboxes."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from figures import Comparison, Figure, Goal, compare, median_of, readable

from mailbench.plain import BODY_BYTES, ONE, PIECE_FRAMES, SAME, delivered_per_s, published_from
from mailbench.servers import (
    PATIENCE_S,
    RECEIVE_BYTES,
    Server,
    answered,
    connected,
    in_process,
    mail_server,
    nats_server,
    read_until,
    result_of,
)
from mailbench.sizes import Sizes

CREATE = b"$mq9.AI.MAILBOX.CREATE"
SEND = b"$mq9.AI.MAILBOX.MSG."
BODY = SAME[0]
WINDOW = 4_000  # sends in flight
MSG_ID = b"Mq9-Msg-Id: "
STREAM = b"bench.stream"
JETSTREAM = 'jetstream { store_dir: "%", sync_interval: always }'
PAUSE_MS_MAX = 50
MS_PER_S = 1e3
CLASSES = {"memory": b"", "os": b"", "fsync": b".critical"}


def asked(server: Server, subject: bytes, payload: bytes) -> dict[str, object]:
    """A request on its own connection."""
    connection = connected(server, b"SUB _INBOX.a 1\r\n")
    connection.sendall(b"PUB %b _INBOX.a %d\r\n%b\r\n" % (subject, len(payload), payload))
    answer = read_until(connection, b"}\r\n")
    connection.close()
    found: dict[str, object] = json.loads(answer.split(b"\r\n", 1)[1])
    assert not found.get("error"), found
    return found


def created(server: Server) -> bytes:
    """A new mailbox, as a subject to send to."""
    return SEND + str(asked(server, CREATE, b"{}")["mail_id"]).encode()


# ---- stored first ----------------------------------------------------------------------------------


def stored_per_s(server: Server, suffix: bytes, count: int) -> float:
    """Deliveries a second of messages that are stored before they are pushed."""
    subject = created(server) + suffix
    receiver = connected(server, b"SUB %b 1\r\n" % subject)
    piece = b"PUB %b %d\r\n%b\r\n" % (subject, BODY_BYTES, BODY) * PIECE_FRAMES
    rounds = max(1, count // PIECE_FRAMES)
    publisher = in_process(lambda: published_from(server, piece, rounds))
    Counter(receiver, MSG_ID).until(rounds * PIECE_FRAMES)
    ended = time.perf_counter()
    receiver.close()
    return rounds * PIECE_FRAMES / (ended - float(result_of(*publisher)))


class Counter:
    """Counts the messages of a connection by a mark that each message contains once."""

    def __init__(self, connection: socket.socket, mark: bytes) -> None:
        self._connection = connection
        self._mark = mark
        self._held = b""
        self.count = 0

    def receive(self) -> None:
        more = self._connection.recv(RECEIVE_BYTES)
        assert more, "the server hung up"
        data = answered(self._connection, self._held + more)
        self.count += data.count(self._mark)
        # The rest may contain the beginning of the next mark, but no whole mark.
        self._held = data[1 - len(self._mark) :]

    def until(self, count: int) -> None:
        while self.count < count:
            self.receive()


def stored(sizes: Sizes) -> Iterator[Figure]:
    for normal, suffix in CLASSES.items():
        kind = normal if normal != "fsync" else "memory"
        goals = [Goal("ratio", ">=", 0.25)] if normal == "os" else []
        with mail_server(kind) as ours, nats_server() as theirs:
            speed = compare(
                lambda: stored_per_s(ours, suffix, sizes.stored),  # noqa: B023 - called at once
                lambda: delivered_per_s(theirs, SAME, sizes.stored, ONE),
            )
        name = f"stored first ({normal}), 1 to 1, 128 B"
        against = f"nats-server, not stored: {readable(speed.theirs)} messages/s"
        yield Figure(name, speed.ours, "messages/s", against, speed.ratio, goals)


# ---- durable ---------------------------------------------------------------------------------------


def acknowledged_per_s(server: Server, subject: bytes, count: int) -> float:
    """Answered sends a second, with a window of them in flight."""
    connection = connected(server, b"SUB _INBOX.b.* 1\r\n")
    frame = b"PUB %b _INBOX.b.1 %d\r\n%b\r\n" % (subject, BODY_BYTES, BODY)
    begun = time.perf_counter()
    answers = Counter(connection, b"MSG _INBOX.b.1 ")
    sent = 0
    while answers.count < count:
        due = min(count, answers.count + WINDOW) - sent
        if due >= WINDOW // 4 or 0 < due == count - sent:
            connection.sendall(frame * due)
            sent += due
        answers.receive()
    ended = time.perf_counter()
    connection.close()
    return count / (ended - begun)


def durable(sizes: Sizes) -> Iterator[Figure]:
    stream = {"name": "BENCH", "subjects": [STREAM.decode()], "storage": "file"}
    with mail_server() as ours, nats_server(JETSTREAM) as theirs:
        asked(theirs, b"$JS.API.STREAM.CREATE.BENCH", json.dumps(stream).encode())
        subject = created(ours) + b".critical"
        speed = compare(
            lambda: acknowledged_per_s(ours, subject, sizes.durable),
            lambda: acknowledged_per_s(theirs, STREAM, sizes.durable),
        )
    against = f"JetStream, sync always: {readable(speed.theirs)} messages/s"
    goal = Goal("ratio", ">=", 2.0)
    yield Figure("durable sends (fsync), pipelined", speed.ours, "messages/s", against, speed.ratio, [goal])


# ---- replay ----------------------------------------------------------------------------------------


def send_all(server: Server, subject: bytes, count: int) -> float:
    """Publish, and wait until the server has processed everything; returns messages a second."""
    connection = connected(server)
    frame = b"PUB %b %d\r\n%b\r\n" % (subject, BODY_BYTES, BODY)
    begun = time.perf_counter()
    for first in range(0, count, PIECE_FRAMES):
        connection.sendall(frame * min(PIECE_FRAMES, count - first))
    connection.sendall(b"PING\r\n")
    read_until(connection, b"PONG\r\n")
    ended = time.perf_counter()
    connection.close()
    return count / (ended - begun)


def replayed_per_s(server: Server, subject: bytes, count: int) -> float:
    receiver = connected(server)
    begun = time.perf_counter()
    receiver.sendall(b"SUB %b 1\r\n" % subject)
    Counter(receiver, MSG_ID).until(count)
    ended = time.perf_counter()
    receiver.close()
    return count / (ended - begun)


def replay(sizes: Sizes) -> Iterator[Figure]:
    with mail_server() as server:
        subject = created(server)
        send_all(server, subject, sizes.replayed)
        speed = median_of(lambda: replayed_per_s(server, subject, sizes.replayed))
    goals = [Goal("value", ">=", 150_000)]
    yield Figure(f"replay of {sizes.replayed:,} messages", speed, "messages/s", goals=goals)


# ---- many mailboxes --------------------------------------------------------------------------------


def longest_pause_ms(server: Server, until_s: Callable[[], float]) -> float:
    """Send PINGs one after the other; returns the longest time to an answer."""
    connection = connected(server)
    longest = 0.0
    while (begun := time.monotonic()) < until_s():
        connection.sendall(b"PING\r\n")
        read_until(connection, b"PONG\r\n")
        longest = max(longest, time.monotonic() - begun)
        time.sleep(0.001)
    connection.close()
    return longest * MS_PER_S


def create_many(server: Server, count: int, ttl_s: float) -> float:
    """Mailboxes a second, with a window of requests in flight."""
    connection = connected(server, b"SUB _INBOX.c 1\r\n")
    body = json.dumps({"ttl": ttl_s}).encode()
    frame = b"PUB %b _INBOX.c %d\r\n%b\r\n" % (CREATE, len(body), body)
    begun = time.perf_counter()
    for first in range(0, count, PIECE_FRAMES):
        number = min(PIECE_FRAMES, count - first)
        connection.sendall(frame * number)
        held = b""
        while held.count(b"is_new") < number or not held.endswith(b"\r\n"):
            held = answered(connection, held + connection.recv(RECEIVE_BYTES))
    ended = time.perf_counter()
    connection.close()
    return count / (ended - begun)


def pause_ms(server: Server, count: int, ttl_s: float) -> float:
    """The longest pause from the first created mailbox to the last expired one."""
    creating = in_process(lambda: (create_many(server, count, ttl_s), time.monotonic())[1])
    ended: list[float] = []

    def until_s() -> float:
        if not ended and creating[1].poll():
            ended.append(float(result_of(*creating)))
        return ended[0] + 1.5 * ttl_s if ended else time.monotonic() + PATIENCE_S

    return longest_pause_ms(server, until_s)


def idle_pause_ms(server: Server, ttl_s: float) -> float:
    """The longest pause of an idle server, which is that of the machine."""
    end_s = time.monotonic() + 2 * ttl_s
    return longest_pause_ms(server, lambda: end_s)


def mailboxes(sizes: Sizes) -> Iterator[Figure]:
    count, ttl_s = sizes.mailboxes, sizes.mailbox_ttl_s
    with mail_server() as ours, nats_server() as theirs:
        rate = median_of(lambda: create_many(ours, count, ttl_s))
        yield Figure("mailboxes created, pipelined", rate, "mailboxes/s")
        pauses = compare(lambda: pause_ms(ours, count, ttl_s), lambda: idle_pause_ms(theirs, ttl_s))
    yield Figure(
        f"longest pause, {sizes.mailboxes:,} mailboxes made and ended",
        pauses.ours,
        "ms",
        f"nats-server that does nothing: {readable(pauses.theirs)} ms",
        pauses.ratio,
        [Goal("value", "<=", PAUSE_MS_MAX)],
    )


def crowd(sizes: Sizes) -> Iterator[Figure]:
    """The cost of a send beside many unrelated mailboxes and messages."""
    with ExitStack() as stack:
        empty, full, stuffed = (stack.enter_context(mail_server()) for _ in range(3))
        create_many(full, sizes.crowd_mailboxes, 0)
        crowded = created(stuffed)
        send_all(stuffed, crowded, sizes.crowd_messages)
        beside = f"{sizes.crowd_mailboxes:,} mailboxes"
        yield _as_fast(f"sends beside {beside}", full, created(full), empty, sizes)
        beside = f"{sizes.crowd_messages:,} messages in the mailbox"
        yield _as_fast(f"sends, {beside}", stuffed, crowded, empty, sizes)


def _as_fast(name: str, server: Server, subject: bytes, empty: Server, sizes: Sizes) -> Figure:
    speed: Comparison = compare(
        lambda: send_all(server, subject, sizes.sends), lambda: send_all(empty, created(empty), sizes.sends)
    )
    against = f"in an empty server: {readable(speed.theirs)} messages/s"
    return Figure(name, speed.ours, "messages/s", against, speed.ratio, [Goal("ratio", ">=", 0.8)])
