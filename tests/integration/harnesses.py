"""A harness as a real process, for tests of its clients."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from postroom import Tasks
from postroom.client import TaskClient
from postroom.server.access.registry import Agents
from tests.integration.commandline import start
from tests.waiting import HANG_GUARD_S

LOOK_EVERY_S = 0.01


class Harness:
    """`postroom tasks serve` on a data folder. It can be killed, and started again at the same address."""

    def __init__(self, data: Path, *options: object, urls: Mapping[str, str] = MappingProxyType({})) -> None:
        os.makedirs(data)
        self.data = data
        self.options = options
        self.port = 0
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.agents = Agents(data)
        self.tokens = {name: self.agents.add(name, url) for name, url in urls.items()}

    def start(self) -> None:
        errors = (self.data.parent / "harness.log").open("ab")
        with errors:
            serve = ("tasks", "serve", "--data", self.data, "--port", self.port, *self.options)
            self.process = start("postroom", *serve, stderr=errors)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.port = int(self.url.rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the process. Returns its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        process.communicate(timeout=HANG_GUARD_S)
        return process.returncode

    def token(self, agent: str) -> str:
        if agent not in self.tokens:
            self.tokens[agent] = self.agents.add(agent)
        return self.tokens[agent]

    def client(self, agent: str, url: str | None = None, **options: float) -> TaskClient:
        return TaskClient(url or self.url, agent=agent, token=self.token(agent), **options)  # type: ignore[arg-type]

    @contextmanager
    def tasks(self) -> Iterator[Tasks]:
        """The store itself, not through the server."""
        with Tasks.open(f"sqlite:///{self.data / 'queue.db'}") as tasks:
            yield tasks


@contextmanager
def serving(folder: Path, *options: object, **more: Any) -> Iterator[Harness]:
    harness = Harness(folder / "data", *options, **more)
    harness.start()
    try:
        yield harness
    finally:
        harness.end(signal.SIGKILL)
