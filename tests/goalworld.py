"""A world of goals in one store, driven by random numbers from a seed.

Goals are started, steps with effects run, fail, and are recovered; rollbacks die between their commits and
are resumed; main changes under the branches; people decide or do not. Then the world is drained, and every
rule is checked. Nothing here has threads or reads the real time, so a seed gives the same history every time.

    report = GoalWorld(seed=7).run()
    assert not report.broken, report
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from postroom.core.goals import advice
from postroom.core.goals.advice import Advice, Question
from postroom.core.lifecycle.retry import Retry
from postroom.engine.rules.cells import Kind, joined
from postroom.engine.rules.policy import Guard, Policy
from postroom.errors import GoalEnded, Rejected, RollbackRefused, ValidationError
from postroom.goals.advisers.adviser import Adviser
from postroom.goals.engine import Engine, InlineEngine
from postroom.goals.goal_cells import EFFECTS, OPEN, PENDING, ROLLBACKS, UNDOES
from postroom.goals.graph.branches import BRANCHES, HISTORY, MAIN, STAGED, UNDO
from postroom.testing.events import check_consistency

STEPS: Final = (8, 25)
GOALS: Final = ("g1", "g2", "g3")
IMPLICIT: Final = ("h1", "h2")
"""Goals that nobody starts: a save does."""
NODES: Final = ("n1", "n2", "n3")
DRAIN_ROUNDS_MAX: Final = 50


class GoalReport(msgspec.Struct, frozen=True):
    """What one seed gave."""

    seed: int
    broken: list[str]
    actions: dict[str, int]
    trace: list[str]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {len(self.broken)} broken rules", *self.broken, *self.trace])


class _Killed(Exception):
    """The process dies between two commits."""


class _Seeded(Adviser):
    """Takes any option, sometimes without being sure."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def advise(self, question: Question) -> Advice:
        if self._chance.random() < 0.5:
            return advice.advise(question)
        return Advice(self._chance.choice(question.options), self._chance.choice((0.1, 0.9)), "by chance")


