"""The mail act of the demo: mailboxes of the mq9 design, used with its published SDK.

A coordinator sends jobs to a public mailbox before any worker runs. The server is killed with -9 and started
again. One worker receives jobs and dies without finishing them; the other worker gets these too. The results
go to a private mailbox, the urgent one first, and LangChain's tools read them there.
"""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_mq9 import Mq9Toolkit  # type: ignore[import-untyped]
from robustmq.mq9 import Client, Priority  # type: ignore[import-untyped]

PAGES = 9  # LangChain's tool shows ten messages at most
SHARED = "pages.to.read"
TEAM = "readers"
TIME_LIMIT_S = 600.0

Say = Callable[[str, str, str], None]


class MailServer:
    """`postroom mail serve`, on the same port after each restart."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = "0"
        self.start()

    def start(self) -> None:
        serve = ["mail", "serve", "--data", str(self._data), "--port", self._port]
        self._process = subprocess.Popen(
            [Path(sys.executable).parent / "postroom", *serve], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]
        self._port = self.url.rpartition(":")[2]

    def end(self, number: int = signal.SIGTERM) -> int:
        self._process.send_signal(number)
        self._process.communicate(timeout=TIME_LIMIT_S)
        return self._process.returncode


async def leave_work(url: str) -> tuple[str, list[str]]:
    """Send the jobs; returns the mailbox for the results, and the ids that the server has stored."""
    async with Client(server=url) as client:
        results = (await client.create(ttl=600)).mail_id
        await client.create(ttl=600, public=True, name=SHARED, desc="summaries wanted")
        for page in range(PAGES):
            await client.send(SHARED, {"page": page, "reply_to": results}, priority=Priority.HIGH)
        return results, [each.msg_id for each in await client.list(SHARED)]


class Worker:
    """A member of the queue group. It finishes its jobs, or holds them until it dies."""

    def __init__(self, url: str, name: str, *, works: bool) -> None:
        self.name = name
        self.got: list[str] = []
        self._works = works
        self._client = Client(server=url)

    async def begin(self) -> None:
        await self._client.connect()
        await self._client.subscribe(SHARED, self._take, queue_group=TEAM)

    async def _take(self, message: Any) -> None:
        self.got.append(message.msg_id)
        if self._works:
            await self.finish(message)

    async def finish(self, message: Any) -> None:
        job = json.loads(message.payload)
        last = job["page"] == PAGES - 1
        summary = {"page": job["page"], "by": self.name}
        await self._client.send(job["reply_to"], summary, priority=Priority.HIGH if last else Priority.NORMAL)
        await self._client.delete(SHARED, message.msg_id)

    async def die(self) -> None:
        await self._client.close()


async def work(url: str, results: str, say: Say) -> dict[str, list[str]]:
    """Two workers, one of which dies while it holds every job."""
    ada, bob = Worker(url, "ada", works=False), Worker(url, "bob", works=True)
    await ada.begin()
    await until(lambda: len(ada.got) == PAGES)
    say("ada", "holds", f"all {PAGES} pages: the only member of {TEAM!r}")
    await bob.begin()
    await ada.die()
    say("ada", "dies", "before finishing any of them")
    async with Client(server=url) as client:
        await until_empty(client)
        say("bob", "finished", f"{len(bob.got)} pages, and deleted each")
        listed = [each.priority.value for each in await client.list(results)]
        say("results", "in order", f"{listed[0]} before {listed[-1]}")
    await bob.die()
    return {"ada": ada.got, "bob": bob.got}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIME_LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the SDK calls back
            await asyncio.sleep(0.01)


async def until_empty(client: Any) -> None:
    async with asyncio.timeout(TIME_LIMIT_S):
        while await client.list(SHARED):  # noqa: ASYNC110 - there is no callback for it
            await asyncio.sleep(0.01)


async def read_with_langchain(url: str, results: str) -> str:
    tools = {tool.name: tool for tool in Mq9Toolkit(server=url).get_tools()}
    return str(await tools["get_messages"].ainvoke({"mail_id": results}))


def act_mail(folder: Path, say: Say) -> bool:
    """Run the act; returns whether every stored job was done once."""
    print("\nAct 3: mailboxes over NATS, with the published SDK of mq9\n")
    logging.getLogger("robustmq").setLevel(logging.ERROR)  # it warns about each connection that it closes
    server = MailServer(folder / "mail")
    try:
        results, stored = asyncio.run(leave_work(server.url))
        say("coordinator", "sent", f"{len(stored)} pages to {SHARED}, before any worker ran")
        server.end(signal.SIGKILL)
        server.start()
        say("mail", "kill -9", "and started again")
        got = asyncio.run(work(server.url, results, say))
        read = asyncio.run(read_with_langchain(server.url, results))
    finally:
        code = server.end()
    print("\nThe proof: the messages that the server had stored, against those that were done\n")
    done = Counter(got["bob"])
    lost, doubled = len(set(stored) - set(done)), sum(count - 1 for count in done.values())
    print(f"  mail   stored {len(stored):>4}   after kill -9 {len(got['ada']):>4}   done {len(done):>4}   "
          f"lost {lost}   doubled {doubled}")  # fmt: skip
    answers = read.count('"by": "bob"')
    print(f"  results that a LangChain agent reads in its private mailbox: {answers}")
    return not (lost or doubled or code) and got["ada"] == stored and answers == PAGES
