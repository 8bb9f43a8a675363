"""Makes `.venv`: Python 3.11 or newer, the locked tools, and postroom itself.

Rule 1: only the standard library and the syntax of Python 3.8, because any `python3` of the machine may run
        this file. It then looks for a Python that is new enough.
Rule 2: missing system packages are installed if that is allowed (root, or sudo without a password). Otherwise
        a message says what to install.
Rule 3: concurrent runs take turns; the second one finds the work done.

    python3 tools/setup.py                                       make or refresh .venv
    python3 tools/setup.py --system strace mkfs.ext4=e2fsprogs   install missing commands (command[=package])
    python3 tools/setup.py --lock                                write requirements.lock (needs the network)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup-done"
LOCK = ROOT / "requirements.lock"
INPUTS = (LOCK, ROOT / "pyproject.toml", Path(__file__).resolve())

PYTHON_OLDEST = (3, 11)
PYTHON_NAMES = ("python3", "python3.13", "python3.12", "python3.11")
# The interpreter itself is asked: a name on the PATH may be a shim for a version that is not installed.
PYTHON_PROBE = "import sys; sys.exit(sys.version_info < {!r})".format(PYTHON_OLDEST)


class SetupError(Exception):
    """A missing requirement, as one sentence for the user."""


def main(arguments: list[str]) -> int:
    try:
        follow(arguments)
    except SetupError as error:
        print("setup: {}".format(error), file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(str(part) for part in error.cmd)
        print("setup: `{}` failed with exit code {}.".format(command, error.returncode), file=sys.stderr)
        return 1
    return 0


def follow(arguments: list[str]) -> None:
    if not arguments:
        ensure_environment()
    elif arguments[0] == "--system":
        ensure_commands(arguments[1:])
    elif arguments == ["--lock"]:
        write_lock()
    else:
        raise SetupError("Usage: setup.py [--lock | --system COMMAND[=PACKAGE]...].")


def ensure_environment() -> None:
    with Path(__file__).open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not is_current():
            STAMP.unlink(missing_ok=True)
            if not runs(VENV_PYTHON):
                create_venv()
            install()
            STAMP.touch()


def is_current() -> bool:
    if not STAMP.exists() or not runs(VENV_PYTHON):
        return False
    return STAMP.stat().st_mtime_ns >= max(path.stat().st_mtime_ns for path in INPUTS)


def create_venv() -> None:
    python = find_python()
    ensure_venv_module(python)
    say("making .venv with {}".format(python))
    run(python, "-m", "venv", "--clear", VENV)


def find_python() -> str:
    for name in PYTHON_NAMES:
        path = shutil.which(name)
        if path and runs(path):
            return path
    raise SetupError("Please install Python 3.11 or newer, none was found on the PATH.")


def runs(python: str | Path) -> bool:
    """Whether this interpreter starts and is new enough."""
    return succeeds(python, "-c", PYTHON_PROBE)


def ensure_venv_module(python: str) -> None:
    """Debian ships `venv` without `ensurepip`, and making an environment then fails half way."""
    probe = (python, "-c", "import venv, ensurepip")
    if succeeds(*probe):
        return
    # python3 -> python3-venv, python3.12 -> python3.12-venv
    package = Path(python).name + "-venv"
    install_packages([package], "a virtual environment")
    if not succeeds(*probe):
        raise SetupError("Please install the venv and ensurepip modules of {}.".format(python))


def install() -> None:
    say("installing requirements.lock, which takes a few minutes")
    # The lock is complete. Without --no-deps, pip looks for newer versions of packages that are required with
    # an extra, and refuses them because they have no hash here.
    pip_install("--require-hashes", "--no-deps", "-r", LOCK)
    # The build tool is in the lock, so nothing else is downloaded here.
    pip_install("--no-deps", "--no-build-isolation", "-e", ROOT)


def pip_install(*arguments: str | Path) -> None:
    run(VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *arguments)


def ensure_commands(wanted: list[str]) -> None:
    """Each wanted item is a command, or `command=package` where the package has another name."""
    missing = {}
    for item in wanted:
        command, _, package = item.partition("=")
        if not find_command(command):
            missing[command] = package or command
    if missing:
        install_packages(sorted(set(missing.values())), "the command " + ", ".join(missing))


def find_command(command: str) -> str | None:
    # File system tools live in sbin, which is not on the PATH of an ordinary user.
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def install_packages(packages: list[str], purpose: str) -> None:
    rights = administrator_prefix()
    if shutil.which("apt-get") is None or rights is None:
        raise SetupError("Please install {}, needed for {}.".format(" and ".join(packages), purpose))
    say("installing {} with apt-get".format(" ".join(packages)))
    environment = [*rights, "env", "DEBIAN_FRONTEND=noninteractive"]
    run(*environment, "apt-get", "update", "-qq", quiet=True)
    run(*environment, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, quiet=True)


def administrator_prefix() -> list[str] | None:
    """The words before a command that needs root; None when that is not allowed."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and succeeds("sudo", "-n", "true"):
        return ["sudo", "-n"]
    return None


def write_lock() -> None:
    """One lock for Linux, macOS and every supported Python, with hashes and without addresses."""
    with tempfile.TemporaryDirectory(prefix="postroom-lock-") as folder:
        run(find_python(), "-m", "venv", folder)
        run(Path(folder, "bin", "python"), "-m", "pip", "install", "-qq", "uv")
        run(
            *(
                Path(folder, "bin", "uv"),
                "pip",
                "compile",
                "pyproject.toml",
                "--all-extras",
                "--group",
                "dev",
            ),
            *("--universal", "--python-version", "{}.{}".format(*PYTHON_OLDEST), "--upgrade"),
            *("--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header"),
            *("--quiet", "--output-file", LOCK.name),
        )
    for trace in ("://", "file:", "--find-links", "--index-url", str(ROOT)):
        if trace in LOCK.read_text():
            raise SetupError("requirements.lock contains {!r}, but must not contain addresses.".format(trace))


def run(*command: str | Path, quiet: bool = False) -> None:
    """Run a command. `quiet` hides its output, but not its errors."""
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL if quiet else None)


def succeeds(*command: str | Path) -> bool:
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return done.returncode == 0


def say(text: str) -> None:
    print("setup: {}".format(text), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
