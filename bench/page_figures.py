"""The speed of the live page: its first view, what open pages cost, and the way of an event to the screen."""

import asyncio
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from enginebench.engines import ADMIT_ALL
from figures import REPEATS, Figure, Goal, percentile
from playwright.sync_api import Browser, Page, sync_playwright
from up_figures import submit_rate

from postroom import Engine
from postroom.core.lifecycle import lifecycle
from postroom.stores.base import Listing
from postroom.stores.transaction import Transaction

FIRST_VIEW_MS = 300.0
VIEW_CPU_MS = 100.0
CALLS_A_VIEW = 5
VIEWS = (
    "/page/overview",
    "/page/messages",
    "/page/messages?org_id=org-3",
    "/page/messages?state=DEAD_LETTER",
    "/page/messages?state=COMPLETED",
    "/page/messages?text=nowhere",
    "/page/messages?type=tool_call",
    "/page/messages/{id}",
    "/page/dead-letters",
    "/page/dead-letters?type=nothing",
    "/page/agents",
    "/page/tasks",
    "/page/decisions",
    "/page/goals",
)
DEAD_SHARE = 100  # one of so many messages is a dead letter
KEPT_SHARE = 0.9
EVENT_P50_MS = 200.0
BATCH = 1_000

OPEN_PAGES = """
import asyncio, sys
async def page(host, port, token):
    reader, writer = await asyncio.open_connection(host, port)
    lines = ("GET /page/stream HTTP/1.1", f"host: {host}", f"authorization: Bearer {token}", "", "")
    writer.write("\\r\\n".join(lines).encode())
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    assert b" 200 " in head, head
    print("open", flush=True)
    while await reader.read(1 << 20):
        pass
async def main():
    host, port, token, count = sys.argv[1:]
    await asyncio.gather(*(page(host, int(port), token) for _ in range(int(count))))
asyncio.run(main())
"""

WORK = """
import asyncio, sys
from postroom import Engine
from enginebench.engines import ADMIT_ALL
engine = Engine.open(sys.argv[1], ADMIT_ALL)
@engine.handler("agent_message")  # of which there is a backlog
@engine.handler("tool_call")
async def work(message, ctx):
    return message.payload
async def main():
    print("ready", flush=True)
    await engine.run(concurrency=10)
asyncio.run(main())
"""

OBSERVE = """() => {
    window.seen = {};
    const note = () => {
        for (const line of document.querySelectorAll(".feed li"))
            window.seen[line.dataset.id] ??= performance.timeOrigin + performance.now();
    };
    new MutationObserver(note).observe(document.querySelector(".feed"), { childList: true });
}"""


DRAWN = """
const note = () => { if (document.querySelector("SELECTOR")) window.drawnAt ??= performance.now(); };
new MutationObserver(note).observe(document, { childList: true, subtree: true });
"""


