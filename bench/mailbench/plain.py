"""The plain NATS server: publish and subscribe, request and reply, idle connections."""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import figures
import nats
from figures import Comparison, Figure, Goal, compare, percentile, readable

from mailbench.servers import (
    HOST,
    LOOK_S,
    PATIENCE_S,
    RECEIVE_BYTES,
    Server,
    answer_idle,
    connected,
    forking,
    in_process,
    nats_server,
    our_server,
    read_until,
    receive_bytes,
    result_of,
)
from mailbench.sizes import Sizes

SUBJECT = b"bench.mail"
BODY_BYTES = 128
PIECE_FRAMES = 400  # about 64 KiB
MIXED_SIZES = range(64, 192)
US_PER_S = 1e6
IDLE_LOOK = 50  # connections between two checks for PINGs on the earlier ones


def published_from(server: Server, piece: bytes, rounds: int) -> float:
    """Publish the piece repeatedly; returns the time of the first byte once the server has taken the last."""
    publisher = connected(server)
    begun = time.perf_counter()
    for _ in range(rounds):
        publisher.sendall(piece)
    publisher.sendall(b"PING\r\n")
    read_until(publisher, b"PONG\r\n")
    return begun


def delivered_per_s(server: Server, bodies: list[bytes], count: int, sids: list[bytes]) -> float:
    """Deliveries a second, from the first byte published to the last byte received."""
    receivers = [connected(server, b"SUB %b %b\r\n" % (SUBJECT, sid)) for sid in sids]
    piece = b"".join(b"PUB %b %d\r\n%b\r\n" % (SUBJECT, len(body), body) for body in bodies)
    expected = sum(len(b"MSG %b 1 %d\r\n%b\r\n" % (SUBJECT, len(body), body)) for body in bodies)
    rounds = max(1, count // len(bodies))
    publisher = in_process(lambda: published_from(server, piece, rounds))
    receive_bytes(receivers, rounds * expected)
    ended = time.perf_counter()
    for receiver in receivers:
        receiver.close()
    return rounds * len(bodies) * len(sids) / (ended - float(result_of(*publisher)))


SAME = [os.urandom(BODY_BYTES // 2).hex().encode()] * PIECE_FRAMES
MIXED = [os.urandom(size // 2).hex().encode() for size in MIXED_SIZES] * (PIECE_FRAMES // len(MIXED_SIZES))


ONE = [b"1"]
TEN = ONE * 10
TEN_DIFFERENT = [b"%d" % sid for sid in range(10)]  # so that all ten get different bytes


def one_to_one(sizes: Sizes) -> Iterator[Figure]:
    with our_server() as ours, nats_server() as theirs:

        def speed(bodies: list[bytes], sids: list[bytes], count: int) -> Comparison:
            return compare(
                lambda: delivered_per_s(ours, bodies, count, sids),
                lambda: delivered_per_s(theirs, bodies, count, sids),
            )

        one, ten = Goal("ratio", ">=", 0.4), Goal("ratio", ">=", 1.0)
        yield beside("1 to 1, 128 B", speed(SAME, ONE, sizes.messages), "messages/s", one)
        yield beside(
            "1 to 1, 64 to 191 B, no two alike", speed(MIXED, ONE, sizes.messages), "messages/s", one
        )
        yield beside("1 to 10, 128 B", speed(SAME, TEN, sizes.fan_out_messages), "deliveries/s", ten)
        speeds = speed(SAME, TEN_DIFFERENT, sizes.fan_out_messages)
        yield beside("1 to 10, 128 B, different sids", speeds, "deliveries/s", ten)


def beside(name: str, speed: Comparison, unit: str, *goals: Goal) -> Figure:
    return Figure(name, speed.ours, unit, f"nats-server: {readable(speed.theirs)} {unit}", speed.ratio, goals)


# ---- request and reply -----------------------------------------------------------------------------


def replying(server: Server, ready: Any, done: Any) -> None:
    """Answer each request with its own body until stopped."""
    connection = connected(server, b"SUB bench.service 1\r\n")
    ready.set()
    connection.settimeout(LOOK_S * 10)
    held = b""
    while not done.is_set():
        try:
            held += connection.recv(RECEIVE_BYTES)
        except TimeoutError:
            continue
        if b"PING\r\n" in held:
            connection.sendall(b"PONG\r\n")
            held = held.replace(b"PING\r\n", b"")
        line, _, body = held.partition(b"\r\n")
        if len(body) == BODY_BYTES + 2:  # one request at a time
            connection.sendall(b"PUB %b %d\r\n%b" % (line.split()[3], BODY_BYTES, body))
            held = b""


@contextlib.contextmanager
def responder(server: Server, work: Callable[[Server, Any, Any], None]) -> Iterator[None]:
    ready, done = forking.Event(), forking.Event()
    child = forking.Process(target=work, args=(server, ready, done), daemon=True)
    child.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield
    finally:
        done.set()
        child.join(PATIENCE_S)


def request_us(server: Server, count: int) -> float:
    """The median time of a request, with bare sockets."""
    connection = connected(server, b"SUB _INBOX.bench.* 1\r\n")
    body = b"x" * BODY_BYTES
    took = []
    for number in range(count):
        request = b"PUB bench.service _INBOX.bench.%d %d\r\n%b\r\n" % (number, BODY_BYTES, body)
        begun = time.perf_counter()
        connection.sendall(request)
        read_until(connection, body + b"\r\n")
        took.append(time.perf_counter() - begun)
    connection.close()
    return percentile(took, 0.5) * US_PER_S


def requests(sizes: Sizes) -> Iterator[Figure]:
    with our_server() as ours, nats_server() as theirs:
        with responder(ours, replying), responder(theirs, replying):
            speed = compare(
                lambda: request_us(ours, sizes.requests), lambda: request_us(theirs, sizes.requests)
            )
        yield beside("request and reply p50, sockets", speed, "us", Goal("ratio", "<=", 1.3))
        with responder(ours, client_replying), responder(theirs, client_replying):
            speed = compare(
                lambda: _client_us(ours, sizes.client_requests),
                lambda: _client_us(theirs, sizes.client_requests),
            )
        yield beside("request and reply p50, nats-py", speed, "us", Goal("ratio", "<=", 1.3))


def _client_us(server: Server, count: int) -> float:
    return float(result_of(*in_process(lambda: asyncio.run(client_request_us(server, count)))))


# ---- nats-py ---------------------------------------------------------------------------------------


def client_replying(server: Server, ready: Any, done: Any) -> None:
    async def work() -> None:
        client = await nats.connect(f"nats://{HOST}:{server.port}")

        async def answer(message: Any) -> None:
            await message.respond(message.data)

        await client.subscribe("bench.client", cb=answer)
        await client.flush()
        ready.set()
        while not done.is_set():  # noqa: ASYNC110 - the event belongs to another process
            await asyncio.sleep(LOOK_S)
        await client.close()

    asyncio.run(work())


async def client_request_us(server: Server, count: int) -> float:
    client = await nats.connect(f"nats://{HOST}:{server.port}")
    body = b"x" * BODY_BYTES
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        await client.request("bench.client", body, timeout=PATIENCE_S)
        took.append(time.perf_counter() - begun)
    await client.close()
    return percentile(took, 0.5) * US_PER_S


async def client_publish(server: Server, count: int) -> float:
    client = await nats.connect(f"nats://{HOST}:{server.port}", pending_size=16 << 20)
    body = b"x" * BODY_BYTES
    begun = time.perf_counter()
    for _ in range(count):
        await client.publish("bench.py", body)
    await client.flush()
    await client.flush()  # the PING of the first flush is sent before the published messages
    await client.close()
    return begun


async def client_receive(server: Server, count: int, ready: Any) -> float:
    client = await nats.connect(f"nats://{HOST}:{server.port}")
    finished = asyncio.Event()
    left = count

    async def take(_message: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set()

    await client.subscribe("bench.py", cb=take)
    await client.flush()
    ready.set()
    async with asyncio.timeout(PATIENCE_S):
        await finished.wait()
    ended = time.perf_counter()
    await client.close()
    return ended


def client_per_s(server: Server, count: int) -> float:
    ready = forking.Event()
    receiver = in_process(lambda: asyncio.run(client_receive(server, count, ready)))
    assert ready.wait(PATIENCE_S)
    publisher = in_process(lambda: asyncio.run(client_publish(server, count)))
    return count / (float(result_of(*receiver)) - float(result_of(*publisher)))


def clients(sizes: Sizes) -> Iterator[Figure]:
    with our_server() as ours, nats_server() as theirs:
        speed = compare(
            lambda: client_per_s(ours, sizes.client_messages),
            lambda: client_per_s(theirs, sizes.client_messages),
        )
    yield beside("1 to 1, 128 B, nats-py", speed, "messages/s")


# ---- idle connections ------------------------------------------------------------------------------


def idle(sizes: Sizes) -> Iterator[Figure]:
    with our_server() as ours, nats_server() as theirs:
        mine, other = _idle_mb(ours, sizes.connections), _idle_mb(theirs, sizes.connections)
    yield Figure(
        f"memory with {sizes.connections:,} idle connections",
        mine,
        "MB",
        f"nats-server: {readable(other)} MB",
        mine / other,
        [Goal("value", "<", 100)],
    )


def _idle_mb(server: Server, connections: int) -> float:
    opened = []
    for number in range(connections):
        opened.append(connected(server, b"SUB idle.%d 1\r\n" % number))
        if number % IDLE_LOOK == 0:
            answer_idle(opened)
    answer_idle(opened)
    resident = statistics.median(server.resident_mb() for _ in range(figures.REPEATS))
    for connection in opened:
        connection.close()
    return resident
