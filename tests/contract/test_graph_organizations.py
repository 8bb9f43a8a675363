"""Organizations neither see, change nor block each other's nodes, and nodes of earlier versions are kept."""

import asyncio
import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom import Advice, Adviser, Engine
from postroom.errors import InvalidMessage, InvalidName, MessageFailed, UnknownGoal, UnknownNode
from postroom.goals import builtin_handlers
from postroom.goals.graph.branches import HISTORY, HISTORY_AT
from postroom.testing import ManualClock
from tests.engines import soon
from tests.graphplaces import database, engine, falkordb, place, postgres, run
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "engine", "falkordb", "place", "postgres"]  # fixtures

GOLDEN = Path(__file__).parents[1] / "data" / "store-v0006.db"


class Undecided(Adviser):
    """Leaves every question to a person."""

    async def advise(self, question: Any) -> Any:
        return Advice(question.default, 0.0, "perhaps")


def test_an_organization_sees_its_own_nodes_and_shared_ones(engine: Any) -> None:
    async def story() -> None:
        acme, bolt = engine.graph.main("acme"), engine.graph.main("bolt")
        await acme.save("secret", {"x": 1})
        await engine.graph.main().save("shared", {"x": 1})
        assert await bolt.get("secret") is None
        assert (await bolt.get("shared")).properties == {"x": 1}
        await engine.goals.start("bolt", "g")
        branch = engine.graph.branch("g")
        assert await branch.get("secret") is None
        assert (await branch.get("shared")).properties == {"x": 1}
        with pytest.raises(UnknownNode):
            await bolt.update("secret", {"x": 2})
        with pytest.raises(UnknownNode):
            await branch.update("secret", {"x": 2})
        await bolt.update("shared", {"x": 2})
        assert (await acme.get("shared")).properties == {"x": 2}

    run(engine, story())


def test_the_same_node_id_in_two_organizations_is_two_nodes(place: Any) -> None:
    """Both goals complete without a question, and no version tells that there is another node."""

    async def story(engine: Any) -> None:
        for org_id in ("acme", "bolt"):
            await engine.goals.start(org_id, f"{org_id}-goal")
            await engine.graph.branch(f"{org_id}-goal").save("plan", {"of": org_id}, [("to", org_id)])
        for org_id in ("acme", "bolt"):
            status = await engine.goals.complete(f"{org_id}-goal")
            assert (status.state, status.decisions) == ("COMPLETED", [])
        for org_id in ("acme", "bolt"):
            node = await engine.graph.main(org_id).get("plan")
            assert (node.properties, node.version, node.org_id) == ({"of": org_id}, 1, org_id)
            assert await engine.graph.main(org_id).neighbours("plan") == [("to", org_id)]
        assert await engine.graph.main("").get("plan") is None
        await engine.graph.main("bolt").save("plan", {"of": "bolt", "x": 2})
        assert (await engine.graph.main("acme").get("plan")).version == 1
        for call in (engine.graph.main().get("plan"), engine.graph.main().save("plan", {})):
            with pytest.raises(InvalidMessage, match="several organizations have a node 'plan'"):
                await call

    with Engine.open(**place, adviser=Undecided()) as engine:
        run(engine, story(engine))


def test_application_finds_a_node_that_only_one_organization_has(engine: Any) -> None:
    async def story() -> None:
        main = engine.graph.main()
        await engine.graph.main("acme").save("fact", {"x": 1})
        assert (await main.get("fact")).org_id == "acme"
        await main.update("fact", {"x": 2})
        assert (await engine.graph.main("acme").get("fact")).properties == {"x": 2}
        await engine.graph.main("").save("fact", {"x": 3})  # shared: nothing of an organization is changed
        assert (await main.get("fact")).properties == {"x": 3}
        assert (await engine.graph.main("acme").get("fact")).properties == {"x": 2}
        assert (await engine.graph.main("bolt").get("fact")).properties == {"x": 3}

    run(engine, story())


def test_branch_facts_stay_private_when_their_node_is_shared_later(engine: Any) -> None:
    async def story() -> None:
        await engine.goals.start("acme", "g")
        await engine.graph.branch("g").save("salary", {"eur": 9})
        await engine.graph.main("").save("salary", {"about": "money"})
        await engine.goals.complete("g")
        assert (await engine.graph.main("acme").get("salary")).properties == {"eur": 9}
        assert (await engine.graph.main("bolt").get("salary")).properties == {"about": "money"}

    run(engine, story())


