"""The traffic of `postroom up --demo`: a few agents that use every part of a running server.

Rule 1: everything is labelled. Organizations, agents, buses and mailboxes have names that begin with `demo`.
Rule 2: the traffic is bounded: `MESSAGES_A_SECOND`, and `MESSAGES_MAX` and `DEAD_LETTERS_MAX` in one run.
Rule 3: the traffic recovers by itself. Each service is down for `OUTAGE_S` now and then, which opens breakers
        for a moment; the rest of the failures are too rare to open one often.
Rule 4: the tokens of the agents end with the process, or after `TOKEN_S` when the process is killed.
"""

import argparse
import asyncio
import logging
import os
import random
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from postroom.client import EngineClient, TaskClient
from postroom.client.mail import Mail
from postroom.engine import Breaker, Policy
from postroom.errors import PostroomError, ValidationError
from postroom.goals.engine import Engine
from postroom.server.access.tokens import Permissions, TokenRegistry
from postroom.system.log import library_log
from postroom.system.parent import stop_with_stdin

ORGANIZATIONS: Final = ("demo-acme", "demo-globex", "demo-initech")
TEAM: Final = ("demo-planner", "demo-coder", "demo-reviewer")
BUS: Final = "demo-team"
MAILBOX: Final = "demo.help"
MESSAGES_A_SECOND: Final = 4.0
MESSAGES_MAX: Final = 100_000
DEAD_LETTERS_MAX: Final = 20
TOKEN_S: Final = 86_400.0
PRIORITIES: Final = (0, 1, 1, 2, 2, 2, 2, 3, 3)  # most messages are normal
SERVICES: Final = ("search", "calendar")
INVALID_SHARE: Final = 0.02
BUSY_SHARE: Final = 0.03
OUTAGE_EVERY_S: Final = 240.0
OUTAGE_S: Final = 10.0
POLICY: Final = Policy(breaker=Breaker(failures=3, window_s=30.0, cooldown_s=15.0))
RETRY_S: Final = 2.0  # after an error, such as a server that restarts
TALK_S: Final = 3.0
CLAIM_WAIT_S: Final = 2.0

SUBJECTS: Final = ("invoices", "the login page", "slow queries", "a crash on Monday", "the release notes")
_log = library_log("postroom.demo")


def fate_of(chance: float) -> str:
    """How a tool call ends, by a number from 0 to 1: fine, invalid, or busy at its first attempt."""
    if chance < INVALID_SHARE:
        return "invalid"
    return "busy" if chance < INVALID_SHARE + BUSY_SHARE else "fine"


def is_down(service: str, now_s: float) -> bool:
    """Whether a service is down, so long after the start of the demo. The services take turns."""
    shift_s = SERVICES.index(service) * OUTAGE_EVERY_S / len(SERVICES)
    return (now_s + shift_s) % OUTAGE_EVERY_S >= OUTAGE_EVERY_S - OUTAGE_S


def call_tool(payload: Mapping[str, Any], attempt: int, now_s: float) -> None:
    """Raises when the call fails."""
    if payload["fate"] == "invalid":
        raise ValidationError("demo: the tool has no such argument")
    if is_down(payload["tool"], now_s):
        raise RuntimeError("demo: the service is down for a while")
    if payload["fate"] == "busy" and attempt == 1:
        raise RuntimeError("demo: the service was busy for a moment")


