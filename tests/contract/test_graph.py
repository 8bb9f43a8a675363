"""What the knowledge graph promises, in the ledger and in FalkorDB."""

import uuid
from typing import Any

import pytest

from postroom import Advice, Adviser, Engine
from postroom.errors import GraphUnavailable, InvalidMessage, InvalidSetting, UnknownGoal, UnknownNode
from postroom.goals.graph import branches
from postroom.goals.graph.branches import BRANCHES, HISTORY, HISTORY_AT, MERGED, STAGED, UNDO
from postroom.goals.graph.falkordb import FalkorGraph, _FalkorCells
from tests.engines import soon
from tests.falkordbservers import FalkorServer
from tests.graphplaces import database, engine, falkordb, place, postgres, run
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "engine", "falkordb", "place", "postgres"]  # fixtures


def test_a_node_has_properties_edges_and_a_version(engine: Any) -> None:
    async def story() -> None:
        main = engine.graph.main()
        assert await main.get("paris") is None
        await main.save("paris", {"population": 2, "tags": ["city"]}, [("in", "france")])
        node = await main.update("paris", {"population": 3, "tags": None, "mayor": {"name": "x"}})
        assert node.version == 2
        found = await main.get("paris")
        assert found.properties == {"population": 3, "mayor": {"name": "x"}}
        assert await main.neighbours("paris") == [("in", "france")]
        await main.save("paris", {"population": 4})
        assert (await main.get("paris")).properties == {"population": 4}

    run(engine, story())


@pytest.mark.parametrize("scope", branches.SCOPES)
def test_a_null_property_is_absent_after_a_save_and_after_an_update(engine: Any, scope: Any) -> None:
    """A null inside a value stays what it is."""

    async def story() -> None:
        await engine.goals.start("acme", "g")
        for view in (engine.graph.main("acme"), engine.graph.branch("g", "acme")):
            for write in (view.save, view.update):
                await view.save("a", {"x": 1, "y": 2}, scope=scope)
                node = await write("a", {"x": None, "y": 2, "never": None, "z": {"in": None}}, scope=scope)
                assert node.properties == {"y": 2, "z": {"in": None}}
                assert (await view.get("a")).properties == node.properties

    run(engine, story())


@pytest.mark.statement("branch-isolated", "read-after-write")
def test_a_branch_sees_its_own_changes_over_a_pinned_version_of_main(engine: Any) -> None:
    async def story() -> None:
        main = engine.graph.main()
        await main.save("a", {"x": 1})
        await engine.goals.start("acme", "g1")
        await engine.goals.start("acme", "g2")
        one, two = engine.graph.branch("g1"), engine.graph.branch("g2")
        await one.save("a", {"x": 2})
        await one.save("new", {"y": 1}, [("of", "a")])
        assert (await one.get("a")).properties == {"x": 2}
        assert (await one.get("a")).version == 2
        assert await one.neighbours("new") == [("of", "a")]
        assert (await two.get("a")).properties == {"x": 1}
        assert await two.get("new") is None
        assert await main.get("new") is None
        await main.save("a", {"x": 9})
        await main.save("later", {})
        await main.save("a", {"x": 10})
        assert (await two.get("a")).properties == {"x": 1}
        assert await two.get("later") is None
        assert (await one.get("a")).properties == {"x": 2}

    run(engine, story())


@pytest.mark.statement("branch-scopes", "branch-no-scratchpad")
def test_scopes_decide_what_the_end_of_a_goal_keeps(engine: Any) -> None:
    async def story() -> None:
        await engine.goals.start("acme", "g")
        branch, main = engine.graph.branch("g"), engine.graph.main()
        await branch.save("thought", {"t": 1}, scope="GOAL_LOCAL")
        await branch.save("fact", {"f": 1})
        await branch.save("alarm", {"a": 1}, scope="IMMEDIATE")
        await branch.update("fact", {"draft": 2}, scope="GOAL_LOCAL")
        assert (await main.get("alarm")).properties == {"a": 1}
        assert (await branch.get("alarm")).properties == {"a": 1}
        assert (await branch.get("fact")).properties == {"f": 1, "draft": 2}
        status = await engine.goals.complete("g")
        assert status.state == "COMPLETED"
        assert await main.get("thought") is None
        assert (await main.get("fact")).properties == {"f": 1}
        assert (await main.get("alarm")).properties == {"a": 1}

    run(engine, story())


