"""`ContextProvider`: what a handler gives to its model, within a budget of tokens.

Rule 1: the most important parts come first. A part fits whole or is left out.
Rule 2: a part that is left out is named in the digest, so that the model can ask for it.
"""

import hashlib
from abc import ABC, abstractmethod
from typing import Any, Final

import msgspec

from postroom.engine.commits import Commits
from postroom.engine.messages import Message
from postroom.errors import InvalidMessage
from postroom.goals.goal_cells import CONTEXTS, PROMPTS, STATES
from postroom.goals.graph import branches
from postroom.goals.graph.graph import Graphs
from postroom.stores.transaction import Transaction

CHARS_A_TOKEN: Final = 4  # an estimate for English text and JSON
TOKEN_BUDGET: Final = 4_000
TOKEN_BUDGET_MAX: Final = 10_000_000
NEIGHBOURS_MAX: Final = 20
_FIRST: Final = ("previous_failure", "avoid_approaches")


class BuiltContext(msgspec.Struct, frozen=True):
    """The parts that fit, and a digest of the rest."""

    parts: dict[str, Any]
    tokens: int
    """An estimate of what the parts cost."""
    digest: list[dict[str, Any]]
    """Name, tokens and hash of each part that was left out."""


class ContextProvider(ABC):
    """Builds the context of a message."""

    @abstractmethod
    async def build(self, message: Message, token_budget: int) -> BuiltContext:
        """What fits into the budget. It runs after the tokens of the message were reserved."""


class GoalContextProvider(ContextProvider):
    """What failed before, additions to the prompt, the context of the goal and the message, and the graph."""

    def __init__(self, commits: Commits, graphs: Graphs) -> None:
        self._commits = commits
        self._graphs = graphs

    async def build(self, message: Message, token_budget: int) -> BuiltContext:
        checked_budget(token_budget)
        parts = await self._commits.read(lambda operations: _of_goal(operations.transaction, message))
        parts |= {f"message.{name}": value for name, value in message.context.items()}
        payload = message.payload if isinstance(message.payload, dict) else {}
        node_id = payload.get("node_id")
        if isinstance(node_id, str) and node_id:
            parts |= await self._around(message, node_id)
        return fitted(parts, token_budget)

    async def _around(self, message: Message, node_id: str) -> dict[str, Any]:
        """The node that a message is about, and its neighbours."""

        def work(cells: Any) -> dict[str, Any]:
            def get(name: str) -> Any:
                return branches.node_for(cells, message.goal_id, message.org_id, name)

            node = get(node_id)
            near = [to for _, to in node.edges][:NEIGHBOURS_MAX] if node is not None else []
            found = [one for one in (node, *(get(name) for name in near)) if one is not None]
            return {f"node.{one.node_id}": one.properties for one in found}

        return await self._graphs.place.read(work)


def _of_goal(transaction: Transaction, message: Message) -> dict[str, Any]:
    goal = STATES.get(transaction, message.goal_id)
    if goal is None or goal.org_id != message.org_id:
        return {}
    stored = CONTEXTS.get(transaction, message.goal_id, goal.context_version)
    value = {} if stored is None else stored.value
    parts = {name: value[name] for name in _FIRST if value.get(name)}
    additions = PROMPTS.get(transaction, message.org_id, message.agent_id)
    if additions:
        parts["prompt_additions"] = additions
    return parts | {f"goal.{name}": one for name, one in value.items() if name not in _FIRST}


def fitted(parts: dict[str, Any], token_budget: int) -> BuiltContext:
    """The parts that fit, in their order, and a digest of the others."""
    kept: dict[str, Any] = {}
    digest: list[dict[str, Any]] = []
    used = 0
    for name, value in parts.items():
        data = msgspec.json.encode(value)
        tokens = -(-(len(data) + len(name)) // CHARS_A_TOKEN)
        if used + tokens <= token_budget:
            kept[name] = value
            used += tokens
        else:
            shown = hashlib.blake2b(data, digest_size=8).hexdigest()
            digest.append({"name": name, "tokens": tokens, "hash": shown})
    return BuiltContext(kept, used, digest)


def checked_budget(token_budget: object) -> int:
    """A budget of tokens."""
    if type(token_budget) is not int or not 0 <= token_budget <= TOKEN_BUDGET_MAX:
        raise InvalidMessage(
            f"token_budget is a whole number from 0 to {TOKEN_BUDGET_MAX}, not {token_budget!r}"
        )
    return token_budget
