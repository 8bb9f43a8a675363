"""Private brokers on free loopback ports, each with its own folder."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
PATIENCE_S = 60.0
LOOK_S = 0.05
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the wrapper on the PATH requires another user


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A Redis that syncs its append-only file at every write; yields its URL."""
    port = free_port()
    words = ["redis-server", "--bind", HOST, "--port", str(port), "--dir", str(folder)]
    words += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    with _running(words, port, dict(os.environ)):
        yield f"redis://{HOST}:{port}/0"


@contextlib.contextmanager
def rabbitmq(folder: Path) -> Iterator[str]:
    """A private RabbitMQ node; yields its URL."""
    port, mapper_port = free_port(), free_port()
    config = folder / "rabbitmq.conf"
    config.write_text(f"listeners.tcp.default = {HOST}:{port}\nloopback_users = none\n")
    environment = os.environ | {
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(mapper_port),
        "ERL_EPMD_ADDRESS": HOST,
        "RABBITMQ_NODENAME": f"peers{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_PID_FILE": str(folder / "pid"),
    }
    # The node would start a port mapper that outlives it.
    with _running(["epmd"], mapper_port, environment), _running([RABBITMQ], port, environment):
        yield f"amqp://guest:guest@{HOST}:{port}//"


@contextlib.contextmanager
def _running(words: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _await_listening(port, process)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE_S)


def _await_listening(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            return
        time.sleep(LOOK_S)
    raise RuntimeError(f"the broker on port {port} did not start")
