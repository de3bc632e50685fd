"""Configuration of virtual clusters: which cells each tenant owns, and the start-up check that all of them fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rota.cluster.core.capacity import Cells, CellSpec
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
                raise TopologyError(f"{tenant.name}: {path}: there is no physical cell of kind {chain}")
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
