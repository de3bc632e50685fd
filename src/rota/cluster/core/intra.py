"""Place a gang inside one tenant's view, or the physical one: fullest nodes first, closest devices of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rota.cluster.core.buddy import FREE, OPPORTUNISTIC
from rota.cluster.core.cells import Cells


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
    """``size`` of the leaves under the lowest cell that has so many; of equal ones the first in the order of leaves."""
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
