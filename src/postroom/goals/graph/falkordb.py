"""A knowledge graph in FalkorDB.

Rule 1: a write reads, then commits with one query. One query of FalkorDB is atomic, and it does nothing when
        another writer has committed since the first read; then the write runs again.
Rule 2: every node of main is also an `:Entity` with its properties and edges, for queries in Cypher. `org_id`
        and `id` identify it. An edge leads to the entity that the organization sees.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar
from urllib.parse import unquote

import msgspec

from postroom.engine.rules.cells import SCAN_MAX, SEPARATOR, HasCells, Kind, joined
from postroom.errors import GraphUnavailable, InvalidSetting, shown_address
from postroom.goals.graph.branches import HISTORY, HISTORY_AT, MAIN, SHARED, Node, Old, put_node
from postroom.goals.graph.graph import Graph
from postroom.stores.base import Cells
from postroom.system.addresses import split_address

T = TypeVar("T")

TRIES_MAX: Final = 20
TIMEOUT_S: Final = 10.0
PORT: Final = 6379
NAME: Final = "postroom"
INTEGER_END: Final = 2**63
_decode_node = msgspec.json.Decoder(Node).decode

_HEAD: Final = "MERGE (h:PostroomHead) ON CREATE SET h.revision = 0 RETURN h.revision"
_GET: Final = "MATCH (c:PostroomCell {id: $id}) RETURN c.value"
_SCAN: Final = (
    "MATCH (c:PostroomCell) WHERE c.kind = $kind AND c.key > $after "
    "RETURN c.key, c.value ORDER BY c.key LIMIT $limit"
)
_COMMIT: Final = """
MATCH (h:PostroomHead {revision: $expected}) SET h.revision = $expected + 1
WITH h FOREACH (p IN $puts |
    MERGE (c:PostroomCell {id: p.id}) SET c.kind = p.kind, c.key = p.key, c.value = p.value)
WITH h FOREACH (n IN $nodes | MERGE (e:Entity {id: n.id, org_id: n.org_id}) SET e = n.properties)
WITH h FOREACH (l IN $edges |
    MERGE (a:Entity {id: l.from, org_id: l.org_id}) MERGE (b:Entity {id: l.to, org_id: l.to_org_id})
    MERGE (a)-[:EDGE {label: l.label}]->(b))
WITH h OPTIONAL MATCH (gone:PostroomCell) WHERE gone.id IN $gone DELETE gone
RETURN count(h)
"""
_SAVED: Final = """
MATCH (e:Entity) WHERE e.id IN $ids AND e.org_id IN $org_ids AND e.version IS NOT NULL RETURN e.org_id, e.id
"""


class FalkorGraph(Graph):
    """The graph of `falkordb://user:password@host:port/name`."""

    def __init__(self, url: str) -> None:
        parts = split_address(url)
        if parts is None or parts.scheme != "falkordb" or not parts.hostname:
            raise InvalidSetting(
                f"a graph is named by text such as falkordb://127.0.0.1:6379/name, not {shown_address(url)!r}"
            )
        self.url = url
        self._parts = parts
        self._graph: Any = None
        self._client: Any = None
        self._mutex = threading.Lock()

    async def read(self, work: Callable[[HasCells], T]) -> T:
        return await asyncio.to_thread(self._guarded, lambda graph: work(_FalkorCells(graph)))

    async def write(self, work: Callable[[HasCells], T]) -> T:
        return await asyncio.to_thread(self._guarded, lambda graph: _committed(graph, work))

    def _guarded(self, call: Callable[[Any], T]) -> T:
        from redis.exceptions import RedisError  # noqa: PLC0415 - the extra

        try:
            return call(self._opened())
        except (RedisError, OSError) as error:
            self.close()
            raise GraphUnavailable(f"the graph at {self._parts.hostname} does not answer: {error}") from error

    def _opened(self) -> Any:
        with self._mutex:
            if self._graph is None:
                from falkordb import FalkorDB  # type: ignore[import-untyped] # noqa: PLC0415 - the extra

                self._client = FalkorDB(
                    host=self._parts.hostname,
                    port=self._parts.port or PORT,
                    username=unquote(self._parts.username) if self._parts.username else None,
                    password=unquote(self._parts.password) if self._parts.password else None,
                    socket_timeout=TIMEOUT_S,
                )
                graph = self._client.select_graph(self._parts.path.strip("/") or NAME)
                graph.query(_HEAD)
                _ensure_indices(graph)
                _key_by_organization(graph)
                self._graph = graph
            return self._graph

    def close(self) -> None:
        with self._mutex:
            client, self._client, self._graph = self._client, None, None
        if client is not None:
            client.connection.close()


def _ensure_indices(graph: Any) -> None:
    from redis.exceptions import ResponseError  # noqa: PLC0415 - the extra

    for label, names in (("PostroomCell", ("id", "kind", "key")), ("Entity", ("id",))):
        try:
            graph.create_node_range_index(label, *names)
        except ResponseError as error:
            if "already indexed" not in str(error):
                raise


def _committed(graph: Any, work: Callable[[HasCells], T]) -> T:
    for _ in range(TRIES_MAX):
        [[revision]] = graph.query(_HEAD).result_set
        cells = _FalkorCells(graph)
        result = work(cells)
        if not cells.written or cells.commit(revision):
            return result
    raise GraphUnavailable(f"other writers changed the graph {TRIES_MAX} times while this write ran")


class _FalkorCells(Cells):
    """HasCells of the graph, with the changes of one write on top."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.written: dict[tuple[str, str], bytes | None] = {}

    @property
    def cells(self) -> Self:
        return self

    def get(self, kind: str, key: str) -> bytes | None:
        if (kind, key) in self.written:
            return self.written[kind, key]
        rows = self._graph.query(_GET, {"id": _id(kind, key)}).result_set
        return rows[0][0].encode() if rows else None

    def put(self, kind: str, key: str, value: bytes | None) -> None:
        self.written[kind, key] = value

    def page(self, kind: str, after: str = "", limit: int = SCAN_MAX) -> list[tuple[str, bytes]]:
        own = {key: value for (of, key), value in self.written.items() if of == kind and key > after}
        facts = {"kind": kind, "after": after, "limit": limit + len(own)}
        rows = self._graph.query(_SCAN, facts).result_set
        found: dict[str, bytes] = {key: value.encode() for key, value in rows}
        for key, value in own.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        return sorted(found.items())[:limit]

    def commit(self, expected: int) -> bool:
        """Commit the changes; False when another writer has committed since the first read."""
        nodes = [
            _decode_node(value) for (kind, _), value in self.written.items() if kind == MAIN.name and value
        ]
        facts = {
            "expected": expected,
            "puts": [
                {"id": _id(kind, key), "kind": kind, "key": key, "value": value.decode()}
                for (kind, key), value in self.written.items()
                if value is not None
            ],
            "gone": [_id(kind, key) for (kind, key), value in self.written.items() if value is None],
            "nodes": [
                {"id": node.node_id, "org_id": node.org_id, "properties": _projected(node)} for node in nodes
            ],
            "edges": self._edges(nodes),
        }
        [[count]] = self._graph.query(_COMMIT, facts).result_set
        return bool(count)

    def _edges(self, nodes: list[Node]) -> list[dict[str, str]]:
        """The edges of nodes. An edge to a node that was not saved leads to an empty entity."""
        ids = sorted({to for node in nodes if node.org_id for _, to in node.edges})
        saved = {(node.org_id, node.node_id) for node in nodes}
        if ids:
            org_ids = sorted({SHARED, *(node.org_id for node in nodes)})
            rows = self._graph.query(_SAVED, {"ids": ids, "org_ids": org_ids}).result_set
            saved |= {(org_id, node_id) for org_id, node_id in rows}
        edges = []
        for node in nodes:
            for label, to in node.edges:
                is_shared = (node.org_id, to) not in saved and (SHARED, to) in saved
                to_org_id = SHARED if is_shared else node.org_id
                edge = {"from": node.node_id, "org_id": node.org_id, "label": label, "to": to}
                edges.append({**edge, "to_org_id": to_org_id})
        return edges


