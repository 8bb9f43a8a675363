"""Token budgets as values: the six steps of an allocation, windows, loans, rebalancing and headers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.calls.fields import TOKENS_MAX
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.tokens import tokens
from postroom.core.tokens.provider_headers import HEADER_S_MAX, Observed, observe, observed
from postroom.core.tokens.token_rules import ModelRule, token_rules
from postroom.core.tokens.tokens import (
    Account,
    Grant,
    Need,
    Short,
    allocate,
    current,
    estimate,
    extend,
    importance,
    reserve,
    settle,
)
from postroom.errors import InvalidSetting

MINUTE = 60 * NANOS_PER_S
NOW = 7 * MINUTE + NANOS_PER_S
TIERS = [0.4, 0.3, 0.2, 0.1]


def rule(name: Any = "small", tiers: Any = TIERS, **limits: Any) -> ModelRule:
    config = {"providers": {"p": {"models": {name: limits or {"tokens_per_minute": 1_000}}}}, "tiers": tiers}
    rules = token_rules(config)
    assert rules is not None
    return rules.models[0]


def fresh(of: ModelRule, now_ns: int = NOW) -> Account:
    return current(Account(), of, now_ns)[0]


def granted(need: Need, *candidates: tuple[ModelRule, Account], now_ns: int = NOW) -> Grant:
    found = allocate(need, candidates, now_ns)
    assert isinstance(found, Grant), found
    return found


def balance(account: Account) -> int:
    """What a window's used, reserved and free tokens add up to."""
    return account.used[0] + account.outside[0] + account.tokens + tokens.free_of(account, 0)


# ---- settings --------------------------------------------------------------------------------------


def models(**limits: Any) -> dict[str, Any]:
    return {"providers": {"p": {"models": {"m": limits}}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tiers": TIERS}, "tokens needs providers"),
        ({"providers": {}}, "tokens needs providers"),
        ({"providers": {"p": {}}}, "provider p needs models"),
        ({"providers": {"p": 5}}, "provider p must be an object with models"),
        ({"providers": {"": {"models": {}}}}, "a name of up to 128 printable characters"),
        (models(), "model m of provider p needs at least one limit"),
        (models(tokens_per_minute=-5), "tokens_per_minute of model m of provider p must be a whole number"),
        (models(tokens_per_minute=0), "must be a whole number from 1"),
        (models(requests_per_minute=1.5), "requests_per_minute of model m of provider p must be"),
        (models(tokens_per_hour=5), "model m of provider p has no key 'tokens_per_hour'"),
        ({**models(tokens_per_day=5), "tiers": [0.5, 0.5, 0.5, 0]}, "of at most 1 in all"),
        ({**models(tokens_per_day=5), "tiers": [-0.5, 0.5, 0.5, 0]}, "must be four shares"),
        ({**models(tokens_per_day=5), "tiers": [0.5]}, "must be four shares"),
        ({**models(tokens_per_day=5), "shortage": "wait"}, '"queue", "degrade" or "defer"'),
        ({**models(tokens_per_day=5), "limits": {}}, "tokens has no key 'limits'"),
        (models(tokens_per_day=5, usd_per_million_tokens=-1), "must be a number of 0 or more"),
    ],
    ids=str,
)
def test_a_wrong_setting_gives_a_one_line_error(config: Any, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said) as raised:
        token_rules(config)
    assert "\n" not in str(raised.value)


def test_no_setting_means_no_budgets() -> None:
    assert token_rules({}) is None


def test_a_model_is_named_alone_or_with_its_provider() -> None:
    limits = {"models": {"small": {"tokens_per_day": 5}}}
    rules = token_rules({"providers": {"a": limits, "b": limits}})
    assert rules is not None
    assert [one.provider for one in rules.candidates(["small"])] == ["a", "b"]
    assert [one.provider for one in rules.candidates(["b/small", "small"])] == ["b", "a"]


# ---- the steps of an allocation --------------------------------------------------------------------


