"""Mapping of gangs to cells: inside a tenant's view or the physical one, then virtual cells to physical ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rota.cluster.core.capacity import Cells
from rota.cluster.virtual.cells import FREE, NONE, OPPORTUNISTIC, BuddyCells, Key, swap_out

Usable = Callable[[int], bool] | None


@dataclass(slots=True)
class _Vertex:
    """A virtual cell that needs a physical one, with the cells below it that need one too."""

    cell: int
    below: list[_Vertex] = field(default_factory=list["_Vertex"])


def map_leaves(buddy: BuddyCells, vleaves: Sequence[int], allowed: Usable) -> dict[int, int] | None:
    """Physical leaf of each virtual leaf, or None. Changes nothing.

    Leaves that are bound keep their binding. Cells below a bound one go to children of what it serves, one to one, so
    that the topology is kept; whole owned cells are allocated by buddies. Cells that are bad, bound, or lie on no
    allowed node are left out; those with fewer opportunistic devices come first. When no buddy works, larger cells are
    split as far as that breaks no guarantee.
    """
    found = {v: buddy.serves[v] for v in vleaves if buddy.serves[v] != NONE}
    owned, inside = _paths(buddy, [v for v in vleaves if v not in found])
    lists = dict(buddy.free)
    for vertex in owned:
        key = (buddy.v.vchain[vertex.cell], buddy.vlevel[vertex.cell])
        if not (
            _allocate(buddy, vertex, lists, key, _lowest_free(buddy, lists, key), allowed, found)
            or _split_safely(buddy, vertex, lists, key, owned, allowed, found)
        ):
            return None
    for above, vertices in inside.items():
        candidates = buddy.v.physical.children[buddy.serves[above]]
        if _map(buddy, vertices, candidates, allowed, found) is None:
            return None
    return found


def _paths(buddy: BuddyCells, vleaves: Sequence[int]) -> tuple[list[_Vertex], dict[int, list[_Vertex]]]:
    """Unbound cells above the leaves as trees: those under an owned cell, and those under a bound cell by that cell."""
    known: dict[int, _Vertex] = {}
    owned: list[_Vertex] = []
    inside: dict[int, list[_Vertex]] = {}
    for leaf in vleaves:
        vertex = known[leaf] = _Vertex(leaf)
        while True:
            above = buddy.vparent[vertex.cell]
            if above == NONE:
                owned.append(vertex)
                break
            if buddy.serves[above] != NONE:
                inside.setdefault(above, []).append(vertex)
                break
            if above in known:
                known[above].below.append(vertex)
                break
            known[above] = _Vertex(above, [vertex])
            vertex = known[above]
    return owned, inside


def _lowest_free(buddy: BuddyCells, lists: dict[Key, tuple[int, ...]], key: Key) -> int:
    chain, level = key
    return next((n for n in range(level, buddy.v.tops[chain] + 1) if lists[chain, n]), level)


def _allocate(
    buddy: BuddyCells,
    vertex: _Vertex,
    lists: dict[Key, tuple[int, ...]],
    key: Key,
    level: int,
    allowed: Usable,
    found: dict[int, int],
) -> bool:
    """Take a cell of the wanted level from the free list of ``level``, splitting downwards; lists change on success."""
    chain, wanted = key
    if level == wanted:
        picked = _map(buddy, [vertex], lists[key], allowed, found)
        if picked is None:
            return False
        lists[key] = swap_out(lists[key], picked[0])
        return True
    for cell in _usable(buddy, lists[chain, level], 1, allowed):
        trial = dict(lists)
        trial[chain, level] = swap_out(trial[chain, level], cell)
        trial[chain, level - 1] += tuple(buddy.v.physical.children[cell])
        if _allocate(buddy, vertex, trial, key, level - 1, allowed, found):
            lists.update(trial)
            return True
    return False


def _split_safely(
    buddy: BuddyCells,
    vertex: _Vertex,
    lists: dict[Key, tuple[int, ...]],
    key: Key,
    owned: Sequence[_Vertex],
    allowed: Usable,
    found: dict[int, int],
) -> bool:
    """Split a cell above the lowest free level, if afterwards every tenant can still get what it owns.

    The cells that this gang itself takes, ``owned``, no longer count as wanted.
    """
    chain, wanted = key
    for level in range(wanted + 1, buddy.v.tops[chain] + 1):
        trial = dict(lists)
        if (
            lists[chain, level]
            and _allocate(buddy, vertex, trial, key, level, allowed, found)
            and _still_safe(buddy, chain, trial, owned, vertex)
        ):
            lists.update(trial)
            return True
    return False


def _still_safe(
    buddy: BuddyCells, chain: str, lists: dict[Key, tuple[int, ...]], owned: Sequence[_Vertex], last: _Vertex
) -> bool:
    taken: dict[int, int] = {}
    for vertex in owned:
        if buddy.v.vchain[vertex.cell] == chain:
            level = buddy.vlevel[vertex.cell]
            taken[level] = taken.get(level, 0) + 1
        if vertex is last:
            break
    above = 0
    for level in range(buddy.v.tops[chain], 0, -1):
        have = len(lists[chain, level]) - buddy.wanted((chain, level)) + taken.get(level, 0) + above
        if have < 0:
            return False
        above = have * buddy.v.children_at[chain, level]
    return True


def _usable(buddy: BuddyCells, cells: Sequence[int], needed: int, allowed: Usable) -> list[int]:
    """Candidates in order, those with fewest opportunistic devices first; none if there are fewer than needed.

    A node that is bad is left out, and a bad cell inside one; of a cell above nodes the others still serve.
    """
    bound, healthy, used, node = buddy.bound, buddy.healthy, buddy.used, buddy.v.physical.node
    able = [c for c in cells if bound[c] == NONE and (healthy[c] or node[c] < 0)]
    if allowed is not None:
        able = [c for c in able if allowed(c)]
    if len(able) < needed:
        return []
    return sorted(able, key=lambda c: used[c].get(OPPORTUNISTIC, 0))


def _map(
    buddy: BuddyCells, vertices: Sequence[_Vertex], cells: Sequence[int], allowed: Usable, found: dict[int, int]
) -> list[int] | None:
    """Different physical cells for all vertices at once, with everything below them; backtracks over the candidates.

    Returns the cells in the order of the vertices; leaves are entered in ``found``.
    """
    candidates = _usable(buddy, cells, len(vertices), allowed)
    if not candidates:
        return None
    picked: list[int] = []

    def descend(i: int) -> bool:
        if i == len(vertices):
            return True
        for cell in candidates:
            if cell not in picked and _serve(buddy, vertices[i], cell, allowed, found):
                picked.append(cell)
                if descend(i + 1):
                    return True
                picked.pop()
        return False

    return picked if descend(0) else None


def _serve(buddy: BuddyCells, vertex: _Vertex, cell: int, allowed: Usable, found: dict[int, int]) -> bool:
    if buddy.level[cell] == 1:
        found[vertex.cell] = cell
        return True
    return _map(buddy, vertex.below, buddy.v.physical.children[cell], allowed, found) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Cells as one placement sees them: a tenant's virtual cells of a chain, or the physical ones.

    ``nodes`` are cells of node level, and smaller ones that lie in no node of the view; they never merge into one.
    ``fit`` says whether a node is in order and allowed. With ``across`` the work of all priorities attracts, otherwise
    only that of the same priority does, and higher work repels.
    """

    cells: Cells
    nodes: Sequence[int]
    prio: Sequence[int]
    used: Sequence[dict[int, int]]
    fit: Callable[[int], bool]
    across: bool


