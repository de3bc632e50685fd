"""Find physical cells for a virtual placement: buddies, backtracking, safe splits around what cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rota.cluster.core.buddy import NONE, OPPORTUNISTIC, BuddyCells, Key, swap_out

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
    split as far as that breaks nobody's guarantee.
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
    """Candidates in order, those with fewest opportunistic devices first; none if there are fewer than needed."""
    bound, healthy, used = buddy.bound, buddy.healthy, buddy.used
    able = [c for c in cells if bound[c] == NONE and healthy[c]]
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