class Demo:
    """The agents of the demo: one thread for each activity."""

    def __init__(self, url: str, nats: str, data: Path, store: str) -> None:
        self._url, self._nats = url, nats
        self._store = store
        self._tokens = TokenRegistry(data)
        self._stopping = threading.Event()
        self._random = random.Random()  # noqa: S311 - nothing depends on it
        self._submitted = 0
        self._dead_letters = 0
        self._mutex = threading.Lock()

    def stop(self) -> None:
        """End all threads soon."""
        self._stopping.set()

    def run(self) -> None:
        """Make traffic until `stop`."""
        self._revoke()  # files that a killed run has left
        try:
            acts = enumerate(self._acts())
            threads = [threading.Thread(target=act, name=f"demo-{number}") for number, act in acts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._revoke()

    def _acts(self) -> list[Callable[[], None]]:
        team = {name: self._token(ORGANIZATIONS[0], name, TEAM) for name in TEAM}
        agents = [self._token(org, f"{org}-agent", ()) for org in ORGANIZATIONS]
        pause_s = len(ORGANIZATIONS) / MESSAGES_A_SECOND
        acts: list[Callable[[], None]] = [
            self._work,
            partial(self._repeat, TALK_S, self._team_talk(team)),
            partial(self._repeat, 0.0, self._coder(team["demo-coder"])),
            *(partial(self._repeat, pause_s, self._submitter(token)) for token in agents),
        ]
        if self._nats:
            acts += [
                partial(self._repeat, 0.0, self._helper(team["demo-reviewer"])),
                partial(self._repeat, 2 * TALK_S, self._asker(team["demo-planner"])),
            ]
        return acts

    def _revoke(self) -> None:
        for known in self._tokens.list():
            if known.org in ORGANIZATIONS and known.is_demo:
                self._tokens.revoke(known.token_id)

    def _token(self, org: str, agent: str, may_send_to: Sequence[str]) -> str:
        allowed = Permissions(may_send_to=tuple(may_send_to))
        made = self._tokens.create("agent", org, agent, expires_s=TOKEN_S, permissions=allowed)
        return made.token

    def _repeat(self, pause_s: float, act: Callable[[], None]) -> None:
        """Repeat an act with pauses around `pause_s`. An error is logged, and the act repeated later."""
        while not self._stopping.is_set():
            try:
                act()
            except PostroomError as error:
                _log.warning("%s: tried again in %g s", error, RETRY_S)
                self._stopping.wait(RETRY_S)
            self._stopping.wait(pause_s * self._random.uniform(0.5, 1.5))

    # ---- the global queue ----------------------------------------------------------------------

    def _submitter(self, token: str) -> Callable[[], None]:
        client = EngineClient(self._url, token)

        def submit() -> None:
            with self._mutex:
                self._submitted += 1
                number = self._submitted
            if number >= MESSAGES_MAX:
                if number == MESSAGES_MAX:
                    _log.warning("the demo ends its traffic after %d messages", MESSAGES_MAX)
                return
            subject = self._random.choice(SUBJECTS)
            kind = self._random.choice(("model_call", "tool_call"))
            payload: dict[str, Any] = {"demo": True, "about": subject}
            fields: dict[str, Any] = {"priority": self._random.choice(PRIORITIES)}
            if kind == "tool_call":
                fields["service"] = self._random.choice(SERVICES)
                fate = fate_of(self._random.random())
                self._dead_letters += fate == "invalid"
                if self._dead_letters > DEAD_LETTERS_MAX and fate == "invalid":
                    fate = "fine"
                payload |= {"tool": fields["service"], "fate": fate}
            client.submit(type=kind, payload=payload, **fields)

        return submit

    def _work(self) -> None:
        """Handle the messages of all organizations in this process."""
        engine = Engine.open(self._store, policy=POLICY)
        engine.drain_s = CLAIM_WAIT_S
        rng = self._random
        started_s = time.monotonic()

        @engine.handler("model_call")
        async def answer(message: Any, ctx: Any) -> Any:
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            await ctx.progress(0.5, "thinking")
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            return {"demo": True, "answer": f"three ideas about {message.payload.get('about', 'this')}"}

        @engine.handler("tool_call")
        async def call(message: Any, ctx: Any) -> Any:
            await asyncio.sleep(rng.uniform(0.05, 0.5))
            call_tool(message.payload, ctx.attempt, time.monotonic() - started_s)
            return {"demo": True, "found": rng.randint(1, 20)}

        async def run() -> None:
            working = asyncio.create_task(engine.run())
            stopped = asyncio.create_task(asyncio.to_thread(self._stopping.wait))
            await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
            await engine.stop()
            await working

        try:
            asyncio.run(run())
        except PostroomError as error:
            _log.error("the demo handles no more messages: %s", error)
        finally:
            engine.close()

    # ---- a team: a bus, messages and tasks -----------------------------------------------------

    def _team_talk(self, team: dict[str, str]) -> Callable[[], None]:
        clients = {name: EngineClient(self._url, token) for name, token in team.items()}
        agents = {name: client.agent() for name, client in clients.items()}
        planner = TaskClient(self._url, "demo-planner", team["demo-planner"])
        thread: list[str] = []

        def post(name: str, kind: str, body: str, parents: list[str]) -> str:
            fields = {"type": kind, "project_id": ORGANIZATIONS[0], "run_id": name, "body": body}
            answer = clients[name].request("POST", f"/bus/{BUS}/messages", fields | {"parents": parents})
            return str(answer["msg_id"])

        def talk() -> None:
            subject = self._random.choice(SUBJECTS)
            if not thread:
                thread.append(post("demo-planner", "question", f"Who looks into {subject}?", []))
                planner.enqueue("demo-coder", {"demo": True, "about": subject}, type="review")
                return
            name = self._random.choice(TEAM[1:])
            kind, body = ("decision", "Done.") if len(thread) > 3 else ("note", f"I know {subject}.")  # noqa: PLR2004
            thread.append(post(name, kind, body, [self._random.choice(thread)]))
            if kind == "decision":
                thread.clear()
            for agent in agents.values():  # an agent that looks into its inbox is alive
                waiting = agent.inbox()
                if waiting:
                    agent.done(*(line["key"] for line in waiting))
            agents["demo-planner"].send(to=name, payload={"demo": True, "text": f"Thanks, {name}."})

        return talk

    def _coder(self, token: str) -> Callable[[], None]:
        client = TaskClient(self._url, "demo-coder", token)

        def work() -> None:
            task = client.next_task(wait_s=CLAIM_WAIT_S)
            if task is not None:
                self._stopping.wait(self._random.uniform(0.2, 1.0))
                client.complete_task(task, {"demo": True, "verdict": "good"})

        return work

    # ---- mailboxes -----------------------------------------------------------------------------

    def _mail(self, token: str) -> Mail:
        tls = ssl.create_default_context() if self._nats.startswith("tls:") else None
        return Mail(self._nats, token=token, tls=tls, name="postroom demo")

    def _helper(self, token: str) -> Callable[[], None]:
        def answer() -> None:
            with self._mail(token) as mail:
                mail.create(MAILBOX, public=True, desc="demo: ask anything")
                with mail.subscribe(MAILBOX) as waiting:
                    while not self._stopping.is_set():
                        asked = waiting.next(CLAIM_WAIT_S)
                        if asked is not None and asked.reply_to:
                            mail.send(asked.reply_to, "demo: try it again tomorrow")
                            mail.delete(MAILBOX, asked.msg_id)

        return answer

    def _asker(self, token: str) -> Callable[[], None]:
        def ask() -> None:
            with self._mail(token) as mail:
                mail.create(MAILBOX, public=True, desc="demo: ask anything")
                mail.ask(MAILBOX, f"demo: what about {self._random.choice(SUBJECTS)}?", timeout_s=2 * TALK_S)

        return ask


def main() -> None:
    """Make traffic until SIGTERM, SIGINT or the end of stdin."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--nats", "--data", "--store-variable"):
        parser.add_argument(name, default="")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    store = os.environ.get(given.store_variable) or f"sqlite:///{Path(given.data).absolute() / 'queue.db'}"
    demo = Demo(given.url, given.nats, Path(given.data), store)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: demo.stop())

    stop_with_stdin()
    demo.run()


if __name__ == "__main__":
    main()