@pytest.mark.statement("branch-discarded")
def test_a_failed_goal_leaves_main_as_it_was(engine: Any) -> None:
    async def story() -> None:
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").save("fact", {"f": 1})
        assert (await engine.goals.fail("g", "no use")).state == "FAILED"
        assert await engine.graph.main().get("fact") is None
        with pytest.raises(UnknownGoal):
            await engine.graph.branch("g").save("fact", {"f": 2})

    run(engine, story())


def test_a_merge_takes_the_changes_of_both_sides(engine: Any) -> None:
    async def story() -> None:
        main = engine.graph.main()
        await main.save("a", {"x": 1, "y": 1, "z": 1}, [("k", "1")])
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").update("a", {"x": 2, "z": None}, edges=[("k", "2")])
        await main.update("a", {"y": 3}, edges=[("k", "3")])
        await engine.goals.complete("g")
        merged = await main.get("a")
        assert merged.properties == {"x": 2, "y": 3}
        assert await main.neighbours("a") == [("k", "1"), ("k", "2"), ("k", "3")]

    run(engine, story())


class Deciding(Adviser):
    """Takes one side of every merge, and keeps the questions."""

    def __init__(self, side: Any, confidence: Any = 1.0) -> None:
        self.side, self.confidence = side, confidence
        self.questions: list[Any] = []

    async def advise(self, question: Any) -> Any:
        self.questions.append(question)
        return Advice(self.side, self.confidence, "it said so")


@pytest.mark.statement("branch-merge")
@pytest.mark.parametrize(("side", "value"), [("branch", 2), ("main", 3), ("base", 1)])
def test_a_merge_conflict_goes_to_the_adviser_with_both_sides_and_the_base(
    place: Any, side: Any, value: Any
) -> None:
    adviser = Deciding(side)

    async def story(engine: Any) -> None:
        main = engine.graph.main()
        await main.save("a", {"x": 1})
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").update("a", {"x": 2})
        await main.update("a", {"x": 3})
        assert (await engine.goals.complete("g")).state == "COMPLETED"
        assert (await main.get("a")).properties == {"x": value}

    with Engine.open(**place, adviser=adviser) as engine:
        run(engine, story(engine))
    [question] = adviser.questions
    assert question.kind == "merge"
    assert {"branch", "main", "base"} == set(question.options)
    facts = question.facts
    assert (facts["base"], facts["branch"], facts["main"]) == (1, 2, 3)


def test_a_merge_that_a_person_decides_goes_on_after_the_answer(place: Any) -> None:
    async def story(engine: Any) -> None:
        main = engine.graph.main()
        await main.save("a", {"x": 1, "y": 1})
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").update("a", {"x": 2, "y": 2})
        await main.update("a", {"x": 3})
        waiting = await engine.goals.complete("g")
        assert waiting.state == "MERGING"
        [decision] = await engine.decisions.list()
        assert [decision.decision_id] == waiting.decisions
        assert (await main.get("a")).properties == {"x": 3, "y": 1}
        await engine.decisions.answer(decision.decision_id, "branch")
        assert (await engine.goals.complete("g")).state == "COMPLETED"
        assert (await main.get("a")).properties == {"x": 2, "y": 2}

    with Engine.open(**place, adviser=Deciding("main", confidence=0.1)) as engine:
        run(engine, story(engine))


def test_what_does_not_fit_is_refused_with_a_one_line_error(engine: Any) -> None:
    async def story() -> None:
        await engine.goals.start("acme", "g")
        branch = engine.graph.branch("g")
        for bad in (
            branch.save("", {}), branch.save("a\x1fb", {}), branch.save(1, {}), branch.save("a", []),
            branch.save("a", {"x": "y" * 70_000}), branch.save("a", {}, [("k",)]),
            branch.save("a", {}, scope="LATER"), branch.save("a", {"x": object()}),
            branch.save("a", {}, [("k", str(n)) for n in range(1_001)]),
        ):  # fmt: skip
            with pytest.raises(InvalidMessage):
                await bad
        with pytest.raises(UnknownNode, match="there is no node 'a'"):
            await branch.update("a", {"x": 1})

    run(engine, story())


@pytest.mark.statement("checkpoint-any")
def test_undoing_restores_every_version_of_a_branch(engine: Any) -> None:
    async def story() -> None:
        await engine.graph.main().save("a", {"x": 0})
        await engine.goals.start("acme", "g")
        branch = engine.graph.branch("g")
        seen = []
        for number in range(1, 6):
            await branch.save("a", {"x": number})
            await branch.save(f"n{number}", {"y": number})
            seen.append((await branch.get("a")).properties)
        for number in range(5, 0, -1):
            await engine.graph.place.write(
                lambda cells, version=2 * number: branches.undo_to(cells, "g", version)
            )
            assert (await branch.get("a")).properties == seen[number - 1]
            assert (await branch.get(f"n{number}")) is not None
            assert await branch.get(f"n{number + 1}") is None

    run(engine, story())


