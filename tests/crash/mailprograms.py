"""The programs of the mail scenarios: a server that gets killed, and its clients, over real sockets.

The server writes its port into a file. A client that loses its connection reads the next port there and
continues with new messages. Its unanswered messages may or may not be stored.
"""

import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from postroom.contracts.mail.options import MailLimits, MailOptions, Storage
from postroom.core.mail import mailbox, subscribers
from postroom.core.mail.mailbox import RANKS
from postroom.core.nats import natswire
from postroom.logs import mail_log, mail_records
from postroom.server.nats import mail_server
from postroom.server.nats.options import NatsLimits, ServerOptions
from tests.crash.ledger import body_of, token_of
from tests.crash.workers import STUCK_S, Report

HOST = "127.0.0.1"
MSG = "$mq9.AI.MAILBOX.MSG."
CREATE = "$mq9.AI.MAILBOX.CREATE"
DELETE = "$mq9.AI.MAILBOX.DELETE."
FETCH = "$mq9.AI.MSG.FETCH."
ACK = "$mq9.AI.MSG.ACK."

SEGMENT_BYTES_FEW = 20_000  # so that crashes hit the change from one segment to the next,
COMPACT_FROM_BYTES_FEW = 60_000  # and compaction
COMPACT_FACTOR_FEW = 1
COPY_STEP_FEW = 20
TICK_S_FEW = 0.01
LOOK_S = 0.001
INFO_S = 60.0  # half of what counts as stuck
REPORT_BYTES_MAX = 4096  # bytes that a pipe accepts in one piece
RECEIVE_BYTES = 1 << 16
WORDS = ("critical", "urgent", "high", "normal", "low")
DURABLE = frozenset(["critical", "urgent", "high"])
TEAM = "workers"
PULLERS = "pullers"
DELETED_SHARE = 0.7
LEAVES_SHARE = 0.03
TTLS_S = (0, 3600, 0.4)


# ---- the server ------------------------------------------------------------------------------------


def server(report: Report, *, folder: str, sabotage: str = "", storage: Storage = "group") -> None:
    """Serve until killed."""
    few = mail_log.SegmentLogLimits(
        segment_bytes_max=SEGMENT_BYTES_FEW,
        compact_from_bytes=COMPACT_FROM_BYTES_FEW,
        compact_factor=COMPACT_FACTOR_FEW,
        compact_step_records=COPY_STEP_FEW,
    )
    SABOTAGES[sabotage]()

    def ready(port: int) -> None:
        fresh = Path(folder, "port.new")
        fresh.write_text(str(port))
        fresh.rename(Path(folder, "port"))
        report("port", port)

    options = MailOptions(critical=storage, urgent=storage, limits=MailLimits(log=few))
    where = ServerOptions(host=HOST, port=0, limits=NatsLimits(tick_s=TICK_S_FEW))
    mail_server.serve(Path(folder, "mail"), where, options, ready=ready)


def _answer_early() -> None:
    """Sabotage: answer at once, and write later."""
    flush, flushes = mail_log.SegmentLog.flush, iter(range(1 << 30))

    def at_once(_: mail_log.SegmentLog, call: Callable[..., object], *facts: object, **__: object) -> None:
        call(*facts)

    def seldom(log: mail_log.SegmentLog) -> None:
        if (done := next(flushes)) % 50 == 0 or done < 10:  # the common mailboxes exist by then
            flush(log)

    mail_log.SegmentLog.after_sync = at_once  # type: ignore[assignment,method-assign]
    mail_log.SegmentLog.flush = seldom  # type: ignore[assignment,method-assign]


def _deliver_twice() -> None:
    """Sabotage: offer every other letter of a queue group again, although a member has it."""
    take, takes = subscribers.QueueGroup.take, iter(range(1 << 30))

    def again(
        group: subscribers.QueueGroup,
        subscription: subscribers.MailSubscription,
        rank: int,
        box: mailbox.Mailbox,
        now_ns: int,
    ) -> mailbox.Letter | None:
        letter = take(group, subscription, rank, box, now_ns)
        if letter is not None and next(takes) % 2:
            group.forget(letter.number)
            group.return_letter(letter)
        return letter

    subscribers.QueueGroup.take = again  # type: ignore[assignment,method-assign]


def _forget_deletes() -> None:
    """Sabotage: do not log removals."""
    supersede = mail_log.SegmentLog.supersede

    def without(log: mail_log.SegmentLog, record: mail_records.Record) -> None:
        if not isinstance(record, mail_records.Removed):
            supersede(log, record)

    mail_log.SegmentLog.supersede = without  # type: ignore[assignment,method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "early": _answer_early,
    "twice": _deliver_twice,
    "undead": _forget_deletes,
}
"""The sabotages that the checker must detect."""


# ---- a connection ----------------------------------------------------------------------------------


class HungUp(Exception):
    """The server has ended."""


class Mail(NamedTuple):
    """A pushed message."""

    msg_id: int
    word: str
    token: str
    body: str


