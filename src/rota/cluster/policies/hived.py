"""HiveD policy: gangs on the cells of virtual clusters, with idle cells lent to jobs that may be stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import groupby

from rota.cluster.core.capacity import GPU, CellSpec
from rota.cluster.core.jobs import CELL_LABEL, Allocation, Allocations, LiveJob, Shape, Wait, line_key
from rota.cluster.core.placement import parted, place
from rota.cluster.core.preemption import choose_victims, lower_in_queue
from rota.cluster.core.profile import Placer, Profile, Victim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import ByArrival, LimitsOnly
from rota.cluster.virtual.cells import CellType, TenantCells, TopologyError, VirtualCells
from rota.cluster.virtual.hived import PRIORITY_MAX, GangAsk, GangPlan, HivedCluster
from rota.cluster.virtual.mapping import Leaves
from rota.spec.errors import BadInput, nearest
from rota.spec.ids import JobId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Node


class CellBook:
    """The virtual clusters of one state: leaf number i is device row i, tenants are leaf queues.

    Cells are whole nodes and what is in them, and racks of equal nodes where a queue owns or pins one.
    """

    def __init__(self, state: State) -> None:
        self.cluster = HivedCluster(_virtual_cells(state))
        self.leaf: list[int] = self.cluster.cells.physical.leaf_cells
        self.row = {leaf: device for device, leaf in enumerate(self.leaf)}
        txn = Txn()
        self.seen_marks = -1
        leaves_of = Counter(self.cluster.cells.tenant[leaf] for leaf in self.cluster.cells.virtual.leaf_cells)
        self.owned = {tenant.name: leaves_of[i] for i, tenant in enumerate(self.cluster.cells.tenants)}
        self.tried: tuple[Txn, int, LiveJob, GangPlan | None] | None = None
        self.claimed: dict[JobId, Leaves] = {}
        self.follow_health(txn, state)
        for row in sorted(state.holders(), key=lambda row: (-row.ask.priority, row.started_at, row.ask.id)):
            self.hold(txn, state, row)

    def forget_gone(self, state: State) -> None:
        """Drop what was claimed for jobs that are gone."""
        for job in [job for job in self.claimed if job not in state.jobs]:
            del self.claimed[job]

    def follow_health(self, txn: Txn, state: State) -> None:
        """Take over which devices are in order."""
        if state.marks != self.seen_marks:
            self.seen_marks = state.marks
            good = (state.dev_health == 0) & (state.node_health[state.dev_node] == 0)
            for device, leaf in enumerate(self.leaf):
                self.cluster.buddy.set_health(txn, leaf, bool(good[device]))

    def hold(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job runs: find its virtual cells, or let it run as opportunistic if its tenant has none for it."""
        members = [[self.leaf[d] for d in devices] for devices in _members_of(row) if devices]
        if row.ask.id in self.claimed:
            txn.drop(self.claimed, row.ask.id)
        if members:
            ask = gang_ask(row)
            if ask.priority >= 0 and not row.ask.preemptible:
                ask = replace(ask, priority=PRIORITY_MAX)  # no job is above it any more
            levels = [at for member in members for at in [self.cluster.levels_over(ask, member)] * len(member)]
            self.cluster.adopt(txn, ask, members, levels)

    def release(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job gave its devices back."""
        if row.ask.id in self.cluster.gangs:
            self.cluster.release(txn, row.ask.id)

    def reserve(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job waits for its victims to leave: its cells are reserved, those that are free as well.

        Later passes, which undo claims and make them anew, keep its virtual cells: in a cluster of its tenant's own it
        would hold them by now, and a later job must not move it.
        """
        plan = self._find(txn, state, row)
        if plan is not None:
            self.claimed[row.ask.id] = plan.vleaves
            self.cluster.reserve(txn, plan)

    def find(self, txn: Txn, state: State, row: LiveJob) -> GangPlan | None:
        """A placement by cells, victims included, or None; the same answer as long as nothing was written since."""
        if self.tried is None or self.tried[0] is not txn or self.tried[1] != txn.changes or self.tried[2] is not row:
            self.tried = (txn, txn.changes, row, self._find(txn, state, row))
        return self.tried[3]

    def _find(self, txn: Txn, state: State, row: LiveJob) -> GangPlan | None:
        if any(slot.milli for slot in row.ask.shape.slots) or not row.ask.shape.gpus:
            return None
        usable = state.usable
        key = line_key(row)._replace(queue="", user="")
        if row.ask.opportunistic and state.memory.recall("cells", key, local=False):
            return None

        def allowed(node: int) -> bool:
            return bool(usable[node])

        try:
            kept = self.claimed.get(row.ask.id, ())
            asks = (gang_ask(row, kind) for kind in _members(row.ask.shape)[1])
            plans = (self.cluster.find(txn, ask, None if usable.all() else allowed, kept) for ask in asks)
            found = next((plan for plan in plans if plan is not None), None)
        except BadInput:
            return None
        if found is None and row.ask.opportunistic and not self.cluster.reserver:
            # Whose it is does not matter for work that runs on what is left.
            state.memory.learn("cells", key, Reason.NO_FREE_DEVICES, local=False)
        return found


def book_of(state: State) -> CellBook:
    """The cell book of a state, made when there is none yet."""
    for book in state.books:
        if isinstance(book, CellBook):
            return book
    made = CellBook(state)
    state.books.append(made)
    return made


def _prepare(state: State) -> None:
    book = book_of(state)
    book.follow_health(Txn(), state)
    book.forget_gone(state)


def gang_ask(row: LiveJob, kind: str | None = None) -> GangAsk:
    """The gang of a job, on devices of one kind: one member a slot with devices, ascending."""
    members, _ = _members(row.ask.shape)
    return GangAsk(
        name=row.ask.id,
        tenant=row.ask.queue,
        priority=min(row.ask.priority, PRIORITY_MAX) if row.ask.priority >= 0 else -1,
        members=members,
        kind=kind,
        pinned=row.ask.pinned or None if row.ask.priority >= 0 else None,
        lazy=row.ask.lazy,
    )


@lru_cache(maxsize=4096)
def _members(shape: Shape) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """Devices of each member, and the kinds that all of them take: None for any, nothing where they differ."""
    slots = [slot for slot in shape.joined.shape.slots if slot.gpus]
    named = [slot.types for slot in slots if slot.types]
    common = tuple(kind for kind in named[0] if all(kind in names for names in named)) if named else (None,)
    return tuple(sorted(slot.gpus for slot in slots)), common


def _members_of(row: LiveJob) -> list[tuple[int, ...]]:
    """The devices of each member of a gang that runs; what a plan ties is one member."""
    if len(row.held) != len(row.ask.shape.slots):
        return [held.devices for held in row.held]
    groups = row.ask.shape.joined.groups
    return [tuple(device for i in group for device in row.held[i].devices) for group in groups]


def _node_cell(node: Node, types: dict[str, CellType]) -> CellSpec:
    """A node as a tree of halves as long as its devices halve; nodes of one make share their kinds."""
    if not node.devices:
        return CellSpec(kind="no-device-node", address=node.id, is_node=True)
    device = node.devices[0].type

    def build(indices: Sequence[int], top: bool) -> CellSpec:
        kind = f"{device}/{len(indices)}" + ("-node" if top else "")
        if len(indices) == 1 and not top:
            return CellSpec(kind=device, address=str(indices[0]))
        if len(indices) % 2 or len(indices) == 2:
            children = tuple(CellSpec(kind=device, address=str(i)) for i in indices)
            types[kind] = CellType(child=device, count=len(indices), is_node=top)
        else:
            half = len(indices) // 2
            children = (build(indices[:half], False), build(indices[half:], False))
            types[kind] = CellType(child=children[0].kind, count=2, is_node=top)
        return CellSpec(kind=kind, address=node.id if top else "", children=children, is_node=top)

    return build([d.index for d in node.devices], True)


def _virtual_cells(state: State) -> VirtualCells:
    """The forest of the nodes and what each leaf queue owns of it.

    Of cells that are stated and are not there, as their nodes left or have not come yet, whoever owns most lacks some.
    """
    types: dict[str, CellType] = {}
    queues = [queue for row, queue in enumerate(state.queues.rows) if state.queues.leaf[row]]
    above = any(queue.pinned or any(one.level == "rack" for one in queue.cells) for queue in queues)
    pinned = {name: queue.path for queue in queues for name in queue.pinned}
    forest = _forest(state.nodes, types, pinned) if above else [_node_cell(node, types) for node in state.nodes]
    there = {spec.pinned for top in forest for spec in _inside(top) if spec.pinned}
    tenants = [replace(one, pinned=tuple(sorted(n for n in there if pinned[n] == one.name))) for one in _tenants(state)]
    owned = {queue.path: _stated_cells(queue, forest, types) for queue in queues if queue.cells}
    tenants = [replace(one, cells=owned[one.name]) if one.name in owned else one for one in tenants]

    def built(lacking: int) -> VirtualCells | TopologyError:
        try:
            return VirtualCells(forest, types, _in_chains(_without(tenants, lacking), forest, types))
        except TopologyError as error:
            return error

    # Fewer cells never fit worse, so how many are lacking is found by halving.
    cells, low, high = built(0), 1, sum(n for one in tenants for _, n in one.cells)
    if isinstance(cells, VirtualCells):
        return cells
    while low <= high:
        middle = low if low < 4 else (low + high) // 2  # mostly few are lacking
        found = built(middle)
        if isinstance(found, VirtualCells):
            cells, high = found, middle - 1
        else:
            low = middle + 1
    if isinstance(cells, TopologyError):
        raise cells
    return cells


def _forest(
    nodes: Sequence[Node], types: dict[str, CellType], pinned: Collection[str], depth: int = 0
) -> list[CellSpec]:
    """Racks of equal nodes as cells, the other nodes by themselves; ``pinned`` are names of nodes and racks."""

    def marked(cell: CellSpec) -> CellSpec:
        return replace(cell, pinned=cell.address) if cell.address in pinned else cell

    found: list[CellSpec] = []
    for name, group in groupby(nodes, key=lambda node: node.cells[depth] if len(node.cells) > depth else None):
        if name is None:
            found += (marked(_node_cell(node, types)) for node in group)
            continue
        inner = _forest(list(group), types, pinned, depth + 1)
        kinds = {cell.kind for cell in inner}
        if len(kinds) > 1 or not _size(inner[0]):
            found += inner
            continue
        kind = f"{len(inner)}*{inner[0].kind}"
        types[kind] = CellType(child=inner[0].kind, count=len(inner))
        found.append(marked(CellSpec(kind=kind, address=name, children=tuple(inner))))
    return found


def _inside(cell: CellSpec) -> Iterator[CellSpec]:
    yield cell
    for child in cell.children:
        yield from _inside(child)


def _path_to(chain: str, level: str, types: Mapping[str, CellType]) -> str | None:
    """The path in a chain to the cells of a level: ``device``, ``node``, or ``rack``, right above a node."""
    kinds = [chain]
    while (made := types.get(kinds[-1])) is not None:
        kinds.append(made.child)
    node = next((i for i, kind in enumerate(kinds) if kind in types and types[kind].is_node), len(kinds) - 1)
    at = {"device": len(kinds) - 1, "node": node, "rack": node - 1}.get(level, -1)
    return ".".join(kinds[: at + 1]) if at >= 0 else None


def _stated_cells(
    queue: Queue, forest: Sequence[CellSpec], types: Mapping[str, CellType]
) -> tuple[tuple[str, int], ...]:
    """What a queue says it owns as paths and counts: of the chain that has most cells of the level."""
    found = Counter[str]()
    for one in queue.cells:
        able = Counter[str]()
        for top in forest:
            path = _path_to(top.kind, one.level, types)
            if path is not None and one.gpu_type in (None, _kind_of(top)) and _size(top):
                able[path] += 1
        if able:
            found[max(able, key=lambda path: (able[path], path))] += one.count
    return tuple(sorted(found.items()))


def _in_chains(
    tenants: Sequence[TenantCells], forest: Sequence[CellSpec], types: Mapping[str, CellType]
) -> list[TenantCells]:
    """The same with nodes and what is in them named from the racks that they lie in."""
    tops = Counter(top.kind for top in forest)
    chain = dict[str, str]()
    for top in sorted(tops, key=lambda kind: (tops[kind], kind)):  # of a kind of node, the chain of most trees
        path = _path_to(top, "node", types)
        if path is not None:
            chain[path.rpartition(".")[2]] = path

    def named(path: str) -> str:
        first, dot, rest = path.partition(".")
        return path if first in tops else f"{chain.get(first, first)}{dot}{rest}"

    return [replace(one, cells=tuple((named(path), n) for path, n in one.cells)) for one in tenants]


def _without(tenants: Sequence[TenantCells], count: int) -> list[TenantCells]:
    """The same with this many cells less, each time one of the tenant that has most of a kind then."""
    owned = sorted(((one.name, path, n) for one in tenants for path, n in one.cells), reverse=True)
    heap = [(-n, i) for i, (*_, n) in enumerate(owned)]  # of equal ones the last in order comes first
    heapify(heap)
    for _ in range(count):
        n, i = heap[0]
        heapreplace(heap, (n + 1, i))
    left = {owned[i][:2]: -n for n, i in heap}
    return [replace(one, cells=tuple((path, left[one.name, path]) for path, _ in one.cells)) for one in tenants]


def _tenants(state: State) -> list[TenantCells]:
    """Leaf queues own the nodes that carry their label, else cells of the commonest make for what was promised.

    What is promised of one type of device is cells of nodes with that type.
    """
    tree = state.queues
    cells = [_node_cell(node, {}) for node in state.nodes if node.devices]
    owned: dict[int, Counter[str]] = {}
    typed: dict[int, Counter[str]] = {}
    for node in state.nodes:
        if node.devices and (tenant := int(state.tenant[state.node_row[node.id]])) >= 0:
            owned.setdefault(tenant, Counter())[_node_cell(node, {}).kind] += 1
    for dim in tree.device_dims if not owned else ():
        able = [cell for cell in cells if dim == GPU or _kind_of(cell) == tree.types[dim - tree.device_dims[1]]]
        promised = {row: int(tree.guaranteed[row, dim]) // 1000 for row in range(len(tree.rows)) if tree.leaf[row]}
        if able and any(promised.values()):
            kind, count = Counter(cell.kind for cell in able).most_common(1)[0]
            node_cell = next(cell for cell in able if cell.kind == kind)
            for row, gpus in _kept(promised, count, _size(node_cell)).items():
                typed[row] = typed.get(row, Counter[str]()) + _cells_of(gpus, node_cell)
    owned = owned or typed
    return [
        TenantCells(name=queue.path, cells=tuple(sorted(owned.get(row, Counter[str]()).items())))
        for row, queue in enumerate(tree.rows)
        if tree.leaf[row]
    ]


def _kept(promised: dict[int, int], nodes: int, size: int) -> dict[int, int]:
    """Devices by queue that can be kept ready on the nodes there are.

    Nodes that left for good, or have not come yet, are missing to whom most was promised.
    """
    kept = dict(promised)
    while sum(kept.values()) > nodes * size:
        row = max(kept, key=lambda row: (kept[row], row))
        kept[row] = max(0, kept[row] - size)
    return kept


def _cells_of(gpus: int, node: CellSpec) -> Counter[str]:
    """Whole nodes, and for the rest the largest cells inside a node, by their paths."""
    found, cell, path = Counter[str](), node, node.kind
    while gpus and cell.children:
        found[path], gpus = divmod(gpus, _size(cell))
        cell = cell.children[0]
        path = f"{path}.{cell.kind}"
    if gpus:
        found[path] = gpus
    return found


def _kind_of(cell: CellSpec) -> str:
    return _kind_of(cell.children[0]) if cell.children else cell.kind


def _size(cell: CellSpec) -> int:
    return sum(map(_size, cell.children)) if cell.children else 1


@dataclass(frozen=True, slots=True)
class WithinCells:
    """No queue passes its limit, and whole devices are asked, of a tenant that owns as many in its cells."""

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """As ``LimitsOnly``; then what of the shape, or of the cells of the tenant, keeps the job from its cells."""
        wait, shape = LimitsOnly().verdict(state, row), row.ask.shape
        if wait is not None:
            return wait
        if any(slot.milli for slot in shape.slots):
            return Wait(reason=Reason.TOO_LARGE, text="Cells are made of whole devices; ask for whole ones.")
        if not _members(shape)[1]:
            kinds = " and ".join(sorted({slot.type for slot in shape.slots if slot.type}))
            return Wait(reason=Reason.WRONG_TYPE, text=f"Cells have devices of one type; the roles ask {kinds}.")
        pinned = state.queues.rows[state.queues.row[row.ask.queue]].pinned
        if row.ask.pinned and row.ask.pinned not in pinned:
            return Wait(
                reason=Reason.GUARANTEE_FULL_NO_BORROW,
                text=f"Queue {row.ask.queue} has no pinned cell {row.ask.pinned}; "
                f"label {CELL_LABEL}: {nearest(row.ask.pinned, pinned, 'pinned cells')}.",
                fields={"queue": row.ask.queue},
            )
        owned = book_of(state).owned.get(row.ask.queue, 0)
        if row.ask.opportunistic or shape.gpus <= owned:
            return None
        return Wait(
            reason=Reason.GUARANTEE_FULL_NO_BORROW,
            text=f"Queue {row.ask.queue} is promised cells of {owned} GPUs in all, the job asks {shape.gpus}; "
            "work of a priority below 0 runs beyond them.",
            fields={"queue": row.ask.queue},
        )


@dataclass(frozen=True, slots=True)
class ByCells:
    """Guaranteed jobs in their tenant's cells, opportunistic ones packed on what is left."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place in free cells; None if none is free, or only once others have left theirs."""
        if not row.ask.shape.gpus:
            return place(state, txn, row.ask.shape)
        book = book_of(state)
        plan = book.find(txn, state, row)
        if plan is None or plan.victims:
            return None
        found = held_of(state, txn, book, row.ask.shape.joined.shape, plan)
        return None if found is None else parted(row.ask.shape, found)


def held_of(state: State, txn: Txn, book: CellBook, shape: Shape, plan: GangPlan) -> Allocations | None:
    """The plan as holdings in slot order, slots without devices around them; None if anything beside is short.

    The shape has no tied groups.
    """
    order = sorted((i for i, slot in enumerate(shape.slots) if slot.gpus), key=lambda i: (shape.slots[i].gpus, i))
    found: dict[int, Allocation] = {}
    cpu: Counter[int] = Counter()
    mem: Counter[int] = Counter()
    for i, leaves in zip(order, plan.leaves):
        slot = shape.slots[i]
        devices = tuple(sorted(book.row[leaf] for leaf in leaves))
        node = int(state.dev_node[devices[0]])
        cpu[node] += slot.cpu_milli
        mem[node] += slot.mem
        found[i] = Allocation(node, devices, 0, slot.cpu_milli, slot.mem)
    if any(cpu[n] > state.cpu[n] or mem[n] > state.mem[n] for n in cpu):
        return None
    if len(found) < len(shape.slots) or shape.together or shape.apart:
        return place(state, txn, shape, placed=found)
    return tuple(found[i] for i in range(len(shape.slots)))


@dataclass(frozen=True, slots=True)
class CellVictims:
    """Jobs that run on the cells that a guaranteed job is entitled to; at a limit, lower priority of its queue."""

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """Those that run in the cells, with device-seconds since their last commit; None if there are none."""
        plan = book_of(state).find(txn, state, row)
        names = [] if plan is None else [JobId(name) for name in plan.victims]
        if self._over_limit_without(state, txn, row, names):
            lower = [(other, Reason.PREEMPTED_PRIORITY) for other in lower_in_queue(state, row, now)]
            return choose_victims(state, txn, row, placer, lower, now) if lower else None
        found: list[Victim] = []
        for victim in (state.jobs[name] for name in names):
            if victim.phase != "stopping":
                reason = Reason.PREEMPTED_RECLAIM if victim.ask.opportunistic else Reason.PREEMPTED_PRIORITY
                lost = (now - victim.saved_at) * victim.ask.shape.gpus
                found.append(Victim(job=victim.ask.id, reason=reason, lost_gpu_s=lost))
        return tuple(found) or None

    def _over_limit_without(self, state: State, txn: Txn, row: LiveJob, jobs: Sequence[JobId]) -> bool:
        """Whether a job would pass a limit also once these have let go."""
        if not state.over_limit(row.ask.queue, row.ask.user, row.ask.shape):
            return False
        with txn.trial():
            for job in jobs:
                state.charge(txn, state.jobs[job], -1)
            return state.over_limit(row.ask.queue, row.ask.user, row.ask.shape) is not None


def hived() -> Profile:
    """Cells promised to tenants; strict order inside a tenant as in a private cluster."""
    return Profile(
        name="hived",
        order=ByArrival(),
        division=WithinCells(),
        placer=ByCells(),
        victims=CellVictims(),
        block="queue",
        prepare=_prepare,
        local=True,
    )
