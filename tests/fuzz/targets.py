"""What is fuzzed: each parser with its valid inputs, and what must hold for every input whatever.

A target's `check` raises nothing when all is well. `Wrong` means that a parser accepted what it must not, or
said one thing and did another; any other exception is a crash of the parser.
"""

import json
import math
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, timedelta
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from postroom import TOPICS, Queue
from postroom.contracts.mail.options import MailOptions
from postroom.contracts.mail.service import MailService
from postroom.core import names, times
from postroom.core.formats import buswire, foreign_bus, queuewire
from postroom.core.nats import natswire
from postroom.errors import DamagedState, InvalidMessage, InvalidName, InvalidSetting
from postroom.logs import busfile, mail_records
from postroom.logs.queuefile import SessionFiles
from postroom.message import BusMessage, Damage
from postroom.settings import BusSettings, QueueSettings, Settings, described, load
from tests.fuzz.mutate import mutated
from tests.mailservice import FakeLink

NOW_NS = 1_794_700_800_000_000_000
NAME_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Wrong(Exception):
    """An input for which something did not hold."""


def demand(holds: object, *facts: object) -> None:
    if not holds:
        raise Wrong(" ".join(str(fact) for fact in facts))


class Target:
    """One parser. `rng` is seeded anew for each input; `close` removes files that it may have needed."""

    words: Sequence[bytes] = ()
    corpus: Sequence[bytes] = ()

    def __init__(self) -> None:
        self.rng = Random()

    def input(self) -> bytes:
        return mutated(self.rng, self.corpus, self.words)

    def check(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to remove."""


# ---- Bus -------------------------------------------------------------------------------------------


def _record(number: int, body: str, *, parents: int = 0, attachment: str = "", **fields: str) -> bytes:
    draft = buswire.draft(
        fields.get("type", "info"),
        "my-project",
        fields.get("task_id", f"task-{number}"),
        fields.get("run_id", ""),
        [f"MSG-20261115-010112-000000001-PID00001-{n:04d}" for n in range(parents)],
        attachment,
        body,
    )
    msg_id = f"MSG-20261115-010112-{number:09d}-PID00001-0001"
    return buswire.encode(draft, msg_id, "2026-11-15T01:01:12.326384Z")


OURS = [
    _record(1, "hello"),
    _record(2, "", task_id="no", run_id="012"),
    _record(3, "two\nlines\n", parents=2, attachment="out/report.md"),
    _record(4, "---\nmsg_id: forged\n---\n", parents=1),
    _record(5, "Umlaut ä \u2028 \U0001f600 \0\r\n", type="a: b"),
    _record(6, "--- \n---\r\n\n\n"),
    _record(7, "body_bytes: 3\ncrc: 00000000\n---\nx", task_id="1:30"),
    _record(8, "msg_id: forged\nts: 2026-11-15T01:01:12Z\ntype: t\nproject_id: p\n---\nforged\n"),
]

FOREIGN = [
    (
        b"---\nmsg_id: MSG-20261115-010112-326360337-PID26098-0001\nts: 2026-11-15T01:01:12.326384354Z\n"
        b"type: agent_started\nproject_id: my-project\ntask_id: task-001\nrun_id: run-001\n---\nstarted\n"
    ),
    (
        b"---\nmsg_id: MSG-1\nts: 2026-11-15T01:01:12Z\ntype: FACT\nproject_id: p\n"
        b'task_id: ""\nrun_id: ""\n---\n\n'
    ),
    (
        b"---\nmsg_id: MSG-2\nts: 2026-11-15T01:01:12+02:00\ntype: FACT\n"
        b"project_id: 'p: ''q'' \"and\" #hash'\ntask_id: \"no\"\nrun_id: \"012\"\n"
        b"parents:\n    - msg_id: MSG-1\n      kind: reply\n---\na\n\nb: c\n- d\n"
    ),
    (
        b"---\nmsg_id: MSG-3\nts: 2026-11-15T01:01:12Z\ntype: ISSUE\nproject_id: p\nissue_id: MSG-3\n"
        b'links:\n    - url: https://example.org/x\n      label: x\nmeta:\n    k: v\n    "n": "1:30"\n'
        b"parents:\n  - MSG-1\n  - MSG-2\n---\nan issue\n"
    ),
]
LEGACY = [
    b"[2026-02-05 14:30:52] INFO: hello\n",
    b"[2026-02-05T14:30:52Z] task_done: done\r\n",
    b"[2026-02-05 14:30:52.123456789] no type here\n",
    b"\n",
]
BUS_WORDS = (
    *(b"---\nmsg_id: ", b"\n---\nmsg_id: X\n", b"---\n", b"crc: 00000000\n", b"body_bytes: 5\n", b"msg_id: "),
    *(b"body_escape: dash-space\n", b"parents:\n", b"  - MSG-1\n", b"attachment_path: a\n", b"type: t\n"),
    *(b"ts: 2026-11-15T01:01:12Z\n", b"project_id: p\n", b"[2026-02-05 14:30:52] INFO: x\n"),
    *(b"a: &a [x, x]\nb: &b [*a, *a]\n", b"? [a]\n: b\n", b"key: |\n  text\n", b"crc: 00000000\n---\n"),
)
_CRC_LINE = re.compile(rb"crc: [0-9a-f]{8}\n---\n")
_BODY_BYTES = re.compile(rb"\nbody_bytes: (\d{1,9})\ncrc: \Z")


class BusTarget(Target):
    """`buswire.decode`, and the window reader over it."""

    words = BUS_WORDS

    def __init__(self, corpus: Sequence[bytes]) -> None:
        super().__init__()
        self.corpus = corpus
        self._originals = _messages_in(corpus)
        self._fd = os.memfd_create("fuzz")

    def close(self) -> None:
        os.close(self._fd)

    def input(self) -> bytes:
        data = super().input()
        return _with_true_checksum(data) if self.rng.random() < 0.3 else data

    def check(self, data: bytes) -> None:
        decoded = buswire.decode(data, legacy_line=0)
        demand(0 <= decoded.consumed <= len(data), "consumed", decoded.consumed, "of", len(data))
        demand(len(decoded.starts) == len(decoded.messages), "messages without a place")
        demand(all(0 <= start < len(data) for start in decoded.starts), "messages at", decoded.starts)
        demand(0 <= decoded.unchecked <= len(decoded.messages), decoded.unchecked, "unchecked")
        _check_damage(decoded.damaged, len(data))
        for message in decoded.messages:
            if message not in self._originals.get(message.msg_id, ()):
                demand(_may_be_delivered(message, data), "delivered", message)
        self._check_windows(decoded, data)
        _check_growth(data, int(self.rng.random() * (len(data) + 1)))

    def _check_windows(self, whole: buswire.Decoded, data: bytes) -> None:
        """Reading a window at a time gives what reading at once gives."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        parts = list(busfile.decode_from(self._fd, 0, 0, 16 + int(self.rng.random() * 400)))
        messages = [message for part in parts for message in part.messages]
        demand(messages == whole.messages, "in windows:", messages, "at once:", whole.messages)
        damaged = [damage for part in parts for damage in part.damaged]
        demand(_places(damaged) == _places(whole.damaged), "in windows:", damaged, "at once:", whole.damaged)
        consumed = sum(part.consumed for part in parts)
        demand(consumed == whole.consumed, "in windows:", consumed, "bytes, at once:", whole.consumed)


def _messages_in(corpus: Sequence[bytes]) -> dict[str, list[BusMessage]]:
    found: dict[str, list[BusMessage]] = {}
    for data in corpus:
        for message in buswire.decode(data, legacy_line=0).messages:
            found.setdefault(message.msg_id, []).append(message)
    return found


def _places(damaged: list[Damage]) -> list[tuple[int, int]]:
    """Where the damage is. How it looks can depend on how much of it is in view."""
    return [(damage.offset, damage.length) for damage in damaged]


def _check_damage(damaged: list[Damage], size: int) -> None:
    end = 0
    for damage in damaged:
        demand(end <= damage.offset and damage.length > 0, damage, "after", end)
        end = damage.offset + damage.length
    demand(end <= size, "damage up to", end, "of", size)


def _check_growth(data: bytes, cut: int) -> None:
    """What a reader is given of a file that still grows, it is given again when the file is longer."""
    early = buswire.decode(data[:cut], legacy_line=0, settled_tail=False)
    late = buswire.decode(data, legacy_line=0, settled_tail=False)
    count = len(early.messages)
    demand(early.messages == late.messages[:count], "the first", cut, "bytes alone gave", early.messages)


def _may_be_delivered(message: BusMessage, data: bytes) -> bool:
    """By other code than the decoder's: a record of this id has a checksum that fits, or none at all."""
    if message.msg_id.startswith(foreign_bus.LEGACY_PREFIX):
        return message.body.encode("utf-8", "surrogateescape") in data
    msg_id = re.escape(message.msg_id.encode("utf-8", "surrogateescape"))
    for opening in re.finditer(rb"(?m)^---\r?\n", data):
        rest = data[opening.end() :]
        if b"\r" in opening[0]:
            rest = rest.replace(b"\r\n", b"\n")
        header, _, body = rest.partition(b"\n---\n")
        header += b"\n"
        named = body != rest and re.search(rb"(?m)^msg_id: %b$" % msg_id, header)
        if named and (_checksum_fits(header, body) or _is_foreign(header)):
            return True
    return False


def _is_foreign(header: bytes) -> bool:
    return not re.search(rb"(?m)^(?:crc|body_bytes):", header)


def _checksum_fits(header: bytes, rest: bytes) -> bool:
    match = re.search(rb"\nbody_bytes: (\d{1,9})\ncrc: ([0-9a-f]{8})\n\Z", header)
    if match is None:
        return False
    head = header[: match.start(2) - len(b"crc: ")]
    return zlib.crc32(head + rest[: int(match[1])]) == int(match[2], 16)


def _with_true_checksum(data: bytes) -> bytes:
    """Make the first checksum fit again, so that what comes behind it is tried, too."""
    match = _CRC_LINE.search(data)
    start = data.find(b"msg_id: ")
    if match is None or not 0 <= start < match.start():
        return data
    size = _BODY_BYTES.search(data[: match.start() + len(b"crc: ")])
    body = data[match.end() : match.end() + int(size[1])] if size else b""
    checksum = zlib.crc32(data[start : match.start()] + body)
    return b"%bcrc: %08x\n---\n%b" % (data[: match.start()], checksum, data[match.end() :])


class YamlTarget(Target):
    """The guarded YAML reader for headers of the original program."""

    words = BUS_WORDS
    corpus = tuple(data[4 : data.find(b"\n---\n", 4) + 1] for data in FOREIGN)

    def check(self, data: bytes) -> None:
        try:
            fields = foreign_bus.yaml_header(data)
        except foreign_bus.DamagedRecord:
            return
        demand(len(data) <= foreign_bus.HEADER_BYTES_MAX, "a header over the limit was read")
        demand(isinstance(fields, dict), fields, "is not a mapping")
        _check_plain(fields, foreign_bus.YAML_DEPTH_MAX + 1)
        try:
            message = foreign_bus.foreign_message(data, b"body")
        except foreign_bus.DamagedRecord:
            return
        demand(message.ts.utcoffset() == timedelta(0), "the time", message.ts, "is not UTC")
        demand(all(isinstance(parent, str) for parent in message.parents), "parents", message.parents)


def _check_plain(value: Any, depth_left: int) -> None:
    """Only text, lists and mappings of text: nothing that YAML makes up."""
    demand(depth_left > 0, "nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            demand(isinstance(key, str) or depth_left <= foreign_bus.YAML_DEPTH_MAX, "the key", key)
            _check_plain(item, depth_left - 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth_left - 1)
    else:
        demand(isinstance(value, str), repr(value), "is not text")


# ---- Queue -----------------------------------------------------------------------------------------


def _line(number: int, body: str, **fields: Any) -> bytes:
    line = queuewire.QueueLine(
        f"m-{number:x}-aabbccdd-1",
        "2026-11-15T01:01:12.326384Z",
        "agent-a",
        fields.pop("to", None),
        fields.pop("topic", "status"),
        body,
        fields.pop("in_reply_to", None),
        fields.pop("ttl_s", None),
        **fields,
    )
    return queuewire.encode_line(line)[:-1]


LINES = [
    _line(1, "hello"),
    _line(2, 'quotes " and \\ and ü \U0001f600 \0', to="agent-b", topic="ask", ttl_s=60),
    _line(3, "@file:m-3-aabbccdd-1.txt", ttl_s=0.5, body_bytes=5000, body_crc="0badf00d", in_reply_to="m-1"),
    _line(4, "", to="all", topic="broadcast", ttl_s=1e300),
    (
        b'{"msg_id":"m-5","ts":"2026-11-15T01:01:12Z","from":"a","to":null,"topic":"ask","body":"foreign",'
        b'"in_reply_to":null,"ttl_s":null}'
    ),
    (
        b'{"topic": "answer", "body": "other order", "from": "a", "ts": "x", "msg_id": "m-6",'
        b' "more": [1, {"a": []}]}'
    ),
]
LINE_WORDS = (
    *(b'"ttl_s":1e999,', b'"ttl_s":-1,', b'"ttl_s":"5",', b'"to":5,', b'"topic":"other",', b"[]"),
    *(b'"body":"@file:../../etc/passwd",', b'"msg_id":"../x",', b'"ts":"0001-01-01T00:00:00+14:00",'),
    *(b'"ts":"9999-12-31T23:59:59.999999999Z",', b',"crc":"00000000"}', b'"body_bytes":-1,'),
    *(b'"body_crc":null,', b'"body":"\\ud800",', b'"msg_id":"m-1",', b'"ttl_s":18446744073709551616,'),
)
_SUFFIX = b',"crc":"'


class LineTarget(Target):
    """`queuewire.decode_line`, and what is asked about the message it gives."""

    words = LINE_WORDS
    corpus = LINES

    def input(self) -> bytes:
        data = super().input()
        if self.rng.random() < 0.4 and data.endswith(b"}"):
            text = data[: data.rfind(_SUFFIX)] if _SUFFIX in data else data[:-1]
            data = b'%b,"crc":"%08x"}' % (text, zlib.crc32(text))
        return data

    def check(self, data: bytes) -> None:
        try:
            message = queuewire.decode_line(data)
        except queuewire.UnreadableLine:
            return
        if data[-18:-10] == _SUFFIX:
            demand(zlib.crc32(data[:-18]) == int(data[-10:-2], 16), "the checksum does not fit:", message)
        demand(
            all(isinstance(value, str) for key, value in message.items() if key not in _MAY_BE_NONE), message
        )
        demand(
            message.keys() >= {"msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s"}, message
        )
        ttl_s = message["ttl_s"]
        demand(ttl_s is None or ttl_s not in (math.inf, -math.inf), "ttl_s", ttl_s)
        demand(ttl_s is None or not math.isnan(min(ttl_s, 1)), "ttl_s", ttl_s)
        queuewire.is_expired(message, NOW_NS)
        queuewire.is_for(message, "agent-b")
        if queuewire.in_side_file(message):
            names.checked_name("message id", message["msg_id"])
            queuewire.body_fault(message, b"x" * 5000)


_MAY_BE_NONE = ("to", "in_reply_to", "ttl_s", "body_bytes")


def memory_folder() -> str | None:
    """A folder that costs no disk; None for the usual temporary one."""
    memory = "/dev/shm"  # noqa: S108 - only folders with random names are made in it
    return memory if os.access(memory, os.W_OK) else None


class _InFolder(Target):
    """A parser that reads files: they lie in a folder of their own, in memory if possible."""

    def __init__(self) -> None:
        super().__init__()
        parent = tempfile.tempdir or memory_folder()
        self._made = tempfile.TemporaryDirectory(prefix="postroom-fuzz-", dir=parent)
        self.folder = Path(self._made.name)

    def close(self) -> None:
        self._made.cleanup()


class _Session(_InFolder):
    """A session with one message of each topic, all read by one agent."""

    agent = "agent-a"

    def __init__(self) -> None:
        super().__init__()
        with Queue(self.folder) as queue:
            for topic in sorted(TOPICS):
                queue.send(topic, f"about {topic}")
            queue.poll(self.agent)
        self.session = self.folder / "sessions" / "default"
        self.messages = self.session / "messages.jsonl"
        self.lines = self.messages.read_bytes()
        self.starts = sorted({0, *(match.end() for match in re.finditer(rb"\n", self.lines))})
        self.files = SessionFiles(self.session, "os", 10.0)

    def close(self) -> None:
        self.files.close()
        super().close()


class CursorTarget(_Session):
    """`.cursor` and `.topics` files, through `progress_of` and the check that a poll makes."""

    words = (
        *(b"0", b"-", b"\n", b" ", b'{"topics":{},"taken":[]}', b'"ask":5', b"null", b'"taken":[0,0,-1]'),
        *(b'"ask":-1', b'{"":0}', b"1e3"),
    )

    def __init__(self) -> None:
        super().__init__()
        starts = self.starts
        self.corpus = [b"%d\n" % start for start in starts] + [
            b'{"topics":{"ask":%d,"status":%d},"taken":[%d]}' % (starts[2], starts[1], starts[3]),
            b'{"topics":{},"taken":[%d,%d]}' % (starts[1], starts[4]),
        ]
        self._cursor = self.session / "cursors" / f"{self.agent}.cursor"
        self._topics = self.session / "cursors" / f"{self.agent}.topics"

    def check(self, data: bytes) -> None:
        as_cursor = self.rng.random() < 0.5
        self._cursor.write_bytes(data if as_cursor else self.corpus[1])
        self._topics.write_bytes(data if not as_cursor else self.corpus[-1])
        try:
            reading = self.files.cursors.read(self.agent)
        except DamagedState:
            return
        if as_cursor:
            demand(data.strip().isdigit() and reading.cursor == int(data), reading, "from", data)
        demand(isinstance(reading.cursor, int) and reading.cursor >= 0, "the cursor", reading.cursor)
        self._check_trusted()

    def _check_trusted(self) -> None:
        with self.files.locked() as size:
            try:
                reading = self.files.trusted_progress(self.agent, size)
            except DamagedState:
                return
            for offset in (reading.cursor, *reading.topics.values()):
                demand(offset in self.starts, "offset", offset, "was trusted")
            reading.first_unread(frozenset(TOPICS))
            reading.has_read("ask", 0)


class JournalTarget(_Session):
    """`expire.journal`, applied or refused by whoever takes the lock next."""

    words = (
        *(b'"../../../victim":{"cursor":0,"topics":{},"taken":[]},', b'"../victim"', b'"readings":{},'),
        *(b'"bodies":["../../victim"]', b'"inode":0,', b'"epoch":-1,', b'"a/b"', b'"."', b'"x\\u0000y"'),
    )

    def __init__(self) -> None:
        super().__init__()
        starts = self.starts
        journal = {
            "inode": self.messages.stat().st_ino,
            "epoch": 1,
            "readings": {
                "agent-a": {"cursor": starts[1], "topics": {"ask": starts[2]}, "taken": [starts[3]]},
                "agent-b": {"cursor": 0, "topics": {}, "taken": []},
            },
            "bodies": ["m-1-aabbccdd-1", "m-2"],
        }
        self.corpus = [msgspec.json.encode(journal), msgspec.json.encode({**journal, "bodies": []})]
        self._journal = self.session / "expire.journal"
        folders = [self.folder, self.folder / "sessions", self.session, self.session / "agents"]
        for folder in (self.session / "agents", self.session / "bodies"):
            folder.mkdir()
        for folder in folders:
            (folder / "victim.txt").write_text("untouched")
        self._may_change = {"expire.journal", "epoch"}
        self._folders = folders
        self._before = self._outside()

    def _outside(self) -> list[set[str]]:
        """The names in every folder that a journal has no business in."""
        return [set(os.listdir(folder)) - self._may_change for folder in self._folders]

    def check(self, data: bytes) -> None:
        self._journal.write_bytes(data)
        try:
            with self.files.locked():
                demand(not self._journal.exists(), "the journal was neither refused nor finished")
        except DamagedState:
            demand(self._journal.read_bytes() == data, "a journal that was refused has changed")
        demand(self.messages.read_bytes() == self.lines, "the lines have changed")
        demand(self._outside() == self._before, "files changed:", self._outside())
        if self.rng.random() < 0.01:
            self._clear_cursors()

    def _clear_cursors(self) -> None:
        """Remove the agents that journals made up, or there will be very many."""
        for folder in self._folders:
            demand((folder / "victim.txt").read_text() == "untouched", "a file outside was changed")
        for path in (self.session / "cursors").iterdir():
            path.unlink()


# ---- NATS ------------------------------------------------------------------------------------------


class NatsTarget(Target):
    """Both readers of `natswire`: however a stream is cut, it says the same, and nothing is made up."""

    words = (
        *(b"PUB a 5\r\nhello\r\n", b"PUB a 5\r\nhello\r\n" * 40, b"MSG a 1 5\r\nhello\r\n" * 40, b"PING\r\n"),
        *(
            b"HPUB a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
            b"SUB a 1\r\n",
            b"UNSUB 1 5\r\n",
            b"\r\n",
            b"\n",
            b" ",
            b"\t",
        ),
        *(b"-1", b"99999999", b"0", b"CONNECT {}\r\n", b"INFO {} \r\n", b"-ERR 'x'\r\n", b"+OK\r\n", b"\xff"),
    )
    corpus = (
        b'CONNECT {"verbose":false}\r\nPING\r\nSUB a.* g 1\r\nPUB a.b r 2\r\nhi\r\nUNSUB 1 2\r\nPONG\r\n',
        b"PUB a 5\r\nhello\r\n" * 50,
        b"PUB a 5\r\nhello\r\n" * 20 + b"PUB a 4\r\nfour\r\n" + b"PUB a 5\r\nhello\r\n" * 20,
        b"HPUB a r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n" * 3,
        b"INFO {\"proto\":1} \r\nMSG a 1 r 1\r\nx\r\nHMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n-ERR 'no'\r\n",
        b"MSG a 1 5\r\nhello\r\n" * 50,
        b"PUB a 5\r\nhello\r\nPUB a 4\r\nfour\r\nPUB b 0\r\n\r\nPUB a 6\r\nx\r\ny\r\n\r\n" * 20,
        b"MSG a 1 5\r\nhello\r\nMSG a 1 1\r\nx\r\nHMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n" * 20,
    )
    payload_bytes_max = 4096

    def check(self, data: bytes) -> None:
        for kind in (natswire.ClientReader, natswire.ServerReader):
            whole = self._read(kind(payload_bytes_max=self.payload_bytes_max), [data])
            cuts = sorted(self.rng.randrange(len(data) + 1) for _ in range(self.rng.randrange(6)))
            pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            demand(
                self._read(kind(payload_bytes_max=self.payload_bytes_max), pieces) == whole, "cut at", cuts
            )
            for number, command in enumerate(whole):
                self._check(data, command, is_last=number == len(whole) - 1)

    def _read(
        self, reader: natswire.ClientReader | natswire.ServerReader, pieces: Sequence[bytes]
    ) -> list[Any]:
        found: list[Any] = []
        for piece in pieces:
            for command in reader.feed(piece):
                if isinstance(command, natswire.Messages):
                    demand(command.bodies, "a frame without a body")
                    found += [(self._sized(command.head, body), body) for body in command.bodies]
                else:
                    found.append(command)
        return found

    @staticmethod
    def _sized(head: natswire.ControlLine, body: bytes) -> natswire.ControlLine:
        """Of bodies of several sizes the reader gives one head for all."""
        size = len(body) if head.size == natswire.ANY_SIZE else head.size
        return msgspec.structs.replace(head, size=size, before_sid=b"", after_sid=b"")

    def _check(self, data: bytes, command: Any, *, is_last: bool) -> None:
        if isinstance(command, tuple):
            head, body = command
            demand(len(body) == head.size <= self.payload_bytes_max, head, "with", len(body), "bytes")
            demand(head.header_bytes <= head.size, head)
            demand(body + b"\r\n" in data and head.subject in data, "was made up:", command)
        elif isinstance(command, natswire.ProtocolFault):
            demand(is_last, "something was read after a fault")
        elif isinstance(command, natswire.Connect):
            try:
                natswire.connect_options(command.options)
            except natswire.ProtocolBroken:
                return


# ---- the mail log ------------------------------------------------------------------------------------

SECRET = bytes(range(0x30, 0x30 + mail_records.SECRET_BYTES))
LATE_US = NOW_NS // 1_000 * 2
NUMBER = 1 << 32  # of the first start's first message
WRITTEN: tuple[mail_records.Record, ...] = (
    mail_records.Started(1),
    mail_records.Opened(
        1, "task.queue", public=True, named=True, desc="", ttl_s=0.0, created_us=1, expires_us=0, creator=""
    ),
    mail_records.Opened(
        2,
        "0b-7c",
        public=False,
        named=False,
        desc="",
        ttl_s=9.0,
        created_us=1,
        expires_us=LATE_US,
        creator="a",
    ),
    mail_records.Put(1, NUMBER, "critical", b"first", b"", 1),
    mail_records.Put(1, NUMBER + 1, "urgent", b"second" * 30, b"NATS/1.0\r\nA: b\r\n\r\n", 1),
    mail_records.Put(2, NUMBER + 2, "high", b"third", b"", 1, key="k", tags=("a", "b")),
    mail_records.Put(2, NUMBER + 3, "low", b"", b"", 1, due_us=LATE_US),
    mail_records.PutRow(1, NUMBER + 4, "normal", 1, [b"in a row", b"", b"again"]),
    mail_records.Removed(1, [NUMBER]),
    mail_records.Pulled(1, "g", 0, [0, NUMBER + 1, 0, 0], [NUMBER + 1]),
    mail_records.Extended(2, 7200.0, LATE_US + 1),
    mail_records.AgentRecord("ann", 5, b'{"name":"ann"}'),
    mail_records.MailboxExpired(3),
)
FRAMES = tuple(map(mail_records.Framing(SECRET).frame, WRITTEN))
TRUE_CHECKSUM_SHARE = 0.2


class MailLogTarget(_InFolder):
    """A segment of the mail log: a service that opens it holds exactly what was written."""

    corpus = (b"".join(FRAMES), b"".join(FRAMES[:5]), b"".join(FRAMES[3:9] * 2), *FRAMES)
    words = (*FRAMES[3:8], SECRET[:4], SECRET[:4] + b"\x05\0\0\0", b"\x9a\x04", b"\xc4\xff", b"\xdd\xff\xff")

    def input(self) -> bytes:
        """In some, what was changed has a checksum that fits."""
        self.forged = self.rng.random() < TRUE_CHECKSUM_SHARE
        if not self.forged:
            return super().input()
        body = mutated(self.rng, [frame[12:] for frame in FRAMES], self.words)
        return b"".join(FRAMES[:6]) + _framed(body) + b"".join(FRAMES[7:])

    def check(self, data: bytes) -> None:
        for item in mail_records.Framing(SECRET).scan(data):
            if isinstance(item, Damage):
                demand(item.length > 0 and item.offset + item.length <= len(data), item)
            else:
                demand(self.forged or item in WRITTEN, item, "was made up")
        (self.folder / f"mail-{SECRET.hex()}-00000001.log").write_bytes(data)
        service = MailService(self.folder, lambda _: None)
        try:
            self._check_service(service)
        finally:
            service.close()
            for path in self.folder.iterdir():
                path.unlink()

    def _check_service(self, service: MailService) -> None:
        puts = [record for record in WRITTEN if isinstance(record, mail_records.Put)]
        puts += [
            put for record in WRITTEN if isinstance(record, mail_records.PutRow) for put in record.puts()
        ]
        known = {(put.number, put.priority, put.payload, put.headers) for put in puts}
        for box in service._mailboxes.by_key.values():
            for letter in [*box.letters.values(), *box.delayed.values()]:
                shown = (letter.number, letter.priority, letter.payload, letter.headers)
                demand(self.forged or shown in known, shown, "was made up")


def _framed(body: bytes) -> bytes:
    """A body under a checksum that fits."""
    checksum = zlib.crc32(body, int.from_bytes(SECRET[4:], "little"))
    return struct.pack("<4sII", SECRET[:4], len(body), checksum) + body


CALLS = (
    (b"MAILBOX.CREATE", b"", b'{"ttl":3600,"public":true,"name":"task.queue","desc":"d","prefix":"p"}'),
    (b"MAILBOX.MSG.box.critical", b"", b"hello"),
    (b"MAILBOX.LIST.box", b"", b'{"payload":false}'),
    (b"MAILBOX.DELETE.box.1", b"", b""),
    (b"MAILBOX.EXTEND.box", b"", b'{"ttl":7200}'),
    (
        b"MSG.SEND.box",
        b"NATS/1.0\r\nmq9-priority: high\r\nmq9-key: k\r\nmq9-delay: 1\r\nmq9-ttl: 2\r\nmq9-tags: a,\r\n\r\n",
        b"hello",
    ),
    (
        b"MSG.FETCH.box",
        b"",
        b'{"group_name":"g","deliver":"from_time","from_time":1.5,"force_deliver":true,"config":{"num_msgs":2}}',
    ),
    (b"MSG.ACK.box", b"", b'{"group_name":"g","mail_address":"box","msg_id":1}'),
    (b"MSG.QUERY.box", b"", b'{"key":"k","tags":["a","b"],"since":1,"limit":2}'),
    (b"AGENT.REGISTER", b"", b'{"name":"ann","mailbox":"box","skills":[{"id":"x"}]}'),
    (b"AGENT.REGISTER", b"", b'{"name":"ann","mailbox":[1],"x":{"y":null}}'),
    (b"AGENT.REPORT", b"", b'{"name":"ben","report_info":{"load":1}}'),
    (b"AGENT.UNREGISTER", b"", b'{"mailbox":"ben.box"}'),
    (b"AGENT.DISCOVER", b"", b'{"text":"reviews code","semantic":"x","limit":1,"page":2}'),
)


class MailCallsTarget(Target):
    """A call of any dialect: answered at most once, in JSON, with no stranger's id, and all goes on."""

    corpus = tuple(b"\0".join(call) for call in CALLS)
    words = (
        *(
            b"null",
            b"-1",
            b"1e400",
            b"NaN",
            b"[]",
            b"{}",
            b'"\\ud800"',
            b"99999999999999999999",
            b"[" * 2_000,
        ),
        *(
            b"*",
            b">",
            b".",
            b"critical",
            b"g",
            b"box",
            b"\0",
            b"\r\n",
            b"inf",
            b"\xff",
            b'"name":',
            b'"mailbox":',
        ),
    )

    def check(self, data: bytes) -> None:
        subject, headers, payload = [*data.split(b"\0", 2), b"", b""][:3]
        soon: list[Callable[[], None]] = []
        service = MailService(None, soon.append, options=MailOptions(extend=True, receipts=True))
        asking, other = FakeLink(), FakeLink()
        for call, body in (
            ("MAILBOX.CREATE", b'{"name":"box","public":true}'),
            ("MAILBOX.CREATE", b"{}"),
            ("MAILBOX.MSG.box", b"x"),
            ("MSG.FETCH.box", b'{"group_name":"g","deliver":"earliest"}'),
            ("AGENT.REGISTER", b'{"name":"ben","mailbox":"ben.box"}'),
        ):
            service.published(other, f"$mq9.AI.{call}", "_INBOX.other", 0, [body])
        secret = json.loads(other.answers[1][1])["mail_id"].encode()
        for inbox in ("_INBOX.1", "_INBOX.2"):  # the second finds what the first has left
            text = f"$mq9.AI.{subject.decode('utf-8', 'replace')}"
            service.published(asking, text, inbox, len(headers), [headers + payload])
            service.tick()
        inboxes = [reply for reply, _ in asking.answers]
        demand(len(set(inboxes)) == len(inboxes), "was answered more than once")
        for _, answer in asking.answers:
            demand(isinstance(json.loads(answer), dict), answer)
            demand(secret not in answer, "a private id was shown")
        service.published(other, "$mq9.AI.MAILBOX.MSG.box", "_INBOX.after", 0, [b"x"])
        demand(b"msg_id" in other.answers[-1][1], "nothing can be sent afterwards")
        service.close()


# ---- names, times, settings --------------------------------------------------------------------------


class NameTarget(Target):
    """`checked_name`, which stands between every name and the file system."""

    words = (
        *(b"..", b"/", b"\\", b"\0", b"CON", b"\xef\xbc\x8e", b"\xd0\xb0", b"\n", b"%2e%2e", b"~", b"-"),
        *(b"." * 128, b"a" * 127),
    )
    corpus = (b"agent-a", b"m-17f2-aabbccdd-1", b"a.b_c-d", b"X" * 128, b"0", b"default")

    def check(self, data: bytes) -> None:
        name = data.decode("utf-8", "surrogateescape")
        safe = 1 <= len(name) <= 128 and set(name) <= NAME_LETTERS and name[0] not in "._-"
        try:
            result = names.checked_name("agent", name)
        except InvalidName:
            demand(not safe, repr(name), "was refused")
            return
        demand(safe and result == name, repr(name), "was allowed")


class TimeTarget(Target):
    """`parse_utc` and `normal_utc`."""

    words = (
        *(b"Z", b"+14:00", b"-23:59", b"+24:00", b".123456789", b"T", b"24:00:00", b"23:59:60", b"0000"),
        *(b"9999", b"\xd9\xa1", b"-12:00"),
    )
    corpus = (
        b"2026-11-15T01:01:12.326384Z",
        b"2026-02-28T23:59:59+14:00",
        b"0001-01-01T00:00:00Z",
        b"9999-12-31T23:59:59.999999999-12:00",
        b"2024-02-29 12:00:00.5z",
        b"1970-01-01t00:00:00-00:00",
    )

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        try:
            moment = times.parse_utc(text)
        except InvalidMessage:
            return
        demand(moment.tzinfo is UTC, repr(text), "became", moment)
        nanos = times.epoch_ns_of(moment)
        demand(times.parse_utc(times.utc_text(nanos)) == moment, repr(text), "does not come back")
        normal = times.normal_utc(text)
        demand(times.normal_utc(normal) == normal, repr(normal), "is not normal")
        demand(times.parse_utc(normal) == moment, repr(normal), "is another time than", repr(text))


class TomlTarget(_InFolder):
    """postroom.toml."""

    words = (
        *(
            b"[bus]\n",
            b"[queue]\n",
            b"[other]\n",
            b"[[bus]]\n",
            b"path = 5\n",
            b"rotate_bytes = -1\n",
            b"inf",
        ),
        *(b"nan", b'durability = "none"\n', b'root = ""\n', b'root = "\\u0000"\n', b"a.b.c = 1\n", b'"""'),
        *(b"2026-11-15", b"disabled = 1\n", b'"~nobody-here"', b"{}", b"true"),
    )
    corpus = (
        (
            b'[bus]\npath = "runs/messagebus.yaml"\nlock_timeout_s = 5\npoll_interval_s = 0.5\n'
            b'rotate_bytes = 10_000_000\ndurability = "group"\n'
        ),
        (
            b'[queue]\nroot = "~/queue"\nsession = "s"\nagent_id = "a"\nbody_threshold = 100\n'
            b'disabled = true\ndurability = "fsync"\n\n[bus]\npath = "/var/bus.yaml"\n'
        ),
    )

    def check(self, data: bytes) -> None:
        path = self.folder / "postroom.toml"
        path.write_bytes(data)
        try:
            settings = load(path, {"HOME": "/home/nobody"})
        except InvalidSetting:
            return
        _check_settings(settings)


class EnvironmentTarget(Target):
    """The environment variables, each with any text."""

    words = (b"true", b"1", b"0", b"yes", b"fsync", b"1e5", b"-1", b"\n", b"nan", b"inf", b"0x10", b"~")
    corpus = (b"runs/bus.yaml", b"10", b"0.2", b"10000000", b"group", b"s", b"true", b"0", b"/var/x")

    def __init__(self) -> None:
        super().__init__()
        rows = [*described(BusSettings), *described(QueueSettings)]
        self._variables = [variable for row in rows for variable in row.variables]
        self._variables += ["ZOS_HOME", "XDG_DATA_HOME", "HOME"]

    def check(self, data: bytes) -> None:
        text = data.replace(b"\0", b"?").decode("utf-8", "surrogateescape")  # no system allows a NUL there
        environ = {"HOME": "/home/nobody", self.rng.choice(self._variables): text}
        try:
            settings = load(None, environ)
        except InvalidSetting:
            return
        _check_settings(settings)


def _check_settings(settings: Settings) -> None:
    bus, queue = settings.bus, settings.queue
    for seconds in (bus.lock_timeout_s, bus.poll_interval_s):
        demand(isinstance(seconds, float) and 0 < seconds <= 86_400, seconds, "seconds")
    demand(bus.rotate_bytes is None or bus.rotate_bytes > 0, "rotate_bytes", bus.rotate_bytes)
    demand(isinstance(queue.body_threshold, int) and queue.body_threshold >= 0, queue.body_threshold)
    for durability in (bus.durability, queue.durability):
        demand(durability in ("os", "group", "fsync"), "durability", durability)
    demand(isinstance(queue.root, Path) and "\0" not in str(queue.root), "root", queue.root)
    demand(bus.path is None or "\0" not in str(bus.path), "path", bus.path)
    demand(type(queue.disabled) is bool, "disabled", queue.disabled)


def _bus_files(*groups: Sequence[bytes]) -> list[bytes]:
    """Whole files: every record alone, and some of all kinds in a row."""
    everything = [record for group in groups for record in group]
    rows = [b"\n".join(everything[start : start + 3]) for start in range(0, len(everything), 2)]
    return [*everything, *rows]


def _legacy_files() -> list[bytes]:
    return [b"".join(LEGACY), b"".join(LEGACY[:2]) + OURS[0], LEGACY[0] + OURS[7], *LEGACY]


TARGETS: dict[str, Callable[[], Target]] = {
    "bus-records": lambda: BusTarget(_bus_files(OURS)),
    "bus-foreign": lambda: BusTarget(_bus_files(FOREIGN, OURS[:2])),
    "bus-legacy": lambda: BusTarget(_legacy_files()),
    "yaml-header": YamlTarget,
    "queue-line": LineTarget,
    "cursor-files": CursorTarget,
    "journal": JournalTarget,
    "nats": NatsTarget,
    "mail-log": MailLogTarget,
    "mail-calls": MailCallsTarget,
    "names": NameTarget,
    "times": TimeTarget,
    "settings-toml": TomlTarget,
    "settings-environment": EnvironmentTarget,
}
