"""Buddy allocation of physical cells for virtual ones: free lists, safety, bad cells and who carries the shortfall."""

from __future__ import annotations

from rota.cluster.core.txn import Txn
from rota.cluster.virtual.cells import VirtualCells

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
        self.doomed: dict[int, None] = {}
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

    # -- safety ------------------------------------------------------------------------------------------------------

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

    # -- binding -----------------------------------------------------------------------------------------------------

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
        if cell in self.doomed:
            txn.drop(self.doomed, cell)
        self._count_quota(txn, vcell, 1)
        self._give(txn, cell)
        self._share_the_bad(txn, self.v.chain[cell])

    def _count_quota(self, txn: Txn, vcell: int, change: int) -> None:
        key = (self.v.tenant[vcell], self.v.vchain[vcell], self.vlevel[vcell])
        txn.put(self.quota_left, key, self.quota_left[key] + change)

    # -- free lists --------------------------------------------------------------------------------------------------

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

    # -- health ------------------------------------------------------------------------------------------------------

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
            if self.healthy[cell] and cell in self.doomed:
                self._unbind_root(txn, cell, self.bound[cell])
        self._share_the_bad(txn, chain)

    def _share_the_bad(self, txn: Txn, chain: str) -> None:
        """Where a tenant could no longer get its cells from the healthy free ones, its shortfall is bound to bad cells.

        So the tenant sees the loss in its own view, and no other tenant does. Bindings that are not needed are undone.
        """
        if not self.bad_leaves[chain] and not self.doomed:
            return
        for level in range(self.v.tops[chain], 0, -1):
            for tenant in range(len(self.v.tenants)):
                while self._one_more_doomed(txn, tenant, (chain, level)):
                    pass
                while self._one_less_doomed(txn, tenant, (chain, level)):
                    pass

    def _one_more_doomed(self, txn: Txn, tenant: int, key: Key) -> bool:
        short = self.quota_left.get((tenant, *key), 0)
        if not short:
            return False
        bad = [cell for cell in self.at[key] if not self.healthy[cell] and self.is_free(cell)]
        if not bad or short <= self.left[key] - len(bad):
            return False
        vcell = next((v for v in self._roots(tenant, key) if self.serves[v] == NONE), NONE)
        if vcell == NONE:
            return False
        txn.put(self.doomed, bad[0], None)
        self._bind_root(txn, bad[0], vcell)
        return True

    def _one_less_doomed(self, txn: Txn, tenant: int, key: Key) -> bool:
        mine = [c for c in self.at[key] if c in self.doomed and self.v.tenant[self.bound[c]] == tenant]
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

    # -- use ---------------------------------------------------------------------------------------------------------

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
