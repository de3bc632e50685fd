"""The cell tree: one numpy row per cell, the devices of a cell side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rota.spec.resources import Node

SOCKETS_LABEL = "rota.sockets"
"""Node label: into how many equal sockets the devices of the node fall; 1 if absent."""

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