Leaves = tuple[tuple[int, ...], ...]
"""Leaves of each member of a gang."""
_Node = tuple[int, int, int, int, int]
"""Most own work first, then least higher work; position, cell, room."""


def place_members(view: View, members: Sequence[int], prio: int) -> list[list[int]] | None:
    """Leaves for every member (in the given order, ascending by size), or None.

    Tried first without taking anything from lower priorities, then with. Source: hivedscheduler, topology-aware
    intra-VC placement.
    """
    for way in (_nodes_for, _largest_first) if members[0] != members[-1] else (_nodes_for,):
        for at in dict.fromkeys((OPPORTUNISTIC, prio)):
            chosen = way(view, _nodes(view, at, members), members)
            if chosen is not None:
                return _leaves_for(view, chosen, members, at)
    return None


def can_hold(view: View, leaves: Leaves, members: Sequence[int], prio: int) -> bool:
    """Whether these leaves of nodes of the view are fit and free, or held by lower work, for members of these sizes."""
    if not leaves or [len(member) for member in leaves] != list(members):
        return False
    tops = {leaf: node for node in view.nodes for leaf in _leaves_under(view.cells, node)}
    flat = [leaf for member in leaves for leaf in member]
    return all(leaf in tops and view.prio[leaf] < prio and view.fit(tops[leaf]) for leaf in flat)