class Server:
    """`postroom up` without the audit shipper."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.url, self.token, self.pid = facts["http"], facts["token"], int(facts["pid"])
        address = urlsplit(self.url)
        self.host, self.port = address.hostname or "", address.port or 0
        self._headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        self._body = json.dumps(
            {"type": "agent_message", "org_id": "bench", "priority": 0, "payload": {"body": 1}}
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def get(self, connection: http.client.HTTPConnection, path: str) -> Any:
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        assert answer.status == HTTPStatus.OK, answer.read()
        return json.loads(answer.read())

    def cpu_ms(self) -> float:
        """The time that the process of HTTP has used."""
        [child] = [
            child
            for thread in Path(f"/proc/{self.pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
        threads = Path(f"/proc/{child}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6

    def submit(self, connection: http.client.HTTPConnection) -> str:
        connection.request("POST", "/engine/messages", self._body, self._headers)
        return str(json.loads(connection.getresponse().read())["message_id"])


@contextmanager
def serving(data: Path) -> Iterator[Server]:
    words = ["up", "--data", str(data), "--http-port", "0", "--nats-port", "0", "--no-audit", "--no-mail"]
    process = subprocess.Popen(
        [sys.executable, "-m", "postroom.cli.main", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield Server(json.loads(process.stdout.readline()))
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def browsing() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "the page is measured in a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def signed_in(browser: Browser, server: Server) -> Page:
    page = browser.new_context().new_page()
    page.goto(server.url)
    page.get_by_label("Token").fill(server.token)
    page.get_by_role("button", name="Sign in").click()
    page.locator(".waits table").wait_for()
    return page


async def _store(data: Path, count: int) -> None:
    async with Engine.open(f"sqlite:///{data / 'queue.db'}", ADMIT_ALL) as engine:
        for first in range(0, count, BATCH):
            await engine.submit_many(
                {
                    "type": "agent_message",
                    "org_id": f"org-{number % 10}",
                    "priority": 3,
                    "payload": {"to": str(number), "body": "a message as agents write them"},
                }
                for number in range(first, min(count, first + BATCH))
            )
        newest = engine.store.newest_event() + 1
        for page in range(max(1, count // DEAD_SHARE // BATCH)):
            engine.store.write(partial(_bury, newest, min(BATCH, 1 + count // DEAD_SHARE), page))


def _bury(newest: int, count: int, page: int, transaction: Transaction) -> None:
    """Make dead letters of some of the newest messages."""
    listing = Listing(None, "QUEUED", 0, count, newest - page * count)
    transaction.apply(listing, lambda record, moment: lifecycle.quarantine(record, moment, "a poison"))


def _load_ms(page: Page, url: str, drawn: str) -> float:
    """From the start of the navigation to the first row, by the clock of the browser."""
    page.goto("about:blank")
    page.goto(url, wait_until="commit")
    page.locator(drawn).first.wait_for()
    return float(page.evaluate("window.drawnAt"))


def _cold_ms(page: Page, url: str, drawn: str) -> float:
    """As `_load_ms`, by a browser that has the session and nothing in its cache."""
    assert page.context.browser is not None
    context = page.context.browser.new_context(storage_state=page.context.storage_state())
    fresh = context.new_page()
    fresh.add_init_script(DRAWN.replace("SELECTOR", drawn))
    took_ms = _load_ms(fresh, url, drawn)
    context.close()
    return took_ms


def page_figures(
    folder: Path, *, messages: int, loads: int, seconds: float, events: int, pages: int
) -> Iterator[Figure]:
    """All figures, on one server."""
    data = folder / "run"
    data.mkdir(parents=True)
    asyncio.run(_store(data, messages))
    with serving(data) as server:
        with browsing() as browser:
            page = signed_in(browser, server)
            yield from first_view_figures(page, server, messages, loads)
            yield view_figure(server, messages)
            yield from event_figures(page, server, events)
        yield from open_pages_figures(server, data, seconds, pages)


def first_view_figures(page: Page, server: Server, messages: int, loads: int) -> Iterator[Figure]:
    """The time until a browser that is signed in shows the first figures and the first messages."""
    for view, drawn in (("overview", ".organizations td"), ("messages", "tbody td")):
        fresh = page.context.new_page()
        fresh.add_init_script(DRAWN.replace("SELECTOR", drawn))
        times = [_load_ms(fresh, f"{server.url}/#/{view}", drawn) for _ in range(loads)]
        fresh.close()
        cold = [_cold_ms(page, f"{server.url}/#/{view}", drawn) for _ in range(loads)]
        yield Figure(
            f"first view of the {view}, {messages:,} messages stored, p50",
            percentile(times, 0.5),
            "ms",
            f"slowest of {loads}: {max(times):.0f} ms",
            goals=[Goal("value", "<", FIRST_VIEW_MS)],
        )
        yield Figure(
            f"first view of the {view}, with an empty cache, p50",
            percentile(cold, 0.5),
            "ms",
            f"slowest of {loads}: {max(cold):.0f} ms",
        )


def view_figure(server: Server, messages: int) -> Figure:
    """The CPU time of the server for each view and search; the slowest one is compared with the goal."""
    connection = server.connect()
    found = server.get(connection, "/page/messages")["messages"][0]["message_id"]
    times = {}
    for view in VIEWS:
        path = view.format(id=found)
        server.get(connection, path)  # the first call imports and compiles
        begun = server.cpu_ms()
        for _ in range(CALLS_A_VIEW):
            server.get(connection, path)
        times[view.removeprefix("/page/")] = (server.cpu_ms() - begun) / CALLS_A_VIEW
    connection.close()
    return Figure(
        f"CPU of the slowest view or search, {messages:,} messages stored",
        max(times.values()),
        "ms",
        ", ".join(f"{view} {spent:.1f}" for view, spent in times.items()),
        goals=[Goal("value", "<", VIEW_CPU_MS)],
    )


@contextmanager
def open_pages(server: Server, pages: int) -> Iterator[None]:
    command = [sys.executable, "-c", OPEN_PAGES, server.host, str(server.port), server.token, str(pages)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for _ in range(pages):
            assert process.stdout.readline() == b"open\n"
        yield
    finally:
        process.terminate()
        process.communicate()


class Rates(NamedTuple):
    """Messages a second."""

    submitted: float
    completed: float


@contextmanager
def working(data: Path) -> Iterator[None]:
    """A worker in a process of its own, which completes what is submitted."""
    command = [sys.executable, "-c", WORK, f"sqlite:///{data / 'queue.db'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        process.communicate()


def rates_of(server: Server, seconds: float) -> Rates:
    """What clients submit together, and what the worker completes meanwhile."""
    connection = server.connect()
    begun, before = time.perf_counter(), completed(server, connection)
    submitted = submit_rate(server.url, server.token, seconds)
    while not (done := completed(server, connection) - before):  # a very short run
        time.sleep(0.01)
    took_s = time.perf_counter() - begun
    connection.close()
    return Rates(submitted, done / took_s)


def completed(server: Server, connection: http.client.HTTPConnection) -> int:
    organizations = server.get(connection, "/engine/status")["organizations"].values()
    return sum(int(one["states"].get("COMPLETED", 0)) for one in organizations)


def open_pages_figures(server: Server, data: Path, seconds: float, pages: int) -> Iterator[Figure]:
    """An engine at work without and with open pages, in turns. Both its rates are compared."""
    alone, watched = [], []
    with working(data):
        rates_of(server, seconds / 2)
        for _ in range(REPEATS):
            alone.append(rates_of(server, seconds))
            with open_pages(server, pages):
                watched.append(rates_of(server, seconds))
    for place, what in enumerate(Rates._fields):
        yield Figure(
            f"messages {what} with {pages} open pages",
            statistics.median(one[place] for one in watched),
            "messages/s",
            f"without a page: {statistics.median(one[place] for one in alone):,.0f} messages/s",
            statistics.median(w[place] / a[place] for w, a in zip(watched, alone, strict=True)),
            goals=[Goal("ratio", ">=", KEPT_SHARE)],
        )


def event_figures(page: Page, server: Server, events: int) -> Iterator[Figure]:
    """From the call of a submit over HTTP to the line on the screen."""
    page.evaluate(OBSERVE)
    connection = server.connect()
    times = []
    for _ in range(events):
        begun_ms = time.time() * 1_000
        message_id = server.submit(connection)
        page.locator(f'.feed li[data-id="{message_id}"]').first.wait_for()
        times.append(float(page.evaluate("id => window.seen[id]", message_id)) - begun_ms)
    connection.close()
    yield Figure(
        "event to screen, p50",
        percentile(times, 0.5),
        "ms",
        f"p99: {percentile(times, 0.99):.0f} ms",
        goals=[Goal("value", "<", EVENT_P50_MS)],
    )
