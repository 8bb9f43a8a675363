"""The rules that every history of an engine must keep, checked against what its users were told.

Rule 1: the checker keeps its own account of leases and ends, from answers (a submit was acknowledged, a claim
        returned a lease, an outcome was accepted), from the clock, and from the events of ends that have no
        caller, such as an expiry. It reads no record while the world runs, so a wrong record cannot hide.
Rule 2: nothing here is random and nothing raises. A broken rule becomes a `Broken`.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import State

RULES: Final[dict[str, str]] = {
    "lost": "an accepted message is gone, or has not ended after the world was drained",
    "unknown": "a message exists or was delivered that nobody accepted, or that was refused",
    "duplicate": "a submit that was repeated with its key gave another message",
    "overlap": "a message was leased while another lease of it was alive",
    "stale": "an outcome was accepted under a lease that was over",
    "refused": "an outcome under a live lease was not accepted",
    "result": "the result of a message is not the one that was accepted",
    "order": "a message ran before an older one of the same ordering key had ended, or beside another one",
    "terminal": "a message was delivered or cancelled after its end, or ended twice",
    "paused": "a message of a paused organization or type was delivered",
    "expired": "a message was delivered after its expiry",
    "priority": "a message was delivered while one of a more urgent class waited",
    "share": "promoted messages got more or less than one of eight deliveries while higher classes waited",
    "breaker": "more than one message reached a service whose breaker was open",
    "conflict": "two operations that conflict were leased at the same time",
    "effect": "an effect was to run again, or had two outcomes",
    "blame": "a message was quarantined without deaths of its own process, or ran beside others after one",
    "usage": "the usage of a goal is not the sum of the accepted outcomes",
    "guard": "a message was delivered although its goal had used up its tokens",
    "tokens": "the books of a model are not what live leases reserved and accepted outcomes used",
    "books": "the counters or the events of the store do not match its records",
    "history": "the events break a rule of the history checker",
}


WORKER_DIED: Final = "the death of the worker"
"""The end of a lease whose worker is known to be dead."""


class Broken(msgspec.Struct, frozen=True):
    """A rule that was broken."""

    rule: str
    message_id: str
    sentence: str


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A message as its sender knows it."""

    message_id: str
    org_id: str
    type: str
    goal_id: str
    ordering_key: str = ""
    stops: bool = False
    """Whether its ordering key stops when it becomes a dead letter."""
    service: str = ""
    expires_ns: int = 0


class HeldLease(msgspec.Struct):
    """A lease as its holder knows it."""

    lease: int
    until_ns: int
    ended_by: str = ""
    """Why the lease is over; empty while it may be alive."""


class _Life(msgspec.Struct):
    sent: Sent
    position: int
    grant: HeldLease | None = None
    own_deaths: int = 0
    is_marked: bool = False
    """Whether a worker died with it, or its lease lapsed, and no attempt came to its end since."""
    ended: str = ""
    """How the message ended, as far as its users were told."""
    result: bytes | None = None
    is_replayed: bool = False


class _EffectLife(msgspec.Struct):
    is_begun: bool = False
    outcome: Any = None
    is_done: bool = False