@pytest.mark.statement("branch-visibility")
def test_a_goal_without_a_branch_reads_main_as_its_organization_sees_it(engine: Any) -> None:
    async def story() -> None:
        await engine.graph.main("acme").save("secret", {"x": 1})
        await engine.graph.main().save("shared", {"x": 2})
        for goal_id, org_id in (("a", "acme"), ("b", "bolt")):
            await engine.goals.start(org_id, goal_id)
            await engine.goals.complete(goal_id)
        graph = engine.graph
        assert (await graph.branch("a").get("secret")).properties == {"x": 1}
        assert await graph.branch("b").get("secret") is None
        assert await graph.branch("never-started").get("secret") is None
        assert (await graph.branch("never-started").get("shared")).properties == {"x": 2}
        assert (await graph.branch("never-started", "acme").get("secret")).properties == {"x": 1}
        await engine.goals.start("acme", "live")
        for call in (
            graph.branch("a", "bolt").get("shared"), graph.branch("live", "bolt").get("shared"),
            graph.branch("live", "bolt").save("n", {}), graph.branch("live", "bolt").update("shared", {}),
        ):  # fmt: skip
            with pytest.raises(UnknownGoal):
                await call
        assert (await graph.branch("live", "acme").save("n", {})).version == 1

    run(engine, story())


@pytest.mark.parametrize("bad", ["acme\x1fplan", " ", "a/b", "\0", 7, [], "x" * 1_000])
def test_what_is_not_a_name_of_an_organization_is_refused(bad: Any) -> None:
    with Engine.open("memory://") as engine:
        with pytest.raises(InvalidName):
            engine.graph.main(bad)
        with pytest.raises(InvalidName):
            engine.graph.branch("g", bad)