def test_checkpoints_after_a_rollback_are_of_the_branch_as_it_is_then(engine: Any) -> None:
    async def story() -> None:
        await engine.goals.start("acme", "g")
        branch = engine.graph.branch("g")
        first = await engine.goals.checkpoint("g")
        for number in range(5):
            await branch.save("a", {"x": number})
        await engine.goals.rollback(first.checkpoint_id)
        assert await branch.get("a") is None
        await branch.save("a", {"x": 10})
        second = await engine.goals.checkpoint("g")
        await branch.save("a", {"x": 11})
        await engine.goals.rollback(second.checkpoint_id)
        assert (await branch.get("a")).properties == {"x": 10}
        await engine.goals.complete("g")
        assert (await engine.graph.main().get("a")).properties == {"x": 10}

    run(engine, story())


def test_the_end_of_the_last_branch_leaves_nothing_behind(engine: Any) -> None:
    async def story() -> None:
        main = engine.graph.main()
        await main.save("a", {"x": 0})
        for goal_id in ("g1", "g2"):
            await engine.goals.start("acme", goal_id)
        await engine.graph.branch("g1").save("b", {})
        for number in range(3):
            await main.save("a", {"x": number})
        await engine.goals.complete("g1")
        assert (await engine.graph.branch("g2").get("a")).properties == {"x": 0}
        await engine.goals.fail("g2")
        await engine.goals.start("acme", "g2")  # it has ended, and does not begin again
        for kind in (BRANCHES, STAGED, UNDO, HISTORY, HISTORY_AT, MERGED):
            left = await engine.graph.place.read(lambda cells, kind=kind: kind.all(cells))
            assert left == [], kind.name

    run(engine, story())


def test_writers_at_the_same_time_lose_nothing(engine: Any) -> None:
    import asyncio

    async def story() -> None:
        await engine.goals.start("acme", "g")
        branch = engine.graph.branch("g")
        await asyncio.gather(*(branch.save(f"n{number}", {"x": number}) for number in range(8)))
        found = [await branch.get(f"n{number}") for number in range(8)]
        assert [node.properties["x"] for node in found] == list(range(8))

    run(engine, story())


@pytest.mark.statement("graph-falkordb")
def test_falkordb_holds_entities_for_queries_in_cypher(falkordb: Any) -> None:
    from falkordb import FalkorDB  # type: ignore[import-untyped]

    name = f"g{uuid.uuid4().hex}"
    with Engine.open("memory://", graph=f"{falkordb.url}/{name}") as engine:
        run(engine, engine.graph.main().save("paris", {"population": 2}, [("in", "france")]))
    graph = FalkorDB(host="127.0.0.1", port=falkordb.port).select_graph(name)
    query = "MATCH (a:Entity {id: 'paris'})-[e:EDGE]->(b) RETURN a.population, e.label, b.id"
    assert graph.query(query).result_set == [[2, "in", "france"]]


def test_every_json_object_can_be_saved_and_read(engine: Any) -> None:
    """Also what would end or change a query in Cypher."""
    names = (
        "",
        "a b",
        "x`y",
        "`}) DETACH DELETE (n) //",
        "a\0b",
        'q"t',
        "é",
        "id",
        "org_id",
        "version",
        "\n",
        "1",
    )
    values: tuple[Any, ...] = (
        "v\0w",
        "'\"\\",
        [1, "\0"],
        [[1], {}],
        {"a": {"b": 1}},
        2**63,
        -(2**64),
        True,
        1e300,
        "",
        [],
        7,
    )
    properties = dict(zip(names, values, strict=True)) | {"last": "\u2028\ud7ff"}

    async def story() -> None:
        main = engine.graph.main("acme")
        for _ in range(2):
            await main.save("n`\"'", properties, [("`", "m`")])
        found = await main.get("n`\"'")
        assert (found.properties, found.version, found.org_id) == (properties, 2, "acme")

    run(engine, story())


def test_a_graph_that_does_not_answer_is_unavailable() -> None:
    with (
        Engine.open("memory://", graph="falkordb://127.0.0.1:1/x") as engine,
        pytest.raises(GraphUnavailable),
    ):
        run(engine, engine.graph.main().get("a"))
    with pytest.raises(InvalidSetting):
        FalkorGraph("redis://127.0.0.1")


