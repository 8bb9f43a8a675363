"""`engine.goals`: start, complete and fail goals, their context, checkpoints and rollbacks."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from postroom.contracts.tasks.task_input import checked_text, encoded
from postroom.core.goals import advice
from postroom.core.lifecycle import lifecycle
from postroom.core.names import is_name
from postroom.engine.commits import Commits
from postroom.engine.message_input import CONTEXT_BYTES_MAX
from postroom.engine.messages import new_id
from postroom.engine.rules.cells import SEPARATOR, HasCells
from postroom.engine.rules.policy import Policy
from postroom.engine.wakeups import Wakeups
from postroom.errors import (
    ContextChanged,
    GoalEnded,
    GraphUnavailable,
    InvalidMessage,
    InvalidName,
    ValidationError,
    shown,
)
from postroom.goals import decisions, progress, rollback
from postroom.goals.advisers.facts import context_of_goal
from postroom.goals.advisers.questions import context_of
from postroom.goals.goal_cells import (
    CHECKPOINTS,
    CHOICES,
    CONTEXTS,
    EFFECTS,
    IMPLICIT,
    MESSAGES,
    OPEN,
    PENDING,
    ROLLBACKS,
    STATES,
    Checkpoint,
    Decision,
    Goal,
    GoalContext,
    GoalEffect,
    Rollback,
)
from postroom.goals.graph import branches
from postroom.goals.graph.branches import NodeConflict
from postroom.goals.graph.graph import Graph
from postroom.goals.reversals import Reversals
from postroom.goals.rollback import goal_of
from postroom.stores.transaction import Transaction

T = TypeVar("T")

LISTED_MAX: Final = 1_000
MERGE_ROUNDS_MAX: Final = 100
IMPLICIT_GOALS_MAX: Final = 1_000  # of an organization: each one has a branch until somebody ends it


class GoalStatus(msgspec.Struct, frozen=True):
    """The status of a goal."""

    goal_id: str
    org_id: str
    state: str
    open_messages: int
    checkpoints: int
    effects: int
    context_version: int
    created_us: int
    ended_us: int = 0
    failure: dict[str, Any] = {}
    """The last step that ended in the dead letters."""
    tried: list[str] = []
    """Recovery tools that were used."""
    undoing: list[str] = []
    """Compensations of a rollback that have not completed."""
    decisions: list[str] = []
    """Decisions that the goal waits for."""


Statuses: TypeAlias = list[GoalStatus]
Checkpoints: TypeAlias = list[Checkpoint]
Effects: TypeAlias = list[GoalEffect]
Questions: TypeAlias = list[Decision]


class Goals:
    """`engine.goals`."""

    def __init__(self, commits: Commits, wakeups: Wakeups, graph: Graph, reversals: Reversals) -> None:
        self._commits = commits
        self._reversals = reversals
        self._wakeups = wakeups
        self._graph = graph

    async def start(
        self, org_id: str, goal_id: str | None = None, *, context: dict[str, Any] | None = None
    ) -> str:
        """Start a goal: its branch, its context and its first checkpoint. Returns its id.

        Starting the same goal of the same organization again changes nothing.
        """
        if not isinstance(org_id, str) or not is_name(org_id):
            raise InvalidName("org_id", org_id)
        chosen = new_id() if goal_id is None else checked_goal_id(goal_id)
        await self._start(org_id, chosen, checked_context(context or {}))
        return chosen

    async def start_implicitly(self, org_id: str, goal_id: str) -> None:
        """Start a goal because something is saved under it. Raises `ValidationError` at the limit."""
        await self._commits.read(lambda operations: check_implicit(operations.transaction, org_id, goal_id))
        await self._start(org_id, goal_id, {}, is_implicit=True)

    async def _start(
        self, org_id: str, goal_id: str, context: dict[str, Any], *, is_implicit: bool = False
    ) -> None:
        is_embedded = self._graph.is_embedded
        if not is_embedded:
            known = await self._commits.read(lambda operations: STATES.get(operations.transaction, goal_id))
            if known is None:
                await self._graph.write(partial(_open_branch, goal_id=goal_id, org_id=org_id))

        await self._write(
            lambda transaction: start(
                transaction, org_id, goal_id, context, is_embedded=is_embedded, is_implicit=is_implicit
            )
        )
        await self._note(goal_id)

    async def complete(self, goal_id: str) -> GoalStatus:
        """Merge the branch into main and end the goal.

        A conflict goes to the adviser. While a person has to decide, the goal is MERGING, and the merge
        continues by itself after the answer. Calling this again resumes it.
        """
        for _ in range(MERGE_ROUNDS_MAX):
            asked = await self._complete_once(goal_id)
            for decision in asked:
                await decisions.ask(self._commits, decision)
            if not asked:
                break
        return await self.status(goal_id)

    async def _complete_once(self, goal_id: str) -> Questions:
        """Merge if nothing is left to decide. Returns the questions that the adviser has to be asked."""
        policy = self._commits.policy
        if self._graph.is_embedded:
            return await self._write(partial(complete, policy=policy, goal_id=goal_id))
        if not await self._write(partial(_merging, goal_id=goal_id)):
            await self._note(goal_id)
            return []
        conflicts = await self._merged_outside(goal_id)
        if conflicts:
            asked = await self._write(lambda transaction: ask_about(transaction, policy, goal_id, conflicts))
            # Without a question to the adviser, rules have decided, or a person has to.
            if asked or await self._merged_outside(goal_id):
                return asked
        await self._write(lambda transaction: end(transaction, goal_id, "COMPLETED"))
        await self._note(goal_id)
        return []

    async def _merged_outside(self, goal_id: str) -> list[NodeConflict]:
        """Merge a branch outside the ledger, unless conflicts are left: those are returned."""
        choices = await self._commits.read(lambda operations: choices_of(operations.transaction, goal_id))
        return await self._graph.write(partial(_merge_branch, goal_id=goal_id, choices=choices))

    async def fail(self, goal_id: str, reason: str = "") -> GoalStatus:
        """End a goal without a merge: its branch is dropped, and its open messages are cancelled."""
        checked_text("reason", reason)

        def work(transaction: Transaction) -> None:
            goal = goal_of(transaction, goal_id)
            if goal.state == "FAILED":
                return
            if goal.ended_us or goal.state == "ROLLING_BACK":
                raise GoalEnded(goal_id, goal.state, "fail")
            cancel_open(transaction, self._commits.policy, goal_id)
            if branches.BRANCHES.get(transaction, goal_id) is not None:
                branches.drop_branch(transaction, goal_id)
            end(transaction, goal_id, "FAILED", reason)

        await self._write(work)
        if not self._graph.is_embedded:
            await self._graph.write(partial(branches.drop_branch, goal_id=goal_id))
            await self._note(goal_id)
        return await self.status(goal_id)

    async def status(self, goal_id: str) -> GoalStatus:
        """The status of a goal. Raises `UnknownGoal`."""
        return await self._commits.read(lambda operations: status_of(operations.transaction, goal_id))

    async def list(self, org_id: str | None = None) -> Statuses:
        """Goals, of one organization or of all."""

        def work(transaction: Transaction) -> Statuses:
            found = [key for key, goal in STATES.all(transaction) if org_id in (None, goal.org_id)]
            return [status_of(transaction, key) for key in found[:LISTED_MAX]]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def checkpoints(self, goal_id: str) -> Checkpoints:
        """The checkpoints of a goal, the oldest first."""

        def work(transaction: Transaction) -> Checkpoints:
            goal_of(transaction, goal_id)
            return [one for _, one in CHECKPOINTS.under(transaction, goal_id, limit=progress.CHECKPOINTS_MAX)]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def effects(self, goal_id: str) -> Effects:
        """The effects of a goal that were not undone, the oldest first, each with its class and reversal."""

        def work(transaction: Transaction) -> Effects:
            goal_of(transaction, goal_id)
            return [one for _, one in EFFECTS.under(transaction, goal_id, limit=LISTED_MAX)]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def checkpoint(self, goal_id: str, reason: str = "manual") -> Checkpoint:
        """Take a checkpoint now."""
        checked_text("reason", reason)

        def work(transaction: Transaction) -> Checkpoint:
            goal = goal_of(transaction, goal_id)
            if goal.state != "ACTIVE":
                raise GoalEnded(goal_id, goal.state, "take a checkpoint of")
            return progress.take(transaction, goal_id, goal, reason)

        return await self._write(work)

    async def context(self, goal_id: str) -> tuple[dict[str, Any], int]:
        """The context of a goal, and its version."""
        return await context_of(self._commits, goal_id)

    async def set_context(self, goal_id: str, value: dict[str, Any], expect_version: int) -> int:
        """Replace the context by compare-and-set on its version. Returns the new version."""
        checked = checked_context(value)

        def work(transaction: Transaction) -> int:
            goal = goal_of(transaction, goal_id)
            if goal.ended_us:
                raise GoalEnded(goal_id, goal.state, "change the context of")
            if goal.context_version != expect_version:
                raise ContextChanged(goal_id, expect_version, goal.context_version)
            return put_context(transaction, goal_id, goal, checked)

        return await self._write(work)

    async def rollback(
        self,
        checkpoint_id: str,
        preserve_learning: bool = True,
        accept_irreversible: Iterable[str] = (),
        *,
        plan: Rollback | None = None,
    ) -> GoalStatus:
        """Roll a goal back to a checkpoint. Calling it again resumes a rollback that was interrupted.

        Raises `RollbackRefused` when later effects cannot be undone and are not named in
        `accept_irreversible`. The goal is ROLLING_BACK until every compensation has completed. A resume that
        names the effect of a failed compensation gives that compensation up.
        """
        accepted = checked_keys(accept_irreversible)
        policy = self._commits.policy
        await self._reversals.find(rollback.goal_id_of(checkpoint_id))
        checkpoint = await self._write(
            lambda transaction: rollback.begin(
                transaction,
                checkpoint_id,
                preserve_learning=preserve_learning,
                accepted=accepted,
                plan=plan,
            )
        )
        after: str | None = ""
        while after is not None:
            after = await self._write(
                partial(rollback.cancel_some, policy=policy, checkpoint=checkpoint, after=after)
            )
        if not self._graph.is_embedded:
            version = checkpoint.graph_version
            await self._graph.write(partial(branches.undo_to, goal_id=checkpoint.goal_id, version=version))
        await self._write(lambda transaction: rollback.restore(transaction, policy, checkpoint))
        await self._write(
            lambda transaction: rollback.resume(transaction, policy, checkpoint.goal_id, accepted)
        )
        self._wakeups.wake_readers()
        await self._note(checkpoint.goal_id)
        return await self.status(checkpoint.goal_id)

    async def wrote(self, goal_id: str) -> None:
        """A branch outside the ledger was changed: a later checkpoint includes the change."""
        branch = await self._graph.read(lambda cells: branches.branch_of(cells, goal_id))

        def work(transaction: Transaction) -> None:
            goal = STATES.get(transaction, goal_id)
            if goal is not None and goal.graph_version < branch.version:
                STATES.put(transaction, replace(goal, graph_version=branch.version), goal_id)

        await self._write(work)

    async def org_of(self, goal_id: str) -> str | None:
        """The organization of a goal; None when it was not started."""
        goal = await self._commits.read(lambda operations: STATES.get(operations.transaction, goal_id))
        return None if goal is None else goal.org_id

    async def _note(self, goal_id: str) -> None:
        """Write the state of a goal into a graph outside the ledger."""
        if self._graph.is_embedded:
            return
        status = await self.status(goal_id)
        facts = {"state": status.state, "checkpoint": f"{goal_id}#{status.checkpoints}"}

        def work(cells: HasCells) -> None:
            if status.ended_us:
                branches.MERGED.put(cells, None, goal_id)
            branches.write_main(cells, status.org_id, f"goal:{goal_id}", facts, replaces=True)

        await self._graph.write(work)

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._commits.write_raw(work, makes_room=True)


# ---- checks ----------------------------------------------------------------------------------------


def checked_goal_id(goal_id: object) -> str:
    """The id of a goal: printable text without "#"."""
    text = checked_text("goal_id", goal_id)
    if not text or not text.isprintable() or "#" in text:
        raise InvalidMessage(f'goal_id is printable text without "#", not {goal_id!r}')
    return text


def checked_keys(keys: object) -> Collection[str]:
    """The keys of effects that a rollback leaves as they are."""
    if not isinstance(keys, list | tuple | set | frozenset) or not all(isinstance(key, str) for key in keys):
        raise InvalidMessage(f"accept_irreversible is a list of the keys of effects, not {shown(keys)}")
    return keys


def checked_context(value: object) -> dict[str, Any]:
    """The context of a goal: a JSON object of up to 64 KiB."""
    if not isinstance(value, dict):
        raise InvalidMessage(f"the context of a goal is a JSON object, not {type(value).__name__}")
    data = encoded("the context", value)
    if len(data) > CONTEXT_BYTES_MAX:
        raise InvalidMessage(f"the context has {len(data)} bytes, and at most {CONTEXT_BYTES_MAX} are kept")
    return dict(msgspec.json.decode(data))


# ---- in a transaction ------------------------------------------------------------------------------


def check_implicit(transaction: Transaction, org_id: str, goal_id: str) -> None:
    """Refuse to start a goal when saves have started too many that have not ended."""
    count = len(IMPLICIT.under(transaction, org_id, limit=IMPLICIT_GOALS_MAX))
    if count == IMPLICIT_GOALS_MAX and STATES.get(transaction, goal_id) is None:
        raise ValidationError(
            f"organization {org_id} has {count} goals that saves have started: complete or fail some of them"
        )


def start(
    transaction: Transaction,
    org_id: str,
    goal_id: str,
    context: dict[str, Any],
    *,
    is_embedded: bool = True,
    is_implicit: bool = False,
) -> Goal:
    """Start a goal, unless it was started before. A goal that a save has started gets its context."""
    known = STATES.get(transaction, goal_id)
    if known is not None:
        if known.org_id != org_id:
            raise InvalidMessage(f"the goal id {goal_id!r} is taken: choose another one, or none")
        if not is_implicit and IMPLICIT.get(transaction, org_id, goal_id):
            IMPLICIT.put(transaction, None, org_id, goal_id)
            put_context(transaction, goal_id, known, context)
        return known
    if is_implicit:
        IMPLICIT.put(transaction, True, org_id, goal_id)  # noqa: FBT003
    goal = Goal(org_id, transaction.wall_us, context_version=1)
    CONTEXTS.put(transaction, GoalContext(context), goal_id, 1)
    STATES.put(transaction, goal, goal_id)
    if is_embedded:
        branches.open_branch(transaction, goal_id, org_id)
    progress.take(transaction, goal_id, goal, "start")
    return goal


def put_context(transaction: Transaction, goal_id: str, goal: Goal, value: dict[str, Any]) -> int:
    """Store the next version of the context."""
    version = goal.context_version + 1
    CONTEXTS.put(transaction, GoalContext(value), goal_id, version)
    STATES.put(transaction, replace(goal, context_version=version), goal_id)
    return version


def choices_of(transaction: Transaction, goal_id: str) -> dict[tuple[str, str], str]:
    """The decisions about the merge of a goal: node and property -> side."""
    found: dict[tuple[str, str], str] = {}
    for key, side in CHOICES.under(transaction, goal_id):
        _, node_id, name = key.split(SEPARATOR, 2)
        found[node_id, name] = side
    return found


def complete(transaction: Transaction, policy: Policy, goal_id: str) -> list[Decision]:
    """Merge a goal in the ledger and end it. Returns the questions that the adviser has to be asked first."""
    if not _merging(transaction, goal_id):
        return []
    conflicts = branches.merge(transaction, goal_id, choices_of(transaction, goal_id))
    if conflicts:
        asked = ask_about(transaction, policy, goal_id, conflicts)
        if branches.merge(transaction, goal_id, choices_of(transaction, goal_id)):
            return asked
    end(transaction, goal_id, "COMPLETED")
    return []


def _merging(transaction: Transaction, goal_id: str) -> bool:
    """Store that a goal is being merged; False when it is completed already."""
    goal = goal_of(transaction, goal_id)
    if goal.state == "COMPLETED":
        return False
    if goal.state not in ("ACTIVE", "MERGING"):
        raise GoalEnded(goal_id, goal.state, "complete")
    STATES.put(transaction, replace(goal, state="MERGING"), goal_id)
    return True


def ask_about(
    transaction: Transaction, policy: Policy, goal_id: str, conflicts: list[NodeConflict]
) -> list[Decision]:
    """Decide merge conflicts. Returns the questions that the adviser has to be asked."""
    goal = goal_of(transaction, goal_id)
    pending = {
        (one.subject.get("node_id"), one.subject.get("property")): one
        for one in decisions.waiting(transaction, goal.org_id)
        if one.kind == "merge" and one.subject.get("goal_id") == goal_id
    }
    asked: list[Decision] = []
    for conflict in conflicts:
        known = pending.get((conflict.node_id, conflict.name))
        if known is None:
            facts = {
                "goal_id": goal_id,
                "context": context_of_goal(transaction, goal_id, goal.org_id),
                "node_id": conflict.node_id,
                "property": conflict.name,
                "base": conflict.base,
                "branch": conflict.branch,
                "main": conflict.main,
            }
            subject = {"goal_id": goal_id, "node_id": conflict.node_id, "property": conflict.name}
            question = advice.question("merge", facts, pattern=conflict.name)
            known = decisions.settle(transaction, policy, question, goal.org_id, subject, asks_later=False)
        if known.state == "asked":
            asked.append(known)
    return asked


def end(transaction: Transaction, goal_id: str, state: Any, reason: str = "") -> None:
    """End a goal, and forget what only a live goal needs."""
    goal = goal_of(transaction, goal_id)
    if goal.ended_us:
        return
    ended = replace(goal, state=state, ended_us=transaction.wall_us)
    STATES.put(transaction, ended, goal_id)
    IMPLICIT.put(transaction, None, goal.org_id, goal_id)
    for kind in (CHECKPOINTS, EFFECTS, CHOICES):
        kind.drop_under(transaction, goal_id)
    for version in range(max(1, goal.context_version - LISTED_MAX), goal.context_version):
        CONTEXTS.put(transaction, None, goal_id, version)
    if branches.MAIN.get(transaction, goal.org_id, f"goal:{goal_id}") is not None:
        progress.note(transaction, goal_id, ended, reason=reason)


def cancel_open(transaction: Transaction, policy: Policy, goal_id: str) -> None:
    """Cancel every message of a goal that has not ended."""
    for _, message_id in MESSAGES.under(transaction, goal_id, limit=LISTED_MAX):
        record = transaction.records.get(message_id)
        if record is not None and record.state not in lifecycle.ENDED:
            rollback.cancel(transaction, policy, record)


def status_of(transaction: Transaction, goal_id: str) -> GoalStatus:
    """The status of a goal. Raises `UnknownGoal`."""
    goal = goal_of(transaction, goal_id)
    plan = ROLLBACKS.get(transaction, goal_id)
    waiting = [
        one.decision_id
        for one in decisions.waiting(transaction, goal.org_id)
        if PENDING.get(transaction, one.decision_id) and one.subject.get("goal_id") == goal_id
    ]
    return GoalStatus(
        goal_id=goal_id,
        org_id=goal.org_id,
        state=goal.state,
        open_messages=len(OPEN.under(transaction, goal_id, limit=LISTED_MAX)),
        checkpoints=goal.checkpoints,
        effects=goal.effects,
        context_version=goal.context_version,
        created_us=goal.created_us,
        ended_us=goal.ended_us,
        failure=goal.failure,
        tried=goal.tried,
        undoing=[] if plan is None else plan.undoing,
        decisions=waiting,
    )


# ---- on a graph outside the ledger -----------------------------------------------------------------


def _open_branch(cells: HasCells, goal_id: str, org_id: str) -> None:
    if branches.BRANCHES.get(cells, goal_id) is None:
        branches.open_branch(cells, goal_id, org_id)


def _merge_branch(cells: HasCells, goal_id: str, choices: dict[tuple[str, str], str]) -> list[NodeConflict]:
    """Merge a branch, unless that was done before a crash. Raises when the graph has lost the branch."""
    if branches.BRANCHES.get(cells, goal_id) is None:
        if not branches.MERGED.get(cells, goal_id):
            raise GraphUnavailable(f"the graph has lost the branch of goal {goal_id!r}")
        return []
    conflicts = branches.merge(cells, goal_id, choices)
    if not conflicts:
        branches.MERGED.put(cells, True, goal_id)  # noqa: FBT003
    return conflicts
