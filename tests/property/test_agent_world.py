"""1,000 seeded histories of coordinators and agents keep every rule, and each rule is seen to break.

A seed that failed is replayed with `python -m tests.agentworld --seed N`.
"""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from postroom.engine.agents import agent_operations as agents_module
from postroom.engine.agents import agent_sweeps
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.answer_parts import read_on
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.rules.cells import REQUESTS, OpenRequest
from postroom.engine.rules.operations import Operations
from postroom.stores.memory import UndoJournal
from tests.agentworld import RULES, AgentWorld

SEEDS = 1_000
SEEDS_A_PART = 50
MUTANT_SEEDS = 200


def simulated(first: int) -> tuple[list[str], Counter[str], int]:
    """What failed in some seeds, how often each action happened, and how many requests there were."""
    reports = [AgentWorld(seed).run() for seed in range(first, first + SEEDS_A_PART)]
    actions: Counter[str] = Counter()
    for report in reports:
        actions.update(report.actions)
    failed = [str(report) for report in reports if not report.ok]
    return failed, actions, sum(report.requests for report in reports)


def test_no_seed_breaks_a_rule() -> None:
    failed: list[str] = []
    actions: Counter[str] = Counter()
    requests = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(simulated, range(0, SEEDS, SEEDS_A_PART)):
            failed += part[0]
            actions.update(part[1])
            requests += part[2]
    assert not failed, "\n\n".join(failed[:5])
    assert min(actions.values()) > SEEDS // 10, "an action of the world hardly happens"
    assert requests > 2 * SEEDS


def test_a_seed_gives_the_same_history_each_time() -> None:
    assert AgentWorld(7).run() == AgentWorld(7).run()


# ---- broken on purpose -----------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def resume_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentOperations, "open_requests", lambda *_: [])


def keep_bounced_requests_open(patch: pytest.MonkeyPatch) -> None:
    bounce = agent_sweeps.bounce

    def bounced(agents: Any, org_id: str, agent_id: str, message_id: str, reason: str) -> None:
        bounce(agents, org_id, agent_id, message_id, reason)
        REQUESTS.put(agents.transaction, OpenRequest("model_call", 0), org_id, agent_id, message_id)

    patch.setattr(agent_sweeps, "bounce", bounced)


def read_from_the_beginning_again(patch: pytest.MonkeyPatch) -> None:
    def read(operations: Any, message_id: str, position: Any) -> Any:
        parts, is_complete = read_on(operations, message_id, position)
        return [(replace(at, attempt=0, index=0), part) for at, part in parts], is_complete

    patch.setattr(agents_module, "read_on", read)


def turn_parts_around(patch: pytest.MonkeyPatch) -> None:
    def read(operations: Any, message_id: str, position: Any) -> Any:
        parts, is_complete = read_on(operations, message_id, position)
        last = parts.pop() if is_complete else None
        return [*reversed(parts), *([last] if last else [])], is_complete

    patch.setattr(agents_module, "read_on", read)


def serve_replaced_registrations(patch: pytest.MonkeyPatch) -> None:
    def answers(agents: Any, asked: Any) -> Any:
        operations = Operations(agents.transaction, agents.policy)
        return [agents._answer(operations, one) for one in asked]

    patch.setattr(AgentOperations, "answers", answers)


def lose_a_chunk(patch: pytest.MonkeyPatch) -> None:
    add_parts = Operations.add_parts

    def add(operations: Any, message_id: str, lease: int, parts: Any, first: int) -> None:
        add_parts(operations, message_id, lease, [replace(part, chunk=-1) for part in parts], first)

    patch.setattr(Operations, "add_parts", add)


def repeat_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentOperations, "next_number", lambda _: 1)


def deliver_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inboxes, "deliver", lambda *_: None)


def miscount(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UndoJournal, "count", lambda *_: None)


def bounce_to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_sweeps, "_creator", lambda _: None)


MUTANTS: dict[Patch, set[str]] = {
    bounce_to_nobody: {"creator"},
    resume_nothing: {"lost"},
    keep_bounced_requests_open: {"both"},
    read_from_the_beginning_again: {"repeated"},
    turn_parts_around: {"order"},
    serve_replaced_registrations: {"fenced"},
    lose_a_chunk: {"chunks"},
    repeat_epochs: {"epoch"},
    deliver_nothing: {"letter"},
    miscount: {"books"},
}


def broken_rules(wanted: set[str]) -> set[str]:
    found: set[str] = set()
    for seed in range(MUTANT_SEEDS):
        found |= {one.rule for one in AgentWorld(seed).run().broken}
        if wanted <= found:
            break
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_agents_that_break_a_rule_are_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert MUTANTS[mutant] <= broken_rules(MUTANTS[mutant])


def test_every_rule_has_a_mutant() -> None:
    assert set.union(*MUTANTS.values()) == RULES.keys()