class Post:
    """A connection with requests and subscriptions, without threads."""

    def __init__(self, folder: Path) -> None:
        self._socket = _connected(folder)
        self._reader = natswire.ServerReader()
        self._asked = 0
        self.answers: dict[int, Any] = {}
        self.pushed: deque[Mail] = deque()
        self.server_id = ""
        self.number = 0
        """The number by which the server knows this connection."""
        self._await_info(folder)
        self._send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB _INBOX.p.* 0\r\n')

    def _await_info(self, folder: Path) -> None:
        """The server sends first. A peer that sends nothing is another program on a reused port."""
        self._socket.settimeout(INFO_S)
        try:
            while not self.server_id:
                self.receive()
        except TimeoutError:
            port = self._socket.getpeername()[1]
            self._socket.close()
            if port == int((folder / "port").read_text()):
                raise AssertionError(
                    f"the server took a connection and said nothing for {INFO_S} s"
                ) from None
            raise HungUp from None
        self._socket.settimeout(STUCK_S)

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except ConnectionError:
            raise HungUp from None

    def subscribe(self, rest: str, group: str = "") -> None:
        self._send(natswire.subscribe(f"{MSG}{rest}".encode(), b"1", group.encode()))

    def ask(self, subject: str, payload: bytes = b"") -> int:
        """Send a request. Returns the number of its answer."""
        self._asked += 1
        self._send(natswire.publish(subject.encode(), payload, reply=b"_INBOX.p.%d" % self._asked))
        return self._asked

    def burst(self, subject: str, payloads: list[bytes]) -> None:
        """Send without requesting answers. Messages of one length reach the service in one batch."""
        self._send(b"".join(natswire.publish(subject.encode(), payload) for payload in payloads))

    def answer(self, number: int) -> Any:
        """Wait for an answer."""
        while number not in self.answers:
            self.receive()
        return self.answers[number]

    def asked(self, subject: str, payload: bytes = b"") -> Any:
        return self.answer(self.ask(subject, payload))

    def push(self) -> Mail:
        """Wait for a message."""
        while not self.pushed:
            self.receive()
        return self.pushed.popleft()

    def receive(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except ConnectionError:
            raise HungUp from None
        if not data:
            raise HungUp
        for command in self._reader.feed(data):
            match command:
                case natswire.Messages():
                    for body in command.bodies:
                        self._take(command.head, body)
                case natswire.Info():
                    info = json.loads(command.options)
                    self.server_id, self.number = info["server_id"], info["client_id"]
                case natswire.Error() | natswire.ProtocolFault():
                    raise AssertionError(command.text)
                case _:
                    pass

    def _take(self, head: natswire.ControlLine, body: bytes) -> None:
        subject = head.subject.decode()
        cut = max(0, head.header_bytes)
        if subject.startswith("_INBOX"):
            self.answers[int(subject.rpartition(".")[2])] = json.loads(body[cut:])
            return
        last = subject.rpartition(".")[2]
        self.pushed.append(mail_of(_msg_id(body[:cut]), last if last in RANKS else "normal", body[cut:]))


def mail_of(msg_id: int, word: str, payload: bytes) -> Mail:
    token, _, text = payload.decode().partition("\n")
    return Mail(msg_id, word, token, text)


def _msg_id(headers: bytes) -> int:
    return int(headers.partition(b"Mq9-Msg-Id: ")[2].partition(b"\r\n")[0])


def _connected(folder: Path) -> socket.socket:
    """Connect to the current server."""
    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        made = socket.socket()
        made.settimeout(STUCK_S)
        with contextlib.suppress(OSError):
            made.connect((HOST, int((folder / "port").read_text())))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Without a listener on the port, a socket can be connected to itself.
            if made.getsockname() != made.getpeername():
                return made
        made.close()
        time.sleep(LOOK_S)
    raise TimeoutError("there is no server")


def _posts(folder: str) -> Iterator[Post]:
    """One connection after the other."""
    while True:
        try:
            post = Post(Path(folder))
        except HungUp:
            continue
        yield post
        post.close()


# ---- clients ---------------------------------------------------------------------------------------


def _report_all(report: Report, lines: list[str]) -> None:
    """Write pieces that a pipe accepts whole."""
    piece: list[str] = []
    for line in lines:
        if sum(len(each) + 1 for each in piece) + len(line) >= REPORT_BYTES_MAX:
            report(lines=piece)
            piece = []
        piece.append(line)
    if piece:
        report(lines=piece)


def sender(
    report: Report, *, folder: str, name: str, seed: int, boxes: list[str], size_max: int = 1_500
) -> None:
    """Send some messages at a time, and report the answered ones."""
    rng = Random(seed)
    number = 0
    for post in _posts(folder):
        waiting: dict[int, str] = {}
        try:
            while True:
                for _ in range(rng.randint(1, 5)):
                    token = token_of(name, number, int(size_max * rng.random() ** 2))
                    number += 1
                    place, word = rng.choice(boxes), rng.choice(WORDS)
                    waiting[post.ask(f"{MSG}{place}.{word}", _payload(token))] = f"{place} {word} {token}"
                tokens = [token_of(f"{name}-burst", number + extra, 100) for extra in range(3)]
                post.burst(
                    f"{MSG}{rng.choice(boxes)}.{rng.choice(WORDS)}", [_payload(token) for token in tokens]
                )
                number += len(tokens)
                for asked in list(waiting):
                    post.answer(asked)
                _report_sent(report, post, waiting)
        except HungUp:
            _report_sent(report, post, waiting)


def _payload(token: str) -> bytes:
    return f"{token}\n{body_of(token)}".encode()


def _report_sent(report: Report, post: Post, waiting: dict[int, str]) -> None:
    """The answers so far, also those of a server that has ended."""
    lines = []
    for asked in [number for number in waiting if number in post.answers]:
        answer = post.answers.pop(asked)
        word = "sent" if "msg_id" in answer else "refused"
        lines.append(f"{word} {waiting.pop(asked)} {answer.get('msg_id') or answer['error']}")
    _report_all(report, lines)


def creator(report: Report, *, folder: str, name: str, seed: int) -> None:
    """Create mailboxes, and create existing ones again, which must change nothing."""
    rng = Random(seed)
    number = 0
    lasting: list[str] = []
    for post in _posts(folder):
        try:
            while True:
                mail_id, ttl_s = f"{name}.{number}", rng.choice(TTLS_S)
                number += 1
                before_us = time.time_ns() // 1_000
                body = json.dumps({"name": mail_id, "public": True, "ttl": ttl_s}).encode()
                post.asked(CREATE, body)
                report("created", mail_id, ttl_s, before_us, time.time_ns() // 1_000)
                if ttl_s != TTLS_S[-1]:
                    lasting.append(mail_id)
                if lasting:
                    again = rng.choice(lasting)
                    body = json.dumps({"name": again, "public": True, "ttl": 1}).encode()
                    if post.asked(CREATE, body)["is_new"]:
                        report("forgotten", again)
                time.sleep(LOOK_S)
        except HungUp:
            continue


def subscriber(report: Report, *, folder: str, box: str) -> None:
    """Subscribe again at each server. Report first deliveries, and deliveries that must not happen."""
    known: set[int] = set()
    for post in _posts(folder):
        seen: set[int] = set()
        last = dict.fromkeys(RANKS.values(), 0)
        try:
            post.subscribe(f"{box}.*")
            while True:
                mails = [post.push(), *post.pushed]
                post.pushed.clear()
                lines = []
                for mail in mails:
                    rank = RANKS[mail.word]
                    if mail.msg_id in seen:
                        lines.append(f"twice {mail.msg_id}")
                    elif mail.msg_id < last[rank]:
                        lines.append(f"disorder {mail.msg_id} after {last[rank]}")
                    seen.add(mail.msg_id)
                    last[rank] = mail.msg_id
                    if mail.body != body_of(mail.token):
                        lines.append(f"torn {mail.msg_id}")
                    if mail.word in DURABLE and mail.msg_id not in known:
                        known.add(mail.msg_id)
                        lines.append(f"seen {mail.msg_id}")
                _report_all(report, lines)
        except HungUp:
            continue


def member(report: Report, *, folder: str, box: str, seed: int) -> None:
    """Work in a queue group: take messages, mostly delete them, and sometimes leave."""
    rng = Random(seed)
    for post in _posts(folder):
        held: set[int] = set()
        try:
            post.subscribe(f"{box}.*", TEAM)
            while rng.random() > LEAVES_SHARE:
                mail = post.push()
                report("held", post.server_id, post.number, mail.word, mail.msg_id)
                if mail.msg_id in held:
                    report("twice", mail.msg_id)
                held.add(mail.msg_id)
                if rng.random() < DELETED_SHARE:
                    report("deleting", mail.msg_id)
                    found = post.asked(f"{DELETE}{box}.{mail.msg_id}")["deleted"]
                    report("deleted" if found else "vanished", mail.word, mail.msg_id)
            report("left", post.server_id, post.number)
        except HungUp:
            continue


def puller(report: Report, *, folder: str, box: str) -> None:
    """Fetch and acknowledge. An acknowledged message must never be delivered again."""
    done: set[int] = set()
    body = {"group_name": PULLERS, "deliver": "earliest", "config": {"num_msgs": 5, "max_wait_ms": 20}}
    for post in _posts(folder):
        try:
            while True:
                found = post.asked(f"{FETCH}{box}", json.dumps(body).encode())["messages"]
                ids = [message["msg_id"] for message in found]
                for again in done.intersection(ids):
                    report("again", again)
                if ids:
                    report("acking", *ids)
                    said = json.dumps({"group_name": PULLERS, "mail_address": box, "msg_id": ids[-1]})
                    if not post.asked(f"{ACK}{box}", said.encode())["error"]:
                        done.update(ids)
                        report("acked", *ids)
        except HungUp:
            continue
