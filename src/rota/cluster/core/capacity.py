"""Capacity: the tree of cells, the tree of queues, and refusals that hold until something is given back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.jobs import Shape
from rota.spec.errors import nearest
from rota.spec.queue import DEFAULT_QUEUE, Queue
from rota.spec.resources import SOCKETS_LABEL, Node, Res

Int = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """One cell as configured: its kind, address, and the cells inside it (none for a device)."""

    kind: str
    address: str
    children: tuple[CellSpec, ...] = ()
    is_node: bool = False
    pinned: str = ""
    """Identifier by which a tenant may own exactly this cell."""


class Cells:
    """A forest of cells in configuration order; rows never move.

    ``level`` is the height above the devices (a device is level 1). The devices (leaves) of cell ``c`` are the leaf
    numbers ``leaf0[c]:leaf1[c]``, ``size[c]`` of them.
    ``node`` is the row, among cells that are nodes, of the node around a cell; -1 above.
    """

    def __init__(self, forest: Iterable[CellSpec]) -> None:
        self.specs: list[CellSpec] = []
        parent: list[int] = []
        node: list[int] = []
        leaf0: list[int] = []
        leaf1: list[int] = []
        level: list[int] = []
        self.children: list[list[int]] = []
        self.roots: list[int] = []
        self.node_cells: list[int] = []
        self.leaf_cells: list[int] = []

        def add(spec: CellSpec, above: int, in_node: int) -> int:
            row = len(self.specs)
            if spec.is_node:
                in_node = len(self.node_cells)
                self.node_cells.append(row)
            self.specs.append(spec)
            parent.append(above)
            node.append(in_node)
            leaf0.append(len(self.leaf_cells))
            leaf1.append(0)
            level.append(1)
            self.children.append([])
            if not spec.children and not spec.is_node:
                self.leaf_cells.append(row)
            for child in spec.children:
                below = add(child, row, in_node)
                self.children[row].append(below)
                level[row] = max(level[row], level[below] + 1)
            leaf1[row] = len(self.leaf_cells)
            return row

        for spec in forest:
            self.roots.append(add(spec, -1, -1))
        self.parent: Int = np.array(parent, dtype=np.int32)
        self.node: Int = np.array(node, dtype=np.int32)
        self.leaf0: Int = np.array(leaf0, dtype=np.int32)
        self.leaf1: Int = np.array(leaf1, dtype=np.int32)
        self.level: Int = np.array(level, dtype=np.int32)
        self.size: list[int] = [end - start for start, end in zip(leaf0, leaf1)]

    def __len__(self) -> int:
        return len(self.specs)

    def ancestors(self, row: int) -> list[int]:
        """The cell itself, then each enclosing one."""
        found: list[int] = []
        while row >= 0:
            found.append(row)
            row = int(self.parent[row])
        return found

    def domain_of_nodes(self) -> Int:
        """Per node, the cell right above it; the node's own cell when nothing encloses it."""
        return np.array([self.parent[c] if self.parent[c] >= 0 else c for c in self.node_cells], dtype=np.int32)

    def socket_of_leaves(self) -> Int:
        """Per leaf, the cell right above it: a socket, or the node itself."""
        return np.array([self.parent[c] for c in self.leaf_cells], dtype=np.int32)


def in_cell_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with those of one cell side by side; cells and nodes else in the order given."""
    first: dict[tuple[str, ...], int] = {}
    for position, node in enumerate(nodes):
        for depth in range(len(node.cells) + 1):
            first.setdefault(node.cells[:depth], position)
    keys = {node.id: tuple(first[node.cells[:d]] for d in range(len(node.cells) + 1)) for node in nodes}
    return tuple(sorted(nodes, key=lambda node: keys[node.id]))


def forest_of(nodes: Sequence[Node]) -> tuple[CellSpec, ...]:
    """The cell forest of nodes that are in cell order: enclosing cells, nodes, sockets if labelled, devices."""

    def build(members: Sequence[Node], depth: int) -> tuple[CellSpec, ...]:
        cells: list[CellSpec] = []
        for name, group in groupby(members, key=lambda n: n.cells[depth] if len(n.cells) > depth else None):
            if name is None:
                cells.extend(_node_cell(node) for node in group)
            else:
                cells.append(CellSpec(kind="rack", address=name, children=build(list(group), depth + 1)))
        return tuple(cells)

    return build(nodes, 0)


def _node_cell(node: Node) -> CellSpec:
    devices = tuple(CellSpec(kind=device.type, address=str(device.index)) for device in node.devices)
    sockets = int(dict(node.labels).get(SOCKETS_LABEL, "1"))
    if sockets > 1 and len(devices) % sockets == 0:
        size = len(devices) // sockets
        devices = tuple(
            CellSpec(kind="socket", address=str(i), children=devices[i * size : (i + 1) * size]) for i in range(sockets)
        )
    return CellSpec(kind="node", address=node.id, children=devices, is_node=True)


Vector = NDArray[np.int64]
UNLIMITED = np.int64(2**62)
GPU, CPU, MEM = 0, 1, 2
"""Dimensions of every quota vector: thousandths of devices of any type, thousandths of cores, bytes; then one dimension
a device type in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimit:
    """The queue and dimension that stop a start, with what is used, asked and allowed; of a ``user`` there, if any."""

    queue: str
    dim: str
    used: int
    asked: int
    allowed: int
    user: str | None = None


