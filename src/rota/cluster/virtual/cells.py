"""Cells of tenants, the start-up check that all of them fit, and their buddy allocation on physical cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rota.cluster.core.capacity import Cells, CellSpec
from rota.cluster.core.txn import Txn
from rota.spec.errors import BadInput


class TopologyError(BadInput):
    """Cells that contradict each other, or tenants that were promised more cells than there are.

    ``fields`` may have chain, level, need and have.
    """

    code = "TOPOLOGY_INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellType:
    """How cells of a kind are made: ``count`` children of a kind; a kind without a type is a device."""

    child: str
    count: int
    is_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCells:
    """What one tenant owns: ``(path, number)`` of cells, and single physical cells by their pinned identifier.

    A path ``a.b.c`` names cells of kind c inside trees of kind a.
    """

    name: str
    cells: tuple[tuple[str, int], ...] = ()
    pinned: tuple[str, ...] = ()


class VirtualCells:
    """The virtual cells of all tenants beside the physical forest, both in configuration order.

    ``chain`` of a cell is the kind of the tree it lies in; ``root`` of a virtual cell the cell that the tenant owns.
    """

    def __init__(
        self, forest: Sequence[CellSpec], types: Mapping[str, CellType], tenants: Sequence[TenantCells]
    ) -> None:
        self.physical = Cells(forest)
        self.tenants = tuple(tenants)
        self.chain: list[str] = [""] * len(self.physical)
        for root in self.physical.roots:
            for row in _below(self.physical, root):
                self.chain[row] = self.physical.specs[root].kind
        self.pinned: dict[str, int] = {spec.pinned: row for row, spec in enumerate(self.physical.specs) if spec.pinned}
        self._types = types
        self._check_types()
        roots: list[tuple[int, str, str, CellSpec]] = []
        for number, tenant in enumerate(tenants):
            roots += [(number, chain, "", spec) for chain, spec in self._owned(tenant)]
            roots += [(number, *self._pinned(tenant, pin)) for pin in tenant.pinned]
        self.virtual = Cells([spec for *_, spec in roots])
        self.tenant: list[int] = [0] * len(self.virtual)
        self.vchain: list[str] = [""] * len(self.virtual)
        self.root: list[int] = [0] * len(self.virtual)
        self.pin: list[str] = [""] * len(self.virtual)
        for top, (number, chain, pin, _) in zip(self.virtual.roots, roots):
            for row in _below(self.virtual, top):
                self.tenant[row], self.vchain[row], self.root[row], self.pin[row] = number, chain, top, pin
        self.children_at: dict[tuple[str, int], int] = {
            (self.chain[row], int(self.physical.level[row])): len(self.physical.children[row])
            for row in range(len(self.physical))
        }
        with_devices = {self.chain[root] for root in self.physical.roots if self.physical.size[root]}
        self.chains: list[str] = sorted(with_devices, reverse=True)
        self.tops: dict[str, int] = {self.chain[root]: int(self.physical.level[root]) for root in self.physical.roots}
        self._check_uniform()
        self.leaf_kind: dict[str, str] = {
            self.chain[leaf]: self.physical.specs[leaf].kind for leaf in self.physical.leaf_cells
        }
        self.quota: dict[tuple[int, str, int], int] = {}
        for top in self.virtual.roots:
            key = (self.tenant[top], self.vchain[top], int(self.virtual.level[top]))
            self.quota[key] = self.quota.get(key, 0) + 1
        self._check_fits()

    def _check_types(self) -> None:
        for kind in self._types:
            inside = [kind]
            while (made := self._types.get(inside[-1])) is not None:
                inside.append(made.child)
                if made.child == kind:
                    raise TopologyError(f"a {kind} would lie in itself: {' > '.join(inside)}")
                if len(inside) > len(self._types) + 1:
                    break
        seen: set[tuple[str, str]] = set()
        for cell in self.physical.node_cells:
            name = (self.chain[cell], self.physical.specs[cell].address)
            if name in seen:
                raise TopologyError(f"node {name[1]!r} is there twice", hint="a node lies in one place of a chain")
            seen.add(name)

    def _owned(self, tenant: TenantCells) -> list[tuple[str, CellSpec]]:
        made: list[tuple[str, CellSpec]] = []
        for path, number in tenant.cells:
            chain, *inner = path.split(".")
            kind = chain
            for part in inner:
                step = self._types.get(kind)
                if step is None or step.child != part:
                    raise TopologyError(f"{tenant.name}: {path}: a {kind} has no {part} in it")
                kind = part
            if chain not in {self.physical.specs[root].kind for root in self.physical.roots} and number:
                raise TopologyError(f"{tenant.name}: {path}: no physical cell has the kind {chain}")
            made += [(chain, self._make(kind, str(i))) for i in range(number)]
        return made

    def _make(self, kind: str, address: str) -> CellSpec:
        made = self._types.get(kind)
        if made is None:
            return CellSpec(kind=kind, address=address)
        children = tuple(self._make(made.child, str(i)) for i in range(made.count))
        return CellSpec(kind=kind, address=address, children=children, is_node=made.is_node)

    def _pinned(self, tenant: TenantCells, pin: str) -> tuple[str, str, CellSpec]:
        if pin not in self.pinned:
            raise TopologyError(f"{tenant.name}: no physical cell is pinned as {pin!r}")
        row = self.pinned[pin]
        return self.chain[row], pin, self.physical.specs[row]

    def _check_uniform(self) -> None:
        kinds: dict[tuple[str, int], str] = {}
        for row, spec in enumerate(self.physical.specs):
            key = (self.chain[row], int(self.physical.level[row]))
            if kinds.setdefault(key, spec.kind) != spec.kind:
                raise TopologyError(f"{key[0]}: level {key[1]} has cells of kind {kinds[key]} and {spec.kind}")

    def _check_fits(self) -> None:
        """From the top of every chain: what is left after a level is split for the level below."""
        for chain, top in self.tops.items():
            have = sum(self.chain[root] == chain for root in self.physical.roots)
            for level in range(top, 0, -1):
                need = sum(n for (_, c, at), n in self.quota.items() if (c, at) == (chain, level))
                if need > have:
                    raise TopologyError(
                        f"{chain}: tenants own {need} cells of level {level}, but only {have} are left for them",
                        hint="lower the number of cells of a tenant or add physical cells",
                        chain=chain,
                        level=level,
                        need=need,
                        have=have,
                    )
                have = (have - need) * self.children_at.get((chain, level), 0)


def _below(cells: Cells, row: int) -> list[int]:
    found = [row]
    for at in found:
        found.extend(cells.children[at])
    return sorted(found)


FREE = -2
OPPORTUNISTIC = -1
NONE = -1
Key = tuple[str, int]
"""Chain and level."""


class BuddyCells:
    """Which physical cell serves which virtual one, and what is still free.

    A cell is in the free list of its level when neither it nor anything around it is bound or split. Free lists keep
    the order in which cells came in; one that is taken is replaced by the last. Everything is written through a Txn.
    Source: HiveD (OSDI'20), section 3.3.
    """

    def __init__(self, cells: VirtualCells) -> None:
        self.v = cells
        physical, virtual = cells.physical, cells.virtual
        self.level: list[int] = physical.level.tolist()
        self.parent: list[int] = physical.parent.tolist()
        self.vlevel: list[int] = virtual.level.tolist()
        self.vparent: list[int] = virtual.parent.tolist()
        self.healthy = [True] * len(physical)
        self.split = [False] * len(physical)
        self.bound = [NONE] * len(physical)
        self.serves = [NONE] * len(virtual)
        self.prio = [FREE] * len(physical)
        self.vprio = [FREE] * len(virtual)
        self.used: list[dict[int, int]] = [{} for _ in range(len(physical))]
        self.vused: list[dict[int, int]] = [{} for _ in range(len(virtual))]
        self.free: dict[Key, tuple[int, ...]] = {(c, n): () for c, top in cells.tops.items() for n in range(1, top + 1)}
        self.left: dict[Key, int] = dict.fromkeys(self.free, 0)
        self.quota_left: dict[tuple[int, str, int], int] = dict(cells.quota)
        self.bad_leaves: dict[str, int] = dict.fromkeys(cells.tops, 0)
        self.condemned: dict[int, None] = {}
        self.at: dict[Key, list[int]] = {key: [] for key in self.free}
        for row in range(len(physical)):
            self.at[self.key(row)].append(row)
        for row in physical.roots:
            self.free[self.key(row)] += (row,)
        for key in self.at:
            self.left[key] = len(self.at[key])
        txn = Txn()
        for row in virtual.roots:
            if cells.pin[row]:
                self._bind_root(txn, cells.pinned[cells.pin[row]], row)

    def key(self, cell: int) -> Key:
        """Chain and level of a physical cell."""
        return (self.v.chain[cell], self.level[cell])

    def wanted(self, key: Key) -> int:
        """Cells of this chain and level that tenants own and have not bound."""
        return sum(n for (_, chain, level), n in self.quota_left.items() if (chain, level) == key)

    def is_safe(self, chain: str) -> bool:
        """True when every tenant can still get all cells it owns, split from larger ones where needed.

        ``splittable(l) = free(l) - wanted(l) + splittable(l + 1) * children(l + 1)`` must not be negative at any level.
        """
        return min(self.splittable(chain).values(), default=0) >= 0

    def splittable(self, chain: str) -> dict[int, int]:
        """By level, how many cells may be split without breaking what tenants own."""
        found: dict[int, int] = {}
        above = 0
        for level in range(self.v.tops[chain], 0, -1):
            found[level] = len(self.free[chain, level]) - self.wanted((chain, level)) + above
            above = found[level] * self.v.children_at[chain, level]
        return found

    def bind_leaf(self, txn: Txn, cell: int, vcell: int) -> None:
        """Bind a device to a virtual device, with every cell around them that is not bound yet."""
        path: list[tuple[int, int]] = []
        while vcell != NONE and self.serves[vcell] == NONE:
            path.append((cell, vcell))
            cell, vcell = self.parent[cell], self.vparent[vcell]
        for below, vbelow in path:
            if self.v.root[vbelow] == vbelow:
                self._bind_root(txn, below, vbelow)
            else:
                txn.set_item(self.bound, below, vbelow)
                txn.set_item(self.serves, vbelow, below)

    def unbind_leaf(self, txn: Txn, cell: int) -> None:
        """Undo the binding of a device, and of every cell around it that serves nothing else any more."""
        vcell = self.bound[cell]
        while vcell != NONE:
            if self.v.root[vcell] == vcell:
                if not self.v.pin[vcell]:
                    self._unbind_root(txn, cell, vcell)
                return
            txn.set_item(self.bound, cell, NONE)
            txn.set_item(self.serves, vcell, NONE)
            cell, vcell = self.parent[cell], self.vparent[vcell]
            if any(self.serves[child] != NONE for child in self.v.virtual.children[vcell]):
                return

    def _bind_root(self, txn: Txn, cell: int, vcell: int) -> None:
        txn.set_item(self.bound, cell, vcell)
        txn.set_item(self.serves, vcell, cell)
        self._count_quota(txn, vcell, -1)
        self._take(txn, cell)
        self._share_the_bad(txn, self.v.chain[cell])

    def _unbind_root(self, txn: Txn, cell: int, vcell: int) -> None:
        txn.set_item(self.bound, cell, NONE)
        txn.set_item(self.serves, vcell, NONE)
        if cell in self.condemned:
            txn.drop(self.condemned, cell)
        self._count_quota(txn, vcell, 1)
        self._give(txn, cell)
        self._share_the_bad(txn, self.v.chain[cell])

    def _count_quota(self, txn: Txn, vcell: int, change: int) -> None:
        key = (self.v.tenant[vcell], self.v.vchain[vcell], self.vlevel[vcell])
        txn.put(self.quota_left, key, self.quota_left[key] + change)

    def _take(self, txn: Txn, cell: int) -> None:
        """Take a cell out of the free lists, splitting what is around it; its inside counts as gone."""
        self._count_inside(txn, cell, -1)
        while True:
            above = self.parent[cell]
            key = self.key(cell)
            whole = above != NONE and not self.split[above]
            members = self.free[key] + (tuple(self.v.physical.children[above]) if whole else ())
            txn.put(self.free, key, swap_out(members, cell))
            if not whole:
                return
            txn.set_item(self.split, above, True)
            txn.put(self.left, self.key(above), self.left[self.key(above)] - 1)
            cell = above

    def _give(self, txn: Txn, cell: int) -> None:
        """Put a cell back, merging it with its buddies as far as all of them are free."""
        self._count_inside(txn, cell, 1)
        while True:
            above, key = self.parent[cell], self.key(cell)
            buddies = self.v.physical.children[above] if above != NONE else []
            if above == NONE or any(self.bound[b] != NONE or self.split[b] for b in buddies):
                txn.put(self.free, key, (*self.free[key], cell))
                return
            rest = self.free[key]
            for buddy in buddies:
                if buddy != cell:
                    rest = swap_out(rest, buddy)
            txn.put(self.free, key, rest)
            txn.set_item(self.split, above, False)
            txn.put(self.left, self.key(above), self.left[self.key(above)] + 1)
            cell = above

    def _count_inside(self, txn: Txn, cell: int, sign: int) -> None:
        chain, level = self.key(cell)
        count = 1
        for at in range(level, 0, -1):
            txn.put(self.left, (chain, at), self.left[chain, at] + sign * count)
            count *= self.v.children_at[chain, at]

    def is_free(self, cell: int) -> bool:
        """True when the cell can be had whole, alone or by splitting."""
        while True:
            if self.bound[cell] != NONE or self.split[cell]:
                return False
            above = self.parent[cell]
            if above == NONE or self.split[above]:
                return True
            cell = above

    def set_health(self, txn: Txn, leaf: int, healthy: bool) -> None:
        """Change the fitness of a device; a cell is bad while anything in it is."""
        if self.healthy[leaf] == healthy:
            return
        chain = self.v.chain[leaf]
        txn.put(self.bad_leaves, chain, self.bad_leaves[chain] + (-1 if healthy else 1))
        cell = leaf
        while cell != NONE:
            now = healthy and all(self.healthy[child] for child in self.v.physical.children[cell])
            if self.healthy[cell] == now:
                break
            txn.set_item(self.healthy, cell, now)
            cell = self.parent[cell]
        for cell in self.v.physical.ancestors(leaf):
            if self.healthy[cell] and cell in self.condemned:
                self._unbind_root(txn, cell, self.bound[cell])
        self._share_the_bad(txn, chain)

    def _share_the_bad(self, txn: Txn, chain: str) -> None:
        """Where a tenant could no longer get its cells from the healthy free ones, its shortfall is bound to bad cells.

        So the tenant sees the loss in its own view, and no other tenant does. Bindings that are not needed are undone.
        """
        if not self.bad_leaves[chain] and not self.condemned:
            return
        for level in range(self.v.tops[chain], 0, -1):
            for tenant in range(len(self.v.tenants)):
                while self._condemn_one(txn, tenant, (chain, level)):
                    pass
                while self._spare_one(txn, tenant, (chain, level)):
                    pass

    def _condemn_one(self, txn: Txn, tenant: int, key: Key) -> bool:
        short = self.quota_left.get((tenant, *key), 0)
        if not short:
            return False
        bad = [cell for cell in self.at[key] if not self.healthy[cell] and self.is_free(cell)]
        if not bad or short <= self.left[key] - len(bad):
            return False
        vcell = next((v for v in self._roots(tenant, key) if self.serves[v] == NONE), NONE)
        if vcell == NONE:
            return False
        txn.put(self.condemned, bad[0], None)
        self._bind_root(txn, bad[0], vcell)
        return True

    def _spare_one(self, txn: Txn, tenant: int, key: Key) -> bool:
        mine = [c for c in self.at[key] if c in self.condemned and self.v.tenant[self.bound[c]] == tenant]
        mine = [c for c in mine if self.prio[c] < 0]
        if not mine:
            return False
        bad = sum(not self.healthy[cell] and self.is_free(cell) for cell in self.at[key])
        if self.quota_left.get((tenant, *key), 0) >= self.left[key] - bad:
            return False
        self._unbind_root(txn, mine[0], self.bound[mine[0]])
        return True

    def _roots(self, tenant: int, key: Key) -> list[int]:
        v = self.v
        return [
            row
            for row in v.virtual.roots
            if v.tenant[row] == tenant and not v.pin[row] and (v.vchain[row], self.vlevel[row]) == key
        ]

    def occupy(self, txn: Txn, leaf: int, vleaf: int, prio: int) -> None:
        """Give a free device to a job: for a virtual device (guaranteed), or for none (opportunistic)."""
        if vleaf != NONE:
            _use(txn, self.vprio, self.vused, self.vparent, self.v.virtual.children, vleaf, prio)
            self.bind_leaf(txn, leaf, vleaf)
        _use(txn, self.prio, self.used, self.parent, self.v.physical.children, leaf, prio)

    def vacate(self, txn: Txn, leaf: int) -> None:
        """Take a device back from its holder."""
        vleaf = self.bound[leaf]
        _use(txn, self.prio, self.used, self.parent, self.v.physical.children, leaf, FREE)
        if vleaf != NONE:
            _use(txn, self.vprio, self.vused, self.vparent, self.v.virtual.children, vleaf, FREE)
            self.unbind_leaf(txn, leaf)


def swap_out(cells: tuple[int, ...], cell: int) -> tuple[int, ...]:
    """The list without one cell, whose place the last one takes."""
    at = cells.index(cell)
    return cells[:-1] if at == len(cells) - 1 else (*cells[:at], cells[-1], *cells[at + 1 : -1])


def _use(
    txn: Txn,
    prio: list[int],
    used: list[dict[int, int]],
    parent: list[int],
    children: list[list[int]],
    leaf: int,
    new: int,
) -> None:
    """Set the priority of a leaf; counts and highest priority of the cells around it follow."""
    old = prio[leaf]
    cell = leaf
    while cell != NONE:
        for level, change in ((old, -1), (new, 1)):
            if level != FREE:
                txn.put(used[cell], level, used[cell].get(level, 0) + change)
        if new > prio[cell] or cell == leaf:
            txn.set_item(prio, cell, new)
        elif new < old == prio[cell]:
            highest = max([prio[child] for child in children[cell]])
            if highest != old:
                txn.set_item(prio, cell, highest)
        cell = parent[cell]
