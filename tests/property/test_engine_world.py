"""2,000 seeded histories of an engine keep every rule, and a mutant of the engine breaks each rule.

`make simulate` does the same for 100,000 seeds. A failed seed is replayed with
`python -m postroom.testing.world --seed N --store sqlite`.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from postroom import Engine, Policy
from postroom.calls.submit import SubmitFields
from postroom.core.lifecycle import lifecycle, poison
from postroom.core.lifecycle.fairness import PROMOTED_EVERY, Rotation
from postroom.core.tokens import tokens
from postroom.engine.rules import ordering
from postroom.engine.rules import token_budgets as token_books
from postroom.engine.rules.cells import EFFECTS, KEYS
from postroom.engine.rules.claims import Claims
from postroom.engine.rules.outcomes import Outcomes
from postroom.goals.operation_registry import OperationRegistry
from postroom.message import Moment, Record, Step
from postroom.stores.memory import UndoJournal
from postroom.testing import HandlerWorld, World
from postroom.testing.world_checker import RULES
from tests.simulation import Part, simulated

MEMORY_SEEDS = 1_800
SQLITE_SEEDS = 200
PARTS = 20
MUTANT_SEEDS = 150


def failures(parts: list[Part]) -> tuple[list[str], Counter[str]]:
    """Run parts on all cores. Returns the failures, and how often each action happened."""
    failed: list[str] = []
    actions: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(simulated, parts):
            failed += result.failed
            actions.update(result.actions)
    return failed, actions


@pytest.mark.statement("every-fault")
@pytest.mark.parametrize(("store", "seeds"), [("memory", MEMORY_SEEDS), ("sqlite", SQLITE_SEEDS)])
def test_no_seed_breaks_a_rule(store: Any, seeds: int) -> None:
    size = seeds // PARTS
    failed, actions = failures([Part(store, first, size) for first in range(0, seeds, size)])
    assert not failed, "\n\n".join(failed[:5])
    assert min(actions.values()) > seeds // 10, "an action of the world hardly happens"


def test_a_seed_gives_the_same_history_each_time_and_on_every_store() -> None:
    first, second, on_disk = World(12).run(), World(12).run(), World(12, store="sqlite").run()
    assert first == second
    assert first.trace == on_disk.trace


def test_the_command_of_a_report_replays_its_seed() -> None:
    report = World(11).run()
    command = [sys.executable, *report.command.split()[1:]]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [*report.trace, *str(report).splitlines()]


# ---- broken on purpose -----------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]
original = {
    name: getattr(lifecycle, name) for name in ("_holds", "complete", "lapse", "lease", "cancel", "expire")
}


def accept_any_token(patch: pytest.MonkeyPatch) -> None:
    def holds(record: Record, moment: Moment, token: int, said: Any = ()) -> bool:
        return record.state not in said

    patch.setattr(lifecycle, "_holds", holds)


def ignore_the_end_of_a_lease(patch: pytest.MonkeyPatch) -> None:
    def holds(record: Record, moment: Moment, token: int, said: Any = ()) -> bool:
        return bool(original["_holds"](record, replace(moment, steady_ns=0), token, said))

    patch.setattr(lifecycle, "_holds", holds)


def end_leases_too_early(patch: pytest.MonkeyPatch) -> None:
    def lease(record: Record, moment: Moment, worker_id: str, lease_ns: int, lane: int | None = None) -> Step:
        step: Step = original["lease"](record, moment, worker_id, lease_ns // 2, lane)
        return step

    patch.setattr(lifecycle, "lease", lease)


def lose_results(patch: pytest.MonkeyPatch) -> None:
    def complete(*arguments: Any) -> Step | None:
        step: Step | None = original["complete"](*arguments)
        return None if step is None else Step(step.record, step.events, b'"other"')

    patch.setattr(lifecycle, "complete", complete)


def bury_lapsed_messages_silently(patch: pytest.MonkeyPatch) -> None:
    def lapse(record: Record, moment: Moment, *error: str) -> Step:
        step: Step = original["lapse"](record, moment, *error)
        return Step(replace(step.record, state="SCHEDULED", due=lifecycle.NANOS_PER_S << 33), step.events)

    patch.setattr(lifecycle, "lapse", lapse)


def forget_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ordering, "park", lambda *_: None)
    patch.setattr(ordering, "is_next", lambda *_: True)


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KEYS, "get", lambda *_: None)


def forget_effects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EFFECTS, "get", lambda *_: None)


def ignore_pauses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "_look_at_rules", lambda _: True)


def ignore_expiry(patch: pytest.MonkeyPatch) -> None:
    def may_run(claims: Any, head: Any) -> bool:
        return bool(claims._is_next(head) and claims._service_admits(head))

    patch.setattr(Claims, "_may_run", may_run)


def ignore_priorities(patch: pytest.MonkeyPatch) -> None:
    choose, admitted = Claims._choose, Claims._admitted
    patch.setattr(Claims, "_choose", lambda claims, lane, limit: choose(claims, 3 - lane, limit))
    patch.setattr(Claims, "_admitted", lambda claims, lane, heads: admitted(claims, 3 - lane, heads))


def starve_promoted_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rotation, "note", lambda *_, **__: None)


def let_promoted_messages_go_first(patch: pytest.MonkeyPatch) -> None:
    always = property(lambda _: PROMOTED_EVERY - 1, lambda *_: None)
    patch.setattr(Rotation, "passed_over", always, raising=False)


def ignore_open_breakers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "_service_admits", lambda *_: True)


def ignore_operations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OperationRegistry, "admits", lambda *_: True)


def let_spent_goals_run_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "_over_budget", lambda *_: None)


def count_usage_twice(patch: pytest.MonkeyPatch) -> None:
    count = Outcomes._count_usage

    def twice(operations: Any, *arguments: Any) -> None:
        count(operations, *arguments)
        count(operations, *arguments)

    patch.setattr(Outcomes, "_count_usage", twice)


def revive_the_cancelled(patch: pytest.MonkeyPatch) -> None:
    def cancel(record: Record, moment: Moment) -> Step:
        step: Step = original["cancel"](record, moment)
        return Step(replace(step.record, state="QUEUED"), step.events)

    patch.setattr(lifecycle, "cancel", cancel)


def miscount(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UndoJournal, "count", lambda *_: None)


def keep_what_was_rolled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UndoJournal, "undo", UndoJournal.commit)


def keep_unused_tokens(patch: pytest.MonkeyPatch) -> None:
    """The account forgets to take back what a lease had reserved."""
    settle = tokens.settle

    def keep(account: tokens.Account, grant: tokens.Grant, used: int, *, ran: bool) -> tokens.Account:
        return replace(settle(account, grant, used, ran=ran), tokens=account.tokens - used)

    patch.setattr(tokens, "settle", keep)


def forget_what_was_used(patch: pytest.MonkeyPatch) -> None:
    settle = tokens.settle

    def forget(account: tokens.Account, grant: tokens.Grant, used: int, *, ran: bool) -> tokens.Account:
        return settle(account, grant, 0, ran=ran)

    patch.setattr(tokens, "settle", forget)


def keep_reservations_of_failures(patch: pytest.MonkeyPatch) -> None:
    """The lease of a failed attempt goes on holding its tokens, and its message is claimed again."""
    patch.setattr(Outcomes, "_settle_failure", lambda *_: None)
    patch.setattr(token_books, "is_live", lambda *_: True)


def blame_neighbours(patch: pytest.MonkeyPatch) -> None:
    """The death of a worker counts against all messages that it ran."""
    patch.setattr(poison, "after_worker_death", lambda crashes: crashes + 1)


def let_killers_run_beside_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(poison, "after_worker_death", lambda crashes: crashes)


def keep_the_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(poison, "after_attempt", lambda crashes: crashes)


MUTANTS: dict[Patch, set[str]] = {
    accept_any_token: {"stale", "history"},
    ignore_the_end_of_a_lease: {"stale"},
    end_leases_too_early: {"overlap", "refused"},
    lose_results: {"result"},
    bury_lapsed_messages_silently: {"lost"},
    forget_order: {"order"},
    forget_keys: {"duplicate"},
    forget_effects: {"effect"},
    ignore_pauses: {"paused"},
    ignore_expiry: {"expired"},
    ignore_priorities: {"priority"},
    starve_promoted_messages: {"share"},
    let_promoted_messages_go_first: {"share"},
    ignore_open_breakers: {"breaker"},
    ignore_operations: {"conflict"},
    count_usage_twice: {"usage"},
    let_spent_goals_run_on: {"guard"},
    blame_neighbours: {"blame"},
    let_killers_run_beside_others: {"blame"},
    keep_the_mark: {"blame"},
    revive_the_cancelled: {"terminal"},
    miscount: {"books"},
    keep_what_was_rolled_back: {"unknown"},
    keep_unused_tokens: {"tokens"},
    forget_what_was_used: {"tokens"},
    keep_reservations_of_failures: {"tokens"},
}


def broken_rules(seeds: int, wanted: set[str]) -> set[str]:
    """The rules that the first seeds break. Stops when all wanted rules are broken."""
    found: set[str] = set()
    for seed in range(seeds):
        found |= {one.rule for one in World(seed).run().broken}
        if wanted <= found:
            break
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_an_engine_that_breaks_a_rule_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert MUTANTS[mutant] <= broken_rules(MUTANT_SEEDS, MUTANTS[mutant])


@pytest.mark.statement("chaos")
def test_every_rule_has_a_mutant() -> None:
    assert set.union(*MUTANTS.values()) == RULES.keys()


# ---- handlers of users -----------------------------------------------------------------------------


def messages(*types: str) -> list[SubmitFields]:
    return [
        {"type": name, "org_id": "acme", "payload": {"number": number}, "idempotency_key": f"{name}{number}"}
        for name in types
        for number in range(3)
    ]


def paying_engine(**options: Any) -> tuple[Engine, list[int]]:
    engine = Engine.open("memory://")
    paid: list[int] = []

    def pay(number: int) -> str:
        paid.append(number)
        return f"receipt {number}"

    @engine.handler("tool_call")
    async def handle(message: Any, context: Any) -> str:
        number = message.payload["number"]
        return str(await context.effect("pay", lambda: pay(number), **options))

    @engine.handler("model_call")
    def handle_plain(message: Any, context: Any) -> str:
        number = message.payload["number"]
        return str(context.effect("pay", lambda: pay(number + 100)))

    @engine.handler("memory_save", batch=4)
    async def handle_many(batch: list[Any], contexts: list[Any]) -> list[int]:
        return [message.payload["number"] for message in batch]

    return engine, paid


@pytest.mark.statement("every-fault")
def test_effects_of_handlers_happen_once_under_every_fault() -> None:
    engine, paid = paying_engine()
    seen: Counter[str] = Counter()
    for seed in range(60):
        paid.clear()
        report = HandlerWorld(engine, seed).run(messages("tool_call", "model_call", "memory_save"))
        assert report.ok, report
        assert len(paid) == len(set(paid))
        assert len(report.messages) == 9, "a repeated submit made a second message"
        for one in report.messages:
            seen.update(one.faults)
            seen[one.state] += 1
            assert one.state in ("COMPLETED", "DEAD_LETTER"), report
    engine.close()
    assert set(seen) == {
        "before the handler", "before the effect", "after the effect", "after the handler", "lease over",
        "COMPLETED", "DEAD_LETTER",
    }  # fmt: skip


def test_handler_world_counts_runs_of_handlers_and_effects() -> None:
    engine, _ = paying_engine(on_unknown="run")
    reports = [HandlerWorld(engine, seed).run(messages("tool_call")) for seed in range(30)]
    engine.close()
    runs = Counter(one.runs for report in reports for one in report.messages)
    calls = Counter(one.effects.get("pay", 0) for report in reports for one in report.messages)
    assert runs.keys() >= {1, 2}
    assert calls.keys() >= {1, 2}
    assert {one.state for report in reports for one in report.messages} == {"COMPLETED"}


def test_handler_world_runs_children_that_a_handler_waits_for() -> None:
    engine, _ = paying_engine(on_unknown="run")

    @engine.handler("agent_spawn")
    async def parent(message: Any, ctx: Any) -> Any:
        child = await ctx.submit(
            type="tool_call", payload=message.payload, idempotency_key=f"child of {message.message_id}"
        )
        return await child.result()

    reports = [HandlerWorld(engine, seed).run(messages("agent_spawn")) for seed in range(30)]
    engine.close()
    assert all(report.ok for report in reports)
    assert {one.state for report in reports for one in report.messages} == {"COMPLETED"}
    assert {len(report.messages) for report in reports} == {6}, "a repeated child was stored twice"


def test_messages_of_two_versions_reach_one_of_several_handlers_once_under_every_fault() -> None:
    engine = Engine.open("memory://", Policy(version="2.0.0"))
    paid: list[int] = []

    @engine.migration(1)
    def one_to_two(fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "payload": {**fields["payload"], "tool": fields["payload"]["name"]}}

    def pay(name: str) -> Callable[[Any, Any], Any]:
        async def run(message: Any, ctx: Any) -> str:
            await ctx.effect("pay", lambda: paid.append(message.payload["number"]), on_unknown="run")
            return name

        return run

    engine.handler("tool_call", service="bank")(pay("bank"))
    engine.handler("tool_call", tool="draw")(pay("draw"))
    sent = messages("tool_call")
    for name, fields in zip(("draw", "move", "draw"), sent, strict=True):
        fields["version"], fields["service"] = "1.0.0", "bank"
        fields["payload"] = {"name": name, "number": len(name)}
    faults: Counter[str] = Counter()
    for seed in range(30):
        report = HandlerWorld(engine, seed).run(sent)
        assert report.ok, report
        assert [one.result for one in report.messages] == ["draw", "bank", "draw"], report
        faults.update(fault for one in report.messages for fault in one.faults)
    engine.close()
    assert faults


def test_handler_world_repeats_its_faults() -> None:
    engine, _ = paying_engine()
    first, second = (HandlerWorld(engine, 5).run(messages("tool_call")) for _ in range(2))
    engine.close()
    assert [one.faults for one in first.messages] == [one.faults for one in second.messages]


def test_handler_world_catches_an_engine_that_forgets_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = paying_engine()
    forget_effects(monkeypatch)
    broken = [
        one for seed in range(30) for one in HandlerWorld(engine, seed).run(messages("tool_call")).broken
    ]
    engine.close()
    assert {one.rule for one in broken} == {"effect"}
