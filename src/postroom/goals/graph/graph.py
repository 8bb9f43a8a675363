"""`Graph`: where the knowledge graph is kept. `engine.graph` gives the views of goals and of main."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from postroom.core.goals.merge import Edge
from postroom.core.names import checked_name
from postroom.engine.commits import Commits
from postroom.engine.rules.cells import HasCells
from postroom.errors import UnknownGoal
from postroom.goals.graph import branches
from postroom.goals.graph.branches import (
    Node,
    checked_edges,
    checked_node_id,
    checked_properties,
    checked_scope,
)

T = TypeVar("T")


class Graph(ABC):
    """A place for the cells of a knowledge graph. `goals.graph.branches` has every rule about them."""

    is_embedded = False
    """Whether a write shares its commit with the ledger of the engine."""

    @abstractmethod
    async def read(self, work: Callable[[HasCells], T]) -> T:
        """Run `work` on committed cells."""

    @abstractmethod
    async def write(self, work: Callable[[HasCells], T]) -> T:
        """Run `work` and commit its changes, all or none. It may run again when another writer interferes."""

    def close(self) -> None:  # noqa: B027 - only for a graph with a connection
        """Close the connection. The next call opens it again."""


class LedgerGraph(Graph):
    """The graph in the cells of the engine's own ledger."""

    is_embedded = True

    def __init__(self, commits: Commits) -> None:
        self._commits = commits

    async def read(self, work: Callable[[HasCells], T]) -> T:
        return await self._commits.read(lambda operations: work(operations.transaction))

    async def write(self, work: Callable[[HasCells], T]) -> T:
        return await self._commits.write_raw(work)


class View(ABC):
    """What a goal or an organization sees of the graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def save(
        self,
        node_id: str,
        properties: Mapping[str, Any],
        edges: Iterable[Edge] = (),
        scope: str = "STAGED",
    ) -> Node:
        """Save a node: these properties replace those it had, and these edges are added."""
        return await self._write(
            checked_node_id(node_id),
            checked_properties(properties),
            checked_edges(edges),
            scope,
            replaces=True,
        )

    async def update(
        self,
        node_id: str,
        changes: Mapping[str, Any],
        scope: str = "STAGED",
        edges: Iterable[Edge] = (),
    ) -> Node:
        """Change some properties of a node; None removes one. Raises `UnknownNode`."""
        return await self._write(
            checked_node_id(node_id), checked_properties(changes), checked_edges(edges), scope, replaces=False
        )

    async def get(self, node_id: str) -> Node | None:
        """A node with `properties`, `edges` and `version`; None when there is none."""
        return await self._read(checked_node_id(node_id))

    async def neighbours(self, node_id: str) -> list[Edge]:
        """The edges that leave a node, as pairs of a label and a node id."""
        node = await self.get(node_id)
        return [] if node is None else [(label, to) for label, to in node.edges]

    @abstractmethod
    async def _read(self, node_id: str) -> Node | None: ...

    @abstractmethod
    async def _write(
        self, node_id: str, properties: dict[str, Any], edges: list[Edge], scope: str, *, replaces: bool
    ) -> Node: ...


class GoalFacts(Protocol):
    """What a view of a branch has to know about goals."""

    async def wrote(self, goal_id: str) -> None:
        """A branch outside the ledger was changed."""

    async def org_of(self, goal_id: str) -> str | None:
        """The organization of a goal; None when it was not started."""


class BranchView(View):
    """The branch of a goal over its version of main."""

    def __init__(self, graph: Graph, goals: GoalFacts, goal_id: str, org_id: str | None) -> None:
        super().__init__(graph)
        self.goal_id = goal_id
        self.org_id = org_id
        self._goals = goals

    async def _read(self, node_id: str) -> Node | None:
        try:
            return await self._graph.read(
                lambda cells: branches.branch_node(cells, self.goal_id, node_id, self.org_id)
            )
        except UnknownGoal:  # it has ended, was not started, or belongs to another organization
            org_id = await self._goals.org_of(self.goal_id)
            if self.org_id is not None and org_id not in (None, self.org_id):
                raise
        seen_as = org_id or self.org_id or branches.SHARED
        return await self._graph.read(lambda cells: branches.main_node(cells, node_id, seen_as))

    async def _write(
        self, node_id: str, properties: dict[str, Any], edges: list[Edge], scope: str, *, replaces: bool
    ) -> Node:
        kept = checked_scope(scope)
        node = await self._graph.write(
            lambda cells: branches.write(
                cells, self.goal_id, node_id, properties, edges, kept, replaces=replaces, org_id=self.org_id
            )
        )
        if not self._graph.is_embedded:
            await self._goals.wrote(self.goal_id)
        return node


class MainView(View):
    """Main, as an organization sees it."""

    def __init__(self, graph: Graph, org_id: str | None) -> None:
        super().__init__(graph)
        self.org_id = org_id

    async def _read(self, node_id: str) -> Node | None:
        return await self._graph.read(lambda cells: branches.main_node(cells, node_id, self.org_id))

    async def _write(
        self, node_id: str, properties: dict[str, Any], edges: list[Edge], scope: str, *, replaces: bool
    ) -> Node:
        checked_scope(scope)  # everything is IMMEDIATE here
        return await self._graph.write(
            lambda cells: branches.write_main(
                cells, self.org_id, node_id, properties, edges, replaces=replaces
            )
        )


class Graphs:
    """`engine.graph`."""

    def __init__(self, graph: Graph, goals: GoalFacts) -> None:
        self.place = graph
        self._goals = goals

    def branch(self, goal_id: str, org_id: str | None = None) -> BranchView:
        """The branch of a goal: its own changes over the version of main at its start.

        A goal that has ended reads main as its organization sees it; one that was not started reads shared
        nodes. With `org_id`, a goal of another organization is unknown.
        """
        return BranchView(self.place, self._goals, checked_node_id(goal_id), checked_org_id(org_id))

    def main(self, org_id: str | None = None) -> MainView:
        """Main as an organization sees it: its own nodes, and shared ones where it has none of that id.

        An organization that saves a new node owns the node. Without `org_id`, this is the view of the
        application itself over all organizations: a node id means the shared node, else the node of the only
        organization that has one, and a new node is shared. An empty `org_id` means shared nodes alone.
        """
        return MainView(self.place, checked_org_id(org_id))


def checked_org_id(org_id: object) -> str | None:
    """The organization of a view: None, a name, or an empty text for shared nodes."""
    return org_id if org_id is None or org_id == branches.SHARED else checked_name("organization", org_id)
