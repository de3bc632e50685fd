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
    ``fit`` gives (in order, allowed) of a node. With ``across`` the work of all priorities attracts, otherwise
    only that of the same priority does, and higher work repels.
    """

    cells: Cells
    nodes: Sequence[int]
    prio: Sequence[int]
    used: Sequence[dict[int, int]]
    fit: Callable[[int], tuple[bool, bool]]
    across: bool


@dataclass(slots=True)
class _Node:
    cell: int
    healthy: bool
    allowed: bool
    same: int
    higher: int
    room: int

    @property
    def place(self) -> tuple[bool, bool, int, int]:
        return (not self.healthy, not self.allowed, -self.same, self.higher)


def place_members(view: View, members: Sequence[int], prio: int) -> list[list[int]] | None:
    """Leaves for every member (in the given order, ascending by size), or None.

    Tried first without taking anything from lower priorities, then with. Source: hivedscheduler, topology-aware
    intra-VC placement.
    """
    for at in dict.fromkeys((OPPORTUNISTIC, prio)):
        nodes = _nodes(view, at)
        chosen = _nodes_for(nodes, members)
        if chosen is not None:
            return _leaves_for(view, chosen, members, at)
    return None


def _nodes(view: View, prio: int) -> list[_Node]:
    found: list[_Node] = []
    for cell in view.nodes:
        used = view.used[cell]
        same = sum(used.values()) if view.across else used.get(prio, 0)
        higher = 0 if view.across else sum(n for at, n in used.items() if at > prio)
        size = int(view.cells.leaf1[cell] - view.cells.leaf0[cell])
        room = size - sum(n for at, n in used.items() if at >= prio)
        found.append(_Node(cell, *view.fit(cell), same, higher, room))
    return sorted(found, key=lambda node: node.place)


def _nodes_for(nodes: Sequence[_Node], members: Sequence[int]) -> list[int] | None:
    """One pass over the nodes, filling each as far as the next member goes; None if it would need an unfit node."""
    chosen: list[int] = []
    taken = 0
    for node in nodes:
        while len(chosen) < len(members) and node.room - taken >= members[len(chosen)]:
            if not (node.healthy and node.allowed):
                return None
            taken += members[len(chosen)]
            chosen.append(node.cell)
        if len(chosen) == len(members):
            return chosen
        taken = 0
    return None


def _leaves_for(view: View, nodes: Sequence[int], members: Sequence[int], prio: int) -> list[list[int]]:
    left: dict[int, list[int]] = {}
    placed: list[list[int]] = []
    for node, size in zip(nodes, members):
        if node not in left:
            leaves = view.cells.leaf_cells[int(view.cells.leaf0[node]) : int(view.cells.leaf1[node])]
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
