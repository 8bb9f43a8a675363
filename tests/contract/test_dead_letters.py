"""What `engine.dlq` promises about a replay and a purge of many dead letters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from postroom import Handle, Policy
from postroom.calls.fields import REPLAYED_NAMED_MAX
from postroom.engine.commits import Commits
from postroom.engine.dlq import CHANGED_A_COMMIT_MAX, LOOKED_A_READ, DeadLetters
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, Unavailable, UnknownTask, ValidationError
from postroom.message import Envelope
from tests.engines import EngineUnderTest

T = TypeVar("T")


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'queue.db'}"
    world = EngineUnderTest(url, Policy())
    yield world
    world.close()


def failing(world: EngineUnderTest, service: str = "", **kinds: BaseException) -> None:
    """Handlers that fail, by type."""

    def register(kind: str, error: BaseException) -> None:
        @world.engine.handler(kind, service=service)
        async def fail(_message: Any, _ctx: Any) -> None:
            raise error

    for kind, error in kinds.items():
        register(kind, error)


def dead(world: EngineUnderTest, count: int, **fields: Any) -> list[Handle]:
    handles = world.submit_many(count, **fields)
    while world.run(slots=100):
        pass
    return handles


class CountedCommits(Commits):
    """Notes how many messages each commit queues, and fails after the first `good` ones."""

    def __init__(self, world: EngineUnderTest, good: int = 1_000) -> None:
        super().__init__(world.engine.store, world.engine.policy)
        self._world = world
        self._good = good
        self.sizes: list[int] = []

    async def write(self, work: Callable[[Operations], T], *, makes_room: bool = False) -> T:
        if len(self.sizes) == self._good:
            raise Unavailable("the disk is full")
        queued = self._queued()
        result = await super().write(work, makes_room=makes_room)
        self.sizes.append(self._queued() - queued)
        return result

    def _queued(self) -> int:
        return self._world.engine.store.count()["org:acme"].get("QUEUED", 0)


@pytest.mark.statement("dlq-replay-all")
def test_replay_takes_every_dead_letter_that_matches_in_commits_of_bounded_size(
    world: EngineUnderTest,
) -> None:
    failing(world, tool_call=ValidationError("bad"))
    dead(world, LOOKED_A_READ + 120)
    commits = CountedCommits(world)
    done = world.wait(DeadLetters(commits).replay())
    assert (done.replayed, done.refused, done.left) == (LOOKED_A_READ + 120, 0, 0)
    assert (sum(commits.sizes), max(commits.sizes)) == (done.replayed, CHANGED_A_COMMIT_MAX)
    assert len(done.message_ids) == min(done.replayed, REPLAYED_NAMED_MAX)
    commits.close()


@pytest.mark.statement("dlq-replay-all")
def test_limit_leaves_the_rest_and_says_how_many(world: EngineUnderTest) -> None:
    failing(world, tool_call=ValidationError("bad"))
    ids = [handle.message_id for handle in dead(world, 7)]
    for dry_run in (True, False):
        done = world.wait(world.engine.dlq.replay(limit=3, dry_run=dry_run))
        assert (done.replayed, done.left, done.message_ids) == (3, 4, ids[:3])
        assert done.reasons == {"beyond the limit of 3": 4}
    assert world.wait(world.engine.dlq.purge(limit=1)) == ids[3:4]
    assert world.wait(world.engine.dlq.purge(after=ids[4])) == ids[5:]
    with pytest.raises(InvalidMessage, match="limit must be from 1"):
        world.wait(world.engine.dlq.replay(limit=0))


def test_dead_letters_that_cannot_run_are_refused_with_their_reason(world: EngineUnderTest) -> None:
    failing(world, tool_call=ValidationError("bad"))
    damaged = Envelope(queue="org:acme", payload=b"\xffnot json", type="tool_call")
    world.engine.store.write(lambda transaction: transaction.insert([damaged]))
    [good] = dead(world, 1)
    done = world.wait(world.engine.dlq.replay())
    assert (done.message_ids, done.refused, done.left) == ([good.message_id], 1, 0)
    assert done.reasons == {"its bytes cannot be decoded": 1}


def test_goal_agent_service_and_failure_choose_dead_letters(world: EngineUnderTest) -> None:
    failing(world, service="slack", tool_call=ValidationError("no channel Ops"))
    failing(world, model_call=ValidationError("bad prompt"))
    [slack] = dead(world, 1, agent_id="ada", goal_id="trip")
    [named] = dead(world, 1, type="model_call", service="vertex")
    dlq = world.engine.dlq
    chosen: list[tuple[dict[str, Any], Handle]] = [
        ({"goal_id": "trip"}, slack),
        ({"agent_id": "ada"}, slack),
        ({"service": "slack"}, slack),  # that of the handler; the message names none
        ({"service": "vertex"}, named),
        ({"failure": "CHANNEL ops"}, slack),
        ({"failure": "validationerror: bad"}, named),
    ]
    for filters, handle in chosen:
        assert [one.message_id for one in world.wait(dlq.list(**filters))] == [handle.message_id]
        done = world.wait(dlq.replay(dry_run=True, **filters))
        assert (done.message_ids, done.left) == ([handle.message_id], 0)
    assert world.wait(dlq.replay(agent_id="ada", service="vertex")).replayed == 0
    assert world.wait(dlq.replay(service="slack")).replayed == 1
    assert (world.state(slack), world.state(named)) == ("QUEUED", "DEAD_LETTER")


def test_replay_keeps_what_is_queued_when_a_later_commit_fails(world: EngineUnderTest) -> None:
    failing(world, tool_call=ValidationError("bad"))
    dead(world, CHANGED_A_COMMIT_MAX + 5)
    commits = CountedCommits(world, good=1)
    done = world.wait(DeadLetters(commits).replay())
    assert (done.replayed, done.left) == (CHANGED_A_COMMIT_MAX, 5)
    assert done.reasons == {"the disk is full": 5}
    with pytest.raises(Unavailable):
        world.wait(DeadLetters(commits).replay())
    commits.close()


def test_nothing_is_replayed_when_one_of_the_named_ids_is_unknown(world: EngineUnderTest) -> None:
    failing(world, tool_call=ValidationError("bad"))
    [letter] = dead(world, 1)
    with pytest.raises(UnknownTask):
        world.wait(world.engine.dlq.replay([letter.message_id, "nobody"]))
    assert world.state(letter) == "DEAD_LETTER"


@pytest.mark.parametrize("filters", [{"limit": "x"}, {"limit": -1}, {"orgid": "zen"}, {"org_id": "\ud800"}])
def test_filter_that_does_not_fit_changes_nothing_also_beside_ids(
    world: EngineUnderTest, filters: dict[str, Any]
) -> None:
    failing(world, tool_call=ValidationError("bad"))
    ids = [handle.message_id for handle in dead(world, 2)]
    for chosen in (None, ids):
        for change in (world.engine.dlq.replay, world.engine.dlq.purge):
            with pytest.raises(InvalidMessage):
                world.wait(change(chosen, **filters))
    assert len(world.wait(world.engine.dlq.list())) == 2