def test_memory_messages_of_another_organization_reach_nothing(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every goal_id that a sender may name, by node id and by query."""
    monkeypatch.setattr(builtin_handlers, "LOOKED_MAX", 3)  # nodes of others do not count

    async def story(engine: Any) -> None:
        worker = asyncio.create_task(engine.run())
        await engine.goals.start("acme", "a")
        await engine.goals.start("bolt", "b")
        for number in range(5):
            await engine.graph.main("acme").save(f"secret{number}", {"word": "sesame"})
        await engine.graph.branch("a").save("draft", {"word": "sesame"})

        async def result(kind: str, goal_id: Any, **payload: Any) -> Any:
            fields = {"org_id": "bolt", "max_retries": 0} | ({"goal_id": goal_id} if goal_id else {})
            return await (await engine.submit(type=kind, payload=payload, **fields)).result(HANG_GUARD_S)

        for goal_id in ("a", "b", "none", None):
            for node_id in ("secret0", "draft", "goal:a"):
                assert (await result("memory_retrieve", goal_id, node_id=node_id))["node"] is None
                if goal_id == "b":  # recovery would begin
                    continue
                with pytest.raises(MessageFailed, match="there is no node"):
                    await result("memory_update", goal_id, node_id=node_id, changes={"word": "x"})
            assert await result("memory_retrieve", goal_id, query="sesame") == {"nodes": []}
        for goal_id, version in (("a", 1), ("b", 1), ("none", 2), (None, 2)):  # "none" gets a branch
            saved = await result("memory_save", goal_id, node_id="secret0", properties={"mine": str(goal_id)})
            assert (saved["version"], saved["properties"]) == (version, {"mine": str(goal_id)})
        found = await result("memory_retrieve", None, query="secret")
        assert [node["node_id"] for node in found["nodes"]] == ["secret0"]
        assert (await engine.goals.complete("b")).state == "COMPLETED"
        assert (await engine.graph.main("acme").get("secret0")).properties == {"word": "sesame"}
        assert (await engine.graph.branch("a").get("draft")).properties == {"word": "sesame"}
        assert (await engine.goals.complete("a")).state == "COMPLETED"
        await engine.stop()
        await worker

    with Engine.open(**place) as engine:
        soon(story(engine))


def test_falkordb_keeps_the_entities_of_organizations_apart(falkordb: Any) -> None:
    from falkordb import FalkorDB  # type: ignore[import-untyped]

    name = f"g{uuid.uuid4().hex}"

    async def story(engine: Any) -> None:
        await engine.graph.main("").save("italy", {"x": 1})
        for org_id in ("acme", "bolt"):
            main = engine.graph.main(org_id)
            await main.save("rome", {"of": org_id}, [("in", "italy"), ("by", "train")])

    with Engine.open("memory://", graph=f"{falkordb.url}/{name}") as engine:
        run(engine, story(engine))
    graph = FalkorDB(host="127.0.0.1", port=falkordb.port).select_graph(name)
    found = "a.org_id, a.of, b.id, b.org_id"
    query = f"MATCH (a:Entity {{id: 'rome'}})-[:EDGE]->(b) RETURN {found} ORDER BY a.of, b.id"
    assert graph.query(query).result_set == [
        [org_id, org_id, *target]
        for org_id in ("acme", "bolt")
        for target in (["italy", ""], ["train", org_id])
    ]


# ---- nodes of earlier versions -------------------------------------------------------------------------


def golden_cells(prefix: str) -> list[tuple[str, str, bytes]]:
    with closing(sqlite3.connect(f"file:{GOLDEN}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT kind, key, value FROM cells WHERE kind GLOB ?", [f"{prefix}.*"])
        return [(kind, key, bytes(value)) for kind, key, value in rows]


def in_sqlite(request: Any, folder: Path) -> dict[str, str]:
    shutil.copy(GOLDEN, folder / "queue.db")
    return {"url": f"sqlite:///{folder}/queue.db"}


def in_falkordb(request: Any, folder: Path) -> dict[str, str]:
    from falkordb import FalkorDB

    server, name = request.getfixturevalue("falkordb"), f"g{uuid.uuid4().hex}"
    graph = FalkorDB(host="127.0.0.1", port=server.port).select_graph(name)
    cells = [
        {"id": f"{kind}\x1f{key}", "kind": kind, "key": key, "value": value.decode()}
        for kind, key, value in golden_cells("graph")
    ]
    graph.query("UNWIND $cells AS c CREATE (n:PostroomCell) SET n = c", {"cells": cells})
    graph.query(
        "CREATE (:Entity {id: 'rome', org_id: '', version: 2})-[:EDGE {label: 'in'}]->"
        "(:Entity {id: 'italy'}), "
        "(:Entity {id: 'plan', org_id: 'acme', version: 2})-[:EDGE {label: 'see'}]->"
        "(:Entity {id: 'price', org_id: 'bolt', version: 1})"
    )
    return {**in_sqlite(request, folder), "graph": f"{server.url}/{name}"}


@pytest.mark.parametrize("earlier", [in_sqlite, in_falkordb])
def test_nodes_of_earlier_versions_are_kept(request: Any, tmp_path: Path, earlier: Any) -> None:
    """The file has a shared node, nodes of two organizations, and a branch over old versions of them."""

    async def story(engine: Any) -> None:
        graph = engine.graph
        acme, bolt = graph.main("acme"), graph.main("bolt")
        rome = await graph.main().get("rome")
        assert (rome.properties, rome.version, rome.org_id) == ({"nights": 2}, 2, "")
        assert await graph.main().neighbours("rome") == [("in", "europe"), ("in", "italy")]
        assert (await acme.get("plan")).properties == {"by": "plane"}
        assert (await bolt.get("price")).properties == {"eur": 9}
        assert (await graph.main().get("price")).org_id == "bolt"
        assert [await acme.get("price"), await bolt.get("plan")] == [None, None]
        assert (await bolt.get("goal:stay")).properties["state"] == "FAILED"
        branch = graph.branch("trip")
        assert (await branch.get("rome")).properties == {"nights": 3}
        assert (await branch.get("plan")).properties == {"by": "train", "org_id": "bolt"}
        assert [await branch.get("later"), await branch.get("price")] == [None, None]
        await branch.save("price", {"eur": 1})
        assert (await engine.goals.complete("trip")).state == "COMPLETED"
        assert (await graph.main().get("rome")).properties == {"nights": 3}
        assert [(await one.get("price")).properties for one in (acme, bolt)] == [{"eur": 1}, {"eur": 9}]
        for kind in (HISTORY.name, HISTORY_AT.name, "graph.main", "graph.history", "graph.history_at"):
            assert await graph.place.read(lambda cells, kind=kind: cells.cells.page(kind)) == []

    opened = earlier(request, tmp_path)
    for _ in range(2):  # the second opening finds nothing to move
        with Engine.open(**opened, clock=ManualClock()) as engine:
            run(engine, engine.graph.main().get("rome"))
    with Engine.open(**opened, clock=ManualClock()) as engine:
        run(engine, story(engine))
    if "graph" in opened:
        check_entities(request.getfixturevalue("falkordb").port, opened["graph"].rpartition("/")[2])


def check_entities(port: int, name: str) -> None:
    """No entity is without an organization, and no edge leads into another one."""
    from falkordb import FalkorDB

    graph = FalkorDB(host="127.0.0.1", port=port).select_graph(name)
    assert graph.query("MATCH (e:Entity) WHERE e.org_id IS NULL RETURN e.id").result_set == []
    edges = graph.query("MATCH (a:Entity)-[:EDGE]->(b) RETURN a.id, b.id, b.org_id ORDER BY b.id").result_set
    assert edges == [["rome", "europe", ""], ["rome", "italy", ""]]
