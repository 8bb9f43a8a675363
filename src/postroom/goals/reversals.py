"""What undoes the effects of a goal: their classes and their reversals, found when a rollback needs them.

Rule 1: a reversal that its handler gave is used as it is. For an effect without one, the rules look for a
        tool whose name is the opposite and whose arguments are known; an adviser gets the whole catalogue.
Rule 2: effects of the same pattern are one question. A tool that is found becomes the reversal of those whose
        arguments it can take.
Rule 3: what a handler declares IRREVERSIBLE stays so.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from postroom.core.goals import advice, reversals
from postroom.core.goals.advice import NO_TOOL, Question
from postroom.core.goals.reversals import NAME_ALONE, NAME_AND_ARGUMENTS, KnownTool
from postroom.engine.core import EngineCore
from postroom.engine.messages import body_of
from postroom.engine.rules import bodies
from postroom.engine.rules.cells import EFFECTS as OUTCOMES
from postroom.engine.rules.policy import Policy
from postroom.engine.work.mcp_tools import McpServers
from postroom.errors import Unavailable
from postroom.goals import decisions, internal
from postroom.goals.advisers.facts import of_message, quoted
from postroom.goals.advisers.questions import decided_at_once
from postroom.goals.goal_cells import EFFECTS, STATES, Decision, GoalEffect
from postroom.goals.rollback import effects_of
from postroom.message import Stored
from postroom.stores.transaction import Transaction

PATTERNS_ASKED_MAX: Final = 50
TOOLS_OFFERED_MAX: Final = 40
DESCRIPTION_CHARS_MAX: Final = 160

Catalogue = list[KnownTool]


class _Done(NamedTuple):
    """An effect, what it was called with, and what it returned."""

    effect: GoalEffect
    stored: Stored
    called_with: Any
    outcome: Any

    @property
    def pattern(self) -> str:
        return f"{self.stored.envelope.type} {self.effect.key}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that say what was done: the tool, the key of the effect, the type of the message."""
        named = self.called_with.get("tool") if isinstance(self.called_with, dict) else None
        tool = (named,) if isinstance(named, str) else ()
        return (*tool, self.effect.key, self.stored.envelope.type)

    @property
    def arguments(self) -> Any:
        """The arguments of the tool; the payload of a message that names none."""
        inner = self.called_with.get("arguments") if isinstance(self.called_with, dict) else None
        return inner if isinstance(inner, dict) else self.called_with


class Reversals:
    """Finds what undoes the effects of a goal."""

    def __init__(self, core: EngineCore, servers: Callable[[], McpServers]) -> None:
        self._core = core
        self._commits = core.commits
        self._servers = servers

    async def find(self, goal_id: str) -> None:
        """Find the classes and reversals that effects of a goal lack."""
        numbers = await self._commits.read(lambda operations: _unsettled(operations.transaction, goal_id))
        for question, org_id, subject in await self._commits.read(
            lambda operations: _class_questions(operations.transaction, goal_id, numbers)
        ):
            await decided_at_once(self._commits, question, org_id, subject)
        if not numbers:
            return
        catalogue = await self.catalogue()
        work = partial(_ask, policy=self._commits.policy, goal_id=goal_id, catalogue=catalogue)
        for decision in await self._commits.write_raw(work, makes_room=True):
            if decision.state == "asked":
                await decisions.ask(self._commits, decision)

    async def catalogue(self) -> Catalogue:
        """The handlers of the application, and the tools of its MCP servers that answer."""
        found = [
            _of_handler(type_name, *route, handler.run, handler.payload)
            for type_name, of_type in self._core.handlers.registered.items()
            for route, handler in of_type.items()
            if not handler.is_own
        ]
        for server in self._servers().by_name.values():
            with suppress(Unavailable):
                found += [_of_mcp(server.name, tool) for tool in (await server.tools()).values()]
        return found


# ---- the catalogue ---------------------------------------------------------------------------------


