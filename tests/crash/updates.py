"""Updates that are crashed or failed at each system call, and the rules that must hold afterwards.

An update is prepared in a new folder, done by a process that may die or get an error, and then checked by
another process that knows only the reports.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from postroom import Bus, Queue
from postroom.message import Durability, QueueMessage
from tests.crash.ledger import (
    Delivery,
    Tally,
    body_of,
    check_writers_in_order,
    compare,
    token_of,
    writer_of,
)

SIDE_FILE_BYTES = 300  # bodies above this go to side files in these updates
OLD = "old"  # the writer of the earlier messages
ATTEMPTS_MAX = 3

Expected = dict[str, list[str]]
"""Agent to the ids of its undelivered messages when the update begins, in order.

For updates that write, the tokens of the earlier messages are under an empty name.
"""


class Attempt(msgspec.Struct, frozen=True):
    """The report of one try."""

    number: int
    outcome: str
    """`ok`, `void` (failed, nothing was kept), `failed` (in doubt), `dead` (nothing was tried)."""
    words: list[str]


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of update."""

    name: str
    prepare: Callable[[Path], Expected]
    open: Callable[[Path, Durability], Any]
    act: Callable[[Any, int], list[str]]
    """Do the update. Returns the words to report. The number distinguishes the tries."""
    judge: Callable[[Path, Expected, list[Attempt], Tally], None]
    assist: Callable[[Path], None] | None = None
    """An operation that another process repeats meanwhile."""
    repeats: bool = True
    """Whether a second try after an error means the same as the first."""


def new_tokens(attempt: int, count: int = 1, size: int = 80) -> list[str]:
    return [token_of(f"new{attempt}", number, size) for number in range(count)]


# ---- Bus -------------------------------------------------------------------------------------------


def _open_bus(folder: Path, durability: Durability) -> Bus:
    return Bus(folder / "deep" / "bus.yaml", durability=durability)


def _open_rotating_bus(folder: Path, durability: Durability) -> Bus:
    return Bus(folder / "deep" / "bus.yaml", durability=durability, rotate_bytes=600)


def _append_tokens(bus: Bus, tokens: list[str]) -> list[str]:
    return bus.append_many(
        {"type": "t", "project_id": "p", "task_id": token, "body": body_of(token)} for token in tokens
    )


def _append_one(bus: Bus, attempt: int) -> list[str]:
    (token,) = new_tokens(attempt)
    return [token, bus.append(type="t", project_id="p", task_id=token, body=body_of(token))]


def _append_some(bus: Bus, attempt: int) -> list[str]:
    tokens = new_tokens(attempt, count=5, size=2_000)
    return _pairs(tokens, _append_tokens(bus, tokens))


def _rotate(bus: Bus, attempt: int) -> list[str]:
    bus.rotate()
    return []


def _pairs(tokens: Iterable[str], msg_ids: Iterable[str]) -> list[str]:
    return [word for pair in zip(tokens, msg_ids, strict=True) for word in pair]


def _prepare_nothing(folder: Path) -> Expected:
    return {}


def _prepare_bus(folder: Path) -> Expected:
    with _open_bus(folder, "os") as bus:
        _append_tokens(bus, [token_of(OLD, number, 150) for number in range(3)])
    return {"": [token_of(OLD, number, 150) for number in range(3)]}