# ---- a server that is killed ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def durable(tmp_path_factory: Any) -> Any:
    with FalkorServer(tmp_path_factory.mktemp("durable"), is_durable=True) as server:
        yield server


@pytest.mark.statement("graph-checkpoint")
@pytest.mark.parametrize("point", ["before the commit", "after the commit"])
def test_a_server_killed_in_the_middle_of_a_merge_has_all_of_it_or_nothing(
    durable: FalkorServer, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion is refused, and calling it again completes the merge, once."""
    commit = _FalkorCells.commit

    def killed(cells: Any, expected: int) -> bool:
        if not cells.written.keys() & {(branches.BRANCHES.name, "g")}:
            return commit(cells, expected)
        monkeypatch.undo()
        if point == "after the commit":
            commit(cells, expected)
        durable.kill()
        return commit(cells, expected)  # nobody answers

    async def story(engine: Any) -> None:
        main, branch = engine.graph.main(), engine.graph.branch("g")
        await main.save("n0", {"x": -1})
        await engine.goals.start("acme", "g")
        for number in range(20):
            await branch.save(f"n{number}", {"x": number}, [("next", f"n{number + 1}")])
        monkeypatch.setattr(_FalkorCells, "commit", killed)
        with pytest.raises(GraphUnavailable, match="does not answer"):
            await engine.goals.complete("g")
        assert (await engine.goals.status("g")).state == "MERGING"
        durable.start()
        found = [await main.get(f"n{number}") for number in range(20)]
        merged = [node is not None and node.properties["x"] >= 0 for node in found]
        assert merged == [point == "after the commit"] * 20
        assert (await engine.goals.complete("g")).state == "COMPLETED"
        found = [await main.get(f"n{number}") for number in range(20)]
        assert [node.properties["x"] for node in found] == list(range(20))
        assert [node.version for node in found] == [2] + [1] * 19
        for kind in (BRANCHES, STAGED, UNDO, MERGED):
            assert await engine.graph.place.read(lambda cells, kind=kind: kind.all(cells)) == []

    with Engine.open("memory://", graph=f"{durable.url}/g{uuid.uuid4().hex}") as engine:
        run(engine, story(engine))


def test_a_graph_that_has_lost_a_branch_completes_no_goal(tmp_path: Any) -> None:
    """A server without persistence loses everything when it is restarted: that is not a merge."""

    async def story(engine: Any) -> None:
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").save("fact", {"x": 1})
        server.kill()
        server.start()
        with pytest.raises(GraphUnavailable, match="has lost the branch of goal 'g'"):
            await engine.goals.complete("g")
        assert (await engine.goals.status("g")).state == "MERGING"

    with (
        FalkorServer(tmp_path) as server,
        Engine.open("memory://", graph=f"{server.url}/g") as engine,
    ):
        run(engine, story(engine))


@pytest.mark.statement("type-memory")
def test_memory_messages_work_on_the_branch_of_their_goal(place: Any) -> None:
    async def story(engine: Any) -> None:
        await engine.goals.start("acme", "g")
        worker = asyncio_task(engine)
        fields = {"org_id": "acme", "goal_id": "g"}
        payload = {"node_id": "n", "properties": {"x": 1}, "edges": [["k", "m"]]}
        saved = await engine.submit(type="memory_save", payload=payload, **fields)
        assert (await saved.result(HANG_GUARD_S))["version"] == 1
        changed = await engine.submit(
            type="memory_update", payload={"node_id": "n", "changes": {"x": 2}}, **fields
        )
        await changed.result(HANG_GUARD_S)
        read = await engine.submit(type="memory_retrieve", payload={"node_id": "n"}, **fields)
        assert (await read.result(HANG_GUARD_S))["node"]["properties"] == {"x": 2}
        searched = await engine.submit(type="memory_retrieve", payload={"query": "N"}, **fields)
        found = (await searched.result(HANG_GUARD_S))["nodes"]
        assert "n" in [node["node_id"] for node in found]
        assert await engine.graph.main().get("n") is None
        elsewhere = await engine.submit(type="memory_retrieve", payload={"node_id": "n"}, org_id="acme")
        assert (await elsewhere.result(HANG_GUARD_S))["node"] is None
        await engine.goals.complete("g")
        assert (await engine.graph.main().get("n")).properties == {"x": 2}
        await engine.stop()
        await worker

    with Engine.open(**place) as engine:
        soon(story(engine))


def asyncio_task(engine: Any) -> Any:
    import asyncio

    return asyncio.create_task(engine.run())