def _of_handler(type_name: str, service: str, tool: str, run: Callable[..., Any], shape: Any) -> KnownTool:
    schema = {} if shape is None else msgspec.json.schema(shape)
    schema = schema.get("$defs", {}).get(schema.get("$ref", "").rpartition("/")[2], schema)
    known = _arguments(schema)
    return KnownTool(
        name="/".join(filter(None, (type_name, service, tool))),
        type=type_name,
        service=service,
        tool=tool,
        description=_first_line(run.__doc__),
        arguments=None if tool else known,  # the shape of such a payload is not that of the arguments
        required=[] if tool or known is None else schema.get("required", []),
    )


def _of_mcp(server: str, tool: Any) -> KnownTool:
    schema = tool.input_schema or {}
    hints = tool.annotations
    return KnownTool(
        name=f"{server}/{tool.name}",
        type="tool_call",
        service=server,
        tool=tool.name,
        description=_first_line(tool.description),
        arguments=_arguments(schema) or {},
        required=schema.get("required", []),
        annotations={} if hints is None else hints.model_dump(exclude_none=True),
    )


def _arguments(schema: dict[str, Any]) -> dict[str, str] | None:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return None
    return {name: str(one.get("type", "")) for name, one in properties.items() if isinstance(one, dict)}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:DESCRIPTION_CHARS_MAX]


# ---- questions, in a transaction -------------------------------------------------------------------


def _unsettled(transaction: Transaction, goal_id: str) -> list[int]:
    """The numbers of effects that lack a class or a reversal, the newest first."""
    goal = STATES.get(transaction, goal_id) if goal_id.isprintable() else None
    if goal is None or goal.ended_us:
        return []
    return [
        number
        for number, effect in effects_of(transaction, goal_id)
        if _lacks_reversal(effect) or (effect.reversal is not None and not effect.reversal_class)
    ]


def _lacks_reversal(effect: GoalEffect) -> bool:
    is_declared_final = effect.reversal_class == "IRREVERSIBLE" and not effect.is_open
    return effect.reversal is None and not is_declared_final and not effect.decision_id


def _done(transaction: Transaction, effect: GoalEffect) -> _Done | None:
    """What is known about an effect whose message is stored."""
    stored = transaction.records.load(effect.message_id)
    body = None if stored is None else body_of(stored.envelope.payload)
    if stored is None or body is None:
        return None
    outcome = OUTCOMES.get(transaction, effect.message_id, effect.key)
    payload = msgspec.json.decode(bodies.payload_of(transaction, body))
    return _Done(
        effect, stored, payload, None if outcome is None else bodies.outcome_of(transaction, outcome)
    )


def _by_pattern(
    transaction: Transaction, goal_id: str, lacks: Callable[[GoalEffect], bool]
) -> dict[str, dict[int, _Done]]:
    """Effects of a goal by pattern and number, the newest first."""
    found: dict[str, dict[int, _Done]] = {}
    for number, effect in effects_of(transaction, goal_id):
        done = _done(transaction, effect) if lacks(effect) else None
        if done is not None and (done.pattern in found or len(found) < PATTERNS_ASKED_MAX):
            found.setdefault(done.pattern, {})[number] = done
    return found


def _class_questions(
    transaction: Transaction, goal_id: str, numbers: list[int]
) -> list[tuple[Question, str, dict[str, Any]]]:
    """Questions about effects with a reversal and without a class."""
    goal = STATES.get(transaction, goal_id) if numbers else None
    if goal is None:
        return []
    found = _by_pattern(
        transaction, goal_id, lambda effect: effect.reversal is not None and not effect.reversal_class
    )
    asked = []
    for pattern, alike in found.items():
        first = next(iter(alike.values()))
        facts = {**_facts(transaction, first), "has_reversal": True, "reversal": first.effect.reversal}
        question = advice.question("reversal_class", facts, pattern=pattern)
        subject = {"goal_id": goal_id, "message_id": first.effect.message_id, "effects": [*alike]}
        asked.append((question, goal.org_id, subject))
    return asked


def _facts(transaction: Transaction, done: _Done) -> dict[str, Any]:
    return {
        "key": done.effect.key,
        "type": done.stored.envelope.type,
        "outcome": quoted(done.outcome),
        **of_message(transaction, done.stored),
    }


