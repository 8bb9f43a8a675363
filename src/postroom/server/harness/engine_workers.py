"""Worker processes of an engine: started, watched, scaled and stopped.

Rule 1: a worker that dies is noticed within a second. Its leases end at once, and it is started again.
Rule 2: the number of workers follows backpressure (`backpressure.wanted_workers`): up at most every 10 s,
        down at most every 60 s.
Rule 3: at SIGTERM no worker claims any more. Running handlers have 30 s to finish; the rest is released.
"""

import importlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from postroom.core.lifecycle.backpressure import wanted_workers
from postroom.engine.inspection import EngineStatus, promoted_share, status_of
from postroom.engine.rules.operations import Operations
from postroom.engine.work.worker import DRAIN_S, new_worker_id
from postroom.errors import InvalidSetting, PostroomError
from postroom.goals.engine import Engine
from postroom.system.heartbeat import HEARTBEAT
from postroom.system.log import library_log

_log = library_log("postroom.engine")

LOOK_S: Final = 0.2
SCALE_LOOK_S: Final = 1.0
RESTART_PAUSE_S: Final = 0.5  # doubled after each further early death
RESTART_PAUSE_S_MAX: Final = 30.0
HEALTHY_S: Final = 10.0  # a worker that ran for at least this long is restarted at once
KILL_AFTER_S: Final = DRAIN_S + 5.0


def load_app(name: str) -> Engine:
    """The engine that `module:attribute` names. The module is looked for in the current folder, too."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InvalidSetting(f"an app is named as module:engine, not {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except PostroomError:
        raise
    except Exception as error:  # the module is the caller's, and may raise anything
        raise InvalidSetting(f"app {name} cannot be loaded: {_cause(error)}") from error
    if not isinstance(found, Engine):
        raise InvalidSetting(f"{name} is not an Engine but {type(found).__name__}")
    return found


def _cause(error: Exception) -> str:
    is_plain = isinstance(error, ImportError | AttributeError)  # their text says what is missing
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


class _Child(msgspec.Struct):
    worker_id: str
    process: "subprocess.Popen[bytes]"
    started: float
    is_ending: bool = False


class WorkerProcesses:
    """The worker processes of one engine on this machine."""

    def __init__(
        self,
        engine: Engine,
        command: Callable[[str], Sequence[str]],
        *,
        least: int = 1,
        most: int | None = None,
        on_drain: Callable[[int], None] = lambda _: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`on_drain` is called with the number of messages in flight when the workers begin to end."""
        if engine.store.url.startswith("memory:"):
            raise InvalidSetting("worker processes need a store in a file: memory:// belongs to one process")
        self._engine = engine
        self._command = command
        self._on_drain = on_drain
        self._environment = environment
        self._least = least
        self._most = max(least, engine.policy.backpressure.max_workers if most is None else most)
        self._children: list[_Child] = []
        self._stopping = threading.Event()
        self._wanted = least
        self._deaths = 0
        self._start_after = 0.0
        self._scaled = time.monotonic()
        self._idle_since = time.monotonic()

    @property
    def count(self) -> int:
        """The number of running workers that are not being stopped."""
        return sum(not child.is_ending for child in self._children)

    def stop(self) -> None:
        """End all workers and return from `run`."""
        self._stopping.set()

    def run(self) -> None:
        """Keep the wanted number of workers running until `stop`."""
        looked = 0.0
        try:
            while not self._stopping.is_set():
                HEARTBEAT.beat()
                self._reap()
                now = time.monotonic()
                if now >= looked + SCALE_LOOK_S:
                    looked = now
                    self._scale(now)
                self._adjust(now)
                self._stopping.wait(LOOK_S)
        finally:
            self._end_all()

    # ---- scaling -------------------------------------------------------------------------------

    def _status(self) -> EngineStatus:
        policy = self._engine.policy
        return self._engine.store.read(
            lambda found: status_of(Operations(found, policy), policy, with_idle=False)
        )

    def _scale(self, now: float) -> None:
        try:
            status = self._status()
        except PostroomError as error:
            _log.warning("the state of the queue cannot be read: %s", error)
            return
        if status.stage:
            self._idle_since = now
        rule = msgspec.structs.replace(self._engine.policy.backpressure, max_workers=self._most)
        wanted = wanted_workers(
            self._wanted,
            status.stage,
            promoted_share(status.workers, status.depth),
            now - self._idle_since,
            now - self._scaled,
            rule,
            self._least,
        )
        if wanted != self._wanted:
            _log.info("workers: %d -> %d (stage %d)", self._wanted, wanted, status.stage)
            self._wanted, self._scaled = wanted, now

    def _adjust(self, now: float) -> None:
        while self.count < self._wanted and now >= self._start_after:
            self._start(now)
        surplus = self.count - self._wanted
        for child in reversed(self._children):
            if surplus > 0 and not child.is_ending:
                child.is_ending = True
                child.process.terminate()
                surplus -= 1

    # ---- processes -----------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        worker_id = new_worker_id()
        process = subprocess.Popen(  # noqa: S603 - our own program
            list(self._command(worker_id)), stdin=subprocess.PIPE, env=self._environment
        )
        self._children.append(_Child(worker_id, process, now))

    def _reap(self) -> None:
        for child in list(self._children):
            code = child.process.poll()
            if code is None:
                continue
            self._children.remove(child)
            if code == 0:
                continue
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            _log.warning("worker %s died (%s); its messages are put back", child.worker_id, how)
            self._put_back(child)
            now = time.monotonic()
            self._deaths = 1 if now >= child.started + HEALTHY_S else self._deaths + 1
            pause_s = min(RESTART_PAUSE_S * 2 ** (self._deaths - 1), RESTART_PAUSE_S_MAX)
            self._start_after = now + (0.0 if self._deaths == 1 else pause_s)

    def _put_back(self, child: _Child) -> None:
        try:
            self._engine.blocking.put_back(child.worker_id)
        except PostroomError as error:
            _log.warning("the messages of worker %s wait for their leases: %s", child.worker_id, error)

    def _end_all(self) -> None:
        worker_ids = {child.worker_id for child in self._children}
        read = self._engine.core.commits.read(lambda operations: operations.in_flight(worker_ids))
        with suppress(PostroomError):
            self._on_drain(self._engine.blocking.wait(read))
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + KILL_AFTER_S
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.returncode:  # else it has finished or released its messages
                self._put_back(child)


def default_command(app: str, store: str = "") -> Callable[[str], Sequence[str]]:
    """The command line of a worker process. `store` replaces the store that the app opens."""
    where = ("--store", store) if store else ()
    return lambda worker_id: (
        sys.executable, "-m", "postroom.cli.main", "engine", "work", "--app", app, *where,
        "--as-worker", worker_id, "--while-stdin",
    )  # fmt: skip
