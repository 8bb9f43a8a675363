"""What the state of the engine says about its workers."""

from postroom.contracts.engine.cells import WorkerInfo
from postroom.contracts.engine.inspection import promoted_share


def test_promoted_claims_ask_for_more_workers_only_while_messages_wait() -> None:
    workers = {"w": WorkerInfo(0, 0, claims=4, promoted=1), "x": WorkerInfo(0, 0)}
    assert promoted_share(workers, depth=3) == 0.25
    assert promoted_share(workers, depth=0) == 0.0
    assert promoted_share({}, depth=3) == 0.0
