"""Token budgets of an engine: reserved with the lease, returned with its end, and accounted to the token."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, MessageFailed, Policy, RateLimited, Tasks, TokensExhausted
from postroom.core.formats.events import of_store
from postroom.engine.rules.cells import ACCOUNTS, DEPENDANTS
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome, Usage
from postroom.engine.token_status import ModelTokens
from postroom.engine.work.handlers import Pool
from postroom.errors import InvalidMessage, InvalidSetting
from postroom.message import Event
from postroom.testing import ManualClock, check_consistency
from tests.engines import EngineUnderTest, soon
from tests.waiting import HANG_GUARD_S

SMALL = {"tokens_per_minute": 1_000}
TIERS = [0.4, 0.3, 0.2, 0.1]

Make = Callable[..., EngineUnderTest]


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    opened: list[EngineUnderTest] = []

    def one(models: dict[str, Any] | None = None, **more: Any) -> EngineUnderTest:
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
        tokens = {"providers": {"p": {"models": models or {"small": SMALL}}}, **more}
        engine = EngineUnderTest(url, Policy(tokens=tokens))
        engine.clock.advance(60.5)
        opened.append(engine)
        return engine

    yield one
    for engine in opened:
        check_consistency(engine.engine.store)
        for provider in engine.wait(engine.engine.tokens.status()).providers.values():
            for model in provider.models.values():
                for window in model.windows.values():
                    assert window.used + window.reserved + window.free == window.limit
        engine.close()


def model_of(engine: EngineUnderTest, name: str = "small") -> ModelTokens:
    return engine.wait(engine.engine.tokens.status()).providers["p"].models[name]


def figures(engine: EngineUnderTest, name: str = "small") -> tuple[int, int, int, int]:
    found = model_of(engine, name)
    return found.limit, found.used, found.reserved, found.free


def done(claimed: Claimed, used: int, kind: Any = "completed", **more: Any) -> Outcome:
    return Outcome(
        kind=kind,
        message_id=claimed.record.message_id,
        lease=claimed.record.lease,
        body=claimed.body,
        type=claimed.type,
        usage=Usage("small", tokens_out=used),
        grant=claimed.grant,
        **more,
    )


def events(engine: EngineUnderTest, kind: str) -> list[Event]:
    return [event for event in engine.engine.store.events(0, 10_000) if event.kind == kind]


# ---- reservation and settlement --------------------------------------------------------------------


@pytest.mark.statement("tokens-before-work")
def test_tokens_are_reserved_at_the_claim_and_the_unused_ones_returned(make: Make) -> None:
    engine = make()
    engine.submit(tokens=300, models=["small"])
    assert figures(engine) == (1_000, 0, 0, 1_000)
    [claimed] = engine.claim()
    assert claimed.grant is not None
    assert (claimed.grant.model, claimed.grant.tokens) == ("small", 300)
    assert figures(engine) == (1_000, 0, 300, 700)
    engine.finish(done(claimed, 120))
    assert figures(engine) == (1_000, 120, 0, 880)
    engine.finish(done(claimed, 120))  # the answer was lost, so the outcome is sent again
    assert figures(engine) == (1_000, 120, 0, 880)
    [reserved], [returned] = events(engine, "tokens_reserved"), events(engine, "tokens_returned")
    assert (reserved.detail["tokens"], returned.detail["tokens"], returned.detail["used"]) == (300, 180, 120)


@pytest.mark.parametrize("kind", ["released", "deferred", "crashed"])
def test_attempt_that_did_not_run_returns_everything(make: Make, kind: str) -> None:
    engine = make()
    engine.submit(tokens=300)
    [claimed] = engine.claim()
    engine.finish(done(claimed, 120, kind))
    assert figures(engine) == (1_000, 0, 0, 1_000)


def test_failed_attempt_is_charged_what_it_used(make: Make) -> None:
    engine = make()
    engine.submit(tokens=300)
    [claimed] = engine.claim()
    engine.finish(done(claimed, 120, "failed", error="x"))
    assert figures(engine) == (1_000, 120, 0, 880)
    [returned] = events(engine, "tokens_returned")
    audited = of_store(returned, "s", "engine")
    assert (audited.model, audited.tokens_out, audited.org_id) == ("small", 120, "acme")


@pytest.mark.parametrize("ended_by", ["claim", "sweep", "supervisor", "cancel", "nobody"])
def test_lapsed_lease_gives_the_tokens_back(make: Make, ended_by: str) -> None:
    engine = make()
    handle = engine.submit(tokens=300)
    [claimed] = engine.claim()
    if ended_by not in ("supervisor", "cancel"):
        engine.clock.advance(16)
    if ended_by == "claim":
        [claimed_again] = engine.claim()
        assert figures(engine) == (1_000, 0, 300, 700), "the reservation of the second attempt"
        engine.finish(done(claimed_again, 0))
    elif ended_by == "sweep":
        engine.wait(engine.engine.sweep())
    elif ended_by == "supervisor":
        engine.wait(engine.engine.put_back("w"))
    elif ended_by == "cancel":
        engine.wait(engine.engine.cancel(handle.message_id))
    assert figures(engine) == (1_000, 0, 0, 1_000)
    engine.finish(done(claimed, 250))  # a zombie reports
    assert figures(engine) == (1_000, 0, 0, 1_000)


def test_lease_that_a_worker_of_tasks_ended_gives_the_tokens_back(make: Make) -> None:
    engine = make()
    engine.submit(tokens=900)
    engine.claim()
    engine.clock.advance(16)
    Tasks(engine.engine.store).claim(agent="coder")  # puts back whatever is overdue in the store
    assert figures(engine) == (1_000, 0, 0, 1_000)
    engine.submit(tokens=900, priority=0)
    engine.wait(engine.engine.sweep())
    assert len(engine.claim()) == 1


def test_sweep_reaches_old_reservations_after_many_newer_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.engine.rules.token_budgets.CLAIMS_SWEPT_MAX", 2)
    engine = make()
    engine.submit(tokens=100)
    engine.claim()
    engine.clock.advance(16)
    Tasks(engine.engine.store).claim(agent="coder")  # ends the lease without a settlement
    for _ in range(4):
        engine.submit(tokens=100)
        assert engine.claim()

    def reserved() -> int:
        account = engine.engine.store.read(lambda transaction: ACCOUNTS.get(transaction, "p", "small"))
        return 0 if account is None else account.tokens

    assert reserved() == 500
    for _ in range(3):
        engine.wait(engine.engine.sweep())
    assert reserved() == 400


def test_message_without_tokens_touches_no_account(make: Make) -> None:
    engine = make()
    engine.submit()
    engine.submit(payload={"tokens": 5})
    engine.complete(engine.claim(2))
    assert figures(engine) == (1_000, 0, 0, 1_000)
    assert not events(engine, "tokens_reserved")


# ---- shortages -------------------------------------------------------------------------------------


@pytest.mark.statement("tokens-shortage")
def test_message_waits_for_the_earliest_reset_and_explain_says_so(make: Make) -> None:
    engine = make({"small": SMALL, "slow": {"tokens_per_day": 500}})
    engine.submit_many(2, tokens=800)
    assert len(engine.claim(2)) == 1
    waiting = engine.submit(tokens=400, models=["small"])
    said = engine.wait(engine.engine.explain(waiting.message_id))
    assert "token budget: its 400 tokens are more than P2 has free of small. The budget is refilled" in said
    assert engine.claim() == []
    assert engine.state(waiting) == "SCHEDULED"
    said = engine.wait(engine.engine.explain(waiting.message_id))
    assert "the token budget: its 400 tokens are more than P2 has free of small. It is due in " in said
    assert model_of(engine).organizations["acme"].refused == 400 + 800
    [first, second] = events(engine, "tokens_refused")
    assert (first.detail["tokens"], second.detail["tokens"]) == (800, 400)
    reset_s = model_of(engine).resets_in_s
    assert 0 < reset_s <= 60
    engine.clock.advance(reset_s + 0.001)
    assert [one.record.message_id for one in engine.claim()] != []


@pytest.mark.statement("tokens-exhausted-p0")
def test_p0_fails_at_once_when_all_providers_are_exhausted(make: Make) -> None:
    engine = make()
    engine.submit(tokens=900)
    engine.claim()
    handle = engine.submit(tokens=200, priority=0)
    assert engine.claim() == []
    assert engine.state(handle) == "DEAD_LETTER"
    with pytest.raises(TokensExhausted) as raised:
        engine.wait(handle.result(timeout_s=1))
    assert isinstance(raised.value, MessageFailed)
    assert raised.value.error_history[-1]["error_type"] == "TokensExhausted"


@pytest.mark.statement("tokens-shortage")
def test_shortage_queue_looks_again_every_second(make: Make) -> None:
    engine = make(shortage="queue")
    engine.submit(tokens=900)
    [first] = engine.claim()
    waiting = engine.submit(tokens=200)
    assert engine.claim() == []
    engine.finish(done(first, 0))
    engine.clock.advance(1.001)
    assert [one.record.message_id for one in engine.claim()] == [waiting.message_id]


@pytest.mark.statement("tokens-shortage")
def test_shortage_degrade_gives_another_model_or_fewer_tokens(make: Make) -> None:
    engine = make({"big": {"tokens_per_minute": 500}, "small": SMALL}, shortage="degrade")
    engine.submit_many(2, tokens=400, models=["big"])
    first, second = engine.claim(2)
    assert first.grant is not None
    assert second.grant is not None
    assert (first.grant.model, second.grant.model) == ("big", "small")
    engine.submit(tokens=1_000)
    [third] = engine.claim()
    assert third.grant is not None
    assert (third.grant.model, third.grant.tokens, third.grant.wanted) == ("small", 600, 1_000)


@pytest.mark.statement("tokens-borrow")
def test_importance_of_a_blocked_parent_lets_it_borrow(make: Make) -> None:
    engine = make(tiers=TIERS)
    parent = engine.submit(tokens=350, priority=1)
    children = [engine.submit(parent_message_id=parent.message_id, delay_s=500) for _ in range(4)]
    other = engine.submit(tokens=350, priority=1)
    claimed = engine.claim(2)
    assert [one.record.message_id for one in claimed] == [parent.message_id]
    assert engine.state(other) == "SCHEDULED"
    grant = claimed[0].grant
    assert grant is not None
    assert 0 < grant.borrowed <= 50
    assert model_of(engine).borrowed == grant.borrowed
    assert model_of(engine).organizations["acme"].borrowed == grant.borrowed
    [borrowed] = events(engine, "tokens_borrowed")
    assert borrowed.detail["tokens"] == grant.borrowed
    engine.finish(done(claimed[0], 350))
    engine.clock.advance(60)
    engine.wait(engine.engine.sweep())
    assert any(event.detail["repaid"] == grant.borrowed for event in events(engine, "tokens_rebalanced"))
    assert model_of(engine).borrowed == 0
    for child in children:
        engine.wait(engine.engine.cancel(child.message_id))


def test_ended_children_give_no_importance(make: Make) -> None:
    engine = make(tiers=TIERS)
    parent = engine.submit(tokens=350, priority=1)
    for _ in range(4):
        child = engine.submit(parent_message_id=parent.message_id, delay_s=500)
        engine.wait(engine.engine.cancel(child.message_id))
    assert engine.claim() == []


@pytest.mark.statement("tokens-rebalance")
def test_rebalancing_is_an_event_and_helps_the_short_tier(make: Make) -> None:
    engine = make(tiers=TIERS)
    waiting = engine.submit(tokens=300, priority=3)
    assert engine.claim() == []
    engine.clock.advance(60)
    assert [one.record.message_id for one in engine.claim()] == [waiting.message_id]
    [event] = events(engine, "tokens_rebalanced")
    assert (event.detail["model"], event.detail["moved"]) == ("small", 300)
    assert of_store(event, "s", "tasks").contract == "engine"


# ---- messages without `tokens=` --------------------------------------------------------------------

REQUESTS = {"small": {"requests_per_minute": 2}}


@pytest.mark.statement("tokens-requests")
@pytest.mark.parametrize("fields", [{"type": "model_call"}, {"models": ["small"]}])
def test_requests_count_without_tokens(make: Make, fields: dict[str, Any]) -> None:
    engine = make(REQUESTS)
    engine.submit_many(3, **fields)
    engine.submit()  # a tool call that names no model
    claimed = engine.claim(4)
    assert len(claimed) == 3
    assert [one.grant is None for one in claimed].count(True) == 1
    engine.complete(claimed)
    found = model_of(engine).windows["requests_per_minute"]
    assert (found.limit, found.used, found.reserved, found.free) == (2, 2, 0, 0)


@pytest.mark.statement("tokens-estimate")
def test_missing_estimate_is_estimated_from_the_payload(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.submit(type="model_call", payload={"prompt": "x" * 400})
    engine.submit(type="model_call", payload={"prompt": "x" * 400, "max_tokens": 200})
    engine.submit(type="model_call", payload={"prompt": "x" * 400, "max_tokens": "many"})
    estimates = [one.grant.tokens for one in engine.claim(3) if one.grant is not None]
    assert estimates == [104, 308, 109]


def test_payload_that_is_stored_apart_is_estimated_too(make: Make) -> None:
    engine = make({"small": {"tokens_per_minute": 1_000_000}})
    engine.submit(type="model_call", payload={"prompt": "x" * 200_000})
    [claimed] = engine.claim()
    assert claimed.grant is not None
    assert claimed.grant.tokens == 50_004


def test_estimate_is_at_most_what_the_models_can_give(make: Make) -> None:
    engine = make()
    handle = engine.submit(type="model_call", payload={"prompt": "x" * 40_000})
    assert [one.record.message_id for one in engine.claim()] == [handle.message_id]
    assert figures(engine) == (1_000, 0, 1_000, 0)


def test_use_beyond_an_estimate_counts_and_stops_nobody(make: Make) -> None:
    engine = make(tiers=TIERS)

    @engine.engine.handler("model_call")
    async def call(_message: Any, ctx: Any) -> int:
        ctx.use_tokens(400)
        return int(ctx.tokens)

    handle = engine.submit(type="model_call")
    engine.run_all()
    assert engine.wait(handle.result()) == 0
    assert figures(engine) == (1_000, 400, 0, 600)
    engine.submit_many(3, type="model_call", priority=1)
    engine.run_all()
    assert figures(engine) == (1_000, 1_000, 0, 0)


def test_message_without_tokens_whose_model_has_no_budget_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with Engine.open(url) as engine:
        engine.blocking.submit(type="tool_call", org_id="acme", payload={}, models=["local"])
    worker = EngineUnderTest(url, Policy(tokens={"providers": {"p": {"models": {"small": SMALL}}}}))
    [claimed] = worker.claim()
    assert claimed.grant is None
    worker.close()


# ---- importance ------------------------------------------------------------------------------------


@pytest.mark.statement("tokens-borrow", "tokens-exhausted-p0")
def test_p0_borrows_what_is_free_and_fails_when_that_is_too_little(make: Make) -> None:
    engine = make(tiers=TIERS)
    first = engine.submit(tokens=900, priority=0)
    [claimed] = engine.claim()
    assert claimed.record.message_id == first.message_id
    assert claimed.grant is not None
    assert claimed.grant.borrowed == 500
    second = engine.submit(tokens=200, priority=0)
    assert engine.claim() == []
    assert engine.state(second) == "DEAD_LETTER"


@pytest.mark.statement("tokens-importance")
def test_message_that_waits_for_tokens_is_looked_at_again_when_others_come_to_wait_for_it(make: Make) -> None:
    engine = make(tiers=TIERS)
    parent = engine.submit(tokens=350, priority=1)
    delayed = engine.submit(tokens=5, priority=1, delay_s=30)
    assert engine.claim(2) == []
    for _ in range(4):
        engine.submit(parent_message_id=parent.message_id, delay_s=500)
        engine.submit(parent_message_id=delayed.message_id, delay_s=500)
    assert [one.record.message_id for one in engine.claim(2)] == [parent.message_id]
    assert engine.state(delayed) == "SCHEDULED"


@pytest.mark.statement("tokens-importance")
def test_children_that_were_stored_before_their_parent_count(make: Make) -> None:
    engine = make(tiers=TIERS)
    parent_id = "019c1c38-a400-7000-81bb-f5acea15a2e3"
    children = [engine.submit(parent_message_id=parent_id, delay_s=500) for _ in range(4)]
    parent = engine.submit(tokens=350, priority=1, message_id=parent_id)
    assert [one.record.message_id for one in engine.claim()] == [parent.message_id]
    records = [engine.engine.store.load(child.message_id) for child in children]
    forgotten = [found.record for found in records if found is not None]
    policy = engine.engine.policy
    engine.engine.store.write(lambda transaction: Operations(transaction, policy).forget(forgotten))
    assert not engine.engine.store.read(DEPENDANTS.all)


def test_children_of_another_organization_give_no_importance(make: Make) -> None:
    engine = make(tiers=TIERS)
    parent_id = "019c1c38-a400-7000-81bb-f5acea15a2e3"
    for _ in range(4):
        engine.submit(parent_message_id=parent_id, org_id="other", delay_s=500)
    engine.submit(tokens=350, priority=1, message_id=parent_id)
    for _ in range(4):
        engine.submit(parent_message_id=parent_id, org_id="other", delay_s=500)
    assert engine.claim() == []


# ---- the door --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": 1_001}, "would never run: its models give at most 1000"),
        ({"tokens": 5, "models": ["huge"]}, "there is no model 'huge': the models with a budget are small"),
        ({"tokens": -1}, "tokens must be a whole number from 0"),
        ({"tokens": 1.5}, "tokens must be a whole number from 0"),
        ({"tokens": True}, "tokens must be a whole number from 0"),
        ({"tokens": 5, "models": "small"}, "models must be a list of texts"),
    ],
)
def test_message_that_cannot_run_is_refused_with_a_one_line_error(
    make: Make, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidMessage, match=said) as raised:
        make().submit(**fields)
    assert "\n" not in str(raised.value)


def test_wrong_budget_is_an_error_of_the_policy() -> None:
    with pytest.raises(InvalidSetting, match="at most 1 in all"):
        Policy(tokens={"providers": {"p": {"models": {"m": SMALL}}}, "tiers": [1, 1, 1, 1]})
    with pytest.raises(InvalidSetting, match="tokens must be an object with providers"):
        Policy(tokens=5)  # type: ignore[arg-type]


def test_message_whose_models_lost_their_budget_is_a_dead_letter(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path}/queue.db", ManualClock()
    with Engine.open(url, clock=clock) as engine:
        handle = engine.blocking.submit(
            type="tool_call", org_id="acme", payload={}, tokens=5, models=["gone"]
        )
    worker = EngineUnderTest(url, Policy(tokens={"providers": {"p": {"models": {"small": SMALL}}}}))
    assert worker.claim() == []
    assert "none of its models has a budget: gone" in worker.wait(worker.engine.explain(handle.message_id))
    worker.close()


# ---- handlers --------------------------------------------------------------------------------------


def test_handler_sees_its_model_and_counts_tokens(make: Make) -> None:
    engine = make({"small": {**SMALL, "usd_per_million_tokens": 2.0}})

    @engine.engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> Any:
        return [ctx.model, ctx.provider, ctx.tokens, ctx.use_tokens(100), ctx.use_tokens(50), ctx.tokens]

    handle_ = engine.submit(tokens=300)
    engine.run_all()
    assert engine.wait(handle_.result(timeout_s=1)) == ["small", "p", 300, 200, 150, 150]
    assert figures(engine) == (1_000, 150, 0, 850)
    [completed] = events(engine, "execution_completed")
    audited = of_store(completed, "s", "engine")
    assert (audited.model, audited.tokens_out, str(audited.cost_usd)) == ("small", 150, "0.000300000")


def test_plain_handler_has_the_same_calls(make: Make) -> None:
    engine = make()

    @engine.engine.handler("tool_call")
    def handle(message: Any, ctx: Any) -> Any:
        ctx.provider_headers({"x-ratelimit-remaining-tokens": "500"})
        return [ctx.model, ctx.provider, ctx.tokens, ctx.use_tokens(100)]

    async def work() -> Any:
        running = asyncio.create_task(engine.engine.run(concurrency=1))
        submitted = await engine.engine.submit(type="tool_call", org_id="acme", payload={}, tokens=300)
        result = await submitted.result(timeout_s=HANG_GUARD_S)
        await engine.engine.stop()
        await running
        return result

    assert soon(work()) == ["small", "p", 300, 200]
    assert figures(engine)[:2] == (1_000, 100 + 200)


def test_use_beyond_the_reservation_fails_the_message_for_good(make: Make) -> None:
    engine = make()

    @engine.engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> None:
        ctx.use_tokens(200)
        ctx.use_tokens(200)

    handle_ = engine.submit(tokens=300)
    engine.run_all()
    with pytest.raises(TokensExhausted, match="has used up its 300 tokens of small"):
        engine.wait(handle_.result(timeout_s=1))
    assert figures(engine) == (1_000, 300, 0, 700)


@pytest.mark.parametrize("count", [-1, 1.5, True, "9", None, 10**13])
def test_use_that_is_not_a_number_of_tokens_counts_nothing(make: Make, count: Any) -> None:
    engine = make()

    @engine.engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> int:
        with pytest.raises(InvalidMessage, match="tokens must be a whole number from 0"):
            ctx.use_tokens(count)
        with pytest.raises(InvalidMessage, match="tokens_in must be a whole number"):
            ctx.usage(tokens_in=count)
        return int(ctx.tokens)

    handle_ = engine.submit(tokens=300)
    engine.run_all()
    assert engine.wait(handle_.result(timeout_s=1)) == 300
    assert figures(engine) == (1_000, 0, 0, 1_000)


def test_usage_beyond_the_reservation_is_charged_up_to_it(make: Make) -> None:
    engine = make()
    engine.submit(tokens=300)
    [claimed] = engine.claim()
    engine.finish(done(claimed, 10**9))
    assert figures(engine) == (1_000, 300, 0, 700)


@pytest.mark.parametrize(
    "headers", [{"x-ratelimit-limit-tokens": "9" * 5_000}, {1: 2}, {"retry-after": None}, {b"a": b"b"}]
)
def test_headers_with_nonsense_change_nothing(make: Make, headers: Any) -> None:
    engine = make()

    @engine.engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> None:
        await ctx.provider_headers(headers)
        with pytest.raises(InvalidMessage, match="headers must be names with values"):
            await ctx.provider_headers([("retry-after", "1")])

    handle_ = engine.submit(tokens=300)
    engine.run_all()
    assert engine.wait(handle_.result(timeout_s=1)) is None
    assert figures(engine) == (1_000, 0, 0, 1_000)


@pytest.mark.parametrize("jump_s", [-86_400 * 365, 86_400 * 365])
def test_a_jump_of_the_wall_clock_begins_no_window(make: Make, jump_s: float) -> None:
    engine = make()
    engine.submit(tokens=300)
    [claimed] = engine.claim()
    engine.finish(done(claimed, 120))
    before = model_of(engine).resets_in_s
    engine.clock.step_wall(jump_s)
    assert figures(engine) == (1_000, 120, 0, 880)
    assert model_of(engine).resets_in_s == before


@pytest.mark.statement("tokens-streams")
@pytest.mark.parametrize("pool", ["thread", "process"])
def test_stream_is_cut_at_the_reservation(make: Make, pool: Pool) -> None:
    engine = make()

    @engine.engine.handler("tool_call", pool=pool)
    async def handle(message: Any, ctx: Any) -> None:
        for number in range(100):
            ctx.use_tokens(100)
            await ctx.stream(number)

    handle_ = engine.submit(tokens=350)
    engine.run_all()

    async def parts() -> list[Any]:
        return [part async for part in handle_]

    found = engine.wait(parts())
    assert [part.chunk for part in found if part.type == "stream_chunk"] == [0, 1, 2]
    assert (found[-1].type, found[-1].result) == ("stream_complete", {"cut_at": "tokens"})
    assert figures(engine) == (1_000, 350, 0, 650)


@pytest.mark.statement("tokens-providers")
def test_headers_of_the_provider_and_rate_limits_update_the_facts(make: Make) -> None:
    engine = make()

    @engine.engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> None:
        await ctx.provider_headers({"x-ratelimit-remaining-tokens": "200", "x-ratelimit-reset-tokens": "9s"})
        ctx.use_tokens(10)

    @engine.engine.handler("model_call")
    async def refused(message: Any, ctx: Any) -> None:
        raise RateLimited(retry_after_s=30)

    engine.submit(tokens=100)
    engine.run_all()
    assert figures(engine) == (1_000, 700 + 10, 0, 290)
    assert model_of(engine).resets_in_s == pytest.approx(9)
    engine.submit(type="model_call", tokens=100)
    engine.run_all()
    assert model_of(engine).blocked_s == pytest.approx(30)
    waiting = engine.submit(tokens=5)
    assert engine.claim() == []
    assert "It is due in 30.0 s" in engine.wait(engine.engine.explain(waiting.message_id))


def test_requests_are_limited_too(make: Make) -> None:
    engine = make({"small": {"tokens_per_minute": 1_000, "requests_per_minute": 2}})
    engine.submit_many(3, tokens=10)
    claimed = engine.claim(3)
    assert len(claimed) == 2
    engine.finish(*(done(one, 10) for one in claimed))
    found = model_of(engine).windows["requests_per_minute"]
    assert (found.limit, found.used, found.reserved, found.free) == (2, 2, 0, 0)


def test_status_without_the_policy_shows_the_last_limits(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path}/queue.db", ManualClock()
    engine = EngineUnderTest(url, Policy(tokens={"providers": {"p": {"models": {"small": SMALL}}}}))
    engine.submit(tokens=300)
    engine.claim()
    engine.close()
    with Engine.open(url, clock=clock) as other:
        found = other.blocking.tokens.status().providers["p"].models["small"]
    assert (found.limit, found.reserved) == (1_000, 300)


def test_engine_without_budgets_has_an_empty_status() -> None:
    engine = EngineUnderTest("memory://")
    engine.submit(tokens=5, models=["any"])
    assert len(engine.claim()) == 1
    assert engine.wait(engine.engine.tokens.status()).providers == {}
    engine.close()
