"""The built-in handlers of an engine: memory in the knowledge graph, and the background work of goals."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from postroom.core.names import is_name
from postroom.engine.core import EngineCore
from postroom.engine.inspection import info_of
from postroom.engine.messages import Message, body_of
from postroom.engine.rules import holds
from postroom.engine.rules.cells import SEPARATOR, HasCells
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.engine.work.handlers import Handler
from postroom.errors import InvalidSetting, Rejected, UnknownDecision, UnknownNode, ValidationError, shown
from postroom.goals import decisions, internal
from postroom.goals.advisers.patterns import AdvisedDeadLetters
from postroom.goals.goal_cells import IMPLICIT, STATES
from postroom.goals.goals import Goals, checked_goal_id
from postroom.goals.graph import branches
from postroom.goals.graph.branches import Node
from postroom.goals.graph.graph import Graphs, View
from postroom.goals.internal import WORK
from postroom.goals.recovery import Recovery
from postroom.goals.reversals import Reversals
from postroom.stores.transaction import Transaction

FOUND_MAX: Final = 100
LOOKED_MAX: Final = 10_000


class Hooks:
    """The hooks of one engine."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Callable[..., Any]]] = {}
        """Message type -> name -> function."""

    def check(self, type_name: str) -> None:
        """Raise unless this is a message type."""
        if not isinstance(type_name, str) or not is_name(type_name):
            raise InvalidSetting(f"a message type is a name, not {shown(type_name)}")

    def add(self, type_name: str, run: Callable[..., Any]) -> None:
        """Run a function after each completed message of a type."""
        name = getattr(run, "__name__", "")
        if not callable(run) or not name:
            raise InvalidSetting(f"a hook is a function with a name, not {shown(run)}")
        self.functions.setdefault(type_name, {})[name] = run

    def named(self, type_name: str, name: str) -> Callable[..., Any]:
        """The function of a hook. Raises `ValidationError`."""
        run = self.functions.get(type_name, {}).get(name)
        if run is None:
            raise ValidationError(f"there is no hook {name!r} for {type_name} in this process")
        return run

    def note_completed(
        self, transaction: Transaction, policy: Policy, outcomes: Sequence[Outcome], stale: Collection[str]
    ) -> None:
        """Have the hooks of completed messages run after the commit."""
        for outcome in outcomes if self.functions else ():
            if outcome.kind != "completed" or outcome.message_id in stale:
                continue
            for name in self.functions.get(outcome.type, ()):
                internal.go_on(
                    transaction, policy, outcome.org_id, "hook",
                    type=outcome.type, name=name, message_id=outcome.message_id,
                )  # fmt: skip


