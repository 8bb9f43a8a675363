"""`kills-mail`: the mail server is killed repeatedly under a mixed load over real sockets.

No critical or urgent message that was acknowledged or pushed is lost. No message is delivered twice to one
connection of a queue group, or to two live ones. Deleted and acknowledged messages stay so. Mailboxes keep
their lifetimes.
"""

import itertools
import json
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from postroom.contracts.mail.service import MailService
from postroom.core.mail.mailbox import RANKS
from tests.crash import mailprograms as programs
from tests.crash.kills import Tick
from tests.crash.ledger import Delivery, Tally, compare
from tests.crash.mailprograms import DURABLE, Mail, Post
from tests.crash.tasks import portions, scratch
from tests.crash.workers import SPIN_MAX_S, Crew, Worker

KILLS_PER_ROUND = 25
LINES_MAX = 60
MEMBER_KILL_SHARE = 0.2
MARKER = "marker"
SENDERS = 3
MEMBERS = 3
MICROS_PER_S = 1_000_000
OPEN, PULL = "open.box", "pull.box"


def run(count: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Kill `count` times, in rounds."""
    tally = Tally()
    rng = Random(f"kills-mail/{seed}")
    for number, size in enumerate(portions(count, KILLS_PER_ROUND)):
        with scratch(number) as folder:
            _round(folder, size, rng, tally, sabotage)
        tick(size)
    return tally


class _Cast:
    """A server and its clients."""

    def __init__(self, folder: Path, crew: Crew, rng: Random, sabotage: str) -> None:
        self._folder = folder
        self._crew = crew
        self._rng = rng
        self._sabotage = sabotage
        self._server = self._start_server()
        post = Post(folder)
        post.asked(programs.CREATE, json.dumps({"name": OPEN, "public": True, "ttl": 3600}).encode())
        post.asked(programs.CREATE, json.dumps({"name": PULL, "public": True, "ttl": 0}).encode())
        self.work: str = post.asked(programs.CREATE, b"{}")["mail_id"]
        post.close()
        boxes = [OPEN, PULL, self.work]
        self._senders = [
            self._start("sender", programs.sender, name=f"s{number}", boxes=boxes, seed=rng.getrandbits(32))
            for number in range(SENDERS)
        ]
        self._members = [self._start_member() for _ in range(MEMBERS)]
        self._start("creator", programs.creator, name="made", seed=rng.getrandbits(32))
        self._start("subscriber", programs.subscriber, box=OPEN)
        self._start("puller", programs.puller, box=PULL)

    def _start(self, name: str, program: Callable[..., None], /, **options: object) -> Worker:
        return self._crew.start(name, program, folder=str(self._folder), **options)

    def _start_server(self) -> Worker:
        server = self._start("server", programs.server, sabotage=self._sabotage)
        self._crew.await_lines(server, 1)
        return server

    def _start_member(self) -> Worker:
        return self._start("member", programs.member, box=self.work, seed=self._rng.getrandbits(32))

    def kill_server(self) -> None:
        """After some answers, at a random instant during the next calls."""
        watched = self._rng.choice(self._senders)
        self._crew.await_lines(watched, self._rng.randint(1, LINES_MAX))
        until = time.perf_counter() + self._rng.uniform(0, SPIN_MAX_S)
        while time.perf_counter() < until:
            pass
        self._server.kill()
        self._server = self._start_server()

    def kill_member(self) -> None:
        place = self._rng.randrange(MEMBERS)
        self._members[place].kill()
        self._members[place] = self._start_member()

    def end(self) -> None:
        """Kill everything, and start one more server for the checks."""
        self._crew.kill_all()
        self._server = self._start_server()


def _round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> None:
    with Crew() as crew:
        cast = _Cast(folder, crew, rng, sabotage)
        for _ in range(kills):
            cast.kill_server()
            tally.count("kills")
            if rng.random() < MEMBER_KILL_SHARE:
                cast.kill_member()
                tally.count("members_killed")
        cast.end()
        reports = _Reports(crew.workers)
        for box in (OPEN, PULL, cast.work):
            _judge_box(folder, box, reports, tally)
        _judge_pulled(folder, reports, tally)
    _judge_violations(reports, tally)
    _judge_teams(reports, tally)
    _judge_mailboxes(folder / "mail", reports, tally)


class _Reports:
    """The reports of the workers, by their kind."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.rows: defaultdict[str, list[list[str]]] = defaultdict(list)
        self.dead_connections: set[tuple[str, str]] = set()
        for worker in workers:
            rows = [line.split(" ") for line in worker.lines]
            for row in rows:
                self.rows[row[0]].append(row[1:])
            # The last connection of a killed member may have ended while the server was still running.
            held = [(row[1], row[2]) for row in rows if row[0] == "held"]
            self.dead_connections.update(held[-1:])

    def ids(self, kind: str, column: int = 0) -> set[str]:
        return {row[column] for row in self.rows[kind]}

    def each(self, kind: str) -> set[str]:
        """The ids in rows that consist of ids only."""
        return {msg_id for row in self.rows[kind] for msg_id in row}

    def durable(self, kind: str, priority_column: int) -> set[str]:
        """The ids at the ends of rows about messages that must not be lost."""
        return {row[-1] for row in self.rows[kind] if row[priority_column] in DURABLE}


def _replayed(folder: Path, box: str) -> list[Mail]:
    """All messages of a new subscriber."""
    post = Post(folder)
    post.subscribe(f"{box}.*")
    post.asked(f"{programs.MSG}{box}.low", MARKER.encode())
    found = list(itertools.takewhile(lambda mail: mail.token != MARKER, iter(post.push, None)))
    post.close()
    return found


def _judge_box(folder: Path, box: str, reports: _Reports, tally: Tally) -> None:
    """Acknowledged messages are replayed complete, once and in order; deleted ones are not."""
    mails = _replayed(folder, box)
    acknowledged = {row[2]: row[3] for row in reports.rows["sent"] if row[0] == box and row[1] in DURABLE}
    tally.acknowledged += len(acknowledged)
    gone = reports.each("deleting")
    expected = {token: msg_id for token, msg_id in acknowledged.items() if msg_id not in gone}
    found = [Delivery(mail.token, str(mail.msg_id), mail.body) for mail in mails]
    compare(expected, found, tally)
    order = [(RANKS[mail.word], mail.msg_id) for mail in mails]
    if order != sorted(order):
        tally.breaks("a replay was not in the order of priorities and numbers")
    ids = {delivery.msg_id for delivery in found}
    undead = ids & reports.durable("deleted", 0)
    if undead:
        tally.breaks(f"{len(undead)} deleted messages came again")
    if box == OPEN:
        _judge_pushed(reports.ids("seen"), ids, tally)
    elif box != PULL:
        _judge_pushed(reports.durable("held", 2) - gone, ids, tally)


def _judge_pushed(pushed: set[str], found: set[str], tally: Tally) -> None:
    """Every pushed message is stored."""
    tally.count("pushed", len(pushed))
    tally.lost += len(pushed - found)


def _judge_pulled(folder: Path, reports: _Reports, tally: Tally) -> None:
    """The group gets its unacknowledged messages, and nothing else."""
    post = Post(folder)
    body = {"group_name": programs.PULLERS, "config": {"num_msgs": 1_000, "max_wait_ms": 0}}
    found = post.asked(f"{programs.FETCH}{PULL}", json.dumps(body).encode())["messages"]
    post.close()
    ids = {str(message["msg_id"]) for message in found}
    sent = {row[3] for row in reports.rows["sent"] if row[0] == PULL and row[1] in DURABLE}
    acked, in_doubt = reports.each("acked"), reports.each("acking")
    tally.count("pulled", len(acked))
    tally.doubled += len(ids & acked)
    if reports.rows["acking"]:  # otherwise the group did not exist, and starts with new messages
        tally.lost += len(sent - in_doubt - ids)


def _judge_violations(reports: _Reports, tally: Tally) -> None:
    """Violations that the clients themselves observed."""
    tally.doubled += len(reports.rows["twice"]) + len(reports.rows["again"])
    tally.torn += len(reports.rows["torn"])
    tally.lost += len(reports.rows["forgotten"])
    for kind in ("disorder", "vanished", "refused"):
        for row in reports.rows[kind]:
            tally.breaks(f"{kind} {' '.join(row)}")
    tally.count("deleted", len(reports.rows["deleted"]))


def _judge_teams(reports: _Reports, tally: Tally) -> None:
    """During one run of the server a message has one holder, unless that holder has ended."""
    gone = {(row[0], row[1]) for row in reports.rows["left"]} | reports.dead_connections
    holders: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for server_id, connection, _, msg_id in reports.rows["held"]:
        holders[server_id, msg_id].add(connection)
    for (server_id, _), connections in holders.items():
        living = [each for each in connections if (server_id, each) not in gone]
        tally.doubled += max(0, len(living) - 1)
        tally.count("handed_over", len(connections) > 1)


def _judge_mailboxes(folder: Path, reports: _Reports, tally: Tally) -> None:
    """Each mailbox expires at its time, whatever happened in between."""
    now_us = time.time_ns() // 1_000
    service = MailService(folder, queue.SimpleQueue[object]().put)
    boxes = service._mailboxes.by_key
    for mail_id, ttl, before, after in reports.rows["created"]:
        tally.count("mailboxes")
        ttl_us = round(float(ttl) * MICROS_PER_S)
        box = boxes.get(mail_id)
        if ttl_us and int(after) + ttl_us < now_us:
            if box is not None and not 0 < box.expires_us <= now_us:
                tally.breaks(f"{mail_id} lives longer than {ttl} s")
        elif box is None:
            tally.lost += not ttl_us or int(before) + ttl_us > now_us
        elif ttl_us and not int(before) + ttl_us <= box.expires_us <= int(after) + ttl_us:
            tally.breaks(f"{mail_id} does not end {ttl} s after its creation")
        elif not ttl_us and box.expires_us:
            tally.breaks(f"{mail_id} ends, and should not")
    service.close()
