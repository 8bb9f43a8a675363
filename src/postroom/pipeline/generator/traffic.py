"""The traffic of a generated history: goals, their trees of messages, and the life of each message.

Rule 1: the whole life of a message is generated when it is created. Messages are created in the order of
        time, and leave a lane in that order. First deliveries are therefore in order without simulating a
        queue.
Rule 2: only transitions of `core.lifecycle.lifecycle` happen. `faults` adds the violations.
"""

import heapq
from typing import Final, NamedTuple

import msgspec

from postroom.pipeline.generator.messages import (
    NOBODY,
    GeneratedGoal,
    GeneratedMessage,
    GeneratedSource,
    Names,
)
from postroom.pipeline.generator.world import (
    MAX_RETRIES,
    MAX_RETRIES_ELSE,
    MODELS,
    PROMOTE_AFTER_US,
    SERVICES,
    SOURCES,
    Family,
    HistoryWorld,
)

MS: Final = 1_000
S: Final = 1_000_000
MINUTE: Final = 60 * S
HOUR: Final = 60 * MINUTE
DAY_HOURS: Final = 24
OFFICE_HOURS: Final = range(8, 20)
WORKERS: Final = 32
LEASE_US: Final = 30 * S
BUSY_S: Final = 20  # how long a holder defers a message whose service is busy
HEARTBEAT_US: Final = 10 * S
HEARTBEATS_MAX: Final = 4
CHUNKS_MAX: Final = 6
REQUESTS_A_GOAL_MAX: Final = 24
PRIORITY_LOWEST: Final = 3
RESPONSE_PRIORITY: Final = 1
BREAKER_FAILURES: Final = 5
BORROWED_BELOW: Final = 64  # a model call that leaves fewer of its tokens had to borrow some
BREAKER_OPEN_US: Final = 5 * MINUTE
POISON_LAPSES: Final = 3
NEVER_US: Final = 1 << 62
NANOS: Final = 1_000_000_000
MAX_RETRIES_ALL: Final = 99  # more than any message has
RETRY_DELAY_S_MAX: Final = 600
WAIT_US: Final = (2 * MS, 15 * MS, 60 * MS, 800 * MS)
"""Mean waits by priority. In a rush they are much longer, and messages are promoted."""
RUSH: Final = 400
WORK_US: Final = {"model_call": 2_500 * MS, "tool_call": 900 * MS, "agent_spawn": 4 * S}
WORK_ELSE_US: Final = 40 * MS

# Probabilities.
RUSHES: Final = 1 / 400
OUTAGES: Final = 1 / 300
PURGES: Final = 1 / 300
REPEATED_CALLS: Final = 0.004
STREAMED: Final = 0.25
ACKNOWLEDGED: Final = 0.15
FAILS_IN_OUTAGE: Final = 0.8
REPLAYED: Final = 0.25
REPLAY_SUCCEEDS: Final = 0.7
TWO_CHILDREN: Final = 0.2
OWN_AGENT: Final = 0.7

_PRIORITIES: Final = (0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 1)


class Due(NamedTuple):
    """A request that will be created."""

    ts_us: int
    order: int
    goal: GeneratedGoal
    parent: str
    agent: str


