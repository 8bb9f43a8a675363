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
CLUSTER_NODES = 3
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
    environment = _node(folder, mapper_port, port, "")
    # The node would start a port mapper that outlives it.
    with _running(["epmd"], mapper_port, environment), _running([RABBITMQ], port, environment):
        yield f"amqp://guest:guest@{HOST}:{port}//"


@contextlib.contextmanager
def rabbitmq_cluster(folder: Path) -> Iterator[str]:
    """Three RabbitMQ nodes that form a cluster at their first start; yields the URL of all of them."""
    mapper_port, ports = free_port(), [free_port() for _ in range(CLUSTER_NODES)]
    lines = ["cluster_formation.peer_discovery_backend = classic_config"]
    for number, port in enumerate(ports, 1):
        lines.append(f"cluster_formation.classic_config.nodes.{number} = {_name(port)}")
    environments = []
    for port in ports:
        (folder / _name(port)).mkdir()
        environments.append(_node(folder / _name(port), mapper_port, port, "\n".join(lines) + "\n"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(["epmd"], mapper_port, environments[0]))
        nodes = [stack.enter_context(_started([RABBITMQ], each)) for each in environments]
        for port, node in zip(ports, nodes, strict=True):
            _await_listening(port, node)
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        yield f"amqp://guest:guest@{hosts}//"


def _name(port: int) -> str:
    return f"peers{port}@localhost"


def _node(folder: Path, mapper_port: int, port: int, more: str) -> dict[str, str]:
    """Write the configuration of a node; its environment."""
    config = folder / "rabbitmq.conf"
    config.write_text(f"listeners.tcp.default = {HOST}:{port}\nloopback_users = none\n{more}")
    cookie = folder / ".erlang.cookie"
    cookie.write_text("postroom-bench")
    cookie.chmod(0o400)
    return os.environ | {
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(mapper_port),
        "ERL_EPMD_ADDRESS": HOST,
        "RABBITMQ_NODENAME": _name(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_PID_FILE": str(folder / "pid"),
    }


@contextlib.contextmanager
def _running(words: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    with _started(words, environment) as process:
        _await_listening(port, process)
        yield


@contextlib.contextmanager
def _started(words: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
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
