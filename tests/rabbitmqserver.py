"""A private RabbitMQ for tests: on free loopback ports, with its own folder, stopped at the end.

`TEST_RABBITMQ_BIN` is the folder of another version's programs: `rabbitmq-server` and `rabbitmqctl`, and
`epmd` when it is not on the PATH.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import HANG_GUARD_S

HOST = "127.0.0.1"
LOOK_S = 0.05
ERLANG_ARGUMENTS = "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
PROGRAMS_VARIABLE = "TEST_RABBITMQ_BIN"
INSTALLED = Path("/usr/lib/rabbitmq/bin")  # the wrappers on the PATH require another user
PROGRAMS = Path(os.environ.get(PROGRAMS_VARIABLE) or INSTALLED)
PATH = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)])
_STARTING = re.compile(r"Starting (RabbitMQ \S+ on Erlang \S+)")


def is_installed() -> bool:
    """Whether RabbitMQ can be started here. A version that was asked for and is missing is an error."""
    found = (PROGRAMS / "rabbitmq-server").exists() and shutil.which("epmd", path=PATH) is not None
    if not found and PROGRAMS != INSTALLED:
        raise RuntimeError(f"{PROGRAMS_VARIABLE}: {PROGRAMS} has no rabbitmq-server, or there is no epmd")
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


class RabbitServer:
    """One node. Its data stay in the folder between `kill` and `start`."""

    def __init__(self, folder: Path, mapper_port: int, name: str = "test") -> None:
        self.port = free_port()
        self.node = f"{name}{self.port}@localhost"
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = folder / "log"
        config = self._config = folder / "rabbitmq.conf"
        config.write_text(f"listeners.tcp.default = {HOST}:{self.port}\nloopback_users = none\n")
        (folder / ".erlang.cookie").write_text("postroom-tests")
        (folder / ".erlang.cookie").chmod(0o400)
        self._environment = os.environ | {
            "PATH": PATH,
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(self._logs),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            # One scheduler that sleeps at once when it has nothing to do, because other tests need the cores.
            ERLANG_ARGUMENTS: "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, ledger: str, options: str = "", *, port: int = 0) -> str:
        """The URL of a store on this node. `port` is that of a proxy in front of it."""
        return (
            f"amqp://guest:guest@{HOST}:{port or self.port}/?{options}{'&' if options else ''}ledger={ledger}"
        )

    def serve_tls(self, certificate: Path, key: Path) -> int:
        """Listen on a second port with TLS, from the next start on; the port."""
        port = free_port()
        lines = [
            f"listeners.ssl.default = {HOST}:{port}",
            f"ssl_options.cacertfile = {certificate}",
            f"ssl_options.certfile = {certificate}",
            f"ssl_options.keyfile = {key}",
            "ssl_options.verify = verify_none",
        ]
        self._config.write_text(self._config.read_text() + "\n".join(lines) + "\n")
        return port

    def time_out_consumers(self, after_ms: int) -> None:
        """Close the channel of a consumer that holds a delivery for so long, from the next start on."""
        self._config.write_text(self._config.read_text() + f"consumer_timeout = {after_ms}\n")
        words = f"{self._environment[ERLANG_ARGUMENTS]} -rabbit channel_tick_interval {after_ms // 4}"
        self._environment |= {ERLANG_ARGUMENTS: words}

    def join(self, nodes: Sequence[str]) -> None:
        """Form a cluster with these nodes at the first start."""
        lines = ["cluster_formation.peer_discovery_backend = classic_config"]
        lines += [f"cluster_formation.classic_config.nodes.{n} = {node}" for n, node in enumerate(nodes, 1)]
        self._config.write_text(self._config.read_text() + "\n".join(lines) + "\n")

    def start(self) -> None:
        """Start the node and wait until it listens."""
        self._process = subprocess.Popen(
            [PROGRAMS / "rabbitmq-server"],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        await_listening(self.port, self._process)

    @property
    def version(self) -> str:
        """The versions of RabbitMQ and Erlang, from the log of a node that has started."""
        for log in self._logs.glob("*.log"):
            if found := _STARTING.search(log.read_text()):
                return found[1]
        return "RabbitMQ of an unknown version"

    def kill(self) -> None:
        """Kill the node as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the node in order."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            process.wait(HANG_GUARD_S)

    def ctl(self, *words: str) -> str:
        """Run `rabbitmqctl` for this node; what it prints."""
        return subprocess.run(
            [PROGRAMS / "rabbitmqctl", "-q", "-n", self.node, *words],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
        ).stdout


@contextmanager
def port_mapper() -> Iterator[int]:
    """The name server of Erlang nodes. Started here, because one that a node starts would outlive it."""
    port = free_port()
    environment = os.environ | {"PATH": PATH, "ERL_EPMD_PORT": str(port), "ERL_EPMD_ADDRESS": HOST}
    process = subprocess.Popen(
        ["epmd"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await_listening(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(HANG_GUARD_S)


@contextmanager
def rabbitmq(folder: Path) -> Iterator[RabbitServer]:
    """A running node."""
    with port_mapper() as mapper_port:
        server = RabbitServer(folder, mapper_port)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def start_together(nodes: Sequence[RabbitServer]) -> None:
    """Form a cluster. At its first start, a node of RabbitMQ 4 waits for the other nodes."""
    for node in nodes:
        node.join([each.node for each in nodes])
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(RabbitServer.start, nodes))


def await_listening(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a process listens on a port."""
    deadline = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            return
        time.sleep(LOOK_S)
    raise RuntimeError(f"nothing listens on port {port}")