@pytest.mark.statement("tokens-tiers")
def test_own_tier_is_used_first_and_then_what_no_tier_reserves() -> None:
    small = rule(tiers=[0.4, 0.3, 0, 0])
    assert granted(Need(300, 0), (small, fresh(small))).parts == (300, 0, 0, 0, 0)
    assert granted(Need(500, 0), (small, fresh(small))).parts == (400, 0, 0, 0, 100)
    assert granted(Need(300, 3), (small, fresh(small))).parts == (0, 0, 0, 0, 300)


@pytest.mark.statement("tokens-borrow")
def test_importance_lets_a_message_borrow_from_lower_tiers_only() -> None:
    small = rule()
    one = small, fresh(small)
    assert isinstance(allocate(Need(450, 0), [one], NOW), Short)
    half = granted(Need(450, 0, 0.5), one)
    assert half.parts == (400, 0, 0, 50, 0)
    assert half.borrowed == 50
    assert granted(Need(700, 0, 0.5), one).parts == (400, 150, 100, 50, 0)
    assert isinstance(allocate(Need(701, 0, 0.5), [one], NOW), Short)
    assert isinstance(allocate(Need(101, 3, 1.0), [one], NOW), Short), "P3 has no lower tier"


@pytest.mark.statement("tokens-importance")
def test_importance_counts_dependants_more_than_retries() -> None:
    assert importance(0, 0) == 0.0
    assert importance(100, 100) == 1.0
    assert importance(1, 0) > importance(0, 1) > 0
    assert 0 <= importance(2, 1) <= importance(3, 1) <= importance(3, 2) <= 1


@pytest.mark.statement("tokens-fallback")
def test_first_preference_with_tokens_is_chosen() -> None:
    big, small = rule("big", tokens_per_minute=1_000), rule("small", tokens_per_minute=2_000)
    both = (big, fresh(big)), (small, fresh(small))
    assert granted(Need(300, 0, has_preferences=True), *both).model == "big"
    assert granted(Need(300, 0), *both).model == "small", "without preferences the one with most tokens"
    empty = big, reserve(fresh(big), granted(Need(300, 0), (big, fresh(big))))
    assert granted(Need(300, 0, has_preferences=True), empty, both[1]).model == "small"


def test_own_tokens_of_another_model_go_before_a_loan() -> None:
    big, small = rule("big"), rule("small")
    need = Need(300, 2, 1.0, has_preferences=True)
    full = replace(fresh(small), pools=(0, 0, 1_000, 0, 0))
    assert granted(need, (big, fresh(big)), (small, full)).model == "small"


