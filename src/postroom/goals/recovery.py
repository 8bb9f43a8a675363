"""Recovery of a goal whose step failed for good: the adviser picks a tool, or a person.

Rule 1: a tool is used because of a decision, and the decision is recorded with its reasoning.
Rule 2: a goal uses at most `Guard.recoveries` tools. After that, an alert asks for a person.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from postroom.core.goals import advice
from postroom.core.goals.advice import PERSON, RESTART, ROLLBACK
from postroom.core.names import is_name
from postroom.engine.commits import Commits
from postroom.engine.messages import body_of, digest_of
from postroom.engine.rules.cells import PROGRAMS, REASSIGNED, SEPARATOR
from postroom.errors import GoalEnded, InvalidMessage, InvalidSetting, ValidationError
from postroom.goals import decisions, internal, rollback
from postroom.goals.advisers.facts import of_message
from postroom.goals.goal_cells import (
    CHECKPOINTS,
    MESSAGES,
    OPEN,
    PROMPTS,
    ROLLBACKS,
    STATES,
    USED,
    Checkpoint,
    Decision,
    Goal,
    Rollback,
)
from postroom.goals.goals import Goals
from postroom.goals.reversals import Reversals
from postroom.goals.rollback import goal_of, is_undone, later_effects
from postroom.message import queue_of
from postroom.stores.transaction import Transaction

T = TypeVar("T", bound=Callable[..., Any])

DEPENDANTS_NAMED_MAX: Final = 20
CHECKPOINTS_NAMED_MAX: Final = 3
CHECKPOINTS_LOOKED_MAX: Final = 100
PROMPT_CHARS_MAX: Final = 4_000
PROMPTS_MAX: Final = 20
ROOTS_MAX: Final = 1_000
TOOL_CHARS_MAX: Final = 400  # of the description of a tool in a question


class Recovery:
    """The recovery tools of an engine."""

    def __init__(self, commits: Commits, goals: Goals, reversals: Reversals) -> None:
        self._commits = commits
        self._reversals = reversals
        self._goals = goals
        self.registered: dict[str, Callable[..., Any]] = {}
        self._built_in: dict[str, Callable[..., Any]] = {
            ROLLBACK: self.rollback_to_checkpoint,
            RESTART: self.restart_entire_goal,
            "modify_agent_prompts": self.modify_agent_prompts,
            "create_alternative_agent": self.create_alternative_agent,
        }

    def tool(self, run: T) -> T:
        """Register a function as a recovery tool, under its own name."""
        name = getattr(run, "__name__", "")
        if not callable(run) or not name.isidentifier() or name == PERSON:
            raise InvalidSetting("a recovery tool is a function with a name")
        self.registered[name] = run
        return run

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The tools by name; one of the application replaces a built-in one."""
        return self._built_in | self.registered

    # ---- a step has failed ---------------------------------------------------------------------

    async def failed(self, goal_id: str, message_id: str) -> None:
        """Ask what to do about a step of a goal that is a dead letter."""
        tools = {name: described(run) for name, run in self.tools.items()}
        await self._reversals.find(goal_id)

        def work(transaction: Transaction) -> Decision | None:
            return self._ask(transaction, goal_id, message_id, tools)

        decision = await self._commits.write_raw(work, makes_room=True)
        if decision is not None and decision.state == "asked":
            await decisions.ask(self._commits, decision)

    def _ask(
        self, transaction: Transaction, goal_id: str, message_id: str, tools: dict[str, str]
    ) -> Decision | None:
        goal = STATES.get(transaction, goal_id)
        record = transaction.records.get(message_id)
        is_dead = record is not None and record.state in ("DEAD_LETTER", "QUARANTINED")
        if goal is None or goal.state != "ACTIVE" or not is_dead:
            return None
        if len(goal.tried) >= self._commits.policy.guard.recoveries:
            transaction.alert(
                "RecoveryExhausted",
                f"goal {goal_id} has used {len(goal.tried)} recovery tools, and message {message_id} failed",
                queue_of(goal.org_id),
            )
            return None
        refused = _refused(transaction, goal_id, message_id)
        offered = (*(name for name in tools if name not in refused), PERSON)
        facts = _facts(transaction, goal_id, goal, message_id)
        facts["tools"] = {name: text for name, text in tools.items() if name in offered}
        failure = goal.failure
        question = advice.question(
            "recovery",
            facts,
            pattern=f"{failure.get('type')} {failure.get('error_type')} {len(goal.tried)}",
            options=offered,
        )
        subject = {
            "goal_id": goal_id,
            "message_id": message_id,
            "checkpoint_id": facts["checkpoint_id"],
            "rollbacks": goal.rollbacks,
        }
        return decisions.settle(
            transaction, self._commits.policy, question, goal.org_id, subject, asks_later=False
        )

    async def recover(self, decision_id: str) -> Any:
        """Use the tool that was decided on."""
        decision = await self._commits.read(
            lambda operations: decisions.found(operations.transaction, decision_id)
        )
        if decision.choice == PERSON:
            await self._alert_person(decision)
            return None
        run = self.tools.get(decision.choice)
        if run is None:
            raise InvalidMessage(f"there is no recovery tool {decision.choice!r} in this process")
        await self._commits.write_raw(lambda transaction: _used(transaction, decision), makes_room=True)
        result = run(**self._arguments(run, decision))
        return await result if inspect.isawaitable(result) else result

    def _arguments(self, run: Callable[..., Any], decision: Decision) -> dict[str, Any]:
        """The arguments of a tool by name: what the adviser gave, else what is known about the failure.

        The adviser cannot choose the goal, message or agent that a tool works on, because the content of a
        message may have manipulated it. It may pick one of the checkpoints that the question named.
        """
        facts, given = decision.question.facts, decision.arguments
        checkpoint_id = decision.subject["checkpoint_id"]
        if given.get("checkpoint_id") in facts.get("checkpoints", ()):
            checkpoint_id = given["checkpoint_id"]
        suggested = {
            "task": facts.get("task_id", ""),
            "specialized_for": f"{facts.get('type')}: {facts.get('error')}",
            "prompt_additions": f"An earlier attempt failed: {facts.get('error')}",
        } | given
        fixed = {
            "goal_id": decision.subject["goal_id"],
            "message_id": decision.subject["message_id"],
            "checkpoint_id": checkpoint_id,
            "agent_id": facts.get("agent_id", ""),
            "failure": facts,
            "decision_id": decision.decision_id,
        }
        known = suggested | fixed
        names = inspect.signature(run).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
        return {name: value for name, value in known.items() if takes_all or name in names}

    async def _alert_person(self, decision: Decision) -> None:
        goal_id, message_id = decision.subject["goal_id"], decision.subject["message_id"]
        said = f"goal {goal_id} needs a person: message {message_id} failed ({decision.reasoning})"
        await self._commits.write_raw(
            lambda transaction: transaction.alert("GoalNeedsPerson", said, queue_of(decision.org_id)),
            makes_room=True,
        )

    # ---- the tools -----------------------------------------------------------------------------

    async def rollback_to_checkpoint(
        self,
        checkpoint_id: str,
        preserve_learning: bool = True,
        message_id: str = "",
        decision_id: str = "",
    ) -> Any:
        """Roll back, then run the failed step again with what was learned."""
        accepted: list[str] = []
        if message_id:
            accepted = await self._commits.read(
                lambda operations: _own_irreversible(operations.transaction, checkpoint_id, message_id)
            )
        plan = Rollback(checkpoint_id, preserve_learning, resumes=[message_id] if message_id else [])
        return await self._once(
            decision_id,
            lambda: self._goals.rollback(checkpoint_id, preserve_learning, accepted, plan=plan),
        )

    async def restart_entire_goal(
        self, goal_id: str, modifications: dict[str, Any] | None = None, decision_id: str = ""
    ) -> Any:
        """Cancel everything of a goal, roll back to its start, and submit its first messages again."""
        if not isinstance(modifications, dict | None):
            raise ValidationError(f"modifications are a JSON object, not {type(modifications).__name__}")

        def work(transaction: Transaction) -> tuple[str, list[str]]:
            goal_of(transaction, goal_id)
            first = CHECKPOINTS.under(transaction, goal_id, limit=1)
            if not first:
                raise GoalEnded(goal_id, "without a checkpoint", "restart")
            return first[0][1].checkpoint_id, _roots(transaction, goal_id)

        checkpoint_id, roots = await self._commits.read(lambda operations: work(operations.transaction))
        plan = Rollback(
            checkpoint_id, preserve_learning=True, resubmits=roots, modifications=dict(modifications or {})
        )
        return await self._once(decision_id, lambda: self._goals.rollback(checkpoint_id, plan=plan))

    async def _once(self, decision_id: str, run: Callable[[], Any]) -> Any:
        """Run a rollback that a decision asked for, unless it is done already."""
        if not decision_id:
            return await run()

        def is_done(transaction: Transaction) -> bool:
            decision = decisions.found(transaction, decision_id)
            goal_id = decision.subject["goal_id"]
            is_under_way = ROLLBACKS.get(transaction, goal_id) is not None
            return (
                goal_of(transaction, goal_id).rollbacks > decision.subject["rollbacks"] and not is_under_way
            )

        if await self._commits.read(lambda operations: is_done(operations.transaction)):
            return None
        return await run()

    async def modify_agent_prompts(
        self, agent_id: str, prompt_additions: str, goal_id: str = "", message_id: str = ""
    ) -> list[str]:
        """Add text to the prompt of an agent for its later messages, and replay the step."""
        text = str(prompt_additions)[:PROMPT_CHARS_MAX]

        def work(transaction: Transaction) -> list[str]:
            org_id = goal_of(transaction, goal_id).org_id if goal_id else ""
            known = PROMPTS.get(transaction, org_id, agent_id) or []
            added = [*(one for one in known if one != text), text][-PROMPTS_MAX:]
            PROMPTS.put(transaction, added, org_id, agent_id)
            _replay(transaction, goal_id, message_id)
            return added

        return await self._commits.write_raw(work, makes_room=True)

    async def create_alternative_agent(
        self,
        task: str,
        specialized_for: str,
        goal_id: str = "",
        message_id: str = "",
        agent_id: str = "",
        tools: list[str] | None = None,
        prompt: str = "",
    ) -> str:
        """Spawn an agent with tools and a prompt for a failure, and replay the step under it.

        `agent_id` is the agent that failed: without `tools`, the new one has the same.
        """
        policy = self._commits.policy
        wanted = [name for name in tools if isinstance(name, str)] if isinstance(tools, list) else []
        text = str(prompt or f"Your task: {task}\nYou are specialized for: {specialized_for}")[
            :PROMPT_CHARS_MAX
        ]

        def work(transaction: Transaction) -> str:
            goal = goal_of(transaction, goal_id)
            org_id, number = goal.org_id, len(goal.tried)
            named = f"alternative-{number}-{goal_id}"[:128]
            new_id = (
                named if is_name(named) else f"alternative-{number}-{digest_of('goal', goal_id.encode())}"
            )
            program = PROGRAMS.get(transaction, org_id, agent_id) if is_name(agent_id) else None
            payload = {
                "agent_id": new_id,
                "tools": wanted or ([] if program is None else [*program.tools]),
                "prompt": text,
                "task": str(task)[:PROMPT_CHARS_MAX],
                "specialized_for": str(specialized_for)[:PROMPT_CHARS_MAX],
            }
            if not USED.get(transaction, goal_id, new_id):
                USED.put(transaction, True, goal_id, new_id)  # noqa: FBT003
                fields = {"type": "agent_spawn", "org_id": org_id, "payload": payload, "goal_id": goal_id}
                internal.insert(transaction, policy, fields)
                PROMPTS.put(transaction, [text], org_id, new_id)
            if message_id:
                REASSIGNED.put(transaction, new_id, message_id)
            _replay(transaction, goal_id, message_id)
            return new_id

        return await self._commits.write_raw(work, makes_room=True)


