"""What the state of the engine says about its workers."""

import pytest

from postroom.engine.inspection import promoted_share, status_of
from postroom.engine.rules.cells import WorkerInfo
from postroom.engine.rules.operations import Operations
from tests.engines import EngineUnderTest


@pytest.mark.statement("workers-scale-promotion")
def test_promoted_claims_ask_for_more_workers_only_while_messages_wait() -> None:
    workers = {"w": WorkerInfo(0, 0, claims=4, promoted=1), "x": WorkerInfo(0, 0)}
    assert promoted_share(workers, depth=3) == 0.25
    assert promoted_share(workers, depth=0) == 0.0
    assert promoted_share({}, depth=3) == 0.0


def test_status_without_idle_organizations_reads_those_that_wait() -> None:
    world = EngineUnderTest("memory://")
    try:
        world.submit(org_id="idle")
        world.complete(world.claim())
        world.submit(org_id="acme")
        policy = world.engine.policy
        found = world.engine.store.read(
            lambda transaction: status_of(Operations(transaction, policy), policy, with_idle=False)
        )
        assert [*found.organizations] == ["acme"]
        assert found.health_facts() == world.wait(world.engine.status()).health_facts()
    finally:
        world.close()


def test_status_for_an_organization_looks_at_no_other() -> None:
    world = EngineUnderTest("memory://")
    try:
        world.submit(org_id="acme")
        world.submit(org_id="initech")
        policy = world.engine.policy

        def names(org_id: str | None) -> list[str]:
            return world.engine.store.read(
                lambda found: [*status_of(Operations(found, policy), policy, org_id).organizations]
            )

        assert names("acme") == ["acme"]
        assert names("nobody") == []
        assert sorted(names(None)) == ["acme", "initech"]
    finally:
        world.close()
