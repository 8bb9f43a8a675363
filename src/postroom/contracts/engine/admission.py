"""Admission of submits inside a transaction: pauses, rate limits, backpressure and guards.

Each check raises before anything is stored.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from postroom.contracts.engine.cells import GOALS, PAUSES, PRESSURES, RATES, Bucket, GoalUse, Pressure
from postroom.contracts.engine.messages import Prepared
from postroom.contracts.engine.policy import Policy
from postroom.core import admission
from postroom.core.lifecycle import NANOS_PER_S
from postroom.errors import GuardTripped, Overloaded
from postroom.message import ENGINE_PREFIX, org_of
from postroom.stores.base import Listing, ready
from postroom.stores.transaction import Transaction

SUSPECTS_LOOKED_MAX = 1_000
SUSPECTS_NAMED_MAX = 10

ALL = ""
"""The key of what holds for all organizations, or all types."""


class Admission:
    """Decides whether the submits of one transaction are admitted."""

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self._transaction = transaction
        self._policy = policy

    def check(self, messages: Sequence[Prepared]) -> None:
        """Admit messages, all or none."""
        counts: dict[tuple[str, int], int] = {}
        for message in messages:
            place = message.org_id, message.envelope.priority
            counts[place] = counts.get(place, 0) + 1
        self._check_kill_switch({org_id for org_id, _ in counts})
        for (org_id, priority), count in counts.items():
            self._check_pressure(org_id, priority, count)
        self._check_rates(messages)
        if self._policy.guard.is_set:
            self._check_guards(messages)

    # ---- kill switch ---------------------------------------------------------------------------

    def _check_kill_switch(self, org_ids: set[str]) -> None:
        for key, pause in PAUSES.scan(self._transaction):
            org_id, _, type_name = key.partition("\x1f")
            if pause.kill and not type_name and (org_id == ALL or org_id in org_ids):
                whose = f"of organization {org_id}" if org_id else "of all organizations"
                raise Overloaded(f"the kill switch {whose} is on", admission.EMERGENCY_RETRY_S)

    # ---- backpressure --------------------------------------------------------------------------

    def _check_pressure(self, org_id: str, priority: int, count: int) -> None:
        transaction, rule = self._transaction, self._policy.backpressure
        counts = transaction.depth(ENGINE_PREFIX + org_id)
        depth, total = ready(counts), ready(transaction.total())
        quiet = admission.LEAVE_AT * rule.scale
        if depth <= quiet and total <= quiet:
            return
        pressure = self._pressure(org_id, depth)
        stage = pressure.stage
        if total > quiet:
            of_all = self._pressure(ALL, total)
            if of_all.stage > stage and depth > total / max(1, self._active_organizations()):
                stage = of_all.stage
        completed = counts.get("COMPLETED", 0)
        throttle = admission.sampled(pressure.throttle, transaction.steady_ns, completed)
        share = admission.share_of(stage, priority)
        retry_after = 0.0
        if share == 0:
            retry_after = admission.EMERGENCY_RETRY_S
        elif share < 1:
            rate = share * admission.completion_rate(throttle, transaction.steady_ns, completed)
            throttle, retry_after = admission.admit(throttle, priority, rate / count, transaction.steady_ns)
        if retry_after:
            raise Overloaded(
                f"organization {org_id} has {depth} messages waiting (stage {stage}), "
                f"which throttles P{priority}",
                retry_after,
            )
        if throttle != pressure.throttle:
            PRESSURES.put(transaction, replace(pressure, throttle=throttle), org_id)

    def _pressure(self, org_id: str, depth: int) -> Pressure:
        """The pressure of an organization at a depth. A critical new stage raises an alert."""
        transaction = self._transaction
        pressure = PRESSURES.get(transaction, org_id) or Pressure()
        stage = admission.stage_of(depth, self._policy.backpressure, pressure.stage)
        if stage != pressure.stage:
            if stage > pressure.stage and stage in admission.ALERTS:
                whose = f"organization {org_id}" if org_id else "all organizations"
                transaction.alert(admission.ALERTS[stage], f"{depth} messages of {whose} are waiting")
                if stage == admission.EMERGENCY_STAGE:
                    self._look_for_poison()
            pressure = replace(pressure, stage=stage)
            PRESSURES.put(transaction, pressure, org_id)
        return pressure

    def _look_for_poison(self) -> None:
        """Name messages in flight that have crashed a worker: they may be the cause of the overflow."""
        held = self._transaction.find(Listing(state="PROCESSING", limit=SUSPECTS_LOOKED_MAX))
        suspects = [record.message_id for record in held if record.crashes and org_of(record.queue)]
        if suspects:
            named = ", ".join(suspects[:SUSPECTS_NAMED_MAX])
            self._transaction.alert("Poison suspected", f"{len(suspects)} crashed a worker before: {named}")

    def _active_organizations(self) -> int:
        transaction = self._transaction
        queues = (queue for queue in transaction.queues() if org_of(queue))
        return sum(ready(transaction.depth(queue)) > 0 for queue in queues)

    # ---- rates ---------------------------------------------------------------------------------

    def _check_rates(self, messages: Sequence[Prepared]) -> None:
        for message in messages:
            rules = self._policy.organization_of(message.org_id)
            if rules.rate_per_s is not None:
                self._take(rules.rate_per_s, "organization", message.org_id)
            if rules.user_rate_per_s is not None and message.body.user_id:
                self._take(rules.user_rate_per_s, "user", message.org_id, message.body.user_id)

    def _take(self, rate: float, whose: str, *names: str) -> None:
        """Take one from a bucket that holds the submits of one second."""
        now = self._transaction.steady_ns
        bucket = RATES.get(self._transaction, whose, *names) or Bucket(now - NANOS_PER_S)
        due = max(bucket.next_ns, now - NANOS_PER_S) + round(NANOS_PER_S / rate)
        if due > now:
            raise Overloaded(
                f"{whose} {names[-1]} may submit {rate:g} messages a second", (due - now) / NANOS_PER_S
            )
        RATES.put(self._transaction, Bucket(due), whose, *names)

    # ---- guards --------------------------------------------------------------------------------

    def _check_guards(self, messages: Sequence[Prepared]) -> None:
        guard, transaction = self._policy.guard, self._transaction
        for message in messages:
            body = message.body
            if guard.hops is not None and body.hop > guard.hops:
                raise GuardTripped(body.goal_id, "hops", body.hop, guard.hops)
            used = GOALS.get(transaction, message.org_id, body.goal_id) or GoalUse()
            if guard.messages is not None and used.messages >= guard.messages:
                raise GuardTripped(body.goal_id, "messages", used.messages, guard.messages)
            if guard.tokens is not None and used.tokens >= guard.tokens:
                raise GuardTripped(body.goal_id, "tokens", used.tokens, guard.tokens)
            if guard.usd is not None and used.usd >= guard.usd:
                raise GuardTripped(body.goal_id, "US dollars", used.usd, guard.usd)
            GOALS.put(transaction, replace(used, messages=used.messages + 1), message.org_id, body.goal_id)
