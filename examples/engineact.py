"""The engine act of the demo: two organizations share a queue, and several things go wrong.

Two worker processes run under a supervisor. Organization acme floods the queue, and a message of zen starts
at once all the same. A poison message kills its worker process, and ends in quarantine while its neighbours
finish. A service is down: its breaker opens, a probe finds the service up again, and the breaker closes. A
handler with a bug makes dead letters; after the bug is fixed they are replayed, and nobody is charged twice.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from postroom import Breaker, Engine, Policy, Retry, SubmitFields
from postroom.server.harness.engine_workers import WorkerProcesses

FLOOD = 400
NEIGHBOURS = 6
CALLS = 5
ORDERS = 3
WORKERS = 2
SLOTS = 4  # messages that one worker process handles at a time
COOLDOWN_S = 2.5  # short, as are the pauses: the demo does not wait for long
TIME_LIMIT_S = 600.0

POLICY = Policy(
    retries={"tool_call": Retry(delay_s=0.2)},
    breakers={"slack": Breaker(failures=3, cooldown_s=COOLDOWN_S)},
)

Say = Callable[[str, str, str], None]


def store_url(folder: Path) -> str:
    """The store of this act in the folder of the demo."""
    return f"sqlite:///{folder / 'engine' / 'queue.db'}"


# ---- what the worker processes run ---------------------------------------------------------------


def engine_of(folder: Path) -> Engine:
    """The engine with its handlers. Each handler notes what it does in a file, for the proof."""
    engine = Engine.open(store_url(folder), POLICY)
    notes = folder / "engine"

    @engine.handler("model_call")
    async def think(message: Any, _ctx: Any) -> int:
        await asyncio.sleep(message.payload["takes_s"])
        return int(message.payload["n"]) ** 2

    @engine.handler("agent_message")
    async def poison(_message: Any, _ctx: Any) -> None:
        note(notes / "killed.txt", str(os.getpid()))
        await asyncio.sleep(0.1)  # its neighbours have started
        os.kill(os.getpid(), signal.SIGKILL)

    @engine.handler("tool_call")
    async def call_service(message: Any, _ctx: Any) -> str:
        service = message.service
        note(notes / f"calls-{service}.txt", str(time.time_ns()))
        if (notes / f"{service}.down").exists():
            raise ConnectionError(f"{service} does not answer")
        return "posted"

    @engine.handler("memory_save", retry=Retry(max_retries=0))
    async def order(message: Any, ctx: Any) -> str:
        await ctx.effect("charge", lambda: note(notes / "charges.txt", message.message_id))
        if (notes / "bug").exists():
            raise ZeroDivisionError("a bug after the charge")
        return "shipped"

    return engine


def note(file: Path, text: str) -> str:
    """Append a line to a file."""
    with file.open("a") as opened:
        opened.write(f"{text}\n")
    return text


def noted(file: Path) -> list[str]:
    """The lines that handlers noted."""
    return file.read_text().splitlines() if file.exists() else []


def be_worker(folder: Path, worker_id: str) -> None:
    """A worker process: handle messages until SIGTERM."""
    note(folder / "engine" / "workers.txt", str(os.getpid()))
    logging.basicConfig(filename=folder / "engine" / "log.txt")
    engine = engine_of(folder)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(engine.stop()))
        await engine.run(concurrency=SLOTS, worker_id=worker_id)

    asyncio.run(run())
    engine.close()


# ---- the act ---------------------------------------------------------------------------------------


class Act:
    """The scenes of the act. Each one returns whether its facts are as they should be."""

    def __init__(self, folder: Path, engine: Engine, say: Say) -> None:
        self.notes = folder / "engine"
        self.engine = engine
        self.say = say
        self.accepted: list[str] = []

    def submit(
        self,
        count: int,
        *,
        type: str,  # noqa: A002 - the word of `submit`
        org_id: str = "acme",
        takes_s: float = 0.0,
        priority: int = 2,
        service: str = "",
    ) -> list[str]:
        """Submit messages in one commit; returns their ids."""
        message = SubmitFields(type=type, org_id=org_id, payload={}, priority=priority, service=service)
        handles = self.engine.blocking.submit_many(
            [{**message, "payload": {"n": n, "takes_s": takes_s}} for n in range(count)]
        )
        ids = [handle.message_id for handle in handles]
        self.accepted += ids
        return ids

    def states(self, ids: list[str]) -> Counter[str]:
        """How many of the messages are in which state."""
        return Counter(self.engine.blocking.get(message_id).state for message_id in ids)

    def kinds(self, message_id: str) -> set[str]:
        """The kinds of events of a message."""
        return {event.kind for event in self.engine.blocking.get(message_id).history}

    def completed(self, org_id: str) -> int:
        """How many messages of an organization are done."""
        status = self.engine.blocking.status().organizations.get(org_id)
        return 0 if status is None else int(status.states.get("COMPLETED", 0))

    def wait(self, ids: list[str], state: str) -> None:
        """Wait until all of the messages are in a state."""
        until(lambda: self.states(ids)[state] == len(ids), f"{len(ids)} messages to be {state}")

    # ---- a flood -----------------------------------------------------------------------------------

    def flood(self) -> bool:
        """One organization floods the queue; the message of another one starts at once."""
        flood = self.submit(FLOOD, type="model_call", takes_s=0.04)
        self.say("acme", "floods", f"{FLOOD} messages, for {WORKERS} processes with {SLOTS} slots each")
        until(lambda: self.completed("acme") >= FLOOD // 8, "the flood to flow")
        waiting = self.engine.blocking.status().organizations["acme"].depth
        [single] = self.submit(1, type="model_call", org_id="zen", takes_s=0.04)
        self.wait([single], "COMPLETED")
        ahead, after_ms = self.start_of(single)
        first = f"{ahead} of {waiting} waiting messages went first"
        self.say("zen", "is served", f"after {after_ms:.0f} ms; {first}")
        for quarter in range(1, 5):
            self.wait(flood[: FLOOD * quarter // 4], "COMPLETED")
            self.say("acme", "progress", f"{self.completed('acme')} of {FLOOD} done")
        # Each slot may have been given one more message of acme before it was the turn of zen.
        return self.states(flood)["COMPLETED"] == FLOOD and ahead <= WORKERS * SLOTS < waiting

    def start_of(self, message_id: str) -> tuple[int, float]:
        """How many messages were started between a message's submit and its start, and the milliseconds."""
        history = self.engine.blocking.get(message_id).history
        first, start = history[0], next(event for event in history if event.kind == "dequeued")
        between = self.engine.store.events(first.seq, start.seq - first.seq)
        ahead = sum(event.kind == "dequeued" and event.seq < start.seq for event in between)
        return ahead, (start.ts_us - first.ts_us) / 1000

    # ---- poison ------------------------------------------------------------------------------------

    def poison(self) -> bool:
        """A message kills every process that runs it."""
        [bad] = self.submit(1, type="agent_message", priority=0)
        near = self.submit(NEIGHBOURS, type="model_call", takes_s=0.3)
        killed = self.notes / "killed.txt"
        until(lambda: len(noted(killed)) >= 1, "the poison message to start")
        first = noted(killed)[0]
        until(lambda: len(noted(self.notes / "workers.txt")) > WORKERS, "a new worker process")
        self.say("poison", "kills", f"worker process {first}; the supervisor starts another one")
        self.wait([bad], "QUARANTINED")
        alone = len(noted(killed)) - 1
        letter = self.engine.blocking.dlq.show(bad)
        self.say("poison", "quarantined", f"after it ran alone and killed {alone} processes of its own")
        self.wait(near, "COMPLETED")
        crashes = sum("lease_lapsed" in self.kinds(message_id) for message_id in near)
        self.say("neighbours", "finished", f"{NEIGHBOURS} of {NEIGHBOURS}; the crash interrupted {crashes}")
        was_worker = first in noted(self.notes / "workers.txt")
        return was_worker and alone == POLICY.poison_crashes and letter.state == "QUARANTINED"

    # ---- an outage ---------------------------------------------------------------------------------

    def outage(self) -> bool:
        """A service is down for a while; another service is not affected."""
        down, calls = self.notes / "slack.down", self.notes / "calls-slack.txt"
        down.touch()
        slack = self.submit(CALLS, type="tool_call", service="slack")
        until(lambda: self.happened("breaker_opened") > 0, "the breaker to open")
        until(lambda: not self.states(slack)["PROCESSING"], "the calls that were under way")
        failed = len(noted(calls))
        self.say("slack", "is down", f"{failed} calls failed, so its breaker is open")
        github = self.submit(CALLS, type="tool_call", service="github")
        self.wait(github, "COMPLETED")
        probes = len(noted(calls)) - failed
        self.say("github", "is up", f"{CALLS} of {CALLS} calls done meanwhile, {probes or 'none'} of slack")
        down.unlink()
        until(lambda: len(noted(calls)) > failed + probes, "the probe")
        times = [int(line) / 1e9 for line in noted(calls)]
        # On a busy machine the service has been probed while it was down, too.
        pauses_s = [later - earlier for earlier, later in pairwise(times[failed - 1 : failed + probes + 1])]
        self.say("slack", "is probed", f"{pauses_s[-1]:.1f} s after the last call")
        until(lambda: self.breaker() == "closed", "the breaker to close")
        self.say("slack", "is up", "its breaker is closed")
        self.wait(slack, "COMPLETED")
        deferred = sum("deferred" in self.kinds(message_id) for message_id in slack)
        self.say("slack", "finished", f"{CALLS} of {CALLS} calls; {deferred} of them had to wait")
        return self.happened("breaker_closed") == 1 and deferred > 0 and min(pauses_s) >= COOLDOWN_S

    def breaker(self) -> str:
        """The state of slack's breaker."""
        status = self.engine.blocking.status().breakers.get("slack")
        return "closed" if status is None else str(status.state)

    def happened(self, kind: str) -> int:
        """How many events of a kind there are."""
        return sum(event.kind == kind for event in self.events())

    def events(self) -> list[Any]:
        """All events of the store."""
        return self.engine.store.events(0, 1_000_000)

    # ---- dead letters ------------------------------------------------------------------------------

    def dead_letters(self) -> bool:
        """A bug makes dead letters; they are replayed when it is fixed."""
        bug, dlq = self.notes / "bug", self.engine.blocking.dlq
        bug.touch()
        orders = self.submit(ORDERS, type="memory_save", org_id="zen")
        self.wait(orders, "DEAD_LETTER")
        letters = dlq.list(org_id="zen")
        charges = Counter(noted(self.notes / "charges.txt"))
        self.say("zen", "dead letters", f"{len(letters)} orders: {letters[0].failure_reason}")
        self.say("zen", "charged", f"{charges.total()} times, before the bug struck")
        bug.unlink()
        replayed = dlq.replay(org_id="zen")
        self.wait(orders, "COMPLETED")
        charges = Counter(noted(self.notes / "charges.txt"))
        total = f"charged {charges.total()} times in all"
        self.say("zen", "replayed", f"{replayed.replayed} orders, all done; {total}")
        return sorted(replayed.message_ids) == sorted(orders) and charges == Counter(orders)

    # ---- the proof -----------------------------------------------------------------------------------

    def prove(self) -> bool:
        """Every accepted message has ended once, all but the poison one with a result."""
        states = self.states(self.accepted)
        ends = Counter(event.message_id for event in self.events() if event.kind == "execution_completed")
        lost = len(self.accepted) - states["COMPLETED"] - states["QUARANTINED"]
        doubled = sum(count > 1 for count in ends.values())
        print(f"  engine accepted {len(self.accepted):>4}   completed {states['COMPLETED']:>4}   "
              f"quarantined {states['QUARANTINED']}   lost {lost}   doubled {doubled}")  # fmt: skip
        return not lost and not doubled and states["QUARANTINED"] == 1


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, up to the time limit."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the demo timed out while it waited for {what}")
        time.sleep(0.02)


@contextmanager
def workers(folder: Path, engine: Engine) -> Any:
    """Worker processes under a supervisor."""

    def command(worker_id: str) -> list[str]:
        return [sys.executable, __file__, str(folder), worker_id]

    processes = WorkerProcesses(engine, command, least=WORKERS, most=WORKERS)
    supervisor = threading.Thread(target=processes.run)
    supervisor.start()
    try:
        yield
    finally:
        processes.stop()
        supervisor.join()


def act_engine(folder: Path, say: Say) -> bool:
    """Run the act; returns whether everything that it printed is as it should be."""
    print("\nAct 4: the global queue with two organizations, poison, an outage and dead letters\n")
    (folder / "engine").mkdir()
    logging.getLogger("postroom.engine").addHandler(logging.FileHandler(folder / "engine" / "log.txt"))
    with engine_of(folder) as engine:
        act = Act(folder, engine, say)
        with workers(folder, engine):
            scenes = [scene() for scene in (act.flood, act.poison, act.outage, act.dead_letters)]
        print("\nThe proof: the accepted messages, against the store\n")
        return act.prove() and all(scenes)


if __name__ == "__main__":
    be_worker(Path(sys.argv[1]), sys.argv[2])