class BuiltIn:
    """The handlers of one engine."""

    def __init__(
        self,
        core: EngineCore,
        goals: Goals,
        graphs: Graphs,
        recovery: Recovery,
        hooks: Hooks,
        dead_letters: AdvisedDeadLetters,
        reversals: Reversals,
    ) -> None:
        self._core = core
        self._commits = core.commits
        self._handlers = core.handlers
        self._hooks = hooks
        self._goals = goals
        self._graphs = graphs
        self._recovery = recovery
        self._dead_letters = dead_letters
        self._reversals = reversals

    def register(self) -> None:
        """Register the handlers. A handler of the application replaces the one for memory."""
        runs = {
            "memory_save": self.memory_save,
            "memory_retrieve": self.memory_retrieve,
            "memory_update": self.memory_update,
            WORK: self.work,
        }
        for type_name, run in runs.items():
            self._handlers.built_in[type_name] = Handler(run=run, is_own=True)

    # ---- memory --------------------------------------------------------------------------------

    async def memory_save(self, message: Message, _: Any) -> dict[str, Any]:
        """Save a node: `{node_id, properties, edges, scope}`."""
        payload = message.payload

        async def save(view: View) -> Node:
            return await view.save(
                payload.get("node_id"),
                payload.get("properties", {}),
                payload.get("edges", ()),
                payload.get("scope", "STAGED"),
            )

        return await self._written(message, save)

    async def memory_update(self, message: Message, _: Any) -> dict[str, Any]:
        """Change a node: `{node_id, changes, scope}`."""
        payload = message.payload

        async def update(view: View) -> Node:
            return await view.update(
                payload.get("node_id"), payload.get("changes", {}), payload.get("scope", "STAGED")
            )

        return await self._written(message, update)

    async def _written(self, message: Message, write: Callable[[View], Awaitable[Node]]) -> dict[str, Any]:
        """Write a node. The reply says when its goal is one that a save has started."""
        try:
            if message.payload.get("scope", "STAGED") == "STAGED" and self._commits.policy.implicit_goals:
                await self._start_goal(message)
            reply = _as_json(await write(await self._view(message)))
        except Rejected as error:
            raise ValidationError(str(error)) from error
        org_id, goal_id = message.org_id, message.goal_id
        if await self._commits.read(lambda one: IMPLICIT.get(one.transaction, org_id, goal_id)):
            reply["implicit_goal"] = goal_id
        return reply

    async def _start_goal(self, message: Message) -> None:
        """Start the goal that the sender of a save named, unless a goal has used this id before."""
        goal_id, payload = message.goal_id, message.payload

        def is_wanted(operations: Operations) -> bool:
            body = body_of(operations.loaded(message.message_id).envelope.payload)
            is_named = body is not None and body.in_goal
            return is_named and STATES.get(operations.transaction, goal_id) is None

        if not await self._commits.read(is_wanted):
            return
        checked_goal_id(goal_id)
        if (
            message.type == "memory_update"
            and await (await self._view(message)).get(payload["node_id"]) is None
        ):
            raise UnknownNode(payload["node_id"])
        await self._goals.start_implicitly(message.org_id, goal_id)

    async def memory_retrieve(self, message: Message, _: Any) -> dict[str, Any]:
        """Find a node by `node_id`, or nodes by `query`: text that a property or an id contains."""
        payload = message.payload
        view = await self._view(message)
        if "node_id" in payload:
            try:
                node = await view.get(payload["node_id"])
            except Rejected as error:
                raise ValidationError(str(error)) from error
            return {"node": None if node is None else _as_json(node)}
        query = payload.get("query")
        if not isinstance(query, str) or not query:
            raise ValidationError("memory_retrieve needs a node_id or a query")
        nodes = await self._graphs.place.read(
            lambda cells: _search(cells, message.goal_id, message.org_id, query)
        )
        return {"nodes": [_as_json(node) for node in nodes]}

    async def _view(self, message: Message) -> View:
        """The branch of a goal that was started; else main, as the organization sees it."""
        goal = await self._commits.read(lambda one: STATES.get(one.transaction, message.goal_id))
        if goal is None or goal.org_id != message.org_id or goal.ended_us:
            return self._graphs.main(message.org_id)
        return self._graphs.branch(message.goal_id, message.org_id)

    # ---- work that follows a commit ------------------------------------------------------------

    async def work(self, message: Message, _: Any) -> Any:
        """Continue the work of a goal."""
        payload = message.payload
        match payload.get("do"):
            case "advise":
                return await self._advise(payload["decision_id"])
            case "time_out":
                policy = self._commits.policy
                await self._commits.write_raw(
                    lambda transaction: decisions.time_out(transaction, policy, payload["decision_id"])
                )
            case "failed_step":
                await self._recovery.failed(payload["goal_id"], payload["message_id"])
            case "recover":
                await self._recovery.recover(payload["decision_id"])
            case "reversals":
                await self._reversals.find(payload["goal_id"])
            case "dead_letters":
                await self._follow(payload["decision_id"])
            case "release":
                await self._release(payload["rule_id"])
            case "complete":
                await self._goals.complete(payload["goal_id"])
            case "hook":
                await self._hook(payload["type"], payload["name"], payload["message_id"])
            case other:
                raise ValidationError(f"goals have no job {other!r}")
        return None

    async def _follow(self, decision_id: str) -> None:
        decision = await self._commits.read(lambda one: decisions.found(one.transaction, decision_id))
        await self._dead_letters.follow(decision)

    async def _release(self, rule_id: str) -> None:
        while await self._commits.write_raw(lambda transaction: holds.release(transaction, rule_id)):
            pass

    async def _advise(self, decision_id: str) -> str:
        try:
            decision = await self._commits.read(
                lambda operations: decisions.found(operations.transaction, decision_id)
            )
        except UnknownDecision:
            return ""
        if decision.state != "asked":
            return decision.choice
        return (await decisions.ask(self._commits, decision)).choice

    async def _hook(self, type_name: str, name: str, message_id: str) -> None:
        run = self._hooks.named(type_name, name)
        info = await self._commits.read(lambda operations: info_of(self._core, operations, message_id))
        result = run(info, info.result)
        if hasattr(result, "__await__"):
            await result


def _as_json(node: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(node)
    fields.setdefault("properties", {})
    fields.setdefault("edges", [])
    fields.setdefault("version", 0)
    fields.pop("at", None)
    return fields


def _search(cells: HasCells, goal_id: str, org_id: str, query: str) -> list[Node]:
    """Nodes that a message sees and whose id or text contains the query."""
    wanted = query.casefold()
    ids: dict[str, None] = {}
    for owner in (org_id, branches.SHARED):
        listed = branches.MAIN.under(cells, owner, limit=LOOKED_MAX)
        ids.update(dict.fromkeys(node.node_id for _, node in listed))
    branch = branches.BRANCHES.get(cells, goal_id)
    if branch is not None and branch.org_id == org_id:
        staged = branches.STAGED.under(cells, goal_id)
        ids.update(dict.fromkeys(key.partition(SEPARATOR)[2] for key, _ in staged))
    found: list[Node] = []
    for node_id in ids:
        node = branches.node_for(cells, goal_id, org_id, node_id)
        if node is None:
            continue
        if wanted in f"{node_id} {msgspec.json.encode(node.properties).decode()}".casefold():
            found.append(node)
            if len(found) == FOUND_MAX:
                break
    return found
