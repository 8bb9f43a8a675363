"""Hostile clients against a real `postroom mail serve`, beside a well-behaved one.

The good client has its own address. It sends durable messages and reads them for as long as the attacks last.
All its acknowledged messages are read back after a restart of the server.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from postroom.core.mail.mailbox import MESSAGE_COST_BYTES
from postroom.core.nats import natswire as wire
from tests.crash.ledger import Delivery, Tally, body_of, compare, token_of
from tests.crash.memory import peak_mb
from tests.smalldisk import NotPermitted, fill, mounted
from tests.waiting import HANG_GUARD_S

HOST, GOOD_HOST, BAD_HOST = "127.0.0.1", "127.0.0.2", "127.0.0.3"
MB = 1 << 20

CLIENT_QUOTA_BYTES = 32 * MB
CLIENT_QUOTA_MAILBOXES = 2_000
CLIENT_QUOTA_AGENTS = 50
QUOTAS = (
    *("--client-quota-bytes", str(CLIENT_QUOTA_BYTES)),
    *("--client-quota-mailboxes", str(CLIENT_QUOTA_MAILBOXES)),
    *("--client-quota-agents", str(CLIENT_QUOTA_AGENTS)),
)
MEMORY_MB_MAX = 300  # of a server whose hostile clients may store 32 MiB
IDLE_WRITTEN_MB_MAX = 40  # without any send: at most one copy of the live messages
DISK_MB_MAX = 300
FLOOD_MESSAGES = 2_000  # between two answers
GOOD_PAUSE_S = 0.001  # between two sends: the good client stays far below its own quota
NESTED = b"[" * 5_000 + b"]" * 5_000
OWN_SUBSCRIPTIONS = 600
PASSWORDS = "good:right\n"

CREATE, MSG = "$mq9.AI.MAILBOX.CREATE", "$mq9.AI.MAILBOX.MSG."
AGENT = "$mq9.AI.AGENT."
SMALL_BODY_BYTES = 200

Attack = Callable[["Server", Tally, Random], None]


class AttackSizes(NamedTuple):
    attack_s: float = 3.0  # of each attack with a duration
    unfinished_connections: int = 300
    wrong_passwords: int = 50


USUAL = AttackSizes()


# ---- a server and its clients ------------------------------------------------------------------------


class Server:
    """`postroom mail serve` in its own process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.sizes = AttackSizes()
        self._options = options
        self.memory_mb = self.written_mb = 0
        self._start()

    def _start(self) -> None:
        words = ["mail", "serve", "--data", str(self.folder / "mail"), "--port", "0", *self._options]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "postroom.cli.main", *words], stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["url"].rpartition(":")[2])

    def measure(self) -> None:
        """Add up the resources that the process has used so far."""
        self.memory_mb = max(self.memory_mb, peak_mb(self._process.pid))

    def written(self) -> int:
        """Bytes that the process has written to the operating system."""
        said = Path(f"/proc/{self._process.pid}/io").read_text()
        return int(said.partition("wchar:")[2].split()[0])

    def disk_mb(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "mail").glob("mail-*")) // MB

    def end(self) -> None:
        self.measure()
        self.written_mb += self.written() // MB
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(HANG_GUARD_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def restart(self) -> None:
        self.end()
        self._start()


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.end()


class Client:
    """A connection on a bare socket, from a given address."""

    def __init__(self, server: Server, host: str = BAD_HOST, **login: str) -> None:
        self.socket = socket.create_connection((HOST, server.port), HANG_GUARD_S, source_address=(host, 0))
        self._reader = wire.ServerReader(payload_bytes_max=64 * MB)
        self._commands: list[wire.Command] = []
        self._asked = 0
        options = {"verbose": False, "headers": True, "no_responders": True, **login}
        try:
            self.send(wire.connect(options) + b"SUB _INBOX.* 1\r\nPING\r\n")
            self.until(wire.Pong)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def next(self) -> wire.Command:
        while not self._commands:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the server hung up")
            self._commands += self._reader.feed(data)
        return self._commands.pop(0)

    def until(self, kind: type[wire.Command]) -> wire.Command:
        while True:
            command = self.next()
            if isinstance(command, wire.Error):
                raise ConnectionError(command.text)
            if isinstance(command, kind):
                return command

    def request(self, subject: str, payload: bytes = b"") -> bytes:
        self._asked += 1
        inbox = b"_INBOX.%d" % self._asked
        self.send(wire.publish(subject.encode(), payload, reply=inbox))
        return inbox

    def ask(self, subject: str, payload: bytes = b"") -> Any:
        """Send a request and return its answer; other messages are dropped meanwhile."""
        inbox = self.request(subject, payload)
        while True:
            found = self.until(wire.Messages)
            assert isinstance(found, wire.Messages)
            if found.head.subject == inbox:
                return json.loads(found.bodies[-1])


class GoodClient(threading.Thread):
    """Sends durably and reads, until it is stopped."""

    def __init__(self, server: Server, writer: str, **login: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[str, str] = {}
        self.trouble: list[str] = []
        self._stopped = threading.Event()
        self._writer = writer
        self._client = Client(server, GOOD_HOST, **login)
        self.box = f"box-{writer}"
        self._client.ask(CREATE, json.dumps({"name": self.box, "public": True, "ttl": 0}).encode())
        self._client.send(f"SUB {MSG}{self.box}.* 2\r\n".encode())
        self.start()

    def run(self) -> None:
        try:
            number = 0
            while not self._stopped.is_set():
                token = token_of(self._writer, number, SMALL_BODY_BYTES)
                answer = self._client.ask(f"{MSG}{self.box}.critical", f"{token}\n{body_of(token)}".encode())
                if "msg_id" in answer:
                    self.acknowledged[token] = str(answer["msg_id"])
                else:
                    self.trouble.append(str(answer))
                number += 1
                self._stopped.wait(GOOD_PAUSE_S)
        except (OSError, ConnectionError) as error:
            self.trouble.append(f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        self._stopped.set()
        self.join(HANG_GUARD_S)
        self._client.socket.close()


def replayed(server: Server, box: str, count: int, **login: str) -> list[Delivery]:
    """The messages of a new subscriber: as many as were acknowledged, or all that exist."""
    found: list[Delivery] = []
    with Client(server, GOOD_HOST, **login) as client:
        client.send(f"SUB {MSG}{box}.* 2\r\n".encode())
        with contextlib.suppress(TimeoutError):
            while len(found) < count:
                command = client.until(wire.Messages)
                assert isinstance(command, wire.Messages)
                cut = max(command.head.header_bytes, 0)
                for body in command.bodies:
                    msg_id = body[:cut].partition(b"Mq9-Msg-Id: ")[2].partition(b"\r\n")[0].decode()
                    token, _, text = body[cut:].decode().partition("\n")
                    found.append(Delivery(token, msg_id, text))
    return found


# ---- the attacks -------------------------------------------------------------------------------------


def _refused(answer: dict[str, Any], code: int, what: str, tally: Tally) -> None:
    """Count a refusal; anything else breaks a rule."""
    if answer.get("code") == code:
        tally.count("refused")
    else:
        tally.breaks(f"{what} was answered with {str(answer)[:200]} instead of {code}")


def nest(server: Server, tally: Tally, rng: Random) -> None:
    """Bodies of thousands of nested lists, in every call that takes JSON."""
    with Client(server) as client:
        box = client.ask(CREATE)["mail_id"]
        subjects = [f"$mq9.AI.MAILBOX.LIST.{box}", CREATE]
        subjects += [f"$mq9.AI.MSG.{verb}.{box}" for verb in ("FETCH", "QUERY", "ACK")]
        subjects += [AGENT + verb for verb in ("REGISTER", "UNREGISTER", "REPORT", "DISCOVER")]
        for _ in range(50):
            client.request(f"{MSG}{box}.critical", b"x")  # the following calls wait for the disk
            body = rng.choice([b"%b", b'{"name":"a","x":%b}']) % NESTED
            _refused(client.ask(rng.choice(subjects), body), 400, "a nested body", tally)


def report(server: Server, tally: Tally, rng: Random) -> None:
    """Reports as large as a card may be, larger ones, and then silence."""
    with Client(server) as client:
        client.ask(f"{AGENT}REGISTER", b'{"name":"reporter"}')
        ends = time.monotonic() + server.sizes.attack_s
        while time.monotonic() < ends:
            text = "x" * rng.randrange(60_000)
            client.ask(f"{AGENT}REPORT", json.dumps({"name": "reporter", "report_info": text}).encode())
        text = "x" * 100_000
        answer = client.ask(f"{AGENT}REPORT", json.dumps({"name": "reporter", "report_info": text}).encode())
        _refused(answer, 400, "a report above the limit", tally)
    _stay_quiet(server, tally)


def _stay_quiet(server: Server, tally: Tally) -> None:
    before = server.written()
    time.sleep(server.sizes.attack_s)
    written_mb = (server.written() - before) // MB
    if written_mb > IDLE_WRITTEN_MB_MAX:
        tally.breaks(f"{written_mb} MB were written while no hostile client was connected")


def flood(server: Server, tally: Tally, rng: Random) -> None:
    """Empty messages, mailboxes and agents on many connections, until the quota of the client is used up."""
    host = f"127.1.{rng.randrange(256)}.{rng.randrange(1, 255)}"  # an address whose quota is unused
    with Client(server, host) as client:
        box = client.ask(CREATE)["mail_id"]
        frame = wire.publish(f"{MSG}{box}".encode(), b"")
        for _ in range(2 * CLIENT_QUOTA_BYTES // (MESSAGE_COST_BYTES * FLOOD_MESSAGES)):  # twice what fits
            if "msg_id" not in client.ask(f"{MSG}{box}", b""):
                break
            client.send(frame * FLOOD_MESSAGES)
    with Client(server, host) as client:  # reconnecting does not help
        _refused(client.ask(f"{MSG}{box}", b""), 429, "a message above the quota", tally)
        _refused(client.ask(CREATE), 429, "a mailbox above the quota", tally)
    with Client(server, f"127.0.1.{rng.randrange(1, 255)}") as client:
        _crowd(client, CREATE, lambda _: b"", CLIENT_QUOTA_MAILBOXES, tally)
        _crowd(client, f"{AGENT}REGISTER", _card, CLIENT_QUOTA_AGENTS, tally)


def _card(number: int) -> bytes:
    return json.dumps({"name": f"agent-{number}", "text": "word " * 1_000}).encode()


def _crowd(client: Client, subject: str, body: Callable[[int], bytes], most: int, tally: Tally) -> None:
    for number in range(most):
        client.request(subject, body(number))
    _refused(client.ask(subject, body(most)), 429, f"{subject} above the quota", tally)


def hijack(server: Server, tally: Tally, rng: Random) -> None:
    """Take, change and remove the name of a connected agent."""
    name = f"held-{rng.randrange(1 << 32)}"
    with Client(server, GOOD_HOST) as holder, Client(server) as thief:
        holder.ask(f"{AGENT}REGISTER", json.dumps({"name": name, "text": name}).encode())
        for verb in ("REGISTER", "REPORT", "UNREGISTER"):
            for secret in ("", "guess"):
                answer = thief.ask(AGENT + verb, json.dumps({"name": name, "secret": secret}).encode())
                _refused(answer, 409, f"{verb} of another's name", tally)
        found = thief.ask(f"{AGENT}DISCOVER", json.dumps({"text": name}).encode())["agents"]
        if [card.get("text") for card in found] != [name]:
            tally.breaks("a card was changed by somebody else")


def multiply(server: Server, tally: Tally, _: Random) -> None:
    """One large message to many subscriptions of a connection that does not read."""
    with Client(server) as client:
        client.send(b"".join(b"SUB own %d\r\n" % sid for sid in range(2, OWN_SUBSCRIPTIONS)) + b"PING\r\n")
        client.until(wire.Pong)
        client.send(wire.publish(b"own", bytes(MB)))
        with Client(server) as other:  # the server continues
            other.ask(CREATE)
        try:
            while True:
                client.until(wire.Pong)
        except OSError:
            tally.count("refused")


ATTACKS: tuple[Attack, ...] = (nest, report, hijack, multiply, flood)


def linger(server: Server, tally: Tally, _: Random) -> None:
    """Connections that do not log in, and send the beginning of a large message; wrong passwords."""
    part = b"PUB a 1000000\r\n" + b"x" * 900_000
    with contextlib.ExitStack() as stack:
        for _number in range(server.sizes.unfinished_connections):
            made = socket.create_connection((HOST, server.port), HANG_GUARD_S, source_address=(BAD_HOST, 0))
            stack.enter_context(made)
            with contextlib.suppress(OSError):
                made.settimeout(0.2)
                made.sendall(part)
            tally.count("refused")
    for _number in range(server.sizes.wrong_passwords):
        try:
            Client(server, user="good", **{"pass": "wrong"}).socket.close()
            tally.breaks("a wrong password was let in")
        except (OSError, ConnectionError):
            tally.count("refused")


def starve(server: Server, tally: Tally, _: Random) -> None:
    """Fill the disk. A send on a full disk is refused, and later ones are accepted when there is room."""
    with Client(server, GOOD_HOST) as client:
        client.ask(CREATE, b'{"name":"full","public":true,"ttl":0}')
        filler = fill(server.folder)
        _refused(client.ask(f"{MSG}full.critical", b"x" * 100_000), 503, "a send to a full disk", tally)
        _refused(client.ask(f"{MSG}full.critical", b"x" * 100_000), 503, "the next one", tally)
        filler.unlink()
        ends = time.monotonic() + HANG_GUARD_S
        while "msg_id" not in client.ask(f"{MSG}full.critical", b"x"):
            if time.monotonic() > ends:
                tally.breaks("the server did not recover when there was room again")
                return


# ---- all of it ---------------------------------------------------------------------------------------


def run(count: int, seed: int, tick: Callable[[int], None], sizes: AttackSizes = USUAL) -> Tally:
    """Every attack, `count` times."""
    tally, rng = Tally(), Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="postroom-attack-"))
    try:
        for number in range(count):
            _round(folder / f"open-{number}", ATTACKS, tally, rng, sizes)
            _round_with_logins(folder / f"closed-{number}", tally, rng, sizes)
            _round_on_small_disk(folder / f"small-{number}", tally, rng)
            tick(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _round(folder: Path, attacks: tuple[Attack, ...], tally: Tally, rng: Random, sizes: AttackSizes) -> None:
    with serving(folder, *QUOTAS) as server:
        server.sizes = sizes
        _beside_good_client(server, attacks, tally, rng)


def _round_with_logins(folder: Path, tally: Tally, rng: Random, sizes: AttackSizes) -> None:
    users = folder.with_suffix(".users")
    users.write_text(PASSWORDS)
    with serving(folder, *QUOTAS, "--users-file", str(users)) as server:
        server.sizes = sizes
        _beside_good_client(server, (linger,), tally, rng, user="good", **{"pass": "right"})


def _round_on_small_disk(folder: Path, tally: Tally, rng: Random) -> None:
    try:
        with mounted(folder), serving(folder) as server:
            _launch(starve, server, tally, rng)
    except NotPermitted:
        tally.count("disks_not_mounted")


def _launch(attack: Attack, server: Server, tally: Tally, rng: Random) -> None:
    try:
        attack(server, tally, rng)
    except OSError as error:
        tally.breaks(f"{attack.__name__} was not answered: {error}")


def _launch_until_acknowledged(
    attack: Attack, good: GoodClient, server: Server, tally: Tally, rng: Random
) -> None:
    """Attack again until the good client got an acknowledgement during an attack.

    Some attacks take less time than one fsync of a busy disk.
    """
    before, ends = len(good.acknowledged), time.monotonic() + HANG_GUARD_S
    while True:
        _launch(attack, server, tally, rng)
        if good.trouble or len(good.acknowledged) > before:
            return
        if time.monotonic() > ends:
            tally.breaks(f"the good client was acknowledged nothing during {attack.__name__}")
            return


def _beside_good_client(
    server: Server, attacks: tuple[Attack, ...], tally: Tally, rng: Random, **login: str
) -> None:
    good = GoodClient(server, f"good{rng.randrange(1 << 32)}", **login)
    for attack in attacks:
        _launch_until_acknowledged(attack, good, server, tally, rng)
        server.measure()
    good.stop()
    for sentence in good.trouble:
        tally.breaks(f"the good client was refused: {sentence}")
    if server.disk_mb() > DISK_MB_MAX:
        tally.breaks(f"the log has {server.disk_mb()} MB")
    server.restart()
    tally.acknowledged += len(good.acknowledged)
    compare(good.acknowledged, replayed(server, good.box, len(good.acknowledged), **login), tally)
    server.measure()
    if server.memory_mb > MEMORY_MB_MAX:
        tally.breaks(f"the server needed {server.memory_mb} MB")
    tally.facts["memory_mb"] = max(tally.facts.get("memory_mb", 0), server.memory_mb)
    tally.count("written_mb", server.written_mb)
