"""The event stream of an agent in pages: a client that reads slowly keeps a bounded amount in memory."""

from typing import Any

import pytest

from postroom import Engine
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.agents.agent import Agent
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.rules.claims import Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.server.routes.agent_handlers import Reached, _stream_page
from postroom.server.routes.event_streams import STREAM_PAGE_BYTES_MAX

REQUESTS = 6
ANSWER_BYTES = STREAM_PAGE_BYTES_MAX // 2


@pytest.fixture
def engine() -> Any:
    opened = Engine.open("memory://")
    yield opened
    opened.close()


def answered(engine: Engine) -> Agent:
    """An agent with answers that it has not fetched."""
    core, policy = engine.core, engine.policy

    def work(transaction: Any) -> Agent:
        agents = AgentOperations(transaction, policy)
        entry = agents.register("acme", "planner", "c1")
        for _ in range(REQUESTS):
            message = {"type": "tool_call", "org_id": "acme", "agent_id": "planner", "payload": {}}
            prepared = core.registry.prepare(message, policy, transaction.wall_us)
            agents.request("planner", entry.session, prepared)
        return Agent(None, "acme", "planner", entry.session)  # type: ignore[arg-type]

    agent = engine.store.write(work)

    def finish(transaction: Any) -> None:
        for claimed in Claims(transaction, policy, "w", Rotation(), {}).claim(REQUESTS):
            record = claimed.record
            result = b'"%s"' % (b"x" * ANSWER_BYTES)
            done = Outcome(
                kind="completed",
                message_id=record.message_id,
                lease=record.lease,
                result=result,
                body=claimed.body,
            )
            Operations(transaction, policy).finish([done])

    engine.store.write(finish)
    return agent


def test_a_page_of_a_stream_has_a_limit(engine: Engine) -> None:
    agent, reached, pages = answered(engine), Reached(), list[bytes]()

    def page(at: Reached) -> tuple[bytes, Reached | None]:
        return engine.store.read(
            lambda transaction: _stream_page(AgentOperations(transaction, engine.policy), agent, at, 1)
        )

    while True:
        data, after = page(reached)
        assert after is not None
        if after == reached:
            break
        pages.append(data)
        reached = after
    assert b"".join(pages).count(b"event: result") == REQUESTS
    assert b"".join(pages).count(b"event: open") == 1
    assert len(pages) >= REQUESTS // 2
    assert max(map(len, pages)) < 5 * ANSWER_BYTES