def described(run: Callable[..., Any]) -> str:
    """A tool as a person or a model sees it: its arguments, and the first line of its documentation."""
    said = (inspect.getdoc(run) or "").partition("\n")[0]
    return f"{inspect.signature(run)} {said}"[:TOOL_CHARS_MAX]


# ---- in a transaction ------------------------------------------------------------------------------


def _facts(transaction: Transaction, goal_id: str, goal: Goal, message_id: str) -> dict[str, Any]:
    """The failure, its history, and the open messages of the goal."""
    stored = transaction.records.load(message_id)
    latest = _latest(transaction, goal_id, goal)
    return {
        **goal.failure,
        "goal_id": goal_id,
        **({} if stored is None else of_message(transaction, stored)),
        "dependants": [
            key.rpartition(SEPARATOR)[2]
            for key, _ in OPEN.under(transaction, goal_id, limit=DEPENDANTS_NAMED_MAX)
        ],
        "tried": goal.tried,
        "checkpoints": [one.checkpoint_id for one in latest],
        "checkpoint_id": latest[-1].checkpoint_id if latest else "",
        "rollbacks": goal.rollbacks,
    }


def _latest(transaction: Transaction, goal_id: str, goal: Goal) -> list[Checkpoint]:
    """The last checkpoints that the failed step did not cause.

    A rollback to a checkpoint of the step itself would keep what the step did before it.
    """
    failed = goal.failure.get("message_id")
    found: list[Checkpoint] = []
    for number in range(goal.checkpoints, max(0, goal.checkpoints - CHECKPOINTS_LOOKED_MAX), -1):
        one = CHECKPOINTS.get(transaction, goal_id, number)
        if one is not None and one.message_id != failed:
            found.append(one)
            if len(found) == CHECKPOINTS_NAMED_MAX:
                break
    return found[::-1]


