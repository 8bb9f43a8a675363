"""The parts of `postroom up`: one process each, supervised, with their states in a file of the data folder.

Rule 1: a part that dies is restarted with a growing pause. Meanwhile the server says that it is degraded.
Rule 2: a part that has not beaten for `BEAT_LATE_S` is degraded, too. It goes on, because it may be at work.
Rule 3: the parts end when this process ends, in any way.
Rule 4: every line of a part's log is one JSON object on stderr, with the name of the part. The lines of a
        start are held back until all parts are ready: a start that fails prints one line.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from postroom.core.door import leaving_facts
from postroom.errors import Unavailable, WriteFailed
from postroom.server.up.supervisor import State, Supervisor
from postroom.stores.disk_reserve import with_control_reserve
from postroom.system.atomic import replace_file

STATES_FILE = "up.json"
LOCK_FILE = "up.lock"
READY_TIMEOUT_S = 30.0
READY_CHECK_S = 0.02
CHECK_EVERY_S = 0.5
BEAT_LATE_S = 15.0  # without a beat, after which a part counts as hung
LOG_LINE_CHARS_MAX = 10_000
LOG_LINES_HELD_MAX = 1_000  # of a start
ENDED = "ended"

_encode = msgspec.json.Encoder().encode


class PartCommand(msgspec.Struct, frozen=True):
    """A command that runs as a part. The first line of its output is JSON and says that it is ready."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    """The parts that have to be ready before this one starts."""
    is_silent: bool = False
    """Whether it prints no such line, and counts as ready once it runs."""
    beats: bool = True
    """Whether it gives signs of life. One that does not is never hung."""


class PartState(msgspec.Struct, frozen=True):
    """One part, as the file of states has it."""

    state: State
    restarts: int
    pid: int | None
    is_hung: bool = False
    """Whether it runs, and has not beaten for `BEAT_LATE_S`."""

    @property
    def shown(self) -> str:
        """The state in one word."""
        return "hung" if self.is_hung else self.state

    @property
    def fault(self) -> str:
        """Why the part is degraded; empty when it is not."""
        if self.is_hung:
            return f"hung: it has given no sign of life for {BEAT_LATE_S:g} s"
        return "" if self.state in ("running", "starting") else f"{self.state} after {self.restarts} failures"


class States(msgspec.Struct, frozen=True):
    """The file of states."""

    pid: int
    """Of the process that supervises the parts."""
    parts: dict[str, PartState]


class SupervisedParts:
    """Starts the parts, watches them, and stops them."""

    def __init__(
        self,
        data: Path,
        parts: Sequence[PartCommand],
        *,
        stop_grace_s: float,
        environment: Mapping[str, str] | None = None,
        beat_late_s: float = BEAT_LATE_S,
    ) -> None:
        self._data = data
        self._beat_late_s = beat_late_s
        self._parts = {part.name: part for part in parts}
        self._ready: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._log_mutex = threading.Lock()
        self._written: States | None = None
        self._last_text: dict[str, str] = {}
        self._held: list[dict[str, Any]] | None = []
        """The log of a start that is under way; None when the log is written at once."""
        self._stop_grace_s = stop_grace_s
        self._environment = environment
        self._supervisors = {part.name: self._supervisor(part) for part in parts}

    def _supervisor(self, part: PartCommand) -> Supervisor:
        return Supervisor(
            part.command,
            name=part.name,
            stop_grace_s=self._stop_grace_s,
            on_output=None if part.is_silent else self._note_ready(part.name),
            on_log=self._log_line(part.name),
            on_exit=lambda code: self._write_log(
                {"ts": _now(), "part": part.name, "event": ENDED, "exit_code": code}
            ),
            environment=self._environment,
        )

    def start(self, is_stopping: Callable[[], bool]) -> Mapping[str, dict[str, Any]]:
        """Start all parts, unless a stop comes first. Returns the facts that each printed when ready."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        waiting = dict(self._parts)
        while (waiting or not all(map(self._is_ready, self._parts))) and not is_stopping():
            for part in [part for part in waiting.values() if all(map(self._is_ready, part.after))]:
                del waiting[part.name]
                self._supervisors[part.name].start()
            self._raise_first_failure()
            with self._changed:
                self._changed.wait(READY_CHECK_S)
            if time.monotonic() > deadline:
                self._write_held()
                missing = ", ".join(name for name in self._parts if not self._is_ready(name))
                raise Unavailable(f"not ready within {READY_TIMEOUT_S:g} s: {missing}")
        self._write_held()
        self.write_states()
        return self._ready

    def add(self, part: PartCommand) -> None:
        """Start a further part, which needs the addresses of the others."""
        self._parts[part.name] = part
        self._supervisors[part.name] = self._supervisor(part)
        self._supervisors[part.name].start()
        self.write_states()

    def _raise_first_failure(self) -> None:
        """A part that ends before it was ready once has a wrong option or port. A restart would not help."""
        for name, supervisor in self._supervisors.items():
            if supervisor.restarts and not self._is_ready(name):
                log = [line for line in self._held or () if line["part"] == name]
                said = [line for line in log if line.get("event") != ENDED]
                if len(said) != 1:  # such as a traceback: the sentence alone would hide the rest
                    self._write_held()
                why = self._last_text.get(name, "see the log above")
                raise Unavailable(f"the part {name} cannot start: {why}")

    def _is_ready(self, name: str) -> bool:
        supervisor = self._supervisors[name]
        return name in self._ready or (self._parts[name].is_silent and supervisor.state == "running")

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Keep the file of states up to date until `stopped`."""
        while not stopped(CHECK_EVERY_S):
            self.write_states()

    def stop(self) -> None:
        """Stop all parts at the same time, and remove the file of states."""
        for supervisor in self._supervisors.values():
            supervisor.ask_to_stop()
        for supervisor in self._supervisors.values():
            supervisor.stop()
        (self._data / STATES_FILE).unlink(missing_ok=True)

    def write_states(self) -> None:
        """Write the states, when they changed."""
        parts = {}
        for name, supervisor in self._supervisors.items():
            is_late = supervisor.silent_s() > self._beat_late_s  # also reads the beats
            is_hung = is_late and self._parts[name].beats and supervisor.state == "running"
            parts[name] = PartState(supervisor.state, supervisor.restarts, supervisor.pid, is_hung)
        states = States(os.getpid(), parts)
        if states != self._written:
            path, data = self._data / STATES_FILE, _encode(states)
            with suppress(WriteFailed):  # written again at the next check: a full disk stops no part
                with_control_reserve(self._data, lambda: replace_file(path, data, "os"))
                self._written = states

    def _note_ready(self, name: str) -> Callable[[str], None]:
        def note(line: str) -> None:
            try:
                facts = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                facts = {"output": line[:LOG_LINE_CHARS_MAX]}
            self._supervisors[name].command = with_port(self._parts[name].command, facts.get("url"))
            with self._changed:
                self._ready.setdefault(name, facts)
                self._changed.notify_all()

        return note

    def _log_line(self, name: str) -> Callable[[str], None]:
        def write(line: str) -> None:
            try:
                facts = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                text = line[:LOG_LINE_CHARS_MAX]
                facts = {"ts": _now(), "event": "log", "text": text}
                self._last_text[name] = text.removeprefix("postroom: ")
            self._write_log({"part": name, **facts})

        return write

    def log(self, text: str) -> None:
        """Write a line of `up` itself."""
        self._write_log({"ts": _now(), "part": "up", "event": "log", "text": text})

    def _write_log(self, facts: dict[str, Any]) -> None:
        with self._log_mutex:
            if self._held is not None and len(self._held) < LOG_LINES_HELD_MAX:
                self._held.append(facts)
                return
            self._write_lines([*(self._held or ()), facts])

    def _write_held(self) -> None:
        """Write the log of the start. From now on, lines are written at once."""
        with self._log_mutex:
            self._write_lines(self._held or ())

    def _write_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        self._held = None
        sys.stderr.write("".join(_encode(leaving_facts(facts)).decode() + "\n" for facts in lines))
        sys.stderr.flush()


def _now() -> str:
    """The time as the logs of the servers write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def with_port(command: Sequence[str], url: str | None) -> list[str]:
    """The command with the port that it has now: a restarted part keeps its address."""
    port = None if url is None else urlsplit(url).port
    if port is None or "--port" not in command:
        return [*command]
    place = command.index("--port") + 1
    return [*command[:place], str(port), *command[place + 1 :]]


def read_states(data: Path) -> States | None:
    """The file of states; None without one, so when `up` does not run. It is left when `up` is killed."""
    try:
        return msgspec.json.decode((data / STATES_FILE).read_bytes(), type=States)
    except (OSError, msgspec.MsgspecError):
        return None


def part_states(data: Path) -> dict[str, PartState]:
    """The parts of `postroom up` by name; empty when `up` does not run."""
    states = read_states(data)
    return {} if states is None else states.parts
