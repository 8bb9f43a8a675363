"""A forked program has what a process of its own has: streams, environment, folder, exit status, signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warmpython
from tests.waiting import HANG_GUARD_S
from tests.warmpython import WarmProcess

COMMAND = Path(sys.executable).parent / "postroom"


INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
os.kill(os.getpid(), signal.SIGINT)
"""


def run(*words: Any, **options: Any) -> tuple[int, bytes, bytes]:
    process = warmpython.popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    out, errors = process.communicate(timeout=HANG_GUARD_S)
    return process.returncode, out, errors


def test_a_command_and_a_program_are_forked() -> None:
    assert run(COMMAND, "--version")[:2] == (0, b"postroom 0.1.0\n")
    code, _, errors = run(COMMAND, "bus", "tail")
    assert code == 2
    assert errors.startswith(b"postroom: there is no bus to use")
    process = warmpython.popen([sys.executable, "-c", "import os; os._exit(os.getppid() == 1)"])
    assert isinstance(process, WarmProcess)
    assert process.wait(HANG_GUARD_S) == 0


def test_a_program_has_its_own_folder_environment_and_arguments(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.environ.get('HOME'), os.environ['OWN'], sys.argv)"
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LANG", "LC_"))}
    done = run(sys.executable, "-c", program, "one", cwd=tmp_path, env={**kept, "OWN": "x"})
    assert done == (0, f"{tmp_path} None x ['-c', 'one']\n".encode(), b"")


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, b""),
        ("import sys; sys.exit('a reason')", 1, b"a reason\n"),
        ("import atexit; atexit.register(print, 'the end')", 0, b""),
        ("1 / 0", 1, b"ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, b""),
        (INTERRUPTED, -signal.SIGINT, b"KeyboardInterrupt"),
    ],
)
def test_the_end_of_a_program_is_that_of_an_interpreter(program: str, code: int, said: bytes) -> None:
    done, out, errors = run(sys.executable, "-c", program)
    assert (done, said in errors) == (code, True)
    assert out == (b"the end\n" if "atexit" in program else b"")


def test_a_signal_ends_a_program_that_waits() -> None:
    program = "import signal; print('waits', flush=True); signal.pause()"
    process = warmpython.popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"waits\n"
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == -signal.SIGTERM


def test_a_warning_is_an_error_where_the_command_says_so() -> None:
    program = "open('/dev/null')"
    assert run(sys.executable, "-c", program) == (0, b"", b"")
    assert b"ResourceWarning: unclosed file" in run(sys.executable, "-W", "error", "-c", program)[2]


def test_a_program_with_other_settings_of_python_gets_a_new_one() -> None:
    environ = {**os.environ, "PYTHONPATH": f"/nowhere{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = warmpython.popen(
        [sys.executable, "-c", "import sys; print(sys.path)"], stdout=subprocess.PIPE, env=environ
    )
    assert not isinstance(process, WarmProcess)
    assert b"'/nowhere'" in process.communicate(timeout=HANG_GUARD_S)[0]