def _ask(transaction: Transaction, policy: Policy, goal_id: str, catalogue: Catalogue) -> list[Decision]:
    """Ask which tools undo effects without a reversal. Returns the decisions."""
    goal = STATES.get(transaction, goal_id)
    if goal is None or goal.ended_us:
        return []
    found = _by_pattern(transaction, goal_id, _lacks_reversal)
    if found and not catalogue:  # a process without handlers, such as a command: a worker looks instead
        internal.go_on(transaction, policy, goal.org_id, "reversals", goal_id=goal_id)
        return []
    taken = []
    for pattern, alike in found.items():
        first = next(iter(alike.values()))
        offered, match = _offered(catalogue, first, is_all=policy.has_model)
        if not offered:
            continue
        facts = {
            **_facts(transaction, first),
            **match,
            "tools": [msgspec.to_builtins(tool) for tool in offered],
        }
        question = advice.question(
            "reversal", facts, pattern=pattern, options=(*(tool.name for tool in offered), NO_TOOL)
        )
        subject = {"goal_id": goal_id, "message_id": first.effect.message_id, "effects": [*alike]}
        decision = decisions.settle(transaction, policy, question, goal.org_id, subject, asks_later=False)
        for number in alike:
            effect = EFFECTS.get(transaction, goal_id, number)
            if effect is not None:
                noted = replace(effect, decision_id=decision.decision_id)
                EFFECTS.put(transaction, noted, goal_id, number)
        taken.append(decision)
    return taken


def _offered(catalogue: Catalogue, done: _Done, *, is_all: bool) -> tuple[Catalogue, dict[str, Any]]:
    """The tools of a question, the likeliest first, and the one that the rules choose.

    Without `is_all`, only those whose name is the opposite.
    """
    usable = [tool for tool in catalogue if not tool.annotations.get("read_only_hint")]
    body = body_of(done.stored.envelope.payload)
    service = "" if body is None else body.service
    opposite = [
        tool
        for tool in usable
        if any(reversals.undoes(_last(tool.tool or tool.name), _last(name)) for name in done.names)
        and reversals.filled(tool, done.arguments, done.outcome) is not None
    ]
    opposite.sort(key=lambda tool: (tool.service != service, tool.arguments is None))
    rest = [tool for tool in usable if tool not in opposite] if is_all else []
    match: dict[str, Any] = {}
    if opposite:
        sure = NAME_ALONE if opposite[0].arguments is None else NAME_AND_ARGUMENTS
        match = {"match": opposite[0].name, "match_confidence": sure}
    return [*opposite, *rest][:TOOLS_OFFERED_MAX], match


def _last(name: str) -> str:
    """The last part of a name with slashes, such as the key of a call of an MCP tool."""
    return name.rpartition("/")[2]


# ---- what follows from a decision ------------------------------------------------------------------


def decided(transaction: Transaction, _policy: Policy, decision: Decision) -> None:
    """Give the effects of a decision the reversal that was found."""
    tools = [msgspec.convert(one, KnownTool) for one in decision.question.facts["tools"]]
    tool = next((one for one in tools if one.name == decision.choice), None)
    goal_id = decision.subject["goal_id"]
    for number in decision.subject["effects"] if tool is not None else ():
        effect = EFFECTS.get(transaction, goal_id, number)
        done = None if effect is None or effect.reversal is not None else _done(transaction, effect)
        if done is None or tool is None:
            continue
        known = done.arguments, done.outcome
        arguments = reversals.chosen(tool, decision.arguments, *known) or reversals.filled(tool, *known)
        if arguments is not None:
            EFFECTS.put(transaction, _reversible(done, tool.message(arguments)), goal_id, number)


def _reversible(done: _Done, reversal: dict[str, Any]) -> GoalEffect:
    kept = done.effect.reversal_class if not done.effect.is_open else ""
    return replace(
        done.effect, reversal=reversal, reversal_class=kept or reversals.class_of(" ".join(done.names))
    )


decisions.on_reversal.append(decided)