def _id(kind: str, key: str) -> str:
    return f"{kind}\x1f{key}"


def _projected(node: Node) -> dict[str, Any]:
    """The properties of a node as FalkorDB can hold them. A name that Cypher cannot quote is left out."""
    flat = {name: _flat(value) for name, value in node.properties.items() if _can_be_named(name)}
    return {**flat, "id": node.node_id, "org_id": node.org_id, "version": node.version}


def _can_be_named(name: str) -> bool:
    return bool(name) and "`" not in name and "\0" not in name


def _flat(value: Any) -> Any:
    """A value, as JSON text if it is an object, a list with one, or beyond what FalkorDB can hold."""
    parts = value if isinstance(value, list) else [value]
    return value if all(map(_can_be_held, parts)) else msgspec.json.encode(value).decode()


def _can_be_held(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    return not isinstance(value, dict | list) and (not isinstance(value, int) or abs(value) < INTEGER_END)


# ---- graphs of earlier versions ----------------------------------------------------------------------

_OLD_MAIN: Final = "graph.main"
_OLD_HISTORY: Final = Kind("graph.history", Old)
_OLD_HISTORY_AT: Final = "graph.history_at"
MOVED_A_COMMIT_MAX: Final = 200  # nodes
VERSIONS_MOVED_MAX: Final = 100_000
_DROP_UNOWNED: Final = "MATCH (e:Entity) WHERE e.org_id IS NULL DETACH DELETE e"
_DROP_FOREIGN: Final = """
MATCH (a:Entity)-[e:EDGE]->(b:Entity) WHERE a.org_id <> b.org_id AND b.org_id <> '' DELETE e
"""


def _key_by_organization(graph: Any) -> None:
    """Move nodes that have no organization in their key. A crash leaves the rest for the next call."""
    if not _FalkorCells(graph).page(_OLD_MAIN, limit=1):
        return
    graph.query(_DROP_UNOWNED)  # targets of edges: the edges are written again together with their nodes
    graph.query(_DROP_FOREIGN)
    while _committed(graph, _move_some):
        pass


def _move_some(cells: HasCells) -> int:
    """Move some nodes with their old versions; returns how many."""
    nodes = cells.cells.page(_OLD_MAIN, limit=MOVED_A_COMMIT_MAX)
    for node_id, value in nodes:
        node = _decode_node(value)
        put_node(cells, node, is_new=True)
        cells.cells.put(_OLD_MAIN, node_id, None)
        for key, old in _OLD_HISTORY.under(cells, node_id, limit=VERSIONS_MOVED_MAX):
            version = int(key.rpartition(SEPARATOR)[2])
            HISTORY.put(cells, old, node.org_id, node_id, version)
            HISTORY_AT.put(cells, True, version, node.org_id, node_id)  # noqa: FBT003
            _OLD_HISTORY.put(cells, None, node_id, version)
            cells.cells.put(_OLD_HISTORY_AT, joined(version, node_id), None)
    return len(nodes)