class QueueTable:
    """The queues in rows, parents included, sorted by path; a queue that is only named as a parent promises nothing.

    In a guarantee or limit a dimension of zero is "not stated". ``born`` has per row its place in the order given.
    """

    def __init__(self, queues: Sequence[Queue], types: Sequence[str]) -> None:
        given = {queue.path: queue for queue in queues}
        born: dict[str, int] = {}
        if not given:
            given = {DEFAULT_QUEUE: Queue(path=DEFAULT_QUEUE)}
        for position, path in enumerate(list(given)):
            born.setdefault(path, position)
            while (parent := path.rpartition("/")[0]) and parent not in given:
                given[parent] = Queue(path=parent)
                born[parent] = position
                path = parent
        self.rows: tuple[Queue, ...] = tuple(given[path] for path in sorted(given))
        self.row: dict[str, int] = {queue.path: i for i, queue in enumerate(self.rows)}
        self.born: list[int] = [born[queue.path] for queue in self.rows]
        self.types: tuple[str, ...] = tuple(types)
        self.dims: tuple[str, ...] = ("gpu", "cpu", "mem", *(f"gpu:{t}" for t in types))
        self._needs: dict[Shape, Vector] = {}
        self.line: list[list[int]] = [self._line(queue.path) for queue in self.rows]
        self.guaranteed: Vector = np.array([self._vector(q.guaranteed, 0) for q in self.rows], dtype=np.int64)
        self.limit: Vector = np.array([self._vector(q.limit, int(UNLIMITED)) for q in self.rows], dtype=np.int64)
        self.user_limit: Vector = np.array([self._vector(q.user_limit, int(UNLIMITED)) for q in self.rows], np.int64)
        self.limited: list[bool] = [bool(row.any()) for row in self.limit < UNLIMITED]
        self.by_user = [q.min_user_percent is not None or q.user_limit_factor is not None for q in self.rows]
        self.user_limited: list[bool] = [
            bool(row.any()) or divided for row, divided in zip(self.user_limit < UNLIMITED, self.by_user)
        ]
        self.limits_users = {q.path for q, line in zip(self.rows, self.line) if any(self.user_limited[i] for i in line)}
        self.unlimited = not any(self.limited) and not any(self.user_limited)
        self.leaf = np.array([not any(q.parent == r.path for q in self.rows) for r in self.rows])
        self.lendable: list[int] = self.guaranteed[self.leaf].sum(axis=0).tolist()
        self.below = [[i for i, q in enumerate(self.rows) if q.parent == r.path] for r in self.rows]
        self.device_dims = [GPU, *range(3, len(self.dims))]
        self.promises: list[bool] = [bool(row.any()) for row in self.guaranteed[:, self.device_dims]]
        self.promises_types = bool(self.guaranteed[:, 3:].any())
        self.promised: list[list[int]] = self.guaranteed[:, self.device_dims].tolist()
        self._devices: dict[Shape, tuple[int, ...]] = {}

    def _line(self, path: str) -> list[int]:
        line: list[int] = []
        while path:
            line.append(self.row[path])
            path = path.rpartition("/")[0]
        return line

    def line_of(self, path: str) -> list[int]:
        """Rows of the queue and of all above it; nothing for a queue that does not exist (any more)."""
        return self.line[self.row[path]] if path in self.row else []

    def holds_back(self, path: str) -> Queue | None:
        """The first queue from this one up whose own state lets no job start; None where all may."""
        return next((self.rows[row] for row in self.line_of(path) if not self.rows[row].starts_jobs), None)

    def gives_back(self, path: str) -> bool:
        """Whether jobs of a queue may be stopped for those of another: it and all above it are preemptible."""
        return all(self.rows[row].preemptible for row in self.line_of(path))

    def divided_by_user(self, path: str) -> bool:
        """Whether a queue says how much of it each of its users may have."""
        return path in self.row and self.by_user[self.row[path]]

    def _vector(self, res: Res | None, empty: int) -> list[int]:
        values = [empty] * len(self.dims)
        if res is None:
            return values
        stated = [(CPU, round(res.cpus * 1000)), (MEM, res.memory_bytes)]
        gpu = GPU if res.gpu_type is None else self._type_dim(res.gpu_type)
        stated += [(gpu, round(res.gpus * 1000))] if gpu is not None else []
        for dim, value in stated:
            if value > 0:
                values[dim] = value
        return values

    def _type_dim(self, name: str) -> int | None:
        return 3 + self.types.index(name) if name in self.types else None

    def devices(self, shape: Shape) -> tuple[int, ...]:
        """Thousandths of devices of a shape: in all, then, where a type is promised, by type."""
        if not self.promises_types:
            return (shape.gpu_milli,)
        known = self._devices.get(shape)
        if known is None:
            known = self._devices[shape] = tuple(self.need(shape)[self.device_dims].tolist())
        return known

    def need(self, shape: Shape) -> Vector:
        """The quota vector of a shape. Devices of any type, or of one of several, count in the sum over types only."""
        known = self._needs.get(shape)
        if known is None:
            known = self._needs[shape] = self._need(shape)
        return known

    def _need(self, shape: Shape) -> Vector:
        vector = np.zeros(len(self.dims), dtype=np.int64)
        for slot in shape.slots:
            milli = slot.gpus * 1000 + slot.milli
            vector[GPU] += milli
            vector[CPU] += slot.cpu_milli
            vector[MEM] += slot.mem
            if slot.type is not None and (dim := self._type_dim(slot.type)) is not None:
                vector[dim] += milli
        return vector

    def over_limit(
        self, used: Vector, by_user: Mapping[tuple[int, str], Vector], path: str, user: str, need: Vector
    ) -> OverLimit | None:
        """The first limit from the leaf up that ``need`` would pass, or None: of a queue, then of the user in one."""
        if self.unlimited:
            return None
        line = self.line_of(path)
        limits = [(row, used[row], self.limit[row], None) for row in line if self.limited[row]]
        nothing = np.zeros_like(need)
        limits += [
            (row, by_user.get((row, user), nothing), self.user_limit[row], user)
            for row in line
            if self.user_limited[row]
        ]
        for row, has, limit, whose in limits:
            over = np.flatnonzero((has + need > limit) & (need > 0))
            if len(over):
                dim = int(over[0])
                return OverLimit(
                    queue=self.rows[row].path,
                    dim=self.dims[dim],
                    used=int(has[dim]),
                    asked=int(need[dim]),
                    allowed=int(limit[dim]),
                    user=whose,
                )
        return None

    def passed(self, used: Vector, by_user: Mapping[tuple[int, str], Vector]) -> list[OverLimit]:
        """Limits that are below what is in use, as one that was lowered may be: of queues, then of users in them."""
        rows = [(row, has, self.limit[row], None) for row, has in enumerate(used)]
        rows += [(row, by_user[row, user], self.user_limit[row], user) for row, user in sorted(by_user)]
        return [
            OverLimit(
                queue=self.rows[row].path,
                dim=self.dims[dim],
                used=int(has[dim]),
                asked=0,
                allowed=int(limit[dim]),
                user=user,
            )
            for row, has, limit, user in rows
            for dim in np.flatnonzero(has > limit).tolist()
        ]

    def leaves_under(self, path: str) -> list[str]:
        """Paths of the leaves below a queue."""
        return [q.path for i, q in enumerate(self.rows) if self.leaf[i] and q.path.startswith(f"{path}/")]

    def find_problem(self, path: str) -> str | None:
        """Why no job may be submitted to this queue, and what to use; None where it may."""
        if path not in self.row:
            return f"queue {path!r} does not exist; {nearest(path, self.row, 'queues')}"
        if not self.leaf[self.row[path]]:
            return f"{path!r} is not a leaf of the queue tree; jobs go to {', '.join(self.leaves_under(path))}"
        return None
