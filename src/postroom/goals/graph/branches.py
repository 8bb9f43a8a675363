"""The knowledge graph: nodes of main with versions, and a branch of each goal over a pinned version of main.

Rule 1: a branch sees its own changes over main as main was when the goal began. Nobody else sees the changes.
Rule 2: a change of a branch is logged with the state before it, so a rollback undoes changes one by one.
Rule 3: the old version of a node of main is kept while a branch may still read it.
Rule 4: node ids are names within an organization. Organizations neither see nor block each other's nodes.
        A node that was saved without an organization is shared: all organizations see it and may change it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.core.goals.merge import ABSENT, Edge, changed, merged, merged_edges
from postroom.engine.rules.cells import SEPARATOR, HasCells, Kind
from postroom.errors import InvalidMessage, UnknownGoal, UnknownNode

Scope: TypeAlias = Literal["GOAL_LOCAL", "STAGED", "IMMEDIATE"]
SCOPES: Final[tuple[Scope, ...]] = ("GOAL_LOCAL", "STAGED", "IMMEDIATE")
Base: TypeAlias = Literal["own", "shared", "nothing"]
NODE_BYTES_MAX: Final = 64 * 1024
NODE_ID_CHARS_MAX: Final = 256
EDGES_MAX: Final = 1_000
HISTORY_PURGED_MAX: Final = 1_000  # old versions that are deleted when one branch ends
ROOT: Final = ""
SHARED: Final = ""
"""Stands for the organization in the key of a shared node."""


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node of the knowledge graph, as one reader sees it."""

    node_id: str
    properties: dict[str, Any] = {}
    edges: list[Edge] = []
    """Label and target of each edge that leaves the node."""
    version: int = 0
    """How often the node was changed."""
    at: int = 0
    """The version of main that it was last changed in."""
    org_id: str = ""
    """Empty for a shared node."""


class Old(msgspec.Struct, frozen=True):
    """The state of a node of main before a version; None when it did not exist."""

    node: Node | None


class Branch(msgspec.Struct, frozen=True):
    """The branch of a goal."""

    org_id: str
    pin: int
    """The version of main that the branch is based on."""
    version: int = 0
    """How many changes it has."""


