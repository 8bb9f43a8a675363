"""Commands of postroom in this process, with the session of the tests.

A JVM of its own would take most of the time of a small one. That a command starts and stops its session is
shown where a test calls the program itself.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from postroom.cli.main import PROGRAM, cli
from postroom.cli.pipeline import pipeline_options
from postroom.cli.shell import run

POSTROOM = str(Path(sys.executable).with_name("postroom"))


class Done(NamedTuple):
    """What came of a command."""

    code: int
    stdout: str
    stderr: str


class Commands:
    """Runs `postroom pipeline` with the words that it is called with."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, *words: object) -> Done:
        out, errors = io.BytesIO(), io.BytesIO()
        with contextlib.ExitStack() as stack:
            lent = stack.enter_context(pytest.MonkeyPatch.context())
            lent.setattr(pipeline_options, "spark_of", lambda **_: contextlib.nullcontext(self._spark))
            stack.enter_context(contextlib.redirect_stdout(io.TextIOWrapper(out, write_through=True)))
            stack.enter_context(contextlib.redirect_stderr(io.TextIOWrapper(errors, write_through=True)))
            code = run(cli, PROGRAM, ["pipeline", *map(str, words)])
            return Done(code, out.getvalue().decode(), errors.getvalue().decode())


@contextlib.contextmanager
def begun(seen: str, *words: object, before: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, which has just said something on stderr.

    What it said `before` is added to that list.
    """
    with subprocess.Popen(
        [POSTROOM, "pipeline", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if before is not None:
                before.append(line)
            if seen in line:
                break
        else:
            raise AssertionError(f"it never said {seen!r}")
        yield process


def in_its_own_process(*words: object, **environ: str) -> Done:
    """What a person gets: everything that it and its JVM print is in it."""
    done = subprocess.run(
        [POSTROOM, "pipeline", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    return Done(done.returncode, done.stdout, done.stderr)