def _judge_bus(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    bus = _open_bus(folder, "os")
    delivered = [Delivery(m.task_id, m.msg_id, m.body) for m in bus.read(archives=True)]
    _judge_written(expected.get("", []), delivered, attempts, tally)
    if [message.msg_id for message in bus.tail(1)] != [d.msg_id for d in delivered[-1:]] and bus.count():
        tally.breaks("tail and read do not agree")
    if bus.verify().unchecked:
        tally.breaks("there are messages that nobody wrote")
    after = token_of("after", 0, 50)
    _append_tokens(bus, [after])
    read_again = [message.task_id for message in bus.read(archives=True)]
    if read_again != [*(d.token for d in delivered), after]:
        tally.breaks("an append afterwards did not simply add its message")


def _judge_written(old: list[str], delivered: list[Delivery], attempts: list[Attempt], tally: Tally) -> None:
    """Acknowledged messages exist, refused ones do not, and all others are complete or absent."""
    acknowledged = dict.fromkeys(old, "") | _acknowledged(attempts)
    known = {token: msg_id for token, msg_id in acknowledged.items() if msg_id}
    compare(known, delivered, tally)
    tokens = [delivery.token for delivery in delivered]
    tally.acknowledged += len(acknowledged)
    tally.lost += len(set(old) - set(tokens))
    tally.count("unacknowledged_but_whole", -len(set(old) & set(tokens)))  # their ids are not known here
    check_writers_in_order(tokens, tally)
    for attempt in attempts:
        if attempt.outcome == "void" and f"new{attempt.number}" in map(writer_of, tokens):
            tally.breaks("an error said that nothing was kept, but it was")


def _acknowledged(attempts: list[Attempt]) -> dict[str, str]:
    return {
        token: msg_id
        for attempt in attempts
        if attempt.outcome == "ok"
        for token, msg_id in zip(attempt.words[::2], attempt.words[1::2], strict=True)
    }


# ---- Queue: sending --------------------------------------------------------------------------------


def _open_queue(folder: Path, durability: Durability) -> Queue:
    return Queue(folder / "queue", SIDE_FILE_BYTES, durability=durability)


def _send_tokens(queue: Queue, tokens: list[str], topic: str = "status", **options: Any) -> list[str]:
    return [queue.send(topic, f"{token}\n{body_of(token)}", **options) for token in tokens]


def _prepare_queue(folder: Path) -> Expected:
    old = [token_of(OLD, number, (50, 400)[number % 2]) for number in range(4)]
    with _open_queue(folder, "os") as queue:
        _send_tokens(queue, old)
    return {"": old}


def _send_inline(queue: Queue, attempt: int) -> list[str]:
    tokens = new_tokens(attempt)
    return _pairs(tokens, _send_tokens(queue, tokens))


def _send_with_side_file(queue: Queue, attempt: int) -> list[str]:
    tokens = new_tokens(attempt, size=9_000)
    return _pairs(tokens, _send_tokens(queue, tokens))


def _judge_sent(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    with _open_queue(folder, "os") as queue:
        delivered = [_delivery(message, tally) for message in queue.poll("fresh")]
        _judge_written(expected.get("", []), delivered, attempts, tally)
        _judge_going_on(queue, ["fresh"], tally)


def _delivery(message: QueueMessage, tally: Tally) -> Delivery:
    if "_body_error" in message:
        tally.breaks(f"{message['msg_id']}: {message['_body_error']}")
    token, _, body = message["body"].partition("\n")
    return Delivery(token, message["msg_id"], body)


def _judge_going_on(queue: Queue, agents: list[str], tally: Tally) -> None:
    """Every agent that has read everything gets exactly the next message."""
    after = _send_tokens(queue, [token_of("after", 0, 50)])
    for agent in agents:
        if _polled(queue, agent, tally) != after:
            tally.breaks(f"{agent} was not given exactly the message that was sent afterwards")
    report = queue.check()
    if report.cursors or report.bodies:
        tally.breaks(f"the check found {report.cursors or report.bodies}")


def _polled(queue: Queue, agent: str, tally: Tally) -> list[str]:
    """The ids of all unread messages of an agent; their bodies must be complete by now."""
    found = queue.poll(agent)
    for message in found:
        token, _, body = message["body"].partition("\n")
        if "_body_error" in message or body != body_of(token):
            tally.torn += 1
    return _ids(found)


def _ids(messages: list[QueueMessage]) -> list[str]:
    return [message["msg_id"] for message in messages]


# ---- Queue: polling --------------------------------------------------------------------------------

READER = "reader"


def _prepare_unread(folder: Path) -> Expected:
    """Some messages are read, six are not: two for each of three topics."""
    with _open_queue(folder, "os") as queue:
        _send_tokens(queue, [token_of("read", 0, 10)])
        queue.poll(READER)
        queue.poll(READER, "ask", keep_filtered=True)
        unread: list[str] = []
        for number in range(6):
            token = token_of(OLD, number, (50, 400)[number % 2])
            unread += _send_tokens(queue, [token], ("ask", "status", "broadcast")[number % 3])
    return {READER: unread, "ask": unread[::3]}


def _poll_all(queue: Queue, attempt: int) -> list[str]:
    return _ids(queue.poll(READER))


def _poll_asks(queue: Queue, attempt: int) -> list[str]:
    return _ids(queue.poll(READER, "ask", keep_filtered=True))


def _judge_polled(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    _judge_handed_over(folder, expected[READER], [], attempts, tally)


def _judge_polled_asks(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    others = [msg_id for msg_id in expected[READER] if msg_id not in expected["ask"]]
    _judge_handed_over(folder, expected["ask"], others, attempts, tally)


def _judge_handed_over(
    folder: Path, wanted: list[str], others: list[str], attempts: list[Attempt], tally: Tally
) -> None:
    """Nothing is delivered twice; missing messages were cut off together; all others are still unread."""
    with _open_queue(folder, "os") as queue:
        rest = _polled(queue, READER, tally)
        given = [word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words]
        tally.acknowledged += len(wanted) + len(others)
        tally.doubled += len(given + rest) - len(set(given + rest))
        tally.lost += len(set(others) - set(rest))
        missing = set(wanted) - set(given + rest)
        if missing and (given or not _in_doubt(attempts)):
            tally.lost += len(missing)  # the process reported, or the error promised it
        elif missing and missing != set(wanted):
            tally.breaks("a hand-over was cut off in its middle")
        tally.count("cut_off_by_the_crash", bool(missing))
        _judge_going_on(queue, [READER], tally)


def _in_doubt(attempts: list[Attempt]) -> bool:
    """Whether the process died, or got an error after which the state of the cursor is unknown."""
    return not any(attempt.outcome == "ok" for attempt in attempts) or any(
        attempt.outcome == "failed" for attempt in attempts
    )


# ---- Queue: expire ---------------------------------------------------------------------------------


def _prepare_expired(folder: Path) -> Expected:
    """Expired lines between live ones, and four agents at different positions."""
    with _open_queue(folder, "os") as queue:
        early = _send_mixed(queue, 0)
        queue.poll("middle")
        queue.poll("picky", "ask", keep_filtered=True)
        answer = _answered(queue, "asker")
        late = _send_mixed(queue, 6)
        queue.poll("end")
    lasting = [*early, answer, *late]
    asks = early[::3]
    return {
        "start": lasting,
        "middle": [answer, *late],
        "picky": [msg_id for msg_id in lasting if msg_id not in asks],
        "asker": [*early, *late],
        "end": [],
    }


def _send_mixed(queue: Queue, first: int) -> list[str]:
    msg_ids: list[str] = []
    for number in range(first, first + 6):
        gone = token_of("gone", number, (20, 500)[number % 2])
        _send_tokens(queue, [gone], ttl_s=0)
        lasting = token_of(OLD, number, (40, 450)[number % 2])
        msg_ids += _send_tokens(queue, [lasting], ("ask", "status", "broadcast")[number % 3])
    return msg_ids


def _answered(queue: Queue, agent: str) -> str:
    """Let `agent` ask and get its answer before its other messages."""

    def answer() -> None:
        with Queue(queue.root) as other:
            for question in other.poll("oracle", "ask", wait_s=10, keep_filtered=True):
                if question["to"] == "oracle":
                    _send_tokens(other, [token_of("answer", 0, 60)], "answer", reply_to=question["msg_id"])

    queue.poll("oracle")
    thread = threading.Thread(target=answer)
    thread.start()
    found = queue.ask("question", "oracle", sender=agent, timeout_s=10)
    thread.join()
    if found is None:
        raise AssertionError("nobody answered")
    return found["msg_id"]


def _expire(queue: Queue, attempt: int) -> list[str]:
    return [str(queue.expire())]


def _judge_expired(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    with _open_queue(folder, "os") as queue:
        for agent, msg_ids in expected.items():
            given = _polled(queue, agent, tally)
            tally.acknowledged += len(msg_ids)
            tally.lost += len(set(msg_ids) - set(given))
            tally.doubled += len(given) - len(set(msg_ids) & set(given))
            if given != msg_ids and sorted(given) == sorted(msg_ids):
                tally.breaks(f"{agent} was given messages out of order")
        queue.expire()
        if queue.status()["default"]["expired"]:
            tally.breaks("expired messages are left after expire()")
        if unused := queue.check().unused_bodies:
            tally.breaks(f"side files are left of expired messages: {', '.join(unused)}")
        _judge_going_on(queue, list(expected), tally)


# ---- Queue: asking ---------------------------------------------------------------------------------


def _prepare_ask(folder: Path) -> Expected:
    with _open_queue(folder, "os") as queue:
        old = _send_tokens(queue, [token_of(OLD, number, 50) for number in range(3)], "answer")
    return {"asker": old}


def _ask(queue: Queue, attempt: int) -> list[str]:
    answer = queue.ask("question", "oracle", sender="asker", timeout_s=10)
    return [] if answer is None else [answer["msg_id"]]


def _answer_new(folder: Path) -> None:
    """Answer every question that has no answer yet."""
    with _open_queue(folder, "os") as queue:
        last = queue.tail(10)
        answered = {message["in_reply_to"] for message in last}
        for question in last:
            if question["topic"] == "ask" and question["msg_id"] not in answered:
                answer = token_of("answer", 0, 60)
                _send_tokens(queue, [answer], "answer", to="asker", reply_to=question["msg_id"])


def _judge_asked(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    """The answer at most once, and all other messages of the asking agent exactly once."""
    with _open_queue(folder, "os") as queue:
        rest = _polled(queue, "asker", tally)
        given = [word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words]
        tally.acknowledged += len(expected["asker"])
        tally.doubled += len(given + rest) - len(set(given + rest))
        tally.lost += len(set(expected["asker"]) - set(rest))
        _judge_going_on(queue, ["asker"], tally)


# ---- Queue: repair ---------------------------------------------------------------------------------


def _prepare_damaged(folder: Path) -> Expected:
    with _open_queue(folder, "os") as queue:
        _send_tokens(queue, [token_of("read", number, 50) for number in range(3)])
        queue.poll(READER)
    (folder / "queue/sessions/default/cursors" / f"{READER}.cursor").write_bytes(b"not an offset\n")
    return {READER: []}


def _repair(queue: Queue, attempt: int) -> list[str]:
    return [str(queue.repair_cursor(READER, "end"))]


def _judge_repaired(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    """An interrupted repair leaves the cursor damaged or repaired, and never at the start."""
    with _open_queue(folder, "os") as queue:
        if READER in queue.check().cursors:
            queue.repair_cursor(READER, "end")
        tally.doubled += len(_polled(queue, READER, tally))
        _judge_going_on(queue, [READER], tally)


def _update(name: str, *parts: Any, assist: Callable[[Path], None] | None = None) -> Update:
    prepare, opened, act, judge = parts
    return Update(name=name, prepare=prepare, open=opened, act=act, judge=judge, assist=assist)


BUS_UPDATES = [
    _update("bus-append", _prepare_bus, _open_bus, _append_one, _judge_bus),
    _update("bus-append-first", _prepare_nothing, _open_bus, _append_one, _judge_bus),
    _update("bus-append-many", _prepare_bus, _open_bus, _append_some, _judge_bus),
    _update("bus-append-rotating", _prepare_bus, _open_rotating_bus, _append_some, _judge_bus),
    _update("bus-rotate", _prepare_bus, _open_bus, _rotate, _judge_bus),
]
QUEUE_UPDATES = [
    _update("queue-send", _prepare_queue, _open_queue, _send_inline, _judge_sent),
    _update("queue-send-first", _prepare_nothing, _open_queue, _send_inline, _judge_sent),
    _update("queue-send-side-file", _prepare_queue, _open_queue, _send_with_side_file, _judge_sent),
    _update("queue-poll", _prepare_unread, _open_queue, _poll_all, _judge_polled),
    _update("queue-poll-keep-filtered", _prepare_unread, _open_queue, _poll_asks, _judge_polled_asks),
    _update("queue-expire", _prepare_expired, _open_queue, _expire, _judge_expired),
    _update("queue-ask", _prepare_ask, _open_queue, _ask, _judge_asked, assist=_answer_new),
    _update("queue-repair-cursor", _prepare_damaged, _open_queue, _repair, _judge_repaired),
]