class Traffic:
    """Creates messages in the order of time, up to `limit`."""

    def __init__(self, world: HistoryWorld, start_us: int, goal_gap_us: int, limit: int) -> None:
        self.world = world
        self.feeds = [GeneratedSource(name) for name in SOURCES]
        self.now_us = start_us
        self.limit = limit
        self.made = 0
        self._start_us = start_us
        self._goal_gap_us = goal_gap_us
        self._next_goal_us = start_us + world.wait_us(goal_gap_us)
        self._agenda: list[Due] = []
        self._order = 0
        self._lanes: dict[tuple[str, str, int], int] = {}
        self._outages: dict[tuple[str, str], int] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._broken_until_us: dict[tuple[str, str], int] = {}
        self._rush_until_us = 0
        self._workers = [f"w-{number:02}" for number in range(WORKERS)]

    # ---- requests --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Create the next request, and its whole life."""
        world = self.world
        if self._agenda and self._agenda[0].ts_us <= self._next_goal_us:
            due = heapq.heappop(self._agenda)
            self.advance(due.ts_us)
            self._request(due.goal, due.parent, due.agent)
            return
        self.advance(self._next_goal_us)
        hour = (self.now_us - self._start_us) // HOUR % DAY_HOURS
        pace = 2 if hour in OFFICE_HOURS else 5
        self._next_goal_us = self.now_us + world.wait_us(self._goal_gap_us * pace // 3)
        self._change_conditions()
        goal = self.new_goal()
        self._request(goal, "", goal.org.agents[world.below(len(goal.org.agents))])

    def new_goal(self) -> GeneratedGoal:
        world = self.world
        org = world.org()
        budget = min(REQUESTS_A_GOAL_MAX, world.wait_us(3 * S) // S)
        user = org.users[world.below(len(org.users))]
        return GeneratedGoal(f"g-{world.digits(12)}", world.digits(32), org, user, [budget])

    def message(
        self, goal: GeneratedGoal, parent: str, agent: str, kind: str, priority: int
    ) -> GeneratedMessage:
        """A request in the queue of its organization."""
        world = self.world
        self.made += 1
        names = Names(self._message_id(self.now_us), parent, goal.trace_id)
        queue = f"org_{goal.org.org_id}"
        feed = self.feeds[goal.org.source]
        return GeneratedMessage(feed, goal, agent, names, kind, queue, agent, priority, world.digits(24))

    def _message_id(self, ts_us: int) -> str:
        """An id that sorts by time; random digits distinguish ids of one microsecond."""
        return f"m-{ts_us:013x}{self.world.digits(8)}"

    def worker(self) -> str:
        return self._workers[self.world.bits(5)]

    def advance(self, ts_us: int) -> None:
        """Advance the time. No two requests have the same time, which keeps lanes in order."""
        self.now_us = max(self.now_us + 1, ts_us)

    def _change_conditions(self) -> None:
        world = self.world
        now_us = self.now_us
        if world.chance() < RUSHES:
            self._rush_until_us = now_us + world.wait_us(20 * self._goal_gap_us + MINUTE)
            for feed in self.feeds:
                depth = 500 + world.bits(12)
                add_event(feed, now_us, "alert", f',"detail":{{"name":"queue_depth","depth":{depth}}}}}')
        if world.chance() < OUTAGES:
            place = SOURCES[world.below(len(SOURCES))], SERVICES[world.bits(3)]
            self._outages[place] = now_us + world.wait_us(200 * self._goal_gap_us + 5 * MINUTE)
            self._failures[place] = 0
        if world.chance() < PURGES:
            feed = self.feeds[world.below(len(self.feeds))]
            add_event(feed, now_us, "deleted", f',"detail":{{"records":{1 + world.bits(9)}}}}}')

    # ---- a request ---------------------------------------------------------------------------------------

    def _request(self, goal: GeneratedGoal, parent: str, agent: str) -> None:
        world = self.world
        kind = world.request()
        message = self.message(goal, parent, agent, kind, _PRIORITIES[world.bits(4)])
        service = SERVICES[world.bits(3)] if kind == "tool_call" else ""
        fate = world.fate()
        if fate == "rejected":
            self._refuse(message)
            return
        done_us = self._live(message, service, fate)
        if done_us:
            self._follow_up(message, done_us)

    def _refuse(self, message: GeneratedMessage) -> None:
        more = ',"error_type":"QueueFull","error":"only P0 is accepted at present"'
        fields = f'"kind":"rejected",{message.fields},"priority":{message.priority},{message.trace}{more}'
        message.feed.put((self.now_us, fields, "}", message.names, None, False))

    def _live(self, message: GeneratedMessage, service: str, fate: str) -> int:
        """Generate the life of a message; returns when it was completed, or 0."""
        ready_us = self.accept(message, service, delayed=fate == "delayed")
        t = self.depart(message, ready_us)
        if fate in ("cancelled", "expired"):
            message.say(t, fate, fate.upper())
            return 0
        waited_us = t - ready_us
        open_us = self._broken_until_us.get((message.feed.name, service), 0) - t
        if open_us > 0:
            t, waited_us = self._defer(message, t, service, open_us)
        match fate:
            case "poison":
                return self._poison(message, t, waited_us)
            case "lapse" | "release":
                t, waited_us = self._given_back(message, t, waited_us, fate)
            case "cancelled while held":
                worker = self.start(message, t, waited_us)
                message.held(t + self.work_us(message), "cancelled", "CANCELLED", worker)
                return 0
            case "conflict" | "conflict that stays":
                t = self._conflict(message, t, waited_us, fate)
                if not t:
                    return 0
                waited_us = MS
            case _:
                pass
        return self._work(message, t, waited_us, service, self._errors(message, service, fate))

    def accept(self, message: GeneratedMessage, service: str = "", *, delayed: bool = False) -> int:
        """Create and enqueue a message; returns when it can be claimed."""
        world = self.world
        t = self.now_us
        payload, body_bytes = world.payloads[world.bits(9)]
        sender = message.agent if message.names.parent_message_id else message.goal.user
        more = f',"body_bytes":{body_bytes},"payload":{payload},"sender":"{sender}"'
        if service:
            more += f',"service":"{service}"'
        if delayed:
            delay_s = 1 + world.wait_us(15 * MINUTE) // S
            message.created(t, more, delay_s)
            message.say(t + delay_s * S, "enqueued", "QUEUED")
            return t + delay_s * S
        message.created(t, more)
        if world.chance() < REPEATED_CALLS:
            message.say(t + world.wait_us(MS), "duplicate", "QUEUED")
        return t

    def depart(self, message: GeneratedMessage, ready_us: int) -> int:
        """The time of the first delivery, after earlier messages of its lane. It may be promoted first."""
        mean_us = WAIT_US[message.priority] * (RUSH if self.now_us < self._rush_until_us else 1)
        t = ready_us + self.world.wait_us(mean_us)
        rises_us = ready_us + PROMOTE_AFTER_US[message.priority] if message.priority else NEVER_US
        if ready_us == self.now_us:
            lane = (message.queue, message.key, message.priority)
            t = max(t, self._lanes.get(lane, 0) + 1)
            self._lanes[lane] = min(t, rises_us)
        while t >= rises_us:
            before = message.priority
            message.priority -= 1
            message.say(rises_us, "promoted", "QUEUED", "", f',"detail":{{"from":{before}}}}}')
            t = max(t, rises_us + 1)
            rises_us = rises_us + PROMOTE_AFTER_US[message.priority] if message.priority else NEVER_US
        return t

    def _defer(self, message: GeneratedMessage, t: int, service: str, open_us: int) -> tuple[int, int]:
        """Defer a message whose service has an open breaker; returns its delivery and how long it waited."""
        delay_s = open_us // S + 1
        reason = f'"reason":"the breaker of service {service} is open","delay_s":{delay_s}'
        message.say(t, "deferred", "SCHEDULED", "", f',"prior":"QUEUED","detail":{{{reason}}}}}')
        t += delay_s * S
        message.say(t, "enqueued", "QUEUED")
        waited_us = self.world.wait_us(WAIT_US[message.priority])
        return t + waited_us, waited_us

    # ---- fates -------------------------------------------------------------------------------------------

    def start(self, message: GeneratedMessage, t: int, waited_us: int) -> str:
        worker = self.worker()
        message.leased(t, worker, waited_us)
        message.held(t + MS, "execution_started", "PROCESSING", worker)
        return worker

    def work_us(self, message: GeneratedMessage) -> int:
        return 2 * MS + self.world.wait_us(WORK_US.get(message.type, WORK_ELSE_US))

    def _poison(self, message: GeneratedMessage, t: int, waited_us: int) -> int:
        """It crashes every worker that holds it, and is quarantined."""
        for _ in range(POISON_LAPSES):
            worker = self.start(message, t, waited_us)
            t += LEASE_US
            message.lapsed(t, worker, LEASE_US)
            waited_us = self.world.wait_us(S)
            t += waited_us
        message.say(t, "quarantined", "QUARANTINED", f',"error":"{POISON_LAPSES} workers did not survive it"')
        names = f'"message_id":"{message.names.message_id}"'
        add_event(message.feed, t, "alert", f',"detail":{{"name":"poison",{names}}}}}')
        notice = ',"detail":{"alert":"poison","status":"firing","sink":"webhook","tries":1}}'
        add_event(message.feed, t + S, "alert_sent", notice)
        return 0

    def _given_back(self, message: GeneratedMessage, t: int, waited_us: int, fate: str) -> tuple[int, int]:
        worker = self.start(message, t, waited_us)
        if fate == "lapse":
            t += LEASE_US
            message.lapsed(t, worker, LEASE_US)
        else:
            t += 2 * MS + self.world.wait_us(S)
            if message.type == "tool_call":  # its service asks the holder to come back later
                detail = f',"prior":"PROCESSING","detail":{{"reason":"busy","delay_s":{BUSY_S}}}}}'
                message.held(t, "deferred", "SCHEDULED", worker, "", detail)
                t += BUSY_S * S
                message.say(t, "enqueued", "QUEUED")
            else:
                message.held(t, "released", "QUEUED", worker)
        waited_us = self.world.wait_us(S)
        return t + waited_us, waited_us

    def _conflict(self, message: GeneratedMessage, t: int, waited_us: int, fate: str) -> int:
        """It conflicts with another message: resolved and retried, or unresolved and dead."""
        world = self.world
        worker = self.start(message, t, waited_us)
        other = f',"detail":{{"with":"m-{world.digits(16)}","resource":"node-{world.bits(16)}"}}}}'
        message.held(t + 2 * MS, "conflict_detected", "PROCESSING", worker, "", other)
        t += 3 * MS + world.wait_us(2 * S)
        if fate == "conflict":
            message.held(t, "conflict_resolved", "PROCESSING", worker, "", other)
            message.held(t + MS, "released", "QUEUED", worker)
            return t + 2 * MS
        message.held(t, "conflict_resolution_failed", "PROCESSING", worker, "", other)
        error = ',"error_type":"Conflict","error":"nobody could settle it"'
        message.held(t + MS, "execution_failed", "FAILED", worker, error)
        message.say(t + MS, "dead_letter", "DEAD_LETTER", error)
        names = f'"message_id":"{message.names.message_id}"'
        add_event(message.feed, t + MS, "alert", f',"detail":{{"name":"conflict",{names}}}}}')
        return 0

    # ---- attempts ----------------------------------------------------------------------------------------

    def _errors(self, message: GeneratedMessage, service: str, fate: str) -> tuple[Family | None, int]:
        """The error of a message, and how often it occurs. More often than its retries, it becomes dead."""
        world = self.world
        down = self._outages.get((message.feed.name, service), 0) > self.now_us
        down = down and world.chance() < FAILS_IN_OUTAGE
        if fate not in ("failure", "dead") and not down:
            return None, 0
        n = MAX_RETRIES_ALL if fate == "dead" else 1 + world.bits(1)
        if down:
            self._note_failures(message, service, n)
        families = world.errors[message.type]
        return families[world.below(len(families))], n

    def _note_failures(self, message: GeneratedMessage, service: str, n: int) -> None:
        place = (message.feed.name, service)
        self._failures[place] += n
        if self._failures[place] >= BREAKER_FAILURES:
            self._failures[place] = 0
            ends_us = self.now_us + BREAKER_OPEN_US
            self._broken_until_us[place] = ends_us
            failures = f',"service":"{service}","detail":{{"failures":{BREAKER_FAILURES}}}}}'
            add_event(message.feed, self.now_us, "breaker_opened", failures)
            add_event(message.feed, ends_us, "breaker_closed", f',"service":"{service}"}}')
            self._note_outage(message, ends_us)

    def _note_outage(self, message: GeneratedMessage, ends_us: int) -> None:
        """During an outage an agent dies, its mail bounces, and budgets are shared anew afterwards."""
        agent = f'"agent_id":"{message.agent}"'
        dead = f',"detail":{{{agent},"health":"dead","coordinator":"c1"}}}}'
        add_event(message.feed, self.now_us, "agent_health", dead)
        bounced = f',"error_type":"Bounced","error":"the agent is dead","detail":{{{agent}}}}}'
        add_event(message.feed, self.now_us + MS, "bounced", bounced)
        budgets = f',"detail":{{"provider":"p","model":"{MODELS[0].name}","repaid":0,"moved":0}}}}'
        add_event(message.feed, ends_us, "tokens_rebalanced", budgets)
        message.say(self.now_us, "tokens_refused", "QUEUED", "", ',"detail":{"tokens":100,"tier":0}}')
        receipt = f',"type":"agent_message","detail":{{"recipient":"{message.agent}","receipt":"stored"}}}}'
        add_event(message.feed, self.now_us, "receipt", receipt)

    def _work(
        self,
        message: GeneratedMessage,
        t: int,
        waited_us: int,
        service: str,
        errors: tuple[Family | None, int],
    ) -> int:
        """Generate attempts until one succeeds or none is left; returns when it was completed, or 0."""
        family, n = errors
        if family is not None:
            retries = MAX_RETRIES.get(message.type, MAX_RETRIES_ELSE) if family.retried else 0
            for number in range(min(n, retries + 1)):
                t, error = self.fail(message, t, waited_us, service, family)
                if number == retries:
                    return self._dead_letter(message, t, service, error)
                t, waited_us = self._retry(message, t, family, number)
        return self.complete(message, t, waited_us, service)

    def fail(
        self, message: GeneratedMessage, t: int, waited_us: int, service: str, family: Family
    ) -> tuple[int, str]:
        worker = self.start(message, t, waited_us)
        work_us = self.work_us(message)
        text = msgspec.json.encode(self.world.error(family)).decode()
        error = f',"error_type":"{family.error_type}","error":{text}'
        more = f',"duration_us":{work_us}{error}'
        if service:
            more += f',"service":"{service}"'
        message.held(t + work_us, "execution_failed", "FAILED", worker, more)
        return t + work_us, error

    def _retry(self, message: GeneratedMessage, t: int, family: Family, number: int) -> tuple[int, int]:
        """Delay a retry, with a lower priority."""
        delay_s = min(RETRY_DELAY_S_MAX, family.pause_s << number)
        before = message.priority
        message.priority = min(PRIORITY_LOWEST, before + 1)
        message.say(
            t, "retry_scheduled", "RETRYING", "", f',"detail":{{"from":{before},"delay_s":{delay_s}}}}}'
        )
        t += delay_s * S
        message.say(t, "enqueued", "QUEUED")
        waited_us = self.world.wait_us(WAIT_US[message.priority])
        return t + waited_us, waited_us

    def _dead_letter(self, message: GeneratedMessage, t: int, service: str, error: str) -> int:
        """Make it a dead letter. Some are replayed, and most of those succeed."""
        world = self.world
        message.say(t, "dead_letter", "DEAD_LETTER", error)
        self.respond(message, "error", t + MS, error)
        if world.chance() > REPLAYED:
            return 0
        t += MINUTE + world.wait_us(2 * HOUR)
        message.say(t, "replayed", "QUEUED")
        message.say(t, "enqueued", "QUEUED")
        waited_us = world.wait_us(S)
        t += waited_us
        if world.chance() < REPLAY_SUCCEEDS:
            return self.complete(message, t, waited_us, service)
        worker = self.start(message, t, waited_us)
        message.held(t + 2 * MS, "execution_failed", "FAILED", worker, error)
        message.say(t + 2 * MS, "dead_letter", "DEAD_LETTER", error)
        return 0

    def complete(self, message: GeneratedMessage, t: int, waited_us: int, service: str) -> int:
        world = self.world
        worker = self.start(message, t, waited_us)
        work_us = self.work_us(message)
        beats = min(HEARTBEATS_MAX, work_us // HEARTBEAT_US)
        for number in range(1, beats + 1):
            message.held(t + number * HEARTBEAT_US, "heartbeat", "PROCESSING", worker)
        done_us = t + work_us
        more = f',"duration_us":{work_us}'
        if message.type == "model_call":
            more += self._model_call(message, worker, t, done_us)
        elif service:
            more += f',"service":"{service}"'
        message.held(done_us, "execution_completed", "COMPLETED", worker, more)
        if world.chance() < ACKNOWLEDGED:
            self.respond(message, "acknowledgment", t + 2 * MS)
        if beats:
            self.respond(message, "progress", t + HEARTBEAT_US)
        if message.type != "model_call" or world.chance() > STREAMED:
            self.respond(message, "result", done_us)
        else:
            self._stream(message, done_us)
        return done_us

    def _model_call(self, message: GeneratedMessage, worker: str, t: int, done_us: int) -> str:
        """Reserve tokens, return the unused ones, and compute the exact cost."""
        world = self.world
        model = MODELS[world.below(len(MODELS))]
        tokens_in, tokens_out = 40 + world.bits(11), 20 + world.bits(10)
        left = world.bits(10)
        reserved = f',"detail":{{"tokens":{tokens_in + tokens_out + left},"tier":{message.priority}}}}}'
        named = f',"model":"{model.name}"'
        message.held(t + MS, "tokens_reserved", "PROCESSING", worker, named, reserved)
        if left < BORROWED_BELOW:
            loan = f',"detail":{{"tokens":{left},"tier":{message.priority}}}}}'
            message.held(t + MS, "tokens_borrowed", "PROCESSING", worker, named, loan)
        message.held(
            done_us, "tokens_returned", "PROCESSING", worker, named, f',"detail":{{"tokens":{left}}}}}'
        )
        nano = tokens_in * model.in_nano + tokens_out * model.out_nano
        return (
            f'{named},"tokens_in":{tokens_in},"tokens_out":{tokens_out},'
            f'"cost_usd":{nano // NANOS}.{nano % NANOS:09}'
        )

    # ---- responses ---------------------------------------------------------------------------------------

    def respond(self, request: GeneratedMessage, kind: str, t: int, error: str = "") -> int:
        """Add a response in the queue of the agent; returns when it was delivered."""
        if self.made >= self.limit:
            return t
        world = self.world
        self.made += 1
        names = Names(self._message_id(t), request.names.message_id, request.goal.trace_id)
        queue = f"agent_{request.agent}_responses"
        key = request.names.message_id
        message = GeneratedMessage(
            request.feed,
            request.goal,
            request.agent,
            names,
            kind,
            queue,
            key,
            RESPONSE_PRIORITY,
            world.digits(24),
        )
        more = f'{error},"body_bytes":{64 + world.bits(9)},"recipient":"{request.agent}"'
        message.created(t, more)
        arrived_us = max(t + world.wait_us(3 * MS), request.answered_us + 1)
        request.answered_us = arrived_us
        message.say(arrived_us, "delivered", "DONE", f',"recipient":"{request.agent}"')
        return arrived_us

    def _stream(self, request: GeneratedMessage, t: int) -> None:
        for _ in range(1 + self.world.below(CHUNKS_MAX)):
            t = self.respond(request, "stream_chunk", t) + self.world.wait_us(30 * MS)
        self.respond(request, "stream_complete", t)

    def _follow_up(self, message: GeneratedMessage, done_us: int) -> None:
        """Create the next requests, of its agent or of others."""
        world = self.world
        goal = message.goal
        for _ in range(2 if world.chance() < TWO_CHILDREN else 1):
            if goal.budget[0] <= 0:
                return
            goal.budget[0] -= 1
            agents = goal.org.agents
            agent = message.agent if world.chance() < OWN_AGENT else agents[world.below(len(agents))]
            self._order += 1
            due_us = done_us + world.wait_us(300 * MS)
            heapq.heappush(self._agenda, Due(due_us, self._order, goal, message.names.message_id, agent))


def add_event(feed: GeneratedSource, ts_us: int, kind: str, rest: str) -> None:
    """An event that is about no message."""
    fields = f'"kind":"{kind}","contract":"engine","source":"{feed.name}","schema":1'
    feed.put((ts_us, fields, rest, NOBODY, None, False))
