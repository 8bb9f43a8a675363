"""Published mailbox clients behind one small interface, driven through their own calls.

Each client uses its own dialect. `words` are its priorities, the most urgent first.
"""

import asyncio
import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import nats
import pytest
from robustmq.mq9.client import Client as SdkClient  # type: ignore[import-untyped]
from robustmq.mq9.client import Message as SdkMessage
from robustmq.mq9.client import Mq9Error

from postroom import Mail, MailRefused
from tests.waiting import HANG_GUARD_S

QUIET_S = 0.15  # longer than any expected message takes
NPM_PACKAGE = "nats@2.29.3"
MSG = "$mq9.AI.MAILBOX.MSG."
MAILBOX = "$mq9.AI.MAILBOX."

NODE_PROGRAM = r"""
const { connect, headers } = require("nats");
const lines = require("readline").createInterface({ input: process.stdin });
const say = (value) => process.stdout.write(JSON.stringify(value) + "\n");
const subs = {};
(async () => {
  const nc = await connect({ servers: process.argv[2] });
  say({ id: 0, ok: true });
  for await (const line of lines) {
    const ask = JSON.parse(line);
    const body = Buffer.from(ask.body || "", "base64");
    try {
      if (ask.op === "request") {
        const found = await nc.request(ask.subject, body, { timeout: 10000 });
        say({ id: ask.id, data: Buffer.from(found.data).toString("base64") });
      } else if (ask.op === "publish") {
        nc.publish(ask.subject, body);
        await nc.flush();
        say({ id: ask.id, ok: true });
      } else if (ask.op === "subscribe") {
        subs[ask.sub] = nc.subscribe(ask.subject, { queue: ask.queue || undefined, callback: (err, m) => {
          if (err) { say({ sub: ask.sub, error: err.message }); return; }
          const number = m.headers ? m.headers.get("Mq9-Msg-Id") : "";
          say({ sub: ask.sub, subject: m.subject, data: Buffer.from(m.data).toString("base64"), number });
        } });
        await nc.flush();
        say({ id: ask.id, ok: true });
      } else if (ask.op === "unsubscribe") {
        subs[ask.sub].unsubscribe();
        await nc.flush();
        say({ id: ask.id, ok: true });
      }
    } catch (error) { say({ id: ask.id, failed: String(error) }); }
  }
  await nc.close();
  process.exit(0);
})();
"""


class Got(NamedTuple):
    word: str
    payload: bytes
    msg_id: int


