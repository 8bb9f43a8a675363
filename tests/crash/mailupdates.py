"""Updates of a mail log that are crashed or failed at each system call, and the rules that must hold then."""

import json
import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postroom.contracts.mail.options import MailOptions, Storage
from postroom.contracts.mail.service import MailService
from postroom.errors import PostroomError
from postroom.logs.mail_log import SegmentLogLimits
from postroom.message import Durability
from postroom.system.clock import SystemClock
from tests.crash.ledger import Delivery, Tally, body_of, compare, token_of
from tests.crash.mailprograms import ACK, CREATE, DELETE, FETCH, MSG, mail_of
from tests.crash.updates import OLD, Attempt, Expected, Update, new_tokens
from tests.mailservice import FakeLink

BOX = "box"
OLD_COUNT = 4
GROUP = "g"
WAIT_S = 0.002
TURNS_MAX = 5_000
SEGMENT_BYTES_FEW = 1_000  # less than one send of many, so that the send starts a new segment


class MailHarness:
    """A mail service whose loop is run by hand, in one process, with real files and a real thread."""

    def __init__(self, folder: Path, durability: Durability = "group") -> None:
        self._soon: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        storage: Storage = "os" if durability == "os" else "group"
        options = MailOptions(critical=storage, urgent=storage)
        self.folder = folder
        self.link = FakeLink()
        self.service = MailService(self.folder, self._soon.put, options=options)

    def limit(self, limits: SegmentLogLimits) -> None:
        log = self.service._mailboxes.journal.log
        assert log is not None
        log.limits = limits

    def ask(self, *requests: tuple[str, bytes]) -> list[Any]:
        """Send a batch of requests and turn the loop until all answers have arrived."""
        self.turn(lambda: not self.service.trouble)
        first = len(self.link.answers)
        for number, (subject, payload) in enumerate(requests):
            self.service.published(self.link, subject, f"_INBOX.{first + number}", 0, [payload])
        self.service.flush()
        self.turn(lambda: len(self.link.answers) == first + len(requests))
        answers = {reply: json.loads(payload) for reply, payload in self.link.answers[first:]}
        found = [answers[f"_INBOX.{first + number}"] for number in range(len(requests))]
        for answer in found:
            if answer.get("error"):
                raise PostroomError(answer["error"])
        return found

    def turn(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if done():
                return
            try:
                self._soon.get(timeout=WAIT_S)()
            except queue.Empty:
                self.service.tick()
            self.service.flush()
        raise PostroomError("there is no answer")

    def replayed(self) -> list[Delivery]:
        """The messages of a new subscriber, in order."""
        link = FakeLink()
        if self.service.subscribed(link, "1", f"{MSG}{BOX}.*", "") is not None:
            return []
        mails = [mail_of(got.msg_id, "critical", got.payload) for got in link.got]
        self.service.closed(link)
        return [Delivery(mail.token, str(mail.msg_id), mail.body) for mail in mails]


def _open(folder: Path, durability: Durability = "group") -> MailHarness:
    return MailHarness(folder / "deep" / "mail", durability)


# ---- what is done ----------------------------------------------------------------------------------


def _payload(token: str) -> bytes:
    return f"{token}\n{body_of(token)}".encode()


def _send(harness: MailHarness, tokens: list[str]) -> list[str]:
    answers = harness.ask(*((f"{MSG}{BOX}.critical", _payload(token)) for token in tokens))
    return [
        word for token, answer in zip(tokens, answers, strict=True) for word in (token, str(answer["msg_id"]))
    ]


def _send_one(harness: MailHarness, attempt: int) -> list[str]:
    return _send(harness, new_tokens(attempt))


def _send_many(harness: MailHarness, attempt: int) -> list[str]:
    return _send(harness, new_tokens(attempt, count=5, size=700))


def _send_first(harness: MailHarness, attempt: int) -> list[str]:
    harness.ask((CREATE, json.dumps({"name": BOX, "public": True, "ttl": 0}).encode()))
    return _send_one(harness, attempt)


def _send_across(harness: MailHarness, attempt: int) -> list[str]:
    harness.limit(SegmentLogLimits(segment_bytes_max=SEGMENT_BYTES_FEW))
    words = _send_many(harness, attempt)
    return words + _send(harness, new_tokens(attempt + 10))


def _compact(harness: MailHarness, attempt: int) -> list[str]:
    """Compact while a message is on its way to the disk, and check that the old segments are removed."""
    first = next(harness.folder.glob("mail-*-00000001.log"), "")
    words = _send_many(harness, attempt)
    # A copy that failed is retried at once.
    harness.limit(SegmentLogLimits(compact_from_bytes=0, compact_factor=0, compact_after_s=0.0))
    harness.service.published(
        harness.link, f"{MSG}{BOX}.critical", "", 0, [_payload(token_of(f"way{attempt}", 0, 50))]
    )
    harness.service.flush()
    harness.service.tick()
    harness.turn(lambda: not os.path.exists(first))
    return words + _send(harness, new_tokens(attempt + 10))


def _delete(harness: MailHarness, attempt: int) -> list[str]:
    """The first two messages, as far as they still exist."""
    found = harness.replayed()[:2]
    msg_ids = [delivery.msg_id for delivery in found if delivery.token in _old_tokens()[:2]]
    harness.ask(*((f"{DELETE}{BOX}.{msg_id}", b"") for msg_id in msg_ids))
    return _old_tokens()[:2]


def _acknowledge(harness: MailHarness, attempt: int) -> list[str]:
    fetch = {"group_name": GROUP, "deliver": "earliest", "config": {"num_msgs": 2, "max_wait_ms": 0}}
    [found] = harness.ask((f"{FETCH}{BOX}", json.dumps(fetch).encode()))
    ids = [message["msg_id"] for message in found["messages"]]
    said = {"group_name": GROUP, "mail_address": BOX, "msg_id": ids[-1]}
    harness.ask((f"{ACK}{BOX}", json.dumps(said).encode()))
    return [str(msg_id) for msg_id in ids]


# ---- before and after ------------------------------------------------------------------------------


def _old_tokens() -> list[str]:
    return [token_of(OLD, number, 150) for number in range(OLD_COUNT)]


def _prepare_nothing(folder: Path) -> Expected:
    SystemClock()  # imports must not be affected by the injected errors
    return {}


def _prepare_box(folder: Path) -> Expected:
    harness = _open(folder)
    harness.ask((CREATE, json.dumps({"name": BOX, "public": True, "ttl": 0}).encode()))
    _send(harness, _old_tokens())
    harness.service.close()
    return {"": _old_tokens()}


def _judge_sent(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    words = [word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words]
    acknowledged = dict(zip(words[::2], words[1::2], strict=True))
    _judge(folder, set(expected.get("", [])), set(), acknowledged, tally)


def _judge_deleted(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    gone = {word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words}
    _judge(folder, set(expected[""][2:]), gone, {}, tally)


def _judge_acknowledged(folder: Path, expected: Expected, attempts: list[Attempt], tally: Tally) -> None:
    done = {word for attempt in attempts if attempt.outcome == "ok" for word in attempt.words}
    harness = _open(folder)
    fetch = {"group_name": GROUP, "deliver": "earliest", "config": {"num_msgs": 100, "max_wait_ms": 0}}
    [found] = harness.ask((f"{FETCH}{BOX}", json.dumps(fetch).encode()))
    again = {str(message["msg_id"]) for message in found["messages"]}
    tally.doubled += len(again & done)
    tally.lost += max(0, OLD_COUNT // 2 - len(again))  # one acknowledgement covers two
    harness.service.close()
    _judge(folder, set(expected[""]), set(), {}, tally)


def _judge(folder: Path, old: set[str], gone: set[str], acknowledged: dict[str, str], tally: Tally) -> None:
    """Acknowledged messages exist and are complete, deleted ones do not exist, and the next send works."""
    harness = _open(folder)
    found = harness.replayed()
    tally.acknowledged += len(acknowledged) + len(old) + len(gone)
    compare(acknowledged, found, tally)
    tokens = [delivery.token for delivery in found]
    tally.lost += len(old - set(tokens))
    if gone & set(tokens):
        tally.breaks(f"{gone & set(tokens)} were deleted and are there")
    numbers = [int(delivery.msg_id) for delivery in found]
    if numbers != sorted(numbers):
        tally.breaks("the replay is not in the order of the numbers")
    harness.ask((CREATE, json.dumps({"name": BOX, "public": True, "ttl": 0}).encode()))
    after = token_of("after", 0, 50)
    _send(harness, [after])
    harness.service.close()
    harness = _open(folder)
    if [delivery.token for delivery in harness.replayed()] != [*tokens, after]:
        tally.breaks("a send afterwards did not simply add its message")
    harness.service.close()


MAIL_UPDATES = [
    Update(name=f"mail-{name}", prepare=prepare, open=_open, act=act, judge=judge)
    for name, prepare, act, judge in (
        ("first", _prepare_nothing, _send_first, _judge_sent),
        ("send", _prepare_box, _send_one, _judge_sent),
        ("send-many", _prepare_box, _send_many, _judge_sent),
        ("rotate", _prepare_box, _send_across, _judge_sent),
        ("compact", _prepare_box, _compact, _judge_sent),
        ("delete", _prepare_box, _delete, _judge_deleted),
        ("acknowledge", _prepare_box, _acknowledge, _judge_acknowledged),
    )
]