def _refused(transaction: Transaction, goal_id: str, message_id: str) -> set[str]:
    """Tools that an irreversible effect of another message rules out."""
    goal = goal_of(transaction, goal_id)
    refused: set[str] = set()
    latest = _latest(transaction, goal_id, goal)
    first = CHECKPOINTS.under(transaction, goal_id, limit=1)
    if not latest or _foreign_irreversible(transaction, latest[-1], message_id):
        refused.add(ROLLBACK)
    if not first or _foreign_irreversible(transaction, first[0][1], ""):
        refused.add(RESTART)
    return refused


def _foreign_irreversible(transaction: Transaction, checkpoint: Checkpoint, message_id: str) -> bool:
    return any(
        effect.message_id != message_id and not is_undone(effect)
        for _, effect in later_effects(transaction, checkpoint)
    )


def _own_irreversible(transaction: Transaction, checkpoint_id: str, message_id: str) -> list[str]:
    """Irreversible effects of the step itself. Its next attempt finds their outcomes, and repeats none."""
    checkpoint = rollback.checkpoint_of(transaction, checkpoint_id)
    return [
        effect.key
        for _, effect in later_effects(transaction, checkpoint)
        if effect.message_id == message_id and not is_undone(effect)
    ]


def _used(transaction: Transaction, decision: Decision) -> None:
    """Note the use of a tool, once for each decision."""
    goal_id = decision.subject["goal_id"]
    if USED.get(transaction, goal_id, decision.decision_id):
        return
    USED.put(transaction, True, goal_id, decision.decision_id)  # noqa: FBT003
    goal = goal_of(transaction, goal_id)
    STATES.put(transaction, replace(goal, tried=[*goal.tried, decision.choice]), goal_id)
    detail = {**decision.subject, "tool": decision.choice, "by": decision.by}
    transaction.emit(
        "alert", f"org:{goal.org_id}", error_type="Recovery", error=decision.reasoning, detail=detail
    )


def _roots(transaction: Transaction, goal_id: str) -> list[str]:
    """The messages of a goal that no handler submitted."""
    roots: list[str] = []
    for _, message_id in MESSAGES.under(transaction, goal_id, limit=ROOTS_MAX):
        stored = transaction.records.load(message_id)
        body = None if stored is None else body_of(stored.envelope.payload)
        if body is not None and body.hop == 0:
            roots.append(message_id)
    return roots


def _replay(transaction: Transaction, goal_id: str, message_id: str) -> None:
    """Queue a failed step again, after the rollback that is under way: it may undo effects of the step."""
    record = transaction.records.get(message_id) if message_id else None
    plan = ROLLBACKS.get(transaction, goal_id) if goal_id else None
    if record is None or record.state not in ("DEAD_LETTER", "QUARANTINED"):
        return
    if plan is None:
        rollback.replay(transaction, message_id)
    elif message_id not in plan.resumes:
        ROLLBACKS.put(transaction, replace(plan, resumes=[*plan.resumes, message_id]), goal_id)
