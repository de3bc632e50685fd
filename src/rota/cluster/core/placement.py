"""Placement of a gang on devices: pack, spread, topology; all slots of a job or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.jobs import Allocation, Allocations, Shape, Slot, asked
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.gang import CellLevel

TRIES_MAX = 20_000
"""Slots that one exact search may try before it gives up; small gangs never come near."""
DOMAINS_MAX = 8
"""Enclosing cells that are tried for a whole gang before it is laid over the cluster."""

FARTHER = 2**32
"""More than any preference among nodes amounts to."""

Preference = Callable[[State, NDArray[np.int32]], NDArray[np.int64]]
"""Cost of each of these node rows for one slot; the lowest is taken, ties go to the lowest row."""
Manner = Literal["pack", "spread"]
Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]


def best_fit(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Fullest node first."""
    return free_of(state.free)[nodes].astype(np.int64)


def free_of(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Devices of any type per node; where there is one type only, its column, as a sum takes far longer."""
    return counts[:, 0] if counts.shape[1] == 1 else counts.sum(axis=1)


def spread(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Emptiest node first."""
    return -best_fit(state, nodes)


PREFERENCES: dict[Manner, Preference] = {"pack": best_fit, "spread": spread}


def near_data(prefer: Preference, holds: Mask) -> Preference:
    """Nodes that hold the data of a job first, each group in the given order."""

    def cost(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
        return prefer(state, nodes) + np.where(holds[nodes], 0, FARTHER)

    return cost


def place(
    state: State,
    txn: Txn,
    shape: Shape,
    *,
    prefer: Preference = best_fit,
    allowed: Mask | None = None,
    close: bool = True,
    placed: Mapping[int, Allocation] | None = None,
) -> Allocations | None:
    """Find a slot holding for every slot of the shape at once, or None; the state is as before either way.

    With ``close`` one enclosing cell is tried first (fewest free devices), then the whole cluster. Deterministic.
    Exact for uniform gangs, and for others as long as the search stays under ``TRIES_MAX`` slots. Slots of a shape
    without tied groups that are ``placed`` already lie there, and the others are found around them. With ``close``
    equal slots come in the order of cells, so that neighbours in a mesh are close and its outer axes cross racks.
    """
    if shape.closest is not None:
        found = place(state, txn, shape.closest, prefer=prefer, allowed=allowed, close=close)
        if found is not None:
            return found
    if shape.tied:
        found = place(state, txn, shape.joined.shape, prefer=prefer, allowed=allowed, close=close)
        return None if found is None else parted(shape, found)
    mask = state.usable if allowed is None else state.usable & allowed
    if placed:
        return _search(state, txn, shape, prefer, mask, placed)
    if shape.uniform and shape.slots[0].gpus:
        room = slots_that_fit(state, shape.slots[0], mask)
        if not enough(room, len(shape.slots)):
            return None
        for part in _domains(state, shape, mask) if close else ():
            if enough(within := room * part, len(shape.slots)):
                return _in_cell_order(state, _place_uniform(state, txn, shape, prefer, within))
        found = _place_uniform(state, txn, shape, prefer, room)
        return _in_cell_order(state, found) if close else found
    for part in _domains(state, shape, mask) if close else ():
        found = _search(state, txn, shape, prefer, part, {})
        if found is not None:
            return found
    return _search(state, txn, shape, prefer, mask, {})


def parted(shape: Shape, found: Sequence[Allocation]) -> Allocations:
    """What the slots of ``shape.joined`` hold, as holdings of the slots of the shape."""
    parts: dict[int, Allocation] = {}
    for group, held in zip(shape.joined.groups, found, strict=True):
        devices = list(held.devices)
        for i in group:
            count = shape.slots[i].gpus if len(group) > 1 else len(devices)
            parts[i] = asked(shape.slots[i], held.node, tuple(devices[:count]))
            del devices[:count]
    return tuple(parts[i] for i in range(len(shape.slots)))


def _domains(state: State, shape: Shape, mask: Mask) -> Iterator[Mask]:
    """Enclosing cells that could hold the whole gang, tightest first."""
    if len(shape.slots) == 1:
        return
    totals = np.bincount(state.domain, weights=free_of(state.free) * mask)
    if len(totals) == 1:
        return
    able = np.flatnonzero(totals >= sum(slot.gpus for slot in shape.slots))
    for i in able[np.argsort(totals[able], kind="stable")][:DOMAINS_MAX]:
        yield mask & (state.domain == i)


def _search(
    state: State, txn: Txn, shape: Shape, prefer: Preference, mask: Mask, placed: Mapping[int, Allocation]
) -> Allocations | None:
    found = None
    for exact in (False, True) if len(shape.slots) > 1 else (False,):
        with txn.trial():
            found = found or _SlotSearch(state, txn, shape, prefer, mask, exact=exact).run(placed)
    return found


def slots_that_fit(state: State, slot: Slot, mask: Mask) -> NDArray[np.int64]:
    """Per node, how many such slots of whole devices fit now."""
    free = state.free if slot.type is None else state.free[:, state.type_rows(slot.type)]
    room = free_of(free if slot.gpus <= 1 else free // slot.gpus)
    if slot.cpu_milli:
        room = np.minimum(room, state.cpu // slot.cpu_milli)
    if slot.mem:
        room = np.minimum(room, state.mem // slot.mem)
    if slot.cpu_milli or slot.mem:  # a node that came back smaller has less than nothing left
        room = np.maximum(room, 0)
    return cast("Rows", room * mask)


def enough(room: Rows, count: int) -> bool:
    """Whether ``count`` slots fit in all; for a full cluster, where none fits anywhere, the answer is immediate."""
    nodes = room.nonzero()[0]
    return len(nodes) >= count or int(room[nodes].sum()) >= count


def _place_uniform(state: State, txn: Txn, shape: Shape, prefer: Preference, room: Rows) -> Allocations:
    """Equal slots one by one; ``room`` has per node how many fit, enough in all, and is used up."""
    slot, count = shape.slots[0], len(shape.slots)
    found: list[Allocation] = []
    with txn.trial():
        while len(found) < count:
            nodes = room.nonzero()[0].astype(np.int32)
            node = int(nodes[prefer(state, nodes).argmin()])
            held = asked(slot, node, next(_whole_devices(state, slot, node)))
            found.append(held)
            if len(found) < count:
                state.take(txn, held, 1)
                room[node] -= 1
    return tuple(found)


def _in_cell_order(state: State, found: Sequence[Allocation]) -> Allocations:
    return tuple(sorted(found, key=lambda held: (int(state.domain[held.node]), held.node, held.devices)))


def _whole_devices(state: State, slot: Slot, node: int) -> Iterator[tuple[int, ...]]:
    """Choices of free devices of one type for a slot, the tightest socket that holds them all first."""
    first, end = int(state.dev0[node]), int(state.dev0[node + 1])
    # A node has few devices: lists are quicker here than arrays.
    milli, health = state.dev_milli[first:end].tolist(), state.dev_health[first:end].tolist()
    types, places = state.dev_type[first:end].tolist(), state.dev_socket[first:end].tolist()
    for kind in state.type_rows(slot.type):
        free = [i for i in range(end - first) if milli[i] == 1000 and not health[i] and types[i] == kind]
        if len(free) < slot.gpus:
            continue
        if places[0] == places[-1]:
            yield tuple(first + i for i in free[: slot.gpus])
            continue
        sockets: dict[int, list[int]] = {}
        for i in free:
            sockets.setdefault(places[i], []).append(first + i)
        for socket in sorted(sockets, key=lambda socket: (len(sockets[socket]), socket)):
            if len(sockets[socket]) >= slot.gpus:
                yield tuple(sockets[socket][: slot.gpus])
        if len(sockets) > 1:
            yield tuple(first + i for i in free[: slot.gpus])


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a slot could lie, and the cells that count for constraints."""

    held: Allocation
    cells: dict[CellLevel, tuple[int, ...]]


class _SlotSearch:
    """Depth-first over slots, biggest and most bound first. ``exact`` goes back on failure; else the first way only."""

    def __init__(self, state: State, txn: Txn, shape: Shape, prefer: Preference, mask: Mask, *, exact: bool) -> None:
        self.state, self.txn, self.shape, self.prefer, self.mask, self.exact = state, txn, shape, prefer, mask, exact
        self.tries = 0
        self.spots: dict[int, _Spot] = {}
        self.together: dict[int, list[tuple[tuple[int, ...], CellLevel]]] = defaultdict(list)
        self.apart: dict[int, list[tuple[frozenset[int], CellLevel]]] = defaultdict(list)
        for group, level in shape.together:
            for i in group:
                self.together[i].append((group, level))
        for left, right, level in shape.apart:
            for i in left:
                self.apart[i].append((frozenset(right) - {i}, level))
            for i in right:
                self.apart[i].append((frozenset(left) - {i}, level))
        self.bound = {i: self._bonds(i) for i in range(len(shape.slots))}
        self.order = sorted(range(len(shape.slots)), key=self._weight)

    def _bonds(self, i: int) -> tuple[object, ...]:
        return (tuple(self.together[i]), tuple((others | {i}, level) for others, level in self.apart[i]))

    def _weight(self, i: int) -> tuple[object, ...]:
        slot = self.shape.slots[i]
        group = sum(self.shape.slots[j].gpus for members, _ in self.together[i] for j in members)
        return (-group, -slot.gpus, -slot.milli, -slot.cpu_milli, -slot.mem, i)

    def run(self, placed: Mapping[int, Allocation]) -> Allocations | None:
        """The holdings in slot order, or None. Leaves its trial writes to the caller's scope."""
        for i, held in placed.items():
            spot = self._spot(held)
            if not self._keeps_bonds(i, spot) or self.state.cpu[held.node] < held.cpu_milli:
                return None
            if self.state.mem[held.node] < held.mem:
                return None
            self.state.take(self.txn, held, 1)
            self.spots[i] = spot
        self.order = [i for i in self.order if i not in placed]
        if not self._descend(0, -1):
            return None
        return tuple(self.spots[i].held for i in range(len(self.shape.slots)))

    def _descend(self, depth: int, floor: int) -> bool:
        if depth == len(self.order):
            return True
        i = self.order[depth]
        for spot in self._choices(i, floor):
            self.tries += 1
            if self.tries > TRIES_MAX:
                return False
            self.spots[i] = spot
            mark = self.txn.changes
            self.state.take(self.txn, spot.held, 1)
            twin = depth + 1 < len(self.order) and self._twins(i, self.order[depth + 1])
            if self._descend(depth + 1, spot.held.node if self.exact and twin else -1):
                return True
            self.txn.undo(mark)
            del self.spots[i]
            if not self.exact:
                return False
        return False

    def _twins(self, i: int, j: int) -> bool:
        return self.shape.slots[i] == self.shape.slots[j] and self.bound[i] == self.bound[j]

    def _choices(self, i: int, floor: int) -> Iterator[_Spot]:
        """Allowed spots, preferred nodes first; of nodes that are alike in everything only the first."""
        slot, state = self.shape.slots[i], self.state
        nodes = np.flatnonzero(self._candidate_nodes(i)).astype(np.int32)
        nodes = nodes[nodes >= floor]
        seen: set[object] = set()
        touched = {spot.held.node for spot in self.spots.values()}
        for node in nodes[np.argsort(self.prefer(state, nodes), kind="stable")]:
            row = int(node)
            if row not in touched:
                looks = self._looks(row)
                if looks in seen:
                    continue
                seen.add(looks)
            for devices in _device_choices(state, slot, row):
                spot = self._spot(asked(slot, row, devices))
                if self._keeps_bonds(i, spot):
                    yield spot

    def _looks(self, node: int) -> tuple[object, ...]:
        """Nodes with equal looks are interchangeable for this gang."""
        state = self.state
        rows = slice(int(state.dev0[node]), int(state.dev0[node + 1]))
        devices = tuple(
            zip(
                state.dev_type[rows].tolist(),
                state.dev_milli[rows].tolist(),
                state.dev_health[rows].tolist(),
                (state.dev_socket[rows] - state.dev_socket[rows][:1]).tolist(),
            )
        )
        return (int(state.cpu[node]), int(state.mem[node]), int(state.domain[node]), devices)

    def _candidate_nodes(self, i: int) -> Mask:
        slot, state = self.shape.slots[i], self.state
        mask = self.mask & (state.cpu >= slot.cpu_milli) & (state.mem >= slot.mem)
        if slot.gpus:
            types = state.type_rows(slot.type)
            mask = mask & (state.free[:, types] >= slot.gpus).any(axis=1)
        for group, level in self.together[i]:
            mask = mask & self._room_for_group(group, level)
        return mask

    def _room_for_group(self, group: tuple[int, ...], level: CellLevel) -> Mask:
        """Nodes in the cell that placed members share, or in cells with enough free devices for those that remain."""
        state = self.state
        cells = state.domain if level == "rack" else np.arange(len(state.nodes), dtype=np.int32)
        placed = [self.spots[j] for j in group if j in self.spots]
        if placed:
            return cells == cells[placed[0].held.node]
        wanted = sum(self.shape.slots[j].gpus for j in group)
        free = free_of(state.free) * self.mask
        totals = np.bincount(cells, weights=free, minlength=int(cells.max(initial=0)) + 1)
        return totals[cells] >= wanted

    def _spot(self, held: Allocation) -> _Spot:
        state = self.state
        sockets = tuple(sorted({int(state.dev_socket[d]) for d in held.devices}))
        return _Spot(
            held,
            {
                "device": held.devices,
                "socket": sockets or (-1 - held.node,),
                "node": (held.node,),
                "rack": (int(state.domain[held.node]),),
            },
        )

    def _keeps_bonds(self, i: int, spot: _Spot) -> bool:
        for group, level in self.together[i]:
            for j in group:
                if j in self.spots and not _close(self.spots[j], spot, level):
                    return False
            if level == "socket" and len(spot.cells["socket"]) > 1:
                return False
        for others, level in self.apart[i]:
            for j in others:
                if j in self.spots and set(self.spots[j].cells[level]) & set(spot.cells[level]):
                    return False
        return True


def _close(one: _Spot, other: _Spot, level: CellLevel) -> bool:
    """True when both lie in one cell of the level; slots without devices are close to all of their node below it."""
    if one.held.node != other.held.node and level != "rack":
        return False
    if level in ("device", "socket") and not (one.held.devices and other.held.devices):
        return True
    return set(one.cells[level]) == set(other.cells[level])


def _device_choices(state: State, slot: Slot, node: int) -> Iterator[tuple[int, ...]]:
    """Device rows that could serve a slot on a node, one choice of each distinct kind."""
    if slot.gpus:
        yield from _whole_devices(state, slot, node)
    elif slot.milli:
        rows: Rows = np.arange(int(state.dev0[node]), int(state.dev0[node + 1]))
        types = state.type_rows(slot.type)
        fits = (state.dev_milli[rows] >= slot.milli) & (state.dev_health[rows] == 0)
        able = rows[fits & np.isin(state.dev_type[rows], types)]
        for dev in able[np.argsort(state.dev_milli[able], kind="stable")]:
            yield (int(dev),)
    else:
        yield ()
