"""Runs a child process, restarts it when it dies, and makes sure that it does not outlive this process.

The stdin of the child is a pipe from this process. When this process ends in any way, the child reads the end
of the pipe and stops. A program that does not know this (`is_foreign`) is killed.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Literal

from postroom.system.heartbeat import VARIABLE, Pulse
from postroom.system.log import library_log
from postroom.system.parent import die_with_parent

PAUSE_S = 1.0  # before a restart, doubled each time
PAUSE_S_MAX = 30.0
STEADY_S = 60.0  # after this time without a failure, the next restart is quick again
STOP_GRACE_S = 10.0

State = Literal["starting", "running", "restarting", "stopped"]

_log = library_log("postroom.supervisor")


class Supervisor:
    """Keeps a command running until `stop`.

    `on_output` gets each line of its stdout, `on_log` each line of its stderr, and `on_exit` its exit code
    before a restart. Without them, stdout is not read, and stderr and restarts are logged.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "the process",
        pause_s: float = PAUSE_S,
        stop_grace_s: float = STOP_GRACE_S,
        on_output: Callable[[str], None] | None = None,
        on_log: Callable[[str], None] | None = None,
        on_exit: Callable[[int], None] | None = None,
        environment: Mapping[str, str] | None = None,
        is_foreign: bool = False,
    ) -> None:
        self.name = name
        self._environment = environment
        self._is_foreign = is_foreign
        self.state: State = "starting"
        self.restarts = 0
        self.command = list(command)
        """The next start uses it."""
        self._pause_s = pause_s
        self._stop_grace_s = stop_grace_s
        self._on_output = on_output
        self._on_log = on_log or (lambda line: _log.warning("%s", line))
        self._on_exit = on_exit
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pulse: Pulse | None = None
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name=f"postroom-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def silent_s(self) -> float:
        """For how long the process has not beaten; 0 for one that does not run."""
        with self._mutex:
            return 0.0 if self._pulse is None else self._pulse.silent_s(time.monotonic())

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process, and do not restart it."""
        with self._mutex:
            self._stopping.set()
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def stop(self) -> None:
        """Terminate the process, and kill it after `stop_grace_s`."""
        self.ask_to_stop()
        process = self._process
        if process is not None:
            try:
                process.wait(self._stop_grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join()
        self.state = "stopped"

    def _keep_running(self) -> None:
        pause_s = self._pause_s
        while (process := self._start_process()) is not None:
            started = time.monotonic()
            code = self._follow(process)
            if self._stopping.is_set():
                return
            if time.monotonic() - started >= STEADY_S:
                pause_s = self._pause_s
            self.restarts += 1
            self.state = "restarting"
            if self._on_exit is not None:
                self._on_exit(code)
            else:
                _log.warning("%s ended with %d and is restarted in %g s", self.name, code, pause_s)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _start_process(self) -> subprocess.Popen[bytes] | None:
        with self._mutex:
            if self._stopping.is_set():
                return None
            output = subprocess.DEVNULL if self._on_output is None else subprocess.PIPE
            self._pulse = pulse = Pulse(time.monotonic())
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.PIPE,
                    env={**(self._environment or os.environ), VARIABLE: str(pulse.writing)},
                    pass_fds=(pulse.writing,),
                    preexec_fn=die_with_parent if self._is_foreign else None,  # noqa: PLW1509 - it only calls the system
                )
            finally:
                pulse.started()
            if self._on_output is None:
                self.state = "running"
            return self._process

    def _follow(self, process: subprocess.Popen[bytes]) -> int:
        """Read the output of a process until it ends. Returns its exit code."""
        with process:
            reader = threading.Thread(target=self._read_output, args=(process.stdout,), daemon=True)
            reader.start()
            for line in process.stderr or ():
                self._on_log(_text(line))
            reader.join()
        with self._mutex:
            pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.close()
        return process.returncode

    def _read_output(self, output: IO[bytes] | None) -> None:
        for line in output or ():
            self.state = "running"  # the first line says that it is ready
            if self._on_output is not None:
                self._on_output(_text(line))


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip()
