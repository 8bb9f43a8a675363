"""The process that `warmpython` forks programs from. It has one thread, and no files but its connections."""

import atexit
import gc
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import postroom.cli
from postroom.server.up import parts
from tests.waiting import HANG_GUARD_S
from tests.warmpython import LENGTH, STATUS, STREAMS

IMPORTED = (
    "postroom.client",
    "postroom.engine",
    "postroom.server.app",
    "postroom.server.nats.mail_server",
    "postroom.server.nats.server",
    "postroom.server.folder.shipping",
    "postroom.stores.sqlite.store",
    "uvicorn.lifespan.on",
)
TOO_LARGE = "pipeline"  # Spark
STDERR = 2


def main(control: socket.socket) -> None:
    """Import, then fork a program for each request."""
    commands = pkgutil.walk_packages(postroom.cli.__path__, "postroom.cli.")
    for name in (*IMPORTED, *(found.name for found in commands)):
        if TOO_LARGE not in name:
            importlib.import_module(name)
    # A test fails when parts never get ready, and not because a machine with a load of 40 starts them slowly.
    parts.READY_TIMEOUT_S = HANG_GUARD_S
    assert threading.active_count() == 1, "a fork copies one thread only"
    gc.collect()
    gc.freeze()  # so that a collection in a program does not touch, and thus copy, all pages
    request, streams = _serve(control)
    _become(request, streams)
    _run(request)


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a program for each request. Returns in the program, and never in the template."""
    running: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([control.fileno(), woken], [], [])[0]
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            _report(running)
        if control.fileno() not in ready:
            continue
        said, descriptors, *_ = socket.recv_fds(control, LENGTH.size, STREAMS + 1)
        if not said:
            os._exit(0)
        request = json.loads(control.recv(LENGTH.unpack(said)[0], socket.MSG_WAITALL))
        status = socket.socket(fileno=descriptors.pop())
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for connection in (control, status, *running.values()):
                connection.close()
            os.close(woken)
            os.close(wakes)
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        running[pid] = status
        with suppress(OSError):
            status.sendall(STATUS.pack(pid))


def _report(running: dict[int, socket.socket]) -> None:
    """Send the exit status of each program that has ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with running.pop(pid) as connection, suppress(OSError):
                connection.sendall(STATUS.pack(status))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Take the streams, the environment and the folder of the program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = _stream(0, "r", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace")  # type: ignore[misc]


def _stream(descriptor: int, mode: str, errors: str) -> "io.TextIOWrapper[Any]":
    is_direct = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(descriptor, f"{mode}b", 0 if is_direct else -1, closefd=False)  # noqa: SIM115 - never closed
    is_shown = mode == "w" and (descriptor == STDERR or os.isatty(descriptor))
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=is_shown, write_through=is_direct)


def _run(request: dict[str, Any]) -> None:
    """Run a program to its end, and leave as an interpreter does."""
    sys.argv = [request["module"] or "-c", *request["arguments"]]
    sys.path[0] = str(Path(sys.executable).parent) if request["module"] else ""
    if request["is_strict"]:
        warnings.simplefilter("error")
    code = 0
    try:
        _call(request)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 - shown, as an interpreter does
        traceback.print_exc()
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # shows what was not closed
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _call(request: dict[str, Any]) -> None:
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    if request["module"]:
        sys.exit(importlib.import_module(request["module"]).main())
    exec(compile(request["code"], "<string>", "exec"), program.__dict__)  # noqa: S102 - a program of a test


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
