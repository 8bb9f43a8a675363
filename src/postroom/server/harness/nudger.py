"""Nudges to agents: `POST {url}/task` notifies an agent of new work.

Rule 1: a nudge that fails is logged and not repeated. The agent also looks into its queue without nudges.
Rule 2: a host is resolved once, and the request goes to exactly the address that was checked.
Rule 3: nudges go to public addresses only. A host at another address has to be on the list of allowed hosts.
Rule 4: only the status line of a reply is used, and no redirect is followed.
"""

import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from postroom.errors import InvalidMessage
from postroom.server.access.nudge_urls import Target, parse_url

NUDGE_TIMEOUT_S = 5.0
NUDGERS = 4  # threads, started by the first nudge
WAITING_MAX = 256  # nudges; further ones are dropped, which is harmless
STATUS_LINE_BYTES_MAX = 256

# `ipaddress` counts these as public, but the host of a cloud machine answers them.
METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})
NAT64 = ipaddress.ip_network("64:ff9b::/96")

_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)[ \r]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Report = Callable[[str, str, str], None]
"""Called with the agent, the task id and the reason when a nudge failed."""


class Nudge(NamedTuple):
    """A nudge that waits to be sent."""

    agent: str
    url: str
    task_id: str


class NudgeRefused(Exception):
    """The target is not allowed, or the agent did not accept the nudge."""


def is_public(address: Address) -> bool:
    """Whether an address is public. For an IPv4 address embedded in IPv6, the IPv4 address decides."""
    inner = _wrapped(address)
    if inner is not None:
        return is_public(inner)
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and address not in METADATA
    )


def _wrapped(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None


class Nudger:
    """Sends nudges from its own threads. `nudge` returns at once and never raises."""

    def __init__(
        self,
        *,
        allowed_hosts: Iterable[str] = (),
        timeout_s: float = NUDGE_TIMEOUT_S,
        report: Report | None = None,
    ) -> None:
        self._allowed = frozenset(host.lower().strip("[]") for host in allowed_hosts)
        self._timeout_s = timeout_s
        self._report = report
        self._waiting: queue.Queue[Nudge | None] = queue.Queue(WAITING_MAX)
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pending: set[str] = set()
        self._closed = False
        self.sent = 0
        self.failed = 0

    def nudge(self, agent: str, url: str, task_id: str) -> None:
        """Queue a nudge. One per agent is enough, because an agent drains its queue."""
        with self._mutex:
            if agent in self._pending or self._closed:
                return
            if not self._threads:
                self._start()
            try:
                self._waiting.put_nowait(Nudge(agent, url, task_id))
            except queue.Full:
                self.failed += 1
            else:
                self._pending.add(agent)
                return
        self._report_failure(agent, task_id, f"{WAITING_MAX} nudges are waiting already")

    def _start(self) -> None:
        for number in range(NUDGERS):
            thread = threading.Thread(target=self._run, name=f"postroom-nudger-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while True:
            nudge = self._waiting.get()
            if nudge is None or self._closed:
                return
            with self._mutex:
                self._pending.discard(nudge.agent)
            try:
                self.send(nudge.url, nudge.task_id)
            except Exception as error:  # noqa: BLE001 - see rule 1
                with self._mutex:
                    self.failed += 1
                self._report_failure(nudge.agent, nudge.task_id, _reason(error))
            else:
                with self._mutex:
                    self.sent += 1

    def _report_failure(self, agent: str, task_id: str, reason: str) -> None:
        if self._report is not None:
            self._report(agent, task_id, reason)

    def send(self, url: str, task_id: str) -> None:
        """Send one nudge now. Raises when the agent did not accept it."""
        deadline = time.monotonic() + self._timeout_s
        target = parse_url(url)
        address = self.resolve(target)
        with _connected(target, address, deadline) as connection:
            connection.sendall(_request(target, task_id))
            status = _status(connection, deadline)
        if not 200 <= status < 300:  # noqa: PLR2004 - what HTTP calls success
            raise NudgeRefused(f"the agent replied {status}")

    def resolve(self, target: Target) -> str:
        """Return the address to connect to. Raises `NudgeRefused` when it is not allowed."""
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if target.host not in self._allowed:
            for address in addresses:
                # All addresses are checked: a host with a public and a private address may be an attack.
                if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                    raise NudgeRefused(f"{target.host} is at {address}, which is neither public nor allowed")
        return addresses[0]

    def close(self) -> None:
        """Stop sending. Nudges under way finish on their own."""
        self._closed = True
        with self._mutex:
            threads, self._threads = self._threads, []
        for _ in threads:
            with suppress(queue.Full):  # the threads then end at the next queued nudge
                self._waiting.put_nowait(None)


def _connected(target: Target, address: str, deadline: float) -> socket.socket:
    raw = socket.create_connection((address, target.port), timeout=_left_s(deadline))
    try:
        raw.settimeout(_left_s(deadline))
        if target.scheme == "http":
            return raw
        return ssl.create_default_context().wrap_socket(raw, server_hostname=target.host)
    except BaseException:
        raw.close()
        raise


def _request(target: Target, task_id: str) -> bytes:
    body = msgspec.json.encode({"task_id": task_id})
    head = (
        f"POST {target.path}/task HTTP/1.1\r\nHost: {target.authority}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nUser-Agent: postroom\r\n\r\n"
    )
    return head.encode("ascii") + body


def _status(connection: socket.socket, deadline: float) -> int:
    """Read the status of the reply. The deadline holds for the whole line."""
    line = b""
    while b"\n" not in line and len(line) < STATUS_LINE_BYTES_MAX:
        connection.settimeout(_left_s(deadline))
        piece = connection.recv(STATUS_LINE_BYTES_MAX)
        if not piece:
            break
        line += piece
    found = _STATUS.match(line)
    if found is None:
        raise NudgeRefused("the agent did not reply in HTTP")
    return int(found[1])


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the agent took too long")
    return left_s


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (NudgeRefused, InvalidMessage)) else type(error).__name__