class Refusal(Exception):
    """A refusal of the server."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"refused with {code}")


class Inbox:
    """The messages that a subscription received."""

    def __init__(self, close: Callable[[], None] = lambda: None) -> None:
        self.close = close
        self.got: queue.SimpleQueue[Got] = queue.SimpleQueue()

    def take(self, count: int) -> list[Got]:
        return [self.got.get(timeout=HANG_GUARD_S) for _ in range(count)]

    def payloads(self, count: int) -> list[bytes]:
        return [got.payload for got in self.take(count)]

    def rest(self) -> list[Got]:
        """The messages until no more arrive."""
        found = []
        try:
            while True:
                found.append(self.got.get(timeout=QUIET_S))
        except queue.Empty:
            return found


class Client(Protocol):
    """One connection of a real client."""

    words: tuple[str, ...]

    def create(self, ttl: float = 60, *, public: bool = False, name: str = "", desc: str = "") -> str: ...

    def send(self, box: str, payload: bytes, word: str = "normal") -> None: ...

    def listen(self, box: str, *, word: str = "*", group: str = "") -> Inbox: ...

    def list(self, box: str) -> "list[tuple[int, str]]": ...

    def delete(self, box: str, msg_id: int) -> None: ...

    def close(self) -> None: ...


class Loop:
    """A loop in a thread, for clients that are made for asyncio."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> Any:
        async def done() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(HANG_GUARD_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# ---- plain NATS clients, with the subjects of the design written by hand --------------------------------


class Raw(ABC):
    """The dialect of the design, over any client that can request, publish and subscribe."""

    words: tuple[str, ...] = ("critical", "urgent", "normal")

    @abstractmethod
    def request(self, subject: str, body: bytes) -> Mapping[str, Any]: ...

    @abstractmethod
    def publish(self, subject: str, body: bytes) -> None: ...

    @abstractmethod
    def subscribe(
        self, subject: str, group: str, took: Callable[[str, bytes, str], None]
    ) -> Callable[[], None]:
        """Call `took` with subject, body and id of each message. Returns a function that ends it."""

    def ask(self, subject: str, body: bytes = b"") -> Mapping[str, Any]:
        reply = self.request(subject, body)
        if "error" in reply:
            raise Refusal(reply["code"])
        return reply

    def create(self, ttl: float = 60, *, public: bool = False, name: str = "", desc: str = "") -> str:
        body = {"ttl": ttl, "public": public, **({"name": name, "desc": desc} if public else {})}
        return str(self.ask(f"{MAILBOX}CREATE", json.dumps(body).encode())["mail_id"])

    def send(self, box: str, payload: bytes, word: str = "normal") -> None:
        self.publish(MSG + box + ("" if word == "normal" else f".{word}"), payload)

    def listen(self, box: str, *, word: str = "*", group: str = "") -> Inbox:
        def took(subject: str, payload: bytes, number: str) -> None:
            found = subject.removeprefix(MSG + box).removeprefix(".") or "normal"
            inbox.got.put(Got(found, payload, int(number)))

        inbox = Inbox()
        inbox.close = self.subscribe(MSG + box + ("" if word == "normal" else f".{word}"), group, took)
        return inbox

    def list(self, box: str) -> "list[tuple[int, str]]":
        return [(each["msg_id"], each["priority"]) for each in self.ask(f"{MAILBOX}LIST.{box}")["messages"]]

    def delete(self, box: str, msg_id: int) -> None:
        self.ask(f"{MAILBOX}DELETE.{box}.{msg_id}")


class NatsPy(Raw):
    """nats-py."""

    def __init__(self, loop: Loop, url: str) -> None:
        self._loop = loop
        self.errors: list[str] = []

        async def failed(error: Exception) -> None:
            self.errors.append(str(error))

        self._nc = loop.run(nats.connect(url, error_cb=failed, allow_reconnect=False))

    def request(self, subject: str, body: bytes) -> Mapping[str, Any]:
        found = self._loop.run(self._nc.request(subject, body, timeout=HANG_GUARD_S))
        return dict(json.loads(found.data))

    def publish(self, subject: str, body: bytes) -> None:
        self._loop.run(self._nc.publish(subject, body))

    def subscribe(
        self, subject: str, group: str, took: Callable[[str, bytes, str], None]
    ) -> Callable[[], None]:
        async def handle(msg: Any) -> None:
            took(msg.subject, msg.data, (msg.headers or {}).get("Mq9-Msg-Id", "0"))

        found = self._loop.run(self._nc.subscribe(subject, queue=group, cb=handle))
        self._flush()
        return lambda: self._end(found)

    def _end(self, subscription: Any) -> None:
        self._loop.run(subscription.unsubscribe())
        self._flush()

    def _flush(self) -> None:
        for _ in range(2):  # nats-py writes the first PING before its buffered messages
            self._loop.run(self._nc.flush())

    @property
    def is_connected(self) -> bool:
        return bool(self._nc.is_connected)

    def close(self) -> None:
        self._loop.run(self._nc.close())


class NatsJs(Raw):
    """The npm package, in a process of Node."""

    def __init__(self, folder: Path, url: str) -> None:
        self._process = subprocess.Popen(
            ["node", "-e", NODE_PROGRAM, "program", url],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NODE_PATH": str(folder / "node_modules")},
        )
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._taking: dict[int, Callable[[str, bytes, str], None]] = {}
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._answers[0].get(timeout=HANG_GUARD_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "id" in said:
                self._answers[said["id"]].put(said)
            elif "error" in said:
                self.errors.append(said["error"])
            elif "sub" in said:
                self._taking[said["sub"]](
                    said["subject"], base64.b64decode(said["data"]), said["number"] or "0"
                )

    def _do(self, op: str, body: bytes = b"", **words: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = queue.SimpleQueue()
        ask = {"id": number, "op": op, "body": base64.b64encode(body).decode(), **words}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ask).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answers[number].get(timeout=HANG_GUARD_S)
        del self._answers[number]
        assert "failed" not in answer, answer
        return answer

    def request(self, subject: str, body: bytes) -> Mapping[str, Any]:
        return dict(json.loads(base64.b64decode(self._do("request", body, subject=subject)["data"])))

    def publish(self, subject: str, body: bytes) -> None:
        self._do("publish", body, subject=subject)

    def subscribe(
        self, subject: str, group: str, took: Callable[[str, bytes, str], None]
    ) -> Callable[[], None]:
        number = next(self._numbers)
        self._taking[number] = took
        self._do("subscribe", sub=number, subject=subject, queue=group)
        return lambda: self._end(number)

    def _end(self, number: int) -> None:
        self._do("unsubscribe", sub=number)

    @property
    def is_connected(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(HANG_GUARD_S)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def installed_npm_package(folder: Path) -> Path:
    """The package from the registry. Tests that need it fail with the reason when it cannot be downloaded."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.fail("Node and npm are not installed, so the npm package `nats` was NOT tested")
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefer-offline", "--prefix", str(folder), NPM_PACKAGE],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
    )
    if done.returncode:
        pytest.fail(f"npm cannot install {NPM_PACKAGE}, so it was NOT tested: {done.stderr[-300:]}")
    return folder


# ---- the published SDK --------------------------------------------------------------------------------


class Sdk:
    """robustmq."""

    words: tuple[str, ...] = ("high", "normal", "low")

    def __init__(self, loop: Loop, url: str) -> None:
        self._loop = loop
        self._client = SdkClient(server=url)
        loop.run(self._client.connect())

    def _do(self, work: Awaitable[Any]) -> Any:
        try:
            return self._loop.run(work)
        except Mq9Error as error:
            raise Refusal(error.code) from error

    def create(self, ttl: float = 60, *, public: bool = False, name: str = "", desc: str = "") -> str:
        found = self._do(self._client.create(ttl=ttl, public=public, name=name, desc=desc))
        return str(found.mail_id)

    def send(self, box: str, payload: bytes, word: str = "normal") -> None:
        self._do(self._client.send(box, payload, priority=word))

    def listen(self, box: str, *, word: str = "*", group: str = "") -> Inbox:
        async def handle(message: SdkMessage) -> None:
            inbox.got.put(Got(message.priority.value, message.payload, int(message.msg_id)))

        inbox = Inbox()
        found = self._do(self._client.subscribe(box, handle, priority=word, queue_group=group))
        inbox.close = lambda: self._loop.run(found.unsubscribe())
        for _ in range(2):
            self._loop.run(self._client._nc.flush())
        return inbox

    def list(self, box: str) -> "list[tuple[int, str]]":
        return [(int(each.msg_id), each.priority.value) for each in self._do(self._client.list(box))]

    def delete(self, box: str, msg_id: int) -> None:
        self._do(self._client.delete(box, str(msg_id)))

    @property
    def is_connected(self) -> bool:
        return bool(self._client._nc is not None and self._client._nc.is_connected)

    def close(self) -> None:
        self._loop.run(self._client.close())


# ---- our own ------------------------------------------------------------------------------------------


class Ours:
    """`postroom.Mail`."""

    words: tuple[str, ...] = ("critical", "urgent", "normal")
    is_connected = True

    def __init__(self, url: str) -> None:
        self._mail = Mail(url)
        self._mail.__enter__()

    def create(self, ttl: float = 60, *, public: bool = False, name: str = "", desc: str = "") -> str:
        return self._mail.create(name, ttl_s=ttl, public=public, desc=desc)

    def send(self, box: str, payload: bytes, word: str = "normal") -> None:
        self._mail.send(box, payload, priority=word, wait=False)  # type: ignore[arg-type]

    def listen(self, box: str, *, word: str = "*", group: str = "") -> Inbox:
        try:
            messages = self._mail.subscribe(box, priority=word, group=group)  # type: ignore[arg-type]
        except MailRefused as error:
            raise Refusal(error.code) from error

        def read() -> None:
            for message in messages:
                inbox.got.put(Got(message.priority, message.payload, message.msg_id))

        inbox = Inbox(messages.close)
        threading.Thread(target=read, daemon=True).start()
        return inbox

    def list(self, box: str) -> "list[tuple[int, str]]":
        try:
            return [(each.msg_id, each.priority) for each in self._mail.list(box)]
        except MailRefused as error:
            raise Refusal(error.code) from error

    def delete(self, box: str, msg_id: int) -> None:
        self._mail.delete(box, msg_id)

    def close(self) -> None:
        self._mail.close()


class Clients:
    """Creates clients of every kind, keeps idle ones for the next test, and closes them."""

    def __init__(self, npm_folder: Path) -> None:
        self._loop = Loop()
        self._npm_folder = npm_folder
        self._used: list[tuple[str, str, Client]] = []
        self._idle: list[tuple[str, str, Client]] = []

    def connect(self, kind: str, url: str) -> Client:
        """A connection that no other test uses now."""
        for known in self._idle:
            if known[:2] == (kind, url):
                self._idle.remove(known)
                self._used.append(known)
                return known[2]
        kinds: dict[str, Callable[[], Client]] = {
            "nats-py": lambda: NatsPy(self._loop, url),
            "nats.js": lambda: NatsJs(self._npm_folder, url),
            "robustmq": lambda: Sdk(self._loop, url),
            "Mail": lambda: Ours(url),
        }
        self._used.append((kind, url, kinds[kind]()))
        return self._used[-1][2]

    def end(self, client: Client) -> None:
        self._used = [known for known in self._used if known[2] is not client]
        client.close()

    def release(self) -> None:
        """Called at the end of a test."""
        self._idle += self._used
        self._used = []

    def close(self) -> None:
        self.release()
        for _, _, client in self._idle:
            client.close()
        self._loop.close()
