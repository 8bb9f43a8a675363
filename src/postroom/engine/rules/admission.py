"""Admission of submits inside a transaction: pauses, rate limits, backpressure and guards.

Each check raises before anything is stored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from postroom.core.lifecycle import backpressure, poison
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.message_input import Prepared
from postroom.engine.rules.cells import GOALS, PAUSES, PRESSURES, RATES, SCAN_MAX, Bucket, GoalUse, Pressure
from postroom.engine.rules.policy import Guard, Policy
from postroom.errors import GuardTripped, Overloaded
from postroom.message import ENGINE_PREFIX, org_of, queue_of
from postroom.stores.base import Listing, ready
from postroom.stores.transaction import Transaction

SUSPECTS_LOOKED_MAX = 1_000
SUSPECTS_NAMED_MAX = 10

ALL = ""
"""Stands for all organizations, or all types, in a key."""


class Admission:
    """Decides whether the submits of one transaction are admitted."""

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self._transaction = transaction
        self._policy = policy
        self._active = 0

    def check(self, messages: Sequence[Prepared]) -> None:
        """Admit messages, all or none."""
        counts: dict[str, dict[int, int]] = {}
        for message in messages:
            priorities, priority = counts.setdefault(message.org_id, {}), message.envelope.priority
            priorities[priority] = priorities.get(priority, 0) + 1
        self._transaction.look_ahead(((PAUSES.name, SCAN_MAX),))
        for key, pause in PAUSES.all(self._transaction):
            org_id, _, type_name = key.partition("\x1f")
            if pause.kill and not type_name and (org_id == ALL or org_id in counts):
                whose = f"of organization {org_id}" if org_id else "of all organizations"
                raise Overloaded(f"the kill switch {whose} is on", backpressure.EMERGENCY_RETRY_S)
        for org_id in counts:
            self._check_pressure(org_id, counts, len(messages))
            self._check_rate(org_id, messages)
        if self._policy.guard.is_set:
            self._check_guards(messages)

    # ---- backpressure --------------------------------------------------------------------------

    def _check_pressure(self, org_id: str, counts: Mapping[str, Mapping[int, int]], batch: int) -> None:
        """Check whether an organization may submit, at the depths that the last message of the batch meets.

        `counts` is how many new messages of each organization and priority there are, `batch` their sum.
        """
        transaction, rule, priorities = self._transaction, self._policy.backpressure, counts[org_id]
        queue, quiet = ENGINE_PREFIX + org_id, int(backpressure.LEAVE_AT * rule.scale)
        if transaction.lanes.is_quiet(queue, quiet - batch + 1):
            return
        states, new = transaction.lanes.depth(queue), sum(priorities.values())
        depth, total = ready(states) + new - 1, ready(transaction.lanes.total()) + batch - 1
        pressure = self._pressure(org_id, depth)
        stage, whose = pressure.stage, ""
        if total > quiet:
            of_all = self._pressure(ALL, total)
            if of_all.stage > stage and depth > total / self._active_organizations(counts):
                stage, whose = of_all.stage, " of all organizations"
        completed = states.get("COMPLETED", 0)
        throttle = backpressure.sampled(pressure.throttle, transaction.steady_ns, completed)
        for priority, count in priorities.items():
            share, retry_after = backpressure.share_of(stage, priority), backpressure.EMERGENCY_RETRY_S
            if share == 1:
                continue
            if share:
                rate = share * backpressure.completion_rate(throttle, transaction.steady_ns, completed)
                throttle, retry_after = backpressure.admit(
                    throttle, priority, rate, transaction.steady_ns, count
                )
            if retry_after:
                held = (
                    f"has {depth} messages waiting"
                    if new == 1
                    else f"would have {depth + 1} messages waiting"
                )
                raise Overloaded(
                    f"organization {org_id} {held} (stage {stage}, above "
                    f"{rule.thresholds[max(0, stage - 1)]}{whose}), which "
                    f"{'throttles' if share else 'refuses'} P{priority}",
                    retry_after,
                )
        if throttle != pressure.throttle:
            PRESSURES.put(transaction, replace(pressure, throttle=throttle), org_id)

    def _pressure(self, org_id: str, depth: int) -> Pressure:
        """The pressure of an organization at a depth. A critical new stage raises an alert."""
        transaction = self._transaction
        pressure = PRESSURES.get(transaction, org_id) or Pressure()
        stage = backpressure.stage_of(depth, self._policy.backpressure, pressure.stage)
        if stage != pressure.stage:
            if stage > pressure.stage and stage in backpressure.ALERTS:
                whose = f"organization {org_id}" if org_id else "all organizations"
                said = f"{depth} messages of {whose} are waiting"
                transaction.alert(backpressure.ALERTS[stage], said, queue_of(org_id))
                if stage == backpressure.EMERGENCY_STAGE:
                    self._look_for_poison()
            pressure = replace(pressure, stage=stage)
            PRESSURES.put(transaction, pressure, org_id)
        return pressure

    def _look_for_poison(self) -> None:
        """Name messages in flight whose own process has died: they may be the cause of the overflow."""
        found = self._transaction.records.find(Listing(state="PROCESSING", limit=SUSPECTS_LOOKED_MAX))
        held = [record for record in found if org_of(record.queue)]
        suspects = [record.message_id for record in held if poison.own_deaths(record)]
        if suspects:
            named = ", ".join(suspects[:SUSPECTS_NAMED_MAX])
            self._transaction.alert("Poison suspected", f"processes of {len(suspects)} died before: {named}")

    def _active_organizations(self, submitted: Iterable[str]) -> int:
        """How many organizations share the queue, those of the batch included."""
        if self._active == 0:
            transaction = self._transaction
            new = sum(not ready(transaction.lanes.depth(ENGINE_PREFIX + org_id)) for org_id in submitted)
            self._active = max(1, transaction.lanes.count_active() + new)
        return self._active

    # ---- rates ---------------------------------------------------------------------------------

    def _check_rate(self, org_id: str, messages: Sequence[Prepared]) -> None:
        rules = self._policy.organization_of(org_id)
        if rules.rate_per_s is not None:
            count = sum(one.org_id == org_id for one in messages)
            self._take(rules.rate_per_s, count, "organization", org_id)
        if rules.user_rate_per_s is not None:
            own = [one.body.user_id for one in messages if one.org_id == org_id and one.body.user_id]
            for user_id, count in Counter(own).items():
                self._take(rules.user_rate_per_s, count, "user", org_id, user_id)

    def _take(self, rate: float, count: int, whose: str, *names: str) -> None:
        """Take from a bucket that holds the submits of one second."""
        now = self._transaction.steady_ns
        bucket = RATES.get(self._transaction, whose, *names) or Bucket(now - NANOS_PER_S)
        due = max(bucket.next_ns, now - NANOS_PER_S) + round(count * NANOS_PER_S / rate)
        if due > now:
            reason = f"{whose} {names[-1]} may submit {rate:g} messages a second"
            raise Overloaded(reason, (due - now) / NANOS_PER_S)
        RATES.put(self._transaction, Bucket(due), whose, *names)

    # ---- guards --------------------------------------------------------------------------------

    def _check_guards(self, messages: Sequence[Prepared]) -> None:
        guard, transaction = self._policy.guard, self._transaction
        for message in messages:
            if guard.hops is not None and message.body.hop > guard.hops:
                raise GuardTripped(message.body.goal_id, "hops", message.body.hop, guard.hops)
        for (org_id, goal_id), count in Counter((one.org_id, one.body.goal_id) for one in messages).items():
            used = GOALS.get(transaction, org_id, goal_id) or GoalUse()
            if guard.messages is not None and used.messages + count > guard.messages:
                raise GuardTripped(goal_id, "messages", used.messages, guard.messages)
            over = over_budget(guard, goal_id, used)
            if over is not None:
                raise over
            more = replace(used, messages=used.messages + count, seen_us=transaction.wall_us)
            GOALS.put(transaction, more, org_id, goal_id)


def over_budget(guard: Guard, goal_id: str, used: GoalUse) -> GuardTripped | None:
    """The limit of tokens or money that a goal has used up; None while it may spend more."""
    if guard.tokens is not None and used.tokens >= guard.tokens:
        return GuardTripped(goal_id, "tokens", used.tokens, guard.tokens)
    if guard.usd is not None and used.usd >= guard.usd:
        return GuardTripped(goal_id, "US dollars", used.usd, guard.usd)
    return None
