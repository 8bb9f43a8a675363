"""A process that runs commands of postroom, one after the other, in one JVM.

Each command starts and stops a session of its own, as it does for a person; what they share is the JVM, which
takes most of the time of a small one. That commands are processes of their own is shown where one is killed.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from postroom.cli.main import PROGRAM, cli
from postroom.cli.shell import run


class Done(NamedTuple):
    """What came of a command."""

    code: int
    stdout: str
    stderr: str


class Commands:
    """The process, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: object) -> Done:
        """Run `postroom pipeline` with these words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(["pipeline", *map(str, words)]) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate()


def main() -> None:
    """Read commands, answer with what came of them. What the JVM prints belongs to its command, too."""
    answers = os.fdopen(os.dup(1), "w")
    for text in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            code = run(cli, PROGRAM, json.loads(text))
            said = []
            for file in (out, errors):
                file.seek(0)
                said.append(file.read().decode())
        answers.write(json.dumps([code, *said]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