def _leaves_under(cells: Cells, cell: int) -> Sequence[int]:
    return cells.leaf_cells[int(cells.leaf0[cell]) : int(cells.leaf1[cell])]


def _nodes(view: View, prio: int, members: Sequence[int]) -> list[_Node]:
    """Nodes with room for the smallest member, the best first; none if all of them together have too little room."""
    least, total = members[0], 0
    found: list[_Node] = []
    size = view.cells.size
    for position, cell in enumerate(view.nodes):
        taken = same = higher = 0
        for at, n in view.used[cell].items():
            if at >= prio:
                taken += n
            if view.across or at == prio:
                same += n
            elif at > prio:
                higher += n
        room = size[cell] - taken
        if room >= least:
            total += room
            found.append((-same, higher, position, cell, room))
    return sorted(found) if total >= sum(members) else []


def _nodes_for(view: View, nodes: Sequence[_Node], members: Sequence[int]) -> list[int] | None:
    """One pass over the nodes that are fit, filling each as far as the next member goes; None if they are too few."""
    chosen: list[int] = []
    for *_, cell, room in nodes:
        if room < members[len(chosen)] or not view.fit(cell):
            continue
        taken = 0
        while len(chosen) < len(members) and room - taken >= members[len(chosen)]:
            taken += members[len(chosen)]
            chosen.append(cell)
        if len(chosen) == len(members):
            return chosen
    return None


def _largest_first(view: View, nodes: Sequence[_Node], members: Sequence[int]) -> list[int] | None:
    """Every member on the first fit node with room for it, the largest first: finds what one pass misses."""
    left = {cell: room for *_, cell, room in nodes if view.fit(cell)}
    chosen: list[int] = []
    for member in reversed(members):
        cell = next((cell for cell, room in left.items() if room >= member), None)
        if cell is None:
            return None
        left[cell] -= member
        chosen.append(cell)
    return chosen[::-1]


def _leaves_for(view: View, nodes: Sequence[int], members: Sequence[int], prio: int) -> list[list[int]]:
    left: dict[int, list[int]] = {}
    placed: list[list[int]] = []
    for node, size in zip(nodes, members):
        if node not in left:
            leaves = _leaves_under(view.cells, node)
            free = [leaf for leaf in leaves if view.prio[leaf] == FREE]
            left[node] = free + [leaf for leaf in leaves if FREE < view.prio[leaf] < prio]
        picked = _closest(view.cells, node, left[node], size)
        placed.append(picked)
        left[node] = [leaf for leaf in left[node] if leaf not in picked]
    return placed


def _closest(cells: Cells, node: int, leaves: Sequence[int], size: int) -> list[int]:
    """``size`` of the leaves under the lowest cell that has as many; of equal ones the first in the order of leaves."""
    best: tuple[int, list[int], list[int]] | None = None
    groups: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        for cell in cells.ancestors(leaf):
            groups.setdefault(cell, []).append(position)
            if cell == node:
                break
    for cell, positions in groups.items():
        if len(positions) >= size:
            found = (int(cells.level[cell]), positions[:size], [leaves[p] for p in positions[:size]])
            best = found if best is None or found[:2] < best[:2] else best
    if best is None:
        raise AssertionError(f"a node with room for {size} leaves has only {len(leaves)}")
    return best[2]


def view_nodes(cells: Cells, rows: Sequence[int]) -> list[int]:
    """Of these cells (a whole sub-forest), the nodes, then smaller top cells that lie in no node."""
    inside = set(rows)
    nodes = [row for row in rows if cells.specs[row].is_node]
    tops = [row for row in rows if int(cells.parent[row]) not in inside and int(cells.node[row]) < 0]
    loose = [row for row in tops if not _has_node(cells, row)]
    return nodes + loose


def _has_node(cells: Cells, row: int) -> bool:
    return cells.specs[row].is_node or any(_has_node(cells, child) for child in cells.children[row])