@pytest.mark.parametrize(
    ("limits", "tokens_asked", "minutes"),
    [
        ({"tokens_per_minute": 100, "tokens_per_day": 150}, 100, 24 * 60),
        ({"tokens_per_minute": 100, "requests_per_minute": 1}, 1, 1),
        ({"requests_per_day": 1, "tokens_per_minute": 100}, 1, 24 * 60),
    ],
)
def test_every_limit_holds_and_the_shortage_lasts_to_its_reset(
    limits: dict[str, int], tokens_asked: int, minutes: int
) -> None:
    one = rule(tiers=[0.0] * 4, **limits)
    account = settle(
        reserve(fresh(one), grant := granted(Need(tokens_asked, 1), (one, fresh(one)))),
        grant,
        tokens_asked,
        ran=True,
    )
    later = NOW
    if "tokens_per_day" in limits:  # the minute has passed, the day has not
        later = NOW + MINUTE
        account, _ = current(account, one, later)
    found = allocate(Need(tokens_asked, 1), [(one, account)], later)
    assert isinstance(found, Short)
    assert found.due_ns == (later // (minutes * MINUTE) + 1) * minutes * MINUTE
    account, _ = current(account, one, found.due_ns)
    assert isinstance(allocate(Need(tokens_asked, 1), [(one, account)], found.due_ns), Grant)


def test_shortage_ends_at_the_earliest_reset_of_all_models() -> None:
    day, minute = rule("day", tokens_per_day=10), rule("minute", tokens_per_minute=10)
    spent = (replace(fresh(day), used=(0, 10, 0, 0)), replace(fresh(minute), used=(10, 0, 0, 0)))
    found = allocate(Need(3, 0, has_preferences=True), [(day, spent[0]), (minute, spent[1])], NOW)
    assert found == Short(8 * MINUTE)


def test_a_short_tier_waits_for_the_reset_of_its_model() -> None:
    small = rule()
    assert allocate(Need(450, 0), [(small, fresh(small))], NOW) == Short(8 * MINUTE)


def test_an_estimate_grows_as_far_as_the_limits_go() -> None:
    small = rule(tokens_per_minute=1_000)
    account = fresh(small)
    grant = replace(granted(Need(100, 0), (small, account)), is_estimate=True)
    account, grown = extend(reserve(account, grant), grant, 300)
    assert (grown.tokens, grown.borrowed, account.tokens) == (300, 0, 300)
    account, grown = extend(account, grown, 5_000)
    assert (grown.tokens, account.tokens) == (1_000, 1_000)


def test_a_degraded_message_gets_another_model_or_fewer_tokens() -> None:
    big, small = rule("big"), rule("small")
    used_up = replace(fresh(big), used=(1_000, 0, 0, 0))
    need = Need(100, 1, has_preferences=True, shortage="degrade")
    other = allocate(need, [(big, used_up)], NOW, [(small, fresh(small))])
    assert isinstance(other, Grant)
    assert (other.model, other.tokens, other.wanted) == ("small", 100, 0)
    fewer = allocate(replace(need, tokens=500), [(small, fresh(small))], NOW)
    assert isinstance(fewer, Grant)
    assert (fewer.tokens, fewer.wanted) == (300, 500)
    assert isinstance(allocate(replace(need, tokens=700), [(small, fresh(small))], NOW), Short)


def test_reach_of_a_tier() -> None:
    small = rule()
    assert small.reach == (1_000, 800, 650, 550)
    assert rule(tokens_per_minute=1_000, tokens_per_day=70).reach[0] == 70
    assert rule(requests_per_minute=5).reach[3] == TOKENS_MAX


@pytest.mark.parametrize(
    ("payload", "tokens_estimated"),
    [
        (b"{}", 1),
        (b'{"max_tokens":500}', 505),
        (b'{"max_output_tokens":-5}', 6),
        (b'{"max_tokens":true}', 5),
        (b'{"max_tokens":1e300,"max_completion_tokens":10}', 22),
        (b'{"max_tokens":9000000000000000}', TOKENS_MAX),
    ],
)
def test_estimate_counts_the_payload_and_the_longest_answer(payload: bytes, tokens_estimated: int) -> None:
    assert estimate(payload) == tokens_estimated


# ---- windows, loans and rebalancing ----------------------------------------------------------------


def test_unused_tokens_are_returned_and_loans_first() -> None:
    small = rule()
    before = fresh(small)
    grant = granted(Need(450, 0, 0.5), (small, before))
    account = settle(reserve(before, grant), grant, 400, ran=True)
    assert (account.used[0], account.tokens, account.debt) == (400, 0, (0, 0, 0, 0))
    account = settle(reserve(before, grant), grant, 410, ran=True)
    assert (account.debt, account.lent) == ((10, 0, 0, 0), (0, 0, 0, 10))


@pytest.mark.statement("tokens-repaid")
def test_a_loan_is_repaid_at_the_next_refill() -> None:
    small = rule()
    grant = granted(Need(450, 0, 0.5), (small, fresh(small)))
    lent = settle(reserve(fresh(small), grant), grant, 450, ran=True)
    assert tokens.borrowed_of(lent) == 50
    account, refill = current(lent, small, 8 * MINUTE)
    assert account.pools == (350, 300, 200, 150, 0)
    assert refill is not None
    assert (refill.repaid, tokens.borrowed_of(account)) == (50, 0)
    assert current(account, small, 9 * MINUTE)[0].pools == small.pools, "it is repaid once"


def test_reservations_outlive_the_window() -> None:
    small = rule()
    grant = granted(Need(300, 1), (small, fresh(small)))
    account, _ = current(reserve(fresh(small), grant), small, 8 * MINUTE)
    assert (account.used[0], account.tokens, tokens.free_of(account, 0)) == (0, 300, 700)
    assert isinstance(allocate(Need(300, 1), [(small, account)], 8 * MINUTE), Short)


def test_rebalancing_gives_short_tiers_half_of_what_others_left() -> None:
    small = rule()
    account = tokens.refuse(fresh(small), 3, 250)
    account, refill = current(account, small, 8 * MINUTE)
    assert account.pools == (400, 150, 100, 350, 0)
    assert refill is not None
    assert refill.moved == 250
    account, refill = current(account, small, 9 * MINUTE)
    assert account.pools == small.pools, "without a shortage the shares are those of the policy"
    assert refill is not None


def test_a_new_limit_of_the_policy_holds_at_once() -> None:
    grant = granted(Need(300, 1), (rule(), fresh(rule())))
    account, _ = current(reserve(fresh(rule()), grant), rule(tokens_per_minute=200), NOW)
    assert tokens.free_of(account, 0) == 0
    assert account.pools == rule(tokens_per_minute=200).pools


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "end", "lapse", "wait", "say"]),
            st.integers(0, 3),
            st.integers(1, 600),
            st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_used_reserved_and_free_are_the_limit_at_every_instant(
    steps: list[tuple[str, int, int, float]],
) -> None:
    small, now = rule(), NOW
    account, held = fresh(small), list[Grant]()
    for verb, tier, count, share in steps:
        account, _ = current(account, small, now)
        if verb == "ask":
            found = allocate(Need(count, tier, share), [(small, account)], now)
            if isinstance(found, Grant):
                held.append(found)
                account = reserve(account, found)
            else:
                assert found.due_ns > now
                account = tokens.refuse(account, tier, count)
        elif verb in ("end", "lapse") and held:
            grant = held.pop(count % len(held))
            used = int(share * grant.tokens) if verb == "end" else 0
            account = settle(account, grant, used, ran=verb == "end")
        elif verb == "wait":
            now += count * NANOS_PER_S // 10
        elif verb == "say":
            account = observe(account, Observed(remaining_tokens=count), now)
        account, _ = current(account, small, now)
        assert balance(account) == 1_000
        assert tokens.free_of(account, 0) >= 0
        assert account.tokens == sum(grant.tokens for grant in held)
        assert account.requests == len(held)
        assert sum(account.pools) == 1_000
        assert account.lending == sum(grant.borrowed for grant in held)
        assert sum(account.debt) == sum(account.lent)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), max_size=20),
    st.sampled_from(
        [
            {"tokens_per_minute": 1_000},
            {"tokens_per_minute": 1_000, "tokens_per_day": 500},
            {"requests_per_minute": 5},
            {"tokens_per_day": 900, "requests_per_day": 6},
        ]
    ),
    st.sampled_from([TIERS, [0.0] * 4, [0.2, 0.2, 0.0, 0.3]]),
    st.integers(0, 600),
)
def test_a_purse_gives_what_an_allocation_without_loans_grants(
    asked: list[tuple[int, int]], limits: dict[str, int], tiers: list[float], outside: int
) -> None:
    one = rule(tiers=tiers, **limits)
    account = observe(fresh(one), Observed(remaining_tokens=1_000 - outside), NOW)
    purse = tokens.Purse(one, account, NOW)
    for tier, count in asked:
        found = allocate(Need(count, tier), [(one, account)], NOW)
        assert purse.take(count, tier) == (found if isinstance(found, Grant) else None)
        if isinstance(found, Grant):
            account = reserve(account, found)
        assert purse.account == account
    assert tokens.Purse(one, observe(account, Observed(retry_after_s=1), NOW), NOW).take(1, 0) is None


