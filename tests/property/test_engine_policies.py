"""The policies of an engine as properties: turns, promotion, demotion, breakers and admission."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.lifecycle import backpressure, breaker
from postroom.core.lifecycle.backpressure import Backpressure, Throttle
from postroom.core.lifecycle.breaker import CLOSED, Breaker, Circuit
from postroom.core.lifecycle.fairness import PROMOTED_EVERY, Rotation
from postroom.core.lifecycle.lifecycle import NANOS_PER_S, effective_lane
from postroom.core.lifecycle.retry import LANE_LAST, Retry, demoted

RESTED_S = 60.0  # nothing changed the number of workers for this long

# ---- turns -----------------------------------------------------------------------------------------

names = st.sampled_from([f"org{number}" for number in range(6)])
backlogs = st.dictionaries(names, st.integers(1, 40), min_size=1)
weights = st.dictionaries(names, st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.5, 7.0]))
limits = st.lists(st.integers(1, 9), min_size=1, max_size=60)


def served(backlog: dict[str, int], weight: dict[str, float], counts: list[int]) -> list[str]:
    """The organizations in the order of their deliveries, over several claims."""
    rotation = Rotation()
    waiting = {name: [name] * count for name, count in backlog.items()}
    order: list[str] = []
    for limit in counts:
        order += rotation.share(2, waiting, limit, lambda name: weight.get(name, 1.0))
    return order


def turn_bound(name: str, backlog: dict[str, int], weight: dict[str, float]) -> float:
    """How many messages of others come before the next one of an organization."""
    own = weight.get(name, 1.0)
    rounds = -(-1 // own) if own < 1 else 1  # turns until a light organization has earned a message
    return (rounds + 1) * sum(weight.get(other, 1.0) + 1 for other in backlog if other != name)


@given(backlogs, weights, limits)
def test_a_claim_is_full_while_messages_wait_and_takes_none_twice(
    backlog: dict[str, int], weight: dict[str, float], counts: list[int]
) -> None:
    order = served(backlog, weight, counts)
    assert len(order) == min(sum(counts), sum(backlog.values()))
    assert all(count <= backlog[name] for name, count in Counter(order).items())


@pytest.mark.statement("tenants-turns")
@given(backlogs, weights, limits)
def test_no_organization_waits_longer_than_the_turns_of_the_others(
    backlog: dict[str, int], weight: dict[str, float], counts: list[int]
) -> None:
    order = served(backlog, weight, counts)
    for name, count in backlog.items():
        bound = turn_bound(name, backlog, weight)
        left, waited = count, 0
        for each in order:
            if each == name:
                left, waited = left - 1, 0
            elif left:
                waited += 1
                assert waited <= bound, f"{name} waited for {waited} deliveries of others"


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0]), min_size=2, max_size=5), st.integers(1, 9))
def test_deliveries_follow_the_weights_however_small_the_claims_are(shares: list[float], limit: int) -> None:
    weight = {f"org{number}": share for number, share in enumerate(shares)}
    rounds = 40
    deliveries = round(sum(shares) * rounds)
    order = served(dict.fromkeys(weight, 10_000), weight, [limit] * (deliveries // limit))
    for name, share in weight.items():
        expected = len(order) * share / sum(shares)
        assert abs(Counter(order)[name] - expected) <= share + 1


# ---- the share of promoted messages ----------------------------------------------------------------

arrivals = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=60)
"""For each claim its limit, and how many messages of a higher class arrive before it."""


def mixed(backlog: dict[str, int], weight: dict[str, float], claims: list[tuple[int, int]]) -> list[str]:
    """The deliveries of several claims: the organization of a promoted message, empty for another one.

    What a claim leaves free goes to promoted messages, which are next when no higher class waits.
    """
    rotation, order = Rotation(), list[str]()
    accepted: dict[str, list[str]] = {"fresh": []}
    promoted = {name: [name] * count for name, count in backlog.items()}
    for limit, new in claims:
        accepted["fresh"] += [""] * new
        taken = rotation.mix(0, accepted, promoted, limit, lambda name: weight.get(name, 1.0))
        for each in taken:
            rotation.note(promoted=bool(each))
        if len(taken) < limit:
            rotation.note_none_waits()
            taken += rotation.share(3, promoted, limit - len(taken), lambda name: weight.get(name, 1.0))
        order += taken
    return order


@given(backlogs, weights, arrivals)
def test_a_promoted_message_is_one_of_eight_deliveries(
    backlog: dict[str, int], weight: dict[str, float], claims: list[tuple[int, int]]
) -> None:
    order = mixed(backlog, weight, [(limit, 9) for limit, _ in claims])  # a higher class never ends
    waiting = sum(backlog.values())
    assert [at for at, each in enumerate(order) if each] == [*range(7, len(order), PROMOTED_EVERY)][:waiting]


@pytest.mark.statement("promotion-bounded")
@given(backlogs, weights, arrivals)
def test_the_wait_of_a_promoted_message_is_bounded(
    backlog: dict[str, int], weight: dict[str, float], claims: list[tuple[int, int]]
) -> None:
    """By nine deliveries for each promoted message of others: eight in the share, one when it is alone."""
    order = mixed(backlog, weight, claims)
    for name, count in backlog.items():
        bound = (PROMOTED_EVERY + 1) * (turn_bound(name, backlog, weight) + 1)
        left, waited = count, 0
        for each in order:
            if each == name:
                left, waited = left - 1, 0
            elif left:
                waited += 1
                assert waited <= bound, f"{name} waited for {waited} deliveries of others"


@given(st.integers(0, PROMOTED_EVERY - 1), st.integers(1, 40))
def test_as_many_promoted_messages_are_read_as_can_be_delivered(passed_over: int, limit: int) -> None:
    rotation = Rotation()
    rotation.passed_over = passed_over
    promoted = {"old": [*"o" * 40]}
    taken = rotation.mix(0, {"fresh": [*"f" * 40]}, promoted, limit, lambda _: 1.0)
    assert taken.count("o") == rotation.promoted_in(limit)
    assert len(taken) == limit


# ---- promotion and demotion ------------------------------------------------------------------------

ages = st.integers(0, 200 * NANOS_PER_S)
promotions = st.tuples(*[st.integers(1, 60 * NANOS_PER_S)] * 3)


@given(st.integers(0, LANE_LAST), ages, ages, promotions)
def test_promotion_only_goes_up_and_only_with_age(
    lane: int, age: int, more: int, after: tuple[int, ...]
) -> None:
    now, later = effective_lane(lane, age, after), effective_lane(lane, age + more, after)
    assert 0 <= later <= now <= lane


@pytest.mark.statement("promotion-times")
@given(st.integers(0, LANE_LAST), promotions)
def test_a_message_reaches_the_first_class_after_the_sum_of_its_steps(
    lane: int, after: tuple[int, ...]
) -> None:
    needed = sum(after[:lane])
    assert effective_lane(lane, needed, after) == 0
    assert lane == 0 or effective_lane(lane, needed - 1, after) > 0


@given(st.integers(0, LANE_LAST), st.integers(0, 20))
def test_demotion_is_one_class_for_each_failure_and_ends_in_the_last(priority: int, retries: int) -> None:
    assert demoted(priority, retries) == min(priority + retries, LANE_LAST)
    assert demoted(priority, retries) <= demoted(priority, retries + 1) <= LANE_LAST


@pytest.mark.statement("retry-pauses")
@given(
    st.builds(Retry, strategy=st.sampled_from(["exponential", "linear"])), st.integers(0, 80), st.floats(0, 1)
)
def test_pauses_of_retries_grow_up_to_their_limit(rule: Retry, retries: int, spread: float) -> None:
    shortest, pause = rule.delay_ns(retries, 0.0), rule.delay_ns(retries, spread)
    assert shortest <= pause <= rule.delay_s_max * (1 + rule.jitter) * NANOS_PER_S
    assert rule.delay_ns(retries + 1, 0.0) >= shortest


# ---- breakers --------------------------------------------------------------------------------------

rules = st.builds(
    Breaker, failures=st.integers(1, 4), window_s=st.just(10.0), cooldown_s=st.sampled_from([1.0, 30.0])
)
LEASE_NS = 15 * NANOS_PER_S
calls = st.lists(
    st.tuples(
        st.sampled_from(["call", "fail", "succeed"]), st.sampled_from(["a", "b", "c"]), st.integers(0, 20)
    ),
    max_size=60,
)


@pytest.mark.statement("breaker-threshold")
@given(rules, calls)
def test_breaker_opens_after_failures_and_only_its_probe_closes_it(
    rule: Breaker, steps: list[tuple[str, str, int]]
) -> None:
    circuit, now = CLOSED, 0
    failed_at: dict[str, int] = {}
    for verb, message_id, seconds in steps:
        now += seconds * NANOS_PER_S
        before = circuit
        if verb == "call":
            circuit = _called(circuit, message_id, now)
        elif verb == "fail":
            failed_at = {
                name: at for name, at in failed_at.items() if now - at < rule.window_s * NANOS_PER_S
            } | {message_id: now}
            circuit = breaker.failed(circuit, rule, message_id, now)
            _check_failure(before, circuit, rule, message_id, now, failed_at)
        else:
            circuit = breaker.succeeded(circuit, message_id)
            if circuit != before:
                assert (before.state, before.probe, circuit) == ("half_open", message_id, CLOSED)
        if circuit.state != "closed":
            failed_at = {}
        assert len(circuit.failed_at) < rule.failures


def _called(circuit: Circuit, message_id: str, now: int) -> Circuit:
    """A message wants to call the service."""
    if not breaker.admits(circuit, message_id, now):
        assert circuit.state != "closed"
        assert breaker.wait_ns(circuit, now) > 0
        return circuit
    after = breaker.probed(circuit, message_id, now, LEASE_NS)
    if circuit.state == "closed":
        assert after is circuit
        return after
    assert (after.state, after.probe) == ("half_open", message_id)
    others = {"a", "b", "c"} - {message_id}
    assert not any(breaker.admits(after, other, now) for other in others), "two messages probe at once"
    assert all(breaker.admits(after, other, now + LEASE_NS) for other in others), "a lost probe blocks"
    return after


def _check_failure(
    before: Circuit, after: Circuit, rule: Breaker, message_id: str, now: int, failed_at: dict[str, int]
) -> None:
    match before.state:
        case "open":
            assert after is before
        case "half_open":
            assert (after.state == "open") == (before.probe == message_id)
        case "closed":
            assert (after.state == "open") == (len(failed_at) >= rule.failures)
    if after.state == "open" and before.state != "open":
        assert after.open_until == now + round(rule.cooldown_s * NANOS_PER_S)


@given(rules, st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4)), max_size=40))
def test_shared_breaker_opens_when_enough_organizations_failed(
    rule: Breaker, failures: list[tuple[str, int]]
) -> None:
    circuit, now = CLOSED, 0
    failed_at: dict[str, int] = {}
    for org_id, seconds in failures:
        now += seconds * NANOS_PER_S
        if circuit.state == "open":
            break
        failed_at[org_id] = now
        recent = [at for at in failed_at.values() if now - at < rule.window_s * NANOS_PER_S]
        circuit = breaker.failed_shared(circuit, rule, "m", org_id, now)
        assert (circuit.state == "open") == (len(recent) >= max(rule.failures, 2))


@given(rules, st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
def test_failed_probe_of_a_shared_breaker_lets_another_message_probe(rule: Breaker, orgs: list[str]) -> None:
    now = 1_000 * NANOS_PER_S
    circuit = breaker.opened(rule, 0)
    for number, org_id in enumerate(orgs):
        if circuit.state == "open" and number:
            break  # enough organizations have failed again
        assert breaker.admits(circuit, org_id, now)
        circuit = breaker.probed(circuit, org_id, now, LEASE_NS)
        assert not breaker.admits(circuit, "other", now)
        circuit = breaker.failed_shared(circuit, rule, org_id, org_id, now)
        assert (circuit.state == "open") == (number + 1 >= max(rule.failures, 2))


# ---- admission -------------------------------------------------------------------------------------

RULE = Backpressure(scale=10, light=50, heavy=100, emergency=500)
depths = st.integers(0, 700)
stages = st.integers(0, 4)


@pytest.mark.statement("stage-thresholds")
@given(depths, depths, stages)
def test_a_deeper_queue_is_never_in_a_lower_stage(depth: int, more: int, previous: int) -> None:
    now = backpressure.stage_of(depth, RULE, previous)
    assert now <= backpressure.stage_of(depth + more, RULE, previous)
    assert (
        backpressure.stage_of(depth, RULE, 0) <= now <= max(previous, backpressure.stage_of(depth, RULE, 0))
    )


@given(st.lists(depths, max_size=50))
def test_a_stage_is_left_below_four_fifths_of_its_threshold_only(history: list[int]) -> None:
    stage = 0
    for depth in history:
        after = backpressure.stage_of(depth, RULE, stage)
        if after < stage:
            assert depth <= backpressure.LEAVE_AT * RULE.thresholds[stage - 1]
            assert after == 0 or depth > backpressure.LEAVE_AT * RULE.thresholds[after - 1]
        elif after > stage:
            assert depth > RULE.thresholds[after - 1]
        stage = after


@given(stages, st.integers(0, 3))
def test_a_more_urgent_message_and_a_lower_stage_are_never_admitted_less(stage: int, priority: int) -> None:
    share = backpressure.share_of(stage, priority)
    assert 0 <= share <= 1
    assert stage == 4 or share >= backpressure.share_of(stage + 1, priority)
    assert priority == 3 or share <= backpressure.share_of(stage, priority) or priority == 0
    assert backpressure.share_of(stage, 0) == 1


@given(st.floats(backpressure.RATE_MIN, 50), st.lists(st.integers(0, 3_000), min_size=1, max_size=80))
def test_a_throttle_admits_its_rate_and_returns_when_to_retry(rate: float, pauses_ms: list[int]) -> None:
    throttle, now, admitted = Throttle(), NANOS_PER_S, 0
    for pause_ms in pauses_ms:
        now += pause_ms * 1_000_000
        after, retry_s = backpressure.admit(throttle, 3, rate, now)
        if retry_s == 0:
            admitted += 1
        else:
            assert after == throttle, "a refused submit uses nothing up"
            due = now + round(retry_s * NANOS_PER_S) + 1
            assert backpressure.admit(throttle, 3, rate, due)[1] == 0
        throttle = after
    assert admitted <= 1 + rate * sum(pauses_ms) / 1000 + 1e-6


@pytest.mark.statement("workers-scale-depth", "stage-scale", "workers-scale-promotion")
@pytest.mark.parametrize(
    ("stage", "promoted_share", "wanted"),
    [(0, 0.0, 7), (0, 0.11, 12), (backpressure.SCALE, 0.0, 12), (backpressure.LIGHT, 0.0, 50)],
)
def test_workers_are_added_in_steps_and_all_at_once_from_the_second_stage(
    stage: int, promoted_share: float, wanted: int
) -> None:
    assert backpressure.wanted_workers(7, stage, promoted_share, 0.0, RESTED_S, Backpressure()) == wanted


@pytest.mark.statement("worker-cap")
@given(
    current=st.integers(0, 200), stage=st.integers(0, 4), most=st.integers(1, 100), idle_s=st.floats(0, 300)
)
def test_workers_stay_between_the_least_and_the_most(
    current: int, stage: int, most: int, idle_s: float
) -> None:
    rule = Backpressure(max_workers=most)
    assert 1 <= backpressure.wanted_workers(current, stage, 0.0, idle_s, RESTED_S, rule) <= most


@pytest.mark.statement("scale-cooldown")
def test_workers_change_again_only_after_a_rest() -> None:
    rule = Backpressure()
    assert backpressure.wanted_workers(7, backpressure.SCALE, 0.0, 0.0, 9.9, rule) == 7
    assert backpressure.wanted_workers(7, backpressure.SCALE, 0.0, 0.0, 10.0, rule) == 12
    assert backpressure.wanted_workers(7, 0, 0.0, 60.0, 59.9, rule) == 7
    assert backpressure.wanted_workers(7, 0, 0.0, 60.0, 60.0, rule) == 2
    assert backpressure.wanted_workers(7, 0, 0.0, 59.9, 60.0, rule) == 7