class Checker:
    """What the users of one engine were told so far, and which rules that breaks."""

    def __init__(self, crashes_max: int = 1) -> None:
        """`crashes_max` deaths of its own process make a message poison."""
        self._crashes_max = crashes_max
        self.broken: list[Broken] = []
        self._lives: dict[str, _Life] = {}
        self._by_key: dict[tuple[str, str], list[str]] = {}
        self._refused: set[str] = set()
        self._forgotten: set[str] = set()
        self._effects: dict[tuple[str, str], _EffectLife] = {}
        self._tokens: dict[tuple[str, str], int] = {}
        self._reserved: dict[tuple[str, int], tuple[str, int]] = {}
        """Message and lease -> the model and its tokens."""
        self._spent: list[tuple[str, int, int]] = []
        """Model, time and tokens of outcomes."""

    def report(self, rule: str, message_id: str, sentence: str) -> None:
        """Note a broken rule."""
        self.broken.append(Broken(rule, message_id, sentence))

    @property
    def accepted(self) -> list[str]:
        """The ids of accepted messages, the oldest first."""
        return [*self._lives]

    # ---- submits -------------------------------------------------------------------------------

    def submitted(self, sent: Sent) -> None:
        """A submit was acknowledged."""
        self._lives[sent.message_id] = _Life(sent, len(self._lives))
        if sent.ordering_key:
            self._by_key.setdefault((sent.org_id, sent.ordering_key), []).append(sent.message_id)

    def refused(self, message_ids: list[str]) -> None:
        """A submit was refused, or its commit failed."""
        self._refused.update(message_ids)

    def repeated(self, message_id: str, answer: str, *, duplicate: bool) -> None:
        """A submit was repeated with its key, and this is the answer."""
        if answer != message_id or not duplicate:
            self.report("duplicate", message_id, f"a repeated submit was answered with {answer}")

    def forgotten(self, message_id: str) -> None:
        """A dead letter was purged."""
        self._forgotten.add(message_id)
        self._life(message_id).ended = "purged"

    def _life(self, message_id: str) -> _Life:
        """What is known of a message. One that nobody submitted is reported once."""
        life = self._lives.get(message_id)
        if life is None:
            self.report("unknown", message_id, "somebody uses it, and no submit of it was acknowledged")
            sent = Sent(message_id=message_id, org_id="", type="", goal_id="")
            life = self._lives[message_id] = _Life(sent, len(self._lives))
        return life

    # ---- leases --------------------------------------------------------------------------------

    def claimed(self, message_id: str, lease: int, now_ns: int, until_ns: int, *, alone: bool) -> None:
        """A claim returned a lease; the message runs alone, or beside others."""
        life = self._life(message_id)
        if life.ended:
            self.report("terminal", message_id, f"it was delivered after it was {life.ended}")
        if life.grant is not None and self._is_held(life, now_ns):
            self.report("overlap", message_id, f"it was leased while lease {life.grant.lease} was alive")
        if 0 < life.sent.expires_ns <= now_ns and not life.is_replayed:
            self.report("expired", message_id, "it was delivered after its expiry")
        self._check_blame(life, alone=alone)
        life.grant = HeldLease(lease, until_ns)
        self._check_order(life, now_ns)

    def _check_blame(self, life: _Life, *, alone: bool) -> None:
        """A message runs alone next time when its holder did not end its lease, and after each own death."""
        if life.grant is not None and life.grant.ended_by in ("", WORKER_DIED):
            life.is_marked = True
        if alone != (life.is_marked or life.own_deaths > 0):
            how = "alone" if alone else "beside others"
            self.report("blame", life.sent.message_id, f"it runs {how} after {life.own_deaths} own deaths")
        if life.own_deaths >= self._crashes_max:
            self.report("blame", life.sent.message_id, f"it runs again after {life.own_deaths} own deaths")

    def _check_order(self, life: _Life, now_ns: int) -> None:
        sent = life.sent
        for message_id in self._by_key.get((sent.org_id, sent.ordering_key), ()):
            other = self._lives[message_id]
            if other is life:
                continue
            if self._is_held(other, now_ns):
                self.report("order", sent.message_id, f"it runs beside {message_id} of the same key")
            elif other.position < life.position and self._blocks(other):
                self.report("order", sent.message_id, f"it was delivered before {message_id} had ended")

    def _blocks(self, life: _Life) -> bool:
        if life.ended in ("DEAD_LETTER", "QUARANTINED"):
            return life.sent.stops
        return not life.ended

    def _is_held(self, life: _Life, now_ns: int) -> bool:
        grant = life.grant
        return grant is not None and not grant.ended_by and grant.until_ns > now_ns

    def is_live(self, message_id: str, lease: int, now_ns: int) -> bool:
        """Whether a lease is alive, as far as its holder can know."""
        life = self._lives.get(message_id)
        if life is None or life.grant is None or life.grant.lease != lease:
            return False
        return self._is_held(life, now_ns)

    def renewed(self, message_id: str, lease: int, now_ns: int, until_ns: int, *, accepted: bool) -> None:
        """A heartbeat was sent."""
        self._judge(message_id, lease, now_ns, "a heartbeat", accepted=accepted)
        life = self._life(message_id)
        if accepted and life.grant is not None:
            life.grant.until_ns = until_ns

    def finished(
        self,
        message_id: str,
        lease: int,
        kind: str,
        now_ns: int,
        *,
        accepted: bool,
        result: bytes = b"",
        tokens: int = 0,
    ) -> None:
        """An outcome was sent. The last outcome of a lease may be repeated; a repeat changes nothing."""
        life = self._life(message_id)
        grant = life.grant
        if grant is not None and grant.lease == lease and grant.ended_by == kind:
            return
        self._judge(message_id, lease, now_ns, f"the outcome {kind!r}", accepted=accepted)
        if not accepted or grant is None or grant.lease != lease:
            return
        grant.ended_by = kind
        life.own_deaths += kind == "crashed"
        life.is_marked = life.is_marked and kind != "failed"
        if kind in ("completed", "failed") and (message_id, lease) in self._reserved:
            model, reserved = self._reserved[message_id, lease]
            self._spent.append((model, now_ns, min(tokens, reserved)))
        if kind in ("completed", "failed"):
            goal = life.sent.org_id, life.sent.goal_id
            self._tokens[goal] = self._tokens.get(goal, 0) + tokens
        if kind == "completed":
            life.ended, life.result = "COMPLETED", result

    def _judge(self, message_id: str, lease: int, now_ns: int, what: str, *, accepted: bool) -> None:
        live = self.is_live(message_id, lease, now_ns)
        if accepted and not live:
            self.report("stale", message_id, f"{what} was accepted under lease {lease}, which was over")
        elif live and not accepted:
            self.report("refused", message_id, f"{what} was refused under lease {lease}, which is alive")

    # ---- tokens --------------------------------------------------------------------------------

    def reserved(self, message_id: str, lease: int, model: str, tokens: int) -> None:
        """A claim returned tokens of a model with a lease."""
        self._reserved[message_id, lease] = model, tokens

    def books(self, model: str, used: int, reserved: int, now_ns: int, begun_ns: int) -> None:
        """Compare the books of a model with the leases, and with what was used since its window began."""
        live = sum(
            tokens
            for (message_id, lease), (name, tokens) in self._reserved.items()
            if name == model and self.is_live(message_id, lease, now_ns)
        )
        if reserved != live:
            self.report(
                "tokens", "", f"{reserved} tokens of {model} are reserved, and live leases hold {live}"
            )
        spent = sum(tokens for name, at_ns, tokens in self._spent if name == model and at_ns >= begun_ns)
        if used != spent:
            self.report("tokens", "", f"{used} tokens of {model} count as used, and outcomes used {spent}")

    def over(self, message_id: str, why: str) -> None:
        """The lease of a message was ended by somebody else than its holder."""
        grant = self._life(message_id).grant
        if grant is not None and not grant.ended_by:
            grant.ended_by = why

    # ---- ends ----------------------------------------------------------------------------------

    def seen(self, message_id: str, state: State) -> None:
        """A user saw the state of a message. An end is final until the message is replayed."""
        life = self._life(message_id)
        if state == "QUARANTINED" and life.own_deaths < self._crashes_max:
            self.report("blame", message_id, f"it was quarantined after {life.own_deaths} own deaths")
        if life.ended and life.ended != state and (life.ended, state) != ("DEAD_LETTER", "QUARANTINED"):
            self.report("terminal", message_id, f"it was {life.ended}, and is {state} now")
        if state in lifecycle.ENDED:
            life.ended = state
            self.over(message_id, state)

    def cancelled(self, message_id: str) -> None:
        """A cancel was acknowledged."""
        life = self._life(message_id)
        if life.ended:
            self.report("terminal", message_id, f"it was cancelled after it was {life.ended}")
        life.ended = "CANCELLED"
        self.over(message_id, "CANCELLED")

    def replayed(self, message_id: str) -> None:
        """A replay was acknowledged: the message has another life."""
        life = self._life(message_id)
        life.ended, life.is_replayed = "", True
        life.grant, life.own_deaths, life.is_marked = None, 0, False

    # ---- effects -------------------------------------------------------------------------------

    def effect_begun(self, message_id: str, key: str, *, runs_unknown: bool) -> None:
        """An intent was committed: the caller runs the effect now."""
        effect = self._effect(message_id, key)
        if effect.is_done:
            self.report("effect", message_id, f"effect {key} was to run after its outcome was committed")
        elif effect.is_begun and not runs_unknown:
            self.report("effect", message_id, f"effect {key} was to run again while its outcome is unknown")
        effect.is_begun = True

    def effect_known(self, message_id: str, key: str, outcome: Any) -> None:
        """An attempt was given the outcome of an earlier one."""
        effect = self._effect(message_id, key)
        if not effect.is_done or effect.outcome != outcome:
            self.report("effect", message_id, f"effect {key} was answered with {outcome!r}, which is wrong")

    def effect_ended(self, message_id: str, key: str, outcome: Any) -> None:
        """The outcome of an effect was committed."""
        effect = self._effect(message_id, key)
        if effect.is_done:
            self.report("effect", message_id, f"effect {key} has two outcomes")
        effect.is_done, effect.outcome = True, outcome

    def effect_dropped(self, message_id: str, key: str) -> None:
        """An intent was taken back: the effect did not happen."""
        self._effects.pop((message_id, key), None)

    def _effect(self, message_id: str, key: str) -> _EffectLife:
        return self._effects.setdefault((message_id, key), _EffectLife())

    # ---- the end of the world ------------------------------------------------------------------

    def drained(self, records: Mapping[str, tuple[State, bytes | None]]) -> None:
        """Compare what is stored, by message id, with what was accepted. Everything must have ended."""
        for message_id in records.keys() - self._lives.keys():
            why = "its submit was refused" if message_id in self._refused else "nobody submitted it"
            self.report("unknown", message_id, f"it is stored, and {why}")
        for message_id, life in self._lives.items():
            found = records.get(message_id)
            if message_id in self._forgotten:
                if found is not None:
                    self.report("terminal", message_id, "it was purged, and is stored")
            elif found is None:
                self.report("lost", message_id, "it was accepted, and is not stored")
            else:
                self._check_end(life, *found)

    def _check_end(self, life: _Life, state: State, result: bytes | None) -> None:
        message_id = life.sent.message_id
        if state not in lifecycle.ENDED:
            self.report("lost", message_id, f"it has not ended: it is {state}")
        elif life.ended and life.ended != state:
            self.report("terminal", message_id, f"it was {life.ended}, and is {state} at the end")
        elif state == "COMPLETED" and result != life.result:
            self.report("result", message_id, f"its result is {result!r}, and {life.result!r} was accepted")

    def within(self, message_id: str, guard_tokens: int | None) -> None:
        """A message was delivered while the goals had used what was told so far."""
        sent = self._life(message_id).sent
        tokens = self._tokens.get((sent.org_id, sent.goal_id), 0)
        if guard_tokens is not None and tokens >= guard_tokens:
            self.report("guard", message_id, f"goal {sent.goal_id} of {sent.org_id} has used {tokens} tokens")

    def used(self, org_id: str, goal_id: str, tokens: int) -> None:
        """Compare the stored usage of a goal with the accepted outcomes."""
        expected = self._tokens.get((org_id, goal_id), 0)
        if tokens != expected:
            self.report("usage", "", f"goal {goal_id} of {org_id} used {expected} tokens, not {tokens}")
