"""`postroom mail serve` as a real process."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import warmpython
from tests.waiting import HANG_GUARD_S


class MailServer:
    """A server of a data folder. Ended and started again, it listens on the same port."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self._options = options
        self._port = "0"
        self.start()

    def start(self) -> None:
        words = ["mail", "serve", "--data", str(self.data), "--port", self._port, *self._options]
        self.process = warmpython.popen(
            [sys.executable, "-W", "error", "-m", "postroom.cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.facts: dict[str, Any] = json.loads(line)
        self.url = str(self.facts["url"])
        self._port = self.url.rpartition(":")[2]

    @property
    def port(self) -> int:
        return int(self._port)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and the output on stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=HANG_GUARD_S)
        return self.process.returncode, errors.decode()

    def events(self) -> list[dict[str, Any]]:
        whole, _, _ = (self.data / "events.jsonl").read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def serving(data: Path, *options: str) -> Iterator[MailServer]:
    server = MailServer(data, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()