# ---- headers ---------------------------------------------------------------------------------------


def test_headers_of_a_provider_are_read() -> None:
    said = observed(
        {
            "X-RateLimit-Limit-Tokens": "900",
            "x-ratelimit-remaining-tokens": "10",
            "x-ratelimit-reset-tokens": "1m6.5s",
            "x-ratelimit-remaining-requests": "many",
            "x-ratelimit-reset-requests": "120ms",
            "retry-after": "3",
        },
        0,
    )
    assert said == Observed(
        limit_tokens=900,
        remaining_tokens=10,
        reset_tokens_s=66.5,
        reset_requests_s=0.12,
        retry_after_s=3.0,
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("-5", None),
        ("soon", None),
        ("nan", None),
        ("99999999", HEADER_S_MAX),
        ("", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    assert observed({"retry-after": value}, 10_000_000).retry_after_s == seconds


def test_facts_follow_the_headers() -> None:
    small = rule(tiers=[0.0] * 4, tokens_per_minute=1_000, requests_per_minute=10)
    account = observe(fresh(small), Observed(limit_tokens=800, remaining_tokens=100, reset_tokens_s=5), NOW)
    assert tokens.limit_of(account, 0) == 800
    assert (account.outside[0], tokens.free_of(account, 0)) == (700, 100)
    found = allocate(Need(200, 1), [(small, account)], NOW)
    assert found == Short(NOW + 5 * NANOS_PER_S)
    account, _ = current(account, small, NOW + 5 * NANOS_PER_S)
    assert tokens.free_of(account, 0) == 800
    more = observe(account, Observed(limit_tokens=5_000, remaining_tokens=5_000), NOW)
    assert tokens.limit_of(more, 0) == 1_000, "a provider cannot raise the budget of the policy"


def test_a_model_is_left_alone_while_its_provider_asks_for_it() -> None:
    small, other = rule(), rule("other")
    blocked = small, observe(fresh(small), Observed(retry_after_s=30), NOW)
    assert allocate(Need(5, 1), [blocked], NOW) == Short(NOW + 30 * NANOS_PER_S)
    need = Need(5, 1, has_preferences=True)
    assert granted(need, blocked, (other, fresh(other))).model == "other"
    assert isinstance(allocate(Need(5, 1), [blocked], NOW + 30 * NANOS_PER_S), Grant)


@pytest.mark.parametrize("digits", ["9" * 5_000, "0" * 5_000 + "7", "1" * 100_000])
def test_a_number_of_any_length_is_read(digits: str) -> None:
    names = ("x-ratelimit-limit-tokens", "x-ratelimit-reset-tokens", "retry-after")
    said = observed(dict.fromkeys(names, digits), 0)
    assert said.limit_tokens == (7 if digits.startswith("0") else TOKENS_MAX)
    assert said.retry_after_s in (7.0, HEADER_S_MAX)


_NAMES = [
    f"X-RateLimit-{fact}-{what}"
    for fact in ("Limit", "Remaining", "Reset")
    for what in ("Tokens", "Requests")
]
_VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(-(10**6), 10**30).map(str),
    st.floats().map(str),
    st.from_regex(r"(\d{1,3}[dhms]){1,3}", fullmatch=True),
)


@given(st.dictionaries(st.sampled_from([*_NAMES, "Retry-After"]), _VALUES), st.integers(0, 900))
def test_headers_with_nonsense_keep_the_books(headers: dict[str, str], reserved: int) -> None:
    small = rule(tokens_per_minute=1_000, requests_per_minute=10)
    account = fresh(small)
    if reserved:
        found = allocate(Need(reserved, 0, 1.0), [(small, account)], NOW)
        account = reserve(account, found) if isinstance(found, Grant) else account
    account = observe(account, observed(headers, 0), NOW)
    for window, limit in ((0, 1_000), (2, 10)):
        stated = tokens.limit_of(account, window)
        assert 0 < stated <= limit
        assert tokens.taken_of(account, window) + tokens.free_of(account, window) == max(
            stated, tokens.taken_of(account, window)
        )
    assert NOW <= max(NOW, account.blocked_until) <= NOW + HEADER_S_MAX * NANOS_PER_S
    assert account.next_ns > NOW
