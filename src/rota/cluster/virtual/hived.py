"""Virtual clusters: gangs on virtual cells that are bound to real ones; lazy and stateful preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rota.cluster.core.txn import Txn
from rota.cluster.virtual.cells import FREE, NONE, OPPORTUNISTIC, BuddyCells, Key, VirtualCells
from rota.cluster.virtual.mapping import Leaves, View, can_hold, map_leaves, place_members, view_nodes
from rota.spec.errors import BadInput

PRIORITY_MAX = 1000

PlacedGangState = Literal["allocated", "preempting", "being_preempted"]
Allowed = Callable[[int], bool] | None
"""Whether a node (its row among the nodes of the forest) may be used; None: every node may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangAsk:
    """A gang of one tenant: devices of each member, ascending. Priority below 0 is opportunistic.

    ``kind`` is the type of device, None for any that the tenant owns; ``pinned`` restricts the gang to one owned cell;
    ``lazy`` lets it run on as opportunistic when its tenant needs its cells.
    """

    name: str
    tenant: str
    priority: int
    members: tuple[int, ...]
    kind: str | None = None
    pinned: str | None = None
    lazy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlan:
    """A placement that was found: leaves of each member, virtual ones (none: opportunistic), whom it displaces."""

    ask: GangAsk
    leaves: Leaves
    vleaves: Leaves = ()
    victims: tuple[str, ...] = ()
    preemptors: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()

    @property
    def flat(self) -> list[tuple[int, int]]:
        """Every leaf with its virtual leaf."""
        leaves = [leaf for member in self.leaves for leaf in member]
        vleaves = [v for member in self.vleaves for v in member] or [NONE] * len(leaves)
        return list(zip(leaves, vleaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGang:
    """A gang that has cells, or reserves them while its victims leave; no virtual ones after giving way lazily."""

    plan: GangPlan
    state: PlacedGangState
    lazily_preempted: bool = False


@dataclass(slots=True)
class HivedCluster:
    """All gangs on one forest of cells. Leaves are free, used, reserving (used, reserved by a preemptor) or reserved.

    ``user`` has the gang that runs on a leaf, ``reserver`` the one that waits for it; both at once is "reserving".
    Every method that changes something takes the Txn that can undo it. Source: HiveD (OSDI'20) and the state machine
    of hivedscheduler (doc/design/state-machine.md).
    """

    cells: VirtualCells
    buddy: BuddyCells = field(init=False)
    gangs: dict[str, PlacedGang] = field(default_factory=dict[str, PlacedGang])
    user: dict[int, str] = field(default_factory=dict[int, str])
    reserver: dict[int, str] = field(default_factory=dict[int, str])
    _views: dict[tuple[str, str, int], list[int]] = field(default_factory=dict[tuple[str, str, int], list[int]])

    _owned: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _levels: dict[tuple[str, str], set[int]] = field(default_factory=dict[tuple[str, str], set[int]])
    _roots: dict[tuple[str, str, Key], list[int]] = field(default_factory=dict[tuple[str, str, Key], list[int]])

    def __post_init__(self) -> None:
        self.buddy = BuddyCells(self.cells)

    def check(self, ask: GangAsk) -> None:
        """Raise BadInput for a tenant, pinned cell, priority or type of device that the gang may not ask."""
        tenant = next((t for t in self.cells.tenants if t.name == ask.tenant), None)
        if tenant is None:
            raise BadInput(f"unknown virtual cluster {ask.tenant!r}")
        if ask.priority > PRIORITY_MAX:
            raise BadInput(f"priority {ask.priority} is above {PRIORITY_MAX}")
        if ask.priority < OPPORTUNISTIC:
            raise BadInput(f"priority {ask.priority} is below {OPPORTUNISTIC}")
        if ask.pinned is not None:
            if ask.pinned not in tenant.pinned:
                raise BadInput(f"unknown pinned cell {ask.pinned!r} of {ask.tenant}")
            if ask.priority < 0:
                raise BadInput("opportunistic work cannot use a pinned cell")
        elif ask.kind is not None and not self._chains(ask):
            raise BadInput(f"leaf type {ask.kind!r} is not owned by {ask.tenant}")

    def _chains(self, ask: GangAsk) -> list[str]:
        """Chains that may serve the gang, in descending order of their names."""
        owned = self._owned.get(ask.tenant)
        if owned is None:
            roots = [r for r in self.cells.virtual.roots if self._is_mine(r, ask.tenant) and not self.cells.pin[r]]
            owned = self._owned[ask.tenant] = {self.cells.vchain[root] for root in roots}
        return [
            chain
            for chain in self.cells.chains
            if (ask.priority < 0 or chain in owned) and ask.kind in (None, self.cells.leaf_kind[chain])
        ]

    def _is_mine(self, vcell: int, tenant: str) -> bool:
        return self.cells.tenants[self.cells.tenant[vcell]].name == tenant

    def find(self, txn: Txn, ask: GangAsk, allowed: Allowed, kept: Leaves = ()) -> GangPlan | None:
        """A placement for the whole gang inside the allowed nodes, or None. Changes nothing. Raises BadInput.

        ``kept`` are virtual leaves of its members that were found before: they are taken again if they can be.
        """
        self.check(ask)
        for chain in self._chains(ask) if ask.pinned is None else [""]:
            with txn.trial():
                if ask.priority >= 0:
                    plan = self._guaranteed(txn, ask, chain, allowed, kept)
                else:
                    plan = self._opportunistic(ask, chain, allowed)
            if plan is not None:
                return self._with_victims(plan)
        return None

    def _opportunistic(self, ask: GangAsk, chain: str, allowed: Allowed) -> GangPlan | None:
        buddy, physical = self.buddy, self.cells.physical
        view = View(
            cells=physical,
            nodes=self._nodes_of_chain(chain),
            prio=buddy.prio,
            used=buddy.used,
            fit=lambda cell: buddy.healthy[cell] and self._cell_allowed(cell, allowed),
            across=False,
        )
        placed = place_members(view, ask.members, OPPORTUNISTIC)
        return None if placed is None else GangPlan(ask=ask, leaves=tuple(tuple(member) for member in placed))

    def _guaranteed(self, txn: Txn, ask: GangAsk, chain: str, allowed: Allowed, kept: Leaves) -> GangPlan | None:
        buddy = self.buddy

        def fit(vcell: int) -> bool:
            cell = buddy.serves[vcell]
            return cell == NONE or (buddy.healthy[cell] and self._cell_allowed(cell, allowed))

        view = View(
            cells=self.cells.virtual,
            nodes=self._nodes_of_tenant(ask.tenant, chain, ask.pinned or ""),
            prio=buddy.vprio,
            used=buddy.vused,
            fit=fit,
            across=True,
        )
        again = [list(member) for member in kept] if can_hold(view, kept, ask.members, ask.priority) else None
        placed = again or place_members(view, ask.members, ask.priority)
        if placed is None:
            return None
        vleaves = [v for member in placed for v in member]
        lazy = self._displaced_lazily(vleaves, ask.name)
        for name in lazy:
            self.preempt_lazily(txn, name)

        def usable(cell: int) -> bool:
            return self._cell_allowed(cell, allowed)

        found = map_leaves(buddy, vleaves, None if allowed is None else usable)
        if found is None:
            return None
        return GangPlan(
            ask=ask,
            leaves=tuple(tuple(found[v] for v in member) for member in placed),
            vleaves=tuple(tuple(member) for member in placed),
            lazy=tuple(lazy),
        )

    def _displaced_lazily(self, vleaves: Iterable[int], name: str) -> list[str]:
        """Gangs that hold these virtual leaves and agreed to run on as opportunistic."""
        users = (self.user.get(self.buddy.serves[v], "") for v in vleaves if self.buddy.serves[v] != NONE)
        names = dict.fromkeys(user for user in users if user and user != name)
        return [n for n in names if self.gangs[n].plan.ask.lazy and self.gangs[n].state == "allocated"]

    def _cell_allowed(self, cell: int, allowed: Allowed) -> bool:
        if allowed is None:
            return True
        physical = self.cells.physical
        node = int(physical.node[cell])
        if node >= 0:
            return allowed(node)
        return any(self._cell_allowed(child, allowed) for child in physical.children[cell])

    def _nodes_of_chain(self, chain: str) -> list[int]:
        key = ("", chain, 0)
        if key not in self._views:
            rows = [row for row in range(len(self.cells.physical)) if self.cells.chain[row] == chain]
            self._views[key] = view_nodes(self.cells.physical, rows)
        return self._views[key]

    def _nodes_of_tenant(self, tenant: str, chain: str, pin: str) -> list[int]:
        key = (tenant, pin or chain, 1 if pin else 2)
        if key not in self._views:
            rows = [
                row
                for row in range(len(self.cells.virtual))
                if self._is_mine(row, tenant)
                and self.cells.pin[row] == pin
                and (bool(pin) or self.cells.vchain[row] == chain)
            ]
            self._views[key] = view_nodes(self.cells.virtual, rows)
        return self._views[key]

    def _with_victims(self, plan: GangPlan) -> GangPlan:
        mine = plan.ask.name
        users = dict.fromkeys(self.user[leaf] for leaf, _ in plan.flat if leaf in self.user)
        waiting = dict.fromkeys(self.reserver[leaf] for leaf, _ in plan.flat if leaf in self.reserver)
        return replace(
            plan,
            victims=tuple(name for name in users if name != mine),
            preemptors=tuple(name for name in waiting if name != mine),
        )

    def allocate(self, txn: Txn, plan: GangPlan) -> None:
        """The gang runs on its leaves, which must be free or reserved by it; preemptors in its way are cancelled."""
        name = plan.ask.name
        old = self.gangs.get(name)
        if old is not None and old.state == "preempting":
            for leaf, _ in plan.flat:
                txn.drop(self.reserver, leaf)
                txn.put(self.user, leaf, name)
        else:
            self._make_way(txn, plan)
            for leaf, vleaf in plan.flat:
                self.buddy.occupy(txn, leaf, vleaf, plan.ask.priority if vleaf != NONE else OPPORTUNISTIC)
                txn.put(self.user, leaf, name)
        txn.put(self.gangs, name, PlacedGang(plan=plan, state="allocated", lazily_preempted=_gave_way(plan)))

    def reserve(self, txn: Txn, plan: GangPlan) -> None:
        """The gang takes its leaves at once, in the books; what runs there is being preempted until it leaves."""
        self._make_way(txn, plan)
        for leaf, vleaf in plan.flat:
            if leaf in self.user:
                self.buddy.vacate(txn, leaf)
                self._set_state(txn, self.user[leaf], "being_preempted")
            self.buddy.occupy(txn, leaf, vleaf, plan.ask.priority)
            txn.put(self.reserver, leaf, plan.ask.name)
        txn.put(self.gangs, plan.ask.name, PlacedGang(plan=plan, state="preempting"))

    def _make_way(self, txn: Txn, plan: GangPlan) -> None:
        for name in plan.preemptors:
            if name in self.gangs:
                self.cancel(txn, name)
        for name in plan.lazy:
            self.preempt_lazily(txn, name)

    def cancel(self, txn: Txn, name: str) -> None:
        """A preemptor gives up: what its victims still use is theirs again, the rest is free."""
        gang = self.gangs[name]
        for leaf, _ in gang.plan.flat:
            self.buddy.vacate(txn, leaf)
            txn.drop(self.reserver, leaf)
        txn.drop(self.gangs, name)
        victims: dict[str, None] = {}
        for leaf, _ in gang.plan.flat:
            if leaf in self.user:
                victim = self.gangs[self.user[leaf]]
                victims[self.user[leaf]] = None
                vleaf = dict(victim.plan.flat)[leaf]
                prio = victim.plan.ask.priority if vleaf != NONE else OPPORTUNISTIC
                self.buddy.occupy(txn, leaf, vleaf, prio)
        for victim_name in victims:
            if not any(leaf in self.reserver for leaf, _ in self.gangs[victim_name].plan.flat):
                self._set_state(txn, victim_name, "allocated")

    def release(self, txn: Txn, name: str) -> None:
        """A gang that ran is gone; leaves that a preemptor reserved are now reserved for it alone."""
        gang = self.gangs[name]
        for leaf, _ in gang.plan.flat:
            if self.user.get(leaf) == name:
                txn.drop(self.user, leaf)
                if leaf not in self.reserver:
                    self.buddy.vacate(txn, leaf)
        txn.drop(self.gangs, name)

    def preempt_lazily(self, txn: Txn, name: str) -> None:
        """The gang loses its virtual cells and runs on as opportunistic work."""
        gang = self.gangs[name]
        for leaf, _ in gang.plan.flat:
            if leaf not in self.reserver:
                self.buddy.vacate(txn, leaf)
                self.buddy.occupy(txn, leaf, NONE, OPPORTUNISTIC)
        txn.put(self.gangs, name, replace(gang, plan=replace(gang.plan, vleaves=()), lazily_preempted=True))

    def _set_state(self, txn: Txn, name: str, state: PlacedGangState) -> None:
        txn.put(self.gangs, name, replace(self.gangs[name], state=state))

    def adopt(
        self, txn: Txn, ask: GangAsk, leaves: Sequence[Sequence[int]], owned_levels: Sequence[Sequence[int]]
    ) -> None:
        """A gang runs on these leaves, of another configuration perhaps: find virtual cells for it.

        ``owned_levels`` has per leaf the levels of owned cells it may lie under, the first that serves first; if that
        is not safe, the last. What does not fit its tenant any more, or would break another's guarantee, is preempted
        lazily, never killed.
        """
        flat = [leaf for member in leaves for leaf in member]
        plan = GangPlan(ask=ask, leaves=tuple(tuple(member) for member in leaves))
        vleaves = None
        for order in (1, -1) if ask.priority >= 0 else ():
            with txn.trial():
                vleaves = vleaves or self._readmit(txn, ask, flat, [levels[::order] for levels in owned_levels])
                if vleaves is not None:
                    txn.keep()
            if vleaves is not None:
                break
        if vleaves is None:
            for leaf in flat:
                self.buddy.occupy(txn, leaf, NONE, OPPORTUNISTIC)
        else:
            rest = iter(vleaves)
            plan = replace(plan, vleaves=tuple(tuple(next(rest) for _ in member) for member in leaves))
        for leaf in flat:
            txn.put(self.user, leaf, ask.name)
        txn.put(self.gangs, ask.name, PlacedGang(plan=plan, state="allocated", lazily_preempted=_gave_way(plan)))

    def _readmit(
        self, txn: Txn, ask: GangAsk, leaves: Sequence[int], owned_levels: Sequence[Sequence[int]]
    ) -> list[int] | None:
        found: list[int] = []
        for leaf, levels in zip(leaves, owned_levels):
            vleaf = self._first_under(ask, leaf, levels)
            if vleaf == NONE and self._take_over(txn, ask, leaf, levels):
                vleaf = self._first_under(ask, leaf, levels)
            if vleaf == NONE:
                return None
            holder = self.user.get(self.buddy.serves[vleaf]) if self.buddy.serves[vleaf] != NONE else None
            if holder is not None:
                self.preempt_lazily(txn, holder)
            self.buddy.occupy(txn, leaf, vleaf, ask.priority)
            found.append(vleaf)
        return found if self.buddy.is_safe(self.cells.chain[leaves[0]]) else None

    def _first_under(self, ask: GangAsk, leaf: int, levels: Sequence[int]) -> int:
        return next((v for level in levels if (v := self._virtual_under(ask, leaf, level)) != NONE), NONE)

    def _take_over(self, txn: Txn, ask: GangAsk, leaf: int, levels: Sequence[int]) -> bool:
        """Preempt lazily those of lower priority that hold an owned cell elsewhere, so that it can serve this leaf.

        The cell of those who agreed to run on without it comes first, then that of the lowest.
        """
        buddy = self.buddy
        for level in levels:
            cell = self.cells.physical.ancestors(leaf)[level - 1]
            held = dict[int, list[str]]()
            for root in self._roots_of(ask.tenant, ask.pinned or "", buddy.key(cell)) if buddy.is_free(cell) else ():
                if buddy.serves[root] != NONE and FREE < buddy.vprio[root] < ask.priority:
                    held[root] = self._users_in(buddy.serves[root])
            if held:
                root = min(held, key=lambda v: (not all(map(self._is_lazy, held[v])), buddy.vprio[v], v))
                for name in held[root]:
                    self.preempt_lazily(txn, name)
                return True
        return False

    def _users_in(self, cell: int) -> list[str]:
        """Who runs on the devices of a physical cell."""
        physical = self.cells.physical
        leaves = physical.leaf_cells[int(physical.leaf0[cell]) : int(physical.leaf1[cell])]
        return list(dict.fromkeys(self.user[leaf] for leaf in leaves if leaf in self.user))

    def _is_lazy(self, name: str) -> bool:
        return self.gangs[name].plan.ask.lazy

    def _virtual_under(self, ask: GangAsk, leaf: int, level: int) -> int:
        """The virtual cell of a leaf below an owned cell of this level, NONE if there is none."""
        vleaf = self._virtual_for(ask, leaf, level)
        root = self.buddy.serves[self.cells.root[vleaf]] if vleaf != NONE else NONE
        return vleaf if root == NONE or root == self.cells.physical.ancestors(leaf)[level - 1] else NONE

    def levels_over(self, ask: GangAsk, member: Sequence[int]) -> list[int]:
        """Levels of the cells that the tenant owns and that could hold a member whole, the lowest first."""
        cells, physical = self.cells, self.cells.physical
        known = self._levels.get((ask.tenant, cells.chain[member[0]]))
        if known is None:
            for root in cells.virtual.roots:
                if self._is_mine(root, ask.tenant):
                    self._levels.setdefault((ask.tenant, cells.vchain[root]), set()).add(self.buddy.vlevel[root])
            known = self._levels.setdefault((ask.tenant, cells.chain[member[0]]), set())
        common = set(physical.ancestors(min(member))).intersection(physical.ancestors(max(member)))
        return sorted(known & {self.buddy.level[cell] for cell in common})

    def _virtual_for(self, ask: GangAsk, cell: int, level: int) -> int:
        """The virtual cell that a physical one serves or could serve for this gang, NONE if there is none."""
        buddy, cells = self.buddy, self.cells
        if cell == NONE:
            return NONE
        if buddy.bound[cell] != NONE:
            vcell = buddy.bound[cell]
            mine = self._is_mine(vcell, ask.tenant) and cells.pin[vcell] == (ask.pinned or "")
            return vcell if mine and buddy.vprio[vcell] < ask.priority else NONE
        if buddy.level[cell] == level:
            if not buddy.is_free(cell):
                return NONE
            candidates = self._roots_of(ask.tenant, ask.pinned or "", buddy.key(cell))
        else:
            above = self._virtual_above(ask, buddy.parent[cell], level)
            candidates = cells.virtual.children[above] if above != NONE else []
        able = [v for v in candidates if buddy.serves[v] == NONE or FREE < buddy.vprio[v] < ask.priority]
        return min(able, key=lambda v: buddy.vprio[v], default=NONE)

    def _roots_of(self, tenant: str, pin: str, key: Key) -> list[int]:
        """Virtual cells that a tenant owns, of this chain and level."""
        if (tenant, pin, key) not in self._roots:
            cells, buddy = self.cells, self.buddy
            self._roots[tenant, pin, key] = [
                root
                for root in cells.virtual.roots
                if self._is_mine(root, tenant)
                and cells.pin[root] == pin
                and (cells.vchain[root], buddy.vlevel[root]) == key
            ]
        return self._roots[tenant, pin, key]

    def _virtual_above(self, ask: GangAsk, cell: int, level: int) -> int:
        if cell == NONE or self.buddy.level[cell] > level:
            return NONE
        if self.buddy.bound[cell] != NONE:
            vcell = self.buddy.bound[cell]
            return vcell if self._is_mine(vcell, ask.tenant) and self.cells.pin[vcell] == (ask.pinned or "") else NONE
        return self._virtual_for(ask, cell, level)


def _gave_way(plan: GangPlan) -> bool:
    return plan.ask.priority >= 0 and not plan.vleaves
