"""Hostile input for the real commands of the audit stream.

Every source gets valid events and, between them, lines that are made to break a reader. Every valid event has
to be in the stream once, every other line has to be reported, and no command may end with a traceback, hang
or need much memory. Then the stream itself is attacked: it is forged, wiped, truncated and replaced.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from postroom import Bus, Queue, Tasks
from postroom.errors import EXIT_OK, EXIT_RUNTIME
from tests.crash.ledger import Tally
from tests.crash.memory import peak_mb
from tests.waiting import HANG_GUARD_S

COMMAND = Path(sys.executable).parent / "postroom"
EVENTS = 2_000  # valid events of each file
MEMORY_MB_MAX = 400  # of one command, which reads a window of a file at a time
KILLS = 5
LOOK_S = 0.005  # between two measurements of a command's memory
DEPTHS = (101, 500, 900, 990, 1_100, 20_000, 400_000)
REFUSALS = (
    ("--bus", "missing.yaml"),
    ("--queue", "missing"),
    ("--mail", "missing"),
    ("--data", "missing"),
    ("--store", "sqlite:///missing.db"),
    ("--store", "nonsense://x"),
    (),
)


class Done(NamedTuple):
    """The end of a command."""

    code: int
    out: bytes
    errors: str


class Attack:
    """One folder with sources and a stream, and the findings about them."""

    def __init__(self, folder: Path, seed: int, events: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.events = events
        self.tally = Tally()
        self.good: set[str] = set()
        self.bad = 0
        self.memory_mb = 0

    # ---- commands ----------------------------------------------------------------------------------

    def run(self, *arguments: str) -> Done:
        """Run a command to its end. A traceback or too much memory breaks a rule."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = self.start(*arguments, out=out.fileno(), errors=errors.fileno())
            code = self.wait(process, arguments)
            out.seek(0)
            errors.seek(0)
            done = Done(code, out.read(), errors.read().decode("utf-8", "replace"))
        if "Traceback" in done.errors or "unexpected " in done.errors:
            self.tally.breaks(f"{' '.join(arguments)} ended with {done.errors.strip()[-300:]}")
        return done

    def start(self, *arguments: str, out: int, errors: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([COMMAND, *arguments], cwd=self.folder, stdout=out, stderr=errors)

    def wait(self, process: "subprocess.Popen[bytes]", arguments: tuple[str, ...]) -> int:
        deadline = time.monotonic() + HANG_GUARD_S
        while True:
            self.memory_mb = max(self.memory_mb, peak_mb(process.pid))
            code = process.poll()
            if code is not None:
                return code
            if time.monotonic() > deadline:
                process.kill()
                self.tally.breaks(f"{' '.join(arguments)} did not end within {HANG_GUARD_S:g} seconds")
                deadline += HANG_GUARD_S
            time.sleep(LOOK_S)

    def ship(self) -> Done:
        return self.run(*self.ship_arguments(), "--once")

    @staticmethod
    def ship_arguments() -> tuple[str, ...]:
        sources = ("--mail", "mail", "--queue", "queue", "--bus", "bus.yaml", "--data", "run")
        return ("audit", "ship", *sources, "--to", "audit")

    # ---- sources -----------------------------------------------------------------------------------

    def make_sources(self) -> None:
        for name in ("mail", "run"):
            (self.folder / name).mkdir()
        self._write_lines(self.folder / "mail" / "events.jsonl", self._mail_line)
        with Queue(self.folder / "queue") as queue:
            self.good.add(queue.send(session="s", topic="status", sender="a", body="1"))
        self._write_lines(self.folder / "queue" / "audit.jsonl", self._queue_line)
        with Bus(self.folder / "bus.yaml") as bus:
            for number in range(20):
                self.good.add(bus.append(type="note", project_id="p", body=f"{number}"))
        with (self.folder / "bus.yaml").open("ab") as file:
            file.write(b"---\nmsg_id: " + b"[" * 50_000 + b"\n---\n\xff\x00\n")
        with Tasks.open(f"sqlite:///{self.folder}/run/queue.db") as tasks:
            for depth in (10, 100, 120):
                self.good.add(tasks.enqueue(agent="ada", payload=json.loads("[" * depth + "]" * depth)))
            [task] = tasks.claim(agent="ada")
            tasks.fail(task.task_id, task.lease, "{" * 5_000, error_type="Deep")

    def _write_lines(self, path: Path, line: Callable[[int], bytes]) -> None:
        with path.open("ab") as file:
            for number in range(self.events):
                file.write(line(number))
                if self.rng.random() < 20 / self.events:
                    file.write(self.rng.choice(list(self._hostile_lines(path))))
                    self.bad += 1
            for hostile in self._hostile_lines(path):
                file.write(hostile)
                self.bad += 1
            file.write(line(self.events))

    def _mail_line(self, number: int) -> bytes:
        self.good.add(f"q/{number}")
        event = {"kind": "created", "ts_us": 1_770_000_000_000_000 + number, "message_id": f"q/{number}"}
        return json.dumps(event).encode() + b"\n"

    def _queue_line(self, number: int) -> bytes:
        self.good.add(f"m{number}")
        event = {"ts": "2026-02-05T14:30:52Z", "op": "send", "session": "s", "msg_id": f"m{number}"}
        return json.dumps(event).encode() + b"\n"

    @staticmethod
    def _hostile_lines(path: Path) -> Iterator[bytes]:
        """Lines that cannot be events."""
        start = (
            b'{"kind":"created","ts_us":1,"detail":{"x":' if path.name == "events.jsonl" else b'{"x":{"x":'
        )
        for depth in DEPTHS:
            yield start + b"[" * depth + b"]" * depth + b"}}\n"
            yield start + b'{"a":' * depth + b"1" + b"}" * depth + b"}}\n"
            yield b"[" * depth + b"\n"
        yield b'{"kind":"created","ts_us":' + b"9" * 6_000 + b"}\n"
        yield b'{"kind":"created","ts_us":99999999999999999999,"ts":"9999999999"}\n'
        yield b'{"kind":"nothing","ts_us":1,"op":"nothing"}\n'
        yield b'{"kind":"created","ts_us":1,"queue":"\xff\xfe"}\n'
        yield b"\x00" * 100 + b"\n"
        yield b"\n"

    # ---- what is looked at ---------------------------------------------------------------------------

    def check_stream(self) -> None:
        """Every valid event is stored once, every invalid line is reported, and readers reach the end."""
        done = self.run("audit", "query", "audit")
        events = [json.loads(line) for line in done.out.splitlines()]
        stored = Counter(event.get("message_id", "") for event in events if event["kind"] == "created")
        self.tally.acknowledged = len(self.good)
        self.tally.lost = len(self.good - stored.keys())
        ids = Counter(event["event_id"] for event in events)
        self.tally.doubled = sum(count - 1 for count in ids.values())
        alerts = sum(event.get("error_type") == "UnreadableLine" for event in events)
        if alerts < self.bad:
            self.tally.breaks(f"{self.bad} bad lines were written, and {alerts} are reported")
        self.tally.count("refused", alerts)
        for command in (("audit", "tail", "audit", "-n", "50"), ("audit", "verify", "audit")):
            if self.run(*command).code != EXIT_OK:
                self.tally.breaks(f"{' '.join(command)} failed on a stream that is whole")

    def forge_segments(self) -> None:
        """Foreign bytes in the open segment: readers and the next shipper skip and report them."""
        with Tasks.open(f"sqlite:///{self.folder}/run/queue.db") as tasks:
            self.good.add(tasks.enqueue(agent="ada", payload=1))
        forged = self.folder / "audit" / "_open"
        last = max((int(path.name[:8]) for path in self.folder.glob("audit/_index/*.idx")), default=0)
        with (forged / f"{last + 1:08}.jsonl").open("ab") as file:
            lines = list(self._hostile_lines(Path("events.jsonl")))
            file.writelines(line for line in lines if b"\x00" not in line)
        reported = self.run("audit", "tail", "audit").errors.count("is skipped")
        if not reported:
            self.tally.breaks("no reader reported the forged lines of a segment")
        self.tally.count("refused", reported)
        if self.ship().code != EXIT_OK:
            self.tally.breaks("a shipper does not go on behind forged lines")

    def kill_shippers(self, kills: int) -> None:
        """The next shipper continues the stream of a killed one."""
        for _ in range(kills):
            with Tasks.open(f"sqlite:///{self.folder}/run/queue.db") as tasks:
                self.good |= {tasks.enqueue(agent="ada", payload=number) for number in range(50)}
            with (self.folder / "out").open("wb") as out:
                process = self.start(*self.ship_arguments(), out=out.fileno(), errors=out.fileno())
                time.sleep(self.rng.uniform(0.1, 1.5))
                process.kill()
                process.wait()
            self.tally.count("kills")

    def refuse(self) -> None:
        """A refused shipper leaves no files."""
        for arguments in REFUSALS:
            done = self.run("audit", "ship", *arguments, "--to", "nothing", "--once")
            if done.code == EXIT_OK or len(done.errors.splitlines()) != 1:
                self.tally.breaks(f"audit ship {' '.join(arguments)} said {done.errors!r}")
            if (self.folder / "nothing").exists():
                self.tally.breaks(f"audit ship {' '.join(arguments)} left a folder")

    def spoil(self) -> None:
        """`verify` reports a folder that lost its end, and no shipper continues it."""
        whole = self.folder / "whole"
        shutil.copytree(self.folder / "audit", whole)
        for attack in (self._wipe, self._cut, self._begin_anew):
            shutil.rmtree(self.folder / "audit")
            shutil.copytree(whole, self.folder / "audit")
            attack(self.folder / "audit")
            done = self.run("audit", "verify", "audit")
            if done.code != EXIT_RUNTIME:
                self.tally.breaks(f"verify passed a folder after {attack.__name__}")
            if self.ship().code == EXIT_OK:
                self.tally.breaks(f"a shipper went on after {attack.__name__}")

    @staticmethod
    def _wipe(stream: Path) -> None:
        for path in stream.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @staticmethod
    def _cut(stream: Path) -> None:
        chain = stream / "_chain.jsonl"
        lines = chain.read_bytes().splitlines(keepends=True)
        chain.write_bytes(b"".join(lines[:-1]))
        last = json.loads(lines[-1])
        (stream / last["name"]).unlink()
        (stream / "_index" / f"{last['n']:08}.idx").unlink()

    def _begin_anew(self, stream: Path) -> None:
        self._wipe(stream)
        (self.folder / "audit.head").rename(self.folder / "noted")
        self.run("audit", "ship", "--bus", "bus.yaml", "--to", "audit", "--once")
        (self.folder / "noted").replace(self.folder / "audit.head")


def run(
    count: int, seed: int, tick: Callable[[int], None], *, events: int = EVENTS, thorough: bool = True
) -> Tally:
    """Rounds, each in its own folder. A quick run leaves out attacks that other tests cover."""
    tally = Tally()
    memory_mb = 0
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="attack-audit-") as folder:
            attack = Attack(Path(folder), seed + number, events)
            attack.make_sources()
            if attack.ship().code != EXIT_OK:
                attack.tally.breaks("hostile lines end the shipper")
            if thorough:
                attack.kill_shippers(KILLS)
            attack.forge_segments()
            attack.check_stream()
            if thorough:
                attack.refuse()
                attack.spoil()
            memory_mb = max(memory_mb, attack.memory_mb)
            tally.add(attack.tally)
        tick(1)
    if memory_mb > MEMORY_MB_MAX:
        tally.breaks(f"a command needed {memory_mb} MB, and {MEMORY_MB_MAX} are allowed")
    tally.count("memory_mb", memory_mb)
    return tally
