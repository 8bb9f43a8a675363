"""A process that works beside ours, is started again when it dies, and never outlives us.

It holds the reading end of a pipe of ours as its stdin: however we end, that ends too, and it takes the hint.
"""

import logging
import subprocess
import threading
from collections.abc import Sequence

PAUSE_S = 1.0  # before it is started again, doubled each time
PAUSE_S_MAX = 30.0
STOP_GRACE_S = 10.0

_log = logging.getLogger("postroom.audit")


class Supervisor:
    """Keeps a command running until `stop`. What it says on stderr is logged; its stdout is not read."""

    def __init__(self, command: Sequence[str], *, pause_s: float = PAUSE_S) -> None:
        self._command = list(command)
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
        """Ask it to end, which lets it finish what it holds; after a while it is killed."""
        with self._mutex:
            self._stopping.set()
            process = self._process
        if process is not None:
            _end(process)
        self._thread.join()

    def _keep_running(self) -> None:
        pause_s = self._pause_s
        while (process := self._started()) is not None:
            code = _heard_out(process)
            if self._stopping.is_set():
                return
            self.restarts += 1
            _log.warning("the shipper ended with %d, and is started again in %g s", code, pause_s)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._mutex:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            return self._process


def _heard_out(process: subprocess.Popen[bytes]) -> int:
    """Log what it says until it ends; its exit code."""
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