class Staged(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one node in a branch."""

    changes: dict[str, tuple[Scope, Any]] = {}
    """Property -> scope and value; None removes the property."""
    edges: list[tuple[Scope, str, str]] = []
    writes: int = 0
    base: Base | None = None
    """The node of main that the branch changes: that of the organization, a shared one, or none. The first
    change decides it for good, because the branch reads one fixed version of main."""


class Undo(msgspec.Struct, frozen=True):
    """What a change of a branch replaced."""

    node_id: str
    before: Staged | None


class NodeConflict(msgspec.Struct, frozen=True):
    """A property that a branch and main changed to different values."""

    node_id: str
    name: str
    base: Any
    branch: Any
    main: Any


MAIN: Final = Kind("graph.node", Node)
"""Organization, node id -> node."""
OWNERS: Final = Kind("graph.owner", bool)
"""Node id, organization -> True: organizations with a node of this id."""
HEAD: Final = Kind("graph.head", int)
HISTORY: Final = Kind("graph.past", Old)
"""Organization, node id, version of main that changed the node -> the node before that."""
HISTORY_AT: Final = Kind("graph.past_at", bool)
"""Version, organization, node id: an index of `HISTORY`, so that a purge finds the oldest entries."""
BRANCHES: Final = Kind("graph.branch", Branch)
STAGED: Final = Kind("graph.staged", Staged)
"""Goal, node id -> changes."""
MERGED: Final = Kind("graph.merged", bool)
"""Goal -> True in a graph outside the ledger: its branch was merged, and the ledger may not know yet."""
UNDO: Final = Kind("graph.undo", Undo)
"""Goal, number of the change -> the state before it."""


# ---- checks ----------------------------------------------------------------------------------------


def checked_node_id(node_id: object) -> str:
    """The id of a node."""
    if not isinstance(node_id, str) or not 0 < len(node_id) <= NODE_ID_CHARS_MAX or not node_id.isprintable():
        raise InvalidMessage(f"the id of a node is printable text of 1 to {NODE_ID_CHARS_MAX} characters")
    return node_id


def checked_properties(properties: object) -> dict[str, Any]:
    """The properties of a node: a JSON object of up to 64 KiB."""
    if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
        raise InvalidMessage(f"properties must be a JSON object, not {type(properties).__name__}")
    try:
        data = msgspec.json.encode(properties)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidMessage(f"properties cannot be written as JSON: {error}") from None
    if len(data) > NODE_BYTES_MAX:
        raise InvalidMessage(f"the properties have {len(data)} bytes, and at most {NODE_BYTES_MAX} are kept")
    return dict(msgspec.json.decode(data))


def checked_edges(edges: object) -> list[Edge]:
    """Edges as pairs of a label and a node id."""
    if not isinstance(edges, list | tuple | set | frozenset):
        raise InvalidMessage("edges are a list of pairs (label, node id)")
    found: list[Edge] = []
    for edge in edges:
        if not isinstance(edge, list | tuple) or len(edge) != 2:  # noqa: PLR2004 - a pair
            raise InvalidMessage("an edge is a pair (label, node id)")
        found.append((checked_node_id(edge[0]), checked_node_id(edge[1])))
    if len(found) > EDGES_MAX:
        raise InvalidMessage(f"a node has at most {EDGES_MAX} edges")
    return found


def checked_scope(scope: object) -> Scope:
    """One of the three scopes."""
    if scope not in SCOPES:
        raise InvalidMessage(f"scope must be one of {', '.join(SCOPES)}, not {scope!r}")
    return scope


# ---- main ------------------------------------------------------------------------------------------


def main_node(cells: HasCells, node_id: str, org_id: str | None = None) -> Node | None:
    """A node of main as an organization sees it. `Graphs.main` says what None sees."""
    return _located(cells, node_id, org_id)[1]


def _located(cells: HasCells, node_id: str, org_id: str | None) -> tuple[str, Node | None]:
    """The organization whose node an id means, and the node; None when there is no node yet."""
    if org_id:
        own = MAIN.get(cells, org_id, node_id)
        if own is not None:
            return org_id, own
    shared = MAIN.get(cells, SHARED, node_id)
    if shared is not None or org_id == SHARED:
        return SHARED, shared
    if org_id is not None:
        return org_id, None
    owners = [key.rpartition(SEPARATOR)[2] for key, _ in OWNERS.under(cells, node_id, limit=2)]
    if len(owners) > 1:
        raise InvalidMessage(f"several organizations have a node {node_id!r}: name the organization")
    owner = owners[0] if owners else SHARED
    return owner, MAIN.get(cells, owner, node_id)


def write_main(
    cells: HasCells,
    org_id: str | None,
    node_id: str,
    properties: Mapping[str, Any],
    edges: Sequence[Edge] = (),
    *,
    replaces: bool,
) -> Node:
    """Change a node of main at once, as the next version of main."""
    owner, node = _located(cells, node_id, org_id)
    if node is None and not replaces:
        raise UnknownNode(node_id)
    known = {} if node is None or replaces else node.properties
    all_edges = [*(() if node is None else map(_edge, node.edges)), *edges]
    head = _next_version(cells)
    has_readers = bool(BRANCHES.scan(cells, limit=1))
    change = _Change(owner, node_id, node, changed(known, properties), all_edges)
    return _put_main(cells, change, head, has_readers=has_readers)


class _Change(NamedTuple):
    """A node of main that is about to be changed."""

    owner: str
    node_id: str
    before: Node | None
    properties: dict[str, Any]
    edges: Sequence[Edge]


def _next_version(cells: HasCells) -> int:
    head = (HEAD.get(cells, ROOT) or 0) + 1
    HEAD.put(cells, head, ROOT)
    return head


def _put_main(cells: HasCells, change: _Change, head: int, *, has_readers: bool) -> Node:
    owner, node_id, before, properties, edges = change
    version = 1 if before is None else before.version + 1
    node = Node(node_id, properties, sorted(set(edges)), version, head, owner)
    if len(node.edges) > EDGES_MAX:
        raise InvalidMessage(f"a node has at most {EDGES_MAX} edges")
    if has_readers:
        HISTORY.put(cells, Old(before), owner, node_id, head)
        HISTORY_AT.put(cells, True, head, owner, node_id)  # noqa: FBT003
    put_node(cells, node, is_new=before is None)
    return node


def put_node(cells: HasCells, node: Node, *, is_new: bool) -> None:
    """Store a node of main without beginning a version of main."""
    MAIN.put(cells, node, node.org_id, node.node_id)
    if is_new and node.org_id != SHARED:
        OWNERS.put(cells, True, node.node_id, node.org_id)  # noqa: FBT003


def main_at(cells: HasCells, node_id: str, pin: int, org_id: str) -> Node | None:
    """A node as an organization saw it in the version of main that a branch is based on."""
    own = _at(cells, org_id, node_id, pin)
    return _at(cells, SHARED, node_id, pin) if own is None else own


def _at(cells: HasCells, owner: str, node_id: str, pin: int) -> Node | None:
    node = MAIN.get(cells, owner, node_id)
    if node is not None and node.at > pin:
        for key, old in HISTORY.under(cells, owner, node_id):
            if int(key.rpartition(SEPARATOR)[2]) > pin:
                return old.node
    return node


def _edge(edge: Sequence[str]) -> Edge:
    return edge[0], edge[1]


# ---- branches --------------------------------------------------------------------------------------


def open_branch(cells: HasCells, goal_id: str, org_id: str) -> Branch:
    """Open the branch of a goal, based on the current version of main."""
    branch = Branch(org_id, HEAD.get(cells, ROOT) or 0)
    BRANCHES.put(cells, branch, goal_id)
    return branch


def branch_of(cells: HasCells, goal_id: str, org_id: str | None = None) -> Branch:
    """The branch of a goal. Raises `UnknownGoal`, also for a goal of another organization than `org_id`."""
    branch = BRANCHES.get(cells, goal_id)
    if branch is None or org_id not in (None, branch.org_id):
        raise UnknownGoal(goal_id)
    return branch


def branch_node(cells: HasCells, goal_id: str, node_id: str, org_id: str | None = None) -> Node | None:
    """A node as a goal sees it. Raises `UnknownGoal` when the goal has no branch."""
    branch = branch_of(cells, goal_id, org_id)
    staged = STAGED.get(cells, goal_id, node_id)
    return _seen(branch, _base(cells, branch, staged, node_id), staged, node_id)


def node_for(cells: HasCells, goal_id: str, org_id: str, node_id: str) -> Node | None:
    """A node as a message sees it: in the branch of its goal, else in main. Reading needs no branch."""
    try:
        return branch_node(cells, goal_id, node_id, org_id)
    except UnknownGoal:
        return main_node(cells, node_id, org_id)


def _base(cells: HasCells, branch: Branch, staged: Staged | None, node_id: str) -> Node | None:
    """The node of main that the node of a branch is based on."""
    match None if staged is None else staged.base:
        case "nothing":
            return None
        case "own":
            return _at(cells, branch.org_id, node_id, branch.pin)
        case "shared":
            return _at(cells, SHARED, node_id, branch.pin)
        case None:
            return main_at(cells, node_id, branch.pin, branch.org_id)


def _seen(branch: Branch, base: Node | None, staged: Staged | None, node_id: str) -> Node | None:
    if staged is None:
        return base
    node = base or Node(node_id, org_id=branch.org_id)
    changes = {name: value for name, (_, value) in staged.changes.items()}
    edges = {*map(tuple, node.edges), *((label, to) for _, label, to in staged.edges)}
    return replace(
        node,
        properties=changed(node.properties, changes),
        edges=sorted(edges),
        version=node.version + staged.writes,
    )


def write(
    cells: HasCells,
    goal_id: str,
    node_id: str,
    properties: Mapping[str, Any],
    edges: Sequence[Edge] = (),
    scope: Scope = "STAGED",
    *,
    replaces: bool,
    org_id: str | None = None,
) -> Node:
    """Change a node in the branch of a goal. `replaces` removes the properties that are not named."""
    branch = branch_of(cells, goal_id, org_id)
    before = STAGED.get(cells, goal_id, node_id)
    base = _base(cells, branch, before, node_id)
    seen = _seen(branch, base, before, node_id)
    if seen is None and not replaces:
        raise UnknownNode(node_id)
    if scope == "IMMEDIATE":
        write_main(cells, branch.org_id, node_id, properties, edges, replaces=replaces)
    staged = before or Staged()
    given: dict[str, Any] = dict(properties)
    if replaces and seen is not None and scope != "GOAL_LOCAL":
        given = {**dict.fromkeys(seen.properties, ABSENT), **given}
    after = Staged(
        {**staged.changes, **{name: (scope, value) for name, value in given.items()}},
        [*staged.edges, *((scope, label, to) for label, to in edges)],
        staged.writes + 1,
        "nothing" if base is None else "own" if base.org_id else "shared",
    )
    STAGED.put(cells, after, goal_id, node_id)
    UNDO.put(cells, Undo(node_id, before), goal_id, branch.version + 1)
    BRANCHES.put(cells, replace(branch, version=branch.version + 1), goal_id)
    node = _seen(branch, base, after, node_id)
    assert node is not None  # noqa: S101 - for the type checker: it was just written
    return node


def undo_to(cells: HasCells, goal_id: str, version: int) -> None:
    """Undo the changes of a branch after a version, the newest first."""
    branch = branch_of(cells, goal_id)
    prefix = goal_id + SEPARATOR
    after = UNDO.scan(cells, f"{prefix}{version:020d}", branch.version - version or 1)
    for key, undo in reversed([one for one in after if one[0].startswith(prefix)]):
        STAGED.put(cells, undo.before, goal_id, undo.node_id)
        cells.cells.put(UNDO.name, key, None)
    BRANCHES.put(cells, replace(branch, version=min(version, branch.version)), goal_id)


# ---- the end of a branch ---------------------------------------------------------------------------


def merge_conflicts(
    cells: HasCells, goal_id: str, choices: Mapping[tuple[str, str], str]
) -> tuple[list[_Change], list[NodeConflict]]:
    """What merging a branch changes in main, and the conflicts that `choices` does not resolve.

    A node that the branch did not see at its start belongs to the organization, even if a shared node with
    the same id was saved since then.
    """
    branch = branch_of(cells, goal_id)
    changes: list[_Change] = []
    conflicts: list[NodeConflict] = []
    for key, staged in _all_staged(cells, goal_id):
        node_id = key.partition(SEPARATOR)[2]
        mine = {name: value for name, (scope, value) in staged.changes.items() if scope == "STAGED"}
        added = {(label, to) for scope, label, to in staged.edges if scope == "STAGED"}
        if not mine and not added and (staged.changes or staged.edges):
            continue  # the branch has no STAGED change of this node
        base = _base(cells, branch, staged, node_id)
        owner = branch.org_id if base is None else base.org_id
        before = MAIN.get(cells, owner, node_id)
        base, main = base or Node(node_id), before or Node(node_id)
        decided = {name: side for (node, name), side in choices.items() if node == node_id}
        properties, found = merged(base.properties, changed(base.properties, mine), main.properties, decided)
        base_edges = set(map(_edge, base.edges))
        edges = merged_edges(base_edges, base_edges | added, set(map(_edge, main.edges)))
        conflicts += [NodeConflict(node_id, one.name, one.base, one.branch, one.main) for one in found]
        changes.append(_Change(owner, node_id, before, properties, sorted(edges)))
    return changes, conflicts


def _all_staged(cells: HasCells, goal_id: str) -> list[tuple[str, Staged]]:
    prefix, found = goal_id + SEPARATOR, list[tuple[str, Staged]]()
    after = prefix
    while more := [one for one in STAGED.scan(cells, after) if one[0].startswith(prefix)]:
        found += more
        after = more[-1][0]
    return found


def merge(cells: HasCells, goal_id: str, choices: Mapping[tuple[str, str], str]) -> list[NodeConflict]:
    """Merge a branch into main and end it, unless conflicts are left: those are returned."""
    changes, conflicts = merge_conflicts(cells, goal_id, choices)
    if conflicts:
        return conflicts
    drop_branch(cells, goal_id)
    if changes:
        head = _next_version(cells)
        has_readers = bool(BRANCHES.scan(cells, limit=1))
        for change in changes:
            _put_main(cells, change, head, has_readers=has_readers)
    return []


def drop_branch(cells: HasCells, goal_id: str) -> None:
    """End a branch without a merge."""
    BRANCHES.put(cells, None, goal_id)
    STAGED.drop_under(cells, goal_id)
    UNDO.drop_under(cells, goal_id)
    _forget_history(cells)


def _forget_history(cells: HasCells) -> None:
    """Forget old versions of nodes that no branch can read any more."""
    pins = [branch.pin for _, branch in BRANCHES.all(cells)]
    oldest = min(pins, default=HEAD.get(cells, ROOT) or 0)
    for key, _ in HISTORY_AT.scan(cells, limit=HISTORY_PURGED_MAX):
        until, owner, node_id = key.split(SEPARATOR)
        if int(until) > oldest:
            break
        cells.cells.put(HISTORY_AT.name, key, None)
        HISTORY.put(cells, None, owner, node_id, int(until))