class GoalWorld:
    """One seeded history of goals."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        adviser = _Seeded(self._random) if self._random.random() < 0.5 else None
        self._policy = Policy(
            adviser=adviser,
            retries={"tool_call": Retry(max_retries=0), "model_call": Retry(max_retries=0)},
            guard=Guard(recoveries=self._random.choice((1, 3))),
            decision_timeout_s=50.0,
        )
        self._done: Counter[str] = Counter()
        """Effects that happened, minus those that were undone."""
        self._final: Counter[str] = Counter()
        """Irreversible effects, by message and key."""
        self._main: dict[str, Any] = {}
        self._started: list[str] = []
        self._ended: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._broken: list[str] = []
        self._trace: list[str] = []

    def run(self) -> GoalReport:
        """Make the history, drain the world, and check the rules."""
        asyncio.run(self._run())
        return GoalReport(self.seed, self._broken, dict(self._counts), self._trace)

    async def _run(self) -> None:
        with Engine.open("memory://", self._policy) as template, template.testing() as engine:
            self._engine: InlineEngine = engine
            self._register()
            actions = [*[self._step] * 6, self._write, self._write, self._main_changes, self._roll_back]
            actions += [self._save]
            actions += [self._start, self._roll_back_and_die, self._wait, self._answer]
            actions += [self._complete, self._fail] if self._random.random() < 0.7 else []
            await self._start()
            for _ in range(self._random.randint(*STEPS)):
                action: Callable[[], Any] = self._random.choice(actions)
                self._counts[action.__name__.strip("_")] += 1
                try:
                    await action()
                except (GoalEnded, RollbackRefused) as error:
                    self._trace.append(f"refused: {error}")
                self._check_isolation()
            await self._drain()
            self._check()

    # ---- handlers ------------------------------------------------------------------------------

    def _register(self) -> None:
        engine = self._engine

        @engine.handler("tool_call")
        async def step(message: Any, ctx: Any) -> None:
            payload = message.payload
            for number in range(payload["effects"]):
                name = f"{message.message_id} {number}"
                undo = {"type": "model_call", "payload": {"name": name, "fails": payload["undo_fails"]}}
                await ctx.effect(
                    f"e{number}", lambda name=name: self._happen(name), reversal=undo,
                    reversal_class="REVERSIBLE",
                )  # fmt: skip
            if payload["mails"]:
                key = f"{message.message_id} mail"
                await ctx.effect("mail", lambda: self._mail(key), reversal_class="IRREVERSIBLE")
            if payload["fails"] and self._random.random() < 0.7:
                raise ValidationError("it cannot work")

        @engine.handler("model_call")
        async def undo(message: Any, ctx: Any) -> None:
            if message.payload["fails"] and ctx.attempt == 1:
                raise ValidationError("the undo failed")
            name = message.payload["name"]
            await ctx.effect("undo", lambda: self._undo(name))

        engine.handler("agent_spawn")(_nothing)

    def _happen(self, name: str) -> None:
        self._done[name] += 1
        if self._done[name] > 1:
            self._broken.append(f"effect {name} happened twice")

    def _undo(self, name: str) -> None:
        self._done[name] -= 1
        if self._done[name] < 0:
            self._broken.append(f"effect {name} was undone, but had not happened")

    def _mail(self, key: str) -> None:
        self._final[key] += 1
        if self._final[key] > 1:
            self._broken.append(f"irreversible effect {key} happened twice")

    # ---- actions -------------------------------------------------------------------------------

    def _goal(self) -> str | None:
        live = [goal_id for goal_id in self._started if goal_id not in self._ended]
        return self._random.choice(live) if live else None

    async def _start(self) -> None:
        goal_id = self._random.choice(GOALS)
        await self._engine.goals.start("acme", goal_id)
        if goal_id not in self._started:
            self._started.append(goal_id)
            self._trace.append(f"started {goal_id}")

    async def _step(self) -> None:
        goal_id = self._goal()
        if goal_id is None:
            return
        chance = self._random
        payload = {
            "effects": chance.randrange(3),
            "mails": chance.random() < 0.2,
            "fails": chance.random() < 0.3,
            "undo_fails": chance.random() < 0.2,
        }
        handle = await self._engine.submit(
            type="tool_call", org_id="acme", goal_id=goal_id, task_id=chance.choice("ab"), payload=payload,
            delay_s=chance.choice((0, 0, 20)),
        )  # fmt: skip
        self._trace.append(f"step {handle.message_id} of {goal_id}: {payload}")

    async def _write(self) -> None:
        goal_id = self._goal()
        if goal_id is not None:
            scope = self._random.choice(("GOAL_LOCAL", "STAGED", "STAGED"))
            node_id, value = self._random.choice(NODES), self._random.randrange(100)
            try:
                await self._engine.graph.branch(goal_id).save(node_id, {"x": value}, scope=scope)
            except Rejected as error:
                self._trace.append(f"refused: {error}")

    async def _save(self) -> None:
        """A message saves something under a goal that perhaps nobody started."""
        goal_id = self._random.choice(IMPLICIT)
        if goal_id in self._ended:
            return
        payload = {"node_id": f"of {goal_id}", "properties": {"x": self._random.randrange(100)}}
        await self._engine.submit(type="memory_save", org_id="acme", goal_id=goal_id, payload=payload)
        self._trace.append(f"saves under {goal_id}")
        if goal_id not in [one.goal_id for one in await self._engine.goals.list("acme")]:
            self._broken.append(f"a save did not start goal {goal_id}")
        elif goal_id not in self._started:
            self._started.append(goal_id)

    async def _main_changes(self) -> None:
        node_id, value = self._random.choice(NODES), self._random.randrange(100)
        await self._engine.graph.main("acme").save(node_id, {"x": value})

    async def _roll_back(self) -> None:
        checkpoint_id = await self._checkpoint()
        if checkpoint_id is not None:
            self._trace.append(f"rolls back to {checkpoint_id}")
            await self._engine.goals.rollback(checkpoint_id)

    async def _checkpoint(self) -> str | None:
        goal_id = self._goal()
        if goal_id is None:
            return None
        found = await self._engine.goals.checkpoints(goal_id)
        return self._random.choice(found).checkpoint_id if found else None

    async def _roll_back_and_die(self) -> None:
        """A rollback dies before or after one of its commits, and is resumed."""
        checkpoint_id = await self._checkpoint()
        if checkpoint_id is None:
            return
        commits, left = self._engine.core.commits, [self._random.randrange(8)]
        write = commits.write_raw

        async def dying(work: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise _Killed
            result = await write(work, **options)
            left[0] -= 1
            if left[0] == 0:
                raise _Killed
            return result

        commits.write_raw = dying  # type: ignore[method-assign]
        try:
            await self._engine.goals.rollback(checkpoint_id)
        except _Killed:
            self._trace.append(f"the rollback to {checkpoint_id} dies and is resumed")
        finally:
            commits.write_raw = write  # type: ignore[method-assign]
        await self._engine.goals.rollback(checkpoint_id)

    async def _wait(self) -> None:
        await self._engine.advance(self._random.choice((1.0, 25.0, 60.0)))

    async def _answer(self) -> None:
        for decision in await self._engine.decisions.list():
            if decision.state == "waiting" and self._random.random() < 0.5:
                choice = self._random.choice(decision.question.options)
                await self._engine.decisions.answer(decision.decision_id, choice)
                await self._engine.drain()

    async def _complete(self) -> None:
        goal_id = self._goal()
        if goal_id is not None:
            status = await self._engine.goals.complete(goal_id)
            self._trace.append(f"completes {goal_id}: {status.state}")
            if status.ended_us:
                self._ended.add(goal_id)

    async def _fail(self) -> None:
        goal_id = self._goal()
        if goal_id is not None:
            await self._engine.goals.fail(goal_id)
            self._ended.add(goal_id)

    # ---- the end -------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Resume rollbacks, let decisions time out, and end every goal."""
        for _ in range(DRAIN_ROUNDS_MAX):
            await self._engine.advance(100.0)
            plans = self._engine.store.read(ROLLBACKS.all)
            for _, plan in plans:
                await self._engine.goals.rollback(plan.checkpoint_id)
            await self._engine.drain()
            if not plans and not await self._engine.decisions.list():
                break
        for goal_id in self._started:
            status = await self._engine.goals.status(goal_id)
            if status.state == "ROLLING_BACK":
                self._broken.append(f"goal {goal_id} is still being rolled back")
            elif not status.ended_us:
                await self._engine.goals.complete(goal_id)
        await self._engine.advance(100.0)

    def _check_isolation(self) -> None:
        """No branch has a change of a goal that has ended."""
        branches = {key for key, _ in self._engine.store.read(BRANCHES.all)}
        for goal_id in branches & self._ended:
            self._broken.append(f"goal {goal_id} has ended, and its branch is left")
        main = dict(self._engine.store.read(MAIN.all))
        for goal_id in IMPLICIT:
            if joined("acme", f"of {goal_id}") in main and goal_id not in self._ended:
                self._broken.append(f"a save under goal {goal_id} is in main before the goal has completed")

    def _check(self) -> None:
        kinds: tuple[Kind[Any], ...] = (
            BRANCHES, STAGED, UNDO, HISTORY, ROLLBACKS, UNDOES, EFFECTS, PENDING,
        )  # fmt: skip
        for kind in kinds:
            left = self._engine.store.read(kind.all)
            if left:
                self._broken.append(f"{len(left)} cells of {kind.name} are left")
        for key, _ in self._engine.store.read(OPEN.all):
            record = self._engine.store.load(key.rpartition("\x1f")[2])
            if record is not None and record.record.ended_us:
                self._broken.append(f"message {record.record.message_id} has ended, and counts as open")
        try:
            check_consistency(self._engine.store)
        except (AssertionError, ValueError) as error:
            self._broken.append(str(error).partition("\n")[0])


def _nothing(*_: Any) -> None:
    """A handler that does nothing."""
