"""Runs a child process, restarts it when it dies, and makes sure that it does not outlive this process.

The stdin of the child is a pipe from this process. When this process ends in any way, the child reads the end
of the pipe and stops.
"""

import logging
import subprocess
import threading
from collections.abc import Mapping, Sequence

PAUSE_S = 1.0  # before a restart, doubled each time
PAUSE_S_MAX = 30.0
STOP_GRACE_S = 10.0

_log = logging.getLogger("postroom.audit")


class Supervisor:
    """Keeps a command running until `stop`. Its stderr is logged; its stdout is not read."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pause_s: float = PAUSE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name="postroom-supervisor", daemon=True)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Terminate the process, and kill it after `STOP_GRACE_S`."""
        with self._mutex:
            self._stopping.set()
            process = self._process
        if process is not None:
            _end(process)
        self._thread.join()

    def _keep_running(self) -> None:
        pause_s = self._pause_s
        while (process := self._start_process()) is not None:
            code = _log_until_exit(process)
            if self._stopping.is_set():
                return
            self.restarts += 1
            _log.warning("%s ended with %d and is restarted in %g s", self._command[0], code, pause_s)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _start_process(self) -> subprocess.Popen[bytes] | None:
        with self._mutex:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=self._environment,
            )
            return self._process


def _log_until_exit(process: subprocess.Popen[bytes]) -> int:
    """Log the stderr of a process until it ends. Returns its exit code."""
    with process:
        for line in process.stderr or ():
            _log.warning("%s", line.decode("utf-8", "replace").rstrip())
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
